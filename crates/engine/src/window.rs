//! What was recorded and is not launched yet.

use crate::alike::Alike;
use crate::body::{Captured, Recorded};
use crate::config::Limits;
use crate::counts::Counts;
use crate::error::{Error, Refusal, Result};
use crate::events::Stamp;
use crate::inst::{Access, Inst, Instances, Key, Kind, Out};
use crate::known::Programs;
use crate::ops::{Ops, PRODUCED};
use crate::origin::Sized;
use crate::shared::Shared;
use crate::site::Site;
use crate::split::{Lines, Sequences};
use crate::spread::Sharded;
use crate::tape::Tape;
use crate::tensor::TensorRef;
use crate::threads::{Others, Thread};
use crate::value::{Held, Slot, State, Value};
use crate::view::{View, dense_order};
use oxitorch_hlo::{DType, Sharding, TensorType};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

/// Values that are kept for their memory.
const MAX_SPARE: usize = 256;
/// Elsewhere than in host memory, views of storages of more bytes than this, and than four times theirs, are cut out there.
pub(crate) const LEAST_APART: u64 = 64 << 10;
/// Numbers that stay on the device, by dtype and bytes.
const MAX_NUMBERS: usize = 4096;

/// Ops recorded and not yet launched, and what was learned from earlier ones.
#[derive(Default)]
pub(crate) struct Window {
    pub(crate) instances: Instances,
    pub(crate) programs: Programs,
    pub(crate) sequences: Sequences,
    pub(crate) lines: Lines,
    pub(crate) alike: Alike,
    /// Sizes that followed from values.
    pub(crate) counts: Counts,
    /// The number of the window that was launched in parts last.
    pub(crate) last_split: u64,
    numbers: FxHashMap<(DType, [u8; 16]), Held>,
    /// Lists of numbers in functions that were noted.
    lists: FxHashMap<(DType, Box<[u8]>), Held>,
    /// Counts windows; a value whose mark has another epoch is not in this one.
    pub(crate) epoch: u32,
    pub(crate) ops: Ops,
    pub(crate) inputs: Vec<Arc<Value>>,
    pub(crate) produced: Vec<Option<Arc<Value>>>,
    /// Results of earlier windows that nobody wanted: most of a window's results are such, and freeing them one by one
    /// costs as much as recording them.
    spare: Vec<Arc<Value>>,
    pub(crate) limits: Limits,
    /// The thread whose turn it is, and the others.
    pub(crate) thread: Thread,
    pub(crate) others: Others,
    /// Scratch for program keys.
    pub(crate) key: Vec<u32>,
    /// Scratch for the keys of calls.
    call: Key,
    /// The Python line of the current call.
    pub(crate) site: Site,
    /// Whether it is noted when each op was recorded: somebody listens.
    pub(crate) stamped: bool,
    pub(crate) stamps: Vec<Stamp>,
    /// The compiled graph that is being played.
    pub(crate) tape: Option<Box<Tape>>,
    /// It, while what is recorded is no part of it.
    pub(crate) paused: Option<Box<Tape>>,
    /// The bodies of loops and branches that are being recorded, by one thread, innermost last; and whether it is another
    /// thread's turn, so that what is around them is in its place.
    pub(crate) bodies: Vec<Recorded>,
    pub(crate) aside: bool,
    /// Bodies that wait for their loop.
    pub(crate) captured: Vec<Captured>,
    /// How many collectives each groups of devices have done.
    pub(crate) exchanges: FxHashMap<Box<[Vec<i32>]>, u64>,
    /// How values of a mesh were cut so far, by number.
    shardings: FxHashMap<Arc<Sharding>, u32>,
}

/// An operand of an instance that is about to be recorded.
#[derive(Debug)]
pub(crate) enum Operand {
    /// Of the open window.
    Code(u32),
    /// Not yet in it.
    Value(Arc<Value>),
}

/// The results of an instance.
pub(crate) type Outputs = SmallVec<[Option<Arc<Value>>; 1]>;

impl Window {
    /// A device's first window, in which nothing is recorded.
    pub(crate) fn new(limits: Limits) -> Window {
        Window { epoch: 1, limits, ..Window::default() }
    }

    /// An empty key that begins with a word; to be given back by [`Window::keep_key`].
    pub(crate) fn new_key(&mut self, word: u64) -> Key {
        std::mem::take(&mut self.call).anew(word)
    }

    /// Takes the memory of a key for the next one.
    pub(crate) fn keep_key(&mut self, key: Key) {
        self.call = key;
    }

