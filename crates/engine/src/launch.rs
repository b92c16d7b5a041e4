//! The launch thread of a device: runs programs in the order in which they were queued.
//!
//! Python never waits here unless it reads a value, asks to synchronise, or is too far ahead. Who waits for a short queue
//! runs it instead: waking a thread and being woken by it takes longer than most programs that a value is read from.

use crate::buffers::{Buffers, Done, Launched, execute, upload, upload_sharded};
use crate::error::{self, Error, ErrorKind};
use crate::events::What;
use crate::executor::{Asked, Executor, GroupTask, Launch, Pad, SMALL};
use crate::graph::{failed_check, has_host_memory};
use crate::groups::Groups;
use crate::isolate;
use crate::lanes::Turn;
use crate::mark::{Mark, Note};
use crate::memory::Memory;
use crate::metrics::Metrics;
use crate::program::Program;
use crate::site::Site;
use crate::spread::{Devices, Place, Sharded};
use crate::target::Target;
use crate::timing::{Front, Timing};
use crate::value::{State, Value};
use crate::work::{Interrupt, Work};
use oxitorch_hlo::TensorType;
use oxitorch_pjrt as pjrt;
use parking_lot::{Condvar, Mutex, MutexGuard};
use smallvec::SmallVec;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

enum Job {
    Launch(Launch),
    Task(GroupTask, Turn),
    Pad(Pad),
    /// Waits until the device has reached it.
    Mark(Note),
    /// Waits for nothing.
    Pass(Note),
    Stop,
}

/// Ops that Python may be ahead of the device.
const MAX_AHEAD: u64 = 8192;
/// Launches that may run at once.
const MAX_IN_FLIGHT: usize = 32;
/// Long ones. The CPU platform computes where Python does: more would only make Ctrl-C wait.
fn max_long_in_flight(platform: pjrt::Platform) -> usize {
    if platform == pjrt::Platform::Cpu { 2 } else { MAX_IN_FLIGHT }
}
/// Those are long whose oldest was launched so long ago. To wait for each short one costs more than it runs.
const LONG: Duration = Duration::from_millis(5);
/// How long the launch thread looks for work before it sleeps, and who waits for it looks for its end: a wake-up costs
/// about as much. On a single core the other one would not run meanwhile.
fn spin() -> Duration {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    if cores > 1 { Duration::from_micros(50) } else { Duration::ZERO }
}

/// Jobs that whoever waits for them runs: more are left to the launch thread, for the sake of Ctrl-C.
const SHORT: u64 = 2;

/// What the one who runs jobs needs.
#[derive(Default)]
struct Runner {
    /// Taken from the queue.
    batch: VecDeque<Job>,
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

/// A launch that the device may not have run yet. It holds none of its values: their memory goes when nobody wants them.
struct Flight {
    number: u64,
    program: Arc<Program>,
    /// The Python line to blame.
    site: Site,
    /// When it was launched.
    start: Instant,
    /// Happens when the device has run it, or all devices have.
    done: Arc<Done>,
    checked: Option<Checked>,
}

/// The outcome of a program's checks.
struct Checked {
    /// The number of the first that failed, or -1.
    first: Buffers,
    /// The Python line of a program of one op, which runs for other lines too.
    site: Option<Site>,
}

impl Checked {
    /// What went wrong; waits for the device.
    fn failure(&self, number: u64, program: &Program) -> Option<Failure> {
        let (error, check) = match failed_check(&self.first) {
            Ok(failed) => {
                let check = program.checks.get(failed?)?;
                (Error::new(check.kind, &check.message), Some(self.site.unwrap_or(check.site)))
            }
            Err(e) => (error::device(&program.name, &e), None),
        };
        Some(Failure { error, launch: number, check })
    }
}

impl Flight {
    /// Whether the device still runs it.
    fn is_running(&self) -> bool {
        self.done.is_running()
    }

