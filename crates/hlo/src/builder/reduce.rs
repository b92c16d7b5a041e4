//! Reductions, windows and sort.

use super::Builder;
use crate::ir::{Binary, BlockId, Op, Value, Window};
use crate::types::{DType, Dims, TensorType};
use smallvec::SmallVec;

impl Builder {
    /// `stablehlo.reduce` of any number of operands of one shape over `dims`. `init` holds a scalar per operand; the
    /// region gets (builder, accumulators, elements), all scalars, and returns the new accumulators. It may use only its
    /// arguments and constants.
    pub fn reduce(
        &self,
        xs: &[Value],
        init: &[Value],
        dims: &[i64],
        reducer: impl FnOnce(&Builder, &[Value], &[Value]) -> Vec<Value>,
    ) -> Vec<Value> {
        let region = self.reducer(xs, reducer);
        self.reduced(xs, init, dims, region)
    }

    /// `stablehlo.reduce_window`: like [`Builder::reduce`] over every position of a sliding window.
    pub fn reduce_window(
        &self,
        xs: &[Value],
        init: &[Value],
        window: &Window,
        reducer: impl FnOnce(&Builder, &[Value], &[Value]) -> Vec<Value>,
    ) -> Vec<Value> {
        let region = self.reducer(xs, reducer);
        self.windows_reduced(xs, init, window, region)
    }

    /// `stablehlo.select_and_scatter`: in each window of `operand` the element that `select(current, candidate)` keeps
    /// (`false` replaces the current one) gets the window's element of `source`; overlaps are combined by `scatter`,
    /// starting from the scalar `init`. The gradient of max pooling. Windows have no dilations.
    pub fn select_and_scatter(
        &self,
        operand: Value,
        source: Value,
        init: Value,
        window: &Window,
        select: impl FnOnce(&Builder, Value, Value) -> Value,
        scatter: impl FnOnce(&Builder, Value, Value) -> Value,
    ) -> Value {
        let scalar = TensorType::scalar(self.dtype(operand));
        let pair = || [scalar.clone(), scalar.clone()];
        let first = self.region(pair(), false, |a| [select(self, a[0], a[1])]);
        let second = self.region(pair(), false, |a| [scatter(self, a[0], a[1])]);
        let run = |operand, source, window| {
            let op = Op::SelectAndScatter(Box::new(window));
            Value(self.op_full(op, &[operand, source, init], &[], &[first, second]).first)
        };
        match self.windowed_before(window, &[operand, source]) {
            Some((window, xs, order)) => self.transpose(run(xs[0], xs[1], window), &order),
            None => run(operand, source, window.clone()),
        }
    }

    /// `stablehlo.sort` of operands of one shape along `dim`, moved together. The comparator gets (builder, left
    /// elements, right elements), one scalar per operand, and returns a `Pred`: left comes before right.
    pub fn sort(
        &self,
        xs: &[Value],
        dim: i64,
        is_stable: bool,
        comparator: impl FnOnce(&Builder, &[Value], &[Value]) -> Value,
    ) -> Vec<Value> {
        let args: Vec<TensorType> =
            xs.iter().flat_map(|&x| std::iter::repeat_n(TensorType::scalar(self.dtype(x)), 2)).collect();
        let region = self.region(args, false, |a| {
            // StableHLO interleaves: left 0, right 0, left 1, right 1, ...
            let left: Vec<Value> = a.iter().copied().step_by(2).collect();
            let right: Vec<Value> = a.iter().copied().skip(1).step_by(2).collect();
            [comparator(self, &left, &right)]
        });
        self.op_full(Op::Sort { dimension: dim, is_stable }, xs, &[], &[region]).values()
    }

    /// Reduces `x` over `dims` with an elementwise op, from the scalar `init`. No `dims` returns `x`.
    pub fn reduce_with(&self, op: Binary, x: Value, init: Value, dims: &[i64]) -> Value {
        self.reduce_in_order(op, x, init, dims, true)
    }

    /// Maximum over `dims`; where there is a NaN, it may be any number. For what becomes NaN all the same, as a softmax does.
    pub fn reduce_max_of_numbers(&self, x: Value, dims: &[i64]) -> Value {
        self.reduce_in_order(Binary::Maximum, x, self.min_value(self.dtype(x)), dims, false)
    }

