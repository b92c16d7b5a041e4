//! Writing a part of a value where what is written may be computed from the value itself.
//!
//! XLA writes in place, and fuses what computes the part into that. It looks whether this takes elements that are written
//! already, but not behind a reshape, which is a bitcast by then: `x[0] = x[0].flip(0)` read what it had written. So here
//! a part is written in place if it takes no element of the value, or each only at the place where it is written, or only
//! elements before the first or behind the last that is written. Otherwise the whole result is computed, each element as
//! the old one or the new. Where the program is told the place only when it runs, places are compared that are computed
//! from one number, and else the part is computed before the write.

use super::strided::{Walk, row_major};
use super::{Builder, Inner};
use crate::ir::{Binary, Def, Op, Value};
use crate::types::{DType, Dims, TensorType};
use rustc_hash::FxHashSet;
use smallvec::SmallVec;

impl Builder {
    /// `x` with `update` written at `start`, one integer scalar per dimension, clamped so that the update fits: as
    /// [`Builder::dynamic_update_slice`], also where `update` is computed from other elements of `x`. Of slices of `x` that
    /// begin at such a scalar and a constant more or less, none is clamped.
    pub fn overwrite(&self, x: Value, update: Value, start: &[Value]) -> Value {
        if self.numel(update) == 0 || !self.takes_other_elements(x, update, start) {
            return self.dynamic_update_slice(x, update, start);
        }
        match self.numbers(start) {
            Some(start) => self.chosen(x, update, &start),
            None if self.inner.borrow().keeps_writes_apart => self.written_apart(x, update, start),
            None => self.dynamic_update_slice(x, update, start),
        }
    }

    /// Whether an update is kept out of the fusion of its write where nobody knows whether it takes elements of the places
    /// that are written. For compilers that look at operands alone.
    pub fn keep_writes_apart(&self, on: bool) {
        self.inner.borrow_mut().keeps_writes_apart = on;
    }

    /// Each element as the new one or the old.
    fn chosen(&self, x: Value, update: Value, start: &[i64]) -> Value {
        let (shape, part) = (self.shape(x), self.shape(update));
        let before = self.clamped(x, update, start);
        let after: Dims = (0..shape.len()).map(|d| shape[d] - part[d] - before[d]).collect();
        let none = Dims::from_elem(0, shape.len());
        let mut result = self.pad(update, self.scalar_f64(self.dtype(x), 0.0), &before, &after, &none);
        for d in (0..shape.len()).filter(|&d| part[d] < shape[d]) {
            let place = self.iota(TensorType::new(DType::S64, shape.as_slice()), d as i64);
            let bound = |at: i64| self.full(self.scalar_i64(DType::S64, at), &shape);
            let inside =
                self.and(self.ge(place, bound(before[d])), self.lt(place, bound(before[d] + part[d])));
            result = self.select(inside, result, x);
        }
        result
    }

    /// Writes in a loop of one round, before which the update is computed. That there is one is seen only when it runs.
    fn written_apart(&self, x: Value, update: Value, start: &[Value]) -> Value {
        let Some(&varies) = start.iter().find(|&&v| self.constant_i64(v).is_none()) else { return x };
        let bits = self.dtype(varies).bits();
        let least = self.scalar_i64(self.dtype(varies), i64::MIN >> (64 - bits));
        let inits: Vec<Value> = [self.gt(varies, least), x, update].iter().chain(start).copied().collect();
        let results = self.while_(
            &inits,
            |_, state| state[0],
            |b, state| {
                let written = b.dynamic_update_slice(state[1], state[2], &state[3..]);
                [b.scalar_bool(false), written].iter().chain(&state[2..]).copied().collect()
            },
        );
        results[1]
    }

    /// Where an update begins that is to fit.
    fn clamped(&self, x: Value, update: Value, start: &[i64]) -> Dims {
        let (shape, part) = (self.shape(x), self.shape(update));
        start.iter().zip(&shape).zip(&part).map(|((&at, n), m)| at.clamp(0, (n - m).max(0))).collect()
    }

