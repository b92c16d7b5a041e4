use super::jacobi;
use super::linalg::{
    Matrix, adjoint, diagonal, identity, lapack, same_batch, triangle, unchecked, with_batch, zeros,
};
use crate::args::Scalar;
use crate::context::Ctx;
use crate::error::{ErrorKind, Result, runtime, unsupported};
use crate::library::{Item, Outcome};
use crate::out::OutStrides;
use crate::row::Row;
use crate::{Layout, op};
use oxitorch_hlo::{Builder, DType, Precision, TensorType, Value};

/// The rows of this family: decompositions of LAPACK that neither StableHLO nor a few lines of it have. Where programs
/// may call torch's kernels they do; elsewhere there are loops for those that are worth one.
pub static ROWS: &[Row] = &[
    op!("geqrf", geqrf).layout(Layout::Matrices).out_strides(OutStrides::OfResultIfEmpty),
    op!("linalg_qr", qr).layout(Layout::Matrices),
    op!("linalg_householder_product", householder_product)
        .layout(Layout::Matrices)
        .out_strides(OutStrides::OfResultIfEmpty),
    op!("ormqr", ormqr).layout(Layout::Matrices).out_strides(OutStrides::OfResultIfEmpty),
    op!("linalg_eig", eig).layout(Layout::Matrices).may_fail().out_strides(OutStrides::OfResultIfEmpty),
    op!("_linalg_eigvals", eigvals).may_fail().serves(&["linalg_eigvals.out"]),
    op!("_linalg_eigh", eigh).layout(Layout::Matrices).may_fail(),
    op!("_linalg_svd", svd).layout(Layout::Matrices).may_fail(),
    op!("linalg_ldl_factor_ex", ldl_factor).layout(Layout::Matrices),
    op!("linalg_ldl_solve", ldl_solve).layout(Layout::Matrices),
    op!("linalg_lstsq", lstsq).layout(Layout::Matrices).may_fail(),
];

/// A result: matrices that LAPACK left column by column, or anything else.
fn result(dtype: DType, shape: &[i64], matrices: bool) -> Option<Outcome> {
    let ty = TensorType::new(dtype, shape);
    Some(if matrices { Outcome::column_major(ty) } else { Outcome::row_major(ty) })
}

