//! Values that leave for the host when they are computed.

use super::Launcher;
use crate::buffers::Buffers;
use crate::graph::has_host_memory;
use crate::value::{State, Value};
use oxitorch_pjrt as pjrt;
use parking_lot::{Condvar, Mutex};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Values that are being copied to the host, counted.
#[derive(Default)]
pub(super) struct Leaving {
    count: Mutex<usize>,
    none: Condvar,
}

impl Leaving {
    /// One more, until what this gives is dropped.
    pub(super) fn begin(self: &Arc<Self>) -> OneLeaving {
        *self.count.lock() += 1;
        OneLeaving(self.clone())
    }

    /// Whether there is none.
    pub(super) fn is_none(&self) -> bool {
        *self.count.lock() == 0
    }

    /// Waits until there is none.
    pub(super) fn wait(&self) {
        let mut count = self.count.lock();
        self.none.wait_while(&mut count, |n| *n > 0);
    }
}

/// A value that is being copied to the host.
pub(super) struct OneLeaving(Arc<Leaving>);

impl Drop for OneLeaving {
    fn drop(&mut self) {
        let mut count = self.0.count.lock();
        *count -= 1;
        if *count == 0 {
            self.0.none.notify_all();
        }
    }
}

impl Launcher {
    /// A result of a launch. One that is to be kept on the host is left there by its program, or goes there.
    pub(super) fn keep_result(&self, value: &Arc<Value>, buffers: Buffers, offloaded: bool) {
        if offloaded && has_host_memory(self.target.platform()) {
            self.metrics.count(&self.metrics.offloads);
            self.metrics.bytes_offloaded.fetch_add(value.bytes(), Ordering::Relaxed);
            *value.state.lock() = State::Ready(buffers);
            return;
        }
        self.memory.charge(self.bytes_there(value, &buffers), &value.charge);
        let leaving = buffers.clone();
        *value.state.lock() = State::Ready(buffers);
        if let (true, Buffers::One(buffer)) = (offloaded, leaving) {
            self.offload(value, buffer);
        }
    }

    /// Copies a value to the host as soon as it is computed, and lets its buffer go then. Nobody waits for it.
    pub(super) fn offload(&self, value: &Arc<Value>, buffer: Arc<pjrt::Buffer>) {
        let (weak, metrics, own) = (Arc::downgrade(value), self.metrics.clone(), buffer.clone());
        let leaving = self.leaving.begin();
        let then = move |bytes: pjrt::Result<Box<[u8]>>| {
            let _leaving = leaving; // until the value has left
            // What could not be copied stays where it is; why it could not, says who reads it.
            let (Some(value), Ok(bytes)) = (weak.upgrade(), bytes) else { return };
            let mut state = value.state.lock();
            if !matches!(&*state, State::Ready(Buffers::One(b)) if Arc::ptr_eq(b, &own)) {
                return; // a program has overwritten it
            }
            metrics.count(&metrics.offloads);
            metrics.bytes_offloaded.fetch_add(bytes.len() as u64, Ordering::Relaxed);
            let before = std::mem::replace(&mut *state, State::Host(bytes));
            drop(state);
            value.charge.release();
            drop(before);
        };
        let _ = buffer.to_host_then(then); // as above
    }
}
