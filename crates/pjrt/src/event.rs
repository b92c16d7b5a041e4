//! Events: waiting for a device.

use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;
use std::sync::Arc;

use oxitorch_pjrt_sys as sys;
use sys::Args;

use crate::api::{Api, call, destroy, slot};
use crate::client::Client;
use crate::error::Result;

/// Something that a device will have done: a value computed, a copy finished.
pub struct Event {
    api: Api,
    /// `None` for an event that the plugin did not make because nothing is outstanding.
    ptr: Option<NonNull<sys::PJRT_Event>>,
    /// Keeps the client alive that will signal the event.
    _client: Option<Arc<Client>>,
}

// SAFETY: PJRT events may be awaited, asked and destroyed from any thread.
unsafe impl Send for Event {}
// SAFETY: as above; no method changes the Rust value.
unsafe impl Sync for Event {}

impl Event {
    /// Takes ownership of an event that may be null.
    pub(crate) fn from_raw(api: Api, ptr: *mut sys::PJRT_Event, client: Option<Arc<Client>>) -> Event {
        Event { api, ptr: NonNull::new(ptr), _client: client }
    }

    /// Blocks until it has happened; an error is what went wrong on the device.
    pub fn wait(&self) -> Result<()> {
        let Some(ptr) = self.ptr else { return Ok(()) };
        let mut args = Args::<sys::PJRT_Event_Await_Args>::new();
        args.event = ptr.as_ptr();
        // SAFETY: the event is live.
        unsafe { call!(&self.api, PJRT_Event_Await, args) }
    }

    /// Whether it has happened (well or badly).
    pub fn is_ready(&self) -> Result<bool> {
        let Some(ptr) = self.ptr else { return Ok(true) };
        let mut args = Args::<sys::PJRT_Event_IsReady_Args>::new();
        args.event = ptr.as_ptr();
        // SAFETY: the event is live.
        unsafe { call!(&self.api, PJRT_Event_IsReady, args) }?;
        Ok(args.is_ready)
    }

    /// Calls `then` once it has happened, on a thread of the plugin's or, if it has happened already, on this one.
    /// `then` must not wait for the device. A panic in it is caught and counted as nothing.
    pub fn on_ready(&self, then: impl FnOnce(Result<()>) + Send + 'static) -> Result<()> {
        let Some(ptr) = self.ptr else {
            then(Ok(()));
            return Ok(());
        };
        let state = Box::new(Callback { api: self.api, then: Box::new(then) });
        let mut args = Args::<sys::PJRT_Event_OnReady_Args>::new();
        args.event = ptr.as_ptr();
        args.callback = Some(run_callback);
        let f = slot!(&self.api, PJRT_Event_OnReady)?;
        let state = Box::into_raw(state);
        args.user_arg = state.cast();
        // SAFETY: the event is live; the plugin calls the callback exactly once with the box, which then owns it again.
        let error = unsafe { f(args.as_mut_ptr()) };
        if error.is_null() {
            return Ok(());
        }
        // SAFETY: on failure the callback is never called, so the box is still ours.
        drop(unsafe { Box::from_raw(state) });
        Err(self.api.take_error("PJRT_Event_OnReady", error))
    }
}

struct Callback {
    api: Api,
    then: Box<dyn FnOnce(Result<()>) + Send>,
}

unsafe extern "C" fn run_callback(error: *mut sys::PJRT_Error, user_arg: *mut c_void) {
    // SAFETY: `user_arg` is the box that `on_ready` leaked, given back exactly once.
    let callback = unsafe { Box::from_raw(user_arg.cast::<Callback>()) };
    let Callback { api, then } = *callback;
    let result = if error.is_null() { Ok(()) } else { Err(api.take_error("PJRT_Event_OnReady", error)) };
    // A panic must not cross into C; there is nobody here to hand it to, the panic hook has printed it.
    let _ = catch_unwind(AssertUnwindSafe(|| then(result)));
}

impl Drop for Event {
    fn drop(&mut self) {
        let Some(ptr) = self.ptr else { return };
        let mut args = Args::<sys::PJRT_Event_Destroy_Args>::new();
        args.event = ptr.as_ptr();
        // SAFETY: the event is ours and not used after this.
        unsafe { destroy!(&self.api, PJRT_Event_Destroy, args) };
    }
}