/// The results of torch's own kernel.
fn call(c: &Ctx, op: &str, args: &[Item<'_>], results: &[Option<Outcome>]) -> Result<Vec<Value>> {
    if !c.config.target.library {
        return Err(unsupported("this platform's compiler has no such decomposition"));
    }
    Ok(c.call_library(op, args, results).into_iter().flatten().collect())
}

/// The dtype of sizes and of eigenvalues of Hermitian matrices.
fn real_of(dtype: DType) -> DType {
    match dtype {
        DType::C64 => DType::F32,
        DType::C128 => DType::F64,
        other => other,
    }
}

fn complex_of(dtype: DType) -> DType {
    match dtype {
        DType::F32 => DType::C64,
        DType::F64 => DType::C128,
        other => other,
    }
}

// ---------------------------------------------------------------- Householder reflections

/// Reflections `I - tau v v*`, in LAPACK's packing: `v` below the diagonal, its first element is 1.
struct Reflections {
    /// `[batch.., rows, columns]`: above and on the diagonal is what they make of a matrix.
    packed: Value,
    /// `[batch.., min(rows, columns)]`
    tau: Value,
}

fn reflections(c: &Ctx, x: Value, m: &Matrix) -> Result<Reflections> {
    let steps = m.rows.min(m.columns);
    let (dtype, tau_shape) = (c.dtype(x), with_batch(&m.batch, &[steps]));
    if c.numel(x) == 0 {
        return Ok(Reflections { packed: x, tau: zeros(c, dtype, &tau_shape) });
    }
    if c.config.target.library {
        let results = [result(dtype, &c.shape(x), true), result(dtype, &tau_shape, false)];
        let out = call(c, "geqrf.a", &[Item::Tensor(x)], &results)?;
        return Ok(Reflections { packed: out[0], tau: out[1] });
    }
    let count: i64 = m.batch.iter().product();
    let flat = c.reshape(x, &[count, m.rows, m.columns]);
    let limit = c.scalar_i64(DType::S32, steps);
    let start = [flat, zeros(c, dtype, &[count, steps])];
    let out = c.for_loop(c.scalar_i64(DType::S32, 0), limit, &start, |b, k, state| {
        let (a, tau) = reflect(b, k, state[0]);
        let zero = b.scalar_i64(DType::S32, 0);
        vec![a, b.dynamic_update_slice(state[1], tau, &[zero, k])]
    });
    Ok(Reflections { packed: c.reshape(out[0], &c.shape(x)), tau: c.reshape(out[1], &tau_shape) })
}

/// A column `[count, rows]` of matrices, and the position of each of its elements.
fn column(b: &Builder, a: Value, k: Value) -> (Value, Value) {
    let shape = b.shape(a);
    let zero = b.scalar_i64(DType::S32, 0);
    let x = b.reshape(b.dynamic_slice(a, &[zero, zero, k], &[shape[0], shape[1], 1]), &shape[..2]);
    (x, b.iota_dim(x, DType::S32, 1))
}

/// `x[:, k]` of `[count, n]`, as `[count, 1]`.
fn element(b: &Builder, x: Value, k: Value) -> Value {
    b.dynamic_slice(x, &[b.scalar_i64(DType::S32, 0), k], &[b.shape(x)[0], 1])
}

/// A number of each matrix `[count, 1]` for each element of `[count, ..]`.
fn spread(b: &Builder, x: Value, shape: &[i64]) -> Value {
    b.broadcast_in_dim(b.reshape(x, &[b.shape(x)[0]]), shape, &[0])
}

fn conjugate(b: &Builder, x: Value) -> Value {
    if b.dtype(x).is_complex() { b.complex(b.real(x), b.negate(b.imag(x))) } else { x }
}

/// LAPACK's `larfg` and `larf` for column `k`: returns the matrices with the reflection in that column and done to those
/// right of it, and its `tau` `[count, 1]`.
fn reflect(b: &Builder, k: Value, a: Value) -> (Value, Value) {
    let shape = b.shape(a);
    let (x, row) = column(b, a, k);
    let at = b.full(k, &b.shape(x));
    let (below, here) = (b.gt(row, at), b.eq(row, at));
    let tail = b.select(below, x, b.zeros_like(x));
    let alpha = element(b, x, k);
    let size = |v: Value| b.abs(v);
    // Scaled, so that squares of large numbers do not overflow.
    let whole = b.select(b.ge(row, at), x, b.zeros_like(x));
    let largest = b.reduce_max(size(whole), &[1]);
    let largest = b.select(b.eq(largest, b.zeros_like(largest)), b.ones_like(largest), largest);
    let scaled = |v: Value| b.divide(size(v), b.broadcast_in_dim(largest, &b.shape(v), &[0]));
    let squares = |v: Value| b.reduce_sum(b.multiply(scaled(v), scaled(v)), &[1]);
    let column1 = |v: Value| b.reshape(v, &[b.shape(v)[0], 1]);
    let norm = column1(b.multiply(b.sqrt(squares(whole)), largest));
    let rest = column1(squares(tail));
    let is_complex = b.dtype(a).is_complex();
    let re = if is_complex { b.real(alpha) } else { alpha };
    let zero = b.zeros_like(re);
    let mut done = b.eq(rest, b.zeros_like(rest));
    if is_complex {
        done = b.and(done, b.eq(b.imag(alpha), zero));
    }
    let beta = b.select(b.ge(re, zero), b.negate(norm), norm);
    let safe = b.select(done, b.ones_like(beta), beta);
    let back = |v: Value| if is_complex { b.complex(v, b.zeros_like(v)) } else { v };
    let tau = b.divide(b.subtract(back(safe), alpha), back(safe));
    let tau = b.select(done, b.zeros_like(tau), tau);
    let over = b.subtract(alpha, back(safe));
    let over = b.select(done, b.ones_like(over), over);
    let v = b.divide(tail, spread(b, over, &b.shape(x)));
    let v = b.select(here, b.ones_like(v), v);
    // The columns to the right: a - conj(tau) v (v* a).
    let right = b.gt(b.iota_dim(a, DType::S32, 2), b.full(k, &shape));
    let product = b.reduce_sum(b.multiply(b.broadcast_in_dim(conjugate(b, v), &shape, &[0, 1]), a), &[1]);
    let product = b.multiply(product, spread(b, conjugate(b, tau), &b.shape(product)));
    let change =
        b.multiply(b.broadcast_in_dim(v, &shape, &[0, 1]), b.broadcast_in_dim(product, &shape, &[0, 2]));
    let moved = b.select(right, b.subtract(a, change), a);
    let diagonal = b.select(done, alpha, back(beta));
    let new = b.select(here, spread(b, diagonal, &b.shape(x)), b.select(below, v, x));
    let zero = b.scalar_i64(DType::S32, 0);
    (b.dynamic_update_slice(moved, b.reshape(new, &[shape[0], shape[1], 1]), &[zero, zero, k]), tau)
}

/// `H0 H1 .. y` if `forward` is not set (the last reflection comes first), else `.. H1 H0 y`, with `tau` conjugated if
/// `turned`. All of `packed` `[count, rows, columns]`, `tau` `[count, steps]`, `y` `[count, rows, n]`.
fn apply(c: &Ctx, r: &Reflections, y: Value, forward: bool, turned: bool) -> Value {
    let steps = c.shape(r.tau)[1];
    let shape = c.shape(y);
    if steps == 0 || shape.contains(&0) {
        return y;
    }
    let limit = c.scalar_i64(DType::S32, steps);
    let out = c.for_loop(c.scalar_i64(DType::S32, 0), limit, &[y], |b, k, state| {
        let k = if forward { k } else { b.subtract(b.scalar_i64(DType::S32, steps - 1), k) };
        let (x, row) = column(b, r.packed, k);
        let at = b.full(k, &b.shape(x));
        let v = b.select(b.gt(row, at), x, b.zeros_like(x));
        let v = b.select(b.eq(row, at), b.ones_like(v), v);
        let tau = element(b, r.tau, k);
        let tau = if turned { conjugate(b, tau) } else { tau };
        let wide = |x: Value| b.broadcast_in_dim(x, &shape, &[0, 1]);
        let product = b.reduce_sum(b.multiply(wide(conjugate(b, v)), state[0]), &[1]);
        let product = b.multiply(product, spread(b, tau, &b.shape(product)));
        let change = b.multiply(wide(v), b.broadcast_in_dim(product, &shape, &[0, 2]));
        vec![b.subtract(state[0], change)]
    });
    out[0]
}

/// Batches as one dimension.
fn flat(c: &Ctx, x: Value, kept: usize) -> Value {
    let shape = c.shape(x);
    let (batch, rest) = shape.split_at(shape.len() - kept);
    c.reshape(x, &with_batch(&[batch.iter().product()], rest))
}

/// The first columns of the product of reflections.
fn product(c: &Ctx, r: &Reflections, m: &Matrix, columns: i64) -> Result<Value> {
    let dtype = c.dtype(r.packed);
    let shape = with_batch(&m.batch, &[m.rows, columns]);
    let whole = zeros(c, dtype, &shape);
    if shape.contains(&0) {
        return Ok(whole);
    }
    let steps = c.shape(r.tau).last().copied().unwrap_or(0);
    if c.config.target.library && steps > 0 && columns <= m.rows {
        // LAPACK makes as many columns as the packed matrix has.
        let last = c.rank(r.packed) as i64 - 1;
        let have = c.shape(r.packed)[last as usize];
        let packed = if have >= columns {
            c.slice_dim(r.packed, last, 0, columns, 1)
        } else {
            let more = zeros(c, dtype, &with_batch(&m.batch, &[m.rows, columns - have]));
            c.concatenate(&[r.packed, more], last)
        };
        let args = [Item::Tensor(packed), Item::Tensor(r.tau)];
        return Ok(call(c, "linalg_householder_product.out", &args, &[result(dtype, &shape, true)])?[0]);
    }
    let start = flat(c, identity(c, whole), 2);
    let flat = Reflections { packed: flat(c, r.packed, 2), tau: flat(c, r.tau, 1) };
    Ok(c.reshape(apply(c, &flat, start, false, false), &shape))
}

fn geqrf(c: &Ctx, x: Value) -> Result<(Value, Value)> {
    let m = Matrix::some(c, "torch.geqrf", x)?;
    lapack(c, "geqrf_cpu", x)?;
    let r = reflections(c, x, &m)?;
    Ok((r.packed, r.tau))
}

fn qr(c: &Ctx, x: Value, mode: String) -> Result<(Value, Value)> {
    let m = Matrix::new(c, "linalg.qr", x)?;
    if !matches!(mode.as_str(), "reduced" | "complete" | "r") {
        return Err(runtime(format!(
            "qr received unrecognized mode '{mode}' but expected one of 'reduced' (default), 'r', or 'complete'"
        )));
    }
    lapack(c, "geqrf_cpu", x)?;
    let r = reflections(c, x, &m)?;
    let rank = c.rank(x) as i64;
    let kept = if mode == "complete" { m.rows } else { m.rows.min(m.columns) };
    let upper = triangle(c, c.slice_dim(r.packed, rank - 2, 0, kept, 1), true);
    let q = if mode == "r" { zeros(c, c.dtype(x), &[0]) } else { product(c, &r, &m, kept)? };
    Ok((q, upper))
}

fn householder_product(c: &Ctx, x: Value, tau: Value) -> Result<Value> {
    let name = "torch.linalg.householder_product";
    let m = Matrix::some(c, name, x)?;
    let steps = c.shape(tau).last().copied().unwrap_or(0);
    if m.rows < m.columns {
        return Err(runtime(format!(
            "{name}: input.shape[-2] must be greater than or equal to input.shape[-1]"
        )));
    }
    if m.columns < steps {
        return Err(runtime(format!(
            "{name}: input.shape[-1] must be greater than or equal to tau.shape[-1]"
        )));
    }
    one_batch(c, name, &m, tau)?;
    lapack(c, "orgqr_cpu", x)?;
    product(c, &Reflections { packed: x, tau }, &m, m.columns)
}

/// Whether `tau` belongs to the matrices.
fn one_batch(c: &Ctx, name: &str, m: &Matrix, tau: Value) -> Result<()> {
    let shape = c.shape(tau);
    let rank = m.batch.len() + 2;
    if shape.len() + 1 != rank {
        return Err(runtime(format!(
            "{name}: Expected tau to have one dimension less than input, but got tau.ndim equal to {} and input.ndim is \
             equal to {rank}",
            shape.len()
        )));
    }
    if shape[..rank - 2] != m.batch[..] {
        return Err(runtime(format!(
            "{name}: Expected batch dimensions of tau to be equal to input.shape[:-2], but got {:?}",
            &shape[..rank - 2]
        )));
    }
    Ok(())
}

fn ormqr(c: &Ctx, packed: Value, tau: Value, other: Value, left: bool, transpose: bool) -> Result<Value> {
    let name = "torch.ormqr";
    let m = Matrix::some(c, name, packed)?;
    let o = Matrix::some(c, name, other)?;
    let (side, place) = if left { (o.rows, "-2") } else { (o.columns, "-1") };
    let steps = c.shape(tau).last().copied().unwrap_or(0);
    if steps > side {
        return Err(runtime(format!(
            "{name}: other.shape[{place}] must be greater than or equal to tau.shape[-1]"
        )));
    }
    if side != m.rows {
        return Err(runtime(format!("{name}: other.shape[{place}] must be equal to input.shape[-2]")));
    }
    if steps > m.columns {
        return Err(runtime(format!(
            "{name}: input.shape[-1] must be greater than or equal to tau.shape[-1]"
        )));
    }
    one_batch(c, name, &m, tau)?;
    if o.batch != m.batch {
        return Err(runtime(format!(
            "{name}: Expected batch dimensions of other to be equal to input.shape[:-2], but got {:?}",
            &o.batch[..]
        )));
    }
    lapack(c, "ormqr_cpu", packed)?;
    let shape = c.shape(other);
    if shape.contains(&0) || steps == 0 {
        return Ok(other);
    }
    if c.config.target.library && m.columns <= m.rows {
        let args = [
            Item::Tensor(packed),
            Item::Tensor(tau),
            Item::Tensor(other),
            Item::Bool(left),
            Item::Bool(transpose),
        ];
        return Ok(call(c, "ormqr.out", &args, &[result(c.dtype(other), &shape, true)])?[0]);
    }
    let r = Reflections { packed: flat(c, packed, 2), tau: flat(c, tau, 1) };
    if left {
        return Ok(c.reshape(apply(c, &r, flat(c, other, 2), transpose, transpose), &shape));
    }
    // y Q is the adjoint of Q* y*.
    let turned = apply(c, &r, flat(c, adjoint(c, other), 2), !transpose, !transpose);
    Ok(adjoint(c, c.reshape(turned, &with_batch(&o.batch, &[o.columns, o.rows]))))
}

// ---------------------------------------------------------------- eigenvalues

fn eig(c: &Ctx, x: Value) -> Result<(Value, Value)> {
    let m = Matrix::square(c, "linalg.eig", x)?;
    lapack(c, "linalg_eig", x)?;
    let (dtype, shape) = (complex_of(c.dtype(x)), c.shape(x));
    let values = with_batch(&m.batch, &[m.rows]);
    if c.numel(x) == 0 {
        return Ok((zeros(c, dtype, &values), zeros(c, dtype, &shape)));
    }
    let results = [result(dtype, &values, false), result(dtype, &shape, true)];
    let out = call(c, "linalg_eig.out", &[Item::Tensor(x)], &results)?;
    Ok((out[0], out[1]))
}

fn eigvals(c: &Ctx, x: Value) -> Result<Value> {
    let m = Matrix::square(c, "linalg.eigvals", x)?;
    lapack(c, "linalg_eig", x)?;
    let (dtype, values) = (complex_of(c.dtype(x)), with_batch(&m.batch, &[m.rows]));
    if c.numel(x) == 0 {
        return Ok(zeros(c, dtype, &values));
    }
    // LAPACK may crash on what is not finite, and this kernel does not look.
    let rank = c.rank(x) as i64;
    let finite = c.reduce_all(is_finite(c, x), &[rank - 2, rank - 1]);
    let batch: Vec<i64> = (0..rank - 2).collect();
    let safe = c.select(c.broadcast_in_dim(finite, &c.shape(x), &batch), x, c.zeros_like(x));
    let out = call(c, "linalg_eigvals.out", &[Item::Tensor(safe)], &[result(dtype, &values, false)])?[0];
    let nan = c.like(out, f64::NAN);
    Ok(c.select(c.broadcast_in_dim(finite, &values, &batch), out, nan))
}

fn is_finite(c: &Ctx, x: Value) -> Value {
    if c.dtype(x).is_complex() {
        c.and(c.is_finite(c.real(x)), c.is_finite(c.imag(x)))
    } else {
        c.is_finite(x)
    }
}

/// `"L"` or `"U"`.
fn is_upper(uplo: &str) -> Result<bool> {
    match uplo {
        "L" | "l" => Ok(false),
        "U" | "u" => Ok(true),
        _ => Err(runtime(format!("Expected UPLO argument to be 'L' or 'U', but got {uplo}"))),
    }
}

/// As LAPACK does, rotations find nothing where a number is none.
fn require_finite(c: &Ctx, name: &str, x: Value) {
    let text = format!(
        "{name}: The algorithm failed to converge because the input matrix contained non-finite values."
    );
    c.assert(ErrorKind::LinAlg, text, || c.all(c.is_finite(c.abs(x))));
}

pub(super) fn eigh(c: &Ctx, x: Value, uplo: String, compute_v: bool) -> Result<(Value, Value)> {
    let m = Matrix::square(c, "linalg.eigh", x)?;
    is_upper(&uplo)?;
    lapack(c, "linalg_eigh_cpu", x)?;
    let (dtype, shape) = (c.dtype(x), c.shape(x));
    let values = with_batch(&m.batch, &[m.rows]);
    let none = zeros(c, dtype, &[0]);
    if c.numel(x) == 0 {
        return Ok((zeros(c, real_of(dtype), &values), if compute_v { x } else { none }));
    }
    if !c.config.target.library {
        require_finite(c, "linalg.eigh", x);
        let whole = jacobi::hermitian(c, flat(c, x, 2), is_upper(&uplo)?);
        let (sizes, vectors) = jacobi::eigen(c, whole);
        return Ok((c.reshape(sizes, &values), if compute_v { c.reshape(vectors, &shape) } else { none }));
    }
    let vectors = if compute_v { result(dtype, &shape, true) } else { result(dtype, &[0], false) };
    let args = [Item::Tensor(x), Item::Str(&uplo), Item::Bool(compute_v)];
    let out = call(c, "_linalg_eigh.eigenvalues", &args, &[result(real_of(dtype), &values, false), vectors])?;
    Ok((out[0], out[1]))
}

// ---------------------------------------------------------------- singular values

/// Identity matrices as far as they are square.
fn eye(c: &Ctx, dtype: DType, shape: &[i64]) -> Value {
    if shape.contains(&0) { zeros(c, dtype, shape) } else { identity(c, zeros(c, dtype, shape)) }
}

pub(super) fn svd(
    c: &Ctx,
    x: Value,
    full: bool,
    compute_uv: bool,
    driver: Option<String>,
) -> Result<Vec<Value>> {
    let m = Matrix::new(c, "linalg.svd", x)?;
    if driver.is_some() {
        return Err(runtime(
            "torch.linalg.svd: keyword argument `driver=` is only supported on CUDA inputs with cuSOLVER backend.",
        ));
    }
    lapack(c, "linalg_svd_cpu", x)?;
    let dtype = c.dtype(x);
    let k = m.rows.min(m.columns);
    let (rows, columns) = if full { (m.rows, m.columns) } else { (k, k) };
    let left = with_batch(&m.batch, &[m.rows, rows]);
    let right = with_batch(&m.batch, &[columns, m.columns]);
    let sizes = with_batch(&m.batch, &[k]);
    let none = zeros(c, dtype, &[0]);
    if c.numel(x) == 0 {
        let sizes = zeros(c, real_of(dtype), &sizes);
        let (u, v) = (eye(c, dtype, &left), eye(c, dtype, &right));
        return Ok(if compute_uv { vec![u, sizes, v] } else { vec![none, sizes, none] });
    }
    if !c.config.target.library {
        require_finite(c, "linalg.svd", x);
        return singular(c, x, &m, rows, columns, compute_uv);
    }
    let vectors = |shape: &[i64]| {
        if compute_uv { result(dtype, shape, true) } else { result(dtype, &[0], false) }
    };
    let results = [vectors(&left), result(real_of(dtype), &sizes, false), vectors(&right)];
    let args = [Item::Tensor(x), Item::Bool(full), Item::Bool(compute_uv), Item::None];
    call(c, "_linalg_svd.U", &args, &results)
}

/// The decomposition by rotations: of the columns of `x`, or of its adjoint where that has fewer.
fn singular(c: &Ctx, x: Value, m: &Matrix, rows: i64, columns: i64, compute_uv: bool) -> Result<Vec<Value>> {
    let wide = m.rows < m.columns;
    let tall = flat(c, if wide { adjoint(c, x) } else { x }, 2);
    let r = jacobi::rotate(c, tall);
    let sizes = c.reshape(r.sizes, &with_batch(&m.batch, &[m.rows.min(m.columns)]));
    if !compute_uv {
        let none = zeros(c, c.dtype(x), &[0]);
        return Ok(vec![none, sizes, none]);
    }
    // Columns of norm zero have no direction; those of Q are orthogonal all the same, and R is diagonal.
    let of = Matrix::some(c, "linalg.svd", tall)?;
    let q = reflections(c, r.b, &of)?;
    let kept = if wide { columns } else { rows };
    let all = product(c, &q, &of, kept)?;
    let rank = c.shape(r.b)[2];
    let on = diagonal(c, c.slice_dim(q.packed, 1, 0, rank, 1));
    let sign = c.sign(on);
    let sign = c.select(c.eq(on, c.zeros_like(on)), c.ones_like(sign), sign);
    let sign = c.pad_dim(sign, c.scalar_i64(c.dtype(x), 1), 1, 0, kept - rank);
    let long = c.multiply(all, c.broadcast_in_dim(sign, &c.shape(all), &[0, 2]));
    let (long_shape, short_shape) =
        (with_batch(&m.batch, &[of.rows, kept]), with_batch(&m.batch, &[rank, rank]));
    let (long, short) = (c.reshape(long, &long_shape), c.reshape(r.v, &short_shape));
    Ok(if wide { vec![short, sizes, adjoint(c, long)] } else { vec![long, sizes, adjoint(c, short)] })
}

// ---------------------------------------------------------------- LDL and least squares

fn ldl_factor(c: &Ctx, x: Value, hermitian: bool, check_errors: bool) -> Result<(Value, Value, Value)> {
    unchecked(check_errors)?;
    let m = Matrix::square(c, "torch.linalg.ldl_factor_ex", x)?;
    lapack(c, "ldl_factor_kernel_cpu", x)?;
    let shape = c.shape(x);
    let pivots = with_batch(&m.batch, &[m.rows]);
    if c.numel(x) == 0 {
        return Ok((x, zeros(c, DType::S32, &pivots), zeros(c, DType::S32, &m.batch)));
    }
    let results = [
        result(c.dtype(x), &shape, true),
        result(DType::S32, &pivots, false),
        result(DType::S32, &m.batch, false),
    ];
    let args = [Item::Tensor(x), Item::Bool(hermitian), Item::Bool(false)];
    let out = call(c, "linalg_ldl_factor_ex.out", &args, &results)?;
    Ok((out[0], out[1], out[2]))
}

fn ldl_solve(c: &Ctx, factors: Value, pivots: Value, b: Value, hermitian: bool) -> Result<Value> {
    let name = "torch.linalg.ldl_solve";
    let m = Matrix::square(c, name, factors)?;
    let k = Matrix::new(c, name, b)?;
    if m.rows != k.rows {
        return Err(runtime(format!(
            "Incompatible matrix sizes for {name}: each A matrix is {0} by {0} but each b matrix is {1} by {2}",
            m.rows, k.rows, k.columns
        )));
    }
    let shape = c.shape(factors);
    if c.shape(pivots)[..] != shape[..shape.len() - 1] {
        return Err(runtime(format!(
            "{name}: Expected LD.shape[:-1] and pivots.shape to be the same, but got pivots with shape {:?} instead",
            &c.shape(pivots)[..]
        )));
    }
    if !c.dtype(pivots).is_integral() {
        return Err(runtime(format!("{name}: Expected pivots to be integers")));
    }
    if c.dtype(factors) != c.dtype(b) {
        return Err(runtime("ldl_solve: Expected LD and B to have the same dtype"));
    }
    lapack(c, "ldl_solve_kernel_cpu", factors)?;
    let (factors, b) = same_batch(c, factors, b)?;
    let (shape, out) = (c.shape(factors), c.shape(b));
    if out.contains(&0) {
        return Ok(zeros(c, c.dtype(b), &out));
    }
    let pivots = c.expand(c.to(pivots, DType::S32), &shape[..shape.len() - 1])?;
    let args = [Item::Tensor(factors), Item::Tensor(pivots), Item::Tensor(b), Item::Bool(hermitian)];
    Ok(call(c, "linalg_ldl_solve.out", &args, &[result(c.dtype(b), &out, true)])?[0])
}

/// Solutions, residuals, ranks and singular values, of which each driver gives some.
fn lstsq(c: &Ctx, a: Value, b: Value, rcond: Option<Scalar>, driver: Option<String>) -> Result<Vec<Value>> {
    let name = "torch.linalg.lstsq";
    let m = Matrix::some(c, name, a)?;
    let driver = driver.unwrap_or_else(|| "gelsy".into());
    let (shape, other) = (c.shape(a), c.shape(b));
    if other.is_empty() {
        return Err(runtime(format!("{name}: other must have at least 1 dimension.")));
    }
    let n = shape.len();
    let vector = other.len() + 1 == n && other[..] == shape[..n - 1];
    let fits = vector || (other.len() > 1 && other[other.len() - 2] == m.rows);
    if !matches!(driver.as_str(), "gels" | "gelsy" | "gelsd" | "gelss") {
        return Err(runtime(format!(
            "{name}: parameter `driver` should be one of (gels, gelsy, gelsd, gelss)"
        )));
    }
    if !fits {
        return Err(runtime(format!("{name}: input.size(-2) should match other.size(-2)")));
    }
    if c.dtype(a) != c.dtype(b) {
        return Err(unsupported("matrices of two dtypes"));
    }
    lapack(c, "linalg_lstsq_cpu", a)?;
    let tall = m.rows > m.columns;
    let by_size = matches!(driver.as_str(), "gelsd" | "gelss");
    if by_size && tall {
        return Err(unsupported("whether there are residuals depends on the ranks"));
    }
    let rhs = if vector { c.unsqueeze(b, other.len() as i64) } else { b };
    let (a, rhs) = same_batch(c, a, rhs)?;
    let (shape, other) = (c.shape(a), c.shape(rhs));
    let batch = &shape[..shape.len() - 2];
    let columns = other[other.len() - 1];
    let dtype = c.dtype(a);
    let solution = with_batch(batch, &[m.columns, columns]);
    let residuals =
        if tall && driver == "gels" { with_batch(batch, &[columns]) } else { [0].as_slice().into() };
    let singular = if by_size { with_batch(batch, &[m.rows.min(m.columns)]) } else { [0].as_slice().into() };
    let ranks = if driver == "gels" { [0].as_slice().into() } else { batch.to_vec() };
    if c.numel(a) == 0 || c.numel(rhs) == 0 {
        return Err(unsupported("matrices without elements"));
    }
    let results = [
        result(dtype, &solution, true),
        result(real_of(dtype), &residuals, false),
        result(DType::S64, &ranks, false),
        result(real_of(dtype), &singular, false),
    ];
    let mut out = if c.config.target.library {
        let rcond = rcond.map_or(Item::None, |r| Item::Number(c.number(r, DType::F64)));
        let args = [Item::Tensor(a), Item::Tensor(rhs), rcond, Item::Str(&driver)];
        call(c, "linalg_lstsq.out", &args, &results)?
    } else {
        least_squares(c, a, rhs, rcond, &driver)?
    };
    if vector {
        out[0] = c.squeeze(out[0], &[c.rank(out[0]) as i64 - 1]);
    }
    Ok(out)
}

/// The same by singular values: those up to `rcond` times the largest count as zero.
fn least_squares(c: &Ctx, a: Value, b: Value, rcond: Option<Scalar>, driver: &str) -> Result<Vec<Value>> {
    let m = Matrix::some(c, "torch.linalg.lstsq", a)?;
    let parts = svd(c, a, false, true, None)?;
    let &[u, sizes, vh] = parts.as_slice() else {
        return Err(runtime("torch.linalg.lstsq: no decomposition"));
    };
    let real = c.dtype(sizes);
    // "gels" takes the rank to be full and looks at no `rcond`.
    let rcond = match rcond {
        _ if driver == "gels" => c.scalar_f64(real, 0.0),
        Some(given) => c.number(given, real),
        None => c.scalar_f64(real, c.epsilon(real) * m.rows.max(m.columns) as f64),
    };
    let last = c.rank(sizes) as i64 - 1;
    let batch: Vec<i64> = (0..last).collect();
    let shape = c.shape(sizes);
    let largest = c.broadcast_in_dim(c.reduce_max(sizes, &[last]), &shape, &batch);
    let counts = c.gt(sizes, c.multiply(largest, c.full(rcond, &shape)));
    let inverse = c.select(counts, c.divide(c.ones_like(sizes), sizes), c.zeros_like(sizes));
    let product = |x: Value, y: Value| c.matmul(x, y, Precision::Highest, None);
    let inner = product(adjoint(c, u), b);
    let kept: Vec<i64> = (0..=last).collect();
    let scaled = c.multiply(inner, c.broadcast_in_dim(c.to(inverse, c.dtype(b)), &c.shape(inner), &kept));
    let x = product(adjoint(c, vh), scaled);
    let size = c.abs(c.subtract(b, product(a, x)));
    let none = |dtype: DType| zeros(c, dtype, &[0]);
    let has = |drivers: &[&str]| drivers.contains(&driver);
    let residuals = m.rows > m.columns && has(&["gels"]);
    Ok(vec![
        x,
        if residuals { c.reduce_sum(c.multiply(size, size), &[last]) } else { none(real) },
        if has(&["gels"]) { none(DType::S64) } else { c.reduce_sum(c.to(counts, DType::S64), &[last]) },
        if has(&["gelsd", "gelss"]) { sizes } else { none(real) },
    ])
}
