use super::embedding::{check_indices, occurrences};
use super::indexing::assert_range;
use super::matmul::accumulator;
use super::scatter::scatter_rows;
use crate::context::Ctx;
use crate::error::{ErrorKind, Result, runtime};
use crate::op;
use crate::row::Row;
use oxitorch_hlo::{Binary, DType, Dims, ScatterDims, ScatterFlags, TensorType, Value};

/// The rows of this family.
pub static ROWS: &[Row] = &[
    op!("_embedding_bag", embedding_bag),
    op!("_embedding_bag_forward_only", embedding_bag),
    op!("_embedding_bag_dense_backward", dense_backward),
    op!("_embedding_bag_per_sample_weights_backward", per_sample_weights_backward),
];

/// `mode` as PyTorch numbers it.
const MEAN: i64 = 1;
const MAX: i64 = 2;

fn fill(c: &Ctx, dtype: DType, x: i64, shape: &[i64]) -> Value {
    c.full(c.scalar_i64(dtype, x), shape)
}

/// Which bag each index belongs to, s64: the number of offsets at or before its position, less one.
fn bag_of(c: &Ctx, offsets: Value, count: i64) -> Value {
    let n = c.numel(offsets);
    if n == 0 || count == 0 {
        return fill(c, DType::S64, 0, &[count]);
    }
    let at = c.iota(TensorType::new(DType::S64, [count, n].as_slice()), 0);
    let starts = c.broadcast_in_dim(c.to(offsets, DType::S64), &[count, n], &[1]);
    let before = c.convert(c.ge(at, starts), DType::S64);
    c.subtract(c.reduce_sum(before, &[1]), fill(c, DType::S64, 1, &[count]))
}

/// Values by index, repeated over the columns of `[count, width]`.
fn by_row(c: &Ctx, x: Value, shape: &[i64]) -> Value {
    c.broadcast_in_dim(x, shape, &[0])
}

/// Rows of `x` at `index`; no rows of nothing.
fn rows(c: &Ctx, x: Value, index: Value) -> Value {
    if c.numel(index) == 0 || c.numel(x) == 0 {
        let mut shape = c.shape(x);
        shape[0] = c.numel(index);
        return fill(c, c.dtype(x), 0, &shape);
    }
    c.take_dim(x, index, 0)
}

/// Where an index is not the padding.
fn counted(c: &Ctx, indices: Value, padding_idx: i64) -> Value {
    let padding = fill(c, c.dtype(indices), padding_idx, &c.shape(indices));
    if padding_idx < 0 { c.full(c.scalar_bool(true), &c.shape(indices)) } else { c.ne(indices, padding) }
}

/// The results: bags, the bag of each index, how many indices each bag counts, and for maxima the index that won.
#[allow(clippy::too_many_arguments)] // the schema's
fn embedding_bag(
    c: &Ctx,
    weight: Value,
    indices: Value,
    offsets: Value,
    _scale_grad_by_freq: bool,
    mode: i64,
    _sparse: bool,
    per_sample_weights: Option<Value>,
    include_last_offset: bool,
    padding_idx: i64,
) -> Result<Vec<Value>> {
    let &[classes, width] = c.shape(weight).as_slice() else { return Err(runtime("'weight' must be 2-D")) };
    if c.rank(indices) != 1 || c.rank(offsets) != 1 {
        let ranks = (c.rank(indices), c.rank(offsets));
        return Err(runtime(format!(
            "input has to be a 1D or 2D Tensor, but got Tensor of dimension {}",
            ranks.0
        )));
    }
    check_indices(c, indices, "#2")?;
    assert_range(c, ErrorKind::Index, "index out of range in self", indices, 0..classes, width);
    let (count, starts) = (c.numel(indices), c.numel(offsets));
    let bags = if include_last_offset { (starts - 1).max(0) } else { starts };
    let (dtype, acc) = (c.dtype(weight), accumulator(c.dtype(weight)));
    let of = bag_of(c, offsets, count);
    let used = counted(c, indices, padding_idx);
    let share = c.convert(used, acc);
    let sizes = scatter_rows(c, fill(c, acc, 0, &[bags]), 0, of, share, Some(Binary::Add));
    let wide = [count, width];
    let values = c.to(rows(c, weight, indices), acc);
    let index = c.dtype(indices);
    if mode == MAX {
        let (bag, winner) = maxima(c, values, of, used, sizes);
        let winner = c.convert(rows_at(c, indices, winner), index);
        let winner = c.select(empty(c, sizes, &[bags, width]), c.zeros_like(winner), winner);
        return Ok(vec![c.to(bag, dtype), c.convert(of, index), c.convert(sizes, index), winner]);
    }
    let share = per_sample_weights.map_or(share, |w| c.multiply(share, c.to(w, acc)));
    let values = c.multiply(values, by_row(c, share, &wide));
    let mut sum = scatter_rows(c, fill(c, acc, 0, &[bags, width]), 0, of, values, Some(Binary::Add));
    if mode == MEAN {
        let divisor = c.maximum(sizes, c.ones_like(sizes));
        sum = c.divide(sum, by_row(c, divisor, &[bags, width]));
    }
    Ok(vec![c.to(sum, dtype), c.convert(of, index), c.convert(sizes, index), fill(c, index, 0, &[bags])])
}

