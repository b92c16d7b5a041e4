use super::indexing::running_sum;
use super::scatter::{move_to, or_behind, scatter_rows};
use super::sorting::library_sort;
use crate::context::{Ctx, broadcast_shapes};
use crate::dtype::{Category, category};
use crate::error::{ErrorKind, Result, not_implemented, runtime, unsupported};
use crate::out::{self, OutDtype};
use crate::row::Row;
use crate::{Layout, op};
use oxitorch_hlo::{Binary, CompareKind, DType, Dims, Direction, TensorType, Value};

/// The rows of this family: results whose size depends on values. The size is the last argument; the rows behind a dot
/// compute it.
pub static ROWS: &[Row] = &[
    op!("nonzero", nonzero)
        .apart(&[0])
        .layout(Layout::ColumnMajor)
        .sized_by("nonzero.count")
        .out_dtype(OutDtype::Checked(out::positions)),
    op!("nonzero.count", |c: &Ctx, x: Value| count(c, c.to(x, DType::Pred))).internal(),
    op!("nonzero_static", nonzero_static),
    op!("masked_select", masked_select).apart(&[0, 1]).sized_by("masked_select.count"),
    op!("masked_select.count", masked_select_count).internal(),
    op!("repeat_interleave.Tensor", repeat_interleave).sized_by("repeat_interleave.count"),
    op!("repeat_interleave.count", repeat_interleave_count).internal(),
    op!("bincount", bincount).sized_by("bincount.count"),
    op!("bincount.count", bincount_count).internal(),
    op!("_unique2", unique2).sized_by("_unique2.count"),
    op!("_unique2.count", |c: &Ctx, x: Value, _sorted: bool, _inverse: bool, _counts: bool| {
        Groups::sorted(c, &[flatten(c, x)])?.count(c)
    })
    .internal(),
    op!("_unique", |c: &Ctx, x: Value, sorted: bool, inverse: bool, n: i64| {
        let (values, inverse, _) = unique2(c, x, sorted, inverse, false, n)?;
        Ok::<_, crate::Error>((values, inverse))
    })
    .sized_by("_unique.count"),
    op!("_unique.count", |c: &Ctx, x: Value, _sorted: bool, _inverse: bool| {
        Groups::sorted(c, &[flatten(c, x)])?.count(c)
    })
    .internal(),
    op!("unique_consecutive", unique_consecutive).sized_by("unique_consecutive.count").layout(Layout::Slices),
    op!("unique_consecutive.count", unique_consecutive_count).internal(),
    op!("unique_dim", unique_dim).sized_by("unique_dim.count").layout(Layout::Slices),
    op!("unique_dim.count", unique_dim_count).internal(),
    op!("unique_dim_consecutive", unique_dim_consecutive)
        .sized_by("unique_dim_consecutive.count")
        .layout(Layout::Slices),
    op!("unique_dim_consecutive.count", |c: &Ctx, x: Value, dim: i64, inverse: bool, counts: bool| {
        unique_consecutive_count(c, x, inverse, counts, Some(dim))
    })
    .internal(),
];

fn constant(c: &Ctx, x: i64, shape: &[i64]) -> Value {
    c.full(c.scalar_i64(DType::S64, x), shape)
}

fn positions(c: &Ctx, n: i64) -> Value {
    c.iota(TensorType::new(DType::S64, [n].as_slice()), 0)
}

fn flatten(c: &Ctx, x: Value) -> Value {
    c.reshape(x, &[c.numel(x)])
}

/// How many elements of a pred tensor are true: 0-d s64.
pub(super) fn count(c: &Ctx, mask: Value) -> Value {
    let all: Dims = (0..c.rank(mask) as i64).collect();
    c.reduce_sum(c.to(mask, DType::S64), &all)
}

