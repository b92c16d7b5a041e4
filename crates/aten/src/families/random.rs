use super::cumulative::library_scan;
use super::philox;
use super::sorting::{library_sort, lower_bound};
use crate::args::{Integer, Rng, Scalar, Tensor};
use crate::context::Ctx;
use crate::domain;
use crate::dtype::{Category, category, cpp_name, opmath, scalar_name};
use crate::error::{ErrorKind, Result, not_implemented, runtime, unsupported};
use crate::library::Item;
use crate::numbers::{Numbers, finite_max, int_range, show};
use crate::out::OutDtype;
use crate::row::Row;
use crate::{Layout, op};
use oxitorch_hlo::{Builder, DType, Dims, TensorType, Value};
use std::f64::consts::{PI, SQRT_2};

/// The rows of this family. Numbers come from Philox: the seed is the key, the offset the counter, in blocks of 128 bits.
pub static ROWS: &[Row] = &[
    op!("uniform", |c: &Ctx, x: Tensor, from: Scalar, to: Scalar, rng: Rng| {
        like(c, x, "uniform", |c, dtype, shape| {
            let u = uniform_digits(c, rng, dtype, x.dtype, shape);
            let [from, to] = numbers(c, [from, to], dtype, shape);
            c.add(c.multiply(u, c.subtract(to, from)), from)
        })
    })
    .layout(Layout::LikeFirst)
    .check_numbers(check_uniform),
    op!("normal_functional", |c: &Ctx, x: Tensor, mean: Scalar, std: Scalar, rng: Rng| {
        like(c, x, "normal", |c, dtype, shape| {
            let [mean, std] = numbers(c, [mean, std], dtype, shape);
            c.add(c.multiply(normal(c, rng, dtype, shape), std), mean)
        })
    })
    .layout(Layout::LikeFirst)
    .check_numbers(|n| {
        n.require(2, |x| x >= 0.0, |x| format!("normal expects std >= 0.0, but found std {}", show(x)))
    })
    .out_dtype(OutDtype::Castable)
    .serves(&["normal_", "normal.out"]),
    op!("normal.Tensor_float", |c: &Ctx, mean: Tensor, std: Scalar, rng: Rng| {
        normal_of(c, mean.dtype, mean.value, std.value, rng)
    })
    .check_numbers(|n| {
        n.require(1, |x| x >= 0.0, |x| format!("normal expects std >= 0.0, but found std {}", show(x)))
    })
    .out_dtype(OutDtype::Castable),
    op!("normal.float_Tensor", |c: &Ctx, mean: Scalar, std: Tensor, rng: Rng| {
        normal_of(c, std.dtype, mean.value, std.value, rng)
    })
    .out_dtype(OutDtype::Castable),
    op!("normal.Tensor_Tensor", |c: &Ctx, mean: Tensor, std: Tensor, rng: Rng| {
        let dtype = c.result_type(&[mean, std])?;
        normal_of(c, dtype, mean.value, std.value, rng)
    })
    .out_dtype(OutDtype::Castable),
    op!("bernoulli", |c: &Ctx, p: Tensor, rng: Rng| bernoulli(c, p.dtype, &c.shape(p.value), p.value, rng))
        .dtypes(domain::floats)
        .out_dtype(OutDtype::Any),
    op!("bernoulli.p", |c: &Ctx, x: Tensor, p: Scalar, rng: Rng| {
        bernoulli(c, x.dtype, &c.shape(x.value), p.value, rng)
    })
    .dtypes(domain::ordered)
    .layout(Layout::LikeFirst)
    .check_numbers(|n| {
        n.require(
            1,
            |p| (0.0..=1.0).contains(&p),
            |p| format!("bernoulli_ expects p to be in [0, 1], but got p={}", show(p)),
        )
    })
    .out_dtype(OutDtype::Any)
    .serves(&["bernoulli_.float", "bernoulli.float_out"]),
    op!("bernoulli.Tensor", |c: &Ctx, x: Tensor, p: Tensor, rng: Rng| {
        bernoulli(c, x.dtype, &c.shape(x.value), p.value, rng)
    })
    .layout(Layout::LikeFirst)
    .out_dtype(OutDtype::Any),
    op!("random", |c: &Ctx, x: Tensor, rng: Rng| random(c, x, rng))
        .dtypes(domain::ordered)
        .layout(Layout::LikeFirst),
    op!("random.to", |c: &Ctx, x: Tensor, to: Integer, rng: Rng| {
        random_between(c, x, Integer(c.scalar_i64(DType::S64, 0)), Some(to), rng)
    })
    .dtypes(domain::bounded)
    .layout(Layout::LikeFirst)
    .check_numbers(|n| check_range(n.dtype, 0, n.int(1))),
    op!("random.from", random_between)
        .dtypes(domain::bounded)
        .layout(Layout::LikeFirst)
        .check_numbers(|n| n.int(1).map_or(Ok(()), |from| check_range(n.dtype, from, n.int(2)))),
    op!("exponential", |c: &Ctx, x: Tensor, rate: Scalar, rng: Rng| {
        like(c, x, "exponential", |c, dtype, shape| {
            let [rate] = numbers(c, [rate], dtype, shape);
            c.divide(exponential(c, rng, dtype, shape), rate)
        })
    })
    .dtypes(domain::continuous)
    .layout(Layout::LikeFirst)
    .check_numbers(|n| {
        n.require(
            1,
            |x| x > 0.0,
            |x| format!("exponential_ expects lambda > 0.0, but found lambda={}", show(x)),
        )
    }),
    op!("log_normal", |c: &Ctx, x: Tensor, mean: Scalar, std: Scalar, rng: Rng| {
        like(c, x, "log_normal", |c, dtype, shape| {
            let [mean, std] = numbers(c, [mean, std], dtype, shape);
            c.exponential(c.add(c.multiply(normal(c, rng, dtype, shape), std), mean))
        })
    })
    .layout(Layout::LikeFirst)
    .check_numbers(|n| {
        n.require(2, |x| x > 0.0, |x| format!("log_normal_ expects std > 0.0, but found std={}", show(x)))
    }),
    op!("cauchy", |c: &Ctx, x: Tensor, median: Scalar, sigma: Scalar, rng: Rng| {
        like(c, x, "cauchy", |c, dtype, shape| {
            let [median, sigma] = numbers(c, [median, sigma], dtype, shape);
            let u = c
                .subtract(open_uniform(c, rng, dtype, shape), c.constant(TensorType::new(dtype, shape), 0.5));
            c.add(median, c.multiply(sigma, c.tan(c.multiply(u, c.like(u, PI)))))
        })
    })
    .dtypes(domain::continuous)
    .layout(Layout::LikeFirst)
    .check_numbers(|n| {
        n.require(2, |x| x > 0.0, |x| format!("cauchy_ expects sigma > 0.0, but found sigma={}", show(x)))
    }),
    op!("geometric", geometric).layout(Layout::LikeFirst).check_numbers(|n| {
        n.require(
            1,
            |p| p > 0.0 && p < 1.0,
            |p| format!("geometric_ expects p to be in (0, 1), but got p={}", show(p)),
        )
    }),
    op!("randperm", |c: &Ctx, n: i64, dtype: Option<DType>, rng: Rng| randperm(c, n, rng, dtype))
        .dtypes(domain::numbers)
        .out_dtype(OutDtype::Castable),
    op!("randperm.generator", randperm).dtypes(domain::numbers).out_dtype(OutDtype::Castable),
    op!("multinomial", multinomial),
    op!("native_dropout", dropout).dtypes(domain::scaled).layout(Layout::LikeFirst),
    op!("native_dropout_backward", dropout_backward).layout(Layout::LikeFirst),
    op!("rrelu_with_noise", |c: &Ctx,
                             x: Tensor,
                             noise: Tensor,
                             lower: Scalar,
                             upper: Scalar,
                             training: bool,
                             rng: Rng| {
        let [y, noise] = rrelu(c, x, noise, [lower, upper], training, rng);
        (noise, y)
    })
    .dtypes(domain::floats),
    op!("rrelu_with_noise_", |c: &Ctx,
                              x: Tensor,
                              noise: Tensor,
                              lower: Scalar,
                              upper: Scalar,
                              training: bool,
                              rng: Rng| {
        let [y, noise] = rrelu(c, x, noise, [lower, upper], training, rng);
        (y, noise)
    })
    .dtypes(domain::floats),
];

