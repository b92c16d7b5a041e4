//! Softmax and its derivatives, in float32 for reduced floats.

use super::reductions::spread;
use crate::args::Tensor;
use crate::context::Ctx;
use crate::dtype::{Category, category, opmath, scalar_name};
use crate::error::{Result, not_implemented, runtime};
use crate::op;
use crate::row::{Layout, Row};
use oxitorch_hlo::{DType, Dims, Value};

/// The rows of this family.
pub static ROWS: &[Row] = &[
    op!("_softmax", softmax),
    op!("_log_softmax", log_softmax),
    op!("_softmax_backward_data", softmax_backward),
    op!("_log_softmax_backward_data", log_softmax_backward),
    op!("_masked_softmax", masked_softmax).layout(Layout::LikeFirst),
    op!("_masked_softmax_backward", masked_softmax_backward),
    op!("_safe_softmax", safe_softmax),
];

/// The dimension as a list to reduce over: nothing for a 0-d tensor.
fn axis(c: &Ctx, dim: i64, rank: usize) -> Result<Dims> {
    c.dim(dim, rank)?;
    c.dims(&[dim], rank)
}

/// Checks the dtype and gives the dtype of the result; `half_to_float` computes in and returns float32.
fn result_dtype(c: &Ctx, kernel: &str, x: Tensor, dims: &[i64], half_to_float: bool) -> Result<DType> {
    if category(x.dtype) != Category::Float || opmath(x.dtype).size_bytes() < x.dtype.size_bytes() {
        let last = dims.iter().all(|&d| d + 1 == x.rank as i64);
        let kernel = format!("{kernel}{}_kernel_impl", if last { "_lastdim" } else { "" });
        return Err(not_implemented(&kernel, x.dtype));
    }
    match (half_to_float, x.dtype) {
        (false, dtype) => Ok(dtype),
        (true, DType::F16 | DType::BF16) => Ok(DType::F32),
        _ => Err(runtime(format!("{}: conversion to float is supported for Half and BFloat16 only", c.op))),
    }
}

/// `x` minus its maximum over `dims`, so that the exponential cannot overflow.
fn shifted(c: &Ctx, x: Value, dims: &[i64]) -> Value {
    c.subtract(x, spread(c, c.reduce_max_of_numbers(x, dims), &c.shape(x), dims))
}

/// Softmax of a float tensor in its own dtype.
pub(super) fn softmax_of(c: &Ctx, x: Value, dims: &[i64]) -> Value {
    let e = c.exponential(shifted(c, x, dims));
    c.divide(e, spread(c, c.reduce_sum(e, dims), &c.shape(x), dims))
}

fn softmax(c: &Ctx, x: Tensor, dim: i64, half_to_float: bool) -> Result<Value> {
    let dims = axis(c, dim, x.rank)?;
    let dtype = result_dtype(c, "softmax", x, &dims, half_to_float)?;
    Ok(c.to(softmax_of(c, c.to(x.value, opmath(dtype)), &dims), dtype))
}

fn log_softmax(c: &Ctx, x: Tensor, dim: i64, half_to_float: bool) -> Result<Value> {
    let dims = axis(c, dim, x.rank)?;
    let dtype = result_dtype(c, "log_softmax", x, &dims, half_to_float)?;
    let x = c.to(x.value, opmath(dtype));
    let along = |by_row: Value| spread(c, by_row, &c.shape(x), &dims);
    let highest = c.reduce_max_of_numbers(x, &dims);
    let below = c.subtract(x, along(highest));
    let log_sum = c.log(c.reduce_sum(c.exponential(below), &dims));
    // The compiler would keep the difference instead of `x`; this it makes again for each who reads it. Not with the sum of
    // both, which has lost digits where values are large.
    let y = match c.config.target.gather_by_mask {
        true => {
            let by_row = c.optimization_barrier(&[highest, log_sum]);
            by_row.into_iter().fold(x, |x, v| c.subtract(x, along(v)))
        }
        false => c.subtract(below, along(log_sum)),
    };
    Ok(c.to(y, dtype))
}

/// The common checks of both derivatives.
fn backward_dtype(c: &Ctx, grad: Tensor, output: Tensor, input_dtype: DType) -> Result<()> {
    let (g, o) = (c.shape(grad.value), c.shape(output.value));
    if g != o {
        return Err(runtime(format!(
            "Expected tensor for argument #1 'grad' to have same size as tensor for argument #2 'output'; but {g:?} \
             does not equal {o:?} (while checking arguments for softmax_backward)"
        )));
    }
    if grad.dtype != input_dtype && !(grad.dtype == DType::F32 && input_dtype.size_bytes() == 2) {
        let (want, got) = (scalar_name(grad.dtype), scalar_name(input_dtype));
        return Err(runtime(format!("expected scalar type {want} but found {got}")));
    }
    Ok(())
}

