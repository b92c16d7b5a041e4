//! The op table: one row per functional ATen overload, and its lowering to StableHLO.
//!
//! * [`Row`] says how one op is lowered; rows live in `families/`, a file per family, and [`find`] looks one up.
//! * [`lower`] runs a row on recorded arguments ([`Arg`]) and emits operations into a `oxitorch_hlo::Builder`.
//!   The builder infers every result type, so lowering is also the shape function.
//! * [`bind`] maps every other overload (in-place, `out=`, `_foreach_`) to a row from its [`Schema`].
//!
//! It knows no device, no buffer, no stream, no Python and no torch library: only schema strings and StableHLO.

#![allow(clippy::too_many_arguments, reason = "a lowering takes what the op's schema says")]

pub mod args;
pub mod case;
pub mod derive;
pub mod domain;
pub mod dtype;
pub mod error;
pub mod families;
pub mod library;
pub mod lower;
pub mod numbers;
pub mod out;
pub mod promote;
pub mod schema;
pub mod sparse;
pub mod table;
pub mod target;

pub use args::{Arg, F64Bits, FromArg, NumKind, ParamKind, ScalarArg, TensorArg};
pub use derive::{Binding, Form, Source, Write, bind};
pub use error::{Error, ErrorKind, Result};
pub use lower::{Check, Checks, Config, Ctx, Lowered, MatmulPrecision, lower, lower_into};
pub use numbers::Numbers;
pub use oxitorch_hlo::{Builder, DType, Dims, TensorType, Value};
pub use schema::{Argument, Schema};
pub use table::{Layout, OpId, Promote, Row, Rule, find, qualified, row, rows};
pub use target::TargetOptions;
