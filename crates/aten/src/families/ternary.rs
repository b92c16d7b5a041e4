use crate::args::{Alpha, Scalar, Tensor};
use crate::context::Ctx;
use crate::domain;
use crate::dtype::{Category, category, opmath, scalar_name};
use crate::error::{Error, Result, runtime};
use crate::numbers::{Numbers, int_range, show};
use crate::out::OutDtype;
use crate::row::Row;
use crate::{op, pointwise};
use oxitorch_hlo::{DType, Value};

const EXPANDED: &str = "Use of masked_fill_ on expanded tensors is deprecated. Please clone() the tensor before performing this \
     operation. This also applies to advanced indexing e.g. tensor[mask] = scalar";

/// The rows of this family.
pub static ROWS: &[Row] = &[
    pointwise!("where.self", where_self).out_dtype(OutDtype::Same),
    pointwise!("clamp", |c: &Ctx, x: Tensor, low: Option<Scalar>, high: Option<Scalar>| {
        clamp(c, x, low.map(|n| bound(c, x, n)), high.map(|n| bound(c, x, n)))
    })
    .check_numbers(|n| check_bounds(n, Some(1), Some(2)))
    .out_dtype(OutDtype::Same),
    pointwise!("clamp.Tensor", clamp).out_dtype(OutDtype::Same),
    pointwise!("clamp_min", |c: &Ctx, x: Tensor, low: Scalar| clamp(c, x, Some(bound(c, x, low)), None))
        .check_numbers(|n| check_bounds(n, Some(1), None))
        .out_dtype(OutDtype::Same)
        .serves(&[
            "_foreach_maximum.Scalar",
            "_foreach_maximum.ScalarList",
            "_foreach_maximum_.Scalar",
            "_foreach_maximum_.ScalarList",
        ]),
    pointwise!("clamp_min.Tensor", |c: &Ctx, x: Tensor, low: Tensor| clamp(c, x, Some(low), None))
        .out_dtype(OutDtype::Same)
        .serves(&["_foreach_maximum.List", "_foreach_maximum_.List"]),
    pointwise!("clamp_max", |c: &Ctx, x: Tensor, high: Scalar| clamp(c, x, None, Some(bound(c, x, high))))
        .check_numbers(|n| check_bounds(n, None, Some(1)))
        .out_dtype(OutDtype::Same)
        .serves(&[
            "_foreach_minimum.Scalar",
            "_foreach_minimum.ScalarList",
            "_foreach_minimum_.Scalar",
            "_foreach_minimum_.ScalarList",
        ]),
    pointwise!("clamp_max.Tensor", |c: &Ctx, x: Tensor, high: Tensor| clamp(c, x, None, Some(high)))
        .out_dtype(OutDtype::Same)
        .serves(&["_foreach_minimum.List", "_foreach_minimum_.List"]),
    pointwise!("addcmul", addcmul).dtypes(domain::no_bool),
    pointwise!("addcdiv", addcdiv),
    pointwise!("lerp.Scalar", |c: &Ctx, x: Tensor, end: Tensor, weight: Scalar| {
        lerp(c, x, end, c.number(weight, opmath(x.dtype)))
    })
    .dtypes(domain::fractions),
    pointwise!("lerp.Tensor", lerp_tensor).dtypes(domain::fractions),
    op!("masked_fill.Scalar", |c: &Ctx, x: Tensor, mask: Tensor, value: Scalar| {
        masked_fill(c, x, mask, value.tensor())
    })
    .fills()
    .warns_of_expanded(EXPANDED)
    .check_numbers(|n| n.fits(2)),
    op!("masked_fill.Tensor", masked_fill).fills().warns_of_expanded(EXPANDED),
    pointwise!("_masked_scale", |c: &Ctx, x: Tensor, mask: Tensor, scale: Scalar| masked_scale(
        c, x, mask, scale
    )),
];

