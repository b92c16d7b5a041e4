//! What there is once per process: the engine, the switches that are not the engine's.

use crate::abi::Shim;
use crate::gil::warn;
use crate::library;
use crate::processes;
use crate::setup::{Kernels, Setup};
use oxitorch_aten::{MatmulPrecision, TargetOptions, dtype};
use oxitorch_engine::{
    AbsentDevice, Engine, Error, ErrorKind, Heard, Listener, Mark, Options, Recipe, Refusal, Site, Switches,
    Target, UserOptions, target_options,
};
use oxitorch_pjrt as pjrt;
use parking_lot::Mutex;
use pyo3::exceptions::PyKeyboardInterrupt;
use pyo3::prelude::*;
use pyo3::types::PyType;
use rustc_hash::{FxHashMap, FxHashSet};
use smallvec::SmallVec;
use std::cell::Cell;
use std::ffi::c_void;
use std::path::PathBuf;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::thread::ThreadId;
use std::time::Duration;

/// The process's only engine and what belongs to it.
pub(crate) struct State {
    pub(crate) engine: Engine,
    pub(crate) shim: &'static Shim,
    /// Whether an op without a lowering is an error.
    pub(crate) refuse_fallback: AtomicBool,
    pub(crate) warned: Mutex<FxHashSet<String>>,
    pub(crate) events: Mutex<FxHashMap<u64, Event>>,
    pub(crate) next_event: AtomicU64,
    /// Timelines that are being made, by number; that of the whole process is number 0.
    pub(crate) listeners: Mutex<FxHashMap<u64, Listener>>,
    /// What is known about compiled graphs and decompositions, by their numbers.
    pub(crate) graphs: Mutex<FxHashMap<i64, Graph>>,
    /// Precision of float32 matrix products: 0 highest, 1 high, 2 default, or [`FOLLOW`].
    pub(crate) precision: AtomicU32,
    /// The user's compiler options and whether XLA may keep excess precision, as they were set.
    pub(crate) compiler: Mutex<CompilerSettings>,
}

/// What is known about a compiled graph, or about a decomposition for arguments of one kind.
#[derive(Clone, Default)]
pub(crate) struct Graph {
    /// By which it is recorded; the last one first.
    pub(crate) recipes: SmallVec<[Arc<Recipe>; 2]>,
    /// Which of its results are tensors; empty: all.
    pub(crate) defined: Vec<bool>,
}

/// The number of a new graph.
pub(crate) fn new_graph() -> i64 {
    static LAST: AtomicI64 = AtomicI64::new(0);
    LAST.fetch_add(1, Relaxed) + 1
}

/// What the user told the compiler.
#[derive(Clone, Default)]
pub(crate) struct CompilerSettings {
    pub(crate) options: UserOptions,
    pub(crate) excess_precision: bool,
}

/// A recorded event.
#[derive(Clone)]
pub(crate) struct Event {
    pub(crate) device: usize,
    pub(crate) mark: Arc<Mark>,
}

static SETUP: OnceLock<Setup> = OnceLock::new();
static STATE: OnceLock<State> = OnceLock::new();
/// Held while the device starts. Never waited for with the GIL.
static STARTING: Mutex<()> = Mutex::new(());
/// The seeds that devices are to have when they start, each of one device or of all; a later one is stronger.
static SEEDS: Mutex<Vec<(Option<usize>, u64)>> = Mutex::new(Vec::new());
/// The thread in which the process ends, once it does.
static ENDING: OnceLock<ThreadId> = OnceLock::new();
/// So long the end waits for a device that is being started: a plugin that starts while the process ends crashes.
const LONGEST_START: Duration = Duration::from_secs(5);
static FORKED: AtomicBool = AtomicBool::new(false);
/// A device that is not there, instead of what was registered, and the folder for what is asked of it.
static PRETENDED: OnceLock<(AbsentDevice, PathBuf)> = OnceLock::new();

/// Leaves what the first use of the device needs; the first call wins.
pub(crate) fn register(setup: Setup) {
    SETUP.get_or_init(|| setup);
}

/// Listeners that came before the device started.
static EARLY: Mutex<Vec<u64>> = Mutex::new(Vec::new());
static NEXT_LISTENER: AtomicU64 = AtomicU64::new(1);

