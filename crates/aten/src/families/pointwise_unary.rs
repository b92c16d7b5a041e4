use crate::args::{Scalar, Tensor};
use crate::context::Ctx;
use crate::domain;
use crate::dtype::{Category, category, opmath};
use crate::error::{Error, Result, not_implemented, runtime};
use crate::numbers::finite_max;
use crate::out::OutDtype;
use crate::promote::Promote::{Float, KeepInt, Opmath, Same};
use crate::row::{Row, unary};
use crate::{Layout, op, pointwise};
use oxitorch_hlo::{Builder, DType, Value};
use std::f64::consts::{LN_2, LN_10, PI};

/// The rows of this family.
pub static ROWS: &[Row] = &[
    pointwise!("abs", abs).dtypes(domain::sizes).out_dtype(OutDtype::Same),
    unary("acos", Float, Builder::acos).library("acos.out"),
    unary("acosh", Float, Builder::acosh),
    op!("angle", angle).layout(Layout::RealPointwise),
    unary("asin", Float, Builder::asin).library("asin.out"),
    unary("asinh", Float, Builder::asinh),
    unary("atan", Float, Builder::atan).library("atan.out"),
    unary("atanh", Float, Builder::atanh),
    unary("ceil", KeepInt, Builder::ceil),
    unary("cos", Float, Builder::cosine).library("cos.out"),
    unary("cosh", Float, Builder::cosh),
    unary("deg2rad", Float, |b, x| b.multiply(x, b.full_like(x, PI / 180.0))).dtypes(domain::ordered),
    unary("digamma", Float, digamma).library("digamma.out"),
    unary("erf", Float, Builder::erf),
    unary("erfc", Float, Builder::erfc),
    unary("erfinv", Float, Builder::erf_inv).library("erfinv.out"),
    unary("exp", Float, Builder::exponential),
    unary("exp2", Float, |b, x| b.exponential(b.multiply(x, b.full_like(x, LN_2)))),
    unary("expm1", Float, Builder::exponential_minus_one),
    unary("floor", KeepInt, Builder::floor),
    unary("frac", Same, |b, x| b.subtract(x, trunc(b, x))).dtypes(domain::ordered),
    unary("lgamma", Float, Builder::lgamma).library("lgamma.out"),
    unary("log", Float, Builder::log),
    unary("log10", Float, |b, x| b.divide(b.log(x), b.full_like(x, LN_10))),
    unary("log1p", Float, Builder::log_plus_one),
    unary("log2", Float, |b, x| b.divide(b.log(x), b.full_like(x, LN_2))),
    pointwise!("logit", logit).dtypes(domain::ordered),
    pointwise!("nan_to_num", nan_to_num).out_dtype(OutDtype::Same),
    pointwise!("neg", neg).out_dtype(OutDtype::Same),
    pointwise!("polygamma", polygamma),
    unary("rad2deg", Float, |b, x| b.multiply(x, b.full_like(x, 180.0 / PI))),
    unary("reciprocal", Float, |b, x| b.divide(b.full_like(x, 1.0), x)),
    unary("round", KeepInt, Builder::round_nearest_even),
    pointwise!("round.decimals", round_decimals).dtypes(domain::floats).out_dtype(OutDtype::Same),
    unary("rsqrt", Float, Builder::rsqrt),
    unary("sgn", Same, sgn),
    unary("sigmoid", Float, Builder::logistic),
    pointwise!("sign", sign_row).out_dtype(OutDtype::Same),
    pointwise!("signbit", signbit).out_dtype(OutDtype::Same),
    unary("sin", Float, Builder::sine).library("sin.out"),
    unary("sinc", Float, sinc),
    unary("sinh", Float, Builder::sinh),
    unary("special_entr", Float, entr),
    unary("special_erfcx", Float, erfcx),
    unary("special_log_ndtr", Float, log_ndtr),
    unary("sqrt", Float, Builder::sqrt),
    unary("tan", Float, Builder::tan).library("tan.out"),
    unary("tanh", Float, Builder::tanh),
    unary("trunc", KeepInt, trunc).dtypes(domain::ordered),
    unary("relu", Opmath, relu).dtypes(domain::rectified),
];

