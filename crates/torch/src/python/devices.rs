//! The devices, and what was recorded for them.

use super::calls::{current, on_stream, raise, refused, started};
use crate::{state, storage};
use oxitorch_capture::Role;
use oxitorch_engine::{Absent, Reason};
use oxitorch_pjrt as pjrt;
use pyo3::exceptions::{PySystemExit, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;

#[pyfunction]
pub(super) fn platform(py: Python<'_>) -> PyResult<&'static str> {
    Ok(started(py)?.engine.target().platform().name())
}

#[pyfunction]
pub(super) fn device_count(py: Python<'_>) -> PyResult<usize> {
    py.detach(state::device_count).map_err(|e| raise(py, e))
}

#[pyfunction]
pub(super) fn device_name(py: Python<'_>, device: i32) -> PyResult<String> {
    device_properties(py, device)?.get_item("name")?.map_or(Ok(String::new()), |n| n.extract())
}

#[pyfunction]
pub(super) fn device_properties(py: Python<'_>, device: i32) -> PyResult<Bound<'_, PyDict>> {
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
pub(super) fn current_device() -> i32 {
    current()
}

#[pyfunction]
pub(super) fn set_device(py: Python<'_>, device: i32) -> PyResult<()> {
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
pub(super) fn synchronize(py: Python<'_>, device: i32) -> PyResult<()> {
    on_stream(py, device, |stream| Ok(stream.synchronize(crate::sites::here())?))
}

/// Launches what was recorded, for one of the reasons that metrics count.
#[pyfunction]
pub(super) fn cut(py: Python<'_>, reason: &str) -> PyResult<()> {
    let known = Reason::ALL.into_iter().find(|r| r.name() == reason);
    let reason = known.ok_or_else(|| PyValueError::new_err(format!("unknown reason '{reason}'")))?;
    let site = crate::sites::here();
    let Some(s) = state::started() else { return Ok(()) };
    py.detach(|| s.engine.cut(reason, site)).map_err(|e| raise(py, e))
}

/// Somebody who marks the ends of steps says that one has ended. Ends the script if that was the last of interest.
#[pyfunction]
pub(super) fn mark_step(py: Python<'_>) -> PyResult<()> {
    cut(py, Reason::Step.name())?;
    if let Some(absent) = state::started().and_then(|s| s.engine.absent()) {
        absent.marked();
    }
    end_if_over(py)
}

/// An optimizer, which is told from others by its number, has made its step; `may_drop`: the script may drop the gradients
/// next; `did`: it did so before. Gives whether the step waits for that; ends the script if it was the last of interest.
#[pyfunction]
pub(super) fn step(py: Python<'_>, optimizer: u64, may_drop: bool, did: bool) -> PyResult<bool> {
    let site = crate::sites::here();
    let Some(s) = state::started() else { return Ok(false) };
    let waits = py.detach(|| s.engine.step(optimizer, (may_drop, did), site)).map_err(|e| raise(py, e))?;
    end_if_over(py)?;
    Ok(waits)
}

/// The script has dropped gradients. Gives whether a step waited for that, which is launched; ends the script as [`step`]
/// does.
#[pyfunction]
pub(super) fn dropped_gradients(py: Python<'_>) -> PyResult<bool> {
    let site = crate::sites::here();
    let Some(s) = state::started() else { return Ok(false) };
    let waited = py.detach(|| s.engine.dropped_gradients(site)).map_err(|e| raise(py, e))?;
    end_if_over(py)?;
    Ok(waited)
}

/// Ends the script if a device that is not there has been asked for all steps of interest.
fn end_if_over(py: Python<'_>) -> PyResult<()> {
    let absent = state::started().and_then(|s| s.engine.absent());
    if absent.is_some_and(|absent| absent.is_over()) {
        py.detach(state::write_capture).map_err(|e| raise(py, e))?;
        return Err(PySystemExit::new_err(0));
    }
    Ok(())
}

/// Where the device is not there: what tensors are for, by the addresses of their storages, as `(address, role, name)`.
#[pyfunction]
pub(super) fn label(tensors: Vec<(usize, String, String)>) -> PyResult<()> {
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
