//! Kinds that are the same but for numbers that follow from a size, and what they are at another one.

use super::Kind;
use crate::view::{Pairs, dims};
use oxitorch_aten::Arg;
use oxitorch_aten::args::TensorArg;
use oxitorch_aten::lower::Dest;
use oxitorch_hlo::TensorType;

fn ty(a: &TensorType, b: &TensorType, f: &mut Pairs<'_>) -> Option<TensorType> {
    let shape = dims(&a.shape, &b.shape, f)?;
    (a.dtype == b.dtype).then(|| TensorType::new(a.dtype, shape))
}

fn tensor(a: &TensorArg, b: &TensorArg, f: &mut Pairs<'_>) -> Option<TensorArg> {
    let same = (a.operand, a.wrapped) == (b.operand, b.wrapped);
    let made = TensorArg { ty: ty(&a.ty, &b.ty, f)?, strides: dims(&a.strides, &b.strides, f)?, ..a.clone() };
    same.then_some(made)
}

fn arg(a: &Arg, b: &Arg, f: &mut Pairs<'_>) -> Option<Arg> {
    let list = |a: &Option<TensorArg>, b: &Option<TensorArg>, f: &mut Pairs<'_>| match (a, b) {
        (None, None) => Some(None),
        (Some(a), Some(b)) => tensor(a, b, f).map(Some),
        _ => None,
    };
    match (a, b) {
        (Arg::Tensor(a), Arg::Tensor(b)) => tensor(a, b, f).map(Arg::Tensor),
        (Arg::Tensors(a), Arg::Tensors(b)) if a.len() == b.len() => {
            a.iter().zip(b).map(|(a, b)| list(a, b, f)).collect::<Option<_>>().map(Arg::Tensors)
        }
        (Arg::Int(a), Arg::Int(b)) => f(*a, *b).map(Arg::Int),
        (Arg::Ints(a), Arg::Ints(b)) => dims(a, b, f).map(Arg::Ints),
        _ => (a == b).then(|| a.clone()),
    }
}

fn dest(a: &Dest, b: &Dest, f: &mut Pairs<'_>) -> Option<Dest> {
    match (a, b) {
        (Dest::Into(a), Dest::Into(b)) => ty(a, b, f).map(Dest::Into),
        (Dest::Refill(a), Dest::Refill(b)) => ty(a, b, f).map(Dest::Refill),
        _ => (a == b).then(|| a.clone()),
    }
}

impl Kind {
    /// The kind that has what `f` says where this one and another differ; none if they differ in more than numbers.
    pub(crate) fn resized(&self, other: &Kind, f: &mut Pairs<'_>) -> Option<Kind> {
        Some(match (self, other) {
            (
                Kind::Row { op, args, dests, format, lowering },
                Kind::Row { op: op_b, args: args_b, dests: dests_b, format: format_b, lowering: lowering_b },
            ) => {
                let same = (op, format, lowering) == (op_b, format_b, lowering_b)
                    && (args.len(), dests.len()) == (args_b.len(), dests_b.len());
                let args = args.iter().zip(args_b).map(|(a, b)| arg(a, b, f)).collect::<Option<_>>()?;
                let dests = dests.iter().zip(dests_b).map(|(a, b)| dest(a, b, f)).collect::<Option<_>>()?;
                let (op, format, lowering) = (*op, *format, lowering.clone());
                return same.then_some(Kind::Row { op, args, dests, format, lowering });
            }
            (Kind::Read { base, shape }, Kind::Read { base: base_b, shape: shape_b }) => {
                Kind::Read { base: ty(base, base_b, f)?, shape: shape.resized(shape_b, f)? }
            }
            (Kind::Write { base, shape }, Kind::Write { base: base_b, shape: shape_b }) => {
                Kind::Write { base: ty(base, base_b, f)?, shape: shape.resized(shape_b, f)? }
            }
            (Kind::Store { from, order }, Kind::Store { from: from_b, order: order_b }) => {
                let from = ty(from, from_b, f)?;
                return (order == order_b).then(|| Kind::Store { from, order: order.clone() });
            }
            (Kind::Cast { from, to }, Kind::Cast { from: from_b, to: to_b }) => {
                let from = ty(from, from_b, f)?;
                return (to == to_b).then_some(Kind::Cast { from, to: *to });
            }
            (Kind::Copy(a), Kind::Copy(b)) => Kind::Copy(ty(a, b, f)?),
            (Kind::Zeros(a), Kind::Zeros(b)) => Kind::Zeros(ty(a, b, f)?),
            (Kind::Resize { from, to }, Kind::Resize { from: from_b, to: to_b }) => {
                Kind::Resize { from: ty(from, from_b, f)?, to: ty(to, to_b, f)? }
            }
            _ => return (self == other).then(|| self.clone()),
        })
    }
}
