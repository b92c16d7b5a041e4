//! Normalisation layers.
//!
//! Statistics are computed in float32 or wider, in two passes. They are returned in the parameters' dtype, which may be
//! float32 beside a reduced float input ("mixed"), as on torch's CPU.

use super::channels::{self, GRADIENT_SUMS};
use super::pooling::same_shape;
use super::reductions::{keep_dims, plain_mean, spread};
use crate::args::{Const, Scalar, Tensor};
use crate::context::Ctx;
use crate::dtype::{Category, category, opmath, scalar_name, shape_text};
use crate::error::{Error, Result, not_implemented, runtime};
use crate::numbers::show;
use crate::row::Row;
use crate::{Layout, op};
use oxitorch_hlo::{DType, Dims, Value};

/// The rows of this family.
pub static ROWS: &[Row] = &[
    op!("native_layer_norm", layer_norm),
    op!("native_layer_norm_backward", layer_norm_backward),
    op!("_fused_rms_norm", rms_norm).composite("one op instead of six, and twenty in backward"),
    op!("_fused_rms_norm_backward", rms_norm_backward),
    op!("native_group_norm", group_norm).layout(Layout::ChannelsLast),
    op!("native_group_norm_backward", group_norm_backward).layout(Layout::ChannelsLast),
    op!("renorm", renorm).check_numbers(|n| {
        n.require(
            3,
            |most| most >= 0.0,
            |most| format!("renorm: expected maxnorm to be >= 0 but got {}", show(most)),
        )
    }),
    op!("_weight_norm_interface", weight_norm),
    op!("_weight_norm_interface_backward", weight_norm_backward),
];

/// The dtype of statistics and parameter gradients: the parameters' where there are any.
pub(super) fn stat_dtype(kernel: &str, input: Tensor, params: &[Option<Tensor>]) -> Result<DType> {
    if category(input.dtype) != Category::Float {
        return Err(not_implemented(kernel, input.dtype));
    }
    let mut params = params.iter().flatten();
    let Some(first) = params.next() else { return Ok(input.dtype) };
    let reduced = opmath(input.dtype) != input.dtype;
    if first.dtype != input.dtype && !(reduced && first.dtype == DType::F32) {
        let message = "mixed dtype (CPU): expect parameter to have scalar type of Float";
        return Err(runtime(message));
    }
    match params.find(|p| p.dtype != first.dtype) {
        Some(p) => {
            let (want, got) = (scalar_name(first.dtype), scalar_name(p.dtype));
            Err(runtime(format!("expected scalar type {want} but found {got}")))
        }
        None => Ok(first.dtype),
    }
}

/// A tensor with its mean taken off, and what is needed to scale it.
pub(super) struct Normalized {
    pub(super) mean: Value,
    /// 1 / sqrt(var + eps)
    pub(super) rstd: Value,
    pub(super) var: Value,
    /// (x - mean) * rstd
    pub(super) value: Value,
}

/// Normalises `x` (in opmath) over `dims`; the statistics lack those dimensions.
pub(super) fn normalize(c: &Ctx, x: Value, dims: &[i64], eps: Scalar) -> Normalized {
    let shape = c.shape(x);
    let mean = plain_mean(c, x, dims);
    let centred = c.subtract(x, spread(c, mean, &shape, dims));
    let var = plain_mean(c, c.multiply(centred, centred), dims);
    let rstd = inverse_std(c, var, eps);
    let value = c.multiply(centred, spread(c, rstd, &shape, dims));
    Normalized { mean, rstd, var, value }
}

/// The same by mean and variance that are known.
fn normalize_by(c: &Ctx, x: Value, [mean, var]: [Value; 2], dims: &[i64], eps: Scalar) -> Normalized {
    let shape = c.shape(x);
    let [mean, var] = [mean, var].map(|v| c.reshape(v, &shape[..shape.len() - dims.len()]));
    let rstd = inverse_std(c, var, eps);
    let along = |v: Value| spread(c, v, &shape, dims);
    Normalized { mean, rstd, var, value: c.multiply(c.subtract(x, along(mean)), along(rstd)) }
}

