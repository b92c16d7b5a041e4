//! Running sums and the like.
//!
//! Sums and products are windows that reach back to the start: XLA rewrites such windows into scans of linear work.
//! Scans with indices double their reach in every step, where PyTorch's own kernels are not there.

use crate::args::Tensor;
use crate::context::Ctx;
use crate::dtype::{Category, acc_type, category, opmath};
use crate::error::{Result, index, not_implemented};
use crate::library::{Item, NUMBERS, Outcome, Parts, beside, word};
use crate::op;
use crate::out::OutDtype;
use crate::row::Row;
use oxitorch_hlo::{Axes, Binary, DType, TensorType, Value, Window};

/// The rows of this family.
pub static ROWS: &[Row] = &[
    op!("cumsum", |c: &Ctx, x: Tensor, dim: i64, dtype: Option<DType>| running(c, &SUM, x, dim, dtype))
        .iterated()
        .out_dtype(OutDtype::Computed),
    op!("cumprod", |c: &Ctx, x: Tensor, dim: i64, dtype: Option<DType>| running(c, &PROD, x, dim, dtype))
        .iterated()
        .out_dtype(OutDtype::Computed),
    op!("cummax", |c: &Ctx, x: Tensor, dim: i64| extremes(c, x, dim, true)),
    op!("cummin", |c: &Ctx, x: Tensor, dim: i64| extremes(c, x, dim, false)),
    op!("_logcumsumexp", logcumsumexp),
];

struct Fold {
    op: Binary,
    identity: f64,
    kernel: &'static str,
    overload: &'static str,
}

static SUM: Fold = Fold { op: Binary::Add, identity: 0.0, kernel: "cumsum_out_cpu", overload: "cumsum.out" };
static PROD: Fold =
    Fold { op: Binary::Multiply, identity: 1.0, kernel: "cumprod_out_cpu", overload: "cumprod.out" };

/// `x[0] op ... op x[i]` for every `i` along `dim`, in the dtype of `x`.
pub(super) fn prefix(c: &Ctx, op: Binary, x: Value, identity: Value, dim: usize) -> Value {
    let shape = c.shape(x);
    let n = shape[dim];
    if n <= 1 || c.numel(x) == 0 {
        return x;
    }
    let mut window = Window::new(&vec![1; shape.len()]);
    window.dims[dim] = n;
    window.padding[dim] = (n - 1, 0);
    c.reduce_window_with(op, x, identity, &window)
}

fn running(c: &Ctx, fold: &Fold, x: Tensor, dim: i64, dtype: Option<DType>) -> Result<Value> {
    let dim = c.dim(dim, x.rank)?;
    let out = dtype.unwrap_or(if category(x.dtype) <= Category::Int { DType::S64 } else { x.dtype });
    if matches!(out, DType::F8E4M3FN | DType::F8E5M2 | DType::Pred) {
        return Err(not_implemented(fold.kernel, out));
    }
    let wide = c.to(c.to(x.value, out), acc_type(out));
    if x.rank == 0 {
        return Ok(c.to(wide, out));
    }
    // Along other dimensions than the last one PyTorch's kernels go from row to row for each element.
    let args = [Item::Int(dim as i64), Item::None];
    let called = (dim + 1 == x.rank).then(|| library_scan(c, fold.overload, wide, &args, dim, &[c.ty(wide)]));
    if let Some(sums) = called.flatten() {
        return Ok(c.to(sums[0], out));
    }
    Ok(c.to(prefix(c, fold.op, wide, c.scalar_like(wide, fold.identity), dim), out))
}

/// Combines every element with all before it: `f(earlier, later)`. What lies before the start is `fills`.
fn scan(
    c: &Ctx,
    xs: Vec<Value>,
    fills: &[Value],
    dim: usize,
    f: impl Fn(&[Value], &[Value]) -> Vec<Value>,
) -> Vec<Value> {
    let n = xs.first().map_or(0, |&x| c.shape(x)[dim]);
    let mut xs = xs;
    let mut reach = 1;
    while reach < n {
        let earlier: Vec<Value> =
            xs.iter().zip(fills).map(|(&x, &fill)| c.pad_dim(x, fill, dim as i64, reach, -reach)).collect();
        xs = f(&earlier, &xs);
        reach *= 2;
    }
    xs
}

/// Elements from which PyTorch's own kernel is worth a call.
const WORTH_A_CALL: i64 = 1 << 10;

