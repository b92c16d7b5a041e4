//! What bounds a device: where its time goes, kept per launch.
//!
//! At every moment a device runs a program, waits for the compiler, or has nothing to do. What it had nothing to do for
//! is known when the next launch comes: the front end was busy copying data to it or had waited for that data, it had
//! waited for the device instead of running ahead of it, or it simply took that long to record.

use crate::mark::Note;
use crate::work::Work;
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Where time went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Parts {
    /// The device ran programs.
    pub device: Duration,
    /// The next program was not compiled.
    pub compile: Duration,
    /// The device had nothing to do while data was copied to it, or the front end waited for data to copy.
    pub input: Duration,
    /// The device had nothing to do, and would have had, had nobody waited for it before.
    pub sync: Duration,
    /// The device had nothing to do: recording, and all other Python.
    pub python: Duration,
}

impl Parts {
    /// Each part with its name.
    pub fn named(&self) -> [(&'static str, Duration); 5] {
        [
            ("python", self.python),
            ("compile", self.compile),
            ("input", self.input),
            ("sync", self.sync),
            ("device", self.device),
        ]
    }

    /// All of it.
    pub fn total(&self) -> Duration {
        self.named().iter().map(|(_, time)| *time).sum()
    }

    fn add(&mut self, other: Parts) {
        self.device += other.device;
        self.compile += other.compile;
        self.input += other.input;
        self.sync += other.sync;
        self.python += other.python;
    }
}

/// The split of a device's time.
#[derive(Clone, Copy, Debug, Default)]
pub struct Split {
    /// From the first launch to the end of the last, or since the last reset.
    pub all: Parts,
    /// Of the last step; none before the first step ended. A step ends when the device has run what an optimizer's step
    /// queued.
    pub step: Option<Parts>,
    /// Steps that ended.
    pub steps: u64,
}

/// What the front end did before a launch, since the launch before.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Before {
    /// It waited for the device.
    pub(crate) waited: Duration,
    /// It copied data to the device, or waited for data to copy.
    pub(crate) input: Duration,
}

/// What the front end does between two launches.
#[derive(Debug, Default)]
pub(crate) struct Front {
    waited_ns: AtomicU64,
    input_ns: AtomicU64,
    /// When an optimizer's step was queued, if nothing was recorded since.
    stepped: Mutex<Option<Instant>>,
    /// Whether that may be set.
    has_stepped: AtomicBool,
}

impl Front {
    /// Waited for the device since `start`.
    pub(crate) fn waited(&self, start: Instant) {
        self.waited_ns.fetch_add(start.elapsed().as_nanos() as u64, Relaxed);
    }

    /// Copied to the device since `start`; `first` if that is what the step began with.
    pub(crate) fn copied(&self, start: Instant, first: bool) {
        let mut ns = start.elapsed().as_nanos() as u64;
        if let Some(stepped) = self.stepped.lock().take()
            && first
        {
            let since = start.saturating_duration_since(stepped).as_nanos() as u64;
            ns += since.saturating_sub(self.waited_ns.load(Relaxed));
        }
        self.input_ns.fetch_add(ns, Relaxed);
    }

    /// Forgets it.
    pub(crate) fn reset(&self) {
        self.launches(false);
    }

    /// A launch is queued; what was before it.
    pub(crate) fn launches(&self, ends_step: bool) -> Before {
        // Most launches find nothing here, and in strict mode every op is one.
        if ends_step || self.has_stepped.load(Relaxed) {
            *self.stepped.lock() = ends_step.then(Instant::now);
            self.has_stepped.store(ends_step, Relaxed);
        }
        let take = |n: &AtomicU64| match n.load(Relaxed) {
            0 => Duration::ZERO,
            _ => Duration::from_nanos(n.swap(0, Relaxed)),
        };
        Before { waited: take(&self.waited_ns), input: take(&self.input_ns) }
    }
}

/// How late a report may be.
const LATE: Duration = Duration::from_secs(1);

/// The accounts of a device.
#[derive(Debug, Default)]
pub(crate) struct Timing(Mutex<Accounts>);

#[derive(Debug, Default)]
struct Accounts {
    split: Split,
    /// Of the step that has not ended.
    step: Parts,
    /// Programs that run.
    running: u32,
    /// Programs that have run.
    ended: u64,
    /// Marks behind programs that run, each with how many have to have ended.
    behind: Vec<(u64, Note, Vec<Arc<Work>>)>,
    /// Until when everything is accounted for.
    until: Option<Instant>,
}

impl Accounts {
    fn add(&mut self, parts: Parts) {
        self.split.all.add(parts);
        self.step.add(parts);
    }

    fn starts(&mut self, wanted: Instant, start: Instant, before: Before) {
        self.running += 1;
        if self.running > 1 {
            return; // the device has been busy
        }
        let until = self.until.replace(start).unwrap_or(wanted);
        if until == start {
            return;
        }
        let mut idle = wanted.saturating_duration_since(until);
        let mut take = |most: Duration| {
            let part = idle.min(most);
            idle -= part;
            part
        };
        let (input, sync) = (take(before.input), take(before.waited));
        let compile = start.saturating_duration_since(wanted.max(until));
        self.add(Parts { compile, input, sync, python: idle, device: Duration::ZERO });
    }

