//! Pooling.
//!
//! Pools run over the last two or three dimensions; what stands before them is batch and channels, or channels alone.
//! Indices are positions in the flattened input plane, as torch gives them.

use super::reductions::index_dtype;
use super::scatter::add_by_host;
use crate::args::Tensor;
use crate::context::Ctx;
use crate::dtype::{Category, acc_type, category, opmath, scalar_name};
use crate::error::{ErrorKind, Result, in_32_bits, not_implemented, runtime};
use crate::library::{channels_last, inverse, is_channels_last};
use crate::row::Row;
use crate::{Layout, op};
use oxitorch_hlo::{Binary, DType, Dims, ScatterDims, ScatterFlags, TensorType, Value, Window};

/// The rows of this family.
pub static ROWS: &[Row] = &[
    op!("max_pool2d_with_indices", max_pool::<2>).layout(Layout::ChannelsLast),
    op!("max_pool3d_with_indices", max_pool::<3>).layout(Layout::ChannelsLast),
    op!("max_pool2d_with_indices_backward", max_pool_backward::<2>).layout(Layout::ChannelsLast),
    op!("max_pool3d_with_indices_backward", max_pool_backward::<3>).layout(Layout::ChannelsLast),
    op!("avg_pool2d", avg_pool::<2>).layout(Layout::ChannelsLast),
    op!("avg_pool3d", avg_pool::<3>),
    op!("avg_pool2d_backward", avg_pool_backward::<2>).layout(Layout::ChannelsLast),
    op!("avg_pool3d_backward", avg_pool_backward::<3>),
    op!("max_unpool2d", |c: &Ctx, x: Tensor, indices: Tensor, size: Dims| max_unpool::<2>(
        c, x, indices, &size
    ))
    .layout(Layout::ChannelsLast),
    op!("max_unpool3d", |c: &Ctx, x: Tensor, indices: Tensor, size: Dims, stride: Dims, padding: Dims| {
        check_unpool3d(&stride, &padding)?;
        max_unpool::<3>(c, x, indices, &size)
    }),
];

/// One spatial dimension of a pool.
#[derive(Clone, Copy)]
struct Axis {
    kernel: i64,
    stride: i64,
    padding: i64,
    dilation: i64,
    input: i64,
    output: i64,
}

impl Axis {
    /// Distance from the first to the last element of a window, plus one.
    fn extent(&self) -> i64 {
        self.dilation * (self.kernel - 1) + 1
    }

    /// torch's checks of one dimension, in torch's order.
    fn check(&self) -> Result<()> {
        let Axis { kernel, stride, padding, dilation, .. } = *self;
        in_32_bits(&[kernel, stride, padding, dilation])?;
        if stride == 0 {
            return Err(runtime("stride should not be zero"));
        }
        if padding < 0 {
            return Err(runtime(format!("pad must be non-negative, but got pad: {padding}")));
        }
        if kernel > 0 && dilation > 0 && padding > self.extent() / 2 {
            return Err(runtime(format!(
                "pad should be at most half of effective kernel size, but got pad={padding}, kernel_size={kernel} and \
                 dilation={dilation}"
            )));
        }
        for (what, n) in [("kernel size", kernel), ("stride", stride), ("dilation", dilation)] {
            if n <= 0 {
                return Err(runtime(format!("{what} should be greater than zero, but got {n}")));
            }
        }
        Ok(())
    }

    /// `at::native::pooling_output_shape`
    fn output_size(&self, ceil_mode: bool) -> i64 {
        let extra = if ceil_mode { self.stride - 1 } else { 0 };
        let out = (self.input + 2 * self.padding - self.extent() + extra).div_euclid(self.stride) + 1;
        // The last window must start inside the input or the left padding.
        let beyond = ceil_mode && (out - 1) * self.stride >= self.input + self.padding;
        if beyond { out - 1 } else { out }
    }

    /// How far the windows reach beyond the input's end.
    fn high(&self) -> i64 {
        let reach = (self.output - 1) * self.stride + self.extent() - self.padding;
        (reach - self.input).max(0)
    }

    fn is_padded(&self) -> bool {
        self.padding > 0 || self.high() > 0
    }

    /// How many elements each window averages: those of the input, or with `pads` of the padded input.
    fn counts(&self, pads: bool) -> Vec<f64> {
        let count = |o: i64| {
            let start = o * self.stride - self.padding;
            let end = (start + self.kernel).min(self.input + self.padding);
            if pads { end - start } else { end.min(self.input) - start.max(0) }
        };
        (0..self.output).map(|o| count(o) as f64).collect()
    }
}

