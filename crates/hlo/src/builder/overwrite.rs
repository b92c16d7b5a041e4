//! Writing a part of a value where what is written may be computed from the value itself.
//!
//! XLA writes in place, and fuses what computes the part into that. It looks whether this takes elements that are written
//! already, but not behind a reshape, which is a bitcast by then: `x[0] = x[0].flip(0)` read what it had written. So here
//! a part is written in place if it takes none of the value's elements, or each only where it is written. Otherwise the
//! whole result is computed, each element as the old one or the new.

use super::strided::{Walk, row_major};
use super::{Builder, Inner};
use crate::ir::{Op, Value};
use crate::types::{Dims, TensorType};
use rustc_hash::FxHashSet;
use smallvec::SmallVec;

impl Builder {
    /// `x` with `update` written at `start`, one integer scalar per dimension, clamped so that the update fits: as
    /// [`Builder::dynamic_update_slice`], also where `update` is computed from other elements of `x`.
    pub fn overwrite(&self, x: Value, update: Value, start: &[Value]) -> Value {
        if self.numel(update) == 0 || !self.takes_other_elements(x, update, start) {
            return self.dynamic_update_slice(x, update, start);
        }
        let (shape, part) = (self.shape(x), self.shape(update));
        let room: Dims = shape.iter().zip(&part).map(|(n, m)| n - m).collect();
        let none = Dims::from_elem(0, shape.len());
        let fill = self.scalar_f64(self.dtype(x), 0.0);
        let at = self.numbers(start).map(|at| -> Dims {
            at.iter().zip(&room).map(|(&at, &room)| at.clamp(0, room.max(0))).collect()
        });
        let spread = match &at {
            Some(at) => {
                let after: Dims = room.iter().zip(at).map(|(room, at)| room - at).collect();
                self.pad(update, fill, at, &after, &none)
            }
            None => {
                let around = self.pad(update, fill, &room, &room, &none);
                let start: Vec<Value> = start
                    .iter()
                    .zip(&room)
                    .map(|(&at, &room)| {
                        let room = self.scalar_i64(self.dtype(at), room);
                        self.subtract(room, self.clamp(self.zeros_like(at), at, room))
                    })
                    .collect();
                self.dynamic_slice(around, &start, &shape)
            }
        };
        let mut result = spread;
        for (d, (&m, &n)) in part.iter().zip(&shape).enumerate().filter(|(_, (m, n))| m < n) {
            let dtype = self.dtype(start[d]);
            let number = |n: i64| self.scalar_i64(dtype, n);
            let begin = self.clamp(number(0), start[d], number(n - m));
            let place = self.iota(TensorType::new(dtype, shape.as_slice()), d as i64);
            let past = self.ge(place, self.full(begin, &shape));
            let end = self.full(self.add(begin, number(m)), &shape);
            result = self.select(self.and(past, self.lt(place, end)), result, x);
        }
        result
    }

    /// The numbers that these scalars are, if all are known.
    fn numbers(&self, scalars: &[Value]) -> Option<Dims> {
        scalars.iter().map(|&v| self.constant_i64(v)).collect()
    }

    /// Whether an element of the update is computed from one of `x` that is not where it is written, in what may be one
    /// fusion with the write.
    fn takes_other_elements(&self, x: Value, update: Value, start: &[Value]) -> bool {
        let strides = row_major(&self.shape(x));
        let numbers = self.numbers(start);
        let offset = numbers.map(|at| at.iter().zip(&strides).map(|(at, step)| at * step).sum());
        let inner = self.inner.borrow();
        let place = Written { inner: &inner, root: inner.origin(x), x, offset, start };
        place.is_taken_elsewhere(update, strides)
    }
}

/// Where an update goes.
struct Written<'a> {
    inner: &'a Inner,
    /// The value of which `x` has all elements in their order.
    root: Value,
    x: Value,
    /// Of the first element, if that is known.
    offset: Option<i64>,
    start: &'a [Value],
}

impl Written<'_> {
    /// Goes back from the update, whose elements are written so far apart in the root, through what may be fused.
    fn is_taken_elsewhere(&self, update: Value, strides: Dims) -> bool {
        // With the strides at which its elements are written, as long as each is at its own place.
        let mut todo = vec![(update, Some(strides))];
        let mut seen = FxHashSet::default();
        while let Some((v, strides)) = todo.pop() {
            // Values are numbered in the order in which they were made.
            if v.0 < self.root.0 || !seen.insert((v, strides.clone())) {
                continue;
            }
            let Some(strides) = strides else {
                if self.inner.origin(v) == self.root {
                    return true;
                }
                if let Some((_, operands)) = self.inner.made_by(v).filter(|(op, _)| may_fuse(op)) {
                    todo.extend(operands.iter().map(|&o| (o, None)));
                }
                continue;
            };
            if let Some(is_there) = self.reads(v, &strides) {
                if !is_there {
                    return true;
                }
                continue;
            }
            let Some((op, operands)) = self.inner.made_by(v).filter(|(op, _)| may_fuse(op)) else { continue };
            let shape = &self.inner.arena.ty(v).shape;
            for &o in operands {
                let from = &self.inner.arena.ty(o).shape;
                let at = match op {
                    Op::Reshape => restrided(shape, &strides, from),
                    Op::Transpose(order) => {
                        let mut at = Dims::from_elem(0, order.len());
                        order.iter().zip(&strides).for_each(|(&d, &step)| at[d as usize] = step);
                        Some(at)
                    }
                    _ if is_elementwise(op) && from == shape => Some(strides.clone()),
                    _ => None,
                };
                todo.push((o, at));
            }
        }
        false
    }

    /// Whether a view of the root has the elements at the places where they are written; none if it is no such view.
    fn reads(&self, v: Value, strides: &[i64]) -> Option<bool> {
        let mut walk = Walk::begin(v, &self.inner.arena.ty(v).shape);
        loop {
            if self.inner.origin(walk.base) == self.root
                && let Some(at) = walk.strides()
            {
                let sizes = &self.inner.arena.ty(v).shape;
                let real = |d: &usize| sizes[*d] != 1;
                let same = (0..sizes.len()).filter(real).all(|d| at[d] == strides[d]);
                let begins = match (self.offset, walk.slice) {
                    (Some(offset), None) => walk.offset == offset,
                    (None, Some(slice)) => walk.offset == 0 && self.is_this_slice(slice),
                    _ => false,
                };
                return Some(same && begins);
            }
            walk = walk.step_dynamic(&self.inner.arena)?;
        }
    }

    /// Whether a dynamic slice begins where the update does, in a value of the shape in which that is written.
    fn is_this_slice(&self, slice: Value) -> bool {
        let Some((_, [from, start @ ..])) = self.inner.made_by(slice) else { return false };
        self.inner.arena.ty(*from).shape == self.inner.arena.ty(self.x).shape
            && start.len() == self.start.len()
            && start.iter().zip(self.start).all(|(&a, &b)| self.inner.are_same(a, b, 8))
    }
}

