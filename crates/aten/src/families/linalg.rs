use super::matmul::conj;
use crate::args::{Arg, ParamKind, Tensor};
use crate::context::{Ctx, broadcast_shapes};
use crate::dtype::scalar_name;
use crate::error::{Error, Result, not_implemented, runtime, unsupported};
use crate::library::{Item, Outcome, Parts, word};
use crate::out::OutStrides;
use crate::params::FromArg;
use crate::row::Row;
use crate::{Layout, op};
use oxitorch_hlo::{Builder, DType, Dims, TensorType, Transpose, TriangularSolve, Value};

/// The rows of this family. Matrices are the last two dimensions; decompositions that StableHLO lacks are loops.
pub static ROWS: &[Row] = &[
    op!("linalg_cholesky_ex", cholesky_ex).layout(Layout::Matrices),
    op!("_cholesky_solve_helper", cholesky_solve).layout(Layout::Matrices),
    op!("cholesky_inverse", cholesky_inverse)
        .layout(Layout::Matrices)
        .out_strides(OutStrides::OfResultIfEmpty),
    op!("linalg_solve_triangular", solve_triangular).layout(Layout::Matrices),
    op!("triangular_solve", triangular_solve).layout(Layout::Matrices),
    op!("linalg_lu_factor_ex", lu_factor_ex).layout(Layout::Matrices),
    op!("linalg_lu_solve", lu_solve).layout(Layout::Solution),
    op!("linalg_lu", linalg_lu),
    op!("lu_unpack", lu_unpack),
    op!("linalg_inv_ex", inv_ex).layout(Layout::Matrices),
    op!("_linalg_solve_ex", solve_ex).layout(Layout::SolutionAndMatrices),
    op!("_linalg_det", det).layout(Layout::Matrices),
    op!("_linalg_slogdet", slogdet).layout(Layout::Matrices),
];

/// Batch sizes and the two sizes of a matrix.
pub(super) struct Matrix {
    pub(super) batch: Dims,
    pub(super) rows: i64,
    pub(super) columns: i64,
}

impl Matrix {
    /// Of any dtype, where torch leaves the question to the kernel.
    pub(super) fn some(c: &Ctx, name: &str, x: Value) -> Result<Matrix> {
        let shape = c.shape(x);
        match *shape.as_slice() {
            [ref batch @ .., rows, columns] => Ok(Matrix { batch: batch.into(), rows, columns }),
            _ => Err(runtime(format!("{name}: input must have at least 2 dimensions."))),
        }
    }

    pub(super) fn new(c: &Ctx, name: &str, x: Value) -> Result<Matrix> {
        let shape = c.shape(x);
        let n = shape.len();
        if n < 2 {
            return Err(runtime(format!("{name}: The input tensor A must have at least 2 dimensions.")));
        }
        let dtype = c.dtype(x);
        if !dtype.is_float() && !dtype.is_complex() {
            let dtype = scalar_name(dtype);
            let text = format!("{name}: Expected a floating point or complex tensor as input. Got {dtype}");
            return Err(Error::NotImplemented(text));
        }
        Ok(Matrix { batch: shape[..n - 2].into(), rows: shape[n - 2], columns: shape[n - 1] })
    }

    pub(super) fn square(c: &Ctx, name: &str, x: Value) -> Result<Matrix> {
        let m = Matrix::new(c, name, x)?;
        if m.rows != m.columns {
            let (r, k) = (m.rows, m.columns);
            return Err(runtime(format!(
                "{name}: A must be batches of square matrices, but they are {r} by {k} matrices"
            )));
        }
        Ok(m)
    }
}

/// The caller is asked to look at `info`, and to raise if it is not zero: a program cannot, and torch's composite ops do
/// it apart from the decomposition.
pub(super) fn unchecked(check_errors: bool) -> Result<()> {
    if check_errors {
        Err(unsupported("`check_errors` raises an error that depends on values"))
    } else {
        Ok(())
    }
}

/// float32, float64 and their complex types: what LAPACK has.
pub(super) fn lapack(c: &Ctx, kernel: &str, x: Value) -> Result<()> {
    match c.dtype(x) {
        DType::F32 | DType::F64 | DType::C64 | DType::C128 => Ok(()),
        dtype => Err(not_implemented(kernel, dtype)),
    }
}

pub(super) fn zeros(c: &Ctx, dtype: DType, shape: &[i64]) -> Value {
    c.full(c.scalar_i64(dtype, 0), shape)
}

