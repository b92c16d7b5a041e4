//! A change of a text.

use std::ops::Range;

/// Bytes of a file, or of a cell, and what stands there instead.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Edit {
    pub(crate) range: Range<usize>,
    pub(crate) with: String,
}
