//! Arguments and results of functions as trees: tuples, lists, dicts and whatever else PyTorch's `torch.utils._pytree` knows,
//! with tensors at their leaves.
//!
//! A call of a function that is one program takes the tensors out of its arguments and puts its results together again. The
//! tree of a call is known from an earlier one, so that this is a walk along it.

use crate::held;
use pyo3::exceptions::PyTypeError;
use pyo3::ffi;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyComplex, PyDict, PyFloat, PyInt, PyList, PyTuple, PyType};
use std::ptr::null_mut;

/// The structure of a value, with all in it that is no tensor.
#[pyclass(frozen, module = "oxitorch._core")]
pub(crate) struct Tree {
    root: Node,
    #[pyo3(get)]
    /// How many tensors it has.
    tensors: usize,
    /// How many numbers.
    #[pyo3(get)]
    numbers: usize,
}

enum Node {
    /// A tensor, and whether it requires gradients.
    Tensor(bool),
    /// A number, whichever it is.
    Number(NumberType),
    /// A value that is compared by `is`, and by `==` if it has the same type.
    Static(Py<PyAny>),
    /// The same, of what stays so if it is a number.
    Fixed(Py<PyAny>),
    Tuple(Vec<Node>),
    List(Vec<Node>),
    Dict(Vec<(Py<PyAny>, Node)>),
    /// Of a type that PyTorch knows how to take apart.
    Other(Box<Other>),
}

#[derive(Clone, Copy, PartialEq)]
enum NumberType {
    Float,
    Int,
    /// One that is traced.
    Symbol,
}

impl NumberType {
    /// A number of Python or NumPy as one of Python, and its type. What else is derived from them may be more than a number.
    fn of<'py>(x: &Bound<'py, PyAny>) -> PyResult<Option<(NumberType, Bound<'py, PyAny>)>> {
        let plain = |x: &Bound<'py, PyAny>| match () {
            () if x.is_exact_instance_of::<PyFloat>() => Some(NumberType::Float),
            () if x.is_exact_instance_of::<PyInt>() => Some(NumberType::Int),
            () => None,
        };
        if let Some(ty) = plain(x) {
            return Ok(Some((ty, x.clone())));
        }
        let class = x.get_type();
        let name = class.name()?;
        let is_numpy = class.module()? == "numpy"
            && ["float", "int", "uint"].iter().any(|t| name.to_string().starts_with(t));
        if !is_numpy {
            return Ok(None);
        }
        let item = x.call_method0(intern!(x.py(), "item"))?;
        Ok(plain(&item).map(|ty| (ty, item)))
    }
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
    /// Numbers that are traced.
    symbols: Py<PyAny>,
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
            symbols: py.import("torch.types")?.getattr("py_sym_types")?.unbind(),
            nodes: pytree.getattr("SUPPORTED_NODES")?.cast_into::<PyDict>()?.unbind(),
            is_namedtuple: pytree.getattr("is_namedtuple_instance")?.unbind(),
            namedtuple: py.import("collections")?.getattr("namedtuple")?.unbind(),
        })
    })
}

