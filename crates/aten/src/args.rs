//! Recorded arguments, and what lowerings take of them.

use crate::error::Result;
use oxitorch_hlo::{Builder, DType, Dims, TensorType, Value};

/// A float as its bits, so that arguments can be compared and hashed.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct F64Bits(u64);

impl F64Bits {
    /// The bits of `x`.
    pub fn new(x: f64) -> Self {
        F64Bits(x.to_bits())
    }

    /// The number.
    pub fn get(self) -> f64 {
        f64::from_bits(self.0)
    }
}

impl std::fmt::Debug for F64Bits {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}", self.get())
    }
}

impl From<f64> for F64Bits {
    fn from(x: f64) -> Self {
        Self::new(x)
    }
}

/// The kind of a Python number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NumKind {
    /// `True`
    Bool,
    /// `1`
    Int,
    /// `1.0`
    Float,
    /// `1j`
    Complex,
}

impl NumKind {
    /// The dtype of the 0-d operand that carries such a number.
    pub fn dtype(self) -> DType {
        match self {
            NumKind::Bool => DType::Pred,
            NumKind::Int => DType::S64,
            NumKind::Float => DType::F64,
            NumKind::Complex => DType::C128,
        }
    }
}

/// A tensor argument.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct TensorArg {
    /// Its place in the operand list.
    pub operand: u32,
    /// Its dtype and shape.
    pub ty: TensorType,
    /// Whether it is a Python number that PyTorch wrapped into a 0-d tensor.
    pub wrapped: bool,
    /// Its strides, for [`Layout`](crate::Layout); lowerings do not look at them.
    pub strides: Dims,
}

/// A number argument that is an operand: a 0-d pred, s64, f64 or c128 by its kind.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct ScalarArg {
    /// Its place in the operand list.
    pub operand: u32,
    /// What it was in Python.
    pub kind: NumKind,
}

/// A recorded argument. Tensors, runtime numbers and generator states are operands, everything else is an attribute.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
#[allow(missing_docs)] // the variants say it
pub enum Arg {
    None,
    Tensor(TensorArg),
    Tensors(Vec<Option<TensorArg>>),
    Scalar(ScalarArg),
    /// `int`; dtypes travel as their `ScalarType` code.
    Int(i64),
    Float(F64Bits),
    Bool(bool),
    Complex(F64Bits, F64Bits),
    Ints(Dims),
    Floats(Vec<F64Bits>),
    Bools(Vec<bool>),
    Str(String),
    /// A generator: the operand is u64\[2\], seed and offset in Philox blocks.
    Rng(u32),
    /// The [`Offset`] with this number.
    Offset(u32),
    /// So many [`Offset`]s from this number on.
    Offsets(u32, u32),
}

/// What the engine has to make of an argument for a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ParamKind {
    /// [`Arg::Tensor`]
    Tensor,
    /// [`Arg::Tensor`] or [`Arg::None`]
    OptTensor,
    /// [`Arg::Tensors`]
    Tensors,
    /// [`Arg::Tensors`] with holes
    OptTensors,
    /// [`Arg::Scalar`]: always an operand
    Scalar,
    /// [`Arg::Scalar`] or [`Arg::None`]
    OptScalar,
    /// [`Arg::None`] for the number 1, else [`Arg::Scalar`]; see [`number_arg`]
    Alpha,
    /// An attribute if small and simple, else [`Arg::Scalar`]; see [`number_arg`]
    Exponent,
    /// Part of the program: [`Arg::Int`], [`Arg::Float`], [`Arg::Bool`], [`Arg::Ints`], ..., [`Arg::None`]
    Attr,
    /// [`Arg::None`] for the number 0, else [`Arg::Scalar`]; see [`number_arg`]
    Rate,
    /// [`Arg::Tensor`], 1-d and s64 or f64, or [`Arg::None`]: a list of numbers that is an operand
    Numbers,
    /// [`Arg::Rng`]
    Rng,
    /// [`Arg::Offset`]
    Offset,
    /// [`Arg::Offsets`]
    Offsets,
}

/// A Python number before it is known whether it becomes an operand.
#[derive(Clone, Copy, Debug, PartialEq)]
#[allow(missing_docs)]
pub enum Number {
    Bool(bool),
    Int(i64),
    Float(f64),
    Complex(f64, f64),
}

impl Number {
    /// The integer or bool in a 0-d tensor of the host; `None` for other dtypes.
    pub fn read(dtype: DType, bytes: &[u8]) -> Option<Number> {
        let bytes = bytes.get(..dtype.size_bytes())?;
        if dtype == DType::Pred {
            return Some(Number::Bool(bytes != [0]));
        }
        if !dtype.is_integral() {
            return None;
        }
        let negative = dtype.is_signed() && bytes.last().is_some_and(|b| b & 0x80 != 0);
        let mut wide = if negative { [0xff; 8] } else { [0; 8] };
        wide[..bytes.len()].copy_from_slice(bytes);
        Some(Number::Int(i64::from_le_bytes(wide)))
    }
}

