//! What there is once per process: the engine, the bound ops, the switches that are not the engine's.

use crate::abi::Shim;
use oxitorch_engine::{Engine, Error, ErrorKind, Mark, Op};
use parking_lot::Mutex;
use pyo3::prelude::*;
use rustc_hash::{FxHashMap, FxHashSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};

/// The process's only engine and what belongs to it.
pub(crate) struct State {
    pub(crate) engine: Engine,
    /// Ops in the order in which the shim bound them. Complete before the first dispatch.
    pub(crate) ops: OnceLock<Vec<Op>>,
    pub(crate) binding: Mutex<Vec<Op>>,
    pub(crate) shim: OnceLock<&'static Shim>,
    /// Whether an op without a lowering is an error.
    pub(crate) refuse_fallback: AtomicBool,
    pub(crate) warned: Mutex<FxHashSet<String>>,
    pub(crate) events: Mutex<FxHashMap<u64, Event>>,
    pub(crate) next_event: AtomicU64,
}

/// A recorded event.
#[derive(Clone)]
pub(crate) struct Event {
    pub(crate) device: usize,
    pub(crate) number: u64,
    pub(crate) mark: Arc<Mark>,
}

static STATE: OnceLock<State> = OnceLock::new();
static FORKED: AtomicBool = AtomicBool::new(false);

/// The state, if the device was started and this process may use it.
pub(crate) fn get() -> Result<&'static State, Error> {
    if FORKED.load(Relaxed) {
        return Err(Error::runtime(
            "Cannot use the tpu device in a forked subprocess. To use it with multiprocessing, use the 'spawn' start \
             method",
        ));
    }
    STATE.get().ok_or_else(|| Error::runtime("the tpu device was not started: import oxitorch"))
}

/// Whether this is a forked child of a process that had started the device.
pub(crate) fn is_forked() -> bool {
    FORKED.load(Relaxed)
}

/// Sets the state; the first call wins.
pub(crate) fn set(engine: Engine) -> &'static State {
    extern "C" fn child() {
        FORKED.store(true, Relaxed);
    }
    STATE.get_or_init(|| {
        // SAFETY: the handler only stores to an atomic.
        unsafe { libc::pthread_atfork(None, None, Some(child)) };
        State {
            engine,
            ops: OnceLock::new(),
            binding: Mutex::default(),
            shim: OnceLock::new(),
            refuse_fallback: AtomicBool::new(false),
            warned: Mutex::default(),
            events: Mutex::default(),
            next_event: AtomicU64::new(1),
        }
    })
}

/// Whether the device was started.
pub(crate) fn is_started() -> bool {
    STATE.get().is_some()
}

/// Called while something waits for the device: lets Ctrl-C end the wait.
pub(crate) fn interrupt() -> Result<(), Error> {
    let pending = Python::attach(|py| match py.check_signals() {
        Ok(()) => false,
        Err(_) => {
            // The C++ frames above cannot carry a Python exception: deliver the signal again once they are gone.
            // SAFETY: the GIL is held.
            unsafe { pyo3::ffi::PyErr_SetInterrupt() };
            true
        }
    });
    if pending { Err(Error::new(ErrorKind::Runtime, "interrupted while waiting for the device")) } else { Ok(()) }
}