#[pymethods]
impl Tree {
    /// The tree of a value, and its tensors, with the numbers that are traced behind them (`torch.SymFloat`, `SymInt`). Children
    /// of the value at the places in `fixed` are static, whatever they are.
    #[staticmethod]
    fn of<'py>(value: &Bound<'py, PyAny>, fixed: Vec<usize>) -> PyResult<(Tree, Bound<'py, PyList>)> {
        let mut taken = Taken::default();
        let root = match (fixed.is_empty(), value.cast::<PyTuple>()) {
            (false, Ok(all)) => {
                let child = |(i, x): (usize, Bound<'py, PyAny>)| match fixed.contains(&i) {
                    true => Ok(Node::Fixed(x.unbind())),
                    false => Node::of(&x, &mut taken),
                };
                Node::Tuple(all.iter().enumerate().map(child).collect::<PyResult<_>>()?)
            }
            _ => Node::of(value, &mut taken)?,
        };
        let (tensors, numbers) = (taken.tensors.len(), taken.numbers.len());
        Ok((Tree { root, tensors, numbers }, taken.leaves(value.py())?))
    }

    /// The tensors of a value that has this tree, and its numbers behind them; and whether the tensors are PyTorch's own and
    /// parameters, and not of other classes. None if it has another tree.
    fn take<'py>(&self, value: &Bound<'py, PyAny>) -> PyResult<Option<(Bound<'py, PyList>, bool)>> {
        let mut taken =
            Taken { tensors: Vec::with_capacity(self.tensors + self.numbers), ..Taken::default() };
        if !self.root.take(value, &mut taken)? {
            return Ok(None);
        }
        let is_plain = !taken.has_others;
        Ok(Some((taken.leaves(value.py())?, is_plain)))
    }

    /// The value with these tensors, and these numbers behind them.
    fn make<'py>(&self, py: Python<'py>, leaves: &Bound<'py, PyList>) -> PyResult<Bound<'py, PyAny>> {
        let (mut tensors, mut numbers) = (leaves.iter().take(self.tensors), leaves.iter().skip(self.tensors));
        self.root.make(py, &mut tensors, &mut numbers)
    }

    /// This tree with any number where it and a value have different ones; None if they differ in anything else, or not at
    /// all.
    fn numbered(&self, value: &Bound<'_, PyAny>) -> PyResult<Option<Tree>> {
        let mut numbers = 0;
        let Some(root) = self.root.numbered(value, &mut numbers)? else { return Ok(None) };
        Ok((numbers > self.numbers).then_some(Tree { root, tensors: self.tensors, numbers }))
    }
}

/// The leaves of a value.
#[derive(Default)]
struct Taken<'py> {
    tensors: Vec<Bound<'py, PyAny>>,
    numbers: Vec<Bound<'py, PyAny>>,
    /// Whether some tensor is of a class derived from PyTorch's.
    has_others: bool,
}

impl<'py> Taken<'py> {
    fn leaves(mut self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        self.tensors.append(&mut self.numbers);
        PyList::new(py, self.tensors)
    }
}

fn requires_grad(x: &Bound<'_, PyAny>) -> PyResult<bool> {
    match if held::is_plain(x)? { held::requires_grad(x)? } else { None } {
        Some(requires_grad) => Ok(requires_grad),
        None => x.getattr(intern!(x.py(), "requires_grad"))?.is_truthy(),
    }
}

/// Whether values that are no tensors are the same. What cannot be compared differs; zeros of different signs do, though they
/// are equal, and a NaN is the same as itself.
fn is_same(a: &Bound<'_, PyAny>, b: &Bound<'_, PyAny>) -> bool {
    let bits = |x: &Bound<'_, PyAny>| {
        let float = x.cast::<PyFloat>().map(|x| [x.value().to_bits(), 0]);
        let complex = |_| x.cast::<PyComplex>().map(|x| [x.real().to_bits(), x.imag().to_bits()]);
        float.or_else(complex).ok()
    };
    let are_equal = || match bits(a) {
        None => a.eq(b).unwrap_or(false),
        own => own == bits(b),
    };
    a.is(b) || (a.get_type().is(b.get_type()) && are_equal())
}