    /// In the order of memory, and in the form that is best for the compiler.
    fn reduce_in_order(&self, op: Binary, x: Value, init: Value, dims: &[i64], keeps_nan: bool) -> Value {
        let rank = self.shape(x).len() as i64;
        if dims.is_empty() {
            return x;
        }
        if let Some((dims, xs, order)) = self.reduced_before(dims, &[x]) {
            return self.transpose(self.reduce_in_order(op, xs[0], init, &dims, keeps_nan), &order);
        }
        let plain = |x: Value, dims: &[i64], region| {
            self.reduced(&[x], &[init], dims, region).first().copied().unwrap_or(x)
        };
        if !self.has_forms() || !dims.iter().all(|d| (0..rank).contains(d)) {
            return plain(x, dims, self.binary_reducer(op, x));
        }
        let is_library_extreme = || op == Binary::Maximum && !keeps_nan && self.is_library_reduced(x, dims);
        if self.is_library_summed(op, x, dims) || is_library_extreme() {
            return plain(x, dims, self.binary_reducer(op, x));
        }
        let merged = self.merged(x, dims);
        let is_better = merged.is_some() || self.is_vectorized(x);
        let (x, dims) = merged.unwrap_or_else(|| (x, Dims::from_slice(dims)));
        let by_slices = is_better.then(|| self.reduced_by_slices(op, x, init, &dims)).flatten();
        by_slices.unwrap_or_else(|| plain(x, &dims, self.reduce_region(op, x)))
    }

    pub(super) fn reduced(&self, xs: &[Value], init: &[Value], dims: &[i64], region: BlockId) -> Vec<Value> {
        let reduce = |xs: &[Value], dims: &[i64]| {
            let operands: SmallVec<[Value; 4]> = xs.iter().chain(init).copied().collect();
            self.op_full(Op::Reduce(Dims::from_slice(dims)), &operands, &[], &[region]).values()
        };
        match self.reduced_before(dims, xs) {
            Some((dims, xs, order)) => {
                reduce(&xs, &dims).into_iter().map(|y| self.transpose(y, &order)).collect()
            }
            None => reduce(xs, dims),
        }
    }

    /// Reduces each window of `x` with an elementwise op, from the scalar `init`.
    pub fn reduce_window_with(&self, op: Binary, x: Value, init: Value, window: &Window) -> Value {
        let region = self.binary_reducer(op, x);
        self.windows_reduced(&[x], &[init], window, region).first().copied().unwrap_or(x)
    }

    fn windows_reduced(&self, xs: &[Value], init: &[Value], window: &Window, region: BlockId) -> Vec<Value> {
        let reduce = |xs: &[Value], window: Window| {
            let operands: SmallVec<[Value; 4]> = xs.iter().chain(init).copied().collect();
            self.op_full(Op::ReduceWindow(Box::new(window)), &operands, &[], &[region]).values()
        };
        match self.windowed_before(window, xs) {
            Some((window, xs, order)) => {
                reduce(&xs, window).into_iter().map(|y| self.transpose(y, &order)).collect()
            }
            None => reduce(xs, window.clone()),
        }
    }

    /// Sum over `dims` in x's own element type (logical or for `Pred`); an empty sum is 0.
    pub fn reduce_sum(&self, x: Value, dims: &[i64]) -> Value {
        self.reduce_with(Binary::Add, x, self.scalar_like(x, 0.0), dims)
    }

    /// Product over `dims` in x's own element type (logical and for `Pred`); an empty product is 1.
    pub fn reduce_prod(&self, x: Value, dims: &[i64]) -> Value {
        self.reduce_with(Binary::Multiply, x, self.scalar_like(x, 1.0), dims)
    }

    /// Maximum over `dims`; NaN wins, an empty maximum is the type's lowest value.
    pub fn reduce_max(&self, x: Value, dims: &[i64]) -> Value {
        self.reduce_with(Binary::Maximum, x, self.min_value(self.dtype(x)), dims)
    }

    /// Minimum over `dims`; NaN wins, an empty minimum is the type's highest value.
    pub fn reduce_min(&self, x: Value, dims: &[i64]) -> Value {
        self.reduce_with(Binary::Minimum, x, self.max_value(self.dtype(x)), dims)
    }

