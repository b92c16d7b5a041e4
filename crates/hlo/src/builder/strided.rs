//! Values as strided views of earlier ones: what a library can read in place, and a compiler would copy.

use super::Builder;
use crate::ir::{Arena, Def, Op, Value};
use crate::types::Dims;
use smallvec::SmallVec;

/// A value as a strided view: its element `i` is element `offset + sum(i[d] * strides[d])` of `base`, counted in
/// row-major order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Strided {
    /// What it is a view of; the value itself if nothing else is.
    pub base: Value,
    /// Where the first element is.
    pub offset: i64,
    /// One for each dimension of the value; 0 where it was broadcast.
    pub strides: Dims,
}

/// A run of equally spaced elements; a dimension is one, or several, outermost first.
#[derive(Clone, Copy, Debug)]
struct Run {
    size: i64,
    stride: i64,
}

type Runs = SmallVec<[Run; 2]>;

/// A view on its way back through the ops that made it: a list of runs for each dimension.
pub(super) struct Walk {
    pub(super) base: Value,
    pub(super) offset: i64,
    dims: Vec<Runs>,
    /// The value of another type that was passed: what is behind it has as many elements.
    converted: Option<Value>,
    /// Whether those are in another order.
    reordered: bool,
    /// The dynamic slice that was passed, from whose start the offset is then.
    pub(super) slice: Option<Value>,
}

impl Builder {
    /// The value as a view of itself.
    pub fn unviewed(&self, value: Value) -> Strided {
        Strided { base: value, offset: 0, strides: row_major(&self.shape(value)) }
    }

    /// Looks through transposes, slices, reshapes and broadcasts for the value whose elements these are. A transposed value
    /// that was converted is converted as it was before: quantized weights are, on their way to a product.
    pub fn strided(&self, value: Value) -> Strided {
        let (found, converted) = self.walk(value);
        match converted {
            Some(to) => Strided { base: self.convert(found.base, self.dtype(to)), ..found },
            None => found,
        }
    }

    fn walk(&self, value: Value) -> (Strided, Option<Value>) {
        let inner = self.inner.borrow();
        let shape = self.shape(value);
        let mut walk = Walk::begin(value, &shape);
        let mut found = (Strided { base: value, offset: 0, strides: row_major(&shape) }, None);
        if shape.contains(&0) {
            return found;
        }
        while let Some(next) = walk.step(&inner.arena) {
            walk = next;
            if inner.visible(walk.base).is_err() {
                break;
            }
            // A conversion alone would be the same again.
            if (walk.converted.is_none() || walk.reordered)
                && let Some(strides) = walk.strides()
            {
                found = (Strided { base: walk.base, offset: walk.offset, strides }, walk.converted);
            }
        }
        found
    }
}

pub(super) fn row_major(shape: &[i64]) -> Dims {
    let mut strides = Dims::from_elem(1, shape.len());
    for d in (1..shape.len()).rev() {
        strides[d - 1] = strides[d] * shape[d].max(1);
    }
    strides
}

impl Walk {
    /// The view of a value of this shape that is all of it.
    pub(super) fn begin(value: Value, shape: &[i64]) -> Walk {
        let runs = |(&size, stride): (&i64, i64)| SmallVec::from_elem(Run { size, stride }, 1);
        let dims = shape.iter().zip(row_major(shape)).map(runs).collect();
        Walk { base: value, offset: 0, dims, converted: None, reordered: false, slice: None }
    }

    /// One stride for each dimension, if there is; sizes of 1 get the one that row-major order would give them.
    pub(super) fn strides(&self) -> Option<Dims> {
        let mut strides = Dims::from_elem(1, self.dims.len());
        let mut next = 1;
        for (d, runs) in self.dims.iter().enumerate().rev() {
            let real: Runs = runs.iter().copied().filter(|r| r.size != 1).collect();
            if real.windows(2).any(|w| w[0].stride != w[1].size * w[1].stride) {
                return None;
            }
            let size: i64 = real.iter().map(|r| r.size).product();
            strides[d] = real.last().map_or(next, |r| r.stride);
            next = (strides[d] * size).max(1);
        }
        Some(strides)
    }

