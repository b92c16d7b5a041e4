//! What is counted, as dictionaries.

use oxitorch_engine::{COMPILE_BUCKETS_MS, DeviceReport, Metrics, Parts, Reading};
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Sets counters in a dictionary; times are in seconds there.
pub(super) fn set_counters(out: &Bound<'_, PyDict>, counters: Vec<(&'static str, u64)>) -> PyResult<()> {
    for (name, value) in counters {
        match name.strip_suffix("_us") {
            Some(base) => out.set_item(format!("{base}_s"), value as f64 * 1e-6)?,
            None => out.set_item(name, value)?,
        }
    }
    Ok(())
}

pub(super) fn reading(out: &Bound<'_, PyDict>, name: &str, r: Reading) -> PyResult<()> {
    out.set_item(format!("{name}.all.current"), r.current)?;
    out.set_item(format!("{name}.all.peak"), r.peak)?;
    out.set_item(format!("{name}.all.allocated"), r.allocated)?;
    out.set_item(format!("{name}.all.freed"), r.freed)
}

/// Collectives of several processes, by name.
pub(super) fn collectives<'py>(py: Python<'py>, metrics: &Metrics) -> PyResult<Bound<'py, PyDict>> {
    let out = PyDict::new(py);
    for (name, of) in metrics.collectives() {
        let one = PyDict::new(py);
        one.set_item("count", of.count)?;
        one.set_item("bytes", of.bytes)?;
        one.set_item("time_s", of.time.as_secs_f64())?;
        one.set_item("wait_s", of.waited.as_secs_f64())?;
        out.set_item(name, one)?;
    }
    Ok(out)
}

/// How many compiles took at most so many seconds.
pub(super) fn compile_times<'py>(py: Python<'py>, metrics: &Metrics) -> PyResult<Bound<'py, PyDict>> {
    let out = PyDict::new(py);
    let ends = COMPILE_BUCKETS_MS.iter().map(|&ms| ms as f64 * 1e-3).chain([f64::INFINITY]);
    for (end, n) in ends.zip(metrics.compile_times()) {
        out.set_item(end, n)?;
    }
    Ok(out)
}

fn parts<'py>(py: Python<'py>, parts: &Parts) -> PyResult<Bound<'py, PyDict>> {
    let out = PyDict::new(py);
    for (name, time) in parts.named() {
        out.set_item(name, time.as_secs_f64())?;
    }
    Ok(out)
}

pub(super) fn device_report<'py>(py: Python<'py>, d: &DeviceReport) -> PyResult<Bound<'py, PyDict>> {
    let out = PyDict::new(py);
    out.set_item("steps", d.split.steps)?;
    out.set_item("time_s", parts(py, &d.split.all)?)?;
    out.set_item("last_step_s", d.split.step.map(|p| parts(py, &p)).transpose()?)?;
    out.set_item("queue_launches", d.queued_launches)?;
    out.set_item("queue_ops", d.queued_ops)?;
    out.set_item("memory_bytes", d.memory)?;
    out.set_item("memory_peak_bytes", d.memory_peak)?;
    out.set_item("memory_limit_bytes", d.memory_limit)?;
    out.set_item("known_programs", d.known_programs)?;
    out.set_item("known_ops", d.known_ops)?;
    Ok(out)
}