fn softmax_backward(c: &Ctx, grad: Tensor, output: Tensor, dim: i64, input_dtype: DType) -> Result<Value> {
    backward_dtype(c, grad, output, input_dtype)?;
    let dims = axis(c, dim, grad.rank)?;
    let (g, o) = (c.to(grad.value, opmath(grad.dtype)), c.to(output.value, opmath(grad.dtype)));
    let product = c.multiply(g, o);
    let sum = spread(c, c.reduce_sum(product, &dims), &c.shape(g), &dims);
    Ok(c.to(c.subtract(product, c.multiply(o, sum)), input_dtype))
}

fn log_softmax_backward(
    c: &Ctx,
    grad: Tensor,
    output: Tensor,
    dim: i64,
    input_dtype: DType,
) -> Result<Value> {
    backward_dtype(c, grad, output, input_dtype)?;
    let dims = axis(c, dim, grad.rank)?;
    let (g, o) = (c.to(grad.value, opmath(grad.dtype)), c.to(output.value, opmath(grad.dtype)));
    let sum = spread(c, c.reduce_sum(g, &dims), &c.shape(g), &dims);
    Ok(c.to(c.subtract(g, c.multiply(c.exponential(o), sum)), input_dtype))
}

/// A row that is -inf throughout becomes zeros instead of NaN.
fn safe_softmax(c: &Ctx, x: Tensor, dim: i64, dtype: Option<DType>) -> Result<Value> {
    let dims = axis(c, dim, x.rank)?;
    let dtype = dtype.unwrap_or(x.dtype);
    result_dtype(c, "softmax", Tensor { dtype, ..x }, &dims, false)?;
    let wide = c.to(c.to(x.value, dtype), opmath(dtype));
    let masked = c.eq(wide, c.like(wide, f64::NEG_INFINITY));
    let dead = spread(c, c.reduce_all(masked, &dims), &c.shape(wide), &dims);
    let soft = softmax_of(c, wide, &dims);
    Ok(c.to(c.select(dead, c.zeros_like(soft), soft), dtype))
}

/// Stretches the mask of a `_masked_softmax` over its input. True masks out.
pub(super) fn expand_mask(c: &Ctx, shape: &[i64], mask: Tensor, mask_type: Option<i64>) -> Result<Value> {
    if mask.dtype != DType::Pred {
        return Err(runtime("Mask should be a boolean tensor"));
    }
    let given = c.shape(mask.value);
    let n = shape.len();
    match mask_type.unwrap_or(2) {
        // [L, L] over [B, heads, L, L]
        0 if n == 4 && given[..] == shape[2..] => c.expand(mask.value, shape),
        0 => Err(runtime("For mask_type == 0 mask shape should be (L, L)")),
        // [B, L] over [B, heads, L, L]
        1 if n == 4 && given[..] == [shape[0], shape[3]] => {
            Ok(c.broadcast_in_dim(mask.value, shape, &[0, 3]))
        }
        1 => Err(runtime("For mask_type == 1 mask shape should be (B, L)")),
        2 if given[..] == *shape => Ok(mask.value),
        2 => Err(runtime("For mask_type == 2 mask shape should match input shape")),
        _ => Err(runtime("Mask Type should be 0 (src_mask), 1 (src_key_padding_mask), or 2 (default_mask)")),
    }
}

fn masked_softmax(
    c: &Ctx,
    x: Tensor,
    mask: Tensor,
    dim: Option<i64>,
    mask_type: Option<i64>,
) -> Result<Value> {
    let shape = c.shape(x.value);
    if mask_type.is_none() && c.shape(mask.value) != shape {
        return Err(runtime("Mask shape should match input"));
    }
    let dims = axis(c, dim.unwrap_or(-1), x.rank)?;
    if category(x.dtype) != Category::Float {
        return Err(not_implemented("masked_softmax", x.dtype));
    }
    let mask = expand_mask(c, &shape, mask, mask_type)?;
    let wide = c.to(x.value, opmath(x.dtype));
    let low = c.like(wide, f64::NEG_INFINITY);
    let soft = softmax_of(c, c.select(mask, low, wide), &dims);
    Ok(c.to(soft, x.dtype))
}

fn masked_softmax_backward(
    c: &Ctx,
    grad: Tensor,
    output: Tensor,
    mask: Tensor,
    dim: Option<i64>,
) -> Result<Value> {
    let dims = axis(c, dim.unwrap_or(-1), grad.rank)?;
    let shape = c.shape(grad.value);
    if c.shape(mask.value) != shape {
        return Err(runtime("Mask shape should match grad shape"));
    }
    let (g, o) = (c.to(grad.value, opmath(grad.dtype)), c.to(output.value, opmath(grad.dtype)));
    let zero = c.zeros_like(g);
    let product = c.select(mask.value, zero, c.multiply(g, o));
    let sum = spread(c, c.reduce_sum(product, &dims), &shape, &dims);
    let full = c.select(mask.value, zero, c.subtract(product, c.multiply(o, sum)));
    Ok(c.to(full, grad.dtype))
}
