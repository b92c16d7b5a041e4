//! The launch thread of a device: runs programs in the order in which they were queued.
//!
//! Python never waits here unless it reads a value, asks to synchronise, or is too far ahead. Who waits for a short queue
//! runs it instead: waking a thread and being woken by it takes longer than most programs that a value is read from.

use crate::error::{self, Error, ErrorKind};
use crate::events::What;
use crate::isolate;
use crate::memory::Memory;
use crate::metrics::Metrics;
use crate::program::{Program, element};
use crate::site::Site;
use crate::target::Target;
use crate::timing::{Before, Front, Timing};
use crate::value::{State, Value};
use oxitorch_pjrt as pjrt;
use parking_lot::{Condvar, Mutex, MutexGuard};
use smallvec::SmallVec;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

/// One execution of a program.
pub(crate) struct Launch {
    pub(crate) program: Arc<Program>,
    pub(crate) inputs: SmallVec<[Arc<Value>; 4]>,
    pub(crate) outputs: SmallVec<[Arc<Value>; 2]>,
    /// Buffers of the checks go here.
    pub(crate) checks: Option<Arc<Checks>>,
    /// How many ops it runs.
    pub(crate) ops: u64,
    /// The Python line of the first.
    pub(crate) first: Site,
    /// The number of its window for who listens; see [`Events`](crate::events::Events).
    pub(crate) window: u64,
    /// What Python did before it.
    pub(crate) before: Before,
    /// Whether it is the last of an optimizer's step.
    pub(crate) ends_step: bool,
}

impl Launch {
    /// Whether launching it runs it, if its inputs are there.
    fn is_inline(&self, platform: pjrt::Platform) -> bool {
        let small = |v: &Arc<Value>| v.bytes() <= SMALL;
        let all_small = || self.inputs.iter().all(small) && self.outputs.iter().all(small);
        platform == pjrt::Platform::Cpu && self.ops == 1 && all_small()
    }

    /// The Python line to blame when it fails: that of its largest result.
    fn site(&self) -> Site {
        self.outputs.iter().max_by_key(|v| v.bytes()).map_or(Site::default(), |v| v.site)
    }
}

/// The outcome of a program's checks.
#[derive(Debug, Default)]
pub(crate) struct Checks(pub(crate) OnceLock<Vec<pjrt::Buffer>>);

/// A point in the queue: when the device reached it.
#[derive(Debug, Default)]
pub struct Mark(OnceLock<Instant>);

impl Mark {
    /// When it was reached.
    pub fn time(&self) -> Option<Instant> {
        self.0.get().copied()
    }
}

enum Job {
    Launch(Launch),
    Mark(Arc<Mark>),
    Stop,
}

/// Ops that Python may be ahead of the device.
const MAX_AHEAD: u64 = 8192;
/// Launches that may run at once. The CPU platform computes where Python does: more would only make Ctrl-C wait.
fn max_in_flight(platform: pjrt::Platform) -> usize {
    if platform == pjrt::Platform::Cpu { 2 } else { 32 }
}
/// How long the launch thread looks for work before it sleeps: a wake-up costs about as much.
const SPIN: Duration = Duration::from_micros(50);

/// Jobs that whoever waits for them runs: more are left to the launch thread, for the sake of Ctrl-C.
const SHORT: u64 = 2;

/// What the one who runs jobs needs.
#[derive(Default)]
struct Runner {
    /// Taken from the queue.
    batch: VecDeque<Job>,
    in_flight: VecDeque<Weak<pjrt::Buffer>>,
    /// When the job before in this batch ended, if that is known: the next one starts then.
    ended: Option<Instant>,
}

impl Runner {
    fn refill(&mut self, queue: &Mutex<VecDeque<Job>>) {
        if self.batch.is_empty() {
            self.ended = None;
            std::mem::swap(&mut *queue.lock(), &mut self.batch);
        }
    }
}

