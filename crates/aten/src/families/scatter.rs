use super::indexing::{assert_range, at_least_1d, integer_index, rank_in_mask, wrap};
use crate::args::{Alpha, Scalar, Tensor};
use crate::context::Ctx;
use crate::dtype::{scalar_name, shape_text};
use crate::error::{ErrorKind, Result, index as index_error, runtime};
use crate::library::{FLOATS, TARGET};
use crate::row::Row;
use crate::{Layout, op};
use oxitorch_hlo::{Binary, CustomCall, DType, Dims, ScatterDims, ScatterFlags, TensorType, Value};

const EXPANDED: &str = "Use of index_fill_ on expanded tensors is deprecated. Please clone() the tensor before performing this \
     operation. This also applies to advanced indexing e.g. tensor[mask] = scalar";

/// The rows of this family.
pub static ROWS: &[Row] = &[
    op!("scatter.src", scatter_src).apart(&[2, 3]),
    op!("scatter.value", scatter_value).apart(&[2]).check_numbers(|n| n.fits(3)),
    op!("scatter.reduce", scatter_src_reduce).apart(&[2, 3]),
    op!("scatter.value_reduce", scatter_value_reduce).apart(&[2]),
    op!("scatter_add", scatter_add).apart(&[2, 3]),
    op!("scatter_reduce.two", scatter_reduce).apart(&[2, 3]),
    op!("index_add", index_add).apart(&[2, 3]),
    op!("index_copy", index_copy).apart(&[2, 3]),
    op!("index_fill.int_Scalar", index_fill_scalar)
        .apart(&[2])
        .fills()
        .warns_of_expanded(EXPANDED)
        .takes_host_tensor()
        .layout(Layout::LikeFirst)
        .check_numbers(|n| n.fits(3)),
    op!("index_fill.int_Tensor", index_fill_tensor)
        .apart(&[2])
        .fills()
        .warns_of_expanded(EXPANDED)
        .takes_host_tensor()
        .layout(Layout::LikeFirst),
    op!("index_reduce", index_reduce).apart(&[2, 3]),
    op!("masked_scatter", masked_scatter),
    op!("masked_scatter_backward", masked_scatter_backward),
];

/// How an update meets the element that is there; `None` overwrites it.
type Combine = Option<Binary>;

fn scatter_with(c: &Ctx, x: Value, index: Value, updates: Value, dims: &ScatterDims, how: Combine) -> Value {
    scatter_flagged(c, x, index, updates, dims, how, ScatterFlags::default())
}

fn scatter_flagged(
    c: &Ctx,
    x: Value,
    index: Value,
    updates: Value,
    dims: &ScatterDims,
    how: Combine,
    flags: ScatterFlags,
) -> Value {
    let out = c.scatter(&[x], index, &[updates], dims, flags, |b, old, new| {
        vec![match how {
            Some(op) => b.binary(op, old[0], new[0]),
            None => new[0],
        }]
    });
    out[0]
}

/// The host function that adds up elements where an index says. Its operands are the index, the elements, and what they
/// are added to, unless that is zeros.
pub const SCATTER_ADD: &str = "scatter_add";

/// Elements from which a call is worth what it costs.
const WORTH_A_CALL: i64 = 1 << 12;
/// What is there before is copied, and compiled code adds to it in place: it may be so many times the elements.
const MOST_COPIED: i64 = 4;

/// Adds elements \[outer, m, inner\] to `x` \[outer, n, inner\] along the middle, where an index
/// \[rows, m, inner or 1\] says, each row of which is of `outer / rows` places; if the host does it.
pub(super) fn add_by_host(c: &Ctx, x: Value, index: Value, updates: Value) -> Option<Value> {
    let zeros = c.is_zeros(x);
    let cheap = zeros || c.numel(x) <= c.numel(updates).saturating_mul(MOST_COPIED);
    let known = matches!(c.dtype(index), DType::S32 | DType::S64);
    if !known || !cheap || !c.is_worth_a_call(updates, &FLOATS, WORTH_A_CALL) {
        return None;
    }
    let operands = [index, updates, x];
    let operands = if zeros { &operands[..2] } else { &operands };
    let config = format!("fn = \"{SCATTER_ADD}\"");
    let call = CustomCall { target: TARGET.into(), backend_config: config, ..CustomCall::default() };
    c.custom_call(operands, &[c.ty(x)], call).first().copied()
}

