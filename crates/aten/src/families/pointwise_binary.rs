use super::pointwise_unary::trunc;
use crate::args::{Alpha, Exponent, NumKind, Number, Scalar, Tensor};
use crate::context::Ctx;
use crate::domain;
use crate::dtype::{Category, category, opmath};
use crate::error::{Error, ErrorKind, Result, not_implemented, runtime, unsupported};
use crate::library::Item;
use crate::numbers::Numbers;
use crate::out::OutDtype;
use crate::pointwise::binary as run_binary;
use crate::promote::Promote::{Float, Opmath, Same};
use crate::row::{Row, binary};
use crate::{op, pointwise};
use oxitorch_hlo::{Builder, DType, Value};
use std::f64::consts::LN_2;

/// The rows of this family.
pub static ROWS: &[Row] = &[
    pointwise!("add.Tensor", add),
    pointwise!("add.Scalar", |c: &Ctx, x: Tensor, y: Scalar, alpha: Alpha| add(c, x, y.tensor(), alpha)),
    pointwise!("sub.Tensor", sub),
    pointwise!("sub.Scalar", |c: &Ctx, x: Tensor, y: Scalar, alpha: Alpha| sub(c, x, y.tensor(), alpha)),
    pointwise!("rsub.Tensor", |c: &Ctx, x: Tensor, y: Tensor, alpha: Alpha| sub(c, y, x, alpha)),
    pointwise!("rsub.Scalar", |c: &Ctx, x: Tensor, y: Scalar, alpha: Alpha| sub(c, y.tensor(), x, alpha)),
    pointwise!("mul.Tensor", mul),
    pointwise!("mul.Scalar", |c: &Ctx, x: Tensor, y: Scalar| mul(c, x, y.tensor())),
    pointwise!("div.Tensor", div),
    pointwise!("div.Scalar", |c: &Ctx, x: Tensor, y: Scalar| div(c, x, y.tensor())),
    pointwise!("div.Tensor_mode", div_mode).check_numbers(refuse_zero_in_mode),
    pointwise!("div.Scalar_mode", |c: &Ctx, x: Tensor, y: Scalar, mode: Option<String>| {
        div_mode(c, x, y.tensor(), mode)
    })
    .check_numbers(refuse_zero_in_mode),
    pointwise!("floor_divide", |c: &Ctx, x: Tensor, y: Tensor| div_mode(c, x, y, Some("floor".into())))
        .check_numbers(refuse_zero),
    pointwise!("floor_divide.Scalar", |c: &Ctx, x: Tensor, y: Scalar| {
        div_mode(c, x, y.tensor(), Some("floor".into()))
    })
    .check_numbers(refuse_zero),
    pointwise!("remainder.Tensor", remainder).check_numbers(refuse_zero),
    pointwise!("remainder.Scalar", |c: &Ctx, x: Tensor, y: Scalar| remainder(c, x, y.tensor()))
        .check_numbers(refuse_zero),
    pointwise!("remainder.Scalar_Tensor", |c: &Ctx, x: Scalar, y: Tensor| remainder(c, x.tensor(), y))
        .check_numbers(refuse_zero),
    pointwise!("fmod.Tensor", fmod).check_numbers(refuse_zero),
    pointwise!("fmod.Scalar", |c: &Ctx, x: Tensor, y: Scalar| fmod(c, x, y.tensor()))
        .check_numbers(refuse_zero),
    pointwise!("pow.Tensor_Tensor", pow).dtypes(domain::no_bool),
    pointwise!("pow.Tensor_Scalar", pow_scalar).check_numbers(check_power),
    op!("pow.Scalar", |c: &Ctx, x: Scalar, y: Tensor| pow(c, x.tensor(), y)),
    binary("atan2", Float, Builder::atan2).dtypes(domain::ordered).library("atan2.out"),
    binary("copysign.Tensor", Float, copysign).dtypes(domain::ordered),
    binary("fmax", Same, |b, x, y| ignoring_nan(b, x, y, Builder::maximum)).dtypes(domain::comparable),
    binary("fmin", Same, |b, x, y| ignoring_nan(b, x, y, Builder::minimum)).dtypes(domain::comparable),
    binary("gcd", Same, gcd).dtypes(domain::integers),
    binary("lcm", Same, lcm).dtypes(domain::integers),
    pointwise!("heaviside", heaviside).out_dtype(OutDtype::Same),
    binary("hypot", Opmath, hypot).dtypes(domain::ordered),
    pointwise!("logaddexp", |c: &Ctx, x: Tensor, y: Tensor| {
        log_sum(c, "logaddexp_cpu", x, y, |b, x, y| log_add(b, x, y, 1.0))
    }),
    pointwise!("logaddexp2", |c: &Ctx, x: Tensor, y: Tensor| {
        log_sum(c, "logaddexp2_cpu", x, y, |b, x, y| log_add(b, x, y, LN_2))
    }),
    binary("maximum", Same, Builder::maximum).dtypes(domain::comparable),
    binary("minimum", Same, Builder::minimum).dtypes(domain::comparable),
    binary("nextafter", Same, Builder::next_after),
    binary("special_xlog1py", Float, |b, x, y| x_log(b, x, y, Builder::log_plus_one)),
    binary("special_zeta", Float, zeta),
    binary("xlogy.Tensor", Float, |b, x, y| x_log(b, x, y, Builder::log)).dtypes(domain::ordered),
];

