//! The threads that do the tasks of process groups. A lane has one while it has something to do.

use crate::value::Value;
use crate::work::{Lane, Work};
use parking_lot::Mutex;
use rustc_hash::FxHashMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

/// What a lane does.
pub(crate) type Job = Box<dyn FnOnce() + Send>;

/// How long a lane's thread waits for more: each peer and tag of point-to-point operations has a lane.
const IDLE: Duration = Duration::from_secs(5);

/// The lanes that have a thread.
#[derive(Clone, Default)]
struct Lanes(Arc<Mutex<FxHashMap<Lane, Sender<Job>>>>);

impl Lanes {
    /// Has a lane do this after what it was given before.
    fn send(&self, lane: Lane, job: Job) -> io::Result<()> {
        let mut lanes = self.0.lock();
        let sender = match lanes.get(&lane) {
            Some(sender) => sender.clone(),
            None => {
                let (sender, jobs) = channel();
                let own = self.clone();
                let thread = std::thread::Builder::new().name("oxi-group".into());
                thread.spawn(move || own.run(lane, &jobs))?;
                lanes.insert(lane, sender.clone());
                sender
            }
        };
        // Its thread goes with the map locked only.
        sender.send(job).map_err(|_| io::Error::other("the thread of a process group has ended"))
    }

    fn run(&self, lane: Lane, jobs: &Receiver<Job>) {
        loop {
            while let Ok(job) = jobs.recv_timeout(IDLE) {
                job();
            }
            let mut lanes = self.0.lock();
            match jobs.try_recv() {
                Ok(job) => {
                    drop(lanes);
                    job();
                }
                Err(_) => {
                    lanes.remove(&lane);
                    return;
                }
            }
        }
    }
}

/// The tasks of a device that are not done.
#[derive(Default)]
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
    /// Has a lane do this after what it was given before.
    pub(crate) fn send(&self, lane: Lane, job: Job) -> io::Result<()> {
        self.lanes.send(lane, job)
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

    /// A task that reads a value.
    pub(crate) fn reader(&self, value: &Arc<Value>) -> Option<Arc<Work>> {
        let tasks = self.tasks.lock();
        let reader = tasks.iter().find(|t| t.reads.iter().any(|read| Arc::ptr_eq(read, value)));
        reader.map(|t| t.work.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lane_keeps_its_order_and_waits_for_no_other() {
        let lanes = Lanes::default();
        let (said, heard) = channel();
        let (go, gate) = channel::<()>();
        lanes.send(1, Box::new(move || gate.recv().unwrap())).unwrap();
        let say = |n: u32| -> Job {
            let said = said.clone();
            Box::new(move || said.send(n).unwrap())
        };
        lanes.send(1, say(2)).unwrap();
        lanes.send(1, say(3)).unwrap();
        lanes.send(2, say(1)).unwrap();
        assert_eq!(heard.recv(), Ok(1));
        go.send(()).unwrap();
        assert_eq!((heard.recv(), heard.recv()), (Ok(2), Ok(3)));
    }
}
