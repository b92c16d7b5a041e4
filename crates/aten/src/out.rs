//! What PyTorch takes for an `out=` tensor, and what becomes of it: facts of a row.

use crate::args::Arg;
use crate::dtype::{can_cast, code, cpp_name, scalar_name};
use crate::error::{self, Result, runtime, type_};
use crate::params::Param;
use oxitorch_hlo::DType;

/// Which dtypes an `out=` tensor may have.
#[derive(Clone, Copy, Debug)]
pub enum OutDtype {
    /// Any that the result can be cast to: `TensorIteratorConfig::cast_common_dtype_to_outputs`.
    Castable,
    /// The result's.
    Same,
    /// Bool, or uint8 as a relic.
    Bool,
    /// That of `dtype=`; else any, and the op computes in it.
    Computed,
    /// Any.
    Any,
    /// Those that a function takes, for ops that refuse in words of their own.
    Checked(CheckOut),
}

/// Refuses an `out=` tensor: takes the dtype of the result and that of the tensor.
pub type CheckOut = fn(DType, DType) -> Result<()>;

/// Which strides an `out=` tensor gets that had another size than its result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutStrides {
    /// Those of a new result.
    OfResult,
    /// Row-major: the op copies a finished result.
    RowMajor,
    /// As `OfResult` where the tensor was empty, else as `RowMajor`.
    OfResultIfEmpty,
}

impl OutDtype {
    /// Refuses what PyTorch refuses.
    pub(crate) fn check(self, op: &str, result: DType, out: DType) -> Result<()> {
        match self {
            OutDtype::Any => Ok(()),
            OutDtype::Checked(check) => check(result, out),
            OutDtype::Castable if can_cast(result, out) => Ok(()),
            OutDtype::Castable => Err(error::cast(result, out)),
            OutDtype::Bool if matches!(out, DType::Pred | DType::U8) => Ok(()),
            OutDtype::Bool => {
                let has = scalar_name(out);
                Err(runtime(format!("{op} only supports bool tensor for result, got: {has}")))
            }
            OutDtype::Same | OutDtype::Computed if result == out => Ok(()),
            OutDtype::Same => {
                let (has, wants) = (scalar_name(out), scalar_name(result));
                Err(runtime(format!("Found dtype {has} but expected {wants}")))
            }
            OutDtype::Computed => {
                let (has, wants) = (cpp_name(out), cpp_name(result));
                Err(runtime(format!("Expected out tensor to have dtype {wants}, but got {has} instead")))
            }
        }
    }

    /// The arguments of a row that computes in the dtype of its `out=` tensor, where the caller names no other.
    pub(crate) fn computed_in(self, params: &[Param], args: &[Arg], out: DType) -> Option<Vec<Arg>> {
        if !matches!(self, OutDtype::Computed) {
            return None;
        }
        let at = params.iter().position(|p| (p.accepts)("ScalarType?"))?;
        let mut args = args.to_vec();
        if *args.get(at)? != Arg::None {
            return None;
        }
        args[at] = Arg::Int(code(out));
        Some(args)
    }
}

/// As `at::cat` says it.
pub fn concatenated(result: DType, out: DType) -> Result<()> {
    if can_cast(result, out) {
        return Ok(());
    }
    let has = scalar_name(out);
    Err(type_(format!("torch.cat(): input types can't be cast to the desired output type {has}")))
}

/// As `at::nonzero_out` says it.
pub fn positions(result: DType, out: DType) -> Result<()> {
    if result == out {
        return Ok(());
    }
    let (has, wants) = (scalar_name(out), scalar_name(result));
    Err(runtime(format!(
        "nonzero: Expected out tensor to have scalar type {wants} but got scalar type {has}"
    )))
}

/// As `at::complex_out` and `at::polar_out` say it.
pub fn of_parts(result: DType, out: DType) -> Result<()> {
    if result == out {
        return Ok(());
    }
    let (has, wants) = (scalar_name(out), scalar_name(result));
    Err(runtime(format!(
        "Expected object of scalar type {wants} but got scalar type {has} for argument 'out'"
    )))
}
