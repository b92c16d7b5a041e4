//! Storages as the shim sees them: an owned pointer with a unique fake address.
//!
//! The address is what `tensor.data_ptr()` shows. It names the storage's entry in a table, `(entry + 1) << 38` with bit 62
//! set, so pointers that PyTorch derives from it (pickling does) lead back to the storage, and a stray dereference faults.

use oxitorch_engine::Slot;
use parking_lot::Mutex;
use std::cell::RefCell;
use std::ffi::c_void;
use std::sync::OnceLock;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::{Acquire, Release};

const BASE: usize = 1 << 62;
const SHIFT: u32 = 38;

/// What a `DataPtr`'s context points at.
pub(crate) struct Storage {
    pub(crate) slot: Slot,
    entry: usize,
}

/// Entries are made in pieces of this many, which never move.
const PIECE: usize = 1 << 12;
/// Enough for as many entries as there are addresses of `SHIFT` bits below `BASE`.
const PIECES: usize = (BASE >> SHIFT) / PIECE;

/// Addresses of live storages, as integers; 0 where there is none.
static TABLE: [OnceLock<Box<[AtomicUsize]>>; PIECES] = [const { OnceLock::new() }; PIECES];
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

fn entry(i: usize) -> &'static AtomicUsize {
    let piece = TABLE[i / PIECE].get_or_init(|| (0..PIECE).map(|_| AtomicUsize::new(0)).collect());
    &piece[i % PIECE]
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
    let i = take();
    let raw = Box::into_raw(Box::new(Storage { slot, entry: i }));
    entry(i).store(raw as usize, Release);
    raw.cast()
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
    let storage = unsafe { Box::from_raw(raw.cast::<Storage>()) };
    entry(storage.entry).store(0, Release);
    give_back(storage.entry);
}

/// The storage behind a pointer.
///
/// # Safety
/// `raw` comes from [`into_raw`], and its tensor is alive during `'a`.
pub(crate) unsafe fn get<'a>(raw: *mut c_void) -> &'a Storage {
    // SAFETY: by the caller's promise.
    unsafe { &*raw.cast::<Storage>() }
}

impl Storage {
    /// Its fake address.
    pub(crate) fn address(&self) -> usize {
        BASE | (self.entry + 1) << SHIFT
    }
}

/// The storage that an address lies in, and how many bytes in.
pub(crate) fn find(address: usize) -> Option<(*mut c_void, i64)> {
    let i = ((address & !BASE) >> SHIFT).checked_sub(1)?;
    let raw = TABLE.get(i / PIECE)?.get()?[i % PIECE].load(Acquire);
    let offset = (address & ((1 << SHIFT) - 1)) as i64;
    (address & BASE != 0 && raw != 0).then_some((raw as *mut c_void, offset))
}
