//! Batch normalisation: statistics of each channel over everything else.

use super::channels::{self, GRADIENT_SUMS, STATISTICS};
use super::norms::{Grads, Normalized, inverse_std, normalize, stat_dtype};
use super::reductions::{count_like, reduced_numel};
use crate::args::{Scalar, Tensor};
use crate::context::Ctx;
use crate::dtype::opmath;
use crate::error::{Error, Result, runtime};
use crate::row::Row;
use crate::{Layout, op};
use oxitorch_hlo::{DType, Dims, TensorType, Value};

/// The rows of this family.
pub static ROWS: &[Row] = &[
    // Running statistics are overwritten though the schema does not mark them.
    op!("native_batch_norm", native_batch_norm).layout(Layout::ChannelsLast).writes(&[3, 4]),
    op!("_native_batch_norm_legit", batch_norm_legit).layout(Layout::ChannelsLast),
    op!("_native_batch_norm_legit.no_stats", batch_norm_no_stats).layout(Layout::ChannelsLast),
    op!("_batch_norm_with_update", batch_norm_with_update).layout(Layout::ChannelsLast),
    op!("native_batch_norm_backward", native_batch_norm_backward).layout(Layout::ChannelsLast),
    op!("batch_norm_backward", batch_norm_backward).layout(Layout::ChannelsLast),
];

/// All dimensions but the channel's.
pub(super) fn batch_dims(rank: usize) -> Dims {
    (0..rank as i64).filter(|&d| d != 1).collect()
}

/// How many channels there are.
pub(super) fn channels_of(c: &Ctx, input: Tensor) -> Result<i64> {
    c.shape(input.value).get(1).copied().ok_or_else(|| {
        let rank = input.rank;
        runtime(format!("batch_norm: expected input with at least 2 dimensions, got {rank}"))
    })
}

/// A value per channel over the whole shape, in opmath of the input.
pub(super) fn per_channel(c: &Ctx, v: Value, input: Tensor) -> Value {
    c.broadcast_in_dim(c.to(v, opmath(input.dtype)), &c.shape(input.value), &[1])
}

pub(super) struct BatchNorm {
    input: Tensor,
    weight: Option<Tensor>,
    bias: Option<Tensor>,
    stats: DType,
}

/// Output, saved mean, saved inverse deviation, new running mean and variance.
struct BatchNormed {
    output: Value,
    mean: Value,
    rstd: Value,
    running: [Option<Value>; 2],
}

impl BatchNorm {
    pub(super) fn new(
        c: &Ctx,
        input: Tensor,
        weight: Option<Tensor>,
        bias: Option<Tensor>,
        running: [Option<Tensor>; 2],
    ) -> Result<Self> {
        let channels = channels_of(c, input)?;
        let names = ["weight", "bias", "running_mean", "running_var"];
        for (name, param) in names.into_iter().zip([weight, bias, running[0], running[1]]) {
            let got = param.map_or(channels, |p| c.numel(p.value));
            if got != channels {
                return Err(runtime(format!("{name} should contain {channels} elements not {got}")));
            }
        }
        let stats = stat_dtype("batch_norm", input, &[weight, bias, running[0], running[1]])?;
        Ok(BatchNorm { input, weight, bias, stats })
    }

    /// Scale and shift of normalised values, in the input's dtype.
    pub(super) fn affine(&self, c: &Ctx, mut y: Value) -> Value {
        if let Some(w) = self.weight {
            y = c.multiply(y, per_channel(c, w.value, self.input));
        }
        if let Some(b) = self.bias {
            y = c.add(y, per_channel(c, b.value, self.input));
        }
        c.to(y, self.input.dtype)
    }

