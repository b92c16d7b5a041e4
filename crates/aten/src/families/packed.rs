//! Packed sequences: the samples of the first step, then those of the second, and so on, a row each.
//!
//! What is packed has as many rows as the padded batch, so that a program serves all lengths: the samples come first, and
//! the rest are zeros. How many samples each step has is a tensor, which does not grow and ends with zeros.
//! `recurrent.rs` goes over sequences in this order. A step is a block of rows, which is copied whole: what it has of the
//! steps behind it is overwritten or left out, so that no element is looked for by an index of its own.

use super::recurrent::Steps;
use crate::args::Scalar;
use crate::context::Ctx;
use crate::dtype::shape_text;
use crate::error::{ErrorKind, Result, runtime};
use crate::op;
use crate::row::Row;
use oxitorch_hlo::{DType, TensorType, Value};

/// The rows of this family.
pub static ROWS: &[Row] = &[
    op!("oxitorch::_pack_rows", pack),
    op!("oxitorch::_pad_rows", pad),
    op!("oxitorch::_packed_rows", packed),
    op!("oxitorch::_batch_sizes", batch_sizes),
    op!("oxitorch::_full_length", full_length),
];

/// `[steps, batch, ..]` to `[rows, ..]`.
fn pack(c: &Ctx, padded: Value, batch_sizes: Value, rows: i64) -> Result<Value> {
    let shape = c.shape(padded);
    let &[count, batch, ref rest @ ..] = shape.as_slice() else {
        let got = shape_text(&shape);
        return Err(runtime(format!("_pack_rows: expected steps and samples, got a tensor of shape {got}")));
    };
    let width = rest.iter().product::<i64>();
    let steps = Steps::new(c, &[rows], batch, Some(batch_sizes), false)?;
    let padded = c.reshape(padded, &[count, batch, width]);
    let zero = steps.number(0);
    let done = steps.run(&[steps.zeros(c.dtype(padded), width)], |step, state| {
        let block = c.dynamic_slice(padded, &[step.number, zero, zero], &[1, batch, width]);
        vec![steps.write(state[0], step, c.reshape(block, &[batch, width]))]
    });
    Ok(c.reshape(steps.cut(done[0]), &[&[rows], rest].concat()))
}

/// `[rows, ..]` to `[steps, batch, ..]`, with `value` where a sample has no such step.
fn pad(c: &Ctx, rows: Value, batch_sizes: Value, steps: i64, batch: i64, value: Scalar) -> Result<Value> {
    let (shape, dtype) = (c.shape(rows), c.dtype(rows));
    let Some((&count, rest)) = shape.split_first() else {
        return Err(runtime("_pad_rows: expected rows, got a scalar"));
    };
    let width = rest.iter().product::<i64>();
    let from = Steps::new(c, &[count], batch, Some(batch_sizes), false)?;
    let rows = from.padded(c.reshape(rows, &[count, width]));
    let (zero, value) = (from.number(0), c.number(value, dtype));
    let nothing = c.full(value, &[batch, width]);
    let done = from.run(&[c.full(value, &[steps, batch, width])], |step, state| {
        let block = c.reshape(from.keep(step, from.read(rows, step), nothing), &[1, batch, width]);
        vec![c.overwrite(state[0], block, &[step.number, zero, zero])]
    });
    Ok(c.reshape(done[0], &[&[steps, batch], rest].concat()))
}

/// The rows with zeros behind those of the samples.
fn packed(c: &Ctx, rows: Value, batch_sizes: Value) -> Value {
    let shape = c.shape(rows);
    let count = c.reduce_sum(c.to(batch_sizes, DType::S64), &[0]);
    let ty = TensorType::new(DType::S64, shape.as_slice());
    c.select(c.lt(c.iota(ty, 0), c.full(count, &shape)), rows, c.zeros_like(rows))
}

/// How many samples each of `steps` steps has, from the lengths of the samples.
fn batch_sizes(c: &Ctx, lengths: Value, steps: i64) -> Result<Value> {
    let &[batch] = c.shape(lengths).as_slice() else {
        let got = shape_text(&c.shape(lengths));
        return Err(runtime(format!("_batch_sizes: expected a vector of lengths, got shape {got}")));
    };
    let lengths = c.to(lengths, DType::S64);
    c.assert(
        ErrorKind::Runtime,
        format!("pack_padded_sequence: expected lengths from 1 to {steps}, the longest first"),
        || {
            let number = |n| c.full(c.scalar_i64(DType::S64, n), &[batch]);
            let fit = c.all(c.and(c.ge(lengths, number(1)), c.le(lengths, number(steps))));
            let (before, after) =
                (c.slice_dim(lengths, 0, 0, batch - 1, 1), c.slice_dim(lengths, 0, 1, batch, 1));
            c.and(fit, c.all(c.ge(before, after)))
        },
    );
    let step = c.iota(TensorType::new(DType::S64, [steps, batch].as_slice()), 0);
    let has = c.gt(c.broadcast_in_dim(lengths, &[steps, batch], &[1]), step);
    Ok(c.reduce_sum(c.to(has, DType::S64), &[1]))
}

/// The same numbers, which must be those of sequences of which one has all steps.
fn full_length(c: &Ctx, batch_sizes: Value) -> Value {
    let steps = c.numel(batch_sizes);
    let message = format!(
        "pad_packed_sequence: the longest sequence is shorter than the padded batch of {steps} steps: give total_length"
    );
    c.assert(ErrorKind::Runtime, message, || {
        let last = c.slice_dim(batch_sizes, 0, steps - 1, steps, 1);
        c.all(c.gt(last, c.zeros_like(last)))
    });
    batch_sizes
}
