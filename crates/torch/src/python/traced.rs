//! Compiled graphs and traced functions: their numbers, their lines and what calls are recorded by.

use super::calls::{detached, raise, started};
use crate::{door, held, sites, state};
use oxitorch_engine::{Prepared, Stands};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyList;

/// A number for a compiled graph.
#[pyfunction]
pub(super) fn new_graph() -> i64 {
    state::new_graph()
}

/// Whether a call of this graph was recorded by a recipe, and its results. `torch.ops.oxitorch._replay` is the same as an
/// operator, for profilers. The tensors of the numbers `given` may be overwritten: nobody looks at them afterwards.
#[pyfunction]
#[pyo3(signature = (graph, tensors, given = Vec::new()))]
pub(super) fn replay<'py>(
    graph: i64,
    tensors: &Bound<'py, PyList>,
    given: Vec<u32>,
) -> PyResult<Bound<'py, PyAny>> {
    static OPERATOR: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let py = tensors.py();
    if let Some(results) = held::replay(graph, tensors, &given)? {
        return Ok((true, results).into_pyobject(py)?.into_any());
    }
    let operator = OPERATOR.get_or_try_init(py, || -> PyResult<_> {
        let ops = py.import("torch")?.getattr("ops")?.getattr("oxitorch")?;
        Ok(ops.getattr("_replay")?.getattr("default")?.unbind())
    })?;
    operator.bind(py).call1((graph, tensors))
}

/// Bytes from the beginning of a tensor's object to what it holds; None if that is not known of this PyTorch.
#[pyfunction]
pub(super) fn tensor_place(py: Python<'_>) -> PyResult<Option<usize>> {
    held::place(py)
}

/// Makes the programs of a function that was traced: their numbers among those of the process, and the collectives between
/// them in words; none if it computes nothing.
#[pyfunction]
pub(super) fn prepare(py: Python<'_>, graph: i64, device: usize) -> PyResult<Bound<'_, PyList>> {
    let steps = PyList::empty(py);
    for step in detached(py, move |s| door::prepare(s, graph, device))? {
        match step {
            Prepared::Program(number) => steps.append(number)?,
            Prepared::Collective(words) => steps.append(words)?,
        }
    }
    Ok(steps)
}

/// Makes what calls of a size are recorded by, under the number `graph`, of functions that were traced under `bound`
/// and `sample`; or gives the reason why there is nothing.
#[pyfunction]
pub(super) fn bounded(
    py: Python<'_>,
    bound: i64,
    sample: i64,
    at_bound: bool,
    graph: i64,
    device: usize,
) -> PyResult<Option<String>> {
    detached(py, move |s| door::bounded(s, (bound, sample), at_bound, graph, device))
}

/// Makes what calls with other numbers are recorded by, under the number `graph`, of a function that was traced under
/// the numbers `runs`: by what stood for its floats and ints in each run, and what its positions were. Or gives the
/// reason why there is nothing.
#[pyfunction]
pub(super) fn numbered(
    py: Python<'_>,
    runs: Vec<i64>,
    floats: Vec<Vec<f64>>,
    ints: Vec<Vec<i64>>,
    positions: Vec<Vec<i64>>,
    graph: i64,
) -> PyResult<Option<String>> {
    let ints = ints.into_iter().map(Stands::Int);
    let positions = positions.into_iter().map(Stands::Position);
    let numbers: Vec<Stands> = floats.into_iter().map(Stands::Float).chain(ints).chain(positions).collect();
    detached(py, move |s| door::numbered(s, &runs, &numbers, graph))
}

/// Says which results of a decomposition are tensors.
#[pyfunction]
pub(super) fn keep_defined(graph: i64, defined: Vec<bool>) {
    if let Some(s) = state::started() {
        s.graphs.lock().entry(graph).or_default().defined = defined;
    }
}

/// Notes that an op, `aten::hash_tensor`, has no decomposition.
#[pyfunction]
pub(super) fn no_decomposition(name: &str) {
    crate::door::decomposed::has_none(name);
}

/// Forgets a compiled graph.
#[pyfunction]
pub(super) fn forget_graph(graph: i64) {
    if let (Some(s), false) = (state::started(), state::is_forked()) {
        let graph = s.graphs.lock().remove(&graph);
        drop(graph);
    }
}

/// What this thread held for a function that was traced is let go: what that recorded is launched.
#[pyfunction]
pub(super) fn launch_noted(py: Python<'_>) -> PyResult<()> {
    let s = started(py)?;
    let site = sites::here();
    py.detach(|| s.engine.launch_noted(site)).map_err(|e| raise(py, e))
}

/// This thread plays no compiled graph any more.
#[pyfunction]
pub(super) fn unwatch(py: Python<'_>) -> PyResult<()> {
    let s = started(py)?;
    py.detach(|| s.engine.unwatch()).map_err(|e| raise(py, e))
}

/// The number of the Python line that a traceback of a graph's operation ends with.
#[pyfunction]
pub(super) fn site_of_trace(trace: &str, of_backward: bool) -> u32 {
    sites::of_trace(trace, of_backward)
}

/// What this thread records next is of that line; 0: of the line that runs. Gives what was set before.
#[pyfunction]
pub(super) fn play_site(site: u32) -> u32 {
    sites::play(site)
}

/// The number of the line that runs.
#[pyfunction]
pub(super) fn site_here() -> u32 {
    sites::here().0
}
