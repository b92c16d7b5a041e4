//! Resampling: one dimension after another, by [`Taps`].

use super::taps::{self, Most, Taps};
use crate::args::Tensor;
use crate::context::Ctx;
use crate::dtype::{Category, category, opmath};
use crate::error::{Result, not_implemented, runtime, unsupported};
use crate::row::Row;
use crate::{Layout, op};
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
        .layout(Layout::ChannelsLast)
    };
    (3, $filter:ident, $name:literal) => {
        op!($name, |c: &Ctx, x: Tensor, to: Dims, d: Scale, h: Scale, w: Scale| {
            resize(c, &$filter, x, &to, false, &[d, h, w])
        })
        .layout(Layout::ChannelsLast)
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
        .layout(Layout::ChannelsLast)
    };
    (3, $filter:ident, $name:literal, align) => {
        op!($name, |c: &Ctx, x: Tensor, to: Dims, align: bool, d: Scale, h: Scale, w: Scale| {
            resize(c, &$filter, x, &to, align, &[d, h, w])
        })
        .layout(Layout::ChannelsLast)
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
        .layout(Layout::ChannelsLast)
    };
    (3, $filter:ident, $name:literal) => {
        op!($name, |c: &Ctx, g: Tensor, to: Dims, from: Dims, d: Scale, h: Scale, w: Scale| {
            resize_backward(c, &$filter, g, &to, &from, false, &[d, h, w])
        })
        .layout(Layout::ChannelsLast)
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
        .layout(Layout::ChannelsLast)
    };
    (3, $filter:ident, $name:literal, align) => {
        op!($name, |c: &Ctx, g: Tensor, to: Dims, from: Dims, align: bool, d: Scale, h: Scale, w: Scale| {
            resize_backward(c, &$filter, g, &to, &from, align, &[d, h, w])
        })
        .layout(Layout::ChannelsLast)
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
    most: fn(&Resize) -> Most,
    /// Copies elements: any dtype will do.
    copies: bool,
    skips: Skip,
}

static NEAREST: Filter =
    Filter { taps: nearest, most: |_| Most::Always(1), copies: true, skips: Skip::Nothing };
/// The same for torch's kernels that follow a given scale even where the sizes are equal or double.
static NEAREST_SCALED: Filter =
    Filter { taps: nearest_scaled, most: |_| Most::Always(1), copies: true, skips: Skip::Nothing };
static NEAREST_EXACT: Filter =
    Filter { taps: nearest_exact, most: |_| Most::Always(1), copies: true, skips: Skip::Nothing };
static LINEAR: Filter =
    Filter { taps: linear, most: |_| Most::Always(2), copies: false, skips: Skip::Nothing };
static CUBIC: Filter =
    Filter { taps: cubic, most: |_| Most::Always(4), copies: false, skips: Skip::EqualShapeBackward };
static LINEAR_AA: Filter = Filter {
    taps: |r, o| antialiased(r, o, 2.0, triangle),
    most: |r| antialiased_most(r, 2.0),
    copies: false,
    skips: Skip::EqualSize,
};
static CUBIC_AA: Filter = Filter {
    taps: |r, o| antialiased(r, o, 4.0, keys),
    most: |r| antialiased_most(r, 4.0),
    copies: false,
    skips: Skip::EqualSize,
};
static LANCZOS_AA: Filter = Filter {
    taps: |r, o| antialiased(r, o, 6.0, lanczos),
    most: |r| antialiased_most(r, 6.0),
    copies: false,
    skips: Skip::EqualSize,
};

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

/// The elements that such a filter reaches, as many as torch has room for.
fn antialiased_most(r: &Resize, width: f64) -> Most {
    let support = width * 0.5 * r.step().max(1.0);
    Most::Here((2 * support.ceil() as usize + 1).min(r.input as usize))
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
pub(super) fn named_sizes(sizes: &[i64]) -> String {
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
        let got = input.len();
        return Err(runtime(format!("It is expected input_size equals to {rank}, but got size {got}")));
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
) -> Result<Vec<Taps>> {
    input[2..].iter().chain(output).try_for_each(|&n| taps::check_rows(n))?;
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
        Taps::new(r.input, (0..r.output).map(row).collect()).at_most((filter.most)(&r))
    };
    Ok((0..output.len()).map(map).collect())
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
    for (d, map) in maps(filter, x.dtype, &shape, to, align, scales)?.iter().enumerate() {
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
    for (d, map) in maps(filter, grad.dtype, from, to, align, scales)?.iter().enumerate() {
        out = map.apply_transposed(c, out, 2 + d);
    }
    Ok(c.to(out, grad.dtype))
}
