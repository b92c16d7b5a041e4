//! Which dtype an operation on several tensors has: `at::result_type`.

use crate::args::Tensor;
use crate::dtype::{Category, category, promote};
use crate::error::{Result, unsupported};
use oxitorch_hlo::DType;

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

#[cfg(test)]
mod tests {
    use super::*;

    fn check(operands: &[(usize, DType, bool)], want: DType) {
        let mut state = ResultType::default();
        for &(rank, dtype, wrapped) in operands {
            state.add(rank, dtype, wrapped, DType::F32).unwrap();
        }
        assert_eq!(state.get().unwrap(), Some(want), "{operands:?}");
    }

    #[test]
    fn dimensions_outrank_zero_dim_outranks_numbers() {
        use DType::*;
        check(&[(1, S32, false), (0, S64, false)], S32);
        check(&[(1, S32, false), (0, F16, false)], F16);
        check(&[(1, BF16, false), (0, F64, true)], BF16);
        check(&[(1, S64, false), (0, F64, true)], F32);
        check(&[(0, F16, false), (0, F64, true)], F16);
        check(&[(1, Pred, false), (0, S64, true)], S64);
        check(&[(1, F64, false), (0, C128, true)], C128);
        check(&[(1, BF16, false), (0, C128, true)], C64);
        check(&[(1, U8, false), (0, S64, true)], U8);
        check(&[(1, U8, false), (2, S8, false)], S16);
        check(&[(1, F16, false), (2, BF16, false)], F32);
        check(&[(0, S64, true), (0, F64, true)], F32);
    }
}