    /// Appends an instance on these operands, with these offsets; gives its results.
    pub(crate) fn record(
        &mut self,
        inst: &Shared<Inst>,
        operands: impl IntoIterator<Item = Arc<Value>>,
        offsets: &[i64],
    ) -> Outputs {
        if inst.is_identity() {
            let operands: SmallVec<[Arc<Value>; 6]> = operands.into_iter().collect();
            let same = |o: &Option<Shared<Out>>| {
                o.as_ref().and_then(|o| o.same_as).map(|i| operands[i as usize].clone())
            };
            return inst.outputs.iter().map(same).collect();
        }
        if self.thread.fence.is_some() {
            let behind = self.behind_fence(operands.into_iter().collect());
            return self.record_behind(inst, behind, offsets);
        }
        if inst.waits {
            return self.record_reload(inst, operands.into_iter().collect());
        }
        self.record_behind(inst, operands, offsets)
    }

    /// As [`Window::record`], whatever fence there is.
    pub(crate) fn record_behind(
        &mut self,
        inst: &Shared<Inst>,
        operands: impl IntoIterator<Item = Arc<Value>>,
        offsets: &[i64],
    ) -> Outputs {
        for value in operands {
            let code = self.code(value);
            self.ops.operands.push(code);
        }
        let mut outputs = Outputs::new();
        for out in &inst.outputs {
            let value = out.as_ref().map(|o| self.result(o));
            self.produced.push(value.clone());
            outputs.push(value);
        }
        self.append(inst, offsets);
        outputs
    }

