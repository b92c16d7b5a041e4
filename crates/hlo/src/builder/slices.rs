//! Reductions as elementwise ops on slices.
//!
//! XLA's compiler for CPUs computes each result of a reduction by itself, one number after another: down a column, a row
//! apart, where the last dimension stays, as in the gradient of a bias; and along a row each waits for the one before. The sum
//! of the first and the second half, and so on, goes through memory with a vector at a time; and as it adds in pairs, its
//! rounding is no worse.

use super::Builder;
use crate::ir::{Binary, Value};
use crate::types::DType;

/// Into how many slices a dimension is cut at a time. What is computed in the reduction's loop is there so many times.
const SLICES: i64 = 8;

/// So few are taken at once.
const AT_ONCE: i64 = 2 * SLICES;

/// How many elements have to lie side by side in a slice.
const WIDTH: i64 = 8;

/// From how many elements on it is worth a loop for each time that a dimension is cut.
const LEAST: i64 = 1 << 14;

/// From how many elements on what slices give, an eighth of them, is too much memory for it.
const MOST: i64 = 1 << 28;

/// With how few elements it is not cut once more.
const FEW: i64 = 1 << 12;

impl Builder {
    /// Whether large reductions are made of slices: see the module's text. For compilers that go from number to number.
    pub fn reduce_by_slices(&self, on: bool) {
        self.inner.borrow_mut().reduces_by_slices = on;
    }

    pub(crate) fn reduces_by_slices(&self) -> bool {
        self.inner.borrow().reduces_by_slices
    }

    /// The reduction of `x` over `dims` from the scalar `init`, which changes nothing, if that is better done so.
    pub(crate) fn reduced_by_slices(&self, op: Binary, x: Value, init: Value, dims: &[i64]) -> Option<Value> {
        let shape = self.shape(x);
        let valid = dims.iter().all(|&d| d >= 0 && d < shape.len() as i64);
        let can = self.reduces_by_slices() && !self.is_outline() && valid && is_any_order(op);
        if !can || self.dtype(x) == DType::Pred || !(LEAST..MOST).contains(&self.numel(x)) {
            return None;
        }
        let last = *dims.iter().max()? as usize;
        let side_by_side = shape[last + 1..].iter().product::<i64>();
        let many = dims.iter().map(|&d| shape[d as usize]).product::<i64>();
        if side_by_side >= WIDTH && many >= SLICES {
            return Some(self.down_columns(op, x, init, dims));
        }
        self.along_rows(op, x, init, dims)
    }

    /// Where what is left lies side by side.
    fn down_columns(&self, op: Binary, x: Value, init: Value, dims: &[i64]) -> Value {
        let shape = self.shape(x);
        let left = (0..shape.len()).filter(|&d| !dims.contains(&(d as i64)));
        let left: Vec<i64> = left.map(|d| shape[d]).collect();
        let mut y = x;
        for &d in dims {
            let mut rest: Vec<Value> = Vec::new();
            while self.dim(y, d as usize) > AT_ONCE {
                let (slices, more) = self.cut(y, d);
                rest.extend(more.into_iter().flat_map(|more| self.each(more, d)));
                y = self.in_pairs(op, slices).unwrap_or(y);
            }
            y = self.in_pairs(op, self.each(y, d).into_iter().chain(rest).collect()).unwrap_or(y);
        }
        let y = self.reshape(y, &left);
        self.binary(op, y, self.full(init, &left))
    }

    /// Where nothing is left side by side: the slices do not become narrower than a vector, and what they give is reduced as
    /// it is.
    fn along_rows(&self, op: Binary, x: Value, init: Value, dims: &[i64]) -> Option<Value> {
        let shape = self.shape(x);
        let inner = |d: i64| shape[d as usize + 1..].iter().product::<i64>();
        let goes = |size: i64, d: i64| size >= 2 * SLICES && size / SLICES * inner(d) >= WIDTH;
        let can = dims.iter().copied().filter(|&d| goes(shape[d as usize], d));
        let d = can.max_by_key(|&d| (shape[d as usize], -d))?; // what it gives is least
        let reduced = |y: Value| {
            let region = self.binary_reducer(op, y);
            self.reduced(&[y], &[init], dims, region).first().copied()
        };
        let (mut y, mut found) = (x, None);
        while goes(self.dim(y, d as usize), d) && (y == x || self.numel(y) > FEW) {
            let (slices, more) = self.cut(y, d);
            if let Some(more) = more {
                let more = reduced(more)?;
                found = Some(found.map_or(more, |found| self.binary(op, found, more)));
            }
            y = self.in_pairs(op, slices)?;
        }
        let y = reduced(y)?;
        Some(found.map_or(y, |found| self.binary(op, y, found)))
    }

    /// Slices of one size along a dimension, and what is left behind them.
    fn cut(&self, x: Value, dim: i64) -> (Vec<Value>, Option<Value>) {
        let size = self.dim(x, dim as usize);
        let step = size / SLICES;
        let slice = |i: i64| self.slice_dim(x, dim, i * step, (i + 1) * step, 1);
        let more = (size > SLICES * step).then(|| self.slice_dim(x, dim, SLICES * step, size, 1));
        ((0..SLICES).map(slice).collect(), more)
    }

    /// Slices of size 1.
    fn each(&self, x: Value, dim: i64) -> Vec<Value> {
        (0..self.dim(x, dim as usize)).map(|i| self.slice_dim(x, dim, i, i + 1, 1)).collect()
    }

    /// All of these, neighbours first.
    fn in_pairs(&self, op: Binary, mut xs: Vec<Value>) -> Option<Value> {
        while xs.len() > 1 {
            let pair = |pair: &[Value]| match *pair {
                [a, b] => self.binary(op, a, b),
                _ => pair[0],
            };
            xs = xs.chunks(2).map(pair).collect();
        }
        xs.pop()
    }
}

/// Whether it gives the same in any order, but for rounding.
fn is_any_order(op: Binary) -> bool {
    use Binary::{Add, And, Maximum, Minimum, Multiply, Or};
    matches!(op, Add | Multiply | Maximum | Minimum | And | Or)
}