fn abs(c: &Ctx, x: Tensor) -> Result<Value> {
    match x.dtype {
        DType::Pred => Err(not_implemented("abs_cpu", x.dtype)),
        t if category(t) == Category::Int && !t.is_signed() => Ok(x.value),
        _ => Ok(c.abs(x.value)),
    }
}

fn neg(c: &Ctx, x: Tensor) -> Result<Value> {
    if x.dtype == DType::Pred {
        return Err(Error::NotImplemented(
            "Negation, the `-` operator, on a bool tensor is not supported. \
             If you are trying to invert a mask, use the `~` or `logical_not()` operator instead."
                .into(),
        ));
    }
    Ok(c.negate(x.value))
}

/// 0 or pi for real numbers, NaN kept; the argument of complex ones.
fn angle(c: &Ctx, x: Tensor) -> Value {
    let v = c.to(x.value, c.float_of(x.dtype));
    if x.dtype.is_complex() {
        return c.atan2(c.imag(v), c.real(v));
    }
    let zero = c.zeros_like(v);
    let turned = c.select(c.lt(v, zero), c.like(v, PI), zero);
    c.select(c.is_nan(v), v, turned)
}

/// Rounds toward zero.
pub(crate) fn trunc(b: &Builder, x: Value) -> Value {
    b.select(b.lt(x, b.zeros_like(x)), b.ceil(x), b.floor(x))
}

/// -1, 0 or 1; NaN gives 0, as torch has it.
pub(crate) fn sign(b: &Builder, x: Value) -> Value {
    if b.dtype(x) == DType::Pred {
        return x;
    }
    if !b.dtype(x).is_signed() {
        return b.minimum(x, b.full_like(x, 1.0));
    }
    if !b.dtype(x).is_float() {
        return b.sign(x);
    }
    b.select(b.is_nan(x), b.zeros_like(x), b.sign(x))
}

fn sign_row(c: &Ctx, x: Tensor) -> Result<Value> {
    if x.dtype.is_complex() {
        let message = "Unlike NumPy, torch.sign is not intended to support complex numbers. Please use torch.sgn instead.";
        return Err(Error::NotImplemented(message.into()));
    }
    Ok(sign(c, x.value))
}

fn sgn(b: &Builder, x: Value) -> Value {
    if b.dtype(x).is_complex() { b.sign(x) } else { sign(b, x) }
}

fn signbit(c: &Ctx, x: Tensor) -> Result<Value> {
    Ok(match x.dtype {
        DType::Pred => c.zeros_like(x.value),
        t if t.is_complex() => return Err(not_implemented("signbit_cpu", t)),
        t if t.is_float() => {
            let bits = match t.size_bytes() {
                1 => DType::S8,
                2 => DType::S16,
                4 => DType::S32,
                _ => DType::S64,
            };
            let v = c.bitcast_convert(x.value, bits);
            c.lt(v, c.zeros_like(v))
        }
        _ => c.lt(x.value, c.zeros_like(x.value)),
    })
}

/// torch's limits at zero are those of its sign: digamma(+0) = -inf.
fn digamma(b: &Builder, x: Value) -> Value {
    let zero = b.zeros_like(x);
    let at_zero = b.negate(b.divide(b.full_like(x, 1.0), x));
    b.select(b.eq(x, zero), at_zero, b.digamma(x))
}

fn sinc(b: &Builder, x: Value) -> Value {
    let one = b.full_like(x, 1.0);
    let at_zero = b.eq(x, b.zeros_like(x));
    let y = b.multiply(x, b.full_like(x, PI));
    b.select(at_zero, one, b.divide(b.sine(y), y))
}