pub(super) fn inverse_std(c: &Ctx, var: Value, eps: Scalar) -> Value {
    let shape = c.shape(var);
    c.rsqrt(c.add(var, c.number_like(eps, c.dtype(var), &shape)))
}

/// `grad` of a normalised tensor pulled back through the normalisation: mean and variance depended on the input too.
pub(super) fn normalize_backward(
    c: &Ctx,
    grad: Value,
    normalized: Value,
    rstd: Value,
    dims: &[i64],
) -> Value {
    let shape = c.shape(grad);
    let along = |v: Value| spread(c, v, &shape, dims);
    let mean = along(plain_mean(c, grad, dims));
    let slope = along(plain_mean(c, c.multiply(grad, normalized), dims));
    let inner = c.subtract(c.subtract(grad, mean), c.multiply(normalized, slope));
    c.multiply(inner, along(rstd))
}

/// Checks a normalised shape and returns the dimensions that it covers.
fn layer_dims(
    c: &Ctx,
    input: Tensor,
    normalized_shape: &[i64],
    params: [(&str, Option<Tensor>); 2],
) -> Result<Dims> {
    let want = shape_text(normalized_shape);
    if normalized_shape.is_empty() {
        return Err(runtime(format!(
            "Expected normalized_shape to be at least 1-dimensional, i.e., containing at least one element, but got \
             normalized_shape = {want}"
        )));
    }
    for (name, param) in params {
        let Some(param) = param else { continue };
        let shape = c.shape(param.value);
        if shape[..] != *normalized_shape {
            return Err(runtime(format!(
                "Expected {name} to be of same shape as normalized_shape, but got {name} of shape {shape:?} and \
                 normalized_shape = {want}"
            )));
        }
    }
    let shape = c.shape(input.value);
    if !shape.ends_with(normalized_shape) {
        let stars: String = normalized_shape.iter().map(|n| format!(", {n}")).collect();
        return Err(runtime(format!(
            "Given normalized_shape={want}, expected input with shape [*{stars}], but got input of size{shape:?}"
        )));
    }
    Ok((input.rank - normalized_shape.len()..input.rank).map(|d| d as i64).collect())
}

/// Stretches a parameter of the trailing dimensions over `shape`, in `dtype`.
fn trailing(c: &Ctx, param: Value, dtype: DType, shape: &[i64]) -> Result<Value> {
    c.expand(c.to(param, dtype), shape)
}

fn layer_norm(
    c: &Ctx,
    input: Tensor,
    normalized_shape: Dims,
    weight: Option<Tensor>,
    bias: Option<Tensor>,
    eps: Scalar,
) -> Result<(Value, Value, Value)> {
    let dims = layer_dims(c, input, &normalized_shape, [("weight", weight), ("bias", bias)])?;
    let stats = stat_dtype("LayerNormKernelImpl", input, &[weight, bias])?;
    let shape = c.shape(input.value);
    let compute = opmath(input.dtype);
    let width: i64 = normalized_shape.iter().product();
    let n = match channels::statistics_of_rows(c, input.value, width) {
        Some(of_rows) => normalize_by(c, input.value, of_rows, &dims, eps),
        None => normalize(c, c.to(input.value, compute), &dims, eps),
    };
    let mut y = n.value;
    if let Some(w) = weight {
        y = c.multiply(y, trailing(c, w.value, compute, &shape)?);
    }
    if let Some(b) = bias {
        y = c.add(y, trailing(c, b.value, compute, &shape)?);
    }
    let kept = |v: Value| keep_dims(c, c.to(v, stats), &shape, &dims, true);
    Ok((c.to(y, input.dtype), kept(n.mean), kept(n.rstd)))
}

pub(super) type Grads = (Option<Value>, Option<Value>, Option<Value>);

