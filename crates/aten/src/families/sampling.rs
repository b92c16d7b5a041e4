use super::philox;
use super::random::{bits, open_uniform_of};
use crate::args::{Rng, Tensor};
use crate::context::Ctx;
use crate::dtype::opmath;
use crate::error::{ErrorKind, Result, not_implemented, runtime};
use crate::row::Row;
use crate::{Layout, op};
use oxitorch_hlo::{Builder, DType, TensorType, Value};
use std::f64::consts::SQRT_2;

/// The rows of this family: distributions that are sampled by rejection, in a loop until every element has been accepted.
/// The loop draws from a key of its own, taken from the generator, so it uses up one block however long it runs.
pub static ROWS: &[Row] = &[
    op!("poisson", poisson).layout(Layout::LikeFirst),
    op!("binomial", binomial).layout(Layout::LikeFirst),
    op!("_standard_gamma", |c: &Ctx, alpha: Tensor, rng: Rng| float(c, alpha, rng, standard_gamma))
        .layout(Layout::LikeFirst),
    op!("_sample_dirichlet", dirichlet).layout(Layout::LikeFirst),
];

/// Runs a sampler on a float tensor in its opmath dtype.
fn float(c: &Ctx, x: Tensor, rng: Rng, f: fn(&Ctx, Value, Rng) -> Value) -> Result<Value> {
    if !x.dtype.is_float() {
        return Err(not_implemented(c.op, x.dtype));
    }
    Ok(c.to(f(c, c.to(x.value, opmath(x.dtype)), rng), x.dtype))
}

fn constant(b: &Builder, like: Value, x: f64) -> Value {
    b.full_like(like, x)
}

/// Uniform numbers in (0, 1) like `x`, and the state after them.
fn draw(b: &Builder, state: Value, x: Value) -> (Value, Value) {
    let source = if b.dtype(x) == DType::F64 { DType::U64 } else { DType::U32 };
    let ty = TensorType::new(source, b.shape(x));
    // A trial looks at a number more than once, and XLA would compute it as often.
    let raw = b.optimization_barrier(&[philox::bits(b, state, &ty)])[0];
    (open_uniform_of(b, raw, b.dtype(x)), philox::after(b, state, &ty))
}

/// Repeats a trial until it was accepted everywhere. A trial gives a candidate, whether it is accepted, and the next state.
fn reject(c: &Ctx, rng: Rng, like: Value, trial: impl Fn(&Builder, Value) -> (Value, Value, Value)) -> Value {
    let shape = c.shape(like);
    let key = bits(c, rng, DType::U64, &[2]);
    let open = c.full(c.scalar_bool(true), &shape);
    let dims: Vec<i64> = (0..shape.len() as i64).collect();
    let out = c.while_(
        &[key, open, c.zeros_like(like)],
        |b, s| b.reduce_any(s[1], &dims),
        |b, s| {
            let (candidate, accepted, state) = trial(b, s[0]);
            let taken = b.and(s[1], accepted);
            vec![state, b.and(s[1], b.not(accepted)), b.select(taken, candidate, s[2])]
        },
    );
    out[2]
}

/// Marsaglia and Tsang's method; shapes below 1 through `gamma(a) = gamma(a + 1) u^(1/a)`.
fn standard_gamma(c: &Ctx, alpha: Value, rng: Rng) -> Value {
    let one = c.like(alpha, 1.0);
    let small = c.lt(alpha, one);
    let shape = c.select(small, c.add(alpha, one), alpha);
    let d = c.subtract(shape, c.like(alpha, 1.0 / 3.0));
    let scale = c.rsqrt(c.multiply(d, c.like(d, 9.0)));
    let x = reject(c, rng, alpha, |b, state| {
        let (u, state) = draw(b, state, d);
        let (v, state) = draw(b, state, d);
        let one = constant(b, d, 1.0);
        let centered = b.subtract(b.multiply(u, constant(b, u, 2.0)), one);
        let z = b.multiply(b.erf_inv(centered), constant(b, u, SQRT_2));
        let root = b.add(one, b.multiply(scale, z));
        let cube = b.multiply(b.multiply(root, root), root);
        let positive = b.gt(root, b.zeros_like(root));
        let log = b.log(b.select(positive, cube, one));
        let half_square = b.multiply(constant(b, z, 0.5), b.multiply(z, z));
        let limit = b.add(half_square, b.multiply(d, b.add(b.subtract(one, cube), log)));
        // A NaN shape is accepted at once, or it would never end.
        let accepted = b.or(b.and(positive, b.lt(b.log(v), limit)), b.is_nan(d));
        (b.multiply(d, cube), accepted, state)
    });
    let (boost, _) = draw(c, bits(c, rng, DType::U64, &[2]), alpha);
    c.select(small, c.multiply(x, c.power(boost, c.divide(one, alpha))), x)
}

