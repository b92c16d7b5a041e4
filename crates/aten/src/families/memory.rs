//! When values are computed, and where they are kept: barriers in the programs of compiled graphs, and the memory of the host.

use crate::context::Ctx;
use crate::error::Result;
use crate::op;
use crate::row::{Layout, Row};
use oxitorch_hlo::{MemorySpace, Value};

/// The rows of this family.
pub static ROWS: &[Row] = &[
    op!("oxitorch::_fence", fence).layout(Layout::LikeFirst),
    op!("oxitorch::_offload", offload).kept_in(MemorySpace::PinnedHost),
    op!("oxitorch::_reload", reload).kept_in(MemorySpace::Device),
    op!("oxitorch::_same", same).layout(Layout::LikeFirst),
];

/// `x`, which the compiler takes for another value; if `firmly`, what is computed from it waits for `after`.
fn fence(c: &Ctx, x: Value, after: Value, firmly: bool) -> Result<Value> {
    Ok(if firmly { c.after(x, after) } else { c.optimization_barrier(&[x, after])[0] })
}

/// `x` in the memory of the host, where nothing is computed of it.
fn offload(c: &Ctx, x: Value) -> Result<Value> {
    Ok(c.annotate_device_placement(x, MemorySpace::PinnedHost))
}

/// What was offloaded, on the device again.
fn reload(c: &Ctx, x: Value) -> Result<Value> {
    Ok(c.annotate_device_placement(x, MemorySpace::Device))
}

/// `x` in a storage of its own: what is written to either does not change the other.
fn same(_: &Ctx, x: Value) -> Result<Value> {
    Ok(x)
}
