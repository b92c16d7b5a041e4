//! Op instances: an op with the types of its operands and its attributes, lowered once to learn what it returns.
//!
//! Instances are interned, so that recording the same op again costs one hash and one comparison, and a window of ops is
//! identified by the instances' numbers.

mod control;
mod emit;
mod instances;
mod key;
mod numbers;
mod strides;

pub(crate) use control::{Body, Code, Control, Flow, Input};
pub(crate) use instances::{Access, Instances, refusal};
pub(crate) use key::Key;

use crate::collective::Exchange;
use crate::config::Lowering;
use crate::error::ErrorKind;
use crate::shared::Shared;
use crate::spread::Sharded;
use crate::strided::row_major;
use crate::view::{Shape, dense_order};
use emit::emit;
use oxitorch_aten::args::Offset;
use oxitorch_aten::lower::Dest;
use oxitorch_aten::{self as aten, Arg, OpId};
use oxitorch_hlo::{Builder, DType, Dims, MemorySpace, Sharding, TensorType, Value};
use smallvec::SmallVec;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

/// What an instance computes, and from what: equal kinds are one instance.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Kind {
    /// A row of the op table. The arguments hold the types of the operands.
    Row { op: OpId, args: Vec<Arg>, dests: SmallVec<[Dest; 1]>, format: Format, lowering: Lowering },
    /// The elements of a view of a storage's value.
    Read { base: TensorType, shape: Shape },
    /// A storage's value with a view of it overwritten by operand 1.
    Write { base: TensorType, shape: Shape },
    /// A tensor that covers its storage, with its dimensions in the storage's order.
    Store { from: TensorType, order: Dims },
    /// A tensor in another dtype.
    Cast { from: TensorType, to: DType },
    /// A value of its own with the same elements.
    Copy(TensorType),
    /// A value behind a barrier, and behind another value if there is one: see `fence.rs`.
    Fence { ty: TensorType, after: Option<TensorType>, firmly: bool },
    /// A value of the host, on the device again, and no sooner than another value: see `fence.rs`.
    Reload { ty: TensorType, after: TensorType },
    /// Zeros, as a storage holds that nobody wrote.
    Zeros(TensorType),
    /// A value as another type over the same bytes, cut or filled with zeros.
    Resize { from: TensorType, to: TensorType },
    /// A value, cut so over the devices of a mesh.
    Reshard { from: TensorType, to: Arc<Sharding> },
    /// What the members of groups of devices do together: a program of its own.
    Collective(Arc<Exchange>),
    /// A loop, or one of two branches.
    Control(Arc<Control>),
}

/// The strides that a `memory_format=` argument asks for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) enum Format {
    /// Those of the row's layout.
    #[default]
    Preserve,
    /// Row-major.
    Contiguous,
    /// Dimension 1 fastest.
    ChannelsLast,
}

impl Format {
    /// From the code of a `c10::MemoryFormat`.
    pub(crate) fn from_code(code: i64) -> Format {
        match code {
            0 => Format::Contiguous,
            2 | 3 => Format::ChannelsLast,
            _ => Format::Preserve,
        }
    }
}

impl Kind {
    /// The shape of the view that is read or written.
    pub(crate) fn shape(&self) -> Option<&Shape> {
        match self {
            Kind::Read { shape, .. } | Kind::Write { shape, .. } => Some(shape),
            _ => None,
        }
    }

    /// The types of the operands.
    fn operands(&self) -> Vec<TensorType> {
        match self {
            Kind::Row { args, .. } => row_operands(args),
            Kind::Read { base, .. } => vec![base.clone()],
            Kind::Write { base, shape } => vec![base.clone(), shape.ty()],
            Kind::Store { from, .. }
            | Kind::Cast { from, .. }
            | Kind::Resize { from, .. }
            | Kind::Reshard { from, .. } => vec![from.clone()],
            Kind::Collective(exchange) => vec![exchange.ty.clone()],
            Kind::Control(control) => control.operands.clone(),
            Kind::Copy(ty) => vec![ty.clone()],
            Kind::Fence { ty, after, .. } => std::iter::once(ty).chain(after).cloned().collect(),
            Kind::Reload { ty, after } => vec![ty.clone(), after.clone()],
            Kind::Zeros(_) => Vec::new(),
        }
    }

