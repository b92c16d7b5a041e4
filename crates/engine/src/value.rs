//! Values and the slots that hold them.
//!
//! A [`Value`] is immutable once computed: what a whole storage holds at one moment. A [`Slot`] stands for one PyTorch
//! storage and points at its current value; a write makes a new value and rebinds the slot, so readers that took the old
//! one keep it.

use crate::buffers::Buffers;
use crate::error::Error;
use crate::memory::Charge;
use crate::origin::Along;
use crate::site::Site;
use crate::spread::Sharded;
use crate::work::Work;
use oxitorch_hlo::{DType, TensorType};
use parking_lot::Mutex;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};

/// Where the bytes of a value are.
#[derive(Debug)]
pub(crate) enum State {
    /// Recorded, or in the launch queue.
    Pending,
    /// On the host, uploaded when a program first needs them.
    Host(Box<[u8]>),
    /// On the device, or on the devices of a mesh.
    Ready(Buffers),
    /// What a task of several processes is about to write.
    Coming(Arc<Work>),
    /// On a device that is not there; with the bytes, if they are few and came from the host.
    Absent(Option<Box<[u8]>>),
    /// The op (or one that it depends on) failed.
    Failed(Error),
    /// Given to a program for its result; nothing can see the value any more.
    Donated,
}

/// The immutable content of a storage.
#[derive(Debug)]
pub struct Value {
    pub(crate) ty: TensorType,
    /// Known before the value is.
    pub(crate) sharding: Sharded,
    /// Slots and host reads through which this value can still be seen.
    holds: AtomicU32,
    /// Where it stands in the open window: epoch in the upper half, operand code in the lower; see `Window`.
    pub(crate) mark: AtomicU64,
    /// The Python line that asked for it.
    pub(crate) site: Site,
    /// Sizes of it that followed from values that the host has read.
    counts: OnceLock<Box<[Along]>>,
    /// The launch that computes it; 0 if it never was part of one.
    pub(crate) launch: AtomicU64,
    /// A number that no other value ever has, unlike an address; 0 if nobody has asked for it.
    identity: AtomicU64,
    pub(crate) state: Mutex<State>,
    pub(crate) charge: Charge,
}

impl Value {
    pub(crate) fn new(ty: TensorType, state: State) -> Arc<Value> {
        Arc::new(Self::at(ty, None, state, 0, Site::default()))
    }

    /// A value that this line brings from the host.
    pub(crate) fn uploaded(ty: TensorType, state: State, site: Site) -> Arc<Value> {
        Arc::new(Self::at(ty, None, state, 0, site))
    }

    /// A value that this line makes or brings, and that is cut so; the type is that of the whole.
    pub(crate) fn sharded(ty: TensorType, sharding: Sharded, state: State, site: Site) -> Arc<Value> {
        Arc::new(Self::at(ty, sharding, state, 0, site))
    }

    fn at(ty: TensorType, sharding: Sharded, state: State, mark: u64, site: Site) -> Value {
        Value {
            ty,
            sharding,
            holds: AtomicU32::new(0),
            mark: AtomicU64::new(mark),
            site,
            counts: OnceLock::new(),
            launch: AtomicU64::new(0),
            identity: AtomicU64::new(0),
            state: Mutex::new(state),
            charge: Charge::default(),
        }
    }

    /// The result of an op that this line recorded, at this place of the window; in the memory of `old` if nobody else has it.
    pub(crate) fn recorded(
        (ty, sharding): (TensorType, Sharded),
        mark: u64,
        site: Site,
        old: Option<Arc<Value>>,
    ) -> Arc<Value> {
        let new = Self::at(ty, sharding, State::Pending, mark, site);
        let Some(mut old) = old else { return Arc::new(new) };
        match Arc::get_mut(&mut old) {
            Some(place) => {
                *place = new;
                old
            }
            None => Arc::new(new),
        }
    }

    /// A 0-d number on its way to the device.
    pub(crate) fn scalar(dtype: DType, bytes: &[u8]) -> Arc<Value> {
        Self::new(TensorType::scalar(dtype), State::Host(bytes.into()))
    }