pub(super) fn with_batch(batch: &[i64], rest: &[i64]) -> Dims {
    batch.iter().chain(rest).copied().collect()
}

/// Positions along dimension `dim` of matrices shaped like `x`.
fn place(c: &Ctx, x: Value, dim: i64) -> Value {
    c.iota_dim(x, DType::S32, dim)
}

/// One triangle of square matrices, the other one zero.
pub(super) fn triangle(c: &Ctx, x: Value, upper: bool) -> Value {
    let n = c.rank(x) as i64;
    let (row, column) = (place(c, x, n - 2), place(c, x, n - 1));
    let keep = if upper { c.le(row, column) } else { c.ge(row, column) };
    c.select(keep, x, c.zeros_like(x))
}

/// Identity matrices of the type of `x`.
pub(super) fn identity(c: &Ctx, x: Value) -> Value {
    let n = c.rank(x) as i64;
    c.select(c.eq(place(c, x, n - 2), place(c, x, n - 1)), c.ones_like(x), c.zeros_like(x))
}

/// The diagonal of the last two dimensions.
pub(super) fn diagonal(c: &Ctx, x: Value) -> Value {
    let last = c.rank(x) as i64 - 1;
    let on = c.eq(place(c, x, last - 1), place(c, x, last));
    c.reduce_sum(c.select(on, x, c.zeros_like(x)), &[last])
}

/// The first position (from 1) along the last dimension that holds, 0 if none does: LAPACK's `info`, s32.
fn first_true(c: &Ctx, x: Value) -> Value {
    let last = c.rank(x) as i64 - 1;
    let n = c.shape(x)[last as usize] as i32;
    let at = c.add(place(c, x, last), c.full(c.scalar_i64(DType::S32, 1), &c.shape(x)));
    let none = c.full(c.scalar_i64(DType::S32, i64::from(n) + 1), &c.shape(x));
    let first = c.reduce_min(c.select(x, at, none), &[last]);
    let found = c.le(first, c.like(first, f64::from(n)));
    c.select(found, first, c.zeros_like(first))
}

fn cholesky_ex(c: &Ctx, x: Value, upper: bool, check_errors: bool) -> Result<(Value, Value)> {
    unchecked(check_errors)?;
    let m = Matrix::square(c, "linalg.cholesky", x)?;
    lapack(c, "cholesky_cpu", x)?;
    if c.numel(x) == 0 {
        return Ok((x, zeros(c, DType::S32, &m.batch)));
    }
    if c.config.target.library {
        return library_cholesky(c, x, &m, upper);
    }
    let factor = c.cholesky(x, !upper);
    let broken = c.is_nan(c.real(diagonal(c, factor)));
    let info = c.if_(
        c.any(broken),
        |_| vec![leading_minor(c, x, &m, upper)],
        |_| vec![zeros(c, DType::S32, &m.batch)],
    );
    Ok((triangle(c, factor, upper), info[0]))
}

/// The same by LAPACK, matrix after matrix.
fn library_cholesky(c: &Ctx, x: Value, m: &Matrix, upper: bool) -> Result<(Value, Value)> {
    let count = m.batch.iter().product();
    let shape = [count, m.rows, m.rows];
    let factor = Outcome::column_major(TensorType::new(c.dtype(x), shape.as_slice()));
    let info = Outcome::row_major(TensorType::new(DType::S32, [count].as_slice()));
    let args = [Item::Tensor(c.reshape(x, &shape)), Item::Bool(upper), Item::Bool(false)];
    let parts = Parts { args: &[0, word::WHOLE, word::WHOLE], results: &[0, 0], step: 1 };
    let results = [Some(factor), Some(info)];
    match c.call_library_in_parts("linalg_cholesky_ex.L", &args, &results, Some(&parts))[..] {
        [Some(factor), Some(info)] => Ok((c.reshape(factor, &c.shape(x)), c.reshape(info, &m.batch))),
        _ => Err(runtime("linalg.cholesky: no factor")),
    }
}

