//! Ops that move elements.

use super::*;

pub(super) fn iota(want: &TensorType, dim: i64) -> Result {
    ensure!(want.dtype != DType::Pred, "cannot count in i1");
    dim_in_range(dim, want.rank(), "iota dimension")?;
    one(want.clone())
}

pub(super) fn broadcast_in_dim(x: &TensorType, want: &TensorType, dims: &[i64]) -> Result {
    ensure_types!(x.dtype == want.dtype, "cannot change the element type to {}", want.dtype);
    same_len(dims.len(), x.rank(), "broadcast_dimensions")?;
    unique_dims(dims, want.rank(), "broadcast dimension")?;
    for (&size, &d) in x.shape.iter().zip(dims) {
        let to = want.shape[d as usize];
        ensure!(size == 1 || size == to, "size {size} cannot become {to} in dimension {d} of {want}");
    }
    one(want.clone())
}

pub(super) fn reshape(x: &TensorType, want: &TensorType) -> Result {
    ensure_types!(x.dtype == want.dtype, "cannot change the element type to {}", want.dtype);
    ensure!(x.numel() == want.numel(), "{} elements do not fit {want}", x.numel());
    one(want.clone())
}

pub(super) fn transpose(x: &TensorType, perm: &[i64]) -> Result {
    same_len(perm.len(), x.rank(), "permutation")?;
    unique_dims(perm, x.rank(), "permutation entry")?;
    one(x.with_shape(perm.iter().map(|&p| x.shape[p as usize]).collect::<Dims>()))
}

pub(super) fn slice(x: &TensorType, b: &SliceBounds) -> Result {
    for (dims, what) in [(&b.start, "start_indices"), (&b.limit, "limit_indices"), (&b.strides, "strides")] {
        same_len(dims.len(), x.rank(), what)?;
    }
    let mut shape = Dims::new();
    for (i, &size) in x.shape.iter().enumerate() {
        let (start, limit, stride) = (b.start[i], b.limit[i], b.strides[i]);
        ensure!(stride >= 1, "stride {stride} must be at least 1");
        ensure!(
            0 <= start && start <= limit && limit <= size,
            "bounds {start}:{limit} do not fit dimension {i} of size {size}"
        );
        shape.push((limit - start).div_euclid(stride) + i64::from((limit - start) % stride != 0));
    }
    one(x.with_shape(shape))
}

pub(super) fn pad(x: &TensorType, value: &TensorType, c: &PadConfig) -> Result {
    ensure!(
        value.rank() == 0 && value.dtype == x.dtype,
        "the padding value must be a scalar of type {}",
        x.dtype
    );
    for (dims, what) in [(&c.low, "low"), (&c.high, "high"), (&c.interior, "interior")] {
        same_len(dims.len(), x.rank(), what)?;
    }
    let mut shape = Dims::new();
    for (i, &size) in x.shape.iter().enumerate() {
        ensure!(c.interior[i] >= 0, "interior padding {} is negative", c.interior[i]);
        let step = checked(c.interior[i].checked_add(1))?;
        let padded = dilated(size, step).and_then(|n| n.checked_add(c.low[i])?.checked_add(c.high[i]));
        let padded = checked(padded)?;
        ensure!(padded >= 0, "dimension {i} would have size {padded}");
        shape.push(padded);
    }
    one(x.with_shape(shape))
}

pub(super) fn concatenate(ts: &[&TensorType], dim: i64) -> Result {
    ensure!(!ts.is_empty(), "needs at least one operand");
    let first = ts[0];
    let at = dim_in_range(dim, first.rank(), "dimension")?;
    let mut total = 0i64;
    for (i, t) in ts.iter().enumerate() {
        ensure_types!(t.dtype == first.dtype, "operand {i} has another element type than operand 0");
        ensure!(t.rank() == first.rank(), "operand {i} has another rank than operand 0");
        let agree = (0..t.rank()).all(|d| d == at || t.shape[d] == first.shape[d]);
        ensure!(agree, "operand {i} differs from operand 0 outside of dimension {dim}");
        total = checked(total.checked_add(t.shape[at]))?;
    }
    let mut shape = first.shape.clone();
    shape[at] = total;
    one(first.with_shape(shape))
}

pub(super) fn reverse(x: &TensorType, dims: &[i64]) -> Result {
    unique_dims(dims, x.rank(), "dimension")?;
    one(x.clone())
}

/// Start indices of the dynamic ops: one integer scalar per dimension, all of one type.
fn start_indices(indices: &[&TensorType], rank: usize) -> Result<()> {
    same_len(indices.len(), rank, "start indices")?;
    for t in indices {
        ensure!(t.rank() == 0 && t.dtype.is_integral(), "start indices must be integer scalars, got {t}");
        ensure_types!(t.dtype == indices[0].dtype, "start indices must have one element type");
    }
    Ok(())
}

pub(super) fn dynamic_slice(ts: &[&TensorType], sizes: &[i64]) -> Result {
    let (x, indices) = ts.split_first().ok_or_else(|| Broken::Other("needs an operand".to_owned()))?;
    start_indices(indices, x.rank())?;
    same_len(sizes.len(), x.rank(), "slice_sizes")?;
    for (i, (&size, &of)) in sizes.iter().zip(&x.shape).enumerate() {
        ensure!(0 <= size && size <= of, "slice size {size} does not fit dimension {i} of size {of}");
    }
    one(x.with_shape(sizes))
}

pub(super) fn dynamic_update_slice(ts: &[&TensorType]) -> Result {
    ensure!(ts.len() >= 2, "needs an operand and an update");
    let (x, update) = (ts[0], ts[1]);
    ensure_types!(x.dtype == update.dtype, "the update must have the operand's element type");
    same_len(update.rank(), x.rank(), "the update's shape")?;
    for (i, (&size, &of)) in update.shape.iter().zip(&x.shape).enumerate() {
        ensure!(size <= of, "update size {size} does not fit dimension {i} of size {of}");
    }
    start_indices(&ts[2..], x.rank())?;
    one(x.clone())
}