    /// The numbers that these scalars are, if all are known.
    fn numbers(&self, scalars: &[Value]) -> Option<Dims> {
        scalars.iter().map(|&v| self.constant_i64(v)).collect()
    }

    /// Whether an element of the update is computed from one of `x` that is not where it is written, in what may be one
    /// fusion with the write.
    fn takes_other_elements(&self, x: Value, update: Value, start: &[Value]) -> bool {
        let strides = row_major(&self.shape(x));
        let numbers = self.numbers(start).map(|start| self.clamped(x, update, &start));
        let offset = numbers.map(|at| at.iter().zip(&strides).map(|(at, step)| at * step).sum());
        let inner = self.inner.borrow();
        let part = inner.arena.ty(update).shape.clone();
        let place = Written { inner: &inner, root: inner.origin(x), x, part, offset, start };
        place.is_taken_elsewhere(update, strides)
    }
}

/// Where an update goes.
struct Written<'a> {
    inner: &'a Inner,
    /// The value of which `x` has all elements in their order.
    root: Value,
    x: Value,
    /// The update's shape.
    part: Dims,
    /// Of the first element, if that is known.
    offset: Option<i64>,
    start: &'a [Value],
}

/// Elements of the root.
struct View {
    sizes: Dims,
    strides: Dims,
    offset: i64,
    /// From whose start the offset is, if that is no number.
    slice: Option<Value>,
}

impl Written<'_> {
    /// Goes back from the update, whose elements are written so far apart in the root, through what may be fused.
    fn is_taken_elsewhere(&self, update: Value, strides: Dims) -> bool {
        // With the strides at which its elements are written, as long as each is at its own place.
        let mut todo = vec![(update, Some(strides))];
        let mut seen = FxHashSet::default();
        // Values are numbered in the order in which they were made.
        let first = self.inner.first_like(self.root);
        while let Some((v, strides)) = todo.pop() {
            if v.0 < first || !seen.insert((v, strides.clone())) {
                continue;
            }
            if let Some(view) = self.view(v) {
                if strides.is_some_and(|strides| self.is_in_place(&view, &strides)) || self.is_apart(&view) {
                    continue;
                }
                return true;
            }
            let Some((op, operands)) =
                self.inner.made_by(v).filter(|(op, from)| self.inner.may_fuse(op, from))
            else {
                continue;
            };
            let shape = &self.inner.arena.ty(v).shape;
            for &o in operands {
                let from = &self.inner.arena.ty(o).shape;
                let at = strides.as_ref().and_then(|strides| match op {
                    Op::Reshape => restrided(shape, strides, from),
                    Op::Transpose(order) => {
                        let mut at = Dims::from_elem(0, order.len());
                        order.iter().zip(strides).for_each(|(&d, &step)| at[d as usize] = step);
                        Some(at)
                    }
                    _ if is_elementwise(op) && from == shape => Some(strides.clone()),
                    _ => None,
                });
                todo.push((o, at));
            }
        }
        false
    }

    /// A value as a view of the root, if it is one.
    fn view(&self, v: Value) -> Option<View> {
        let sizes = &self.inner.arena.ty(v).shape;
        let mut walk = Walk::begin(v, sizes);
        loop {
            if self.inner.are_same(self.inner.origin(walk.base), self.root).unwrap_or(true)
                && let Some(strides) = walk.strides()
            {
                return Some(View { sizes: sizes.clone(), strides, offset: walk.offset, slice: walk.slice });
            }
            walk = walk.step_dynamic(&self.inner.arena)?;
        }
    }

    /// Whether it has the elements at the places where they are written.
    fn is_in_place(&self, view: &View, strides: &[i64]) -> bool {
        let each = view.sizes.iter().zip(&view.strides).zip(strides);
        let same = each.filter(|((n, _), _)| **n != 1).all(|((_, a), b)| a == b);
        same && match (self.offset, view.slice) {
            (Some(offset), None) => view.offset == offset,
            (None, Some(slice)) => view.offset == 0 && self.is_this_slice(slice),
            _ => false,
        }
    }

    /// Whether all of its elements are before what is written, or behind.
    fn is_apart(&self, view: &View) -> bool {
        let begin = match (self.offset, view.slice) {
            (Some(begin), None) => begin,
            (None, Some(slice)) => return self.is_beside(slice),
            _ => return false,
        };
        let last = |sizes: &[i64], strides: &[i64]| -> i64 {
            sizes.iter().zip(strides).map(|(n, step)| (n - 1) * step).sum()
        };
        let end = begin + last(&self.part, &row_major(&self.inner.arena.ty(self.x).shape));
        view.offset > end || view.offset + last(&view.sizes, &view.strides) < begin
    }

    /// Whether a dynamic slice begins where the update does.
    fn is_this_slice(&self, slice: Value) -> bool {
        self.distances(slice).is_some_and(|(_, mut far)| far.all(|far| far == Some(0)))
    }

    /// Whether a dynamic slice ends before the update along a dimension, or begins behind it.
    fn is_beside(&self, slice: Value) -> bool {
        let Some((sizes, far)) = self.distances(slice) else { return false };
        far.zip(sizes).zip(&self.part).any(|((far, n), m)| far.is_some_and(|far| far >= *m || far <= -n))
    }

    /// The sizes of a dynamic slice of a value of the shape in which the update is written, and how far behind the update it
    /// begins in each dimension.
    fn distances(&self, slice: Value) -> Option<(&Dims, impl Iterator<Item = Option<i64>>)> {
        let (Op::DynamicSlice(sizes), [from, start @ ..]) = self.inner.made_by(slice)? else { return None };
        let of_this_shape = self.inner.arena.ty(*from).shape == self.inner.arena.ty(self.x).shape;
        let pairs = self.start.iter().zip(start);
        of_this_shape.then(|| (sizes, pairs.map(|(&from, &to)| self.inner.distance(from, to))))
    }
}

