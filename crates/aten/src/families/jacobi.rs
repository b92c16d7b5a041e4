//! One-sided Jacobi: orthogonal decompositions from rotations of pairs of columns, for compilers that have no LAPACK.
//!
//! Columns are paired as in a round-robin tournament, so that half of them are rotated at once; a sweep is the rounds in
//! which every column meets every other. See Hestenes, "Inversion of matrices by biorthogonalization" (1958), and Demmel
//! and Veselic, "Jacobi's method is more accurate than QR" (1992).

use super::linalg::adjoint;
use crate::context::Ctx;
use oxitorch_hlo::{Builder, DType, Dims, TensorType, Value};

/// Sweeps after which columns are as orthogonal as they get; six to ten are usual.
const MOST_SWEEPS: i64 = 24;

/// `x v = b` with orthogonal columns in `b` and a unitary `v`, both in the order of falling `sizes`, the norms of the
/// columns.
pub(super) struct Rotated {
    /// `[count, rows, columns]`
    pub(super) b: Value,
    /// `[count, columns, columns]`
    pub(super) v: Value,
    /// Real `[count, columns]`
    pub(super) sizes: Value,
}

/// Columns left and right of a table at which each meets the one across: `[count, rows, n / 2]` each.
type Pairs = (Value, Value);

/// Rotates columns of `x` `[count, rows, columns]`, not empty, until they are orthogonal.
pub(super) fn rotate(c: &Ctx, x: Value) -> Rotated {
    let &[count, rows, columns] = c.shape(x).as_slice() else {
        return Rotated { b: x, v: x, sizes: x };
    };
    let dtype = c.dtype(x);
    // An even number of players: one that is zero meets the one who would have nobody.
    let players = columns + columns % 2;
    let zero = c.scalar_i64(dtype, 0);
    let square = TensorType::new(DType::S32, [count, players, players].as_slice());
    let one = c.to(c.eq(c.iota(square.clone(), 1), c.iota(square, 2)), dtype);
    let largest = c.reduce_max(c.abs(x), &[1, 2]);
    let usable = c.and(c.is_finite(largest), c.ne(largest, c.zeros_like(largest)));
    let scale = c.select(usable, largest, c.ones_like(largest));
    let wide = |v: Value, shape: &[i64]| c.broadcast_in_dim(v, shape, &[0]);
    let scaled = c.divide(x, c.to(wide(scale, &c.shape(x)), dtype));
    // The rotations are done to the identity below as well.
    let all = c.concatenate(&[c.pad_dim(scaled, zero, 2, 0, players - columns), one], 1);
    let pairs = [c.slice_dim(all, 2, 0, players / 2, 1), c.slice_dim(all, 2, players / 2, players, 1)];
    let out = sweeps(c, &pairs, rows, players);
    let all = c.slice_dim(c.concatenate(&[out[0], out[1]], 2), 2, 0, columns, 1);
    let b = c.multiply(c.slice_dim(all, 1, 0, rows, 1), c.to(wide(scale, &[count, rows, columns]), dtype));
    let v = c.slice_dim(all, 1, rows, rows + columns, 1);
    sorted(c, b, v)
}

fn sweeps(c: &Ctx, pairs: &[Value; 2], rows: i64, players: i64) -> Vec<Value> {
    let real = real_dtype(c.dtype(pairs[0]));
    let tolerance = c.scalar_f64(real, c.epsilon(real) * players as f64);
    let count = c.scalar_i64(DType::S32, 0);
    let start = [count, c.scalar_f64(real, f64::INFINITY), pairs[0], pairs[1]];
    let go_on = |b: &Builder, s: &[Value]| {
        b.and(b.lt(s[0], b.scalar_i64(DType::S32, MOST_SWEEPS)), b.gt(s[1], tolerance))
    };
    let sweep = |b: &Builder, s: &[Value]| {
        let rounds = b.scalar_i64(DType::S32, (players - 1).max(1));
        let start = [b.scalar_f64(real, 0.0), s[2], s[3]];
        let done = b.for_loop(b.scalar_i64(DType::S32, 0), rounds, &start, |b, _, s| {
            let (worst, pairs) = round(b, (s[1], s[2]), rows);
            let (left, right) = seats(b, pairs);
            vec![b.maximum(s[0], worst), left, right]
        });
        vec![b.add(s[0], b.scalar_i64(DType::S32, 1)), done[0], done[1], done[2]]
    };
    c.while_(&start, go_on, sweep)[2..].to_vec()
}

fn real_dtype(dtype: DType) -> DType {
    match dtype {
        DType::C64 => DType::F32,
        DType::C128 => DType::F64,
        other => other,
    }
}

fn conjugate(b: &Builder, x: Value) -> Value {
    if b.dtype(x).is_complex() { b.complex(b.real(x), b.negate(b.imag(x))) } else { x }
}

