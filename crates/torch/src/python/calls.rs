//! How a call of Python's gets to the engine and back: without the GIL, and with errors as exceptions.

use crate::state;
use oxitorch_engine::{Error, ErrorKind, Refusal, Stream};
use oxitorch_pjrt as pjrt;
use pyo3::exceptions::{PyIndexError, PyNotImplementedError, PyRuntimeError, PyTypeError, PyValueError};
use pyo3::prelude::*;

/// The one place where Rust errors become Python exceptions (errors of ops go through C++ instead).
pub(crate) fn raise(py: Python<'_>, e: Error) -> PyErr {
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

pub(crate) fn refused(py: Python<'_>, r: Refusal) -> PyErr {
    match r {
        Refusal::Error(e) => raise(py, e),
        Refusal::Fallback(why) => PyNotImplementedError::new_err(why),
    }
}

pub(super) fn plugin_error(e: &pjrt::Error) -> PyErr {
    PyRuntimeError::new_err(e.to_string())
}

/// The state; starts the device, without the GIL.
pub(super) fn started(py: Python<'_>) -> PyResult<&'static state::State> {
    py.detach(state::get).map_err(|e| raise(py, e))
}

/// Runs `f` on the state without the GIL. Ctrl-C during it becomes `KeyboardInterrupt`.
pub(super) fn detached<T: Send>(
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

pub(super) fn on_stream<T: Send>(
    py: Python<'_>,
    device: i32,
    f: impl FnOnce(&Stream) -> Result<T, Refusal> + Send,
) -> PyResult<T> {
    detached(py, move |s| {
        let device = if device < 0 { current() } else { device };
        f(s.engine.stream(device as usize)?)
    })
}

/// The current device of this thread; starts nothing.
pub(crate) fn current() -> i32 {
    // SAFETY: reads a thread-local of the shim.
    state::setup().map_or(0, |setup| unsafe { (setup.shim.current_device)() })
}

pub(super) fn checked_device(py: Python<'_>, device: i32) -> PyResult<i32> {
    let s = started(py)?;
    let device = if device < 0 { current() } else { device };
    s.engine.stream(device as usize).map_err(|r| refused(py, r))?;
    Ok(device)
}