/// The order of the first leading minor that is not positive, or 0; XLA only says that there is one.
fn leading_minor(c: &Ctx, x: Value, m: &Matrix, upper: bool) -> Value {
    let (count, n) = (m.batch.iter().product(), m.rows);
    let half = c.reshape(triangle(c, x, upper), &[count, n, n]);
    let (row, column) = (place(c, half, 1), place(c, half, 2));
    let whole = c.select(c.eq(row, column), half, c.add(half, adjoint(c, half)));
    let limit = c.scalar_i64(DType::S32, n);
    let out = c.for_loop(
        c.scalar_i64(DType::S32, 0),
        limit,
        &[whole, zeros(c, DType::S32, &[count])],
        |b, k, state| {
            let zero = b.scalar_i64(DType::S32, 0);
            let pivot = b.real(b.reshape(b.dynamic_slice(state[0], &[zero, k, k], &[count, 1, 1]), &[count]));
            let bad = b.not(b.gt(pivot, b.zeros_like(pivot)));
            let new = b.and(bad, b.eq(state[1], b.zeros_like(state[1])));
            let order = b.full(b.add(k, b.scalar_i64(DType::S32, 1)), &[count]);
            vec![eliminate(b, k, state[0]), b.select(new, order, state[1])]
        },
    );
    c.reshape(out[1], &m.batch)
}

/// Whether LAPACK does it: what the compiler has goes from column to column.
fn is_for_lapack(c: &Ctx, x: Value) -> bool {
    c.is_worth_a_call(x, &[DType::F32, DType::F64, DType::C64, DType::C128], 1)
}

/// Matrices with one dimension for their batch.
fn flat(c: &Ctx, x: Value) -> Value {
    let shape = c.shape(x);
    let n = shape.len();
    c.reshape(x, &[shape[..n - 2].iter().product(), shape[n - 2], shape[n - 1]])
}

