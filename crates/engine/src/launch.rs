//! The launch thread of a device: runs programs in the order in which they were queued.
//!
//! Python never waits here unless it reads a value, asks to synchronise, or is too far ahead. Who waits for a short queue
//! runs it instead: waking a thread and being woken by it takes longer than most programs that a value is read from.

mod flight;
mod leaving;
mod report;
mod run;
mod thread;
mod waiting;

pub(crate) use flight::Failure;
pub(crate) use run::out_of_memory;

use crate::error::Error;
use crate::executor::{Asked, Executor, GroupTask, Launch, Pad};
use crate::groups::Groups;
use crate::lanes::Turn;
use crate::mark::{Mark, Note};
use crate::memory::Memory;
use crate::metrics::Metrics;
use crate::site::Site;
use crate::spread::{Devices, Place, Sharded};
use crate::target::Target;
use crate::timing::{Front, Timing};
use crate::value::{State, Value};
use flight::Flight;
use leaving::Leaving;
use oxitorch_hlo::TensorType;
use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use thread::{Job, Runner, spin};

/// The queue of one device, or of the devices of a mesh.
pub(crate) struct Launcher {
    pub(crate) target: Target,
    pub(crate) device: usize,
    /// The device's place in the client.
    pub(crate) at: usize,
    /// Of a mesh.
    devices: Option<Arc<Devices>>,
    pub(crate) memory: &'static Memory,
    pub(crate) metrics: Arc<Metrics>,
    queue: Mutex<VecDeque<Job>>,
    /// Of the one who runs jobs at the moment.
    runner: Mutex<Runner>,
    /// Launches that the device may not have run yet, oldest first.
    in_flight: Mutex<VecDeque<Flight>>,
    wake: Condvar,
    sleeping: AtomicBool,
    pub(crate) stopped: AtomicBool,
    held: AtomicBool,
    spin: Duration,
    /// Jobs that were queued, and that are done.
    pushed: AtomicU64,
    done: AtomicU64,
    /// Ops of the launches that were queued, and of those that are done.
    ops_pushed: AtomicU64,
    ops_done: AtomicU64,
    /// The latest job that is to free memory, and the one before it, which Python waits for.
    freeing: AtomicU64,
    freed_before: AtomicU64,
    progress: Mutex<()>,
    progressed: Condvar,
    /// The first job that a sleeping thread waits for: to be woken by each job before it would cost more than the jobs.
    wanted: AtomicU64,
    /// The first failure that nobody has seen yet.
    pub(crate) failure: Arc<Mutex<Option<Failure>>>,
    /// What Python does between launches, and where the device's time goes.
    pub(crate) front: Front,
    pub(crate) timing: Arc<Timing>,
    /// What other processes take part in.
    pub(crate) groups: Arc<Groups>,
    /// Values on their way to the host.
    leaving: Arc<Leaving>,
}

impl Launcher {
    pub(crate) fn start(
        target: Target,
        Place { number, at, devices, lanes }: Place,
        memory: &'static Memory,
        metrics: Arc<Metrics>,
    ) -> std::io::Result<Arc<Launcher>> {
        let launcher = Arc::new(Launcher {
            target,
            device: number,
            at,
            devices,
            memory,
            metrics,
            queue: Mutex::default(),
            runner: Mutex::default(),
            in_flight: Mutex::default(),
            wake: Condvar::new(),
            sleeping: AtomicBool::new(false),
            stopped: AtomicBool::new(false),
            held: AtomicBool::new(false),
            spin: spin(),
            pushed: AtomicU64::new(0),
            done: AtomicU64::new(0),
            ops_pushed: AtomicU64::new(0),
            ops_done: AtomicU64::new(0),
            freeing: AtomicU64::new(0),
            freed_before: AtomicU64::new(0),
            progress: Mutex::default(),
            progressed: Condvar::new(),
            wanted: AtomicU64::new(u64::MAX),
            failure: Arc::default(),
            front: Front::default(),
            timing: Arc::default(),
            groups: Arc::new(Groups::new(lanes)),
            leaving: Arc::default(),
        });
        let own = launcher.clone();
        std::thread::Builder::new().name(format!("oxi-launch-{number}")).spawn(move || own.run())?;
        Ok(launcher)
    }

    /// Queues a mark.
    pub(crate) fn mark(&self) -> Arc<Mark> {
        let mark = self.awaited_mark();
        self.wake_up();
        mark
    }

