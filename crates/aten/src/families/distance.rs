use super::scatter::scatter_rows;
use crate::context::Ctx;
use crate::domain;
use crate::dtype::scalar_name;
use crate::error::{Error, Result, not_implemented, runtime};
use crate::library::{FLOATS, Item, Outcome};
use crate::op;
use crate::row::Row;
use oxitorch_hlo::{DType, Dims, TensorType, Value};

/// The rows of this family. Distances between all rows of two tensors, `p` as in `p`-norm.
pub static ROWS: &[Row] = &[
    op!("_cdist_forward", cdist_forward).dtypes(domain::distances),
    op!("_cdist_backward", cdist_backward),
    op!("_pdist_forward", pdist_forward),
    op!("_pdist_backward", pdist_backward),
];

fn check(c: &Ctx, name: &str, x: Value, p: f64) -> Result<()> {
    if !matches!(c.dtype(x), DType::F32 | DType::F64) {
        return Err(not_implemented(name, c.dtype(x)));
    }
    if p < 0.0 || p.is_nan() {
        return Err(runtime(format!("{name} only supports non-negative p values")));
    }
    Ok(())
}

/// `x[.., i, 1, k] - y[.., 1, j, k]`; batch dimensions broadcast.
fn differences(c: &Ctx, x: Value, y: Value) -> Result<Value> {
    let (x, y) = (c.unsqueeze(x, c.rank(x) as i64 - 1), c.unsqueeze(y, c.rank(y) as i64 - 2));
    let [x, y] = c.align([x, y], c.dtype(x))?;
    Ok(c.subtract(x, y))
}

fn power(c: &Ctx, x: Value, p: f64) -> Value {
    match p {
        0.0 => c.ones_like(x),
        1.0 => x,
        2.0 => c.multiply(x, x),
        _ => c.power(x, c.like(x, p)),
    }
}

/// The norm over the last dimension.
fn norm(c: &Ctx, x: Value, p: f64) -> Value {
    let last = [c.rank(x) as i64 - 1];
    if p == 0.0 {
        let zero = c.zeros_like(x);
        return c.reduce_sum(c.convert(c.ne(x, zero), c.dtype(x)), &last);
    }
    let size = c.abs(x);
    if p.is_infinite() {
        return c.reduce_with(oxitorch_hlo::Binary::Maximum, size, c.scalar_i64(c.dtype(x), 0), &last);
    }
    let sum = c.reduce_sum(power(c, size, p), &last);
    match p {
        1.0 => sum,
        2.0 => c.sqrt(sum),
        _ => c.power(sum, c.like(sum, 1.0 / p)),
    }
}

fn cdist_forward(c: &Ctx, x: Value, y: Value, p: f64, _compute_mode: Option<i64>) -> Result<Value> {
    check(c, "cdist", x, p)?;
    let (xs, ys) = (c.shape(x), c.shape(y));
    let (n, m) = (xs.len(), ys.len());
    for (name, rank) in [("X1", n), ("X2", m)] {
        if rank < 2 {
            return Err(runtime(format!("cdist only supports at least 2D tensors, {name} got: {rank}D")));
        }
    }
    let (a, b) = (xs[n - 1], ys[m - 1]);
    if a != b {
        return Err(runtime(format!("X1 and X2 must have the same number of columns. X1: {a} X2: {b}")));
    }
    if c.dtype(x) != c.dtype(y) {
        let (a, b) = (scalar_name(c.dtype(x)), scalar_name(c.dtype(y)));
        return Err(runtime(format!("expected scalar type {a} but found {b}")));
    }
    Ok(norm(c, differences(c, x, y)?, p))
}

/// What one unit of distance contributes to the gradient of each coordinate of `x`, where `d = x - y`.
fn slope(c: &Ctx, d: Value, dist: Value, p: f64) -> Value {
    let zero = c.zeros_like(d);
    if p == 0.0 {
        return zero;
    }
    let sign = c.sign(d);
    if p == 1.0 {
        return sign;
    }
    let size = c.abs(d);
    if p.is_infinite() {
        return c.select(c.eq(size, dist), sign, zero);
    }
    let raw = if p == 2.0 {
        c.divide(d, dist)
    } else {
        c.divide(c.multiply(sign, power(c, size, p - 1.0)), power(c, dist, p - 1.0))
    };
    // At distance zero, and for p below 1 where a coordinate agrees, torch takes zero for the infinite slope.
    let flat = c.eq(dist, zero);
    let flat = if p < 1.0 { c.or(flat, c.eq(d, zero)) } else { flat };
    c.select(flat, zero, raw)
}