    /// How many offsets it takes.
    fn offsets(&self) -> usize {
        match self {
            Kind::Row { args, .. } => {
                let count = |a: &Arg| match a {
                    Arg::Offset(_) => 1,
                    Arg::Offsets(_, n) => *n as usize,
                    _ => 0,
                };
                args.iter().map(count).sum()
            }
            Kind::Read { shape, .. } | Kind::Write { shape, .. } => shape.offsets(),
            Kind::Control(control) => control.insts().map(|inst| inst.offsets).sum(),
            _ => 0,
        }
    }
}

/// The types of a row's operands, in the order of their numbers.
fn row_operands(args: &[Arg]) -> Vec<TensorType> {
    let mut types: Vec<(u32, TensorType)> = Vec::new();
    for arg in args {
        match arg {
            Arg::Tensor(t) => types.push((t.operand, t.ty.clone())),
            Arg::Tensors(list) => types.extend(list.iter().flatten().map(|t| (t.operand, t.ty.clone()))),
            Arg::Scalar(s) => types.push((s.operand, TensorType::scalar(s.kind.dtype()))),
            Arg::Rng(operand) => types.push((*operand, TensorType::new(DType::U64, Dims::from_elem(2, 1)))),
            _ => {}
        }
    }
    types.sort_by_key(|(operand, _)| *operand);
    types.into_iter().map(|(_, ty)| ty).collect()
}

/// A result of an instance.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Out {
    /// As the op gives it.
    pub(crate) ty: TensorType,
    /// Strides of the tensor that PyTorch will see.
    pub(crate) strides: Dims,
    /// Whether those are row-major.
    pub(crate) contiguous: bool,
    /// As the storage holds it: `ty` with the dimensions in the order of their strides.
    pub(crate) stored: TensorType,
    /// Size of that.
    pub(crate) bytes: u64,
    /// That order, unless it is the identity.
    pub(crate) order: Option<Dims>,
    /// The operand that it is, unchanged.
    pub(crate) same_as: Option<u32>,
    /// How it is cut over a mesh.
    pub(crate) sharding: Sharded,
}

impl Out {
    pub(crate) fn new(ty: TensorType, strides: Option<Dims>) -> Out {
        let strides = strides.unwrap_or_else(|| row_major(&ty.shape));
        let permuted = |o: &Dims| ty.numel() > 0 && o.windows(2).any(|w| w[0] > w[1]);
        let order = dense_order(&ty.shape, &strides).filter(permuted);
        let stored = match &order {
            Some(o) => TensorType::new(ty.dtype, o.iter().map(|&d| ty.shape[d as usize]).collect::<Dims>()),
            None => ty.clone(),
        };
        let contiguous = strides == row_major(&ty.shape);
        let bytes = stored.bytes().max(0) as u64;
        Out { ty, strides, contiguous, stored, bytes, order, same_as: None, sharding: None }
    }
}

/// An interned op instance.
#[derive(Debug)]
pub(crate) struct Inst {
    /// Its number; equal numbers are equal instances.
    pub(crate) id: u32,
    pub(crate) kind: Kind,
    /// How many offsets it takes.
    pub(crate) offsets: usize,
    /// Those that are recorded: without the [unused](Inst::is_unused) ones.
    pub(crate) operands: Vec<TensorType>,
    /// Operands that the lowering looks at the type of, and no more: by number.
    unused: Vec<u32>,
    /// Bits of the row's parameters that are such operands.
    unused_params: u64,
    /// Whether the operands of a call need more than to be taken, which is rare.
    pub(crate) careful: bool,
    /// Whether there is one result, which has to be computed, and nothing else.
    plain: bool,
    /// Whether it is to come behind what is computed before it; see `fence.rs`.
    pub(crate) waits: bool,
    /// Whether it is computed though nobody can see its results.
    pub(crate) only_asserts: bool,
    pub(crate) outputs: SmallVec<[Option<Shared<Out>>; 1]>,
    /// Size of those.
    pub(crate) bytes: u64,
    /// Size of those that XLA does not fuse into what reads them.
    pub(crate) kept: u64,
    /// Philox blocks that one execution uses.
    pub(crate) rng_blocks: u64,
    /// What can be wrong with values, in the order in which the checks are emitted.
    pub(crate) checks: Vec<(ErrorKind, String)>,
    identity: bool,
    /// When it was looked for last; see [`Instances::clock`].
    used: AtomicU32,
}

