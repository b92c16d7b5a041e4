//! Sampling at points of a grid. A point is a weighted sum of nearby elements, its corners.

use crate::args::Tensor;
use crate::context::Ctx;
use crate::dtype::{Category, category, opmath};
use crate::error::{Result, not_implemented, runtime};
use crate::op;
use crate::row::Row;
use oxitorch_hlo::{DType, Dims, GatherDims, ScatterDims, ScatterFlags, TensorType, Value};

/// The rows of this family.
pub static ROWS: &[Row] = &[
    op!("grid_sampler_2d", sample::<2>),
    op!("grid_sampler_3d", sample::<3>),
    op!("grid_sampler_2d_backward", sample_backward::<2>),
    op!("grid_sampler_3d_backward", sample_backward::<3>),
];

#[derive(Clone, Copy, PartialEq, Eq)]
enum Interpolation {
    Linear,
    Nearest,
    Cubic,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Padding {
    Zeros,
    Border,
    Reflection,
}

/// One tap along one dimension: position, weight, and the weight's derivative, all `[n, points]`.
#[derive(Clone, Copy)]
struct Tap {
    /// Float, a whole number; may lie outside.
    at: Value,
    weight: Value,
    slope: Value,
}

/// A combination of taps: flat position in the plane (clamped), whether it is inside, the taps.
struct Corner<const N: usize> {
    index: Value,
    inside: Value,
    taps: [Tap; N],
}

pub(super) struct Sampler<const N: usize> {
    /// Sizes of the sampled dimensions.
    sizes: [i64; N],
    n: i64,
    channels: i64,
    /// Sizes of the points, of which each batch has so many.
    points: Dims,
    interpolation: Interpolation,
    padding: Padding,
    align_corners: bool,
    wide: DType,
}

/// Where the points lie in each dimension, in elements, and what that changes with the number it is made of: all
/// `[n, points]`.
pub(super) type Places<const N: usize> = [(Value, Value); N];

impl<const N: usize> Sampler<N> {
    /// Linear interpolation between elements, with zeros outside, of planes of `sizes`: `n` of `channels` each.
    pub(super) fn linear(sizes: [i64; N], n: i64, channels: i64, points: Dims, wide: DType) -> Self {
        let (interpolation, padding) = (Interpolation::Linear, Padding::Zeros);
        Sampler { sizes, n, channels, points, interpolation, padding, align_corners: false, wide }
    }

    fn of_grid(
        c: &Ctx,
        input: Tensor,
        grid: Tensor,
        interpolation: i64,
        padding: i64,
        align_corners: bool,
    ) -> Result<Self> {
        let (x, g) = (c.shape(input.value), c.shape(grid.value));
        let both = format!("but got input with sizes {x:?} and grid with sizes {g:?}");
        if input.dtype != grid.dtype {
            return Err(runtime(format!(
                "grid_sampler(): expected input and grid to have same dtype, but input has torch.{} and grid has torch.{}",
                input.dtype.torch_name(),
                grid.dtype.torch_name()
            )));
        }
        if x.len() != N + 2 || g.len() != N + 2 {
            let rank = N + 2;
            return Err(runtime(format!(
                "grid_sampler(): expected {rank}D input and grid with same number of dimensions, {both}"
            )));
        }
        if x[0] != g[0] {
            return Err(runtime(format!(
                "grid_sampler(): expected grid and input to have same batch size, {both}"
            )));
        }
        if g[N + 1] != N as i64 {
            return Err(runtime(format!(
                "grid_sampler(): expected grid to have size {N} in last dimension, but got grid with sizes {g:?}"
            )));
        }
        if let Some(d) = (2..N + 2).find(|&d| x[d] == 0) {
            return Err(runtime(format!(
                "grid_sampler(): expected input to have non-empty spatial dimensions, but input has sizes {x:?} with \
                 dimension {d} being empty"
            )));
        }
        if category(input.dtype) != Category::Float {
            return Err(not_implemented(&format!("grid_sampler_{N}d_cpu"), input.dtype));
        }
        let interpolation = match interpolation {
            0 => Interpolation::Linear,
            1 => Interpolation::Nearest,
            2 => Interpolation::Cubic,
            other => return Err(runtime(format!("grid_sampler(): unknown interpolation mode {other}"))),
        };
        let padding = match padding {
            0 => Padding::Zeros,
            1 => Padding::Border,
            2 => Padding::Reflection,
            other => return Err(runtime(format!("grid_sampler(): unknown padding mode {other}"))),
        };
        Ok(Sampler {
            sizes: std::array::from_fn(|d| x[2 + d]),
            n: x[0],
            channels: x[1],
            points: g[1..N + 1].iter().copied().collect(),
            interpolation,
            padding,
            align_corners,
            wide: opmath(input.dtype),
        })
    }

