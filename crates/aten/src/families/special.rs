use super::cephes::*;
use crate::args::Tensor;
use crate::context::Ctx;
use crate::domain;
use crate::dtype::{Category, category, opmath};
use crate::error::{Result, not_implemented, runtime, unsupported};
use crate::promote::Promote::Float;
use crate::row::{Row, binary, unary};
use crate::{op, pointwise};
use oxitorch_hlo::{Builder, DType, Value};
use std::f64::consts::{FRAC_2_PI, FRAC_PI_4, PI};

/// The rows of this family.
pub static ROWS: &[Row] = &[
    pointwise!("frexp.Tensor", frexp),
    pointwise!("igamma", |c: &Ctx, a: Tensor, x: Tensor| incomplete_gamma(c, a, x, false)),
    pointwise!("igammac", |c: &Ctx, a: Tensor, x: Tensor| incomplete_gamma(c, a, x, true)),
    op!("mvlgamma", mvlgamma),
    unary("i0", Float, i0).dtypes(domain::ordered),
    unary("special_airy_ai", Float, airy_ai),
    unary("special_bessel_j0", Float, j0),
    unary("special_bessel_j1", Float, j1),
    unary("special_bessel_y0", Float, y0),
    unary("special_bessel_y1", Float, y1),
    unary("special_i0e", Float, |b, x| scaled_i(b, x, I0_A, I0_B)),
    unary("special_i1", Float, i1),
    unary("special_i1e", Float, |b, x| b.multiply(scaled_i1(b, x), b.sign(x))),
    unary("special_modified_bessel_i0", Float, i0),
    unary("special_modified_bessel_i1", Float, i1),
    unary("special_modified_bessel_k0", Float, |b, x| k0(b, x, false)),
    unary("special_modified_bessel_k1", Float, |b, x| k1(b, x, false)),
    unary("special_scaled_modified_bessel_k0", Float, |b, x| k0(b, x, true)),
    unary("special_scaled_modified_bessel_k1", Float, |b, x| k1(b, x, true)),
    unary("special_spherical_bessel_j0", Float, spherical_j0),
    unary("special_ndtri", Float, ndtri),
    binary("special_chebyshev_polynomial_t", Float, |b, x, n| chebyshev(b, Chebyshev::T, x, n)),
    binary("special_chebyshev_polynomial_u", Float, |b, x, n| chebyshev(b, Chebyshev::U, x, n)),
    binary("special_chebyshev_polynomial_v", Float, |b, x, n| chebyshev(b, Chebyshev::V, x, n)),
    binary("special_chebyshev_polynomial_w", Float, |b, x, n| chebyshev(b, Chebyshev::W, x, n)),
    binary("special_shifted_chebyshev_polynomial_t", Float, |b, x, n| {
        chebyshev(b, Chebyshev::T, shift(b, x), n)
    }),
    binary("special_shifted_chebyshev_polynomial_u", Float, |b, x, n| {
        chebyshev(b, Chebyshev::U, shift(b, x), n)
    }),
    binary("special_shifted_chebyshev_polynomial_v", Float, |b, x, n| {
        chebyshev(b, Chebyshev::V, shift(b, x), n)
    }),
    binary("special_shifted_chebyshev_polynomial_w", Float, |b, x, n| {
        chebyshev(b, Chebyshev::W, shift(b, x), n)
    }),
    binary("special_hermite_polynomial_h", Float, |b, x, n| {
        let double = b.add(x, x);
        // P(k+1) = 2x P(k) - 2k P(k-1)
        let p = recurrence(b, double, n, |b, k, p, q| {
            b.subtract(b.multiply(double, q), b.multiply(b.add(k, k), p))
        });
        hermite_limit(b, n, p)
    }),
    binary("special_hermite_polynomial_he", Float, |b, x, n| {
        let p = recurrence(b, x, n, |b, k, p, q| b.subtract(b.multiply(x, q), b.multiply(k, p)));
        hermite_limit(b, n, p)
    }),
    binary("special_laguerre_polynomial_l", Float, |b, x, n| {
        let first = b.subtract(c(b, x, 1.0), x);
        recurrence(b, first, n, |b, k, p, q| {
            let up = b.multiply(b.add(b.add(k, k), first), q);
            b.divide(b.subtract(up, b.multiply(k, p)), b.add(k, c(b, k, 1.0)))
        })
    }),
    binary("special_legendre_polynomial_p", Float, |b, x, n| {
        recurrence(b, x, n, |b, k, p, q| {
            let up = b.multiply(b.multiply(b.add(b.add(k, k), c(b, k, 1.0)), x), q);
            b.divide(b.subtract(up, b.multiply(k, p)), b.add(k, c(b, k, 1.0)))
        })
    }),
];

