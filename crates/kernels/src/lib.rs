//! What programs that run in host memory call instead of compiled code, where a loop in Rust is faster: host functions of a
//! plugin, which the lowerings of `oxitorch_aten` name.

mod channels;
mod scatter;
mod spmm;

use oxitorch_pjrt as pjrt;

/// Makes them known to a plugin.
///
/// # Errors
/// If the plugin does not take host functions.
pub fn register(plugin: &pjrt::Plugin) -> pjrt::Result<()> {
    channels::register(plugin)?;
    scatter::register(plugin)?;
    spmm::register(plugin)
}

const UNKNOWN: &str = "a call that this version does not understand";