fn check_uniform(n: &Numbers) -> Result<()> {
    if let Some(dtype) = n.dtype {
        let max = finite_max(dtype);
        for (param, name) in [(1, "from"), (2, "to")] {
            if n.f64(param).is_some_and(|x| !(x >= -max && x <= max)) {
                return Err(runtime(format!("{name} is out of bounds for {}", cpp_name(dtype))));
            }
        }
    }
    match (n.f64(1), n.f64(2)) {
        (Some(from), Some(to)) if from > to => Err(runtime(format!(
            "uniform_ expects to return a [from, to) range, but found from={} > to={}",
            show(from),
            show(to)
        ))),
        _ => Ok(()),
    }
}

/// Random bits of an unsigned dtype.
pub(super) fn bits(c: &Ctx, rng: Rng, dtype: DType, shape: &[i64]) -> Value {
    let ty = TensorType::new(dtype, shape);
    let state = c.rng_take(rng, philox::blocks(&ty));
    philox::bits(c, state, &ty)
}

/// Binary digits of a float's significand.
fn digits(dtype: DType) -> u32 {
    match dtype {
        DType::F64 | DType::C128 => 53,
        DType::F16 => 11,
        DType::BF16 => 8,
        _ => 24,
    }
}

/// Multiples of 2^-digits in [0, 1), in `dtype`, with the digits that `target` can hold.
fn uniform_digits(c: &Ctx, rng: Rng, dtype: DType, target: DType, shape: &[i64]) -> Value {
    let (source, width) = if dtype == DType::F64 { (DType::U64, 64) } else { (DType::U32, 32) };
    let keep = digits(target).min(digits(dtype));
    let raw = bits(c, rng, source, shape);
    let raw = c.shift_right_logical(raw, c.like(raw, f64::from(width - keep)));
    let x = c.convert(raw, dtype);
    c.multiply(x, c.like(x, 0.5f64.powi(keep as i32)))
}