#[allow(clippy::too_many_arguments)] // the schema's
fn layer_norm_backward(
    c: &Ctx,
    grad: Tensor,
    input: Tensor,
    normalized_shape: Dims,
    mean: Tensor,
    rstd: Tensor,
    weight: Option<Tensor>,
    bias: Option<Tensor>,
    mask: Vec<bool>,
) -> Result<Grads> {
    let dims = layer_dims(c, input, &normalized_shape, [("weight", weight), ("bias", bias)])?;
    let params = stat_dtype("LayerNormBackwardKernelImpl", input, &[weight, bias])?;
    let shape = c.shape(input.value);
    let compute = opmath(input.dtype);
    let wide = |v: Value| c.to(v, compute);
    let flat = |v: Value| c.reshape(wide(v), &shape[..shape.len() - dims.len()]);
    let (mean, rstd) = (flat(mean.value), flat(rstd.value));
    let along = |v: Value| spread(c, v, &shape, &dims);
    let normalized = c.multiply(c.subtract(wide(input.value), along(mean)), along(rstd));
    same_shape(&shape, &c.shape(grad.value))?;
    let g = wide(grad.value);
    let scaled = match weight {
        Some(w) => c.multiply(g, trailing(c, w.value, compute, &shape)?),
        None => g,
    };
    let wanted = |i: usize| mask.get(i).copied().unwrap_or(false);
    if grad.dtype == input.dtype
        && let Some(all) =
            host_layer_gradients(c, [scaled, normalized], [grad.value, input.value], [mean, rstd], weight)
    {
        let of_param = |i: usize, v: Value| wanted(i).then(|| c.to(c.reshape(v, &normalized_shape), params));
        let grad_input = wanted(0).then(|| c.to(all[0], input.dtype));
        return Ok((
            grad_input,
            weight.and_then(|_| of_param(1, all[1])),
            bias.and_then(|_| of_param(2, all[2])),
        ));
    }
    let leading: Dims = (0..(shape.len() - dims.len()) as i64).collect();
    let grad_input =
        wanted(0).then(|| c.to(normalize_backward(c, scaled, normalized, rstd, &dims), input.dtype));
    let grad_weight = (wanted(1) && weight.is_some())
        .then(|| c.to(c.reduce_sum(c.multiply(g, normalized), &leading), params));
    let grad_bias = (wanted(2) && bias.is_some()).then(|| c.to(c.reduce_sum(g, &leading), params));
    Ok((grad_input, grad_weight, grad_bias))
}

/// Gradients of input, weight and bias, by sums that the host takes.
fn host_layer_gradients(
    c: &Ctx,
    [scaled, normalized]: [Value; 2],
    [grad, input]: [Value; 2],
    [mean, rstd]: [Value; 2],
    weight: Option<Tensor>,
) -> Option<[Value; 3]> {
    if !channels::is_for_host(c, input) {
        return None;
    }
    let (shape, rows) = (c.shape(input), c.shape(mean));
    let dtype = c.dtype(input);
    let factor =
        weight.map_or_else(|| c.full(c.scalar_i64(dtype, 1), &shape[rows.len()..]), |w| c.to(w.value, dtype));
    let [sum, slope, bias, scale] = channels::sums_of_rows(c, [grad, input], [mean, rstd], factor)?;
    let leading: Dims = (0..rows.len() as i64).collect();
    let along = |v: Value| c.broadcast_in_dim(c.reshape(v, &rows), &shape, &leading);
    let average = |v: Value| along(c.divide(v, c.like(v, c.numel(factor) as f64)));
    let inner = c.subtract(c.subtract(scaled, average(sum)), c.multiply(normalized, average(slope)));
    Some([c.multiply(inner, along(rstd)), scale, bias])
}

