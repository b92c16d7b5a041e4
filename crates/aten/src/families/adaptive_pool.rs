//! Pools that are told the size of their result: windows differ in size and may overlap.

use super::pooling::{same_shape, scatter_plane};
use super::reductions::index_dtype;
use super::taps::{self, Taps};
use crate::args::Tensor;
use crate::context::Ctx;
use crate::dtype::{Category, category, opmath, scalar_name};
use crate::error::{Result, not_implemented, runtime};
use crate::library::{FLOATS, Item, Outcome, Parts, word};
use crate::out::OutDtype;
use crate::row::Row;
use crate::{Layout, op};
use oxitorch_hlo::{Axes, DType, Dims, TensorType, Value};

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

/// The averages along one dimension. An outline leaves them open: where windows are follows from the sizes.
fn averaged(c: &Ctx, x: Value, dim: usize, output: i64) -> Value {
    let size = c.shape(x)[dim];
    if !c.is_outline() || output < 2 {
        return averaging(size, output).apply(c, x, dim);
    }
    let (from, to) = (letters(c, x, dim, 'x'), letters(c, x, dim, 'y'));
    let mut shape = c.shape(x);
    shape[dim] = output;
    // How many windows there are may vary, too: an operand has as many elements.
    let windows = c.iota(TensorType::new(DType::S32, [output].as_slice()), 0);
    let axes = Axes {
        operands: vec![from, "y".into()],
        results: vec![to],
        first: "xy".into(),
        used: "xy".into(),
        ..Axes::default()
    };
    let types = [TensorType::new(c.dtype(x), shape)];
    let made = c.deferred(format!("averages along {dim}"), &[x, windows], &types, axes, move |c, x, used| {
        let (input, output) = (c.shape(x[0])[dim], c.shape(x[1])[0]);
        if used.iter().all(Option::is_none) {
            return Ok(vec![averaged(c, x[0], dim, output)]);
        }
        let longest = used[1].is_none().then_some((input + output - 1) / output + 1);
        let windows =
            Windows::of(c, used_of(c, used[0], input), used_of(c, used[1], output), output, longest);
        Ok(vec![windows.means(c, x[0], dim)])
    });
    made.map_or(x, |made| made[0])
}

/// The derivative of [`averaged`] of `x`.
fn averaged_backward(c: &Ctx, grad: Value, x: Value, dim: usize) -> Value {
    let (input, output) = (c.shape(x)[dim], c.shape(grad)[dim]);
    if !c.is_outline() || output < 2 {
        return averaging(input, output).apply_transposed(c, grad, dim);
    }
    // Dimensions behind are those of the gradient, those before of `x`, and neither is looked at.
    let (own, from) = (letters(c, grad, dim, 'y'), letters(c, x, dim, 'x'));
    let to = letters(c, grad, dim, 'x');
    let from: String = from.chars().map(|l| if l == 'x' { l } else { l.to_ascii_uppercase() }).collect();
    let mut shape = c.shape(grad);
    shape[dim] = input;
    let axes = Axes {
        operands: vec![own, from],
        results: vec![to],
        first: "xy".into(),
        used: "xy".into(),
        ..Axes::default()
    };
    let types = [TensorType::new(c.dtype(grad), shape)];
    let name = format!("derivatives of averages along {dim}");
    let made = c.deferred(name, &[grad, x], &types, axes, move |c, x, used| {
        let (input, output) = (c.shape(x[1])[dim], c.shape(x[0])[dim]);
        if used.iter().all(Option::is_none) {
            return Ok(vec![averaged_backward(c, x[0], x[1], dim)]);
        }
        let (n, windows) = (used_of(c, used[0], input), used_of(c, used[1], output));
        let own = Windows::of(c, n, windows, output, None);
        let weighed = c.divide(x[0], own.lengths(c, x[0], dim));
        // The windows that an element is in lie side by side, too: where the sizes are the other way round.
        let longest = used[1].is_none().then_some(output);
        Ok(vec![Windows::of(c, windows, n, input, longest).sums(c, weighed, dim)])
    });
    made.map_or(grad, |made| made[0])
}

