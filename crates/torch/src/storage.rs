//! Storages as the shim sees them: an owned pointer with a unique fake address.
//!
//! The address is what `tensor.data_ptr()` shows. It names the storage's entry in a table, `(entry + 1) << 38` with bit 62
//! set, so pointers that PyTorch derives from it (pickling does) lead back to the storage, and a stray dereference faults.

use oxitorch_engine::Slot;
use parking_lot::Mutex;
use std::cell::{RefCell, UnsafeCell};
use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::sync::OnceLock;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Release};

const BASE: usize = 1 << 62;
const SHIFT: u32 = 38;

/// A place of the table. A `DataPtr`'s context points at it.
struct Entry {
    number: usize,
    /// Whether there is a storage here.
    live: AtomicBool,
    slot: UnsafeCell<MaybeUninit<Slot>>,
}

// SAFETY: a slot is written before its entry is shown to anybody, and ended when nobody has it any more; in between it is
// only read, and `Slot` is `Sync`.
unsafe impl Sync for Entry {}

/// Entries are made in pieces of this many, which never move.
const PIECE: usize = 1 << 12;
/// Enough for as many entries as there are addresses of `SHIFT` bits below `BASE`.
const PIECES: usize = (BASE >> SHIFT) / PIECE;

static TABLE: [OnceLock<Box<[Entry]>>; PIECES] = [const { OnceLock::new() }; PIECES];
/// Entries that no thread keeps for itself, and the first one that was never used.
static FREE: Mutex<(Vec<usize>, usize)> = Mutex::new((Vec::new(), 0));

/// Free entries of a thread: most tensors live and die in one.
struct Own(RefCell<Vec<usize>>);
/// As many as move between a thread and the rest at once.
const HANDFUL: usize = 64;

thread_local! {
    static OWN: Own = const { Own(RefCell::new(Vec::new())) };
}

impl Drop for Own {
    fn drop(&mut self) {
        FREE.lock().0.append(self.0.get_mut());
    }
}

fn entry(i: usize) -> &'static Entry {
    let first = i - i % PIECE;
    let new =
        |number| Entry { number, live: AtomicBool::new(false), slot: UnsafeCell::new(MaybeUninit::uninit()) };
    &TABLE[i / PIECE].get_or_init(|| (first..first + PIECE).map(new).collect())[i % PIECE]
}

/// A free entry.
fn take() -> usize {
    let own = OWN.try_with(|own| {
        let mut own = own.0.borrow_mut();
        own.pop().or_else(|| {
            let mut free = FREE.lock();
            let keep = free.0.len().saturating_sub(HANDFUL);
            own.extend(free.0.drain(keep..));
            own.pop()
        })
    });
    // Nothing is left, or the thread is ending.
    own.ok().flatten().unwrap_or_else(|| {
        let mut free = FREE.lock();
        free.1 += 1;
        free.1 - 1
    })
}

fn give_back(i: usize) {
    let kept = OWN.try_with(|own| {
        let mut own = own.0.borrow_mut();
        own.push(i);
        if own.len() >= 2 * HANDFUL {
            FREE.lock().0.extend(own.drain(HANDFUL..));
        }
    });
    if kept.is_err() {
        FREE.lock().0.push(i); // the thread is ending
    }
}

/// Hands a slot over to the shim.
pub(crate) fn into_raw(slot: Slot) -> *mut c_void {
    let entry = entry(take());
    // SAFETY: a free entry that this thread has taken.
    unsafe { (*entry.slot.get()).write(slot) };
    entry.live.store(true, Release);
    std::ptr::from_ref(entry).cast_mut().cast()
}

/// Ends a storage.
///
/// # Safety
/// `raw` comes from [`into_raw`] and is not used again.
pub(crate) unsafe fn drop_raw(raw: *mut c_void) {
    if raw.is_null() {
        return;
    }
    // SAFETY: by the caller's promise.
    let entry = unsafe { &*raw.cast::<Entry>() };
    entry.live.store(false, Release);
    // SAFETY: it was live, and nobody else has it.
    unsafe { (*entry.slot.get()).assume_init_drop() };
    give_back(entry.number);
}

/// The storage behind a pointer.
///
/// # Safety
/// `raw` comes from [`into_raw`], and its tensor is alive during `'a`.
pub(crate) unsafe fn get<'a>(raw: *mut c_void) -> &'a Slot {
    // SAFETY: by the caller's promise.
    unsafe { (*(*raw.cast::<Entry>()).slot.get()).assume_init_ref() }
}

/// The fake address of a storage.
///
/// # Safety
/// As for [`get`].
pub(crate) unsafe fn address(raw: *mut c_void) -> usize {
    // SAFETY: by the caller's promise.
    let entry = unsafe { &*raw.cast::<Entry>() };
    BASE | (entry.number + 1) << SHIFT
}

/// The storage that an address lies in, and how many bytes in.
pub(crate) fn find(address: usize) -> Option<(*mut c_void, i64)> {
    let i = ((address & !BASE) >> SHIFT).checked_sub(1)?;
    let entry = &TABLE.get(i / PIECE)?.get()?[i % PIECE];
    let offset = (address & ((1 << SHIFT) - 1)) as i64;
    let live = address & BASE != 0 && entry.live.load(Acquire);
    live.then_some((std::ptr::from_ref(entry).cast_mut().cast(), offset))
}
