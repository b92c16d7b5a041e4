//! The op stream of a device: ops are recorded into a window, and a flush turns the window into a launch.

use crate::config::{Limits, Mode, Remembered};
use crate::error::{self, Error, Refusal, Result};
use crate::events::{self, Stamp};
use crate::explain::Explainer;
use crate::inst::{Access, Inst, Instances, Key, Kind, Out, row_major};
use crate::known::Programs;
use crate::launch::{Interrupt, Launcher, out_of_memory, upload};
use crate::memory::Memory;
use crate::metrics::Metrics;
use crate::ops::{Ops, PRODUCED};
use crate::picked;
use crate::program::Compiler;
use crate::report::DeviceReport;
use crate::shared::Shared;
use crate::site::Site;
use crate::split::Sequences;
use crate::tape::Tape;
use crate::target::Target;
use crate::tensor::TensorRef;
use crate::threads::{Others, Thread, Whose};
use crate::value::{Held, Slot, State, Value};
use crate::view::{View, dense_order};
use oxitorch_capture::Reason;
use oxitorch_hlo::{DType, TensorType};
use oxitorch_pjrt::{self as pjrt, Platform};
use parking_lot::{Mutex, MutexGuard};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

/// Values that are kept for their memory.
const MAX_SPARE: usize = 256;
/// Elsewhere than in host memory, views of storages of more bytes than this, and than four times theirs, are cut out there.
const LEAST_APART: u64 = 64 << 10;
/// Numbers that stay on the device, by dtype and bytes.
const MAX_NUMBERS: usize = 4096;

