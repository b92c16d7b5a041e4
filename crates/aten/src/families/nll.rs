//! Negative log likelihood, over vectors and images.

use super::losses::Reduction;
use crate::args::Tensor;
use crate::context::Ctx;
use crate::dtype::{Category, category, opmath, scalar_name};
use crate::error::{ErrorKind, Result, not_implemented, runtime};
use crate::op;
use crate::row::Row;
use oxitorch_hlo::{DType, Dims, TensorType, Value};

/// The rows of this family.
pub static ROWS: &[Row] = &[
    op!("nll_loss_forward", nll_loss_forward),
    op!("nll_loss_backward", nll_loss_backward),
    op!("nll_loss2d_forward", nll_loss2d_forward),
    op!("nll_loss2d_backward", nll_loss2d_backward),
];

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
        c.assert(ErrorKind::Index, "Target is out of bounds.", || {
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
        let picked = if c.config.target.gather_by_mask {
            c.reduce_sum(c.select(self.is_target(c), self.scores, c.zeros_like(self.scores)), &[1])
        } else {
            c.squeeze(c.take_along_dim(self.scores, c.unsqueeze(self.target, 1), 1), &[1])
        };
        let weights = self.weights(c);
        let zero = c.zeros_like(weights);
        let loss = c.select(self.valid, c.negate(c.multiply(picked, weights)), zero);
        let all: Dims = (0..c.rank(loss) as i64).collect();
        let total = c.reduce_sum(weights, &all);
        let loss = match self.reduction {
            Reduction::None => return (c.to(loss, dtype), c.scalar_f64(dtype, 0.0)),
            Reduction::Sum => c.reduce_sum(loss, &all),
            Reduction::Mean => c.divide(c.reduce_sum(loss, &all), total),
        };
        (c.to(loss, dtype), c.to(total, dtype))
    }

    fn backward(&self, c: &Ctx, grad: Value, total_weight: Value, dtype: DType) -> Value {
        let wide = c.dtype(self.scores);
        let weights = self.weights(c);
        let grad = match self.reduction {
            Reduction::None => c.to(grad, wide),
            Reduction::Sum => c.full(c.to(grad, wide), &c.shape(weights)),
            Reduction::Mean => {
                c.full(c.divide(c.to(grad, wide), c.to(total_weight, wide)), &c.shape(weights))
            }
        };
        let here = c.and(self.is_target(c), self.along(c, self.valid));
        let slope = c.negate(c.multiply(weights, grad));
        c.to(c.select(here, self.along(c, slope), c.zeros_like(self.scores)), dtype)
    }

    /// Something of each target, for all of its classes.
    fn along(&self, c: &Ctx, v: Value) -> Value {
        let shape = c.shape(self.scores);
        let others: Dims = (0..shape.len() as i64).filter(|&d| d != 1).collect();
        c.broadcast_in_dim(v, &shape, &others)
    }

    /// Where the class of a score is the target.
    fn is_target(&self, c: &Ctx) -> Value {
        let class = c.iota(TensorType::new(DType::S32, c.shape(self.scores)), 1);
        c.eq(class, self.along(c, self.target))
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
