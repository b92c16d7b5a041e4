//! Contractions and dense linear algebra: dot_general, convolution, cholesky, triangular_solve, fft.

use super::Builder;
use crate::ir::{Convolution, Def, DotDims, FftType, Op, Precision, TriangularSolve, Value};
use crate::types::{DType, Dims, TensorType};

impl Builder {
    /// `stablehlo.dot_general`: contracts the `*_contracting` dimensions pairwise. The result has the batching dimensions,
    /// then what is left of lhs, then what is left of rhs. `out_dtype` sets the element type to accumulate in and
    /// return (`F32` for `BF16` operands, `S32` for `S8`); `None` keeps the operands'.
    pub fn dot_general(
        &self,
        lhs: Value,
        rhs: Value,
        dims: &DotDims,
        precision: Precision,
        out_dtype: Option<DType>,
    ) -> Value {
        let op = Op::DotGeneral(Box::new((dims.clone(), precision)));
        match out_dtype {
            None => self.op(op, &[lhs, rhs]),
            // Only the element type of a requested dot type counts; inference fills in the shape.
            Some(dtype) => self.op_as(op, &[lhs, rhs], TensorType::scalar(dtype)),
        }
    }

    /// Matrix product of the last two dimensions: `[batch.., m, k] x [batch.., k, n]`, equal batch sizes, rank 2 and up.
    pub fn matmul(&self, lhs: Value, rhs: Value, precision: Precision, out_dtype: Option<DType>) -> Value {
        let (l, r) = (self.rank(lhs), self.rank(rhs));
        if l != r || l < 2 {
            let reason = "needs two operands of one rank, 2 or more".to_owned();
            return self.refuse("matmul", &[lhs, rhs], reason, self.ty(lhs));
        }
        self.dot_general(lhs, rhs, &DotDims::matmul(l), precision, out_dtype)
    }

    /// `stablehlo.convolution` of an input and a kernel; see [`Convolution`] for what can be set.
    /// Any padding may be negative; dilations and groups are StableHLO's.
    pub fn convolution(&self, input: Value, kernel: Value, convolution: Convolution) -> Value {
        self.op(Op::Convolution(Box::new(convolution)), &[input, kernel])
    }

    /// A dot or convolution again, with results rounded to the type of its operands: for what was made in a wider type and
    /// is then converted. Nothing if the value is no such product.
    pub fn rounded_product(&self, product: Value) -> Option<Value> {
        let (op, operands) = {
            let inner = self.inner.borrow();
            let Def::Op(op) = inner.arena.values.get(product.0 as usize)?.def else { return None };
            let data = &inner.arena.ops[op as usize];
            (data.op.clone(), data.operands.clone())
        };
        let dtype = self.dtype(*operands.first()?);
        match op {
            Op::DotGeneral(_) => Some(self.op_as(op, &operands, TensorType::scalar(dtype))),
            Op::Convolution(mut conv) => {
                conv.out_dtype = None;
                Some(self.op(Op::Convolution(conv), &operands))
            }
            _ => None,
        }
    }

    /// `stablehlo.cholesky` of the last two dimensions; the other triangle of the result is undefined.
    pub fn cholesky(&self, a: Value, lower: bool) -> Value {
        self.op(Op::Cholesky { lower }, &[a])
    }

    /// `stablehlo.triangular_solve`: x in `op(a) x = b` or `x op(a) = b`, over the last two dimensions.
    pub fn triangular_solve(&self, a: Value, b: Value, flags: TriangularSolve) -> Value {
        self.op(Op::TriangularSolve(flags), &[a, b])
    }

    /// `stablehlo.fft` over the last `length.len()` (1 to 3) dimensions. `length` states the transformed sizes: those of
    /// the real side for `Rfft` and `Irfft`.
    pub fn fft(&self, x: Value, kind: FftType, length: &[i64]) -> Value {
        self.op(Op::Fft(kind, Dims::from_slice(length)), &[x])
    }
}
