//! Losses and distances.
//!
//! Everything is computed in float32 or wider and rounded once at the end.

use super::reductions::plain_mean;
use crate::args::{Const, Scalar, Tensor};
use crate::dtype::{Category, category, opmath, scalar_name};
use crate::error::{ErrorKind, Result, not_implemented, runtime};
use crate::lower::Ctx;
use crate::table::Row;
use crate::{op, pointwise};
use oxitorch_hlo::{DType, Dims, TensorType, Value};

/// The rows of this family.
pub static ROWS: &[Row] = &[
    op!("nll_loss_forward", nll_loss_forward),
    op!("nll_loss_backward", nll_loss_backward),
    op!("nll_loss2d_forward", nll_loss2d_forward),
    op!("nll_loss2d_backward", nll_loss2d_backward),
    pointwise!("mse_loss", mse_loss),
    op!("mse_loss_backward", mse_loss_backward),
    pointwise!("smooth_l1_loss", smooth_l1_loss),
    op!("smooth_l1_loss_backward", smooth_l1_loss_backward),
    pointwise!("huber_loss", huber_loss),
    op!("huber_loss_backward", huber_loss_backward),
    pointwise!("binary_cross_entropy", binary_cross_entropy),
    pointwise!("binary_cross_entropy_backward", binary_cross_entropy_backward),
    pointwise!("binary_cross_entropy_with_logits", bce_with_logits),
    pointwise!("soft_margin_loss", soft_margin_loss),
    op!("soft_margin_loss_backward", soft_margin_loss_backward),
    op!("multi_margin_loss", multi_margin_loss),
    op!("multi_margin_loss_backward", multi_margin_loss_backward),
    op!("multilabel_margin_loss_forward", multilabel_margin_loss),
    op!("multilabel_margin_loss_backward", multilabel_margin_loss_backward),
];

/// `at::Reduction`
#[derive(Clone, Copy, PartialEq, Eq)]
enum Reduction {
    None,
    Mean,
    Sum,
}

impl Reduction {
    fn new(code: i64) -> Result<Self> {
        match code {
            0 => Ok(Reduction::None),
            1 => Ok(Reduction::Mean),
            2 => Ok(Reduction::Sum),
            _ => Err(runtime(format!("{code} is not a valid value for reduction"))),
        }
    }

    /// Reduces a loss per element.
    fn apply(self, c: &Ctx, loss: Value, dtype: DType) -> Value {
        let all: Dims = (0..c.rank(loss) as i64).collect();
        let reduced = match self {
            Reduction::None => loss,
            Reduction::Mean => plain_mean(c, loss, &all),
            Reduction::Sum => c.reduce_sum(loss, &all),
        };
        c.to(reduced, dtype)
    }

