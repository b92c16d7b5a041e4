//! Who waits for the launch thread: for a job, for a value, or since Python is too far ahead.

use super::Launcher;
use super::flight::max_long_in_flight;
use super::thread::Job;
use crate::buffers::Buffers;
use crate::error::{self, Error};
use crate::executor::SMALL;
use crate::value::Value;
use crate::work::{Interrupt, TICK};
use oxitorch_pjrt as pjrt;
use parking_lot::{Condvar, Mutex};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Ops that Python may be ahead of the device.
const MAX_AHEAD: u64 = 8192;

/// Jobs that whoever waits for them runs: more are left to the launch thread, for the sake of Ctrl-C.
const SHORT: u64 = 2;

impl Launcher {
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

    /// Runs what is queued up to job `number`, if that is little, at hand, and nobody else does; whether it is done.
    pub(super) fn help(&self, number: u64) -> bool {
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

    /// Runs a job that was just queued, if nothing is before it and it waits for nothing: that takes less than to wake the
    /// launch thread.
    pub(super) fn run_or_wake(&self, number: u64) {
        let is_next = self.done.load(Ordering::Acquire) + 1 == number;
        if !is_next || !self.help(number) {
            self.wake_up();
        }
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
        let (ended, waiter) = Ended::new();
        event.on_ready(move |_| drop(ended)).map_err(failed)?;
        waiter.wait(interrupt)?; // an error in it is reported by the copy that follows
        self.waited(start);
        Ok(())
    }

    /// Waits until the device has run what was launched. The plugin wakes this thread up itself: by way of the launch
    /// thread it would be two.
    pub(crate) fn wait_for_device(&self, interrupt: Interrupt) -> Result<(), Error> {
        self.wait(self.last(), interrupt)?;
        for done in self.running() {
            let start = Instant::now();
            let (ended, waiter) = Ended::new();
            done.then_drop(ended);
            waiter.wait(interrupt)?;
            self.waited(start);
        }
        Ok(())
    }

    /// This thread has waited for the device.
    pub(crate) fn waited(&self, start: Instant) {
        self.front.waited(start);
        self.metrics.events.waited(start);
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
        if self.is_held() {
            return Ok(()); // nothing gets done before Python comes to let it go on
        }
        let freed = self.freed_before.load(Ordering::Relaxed);
        if freed > 0 {
            self.wait(freed, interrupt)?;
        }
        let done = self.ops_done.load(Ordering::Acquire);
        if self.ops_pushed.load(Ordering::Relaxed).saturating_sub(done) < MAX_AHEAD {
            return Ok(());
        }
        let last = self.last();
        self.wait(last - (last - self.done.load(Ordering::Acquire)) / 2, interrupt)
    }
}

/// Dropped when it has happened.
struct Ended(Arc<(Mutex<bool>, Condvar)>);

/// Who waits for that.
struct Waiter(Arc<(Mutex<bool>, Condvar)>);

impl Ended {
    fn new() -> (Ended, Waiter) {
        let both = Arc::new((Mutex::new(false), Condvar::new()));
        (Ended(both.clone()), Waiter(both))
    }
}

impl Drop for Ended {
    fn drop(&mut self) {
        *self.0.0.lock() = true;
        self.0.1.notify_all();
    }
}

impl Waiter {
    fn wait(&self, interrupt: Interrupt) -> Result<(), Error> {
        let mut ended = self.0.0.lock();
        while !*ended {
            if self.0.1.wait_for(&mut ended, TICK).timed_out() {
                drop(ended);
                interrupt()?;
                ended = self.0.0.lock();
            }
        }
        Ok(())
    }
}
