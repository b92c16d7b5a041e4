//! What can go wrong in a lowering, with the words and the class that torch uses.

use crate::dtype::{scalar_name, shape_text};
use oxitorch_hlo::DType;

/// The result of a lowering.
pub type Result<T> = std::result::Result<T, Error>;

/// The Python class that torch raises.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// `RuntimeError`
    Runtime,
    /// `IndexError`
    Index,
    /// `TypeError`
    Type,
    /// `ValueError`
    Value,
    /// `NotImplementedError`
    NotImplemented,
    /// `torch.linalg.LinAlgError`
    LinAlg,
}

/// A failed lowering: the message is torch's own, without the op's name in front.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// Wrong shapes, dtypes or values that torch answers with a `RuntimeError`.
    #[error("{0}")]
    Runtime(String),
    /// A dimension or an index out of range.
    #[error("{0}")]
    Index(String),
    /// An argument of the wrong type.
    #[error("{0}")]
    Type(String),
    /// An argument of the right type and a wrong value.
    #[error("{0}")]
    Value(String),
    /// A dtype that torch has no kernel for either.
    #[error("{0}")]
    NotImplemented(String),
    /// A legal call that no lowering covers: the caller runs it on the CPU and counts that.
    #[error("no lowering: {0}")]
    Unsupported(String),
}

impl Error {
    /// The Python class to raise; an unsupported call is `NotImplemented` if it must be raised at all.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Error::Runtime(_) => ErrorKind::Runtime,
            Error::Index(_) => ErrorKind::Index,
            Error::Type(_) => ErrorKind::Type,
            Error::Value(_) => ErrorKind::Value,
            Error::NotImplemented(_) | Error::Unsupported(_) => ErrorKind::NotImplemented,
        }
    }
}

/// A `RuntimeError` with this text.
pub fn runtime(message: impl Into<String>) -> Error {
    Error::Runtime(message.into())
}

/// An `IndexError` with this text.
pub fn index(message: impl Into<String>) -> Error {
    Error::Index(message.into())
}

/// A `ValueError` with this text.
pub fn value(message: impl Into<String>) -> Error {
    Error::Value(message.into())
}

/// A `TypeError` with this text.
pub fn type_(message: impl Into<String>) -> Error {
    Error::Type(message.into())
}

/// A legal call that no lowering covers.
pub fn unsupported(what: impl Into<String>) -> Error {
    Error::Unsupported(what.into())
}

/// torch has no kernel for this dtype: `"exp" not implemented for 'Half'`.
pub fn not_implemented(kernel: &str, dtype: DType) -> Error {
    Error::NotImplemented(format!("\"{kernel}\" not implemented for '{}'", scalar_name(dtype)))
}

/// Sizes, strides and paddings that are multiplied and added later, and that torch's kernels take in 32 bits.
pub fn in_32_bits(numbers: &[i64]) -> Result<()> {
    match numbers.iter().all(|&n| i32::try_from(n).is_ok()) {
        true => Ok(()),
        false => Err(runtime(format!("integer out of range: {}", shape_text(numbers)))),
    }
}

/// Two sizes that do not broadcast.
pub fn size_mismatch(a: i64, b: i64, dim: usize) -> Error {
    runtime(format!(
        "The size of tensor a ({a}) must match the size of tensor b ({b}) at non-singleton dimension {dim}"
    ))
}

/// A dimension out of range of a tensor of rank `rank`.
pub fn dim_range(dim: i64, rank: usize) -> Error {
    let rank = (rank as i64).max(1);
    index(format!(
        "Dimension out of range (expected to be in range of [{}, {}], but got {dim})",
        -rank,
        rank - 1
    ))
}

/// A result that its destination cannot hold.
pub fn cast(from: DType, to: DType) -> Error {
    runtime(format!(
        "result type {} can't be cast to the desired output type {}",
        scalar_name(from),
        scalar_name(to)
    ))
}

/// A result whose shape is not the destination's, for in-place ops.
pub fn in_place_shape(to: &[i64], from: &[i64]) -> Error {
    runtime(format!(
        "output with shape {} doesn't match the broadcast shape {}",
        shape_text(to),
        shape_text(from)
    ))
}

/// An expansion that is not one.
pub fn expand(from: &[i64], to: &[i64]) -> Error {
    let Some(skip) = to.len().checked_sub(from.len()) else {
        return runtime(format!(
            "expand: the number of sizes provided ({}) must be greater or equal to the number of dimensions in the \
             tensor ({})",
            to.len(),
            from.len()
        ));
    };
    // torch looks from the last dimension on.
    let dim =
        (skip..to.len()).rev().find(|&d| from[d - skip] != to[d] && from[d - skip] != 1).unwrap_or(skip);
    runtime(format!(
        "The expanded size of the tensor ({}) must match the existing size ({}) at non-singleton dimension {dim}.  \
         Target sizes: {}.  Tensor sizes: {}",
        to.get(dim).unwrap_or(&0),
        from.get(dim - skip).unwrap_or(&0),
        shape_text(to),
        shape_text(from)
    ))
}
