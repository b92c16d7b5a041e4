//! Devices in a grid, and how tensors are cut along it.

use serde::{Deserialize, Serialize};

/// Devices in a grid; the last axis counts fastest.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Mesh(pub(crate) Vec<(String, u64)>);

impl Mesh {
    pub(crate) fn devices(&self) -> u64 {
        self.0.iter().fold(1, |all, (_, n)| all.saturating_mul(*n))
    }

    pub(super) fn size(&self, axis: &str) -> u64 {
        self.0.iter().find(|(name, _)| name == axis).map_or(1, |(_, n)| *n)
    }
}

/// The axes along which each dimension is cut; none: each device has all of it.
pub(crate) type Split = Vec<Vec<String>>;

/// How the arguments and results of a program are split; where nothing is said the compiler decides.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Splits {
    pub(crate) inputs: Vec<Option<Split>>,
    pub(crate) outputs: Vec<Option<Split>>,
}

/// No dimension is cut.
pub(super) fn whole(shape: &[u64]) -> Split {
    vec![Vec::new(); shape.len()]
}
