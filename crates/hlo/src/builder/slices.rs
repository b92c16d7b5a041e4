//! Reductions over all but the last dimensions, as elementwise ops on slices.
//!
//! XLA's compiler for CPUs computes each result of a reduction by itself. Where the last dimension stays, as in the gradient of
//! a bias, it goes down the columns, one number after another and a row apart. The sum of the first and the second half of the
//! rows, and so on until one row is left, goes along the rows, with a vector at a time; and as it adds in pairs, its rounding
//! is no worse.

use super::Builder;
use crate::ir::{Binary, Value};
use crate::types::DType;

/// Into how many slices a dimension is cut at a time. What is computed in the reduction's loop is there so many times.
const SLICES: i64 = 8;

/// So few are taken at once.
const AT_ONCE: i64 = 2 * SLICES;

/// From how many elements on it is worth a loop for each time that a dimension is cut.
const LEAST: i64 = 1 << 14;

/// How many elements have to lie side by side.
const WIDTH: i64 = 8;

impl Builder {
    /// Whether reductions over all but the last dimensions are made of slices: see the module's text. For compilers that go
    /// down columns.
    pub fn reduce_by_slices(&self, on: bool) {
        self.inner.borrow_mut().reduces_by_slices = on;
    }

    pub(crate) fn reduces_by_slices(&self) -> bool {
        self.inner.borrow().reduces_by_slices
    }

    /// The reduction of `x` over `dims` from the scalar `init`, if that is better done so.
    pub(crate) fn reduced_by_slices(&self, op: Binary, x: Value, init: Value, dims: &[i64]) -> Option<Value> {
        let shape = self.shape(x);
        let last = *dims.iter().max()?;
        if last >= shape.len() as i64
            || dims.iter().any(|&d| d < 0)
            || self.dtype(x) == DType::Pred
            || !is_any_order(op)
        {
            return None;
        }
        let many = dims.iter().map(|&d| shape[d as usize]).product::<i64>();
        let wide = shape[last as usize + 1..].iter().product::<i64>();
        let worth = many >= SLICES && wide >= WIDTH && shape.iter().product::<i64>() >= LEAST;
        if !self.reduces_by_slices() || self.is_outline() || !worth {
            return None;
        }
        let mut y = x;
        for &d in dims {
            y = self.added_along(op, y, d);
        }
        let left: Vec<i64> =
            (0..shape.len()).filter(|&d| !dims.contains(&(d as i64))).map(|d| shape[d]).collect();
        let y = self.reshape(y, &left);
        Some(self.binary(op, y, self.full(init, &left)))
    }

    /// `x` reduced to size 1 along `dim`.
    fn added_along(&self, op: Binary, mut x: Value, dim: i64) -> Value {
        let mut rest: Vec<Value> = Vec::new();
        loop {
            let size = self.dim(x, dim as usize);
            let at_once = size <= AT_ONCE;
            let step = if at_once { 1 } else { size / SLICES };
            let count = if at_once { size } else { SLICES };
            let slice = |from: i64, size: i64| self.slice_dim(x, dim, from, from + size, 1);
            let mut parts: Vec<Value> = (0..count).map(|i| slice(i * step, step)).collect();
            rest.extend((count * step..size).map(|i| slice(i, 1)));
            if at_once {
                parts.append(&mut rest);
                return self.in_pairs(op, parts).unwrap_or(x);
            }
            x = self.in_pairs(op, parts).unwrap_or(x);
        }
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
