//! The thread that runs jobs, in the order in which they were queued.

use super::Launcher;
use crate::executor::{GroupTask, Launch, Pad};
use crate::lanes::Turn;
use crate::mark::Note;
use crate::work::Work;
use parking_lot::{Mutex, MutexGuard};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

pub(super) enum Job {
    Launch(Launch),
    Task(GroupTask, Turn),
    Pad(Pad),
    /// Waits until the device has reached it.
    Mark(Note),
    /// Waits for nothing.
    Pass(Note),
    Stop,
}

/// How long the launch thread looks for work before it sleeps, and who waits for it looks for its end: a wake-up costs
/// about as much. On a single core the other one would not run meanwhile.
pub(super) fn spin() -> Duration {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    if cores > 1 { Duration::from_micros(50) } else { Duration::ZERO }
}

/// What the one who runs jobs needs.
#[derive(Default)]
pub(super) struct Runner {
    /// Taken from the queue.
    pub(super) batch: VecDeque<Job>,
    /// When the job before in this batch ended, if that is known: the next one starts then.
    pub(super) ended: Option<Instant>,
}

impl Runner {
    pub(super) fn refill(&mut self, queue: &Mutex<VecDeque<Job>>) {
        if self.batch.is_empty() {
            self.ended = None;
            std::mem::swap(&mut *queue.lock(), &mut self.batch);
        }
    }
}

impl Launcher {
    pub(super) fn run(&self) {
        loop {
            let mut runner = self.next();
            while !runner.batch.is_empty() {
                if self.run_next(&mut runner) {
                    return;
                }
            }
        }
    }

    /// Runs the first job of the batch; whether it was the last one ever.
    pub(super) fn run_next(&self, runner: &mut Runner) -> bool {
        let Some(job) = runner.batch.pop_front() else { return false };
        let stop = matches!(job, Job::Stop);
        while matches!(job, Job::Launch(_) | Job::Task(..) | Job::Pad(_)) && self.is_held() {
            std::thread::sleep(Duration::from_micros(50));
        }
        match job {
            Job::Launch(launch) => {
                let ops = launch.ops;
                self.run_launch(launch, runner);
                let done = self.ops_done.load(Ordering::Relaxed) + ops; // changes where jobs are run only
                self.ops_done.store(done, Ordering::Release);
            }
            Job::Task(task, turn) => self.begin(task, turn),
            Job::Pad(pad) => self.run_pad(&pad),
            Job::Mark(note) => {
                self.land();
                self.timing.rest();
                runner.ended = None;
                let works = self.pending(&note);
                note.reach(Instant::now(), works);
            }
            Job::Pass(note) => {
                let works = self.pending(&note);
                self.timing.follow(note, works);
            }
            Job::Stop => self.land(),
        }
        let done = self.done.fetch_add(1, Ordering::SeqCst) + 1;
        if self.wanted.load(Ordering::SeqCst) <= done {
            let _progress = self.progress.lock();
            self.wanted.store(u64::MAX, Ordering::SeqCst); // who waits for more says so again
            self.progressed.notify_all();
        }
        stop
    }

    fn has_jobs(&self) -> bool {
        self.done.load(Ordering::Relaxed) != self.pushed.load(Ordering::Acquire)
    }

    /// Takes all queued jobs; waits until there are some that nobody else runs.
    fn next(&self) -> MutexGuard<'_, Runner> {
        let start = Instant::now();
        while start.elapsed() < self.spin {
            if self.has_jobs()
                && let Some(runner) = self.runner.try_lock()
            {
                return self.take(runner);
            }
            std::hint::spin_loop();
        }
        let mut queue = self.queue.lock();
        while !self.has_jobs() {
            self.sleeping.store(true, Ordering::SeqCst);
            self.wake.wait(&mut queue);
            self.sleeping.store(false, Ordering::SeqCst);
        }
        drop(queue);
        self.take(self.runner.lock())
    }

    fn take<'a>(&self, mut runner: MutexGuard<'a, Runner>) -> MutexGuard<'a, Runner> {
        runner.refill(&self.queue);
        runner
    }

    /// The collectives that are not done, if the mark is behind those.
    pub(super) fn pending(&self, note: &Note) -> Vec<Arc<Work>> {
        if note.of_collectives { self.groups.pending() } else { Vec::new() }
    }
}
