//! Losses and distances.
//!
//! Everything is computed in float32 or wider and rounded once at the end.

use super::reductions::plain_mean;
use crate::args::{Scalar, Tensor};
use crate::context::Ctx;
use crate::dtype::{Category, category, opmath};
use crate::error::{ErrorKind, Result, not_implemented, runtime};
use crate::out::OutDtype;
use crate::row::Row;
use crate::{op, pointwise};
use oxitorch_hlo::{DType, Dims, Value};

/// The rows of this family.
pub static ROWS: &[Row] = &[
    pointwise!("mse_loss", mse_loss),
    op!("mse_loss_backward", mse_loss_backward),
    pointwise!("smooth_l1_loss", smooth_l1_loss).check_numbers(|n| {
        n.require(
            3,
            |beta| beta >= 0.0,
            |_| "smooth_l1_loss does not support negative values for beta.".to_owned(),
        )
    }),
    op!("smooth_l1_loss_backward", smooth_l1_loss_backward),
    pointwise!("huber_loss", huber_loss).check_numbers(|n| {
        n.require(
            3,
            |delta| delta > 0.0,
            |_| "huber_loss does not support non-positive values for delta.".to_owned(),
        )
    }),
    op!("huber_loss_backward", huber_loss_backward),
    pointwise!("binary_cross_entropy", binary_cross_entropy).out_dtype(OutDtype::Same),
    pointwise!("binary_cross_entropy_backward", binary_cross_entropy_backward),
    pointwise!("binary_cross_entropy_with_logits", bce_with_logits),
    pointwise!("soft_margin_loss", soft_margin_loss),
    op!("soft_margin_loss_backward", soft_margin_loss_backward),
];

/// `at::Reduction`
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Reduction {
    None,
    Mean,
    Sum,
}

impl Reduction {
    pub(super) fn new(code: i64) -> Result<Self> {
        match code {
            0 => Ok(Reduction::None),
            1 => Ok(Reduction::Mean),
            2 => Ok(Reduction::Sum),
            _ => Err(runtime(format!("{code} is not a valid value for reduction"))),
        }
    }

    /// Reduces a loss per element.
    pub(super) fn apply(self, c: &Ctx, loss: Value, dtype: DType) -> Value {
        let all: Dims = (0..c.rank(loss) as i64).collect();
        let reduced = match self {
            Reduction::None => loss,
            Reduction::Mean => plain_mean(c, loss, &all),
            Reduction::Sum => c.reduce_sum(loss, &all),
        };
        c.to(reduced, dtype)
    }

    /// The incoming gradient for each of `numel` elements.
    pub(super) fn undo(self, c: &Ctx, grad: Value, numel: i64) -> Value {
        match self {
            Reduction::Mean => c.divide(grad, c.like(grad, numel as f64)),
            _ => grad,
        }
    }
}

/// Two or more tensors in one opmath dtype and shape, and the dtype of the result.
fn aligned<const N: usize>(c: &Ctx, kernel: &str, xs: [Tensor; N]) -> Result<([Value; N], DType)> {
    let dtype = c.result_type(&xs)?;
    if category(dtype) != Category::Float {
        return Err(not_implemented(kernel, dtype));
    }
    Ok((c.align(xs.map(|x| x.value), opmath(dtype))?, dtype))
}

/// A pointwise loss of two tensors, reduced.
fn pointwise_loss(
    c: &Ctx,
    kernel: &str,
    x: Tensor,
    y: Tensor,
    reduction: i64,
    loss: impl FnOnce(Value, Value) -> Value,
) -> Result<Value> {
    let ([x, y], dtype) = aligned(c, kernel, [x, y])?;
    Ok(Reduction::new(reduction)?.apply(c, loss(x, y), dtype))
}

/// The derivative of a pointwise loss: `slope(x, y)` times the incoming gradient.
fn pointwise_backward(
    c: &Ctx,
    kernel: &str,
    [grad, x, y]: [Tensor; 3],
    reduction: i64,
    slope: impl FnOnce(Value, Value) -> Value,
) -> Result<Value> {
    let numel = c.numel(x.value);
    let ([g, x, y], dtype) = aligned(c, kernel, [grad, x, y])?;
    let g = Reduction::new(reduction)?.undo(c, g, numel);
    Ok(c.to(c.multiply(slope(x, y), g), dtype))
}

fn mse_loss(c: &Ctx, x: Tensor, target: Tensor, reduction: i64) -> Result<Value> {
    pointwise_loss(c, "mse_cpu", x, target, reduction, |x, y| {
        let d = c.subtract(x, y);
        c.multiply(d, d)
    })
}

fn mse_loss_backward(c: &Ctx, grad: Tensor, x: Tensor, target: Tensor, reduction: i64) -> Result<Value> {
    pointwise_backward(c, "mse_backward_cpu_out", [grad, x, target], reduction, |x, y| {
        let d = c.subtract(x, y);
        c.add(d, d)
    })
}

/// `half * d * d` with `half` = 0.5.
fn half_square(c: &Ctx, d: Value) -> Value {
    c.multiply(c.multiply(d, d), c.like(d, 0.5))
}

fn smooth_l1_loss(c: &Ctx, x: Tensor, target: Tensor, reduction: i64, beta: Scalar) -> Result<Value> {
    pointwise_loss(c, "smooth_l1_cpu", x, target, reduction, |x, y| {
        let z = c.abs(c.subtract(x, y));
        let beta = c.number_like(beta, c.dtype(z), &c.shape(z));
        let near = c.divide(half_square(c, z), beta);
        c.select(c.lt(z, beta), near, c.subtract(z, c.multiply(beta, c.like(z, 0.5))))
    })
}