/// A call of the library on flat matrices, in parts by their batch: `matrices` of its first arguments are cut, `more` are
/// not. The result is like `b`.
fn library_solution(c: &Ctx, op: &str, matrices: &[Value], more: &[Item<'_>], b: Value) -> Option<Value> {
    let result = Outcome::column_major(c.ty(flat(c, b)));
    let args: Vec<Item<'_>> = matrices.iter().map(|&v| Item::Tensor(v)).chain(more.iter().copied()).collect();
    let cuts: Vec<i64> = (0..args.len()).map(|i| if i < matrices.len() { 0 } else { word::WHOLE }).collect();
    let parts = Parts { args: &cuts, results: &[0], step: 1 };
    let found = c.call_library_in_parts(op, &args, &[Some(result)], Some(&parts)).first().copied()??;
    Some(c.reshape(found, &c.shape(b)))
}

/// Solves with one triangle of `a`, whose batch must be that of `b`.
fn solve_with(c: &Ctx, a: Value, b: Value, flags: TriangularSolve) -> Value {
    if c.numel(a) == 0 || c.numel(b) == 0 {
        return c.zeros_like(b);
    }
    library_solve_with(c, a, b, flags).unwrap_or_else(|| c.triangular_solve(a, b, flags))
}

fn library_solve_with(c: &Ctx, a: Value, b: Value, flags: TriangularSolve) -> Option<Value> {
    if !is_for_lapack(c, a) {
        return None;
    }
    let (matrix, upper) = match flags.transpose_a {
        Transpose::No => (flat(c, a), !flags.lower),
        Transpose::Yes => (c.transpose_last2(flat(c, a)), flags.lower),
        Transpose::Adjoint => (adjoint(c, flat(c, a)), flags.lower),
    };
    let more = [upper, flags.left_side, flags.unit_diagonal].map(Item::Bool);
    library_solution(c, "linalg_solve_triangular.out", &[matrix, flat(c, b)], &more, b)
}

const LOWER: TriangularSolve =
    TriangularSolve { left_side: true, lower: true, unit_diagonal: false, transpose_a: Transpose::No };

/// The solution of `a x = b` from the Cholesky factor of `a`.
fn cholesky_solve(c: &Ctx, b: Value, factor: Value, upper: bool) -> Result<Value> {
    lapack(c, "cholesky_solve_cpu", b)?;
    let first = TriangularSolve {
        lower: !upper,
        transpose_a: if upper { Transpose::Adjoint } else { Transpose::No },
        ..LOWER
    };
    let second = TriangularSolve {
        lower: !upper,
        transpose_a: if upper { Transpose::No } else { Transpose::Adjoint },
        ..LOWER
    };
    Ok(solve_with(c, factor, solve_with(c, factor, b, first), second))
}

fn cholesky_inverse(c: &Ctx, factor: Value, upper: bool) -> Result<Value> {
    Matrix::square(c, "cholesky_inverse", factor)?;
    lapack(c, "cholesky_inverse_out_cpu", factor)?;
    cholesky_solve(c, identity(c, factor), factor, upper)
}

/// Expands the batches of two matrices to one.
pub(super) fn same_batch(c: &Ctx, a: Value, b: Value) -> Result<(Value, Value)> {
    let (xs, ys) = (c.shape(a), c.shape(b));
    let (n, m) = (xs.len() - 2, ys.len() - 2);
    let batch = broadcast_shapes(&[xs[..n].into(), ys[..m].into()])?;
    Ok((c.expand(a, &with_batch(&batch, &xs[n..]))?, c.expand(b, &with_batch(&batch, &ys[m..]))?))
}

/// Whether `a x = b` (or `x a = b`) can be written at all.
fn compatible(c: &Ctx, name: &str, a: Value, b: Value, left: bool) -> Result<()> {
    let (m, k) = (Matrix::square(c, name, a)?, Matrix::new(c, name, b)?);
    let side = if left { k.rows } else { k.columns };
    if m.rows != side {
        let equation = if left { "AX = B" } else { "XA = B" };
        return Err(runtime(format!(
            "{name}: Incompatible shapes of A and B for the equation {equation} ({}x{} and {}x{})",
            m.rows, m.columns, k.rows, k.columns
        )));
    }
    if c.dtype(a) != c.dtype(b) {
        let (x, y) = (scalar_name(c.dtype(a)), scalar_name(c.dtype(b)));
        return Err(runtime(format!(
            "{name}: Expected A and B to have the same dtype, but found A of type {x} and B of type {y} instead"
        )));
    }
    Ok(())
}

fn solve_triangular(
    c: &Ctx,
    a: Value,
    b: Value,
    upper: bool,
    left: bool,
    unitriangular: bool,
) -> Result<Value> {
    compatible(c, "linalg.solve_triangular", a, b, left)?;
    lapack(c, "triangular_solve_cpu", a)?;
    let (a, b) = same_batch(c, a, b)?;
    let flags = TriangularSolve { left_side: left, lower: !upper, unit_diagonal: unitriangular, ..LOWER };
    Ok(solve_with(c, a, b, flags))
}

/// The old form, arguments the other way round; the second result is a copy of `a` in the common batch.
fn triangular_solve(
    c: &Ctx,
    b: Value,
    a: Value,
    upper: bool,
    transpose: bool,
    unitriangular: bool,
) -> Result<(Value, Value)> {
    compatible(c, "triangular_solve", a, b, true)?;
    lapack(c, "triangular_solve_cpu", a)?;
    let (a, b) = same_batch(c, a, b)?;
    let flags = TriangularSolve {
        lower: !upper,
        unit_diagonal: unitriangular,
        transpose_a: if transpose { Transpose::Yes } else { Transpose::No },
        ..LOWER
    };
    Ok((solve_with(c, a, b, flags), a))
}

/// `a` with rows exchanged so that it is `lower @ upper`, both in one matrix.
struct Lu {
    /// `[batch.., rows, columns]`
    factors: Value,
    /// s32 `[batch.., min(rows, columns)]`, from 1: which row was exchanged with this one.
    pivots: Value,
    /// s32 `[batch..]`: the first zero on the diagonal, from 1, or 0.
    info: Value,
}

/// LU decomposition with partial pivoting, column by column.
fn lu(c: &Ctx, x: Value, m: &Matrix, pivot: bool) -> Lu {
    let steps = m.rows.min(m.columns);
    let pivots_shape = with_batch(&m.batch, &[steps]);
    if c.numel(x) == 0 {
        let pivots = zeros(c, DType::S32, &pivots_shape);
        return Lu { factors: x, pivots, info: zeros(c, DType::S32, &m.batch) };
    }
    if let Some(lu) = library_lu(c, x, m, pivot) {
        return lu;
    }
    let count: i64 = m.batch.iter().product();
    let flat = flat(c, x);
    let start = c.scalar_i64(DType::S32, 0);
    let limit = c.scalar_i64(DType::S32, steps);
    let out = c.for_loop(start, limit, &[flat, zeros(c, DType::S32, &[count, steps])], |b, k, state| {
        let (a, row) = if pivot { exchange(b, k, state[0]) } else { (state[0], b.full(k, &[count, 1])) };
        let one = b.full(b.scalar_i64(DType::S32, 1), &[count, 1]);
        let pivots = b.dynamic_update_slice(state[1], b.add(row, one), &[b.scalar_i64(DType::S32, 0), k]);
        vec![eliminate(b, k, a), pivots]
    });
    let factors = c.reshape(out[0], &c.shape(x));
    let square = c.slice(out[0], &[0, 0, 0], &[count, steps, steps], &[1, 1, 1]);
    let on = diagonal(c, square);
    let info = first_true(c, c.eq(on, c.zeros_like(on)));
    Lu { factors, pivots: c.reshape(out[1], &pivots_shape), info: c.reshape(info, &m.batch) }
}

/// The same by LAPACK, which knows no decomposition without pivots.
fn library_lu(c: &Ctx, x: Value, m: &Matrix, pivot: bool) -> Option<Lu> {
    if !pivot || !is_for_lapack(c, x) {
        return None;
    }
    let (count, steps) = (m.batch.iter().product(), m.rows.min(m.columns));
    let factors = Outcome::column_major(c.ty(flat(c, x)));
    let [pivots, info] = [&[count, steps][..], &[count]]
        .map(|shape| Some(Outcome::row_major(TensorType::new(DType::S32, shape))));
    let args = [Item::Tensor(flat(c, x)), Item::Bool(true), Item::Bool(false)];
    let parts = Parts { args: &[0, word::WHOLE, word::WHOLE], results: &[0; 3], step: 1 };
    let results = [Some(factors), pivots, info];
    match c.call_library_in_parts("linalg_lu_factor_ex.out", &args, &results, Some(&parts))[..] {
        [Some(factors), Some(pivots), Some(info)] => Some(Lu {
            factors: c.reshape(factors, &c.shape(x)),
            pivots: c.reshape(pivots, &with_batch(&m.batch, &[steps])),
            info: c.reshape(info, &m.batch),
        }),
        _ => None,
    }
}

/// A column `[count, rows, 1]` of matrices.
fn column(b: &Builder, a: Value, k: Value) -> Value {
    let shape = b.shape(a);
    let zero = b.scalar_i64(DType::S32, 0);
    b.dynamic_slice(a, &[zero, zero, k], &[shape[0], shape[1], 1])
}

/// A row `[count, 1, columns]` of matrices.
fn line(b: &Builder, a: Value, k: Value) -> Value {
    let shape = b.shape(a);
    let zero = b.scalar_i64(DType::S32, 0);
    b.dynamic_slice(a, &[zero, k, zero], &[shape[0], 1, shape[2]])
}

/// LAPACK's size of a number: complex ones by the sum of their parts.
fn size(b: &Builder, x: Value) -> Value {
    if b.dtype(x).is_complex() { b.add(b.abs(b.real(x)), b.abs(b.imag(x))) } else { b.abs(x) }
}

/// Exchanges row `k` with the row at or below it that has the largest element in column `k`, which is returned as
/// `[count, 1]`.
fn exchange(b: &Builder, k: Value, a: Value) -> (Value, Value) {
    let shape = b.shape(a);
    let column_shape = [shape[0], shape[1]];
    let size = b.reshape(size(b, column(b, a, k)), &column_shape);
    let rows = b.iota(TensorType::new(DType::S32, column_shape.as_slice()), 1);
    let above = b.lt(rows, b.full(k, &column_shape));
    let size = b.select(above, b.full(b.scalar_i64(b.dtype(size), -1), &column_shape), size);
    let (_, best) = b.argmax(size, 1, DType::S32);
    let (row, best) = (b.full(k, &column_shape), b.broadcast_in_dim(best, &column_shape, &[0]));
    let from = b.select(b.eq(rows, row), best, b.select(b.eq(rows, best), row, rows));
    let from = b.broadcast_in_dim(from, &shape, &[0, 1]);
    (b.take_along_dim(a, from, 1), b.slice_dim(best, 1, 0, 1, 1))
}

/// One step of elimination: factors below the diagonal in column `k`, what is left to the right of them.
fn eliminate(b: &Builder, k: Value, a: Value) -> Value {
    let shape = b.shape(a);
    let (left, top) = (column(b, a, k), line(b, a, k));
    let pivot = column(b, top, k);
    let one = b.ones_like(pivot);
    let safe = b.select(b.eq(pivot, b.zeros_like(pivot)), one, pivot);
    let wide = |x: Value, dims: &[i64]| {
        let kept: Dims = dims.iter().map(|&d| b.shape(x)[d as usize]).collect();
        b.broadcast_in_dim(b.reshape(x, &kept), &shape, dims)
    };
    let (rows, columns) = (b.iota_dim(a, DType::S32, 1), b.iota_dim(a, DType::S32, 2));
    let at = b.full(k, &shape);
    let below = b.gt(rows, at);
    let factor = b.divide(wide(left, &[0, 1]), wide(safe, &[0]));
    let rest = b.subtract(a, b.multiply(factor, wide(top, &[0, 2])));
    let changed = b.select(b.eq(columns, at), factor, rest);
    b.select(b.and(below, b.ge(columns, at)), changed, a)
}

fn lu_factor_ex(c: &Ctx, x: Value, pivot: bool, check_errors: bool) -> Result<(Value, Value, Value)> {
    unchecked(check_errors)?;
    let m = Matrix::new(c, "torch.lu_factor", x)?;
    lapack(c, "lu_factor_cpu", x)?;
    let lu = lu(c, x, &m, pivot);
    Ok((lu.factors, lu.pivots, lu.info))
}

/// The order of rows that exchanging them one after the other leads to: s32 `[count, rows]`, from `[count, steps]`.
fn permutation(c: &Ctx, pivots: Value, rows: i64) -> Value {
    let &[count, steps] = c.shape(pivots).as_slice() else { return pivots };
    let order = c.iota(TensorType::new(DType::S32, [count, rows].as_slice()), 1);
    if steps == 0 {
        return order;
    }
    let limit = c.scalar_i64(DType::S32, steps);
    let out = c.for_loop(c.scalar_i64(DType::S32, 0), limit, &[order], |b, k, state| {
        let (zero, shape) = (b.scalar_i64(DType::S32, 0), b.shape(state[0]));
        let one = b.full(b.scalar_i64(DType::S32, 1), &[count, 1]);
        let other = b.subtract(b.dynamic_slice(pivots, &[zero, k], &[count, 1]), one);
        let here = b.dynamic_slice(state[0], &[zero, k], &[count, 1]);
        let there = b.take_along_dim(state[0], other, 1);
        let spread = |x: Value| b.broadcast_in_dim(x, &shape, &[0, 1]);
        let at = b.iota_dim(state[0], DType::S32, 1);
        let (is_here, is_there) = (b.eq(at, b.full(k, &shape)), b.eq(at, spread(other)));
        let moved = b.select(is_there, spread(here), state[0]);
        vec![b.select(is_here, spread(there), moved)]
    });
    out[0]
}

/// Rows of `b` in the order that `pivots` describe, or back into the order before.
fn permuted(c: &Ctx, b: Value, pivots: Value, back: bool) -> Value {
    let shape = c.shape(b);
    let n = shape.len();
    let (rows, columns) = (shape[n - 2], shape[n - 1]);
    let count: i64 = shape[..n - 2].iter().product();
    let steps = c.shape(pivots).last().copied().unwrap_or(0);
    let mut order = permutation(c, c.reshape(pivots, &[count, steps]), rows);
    if back {
        let at = c.iota_dim(order, DType::S32, 1);
        order = c.sort(&[order, at], 1, true, |b, x, y| b.lt(x[0], y[0]))[1];
    }
    let flat = c.reshape(b, &[count, rows, columns]);
    let order = c.broadcast_in_dim(order, &[count, rows, columns], &[0, 1]);
    c.reshape(c.take_along_dim(flat, order, 1), &shape)
}

/// `x` in `a x = b` from the decomposition of `a`; `b` has the batch of the factors.
fn lu_solve_left(c: &Ctx, factors: Value, pivots: Value, b: Value, adjoint: bool) -> Value {
    if c.numel(b) == 0 || c.numel(factors) == 0 {
        return c.zeros_like(b);
    }
    if let Some(x) = library_lu_solve(c, factors, pivots, b, adjoint) {
        return x;
    }
    let lower = TriangularSolve { unit_diagonal: true, ..LOWER };
    let upper = TriangularSolve { lower: false, ..LOWER };
    if !adjoint {
        let y = solve_with(c, factors, permuted(c, b, pivots, false), lower);
        return solve_with(c, factors, y, upper);
    }
    let turned = |f: TriangularSolve| TriangularSolve { transpose_a: Transpose::Adjoint, ..f };
    let y = solve_with(c, factors, b, turned(upper));
    permuted(c, solve_with(c, factors, y, turned(lower)), pivots, true)
}

fn library_lu_solve(c: &Ctx, factors: Value, pivots: Value, b: Value, adjoint: bool) -> Option<Value> {
    if !is_for_lapack(c, factors) {
        return None;
    }
    let shape = c.shape(factors);
    let n = shape.len();
    // LAPACK goes where they say.
    let pivots = c.to(pivots, DType::S32);
    let [first, last] = [1, shape[n - 1]].map(|row| c.like(pivots, row as f64));
    let pivots = c.minimum(c.maximum(pivots, first), last);
    let pivots = c.reshape(pivots, &[shape[..n - 2].iter().product(), shape[n - 1]]);
    let more = [Item::Bool(true), Item::Bool(adjoint)];
    library_solution(c, "linalg_lu_solve.out", &[flat(c, factors), pivots, flat(c, b)], &more, b)
}

pub(super) fn adjoint(c: &Ctx, x: Value) -> Value {
    conj(c, c.transpose_last2(x))
}

fn lu_solve(c: &Ctx, factors: Value, pivots: Value, b: Value, left: bool, adjoint_: bool) -> Result<Value> {
    compatible(c, "linalg.lu_solve", factors, b, left)?;
    lapack(c, "linalg.lu_solve", b)?;
    let (factors, b) = same_batch(c, factors, b)?;
    let shape = c.shape(factors);
    let pivots = c.expand(pivots, &shape[..shape.len() - 1])?;
    if left {
        return Ok(lu_solve_left(c, factors, pivots, b, adjoint_));
    }
    // x a = b is the adjoint of a* x* = b*.
    Ok(adjoint(c, lu_solve_left(c, factors, pivots, adjoint(c, b), !adjoint_)))
}

/// `P` with `P @ L @ U` the matrix that was decomposed, in the dtype of the factors.
fn permutation_matrix(c: &Ctx, factors: Value, pivots: Value) -> Value {
    let shape = c.shape(factors);
    let n = shape.len();
    let (rows, batch) = (shape[n - 2], &shape[..n - 2]);
    let (count, steps) = (batch.iter().product(), c.shape(pivots).last().copied().unwrap_or(0));
    let whole = [count, rows, rows];
    let order = permutation(c, c.reshape(pivots, &[count, steps]), rows);
    let from = c.broadcast_in_dim(order, &whole, &[0, 2]);
    let row = c.iota(TensorType::new(DType::S32, whole.as_slice()), 1);
    c.reshape(c.convert(c.eq(row, from), c.dtype(factors)), &with_batch(batch, &[rows, rows]))
}

/// The factors apart: ones on the diagonal of `L`, zeros in the other triangles.
fn apart(c: &Ctx, factors: Value, m: &Matrix) -> (Value, Value) {
    let k = m.rows.min(m.columns);
    let n = c.rank(factors) as i64;
    let left = c.slice_dim(factors, n - 1, 0, k, 1);
    let (row, column) = (place(c, left, n - 2), place(c, left, n - 1));
    let lower = c.select(c.gt(row, column), left, c.zeros_like(left));
    let lower = c.select(c.eq(row, column), c.ones_like(left), lower);
    (lower, triangle(c, c.slice_dim(factors, n - 2, 0, k, 1), true))
}

fn lu_unpack(
    c: &Ctx,
    factors: Value,
    pivots: Value,
    unpack_data: bool,
    unpack_pivots: bool,
) -> Result<(Value, Value, Value)> {
    let m = Matrix::new(c, "torch.lu_unpack", factors)?;
    if unpack_pivots && c.dtype(pivots) != DType::S32 {
        return Err(runtime(
            "torch.lu_unpack: LU_pivots is expected to be a contiguous tensor of torch.int32 dtype.\nNote: this function is \
             intended to be used with the output produced by torch.linalg.lu_factor",
        ));
    }
    let none = zeros(c, c.dtype(factors), &[0]);
    let p = if unpack_pivots { permutation_matrix(c, factors, pivots) } else { none };
    let (l, u) = if unpack_data { apart(c, factors, &m) } else { (none, none) };
    Ok((p, l, u))
}

fn linalg_lu(c: &Ctx, x: Value, pivot: bool) -> Result<(Value, Value, Value)> {
    let m = Matrix::new(c, "linalg.lu", x)?;
    lapack(c, "lu_factor_cpu", x)?;
    let lu = lu(c, x, &m, pivot);
    let p = if pivot { permutation_matrix(c, lu.factors, lu.pivots) } else { zeros(c, c.dtype(x), &[0]) };
    let (l, u) = apart(c, lu.factors, &m);
    Ok((p, l, u))
}

fn inv_ex(c: &Ctx, x: Value, check_errors: bool) -> Result<(Value, Value)> {
    unchecked(check_errors)?;
    let m = Matrix::square(c, "linalg.inv", x)?;
    lapack(c, "linalg_inv_ex_cpu", x)?;
    let lu = lu(c, x, &m, true);
    Ok((lu_solve_left(c, lu.factors, lu.pivots, identity(c, x), false), lu.info))
}

/// Whether `b` stands for one vector for each matrix of `a`, by torch's rule.
fn is_vector(c: &Ctx, a: &Tensor, b: &Tensor) -> bool {
    let (x, y) = (c.shape(a.value), c.shape(b.value));
    b.rank == 1 || (a.rank == b.rank + 1 && y[..] == x[..x.len() - 1])
}

fn solve_ex(c: &Ctx, a: Tensor, b: Tensor, left: bool, check_errors: bool) -> Result<Vec<Value>> {
    unchecked(check_errors)?;
    let m = Matrix::square(c, "linalg.solve", a.value)?;
    lapack(c, "linalg_solve_cpu", a.value)?;
    let vector = is_vector(c, &a, &b);
    if vector && !left {
        let text = "linalg.solve: Vector broadcasting of the left hand side is not supported for left=False. In this \
                    case linalg.solve is equivalent to B / A.squeeze(-1)";
        return Err(runtime(text));
    }
    let rhs = if vector { c.unsqueeze(b.value, b.rank as i64) } else { b.value };
    compatible(c, "linalg.solve", a.value, rhs, left)?;
    let lu = lu(c, a.value, &m, true);
    let x = lu_solve(c, lu.factors, lu.pivots, rhs, left, false)?;
    let x = if vector { c.squeeze(x, &[c.rank(x) as i64 - 1]) } else { x };
    Ok(vec![x, lu.factors, lu.pivots, lu.info])
}

/// -1 for an odd number of exchanges, else 1, in `dtype`.
fn exchange_sign(c: &Ctx, pivots: Value, dtype: DType) -> Value {
    let last = c.rank(pivots) as i64 - 1;
    let own = c.add(place(c, pivots, last), c.ones_like(pivots));
    let count = c.reduce_sum(c.convert(c.ne(pivots, own), DType::S32), &[last]);
    let odd = c.eq(c.and(count, c.ones_like(count)), c.ones_like(count));
    let one = c.full(c.scalar_i64(dtype, 1), &c.shape(count));
    c.select(odd, c.negate(one), one)
}

/// A tensor, and whether it is row-major.
struct Laid {
    value: Value,
    row_major: bool,
}

impl FromArg for Laid {
    const KIND: ParamKind = ParamKind::Tensor;
    fn accepts(ty: &str) -> bool {
        ty == "Tensor"
    }
    fn from_arg(c: &Ctx, arg: &Arg) -> Result<Self> {
        let value = Value::from_arg(c, arg)?;
        let Arg::Tensor(t) = arg else { return Ok(Laid { value, row_major: true }) };
        let mut want = 1;
        let mut row_major = true;
        for (&size, &stride) in t.ty.shape.iter().zip(&t.strides).rev() {
            row_major &= size == 1 || stride == want;
            want *= size.max(1);
        }
        Ok(Laid { value, row_major })
    }
}

/// The decomposition that the backward of determinants expects: of the transpose where a real matrix is row-major.
fn determinant_lu(c: &Ctx, x: &Laid, m: &Matrix) -> Lu {
    let turn = x.row_major && !c.dtype(x.value).is_complex();
    lu(c, if turn { c.transpose_last2(x.value) } else { x.value }, m, true)
}

fn det(c: &Ctx, x: Laid) -> Result<(Value, Value, Value)> {
    let m = Matrix::square(c, "linalg.det", x.value)?;
    lapack(c, "linalg_det_cpu", x.value)?;
    let lu = determinant_lu(c, &x, &m);
    let on = diagonal(c, lu.factors);
    let product = c.reduce_prod(on, &[c.rank(on) as i64 - 1]);
    Ok((c.multiply(product, exchange_sign(c, lu.pivots, c.dtype(on))), lu.factors, lu.pivots))
}

fn slogdet(c: &Ctx, x: Laid) -> Result<Vec<Value>> {
    let m = Matrix::square(c, "linalg.slogdet", x.value)?;
    lapack(c, "linalg_slogdet_cpu", x.value)?;
    let lu = determinant_lu(c, &x, &m);
    let on = diagonal(c, lu.factors);
    let last = [c.rank(on) as i64 - 1];
    let sign = c.multiply(c.reduce_prod(c.sign(on), &last), exchange_sign(c, lu.pivots, c.dtype(on)));
    let log = c.reduce_sum(c.log(c.abs(on)), &last);
    Ok(vec![sign, log, lu.factors, lu.pivots])
}
