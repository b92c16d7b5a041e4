//! Sparse linear maps along one dimension, known when the program is built.
//!
//! Resampling, padding by reflection and adaptive averages are such maps, one dimension after another; their derivatives
//! are the same maps turned around.

use super::pooling::repeat;
use super::scatter::scatter_rows;
use crate::context::Ctx;
use crate::error::{Result, unsupported};
use oxitorch_hlo::{Binary, DType, Dims, Value};

/// For each output position along a dimension the input positions that it sums, with their weights.
pub(super) struct Taps {
    input: i64,
    rows: Vec<Vec<(i64, f64)>>,
    most: Option<Most>,
}

/// The most taps that a row has, so that a program can be one for many sizes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Most {
    /// Whatever the sizes are. A single one is a copy.
    Always(usize),
    /// At these sizes: a number that follows from them.
    Here(usize),
}

/// Up to this many taps are summed one gather at a time, more in one gather and a reduction.
const UNROLLED_TAPS: usize = 4;

/// Tables of more rows are not made on the host, which may not have the memory.
const MOST_ROWS: i64 = 1 << 26;

/// Whether a table for so many output positions may be made.
pub(super) fn check_rows(rows: i64) -> Result<()> {
    if rows > MOST_ROWS {
        return Err(unsupported(format!("a table of {rows} positions along a dimension")));
    }
    Ok(())
}

impl Taps {
    /// `rows[o]` lists the taps of output position `o`, for a dimension of `input` elements.
    pub(super) fn new(input: i64, rows: Vec<Vec<(i64, f64)>>) -> Self {
        Taps { input, rows, most: None }
    }

    /// Says how many taps a row may have.
    pub(super) fn at_most(self, most: Most) -> Self {
        Taps { most: Some(most), ..self }
    }

    /// The map of the derivative of [`Taps::apply`].
    pub(super) fn apply_transposed(&self, c: &Ctx, x: Value, dim: usize) -> Value {
        match self.most.filter(|_| c.is_outline()) {
            Some(Most::Always(most)) => self.scattered(c, x, dim, most),
            Some(Most::Here(most)) => self.scattered_together(c, x, dim, most),
            None => self.transposed().apply(c, x, dim),
        }
    }

    fn transposed(&self) -> Taps {
        let mut rows = vec![Vec::new(); self.input as usize];
        for (o, row) in self.rows.iter().enumerate() {
            for &(i, w) in row {
                rows[i as usize].push((o as i64, w));
            }
        }
        Taps::new(self.rows.len() as i64, rows)
    }

    /// Applies the map to `x` along `dim`, in the dtype of `x`.
    pub(super) fn apply(&self, c: &Ctx, x: Value, dim: usize) -> Value {
        if let Some(most) = self.most.filter(|_| c.is_outline()) {
            // Nothing may follow from what the weights happen to be at one size.
            return match most {
                Most::Always(most) => self.unrolled(c, x, dim, most),
                Most::Here(most) => self.gathered(c, x, dim, most),
            };
        }
        if let Some((n, w)) = self.blocks() {
            return scale(c, sum_blocks(c, x, dim, n), w);
        }
        if let Some((n, w)) = self.repeats() {
            return scale(c, repeat(c, x, dim, n), w);
        }
        match self.rows.iter().map(Vec::len).max().unwrap_or(0) {
            taps @ 0..=UNROLLED_TAPS => self.unrolled(c, x, dim, taps),
            taps => self.gathered(c, x, dim, taps),
        }
    }

    /// The weight that all taps have.
    fn common_weight(&self) -> Option<f64> {
        let mut weights = self.rows.iter().flatten().map(|t| t.1);
        let first = weights.next()?;
        weights.all(|w| w == first).then_some(first)
    }

    /// Consecutive blocks of equal length, each summed into one.
    fn blocks(&self) -> Option<(i64, f64)> {
        let n = self.rows.first()?.len() as i64;
        let block = |(o, row): (usize, &Vec<(i64, f64)>)| {
            row.iter().map(|t| t.0).eq(o as i64 * n..(o as i64 + 1) * n)
        };
        let whole =
            n > 0 && n * self.rows.len() as i64 == self.input && self.rows.iter().enumerate().all(block);
        if whole { self.common_weight().map(|w| (n, w)) } else { None }
    }

    /// Every element a number of times.
    fn repeats(&self) -> Option<(i64, f64)> {
        let out = self.rows.len() as i64;
        let n = (self.input > 0 && out % self.input == 0).then_some(out / self.input)?;
        let copy = |(o, row): (usize, &Vec<(i64, f64)>)| row.len() == 1 && row[0].0 == o as i64 / n;
        if n > 0 && self.rows.iter().enumerate().all(copy) {
            self.common_weight().map(|w| (n, w))
        } else {
            None
        }
    }

    /// Positions and weights of tap number `at`; a missing tap has position 0 and no weight.
    fn tap(&self, at: usize) -> (Vec<i64>, Vec<Option<f64>>) {
        self.rows.iter().map(|row| row.get(at).map_or((0, None), |&(i, w)| (i, Some(w)))).unzip()
    }

