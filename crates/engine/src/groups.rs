//! What a device has to do with process groups: the tasks that are not done, and what they read.

use crate::lanes::{Lanes, Turn};
use crate::value::Value;
use crate::work::{Lane, Work};
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The tasks of a device that are not done.
pub(crate) struct Groups {
    lanes: Lanes,
    tasks: Mutex<Vec<Begun>>,
    count: AtomicUsize,
}

/// A task that is not done, and what it reads.
pub(crate) struct Begun {
    pub(crate) work: Arc<Work>,
    pub(crate) reads: Vec<Arc<Value>>,
}

impl Groups {
    pub(crate) fn new(lanes: Lanes) -> Groups {
        Groups { lanes, tasks: Mutex::default(), count: AtomicUsize::new(0) }
    }

    pub(crate) fn lanes(&self) -> Lanes {
        self.lanes.clone()
    }

    /// The place in a lane's order after all that were taken before.
    pub(crate) fn turn(&self, lane: Lane) -> Turn {
        self.lanes.turn(lane)
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.count.load(Ordering::Acquire) == 0
    }

    /// The tasks that are not done.
    pub(crate) fn pending(&self) -> Vec<Arc<Work>> {
        if self.is_idle() {
            return Vec::new();
        }
        self.tasks.lock().iter().map(|t| t.work.clone()).collect()
    }

    pub(crate) fn begin(&self, begun: Begun) {
        self.tasks.lock().push(begun);
        self.count.fetch_add(1, Ordering::Release);
    }

    pub(crate) fn end(&self, work: &Arc<Work>) {
        self.tasks.lock().retain(|t| !Arc::ptr_eq(&t.work, work));
        self.count.fetch_sub(1, Ordering::Release);
    }

    /// The tasks that read a value; none of this lane, which keeps its order itself.
    pub(crate) fn readers(&self, value: &Arc<Value>, but: Option<Lane>) -> Vec<Arc<Work>> {
        let tasks = self.tasks.lock();
        let reads = |t: &&Begun| t.reads.iter().any(|read| Arc::ptr_eq(read, value));
        let others = tasks.iter().filter(|t| Some(t.work.lane()) != but);
        others.filter(reads).map(|t| t.work.clone()).collect()
    }
}