/// The same along `dim`, with an index of the rank of `x` or a vector.
fn add_along(c: &Ctx, x: Value, dim: usize, index: Value, updates: Value) -> Option<Value> {
    let flat = |v: Value| {
        let shape = c.shape(v);
        let sizes =
            [&shape[..dim], &shape[dim..=dim], &shape[dim + 1..]].map(|part| part.iter().product::<i64>());
        c.reshape(v, &sizes)
    };
    let index = if c.rank(index) == 1 { c.reshape(index, &[1, c.numel(index), 1]) } else { flat(index) };
    add_by_host(c, flat(x), index, flat(updates)).map(|sum| c.reshape(sum, &c.shape(x)))
}

/// Dimension numbers for updates of whole rows along `dim`, one for each entry of an index vector.
fn rows_dims(dim: usize, rank: usize) -> ScatterDims {
    let dim = dim as i64;
    ScatterDims {
        update_window_dims: (0..rank as i64).filter(|&d| d != dim).collect(),
        inserted_window_dims: Dims::from_slice(&[dim]),
        scatter_dims_to_operand_dims: Dims::from_slice(&[dim]),
        index_vector_dim: 1,
        ..ScatterDims::default()
    }
}

/// Rows of `updates` into rows `index` of `x` along `dim`.
pub(super) fn scatter_rows(
    c: &Ctx,
    x: Value,
    dim: usize,
    index: Value,
    updates: Value,
    how: Combine,
) -> Value {
    if c.numel(updates) == 0 {
        return x;
    }
    let sum = if how == Some(Binary::Add) { add_along(c, x, dim, index, updates) } else { None };
    sum.unwrap_or_else(|| scatter_with(c, x, index, updates, &rows_dims(dim, c.rank(x)), how))
}

/// Elements of a vector to places of another, each to its own: no two of `index` are equal, so that no compiler has to care
/// who comes first. What lies out of bounds is left out.
pub(super) fn move_to(c: &Ctx, x: Value, index: Value, elements: Value) -> Value {
    if c.numel(elements) == 0 {
        return x;
    }
    let flags = ScatterFlags { unique_indices: true, ..ScatterFlags::default() };
    scatter_flagged(c, x, index, elements, &rows_dims(0, 1), None, flags)
}

/// `x` where `mask` holds, and `end` plus its position elsewhere: places that are all different if those of `x` are, and
/// below `end`.
pub(super) fn or_behind(c: &Ctx, mask: Value, x: Value, end: i64) -> Value {
    let n = c.numel(x);
    let behind = c.iota(TensorType::new(c.dtype(x), [n].as_slice()), 0);
    c.select(mask, x, c.add(behind, c.like(behind, end as f64)))
}

/// One update for each entry of `index`, which has the rank of `x`: `x[index[i][j]][j] = updates[i][j]`.
fn scatter_elements(c: &Ctx, x: Value, dim: usize, index: Value, updates: Value, how: Combine) -> Value {
    let (shape, touched) = (c.shape(x), c.shape(index));
    if touched.contains(&0) {
        return x;
    }
    let others: Dims = (0..shape.len() as i64).filter(|&d| d as usize != dim).collect();
    let dims = ScatterDims {
        inserted_window_dims: Dims::from_slice(&[dim as i64]),
        input_batching_dims: others.clone(),
        scatter_indices_batching_dims: others,
        scatter_dims_to_operand_dims: Dims::from_slice(&[dim as i64]),
        index_vector_dim: shape.len() as i64,
        ..ScatterDims::default()
    };
    // Batching dimensions must agree, so only the part of x that the indices can reach takes part.
    let mut limit = touched;
    limit[dim] = shape[dim];
    let ones = Dims::from_elem(1, shape.len());
    let part = c.slice(x, &Dims::from_elem(0, shape.len()), &limit, &ones);
    let sum = if how == Some(Binary::Add) { add_along(c, part, dim, index, updates) } else { None };
    let done = sum.unwrap_or_else(|| scatter_with(c, part, index, updates, &dims, how));
    // What is all of it at one size may be a part at another.
    if limit == shape && !c.is_outline() {
        return done;
    }
    let origin = vec![c.scalar_i64(DType::S64, 0); shape.len()];
    c.dynamic_update_slice(x, done, &origin)
}

/// The arguments of the scatter family, checked, with 0-d tensors as vectors.
struct Scatter {
    x: Value,
    dim: usize,
    index: Value,
    /// Cut to the shape of the index.
    src: Option<Value>,
    /// The shape of the result.
    shape: Dims,
}