/// In [0, 1).
fn uniform(c: &Ctx, rng: Rng, dtype: DType, shape: &[i64]) -> Value {
    uniform_digits(c, rng, dtype, dtype, shape)
}

/// In (0, 1).
fn open_uniform(c: &Ctx, rng: Rng, dtype: DType, shape: &[i64]) -> Value {
    let source = if dtype == DType::F64 { DType::U64 } else { DType::U32 };
    open_uniform_of(c, bits(c, rng, source, shape), dtype)
}

/// Random bits as numbers in (0, 1): the middles of the steps of [`uniform`], with one digit less.
pub(super) fn open_uniform_of(b: &Builder, raw: Value, dtype: DType) -> Value {
    let keep = digits(dtype) - 1;
    let drop = b.dtype(raw).bits() - keep;
    let x = b.convert(b.shift_right_logical(raw, b.full_like(raw, f64::from(drop))), dtype);
    b.multiply(b.add(x, b.full_like(x, 0.5)), b.full_like(x, 0.5f64.powi(keep as i32)))
}

/// Standard normal numbers, by the inverse of the distribution.
fn normal(c: &Ctx, rng: Rng, dtype: DType, shape: &[i64]) -> Value {
    let u = open_uniform(c, rng, dtype, shape);
    let centered = c.subtract(c.multiply(u, c.like(u, 2.0)), c.like(u, 1.0));
    c.multiply(c.erf_inv(centered), c.like(u, SQRT_2))
}

/// Standard exponential numbers.
fn exponential(c: &Ctx, rng: Rng, dtype: DType, shape: &[i64]) -> Value {
    c.negate(c.log(open_uniform(c, rng, dtype, shape)))
}

fn numbers<const N: usize>(c: &Ctx, xs: [Scalar; N], dtype: DType, shape: &[i64]) -> [Value; N] {
    xs.map(|x| c.number_like(x, dtype, shape))
}

/// Fills a float tensor; of complex ones both parts, for normal numbers each with half the variance.
fn like(c: &Ctx, x: Tensor, name: &str, f: impl Fn(&Ctx, DType, &[i64]) -> Value) -> Result<Value> {
    let shape = c.shape(x.value);
    match category(x.dtype) {
        Category::Float => Ok(c.to(f(c, opmath(x.dtype), &shape), x.dtype)),
        Category::Complex if matches!(name, "normal" | "uniform") => {
            let part = || {
                let v = f(c, x.dtype.real(), &shape);
                if name == "normal" { c.multiply(v, c.like(v, 1.0 / SQRT_2)) } else { v }
            };
            Ok(c.complex(part(), part()))
        }
        _ => Err(not_implemented(name, x.dtype)),
    }
}

