//! Lowerings as functions with typed parameters.
//!
//! The type of a parameter decides two things at once: which schema types it stands for, and whether the argument is an
//! operand (a value the program is given) or an attribute (part of the program).

use crate::args::{
    Alpha, Arg, Const, Exponent, Floats, Integer, Integers, Number, Offset, ParamKind, Rate, Rng, Scalar,
    Tensor, TensorArg,
};
use crate::context::Ctx;
use crate::dtype;
use crate::error::{Error, Result, runtime, type_, unsupported};
use oxitorch_hlo::{DType, Dims, Value};
use std::marker::PhantomData;

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

impl FromArg for Integer {
    const KIND: ParamKind = ParamKind::Scalar;
    fn accepts(ty: &str) -> bool {
        ty == "int"
    }
    fn from_arg(c: &Ctx, arg: &Arg) -> Result<Self> {
        Scalar::from_arg(c, arg).map(|s| Integer(c.number(s, DType::S64)))
    }
}

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

/// What a lowering function may return.
pub trait IntoOutputs {
    /// The outputs in schema order.
    fn into_outputs(self) -> Result<Vec<Option<Value>>>;
}

impl IntoOutputs for Value {
    fn into_outputs(self) -> Result<Vec<Option<Value>>> {
        Ok(vec![Some(self)])
    }
}

impl IntoOutputs for Vec<Value> {
    fn into_outputs(self) -> Result<Vec<Option<Value>>> {
        Ok(self.into_iter().map(Some).collect())
    }
}

impl IntoOutputs for Vec<Option<Value>> {
    fn into_outputs(self) -> Result<Vec<Option<Value>>> {
        Ok(self)
    }
}

impl IntoOutputs for (Value, Value) {
    fn into_outputs(self) -> Result<Vec<Option<Value>>> {
        Ok(vec![Some(self.0), Some(self.1)])
    }
}

impl IntoOutputs for (Value, Value, Value) {
    fn into_outputs(self) -> Result<Vec<Option<Value>>> {
        Ok(vec![Some(self.0), Some(self.1), Some(self.2)])
    }
}

impl IntoOutputs for (Option<Value>, Option<Value>) {
    fn into_outputs(self) -> Result<Vec<Option<Value>>> {
        Ok(vec![self.0, self.1])
    }
}

impl IntoOutputs for (Option<Value>, Option<Value>, Option<Value>) {
    fn into_outputs(self) -> Result<Vec<Option<Value>>> {
        Ok(vec![self.0, self.1, self.2])
    }
}

impl<T: IntoOutputs> IntoOutputs for Result<T> {
    fn into_outputs(self) -> Result<Vec<Option<Value>>> {
        self?.into_outputs()
    }
}

/// A lowering function with its parameter types erased.
pub trait Lowering: Sync {
    /// Calls the function.
    fn lower(&self, c: &Ctx, args: &[Arg]) -> Result<Vec<Option<Value>>>;
    /// What it takes.
    fn params(&self) -> &'static [Param];
}

/// Wraps any `fn(&Ctx, A, B, ..) -> R`, so that rows can name plain functions (the handler trick of axum and bevy).
pub struct Handler<Sig, T>(T, PhantomData<fn(Sig)>);

impl<Sig, T> Handler<Sig, T> {
    /// Wraps a function.
    pub const fn new(f: T) -> Self {
        Handler(f, PhantomData)
    }
}

macro_rules! lowering {
    ($($a:ident)*) => {
        impl<T, R, $($a),*> Lowering for Handler<($($a,)*), T>
        where
            T: Fn(&Ctx, $($a),*) -> R + Sync,
            R: IntoOutputs,
            $($a: FromArg),*
        {
            #[allow(non_snake_case)]
            fn lower(&self, c: &Ctx, args: &[Arg]) -> Result<Vec<Option<Value>>> {
                let [$($a),*] = args else {
                    return Err(arity(self.params().len(), args.len()));
                };
                (self.0)(c, $($a::from_arg(c, $a)?),*).into_outputs()
            }
            fn params(&self) -> &'static [Param] {
                const { &[$(Param::of::<$a>()),*] }
            }
        }
    };
}

macro_rules! lowerings {
    ($first:ident $($rest:ident)*) => {
        lowering!($first $($rest)*);
        lowerings!($($rest)*);
    };
    () => {};
}
lowerings!(A B C D E F G H I J K L M N O P Q S U V);

pub(crate) fn arity(want: usize, got: usize) -> Error {
    runtime(format!("expected {want} arguments, got {got}"))
}
