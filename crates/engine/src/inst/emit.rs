//! Lowering an instance: by its row, or as what moves elements.

use super::{Emitted, Kind};
use crate::config::Lowering;
use crate::error::ErrorKind;
use crate::view;
use oxitorch_aten::args::Offset;
use oxitorch_aten::lower::Dest;
use oxitorch_aten::{self as aten, Arg, OpId};
use oxitorch_hlo::{Builder, Dims, MemorySpace, TensorType, Value};

pub(super) fn emit(
    kind: &Kind,
    b: &Builder,
    operands: &[Value],
    offsets: &[Offset],
) -> Result<Emitted, aten::Error> {
    let value = match kind {
        Kind::Row { op, args, dests, lowering, .. } => {
            return emit_row(b, *op, args, dests, lowering, operands, offsets);
        }
        Kind::Read { shape, .. } => shape.read(b, operands[0], offsets),
        Kind::Write { shape, .. } => shape.write(b, operands[0], operands[1], offsets),
        Kind::Store { order, .. } => b.transpose(operands[0], order),
        Kind::Cast { to, .. } => aten::context::cast(b, operands[0], *to),
        Kind::Copy(_) => b.optimization_barrier(&operands[..1])[0],
        Kind::Fence { firmly: true, after: Some(_), .. } => b.after(operands[0], operands[1]),
        Kind::Fence { .. } => b.optimization_barrier(operands)[0],
        Kind::Reload { .. } => {
            let behind = b.optimization_barrier(operands)[0];
            b.annotate_device_placement(behind, MemorySpace::Device)
        }
        Kind::Zeros(ty) => b.full(b.scalar_f64(ty.dtype, 0.0), &ty.shape),
        Kind::Resize { to, .. } => resize(b, operands[0], to),
        Kind::Reshard { to, .. } => {
            b.set_mesh(to.mesh()); // of the program, or of one that is made to learn the result
            b.sharding_constraint(operands[0], to)
        }
        Kind::Collective(exchange) => exchange.emit(b, operands[0])?,
        Kind::Control(control) => {
            let emitted = control.emit(b, operands, offsets)?;
            return no_mistake(b).map(|()| emitted);
        }
    };
    no_mistake(b)?;
    Ok(Emitted { outputs: vec![Some(value)], checks: Vec::new(), rng_blocks: 0, messages: Vec::new() })
}

fn no_mistake(b: &Builder) -> Result<(), aten::Error> {
    b.error().map_or(Ok(()), |e| Err(aten::Error::Runtime(e.to_string())))
}

fn emit_row(
    b: &Builder,
    op: OpId,
    args: &[Arg],
    dests: &[Dest],
    lowering: &Lowering,
    operands: &[Value],
    offsets: &[Offset],
) -> Result<Emitted, aten::Error> {
    let lowered = aten::lower_into(op, b, &lowering.config, args, operands, offsets, dests)?;
    let mut checks: Vec<Value> = lowered.checks.iter().map(|c| c.ok).collect();
    let mut messages: Vec<_> = lowered.checks.into_iter().map(|c| (c.error.into(), c.message)).collect();
    if lowering.nan_trap {
        for v in lowered.outputs.iter().flatten().filter(|&&v| b.dtype(v).is_float()) {
            let dims: Dims = (0..b.rank(*v) as i64).collect();
            checks.push(b.reduce_all(b.is_finite(*v), &dims));
            messages.push((ErrorKind::Runtime, "the result holds NaN or infinity (NaN trap)".to_owned()));
        }
    }
    Ok(Emitted { outputs: lowered.outputs, checks, rng_blocks: lowered.rng_blocks, messages })
}

fn resize(b: &Builder, x: Value, ty: &TensorType) -> Value {
    let flat = view::flat(b, x, ty.dtype);
    let (have, want) = (b.dim(flat, 0), ty.numel());
    let zero = b.scalar_f64(ty.dtype, 0.0);
    let cut = b.slice_dim(flat, 0, 0, have.min(want), 1);
    b.reshape(b.pad_dim(cut, zero, 0, 0, (want - have).max(0)), &ty.shape)
}
