//! The GIL, for code that PyTorch calls without it.
//!
//! pyo3 remembers that a thread has attached and takes it for granted further in. That is wrong for us: what runs in
//! between (a signal handler, a finalizer that the garbage collector calls) may be PyTorch, which lets go of the GIL
//! behind pyo3's back and calls us again.

use pyo3::ffi;
use pyo3::prelude::*;

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