    /// Waits until the device has run it; what went wrong.
    fn settle(&self) -> Option<Failure> {
        if let Err(error) = self.done.wait() {
            let error = error::device(&self.program.name, &error).at(self.site);
            return Some(Failure { error, launch: self.number, check: None });
        }
        self.checked.as_ref()?.failure(self.number, &self.program)
    }
}

/// What went wrong, and in which launch: 0 if the values that it should have made say so themselves.
pub(crate) struct Failure {
    pub(crate) error: Error,
    launch: u64,
    /// If a check has failed: the Python line of its op.
    check: Option<Site>,
}

impl Failure {
    /// What the values that it should have made say themselves.
    pub(crate) fn of_values(error: Error) -> Failure {
        Failure { error, launch: 0, check: None }
    }

    /// The error with its line.
    fn placed(self) -> Error {
        match self.check {
            Some(site) => self.error.at(site),
            None => self.error,
        }
    }
}

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

    /// The collectives that are not done, if the mark is behind those.
    fn pending(&self, note: &Note) -> Vec<Arc<Work>> {
        if note.of_collectives { self.groups.pending() } else { Vec::new() }
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

    /// Waits until the buffers of a value are computed.
    pub(crate) fn wait_buffers(
        &self,
        value: &Value,
        buffers: &Buffers,
        interrupt: Interrupt,
    ) -> Result<(), Error> {
        buffers.each().iter().try_for_each(|buffer| self.wait_buffer(value, buffer, interrupt))
    }

    fn wait_buffer(&self, value: &Value, buffer: &pjrt::Buffer, interrupt: Interrupt) -> Result<(), Error> {
        let failed = |e: pjrt::Error| error::device("waiting for a value", &e).at(value.site);
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

    /// Whether the device has run everything queued.
    pub(crate) fn is_idle(&self) -> bool {
        self.done.load(Ordering::Acquire) == self.last()
            && self.in_flight() == 0
            && self.groups.is_idle()
            && self.leaving.is_none()
    }

    /// This thread has waited for the device.
    pub(crate) fn waited(&self, start: Instant) {
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
        while start.elapsed() < self.spin {
            if self.done.load(Ordering::Acquire) >= number {
                return Ok(());
            }
            std::hint::spin_loop();
        }
        self.wait_sleeping(number, interrupt)
    }

    /// Runs a job that was just queued, if nothing is before it and it waits for nothing: that takes less than to wake the
    /// launch thread.
    fn run_or_wake(&self, number: u64) {
        let is_next = self.done.load(Ordering::Acquire) + 1 == number;
        if !is_next || !self.help(number) {
            self.wake_up();
        }
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
            let is_prompt = match runner.batch.front() {
                // Behind as many launches as may run at once it would wait for the oldest, deaf to Ctrl-C.
                Some(Job::Launch(l)) => {
                    let room = self.in_flight() < max_long_in_flight(self.target.platform());
                    room && !self.is_held() && l.program.is_at_hand() && l.agreement.is_none()
                }
                Some(Job::Task(task, _)) => !self.is_held() && self.is_prompt(task),
                Some(Job::Pad(pad)) => !self.is_held() && pad.to.bytes() <= SMALL && self.is_there(pad),
                Some(Job::Mark(_)) => self.in_flight() == 0 && self.leaving.is_none(),
                _ => false,
            };
            if !is_prompt {
                return false;
            }
            self.run_next(&mut runner);
        }
        true
    }

    /// How many launches the device still has to run.
    fn in_flight(&self) -> usize {
        let mut in_flight = self.in_flight.lock();
        if in_flight.is_empty() {
            return 0;
        }
        let (left, over) = in_flight.drain(..).partition(Flight::is_running);
        *in_flight = left;
        let left = in_flight.len();
        drop(in_flight);
        self.settle(over);
        left
    }

    /// The launches that the device still has to run.
    pub(crate) fn running(&self) -> Vec<Arc<Done>> {
        let running = self.in_flight.lock();
        running.iter().filter(|flight| flight.is_running()).map(|flight| flight.done.clone()).collect()
    }

    /// Waits for these launches, and keeps what went wrong for who synchronises.
    fn settle(&self, flights: impl IntoIterator<Item = Flight>) {
        flights.into_iter().filter_map(|flight| flight.settle()).for_each(|failure| self.keep(failure));
    }

    /// Waits until the device has run everything that was launched.
    fn land(&self) {
        let all = std::mem::take(&mut *self.in_flight.lock());
        self.settle(all);
        self.leaving.wait();
    }

    /// A launch is on its way; waits for the oldest if there are too many.
    fn departs(&self, flight: Flight) {
        let mut in_flight = self.in_flight.lock();
        in_flight.push_back(flight);
        let (count, long) = (in_flight.len(), max_long_in_flight(self.target.platform()));
        let is_long = in_flight.front().is_some_and(|oldest| oldest.start.elapsed() > LONG);
        let over = match count {
            _ if count > MAX_IN_FLIGHT => count / 2, // not one by one: each wait is a wake-up
            _ if count > long && is_long => count - long,
            _ => 0,
        };
        let oldest: SmallVec<[Flight; 2]> = in_flight.drain(..over).collect();
        drop(in_flight);
        self.settle(oldest);
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

    /// What was queued last is to free memory. Python may be one such launch ahead, and copy nothing to the device before
    /// it: else what waits for a compiler would hold more and more.
    pub(crate) fn frees(&self) {
        self.freed_before.store(self.freeing.swap(self.last(), Ordering::Relaxed), Ordering::Relaxed);
    }

    /// Waits until what was queued to free memory has freed it.
    pub(crate) fn wait_until_free(&self, interrupt: Interrupt) -> Result<(), Error> {
        let freeing = self.freeing.load(Ordering::Relaxed);
        if freeing > 0 && !self.is_held() { self.wait(freeing, interrupt) } else { Ok(()) }
    }

    /// Waits if the caller is too far ahead of the device: until half of what is queued is done.
    pub(crate) fn throttle(&self, interrupt: Interrupt) -> Result<(), Error> {
        let freed = self.freed_before.load(Ordering::Relaxed);
        if freed > 0 && !self.is_held() {
            self.wait(freed, interrupt)?;
        }
        let done = self.ops_done.load(Ordering::Acquire);
        if self.ops_pushed.load(Ordering::Relaxed).saturating_sub(done) < MAX_AHEAD {
            return Ok(());
        }
        let last = self.last();
        self.wait(last - (last - self.done.load(Ordering::Acquire)) / 2, interrupt)
    }

    /// Takes the first failure that nobody has seen.
    pub(crate) fn take_failure(&self) -> Option<Error> {
        self.failure.lock().take().map(Failure::placed)
    }

    /// The same for who has just called the op.
    pub(crate) fn take_failure_here(&self) -> Option<Error> {
        self.failure.lock().take().map(|failure| failure.error)
    }

    /// Takes a check that has failed in these launches, which the device has run.
    pub(crate) fn take_failed_check(&self, up_to: u64) -> Option<Error> {
        let mut in_flight = self.in_flight.lock();
        let over = in_flight.partition_point(|flight| flight.number <= up_to);
        let over: SmallVec<[Flight; 2]> = in_flight.drain(..over).collect();
        drop(in_flight);
        self.settle(over);
        let is_meant = |f: &mut Failure| f.check.is_some() && f.launch <= up_to;
        self.failure.lock().take_if(is_meant).map(Failure::placed)
    }

    /// Says that the user has seen this failure.
    pub(crate) fn seen(&self, error: &Error) {
        let mut failure = self.failure.lock();
        if failure.as_ref().is_some_and(|f| Arc::ptr_eq(&f.error.message, &error.message)) {
            *failure = None;
        }
    }

    /// Says that the user has seen that the device failed to run this launch.
    pub(crate) fn seen_launch(&self, number: u64) {
        let mut in_flight = self.in_flight.lock();
        let at = in_flight.iter().position(|flight| flight.number == number);
        let flight = at.and_then(|at| in_flight.remove(at));
        drop(in_flight);
        drop(flight.map(|flight| flight.settle())); // that is what was seen
        let mut failure = self.failure.lock();
        if failure.as_ref().is_some_and(|f| f.launch == number) {
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

    fn run_launch(&self, mut launch: Launch, runner: &mut Runner) {
        // Behind others its inputs may not be there: then it has not run when it is launched.
        let inline = launch.is_inline(self.target.platform()) && self.in_flight() == 0;
        let ended = &mut runner.ended;
        let number = self.done.load(Ordering::Relaxed) + 1; // changes where jobs are run only
        let notes = std::mem::take(&mut launch.notes);
        let execute = std::panic::AssertUnwindSafe(|| self.execute(&launch, notes, number, inline, ended));
        let result = std::panic::catch_unwind(execute);
        let result =
            result.unwrap_or_else(|_| Err(Error::runtime("the launch thread panicked; please report this")));
        match result {
            Ok((mut results, flight)) => {
                let done = flight.as_ref().map(|f| &*f.done);
                launch.agreement.iter().for_each(|a| a.begun(&launch.program.name, done));
                let first = results.drain(launch.program.outputs..).next();
                let site = (launch.ops == 1).then_some(launch.first);
                let checked = first.map(|first| Checked { first, site });
                for (place, (value, buffers)) in (0..).zip(launch.outputs.iter().zip(results)) {
                    self.keep_result(value, buffers, launch.program.offloaded.contains(&place));
                }
                match (flight, checked) {
                    (Some(flight), checked) => self.departs(Flight { checked, ..flight }),
                    (None, Some(checked)) => {
                        checked.failure(number, &launch.program).into_iter().for_each(|f| self.keep(f));
                    }
                    (None, None) => {}
                }
            }
            Err(e) => {
                launch.agreement.iter().for_each(|a| self.decline(a, &e, launch.first));
                let isolated = std::panic::AssertUnwindSafe(|| self.isolate(&launch, number, &e));
                if !std::panic::catch_unwind(isolated).unwrap_or(false) {
                    self.fail(&e);
                    launch.outputs.iter().for_each(|v| *v.state.lock() = State::Failed(e.clone()));
                }
            }
        }
    }

    /// A result of a launch. One that is to be kept on the host is left there by its program, or goes there.
    fn keep_result(&self, value: &Arc<Value>, buffers: Buffers, offloaded: bool) {
        if offloaded && has_host_memory(self.target.platform()) {
            *value.state.lock() = State::Ready(buffers);
            return;
        }
        self.memory.charge(self.bytes_there(value, &buffers), &value.charge);
        let leaving = buffers.clone();
        *value.state.lock() = State::Ready(buffers);
        if let (true, Buffers::One(buffer)) = (offloaded, leaving) {
            self.offload(value, buffer);
        }
    }

    /// Copies a value to the host as soon as it is computed, and lets its buffer go then. Nobody waits for it.
    fn offload(&self, value: &Arc<Value>, buffer: Arc<pjrt::Buffer>) {
        let (weak, metrics, own) = (Arc::downgrade(value), self.metrics.clone(), buffer.clone());
        let leaving = self.leaving.begin();
        let then = move |bytes: pjrt::Result<Box<[u8]>>| {
            let _leaving = leaving; // until the value has left
            // What could not be copied stays where it is; why it could not, says who reads it.
            let (Some(value), Ok(bytes)) = (weak.upgrade(), bytes) else { return };
            let mut state = value.state.lock();
            if !matches!(&*state, State::Ready(Buffers::One(b)) if Arc::ptr_eq(b, &own)) {
                return; // a program has overwritten it
            }
            metrics.count(&metrics.offloads);
            metrics.bytes_offloaded.fetch_add(bytes.len() as u64, Ordering::Relaxed);
            let before = std::mem::replace(&mut *state, State::Host(bytes));
            drop(state);
            value.charge.release();
            drop(before);
        };
        let _ = buffer.to_host_then(then); // as above
    }

    /// Keeps the first failure for who synchronises.
    pub(crate) fn fail(&self, e: &Error) {
        self.keep(Failure::of_values(e.clone()));
    }

    fn keep(&self, failure: Failure) {
        let full = failure.error.kind == ErrorKind::OutOfMemory;
        let mut first = self.failure.lock();
        if first.is_none() && full {
            self.memory.count_oom();
        }
        first.get_or_insert(failure);
    }

    /// Runs a launch that failed op by op, so that only what depends on the op at fault fails. False if that is of no
    /// use: there is only one op, or inputs have been given away.
    fn isolate(&self, launch: &Launch, number: u64, e: &Error) -> bool {
        let Some((compiler, task)) = launch.program.task() else { return false };
        if task.graph.sample.is_some() {
            return false; // its ops alone would take what is beyond the size in use, too
        }
        let given = |&i: &u32| matches!(*launch.inputs[i as usize].state.lock(), State::Donated);
        let closed = || self.stopped.load(Ordering::Acquire);
        let full = e.kind == ErrorKind::OutOfMemory && !launch.program.is_broken();
        let ops = task.graph.ops.len();
        let given = || launch.donated().iter().any(given);
        if ops < 2 || full && ops > MOST || closed() || given() {
            return false;
        }
        self.metrics.count(&self.metrics.isolations);
        let inputs = launch.inputs.iter().map(|v| self.buffers(v)).collect();
        let isolated = isolate::run(&compiler, task, inputs, |bytes| match closed() {
            true => Err(Error::runtime("the tpu device is closed")),
            false if self.memory.fits(bytes) => Ok(()),
            false => Err(out_of_memory(self.memory, self.device, bytes)),
        });
        self.metrics.launches.fetch_add(isolated.launches, Ordering::Relaxed);
        let mut whole = true;
        for (place, (value, got)) in (0..).zip(launch.outputs.iter().zip(isolated.outputs)) {
            match got {
                Ok(buffers) => self.keep_result(value, buffers, launch.program.offloaded.contains(&place)),
                Err(e) => {
                    whole = false;
                    self.fail(&e);
                    *value.state.lock() = State::Failed(e);
                }
            }
        }
        if let Some((error, site)) = isolated.check {
            self.keep(Failure { error, launch: number, check: Some(site) });
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
        notes: Vec<(f64, Note)>,
        number: u64,
        inline: bool,
        ended: &mut Option<Instant>,
    ) -> Result<(SmallVec<[Buffers; 2]>, Option<Flight>), Error> {
        if self.stopped.load(Ordering::Acquire) {
            return Err(Error::runtime("the tpu device is closed"));
        }
        let program = &launch.program;
        let (wanted, at_hand) = (ended.take().unwrap_or_else(Instant::now), program.is_at_hand());
        let executable = program.executable().map_err(|e| e.at(launch.first))?;
        let start = if at_hand { wanted } else { Instant::now() };
        self.await_groups(launch)?;
        let mut args: SmallVec<[Buffers; 8]> = SmallVec::new();
        for input in &launch.inputs {
            args.push(self.buffers(input)?);
        }
        self.check_room(launch, &executable)?;
        if let Some(agreement) = &launch.agreement {
            self.agree(agreement, launch)?;
        }
        self.metrics.count(&self.metrics.launches);
        program.ran.launch();
        let mut run = Run::new(self, launch, notes, wanted, start);
        if !inline {
            self.timing.starts(wanted, start, launch.before);
        }
        let launched = launch_one(launch, &executable, self.at, &args, !inline || !program.prompt.is_sure());
        if launched.is_err() {
            run.passing = None;
        }
        self.give(launch, launched.is_ok());
        let over = launched.as_ref().map_or(true, |(_, done)| !done.as_ref().is_some_and(Done::is_running));
        if inline {
            program.prompt.learn(over);
        }
        if inline && over {
            let now = Instant::now();
            let time = self.timing.ran(wanted, start, launch.before, now, run.ends_step);
            run.report(program, &self.metrics, now, time);
            self.timing.pass();
            *ended = Some(now);
        } else {
            if inline {
                self.timing.starts(wanted, start, launch.before);
            }
            let (program, timing) = (program.clone(), self.timing.clone());
            let running = Running { run, program, timing, metrics: self.metrics.clone() };
            if let Ok((_, Some(done))) = &launched
                && !over
            {
                done.then_drop(running);
            }
        }
        let failed = |e| error::device(&program.name, &e).at(launch.site());
        let (results, done) = launched.map_err(failed)?;
        let Some(done) = done else { return Ok((results, None)) };
        if over {
            done.wait().map_err(failed)?;
            return Ok((results, None));
        }
        let flight = Flight {
            number,
            program: program.clone(),
            site: launch.site(),
            start,
            done: Arc::new(done),
            checked: None,
        };
        Ok((results, Some(flight)))
    }

    /// What a value takes on the device: TPUs keep tensors in tiles, and fill those up.
    fn bytes_there(&self, value: &Value, buffers: &Buffers) -> u64 {
        let padded = match self.target.platform() {
            pjrt::Platform::Cpu => None,
            _ => buffers.padded_bytes(), // not every plugin says it
        };
        padded.map_or(value.bytes(), |n| value.bytes().max(n))
    }

    /// An error if the results do not fit.
    fn check_room(&self, launch: &Launch, executable: &pjrt::Executable) -> Result<(), Error> {
        let results = launch.outputs.iter().map(|v| v.bytes()).fold(0, u64::saturating_add);
        let given: u64 = launch.donated().iter().map(|&i| launch.inputs[i as usize].bytes()).sum();
        // Other platforms look themselves whether there is room for temporaries.
        let cpu = self.target.platform() == pjrt::Platform::Cpu;
        let temporary = if cpu { executable.temp_bytes() } else { 0 };
        if self.memory.fits(results.saturating_sub(given).saturating_add(temporary)) {
            return Ok(());
        }
        let wanted = results.saturating_add(temporary);
        Err(out_of_memory(self.memory, self.device, wanted).at(launch.site()))
    }

    /// The launch was accepted, or not: the inputs that it overwrites are gone. A plugin may have taken them and failed
    /// then.
    fn give(&self, launch: &Launch, accepted: bool) {
        let donated = launch.donated();
        if donated.is_empty() {
            return;
        }
        let (mut count, mut bytes) = (0, 0);
        for value in donated.iter().map(|&i| &launch.inputs[i as usize]) {
            if accepted || is_deleted(value) {
                value.donate();
                (count, bytes) = (count + 1, bytes + value.bytes());
            }
        }
        self.metrics.donations.fetch_add(count, Ordering::Relaxed);
        self.metrics.bytes_donated.fetch_add(bytes, Ordering::Relaxed);
    }

    /// The buffers of a value, uploaded if it still is on the host.
    pub(crate) fn buffers(&self, value: &Value) -> Result<Buffers, Error> {
        let mut state = value.state.lock();
        match &*state {
            State::Ready(b) if matches!(b, Buffers::Many(_)) == self.devices.is_some() => Ok(b.clone()),
            State::Ready(_) => Err(Error::runtime(
                "a value of a mesh was used by a program of one device, or the reverse; please report this",
            )),
            State::Failed(e) => Err(e.clone()),
            State::Host(bytes) => {
                let (buffers, len) = (self.put(&value.ty, None, bytes)?, bytes.len() as u64);
                *state = State::Ready(buffers.clone());
                if value.charge.again() {
                    self.metrics.count(&self.metrics.reloads);
                    self.metrics.bytes_reloaded.fetch_add(len, Ordering::Relaxed);
                }
                Ok(buffers)
            }
            State::Pending | State::Coming(_) | State::Donated | State::Absent(_) => Err(Error::runtime(
                "a value was used before it was computed or after it was given away; please report this",
            )),
        }
    }
}

impl Launcher {
    /// Copies row-major bytes to the device, or to each device what it has of them.
    fn put(&self, ty: &TensorType, sharding: Sharded, bytes: &[u8]) -> Result<Buffers, Error> {
        let client = self.target.client()?;
        let buffers = match &self.devices {
            Some(devices) => {
                let local = devices.local(ty, &sharding)?;
                upload_sharded(client, &devices.at, ty, (sharding, &local), bytes)
            }
            None => upload(client, self.at, ty, bytes).map(Buffers::one),
        };
        buffers.map_err(|e| error::device("copy to the device", &e))
    }
}

/// Values that are being copied to the host, counted.
#[derive(Default)]
struct Leaving {
    count: Mutex<usize>,
    none: Condvar,
}

impl Leaving {
    /// One more, until what this gives is dropped.
    fn begin(self: &Arc<Self>) -> OneLeaving {
        *self.count.lock() += 1;
        OneLeaving(self.clone())
    }

    /// Whether there is none.
    fn is_none(&self) -> bool {
        *self.count.lock() == 0
    }

    /// Waits until there is none.
    fn wait(&self) {
        let mut count = self.count.lock();
        self.none.wait_while(&mut count, |n| *n > 0);
    }
}

/// A value that is being copied to the host.
struct OneLeaving(Arc<Leaving>);

impl Drop for OneLeaving {
    fn drop(&mut self) {
        let mut count = self.0.count.lock();
        *count -= 1;
        if *count == 0 {
            self.0.none.notify_all();
        }
    }
}

/// A launch that the device runs.
struct Run {
    device: u16,
    window: u64,
    ops: u64,
    ends_step: bool,
    passing: Option<Passing>,
}

/// Marks in a launch, each with the share of it that comes before.
struct Passing {
    /// When it was launched: its inputs were there.
    began: Instant,
    notes: Vec<(f64, Note)>,
}

impl Passing {
    /// The device has run it until now, for so long.
    fn end(self, now: Instant, time: Duration) {
        let start = now.checked_sub(time).map_or(self.began, |start| start.max(self.began));
        let whole = now.saturating_duration_since(start);
        for (share, note) in self.notes {
            note.reach(start + whole.mul_f64(share), Vec::new());
        }
    }
}

impl Run {
    /// It starts at `start`; it was wanted at `wanted`, when it may not have been compiled.
    fn new(
        launcher: &Launcher,
        launch: &Launch,
        notes: Vec<(f64, Note)>,
        wanted: Instant,
        start: Instant,
    ) -> Run {
        let (device, number) = (launcher.device as u16, launch.window);
        if start.duration_since(wanted) > STALL && launcher.metrics.events.on() {
            let program = launch.program.name.clone();
            launcher.metrics.events.push(wanted, start, What::Stall { device, number, program });
        }
        let passing = (!notes.is_empty()).then(|| Passing { began: Instant::now(), notes });
        Run { device, window: number, ops: launch.ops, ends_step: launch.ends_step, passing }
    }

    /// It has run until now, for so long.
    fn report(&mut self, program: &Program, metrics: &Metrics, now: Instant, time: Duration) {
        program.ran.end(time);
        self.passing.take().into_iter().for_each(|passing| passing.end(now, time));
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

impl Drop for Running {
    fn drop(&mut self) {
        let now = Instant::now();
        let time = self.timing.ends(now, self.run.ends_step);
        self.run.report(&self.program, &self.metrics, now, time);
        self.timing.pass();
    }
}

/// What does not fit as a whole fits no better with all values in between, unless some of it is not needed for the rest:
/// that may be so in windows of so many ops, and compiling more one by one would keep the error from its reader.
const MOST: usize = 64;

/// Shorter waits for a program are no waits for the compiler.
const STALL: Duration = Duration::from_micros(50);

/// The error for so many bytes that do not fit.
pub(crate) fn out_of_memory(memory: &Memory, device: usize, wanted: u64) -> Error {
    let memory = memory.fullest();
    let gib = |b: u64| b as f64 / f64::from(1 << 30);
    let mut text = format!(
        "tpu:{device} out of memory. Tried to allocate {:.2} GiB; the device has {:.2} GiB, of which {:.2} GiB are in use",
        gib(wanted),
        gib(memory.total()),
        gib(memory.bytes().current)
    );
    if memory.limit() < memory.total() {
        text += &format!(
            "; this process may use {:.2} GiB (torch.tpu.set_per_process_memory_fraction)",
            gib(memory.limit())
        );
    }
    Error::new(ErrorKind::OutOfMemory, text)
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

/// Launches a program; with the event of its end, if that is asked for. What may find no solution is waited for and keeps
/// its inputs, so that its window can be run op by op.
fn launch_one(
    launch: &Launch,
    executable: &pjrt::Executable,
    device: usize,
    args: &[Buffers],
    ask: bool,
) -> Result<Launched, pjrt::Error> {
    let spread = launch.program.spread.as_deref();
    if !launch.program.may_fail {
        return execute(executable, spread, device, args, &launch.kept(), ask);
    }
    let kept: SmallVec<[i64; 8]> = (0..args.len() as i64).collect();
    let (results, done) = execute(executable, spread, device, args, &kept, true)?;
    done.iter().try_for_each(Done::wait)?;
    Ok((results, done))
}

/// Whether the plugin has taken a value's memory.
fn is_deleted(value: &Value) -> bool {
    match &*value.state.lock() {
        State::Ready(buffers) => buffers.is_deleted(),
        _ => false,
    }
}