    fn unrolled(&self, c: &Ctx, x: Value, dim: usize, taps: usize) -> Value {
        let mut shape = c.shape(x);
        shape[dim] = self.rows.len() as i64;
        let zero = c.full(c.scalar_like(x, 0.0), &shape);
        let mut sum: Option<Value> = None;
        for at in 0..taps {
            let (positions, weights) = self.tap(at);
            let taken = c.take_dim(x, c.vector_i64(DType::S32, &positions), dim as i64);
            let copies = self.most == Some(Most::Always(1));
            let size = [self.rows.len() as i64];
            let part = if copies { taken } else { weigh(c, taken, &weights, &[dim as i64], &size) };
            sum = Some(sum.map_or(part, |s| c.add(s, part)));
        }
        sum.unwrap_or(zero)
    }

    /// The derivative of so many taps: each is added where it came from.
    fn scattered(&self, c: &Ctx, x: Value, dim: usize, taps: usize) -> Value {
        let out = self.rows.len() as i64;
        let mut shape = c.shape(x);
        shape[dim] = self.input;
        let mut sum = c.full(c.scalar_like(x, 0.0), &shape);
        for at in 0..taps {
            let (positions, weights) = self.tap(at);
            let part = if taps == 1 { x } else { weigh(c, x, &weights, &[dim as i64], &[out]) };
            let index = c.vector_i64(DType::S32, &positions);
            sum = scatter_rows(c, sum, dim, index, part, Some(Binary::Add));
        }
        sum
    }

    /// Positions and weights of so many taps of each row, row by row.
    fn table(&self, taps: usize) -> (Vec<i64>, Vec<Option<f64>>) {
        let taps = |row| (0..taps).map(move |at| <[(i64, f64)]>::get(row, at).copied());
        let all = self.rows.iter().flat_map(|row| taps(row.as_slice()));
        all.map(|tap| (tap.map_or(0, |t| t.0), tap.map(|t| t.1))).unzip()
    }

    /// The derivative of so many taps, all at once.
    fn scattered_together(&self, c: &Ctx, x: Value, dim: usize, taps: usize) -> Value {
        let (out, taps_dim) = (self.rows.len() as i64, taps as i64);
        let (positions, weights) = self.table(taps);
        let mut shape = c.shape(x);
        shape.insert(dim + 1, taps_dim);
        let own: Vec<i64> = (0..shape.len() as i64).filter(|&d| d != dim as i64 + 1).collect();
        let each = c.broadcast_in_dim(x, &shape, &own);
        let dims = [dim as i64, dim as i64 + 1];
        let part = weigh(c, each, &weights, &dims, &[out, taps_dim]);
        let mut flat = c.shape(x);
        flat[dim] = out * taps_dim;
        let part = c.reshape(part, &flat);
        flat[dim] = self.input;
        let zeros = c.full(c.scalar_like(x, 0.0), &flat);
        scatter_rows(c, zeros, dim, c.vector_i64(DType::S32, &positions), part, Some(Binary::Add))
    }

    fn gathered(&self, c: &Ctx, x: Value, dim: usize, taps: usize) -> Value {
        let out = self.rows.len() as i64;
        let (positions, weights) = self.table(taps);
        let index = c.reshape(c.vector_i64(DType::S32, &positions), &[out, taps as i64]);
        let taken = c.take_dim(x, index, dim as i64);
        let dim = dim as i64;
        c.reduce_sum(weigh(c, taken, &weights, &[dim, dim + 1], &[out, taps as i64]), &[dim + 1])
    }
}

/// `x` times a weight for each position of `dims`, which have `sizes`; 0 where there is no weight, even for inf and NaN.
fn weigh(c: &Ctx, x: Value, weights: &[Option<f64>], dims: &[i64], sizes: &[i64]) -> Value {
    let shape = c.shape(x);
    let over = |v: Value| c.broadcast_in_dim(c.reshape(v, sizes), &shape, dims);
    let mut out = x;
    if c.is_outline() || weights.iter().flatten().any(|&w| w != 1.0) {
        let numbers: Vec<f64> = weights.iter().map(|w| w.unwrap_or(0.0)).collect();
        out = c.multiply(x, over(c.vector_f64(c.dtype(x), &numbers)));
    }
    if c.is_outline() || weights.iter().any(Option::is_none) {
        let present: Vec<i64> = weights.iter().map(|w| i64::from(w.is_some())).collect();
        out = c.select(over(c.vector_i64(DType::Pred, &present)), out, c.zeros_like(out));
    }
    out
}

fn scale(c: &Ctx, x: Value, by: f64) -> Value {
    if by == 1.0 { x } else { c.multiply(x, c.like(x, by)) }
}

/// Sums blocks of `n` elements along `dim`.
fn sum_blocks(c: &Ctx, x: Value, dim: usize, n: i64) -> Value {
    if n == 1 {
        return x;
    }
    let mut shape: Dims = c.shape(x);
    shape[dim] /= n;
    shape.insert(dim + 1, n);
    c.reduce_sum(c.reshape(x, &shape), &[dim as i64 + 1])
}