/// `-edge` at or below `-limit`, `edge` at or above `limit`, `inside` between.
fn clip_slope(c: &Ctx, d: Value, limit: Value, edge: Value, inside: Value) -> Value {
    let upper = c.select(c.ge(d, limit), edge, inside);
    c.select(c.le(d, c.negate(limit)), c.negate(edge), upper)
}

fn smooth_l1_loss_backward(
    c: &Ctx,
    grad: Tensor,
    x: Tensor,
    target: Tensor,
    reduction: i64,
    beta: Scalar,
) -> Result<Value> {
    pointwise_backward(c, "smooth_l1_backward_cpu_out", [grad, x, target], reduction, |x, y| {
        let d = c.subtract(x, y);
        let beta = c.number_like(beta, c.dtype(d), &c.shape(d));
        clip_slope(c, d, beta, c.ones_like(d), c.divide(d, beta))
    })
}

fn huber_loss(c: &Ctx, x: Tensor, target: Tensor, reduction: i64, delta: Scalar) -> Result<Value> {
    pointwise_loss(c, "huber_cpu", x, target, reduction, |x, y| {
        let z = c.abs(c.subtract(x, y));
        let delta = c.number_like(delta, c.dtype(z), &c.shape(z));
        let far = c.multiply(delta, c.subtract(z, c.multiply(delta, c.like(z, 0.5))));
        c.select(c.le(z, delta), half_square(c, z), far)
    })
}

fn huber_loss_backward(
    c: &Ctx,
    grad: Tensor,
    x: Tensor,
    target: Tensor,
    reduction: i64,
    delta: Scalar,
) -> Result<Value> {
    pointwise_backward(c, "huber_backward_cpu_out", [grad, x, target], reduction, |x, y| {
        let d = c.subtract(x, y);
        let delta = c.number_like(delta, c.dtype(d), &c.shape(d));
        clip_slope(c, d, delta, delta, d)
    })
}

/// Multiplies by an optional weight that broadcasts to `x`.
fn weighted(c: &Ctx, x: Value, weight: Option<Tensor>) -> Result<Value> {
    let Some(w) = weight else { return Ok(x) };
    let [x, w] = c.align([x, w.value], c.dtype(x))?;
    Ok(c.multiply(x, w))
}

fn binary_cross_entropy(
    c: &Ctx,
    x: Tensor,
    target: Tensor,
    weight: Option<Tensor>,
    reduction: i64,
) -> Result<Value> {
    let dtype = x.dtype;
    let ([x, y], _) = aligned(c, "binary_cross_entropy", [x, target])?;
    c.assert_beside((x, 1), ErrorKind::Runtime, "all elements of input should be between 0 and 1", || {
        c.all(c.and(c.ge(x, c.zeros_like(x)), c.le(x, c.ones_like(x))))
    });
    // torch clamps logarithms so that a certain wrong answer has a finite loss.
    let floor = c.like(x, -100.0);
    let yes = c.maximum(c.log(x), floor);
    let no = c.maximum(c.log_plus_one(c.negate(x)), floor);
    let loss = c.subtract(c.multiply(c.subtract(y, c.ones_like(y)), no), c.multiply(y, yes));
    Ok(Reduction::new(reduction)?.apply(c, weighted(c, loss, weight)?, dtype))
}

fn binary_cross_entropy_backward(
    c: &Ctx,
    grad: Tensor,
    x: Tensor,
    target: Tensor,
    weight: Option<Tensor>,
    reduction: i64,
) -> Result<Value> {
    let (numel, dtype) = (c.numel(x.value), x.dtype);
    let ([g, x, y], _) = aligned(c, "binary_cross_entropy_backward", [grad, x, target])?;
    let spread = c.maximum(c.multiply(c.subtract(c.ones_like(x), x), x), c.like(x, 1e-12));
    let slope = weighted(c, c.divide(c.multiply(g, c.subtract(x, y)), spread), weight)?;
    Ok(c.to(Reduction::new(reduction)?.undo(c, slope, numel), dtype))
}

fn bce_with_logits(
    c: &Ctx,
    x: Tensor,
    target: Tensor,
    weight: Option<Tensor>,
    pos_weight: Option<Tensor>,
    reduction: i64,
) -> Result<Value> {
    let ([x, y], dtype) = aligned(c, "binary_cross_entropy_with_logits", [x, target])?;
    // -log(sigmoid(x)) = max(-x, 0) + log(1 + exp(-|x|))
    let tail = c.log_plus_one(c.exponential(c.negate(c.abs(x))));
    let miss = c.add(c.maximum(c.negate(x), c.zeros_like(x)), tail);
    let one = c.ones_like(y);
    let miss = match pos_weight {
        None => miss,
        Some(w) => {
            let w = c.expand(c.to(w.value, c.dtype(x)), &c.shape(x))?;
            c.multiply(miss, c.add(c.multiply(c.subtract(w, one), y), one))
        }
    };
    let loss = c.add(c.multiply(c.subtract(one, y), x), miss);
    Ok(Reduction::new(reduction)?.apply(c, weighted(c, loss, weight)?, dtype))
}

fn soft_margin_loss(c: &Ctx, x: Tensor, target: Tensor, reduction: i64) -> Result<Value> {
    pointwise_loss(c, "soft_margin_loss", x, target, reduction, |x, y| {
        c.log_plus_one(c.exponential(c.negate(c.multiply(x, y))))
    })
}

fn soft_margin_loss_backward(
    c: &Ctx,
    grad: Tensor,
    x: Tensor,
    target: Tensor,
    reduction: i64,
) -> Result<Value> {
    pointwise_backward(c, "soft_margin_loss_backward", [grad, x, target], reduction, |x, y| {
        // -y * e / (1 + e) with e = exp(-x * y)
        c.negate(c.multiply(y, c.logistic(c.negate(c.multiply(x, y)))))
    })
}
