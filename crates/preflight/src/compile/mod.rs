//! Compiling for devices that are not there, in processes that may abort or be killed.

mod annotate;
pub mod aot;
pub mod cuda;
mod dumps;
pub mod folder;
pub(crate) mod outcome;
mod plugin;

pub use outcome::{Asked, Effort};

pub(crate) use aot::{Compiling, Interrupted, Said};
pub(crate) use outcome::{Memory, Outcome};
pub(crate) use plugin::plugin;
