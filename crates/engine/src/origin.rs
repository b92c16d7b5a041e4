//! Sizes that followed from values, and which of them is which.

use smallvec::SmallVec;
use std::hash::{DefaultHasher, Hash, Hasher};

/// Which size one is: two that were read one after another may be the same number by chance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Origin(pub(crate) u64);

/// A size that followed from values, and the largest that it could have been.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Count {
    pub(crate) size: i64,
    pub(crate) most: i64,
    pub(crate) origin: Origin,
    pub(crate) how: How,
}

/// How a size is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum How {
    /// The host has read it, and something was made to it.
    Made,
    /// The same, and the line that has read it has read no other one, as the number of graphs that `bincount` finds in each
    /// batch.
    Fixed,
    /// It came from the host.
    Copied,
    /// Something was cut to this number, which others may be by chance.
    Cut,
    /// It follows from others.
    Follows,
}

/// Some of them, each origin once.
pub(crate) type Found = SmallVec<[Count; 2]>;

/// A dimension of a tensor that has such a size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Along {
    pub(crate) at: u32,
    pub(crate) count: Count,
}

/// All dimensions of a tensor that have one.
pub(crate) type Sized = SmallVec<[Along; 2]>;

/// Adds a size, unless it is there.
pub(crate) fn add(found: &mut Found, count: Count) {
    if !found.iter().any(|c| c.origin == count.origin) {
        found.push(count);
    }
}

impl Origin {
    /// Of what several sizes make together.
    pub(crate) fn joint(of: &[Count]) -> Origin {
        let mut origins: SmallVec<[Origin; 8]> = of.iter().map(|c| c.origin).collect();
        origins.sort_unstable();
        let mut hasher = DefaultHasher::new();
        origins.hash(&mut hasher);
        Origin(hasher.finish())
    }
}