/// A letter for each dimension of a value; that of one of them is given.
fn letters(c: &Ctx, x: Value, dim: usize, own: char) -> String {
    ('a'..='w').take(c.rank(x)).enumerate().map(|(d, l)| if d == dim { own } else { l }).collect()
}

/// How many places are in use (0-d s64).
fn count(c: &Ctx, used: Value) -> Value {
    c.reduce_sum(c.to(used, DType::S64), &[0])
}

fn number(c: &Ctx, n: i64) -> Value {
    c.scalar_i64(DType::S64, n)
}

/// How many of a dimension's places are in use; all, if it does not vary.
fn used_of(c: &Ctx, used: Option<Value>, all: i64) -> Value {
    used.map_or_else(|| number(c, all), |used| count(c, used))
}

/// The windows of an adaptive pool along one dimension whose size is computed.
struct Windows {
    /// Where each begins and ends (1-d s64).
    bounds: [Value; 2],
    /// Size of the longest that there may be, if it follows from what does not vary.
    longest: Option<i64>,
    /// The same in this program's run (0-d s64).
    most: Value,
}

impl Windows {
    /// The first `places` of the windows that `input` elements are divided into if there are `output` of them.
    fn of(c: &Ctx, input: Value, output: Value, places: i64, longest: Option<i64>) -> Windows {
        let ty = TensorType::new(DType::S64, [places].as_slice());
        let all = |x: Value| c.full(x, &ty.shape);
        let output = c.maximum(output, number(c, 1));
        let most = c.add(c.divide(c.subtract(c.add(input, output), number(c, 1)), output), number(c, 1));
        let (input, output) = (all(input), all(output));
        let at = c.iota(ty.clone(), 0);
        let one = all(number(c, 1));
        let start = c.divide(c.multiply(at, input), output);
        let end = c.multiply(c.add(at, one), input);
        let end = c.divide(c.subtract(c.add(end, output), one), output);
        Windows { bounds: [start, end], longest, most }
    }

    /// The positions in each window, and whether they are inside of it: \[places, longest\].
    fn positions(&self, c: &Ctx, longest: i64) -> [Value; 2] {
        let shape = [c.shape(self.bounds[0])[0], longest];
        let [start, end] = self.bounds.map(|x| c.broadcast_in_dim(x, &shape, &[0]));
        let at = c.add(start, c.iota(TensorType::new(DType::S64, shape.as_slice()), 1));
        [at, c.lt(at, end)]
    }

    /// The elements of `x` in each window, which are a dimension behind `dim`, and whether they are inside of it.
    fn taken(&self, c: &Ctx, x: Value, dim: usize, longest: i64) -> [Value; 2] {
        let [at, inside] = self.positions(c, longest);
        let last = c.like(at, (c.shape(x)[dim] - 1) as f64);
        let taken = c.take_dim(x, c.minimum(at, last), dim as i64);
        let shape = c.shape(taken);
        [taken, c.broadcast_in_dim(inside, &shape, &[dim as i64, dim as i64 + 1])]
    }

    fn sums(&self, c: &Ctx, x: Value, dim: usize) -> Value {
        let Some(longest) = self.longest else { return self.sums_in_turn(c, x, dim) };
        let [taken, inside] = self.taken(c, x, dim, longest);
        c.reduce_sum(c.select(inside, taken, c.zeros_like(taken)), &[dim as i64 + 1])
    }

    /// The same, the first elements of all windows first: as many times as the longest one has elements.
    fn sums_in_turn(&self, c: &Ctx, x: Value, dim: usize) -> Value {
        let [start, end] = self.bounds;
        let mut shape = c.shape(x);
        shape[dim] = c.shape(start)[0];
        let last = c.like(start, (c.shape(x)[dim] - 1) as f64);
        let zeros = c.full(c.scalar_like(x, 0.0), &shape);
        let sums = c.for_loop(number(c, 0), self.most, &[zeros], |_, i, sums| {
            let at = c.add(start, c.full(i, &c.shape(start)));
            let inside = c.broadcast_in_dim(c.lt(at, end), &shape, &[dim as i64]);
            let taken = c.take_dim(x, c.minimum(at, last), dim as i64);
            vec![c.add(sums[0], c.select(inside, taken, zeros))]
        });
        sums[0]
    }

