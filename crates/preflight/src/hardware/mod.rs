//! The chips and slices that people name, what they can do, and how long work takes there at least.

mod chip;
pub(crate) mod gpus;
pub(crate) mod ici;
mod slices;
mod work;

pub(crate) use chip::{Chip, PREFIX as GPU_PREFIX, passes};
pub(crate) use slices::{CHIPS, Slice, named};
pub(crate) use work::{Work, bound};
