use crate::args::{Scalar, Tensor};
use crate::context::Ctx;
use crate::domain;
use crate::dtype::{opmath, scalar_name};
use crate::error::{Result, runtime};
use crate::numbers::{Numbers, finite_max, show};
use crate::out::OutDtype;
use crate::pointwise;
use crate::promote::Promote::{Float, Opmath};
use crate::row::{Row, unary};
use crate::{Layout, op};
use oxitorch_hlo::{Builder, Value};
use std::f64::consts::{FRAC_1_SQRT_2, FRAC_2_SQRT_PI, PI, SQRT_2};

/// The rows of this family. Derivatives take the gradient first, as ATen does.
pub static ROWS: &[Row] = &[
    pointwise!("celu", |c: &Ctx, x: Tensor, alpha: Scalar| celu(c, x, alpha))
        .dtypes(domain::floats)
        .check_numbers(|n| {
            n.require(1, |alpha| alpha != 0.0, |_| "ZeroDivisionError: alpha cannot be 0 for CELU".to_owned())
        }),
    pointwise!("elu", elu).dtypes(domain::floats).out_dtype(OutDtype::Same),
    pointwise!("elu_backward", elu_backward),
    pointwise!("gelu", gelu).out_dtype(OutDtype::Same),
    pointwise!("gelu_backward", gelu_backward),
    pointwise!("glu", glu),
    op!("glu_backward", glu_backward).layout(Layout::LikeFirst),
    op!("glu_jvp", glu_jvp),
    op!("glu_backward_jvp", glu_backward_jvp),
    pointwise!("hardshrink", hardshrink).dtypes(domain::floats).out_dtype(OutDtype::Same),
    pointwise!("hardshrink_backward", shrink_backward),
    unary("hardsigmoid", Opmath, |b, x| b.divide(relu6_plus_3(b, x), b.full_like(x, 6.0)))
        .dtypes(domain::floats),
    pointwise!("hardsigmoid_backward", hardsigmoid_backward),
    unary("hardswish", Opmath, |b, x| b.multiply(x, b.divide(relu6_plus_3(b, x), b.full_like(x, 6.0))))
        .dtypes(domain::floats),
    pointwise!("hardswish_backward", hardswish_backward),
    pointwise!("hardtanh", hardtanh).dtypes(domain::clamped).out_dtype(OutDtype::Same),
    pointwise!("hardtanh_backward", hardtanh_backward),
    pointwise!("leaky_relu", |c: &Ctx, x: Tensor, slope: Scalar| leaky(c, x, x, slope))
        .dtypes(domain::floats)
        .out_dtype(OutDtype::Same),
    pointwise!("leaky_relu_backward", |c: &Ctx, g: Tensor, x: Tensor, slope: Scalar, _is_result: bool| {
        leaky(c, g, x, slope)
    }),
    op!("log_sigmoid_forward", log_sigmoid),
    op!("log_sigmoid_backward", |c: &Ctx, g: Tensor, x: Tensor, _buffer: Tensor| {
        log_sigmoid_backward(c, g, x)
    })
    .layout(Layout::LikeFirst),
    pointwise!("logit_backward", logit_backward),
    unary("mish", Opmath, |b, x| b.multiply(x, b.tanh(b.log_plus_one(b.exponential(x)))))
        .dtypes(domain::floats),
    pointwise!("_prelu_kernel", prelu),
    pointwise!("_prelu_kernel_backward", prelu_backward),
    pointwise!("sigmoid_backward", |c: &Ctx, g: Tensor, y: Tensor| {
        pair(c, g, y, |b, g, y| b.multiply(g, conj(b, b.multiply(b.subtract(b.full_like(y, 1.0), y), y))))
    }),
    unary("silu", Float, |b, x| b.multiply(x, b.logistic(x)))
        .dtypes(domain::fractions)
        .out_dtype(OutDtype::Same),
    pointwise!("silu_backward", silu_backward),
    pointwise!("softplus", softplus).dtypes(domain::floats).out_dtype(OutDtype::Same),
    pointwise!("softplus_backward", softplus_backward),
    pointwise!("softshrink", softshrink)
        .dtypes(domain::floats)
        .check_numbers(check_lambda)
        .out_dtype(OutDtype::Same),
    pointwise!("softshrink_backward", shrink_backward),
    pointwise!("tanh_backward", |c: &Ctx, g: Tensor, y: Tensor| {
        pair(c, g, y, |b, g, y| b.multiply(g, conj(b, b.subtract(b.full_like(y, 1.0), b.multiply(y, y)))))
    }),
    pointwise!("threshold", |c: &Ctx, x: Tensor, at: Scalar, value: Scalar| threshold(
        c,
        x,
        x,
        at,
        Some(value)
    ))
    .dtypes(domain::numbers)
    .check_numbers(|n| n.fits(1).and_then(|()| n.fits(2))),
    pointwise!("threshold_backward", |c: &Ctx, g: Tensor, x: Tensor, at: Scalar| threshold(
        c, g, x, at, None
    )),
];

