use super::indexing::assert_range;
use super::matmul::accumulator;
use super::scatter::scatter_rows;
use crate::args::Scalar;
use crate::context::Ctx;
use crate::dtype::scalar_name;
use crate::error::{ErrorKind, Result, runtime};
use crate::op;
use crate::row::Row;
use oxitorch_hlo::{Binary, DType, Value};

/// The rows of this family.
pub static ROWS: &[Row] = &[
    op!("embedding", embedding),
    op!("embedding_dense_backward", embedding_dense_backward),
    op!("embedding_renorm", embedding_renorm),
];

pub(super) fn check_indices(c: &Ctx, indices: Value, argument: &str) -> Result<()> {
    let dtype = c.dtype(indices);
    if matches!(dtype, DType::S32 | DType::S64) {
        return Ok(());
    }
    let (op, dtype) = (c.op, scalar_name(dtype));
    Err(runtime(format!(
        "Expected tensor for argument {argument} 'indices' to have one of the following scalar types: Long, Int; but \
         got torch.{dtype}Tensor instead (while checking arguments for {op})"
    )))
}

fn embedding(
    c: &Ctx,
    weight: Value,
    indices: Value,
    _padding_idx: i64,
    _scale_grad_by_freq: bool,
    _sparse: bool,
) -> Result<Value> {
    let shape = c.shape(weight);
    if shape.len() != 2 {
        return Err(runtime("'weight' must be 2-D"));
    }
    check_indices(c, indices, "#1")?;
    assert_range(c, ErrorKind::Index, "index out of range in self", indices, 0..shape[0], shape[1]);
    let mut result = c.shape(indices);
    result.push(shape[1]);
    if result.contains(&0) || shape[0] == 0 {
        return Ok(c.full(c.scalar_i64(c.dtype(weight), 0), &result));
    }
    Ok(c.take_dim(weight, indices, 0))
}

/// How often each of `classes` indices occurs, in `dtype`.
pub(super) fn occurrences(c: &Ctx, indices: Value, classes: i64, dtype: DType) -> Value {
    let zeros = c.full(c.scalar_i64(dtype, 0), &[classes]);
    let ones = c.full(c.scalar_i64(dtype, 1), &c.shape(indices));
    scatter_rows(c, zeros, 0, indices, ones, Some(Binary::Add))
}

fn embedding_dense_backward(
    c: &Ctx,
    grad: Value,
    indices: Value,
    classes: i64,
    padding_idx: i64,
    scale_grad_by_freq: bool,
) -> Result<Value> {
    check_indices(c, indices, "#2")?;
    let (dtype, shape) = (c.dtype(grad), c.shape(grad));
    let (count, width) = (c.numel(indices), shape.last().copied().unwrap_or(1));
    let acc = accumulator(dtype);
    let mut rows = c.to(c.reshape(grad, &[count, width]), acc);
    let mut index = c.reshape(indices, &[count]);
    if scale_grad_by_freq && count > 0 {
        let often = c.take_dim(occurrences(c, index, classes, acc), index, 0);
        rows = c.divide(rows, c.broadcast_in_dim(often, &[count, width], &[0]));
    }
    if padding_idx >= 0 {
        // Updates that point behind the last row are dropped.
        let constant = |x: i64| c.full(c.scalar_i64(c.dtype(index), x), &[count]);
        index = c.select(c.eq(index, constant(padding_idx)), constant(classes), index);
    }
    let zeros = c.full(c.scalar_i64(acc, 0), &[classes, width]);
    Ok(c.to(scatter_rows(c, zeros, 0, index, rows, Some(Binary::Add)), dtype))
}

/// Rows that are looked up and whose norm is above `max_norm` are scaled down to it.
fn embedding_renorm(
    c: &Ctx,
    weight: Value,
    indices: Value,
    max_norm: Scalar,
    norm_type: f64,
) -> Result<Value> {
    let shape = c.shape(weight);
    if shape.len() != 2 {
        return Err(runtime("'self' must be 2-D"));
    }
    check_indices(c, indices, "#2")?;
    let wide = c.to(weight, accumulator(c.dtype(weight)));
    let dtype = c.dtype(wide);
    let constant = |x: f64| c.full(c.scalar_f64(dtype, x), &shape[..1]);
    let size = c.abs(wide);
    let norm = if norm_type.is_infinite() {
        c.reduce_max(size, &[1])
    } else {
        let powers = c.power(size, c.full(c.scalar_f64(dtype, norm_type), &shape));
        c.power(c.reduce_sum(powers, &[1]), constant(1.0 / norm_type))
    };
    let index = c.reshape(indices, &[c.numel(indices)]);
    let used = c.full(c.scalar_bool(true), &c.shape(index));
    let used = scatter_rows(c, c.full(c.scalar_bool(false), &shape[..1]), 0, index, used, None);
    let limit = c.number_like(max_norm, dtype, &shape[..1]);
    let scale = c.divide(limit, c.add(norm, constant(1e-7)));
    let scale = c.select(c.and(used, c.gt(norm, limit)), scale, constant(1.0));
    Ok(c.to(c.multiply(wide, c.broadcast_in_dim(scale, &shape, &[0])), c.dtype(weight)))
}
