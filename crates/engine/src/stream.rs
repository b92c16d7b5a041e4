//! The op stream of a device: ops are recorded into a window, and a flush turns the window into a launch.

use crate::config::{Limits, Mode, Remembered, Switches};
use crate::error::{self, Error, Refusal, Result};
use crate::events::{self};
use crate::executor::Executor;
use crate::explain::Explainer;
use crate::inst::{Inst, Kind};
use crate::launch::{Launcher, out_of_memory};
use crate::mark::{Mark, Note};
use crate::memory::Memory;
use crate::metrics::{DeviceReport, Metrics};
use crate::picked;
use crate::program::Compiler;
use crate::site::Site;
use crate::spread::{Devices, Place, Sharded};
use crate::strided::row_major;
use crate::target::Target;
use crate::tensor::TensorRef;
use crate::threads::{Whose, settle};
use crate::value::{Held, Slot, State, Value};
use crate::view::View;
use crate::window::{LEAST_APART, Window};
use crate::work::{Interrupt, Work};
use oxitorch_aten::TargetOptions;
use oxitorch_capture::Reason;
use oxitorch_hlo::{DType, TensorType};
use oxitorch_pjrt::{self as pjrt, Platform};
use parking_lot::{Mutex, MutexGuard};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

/// The stream of one device.
pub struct Stream {
    /// Its number for the user: `tpu:0`.
    pub(crate) device: u16,
    /// The device's place in the client.
    pub(crate) at: usize,
    /// Of a mesh.
    pub(crate) devices: Option<Arc<Devices>>,
    target: Target,
    /// What the platform's compiler wants of lowerings.
    pub(crate) wanted: TargetOptions,
    pub(crate) compiler: Arc<Compiler>,
    pub(crate) explainer: Arc<Explainer>,
    /// What runs programs: the launcher, or a device that is not there.
    pub(crate) executor: Arc<dyn Executor>,
    pub(crate) launcher: Arc<Launcher>,
    memory: &'static Memory,
    metrics: Arc<Metrics>,
    interrupt: Interrupt,
    window: Mutex<Window>,
}

impl Stream {
    pub(crate) fn new(
        target: Target,
        place: Place,
        compiler: Arc<Compiler>,
        explainer: Arc<Explainer>,
        memory: &'static Memory,
        metrics: Arc<Metrics>,
        interrupt: Interrupt,
    ) -> std::io::Result<Stream> {
        let launcher = Launcher::start(target.clone(), place.clone(), memory, metrics.clone())?;
        let limits = Limits::of(target.platform(), memory.total());
        let window = Mutex::new(Window::new(limits));
        let Place { number, at, devices, .. } = place;
        let executor = launcher.clone();
        Ok(Stream {
            device: number as u16,
            at,
            devices,
            target,
            wanted: TargetOptions::NONE,
            executor,
            compiler,
            explainer,
            launcher,
            memory,
            metrics,
            interrupt,
            window,
        })
    }

    /// A stream of these devices together, which is to have this number.
    pub(crate) fn of_mesh(
        &self,
        number: usize,
        devices: Arc<Devices>,
        memory: &'static Memory,
    ) -> std::io::Result<Stream> {
        let (compiler, explainer) = (self.compiler.clone(), self.explainer.clone());
        let (target, metrics) = (self.target.clone(), self.metrics.clone());
        let lanes = self.launcher.groups.lanes();
        let place = Place { number, at: number, devices: Some(devices), lanes };
        let stream = Self::new(target, place, compiler, explainer, memory, metrics, self.interrupt)?;
        // Kernels of the host see one device.
        Ok(stream.lowering_for(TargetOptions { library: false, ..self.wanted }))
    }

    /// For a compiler that wants this of lowerings.
    pub(crate) fn lowering_for(self, wanted: TargetOptions) -> Stream {
        Stream { wanted, ..self }
    }

    /// With something else than the launcher to run programs.
    pub(crate) fn on(self, executor: Arc<dyn Executor>) -> Stream {
        Stream { executor, ..self }
    }

