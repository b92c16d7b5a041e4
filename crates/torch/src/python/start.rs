//! What starts the device, alone or as one of several processes, and what ends it.

use super::calls::{plugin_error, raise};
use super::config::{
    absent_device, cache_options, cuda_options, describe_absent, eager_mode, kernels, optional, refuses,
};
use super::shim::load_shim;
use crate::setup::{Kernels, Setup};
use crate::{accelerator, processes, sites, state};
use oxitorch_engine::{Mode, Numbered, Remembered};
use oxitorch_pjrt as pjrt;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::path::PathBuf;
use std::sync::atomic::Ordering::Relaxed;

#[pyfunction]
pub(super) fn discover<'py>(py: Python<'py>, site_dirs: Vec<PathBuf>) -> PyResult<Vec<Bound<'py, PyDict>>> {
    let found = pjrt::discover(&pjrt::DiscoverOptions { python_paths: site_dirs, ..Default::default() });
    found
        .into_iter()
        .map(|f| {
            let out = PyDict::new(py);
            out.set_item("platform", f.platform.name())?;
            out.set_item("path", f.path)?;
            out.set_item("package", f.package)?;
            out.set_item("version", f.version)?;
            Ok(out)
        })
        .collect()
}

/// Registers the backend with PyTorch. The device starts at its first use.
#[pyfunction]
pub(super) fn init(py: Python<'_>, config: &Bound<'_, PyDict>) -> PyResult<()> {
    if state::setup().is_some() {
        return Ok(());
    }
    sites::start(py, optional(config, "library_dirs")?.unwrap_or_default());
    let platform: Option<String> = optional(config, "platform")?;
    let lower_for: Option<String> = optional(config, "lower_for")?;
    let mode: Option<String> = optional(config, "eager_mode")?;
    let fallback: Option<String> = optional(config, "fallback")?;
    let library: Option<String> = optional(config, "library")?;
    let path: String =
        optional(config, "shim")?.ok_or_else(|| PyValueError::new_err("config lacks `shim`"))?;
    let shim = load_shim(&path)?;
    state::register(Setup {
        site_dirs: optional(config, "site_dirs")?.unwrap_or_default(),
        absent: absent_device(config)?,
        capture: optional(config, "capture")?,
        platform: platform.map(|p| p.parse()).transpose().map_err(|e| plugin_error(&e))?,
        start_timeout: optional(config, "start_timeout")?.unwrap_or(600),
        tpu_hosts: optional(config, "tpu_hosts")?.unwrap_or_default(),
        lower_for: lower_for.map(|p| p.parse()).transpose().map_err(|e| plugin_error(&e))?,
        processes: optional(config, "processes")?.unwrap_or(1usize).into(),
        child: optional(config, "child")?,
        cpu_devices: optional(config, "cpu_devices")?,
        visible: (optional(config, "visible_tpus")?, optional(config, "visible_gpus")?),
        cuda: cuda_options(config)?,
        shim_dir: std::path::Path::new(&path).parent().map(Into::into),
        compile_threads: optional(config, "compile_threads")?.unwrap_or(0),
        cache: cache_options(config)?,
        mode: mode.as_deref().map_or(Ok(Mode::default()), eager_mode)?,
        window: (
            optional(config, "window_ops")?,
            optional(config, "window_bytes")?,
            optional(config, "window_kept_bytes")?,
        ),
        remembered: Remembered {
            programs: optional(config, "known_programs")?.unwrap_or(Remembered::default().programs),
            ops: optional(config, "known_ops")?.unwrap_or(Remembered::default().ops),
        },
        explain: optional(config, "explain")?.unwrap_or(false),
        max_graphs: optional(config, "max_graphs")?,
        trace: optional(config, "trace")?.unwrap_or(false),
        graphs: optional(config, "graphs")?,
        background_compile: optional(config, "background_compile")?.unwrap_or(true),
        nan_trap: optional(config, "nan_trap")?.unwrap_or(false),
        library: library.as_deref().map_or(Ok(Kernels::Faster), kernels)?,
        memory_caching: optional(config, "memory_caching")?.unwrap_or(true),
        refuse_fallback: fallback.as_deref().map_or(Ok(false), refuses)?,
        shim,
        on_start: optional(config, "on_start")?,
    });
    sites::set_shim(shim);
    crate::threads::start(shim);
    oxitorch_engine::set_running(crate::profile::running);
    Ok(())
}

/// So many processes of one job share the machine; said before the device starts.
#[pyfunction]
pub(super) fn expect_processes(processes: usize) {
    if let Some(setup) = state::setup() {
        setup.processes.fetch_max(processes, Relaxed);
    }
}

/// Runs what is queued and ends the threads: registered with `atexit`.
#[pyfunction]
pub(super) fn shutdown(py: Python<'_>) {
    if state::is_forked() {
        return;
    }
    py.detach(|| {
        let Some(s) = state::end() else { return };
        if let Err(e) = state::write_capture() {
            eprintln!("oxitorch: {e}");
        }
        s.engine.close();
        crate::sites::let_backward_end();
    });
}

/// Starts the device as one of several processes that meet in this store: the process's number and how many there
/// are, the same among those of its machine, and the driver's number of its GPU. Gives the ids of its devices among
/// those of all; none where each process has a client of its own.
#[pyfunction]
pub(super) fn join(
    py: Python<'_>,
    place: (usize, usize),
    here: (usize, usize),
    gpu: i64,
    store: Py<PyAny>,
) -> PyResult<Vec<i32>> {
    let numbered = Numbered { first: here.0, count: here.1 };
    let place = processes::Place { index: place.0, count: place.1, numbered, gpu };
    py.detach(|| state::join(place, store)).map_err(|e| raise(py, e))
}

/// The platform, if its devices may be those of a client of several processes; starts nothing.
#[pyfunction]
pub(super) fn may_span(py: Python<'_>) -> PyResult<Option<&'static str>> {
    state::may_span().map(|p| p.map(pjrt::Platform::name)).map_err(|e| raise(py, e))
}

/// Whether PyTorch's accelerator is CUDA until the device is started, and in [`backward_elsewhere`]; false if that cannot be.
#[pyfunction]
pub(super) fn share_accelerator() -> bool {
    accelerator::share()
}

/// A backward of CUDA tensors begins, or ends.
#[pyfunction]
pub(super) fn backward_elsewhere(begins: bool) {
    accelerator::backward_elsewhere(begins);
}

/// Whether the kernel shows a GPU of NVIDIA's.
#[pyfunction]
pub(super) fn has_gpu() -> bool {
    pjrt::hardware_present(pjrt::Platform::Cuda)
}

#[pyfunction]
pub(super) fn is_started() -> bool {
    state::started().is_some()
}

#[pyfunction]
pub(super) fn is_in_bad_fork() -> bool {
    state::is_forked()
}

/// Whether the device is not there.
#[pyfunction]
pub(super) fn is_absent() -> bool {
    state::started().is_some_and(|s| s.engine.absent().is_some())
}

/// Makes the device one that is not there, as the description says; what is asked of it goes into the folder.
/// False if the device was started already.
#[pyfunction]
pub(super) fn pretend(description: &Bound<'_, PyDict>, folder: PathBuf) -> PyResult<bool> {
    Ok(state::pretend(describe_absent(description)?, folder))
}
