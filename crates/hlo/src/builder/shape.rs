//! Ops that move elements without computing: reshape, broadcast, transpose, slice, pad, concatenate, reverse, iota.

use super::Builder;
use crate::ir::{Op, PadConfig, SliceBounds, Value};
use crate::types::{DType, Dims, TensorType};

impl Builder {
    /// `stablehlo.reshape`: the same elements in row-major order, other sizes.
    pub fn reshape(&self, x: Value, shape: &[i64]) -> Value {
        let ty = self.ty(x);
        if ty.shape[..] == *shape {
            return x;
        }
        if let Some(before) = self.reshaped_before(x) {
            return self.reshape(before, shape);
        }
        self.op_as(Op::Reshape, &[x], TensorType::new(ty.dtype, shape))
    }

    /// `stablehlo.broadcast_in_dim`: dimension i of x becomes dimension `dims[i]` of `shape`; sizes are equal or 1.
    pub fn broadcast_in_dim(&self, x: Value, shape: &[i64], dims: &[i64]) -> Value {
        let ty = self.ty(x);
        if ty.shape[..] == *shape && dims.iter().copied().eq(0..shape.len() as i64) {
            return x;
        }
        if ty.rank() == 0
            && dims.is_empty()
            && let Some(v) = self.splat_of(x, shape)
        {
            return v;
        }
        self.op_as(Op::BroadcastInDim(Dims::from_slice(dims)), &[x], TensorType::new(ty.dtype, shape))
    }

    /// Broadcasts to `shape` as numpy does: aligned at the last dimension, sizes 1 stretch.
    pub fn broadcast_to(&self, x: Value, shape: &[i64]) -> Value {
        let rank = self.rank(x);
        if rank > shape.len() {
            let ty = TensorType::new(self.dtype(x), shape);
            return self.refuse("broadcast_to", &[x], format!("rank {rank} cannot become {shape:?}"), ty);
        }
        let first = (shape.len() - rank) as i64;
        let dims: Dims = (first..shape.len() as i64).collect();
        self.broadcast_in_dim(x, shape, &dims)
    }

    /// The shape that `x` and `y` broadcast to, numpy's rule.
    pub fn broadcast_shape(&self, x: Value, y: Value) -> Dims {
        let (a, b) = (self.shape(x), self.shape(y));
        let rank = a.len().max(b.len());
        let mut shape = Dims::new();
        for i in 0..rank {
            // Sizes counted from the last dimension; a missing one counts as 1.
            let at = |s: &Dims| (i + s.len()).checked_sub(rank).map_or(1, |j| s[j]);
            let (n, m) = (at(&a), at(&b));
            if n != m && n != 1 && m != 1 {
                let reason = format!("sizes {n} and {m} do not broadcast in dimension {i}");
                self.refuse("broadcast_pair", &[x, y], reason, TensorType::scalar(DType::F32));
            }
            shape.push(if n == 1 { m } else { n });
        }
        shape
    }

    /// Both operands broadcast to their common shape.
    pub fn broadcast_pair(&self, x: Value, y: Value) -> (Value, Value) {
        let shape = self.broadcast_shape(x, y);
        (self.broadcast_to(x, &shape), self.broadcast_to(y, &shape))
    }

    /// Inserts a dimension of size 1 before dimension `dim` (0 to rank).
    pub fn unsqueeze(&self, x: Value, dim: i64) -> Value {
        let mut shape = self.shape(x);
        if dim < 0 || dim as usize > shape.len() {
            return self.refuse("unsqueeze", &[x], format!("dimension {dim} is out of range"), self.ty(x));
        }
        shape.insert(dim as usize, 1);
        self.reshape(x, &shape)
    }

    /// Removes the dimensions `dims`, which must have size 1.
    pub fn squeeze(&self, x: Value, dims: &[i64]) -> Value {
        let ty = self.ty(x);
        let bad = dims.iter().find(|&&d| d < 0 || ty.shape.get(d as usize).is_none_or(|&n| n != 1));
        if let Some(d) = bad {
            return self.refuse(
                "squeeze",
                &[x],
                format!("dimension {d} does not exist or its size is not 1"),
                ty,
            );
        }
        let keep = |i: &usize| !dims.contains(&(*i as i64));
        let shape: Dims = (0..ty.rank()).filter(keep).map(|i| ty.shape[i]).collect();
        self.reshape(x, &shape)
    }

    /// `stablehlo.transpose`: dimension i of the result is dimension `permutation[i]` of x.
    pub fn transpose(&self, x: Value, permutation: &[i64]) -> Value {
        if permutation.iter().copied().eq(0..self.rank(x) as i64) {
            return x;
        }
        if let Some((before, both)) = self.transposed_before(x, permutation) {
            return self.transpose(before, &both);
        }
        self.op(Op::Transpose(Dims::from_slice(permutation)), &[x])
    }

