//! Sums, means, extremes, variances.
//!
//! Reduced floats are summed in float32 and integers in int64, as torch does on the CPU. Extremes propagate NaN.

use crate::args::{Const, Number, Scalar, Tensor};
use crate::context::Ctx;
use crate::dtype::{Category, acc_type, category, opmath, scalar_name};
use crate::error::{Error, Result, index, not_implemented, runtime, unsupported};
use crate::op;
use crate::out::OutDtype;
use crate::row::Row;
use oxitorch_hlo::{Binary, DType, Dims, TensorType, Value};

/// The rows of this family.
pub static ROWS: &[Row] = &[
    op!("sum", |c: &Ctx, x: Tensor, dtype: Option<DType>| sum(c, x, None, false, dtype))
        .out_dtype(OutDtype::Computed),
    op!("sum.dim_IntList", sum).out_dtype(OutDtype::Computed),
    op!("hash_tensor", hash_tensor),
    op!("nansum", nansum).out_dtype(OutDtype::Castable),
    op!("mean", |c: &Ctx, x: Tensor, dtype: Option<DType>| mean(c, x, None, false, dtype))
        .out_dtype(OutDtype::Castable),
    op!("mean.dim", mean).out_dtype(OutDtype::Castable),
    op!("prod", |c: &Ctx, x: Tensor, dtype: Option<DType>| prod(c, x, None, false, dtype))
        .out_dtype(OutDtype::Computed),
    op!("prod.dim_int", |c: &Ctx, x: Tensor, dim: i64, keep: bool, dtype: Option<DType>| {
        prod(c, x, Some(dim), keep, dtype)
    })
    .out_dtype(OutDtype::Computed),
    op!("amax", |c: &Ctx, x: Tensor, dims: Dims, keep: bool| extreme(c, &MAX, x, &dims, keep)),
    op!("amin", |c: &Ctx, x: Tensor, dims: Dims, keep: bool| extreme(c, &MIN, x, &dims, keep)),
    op!("aminmax", aminmax).outs_apart("aminmax(): the `min` and `max` out= tensors must not overlap."),
    op!("max", |c: &Ctx, x: Tensor| extreme_all(c, &MAX, x)).out_dtype(OutDtype::Castable),
    op!("min", |c: &Ctx, x: Tensor| extreme_all(c, &MIN, x)).out_dtype(OutDtype::Castable),
    op!("max.dim", |c: &Ctx, x: Tensor, dim: i64, keep: bool| extreme_dim(c, &MAX, x, dim, keep)).apart(&[0]),
    op!("min.dim", |c: &Ctx, x: Tensor, dim: i64, keep: bool| extreme_dim(c, &MIN, x, dim, keep)).apart(&[0]),
    op!("argmax", |c: &Ctx, x: Tensor, dim: Option<i64>, keep: bool| arg_extreme(c, &MAX, x, dim, keep)),
    op!("argmin", |c: &Ctx, x: Tensor, dim: Option<i64>, keep: bool| arg_extreme(c, &MIN, x, dim, keep)),
    op!("any", |c: &Ctx, x: Tensor| truth(c, Binary::Or, x, &c.dims(&[], x.rank)?, false))
        .out_dtype(OutDtype::Bool),
    op!("any.dim", |c: &Ctx, x: Tensor, dim: i64, keep: bool| truth(
        c,
        Binary::Or,
        x,
        &c.dims(&[dim], x.rank)?,
        keep
    ))
    .out_dtype(OutDtype::Bool),
    op!("any.dims", |c: &Ctx, x: Tensor, dims: Option<Dims>, keep: bool| {
        truth(c, Binary::Or, x, &truth_dims(c, dims, x.rank)?, keep)
    })
    .out_dtype(OutDtype::Bool),
    op!("all", |c: &Ctx, x: Tensor| truth(c, Binary::And, x, &c.dims(&[], x.rank)?, false))
        .out_dtype(OutDtype::Bool),
    op!("all.dim", |c: &Ctx, x: Tensor, dim: i64, keep: bool| {
        truth(c, Binary::And, x, &c.dims(&[dim], x.rank)?, keep)
    })
    .out_dtype(OutDtype::Bool),
    op!("all.dims", |c: &Ctx, x: Tensor, dims: Option<Dims>, keep: bool| {
        truth(c, Binary::And, x, &truth_dims(c, dims, x.rank)?, keep)
    })
    .out_dtype(OutDtype::Bool),
    op!("count_nonzero.dim_IntList", count_nonzero),
    op!("var.correction", |c: &Ctx,
                           x: Tensor,
                           dims: Option<Dims>,
                           correction: Option<Scalar>,
                           keep: bool| {
        moments(c, "std and var", x, dims, correction, keep).map(|m| m.var)
    })
    .out_dtype(OutDtype::Castable),
    op!("std.correction", |c: &Ctx,
                           x: Tensor,
                           dims: Option<Dims>,
                           correction: Option<Scalar>,
                           keep: bool| {
        moments(c, "std and var", x, dims, correction, keep).map(|m| m.std)
    })
    .out_dtype(OutDtype::Castable),
    op!("var_mean.correction", |c: &Ctx,
                                x: Tensor,
                                dims: Option<Dims>,
                                correction: Option<Scalar>,
                                keep: bool| {
        moments(c, "var_mean", x, dims, correction, keep).map(|m| (m.var, m.mean))
    }),
    op!("std_mean.correction", |c: &Ctx,
                                x: Tensor,
                                dims: Option<Dims>,
                                correction: Option<Scalar>,
                                keep: bool| {
        moments(c, "std_mean", x, dims, correction, keep).map(|m| (m.std, m.mean))
    }),
    op!("logsumexp", logsumexp).out_dtype(OutDtype::Castable),
    op!("linalg_vector_norm", vector_norm),
    op!("norm.ScalarOpt_dim", |c: &Ctx, x: Tensor, p: Option<Const>, dims: Dims, keep: bool| {
        norm(c, x, p, dims, keep, None)
    })
    .out_dtype(OutDtype::Castable),
    op!("norm.ScalarOpt_dim_dtype", |c: &Ctx,
                                     x: Tensor,
                                     p: Option<Const>,
                                     dims: Dims,
                                     keep: bool,
                                     dtype: DType| {
        norm(c, x, p, dims, keep, Some(dtype))
    })
    .out_dtype(OutDtype::Castable),
    op!("trace", trace),
];

