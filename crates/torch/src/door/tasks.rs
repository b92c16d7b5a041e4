//! Tasks of process groups: what c10d's collectives of this process do with memory, as functions of the shim.

use super::{enter, enter_code, report, tensor};
use crate::abi::{self, Memory, OK, PENDING, Shim, Tensor, header, slice};
use oxitorch_engine::{
    About, Collective, Error, Group, Reduction, Refusal, Site, Task, TaskTarget, TensorRef, Work,
};
use smallvec::SmallVec;
use std::ffi::{CStr, CString, c_char, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::{null, null_mut};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A function of the shim.
struct Called {
    shim: &'static Shim,
    context: *mut c_void,
    about: About,
}

// SAFETY: the shim says that it may be called and dropped from any thread.
unsafe impl Send for Called {}

impl Called {
    /// # Safety
    /// A task whose name stays for ever, whose group is there, and whose context becomes this value's.
    unsafe fn of(shim: &'static Shim, task: &abi::Task) -> Called {
        // SAFETY: by the caller's promise; the group stays the shim's.
        let (name, group) = unsafe {
            let group = task.group.cast::<Group>();
            Arc::increment_strong_count(group);
            (CStr::from_ptr::<'static>(task.name), Arc::from_raw(group))
        };
        let name = name.to_str().unwrap_or_default();
        Called { shim, context: task.context, about: About { name, group, number: 0 } }
    }
}

impl Task for Called {
    fn about(&self) -> About {
        self.about.clone()
    }

    fn begin(&mut self, number: u64) {
        self.about.number = number;
        // SAFETY: the shim's context, which nobody else has.
        unsafe { (self.shim.task_begin)(self.context, number) }
    }

    fn again(&self) -> Option<Box<dyn Task>> {
        // SAFETY: as above; what the shim gives is this value's alone.
        let context = unsafe { (self.shim.task_again)(self.context) };
        let about = || About { number: 0, ..self.about.clone() };
        (!context.is_null())
            .then(|| Box::new(Called { shim: self.shim, context, about: about() }) as Box<dyn Task>)
    }

    fn run(&mut self, reads: &[&[u8]], writes: &mut [&mut [u8]], site: Site) -> Result<(), String> {
        self.call(None, reads, writes, site)
    }

    fn decline(&mut self, why: &str, site: Site) {
        let why = CString::new(why.replace('\0', " ")).unwrap_or_default();
        // That the ranks do not do the same is what it was to say.
        let _ = self.call(Some(&why), &[], &mut [], site);
    }
}

impl Called {
    fn call(
        &self,
        declined: Option<&CStr>,
        reads: &[&[u8]],
        writes: &mut [&mut [u8]],
        site: Site,
    ) -> Result<(), String> {
        let read = |b: &&[u8]| Memory { bytes: b.as_ptr().cast_mut().cast(), len: b.len() };
        let reads: Vec<Memory> = reads.iter().map(read).collect();
        let write = |b: &mut &mut [u8]| Memory { bytes: b.as_mut_ptr().cast(), len: b.len() };
        let writes: Vec<Memory> = writes.iter_mut().map(write).collect();
        let mut error = abi::Error { kind: 0, message: null() };
        // SAFETY: the shim's context; the memory is borrowed for the call, which only reads `reads`.
        let code = unsafe {
            (self.shim.task_run)(
                self.context,
                declined.map_or(null(), CStr::as_ptr),
                reads.as_ptr(),
                reads.len() as u32,
                writes.as_ptr(),
                writes.len() as u32,
                line,
                (&raw const site).cast(),
                &mut error,
            )
        };
        if code == OK {
            return Ok(());
        }
        // SAFETY: what failed says why, in a text that lives until this thread's next call.
        Err(unsafe { CStr::from_ptr(error.message) }.to_string_lossy().into_owned())
    }
}

/// Writes the Python line of a site.
unsafe extern "C" fn line(site: *const c_void, text: *mut c_char, size: usize) {
    // SAFETY: `run` passes a site, and the shim room for so many bytes.
    let (site, out) =
        unsafe { (*site.cast::<Site>(), std::slice::from_raw_parts_mut(text.cast::<u8>(), size)) };
    let words = catch_unwind(|| site.describe()).ok().flatten();
    let words = words.unwrap_or_else(|| "a line that is not known".to_owned());
    let Some(most) = size.checked_sub(1) else { return };
    let len = words.len().min(most);
    out[..len].copy_from_slice(&words.as_bytes()[..len]);
    out[len] = 0;
}

impl Drop for Called {
    fn drop(&mut self) {
        // SAFETY: the shim's context, which nobody else has.
        unsafe { (self.shim.task_drop)(self.context) }
    }
}

pub(super) unsafe extern "C" fn group(name: *const c_char, ranks: *const u64, nranks: u32) -> *mut c_void {
    // SAFETY: a C string, and so many numbers.
    let (name, ranks) = unsafe { (CStr::from_ptr(name), slice(ranks, nranks as usize)) };
    let group = Group::new(name.to_string_lossy().into_owned(), ranks.into());
    Arc::into_raw(Arc::new(group)).cast_mut().cast()
}

pub(super) unsafe extern "C" fn drop_group(group: *mut c_void) {
    // SAFETY: what `group` gave, dropped once.
    drop(unsafe { Arc::from_raw(group.cast::<Group>()) });
}

pub(super) unsafe extern "C" fn group_number(group: *const c_void, lane: u64) -> u64 {
    // SAFETY: what `group` gave and nobody has dropped.
    let group = unsafe { &*group.cast::<Group>() };
    catch_unwind(AssertUnwindSafe(|| group.number(lane))).unwrap_or(0)
}

pub(super) unsafe extern "C" fn task(
    task: *const abi::Task,
    device: i32,
    reads: *const Tensor,
    nreads: u32,
    writes: *const Tensor,
    nwrites: u32,
    in_place: u8,
    error: *mut abi::Error,
) -> *mut c_void {
    let recorded = enter(|s| {
        // SAFETY: a task with a name and a group, which is ours from here on, and so many described tensors.
        let (called, lane, reads, writes) = unsafe {
            let target = |t| TaskTarget { tensor: tensor(t), in_place: in_place != 0 };
            let reads: SmallVec<[TensorRef<'_>; 2]> =
                slice(reads, nreads as usize).iter().map(|t| tensor(t)).collect();
            let writes: SmallVec<[TaskTarget<'_>; 2]> =
                slice(writes, nwrites as usize).iter().map(target).collect();
            (Called::of(s.shim, &*task), (*task).lane, reads, writes)
        };
        let stream = s.engine.stream(device.max(0) as usize)?;
        let (site, mode) = (crate::sites::near(), s.engine.switches().mode);
        stream.task(Box::new(called), lane, &reads, &writes, site, mode)
    });
    // SAFETY: the shim passes an error to fill.
    given(recorded, unsafe { &mut *error })
}

/// What the shim gets for what was recorded.
fn given(recorded: Result<Arc<Work>, Refusal>, error: &mut abi::Error) -> *mut c_void {
    match recorded {
        Ok(work) => Arc::into_raw(work).cast_mut().cast(),
        Err(refusal) => {
            let e = match refusal {
                Refusal::Error(e) => e,
                Refusal::Fallback(why) => Error::runtime(why),
            };
            report(error, &e);
            null_mut()
        }
    }
}

pub(super) unsafe extern "C" fn are_programs(devices: *const i32, ndevices: u32) -> i32 {
    // SAFETY: so many numbers.
    let ids = unsafe { slice(devices, ndevices as usize) };
    catch_unwind(|| i32::from(crate::state::are_programs(ids))).unwrap_or(0)
}

pub(super) unsafe extern "C" fn collective(
    task: *const abi::Task,
    what: *const abi::Collective,
    input: *const Tensor,
    output: *const Tensor,
    error: *mut abi::Error,
) -> *mut c_void {
    let recorded = enter(|s| {
        // SAFETY: a task with a name and a group, which is ours from here on, a collective with so many devices, two described tensors.
        let (called, lane, what, ids, x, out) = unsafe {
            let (task, what) = (&*task, &*what);
            let called = Called::of(s.shim, task);
            let ids = slice(what.devices, what.ndevices as usize).to_vec();
            (called, task.lane, kind(what), ids, tensor(&*input), tensor(&*output))
        };
        // SAFETY: as above.
        let device = unsafe { (*input).device_index };
        let what = what.ok_or_else(|| Error::runtime("an unknown collective; please report this"))?;
        let stream = s.engine.stream(device.max(0) as usize)?;
        let (site, mode) = (crate::sites::near(), s.engine.switches().mode);
        stream.collective_into(&what, &[ids], &x, &out, (Box::new(called), lane), site, mode)
    });
    // SAFETY: the shim passes an error to fill.
    given(recorded, unsafe { &mut *error })
}

/// What the numbers say.
fn kind(what: &abi::Collective) -> Option<Collective> {
    let reduction = || {
        Some(match what.reduction {
            header::OXI_SUM => Reduction::Sum,
            header::OXI_PRODUCT => Reduction::Product,
            header::OXI_MIN => Reduction::Min,
            header::OXI_MAX => Reduction::Max,
            header::OXI_AND => Reduction::And,
            header::OXI_OR => Reduction::Or,
            header::OXI_XOR => Reduction::Xor,
            _ => return None,
        })
    };
    Some(match what.kind {
        header::OXI_ALL_REDUCE => Collective::AllReduce(reduction()?),
        header::OXI_ALL_GATHER => Collective::AllGather,
        header::OXI_REDUCE_SCATTER => Collective::ReduceScatter(reduction()?),
        header::OXI_ALL_TO_ALL => Collective::AllToAll,
        header::OXI_BROADCAST => Collective::Broadcast(u32::try_from(what.root).ok()?),
        _ => return None,
    })
}

pub(super) unsafe extern "C" fn outcome(
    work: *const c_void,
    device: i32,
    wait_ms: i64,
    error: *mut abi::Error,
) -> i32 {
    // SAFETY: what `task` gave and nobody has dropped.
    let work = unsafe { &*work.cast::<Work>() };
    let mut pending = false;
    let code = enter_code(error, |s| {
        let until = || u64::try_from(wait_ms).ok().map(|ms| Instant::now() + Duration::from_millis(ms));
        let outcome = match wait_ms {
            0 => work.outcome(),
            _ => s.engine.stream(device.max(0) as usize)?.wait_for(work, until())?,
        };
        pending = outcome.is_none();
        Ok(outcome.unwrap_or(Ok(()))?)
    });
    if pending && code == OK { PENDING } else { code }
}

pub(super) unsafe extern "C" fn number(work: *const c_void) -> u64 {
    // SAFETY: what `task` gave and nobody has dropped.
    unsafe { &*work.cast::<Work>() }.about().number
}

pub(super) unsafe extern "C" fn drop_work(work: *mut c_void) {
    // SAFETY: what `task` gave, dropped once.
    drop(unsafe { Arc::from_raw(work.cast::<Work>()) });
}
