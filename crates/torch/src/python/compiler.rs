//! What the compiler is told.

use super::calls::started;
use crate::state;
use oxitorch_pjrt as pjrt;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::sync::atomic::Ordering::Relaxed;

/// By the numbers of [`state::State::precision`].
const PRECISIONS: [&str; 3] = ["highest", "high", "default"];

/// The precision in force: what was set here, else what `torch.set_float32_matmul_precision` says.
#[pyfunction]
pub(super) fn get_precision(py: Python<'_>) -> PyResult<&'static str> {
    Ok(PRECISIONS[started(py)?.switches(true).matmul as usize])
}

#[pyfunction]
pub(super) fn get_precision_override(py: Python<'_>) -> PyResult<Option<&'static str>> {
    Ok(PRECISIONS.get(started(py)?.precision.load(Relaxed) as usize).copied())
}

#[pyfunction]
#[pyo3(signature = (name))]
pub(super) fn set_precision(py: Python<'_>, name: Option<&str>) -> PyResult<()> {
    let number = match name {
        None => state::FOLLOW,
        Some("medium") => 2,
        Some(name) => match PRECISIONS.iter().position(|p| *p == name) {
            Some(i) => i as u32,
            None => {
                let message = format!("precision must be 'highest', 'high' or 'default', got '{name}'");
                return Err(PyValueError::new_err(message));
            }
        },
    };
    started(py)?.precision.store(number, Relaxed);
    Ok(())
}

#[pyfunction]
pub(super) fn get_allow_excess_precision(py: Python<'_>) -> PyResult<bool> {
    Ok(started(py)?.compiler.lock().excess_precision)
}

#[pyfunction]
pub(super) fn set_allow_excess_precision(py: Python<'_>, on: bool) -> PyResult<()> {
    change_compiler(py, |c| c.excess_precision = on)
}

#[pyfunction]
pub(super) fn get_compiler_options<'py>(py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
    let out = PyDict::new(py);
    for (name, value) in &started(py)?.compiler.lock().options {
        match value {
            pjrt::OptionValue::String(v) => out.set_item(name, v)?,
            pjrt::OptionValue::Bool(v) => out.set_item(name, v)?,
            pjrt::OptionValue::Int(v) => out.set_item(name, v)?,
            pjrt::OptionValue::Double(v) => out.set_item(name, v)?,
        }
    }
    Ok(out)
}

#[pyfunction]
pub(super) fn set_compiler_options(py: Python<'_>, options: &Bound<'_, PyDict>) -> PyResult<()> {
    let mut parsed = oxitorch_engine::UserOptions::new();
    for (name, value) in options {
        let name: String = name.extract()?;
        let value = if let Ok(v) = value.extract::<bool>() {
            pjrt::OptionValue::Bool(v)
        } else if let Ok(v) = value.extract::<i64>() {
            pjrt::OptionValue::Int(v)
        } else if let Ok(v) = value.extract::<f64>() {
            pjrt::OptionValue::Double(v)
        } else if let Ok(v) = value.extract::<String>() {
            pjrt::OptionValue::String(v)
        } else {
            let message = format!("compiler option '{name}' must be a bool, an int, a float or a string");
            return Err(PyTypeError::new_err(message));
        };
        parsed.push((name, value));
    }
    change_compiler(py, |c| c.options = parsed)
}

/// Changes the compiler settings and makes programs depend on the new ones.
fn change_compiler(py: Python<'_>, change: impl FnOnce(&mut state::CompilerSettings)) -> PyResult<()> {
    let s = started(py)?;
    let mut settings = s.compiler.lock();
    change(&mut settings);
    let mut options = settings.options.clone();
    if settings.excess_precision {
        options.push(("xla_allow_excess_precision".to_owned(), pjrt::OptionValue::Bool(true)));
    }
    let number = s.engine.compiler_options(options);
    s.engine.set_switches(|w| w.compiler_options = number);
    Ok(())
}
