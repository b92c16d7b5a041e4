use crate::args::Tensor;
use crate::context::{Ctx, broadcast_shapes};
use crate::dtype::{scalar_name, shape_text};
use crate::error::{ErrorKind, Result, index as index_error, runtime, unsupported};
use crate::row::Row;
use crate::{Layout, op};
use oxitorch_hlo::{Binary, DType, Dims, GatherDims, ScatterDims, ScatterFlags, Value, Window};
use std::ops::Range;

const EXPANDED: &str = "Use of index_put_ on expanded tensors is deprecated. Please clone() the tensor before performing this \
                        operation. This also applies to advanced indexing e.g. tensor[indices] = tensor";

/// The rows of this family.
pub static ROWS: &[Row] = &[
    op!("index.Tensor", index).layout(Layout::Indexed),
    op!("index_put", index_put).apart(&[1, 2]).fills().warns_of_expanded(EXPANDED).layout(Layout::LikeFirst),
    op!("_index_put_impl", index_put_impl)
        .apart(&[1, 2])
        .fills()
        .warns_of_expanded(EXPANDED)
        .layout(Layout::LikeFirst),
    op!("index_select", index_select).apart(&[0, 2]),
    op!("gather", gather).apart(&[0]).iterated(),
    op!("take", take).apart(&[0, 1]),
    op!("put", put).apart(&[1, 2]).layout(Layout::LikeFirst),
];

/// Asserts that every index, which moves `each` elements, lies in a range.
pub(super) fn assert_range(
    c: &Ctx,
    kind: ErrorKind,
    message: &str,
    index: Value,
    range: Range<i64>,
    each: i64,
) {
    let Range { start: low, end: high } = range;
    c.assert_beside((index, each), kind, message, || {
        let bound = |x: i64| c.full(c.scalar_i64(c.dtype(index), x), &c.shape(index));
        c.all(c.and(c.ge(index, bound(low)), c.lt(index, bound(high))))
    });
}

/// Negative indices count from the end.
pub(super) fn wrap(c: &Ctx, index: Value, size: i64) -> Value {
    let zero = c.zeros_like(index);
    let from_end = c.add(index, c.full(c.scalar_i64(c.dtype(index), size), &c.shape(index)));
    c.select(c.lt(index, zero), from_end, index)
}

/// A tensor of zeros for results without elements, which need no gather.
fn nothing(c: &Ctx, dtype: DType, shape: &[i64]) -> Value {
    c.full(c.scalar_i64(dtype, 0), shape)
}

/// int32 and int64; what else torch calls an index it says in `message`.
pub(super) fn integer_index(c: &Ctx, index: Value, message: &str) -> Result<()> {
    if matches!(c.dtype(index), DType::S32 | DType::S64) { Ok(()) } else { Err(runtime(message)) }
}

fn is_mask(t: &Tensor) -> bool {
    matches!(t.dtype, DType::Pred | DType::U8)
}

/// Index tensors of one shape, and the dimensions they index.
struct Picks {
    /// s64 `[.., n]`: the index vectors.
    vectors: Value,
    /// The indexed dimensions, ascending.
    dims: Dims,
    /// The shape that the indices broadcast to.
    shape: Dims,
    /// Where that shape stands in the result.
    at: usize,
}

impl Picks {
    /// The result of `x[..]`.
    fn result(&self, x: &[i64]) -> Dims {
        let rest = |i: &usize| !self.dims.contains(&(*i as i64));
        let mut out: Dims = (0..x.len()).filter(rest).map(|i| x[i]).collect();
        out.insert_many(self.at, self.shape.iter().copied());
        out
    }

    /// The dimensions of the result that come from `x`.
    fn offsets(&self, rank: usize) -> Dims {
        let (n, k) = (self.shape.len(), rank - self.dims.len() + self.shape.len());
        (0..k).filter(|i| !(self.at..self.at + n).contains(i)).map(|i| i as i64).collect()
    }
}

