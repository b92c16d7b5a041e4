//! Sparse matrices, by their indices and values. (The tensors themselves are PyTorch's: see [`crate::sparse`].)

use super::indexing::{assert_range, integer_index};
use super::scatter::scatter_rows;
use super::sorting::lower_bound;
use crate::context::Ctx;
use crate::error::{ErrorKind, Result, runtime};
use crate::library::{Item, Outcome, TARGET};
use crate::op;
use crate::row::Row;
use oxitorch_hlo::{Binary, CustomCall, DType, TensorType, Value};

/// The rows of this family.
pub static ROWS: &[Row] = &[
    op!("_convert_indices_from_coo_to_csr", coo_to_csr),
    op!("_convert_indices_from_csr_to_coo", csr_to_coo),
    op!("oxitorch::_spmm", spmm),
];

/// The host function that multiplies a sparse matrix with a dense one: row numbers, column numbers, values, dense matrix.
pub const SPMM: &str = "spmm";

/// So many numbers are converted by compiled code: a call costs some microseconds.
const SMALL: i64 = 1 << 10;

fn out_dtype(out_int32: bool) -> DType {
    if out_int32 { DType::S32 } else { DType::S64 }
}

/// What PyTorch's own kernel gives, where programs can call it.
fn of_library(c: &Ctx, op: &str, args: &[Item<'_>], ty: TensorType) -> Option<Value> {
    let worth = c.config.target.library && ty.shape.iter().product::<i64>() > SMALL;
    let results = worth.then(|| c.call_library(&format!("{op}.out"), args, &[Some(Outcome::row_major(ty))]));
    results?.into_iter().flatten().next()
}

/// Of sorted row numbers \[nnz\]: how many are below 0, 1, ... `size`.
fn coo_to_csr(c: &Ctx, rows: Value, size: i64, out_int32: bool) -> Result<Value> {
    let name = "_convert_indices_from_coo_to_csr";
    integer_index(c, rows, &format!("{name}: expected int32 or int64 indices"))?;
    if c.rank(rows) > 1 {
        return Err(runtime(format!(
            "{name}: input is supposed to be a vector, but has {} dimensions",
            c.rank(rows)
        )));
    }
    if !(0..i64::MAX).contains(&size) {
        return Err(runtime(format!("{name}: a matrix cannot have {size} rows")));
    }
    let ty = TensorType::new(out_dtype(out_int32), [size + 1].as_slice());
    let args = [Item::Tensor(rows), Item::Int(size), Item::Bool(out_int32)];
    if let Some(starts) = of_library(c, name, &args, ty) {
        return Ok(starts);
    }
    let nnz = c.numel(rows);
    let starts = c.iota(TensorType::new(c.dtype(rows), [1, size + 1].as_slice()), 1);
    let found = lower_bound(c, c.reshape(rows, &[1, nnz]), starts, false);
    Ok(c.to(c.reshape(found, &[size + 1]), out_dtype(out_int32)))
}

/// Of the starts of rows \[*batch, rows + 1\] and of column numbers \[*batch, nnz\]: the indices \[batch + 2, all\], with
/// rows and columns exchanged by `transpose`.
fn csr_to_coo(c: &Ctx, starts: Value, columns: Value, out_int32: bool, transpose: bool) -> Result<Value> {
    let name = "_convert_indices_from_csr_to_coo";
    let (shape, starts_shape) = (c.shape(columns), c.shape(starts));
    let (Some((&nnz, batch)), Some((&ends, of))) = (shape.split_last(), starts_shape.split_last()) else {
        return Err(runtime(format!("{name}: expected indices with at least one dimension")));
    };
    if batch != of || ends < 1 {
        return Err(runtime(format!("{name}: compressed and plain indices have different batches")));
    }
    let (matrices, all): (i64, i64) = (batch.iter().product(), c.numel(columns));
    let dtype = out_dtype(out_int32);
    let ty = TensorType::new(dtype, [shape.len() as i64 + 1, all].as_slice());
    let args = [Item::Tensor(starts), Item::Tensor(columns), Item::Bool(out_int32), Item::Bool(transpose)];
    if let Some(indices) = of_library(c, name, &args, ty) {
        return Ok(indices);
    }
    let ends = c.slice_dim(c.reshape(starts, &[matrices, ends]), 1, 1, ends, 1);
    let place = c.iota(TensorType::new(c.dtype(ends), [matrices, nnz].as_slice()), 1);
    let rows = c.to(c.reshape(lower_bound(c, ends, place, true), &[1, all]), dtype);
    let columns = c.to(c.reshape(columns, &[1, all]), dtype);
    let mut indices: Vec<Value> = (0..batch.len())
        .map(|d| c.reshape(c.iota(TensorType::new(dtype, shape.clone()), d as i64), &[1, all]))
        .collect();
    indices.extend(if transpose { [columns, rows] } else { [rows, columns] });
    Ok(c.concatenate(&indices, 0))
}

/// A sparse matrix \[size, k\] with a strided one \[k, n\]: for each element, `values[e] * dense[columns[e]]` is added
/// to row `rows[e]` of zeros.
fn spmm(c: &Ctx, rows: Value, columns: Value, values: Value, dense: Value, size: i64) -> Result<Value> {
    let &[k, n] = c.shape(dense).as_slice() else {
        return Err(runtime("mm: expected a matrix"));
    };
    let dtype = c.dtype(dense);
    if c.config.target.library && matches!(dtype, DType::F32 | DType::F64) && c.dtype(values) == dtype {
        let config = format!("fn = \"{SPMM}\"");
        let call = CustomCall { target: TARGET.into(), backend_config: config, ..CustomCall::default() };
        let numbers = [rows, columns].map(|v| c.to(v, DType::S64));
        let operands = [numbers[0], numbers[1], values, dense];
        return Ok(c.custom_call(&operands, &[TensorType::new(dtype, [size, n].as_slice())], call)[0]);
    }
    let in_range = |index: Value, size: i64, what: &str| {
        let message = format!("mm: index out of {what} bound: not between 0 and {size}");
        assert_range(c, ErrorKind::Runtime, &message, index, 0..size, n);
    };
    in_range(columns, k, "column");
    in_range(rows, size, "row");
    let zeros = c.full(c.scalar_i64(dtype, 0), &[size, n]);
    if c.numel(values) == 0 || k == 0 || n == 0 {
        return Ok(zeros);
    }
    let taken = c.take_dim(dense, columns, 0);
    let scaled = c.multiply(taken, c.broadcast_in_dim(values, &c.shape(taken), &[0]));
    Ok(scatter_rows(c, zeros, 0, rows, scaled, Some(Binary::Add)))
}
