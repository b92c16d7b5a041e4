//! Threads that record, as a window knows them; see `turns.rs`.

use crate::mark::Note;
use crate::site::Site;
use crate::value::Value;
use oxitorch_capture::Reason;
use rustc_hash::FxHashMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};

/// Threads that have nothing in the window, and whose rounds are remembered.
pub(crate) const MAX_IDLE: usize = 64;
/// Ops of all threads together, as a multiple of those that one may have; and bytes.
pub(crate) const CROWD: usize = 4;

/// For whom the running thread records.
#[derive(Clone, Copy, Debug)]
pub struct Caller {
    /// The number of a thread, not 0.
    pub thread: u64,
    /// Whether it is in a backward, and computes a part of the forward again.
    pub recomputes: bool,
}

static CALLER: OnceLock<fn() -> Caller> = OnceLock::new();
static SETTLE: OnceLock<fn()> = OnceLock::new();

/// Installs the function that says for whom the running thread records, and one that is called before it records, without
/// a lock: behind it nothing lets go any more of what this thread has dropped. The first call wins; without one, it is for
/// itself.
pub fn set_caller(f: fn() -> Caller, settle: fn()) {
    CALLER.get_or_init(|| f);
    SETTLE.get_or_init(|| settle);
}

/// What is visible depends on the script from here on, and not on what another thread has still to let go of.
pub(crate) fn settle() {
    if let Some(settle) = SETTLE.get() {
        settle();
    }
}

/// For whom this thread records.
pub(crate) fn here() -> Caller {
    static COUNT: AtomicU64 = AtomicU64::new(1 << 63);
    thread_local! {
        static OWN: u64 = COUNT.fetch_add(1, Relaxed);
    }
    match CALLER.get() {
        Some(caller) => caller(),
        None => Caller { thread: OWN.with(|own| *own), recomputes: false },
    }
}

/// A thread that records.
#[derive(Debug, Default)]
pub(crate) struct Thread {
    pub(crate) number: u64,
    /// While it is not its turn: its ops in the window.
    pub(crate) ops: usize,
    /// Size of all results, and of those that XLA does not fuse into what reads them.
    pub(crate) bytes: u64,
    pub(crate) kept: u64,
    /// Size of the inputs that it brought into the window.
    pub(crate) taken: u64,
    /// When results and inputs have so many bytes, inputs are looked at that nobody sees any more.
    pub(crate) look_at: u64,
    /// If a bound cut its window before: the Python line where this round began, and the ops that were launched since.
    pub(crate) round: Option<(Site, usize)>,
    /// The Python line of the first copy from the host.
    pub(crate) first_upload: Option<Site>,
    /// Whether its last op was a part of a forward that a backward computes again.
    pub(crate) recomputes: bool,
    /// Whether the next op is the first such.
    pub(crate) recompute_begins: bool,
    /// While it is, and no window can end there.
    pub(crate) fence: Option<Box<Fence>>,
    /// Whether an optimizer has made its step, and the window ends once the script has dropped the gradients, or before
    /// whatever else it does.
    pub(crate) step_waits: bool,
    /// A function that is one program was noted: what it recorded is launched as such once Python has let go of what it
    /// held for it, or before whatever else the thread does, as later calls launch it.
    pub(crate) noted_waits: Option<Reason>,
    /// Number of the compiler options that its ops are to be compiled with.
    pub(crate) options: u32,
    /// Marks in the window, each with how many of its ops come before.
    pub(crate) notes: Vec<(usize, Note)>,
}

/// What is between a part of a forward that a backward computes again and all that was recorded before: in one program
/// the compiler would find both alike, and keep what was to be dropped.
#[derive(Debug)]
pub(crate) struct Fence {
    /// The window that it is in.
    pub(crate) epoch: u32,
    /// Results from this one on are behind it.
    pub(crate) first: u32,
    /// What the backward has computed last: nothing behind the fence is computed before it.
    pub(crate) after: Option<Arc<Value>>,
    /// What stands for values from before, by their addresses and whether they wait for `after`.
    pub(crate) behind: FxHashMap<(usize, bool), Arc<Value>>,
}

/// From this op on, until the next turn, a thread recorded.
#[derive(Debug)]
pub(crate) struct Turn {
    pub(crate) first: usize,
    pub(crate) thread: u64,
}

/// The threads of a window.
#[derive(Debug, Default)]
pub(crate) struct Others {
    /// Those whose turn it is not.
    pub(crate) threads: Vec<Thread>,
    /// Their ops in the window.
    pub(crate) ops: usize,
    /// Who recorded what; empty while it was one thread.
    pub(crate) turns: Vec<Turn>,
}

/// What of a window is launched.
pub(crate) enum Whose<'a> {
    /// What the running thread recorded.
    Own,
    /// What all recorded.
    All,
    /// What makes a value; all of the running thread's, if it recorded that.
    Value(&'a Arc<Value>),
}
