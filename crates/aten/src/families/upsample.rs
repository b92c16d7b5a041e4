//! Resampling and padding by reflection and replication.
//!
//! Every op here is a sparse linear map along one dimension after another, known when the program is built: a list of
//! input positions and weights ([`Taps`]) for each output position. The derivative is the same list turned around.

use crate::args::Tensor;
use crate::dtype::{Category, category, opmath};
use crate::error::{Result, not_implemented, runtime, unsupported};
use crate::lower::Ctx;
use crate::op;
use crate::table::Row;
use oxitorch_hlo::{DType, Dims, Value};

type Scale = Option<f64>;

/// Rows of a resampling op over 1, 2 or 3 dimensions and of its derivative, without and with `align_corners`.
macro_rules! resampling {
    (1, $filter:ident, $name:literal) => {
        op!($name, |c: &Ctx, x: Tensor, to: Dims, w: Scale| resize(c, &$filter, x, &to, false, &[w]))
    };
    (2, $filter:ident, $name:literal) => {
        op!($name, |c: &Ctx, x: Tensor, to: Dims, h: Scale, w: Scale| resize(
            c,
            &$filter,
            x,
            &to,
            false,
            &[h, w]
        ))
    };
    (3, $filter:ident, $name:literal) => {
        op!($name, |c: &Ctx, x: Tensor, to: Dims, d: Scale, h: Scale, w: Scale| {
            resize(c, &$filter, x, &to, false, &[d, h, w])
        })
    };
    (1, $filter:ident, $name:literal, align) => {
        op!($name, |c: &Ctx, x: Tensor, to: Dims, align: bool, w: Scale| resize(
            c,
            &$filter,
            x,
            &to,
            align,
            &[w]
        ))
    };
    (2, $filter:ident, $name:literal, align) => {
        op!($name, |c: &Ctx, x: Tensor, to: Dims, align: bool, h: Scale, w: Scale| {
            resize(c, &$filter, x, &to, align, &[h, w])
        })
    };
    (3, $filter:ident, $name:literal, align) => {
        op!($name, |c: &Ctx, x: Tensor, to: Dims, align: bool, d: Scale, h: Scale, w: Scale| {
            resize(c, &$filter, x, &to, align, &[d, h, w])
        })
    };
}

macro_rules! resampling_backward {
    (1, $filter:ident, $name:literal) => {
        op!($name, |c: &Ctx, g: Tensor, to: Dims, from: Dims, w: Scale| {
            resize_backward(c, &$filter, g, &to, &from, false, &[w])
        })
    };
    (2, $filter:ident, $name:literal) => {
        op!($name, |c: &Ctx, g: Tensor, to: Dims, from: Dims, h: Scale, w: Scale| {
            resize_backward(c, &$filter, g, &to, &from, false, &[h, w])
        })
    };
    (3, $filter:ident, $name:literal) => {
        op!($name, |c: &Ctx, g: Tensor, to: Dims, from: Dims, d: Scale, h: Scale, w: Scale| {
            resize_backward(c, &$filter, g, &to, &from, false, &[d, h, w])
        })
    };
    (1, $filter:ident, $name:literal, align) => {
        op!($name, |c: &Ctx, g: Tensor, to: Dims, from: Dims, align: bool, w: Scale| {
            resize_backward(c, &$filter, g, &to, &from, align, &[w])
        })
    };
    (2, $filter:ident, $name:literal, align) => {
        op!($name, |c: &Ctx, g: Tensor, to: Dims, from: Dims, align: bool, h: Scale, w: Scale| {
            resize_backward(c, &$filter, g, &to, &from, align, &[h, w])
        })
    };
    (3, $filter:ident, $name:literal, align) => {
        op!($name, |c: &Ctx, g: Tensor, to: Dims, from: Dims, align: bool, d: Scale, h: Scale, w: Scale| {
            resize_backward(c, &$filter, g, &to, &from, align, &[d, h, w])
        })
    };
}