impl Inner {
    /// What a value has all bits of, in their order.
    fn origin(&self, mut v: Value) -> Value {
        loop {
            v = match self.made_by(v) {
                Some((Op::Reshape, &[from])) => from,
                Some((Op::BitcastConvert, &[from]))
                    if self.arena.ty(from).shape == self.arena.ty(v).shape =>
                {
                    from
                }
                _ => return v,
            }
        }
    }

    /// Whether two values are computed alike, which a compiler makes one; none if that would take long to say.
    fn are_same(&self, a: Value, b: Value) -> Option<bool> {
        let (mut todo, mut left) = (vec![(a, b)], EFFORT);
        while let Some((a, b)) = todo.pop() {
            if a == b {
                continue;
            }
            let (Some((op, x)), Some((other, y))) = (self.made_by(a), self.made_by(b)) else {
                return Some(false);
            };
            if op != other || x.len() != y.len() || x.is_empty() {
                return Some(false);
            }
            left = left.checked_sub(x.len())?;
            todo.extend(x.iter().copied().zip(y.iter().copied()));
        }
        Some(true)
    }

    /// By how much the second of two integer scalars is more than the first, if both are one and a constant.
    fn distance(&self, from: Value, to: Value) -> Option<i64> {
        let ((x, less), (y, more)) = (self.without_constant(from), self.without_constant(to));
        let is_same = match (x, y) {
            (Some(x), Some(y)) => self.are_same(x, y)?,
            (x, y) => x == y,
        };
        is_same.then_some(more - less)
    }

    /// An integer scalar as what is no constant in it, if anything is, and the constant that is added.
    fn without_constant(&self, mut v: Value) -> (Option<Value>, i64) {
        let mut added = 0;
        loop {
            if let Some(n) = self.arena.constant_i64(v) {
                return (None, added + n);
            }
            v = match self.made_by(v) {
                Some((Op::Convert, &[from])) if self.arena.ty(from).dtype.is_integral() => from,
                Some((Op::Binary(Binary::Add), &[x, n])) => match self.arena.constant_i64(n) {
                    Some(n) => {
                        added += n;
                        x
                    }
                    None => return (Some(v), added),
                },
                _ => return (Some(v), added),
            }
        }
    }

