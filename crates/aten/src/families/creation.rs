use crate::args::{Alpha, Const, Integer, NumKind, Number, Scalar, Tensor};
use crate::context::Ctx;
use crate::domain;
use crate::dtype::{Category, category, code, from_code, opmath};
use crate::error::{Result, runtime};
use crate::numbers::{Numbers, fits, show};
use crate::out::OutDtype;
use crate::row::Row;
use crate::{Layout, op};
use oxitorch_hlo::{DType, Dims, TensorType, Value};

/// The rows of this family.
pub static ROWS: &[Row] = &[
    op!("zeros", zeros).fills().out_dtype(OutDtype::Computed),
    op!("ones", |c: &Ctx, size: Dims, dtype: Option<DType>| constant(c, &size, dtype, 1.0))
        .fills()
        .out_dtype(OutDtype::Computed),
    op!("full", full).fills().check_numbers(check_full).out_dtype(OutDtype::Computed),
    op!("scalar_tensor", |c: &Ctx, x: Scalar, dtype: Option<DType>| {
        c.number(x, dtype.unwrap_or(c.config.default_dtype))
    }),
    op!("fill.Scalar", |c: &Ctx, x: Tensor, fill: Scalar| c.number_like(fill, x.dtype, &c.shape(x.value)))
        .fills()
        .layout(Layout::LikeFirst)
        .check_numbers(|n| n.fits(1)),
    op!("fill.Tensor", fill_tensor).fills().layout(Layout::LikeFirst),
    op!("zero", |c: &Ctx, x: Value| c.zeros_like(x)).fills().layout(Layout::LikeFirst),
    op!("arange", |c: &Ctx, end: Scalar, dtype: Option<DType>, n: i64| {
        let dtype = dtype.unwrap_or(natural(c, &[end.kind]));
        progression(c, None, Alpha::One, n, dtype)
    })
    .dtypes(domain::numbers)
    .counted_by(|n| arange_size([Number::Int(0), n.number(0), Number::Int(1)], n.int(1)))
    .out_dtype(OutDtype::Computed)
    .out_by_numel(),
    op!("arange.start", |c: &Ctx, start: Scalar, end: Scalar, dtype: Option<DType>, n: i64| {
        let dtype = dtype.unwrap_or(natural(c, &[start.kind, end.kind]));
        progression(c, Some(start), Alpha::One, n, dtype)
    })
    .dtypes(domain::numbers)
    .counted_by(|n| arange_size([n.number(0), n.number(1), Number::Int(1)], n.int(2)))
    .out_dtype(OutDtype::Computed)
    .out_by_numel(),
    op!("arange.start_step", |c: &Ctx,
                              start: Scalar,
                              end: Scalar,
                              step: Alpha,
                              dtype: Option<DType>,
                              n: i64| {
        let by = if let Alpha::Times(s) = step { s.kind } else { NumKind::Int };
        let dtype = dtype.unwrap_or(natural(c, &[start.kind, end.kind, by]));
        progression(c, Some(start), step, n, dtype)
    })
    .dtypes(domain::numbers)
    .counted_by(|n| arange_size([n.number(0), n.number(1), n.number(2)], n.int(3)))
    .out_dtype(OutDtype::Computed)
    .out_by_numel(),
    op!("linspace", linspace).dtypes(domain::no_bool).out_dtype(OutDtype::Computed).out_by_numel(),
    op!("logspace", logspace).dtypes(domain::no_bool).out_dtype(OutDtype::Computed).out_by_numel(),
    op!("eye", |c: &Ctx, n: i64, dtype: Option<DType>| eye(c, n, n, dtype)).out_dtype(OutDtype::Computed),
    op!("eye.m", eye).out_dtype(OutDtype::Computed),
    op!("tril", |c: &Ctx, x: Value, k: Integer| triangle(c, x, k, "tril")),
    op!("triu", |c: &Ctx, x: Value, k: Integer| triangle(c, x, k, "triu")),
    op!("tril_indices", |c: &Ctx, row: i64, col: i64, k: i64, dtype: Option<DType>| {
        triangle_indices(c, row, col, k, dtype, "tril")
    }),
    op!("triu_indices", |c: &Ctx, row: i64, col: i64, k: i64, dtype: Option<DType>| {
        triangle_indices(c, row, col, k, dtype, "triu")
    }),
];

fn check_size(size: &[i64]) -> Result<()> {
    match size.iter().find(|&&s| s < 0) {
        Some(s) => Err(runtime(format!("Trying to create tensor with negative dimension {s}: {size:?}"))),
        None => Ok(()),
    }
}

fn zeros(c: &Ctx, size: Dims, dtype: Option<DType>) -> Result<Value> {
    if size.iter().any(|&s| s < 0) {
        return Err(runtime("zeros: Dimension size must be non-negative."));
    }
    constant(c, &size, dtype, 0.0)
}

fn constant(c: &Ctx, size: &[i64], dtype: Option<DType>, x: f64) -> Result<Value> {
    check_size(size)?;
    Ok(c.constant(TensorType::new(dtype.unwrap_or(c.config.default_dtype), size), x))
}