fn where_self(c: &Ctx, condition: Tensor, x: Tensor, y: Tensor) -> Result<Value> {
    if !matches!(condition.dtype, DType::Pred | DType::U8) {
        return Err(runtime(format!(
            "where expected condition to be a boolean tensor, but got a tensor with dtype {}",
            scalar_name(condition.dtype)
        )));
    }
    let dtype = c.result_type(&[x, y])?;
    let values = [condition.value, x.value, y.value];
    let shape = c.broadcast_shapes(&values.map(|v| c.shape(v)))?;
    let condition = c.expand(c.to(condition.value, DType::Pred), &shape)?;
    let [x, y] = [c.expand(c.to(x.value, dtype), &shape)?, c.expand(c.to(y.value, dtype), &shape)?];
    Ok(c.select(condition, x, y))
}

/// Bounds of floats must fit them. Those of integers may lie outside, but on the side where they change nothing.
fn check_bounds(n: &Numbers, low: Option<usize>, high: Option<usize>) -> Result<()> {
    let Some(dtype) = n.dtype else { return Ok(()) };
    if dtype.is_float() {
        return low.into_iter().chain(high).try_for_each(|param| n.fits(param));
    }
    let integer = |param: Option<usize>| param.and_then(|p| n.int(p)).filter(|_| dtype.is_integral());
    let outside = |which: &str, x: i64| {
        let (x, name) = (show(x as f64), scalar_name(dtype));
        Err(runtime(format!("Clamp {which} value {x} is outside the representable range of {name}")))
    };
    match (integer(low), integer(high)) {
        (Some(low), _) if i128::from(low) > int_range(dtype).1 => outside("min", low),
        (_, Some(high)) if i128::from(high) < int_range(dtype).0 => outside("max", high),
        _ => Ok(()),
    }
}

/// A number as a bound: an integer that the dtype does not reach is as good as the last one that it does.
fn bound(c: &Ctx, x: Tensor, number: Scalar) -> Tensor {
    let bound = number.tensor();
    if !x.dtype.is_integral() || bound.dtype != DType::S64 || x.dtype.size_bytes() == 8 {
        return bound;
    }
    let (low, high) = int_range(x.dtype);
    let [low, high] = [low, high].map(|n| c.scalar_i64(DType::S64, n as i64));
    Tensor { value: c.clamp(low, bound.value, high), ..bound }
}

/// `min(max(x, low), high)`: the upper bound wins where they cross, NaN anywhere gives NaN.
fn clamp(c: &Ctx, x: Tensor, low: Option<Tensor>, high: Option<Tensor>) -> Result<Value> {
    let bounds: Vec<Tensor> = [low, high].into_iter().flatten().collect();
    if bounds.is_empty() {
        return Err(runtime("torch.clamp: At least one of 'min' or 'max' must not be None"));
    }
    let mut all = vec![x];
    all.extend(&bounds);
    if all.iter().any(|t| t.dtype.is_complex()) {
        return Err(Error::NotImplemented("clamp is not supported for complex types".into()));
    }
    let dtype = match bounds.iter().all(|b| b.wrapped) && x.dtype.is_float() {
        true => x.dtype,
        false => c.result_type(&all)?,
    };
    let shapes: Vec<_> = all.iter().map(|t| c.shape(t.value)).collect();
    let shape = c.broadcast_shapes(&shapes)?;
    let put = |t: Tensor| c.expand(c.to(t.value, dtype), &shape);
    let mut v = put(x)?;
    if let Some(low) = low {
        v = c.maximum(v, put(low)?);
    }
    if let Some(high) = high {
        v = c.minimum(v, put(high)?);
    }
    Ok(v)
}

/// `x + value * f(a, b)` in opmath.
fn addc(
    c: &Ctx,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    value: Alpha,
    f: impl FnOnce(&Ctx, Value, Value, Alpha) -> Value,
) -> Result<Value> {
    let dtype = c.result_type(&[x, a, b])?;
    let [x, a, b] = c.align([x.value, a.value, b.value], opmath(dtype))?;
    Ok(c.to(c.add(x, f(c, a, b, value)), dtype))
}