/// The queue of one device.
pub(crate) struct Launcher {
    target: Target,
    device: usize,
    memory: &'static Memory,
    metrics: Arc<Metrics>,
    queue: Mutex<VecDeque<Job>>,
    /// Of the one who runs jobs at the moment.
    runner: Mutex<Runner>,
    wake: Condvar,
    sleeping: AtomicBool,
    stopped: AtomicBool,
    held: AtomicBool,
    /// Jobs that were queued, and that are done.
    pushed: AtomicU64,
    done: AtomicU64,
    /// Ops of the launches that were queued, and of those that are done.
    ops_pushed: AtomicU64,
    ops_done: AtomicU64,
    progress: Mutex<()>,
    progressed: Condvar,
    /// The first job that a sleeping thread waits for: to be woken by each job before it would cost more than the jobs.
    wanted: AtomicU64,
    /// The first failure that nobody has seen yet.
    failure: Mutex<Option<Error>>,
    /// What Python does between launches, and where the device's time goes.
    pub(crate) front: Front,
    pub(crate) timing: Arc<Timing>,
}

/// Called while waiting, about ten times a second; an error ends the wait.
pub type Interrupt = fn() -> Result<(), Error>;

impl Launcher {
    pub(crate) fn start(
        target: Target,
        device: usize,
        memory: &'static Memory,
        metrics: Arc<Metrics>,
    ) -> std::io::Result<Arc<Launcher>> {
        let launcher = Arc::new(Launcher {
            target,
            device,
            memory,
            metrics,
            queue: Mutex::default(),
            runner: Mutex::default(),
            wake: Condvar::new(),
            sleeping: AtomicBool::new(false),
            stopped: AtomicBool::new(false),
            held: AtomicBool::new(false),
            pushed: AtomicU64::new(0),
            done: AtomicU64::new(0),
            ops_pushed: AtomicU64::new(0),
            ops_done: AtomicU64::new(0),
            progress: Mutex::default(),
            progressed: Condvar::new(),
            wanted: AtomicU64::new(u64::MAX),
            failure: Mutex::default(),
            front: Front::default(),
            timing: Arc::default(),
        });
        let own = launcher.clone();
        std::thread::Builder::new().name(format!("oxi-launch-{device}")).spawn(move || own.run())?;
        Ok(launcher)
    }

    /// Queues a launch. `awaited`: the caller is about to wait for it.
    pub(crate) fn launch(&self, launch: Launch, awaited: bool) {
        if let Some(absent) = self.target.absent() {
            self.metrics.count(&self.metrics.launches);
            return absent.launch(&launch, self.memory);
        }
        self.push_with(awaited, |number| {
            let ops = self.ops_pushed.load(Ordering::Relaxed) + launch.ops; // under the queue's lock
            self.ops_pushed.store(ops, Ordering::Relaxed);
            launch.outputs.iter().for_each(|v| v.launch.store(number, Ordering::Relaxed));
            Job::Launch(launch)
        });
    }

    /// Queues a mark.
    pub(crate) fn mark(&self) -> (u64, Arc<Mark>) {
        let mark = Arc::new(Mark::default());
        (self.push(Job::Mark(mark.clone())), mark)
    }

    /// Drops what is queued and not yet launched: nobody will look at it any more.
    pub(crate) fn discard(&self) {
        self.stopped.store(true, Ordering::SeqCst);
    }

    /// Ends the thread.
    pub(crate) fn stop(&self) -> u64 {
        self.push(Job::Stop)
    }

    /// Lets queued programs wait, or go on. Measures what recording alone costs.
    pub(crate) fn hold(&self, on: bool) {
        self.held.store(on, Ordering::SeqCst);
    }

