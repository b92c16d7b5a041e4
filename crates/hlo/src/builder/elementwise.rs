//! Elementwise ops. Operands are used as they are: nothing broadcasts or promotes by itself.

use super::Builder;
use crate::ir::{Binary, CompareKind, Def, Direction, Op, Unary, Value};
use crate::types::{DType, TensorType};

macro_rules! unary_methods {
    ($($(#[$doc:meta])* $method:ident $Variant:ident)*) => {
        impl Builder {
            $($(#[$doc])*
            pub fn $method(&self, x: Value) -> Value {
                self.unary(Unary::$Variant, x)
            })*
        }
    };
}
pub(super) use unary_methods;

macro_rules! binary_methods {
    ($($(#[$doc:meta])* $method:ident $Variant:ident)*) => {
        impl Builder {
            $($(#[$doc])*
            pub fn $method(&self, lhs: Value, rhs: Value) -> Value {
                self.binary(Binary::$Variant, lhs, rhs)
            })*
        }
    };
}
pub(super) use binary_methods;

unary_methods! {
    /// `stablehlo.abs`: |x| of signed integers, floats, complex (complex gives the real type).
    abs Abs
    /// `stablehlo.cbrt`: cube root of floats.
    cbrt Cbrt
    /// `stablehlo.ceil`: floats, towards +inf.
    ceil Ceil
    /// `stablehlo.cosine` of floats and complex.
    cosine Cosine
    /// `stablehlo.count_leading_zeros` of integers.
    count_leading_zeros CountLeadingZeros
    /// `stablehlo.exponential`: e^x of floats and complex.
    exponential Exponential
    /// `stablehlo.exponential_minus_one`: e^x - 1, accurate near 0.
    exponential_minus_one ExponentialMinusOne
    /// `stablehlo.floor`: floats, towards -inf.
    floor Floor
    /// `stablehlo.is_finite`: floats to `Pred`, false for infinities and NaN.
    is_finite IsFinite
    /// `stablehlo.log`: natural logarithm of floats and complex.
    log Log
    /// `stablehlo.logistic`: 1 / (1 + e^-x) of floats and complex.
    logistic Logistic
    /// `stablehlo.negate`: -x; unsigned integers wrap.
    negate Negate
    /// `stablehlo.not`: logical for `Pred`, bitwise for integers.
    not Not
    /// `stablehlo.popcnt`: number of set bits of integers.
    popcnt Popcnt
    /// `stablehlo.round_nearest_afz`: floats, halves away from zero.
    round_nearest_afz RoundNearestAfz
    /// `stablehlo.round_nearest_even`: floats, halves to even (PyTorch's `round`).
    round_nearest_even RoundNearestEven
    /// `stablehlo.rsqrt`: 1 / sqrt(x) of floats and complex.
    rsqrt Rsqrt
    /// `stablehlo.sign`: -1, 0, 1 of signed integers and floats (NaN stays), x/|x| of complex.
    sign Sign
    /// `stablehlo.sine` of floats and complex.
    sine Sine
    /// `stablehlo.sqrt` of floats and complex.
    sqrt Sqrt
    /// `stablehlo.tan` of floats and complex.
    tan Tan
    /// `stablehlo.tanh` of floats and complex.
    tanh Tanh
}

binary_methods! {
    /// `stablehlo.add`; logical or for `Pred`.
    add Add
    /// `stablehlo.and`: logical for `Pred`, bitwise for integers.
    and And
    /// `stablehlo.atan2`: the angle of the point (rhs, lhs), so `atan2(y, x)`.
    atan2 Atan2
    /// `stablehlo.divide`; integers round towards zero, division by zero gives -1 (all bits set).
    divide Divide
    /// `stablehlo.maximum` of real numbers; NaN wins; logical or for `Pred`.
    maximum Maximum
    /// `stablehlo.minimum` of real numbers; NaN wins; logical and for `Pred`.
    minimum Minimum
    /// `stablehlo.multiply`; logical and for `Pred`.
    multiply Multiply
    /// `stablehlo.or`: logical for `Pred`, bitwise for integers.
    or Or
    /// `stablehlo.power`: lhs to the rhs.
    power Power
    /// `stablehlo.remainder`: the sign follows lhs (C's `%` and `fmod`); the remainder of integers by zero is lhs.
    remainder Remainder
    /// `stablehlo.shift_left` of integers; shifting by the width or more gives 0.
    shift_left ShiftLeft
    /// `stablehlo.shift_right_arithmetic` of integers; fills with the sign bit.
    shift_right_arithmetic ShiftRightArithmetic
    /// `stablehlo.shift_right_logical` of integers; fills with zeros.
    shift_right_logical ShiftRightLogical
    /// `stablehlo.subtract`; not defined for `Pred`.
    subtract Subtract
    /// `stablehlo.xor`: logical for `Pred`, bitwise for integers.
    xor Xor
}

impl Builder {
    /// Any elementwise op of one operand, chosen at run time.
    pub fn unary(&self, op: Unary, x: Value) -> Value {
        self.op(Op::Unary(op), &[x])
    }

    /// Any elementwise op of two operands of one type, chosen at run time.
    pub fn binary(&self, op: Binary, lhs: Value, rhs: Value) -> Value {
        match op {
            Binary::Divide | Binary::Remainder if self.dtype(lhs).is_integral() => {
                self.divide_integers(op, lhs, rhs)
            }
            Binary::Maximum | Binary::Minimum if self.are_constant_floats(&[lhs, rhs]) => {
                self.extreme_of_constants(op, lhs, rhs)
            }
            _ => self.op(Op::Binary(op), &[lhs, rhs]),
        }
    }

    /// `stablehlo.log_plus_one`: log(1 + x), accurate near 0.
    pub fn log_plus_one(&self, x: Value) -> Value {
        if self.dtype(x) != DType::F32 || !self.inner.borrow().expands_log_plus_one {
            return self.unary(Unary::LogPlusOne, x);
        }
        // What 1 + x is rounded by is in the logarithm and in the difference alike. W. Kahan, in the manual of the HP-15C
        // (1982); D. Goldberg, "What every computer scientist should know about floating-point arithmetic" (1991),
        // theorem 4. The maximum changes nothing that has a logarithm: without it XLA would take (1 + x) - 1 for x.
        let one = self.full_like(x, 1.0);
        let sum = self.maximum(self.add(one, x), self.full_like(x, -1.0));
        let difference = self.subtract(sum, one);
        let log = self.multiply(self.log(sum), self.divide(x, difference));
        let as_it_is = self.or(
            self.compare(difference, self.zeros_like(x), Direction::Eq),
            self.compare(x, self.full_like(x, f64::INFINITY), Direction::Eq),
        );
        self.select(as_it_is, x, log)
    }

    /// Whether [`Builder::log_plus_one`] of float32 is made of a logarithm: for compilers that have vector code for that
    /// alone.
    pub fn expand_log_plus_one(&self, on: bool) {
        self.inner.borrow_mut().expands_log_plus_one = on;
    }

    /// `stablehlo.real`: the real part; a real operand is returned as it is.
    pub fn real(&self, x: Value) -> Value {
        if !self.dtype(x).is_complex() {
            return x;
        }
        self.unary(Unary::Real, x)
    }

    /// `stablehlo.imag`: the imaginary part, zero for a real operand.
    pub fn imag(&self, x: Value) -> Value {
        if !self.dtype(x).is_complex() {
            return self.zeros_like(x);
        }
        self.unary(Unary::Imag, x)
    }

    /// `stablehlo.complex`: from real and imaginary parts of type `F32` or `F64`.
    pub fn complex(&self, re: Value, im: Value) -> Value {
        self.op(Op::Complex, &[re, im])
    }

    /// `stablehlo.compare`: a `Pred` of the operands' shape; NaN differs from everything, `Pred` is ordered false < true.
    pub fn compare(&self, lhs: Value, rhs: Value, direction: Direction) -> Value {
        self.op(Op::Compare(direction, CompareKind::Natural), &[lhs, rhs])
    }

    /// `stablehlo.compare` with a choice of order; `TotalOrder` puts NaN above +inf and -0 below +0.
    pub fn compare_as(&self, lhs: Value, rhs: Value, direction: Direction, kind: CompareKind) -> Value {
        self.op(Op::Compare(direction, kind), &[lhs, rhs])
    }

    /// lhs == rhs.
    pub fn eq(&self, lhs: Value, rhs: Value) -> Value {
        self.compare(lhs, rhs, Direction::Eq)
    }

    /// lhs != rhs.
    pub fn ne(&self, lhs: Value, rhs: Value) -> Value {
        self.compare(lhs, rhs, Direction::Ne)
    }

    /// lhs < rhs.
    pub fn lt(&self, lhs: Value, rhs: Value) -> Value {
        self.compare(lhs, rhs, Direction::Lt)
    }

    /// lhs <= rhs.
    pub fn le(&self, lhs: Value, rhs: Value) -> Value {
        self.compare(lhs, rhs, Direction::Le)
    }

    /// lhs > rhs.
    pub fn gt(&self, lhs: Value, rhs: Value) -> Value {
        self.compare(lhs, rhs, Direction::Gt)
    }

    /// lhs >= rhs.
    pub fn ge(&self, lhs: Value, rhs: Value) -> Value {
        self.compare(lhs, rhs, Direction::Ge)
    }

    /// `stablehlo.select`: elementwise `pred ? on_true : on_false`; `pred` is a scalar or has the others' shape.
    pub fn select(&self, pred: Value, on_true: Value, on_false: Value) -> Value {
        self.moving(Op::Select, &[pred, on_true, on_false], 1..3)
    }

    /// `stablehlo.clamp` of integers and floats: min(max(x, min), max); bounds are scalars or have the operand's shape.
    pub fn clamp(&self, min: Value, x: Value, max: Value) -> Value {
        if self.are_constant_floats(&[min, x, max]) {
            let shape = self.shape(x);
            let full = |bound| if self.rank(bound) == 0 { self.full(bound, &shape) } else { bound };
            return self.minimum(self.maximum(full(min), x), full(max));
        }
        self.op(Op::Clamp, &[min, x, max])
    }

    /// `stablehlo.convert` to another element type. Floats to integers truncate (out of range saturates), anything to
    /// `Pred` is `x != 0`; complex to real keeps the real part, complex to `Pred` tests both parts.
    pub fn convert(&self, x: Value, dtype: DType) -> Value {
        let from = self.dtype(x);
        if from == dtype {
            return x;
        }
        if from.is_complex() && dtype == DType::Pred {
            return self.ne(x, self.zeros_like(x));
        }
        let x = if from.is_complex() && !dtype.is_complex() { self.real(x) } else { x };
        if self.dtype(x) == dtype {
            return x;
        }
        self.op_as(Op::Convert, &[x], TensorType::new(dtype, self.shape(x)))
    }

    /// `stablehlo.bitcast_convert`: the same bits as another element type. A narrower type adds a last dimension, a wider
    /// one takes the last dimension away.
    pub fn bitcast_convert(&self, x: Value, dtype: DType) -> Value {
        let ty = self.ty(x);
        if ty.dtype == dtype {
            return x;
        }
        if let Some(before) = self.bitcast_from(x, dtype) {
            return before;
        }
        let (from, to) = (ty.dtype.bits(), dtype.bits());
        let mut shape = ty.shape;
        if from > to {
            shape.push(i64::from(from / to));
        } else if from < to {
            shape.pop();
        }
        self.op_as(Op::BitcastConvert, &[x], TensorType::new(dtype, shape))
    }

    /// What `x` was before it was a bitcast of the same shape from `dtype`.
    pub(super) fn bitcast_from(&self, x: Value, dtype: DType) -> Option<Value> {
        let inner = self.inner.borrow();
        let data = inner.arena.values.get(x.0 as usize)?;
        let Def::Op(id) = data.def else { return None };
        let op = &inner.arena.ops[id as usize];
        let before = *op.operands.first()?;
        let from = inner.arena.ty(before);
        let same = matches!(op.op, Op::BitcastConvert) && from.dtype == dtype && from.shape == data.ty.shape;
        same.then_some(before)
    }

    /// `stablehlo.reduce_precision`: rounds floats as if they had this many exponent and mantissa bits.
    pub fn reduce_precision(&self, x: Value, exponent_bits: u32, mantissa_bits: u32) -> Value {
        self.op(Op::ReducePrecision { exponent_bits, mantissa_bits }, &[x])
    }

    /// True where x is NaN (x != x); false everywhere for types that have none.
    pub fn is_nan(&self, x: Value) -> Value {
        self.ne(x, x)
    }
}
