//! Packed sequences: the samples of the first step, then those of the second, and so on, a row each.
//!
//! What is packed has as many rows as the padded batch, so that a program serves all lengths: the samples come first, and
//! the rest are zeros. How many samples each step has is a tensor, which does not grow and ends with zeros.
//! `recurrent.rs` goes over sequences in this order. A step is a block of rows, which is copied whole: what it has of the
//! steps behind it is overwritten or left out, so that no element is looked for by an index of its own.

use super::recurrent::Steps;
use crate::args::Scalar;
use crate::dtype::shape_text;
use crate::error::{Result, runtime};
use crate::lower::Ctx;
use crate::op;
use crate::table::Row;
use oxitorch_hlo::{DType, TensorType, Value};

/// The rows of this family.
pub static ROWS: &[Row] = &[
    op!("oxitorch::_pack_rows", pack),
    op!("oxitorch::_pad_rows", pad),
    op!("oxitorch::_packed_rows", packed),
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