impl Scatter {
    fn new(c: &Ctx, x: Value, dim: i64, index: Value, src: Option<Value>) -> Result<Scatter> {
        if c.numel(index) > 0 {
            integer_index(c, index, "scatter(): Expected dtype int32/int64 for index")?;
        }
        let shape = c.shape(x);
        let dim = c.dim(dim, shape.len())?;
        if let Some(s) = src
            && c.dtype(s) != c.dtype(x)
        {
            return Err(runtime("scatter(): Expected self.dtype to be equal to src.dtype"));
        }
        let (x, index) = (at_least_1d(c, x), at_least_1d(c, index));
        let src = src.map(|s| at_least_1d(c, s));
        let (xs, is) = (c.shape(x), c.shape(index));
        if is.contains(&0) {
            return Ok(Scatter { x, dim, index, src: None, shape });
        }
        if xs.len() != is.len() {
            return Err(runtime("Index tensor must have the same number of dimensions as self tensor"));
        }
        let ss = src.map(|s| c.shape(s));
        if ss.as_ref().is_some_and(|s| s.len() != is.len()) {
            return Err(runtime("Index tensor must have the same number of dimensions as src tensor"));
        }
        let beyond = |d: usize| d != dim && is[d] > xs[d] || ss.as_ref().is_some_and(|s| is[d] > s[d]);
        if (0..xs.len()).any(beyond) {
            let (i, x) = (shape_text(&is), shape_text(&xs));
            let src = ss
                .map_or(String::new(), |s| format!(" and to be no larger size than src {}", shape_text(&s)));
            let text =
                format!("Expected index {i} to be no larger than self {x} apart from dimension {dim}{src}");
            return Err(runtime(text));
        }
        let message = format!("index is out of bounds for dimension {dim} with size {}", xs[dim]);
        assert_range(c, ErrorKind::Runtime, &message, index, 0..xs[dim], 1);
        let ones = Dims::from_elem(1, is.len());
        let src = src.map(|s| c.slice(s, &Dims::from_elem(0, is.len()), &is, &ones));
        Ok(Scatter { x, dim, index, src, shape })
    }

    /// With a number in place of a source.
    fn filled(c: &Ctx, x: Value, dim: i64, index: Value, value: Scalar) -> Result<Scatter> {
        let mut s = Scatter::new(c, x, dim, index, None)?;
        s.src = Some(c.number_like(value, c.dtype(x), &c.shape(s.index)));
        Ok(s)
    }

    fn run(&self, c: &Ctx, how: Combine) -> Value {
        let Some(src) = self.src else { return c.reshape(self.x, &self.shape) };
        c.reshape(scatter_elements(c, self.x, self.dim, self.index, src, how), &self.shape)
    }
}

fn scatter_src(c: &Ctx, x: Value, dim: i64, index: Value, src: Value) -> Result<Value> {
    Ok(Scatter::new(c, x, dim, index, Some(src))?.run(c, None))
}

fn scatter_value(c: &Ctx, x: Value, dim: i64, index: Value, value: Scalar) -> Result<Value> {
    Ok(Scatter::filled(c, x, dim, index, value)?.run(c, None))
}

/// `reduce="add"` and `reduce="multiply"`.
fn old_reduction(name: &str) -> Result<Combine> {
    match name {
        "add" => Ok(Some(Binary::Add)),
        "multiply" => Ok(Some(Binary::Multiply)),
        _ => Err(runtime("reduce argument must be either add or multiply.")),
    }
}

fn scatter_src_reduce(
    c: &Ctx,
    x: Value,
    dim: i64,
    index: Value,
    src: Value,
    reduce: String,
) -> Result<Value> {
    let how = old_reduction(&reduce)?;
    Ok(Scatter::new(c, x, dim, index, Some(src))?.run(c, how))
}

fn scatter_value_reduce(
    c: &Ctx,
    x: Value,
    dim: i64,
    index: Value,
    value: Scalar,
    reduce: String,
) -> Result<Value> {
    let how = old_reduction(&reduce)?;
    Ok(Scatter::filled(c, x, dim, index, value)?.run(c, how))
}

fn scatter_add(c: &Ctx, x: Value, dim: i64, index: Value, src: Value) -> Result<Value> {
    Ok(Scatter::new(c, x, dim, index, Some(src))?.run(c, Some(Binary::Add)))
}