    /// The incoming gradient for each of `numel` elements.
    fn undo(self, c: &Ctx, grad: Value, numel: i64) -> Value {
        match self {
            Reduction::Mean => c.div(grad, c.like(grad, numel as f64)),
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
    Ok(c.to(c.mul(slope(x, y), g), dtype))
}

fn mse_loss(c: &Ctx, x: Tensor, target: Tensor, reduction: i64) -> Result<Value> {
    pointwise_loss(c, "mse_cpu", x, target, reduction, |x, y| {
        let d = c.sub(x, y);
        c.mul(d, d)
    })
}

fn mse_loss_backward(c: &Ctx, grad: Tensor, x: Tensor, target: Tensor, reduction: i64) -> Result<Value> {
    pointwise_backward(c, "mse_backward_cpu_out", [grad, x, target], reduction, |x, y| {
        let d = c.sub(x, y);
        c.add(d, d)
    })
}

/// `half * d * d` with `half` = 0.5.
fn half_square(c: &Ctx, d: Value) -> Value {
    c.mul(c.mul(d, d), c.like(d, 0.5))
}

/// Checks, where checks are on, that a number satisfies `ok`.
fn check_number(c: &Ctx, s: Scalar, message: &str, ok: impl FnOnce(Value, Value) -> Value) {
    c.check(ErrorKind::Runtime, message, || ok(s.value, c.zeros_like(s.value)));
}

fn smooth_l1_loss(c: &Ctx, x: Tensor, target: Tensor, reduction: i64, beta: Scalar) -> Result<Value> {
    check_number(c, beta, "smooth_l1_loss does not support negative values for beta.", |b, zero| {
        c.ge(b, zero)
    });
    pointwise_loss(c, "smooth_l1_cpu", x, target, reduction, |x, y| {
        let z = c.abs(c.sub(x, y));
        let beta = c.number_like(beta, c.dtype(z), &c.shape(z));
        let near = c.div(half_square(c, z), beta);
        c.select(c.lt(z, beta), near, c.sub(z, c.mul(beta, c.like(z, 0.5))))
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
        let d = c.sub(x, y);
        let beta = c.number_like(beta, c.dtype(d), &c.shape(d));
        clip_slope(c, d, beta, c.ones_like(d), c.div(d, beta))
    })
}

fn huber_loss(c: &Ctx, x: Tensor, target: Tensor, reduction: i64, delta: Scalar) -> Result<Value> {
    check_number(c, delta, "huber_loss does not support non-positive values for delta.", |d, zero| {
        c.gt(d, zero)
    });
    pointwise_loss(c, "huber_cpu", x, target, reduction, |x, y| {
        let z = c.abs(c.sub(x, y));
        let delta = c.number_like(delta, c.dtype(z), &c.shape(z));
        let far = c.mul(delta, c.sub(z, c.mul(delta, c.like(z, 0.5))));
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
        let d = c.sub(x, y);
        let delta = c.number_like(delta, c.dtype(d), &c.shape(d));
        clip_slope(c, d, delta, delta, d)
    })
}

/// Multiplies by an optional weight that broadcasts to `x`.
fn weighted(c: &Ctx, x: Value, weight: Option<Tensor>) -> Result<Value> {
    let Some(w) = weight else { return Ok(x) };
    let [x, w] = c.align([x, w.value], c.dtype(x))?;
    Ok(c.mul(x, w))
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
    c.check(ErrorKind::Runtime, "all elements of input should be between 0 and 1", || {
        c.all(c.and(c.ge(x, c.zeros_like(x)), c.le(x, c.ones_like(x))))
    });
    // torch clamps logarithms so that a certain wrong answer has a finite loss.
    let floor = c.like(x, -100.0);
    let yes = c.maximum(c.log(x), floor);
    let no = c.maximum(c.log_plus_one(c.negate(x)), floor);
    let loss = c.sub(c.mul(c.sub(y, c.ones_like(y)), no), c.mul(y, yes));
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
    let spread = c.maximum(c.mul(c.sub(c.ones_like(x), x), x), c.like(x, 1e-12));
    let slope = weighted(c, c.div(c.mul(g, c.sub(x, y)), spread), weight)?;
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
            c.mul(miss, c.add(c.mul(c.sub(w, one), y), one))
        }
    };
    let loss = c.add(c.mul(c.sub(one, y), x), miss);
    Ok(Reduction::new(reduction)?.apply(c, weighted(c, loss, weight)?, dtype))
}

fn soft_margin_loss(c: &Ctx, x: Tensor, target: Tensor, reduction: i64) -> Result<Value> {
    pointwise_loss(c, "soft_margin_loss", x, target, reduction, |x, y| {
        c.log_plus_one(c.exponential(c.negate(c.mul(x, y))))
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
        c.negate(c.mul(y, c.logistic(c.negate(c.mul(x, y)))))
    })
}

/// A negative log likelihood: scores `[n, classes, ..]` and class numbers `[n, ..]`.
struct Nll {
    scores: Value,
    /// In 32 bits: class counts are small.
    target: Value,
    /// False where the target is `ignore_index`.
    valid: Value,
    weight: Option<Value>,
    reduction: Reduction,
}

