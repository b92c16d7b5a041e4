//! The generators of random numbers.

use super::calls::{checked_device, refused, started};
use crate::state;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// Seeds one device, or all with -1; devices that are not started yet get the seed when they are.
#[pyfunction]
pub(super) fn manual_seed(py: Python<'_>, device: i32, seed: i128) -> PyResult<()> {
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
pub(super) fn initial_seed(py: Python<'_>, device: i32) -> PyResult<u64> {
    Ok(rng(py, device)?.0)
}

#[pyfunction]
pub(super) fn get_rng_state(py: Python<'_>, device: i32) -> PyResult<Bound<'_, PyBytes>> {
    let (seed, offset) = rng(py, device)?;
    let (s, site) = (started(py)?, crate::sites::here());
    let device = checked_device(py, device)?;
    let stream = s.engine.stream(device as usize).map_err(|r| refused(py, r))?;
    py.detach(|| stream.generator_read(seed, offset, site));
    let bytes: Vec<u8> = [seed, offset].iter().flat_map(|x| x.to_le_bytes()).collect();
    Ok(PyBytes::new(py, &bytes))
}

#[pyfunction]
pub(super) fn set_rng_state(py: Python<'_>, device: i32, state: &[u8]) -> PyResult<()> {
    let words: Vec<u64> =
        state.chunks_exact(8).filter_map(|c| c.try_into().ok()).map(u64::from_le_bytes).collect();
    let (&[seed, offset], 16) = (words.as_slice(), state.len()) else {
        return Err(PyRuntimeError::new_err(format!("RNG state must be 16 bytes, got {}", state.len())));
    };
    let device = checked_device(py, device)?;
    set_generator(py, device, seed, offset)
}

fn rng(py: Python<'_>, device: i32) -> PyResult<(u64, u64)> {
    let (mut seed, mut offset) = (0, 0);
    // SAFETY: the shim checks the device.
    unsafe { (started(py)?.shim.rng_get)(checked_device(py, device)?, &mut seed, &mut offset) };
    Ok((seed, offset))
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
