use crate::args::{Scalar, Tensor};
use crate::context::Ctx;
use crate::dtype::category;
use crate::error::{Result, runtime, type_};
use crate::out::OutDtype;
use crate::pointwise;
use crate::row::{Row, compare, compare_scalar};
use oxitorch_hlo::{Builder, DType, Direction, Value};

/// The rows of this family.
pub static ROWS: &[Row] = &[
    compare("eq.Tensor", Direction::Eq),
    compare_scalar("eq.Scalar", Direction::Eq),
    compare("ne.Tensor", Direction::Ne),
    compare_scalar("ne.Scalar", Direction::Ne),
    compare("lt.Tensor", Direction::Lt),
    compare_scalar("lt.Scalar", Direction::Lt),
    compare("le.Tensor", Direction::Le),
    compare_scalar("le.Scalar", Direction::Le),
    compare("gt.Tensor", Direction::Gt),
    compare_scalar("gt.Scalar", Direction::Gt),
    compare("ge.Tensor", Direction::Ge),
    compare_scalar("ge.Scalar", Direction::Ge),
    pointwise!("isnan", |c: &Ctx, x: Tensor| parts(c, x, |b, v| b.is_nan(v))),
    pointwise!("isinf", |c: &Ctx, x: Tensor| parts(c, x, |b, v| b
        .eq(b.abs(v), b.full_like(v, f64::INFINITY)))),
    pointwise!("isposinf", |c: &Ctx, x: Tensor| is_infinity(c, x, "isposinf", f64::INFINITY))
        .out_dtype(OutDtype::Same),
    pointwise!("isneginf", |c: &Ctx, x: Tensor| is_infinity(c, x, "isneginf", f64::NEG_INFINITY))
        .out_dtype(OutDtype::Same),
    pointwise!("logical_not", |c: &Ctx, x: Value| c.not(c.to(x, DType::Pred))),
    pointwise!("logical_and", |c: &Ctx, x: Value, y: Value| logical(c, x, y, Builder::and)),
    pointwise!("logical_or", |c: &Ctx, x: Value, y: Value| logical(c, x, y, Builder::or)),
    pointwise!("logical_xor", |c: &Ctx, x: Value, y: Value| logical(c, x, y, Builder::xor)),
    pointwise!("isin.Tensor_Tensor", isin).out_dtype(OutDtype::Same),
    pointwise!("isin.Tensor_Scalar", |c: &Ctx, x: Tensor, y: Scalar, unique: bool, invert: bool| {
        isin(c, x, y.tensor(), unique, invert)
    })
    .out_dtype(OutDtype::Same),
    pointwise!("isin.Scalar_Tensor", |c: &Ctx, x: Scalar, y: Tensor, unique: bool, invert: bool| {
        isin(c, x.tensor(), y, unique, invert)
    })
    .out_dtype(OutDtype::Same),
];

/// A test on floats: false for integers, either part for complex numbers.
fn parts(c: &Ctx, x: Tensor, f: fn(&Builder, Value) -> Value) -> Value {
    if x.dtype.is_complex() {
        return c.or(f(c, c.real(x.value)), f(c, c.imag(x.value)));
    }
    if x.dtype.is_float() { f(c, x.value) } else { no(c, x.value) }
}

/// False everywhere.
fn no(c: &Ctx, x: Value) -> Value {
    c.full(c.scalar_bool(false), &c.shape(x))
}

fn is_infinity(c: &Ctx, x: Tensor, name: &str, limit: f64) -> Result<Value> {
    if x.dtype.is_complex() {
        return Err(type_(format!("{name} does not support complex inputs.")));
    }
    Ok(if x.dtype.is_float() { c.eq(x.value, c.like(x.value, limit)) } else { no(c, x.value) })
}

fn logical(c: &Ctx, x: Value, y: Value, f: fn(&Builder, Value, Value) -> Value) -> Result<Value> {
    let [x, y] = c.align([c.to(x, DType::Pred), c.to(y, DType::Pred)], DType::Pred)?;
    Ok(f(c, x, y))
}

/// Compares every element with every test element.
fn isin(c: &Ctx, x: Tensor, tests: Tensor, _assume_unique: bool, invert: bool) -> Result<Value> {
    let dtype = c.result_type(&[x, tests])?;
    if dtype.is_complex() {
        return Err(runtime(format!("Unsupported input type encountered for isin(): {:?}", category(dtype))));
    }
    let (v, t) = (c.to(x.value, dtype), c.to(tests.value, dtype));
    let mut shape = c.shape(v);
    let dims: Vec<i64> = (0..shape.len() as i64).collect();
    shape.push(c.numel(t));
    let last = shape.len() as i64 - 1;
    let t = c.broadcast_in_dim(c.reshape(t, &[c.numel(t)]), &shape, &[last]);
    let v = c.broadcast_in_dim(v, &shape, &dims);
    let found = c.reduce_any(c.eq(v, t), &[last]);
    Ok(if invert { c.not(found) } else { found })
}