/// Checks indices and brings them to one shape and non-negative values; `None` where nothing is indexed.
fn picks(c: &Ctx, x: &[i64], indices: &[Option<Tensor>]) -> Result<Option<Picks>> {
    let given: Vec<(usize, Tensor)> =
        indices.iter().enumerate().filter_map(|(i, t)| t.map(|t| (i, t))).collect();
    if given.len() > x.len() || indices.len() > x.len() {
        return Err(index_error(format!(
            "too many indices for tensor of dimension {} (got {})",
            x.len(),
            indices.len()
        )));
    }
    let (Some(first), Some(last)) = (given.first(), given.last()) else { return Ok(None) };
    let shapes: Vec<Dims> = given.iter().map(|(_, t)| c.shape(t.value)).collect();
    let shape = broadcast_shapes(&shapes).map_err(|_| {
        let list: Vec<String> = shapes.iter().map(|s| shape_text(s)).collect();
        let list = list.join(", ");
        index_error(format!(
            "shape mismatch: indexing tensors could not be broadcast together with shapes {list}"
        ))
    })?;
    let mut column = Dims::from_slice(&shape);
    column.push(1);
    let mut columns = Vec::new();
    let indexed: i64 = given.iter().map(|&(dim, _)| x[dim]).product();
    let each = x.iter().product::<i64>() / indexed.max(1);
    for &(dim, t) in &given {
        let size = x[dim];
        if size == 0 && !shape.contains(&0) {
            return Err(index_error("index is out of bounds for dimension with size 0"));
        }
        let message = format!("index is out of bounds for dimension {dim} with size {size}");
        assert_range(c, ErrorKind::Index, &message, t.value, -size..size, each);
        let index = wrap(c, c.to(t.value, DType::S64), size);
        columns.push(c.reshape(c.expand(index, &shape)?, &column));
    }
    let adjacent = last.0 - first.0 + 1 == given.len();
    Ok(Some(Picks {
        vectors: c.concatenate(&columns, shape.len() as i64),
        dims: given.iter().map(|(i, _)| *i as i64).collect(),
        at: if adjacent { first.0 } else { 0 },
        shape,
    }))
}

/// A boolean mask stands for as many dimensions as it has; its shape must be theirs.
fn check_masks(c: &Ctx, x: &[i64], indices: &[Option<Tensor>]) -> Result<()> {
    let mut dim = 0;
    for (i, t) in indices.iter().enumerate() {
        let Some(t) = t else {
            dim += 1;
            continue;
        };
        if !is_mask(t) {
            if !matches!(t.dtype, DType::S32 | DType::S64) {
                return Err(index_error("tensors used as indices must be long, int, byte or bool tensors"));
            }
            dim += 1;
            continue;
        }
        let mask = c.shape(t.value);
        for (k, &size) in mask.iter().enumerate() {
            if x.get(dim + k).is_some_and(|n| *n != size) {
                return Err(index_error(format!(
                    "The shape of the mask {} at index {i} does not match the shape of the indexed tensor {} at index {}",
                    shape_text(&mask),
                    shape_text(x),
                    dim + k
                )));
            }
        }
        dim += mask.len();
    }
    if dim > x.len() {
        return Err(index_error(format!(
            "too many indices for tensor of dimension {} (got {})",
            x.len(),
            indices.len()
        )));
    }
    Ok(())
}