    /// Seed and offset of a generator.
    pub(crate) fn generator((seed, offset): (u64, u64)) -> Arc<Value> {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&seed.to_le_bytes());
        bytes[8..].copy_from_slice(&offset.to_le_bytes());
        Self::new(TensorType::new(DType::U64, [2].as_slice()), State::Host(bytes.as_slice().into()))
    }

    /// Those of a generator's state.
    pub(crate) fn seed_and_offset(&self) -> Option<(u64, u64)> {
        let State::Host(bytes) = &*self.state.lock() else { return None };
        let word = |half: &[u8]| half.try_into().map(u64::from_le_bytes).ok();
        let (seed, offset) = bytes.split_at_checked(8)?;
        Some((word(seed)?, word(offset)?))
    }

    /// Offsets that a program takes.
    pub(crate) fn offsets(numbers: &[i64]) -> Arc<Value> {
        let bytes: Box<[u8]> = numbers.iter().flat_map(|n| n.to_le_bytes()).collect();
        Self::new(TensorType::new(DType::S64, [numbers.len() as i64].as_slice()), State::Host(bytes))
    }

    /// What says that a value remembered is this one.
    pub(crate) fn identity(&self) -> u64 {
        static LAST: AtomicU64 = AtomicU64::new(0);
        match self.identity.load(Relaxed) {
            0 => {
                let new = LAST.fetch_add(1, Relaxed) + 1;
                self.identity.compare_exchange(0, new, Relaxed, Relaxed).map_or_else(|first| first, |_| new)
            }
            known => known,
        }
    }

    /// Bytes of all of it.
    pub(crate) fn whole_bytes(&self) -> u64 {
        self.ty.bytes().max(0) as u64
    }

    /// Bytes that it takes on the device, or on each device.
    pub(crate) fn bytes(&self) -> u64 {
        self.whole_bytes() / self.sharding.as_ref().map_or(1, |c| c.parts() as u64)
    }

    /// The sizes of it that followed from values that the host has read.
    pub(crate) fn counts(&self) -> &[Along] {
        self.counts.get().map_or(&[], |counts| counts)
    }

    /// These sizes of it have; what is known already stays.
    pub(crate) fn set_counts(&self, counts: &[Along]) {
        if !counts.is_empty() {
            self.counts.get_or_init(|| counts.into());
        }
    }

    /// Whether a slot or a host read can still see it.
    pub(crate) fn is_visible(&self) -> bool {
        self.holds.load(Relaxed) > 0
    }

    /// What a tensor of such a value holds that was given to a function.
    pub(crate) fn given_away(ty: &TensorType) -> Arc<Value> {
        let why = "this tensor was given to a function of torch.tpu.jit, which may have overwritten it\nhint: use what \
                   the function returns, or take the argument out of donate_argnums";
        Value::new(ty.clone(), State::Failed(Error::runtime(why)))
    }

    /// How many slots and host reads see it.
    pub(crate) fn holders(&self) -> u32 {
        self.holds.load(Relaxed)
    }

    /// Takes the buffer out, for a program that overwrites it.
    pub(crate) fn donate(&self) -> Option<Buffers> {
        let mut state = self.state.lock();
        if !matches!(*state, State::Ready(_) | State::Absent(_)) {
            return None;
        }
        self.charge.release();
        match std::mem::replace(&mut *state, State::Donated) {
            State::Ready(b) => Some(b),
            _ => None,
        }
    }
}

/// A value that is held visible: while it lives the value is neither donated nor left out of a program.
#[derive(Debug)]
pub(crate) struct Held(Arc<Value>);

impl Held {
    /// Holds a value.
    pub(crate) fn new(value: Arc<Value>) -> Held {
        value.holds.fetch_add(1, Relaxed);
        Held(value)
    }

    /// The value.
    pub(crate) fn value(&self) -> &Arc<Value> {
        &self.0
    }
}

impl Clone for Held {
    fn clone(&self) -> Held {
        Held::new(self.0.clone())
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.0.holds.fetch_sub(1, Relaxed);
    }
}

/// One PyTorch storage.
#[derive(Debug)]
pub struct Slot {
    /// Size of the storage.
    pub nbytes: usize,
    /// Ordinal of the device.
    pub device: u16,
    /// The current value; none before the first write (reads see zeros then).
    value: Mutex<Option<Held>>,
}

impl Slot {
    /// A storage that was never written.
    pub fn new(nbytes: usize, device: u16) -> Slot {
        Slot { nbytes, device, value: Mutex::new(None) }
    }

    /// Looks at the current value.
    pub(crate) fn look<T>(&self, f: impl FnOnce(&Arc<Value>) -> T) -> Option<T> {
        self.value.lock().as_ref().map(|h| f(h.value()))
    }

    /// A storage that holds a value.
    pub(crate) fn with(nbytes: usize, device: u16, value: Arc<Value>) -> Slot {
        Slot { nbytes, device, value: Mutex::new(Some(Held::new(value))) }
    }

    /// The current value.
    pub(crate) fn value(&self) -> Option<Arc<Value>> {
        self.value.lock().as_ref().map(|h| h.value().clone())
    }

    /// The current value, held: a thread that binds another one at the same time does not give it away.
    pub(crate) fn held(&self) -> Option<Held> {
        self.look(|value| Held::new(value.clone()))
    }

    /// Makes this the current value.
    pub(crate) fn bind(&self, value: Arc<Value>) {
        let old = self.value.lock().replace(Held::new(value));
        drop(old); // outside the lock: the last holder frees a buffer
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_identity_is_no_other_values() {
        let number = || (TensorType::scalar(DType::F32), None);
        let old = Value::recorded(number(), 0, Site::default(), None);
        let (first, place) = (old.identity(), Arc::as_ptr(&old));
        assert_eq!(old.identity(), first);
        let new = Value::recorded(number(), 0, Site::default(), Some(old));
        assert_eq!(Arc::as_ptr(&new), place, "it has the memory of the old one");
        assert_ne!(new.identity(), first);
    }
}