/// The attribute form of a number for this parameter, or `None` if it must be an operand.
pub fn number_arg(kind: ParamKind, number: Number) -> Option<Arg> {
    let attribute = || match number {
        Number::Bool(x) => Arg::Bool(x),
        Number::Int(x) => Arg::Int(x),
        Number::Float(x) => Arg::Float(x.into()),
        Number::Complex(re, im) => Arg::Complex(re.into(), im.into()),
    };
    match (kind, number) {
        (ParamKind::Scalar | ParamKind::OptScalar, _) => None,
        // `alpha=1.0` on integers is an error that torch reports, so a float 1 stays visible.
        (ParamKind::Alpha, Number::Int(1)) => Some(Arg::None),
        (ParamKind::Alpha, _) => None,
        (ParamKind::Rate, Number::Float(0.0) | Number::Int(0)) => Some(Arg::None),
        (ParamKind::Rate, _) => None,
        (ParamKind::Exponent, Number::Int(-2..=8)) => Some(attribute()),
        (ParamKind::Exponent, Number::Float(x)) if EXPONENTS.contains(&x) => Some(attribute()),
        (ParamKind::Exponent, _) => None,
        _ => Some(attribute()),
    }
}

/// Whether a number for this parameter is an operand, so that [`number_arg`] gives nothing.
pub fn is_operand(kind: ParamKind, number: Number) -> bool {
    match kind {
        ParamKind::Scalar | ParamKind::OptScalar => true,
        ParamKind::Alpha => number != Number::Int(1),
        _ => number_arg(kind, number).is_none(),
    }
}

/// Exponents that have a program of their own.
const EXPONENTS: &[f64] = &[-2.0, -1.0, -0.5, 0.5, 1.0, 2.0, 3.0, 4.0];

/// A tensor as a lowering sees it.
#[derive(Clone, Copy, Debug)]
pub struct Tensor {
    /// Its value in the program.
    pub value: Value,
    /// Its dtype.
    pub dtype: DType,
    /// Number of dimensions.
    pub rank: usize,
    /// Whether it is a wrapped Python number, which promotes less than a tensor.
    pub wrapped: bool,
}

impl From<Tensor> for Value {
    fn from(t: Tensor) -> Value {
        t.value
    }
}

/// A number known only when the program runs.
#[derive(Clone, Copy, Debug)]
pub struct Scalar {
    /// A 0-d pred, s64, f64 or c128.
    pub value: Value,
    /// What it was in Python.
    pub kind: NumKind,
}

impl Scalar {
    /// As the 0-d tensor that PyTorch would wrap it into.
    pub fn tensor(self) -> Tensor {
        Tensor { value: self.value, dtype: self.kind.dtype(), rank: 0, wrapped: true }
    }
}

/// An `int` that does not shape the program: a 0-d s64 operand.
#[derive(Clone, Copy, Debug)]
pub struct Integer(pub Value);

/// Integers that do not shape the program: s64 `[n]`.
#[derive(Clone, Copy, Debug)]
pub struct Integers(pub Value);

/// Floats that do not shape the program, other than by how many they are: f64 `[n]`.
#[derive(Clone, Copy, Debug)]
pub struct Floats(pub Value);

/// A factor that is nearly always 1 and then not there at all.
#[derive(Clone, Copy, Debug)]
pub enum Alpha {
    /// The number 1.
    One,
    /// Anything else.
    Times(Scalar),
}

/// A probability that is nearly always 0, and then what it is for is not there at all.
#[derive(Clone, Copy, Debug)]
pub enum Rate {
    /// The number 0.
    Zero,
    /// Anything else.
    Of(Scalar),
}

/// The exponent of a power: small ones shape the program, others are operands.
#[derive(Clone, Copy, Debug)]
pub enum Exponent {
    /// A small Python integer.
    Int(i64),
    /// A float among a few simple ones.
    Float(f64),
    /// Anything else.
    Scalar(Scalar),
}

/// A number that changes the structure of the program: `ord` of a norm, for instance. A new one is a new program.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Const(pub Number);

impl Const {
    /// As a float; complex numbers lose their imaginary part.
    pub fn f64(self) -> f64 {
        match self.0 {
            Number::Bool(x) => f64::from(u8::from(x)),
            Number::Int(x) => x as f64,
            Number::Float(x) | Number::Complex(x, _) => x,
        }
    }
}

/// An `int` that says where and shapes nothing: the start of a slice, a shift, a diagonal. It is part of a program while it
/// stays the same, and becomes an operand of the program when it was seen to change.
#[derive(Clone, Copy, Debug)]
pub enum Offset {
    /// Known when the program is made.
    Known(i64),
    /// A 0-d s64.
    Given(Value),
}

/// A row's check of its offsets, given the arguments: those that count from the end are made to count from the front.
pub type PlaceOffsets = fn(&[Arg], &mut [i64]) -> Result<()>;

impl Offset {
    /// The number, if the program is made for it.
    pub fn known(self) -> Option<i64> {
        match self {
            Offset::Known(n) => Some(n),
            Offset::Given(_) => None,
        }
    }

    /// As a 0-d value of an integer dtype.
    pub fn value(self, b: &Builder, dtype: DType) -> Value {
        match self {
            Offset::Known(n) => b.scalar_i64(dtype, n),
            Offset::Given(v) => b.convert(v, dtype),
        }
    }
}

/// A generator's state: u64\[2\], seed and offset in Philox blocks of 128 bits.
#[derive(Clone, Copy, Debug)]
pub struct Rng(pub Value);