/// A pool over `N` spatial dimensions.
struct Pool<const N: usize> {
    axes: [Axis; N],
    /// Number of dimensions before the spatial ones.
    lead: usize,
    /// Sizes of the input.
    shape: Dims,
}

/// The arguments that describe a pool.
struct Geometry<'a> {
    name: &'a str,
    kernel: &'a [i64],
    stride: &'a [i64],
    padding: &'a [i64],
    dilation: &'a [i64],
    ceil_mode: bool,
}

/// An `int[N]` argument, which may have one element for all dimensions.
fn each<const N: usize>(name: &str, list: &[i64], wording: &str) -> Result<[i64; N]> {
    let ints = if N == 2 { "two ints" } else { "three ints" };
    let wrong = || runtime(format!("{name}: {wording} a single int, or a tuple of {ints}"));
    match list {
        [one] => Ok([*one; N]),
        many => many.try_into().map_err(|_| wrong()),
    }
}

impl<const N: usize> Pool<N> {
    fn new(c: &Ctx, x: Tensor, g: &Geometry) -> Result<Self> {
        let kernel = each::<N>(g.name, g.kernel, "kernel_size must either be")?;
        let stride = match g.stride {
            [] => kernel,
            s => each::<N>(g.name, s, "stride must either be omitted,")?,
        };
        let padding = each::<N>(g.name, g.padding, "padding must either be")?;
        let dilation = each::<N>(g.name, g.dilation, "dilation must be either")?;
        let shape = c.shape(x.value);
        check_rank::<N>(&shape)?;
        let lead = shape.len() - N;
        let axes = std::array::from_fn(|d| Axis {
            kernel: kernel[d],
            stride: stride[d],
            padding: padding[d],
            dilation: dilation[d],
            input: shape[lead + d],
            output: 1,
        });
        let mut pool = Pool { axes, lead, shape };
        for axis in &mut pool.axes {
            axis.check()?;
            axis.output = axis.output_size(g.ceil_mode);
        }
        pool.check_output()?;
        Ok(pool)
    }

    fn check_output(&self) -> Result<()> {
        if self.axes.iter().all(|a| a.output >= 1) {
            return Ok(());
        }
        let planes = self.shape[self.lead - 1];
        let sizes = |f: fn(&Axis) -> i64| self.axes.iter().map(|a| format!("x{}", f(a))).collect::<String>();
        Err(runtime(format!(
            "Given input size: ({planes}{}). Calculated output size: ({planes}{}). Output size is too small",
            sizes(|a| a.input),
            sizes(|a| a.output)
        )))
    }

    fn output_shape(&self) -> Dims {
        let spatial = self.axes.iter().map(|a| a.output);
        self.shape[..self.lead].iter().copied().chain(spatial).collect()
    }

    /// Checks that a gradient (or indices) has the shape of the output.
    fn check_grad(&self, c: &Ctx, grad: Value) -> Result<()> {
        same_shape(&self.output_shape(), &c.shape(grad))
    }

    /// Number of elements of one input plane.
    fn plane(&self) -> i64 {
        self.axes.iter().map(|a| a.input).product()
    }

    /// One number for each dimension, 0 or `fill` for the leading ones.
    fn per_dim(&self, fill: i64, f: impl Fn(&Axis) -> i64) -> Dims {
        std::iter::repeat_n(fill, self.lead).chain(self.axes.iter().map(f)).collect()
    }
}

pub(super) fn same_shape(want: &[i64], got: &[i64]) -> Result<()> {
    let rank = want.len();
    if got.len() != rank {
        let len = got.len();
        return Err(runtime(format!("Expected a tensor of dimension {rank} but got: dimension {len}")));
    }
    match (0..rank).find(|&d| want[d] != got[d]) {
        None => Ok(()),
        Some(d) => Err(runtime(format!(
            "Expected a tensor of dimension {rank} and tensor.size[{d}] == {} but got: dimension {rank} and \
             tensor.size[{d}] = {}",
            want[d], got[d]
        ))),
    }
}