impl Nll {
    fn new(
        c: &Ctx,
        scores: Value,
        target: Value,
        weight: Option<Tensor>,
        reduction: i64,
        ignore_index: i64,
    ) -> Result<Self> {
        let dtype = c.dtype(scores);
        if category(dtype) != Category::Float {
            return Err(not_implemented("nll_loss_out_frame", dtype));
        }
        if !matches!(c.dtype(target), DType::S64 | DType::U8) {
            let got = scalar_name(c.dtype(target));
            return Err(runtime(format!("expected target dtype to be Long or Byte, but got {got}")));
        }
        if let Some(w) = weight.filter(|w| w.dtype != dtype) {
            let (want, got) = (scalar_name(dtype), scalar_name(w.dtype));
            return Err(runtime(format!("expected scalar type {want} but found {got}")));
        }
        let classes = c.shape(scores)[1];
        if let Some(w) = weight.filter(|w| c.shape(w.value)[..] != [classes]) {
            let got = c.shape(w.value);
            return Err(runtime(format!(
                "weight tensor should be defined either for all {classes} classes or no classes but got weight tensor \
                 of shape: {got:?}"
            )));
        }
        let wide = opmath(dtype);
        let target = c.to(target, DType::S64);
        let valid = c.ne(target, c.full(c.scalar_i64(DType::S64, ignore_index), &c.shape(target)));
        c.check(ErrorKind::Index, "Target is out of bounds.", || {
            let low = c.ge(target, c.zeros_like(target));
            let high = c.lt(target, c.full(c.scalar_i64(DType::S64, classes), &c.shape(target)));
            c.all(c.or(c.not(valid), c.and(low, high)))
        });
        Ok(Nll {
            scores: c.to(scores, wide),
            target: c.to(target, DType::S32),
            valid,
            weight: weight.map(|w| c.to(w.value, wide)),
            reduction: Reduction::new(reduction)?,
        })
    }

    /// The weight of every target; 0 where it is ignored.
    fn weights(&self, c: &Ctx) -> Value {
        let zero = c.constant(TensorType::new(c.dtype(self.scores), c.shape(self.target)), 0.0);
        let weight = match self.weight {
            Some(w) => c.take_dim(w, self.target, 0),
            None => c.ones_like(zero),
        };
        c.select(self.valid, weight, zero)
    }

    /// Loss per element or reduced, and the sum of the weights.
    fn forward(&self, c: &Ctx, dtype: DType) -> (Value, Value) {
        let picked = c.take_along_dim(self.scores, c.unsqueeze(self.target, 1), 1);
        let picked = c.squeeze(picked, &[1]);
        let weights = self.weights(c);
        let zero = c.zeros_like(weights);
        let loss = c.select(self.valid, c.negate(c.mul(picked, weights)), zero);
        let all: Dims = (0..c.rank(loss) as i64).collect();
        let total = c.reduce_sum(weights, &all);
        let loss = match self.reduction {
            Reduction::None => return (c.to(loss, dtype), c.scalar_f64(dtype, 0.0)),
            Reduction::Sum => c.reduce_sum(loss, &all),
            Reduction::Mean => c.div(c.reduce_sum(loss, &all), total),
        };
        (c.to(loss, dtype), c.to(total, dtype))
    }

    fn backward(&self, c: &Ctx, grad: Value, total_weight: Value, dtype: DType) -> Value {
        let wide = c.dtype(self.scores);
        let shape = c.shape(self.scores);
        let weights = self.weights(c);
        let grad = match self.reduction {
            Reduction::None => c.to(grad, wide),
            Reduction::Sum => c.full(c.to(grad, wide), &c.shape(weights)),
            Reduction::Mean => c.full(c.div(c.to(grad, wide), c.to(total_weight, wide)), &c.shape(weights)),
        };
        let others: Dims = (0..shape.len() as i64).filter(|&d| d != 1).collect();
        let along = |v: Value| c.broadcast_in_dim(v, &shape, &others);
        let class = c.iota(TensorType::new(DType::S32, shape.clone()), 1);
        let here = c.and(c.eq(class, along(self.target)), along(self.valid));
        let slope = c.negate(c.mul(weights, grad));
        c.to(c.select(here, along(slope), c.zeros_like(self.scores)), dtype)
    }
}

