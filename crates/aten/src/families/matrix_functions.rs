use super::lapack::{eigh, svd};
use super::linalg::{Matrix, adjoint};
use crate::context::Ctx;
use crate::dtype::opmath;
use crate::error::{Error, Result, runtime};
use crate::op;
use crate::row::Row;
use oxitorch_hlo::{DType, Precision, Value};

/// The rows of this family: functions of matrices, from products and decompositions.
pub static ROWS: &[Row] = &[
    op!("linalg_matrix_exp", matrix_exp),
    op!("linalg_polar", polar),
    op!("linalg_matrix_sqrth", matrix_sqrth),
];

fn product(c: &Ctx, a: Value, b: Value) -> Value {
    c.matmul(a, b, Precision::Highest, None)
}

/// A number of each matrix `[count]` for every element of `[count, n, n]`.
fn spread(c: &Ctx, x: Value, shape: &[i64]) -> Value {
    c.broadcast_in_dim(x, shape, &[0])
}

/// Highest power in the sum below.
const DEGREE: u32 = 18;

/// The 1-norm up to which [`DEGREE`] terms of the exponential series have an error below one rounding, from Bader, Blanes
/// and Casas, "Computing the matrix exponential with an optimized Taylor polynomial approximation" (2019), table 2.
fn largest_norm(dtype: DType) -> f64 {
    if matches!(dtype, DType::F64 | DType::C128) { 1.09 } else { 3.01 }
}

/// The sum of `x^k / k!` for `k` up to [`DEGREE`], in blocks of four powers.
fn series(c: &Ctx, x: Value) -> Value {
    let x2 = product(c, x, x);
    let (x3, x4) = (product(c, x2, x), product(c, x2, x2));
    let shape = c.shape(x);
    let (row, column) = (c.iota_dim(x, DType::S32, 1), c.iota_dim(x, DType::S32, 2));
    let one = c.select(c.eq(row, column), c.ones_like(x), c.zeros_like(x));
    let powers = [one, x, x2, x3];
    let coefficient = |k: u32| 1.0 / (1..=k).map(f64::from).product::<f64>();
    let mut sum = c.zeros_like(x);
    for block in (0..=DEGREE / 4).rev() {
        if block != DEGREE / 4 {
            sum = product(c, sum, x4);
        }
        for (i, &power) in powers.iter().enumerate() {
            let k = 4 * block + i as u32;
            if k <= DEGREE {
                let factor = c.full(c.scalar_f64(c.dtype(x), coefficient(k)), &shape);
                sum = c.add(sum, c.multiply(factor, power));
            }
        }
    }
    sum
}

/// Scaling and squaring: the series of `x / 2^s`, squared `s` times, with an `s` for each matrix.
fn matrix_exp(c: &Ctx, x: Value) -> Result<Value> {
    let m = Matrix::square(c, "linalg.matrix_exp", x)?;
    let dtype = c.dtype(x);
    if c.numel(x) == 0 {
        return Ok(x);
    }
    let wide = opmath(dtype);
    let count: i64 = m.batch.iter().product();
    let shape = [count, m.rows, m.rows];
    let flat = c.reshape(c.to(x, wide), &shape);
    if m.rows == 1 {
        return Ok(c.to(c.reshape(c.exponential(flat), &c.shape(x)), dtype));
    }
    let norm = c.reduce_max(c.reduce_sum(c.abs(flat), &[1]), &[1]);
    let ratio = c.divide(norm, c.like(norm, largest_norm(wide)));
    let steps = c.ceil(c.divide(c.log(ratio), c.like(norm, std::f64::consts::LN_2)));
    // Nothing helps a matrix that is not finite, and zero has no logarithm.
    let scaled = c.and(c.gt(ratio, c.ones_like(ratio)), c.is_finite(ratio));
    let steps = c.select(scaled, steps, c.zeros_like(steps));
    let scale = c.power(c.like(steps, 0.5), steps);
    let mut start = series(c, c.multiply(flat, spread(c, c.to(scale, wide), &shape)));
    let steps = c.to(steps, DType::S32);
    let most = c.reduce_max(steps, &[0]);
    start = c.for_loop(c.scalar_i64(DType::S32, 0), most, &[start], |b, i, state| {
        let square = b.matmul(state[0], state[0], Precision::Highest, None);
        let more = b.gt(steps, b.full(i, &[count]));
        vec![b.select(b.broadcast_in_dim(more, &shape, &[0]), square, state[0])]
    })[0];
    Ok(c.to(c.reshape(start, &c.shape(x)), dtype))
}

/// Columns of `v` times numbers.
fn scaled_columns(c: &Ctx, v: Value, by: Value) -> Value {
    let shape = c.shape(v);
    let rank = shape.len() as i64;
    let dims: Vec<i64> = (0..rank).filter(|&d| d != rank - 2).collect();
    c.multiply(v, c.broadcast_in_dim(c.to(by, c.dtype(v)), &shape, &dims))
}

/// `v diag(by) v*`, Hermitian to the last bit.
fn hermitian(c: &Ctx, v: Value, by: Value) -> Value {
    let h = product(c, scaled_columns(c, v, by), adjoint(c, v));
    let half = c.full(c.scalar_f64(c.dtype(h), 0.5), &c.shape(h));
    c.multiply(c.add(h, adjoint(c, h)), half)
}

fn polar(c: &Ctx, x: Value) -> Result<(Value, Value)> {
    let m = Matrix::new(c, "linalg.polar", x)?;
    if m.rows < m.columns {
        return Err(runtime(format!(
            "linalg.polar: input must have at least as many rows as columns, but got {} by {} matrices",
            m.rows, m.columns
        )));
    }
    let parts = svd(c, x, false, true, None)?;
    let &[u, sizes, vh] = parts.as_slice() else { return Err(runtime("linalg.polar: no decomposition")) };
    if c.numel(x) == 0 {
        return Ok((x, c.zeros_like(vh)));
    }
    Ok((product(c, u, vh), hermitian(c, adjoint(c, vh), sizes)))
}

fn matrix_sqrth(c: &Ctx, x: Value) -> Result<Value> {
    let name = "linalg.matrix_sqrth";
    Matrix::square(c, name, x)?;
    let dtype = c.dtype(x);
    if !matches!(dtype, DType::F32 | DType::F64 | DType::C64 | DType::C128) {
        let got = crate::dtype::scalar_name(dtype);
        return Err(Error::NotImplemented(format!("{name}: Low precision dtypes not supported. Got {got}")));
    }
    let (values, vectors) = eigh(c, x, "L".into(), true)?;
    if c.numel(x) == 0 {
        return Ok(x);
    }
    let roots = c.sqrt(c.maximum(values, c.zeros_like(values)));
    Ok(hermitian(c, vectors, roots))
}