/// Batch and channels, or channels alone, then the spatial dimensions; only the batch may be empty.
fn check_rank<const N: usize>(shape: &[i64]) -> Result<()> {
    let (low, high) = (N + 1, N + 2);
    if shape.len() != low && shape.len() != high {
        return Err(runtime(format!("non-empty {low}D or {high}D (batch mode) tensor expected for input")));
    }
    if shape[shape.len() - low..].contains(&0) {
        return Err(runtime(format!(
            "Expected {low}D or {high}D (batch mode) tensor with optional 0 dim batch size for input, but got:{shape:?}"
        )));
    }
    Ok(())
}

/// The best element of each window so far, and where it was; -1 is padding.
#[derive(Clone, Copy)]
struct Best {
    value: Value,
    index: Value,
}

/// `new` where it is larger or NaN (so that the last NaN wins, as in torch) or where `old` is padding.
fn better(c: &Ctx, old: Best, new: Best, padded: bool) -> Best {
    let mut take = c.gt(new.value, old.value);
    if c.dtype(new.value).is_float() {
        take = c.or(take, c.is_nan(new.value));
    }
    if padded {
        take = c.or(take, c.lt(old.index, c.zeros_like(old.index)));
    }
    Best { value: c.select(take, new.value, old.value), index: c.select(take, new.index, old.index) }
}

/// Windows up to this many elements are compared element by element, larger ones one dimension after the other.
const DIRECT_WINDOW: i64 = 16;

impl<const N: usize> Pool<N> {
    /// The elements at offset `at` of all windows along dimension `d`.
    fn strided(&self, c: &Ctx, padded: Value, d: usize, at: i64) -> Value {
        let axis = &self.axes[d];
        let start = at * axis.dilation;
        let limit = start + (axis.output - 1) * axis.stride + 1;
        c.slice_dim(padded, (self.lead + d) as i64, start, limit, axis.stride)
    }

    fn pad(&self, c: &Ctx, x: Value, fill: Value, dims: &[usize]) -> Value {
        let mut out = x;
        for &d in dims {
            let axis = &self.axes[d];
            out = c.pad_dim(out, fill, (self.lead + d) as i64, axis.padding, axis.high());
        }
        out
    }

    /// Input positions along dimension `d` of offset `at` of all windows, over `shape`; what is padding may be negative
    /// or too large.
    fn positions(&self, c: &Ctx, shape: &[i64], d: usize, at: i64, dtype: DType) -> Value {
        let axis = &self.axes[d];
        let i = c.iota(TensorType::new(dtype, shape), (self.lead + d) as i64);
        let scalar = |n: i64| c.full(c.scalar_i64(dtype, n), shape);
        let scaled = if axis.stride == 1 { i } else { c.multiply(i, scalar(axis.stride)) };
        let shift = at * axis.dilation - axis.padding;
        if shift == 0 { scaled } else { c.add(scaled, scalar(shift)) }
    }

    /// Whether positions along dimension `d` lie in the input; nothing where they always do.
    fn inside(&self, c: &Ctx, positions: Value, d: usize) -> Option<Value> {
        let axis = &self.axes[d];
        (axis.is_padded() || c.is_outline()).then(|| {
            let end = c.full(c.scalar_i64(c.dtype(positions), axis.input), &c.shape(positions));
            c.and(c.ge(positions, c.zeros_like(positions)), c.lt(positions, end))
        })
    }

    /// Every element of the windows in turn.
    fn max_direct(&self, c: &Ctx, x: Value, dtype: DType) -> Best {
        let all: Vec<usize> = (0..N).collect();
        let padded = self.pad(c, x, c.min_value(c.dtype(x)), &all);
        let any_pad = self.axes.iter().any(Axis::is_padded) || c.is_outline();
        let shape = self.output_shape();
        let mut best: Option<Best> = None;
        for offset in offsets(self.axes.map(|a| a.kernel)) {
            let mut value = padded;
            let mut index: Option<Value> = None;
            let mut inside: Option<Value> = None;
            for (d, &at) in offset.iter().enumerate() {
                value = self.strided(c, value, d, at);
                let position = self.positions(c, &shape, d, at, dtype);
                if let Some(ok) = self.inside(c, position, d) {
                    inside = Some(inside.map_or(ok, |i| c.and(i, ok)));
                }
                let size = c.full(c.scalar_i64(dtype, self.axes[d].input), &shape);
                index = Some(index.map_or(position, |i| c.add(c.multiply(i, size), position)));
            }
            let Some(mut index) = index else { continue };
            if let Some(ok) = inside {
                index = c.select(ok, index, c.like(index, -1.0));
            }
            let new = Best { value, index };
            best = Some(best.map_or(new, |old| better(c, old, new, any_pad)));
        }
        best.unwrap_or(Best { value: x, index: c.iota_dim(x, dtype, 0) })
    }