/// Checks the shapes of an `nll_loss` and gives both tensors a batch dimension.
fn nll_batched(c: &Ctx, x: Tensor, target: Tensor) -> Result<(Value, Value)> {
    if !(1..=2).contains(&x.rank) {
        return Err(runtime("input tensor should be 1D or 2D"));
    }
    if target.rank > 1 {
        return Err(runtime("0D or 1D target tensor expected, multi-target not supported"));
    }
    let (shape, wanted) = (c.shape(x.value), c.shape(target.value));
    let single = x.rank == 1 && c.numel(target.value) == 1;
    if !single && (x.rank == 1 || wanted.first() != shape.first()) {
        return Err(runtime(format!("size mismatch (got input: {shape:?}, target: {wanted:?})")));
    }
    let n = if x.rank == 1 { 1 } else { shape[0] };
    let classes = shape.last().copied().unwrap_or(1);
    Ok((c.reshape(x.value, &[n, classes]), c.reshape(target.value, &[n])))
}

fn nll_loss_forward(
    c: &Ctx,
    x: Tensor,
    target: Tensor,
    weight: Option<Tensor>,
    reduction: i64,
    ignore_index: i64,
) -> Result<(Value, Value)> {
    let (scores, classes) = nll_batched(c, x, target)?;
    let nll = Nll::new(c, scores, classes, weight, reduction, ignore_index)?;
    let (loss, total) = nll.forward(c, x.dtype);
    if x.rank == 2 || nll.reduction != Reduction::None {
        return Ok((loss, total));
    }
    Ok((c.reshape(loss, &[]), c.to(c.reshape(nll.weights(c), &[]), x.dtype)))
}

#[allow(clippy::too_many_arguments)] // the schema's
fn nll_loss_backward(
    c: &Ctx,
    grad: Tensor,
    x: Tensor,
    target: Tensor,
    weight: Option<Tensor>,
    reduction: i64,
    ignore_index: i64,
    total_weight: Tensor,
) -> Result<Value> {
    let (scores, classes) = nll_batched(c, x, target)?;
    let nll = Nll::new(c, scores, classes, weight, reduction, ignore_index)?;
    let n = c.numel(classes);
    let got = c.shape(grad.value);
    let g = if nll.reduction == Reduction::None {
        if x.rank == 2 && got[..] != [n] {
            let (rank, size) = (got.len(), got.first().copied().unwrap_or(1));
            return Err(runtime(format!(
                "Expected a tensor of dimension 1 and tensor.size[0] == {n} but got: dimension {rank} and \
                 tensor.size[0] = {size}"
            )));
        }
        c.reshape(grad.value, &[n])
    } else {
        scalar_grad(c, grad)?
    };
    Ok(c.reshape(nll.backward(c, g, total_weight.value, x.dtype), &c.shape(x.value)))
}

/// The gradient of a reduced loss as a 0-d value.
fn scalar_grad(c: &Ctx, grad: Tensor) -> Result<Value> {
    let shape = c.shape(grad.value);
    if c.numel(grad.value) != 1 {
        return Err(runtime(format!("Expected a single element grad_output tensor, but got: {shape:?}")));
    }
    Ok(c.reshape(grad.value, &[]))
}

fn check_nll2d(c: &Ctx, x: Tensor, target: Tensor) -> Result<()> {
    if target.rank != 3 {
        let rank = target.rank;
        return Err(runtime(format!(
            "only batches of spatial targets supported (3D tensors) but got targets of dimension: {rank}"
        )));
    }
    if x.rank != 4 {
        let rank = x.rank;
        return Err(runtime(format!(
            "only batches of spatial inputs supported (4D tensors), but got input of dimension: {rank}"
        )));
    }
    let (x, t) = (c.shape(x.value), c.shape(target.value));
    if [x[0], x[2], x[3]] != t[..] {
        return Err(runtime(format!("size mismatch (got input: {x:?} , target: {t:?}")));
    }
    Ok(())
}