/// What `at::native::alpha_check` and `check_addr_scalar` have in common.
pub(super) fn check_factor(dtype: DType, name: &str, factor: Alpha) -> Result<()> {
    let Alpha::Times(s) = factor else { return Ok(()) };
    if s.kind == NumKind::Bool && dtype != DType::Pred {
        return Err(runtime(format!("Boolean {name} only supported for Boolean results.")));
    }
    if matches!(s.kind, NumKind::Float | NumKind::Complex) && category(dtype) <= Category::Int {
        let text =
            format!("For integral input tensors, argument {name} must not be a floating point number.");
        return Err(runtime(text));
    }
    Ok(())
}

/// The same for sums, which also refuse a complex factor of real tensors.
fn check_alpha(dtype: DType, alpha: Alpha) -> Result<()> {
    check_factor(dtype, "alpha", alpha)?;
    match alpha {
        Alpha::Times(s) if s.kind == NumKind::Complex && category(dtype) <= Category::Float => {
            Err(runtime("For non-complex input tensors, argument alpha must not be a complex number."))
        }
        _ => Ok(()),
    }
}

/// `x + alpha * y` with the product kept in opmath, `alpha` rounded to the result's dtype.
fn scaled(
    c: &Ctx,
    x: Tensor,
    y: Tensor,
    alpha: Alpha,
    f: fn(&Builder, Value, Value) -> Value,
) -> Result<Value> {
    let dtype = c.result_type(&[x, y])?;
    check_alpha(dtype, alpha)?;
    let [a, b] = c.align([x.value, y.value], dtype)?;
    let Alpha::Times(s) = alpha else { return Ok(f(c, a, b)) };
    let high = opmath(dtype);
    let factor = c.full(c.to(c.number(s, dtype), high), &c.shape(b));
    let product = multiply(c, c.to(b, high), factor);
    Ok(c.to(f(c, c.to(a, high), product), dtype))
}

/// A product that is `and` for bool, as every integer product modulo 2.
fn multiply(b: &Builder, x: Value, y: Value) -> Value {
    if b.dtype(x) == DType::Pred { b.and(x, y) } else { b.multiply(x, y) }
}

fn plus(b: &Builder, x: Value, y: Value) -> Value {
    if b.dtype(x) == DType::Pred { b.or(x, y) } else { b.add(x, y) }
}

fn add(c: &Ctx, x: Tensor, y: Tensor, alpha: Alpha) -> Result<Value> {
    scaled(c, x, y, alpha, plus)
}

