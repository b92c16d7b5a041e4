//! Where the command runs.

use std::path::PathBuf;

/// Where the command runs: what Python and the machine say.
#[derive(Clone, Debug)]
pub struct Environment {
    /// The interpreter, which has oxitorch.
    pub executable: PathBuf,
    /// Its import path.
    pub site_dirs: Vec<PathBuf>,
    /// The memory of this machine in bytes, if it is known.
    pub memory: Option<u64>,
}
