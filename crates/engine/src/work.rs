//! Work, as c10d calls it: this process's part of a collective of several, done beside the launch thread.

use crate::error::Result;
use crate::site::Site;
use parking_lot::{Condvar, Mutex};
use std::time::{Duration, Instant};

/// Called while waiting, about ten times a second; an error ends the wait.
pub type Interrupt = fn() -> Result<()>;

/// How often a wait looks whether it is to end.
const TICK: Duration = Duration::from_millis(100);

/// What this process does in a collective.
pub trait Task: Send {
    /// Its name for errors: "all_reduce".
    fn name(&self) -> &str;

    /// Does it, and waits until it is done. Both are row-major bytes of the tensors, in the order in which the task was
    /// recorded with them; those that are written in place hold the old value. `site` is the Python line that asked for it.
    /// An error is said in words.
    fn run(&mut self, reads: &[&[u8]], writes: &mut [&mut [u8]], site: Site) -> Result<(), String>;

    /// It will not be run here, and why: tells those who wait for it, if it can.
    fn decline(&mut self, _why: &str, _site: Site) {}
}

/// Tasks of one lane are done in their order, and those of different lanes at once.
pub type Lane = u64;

/// How a task that was recorded goes.
#[derive(Debug, Default)]
pub struct Work {
    outcome: Mutex<Option<(Result<()>, Instant)>>,
    done: Condvar,
}

impl Work {
    /// Whether it is done, and what came of it.
    pub fn outcome(&self) -> Option<Result<()>> {
        self.outcome.lock().as_ref().map(|(outcome, _)| outcome.clone())
    }

    /// When it was done.
    pub(crate) fn finished(&self) -> Option<Instant> {
        self.outcome.lock().as_ref().map(|(_, at)| *at)
    }

    pub(crate) fn finish(&self, outcome: Result<()>) {
        self.outcome.lock().get_or_insert((outcome, Instant::now()));
        self.done.notify_all();
    }

    /// Waits for it, but not beyond `until`; what came of it, if it is done.
    pub(crate) fn wait(
        &self,
        until: Option<Instant>,
        mut interrupt: impl FnMut() -> Result<()>,
    ) -> Result<Option<Result<()>>> {
        let mut outcome = self.outcome.lock();
        while outcome.is_none() {
            let left = until.map_or(TICK, |u| u.saturating_duration_since(Instant::now()).min(TICK));
            if left.is_zero() {
                return Ok(None);
            }
            if self.done.wait_for(&mut outcome, left).timed_out() {
                drop(outcome); // who interrupts may look at it
                interrupt()?;
                outcome = self.outcome.lock();
            }
        }
        Ok(outcome.as_ref().map(|(outcome, _)| outcome.clone()))
    }
}