fn sub(c: &Ctx, x: Tensor, y: Tensor, alpha: Alpha) -> Result<Value> {
    match (x.dtype, y.dtype) {
        (DType::Pred, DType::Pred) => Err(Error::NotImplemented(
            "Subtraction, the `-` operator, with two bool tensors is not supported. \
             Use the `^` or `logical_xor()` operator instead."
                .into(),
        )),
        (DType::Pred, _) | (_, DType::Pred) => Err(Error::NotImplemented(
            "Subtraction, the `-` operator, with a bool tensor is not supported. \
             If you are trying to invert a mask, use the `~` or `logical_not()` operator instead."
                .into(),
        )),
        _ => scaled(c, x, y, alpha, Builder::subtract),
    }
}

/// Aligns in the dtype, except that a 0-d second operand of a reduced float op is read in opmath, as torch's CPU kernels do.
fn align_opmath(c: &Ctx, x: Tensor, y: Tensor, dtype: DType) -> Result<[Value; 2]> {
    let high = opmath(dtype);
    let round = |t: Tensor| if t.rank == 0 { c.to(t.value, high) } else { c.to(c.to(t.value, dtype), high) };
    c.align([round(x), round(y)], high)
}

fn mul(c: &Ctx, x: Tensor, y: Tensor) -> Result<Value> {
    let dtype = c.result_type(&[x, y])?;
    if x.rank > 0 && y.rank > 0 {
        let [a, b] = c.align([x.value, y.value], dtype)?;
        return Ok(multiply(c, a, b));
    }
    let [a, b] = align_opmath(c, x, y, dtype)?;
    Ok(c.to(multiply(c, a, b), dtype))
}

fn div(c: &Ctx, x: Tensor, y: Tensor) -> Result<Value> {
    let dtype = c.float_result_type(&[x, y])?;
    let [a, b] = align_opmath(c, x, y, dtype)?;
    Ok(c.to(c.divide(a, b), dtype))
}

fn div_mode(c: &Ctx, x: Tensor, y: Tensor, mode: Option<String>) -> Result<Value> {
    match mode.as_deref() {
        None => return div(c, x, y),
        Some("floor") => {}
        Some("trunc") => {
            check_zero(c, x, y)?;
            return div_trunc(c, x, y);
        }
        Some(other) => {
            return Err(runtime(format!(
                "div expected rounding_mode to be one of None, 'trunc', or 'floor' but found '{other}'"
            )));
        }
    }
    check_zero(c, x, y)?;
    let dtype = c.result_type(&[x, y])?;
    if dtype.is_float() {
        let [a, b] = c.align([x.value, y.value], opmath(dtype))?;
        if let Some(quotient) = c.call_pointwise("div.out_mode", &[a, b], &[Item::Str("floor")]) {
            return Ok(c.to(quotient, dtype));
        }
    }
    run_binary(c, Opmath, None, div_floor, x, y)
}

/// What PyTorch says about an integer divided by zero. Where only the device knows the divisor, and does not check it, the
/// quotient is -1 and the remainder the dividend.
const BY_ZERO: &str = "ZeroDivisionError";

fn check_zero(c: &Ctx, x: Tensor, y: Tensor) -> Result<()> {
    if category(c.result_type(&[x, y])?) == Category::Int {
        c.check(ErrorKind::Runtime, BY_ZERO, || c.all(c.ne(y.value, c.zeros_like(y.value))));
    }
    Ok(())
}

/// The same where the divisor is a number.
fn refuse_zero(n: &Numbers) -> Result<()> {
    let zero = match n.get(1) {
        // As a number of the tensor's dtype.
        Some(Number::Int(by)) => n.dtype.is_some_and(|d| {
            category(d) == Category::Bool && by == 0 || category(d) == Category::Int && is_zero_in(by, d)
        }),
        Some(Number::Bool(false)) => n.dtype.is_some_and(|d| category(d) == Category::Int),
        _ => false,
    };
    if zero { Err(runtime(BY_ZERO)) } else { Ok(()) }
}