/// `-x log x`, 0 at 0, -inf below.
fn entr(b: &Builder, x: Value) -> Value {
    let zero = b.zeros_like(x);
    let inside = b.negate(b.multiply(x, b.log(x)));
    let y = b.select(b.eq(x, zero), zero, inside);
    let y = b.select(b.lt(x, zero), b.full_like(x, f64::NEG_INFINITY), y);
    b.select(b.is_nan(x), x, y)
}

/// `exp(x^2) erfc(x)`: as it stands for small x, by a continued fraction where erfc underflows.
fn erfcx(b: &Builder, x: Value) -> Value {
    let small = b.multiply(b.exponential(b.multiply(x, x)), b.erfc(x));
    // Lentz's fraction for x > 2 (Abramowitz and Stegun 7.1.14), evaluated from a fixed depth; relative error below 1e-15 there.
    let mut fraction = x;
    for k in (1..=60).rev() {
        fraction = b.add(x, b.divide(b.full_like(x, k as f64 / 2.0), fraction));
    }
    let large = b.divide(b.full_like(x, 1.0 / PI.sqrt()), fraction);
    b.select(b.gt(x, b.full_like(x, 2.0)), large, small)
}

/// `log(ndtr(x))` without cancellation in the left tail.
fn log_ndtr(b: &Builder, x: Value) -> Value {
    let t = b.multiply(x, b.full_like(x, std::f64::consts::FRAC_1_SQRT_2));
    let half = b.full_like(x, 0.5);
    let tail = b.subtract(b.log(b.multiply(erfcx(b, b.negate(t)), half)), b.multiply(t, t));
    let body = b.log_plus_one(b.negate(b.multiply(b.erfc(t), half)));
    b.select(b.lt(x, b.full_like(x, -1.0)), tail, body)
}

/// `max(x, 0)` that keeps NaN.
pub(crate) fn relu(b: &Builder, x: Value) -> Value {
    b.maximum(x, b.zeros_like(x))
}

fn logit(c: &Ctx, x: Tensor, eps: Option<Scalar>) -> Value {
    let v = c.to(x.value, c.float_of(x.dtype));
    c.in_opmath(v, |v| {
        let one = c.like(v, 1.0);
        let v = match eps {
            None => v,
            Some(eps) => {
                let low = c.number_like(eps, c.dtype(v), &c.shape(v));
                let high = c.subtract(one, low);
                // The lower bound wins where they cross; a negative eps means none.
                let clamped = c.select(c.lt(v, low), low, c.select(c.gt(v, high), high, v));
                c.select(c.lt(low, c.zeros_like(low)), v, clamped)
            }
        };
        c.log(c.divide(v, c.subtract(one, v)))
    })
}

fn nan_to_num(
    c: &Ctx,
    x: Tensor,
    nan: Option<Scalar>,
    posinf: Option<Scalar>,
    neginf: Option<Scalar>,
) -> Value {
    if x.dtype.is_complex() {
        let (nan, pos, neg) = (nan, posinf, neginf);
        let part = |v| real_nan_to_num(c, v, nan, pos, neg);
        return c.complex(part(c.real(x.value)), part(c.imag(x.value)));
    }
    if !x.dtype.is_float() {
        return x.value;
    }
    real_nan_to_num(c, x.value, nan, posinf, neginf)
}

fn real_nan_to_num(
    c: &Ctx,
    x: Value,
    nan: Option<Scalar>,
    pos: Option<Scalar>,
    neg: Option<Scalar>,
) -> Value {
    let (dtype, shape) = (c.dtype(x), c.shape(x));
    let or = |s: Option<Scalar>, default: f64| match s {
        Some(s) => c.number_like(s, dtype, &shape),
        None => c.like(x, default),
    };
    let largest = finite_max(dtype);
    let is = |limit: f64| c.eq(x, c.like(x, limit));
    let y = c.select(is(f64::INFINITY), or(pos, largest), x);
    let y = c.select(is(f64::NEG_INFINITY), or(neg, -largest), y);
    c.select(c.is_nan(x), or(nan, 0.0), y)
}