fn c(b: &Builder, like: Value, x: f64) -> Value {
    b.full_like(like, x)
}

/// A polynomial, highest power first.
fn polynomial(b: &Builder, x: Value, coefficients: &[f64]) -> Value {
    let mut y = c(b, x, coefficients[0]);
    for &a in &coefficients[1..] {
        y = b.add(b.multiply(y, x), c(b, x, a));
    }
    y
}

fn ratio(b: &Builder, x: Value, above: &[f64], below: &[f64]) -> Value {
    b.divide(polynomial(b, x, above), polynomial(b, x, below))
}

/// A Chebyshev series by Clenshaw's recurrence.
fn series(b: &Builder, x: Value, coefficients: &[f64]) -> Value {
    let mut before = b.zeros_like(x);
    let mut last = before;
    let mut y = c(b, x, coefficients[0]);
    for &a in &coefficients[1..] {
        before = last;
        last = y;
        y = b.add(b.subtract(b.multiply(x, last), before), c(b, x, a));
    }
    b.multiply(b.subtract(y, before), c(b, x, 0.5))
}

/// `e^-|x| I(x)`, without the sign and the factor of order 1.
fn scaled_i(b: &Builder, x: Value, near: &[f64], far: &[f64]) -> Value {
    let x = b.abs(x);
    let low = series(b, b.subtract(b.divide(x, c(b, x, 2.0)), c(b, x, 2.0)), near);
    let high = b.divide(series(b, b.subtract(b.divide(c(b, x, 32.0), x), c(b, x, 2.0)), far), b.sqrt(x));
    b.select(b.le(x, c(b, x, 8.0)), low, high)
}

fn i0(b: &Builder, x: Value) -> Value {
    b.multiply(b.exponential(b.abs(x)), scaled_i(b, x, I0_A, I0_B))
}

/// `e^-|x| |I1(x)|`
fn scaled_i1(b: &Builder, x: Value) -> Value {
    let x = b.abs(x);
    let low = series(b, b.subtract(b.divide(x, c(b, x, 2.0)), c(b, x, 2.0)), I1_A);
    let high = b.divide(series(b, b.subtract(b.divide(c(b, x, 32.0), x), c(b, x, 2.0)), I1_B), b.sqrt(x));
    b.select(b.le(x, c(b, x, 8.0)), b.multiply(low, x), high)
}

fn i1(b: &Builder, x: Value) -> Value {
    b.multiply(b.multiply(b.exponential(b.abs(x)), scaled_i1(b, x)), b.sign(x))
}

/// Infinite at 0, NaN below.
fn positive_only(b: &Builder, x: Value, at_zero: f64, y: Value) -> Value {
    let zero = b.zeros_like(x);
    let y = b.select(b.eq(x, zero), c(b, x, at_zero), y);
    b.select(b.lt(x, zero), c(b, x, f64::NAN), y)
}

/// `log(x / 2)`
fn log_half(b: &Builder, x: Value) -> Value {
    b.log(b.multiply(x, c(b, x, 0.5)))
}

/// The value near 0, and far out `series(8 / x - 2) / sqrt(x)`; with or without the factor `e^x`.
fn modified_k(b: &Builder, x: Value, near: Value, far: &[f64], scaled: bool) -> Value {
    let high = b.divide(series(b, b.subtract(b.divide(c(b, x, 8.0), x), c(b, x, 2.0)), far), b.sqrt(x));
    let e = b.exponential(if scaled { x } else { b.negate(x) });
    let (low, high) = if scaled { (b.multiply(near, e), high) } else { (near, b.multiply(high, e)) };
    positive_only(b, x, f64::INFINITY, b.select(b.le(x, c(b, x, 2.0)), low, high))
}

fn k0(b: &Builder, x: Value, scaled: bool) -> Value {
    let sum = series(b, b.subtract(b.multiply(x, x), c(b, x, 2.0)), K0_A);
    modified_k(b, x, b.subtract(sum, b.multiply(log_half(b, x), i0(b, x))), K0_B, scaled)
}

