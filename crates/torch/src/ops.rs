//! Which ATen overloads the core serves.

use oxitorch_aten::{Schema, row};
use oxitorch_engine::Op;

/// The op for a schema string, if a row serves it. PyTorch decomposes composites by itself, except those whose row says
/// why not.
pub(crate) fn bind(schema: &str, composite: bool) -> Option<Op> {
    let schema = Schema::parse(schema).ok()?;
    let kept = || oxitorch_aten::find(&schema.name()).is_some_and(|op| row(op).composite.is_some());
    if composite && !kept() {
        return None;
    }
    // What returns a view of its argument must be PyTorch's own.
    if schema.returns.iter().any(|r| r.alias.as_ref().is_some_and(|a| !a.write)) {
        return None;
    }
    // What may change a tensor's device (`_to_copy`, `zeros_like`) is PyTorch's to take apart, as are copies, which end in
    // the shim's `_copy_from`.
    let has = |ty: &str| schema.args.iter().any(|a| a.ty == ty);
    if has("Tensor") && has("Device?") {
        return None;
    }
    Op::bind(&schema).filter(|op| !op.moves())
}