fn cdist_backward(c: &Ctx, grad: Value, x: Value, y: Value, p: f64, dist: Value) -> Result<Value> {
    check(c, "cdist", x, p)?;
    let d = differences(c, x, y)?;
    let shape = c.shape(d);
    let last = shape.len() as i64 - 1;
    // PyTorch's rule for `vmap` over gradients alone, as in `jacrev`, takes the result for one of no batch.
    if c.rank(grad) > shape.len() - 1 {
        return Err(runtime(format!(
            "cdist: expected a gradient of {last} dimensions, got {}D: `vmap` over gradients alone, as in `jacrev`, \
             is not available for cdist; `torch.autograd.functional.jacobian` gives the same",
            c.rank(grad)
        )));
    }
    let spread = |v: Value| c.expand(c.unsqueeze(v, c.rank(v) as i64), &shape);
    let (grad, dist) = (spread(grad)?, spread(dist)?);
    let sum = c.reduce_sum(c.multiply(grad, slope(c, d, dist, p)), &[last - 1]);
    // Batches that were broadcast are summed by the caller, who asks for the broadcast shape.
    Ok(sum)
}

/// Row and column of every pair of `n` rows, in the order of pdist.
fn pairs(n: i64) -> (Vec<i64>, Vec<i64>) {
    (0..n).flat_map(|i| (i + 1..n).map(move |j| (i, j))).unzip()
}

/// Whether PyTorch's kernel takes the distances of so many pairs of rows. It has vector code for these norms; for others
/// compiled code is faster.
fn is_for_library(c: &Ctx, x: Value, p: f64, pairs: usize) -> bool {
    let width = c.shape(x)[1].max(1);
    let known = [0.0, 1.0, 2.0, f64::INFINITY].contains(&p);
    known && pairs as i64 >= WORTH_A_CALL / width && c.is_worth_a_call(x, &FLOATS, 1)
}

/// Differences that are worth a call.
const WORTH_A_CALL: i64 = 1 << 14;

fn no_distances() -> Error {
    runtime("pdist: no distances")
}

fn pdist_forward(c: &Ctx, x: Value, p: f64) -> Result<Value> {
    check(c, "pdist", x, p)?;
    let &[n, _] = c.shape(x).as_slice() else {
        let rank = c.rank(x);
        return Err(runtime(format!("pdist only supports 2D tensors, got: {rank}D")));
    };
    let (rows, columns) = pairs(n);
    if rows.is_empty() {
        return Ok(c.full(c.scalar_i64(c.dtype(x), 0), &[0]));
    }
    if is_for_library(c, x, p, rows.len()) {
        let result = Outcome::row_major(TensorType::new(c.dtype(x), [rows.len() as i64].as_slice()));
        let args = [Item::Dense(x), Item::Float(p)];
        return c.call_library("_pdist_forward", &args, &[Some(result)])[0].ok_or_else(no_distances);
    }
    let take = |at: &[i64]| c.take_dim(x, c.vector_i64(DType::S64, at), 0);
    Ok(norm(c, c.subtract(take(&rows), take(&columns)), p))
}

fn pdist_backward(c: &Ctx, grad: Value, x: Value, p: f64, dist: Value) -> Result<Value> {
    check(c, "pdist", x, p)?;
    let shape: Dims = c.shape(x);
    let (rows, columns) = pairs(shape.first().copied().unwrap_or(0));
    let zeros = c.full(c.scalar_i64(c.dtype(x), 0), &shape);
    if rows.is_empty() || shape.contains(&0) {
        return Ok(zeros);
    }
    let fits = [grad, dist].iter().all(|&v| c.shape(v)[..] == [rows.len() as i64]);
    if fits && is_for_library(c, x, p, rows.len()) {
        let result = Outcome::row_major(c.ty(x));
        let args = [Item::Tensor(grad), Item::Dense(x), Item::Float(p), Item::Dense(dist)];
        return c.call_library("_pdist_backward", &args, &[Some(result)])[0].ok_or_else(no_distances);
    }
    let index = |at: &[i64]| c.vector_i64(DType::S64, at);
    let take = |at: &[i64]| c.take_dim(x, index(at), 0);
    let d = c.subtract(take(&rows), take(&columns));
    let wide = |v: Value| c.broadcast_in_dim(v, &c.shape(d), &[0]);
    let pull = c.multiply(wide(grad), slope(c, d, wide(dist), p));
    let add = Some(oxitorch_hlo::Binary::Add);
    let sum = scatter_rows(c, zeros, 0, index(&rows), pull, add);
    Ok(scatter_rows(c, sum, 0, index(&columns), c.negate(pull), add))
}