fn check_std(c: &Ctx, std: Value) {
    c.assert_beside((std, 1), ErrorKind::Runtime, "normal expects all elements of std >= 0.0", || {
        c.all(c.ge(std, c.zeros_like(std)))
    });
}

fn normal_of(c: &Ctx, dtype: DType, mean: Value, std: Value, rng: Rng) -> Result<Value> {
    if c.dtype(std).is_complex() {
        return Err(runtime("normal expects standard deviation to be non-complex"));
    }
    match category(dtype) {
        Category::Float => {}
        Category::Complex => return Err(unsupported("normal numbers around complex ones")),
        _ => return Err(not_implemented("normal", dtype)),
    }
    check_std(c, std);
    let [mean, std] = c.align([mean, std], opmath(dtype))?;
    let z = normal(c, rng, opmath(dtype), &c.shape(mean));
    Ok(c.to(c.add(c.multiply(z, std), mean), dtype))
}

fn bernoulli(c: &Ctx, dtype: DType, shape: &[i64], p: Value, rng: Rng) -> Result<Value> {
    let compute = if c.dtype(p) == DType::F64 && c.rank(p) > 0 { DType::F64 } else { DType::F32 };
    c.assert_beside(
        (p, 1),
        ErrorKind::Runtime,
        "Expected p_in >= 0 && p_in <= 1 to be true, but got false.",
        || c.all(c.and(c.ge(p, c.zeros_like(p)), c.le(p, c.ones_like(p)))),
    );
    let p = c.expand(c.to(p, compute), shape)?;
    Ok(c.to(c.lt(uniform(c, rng, compute, shape), p), dtype))
}

/// The largest integer of which the dtype also holds every smaller one.
fn largest(dtype: DType) -> i64 {
    match dtype {
        DType::Pred => 1,
        t if t.is_float() => 1 << digits(t),
        DType::U64 => i64::MAX,
        t => int_range(t).1 as i64,
    }
}

/// Bounds that torch refuses; `to` is left out to mean the largest integer.
fn check_range(dtype: Option<DType>, from: i64, to: Option<i64>) -> Result<()> {
    let Some(dtype) = dtype else { return Ok(()) };
    let end = to.map_or(largest(dtype), |to| to.saturating_sub(1));
    if from > end {
        let to = i128::from(end) + 1;
        return Err(runtime(format!(
            "random_ expects 'from' to be less than 'to', but got from={from} >= to={to}"
        )));
    }
    let (low, high) = match dtype {
        DType::Pred => (0, 1),
        DType::F16 => (-65504, 65504),
        t if t.is_float() => (i128::MIN, i128::MAX),
        t => int_range(t),
    };
    let fits = |x: i64| (low..=high).contains(&i128::from(x));
    for (x, name) in [(from, "from"), (end, "to - 1")] {
        if !fits(x) {
            return Err(runtime(format!("{name} is out of bounds for {}", cpp_name(dtype))));
        }
    }
    Ok(())
}

/// What the dtype holds, from 0.
fn random(c: &Ctx, x: Tensor, rng: Rng) -> Result<Value> {
    let shape = c.shape(x.value);
    let span = largest(x.dtype) as u64 + 1;
    let dtype = if span <= u64::from(u32::MAX) { DType::U32 } else { DType::U64 };
    let raw = bits(c, rng, dtype, &shape);
    let kept = c.remainder(raw, c.full(c.scalar_i64(dtype, span as i64), &shape));
    Ok(c.to(c.convert(kept, DType::S64), x.dtype))
}

/// Integers in `from..to`; without `to` up to the largest of the dtype.
fn random_between(c: &Ctx, x: Tensor, from: Integer, to: Option<Integer>, rng: Rng) -> Result<Value> {
    let shape = c.shape(x.value);
    let word = |i: i64| c.scalar_i64(DType::S64, i);
    let last = to.map_or(word(largest(x.dtype)), |to| c.subtract(to.0, word(1)));
    // The number of choices modulo 2^64: 0 means all of them.
    let span = c.convert(c.add(c.subtract(last, from.0), word(1)), DType::U64);
    let all = c.full(c.eq(span, c.zeros_like(span)), &shape);
    let span = c.full(c.maximum(span, c.ones_like(span)), &shape);
    let raw = bits(c, rng, DType::U64, &shape);
    let kept = c.convert(c.select(all, raw, c.remainder(raw, span)), DType::S64);
    Ok(c.to(c.add(kept, c.full(from.0, &shape)), x.dtype))
}

