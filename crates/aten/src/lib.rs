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
pub mod context;
pub mod derive;
pub mod domain;
pub mod dtype;
pub mod error;
pub mod families;
pub mod library;
pub mod lower;
pub mod numbers;
pub mod out;
pub mod params;
pub mod pointwise;
pub mod promote;
pub mod row;
pub mod schema;
pub mod sparse;
pub mod table;
pub mod target;

pub use args::{Arg, F64Bits, NumKind, ParamKind, ScalarArg, TensorArg};
pub use context::{Check, Checks, Config, Ctx, MatmulPrecision};
pub use derive::{Binding, Form, Source, Write, bind};
pub use error::{Error, ErrorKind, Result};
pub use lower::{Lowered, lower, lower_into};
pub use numbers::Numbers;
pub use oxitorch_hlo::{Builder, DType, Dims, TensorType, Value};
pub use params::FromArg;
pub use promote::Promote;
pub use row::{Layout, Row, Rule, qualified};
pub use schema::{Argument, Schema};
pub use table::{OpId, find, row, rows};
pub use target::TargetOptions;