    /// No value that is computed like this one has a smaller number.
    fn first_like(&self, v: Value) -> u32 {
        let (mut todo, mut left, mut first) = (vec![v], EFFORT, 0);
        while let Some(v) = todo.pop() {
            match self.made_by(v) {
                Some((_, operands)) => {
                    let Some(less) = left.checked_sub(operands.len()) else { return first };
                    left = less;
                    todo.extend(operands);
                }
                None if matches!(self.arena.values[v.0 as usize].def, Def::Constant(_)) => {}
                None => first = first.max(v.0),
            }
        }
        first
    }
}

/// How many operands are looked at to compare two values.
const EFFORT: usize = 1000;

/// Whether each element is computed from those at its place.
fn is_elementwise(op: &Op) -> bool {
    // XLA's CPU backend takes barriers out before it fuses.
    op.is_elementwise() || matches!(op, Op::OptimizationBarrier)
}

impl Inner {
    /// Whether XLA may compute an op inside of what uses it: also those that are not what they seem, as a product over one
    /// element or a sort of one is none.
    fn may_fuse(&self, op: &Op, operands: &[Value]) -> bool {
        let shape = |i: usize| operands.get(i).map_or(&[][..], |&v| &self.arena.ty(v).shape);
        match op {
            Op::Scatter(..) => false,
            Op::Gather(..) | Op::Reduce(_) | Op::ReduceWindow(_) => true,
            Op::Sort { dimension, .. } => shape(0).get(*dimension as usize) == Some(&1),
            Op::DotGeneral(dims) => dims.0.lhs_contracting.iter().all(|&d| shape(0)[d as usize] == 1),
            Op::Convolution(_) => shape(1).iter().filter(|n| **n != 1).count() < 2,
            _ => op.is_fusible() || is_elementwise(op),
        }
    }
}