fn nll_loss2d_forward(
    c: &Ctx,
    x: Tensor,
    target: Tensor,
    weight: Option<Tensor>,
    reduction: i64,
    ignore_index: i64,
) -> Result<(Value, Value)> {
    check_nll2d(c, x, target)?;
    Ok(Nll::new(c, x.value, target.value, weight, reduction, ignore_index)?.forward(c, x.dtype))
}

#[allow(clippy::too_many_arguments)] // the schema's
fn nll_loss2d_backward(
    c: &Ctx,
    grad: Tensor,
    x: Tensor,
    target: Tensor,
    weight: Option<Tensor>,
    reduction: i64,
    ignore_index: i64,
    total_weight: Tensor,
) -> Result<Value> {
    check_nll2d(c, x, target)?;
    let nll = Nll::new(c, x.value, target.value, weight, reduction, ignore_index)?;
    let g = match nll.reduction {
        Reduction::None => c.expand(grad.value, &c.shape(target.value))?,
        _ => scalar_grad(c, grad)?,
    };
    Ok(nll.backward(c, g, total_weight.value, x.dtype))
}

/// `[n, classes]` scores of a margin loss; a single sample gets a batch dimension.
fn margin_scores(c: &Ctx, kernel: &str, x: Tensor) -> Result<Value> {
    let shape = c.shape(x.value);
    if category(x.dtype) != Category::Float {
        return Err(not_implemented(kernel, x.dtype));
    }
    if x.rank > 2 || shape.last() == Some(&0) {
        return Err(runtime(format!(
            "Expected non-empty vector or matrix with optional 0-dim batch size, but got: {shape:?}"
        )));
    }
    let n = if x.rank == 2 { shape[0] } else { 1 };
    let classes = shape.last().copied().unwrap_or(1);
    Ok(c.reshape(c.to(x.value, opmath(x.dtype)), &[n, classes]))
}

/// What both directions of a multi-class margin loss share, all `[n, classes]`.
struct MultiMargin {
    p: i64,
    /// margin - x\[target\] + x, where positive and not at the target; else 0
    violation: Value,
    /// One at the target
    at_target: Value,
    /// Weight of the target over the number of classes
    scale: Value,
}

impl MultiMargin {
    fn new(
        c: &Ctx,
        input: Tensor,
        x: Value,
        target: Tensor,
        p: Const,
        margin: Scalar,
        weight: Option<Tensor>,
    ) -> Result<Self> {
        let p = p.f64();
        if p != 1.0 && p != 2.0 {
            return Err(runtime("only p == 1 and p == 2 supported"));
        }
        let shape = c.shape(x);
        let (n, classes) = (shape[0], shape[1]);
        let got = c.shape(target.value);
        if target.rank > 1 || c.numel(target.value) != n {
            let shape = c.shape(input.value);
            return Err(runtime(format!(
                "multi_margin_loss: target tensor should be 1-D with size equal to the number of input samples (batch \
                 size). Expected target size [{n}], but got {got:?}. Input has shape {shape:?}."
            )));
        }
        if let Some(w) = weight.filter(|w| c.numel(w.value) != classes) {
            let got = c.shape(w.value);
            return Err(runtime(format!("inconsistent weight size, expected {classes} but got {got:?}")));
        }
        let index = c.to(c.reshape(target.value, &[n]), DType::S64);
        c.check(ErrorKind::Runtime, "target out of range", || {
            let high = c.full(c.scalar_i64(DType::S64, classes), &[n]);
            c.all(c.and(c.ge(index, c.zeros_like(index)), c.lt(index, high)))
        });
        let index = c.to(index, DType::S32);
        let along = |v: Value| c.broadcast_in_dim(v, &shape, &[0]);
        let at_target = c.eq(c.iota(TensorType::new(DType::S32, shape.clone()), 1), along(index));
        let picked = c.squeeze(c.take_along_dim(x, c.unsqueeze(index, 1), 1), &[1]);
        let gap = c.add(c.sub(c.number_like(margin, c.dtype(x), &shape), along(picked)), x);
        let zero = c.zeros_like(x);
        let violation = c.select(at_target, zero, c.maximum(gap, zero));
        let weight = match weight {
            Some(w) => along(c.take_dim(c.to(w.value, c.dtype(x)), index, 0)),
            None => c.ones_like(x),
        };
        let scale = c.div(weight, c.like(x, classes as f64));
        Ok(MultiMargin { p: p as i64, violation, at_target, scale })
    }
}

