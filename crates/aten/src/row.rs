//! A row: an op and all that is known of it.

use crate::args::{PlaceOffsets, Scalar, Tensor};
use crate::domain::CheckDtype;
use crate::numbers::{CheckNumbers, CountNumbers};
use crate::out::{OutDtype, OutStrides};
use crate::params::{Lowering, Param};
use crate::promote::Promote;
use oxitorch_hlo::{Builder, Direction, MemorySpace, Value};
use std::borrow::Cow;

/// A builder method, or a closure over builder methods.
pub type UnaryFn = fn(&Builder, Value) -> Value;
/// A builder method, or a closure over builder methods.
pub type BinaryFn = fn(&Builder, Value, Value) -> Value;

/// How an op is lowered.
pub enum Rule {
    /// `(Tensor self)`
    Unary(Promote, UnaryFn),
    /// `(Tensor self, Tensor other)`
    Binary(Promote, BinaryFn),
    /// `(Tensor self, Tensor other)` to bool
    Compare(Direction),
    /// `(Tensor self, Scalar other)` to bool
    CompareScalar(Direction),
    /// Anything else: a function whose parameter types state the schema.
    Custom(&'static dyn Lowering),
}

impl Rule {
    /// The parameters, in schema order.
    pub fn params(&self) -> &'static [Param] {
        const TENSOR: Param = Param::of::<Tensor>();
        match self {
            Rule::Unary(..) => &[TENSOR],
            Rule::Binary(..) | Rule::Compare(_) => &[TENSOR, TENSOR],
            Rule::CompareScalar(_) => const { &[TENSOR, Param::of::<Scalar>()] },
            Rule::Custom(f) => f.params(),
        }
    }
}

/// Which strides a new result has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Layout {
    /// Row-major.
    Contiguous,
    /// TensorIterator's rule over the tensor arguments.
    Pointwise,
    /// Like the first tensor argument where that is dense, else row-major.
    LikeFirst,
    /// The first result with its dimensions in the order of the first tensor's, the others row-major.
    InOrderOfFirst,
    /// Dimensions 1 and 2 swapped: what heads give stands side by side.
    HeadsLast,
    /// The first result as `InOrderOfFirst`, the others as `HeadsLast`.
    Attention,
    /// Each result as `LikeFirst` of one tensor: the first of the second tensor, the next of the third.
    LikeFollowing,
    /// Channels last where a tensor of the result's rank (or a whole list of them) is, else row-major.
    ChannelsLast,
    /// TensorIterator's rule where the first tensor is indexed by the list of tensors after it.
    Indexed,
    /// Row-major but for the last two dimensions, which are swapped.
    ColumnMajor,
    /// Column-major where a result has the rank of the first tensor, else row-major.
    Matrices,
    /// Column-major where the first flag, `left`, is set, else row-major.
    Solution,
    /// The first result as `Solution`, the others as `Matrices`.
    SolutionAndMatrices,
    /// Row-major if a tensor is complex, else as `Pointwise`.
    RealPointwise,
    /// Fourier transforms: the dimensions of the first list innermost, the others in the order of their strides.
    Transformed,
    /// Slices along the dimension of the first integer, one after the other; other results row-major.
    Slices,
}