impl Node {
    fn of<'py>(x: &Bound<'py, PyAny>, taken: &mut Taken<'py>) -> PyResult<Node> {
        let py = x.py();
        let mut all = |items: Vec<Bound<'py, PyAny>>| -> PyResult<Vec<Node>> {
            items.iter().map(|item| Node::of(item, taken)).collect()
        };
        if held::is_tensor(x)? {
            taken.tensors.push(x.clone());
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
                |(k, v): (Bound<'py, PyAny>, Bound<'py, PyAny>)| Ok((k.unbind(), Node::of(&v, taken)?));
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
        if x.is_instance(t.symbols.bind(py))? {
            taken.numbers.push(x.clone());
            return Ok(Node::Number(NumberType::Symbol));
        }
        if class.name()? == "ndarray" {
            return Err(PyTypeError::new_err(
                "torch.tpu.jit: an argument or a result is an array of numpy\nhint: torch.from_numpy makes a tensor of it",
            ));
        }
        Ok(Node::Static(x.clone().unbind()))
    }

    fn take<'py>(&self, x: &Bound<'py, PyAny>, taken: &mut Taken<'py>) -> PyResult<bool> {
        let py = x.py();
        match self {
            Node::Tensor(wants_grad) => {
                let is_it = held::is_tensor(x)? && requires_grad(x)? == *wants_grad;
                if is_it {
                    taken.has_others |= !held::is_plain(x)?;
                    taken.tensors.push(x.clone());
                }
                Ok(is_it)
            }
            Node::Number(ty) => {
                let number = NumberType::of(x)?.filter(|(own, _)| own == ty);
                let is_it = number.is_some();
                taken.numbers.extend(number.map(|(_, number)| number));
                Ok(is_it)
            }
            Node::Static(known) | Node::Fixed(known) => Ok(is_same(known.bind(py), x)),
            Node::Tuple(nodes) => {
                let Ok(tuple) = x.cast_exact::<PyTuple>() else { return Ok(false) };
                take_all(nodes, tuple.len(), tuple.iter(), taken)
            }
            Node::List(nodes) => {
                let Ok(list) = x.cast_exact::<PyList>() else { return Ok(false) };
                take_all(nodes, list.len(), list.iter(), taken)
            }
            Node::Dict(entries) => {
                let Ok(dict) = x.cast_exact::<PyDict>() else { return Ok(false) };
                if dict.len() != entries.len() {
                    return Ok(false);
                }
                let mut items = InOrder { dict, at: 0 };
                for (key, node) in entries {
                    let value = match items.next() {
                        Some((own, value)) if own.is(key) => Some(value),
                        _ => dict.get_item(key)?,
                    };
                    match value {
                        Some(value) if node.take(&value, taken)? => {}
                        _ => return Ok(false),
                    }
                }
                Ok(true)
            }
            Node::Other(other) => {
                let Some(children) = other.children_of(x)? else { return Ok(false) };
                take_all(&other.children, children.len(), children.into_iter(), taken)
            }
        }
    }

    /// See [`Tree::numbered`].
    fn numbered(&self, x: &Bound<'_, PyAny>, numbers: &mut usize) -> PyResult<Option<Node>> {
        let py = x.py();
        let mut all = |nodes: &[Node], items: Vec<Bound<'_, PyAny>>| -> PyResult<Option<Vec<Node>>> {
            if nodes.len() != items.len() {
                return Ok(None);
            }
            nodes.iter().zip(items).map(|(node, item)| node.numbered(&item, numbers)).collect()
        };
        Ok(match self {
            Node::Tensor(wants_grad) => {
                (held::is_tensor(x)? && requires_grad(x)? == *wants_grad).then_some(Node::Tensor(*wants_grad))
            }
            Node::Number(ty) => {
                *numbers += 1;
                NumberType::of(x)?.filter(|(own, _)| own == ty).map(|_| Node::Number(*ty))
            }
            Node::Static(known) if is_same(known.bind(py), x) => Some(Node::Static(known.clone_ref(py))),
            Node::Static(known) => match (NumberType::of(known.bind(py))?, NumberType::of(x)?) {
                (Some((a, _)), Some((b, _))) if a == b => {
                    *numbers += 1;
                    Some(Node::Number(a))
                }
                _ => None,
            },
            Node::Fixed(known) => is_same(known.bind(py), x).then(|| Node::Fixed(known.clone_ref(py))),
            Node::Tuple(nodes) => {
                let Ok(tuple) = x.cast_exact::<PyTuple>() else { return Ok(None) };
                all(nodes, tuple.iter().collect())?.map(Node::Tuple)
            }
            Node::List(nodes) => {
                let Ok(list) = x.cast_exact::<PyList>() else { return Ok(None) };
                all(nodes, list.iter().collect())?.map(Node::List)
            }
            Node::Dict(entries) => {
                let Ok(dict) = x.cast_exact::<PyDict>() else { return Ok(None) };
                let mut new = Vec::with_capacity(entries.len());
                for (key, node) in entries {
                    let Some(value) = dict.get_item(key)? else { return Ok(None) };
                    let Some(node) = node.numbered(&value, numbers)? else { return Ok(None) };
                    new.push((key.clone_ref(py), node));
                }
                (dict.len() == new.len()).then_some(Node::Dict(new))
            }
            Node::Other(other) => {
                let Some(children) = other.children_of(x)? else { return Ok(None) };
                all(&other.children, children)?.map(|children| {
                    Node::Other(Box::new(Other {
                        class: other.class.clone_ref(py),
                        context: other.context.clone_ref(py),
                        flatten: other.flatten.clone_ref(py),
                        unflatten: other.unflatten.clone_ref(py),
                        children,
                    }))
                })
            }
        })
    }

    fn make<'py>(
        &self,
        py: Python<'py>,
        tensors: &mut impl Iterator<Item = Bound<'py, PyAny>>,
        numbers: &mut impl Iterator<Item = Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let mut all = |nodes: &[Node]| -> PyResult<Vec<Bound<'py, PyAny>>> {
            nodes.iter().map(|node| node.make(py, tensors, numbers)).collect()
        };
        Ok(match self {
            Node::Tensor(_) => tensors
                .next()
                .ok_or_else(|| PyTypeError::new_err("there are too few tensors; please report this"))?,
            Node::Number(_) => numbers
                .next()
                .ok_or_else(|| PyTypeError::new_err("there are too few numbers; please report this"))?,
            Node::Static(known) | Node::Fixed(known) => known.bind(py).clone(),
            Node::Tuple(nodes) => PyTuple::new(py, all(nodes)?)?.into_any(),
            Node::List(nodes) => PyList::new(py, all(nodes)?)?.into_any(),
            Node::Dict(entries) => {
                let dict = PyDict::new(py);
                for (key, node) in entries {
                    dict.set_item(key, node.make(py, tensors, numbers)?)?;
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

/// The items of a dict, which may change meanwhile: what is compared on the way may be of any class.
struct InOrder<'a, 'py> {
    dict: &'a Bound<'py, PyDict>,
    at: ffi::Py_ssize_t,
}

impl<'py> Iterator for InOrder<'_, 'py> {
    type Item = (Bound<'py, PyAny>, Bound<'py, PyAny>);

    fn next(&mut self) -> Option<Self::Item> {
        let (mut key, mut value) = (null_mut(), null_mut());
        let py = self.dict.py();
        // SAFETY: a dict; what it lends is taken hold of at once.
        unsafe {
            let found = ffi::PyDict_Next(self.dict.as_ptr(), &mut self.at, &mut key, &mut value) != 0;
            found.then(|| (Bound::from_borrowed_ptr(py, key), Bound::from_borrowed_ptr(py, value)))
        }
    }
}

impl Other {
    /// The children of a value of this type, if PyTorch tells the same of it.
    fn children_of<'py>(&self, x: &Bound<'py, PyAny>) -> PyResult<Option<Vec<Bound<'py, PyAny>>>> {
        let py = x.py();
        if !x.get_type().is(self.class.bind(py)) {
            return Ok(None);
        }
        let apart = self.flatten.bind(py).call1((x,))?;
        let (children, context): (Bound<'py, PyAny>, Bound<'py, PyAny>) = apart.extract()?;
        let same = is_same(self.context.bind(py), &context);
        same.then(|| children.try_iter()?.collect()).transpose()
    }
}

fn take_all<'py>(
    nodes: &[Node],
    len: usize,
    items: impl Iterator<Item = Bound<'py, PyAny>>,
    taken: &mut Taken<'py>,
) -> PyResult<bool> {
    if nodes.len() != len {
        return Ok(false);
    }
    for (node, item) in nodes.iter().zip(items) {
        if !node.take(&item, taken)? {
            return Ok(false);
        }
    }
    Ok(true)
}