fn k1(b: &Builder, x: Value, scaled: bool) -> Value {
    let sum = b.divide(series(b, b.subtract(b.multiply(x, x), c(b, x, 2.0)), K1_A), x);
    modified_k(b, x, b.add(b.multiply(log_half(b, x), i1(b, x)), sum), K1_B, scaled)
}

/// The two series of the asymptotic form for `x > 5`, in `25 / x^2`: P and `5 / x` times Q.
fn far_parts(b: &Builder, x: Value, tables: [&[f64]; 4]) -> (Value, Value) {
    let by = b.divide(c(b, x, 5.0), x);
    let square = b.multiply(by, by);
    let [pp, pq, qp, qq] = tables;
    (ratio(b, square, pp, pq), b.multiply(by, ratio(b, square, qp, qq)))
}

/// `sqrt(2 / (pi x)) (p cos(x - shift) - q sin(x - shift))`, or the sine form of the second kind.
fn far(b: &Builder, x: Value, tables: [&[f64]; 4], shift: f64, second_kind: bool) -> Value {
    let (p, q) = far_parts(b, x, tables);
    let angle = b.subtract(x, c(b, x, shift));
    let (cos, sin) = (b.cosine(angle), b.sine(angle));
    let wave = match second_kind {
        true => b.add(b.multiply(p, sin), b.multiply(q, cos)),
        false => b.subtract(b.multiply(p, cos), b.multiply(q, sin)),
    };
    b.divide(b.multiply(wave, c(b, x, FRAC_2_PI.sqrt())), b.sqrt(x))
}

const J0_FAR: [&[f64]; 4] = [J0_PP, J0_PQ, J0_QP, J0_QQ];
const J1_FAR: [&[f64]; 4] = [J1_PP, J1_PQ, J1_QP, J1_QQ];

/// `z - root`, for the zeros that the near forms take out.
fn minus(b: &Builder, z: Value, root: f64) -> Value {
    b.subtract(z, c(b, z, root))
}

fn j0(b: &Builder, x: Value) -> Value {
    let x = b.abs(x);
    let z = b.multiply(x, x);
    let zeros = b.multiply(minus(b, z, 5.783_185_962_946_785), minus(b, z, 30.471_262_343_662_087));
    let near = b.multiply(zeros, ratio(b, z, J0_RP, J0_RQ));
    let tiny = b.subtract(c(b, x, 1.0), b.divide(z, c(b, x, 4.0)));
    let near = b.select(b.lt(x, c(b, x, 1e-5)), tiny, near);
    b.select(b.le(x, c(b, x, 5.0)), near, far(b, x, J0_FAR, FRAC_PI_4, false))
}

fn j1(b: &Builder, x: Value) -> Value {
    let size = b.abs(x);
    let z = b.multiply(x, x);
    let zeros = b.multiply(minus(b, z, 14.681_970_642_123_893), minus(b, z, 49.218_456_321_694_6));
    let near = b.multiply(b.multiply(ratio(b, z, J1_RP, J1_RQ), size), zeros);
    let y = b.select(b.le(size, c(b, x, 5.0)), near, far(b, size, J1_FAR, 3.0 * FRAC_PI_4, false));
    b.select(b.lt(x, b.zeros_like(x)), b.negate(y), y)
}

fn y0(b: &Builder, x: Value) -> Value {
    let z = b.multiply(x, x);
    let log = b.multiply(b.multiply(c(b, x, FRAC_2_PI), b.log(x)), j0(b, x));
    let near = b.add(ratio(b, z, Y0_YP, Y0_YQ), log);
    let y = b.select(b.le(x, c(b, x, 5.0)), near, far(b, x, J0_FAR, FRAC_PI_4, true));
    positive_only(b, x, f64::NEG_INFINITY, y)
}

fn y1(b: &Builder, x: Value) -> Value {
    let z = b.multiply(x, x);
    let log = b.subtract(b.multiply(j1(b, x), b.log(x)), b.divide(c(b, x, 1.0), x));
    let near = b.add(b.multiply(x, ratio(b, z, Y1_YP, Y1_YQ)), b.multiply(c(b, x, FRAC_2_PI), log));
    let y = b.select(b.le(x, c(b, x, 5.0)), near, far(b, x, J1_FAR, 3.0 * FRAC_PI_4, true));
    positive_only(b, x, f64::NEG_INFINITY, y)
}

