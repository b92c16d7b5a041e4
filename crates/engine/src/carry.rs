//! The launcher's part in tasks of process groups: it hands them over in their turn, and holds back what needs them.
//!
//! A task reads and writes the memory of the device where it is, if that is the host's. What was launched before and still
//! runs may read what is written, so the task waits for it; a launch waits for tasks whose results it takes, or that read
//! what it overwrites. All other launches go on meanwhile. What a task takes of one before it on its lane it finds there
//! when it is its turn: nobody waits for that.

use crate::buffers::{Buffers, Done, element, upload};
use crate::error::{self, Error, Result};
use crate::executor::{GroupTask, Launch, Old, Written};
use crate::groups::Begun;
use crate::lanes::Turn;
use crate::launch::{Failure, Launcher, out_of_memory};
use crate::memory::Memory;
use crate::site::Site;
use crate::underway::Underway;
use crate::value::{State, Value};
use crate::work::{Interrupt, Task, Work};
use oxitorch_pjrt as pjrt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// What a task has of the device.
struct Lent {
    client: Arc<pjrt::Client>,
    device: usize,
    memory: &'static Memory,
    reads: Vec<Option<Part>>,
    /// What is written over.
    writes: Vec<Option<Part>>,
    /// What may still read what it writes.
    before: Vec<Arc<Done>>,
}

/// A value that a task takes.
enum Part {
    There(Buffers),
    /// A task before it on its lane makes it.
    Coming(Arc<Value>),
}

impl Part {
    /// In the lane's thread: the tasks before are done.
    fn buffers(self) -> Result<Buffers> {
        let value = match self {
            Part::There(buffers) => return Ok(buffers),
            Part::Coming(value) => value,
        };
        match &*value.state.lock() {
            State::Ready(buffers) => Ok(buffers.clone()),
            State::Failed(e) => Err(e.clone()),
            _ => Err(Error::runtime("a collective found nothing of the one before it; please report this")),
        }
    }
}

impl Launcher {
    /// Waits for the task that makes a value, if one does.
    pub(crate) fn wait_coming(&self, value: &Value, interrupt: Interrupt) -> Result<()> {
        let Some(work) = coming(value) else { return Ok(()) };
        let start = Instant::now();
        let waited = work.wait(None, interrupt);
        self.metrics.waited_for(work.about().name, start.elapsed());
        self.waited(start);
        waited.map(drop)
    }

    /// Before a launch: waits for the tasks whose results it takes, and for those that read what it overwrites.
    pub(crate) fn await_groups(&self, launch: &Launch) -> Result<()> {
        if self.groups.is_idle() {
            return Ok(());
        }
        launch.inputs.iter().try_for_each(|value| self.await_value(value))?;
        let given = launch.donated().iter().map(|&i| &launch.inputs[i as usize]);
        given.flat_map(|value| self.groups.readers(value, None)).try_for_each(|work| self.await_work(&work))
    }

    pub(crate) fn await_value(&self, value: &Value) -> Result<()> {
        coming(value).map_or(Ok(()), |work| self.await_work(&work))
    }

    /// In the launch thread: whether the task succeeds is said by its values.
    pub(crate) fn await_work(&self, work: &Work) -> Result<()> {
        let closed = || match self.stopped.load(Ordering::Acquire) {
            true => Err(Error::runtime("the tpu device is closed")),
            false => Ok(()),
        };
        let start = Instant::now();
        let waited = work.wait(None, closed);
        self.metrics.waited_for(work.about().name, start.elapsed());
        waited.map(drop)
    }

    /// Whether a task can be handed to its lane without waiting or copying.
    pub(crate) fn is_prompt(&self, recorded: &GroupTask) -> bool {
        let lane = recorded.work.lane();
        let is_there = |value: &Arc<Value>| match &*value.state.lock() {
            State::Coming(work) => work.lane() == lane,
            State::Ready(_) | State::Failed(_) => true,
            _ => false,
        };
        let is_free = |old: &Old| match old {
            Old::Nothing => true,
            Old::Copied(old) => is_there(old),
            Old::Taken(old) => is_there(old) && self.groups.readers(old, Some(lane)).is_empty(),
        };
        recorded.reads.iter().flatten().all(is_there)
            && recorded.writes.iter().flatten().all(|w| is_free(&w.old))
    }

