//! Which dtypes PyTorch takes for an `out=` tensor.

use crate::args::Arg;
use crate::dtype::{can_cast, code, cpp_name, scalar_name};
use crate::error::{self, Result, runtime, type_};
use crate::table::{Layout, Row};
use oxitorch_hlo::DType;

/// The rule of an op.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rule {
    /// Any that the result can be cast to: what TensorIterator computes.
    Castable,
    /// The result's.
    Same,
    /// Bool, or uint8 as a relic.
    Truth,
    /// That of `dtype=`; else any, and the op computes in it.
    Computed,
    /// Any.
    Any,
}

/// Ops of TensorIterator that want the result's dtype all the same.
const SAME: &[&str] = &[
    "abs",
    "binary_cross_entropy",
    "bitwise_not",
    "ceil",
    "clamp",
    "clamp_max",
    "clamp_min",
    "complex",
    "_conj_physical",
    "elu",
    "floor",
    "frac",
    "gelu",
    "glu_backward",
    "hardshrink",
    "hardsigmoid",
    "hardswish",
    "hardtanh",
    "heaviside",
    "isin",
    "isneginf",
    "isposinf",
    "leaky_relu",
    "masked_fill",
    "mish",
    "nan_to_num",
    "neg",
    "polar",
    "relu",
    "round",
    "sgn",
    "sign",
    "signbit",
    "silu",
    "softplus",
    "softshrink",
    "trunc",
    "where",
];

/// Ops with a kernel of their own that cast their result.
const CASTABLE: &[&str] = &[
    "_adaptive_avg_pool2d",
    "_adaptive_avg_pool3d",
    "_fft_c2c",
    "_fft_c2r",
    "_fft_r2c",
    "addr",
    "cat",
    "copy",
    "logsumexp",
    "mean",
    "max",
    "min",
    "mse_loss",
    "nansum",
    "norm",
    "normal",
    "normal_functional",
    "randint",
    "randperm",
    "stack",
    "std",
    "var",
];

const COMPUTED: &[&str] =
    &["arange", "cumprod", "cumsum", "eye", "full", "linspace", "logspace", "ones", "prod", "sum", "zeros"];

const ANY: &[&str] = &["bernoulli", "full_like", "ones_like", "zeros_like"];

fn rule(row: &Row) -> Rule {
    let base = row.base();
    // `max.dim` and `min.dim` are other kernels than `max` and `min`.
    let is = |list: &[&str]| {
        list.contains(&base) && !row.name.ends_with("min.dim") && !row.name.ends_with("max.dim")
    };
    match row.layout {
        _ if matches!(base, "any" | "all") => Rule::Truth,
        _ if is(COMPUTED) => Rule::Computed,
        _ if is(ANY) => Rule::Any,
        _ if is(SAME) => Rule::Same,
        _ if is(CASTABLE) => Rule::Castable,
        Layout::Pointwise => Rule::Castable,
        _ => Rule::Same,
    }
}

/// Refuses what PyTorch refuses.
pub(crate) fn check(row: &Row, result: DType, out: DType) -> Result<()> {
    let fits = match rule(row) {
        Rule::Castable => can_cast(result, out),
        Rule::Same | Rule::Computed => result == out,
        Rule::Truth => matches!(out, DType::Pred | DType::U8),
        Rule::Any => true,
    };
    let (has, wants) = (scalar_name(out), scalar_name(result));
    match rule(row) {
        _ if fits => Ok(()),
        Rule::Truth => {
            Err(runtime(format!("{} only supports bool tensor for result, got: {has}", row.base())))
        }
        Rule::Castable if matches!(row.base(), "cat" | "stack") => {
            Err(type_(format!("torch.cat(): input types can't be cast to the desired output type {has}")))
        }
        Rule::Castable => Err(error::cast(result, out)),
        Rule::Computed => Err(runtime(format!(
            "Expected out tensor to have dtype {}, but got {} instead",
            cpp_name(result),
            cpp_name(out)
        ))),
        _ => Err(runtime(match row.base() {
            "nonzero" => {
                format!("nonzero: Expected out tensor to have scalar type {wants} but got scalar type {has}")
            }
            "complex" | "polar" => {
                format!("Expected object of scalar type {wants} but got scalar type {has} for argument 'out'")
            }
            _ => format!("Found dtype {has} but expected {wants}"),
        })),
    }
}

/// Ops that resize their `out=` tensor only where its number of elements is another.
const COUNTING: &[&str] = &["arange", "linspace", "logspace"];

/// Whether an `out=` tensor of any shape will do if it has as many elements as the result.
pub fn refills(row: &Row) -> bool {
    COUNTING.contains(&row.base())
}

/// Ops whose `out=` form copies a finished result.
const COPYING: &[&str] = &["_fft_c2r", "_fft_r2c"];

/// Ops that do so unless the tensor is empty.
const COPYING_OVER: &[&str] =
    &["cholesky_inverse", "geqrf", "linalg_eig", "linalg_householder_product", "ormqr"];

/// Whether an `out=` tensor of another size gets the strides of a new result, and not row-major ones.
pub fn takes_strides(row: &Row, is_empty: bool) -> bool {
    let copies = COPYING.contains(&row.base()) || !is_empty && COPYING_OVER.contains(&row.base());
    row.layout != Layout::Contiguous && !copies
}

/// The arguments of a row that computes in the dtype of its `out=` tensor, where the caller names no other.
pub(crate) fn computed_in(row: &Row, args: &[Arg], out: DType) -> Option<Vec<Arg>> {
    if rule(row) != Rule::Computed {
        return None;
    }
    let at = row.params().iter().position(|p| (p.accepts)("ScalarType?"))?;
    let mut args = args.to_vec();
    if *args.get(at)? != Arg::None {
        return None;
    }
    args[at] = Arg::Int(code(out));
    Some(args)
}