fn multi_margin_loss(
    c: &Ctx,
    x: Tensor,
    target: Tensor,
    p: Const,
    margin: Scalar,
    weight: Option<Tensor>,
    reduction: i64,
) -> Result<Value> {
    let scores = margin_scores(c, "multi_margin_loss", x)?;
    let m = MultiMargin::new(c, x, scores, target, p, margin, weight)?;
    let cost = if m.p == 2 { c.mul(m.violation, m.violation) } else { m.violation };
    let loss = c.reduce_sum(c.mul(cost, m.scale), &[1]);
    let loss = if target.rank == 0 { c.reshape(loss, &[]) } else { loss };
    Ok(Reduction::new(reduction)?.apply(c, loss, x.dtype))
}

#[allow(clippy::too_many_arguments)] // the schema's
fn multi_margin_loss_backward(
    c: &Ctx,
    grad: Tensor,
    x: Tensor,
    target: Tensor,
    p: Const,
    margin: Scalar,
    weight: Option<Tensor>,
    reduction: i64,
) -> Result<Value> {
    let scores = margin_scores(c, "multi_margin_loss_backward", x)?;
    let m = MultiMargin::new(c, x, scores, target, p, margin, weight)?;
    let zero = c.zeros_like(scores);
    let slope = match m.p {
        2 => c.add(m.violation, m.violation),
        _ => c.to(c.gt(m.violation, zero), c.dtype(scores)),
    };
    let slope = c.mul(slope, m.scale);
    let shape = c.shape(scores);
    let total = c.broadcast_in_dim(c.reduce_sum(slope, &[1]), &shape, &[0]);
    let slope = c.select(m.at_target, c.negate(total), slope);
    let grad = margin_grad(c, grad, Reduction::new(reduction)?, &shape, c.dtype(scores))?;
    Ok(c.reshape(c.to(c.mul(slope, grad), x.dtype), &c.shape(x.value)))
}

/// The incoming gradient of a loss per sample over `[n, classes]`.
fn margin_grad(c: &Ctx, grad: Tensor, reduction: Reduction, shape: &[i64], dtype: DType) -> Result<Value> {
    let g = c.to(grad.value, dtype);
    if c.numel(g) == 1 {
        let g = reduction.undo(c, c.reshape(g, &[]), shape[0]);
        return Ok(c.full(g, shape));
    }
    if c.shape(g)[..] != shape[..1] {
        let got = c.shape(g);
        return Err(runtime(format!("inconsistent gradient size: {got:?} for {} samples", shape[0])));
    }
    Ok(c.broadcast_in_dim(reduction.undo(c, g, shape[0]), shape, &[0]))
}

/// Labels of a multi-label loss count up to the first -1: which ones count, `[n, classes]`.
fn labels_before_end(c: &Ctx, target: Value) -> Value {
    let shape = c.shape(target);
    let ended = c.to(c.lt(target, c.zeros_like(target)), DType::S32);
    let position = c.iota(TensorType::new(DType::S32, shape.clone()), 1);
    let never = c.like(position, shape[1] as f64);
    let end = c.reduce_min(c.select(c.to(ended, DType::Pred), position, never), &[1]);
    c.lt(position, c.broadcast_in_dim(end, &shape, &[0]))
}

/// The labels as 32-bit class numbers `[n, classes]`, checked.
fn labels(c: &Ctx, x: Tensor, scores: Value, target: Tensor) -> Result<Value> {
    let (want, got) = (c.shape(x.value), c.shape(target.value));
    if c.numel(target.value) != c.numel(scores) || (x.rank > 0 && target.rank > 0 && want != got) {
        return Err(runtime(format!("inconsistent target size: {got:?} for input of size: {want:?}")));
    }
    let shape = c.shape(scores);
    let target = c.reshape(c.to(target.value, DType::S64), &shape);
    c.check(ErrorKind::Runtime, "argument #2 'target' is out of range", || {
        let high = c.full(c.scalar_i64(DType::S64, shape[1]), &shape);
        let low = c.full(c.scalar_i64(DType::S64, -1), &shape);
        c.all(c.and(c.ge(target, low), c.lt(target, high)))
    });
    Ok(c.to(target, DType::S32))
}