/// Ops recorded and not yet launched, and what was learned from earlier ones.
#[derive(Default)]
pub(crate) struct Window {
    pub(crate) instances: Instances,
    pub(crate) programs: Programs,
    pub(crate) sequences: Sequences,
    /// The number of the window that was launched in parts last.
    pub(crate) last_split: u64,
    numbers: FxHashMap<(DType, [u8; 16]), Held>,
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
        if self.tape.is_some() {
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
        Value::recorded(out.stored.clone(), mark, self.site, self.spare.pop())
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
    fn is_recorded(&self, value: &Value) -> bool {
        let mark = value.mark.load(Relaxed);
        (mark >> 32) as u32 == self.epoch && mark as u32 & PRODUCED != 0
    }

    /// The operand code of a value, if it is in this window.
    fn known_code(&self, value: &Value) -> Option<u32> {
        let mark = value.mark.load(Relaxed);
        ((mark >> 32) as u32 == self.epoch).then_some(mark as u32)
    }

    /// The operand code of a value in this window; makes it an input if it is not in it.
    fn code(&mut self, value: Arc<Value>) -> u32 {
        if let Some(code) = self.known_code(&value) {
            return code;
        }
        let code = self.inputs.len() as u32;
        value.mark.store(self.mark(code), Relaxed);
        self.inputs.push(value);
        code
    }

    /// The value that an operand code of this window means.
    pub(crate) fn value(&self, code: u32) -> Option<&Arc<Value>> {
        let at = (code & !PRODUCED) as usize;
        if code & PRODUCED == 0 { self.inputs.get(at) } else { self.produced.get(at)?.as_ref() }
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
        slot.bind(value.clone());
        Ok(value)
    }

    /// The value that a device tensor shows.
    pub(crate) fn read(&mut self, slot: &Slot, t: &TensorRef<'_>) -> Result<Arc<Value>, Refusal> {
        let base = self.slot_value(slot, t.dtype()?, t.sizes)?;
        let whole = t.contiguous && t.offset == 0 && !t.conj && !t.neg;
        if whole && Some(base.ty.dtype) == t.dtype && base.ty.shape.as_slice() == t.sizes {
            return Ok(base);
        }
        self.access(Access::Read, &t.view()?, [base])
    }

    /// A value in another dtype.
    fn cast(&mut self, value: Arc<Value>, to: DType) -> Result<Arc<Value>, Refusal> {
        if value.ty.dtype == to {
            return Ok(value);
        }
        self.apply(Kind::Cast { from: value.ty.clone(), to }, [value])
    }

    /// Makes a device tensor show `value`, which has the tensor's type in logical order.
    pub(crate) fn write(&mut self, slot: &Slot, t: &TensorRef<'_>, value: Arc<Value>) -> Result<(), Refusal> {
        let view = t.view()?;
        let n = view.numel();
        if n == 0 {
            return Ok(());
        }
        let covers = n as usize * view.dtype.size_bytes() == slot.nbytes;
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

/// The stream of one device.
pub struct Stream {
    pub(crate) device: u16,
    target: Target,
    pub(crate) compiler: Arc<Compiler>,
    pub(crate) explainer: Arc<Explainer>,
    pub(crate) launcher: Arc<Launcher>,
    memory: &'static Memory,
    metrics: Arc<Metrics>,
    interrupt: Interrupt,
    window: Mutex<Window>,
}

impl Stream {
    pub(crate) fn new(
        target: Target,
        device: usize,
        compiler: Arc<Compiler>,
        explainer: Arc<Explainer>,
        memory: &'static Memory,
        metrics: Arc<Metrics>,
        interrupt: Interrupt,
    ) -> std::io::Result<Stream> {
        let launcher = Launcher::start(target.clone(), device, memory, metrics.clone())?;
        let limits = Limits::of(target.platform(), memory.total());
        let window = Mutex::new(Window { epoch: 1, limits, ..Window::default() });
        let device = device as u16;
        Ok(Stream { device, target, compiler, explainer, launcher, memory, metrics, interrupt, window })
    }

    /// The device's memory.
    pub fn memory(&self) -> &'static Memory {
        self.memory
    }

    /// What the plugin counts of the device's memory, if it does.
    pub fn plugin_memory(&self) -> Result<Option<pjrt::MemoryStats>> {
        let Target::Client(client) = &self.target else { return Ok(None) };
        let device = &client.devices()[usize::from(self.device)];
        device.memory_stats().map_err(|e| Error::runtime(e.to_string()))
    }

    pub(crate) fn target(&self) -> &Target {
        &self.target
    }

    fn platform(&self) -> Platform {
        self.target.platform()
    }

    pub(crate) fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// The window, for a call of this line. What it records joins what is recorded; an empty window starts without
    /// compiler options.
    pub(crate) fn lock(&self, site: Site) -> MutexGuard<'_, Window> {
        let mut window = self.window.lock();
        window.site = site;
        window.enter();
        window
    }

    /// Launches what the running thread recorded; what all recorded, if somebody waits for the device.
    pub fn cut(&self, reason: Reason, site: Site) -> Result<()> {
        events::here(site);
        let whose = if reason == Reason::Wait { Whose::All } else { Whose::Own };
        self.flush_for(&mut self.lock(site), &whose, reason)
    }

    /// The bounds of a window that nobody set.
    pub fn default_limits(&self) -> Limits {
        Limits::of(self.target.platform(), self.memory.total())
    }

    /// The bounds of a window.
    pub fn limits(&self) -> Limits {
        self.window.lock().limits
    }

    /// Sets them.
    pub fn set_limits(&self, limits: Limits) {
        self.window.lock().limits = limits;
    }

    /// Refuses results that the device could never hold. Whether they fit now is seen when they are launched.
    pub(crate) fn refuse_huge(&self, inst: &Inst) -> Result<()> {
        if self.memory.has(inst.bytes) { Ok(()) } else { Err(self.out_of_memory(inst.bytes)) }
    }

    /// The error for so many bytes that do not fit.
    pub fn out_of_memory(&self, wanted: u64) -> Error {
        self.memory.count_oom();
        out_of_memory(self.memory, self.device as usize, wanted)
    }

    /// The device's memory, once everything recorded has been launched.
    pub fn settled_memory(&self, site: Site) -> Result<&'static Memory> {
        self.cut(Reason::Wait, site)?;
        self.launcher.wait(self.launcher.last(), self.interrupt)?;
        Ok(self.memory)
    }