    /// Logical or over `dims` of a `Pred` (bitwise for integers).
    pub fn reduce_any(&self, x: Value, dims: &[i64]) -> Value {
        self.reduce_with(Binary::Or, x, self.scalar_i64(self.dtype(x), 0), dims)
    }

    /// Logical and over `dims` of a `Pred` (bitwise for integers).
    pub fn reduce_all(&self, x: Value, dims: &[i64]) -> Value {
        self.reduce_with(Binary::And, x, self.scalar_i64(self.dtype(x), -1), dims)
    }

    /// The largest element along `dim` and its first position as `index_dtype`; NaN counts as largest (PyTorch's rule).
    pub fn argmax(&self, x: Value, dim: i64, index_dtype: DType) -> (Value, Value) {
        self.arg_extreme(x, dim, index_dtype, true)
    }

    /// The smallest element along `dim` and its first position as `index_dtype`; NaN counts as smallest (PyTorch's rule).
    pub fn argmin(&self, x: Value, dim: i64, index_dtype: DType) -> (Value, Value) {
        self.arg_extreme(x, dim, index_dtype, false)
    }

    fn arg_extreme(&self, x: Value, dim: i64, index_dtype: DType, largest: bool) -> (Value, Value) {
        let dtype = self.dtype(x);
        let init = if largest { self.min_value(dtype) } else { self.max_value(dtype) };
        // The highest index as the start lets any element with the starting value win its tie against it.
        let inits = [init, self.max_value(index_dtype)];
        let positions = self.iota_dim(x, index_dtype, dim);
        if let Some(found) = self.first_extreme(x, positions, inits, dim, largest) {
            return found;
        }
        let out = self.reduce(&[x, positions], &inits, &[dim], |b, acc, el| {
            let better = if largest { b.gt(acc[0], el[0]) } else { b.lt(acc[0], el[0]) };
            let (mut keep, mut tie) = (better, b.eq(acc[0], el[0]));
            if dtype.is_float() {
                let (acc_nan, el_nan) = (b.is_nan(acc[0]), b.is_nan(el[0]));
                keep = b.or(keep, b.and(acc_nan, b.not(el_nan)));
                tie = b.or(tie, b.and(acc_nan, el_nan));
            }
            let first = b.or(keep, b.and(tie, b.lt(acc[1], el[1])));
            vec![b.select(first, acc[0], el[0]), b.select(first, acc[1], el[1])]
        });
        match out[..] {
            [value, index] => (value, index),
            _ => (x, positions),
        }
    }

    /// The same in two reductions that are vectorized, if they are to be: the extreme, and the first position where it is.
    fn first_extreme(
        &self,
        x: Value,
        positions: Value,
        [start, none]: [Value; 2],
        dim: i64,
        largest: bool,
    ) -> Option<(Value, Value)> {
        if !self.is_vectorized(x) {
            return None;
        }
        let op = if largest { Binary::Maximum } else { Binary::Minimum };
        let value = self.reduce_with(op, x, start, &[dim]);
        let shape = self.shape(x);
        let others: Vec<i64> = (0..shape.len() as i64).filter(|&d| d != dim).collect();
        let everywhere = self.broadcast_in_dim(value, &shape, &others);
        let mut is_it = self.eq(x, everywhere);
        if self.dtype(x).is_float() {
            is_it = self.or(is_it, self.and(self.is_nan(x), self.is_nan(everywhere)));
        }
        let at = self.select(is_it, positions, self.full(none, &shape));
        Some((value, self.reduce_with(Binary::Minimum, at, none, &[dim])))
    }

    /// The region of a reduction: accumulators first, then elements, one scalar of each per operand.
    pub(super) fn reducer(
        &self,
        xs: &[Value],
        body: impl FnOnce(&Builder, &[Value], &[Value]) -> Vec<Value>,
    ) -> BlockId {
        let scalars = xs.iter().chain(xs).map(|&x| TensorType::scalar(self.dtype(x))).collect::<Vec<_>>();
        self.region(scalars, false, |a| {
            let (acc, el) = a.split_at(xs.len());
            body(self, acc, el)
        })
    }

    pub(super) fn binary_reducer(&self, op: Binary, x: Value) -> BlockId {
        let scalar = TensorType::scalar(self.dtype(x));
        self.region([scalar.clone(), scalar], false, |a| [self.binary(op, a[0], a[1])])
    }
}
