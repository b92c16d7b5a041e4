//! Pointwise ops of one and of two tensors, by how dtypes go in and come out.

use crate::args::Tensor;
use crate::context::Ctx;
use crate::dtype::{self, Category, category};
use crate::error::{self, Result};
use crate::promote::Promote;
use oxitorch_hlo::{Builder, DType, Direction, Value};

/// One operand: converted by the promotion kind, computed (if it is large by an overload of the library, if there is one),
/// converted back.
pub fn unary(
    c: &Ctx,
    p: Promote,
    library: Option<&str>,
    f: fn(&Builder, Value) -> Value,
    x: Tensor,
) -> Result<Value> {
    let f = |x: Value| library.and_then(|op| c.call_pointwise(op, &[x], &[])).unwrap_or_else(|| f(c, x));
    Ok(match p {
        Promote::Same => f(x.value),
        Promote::Opmath => c.in_opmath(x.value, f),
        Promote::Float => c.in_opmath(c.to(x.value, c.float_of(x.dtype)), f),
        Promote::KeepInt if x.dtype == DType::Pred => return Err(error::not_implemented(c.op, x.dtype)),
        Promote::KeepInt if category(x.dtype) == Category::Int => x.value,
        Promote::KeepInt => c.in_opmath(x.value, f),
    })
}

/// Two operands: promoted, broadcast, computed in opmath where the dtype is a reduced float; by the library as one.
pub fn binary(
    c: &Ctx,
    p: Promote,
    library: Option<&str>,
    f: fn(&Builder, Value, Value) -> Value,
    x: Tensor,
    y: Tensor,
) -> Result<Value> {
    let dtype = match p {
        Promote::Float => c.float_result_type(&[x, y])?,
        _ => c.result_type(&[x, y])?,
    };
    let compute = if p == Promote::Same { dtype } else { dtype::opmath(dtype) };
    let [a, b] = c.align([x.value, y.value], compute)?;
    let called = library.and_then(|op| c.call_pointwise(op, &[a, b], &[]));
    Ok(c.to(called.unwrap_or_else(|| f(c, a, b)), dtype))
}

/// A comparison in the promoted dtype.
pub fn compare(c: &Ctx, dir: Direction, x: Tensor, y: Tensor) -> Result<Value> {
    let dtype = c.result_type(&[x, y])?;
    if dtype.is_complex() && !matches!(dir, Direction::Eq | Direction::Ne) {
        let kernel = c.op.split('.').next().unwrap_or(c.op);
        return Err(error::not_implemented(&format!("{kernel}_cpu"), dtype));
    }
    let [a, b] = c.align([x.value, y.value], dtype)?;
    Ok(c.compare(a, b, dir))
}