/// The rows of this family.
pub static ROWS: &[Row] = &[
    resampling!(1, NEAREST_SCALED, "upsample_nearest1d"),
    resampling!(2, NEAREST, "upsample_nearest2d"),
    resampling!(3, NEAREST_SCALED, "upsample_nearest3d"),
    resampling_backward!(1, NEAREST, "upsample_nearest1d_backward"),
    resampling_backward!(2, NEAREST, "upsample_nearest2d_backward"),
    resampling_backward!(3, NEAREST, "upsample_nearest3d_backward"),
    resampling!(1, NEAREST_EXACT, "_upsample_nearest_exact1d"),
    resampling!(2, NEAREST_EXACT, "_upsample_nearest_exact2d"),
    resampling!(3, NEAREST_EXACT, "_upsample_nearest_exact3d"),
    resampling_backward!(1, NEAREST_EXACT, "_upsample_nearest_exact1d_backward"),
    resampling_backward!(2, NEAREST_EXACT, "_upsample_nearest_exact2d_backward"),
    resampling_backward!(3, NEAREST_EXACT, "_upsample_nearest_exact3d_backward"),
    resampling!(1, LINEAR, "upsample_linear1d", align),
    resampling!(2, LINEAR, "upsample_bilinear2d", align),
    resampling!(3, LINEAR, "upsample_trilinear3d", align),
    resampling_backward!(1, LINEAR, "upsample_linear1d_backward", align),
    resampling_backward!(2, LINEAR, "upsample_bilinear2d_backward", align),
    resampling_backward!(3, LINEAR, "upsample_trilinear3d_backward", align),
    resampling!(2, CUBIC, "upsample_bicubic2d", align),
    resampling_backward!(2, CUBIC, "upsample_bicubic2d_backward", align),
    resampling!(2, LINEAR_AA, "_upsample_bilinear2d_aa", align),
    resampling_backward!(2, LINEAR_AA, "_upsample_bilinear2d_aa_backward", align),
    resampling!(2, CUBIC_AA, "_upsample_bicubic2d_aa", align),
    resampling_backward!(2, CUBIC_AA, "_upsample_bicubic2d_aa_backward", align),
    resampling!(2, LANCZOS_AA, "_upsample_lanczos2d_aa", align),
    resampling_backward!(2, LANCZOS_AA, "_upsample_lanczos2d_aa_backward", align),
    op!("reflection_pad1d", |c: &Ctx, x: Tensor, pad: Dims| edge_pad::<1>(c, &REFLECT, x, &pad)),
    op!("reflection_pad2d", |c: &Ctx, x: Tensor, pad: Dims| edge_pad::<2>(c, &REFLECT, x, &pad)),
    op!("reflection_pad3d", |c: &Ctx, x: Tensor, pad: Dims| edge_pad::<3>(c, &REFLECT, x, &pad)),
    op!("replication_pad1d", |c: &Ctx, x: Tensor, pad: Dims| edge_pad::<1>(c, &REPLICATE, x, &pad)),
    op!("replication_pad2d", |c: &Ctx, x: Tensor, pad: Dims| edge_pad::<2>(c, &REPLICATE, x, &pad)),
    op!("replication_pad3d", |c: &Ctx, x: Tensor, pad: Dims| edge_pad::<3>(c, &REPLICATE, x, &pad)),
    op!("reflection_pad1d_backward", |c: &Ctx, g: Tensor, x: Tensor, pad: Dims| {
        edge_pad_backward::<1>(c, &REFLECT, g, x, &pad)
    }),
    op!("reflection_pad2d_backward", |c: &Ctx, g: Tensor, x: Tensor, pad: Dims| {
        edge_pad_backward::<2>(c, &REFLECT, g, x, &pad)
    }),
    op!("reflection_pad3d_backward", |c: &Ctx, g: Tensor, x: Tensor, pad: Dims| {
        edge_pad_backward::<3>(c, &REFLECT, g, x, &pad)
    }),
    op!("replication_pad1d_backward", |c: &Ctx, g: Tensor, x: Tensor, pad: Dims| {
        edge_pad_backward::<1>(c, &REPLICATE, g, x, &pad)
    }),
    op!("replication_pad2d_backward", |c: &Ctx, g: Tensor, x: Tensor, pad: Dims| {
        edge_pad_backward::<2>(c, &REPLICATE, g, x, &pad)
    }),
    op!("replication_pad3d_backward", |c: &Ctx, g: Tensor, x: Tensor, pad: Dims| {
        edge_pad_backward::<3>(c, &REPLICATE, g, x, &pad)
    }),
];

