//! A call of an overload, as PyTorch hands it over, and its results.

use crate::config::Switches;
use crate::inst::{Format, Out};
use crate::recipe::Rng;
use crate::shared::Shared;
use crate::site::Site;
use crate::tensor::TensorRef;
use crate::value::Slot;
use oxitorch_aten::args::Number;
use oxitorch_aten::{self as aten, Binding, Form, Schema, Source};
use oxitorch_hlo::TensorType;
use smallvec::SmallVec;

/// An argument as PyTorch hands it over; borrowed for the call.
#[derive(Clone, Debug)]
pub enum ArgRef<'a> {
    /// `None`
    None,
    /// `Tensor`
    Tensor(TensorRef<'a>),
    /// `Tensor[]` and `Tensor?[]`
    Tensors(Vec<TensorRef<'a>>),
    /// A number, or anything that travels as one (dtype codes, layouts, bool)
    Number(Number),
    /// `int[]`
    Ints(&'a [i64]),
    /// `float[]`
    Floats(&'a [f64]),
    /// `bool[]`, as 0 and 1
    Bools(&'a [i64]),
    /// `Scalar[]`
    Numbers(Vec<Number>),
    /// `str`
    Str(&'a str),
    /// A generator, by the front end's handle
    Generator(usize),
    /// Something that no row takes
    Other,
}

/// A result as PyTorch needs it.
#[derive(Debug)]
pub enum Output {
    /// A new tensor over this storage.
    New(Slot, Meta),
    /// The argument at this position.
    Arg(usize),
    /// An entry of the list argument at this position.
    ArgItem(usize, usize),
    /// The argument at this position, to be resized to this new tensor and overwritten by it.
    Resized {
        /// The argument.
        arg: usize,
        /// The new tensor's storage.
        slot: Slot,
        /// The new tensor.
        meta: Meta,
    },
    /// An undefined tensor.
    Undefined,
    /// So many of the next outputs form a list.
    List(usize),
}

/// dtype, sizes and strides of a new tensor.
#[derive(Clone, Debug)]
pub struct Meta(pub(crate) Shared<Out>);

impl Meta {
    pub(crate) fn new(out: &Shared<Out>) -> Meta {
        Meta(out.clone())
    }

    /// Whether what it refers to is never let go.
    pub fn is_for_ever(&self) -> bool {
        matches!(self.0, Shared::Kept(_))
    }

    /// dtype and sizes.
    pub fn ty(&self) -> &TensorType {
        &self.0.ty
    }

    /// Strides in elements.
    pub fn strides(&self) -> &[i64] {
        &self.0.strides
    }

    /// Whether the strides are row-major.
    pub fn is_contiguous(&self) -> bool {
        self.0.contiguous
    }
}

/// An overload that the engine serves.
pub struct Op {
    /// `add.out`
    pub name: String,
    pub(crate) binding: Binding,
    pub(crate) row: &'static aten::Row,
    pub(crate) returns: Vec<Return>,
    /// Whether it depends on the precision of float32 products.
    products: bool,
    /// Whether host tensors of any size may stand in its `Tensor?[]` lists, as index tensors may.
    pub(crate) host_lists: bool,
    /// Position of a `memory_format=` argument.
    pub(crate) format: Option<usize>,
    /// See [`Op::is_plain`].
    plain: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Return {
    /// A tensor of the row.
    New,
    /// A list of all the row's tensors.
    List,
    /// The argument at this position.
    Arg(usize),
}

impl Op {
    /// Binds an overload to a row.
    pub fn bind(schema: &Schema) -> Option<Op> {
        let binding = aten::bind(schema)?;
        let returns = schema.returns.iter().map(|r| {
            let same = |a: &aten::Argument| r.alias.is_some() && a.alias == r.alias;
            match schema.args.iter().position(same) {
                Some(i) => Return::Arg(i),
                None if r.ty.ends_with("[]") => Return::List,
                None => Return::New,
            }
        });
        let returns: Vec<Return> = returns.collect();
        let format = schema.args.iter().position(|a| a.ty == "MemoryFormat?");
        let host_lists = schema.args.iter().any(|a| a.ty == "Tensor?[]");
        let row = aten::row(binding.op);
        let products = row.products;
        let in_order = (0..schema.args.len()).map(Source::Arg).eq(binding.params.iter().cloned());
        let asked = row.counted_by.is_some() || row.sized_by.is_some() || row.place_offsets.is_some();
        let one = matches!((&binding.form, &returns), (Form::Functional, r) if *r == [Return::New]);
        let plain = one && in_order && !asked && format.is_none();
        Some(Op { name: schema.name(), row, binding, returns, products, host_lists, format, plain })
    }
}

impl Op {
    /// Whether it looks at [`Switches::matmul`]; for others that switch stays as it is by default.
    pub fn has_products(&self) -> bool {
        self.products
    }

    /// Whether the arguments of a call are the row's, one by one, and its result is one new tensor.
    pub(crate) fn is_plain(&self) -> bool {
        self.plain
    }

    /// Whether it is PyTorch's to take apart, as it moves data between devices.
    pub fn moves(&self) -> bool {
        self.row.moves && !matches!(self.binding.form, Form::Foreach(_))
    }

    pub(crate) fn row_id(&self) -> aten::OpId {
        self.binding.op
    }

    /// The second word of a plain call's key.
    pub(crate) fn key_word(&self, switches: &Switches) -> u64 {
        key_word(self.binding.op, Format::Preserve, switches)
    }

    /// What is warned of where it is told to write to a tensor whose elements share memory: its first argument.
    pub fn warns_of_expanded(&self) -> Option<&'static str> {
        let first = matches!(self.binding.form, Form::InPlace(0));
        self.row.warns_of_expanded.filter(|_| first)
    }

    /// Whether a tensor that is in no list may be in host memory.
    pub(crate) fn takes_host_tensor(&self) -> bool {
        self.row.takes_host_tensor
    }

    /// Whether it takes a list of index tensors.
    pub(crate) fn takes_indices(&self) -> bool {
        self.host_lists
    }
}

/// What a key says besides the overload and its arguments.
pub(crate) fn key_word(row: aten::OpId, format: Format, switches: &Switches) -> u64 {
    u64::from(row.0) | (format as u64) << 16 | switches.word() << 24
}

/// A call in progress.
pub struct Call<'c, 'a> {
    /// Ordinal of the device that runs it.
    pub device: u16,
    /// The overload.
    pub op: &'c Op,
    /// Its arguments, by schema position.
    pub args: &'c [ArgRef<'a>],
    /// Where random numbers come from.
    pub rng: Rng<'c>,
    /// The Python line.
    pub site: Site,
    /// The switches at this moment.
    pub switches: Switches,
    /// The size of a result that depends on values, once it is known; callers leave it out.
    pub size: Option<i64>,
}

/// The results of a call.
pub type Outputs = SmallVec<[Output; 1]>;
