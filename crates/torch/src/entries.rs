//! Entries of dicts that are to be what they were: parameters of modules, the state of optimizers.

use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// What some dicts have under some names.
#[pyclass(frozen, module = "oxitorch._core")]
pub(crate) struct Entries {
    all: Vec<Entry>,
}

struct Entry {
    dict: Py<PyDict>,
    name: Py<PyAny>,
    value: Py<PyAny>,
}

#[pymethods]
impl Entries {
    /// Of `(dict, name, value)`.
    #[new]
    fn new(entries: Vec<(Py<PyDict>, Py<PyAny>, Py<PyAny>)>) -> Entries {
        Entries { all: entries.into_iter().map(|(dict, name, value)| Entry { dict, name, value }).collect() }
    }

    /// Whether each dict has this very value under its name.
    fn are_same(&self, py: Python<'_>) -> PyResult<bool> {
        for Entry { dict, name, value } in &self.all {
            if !dict.bind(py).get_item(name)?.is_some_and(|now| now.is(value)) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// As a tuple it never changes, so that other objects of a cycle are those to be cleared.
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        for Entry { dict, name, value } in &self.all {
            visit.call(dict)?;
            visit.call(name)?;
            visit.call(value)?;
        }
        Ok(())
    }
}