impl Inner {
    /// What a value has all bits of, in their order.
    fn origin(&self, v: Value) -> Value {
        match self.made_by(v) {
            Some((Op::Reshape, &[from])) => self.origin(from),
            Some((Op::BitcastConvert, &[from])) if self.arena.ty(from).shape == self.arena.ty(v).shape => {
                self.origin(from)
            }
            _ => v,
        }
    }

    /// Whether two scalars are computed alike.
    fn are_same(&self, a: Value, b: Value, depth: u32) -> bool {
        if a == b || depth == 0 {
            return a == b;
        }
        let (Some((op, x)), Some((other, y))) = (self.made_by(a), self.made_by(b)) else { return false };
        op == other && x.len() == y.len() && x.iter().zip(y).all(|(&a, &b)| self.are_same(a, b, depth - 1))
    }
}

fn is_elementwise(op: &Op) -> bool {
    matches!(
        op,
        Op::Unary(_)
            | Op::Binary(_)
            | Op::Compare(..)
            | Op::Select
            | Op::Clamp
            | Op::Complex
            | Op::Convert
            | Op::BitcastConvert
            | Op::ReducePrecision { .. }
            | Op::OptimizationBarrier // XLA's CPU backend takes them out before it fuses
    )
}

/// Whether XLA may compute an op inside of what uses it.
fn may_fuse(op: &Op) -> bool {
    let elements = op.is_fusible() && !matches!(op, Op::Scatter(..));
    elements || is_elementwise(op) || matches!(op, Op::Gather(..) | Op::Reduce(_))
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
    use crate::types::DType;

    const SHAPE: [i64; 3] = [2, 4, 4];

    /// Whether the first of two matrices, given to this function as a view, is then written in place.
    fn is_in_place(f: impl Fn(&Builder, Value) -> Value) -> bool {
        // Read and written behind reshapes, and with a start that is a number or not.
        let each = [false, true].map(|is_known| {
            let b = Builder::new();
            let x = b.param(TensorType::new(DType::F32, SHAPE.as_slice()));
            let at = b.param(TensorType::scalar(DType::S32));
            let zero = b.scalar_i64(DType::S32, 0);
            let start = || [if is_known { zero } else { b.multiply(at, b.scalar_i64(DType::S32, 4)) }, zero];
            let rows = b.reshape(x, &[8, 4]);
            let read = if is_known {
                b.slice(b.reshape(x, &[32]), &[0], &[16], &[1])
            } else {
                b.dynamic_slice(rows, &start(), &[4, 4])
            };
            let update = f(&b, b.reshape(read, &[4, 4]));
            let y = b.overwrite(b.reshape(x, &[8, 4]), update, &start());
            assert!(b.error().is_none());
            matches!(b.inner.borrow().made_by(y), Some((Op::DynamicUpdateSlice, _)))
        });
        assert_eq!(each[0], each[1]);
        each[0]
    }

    #[test]
    fn elements_that_are_read_where_they_are_written_stay_in_place() {
        assert!(is_in_place(|b, y| b.add(y, b.ones_like(y))));
        assert!(is_in_place(|b, y| {
            let turned = b.negate(b.transpose(y, &[1, 0]));
            b.transpose(turned, &[1, 0])
        }));
        assert!(is_in_place(|b, y| b.reshape(b.exponential(b.reshape(y, &[2, 2, 4])), &[4, 4])));
        // A product is there before anything is written.
        let dims = crate::DotDims::new(&[], &[], &[1], &[0]);
        assert!(is_in_place(|b, y| b.dot_general(y, y, &dims, crate::Precision::Default, None)));
    }

    #[test]
    fn elements_that_are_read_elsewhere_are_not() {
        assert!(!is_in_place(|b, y| b.reverse(y, &[0])));
        assert!(!is_in_place(|b, y| b.add(b.transpose(y, &[1, 0]), y)));
        assert!(!is_in_place(|b, y| b.reshape(b.transpose(b.reshape(y, &[2, 2, 4]), &[1, 0, 2]), &[4, 4])));
        assert!(!is_in_place(|b, y| {
            let first = b.slice(y, &[0, 0], &[1, 4], &[1, 1]);
            b.subtract(y, b.broadcast_in_dim(b.reshape(first, &[4]), &[4, 4], &[1]))
        }));
        assert!(!is_in_place(|b, y| b.take_dim(
            y,
            b.iota(TensorType::new(DType::S32, [4].as_slice()), 0),
            0
        )));
    }
}
