//! Fake quantization, of which training that is aware of quantization is made: numbers become those that so many
//! steps of a scale can say, and stay floats.

use crate::args::{Scalar, Tensor};
use crate::context::Ctx;
use crate::dtype::scalar_name;
use crate::error::{Error, ErrorKind, Result, runtime, unsupported};
use crate::op;
use crate::row::{Layout, Row};
use oxitorch_hlo::{DType, Dims, Value};

/// The rows of this family.
pub static ROWS: &[Row] = &[
    op!("fake_quantize_per_tensor_affine_cachemask", per_tensor).layout(Layout::LikeFirst),
    op!("_fake_quantize_per_tensor_affine_cachemask_tensor_qparams", per_tensor_of_tensors)
        .layout(Layout::LikeFirst),
    op!("fake_quantize_per_channel_affine_cachemask", per_channel).layout(Layout::LikeFirst),
    op!("_fused_moving_avg_obs_fq_helper", observed),
];

/// Scales below it are raised to it, as PyTorch does for the sake of float16.
const SMALLEST_SCALE: f32 = 6.1e-5;

/// The whole numbers that there are.
#[derive(Clone, Copy)]
struct Levels {
    min: i64,
    max: i64,
}

impl Levels {
    fn new(min: i64, max: i64) -> Result<Levels> {
        if min > max {
            return Err(runtime("`quant_min` should be less than or         equal to `quant_max`."));
        }
        if i32::try_from(min).is_err() || i32::try_from(max).is_err() {
            return Err(unsupported("levels beyond 32 bits"));
        }
        Ok(Levels { min, max })
    }

    fn has(self, c: &Ctx, x: Value) -> Value {
        c.and(c.ge(x, c.like(x, self.min as f64)), c.le(x, c.like(x, self.max as f64)))
    }

    /// `x` with steps of `scale` (float32) and zero at `zero`, both of `x`'s shape, and where it was in reach.
    fn quantize(self, c: &Ctx, x: Tensor, scale: Value, zero: Value) -> Result<(Value, Value)> {
        if !matches!(x.dtype, DType::F16 | DType::BF16 | DType::F32 | DType::F64) {
            let name = scalar_name(x.dtype);
            return Err(Error::NotImplemented(format!(
                "\"fake_quantize_tensor_cachemask_kernel_type_handling\" not implemented for '{name}'"
            )));
        }
        let wide = if x.dtype == DType::F64 { DType::F64 } else { DType::F32 };
        let inverse = c.divide(c.ones_like(scale), scale);
        let steps = c.round_nearest_even(c.multiply(c.to(x.value, wide), c.to(inverse, wide)));
        let level = c.add(c.to(zero, wide), steps);
        // What is no number is the lowest level.
        let low = c.like(level, self.min as f64);
        let number = c.select(c.is_nan(level), low, level);
        let kept = c.to(c.clamp(low, number, c.like(level, self.max as f64)), DType::F32);
        let y = c.multiply(c.subtract(kept, c.to(zero, DType::F32)), scale);
        Ok((c.to(y, x.dtype), self.has(c, level)))
    }
}

fn outside() -> Error {
    runtime("`zero_point` must be between `quant_min` and `quant_max`.")
}

fn per_tensor(c: &Ctx, x: Tensor, scale: Scalar, zero: i64, min: i64, max: i64) -> Result<(Value, Value)> {
    let levels = Levels::new(min, max)?;
    if !(min..=max).contains(&zero) {
        return Err(outside());
    }
    let shape = c.shape(x.value);
    let scale = c.number_like(scale, DType::F32, &shape);
    levels.quantize(c, x, scale, c.like(scale, zero as f64))
}

/// Scale and zero are tensors of one element; `on` says whether anything is done.
fn per_tensor_of_tensors(
    c: &Ctx,
    x: Tensor,
    scale: Value,
    zero: Value,
    on: Value,
    min: i64,
    max: i64,
) -> Result<(Value, Value)> {
    let levels = Levels::new(min, max)?;
    let shape = c.shape(x.value);
    let [scale, zero, on] = [one(c, scale)?, one(c, zero)?, one(c, on)?].map(|v| c.full(v, &shape));
    let (y, mask) = levels.quantize(c, x, c.to(scale, DType::F32), zero)?;
    let off = c.eq(on, c.zeros_like(on));
    Ok((c.select(off, x.value, y), c.or(off, mask)))
}

