//! Histograms: counts of what lies between edges.

use super::scatter::scatter_rows;
use super::sorting::lower_bound;
use crate::args::{Floats, Scalar, Tensor};
use crate::context::Ctx;
use crate::dtype::{Category, category, opmath, scalar_name};
use crate::error::{ErrorKind, Result, in_32_bits, not_implemented, runtime};
use crate::numbers::{Numbers, show};
use crate::op;
use crate::row::Row;
use oxitorch_hlo::{Binary, DType, Dims, TensorType, Value};

/// The rows of this family.
pub static ROWS: &[Row] = &[
    op!("histc", histc).check_numbers(check_range),
    op!("histogram.bin_ct", histogram_of_counts),
    op!("histogram.bins_tensor", histogram_of_edges),
    op!("_histogramdd_bin_edges", |c: &Ctx,
                                   x: Tensor,
                                   bins: Vec<i64>,
                                   range: Option<Floats>,
                                   weight: Option<Tensor>,
                                   _density: bool| {
        let points = Points::new(c, &x, weight.as_ref(), bins.len())?;
        points.equal_edges(c, &bins, range)
    }),
    op!("_histogramdd_from_bin_cts", |c: &Ctx,
                                      x: Tensor,
                                      bins: Vec<i64>,
                                      range: Option<Floats>,
                                      weight: Option<Tensor>,
                                      density: bool| {
        let points = Points::new(c, &x, weight.as_ref(), bins.len())?;
        let edges = points.equal_edges(c, &bins, range)?;
        Ok::<_, crate::Error>(points.count(c, &edges, density))
    }),
    op!("_histogramdd_from_bin_tensors", |c: &Ctx,
                                          x: Tensor,
                                          bins: Vec<Tensor>,
                                          weight: Option<Tensor>,
                                          density: bool| {
        let points = Points::new(c, &x, weight.as_ref(), bins.len())?;
        let edges = points.given_edges(c, &bins)?;
        Ok::<_, crate::Error>(points.count(c, &edges, density))
    }),
];

/// Counts of `bins` equal intervals from `min` to `max`, or over the range of the data where both are equal.
/// Where both ends are the same, they are those of the tensor.
fn check_range(n: &Numbers) -> Result<()> {
    let (Some(low), Some(high)) = (n.f64(2), n.f64(3)) else { return Ok(()) };
    if !low.is_finite() || !high.is_finite() {
        let (low, high) = (show(low), show(high));
        return Err(runtime(format!("torch.histc: range of [{low}, {high}] is not finite")));
    }
    if low > high { Err(runtime("torch.histc: max must be larger than min")) } else { Ok(()) }
}

fn histc(c: &Ctx, x: Tensor, bins: i64, min: Scalar, max: Scalar) -> Result<Value> {
    if bins <= 0 {
        return Err(runtime(format!("torch.histogram(): bins must be > 0, but got {bins} for dimension 0")));
    }
    // Of whole numbers, which CUDA counts and the CPU does not: routers of experts are written for that.
    let whole = category(x.dtype) == Category::Int;
    if category(x.dtype) != Category::Float && !whole {
        return Err(not_implemented("histogram_cpu", x.dtype));
    }
    let n = c.numel(x.value);
    let wide = if whole { DType::S64 } else { opmath(x.dtype) };
    let x_wide = c.reshape(c.to(x.value, wide), &[n]);
    let (low, high) = (c.number(min, wide), c.number(max, wide));
    let pick = |p: Value, a: Value, b: Value| c.select(p, a, b);
    let (mut low, mut high) = (low, high);
    if n > 0 {
        let auto = c.eq(low, high);
        let (least, most) = (c.reduce_min(x_wide, &[0]), c.reduce_max(x_wide, &[0]));
        (low, high) = (pick(auto, least, low), pick(auto, most, high));
    }
    if !whole {
        c.check(ErrorKind::Runtime, "torch.histc: range is not finite", || {
            c.and(c.is_finite(low), c.is_finite(high))
        });
    }
    let flat = c.eq(low, high);
    let one = c.scalar_f64(wide, 1.0);
    (low, high) = (pick(flat, c.subtract(low, one), low), pick(flat, c.add(high, one), high));
    let along = |v: Value| c.full(v, &[n]);
    let inside = c.and(c.ge(x_wide, along(low)), c.le(x_wide, along(high)));
    let scaled = c.multiply(c.subtract(x_wide, along(low)), c.like(x_wide, bins as f64));
    let bin = c.to(c.divide(scaled, along(c.subtract(high, low))), DType::S32);
    let bin = c.minimum(bin, c.like(bin, (bins - 1) as f64));
    // Out of range on purpose: scatter drops it.
    let bin = c.select(inside, bin, c.like(bin, bins as f64));
    let counts = c.constant(TensorType::new(wide, [bins].as_slice()), 0.0);
    let out = scatter_rows(c, counts, 0, bin, c.ones_like(x_wide), Some(Binary::Add));
    Ok(c.to(out, x.dtype))
}

