//! Which dtype an operation on several dtypes has: `c10::promoteTypes`, and `at::result_type` of tensors.

use crate::args::Tensor;
use crate::dtype::{Category, category, scalar_name};
use crate::error::{Result, runtime, unsupported};
use oxitorch_hlo::DType;

/// How dtypes go in and come out of a regular row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Promote {
    /// Computed in the (promoted) dtype itself.
    Same,
    /// Computed in the opmath dtype (float32 for reduced floats), rounded back.
    Opmath,
    /// As `Opmath`, with integers and bool promoted to the default dtype first.
    Float,
    /// As `Opmath`; integers and bool come back unchanged.
    KeepInt,
}

/// uint16, uint32, uint64: torch has them without arithmetic promotion.
fn barebones(dtype: DType) -> bool {
    matches!(dtype, DType::U16 | DType::U32 | DType::U64)
}

fn float8(dtype: DType) -> bool {
    matches!(dtype, DType::F8E4M3FN | DType::F8E5M2)
}

/// `c10::promoteTypes`.
pub fn promote(a: DType, b: DType) -> Result<DType> {
    if a == b {
        return Ok(a);
    }
    let refuse = |what: &str| {
        let (a, b) = (scalar_name(a), scalar_name(b));
        runtime(format!("Promotion for {what} is not supported, attempted to promote {a} and {b}"))
    };
    if float8(a) || float8(b) {
        return Err(refuse("Float8 Types"));
    }
    if barebones(a) || barebones(b) {
        return match (a.is_float(), b.is_float()) {
            (true, _) => Ok(a),
            (_, true) => Ok(b),
            _ => Err(refuse("uint16, uint32, uint64 types")),
        };
    }
    let (low, high) = if category(a) <= category(b) { (a, b) } else { (b, a) };
    Ok(match (category(low), category(high)) {
        (Category::Int, Category::Int) => promote_int(low, high),
        (Category::Float, Category::Float) => promote_float(low, high),
        (Category::Float, Category::Complex) if low == DType::F64 => DType::C128,
        (Category::Complex, Category::Complex) => DType::C128,
        _ => high,
    })
}

/// uint8 with a signed type of its size needs the next size; otherwise the wider one wins.
fn promote_int(a: DType, b: DType) -> DType {
    match (a, b) {
        (DType::U8, DType::S8) | (DType::S8, DType::U8) => DType::S16,
        _ if a.size_bytes() > b.size_bytes() => a,
        _ => b,
    }
}

fn promote_float(a: DType, b: DType) -> DType {
    match (a, b) {
        (DType::F16, DType::BF16) | (DType::BF16, DType::F16) => DType::F32,
        _ if a.size_bytes() > b.size_bytes() => a,
        _ => b,
    }
}

/// Whether a tensor has dimensions, has none, or is a Python number in tensor's clothing decides its priority.
#[derive(Clone, Copy, Debug, Default)]
pub struct ResultType {
    dim: Option<DType>,
    zero: Option<DType>,
    wrapped: Option<DType>,
}

fn join(a: Option<DType>, b: DType) -> Result<Option<DType>> {
    a.map_or(Ok(b), |a| promote(a, b)).map(Some)
}

impl ResultType {
    /// Adds an operand. Wrapped numbers count with the default dtype of their category.
    pub fn add(&mut self, rank: usize, dtype: DType, wrapped: bool, default: DType) -> Result<()> {
        let dtype = match category(dtype) {
            Category::Complex if wrapped => complex_of(default)?,
            Category::Float if wrapped => default,
            _ => dtype,
        };
        let slot = match (rank, wrapped) {
            (1.., _) => &mut self.dim,
            (0, true) => &mut self.wrapped,
            (0, false) => &mut self.zero,
        };
        *slot = join(*slot, dtype)?;
        Ok(())
    }

    /// The result: `combine(dim, combine(zero, wrapped))`.
    pub fn get(self) -> Result<Option<DType>> {
        combine(self.dim, combine(self.zero, self.wrapped)?)
    }
}

/// The complex dtype that holds a float dtype. That of float16 is complex32, which StableHLO has not.
pub fn complex_of(dtype: DType) -> Result<DType> {
    match dtype {
        DType::F16 => Err(unsupported("complex32")),
        DType::F64 | DType::C128 => Ok(DType::C128),
        _ => Ok(DType::C64),
    }
}

fn combine(higher: Option<DType>, lower: Option<DType>) -> Result<Option<DType>> {
    let (Some(high), Some(low)) = (higher, lower) else { return Ok(higher.or(lower)) };
    Ok(Some(match (category(high), category(low)) {
        (Category::Complex, _) => high,
        (Category::Float, Category::Complex) => complex_of(high)?,
        (Category::Float, _) => high,
        (Category::Bool, _) | (_, Category::Float | Category::Complex) => promote(high, low)?,
        _ => high,
    }))
}

/// `at::result_type` of some tensors.
pub fn result_type(tensors: &[Tensor], default: DType) -> Result<DType> {
    let mut state = ResultType::default();
    for t in tensors {
        state.add(t.rank, t.dtype, t.wrapped, default)?;
    }
    Ok(state.get()?.unwrap_or(default))
}
