//! Batch normalisation in parts, with something done to the statistics between them: other processes' are gathered
//! (`SyncBatchNorm`).
//!
//! The CPU has no kernels for most of these; CUDA's say what they are. Statistics are float32 or wider.

use super::batch_norm::{BatchNorm, batch_dims, channels_of, per_channel, towards};
use super::norms::{inverse_std, stat_dtype};
use super::reductions::{plain_mean, reduced_numel, spread};
use crate::args::{Scalar, Tensor};
use crate::context::Ctx;
use crate::dtype::{opmath, scalar_name, shape_text};
use crate::error::{Result, runtime};
use crate::row::Row;
use crate::{Layout, op};
use oxitorch_hlo::{DType, Value};

/// The rows of this family.
pub static ROWS: &[Row] = &[
    op!("batch_norm_stats", stats),
    // Running statistics are overwritten though the schemas do not mark them.
    op!("batch_norm_update_stats", update_stats).writes(&[1, 2]),
    op!("batch_norm_gather_stats", gather_stats).writes(&[3, 4]),
    op!("batch_norm_gather_stats_with_counts", gather_stats_with_counts).writes(&[3, 4]),
    op!("batch_norm_elemt", elementwise).layout(Layout::ChannelsLast),
    op!("batch_norm_backward_reduce", backward_reduce),
    op!("batch_norm_backward_elemt", backward_elementwise).layout(Layout::ChannelsLast),
];

