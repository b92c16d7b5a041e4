//! What happened when: spans of time, for timelines and profilers.
//!
//! Everything that others have to call is here. While nobody listens a call is one load.

use crate::ending::Ended;
use crate::inst::Inst;
use crate::shared::Shared;
use crate::site::Site;
use crate::work::{About, Lane};
use parking_lot::Mutex;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::{Instant, SystemTime};

/// Spans that are kept at most, and ops in all of them.
const MAX_SPANS: usize = 1 << 20;
const MAX_OPS: usize = 1 << 22;

/// Something that took time.
#[derive(Clone, Debug)]
pub(crate) struct Span {
    /// What it was.
    pub(crate) what: What,
    /// From when.
    pub(crate) start: Instant,
    /// Until when.
    pub(crate) end: Instant,
    /// The operating system's number of the thread that reported it.
    pub(crate) thread: i32,
}

/// An op that was recorded.
#[derive(Clone, Debug)]
pub(crate) struct Stamp {
    pub(crate) inst: Shared<Inst>,
    pub(crate) site: Site,
    pub(crate) at: Instant,
}

/// What took time.
#[derive(Clone, Debug)]
pub(crate) enum What {
    /// Recording a window, from its first op until its launch was queued; it was full at `cut`.
    Window {
        device: u16,
        number: u64,
        program: String,
        is_new: bool,
        ended: Ended,
        ops: Vec<Stamp>,
        cut: Instant,
        /// See [`set_running`](crate::set_running).
        launched_in: u64,
    },
    /// Waiting for the device.
    Wait { site: Site },
    /// A copy to the device.
    ToDevice { device: u16, bytes: usize, site: Site },
    /// A copy from the device.
    ToHost { device: u16, bytes: usize, site: Site },
    /// The compiler.
    Compile { program: String },
    /// Loading what another process had compiled.
    Load { program: String },
    /// The next launch waited for its program to be compiled.
    Stall { device: u16, number: u64, program: String },
    /// This process's part of a collective of several.
    Collective { device: u16, lane: Lane, about: About, call: String, bytes: u64, site: Site },
    /// The device ran a program.
    Execute { device: u16, number: u64, program: String, ops: u64, donated: u64 },
}

#[derive(Debug, Default)]
struct Log {
    spans: Vec<Span>,
    ops: usize,
    dropped: u64,
    threads: BTreeMap<i32, String>,
}

/// The spans, kept while somebody listens.
#[derive(Debug, Default)]
pub(crate) struct Events {
    listeners: AtomicU32,
    windows: AtomicU64,
    log: Mutex<Log>,
}

/// A listener: what was logged before it came is not its own.
#[derive(Debug)]
pub struct Listener {
    first: usize,
    /// When it came.
    start: Instant,
    /// The same by the clock on the wall.
    wall: SystemTime,
}

/// What a listener heard.
#[derive(Debug)]
pub struct Heard {
    /// In the order in which they ended.
    pub(crate) spans: Vec<Span>,
    /// Spans that were not kept because there were too many.
    pub dropped: u64,
    /// Names of threads by their numbers.
    pub(crate) threads: BTreeMap<i32, String>,
    /// When listening began.
    pub start: Instant,
    /// The same by the clock on the wall.
    pub wall: SystemTime,
    /// When it ended.
    pub end: Instant,
}

thread_local! {
    static THREAD: Cell<i32> = const { Cell::new(0) };
    /// The line of the call that may wait.
    static HERE: Cell<Site> = const { Cell::new(Site(0)) };
}

/// The operating system's number and name of this thread.
fn this_thread() -> (i32, String) {
    // `/proc/thread-self` is a link to `<process>/task/<thread>`; without it, all threads are one.
    let link = std::fs::read_link("/proc/thread-self").unwrap_or_default();
    let number = link.file_name().and_then(|n| n.to_str()).and_then(|n| n.parse().ok()).unwrap_or(1);
    let name = std::fs::read_to_string("/proc/thread-self/comm").unwrap_or_default();
    (number, name.trim().to_owned())
}