    /// The end of a call: modes without windows launch what it recorded.
    pub(crate) fn end_call(&self, w: &mut Window, mode: Mode) -> Result<()> {
        if mode == Mode::Fused || w.is_watched() { Ok(()) } else { self.flush(w, Reason::Mode) }
    }

    /// After the window is unlocked: waits as the mode asks.
    pub(crate) fn after_op(&self, mode: Mode) -> Result<()> {
        if mode != Mode::Debug {
            return self.launcher.throttle(self.interrupt);
        }
        self.settle()?;
        self.launcher.take_failure_here().map_or(Ok(()), Err)
    }

    /// Waits until the device has run what was launched.
    fn settle(&self) -> Result<()> {
        self.launcher.wait(self.launcher.last(), self.interrupt)?;
        if self.launcher.is_idle() {
            Ok(())
        } else {
            self.launcher.wait(self.launcher.mark().0, self.interrupt)
        }
    }

    /// Waits for everything, and raises the first failure that nobody has seen.
    pub fn synchronize(&self, site: Site) -> Result<()> {
        self.cut(Reason::Wait, site)?;
        let (number, _) = self.launcher.mark();
        self.launcher.wait(number, self.interrupt)?;
        self.launcher.take_failure().map_or(Ok(()), Err)
    }

    /// Waits for everything; failures stay for who reads their values.
    pub(crate) fn rest(&self, site: Site) -> Result<()> {
        self.cut(Reason::Wait, site)?;
        let (number, _) = self.launcher.mark();
        self.launcher.wait(number, self.interrupt)
    }

    /// Whether everything that the running thread recorded has been launched; whoever asks wants it to be.
    pub fn is_idle(&self, site: Site) -> Result<bool> {
        self.flush(&mut self.lock(site), Reason::Wait)?;
        Ok(self.launcher.is_idle())
    }

    /// A mark at the end of the queue, after what the running thread recorded.
    pub fn mark(&self, site: Site) -> Result<(u64, Arc<crate::launch::Mark>)> {
        events::here(site);
        self.flush(&mut self.lock(site), Reason::Wait)?;
        Ok(self.launcher.mark())
    }

    /// Waits for a mark.
    pub fn wait(&self, number: u64) -> Result<()> {
        self.launcher.wait(number, self.interrupt)
    }

    /// Bounds what is remembered.
    pub(crate) fn remember(&self, most: Remembered) {
        let mut w = self.window.lock();
        w.programs.most = most.programs.max(2);
        w.instances.most = most.ops.max(2);
    }

    /// How the device stands.
    pub(crate) fn report(&self) -> DeviceReport {
        let (queued_launches, queued_ops) = self.launcher.queued();
        let bytes = self.memory.bytes();
        let (known_programs, known_ops) = {
            let w = self.window.lock();
            (w.programs.len(), w.instances.len())
        };
        DeviceReport {
            known_programs,
            known_ops,
            split: self.launcher.timing.split(),
            queued_launches,
            queued_ops,
            memory: bytes.current,
            memory_peak: bytes.peak,
            memory_limit: self.memory.limit(),
        }
    }

    pub(crate) fn reset_split(&self) {
        self.launcher.front.reset();
        self.launcher.timing.reset();
    }

    /// Somebody listens: it is noted when ops are recorded.
    pub(crate) fn stamp(&self) {
        self.window.lock().stamped = true;
    }

    pub(crate) fn hold(&self, on: bool) {
        self.launcher.hold(on);
    }

    /// What is queued will not be launched.
    pub(crate) fn discard(&self) {
        self.launcher.discard();
    }

    /// Ends the launch thread.
    pub(crate) fn stop(&self) {
        let number = self.launcher.stop();
        // Interrupts are for waits that a user asked for.
        let _ = self.launcher.wait(number, || Ok(()));
    }

