//! The stream's method for collectives of several processes, of which this process has a part.
//!
//! Such a task is recorded like an op and is no wait: it ends the window, has its place in the stream, and is handed to a
//! thread of its process group when its turn comes. Where it cuts depends on the ops alone, as all cuts do, so processes
//! that do the same have the same windows.
//!
//! A function that is recorded once and launched again (`steps.rs`) notes them, and does them once more in each call.

use crate::config::Mode;
use crate::ending::Ending;
use crate::error::{Error, Refusal, Result};
use crate::events;
use crate::executor::{Agreement, GroupTask, Old, Written};
use crate::lanes::Turn;
use crate::site::Site;
use crate::stream::Stream;
use crate::tensor::TensorRef;
use crate::threads::Whose;
use crate::value::{Held, State, Value};
use crate::window::Window;
use crate::work::{Lane, Task, Work, next};
use oxitorch_capture::Collective;
use oxitorch_hlo::TensorType;
use smallvec::SmallVec;
use std::sync::Arc;

/// A tensor that a task writes.
#[derive(Debug)]
pub struct Target<'a> {
    /// The tensor.
    pub tensor: TensorRef<'a>,
    /// Whether the task finds the old value there; else it finds anything, and writes every element.
    pub in_place: bool,
}

/// The types by which people know it: of what it writes, or reads if this process only sends.
pub(crate) fn named(reads: &[TensorRef<'_>], writes: &[Target<'_>]) -> SmallVec<[TensorType; 2]> {
    let written = writes.iter().map(|target| &target.tensor);
    let only_reads = writes.is_empty();
    let named = written.chain(reads.iter().filter(|_| only_reads));
    named.filter(|t| t.numel() > 0).filter_map(|t| t.ty().ok()).collect()
}

/// Why nothing is known of what a collective of a function gives that was run to see what it records.
const NEVER: &str = "a value of a run of a function of torch.tpu.jit of which nothing is computed";

impl Stream {
    /// Records a task that reads and writes tensors of this device. Errors of the task are those of the values that it
    /// writes, and of the work.
    pub fn task(
        &self,
        mut task: Box<dyn Task>,
        lane: Lane,
        reads: &[TensorRef<'_>],
        writes: &[Target<'_>],
        site: Site,
        mode: Mode,
    ) -> Result<Arc<Work>, Refusal> {
        events::here(site);
        let group = task.about().group;
        let work = {
            // Number, turn and place in the queue have one order.
            let mut numbers = group.numbers.lock();
            let mut w = self.lock(site);
            w.meets_collective()?;
            let held = |t: &TensorRef<'_>, w: &mut Window| -> Result<Option<Held>, Refusal> {
                if t.numel() == 0 { Ok(None) } else { Ok(Some(Held::new(w.read(t.device()?, t)?))) }
            };
            let mut read: SmallVec<[Option<Held>; 2]> = SmallVec::new();
            for tensor in reads {
                read.push(held(tensor, &mut w)?);
            }
            let mut old: SmallVec<[Option<Held>; 2]> = SmallVec::new();
            for target in writes {
                old.push(if target.in_place { held(&target.tensor, &mut w)? } else { None });
            }
            w.note_task((&*task, lane), (reads, &read), (writes, &old))?;
            if w.is_dry() {
                return self.pretend(&mut w, (&*task, lane), writes.iter().map(|target| &target.tensor));
            }
            task.begin(next(&mut numbers, lane));
            let (work, turn) = (Arc::new(Work::new(task.about(), lane)), self.launcher.groups.turn(lane));
            let which = || work.about().which(named(reads, writes).iter());
            let ending = Ending::collective(&which);
            self.flush(&mut w, ending)?;
            for value in read.iter().chain(&old).flatten() {
                if w.is_recorded(value.value()) {
                    self.flush_for(&mut w, &Whose::Value(value.value()), ending)?; // another thread's
                }
            }
            let reads = read.iter().map(|held| held.as_ref().map(|h| h.value().clone())).collect();
            let mut written = SmallVec::new();
            for (target, old) in writes.iter().zip(old) {
                written.push(self.written(&mut w, target, old, site)?);
            }
            self.queue_task((task, work.clone(), turn), reads, written, site);
            work
        };
        self.after_op(mode)?;
        Ok(work)
    }

    /// Queues a task in its place of the stream.
    pub(crate) fn queue_task(
        &self,
        (task, work, turn): (Box<dyn Task>, Arc<Work>, Turn),
        reads: SmallVec<[Option<Arc<Value>>; 1]>,
        writes: SmallVec<[Option<Written>; 1]>,
        site: Site,
    ) {
        self.executor.task(GroupTask { task, work, reads, writes, site }, turn);
    }

    /// A collective of a function of which nothing is to be done: what it writes will never be there.
    fn pretend<'t, 'a: 't>(
        &self,
        w: &mut Window,
        (task, lane): (&dyn Task, Lane),
        writes: impl Iterator<Item = &'t TensorRef<'a>>,
    ) -> Result<Arc<Work>, Refusal> {
        for tensor in writes.filter(|tensor| tensor.numel() > 0) {
            let value = w.pending(tensor.ty()?, w.site);
            *value.state.lock() = State::Failed(Error::runtime(NEVER));
            w.note_result(&value);
            w.write(tensor.device()?, tensor, value)?;
        }
        let work = Work::new(task.about(), lane);
        work.finish(Ok(()));
        Ok(Arc::new(work))
    }

