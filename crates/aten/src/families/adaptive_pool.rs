//! Pools that are told the size of their result: windows differ in size and may overlap.

use super::pooling::{same_shape, scatter_plane};
use super::reductions::index_dtype;
use super::taps::Taps;
use crate::args::Tensor;
use crate::dtype::{Category, category, opmath, scalar_name};
use crate::error::{Result, not_implemented, runtime};
use crate::lower::Ctx;
use crate::out::OutDtype;
use crate::table::Row;
use crate::{Layout, op};
use oxitorch_hlo::{DType, Dims, TensorType, Value};

/// The rows of this family.
pub static ROWS: &[Row] = &[
    op!("_adaptive_avg_pool2d", adaptive_avg_pool::<2>)
        .layout(Layout::ChannelsLast)
        .out_dtype(OutDtype::Castable),
    op!("_adaptive_avg_pool3d", adaptive_avg_pool::<3>).out_dtype(OutDtype::Castable),
    op!("_adaptive_avg_pool2d_backward", adaptive_avg_pool_backward::<2>).layout(Layout::ChannelsLast),
    op!("_adaptive_avg_pool3d_backward", adaptive_avg_pool_backward::<3>),
    op!("adaptive_max_pool2d", adaptive_max_pool::<2>).layout(Layout::ChannelsLast),
    op!("adaptive_max_pool3d", adaptive_max_pool::<3>),
    op!("adaptive_max_pool2d_backward", adaptive_max_pool_backward::<2>).layout(Layout::ChannelsLast),
    op!("adaptive_max_pool3d_backward", adaptive_max_pool_backward::<3>),
];

/// First and one past the last input element of output element `o` of an adaptive pool.
fn adaptive_window(o: i64, input: i64, output: i64) -> (i64, i64) {
    (o * input / output, ((o + 1) * input + output - 1) / output)
}

fn check_adaptive<const N: usize>(op: &str, colon: &str, shape: &[i64]) -> Result<usize> {
    let (low, high) = (N + 1, N + 2);
    if shape.len() != low && shape.len() != high {
        return Err(runtime(format!("{op}(): Expected {low}D or {high}D tensor, but got{colon} {shape:?}")));
    }
    match (shape.len() - low..shape.len()).find(|&d| shape[d] == 0 && (d > 0 || shape.len() == low)) {
        Some(d) => Err(runtime(format!(
            "{op}(): Expected input to have non-zero size for non-batch dimensions, but input has sizes {shape:?} with \
             dimension {d} being empty"
        ))),
        None => Ok(shape.len() - N),
    }
}

/// The averages of an adaptive pool along one dimension.
fn averaging(input: i64, output: i64) -> Taps {
    let row = |o: i64| {
        let (start, end) = adaptive_window(o, input, output);
        (start..end).map(|i| (i, 1.0 / (end - start) as f64)).collect()
    };
    Taps::new(input, (0..output).map(row).collect())
}

fn adaptive_avg_pool<const N: usize>(c: &Ctx, x: Tensor, output_size: Dims) -> Result<Value> {
    let op = if N == 2 { "adaptive_avg_pool2d" } else { "adaptive_avg_pool3d" };
    let Ok(size) = <[i64; N]>::try_from(output_size.as_slice()) else {
        return Err(runtime(format!("{op}: output_size must be {N}")));
    };
    if size.iter().any(|&n| n < 0) {
        return Err(runtime(format!("{op}: elements of output_size must be greater than or equal to 0")));
    }
    let shape = c.shape(x.value);
    let lead = check_adaptive::<N>(op, "", &shape)?;
    if category(x.dtype) != Category::Float {
        return Err(not_implemented(if N == 2 { op } else { "adaptive_avg_pool3d_cpu" }, x.dtype));
    }
    let mut out = c.to(x.value, opmath(x.dtype));
    for (d, &n) in size.iter().enumerate() {
        out = averaging(shape[lead + d], n).apply(c, out, lead + d);
    }
    Ok(c.to(out, x.dtype))
}

fn adaptive_avg_pool_backward<const N: usize>(c: &Ctx, grad: Tensor, x: Tensor) -> Result<Value> {
    let op = if N == 2 { "adaptive_avg_pool2d_backward" } else { "adaptive_avg_pool3d_backward" };
    let (g, shape) = (c.shape(grad.value), c.shape(x.value));
    let lead = check_adaptive::<N>(op, "", &g)?;
    if g.len() != shape.len() || g[..lead] != shape[..lead] {
        return Err(runtime(format!(
            "{op}(): Expected grad_output of shape {shape:?} but for the pool, but got {g:?}"
        )));
    }
    if grad.dtype != x.dtype {
        let (want, got) = (scalar_name(x.dtype), scalar_name(grad.dtype));
        return Err(runtime(format!("expected dtype {want} for `grad_output` but got dtype {got}")));
    }
    let mut out = c.to(grad.value, opmath(x.dtype));
    for d in lead..shape.len() {
        out = averaging(shape[d], g[d]).transposed().apply(c, out, d);
    }
    Ok(c.to(out, x.dtype))
}