fn geometric(c: &Ctx, x: Tensor, p: Scalar, rng: Rng) -> Value {
    let shape = c.shape(x.value);
    let dtype = if x.dtype == DType::F64 { DType::F64 } else { DType::F32 };
    let [p] = numbers(c, [p], dtype, &shape);
    let trials = c.divide(c.log(open_uniform(c, rng, dtype, &shape)), c.log_plus_one(c.negate(p)));
    c.to(c.ceil(trials), x.dtype)
}

/// The integers below n, sorted by random keys.
fn randperm(c: &Ctx, n: i64, rng: Rng, dtype: Option<DType>) -> Result<Value> {
    if n < 0 {
        return Err(runtime(format!("Trying to create tensor with negative dimension {n}: [{n}]")));
    }
    let keys = bits(c, rng, DType::U64, &[n]);
    // The library sorts signed integers: the same order with the first bit the other way round.
    let signed = c.bitcast_convert(c.xor(keys, c.full(c.scalar_i64(DType::U64, i64::MIN), &[n])), DType::S64);
    if let Some((_, index)) = library_sort(c, signed, 0, false) {
        return Ok(c.to(index, dtype.unwrap_or(DType::S64)));
    }
    let i = c.iota(TensorType::new(DType::S64, [n].as_slice()), 0);
    let sorted = c.sort(&[keys, i], 0, true, |b, x, y| b.lt(x[0], y[0]));
    Ok(c.to(sorted[1], dtype.unwrap_or(DType::S64)))
}

fn multinomial(c: &Ctx, p: Tensor, samples: i64, replacement: bool, rng: Rng) -> Result<Value> {
    let shape = c.shape(p.value);
    if !matches!(p.rank, 1 | 2) {
        return Err(runtime("prob_dist must be 1 or 2 dim"));
    }
    if !p.dtype.is_float() {
        return Err(runtime(format!(
            "multinomial only supports floating-point dtypes for input, got: {}",
            scalar_name(p.dtype)
        )));
    }
    if samples <= 0 {
        return Err(runtime("cannot sample n_sample <= 0 samples"));
    }
    let classes = shape[p.rank - 1];
    if !replacement && samples > classes {
        return Err(runtime("cannot sample n_sample > prob_dist.size(-1) samples without replacement"));
    }
    let rows = if p.rank == 2 { shape[0] } else { 1 };
    let w = c.reshape(
        c.to(p.value, if p.dtype == DType::F64 { DType::F64 } else { DType::F32 }),
        &[rows, classes],
    );
    check_weights(c, w);
    let picked = if replacement {
        with_replacement(c, w, samples, rng)
    } else {
        without_replacement(c, w, samples, rng)
    };
    let mut out: Dims = shape[..p.rank - 1].into();
    out.push(samples);
    Ok(c.reshape(picked, &out))
}

fn check_weights(c: &Ctx, w: Value) {
    let message = "probability tensor contains either `inf`, `nan` or element < 0";
    c.assert(ErrorKind::Runtime, message, || c.all(c.and(c.ge(w, c.zeros_like(w)), c.is_finite(w))));
    c.assert(ErrorKind::Runtime, "invalid multinomial distribution (sum of probabilities <= 0)", || {
        let total = c.reduce_sum(w, &[1]);
        c.all(c.gt(total, c.zeros_like(total)))
    });
}