/// Makes the columns of each pair orthogonal; says how far from it the worst pair was, as a cosine.
fn round(b: &Builder, (p, q): Pairs, rows: i64) -> (Value, Pairs) {
    let shape = b.shape(p);
    let dtype = b.dtype(p);
    let top = |x: Value| b.slice_dim(x, 1, 0, rows, 1);
    let (x, y) = (top(p), top(q));
    let squares = |x: Value| {
        let size = b.abs(x);
        b.reduce_sum(b.multiply(size, size), &[1])
    };
    let (alpha, beta) = (squares(x), squares(y));
    let gamma = b.reduce_sum(b.multiply(conjugate(b, x), y), &[1]);
    let size = b.abs(gamma);
    let (zero, one) = (b.zeros_like(size), b.ones_like(size));
    let both = b.multiply(b.sqrt(alpha), b.sqrt(beta));
    let apart = b.ne(b.multiply(size, both), zero);
    let safe = |x: Value| b.select(apart, x, one);
    let cosine = b.select(apart, b.divide(size, safe(both)), zero);
    // The rotation that makes the product of the columns zero, by the smaller angle.
    let zeta = b.divide(b.subtract(beta, alpha), b.multiply(b.add(one, one), safe(size)));
    let sign = b.select(b.ge(zeta, zero), one, b.negate(one));
    let hypotenuse = b.sqrt(b.add(one, b.multiply(zeta, zeta)));
    let tangent = b.divide(sign, b.add(b.abs(zeta), hypotenuse));
    let tangent = b.select(apart, tangent, zero);
    let cos = b.divide(one, b.sqrt(b.add(one, b.multiply(tangent, tangent))));
    let sin = b.multiply(cos, tangent);
    let is_complex = dtype.is_complex();
    let number = |x: Value| if is_complex { b.complex(x, b.zeros_like(x)) } else { x };
    let wide = |x: Value| b.broadcast_in_dim(x, &shape, &[0, 2]);
    // The second column is first turned so that the product is real and positive.
    let phase = b.divide(gamma, number(safe(size)));
    let phase = b.select(apart, phase, b.ones_like(phase));
    let q = b.multiply(q, wide(conjugate(b, phase)));
    let (cos, sin) = (wide(number(cos)), wide(number(sin)));
    let left = b.subtract(b.multiply(cos, p), b.multiply(sin, q));
    let right = b.add(b.multiply(sin, p), b.multiply(cos, q));
    let all: Dims = (0..b.rank(cosine) as i64).collect();
    (b.reduce_max(cosine, &all), (left, right))
}

/// The seats of the next round: the first stays, all others move on by one.
fn seats(b: &Builder, (left, right): Pairs) -> Pairs {
    let half = b.shape(left)[2];
    if half == 1 {
        return (left, right);
    }
    let part = |x: Value, from: i64, to: i64| b.slice_dim(x, 2, from, to, 1);
    let mut row = vec![part(left, 0, 1), part(right, 0, 1)];
    if half > 2 {
        row.push(part(left, 1, half - 1));
    }
    let across = [part(right, 1, half), part(left, half - 1, half)];
    (b.concatenate(&row, 2), b.concatenate(&across, 2))
}

/// Columns in the order of falling norms.
fn sorted(c: &Ctx, b: Value, v: Value) -> Rotated {
    let size = c.abs(b);
    let largest = c.reduce_max(size, &[1]);
    let safe = c.select(c.eq(largest, c.zeros_like(largest)), c.ones_like(largest), largest);
    let scaled = c.divide(size, c.broadcast_in_dim(safe, &c.shape(b), &[0, 2]));
    let norms = c.multiply(c.sqrt(c.reduce_sum(c.multiply(scaled, scaled), &[1])), safe);
    let place = c.iota_dim(norms, DType::S32, 1);
    let order = c.sort(&[norms, place], 1, true, |b, x, y| b.gt(x[0], y[0]));
    let columns = |x: Value| {
        let shape = c.shape(x);
        c.take_along_dim(x, c.broadcast_in_dim(order[1], &shape, &[0, 2]), 2)
    };
    Rotated { b: columns(b), v: columns(v), sizes: order[0] }
}

/// Eigenvalues, rising, and eigenvectors of Hermitian matrices `[count, n, n]`.
pub(super) fn eigen(c: &Ctx, x: Value) -> (Value, Value) {
    let shape = c.shape(x);
    let (count, n) = (shape[0], shape[1]);
    // Moved by more than its norm a matrix is positive, and its singular vectors are its eigenvectors.
    let norm = c.reduce_max(c.reduce_sum(c.abs(x), &[2]), &[1]);
    let row = c.iota_dim(x, DType::S32, 1);
    let diagonal = c.eq(row, c.iota_dim(x, DType::S32, 2));
    let by = c.to(c.broadcast_in_dim(norm, &shape, &[0]), c.dtype(x));
    let by = c.add(by, by);
    let r = rotate(c, c.add(x, c.select(diagonal, by, c.zeros_like(x))));
    // The values from the matrix itself: v* x v.
    let image = c.matmul(x, r.v, oxitorch_hlo::Precision::Highest, None);
    let values = c.real(c.reduce_sum(c.multiply(conjugate(c, r.v), image), &[1]));
    let place = c.iota_dim(values, DType::S32, 1);
    let order = c.sort(&[values, place], 1, true, |b, x, y| b.lt(x[0], y[0]));
    let index = c.broadcast_in_dim(order[1], &[count, n, n], &[0, 2]);
    (order[0], c.take_along_dim(r.v, index, 2))
}

/// One triangle of `x`, and its adjoint in the place of the other one.
pub(super) fn hermitian(c: &Ctx, x: Value, upper: bool) -> Value {
    let half = super::linalg::triangle(c, x, upper);
    let (row, column) = (c.iota_dim(x, DType::S32, 1), c.iota_dim(x, DType::S32, 2));
    let diagonal = c.eq(row, column);
    let other = c.select(diagonal, c.zeros_like(x), adjoint(c, half));
    let real = if c.dtype(x).is_complex() { c.to(c.real(half), c.dtype(x)) } else { half };
    c.add(c.select(diagonal, real, half), other)
}