type Params<'a> = &'a [(&'a str, Option<Tensor>)];

/// Checks that there is a value per channel in each of these.
fn check_channels(c: &Ctx, channels: i64, params: Params) -> Result<()> {
    for (name, param) in params {
        let Some(param) = param else { continue };
        let shape = c.shape(param.value);
        if shape[..] != [channels] {
            return Err(runtime(format!(
                "{name} should have shape [{channels}], got {}",
                shape_text(&shape)
            )));
        }
    }
    Ok(())
}

/// The running mean and variance, of which there are both or none.
fn running(mean: Option<Tensor>, var: Option<Tensor>) -> Result<Option<[Tensor; 2]>> {
    match (mean, var) {
        (None, None) => Ok(None),
        (Some(mean), Some(var)) => Ok(Some([mean, var])),
        _ => Err(runtime("running_mean and running_var must both be given, or none of them")),
    }
}

/// What the running statistics become.
fn moved(c: &Ctx, old: Option<[Tensor; 2]>, new: [Value; 2], momentum: Scalar) -> [Option<Value>; 2] {
    match old {
        None => [None, None],
        Some(old) => [0, 1].map(|i| Some(towards(c, old[i], new[i], momentum))),
    }
}

/// Mean and biased variance of each channel, and of how many numbers.
fn moments(c: &Ctx, kernel: &str, input: Tensor) -> Result<(Value, Value, i64)> {
    channels_of(c, input)?;
    stat_dtype(kernel, input, &[])?;
    let shape = c.shape(input.value);
    let dims = batch_dims(shape.len());
    let count = reduced_numel(&shape, &dims);
    if count == 0 {
        let shape = shape_text(&shape);
        return Err(runtime(format!("{kernel}: expected a value per channel, got input of size {shape}")));
    }
    let x = c.to(input.value, opmath(input.dtype));
    let mean = plain_mean(c, x, &dims);
    let centred = c.subtract(x, spread(c, mean, &shape, &dims));
    Ok((mean, plain_mean(c, c.multiply(centred, centred), &dims), count))
}

fn stats(c: &Ctx, input: Tensor, eps: Scalar) -> Result<(Value, Value)> {
    let (mean, var, _) = moments(c, "batch_norm_stats", input)?;
    // Without a variance and eps there is nothing to scale.
    let zero = c.zeros_like(var);
    let shape = c.shape(var);
    let nothing = c.eq(c.add(var, c.number_like(eps, c.dtype(var), &shape)), zero);
    Ok((mean, c.select(nothing, zero, inverse_std(c, var, eps))))
}

/// Outputs: new running mean and variance, then the schema's two.
fn update_stats(
    c: &Ctx,
    input: Tensor,
    running_mean: Option<Tensor>,
    running_var: Option<Tensor>,
    momentum: Scalar,
) -> Result<Vec<Option<Value>>> {
    let channels = channels_of(c, input)?;
    check_channels(c, channels, &[("running_mean", running_mean), ("running_var", running_var)])?;
    let old = running(running_mean, running_var)?;
    let (mean, var, n) = moments(c, "batch_norm_update_stats", input)?;
    let unbiased = c.multiply(var, c.like(var, n as f64 / (n - 1) as f64));
    let [running_mean, running_var] = moved(c, old, [mean, unbiased], momentum);
    Ok(vec![running_mean, running_var, Some(mean), Some(var)])
}

#[allow(clippy::too_many_arguments)] // the schema's
fn gather_stats(
    c: &Ctx,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    running_mean: Option<Tensor>,
    running_var: Option<Tensor>,
    momentum: Scalar,
    eps: Scalar,
    count: i64,
) -> Result<Vec<Option<Value>>> {
    let parts = &c.shape(mean.value)[..mean.rank.min(1)];
    let counts = c.full(c.scalar_i64(DType::S64, count), parts);
    gather(c, input, [mean, invstd], [running_mean, running_var], momentum, eps, counts)
}

#[allow(clippy::too_many_arguments)] // the schema's
fn gather_stats_with_counts(
    c: &Ctx,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    running_mean: Option<Tensor>,
    running_var: Option<Tensor>,
    momentum: Scalar,
    eps: Scalar,
    counts: Tensor,
) -> Result<Vec<Option<Value>>> {
    gather(c, input, [mean, invstd], [running_mean, running_var], momentum, eps, counts.value)
}

/// The statistics of a whole from those of its parts, which are rows of `mean` and `invstd`.
fn gather(
    c: &Ctx,
    input: Tensor,
    [mean, invstd]: [Tensor; 2],
    [running_mean, running_var]: [Option<Tensor>; 2],
    momentum: Scalar,
    eps: Scalar,
    counts: Value,
) -> Result<Vec<Option<Value>>> {
    stat_dtype("batch_norm_gather_stats", input, &[])?;
    let shape = c.shape(mean.value);
    let [parts, channels] = shape[..] else {
        return Err(runtime(format!("mean should have a row per part, got shape {}", shape_text(&shape))));
    };
    let names = [("invstd", invstd.value, shape.clone()), ("counts", counts, [parts].as_slice().into())];
    for (name, value, want) in names {
        let got = c.shape(value);
        if got != want {
            let (want, got) = (shape_text(&want), shape_text(&got));
            return Err(runtime(format!("{name} should have shape {want}, got {got}")));
        }
    }
    check_channels(c, channels, &[("running_mean", running_mean), ("running_var", running_var)])?;
    let old = running(running_mean, running_var)?;
    let compute = opmath(old.map_or(input.dtype, |[mean, _]| mean.dtype));
    let [means, invstds] = [mean, invstd].map(|t| c.to(t.value, compute));
    let counts = c.to(counts, compute);
    let weights = c.broadcast_in_dim(counts, &shape, &[0]);
    // No part has anything: the mean is zero and not undefined.
    let total = c.reduce_sum(counts, &[0]);
    let at_least_one = c.maximum(total, c.like(total, 1.0));
    let along = |v: Value| c.broadcast_in_dim(v, &[channels], &[]);
    let whole = c.divide(c.reduce_sum(c.multiply(weights, means), &[0]), along(at_least_one));
    // What a part adds to the squares: its own, and those of its mean's distance.
    let std = c.divide(c.like(invstds, 1.0), invstds);
    let var = c.subtract(c.multiply(std, std), c.number_like(eps, compute, &shape));
    let apart = c.subtract(means, c.broadcast_in_dim(whole, &shape, &[1]));
    let squares = c.multiply(weights, c.add(var, c.multiply(apart, apart)));
    // A part of nothing adds nothing, whatever its mean and its deviation of zero give.
    let none = c.zeros_like(squares);
    let squares = c.reduce_sum(c.select(c.gt(weights, none), squares, none), &[0]);
    let rstd = inverse_std(c, c.divide(squares, along(total)), eps);
    let unbiased = c.divide(squares, along(c.subtract(total, c.like(total, 1.0))));
    let [running_mean, running_var] = moved(c, old, [whole, unbiased], momentum);
    Ok(vec![running_mean, running_var, Some(whole), Some(rstd)])
}

/// With statistics that are given; `eps` is in them already.
fn elementwise(
    c: &Ctx,
    input: Tensor,
    weight: Option<Tensor>,
    bias: Option<Tensor>,
    mean: Tensor,
    invstd: Tensor,
    _eps: Scalar,
) -> Result<Value> {
    let norm = BatchNorm::new(c, input, weight, bias, [None, None])?;
    let channels = channels_of(c, input)?;
    check_channels(c, channels, &[("mean", Some(mean)), ("invstd", Some(invstd))])?;
    Ok(norm.affine(c, normalized(c, input, mean, invstd)))
}

fn centred(c: &Ctx, input: Tensor, mean: Tensor) -> Value {
    c.subtract(c.to(input.value, opmath(input.dtype)), per_channel(c, mean.value, input))
}

fn normalized(c: &Ctx, input: Tensor, mean: Tensor, invstd: Tensor) -> Value {
    c.multiply(centred(c, input, mean), per_channel(c, invstd.value, input))
}

/// Checks a gradient and the tensors beside it.
fn check_backward(c: &Ctx, kernel: &str, grad: Tensor, input: Tensor, params: Params) -> Result<()> {
    check_channels(c, channels_of(c, input)?, params)?;
    let (want, got) = (c.shape(input.value), c.shape(grad.value));
    if want != got {
        let (want, got) = (shape_text(&want), shape_text(&got));
        return Err(runtime(format!("{kernel}: expected grad_out of size {want} as input has, got {got}")));
    }
    if grad.dtype != input.dtype {
        let (want, got) = (scalar_name(input.dtype), scalar_name(grad.dtype));
        return Err(runtime(format!("{kernel}: expected grad_out of type {want} as input has, got {got}")));
    }
    Ok(())
}

/// The sums of the gradient and of its product with the distance from the mean, then gradients of weight and bias.
#[allow(clippy::too_many_arguments)] // the schema's
fn backward_reduce(
    c: &Ctx,
    grad: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Option<Tensor>,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
) -> Result<Vec<Option<Value>>> {
    let kernel = "batch_norm_backward_reduce";
    let params = [("mean", Some(mean)), ("invstd", Some(invstd)), ("weight", weight)];
    check_backward(c, kernel, grad, input, &params)?;
    let param = stat_dtype(kernel, input, &[weight])?;
    let compute = opmath(input.dtype);
    let dims = batch_dims(input.rank);
    let g = c.to(grad.value, compute);
    let sum = c.reduce_sum(g, &dims);
    let sum_xmu = c.reduce_sum(c.multiply(g, centred(c, input, mean)), &dims);
    let slope = c.multiply(sum_xmu, c.to(invstd.value, compute));
    Ok(vec![
        input_g.then_some(sum),
        input_g.then_some(sum_xmu),
        weight_g.then(|| c.to(slope, param)),
        bias_g.then(|| c.to(sum, param)),
    ])
}

/// The gradient of the input; the sums and counts are of all parts.
#[allow(clippy::too_many_arguments)] // the schema's
fn backward_elementwise(
    c: &Ctx,
    grad: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Option<Tensor>,
    sum_dy: Tensor,
    sum_dy_xmu: Tensor,
    count: Tensor,
) -> Result<Value> {
    let kernel = "batch_norm_backward_elemt";
    let stats = [("mean", mean), ("invstd", invstd), ("sum_dy", sum_dy), ("sum_dy_xmu", sum_dy_xmu)];
    check_backward(c, kernel, grad, input, &stats.map(|(name, t)| (name, Some(t))))?;
    check_backward(c, kernel, grad, input, &[("weight", weight)])?;
    stat_dtype(kernel, input, &[weight])?;
    let compute = opmath(input.dtype);
    let every: Vec<i64> = (0..count.rank as i64).collect();
    let total = c.reduce_sum(c.to(count.value, compute), &every);
    let total = c.broadcast_in_dim(total, &c.shape(mean.value), &[]);
    let along = |v: Value| per_channel(c, v, input);
    let [rstd, sum, sum_xmu] = [invstd, sum_dy, sum_dy_xmu].map(|t| c.to(t.value, compute));
    let slope = c.divide(c.multiply(c.multiply(rstd, rstd), sum_xmu), total);
    let factor = weight.map_or(rstd, |w| c.multiply(rstd, c.to(w.value, compute)));
    let inner = c.subtract(c.to(grad.value, compute), along(c.divide(sum, total)));
    let inner = c.subtract(inner, c.multiply(centred(c, input, mean), along(slope)));
    Ok(c.to(c.multiply(inner, along(factor)), input.dtype))
}