    /// Hands a task to its lane.
    pub(crate) fn begin(&self, recorded: GroupTask, turn: Turn) {
        let memory = match self.lend(&recorded) {
            Ok(memory) => memory,
            Err(e) => {
                let e = e.at(recorded.site);
                self.fail(&e);
                return recorded.fail(&e);
            }
        };
        let work = recorded.work.clone();
        recorded.results().for_each(|v| *v.state.lock() = State::Coming(work.clone()));
        let reads = recorded.reads.iter().flatten().cloned().collect();
        self.groups.begin(Begun { work: work.clone(), reads });
        let results: Vec<Arc<Value>> = recorded.results().cloned().collect();
        let (groups, failure) = (self.groups.clone(), self.failure.clone());
        let (metrics, place) = (self.metrics.clone(), (self.device, work.lane()));
        let end = move |outcome: Result<()>| {
            if let Err(e) = &outcome {
                failure.lock().get_or_insert_with(|| Failure::of_values(e.clone()));
                fail(&results, e);
            }
            groups.end(&work);
            work.finish(outcome);
        };
        let unsent = end.clone();
        let job = move || {
            let (site, about) = (recorded.site, recorded.work.about());
            let reads = recorded.reads.iter().flatten();
            let underway = Underway::begin(&metrics, about, place, site, reads, recorded.results());
            let done = catch_unwind(AssertUnwindSafe(|| memory.run(recorded)));
            let done = done.unwrap_or_else(|_| Err(Error::runtime("a task panicked; please report this")));
            underway.end(done.is_err());
            end(done.map_err(|e| e.at(site)));
        };
        if let Err(e) = turn.send(Box::new(job)) {
            unsent(Err(Error::runtime(format!("no thread for a process group: {e}"))));
        }
    }

    /// Takes the memory that a task needs, and charges for its results.
    fn lend(&self, recorded: &GroupTask) -> Result<Lent> {
        if self.stopped.load(Ordering::Acquire) {
            return Err(Error::runtime("the tpu device is closed"));
        }
        let lane = recorded.work.lane();
        let read = |value: &Arc<Value>| match coming(value) {
            Some(work) if work.lane() == lane => Ok(Part::Coming(value.clone())),
            work => {
                work.map_or(Ok(()), |work| self.await_work(&work))?;
                self.buffers(value).map(Part::There)
            }
        };
        let reads = recorded.reads.iter().map(|v| v.as_ref().map(read).transpose()).collect::<Result<_>>()?;
        let mut writes = Vec::with_capacity(recorded.writes.len());
        let mut new = 0;
        for written in &recorded.writes {
            writes.push(match written.as_ref().map(|w| (&w.old, w.value.bytes())) {
                None => None,
                Some((Old::Nothing, bytes)) => {
                    new += bytes;
                    None
                }
                Some((Old::Copied(old), bytes)) => {
                    new += bytes;
                    Some(read(old)?)
                }
                Some((Old::Taken(old), _)) => {
                    let readers = self.groups.readers(old, Some(lane));
                    readers.iter().try_for_each(|work| self.await_work(work))?;
                    Some(read(old)?)
                }
            });
        }
        if !self.memory.fits(new) {
            return Err(out_of_memory(self.memory, self.device, new));
        }
        let client = self.target.client()?.clone();
        let fresh = |w: &&Written| !matches!(w.old, Old::Taken(_));
        for written in recorded.writes.iter().flatten().filter(fresh) {
            self.memory.charge(written.value.bytes(), &written.value.charge);
        }
        let before = self.running();
        Ok(Lent { client, device: self.at, memory: self.memory, reads, writes, before })
    }
}

/// The task that makes a value, if one does.
fn coming(value: &Value) -> Option<Arc<Work>> {
    match &*value.state.lock() {
        State::Coming(work) => Some(work.clone()),
        _ => None,
    }
}

/// Nobody will make these values.
pub(crate) fn fail(values: &[Arc<Value>], e: &Error) {
    for value in values {
        value.charge.release();
        *value.state.lock() = State::Failed(e.clone());
    }
}