/// The positions of the first `n` true elements of a pred vector, in order; `fill` where there are fewer.
pub(super) fn true_positions(c: &Ctx, mask: Value, n: i64, fill: i64) -> Value {
    let size = c.numel(mask);
    let ones = c.to(mask, DType::S64);
    let before = c.subtract(running_sum(c, ones), ones);
    // Updates that point behind the end are dropped.
    let to = or_behind(c, mask, before, n.max(size));
    move_to(c, constant(c, fill, &[n]), to, positions(c, size))
}

/// Flat positions as one coordinate for each dimension of `shape`: `[n, rank]`.
fn coordinates(c: &Ctx, flat: Value, shape: &[i64]) -> Value {
    let n = c.numel(flat);
    if shape.is_empty() || n == 0 {
        return constant(c, 0, &[n, shape.len() as i64]);
    }
    let mut rest = flat;
    let mut columns = Vec::new();
    for &size in shape.iter().rev() {
        let size = constant(c, size, &[n]);
        columns.push(c.reshape(c.remainder(rest, size), &[n, 1]));
        rest = c.divide(rest, size);
    }
    columns.reverse();
    c.concatenate(&columns, 1)
}

fn nonzero(c: &Ctx, x: Value, n: i64) -> Value {
    let mask = flatten(c, c.to(x, DType::Pred));
    coordinates(c, true_positions(c, mask, n, 0), &c.shape(x))
}

fn nonzero_static(c: &Ctx, x: Value, size: i64, fill_value: i64) -> Result<Value> {
    if size < 0 {
        return Err(runtime("nonzero_static: 'size' must be an non-negative integer"));
    }
    let mask = flatten(c, c.to(x, DType::Pred));
    let at = true_positions(c, mask, size, -1);
    let found = coordinates(c, at, &c.shape(x));
    let shape = c.shape(found);
    let there = c.broadcast_in_dim(c.ge(at, constant(c, 0, &[size])), &shape, &[0]);
    Ok(c.select(there, found, constant(c, fill_value, &shape)))
}

fn aligned_mask(c: &Ctx, x: Value, mask: Value) -> Result<(Value, Value)> {
    if c.dtype(mask) != DType::Pred {
        return Err(runtime("masked_select: expected BoolTensor for mask"));
    }
    let shape = broadcast_shapes(&[c.shape(mask), c.shape(x)])?;
    Ok((flatten(c, c.expand(x, &shape)?), flatten(c, c.expand(mask, &shape)?)))
}

fn masked_select(c: &Ctx, x: Value, mask: Value, n: i64) -> Result<Value> {
    let (x, mask) = aligned_mask(c, x, mask)?;
    if n == 0 {
        return Ok(c.full(c.scalar_i64(c.dtype(x), 0), &[0]));
    }
    Ok(c.take_dim(x, true_positions(c, mask, n, 0), 0))
}

fn masked_select_count(c: &Ctx, x: Value, mask: Value) -> Result<Value> {
    Ok(count(c, aligned_mask(c, x, mask)?.1))
}

const NEGATIVE_REPEATS: &str = "repeats can not be negative";

fn check_repeats(c: &Ctx, repeats: Value) -> Result<()> {
    if c.rank(repeats) != 1 {
        return Err(runtime("repeat_interleave only accept 1D vector as repeat"));
    }
    if !matches!(c.dtype(repeats), DType::S32 | DType::S64) {
        return Err(not_implemented("repeat_interleave_cpu", c.dtype(repeats)));
    }
    c.check(ErrorKind::Runtime, NEGATIVE_REPEATS, || c.all(c.ge(repeats, c.zeros_like(repeats))));
    Ok(())
}