/// Keeps what happens from now on, also if the device is not started yet; gives a number for [`heard`].
pub(crate) fn listen() -> u64 {
    let number = NEXT_LISTENER.fetch_add(1, Relaxed);
    let mut early = EARLY.lock();
    match STATE.get() {
        Some(s) if !is_forked() => _ = s.listeners.lock().insert(number, s.engine.listen()),
        Some(_) => {}
        None => early.push(number),
    }
    number
}

/// What happened since, without what is still queued; nothing if the device was not used.
pub(crate) fn heard(number: u64) -> Option<Heard> {
    EARLY.lock().retain(|n| *n != number);
    let s = STATE.get()?;
    let listener = s.listeners.lock().remove(&number)?;
    Some(s.engine.heard_so_far(listener))
}

/// Makes the device one that is not there; false if it is started already, or was made so before.
pub(crate) fn pretend(device: AbsentDevice, folder: PathBuf) -> bool {
    let _starting = STARTING.lock();
    STATE.get().is_none() && PRETENDED.set((device, folder)).is_ok()
}

/// What was registered.
pub(crate) fn setup() -> Option<&'static Setup> {
    SETUP.get()
}

/// The state, if this process may use the device; the first call starts it.
pub(crate) fn get() -> Result<&'static State, Error> {
    if FORKED.load(Relaxed) {
        return Err(Error::runtime(
            "Cannot re-initialize the tpu device in forked subprocess. To use the tpu device with multiprocessing, you must \
             use the 'spawn' start method",
        ));
    }
    match STATE.get() {
        Some(state) => Ok(state),
        None => start().inspect(|_| tell_python()),
    }
}

/// How many devices there are. Starts them only where plugin and kernel do not say it.
pub(crate) fn device_count() -> Result<usize, Error> {
    let shown = to_start().and_then(crate::client::count);
    shown.map_or_else(|| Ok(get()?.engine.device_count()), Ok)
}

/// Refuses a device that does not exist. Starts nothing: a script says first which device is its process's, and then meets
/// the other processes, with which it starts. Where nobody knows yet how many there are, the first use finds out.
pub(crate) fn check_device(device: i32) -> Result<(), Refusal> {
    let index = usize::try_from(device).map_err(|_| Error::runtime("invalid tpu device index"))?;
    let Some(setup) = to_start() else {
        let n = get()?.engine.device_count();
        return if index < n { Ok(()) } else { Err(Error::no_device(index, n).into()) };
    };
    crate::client::chosen(setup)?;
    match crate::client::count(setup) {
        Some(n) if index >= n => Err(crate::client::no_device(setup, index, n).into()),
        _ => Ok(()),
    }
}

/// What was registered, where that is a real device which this process has not started and may start.
fn to_start() -> Option<&'static Setup> {
    let unstarted = !FORKED.load(Relaxed) && STATE.get().is_none() && PRETENDED.get().is_none();
    SETUP.get().filter(|setup| unstarted && setup.absent.is_none())
}

/// Lets Python know that the device was started: once, by the first that comes here, who holds no lock.
#[cold]
fn tell_python() {
    static TOLD: AtomicBool = AtomicBool::new(false);
    let Some(on_start) = SETUP.get().and_then(|s| s.on_start.as_ref()) else { return };
    if TOLD.swap(true, Relaxed) {
        return;
    }
    crate::gil::with(|py| {
        if let Err(e) = on_start.call0(py) {
            e.write_unraisable(py, None); // a warning that is an error; the op that started the device goes on
        }
    });
}

/// The state, if the device was started.
pub(crate) fn started() -> Option<&'static State> {
    STATE.get()
}

/// The platform, if its devices may be those of a client of several processes; starts nothing.
pub(crate) fn may_span() -> Result<Option<pjrt::Platform>, Error> {
    let setup =
        SETUP.get().ok_or_else(|| Error::runtime("the tpu device was not registered: import oxitorch"))?;
    if PRETENDED.get().is_some() || setup.absent.is_some() {
        return Ok(None);
    }
    let platform = match STATE.get() {
        Some(state) => state.engine.target().platform(),
        None => crate::client::chosen(setup)?.platform,
    };
    Ok(Some(platform).filter(|p| *p != pjrt::Platform::Cpu))
}