/// Sum over labels y and over classes i that are no label, of `1 - x[y] + x[i]` where positive: `[n, label, class]`.
fn multilabel_gaps(c: &Ctx, scores: Value, target: Value, is_target: Value) -> Value {
    let shape = c.shape(scores);
    let cube = [shape[0], shape[1], shape[1]];
    let (label, class) = ([0, 1], [0, 2]);
    let picked = c.take_along_dim(scores, target, 1);
    let gap = c.sub(c.broadcast_in_dim(scores, &cube, &class), c.broadcast_in_dim(picked, &cube, &label));
    let gap = c.add(gap, c.ones_like(gap));
    let counted = c.broadcast_in_dim(labels_before_end(c, target), &cube, &label);
    let other = c.not(c.broadcast_in_dim(c.to(is_target, DType::Pred), &cube, &class));
    let zero = c.zeros_like(gap);
    c.select(c.and(counted, other), c.maximum(gap, zero), zero)
}

fn multilabel_margin_loss(c: &Ctx, x: Tensor, target: Tensor, reduction: i64) -> Result<(Value, Value)> {
    let scores = margin_scores(c, "multilabel_margin_loss_forward_out_frame", x)?;
    let target_index = labels(c, x, scores, target)?;
    let shape = c.shape(scores);
    let cube = [shape[0], shape[1], shape[1]];
    let hit = c.eq(
        c.broadcast_in_dim(target_index, &cube, &[0, 1]),
        c.iota(TensorType::new(DType::S32, cube.as_slice()), 2),
    );
    let counted = c.broadcast_in_dim(labels_before_end(c, target_index), &cube, &[0, 1]);
    let is_target = c.reduce_any(c.and(hit, counted), &[1]);
    let gaps = multilabel_gaps(c, scores, target_index, is_target);
    let loss = c.reduce_sum(gaps, &[1, 2]);
    let loss = c.div(loss, c.like(loss, shape[1] as f64));
    let loss = if x.rank < 2 { c.reshape(loss, &[]) } else { loss };
    let is_target = c.reshape(c.to(is_target, x.dtype), &c.shape(target.value));
    Ok((Reduction::new(reduction)?.apply(c, loss, x.dtype), is_target))
}

fn multilabel_margin_loss_backward(
    c: &Ctx,
    grad: Tensor,
    x: Tensor,
    target: Tensor,
    reduction: i64,
    is_target: Tensor,
) -> Result<Value> {
    let scores = margin_scores(c, "multilabel_margin_loss_backward_out_frame", x)?;
    let target_index = labels(c, x, scores, target)?;
    let shape = c.shape(scores);
    let wide = c.dtype(scores);
    let gaps = multilabel_gaps(c, scores, target_index, c.reshape(is_target.value, &shape));
    let active = c.to(c.gt(gaps, c.zeros_like(gaps)), wide);
    let per_class = c.reduce_sum(active, &[1]);
    let per_label = c.reduce_sum(active, &[2]);
    let cube = [shape[0], shape[1], shape[1]];
    let hit = c.eq(
        c.broadcast_in_dim(target_index, &cube, &[0, 1]),
        c.iota(TensorType::new(DType::S32, cube.as_slice()), 2),
    );
    let pulled = c.select(hit, c.broadcast_in_dim(per_label, &cube, &[0, 1]), c.zeros_like(gaps));
    let slope = c.sub(per_class, c.reduce_sum(pulled, &[1]));
    let slope = c.div(slope, c.like(slope, shape[1] as f64));
    let grad = margin_grad(c, grad, Reduction::new(reduction)?, &shape, wide)?;
    Ok(c.reshape(c.to(c.mul(slope, grad), x.dtype), &c.shape(x.value)))
}