    /// The same view of the operand of the op that made the base.
    fn step(&self, arena: &Arena) -> Option<Walk> {
        let Def::Op(op) = arena.values[self.base.0 as usize].def else { return None };
        let op = &arena.ops[op as usize];
        let &[from] = op.operands.as_slice() else { return None };
        let shape = &arena.ty(self.base).shape;
        let steps = row_major(&arena.ty(from).shape);
        // Where each dimension of the base begins in the operand, and how far apart its elements are there.
        let places: SmallVec<[(i64, i64); 6]> = match &op.op {
            Op::Reshape => return Some(Walk { base: from, dims: self.dims.clone(), ..*self }),
            Op::Convert if self.converted.is_none() => {
                let converted = Some(self.base);
                return Some(Walk { base: from, dims: self.dims.clone(), converted, ..*self });
            }
            Op::Slice(_) | Op::BroadcastInDim(_) if self.converted.is_some() => return None,
            Op::Transpose(order) => order.iter().map(|&d| (0, steps[d as usize])).collect(),
            Op::Slice(s) => {
                let dims = s.start.iter().zip(&s.strides).zip(&steps);
                dims.map(|((&start, &by), &step)| (start * step, by * step)).collect()
            }
            Op::BroadcastInDim(dims) => {
                let source = |d: usize| dims.iter().position(|&to| to as usize == d);
                let stretched = |i: usize| arena.ty(from).shape[i] == 1;
                let step = |d: usize| source(d).filter(|&i| !stretched(i)).map_or(0, |i| steps[i]);
                (0..shape.len()).map(|d| (0, step(d))).collect()
            }
            _ => return None,
        };
        let reordered = self.reordered || self.converted.is_some();
        Some(Walk { reordered, ..self.through(from, shape, &places)? })
    }

    /// The same, and through one dynamic slice.
    pub(super) fn step_dynamic(&self, arena: &Arena) -> Option<Walk> {
        let Def::Op(op) = arena.values[self.base.0 as usize].def else { return None };
        let op = &arena.ops[op as usize];
        let (Op::DynamicSlice(sizes), [from, ..], None) = (&op.op, op.operands.as_slice(), self.slice) else {
            return self.step(arena);
        };
        let steps = row_major(&arena.ty(*from).shape);
        let places: Vec<(i64, i64)> = steps.iter().map(|&step| (0, step)).collect();
        Some(Walk { slice: Some(self.base), ..self.through(*from, sizes, &places)? })
    }