fn conj(b: &Builder, x: Value) -> Value {
    if b.dtype(x).is_complex() { b.complex(b.real(x), b.negate(b.imag(x))) } else { x }
}

/// Two tensors of one shape, computed in opmath and rounded to their promoted dtype.
fn pair(c: &Ctx, x: Tensor, y: Tensor, f: impl FnOnce(&Builder, Value, Value) -> Value) -> Result<Value> {
    let dtype = c.result_type(&[x, y])?;
    let [a, b] = c.align([x.value, y.value], opmath(dtype))?;
    Ok(c.to(f(c, a, b), dtype))
}

/// One tensor in opmath, with numbers spread to its shape.
fn single<const N: usize>(
    c: &Ctx,
    x: Tensor,
    numbers: [Scalar; N],
    f: impl FnOnce(&Builder, Value, [Value; N]) -> Value,
) -> Value {
    let v = c.to(x.value, opmath(x.dtype));
    c.to(f(c, v, spread(c, v, numbers)), x.dtype)
}

/// Runtime numbers in the dtype and shape of `like`.
fn spread<const N: usize>(c: &Ctx, like: Value, numbers: [Scalar; N]) -> [Value; N] {
    let (dtype, shape) = (c.dtype(like), c.shape(like));
    numbers.map(|s| c.number_like(s, dtype, &shape))
}

fn constant(b: &Builder, like: Value, x: f64) -> Value {
    b.full_like(like, x)
}

/// `min(max(x + 3, 0), 6)`
fn relu6_plus_3(b: &Builder, x: Value) -> Value {
    let shifted = b.add(x, constant(b, x, 3.0));
    b.minimum(b.maximum(shifted, b.zeros_like(x)), constant(b, x, 6.0))
}

fn hardsigmoid_backward(c: &Ctx, g: Tensor, x: Tensor) -> Result<Value> {
    pair(c, g, x, |b, g, x| {
        let inside = b.and(b.gt(x, constant(b, x, -3.0)), b.lt(x, constant(b, x, 3.0)));
        b.select(inside, b.divide(g, constant(b, g, 6.0)), b.zeros_like(g))
    })
}

fn hardswish_backward(c: &Ctx, g: Tensor, x: Tensor) -> Result<Value> {
    pair(c, g, x, |b, g, x| {
        let three = constant(b, x, 3.0);
        let middle = b.multiply(g, b.add(b.divide(x, three), constant(b, x, 0.5)));
        let low = b.le(x, b.negate(three));
        b.select(low, b.zeros_like(g), b.select(b.lt(x, three), middle, g))
    })
}

fn hardtanh(c: &Ctx, x: Tensor, low: Scalar, high: Scalar) -> Result<Value> {
    Ok(single(c, x, [low, high], |b, x, [low, high]| b.minimum(b.maximum(x, low), high)))
}

fn hardtanh_backward(c: &Ctx, g: Tensor, x: Tensor, low: Scalar, high: Scalar) -> Result<Value> {
    pair(c, g, x, |b, g, x| {
        let [low, high] = spread(c, x, [low, high]);
        b.select(b.or(b.le(x, low), b.ge(x, high)), b.zeros_like(g), g)
    })
}

/// `v` where x is positive, `v * slope` elsewhere: the function (v = x) and its derivative (v = gradient).
fn leaky(c: &Ctx, v: Tensor, x: Tensor, slope: Scalar) -> Result<Value> {
    pair(c, v, x, |b, v, x| {
        let [slope] = spread(c, v, [slope]);
        b.select(b.gt(x, b.zeros_like(x)), v, b.multiply(v, slope))
    })
}

fn threshold(c: &Ctx, v: Tensor, x: Tensor, at: Scalar, value: Option<Scalar>) -> Result<Value> {
    let dtype = c.result_type(&[v, x])?;
    let [v, x] = c.align([v.value, x.value], dtype)?;
    let [at] = spread(c, x, [at]);
    let below = match value {
        Some(value) => spread(c, v, [value])[0],
        None => c.zeros_like(v),
    };
    Ok(c.select(c.le(x, at), below, v))
}