/// The element of a tensor that has one.
fn one(c: &Ctx, x: Value) -> Result<Value> {
    if c.numel(x) != 1 {
        return Err(unsupported("scales, zeros and switches of more than one element"));
    }
    Ok(c.reshape(x, &[]))
}

fn per_channel(
    c: &Ctx,
    x: Tensor,
    scale: Value,
    zero: Value,
    axis: i64,
    min: i64,
    max: i64,
) -> Result<(Value, Value)> {
    let levels = Levels::new(min, max)?;
    if c.dtype(scale) != DType::F32 {
        return Err(runtime(format!("Scale must be Float, found {}", scalar_name(c.dtype(scale)))));
    }
    if ![DType::S32, DType::F32, DType::F16].contains(&c.dtype(zero)) {
        let found = scalar_name(c.dtype(zero));
        return Err(runtime(format!("Zero-point must be Int32, Float or Half, found {found}")));
    }
    if c.shape(scale).len() != 1 || c.shape(zero).len() != 1 {
        return Err(runtime("scale and zero point should be a 1-D tensor"));
    }
    if c.numel(scale) != c.numel(zero) {
        return Err(runtime("scale and zero-point need to have the same dimensions"));
    }
    let shape = c.shape(x.value);
    if !(0..shape.len() as i64).contains(&axis) {
        return Err(runtime("`axis` must be between 0 and number of dimensions of input"));
    }
    if shape[axis as usize] != c.numel(scale) {
        return Err(runtime("dimensions of scale and zero-point are not consistent with input tensor"));
    }
    c.assert(ErrorKind::Runtime, outside().to_string(), || c.all(levels.has(c, zero)));
    let [scale, zero] = [scale, zero].map(|v| c.broadcast_in_dim(v, &shape, &[axis]));
    levels.quantize(c, x, scale, zero)
}

/// Moving extremes of `x` where `watch` is on, and `x` by the scale that they give where `quantize` is.
///
/// Outputs: what is overwritten (extremes, scale and zero), then the schema's two.
#[allow(clippy::too_many_arguments)] // the schema's
fn observed(
    c: &Ctx,
    x: Tensor,
    watch: Value,
    quantize: Value,
    low: Value,
    high: Value,
    scale: Value,
    zero: Value,
    momentum: Scalar,
    min: i64,
    max: i64,
    axis: i64,
    by_channel: bool,
    symmetric: bool,
) -> Result<Vec<Option<Value>>> {
    if x.dtype != DType::F32 || [low, high, scale].iter().any(|&v| c.dtype(v) != DType::F32) {
        return Err(unsupported("observing what is not float32"));
    }
    let levels = Levels::new(min, max)?;
    let shape = c.shape(x.value);
    let axis = c.dim(axis, x.rank).map_or(0, |at| at as i64);
    // PyTorch's kernel takes matrices by their rows, whatever the axis is.
    let kept = if x.rank == 2 { 0 } else { axis };
    let dims: Dims = (0..x.rank as i64).filter(|&d| !by_channel || d != kept).collect();
    let count = if by_channel { shape[kept as usize] } else { 1 };
    if [low, high, scale, zero].iter().any(|&v| c.numel(v) != count) {
        return Err(unsupported("extremes without elements, which the first call gives their size"));
    }
    if c.numel(x.value) == 0 {
        return Err(unsupported("extremes of nothing"));
    }
    let [watch, on] = [one(c, watch)?, one(c, quantize)?].map(|v| c.ne(v, c.zeros_like(v)));
    let (watch, quantize) = (c.full(watch, &[count]), c.full(on, &[count]));
    let moved = |old: Value, new: Value| {
        let (old, new) = (c.reshape(old, &[count]), c.reshape(new, &[count]));
        let known =
            c.add(old, c.multiply(c.number_like(momentum, DType::F32, &[count]), c.subtract(new, old)));
        let infinite = c.eq(c.abs(old), c.like(old, f64::INFINITY));
        c.select(watch, c.select(infinite, new, known), old)
    };
    let new_low = moved(low, c.reduce_min(x.value, &dims));
    let new_high = moved(high, c.reduce_max(x.value, &dims));
    c.assert(
        ErrorKind::Runtime,
        "In ChooseQuantizationParams, min should be less than or equal to max",
        || c.all(c.or(c.not(quantize), c.le(new_low, new_high))),
    );
    let (chosen, at) = choose(c, new_low, new_high, levels, symmetric);
    let new_scale = c.select(quantize, chosen, c.reshape(scale, &[count]));
    let zero_dtype = c.dtype(zero);
    let new_zero = c.select(quantize, c.to(at, zero_dtype), c.reshape(zero, &[count]));

    let spread = |v: Value| {
        if by_channel { c.broadcast_in_dim(v, &shape, &[axis]) } else { c.full(c.reshape(v, &[]), &shape) }
    };
    if by_channel && shape[axis as usize] != count {
        return Err(runtime("dimensions of scale and zero-point are not consistent with input tensor"));
    }
    let (y, mask) = levels.quantize(c, x, spread(new_scale), spread(new_zero))?;
    let on = c.full(on, &shape);
    let y = c.select(on, y, x.value);
    let mask = c.or(c.not(on), mask);
    let like = |new: Value, old: Value| Some(c.reshape(new, &c.shape(old)));
    Ok(vec![
        like(new_low, low),
        like(new_high, high),
        like(new_scale, scale),
        like(new_zero, zero),
        Some(y),
        Some(mask),
    ])
}