/// `sin(x) / x`, by its Taylor series near 0, 0 at infinity.
fn spherical_j0(b: &Builder, x: Value) -> Value {
    let z = b.multiply(x, x);
    const TAYLOR: &[f64] = &[
        1.0 / 6_227_020_800.0,
        -1.0 / 39_916_800.0,
        1.0 / 362_880.0,
        -1.0 / 5_040.0,
        1.0 / 120.0,
        -1.0 / 6.0,
        1.0,
    ];
    let size = b.abs(x);
    let y = b.select(b.lt(size, c(b, x, 0.5)), polynomial(b, z, TAYLOR), b.divide(b.sine(x), x));
    b.select(b.eq(size, c(b, x, f64::INFINITY)), b.zeros_like(x), y)
}

/// The Airy function: power series in the middle, asymptotic forms outside.
fn airy_ai(b: &Builder, x: Value) -> Value {
    let middle = {
        // f and g of the two series; 2.09..8.3 needs them no more than the asymptotic form does, so 25 terms are plenty.
        let cube = b.multiply(b.multiply(x, x), x);
        let (mut f, mut g) = (c(b, x, 1.0), x);
        let (mut m, mut n) = (f, g);
        for i in 1..=25 {
            let k = 3.0 * f64::from(i);
            m = b.divide(b.multiply(m, cube), c(b, x, (k - 1.0) * k));
            n = b.divide(b.multiply(n, cube), c(b, x, k * (k + 1.0)));
            f = b.add(f, m);
            g = b.add(g, n);
        }
        b.subtract(
            b.multiply(c(b, x, 0.355_028_053_887_817_2), f),
            b.multiply(c(b, x, 0.258_819_403_792_806_8), g),
        )
    };
    let size = b.abs(x);
    let root = b.sqrt(size);
    let zeta = b.divide(b.multiply(b.multiply(size, root), c(b, x, 2.0)), c(b, x, 3.0));
    let fourth = b.divide(c(b, x, 1.0 / PI.sqrt()), b.sqrt(root));
    let z = b.divide(c(b, x, 1.0), zeta);

    let decay = b.multiply(b.multiply(fourth, c(b, x, 0.5)), b.exponential(b.negate(zeta)));
    let above = b.multiply(decay, ratio(b, z, AIRY_AN, AIRY_AD));

    let z2 = b.multiply(z, z);
    let angle = b.add(zeta, c(b, x, FRAC_PI_4));
    let sine = b.add(c(b, x, 1.0), b.multiply(z2, ratio(b, z2, AIRY_AFN, AIRY_AFD)));
    let cosine = b.multiply(z, ratio(b, z2, AIRY_AGN, AIRY_AGD));
    let wave = b.subtract(b.multiply(b.sine(angle), sine), b.multiply(b.cosine(angle), cosine));
    let below = b.multiply(fourth, wave);

    let y = b.select(b.ge(x, c(b, x, 2.09)), above, middle);
    let y = b.select(b.lt(x, c(b, x, -2.09)), below, y);
    let y = b.select(b.gt(x, c(b, x, 103.892)), b.zeros_like(x), y);
    b.select(b.eq(size, c(b, x, f64::INFINITY)), c(b, x, f64::NAN), y)
}

/// The normal distribution's quantile: rational around the middle, in `1 / sqrt(-2 log p)` in the tails.
fn ndtri(b: &Builder, p: Value) -> Value {
    let edge = (-2.0f64).exp();
    let one = c(b, p, 1.0);
    let upper = b.gt(p, c(b, p, 1.0 - edge));
    let y = b.select(upper, b.subtract(one, p), p);

    let v = b.subtract(y, c(b, p, 0.5));
    let v2 = b.multiply(v, v);
    let middle = b.add(v, b.multiply(v, b.multiply(v2, ratio(b, v2, NDTRI_P0, NDTRI_Q0))));
    let middle = b.multiply(middle, c(b, p, (2.0 * PI).sqrt()));

    let x = b.sqrt(b.multiply(c(b, p, -2.0), b.log(y)));
    let z = b.divide(one, x);
    let first = b.subtract(x, b.divide(b.log(x), x));
    let near = b.lt(x, c(b, p, 8.0));
    let second = b.select(near, ratio(b, z, NDTRI_P1, NDTRI_Q1), ratio(b, z, NDTRI_P2, NDTRI_Q2));
    let tail = b.subtract(first, b.multiply(z, second));
    let tail = b.select(upper, tail, b.negate(tail));

    let inside = b.select(b.gt(y, c(b, p, edge)), middle, tail);
    let inside = b.select(b.eq(p, b.zeros_like(p)), c(b, p, f64::NEG_INFINITY), inside);
    let inside = b.select(b.eq(p, one), c(b, p, f64::INFINITY), inside);
    let outside = b.or(b.lt(p, b.zeros_like(p)), b.gt(p, one));
    b.select(outside, c(b, p, f64::NAN), inside)
}

