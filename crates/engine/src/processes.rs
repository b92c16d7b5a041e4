//! The stream's method for collectives of several processes, of which this process has a part.
//!
//! Such a task is recorded like an op and is no wait: it ends the window, has its place in the stream, and is handed to a
//! thread of its process group when its turn comes. Where it cuts depends on the ops alone, as all cuts do, so processes
//! that do the same have the same windows.

use crate::config::Mode;
use crate::ending::Ending;
use crate::error::{Error, Refusal, Result};
use crate::events;
use crate::executor::{Agreement, GroupTask, Old, Written};
use crate::site::Site;
use crate::stream::Stream;
use crate::tensor::TensorRef;
use crate::threads::Whose;
use crate::value::{Held, Value};
use crate::window::Window;
use crate::work::{About, Lane, Task, Work};
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

/// Which collective it is, in words: with what it writes, or reads if this process only sends.
fn which(about: &About, reads: &[TensorRef<'_>], writes: &[Target<'_>]) -> String {
    let written = writes.iter().map(|target| &target.tensor);
    let only_reads = writes.is_empty();
    let named = written.chain(reads.iter().filter(|_| only_reads));
    let types: Vec<TensorType> = named.filter(|t| t.numel() > 0).filter_map(|t| t.ty().ok()).collect();
    about.which(types.iter())
}

impl Stream {
    /// Records a task that reads and writes tensors of this device. Errors of the task are those of the values that it
    /// writes, and of the work.
    pub fn task(
        &self,
        task: Box<dyn Task>,
        lane: Lane,
        reads: &[TensorRef<'_>],
        writes: &[Target<'_>],
        site: Site,
        mode: Mode,
    ) -> Result<Arc<Work>, Refusal> {
        events::here(site);
        self.lock(site).leave("a collective")?;
        let (work, turn) = (Arc::new(Work::new(task.about(), lane)), self.launcher.groups.turn(lane));
        {
            let mut w = self.lock(site);
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
            let which = || which(work.about(), reads, writes);
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
            let task = GroupTask { task, work: work.clone(), reads, writes: written, site };
            self.executor.task(task, turn);
        }
        self.after_op(mode)?;
        Ok(work)
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
        (task, lane): (Box<dyn Task>, Lane),
        site: Site,
        mode: Mode,
    ) -> Result<Arc<Work>, Refusal> {
        events::here(site);
        let agreement = Arc::new(Agreement::new(task, self.launcher.groups.turn(lane)));
        let work = agreement.work.clone();
        {
            let mut w = self.lock(site);
            let wanted = out.ty()?;
            // Before it is launched: what was there may be overwritten.
            let bind = |w: &mut Window, result: &Arc<Value>| {
                if result.ty == wanted {
                    return w.write(out.device()?, out, result.clone());
                }
                let got = &result.ty;
                let words = format!("{}: the result is {got}, and {wanted} is to hold it", what.name());
                Err(Error::runtime(words).into())
            };
            let launched =
                self.launch_collective(&mut w, (what, groups), x, Some(agreement.clone()), site, bind);
            drop(w);
            if let Err(Refusal::Error(e)) = &launched {
                self.launcher.decline(&agreement, e, site); // the others are on their way
            }
            launched?;
        }
        self.after_op(mode)?;
        Ok(work)
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
        let bytes = ty.bytes().max(0) as u64;
        if !self.memory().has(bytes) {
            return Err(self.out_of_memory(bytes).into());
        }
        let value = w.pending(ty, site);
        w.write(target.tensor.device()?, &target.tensor, value.clone())?;
        let old = match old.map(|held| held.value().clone()) {
            None => Old::Nothing,
            // Ops of other threads that are not launched yet may want it.
            Some(old) if old.is_visible() || w.is_known(&old) => Old::Copied(old),
            Some(old) => Old::Taken(old),
        };
        Ok(Some(Written { value, old }))
    }
}