/// One dimension that is resampled.
struct Resize {
    input: i64,
    output: i64,
    align_corners: bool,
    scale: Option<f64>,
    /// Positions are computed in float32, as torch does but for double tensors.
    single: bool,
}

impl Resize {
    /// A number as the positions' dtype holds it.
    fn round(&self, x: f64) -> f64 {
        if self.single { f64::from(x as f32) } else { x }
    }

    /// Input elements for each output element: `area_pixel_compute_scale`.
    fn step(&self) -> f64 {
        let (input, output) = (self.input as f64, self.output as f64);
        self.round(match (self.align_corners, self.scale) {
            (true, _) if self.output > 1 => (input - 1.0) / (output - 1.0),
            (true, _) => 0.0,
            (false, Some(s)) if s > 0.0 => 1.0 / s,
            (false, _) => input / output,
        })
    }

    /// Where output element `o` lies in the input: `area_pixel_compute_source_index` without its clamp.
    fn source(&self, o: i64) -> f64 {
        let step = self.step();
        if self.align_corners {
            return self.round(step * o as f64);
        }
        self.round(self.round(step * (o as f64 + 0.5)) - 0.5)
    }

    /// The element at or before a position, and the rest as a weight.
    fn split(&self, at: f64) -> (i64, f64) {
        let index = (at.floor() as i64).min(self.input - 1);
        (index, self.round(at - index as f64).clamp(0.0, 1.0))
    }
}

/// Where torch does not filter at all, whatever scale is given.
#[derive(PartialEq, Eq)]
enum Skip {
    Nothing,
    /// Dimensions whose size stays.
    EqualSize,
    /// The derivative where no size changes.
    EqualShapeBackward,
}

/// How output elements are made of input elements.
struct Filter {
    taps: fn(&Resize, i64) -> Vec<(i64, f64)>,
    /// Copies elements: any dtype will do.
    copies: bool,
    skips: Skip,
}

static NEAREST: Filter = Filter { taps: nearest, copies: true, skips: Skip::Nothing };
/// The same for torch's kernels that follow a given scale even where the sizes are equal or double.
static NEAREST_SCALED: Filter = Filter { taps: nearest_scaled, copies: true, skips: Skip::Nothing };
static NEAREST_EXACT: Filter = Filter { taps: nearest_exact, copies: true, skips: Skip::Nothing };
static LINEAR: Filter = Filter { taps: linear, copies: false, skips: Skip::Nothing };
static CUBIC: Filter = Filter { taps: cubic, copies: false, skips: Skip::EqualShapeBackward };
static LINEAR_AA: Filter =
    Filter { taps: |r, o| antialiased(r, o, 2.0, triangle), copies: false, skips: Skip::EqualSize };
static CUBIC_AA: Filter =
    Filter { taps: |r, o| antialiased(r, o, 4.0, keys), copies: false, skips: Skip::EqualSize };
static LANCZOS_AA: Filter =
    Filter { taps: |r, o| antialiased(r, o, 6.0, lanczos), copies: false, skips: Skip::EqualSize };

fn nearest(r: &Resize, o: i64) -> Vec<(i64, f64)> {
    let at = if r.output == r.input {
        o
    } else if r.output == 2 * r.input {
        o / 2
    } else {
        return nearest_scaled(r, o);
    };
    vec![(at, 1.0)]
}

fn nearest_scaled(r: &Resize, o: i64) -> Vec<(i64, f64)> {
    let at = r.round(r.step() * o as f64).floor() as i64;
    vec![(at.min(r.input - 1), 1.0)]
}

