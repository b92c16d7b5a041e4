//! The GIL, for code that PyTorch calls without it.
//!
//! pyo3 remembers that a thread has attached and takes it for granted further in. That is wrong for us: what runs in
//! between (a signal handler, a finalizer that the garbage collector calls) may be PyTorch, which lets go of the GIL
//! behind pyo3's back and calls us again.

use pyo3::ffi;
use pyo3::prelude::*;
use std::ffi::CString;

unsafe extern "C" {
    /// CPython's, which the limited API leaves out.
    safe fn PyGILState_Check() -> std::ffi::c_int;
}

/// Whether this thread has the GIL.
pub(crate) fn is_held() -> bool {
    PyGILState_Check() != 0
}

/// Gives the GIL back also when the work panics.
struct Held(ffi::PyGILState_STATE);

impl Drop for Held {
    fn drop(&mut self) {
        // SAFETY: the state that `PyGILState_Ensure` gave this thread.
        unsafe { ffi::PyGILState_Release(self.0) }
    }
}

/// Runs `f` with the GIL, whoever held it before.
pub(crate) fn with<T>(f: impl FnOnce(Python<'_>) -> T) -> T {
    // SAFETY: the interpreter runs as long as PyTorch calls us.
    let _held = Held(unsafe { ffi::PyGILState_Ensure() });
    // SAFETY: just taken.
    f(unsafe { Python::assume_attached() })
}

/// Tells the user, as a Python warning. Called by threads of the engine, which hold nothing that Python waits for.
pub(crate) fn warn(text: &str) {
    let text = CString::new(format!("oxitorch: {text}").replace('\0', " ")).unwrap_or_default();
    // None: the interpreter is ending, and nobody reads warnings any more.
    let _ = Python::try_attach(|py| {
        let category = py.get_type::<pyo3::exceptions::PyUserWarning>();
        if let Err(e) = PyErr::warn(py, &category, &text, 1) {
            e.write_unraisable(py, None); // warnings are errors here, and no line of Python is at fault
        }
    });
}