fn dirichlet(c: &Ctx, alpha: Tensor, rng: Rng) -> Result<Value> {
    if alpha.rank == 0 {
        return Err(runtime("_sample_dirichlet expects a tensor with at least one dimension"));
    }
    float(c, alpha, rng, |c, alpha, rng| {
        let x = standard_gamma(c, alpha, rng);
        let shape = c.shape(x);
        let last = shape.len() as i64 - 1;
        let dims: Vec<i64> = (0..last).collect();
        let total = c.broadcast_in_dim(c.reduce_sum(x, &[last]), &shape, &dims);
        c.divide(x, total)
    })
}

/// Below 10 by counting uniform factors until their product falls under `e^-rate`, above by Hormann's transformed
/// rejection (PTRS).
fn poisson(c: &Ctx, rate: Tensor, rng: Rng) -> Result<Value> {
    c.assert_beside(
        (rate.value, 1),
        ErrorKind::Runtime,
        "invalid Poisson rate, expected rate to be non-negative",
        || c.all(c.ge(rate.value, c.zeros_like(rate.value))),
    );
    float(c, rate, rng, |c, rate, rng| {
        let ten = c.like(rate, 10.0);
        let large = c.ge(rate, ten);
        let counted = poisson_count(c, c.select(large, c.zeros_like(rate), rate), rng);
        let rejected = poisson_reject(c, c.select(large, rate, ten), rng);
        c.select(large, rejected, counted)
    })
}

fn poisson_count(c: &Ctx, rate: Value, rng: Rng) -> Value {
    let limit = c.exponential(c.negate(rate));
    let dims: Vec<i64> = (0..c.rank(rate) as i64).collect();
    let key = bits(c, rng, DType::U64, &[2]);
    let (first, key) = draw(c, key, rate);
    let out = c.while_(
        &[key, first, c.zeros_like(rate)],
        |b, s| b.reduce_any(b.gt(s[1], limit), &dims),
        |b, s| {
            let (u, state) = draw(b, s[0], s[1]);
            let open = b.gt(s[1], limit);
            let one = constant(b, u, 1.0);
            vec![state, b.select(open, b.multiply(s[1], u), s[1]), b.select(open, b.add(s[2], one), s[2])]
        },
    );
    out[2]
}

fn poisson_reject(c: &Ctx, rate: Value, rng: Rng) -> Value {
    let k = |x: f64| c.like(rate, x);
    let b1 = c.add(k(0.931), c.multiply(k(2.53), c.sqrt(rate)));
    let a1 = c.add(k(-0.059), c.multiply(k(0.02483), b1));
    let inv_alpha = c.add(k(1.1239), c.divide(k(1.1328), c.subtract(b1, k(3.4))));
    let v_r = c.subtract(k(0.9277), c.divide(k(3.6224), c.subtract(b1, k(2.0))));
    let log_rate = c.log(rate);
    reject(c, rng, rate, |b, state| {
        let trial = Hat::draw(b, state, a1, b1, b.add(rate, constant(b, rate, 0.43)));
        let n = trial.candidate;
        let left = b.subtract(b.add(b.log(trial.v), b.log(inv_alpha)), b.log(trial.width(b, a1, b1)));
        let factorial = b.lgamma(b.add(n, constant(b, n, 1.0)));
        let right = b.subtract(b.subtract(b.multiply(n, log_rate), rate), factorial);
        let accepted = trial.accepted(b, v_r, b.le(left, right), b.ge(n, b.zeros_like(n)));
        (n, b.or(accepted, b.is_nan(rate)), trial.state)
    })
}

/// A draw under Hormann's hat: u is centered, `us` its distance from the ends.
struct Hat {
    candidate: Value,
    us: Value,
    v: Value,
    state: Value,
}

impl Hat {
    fn draw(b: &Builder, state: Value, a1: Value, b1: Value, shift: Value) -> Hat {
        let (u, state) = draw(b, state, a1);
        let (v, state) = draw(b, state, a1);
        let half = constant(b, u, 0.5);
        let u = b.subtract(u, half);
        let us = b.subtract(half, b.abs(u));
        let slope = b.add(b.divide(b.add(a1, a1), us), b1);
        Hat { candidate: b.floor(b.add(b.multiply(slope, u), shift)), us, v, state }
    }

