//! What names stand for and is to be what it was: parameters and attributes of modules, the state of optimizers, variables
//! around a function.

use std::ptr::null_mut;

use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyFloat, PyInt, PyString};
use pyo3::{Borrowed, ffi, intern};

/// Whether a value is the very one of before, or a number or a string that is equal to it.
fn is_same(now: &Bound<'_, PyAny>, before: &Py<PyAny>) -> bool {
    if now.is(before) {
        return true;
    }
    let before = before.bind(now.py());
    let is_plain = now.is_exact_instance_of::<PyInt>()
        || now.is_exact_instance_of::<PyFloat>()
        || now.is_exact_instance_of::<PyString>()
        || now.is_exact_instance_of::<PyBool>();
    is_plain && now.get_type().is(before.get_type()) && now.eq(before).unwrap_or(false)
}

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

    /// Whether each dict has this value under its name.
    fn are_same(&self, py: Python<'_>) -> PyResult<bool> {
        for Entry { dict, name, value } in &self.all {
            if !dict.bind(py).get_item(name)?.is_some_and(|now| is_same(&now, value)) {
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

/// Dicts as they are now, each whole.
#[pyclass(frozen, module = "oxitorch._core")]
pub(crate) struct Dicts {
    all: Vec<(Py<PyDict>, Names)>,
}

/// The names of a dict with what they stand for, in its order.
type Names = Vec<(Py<PyAny>, Held)>;

enum Held {
    Value(Py<PyAny>),
    /// Whichever it is, but not None.
    Any,
}

/// Without counting references, as modules have some thirty attributes each.
fn holds(dict: &Bound<'_, PyDict>, held: &[(Py<PyAny>, Held)]) -> bool {
    if dict.len() != held.len() {
        return false;
    }
    let (mut at, mut name, mut now) = (0, null_mut(), null_mut());
    held.iter().all(|(held_name, held)| {
        // SAFETY: `dict` is a dict, which nobody changes while the GIL is held, as comparing numbers and strings runs no
        // Python; it lends the name and the value that it gives.
        unsafe {
            if ffi::PyDict_Next(dict.as_ptr(), &mut at, &mut name, &mut now) == 0
                || name != held_name.as_ptr()
            {
                return false;
            }
            match held {
                Held::Value(value) if now == value.as_ptr() => true,
                Held::Value(value) => is_same(&Borrowed::from_ptr(dict.py(), now), value),
                Held::Any => now != ffi::Py_None(),
            }
        }
    })
}

#[pymethods]
impl Dicts {
    /// Of `(dict, whether its values count)`; if they do not, it is only told which of them are None.
    #[new]
    fn new(py: Python<'_>, dicts: Vec<(Py<PyDict>, bool)>) -> Dicts {
        let all = dicts.into_iter().map(|(dict, by_value)| {
            let held = dict.bind(py).iter().map(|(name, value)| {
                let held = if by_value || value.is_none() { Held::Value(value.unbind()) } else { Held::Any };
                (name.unbind(), held)
            });
            let held = held.collect();
            (dict, held)
        });
        Dicts { all: all.collect() }
    }

    /// Whether each has the same names in the same order, for the same values.
    fn are_same(&self, py: Python<'_>) -> bool {
        self.all.iter().all(|(dict, held)| holds(dict.bind(py), held))
    }

    /// As that of entries.
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        for (dict, held) in &self.all {
            visit.call(dict)?;
            for (name, held) in held {
                visit.call(name)?;
                if let Held::Value(value) = held {
                    visit.call(value)?;
                }
            }
        }
        Ok(())
    }
}

/// Variables of functions around another one.
#[pyclass(frozen, module = "oxitorch._core")]
pub(crate) struct Cells {
    all: Vec<(Py<PyAny>, Py<PyAny>)>,
}

#[pymethods]
impl Cells {
    /// Of `(cell, its contents)`.
    #[new]
    fn new(cells: Vec<(Py<PyAny>, Py<PyAny>)>) -> Cells {
        Cells { all: cells }
    }

    /// Whether each has the same contents.
    fn are_same(&self, py: Python<'_>) -> bool {
        let name = intern!(py, "cell_contents");
        // A cell whose variable was deleted has none, which is an error.
        self.all.iter().all(|(cell, value)| cell.bind(py).getattr(name).is_ok_and(|now| is_same(&now, value)))
    }

    /// As that of entries.
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        for (cell, value) in &self.all {
            visit.call(cell)?;
            visit.call(value)?;
        }
        Ok(())
    }
}
