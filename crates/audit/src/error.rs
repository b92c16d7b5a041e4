//! What keeps an audit from being done.

use std::path::PathBuf;

/// What keeps an audit from being done.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A path is not there, or may not be read.
    #[error("cannot read `{}`: {}", .0.display(), .1)]
    Path(PathBuf, std::io::Error),
    /// A file cannot be written.
    #[error("cannot write `{}`: {}", .0.display(), .1)]
    Write(PathBuf, std::io::Error),
    /// A file is named that has none of the formats.
    #[error("`{}` is no file that can be audited: Python, a notebook, a shell script, YAML, JSON, a Dockerfile, requirements, C++ or CUDA", .0.display())]
    Format(PathBuf),
    /// The settings in a `pyproject.toml`.
    #[error("`{}`, [tool.oxitorch.audit]: {}", .0.display(), .1)]
    Settings(PathBuf, String),
    /// A name that is of no rule.
    #[error("there is no rule or family `{0}`; `oxitorch audit --rules` lists them")]
    Rule(String),
    /// The system gives no thread.
    #[error("cannot start a thread: {0}")]
    Thread(std::io::Error),
}
