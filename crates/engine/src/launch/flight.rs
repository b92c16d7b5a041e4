//! Launches that the device has not run yet, and what went wrong in them.

use super::Launcher;
use crate::buffers::{Buffers, Done};
use crate::error::{self, Error, ErrorKind};
use crate::graph::{Check, failed_check};
use crate::program::Program;
use crate::site::Site;
use oxitorch_pjrt as pjrt;
use smallvec::SmallVec;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Launches that may run at once.
const MAX_IN_FLIGHT: usize = 32;

/// Long ones. The CPU platform computes where Python does: more would only make Ctrl-C wait.
pub(super) fn max_long_in_flight(platform: pjrt::Platform) -> usize {
    if platform == pjrt::Platform::Cpu { 2 } else { MAX_IN_FLIGHT }
}

/// Those are long whose oldest was launched so long ago. To wait for each short one costs more than it runs.
const LONG: Duration = Duration::from_millis(5);

/// A launch that the device may not have run yet. It holds none of its values: their memory goes when nobody wants them.
/// Those that were donated to it have none any more, and XLA's CPU client lets nobody destroy such a buffer before the
/// program has run.
pub(super) struct Flight {
    pub(super) number: u64,
    pub(super) program: Arc<Program>,
    /// The Python line to blame.
    pub(super) site: Site,
    /// When it was launched.
    pub(super) start: Instant,
    /// Happens when the device has run it, or all devices have.
    pub(super) done: Arc<Done>,
    pub(super) checked: Option<Checked>,
    /// What was donated to it.
    pub(super) _donated: SmallVec<[Buffers; 2]>,
}

/// The outcome of a program's checks.
pub(super) struct Checked {
    /// The number of the first that failed, or -1.
    pub(super) first: Buffers,
    /// What it checked, if other messages or lines than those of the program.
    pub(super) checks: Option<Arc<[Check]>>,
    /// The Python line of a program of one op, which runs for other lines too.
    pub(super) site: Option<Site>,
}

impl Checked {
    /// What went wrong; waits for the device.
    pub(super) fn failure(&self, number: u64, program: &Program) -> Option<Failure> {
        let (error, check) = match failed_check(&self.first) {
            Ok(failed) => {
                let check = self.checks.as_deref().unwrap_or(&program.checks).get(failed?)?;
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
    pub(super) launch: u64,
    /// If a check has failed: the Python line of its op.
    pub(super) check: Option<Site>,
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

impl Launcher {
    /// How many launches the device still has to run.
    pub(super) fn in_flight(&self) -> usize {
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

    /// A launch is on its way; waits for the oldest if there are too many.
    pub(super) fn departs(&self, flight: Flight) {
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

    /// Waits for these launches, and keeps what went wrong for who synchronises.
    pub(super) fn settle(&self, flights: impl IntoIterator<Item = Flight>) {
        flights.into_iter().filter_map(|flight| flight.settle()).for_each(|failure| self.keep(failure));
    }

    /// Waits until the device has run everything that was launched.
    pub(super) fn land(&self) {
        let all = std::mem::take(&mut *self.in_flight.lock());
        self.settle(all);
        self.leaving.wait();
    }

    /// Keeps the first failure for who synchronises.
    pub(crate) fn fail(&self, e: &Error) {
        self.keep(Failure::of_values(e.clone()));
    }

    pub(super) fn keep(&self, failure: Failure) {
        let full = failure.error.kind == ErrorKind::OutOfMemory;
        let mut first = self.failure.lock();
        if first.is_none() && full {
            self.memory.count_oom();
        }
        first.get_or_insert(failure);
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
}
