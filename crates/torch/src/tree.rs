//! Arguments and results of functions as trees: tuples, lists, dicts and whatever else PyTorch's `torch.utils._pytree` knows,
//! with tensors at their leaves.
//!
//! A call of a function that is one program takes the tensors out of its arguments and puts its results together again. The
//! tree of a call is known from an earlier one, so that this is a walk along it.

use pyo3::exceptions::PyTypeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyList, PyTuple, PyType};

/// The structure of a value, with all in it that is no tensor.
#[pyclass(frozen, module = "oxitorch._core")]
pub(crate) struct Tree {
    root: Node,
    #[pyo3(get)]
    /// How many tensors it has.
    tensors: usize,
}

enum Node {
    /// A tensor, and whether it requires gradients.
    Tensor(bool),
    /// A value that is compared by `is`, and by `==` if it has the same type.
    Static(Py<PyAny>),
    Tuple(Vec<Node>),
    List(Vec<Node>),
    Dict(Vec<(Py<PyAny>, Node)>),
    /// Of a type that PyTorch knows how to take apart.
    Other(Box<Other>),
}

struct Other {
    class: Py<PyType>,
    /// What PyTorch tells of it besides its children.
    context: Py<PyAny>,
    flatten: Py<PyAny>,
    unflatten: Py<PyAny>,
    children: Vec<Node>,
}

/// What is looked up in PyTorch once.
struct Torch {
    tensor: Py<PyType>,
    /// By type.
    nodes: Py<PyDict>,
    is_namedtuple: Py<PyAny>,
    namedtuple: Py<PyAny>,
}

fn torch(py: Python<'_>) -> PyResult<&'static Torch> {
    static TORCH: PyOnceLock<Torch> = PyOnceLock::new();
    TORCH.get_or_try_init(py, || {
        let pytree = py.import("torch.utils._pytree")?;
        Ok(Torch {
            tensor: py.import("torch")?.getattr("Tensor")?.cast_into::<PyType>()?.unbind(),
            nodes: pytree.getattr("SUPPORTED_NODES")?.cast_into::<PyDict>()?.unbind(),
            is_namedtuple: pytree.getattr("is_namedtuple_instance")?.unbind(),
            namedtuple: py.import("collections")?.getattr("namedtuple")?.unbind(),
        })
    })
}

#[pymethods]
impl Tree {
    /// The tree of a value, and its tensors. Children of the value at the numbers in `fixed` are static, whatever they are.
    #[staticmethod]
    fn of<'py>(value: &Bound<'py, PyAny>, fixed: Vec<usize>) -> PyResult<(Tree, Bound<'py, PyList>)> {
        let tensors = PyList::empty(value.py());
        let root = match (fixed.is_empty(), value.cast::<PyTuple>()) {
            (false, Ok(all)) => {
                let child = |(i, x): (usize, Bound<'py, PyAny>)| match fixed.contains(&i) {
                    true => Ok(Node::Static(x.unbind())),
                    false => Node::of(&x, &tensors),
                };
                Node::Tuple(all.iter().enumerate().map(child).collect::<PyResult<_>>()?)
            }
            _ => Node::of(value, &tensors)?,
        };
        Ok((Tree { root, tensors: tensors.len() }, tensors))
    }

    /// The tensors of a value that has this tree; None if it has another one.
    fn take<'py>(&self, value: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, PyList>>> {
        let mut tensors = Vec::with_capacity(self.tensors);
        Ok(match self.root.take(value, &mut tensors)? {
            true => Some(PyList::new(value.py(), tensors)?),
            false => None,
        })
    }

    /// The value with these tensors.
    fn make<'py>(&self, py: Python<'py>, tensors: &Bound<'py, PyList>) -> PyResult<Bound<'py, PyAny>> {
        self.root.make(py, &mut tensors.iter())
    }
}

/// Whether a value is a tensor.
fn is_tensor(x: &Bound<'_, PyAny>) -> PyResult<bool> {
    x.is_instance(torch(x.py())?.tensor.bind(x.py()))
}

fn requires_grad(x: &Bound<'_, PyAny>) -> PyResult<bool> {
    x.getattr(intern!(x.py(), "requires_grad"))?.is_truthy()
}

/// Whether values that are no tensors are the same. What cannot be compared differs.
fn is_same(a: &Bound<'_, PyAny>, b: &Bound<'_, PyAny>) -> bool {
    a.is(b) || (a.get_type().is(b.get_type()) && a.eq(b).unwrap_or(false))
}

