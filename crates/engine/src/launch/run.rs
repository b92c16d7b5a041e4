//! Running a launch: its inputs, room for its results, the plugin's call, and what became of it.

use super::Launcher;
use super::flight::{Checked, Failure, Flight};
use super::report::{Run, Running};
use super::thread::Runner;
use crate::buffers::{Buffers, Done, Launched, execute, upload, upload_sharded};
use crate::error::{self, Error, ErrorKind};
use crate::executor::Launch;
use crate::graph::has_host_memory;
use crate::isolate;
use crate::mark::Note;
use crate::memory::Memory;
use crate::spread::Sharded;
use crate::value::{State, Value};
use oxitorch_hlo::TensorType;
use oxitorch_pjrt as pjrt;
use smallvec::SmallVec;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

impl Launcher {
    pub(super) fn run_launch(&self, mut launch: Launch, runner: &mut Runner) {
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
                let checks = launch.checks.take();
                let checked = first.map(|first| Checked { first, checks, site });
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
        if has_host_memory(self.target.platform()) {
            for &place in &program.reloaded {
                self.metrics.count(&self.metrics.reloads);
                self.metrics
                    .bytes_reloaded
                    .fetch_add(launch.inputs[place as usize].bytes(), Ordering::Relaxed);
            }
        }
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
        let donated = launch.donated().iter().filter_map(|&i| args.get(i as usize).cloned()).collect();
        let flight = Flight {
            number,
            program: program.clone(),
            site: launch.site(),
            start,
            done: Arc::new(done),
            checked: None,
            _donated: donated,
        };
        Ok((results, Some(flight)))
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

    /// What a value takes on the device: TPUs keep tensors in tiles, and fill those up.
    pub(super) fn bytes_there(&self, value: &Value, buffers: &Buffers) -> u64 {
        let padded = match self.target.platform() {
            pjrt::Platform::Cpu => None,
            _ => buffers.padded_bytes(), // not every plugin says it
        };
        padded.map_or(value.bytes(), |n| value.bytes().max(n))
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

    /// Copies row-major bytes to the device, or to each device what it has of them.
    pub(super) fn put(&self, ty: &TensorType, sharding: Sharded, bytes: &[u8]) -> Result<Buffers, Error> {
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

/// What does not fit as a whole fits no better with all values in between, unless some of it is not needed for the rest:
/// that may be so in windows of so many ops, and compiling more one by one would keep the error from its reader.
const MOST: usize = 64;

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
