//! The threads that do the tasks of process groups. A lane has one while it has something to do.

use crate::work::Lane;
use parking_lot::{Condvar, Mutex};
use rustc_hash::FxHashMap;
use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// What a lane does.
pub(crate) type Job = Box<dyn FnOnce() + Send>;

/// How long a lane's thread waits for more: each peer and tag of point-to-point operations has a lane.
const IDLE: Duration = Duration::from_secs(5);

/// The lanes of an engine, whatever device their tasks are of: the processes of a group meet in the order in which each
/// recorded its tasks, and launch threads of several devices know none.
#[derive(Clone, Default)]
pub(crate) struct Lanes(Arc<Mutex<FxHashMap<Lane, Arc<Queue>>>>);

/// What a lane is to do.
#[derive(Default)]
struct Queue {
    waiting: Mutex<Waiting>,
    came: Condvar,
}

#[derive(Default)]
struct Waiting {
    /// How many turns were taken.
    taken: u64,
    /// The turn whose job is done next.
    next: u64,
    /// What came of turns: a job, or nothing.
    jobs: BTreeMap<u64, Option<Job>>,
    has_thread: bool,
}

impl Waiting {
    /// The next job, if it has come.
    fn job(&mut self) -> Option<Job> {
        while let Some(came) = self.jobs.remove(&self.next) {
            self.next += 1;
            if came.is_some() {
                return came;
            }
        }
        None
    }
}

impl fmt::Debug for Lanes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Lanes({})", self.0.lock().len())
    }
}

/// A place in the order of a lane. What comes after it waits until it is used or dropped.
pub(crate) struct Turn {
    lanes: Lanes,
    lane: Lane,
    queue: Arc<Queue>,
    number: u64,
}

impl Lanes {
    /// The place after all that were taken before.
    pub(crate) fn turn(&self, lane: Lane) -> Turn {
        let mut lanes = self.0.lock();
        let queue = lanes.entry(lane).or_default().clone();
        let mut waiting = queue.waiting.lock();
        let number = waiting.taken;
        waiting.taken += 1;
        drop(waiting);
        Turn { lanes: self.clone(), lane, queue, number }
    }

    /// Whether nobody will come to a lane any more, which is then forgotten.
    fn ends(&self, lane: Lane, queue: &Queue) -> bool {
        let mut lanes = self.0.lock();
        let mut waiting = queue.waiting.lock();
        if !waiting.jobs.is_empty() {
            return false;
        }
        waiting.has_thread = false;
        if waiting.taken == waiting.next {
            lanes.remove(&lane);
        }
        true
    }
}

impl Turn {
    pub(crate) fn lane(&self) -> Lane {
        self.lane
    }

    /// Has the lane's thread do this when all turns before are over.
    pub(crate) fn send(self, job: Job) -> io::Result<()> {
        self.came(Some(job))
    }

    fn came(&self, job: Option<Job>) -> io::Result<()> {
        let mut waiting = self.queue.waiting.lock();
        if self.number < waiting.next || waiting.jobs.contains_key(&self.number) {
            return Ok(()); // dropped after it was used
        }
        if job.is_some() && !waiting.has_thread {
            let (lanes, lane, queue) = (self.lanes.clone(), self.lane, self.queue.clone());
            let thread = std::thread::Builder::new().name("oxi-group".into());
            thread.spawn(move || queue.run(&lanes, lane))?;
            waiting.has_thread = true;
        }
        waiting.jobs.insert(self.number, job);
        self.queue.came.notify_one();
        Ok(())
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let _ = self.came(None); // starts no thread
    }
}

impl Queue {
    fn run(&self, lanes: &Lanes, lane: Lane) {
        loop {
            let mut waiting = self.waiting.lock();
            let mut job = waiting.job();
            if job.is_none() {
                self.came.wait_for(&mut waiting, IDLE);
                job = waiting.job();
            }
            drop(waiting);
            match job {
                Some(job) => job(),
                None if lanes.ends(lane, self) => return,
                None => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    #[test]
    fn a_lane_keeps_its_order_and_waits_for_no_other() {
        let lanes = Lanes::default();
        let (said, heard) = channel();
        let (go, gate) = channel::<()>();
        lanes.turn(1).send(Box::new(move || gate.recv().unwrap())).unwrap();
        let say = |n: u32| -> Job {
            let said = said.clone();
            Box::new(move || said.send(n).unwrap())
        };
        let (second, third, fourth) = (lanes.turn(1), lanes.turn(1), lanes.turn(1));
        fourth.send(say(4)).unwrap();
        lanes.turn(2).send(say(1)).unwrap();
        assert_eq!(heard.recv(), Ok(1));
        go.send(()).unwrap();
        drop(third);
        assert_eq!(heard.recv_timeout(Duration::from_millis(50)).ok(), None);
        second.send(say(2)).unwrap();
        assert_eq!((heard.recv(), heard.recv()), (Ok(2), Ok(4)));
    }

    #[test]
    fn a_lane_that_nobody_used_waits_for_nobody() {
        let lanes = Lanes::default();
        drop(lanes.turn(1));
        let (said, heard) = channel();
        lanes.turn(1).send(Box::new(move || said.send(()).unwrap())).unwrap();
        assert_eq!(heard.recv(), Ok(()));
    }
}
