//! Recorded programs as one process writes them and another reads them.
//!
//! The engine writes: a [`Capture`] of what was asked of a device that is not there, a [`Graph`] for each program that ran.
//! Preflight, `oxitorch graphs` and Python read. Each text that both sides must spell alike is a type here.

mod capture;
mod collective;
mod graph;
mod program;
mod tensor;

pub use capture::{Capture, Error, FellBack, Modules, Moved, VERSION};
pub use collective::{Collective, Exchanged, GroupCall, Reduction};
pub use graph::{Cost, Graph, MemoryBytes, Origin};
pub use program::{
    Cause, CompilerOption, Input, Op, Output, Products, Program, Reason, Undonated, UndonatedReason, Why,
};
pub use tensor::{Beside, Label, Role, TensorType};
