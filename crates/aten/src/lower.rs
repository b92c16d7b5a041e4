//! Running a row: the door that lowerings are called through.

use crate::args::{Arg, Offset, Scalar, Tensor};
use crate::context::{Check, Config, Ctx};
use crate::domain::Operand;
use crate::dtype::can_cast;
use crate::error::{self, Error, Result, runtime};
use crate::params::{FromArg, IntoOutputs, arity};
use crate::pointwise::{binary, compare, unary};
use crate::row::{Row, Rule};
use crate::table::{OpId, row};
use oxitorch_hlo::{Builder, DType, TensorType, Value};

/// What a lowering produced.
#[derive(Clone, Debug)]
pub struct Lowered {
    /// Schema order, lists flattened. For rows that write to arguments: the new value of each written tensor in order,
    /// then the returns that are no alias.
    pub outputs: Vec<Option<Value>>,
    /// Philox counter blocks of 128 bits that were used; the generator's offset advances by as many.
    pub rng_blocks: u64,
    /// Conditions to verify after the program ran.
    pub checks: Vec<Check>,
}

/// Where a result goes.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Dest {
    /// A new tensor: as the row gives it.
    New,
    /// An `out=` tensor of this dtype and the result's size.
    Cast(DType),
    /// An `out=` tensor of this dtype and another size; it gets the result's size and strides.
    Resized(DType),
    /// The same for an op that only counts elements: where they are as many, the shape stays too.
    Refill(TensorType),
    /// An argument that is overwritten: dtype and shape stay.
    Into(TensorType),
}

/// Lowers one recorded op.
pub fn lower(
    op: OpId,
    b: &Builder,
    config: &Config,
    args: &[Arg],
    operands: &[Value],
    offsets: &[Offset],
) -> Result<Lowered> {
    lower_into(op, b, config, args, operands, offsets, &[])
}

/// Lowers one recorded op whose results go to these places (missing entries are new tensors).
pub fn lower_into(
    op: OpId,
    b: &Builder,
    config: &Config,
    args: &[Arg],
    operands: &[Value],
    offsets: &[Offset],
    dests: &[Dest],
) -> Result<Lowered> {
    let row = row(op);
    let c = Ctx::new(row.name, row.products, b, config, operands, offsets);
    let cast = |d: &Dest| match d {
        Dest::Cast(dtype) | Dest::Resized(dtype) => Some(*dtype),
        Dest::Refill(ty) => Some(ty.dtype),
        _ => None,
    };
    let computed_in = |dtype| row.out_dtypes().computed_in(row.params(), args, dtype);
    let computed = dests.iter().find_map(cast).and_then(computed_in);
    let into = dests.iter().find_map(|d| if let Dest::Into(ty) = d { Some(ty.dtype) } else { None });
    // Rows without a check may take tensors of dtypes that have nothing in common, such as indices.
    let dtype = if row.check_dtype.is_some() { promoted(&c, args)? } else { None };
    check_dtype(row, dtype, into)?;
    let mut outputs = run(row, &c, computed.as_deref().unwrap_or(args))?;
    if dtype.is_none() {
        check_dtype(row, outputs.first().copied().flatten().map(|v| c.dtype(v)), into)?;
    }
    for (out, dest) in outputs.iter_mut().zip(dests) {
        *out = out.map(|v| deliver(row, &c, v, dest)).transpose()?;
    }
    if let Some(e) = b.error() {
        return Err(misfit(row, &e, args));
    }
    let (rng_blocks, checks) = c.taken();
    Ok(Lowered { outputs, rng_blocks, checks })
}

/// Asks a row about the dtype of its tensors; of its result, if it takes none.
fn check_dtype(row: &Row, dtype: Option<DType>, into: Option<DType>) -> Result<()> {
    let (Some(check), Some(dtype)) = (row.check_dtype, dtype) else { return Ok(()) };
    match into {
        Some(to) if !can_cast(dtype, to) => Err(error::cast(dtype, to)),
        _ => check(Operand { op: row.base(), dtype, in_place: into.is_some() }),
    }
}

/// The dtype that the tensors among the arguments promote to.
fn promoted(c: &Ctx, args: &[Arg]) -> Result<Option<DType>> {
    let tensors = args.iter().filter(|a| matches!(a, Arg::Tensor(_)));
    let tensors: Vec<Tensor> = tensors.map(|a| Tensor::from_arg(c, a)).collect::<Result<_>>()?;
    if tensors.is_empty() { Ok(None) } else { c.result_type(&tensors).map(Some) }
}

/// An op that StableHLO does not have for an element type is one that torch has no kernel for.
fn misfit(row: &Row, e: &oxitorch_hlo::Error, args: &[Arg]) -> Error {
    let dtype = args.iter().find_map(|a| match a {
        Arg::Tensor(t) => Some(t.ty.dtype),
        Arg::Tensors(l) => l.iter().flatten().next().map(|t| t.ty.dtype),
        _ => None,
    });
    match (e, dtype) {
        (oxitorch_hlo::Error::ElementType { .. }, Some(dtype)) => error::not_implemented(row.base(), dtype),
        _ => runtime(e.to_string()),
    }
}

fn deliver(row: &Row, c: &Ctx, v: Value, dest: &Dest) -> Result<Value> {
    match dest {
        Dest::New => Ok(v),
        Dest::Cast(dtype) | Dest::Resized(dtype) => {
            row.out_dtypes().check(row.base(), c.dtype(v), *dtype)?;
            Ok(c.to(v, *dtype))
        }
        Dest::Refill(ty) => {
            row.out_dtypes().check(row.base(), c.dtype(v), ty.dtype)?;
            let v = c.to(v, ty.dtype);
            Ok(if c.numel(v) == ty.numel() { c.reshape(v, &ty.shape) } else { v })
        }
        Dest::Into(ty) if !can_cast(c.dtype(v), ty.dtype) => Err(error::cast(c.dtype(v), ty.dtype)),
        Dest::Into(ty) if c.shape(v) != ty.shape => Err(error::in_place_shape(&ty.shape, &c.shape(v))),
        Dest::Into(ty) => Ok(c.to(v, ty.dtype)),
    }
}

fn run(row: &Row, c: &Ctx, args: &[Arg]) -> Result<Vec<Option<Value>>> {
    match (&row.rule, args) {
        (Rule::Unary(p, f), [x]) => unary(c, *p, row.library, *f, Tensor::from_arg(c, x)?).into_outputs(),
        (Rule::Binary(p, f), [x, y]) => {
            binary(c, *p, row.library, *f, Tensor::from_arg(c, x)?, Tensor::from_arg(c, y)?).into_outputs()
        }
        (Rule::Compare(dir), [x, y]) => {
            compare(c, *dir, Tensor::from_arg(c, x)?, Tensor::from_arg(c, y)?).into_outputs()
        }
        (Rule::CompareScalar(dir), [x, y]) => {
            compare(c, *dir, Tensor::from_arg(c, x)?, Scalar::from_arg(c, y)?.tensor()).into_outputs()
        }
        (Rule::Custom(f), args) => f.lower(c, args),
        (rule, args) => Err(arity(rule.params().len(), args.len())),
    }
}
