//! References to what is there for ever, or for as long as somebody has one.

use std::ops::Deref;
use std::sync::Arc;

/// A shared reference. Counting takes some percent of the time that it takes to record an op, so the first instances of a
/// process, which are all that most processes have, are kept for ever and not counted.
#[derive(Debug)]
pub(crate) enum Shared<T: 'static> {
    Kept(&'static T),
    Counted(Arc<T>),
}

impl<T> Shared<T> {
    /// For ever, or counted.
    pub(crate) fn new(value: T, for_ever: bool) -> Shared<T> {
        if for_ever { Shared::Kept(Box::leak(Box::new(value))) } else { Shared::Counted(Arc::new(value)) }
    }
}

impl<T> Clone for Shared<T> {
    fn clone(&self) -> Self {
        match self {
            Shared::Kept(value) => Shared::Kept(value),
            Shared::Counted(value) => Shared::Counted(value.clone()),
        }
    }
}

impl<T> Deref for Shared<T> {
    type Target = T;

    fn deref(&self) -> &T {
        match self {
            Shared::Kept(value) => value,
            Shared::Counted(value) => value,
        }
    }
}
