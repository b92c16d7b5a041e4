//! Rows in runs of lengths that are values: reductions of each run, and runs padded to one length.

use super::cumulative::prefix;
use super::scatter::scatter_rows;
use super::sorting::lower_bound;
use crate::args::{Scalar, Tensor};
use crate::context::Ctx;
use crate::dtype::{Category, category, opmath};
use crate::error::{Error, ErrorKind, Result, not_implemented, runtime, unsupported};
use crate::op;
use crate::row::Row;
use oxitorch_hlo::{Binary, DType, TensorType, Value};

/// The rows of this family.
pub static ROWS: &[Row] = &[
    op!("segment_reduce", segment_reduce),
    op!("_segment_reduce_backward", segment_reduce_backward),
    op!("_jagged_to_padded_dense_forward", jagged_to_padded),
    op!("_padded_dense_to_jagged_forward", padded_to_jagged),
];

fn fill(c: &Ctx, x: i64, shape: &[i64]) -> Value {
    c.full(c.scalar_i64(DType::S64, x), shape)
}

/// The segments of a tensor along one dimension: `batches` of `segments`, each of some rows of `inner` elements.
struct Segments {
    batches: i64,
    /// Rows of a batch.
    rows: i64,
    segments: i64,
    inner: i64,
    /// The segment of each row, counted over all batches; behind the last one where a row is in none. s64 \[rows of all\].
    of: Value,
    /// How many rows each has. s64 \[segments of all\].
    sizes: Value,
}

impl Segments {
    fn new(
        c: &Ctx,
        data: &Tensor,
        lengths: Option<Value>,
        offsets: Option<Value>,
        axis: i64,
    ) -> Result<Segments> {
        let shape = c.shape(data.value);
        let axis = c.dim(axis, shape.len())?;
        let Some(given) = lengths.or(offsets) else {
            return Err(runtime("segment_reduce(): Either lengths or offsets must be defined."));
        };
        let bounds = c.shape(given);
        if data.rank == 0 || bounds.len() != axis + 1 || bounds[..axis] != shape[..axis] {
            return Err(runtime(
                "segment_reduce(): Expected the sizes of lengths or offsets to fit those of data.",
            ));
        }
        let last = bounds[axis];
        if lengths.is_none() && last == 0 {
            return Err(runtime("segment_reduce(): offsets has no elements"));
        }
        let (batches, rows) = (shape[..axis].iter().product::<i64>(), shape[axis]);
        let inner = shape[axis + 1..].iter().product();
        let segments = if lengths.is_some() { last } else { last - 1 };
        let given = c.reshape(c.to(given, DType::S64), &[batches, last]);
        let ends = match lengths {
            Some(_) => prefix(c, Binary::Add, given, c.scalar_i64(DType::S64, 0), 1),
            None => c.slice_dim(given, 1, 1, last, 1),
        };
        let starts = match lengths {
            Some(_) => c.subtract(ends, given),
            None => c.slice_dim(given, 1, 0, last - 1, 1),
        };
        let place = c.iota(TensorType::new(DType::S64, [batches, rows].as_slice()), 1);
        let batch = c.iota(TensorType::new(DType::S64, [batches, rows].as_slice()), 0);
        let of = c.to(lower_bound(c, ends, place, true), DType::S64);
        let mut inside = c.lt(of, fill(c, segments, &[batches, rows]));
        if segments > 0 {
            let first = c.broadcast_in_dim(c.slice_dim(starts, 1, 0, 1, 1), &[batches, rows], &[0, 1]);
            inside = c.and(inside, c.ge(place, first));
        }
        let of = c.add(c.multiply(batch, fill(c, segments, &[batches, rows])), of);
        let of = c.select(inside, of, fill(c, batches * segments, &[batches, rows]));
        let sizes = c.reshape(c.subtract(ends, starts), &[batches * segments]);
        Ok(Segments { batches, rows, segments, inner, of: c.reshape(of, &[batches * rows]), sizes })
    }

    fn all(&self) -> i64 {
        self.batches * self.segments
    }

    fn rows_of(&self, c: &Ctx, x: Value, dtype: DType) -> Value {
        c.reshape(c.to(x, dtype), &[self.batches * self.rows, self.inner])
    }

    /// For each segment a number of `dtype`, for each of its elements.
    fn sizes_as(&self, c: &Ctx, dtype: DType) -> Value {
        c.broadcast_in_dim(c.to(self.sizes, dtype), &[self.all(), self.inner], &[0])
    }

