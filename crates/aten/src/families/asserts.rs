//! What has to hold of values, where PyTorch's own code would read them.

use crate::context::Ctx;
use crate::error::{ErrorKind, Result};
use crate::op;
use crate::row::{Layout, Row};
use oxitorch_hlo::{DType, Value};

/// The rows of this family.
pub static ROWS: &[Row] = &[
    op!("oxitorch::_asserted", asserted).layout(Layout::LikeFirst),
    op!("oxitorch::_solved", solved).layout(Layout::LikeFirst),
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