fn nearest_exact(r: &Resize, o: i64) -> Vec<(i64, f64)> {
    let at = r.round(r.step() * (o as f64 + 0.5)).floor() as i64;
    vec![(at.min(r.input - 1), 1.0)]
}

fn linear(r: &Resize, o: i64) -> Vec<(i64, f64)> {
    if r.output == r.input {
        return vec![(o, 1.0)];
    }
    let (index, weight) = r.split(r.source(o).max(0.0));
    let next = (index + 1).min(r.input - 1);
    vec![(index, r.round(1.0 - weight)), (next, weight)]
}

/// Keys' cubic convolution with a = -0.75; positions beyond the edge take the edge's element.
fn cubic(r: &Resize, o: i64) -> Vec<(i64, f64)> {
    const A: f64 = -0.75;
    let near = |x: f64| ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0;
    let far = |x: f64| ((A * x - 5.0 * A) * x + 8.0 * A) * x - 4.0 * A;
    let (index, t) = r.split(r.source(o));
    let weights = [far(t + 1.0), near(t), near(1.0 - t), far(2.0 - t)];
    let clamp = |i: i64| i.clamp(0, r.input - 1);
    (index - 1..).zip(weights).map(|(i, w)| (clamp(i), r.round(w))).collect()
}

/// A filter as wide as `width` output elements (at least input elements), normalised.
fn antialiased(r: &Resize, o: i64, width: f64, filter: fn(f64) -> f64) -> Vec<(i64, f64)> {
    let step = r.step();
    let stretch = step.max(1.0);
    let support = width * 0.5 * stretch;
    let center = step * (o as f64 + 0.5);
    let first = ((center - support + 0.5) as i64).max(0);
    let last = ((center + support + 0.5) as i64).min(r.input);
    let weight = |i: i64| filter((i as f64 - center + 0.5) / stretch);
    let total: f64 = (first..last).map(weight).sum();
    let scale = if total == 0.0 { 1.0 } else { 1.0 / total };
    (first..last).map(|i| (i, r.round(weight(i) * scale))).collect()
}

fn triangle(x: f64) -> f64 {
    (1.0 - x.abs()).max(0.0)
}

/// Keys' cubic convolution with a = -0.5, as PIL has it.
fn keys(x: f64) -> f64 {
    const A: f64 = -0.5;
    match x.abs() {
        x if x < 1.0 => ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0,
        x if x < 2.0 => (((x - 5.0) * x + 8.0) * x - 4.0) * A,
        _ => 0.0,
    }
}

fn lanczos(x: f64) -> f64 {
    let sinc = |x: f64| {
        let x = x * std::f64::consts::PI;
        if x == 0.0 { 1.0 } else { x.sin() / x }
    };
    if x.abs() < 3.0 { sinc(x) * sinc(x / 3.0) } else { 0.0 }
}

/// `D: 2, H: 3, W: 4`
fn named_sizes(sizes: &[i64]) -> String {
    let names = &["D", "H", "W"][3 - sizes.len().min(3)..];
    let parts: Vec<_> = names.iter().zip(sizes).map(|(name, n)| format!("{name}: {n}")).collect();
    parts.join(", ")
}

fn check_resize(input: &[i64], output: &[i64], spatial: usize) -> Result<()> {
    if output.len() != spatial {
        let got = output.len();
        return Err(runtime(format!("It is expected output_size equals to {spatial}, but got size {got}")));
    }
    let rank = spatial + 2;
    if input.len() != rank {
        // torch counts the spatial dimensions of the only op over one dimension.
        let (want, got) = if spatial == 1 { (3, input.len()) } else { (rank, input.len()) };
        return Err(runtime(format!("It is expected input_size equals to {want}, but got size {got}")));
    }
    if input[2..].iter().chain(output).any(|&n| n <= 0) {
        let and = if spatial == 1 { "and " } else { "" };
        return Err(runtime(format!(
            "Input and output sizes should be greater than 0, but got input ({}) {and}output ({})",
            named_sizes(&input[2..]),
            named_sizes(output)
        )));
    }
    if input[1] == 0 {
        return Err(runtime(format!(
            "Non-empty {rank}D data tensor expected but got a tensor with sizes {input:?}"
        )));
    }
    Ok(())
}