/// The strides of a view in another shape of as many elements, if it has such.
fn restrided(shape: &[i64], strides: &[i64], to: &[i64]) -> Option<Dims> {
    // Elements that are equally far apart: how many, and how far. Innermost first.
    let mut runs: SmallVec<[(i64, i64); 6]> = SmallVec::new();
    for (&n, &step) in shape.iter().zip(strides).rev().filter(|(n, _)| **n != 1) {
        match runs.last_mut() {
            Some((run, inner)) if *run * *inner == step => *run *= n,
            _ => runs.push((n, step)),
        }
    }
    let mut result = Dims::from_elem(1, to.len());
    let mut runs = runs.iter_mut().peekable();
    for (d, &n) in to.iter().enumerate().rev().filter(|(_, n)| **n != 1) {
        let (left, step) = runs.peek_mut()?;
        if *left % n != 0 {
            return None;
        }
        result[d] = *step;
        (*left, *step) = (*left / n, *step * n);
        if *left == 1 {
            runs.next();
        }
    }
    Some(result)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: [i64; 3] = [2, 4, 4];

    fn is_in_place(make: impl Fn(&Builder, Value) -> (Value, Value, [Value; 2])) -> bool {
        let b = Builder::new();
        let x = b.param(TensorType::new(DType::F32, SHAPE.as_slice()));
        b.keep_writes_apart(true);
        let (x, update, start) = make(&b, x);
        let y = b.overwrite(x, update, &start);
        assert!(b.error().is_none());
        matches!(b.inner.borrow().made_by(y), Some((Op::DynamicUpdateSlice, _)))
    }

    /// Whether the first of two matrices, given to this function, is then written in place: read and written behind
    /// reshapes that differ.
    fn is_first_in_place(f: impl Fn(&Builder, Value) -> Value) -> bool {
        is_in_place(|b, x| {
            let zero = b.scalar_i64(DType::S32, 0);
            let read = b.slice(b.reshape(x, &[32]), &[0], &[16], &[1]);
            (b.reshape(x, &[8, 4]), f(b, b.reshape(read, &[4, 4])), [zero, zero])
        })
    }

    #[test]
    fn elements_that_are_apart_stay_in_place() {
        let from = |row: i64| {
            is_in_place(|b, x| {
                let number = |n| b.scalar_i64(DType::S32, n);
                let read = b.slice(b.reshape(x, &[32]), &[4 * row], &[4 * row + 8], &[1]);
                (b.reshape(x, &[8, 4]), b.reverse(b.reshape(read, &[2, 4]), &[0]), [number(3), number(0)])
            })
        };
        assert_eq!([0, 1, 2, 4, 5, 6].map(from), [true, true, false, false, true, true]);
    }

    #[test]
    fn a_start_that_is_no_number_is_compared() {
        // Two rows from some row on, written two rows further down.
        let from = |more: i64, column: i64, turned: bool| {
            is_in_place(|b, x| {
                let (rows, column) = (b.reshape(x, &[8, 4]), b.scalar_i64(DType::S32, column));
                let at = b.param(TensorType::scalar(DType::S64));
                let number = |n| b.scalar_i64(DType::S64, n);
                let start = |more| b.convert(b.add(at, number(more)), DType::S32);
                let read = b.dynamic_slice(rows, &[start(more), column], &[2, 2]);
                let update = if turned { b.reverse(read, &[0]) } else { b.negate(read) };
                (rows, update, [start(2), b.scalar_i64(DType::S32, 0)])
            })
        };
        assert_eq!([0, 1, 2, 3, 4].map(|more| from(more, 0, false)), [true, false, true, false, true]);
        assert_eq!([0, 2, 3].map(|more| from(more, 0, true)), [true, false, false]);
        assert_eq!([1, 2].map(|column| from(3, column, true)), [false, true]);
        assert!(!is_in_place(|b, x| {
            let (rows, zero) = (b.reshape(x, &[8, 4]), b.scalar_i64(DType::S32, 0));
            let [at, other] = [0, 1].map(|_| b.param(TensorType::scalar(DType::S32)));
            let read = b.dynamic_slice(rows, &[other, zero], &[2, 4]);
            (rows, read, [at, zero])
        }));
    }

    #[test]
    fn elements_that_are_read_where_they_are_written_stay_in_place() {
        assert!(is_first_in_place(|b, y| b.add(y, b.ones_like(y))));
        assert!(is_first_in_place(|b, y| {
            let turned = b.negate(b.transpose(y, &[1, 0]));
            b.transpose(turned, &[1, 0])
        }));
        assert!(is_first_in_place(|b, y| b.reshape(b.exponential(b.reshape(y, &[2, 2, 4])), &[4, 4])));
        // A product is there before anything is written.
        let dims = crate::DotDims::new(&[], &[], &[1], &[0]);
        assert!(is_first_in_place(|b, y| b.dot_general(y, y, &dims, crate::Precision::Default, None)));
    }

    #[test]
    fn elements_that_are_read_elsewhere_are_not() {
        assert!(!is_first_in_place(|b, y| b.reverse(y, &[0])));
        assert!(!is_first_in_place(|b, y| b.add(b.transpose(y, &[1, 0]), y)));
        assert!(!is_first_in_place(
            |b, y| b.reshape(b.transpose(b.reshape(y, &[2, 2, 4]), &[1, 0, 2]), &[4, 4])
        ));
        assert!(!is_first_in_place(|b, y| {
            let first = b.slice(y, &[0, 0], &[1, 4], &[1, 1]);
            b.subtract(y, b.broadcast_in_dim(b.reshape(first, &[4]), &[4, 4], &[1]))
        }));
        assert!(!is_first_in_place(|b, y| b.take_dim(
            y,
            b.iota(TensorType::new(DType::S32, [4].as_slice()), 0),
            0
        )));
    }
}