    fn count(&self) -> i64 {
        self.points.iter().product()
    }

    pub(super) fn number(&self, c: &Ctx, x: f64) -> Value {
        c.constant(TensorType::new(self.wide, [self.n, self.count()].as_slice()), x)
    }

    /// Where the numbers of a grid lead.
    fn places(&self, c: &Ctx, grid: Value) -> Places<N> {
        std::array::from_fn(|d| self.coordinate(c, grid, d))
    }

    /// The coordinate of every point along dimension `d`, in elements, and its derivative by the grid's number.
    fn coordinate(&self, c: &Ctx, grid: Value, d: usize) -> (Value, Value) {
        let flat = c.reshape(c.to(grid, self.wide), &[self.n, self.count(), N as i64]);
        // The grid lists the last dimension first.
        let x = c.index_dim(flat, 2, (N - 1 - d) as i64);
        let size = self.sizes[d] as f64;
        let (scale, shift) = if self.align_corners {
            ((size - 1.0) / 2.0, (size - 1.0) / 2.0)
        } else {
            (size / 2.0, (size - 1.0) / 2.0)
        };
        let scale = self.number(c, scale);
        (c.add(c.multiply(x, scale), self.number(c, shift)), scale)
    }

    /// Brings positions into the input as the padding mode says; the second value is the derivative (1, -1 or 0).
    fn padded(&self, c: &Ctx, x: Value, d: usize) -> (Value, Value) {
        let last = (self.sizes[d] - 1) as f64;
        let one = self.number(c, 1.0);
        match self.padding {
            Padding::Zeros => (x, one),
            Padding::Border => self.clipped(c, x, last, one),
            Padding::Reflection => {
                let (low, span) = if self.align_corners { (0.0, last) } else { (-0.5, last + 1.0) };
                let (x, sign) = self.reflected(c, x, low, span);
                self.clipped(c, x, last, sign)
            }
        }
    }

    fn clipped(&self, c: &Ctx, x: Value, last: f64, slope: Value) -> (Value, Value) {
        let (zero, end) = (self.number(c, 0.0), self.number(c, last));
        let inside = c.and(c.gt(x, zero), c.lt(x, end));
        (c.clamp(zero, x, end), c.select(inside, slope, zero))
    }

    /// Reflects at `low` and at `low + span`.
    fn reflected(&self, c: &Ctx, x: Value, low: f64, span: f64) -> (Value, Value) {
        let zero = self.number(c, 0.0);
        if span <= 0.0 {
            return (zero, zero);
        }
        let (low, span) = (self.number(c, low), self.number(c, span));
        let shifted = c.subtract(x, low);
        let size = c.abs(shifted);
        let turns = c.floor(c.divide(size, span));
        let rest = c.subtract(size, c.multiply(turns, span));
        let two = self.number(c, 2.0);
        let even = c.eq(c.remainder(turns, two), zero);
        let out = c.select(even, c.add(rest, low), c.add(c.subtract(span, rest), low));
        let sign = c.select(c.lt(shifted, zero), self.number(c, -1.0), self.number(c, 1.0));
        (out, c.select(even, sign, c.negate(sign)))
    }

    /// The taps along dimension `d`.
    fn taps(&self, c: &Ctx, (x, scale): (Value, Value), d: usize) -> Vec<Tap> {
        let one = self.number(c, 1.0);
        match self.interpolation {
            Interpolation::Nearest => {
                let (x, _) = self.padded(c, x, d);
                vec![Tap { at: c.round_nearest_even(x), weight: one, slope: self.number(c, 0.0) }]
            }
            Interpolation::Linear => {
                let (x, slope) = self.padded(c, x, d);
                let slope = c.multiply(slope, scale);
                let low = c.floor(x);
                let t = c.subtract(x, low);
                vec![
                    Tap { at: low, weight: c.subtract(one, t), slope: c.negate(slope) },
                    Tap { at: c.add(low, one), weight: t, slope },
                ]
            }
            Interpolation::Cubic => self.cubic_taps(c, x, scale, d),
        }
    }

