//! Tensors that Python holds, for calls that go past PyTorch's dispatcher.
//!
//! On the way through it each tensor is counted up and down, and Python's lock is taken for each. Here one is looked at where
//! Python's object has it. Where that is differs between versions of PyTorch, and is found by what `Tensor._cdata` tells.

use crate::abi::{self, Reply, device};
use crate::python::calls::{current, raise, refused};
use crate::{door, state};
use oxitorch_engine::{Error, ErrorKind};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyList, PyType};
use smallvec::SmallVec;
use std::ffi::{CStr, c_void};
use std::ptr::{null, null_mut};

/// The classes of tensors of PyTorch's own.
struct Classes {
    tensor: Py<PyType>,
    parameter: Py<PyType>,
}

fn classes(py: Python<'_>) -> PyResult<&'static Classes> {
    static CLASSES: PyOnceLock<Classes> = PyOnceLock::new();
    CLASSES.get_or_try_init(py, || {
        Ok(Classes {
            tensor: py.import("torch")?.getattr("Tensor")?.cast_into::<PyType>()?.unbind(),
            parameter: py.import("torch.nn")?.getattr("Parameter")?.cast_into::<PyType>()?.unbind(),
        })
    })
}

/// Whether a value is a tensor.
pub(crate) fn is_tensor(x: &Bound<'_, PyAny>) -> PyResult<bool> {
    Ok(is_plain(x)? || x.is_instance(classes(x.py())?.tensor.bind(x.py()))?)
}

/// Whether it is a tensor of PyTorch's own class or a parameter.
pub(crate) fn is_plain(x: &Bound<'_, PyAny>) -> PyResult<bool> {
    let (classes, class) = (classes(x.py())?, x.get_type());
    Ok(class.is(classes.tensor.bind(x.py())) || class.is(classes.parameter.bind(x.py())))
}

/// Bytes from the beginning of an object to its tensor. None where it is not found: then PyTorch is asked.
pub(crate) fn place(py: Python<'_>) -> PyResult<Option<usize>> {
    static PLACE: PyOnceLock<Option<usize>> = PyOnceLock::new();
    let place = PLACE.get_or_try_init(py, || {
        let torch = py.import("torch")?;
        let size: usize = torch.getattr("Tensor")?.getattr("__basicsize__")?.extract()?;
        let sample = || -> PyResult<_> {
            let tensor = torch.call_method1("empty", (0,))?;
            let pointer: usize = tensor.getattr("_cdata")?.extract()?;
            Ok((tensor, pointer))
        };
        let samples = [sample()?, sample()?];
        let holds = |at: &usize| {
            samples.iter().all(|(tensor, pointer)| {
                // SAFETY: a word of the object, which is so large; all of its fields are of this size and alignment, or smaller.
                unsafe { tensor.as_ptr().cast::<u8>().add(*at).cast::<usize>().read() == *pointer }
            })
        };
        let word = size_of::<usize>();
        PyResult::Ok((2 * word..size.saturating_sub(word - 1)).step_by(word).find(holds))
    })?;
    Ok(*place)
}

/// The tensor in an object, for the shim.
fn tensor_in(x: &Bound<'_, PyAny>, place: usize) -> *const c_void {
    x.as_ptr().cast::<u8>().wrapping_add(place).cast_const().cast()
}

/// `x.requires_grad` of a tensor of PyTorch's own class or a parameter; None where it is not known without asking it.
pub(crate) fn requires_grad(x: &Bound<'_, PyAny>) -> PyResult<Option<bool>> {
    let (Some(setup), Some(place)) = (state::setup(), place(x.py())?) else { return Ok(None) };
    // SAFETY: a tensor, which is alive.
    Ok(Some(unsafe { (setup.shim.requires_grad)(tensor_in(x, place)) } != 0))
}

/// What the work without the GIL is given: it is done by the same thread.
struct Here<T>(T);

// SAFETY: as said.
unsafe impl<T> Send for Here<T> {}

impl<T> Here<T> {
    fn get(self) -> T {
        self.0
    }
}

/// Records a graph's call by a recipe, and gives its results. None if PyTorch is to make the call, or no recipe fits. The
/// tensors of these numbers may be overwritten.
pub(crate) fn replay<'py>(
    graph: i64,
    tensors: &Bound<'py, PyList>,
    given: &[u32],
) -> PyResult<Option<Bound<'py, PyList>>> {
    let py = tensors.py();
    let (Some(setup), Some(place)) = (state::setup(), place(py)?) else { return Ok(None) };
    let mut held: SmallVec<[*const c_void; 64]> = SmallVec::with_capacity(tensors.len());
    for x in tensors.iter() {
        if !is_tensor(&x)? {
            return Ok(None);
        }
        held.push(tensor_in(&x, place));
    }
    let n = held.len() as u32;
    let mut described: SmallVec<[abi::Tensor; 16]> = SmallVec::with_capacity(held.len());
    // SAFETY: tensors, which the list keeps alive, and room for so many.
    if unsafe { (setup.shim.describe_held)(held.as_ptr(), n, described.as_mut_ptr()) } == 0 {
        return Ok(None);
    }
    // SAFETY: described just now.
    unsafe { described.set_len(held.len()) };
    let own = described.iter().find(|t| t.device_type == device::SELF);
    let device = own.map_or_else(current, |t| t.device_index);
    let mut reply = Reply::default();
    let work = Here((&described[..], &mut reply));
    let done = py.detach(|| {
        let (args, reply) = work.get();
        // SAFETY: described by the shim, for this call.
        unsafe { door::replay_held(graph, device, args, given, reply) }
    });
    if !done.map_err(|r| refused(py, r))? {
        return Ok(None);
    }
    let mut objects: SmallVec<[*mut c_void; 64]> = smallvec::smallvec![null_mut(); reply.nouts as usize];
    let mut error = abi::Error { kind: abi::error::RUNTIME, message: null() };
    // SAFETY: what the core has just answered, the arguments that it was given, and room for the results.
    let code = unsafe { (setup.shim.objects)(&reply, held.as_ptr(), objects.as_mut_ptr(), &mut error) };
    let objects = objects.into_iter().map_while(|x| {
        // SAFETY: a new reference, if it is there.
        unsafe { Bound::from_owned_ptr_or_opt(py, x.cast()) }
    });
    let objects: SmallVec<[Bound<'py, PyAny>; 64]> = objects.collect();
    match code {
        abi::OK => Ok(Some(PyList::new(py, objects)?)),
        abi::FALLBACK => Err(PyErr::fetch(py)),
        _ => {
            // SAFETY: set with this code.
            let why = unsafe { CStr::from_ptr(error.message) }.to_string_lossy().into_owned();
            Err(raise(py, Error::new(ErrorKind::Runtime, why)))
        }
    }
}
