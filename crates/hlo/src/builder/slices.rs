//! Reductions for compilers that go from number to number.
//!
//! XLA's compiler for CPUs computes each result of a reduction by itself, one number after another: down a column, a row
//! apart, where the last dimension stays, as in the gradient of a bias; and along a row each waits for the one before. The sum
//! of the first and the second half, and so on, goes through memory with a vector at a time; and as it adds in pairs, its
//! rounding is no worse.
//!
//! What is left when the slices are few is a reduction, and never an elementwise op: XLA would compute that anew for each
//! element of what it is spread over.
//!
//! Rows of float32 are reduced by a library that XLA brings along, if its operand is in memory.

use super::Builder;
use crate::ir::{Binary, BlockId, Op, Value};
use crate::types::{DType, Dims, TensorType};

/// Into how many slices a dimension is cut at a time. What is computed in the reduction's loop is there so many times.
const SLICES: i64 = 8;

/// How many elements have to lie side by side in a slice.
const WIDTH: i64 = 8;

/// From how many elements on it is worth a loop for each time that a dimension is cut.
const LEAST: i64 = 1 << 14;

/// In groups of how many XLA adds the numbers of a longer dimension.
const GROUP: i64 = 32;

/// How many numbers that are added one after another have lost digits.
const LONG: i64 = 1 << 8;

/// From how many elements on what slices give, an eighth of them, is too much memory for it.
const MOST: i64 = 1 << 28;

/// With how few elements it is not cut once more.
const FEW: i64 = 1 << 12;

/// How long a row has to be for slices where the compiler goes through a short one with vectors.
const SHORT: i64 = 256;

/// How many numbers the library adds up at most: it has few sums at a time, and a long one has lost digits.
const LIBRARY_MOST: i64 = 1 << 13;

/// From how many elements on XLA gives a reduction to its library.
const LIBRARY_LEAST: i64 = 1 << 15;

impl Builder {
    /// Whether reductions are for compilers that go from number to number: see the module's text. Then the library of XLA
    /// that takes reductions may be on, which loses NaN in a maximum and a minimum.
    pub fn vectorize_reductions(&self, on: bool) {
        self.inner.borrow_mut().vectorizes_reductions = on;
    }

    pub(crate) fn vectorizes_reductions(&self) -> bool {
        self.inner.borrow().vectorizes_reductions
    }

    /// Whether this one is, which is of such a size that its form makes a difference.
    pub(super) fn is_vectorized(&self, x: Value) -> bool {
        self.has_forms() && (LEAST..MOST).contains(&self.numel(x))
    }

    /// Whether there is a choice of forms. In an outline it is made later, for what becomes of it.
    pub(super) fn has_forms(&self) -> bool {
        self.vectorizes_reductions() && !self.is_outline()
    }

    /// With the short dimensions that are reduced and lie side by side as one, if that is better: XLA adds the numbers of a long
    /// dimension in groups, and those of several short ones one after another, with all their rounding.
    pub(super) fn merged(&self, x: Value, dims: &[i64]) -> Option<(Value, Dims)> {
        if self.numel(x) < LONG || !self.dtype(x).is_float() {
            return None;
        }
        let shape = self.shape(x);
        let sizes = || dims.iter().map(|&d| shape[d as usize]);
        let loses = sizes().product::<i64>() >= LONG && sizes().all(|size| size <= GROUP);
        let is_reduced = |d: usize| dims.contains(&(d as i64));
        let (mut merged, mut reduced) = (Dims::new(), Dims::new());
        for (d, &size) in shape.iter().enumerate() {
            match merged.last_mut() {
                Some(before) if is_reduced(d - 1) && is_reduced(d) => *before *= size,
                _ => {
                    if is_reduced(d) {
                        reduced.push(merged.len() as i64);
                    }
                    merged.push(size);
                }
            }
        }
        (loses && reduced.len() < dims.len()).then(|| (self.reshape(x, &merged), reduced))
    }

    /// Whether XLA's library reduces `x` over these dimensions, along rows. It does not take what XLA computes best in the
    /// reduction's own loop.
    pub(super) fn is_library_reduced(&self, x: Value, dims: &[i64]) -> bool {
        let shape = self.shape(x);
        let last = shape.iter().rposition(|&size| size > 1);
        let along_rows = last.is_some_and(|last| dims.contains(&(last as i64)));
        let inner = self.inner.borrow();
        let fuses = matches!(
            inner.made_by(x),
            Some((
                Op::Binary(Binary::Multiply)
                    | Op::Reshape
                    | Op::BroadcastInDim(_)
                    | Op::Slice(_)
                    | Op::Concatenate(_)
                    | Op::Convert,
                _
            ))
        );
        drop(inner);
        along_rows && !fuses && self.dtype(x) == DType::F32 && self.numel(x) >= LIBRARY_LEAST
    }