/// Puts reduced dimensions back with size 1 if `keep`.
pub(super) fn keep_dims(c: &Ctx, reduced: Value, shape: &[i64], dims: &[i64], keep: bool) -> Value {
    if keep { c.reshape(reduced, &kept_shape(shape, dims)) } else { reduced }
}

/// `shape` with size 1 at `dims`.
pub(super) fn kept_shape(shape: &[i64], dims: &[i64]) -> Dims {
    (0..).zip(shape).map(|(i, &n)| if dims.contains(&i) { 1 } else { n }).collect()
}

/// Number of elements that a reduction over `dims` combines into one.
pub(super) fn reduced_numel(shape: &[i64], dims: &[i64]) -> i64 {
    dims.iter().map(|&d| shape[d as usize]).product()
}

/// A constant number of elements as a scalar of `dtype`, broadcast like `x`.
pub(super) fn count_like(c: &Ctx, x: Value, count: i64) -> Value {
    c.like(x, count as f64)
}

/// Mean over `dims` of a float tensor in its own dtype; the dimensions go away.
pub(super) fn plain_mean(c: &Ctx, x: Value, dims: &[i64]) -> Value {
    let sum = c.reduce_sum(x, dims);
    c.divide(sum, count_like(c, sum, reduced_numel(&c.shape(x), dims)))
}

/// The reduction of `x` back over the shape that `dims` were reduced from.
pub(super) fn spread(c: &Ctx, reduced: Value, shape: &[i64], dims: &[i64]) -> Value {
    let kept: Dims = (0..shape.len() as i64).filter(|d| !dims.contains(d)).collect();
    c.broadcast_in_dim(reduced, shape, &kept)
}

