//! The C ABI of PJRT plugins: structs, constants and function types of the PJRT and XLA FFI headers.
//!
//! `bindings.rs` is generated and committed, so that nothing needs libclang or the headers to build.
//! `args` makes argument structs that plugins older and newer than these headers accept.
//!
//! It does not know how to call anything safely: that is `oxitorch-pjrt`.

#![no_std]

mod args;
#[allow(missing_docs, reason = "generated from C headers, whose comments are the documentation")]
#[allow(non_camel_case_types, non_snake_case, non_upper_case_globals, reason = "the names of the C headers")]
#[allow(unreachable_pub, clippy::all, reason = "generated")]
#[rustfmt::skip]
mod bindings;

pub use args::{Args, CStruct, RESERVED_BYTES};
pub use bindings::*;

/// The one symbol that a plugin library exports under the name `GetPjrtApi`.
pub type GetPjrtApi = unsafe extern "C" fn() -> *const PJRT_Api;