    /// With the statistics of the batch; `running` statistics move towards them by `momentum`.
    fn train(
        &self,
        c: &Ctx,
        running: [Option<Tensor>; 2],
        momentum: Scalar,
        eps: Scalar,
    ) -> Result<BatchNormed> {
        let shape = c.shape(self.input.value);
        let dims = batch_dims(shape.len());
        let n = reduced_numel(&shape, &dims);
        if n == 0 {
            return Err(runtime(format!(
                "input tensor must have at least one element, but got input_sizes = {shape:?}"
            )));
        }
        let x = c.to(self.input.value, opmath(self.input.dtype));
        let norm = match channels::of_batch(c, STATISTICS, &[self.input.value], &[]) {
            Some([mean, var]) => self.normalized(c, x, mean, var, eps),
            None => normalize(c, x, &dims, eps),
        };
        // Biased for the output, unbiased for the running variance.
        let unbiased = c.multiply(norm.var, c.like(norm.var, n as f64 / (n - 1) as f64));
        let moved = |old: Option<Tensor>, new: Value| old.map(|old| towards(c, old, new, momentum));
        Ok(BatchNormed {
            output: self.affine(c, norm.value),
            mean: c.to(norm.mean, self.stats),
            rstd: c.to(norm.rstd, self.stats),
            running: [moved(running[0], norm.mean), moved(running[1], unbiased)],
        })
    }

    fn normalized(&self, c: &Ctx, x: Value, mean: Value, var: Value, eps: Scalar) -> Normalized {
        let rstd = inverse_std(c, var, eps);
        let centred = c.subtract(x, per_channel(c, mean, self.input));
        Normalized { mean, rstd, var, value: c.multiply(centred, per_channel(c, rstd, self.input)) }
    }

    /// With the running statistics, which stay as they are; nothing is saved.
    fn eval(&self, c: &Ctx, running: [Option<Tensor>; 2], eps: Scalar) -> Result<BatchNormed> {
        let [Some(mean), Some(var)] = running else {
            let which = if running[0].is_none() { "running_mean" } else { "running_var" };
            return Err(Error::Value(format!("{which} must be defined in evaluation mode")));
        };
        let compute = opmath(self.input.dtype);
        let x = c.to(self.input.value, compute);
        let rstd = inverse_std(c, c.to(var.value, compute), eps);
        let centred = c.subtract(x, per_channel(c, mean.value, self.input));
        let empty = c.constant(TensorType::new(self.stats, [0].as_slice()), 0.0);
        Ok(BatchNormed {
            output: self.affine(c, c.multiply(centred, per_channel(c, rstd, self.input))),
            mean: empty,
            rstd: empty,
            running: [None, None],
        })
    }
}

/// `momentum * new + (1 - momentum) * old` in the dtype of `old`.
pub(super) fn towards(c: &Ctx, old: Tensor, new: Value, momentum: Scalar) -> Value {
    let dtype = opmath(old.dtype);
    let shape = c.shape(old.value);
    let m = c.number_like(momentum, dtype, &shape);
    let new = c.reshape(c.to(new, dtype), &shape);
    let kept = c.multiply(c.subtract(c.ones_like(m), m), c.to(old.value, dtype));
    c.to(c.add(c.multiply(m, new), kept), old.dtype)
}

/// Outputs: new running mean and variance (nothing where they do not change), then the schema's three.
#[allow(clippy::too_many_arguments)] // the schema's
fn native_batch_norm(
    c: &Ctx,
    input: Tensor,
    weight: Option<Tensor>,
    bias: Option<Tensor>,
    running_mean: Option<Tensor>,
    running_var: Option<Tensor>,
    training: bool,
    momentum: Scalar,
    eps: Scalar,
) -> Result<Vec<Option<Value>>> {
    let running = [running_mean, running_var];
    let norm = BatchNorm::new(c, input, weight, bias, running)?;
    let r = if training { norm.train(c, running, momentum, eps)? } else { norm.eval(c, running, eps)? };
    Ok(vec![r.running[0], r.running[1], Some(r.output), Some(r.mean), Some(r.rstd)])
}

#[allow(clippy::too_many_arguments)] // the schema's
fn batch_norm_legit(
    c: &Ctx,
    input: Tensor,
    weight: Option<Tensor>,
    bias: Option<Tensor>,
    running_mean: Tensor,
    running_var: Tensor,
    training: bool,
    momentum: Scalar,
    eps: Scalar,
) -> Result<Vec<Option<Value>>> {
    native_batch_norm(c, input, weight, bias, Some(running_mean), Some(running_var), training, momentum, eps)
}