/// Counts how many running sums lie at or below a random share of the total.
fn with_replacement(c: &Ctx, w: Value, samples: i64, rng: Rng) -> Value {
    let (rows, classes) = (c.shape(w)[0], c.shape(w)[1]);
    let dtype = c.dtype(w);
    let sums = running_sums(c, w);
    let total = c.slice_dim(sums, 1, classes - 1, classes, 1);
    let total = c.broadcast_in_dim(total, &[rows, samples], &[0, 1]);
    let share = c.multiply(uniform(c, rng, dtype, &[rows, samples]), total);
    if c.config.target.library {
        let index = c.to(lower_bound(c, sums, share, true), DType::S64);
        return c.minimum(index, c.like(index, (classes - 1) as f64));
    }
    let all = [rows, samples, classes];
    let below = c.le(c.broadcast_in_dim(sums, &all, &[0, 2]), c.broadcast_in_dim(share, &all, &[0, 1]));
    let index = c.reduce_sum(c.convert(below, DType::S64), &[2]);
    c.minimum(index, c.like(index, (classes - 1) as f64))
}

/// Each class's sum of weights up to its own; those of a class without weight are equal to the sums before, so that it is
/// never picked.
fn running_sums(c: &Ctx, w: Value) -> Value {
    if let Some(sums) = library_scan(c, "cumsum.out", w, &[Item::Int(1), Item::None], 1, &[c.ty(w)]) {
        return sums[0];
    }
    let classes = c.shape(w)[1];
    let i = TensorType::new(DType::S32, [classes, classes].as_slice());
    let upto = c.convert(c.le(c.iota(i.clone(), 0), c.iota(i, 1)), c.dtype(w));
    c.matmul(w, upto, oxitorch_hlo::Precision::Highest, None)
}

/// The largest of weight over exponential noise are a sample without replacement.
fn without_replacement(c: &Ctx, w: Value, samples: i64, rng: Rng) -> Value {
    let shape = c.shape(w);
    let noise = exponential(c, rng, c.dtype(w), &shape);
    let key = c.divide(w, noise);
    if c.dtype(key) == DType::F32 {
        let (_, index) = c.top_k(key, samples);
        return c.convert(index, DType::S64);
    }
    let i = c.iota(TensorType::new(DType::S64, shape), 1);
    let sorted = c.sort(&[key, i], 1, true, |b, x, y| b.gt(x[0], y[0]));
    c.slice_dim(sorted[1], 1, 0, samples, 1)
}

/// The kept elements, scaled, and the mask that says which they are.
fn dropout(c: &Ctx, x: Tensor, p: Scalar, train: Option<bool>, rng: Rng) -> (Value, Value) {
    let shape = c.shape(x.value);
    if train == Some(false) {
        return (x.value, c.full(c.scalar_bool(true), &shape));
    }
    let keep = c.subtract(c.scalar_f64(DType::F32, 1.0), c.number(p, DType::F32));
    let mask = c.lt(uniform(c, rng, DType::F32, &shape), c.full(keep, &shape));
    let high = opmath(x.dtype);
    let v = c.to(x.value, high);
    let scale = c.full(c.to(c.divide(c.scalar_f64(DType::F32, 1.0), keep), high), &shape);
    (c.to(c.select(mask, c.multiply(v, scale), c.zeros_like(v)), x.dtype), mask)
}

fn dropout_backward(c: &Ctx, g: Tensor, mask: Tensor, scale: Scalar) -> Result<Value> {
    let dtype = c.float_of(g.dtype);
    let high = opmath(dtype);
    let [v, mask] = c.align([c.to(g.value, high), c.to(mask.value, high)], high)?;
    let scale = c.number_like(scale, high, &c.shape(v));
    Ok(c.to(c.multiply(c.multiply(v, mask), scale), dtype))
}

/// The result and the noise: random slopes in training (1 where the input is positive), their mean otherwise.
fn rrelu(c: &Ctx, x: Tensor, noise: Tensor, bounds: [Scalar; 2], training: bool, rng: Rng) -> [Value; 2] {
    let shape = c.shape(x.value);
    let high = opmath(x.dtype);
    let v = c.to(x.value, high);
    let [lower, upper] = numbers(c, bounds, high, &shape);
    let negative = c.le(v, c.zeros_like(v));
    if !training {
        let slope = c.divide(c.add(lower, upper), c.like(v, 2.0));
        return [c.to(c.select(negative, c.multiply(v, slope), v), x.dtype), noise.value];
    }
    let slope = c.add(lower, c.multiply(uniform(c, rng, high, &shape), c.subtract(upper, lower)));
    let slope = c.select(negative, slope, c.like(v, 1.0));
    [c.to(c.multiply(v, slope), x.dtype), c.to(slope, noise.dtype)]
}
