//! The part of the door for devices, events and memory.

use super::{code, enter, enter_code, guarded};
use crate::abi;
use crate::state::{self, Event, State};
use oxitorch_engine::{Absent, Error, Mark, Refusal, Stream};
use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

pub(super) unsafe extern "C" fn device_count() -> i32 {
    state::device_count().map_or(0, |n| n as i32)
}

pub(super) unsafe extern "C" fn check_device(device: i32, error: *mut abi::Error) -> i32 {
    code(error, guarded(|| state::check_device(device)))
}

pub(super) unsafe extern "C" fn synchronize(device: i32, error: *mut abi::Error) -> i32 {
    enter_code(error, |s| Ok(s.engine.stream(device.max(0) as usize)?.synchronize(crate::sites::here())?))
}

pub(super) unsafe extern "C" fn is_idle(device: i32) -> i32 {
    enter(|s| Ok(i32::from(s.engine.stream(device.max(0) as usize)?.is_idle(crate::sites::here())?)))
        .unwrap_or(1)
}

pub(super) unsafe extern "C" fn event_record(device: i32) -> u64 {
    keep_event(device, |stream| Ok(stream.mark(crate::sites::here())?))
}

pub(super) unsafe extern "C" fn event_note(device: i32, of_collectives: u8) -> u64 {
    let mark = |stream: &Stream| {
        if of_collectives != 0 { stream.note_collectives() } else { stream.note(crate::sites::near()) }
    };
    keep_event(device, |stream| Ok(mark(stream)))
}

/// The number of a new event; 0 if there is none.
fn keep_event(device: i32, mark: impl FnOnce(&Stream) -> Result<Arc<Mark>, Refusal>) -> u64 {
    let id = enter(|s| {
        let device = device.max(0) as usize;
        let mark = mark(s.engine.stream(device)?)?;
        let id = s.next_event.fetch_add(1, Relaxed);
        s.events.lock().insert(id, Event { device, mark });
        Ok(id)
    });
    id.unwrap_or(0)
}

fn event(s: &State, id: u64) -> Result<Event, Refusal> {
    let found = s.events.lock().get(&id).cloned();
    Ok(found.ok_or_else(|| Error::runtime("the event was never recorded"))?)
}

pub(super) unsafe extern "C" fn event_query(id: u64) -> i32 {
    enter(|s| Ok(i32::from(event(s, id)?.mark.time().is_some()))).unwrap_or(1)
}

pub(super) unsafe extern "C" fn event_wait(id: u64, error: *mut abi::Error) -> i32 {
    enter_code(error, |s| {
        let e = event(s, id)?;
        Ok(s.engine.stream(e.device)?.wait(&e.mark)?)
    })
}

pub(super) unsafe extern "C" fn event_elapsed_ms(start: u64, end: u64, error: *mut abi::Error) -> f64 {
    let mut ms = 0.0;
    enter_code(error, |s| {
        let (a, z) = (event(s, start)?, event(s, end)?);
        let not_ready = || Error::runtime("Both events must be completed before calculating elapsed time.");
        let (a, z) = (a.mark.time().ok_or_else(not_ready)?, z.mark.time().ok_or_else(not_ready)?);
        let sign = if z >= a { 1.0 } else { -1.0 };
        ms = sign * z.max(a).duration_since(z.min(a)).as_secs_f64() * 1e3;
        Ok(())
    });
    ms
}

pub(super) unsafe extern "C" fn event_drop(id: u64) {
    // Nothing to do where there is no device any more.
    let _ = enter(|s| {
        s.events.lock().remove(&id);
        Ok(())
    });
}

pub(super) unsafe extern "C" fn memory(device: i32, out: *mut i64) {
    // SAFETY: the shim passes room for eight numbers.
    let out = unsafe { std::slice::from_raw_parts_mut(out, 8) };
    out.fill(0);
    // A device that does not exist uses nothing.
    let _ = enter(|s| {
        let memory = s.engine.stream(device.max(0) as usize)?.memory();
        for (half, r) in out.chunks_mut(4).zip([memory.bytes(), memory.buffers()]) {
            half.copy_from_slice(&[r.current, r.peak, r.allocated, r.freed].map(|x| x as i64));
        }
        Ok(())
    });
}

pub(super) unsafe extern "C" fn memory_info(device: i32, free_bytes: *mut usize, total_bytes: *mut usize) {
    // As above.
    let _ = enter(|s| {
        let memory = s.engine.stream(device.max(0) as usize)?.memory();
        s.engine.absent().into_iter().for_each(Absent::describe);
        // SAFETY: the shim passes places for both.
        unsafe {
            *free_bytes = memory.limit().saturating_sub(memory.bytes().current) as usize;
            *total_bytes = memory.total() as usize;
        }
        Ok(())
    });
}

pub(super) unsafe extern "C" fn reset_peak(device: i32) {
    let _ = enter(|s| {
        s.engine.stream(device.max(0) as usize)?.memory().reset_peak();
        Ok(())
    });
}

pub(super) unsafe extern "C" fn reset_accumulated(device: i32) {
    let _ = enter(|s| {
        s.engine.stream(device.max(0) as usize)?.memory().reset_accumulated();
        Ok(())
    });
}

pub(super) unsafe extern "C" fn interrupted_by() -> *mut c_void {
    state::raised()
}
