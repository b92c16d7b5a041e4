//! What users set while the process runs.

use super::calls::{raise, started};
use super::config::{eager_mode, refuses};
use crate::sites;
use pyo3::prelude::*;
use std::sync::atomic::Ordering::Relaxed;

#[pyfunction]
pub(super) fn get_background_compile(py: Python<'_>) -> PyResult<bool> {
    Ok(started(py)?.engine.background_compile())
}

#[pyfunction]
pub(super) fn set_background_compile(py: Python<'_>, on: bool) -> PyResult<()> {
    started(py)?.engine.set_background_compile(on);
    Ok(())
}

/// Makes every program after so many more an error; None: none. Gives what was left of the bound before.
#[pyfunction]
#[pyo3(signature = (more))]
pub(super) fn allow_programs(py: Python<'_>, more: Option<u64>) -> PyResult<Option<u64>> {
    Ok(started(py)?.engine.allow_programs(more))
}

/// Bounds of what is recorded before it is launched in fused mode: ops, bytes of their results, and of those that
/// are not fused.
#[pyfunction]
pub(super) fn get_window(py: Python<'_>) -> PyResult<(usize, u64, u64)> {
    let limits = started(py)?.engine.window();
    Ok((limits.ops, limits.bytes, limits.kept))
}

/// Sets those bounds; None is the default.
#[pyfunction]
#[pyo3(signature = (ops, bytes, kept))]
pub(super) fn set_window(
    py: Python<'_>,
    ops: Option<usize>,
    bytes: Option<u64>,
    kept: Option<u64>,
) -> PyResult<()> {
    started(py)?.engine.set_window(ops, bytes, kept);
    Ok(())
}

#[pyfunction]
pub(super) fn get_eager_mode(py: Python<'_>) -> PyResult<&'static str> {
    Ok(started(py)?.engine.switches().mode.name())
}

#[pyfunction]
pub(super) fn set_eager_mode(py: Python<'_>, mode: &str) -> PyResult<()> {
    let parsed = eager_mode(mode)?;
    started(py)?.engine.set_switches(|s| s.mode = parsed);
    Ok(())
}

#[pyfunction]
pub(super) fn get_nan_trap(py: Python<'_>) -> PyResult<bool> {
    Ok(started(py)?.engine.switches().nan_trap)
}

#[pyfunction]
pub(super) fn set_nan_trap(py: Python<'_>, on: bool) -> PyResult<()> {
    started(py)?.engine.set_switches(|s| s.nan_trap = on);
    Ok(())
}

#[pyfunction]
pub(super) fn set_fallback(py: Python<'_>, policy: &str) -> PyResult<()> {
    started(py)?.refuse_fallback.store(refuses(policy)?, Relaxed);
    Ok(())
}

#[pyfunction]
pub(super) fn get_fallback(py: Python<'_>) -> PyResult<&'static str> {
    Ok(if started(py)?.refuse_fallback.load(Relaxed) { "error" } else { "warn" })
}

/// Counts an op that goes to the CPU; a warning if it is to be given.
#[pyfunction]
pub(super) fn fall_back(py: Python<'_>, name: &str) -> PyResult<Option<String>> {
    started(py)?.fall_back(name, None, sites::here()).map_err(|e| raise(py, e))
}