    fn ends(&mut self, start: Instant, at: Instant, ends_step: bool) -> Duration {
        self.running = self.running.saturating_sub(1);
        self.ended += 1;
        let device = self.until.map_or(Duration::ZERO, |until| at.saturating_duration_since(until));
        self.until = self.until.max(Some(at));
        self.split.all.device += device;
        self.step.device += device;
        if ends_step {
            self.split.step = Some(std::mem::take(&mut self.step));
            self.split.steps += 1;
        }
        // Threads of the plugin tell of ends, and one may be late: then its time is accounted for already, and what came
        // before the next program is not that one's time.
        let own = at.saturating_duration_since(start);
        if device.is_zero() { own } else { device.min(own) }
    }
}

impl Timing {
    /// A program starts at `start`; it was wanted at `wanted`, and between them the compiler was waited for.
    pub(crate) fn starts(&self, wanted: Instant, start: Instant, before: Before) {
        self.0.lock().starts(wanted, start, before);
    }

    /// A program that was started at `start` has run; how long the device was at it.
    pub(crate) fn ends(&self, start: Instant, at: Instant, ends_step: bool) -> Duration {
        self.0.lock().ends(start, at, ends_step)
    }

    /// A program started and has run.
    pub(crate) fn ran(
        &self,
        wanted: Instant,
        start: Instant,
        before: Before,
        at: Instant,
        ends_step: bool,
    ) -> Duration {
        let mut accounts = self.0.lock();
        accounts.starts(wanted, start, before);
        accounts.ends(start, at, ends_step)
    }

    /// A mark is reached when what runs has ended, and these tasks.
    pub(crate) fn follow(&self, note: Note, works: Vec<Arc<Work>>) {
        let mut accounts = self.0.lock();
        match u64::from(accounts.running) {
            0 => note.reach(Instant::now(), works),
            running => {
                let wanted = accounts.ended + running;
                accounts.behind.push((wanted, note, works));
            }
        }
    }

    /// A program has ended: marks behind it may be reached.
    pub(crate) fn pass(&self) {
        let mut accounts = self.0.lock();
        let ended = accounts.ended;
        let reached = accounts.behind.extract_if(.., |(wanted, ..)| *wanted <= ended);
        reached.for_each(|(_, note, works)| note.reach(Instant::now(), works));
    }

    /// Waits for programs whose results are there: threads of the plugin report their end, and may be late.
    pub(crate) fn rest(&self) {
        let start = Instant::now();
        while self.0.lock().running > 0 && start.elapsed() < LATE {
            std::thread::sleep(Duration::from_micros(20));
        }
    }

    /// The split so far.
    pub(crate) fn split(&self) -> Split {
        self.0.lock().split
    }

    /// Starts again from zero; the step that is under way counts from here.
    pub(crate) fn reset(&self) {
        let mut a = self.0.lock();
        a.split = Split::default();
        a.step = Parts::default();
        if a.running == 0 && a.until.is_some() {
            a.until = Some(Instant::now());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    #[test]
    fn idle_time_is_python_s_unless_something_explains_it() {
        let t = Timing::default();
        let zero = Instant::now();
        let at = |n| zero + ms(n);
        let before = |waited, input| Before { waited: ms(waited), input: ms(input) };
        // The first program is compiled for 50 ms, and runs for 10.
        t.starts(at(0), at(50), before(0, 0));
        assert_eq!(t.ends(at(50), at(60), false), ms(10));
        // Idle for 30 ms: 5 of copies, and the front end had waited for the device for 8 of the 10 before.
        t.starts(at(90), at(90), before(8, 5));
        // A second program is queued behind it: nothing is idle.
        t.starts(at(91), at(92), before(100, 100));
        assert_eq!(t.ends(at(90), at(100), false), ms(10));
        assert_eq!(t.ends(at(92), at(115), true), ms(15));
        let split = t.split();
        let parts = Parts { python: ms(17), compile: ms(50), input: ms(5), sync: ms(8), device: ms(35) };
        assert_eq!((split.all, split.step, split.steps), (parts, Some(parts), 1));
        assert_eq!(parts.total(), ms(115));
        // The next step: waits cannot explain more than there is idle time.
        t.starts(at(118), at(118), before(20, 0));
        t.ends(at(118), at(120), true);
        assert_eq!(t.split().step, Some(Parts { sync: ms(3), device: ms(2), ..Parts::default() }));
    }

    #[test]
    fn a_program_takes_no_time_before_it_is_started() {
        let t = Timing::default();
        let zero = Instant::now();
        let at = |n| zero + ms(n);
        t.starts(at(0), at(0), Before::default());
        t.starts(at(20), at(20), Before::default());
        // The first ended at 15, and the thread that says so is late.
        assert_eq!(t.ends(at(20), at(30), false), ms(10));
        assert_eq!(t.ends(at(0), at(15), false), ms(15));
        assert_eq!(t.split().all.device, ms(30));
    }

    #[test]
    fn waiting_for_data_is_input_only_right_after_a_step() {
        let front = Front::default();
        front.launches(true);
        std::thread::sleep(ms(20));
        front.copied(Instant::now(), true);
        assert!(front.launches(false).input >= ms(20));
        std::thread::sleep(ms(20));
        front.copied(Instant::now(), true);
        assert!(front.launches(true).input < ms(20));
        // Something was recorded in between.
        std::thread::sleep(ms(20));
        front.copied(Instant::now(), false);
        assert!(front.launches(false).input < ms(20));
    }
}
