//! Checks of Python numbers where they are still known: they become operands, and a program cannot refuse one.

use crate::args::{Const, Number};
use crate::dtype::{Category, category, cpp_name};
use crate::error::{Result, runtime};
use oxitorch_hlo::DType;

/// The numbers of one call.
#[derive(Clone, Copy, Debug)]
pub struct Numbers<'a> {
    /// By row parameter; `None` where there is no number. Integers that PyTorch wrapped into tensors count.
    pub by_param: &'a [Option<Number>],
    /// The first string.
    pub text: Option<&'a str>,
    /// The dtype of the first tensor argument.
    pub dtype: Option<DType>,
}

/// A row's check of its numbers.
pub type CheckNumbers = fn(&Numbers) -> Result<()>;

/// The size of a result, from the numbers.
pub type CountNumbers = fn(&Numbers) -> Result<i64>;

impl Numbers<'_> {
    /// The number of a parameter.
    pub fn get(&self, param: usize) -> Option<Number> {
        self.by_param.get(param).copied().flatten()
    }

    /// The number of a parameter that always has one; 0 should it be missing.
    pub fn number(&self, param: usize) -> Number {
        self.get(param).unwrap_or(Number::Int(0))
    }

    /// An integer parameter; dtypes travel as one.
    pub fn int(&self, param: usize) -> Option<i64> {
        match self.get(param) {
            Some(Number::Int(code)) => Some(code),
            _ => None,
        }
    }

    /// The number of a parameter as a float.
    pub fn f64(&self, param: usize) -> Option<f64> {
        self.get(param).map(|n| Const(n).f64())
    }

    /// That a parameter's number, if it is one, satisfies a condition.
    pub fn require(&self, param: usize, ok: fn(f64) -> bool, message: fn(f64) -> String) -> Result<()> {
        match self.f64(param) {
            Some(x) if !ok(x) => Err(runtime(message(x))),
            _ => Ok(()),
        }
    }

    /// That a parameter's number fits the dtype of the first tensor.
    pub fn fits(&self, param: usize) -> Result<()> {
        match (self.get(param), self.dtype) {
            (Some(n), Some(dtype)) => fits(n, dtype),
            _ => Ok(()),
        }
    }
}

/// `c10::checked_convert`: integers may wrap into unsigned types, everything else must stay in range.
pub fn fits(n: Number, dtype: DType) -> Result<()> {
    if overflows(n, dtype) {
        let name = match dtype {
            DType::U8 => "uint8_t",
            DType::S8 => "int8_t",
            DType::S16 => "int16_t",
            DType::S64 => "int64_t",
            other => cpp_name(other),
        };
        return Err(runtime(format!("value cannot be converted to type {name} without overflow")));
    }
    Ok(())
}

/// `c10::overflows`
fn overflows(n: Number, dtype: DType) -> bool {
    if let Number::Complex(re, im) = n {
        return match category(dtype) {
            Category::Complex => out_of_range(re, dtype.real()) || out_of_range(im, dtype.real()),
            _ => im != 0.0 || overflows(Number::Float(re), dtype),
        };
    }
    match (category(dtype), n) {
        (Category::Bool, _) => false,
        (Category::Int, Number::Int(i)) => {
            let (low, high) = int_range(dtype);
            let i = i128::from(i);
            // Negative numbers wrap into unsigned types as far as these reach.
            let low = if dtype.is_signed() { low } else { -high };
            i < low || i > high
        }
        (Category::Int, _) => {
            let (low, high) = int_range(dtype);
            let x = Const(n).f64();
            !(x >= low as f64 && x <= high as f64)
        }
        _ => out_of_range(Const(n).f64(), dtype.real()),
    }
}

/// The largest finite float counts; infinities and NaN are numbers of every float dtype.
fn out_of_range(x: f64, dtype: DType) -> bool {
    x.is_finite() && x.abs() > finite_max(dtype)
}

/// The largest finite number of a float dtype.
pub fn finite_max(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => 65504.0,
        DType::BF16 => 3.389_531_389_251_535_5e38,
        DType::F32 => f64::from(f32::MAX),
        DType::F8E4M3FN => 448.0,
        DType::F8E5M2 => 57344.0,
        _ => f64::MAX,
    }
}

/// The ends of an integer dtype.
pub fn int_range(dtype: DType) -> (i128, i128) {
    let bits = dtype.size_bytes() * 8;
    if dtype.is_signed() { (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) } else { (0, (1 << bits) - 1) }
}

/// A number as C++ streams print it: at most six digits.
pub fn show(x: f64) -> String {
    if x == 0.0 || !x.is_finite() {
        return if x.is_nan() { "nan".to_owned() } else { format!("{x}") };
    }
    let scientific = format!("{x:.5e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    let trimmed = |s: &str| {
        if s.contains('.') { s.trim_end_matches('0').trim_end_matches('.').to_owned() } else { s.to_owned() }
    };
    if (-4..6).contains(&exponent) {
        return trimmed(&format!("{x:.*}", (5 - exponent) as usize));
    }
    format!("{}e{}{:02}", trimmed(digits), if exponent < 0 { '-' } else { '+' }, exponent.abs())
}
