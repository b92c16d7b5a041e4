//! The body of a loop or branch while it is recorded: what is set aside for it, and what came of it.

use crate::error::Error;
use crate::events::Stamp;
use crate::inst::Body;
use crate::ops::Ops;
use crate::site::Site;
use crate::threads::{Others, Thread};
use crate::value::Value;
use std::sync::Arc;

/// What was recorded around a body.
#[derive(Default)]
pub(crate) struct Around {
    pub(crate) ops: Ops,
    pub(crate) inputs: Vec<Arc<Value>>,
    pub(crate) produced: Vec<Option<Arc<Value>>>,
    pub(crate) thread: Thread,
    pub(crate) others: Others,
    pub(crate) stamps: Vec<Stamp>,
}

/// A state of a generator that an op of a body takes.
#[derive(Debug)]
pub(crate) struct Drawn {
    pub(crate) state: Arc<Value>,
    /// None: the default one.
    pub(crate) generator: Option<usize>,
    pub(crate) blocks: u64,
}

/// A body that is being recorded.
pub(crate) struct Recorded {
    /// The thread that does so.
    pub(crate) thread: u64,
    pub(crate) around: Around,
    /// How many values it is given: the first inputs.
    pub(crate) given: usize,
    /// Why it cannot be one, and the line.
    pub(crate) spoiled: Option<(&'static str, Site)>,
    pub(crate) drawn: Vec<Drawn>,
}

/// A body that was recorded.
pub(crate) struct Captured {
    pub(crate) thread: u64,
    pub(crate) body: Body,
    /// Those of its ops, one after another.
    pub(crate) offsets: Vec<i64>,
    /// Its inputs behind those that it is given.
    pub(crate) taken: Vec<Arc<Value>>,
    pub(crate) results: Vec<Arc<Value>>,
    pub(crate) drawn: Vec<Drawn>,
}

/// What control flow does with the bodies that were recorded last.
#[derive(Clone, Copy, Debug)]
pub enum Asked {
    /// The first or the second, by the first operand.
    Branch,
    /// The second, while the first gives true.
    While,
    /// So many rounds of one; `carried` operands before those of which it gets slices, from the last one on if `reverse`.
    Scan {
        /// How many rounds.
        length: i64,
        /// From the last slice to the first.
        reverse: bool,
        /// How many operands are handed from round to round.
        carried: usize,
        /// How many operands, at the end, are states of the generators that the body uses, in the order in which it does: for
        /// the numbers that another loop took. 0: the generators are moved on.
        states: usize,
    },
}

/// What the values of a body hold for everybody else.
pub(crate) fn unknown() -> Error {
    Error::runtime(
        "a value of the body of a loop or of a branch is not known outside of it\nhint: let the body return it",
    )
}
