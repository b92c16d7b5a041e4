//! Storages as the shim sees them: an owned pointer with a unique fake address.
//!
//! The address is what `tensor.data_ptr()` shows. It names the storage's entry in a table, `(entry + 1) << 38` with bit 62
//! set, so pointers that PyTorch derives from it (pickling does) lead back to the storage, and a stray dereference faults.

use oxitorch_engine::Slot;
use parking_lot::Mutex;
use std::ffi::c_void;

const BASE: usize = 1 << 62;
const SHIFT: u32 = 38;

/// What a `DataPtr`'s context points at.
pub(crate) struct Storage {
    pub(crate) slot: Slot,
    entry: usize,
}

#[derive(Default)]
struct Entries {
    /// Addresses of live storages, as integers.
    storages: Vec<usize>,
    free: Vec<usize>,
}

static ENTRIES: Mutex<Entries> = Mutex::new(Entries { storages: Vec::new(), free: Vec::new() });

/// Hands a slot over to the shim.
pub(crate) fn into_raw(slot: Slot) -> *mut c_void {
    let mut storage = Box::new(Storage { slot, entry: 0 });
    let mut entries = ENTRIES.lock();
    storage.entry = entries.free.pop().unwrap_or_else(|| {
        entries.storages.push(0);
        entries.storages.len() - 1
    });
    let entry = storage.entry;
    let raw = Box::into_raw(storage);
    entries.storages[entry] = raw as usize;
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
    let mut entries = ENTRIES.lock();
    entries.storages[storage.entry] = 0;
    entries.free.push(storage.entry);
    drop(entries); // before the slot: its value may free a buffer
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
    let entry = ((address & !BASE) >> SHIFT).checked_sub(1)?;
    let raw = *ENTRIES.lock().storages.get(entry)?;
    let offset = (address & ((1 << SHIFT) - 1)) as i64;
    (address & BASE != 0 && raw != 0).then_some((raw as *mut c_void, offset))
}