fn addcmul(c: &Ctx, x: Tensor, a: Tensor, b: Tensor, value: Alpha) -> Result<Value> {
    addc(c, x, a, b, value, |c, a, b, value| c.multiply(c.times(a, value), b))
}

fn addcdiv(c: &Ctx, x: Tensor, a: Tensor, b: Tensor, value: Alpha) -> Result<Value> {
    if category(a.dtype) <= Category::Int && category(b.dtype) <= Category::Int {
        return Err(runtime(
            "Integer division with addcdiv is no longer supported, and in a future release addcdiv will perform a \
             true division of tensor1 and tensor2. The historic addcdiv behavior can be implemented as \
             (input + value * torch.trunc(tensor1 / tensor2)).to(input.dtype) for integer inputs and as \
             (input + value * tensor1 / tensor2) for float inputs. The future addcdiv behavior is just the latter \
             implementation: (input + value * tensor1 / tensor2), for all dtypes.",
        ));
    }
    addc(c, x, a, b, value, |c, a, b, value| c.divide(c.times(a, value), b))
}

/// torch wants one dtype for all, so that nothing is rounded twice.
fn same_dtype(x: Tensor, y: Tensor, name: &str) -> Result<()> {
    if x.dtype == y.dtype {
        return Ok(());
    }
    let (want, got) = (scalar_name(x.dtype).to_lowercase(), scalar_name(y.dtype).to_lowercase());
    Err(runtime(format!("expected dtype {want} for `{name}` but got dtype {got}")))
}

fn lerp_tensor(c: &Ctx, x: Tensor, end: Tensor, weight: Tensor) -> Result<Value> {
    same_dtype(x, weight, "weight")?;
    lerp(c, x, end, c.to(weight.value, opmath(x.dtype)))
}

/// From the nearer end, so that weights 0 and 1 are exact.
fn lerp(c: &Ctx, x: Tensor, end: Tensor, weight: Value) -> Result<Value> {
    same_dtype(x, end, "end")?;
    let [a, b, w] = c.align([x.value, end.value, weight], opmath(x.dtype))?;
    let gap = c.subtract(b, a);
    let from_start = c.add(a, c.multiply(w, gap));
    let from_end = c.subtract(b, c.multiply(gap, c.subtract(c.like(w, 1.0), w)));
    let size = c.abs(w);
    Ok(c.to(c.select(c.lt(size, c.like(size, 0.5)), from_start, from_end), x.dtype))
}

fn masked_fill(c: &Ctx, x: Tensor, mask: Tensor, value: Tensor) -> Result<Value> {
    if mask.dtype != DType::Pred {
        return Err(runtime(format!(
            "masked_fill_ only supports boolean masks, but got mask with dtype {}",
            crate::dtype::cpp_name(mask.dtype)
        )));
    }
    if value.rank != 0 {
        return Err(runtime(format!(
            "masked_fill_ only supports a 0-dimensional value tensor, but got tensor with {} dimension(s).",
            value.rank
        )));
    }
    if value.dtype.is_complex() && !x.dtype.is_complex() {
        return Err(runtime("value cannot be converted to a real type without overflow"));
    }
    let shape = c.broadcast_shapes(&[c.shape(x.value), c.shape(mask.value)])?;
    let fill = c.full(c.to(value.value, x.dtype), &shape);
    Ok(c.select(c.expand(mask.value, &shape)?, fill, c.expand(x.value, &shape)?))
}

fn masked_scale(c: &Ctx, x: Tensor, mask: Tensor, scale: Scalar) -> Result<Value> {
    let [v, m] = c.align([x.value, mask.value], opmath(x.dtype))?;
    let factor = c.number_like(scale, c.dtype(v), &c.shape(v));
    Ok(c.to(c.multiply(c.multiply(v, m), factor), x.dtype))
}