    /// Dimension after dimension, last one first: the winner's index is carried along.
    fn max_separable(&self, c: &Ctx, x: Value, dtype: DType) -> Best {
        let mut best = Best { value: x, index: c.constant(TensorType::new(dtype, c.shape(x)), 0.0) };
        let mut pitch = 1;
        for d in (0..N).rev() {
            let fill = c.min_value(c.dtype(x));
            let values = self.pad(c, best.value, fill, &[d]);
            let carried = self.pad(c, best.index, c.scalar_i64(dtype, -1), &[d]);
            let mut row: Option<Best> = None;
            for at in 0..self.axes[d].kernel {
                let value = self.strided(c, values, d, at);
                let below = self.strided(c, carried, d, at);
                let shape = c.shape(value);
                let position = self.positions(c, &shape, d, at, dtype);
                let step = c.full(c.scalar_i64(dtype, pitch), &shape);
                let index = c.add(c.multiply(position, step), below);
                let none = c.lt(below, c.zeros_like(below));
                let new = Best { value, index: c.select(none, below, index) };
                row = Some(row.map_or(new, |old| better(c, old, new, true)));
            }
            best = row.unwrap_or(best);
            pitch *= self.axes[d].input;
        }
        best
    }
}

/// All offsets in a window, last dimension fastest.
fn offsets<const N: usize>(kernel: [i64; N]) -> Vec<[i64; N]> {
    let mut out = vec![[0; N]];
    for d in 0..N {
        let grow = |at: [i64; N]| {
            (0..kernel[d]).map(move |i| {
                let mut at = at;
                at[d] = i;
                at
            })
        };
        out = out.into_iter().flat_map(grow).collect();
    }
    out
}

fn max_pool<const N: usize>(
    c: &Ctx,
    x: Tensor,
    kernel: Dims,
    stride: Dims,
    padding: Dims,
    dilation: Dims,
    ceil_mode: bool,
) -> Result<(Value, Value)> {
    let name = if N == 2 { "max_pool2d" } else { "max_pool3d" };
    let g = Geometry {
        name,
        kernel: &kernel,
        stride: &stride,
        padding: &padding,
        dilation: &dilation,
        ceil_mode,
    };
    let pool = Pool::<N>::new(c, x, &g)?;
    if x.dtype == DType::Pred || x.dtype.is_complex() {
        return Err(not_implemented(name, x.dtype));
    }
    let dtype = index_dtype(pool.plane());
    let window: i64 = pool.axes.iter().map(|a| a.kernel).product();
    let best = if window <= DIRECT_WINDOW {
        pool.max_direct(c, x.value, dtype)
    } else {
        pool.max_separable(c, x.value, dtype)
    };
    Ok((best.value, c.to(best.index, DType::S64)))
}

/// Overlaps up to this many windows per element are gathered, more are scattered.
const GATHERED_WINDOWS: i64 = 9;

#[allow(clippy::too_many_arguments)] // the schema's
fn max_pool_backward<const N: usize>(
    c: &Ctx,
    grad: Tensor,
    x: Tensor,
    kernel: Dims,
    stride: Dims,
    padding: Dims,
    dilation: Dims,
    ceil_mode: bool,
    indices: Tensor,
) -> Result<Value> {
    let name = if N == 2 { "max_pool2d" } else { "max_pool3d" };
    let g = Geometry {
        name,
        kernel: &kernel,
        stride: &stride,
        padding: &padding,
        dilation: &dilation,
        ceil_mode,
    };
    let pool = Pool::<N>::new(c, x, &g)?;
    pool.check_grad(c, grad.value)?;
    pool.check_grad(c, indices.value)?;
    let wide = c.to(grad.value, opmath(x.dtype));
    let overlap = |a: &Axis| (a.kernel + a.stride - 1) / a.stride;
    let windows: i64 = pool.axes.iter().map(overlap).product();
    let gathered = pool.axes.iter().all(|a| a.dilation == 1) && windows <= GATHERED_WINDOWS;
    let by_host = || add_to_planes(c, wide, indices.value, &pool.shape, pool.lead);
    let out = match if windows > 1 { by_host() } else { None } {
        Some(out) => out,
        None if gathered => {
            let index = c.to(indices.value, index_dtype(pool.plane()));
            pool.gather_grad(c, wide, index, pool.axes.map(|a| overlap(&a)))
        }
        None => scatter_plane(c, wide, indices.value, &pool.shape, pool.lead, true),
    };
    Ok(c.to(out, x.dtype))
}