/// Position `i` of the result belongs to as many entries as end at or before it.
fn repeat_interleave(c: &Ctx, repeats: Value, output_size: Option<i64>, n: i64) -> Result<Value> {
    check_repeats(c, repeats)?;
    if n < 0 {
        return Err(runtime(NEGATIVE_REPEATS));
    }
    if output_size.is_some_and(|size| size != n) {
        return Err(runtime("allocated size does not match required size"));
    }
    let ends = running_sum(c, c.to(repeats, DType::S64));
    let ones = c.full(c.scalar_i64(DType::S64, 1), &c.shape(ends));
    let marks = scatter_rows(c, constant(c, 0, &[n]), 0, ends, ones, Some(Binary::Add));
    Ok(c.to(running_sum(c, marks), c.dtype(repeats)))
}

fn repeat_interleave_count(c: &Ctx, repeats: Value, _output_size: Option<i64>) -> Result<Value> {
    check_repeats(c, repeats)?;
    Ok(c.reduce_sum(c.to(repeats, DType::S64), &[0]))
}

const BINCOUNT: &str = "bincount only supports 1-d non-negative integral inputs.";

fn check_bincount(c: &Ctx, x: Value, weights: Option<Value>, minlength: i64) -> Result<()> {
    if !c.dtype(x).is_integral() {
        return Err(not_implemented("bincount_cpu", c.dtype(x)));
    }
    if minlength < 0 {
        return Err(runtime("minlength should be >= 0"));
    }
    if c.rank(x) != 1 {
        return Err(runtime(BINCOUNT));
    }
    if weights.is_some_and(|w| c.shape(w) != c.shape(x)) {
        return Err(runtime("weights should be 1-d and have the same length as input"));
    }
    c.check(ErrorKind::Runtime, BINCOUNT, || c.all(c.ge(x, c.zeros_like(x))));
    Ok(())
}

fn bincount(c: &Ctx, x: Value, weights: Option<Value>, minlength: i64, n: i64) -> Result<Value> {
    check_bincount(c, x, weights, minlength)?;
    let dtype = match weights.map(|w| c.dtype(w)) {
        None => DType::S64,
        Some(DType::F32) => DType::F32,
        Some(_) => DType::F64,
    };
    let updates = match weights {
        Some(w) => c.to(w, dtype),
        None => c.full(c.scalar_i64(dtype, 1), &c.shape(x)),
    };
    let zeros = c.full(c.scalar_i64(dtype, 0), &[n]);
    Ok(scatter_rows(c, zeros, 0, c.to(x, DType::S64), updates, Some(Binary::Add)))
}

fn bincount_count(c: &Ctx, x: Value, weights: Option<Value>, minlength: i64) -> Result<Value> {
    check_bincount(c, x, weights, minlength)?;
    let least = c.scalar_i64(DType::S64, minlength);
    if c.numel(x) == 0 {
        return Ok(least);
    }
    let highest = c.reduce_max(c.to(x, DType::S64), &[0]);
    Ok(c.maximum(c.add(highest, c.scalar_i64(DType::S64, 1)), least))
}

/// Rows in runs of equal ones.
struct Groups {
    /// Where each row was before sorting, if it was sorted.
    origin: Option<Value>,
    /// Pred: the row begins a run.
    first: Value,
}

/// The order of one [`sortable`] column.
fn precedes(b: &oxitorch_hlo::Builder, x: Value, y: Value) -> Value {
    let kind = if b.dtype(x).is_float() { CompareKind::TotalOrder } else { CompareKind::Natural };
    b.compare_as(x, y, Direction::Lt, kind)
}

impl Groups {
    /// Sorts rows given as columns, the first column counting most.
    fn sorted(c: &Ctx, columns: &[Value]) -> Result<Groups> {
        let Some(&first) = columns.first() else {
            return Err(unsupported("unique of rows without elements"));
        };
        if columns.iter().any(|&v| c.dtype(v).is_complex()) {
            return Err(not_implemented("unique", c.dtype(first)));
        }
        if let [column] = *columns
            && !c.dtype(column).is_float()
            && let Some((values, origin)) = library_sort(c, column, 0, false)
        {
            return Ok(Groups { origin: Some(origin), ..Groups::consecutive(c, &[values])? });
        }
        let mut operands: Vec<Value> = columns.iter().map(|&v| sortable(c, v)).collect();
        operands.push(positions(c, c.numel(first)));
        let k = columns.len();
        let mut sorted = c.sort(&operands, 0, true, |b, x, y| {
            let mut less = precedes(b, x[k - 1], y[k - 1]);
            for i in (0..k - 1).rev() {
                less = b.or(precedes(b, x[i], y[i]), b.and(b.eq(x[i], y[i]), less));
            }
            less
        });
        let origin = sorted.pop();
        Ok(Groups { origin, ..Groups::consecutive(c, &sorted)? })
    }