/// `x[i, :, j]`. How many elements a mask picks is not known here: the caller turns masks into indices first.
fn index(c: &Ctx, x: Value, indices: Vec<Option<Tensor>>) -> Result<Value> {
    let shape = c.shape(x);
    check_masks(c, &shape, &indices)?;
    if indices.iter().flatten().any(is_mask) {
        return Err(unsupported("boolean index"));
    }
    let Some(p) = picks(c, &shape, &indices)? else { return Ok(x) };
    let result = p.result(&shape);
    if result.contains(&0) {
        return Ok(nothing(c, c.dtype(x), &result));
    }
    let mut sizes = shape.clone();
    for &d in &p.dims {
        sizes[d as usize] = 1;
    }
    let dims = GatherDims {
        offset_dims: p.offsets(shape.len()),
        collapsed_slice_dims: p.dims.clone(),
        start_index_map: p.dims.clone(),
        index_vector_dim: p.shape.len() as i64,
        ..GatherDims::default()
    };
    Ok(c.gather(x, p.vectors, &dims, &sizes, false))
}

fn index_put(
    c: &Ctx,
    x: Value,
    indices: Vec<Option<Tensor>>,
    values: Value,
    accumulate: bool,
) -> Result<Value> {
    let shape = c.shape(x);
    if c.dtype(x) != c.dtype(values) {
        return Err(runtime(format!(
            "Index put requires the source and destination dtypes match, got {} for the destination and {} for the \
             source.",
            scalar_name(c.dtype(x)),
            scalar_name(c.dtype(values))
        )));
    }
    check_masks(c, &shape, &indices)?;
    let given: Vec<(usize, &Tensor)> =
        indices.iter().enumerate().filter_map(|(i, t)| t.as_ref().map(|t| (i, t))).collect();
    match given.as_slice() {
        [(at, mask)] if is_mask(mask) => return put_masked(c, x, *at, mask, values, accumulate),
        _ if given.iter().any(|(_, t)| is_mask(t)) => return Err(unsupported("boolean index")),
        _ => {}
    }
    let Some(p) = picks(c, &shape, &indices)? else {
        let values = broadcast_values(c, values, &shape)?;
        return Ok(if accumulate { c.add(x, values) } else { values });
    };
    let result = p.result(&shape);
    let values = broadcast_values(c, values, &result)?;
    if result.contains(&0) {
        return Ok(x);
    }
    let dims = ScatterDims {
        update_window_dims: p.offsets(shape.len()),
        inserted_window_dims: p.dims.clone(),
        scatter_dims_to_operand_dims: p.dims.clone(),
        index_vector_dim: p.shape.len() as i64,
        ..ScatterDims::default()
    };
    let out = c.scatter(&[x], p.vectors, &[values], &dims, ScatterFlags::default(), |b, old, new| {
        vec![if accumulate { b.add(old[0], new[0]) } else { new[0] }]
    });
    Ok(out[0])
}

fn index_put_impl(
    c: &Ctx,
    x: Value,
    indices: Vec<Option<Tensor>>,
    values: Value,
    accumulate: bool,
    _unsafe: bool,
) -> Result<Value> {
    index_put(c, x, indices, values, accumulate)
}

fn broadcast_values(c: &Ctx, values: Value, shape: &[i64]) -> Result<Value> {
    c.expand(values, shape).map_err(|_| value_mismatch(&c.shape(values), shape))
}

fn value_mismatch(values: &[i64], result: &[i64]) -> crate::Error {
    runtime(format!(
        "shape mismatch: value tensor of shape {} cannot be broadcast to indexing result of shape {}",
        shape_text(values),
        shape_text(result)
    ))
}

/// `x[:, mask] = values` without knowing how many elements the mask picks: each picked place reads its own row of
/// `values`, whose number is the count of picked places before it.
fn put_masked(c: &Ctx, x: Value, at: usize, mask: &Tensor, values: Value, accumulate: bool) -> Result<Value> {
    let (shape, masked) = (c.shape(x), c.shape(mask.value));
    let pred = c.to(mask.value, DType::Pred);
    let after = shape.len() - at - masked.len();
    let given = c.shape(values);
    // The picked dimension of `values`, if it has one, is the one with `after` dimensions behind it.
    let picked = given.len().checked_sub(after + 1);
    let spread = match picked {
        Some(d) if given[d] != 1 => pick_rows(c, pred, values, d)?,
        Some(d) => {
            let mut ones = given.clone();
            ones.remove(d);
            ones.insert_many(d, masked.iter().map(|_| 1));
            c.reshape(values, &ones)
        }
        None => values,
    };
    let spread = c.expand(spread, &shape).map_err(|_| value_mismatch(&given, &shape))?;
    let dims: Dims = (at as i64..(at + masked.len()) as i64).collect();
    let pred = c.broadcast_in_dim(pred, &shape, &dims);
    let new = if accumulate { c.add(x, spread) } else { spread };
    Ok(c.select(pred, new, x))
}

