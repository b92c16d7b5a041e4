//! What can go wrong, by what a caller can do about it.

use std::fmt;
use std::path::PathBuf;

use crate::platform::Platform;

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of a plugin, or of a check made before the plugin was called.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No plugin library for a platform was found; `hint` says what to install.
    #[error("no PJRT plugin for platform `{platform}` was found; hint: {hint}")]
    PluginNotFound {
        /// The platform asked for.
        platform: Platform,
        /// What to do about it.
        hint: String,
    },
    /// A library could not be loaded, or is no plugin.
    #[error("cannot load PJRT plugin `{}`: {reason}", path.display())]
    Load {
        /// The library.
        path: PathBuf,
        /// The loader's message.
        reason: String,
    },
    /// The plugin's C API is not one that this crate can use.
    #[error("incompatible PJRT plugin: {reason}")]
    Incompatible {
        /// What does not fit.
        reason: String,
    },
    /// The environment holds something that would make the plugin abort the process.
    #[error("environment variable `{name}`: {reason}")]
    Environment {
        /// The variable.
        name: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The plugin works and there is no device for it.
    #[error("no {platform} device: {message}")]
    NoDevice {
        /// The platform asked for.
        platform: Platform,
        /// The plugin's message.
        message: String,
    },
    /// Device memory (or, for the CPU platform, host memory) does not suffice.
    #[error("out of memory: {message}")]
    OutOfMemory {
        /// The plugin's message.
        message: String,
    },
    /// The buffer's memory is gone: it was donated to a launch, or deleted.
    #[error("{what}: the buffer was donated or deleted")]
    Deleted {
        /// The operation, and which of its buffers.
        what: String,
    },
    /// Serialized bytes are not what `Compiled::serialize` gave, or are another plugin's.
    #[error("serialized executable: {reason}")]
    BadSerialized {
        /// What does not fit.
        reason: String,
    },
    /// An argument was refused before the plugin saw it.
    #[error("{message}")]
    InvalidArgument {
        /// What was expected and what was given.
        message: String,
    },
    /// The compiler refused the program or its options.
    #[error("compilation failed ({code}): {message}")]
    CompileFailed {
        /// The plugin's status code.
        code: Code,
        /// The plugin's message.
        message: String,
    },
    /// The plugin lacks a function or an extension.
    #[error("the {platform} plugin (PJRT API {}.{}) does not support {what}", version.0, version.1)]
    Unsupported {
        /// The platform of the plugin.
        platform: Platform,
        /// The plugin's C API version.
        version: (i32, i32),
        /// What is absent.
        what: String,
    },
    /// A host function had no result for its operands.
    #[error("{call} failed ({}): {message}", Code::INTERNAL)]
    NoResult {
        /// The C function.
        call: &'static str,
        /// The host function's message.
        message: String,
    },
    /// Any other failure that the plugin reported.
    #[error("{call} failed ({code}): {message}")]
    Status {
        /// The C function.
        call: &'static str,
        /// The plugin's status code.
        code: Code,
        /// The plugin's message.
        message: String,
    },
}

impl Error {
    /// The plugin's status code, if the plugin reported one.
    pub fn code(&self) -> Option<Code> {
        match self {
            Error::CompileFailed { code, .. } | Error::Status { code, .. } => Some(*code),
            Error::OutOfMemory { .. } => Some(Code::RESOURCE_EXHAUSTED),
            Error::NoResult { .. } => Some(Code::INTERNAL),
            _ => None,
        }
    }
}

/// Why a host function failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HostError {
    /// There is no result for these operands. The launch fails with [`Error::NoResult`].
    NoResult(String),
    /// Anything else.
    Failed(String),
}

impl HostError {
    /// What the plugin is told of `NoResult`, and hands back with the error of the launch. No kernel of the CPU plugin has
    /// this code.
    pub(crate) const NO_RESULT: Code = Code::OUT_OF_RANGE;

    pub(crate) fn code(&self) -> Code {
        match self {
            HostError::NoResult(_) => Self::NO_RESULT,
            HostError::Failed(_) => Code::INTERNAL,
        }
    }

    pub(crate) fn message(&self) -> &str {
        let (HostError::NoResult(message) | HostError::Failed(message)) = self;
        message
    }
}

impl From<String> for HostError {
    fn from(message: String) -> Self {
        HostError::Failed(message)
    }
}

impl From<&str> for HostError {
    fn from(message: &str) -> Self {
        HostError::Failed(message.to_owned())
    }
}

/// An error of a compiler.
pub(crate) fn compile_failed(error: Error) -> Error {
    match error {
        Error::Status { code, message, .. } => Error::CompileFailed { code, message },
        other => other,
    }
}

macro_rules! codes {
    ($($(#[$doc:meta])* $name:ident = $code:literal;)*) => {
        /// A status code, as in `absl::StatusCode`.
        #[derive(Clone, Copy, PartialEq, Eq, Hash)]
        pub struct Code(pub u32);

        impl Code {
            $($(#[$doc])* pub const $name: Code = Code($code);)*

            /// The code's name, or `code <n>`.
            pub fn name(self) -> Option<&'static str> {
                match self.0 { $($code => Some(stringify!($name)),)* _ => None }
            }
        }
    };
}

codes! {
    /// The operation was cancelled.
    CANCELLED = 1;
    /// No better code is known.
    UNKNOWN = 2;
    /// An argument was wrong.
    INVALID_ARGUMENT = 3;
    /// It took too long.
    DEADLINE_EXCEEDED = 4;
    /// Something asked for does not exist.
    NOT_FOUND = 5;
    /// Something exists already.
    ALREADY_EXISTS = 6;
    /// Not allowed.
    PERMISSION_DENIED = 7;
    /// Out of memory, or of another resource.
    RESOURCE_EXHAUSTED = 8;
    /// The state does not allow it.
    FAILED_PRECONDITION = 9;
    /// Given up, for instance because of a conflict.
    ABORTED = 10;
    /// Past the valid range.
    OUT_OF_RANGE = 11;
    /// Not implemented.
    UNIMPLEMENTED = 12;
    /// An invariant of the plugin broke.
    INTERNAL = 13;
    /// Not available now.
    UNAVAILABLE = 14;
    /// Data was lost or corrupted.
    DATA_LOSS = 15;
    /// Not authenticated.
    UNAUTHENTICATED = 16;
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => f.write_str(name),
            None => write!(f, "code {}", self.0),
        }
    }
}

impl fmt::Debug for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

/// Builders of errors.
pub(crate) mod err {
    use super::Error;

    pub(crate) fn invalid(message: impl Into<String>) -> Error {
        Error::InvalidArgument { message: message.into() }
    }

    pub(crate) fn too_large(dims: &[i64]) -> Error {
        invalid(format!("shape {dims:?} has more bytes than an address can name"))
    }

    pub(crate) fn incompatible(reason: impl Into<String>) -> Error {
        Error::Incompatible { reason: reason.into() }
    }
}
