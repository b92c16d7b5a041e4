//! Indexed reads and writes: gather, scatter, dynamic slices.

use super::Builder;
use crate::ir::{BlockId, GatherDims, Op, ScatterDims, ScatterFlags, Value};
use crate::types::{DType, Dims};

impl Builder {
    /// `stablehlo.gather`: one slice of `slice_sizes` from `x` for every index vector in `indices`. Start indices are
    /// clamped so that the slice fits. `sorted` promises ascending indices.
    pub fn gather(
        &self,
        x: Value,
        indices: Value,
        dims: &GatherDims,
        slice_sizes: &[i64],
        sorted: bool,
    ) -> Value {
        let attrs = Box::new((dims.clone(), Dims::from_slice(slice_sizes)));
        self.moving(Op::Gather(attrs, sorted), &[x, indices], 0..1)
    }

    /// `stablehlo.scatter`: combines each update into `xs` at its index vector; updates that do not fit are dropped. The
    /// region gets (builder, current elements, update elements), scalars, and returns the new elements. Several `xs` must be
    /// different values: XLA's CPU backend updates one buffer for two equal operands and gets both results wrong.
    pub fn scatter(
        &self,
        xs: &[Value],
        indices: Value,
        updates: &[Value],
        dims: &ScatterDims,
        flags: ScatterFlags,
        combine: impl FnOnce(&Builder, &[Value], &[Value]) -> Vec<Value>,
    ) -> Vec<Value> {
        if let Some(i) = (1..xs.len()).find(|&i| xs[..i].contains(&xs[i])) {
            let reason = format!("input {i} is the same value as an earlier one; scatter them one at a time");
            return xs
                .iter()
                .map(|&x| self.refuse("stablehlo.scatter", xs, reason.clone(), self.ty(x)))
                .collect();
        }
        let region = self.reducer(xs, combine);
        if let ([x], [update]) = (xs, updates)
            && let Some(bits) = self.moved_as(self.dtype(*x))
            && self.replaces(region)
        {
            return vec![self.scatter_bits((*x, bits), indices, *update, dims, flags)];
        }
        let operands: Vec<Value> = xs.iter().chain([&indices]).chain(updates).copied().collect();
        self.op_full(Op::Scatter(Box::new(dims.clone()), flags), &operands, &[], &[region]).values()
    }

    /// Whether a region of a scatter gives back what it is given as the update.
    fn replaces(&self, region: BlockId) -> bool {
        let inner = self.inner.borrow();
        let block = &inner.arena.blocks[region as usize];
        block.ops.is_empty() && block.returns.as_slice() == &block.args[block.args.len() / 2..]
    }

    /// A scatter that replaces elements, which are moved as integers.
    fn scatter_bits(
        &self,
        (x, bits): (Value, DType),
        indices: Value,
        update: Value,
        dims: &ScatterDims,
        flags: ScatterFlags,
    ) -> Value {
        let (x_bits, update) = (self.as_bits(x, bits), self.as_bits(update, bits));
        let region = self.reducer(&[x_bits], |_, _, updates| updates.to_vec());
        let op = Op::Scatter(Box::new(dims.clone()), flags);
        let found = self.op_full(op, &[x_bits, indices, update], &[], &[region]).values();
        self.bitcast_convert(found[0], self.dtype(x))
    }

    /// `stablehlo.dynamic_slice`: `sizes` elements from `start`, one integer scalar per dimension, clamped so that the
    /// slice fits.
    pub fn dynamic_slice(&self, x: Value, start: &[Value], sizes: &[i64]) -> Value {
        let operands: Vec<Value> = [x].iter().chain(start).copied().collect();
        self.moving(Op::DynamicSlice(Dims::from_slice(sizes)), &operands, 0..1)
    }

    /// `stablehlo.dynamic_update_slice`: `x` with `update` written at `start`, one integer scalar per dimension, clamped
    /// so that the update fits.
    pub fn dynamic_update_slice(&self, x: Value, update: Value, start: &[Value]) -> Value {
        let operands: Vec<Value> = [x, update].iter().chain(start).copied().collect();
        self.moving(Op::DynamicUpdateSlice, &operands, 0..2)
    }

    /// The elements of dimension `dim` at integer `indices` of any shape, which takes the place of that dimension
    /// (numpy's `take`, PyTorch's `index_select` and `embedding`). Indices out of range are clamped.
    pub fn take_dim(&self, x: Value, indices: Value, dim: i64) -> Value {
        let (shape, index_rank) = (self.shape(x), self.rank(indices) as i64);
        let rank = shape.len() as i64;
        if !(0..rank).contains(&dim) {
            return self.refuse(
                "take_dim",
                &[x, indices],
                format!("dimension {dim} is out of range"),
                self.ty(x),
            );
        }
        let dims = GatherDims {
            offset_dims: (0..dim).chain(dim + index_rank..rank - 1 + index_rank).collect(),
            collapsed_slice_dims: Dims::from_slice(&[dim]),
            start_index_map: Dims::from_slice(&[dim]),
            index_vector_dim: index_rank,
            ..GatherDims::default()
        };
        let mut sizes = shape;
        // An empty dimension has nothing to take; gather wants slices that fit.
        sizes[dim as usize] = sizes[dim as usize].min(1);
        self.gather(x, indices, &dims, &sizes, false)
    }

    /// Picks along `dim` with one index per element of the result: `out[i][j] = x[indices[i][j]][j]` for `dim` 0
    /// (PyTorch's `gather`). `indices` has x's rank and no larger sizes outside of `dim`. Indices are clamped.
    pub fn take_along_dim(&self, x: Value, indices: Value, dim: i64) -> Value {
        let (shape, index_shape) = (self.shape(x), self.shape(indices));
        let rank = shape.len() as i64;
        if !(0..rank).contains(&dim) || index_shape.len() != shape.len() {
            let reason = format!("needs indices of x's rank and a dimension, got {dim}");
            return self.refuse("take_along_dim", &[x, indices], reason, self.ty(x));
        }
        let mut limit = index_shape;
        limit[dim as usize] = shape[dim as usize];
        let ones = Dims::from_elem(1, shape.len());
        let x = self.slice(x, &Dims::from_elem(0, shape.len()), &limit, &ones);
        let others: Dims = (0..rank).filter(|&d| d != dim).collect();
        let dims = GatherDims {
            collapsed_slice_dims: Dims::from_slice(&[dim]),
            operand_batching_dims: others.clone(),
            start_indices_batching_dims: others,
            start_index_map: Dims::from_slice(&[dim]),
            index_vector_dim: rank,
            ..GatherDims::default()
        };
        let sizes: Dims = limit.iter().map(|&n| n.min(1)).collect();
        self.gather(x, indices, &dims, &sizes, false)
    }
}