fn sum_dtype(x: Tensor, dtype: Option<DType>) -> DType {
    dtype.unwrap_or(if category(x.dtype) <= Category::Int { DType::S64 } else { x.dtype })
}

/// What a sum or product into `dtype` is accumulated in.
fn acc_of(kernel: &str, dtype: DType) -> Result<DType> {
    match dtype {
        DType::Pred => Ok(DType::Pred),
        DType::F8E4M3FN | DType::F8E5M2 => Err(not_implemented(kernel, dtype)),
        _ => Ok(acc_type(dtype)),
    }
}

fn sum(c: &Ctx, x: Tensor, dims: Option<Dims>, keep: bool, dtype: Option<DType>) -> Result<Value> {
    let out = sum_dtype(x, dtype);
    let dims = c.dims(&dims.unwrap_or_default(), x.rank)?;
    let wide = c.to(c.to(x.value, out), acc_of("sum_cpu", out)?);
    let sum = c.to(c.reduce_sum(wide, &dims), out);
    Ok(keep_dims(c, sum, &c.shape(x.value), &dims, keep))
}

/// The exclusive or of what elements are as 64 bits: integers as such, floats as float64.
fn hash_tensor(c: &Ctx, x: Tensor, dims: Dims, keep: bool, mode: i64) -> Result<Value> {
    if mode != 0 {
        return Err(runtime(format!("Unknown hash_tensor mode: {mode}")));
    }
    let shape = c.shape(x.value);
    if dims.is_empty() && c.numel(x.value) == 0 {
        return Err(runtime(
            "hash_tensor: Expected reduction dim to be specified for input.numel() == 0. Specify the reduction dim with the \
             'dim' argument.",
        ));
    }
    let dims = c.dims(&dims, x.rank)?;
    if let Some(d) = dims.iter().find(|&&d| shape.get(d as usize) == Some(&0)) {
        return Err(index(format!("hash_tensor: Expected reduction dim {d} to have non-zero size.")));
    }
    let bits = match category(x.dtype) {
        Category::Complex => return Err(not_implemented("xor_sum_cpu", x.dtype)),
        Category::Float if c.config.target.int64_as_pairs => {
            return Err(unsupported("the bits of float64 on this platform"));
        }
        Category::Float => c.bitcast_convert(c.to(x.value, DType::F64), DType::U64),
        _ => c.bitcast_convert(c.to(x.value, DType::S64), DType::U64),
    };
    let hash = c.reduce1(bits, c.scalar_i64(DType::U64, 0), &dims, |b, x, y| b.xor(x, y));
    Ok(keep_dims(c, hash, &shape, &dims, keep))
}

fn nansum(c: &Ctx, x: Tensor, dims: Option<Dims>, keep: bool, dtype: Option<DType>) -> Result<Value> {
    match category(x.dtype) {
        Category::Complex => {
            Err(Error::NotImplemented("nansum on CPU does not support complex inputs".into()))
        }
        Category::Float => {
            let zero = c.zeros_like(x.value);
            let value = c.select(c.is_nan(x.value), zero, x.value);
            sum(c, Tensor { value, ..x }, dims, keep, dtype)
        }
        _ => sum(c, x, dims, keep, dtype),
    }
}

fn mean(c: &Ctx, x: Tensor, dims: Option<Dims>, keep: bool, dtype: Option<DType>) -> Result<Value> {
    let out = dtype.unwrap_or(x.dtype);
    if category(out) <= Category::Int {
        let which = if dtype.is_some() { "Optional" } else { "Input" };
        let got = scalar_name(out);
        return Err(Error::NotImplemented(format!(
            "mean(): could not infer output dtype. {which} dtype must be either a floating point or complex dtype. \
             Got: {got}"
        )));
    }
    let dims = c.dims(&dims.unwrap_or_default(), x.rank)?;
    let mean = c.to(plain_mean(c, c.to(x.value, acc_of("mean_cpu", out)?), &dims), out);
    Ok(keep_dims(c, mean, &c.shape(x.value), &dims, keep))
}

