//! Padding by reflection and by replication.

use super::taps::{self, Most, Taps};
use super::upsample::named_sizes;
use crate::args::Tensor;
use crate::context::Ctx;
use crate::dtype::opmath;
use crate::error::{Result, in_32_bits, not_implemented, runtime};
use crate::row::Row;
use crate::{Layout, op};
use oxitorch_hlo::{DType, Dims, Value};

/// The rows of this family.
pub static ROWS: &[Row] = &[
    op!("reflection_pad1d", |c: &Ctx, x: Tensor, pad: Dims| edge_pad::<1>(c, &REFLECT, x, &pad)),
    op!("reflection_pad2d", |c: &Ctx, x: Tensor, pad: Dims| edge_pad::<2>(c, &REFLECT, x, &pad))
        .layout(Layout::ChannelsLast),
    op!("reflection_pad3d", |c: &Ctx, x: Tensor, pad: Dims| edge_pad::<3>(c, &REFLECT, x, &pad))
        .layout(Layout::ChannelsLast),
    op!("replication_pad1d", |c: &Ctx, x: Tensor, pad: Dims| edge_pad::<1>(c, &REPLICATE, x, &pad)),
    op!("replication_pad2d", |c: &Ctx, x: Tensor, pad: Dims| edge_pad::<2>(c, &REPLICATE, x, &pad))
        .layout(Layout::ChannelsLast),
    op!("replication_pad3d", |c: &Ctx, x: Tensor, pad: Dims| edge_pad::<3>(c, &REPLICATE, x, &pad))
        .layout(Layout::ChannelsLast),
    op!("reflection_pad1d_backward", |c: &Ctx, g: Tensor, x: Tensor, pad: Dims| {
        edge_pad_backward::<1>(c, &REFLECT, g, x, &pad)
    }),
    op!("reflection_pad2d_backward", |c: &Ctx, g: Tensor, x: Tensor, pad: Dims| {
        edge_pad_backward::<2>(c, &REFLECT, g, x, &pad)
    })
    .layout(Layout::ChannelsLast),
    op!("reflection_pad3d_backward", |c: &Ctx, g: Tensor, x: Tensor, pad: Dims| {
        edge_pad_backward::<3>(c, &REFLECT, g, x, &pad)
    })
    .layout(Layout::ChannelsLast),
    op!("replication_pad1d_backward", |c: &Ctx, g: Tensor, x: Tensor, pad: Dims| {
        edge_pad_backward::<1>(c, &REPLICATE, g, x, &pad)
    }),
    op!("replication_pad2d_backward", |c: &Ctx, g: Tensor, x: Tensor, pad: Dims| {
        edge_pad_backward::<2>(c, &REPLICATE, g, x, &pad)
    })
    .layout(Layout::ChannelsLast),
    op!("replication_pad3d_backward", |c: &Ctx, g: Tensor, x: Tensor, pad: Dims| {
        edge_pad_backward::<3>(c, &REPLICATE, g, x, &pad)
    })
    .layout(Layout::ChannelsLast),
];

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
    in_32_bits(pad)?;
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
        taps::check_rows(n + left + right)?;
        let rows = (-left..n + right).map(|i| vec![((edge.source)(i, n), 1.0)]).collect();
        out = Taps::new(n, rows).at_most(Most::Always(1)).apply_transposed(c, out, lead + d);
    }
    Ok(c.to(out, x.dtype))
}