/// The dtype that a number alone gives.
fn dtype_of(c: &Ctx, kind: NumKind) -> DType {
    match kind {
        NumKind::Float => c.config.default_dtype,
        NumKind::Complex => c.config.default_dtype.complex(),
        other => other.dtype(),
    }
}

/// The dtype comes last, as its code.
fn check_full(n: &Numbers) -> Result<()> {
    match (n.get(1), n.get(2)) {
        (Some(fill), Some(Number::Int(code))) => from_code(code).map_or(Ok(()), |dtype| fits(fill, dtype)),
        _ => Ok(()),
    }
}

fn full(c: &Ctx, size: Dims, fill: Scalar, dtype: Option<DType>) -> Result<Value> {
    check_size(&size)?;
    Ok(c.number_like(fill, dtype.unwrap_or_else(|| dtype_of(c, fill.kind)), &size))
}

fn fill_tensor(c: &Ctx, x: Tensor, fill: Tensor) -> Result<Value> {
    if fill.rank != 0 {
        return Err(runtime(format!(
            "fill_ only supports 0-dimension value tensor but got tensor with {} dimensions.",
            fill.rank
        )));
    }
    Ok(c.full(c.to(fill.value, x.dtype), &c.shape(x.value)))
}

/// The dtype that numbers alone give: int64 for integers, else the default dtype.
fn natural(c: &Ctx, kinds: &[NumKind]) -> DType {
    let ints = kinds.iter().all(|k| matches!(k, NumKind::Int | NumKind::Bool));
    if ints { DType::S64 } else { c.config.default_dtype }
}

/// How many numbers lie from the first to before the second by steps of the third.
fn arange_size(ends: [Number; 3], dtype: Option<i64>) -> Result<i64> {
    let [first, last, by] = ends.map(|n| Const(n).f64());
    if by == 0.0 {
        return Err(runtime("step must be nonzero"));
    }
    if !by.is_finite() {
        return Err(runtime(format!("step must be finite but got {}", show(by))));
    }
    if !first.is_finite() || !last.is_finite() {
        return Err(runtime(format!("unsupported range: {} -> {}", show(first), show(last))));
    }
    if by > 0.0 && last < first || by < 0.0 && last > first {
        return Err(runtime("upper bound and lower bound inconsistent with step sign"));
    }
    let size = match ends {
        // Exact where float64 is not.
        [Number::Int(first), Number::Int(last), Number::Int(by)]
            if dtype.is_none_or(|d| d == code(DType::S64)) =>
        {
            let [first, last, by] = [first, last, by].map(i128::from);
            ((last - first + by - by.signum()) / by) as f64
        }
        _ => ((last - first) / by).ceil(),
    };
    if size > i64::MAX as f64 {
        return Err(runtime(format!("invalid size, possible overflow: {} -> {}", show(first), show(last))));
    }
    Ok(size as i64)
}

/// `start + step * i`: in integers where all are, else in float64 as torch's CPU kernel does.
fn progression(c: &Ctx, start: Option<Scalar>, step: Alpha, size: i64, dtype: DType) -> Value {
    let float = |s: Scalar| matches!(s.kind, NumKind::Float | NumKind::Complex);
    let floats = start.is_some_and(float) || matches!(step, Alpha::Times(s) if float(s));
    let compute = match category(dtype) {
        Category::Int => dtype,
        Category::Float if floats => DType::F64,
        _ => DType::S64,
    };
    let i = c.iota(TensorType::new(compute, [size].as_slice()), 0);
    let scaled = c.times(i, step);
    let y = start.map_or(scaled, |s| c.add(scaled, c.number_like(s, compute, &[size])));
    c.to(y, dtype)
}

/// The dtype of linspace, and the one it is computed in.
fn space_dtypes(
    c: &Ctx,
    start: Scalar,
    end: Scalar,
    steps: i64,
    dtype: Option<DType>,
) -> Result<(DType, DType)> {
    if steps < 0 {
        return Err(runtime("number of steps must be non-negative"));
    }
    let complex = [start, end].iter().any(|s| s.kind == NumKind::Complex);
    let default = c.config.default_dtype;
    let dtype = dtype.unwrap_or(if complex { default.complex() } else { default });
    Ok((dtype, if category(dtype) <= Category::Int { DType::F64 } else { opmath(dtype) }))
}

/// From both ends toward the middle, so that both are exact. For integers the ends are integers too.
fn spaced(c: &Ctx, start: Scalar, end: Scalar, steps: i64, target: DType, dtype: DType) -> Value {
    let round = category(target) == Category::Int;
    let put = |x: Scalar| c.full(c.to(if round { c.number(x, target) } else { x.value }, dtype), &[steps]);
    let [first, last] = [put(start), put(end)];
    if steps <= 1 {
        return first;
    }
    let i = c.iota(TensorType::new(DType::S64, [steps].as_slice()), 0);
    let position = |v| c.to(v, dtype);
    let count = c.like(first, (steps - 1) as f64);
    // XLA multiplies with the reciprocal of a constant, and a step that is off by its last bit is off by one in integers.
    let count = if round { c.add(c.subtract(first, first), count) } else { count };
    let by = c.divide(c.subtract(last, first), count);
    let back = c.subtract(c.like(i, (steps - 1) as f64), i);
    let from_first = c.add(first, c.multiply(by, position(i)));
    let from_last = c.subtract(last, c.multiply(by, position(back)));
    c.select(c.lt(i, c.like(i, (steps / 2) as f64)), from_first, from_last)
}