/// Whether a number is 0 in the bits that an integer dtype has.
fn is_zero_in(x: i64, dtype: DType) -> bool {
    x << (64 - 8 * dtype.size_bytes()) == 0
}

/// An exponent is a number of the base's dtype, where both are whole numbers.
fn check_power(n: &Numbers) -> Result<()> {
    let (Some(Number::Int(exponent)), Some(dtype)) = (n.get(1), n.dtype) else { return Ok(()) };
    match category(dtype) {
        Category::Bool | Category::Int if exponent < 0 => Err(runtime(NEGATIVE_POWER)),
        Category::Int => n.fits(1),
        _ => Ok(()),
    }
}

fn refuse_zero_in_mode(n: &Numbers) -> Result<()> {
    if n.text.is_some() { refuse_zero(n) } else { Ok(()) }
}

/// The quotient of reduced floats is rounded before it is truncated, except by a 0-d divisor, as in torch's CPU kernels.
fn div_trunc(c: &Ctx, x: Tensor, y: Tensor) -> Result<Value> {
    let dtype = c.result_type(&[x, y])?;
    let [a, b] = c.align([x.value, y.value], dtype)?;
    let high = opmath(dtype);
    let quotient = c.divide(c.to(a, high), c.to(b, high));
    if !dtype.is_float() {
        return Ok(quotient);
    }
    let quotient = if y.rank > 0 { c.to(c.to(quotient, dtype), high) } else { quotient };
    Ok(c.to(trunc(c, quotient), dtype))
}

/// Whether two numbers have opposite signs, zero counting as positive.
fn signs_differ(b: &Builder, x: Value, y: Value) -> Value {
    let zero = b.zeros_like(x);
    b.xor(b.lt(x, zero), b.lt(y, zero))
}

fn div_floor(b: &Builder, x: Value, y: Value) -> Value {
    let zero = b.zeros_like(x);
    let one = b.full_like(x, 1.0);
    let rem = b.remainder(x, y);
    let off = b.and(b.ne(rem, zero), signs_differ(b, rem, y));
    if !b.dtype(x).is_float() {
        let q = b.divide(x, y);
        let off = b.and(off, b.ne(y, zero));
        return b.select(off, b.subtract(q, one), q);
    }
    // c10::div_floor_floating: exact where floor(x / y) would round up.
    let q = b.divide(b.subtract(x, rem), y);
    let q = b.select(off, b.subtract(q, one), q);
    let low = b.floor(q);
    let up = b.gt(b.subtract(q, low), b.full_like(x, 0.5));
    let rounded = b.select(up, b.add(low, one), low);
    let plain = b.divide(x, y);
    let at_zero = copysign(b, zero, plain);
    let floored = b.select(b.eq(q, zero), at_zero, rounded);
    b.select(b.eq(y, zero), plain, floored)
}

fn remainder(c: &Ctx, x: Tensor, y: Tensor) -> Result<Value> {
    remainder_with(c, x, y, |b, rem, y| {
        let off = b.and(b.ne(rem, b.zeros_like(rem)), signs_differ(b, rem, y));
        b.select(off, b.add(rem, y), rem)
    })
}

fn fmod(c: &Ctx, x: Tensor, y: Tensor) -> Result<Value> {
    remainder_with(c, x, y, |_, rem, _| rem)
}

/// What `f` makes of the remainder with the sign of `x`, and of `y`.
fn remainder_with(c: &Ctx, x: Tensor, y: Tensor, f: fn(&Builder, Value, Value) -> Value) -> Result<Value> {
    check_zero(c, x, y)?;
    let dtype = c.result_type(&[x, y])?;
    let [a, b] = c.align([x.value, y.value], opmath(dtype))?;
    let rem = library_remainder(c, a, b).unwrap_or_else(|| c.remainder(a, b));
    Ok(c.to(f(c, rem, b), dtype))
}