    /// Appends an instance with one result on these operands; nothing if it has none.
    pub(crate) fn record_plain<'i>(
        &mut self,
        inst: &'i Shared<Inst>,
        operands: impl IntoIterator<Item = Operand>,
        offsets: &[i64],
    ) -> Option<(Arc<Value>, &'i Shared<Out>)> {
        if self.thread.fence.is_some() || inst.waits {
            let behind: SmallVec<[Arc<Value>; 4]> =
                operands.into_iter().filter_map(|operand| self.value_of(operand)).collect();
            let value = self.record(inst, behind, offsets).pop()??;
            return Some((value, inst.outputs.first()?.as_ref()?));
        }
        let out = inst.outputs.first()?.as_ref()?;
        for operand in operands {
            let code = match operand {
                Operand::Code(code) => code,
                Operand::Value(value) => self.code(value),
            };
            self.ops.operands.push(code);
        }
        let value = self.result(out);
        self.produced.push(Some(value.clone()));
        self.append(inst, offsets);
        Some((value, out))
    }

    fn append(&mut self, inst: &Shared<Inst>, offsets: &[i64]) {
        debug_assert_eq!(offsets.len(), inst.offsets, "{}", inst.name());
        self.thread.bytes += inst.bytes;
        self.thread.kept += inst.kept;
        self.ops.insts.push(inst.clone());
        self.ops.sites.push(self.site);
        self.ops.offsets.extend_from_slice(offsets);
        if self.stamped {
            self.stamp(inst);
        }
        if self.tape.is_some() && !self.in_body() {
            self.note(inst);
        }
    }

    #[cold]
    fn stamp(&mut self, inst: &Shared<Inst>) {
        self.stamps.push(Stamp { inst: inst.clone(), site: self.site, at: Instant::now() });
    }

    /// Lets go of the results, and keeps some of those that nobody wants.
    pub(crate) fn clear_produced(&mut self) {
        let room = MAX_SPARE - self.spare.len();
        let unwanted = |v: &Arc<Value>| Arc::strong_count(v) == 1;
        self.spare.extend(self.produced.drain(..).flatten().filter(unwanted).take(room));
    }

    /// The next result of the window.
    fn result(&mut self, out: &Out) -> Arc<Value> {
        let mark = self.mark(PRODUCED | self.produced.len() as u32);
        Value::recorded((out.stored.clone(), out.sharding.clone()), mark, self.site, self.spare.pop())
    }

    /// A value that something else than an op of the window makes.
    pub(crate) fn pending(&mut self, ty: TensorType, site: Site) -> Arc<Value> {
        Value::recorded((ty, None), 0, site, self.spare.pop())
    }

    /// The value of a storage that a row-major tensor of this type shows as it is; nothing if it shows something else.
    pub(crate) fn whole(&self, slot: &Slot, dtype: DType, sizes: &[i64]) -> Option<Operand> {
        slot.look(|value| {
            let same = value.ty.dtype == dtype && value.ty.shape.as_slice() == sizes;
            let known =
                || self.known_code(value).map_or_else(|| Operand::Value(value.clone()), Operand::Code);
            same.then(known)
        })?
    }

    fn mark(&self, code: u32) -> u64 {
        u64::from(self.epoch) << 32 | u64::from(code)
    }

    /// No value is in the window any more.
    pub(crate) fn next_epoch(&mut self) {
        self.epoch = self.epoch.wrapping_add(1).max(1);
    }

    /// The values of the window have other codes than before.
    pub(crate) fn mark_all(&mut self) {
        self.next_epoch();
        let codes = |flag: u32| (0u32..).map(move |n| flag | n);
        let produced = self.produced.iter().zip(codes(PRODUCED));
        let produced = produced.filter_map(|(value, code)| Some((value.as_ref()?, code)));
        for (value, code) in self.inputs.iter().zip(codes(0)).chain(produced) {
            value.mark.store(self.mark(code), Relaxed);
        }
    }

    /// Whether a value is the result of an op that was not launched yet.
    pub(crate) fn is_recorded(&self, value: &Value) -> bool {
        let mark = value.mark.load(Relaxed);
        (mark >> 32) as u32 == self.epoch && mark as u32 & PRODUCED != 0
    }

    /// The number of a value among the results of ops that were not launched yet.
    pub(crate) fn result_number(&self, value: &Value) -> Option<u32> {
        self.known_code(value).filter(|code| code & PRODUCED != 0).map(|code| code & !PRODUCED)
    }

    /// Whether an op that was not launched yet has or makes a value.
    pub(crate) fn is_known(&self, value: &Value) -> bool {
        self.known_code(value).is_some()
    }

    /// The sizes of what a line copies from the host that are other ones in most copies.
    pub(crate) fn sizes_of_copy(&mut self, line: Site, shape: &[i64]) -> Sized {
        self.counts.copied(line, shape, self.epoch)
    }

    /// The operand code of a value, if it is in this window.
    pub(crate) fn known_code(&self, value: &Value) -> Option<u32> {
        let mark = value.mark.load(Relaxed);
        ((mark >> 32) as u32 == self.epoch).then_some(mark as u32)
    }

    /// The operand code of a value in this window; makes it an input if it is not in it.
    pub(crate) fn code(&mut self, value: Arc<Value>) -> u32 {
        if let Some(code) = self.known_code(&value) {
            return code;
        }
        let code = self.inputs.len() as u32;
        self.thread.taken += value.bytes();
        value.mark.store(self.mark(code), Relaxed);
        self.inputs.push(value);
        code
    }

    /// The value that an operand code of this window means.
    pub(crate) fn value(&self, code: u32) -> Option<&Arc<Value>> {
        let at = (code & !PRODUCED) as usize;
        if code & PRODUCED == 0 { self.inputs.get(at) } else { self.produced.get(at)?.as_ref() }
    }

    fn value_of(&self, operand: Operand) -> Option<Arc<Value>> {
        match operand {
            Operand::Code(code) => self.value(code).cloned(),
            Operand::Value(value) => Some(value),
        }
    }

    /// Records a kind; gives its only result.
    pub(crate) fn apply<const N: usize>(
        &mut self,
        kind: Kind,
        operands: [Arc<Value>; N],
    ) -> Result<Arc<Value>, Refusal> {
        let inst = self.instances.get(kind)?;
        self.record_one(&inst, operands, &[])
    }

    /// Reads a view of `base`, or gives `base` with a view overwritten by the operand after it.
    fn access<const N: usize>(
        &mut self,
        access: Access,
        view: &View,
        operands: [Arc<Value>; N],
    ) -> Result<Arc<Value>, Refusal> {
        let key = self.new_key(0);
        let (inst, offsets, key) = self.instances.view(access, &operands[0].ty, view, key)?;
        self.keep_key(key);
        self.record_one(&inst, operands, &offsets)
    }

    fn record_one<const N: usize>(
        &mut self,
        inst: &Shared<Inst>,
        operands: [Arc<Value>; N],
        offsets: &[i64],
    ) -> Result<Arc<Value>, Refusal> {
        let value = self.record(inst, operands, offsets).pop().flatten();
        Ok(value.ok_or_else(|| Error::runtime(format!("{}: no result; please report this", inst.name())))?)
    }

    /// The instance that a call led to before.
    pub(crate) fn known(&self, key: &Key) -> Option<Shared<Inst>> {
        self.instances.known(key)
    }

    /// The instance of a kind, to be found by the key from now on.
    pub(crate) fn learn(&mut self, key: &Key, kind: Kind) -> Result<Shared<Inst>, Refusal> {
        self.instances.learn(key, kind)
    }

    /// A 0-d number as an operand. Numbers that come again are not uploaded again.
    pub(crate) fn number(&mut self, dtype: DType, bytes: &[u8]) -> Arc<Value> {
        let mut bits = [0; 16];
        bits[..bytes.len()].copy_from_slice(bytes);
        if self.numbers.len() >= MAX_NUMBERS {
            self.numbers.clear();
        }
        let fresh = || Held::new(Value::scalar(dtype, bytes));
        let value = self.numbers.entry((dtype, bits)).or_insert_with(fresh).value().clone();
        if self.tape.is_some() {
            self.note_number(&value);
        }
        value
    }

    /// A list of numbers as an operand. In functions that are noted equal ones are one value, as runs of one are compared.
    pub(crate) fn list_of_numbers(&mut self, ty: &TensorType, bytes: Box<[u8]>) -> Arc<Value> {
        let fresh = |bytes| Value::new(ty.clone(), State::Host(bytes));
        if self.tape.is_none() {
            return fresh(bytes);
        }
        if self.lists.len() >= MAX_NUMBERS {
            self.lists.clear();
        }
        let entry = self.lists.entry((ty.dtype, bytes.clone()));
        let value = entry.or_insert_with(|| Held::new(fresh(bytes))).value().clone();
        self.note_number(&value);
        value
    }

    /// The value of a storage; one that was never written holds zeros.
    pub(crate) fn slot_value(
        &mut self,
        slot: &Slot,
        dtype: DType,
        sizes: &[i64],
    ) -> Result<Arc<Value>, Refusal> {
        if let Some(value) = slot.value() {
            return Ok(value);
        }
        let whole = TensorType::new(dtype, sizes);
        let n = (slot.nbytes / dtype.size_bytes()) as i64;
        let ty = if whole.numel() == n { whole } else { TensorType::new(dtype, [n].as_slice()) };
        let value = self.apply(Kind::Zeros(ty), [])?;
        if !self.in_body() {
            slot.bind(value.clone()); // which may not be the body's
        }
        Ok(value)
    }

    /// The bytes of a storage as a value of another dtype, which it holds from now on: copies of storages are bytes. None
    /// where the dtype is the same, or the size is not.
    pub(crate) fn retyped(
        &mut self,
        slot: &Slot,
        value: &Arc<Value>,
        to: &TensorType,
    ) -> Result<Option<Arc<Value>>, Refusal> {
        if value.ty.dtype == to.dtype || value.ty.bytes() != to.bytes() || value.sharding.is_some() {
            return Ok(None);
        }
        let new = self.apply(Kind::Resize { from: value.ty.clone(), to: to.clone() }, [value.clone()])?;
        slot.bind(new.clone());
        Ok(Some(new))
    }

    /// The value that a device tensor shows.
    pub(crate) fn read(&mut self, slot: &Slot, t: &TensorRef<'_>) -> Result<Arc<Value>, Refusal> {
        let base = self.slot_value(slot, t.dtype()?, t.sizes)?;
        if t.is_whole() && Some(base.ty.dtype) == t.dtype && base.ty.shape.as_slice() == t.sizes {
            return Ok(base);
        }
        self.access(Access::Read, &t.view()?, [base])
    }

    /// The number of a way to cut values; 0 is none.
    pub(crate) fn sharding_number(&mut self, sharding: &Sharded) -> u32 {
        let Some(sharding) = sharding else { return 0 };
        let next = self.shardings.len() as u32 + 1;
        *self.shardings.entry(sharding.clone()).or_insert(next)
    }

    /// A value, cut so over the devices of a mesh.
    pub(crate) fn reshard(&mut self, value: Arc<Value>, to: &Arc<Sharding>) -> Result<Arc<Value>, Refusal> {
        if value.sharding.as_ref() == Some(to) || value.sharding.is_none() && to.is_replicated() {
            return Ok(value);
        }
        self.apply(Kind::Reshard { from: value.ty.clone(), to: to.clone() }, [value])
    }

    /// A value in another dtype.
    pub(crate) fn cast(&mut self, value: Arc<Value>, to: DType) -> Result<Arc<Value>, Refusal> {
        if value.ty.dtype == to {
            return Ok(value);
        }
        self.apply(Kind::Cast { from: value.ty.clone(), to }, [value])
    }

    /// Makes a device tensor show `value`, which has the tensor's type in logical order.
    pub(crate) fn write(&mut self, slot: &Slot, t: &TensorRef<'_>, value: Arc<Value>) -> Result<(), Refusal> {
        let n = t.numel();
        if n == 0 {
            return Ok(());
        }
        if self.is_around(slot) {
            self.leave("to write to a tensor that it is not given")?;
        }
        let covers = n as usize * t.dtype()?.size_bytes() == slot.nbytes;
        if covers && t.is_whole() {
            slot.bind(value);
            return Ok(());
        }
        let view = t.view()?;
        if covers
            && view.offset == 0
            && view.is_plain()
            && let Some(order) = dense_order(&view.sizes, &view.strides)
        {
            let kind = Kind::Store { from: value.ty.clone(), order };
            slot.bind(self.apply(kind, [value])?);
            return Ok(());
        }
        let base = self.slot_value(slot, view.dtype, &view.sizes)?;
        slot.bind(self.access(Access::Write, &view, [base, value])?);
        Ok(())
    }
}