/// The maps along the spatial dimensions of an input of this shape.
fn maps(
    filter: &Filter,
    dtype: DType,
    input: &[i64],
    output: &[i64],
    align_corners: bool,
    scales: &[Scale],
) -> Vec<Taps> {
    let map = |d: usize| {
        let r = Resize {
            input: input[2 + d],
            output: output[d],
            align_corners,
            scale: scales[d],
            single: dtype != DType::F64,
        };
        let same = filter.skips == Skip::EqualSize && r.input == r.output;
        let row = |o| if same { vec![(o, 1.0)] } else { (filter.taps)(&r, o) };
        Taps::new(r.input, (0..r.output).map(row).collect())
    };
    (0..output.len()).map(map).collect()
}

fn resize(c: &Ctx, filter: &Filter, x: Tensor, to: &[i64], align: bool, scales: &[Scale]) -> Result<Value> {
    let shape = c.shape(x.value);
    check_resize(&shape, to, scales.len())?;
    let wide = match category(x.dtype) {
        Category::Float if filter.copies => x.dtype,
        Category::Float => opmath(x.dtype),
        _ if x.dtype == DType::U8 && filter.copies => x.dtype,
        // torch rounds bytes with weights of its own.
        _ if x.dtype == DType::U8 => return Err(unsupported("interpolation of bytes")),
        _ => return Err(not_implemented(c.op, x.dtype)),
    };
    let mut out = c.to(x.value, wide);
    for (d, map) in maps(filter, x.dtype, &shape, to, align, scales).iter().enumerate() {
        out = map.apply(c, out, 2 + d);
    }
    Ok(c.to(out, x.dtype))
}

fn resize_backward(
    c: &Ctx,
    filter: &Filter,
    grad: Tensor,
    to: &[i64],
    from: &[i64],
    align: bool,
    scales: &[Scale],
) -> Result<Value> {
    check_resize(from, to, scales.len())?;
    let got = c.shape(grad.value);
    let want: Dims = from[..2].iter().chain(to).copied().collect();
    if got.len() != want.len() {
        let (rank, len) = (want.len(), got.len());
        return Err(runtime(format!(
            "Expected grad_output to be a tensor of dimension {rank} but got: dimension {len}"
        )));
    }
    if let Some(d) = (0..want.len()).find(|&d| want[d] != got[d]) {
        return Err(runtime(format!(
            "Expected grad_output to have the same shape as output; output.size({d}) = {} but got grad_output.size({d}) = {}",
            want[d], got[d]
        )));
    }
    if category(grad.dtype) != Category::Float && grad.dtype != DType::U8 {
        return Err(not_implemented(c.op, grad.dtype));
    }
    if filter.skips == Skip::EqualShapeBackward && from[2..] == *to {
        return Ok(grad.value);
    }
    let mut out = c.to(grad.value, opmath(grad.dtype));
    for (d, map) in maps(filter, grad.dtype, from, to, align, scales).iter().enumerate() {
        out = map.transposed().apply(c, out, 2 + d);
    }
    Ok(c.to(out, grad.dtype))
}

/// What a pad repeats.
struct Edge {
    name: &'static str,
    /// The element of `0..n` that stands for position `i`.
    source: fn(i64, i64) -> i64,
    /// Whether a pad must be smaller than its dimension.
    bounded: bool,
}

static REFLECT: Edge = Edge { name: "reflection_pad", source: reflect, bounded: true };
static REPLICATE: Edge = Edge { name: "replication_pad", source: |i, n| i.clamp(0, n - 1), bounded: false };

fn reflect(i: i64, n: i64) -> i64 {
    let i = i.abs();
    if i < n { i } else { 2 * (n - 1) - i }
}