/// `(-1)^(n+1) n! zeta(n+1, x)`; below 0 by the reflection
/// `(-1)^n polygamma(n, 1-x) - polygamma(n, x) = d^n/dx^n pi cot(pi x)`.
fn polygamma(c: &Ctx, n: i64, x: Tensor) -> Result<Value> {
    if n < 0 {
        return Err(runtime("polygamma(n, x) does not support negative n."));
    }
    let v = c.to(x.value, c.float_of(x.dtype));
    if n == 0 {
        return Ok(c.in_opmath(v, |v| digamma(c, v)));
    }
    let factorial: f64 = (1..=n).map(|k| k as f64).product();
    let sign = if n % 2 == 1 { 1.0 } else { -1.0 };
    Ok(c.in_opmath(v, |v| {
        let zero = c.zeros_like(v);
        let below = c.lt(v, zero);
        let at = c.select(below, c.subtract(c.like(v, 1.0), v), v);
        let y = c.multiply(c.like(v, sign * factorial), c.zeta(c.like(v, n as f64 + 1.0), at));
        let waves = cotangent_derivative(c, n, v);
        let y = c.select(below, c.subtract(c.multiply(c.like(v, -sign), y), waves), y);
        let pole = c.and(c.le(v, zero), c.eq(v, c.floor(v)));
        let y = c.select(pole, c.like(v, sign * f64::INFINITY), y);
        if n > 1 {
            return y;
        }
        let y = c.select(c.eq(v, c.like(v, f64::INFINITY)), zero, y);
        c.select(c.eq(v, c.like(v, f64::NEG_INFINITY)), c.like(v, f64::NAN), y)
    }))
}

/// `d^n/dx^n pi cot(pi x)`: `pi^(n+1)` times a polynomial in the cotangent, all of whose coefficients have one sign.
fn cotangent_derivative(c: &Ctx, n: i64, x: Value) -> Value {
    // By the powers of cot: the derivative of cot(x) is -(1 + cot(x)^2).
    let mut powers = vec![0.0, 1.0];
    for _ in 0..n {
        let mut next = vec![0.0; powers.len() + 1];
        for (k, &p) in powers.iter().enumerate().skip(1) {
            next[k - 1] -= k as f64 * p;
            next[k + 1] -= k as f64 * p;
        }
        powers = next;
    }
    // The cosine as a sine from the other end, so that the quotient is exact to its last digits next to its zeros too.
    let part = c.subtract(x, c.round_nearest_even(x));
    let other = c.subtract(c.like(x, 0.5), c.abs(part));
    let sine = |v: Value| c.sine(c.multiply(v, c.like(v, PI)));
    let cot = c.divide(sine(other), sine(part));
    let scale = PI.powi(n as i32 + 1);
    let square = c.multiply(cot, cot);
    // The first one is of the highest power, and every other one is 0.
    let mut y = c.zeros_like(x);
    for p in powers.iter().rev().step_by(2) {
        y = c.add(c.multiply(y, square), c.like(x, scale * p));
    }
    if n % 2 == 0 { c.multiply(y, cot) } else { y }
}

fn round_decimals(c: &Ctx, x: Tensor, decimals: i64) -> Value {
    if category(x.dtype) <= Category::Int {
        return x.value;
    }
    let v = c.to(x.value, opmath(x.dtype));
    let power = c.like(v, 10f64.powi(decimals.unsigned_abs().min(400) as i32));
    let y = match decimals {
        0 => c.round_nearest_even(v),
        1.. => c.divide(c.round_nearest_even(c.multiply(v, power)), power),
        _ => c.multiply(c.round_nearest_even(c.divide(v, power)), power),
    };
    c.to(y, x.dtype)
}