impl<const N: usize> Pool<N> {
    /// The gradient of a max pool without a scatter: every element of the input looks at the windows that cover it and
    /// takes the gradients whose index is its own.
    fn gather_grad(&self, c: &Ctx, grad: Value, index: Value, overlap: [i64; N]) -> Value {
        let dtype = c.dtype(index);
        let zero = c.constant(TensorType::new(c.dtype(grad), self.shape.clone()), 0.0);
        let mut own = c.constant(TensorType::new(dtype, self.shape.clone()), 0.0);
        for (d, axis) in self.axes.iter().enumerate() {
            let position = c.iota(TensorType::new(dtype, self.shape.clone()), (self.lead + d) as i64);
            let size = c.full(c.scalar_i64(dtype, axis.input), &self.shape);
            own = if d == 0 { position } else { c.add(c.multiply(own, size), position) };
        }
        let none = c.scalar_i64(dtype, -1);
        let nothing = c.scalar_f64(c.dtype(grad), 0.0);
        let mut sum: Option<Value> = None;
        for offset in offsets(overlap) {
            let hit = c.eq(self.spread_windows(c, index, none, &offset), own);
            let part = c.select(hit, self.spread_windows(c, grad, nothing, &offset), zero);
            sum = Some(sum.map_or(part, |s| c.add(s, part)));
        }
        sum.unwrap_or(zero)
    }

    /// For every element of the input the value of the window `back` windows before the last one that starts at or
    /// before it; `fill` where there is none.
    fn spread_windows(&self, c: &Ctx, v: Value, fill: Value, back: &[i64; N]) -> Value {
        let mut out = v;
        for (d, axis) in self.axes.iter().enumerate() {
            let dim = self.lead + d;
            let repeated = repeat(c, out, dim, axis.stride);
            let low = back[d] * axis.stride - axis.padding;
            let high = axis.input - axis.output * axis.stride - low;
            out = c.pad_dim(repeated, fill, dim as i64, low, high);
        }
        out
    }
}

/// Every element `n` times along `dim`.
pub(super) fn repeat(c: &Ctx, x: Value, dim: usize, n: i64) -> Value {
    let mut shape = c.shape(x);
    let mut wide = shape.clone();
    wide.insert(dim + 1, n);
    let dims: Dims = (0..wide.len() as i64).filter(|&d| d != dim as i64 + 1).collect();
    let x = c.broadcast_in_dim(x, &wide, &dims);
    shape[dim] *= n;
    c.reshape(x, &shape)
}

/// Values summed up in zero planes of the given shape, at flat indices into each plane; if the host does it.
fn add_to_planes(c: &Ctx, values: Value, index: Value, shape: &[i64], lead: usize) -> Option<Value> {
    let plane: i64 = shape[lead..].iter().product();
    let points: i64 = c.shape(values)[lead..].iter().product();
    if lead == 2 && is_channels_last(c, values) {
        let (n, channels) = (shape[0], shape[1]);
        let last = channels_last(shape.len());
        let flat = |v: Value| c.reshape(c.transpose(v, &last), &[n, points, channels]);
        let zeros = c.constant(TensorType::new(c.dtype(values), [n, plane, channels].as_slice()), 0.0);
        let sum = add_by_host(c, zeros, flat(index), flat(values))?;
        let image: Dims = last.iter().map(|&d| shape[d as usize]).collect();
        return Some(c.transpose(c.reshape(sum, &image), &inverse(&last)));
    }
    let batch: i64 = shape[..lead].iter().product();
    let flat = |v: Value| c.reshape(v, &[batch, points, 1]);
    let zeros = c.constant(TensorType::new(c.dtype(values), [batch, plane, 1].as_slice()), 0.0);
    add_by_host(c, zeros, flat(index), flat(values)).map(|sum| c.reshape(sum, shape))
}