/// PyTorch's kernel. Its vector code loses remainders of quotients that overflow.
fn library_remainder(c: &Ctx, a: Value, b: Value) -> Option<Value> {
    let rem = c.call_pointwise("fmod.Tensor_out", &[a, b], &[])?;
    let is_known = c.and(c.is_finite(a), c.and(c.ne(b, c.zeros_like(b)), c.not(c.is_nan(b))));
    let lost = c.any(c.and(c.is_nan(rem), is_known));
    c.if_(lost, |_| vec![c.remainder(a, b)], |_| vec![rem]).first().copied()
}

/// `|x|` with the sign bit of `y`.
pub(crate) fn copysign(b: &Builder, x: Value, y: Value) -> Value {
    let bits = match b.dtype(y).size_bytes() {
        2 => DType::S16,
        4 => DType::S32,
        _ => DType::S64,
    };
    let y = b.bitcast_convert(y, bits);
    let size = b.abs(x);
    b.select(b.lt(y, b.zeros_like(y)), b.negate(size), size)
}

/// fmax and fmin: a NaN loses against a number.
fn ignoring_nan(b: &Builder, x: Value, y: Value, f: fn(&Builder, Value, Value) -> Value) -> Value {
    if !b.dtype(x).is_float() {
        return f(b, x, y);
    }
    b.select(b.is_nan(x), y, b.select(b.is_nan(y), x, f(b, x, y)))
}

fn heaviside(c: &Ctx, x: Tensor, values: Tensor) -> Result<Value> {
    if x.dtype.is_complex() || values.dtype.is_complex() {
        return Err(Error::NotImplemented("heaviside is not yet implemented for complex tensors.".into()));
    }
    if x.dtype != values.dtype {
        return Err(runtime("heaviside is not yet implemented for tensors with different dtypes."));
    }
    let [x, v] = c.align([x.value, values.value], x.dtype)?;
    let zero = c.zeros_like(x);
    let step = c.to(c.gt(x, zero), c.dtype(x));
    Ok(c.select(c.eq(x, zero), v, step))
}

/// Scaled by the larger side, so that squares do not overflow; infinite if either side is, even beside a NaN.
fn hypot(b: &Builder, x: Value, y: Value) -> Value {
    let (x, y) = (b.abs(x), b.abs(y));
    let (high, low) = (b.maximum(x, y), b.minimum(x, y));
    let zero = b.zeros_like(high);
    let one = b.full_like(high, 1.0);
    let inf = b.full_like(high, f64::INFINITY);
    let ratio = b.divide(low, b.select(b.eq(high, zero), one, high));
    let y2 = b.multiply(high, b.sqrt(b.add(one, b.multiply(ratio, ratio))));
    let infinite = b.or(b.eq(x, inf), b.eq(y, inf));
    b.select(infinite, inf, y2)
}

/// Floats only, as torch has it; complex numbers are not written yet.
fn log_sum(
    c: &Ctx,
    kernel: &str,
    x: Tensor,
    y: Tensor,
    f: fn(&Builder, Value, Value) -> Value,
) -> Result<Value> {
    match category(c.result_type(&[x, y])?) {
        Category::Float => run_binary(c, Opmath, None, f, x, y),
        Category::Complex => Err(unsupported(format!("{} of complex numbers", c.op))),
        _ => Err(not_implemented(kernel, c.result_type(&[x, y])?)),
    }
}

/// `log(e^x + e^y)` in the base whose logarithm is `ln`.
fn log_add(b: &Builder, x: Value, y: Value, ln: f64) -> Value {
    let ln = b.full_like(x, ln);
    let high = b.maximum(x, y);
    let gap = b.negate(b.abs(b.subtract(x, y)));
    let tail = b.divide(b.log_plus_one(b.exponential(b.multiply(gap, ln))), ln);
    let inf = b.full_like(x, f64::INFINITY);
    let same = b.and(b.eq(x, y), b.eq(b.abs(x), inf));
    b.select(same, x, b.add(high, tail))
}

/// `x * f(y)`, 0 where x is 0, NaN where y is.
fn x_log(b: &Builder, x: Value, y: Value, f: fn(&Builder, Value) -> Value) -> Value {
    let zero = b.zeros_like(x);
    let product = b.select(b.eq(x, zero), zero, b.multiply(x, f(b, y)));
    b.select(b.is_nan(y), y, product)
}

