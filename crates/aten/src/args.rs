//! Recorded arguments, and the Rust types that a lowering may take them as.
//!
//! The type of a parameter decides two things at once: which schema types it stands for, and whether the argument is an
//! operand (a value the program is given) or an attribute (part of the program).

use crate::dtype;
use crate::error::{Result, runtime, type_, unsupported};
use crate::lower::Ctx;
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

/// A parameter type of lowerings.
pub trait FromArg: Sized {
    /// What the engine must record.
    const KIND: ParamKind;
    /// Whether it stands for this schema type, as [`crate::Argument::ty`] spells it.
    fn accepts(ty: &str) -> bool;
    /// Takes a recorded argument.
    fn from_arg(c: &Ctx, arg: &Arg) -> Result<Self>;
}

fn wrong<T>(want: &str, got: &Arg) -> Result<T> {
    Err(type_(format!("expected {want}, got {got:?}")))
}

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

fn tensor(c: &Ctx, t: &TensorArg) -> Result<Tensor> {
    let value = c.operand(t.operand)?;
    Ok(Tensor { value, dtype: t.ty.dtype, rank: t.ty.shape.len(), wrapped: t.wrapped })
}

impl FromArg for Tensor {
    const KIND: ParamKind = ParamKind::Tensor;
    fn accepts(ty: &str) -> bool {
        ty == "Tensor"
    }
    fn from_arg(c: &Ctx, arg: &Arg) -> Result<Self> {
        match arg {
            Arg::Tensor(t) => tensor(c, t),
            a => wrong("Tensor", a),
        }
    }
}