    /// The view with the dimensions of the base replaced by these places in another value.
    fn through(&self, from: Value, shape: &[i64], places: &[(i64, i64)]) -> Option<Walk> {
        let steps = row_major(shape);
        // The first element's coordinates, and how far the runs of each dimension reach from there.
        let mut rest = self.offset;
        let mut last: Dims = steps.iter().map(|&s| (rest / s, rest %= s).0).collect();
        let mut offset = 0;
        for (&at, &(start, step)) in last.iter().zip(places) {
            offset += start + at * step;
        }
        let first = last.clone();
        let mut dims = Vec::with_capacity(self.dims.len());
        for runs in &self.dims {
            let mut moved = Runs::new();
            // Innermost first, so that what is split off comes after.
            let mut todo: Runs = runs.clone();
            while let Some(run) = todo.pop() {
                if run.size == 1 || run.stride == 0 {
                    moved.insert(0, run);
                    continue;
                }
                let d = (0..shape.len()).find(|&d| steps[d] <= run.stride && shape[d] > 1)?;
                if run.stride % steps[d] != 0 {
                    return None;
                }
                let by = run.stride / steps[d];
                let mut size = run.size;
                if first[d] + (size - 1) * by >= shape[d] {
                    // It goes on into the next dimension: split it there.
                    let inner = shape[d] / by;
                    if first[d] != 0 || shape[d] % by != 0 || size % inner != 0 {
                        return None;
                    }
                    todo.push(Run { size: size / inner, stride: run.stride * inner });
                    size = inner;
                }
                last[d] += (size - 1) * by;
                moved.insert(0, Run { size, stride: by * places[d].1 });
            }
            dims.push(moved);
        }
        let inside = last.iter().zip(shape).all(|(&at, &n)| at < n);
        inside.then_some(Walk { base: from, offset, dims, ..*self })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{DType, TensorType};

    fn check(shape: &[i64], make: impl Fn(&Builder, Value) -> Value, offset: i64, strides: &[i64]) {
        let b = Builder::new();
        let x = b.param(TensorType::new(DType::F32, shape));
        let y = make(&b, x);
        let got = b.strided(y);
        assert_eq!(got, Strided { base: x, offset, strides: strides.into() }, "of {:?}", b.shape(y));
    }

    #[test]
    fn views_are_seen_through() {
        check(&[2, 3], |_, x| x, 0, &[3, 1]);
        check(&[2, 3], |b, x| b.transpose(x, &[1, 0]), 0, &[1, 3]);
        check(&[4, 6], |b, x| b.slice(x, &[1, 2], &[3, 6], &[1, 2]), 8, &[6, 2]);
        check(&[4], |b, x| b.broadcast_in_dim(x, &[3, 4], &[1]), 0, &[0, 1]);
        check(&[3, 1], |b, x| b.broadcast_in_dim(x, &[3, 4], &[0, 1]), 0, &[1, 0]);
        check(&[2, 3, 4], |b, x| b.reshape(b.transpose(x, &[2, 0, 1]), &[4, 6]), 0, &[1, 4]);
    }

    #[test]
    fn what_is_converted_is_converted_in_its_own_order() {
        let b = Builder::new();
        let x = b.param(TensorType::new(DType::S8, [2, 3].as_slice()));
        let wide = |v| b.convert(v, DType::F32);
        let turned = b.strided(wide(b.transpose(x, &[1, 0])));
        assert_eq!((b.dtype(turned.base), b.shape(turned.base).as_slice()), (DType::F32, [2, 3].as_slice()));
        assert_eq!((turned.offset, turned.strides.as_slice()), (0, [1, 3].as_slice()));
        // A part of it would be converted as a whole, and what has its order stays.
        for y in [wide(b.slice(x, &[0, 0], &[1, 3], &[1, 1])), wide(b.reshape(x, &[3, 2])), wide(x)] {
            assert_eq!(b.strided(y), b.unviewed(y));
        }
    }

    #[test]
    fn heads_of_a_joint_projection() {
        // [batch, time, 3 * heads * width] to the keys as [batch, heads, width, time].
        let keys = |b: &Builder, x: Value| {
            let part = b.slice(x, &[0, 0, 12], &[2, 5, 24], &[1, 1, 1]);
            b.transpose(b.reshape(part, &[2, 5, 3, 4]), &[0, 2, 3, 1])
        };
        check(&[2, 5, 36], keys, 12, &[180, 4, 1, 36]);
    }

    #[test]
    fn merged_dimensions_end_where_they_have_no_stride() {
        let b = Builder::new();
        let x = b.param(TensorType::new(DType::F32, vec![2, 3, 4]));
        let t = b.transpose(x, &[1, 0, 2]);
        // [3, 2] with strides 4 and 12 are not one dimension of 6; [3, 2 * 4] are not either.
        for shape in [[6, 4], [3, 8]] {
            let y = b.reshape(t, &shape);
            assert_eq!(b.strided(y).base, t);
        }
        // Split again they are dimensions of their own.
        let y = b.reshape(b.reshape(t, &[6, 4]), &[3, 2, 4]);
        assert_eq!(b.strided(y), Strided { base: x, offset: 0, strides: [4, 12, 1].as_slice().into() });
    }

    #[test]
    fn a_dimension_that_crosses_the_end_of_a_row_stops_the_walk() {
        let b = Builder::new();
        let x = b.param(TensorType::new(DType::F32, vec![3, 4]));
        let t = b.transpose(x, &[1, 0]);
        let y = b.slice(b.reshape(t, &[12]), &[1], &[7], &[1]);
        assert_eq!(b.strided(y), Strided { base: t, offset: 1, strides: [1].as_slice().into() });
    }
}
