//! For whom a thread records: itself, or, in autograd's threads, the thread that made the graph whose backward runs.

use crate::abi;
use crate::abi::Shim;
use oxitorch_engine::Caller;
use parking_lot::Mutex;
use std::cell::{Cell, RefCell};
use std::sync::OnceLock;

static SHIM: OnceLock<&'static Shim> = OnceLock::new();
/// Threads of autograd's, and for whom each recorded last: a graph that is made in a backward is of that thread too.
static WORKERS: Mutex<Vec<(u64, u64)>> = Mutex::new(Vec::new());
/// Backwards of one thread that are told apart; others that run at the same time may be mistaken for each other.
const MAX_TASKS: usize = 8;

thread_local! {
    static LAST: Cell<(abi::Caller, u64)> = const { Cell::new((abi::Caller { thread: 0, task: -1, forward: 0 }, 0)) };
    /// Backwards that ran here, and for whom.
    static TASKS: RefCell<Vec<(i64, u64)>> = const { RefCell::new(Vec::new()) };
}

/// The engine asks from now on.
pub(crate) fn start(shim: &'static Shim) {
    SHIM.get_or_init(|| shim);
    oxitorch_engine::set_caller(caller);
}

/// For whom the running thread records.
fn caller() -> Caller {
    let mut now = abi::Caller::default();
    if let Some(shim) = SHIM.get() {
        // SAFETY: reads thread-locals of PyTorch.
        unsafe { (shim.caller)(&raw mut now) };
    }
    let (last, thread) = LAST.get();
    if last == now {
        return Caller { thread, varies: true };
    }
    if now.task < 0 && last.thread == 0 {
        return Caller { thread: now.thread, varies: false };
    }
    let thread = served(&now);
    LAST.set((now, thread));
    Caller { thread, varies: true }
}

/// For whom a thread of autograd's records.
#[cold]
fn served(now: &abi::Caller) -> u64 {
    let mut workers = WORKERS.lock();
    let last_of = |thread: u64| workers.iter().find(|w| w.0 == thread).map(|w| w.1);
    let known = TASKS.with_borrow(|tasks| tasks.iter().find(|t| t.0 == now.task).map(|t| t.1));
    let thread = match now.forward {
        0 => known.or_else(|| last_of(now.thread)).unwrap_or(now.thread),
        forward => last_of(forward).unwrap_or(forward),
    };
    if now.task >= 0 && known != Some(thread) {
        TASKS.with_borrow_mut(|tasks| {
            tasks.retain(|t| t.0 != now.task);
            tasks.truncate(MAX_TASKS - 1);
            tasks.insert(0, (now.task, thread));
        });
    }
    if thread != now.thread {
        workers.retain(|w| w.0 != now.thread);
        workers.push((now.thread, thread));
    }
    thread
}
