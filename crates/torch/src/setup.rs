//! What the first use of the device needs, as Python says it.

use crate::abi::Shim;
use oxitorch_engine::{AbsentDevice, CacheOptions, Mode, Remembered};
use oxitorch_pjrt as pjrt;
use pyo3::prelude::*;
use std::path::PathBuf;
use std::sync::atomic::AtomicUsize;

/// What registering the backend leaves for the first use of the device: `import torch` starts no plugin and no thread,
/// takes no TPU, and its forked children may use the device.
pub(crate) struct Setup {
    pub(crate) site_dirs: Vec<PathBuf>,
    /// A device that is not there, instead of those that are.
    pub(crate) absent: Option<AbsentDevice>,
    /// The folder into which is written what was asked of it.
    pub(crate) capture: Option<PathBuf>,
    /// None: the first platform that has hardware.
    pub(crate) platform: Option<pjrt::Platform>,
    /// How many processes of one job share the machine, as far as is known; more until the device starts, if more turn out to.
    pub(crate) processes: AtomicUsize,
    /// Asks Python which of its parent's children this process is, from one on; 0: none.
    pub(crate) child: Option<Py<PyAny>>,
    /// How many devices the cpu platform shows; None: one for each of these processes.
    pub(crate) cpu_devices: Option<usize>,
    /// How many chips and GPUs the environment leaves to this process, if it says so.
    pub(crate) visible: (Option<usize>, Option<usize>),
    /// Options of a client for GPUs.
    pub(crate) cuda: Vec<(String, pjrt::NamedValue)>,
    /// The folder of the shim, which is the user's.
    pub(crate) shim_dir: Option<PathBuf>,
    /// 0: one per core.
    pub(crate) compile_threads: usize,
    pub(crate) mode: Mode,
    /// Bounds of a window: ops, bytes, and bytes of what is not fused; None: the engine's.
    pub(crate) window: (Option<usize>, Option<u64>, Option<u64>),
    /// What each device remembers at most.
    pub(crate) remembered: Remembered,
    /// Whether it is printed why a program is new.
    pub(crate) explain: bool,
    /// Programs that may be made.
    pub(crate) max_graphs: Option<u64>,
    /// Whether everything that happens is kept for a timeline, from the start.
    pub(crate) trace: bool,
    /// The folder into which programs are written.
    pub(crate) graphs: Option<PathBuf>,
    pub(crate) cache: CacheOptions,
    /// Whether quick versions of programs run while better ones are compiled.
    pub(crate) background_compile: bool,
    pub(crate) nan_trap: bool,
    pub(crate) refuse_fallback: bool,
    /// Which of torch's kernels programs may call where they run in host memory.
    pub(crate) library: Kernels,
    /// Whether a plugin that runs in host memory keeps the large blocks that it frees.
    pub(crate) memory_caching: bool,
    /// Seconds until a TPU that does not start is an error.
    pub(crate) start_timeout: u64,
    /// The hosts of a TPU as the environment names them, for people.
    pub(crate) tpu_hosts: Vec<String>,
    /// Whose lowerings, if another platform's than the one that runs.
    pub(crate) lower_for: Option<pjrt::Platform>,
    pub(crate) shim: &'static Shim,
    /// What Python does when the device was started.
    pub(crate) on_start: Option<Py<PyAny>>,
}

/// Which of torch's kernels programs may call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kernels {
    None,
    /// Those that are faster than the compiler's on this processor.
    Faster,
    All,
}