    /// Swaps two dimensions.
    pub fn swap_dims(&self, x: Value, a: i64, b: i64) -> Value {
        let rank = self.rank(x) as i64;
        if !(0..rank).contains(&a) || !(0..rank).contains(&b) {
            return self.refuse(
                "swap_dims",
                &[x],
                format!("dimensions {a} and {b} are out of range"),
                self.ty(x),
            );
        }
        let mut permutation: Dims = (0..rank).collect();
        permutation.swap(a as usize, b as usize);
        self.transpose(x, &permutation)
    }

    /// Swaps the last two dimensions.
    pub fn transpose_last2(&self, x: Value) -> Value {
        let rank = self.rank(x) as i64;
        self.swap_dims(x, rank - 2, rank - 1)
    }

    /// `stablehlo.slice`: elements `start[i], start[i] + stride[i], ..` below `limit[i]` in every dimension.
    pub fn slice(&self, x: Value, start: &[i64], limit: &[i64], stride: &[i64]) -> Value {
        let full = |shape: &Dims| {
            start.iter().all(|&s| s == 0) && stride.iter().all(|&s| s == 1) && shape[..] == *limit
        };
        let shape = self.shape(x);
        // What takes all of it at one size may take a part at another.
        if full(&shape) && start.len() == shape.len() && stride.len() == shape.len() && !self.is_outline() {
            return x;
        }
        let dims = Dims::from_slice;
        let bounds = SliceBounds { start: dims(start), limit: dims(limit), strides: dims(stride) };
        self.moving(Op::Slice(Box::new(bounds)), &[x], 0..1)
    }

    /// Slices one dimension, `start..limit` in steps of `stride`, and keeps the others whole.
    pub fn slice_dim(&self, x: Value, dim: i64, start: i64, limit: i64, stride: i64) -> Value {
        let shape = self.shape(x);
        if dim < 0 || dim as usize >= shape.len() {
            return self.refuse("slice_dim", &[x], format!("dimension {dim} is out of range"), self.ty(x));
        }
        let (mut starts, mut limits) = (Dims::from_elem(0, shape.len()), shape);
        let mut strides = Dims::from_elem(1, starts.len());
        (starts[dim as usize], limits[dim as usize], strides[dim as usize]) = (start, limit, stride);
        self.slice(x, &starts, &limits, &strides)
    }

    /// Element `index` of dimension `dim`, which disappears (PyTorch's `select`).
    pub fn index_dim(&self, x: Value, dim: i64, index: i64) -> Value {
        let one = self.slice_dim(x, dim, index, index.saturating_add(1), 1);
        self.squeeze(one, &[dim])
    }

    /// `stablehlo.pad` with the scalar `value`: `low` and `high` edges (negative cuts), `interior` holes between elements.
    pub fn pad(&self, x: Value, value: Value, low: &[i64], high: &[i64], interior: &[i64]) -> Value {
        let rank = self.rank(x);
        let nothing = |dims: &[i64]| dims.len() == rank && dims.iter().all(|&d| d == 0);
        if nothing(low) && nothing(high) && nothing(interior) && !self.is_outline() {
            return x;
        }
        let dims = Dims::from_slice;
        let config = PadConfig { low: dims(low), high: dims(high), interior: dims(interior) };
        self.moving(Op::Pad(Box::new(config)), &[x, value], 0..2)
    }

    /// Pads one dimension's edges with the scalar `value`.
    pub fn pad_dim(&self, x: Value, value: Value, dim: i64, low: i64, high: i64) -> Value {
        let rank = self.rank(x);
        if dim < 0 || dim as usize >= rank {
            return self.refuse("pad_dim", &[x], format!("dimension {dim} is out of range"), self.ty(x));
        }
        let (mut lows, mut highs) = (Dims::from_elem(0, rank), Dims::from_elem(0, rank));
        (lows[dim as usize], highs[dim as usize]) = (low, high);
        self.pad(x, value, &lows, &highs, &Dims::from_elem(0, rank))
    }

    /// `stablehlo.concatenate` along `dim`; all other sizes agree.
    pub fn concatenate(&self, xs: &[Value], dim: i64) -> Value {
        if let [x] = xs
            && (0..self.rank(*x) as i64).contains(&dim)
        {
            return *x;
        }
        self.moving(Op::Concatenate(dim), xs, 0..xs.len())
    }

    /// `stablehlo.reverse`: reads the dimensions `dims` backwards.
    pub fn reverse(&self, x: Value, dims: &[i64]) -> Value {
        if dims.is_empty() {
            return x;
        }
        self.moving(Op::Reverse(Dims::from_slice(dims)), &[x], 0..1)
    }

    /// `stablehlo.iota`: every element is its position in dimension `dim`; any number type.
    pub fn iota(&self, ty: TensorType, dim: i64) -> Value {
        self.op_as(Op::Iota(dim), &[], ty)
    }

    /// [`Builder::iota`] with the shape of `x`.
    pub fn iota_dim(&self, x: Value, dtype: DType, dim: i64) -> Value {
        self.iota(TensorType::new(dtype, self.shape(x)), dim)
    }
}