    /// Copies a device tensor to row-major host memory. Where the storage can be reached, or is small, a view is picked
    /// out of it on the host, so that reading makes no program.
    pub fn read_host(&self, tensor: &TensorRef<'_>, out: &mut [u8], site: Site) -> Result<(), Refusal> {
        if tensor.numel() == 0 {
            return Ok(());
        }
        events::here(site);
        let (slot, view) = (tensor.device()?, tensor.view()?);
        self.metrics.to_host(out.len());
        let Some(mut held) = slot.held() else {
            out.fill(0);
            return Ok(());
        };
        let least = LEAST_APART.max(4 * out.len() as u64);
        let apart = self.platform() != Platform::Cpu && held.value().bytes() > least;
        let held = {
            let mut w = self.lock(site);
            w.spoil();
            if apart {
                held = Held::new(w.read(slot, tensor)?);
            }
            if w.is_recorded(held.value()) {
                self.flush_for(&mut w, &Whose::Value(held.value()), Reason::Read)?;
            }
            held
        };
        let whole =
            View { offset: 0, strides: row_major(&view.sizes), conj: false, neg: false, ..view.clone() };
        let view = if apart { whole } else { view };
        self.fetch_view(held.value(), &view, out)?;
        if view.neg {
            picked::negate(view.dtype, out);
        }
        if view.conj {
            picked::conjugate(view.dtype, out);
        }
        Ok(())
    }

    /// Waits for a value and copies it out.
    pub(crate) fn fetch(&self, value: &Arc<Value>, out: &mut [u8]) -> Result<()> {
        let sizes = value.ty.shape.clone();
        let strides = row_major(&sizes);
        let view = View { dtype: value.ty.dtype, sizes, strides, offset: 0, conj: false, neg: false };
        self.fetch_view(value, &view, out)
    }

    /// Waits for the value of a storage and copies the stored elements of a view of it out.
    fn fetch_view(&self, value: &Arc<Value>, view: &View, out: &mut [u8]) -> Result<()> {
        self.launcher.wait(value.launch.load(Relaxed), self.interrupt)?;
        let item = view.dtype.size_bytes();
        let pick = |bytes: &[u8], out: &mut [u8]| {
            picked::copy(bytes, item, &view.sizes, &view.strides, view.offset, out);
        };
        // Copies the whole value by other means, and picks.
        let is_whole = out.len() as u64 == value.bytes() && view.strides == row_major(&view.sizes);
        let through = |out: &mut [u8], copy: &mut dyn FnMut(&mut [u8]) -> Result<()>| -> Result<()> {
            if is_whole {
                return copy(out);
            }
            let mut all = vec![0; value.bytes() as usize];
            copy(&mut all)?;
            pick(&all, out);
            Ok(())
        };
        let buffer = {
            let state = value.state.lock();
            match &*state {
                State::Ready(b) => b.clone(),
                State::Absent(bytes) => {
                    let bytes = bytes.clone();
                    drop(state); // launches take the log first
                    return through(out, &mut |all| {
                        let absent = self.target.absent();
                        absent.into_iter().for_each(|a| a.read(value, bytes.as_deref(), all));
                        Ok(())
                    });
                }
                State::Host(bytes) => {
                    pick(bytes, out);
                    return Ok(());
                }
                State::Failed(e) => {
                    self.launcher.seen(e);
                    return Err(e.clone());
                }
                State::Pending | State::Donated => {
                    return Err(Error::runtime(
                        "a value was read before it was computed; please report this",
                    ));
                }
            }
        };
        self.launcher.wait_buffer(&buffer, self.interrupt)?;
        let start = Instant::now();
        let failed = |e: pjrt::Error| {
            self.launcher.seen_launch(value.launch.load(Relaxed));
            error::device("copy to the host", &e).at(value.site)
        };
        if buffer.look(|bytes| pick(bytes, out)).map_err(failed)?.is_none() {
            through(out, &mut |all| buffer.to_host(all).map_err(failed))?;
        }
        self.metrics.events.to_host(start, self.device, out.len());
        self.launcher.take_failed_check(value.launch.load(Relaxed)).map_or(Ok(()), Err)
    }

