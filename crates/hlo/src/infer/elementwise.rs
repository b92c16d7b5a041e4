//! Elementwise ops.

use super::*;

fn elementwise(row: &ElementwiseRow, t: &TensorType) -> Result {
    accepts(row.accepts, t)?;
    one(match row.result {
        ResultKind::Same => t.clone(),
        ResultKind::Real => t.with_dtype(t.dtype.real()),
        ResultKind::Pred => t.with_dtype(DType::Pred),
    })
}

pub(super) fn unary(op: Unary, t: &TensorType) -> Result {
    elementwise(op.row(), t)
}

pub(super) fn binary(op: Binary, ts: &[&TensorType]) -> Result {
    ensure!(ts[0] == ts[1], "operands must have the same type");
    elementwise(op.row(), ts[0])
}

pub(super) fn compare(direction: Direction, kind: CompareKind, ts: &[&TensorType]) -> Result {
    ensure!(ts[0] == ts[1], "operands must have the same type");
    let ordered = !matches!(direction, Direction::Eq | Direction::Ne);
    ensure!(!(ordered && ts[0].dtype.is_complex()), "complex numbers have no order");
    ensure!(kind == CompareKind::Natural || ts[0].dtype.is_float(), "a total order needs floats");
    one(ts[0].with_dtype(DType::Pred))
}

pub(super) fn select(ts: &[&TensorType]) -> Result {
    ensure!(ts[0].dtype == DType::Pred, "the predicate must be i1");
    ensure!(ts[1] == ts[2], "both branches must have the same type");
    ensure!(
        ts[0].rank() == 0 || ts[0].shape == ts[1].shape,
        "the predicate must be a scalar or have the branches' shape"
    );
    one(ts[1].clone())
}

pub(super) fn clamp(ts: &[&TensorType]) -> Result {
    let (min, x, max) = (ts[0], ts[1], ts[2]);
    accepts(DTypeSet::REAL_NUMBER, x)?;
    for bound in [min, max] {
        ensure_types!(bound.dtype == x.dtype, "bounds must have the operand's element type");
        ensure!(
            bound.rank() == 0 || bound.shape == x.shape,
            "bounds must be scalars or have the operand's shape"
        );
    }
    one(x.clone())
}

pub(super) fn complex(ts: &[&TensorType]) -> Result {
    ensure!(ts[0] == ts[1], "operands must have the same type");
    ensure!(matches!(ts[0].dtype, DType::F32 | DType::F64), "parts must be f32 or f64");
    one(ts[0].with_dtype(ts[0].dtype.complex()))
}

pub(super) fn convert(x: &TensorType, want: &TensorType) -> Result {
    ensure!(x.shape == want.shape, "cannot change the shape to {want}");
    one(want.clone())
}

pub(super) fn bitcast_convert(x: &TensorType, want: &TensorType) -> Result {
    let (from, to) = (x.dtype.bits(), want.dtype.bits());
    ensure!(
        x.dtype.is_complex() == want.dtype.is_complex(),
        "cannot reinterpret between complex and real ({want})"
    );
    let fits = if from == to {
        x.shape == want.shape
    } else if from > to {
        want.shape
            .split_last()
            .is_some_and(|(&last, rest)| rest == &x.shape[..] && last == i64::from(from / to))
    } else {
        x.shape
            .split_last()
            .is_some_and(|(&last, rest)| rest == &want.shape[..] && last == i64::from(to / from))
    };
    ensure!(fits, "cannot be reinterpreted as {want}");
    one(want.clone())
}

pub(super) fn reduce_precision(x: &TensorType, exponent_bits: u32, mantissa_bits: u32) -> Result {
    accepts(DTypeSet::FLOAT, x)?;
    ensure!(exponent_bits >= 1, "exponent_bits must be at least 1");
    ensure!(exponent_bits <= 11 && mantissa_bits <= 52, "wider than f64");
    one(x.clone())
}