    /// Keys' cubic convolution with a = -0.75; padding applies to each tap by itself.
    fn cubic_taps(&self, c: &Ctx, x: Value, scale: Value, d: usize) -> Vec<Tap> {
        let low = c.floor(x);
        let t = c.subtract(x, low);
        let tap = |offset: f64| {
            let (at, _) = self.padded(c, c.add(low, self.number(c, offset)), d);
            let distance = c.abs(c.subtract(t, self.number(c, offset)));
            let sign = if offset <= 0.0 { scale } else { c.negate(scale) };
            let (weight, slope) = keys(c, distance, offset == 0.0 || offset == 1.0);
            Tap { at, weight, slope: c.multiply(slope, sign) }
        };
        [-1.0, 0.0, 1.0, 2.0].map(tap).to_vec()
    }

    /// All combinations of taps.
    fn corners(&self, c: &Ctx, places: &Places<N>) -> Vec<Corner<N>> {
        let taps: [Vec<Tap>; N] = std::array::from_fn(|d| self.taps(c, places[d], d));
        let mut picks: Vec<Vec<Tap>> = vec![Vec::new()];
        for list in &taps {
            picks = picks.iter().flat_map(|p| list.iter().map(|&t| [p.as_slice(), &[t]].concat())).collect();
        }
        picks
            .into_iter()
            .filter_map(|p| <[Tap; N]>::try_from(p).ok())
            .map(|taps| self.corner(c, taps))
            .collect()
    }

    fn corner(&self, c: &Ctx, taps: [Tap; N]) -> Corner<N> {
        let shape = [self.n, self.count()];
        let mut index = c.constant(TensorType::new(DType::S32, shape.as_slice()), 0.0);
        let mut inside = c.constant(TensorType::new(DType::Pred, shape.as_slice()), 1.0);
        for (tap, &size) in taps.iter().zip(&self.sizes) {
            let (zero, last) = (self.number(c, 0.0), self.number(c, (size - 1) as f64));
            inside = c.and(inside, c.and(c.ge(tap.at, zero), c.le(tap.at, last)));
            let at = c.to(c.clamp(zero, tap.at, last), DType::S32);
            index = c.add(c.multiply(index, c.like(index, size as f64)), at);
        }
        Corner { index, inside, taps }
    }

    /// The values at a corner, `[n, channels, points]`; 0 outside.
    fn values(&self, c: &Ctx, planes: Value, corner: &Corner<N>) -> Value {
        let dims = GatherDims {
            offset_dims: Dims::from_slice(&[1]),
            collapsed_slice_dims: Dims::from_slice(&[2]),
            operand_batching_dims: Dims::from_slice(&[0]),
            start_indices_batching_dims: Dims::from_slice(&[0]),
            start_index_map: Dims::from_slice(&[2]),
            index_vector_dim: 2,
        };
        let sizes = [self.n.min(1), self.channels, 1];
        let taken = c.gather(planes, corner.index, &dims, &sizes, false);
        c.select(self.per_channel(c, corner.inside), taken, c.zeros_like(taken))
    }

    /// `[n, points]` over all channels.
    fn per_channel(&self, c: &Ctx, v: Value) -> Value {
        c.broadcast_in_dim(v, &[self.n, self.channels, self.count()], &[0, 2])
    }

    /// The input as `[n, channels, plane]`.
    pub(super) fn planes(&self, c: &Ctx, input: Value) -> Value {
        c.reshape(c.to(input, self.wide), &[self.n, self.channels, self.sizes.iter().product()])
    }

    /// What is at the points: `[n, channels, points]`.
    pub(super) fn sample(&self, c: &Ctx, planes: Value, places: &Places<N>) -> Value {
        let mut sum =
            c.constant(TensorType::new(self.wide, [self.n, self.channels, self.count()].as_slice()), 0.0);
        for corner in self.corners(c, places) {
            let Some(weight) = product(c, corner.taps.iter().map(|t| t.weight)) else { continue };
            sum = c.add(sum, c.multiply(self.values(c, planes, &corner), self.per_channel(c, weight)));
        }
        sum
    }