/// Rows of `values` (along `dim`) in the order of the true elements of `mask`, in place of that dimension.
fn pick_rows(c: &Ctx, mask: Value, values: Value, dim: usize) -> Result<Value> {
    let rows = c.shape(values)[dim];
    let message =
        format!("shape mismatch: value tensor has {rows} rows, the mask picks another number of elements");
    c.check(ErrorKind::Runtime, message, || {
        let all: Dims = (0..c.rank(mask) as i64).collect();
        c.eq(c.reduce_sum(c.to(mask, DType::S64), &all), c.scalar_i64(DType::S64, rows))
    });
    if rows == 0 {
        let mut shape = c.shape(values);
        shape.remove(dim);
        shape.insert_many(dim, c.shape(mask).iter().map(|_| 1));
        return Ok(nothing(c, c.dtype(values), &shape));
    }
    Ok(c.take_dim(values, rank_in_mask(c, mask), dim as i64))
}

/// How many elements of a mask are true before each one, in row-major order; s64 of the mask's shape.
pub(super) fn rank_in_mask(c: &Ctx, mask: Value) -> Value {
    let shape = c.shape(mask);
    let ones = c.to(c.reshape(mask, &[c.numel(mask)]), DType::S64);
    let before = c.subtract(running_sum(c, ones), ones);
    c.reshape(before, &shape)
}

/// Inclusive running sum of a vector.
pub(super) fn running_sum(c: &Ctx, x: Value) -> Value {
    let n = c.numel(x);
    if n == 0 {
        return x;
    }
    // XLA knows this window as a scan and does not compute it as written.
    let mut window = Window::new(&[n]);
    window.padding[0] = (n - 1, 0);
    c.reduce_window_with(Binary::Add, x, c.scalar_i64(c.dtype(x), 0), &window)
}

/// A tensor with at least one dimension: torch lets 0-d tensors pass for vectors of one element.
pub(super) fn at_least_1d(c: &Ctx, x: Value) -> Value {
    if c.rank(x) == 0 { c.reshape(x, &[1]) } else { x }
}

fn index_select(c: &Ctx, x: Value, dim: i64, index: Value) -> Result<Value> {
    if c.rank(index) > 1 {
        return Err(index_error("index_select(): Index is supposed to be a vector"));
    }
    integer_index(c, index, "index_select(): Expected dtype int32 or int64 for index")?;
    let rank = c.rank(x);
    let dim = c.dim(dim, rank)?;
    let count = c.numel(index);
    if rank == 0 && count != 1 {
        let text = format!("index_select(): Index to scalar can have only 1 value, got {count} value(s)");
        return Err(runtime(text));
    }
    let (full, index) = (at_least_1d(c, x), at_least_1d(c, index));
    let mut shape = c.shape(full);
    let size = std::mem::replace(&mut shape[dim], count);
    let each = c.numel(x) / size.max(1);
    assert_range(c, ErrorKind::Index, "index out of range in self", index, 0..size, each);
    if shape.contains(&0) {
        return Ok(nothing(c, c.dtype(x), &shape));
    }
    if size == 0 {
        return Err(runtime("index_select(): self indexing axis dim should be positive"));
    }
    let out = c.take_dim(full, index, dim as i64);
    Ok(if rank == 0 { c.reshape(out, &[]) } else { out })
}

