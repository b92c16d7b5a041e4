//! Special functions. They are printed as CHLO ops, which every XLA plugin expands while it compiles.

use super::Builder;
use super::elementwise::{binary_methods, unary_methods};
use crate::ir::{Binary, Op, Unary, Value};

unary_methods! {
    /// `chlo.acos` of floats and complex.
    acos Acos
    /// `chlo.acosh` of floats and complex.
    acosh Acosh
    /// `chlo.asin` of floats and complex.
    asin Asin
    /// `chlo.asinh` of floats and complex.
    asinh Asinh
    /// `chlo.atan` of floats and complex.
    atan Atan
    /// `chlo.atanh` of floats and complex.
    atanh Atanh
    /// `chlo.bessel_i1e`: exponentially scaled modified Bessel function of order 1, floats.
    bessel_i1e BesselI1e
    /// `chlo.cosh` of floats and complex.
    cosh Cosh
    /// `chlo.digamma`: derivative of lgamma, floats.
    digamma Digamma
    /// `chlo.erf`: error function, floats.
    erf Erf
    /// `chlo.erf_inv`: inverse error function, floats.
    erf_inv ErfInv
    /// `chlo.erfc`: 1 - erf(x), accurate for large x, floats.
    erfc Erfc
    /// `chlo.lgamma`: log |gamma(x)|, floats.
    lgamma Lgamma
    /// `chlo.sinh` of floats and complex.
    sinh Sinh
}

binary_methods! {
    /// `chlo.next_after`: the float after lhs towards rhs.
    next_after NextAfter
    /// `chlo.polygamma`: derivative number lhs of digamma at rhs; lhs is a float tensor of the same type.
    polygamma Polygamma
    /// `chlo.zeta`: Hurwitz zeta function of x = lhs and q = rhs.
    zeta Zeta
}

impl Builder {
    /// `chlo.top_k`: the k largest elements along the last dimension, in descending order, and their `S32` positions.
    /// NaN counts as largest; of equal elements the one with the lower position comes first.
    pub fn top_k(&self, x: Value, k: i64) -> (Value, Value) {
        let r = self.op_full(Op::TopK(k), &[x], &[], &[]);
        (Value(r.first), Value(r.first + 1))
    }
}