    /// The gradients of the planes, if wanted, and of the numbers that the places are made of, from that of the samples.
    pub(super) fn backward(
        &self,
        c: &Ctx,
        planes: Value,
        places: &Places<N>,
        grad: Value,
        wants_planes: bool,
    ) -> (Option<Value>, [Value; N]) {
        let dims = ScatterDims {
            update_window_dims: Dims::from_slice(&[1]),
            inserted_window_dims: Dims::from_slice(&[2]),
            input_batching_dims: Dims::from_slice(&[0]),
            scatter_indices_batching_dims: Dims::from_slice(&[0]),
            scatter_dims_to_operand_dims: Dims::from_slice(&[2]),
            index_vector_dim: 2,
        };
        let mut of_planes = wants_planes.then(|| c.zeros_like(planes));
        let mut slopes: [Value; N] = [self.number(c, 0.0); N];
        for corner in self.corners(c, places) {
            let Some(weight) = product(c, corner.taps.iter().map(|t| t.weight)) else { continue };
            if let Some(sum) = of_planes {
                let weight = c.select(corner.inside, weight, c.zeros_like(weight));
                let updates = c.multiply(grad, self.per_channel(c, weight));
                let add =
                    |b: &oxitorch_hlo::Builder, old: &[Value], new: &[Value]| vec![b.add(old[0], new[0])];
                let out = c.scatter(&[sum], corner.index, &[updates], &dims, ScatterFlags::default(), add);
                of_planes = out.first().copied();
            }
            let pull = c.reduce_sum(c.multiply(grad, self.values(c, planes, &corner)), &[1]);
            for (d, slope) in slopes.iter_mut().enumerate() {
                let factors =
                    corner.taps.iter().enumerate().map(|(i, t)| if i == d { t.slope } else { t.weight });
                let Some(weight) = product(c, factors) else { continue };
                *slope = c.add(*slope, c.multiply(pull, weight));
            }
        }
        (of_planes, slopes)
    }
}

/// The cubic convolution kernel and its derivative, at a distance below 1 (`near`) or from 1 to 2.
fn keys(c: &Ctx, x: Value, near: bool) -> (Value, Value) {
    const A: f64 = -0.75;
    let polynomial = |factors: &[f64]| {
        let first = c.like(x, factors[0]);
        factors[1..].iter().fold(first, |sum, &f| c.add(c.multiply(sum, x), c.like(x, f)))
    };
    if near {
        (polynomial(&[A + 2.0, -(A + 3.0), 0.0, 1.0]), polynomial(&[3.0 * (A + 2.0), -2.0 * (A + 3.0), 0.0]))
    } else {
        (polynomial(&[A, -5.0 * A, 8.0 * A, -4.0 * A]), polynomial(&[3.0 * A, -10.0 * A, 8.0 * A]))
    }
}

fn product(c: &Ctx, factors: impl IntoIterator<Item = Value>) -> Option<Value> {
    factors.into_iter().reduce(|a, b| c.multiply(a, b))
}

fn sample<const N: usize>(
    c: &Ctx,
    input: Tensor,
    grid: Tensor,
    interpolation: i64,
    padding: i64,
    align_corners: bool,
) -> Result<Value> {
    let s = Sampler::<N>::of_grid(c, input, grid, interpolation, padding, align_corners)?;
    let sum = s.sample(c, s.planes(c, input.value), &s.places(c, grid.value));
    let shape: Dims = [s.n, s.channels].into_iter().chain(s.points.iter().copied()).collect();
    Ok(c.to(c.reshape(sum, &shape), input.dtype))
}

#[allow(clippy::too_many_arguments)] // the schema's
fn sample_backward<const N: usize>(
    c: &Ctx,
    grad: Tensor,
    input: Tensor,
    grid: Tensor,
    interpolation: i64,
    padding: i64,
    align_corners: bool,
    mask: Vec<bool>,
) -> Result<(Option<Value>, Option<Value>)> {
    let s = Sampler::<N>::of_grid(c, input, grid, interpolation, padding, align_corners)?;
    let g = c.reshape(c.to(grad.value, s.wide), &[s.n, s.channels, s.count()]);
    let wants_input = mask.first().copied().unwrap_or(false);
    let (grad_input, slopes) =
        s.backward(c, s.planes(c, input.value), &s.places(c, grid.value), g, wants_input);
    let columns: Vec<Value> = slopes.iter().rev().map(|v| c.unsqueeze(*v, 2)).collect();
    let grad_grid = c.reshape(c.concatenate(&columns, 2), &c.shape(grid.value));
    let grad_input = grad_input.map(|v| c.to(c.reshape(v, &c.shape(input.value)), input.dtype));
    let wants_grid = mask.get(1).copied().unwrap_or(true);
    Ok((grad_input, wants_grid.then(|| c.to(grad_grid, grid.dtype))))
}
