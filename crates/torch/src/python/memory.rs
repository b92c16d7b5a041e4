//! The account of a device's memory.

use super::calls::{on_stream, started};
use super::counted::reading;
use oxitorch_engine::Absent;
use oxitorch_pjrt as pjrt;
use pyo3::prelude::*;
use pyo3::types::PyDict;

#[pyfunction]
pub(super) fn memory_stats(py: Python<'_>, device: i32) -> PyResult<Bound<'_, PyDict>> {
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
pub(super) fn reset_peak_memory_stats(py: Python<'_>, device: i32) -> PyResult<()> {
    on_stream(py, device, |s| {
        s.settled_memory(crate::sites::here())?.reset_peak();
        Ok(())
    })
}

#[pyfunction]
pub(super) fn reset_accumulated_memory_stats(py: Python<'_>, device: i32) -> PyResult<()> {
    on_stream(py, device, |s| {
        s.settled_memory(crate::sites::here())?.reset_accumulated();
        Ok(())
    })
}

#[pyfunction]
pub(super) fn set_memory_fraction(py: Python<'_>, device: i32, fraction: f64) -> PyResult<()> {
    on_stream(py, device, |s| {
        s.memory().set_fraction(fraction);
        Ok(())
    })
}

#[pyfunction]
pub(super) fn get_memory_fraction(py: Python<'_>, device: i32) -> PyResult<f64> {
    on_stream(py, device, |s| Ok(s.memory().fraction()))
}

#[pyfunction]
pub(super) fn empty_cache(py: Python<'_>) -> PyResult<()> {
    py.detach(|| {
        pjrt::release_blocks();
        pjrt::trim_heap(); // of which malloc keeps the smaller ones
    });
    Ok(())
}

#[pyfunction]
pub(super) fn mem_get_info(py: Python<'_>, device: i32) -> PyResult<(u64, u64)> {
    started(py)?.engine.absent().into_iter().for_each(Absent::describe);
    on_stream(py, device, |s| {
        let m = s.settled_memory(crate::sites::here())?;
        Ok((m.limit().saturating_sub(m.bytes().current), m.total()))
    })
}
