//! What is written to remote stores while the process goes on.

use crate::lease::Lease;
use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// An entry that is on its way, and the lease that is given back when it is there.
pub(crate) struct Upload {
    /// The tier's number, the file's name, the content.
    pub(crate) entry: Option<(usize, String, Arc<[u8]>)>,
    pub(crate) lease: Option<Lease>,
}

impl Upload {
    fn bytes(&self) -> usize {
        self.entry.as_ref().map_or(0, |(_, _, content)| content.len())
    }
}

/// Uploads that wait have this many bytes at most: a network that is slower than the compiler must not fill the memory.
const WAITING_BYTES: usize = 512 << 20;

/// Uploads in the order in which they came, and whether there is a thread for them.
#[derive(Default)]
pub(crate) struct Uploads {
    state: Mutex<State>,
    ended: Condvar,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Upload>,
    bytes: usize,
    running: bool,
}

impl Uploads {
    /// Queues an upload; true if the caller has to start a thread that calls [`Uploads::work`]. Gives it back if too much
    /// waits already.
    pub(crate) fn push(&self, upload: Upload) -> Result<bool, Upload> {
        let mut state = self.state.lock();
        if state.bytes + upload.bytes() > WAITING_BYTES {
            return Err(upload);
        }
        state.bytes += upload.bytes();
        state.queue.push_back(upload);
        Ok(!std::mem::replace(&mut state.running, true))
    }

    /// Does one after another until none is left.
    pub(crate) fn work(&self, mut put: impl FnMut(Upload)) {
        loop {
            let mut state = self.state.lock();
            let Some(upload) = state.queue.pop_front() else {
                state.running = false;
                self.ended.notify_all();
                return;
            };
            drop(state);
            let bytes = upload.bytes();
            put(upload);
            self.state.lock().bytes -= bytes;
        }
    }

    /// Waits until none is left, not longer than this.
    pub(crate) fn wait(&self, limit: Duration) {
        let until = Instant::now() + limit;
        let mut state = self.state.lock();
        while state.running && !self.ended.wait_until(&mut state, until).timed_out() {}
    }
}