    /// The reduction of `x` over `dims` from the scalar `init`, which changes nothing, if slices are better. They do not become
    /// narrower than a vector, and what they give is reduced as it is.
    pub(super) fn reduced_by_slices(&self, op: Binary, x: Value, init: Value, dims: &[i64]) -> Option<Value> {
        if !is_any_order(op) || self.dtype(x) == DType::Pred {
            return None;
        }
        let inner = |y: Value, d: i64| self.shape(y)[d as usize + 1..].iter().product::<i64>();
        let size = |y: Value, d: i64| self.dim(y, d as usize);
        let is_column = |y: Value, d: i64| inner(y, d) >= WIDTH;
        let goes = |y: Value, d: i64| {
            let shortest = if self.is_choice(op, x) && !is_column(y, d) { SHORT } else { 2 * SLICES };
            let more = y == x || is_column(y, d) || self.numel(y) > FEW;
            more && size(y, d) >= shortest && size(y, d) / SLICES * inner(y, d) >= WIDTH
        };
        // What the longest gives is least.
        let longest =
            |y: Value| dims.iter().copied().filter(|&d| goes(y, d)).max_by_key(|&d| (size(y, d), -d));
        let reduced =
            |y: Value| self.reduced(&[y], &[init], dims, self.reduce_region(op, y)).first().copied();
        let (mut y, mut found) = (x, None);
        let mut cut = |y: Value, d: i64, slices: i64| {
            let (slices, more) = self.cut(y, d, slices);
            if let Some(more) = more {
                let more = reduced(more)?;
                found = Some(found.map_or(more, |found| self.binary(op, found, more)));
            }
            self.in_pairs(op, slices)
        };
        longest(y)?;
        while !self.is_library_summed(op, y, dims)
            && let Some(d) = longest(y)
        {
            y = cut(y, d, SLICES)?;
        }
        // Down a column, what has to be a loop over rows is one over two or three, and so over vectors of them.
        for &d in dims {
            if is_column(y, d) && size(y, d) > 3 {
                y = cut(y, d, size(y, d) / 2)?;
            }
        }
        let y = reduced(y)?;
        Some(found.map_or(y, |found| self.binary(op, y, found)))
    }

    /// Whether the library adds these up, without too many numbers in one sum.
    pub(super) fn is_library_summed(&self, op: Binary, x: Value, dims: &[i64]) -> bool {
        let count = || dims.iter().map(|&d| self.dim(x, d as usize)).product::<i64>();
        op == Binary::Add && self.is_library_reduced(x, dims) && count() <= LIBRARY_MOST
    }

    /// Whether a reduction is by comparing and choosing. A maximum and a minimum that XLA's library does not know keep NaN;
    /// and they are half of the instructions so.
    fn is_choice(&self, op: Binary, x: Value) -> bool {
        matches!(op, Binary::Maximum | Binary::Minimum) && self.dtype(x).is_float()
    }

    /// What a reduction does with two numbers.
    pub(super) fn reduce_region(&self, op: Binary, x: Value) -> BlockId {
        if !self.is_choice(op, x) {
            return self.binary_reducer(op, x);
        }
        let scalar = TensorType::scalar(self.dtype(x));
        self.region([scalar.clone(), scalar], false, |a| {
            let better = if op == Binary::Maximum { self.gt(a[0], a[1]) } else { self.lt(a[0], a[1]) };
            [self.select(self.or(better, self.is_nan(a[0])), a[0], a[1])]
        })
    }

    /// So many slices of one size along a dimension, and what is left behind them.
    fn cut(&self, x: Value, dim: i64, slices: i64) -> (Vec<Value>, Option<Value>) {
        let size = self.dim(x, dim as usize);
        let step = size / slices;
        let slice = |i: i64| self.slice_dim(x, dim, i * step, (i + 1) * step, 1);
        let more = (size > slices * step).then(|| self.slice_dim(x, dim, slices * step, size, 1));
        ((0..slices).map(slice).collect(), more)
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