fn rms_norm(
    c: &Ctx,
    input: Tensor,
    normalized_shape: Dims,
    weight: Option<Tensor>,
    eps: Option<Scalar>,
) -> Result<(Value, Value)> {
    let dims = layer_dims(c, input, &normalized_shape, [("weight", weight), ("bias", None)])?;
    if category(input.dtype) != Category::Float {
        return Err(crate::error::unsupported("rms_norm of other than floats"));
    }
    let shape = c.shape(input.value);
    let compute = opmath(input.dtype);
    let x = c.to(input.value, compute);
    let power = plain_mean(c, c.multiply(x, x), &dims);
    let eps = match eps {
        Some(eps) => c.number_like(eps, compute, &c.shape(power)),
        None => c.like(power, if compute == DType::F64 { f64::EPSILON } else { f32::EPSILON.into() }),
    };
    let rstd = c.rsqrt(c.add(power, eps));
    let mut y = c.multiply(x, spread(c, rstd, &shape, &dims));
    if let Some(w) = weight {
        y = c.multiply(y, trailing(c, w.value, compute, &shape)?);
    }
    Ok((c.to(y, input.dtype), keep_dims(c, rstd, &shape, &dims, true)))
}

fn rms_norm_backward(
    c: &Ctx,
    grad: Tensor,
    input: Tensor,
    normalized_shape: Dims,
    rstd: Tensor,
    weight: Option<Tensor>,
    mask: Vec<bool>,
) -> Result<(Option<Value>, Option<Value>)> {
    let dims = layer_dims(c, input, &normalized_shape, [("weight", weight), ("bias", None)])?;
    let shape = c.shape(input.value);
    let compute = opmath(input.dtype);
    let rstd = c.reshape(c.to(rstd.value, compute), &shape[..shape.len() - dims.len()]);
    let along = |v: Value| spread(c, v, &shape, &dims);
    let g = c.to(grad.value, compute);
    let normalized = c.multiply(c.to(input.value, compute), along(rstd));
    let scaled = match weight {
        Some(w) => c.multiply(g, trailing(c, w.value, compute, &shape)?),
        None => g,
    };
    let leading: Dims = (0..(shape.len() - dims.len()) as i64).collect();
    let wanted = |i: usize| mask.get(i).copied().unwrap_or(false);
    let grad_input = wanted(0).then(|| {
        let slope = along(plain_mean(c, c.multiply(scaled, normalized), &dims));
        c.to(c.multiply(c.subtract(scaled, c.multiply(normalized, slope)), along(rstd)), input.dtype)
    });
    let grad_weight = weight
        .filter(|_| wanted(1))
        .map(|w| c.to(c.reduce_sum(c.multiply(g, normalized), &leading), w.dtype));
    Ok((grad_input, grad_weight))
}

/// The sizes of a group norm: the input is seen as `[n, groups, channels / groups, spatial]`.
struct Groups {
    n: i64,
    channels: i64,
    spatial: i64,
    groups: i64,
}

impl Groups {
    fn check(&self, c: &Ctx, input: Tensor, params: [(&str, Option<Tensor>); 2]) -> Result<()> {
        let shape = c.shape(input.value);
        let groups = self.groups;
        if groups <= 0 {
            return Err(runtime(format!("Expected num groups to be greater than 0, got {groups}")));
        }
        if self.channels % groups != 0 {
            return Err(runtime(format!(
                "Expected number of channels in input to be divisible by num_groups, but got input of shape {shape:?} \
                 and num_groups={groups}"
            )));
        }
        for (name, param) in params {
            let Some(param) = param.map(|p| c.shape(p.value)) else { continue };
            if param[..] != [self.channels] {
                return Err(runtime(format!(
                    "Expected {name} to be a vector of size equal to the number of channels in input, but got {name} \
                     of shape {param:?} and input of shape {shape:?}"
                )));
            }
        }
        let mut sizes = [self.n, self.channels, self.spatial].into_iter();
        if sizes.try_fold(1i64, |all, n| all.checked_mul(n)) != Some(c.numel(input.value)) {
            return Err(runtime(format!(
                "Expected N * C * HxW elements, but got input of shape {shape:?}, N={}, C={} and HxW={}",
                self.n, self.channels, self.spatial
            )));
        }
        Ok(())
    }

    fn shape(&self) -> [i64; 4] {
        [self.n, self.groups, self.channels / self.groups, self.spatial]
    }

