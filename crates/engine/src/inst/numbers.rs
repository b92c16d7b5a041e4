//! The whole numbers of an instance, most of which are sizes, apart from all else that it is.

use super::Kind;
use crate::view::Shape;
use oxitorch_aten::Arg;
use oxitorch_aten::args::TensorArg;
use oxitorch_aten::lower::Dest;
use oxitorch_hlo::TensorType;

impl Kind {
    /// It with zeros for its whole numbers, and what these are: sizes, strides, and attributes.
    pub(crate) fn without_numbers(&self) -> (Kind, Vec<i64>) {
        let (mut kind, mut numbers) = (self.clone(), Vec::new());
        kind.each_number(&mut |n| numbers.push(std::mem::take(n)));
        (kind, numbers)
    }

    /// It with other whole numbers: as many as it has.
    pub(crate) fn with_numbers(&self, numbers: impl IntoIterator<Item = i64>) -> Kind {
        let (mut kind, mut numbers) = (self.clone(), numbers.into_iter());
        kind.each_number(&mut |n| *n = numbers.next().unwrap_or(*n));
        kind
    }

    fn each_number(&mut self, f: &mut impl FnMut(&mut i64)) {
        match self {
            Kind::Row { args, dests, .. } => {
                args.iter_mut().for_each(|arg| each_of_arg(arg, f));
                for dest in dests {
                    match dest {
                        Dest::Refill(ty) | Dest::Into(ty) => each_of_type(ty, f),
                        Dest::New | Dest::Cast(_) | Dest::Resized(_) => {}
                    }
                }
            }
            Kind::Read { base, shape } | Kind::Write { base, shape } => {
                each_of_type(base, f);
                let mut view = shape.at_zero().clone();
                view.sizes.iter_mut().chain(&mut view.strides).for_each(f);
                *shape = Shape::of(&view, base);
            }
            Kind::Store { from: ty, .. } | Kind::Cast { from: ty, .. } | Kind::Copy(ty) | Kind::Zeros(ty) => {
                each_of_type(ty, f);
            }
            Kind::Resize { from, to } => {
                each_of_type(from, f);
                each_of_type(to, f);
            }
            // Of these nobody asks at another size.
            Kind::Fence { .. }
            | Kind::Reload { .. }
            | Kind::Reshard { .. }
            | Kind::Collective(_)
            | Kind::Control(_) => {}
        }
    }
}

fn each_of_type(ty: &mut TensorType, f: &mut impl FnMut(&mut i64)) {
    ty.shape.iter_mut().for_each(f);
}

fn each_of_arg(arg: &mut Arg, f: &mut impl FnMut(&mut i64)) {
    let mut tensor = |t: &mut TensorArg| t.ty.shape.iter_mut().chain(&mut t.strides).for_each(&mut *f);
    match arg {
        Arg::Tensor(t) => tensor(t),
        Arg::Tensors(list) => list.iter_mut().flatten().for_each(tensor),
        Arg::Int(n) => f(n),
        Arg::Ints(list) => list.iter_mut().for_each(f),
        Arg::None
        | Arg::Scalar(_)
        | Arg::Float(_)
        | Arg::Bool(_)
        | Arg::Complex(..)
        | Arg::Floats(_)
        | Arg::Bools(_)
        | Arg::Str(_)
        | Arg::Rng(_)
        | Arg::Offset(_)
        | Arg::Offsets(..) => {}
    }
}
