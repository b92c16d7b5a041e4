//! The functions of `oxitorch._core`. Documented for users in `torch.tpu`, which wraps them.

use crate::abi::{self, Shim, ShimInit};
use crate::{door, sites, state};
use oxitorch_aten::MatmulPrecision;
use oxitorch_engine::{Engine, Error, ErrorKind, Mode, Options, Reading, Refusal, Stream};
use oxitorch_pjrt as pjrt;
use pyo3::exceptions::{PyIndexError, PyNotImplementedError, PyRuntimeError, PyTypeError, PyValueError};
use pyo3::conversion::FromPyObjectOwned;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};
use std::ffi::CStr;
use std::path::PathBuf;
use std::sync::atomic::Ordering::Relaxed;

/// The one place where Rust errors become Python exceptions (errors of ops go through C++ instead).
fn raise(py: Python<'_>, e: Error) -> PyErr {
    let message = e.message.to_string();
    match e.kind {
        ErrorKind::Index => PyIndexError::new_err(message),
        ErrorKind::Type => PyTypeError::new_err(message),
        ErrorKind::Value => PyValueError::new_err(message),
        ErrorKind::NotImplemented => PyNotImplementedError::new_err(message),
        ErrorKind::OutOfMemory => {
            let class = py.import("torch").and_then(|t| t.getattr("OutOfMemoryError"));
            match class.and_then(|c| c.call1((message.clone(),))) {
                Ok(instance) => PyErr::from_value(instance),
                Err(_) => PyRuntimeError::new_err(message),
            }
        }
        ErrorKind::Runtime => PyRuntimeError::new_err(message),
    }
}

fn refused(py: Python<'_>, r: Refusal) -> PyErr {
    match r {
        Refusal::Error(e) => raise(py, e),
        Refusal::Fallback(why) => PyNotImplementedError::new_err(why),
    }
}

fn plugin_error(e: &pjrt::Error) -> PyErr {
    PyRuntimeError::new_err(e.to_string())
}

/// Runs `f` on the state without the GIL. Ctrl-C during it becomes `KeyboardInterrupt`.
fn detached<T: Send>(py: Python<'_>, f: impl FnOnce(&'static state::State) -> Result<T, Refusal> + Send) -> PyResult<T> {
    let state = state::get().map_err(|e| raise(py, e))?;
    let result = py.detach(|| f(state));
    py.check_signals()?;
    result.map_err(|r| refused(py, r))
}

fn on_stream<T: Send>(py: Python<'_>, device: i32, f: impl FnOnce(&Stream) -> Result<T, Refusal> + Send) -> PyResult<T> {
    detached(py, move |s| {
        let device = if device < 0 { current(s) } else { device };
        f(s.engine.stream(device as usize)?)
    })
}

fn current(s: &state::State) -> i32 {
    // SAFETY: reads a thread-local of the shim.
    s.shim.get().map_or(0, |shim| unsafe { (shim.current_device)() })
}

fn shim(py: Python<'_>) -> PyResult<&'static Shim> {
    let state = state::get().map_err(|e| raise(py, e))?;
    state.shim.get().copied().ok_or_else(|| PyRuntimeError::new_err("the tpu device was not started"))
}

fn optional<'py, T: FromPyObjectOwned<'py>>(config: &Bound<'py, PyDict>, key: &str) -> PyResult<Option<T>> {
    match config.get_item(key)? {
        Some(v) if !v.is_none() => v.extract().map(Some).map_err(Into::into),
        _ => Ok(None),
    }
}

fn precision(name: &str) -> PyResult<MatmulPrecision> {
    match name {
        "highest" => Ok(MatmulPrecision::Highest),
        "high" => Ok(MatmulPrecision::High),
        "medium" | "default" => Ok(MatmulPrecision::Default),
        _ => Err(PyValueError::new_err(format!("precision must be 'highest', 'high' or 'default', got '{name}'"))),
    }
}

/// Opens the plugin that the configuration asks for, or the best one that has hardware.
fn open_client(config: &Bound<'_, PyDict>) -> PyResult<std::sync::Arc<pjrt::Client>> {
    let folders: Vec<PathBuf> = optional(config, "site_dirs")?.unwrap_or_default();
    let wanted: Option<String> = optional(config, "platform")?;
    let wanted = wanted.map(|p| p.parse::<pjrt::Platform>()).transpose().map_err(|e| plugin_error(&e))?;
    let found = pjrt::discover(&pjrt::DiscoverOptions { python_paths: folders, ..Default::default() });
    let chosen = pjrt::choose(&found, wanted, pjrt::hardware_present).map_err(|e| plugin_error(&e))?;
    let cpu_devices = match chosen.platform {
        pjrt::Platform::Cpu => Some(optional(config, "cpu_devices")?.unwrap_or(1)),
        _ => None,
    };
    let load = pjrt::LoadOptions::for_platform(chosen.platform, false);
    let plugin = pjrt::Plugin::load(chosen.platform, &chosen.path, &load).map_err(|e| plugin_error(&e))?;
    let options = pjrt::ClientOptions { cpu_devices, ..Default::default() };
    pjrt::Client::new(plugin, &options).map_err(|e| plugin_error(&e))
}

/// Loads the shim, which registers the backend with PyTorch.
fn load_shim(path: &str) -> PyResult<&'static Shim> {
    let failed = |why: &dyn std::fmt::Display| PyRuntimeError::new_err(format!("cannot load the shim `{path}`: {why}"));
    // SAFETY: the shim's initialisers register classes with PyTorch, which is loaded.
    let library = unsafe { libloading::Library::new(path) }.map_err(|e| failed(&e))?;
    // PyTorch keeps pointers into it for the life of the process.
    let library: &'static libloading::Library = Box::leak(Box::new(library));
    // SAFETY: the type is that of the header, whose version is checked on both sides.
    let init = unsafe { library.get::<ShimInit>(b"oxitorch_shim_init\0") }.map_err(|e| failed(&e))?;
    let mut error = std::ptr::null();
    // SAFETY: the table is static.
    let shim = unsafe { init(&door::CORE, &mut error) };
    if shim.is_null() {
        // SAFETY: set with a null result.
        let why = unsafe { CStr::from_ptr(error) }.to_string_lossy();
        return Err(failed(&why));
    }
    // SAFETY: a static table of the shim.
    let shim = unsafe { &*shim };
    if shim.abi_version != abi::ABI_VERSION {
        return Err(failed(&"it was built for another version of oxitorch"));
    }
    Ok(shim)
}