/// A reduction by name, with the value that changes nothing.
struct Reduction {
    op: Binary,
    mean: bool,
}

impl Reduction {
    fn new(name: &str) -> Option<Reduction> {
        let (op, mean) = match name {
            "sum" => (Binary::Add, false),
            "mean" => (Binary::Add, true),
            "prod" => (Binary::Multiply, false),
            "amax" => (Binary::Maximum, false),
            "amin" => (Binary::Minimum, false),
            _ => return None,
        };
        Some(Reduction { op, mean })
    }

    fn neutral(&self, c: &Ctx, dtype: DType) -> Value {
        match self.op {
            Binary::Multiply => c.scalar_i64(dtype, 1),
            Binary::Maximum => c.min_value(dtype),
            Binary::Minimum => c.max_value(dtype),
            _ => c.scalar_i64(dtype, 0),
        }
    }

    /// Reduces `src` into `x`; `put(x, updates, how)` does one scatter.
    fn apply(
        &self,
        c: &Ctx,
        x: Value,
        src: Value,
        include_self: bool,
        put: impl Fn(Value, Value, Combine) -> Value,
    ) -> Value {
        let dtype = c.dtype(x);
        let same = |v: Value| c.full(v, &c.shape(src));
        let start = if include_self { x } else { put(x, same(self.neutral(c, dtype)), None) };
        let total = put(start, src, Some(self.op));
        if !self.mean {
            return total;
        }
        let count = if include_self { c.ones_like(x) } else { c.zeros_like(x) };
        let count = put(count, same(c.scalar_i64(dtype, 1)), Some(Binary::Add));
        // Places that nothing was written to keep their value.
        let count = at_least_one(c, count);
        if dtype.is_integral() { floor_divide(c, total, count) } else { c.divide(total, count) }
    }
}

/// A count, but never zero. Complex counts have no imaginary part and no order.
fn at_least_one(c: &Ctx, count: Value) -> Value {
    let one = c.ones_like(count);
    c.select(c.eq(count, c.zeros_like(count)), one, count)
}

/// Integer division that rounds down; `y` is positive.
fn floor_divide(c: &Ctx, x: Value, y: Value) -> Value {
    let quotient = c.divide(x, y);
    let exact = c.eq(c.multiply(quotient, y), x);
    let down = c.and(c.lt(x, c.zeros_like(x)), c.not(exact));
    c.subtract(quotient, c.convert(down, c.dtype(x)))
}

fn scatter_reduce(
    c: &Ctx,
    x: Value,
    dim: i64,
    index: Value,
    src: Value,
    reduce: String,
    include_self: bool,
) -> Result<Value> {
    let Some(reduction) = Reduction::new(&reduce) else {
        let text = "reduce argument must be either sum, prod, mean, amax or amin, got";
        return Err(runtime(format!("{text} {reduce}")));
    };
    let s = Scatter::new(c, x, dim, index, Some(src))?;
    let Some(src) = s.src else { return Ok(x) };
    let put = |x: Value, updates: Value, how: Combine| scatter_elements(c, x, s.dim, s.index, updates, how);
    Ok(c.reshape(reduction.apply(c, s.x, src, include_self, put), &s.shape))
}

/// The arguments of the `index_*` family: whole rows along a dimension.
struct Rows {
    x: Value,
    dim: usize,
    index: Value,
    shape: Dims,
}

impl Rows {
    fn new(c: &Ctx, x: Value, dim: i64, index: Value) -> Result<Rows> {
        let shape = c.shape(x);
        let dim = c.dim(dim, shape.len())?;
        Ok(Rows { x: at_least_1d(c, x), dim, index: at_least_1d(c, index), shape })
    }

    fn size(&self, c: &Ctx) -> i64 {
        c.shape(self.x)[self.dim]
    }

    /// Elements of a row.
    fn each(&self, c: &Ctx) -> i64 {
        c.numel(self.x) / self.size(c).max(1)
    }

    fn run(&self, c: &Ctx, updates: Value, how: Combine) -> Value {
        c.reshape(scatter_rows(c, self.x, self.dim, self.index, updates, how), &self.shape)
    }
}