/// The line of the call that this thread makes.
pub(crate) fn current() -> Site {
    HERE.get()
}

/// This thread makes a call of this line, which may wait or copy.
pub(crate) fn here(site: Site) {
    HERE.set(site);
}

impl Events {
    /// Whether somebody listens.
    pub(crate) fn on(&self) -> bool {
        self.listeners.load(Relaxed) > 0
    }

    /// The number of the next window; 0 while nobody listens.
    pub(crate) fn window(&self) -> u64 {
        if self.on() { self.windows.fetch_add(1, Relaxed) + 1 } else { 0 }
    }

    /// Something took the time from `start` until now.
    pub(crate) fn add(&self, start: Instant, what: impl FnOnce() -> What) {
        if self.on() {
            self.push(start, Instant::now(), what());
        }
    }

    /// This thread waited for the device from `start` until now.
    pub(crate) fn waited(&self, start: Instant) {
        self.add(start, || What::Wait { site: HERE.get() });
    }

    /// This thread copied so many bytes to a device.
    pub(crate) fn to_device(&self, start: Instant, device: u16, bytes: usize) {
        self.add(start, || What::ToDevice { device, bytes, site: HERE.get() });
    }

    /// This thread copied so many bytes from a device.
    pub(crate) fn to_host(&self, start: Instant, device: u16, bytes: usize) {
        self.add(start, || What::ToHost { device, bytes, site: HERE.get() });
    }

    #[cold]
    pub(crate) fn push(&self, start: Instant, end: Instant, mut what: What) {
        let mut thread = THREAD.get();
        if thread == 0 {
            let (number, name) = this_thread();
            thread = number;
            THREAD.set(number);
            self.log.lock().threads.insert(number, name);
        }
        let mut log = self.log.lock();
        if let What::Window { ops, .. } = &mut what {
            if log.ops + ops.len() > MAX_OPS {
                ops.clear();
            }
            log.ops += ops.len();
        }
        if log.spans.len() < MAX_SPANS {
            log.spans.push(Span { what, start, end, thread });
        } else {
            log.dropped += 1;
        }
    }

    /// Keeps what happens from now on.
    pub(crate) fn listen(&self) -> Listener {
        let log = self.log.lock();
        self.listeners.fetch_add(1, Relaxed);
        Listener { first: log.spans.len(), start: Instant::now(), wall: SystemTime::now() }
    }

    /// What happened since; nothing is kept any more if this was the only listener.
    pub(crate) fn stop(&self, listener: Listener) -> Heard {
        let mut log = self.log.lock();
        let heard = Heard {
            spans: log.spans[listener.first.min(log.spans.len())..].to_vec(),
            dropped: log.dropped,
            threads: log.threads.clone(),
            start: listener.start,
            wall: listener.wall,
            end: Instant::now(),
        };
        if self.listeners.fetch_sub(1, Relaxed) == 1 {
            let threads = std::mem::take(&mut log.threads); // their threads do not say them again
            *log = Log { threads, ..Log::default() };
        }
        heard
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listeners_hear_what_happens_while_they_listen() {
        let events = Events::default();
        let wait = |n| events.add(Instant::now(), || What::Wait { site: Site(n) });
        let sites = |heard: &Heard| -> Vec<u32> {
            let site = |s: &Span| if let What::Wait { site } = s.what { site.0 } else { 0 };
            heard.spans.iter().map(site).collect()
        };
        wait(1);
        assert_eq!(events.window(), 0);
        let a = events.listen();
        wait(2);
        let b = events.listen();
        wait(3);
        let a = events.stop(a);
        wait(4);
        let b = events.stop(b);
        wait(5);
        assert_eq!((sites(&a), sites(&b)), (vec![2, 3], vec![3, 4]));
        assert_eq!(a.threads.len(), 1);
        assert!(events.log.lock().spans.is_empty() && events.window() == 0);
    }
}
