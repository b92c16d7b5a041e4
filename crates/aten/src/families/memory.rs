//! When values are computed: barriers in the programs of compiled graphs.

use crate::error::Result;
use crate::lower::Ctx;
use crate::op;
use crate::table::{Layout, Row};
use oxitorch_hlo::Value;

/// The rows of this family.
pub static ROWS: &[Row] = &[op!("oxitorch::_fence", fence).layout(Layout::LikeFirst)];

/// `x`, which the compiler takes for another value; if `firmly`, what is computed from it waits for `after`.
fn fence(c: &Ctx, x: Value, after: Value, firmly: bool) -> Result<Value> {
    Ok(if firmly { c.after(x, after) } else { c.optimization_barrier(&[x, after])[0] })
}
