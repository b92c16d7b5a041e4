//! Sort, top-k, order statistics and search. NaN is the largest value everywhere, as in torch.

use super::cumulative::prefix;
use super::reductions::{index_dtype, keep_dims, require_nonempty};
use crate::args::{Arg, Offset, Scalar, Tensor};
use crate::context::Ctx;
use crate::dtype::{opmath, scalar_name};
use crate::error::{Error, ErrorKind, Result, not_implemented, runtime};
use crate::library::{Item, NUMBERS, Outcome, Parts, beside, word};
use crate::op;
use crate::row::{Layout, Row};
use oxitorch_hlo::{Axes, Binary, DType, Dims, TensorType, Value};

/// The rows of this family.
pub static ROWS: &[Row] = &[
    op!("sort", |c: &Ctx, x: Tensor, dim: i64, descending: bool| sort(c, x, None, dim, descending))
        .layout(Layout::LikeFirst),
    op!("sort.stable", sort).layout(Layout::LikeFirst),
    op!("topk", topk),
    op!("kthvalue", kthvalue).apart(&[0]).place_offsets(place_kth),
    op!("median", |c: &Ctx, x: Tensor| median_all(c, x, false)),
    op!("nanmedian", |c: &Ctx, x: Tensor| median_all(c, x, true)),
    op!("median.dim", |c: &Ctx, x: Tensor, dim: i64, keep: bool| median_dim(c, x, dim, keep, false)),
    op!("nanmedian.dim", |c: &Ctx, x: Tensor, dim: i64, keep: bool| median_dim(c, x, dim, keep, true)),
    op!("mode", mode),
    op!("searchsorted.Tensor", searchsorted),
    op!("searchsorted.Scalar", |c: &Ctx,
                                sequence: Tensor,
                                x: Scalar,
                                out_int32: bool,
                                right: bool,
                                side: Option<String>,
                                sorter: Option<Tensor>| {
        searchsorted(c, sequence, x.tensor(), out_int32, right, side, sorter)
    }),
    op!("bucketize.Tensor", bucketize),
    op!("bucketize.Scalar", |c: &Ctx, x: Scalar, boundaries: Tensor, out_int32: bool, right: bool| {
        bucketize(c, x.tensor(), boundaries, out_int32, right)
    }),
];

/// Elements from which PyTorch's own sort is worth a call: compiled code takes eight times as long for each.
const WORTH_A_CALL: i64 = 1 << 10;

fn is_for_library(c: &Ctx, x: Value) -> bool {
    c.is_worth_a_call(x, &NUMBERS, WORTH_A_CALL)
}