/// The checks that `index_add` and `index_reduce` share.
fn check_rows(c: &Ctx, name: &str, r: &Rows, source: Value) -> Result<Value> {
    let dtype = scalar_name(c.dtype(r.index));
    let is = c.shape(r.index);
    if is.len() > 1 {
        return Err(index_error(format!(
            "{name}(): Index is supposed to be a vector, but got dim: {} with type: {dtype} and size: {}",
            is.len(),
            shape_text(&is)
        )));
    }
    integer_index(c, r.index, &format!("{name}(): Expected dtype int32/int64 for index but got: {dtype}"))?;
    let (a, b) = (scalar_name(c.dtype(r.x)), scalar_name(c.dtype(source)));
    if a != b {
        let text = format!("{name}(): self ({a}) and source ({b}) must have the same scalar type");
        return Err(runtime(text));
    }
    let source = at_least_1d(c, source);
    let (ss, xs) = (c.shape(source), c.shape(r.x));
    let rows = ss.get(r.dim).copied().unwrap_or(1);
    if is[0] != rows {
        let dim = r.dim;
        return Err(runtime(format!(
            "{name}(): Number of indices ({}) should be equal to source.size(dim): ({rows}), for dim: {dim}",
            is[0]
        )));
    }
    if ss.len() != xs.len() || (0..xs.len()).any(|d| d != r.dim && xs[d] != ss[d]) {
        return Err(runtime(format!(
            "source tensor shape must match self tensor shape, excluding the specified dimension. Got self.shape = {} \
             source.shape = {}",
            shape_text(&xs),
            shape_text(&ss)
        )));
    }
    Ok(source)
}

fn index_add(c: &Ctx, x: Value, dim: i64, index: Value, source: Value, alpha: Alpha) -> Result<Value> {
    let r = Rows::new(c, x, dim, index)?;
    let source = check_rows(c, "index_add_", &r, source)?;
    let message = format!("index out of range in self: dimension {} has size {}", r.dim, r.size(c));
    assert_range(c, ErrorKind::Index, &message, r.index, 0..r.size(c), r.each(c));
    Ok(r.run(c, c.times(source, alpha), Some(Binary::Add)))
}

fn index_reduce(
    c: &Ctx,
    x: Value,
    dim: i64,
    index: Value,
    source: Value,
    reduce: String,
    include_self: bool,
) -> Result<Value> {
    let Some(reduction) = Reduction::new(&reduce).filter(|_| reduce != "sum") else {
        let text = "index_reduce(): Expected reduce to be one of prod, mean, amax or amin but got";
        return Err(runtime(format!("{text} {reduce}.")));
    };
    let r = Rows::new(c, x, dim, index)?;
    let source = check_rows(c, "index_reduce_", &r, source)?;
    assert_range(c, ErrorKind::Index, "index out of range in self", r.index, 0..r.size(c), r.each(c));
    let put = |x: Value, updates: Value, how: Combine| scatter_rows(c, x, r.dim, r.index, updates, how);
    Ok(c.reshape(reduction.apply(c, r.x, source, include_self, put), &r.shape))
}

fn index_copy(c: &Ctx, x: Value, dim: i64, index: Value, source: Value) -> Result<Value> {
    let r = Rows::new(c, x, dim, index)?;
    let (xr, sr) = (c.rank(x), c.rank(source));
    if c.rank(index) > 1 {
        let text = format!("index_copy_(): Index should have dimension 1 or 0 (got {})", c.rank(index));
        return Err(index_error(text));
    }
    let count = c.numel(index);
    if sr == 0 && count != 1 {
        let text = "index_copy_(): When source is scalar, index should have one element (got";
        return Err(index_error(format!("{text} {count})")));
    }
    if sr != xr && sr != 0 && xr != 0 {
        return Err(index_error(format!(
            "index_copy_(): When source and destination are not scalars, their dimensionality must match. Source \
             dimensionality ({sr}), destination dimensionality ({xr})"
        )));
    }
    let (a, b) = (scalar_name(c.dtype(x)), scalar_name(c.dtype(source)));
    integer_index(c, index, "index_copy_(): Expected a long tensor for index")?;
    if a != b {
        return Err(runtime(format!(
            "index_copy_(): self and source expected to have the same dtype, but got (self) {a} and (source) {b}"
        )));
    }
    let source = at_least_1d(c, source);
    let ss = c.shape(source);
    let slice = |shape: &[i64]| {
        let mut s = Dims::from_slice(shape);
        s.remove(r.dim);
        s
    };
    let (to, from) = (slice(&c.shape(r.x)), slice(&ss));
    if to != from {
        let list = |s: &[i64]| s.iter().map(i64::to_string).collect::<Vec<_>>().join(" ");
        let (to, from, dim) = (list(&to), list(&from), r.dim);
        return Err(runtime(format!(
            "index_copy_(): Source/destination tensor must have same slice shapes. Destination slice shape: {to} at \
             dimension {dim} and source slice shape: {from} at dimension 0."
        )));
    }
    if count != ss[r.dim] {
        let text = "index_copy_(): Number of indices";
        let rows = ss[r.dim];
        return Err(index_error(format!("{text} ({count}) should be equal to source.size(dim) ({rows})")));
    }
    let message =
        format!("index_copy_(): index is out of bounds for dimension {} with size {}", r.dim, r.size(c));
    assert_range(c, ErrorKind::Index, &message, r.index, 0..r.size(c), r.each(c));
    Ok(r.run(c, source, None))
}