/// One op.
pub struct Row {
    /// Functional overload: `add.Tensor`; or one that only exists mutating: `_fused_adamw_`.
    pub name: &'static str,
    /// How it is lowered.
    pub rule: Rule,
    /// Strides of its results.
    pub layout: Layout,
    /// Positions of row parameters that the op overwrites though its schema does not say so.
    pub writes: &'static [usize],
    /// Overloads that it serves though their names are not made from its own.
    pub serves: &'static [&'static str],
    /// Why there is a row for something that PyTorch would decompose by itself.
    pub composite: Option<&'static str>,
    /// For results whose size depends on values: the row that tells the size. It takes the same arguments and gives one
    /// s64, which this row takes as its last parameter, an attribute that the schema does not have.
    pub sized_by: Option<&'static str>,
    /// For results whose size depends on numbers that are otherwise operands: the size, which this row takes as its last
    /// parameter, an attribute that the schema does not have. The caller finds it on every call.
    pub counted_by: Option<CountNumbers>,
    /// Refuses numbers that torch refuses; the caller runs it on every call, before the numbers become operands.
    pub check_numbers: Option<CheckNumbers>,
    /// Refuses offsets that torch refuses, and counts them from the front; the caller runs it on every call.
    pub place_offsets: Option<PlaceOffsets>,
    /// Refuses dtypes that torch refuses, and the lowering would not.
    pub check_dtype: Option<CheckDtype>,
    /// Positions of row parameters that may have no memory in common with what the op writes.
    pub apart: &'static [usize],
    /// Whether no tensor that it reads may overlap in part with what it writes.
    pub iterated: bool,
    /// Whether it may write to a tensor whose elements share memory: one value goes to many places.
    pub fills: bool,
    /// What is warned of where its in-place form writes to such a tensor all the same.
    pub warns_of_expanded: Option<&'static str>,
    /// Which dtypes its `out=` tensors may have, where that does not follow; see [`Row::out_dtypes`].
    pub out_dtype: Option<OutDtype>,
    /// Which strides they get where they had another size than the result.
    pub out_strides: OutStrides,
    /// Whether one of any shape will do if it has as many elements as the result.
    pub out_by_numel: bool,
    /// What is said where two of them share memory; nothing if they may.
    pub outs_apart: Option<&'static str>,
    /// Whether PyTorch takes it apart itself, as it moves data between devices; only its `_foreach_` form is served.
    pub moves: bool,
    /// Whether a tensor that is in no list may be in host memory: an index as of `x[i]`, the rate of a fused optimizer, the
    /// lengths of sequences.
    pub takes_host_tensor: bool,
    /// Whether it has products that follow `torch.set_float32_matmul_precision`.
    pub products: bool,
    /// The overload of torch's own kernel that a program calls for large tensors: where the compiler for processors has no
    /// vector code for a function of numbers.
    pub library: Option<&'static str>,
    /// Whether torch's kernel, where a program calls it, may find no solution.
    pub may_fail: bool,
    /// If its result is to be kept in another memory space than its operand.
    pub memory: Option<MemorySpace>,
    /// Whether it is computed though nobody can see its result: who calls it wants what it asserts.
    pub only_asserts: bool,
    /// Only other rows speak of it; there is no such overload.
    pub internal: bool,
}

impl Row {
    /// A row with results in row-major order.
    pub const fn new(name: &'static str, rule: Rule) -> Row {
        Row {
            name,
            rule,
            layout: Layout::Contiguous,
            writes: &[],
            serves: &[],
            composite: None,
            sized_by: None,
            counted_by: None,
            check_numbers: None,
            place_offsets: None,
            check_dtype: None,
            apart: &[],
            iterated: false,
            fills: false,
            warns_of_expanded: None,
            out_dtype: None,
            out_strides: OutStrides::OfResult,
            out_by_numel: false,
            outs_apart: None,
            moves: false,
            takes_host_tensor: false,
            products: false,
            library: None,
            may_fail: false,
            memory: None,
            only_asserts: false,
            internal: false,
        }
    }

    /// The same with other strides.
    pub const fn layout(self, layout: Layout) -> Row {
        let iterated = self.iterated || matches!(layout, Layout::Pointwise);
        Row { layout, iterated, ..self }
    }

    /// The same for an op that overwrites these parameters without saying so in its schema.
    pub const fn writes(self, writes: &'static [usize]) -> Row {
        Row { writes, ..self }
    }

