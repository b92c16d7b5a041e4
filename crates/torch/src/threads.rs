//! For whom a thread records: itself, or in a backward the thread that made the graph. A backward runs in the thread that asks
//! for it (`keep_backward_here` in the shim), or in one of autograd's, where a user has PyTorch do that.
//!
//! Autograd's thread says that a backward is done while it still holds the results and the node that it ran last, which may
//! have tensors: a leaf, what a graph that is kept has saved. The thread that waited for it could find these visible or not.
//! So a thread, before it records again, waits until autograd's has taken up other work.

use crate::abi;
use crate::abi::Shim;
use crate::gil;
use oxitorch_engine::Caller;
use parking_lot::Mutex;
use std::cell::{Cell, RefCell};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

static SHIM: OnceLock<&'static Shim> = OnceLock::new();
/// Threads of autograd's, and for whom each recorded last: a graph that is made in a backward is of that thread too.
static WORKERS: Mutex<Vec<(u64, u64)>> = Mutex::new(Vec::new());
/// Threads for which a backward has run in a thread of autograd's, and the device of that one.
static UNSETTLED: Mutex<Vec<(u64, i32)>> = Mutex::new(Vec::new());
/// How many there have been.
static EVER_UNSETTLED: AtomicU64 = AtomicU64::new(0);
/// So many are remembered: threads that ended with a backward never ask.
const MAX_UNSETTLED: usize = 64;
/// Backwards of one thread that are told apart; others that run at the same time may be mistaken for each other.
const MAX_TASKS: usize = 8;

/// A backward that ran in a thread.
#[derive(Clone, Copy)]
struct Task {
    number: i64,
    /// For whom.
    thread: u64,
    /// Whether its own results want gradients: with `create_graph=True`.
    grad: bool,
}

thread_local! {
    /// For whom the last call was, and whether it was part of a forward that a backward computes again.
    static LAST: Cell<(abi::Caller, u64, bool)> = const { Cell::new((abi::Caller::NOBODY, 0, false)) };
    /// The latest backwards.
    static TASKS: RefCell<Vec<Task>> = const { RefCell::new(Vec::new()) };
    /// Whether it is one of autograd's, which never do anything but run backwards; none before it records.
    static IS_WORKER: Cell<Option<bool>> = const { Cell::new(None) };
    /// How many of [`EVER_UNSETTLED`] this thread has looked through.
    static SETTLED: Cell<u64> = const { Cell::new(0) };
}

/// The engine asks from now on.
pub(crate) fn start(shim: &'static Shim) {
    SHIM.get_or_init(|| shim);
    oxitorch_engine::set_caller(caller, || {
        let ever = EVER_UNSETTLED.load(Relaxed);
        if ever != SETTLED.get() {
            settle(ever);
        }
    });
}

/// Waits until autograd's threads have let go of what they ran for this one, of the first so many backwards.
#[cold]
fn settle(ever: u64) {
    let Some(shim) = SHIM.get() else { return };
    let mut now = abi::Caller::default();
    // SAFETY: reads thread-locals of PyTorch.
    unsafe { (shim.caller)(&raw mut now) };
    // In a backward itself, or with the GIL, which autograd's thread may want before: then it is done in a later call.
    if now.task >= 0 || gil::is_held() {
        return;
    }
    SETTLED.set(ever);
    let mut devices = Vec::new();
    let mut all = UNSETTLED.lock();
    all.retain(|&(thread, device)| {
        let is_own = thread == now.thread;
        if is_own {
            devices.push(device);
        }
        !is_own
    });
    drop(all);
    for device in devices {
        // SAFETY: neither a lock nor the GIL is held.
        unsafe { (shim.settle)(device) };
    }
}

/// For whom the running thread records.
fn caller() -> Caller {
    let mut now = abi::Caller::default();
    if let Some(shim) = SHIM.get() {
        // SAFETY: reads thread-locals of PyTorch.
        unsafe { (shim.caller)(&raw mut now) };
    }
    let is_worker = IS_WORKER.get().unwrap_or_else(|| {
        IS_WORKER.set(Some(now.task >= 0));
        now.task >= 0
    });
    if now.task < 0 && !is_worker {
        return Caller { thread: now.thread, recomputes: false };
    }
    let (last, thread, recomputes) = LAST.get();
    if last == now {
        return Caller { thread, recomputes };
    }
    let (thread, recomputes) = served(&now, is_worker);
    LAST.set((now, thread, recomputes));
    Caller { thread, recomputes }
}

/// For whom a thread records a backward, and whether that is a part of a forward: gradients are wanted in a backward
/// whose own results want none.
#[cold]
fn served(now: &abi::Caller, is_worker: bool) -> (u64, bool) {
    let mut workers = WORKERS.lock();
    let last_of = |thread: u64| workers.iter().find(|w| w.0 == thread).map(|w| w.1);
    let known = TASKS.with_borrow(|tasks| tasks.iter().find(|t| t.number == now.task).copied());
    let thread = match now.forward {
        0 => known.map(|t| t.thread).or_else(|| last_of(now.thread)).unwrap_or(now.thread),
        forward => last_of(forward).unwrap_or(forward),
    };
    let wants = now.grad != 0;
    // A backward that does not keep its graph makes none. Nor does one of whose results some want no gradients.
    let grad = wants && known.map_or(now.keeps != 0, |t| t.grad);
    if now.task >= 0 && known.map(|t| (t.thread, t.grad)) != Some((thread, grad)) {
        TASKS.with_borrow_mut(|tasks| {
            tasks.retain(|t| t.number != now.task);
            tasks.truncate(MAX_TASKS - 1);
            tasks.insert(0, Task { number: now.task, thread, grad });
        });
    }
    if is_worker && thread != now.thread {
        workers.retain(|w| w.0 != now.thread);
        workers.push((now.thread, thread));
        unsettle(thread);
    }
    (thread, now.task >= 0 && wants && !grad)
}

/// Notes that a backward runs here for a thread.
fn unsettle(thread: u64) {
    let Some(shim) = SHIM.get() else { return };
    // SAFETY: reads a thread-local of the shim.
    let of = (thread, unsafe { (shim.current_device)() });
    let mut all = UNSETTLED.lock();
    if !all.contains(&of) {
        if all.len() == MAX_UNSETTLED {
            all.remove(0);
        }
        all.push(of);
    }
    EVER_UNSETTLED.fetch_add(1, Relaxed);
}