fn reading(out: &Bound<'_, PyDict>, name: &str, r: Reading) -> PyResult<()> {
    out.set_item(format!("{name}.all.current"), r.current)?;
    out.set_item(format!("{name}.all.peak"), r.peak)?;
    out.set_item(format!("{name}.all.allocated"), r.allocated)?;
    out.set_item(format!("{name}.all.freed"), r.freed)
}

#[pymodule]
mod _core {
    use super::*;

    #[pyfunction]
    fn version() -> &'static str {
        env!("CARGO_PKG_VERSION")
    }

    #[pyfunction]
    fn abi_version() -> u32 {
        abi::ABI_VERSION
    }

    #[pyfunction]
    fn shim_sources(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
        let out = PyDict::new(py);
        out.set_item("shim.cpp", include_str!("../csrc/shim.cpp"))?;
        out.set_item("oxitorch_abi.h", include_str!("../csrc/oxitorch_abi.h"))?;
        Ok(out)
    }

    #[pyfunction]
    fn run_cli(py: Python<'_>, argv: Vec<String>) -> i32 {
        let facts = std::env::var_os("OXITORCH_CLI_FACTS");
        py.detach(|| oxitorch_cli::run(&argv, facts))
    }

    #[pyfunction]
    fn discover<'py>(py: Python<'py>, site_dirs: Vec<PathBuf>) -> PyResult<Vec<Bound<'py, PyDict>>> {
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

    #[pyfunction]
    fn init(py: Python<'_>, config: &Bound<'_, PyDict>) -> PyResult<()> {
        if state::is_started() {
            return Ok(());
        }
        let libraries: Vec<String> = optional(config, "library_dirs")?.unwrap_or_default();
        sites::start(py, libraries);
        let client = open_client(config)?;
        let options = Options {
            compile_threads: optional(config, "compile_threads")?.unwrap_or(0),
            interrupt: state::interrupt,
        };
        let engine = Engine::start(client, &options).map_err(|e| raise(py, e))?;
        let state = state::set(engine);
        if let Some(mode) = optional::<String>(config, "eager_mode")? {
            set_eager_mode(py, &mode)?;
        }
        if let Some(fallback) = optional::<String>(config, "fallback")? {
            set_fallback(py, &fallback)?;
        }
        if let Some(trap) = optional(config, "nan_trap")? {
            set_nan_trap(py, trap)?;
        }
        let path: String = optional(config, "shim")?.ok_or_else(|| PyValueError::new_err("config lacks `shim`"))?;
        let shim = load_shim(&path)?;
        let ops = std::mem::take(&mut *state.binding.lock());
        state.ops.get_or_init(|| ops);
        state.shim.get_or_init(|| shim);
        sites::set_shim(shim);
        Ok(())
    }

    /// Runs what is queued and ends the threads: registered with `atexit`.
    #[pyfunction]
    fn shutdown(py: Python<'_>) {
        if let Ok(s) = state::get() {
            py.detach(|| s.engine.close());
        }
    }

    #[pyfunction]
    fn is_in_bad_fork() -> bool {
        state::is_forked()
    }

    #[pyfunction]
    fn platform(py: Python<'_>) -> PyResult<&'static str> {
        Ok(state::get().map_err(|e| raise(py, e))?.engine.client().platform().name())
    }

    #[pyfunction]
    fn device_count(py: Python<'_>) -> PyResult<usize> {
        Ok(state::get().map_err(|e| raise(py, e))?.engine.device_count())
    }

    #[pyfunction]
    fn device_name(py: Python<'_>, device: i32) -> PyResult<String> {
        device_properties(py, device)?.get_item("name")?.map_or(Ok(String::new()), |n| n.extract())
    }

    #[pyfunction]
    fn device_properties(py: Python<'_>, device: i32) -> PyResult<Bound<'_, PyDict>> {
        let s = state::get().map_err(|e| raise(py, e))?;
        let index = if device < 0 { current(s) } else { device } as usize;
        let memory = s.engine.stream(index).map_err(|r| refused(py, r))?.memory().limit();
        let client = s.engine.client();
        let facts = &client.devices()[index];
        let platform = client.platform();
        let name = match platform {
            pjrt::Platform::Cpu => "XLA:CPU (host)".to_owned(),
            _ => facts.kind().to_owned(),
        };
        let out = PyDict::new(py);
        out.set_item("name", name)?;
        out.set_item("platform", platform.name())?;
        out.set_item("kind", facts.kind())?;
        out.set_item("id", facts.id())?;
        out.set_item("total_memory", memory)?;
        out.set_item("platform_version", client.platform_version())?;
        Ok(out)
    }

    #[pyfunction]
    fn current_device(py: Python<'_>) -> PyResult<i32> {
        Ok(current(state::get().map_err(|e| raise(py, e))?))
    }

    #[pyfunction]
    fn set_device(py: Python<'_>, device: i32) -> PyResult<()> {
        let s = state::get().map_err(|e| raise(py, e))?;
        let index = usize::try_from(device).map_err(|_| PyRuntimeError::new_err("invalid tpu device index"))?;
        s.engine.stream(index).map_err(|r| refused(py, r))?;
        // SAFETY: sets a thread-local of the shim to a device that exists.
        unsafe { (shim(py)?.set_device)(device) };
        Ok(())
    }

    #[pyfunction]
    fn synchronize(py: Python<'_>, device: i32) -> PyResult<()> {
        on_stream(py, device, |stream| Ok(stream.synchronize()?))
    }

    #[pyfunction]
    fn get_eager_mode(py: Python<'_>) -> PyResult<&'static str> {
        Ok(state::get().map_err(|e| raise(py, e))?.engine.switches().mode.name())
    }

    #[pyfunction]
    fn set_eager_mode(py: Python<'_>, mode: &str) -> PyResult<()> {
        let parsed = Mode::parse(mode);
        let parsed =
            parsed.ok_or_else(|| PyValueError::new_err(format!("eager mode must be 'strict' or 'debug', got '{mode}'")))?;
        state::get().map_err(|e| raise(py, e))?.engine.set_switches(|s| s.mode = parsed);
        Ok(())
    }

    #[pyfunction]
    fn get_nan_trap(py: Python<'_>) -> PyResult<bool> {
        Ok(state::get().map_err(|e| raise(py, e))?.engine.switches().nan_trap)
    }

    #[pyfunction]
    fn set_nan_trap(py: Python<'_>, on: bool) -> PyResult<()> {
        state::get().map_err(|e| raise(py, e))?.engine.set_switches(|s| s.nan_trap = on);
        Ok(())
    }

    #[pyfunction]
    fn get_precision(py: Python<'_>) -> PyResult<&'static str> {
        Ok(match state::get().map_err(|e| raise(py, e))?.engine.switches().matmul {
            MatmulPrecision::Highest => "highest",
            MatmulPrecision::High => "high",
            MatmulPrecision::Default => "default",
        })
    }

    #[pyfunction]
    fn set_precision(py: Python<'_>, name: &str) -> PyResult<()> {
        let matmul = precision(name)?;
        state::get().map_err(|e| raise(py, e))?.engine.set_switches(|s| s.matmul = matmul);
        Ok(())
    }

    #[pyfunction]
    fn set_default_dtype(py: Python<'_>, code: i64) -> PyResult<()> {
        let dtype = oxitorch_aten::dtype::from_code(code);
        let dtype = dtype.ok_or_else(|| PyTypeError::new_err("a default dtype that the device does not have"))?;
        state::get().map_err(|e| raise(py, e))?.engine.set_switches(|s| s.default_dtype = dtype);
        Ok(())
    }

    #[pyfunction]
    fn set_fallback(py: Python<'_>, policy: &str) -> PyResult<()> {
        let refuse = match policy {
            "warn" => false,
            "error" => true,
            _ => return Err(PyValueError::new_err(format!("fallback must be 'warn' or 'error', got '{policy}'"))),
        };
        state::get().map_err(|e| raise(py, e))?.refuse_fallback.store(refuse, Relaxed);
        Ok(())
    }

    #[pyfunction]
    fn memory_stats(py: Python<'_>, device: i32) -> PyResult<Bound<'_, PyDict>> {
        let (bytes, buffers) = on_stream(py, device, |s| Ok((s.memory().bytes(), s.memory().buffers())))?;
        let out = PyDict::new(py);
        reading(&out, "allocated_bytes", bytes)?;
        reading(&out, "reserved_bytes", bytes)?;
        reading(&out, "active_bytes", bytes)?;
        reading(&out, "allocation", buffers)?;
        out.set_item("num_ooms", 0)?;
        Ok(out)
    }

    #[pyfunction]
    fn reset_peak_memory_stats(py: Python<'_>, device: i32) -> PyResult<()> {
        on_stream(py, device, |s| {
            s.memory().reset_peak();
            Ok(())
        })
    }

    #[pyfunction]
    fn reset_accumulated_memory_stats(py: Python<'_>, device: i32) -> PyResult<()> {
        on_stream(py, device, |s| {
            s.memory().reset_accumulated();
            Ok(())
        })
    }

    #[pyfunction]
    fn empty_cache(py: Python<'_>) -> PyResult<()> {
        // The plugin's allocator keeps no cache that could be emptied; what is in use stays.
        state::get().map_err(|e| raise(py, e)).map(|_| ())
    }

    #[pyfunction]
    fn mem_get_info(py: Python<'_>, device: i32) -> PyResult<(u64, u64)> {
        on_stream(py, device, |s| {
            let m = s.memory();
            Ok((m.limit().saturating_sub(m.bytes().current), m.limit()))
        })
    }

    #[pyfunction]
    fn metrics(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
        let s = state::get().map_err(|e| raise(py, e))?;
        let out = PyDict::new(py);
        for (name, value) in s.engine.metrics().counters() {
            match name.strip_suffix("_us") {
                Some(base) => out.set_item(format!("{base}_s"), value as f64 * 1e-6)?,
                None => out.set_item(name, value)?,
            }
        }
        out.set_item("fallbacks", s.engine.metrics().fallbacks())?;
        Ok(out)
    }

    #[pyfunction]
    fn reset_metrics(py: Python<'_>) -> PyResult<()> {
        state::get().map_err(|e| raise(py, e))?.engine.metrics().reset();
        Ok(())
    }

    fn rng(py: Python<'_>, device: i32) -> PyResult<(u64, u64)> {
        let (mut seed, mut offset) = (0, 0);
        // SAFETY: the shim checks the device.
        unsafe { (shim(py)?.rng_get)(checked_device(py, device)?, &mut seed, &mut offset) };
        Ok((seed, offset))
    }

    fn checked_device(py: Python<'_>, device: i32) -> PyResult<i32> {
        let s = state::get().map_err(|e| raise(py, e))?;
        let device = if device < 0 { current(s) } else { device };
        s.engine.stream(device as usize).map_err(|r| refused(py, r))?;
        Ok(device)
    }

    #[pyfunction]
    fn manual_seed(py: Python<'_>, device: i32, seed: i128) -> PyResult<()> {
        let device = checked_device(py, device)?;
        // SAFETY: the device exists.
        unsafe { (shim(py)?.rng_set)(device, seed as u64, 0) };
        Ok(())
    }

    #[pyfunction]
    fn initial_seed(py: Python<'_>, device: i32) -> PyResult<u64> {
        Ok(rng(py, device)?.0)
    }

    #[pyfunction]
    fn get_rng_state(py: Python<'_>, device: i32) -> PyResult<Bound<'_, PyBytes>> {
        let (seed, offset) = rng(py, device)?;
        let bytes: Vec<u8> = [seed, offset].iter().flat_map(|x| x.to_le_bytes()).collect();
        Ok(PyBytes::new(py, &bytes))
    }

    #[pyfunction]
    fn set_rng_state(py: Python<'_>, device: i32, state: &[u8]) -> PyResult<()> {
        let words: Vec<u64> = state.chunks_exact(8).filter_map(|c| c.try_into().ok()).map(u64::from_le_bytes).collect();
        let (&[seed, offset], 16) = (words.as_slice(), state.len()) else {
            return Err(PyRuntimeError::new_err(format!("RNG state must be 16 bytes, got {}", state.len())));
        };
        let device = checked_device(py, device)?;
        // SAFETY: the device exists.
        unsafe { (shim(py)?.rng_set)(device, seed, offset) };
        Ok(())
    }
}