fn prod(c: &Ctx, x: Tensor, dim: Option<i64>, keep: bool, dtype: Option<DType>) -> Result<Value> {
    let out = sum_dtype(x, dtype);
    let dims = c.dims(dim.as_slice(), x.rank)?;
    let wide = c.to(c.to(x.value, out), acc_of("prod_cpu", out)?);
    let prod = c.to(c.reduce_prod(wide, &dims), out);
    Ok(keep_dims(c, prod, &c.shape(x.value), &dims, keep))
}

/// What tells a maximum from a minimum.
struct Extreme {
    largest: bool,
    /// `amax`, the name in its errors
    fold: &'static str,
    /// `max`
    name: &'static str,
    /// `argmax`
    arg: &'static str,
}

static MAX: Extreme = Extreme { largest: true, fold: "amax", name: "max", arg: "argmax" };
static MIN: Extreme = Extreme { largest: false, fold: "amin", name: "min", arg: "argmin" };

impl Extreme {
    fn reduce(&self, c: &Ctx, x: Value, dims: &[i64]) -> Value {
        if self.largest { c.reduce_max(x, dims) } else { c.reduce_min(x, dims) }
    }
}

/// Extremes have no identity: an empty dimension cannot be reduced.
pub(super) fn require_nonempty(c: &Ctx, name: &str, x: Value, dims: &[i64]) -> Result<()> {
    let shape = c.shape(x);
    match dims.iter().find(|&&d| shape[d as usize] == 0) {
        Some(d) => Err(index(format!("{name}: Expected reduction dim {d} to have non-zero size."))),
        None => Ok(()),
    }
}

fn no_dim_for_empty(name: &str) -> Error {
    runtime(format!(
        "{name}(): Expected reduction dim to be specified for input.numel() == 0. \
         Specify the reduction dim with the 'dim' argument."
    ))
}

/// torch orders neither complex numbers nor the bare unsigned integers.
fn require_ordered(kernel: &str, dtype: DType) -> Result<()> {
    let bare = matches!(dtype, DType::U16 | DType::U32 | DType::U64 | DType::F8E4M3FN | DType::F8E5M2);
    if bare || dtype.is_complex() { Err(not_implemented(kernel, dtype)) } else { Ok(()) }
}

fn extreme(c: &Ctx, e: &Extreme, x: Tensor, dims: &[i64], keep: bool) -> Result<Value> {
    require_ordered(if e.largest { "max_values_cpu" } else { "min_values_cpu" }, x.dtype)?;
    if dims.is_empty() && c.numel(x.value) == 0 {
        return Err(no_dim_for_empty(e.fold));
    }
    let dims = c.dims(dims, x.rank)?;
    require_nonempty(c, &format!("{}()", e.fold), x.value, &dims)?;
    Ok(keep_dims(c, e.reduce(c, x.value, &dims), &c.shape(x.value), &dims, keep))
}

fn extreme_all(c: &Ctx, e: &Extreme, x: Tensor) -> Result<Value> {
    require_ordered(if e.largest { "max_all" } else { "min_all" }, x.dtype)?;
    if c.numel(x.value) == 0 {
        return Err(no_dim_for_empty(e.name));
    }
    Ok(e.reduce(c, x.value, &c.dims(&[], x.rank)?))
}

fn aminmax(c: &Ctx, x: Tensor, dim: Option<i64>, keep: bool) -> Result<(Value, Value)> {
    if x.dtype.is_complex() {
        return Err(Error::Type(format!("aminmax not implemented for {}", scalar_name(x.dtype))));
    }
    require_ordered(if dim.is_some() { "aminmax_cpu" } else { "aminmax_all_cpu" }, x.dtype)?;
    if dim.is_none() && c.numel(x.value) == 0 {
        return Err(runtime(
            "aminmax(): cannot compute aminmax over an empty dimension as the operation has no identity.",
        ));
    }
    let dims = c.dims(dim.as_slice(), x.rank)?;
    require_nonempty(c, "aminmax", x.value, &dims)?;
    let shape = c.shape(x.value);
    let low = keep_dims(c, MIN.reduce(c, x.value, &dims), &shape, &dims, keep);
    let high = keep_dims(c, MAX.reduce(c, x.value, &dims), &shape, &dims, keep);
    Ok((low, high))
}

