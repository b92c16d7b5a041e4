//! The functions of `oxitorch._core`. Documented for users in `torch.tpu`, which wraps them.

use crate::abi::{self, Shim, ShimInit};
use crate::library::Kernels;
use crate::{door, processes, sites, state, storage};
use oxitorch_capture::{Graph, Role};
use oxitorch_engine::{
    Absent, Error, ErrorKind, Mode, Numbered, Prepared, Reason, Refusal, Remembered, Stands, Stream,
};
use oxitorch_pjrt as pjrt;
use pyo3::exceptions::{
    PyIndexError, PyNotImplementedError, PyRuntimeError, PySystemExit, PyTypeError, PyValueError,
};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList};
use std::ffi::CStr;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::PathBuf;
use std::sync::atomic::Ordering::Relaxed;
mod config;
mod counted;

use config::{
    absent_device, cache_options, cuda_options, describe_absent, eager_mode, kernels, optional, refuses,
};
use counted::{collectives, compile_times, device_report, reading, set_counters};

macro_rules! csrc {
    ($($name:literal),* $(,)?) => { &[$(($name, include_str!(concat!("../csrc/", $name)))),*] };
}

/// The shim's files by name, which Python builds where no built one fits.
const SHIM: &[(&str, &str)] = csrc![
    "accelerator.h",
    "alone.h",
    "attention.h",
    "calls.h",
    "device.h",
    "glibc.cpp",
    "group_messages.h",
    "group_observed.h",
    "group_reductions.h",
    "group_tasks.h",
    "host_calls.h",
    "nested.h",
    "oxitorch_abi.h",
    "profiler.h",
    "process_group.h",
    "recipes.h",
    "results.h",
    "shim.cpp",
    "sparse.h",
    "tensors.h",
];

/// The one place where Rust errors become Python exceptions (errors of ops go through C++ instead).
fn raise(py: Python<'_>, e: Error) -> PyErr {
    let message = e.message.to_string();
    match e.kind {
        ErrorKind::Index => PyIndexError::new_err(message),
        ErrorKind::Type => PyTypeError::new_err(message),
        ErrorKind::Value => PyValueError::new_err(message),
        ErrorKind::NotImplemented => PyNotImplementedError::new_err(message),
        ErrorKind::OutOfMemory => torch_error(py, "torch", "OutOfMemoryError", message),
        ErrorKind::LinAlg => torch_error(py, "torch.linalg", "LinAlgError", message),
        ErrorKind::Interrupted => state::interruption(py, message),
        ErrorKind::Runtime => PyRuntimeError::new_err(message),
    }
}