/// Fills rows with a 0-d value of the dtype of `x`.
fn index_fill(c: &Ctx, x: Value, dim: i64, index: Value, value: Value) -> Result<Value> {
    if c.rank(index) > 1 {
        return Err(runtime("Index has to be a vector/scalar"));
    }
    if c.dtype(index) != DType::S64 {
        return Err(index_error("index_fill_(): Expected dtype int64 for index."));
    }
    let mut r = Rows::new(c, x, dim, index)?;
    let size = r.size(c);
    let message = format!("index is out of bounds for dimension {} with size {size}", r.dim);
    assert_range(c, ErrorKind::Index, &message, r.index, -size..size, r.each(c));
    r.index = wrap(c, r.index, size);
    let mut shape = c.shape(r.x);
    shape[r.dim] = c.numel(index);
    Ok(r.run(c, c.full(value, &shape), None))
}

fn index_fill_scalar(c: &Ctx, x: Value, dim: i64, index: Value, value: Scalar) -> Result<Value> {
    index_fill(c, x, dim, index, c.number(value, c.dtype(x)))
}

fn index_fill_tensor(c: &Ctx, x: Value, dim: i64, index: Value, value: Tensor) -> Result<Value> {
    if value.rank != 0 {
        return Err(runtime(format!(
            "index_fill_ only supports a 0-dimensional value tensor, but got tensor with {} dimension(s).",
            value.rank
        )));
    }
    index_fill(c, x, dim, index, c.to(value.value, c.dtype(x)))
}

/// The true places of the mask take the elements of `source` in order.
fn masked_scatter(c: &Ctx, x: Value, mask: Value, source: Value) -> Result<Value> {
    let (a, b) = (scalar_name(c.dtype(x)), scalar_name(c.dtype(source)));
    if a != b {
        let text = "masked_scatter: expected self and source to have same dtypes but got";
        return Err(runtime(format!("{text}{a} and {b}")));
    }
    if c.dtype(mask) != DType::Pred {
        let dtype = scalar_name(c.dtype(mask));
        let text = format!("masked_scatter_ only supports boolean masks, but got mask with dtype {dtype}");
        return Err(runtime(text));
    }
    let shape = crate::context::broadcast_shapes(&[c.shape(x), c.shape(mask)])?;
    let (x, mask) = (c.expand(x, &shape)?, c.expand(mask, &shape)?);
    let count = c.numel(source);
    c.check(ErrorKind::Runtime, "Number of elements of source < number of ones in mask", || {
        let all: Dims = (0..shape.len() as i64).collect();
        c.le(c.reduce_sum(c.to(mask, DType::S64), &all), c.scalar_i64(DType::S64, count))
    });
    if count == 0 || shape.contains(&0) {
        return Ok(x);
    }
    let picked = c.take_dim(c.reshape(source, &[count]), rank_in_mask(c, mask), 0);
    Ok(c.select(mask, picked, x))
}

/// The gradient of the source: the masked elements in order, then zeros.
fn masked_scatter_backward(c: &Ctx, grad: Value, mask: Value, sizes: Dims) -> Result<Value> {
    let count: i64 = sizes.iter().product();
    let mask = c.expand(mask, &c.shape(grad))?;
    let n = c.numel(grad);
    let flat = |v: Value| c.reshape(v, &[n]);
    let at = or_behind(c, flat(mask), flat(rank_in_mask(c, mask)), count.max(n));
    let zeros = c.full(c.scalar_i64(c.dtype(grad), 0), &[count]);
    let out = move_to(c, zeros, at, flat(grad));
    Ok(c.reshape(out, &sizes))
}
