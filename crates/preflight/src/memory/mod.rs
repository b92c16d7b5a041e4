//! Where the memory of a program is: its tensors, its buffers when it needs most, what tiles waste.

mod buffers;
mod padding;
mod tensors;

pub(crate) use buffers::{Buffer, buffers, reported};
pub(crate) use padding::Padding;
pub(crate) use tensors::{Tensor, known_memory, largest};
