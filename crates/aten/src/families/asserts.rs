//! What has to hold of values, where PyTorch's own code would read them.

use crate::context::Ctx;
use crate::error::{ErrorKind, Result, runtime};
use crate::op;
use crate::row::{Layout, Row};
use oxitorch_hlo::{DType, Value};

/// The rows of this family.
pub static ROWS: &[Row] = &[
    op!("oxitorch::_asserted", asserted).layout(Layout::LikeFirst),
    op!("oxitorch::_solved", solved).layout(Layout::LikeFirst),
    op!("oxitorch::_assert", assert).only_asserts(),
];

/// `x`, which is right only if all of `ok` holds: who waits for the program is told `message` otherwise.
fn asserted(c: &Ctx, x: Value, ok: Value, message: String) -> Result<Value> {
    c.assert(ErrorKind::Runtime, message, || c.all(c.to(ok, DType::Pred)));
    Ok(x)
}

/// `x`, which a decomposition has found if it says 0 in all of `info`: who waits for the program is told `message`
/// otherwise, with the class that `torch.linalg` has for it.
fn solved(c: &Ctx, x: Value, info: Value, message: String) -> Result<Value> {
    c.assert(ErrorKind::LinAlg, message, || c.all(c.eq(info, c.zeros_like(info))));
    Ok(x)
}

/// Whether `ok` holds, which has one element: who waits for the program is told `message` otherwise.
fn assert(c: &Ctx, ok: Value, message: String) -> Result<Value> {
    let numel = c.numel(ok);
    if numel != 1 {
        let many = if numel == 0 { "no values" } else { "more than one value" };
        return Err(runtime(format!("Boolean value of Tensor with {many} is ambiguous")));
    }
    let holds = c.all(c.to(ok, DType::Pred));
    c.assert(ErrorKind::Runtime, message, || holds);
    Ok(holds)
}