/// Where a bag counts nothing, over its columns.
fn empty(c: &Ctx, sizes: Value, shape: &[i64]) -> Value {
    by_row(c, c.eq(sizes, c.zeros_like(sizes)), shape)
}

/// Elements of a vector at positions of any shape.
fn rows_at(c: &Ctx, x: Value, at: Value) -> Value {
    if c.numel(x) == 0 { fill(c, c.dtype(x), 0, &c.shape(at)) } else { c.take_dim(x, at, 0) }
}

/// The maximum of each bag, column by column, and the position of the first index that reaches it. Empty bags are zero.
fn maxima(c: &Ctx, values: Value, of: Value, used: Value, sizes: Value) -> (Value, Value) {
    let &[count, width] = c.shape(values).as_slice() else { return (values, of) };
    let (dtype, bags) = (c.dtype(values), c.numel(sizes));
    // Updates that point behind the last bag are dropped.
    let to = c.select(used, of, fill(c, DType::S64, bags, &[count]));
    let lowest = c.full(c.min_value(dtype), &[bags, width]);
    let top = scatter_rows(c, lowest, 0, to, values, Some(Binary::Maximum));
    let reached = c.eq(values, rows(c, top, of));
    let at = c.iota(TensorType::new(DType::S64, [count, width].as_slice()), 0);
    let at = c.select(reached, at, fill(c, DType::S64, count, &[count, width]));
    let first = fill(c, DType::S64, count, &[bags, width]);
    let first = scatter_rows(c, first, 0, to, at, Some(Binary::Minimum));
    let none = empty(c, sizes, &[bags, width]);
    (c.select(none, c.zeros_like(top), top), first)
}

#[allow(clippy::too_many_arguments)] // the schema's
fn dense_backward(
    c: &Ctx,
    grad: Value,
    indices: Value,
    offset2bag: Value,
    bag_size: Value,
    maximum_indices: Value,
    classes: i64,
    scale_grad_by_freq: bool,
    mode: i64,
    per_sample_weights: Option<Value>,
    padding_idx: i64,
) -> Result<Value> {
    let &[_, width] = c.shape(grad).as_slice() else { return Err(runtime("grad must be 2-D")) };
    let (dtype, acc) = (c.dtype(grad), accumulator(c.dtype(grad)));
    let zeros = fill(c, acc, 0, &[classes, width]);
    let grad = c.to(grad, acc);
    if mode == MAX {
        return Ok(c.to(max_backward(c, zeros, grad, maximum_indices, bag_size), dtype));
    }
    let count = c.numel(indices);
    let wide = [count, width];
    let mut pull = rows(c, grad, offset2bag);
    if mode == MEAN {
        let size = c.to(rows(c, bag_size, offset2bag), acc);
        pull = c.divide(pull, by_row(c, c.maximum(size, c.ones_like(size)), &wide));
    }
    if let Some(w) = per_sample_weights {
        pull = c.multiply(pull, by_row(c, c.to(w, acc), &wide));
    }
    if scale_grad_by_freq {
        let often = rows(c, occurrences(c, indices, classes, acc), indices);
        pull = c.divide(pull, by_row(c, often, &wide));
    }
    let behind = fill(c, c.dtype(indices), classes, &[count]);
    let to = c.select(counted(c, indices, padding_idx), indices, behind);
    Ok(c.to(scatter_rows(c, zeros, 0, to, pull, Some(Binary::Add)), dtype))
}

/// Each column's gradient goes to the row that won there.
fn max_backward(c: &Ctx, zeros: Value, grad: Value, winners: Value, bag_size: Value) -> Value {
    let shape = c.shape(grad);
    let classes = c.shape(zeros)[0];
    if shape.contains(&0) {
        return zeros;
    }
    let winners = c.to(winners, DType::S64);
    let to = c.select(empty(c, bag_size, &shape), fill(c, DType::S64, classes, &shape), winners);
    let dims = ScatterDims {
        inserted_window_dims: Dims::from_slice(&[0]),
        input_batching_dims: Dims::from_slice(&[1]),
        scatter_indices_batching_dims: Dims::from_slice(&[1]),
        scatter_dims_to_operand_dims: Dims::from_slice(&[0]),
        index_vector_dim: 2,
        ..ScatterDims::default()
    };
    let flags = ScatterFlags::default();
    c.scatter(&[zeros], to, &[grad], &dims, flags, |b, old, new| vec![b.add(old[0], new[0])])[0]
}

/// How much each index's own weight matters: its row times its bag's gradient.
#[allow(clippy::too_many_arguments)] // the schema's
fn per_sample_weights_backward(
    c: &Ctx,
    grad: Value,
    weight: Value,
    indices: Value,
    _offsets: Value,
    offset2bag: Value,
    mode: i64,
    padding_idx: i64,
) -> Result<Value> {
    if mode != 0 {
        return Err(runtime("embedding_bag_backward: per_sample_weights only supported for mode='sum'"));
    }
    let acc = accumulator(c.dtype(grad));
    let wide = |x: Value, at: Value| c.to(rows(c, x, at), acc);
    let sum = c.reduce_sum(c.multiply(wide(grad, offset2bag), wide(weight, indices)), &[1]);
    let sum = c.select(counted(c, indices, padding_idx), sum, c.zeros_like(sum));
    Ok(c.to(sum, c.dtype(grad)))
}