    /// Queues a mark for who waits for it at once.
    pub(crate) fn awaited_mark(&self) -> Arc<Mark> {
        let (note, mark) = Note::new(true);
        self.push_with(true, |number| {
            note.queued(number);
            Job::Mark(note)
        });
        mark
    }

    /// Queues a mark that is reached when the device has run what is queued; the launch thread goes on meanwhile.
    pub(crate) fn pass(&self, note: Note) {
        self.push_with(false, |number| {
            note.queued(number);
            Job::Pass(note)
        });
    }

    /// Drops what is queued and not yet launched: nobody will look at it any more.
    pub(crate) fn discard(&self) {
        self.stopped.store(true, Ordering::SeqCst);
    }

    /// Ends the thread.
    pub(crate) fn stop(&self) -> u64 {
        self.push(Job::Stop)
    }

    /// Lets queued programs and tasks wait, or go on. Measures what recording alone costs.
    pub(crate) fn hold(&self, on: bool) {
        self.held.store(on, Ordering::SeqCst);
    }

    fn is_held(&self) -> bool {
        self.held.load(Ordering::Acquire)
    }

    fn push(&self, job: Job) -> u64 {
        self.push_with(false, |_| job)
    }

    /// Queues a job that is told its number.
    fn push_with(&self, awaited: bool, job: impl FnOnce(u64) -> Job) -> u64 {
        let mut queue = self.queue.lock();
        let number = self.pushed.load(Ordering::Relaxed) + 1; // changes under the queue's lock only
        queue.push_back(job(number));
        self.pushed.store(number, Ordering::Release);
        drop(queue);
        if !awaited {
            self.wake_up();
        }
        number
    }

    fn wake_up(&self) {
        if self.sleeping.load(Ordering::Acquire) {
            let _queue = self.queue.lock(); // the thread is inside `wait`, or has seen the job
            self.wake.notify_one();
        }
    }

    /// The number of the last job.
    pub(crate) fn last(&self) -> u64 {
        self.pushed.load(Ordering::Acquire)
    }

    /// Launches that wait or run, and the ops in them.
    pub(crate) fn queued(&self) -> (u64, u64) {
        let left = |pushed: &AtomicU64, done: &AtomicU64| {
            let done = done.load(Ordering::Acquire);
            pushed.load(Ordering::Acquire).saturating_sub(done)
        };
        (left(&self.pushed, &self.done), left(&self.ops_pushed, &self.ops_done))
    }

    /// Whether the device has run everything queued.
    pub(crate) fn is_idle(&self) -> bool {
        self.done.load(Ordering::Acquire) == self.last()
            && self.in_flight() == 0
            && self.groups.is_idle()
            && self.leaving.is_none()
    }
}

impl Executor for Launcher {
    fn launch(&self, launch: Launch, awaited: bool) {
        self.push_with(awaited, |number| {
            let ops = self.ops_pushed.load(Ordering::Relaxed) + launch.ops; // under the queue's lock
            self.ops_pushed.store(ops, Ordering::Relaxed);
            launch.outputs.iter().for_each(|v| v.launch.store(number, Ordering::Relaxed));
            launch.notes.iter().for_each(|(_, note)| note.queued(number));
            Job::Launch(launch)
        });
    }

    fn collective(&self, launch: Launch, _: Asked) {
        self.launch(launch, false);
    }

    fn task(&self, task: GroupTask, turn: Turn) {
        let number = self.push_with(true, |number| {
            task.results().for_each(|v| v.launch.store(number, Ordering::Relaxed));
            Job::Task(task, turn)
        });
        self.run_or_wake(number);
    }

    fn pad(&self, pad: Pad) {
        let number = self.push_with(true, |number| {
            pad.to.launch.store(number, Ordering::Relaxed);
            Job::Pad(pad)
        });
        self.run_or_wake(number);
    }

    fn upload(
        &self,
        ty: TensorType,
        sharding: Sharded,
        bytes: &[u8],
        first: bool,
    ) -> Result<Arc<Value>, Error> {
        let start = Instant::now();
        let buffers = self.put(&ty, sharding.clone(), bytes)?;
        self.front.copied(start, first);
        self.metrics.events.to_device(start, self.device as u16, bytes.len());
        Ok(Value::sharded(ty, sharding, State::Ready(buffers), Site::default()))
    }

    fn read_absent(&self, _: &Arc<Value>, _: Option<&[u8]>, _: &mut [u8]) -> Result<(), Error> {
        Err(Error::runtime("a value of a device that is there was never computed; please report this"))
    }
}
