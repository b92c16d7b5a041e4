//! Products of groups of rows or columns, each with a matrix of its own.

use super::matmul::contract;
use crate::context::Ctx;
use crate::dtype::scalar_name;
use crate::error::{Result, runtime};
use crate::op;
use crate::row::Row;
use oxitorch_hlo::{DType, DotDims, TensorType, Value};

/// The rows of this family: products of each group of rows with a matrix of its own, as in mixtures of experts.
pub static ROWS: &[Row] = &[op!("_grouped_mm", grouped_mm).products()];

/// Which of `count` entries belong to which group, as `[groups, count]`: a group ends where its offset says, and the next one
/// begins there. What is behind the last offset belongs to none.
fn membership(c: &Ctx, ends: Value, groups: i64, count: i64) -> Value {
    let ty = TensorType::new(DType::S32, [groups, count].as_slice());
    let entry = c.iota(ty, 1);
    let first = c.constant(TensorType::new(DType::S32, [1].as_slice()), 0.0);
    let starts = c.slice_dim(c.concatenate(&[first, ends], 0), 0, 0, groups, 1);
    let along = |v: Value| c.broadcast_in_dim(v, &[groups, count], &[0]);
    c.and(c.ge(entry, along(starts)), c.lt(entry, along(ends)))
}

/// For two or three dimensions of each operand: rows of `l` in groups with a matrix of `r` each; columns of `r` in groups with
/// a matrix of `l` each; the contracted dimension in groups, with a result each; or a batch.
fn grouped_mm(
    c: &Ctx,
    l: Value,
    r: Value,
    ends: Option<Value>,
    bias: Option<Value>,
    out: Option<DType>,
) -> Result<Value> {
    check(c, l, r, ends, bias, out)?;
    let (dtype, left, right) = (c.dtype(l), c.shape(l), c.shape(r));
    let Some(ends) = ends else {
        return Ok(c.to(contract(c, l, r, DotDims::new(&[0], &[0], &[2], &[1])), dtype));
    };
    let groups = c.shape(ends)[0];
    // Every group with everything, and then each entry from its own: XLA has no product of groups whose sizes it learns late.
    let own = |all: Value, group: i64, entry: i64| {
        let shape = c.shape(all);
        let member = membership(c, ends, groups, shape[entry as usize]);
        let member = c.broadcast_in_dim(member, &shape, &[group, entry]);
        c.select(member, all, c.zeros_like(all))
    };
    let y = match (left.len(), right.len()) {
        (2, 3) => {
            let all = contract(c, l, r, DotDims::new(&[], &[], &[1], &[1])); // row, group, column
            c.reduce_sum(own(all, 1, 0), &[1])
        }
        (3, 2) => {
            let all = contract(c, l, r, DotDims::new(&[], &[], &[2], &[0])); // group, row, column
            c.reduce_sum(own(all, 0, 2), &[0])
        }
        _ => {
            let all = c.broadcast_in_dim(l, &[groups, left[0], left[1]], &[1, 2]);
            contract(c, own(all, 0, 2), r, DotDims::new(&[], &[], &[2], &[0]))
        }
    };
    Ok(c.to(y, dtype))
}

fn check(
    c: &Ctx,
    l: Value,
    r: Value,
    ends: Option<Value>,
    bias: Option<Value>,
    out: Option<DType>,
) -> Result<()> {
    let (left, right) = (c.shape(l), c.shape(r));
    for (name, v) in [("mat_a", l), ("mat_b", r)] {
        let dtype = c.dtype(v);
        if !matches!(dtype, DType::F32 | DType::BF16 | DType::F16) {
            return Err(runtime(format!(
                "Expected {name} to be Float32, BFloat16 or Float16 matrix, got {}",
                scalar_name(dtype)
            )));
        }
    }
    for (name, shape) in [("mat_a", &left), ("mat_b", &right)] {
        if !matches!(shape.len(), 2 | 3) {
            return Err(runtime(format!("{name} has to be 2 or 3d")));
        }
    }
    let (k_left, k_right) = (left[left.len() - 1], right[right.len() - 2]);
    if k_left != k_right {
        return Err(runtime("contraction dimension of mat_a and mat_b must match"));
    }
    let flat = left.len() == 2 || right.len() == 2;
    if flat != ends.is_some() {
        return Err(runtime(
            "Have to provide offsets if there is a 2d matrix, or no offset if both matrices are 3d",
        ));
    }
    let groups = [&left, &right].into_iter().filter(|s| s.len() == 3).map(|s| s[0]);
    let ends = ends.map(|e| (c.dtype(e), c.shape(e)));
    if let Some((dtype, shape)) = &ends {
        if shape.len() != 1 {
            return Err(runtime("offs has to be 1D"));
        }
        if *dtype != DType::S32 {
            return Err(runtime("Offsets have to be int32"));
        }
    }
    let offsets = ends.as_ref().map(|(_, shape)| shape[0]);
    let mut counts = groups.chain(offsets);
    if let Some(first) = counts.next()
        && counts.any(|n| n != first)
    {
        return Err(runtime("matrix batch sizes have to match"));
    }
    if bias.is_some() {
        return Err(runtime("Bias not supported yet"));
    }
    if out.is_some_and(|d| d != c.dtype(l)) {
        return Err(runtime("Grouped gemm output dtype must match `mat_a` dtype"));
    }
    if c.dtype(l) != c.dtype(r) {
        let (a, b) = (scalar_name(c.dtype(l)), scalar_name(c.dtype(r)));
        return Err(runtime(format!("expected m1 and m2 to have the same dtype, but got: {a} != {b}")));
    }
    Ok(())
}
