//! The shim: its sources, which Python builds where no built one fits, and its loading.

use crate::abi::{self, Shim, ShimInit};
use crate::door;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::ffi::CStr;

macro_rules! csrc {
    ($($name:literal),* $(,)?) => { &[$(($name, include_str!(concat!("../../csrc/", $name)))),*] };
}

/// The shim's files by name, which Python builds where no built one fits.
const SHIM: &[(&str, &str)] = csrc![
    "accelerator.h",
    "alone.h",
    "attention.h",
    "calls.h",
    "device.h",
    "glibc.cpp",
    "group_host.h",
    "group_messages.h",
    "group_observed.h",
    "group_programs.h",
    "group_records.h",
    "group_reductions.h",
    "group_tasks.h",
    "group_timer.h",
    "host_calls.h",
    "nested.h",
    "objects.h",
    "oxitorch_abi.h",
    "profiler.h",
    "process_group.h",
    "recipes.h",
    "results.h",
    "shim.cpp",
    "sparse.h",
    "tensors.h",
];

/// Loads the shim, which registers the backend with PyTorch.
pub(super) fn load_shim(path: &str) -> PyResult<&'static Shim> {
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

#[pyfunction]
pub(super) fn shim_sources(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let out = PyDict::new(py);
    for (name, text) in SHIM {
        out.set_item(name, text)?;
    }
    Ok(out)
}