    /// Takes rows as they come.
    fn consecutive(c: &Ctx, columns: &[Value]) -> Result<Groups> {
        let Some(&column) = columns.first() else {
            return Err(unsupported("unique of rows without elements"));
        };
        let n = c.numel(column);
        if n == 0 {
            return Ok(Groups { origin: None, first: c.full(c.scalar_bool(false), &[0]) });
        }
        let differs = |v: Value| c.ne(c.slice_dim(v, 0, 1, n, 1), c.slice_dim(v, 0, 0, n - 1, 1));
        let later = columns.iter().map(|&v| differs(v)).reduce(|a, b| c.or(a, b)).unwrap_or(column);
        let first = c.pad_dim(later, c.scalar_bool(true), 0, 1, 0);
        Ok(Groups { origin: None, first })
    }

    /// How many runs there are.
    fn count(&self, c: &Ctx) -> Result<Value> {
        Ok(count(c, self.first))
    }

    /// Where the `n` runs' first rows were originally.
    fn firsts(&self, c: &Ctx, n: i64) -> Value {
        let at = true_positions(c, self.first, n, 0);
        match self.origin {
            Some(origin) if n > 0 => c.take_dim(origin, at, 0),
            _ => at,
        }
    }

    /// For each original row the number of its run, and for each run how many rows it has.
    fn numbers(&self, c: &Ctx, n: i64) -> (Value, Value) {
        let size = c.numel(self.first);
        let run = c.subtract(running_sum(c, c.to(self.first, DType::S64)), constant(c, 1, &[size]));
        let inverse = match self.origin {
            Some(origin) => move_to(c, constant(c, 0, &[size]), origin, run),
            None => run,
        };
        let ones = constant(c, 1, &[size]);
        (inverse, scatter_rows(c, constant(c, 0, &[n]), 0, run, ones, Some(Binary::Add)))
    }
}

/// One NaN and one zero, so that the total order puts NaN last and zeros together; bool as numbers.
fn sortable(c: &Ctx, x: Value) -> Value {
    match category(c.dtype(x)) {
        Category::Float => {
            let zero = c.zeros_like(x);
            let x = c.select(c.eq(x, zero), zero, x);
            c.select(c.is_nan(x), c.like(x, f64::NAN), x)
        }
        Category::Bool => c.to(x, DType::U8),
        _ => x,
    }
}

fn none(c: &Ctx) -> Value {
    constant(c, 0, &[0])
}

fn unique2(
    c: &Ctx,
    x: Value,
    _sorted: bool,
    inverse: bool,
    counts: bool,
    n: i64,
) -> Result<(Value, Value, Value)> {
    let flat = flatten(c, x);
    let groups = Groups::sorted(c, &[flat])?;
    let values = pick(c, flat, groups.firsts(c, n));
    let (number, count) = groups.numbers(c, n);
    let number = if inverse { c.reshape(number, &c.shape(x)) } else { none(c) };
    Ok((values, number, if counts { count } else { none(c) }))
}

/// Rows of the first dimension; none if there are none to pick.
fn pick(c: &Ctx, x: Value, at: Value) -> Value {
    let mut shape = c.shape(x);
    if c.numel(at) == 0 || shape.contains(&0) {
        shape[0] = c.numel(at);
        return c.full(c.scalar_i64(c.dtype(x), 0), &shape);
    }
    c.take_dim(x, at, 0)
}