/// Indices are computed in 32 bits where they fit: 64-bit integers are slow or emulated on accelerators.
pub(super) fn index_dtype(size: i64) -> DType {
    if size < i64::from(i32::MAX) { DType::S32 } else { DType::S64 }
}

/// The extreme along one dimension and its first position.
fn with_index(c: &Ctx, e: &Extreme, x: Value, dim: usize) -> (Value, Value) {
    let size = c.shape(x)[dim];
    let dim = dim as i64;
    let small = index_dtype(size);
    let (value, at) = if e.largest { c.argmax(x, dim, small) } else { c.argmin(x, dim, small) };
    (value, c.to(at, DType::S64))
}

fn extreme_dim(c: &Ctx, e: &Extreme, x: Tensor, dim: i64, keep: bool) -> Result<(Value, Value)> {
    if x.dtype.is_complex() {
        return Err(Error::Type(format!("{}(): does not support complex input", e.name)));
    }
    require_ordered(if e.largest { "max_cpu" } else { "min_cpu" }, x.dtype)?;
    let dim = c.dim(dim, x.rank)?;
    if x.rank == 0 {
        return Ok((x.value, c.scalar_i64(DType::S64, 0)));
    }
    let dims = [dim as i64];
    require_nonempty(c, &format!("{}()", e.name), x.value, &dims)?;
    let (value, at) = with_index(c, e, x.value, dim);
    let shape = c.shape(x.value);
    Ok((keep_dims(c, value, &shape, &dims, keep), keep_dims(c, at, &shape, &dims, keep)))
}

fn arg_extreme(c: &Ctx, e: &Extreme, x: Tensor, dim: Option<i64>, keep: bool) -> Result<Value> {
    match category(x.dtype) {
        Category::Complex => return Err(Error::Type(format!("{}(): does not support complex input", e.arg))),
        Category::Bool => {
            return Err(Error::NotImplemented(format!("{}(): does not support bool input", e.arg)));
        }
        _ => require_ordered(&format!("{}_cpu", e.arg), x.dtype)?,
    }
    let shape = c.shape(x.value);
    let Some(dim) = dim else {
        let n = c.numel(x.value);
        if n == 0 {
            let name = e.arg;
            return Err(index(format!(
                "{name}(): Expected reduction dim to be specified for input.numel() == 0."
            )));
        }
        let at = with_index(c, e, c.reshape(x.value, &[n]), 0).1;
        return Ok(if keep { c.reshape(at, &Dims::from_elem(1, x.rank)) } else { at });
    };
    let dim = c.dim(dim, x.rank)?;
    if x.rank == 0 {
        return Ok(c.scalar_i64(DType::S64, 0));
    }
    let dims = [dim as i64];
    require_nonempty(c, &format!("{}()", e.arg), x.value, &dims)?;
    Ok(keep_dims(c, with_index(c, e, x.value, dim).1, &shape, &dims, keep))
}

/// `any(())` and `all(())` reduce nothing, unlike other reductions.
fn truth_dims(c: &Ctx, dims: Option<Dims>, rank: usize) -> Result<Dims> {
    match dims {
        Some(dims) if dims.is_empty() => Ok(dims),
        dims => c.dims(&dims.unwrap_or_default(), rank),
    }
}

/// Logical reductions give bool, but uint8 for uint8.
fn truth(c: &Ctx, op: Binary, x: Tensor, dims: &[i64], keep: bool) -> Result<Value> {
    let bits = c.to(x.value, DType::Pred);
    let reduced = c.reduce_with(op, bits, c.scalar_bool(op == Binary::And), dims);
    let out = if x.dtype == DType::U8 { DType::U8 } else { DType::Pred };
    Ok(keep_dims(c, c.to(reduced, out), &c.shape(x.value), dims, keep))
}