/// One element of each row along `dim` and its position (int64), by PyTorch's own kernel, which does not sort the others.
/// `args` are what it takes before the dimension.
fn library_pick(
    c: &Ctx,
    op: &str,
    x: Value,
    args: &[Item<'_>],
    dim: usize,
    keep: bool,
) -> Option<(Value, Value)> {
    if !is_for_library(c, x) || args.len() > 1 {
        return None;
    }
    // Rows one after another in memory: the kernels copy them, or step from row to row for each element.
    let last = c.rank(x) - 1;
    let order: Dims = (0..=last as i64).filter(|&d| d != dim as i64).chain([dim as i64]).collect();
    let rows = c.transpose(x, &order);
    let shape = c.shape(rows);
    let ty = TensorType::new(c.dtype(x), &shape[..last]);
    let results = [ty.clone(), ty.with_dtype(DType::S64)].map(|ty| Some(Outcome::row_major(ty)));
    let mut all = vec![Item::Tensor(rows)];
    all.extend_from_slice(args);
    all.extend([Item::Int(last as i64), Item::Bool(false)]);
    let cut = beside(&shape, last).map(|d| d as i64);
    let cuts: Vec<i64> = cut.into_iter().chain([word::WHOLE; 4]).take(all.len()).collect();
    let parts = Parts { args: &cuts, results: &[cuts[0]; 2], step: 1 };
    let found = c.call_library_in_parts(op, &all, &results, cut.map(|_| &parts));
    let [Some(values), Some(index)] = found[..] else { return None };
    let dims = [dim as i64];
    let kept = |v| keep_dims(c, v, &c.shape(x), &dims, keep);
    Some((kept(values), kept(index)))
}

/// Values along `dim` in order and the positions (int64) that they came from, by PyTorch's own kernel. Stable; NaN is the
/// largest.
pub(super) fn library_sort(c: &Ctx, x: Value, dim: usize, descending: bool) -> Option<(Value, Value)> {
    if !is_for_library(c, x) {
        return None;
    }
    let ty = c.ty(x);
    let index = TensorType::new(DType::S64, ty.shape.clone());
    let args = [Item::Tensor(x), Item::Bool(true), Item::Int(dim as i64), Item::Bool(descending)];
    let results = [ty, index].map(|ty| Some(Outcome::row_major(ty)));
    let cut = i64::from(dim == 0);
    let parts = Parts { args: &[cut, -1, -1, -1], results: &[cut, cut], step: 1 };
    let parts = (c.rank(x) > 1).then_some(&parts);
    match c.call_library_in_parts("sort.values_stable", &args, &results, parts)[..] {
        [Some(values), Some(index)] => Some((values, index)),
        _ => None,
    }
}

/// Values along `dim` in order and the positions they came from, as `index_dtype` has them. Stable.
pub(super) fn sort_with_index(c: &Ctx, x: Value, dim: usize, descending: bool) -> (Value, Value) {
    if let Some((values, index)) = library_sort(c, x, dim, descending) {
        return (values, c.to(index, index_dtype(c.shape(x)[dim])));
    }
    let index = c.iota_dim(x, index_dtype(c.shape(x)[dim]), dim as i64);
    let float = c.dtype(x).is_float();
    let out = c.sort(&[x, index], dim as i64, true, |b, l, r| {
        let (l, r) = if descending { (r[0], l[0]) } else { (l[0], r[0]) };
        let before = b.lt(l, r);
        if float { b.or(before, b.and(b.is_nan(r), b.not(b.is_nan(l)))) } else { before }
    });
    match out[..] {
        [values, index] => (values, index),
        _ => (x, index),
    }
}

fn no_complex(what: &str, dtype: DType) -> Result<()> {
    if dtype.is_complex() {
        return Err(Error::Type(format!(" {what} does not support complex dtypes on CPU")));
    }
    Ok(())
}

fn sort(c: &Ctx, x: Tensor, _stable: Option<bool>, dim: i64, descending: bool) -> Result<(Value, Value)> {
    no_complex("Sort", x.dtype)?;
    let dim = c.dim(dim, x.rank)?;
    if x.rank == 0 {
        return Ok((x.value, c.scalar_i64(DType::S64, 0)));
    }
    let (values, index) = sort_with_index(c, x.value, dim, descending);
    Ok((values, c.to(index, DType::S64)))
}

fn topk(c: &Ctx, x: Tensor, k: i64, dim: i64, largest: bool, _sorted: bool) -> Result<(Value, Value)> {
    let dim = c.dim(dim, x.rank)?;
    let size = c.shape(x.value).get(dim).copied().unwrap_or(1);
    if k < 0 || k > size {
        return Err(runtime("selected index k out of range"));
    }
    no_complex("topk", x.dtype)?;
    if x.dtype == DType::Pred {
        return Err(Error::NotImplemented("topk does not support bool dtypes on CPU".into()));
    }
    if matches!(x.dtype, DType::U16 | DType::U32 | DType::U64) {
        return Err(not_implemented("topk_cpu", x.dtype));
    }
    if x.rank == 0 {
        return Ok((x.value, c.scalar_i64(DType::S64, 0)));
    }
    if x.dtype.is_float() && opmath(x.dtype) == DType::F32 {
        return Ok(top_k_f32(c, x, k, dim, largest));
    }
    let (values, index) = sort_with_index(c, x.value, dim, largest);
    let first = |v: Value| c.slice_dim(v, dim as i64, 0, k, 1);
    Ok((first(values), c.to(first(index), DType::S64)))
}

/// Through XLA's own top-k, which is far faster than a sort but knows only the largest of float32 in the last dimension.
fn top_k_f32(c: &Ctx, x: Tensor, k: i64, dim: usize, largest: bool) -> (Value, Value) {
    let last = x.rank - 1;
    let wide = c.swap_dims(c.to(x.value, DType::F32), dim as i64, last as i64);
    let key = if largest { wide } else { c.negate(wide) };
    let back = |v: Value| c.swap_dims(v, dim as i64, last as i64);
    if c.config.target.top_k_without_nan {
        // NaN is beyond infinity, so it takes the place of that, and that the place of the largest number, which becomes the
        // one before it.
        let end = |x: f32| c.like(key, f64::from(if largest { x } else { -x }));
        let ends = [f32::INFINITY, f32::MAX, f32::MAX.next_down()].map(end);
        let moved = ends.windows(2).fold(key, |moved, e| c.select(c.eq(key, e[0]), e[1], moved));
        let (_, index) = c.top_k(c.select(c.is_nan(key), ends[0], moved), k);
        let values = c.take_along_dim(wide, index, last as i64);
        return (c.to(back(values), x.dtype), c.to(back(index), DType::S64));
    }
    // It orders NaNs by their sign: positive ones are the largest, negative ones the smallest.
    let nan = f32::NAN.copysign(if largest { 1.0 } else { -1.0 });
    let nan = c.full(c.dense(TensorType::scalar(DType::F32), nan.to_le_bytes().to_vec()), &c.shape(key));
    let key = c.select(c.is_nan(key), nan, key);
    let (values, index) = c.top_k(key, k);
    let values = if largest { values } else { c.negate(values) };
    (c.to(back(values), x.dtype), c.to(back(index), DType::S64))
}

/// The element at sorted position `at` (of the shape of `x` with size 1 at `dim`), and its index.
fn pick(c: &Ctx, sorted: (Value, Value), at: Value, dim: usize, keep: bool) -> (Value, Value) {
    let take = |v: Value| {
        let one = c.take_along_dim(v, at, dim as i64);
        if keep { one } else { c.squeeze(one, &[dim as i64]) }
    };
    (take(sorted.0), c.to(take(sorted.1), DType::S64))
}

fn require_order_statistic(kernel: &str, dtype: DType) -> Result<()> {
    let bare = matches!(dtype, DType::U16 | DType::U32 | DType::U64 | DType::F8E4M3FN | DType::F8E5M2);
    if dtype == DType::Pred || bare || dtype.is_complex() {
        return Err(not_implemented(kernel, dtype));
    }
    Ok(())
}

/// `k` counts from 1; an empty dimension is refused by the lowering.
fn place_kth(args: &[Arg], k: &mut [i64]) -> Result<()> {
    let ([Arg::Tensor(x), _, Arg::Int(dim), _], [k]) = (args, k) else { return Ok(()) };
    let rank = x.ty.shape.len().max(1) as i64;
    let dim = dim.rem_euclid(rank);
    let size = x.ty.shape.get(dim as usize).copied().unwrap_or(1);
    *k -= 1;
    if size > 0 && !(0..size).contains(k) {
        return Err(runtime(format!("kthvalue(): selected number k out of range for dimension {dim}")));
    }
    Ok(())
}

fn kthvalue(c: &Ctx, x: Tensor, k: Offset, dim: i64, keep: bool) -> Result<(Value, Value)> {
    let dim = c.dim(dim, x.rank)?;
    if x.rank > 0 {
        require_nonempty(c, "kthvalue()", x.value, &[dim as i64])?;
    }
    require_order_statistic("kthvalue_cpu", x.dtype)?;
    if x.rank == 0 {
        return Ok((x.value, c.scalar_i64(DType::S64, 0)));
    }
    // It counts from one.
    let number = match k {
        Offset::Known(k) => Item::Int(k + 1),
        Offset::Given(k) => {
            let k = c.to(k, DType::S64);
            Item::Number(c.add(k, c.ones_like(k)))
        }
    };
    if let Some(found) = library_pick(c, "kthvalue.values", x.value, &[number], dim, keep) {
        return Ok(found);
    }
    let (values, index) = sort_with_index(c, x.value, dim, false);
    let at = |v: Value| {
        let one = match k {
            Offset::Known(k) => c.slice_dim(v, dim as i64, k, k + 1, 1),
            Offset::Given(k) => {
                let mut sizes = c.shape(v);
                sizes[dim] = 1;
                c.dynamic_slice(v, &super::shape::starts(c, v, dim as i64, k), &sizes)
            }
        };
        if keep { one } else { c.squeeze(one, &[dim as i64]) }
    };
    Ok((at(values), c.to(at(index), DType::S64)))
}

/// The lower median along `dim`. NaNs are skipped, or else the first of them is the median.
fn median_along(c: &Ctx, x: Value, dim: usize, keep: bool, skip_nan: bool) -> (Value, Value) {
    let op = if skip_nan { "nanmedian.dim_values" } else { "median.dim_values" };
    if let Some(found) = library_pick(c, op, x, &[], dim, keep) {
        return found;
    }
    let shape = c.shape(x);
    let n = shape[dim];
    let dims = [dim as i64];
    let sorted = sort_with_index(c, x, dim, false);
    let dtype = c.dtype(sorted.1);
    let one = super::reductions::kept_shape(&shape, &dims);
    let number = |i: i64| c.full(c.scalar_i64(dtype, i), &one);
    let mut at = number((n - 1) / 2);
    if c.dtype(x).is_float() {
        let nans = c.reshape(c.reduce_sum(c.to(c.is_nan(x), dtype), &dims), &one);
        let numbers = c.subtract(number(n), nans);
        at = if skip_nan {
            let last = c.maximum(c.subtract(numbers, number(1)), number(0));
            c.divide(last, number(2))
        } else {
            c.select(c.eq(nans, number(0)), at, numbers)
        };
    }
    pick(c, sorted, at, dim, keep)
}

fn median_all(c: &Ctx, x: Tensor, skip_nan: bool) -> Result<Value> {
    require_order_statistic("median_cpu", x.dtype)?;
    let n = c.numel(x.value);
    if n == 0 {
        // torch converts NaN to integers here, which gives the lowest one.
        let nothing = if x.dtype.is_float() { c.scalar_f64(x.dtype, f64::NAN) } else { c.min_value(x.dtype) };
        return Ok(nothing);
    }
    Ok(median_along(c, c.reshape(x.value, &[n]), 0, false, skip_nan).0)
}

fn median_dim(c: &Ctx, x: Tensor, dim: i64, keep: bool, skip_nan: bool) -> Result<(Value, Value)> {
    let dim = c.dim(dim, x.rank)?;
    if x.rank > 0 {
        require_nonempty(c, "median()", x.value, &[dim as i64])?;
    }
    require_order_statistic("median_out", x.dtype)?;
    if x.rank == 0 {
        return Ok((x.value, c.scalar_i64(DType::S64, 0)));
    }
    Ok(median_along(c, x.value, dim, keep, skip_nan))
}

/// The most frequent value, the smallest of several, and its last position.
fn mode(c: &Ctx, x: Tensor, dim: i64, keep: bool) -> Result<(Value, Value)> {
    let dim = c.dim(dim, x.rank)?;
    if x.rank == 0 {
        return Ok((x.value, c.scalar_i64(DType::S64, 0)));
    }
    require_nonempty(c, "mode()", x.value, &[dim as i64])?;
    if x.dtype.is_complex() {
        return Err(not_implemented("mode_cpu", x.dtype));
    }
    if let Some(found) = library_pick(c, "mode.values", x.value, &[], dim, keep) {
        return Ok(found);
    }
    let shape = c.shape(x.value);
    let (values, index) = sort_with_index(c, x.value, dim, false);
    let dtype = c.dtype(index);
    let position = c.iota(TensorType::new(dtype, shape.clone()), dim as i64);
    let before = c.pad_dim(values, c.scalar_like(values, 0.0), dim as i64, 1, -1);
    let zero = c.zeros_like(position);
    let starts = c.or(c.ne(values, before), c.eq(position, zero));
    // The start of the run that each element belongs to, hence the length of the run so far.
    let start = prefix(c, Binary::Maximum, c.select(starts, position, zero), c.min_value(dtype), dim);
    let (_, at) = c.argmax(c.subtract(position, start), dim as i64, dtype);
    let at = keep_dims(c, at, &shape, &[dim as i64], true);
    Ok(pick(c, (values, index), at, dim, keep))
}

/// Number of elements of each sorted row of `sequence` \[rows, n\] that come before each of `x` \[rows, m\].
pub(super) fn lower_bound(c: &Ctx, sequence: Value, x: Value, right: bool) -> Value {
    if !c.is_outline() {
        return searched(c, sequence, x, right, None);
    }
    // It takes as many steps as the size needs.
    let axes = Axes {
        operands: vec!["rn".into(), "rm".into()],
        results: vec!["rm".into()],
        first: "n".into(),
        used: "n".into(),
        ..Axes::default()
    };
    let name = format!("lower bound, right: {right}");
    let types = [c.ty(x).with_dtype(DType::S64)];
    let made = c.deferred(name, &[sequence, x], &types, axes, move |c, x, used| {
        let found = searched(c, x[0], x[1], right, used.first().copied().flatten());
        Ok(vec![c.to(found, DType::S64)])
    });
    made.map_or(x, |made| made[0])
}

/// The same, of the elements of each row that are in use: the first ones.
fn searched(c: &Ctx, sequence: Value, x: Value, right: bool, used: Option<Value>) -> Value {
    let (rows, n) = (c.shape(sequence)[0], c.shape(sequence)[1]);
    let shape = c.shape(x);
    let dtype = index_dtype(rows.saturating_mul(n + 1));
    let number = |i: i64| c.full(c.scalar_i64(dtype, i), &shape);
    if rows * n == 0 {
        return number(0);
    }
    let flat = c.reshape(sequence, &[rows * n]);
    let row = c.multiply(c.iota(TensorType::new(dtype, shape.clone()), 0), number(n));
    let all = used.map(|used| c.full(c.reduce_sum(c.to(used, dtype), &[0]), &shape));
    let (mut start, mut end) = (number(0), all.unwrap_or_else(|| number(n)));
    // A range of n + 1 candidates halves in every step.
    for _ in 0..i64::BITS - n.leading_zeros() {
        let middle = c.divide(c.add(start, end), number(2));
        let at = c.take_dim(flat, c.add(row, c.minimum(middle, number(n - 1))), 0);
        let stop = if right { c.gt(at, x) } else { c.ge(at, x) };
        let open = c.lt(start, end);
        let up = c.and(open, c.not(stop));
        start = c.select(up, c.add(middle, number(1)), start);
        end = c.select(c.and(open, stop), middle, end);
    }
    start
}

fn check_search(c: &Ctx, sequence: Tensor, x: Tensor, sorter: Option<Tensor>) -> Result<()> {
    let op = "torch.searchsorted():";
    let (s, v) = (c.shape(sequence.value), c.shape(x.value));
    if x.rank == 0 && sequence.rank != 1 {
        let (rank, n) = (sequence.rank, c.numel(x.value));
        return Err(runtime(format!(
            "{op} input value can be a scalar only when boundaries tensor dimension is 1, but we got boundaries tensor \
             dim({rank}) and input value's dim(0) numel({n})"
        )));
    }
    let Some((_, batch)) = s.split_last() else {
        return Err(runtime(format!(
            "{op} boundaries tensor should have positive dimension, but got 0 dimension"
        )));
    };
    if sequence.rank != 1 && (s.len() != v.len() || *batch != v[..v.len() - 1]) {
        return Err(runtime(format!(
            "{op} boundaries tensor should be 1 dimension or the first N-1 dimensions of boundaries tensor and input \
             value tensor must match, but we got boundaries tensor {s:?} and input value tensor {v:?}"
        )));
    }
    let Some(sorter) = sorter else { return Ok(()) };
    let got = c.shape(sorter.value);
    if got != s {
        // torch's own text has no space before "and".
        return Err(runtime(format!(
            "{op} boundary and sorter must have the same size, but got boundary tensor {s:?}and got sorter tensor {got:?}"
        )));
    }
    if sorter.dtype != DType::S64 {
        let got = scalar_name(sorter.dtype);
        return Err(runtime(format!("{op} sorter must be a tensor of long dtype but got dtype {got}")));
    }
    Ok(())
}

fn searchsorted(
    c: &Ctx,
    sequence: Tensor,
    x: Tensor,
    out_int32: bool,
    right: bool,
    side: Option<String>,
    sorter: Option<Tensor>,
) -> Result<Value> {
    let right = match side.as_deref() {
        None | Some("right") => right || side.is_some(),
        Some("left") if right => {
            return Err(runtime(
                "torch.searchsorted(): side and right can't be set to opposites, got side of left while right was True",
            ));
        }
        Some("left") => false,
        Some(other) => {
            let message = format!("torch.searchsorted(): side can only be 'left' or 'right' but got {other}");
            return Err(runtime(message));
        }
    };
    check_search(c, sequence, x, sorter)?;
    let dtype = c.result_type(&[sequence, x])?;
    if dtype.is_complex() || dtype == DType::Pred {
        return Err(not_implemented("searchsorted_out_cpu", dtype));
    }
    let mut sorted = c.to(sequence.value, dtype);
    if let Some(sorter) = sorter {
        let last = sequence.rank - 1;
        let size = c.shape(sorted)[last];
        c.check(ErrorKind::Runtime, "torch.searchsorted(): sorter index out of range", || {
            let end = c.full(c.scalar_i64(DType::S64, size), &c.shape(sorter.value));
            c.all(c.and(c.ge(sorter.value, c.zeros_like(sorter.value)), c.lt(sorter.value, end)))
        });
        sorted = c.take_along_dim(sorted, c.to(sorter.value, index_dtype(size)), last as i64);
    }
    let (shape, numel) = (c.shape(sorted), c.numel(x.value));
    let n = shape[shape.len() - 1];
    let rows: i64 = shape[..shape.len() - 1].iter().product();
    let per_row = if rows == 0 { 0 } else { numel / rows };
    let found = lower_bound(
        c,
        c.reshape(sorted, &[rows, n]),
        c.reshape(c.to(x.value, dtype), &[rows, per_row]),
        right,
    );
    let out = if out_int32 { DType::S32 } else { DType::S64 };
    Ok(c.to(c.reshape(found, &c.shape(x.value)), out))
}

fn bucketize(c: &Ctx, x: Tensor, boundaries: Tensor, out_int32: bool, right: bool) -> Result<Value> {
    if boundaries.rank != 1 {
        let rank = boundaries.rank;
        return Err(runtime(format!("boundaries tensor must be 1 dimension, but got dim({rank})")));
    }
    searchsorted(c, boundaries, x, out_int32, right, None, None)
}
