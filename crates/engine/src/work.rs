//! Work, as c10d calls it: this process's part of a collective of several, done beside the launch thread.

use crate::error::Result;
use crate::site::Site;
use oxitorch_capture as capture;
use oxitorch_hlo::TensorType;
use parking_lot::{Condvar, Mutex};
use rustc_hash::FxHashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Called while waiting, about ten times a second; an error ends the wait.
pub type Interrupt = fn() -> Result<()>;

/// How often a wait looks whether it is to end.
pub(crate) const TICK: Duration = Duration::from_millis(100);

/// A process group.
#[derive(Debug, Default)]
pub struct Group {
    /// Its name.
    pub name: String,
    /// Its ranks, in its order; none if they are not known.
    pub ranks: Box<[u64]>,
    /// How many tasks each lane had. Locked while tasks are recorded, so that numbers and turns have one order.
    pub(crate) numbers: Mutex<FxHashMap<Lane, u64>>,
}

impl Group {
    /// A group of these ranks.
    pub fn new(name: String, ranks: Box<[u64]>) -> Group {
        Group { name, ranks, numbers: Mutex::default() }
    }

    /// The number of the last task of a lane; 0 if it had none.
    pub fn number(&self, lane: Lane) -> u64 {
        self.numbers.lock().get(&lane).copied().unwrap_or_default()
    }
}

/// The number of the next task of a lane.
pub(crate) fn next(numbers: &mut FxHashMap<Lane, u64>, lane: Lane) -> u64 {
    let number = numbers.entry(lane).or_default();
    *number += 1;
    *number
}

/// What a task is, for people.
#[derive(Clone, Debug, Default)]
pub struct About {
    /// c10d's name of the collective: "all_reduce".
    pub name: &'static str,
    /// The process group.
    pub group: Arc<Group>,
    /// Which of the group's collectives it is; the first is 1. All ranks number them alike.
    pub number: u64,
}

/// Characters of the tensors that are named.
const TENSORS: usize = 300;

impl About {
    /// The call with its tensors, of many the first: `all_reduce(float32[1000])`.
    pub(crate) fn call<'a>(&self, tensors: impl Iterator<Item = &'a TensorType>) -> String {
        let mut words = String::new();
        for (i, ty) in tensors.enumerate() {
            let comma = if i == 0 { "" } else { ", " };
            words += &format!("{comma}{}", capture::TensorType::from(ty));
            if let Some((end, _)) = words.char_indices().nth(TENSORS) {
                words.replace_range(end.., "...");
                break;
            }
        }
        format!("{}({words})", self.name)
    }

    /// Which collective it is, for people: `all_reduce(float32[1000]), number 3 of group 0`.
    pub(crate) fn which<'a>(&self, tensors: impl Iterator<Item = &'a TensorType>) -> String {
        format!("{}, number {} of group {}", self.call(tensors), self.number, self.group.name)
    }
}

/// What this process does in a collective.
pub trait Task: Send {
    /// What it is.
    fn about(&self) -> About;

    /// It is recorded, as the task of this number of its lane.
    fn begin(&mut self, number: u64);

    /// The same once more, for a later call of a function that records it, which begins it then. None if it cannot be done
    /// again: somebody waits for it, or its group has failed or ended.
    fn again(&self) -> Option<Box<dyn Task>>;

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
#[derive(Debug)]
pub struct Work {
    about: About,
    lane: Lane,
    outcome: Mutex<Option<(Result<()>, Instant)>>,
    done: Condvar,
}

impl Work {
    pub(crate) fn new(about: About, lane: Lane) -> Work {
        Work { about, lane, outcome: Mutex::default(), done: Condvar::new() }
    }

    /// The lane on which it is done.
    pub(crate) fn lane(&self) -> Lane {
        self.lane
    }

    /// What it is.
    pub fn about(&self) -> &About {
        &self.about
    }

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
