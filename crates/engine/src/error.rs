//! What reaches the user: an error class of PyTorch's and a message that names op, shapes, dtypes and the Python line.

use crate::site::{Site, describe};
use oxitorch_aten::ErrorKind as OpError;
use std::sync::Arc;

/// The Python exception class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
    /// `torch.OutOfMemoryError`
    OutOfMemory,
    /// `torch.linalg.LinAlgError`
    LinAlg,
    /// `KeyboardInterrupt`: a signal ended a wait
    Interrupted,
}

impl From<OpError> for ErrorKind {
    fn from(kind: OpError) -> Self {
        match kind {
            OpError::Runtime => ErrorKind::Runtime,
            OpError::Index => ErrorKind::Index,
            OpError::Type => ErrorKind::Type,
            OpError::Value => ErrorKind::Value,
            OpError::NotImplemented => ErrorKind::NotImplemented,
            OpError::LinAlg => ErrorKind::LinAlg,
        }
    }
}

/// An error that has its final words. Cheap to clone: every value that depends on a failed one carries it.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{message}")]
pub struct Error {
    /// The Python exception class.
    pub kind: ErrorKind,
    /// The whole text.
    pub message: Arc<str>,
    /// Whether the text names the Python line.
    placed: bool,
}

/// The result of an engine call.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// An error with this text.
    pub fn new(kind: ErrorKind, message: impl AsRef<str>) -> Self {
        Error { kind, message: message.as_ref().into(), placed: false }
    }

    /// A `RuntimeError`.
    pub fn runtime(message: impl AsRef<str>) -> Self {
        Self::new(ErrorKind::Runtime, message)
    }

    /// A `RuntimeError` about a device that is not among so many.
    pub fn no_device(index: usize, count: usize) -> Self {
        Self::runtime(format!("tpu device index {index} does not exist: there are {count} device(s)"))
    }

    /// The same error with the Python line that asked for the op.
    pub fn at(self, site: Site) -> Self {
        match describe(site) {
            Some(line) if !self.placed => Error {
                message: format!("{}\n  called at {line}", self.message).into(),
                placed: true,
                ..self
            },
            _ => self,
        }
    }

    /// Whether the text already says where it happened.
    pub(crate) fn is_placed(&self) -> bool {
        self.placed
    }
}

/// What a dispatch can answer besides a result.
#[derive(Clone, Debug)]
pub enum Refusal {
    /// The op is legal and has no lowering for these arguments: run it on the CPU, and count that.
    Fallback(String),
    /// An error for the user.
    Error(Error),
}

impl From<Error> for Refusal {
    fn from(e: Error) -> Self {
        Refusal::Error(e)
    }
}

/// A device error in the words of PyTorch.
pub(crate) fn device(what: &str, e: &oxitorch_pjrt::Error) -> Error {
    let text = format!("{what}: {e}");
    match e {
        oxitorch_pjrt::Error::OutOfMemory { .. } => Error::new(ErrorKind::OutOfMemory, text),
        // The only host functions that say so are torch's kernels, where torch raises `LinAlgError`.
        oxitorch_pjrt::Error::NoResult { .. } => Error::new(ErrorKind::LinAlg, text),
        _ => Error::runtime(text),
    }
}