/// More columns than this are not compared one by one.
const COLUMNS_MAX: i64 = 64;

/// The slices of a dimension as rows, column by column; and the tensor with that dimension first.
fn rows_along(c: &Ctx, x: Value, dim: i64) -> Result<(Vec<Value>, Value, usize)> {
    let dim = c.dim(dim, c.rank(x))?;
    let x = super::indexing::at_least_1d(c, x);
    let front = move_dim(c, x, dim, 0);
    let rows = c.shape(front)[0];
    let width: i64 = c.shape(front)[1..].iter().product();
    if width > COLUMNS_MAX || width == 0 {
        return Err(unsupported(format!("unique of rows with {width} elements")));
    }
    let flat = c.reshape(front, &[rows, width]);
    Ok(((0..width).map(|i| c.index_dim(flat, 1, i)).collect(), front, dim))
}

/// `torch.movedim`: the other dimensions stay in their order.
fn move_dim(c: &Ctx, x: Value, from: usize, to: usize) -> Value {
    let mut order: Dims = (0..c.rank(x) as i64).collect();
    let dim = order.remove(from);
    order.insert(to, dim);
    c.transpose(x, &order)
}

/// Along a dimension torch gives inverse and counts though nobody asked.
fn unique_rows(c: &Ctx, groups: &Groups, (front, dim): (Value, usize), n: i64) -> (Value, Value, Value) {
    let values = move_dim(c, pick(c, front, groups.firsts(c, n)), 0, dim);
    let (number, count) = groups.numbers(c, n);
    (values, number, count)
}

fn unique_dim(
    c: &Ctx,
    x: Value,
    dim: i64,
    _sorted: bool,
    _inverse: bool,
    _counts: bool,
    n: i64,
) -> Result<(Value, Value, Value)> {
    let (columns, front, dim) = rows_along(c, x, dim)?;
    let groups = Groups::sorted(c, &columns)?;
    Ok(unique_rows(c, &groups, (front, dim), n))
}

fn unique_dim_count(
    c: &Ctx,
    x: Value,
    dim: i64,
    _sorted: bool,
    _inverse: bool,
    _counts: bool,
) -> Result<Value> {
    Groups::sorted(c, &rows_along(c, x, dim)?.0)?.count(c)
}

fn unique_consecutive(
    c: &Ctx,
    x: Value,
    inverse: bool,
    counts: bool,
    dim: Option<i64>,
    n: i64,
) -> Result<(Value, Value, Value)> {
    if let Some(dim) = dim.filter(|_| c.rank(x) != 1) {
        return unique_dim_consecutive(c, x, dim, inverse, counts, n);
    }
    let flat = flatten(c, x);
    let groups = Groups::consecutive(c, &[flat])?;
    let (values, number, count) = unique_rows(c, &groups, (flat, 0), n);
    let number = if inverse { c.reshape(number, &c.shape(x)) } else { none(c) };
    Ok((values, number, if counts { count } else { none(c) }))
}

fn unique_dim_consecutive(
    c: &Ctx,
    x: Value,
    dim: i64,
    _inverse: bool,
    _counts: bool,
    n: i64,
) -> Result<(Value, Value, Value)> {
    let (columns, front, dim) = rows_along(c, x, dim)?;
    let groups = Groups::consecutive(c, &columns)?;
    Ok(unique_rows(c, &groups, (front, dim), n))
}

fn unique_consecutive_count(
    c: &Ctx,
    x: Value,
    _inverse: bool,
    _counts: bool,
    dim: Option<i64>,
) -> Result<Value> {
    match dim {
        Some(dim) => Groups::consecutive(c, &rows_along(c, x, dim)?.0)?.count(c),
        None => Groups::consecutive(c, &[flatten(c, x)])?.count(c),
    }
}