/// The degree as torch reads it: truncated, and negative (so the polynomial is 0) where it is no number.
fn degree(b: &Builder, n: Value) -> Value {
    b.select(b.is_finite(n), super::pointwise_unary::trunc(b, n), c(b, n, -1.0))
}

/// A three-term recurrence from 1 and `first` up to degree n, element by element; 0 for negative degrees.
/// `step` gives `P(k+1)` from k, `P(k-1)` and `P(k)`.
fn recurrence(
    b: &Builder,
    first: Value,
    n: Value,
    step: impl Fn(&Builder, Value, Value, Value) -> Value,
) -> Value {
    let n = degree(b, n);
    let one = c(b, first, 1.0);
    let open = |b: &Builder, k: Value, q: Value| {
        let k = b.full(k, &b.shape(q));
        b.and(b.lt(k, n), b.not(b.is_nan(q)))
    };
    let dims: Vec<i64> = (0..b.rank(first) as i64).collect();
    let k = b.scalar_f64(b.dtype(first), 1.0);
    let out = b.while_(
        &[k, one, first],
        |b, s| b.reduce_any(open(b, s[0], s[2]), &dims),
        |b, s| {
            let (k, p, q) = (s[0], s[1], s[2]);
            let active = open(b, k, q);
            let next = step(b, b.full(k, &b.shape(q)), p, q);
            let k = b.add(k, b.scalar_like(k, 1.0));
            vec![k, b.select(active, q, p), b.select(active, next, q)]
        },
    );
    let y = b.select(b.eq(n, b.zeros_like(n)), one, out[2]);
    b.select(b.lt(n, b.zeros_like(n)), b.zeros_like(y), y)
}

/// torch gives up above this degree.
fn hermite_limit(b: &Builder, n: Value, y: Value) -> Value {
    let limit = if b.dtype(n) == DType::F64 { 512.0 } else { 128.0 };
    b.select(b.gt(degree(b, n), c(b, n, limit)), c(b, y, f64::NAN), y)
}

#[derive(Clone, Copy)]
enum Chebyshev {
    T,
    U,
    V,
    W,
}

/// `2x - 1`
fn shift(b: &Builder, x: Value) -> Value {
    b.subtract(b.add(x, x), c(b, x, 1.0))
}

/// All four kinds share the recurrence `P(k+1) = 2x P(k) - P(k-1)`; large degrees inside (-1, 1) go by the angle.
fn chebyshev(b: &Builder, kind: Chebyshev, x: Value, n: Value) -> Value {
    let one = c(b, x, 1.0);
    let double = b.add(x, x);
    let first = match kind {
        Chebyshev::T => x,
        Chebyshev::U => double,
        Chebyshev::V => b.subtract(double, one),
        Chebyshev::W => b.add(double, one),
    };
    let whole = degree(b, n);
    let size = b.abs(x);
    let by_angle = b.and(b.gt(whole, c(b, n, 8.0)), b.lt(size, one));
    let at_end = b.eq(size, one);
    let short = b.select(b.or(by_angle, at_end), b.zeros_like(whole), whole);
    let walked = recurrence(b, first, short, |b, _, p, q| b.subtract(b.multiply(double, q), p));

    let angle = b.atan2(b.sqrt(b.subtract(one, b.multiply(x, x))), x);
    let half = c(b, x, 0.5);
    let times = |m: Value| b.multiply(m, angle);
    let (next, middle) = (b.add(whole, one), b.add(whole, half));
    let waved = match kind {
        Chebyshev::T => b.cosine(times(whole)),
        Chebyshev::U => b.divide(b.sine(times(next)), b.sine(angle)),
        Chebyshev::V => b.divide(b.cosine(times(middle)), b.cosine(times(half))),
        Chebyshev::W => b.divide(b.sine(times(middle)), b.sine(times(half))),
    };
    let y = b.select(by_angle, waved, walked);

    // At 1 and at -1, there with alternating sign.
    let twice = b.add(b.add(whole, whole), one);
    let (right, left) = match kind {
        Chebyshev::T => (one, one),
        Chebyshev::U => (next, next),
        Chebyshev::V => (one, twice),
        Chebyshev::W => (twice, one),
    };
    let even = b.eq(b.remainder(whole, c(b, n, 2.0)), b.zeros_like(whole));
    let left = b.select(even, left, b.negate(left));
    let end = b.select(b.gt(x, b.zeros_like(x)), right, left);
    let y = b.select(at_end, end, y);
    b.select(b.lt(whole, b.zeros_like(whole)), b.zeros_like(y), y)
}

