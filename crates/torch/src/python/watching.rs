//! What is kept for who looks: counters, programs and the reasons for them, timelines.

use super::calls::{detached, started};
use super::counted::{collectives, compile_times, device_report, set_counters};
use crate::{sites, state};
use oxitorch_capture::Graph;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::PathBuf;

#[pyfunction]
pub(super) fn metrics(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let s = started(py)?;
    let out = PyDict::new(py);
    set_counters(&out, s.engine.metrics().counters())?;
    let cache = PyDict::new(py);
    set_counters(&cache, s.engine.cache().counters())?;
    out.set_item("cache", cache)?;
    out.set_item("flushes", s.engine.metrics().flushes())?;
    out.set_item("fallbacks", s.engine.metrics().fallbacks())?;
    out.set_item("collectives", collectives(py, s.engine.metrics())?)?;
    out.set_item("compile_times", compile_times(py, s.engine.metrics())?)?;
    let devices: PyResult<Vec<_>> = s.engine.devices().iter().map(|d| device_report(py, d)).collect();
    out.set_item("devices", devices?)?;
    Ok(out)
}

/// The metrics in Prometheus' text format.
#[pyfunction]
pub(super) fn metrics_text(py: Python<'_>) -> PyResult<String> {
    Ok(started(py)?.engine.prometheus())
}

/// The metrics for people.
#[pyfunction]
pub(super) fn metrics_summary(py: Python<'_>) -> PyResult<String> {
    Ok(started(py)?.engine.summary())
}

#[pyfunction]
pub(super) fn reset_metrics(py: Python<'_>) -> PyResult<()> {
    started(py)?.engine.reset_metrics();
    Ok(())
}

/// What is known of the latest programs from this number on without their executables, as JSON.
#[pyfunction]
pub(super) fn graphs(py: Python<'_>, from: usize) -> PyResult<Vec<String>> {
    let s = started(py)?;
    Ok(py.detach(|| s.engine.graphs(from).iter().map(Graph::to_json).collect()))
}

/// All that is known of a program, by its number in that list: facts as JSON, StableHLO, and the optimized program if
/// it can be shown. None if it could not be compiled, or is none of the latest any more.
#[pyfunction]
pub(super) fn graph(py: Python<'_>, number: usize) -> PyResult<Option<(String, String, Option<String>)>> {
    let s = started(py)?;
    let shown = py.detach(|| s.engine.graph(number));
    Ok(shown.map(|g| (g.graph.to_json(), g.stablehlo, g.optimized)))
}

/// Why each program was made, oldest first.
#[pyfunction]
pub(super) fn explanations(py: Python<'_>) -> PyResult<Vec<String>> {
    Ok(started(py)?.engine.explanations())
}

/// Notes that a loop or branch of the line that runs is recorded round by round, for what its body needs.
#[pyfunction]
pub(super) fn note_played(py: Python<'_>, name: &str, why: &str) -> PyResult<()> {
    started(py)?.engine.played(name, sites::here(), why);
    Ok(())
}

/// Says something of the next program of this thread, where it is explained.
#[pyfunction]
pub(super) fn remark(py: Python<'_>, text: String) -> PyResult<()> {
    detached(py, move |s| {
        s.engine.remark(text);
        Ok(())
    })
}

/// Says something of all programs of this thread, where they are explained: until None ends what it said last.
#[pyfunction]
pub(super) fn within(py: Python<'_>, text: Option<String>) -> PyResult<()> {
    detached(py, move |s| {
        s.engine.within(text);
        Ok(())
    })
}

/// Keeps the latest collectives in a file, of which `head` is the first line.
#[pyfunction]
pub(super) fn record_flight(py: Python<'_>, path: PathBuf, head: &str) -> PyResult<()> {
    Ok(started(py)?.engine.record_flight(&path, head)?)
}

/// Begins to keep what happens, for a timeline; gives its number.
#[pyfunction]
pub(super) fn trace_start(py: Python<'_>) -> PyResult<u64> {
    started(py)?;
    Ok(state::listen())
}

/// Waits for what is queued and writes the timeline into a file, as that of a rank; the number of events in it, and of
/// those that were too many for it. None if there is no timeline of that number.
#[pyfunction]
pub(super) fn trace_stop(
    py: Python<'_>,
    number: u64,
    path: PathBuf,
    rank: Option<u32>,
) -> PyResult<Option<(usize, u64)>> {
    let Some(s) = state::started() else { return Ok(None) };
    let Some(listener) = s.listeners.lock().remove(&number) else { return Ok(None) };
    let site = sites::here();
    py.detach(|| {
        let heard = s.engine.heard(listener, site);
        let mut file = BufWriter::new(File::create(path)?);
        heard.write_trace(&mut file, rank)?;
        file.flush()?;
        Ok(Some((heard.len(), heard.dropped)))
    })
}

/// Lets queued programs wait (True) or go on: measures what recording alone costs. However many are queued meanwhile, they
/// make nobody wait; who asks for a value of theirs waits until another thread lets them go on.
#[pyfunction]
pub(super) fn hold_launches(py: Python<'_>, on: bool) -> PyResult<()> {
    started(py)?.engine.hold_launches(on);
    Ok(())
}

/// Nanoseconds for finding the call site of an op, measured `n` times from the calling line.
#[pyfunction]
pub(super) fn bench_call_site(n: u32) -> f64 {
    let start = std::time::Instant::now();
    (0..n).for_each(|_| {
        std::hint::black_box(sites::here());
    });
    start.elapsed().as_nanos() as f64 / f64::from(n.max(1))
}