    /// For each element the product of the others of its segment and of `start`: by a division where that can be, and by
    /// what is known of the zeros and the NaN where it is one of them.
    fn products_of_others(&self, c: &Ctx, rows: Value, products: Value, start: Value) -> Value {
        let (zero, one) = (c.zeros_like(rows), c.ones_like(rows));
        let (is_zero, is_nan) = (c.eq(rows, zero), c.is_nan(rows));
        let odd = c.or(is_zero, is_nan);
        let segments = [self.all(), self.inner];
        let rest = c.select(odd, one, rows);
        let rest = scatter_rows(c, c.full(start, &segments), 0, self.of, rest, Some(Binary::Multiply));
        let others = |is: Value| {
            let ones = c.select(is, one, zero);
            let count = scatter_rows(c, c.like(rest, 0.0), 0, self.of, ones, Some(Binary::Add));
            c.gt(c.subtract(self.spread(c, count), ones), zero)
        };
        let rest = self.spread(c, rest);
        let rest = c.select(others(is_zero), c.multiply(rest, zero), rest);
        let rest = c.select(others(is_nan), c.like(rest, f64::NAN), rest);
        c.select(odd, rest, c.divide(self.spread(c, products), rows))
    }

    /// What a segment has, for each of its rows; of a row that is in none any.
    fn spread(&self, c: &Ctx, x: Value) -> Value {
        c.take_dim(x, c.minimum(self.of, fill(c, self.all() - 1, &[self.batches * self.rows])), 0)
    }
}

fn unknown(reduce: &str) -> Error {
    runtime(format!("segment_reduce(): unknown reduction {reduce}: expected sum, mean, max, min or prod"))
}

fn require_float(data: &Tensor, kernel: &str) -> Result<()> {
    if category(data.dtype) == Category::Float { Ok(()) } else { Err(not_implemented(kernel, data.dtype)) }
}

fn segment_reduce(
    c: &Ctx,
    data: Tensor,
    reduce: String,
    lengths: Option<Value>,
    indices: Option<Value>,
    offsets: Option<Value>,
    axis: i64,
    trusted: bool,
    initial: Option<Scalar>,
) -> Result<Value> {
    if indices.is_some() {
        return Err(runtime("segment_reduce(): indices based reduction is not supported yet."));
    }
    require_float(&data, "segment_reduce_cpu")?;
    let s = Segments::new(c, &data, lengths, offsets, axis)?;
    let wide = opmath(data.dtype);
    let (op, start) = match reduce.as_str() {
        "sum" | "mean" => (Binary::Add, 0.0),
        "max" => (Binary::Maximum, f64::NEG_INFINITY),
        "min" => (Binary::Minimum, f64::INFINITY),
        "prod" => (Binary::Multiply, 1.0),
        other => return Err(unknown(other)),
    };
    if lengths.is_some() && !trusted {
        c.check(
            ErrorKind::Runtime,
            "segment_reduce(): Expected all rows of lengths to sum to the size of data along axis",
            || {
                let sizes = c.reshape(s.sizes, &[s.batches, s.segments]);
                let right = c.all(c.eq(c.reduce_sum(sizes, &[1]), fill(c, s.rows, &[s.batches])));
                c.and(right, c.all(c.ge(sizes, c.zeros_like(sizes))))
            },
        );
    }
    let given = initial.is_some();
    let start = initial.map_or_else(|| c.scalar_f64(wide, start), |x| c.number(x, wide));
    let base = c.full(start, &[s.all(), s.inner]);
    let mut out = scatter_rows(c, base, 0, s.of, s.rows_of(c, data.value, wide), Some(op));
    if reduce == "mean" {
        let sizes = s.sizes_as(c, wide);
        let empty = c.eq(sizes, c.zeros_like(sizes));
        let alone = if given { out } else { c.like(out, f64::NAN) };
        out = c.select(empty, alone, c.divide(out, sizes));
    }
    let mut shape = c.shape(data.value);
    shape[c.dim(axis, data.rank)?] = s.segments;
    Ok(c.to(c.reshape(out, &shape), data.dtype))
}

fn segment_reduce_backward(
    c: &Ctx,
    grad: Value,
    output: Value,
    data: Tensor,
    reduce: String,
    lengths: Option<Value>,
    offsets: Option<Value>,
    axis: i64,
    initial: Option<Scalar>,
) -> Result<Value> {
    require_float(&data, "_segment_reduce_cpu")?;
    let s = Segments::new(c, &data, lengths, offsets, axis)?;
    let (wide, shape) = (opmath(data.dtype), c.shape(data.value));
    let zeros = c.full(c.scalar_f64(wide, 0.0), &[s.batches * s.rows, s.inner]);
    if s.all() * s.inner * s.rows == 0 {
        return Ok(c.to(c.reshape(zeros, &shape), data.dtype));
    }
    let per_segment = |x: Value| c.reshape(c.to(x, wide), &[s.all(), s.inner]);
    let grads = s.spread(c, per_segment(grad));
    let found = match reduce.as_str() {
        "sum" => grads,
        "mean" => c.divide(grads, s.spread(c, s.sizes_as(c, wide))),
        "max" | "min" => {
            let rows = s.rows_of(c, data.value, wide);
            let is = c.or(c.eq(rows, s.spread(c, per_segment(output))), c.is_nan(rows));
            let counts = scatter_rows(
                c,
                c.zeros_like(per_segment(output)),
                0,
                s.of,
                c.to(is, wide),
                Some(Binary::Add),
            );
            let grads = c.select(is, grads, zeros);
            // PyTorch shares what is positive among several that are the extreme, and nothing else.
            let shared = c.divide(grads, s.spread(c, counts));
            c.select(c.gt(grads, zeros), shared, grads)
        }
        "prod" => {
            let start = initial.map_or_else(|| c.scalar_f64(wide, 1.0), |x| c.number(x, wide));
            c.multiply(
                grads,
                s.products_of_others(c, s.rows_of(c, data.value, wide), per_segment(output), start),
            )
        }
        other => return Err(unknown(other)),
    };
    let inside = c.lt(s.of, fill(c, s.all(), &[s.batches * s.rows]));
    let inside = c.broadcast_in_dim(inside, &[s.batches * s.rows, s.inner], &[0]);
    Ok(c.to(c.reshape(c.select(inside, found, zeros), &shape), data.dtype))
}