    /// A value of each group over the image, one of each channel or one of both.
    fn over_image(&self, c: &Ctx, v: Value, dtype: DType, shape: &[i64]) -> Value {
        let v = c.to(v, dtype);
        match c.rank(v) {
            1 => c.broadcast_in_dim(v, shape, &[1]),
            _ if c.shape(v)[1] == self.channels => c.broadcast_in_dim(v, shape, &[0, 1]),
            _ => c.broadcast_in_dim(self.of_channels(c, v), shape, &[0, 1]),
        }
    }

    /// Mean and variance of each group by the host.
    fn statistics(&self, c: &Ctx, input: Tensor) -> Option<[Value; 2]> {
        self.is_image(c, input).then(|| channels::statistics_of_groups(c, input.value, self.groups))?
    }

    /// Of each sample and channel the sum of the gradient, and of its product with the normalised image, by the host.
    fn gradient_sums(
        &self,
        c: &Ctx,
        grad: Tensor,
        input: Tensor,
        mean: Value,
        rstd: Value,
    ) -> Option<[Value; 2]> {
        let fits = grad.dtype == input.dtype && c.shape(grad.value) == c.shape(input.value);
        if !fits || !self.is_image(c, input) {
            return None;
        }
        let more = [mean, rstd].map(|v| self.of_channels(c, v));
        channels::of_samples(c, GRADIENT_SUMS, &[input.value, grad.value], &more)
    }

    /// Gradients of the input, the weight and the bias from these sums.
    fn gradients(
        &self,
        c: &Ctx,
        (grad, input): (Tensor, Tensor),
        (mean, rstd): (Value, Value),
        weight: Option<Tensor>,
        [sum, slope]: [Value; 2],
    ) -> (Value, Value, Value) {
        let shape = c.shape(input.value);
        let compute = opmath(input.dtype);
        let along = |v: Value| self.over_image(c, v, compute, &shape);
        let scaled = |v: Value| match weight {
            Some(w) => c.multiply(v, c.broadcast_in_dim(c.to(w.value, compute), &c.shape(v), &[1])),
            None => v,
        };
        let of_groups = |v: Value| {
            let each = c.reshape(scaled(v), &self.shape()[..3]);
            let total = c.reduce_sum(each, &[2]);
            c.divide(total, c.like(total, (self.channels / self.groups * self.spatial) as f64))
        };
        let pull = c.multiply(rstd, of_groups(slope));
        let centred = c.subtract(c.to(input.value, compute), along(mean));
        let inner = c.subtract(scaled(c.to(grad.value, compute)), along(of_groups(sum)));
        let inner = c.subtract(inner, c.multiply(centred, along(pull)));
        let grad_input = c.to(c.multiply(inner, along(rstd)), input.dtype);
        (grad_input, c.reduce_sum(slope, &[0]), c.reduce_sum(sum, &[0]))
    }

    /// Whether the input has the samples and channels that were given as its first two dimensions.
    fn is_image(&self, c: &Ctx, input: Tensor) -> bool {
        c.shape(input.value).starts_with(&[self.n, self.channels])
    }

    /// A value of each group for each of its channels.
    fn of_channels(&self, c: &Ctx, v: Value) -> Value {
        let all = c.broadcast_in_dim(v, &self.shape()[..3], &[0, 1]);
        c.reshape(all, &[self.n, self.channels])
    }

    /// A value per channel over the grouped shape.
    fn per_channel(&self, c: &Ctx, v: Value, dtype: DType) -> Value {
        let shape = self.shape();
        c.broadcast_in_dim(c.reshape(c.to(v, dtype), &shape[1..3]), &shape, &[1, 2])
    }
}