fn count_nonzero(c: &Ctx, x: Tensor, dims: Dims) -> Result<Value> {
    let dims = c.dims(&dims, x.rank)?;
    Ok(c.reduce_sum(c.to(c.to(x.value, DType::Pred), DType::S64), &dims))
}

struct Moments {
    mean: Value,
    var: Value,
    std: Value,
}

/// Mean and variance in two passes, in opmath; a complex variance is that of both parts together.
fn moments(
    c: &Ctx,
    name: &str,
    x: Tensor,
    dims: Option<Dims>,
    correction: Option<Scalar>,
    keep: bool,
) -> Result<Moments> {
    if category(x.dtype) <= Category::Int {
        return Err(Error::NotImplemented(format!("{name} only support floating point and complex dtypes")));
    }
    let dims = c.dims(&dims.unwrap_or_default(), x.rank)?;
    let shape = c.shape(x.value);
    let wide = c.to(x.value, opmath(x.dtype));
    let mean = plain_mean(c, wide, &dims);
    let deviation = c.subtract(wide, spread(c, mean, &shape, &dims));
    let squares = if x.dtype.is_complex() {
        let (re, im) = (c.real(deviation), c.imag(deviation));
        c.add(c.multiply(re, re), c.multiply(im, im))
    } else {
        c.multiply(deviation, deviation)
    };
    let sum = c.reduce_sum(squares, &dims);
    let dtype = c.dtype(sum);
    let count = c.scalar_f64(dtype, reduced_numel(&shape, &dims) as f64);
    let correction = correction.map_or_else(|| c.scalar_f64(dtype, 1.0), |s| c.number(s, dtype));
    let freedom = c.maximum(c.subtract(count, correction), c.scalar_f64(dtype, 0.0));
    let var = c.divide(sum, c.full(freedom, &c.shape(sum)));
    let finish = |v: Value, dtype: DType| keep_dims(c, c.to(v, dtype), &shape, &dims, keep);
    let real = x.dtype.real();
    Ok(Moments { mean: finish(mean, x.dtype), var: finish(var, real), std: finish(c.sqrt(var), real) })
}

fn logsumexp(c: &Ctx, x: Tensor, dims: Dims, keep: bool) -> Result<Value> {
    let out = c.float_of(x.dtype);
    if out.is_complex() {
        return Err(crate::error::unsupported("logsumexp of complex numbers"));
    }
    let dims = c.dims(&dims, x.rank)?;
    let shape = c.shape(x.value);
    let wide = c.to(x.value, opmath(out));
    let max = c.reduce_max_of_numbers(wide, &dims);
    // An infinite maximum would make inf - inf; shifting by 0 keeps the infinity.
    let shift = c.select(c.is_finite(max), max, c.zeros_like(max));
    let sum = c.reduce_sum(c.exponential(c.subtract(wide, spread(c, shift, &shape, &dims))), &dims);
    Ok(keep_dims(c, c.to(c.add(c.log(sum), shift), out), &shape, &dims, keep))
}

fn norm(c: &Ctx, x: Tensor, p: Option<Const>, dims: Dims, keep: bool, dtype: Option<DType>) -> Result<Value> {
    if category(x.dtype) <= Category::Int && dtype.is_none() {
        let got = scalar_name(x.dtype);
        return Err(Error::NotImplemented(format!(
            "norm(): input dtype should be either floating point or complex. Got {got} instead."
        )));
    }
    vector_norm(c, x, p.unwrap_or(Const(Number::Int(2))), Some(dims), keep, dtype)
}