fn batch_norm_no_stats(
    c: &Ctx,
    input: Tensor,
    weight: Option<Tensor>,
    bias: Option<Tensor>,
    training: bool,
    momentum: Scalar,
    eps: Scalar,
) -> Result<(Value, Value, Value)> {
    let norm = BatchNorm::new(c, input, weight, bias, [None, None])?;
    let r =
        if training { norm.train(c, [None, None], momentum, eps)? } else { norm.eval(c, [None, None], eps)? };
    Ok((r.output, r.mean, r.rstd))
}

#[allow(clippy::too_many_arguments)] // the schema's
fn batch_norm_with_update(
    c: &Ctx,
    input: Tensor,
    weight: Option<Tensor>,
    bias: Option<Tensor>,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: Scalar,
    eps: Scalar,
) -> Result<Vec<Option<Value>>> {
    let mut outputs =
        batch_norm_legit(c, input, weight, bias, running_mean, running_var, true, momentum, eps)?;
    // cuDNN's workspace, empty elsewhere.
    outputs.push(Some(c.constant(TensorType::new(DType::U8, [0].as_slice()), 0.0)));
    Ok(outputs)
}

#[allow(clippy::too_many_arguments)] // the schema's
fn native_batch_norm_backward(
    c: &Ctx,
    grad: Tensor,
    input: Tensor,
    weight: Option<Tensor>,
    running_mean: Option<Tensor>,
    running_var: Option<Tensor>,
    save_mean: Option<Tensor>,
    save_invstd: Option<Tensor>,
    train: bool,
    eps: Scalar,
    mask: Vec<bool>,
) -> Result<Grads> {
    let stats = stat_dtype("batch_norm_backward", input, &[weight, running_mean, running_var])?;
    let shape = c.shape(input.value);
    let dims = batch_dims(shape.len());
    let compute = opmath(input.dtype);
    let missing = || runtime("batch_norm_backward: the statistics are not there");
    let (mean, rstd) = if train {
        let (mean, rstd) = (save_mean.ok_or_else(missing)?, save_invstd.ok_or_else(missing)?);
        (c.to(mean.value, compute), c.to(rstd.value, compute))
    } else {
        let (mean, var) = (running_mean.ok_or_else(missing)?, running_var.ok_or_else(missing)?);
        (c.to(mean.value, compute), inverse_std(c, c.to(var.value, compute), eps))
    };
    let wanted = |i: usize| mask.get(i).copied().unwrap_or(false);
    let along = |v: Value| per_channel(c, v, input);
    let g = c.to(grad.value, compute);
    let centred = c.subtract(c.to(input.value, compute), along(mean));
    let normalized = c.multiply(centred, along(rstd));
    let sums = match grad.dtype == input.dtype {
        true => channels::of_batch(c, GRADIENT_SUMS, &[input.value, grad.value], &[mean, rstd]),
        false => None,
    };
    let [sum, slope] =
        sums.unwrap_or_else(|| [c.reduce_sum(g, &dims), c.reduce_sum(c.multiply(g, normalized), &dims)]);
    let grad_input = wanted(0).then(|| {
        let inner = if train {
            let count = count_like(c, sum, reduced_numel(&shape, &dims));
            let [mean, slope] = [sum, slope].map(|v| along(c.divide(v, count)));
            c.subtract(c.subtract(g, mean), c.multiply(normalized, slope))
        } else {
            g
        };
        let factor = weight.map_or(rstd, |w| c.multiply(rstd, c.to(w.value, compute)));
        c.to(c.multiply(inner, along(factor)), input.dtype)
    });
    Ok((grad_input, wanted(1).then(|| c.to(slope, stats)), wanted(2).then(|| c.to(sum, stats))))
}

#[allow(clippy::too_many_arguments)] // the schema's
fn batch_norm_backward(
    c: &Ctx,
    grad: Tensor,
    input: Tensor,
    weight: Tensor,
    running_mean: Option<Tensor>,
    running_var: Option<Tensor>,
    save_mean: Option<Tensor>,
    save_var: Option<Tensor>,
    update: bool,
    eps: Scalar,
    mask: Vec<bool>,
    _reserve: Tensor,
) -> Result<Grads> {
    let (w, rm, rv) = (Some(weight), running_mean, running_var);
    native_batch_norm_backward(c, grad, input, w, rm, rv, save_mean, save_var, update, eps, mask)
}