    /// The device's memory.
    pub fn memory(&self) -> &'static Memory {
        self.memory
    }

    /// What the plugin counts of the device's memory, if it does.
    pub fn plugin_memory(&self) -> Result<Option<pjrt::MemoryStats>> {
        let Target::Client(client) = &self.target else { return Ok(None) };
        let Some(device) = client.devices().get(self.at).filter(|_| self.devices.is_none()) else {
            return Ok(None);
        }; // a mesh
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
        settle();
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
        if self.launcher.is_idle() { Ok(()) } else { self.wait_all() }
    }

    /// Waits until the device has reached this point, and tasks of other processes that were begun before it are done.
    fn wait_all(&self) -> Result<()> {
        self.launcher.wait_for_device(self.interrupt)?;
        self.wait(&self.launcher.awaited_mark())
    }

    /// Waits for everything, and raises the first failure that nobody has seen.
    pub fn synchronize(&self, site: Site) -> Result<()> {
        self.cut(Reason::Wait, site)?;
        self.wait_all()?;
        self.launcher.take_failure().map_or(Ok(()), Err)
    }

    /// Waits for everything; failures stay for who reads their values.
    pub(crate) fn rest(&self, site: Site) -> Result<()> {
        self.cut(Reason::Wait, site)?;
        self.wait_all()
    }

    /// Whether everything that the running thread recorded has been launched; whoever asks wants it to be.
    pub fn is_idle(&self, site: Site) -> Result<bool> {
        self.flush(&mut self.lock(site), Reason::Wait)?;
        Ok(self.launcher.is_idle())
    }

    /// A mark at the end of the queue, after what the running thread recorded.
    pub fn mark(&self, site: Site) -> Result<Arc<Mark>> {
        events::here(site);
        self.flush(&mut self.lock(site), Reason::Wait)?;
        Ok(self.launcher.mark())
    }

    /// A mark after what the running thread recorded, which launches nothing. Within a program it is taken to be where as
    /// many of the ops are over as were recorded before.
    pub fn note(&self, site: Site) -> Arc<Mark> {
        let mut w = self.lock(site);
        let (note, mark) = Note::new(false);
        match w.own_ops() {
            0 => self.launcher.pass(note),
            ops => w.thread.notes.push((ops, note)),
        }
        mark
    }

    /// A mark after all collectives so far, and what is launched; it launches nothing.
    pub fn note_collectives(&self) -> Arc<Mark> {
        let (note, mark) = Note::new(true);
        self.launcher.pass(note);
        mark
    }

    /// Waits for a mark, unless what it is in is not launched.
    pub fn wait(&self, mark: &Mark) -> Result<()> {
        if mark.job() == 0 {
            return Ok(());
        }
        self.launcher.wait(mark.job(), self.interrupt)?;
        let start = Instant::now();
        if mark.wait(self.interrupt)? {
            self.launcher.waited(start);
        }
        let start = Instant::now();
        let works = mark.works();
        for work in works.iter().filter(|work| work.finished().is_none()) {
            work.wait(None, self.interrupt)?; // what went wrong is its values'
            self.launcher.waited(start);
        }
        Ok(())
    }

    /// Waits for a task, but not beyond `until`; what came of it, if it is done.
    pub fn wait_for(&self, work: &Work, until: Option<Instant>) -> Result<Option<Result<()>>> {
        let start = Instant::now();
        let outcome = work.wait(until, self.interrupt);
        if until.is_none_or(|until| until > start) {
            self.metrics().waited_for(work.about().name, start.elapsed());
        }
        outcome
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
        let apart = self.platform() != Platform::Cpu && held.value().whole_bytes() > least;
        let held = {
            let mut w = self.lock(site);
            w.leave("a value that the host reads")?;
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
        if view.dtype == DType::S64 && out.len() == 8 {
            let number = out.iter().rev().fold(0, |n, &byte| n << 8 | i64::from(byte));
            self.window.lock().counts.add_number(number);
        }
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
        let is_whole = out.len() as u64 == value.whole_bytes() && view.strides == row_major(&view.sizes);
        let through = |out: &mut [u8], copy: &mut dyn FnMut(&mut [u8]) -> Result<()>| -> Result<()> {
            if is_whole {
                return copy(out);
            }
            let mut all = vec![0; value.whole_bytes() as usize];
            copy(&mut all)?;
            pick(&all, out);
            Ok(())
        };
        let buffers = {
            self.launcher.wait_coming(value, self.interrupt)?;
            let state = value.state.lock();
            match &*state {
                State::Ready(b) => b.clone(),
                State::Absent(bytes) => {
                    let bytes = bytes.clone();
                    drop(state); // launches take the log first
                    return through(out, &mut |all| self.executor.read_absent(value, bytes.as_deref(), all));
                }
                State::Host(bytes) => {
                    pick(bytes, out);
                    return Ok(());
                }
                State::Failed(e) => {
                    self.launcher.seen(e);
                    return Err(e.clone());
                }
                State::Pending | State::Coming(_) | State::Donated => {
                    return Err(Error::runtime(
                        "a value was read before it was computed; please report this",
                    ));
                }
            }
        };
        self.launcher.wait_buffers(value, &buffers, self.interrupt)?;
        let start = Instant::now();
        let failed = |e: pjrt::Error| {
            self.launcher.seen_launch(value.launch.load(Relaxed));
            error::device("copy to the host", &e).at(value.site)
        };
        let looked = buffers.whole().map_or(Ok(None), |whole| whole.look(|bytes| pick(bytes, out)));
        if looked.map_err(failed)?.is_none() {
            through(out, &mut |all| buffers.to_host(&value.ty, all).map_err(failed))?;
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
        self.write_value(tensor, None, bytes, site, mode)
    }

    /// As [`Stream::write_host`], cut over the devices of a mesh.
    pub(crate) fn write_value(
        &self,
        tensor: &TensorRef<'_>,
        sharding: Sharded,
        bytes: &[u8],
        site: Site,
        mode: Mode,
    ) -> Result<(), Refusal> {
        self.let_go_before_upload(site)?;
        let value = self.upload_sharded(tensor.ty()?, sharding, bytes).map_err(|e| e.at(site))?;
        let mut w = self.lock(site);
        self.make_room_for_upload(&mut w, site)?;
        w.note_upload(&value, bytes);
        self.note_sizes(&mut w, &value, site);
        w.write(tensor.device()?, tensor, value)?;
        self.end_call(&mut w, mode)?;
        Ok(())
    }

    /// Notes which sizes of what was copied from the host are other ones in most copies. Where memory is not the host's,
    /// programs for many sizes would have them padded by way of it.
    fn note_sizes(&self, w: &mut Window, value: &Value, site: Site) {
        if self.devices.is_none() && self.target().platform() == Platform::Cpu && site != Site::default() {
            value.set_counts(&w.sizes_of_copy(site, &value.ty.shape));
        }
    }

    /// Before a copy from the host: launches what holds too much, and waits until it is gone.
    fn let_go_before_upload(&self, site: Site) -> Result<()> {
        let mut w = self.lock(site);
        self.end_step(&mut w)?;
        if !w.is_watched() && w.holds_too_much_for_upload() {
            self.flush(&mut w, Reason::Bytes)?;
        }
        drop(w);
        self.launcher.wait_until_free(self.interrupt)
    }

    /// A value from host memory.
    pub(crate) fn upload(&self, ty: TensorType, bytes: &[u8]) -> Result<Arc<Value>> {
        self.upload_sharded(ty, None, bytes)
    }

    fn upload_sharded(&self, ty: TensorType, sharding: Sharded, bytes: &[u8]) -> Result<Arc<Value>> {
        let size = ty.bytes().max(0) as u64 / sharding.as_ref().map_or(1, |s| s.parts() as u64);
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
        let value = self.executor.upload(ty, sharding, bytes, first)?;
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
        self.let_go_before_upload(site)?;
        let mut value = self.upload(src.ty()?, bytes).map_err(|e| e.at(site))?;
        let mut w = self.lock(site);
        self.make_room_for_upload(&mut w, site)?;
        w.note_upload(&value, bytes);
        self.note_sizes(&mut w, &value, site);
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
        switches: &Switches,
    ) -> Result<(), Refusal> {
        let mut w = self.lock(site);
        self.make_room(&mut w, site, switches)?;
        let value = w.read(src.device()?, src)?;
        let value = w.cast(value, dst.dtype()?)?;
        w.write(dst.device()?, dst, value)?;
        self.end_call(&mut w, switches.mode)?;
        Ok(())
    }
}