/// Starts the device as one of several processes that all come here; the ids of its devices among those of all. There are
/// none where each process has a client of its own: on the cpu platform, and where the device is not there. Without the GIL.
pub(crate) fn join(place: processes::Place, store: Py<PyAny>) -> Result<Vec<i32>, Error> {
    if may_span()?.is_none() {
        return Ok(Vec::new());
    }
    processes::meet(place, store);
    let client = get()?.engine.target().client()?;
    let own: Vec<i32> = client.devices().iter().map(pjrt::Device::id).collect();
    if place.count > 1 && own.len() == client.device_ids().len() {
        return Err(Error::runtime(
            "the tpu device was started for this process alone, and torch.distributed comes too late for it\n\
             hint: call torch.distributed.init_process_group() before the first use of the device; \
             torch.tpu.set_device() is no use of it",
        ));
    }
    Ok(own)
}

/// Whether a collective of these devices, of one process each, is a program of theirs. libtpu takes programs of processes
/// for all devices of the slice alone.
pub(crate) fn are_programs(ids: &[i32]) -> bool {
    let Some(Ok(client)) = started().map(|s| s.engine.target().client()) else { return false };
    let (all, own) = (client.device_ids().len(), client.devices().len());
    let spans = ids.len() > 1 && own < all;
    spans && (client.platform() != pjrt::Platform::Tpu || ids.len() == all)
}

/// Remembers a seed for a device, or for all, that is not started yet; false if they are.
pub(crate) fn seed_later(device: Option<usize>, seed: u64) -> bool {
    let mut pending = SEEDS.lock();
    if STATE.get().is_some() {
        return false;
    }
    pending.retain(|(other, _)| device.is_some() && *other != device);
    pending.push((device, seed));
    true
}

/// How ops are lowered for a target. Registers the kernels that programs may call.
fn wanted(target: &Target, setup: &Setup) -> Result<TargetOptions, Error> {
    let mut wanted = target_options(target.platform());
    if let Some(platform) = setup.lower_for {
        // The compiler is still this platform's, and wants what it wants.
        wanted = wanted.union(target_options(platform));
    }
    // Programs that are compiled elsewhere cannot call what is registered here.
    if let Target::Client(client) = target
        && client.platform() == pjrt::Platform::Cpu
        && setup.library != Kernels::None
        && setup.lower_for.is_none_or(|p| p == pjrt::Platform::Cpu)
    {
        library::register(client.plugin(), setup.shim, count_library_call)
            .and_then(|()| oxitorch_kernels::register(client.plugin()))
            .map_err(|e| Error::runtime(e.to_string()))?;
        wanted.library = true;
        wanted.own_products = setup.library == Kernels::Faster && library::multiplies_slowly();
    }
    Ok(wanted)
}

/// The process ends: waits for a device that is being started, and from now on none is. What was started.
pub(crate) fn end() -> Option<&'static State> {
    ENDING.get_or_init(|| std::thread::current().id());
    drop(STARTING.try_lock_for(LONGEST_START));
    started()
}

/// An error if the process ends. A daemon thread that outlived its program does not hear of it in time, as with a device
/// that was started ([`Engine::linger`]).
fn check_not_ending() -> Result<(), Error> {
    let Some(ending) = ENDING.get() else { return Ok(()) };
    if *ending != std::thread::current().id() {
        std::thread::sleep(LONGEST_START);
    }
    Err(Error::runtime("the interpreter is shutting down: the tpu device is closed"))
}