/// `number` in `x`'s shape, which the compiler does not know: it multiplies with the reciprocal of a constant, and a
/// scale that is off by its last bit is a zero that is off by one.
fn divisor(c: &Ctx, x: Value, number: i64) -> Value {
    c.add(c.subtract(x, x), c.like(x, number as f64))
}

/// Scale (float32) and zero (a whole float64) for numbers between `low` and `high`: fbgemm's `ChooseQuantizationParams`,
/// which PyTorch's own is but for when the scale is rounded.
fn choose(c: &Ctx, low: Value, high: Value, levels: Levels, symmetric: bool) -> (Value, Value) {
    let (min, max) = (levels.min as f64, levels.max as f64);
    let steps = levels.max - levels.min;
    let zero = c.zeros_like(low);
    let around_zero = |low: Value, high: Value| c.and(c.lt(low, zero), c.gt(high, zero));
    let (low, high) = if symmetric {
        let (least, most) = (-(steps / 2 + 1), steps / 2);
        let each = c.maximum(
            c.abs(c.divide(low, divisor(c, low, least))),
            c.abs(c.divide(high, divisor(c, high, most))),
        );
        let both = around_zero(low, high);
        (
            c.select(both, c.multiply(each, c.like(each, least as f64)), low),
            c.select(both, c.multiply(each, c.like(each, most as f64)), high),
        )
    } else {
        (low, high)
    };
    let (low, high) = (c.minimum(low, zero), c.maximum(high, zero));
    let wide = |v: Value| c.to(v, DType::F64);
    let range = c.subtract(wide(high), wide(low));
    // What follows is computed with the scale that there will be.
    let scale = c.to(c.divide(range, divisor(c, range, steps)), DType::F32);
    let inverse = c.divide(c.ones_like(scale), scale);
    let none = c.or(c.eq(scale, zero), c.eq(inverse, c.like(inverse, f64::INFINITY)));
    let scale = c.select(none, c.like(scale, 0.1), scale);

    let smallest = f64::from(SMALLEST_SCALE);
    let small = c.lt(scale, c.like(scale, smallest));
    let all = c.like(low, f64::from(SMALLEST_SCALE * steps as f32));
    let larger = c.divide(c.like(low, smallest), scale);
    let (from_zero, to_zero) = (c.eq(low, zero), c.eq(high, zero));
    let low_then = c.select(from_zero, low, c.select(to_zero, c.negate(all), c.multiply(low, larger)));
    let high_then = c.select(from_zero, all, c.select(to_zero, high, c.multiply(high, larger)));
    let (low, high) = (c.select(small, low_then, low), c.select(small, high_then, high));
    let scale = c.select(small, c.like(scale, smallest), scale);

    let (below, above) = (c.divide(wide(low), wide(scale)), c.divide(wide(high), wide(scale)));
    let number = |v: f64| c.like(below, v);
    let error_below = c.subtract(number(min.abs()), c.abs(below));
    let error_above = c.subtract(number(max.abs()), c.abs(above));
    let at = c.select(
        c.lt(error_below, error_above),
        c.subtract(number(min), below),
        c.subtract(number(max), above),
    );
    let middle = number((levels.min + levels.max) as f64 / 2.0);
    let at = if symmetric { c.select(around_zero(low, high), middle, at) } else { at };
    let at = c.clamp(number(min), c.round_nearest_even(at), number(max));
    (scale, at)
}