fn gather(c: &Ctx, x: Value, dim: i64, index: Value) -> Result<Value> {
    if c.numel(index) > 0 {
        integer_index(c, index, "gather(): Expected dtype int32/int64 for index")?;
    }
    let (result, dim) = (c.shape(index), c.dim(dim, c.rank(x))?);
    if result.contains(&0) {
        return Ok(nothing(c, c.dtype(x), &result));
    }
    let (full, index) = (at_least_1d(c, x), at_least_1d(c, index));
    let (xs, is) = (c.shape(full), c.shape(index));
    if xs.len() != is.len() {
        return Err(runtime("Index tensor must have the same number of dimensions as input tensor"));
    }
    if let Some(d) = (0..xs.len()).find(|&d| d != dim && is[d] > xs[d]) {
        return Err(runtime(format!(
            "Size does not match at dimension {d} expected index {} to be no larger than self {} apart from dimension \
             {dim}",
            shape_text(&is),
            shape_text(&xs)
        )));
    }
    let message = format!("index is out of bounds for dimension {dim} with size {}", xs[dim]);
    assert_range(c, ErrorKind::Runtime, &message, index, 0..xs[dim], 1);
    if xs[dim] == 0 {
        return Err(runtime(message));
    }
    Ok(c.reshape(c.take_along_dim(full, index, dim as i64), &result))
}

/// Flat indices into a tensor, checked and non-negative.
fn flat_index(c: &Ctx, name: &str, x: Value, index: Value) -> Result<Value> {
    if c.dtype(index) != DType::S64 {
        let dtype = scalar_name(c.dtype(index));
        return Err(runtime(format!("{name}(): Expected a long tensor for index, but got {dtype}")));
    }
    let n = c.numel(x);
    if n == 0 && c.numel(index) != 0 {
        return Err(index_error(format!("{name}(): tried to take from an empty tensor")));
    }
    assert_range(c, ErrorKind::Index, &format!("out of range: tensor has {n} elements"), index, -n..n, 1);
    Ok(wrap(c, index, n))
}

fn take(c: &Ctx, x: Value, index: Value) -> Result<Value> {
    let index = flat_index(c, "take", x, index)?;
    let shape = c.shape(index);
    if shape.contains(&0) {
        return Ok(nothing(c, c.dtype(x), &shape));
    }
    Ok(c.take_dim(c.reshape(x, &[c.numel(x)]), index, 0))
}

fn put(c: &Ctx, x: Value, index: Value, source: Value, accumulate: bool) -> Result<Value> {
    let (a, b) = (scalar_name(c.dtype(x)), scalar_name(c.dtype(source)));
    if a != b {
        return Err(runtime(format!(
            "put_(): self and source expected to have the same dtype, but got self.dtype = {a} and source.dtype = {b}"
        )));
    }
    let (n, m) = (c.numel(source), c.numel(index));
    if n != m {
        return Err(index_error(format!(
            "put_(): Expected source and index to have the same number of elements, but got source.numel() = {n}, \
             index.numel() = {m}"
        )));
    }
    let index = flat_index(c, "put_", x, index)?;
    if m == 0 {
        return Ok(x);
    }
    let dims = ScatterDims {
        inserted_window_dims: Dims::from_slice(&[0]),
        scatter_dims_to_operand_dims: Dims::from_slice(&[0]),
        index_vector_dim: 1,
        ..ScatterDims::default()
    };
    let (flat, updates) = (c.reshape(x, &[c.numel(x)]), c.reshape(source, &[n]));
    let index = c.reshape(index, &[n]);
    let out = c.scatter(&[flat], index, &[updates], &dims, ScatterFlags::default(), |b, old, new| {
        vec![if accumulate { b.add(old[0], new[0]) } else { new[0] }]
    });
    Ok(c.reshape(out[0], &c.shape(x)))
}