#[allow(clippy::too_many_arguments)] // the schema's
fn group_norm(
    c: &Ctx,
    input: Tensor,
    weight: Option<Tensor>,
    bias: Option<Tensor>,
    n: i64,
    channels: i64,
    spatial: i64,
    groups: i64,
    eps: Scalar,
) -> Result<(Value, Value, Value)> {
    let g = Groups { n, channels, spatial, groups };
    g.check(c, input, [("weight", weight), ("bias", bias)])?;
    let stats = stat_dtype("GroupNormKernelImpl", input, &[weight, bias])?;
    let compute = opmath(input.dtype);
    let shape = c.shape(input.value);
    if let Some([mean, var]) = g.statistics(c, input) {
        let rstd = inverse_std(c, var, eps);
        let along = |v: Value| g.over_image(c, v, compute, &shape);
        let centred = c.subtract(c.to(input.value, compute), along(mean));
        let factor = g.of_channels(c, rstd);
        let factor = match weight {
            Some(w) => c.multiply(factor, c.broadcast_in_dim(c.to(w.value, compute), &[n, channels], &[1])),
            None => factor,
        };
        let y = c.multiply(centred, along(factor));
        let y = bias.map_or(y, |b| c.add(y, along(b.value)));
        return Ok((c.to(y, input.dtype), c.to(mean, stats), c.to(rstd, stats)));
    }
    let x = c.reshape(c.to(input.value, compute), &g.shape());
    let norm = normalize(c, x, &[2, 3], eps);
    let mut y = norm.value;
    if let Some(w) = weight {
        y = c.multiply(y, g.per_channel(c, w.value, compute));
    }
    if let Some(b) = bias {
        y = c.add(y, g.per_channel(c, b.value, compute));
    }
    let y = c.reshape(c.to(y, input.dtype), &shape);
    Ok((y, c.to(norm.mean, stats), c.to(norm.rstd, stats)))
}

#[allow(clippy::too_many_arguments)] // the schema's
fn group_norm_backward(
    c: &Ctx,
    grad: Tensor,
    input: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Option<Tensor>,
    n: i64,
    channels: i64,
    spatial: i64,
    groups: i64,
    mask: Vec<bool>,
) -> Result<Grads> {
    let g = Groups { n, channels, spatial, groups };
    g.check(c, input, [("weight", weight), ("bias", None)])?;
    let params = stat_dtype("GroupNormBackwardKernelImpl", input, &[weight])?;
    let compute = opmath(input.dtype);
    let shape = g.shape();
    let (dims, over) = ([2, 3], [0, 3]);
    let wide = |v: Value| c.reshape(c.to(v, compute), &shape);
    let stat = |v: Value| c.reshape(c.to(v, compute), &shape[..2]);
    let along = |v: Value| spread(c, v, &shape, &dims);
    let (mean, rstd) = (stat(mean.value), stat(rstd.value));
    let wanted = |i: usize| mask.get(i).copied().unwrap_or(false);
    if let Some(sums) = g.gradient_sums(c, grad, input, mean, rstd) {
        let all = g.gradients(c, (grad, input), (mean, rstd), weight, sums);
        let grad_input = wanted(0).then_some(all.0);
        return Ok((
            grad_input,
            wanted(1).then(|| c.to(all.1, params)),
            wanted(2).then(|| c.to(all.2, params)),
        ));
    }
    let (dy, x) = (wide(grad.value), wide(input.value));
    let normalized = c.multiply(c.subtract(x, along(mean)), along(rstd));
    let grad_input = wanted(0).then(|| {
        let scaled = weight.map_or(dy, |w| c.multiply(dy, g.per_channel(c, w.value, compute)));
        let gx = normalize_backward(c, scaled, normalized, rstd, &dims);
        c.to(c.reshape(gx, &c.shape(input.value)), input.dtype)
    });
    let total = |v: Value| c.to(c.reshape(c.reduce_sum(v, &over), &[channels]), params);
    let grad_weight = wanted(1).then(|| total(c.multiply(dy, normalized)));
    let grad_bias = wanted(2).then(|| total(dy));
    Ok((grad_input, grad_weight, grad_bias))
}

/// The `p` norm over `dims` of a float tensor in its own dtype.
fn p_norm(c: &Ctx, x: Value, p: f64, dims: &[i64]) -> Value {
    let size = c.abs(x);
    if p == 2.0 {
        c.sqrt(c.reduce_sum(c.multiply(size, size), dims))
    } else if p.is_infinite() {
        c.reduce_max(size, dims)
    } else {
        let sum = c.reduce_sum(c.power(size, c.like(size, p)), dims);
        c.power(sum, c.like(sum, 1.0 / p))
    }
}