/// A scan by PyTorch's own kernel, which goes through the elements once: results of these types. `more` are its arguments
/// but for the tensor.
pub(super) fn library_scan(
    c: &Ctx,
    op: &str,
    x: Value,
    more: &[Item<'_>],
    dim: usize,
    types: &[TensorType],
) -> Option<Vec<Value>> {
    if !c.is_worth_a_call(x, &NUMBERS, WORTH_A_CALL) {
        return None;
    }
    let results: Vec<_> = types.iter().map(|ty| Some(Outcome::row_major(ty.clone()))).collect();
    let cut = beside(&c.shape(x), dim).map(|d| d as i64);
    let args = [&[Item::Tensor(x)], more].concat();
    let cuts: Vec<i64> = cut.into_iter().chain(more.iter().map(|_| word::WHOLE)).collect();
    let parts = Parts { args: &cuts, results: &vec![cut.unwrap_or(word::WHOLE); types.len()], step: 1 };
    c.call_library_in_parts(op, &args, &results, cut.map(|_| &parts)).into_iter().collect()
}

/// Running maximum or minimum, with the last position that holds it; a NaN stays.
fn extremes(c: &Ctx, x: Tensor, dim: i64, largest: bool) -> Result<(Value, Value)> {
    let kernel = if largest { "cummax_cpu" } else { "cummin_cpu" };
    let bare = matches!(x.dtype, DType::U16 | DType::U32 | DType::U64 | DType::F8E4M3FN | DType::F8E5M2);
    if bare || x.dtype.is_complex() {
        return Err(not_implemented(kernel, x.dtype));
    }
    if x.rank == 0 {
        return scalar_extreme(c, x, dim, if largest { "cummax" } else { "cummin" });
    }
    let dim = c.dim(dim, x.rank)?;
    let types = [c.ty(x.value), c.ty(x.value).with_dtype(DType::S64)];
    let op = if largest { "cummax.out" } else { "cummin.out" };
    if let Some(found) = library_scan(c, op, x.value, &[Item::Int(dim as i64)], dim, &types) {
        return Ok((found[0], found[1]));
    }
    let found = along(c, x.value, dim, &types, move |c, x| running_extremes(c, x, dim, largest).to_vec());
    Ok((found[0], found[1]))
}

fn running_extremes(c: &Ctx, x: Value, dim: usize, largest: bool) -> [Value; 2] {
    let index = super::reductions::index_dtype(c.shape(x)[dim]);
    let start = vec![x, c.iota_dim(x, index, dim as i64)];
    let fills = [c.scalar_like(x, 0.0), c.scalar_i64(index, -1)];
    let out = scan(c, start, &fills, dim, |old, new| {
        let mut take = if largest { c.ge(new[0], old[0]) } else { c.le(new[0], old[0]) };
        if c.dtype(x).is_float() {
            take = c.or(c.is_nan(new[0]), c.and(take, c.not(c.is_nan(old[0]))));
        }
        take = c.or(take, c.lt(old[1], c.zeros_like(old[1])));
        vec![c.select(take, new[0], old[0]), c.select(take, new[1], old[1])]
    });
    [out[0], c.to(out[1], DType::S64)]
}

/// What `f` makes of `x`, each element of it and of those before it along `dim`. It takes as many steps as the size needs,
/// so an outline leaves it open: at the bound, what is not in use comes last and changes nothing before it.
fn along(
    c: &Ctx,
    x: Value,
    dim: usize,
    types: &[TensorType],
    f: impl Fn(&Ctx, Value) -> Vec<Value> + Send + Sync + 'static,
) -> Vec<Value> {
    if !c.is_outline() {
        return f(c, x);
    }
    let letters: String = ('a'..='z').take(c.rank(x)).collect();
    let axes = Axes {
        operands: vec![letters.clone()],
        results: vec![letters.clone(); types.len()],
        first: letters.chars().skip(dim).take(1).collect(),
        ..Axes::default()
    };
    let made = c.deferred(format!("{} along {dim}", c.op), &[x], types, axes, move |c, x, _| Ok(f(c, x[0])));
    made.unwrap_or_default()
}

fn scalar_extreme(c: &Ctx, x: Tensor, dim: i64, name: &str) -> Result<(Value, Value)> {
    if dim != 0 && dim != -1 {
        return Err(index(format!("{name}(): Expected reduction dim -1 or 0 for scalar but got {dim}")));
    }
    Ok((x.value, c.scalar_i64(DType::S64, 0)))
}

fn logcumsumexp(c: &Ctx, x: Tensor, dim: i64) -> Result<Value> {
    let dim = c.dim(dim, x.rank)?;
    match category(x.dtype) {
        Category::Float => {}
        Category::Complex => return Err(crate::error::unsupported("logcumsumexp of complex numbers")),
        _ => return Err(not_implemented("logcumsumexp_out_cpu", x.dtype)),
    }
    if x.rank == 0 {
        return Ok(x.value);
    }
    let wide = c.to(x.value, opmath(x.dtype));
    let args = [Item::Int(dim as i64)];
    if let Some(found) = library_scan(c, "_logcumsumexp.out", wide, &args, dim, &[c.ty(wide)]) {
        return Ok(c.to(found[0], x.dtype));
    }
    let out = along(c, wide, dim, &[c.ty(wide)], move |c, wide| {
        let fills = [c.min_value(c.dtype(wide))];
        scan(c, vec![wide], &fills, dim, |old, new| {
            let (a, b) = (old[0], new[0]);
            let high = c.maximum(a, b);
            let sum = c.add(high, c.log_plus_one(c.exponential(c.subtract(c.minimum(a, b), high))));
            // inf - inf is NaN, but the sum of two equal infinities is that infinity.
            let same = c.and(c.eq(a, b), c.not(c.is_finite(a)));
            vec![c.select(same, a, sum)]
        })
    });
    Ok(c.to(out[0], x.dtype))
}
