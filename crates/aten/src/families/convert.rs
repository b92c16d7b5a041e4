use crate::args::Tensor;
use crate::context::Ctx;
use crate::error::Result;
use crate::out::OutDtype;
use crate::row::Row;
use crate::{Layout, op};
use oxitorch_hlo::Value;

/// The rows of this family. A copy within the device is the same immutable value.
pub static ROWS: &[Row] = &[
    op!("clone", |_: &Ctx, x: Value| x).layout(Layout::LikeFirst),
    op!("copy", copy).layout(Layout::LikeFirst).out_dtype(OutDtype::Castable).moves(),
];

/// The source in the destination's dtype and shape.
fn copy(c: &Ctx, to: Tensor, from: Tensor) -> Result<Value> {
    let shape = c.shape(to.value);
    // Sizes that do not even broadcast get the words that a pointwise op has for it.
    c.broadcast_shapes(&[shape.clone(), c.shape(from.value)])?;
    c.expand(c.to(from.value, to.dtype), &shape)
}