/// Mantissa in [0.5, 1) and exponent; numbers without one keep their value and get 0.
fn frexp(c: &Ctx, x: Tensor) -> Result<(Value, Value)> {
    if !x.dtype.is_float() {
        return Err(runtime("torch.frexp() only supports floating-point dtypes"));
    }
    let (bits, digits, bias) =
        if x.dtype == DType::F64 { (DType::S64, 52, 1023) } else { (DType::S32, 23, 127) };
    let v = c.to(x.value, opmath(x.dtype));
    let shape = c.shape(v);
    let int = |i: i64| c.full(c.scalar_i64(bits, i), &shape);

    // All in integers: XLA may flush denormal numbers to zero in arithmetic.
    let pattern = c.bitcast_convert(v, bits);
    let field = i64::from(2 * bias + 1) << digits;
    let fraction = int((1 << digits) - 1);
    let raw = c.shift_right_logical(c.and(pattern, int(field)), int(digits.into()));
    let denormal = c.eq(raw, int(0));
    // A denormal number is moved up until its highest bit is the hidden one.
    let zeros = c.count_leading_zeros(c.and(pattern, fraction));
    let shift = c.subtract(zeros, int(i64::from(bits.bits()) - 1 - i64::from(digits)));
    let moved = c.shift_left(pattern, c.select(denormal, shift, int(0)));
    let exponent = c.select(denormal, c.subtract(int(1), shift), raw);
    let exponent = c.subtract(exponent, int((bias - 1).into()));
    let sign = c.and(pattern, int(i64::MIN >> (64 - bits.bits())));
    let half = c.or(c.and(moved, fraction), int(i64::from(bias - 1) << digits));
    let mantissa = c.bitcast_convert(c.or(sign, half), c.dtype(v));

    let size = c.and(pattern, int(i64::MAX >> (64 - bits.bits())));
    let plain = c.or(c.eq(size, int(0)), c.ge(size, int(field)));
    let exponent = c.select(plain, c.zeros_like(exponent), exponent);
    Ok((c.to(c.select(plain, v, mantissa), x.dtype), c.to(exponent, DType::S32)))
}

fn mvlgamma(c: &Ctx, x: Tensor, p: i64) -> Result<Value> {
    if p < 1 {
        return Err(runtime("p has to be greater than or equal to 1"));
    }
    if x.dtype == DType::Pred {
        return Err(runtime("The input tensor may not be a boolean tensor."));
    }
    // The program has an operation for each.
    if p > 256 {
        return Err(unsupported(format!("a multivariate gamma function of {p} terms")));
    }
    let v = c.to(x.value, c.float_of(x.dtype));
    Ok(c.in_opmath(v, |v| {
        let mut sum = c.like(v, (p * (p - 1)) as f64 * PI.ln() / 4.0);
        for i in 0..p {
            sum = c.add(sum, c.lgamma(c.subtract(v, c.like(v, i as f64 / 2.0))));
        }
        sum
    }))
}