    /// See [`Row::serves`].
    pub const fn serves(self, overloads: &'static [&'static str]) -> Row {
        Row { serves: overloads, ..self }
    }

    /// The same for an op that PyTorch would decompose, with the reason to keep it whole.
    pub const fn composite(self, reason: &'static str) -> Row {
        Row { composite: Some(reason), ..self }
    }

    /// The same for an op whose result's size another row computes.
    pub const fn sized_by(self, row: &'static str) -> Row {
        Row { sized_by: Some(row), ..self }
    }

    /// The same for an op whose result's size its numbers tell.
    pub const fn counted_by(self, count: CountNumbers) -> Row {
        Row { counted_by: Some(count), ..self }
    }

    /// The same for an op that does not take every number.
    pub const fn check_numbers(self, check: CheckNumbers) -> Row {
        Row { check_numbers: Some(check), ..self }
    }

    /// See [`Row::place_offsets`].
    pub const fn place_offsets(self, place: PlaceOffsets) -> Row {
        Row { place_offsets: Some(place), ..self }
    }

    /// The same for an op that does not take every dtype.
    pub const fn dtypes(self, check: CheckDtype) -> Row {
        Row { check_dtype: Some(check), ..self }
    }

    /// The same for an op that reads these parameters while it writes.
    pub const fn apart(self, params: &'static [usize]) -> Row {
        Row { apart: params, ..self }
    }

    /// The same for an op that PyTorch runs with TensorIterator though its results have other strides.
    pub const fn iterated(self) -> Row {
        Row { iterated: true, ..self }
    }

    /// The same for an op that may write one value to many places at once, as on PyTorch's other devices.
    pub const fn fills(self) -> Row {
        Row { fills: true, ..self }
    }

    /// See [`Row::warns_of_expanded`].
    pub const fn warns_of_expanded(self, text: &'static str) -> Row {
        Row { warns_of_expanded: Some(text), ..self }
    }

    /// The same for an op whose `out=` tensors have other dtypes than its rule and its layout say.
    pub const fn out_dtype(self, dtype: OutDtype) -> Row {
        Row { out_dtype: Some(dtype), ..self }
    }

    /// The same for an op that gives a resized `out=` tensor these strides.
    pub const fn out_strides(self, strides: OutStrides) -> Row {
        Row { out_strides: strides, ..self }
    }

    /// See [`Row::out_by_numel`].
    pub const fn out_by_numel(self) -> Row {
        Row { out_by_numel: true, ..self }
    }

    /// See [`Row::outs_apart`].
    pub const fn outs_apart(self, text: &'static str) -> Row {
        Row { outs_apart: Some(text), ..self }
    }

    /// See [`Row::moves`].
    pub const fn moves(self) -> Row {
        Row { moves: true, ..self }
    }

    /// See [`Row::takes_host_tensor`].
    pub const fn takes_host_tensor(self) -> Row {
        Row { takes_host_tensor: true, ..self }
    }

    /// The same for an op whose matrix products or convolutions follow the precision that the user asked for.
    pub const fn products(self) -> Row {
        Row { products: true, ..self }
    }

    /// See [`Row::library`].
    pub const fn library(self, overload: &'static str) -> Row {
        Row { library: Some(overload), ..self }
    }

    /// The same for an op of which torch's kernel may find no solution.
    pub const fn may_fail(self) -> Row {
        Row { may_fail: true, ..self }
    }

    /// The same for an op that does nothing but take its operand to this memory space.
    pub const fn kept_in(self, memory: MemorySpace) -> Row {
        Row { memory: Some(memory), ..self }
    }

    /// The same for an op that is called for what it asserts.
    pub const fn only_asserts(self) -> Row {
        Row { only_asserts: true, ..self }
    }

    /// The same for a row that is no overload.
    pub const fn internal(self) -> Row {
        Row { internal: true, ..self }
    }

    /// The parameters, in schema order without placement arguments; a generator comes where the schema has it, else last.
    pub fn params(&self) -> &'static [Param] {
        self.rule.params()
    }

    /// Which dtypes its `out=` tensors may have. TensorIterator casts what it computes, but for functions of one tensor
    /// only where they make floats of integers.
    pub fn out_dtypes(&self) -> OutDtype {
        match (self.out_dtype, &self.rule, self.layout) {
            (Some(dtype), ..) => dtype,
            (_, Rule::Unary(Promote::Float, _), _) => OutDtype::Castable,
            (_, Rule::Unary(..), _) => OutDtype::Same,
            (_, _, Layout::Pointwise) => OutDtype::Castable,
            _ => OutDtype::Same,
        }
    }

    /// Whether an `out=` tensor of another size, empty or not, gets the strides of a new result. If those are row-major,
    /// there is no difference.
    pub fn gives_out_strides(&self, is_empty: bool) -> bool {
        self.layout != Layout::Contiguous
            && match self.out_strides {
                OutStrides::OfResult => true,
                OutStrides::RowMajor => false,
                OutStrides::OfResultIfEmpty => is_empty,
            }
    }

    /// `add` of `add.Tensor`.
    pub fn base(&self) -> &'static str {
        self.name.split_once('.').map_or(self.name, |(base, _)| base)
    }
}

/// A row for a pointwise op of one tensor.
pub const fn unary(name: &'static str, p: Promote, f: UnaryFn) -> Row {
    Row::new(name, Rule::Unary(p, f)).layout(Layout::Pointwise)
}

/// A row for a pointwise op of two tensors.
pub const fn binary(name: &'static str, p: Promote, f: BinaryFn) -> Row {
    Row::new(name, Rule::Binary(p, f)).layout(Layout::Pointwise)
}

/// A row for a comparison of two tensors.
pub const fn compare(name: &'static str, dir: Direction) -> Row {
    Row::new(name, Rule::Compare(dir)).layout(Layout::Pointwise)
}

/// A row for a comparison with a number.
pub const fn compare_scalar(name: &'static str, dir: Direction) -> Row {
    Row::new(name, Rule::CompareScalar(dir)).layout(Layout::Pointwise)
}

/// `op!("gather", gather)`: a row for a typed function.
#[macro_export]
macro_rules! op {
    ($name:literal, $f:expr) => {
        $crate::Row::new($name, $crate::Rule::Custom(&$crate::params::Handler::new($f)))
    };
}

/// `pointwise!("add.Tensor", add)`: the same with TensorIterator's strides.
#[macro_export]
macro_rules! pointwise {
    ($name:literal, $f:expr) => {
        $crate::op!($name, $f).layout($crate::Layout::Pointwise)
    };
}

/// An op with its namespace, as messages name it: `aten::mm`, `torchvision::nms`.
pub fn qualified(name: &str) -> Cow<'_, str> {
    if name.contains("::") { name.into() } else { format!("aten::{name}").into() }
}