    /// Records a collective of devices of several processes, of which this one is one, as a program of theirs. It has its
    /// place in the stream and waits for nobody here; before it is launched, `task` compares on its lane what the processes
    /// are about to do. Of the groups each device is a member of one.
    #[expect(clippy::too_many_arguments, reason = "what it is, of what, by whom, and how it is recorded")]
    pub fn collective_into(
        &self,
        what: &Collective,
        groups: &[Vec<i32>],
        x: &TensorRef<'_>,
        out: &TensorRef<'_>,
        (mut task, lane): (Box<dyn Task>, Lane),
        site: Site,
        mode: Mode,
    ) -> Result<Arc<Work>, Refusal> {
        events::here(site);
        let group = task.about().group;
        let agreement = {
            let mut numbers = group.numbers.lock();
            let mut w = self.lock(site);
            w.meets_collective()?;
            let exchange = self.exchange(&mut w, what, groups, x);
            if let Ok(exchange) = &exchange {
                w.note_program((&*task, lane), exchange);
            }
            if w.is_dry() {
                exchange?;
                return self.pretend(&mut w, (&*task, lane), std::iter::once(out));
            }
            task.begin(next(&mut numbers, lane));
            let agreement = Arc::new(Agreement::new(task, self.launcher.groups.turn(lane)));
            let launched = exchange.and_then(|exchange| {
                let wanted = out.ty()?;
                let result = self.exchanged(&exchange, site);
                // Before it is launched: what was there may be overwritten.
                let bind = |w: &mut Window| {
                    w.note_result(&result);
                    if result.ty == wanted {
                        return w.write(out.device()?, out, result.clone());
                    }
                    let got = &result.ty;
                    let words = format!("{}: the result is {got}, and {wanted} is to hold it", what.name());
                    Err(Error::runtime(words).into())
                };
                self.launch_exchange(&mut w, exchange, &result, Some(agreement.clone()), site, bind)
            });
            drop(w);
            if let Err(Refusal::Error(e)) = &launched {
                self.launcher.decline(&agreement, e, site); // the others are on their way
            }
            launched?;
            agreement
        };
        self.after_op(mode)?;
        Ok(agreement.work.clone())
    }

    /// Makes a tensor show what a task is going to write.
    fn written(
        &self,
        w: &mut Window,
        target: &Target<'_>,
        old: Option<Held>,
        site: Site,
    ) -> Result<Option<Written>, Refusal> {
        let ty = target.tensor.ty()?;
        if target.tensor.numel() == 0 {
            return Ok(None);
        }
        let value = self.to_write(w, ty, site)?;
        w.note_result(&value);
        w.write(target.tensor.device()?, &target.tensor, value.clone())?;
        let old = old.map(|held| held.value().clone());
        Ok(Some(over(w, value, old)))
    }

    /// A value that a task is going to write.
    pub(crate) fn to_write(&self, w: &mut Window, ty: TensorType, site: Site) -> Result<Arc<Value>> {
        let bytes = ty.bytes().max(0) as u64;
        if !self.memory().has(bytes) {
            return Err(self.out_of_memory(bytes));
        }
        Ok(w.pending(ty, site))
    }
}

/// How a task writes a value over another one, if it finds that there.
pub(crate) fn over(w: &Window, value: Arc<Value>, old: Option<Arc<Value>>) -> Written {
    let old = match old {
        None => Old::Nothing,
        // Ops of other threads that are not launched yet may want it.
        Some(old) if old.is_visible() || w.is_known(&old) => Old::Copied(old),
        Some(old) => Old::Taken(old),
    };
    Written { value, old }
}