    fn means(&self, c: &Ctx, x: Value, dim: usize) -> Value {
        let sums = self.sums(c, x, dim);
        c.divide(sums, self.lengths(c, sums, dim))
    }

    /// The lengths of the windows along a dimension of `like`, as that.
    fn lengths(&self, c: &Ctx, like: Value, dim: usize) -> Value {
        let lengths = c.to(c.subtract(self.bounds[1], self.bounds[0]), c.dtype(like));
        c.broadcast_in_dim(lengths, &c.shape(like), &[dim as i64])
    }
}

fn adaptive_avg_pool<const N: usize>(c: &Ctx, x: Tensor, output_size: Dims) -> Result<Value> {
    let op = if N == 2 { "adaptive_avg_pool2d" } else { "adaptive_avg_pool3d" };
    let Ok(size) = <[i64; N]>::try_from(output_size.as_slice()) else {
        return Err(runtime(format!("{op}: output_size must be {N}")));
    };
    if size.iter().any(|&n| n < 0) {
        return Err(runtime(format!("{op}: elements of output_size must be greater than or equal to 0")));
    }
    for n in size {
        taps::check_rows(n)?;
    }
    let shape = c.shape(x.value);
    let lead = check_adaptive::<N>(op, "", &shape)?;
    if category(x.dtype) != Category::Float {
        return Err(not_implemented(if N == 2 { op } else { "adaptive_avg_pool3d_cpu" }, x.dtype));
    }
    let mut out = c.to(x.value, opmath(x.dtype));
    for (d, &n) in size.iter().enumerate() {
        out = averaged(c, out, lead + d, n);
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
        out = averaged_backward(c, out, x.value, d);
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
    if size.iter().any(|&n| n < 0) {
        return Err(runtime(format!("{op}(): elements of output_size must be greater than or equal to 0")));
    }
    for n in size {
        taps::check_rows(n)?;
    }
    let shape = c.shape(x.value);
    let lead = check_adaptive::<N>(op, ":", &shape)?;
    if category(x.dtype) != Category::Float {
        return Err(not_implemented(if N == 2 { op } else { "adaptive_max_pool3d_cpu" }, x.dtype));
    }
    if let Some(found) = library_maxima(c, x.value, &size) {
        return Ok(found);
    }
    let sizes = c.shape(x.value);
    let letters: String = ('a'..='w').take(lead).collect();
    let [from, to] = ["xyz", "rst"].map(|all| format!("{letters}{}", &all[..N]));
    let axes = Axes {
        operands: vec![from],
        results: vec![to.clone(), to],
        first: "xyz"[..N].into(),
        used: "xyz"[..N].into(),
        ..Axes::default()
    };
    let out: Dims = sizes[..lead].iter().chain(&size).copied().collect();
    let types = [x.dtype, DType::S64].map(|dtype| TensorType::new(dtype, out.clone()));
    let made =
        c.deferred(format!("adaptive maxima to {size:?}"), &[x.value], &types, axes, move |c, x, used| {
            let (best, at) = match used.iter().all(Option::is_none) {
                true => maxima(c, x[0], lead, size),
                false => maxima_of_used(c, x[0], lead, size, used),
            };
            Ok(vec![best, at])
        });
    Ok(match made.as_deref() {
        Some(&[best, at]) => (best, at),
        _ => maxima(c, x.value, lead, size),
    })
}

/// Elements from which PyTorch's own kernel is worth a call.
const WORTH_A_CALL: i64 = 1 << 12;

/// The largest elements of the windows and their positions by PyTorch's own kernel.
fn library_maxima(c: &Ctx, x: Value, size: &[i64]) -> Option<(Value, Value)> {
    if !c.is_worth_a_call(x, &FLOATS, WORTH_A_CALL) || size.contains(&0) {
        return None;
    }
    let op = if size.len() == 2 { "adaptive_max_pool2d.out" } else { "adaptive_max_pool3d.out" };
    let shape = c.shape(x);
    let out: Dims = shape[..shape.len() - size.len()].iter().chain(size).copied().collect();
    let outcome = |dtype: DType| {
        let ty = TensorType::new(dtype, out.clone());
        // The kernel of volumes writes rows, whatever it is given.
        if size.len() == 2 { Outcome::like(c, ty, &[x]) } else { Outcome::row_major(ty) }
    };
    let results = [c.dtype(x), DType::S64].map(|dtype| Some(outcome(dtype)));
    let args = [Item::Tensor(x), Item::Ints(size)];
    let parts = Parts { args: &[0, word::WHOLE], results: &[0, 0], step: 1 };
    match c.call_library_in_parts(op, &args, &results, Some(&parts))[..] {
        [Some(values), Some(index)] => Some((values, index)),
        _ => None,
    }
}

/// The largest elements of the windows and their positions, of the last dimensions from `lead` on.
fn maxima<const N: usize>(c: &Ctx, x: Value, lead: usize, size: [i64; N]) -> (Value, Value) {
    let shape = c.shape(x);
    let dtype = index_dtype(shape[lead..].iter().product());
    // Spatial dimension d of the windows is dimension lead + 2 * d, its elements one further.
    let mut values = x;
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
    largest(c, values, index, valid, lead)
}

/// The same where places of these dimensions are in use; positions are those in a plane of such a size.
fn maxima_of_used<const N: usize>(
    c: &Ctx,
    x: Value,
    lead: usize,
    size: [i64; N],
    used: &[Option<Value>],
) -> (Value, Value) {
    let shape = c.shape(x);
    let all = |d: usize| used_of(c, used[d], shape[lead + d]);
    let mut values = x;
    let mut windows = Vec::new();
    for d in 0..N {
        let (input, output) = (shape[lead + d], size[d]);
        let of = output.max(1);
        let longest = (input + of - 1) / of + 1;
        let own = Windows::of(c, all(d), number(c, of), output, None);
        values = own.taken(c, values, lead + 2 * d, longest)[0];
        windows.push((own, longest));
    }
    let full = c.shape(values);
    let mut index = c.constant(TensorType::new(DType::S64, full.clone()), 0.0);
    let mut valid = c.constant(TensorType::new(DType::Pred, full.clone()), 1.0);
    for (d, (own, longest)) in windows.iter().enumerate() {
        let along = (lead + 2 * d) as i64;
        let [at, inside] =
            own.positions(c, *longest).map(|x| c.broadcast_in_dim(x, &full, &[along, along + 1]));
        index = c.add(c.multiply(index, c.full(all(d), &full)), at);
        valid = c.and(valid, inside);
    }
    largest(c, values, index, valid, lead)
}

/// The largest of the valid values in windows, every second dimension from `lead + 1` on, and its index.
fn largest(c: &Ctx, values: Value, index: Value, valid: Value, lead: usize) -> (Value, Value) {
    let full = c.shape(values);
    // Padding comes with an index of its own, larger than any, so that it loses every tie.
    let index = c.select(valid, index, c.full(c.max_value(c.dtype(index)), &full));
    let values = c.select(valid, values, c.full(c.min_value(c.dtype(values)), &full));
    let dims: Dims = (lead as i64 + 1..full.len() as i64).step_by(2).collect();
    let (best, at) = max_last_nan(c, values, index, &dims);
    (best, c.to(at, DType::S64))
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
    if shape.len() != c.rank(grad.value) || shape[..lead] != c.shape(grad.value)[..lead] {
        let got = c.shape(grad.value);
        return Err(runtime(format!(
            "{op}(): Expected grad_output of shape {shape:?} but for the pool, but got {got:?}"
        )));
    }
    if grad.dtype != x.dtype {
        let (want, got) = (scalar_name(x.dtype), scalar_name(grad.dtype));
        return Err(runtime(format!("expected dtype {want} for `grad_output` but got dtype {got}")));
    }
    let wide = c.to(grad.value, opmath(x.dtype));
    Ok(c.to(scatter_plane(c, wide, indices.value, &shape, lead, true), x.dtype))
}