    /// `a / us^2 + b`
    fn width(&self, b: &Builder, a1: Value, b1: Value) -> Value {
        b.add(b.divide(a1, b.multiply(self.us, self.us)), b1)
    }

    /// The quick test, or the exact one inside the range.
    fn accepted(&self, b: &Builder, v_r: Value, exact: Value, in_range: Value) -> Value {
        let quick = b.and(b.ge(self.us, constant(b, self.us, 0.07)), b.le(self.v, v_r));
        b.and(in_range, b.or(quick, exact))
    }
}

/// With the smaller of p and 1-p: below a mean of 10 by summing geometric gaps, above by transformed rejection (BTRS).
fn binomial(c: &Ctx, count: Tensor, prob: Tensor, rng: Rng) -> Result<Value> {
    if !count.dtype.is_float() || !prob.dtype.is_float() {
        return Err(runtime("binomial only supports floating-point dtypes"));
    }
    let dtype = count.dtype;
    let [n, p] = c.align([count.value, prob.value], opmath(dtype))?;
    let half = c.like(p, 0.5);
    let flip = c.gt(p, half);
    let q = c.select(flip, c.subtract(c.like(p, 1.0), p), p);
    let (zero, ten) = (c.zeros_like(n), c.like(n, 10.0));
    let large = c.ge(c.multiply(n, q), ten);
    let gaps = binomial_gaps(c, c.select(large, zero, n), q, rng);
    let hat = binomial_reject(c, c.select(large, n, c.like(n, 40.0)), c.select(large, q, half), rng);
    let x = c.select(large, hat, gaps);
    let x = c.select(flip, c.subtract(n, x), x);
    let nothing = c.or(c.le(n, zero), c.le(p, zero));
    Ok(c.to(c.select(nothing, zero, x), dtype))
}

fn binomial_gaps(c: &Ctx, n: Value, p: Value, rng: Rng) -> Value {
    let log_q = c.log_plus_one(c.negate(p));
    let dims: Vec<i64> = (0..c.rank(n) as i64).collect();
    let zero = c.zeros_like(n);
    // State: key, sum of gaps, successes. An element is done when its sum has passed n.
    let out = c.while_(
        &[bits(c, rng, DType::U64, &[2]), zero, c.like(n, -1.0)],
        |b, s| b.reduce_any(b.le(s[1], n), &dims),
        |b, s| {
            let (u, state) = draw(b, s[0], n);
            let open = b.le(s[1], n);
            let gap = b.ceil(b.divide(b.log(u), log_q));
            let one = constant(b, n, 1.0);
            vec![state, b.select(open, b.add(s[1], gap), s[1]), b.select(open, b.add(s[2], one), s[2])]
        },
    );
    out[2]
}

fn binomial_reject(c: &Ctx, n: Value, p: Value, rng: Rng) -> Value {
    let k = |x: f64| c.like(n, x);
    let one = k(1.0);
    let q = c.subtract(one, p);
    let spread = c.sqrt(c.multiply(c.multiply(n, p), q));
    let b1 = c.add(k(1.15), c.multiply(k(2.53), spread));
    let a1 = c.add(c.add(k(-0.0873), c.multiply(k(0.0248), b1)), c.multiply(k(0.01), p));
    let shift = c.add(c.multiply(n, p), k(0.5));
    let v_r = c.subtract(k(0.92), c.divide(k(4.2), b1));
    let alpha = c.multiply(c.add(k(2.83), c.divide(k(5.1), b1)), spread);
    let log_odds = c.log(c.divide(p, q));
    let mode = c.floor(c.multiply(c.add(n, one), p));
    // log of the probability of k up to a constant: -lgamma(k+1) - lgamma(n-k+1) + k log(p/q)
    let weight = |b: &Builder, k: Value| {
        let above = b.lgamma(b.add(k, one));
        let below = b.lgamma(b.add(b.subtract(n, k), one));
        b.subtract(b.multiply(k, log_odds), b.add(above, below))
    };
    let peak = weight(c, mode);
    reject(c, rng, n, |b, state| {
        let trial = Hat::draw(b, state, a1, b1, shift);
        let k = trial.candidate;
        let in_range = b.and(b.ge(k, b.zeros_like(k)), b.le(k, n));
        let inside = b.select(in_range, k, mode);
        let left = b.log(b.divide(b.multiply(trial.v, alpha), trial.width(b, a1, b1)));
        let exact = b.le(left, b.subtract(weight(b, inside), peak));
        let accepted = trial.accepted(b, v_r, exact, in_range);
        (k, b.or(accepted, b.is_nan(b.add(n, p))), trial.state)
    })
}