fn celu(c: &Ctx, x: Tensor, alpha: Scalar) -> Value {
    single(c, x, [alpha], |b, x, [alpha]| {
        let below = b.multiply(b.exponential_minus_one(b.divide(x, alpha)), alpha);
        b.select(b.gt(x, b.zeros_like(x)), x, below)
    })
}

fn elu(c: &Ctx, x: Tensor, alpha: Scalar, scale: Scalar, input_scale: Scalar) -> Value {
    single(c, x, [alpha, scale, input_scale], |b, x, [alpha, scale, input_scale]| {
        let below = b.multiply(b.exponential_minus_one(b.multiply(x, input_scale)), b.multiply(alpha, scale));
        b.select(b.lt(x, b.zeros_like(x)), below, b.multiply(x, scale))
    })
}

fn elu_backward(
    c: &Ctx,
    g: Tensor,
    alpha: Scalar,
    scale: Scalar,
    input_scale: Scalar,
    is_result: bool,
    x: Tensor,
) -> Result<Value> {
    pair(c, g, x, |b, g, x| {
        let [alpha, scale, input_scale] = spread(c, x, [alpha, scale, input_scale]);
        let coefficient = b.multiply(alpha, scale);
        let below = match is_result {
            true => b.multiply(b.multiply(g, input_scale), b.add(x, coefficient)),
            false => b.multiply(
                b.multiply(g, b.multiply(input_scale, coefficient)),
                b.exponential(b.multiply(x, input_scale)),
            ),
        };
        b.select(b.le(x, b.zeros_like(x)), below, b.multiply(g, scale))
    })
}

/// Coefficients of the tanh approximation: sqrt(2 / pi) and the cubic term.
const GELU_BETA: f64 = SQRT_2 * FRAC_2_SQRT_PI * 0.5;
const GELU_KAPPA: f64 = 0.044715;

/// Whether `approximate` asks for the tanh form.
fn is_tanh(approximate: &str) -> Result<bool> {
    match approximate {
        "none" => Ok(false),
        "tanh" => Ok(true),
        _ => Err(runtime("approximate argument must be either none or tanh.")),
    }
}

/// `tanh(beta * (x + kappa * x^3))`
fn gelu_tanh(b: &Builder, x: Value) -> Value {
    let cube = b.multiply(b.multiply(x, x), x);
    let inner = b.add(x, b.multiply(constant(b, x, GELU_KAPPA), cube));
    b.tanh(b.multiply(constant(b, x, GELU_BETA), inner))
}

/// The normal distribution's cumulative density.
pub(super) fn normal_cdf(b: &Builder, x: Value) -> Value {
    let erf = b.erf(b.multiply(x, constant(b, x, FRAC_1_SQRT_2)));
    b.multiply(constant(b, x, 0.5), b.add(constant(b, x, 1.0), erf))
}

fn gelu(c: &Ctx, x: Tensor, approximate: String) -> Result<Value> {
    let tanh = is_tanh(&approximate)?;
    Ok(single(c, x, [], |b, x, []| match tanh {
        true => b.multiply(b.multiply(constant(b, x, 0.5), x), b.add(constant(b, x, 1.0), gelu_tanh(b, x))),
        false => b.multiply(x, normal_cdf(b, x)),
    }))
}

fn gelu_backward(c: &Ctx, g: Tensor, x: Tensor, approximate: String) -> Result<Value> {
    let tanh = is_tanh(&approximate)?;
    pair(c, g, x, |b, g, x| {
        let (half, one) = (constant(b, x, 0.5), constant(b, x, 1.0));
        let square = b.multiply(x, x);
        if !tanh {
            let pdf = b.exponential(b.multiply(constant(b, x, -0.5), square));
            let pdf = b.multiply(pdf, constant(b, x, 1.0 / (2.0 * PI).sqrt()));
            return b.multiply(g, b.add(normal_cdf(b, x), b.multiply(x, pdf)));
        }
        let t = gelu_tanh(b, x);
        let inner = b.add(one, b.multiply(constant(b, x, 3.0 * GELU_KAPPA), square));
        let inner = b.multiply(constant(b, x, GELU_BETA), inner);
        let right = b.multiply(b.multiply(b.multiply(half, x), b.subtract(one, b.multiply(t, t))), inner);
        b.multiply(g, b.add(b.multiply(half, b.add(one, t)), right))
    })
}