impl Lent {
    /// Does the task in the device's memory, and gives the values what it wrote.
    fn run(self, mut recorded: GroupTask) -> Result<()> {
        for done in &self.before {
            let _ = done.wait(); // what went wrong there is said there
        }
        let name = recorded.work.about().name;
        let failed_here = |e: pjrt::Error| error::device(name, &e);
        let there = |part: Option<Part>| -> Result<Option<Buffers>> {
            let buffers = part.map(Part::buffers).transpose()?;
            buffers.iter().try_for_each(Buffers::wait).map_err(failed_here)?;
            Ok(buffers)
        };
        let reads = self.reads.into_iter().map(there).collect::<Result<Vec<_>>>()?;
        let (client, device) = (self.client, self.device);
        let mut targets = Vec::with_capacity(recorded.writes.len());
        for (written, part) in recorded.writes.iter().zip(self.writes) {
            let Some(written) = written else {
                targets.push(None);
                continue;
            };
            let old = there(part)?;
            // Not before: tasks before it on the lane may find there what they read.
            if let Old::Taken(taken) = &written.old {
                taken.donate();
                self.memory.charge(written.value.bytes(), &written.value.charge);
            }
            targets.push(Some(target(&client, device, written, old).map_err(failed_here)?));
        }
        run_in_place(&mut *recorded.task, &reads, &mut targets, recorded.site, failed_here)?;
        for (written, buffer) in recorded.writes.iter().zip(targets) {
            if let (Some(written), Some(buffer)) = (written, buffer) {
                *written.value.state.lock() = State::Ready(Buffers::one(buffer));
            }
        }
        Ok(())
    }
}

/// The buffer that a task writes to.
fn target(
    client: &Arc<pjrt::Client>,
    device: usize,
    written: &Written,
    old: Option<Buffers>,
) -> pjrt::Result<pjrt::Buffer> {
    let ty = &written.value.ty;
    let new = |bytes: &[u8]| upload(client, device, ty, bytes);
    let old = match old {
        Some(Buffers::One(old)) => old,
        // The task writes all of it.
        _ => match client.buffer_filled(element(ty.dtype), &ty.shape, &client.devices()[device], |_| {})? {
            Some(buffer) => return Ok(buffer),
            None => return new(&vec![0; written.value.whole_bytes() as usize]),
        },
    };
    let copied = |old: &pjrt::Buffer| match old.look(new)? {
        Some(copy) => copy,
        None => {
            let mut bytes = vec![0; old.size_bytes()];
            old.to_host(&mut bytes)?;
            new(&bytes)
        }
    };
    match written.old {
        Old::Taken(_) => Arc::try_unwrap(old).or_else(|shared| copied(&shared)),
        _ => copied(&old),
    }
}

/// Runs a task on the memory of buffers, or on copies of it if that is not the host's.
fn run_in_place(
    task: &mut dyn Task,
    reads: &[Option<Buffers>],
    targets: &mut [Option<pjrt::Buffer>],
    site: Site,
    failed_here: impl Fn(pjrt::Error) -> Error,
) -> Result<()> {
    let sources = reads.iter().map(|b| b.as_ref().and_then(Buffers::whole));
    let pinned = sources.map(|b| b.map(pjrt::Buffer::bytes).transpose()).collect::<pjrt::Result<Vec<_>>>();
    let pinned = pinned.map_err(&failed_here)?;
    let mut open = Vec::with_capacity(targets.len());
    for target in targets {
        open.push(target.as_mut().map(pjrt::Buffer::bytes_mut).transpose().map_err(&failed_here)?);
    }
    let reads: Vec<&[u8]> = pinned.iter().map(|b| b.as_deref().unwrap_or(&[])).collect();
    let mut writes: Vec<&mut [u8]> = open.iter_mut().map(|b| b.as_deref_mut().unwrap_or(&mut [])).collect();
    task.run(&reads, &mut writes, site).map_err(Error::runtime)?;
    drop(writes);
    open.into_iter().flatten().try_for_each(pjrt::BytesMut::write_back).map_err(failed_here)
}
