//! What names stand for and is to be what it was: parameters and attributes of modules, the state of optimizers, variables
//! around a function.

use std::ptr::null_mut;

use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyFloat, PyInt, PyList, PyString};
use pyo3::{Borrowed, ffi};

/// Whether a value is the very one of before, or a number or a string that is equal to it. Zeros of different signs are not,
/// and a NaN is.
fn is_same(now: &Bound<'_, PyAny>, before: &Py<PyAny>) -> bool {
    if now.is(before) {
        return true;
    }
    let before = before.bind(now.py());
    if let (Ok(now), Ok(before)) = (now.cast_exact::<PyFloat>(), before.cast_exact::<PyFloat>()) {
        return now.value().to_bits() == before.value().to_bits();
    }
    let is_plain = now.is_exact_instance_of::<PyInt>()
        || now.is_exact_instance_of::<PyString>()
        || now.is_exact_instance_of::<PyBool>();
    is_plain && now.get_type().is(before.get_type()) && now.eq(before).unwrap_or(false)
}

/// What some dicts have under some names.
#[pyclass(frozen, module = "oxitorch._core")]
pub(crate) struct Entries {
    all: Vec<Entry<PyDict>>,
}

/// What something has under a name.
struct Entry<T> {
    of: Py<T>,
    name: Py<PyAny>,
    value: Py<PyAny>,
}

impl<T> Entry<T> {
    fn visit(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.of)?;
        visit.call(&self.name)?;
        visit.call(&self.value)
    }
}

#[pymethods]
impl Entries {
    /// Of `(dict, name, value)`.
    #[new]
    fn new(entries: Vec<(Py<PyDict>, Py<PyAny>, Py<PyAny>)>) -> Entries {
        Entries { all: entries.into_iter().map(|(of, name, value)| Entry { of, name, value }).collect() }
    }

    /// Whether each dict has this value under its name.
    fn are_same(&self, py: Python<'_>) -> PyResult<bool> {
        for Entry { of, name, value } in &self.all {
            if !of.bind(py).get_item(name)?.is_some_and(|now| is_same(&now, value)) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// As a tuple it never changes, so that other objects of a cycle are those to be cleared.
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.all.iter().try_for_each(|entry| entry.visit(&visit))
    }
}

/// Dicts as they are now, each whole.
#[pyclass(frozen, module = "oxitorch._core")]
pub(crate) struct Dicts {
    all: Vec<Whole>,
}

/// A dict, but for some names, which it may have or not.
struct Whole {
    dict: Py<PyDict>,
    held: Names,
    apart: Vec<Py<PyAny>>,
}

/// The names of a dict with what they stand for, in its order.
type Names = Vec<(Py<PyAny>, Held)>;

enum Held {
    Value(Py<PyAny>),
    /// Whichever it is, but not None.
    Any,
}

impl Whole {
    fn is_same(&self, py: Python<'_>) -> bool {
        let dict = self.dict.bind(py);
        if self.apart.is_empty() {
            return holds(dict, &self.held);
        }
        let mut held = self.held.iter();
        let mut others = dict.iter().filter(|(name, _)| !self.apart.iter().any(|apart| is_same(name, apart)));
        let are_same = others.all(|(name, now)| {
            held.next().is_some_and(|(held_name, held)| {
                name.is(held_name)
                    && match held {
                        Held::Value(value) => is_same(&now, value),
                        Held::Any => !now.is_none(),
                    }
            })
        });
        are_same && held.next().is_none()
    }
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
    /// Of `(dict, whether its values count, names that do not)`; if values do not, it is only told which are None.
    #[new]
    fn new(py: Python<'_>, dicts: Vec<(Py<PyDict>, bool, Vec<Py<PyAny>>)>) -> Dicts {
        let all = dicts.into_iter().map(|(dict, by_value, apart)| {
            let items =
                dict.bind(py).iter().filter(|(name, _)| !apart.iter().any(|apart| is_same(name, apart)));
            let held = items.map(|(name, value)| {
                let held = if by_value || value.is_none() { Held::Value(value.unbind()) } else { Held::Any };
                (name.unbind(), held)
            });
            let held = held.collect();
            Whole { dict, held, apart }
        });
        Dicts { all: all.collect() }
    }

    /// Whether each has the same names in the same order, for the same values.
    fn are_same(&self, py: Python<'_>) -> bool {
        self.all.iter().all(|whole| whole.is_same(py))
    }

    /// As that of entries.
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        for Whole { dict, held, apart } in &self.all {
            visit.call(dict)?;
            apart.iter().try_for_each(|name| visit.call(name))?;
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

/// Attributes of objects, and what they are now: variables of functions around another one, attributes of classes.
#[pyclass(frozen, module = "oxitorch._core")]
pub(crate) struct Fields {
    all: Vec<Entry<PyAny>>,
}

#[pymethods]
impl Fields {
    /// Of `(object, name, value)`.
    #[new]
    fn new(fields: Vec<(Py<PyAny>, Py<PyString>, Py<PyAny>)>) -> Fields {
        let entry = |(of, name, value): (_, Py<PyString>, _)| Entry { of, name: name.into_any(), value };
        Fields { all: fields.into_iter().map(entry).collect() }
    }

    /// Whether each object has this value under its name. One that is deleted is no error.
    fn are_same(&self, py: Python<'_>) -> bool {
        self.all.iter().all(|Entry { of, name, value }| {
            let name = name.bind(py).cast::<PyString>();
            name.is_ok_and(|name| of.bind(py).getattr(name).is_ok_and(|now| is_same(&now, value)))
        })
    }

    /// As that of entries.
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.all.iter().try_for_each(|entry| entry.visit(&visit))
    }
}

/// Lists as they are now.
#[pyclass(frozen, module = "oxitorch._core")]
pub(crate) struct Lists {
    all: Vec<(Py<PyList>, Vec<Py<PyAny>>)>,
}

#[pymethods]
impl Lists {
    #[new]
    fn new(py: Python<'_>, lists: Vec<Py<PyList>>) -> Lists {
        let held = |list: Py<PyList>| {
            let items = list.bind(py).iter().map(Bound::unbind).collect();
            (list, items)
        };
        Lists { all: lists.into_iter().map(held).collect() }
    }

    /// Whether each has the same items.
    fn are_same(&self, py: Python<'_>) -> bool {
        self.all.iter().all(|(list, held)| {
            let list = list.bind(py);
            list.len() == held.len() && list.iter().zip(held).all(|(now, value)| is_same(&now, value))
        })
    }

    /// As that of entries.
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        for (list, items) in &self.all {
            visit.call(list)?;
            items.iter().try_for_each(|item| visit.call(item))?;
        }
        Ok(())
    }
}
