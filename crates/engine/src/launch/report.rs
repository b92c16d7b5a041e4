//! What is told of a launch when the device has run it: its time, and the marks in it.

use super::Launcher;
use crate::events::What;
use crate::executor::Launch;
use crate::mark::Note;
use crate::metrics::Metrics;
use crate::program::Program;
use crate::timing::Timing;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Shorter waits for a program are no waits for the compiler.
const STALL: Duration = Duration::from_micros(50);

/// A launch that the device runs.
pub(super) struct Run {
    pub(super) device: u16,
    /// When it was started.
    pub(super) start: Instant,
    pub(super) window: u64,
    pub(super) ops: u64,
    pub(super) ends_step: bool,
    pub(super) passing: Option<Passing>,
}

/// Marks in a launch, each with the share of it that comes before.
pub(super) struct Passing {
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
    pub(super) fn new(
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
        Run { device, start, window: number, ops: launch.ops, ends_step: launch.ends_step, passing }
    }

    /// It has run until now, for so long.
    pub(super) fn report(&mut self, program: &Program, metrics: &Metrics, now: Instant, time: Duration) {
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
pub(super) struct Running {
    pub(super) run: Run,
    pub(super) program: Arc<Program>,
    pub(super) timing: Arc<Timing>,
    pub(super) metrics: Arc<Metrics>,
}

impl Drop for Running {
    fn drop(&mut self) {
        let now = Instant::now();
        let time = self.timing.ends(self.run.start, now, self.run.ends_step);
        self.run.report(&self.program, &self.metrics, now, time);
        self.timing.pass();
    }
}