/// Points in so many dimensions, with a weight each.
struct Points {
    /// `[points, dimensions]`
    x: Value,
    /// `[points]`
    weights: Value,
}

impl Points {
    fn new(c: &Ctx, x: &Tensor, weight: Option<&Tensor>, dimensions: usize) -> Result<Points> {
        let shape = c.shape(x.value);
        let Some((&inner, outer)) = shape.split_last().filter(|(_, outer)| !outer.is_empty()) else {
            return Err(runtime("torch.histogramdd: input tensor should have at least 2 dimensions"));
        };
        if inner != dimensions as i64 {
            return Err(runtime(format!(
                "torch.histogramdd: expected {inner} sequences of bin edges for a {inner}-dimensional histogram but got \
                 {dimensions}"
            )));
        }
        if !matches!(x.dtype, DType::F32 | DType::F64) {
            return Err(not_implemented("histogramdd", x.dtype));
        }
        if let Some(w) = weight {
            if w.dtype != x.dtype {
                return Err(runtime(format!(
                    "torch.histogramdd: if weight tensor is provided, input tensor and weight tensor should have the same \
                     dtype, but got input({}), and weight({})",
                    scalar_name(x.dtype).to_lowercase(),
                    scalar_name(w.dtype).to_lowercase()
                )));
            }
            if c.shape(w.value)[..] != *outer {
                return Err(runtime(format!(
                    "torch.histogramdd: if weight tensor is provided it should have the same shape as the input tensor \
                     excluding its innermost dimension, but got input with shape {shape:?} and weight with shape {:?}",
                    c.shape(w.value)
                )));
            }
        }
        let count = outer.iter().product::<i64>();
        let ones = || c.full(c.scalar_f64(x.dtype, 1.0), &[count]);
        Ok(Points {
            x: c.reshape(x.value, &[count, inner]),
            weights: weight.map_or_else(ones, |w| c.reshape(w.value, &[count])),
        })
    }

    /// The points of one dimension.
    fn flat(c: &Ctx, x: &Tensor, weight: Option<&Tensor>) -> Result<Points> {
        let line = |t: &Tensor| Tensor { value: c.reshape(t.value, &[c.numel(t.value)]), rank: 1, ..*t };
        let table = Tensor { value: c.reshape(x.value, &[c.numel(x.value), 1]), rank: 2, ..*x };
        Points::new(c, &table, weight.map(line).as_ref(), 1)
    }

    fn dtype(&self, c: &Ctx) -> DType {
        c.dtype(self.x)
    }

    /// Edges of bins of one width in each dimension: over the range that is given, or over that of the data.
    fn equal_edges(&self, c: &Ctx, bins: &[i64], range: Option<Floats>) -> Result<Vec<Value>> {
        in_32_bits(bins)?;
        if let Some(i) = bins.iter().position(|&n| n <= 0) {
            return Err(runtime(format!(
                "torch.histogram(): bins must be > 0, but got {} for dimension {i}",
                bins[i]
            )));
        }
        let (d, ends) = (bins.len(), 2 * bins.len() as i64);
        if let Some(Floats(range)) = range
            && c.numel(range) != ends
        {
            return Err(runtime(format!(
                "torch.histogramdd: for a {d}-dimensional histogram range should have {ends} elements, but got {}",
                c.numel(range)
            )));
        }
        let edges = bins.iter().enumerate().map(|(i, &n)| {
            let (low, high) = self.range(c, i, range);
            self.between(c, low, high, n)
        });
        Ok(edges.collect())
    }

    /// From where to where the bins of a dimension go, both 0-d.
    fn range(&self, c: &Ctx, dim: usize, given: Option<Floats>) -> (Value, Value) {
        let number = |x: f64| c.scalar_f64(self.dtype(c), x);
        let (low, high) = match given {
            Some(Floats(range)) => {
                let end = |i: usize| c.index_dim(range, 0, (2 * dim + i) as i64);
                let (low, high) = (end(0), end(1));
                let message = format!("torch.histogramdd: min should not exceed max for dimension {dim}");
                c.assert(ErrorKind::Runtime, message, || c.not(c.gt(low, high)));
                (c.to(low, self.dtype(c)), c.to(high, self.dtype(c)))
            }
            None if c.numel(self.weights) == 0 => (number(0.0), number(1.0)),
            None => {
                let x = c.index_dim(self.x, 1, dim as i64);
                (c.reduce_min(x, &[0]), c.reduce_max(x, &[0]))
            }
        };
        let message = format!("torch.histogramdd: dimension {dim}'s range is not finite");
        c.assert(ErrorKind::Runtime, message, || c.and(c.is_finite(low), c.is_finite(high)));
        let flat = c.eq(low, high);
        let half = number(0.5);
        (c.select(flat, c.subtract(low, half), low), c.select(flat, c.add(high, half), high))
    }