#[cold]
fn start() -> Result<&'static State, Error> {
    check_not_ending()?;
    let setup =
        SETUP.get().ok_or_else(|| Error::runtime("the tpu device was not registered: import oxitorch"))?;
    let shown = crate::client::cpu_devices(setup); // asks Python
    let starting = STARTING.lock();
    if let Some(state) = STATE.get() {
        return Ok(state);
    }
    if ENDING.get().is_some() {
        drop(starting);
        check_not_ending()?;
    }
    let threads = crate::client::threads(setup);
    let target = match PRETENDED.get().map(|p| &p.0).or(setup.absent.as_ref()) {
        Some(device) => Target::Absent(device.clone()),
        None => Target::Client(crate::client::open(setup, threads, interrupt)?),
    };
    let wanted = wanted(&target, setup)?;
    let mut cache = setup.cache.clone();
    if let (pjrt::Platform::Cpu, Some(threads)) = (target.platform(), threads) {
        cache.environment.push((pjrt::THREADS.to_owned(), threads.to_string()));
    }
    if target.platform() == pjrt::Platform::Cuda && target.client().is_ok() {
        cache.places = cuda_places(setup);
    }
    let spans = matches!(&target, Target::Client(c) if c.device_ids().len() > c.devices().len());
    let numbered = processes::place().filter(|_| spans).map(|place| place.numbered);
    // Processes that share a machine see a device for each of them, and have one. A client of as many devices would have at
    // least as many threads that compute, in each process.
    let at_least = if target.platform() == pjrt::Platform::Cpu { shown } else { 1 };
    let options = Options {
        compile_threads: setup.compile_threads,
        cache,
        graphs: setup.graphs.clone(),
        background_compile: setup.background_compile,
        deterministic,
        target: wanted,
        interrupt,
        numbered,
        at_least: if target.is_present() { at_least } else { 1 },
    };
    let engine = Engine::start(target, &options)?;
    engine.set_window(setup.window.0, setup.window.1, setup.window.2);
    engine.remember(setup.remembered);
    engine.print_explanations(setup.explain);
    engine.allow_programs(setup.max_graphs);
    engine.set_switches(|s| {
        s.mode = setup.mode;
        s.nan_trap = setup.nan_trap;
    });
    let pending = SEEDS.lock();
    let state = set(engine, setup);
    for &(of, seed) in pending.iter() {
        for device in state.engine.own_devices().filter(|&device| of.is_none_or(|of| of == device)) {
            // SAFETY: the device exists, and the shim's lock of the generator is held by nobody who waits for this.
            unsafe { (setup.shim.rng_set)(device as i32, seed, 0) };
        }
    }
    Ok(state)
}

/// Called by threads of the plugin, which may come before the first call of the engine is back.
fn count_library_call() {
    if let Some(state) = started() {
        state.engine.metrics().library_calls.fetch_add(1, Relaxed);
    }
}

/// Where XLA finds `ptxas` and `libdevice`, without which no program with `tanh` compiles. Who says so in `XLA_FLAGS` is
/// believed, and where nothing is found, XLA says what it misses.
fn cuda_places(setup: &Setup) -> Vec<(String, pjrt::OptionValue)> {
    let own = setup.cache.environment.iter().any(|(_, flags)| flags.contains(pjrt::CudaTools::OPTION));
    let (false, Some(tools), Some(scratch)) = (own, pjrt::CudaTools::find(&setup.site_dirs), &setup.shim_dir)
    else {
        return Vec::new();
    };
    match tools.folder(scratch) {
        Ok(folder) => {
            let folder = pjrt::OptionValue::String(folder.display().to_string());
            vec![(pjrt::CudaTools::OPTION.to_owned(), folder)]
        }
        // A shim in a folder that is read only, for one. Programs may still compile: XLA looks in places of its own.
        Err(e) => {
            let (folder, option) = (scratch.display(), pjrt::CudaTools::OPTION);
            warn(&format!(
                "cannot link ptxas and libdevice into {folder}: {e}\n\
                 hint: XLA_FLAGS=--{option}=DIR names a folder of CUDA, or install nvidia-cuda-nvcc and nvidia-nvvm"
            ));
            Vec::new()
        }
    }
}

/// Writes what was asked of a device that is not there, the first time: a file of facts and one for each program.
pub(crate) fn write_capture() -> Result<(), Error> {
    static WRITTEN: AtomicBool = AtomicBool::new(false);
    let folder = PRETENDED.get().map(|p| &p.1).or_else(|| setup()?.capture.as_ref());
    let (Some(s), Some(folder)) = (STATE.get(), folder) else {
        return Ok(());
    };
    if WRITTEN.swap(true, Relaxed) {
        return Ok(());
    }
    let Some((capture, modules)) = s.engine.captured(crate::sites::here())? else { return Ok(()) };
    capture
        .write(folder, &modules)
        .map_err(|e| Error::runtime(format!("cannot write into {}: {e}", folder.display())))
}

/// Whether this is a forked child of a process that had started the device.
pub(crate) fn is_forked() -> bool {
    FORKED.load(Relaxed)
}