/// Low and high pads of the last `N` dimensions, first of these first, checked as torch does.
fn edge_pads<const N: usize>(
    edge: &Edge,
    dtype: DType,
    shape: &[i64],
    pad: &[i64],
) -> Result<[(i64, i64); N]> {
    if pad.len() != 2 * N {
        return Err(runtime(format!("padding size is expected to be {}, but got: {}", 2 * N, pad.len())));
    }
    let (low, high) = (N + 1, N + 2);
    let rank = shape.len();
    if (rank != low && rank != high) || shape[rank - low..].contains(&0) {
        return Err(runtime(format!(
            "Expected {low}D or {high}D (batch mode) tensor with possibly 0 batch size and other non-zero dimensions for \
             input, but got: {shape:?}"
        )));
    }
    if dtype == DType::Pred {
        return Err(not_implemented(&format!("{}{N}d", edge.name), dtype));
    }
    // torch lists the last dimension first.
    let pads: [(i64, i64); N] = std::array::from_fn(|d| (pad[2 * (N - 1 - d)], pad[2 * (N - 1 - d) + 1]));
    for (back, &(left, right)) in pads.iter().rev().enumerate() {
        let dim = rank - 1 - back;
        if edge.bounded && (left >= shape[dim] || right >= shape[dim]) {
            let argument = 4 + 2 * back;
            return Err(runtime(format!(
                "Argument #{argument}: Padding size should be less than the corresponding input dimension, but got: \
                 padding ({left}, {right}) at dimension {dim} of input {shape:?}"
            )));
        }
    }
    let sizes = &shape[rank - N..];
    let out: Vec<i64> = sizes.iter().zip(&pads).map(|(n, (l, r))| n + l + r).collect();
    if out.iter().any(|&n| n < 1) {
        let names = &["D", "H", "W"][3 - N..];
        let calculated: Vec<_> = names.iter().zip(&out).map(|(name, n)| format!("{name}: {n}")).collect();
        let (input, output) = (named_sizes(sizes), calculated.join(" "));
        if N > 1 {
            let message =
                format!("Calculated output {output} must be >= 1 in every dimension (input {input})");
            return Err(runtime(message));
        }
        return Err(runtime(format!("input ({input}) is too small. Calculated output {output}")));
    }
    Ok(pads)
}

fn edge_pad<const N: usize>(c: &Ctx, edge: &Edge, x: Tensor, pad: &[i64]) -> Result<Value> {
    let shape = c.shape(x.value);
    let pads = edge_pads::<N>(edge, x.dtype, &shape, pad)?;
    let mut out = x.value;
    for (d, &(left, right)) in pads.iter().enumerate() {
        out = pad_slices(c, edge, out, shape.len() - N + d, left, right);
    }
    Ok(out)
}

/// Pads one dimension by joining slices: cheaper than a gather.
fn pad_slices(c: &Ctx, edge: &Edge, x: Value, dim: usize, left: i64, right: i64) -> Value {
    let n = c.shape(x)[dim];
    let dim = dim as i64;
    let border = |from: i64, to: i64| -> Option<Value> {
        if from >= to {
            return None;
        }
        if !edge.bounded {
            let one = (edge.source)(from, n);
            let mut shape = c.shape(x);
            shape[dim as usize] = to - from;
            let all: Dims = (0..shape.len() as i64).collect();
            return Some(c.broadcast_in_dim(c.slice_dim(x, dim, one, one + 1, 1), &shape, &all));
        }
        let (a, b) = ((edge.source)(from, n), (edge.source)(to - 1, n));
        Some(c.reverse(c.slice_dim(x, dim, a.min(b), a.max(b) + 1, 1), &[dim]))
    };
    // A negative pad on one side cuts into the other side's border where it takes more than there is.
    let start = (-left).clamp(0, n);
    let inner = c.slice_dim(x, dim, start, (n + right.min(0)).max(start), 1);
    let parts = [border(-left, 0.min(n + right)), Some(inner), border(n.max(-left), n + right)];
    let parts: Vec<Value> = parts.into_iter().flatten().collect();
    c.concatenate(&parts, dim)
}