    /// `n + 1` edges, as `torch.linspace` makes them: from both ends to the middle.
    fn between(&self, c: &Ctx, low: Value, high: Value, n: i64) -> Value {
        let shape = [n + 1];
        let along = |v: Value| c.full(v, &shape);
        let place = c.iota(TensorType::new(self.dtype(c), shape.as_slice()), 0);
        let number = |x: i64| c.like(place, x as f64);
        let step = along(c.divide(c.subtract(high, low), c.scalar_f64(self.dtype(c), n as f64)));
        let up = c.add(along(low), c.multiply(step, place));
        let down = c.subtract(along(high), c.multiply(step, c.subtract(number(n), place)));
        c.select(c.lt(place, number((n + 1) / 2)), up, down)
    }

    fn given_edges(&self, c: &Ctx, bins: &[Tensor]) -> Result<Vec<Value>> {
        for (i, edges) in bins.iter().enumerate() {
            if edges.dtype != self.dtype(c) {
                return Err(runtime(format!(
                    "torch.histogramdd: input tensor and bins tensors should have the same dtype, but got input with \
                     dtype {} and bins for dimension {i} with dtype {}",
                    scalar_name(self.dtype(c)).to_lowercase(),
                    scalar_name(edges.dtype).to_lowercase()
                )));
            }
            if edges.rank != 1 {
                return Err(runtime(format!(
                    "torch.histogramdd: bins tensor should have one dimension, but got {} dimensions in the bins tensor for \
                     dimension {i}",
                    edges.rank
                )));
            }
            if c.numel(edges.value) < 2 {
                return Err(runtime(format!(
                    "torch.histogram(): bins must be > 0, but got {} for dimension {i}",
                    c.numel(edges.value) - 1
                )));
            }
        }
        Ok(bins.iter().map(|t| t.value).collect())
    }

    /// The sums of the weights between edges; the last edge counts as inside. As a density, they add up to 1 with the
    /// sizes of the bins.
    fn count(&self, c: &Ctx, edges: &[Value], density: bool) -> Value {
        let dtype = self.dtype(c);
        let points = c.numel(self.weights);
        let bins: Dims = edges.iter().map(|&e| c.numel(e) - 1).collect();
        let all: i64 = bins.iter().product();
        let number = |n: i64| c.full(c.scalar_i64(DType::S64, n), &[points]);
        let mut place = number(0);
        let mut inside = c.constant(TensorType::new(DType::Pred, [points].as_slice()), 1.0);
        for (i, (&edges, &n)) in edges.iter().zip(&bins).enumerate() {
            let x = c.index_dim(self.x, 1, i as i64);
            let end = |at: i64| c.full(c.index_dim(edges, 0, at), &[points]);
            inside = c.and(inside, c.and(c.ge(x, end(0)), c.le(x, end(n))));
            let found = lower_bound(c, c.reshape(edges, &[1, n + 1]), c.reshape(x, &[1, points]), true);
            let found = c.to(c.reshape(found, &[points]), DType::S64);
            let bin = c.clamp(number(0), c.subtract(found, number(1)), number(n - 1));
            place = c.add(c.multiply(place, number(n)), bin);
        }
        // Behind the end on purpose: scatter drops it.
        let place = c.select(inside, place, number(all));
        let sums = c.full(c.scalar_f64(dtype, 0.0), &[all]);
        let sums = c.reshape(scatter_rows(c, sums, 0, place, self.weights, Some(Binary::Add)), &bins);
        if !density {
            return sums;
        }
        let dims: Dims = (0..bins.len() as i64).collect();
        let mut sizes = c.full(c.reduce_sum(sums, &dims), &bins);
        for (i, (&edges, &n)) in edges.iter().zip(&bins).enumerate() {
            let width = c.subtract(c.slice_dim(edges, 0, 1, n + 1, 1), c.slice_dim(edges, 0, 0, n, 1));
            sizes = c.multiply(sizes, c.broadcast_in_dim(width, &bins, &[i as i64]));
        }
        c.divide(sums, sizes)
    }
}

fn histogram_of_counts(
    c: &Ctx,
    x: Tensor,
    bins: i64,
    range: Option<Floats>,
    weight: Option<Tensor>,
    density: bool,
) -> Result<(Value, Value)> {
    let points = Points::flat(c, &x, weight.as_ref())?;
    let edges = points.equal_edges(c, &[bins], range)?;
    Ok((points.count(c, &edges, density), edges[0]))
}

fn histogram_of_edges(
    c: &Ctx,
    x: Tensor,
    bins: Tensor,
    weight: Option<Tensor>,
    density: bool,
) -> Result<(Value, Value)> {
    let points = Points::flat(c, &x, weight.as_ref())?;
    let edges = points.given_edges(c, &[bins])?;
    Ok((points.count(c, &edges, density), edges[0]))
}