/// The dtype in which a norm of `x` is taken, or torch's complaint.
fn norm_dtype(x: DType, dtype: Option<DType>) -> Result<DType> {
    const OP: &str = "linalg.vector_norm";
    if category(x) <= Category::Int {
        let got = scalar_name(x);
        return Err(Error::NotImplemented(format!(
            "{OP}: Expected a floating point or complex tensor as input. Got {got}"
        )));
    }
    let Some(dtype) = dtype else { return Ok(x) };
    let (from, to) = (scalar_name(x), scalar_name(dtype));
    if category(dtype) <= Category::Int {
        return Err(runtime(format!("{OP}: dtype should be floating point or complex, but got {to}")));
    }
    if x.is_complex() != dtype.is_complex() {
        let kind = if x.is_complex() { "complex" } else { "real" };
        return Err(runtime(format!("{OP}: dtype should be {kind} for {kind} inputs, but got {to}")));
    }
    if crate::promote::promote(x, dtype)? != dtype {
        return Err(runtime(format!(
            "{OP}: the dtype of the input ({from}) should be convertible without narrowing to the specified dtype ({to})"
        )));
    }
    Ok(dtype)
}

fn vector_norm(
    c: &Ctx,
    x: Tensor,
    ord: Const,
    dims: Option<Dims>,
    keep: bool,
    dtype: Option<DType>,
) -> Result<Value> {
    if matches!(ord.0, Number::Complex(..)) {
        return Err(runtime("linalg.vector_norm: Expected a non-complex scalar as the order of norm."));
    }
    let ord = ord.f64();
    let out = norm_dtype(x.dtype, dtype)?;
    let given = dims.unwrap_or_default();
    let dims = c.dims(&given, x.rank)?;
    let shape = c.shape(x.value);
    if ord < 0.0 || ord.is_infinite() {
        norm_of_nothing(ord, &shape, &dims, given.is_empty())?;
    }
    let size = c.to(c.abs(c.to(x.value, opmath(out))), opmath(out.real()));
    let norm = c.to(norm_of(c, size, ord, &dims), out.real());
    Ok(keep_dims(c, norm, &shape, &dims, keep))
}

/// The `ord` norm of nonnegative numbers.
fn norm_of(c: &Ctx, size: Value, ord: f64, dims: &[i64]) -> Value {
    if ord == f64::INFINITY {
        c.reduce_max(size, dims)
    } else if ord == f64::NEG_INFINITY {
        c.reduce_min(size, dims)
    } else if ord == 0.0 {
        let nonzero = c.to(c.to(size, DType::Pred), c.dtype(size));
        c.reduce_sum(nonzero, dims)
    } else if ord == 1.0 {
        c.reduce_sum(size, dims)
    } else if ord == 2.0 {
        c.sqrt(c.reduce_sum(c.multiply(size, size), dims))
    } else {
        let sum = c.reduce_sum(c.power(size, c.like(size, ord)), dims);
        c.power(sum, c.like(sum, 1.0 / ord))
    }
}

fn norm_of_nothing(ord: f64, shape: &[i64], dims: &[i64], all: bool) -> Result<()> {
    let Some(d) = dims.iter().find(|&&d| shape[d as usize] == 0) else { return Ok(()) };
    // torch's own text has no space before "because".
    let what = if all { "an empty tensor ".into() } else { format!("the dimension {d}") };
    let which = if all { "the operation does" } else { "this dimension is empty and the operation does" };
    Err(runtime(format!(
        "linalg.vector_norm cannot compute the {ord} norm on {what}because {which} not have an identity"
    )))
}

fn trace(c: &Ctx, x: Tensor) -> Result<Value> {
    if x.rank != 2 {
        return Err(runtime(format!("trace: expected a matrix, but got tensor with dim {}", x.rank)));
    }
    if x.dtype == DType::Pred {
        return Err(not_implemented("trace", x.dtype));
    }
    let out = sum_dtype(x, None);
    let shape = c.shape(x.value);
    let index = |dim| c.iota(TensorType::new(DType::S32, shape.clone()), dim);
    let wide = c.to(x.value, acc_of("trace", out)?);
    let diagonal = c.select(c.eq(index(0), index(1)), wide, c.zeros_like(wide));
    Ok(c.to(c.reduce_sum(diagonal, &[0, 1]), out))
}
