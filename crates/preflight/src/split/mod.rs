//! How a program that was recorded for one device is split over the chips of a slice.

mod mesh;
mod plan;
mod rules;

pub(crate) use mesh::{Mesh, Split, Splits};
pub use plan::Parallel;
pub(crate) use plan::{Plan, Strategy, Told, Tried};