/// Hurwitz's zeta function; infinite at q = 0, -1, .., NaN for x below 1.
fn zeta(b: &Builder, x: Value, q: Value) -> Value {
    let (zero, one) = (b.zeros_like(x), b.full_like(x, 1.0));
    // The terms with a negative base are those from 1 - (q's fraction) up to -q, with the sign of (-1)^x.
    let below = b.lt(q, zero);
    let opposite = b.negate(q);
    let fraction = |q: Value| b.subtract(q, b.floor(q));
    // All at once: the function is long, and compilers take their time for each.
    let starts = [
        b.select(below, fraction(q), q),
        b.select(below, fraction(opposite), one),
        b.select(below, b.add(opposite, one), one),
    ];
    let many = b.concatenate(&starts.map(|q| b.unsqueeze(q, 0)), 0);
    let exponents = b.concatenate(&[b.unsqueeze(x, 0); 3], 0);
    let large = b.ge(exponents, b.full_like(exponents, 1000.0));
    let values = b.select(large, b.power(many, b.negate(exponents)), b.zeta(exponents, many));
    let [rest, first, after] = [0, 1, 2].map(|i| b.index_dim(values, 0, i));
    let terms = b.subtract(first, after);
    let half = b.multiply(x, b.full_like(x, 0.5));
    let terms = b.select(b.eq(half, b.floor(half)), terms, b.negate(terms));
    let whole = b.eq(x, b.floor(x));
    let y = b.select(whole, b.add(rest, terms), b.full_like(x, f64::NAN));
    let y = b.select(below, y, rest);
    let pole = b.and(b.le(q, zero), b.eq(q, b.floor(q)));
    let y = b.select(pole, b.full_like(x, f64::INFINITY), y);
    let y = b.select(b.eq(x, one), b.full_like(x, f64::INFINITY), y);
    b.select(b.lt(x, one), b.full_like(x, f64::NAN), y)
}

/// Euclid's algorithm on all elements at once. It comes to an end with integers only.
fn gcd(b: &Builder, x: Value, y: Value) -> Value {
    let size = |v| if b.dtype(v).is_signed() { b.abs(v) } else { v };
    let done = b.while_(
        &[size(x), size(y)],
        |b, s| {
            let dims: Vec<i64> = (0..b.rank(s[1]) as i64).collect();
            b.reduce_any(b.ne(s[1], b.zeros_like(s[1])), &dims)
        },
        |b, s| {
            let zero = b.zeros_like(s[1]);
            let over = b.eq(s[1], zero);
            let divisor = b.select(over, b.full_like(s[1], 1.0), s[1]);
            vec![b.select(over, s[0], s[1]), b.select(over, zero, b.remainder(s[0], divisor))]
        },
    );
    done[0]
}

fn lcm(b: &Builder, x: Value, y: Value) -> Value {
    let g = gcd(b, x, y);
    let zero = b.zeros_like(g);
    let none = b.eq(g, zero);
    let product = b.multiply(b.divide(x, b.select(none, b.full_like(g, 1.0), g)), y);
    let size = if b.dtype(product).is_signed() { b.abs(product) } else { product };
    b.select(none, zero, size)
}

fn pow(c: &Ctx, x: Tensor, y: Tensor) -> Result<Value> {
    let dtype = c.result_type(&[x, y])?;
    let [a, b] = c.align([x.value, y.value], dtype)?;
    if category(dtype) == Category::Int {
        if y.rank == 0 && y.wrapped {
            check_exponent(c, y.value);
        }
        return Ok(int_pow(c, a, b));
    }
    let high = opmath(dtype);
    let [wide, exponent] = [a, b].map(|v| c.to(v, high));
    let called = c.call_pointwise("pow.Tensor_Tensor_out", &[wide, exponent], &[]);
    let y = called.unwrap_or_else(|| c.power(wide, exponent));
    if !dtype.is_complex() {
        return Ok(c.to(y, dtype));
    }
    // XLA takes the logarithm of 0 here.
    let re = c.real(b);
    let vanishes = c.and(c.eq(a, c.zeros_like(a)), c.gt(re, c.zeros_like(re)));
    Ok(c.select(vanishes, c.zeros_like(y), y))
}

