//! Which dtypes an op refuses, where its lowering would compute them: a fact of its row.

use crate::dtype::{Category, category, cpp_name, scalar_name};
use crate::error::{Error, Result, cast, not_implemented, runtime, type_};
use oxitorch_hlo::DType;

/// What a row says about the dtype of its tensors (promoted, if there are several).
#[derive(Clone, Copy, Debug)]
pub struct Operand<'a> {
    /// The op's name without its overload.
    pub op: &'a str,
    /// The dtype.
    pub dtype: DType,
    /// Whether the op overwrites a tensor.
    pub in_place: bool,
}

/// A row's check of that dtype.
pub type CheckDtype = fn(Operand) -> Result<()>;

fn ensure(ok: bool, error: impl FnOnce() -> Error) -> Result<()> {
    if ok { Ok(()) } else { Err(error()) }
}

fn require(o: Operand, ok: fn(DType) -> bool) -> Result<()> {
    ensure(ok(o.dtype), || not_implemented(o.op, o.dtype))
}

/// Only integers.
pub fn integers(o: Operand) -> Result<()> {
    require(o, |d| category(d) == Category::Int)
}

/// Only integers and bool.
pub fn bits(o: Operand) -> Result<()> {
    require(o, |d| category(d) <= Category::Int)
}

/// Only floats.
pub fn floats(o: Operand) -> Result<()> {
    require(o, |d| category(d) == Category::Float)
}

/// Only floats and complex numbers.
pub fn fractions(o: Operand) -> Result<()> {
    require(o, |d| category(d) >= Category::Float)
}

/// Everything but complex numbers.
pub fn ordered(o: Operand) -> Result<()> {
    require(o, |d| !d.is_complex())
}

/// Everything but complex numbers and bool.
pub fn numbers(o: Operand) -> Result<()> {
    require(o, |d| !d.is_complex() && d != DType::Pred)
}

/// Everything but bool.
pub fn no_bool(o: Operand) -> Result<()> {
    require(o, |d| d != DType::Pred)
}

/// As `at::maximum` refuses complex numbers.
pub fn comparable(o: Operand) -> Result<()> {
    ensure(!o.dtype.is_complex(), || type_(format!("{} not implemented for complex tensors.", o.op)))
}

/// As `at::relu` refuses bool.
pub fn rectified(o: Operand) -> Result<()> {
    ensure(o.dtype != DType::Pred, || {
        Error::NotImplemented("Boolean inputs not supported for relu".to_owned())
    })
}

/// As `at::hardtanh` refuses bool.
pub fn clamped(o: Operand) -> Result<()> {
    ensure(o.dtype != DType::Pred, || {
        Error::NotImplemented(format!("Bool inputs not supported for {}", o.op))
    })
}

/// The size of complex numbers is real, and has no place in them.
pub fn sizes(o: Operand) -> Result<()> {
    ensure(!(o.in_place && o.dtype.is_complex()), || {
        runtime("In-place abs is not supported for complex tensors.")
    })
}

/// Dropout scales by a float.
pub fn scaled(o: Operand) -> Result<()> {
    ensure(category(o.dtype) >= Category::Float, || cast(DType::F32, o.dtype))
}

/// As PyTorch's checks of continuous distributions say it.
pub fn continuous(o: Operand) -> Result<()> {
    let mut name = o.op.to_owned();
    name[..1].make_ascii_uppercase();
    ensure(category(o.dtype) == Category::Float, || {
        runtime(format!(
            "{name} distribution is a continuous probability distribution. dtype must be a floating point but you \
             specified {}",
            cpp_name(o.dtype)
        ))
    })
}

/// As `at::check_random_bounds` says it.
pub fn bounded(o: Operand) -> Result<()> {
    ensure(!o.dtype.is_complex(), || {
        runtime("check_random_bounds handles only integral, floating-point and boolean types")
    })
}

/// As `at::cdist` says it.
pub fn distances(o: Operand) -> Result<()> {
    ensure(category(o.dtype) == Category::Float, || {
        runtime(format!("cdist only supports floating-point dtypes, X1 got: {}", scalar_name(o.dtype)))
    })
}