impl Node {
    fn of<'py>(x: &Bound<'py, PyAny>, tensors: &Bound<'py, PyList>) -> PyResult<Node> {
        let py = x.py();
        let all = |items: Vec<Bound<'py, PyAny>>| -> PyResult<Vec<Node>> {
            items.iter().map(|item| Node::of(item, tensors)).collect()
        };
        if is_tensor(x)? {
            tensors.append(x)?;
            return Ok(Node::Tensor(requires_grad(x)?));
        }
        if let Ok(tuple) = x.cast_exact::<PyTuple>() {
            return Ok(Node::Tuple(all(tuple.iter().collect())?));
        }
        if let Ok(list) = x.cast_exact::<PyList>() {
            return Ok(Node::List(all(list.iter().collect())?));
        }
        if let Ok(dict) = x.cast_exact::<PyDict>() {
            let child =
                |(k, v): (Bound<'py, PyAny>, Bound<'py, PyAny>)| Ok((k.unbind(), Node::of(&v, tensors)?));
            return Ok(Node::Dict(dict.iter().map(child).collect::<PyResult<_>>()?));
        }
        let t = torch(py)?;
        let class = x.get_type();
        let key = match t.is_namedtuple.bind(py).call1((x,))?.is_truthy()? {
            true => t.namedtuple.bind(py).clone(),
            false => class.clone().into_any(),
        };
        if let Some(known) = t.nodes.bind(py).get_item(key)? {
            let (flatten, unflatten) = (known.getattr("flatten_fn")?, known.getattr("unflatten_fn")?);
            let (children, context): (Bound<'py, PyAny>, Bound<'py, PyAny>) =
                flatten.call1((x,))?.extract()?;
            let children = all(children.try_iter()?.collect::<PyResult<_>>()?)?;
            return Ok(Node::Other(Box::new(Other {
                class: class.unbind(),
                context: context.unbind(),
                flatten: flatten.unbind(),
                unflatten: unflatten.unbind(),
                children,
            })));
        }
        if class.name()? == "ndarray" {
            return Err(PyTypeError::new_err(
                "torch.tpu.jit: an argument or a result is an array of numpy\nhint: torch.from_numpy makes a tensor of it",
            ));
        }
        Ok(Node::Static(x.clone().unbind()))
    }

    fn take<'py>(&self, x: &Bound<'py, PyAny>, tensors: &mut Vec<Bound<'py, PyAny>>) -> PyResult<bool> {
        let py = x.py();
        match self {
            Node::Tensor(wants_grad) => {
                let is_it = is_tensor(x)? && requires_grad(x)? == *wants_grad;
                if is_it {
                    tensors.push(x.clone());
                }
                Ok(is_it)
            }
            Node::Static(known) => Ok(is_same(known.bind(py), x)),
            Node::Tuple(nodes) => {
                let Ok(tuple) = x.cast_exact::<PyTuple>() else { return Ok(false) };
                take_all(nodes, tuple.len(), tuple.iter(), tensors)
            }
            Node::List(nodes) => {
                let Ok(list) = x.cast_exact::<PyList>() else { return Ok(false) };
                take_all(nodes, list.len(), list.iter(), tensors)
            }
            Node::Dict(entries) => {
                let Ok(dict) = x.cast_exact::<PyDict>() else { return Ok(false) };
                if dict.len() != entries.len() {
                    return Ok(false);
                }
                for (key, node) in entries {
                    match dict.get_item(key)? {
                        Some(value) if node.take(&value, tensors)? => {}
                        _ => return Ok(false),
                    }
                }
                Ok(true)
            }
            Node::Other(other) => {
                if !x.get_type().is(other.class.bind(py)) {
                    return Ok(false);
                }
                let apart = other.flatten.bind(py).call1((x,))?;
                let (children, context): (Bound<'py, PyAny>, Bound<'py, PyAny>) = apart.extract()?;
                let children: Vec<Bound<'py, PyAny>> = children.try_iter()?.collect::<PyResult<_>>()?;
                let same = is_same(other.context.bind(py), &context);
                Ok(same && take_all(&other.children, children.len(), children.into_iter(), tensors)?)
            }
        }
    }

    fn make<'py>(
        &self,
        py: Python<'py>,
        tensors: &mut impl Iterator<Item = Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let mut all = |nodes: &[Node]| -> PyResult<Vec<Bound<'py, PyAny>>> {
            nodes.iter().map(|node| node.make(py, tensors)).collect()
        };
        Ok(match self {
            Node::Tensor(_) => tensors
                .next()
                .ok_or_else(|| PyTypeError::new_err("there are too few tensors; please report this"))?,
            Node::Static(known) => known.bind(py).clone(),
            Node::Tuple(nodes) => PyTuple::new(py, all(nodes)?)?.into_any(),
            Node::List(nodes) => PyList::new(py, all(nodes)?)?.into_any(),
            Node::Dict(entries) => {
                let dict = PyDict::new(py);
                for (key, node) in entries {
                    dict.set_item(key, node.make(py, tensors)?)?;
                }
                dict.into_any()
            }
            Node::Other(other) => {
                let children = PyList::new(py, all(&other.children)?)?;
                other.unflatten.bind(py).call1((children, other.context.bind(py)))?
            }
        })
    }
}

fn take_all<'py>(
    nodes: &[Node],
    len: usize,
    items: impl Iterator<Item = Bound<'py, PyAny>>,
    tensors: &mut Vec<Bound<'py, PyAny>>,
) -> PyResult<bool> {
    if nodes.len() != len {
        return Ok(false);
    }
    for (node, item) in nodes.iter().zip(items) {
        if !node.take(&item, tensors)? {
            return Ok(false);
        }
    }
    Ok(true)
}