/// Slices along `dim` whose norm exceeds `maxnorm` are scaled down to it.
fn renorm(c: &Ctx, x: Tensor, p: Const, dim: i64, maxnorm: Scalar) -> Result<Value> {
    let p = p.f64();
    if p <= 0.0 {
        return Err(runtime("renorm: non-positive-norm not supported"));
    }
    if x.rank < 2 {
        let rank = x.rank;
        return Err(runtime(format!("renorm: input needs at least 2 dimensions, got {rank} dimensions")));
    }
    if category(x.dtype) != Category::Float {
        return match category(x.dtype) {
            Category::Complex => Err(crate::error::unsupported("renorm of complex numbers")),
            _ => Err(Error::NotImplemented(format!(
                "linalg.vector_norm: Expected a floating point or complex tensor as input. Got {}",
                scalar_name(x.dtype)
            ))),
        };
    }
    let dim = c.dim(dim, x.rank)? as i64;
    let dims: Dims = (0..x.rank as i64).filter(|&d| d != dim).collect();
    let wide = c.to(x.value, opmath(x.dtype));
    let norm = p_norm(c, wide, p, &dims);
    let limit = c.number_like(maxnorm, c.dtype(norm), &c.shape(norm));
    // torch's guard against dividing by zero.
    let factor = c.divide(limit, c.add(norm, c.like(norm, 1e-7)));
    let factor = c.select(c.gt(norm, limit), factor, c.ones_like(norm));
    Ok(c.to(c.multiply(wide, spread(c, factor, &c.shape(wide), &dims)), x.dtype))
}

/// The dimensions other than the first or last, over which a weight's norm is taken.
fn weight_norm_dims(v: Tensor, dim: i64) -> Result<Dims> {
    if dim != 0 && dim != v.rank as i64 - 1 {
        return Err(runtime("fused kernels can only be applied for first or last dim"));
    }
    if category(v.dtype) != Category::Float {
        return Err(not_implemented("weight_norm_kernel", v.dtype));
    }
    let dims: Dims = (0..v.rank as i64).filter(|&d| d != dim).collect();
    Ok(dims)
}

/// `v * g / |v|`, and `|v|` in float32 or wider.
fn weight_norm(c: &Ctx, v: Tensor, g: Tensor, dim: i64) -> Result<(Value, Value)> {
    let dims = weight_norm_dims(v, dim)?;
    let compute = opmath(v.dtype);
    let shape = c.shape(v.value);
    let wide = c.to(v.value, compute);
    let norm = p_norm(c, wide, 2.0, &dims);
    let g_flat = c.reshape(c.to(g.value, compute), &c.shape(norm));
    let w = c.multiply(wide, spread(c, c.divide(g_flat, norm), &shape, &dims));
    Ok((c.to(w, v.dtype), c.reshape(norm, &c.shape(g.value))))
}

fn weight_norm_backward(
    c: &Ctx,
    grad: Tensor,
    v: Tensor,
    g: Tensor,
    norms: Tensor,
    dim: i64,
) -> Result<(Value, Value)> {
    let dims = weight_norm_dims(v, dim)?;
    let compute = opmath(v.dtype);
    let shape = c.shape(v.value);
    let wide = |t: Tensor| c.to(t.value, compute);
    let (dw, v_wide) = (wide(grad), wide(v));
    let dot = c.reduce_sum(c.multiply(dw, v_wide), &dims);
    let flat = |t: Tensor| c.reshape(wide(t), &c.shape(dot));
    let (g_flat, norm) = (flat(g), flat(norms));
    let grad_g = c.divide(dot, norm);
    let scale = c.divide(g_flat, norm);
    let pull = c.divide(dot, c.multiply(norm, norm));
    let inner = c.subtract(dw, c.multiply(v_wide, spread(c, pull, &shape, &dims)));
    let grad_v = c.multiply(inner, spread(c, scale, &shape, &dims));
    Ok((c.to(grad_v, v.dtype), c.reshape(c.to(grad_g, g.dtype), &c.shape(g.value))))
}