/// Writes (or with `add` sums) values into zero planes of the given shape, at flat indices into each plane.
pub(super) fn scatter_plane(
    c: &Ctx,
    values: Value,
    index: Value,
    shape: &[i64],
    lead: usize,
    add: bool,
) -> Value {
    if add && let Some(sum) = add_to_planes(c, values, index, shape, lead) {
        return sum;
    }
    let batch: i64 = shape[..lead].iter().product();
    let plane: i64 = shape[lead..].iter().product();
    let points: i64 = c.shape(values)[lead..].iter().product();
    let index = c.to(index, index_dtype(plane));
    let zeros = c.constant(TensorType::new(c.dtype(values), [batch, plane].as_slice()), 0.0);
    let dims = ScatterDims {
        inserted_window_dims: Dims::from_slice(&[1]),
        input_batching_dims: Dims::from_slice(&[0]),
        scatter_indices_batching_dims: Dims::from_slice(&[0]),
        scatter_dims_to_operand_dims: Dims::from_slice(&[1]),
        index_vector_dim: 2,
        ..ScatterDims::default()
    };
    let index = c.reshape(index, &[batch, points]);
    let values = c.reshape(values, &[batch, points]);
    let out = c.scatter(&[zeros], index, &[values], &dims, ScatterFlags::default(), |b, old, new| {
        vec![if add { b.add(old[0], new[0]) } else { new[0] }]
    });
    c.reshape(out.first().copied().unwrap_or(zeros), shape)
}

/// What an average divides by: a number, or a value over the spatial dimensions of the output.
fn divisor<const N: usize>(
    c: &Ctx,
    pool: &Pool<N>,
    dtype: DType,
    pads: bool,
    fixed: Option<i64>,
) -> Result<Value> {
    let shape = pool.output_shape();
    if let Some(n) = fixed {
        return match n {
            0 => Err(runtime("divisor must be not zero")),
            n => Ok(c.full(c.scalar_i64(dtype, n), &shape)),
        };
    }
    // The same for all planes.
    let plane = &shape[pool.lead..];
    let mut out = c.full(c.scalar_i64(dtype, 1), plane);
    for (d, axis) in pool.axes.iter().enumerate() {
        let counts = axis.counts(pads);
        let factor = if dtype.is_float() {
            c.vector_f64(dtype, &counts)
        } else {
            c.vector_i64(dtype, &counts.iter().map(|&n| n as i64).collect::<Vec<_>>())
        };
        out = c.multiply(out, c.broadcast_in_dim(factor, plane, &[d as i64]));
    }
    Ok(c.broadcast_to(out, &shape))
}

fn avg_geometry<'a>(
    n: usize,
    kernel: &'a [i64],
    stride: &'a [i64],
    padding: &'a [i64],
    ceil_mode: bool,
) -> Geometry<'a> {
    let name = if n == 2 { "avg_pool2d" } else { "avg_pool3d" };
    Geometry { name, kernel, stride, padding, dilation: &[1], ceil_mode }
}

#[allow(clippy::too_many_arguments)] // the schema's
fn avg_pool<const N: usize>(
    c: &Ctx,
    x: Tensor,
    kernel: Dims,
    stride: Dims,
    padding: Dims,
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: Option<i64>,
) -> Result<Value> {
    let pool = Pool::<N>::new(c, x, &avg_geometry(N, &kernel, &stride, &padding, ceil_mode))?;
    if category(x.dtype) != Category::Float && x.dtype != DType::S64 {
        return Err(not_implemented(if N == 2 { "avg_pool2d" } else { "avg_pool3d_out_frame" }, x.dtype));
    }
    let acc = acc_type(x.dtype);
    let window = Window {
        strides: pool.per_dim(1, |a| a.stride),
        padding: std::iter::repeat_n((0, 0), pool.lead)
            .chain(pool.axes.iter().map(|a| (a.padding, a.high())))
            .collect(),
        ..Window::new(&pool.per_dim(1, |a| a.kernel))
    };
    // Windows that stop short of the input's end must not make more of themselves.
    let limit = pool.per_dim(0, |a| (a.output - 1) * a.stride + a.extent() - a.padding - a.high());
    let limit: Dims = limit
        .iter()
        .zip(&pool.shape)
        .enumerate()
        .map(|(d, (&l, &n))| if d < pool.lead { n } else { l.min(n) })
        .collect();
    let zero = Dims::from_elem(0, limit.len());
    let used = c.slice(c.to(x.value, acc), &zero, &limit, &Dims::from_elem(1, limit.len()));
    let sum = c.reduce_window_with(Binary::Add, used, c.scalar_f64(acc, 0.0), &window);
    let by = divisor(c, &pool, acc, count_include_pad, divisor_override)?;
    Ok(c.to(c.divide(sum, by), x.dtype))
}