/// The regularised incomplete gamma functions, in float64 because of the cancellation in `a log x - x - lgamma(a)`.
fn incomplete_gamma(c: &Ctx, a: Tensor, x: Tensor, upper: bool) -> Result<Value> {
    let dtype = c.result_type(&[a, x])?;
    if category(dtype) != Category::Float {
        return Err(not_implemented(if upper { "igammac" } else { "igamma" }, dtype));
    }
    let [a, x] = c.align([a.value, x.value], dtype)?;
    let (a, x) = (c.to(a, DType::F64), c.to(x, DType::F64));
    let (zero, one, inf) = (c.zeros_like(a), c.like(a, 1.0), c.like(a, f64::INFINITY));

    let factor = c.exponential(c.subtract(c.subtract(c.multiply(a, c.log(x)), x), c.lgamma(a)));
    let by_series = c.lt(x, c.add(a, one));
    let series =
        c.multiply(gamma_series(c, c.select(by_series, a, one), c.select(by_series, x, zero)), factor);
    let (fa, fx) = (c.select(by_series, one, a), c.select(by_series, c.like(a, 3.0), x));
    let fraction = c.multiply(gamma_fraction(c, fa, fx), factor);
    let lower = c.select(by_series, series, c.subtract(one, fraction));
    let tail = c.select(by_series, c.subtract(one, series), fraction);

    let (y, at_zero, at_inf) = if upper { (tail, one, zero) } else { (lower, zero, one) };
    let (a_zero, x_zero) = (c.eq(a, zero), c.eq(x, zero));
    let (a_inf, x_inf) = (c.eq(a, inf), c.eq(x, inf));
    let y = c.select(x_zero, at_zero, y);
    let y = c.select(c.or(x_inf, a_zero), at_inf, y);
    let y = c.select(c.and(a_inf, c.not(x_inf)), at_zero, y);
    let bad = c.or(c.or(c.lt(a, zero), c.lt(x, zero)), c.or(c.is_nan(a), c.is_nan(x)));
    let bad = c.or(bad, c.or(c.and(a_zero, x_zero), c.and(a_inf, x_inf)));
    Ok(c.to(c.select(bad, c.like(a, f64::NAN), y), dtype))
}

/// Terms after which the series and the fraction have long converged for float64.
const GAMMA_TERMS: f64 = 2000.0;

/// `sum x^n / (a (a+1) .. (a+n))`
fn gamma_series(c: &Ctx, a: Value, x: Value) -> Value {
    let term = c.divide(c.like(a, 1.0), a);
    let out = c.while_(
        &[c.scalar_f64(DType::F64, 1.0), term, term],
        |b, s| {
            let open = b.gt(b.abs(s[1]), b.multiply(b.abs(s[2]), b.full_like(s[2], 1e-17)));
            let dims: Vec<i64> = (0..b.rank(open) as i64).collect();
            b.and(b.reduce_any(open, &dims), b.lt(s[0], b.scalar_f64(DType::F64, GAMMA_TERMS)))
        },
        |b, s| {
            let k = b.full(s[0], &b.shape(s[1]));
            let term = b.multiply(s[1], b.divide(x, b.add(a, k)));
            vec![b.add(s[0], b.scalar_f64(DType::F64, 1.0)), term, b.add(s[2], term)]
        },
    );
    out[2]
}

/// `1 / (x+1-a - 1(1-a) / (x+3-a - 2(2-a) / (x+5-a - ..)))`, by Lentz's method.
fn gamma_fraction(c: &Ctx, a: Value, x: Value) -> Value {
    // What is kept as two float32 ends where those end.
    let tiny = if c.config.target.int64_as_pairs { 1e-30 } else { 1e-300 };
    let (one, near) = (c.like(a, 1.0), c.epsilon(DType::F64) / 2.0);
    let b0 = c.add(c.subtract(x, a), one);
    let d0 = c.divide(one, b0);
    let out = c.while_(
        &[c.scalar_f64(DType::F64, 1.0), b0, c.like(a, 1.0 / tiny), d0, d0, c.like(a, 2.0)],
        |b, s| {
            let open = b.gt(b.abs(b.subtract(s[5], b.full_like(s[5], 1.0))), b.full_like(s[5], near));
            let dims: Vec<i64> = (0..b.rank(open) as i64).collect();
            b.and(b.reduce_any(open, &dims), b.lt(s[0], b.scalar_f64(DType::F64, GAMMA_TERMS)))
        },
        |b, s| {
            let k = b.full(s[0], &b.shape(a));
            let an = b.multiply(b.negate(k), b.subtract(k, a));
            let bn = b.add(s[1], b.full_like(a, 2.0));
            let away = |v: Value| b.select(b.lt(b.abs(v), b.full_like(v, tiny)), b.full_like(v, tiny), v);
            let d = b.divide(b.full_like(a, 1.0), away(b.add(b.multiply(an, s[3]), bn)));
            let cn = away(b.add(bn, b.divide(an, s[2])));
            let change = b.multiply(d, cn);
            vec![b.add(s[0], b.scalar_f64(DType::F64, 1.0)), bn, cn, d, b.multiply(s[4], change), change]
        },
    );
    out[4]
}