fn edge_pad_backward<const N: usize>(
    c: &Ctx,
    edge: &Edge,
    grad: Tensor,
    x: Tensor,
    pad: &[i64],
) -> Result<Value> {
    let shape = c.shape(x.value);
    let pads = edge_pads::<N>(edge, x.dtype, &shape, pad)?;
    let got = c.shape(grad.value);
    let lead = shape.len() - N;
    for (back, name) in ["width", "height", "depth"].iter().enumerate().take(N) {
        let (d, (left, right)) = (lead + N - 1 - back, pads[N - 1 - back]);
        let (want, have) = (shape[d] + left + right, got.get(d).copied().unwrap_or(0));
        if want != have {
            return Err(runtime(format!("grad_output {name} unexpected. Expected: {want}, Got: {have}")));
        }
    }
    let mut out = c.to(grad.value, opmath(x.dtype));
    for (d, &(left, right)) in pads.iter().enumerate() {
        let n = shape[lead + d];
        let rows = (-left..n + right).map(|i| vec![((edge.source)(i, n), 1.0)]).collect();
        out = Taps::new(n, rows).transposed().apply(c, out, lead + d);
    }
    Ok(c.to(out, x.dtype))
}

/// For each output position along a dimension the input positions that it sums, with their weights.
pub(super) struct Taps {
    input: i64,
    rows: Vec<Vec<(i64, f64)>>,
}

/// Up to this many taps are summed one gather at a time, more in one gather and a reduction.
const UNROLLED_TAPS: usize = 4;

impl Taps {
    /// `rows[o]` lists the taps of output position `o`, for a dimension of `input` elements.
    pub(super) fn new(input: i64, rows: Vec<Vec<(i64, f64)>>) -> Self {
        Taps { input, rows }
    }

    /// The map of the derivative.
    pub(super) fn transposed(&self) -> Taps {
        let mut rows = vec![Vec::new(); self.input as usize];
        for (o, row) in self.rows.iter().enumerate() {
            for &(i, w) in row {
                rows[i as usize].push((o as i64, w));
            }
        }
        Taps { input: self.rows.len() as i64, rows }
    }

    /// Applies the map to `x` along `dim`, in the dtype of `x`.
    pub(super) fn apply(&self, c: &Ctx, x: Value, dim: usize) -> Value {
        if let Some((n, w)) = self.blocks() {
            return scale(c, sum_blocks(c, x, dim, n), w);
        }
        if let Some((n, w)) = self.repeats() {
            return scale(c, super::pooling::repeat(c, x, dim, n), w);
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
            let part = weigh(c, taken, &weights, &[dim as i64], &[self.rows.len() as i64]);
            sum = Some(sum.map_or(part, |s| c.add(s, part)));
        }
        sum.unwrap_or(zero)
    }

    fn gathered(&self, c: &Ctx, x: Value, dim: usize, taps: usize) -> Value {
        let out = self.rows.len() as i64;
        let (mut positions, mut weights) = (Vec::new(), Vec::new());
        for row in &self.rows {
            for at in 0..taps {
                let tap = row.get(at);
                positions.push(tap.map_or(0, |t| t.0));
                weights.push(tap.map(|t| t.1));
            }
        }
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
    if weights.iter().flatten().any(|&w| w != 1.0) {
        let numbers: Vec<f64> = weights.iter().map(|w| w.unwrap_or(0.0)).collect();
        out = c.mul(x, over(c.vector_f64(c.dtype(x), &numbers)));
    }
    if weights.iter().any(Option::is_none) {
        let present: Vec<i64> = weights.iter().map(|w| i64::from(w.is_some())).collect();
        out = c.select(over(c.vector_i64(DType::Pred, &present)), out, c.zeros_like(out));
    }
    out
}

fn scale(c: &Ctx, x: Value, by: f64) -> Value {
    if by == 1.0 { x } else { c.mul(x, c.like(x, by)) }
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