/// The offsets of one level of runs, as s64 \[runs + 1\].
fn one_level(c: &Ctx, offsets: &[Tensor]) -> Result<(Value, i64)> {
    match offsets {
        [one] if one.rank == 1 && c.numel(one.value) > 0 => {
            Ok((c.to(one.value, DType::S64), c.numel(one.value) - 1))
        }
        _ => Err(unsupported("several levels of runs")),
    }
}

/// Rows \[all, ...\] as \[runs, longest, ...\], with a number behind the end of each run.
fn jagged_to_padded(
    c: &Ctx,
    values: Tensor,
    offsets: Vec<Tensor>,
    longest: Vec<i64>,
    padding: Scalar,
) -> Result<Value> {
    let (offsets, runs) = one_level(c, &offsets)?;
    let shape = c.shape(values.value);
    let (&[longest], Some((&all, inner))) = (longest.as_slice(), shape.split_first()) else {
        return Err(unsupported("several levels of runs"));
    };
    let mut out = vec![runs, longest];
    out.extend_from_slice(inner);
    let filled = c.number_like(padding, values.dtype, &out);
    if all == 0 || out.contains(&0) {
        return Ok(filled);
    }
    let along = |v: Value| c.broadcast_in_dim(v, &[runs, longest], &[0]);
    let step = c.iota(TensorType::new(DType::S64, [runs, longest].as_slice()), 1);
    let place = c.add(along(c.slice_dim(offsets, 0, 0, runs, 1)), step);
    let inside = c.lt(place, along(c.slice_dim(offsets, 0, 1, runs + 1, 1)));
    let place = c.clamp(c.zeros_like(place), place, fill(c, all - 1, &[runs, longest]));
    let taken = c.take_dim(values.value, place, 0);
    Ok(c.select(c.broadcast_in_dim(inside, &out, &[0, 1]), taken, filled))
}

/// The reverse: \[runs, longest, ...\] as \[total, ...\].
fn padded_to_jagged(c: &Ctx, dense: Tensor, offsets: Vec<Tensor>, total: Option<i64>) -> Result<Value> {
    let (offsets, runs) = one_level(c, &offsets)?;
    let shape = c.shape(dense.value);
    let (&[batch, longest, ref inner @ ..], Some(total)) = (shape.as_slice(), total) else {
        return Err(unsupported("a total that only the offsets know"));
    };
    if batch != runs {
        return Err(runtime(format!("offsets are of {runs} runs, and the tensor has {batch}")));
    }
    let mut out = vec![total];
    out.extend_from_slice(inner);
    let zeros = c.full(c.scalar_i64(dense.dtype, 0), &out);
    if shape.contains(&0) || total == 0 {
        return Ok(zeros);
    }
    let place = c.iota(TensorType::new(DType::S64, [total].as_slice()), 0);
    let ends = c.reshape(c.slice_dim(offsets, 0, 1, runs + 1, 1), &[1, runs]);
    let run = c.to(lower_bound(c, ends, c.reshape(place, &[1, total]), true), DType::S64);
    let run = c.minimum(c.reshape(run, &[total]), fill(c, runs - 1, &[total]));
    let step = c.subtract(place, c.take_dim(offsets, run, 0));
    let inside = c.and(c.ge(step, fill(c, 0, &[total])), c.lt(step, fill(c, longest, &[total])));
    let at = c.add(c.multiply(run, fill(c, longest, &[total])), step);
    let at = c.clamp(fill(c, 0, &[total]), at, fill(c, runs * longest - 1, &[total]));
    let mut flat = vec![runs * longest];
    flat.extend_from_slice(inner);
    let taken = c.take_dim(c.reshape(dense.value, &flat), at, 0);
    Ok(c.select(c.broadcast_in_dim(inside, &out, &[0]), taken, zeros))
}
