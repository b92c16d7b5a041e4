//! Margin losses of one label and of several.

use super::losses::Reduction;
use crate::args::{Const, Scalar, Tensor};
use crate::context::Ctx;
use crate::dtype::{Category, category, opmath, scalar_name};
use crate::error::{ErrorKind, Result, not_implemented, runtime};
use crate::op;
use crate::row::Row;
use oxitorch_hlo::{DType, TensorType, Value};

/// The rows of this family.
pub static ROWS: &[Row] = &[
    op!("multi_margin_loss", multi_margin_loss),
    op!("multi_margin_loss_backward", multi_margin_loss_backward),
    op!("multilabel_margin_loss_forward", multilabel_margin_loss),
    op!("multilabel_margin_loss_backward", multilabel_margin_loss_backward),
];

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
        if target.dtype != DType::S64 {
            let found = scalar_name(target.dtype);
            return Err(runtime(format!("expected scalar type Long but found {found}")));
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
        c.assert(ErrorKind::Runtime, "target out of range", || {
            let high = c.full(c.scalar_i64(DType::S64, classes), &[n]);
            c.all(c.and(c.ge(index, c.zeros_like(index)), c.lt(index, high)))
        });
        let index = c.to(index, DType::S32);
        let along = |v: Value| c.broadcast_in_dim(v, &shape, &[0]);
        let at_target = c.eq(c.iota(TensorType::new(DType::S32, shape.clone()), 1), along(index));
        let picked = c.squeeze(c.take_along_dim(x, c.unsqueeze(index, 1), 1), &[1]);
        let gap = c.add(c.subtract(c.number_like(margin, c.dtype(x), &shape), along(picked)), x);
        let zero = c.zeros_like(x);
        let violation = c.select(at_target, zero, c.maximum(gap, zero));
        let weight = match weight {
            Some(w) => along(c.take_dim(c.to(w.value, c.dtype(x)), index, 0)),
            None => c.ones_like(x),
        };
        let scale = c.divide(weight, c.like(x, classes as f64));
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
    let cost = if m.p == 2 { c.multiply(m.violation, m.violation) } else { m.violation };
    let loss = c.reduce_sum(c.multiply(cost, m.scale), &[1]);
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
    let slope = c.multiply(slope, m.scale);
    let shape = c.shape(scores);
    let total = c.broadcast_in_dim(c.reduce_sum(slope, &[1]), &shape, &[0]);
    let slope = c.select(m.at_target, c.negate(total), slope);
    let grad = margin_grad(c, grad, Reduction::new(reduction)?, &shape, c.dtype(scores))?;
    Ok(c.reshape(c.to(c.multiply(slope, grad), x.dtype), &c.shape(x.value)))
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
    c.assert(ErrorKind::Runtime, "argument #2 'target' is out of range", || {
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
    let gap =
        c.subtract(c.broadcast_in_dim(scores, &cube, &class), c.broadcast_in_dim(picked, &cube, &label));
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
    let loss = c.divide(loss, c.like(loss, shape[1] as f64));
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
    let slope = c.subtract(per_class, c.reduce_sum(pulled, &[1]));
    let slope = c.divide(slope, c.like(slope, shape[1] as f64));
    let grad = margin_grad(c, grad, Reduction::new(reduction)?, &shape, wide)?;
    Ok(c.reshape(c.to(c.multiply(slope, grad), x.dtype), &c.shape(x.value)))
}