    /// Waits until a buffer has its value.
    pub(crate) fn wait_buffer(&self, buffer: &pjrt::Buffer, interrupt: Interrupt) -> Result<(), Error> {
        let failed = |e: pjrt::Error| error::device("waiting for a value", &e);
        let event = buffer.ready_event().map_err(failed)?;
        if event.is_ready().map_err(failed)? {
            return Ok(());
        }
        let start = Instant::now();
        let done = Arc::new((Mutex::new(false), Condvar::new()));
        let signal = done.clone();
        event
            .on_ready(move |_| {
                *signal.0.lock() = true;
                signal.1.notify_all();
            })
            .map_err(failed)?;
        loop {
            let mut ready = done.0.lock();
            if *ready {
                self.waited(start);
                return Ok(()); // an error in it is reported by the copy that follows
            }
            let timeout = done.1.wait_for(&mut ready, Duration::from_millis(100)).timed_out();
            drop(ready);
            if timeout {
                interrupt()?;
            }
        }
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

    /// Whether everything queued has been launched.
    pub(crate) fn is_idle(&self) -> bool {
        self.done.load(Ordering::Acquire) == self.last()
    }

    /// This thread has waited for the device.
    fn waited(&self, start: Instant) {
        self.front.waited(start);
        self.metrics.events.waited(start);
    }

    /// Waits until job `number` is done.
    pub(crate) fn wait(&self, number: u64, interrupt: Interrupt) -> Result<(), Error> {
        if self.done.load(Ordering::Acquire) >= number {
            return Ok(());
        }
        let start = Instant::now();
        let result = self.wait_until(number, interrupt);
        self.waited(start);
        result
    }

    fn wait_until(&self, number: u64, interrupt: Interrupt) -> Result<(), Error> {
        if self.help(number) {
            return Ok(());
        }
        self.wake_up();
        let start = Instant::now();
        while start.elapsed() < SPIN {
            if self.done.load(Ordering::Acquire) >= number {
                return Ok(());
            }
            std::hint::spin_loop();
        }
        self.wait_sleeping(number, interrupt)
    }

    /// Runs what is queued up to job `number`, if that is little, at hand, and nobody else does; whether it is done.
    fn help(&self, number: u64) -> bool {
        let done = || self.done.load(Ordering::Acquire);
        if done() + SHORT < number {
            return false;
        }
        let Some(mut runner) = self.runner.try_lock() else { return done() >= number };
        while done() < number {
            runner.refill(&self.queue);
            // Behind as many launches as may run at once it would wait for the oldest, deaf to Ctrl-C.
            let room = self.has_room(&mut runner.in_flight) && !self.held.load(Ordering::Acquire);
            match runner.batch.front() {
                Some(Job::Launch(l)) if room && l.program.is_at_hand() => {}
                _ => return false,
            }
            self.run_next(&mut runner);
        }
        true
    }

    /// Whether another launch may run beside those that do.
    fn has_room(&self, in_flight: &mut VecDeque<Weak<pjrt::Buffer>>) -> bool {
        in_flight.retain(is_running);
        in_flight.len() < max_in_flight(self.target.platform())
    }

    fn wait_sleeping(&self, number: u64, interrupt: Interrupt) -> Result<(), Error> {
        loop {
            let mut progress = self.progress.lock();
            self.wanted.fetch_min(number, Ordering::SeqCst);
            if self.done.load(Ordering::SeqCst) >= number {
                return Ok(());
            }
            let timeout = self.progressed.wait_for(&mut progress, Duration::from_millis(100)).timed_out();
            drop(progress);
            if timeout {
                interrupt()?;
            }
        }
    }

    /// Waits if the caller is too far ahead of the device: until half of what is queued is done.
    pub(crate) fn throttle(&self, interrupt: Interrupt) -> Result<(), Error> {
        let done = self.ops_done.load(Ordering::Acquire);
        if self.ops_pushed.load(Ordering::Relaxed).saturating_sub(done) < MAX_AHEAD {
            return Ok(());
        }
        let last = self.last();
        self.wait(last - (last - self.done.load(Ordering::Acquire)) / 2, interrupt)
    }

    /// Takes the first failure that nobody has seen.
    pub(crate) fn take_failure(&self) -> Option<Error> {
        self.failure.lock().take()
    }

    /// Says that the user has seen this failure.
    pub(crate) fn seen(&self, error: &Error) {
        let mut failure = self.failure.lock();
        if failure.as_ref().is_some_and(|f| Arc::ptr_eq(&f.message, &error.message)) {
            *failure = None;
        }
    }

    // ---- the thread

    fn run(&self) {
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
    fn run_next(&self, runner: &mut Runner) -> bool {
        let Some(job) = runner.batch.pop_front() else { return false };
        let stop = matches!(job, Job::Stop);
        match job {
            Job::Launch(launch) => {
                let ops = launch.ops;
                self.run_launch(launch, runner);
                let done = self.ops_done.load(Ordering::Relaxed) + ops; // changes where jobs are run only
                self.ops_done.store(done, Ordering::Release);
            }
            Job::Mark(mark) => {
                runner.in_flight.drain(..).for_each(|b| settle(&b));
                self.timing.rest();
                runner.ended = None;
                let _ = mark.0.set(Instant::now()); // set once: each mark is queued once
            }
            Job::Stop => runner.in_flight.drain(..).for_each(|b| settle(&b)),
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
        while start.elapsed() < SPIN {
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

    fn run_launch(&self, launch: Launch, runner: &mut Runner) {
        while self.held.load(Ordering::Acquire) {
            std::thread::sleep(Duration::from_micros(50));
        }
        let in_flight = &mut runner.in_flight;
        // Behind others its inputs may not be there: then it has not run when it is launched.
        let inline = launch.is_inline(self.target.platform()) && {
            in_flight.retain(is_running);
            in_flight.is_empty()
        };
        let ended = &mut runner.ended;
        let execute = std::panic::AssertUnwindSafe(|| self.execute(&launch, inline, ended));
        let result = std::panic::catch_unwind(execute);
        let result =
            result.unwrap_or_else(|_| Err(Error::runtime("the launch thread panicked; please report this")));
        match result {
            Ok(mut buffers) => {
                let checks = buffers.split_off(launch.program.outputs);
                let mut first = None;
                for (value, buffer) in launch.outputs.iter().zip(buffers) {
                    self.memory.charge(value.bytes(), &value.charge);
                    let buffer = Arc::new(buffer);
                    if !inline && first.is_none() {
                        first = Some(Arc::downgrade(&buffer));
                    }
                    *value.state.lock() = State::Ready(buffer);
                }
                if let Some(slot) = &launch.checks {
                    let _ = slot.0.set(checks); // set once: each launch runs once
                }
                in_flight.extend(first);
                if in_flight.len() > max_in_flight(self.target.platform())
                    && let Some(oldest) = in_flight.pop_front()
                {
                    settle(&oldest);
                }
            }
            Err(e) => {
                let isolated = std::panic::AssertUnwindSafe(|| self.isolate(&launch, &e));
                if !std::panic::catch_unwind(isolated).unwrap_or(false) {
                    self.fail(&e);
                    launch.outputs.iter().for_each(|v| *v.state.lock() = State::Failed(e.clone()));
                }
            }
        }
    }

    /// Keeps the first failure for who synchronises.
    fn fail(&self, e: &Error) {
        self.failure.lock().get_or_insert_with(|| e.clone());
    }

    /// Runs a launch that failed op by op, so that only what depends on the op at fault fails. False if that is of no
    /// use: there is only one op, or inputs have been given away.
    fn isolate(&self, launch: &Launch, e: &Error) -> bool {
        let Some((compiler, task)) = launch.program.task() else { return false };
        let given = |&i: &u32| matches!(*launch.inputs[i as usize].state.lock(), State::Donated);
        let closed = || self.stopped.load(Ordering::Acquire);
        // What does not fit as a whole fits no better with all values in between.
        let full = e.kind == ErrorKind::OutOfMemory && !launch.program.is_broken();
        if task.graph.insts.len() < 2 || full || closed() || launch.program.donated.iter().any(given) {
            return false;
        }
        self.metrics.count(&self.metrics.isolations);
        let inputs = launch.inputs.iter().map(|v| self.buffer(v)).collect();
        let isolated = isolate::run(&compiler, task, inputs, |bytes| match closed() {
            true => Err(Error::runtime("the tpu device is closed")),
            false if self.memory.fits(bytes) => Ok(()),
            false => Err(out_of_memory(self.memory, self.device, bytes)),
        });
        self.metrics.launches.fetch_add(isolated.launches, Ordering::Relaxed);
        let mut whole = true;
        for (value, got) in launch.outputs.iter().zip(isolated.outputs) {
            let state = match got {
                Ok(buffer) => {
                    self.memory.charge(value.bytes(), &value.charge);
                    State::Ready(buffer)
                }
                Err(e) => {
                    whole = false;
                    self.fail(&e);
                    State::Failed(e)
                }
            };
            *value.state.lock() = state;
        }
        if let Some(slot) = &launch.checks {
            let _ = slot.0.set(isolated.checks); // set once: each launch runs once
        }
        if whole && !launch.program.told.swap(true, Ordering::Relaxed) {
            compiler.programs().warn(&format!("{e}\nIts operations run one by one instead"));
        }
        true
    }

    /// Runs a launch; `inline`, if it has run then. It starts when the one before `ended`, and says when it did.
    fn execute(
        &self,
        launch: &Launch,
        inline: bool,
        ended: &mut Option<Instant>,
    ) -> Result<Vec<pjrt::Buffer>, Error> {
        if self.stopped.load(Ordering::Acquire) {
            return Err(Error::runtime("the tpu device is closed"));
        }
        let program = &launch.program;
        let (wanted, at_hand) = (ended.take().unwrap_or_else(Instant::now), program.is_at_hand());
        let executable = program.executable().map_err(|e| e.at(launch.first))?;
        let start = if at_hand { wanted } else { Instant::now() };
        let mut args: SmallVec<[Arc<pjrt::Buffer>; 8]> = SmallVec::new();
        for input in &launch.inputs {
            args.push(self.buffer(input)?);
        }
        let wanted_bytes = launch.outputs.iter().map(|v| v.bytes()).fold(0, u64::saturating_add);
        let given_bytes: u64 = program.donated.iter().map(|&i| launch.inputs[i as usize].bytes()).sum();
        if !self.memory.fits(wanted_bytes.saturating_sub(given_bytes)) {
            return Err(out_of_memory(self.memory, self.device, wanted_bytes).at(launch.site()));
        }
        let given: SmallVec<[Option<Arc<pjrt::Buffer>>; 4]> =
            program.donated.iter().map(|&i| launch.inputs[i as usize].donate()).collect();
        self.metrics.count(&self.metrics.launches);
        program.ran.launch();
        if !given.is_empty() {
            self.metrics.donations.fetch_add(given.len() as u64, Ordering::Relaxed);
            self.metrics.bytes_donated.fetch_add(given_bytes, Ordering::Relaxed);
        }
        let args: SmallVec<[&pjrt::Buffer; 8]> = args.iter().map(Arc::as_ref).collect();
        let run = Run::new(self, launch, wanted, start);
        if !inline {
            self.timing.starts(wanted, start, launch.before);
        }
        let results = executable
            .execute(&args, &pjrt::ExecuteArgs::default())
            .map_err(|e| error::device(&program.name, &e).at(launch.site()));
        if inline {
            let now = Instant::now();
            let time = self.timing.ran(wanted, start, launch.before, now, run.ends_step);
            run.report(program, &self.metrics, now, time);
            *ended = Some(now);
        } else {
            let (program, timing) = (program.clone(), self.timing.clone());
            let running = Running { run, program, timing, metrics: self.metrics.clone() };
            running.until(results.as_ref().ok().and_then(|buffers| buffers.first()));
        }
        results
    }

    /// The device buffer of a value, uploaded if it still is on the host.
    fn buffer(&self, value: &Value) -> Result<Arc<pjrt::Buffer>, Error> {
        let mut state = value.state.lock();
        match &*state {
            State::Ready(b) => Ok(b.clone()),
            State::Failed(e) => Err(e.clone()),
            State::Host(bytes) => {
                let buffer = upload(self.target.client()?, self.device, &value.ty, bytes)?;
                let buffer = Arc::new(buffer);
                *state = State::Ready(buffer.clone());
                Ok(buffer)
            }
            State::Pending | State::Donated | State::Absent(_) => Err(Error::runtime(
                "a value was used before it was computed or after it was given away; please report this",
            )),
        }
    }
}

/// A launch that the device runs.
struct Run {
    device: u16,
    window: u64,
    ops: u64,
    ends_step: bool,
}

impl Run {
    /// It starts at `start`; it was wanted at `wanted`, when it may not have been compiled.
    fn new(launcher: &Launcher, launch: &Launch, wanted: Instant, start: Instant) -> Run {
        let (device, number) = (launcher.device as u16, launch.window);
        if start.duration_since(wanted) > STALL && launcher.metrics.events.on() {
            let program = launch.program.name.clone();
            launcher.metrics.events.push(wanted, start, What::Stall { device, number, program });
        }
        Run { device, window: number, ops: launch.ops, ends_step: launch.ends_step }
    }

    /// It has run until now, for so long.
    fn report(&self, program: &Program, metrics: &Metrics, now: Instant, time: Duration) {
        program.ran.end(time);
        if metrics.events.on() {
            let what = What::Execute {
                device: self.device,
                number: self.window,
                program: program.name.clone(),
                ops: self.ops,
                donated: program.donated.len() as u64,
            };
            metrics.events.push(now.checked_sub(time).unwrap_or(now), now, what);
        }
    }
}

/// A launch that goes on after it was asked for; dropped when it has run.
struct Running {
    run: Run,
    program: Arc<Program>,
    timing: Arc<Timing>,
    metrics: Arc<Metrics>,
}

impl Running {
    /// It has run when this result is there.
    fn until(self, result: Option<&pjrt::Buffer>) {
        // Without an event, the program counts as run when its launch is over.
        if let Some(Ok(event)) = result.map(pjrt::Buffer::ready_event)
            && event.is_ready().is_ok_and(|ready| !ready)
        {
            let _ = event.on_ready(move |_| drop(self));
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let now = Instant::now();
        let time = self.timing.ends(now, self.run.ends_step);
        self.run.report(&self.program, &self.metrics, now, time);
    }
}

/// The CPU platform runs an op with results of so many bytes while it is launched.
const SMALL: u64 = 64 << 10;

/// Shorter waits for a program are no waits for the compiler.
const STALL: Duration = Duration::from_micros(50);

/// The error for so many bytes that do not fit.
pub(crate) fn out_of_memory(memory: &Memory, device: usize, wanted: u64) -> Error {
    let gib = |b: u64| b as f64 / f64::from(1 << 30);
    Error::new(
        ErrorKind::OutOfMemory,
        format!(
            "tpu:{device} out of memory. Tried to allocate {:.2} GiB; the device has {:.2} GiB, of which {:.2} GiB are in use",
            gib(wanted),
            gib(memory.limit()),
            gib(memory.bytes().current)
        ),
    )
}

/// Copies row-major bytes to a device.
pub(crate) fn upload(
    client: &Arc<pjrt::Client>,
    device: usize,
    ty: &oxitorch_hlo::TensorType,
    bytes: &[u8],
) -> Result<pjrt::Buffer, Error> {
    client
        .buffer_from_host(bytes, element(ty.dtype), &ty.shape, &client.devices()[device])
        .map_err(|e| error::device("copy to the device", &e))
}

/// Whether a buffer is still waited for, and not there yet.
fn is_running(buffer: &Weak<pjrt::Buffer>) -> bool {
    let event = buffer.upgrade().and_then(|b| b.ready_event().ok());
    event.is_some_and(|e| e.is_ready().is_ok_and(|ready| !ready))
}

/// Waits for a buffer if it still exists. An error in it belongs to whoever reads it.
fn settle(buffer: &Weak<pjrt::Buffer>) {
    if let Some(b) = buffer.upgrade()
        && let Ok(event) = b.ready_event()
    {
        let _ = event.wait();
    }
}