/// The two halves of a tensor along a dimension.
fn halves(c: &Ctx, x: Value, dim: i64) -> Result<(Value, Value, i64)> {
    let rank = c.rank(x);
    if rank == 0 {
        return Err(runtime("glu does not support 0-dimensional tensors"));
    }
    let dim = c.dim(dim, rank)?;
    let size = c.shape(x)[dim];
    if size % 2 != 0 {
        return Err(runtime(format!("Halving dimension must be even, but dimension {dim} is size {size}")));
    }
    let dim = dim as i64;
    Ok((c.slice_dim(x, dim, 0, size / 2, 1), c.slice_dim(x, dim, size / 2, size, 1), dim))
}

fn glu(c: &Ctx, x: Tensor, dim: i64) -> Result<Value> {
    let (a, b, _) = halves(c, c.to(x.value, opmath(x.dtype)), dim)?;
    Ok(c.to(c.multiply(a, c.logistic(b)), x.dtype))
}

/// `1 - x`
fn one_minus(b: &Builder, x: Value) -> Value {
    b.subtract(constant(b, x, 1.0), x)
}

fn glu_backward(c: &Ctx, g: Tensor, x: Tensor, dim: i64) -> Result<Value> {
    let high = opmath(x.dtype);
    let g = c.to(g.value, high);
    let (a, b, dim) = halves(c, c.to(x.value, high), dim)?;
    let s = c.logistic(b);
    let ga = c.multiply(g, s);
    let gb = c.multiply(c.multiply(ga, one_minus(c, s)), a);
    Ok(c.to(c.concatenate(&[ga, gb], dim), x.dtype))
}

fn glu_jvp(c: &Ctx, y: Tensor, x: Tensor, dx: Tensor, dim: i64) -> Result<Value> {
    let high = opmath(x.dtype);
    let (_, b, _) = halves(c, c.to(x.value, high), dim)?;
    let (da, db, _) = halves(c, c.to(dx.value, high), dim)?;
    let s = c.logistic(b);
    let from_gate = c.multiply(c.to(y.value, high), c.multiply(db, one_minus(c, s)));
    Ok(c.to(c.add(c.multiply(da, s), from_gate), x.dtype))
}

fn glu_backward_jvp(
    c: &Ctx,
    _grad_x: Tensor,
    grad_glu: Tensor,
    x: Tensor,
    dgrad_glu: Tensor,
    dx: Tensor,
    dim: i64,
) -> Result<Value> {
    let high = opmath(x.dtype);
    let (g, dg) = (c.to(grad_glu.value, high), c.to(dgrad_glu.value, high));
    let (a, b, dim) = halves(c, c.to(x.value, high), dim)?;
    let (da, db, _) = halves(c, c.to(dx.value, high), dim)?;
    let s = c.logistic(b);
    let slope = c.multiply(s, one_minus(c, s));
    let ds = c.multiply(slope, db);
    let dga = c.add(c.multiply(dg, s), c.multiply(g, ds));
    // d(g a s(1-s)) = dg a s(1-s) + g (da s(1-s) + a (1-2s) ds)
    let bend = c.multiply(one_minus(c, c.add(s, s)), ds);
    let inner = c.add(c.multiply(da, slope), c.multiply(a, bend));
    let dgb = c.add(c.multiply(c.multiply(dg, a), slope), c.multiply(g, inner));
    Ok(c.to(c.concatenate(&[dga, dgb], dim), x.dtype))
}

/// Whether `-lambda <= x <= lambda`.
fn inside(b: &Builder, x: Value, lambda: Value) -> Value {
    b.and(b.ge(x, b.negate(lambda)), b.le(x, lambda))
}

fn hardshrink(c: &Ctx, x: Tensor, lambda: Scalar) -> Value {
    single(c, x, [lambda], |b, x, [l]| b.select(inside(b, x, l), b.zeros_like(x), x))
}

fn check_lambda(n: &Numbers) -> Result<()> {
    let (Some(lambda), Some(dtype)) = (n.f64(1), n.dtype) else { return Ok(()) };
    let last = finite_max(dtype);
    if (0.0..=last).contains(&lambda) {
        return Ok(());
    }
    let (name, last, lambda) = (scalar_name(dtype), show(last), show(lambda));
    Err(runtime(format!("lambda must be in range [0, {last}] for input dtype {name}, but found {lambda}")))
}

fn softshrink(c: &Ctx, x: Tensor, lambda: Scalar) -> Value {
    single(c, x, [lambda], |b, x, [l]| {
        // x * 0 keeps NaN.
        let flat = b.multiply(x, b.zeros_like(x));
        b.select(b.gt(x, l), b.subtract(x, l), b.select(b.lt(x, b.negate(l)), b.add(x, l), flat))
    })
}