/// The windows of an adaptive pool along dimension `dim` as a dimension of their own behind it, and for each of their
/// elements its position, -1 where a window is shorter than the longest.
fn adaptive_windows(c: &Ctx, x: Value, dim: usize, output: i64) -> (Value, Vec<i64>) {
    let input = c.shape(x)[dim];
    let windows: Vec<_> = (0..output).map(|o| adaptive_window(o, input, output)).collect();
    let longest = windows.iter().map(|(s, e)| e - s).max().unwrap_or(1);
    let position = |&(s, e): &(i64, i64)| (0..longest).map(move |i| if s + i < e { s + i } else { -1 });
    let positions: Vec<i64> = windows.iter().flat_map(position).collect();
    if output > 0 && input % output == 0 {
        // They lie side by side: no gather.
        let mut split = c.shape(x);
        split[dim] = output;
        split.insert(dim + 1, longest);
        return (c.reshape(x, &split), positions);
    }
    let clamped: Vec<i64> = positions.iter().map(|&p| p.max(0)).collect();
    let index = c.reshape(c.vector_i64(DType::S32, &clamped), &[output, longest]);
    (c.take_dim(x, index, dim as i64), positions)
}

fn adaptive_max_pool<const N: usize>(c: &Ctx, x: Tensor, output_size: Dims) -> Result<(Value, Value)> {
    let op = if N == 2 { "adaptive_max_pool2d" } else { "adaptive_max_pool3d" };
    let Ok(size) = <[i64; N]>::try_from(output_size.as_slice()) else {
        return Err(runtime(format!("{op}(): internal error: output_size.size() must be {N}")));
    };
    let shape = c.shape(x.value);
    let lead = check_adaptive::<N>(op, ":", &shape)?;
    if category(x.dtype) != Category::Float {
        return Err(not_implemented(if N == 2 { op } else { "adaptive_max_pool3d_cpu" }, x.dtype));
    }
    let dtype = index_dtype(shape[lead..].iter().product());
    // Spatial dimension d of the windows is dimension lead + 2 * d, its elements one further.
    let mut values = x.value;
    let positions: Vec<Vec<i64>> = (0..N)
        .map(|d| {
            let (v, p) = adaptive_windows(c, values, lead + 2 * d, size[d]);
            values = v;
            p
        })
        .collect();
    let full = c.shape(values);
    let over = |v: Value, d: usize| {
        let at = (lead + 2 * d) as i64;
        c.broadcast_in_dim(c.reshape(v, &full[at as usize..at as usize + 2]), &full, &[at, at + 1])
    };
    let mut index = c.constant(TensorType::new(dtype, full.clone()), 0.0);
    let mut valid = c.constant(TensorType::new(DType::Pred, full.clone()), 1.0);
    for (d, positions) in positions.iter().enumerate() {
        let pitch: i64 = shape[lead + d + 1..].iter().product();
        let offsets: Vec<i64> = positions.iter().map(|&p| p.max(0) * pitch).collect();
        let inside: Vec<i64> = positions.iter().map(|&p| i64::from(p >= 0)).collect();
        index = c.add(index, over(c.vector_i64(dtype, &offsets), d));
        valid = c.and(valid, over(c.vector_i64(DType::Pred, &inside), d));
    }
    // Padding comes with an index of its own, larger than any, so that it loses every tie.
    let index = c.select(valid, index, c.full(c.max_value(dtype), &full));
    let values = c.select(valid, values, c.full(c.min_value(x.dtype), &full));
    let dims: Dims = (0..N as i64).map(|d| lead as i64 + 2 * d + 1).collect();
    let (best, at) = max_last_nan(c, values, index, &dims);
    Ok((best, c.to(at, DType::S64)))
}

/// The largest value and its first index; of NaNs the last one.
fn max_last_nan(c: &Ctx, values: Value, index: Value, dims: &[i64]) -> (Value, Value) {
    let inits = [c.min_value(c.dtype(values)), c.max_value(c.dtype(index))];
    let out = c.reduce(&[values, index], &inits, dims, |b, x, y| {
        let (x_nan, y_nan) = (b.is_nan(x[0]), b.is_nan(y[0]));
        let first = b.lt(x[1], y[1]);
        let nan = b.or(b.and(x_nan, b.not(y_nan)), b.and(b.and(x_nan, y_nan), b.not(first)));
        let larger = b.or(b.gt(x[0], y[0]), b.and(b.eq(x[0], y[0]), first));
        let keep = b.or(nan, larger);
        vec![b.select(keep, x[0], y[0]), b.select(keep, x[1], y[1])]
    });
    match out[..] {
        [v, i] => (v, i),
        _ => (values, index),
    }
}

fn adaptive_max_pool_backward<const N: usize>(
    c: &Ctx,
    grad: Tensor,
    x: Tensor,
    indices: Tensor,
) -> Result<Value> {
    let op = if N == 2 { "adaptive_max_pool2d_backward" } else { "adaptive_max_pool3d_backward" };
    let shape = c.shape(x.value);
    let lead = check_adaptive::<N>(op, ":", &c.shape(grad.value))?;
    same_shape(&c.shape(grad.value), &c.shape(indices.value))?;
    if grad.dtype != x.dtype {
        let (want, got) = (scalar_name(x.dtype), scalar_name(grad.dtype));
        return Err(runtime(format!("expected dtype {want} for `grad_output` but got dtype {got}")));
    }
    let wide = c.to(grad.value, opmath(x.dtype));
    let index = c.to(indices.value, index_dtype(shape[lead..].iter().product()));
    Ok(c.to(scatter_plane(c, wide, index, &shape, lead, true), x.dtype))
}