fn linspace(c: &Ctx, start: Scalar, end: Scalar, steps: i64, dtype: Option<DType>) -> Result<Value> {
    let (dtype, compute) = space_dtypes(c, start, end, steps, dtype)?;
    Ok(c.to(spaced(c, start, end, steps, dtype, compute), dtype))
}

fn logspace(
    c: &Ctx,
    start: Scalar,
    end: Scalar,
    steps: i64,
    base: Scalar,
    dtype: Option<DType>,
) -> Result<Value> {
    let (dtype, compute) = space_dtypes(c, start, end, steps, dtype)?;
    let exponents = spaced(c, start, end, steps, dtype, compute);
    Ok(c.to(c.power(c.number_like(base, compute, &[steps]), exponents), dtype))
}

fn eye(c: &Ctx, n: i64, m: i64, dtype: Option<DType>) -> Result<Value> {
    for (size, name) in [(n, "n"), (m, "m")] {
        if size < 0 {
            return Err(runtime(format!("{name} must be greater or equal to 0, got {size}")));
        }
    }
    let ty = TensorType::new(DType::S32, [n, m].as_slice());
    let diagonal = c.eq(c.iota(ty.clone(), 0), c.iota(ty, 1));
    Ok(c.to(diagonal, dtype.unwrap_or(c.config.default_dtype)))
}

/// Where a matrix keeps its elements: `col - row <= k` below, `>= k` above.
fn triangle_mask(c: &Ctx, shape: &[i64], k: Integer, name: &str) -> Value {
    let rank = shape.len() as i64;
    let ty = TensorType::new(DType::S64, shape);
    let offset = c.subtract(c.iota(ty.clone(), rank - 1), c.iota(ty, rank - 2));
    let limit = c.full(k.0, shape);
    if name == "tril" { c.le(offset, limit) } else { c.ge(offset, limit) }
}

fn triangle(c: &Ctx, x: Value, k: Integer, name: &str) -> Result<Value> {
    if c.rank(x) < 2 {
        return Err(runtime(format!("{name}: input tensor must have at least 2 dimensions")));
    }
    Ok(c.select(triangle_mask(c, &c.shape(x), k, name), x, c.zeros_like(x)))
}

/// How many elements of a matrix have `column - row <= k`.
fn elements_below(row: i64, col: i64, k: i128) -> i128 {
    let (row, col) = (i128::from(row), i128::from(col));
    // Rows from `first` on have an element more than the one before; from `full` on they are full.
    let first = (-k).clamp(0, row);
    let full = (col - k - 1).clamp(first, row);
    let rows = full - first;
    rows * (first + k + 1) + rows * (rows - 1) / 2 + (row - full) * col
}

/// Row and column of every element of the triangle, row by row: their flat positions sorted to the front.
fn triangle_indices(c: &Ctx, row: i64, col: i64, k: i64, dtype: Option<DType>, name: &str) -> Result<Value> {
    if row < 0 || col < 0 {
        return Err(runtime("row and col must be non-negative"));
    }
    let below = |k| elements_below(row, col, k);
    let count = match name {
        "tril" => below(i128::from(k)),
        _ => i128::from(row) * i128::from(col) - below(i128::from(k) - 1),
    };
    // Rows and columns behind the triangle are never made.
    let (row, col) = match name {
        "tril" => (row, col.min(row.saturating_add(k).max(0))),
        _ => (row.min(col.saturating_sub(k).max(0)), col),
    };
    let (Ok(count), Some(size)) = (i64::try_from(count), row.checked_mul(col)) else {
        return Err(runtime(format!(
            "{name}_indices: the result for {row} rows and {col} columns is too large"
        )));
    };
    let dtype = dtype.unwrap_or(DType::S64);
    let flat = c.iota(TensorType::new(DType::S64, [size].as_slice()), 0);
    let mask = c.reshape(triangle_mask(c, &[row, col], Integer(c.scalar_i64(DType::S64, k)), name), &[size]);
    let keyed = c.select(mask, flat, c.full(c.scalar_i64(DType::S64, size), &[size]));
    let sorted = c.sort(&[keyed], 0, false, |b, x, y| b.lt(x[0], y[0]));
    let flat = c.slice_dim(sorted[0], 0, 0, count, 1);
    let width = c.full(c.scalar_i64(DType::S64, col.max(1)), &[count]);
    let part = |v| c.reshape(v, &[1, count]);
    Ok(c.to(c.concatenate(&[part(c.divide(flat, width)), part(c.remainder(flat, width))], 0), dtype))
}