impl FromArg for Value {
    const KIND: ParamKind = ParamKind::Tensor;
    fn accepts(ty: &str) -> bool {
        ty == "Tensor"
    }
    fn from_arg(c: &Ctx, arg: &Arg) -> Result<Self> {
        Tensor::from_arg(c, arg).map(|t| t.value)
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

impl FromArg for Scalar {
    const KIND: ParamKind = ParamKind::Scalar;
    fn accepts(ty: &str) -> bool {
        matches!(ty, "Scalar" | "float")
    }
    fn from_arg(c: &Ctx, arg: &Arg) -> Result<Self> {
        match arg {
            Arg::Scalar(s) => Ok(Scalar { value: c.operand(s.operand)?, kind: s.kind }),
            a => wrong("Scalar", a),
        }
    }
}

/// An `int` that does not shape the program: a 0-d s64 operand.
#[derive(Clone, Copy, Debug)]
pub struct Integer(pub Value);

impl FromArg for Integer {
    const KIND: ParamKind = ParamKind::Scalar;
    fn accepts(ty: &str) -> bool {
        ty == "int"
    }
    fn from_arg(c: &Ctx, arg: &Arg) -> Result<Self> {
        Scalar::from_arg(c, arg).map(|s| Integer(c.number(s, DType::S64)))
    }
}

/// Integers that do not shape the program: s64 `[n]`.
#[derive(Clone, Copy, Debug)]
pub struct Integers(pub Value);

/// Floats that do not shape the program, other than by how many they are: f64 `[n]`.
#[derive(Clone, Copy, Debug)]
pub struct Floats(pub Value);

impl FromArg for Integers {
    const KIND: ParamKind = ParamKind::Numbers;
    fn accepts(ty: &str) -> bool {
        ty == "int[]"
    }
    fn from_arg(c: &Ctx, arg: &Arg) -> Result<Self> {
        Value::from_arg(c, arg).map(Integers)
    }
}

impl FromArg for Floats {
    const KIND: ParamKind = ParamKind::Numbers;
    fn accepts(ty: &str) -> bool {
        ty == "float[]"
    }
    fn from_arg(c: &Ctx, arg: &Arg) -> Result<Self> {
        Value::from_arg(c, arg).map(Floats)
    }
}

/// A factor that is nearly always 1 and then not there at all.
#[derive(Clone, Copy, Debug)]
pub enum Alpha {
    /// The number 1.
    One,
    /// Anything else.
    Times(Scalar),
}

impl FromArg for Alpha {
    const KIND: ParamKind = ParamKind::Alpha;
    fn accepts(ty: &str) -> bool {
        ty == "Scalar"
    }
    fn from_arg(c: &Ctx, arg: &Arg) -> Result<Self> {
        match arg {
            Arg::None => Ok(Alpha::One),
            a => Scalar::from_arg(c, a).map(Alpha::Times),
        }
    }
}

/// A probability that is nearly always 0, and then what it is for is not there at all.
#[derive(Clone, Copy, Debug)]
pub enum Rate {
    /// The number 0.
    Zero,
    /// Anything else.
    Of(Scalar),
}

impl FromArg for Rate {
    const KIND: ParamKind = ParamKind::Rate;
    fn accepts(ty: &str) -> bool {
        ty == "float"
    }
    fn from_arg(c: &Ctx, arg: &Arg) -> Result<Self> {
        match arg {
            Arg::None => Ok(Rate::Zero),
            a => Scalar::from_arg(c, a).map(Rate::Of),
        }
    }
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

impl FromArg for Exponent {
    const KIND: ParamKind = ParamKind::Exponent;
    fn accepts(ty: &str) -> bool {
        ty == "Scalar"
    }
    fn from_arg(c: &Ctx, arg: &Arg) -> Result<Self> {
        match arg {
            Arg::Int(i) => Ok(Exponent::Int(*i)),
            Arg::Float(x) => Ok(Exponent::Float(x.get())),
            a => Scalar::from_arg(c, a).map(Exponent::Scalar),
        }
    }
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

impl FromArg for Const {
    const KIND: ParamKind = ParamKind::Attr;
    fn accepts(ty: &str) -> bool {
        matches!(ty, "Scalar" | "float")
    }
    fn from_arg(_: &Ctx, arg: &Arg) -> Result<Self> {
        match arg {
            Arg::Bool(x) => Ok(Const(Number::Bool(*x))),
            Arg::Int(x) => Ok(Const(Number::Int(*x))),
            Arg::Float(x) => Ok(Const(Number::Float(x.get()))),
            Arg::Complex(re, im) => Ok(Const(Number::Complex(re.get(), im.get()))),
            a => wrong("a number", a),
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

impl FromArg for Offset {
    const KIND: ParamKind = ParamKind::Offset;
    fn accepts(ty: &str) -> bool {
        ty == "int"
    }
    fn from_arg(c: &Ctx, arg: &Arg) -> Result<Self> {
        match arg {
            Arg::Offset(i) => c.offset(*i),
            a => wrong("int", a),
        }
    }
}

impl FromArg for Vec<Offset> {
    const KIND: ParamKind = ParamKind::Offsets;
    fn accepts(ty: &str) -> bool {
        ty == "int[]"
    }
    fn from_arg(c: &Ctx, arg: &Arg) -> Result<Self> {
        match arg {
            Arg::Offsets(first, n) => (*first..first + n).map(|i| c.offset(i)).collect(),
            a => wrong("int[]", a),
        }
    }
}

/// A generator's state: u64\[2\], seed and offset in Philox blocks of 128 bits.
#[derive(Clone, Copy, Debug)]
pub struct Rng(pub Value);

impl FromArg for Rng {
    const KIND: ParamKind = ParamKind::Rng;
    fn accepts(ty: &str) -> bool {
        ty == "Generator?"
    }
    fn from_arg(c: &Ctx, arg: &Arg) -> Result<Self> {
        match arg {
            Arg::Rng(operand) => c.operand(*operand).map(Rng),
            a => wrong("Generator", a),
        }
    }
}

macro_rules! attributes {
    ($($t:ty: $accepts:pat, $p:pat => $e:expr;)*) => { $(
        impl FromArg for $t {
            const KIND: ParamKind = ParamKind::Attr;
            fn accepts(ty: &str) -> bool {
                matches!(ty, $accepts)
            }
            fn from_arg(_: &Ctx, arg: &Arg) -> Result<Self> {
                match arg {
                    $p => Ok($e),
                    a => wrong(stringify!($t), a),
                }
            }
        }
    )* };
}

attributes! {
    i64: "int", Arg::Int(i) => *i;
    bool: "bool", Arg::Bool(x) => *x;
    Dims: "int[]", Arg::Ints(v) => v.clone();
    Vec<i64>: "int[]", Arg::Ints(v) => v.to_vec();
    Vec<bool>: "bool[]", Arg::Bools(v) => v.clone();
    String: "str", Arg::Str(s) => s.clone();
}

impl FromArg for f64 {
    const KIND: ParamKind = ParamKind::Attr;
    fn accepts(ty: &str) -> bool {
        ty == "float"
    }
    fn from_arg(c: &Ctx, arg: &Arg) -> Result<Self> {
        Const::from_arg(c, arg).map(Const::f64)
    }
}

impl FromArg for DType {
    const KIND: ParamKind = ParamKind::Attr;
    fn accepts(ty: &str) -> bool {
        ty == "ScalarType"
    }
    fn from_arg(_: &Ctx, arg: &Arg) -> Result<Self> {
        match arg {
            Arg::Int(i) => dtype::from_code(*i).ok_or_else(|| unsupported(format!("scalar type {i}"))),
            a => wrong("dtype", a),
        }
    }
}

impl FromArg for Vec<Tensor> {
    const KIND: ParamKind = ParamKind::Tensors;
    fn accepts(ty: &str) -> bool {
        ty == "Tensor[]"
    }
    fn from_arg(c: &Ctx, arg: &Arg) -> Result<Self> {
        let list = Vec::<Option<Tensor>>::from_arg(c, arg)?;
        list.into_iter()
            .map(|t| t.ok_or_else(|| runtime("expected a list of tensors, got None in it")))
            .collect()
    }
}

impl FromArg for Vec<Option<Tensor>> {
    const KIND: ParamKind = ParamKind::OptTensors;
    fn accepts(ty: &str) -> bool {
        ty == "Tensor?[]"
    }
    fn from_arg(c: &Ctx, arg: &Arg) -> Result<Self> {
        match arg {
            Arg::Tensors(v) => v.iter().map(|t| t.as_ref().map(|t| tensor(c, t)).transpose()).collect(),
            a => wrong("Tensor[]", a),
        }
    }
}

impl<T: FromArg> FromArg for Option<T> {
    const KIND: ParamKind = match T::KIND {
        ParamKind::Tensor => ParamKind::OptTensor,
        ParamKind::Scalar => ParamKind::OptScalar,
        other => other,
    };
    fn accepts(ty: &str) -> bool {
        ty.strip_suffix('?').is_some_and(T::accepts)
    }
    fn from_arg(c: &Ctx, arg: &Arg) -> Result<Self> {
        match arg {
            Arg::None => Ok(None),
            a => T::from_arg(c, a).map(Some),
        }
    }
}

/// What a parameter of a lowering is.
#[derive(Clone, Copy)]
pub struct Param {
    /// What the engine must record.
    pub kind: ParamKind,
    /// Whether it stands for this schema type.
    pub accepts: fn(&str) -> bool,
    /// The Rust type, for messages.
    pub rust: fn() -> &'static str,
}

impl Param {
    /// The parameter of type `T`.
    pub const fn of<T: FromArg>() -> Self {
        Param { kind: T::KIND, accepts: T::accepts, rust: std::any::type_name::<T> }
    }
}

impl std::fmt::Debug for Param {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} ({:?})", (self.rust)(), self.kind)
    }
}
