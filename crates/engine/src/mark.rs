//! Points among what was recorded, and when the device reaches them.

use crate::error::Result;
use crate::work::{Interrupt, TICK, Work};
use parking_lot::{Condvar, Mutex};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;

/// A point among what was recorded: when the device reached it, and what other processes still had to do for what was
/// before it.
#[derive(Debug, Default)]
pub struct Mark {
    /// The job by which it is reached; 0 before that is queued.
    job: AtomicU64,
    place: Mutex<Place>,
    changed: Condvar,
}

/// Where the device is.
#[derive(Debug, Default)]
enum Place {
    #[default]
    Before,
    At(Instant, Vec<Arc<Work>>),
    /// The launch that was to reach it has failed, or nobody will do it.
    Never,
}

impl Mark {
    /// When it was reached.
    pub fn time(&self) -> Option<Instant> {
        let Place::At(reached, works) = &*self.place.lock() else { return None };
        works.iter().try_fold(*reached, |latest, work| Some(work.finished()?.max(latest)))
    }

    /// The job by which it is reached; 0 before that is queued.
    pub(crate) fn job(&self) -> u64 {
        self.job.load(Relaxed)
    }

    /// What was not done when the device reached it.
    pub(crate) fn works(&self) -> Vec<Arc<Work>> {
        match &*self.place.lock() {
            Place::At(_, works) => works.clone(),
            Place::Before | Place::Never => Vec::new(),
        }
    }

    /// Waits until the device has reached it, or never will; whether there was something to wait for.
    pub(crate) fn wait(&self, interrupt: Interrupt) -> Result<bool> {
        let mut place = self.place.lock();
        let ahead = matches!(*place, Place::Before);
        while matches!(*place, Place::Before) {
            if self.changed.wait_for(&mut place, TICK).timed_out() {
                drop(place); // who interrupts may look at it
                interrupt()?;
                place = self.place.lock();
            }
        }
        Ok(ahead)
    }

    /// The first word counts.
    fn set(&self, to: Place) {
        let mut place = self.place.lock();
        if matches!(*place, Place::Before) {
            *place = to;
            self.changed.notify_all();
        }
    }
}

/// What reaches a mark. If it is dropped before, nothing ever does.
#[derive(Debug)]
pub(crate) struct Note {
    mark: Arc<Mark>,
    /// Whether it is behind collectives, too.
    pub(crate) of_collectives: bool,
}

impl Note {
    pub(crate) fn new(of_collectives: bool) -> (Note, Arc<Mark>) {
        let mark = Arc::new(Mark::default());
        (Note { mark: mark.clone(), of_collectives }, mark)
    }

    /// It is reached by this job.
    pub(crate) fn queued(&self, job: u64) {
        self.mark.job.store(job, Relaxed);
    }

    /// The device is there; others still have to do these.
    pub(crate) fn reach(self, at: Instant, works: Vec<Arc<Work>>) {
        self.mark.set(Place::At(at, works));
    }
}

impl Drop for Note {
    fn drop(&mut self) {
        self.mark.set(Place::Never);
    }
}