fn check_exponent(c: &Ctx, exponent: Value) {
    c.check(ErrorKind::Runtime, NEGATIVE_POWER, || c.all(c.ge(exponent, c.zeros_like(exponent))));
}

const NEGATIVE_POWER: &str = "Integers to negative integer powers are not allowed.";

/// A negative exponent gives 1 for 1, an alternating 1 for -1, and 0 for everything else.
fn int_pow(c: &Ctx, x: Value, y: Value) -> Value {
    if !c.dtype(x).is_signed() {
        return natural_pow(c, x, y);
    }
    let (zero, one) = (c.zeros_like(x), c.like(x, 1.0));
    let minus = c.like(x, -1.0);
    let odd = c.eq(c.and(y, one), one);
    let of_minus = c.select(odd, minus, one);
    let small = c.select(c.eq(x, minus), of_minus, zero);
    let small = c.select(c.eq(x, one), one, small);
    let negative = c.lt(y, zero);
    c.select(negative, small, natural_pow(c, x, c.select(negative, zero, y)))
}

/// The power of integers with exponents from 0 on, modulo the dtype's range. XLA looks at six bits of an exponent.
fn natural_pow(b: &Builder, x: Value, y: Value) -> Value {
    let large = b.gt(y, b.full_like(y, 63.0));
    let dims: Vec<i64> = (0..b.rank(y) as i64).collect();
    let any = b.reduce_any(large, &dims);
    b.if_(any, |b| vec![power_by_squares(b, x, y)], |b| vec![b.power(x, y)])[0]
}

/// As many rounds as the largest exponent has bits.
fn power_by_squares(b: &Builder, x: Value, y: Value) -> Value {
    let one = b.ones_like(x);
    let done = b.while_(
        &[one, x, y],
        |b, s| {
            let dims: Vec<i64> = (0..b.rank(s[2]) as i64).collect();
            b.reduce_any(b.ne(s[2], b.zeros_like(s[2])), &dims)
        },
        |b, s| {
            let odd = b.eq(b.and(s[2], one), one);
            let power = b.select(odd, b.multiply(s[0], s[1]), s[0]);
            vec![power, b.multiply(s[1], s[1]), b.shift_right_logical(s[2], one)]
        },
    );
    done[0]
}

fn pow_scalar(c: &Ctx, x: Tensor, exponent: Exponent) -> Result<Value> {
    let (n, kind) = match exponent {
        Exponent::Scalar(s) => return pow(c, x, s.tensor()),
        Exponent::Int(n) => (n as f64, DType::S64),
        Exponent::Float(n) => (n, DType::F64),
    };
    let number = Tensor { dtype: kind, rank: 0, wrapped: true, value: x.value };
    let dtype = c.result_type(&[x, number])?;
    if category(dtype) <= Category::Int && n < 0.0 {
        return Err(runtime(NEGATIVE_POWER));
    }
    let v = c.to(x.value, dtype);
    Ok(c.in_opmath(v, |v| constant_pow(c, v, n)))
}

/// A power with a simple exponent, as products, square roots and reciprocals.
fn constant_pow(b: &Builder, x: Value, n: f64) -> Value {
    let one = b.full_like(x, 1.0);
    let square = || multiply(b, x, x);
    match n {
        0.0 => one,
        1.0 => x,
        2.0 => square(),
        3.0 => multiply(b, square(), x),
        4.0 => {
            let s = square();
            multiply(b, s, s)
        }
        0.5 => b.sqrt(x),
        -0.5 => b.rsqrt(x),
        -1.0 => b.divide(one, x),
        -2.0 => b.divide(one, square()),
        _ => b.power(x, b.full_like(x, n)),
    }
}