fn shrink_backward(c: &Ctx, g: Tensor, x: Tensor, lambda: Scalar) -> Result<Value> {
    pair(c, g, x, |b, g, x| {
        let [l] = spread(c, x, [lambda]);
        b.select(inside(b, x, l), b.zeros_like(g), g)
    })
}

/// `exp(-|x|)`
fn exp_neg_abs(b: &Builder, x: Value) -> Value {
    b.exponential(b.negate(b.abs(x)))
}

/// The second result is a buffer for the CPU's derivative, which this backend recomputes. It has no element where it can,
/// and the rank of `x`, as on the CPU: `vmap` gives the derivative the rank of all that it takes.
fn log_sigmoid(c: &Ctx, x: Tensor) -> (Value, Value) {
    let y = single(c, x, [], |b, x, []| {
        b.subtract(b.minimum(x, b.zeros_like(x)), b.log_plus_one(exp_neg_abs(b, x)))
    });
    (y, c.full(c.scalar_f64(x.dtype, 0.0), &vec![0; x.rank]))
}

fn log_sigmoid_backward(c: &Ctx, g: Tensor, x: Tensor) -> Result<Value> {
    pair(c, g, x, |b, g, x| {
        let (zero, one) = (b.zeros_like(x), constant(b, x, 1.0));
        let z = exp_neg_abs(b, x);
        let q = b.divide(z, b.add(one, z));
        b.multiply(g, b.select(b.lt(x, zero), b.subtract(one, q), q))
    })
}

fn logit_backward(c: &Ctx, g: Tensor, x: Tensor, eps: Option<Scalar>) -> Result<Value> {
    pair(c, g, x, |b, g, x| {
        let (zero, one) = (b.zeros_like(x), constant(b, x, 1.0));
        let slope = b.divide(g, b.multiply(x, b.subtract(one, x)));
        let ends = b.or(b.eq(x, zero), b.eq(x, one));
        let slope = b.select(ends, b.multiply(g, constant(b, g, f64::INFINITY)), slope);
        let outside = |low, high| b.or(b.lt(x, low), b.gt(x, high));
        let bare = b.select(outside(zero, one), constant(b, x, f64::NAN), slope);
        let Some(eps) = eps else { return bare };
        let [low] = spread(c, x, [eps]);
        let clamped = b.select(outside(low, b.subtract(one, low)), zero, slope);
        b.select(b.lt(low, zero), bare, clamped)
    })
}

fn silu_backward(c: &Ctx, g: Tensor, x: Tensor) -> Result<Value> {
    pair(c, g, x, |b, g, x| {
        let s = b.logistic(x);
        let one = constant(b, x, 1.0);
        b.multiply(b.multiply(g, s), b.add(one, b.multiply(x, b.subtract(one, s))))
    })
}

fn softplus(c: &Ctx, x: Tensor, beta: Scalar, threshold: Scalar) -> Value {
    single(c, x, [beta, threshold], |b, x, [beta, threshold]| {
        let z = b.multiply(x, beta);
        b.select(b.gt(z, threshold), x, b.divide(b.log_plus_one(b.exponential(z)), beta))
    })
}

fn softplus_backward(c: &Ctx, g: Tensor, x: Tensor, beta: Scalar, threshold: Scalar) -> Result<Value> {
    pair(c, g, x, |b, g, x| {
        let [beta, threshold] = spread(c, x, [beta, threshold]);
        let z = b.multiply(x, beta);
        let e = b.exponential(z);
        let slope = b.divide(b.multiply(g, e), b.add(e, constant(b, e, 1.0)));
        b.select(b.gt(z, threshold), g, slope)
    })
}

fn prelu(c: &Ctx, x: Tensor, weight: Tensor) -> Result<Value> {
    pair(c, x, weight, |b, x, w| b.select(b.gt(x, b.zeros_like(x)), x, b.multiply(w, x)))
}

/// Gradients of the input and, not yet summed, of the weight.
fn prelu_backward(c: &Ctx, g: Tensor, x: Tensor, weight: Tensor) -> Result<(Value, Value)> {
    let dtype = c.result_type(&[g, x, weight])?;
    let [g, x, w] = c.align([g.value, x.value, weight.value], opmath(dtype))?;
    let zero = c.zeros_like(x);
    let positive = c.gt(x, zero);
    let gx = c.select(positive, g, c.multiply(w, g));
    let gw = c.select(positive, zero, c.multiply(x, g));
    Ok((c.to(gx, dtype), c.to(gw, dtype)))
}