#[allow(clippy::too_many_arguments)] // the schema's
fn avg_pool_backward<const N: usize>(
    c: &Ctx,
    grad: Tensor,
    x: Tensor,
    kernel: Dims,
    stride: Dims,
    padding: Dims,
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: Option<i64>,
) -> Result<Value> {
    let pool = Pool::<N>::new(c, x, &avg_geometry(N, &kernel, &stride, &padding, ceil_mode))?;
    pool.check_grad(c, grad.value)?;
    if category(x.dtype) != Category::Float {
        return Err(not_implemented(
            if N == 2 { "avg_pool2d_backward_out_frame" } else { "avg_pool3d_backward_out_frame" },
            x.dtype,
        ));
    }
    let wide = opmath(x.dtype);
    let by = divisor(c, &pool, wide, count_include_pad, divisor_override)?;
    let share = c.divide(c.to(grad.value, wide), by);
    // An element gets the shares of all windows over it: a sliding sum over the shares, set apart by the stride.
    let low = pool.per_dim(0, |a| a.kernel - 1 - a.padding);
    let high = pool.per_dim(0, |a| a.input + a.padding - 1 - (a.output - 1) * a.stride);
    let interior = pool.per_dim(0, |a| a.stride - 1);
    let apart = c.pad(share, c.scalar_f64(wide, 0.0), &low, &high, &interior);
    let window = Window::new(&pool.per_dim(1, |a| a.kernel));
    let sum = c.reduce_window_with(Binary::Add, apart, c.scalar_f64(wide, 0.0), &window);
    Ok(c.to(sum, x.dtype))
}

/// Stride and padding shaped the output size; nothing else looks at them.
fn check_unpool3d(stride: &[i64], padding: &[i64]) -> Result<()> {
    for (name, list) in [("stride", stride), ("padding", padding)] {
        if list.len() != 3 {
            let n = list.len();
            return Err(runtime(format!(
                "There should be exactly three elements (depth, height, width) in {name}, but got: {n} elements."
            )));
        }
    }
    if stride.iter().any(|&s| s <= 0) {
        return Err(runtime(format!("strides should be greater than zero, but got stride: {stride:?}")));
    }
    Ok(())
}

fn max_unpool<const N: usize>(c: &Ctx, x: Tensor, indices: Tensor, size: &[i64]) -> Result<Value> {
    let shape = c.shape(x.value);
    if size.len() != N {
        let (what, n) = (
            if N == 2 { "two elements (height, width)" } else { "three elements (depth, height, width)" },
            size.len(),
        );
        return Err(runtime(format!("There should be exactly {what} in output_size, but got {n} elements.")));
    }
    if indices.dtype != DType::S64 {
        let got = scalar_name(indices.dtype);
        return Err(runtime(format!("elements in indices should be type int64 but got: {got}")));
    }
    if x.rank != N + 1 && x.rank != N + 2 {
        let (low, high, rank) = (N + 1, N + 2, x.rank);
        return Err(runtime(format!(
            "Input to max_unpooling{N}d should be a {low}d or {high}d Tensor, but got a tensor with {rank} dimensions."
        )));
    }
    let got = c.shape(indices.value);
    if got != shape {
        return Err(runtime(format!(
            "Expected shape of indices to be same as that of the input tensor ({shape:?}) but got indices tensor with \
             shape: {got:?}"
        )));
    }
    if category(x.dtype) != Category::Float {
        return Err(not_implemented(if N == 2 { "max_unpool2d" } else { "max_unpool3d" }, x.dtype));
    }
    let lead = x.rank - N;
    let plane: i64 = size.iter().product();
    let sizes: Vec<String> = size.iter().map(i64::to_string).collect();
    let message = format!("Found an invalid max index (output volumes are of size {})", sizes.join("x"));
    c.check(ErrorKind::Runtime, message, || {
        let end = c.full(c.scalar_i64(DType::S64, plane), &shape);
        c.all(c.and(c.ge(indices.value, c.zeros_like(indices.value)), c.lt(indices.value, end)))
    });
    let out: Dims = shape[..lead].iter().copied().chain(size.iter().copied()).collect();
    Ok(scatter_plane(c, x.value, indices.value, &out, lead, false))
}