    /// Copies row-major host memory into a device tensor.
    pub fn write_host(
        &self,
        tensor: &TensorRef<'_>,
        bytes: &[u8],
        site: Site,
        mode: Mode,
    ) -> Result<(), Refusal> {
        if tensor.numel() == 0 {
            return Ok(());
        }
        events::here(site);
        let value = self.upload(tensor.ty()?, bytes).map_err(|e| e.at(site))?;
        let mut w = self.lock(site);
        if let Some(reason) = w.uploads(site) {
            self.flush(&mut w, reason)?;
        }
        w.note_upload(&value, bytes);
        w.write(tensor.device()?, tensor, value)?;
        self.end_call(&mut w, mode)?;
        Ok(())
    }

    /// A value from host memory.
    pub(crate) fn upload(&self, ty: TensorType, bytes: &[u8]) -> Result<Arc<Value>> {
        let size = ty.bytes().max(0) as u64;
        if !self.memory.fits(size) && self.memory.has(size) {
            // What is recorded or queued holds values that nobody else wants. Locked: this is part of an op.
            let unwatched = self.window.try_lock().filter(|w| !w.is_watched());
            unwatched.map_or(Ok(()), |mut w| self.flush_for(&mut w, &Whose::All, Reason::Wait))?;
            self.settle()?;
        }
        if !self.memory.fits(size) {
            return Err(self.out_of_memory(size));
        }
        self.metrics.to_device(bytes.len());
        // Locked: this is part of an op.
        let first = self.window.try_lock().is_some_and(|w| w.ops.is_empty());
        if let Some(absent) = self.target.absent() {
            let value = absent.uploaded(ty, bytes);
            self.memory.charge(size, &value.charge);
            return Ok(value);
        }
        let start = Instant::now();
        let buffer = upload(self.target.client()?, self.device as usize, &ty, bytes)?;
        self.launcher.front.copied(start, first);
        self.metrics.events.to_device(start, self.device, bytes.len());
        let value = Value::new(ty, State::Ready(Arc::new(buffer)));
        self.memory.charge(size, &value.charge);
        Ok(value)
    }

    /// Copies row-major host memory of `src`'s type into a device tensor of another dtype.
    pub fn write_converted(
        &self,
        src: &TensorRef<'_>,
        bytes: &[u8],
        dst: &TensorRef<'_>,
        site: Site,
        mode: Mode,
    ) -> Result<(), Refusal> {
        events::here(site);
        let mut value = self.upload(src.ty()?, bytes).map_err(|e| e.at(site))?;
        let mut w = self.lock(site);
        if let Some(reason) = w.uploads(site) {
            self.flush(&mut w, reason)?;
        }
        w.note_upload(&value, bytes);
        value = w.cast(value, dst.dtype()?)?;
        w.write(dst.device()?, dst, value)?;
        self.end_call(&mut w, mode)?;
        Ok(())
    }

    /// A storage of another size with the same bytes, cut or filled with zeros.
    pub fn resized(&self, slot: &Slot, nbytes: usize, site: Site, mode: Mode) -> Result<Slot, Refusal> {
        let Some(value) = slot.value() else { return Ok(Slot::new(nbytes, slot.device)) };
        if nbytes == 0 {
            return Ok(Slot::new(0, slot.device));
        }
        let item = value.ty.dtype.size_bytes();
        let dtype = if nbytes.is_multiple_of(item) { value.ty.dtype } else { DType::U8 };
        let to = TensorType::new(dtype, [(nbytes / dtype.size_bytes()) as i64].as_slice());
        let mut w = self.lock(site);
        let new = w.apply(Kind::Resize { from: value.ty.clone(), to }, [value])?;
        let slot = Slot::with(nbytes, slot.device, new);
        self.end_call(&mut w, mode)?;
        Ok(slot)
    }

    /// Copies one device tensor into another of the same shape on this device, converting dtypes.
    pub fn copy(
        &self,
        src: &TensorRef<'_>,
        dst: &TensorRef<'_>,
        site: Site,
        mode: Mode,
    ) -> Result<(), Refusal> {
        let mut w = self.lock(site);
        let value = w.read(src.device()?, src)?;
        let value = w.cast(value, dst.dtype()?)?;
        w.write(dst.device()?, dst, value)?;
        self.end_call(&mut w, mode)?;
        Ok(())
    }
}