/// Sets the state; the first call wins.
fn set(engine: Engine, setup: &'static Setup) -> &'static State {
    extern "C" fn child() {
        FORKED.store(true, Relaxed);
    }
    let mut early = EARLY.lock();
    STATE.get_or_init(|| {
        // SAFETY: the handler only stores to an atomic.
        unsafe { libc::pthread_atfork(None, None, Some(child)) };
        let process = setup.trace.then_some(0).into_iter().chain(early.drain(..));
        let process = process.map(|number| (number, engine.listen())).collect();
        State {
            engine,
            shim: setup.shim,
            refuse_fallback: AtomicBool::new(setup.refuse_fallback),
            warned: Mutex::default(),
            events: Mutex::default(),
            next_event: AtomicU64::new(1),
            listeners: Mutex::new(process),
            graphs: Mutex::default(),
            precision: AtomicU32::new(FOLLOW),
            compiler: Mutex::default(),
        }
    })
}

thread_local! {
    /// The class of the exception that ended this thread's last wait; a Python type that is never let go.
    static RAISED: Cell<*mut c_void> = const { Cell::new(null_mut()) };
}

/// Whether PyTorch is to give the same results in each run.
fn deterministic() -> bool {
    // SAFETY: reads a global of PyTorch.
    setup().is_some_and(|setup| unsafe { (setup.shim.deterministic)() } != 0)
}

/// Called while something waits for the device: lets Ctrl-C, or what another signal's handler raises, end the wait.
pub(crate) fn interrupt() -> Result<(), Error> {
    crate::gil::with(|py| {
        let Err(e) = py.check_signals() else { return Ok(()) };
        // The exception itself cannot travel through C++: the shim raises a new one of its class.
        RAISED.set(e.get_type(py).into_ptr().cast());
        let text = e.value(py).to_string();
        let text = if text.is_empty() { "interrupted while waiting for the device" } else { &text };
        Err(Error::new(ErrorKind::Interrupted, text))
    })
}

/// The class of the exception that ended this thread's last wait.
pub(crate) fn raised() -> *mut c_void {
    RAISED.get()
}

/// An exception of that class.
pub(crate) fn interruption(py: Python<'_>, message: String) -> PyErr {
    // SAFETY: null, or a type that is never let go.
    let class = unsafe { Bound::from_borrowed_ptr_or_opt(py, RAISED.get().cast()) };
    match class.and_then(|c| c.cast_into::<PyType>().ok()) {
        Some(class) => PyErr::from_type(class, message),
        None => PyKeyboardInterrupt::new_err(message),
    }
}

impl State {
    /// Counts an op that goes to the CPU, or forbids it; what to warn of, the first time. `why`: what about its arguments
    /// no lowering takes, if there is one for others.
    pub(crate) fn fall_back(
        &self,
        name: &str,
        why: Option<String>,
        site: Site,
    ) -> Result<Option<String>, Error> {
        let why = why.map_or(String::new(), |why| format!(" for these arguments ({why})"));
        if self.refuse_fallback.load(Relaxed) {
            let message = format!(
                "{name} has no lowering for the tpu device{why}, and OXITORCH_FALLBACK=error forbids to run it on the CPU"
            );
            return Err(Error::new(ErrorKind::NotImplemented, message).at(site));
        }
        self.engine.fell_back(name, site);
        if !self.warned.lock().insert(name.to_owned()) {
            return Ok(None);
        }
        let place = Error::runtime("").at(site).message.trim().to_owned();
        Ok(Some(format!(
            "{name} has no lowering for the tpu device{why} and runs on the CPU ({}). Counted in \
             torch.tpu.metrics()[\"fallbacks\"]; OXITORCH_FALLBACK=error makes it an error",
            if place.is_empty() { "called from an unknown line" } else { &place }
        )))
    }

    /// The switches at this moment, those that PyTorch keeps among them: the precision of products only on demand.
    pub(crate) fn switches(&self, products: bool) -> Switches {
        let mut switches = self.engine.switches();
        // SAFETY: reads a global of PyTorch.
        let code = unsafe { (self.shim.default_dtype)() };
        switches.default_dtype = dtype::from_code(i64::from(code)).unwrap_or(switches.default_dtype);
        if products {
            let forced = self.precision.load(Relaxed);
            let precision = match forced {
                // SAFETY: as above.
                FOLLOW => unsafe { (self.shim.float32_precision)() },
                forced => forced,
            };
            switches.matmul = match precision {
                0 => MatmulPrecision::Highest,
                1 => MatmulPrecision::High,
                _ => MatmulPrecision::Default,
            };
        }
        switches
    }
}

/// In [`State::precision`]: as `torch.set_float32_matmul_precision` says.
pub(crate) const FOLLOW: u32 = u32::MAX;