/// An exception of a class that torch defines, which is a `RuntimeError`.
fn torch_error(py: Python<'_>, module: &str, class: &str, message: String) -> PyErr {
    let class = py.import(module).and_then(|m| m.getattr(class));
    match class.and_then(|c| c.call1((message.clone(),))) {
        Ok(instance) => PyErr::from_value(instance),
        Err(_) => PyRuntimeError::new_err(message),
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
fn detached<T: Send>(
    py: Python<'_>,
    f: impl FnOnce(&'static state::State) -> Result<T, Refusal> + Send,
) -> PyResult<T> {
    let state = started(py)?;
    let result = py.detach(|| {
        let result = f(state);
        state.engine.linger();
        result
    });
    py.check_signals()?;
    result.map_err(|r| refused(py, r))
}

fn on_stream<T: Send>(
    py: Python<'_>,
    device: i32,
    f: impl FnOnce(&Stream) -> Result<T, Refusal> + Send,
) -> PyResult<T> {
    detached(py, move |s| {
        let device = if device < 0 { current() } else { device };
        f(s.engine.stream(device as usize)?)
    })
}

/// The state; starts the device, without the GIL.
fn started(py: Python<'_>) -> PyResult<&'static state::State> {
    py.detach(state::get).map_err(|e| raise(py, e))
}

/// The current device of this thread; starts nothing.
fn current() -> i32 {
    // SAFETY: reads a thread-local of the shim.
    state::setup().map_or(0, |setup| unsafe { (setup.shim.current_device)() })
}

/// In [`_core::cut`]: no optimizer, but somebody who marks the ends of steps.
const MARK: u64 = 1;

/// By the numbers of [`state::State::precision`].
const PRECISIONS: [&str; 3] = ["highest", "high", "default"];

/// Changes the compiler settings and makes programs depend on the new ones.
fn change_compiler(py: Python<'_>, change: impl FnOnce(&mut state::CompilerSettings)) -> PyResult<()> {
    let s = started(py)?;
    let mut settings = s.compiler.lock();
    change(&mut settings);
    let mut options = settings.options.clone();
    if settings.excess_precision {
        options.push(("xla_allow_excess_precision".to_owned(), pjrt::OptionValue::Bool(true)));
    }
    let number = s.engine.compiler_options(options);
    s.engine.set_switches(|w| w.compiler_options = number);
    Ok(())
}

/// Loads the shim, which registers the backend with PyTorch.
fn load_shim(path: &str) -> PyResult<&'static Shim> {
    let failed = |why: &dyn std::fmt::Display| {
        PyRuntimeError::new_err(format!("cannot load the shim `{path}`: {why}"))
    };
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

#[pymodule]
mod _core {
    use super::*;

    #[pymodule_export]
    use crate::entries::{Cells, Dicts, Entries};
    #[pymodule_export]
    use crate::tree::Tree;

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
        for (name, text) in SHIM {
            out.set_item(name, text)?;
        }
        Ok(out)
    }

    /// Whether `OXITORCH_CACHE_SHARED` may be a URL.
    #[pyfunction]
    fn has_object_stores() -> bool {
        cfg!(feature = "object-store")
    }

    /// What pages of reports look like, as CSS.
    #[pyfunction]
    fn page_style() -> &'static str {
        oxitorch_cli::STYLE
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

    /// Registers the backend with PyTorch. The device starts at its first use.
    #[pyfunction]
    fn init(py: Python<'_>, config: &Bound<'_, PyDict>) -> PyResult<()> {
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
        state::register(state::Setup {
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
    fn expect_processes(processes: usize) {
        if let Some(setup) = state::setup() {
            setup.processes.fetch_max(processes, Relaxed);
        }
    }

    /// Runs what is queued and ends the threads: registered with `atexit`.
    #[pyfunction]
    fn shutdown(py: Python<'_>) {
        if let (Some(s), false) = (state::started(), state::is_forked()) {
            py.detach(|| {
                if let Err(e) = state::write_capture() {
                    eprintln!("oxitorch: {e}");
                }
                s.engine.close();
                crate::sites::let_backward_end();
            });
        }
    }

    /// Starts the device as one of several processes that meet in this store: the process's number and how many there
    /// are, the same among those of its machine, and the driver's number of its GPU. Gives the ids of its devices among
    /// those of all; none where each process has a client of its own.
    #[pyfunction]
    fn join(
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
    fn may_span(py: Python<'_>) -> PyResult<Option<&'static str>> {
        state::may_span().map(|p| p.map(pjrt::Platform::name)).map_err(|e| raise(py, e))
    }

    #[pyfunction]
    fn is_started() -> bool {
        state::started().is_some()
    }

    #[pyfunction]
    fn is_in_bad_fork() -> bool {
        state::is_forked()
    }

    #[pyfunction]
    fn platform(py: Python<'_>) -> PyResult<&'static str> {
        Ok(started(py)?.engine.target().platform().name())
    }

    #[pyfunction]
    fn device_count(py: Python<'_>) -> PyResult<usize> {
        py.detach(state::device_count).map_err(|e| raise(py, e))
    }

    #[pyfunction]
    fn device_name(py: Python<'_>, device: i32) -> PyResult<String> {
        device_properties(py, device)?.get_item("name")?.map_or(Ok(String::new()), |n| n.extract())
    }

    #[pyfunction]
    fn device_properties(py: Python<'_>, device: i32) -> PyResult<Bound<'_, PyDict>> {
        let s = started(py)?;
        let index = if device < 0 { current() } else { device } as usize;
        let memory = s.engine.stream(index).map_err(|r| refused(py, r))?.memory().total();
        s.engine.absent().into_iter().for_each(Absent::describe);
        let target = s.engine.target();
        let at = s.engine.place_of(index);
        let (platform, kind) = (target.platform(), target.kind(at));
        let (id, version) = match target.client() {
            Ok(client) => (client.devices()[at].id(), client.platform_version()),
            Err(_) => (index as i32, ""),
        };
        let name = match platform {
            _ if !target.is_present() => format!("{kind} (absent)"),
            pjrt::Platform::Cpu => "XLA:CPU (host)".to_owned(),
            _ => kind.clone(),
        };
        let out = PyDict::new(py);
        out.set_item("name", name)?;
        out.set_item("platform", platform.name())?;
        out.set_item("kind", kind)?;
        out.set_item("id", id)?;
        out.set_item("total_memory", memory)?;
        out.set_item("platform_version", version)?;
        Ok(out)
    }

    #[pyfunction]
    fn current_device() -> i32 {
        current()
    }

    #[pyfunction]
    fn set_device(py: Python<'_>, device: i32) -> PyResult<()> {
        py.detach(|| state::check_device(device)).map_err(|r| refused(py, r))?;
        if let Some(s) = state::started() {
            s.engine.stream(device as usize).map_err(|r| refused(py, r))?; // it may be another process's
        }
        if let Some(setup) = state::setup() {
            // SAFETY: sets a thread-local of the shim, where the first use of the device looks whether it exists.
            unsafe { (setup.shim.set_device)(device) };
        }
        Ok(())
    }

    #[pyfunction]
    fn synchronize(py: Python<'_>, device: i32) -> PyResult<()> {
        on_stream(py, device, |stream| Ok(stream.synchronize(crate::sites::here())?))
    }

    /// Launches what was recorded, for one of the reasons that metrics count. After a step of an optimizer, which is told
    /// from others by `of`, it ends the script if that was the last one that is of interest.
    #[pyfunction]
    #[pyo3(signature = (reason, of=0))]
    fn cut(py: Python<'_>, reason: &str, of: u64) -> PyResult<()> {
        let known = Reason::ALL.into_iter().find(|r| r.name() == reason);
        let reason = known.ok_or_else(|| PyValueError::new_err(format!("unknown reason '{reason}'")))?;
        let site = crate::sites::here();
        match state::started() {
            Some(s) => {
                py.detach(|| s.engine.cut(reason, site)).map_err(|e| raise(py, e))?;
                if let (Reason::Step, Some(absent)) = (reason, s.engine.absent()) {
                    match of {
                        MARK => absent.marked(),
                        _ => absent.stepped(of),
                    }
                    if absent.is_over() {
                        py.detach(state::write_capture).map_err(|e| raise(py, e))?;
                        return Err(PySystemExit::new_err(0));
                    }
                }
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// Where the device is not there: what tensors are for, by the addresses of their storages, as `(address, role, name)`.
    #[pyfunction]
    fn label(tensors: Vec<(usize, String, String)>) -> PyResult<()> {
        let Some(absent) = state::started().and_then(|s| s.engine.absent()) else { return Ok(()) };
        for (address, role, name) in &tensors {
            let unknown = || PyValueError::new_err(format!("no role `{role}`"));
            let role = Role::from_name(role).ok_or_else(unknown)?;
            if let Some((raw, _)) = storage::find(*address) {
                // SAFETY: the caller holds the tensor, and has the GIL.
                absent.label(unsafe { storage::get(raw) }, role, name);
            }
        }
        Ok(())
    }

    /// Whether the device is not there.
    #[pyfunction]
    fn is_absent() -> bool {
        state::started().is_some_and(|s| s.engine.absent().is_some())
    }

    /// Makes the device one that is not there, as the description says; what is asked of it goes into the folder.
    /// False if the device was started already.
    #[pyfunction]
    fn pretend(description: &Bound<'_, PyDict>, folder: PathBuf) -> PyResult<bool> {
        Ok(state::pretend(describe_absent(description)?, folder))
    }

    /// Why each program was made, oldest first.
    #[pyfunction]
    fn explanations(py: Python<'_>) -> PyResult<Vec<String>> {
        Ok(started(py)?.engine.explanations())
    }

    /// Notes that a loop or branch of the line that runs is recorded round by round, for what its body needs.
    #[pyfunction]
    fn note_played(py: Python<'_>, name: &str, why: &str) -> PyResult<()> {
        started(py)?.engine.played(name, sites::here(), why);
        Ok(())
    }

    /// Whether that is printed to stderr as it comes.
    #[pyfunction]
    fn print_explanations(py: Python<'_>, on: bool) -> PyResult<()> {
        started(py)?.engine.print_explanations(on);
        Ok(())
    }

    #[pyfunction]
    fn get_background_compile(py: Python<'_>) -> PyResult<bool> {
        Ok(started(py)?.engine.background_compile())
    }

    #[pyfunction]
    fn set_background_compile(py: Python<'_>, on: bool) -> PyResult<()> {
        started(py)?.engine.set_background_compile(on);
        Ok(())
    }

    /// Makes every program after so many more an error; None: none. Gives what was left of the bound before.
    #[pyfunction]
    #[pyo3(signature = (more))]
    fn allow_programs(py: Python<'_>, more: Option<u64>) -> PyResult<Option<u64>> {
        Ok(started(py)?.engine.allow_programs(more))
    }

    /// Bounds of what is recorded before it is launched in fused mode: ops, bytes of their results, and of those that
    /// are not fused.
    #[pyfunction]
    fn get_window(py: Python<'_>) -> PyResult<(usize, u64, u64)> {
        let limits = started(py)?.engine.window();
        Ok((limits.ops, limits.bytes, limits.kept))
    }

    /// Sets those bounds; None is the default.
    #[pyfunction]
    #[pyo3(signature = (ops, bytes, kept))]
    fn set_window(py: Python<'_>, ops: Option<usize>, bytes: Option<u64>, kept: Option<u64>) -> PyResult<()> {
        started(py)?.engine.set_window(ops, bytes, kept);
        Ok(())
    }

    /// Makes the programs of a function that was traced: their numbers among those of the process, and the collectives between
    /// them in words; none if it computes nothing.
    #[pyfunction]
    fn prepare(py: Python<'_>, graph: i64, device: usize) -> PyResult<Bound<'_, PyList>> {
        let steps = PyList::empty(py);
        for step in detached(py, move |s| door::prepare(s, graph, device))? {
            match step {
                Prepared::Program(number) => steps.append(number)?,
                Prepared::Collective(words) => steps.append(words)?,
            }
        }
        Ok(steps)
    }

    /// Makes what calls of a size are recorded by, under the number `graph`, of functions that were traced under `bound`
    /// and `sample`; or gives the reason why there is nothing.
    #[pyfunction]
    fn bounded(
        py: Python<'_>,
        bound: i64,
        sample: i64,
        at_bound: bool,
        graph: i64,
        device: usize,
    ) -> PyResult<Option<String>> {
        detached(py, move |s| door::bounded(s, (bound, sample), at_bound, graph, device))
    }

    /// Makes what calls with other numbers are recorded by, under the number `graph`, of a function that was traced under
    /// the numbers `runs`: by what stood for its floats and ints in each run, and what its positions were. Or gives the
    /// reason why there is nothing.
    #[pyfunction]
    fn numbered(
        py: Python<'_>,
        runs: Vec<i64>,
        floats: Vec<Vec<f64>>,
        ints: Vec<Vec<i64>>,
        positions: Vec<Vec<i64>>,
        graph: i64,
    ) -> PyResult<Option<String>> {
        let ints = ints.into_iter().map(Stands::Int);
        let positions = positions.into_iter().map(Stands::Position);
        let numbers: Vec<Stands> =
            floats.into_iter().map(Stands::Float).chain(ints).chain(positions).collect();
        detached(py, move |s| door::numbered(s, &runs, &numbers, graph))
    }

    /// Says something of the next program of this thread, where it is explained.
    #[pyfunction]
    fn remark(py: Python<'_>, text: String) -> PyResult<()> {
        detached(py, move |s| {
            s.engine.remark(text);
            Ok(())
        })
    }

    /// Says something of all programs of this thread, where they are explained: until None ends what it said last.
    #[pyfunction]
    fn within(py: Python<'_>, text: Option<String>) -> PyResult<()> {
        detached(py, move |s| {
            s.engine.within(text);
            Ok(())
        })
    }

    /// This thread plays no compiled graph any more.
    #[pyfunction]
    fn unwatch(py: Python<'_>) -> PyResult<()> {
        let s = started(py)?;
        py.detach(|| s.engine.unwatch()).map_err(|e| raise(py, e))
    }

    /// The number of the Python line that a traceback of a graph's operation ends with.
    #[pyfunction]
    fn site_of_trace(trace: &str, of_backward: bool) -> u32 {
        sites::of_trace(trace, of_backward)
    }

    /// What this thread records next is of that line; 0: of the line that runs. Gives what was set before.
    #[pyfunction]
    fn play_site(site: u32) -> u32 {
        sites::play(site)
    }

    /// The number of the line that runs.
    #[pyfunction]
    fn site_here() -> u32 {
        sites::here().0
    }

    /// A number for a compiled graph.
    #[pyfunction]
    fn new_graph() -> i64 {
        state::new_graph()
    }

    /// Says which results of a decomposition are tensors.
    #[pyfunction]
    fn keep_defined(graph: i64, defined: Vec<bool>) {
        if let Some(s) = state::started() {
            s.graphs.lock().entry(graph).or_default().defined = defined;
        }
    }

    /// Notes that an op, `aten::hash_tensor`, has no decomposition.
    #[pyfunction]
    fn no_decomposition(name: &str) {
        crate::door::decomposed::has_none(name);
    }

    /// Forgets a compiled graph.
    #[pyfunction]
    fn forget_graph(graph: i64) {
        if let (Some(s), false) = (state::started(), state::is_forked()) {
            let graph = s.graphs.lock().remove(&graph);
            drop(graph);
        }
    }

    #[pyfunction]
    fn get_eager_mode(py: Python<'_>) -> PyResult<&'static str> {
        Ok(started(py)?.engine.switches().mode.name())
    }

    #[pyfunction]
    fn set_eager_mode(py: Python<'_>, mode: &str) -> PyResult<()> {
        let parsed = eager_mode(mode)?;
        started(py)?.engine.set_switches(|s| s.mode = parsed);
        Ok(())
    }

    #[pyfunction]
    fn get_nan_trap(py: Python<'_>) -> PyResult<bool> {
        Ok(started(py)?.engine.switches().nan_trap)
    }

    #[pyfunction]
    fn set_nan_trap(py: Python<'_>, on: bool) -> PyResult<()> {
        started(py)?.engine.set_switches(|s| s.nan_trap = on);
        Ok(())
    }

    /// The precision in force: what was set here, else what `torch.set_float32_matmul_precision` says.
    #[pyfunction]
    fn get_precision(py: Python<'_>) -> PyResult<&'static str> {
        Ok(PRECISIONS[started(py)?.switches(true).matmul as usize])
    }

    #[pyfunction]
    fn get_precision_override(py: Python<'_>) -> PyResult<Option<&'static str>> {
        Ok(PRECISIONS.get(started(py)?.precision.load(Relaxed) as usize).copied())
    }

    #[pyfunction]
    #[pyo3(signature = (name))]
    fn set_precision(py: Python<'_>, name: Option<&str>) -> PyResult<()> {
        let number = match name {
            None => state::FOLLOW,
            Some("medium") => 2,
            Some(name) => match PRECISIONS.iter().position(|p| *p == name) {
                Some(i) => i as u32,
                None => {
                    let message = format!("precision must be 'highest', 'high' or 'default', got '{name}'");
                    return Err(PyValueError::new_err(message));
                }
            },
        };
        started(py)?.precision.store(number, Relaxed);
        Ok(())
    }

    #[pyfunction]
    fn get_allow_excess_precision(py: Python<'_>) -> PyResult<bool> {
        Ok(started(py)?.compiler.lock().excess_precision)
    }

    #[pyfunction]
    fn set_allow_excess_precision(py: Python<'_>, on: bool) -> PyResult<()> {
        change_compiler(py, |c| c.excess_precision = on)
    }

    #[pyfunction]
    fn get_compiler_options<'py>(py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let out = PyDict::new(py);
        for (name, value) in &started(py)?.compiler.lock().options {
            match value {
                pjrt::OptionValue::String(v) => out.set_item(name, v)?,
                pjrt::OptionValue::Bool(v) => out.set_item(name, v)?,
                pjrt::OptionValue::Int(v) => out.set_item(name, v)?,
                pjrt::OptionValue::Double(v) => out.set_item(name, v)?,
            }
        }
        Ok(out)
    }

    #[pyfunction]
    fn set_compiler_options(py: Python<'_>, options: &Bound<'_, PyDict>) -> PyResult<()> {
        let mut parsed = oxitorch_engine::UserOptions::new();
        for (name, value) in options {
            let name: String = name.extract()?;
            let value = if let Ok(v) = value.extract::<bool>() {
                pjrt::OptionValue::Bool(v)
            } else if let Ok(v) = value.extract::<i64>() {
                pjrt::OptionValue::Int(v)
            } else if let Ok(v) = value.extract::<f64>() {
                pjrt::OptionValue::Double(v)
            } else if let Ok(v) = value.extract::<String>() {
                pjrt::OptionValue::String(v)
            } else {
                let message = format!("compiler option '{name}' must be a bool, an int, a float or a string");
                return Err(PyTypeError::new_err(message));
            };
            parsed.push((name, value));
        }
        change_compiler(py, |c| c.options = parsed)
    }

    /// Lets queued programs wait (True) or go on: measures what recording alone costs.
    #[pyfunction]
    fn hold_launches(py: Python<'_>, on: bool) -> PyResult<()> {
        started(py)?.engine.hold_launches(on);
        Ok(())
    }

    /// Nanoseconds for finding the call site of an op, measured `n` times from the calling line.
    #[pyfunction]
    fn bench_call_site(n: u32) -> f64 {
        let start = std::time::Instant::now();
        (0..n).for_each(|_| {
            std::hint::black_box(sites::here());
        });
        start.elapsed().as_nanos() as f64 / f64::from(n.max(1))
    }

    #[pyfunction]
    fn set_fallback(py: Python<'_>, policy: &str) -> PyResult<()> {
        started(py)?.refuse_fallback.store(refuses(policy)?, Relaxed);
        Ok(())
    }

    #[pyfunction]
    fn get_fallback(py: Python<'_>) -> PyResult<&'static str> {
        Ok(if started(py)?.refuse_fallback.load(Relaxed) { "error" } else { "warn" })
    }

    /// Counts an op that goes to the CPU; a warning if it is to be given.
    #[pyfunction]
    fn fall_back(py: Python<'_>, name: &str) -> PyResult<Option<String>> {
        started(py)?.fall_back(name, sites::here()).map_err(|e| raise(py, e))
    }

    #[pyfunction]
    fn memory_stats(py: Python<'_>, device: i32) -> PyResult<Bound<'_, PyDict>> {
        let (memory, plugin) =
            on_stream(py, device, |s| Ok((s.settled_memory(crate::sites::here())?, s.plugin_memory()?)))?;
        let (bytes, buffers) = (memory.bytes(), memory.buffers());
        let out = PyDict::new(py);
        reading(&out, "allocated_bytes", bytes)?;
        reading(&out, "reserved_bytes", bytes)?;
        reading(&out, "active_bytes", bytes)?;
        reading(&out, "allocation", buffers)?;
        out.set_item("num_ooms", memory.ooms())?;
        if let Some(plugin) = plugin {
            out.set_item("plugin_bytes.current", plugin.in_use)?;
            let further = [("plugin_bytes.peak", plugin.peak_in_use), ("plugin_bytes.limit", plugin.limit)];
            further.into_iter().try_for_each(|(name, n)| n.map_or(Ok(()), |n| out.set_item(name, n)))?;
        }
        Ok(out)
    }

    #[pyfunction]
    fn reset_peak_memory_stats(py: Python<'_>, device: i32) -> PyResult<()> {
        on_stream(py, device, |s| {
            s.settled_memory(crate::sites::here())?.reset_peak();
            Ok(())
        })
    }

    #[pyfunction]
    fn reset_accumulated_memory_stats(py: Python<'_>, device: i32) -> PyResult<()> {
        on_stream(py, device, |s| {
            s.settled_memory(crate::sites::here())?.reset_accumulated();
            Ok(())
        })
    }

    #[pyfunction]
    fn set_memory_fraction(py: Python<'_>, device: i32, fraction: f64) -> PyResult<()> {
        on_stream(py, device, |s| {
            s.memory().set_fraction(fraction);
            Ok(())
        })
    }

    #[pyfunction]
    fn get_memory_fraction(py: Python<'_>, device: i32) -> PyResult<f64> {
        on_stream(py, device, |s| Ok(s.memory().fraction()))
    }

    #[pyfunction]
    fn empty_cache(py: Python<'_>) -> PyResult<()> {
        py.detach(|| {
            pjrt::release_blocks();
            pjrt::trim_heap(); // of which malloc keeps the smaller ones
        });
        Ok(())
    }

    #[pyfunction]
    fn mem_get_info(py: Python<'_>, device: i32) -> PyResult<(u64, u64)> {
        started(py)?.engine.absent().into_iter().for_each(Absent::describe);
        on_stream(py, device, |s| {
            let m = s.settled_memory(crate::sites::here())?;
            Ok((m.limit().saturating_sub(m.bytes().current), m.total()))
        })
    }

    #[pyfunction]
    fn metrics(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
        let s = started(py)?;
        let out = PyDict::new(py);
        set_counters(&out, s.engine.metrics().counters())?;
        let cache = PyDict::new(py);
        set_counters(&cache, s.engine.cache().counters())?;
        out.set_item("cache", cache)?;
        out.set_item("flushes", s.engine.metrics().flushes())?;
        out.set_item("fallbacks", s.engine.metrics().fallbacks())?;
        out.set_item("collectives", collectives(py, s.engine.metrics())?)?;
        out.set_item("compile_times", compile_times(py, s.engine.metrics())?)?;
        let devices: PyResult<Vec<_>> = s.engine.devices().iter().map(|d| device_report(py, d)).collect();
        out.set_item("devices", devices?)?;
        Ok(out)
    }

    /// The metrics in Prometheus' text format.
    #[pyfunction]
    fn metrics_text(py: Python<'_>) -> PyResult<String> {
        Ok(started(py)?.engine.prometheus())
    }

    /// The metrics for people.
    #[pyfunction]
    fn metrics_summary(py: Python<'_>) -> PyResult<String> {
        Ok(started(py)?.engine.summary())
    }

    #[pyfunction]
    fn reset_metrics(py: Python<'_>) -> PyResult<()> {
        started(py)?.engine.reset_metrics();
        Ok(())
    }

    /// What is known of the latest programs from this number on without their executables, as JSON.
    #[pyfunction]
    fn graphs(py: Python<'_>, from: usize) -> PyResult<Vec<String>> {
        let s = started(py)?;
        Ok(py.detach(|| s.engine.graphs(from).iter().map(Graph::to_json).collect()))
    }

    /// All that is known of a program, by its number in that list: facts as JSON, StableHLO, and the optimized program if
    /// it can be shown. None if it could not be compiled, or is none of the latest any more.
    #[pyfunction]
    fn graph(py: Python<'_>, number: usize) -> PyResult<Option<(String, String, Option<String>)>> {
        let s = started(py)?;
        let shown = py.detach(|| s.engine.graph(number));
        Ok(shown.map(|g| (g.graph.to_json(), g.stablehlo, g.optimized)))
    }

    /// Keeps the latest collectives in a file, of which `head` is the first line.
    #[pyfunction]
    fn record_flight(py: Python<'_>, path: PathBuf, head: &str) -> PyResult<()> {
        Ok(started(py)?.engine.record_flight(&path, head)?)
    }

    /// Begins to keep what happens, for a timeline; gives its number.
    #[pyfunction]
    fn trace_start(py: Python<'_>) -> PyResult<u64> {
        started(py)?;
        Ok(state::listen())
    }

    /// Waits for what is queued and writes the timeline into a file, as that of a rank; the number of events in it, and of
    /// those that were too many for it. None if there is no timeline of that number.
    #[pyfunction]
    fn trace_stop(
        py: Python<'_>,
        number: u64,
        path: PathBuf,
        rank: Option<u32>,
    ) -> PyResult<Option<(usize, u64)>> {
        let Some(s) = state::started() else { return Ok(None) };
        let Some(listener) = s.listeners.lock().remove(&number) else { return Ok(None) };
        let site = crate::sites::here();
        py.detach(|| {
            let heard = s.engine.heard(listener, site);
            let mut file = BufWriter::new(File::create(path)?);
            heard.write_trace(&mut file, rank)?;
            file.flush()?;
            Ok(Some((heard.len(), heard.dropped)))
        })
    }

    fn rng(py: Python<'_>, device: i32) -> PyResult<(u64, u64)> {
        let (mut seed, mut offset) = (0, 0);
        // SAFETY: the shim checks the device.
        unsafe { (started(py)?.shim.rng_get)(checked_device(py, device)?, &mut seed, &mut offset) };
        Ok((seed, offset))
    }

    fn checked_device(py: Python<'_>, device: i32) -> PyResult<i32> {
        let s = started(py)?;
        let device = if device < 0 { current() } else { device };
        s.engine.stream(device as usize).map_err(|r| refused(py, r))?;
        Ok(device)
    }

    /// Seeds one device, or all with -1; devices that are not started yet get the seed when they are.
    #[pyfunction]
    fn manual_seed(py: Python<'_>, device: i32, seed: i128) -> PyResult<()> {
        let one = usize::try_from(device).ok();
        py.detach(|| one.map_or(Ok(()), |_| state::check_device(device))).map_err(|r| refused(py, r))?;
        if state::seed_later(one, seed as u64) {
            return Ok(());
        }
        if one.is_some() {
            return set_generator(py, device, seed as u64, 0);
        }
        let s = started(py)?;
        s.engine.own_devices().try_for_each(|device| set_generator(py, device as i32, seed as u64, 0))
    }

    #[pyfunction]
    fn initial_seed(py: Python<'_>, device: i32) -> PyResult<u64> {
        Ok(rng(py, device)?.0)
    }

    #[pyfunction]
    fn get_rng_state(py: Python<'_>, device: i32) -> PyResult<Bound<'_, PyBytes>> {
        let (seed, offset) = rng(py, device)?;
        let (s, site) = (started(py)?, crate::sites::here());
        let device = checked_device(py, device)?;
        let stream = s.engine.stream(device as usize).map_err(|r| refused(py, r))?;
        py.detach(|| stream.generator_read(seed, offset, site));
        let bytes: Vec<u8> = [seed, offset].iter().flat_map(|x| x.to_le_bytes()).collect();
        Ok(PyBytes::new(py, &bytes))
    }

    #[pyfunction]
    fn set_rng_state(py: Python<'_>, device: i32, state: &[u8]) -> PyResult<()> {
        let words: Vec<u64> =
            state.chunks_exact(8).filter_map(|c| c.try_into().ok()).map(u64::from_le_bytes).collect();
        let (&[seed, offset], 16) = (words.as_slice(), state.len()) else {
            return Err(PyRuntimeError::new_err(format!("RNG state must be 16 bytes, got {}", state.len())));
        };
        let device = checked_device(py, device)?;
        set_generator(py, device, seed, offset)
    }

    /// Sets the default generator of a device that exists.
    fn set_generator(py: Python<'_>, device: i32, seed: u64, offset: u64) -> PyResult<()> {
        let s = started(py)?;
        let site = crate::sites::here();
        let stream = s.engine.stream(device as usize).map_err(|r| refused(py, r))?;
        py.detach(|| stream.generator_set(seed, offset, site));
        // SAFETY: the engine has the device.
        unsafe { (s.shim.rng_set)(device, seed, offset) };
        Ok(())
    }
}