/// What lowering an instance gave.
pub(crate) struct Emitted {
    /// As the storages hold them.
    pub(crate) outputs: Vec<Option<Value>>,
    pub(crate) checks: Vec<Value>,
    rng_blocks: u64,
    messages: Vec<(ErrorKind, String)>,
}

impl Inst {
    /// The name for messages and for programs.
    pub(crate) fn name(&self) -> &'static str {
        match &self.kind {
            Kind::Row { op, .. } => aten::row(*op).name,
            Kind::Read { .. } => "view",
            Kind::Write { .. } => "copy_into_view",
            Kind::Store { .. } | Kind::Cast { .. } | Kind::Copy(_) => "copy",
            Kind::Fence { .. } => "optimization_barrier",
            Kind::Reload { .. } => "oxitorch::_reload",
            Kind::Zeros(_) => "empty",
            Kind::Resize { .. } => "resize",
            Kind::Reshard { .. } => "reshard",
            Kind::Collective(exchange) => exchange.what.name(),
            Kind::Control(control) => control.name,
        }
    }

    /// Its results.
    pub(crate) fn results(&self) -> impl Iterator<Item = Option<&Out>> {
        self.outputs.iter().map(|o| o.as_deref())
    }

    /// Whether it may fail when it runs: a kernel of torch's that may find no solution.
    pub(crate) fn may_fail(&self) -> bool {
        match &self.kind {
            Kind::Row { op, lowering, .. } => lowering.config.target.library && aten::row(*op).may_fail,
            Kind::Control(control) => control.insts().any(|inst| inst.may_fail()),
            _ => false,
        }
    }

    /// If it does nothing but take its operand to another memory space.
    pub(crate) fn memory(&self) -> Option<MemorySpace> {
        match &self.kind {
            Kind::Row { op, .. } => aten::row(*op).memory,
            Kind::Reload { .. } => Some(MemorySpace::Device),
            _ => None,
        }
    }

    /// Whether every result is an operand, so that nothing has to be computed.
    pub(crate) fn is_identity(&self) -> bool {
        self.identity
    }

    /// Whether the value of this parameter of the row does not matter: what `fill_` overwrites, for example.
    pub(crate) fn is_unused(&self, param: usize) -> bool {
        self.unused_params >> param & 1 == 1
    }

    /// Whether a call needs nothing but its operands recorded, and gives one new tensor.
    pub(crate) fn is_plain(&self) -> bool {
        self.plain
    }

    /// Whether it overwrites a view of its first operand.
    pub(crate) fn is_write(&self) -> bool {
        matches!(self.kind, Kind::Write { .. })
    }

    /// What its offsets say where in, if they say where a view of its first operand begins: the dtype and the stride of
    /// each dimension.
    pub(crate) fn along(&self) -> impl Iterator<Item = (DType, i64)> {
        self.kind.shape().into_iter().flat_map(|shape| shape.along().map(|stride| (shape.ty().dtype, stride)))
    }

    /// Lowers the instance on these operands, with these offsets.
    pub(crate) fn emit(
        &self,
        b: &Builder,
        operands: &[Value],
        offsets: &[Offset],
    ) -> Result<Emitted, aten::Error> {
        let mut all = operands.to_vec();
        if !self.unused.is_empty() {
            let types = self.kind.operands();
            for &i in &self.unused {
                let ty = &types[i as usize];
                all.insert(i as usize, b.full(b.scalar_f64(ty.dtype, 0.0), &ty.shape));
            }
        }
        let mut e = emit(&self.kind, b, &all, offsets)?;
        for (v, out) in e.outputs.iter_mut().zip(&self.outputs) {
            if let (Some(v), Some(order)) = (v, out.as_ref().and_then(|o| o.order.as_ref())) {
                *v = b.transpose(*v, order);
            }
        }
        Ok(e)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_permuted_result_is_stored_in_its_order() {
        let out = Out::new(TensorType::new(DType::F32, vec![2, 3]), Some(Dims::from_slice(&[1, 2])));
        assert_eq!(out.stored.shape.as_slice(), [3, 2]);
        assert_eq!(out.order.as_deref(), Some(&[1, 0][..]));
    }
}
