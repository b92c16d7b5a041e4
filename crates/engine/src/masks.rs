//! Boolean index tensors: `x[mask]` is `x[mask.nonzero(as_tuple=True)]`, as in PyTorch's `expandTensors`.
//!
//! Rows that need no positions (a mask that selects between two values) are tried first; this is what remains.

use crate::call::{ArgRef, Call, Meta, Op, Output, Outputs};
use crate::error::{Error, ErrorKind, Refusal};
use crate::stream::Stream;
use crate::tensor::{Place, TensorRef};
use crate::value::Slot;
use oxitorch_aten::Schema;
use oxitorch_hlo::DType;
use std::sync::OnceLock;

fn is_mask(t: &TensorRef<'_>) -> bool {
    t.is_defined() && matches!(t.dtype, Some(DType::Pred | DType::U8))
}

/// Whether a list of index tensors has masks in it.
pub(crate) fn any(call: &Call<'_, '_>) -> bool {
    call.op.takes_indices()
        && call.args.iter().any(|a| matches!(a, ArgRef::Tensors(l) if l.iter().any(is_mask)))
}

/// Positions of a mask's true elements.
struct Positions {
    slot: Slot,
    meta: Meta,
}

fn nonzero(stream: &Stream, call: &Call<'_, '_>, mask: &TensorRef<'_>) -> Result<Positions, Refusal> {
    static NONZERO: OnceLock<Option<Op>> = OnceLock::new();
    let bind = || Schema::parse("nonzero(Tensor self) -> Tensor").ok().and_then(|s| Op::bind(&s));
    let op = NONZERO.get_or_init(bind).as_ref();
    let op = op.ok_or_else(|| Error::runtime("no row `nonzero`; please report this"))?;
    let uploaded = host_mask(stream, mask)?;
    let mask = match &uploaded {
        Some(slot) => TensorRef { place: Place::Device(slot), contiguous: true, offset: 0, ..mask.clone() },
        None => mask.clone(),
    };
    let args = [ArgRef::Tensor(mask)];
    let call = Call { op, args: &args, size: None, ..*call };
    let mut out = Outputs::new();
    call.attempt(stream, &mut out)?;
    match out.pop() {
        Some(Output::New(slot, meta)) => Ok(Positions { slot, meta }),
        _ => Err(Error::runtime("nonzero gave no tensor; please report this").into()),
    }
}

/// A mask on the host, moved to the device.
fn host_mask(stream: &Stream, mask: &TensorRef<'_>) -> Result<Option<Slot>, Refusal> {
    let Place::Host(_) = mask.place else { return Ok(None) };
    let bytes = mask.host_bytes().ok_or_else(|| Error::runtime("a mask without elements"))?;
    let value = stream.upload(mask.ty()?, &bytes)?;
    Ok(Some(Slot::with(bytes.len(), stream.device, value)))
}

/// Runs the call with every mask replaced by the positions of its true elements.
pub(crate) fn expand(stream: &Stream, call: &Call<'_, '_>, out: &mut Outputs) -> Result<(), Refusal> {
    let Some((at, list)) = call.args.iter().enumerate().find_map(|(i, a)| match a {
        ArgRef::Tensors(l) => Some((i, l)),
        _ => None,
    }) else {
        return call.attempt(stream, out);
    };
    let indexed = match call.args.first() {
        Some(ArgRef::Tensor(t)) => t.sizes,
        _ => &[],
    };
    let mut positions = Vec::with_capacity(list.len());
    let mut dim = 0;
    for t in list {
        if is_mask(t) {
            check_shape(t, dim, indexed)?;
            positions.push(Some(nonzero(stream, call, t)?));
            dim += t.sizes.len();
        } else {
            positions.push(None);
            dim += 1;
        }
    }
    let mut indices: Vec<TensorRef<'_>> = Vec::new();
    for (t, p) in list.iter().zip(&positions) {
        match p {
            Some(p) => indices.extend((0..p.meta.ty().shape[1]).map(|k| column(p, k, t.device))),
            None => indices.push(t.clone()),
        }
    }
    let mut args = call.args.to_vec();
    args[at] = ArgRef::Tensors(indices);
    Call { args: &args, ..*call }.attempt(stream, out)
}

/// Column `k` of the positions, as a view.
fn column(p: &Positions, k: i64, device: i32) -> TensorRef<'_> {
    let (ty, strides) = (p.meta.ty(), p.meta.strides());
    TensorRef {
        place: Place::Device(&p.slot),
        dtype: Some(ty.dtype),
        sizes: &ty.shape[..1],
        strides: &strides[..1],
        offset: k * strides[1],
        contiguous: strides[0] == 1,
        wrapped: false,
        device,
        conj: false,
        neg: false,
    }
}

fn check_shape(mask: &TensorRef<'_>, dim: usize, indexed: &[i64]) -> Result<(), Refusal> {
    if dim + mask.sizes.len() > indexed.len() {
        let message = format!("too many indices for tensor of dimension {}", indexed.len());
        return Err(Error::new(ErrorKind::Index, message).into());
    }
    for (i, &n) in mask.sizes.iter().enumerate() {
        if n != indexed[dim + i] {
            let message = format!(
                "The shape of the mask {:?} at index {i} does not match the shape of the indexed tensor {indexed:?} at \
                 index {}",
                mask.sizes,
                dim + i
            );
            return Err(Error::new(ErrorKind::Index, message).into());
        }
    }
    Ok(())
}
