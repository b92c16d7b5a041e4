//! The door between C++ and Rust: every function that the shim may call.
//!
//! Each one catches panics, turns errors into a code and a message, and keeps what it returns pointers to until the same
//! thread calls again.

use crate::abi::{self, Arg, ERROR, FALLBACK, OK, Reply, Tensor, device, flag, out, slice, tag};
use crate::state::{self, State};
use crate::storage;
use oxitorch_aten::args::Number;
use oxitorch_aten::dtype;
use oxitorch_aten::sparse::{Layout, Server, server};
use oxitorch_engine::{
    ArgRef, Call, Error, ErrorKind, Express, Meta, Op, Output, Outputs, Place, Plain, Recipe, Refusal, Slot,
    TensorRef,
};
use smallvec::SmallVec;
use std::cell::{Cell, RefCell};
use std::ffi::{CStr, CString, c_char, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::{null, null_mut};
use std::sync::Arc;

mod bodies;
pub(crate) mod decomposed;
mod devices;
mod graphs;
pub(crate) use graphs::{bounded, numbered, prepare, replay_held};
mod tasks;

/// The table that the shim gets.
pub(crate) static CORE: abi::Core = abi::Core {
    abi_version: abi::ABI_VERSION,
    bind,
    warns_of_expanded,
    knows,
    sparse,
    dispatch,
    fallback,
    alloc,
    drop_slot,
    address,
    find,
    resized,
    kept_as,
    write,
    read,
    copy,
    pad,
    device_count: devices::device_count,
    check_device: devices::check_device,
    synchronize: devices::synchronize,
    is_idle: devices::is_idle,
    event_record: devices::event_record,
    event_note: devices::event_note,
    event_query: devices::event_query,
    event_wait: devices::event_wait,
    event_elapsed_ms: devices::event_elapsed_ms,
    event_drop: devices::event_drop,
    memory: devices::memory,
    memory_info: devices::memory_info,
    reset_peak: devices::reset_peak,
    reset_accumulated: devices::reset_accumulated,
    interrupted_by: devices::interrupted_by,
    watch: graphs::watch,
    watched: graphs::watched,
    replay: graphs::replay,
    trace: graphs::trace,
    trace_also: graphs::trace_also,
    traced: graphs::traced,
    untrace: graphs::untrace,
    trace_pause: graphs::trace_pause,
    body_begin: bodies::begin,
    body_end: bodies::end,
    body_drop: bodies::drop,
    control: bodies::control,
    decomposable: decomposed::decomposable,
    decomposed: decomposed::decomposed,
    group: tasks::group,
    group_drop: tasks::drop_group,
    group_number: tasks::group_number,
    task: tasks::task,
    are_programs: tasks::are_programs,
    collective: tasks::collective,
    task_outcome: tasks::outcome,
    task_number: tasks::number,
    task_drop: tasks::drop_work,
    profile_start: crate::profile::start,
    profile_stop: crate::profile::stop,
};

/// What this thread's last call returned pointers to.
#[derive(Default)]
struct Kept {
    message: CString,
    outs: Vec<abi::Out>,
    /// These own the sizes and strides that `outs` point at.
    metas: SmallVec<[Meta; 4]>,
    recipe: Option<Arc<Recipe>>,
}

thread_local! {
    static KEPT: RefCell<Kept> = RefCell::default();
    /// Owns the sizes and strides of a call's only result.
    static LAST: Cell<Option<Meta>> = const { Cell::new(None) };
    /// Why the call that was refused last has no lowering; who refused it goes to the CPU with it at once.
    static NOT_LOWERED: Cell<Option<String>> = const { Cell::new(None) };
}

fn keep_message(text: &str) -> *const c_char {
    let clean = text.replace('\0', " ");
    KEPT.with_borrow_mut(|k| {
        k.message = CString::new(clean).unwrap_or_default();
        k.message.as_ptr()
    })
}

fn report(error: &mut abi::Error, e: &Error) {
    error.kind = match e.kind {
        ErrorKind::Runtime => abi::error::RUNTIME,
        ErrorKind::Index => abi::error::INDEX,
        ErrorKind::Type => abi::error::TYPE,
        ErrorKind::Value => abi::error::VALUE,
        ErrorKind::NotImplemented => abi::error::NOT_IMPLEMENTED,
        ErrorKind::OutOfMemory => abi::error::OUT_OF_MEMORY,
        ErrorKind::Interrupted => abi::error::INTERRUPTED,
        ErrorKind::LinAlg => abi::error::LINALG,
    };
    error.message = keep_message(&e.message);
}

/// Moves a generator on, or the device's default one; its seed, and its offset before. Who says which one keeps it.
fn draw(s: &State, device: i32, generator: Option<usize>, blocks: u64) -> (u64, u64) {
    let (mut seed, mut offset) = (0, 0);
    let generator = generator.unwrap_or(0) as *mut c_void;
    // SAFETY: the caller names a generator that is there, or none.
    unsafe { (s.shim.rng_advance)(generator, device, blocks, &mut seed, &mut offset) };
    (seed, offset)
}

/// Runs `f` with the state; panics become errors.
fn enter<T>(f: impl FnOnce(&'static State) -> Result<T, Refusal>) -> Result<T, Refusal> {
    let result = guarded(|| f(state::get()?));
    if let Some(s) = state::started() {
        s.engine.linger(); // whatever came of it: where it returns to, the GIL is wanted
    }
    result
}

/// What `f` gives; a panic is an error.
fn guarded<T>(f: impl FnOnce() -> Result<T, Refusal>) -> Result<T, Refusal> {
    catch_unwind(AssertUnwindSafe(f)).unwrap_or_else(|panic| {
        let text =
            panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
        let text = text.unwrap_or("no message");
        Err(Error::runtime(format!("oxitorch has a bug, please report it: {text}")).into())
    })
}

/// As [`enter`], with the outcome as a code.
fn enter_code(error: *mut abi::Error, f: impl FnOnce(&'static State) -> Result<(), Refusal>) -> i32 {
    code(error, enter(f))
}

fn code(error: *mut abi::Error, outcome: Result<(), Refusal>) -> i32 {
    match outcome {
        Ok(()) => OK,
        Err(refusal) => {
            let e = match refusal {
                Refusal::Error(e) => e,
                Refusal::Fallback(why) => Error::new(ErrorKind::NotImplemented, why),
            };
            // SAFETY: the shim passes an error to fill.
            report(unsafe { &mut *error }, &e);
            ERROR
        }
    }
}

// ---------------------------------------------------------------- arguments

/// # Safety
/// `t` is a tensor that the shim described, alive during `'a`.
unsafe fn tensor<'a>(t: &Tensor) -> TensorRef<'a> {
    let n = t.ndim as usize;
    // SAFETY: sizes and strides are those of a live tensor.
    let (sizes, strides) = unsafe { (slice(t.sizes, n), slice(t.strides, n)) };
    let dtype = dtype::from_code(i64::from(t.dtype));
    let place = if t.flags & flag::UNDEFINED != 0 {
        Place::Undefined
    } else if t.device_type == device::SELF {
        // SAFETY: the slot of a live tensor.
        Place::Device(unsafe { storage::get(t.slot) })
    } else if t.device_type == device::CPU {
        let span: i64 = sizes.iter().zip(strides).map(|(n, s)| (n - 1) * s).sum::<i64>() + 1;
        let empty = sizes.contains(&0) || t.host.is_null();
        let bytes = if empty { 0 } else { span as usize * dtype.map_or(1, |d| d.size_bytes()) };
        // SAFETY: a CPU tensor's data, from its first to its last element.
        Place::Host(unsafe { slice(t.host.cast(), bytes) })
    } else {
        Place::Foreign
    };
    TensorRef {
        place,
        dtype,
        sizes,
        strides,
        offset: t.offset,
        contiguous: t.flags & flag::CONTIGUOUS != 0,
        wrapped: t.flags & flag::WRAPPED_NUMBER != 0,
        device: t.device_index,
        conj: t.flags & flag::CONJ != 0,
        neg: t.flags & flag::NEG != 0,
    }
}

/// # Safety
/// `a` is an argument that the shim laid out, alive during `'a`.
unsafe fn number(a: &Arg) -> Number {
    // SAFETY: the tag says which field is set.
    unsafe {
        match a.tag {
            tag::DOUBLE => Number::Float(a.u.d),
            tag::BOOL => Number::Bool(a.u.i != 0),
            tag::COMPLEX => Number::Complex(*a.u.doubles, *a.u.doubles.add(1)),
            _ => Number::Int(a.u.i),
        }
    }
}

/// # Safety
/// As for [`number`].
unsafe fn arg<'a>(a: &Arg) -> ArgRef<'a> {
    let n = a.len as usize;
    // SAFETY: the tag says which field is set, and lists have `len` entries.
    unsafe {
        match a.tag {
            tag::NONE => ArgRef::None,
            tag::TENSOR => ArgRef::Tensor(tensor(&*a.u.t)),
            tag::TENSORS => ArgRef::Tensors(slice(a.u.t, n).iter().map(|t| tensor(t)).collect()),
            tag::INT | tag::DOUBLE | tag::BOOL | tag::COMPLEX | tag::DEVICE => ArgRef::Number(number(a)),
            tag::INTS => ArgRef::Ints(slice(a.u.ints, n)),
            tag::DOUBLES => ArgRef::Floats(slice(a.u.doubles, n)),
            tag::BOOLS => ArgRef::Bools(slice(a.u.ints, n)),
            tag::STR => match std::str::from_utf8(slice(a.u.s.cast(), n)) {
                Ok(s) => ArgRef::Str(s),
                Err(_) => ArgRef::Other,
            },
            tag::GENERATOR => ArgRef::Generator(a.u.p as usize),
            tag::SCALARS => ArgRef::Numbers(slice(a.u.args, n).iter().map(|a| number(a)).collect()),
            _ => ArgRef::Other,
        }
    }
}

/// The argument, if it may go the short way.
///
/// # Safety
/// As for [`number`].
unsafe fn plainly<'a>(a: &Arg) -> Option<Plain<'a>> {
    // SAFETY: the tag says which field is set, and lists have `len` entries.
    unsafe {
        match a.tag {
            tag::TENSOR => plain_tensor(&*a.u.t),
            tag::INT | tag::DOUBLE | tag::BOOL | tag::COMPLEX | tag::DEVICE => Some(Plain::Number(number(a))),
            tag::NONE => Some(Plain::None),
            tag::INTS => Some(Plain::Ints(slice(a.u.ints, a.len as usize))),
            _ => None,
        }
    }
}

/// # Safety
/// As for [`tensor`].
unsafe fn plain_tensor<'a>(t: &Tensor) -> Option<Plain<'a>> {
    let dtype = dtype::from_code(i64::from(t.dtype))?;
    let n = t.ndim as usize;
    // SAFETY: a live tensor: its slot, sizes and strides, and its one element if it is 0-d and on the host.
    unsafe {
        if t.device_type == device::SELF && t.flags == flag::CONTIGUOUS && t.offset == 0 {
            let (sizes, strides) = (slice(t.sizes, n), slice(t.strides, n));
            return Some(Plain::Tensor { slot: storage::get(t.slot), dtype, sizes, strides });
        }
        let odd = flag::UNDEFINED | flag::CONJ | flag::NEG;
        if t.device_type == device::CPU && n == 0 && t.flags & odd == 0 && !t.host.is_null() {
            let bytes = slice(t.host.cast(), dtype.size_bytes());
            return Some(Plain::Host { dtype, bytes, wrapped: t.flags & flag::WRAPPED_NUMBER != 0 });
        }
    }
    None
}

// ---------------------------------------------------------------- ops

unsafe extern "C" fn knows(base: *const c_char) -> i32 {
    // SAFETY: a C string from the shim.
    let base = unsafe { CStr::from_ptr(base) };
    let known = catch_unwind(|| base.to_str().is_ok_and(oxitorch_aten::derive::may_serve));
    i32::from(known.unwrap_or(false))
}

unsafe extern "C" fn sparse(layout: i32, overload: *const c_char) -> i32 {
    // SAFETY: a C string from the shim.
    let overload = unsafe { CStr::from_ptr(overload) };
    let layout = match layout {
        0 => Layout::Strided,
        1 => Layout::Coo,
        _ => Layout::Compressed,
    };
    match overload.to_str().ok().and_then(|name| server(layout, name)) {
        None => 0,
        Some(Server::Shared) => 1,
        Some(Server::Python) => 2,
    }
}

/// Ops stay for ever: libraries that are imported later bring more of them.
unsafe extern "C" fn bind(schema: *const c_char, composite: i32) -> *const c_void {
    // SAFETY: a C string from the shim.
    let schema = unsafe { CStr::from_ptr(schema) };
    let bound = catch_unwind(|| {
        let op = schema.to_str().ok().and_then(|text| crate::ops::bind(text, composite != 0));
        op.map_or(null(), |op| std::ptr::from_ref::<Op>(Box::leak(Box::new(op))).cast())
    });
    bound.unwrap_or(null())
}

/// The text stays for ever: the shim asks once for each op that it binds.
unsafe extern "C" fn warns_of_expanded(op: *const c_void) -> *const c_char {
    // SAFETY: what `bind` returned.
    let text = unsafe { &*op.cast::<Op>() }.warns_of_expanded();
    text.and_then(|text| CString::new(text).ok()).map_or(null(), |text| text.into_raw().cast_const())
}

unsafe extern "C" fn dispatch(
    op: *const c_void,
    device: i32,
    args: *const Arg,
    nargs: u32,
    reply: *mut Reply,
) -> i32 {
    // SAFETY: the shim passes what `bind` returned, a reply to fill and `nargs` arguments that live during the call.
    let (op, reply, args) = unsafe { (&*op.cast::<Op>(), &mut *reply, slice(args, nargs as usize)) };
    match enter(|s| run(s, op, device, args, reply)) {
        Ok(()) => OK,
        Err(Refusal::Fallback(why)) => {
            NOT_LOWERED.set(Some(why));
            FALLBACK
        }
        Err(Refusal::Error(e)) => {
            report(&mut reply.error, &e);
            ERROR
        }
    }
}

fn run(
    s: &'static State,
    op: &'static Op,
    device: i32,
    args: &[Arg],
    reply: &mut Reply,
) -> Result<(), Refusal> {
    let (site, switches) = (crate::sites::here(), s.switches(op.has_products()));
    let ordinal = device.max(0) as u16;
    // SAFETY: the arguments live during this call.
    let plain = args.iter().map(|a| unsafe { plainly(a) });
    let short = s.engine.express(&Express { device: ordinal, op, site, switches }, plain);
    let failure = match short {
        Some(Ok((slot, meta))) => {
            keep_only(slot, meta, device, reply);
            return Ok(());
        }
        Some(Err(e)) => Some(e),
        None => None,
    };
    // SAFETY: as above.
    let refs: SmallVec<[ArgRef<'_>; 6]> = args.iter().map(|a| unsafe { arg(a) }).collect();
    // Generators that the shim passed in this call.
    let rng = |generator: Option<usize>, blocks: u64| draw(s, device, generator, blocks);
    let call = Call { device: ordinal, op, args: &refs, rng: &rng, site, switches, size: None };
    if let Some(e) = failure {
        return Err(call.explain(e));
    }
    let mut outputs = Outputs::new();
    s.engine.dispatch(&call, &mut outputs)?;
    keep_outputs(outputs, device, reply);
    Ok(())
}

/// Lays the only result out for the shim.
fn keep_only(slot: Slot, meta: Meta, device: i32, reply: &mut Reply) {
    reply.only = abi::Out { kind: out::NEW, device_index: device, ..abi::Out::default() };
    fill_new(&mut reply.only, slot, &meta);
    if !meta.is_for_ever() {
        LAST.set(Some(meta));
    }
    reply.outs = &raw const reply.only;
    reply.nouts = 1;
}

/// Lays results out for the shim.
fn keep_outputs(mut outputs: Outputs, device: i32, reply: &mut Reply) {
    if let [Output::New(..)] = outputs.as_slice()
        && let Some(Output::New(slot, meta)) = outputs.pop()
    {
        return keep_only(slot, meta, device, reply);
    }
    KEPT.with_borrow_mut(|k| {
        k.outs.clear();
        k.metas.clear();
        for output in outputs {
            let mut o = abi::Out { device_index: device, ..abi::Out::default() };
            match output {
                Output::New(slot, meta) => {
                    o.kind = out::NEW;
                    fill_new(&mut o, slot, &meta);
                    k.metas.push(meta);
                }
                Output::Resized { arg, slot, meta } => {
                    o.kind = out::RESIZED;
                    o.arg = arg as i32;
                    fill_new(&mut o, slot, &meta);
                    k.metas.push(meta);
                }
                Output::Arg(p) => {
                    o.kind = out::ARG;
                    o.arg = p as i32;
                }
                Output::ArgItem(p, i) => {
                    o.kind = out::ARG_ITEM;
                    o.arg = p as i32;
                    o.item = i as i32;
                }
                Output::Undefined => o.kind = out::UNDEFINED,
                Output::List(n) => {
                    o.kind = out::LIST;
                    o.arg = n as i32;
                }
            }
            k.outs.push(o);
        }
        reply.outs = k.outs.as_ptr();
        reply.nouts = k.outs.len() as u32;
    });
}

/// The caller keeps `meta` for as long as the shim reads the sizes.
fn fill_new(o: &mut abi::Out, slot: Slot, meta: &Meta) {
    let (ty, strides) = (meta.ty(), meta.strides());
    o.dtype = dtype::code(ty.dtype) as i16;
    o.contiguous = u8::from(meta.is_contiguous());
    o.ndim = ty.shape.len() as i32;
    o.nbytes = slot.nbytes as i64;
    o.sizes = ty.shape.as_ptr();
    o.strides = strides.as_ptr();
    o.slot = storage::into_raw(slot);
}

unsafe extern "C" fn fallback(name: *const c_char, warn: *mut *const c_char, error: *mut abi::Error) -> i32 {
    enter_code(error, |s| {
        // SAFETY: a C string from the shim.
        let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
        if let Some(text) = s.fall_back(&name, NOT_LOWERED.take(), crate::sites::here())? {
            // SAFETY: the shim passes a place for the message.
            unsafe { *warn = keep_message(&text) };
        }
        Ok(())
    })
}

// ---------------------------------------------------------------- storages

unsafe extern "C" fn alloc(nbytes: usize, device: i32, error: *mut abi::Error) -> *mut c_void {
    let mut raw = null_mut();
    enter_code(error, |s| {
        let stream = s.engine.stream(device.max(0) as usize)?;
        if !stream.memory().has(nbytes as u64) {
            return Err(stream.out_of_memory(nbytes as u64).at(crate::sites::here()).into());
        }
        raw = storage::into_raw(Slot::new(nbytes, device.max(0) as u16));
        Ok(())
    });
    raw
}

unsafe extern "C" fn drop_slot(raw: *mut c_void) {
    if state::is_forked() {
        return; // locks may be held by threads that do not exist here; the parent owns the memory
    }
    // A destructor that panics would abort.
    // SAFETY: the shim drops each storage once.
    let _ = catch_unwind(|| unsafe { storage::drop_raw(raw) });
}

unsafe extern "C" fn address(raw: *mut c_void) -> usize {
    // SAFETY: a live storage.
    unsafe { storage::address(raw) }
}

unsafe extern "C" fn find(address: usize, offset_bytes: *mut i64) -> *mut c_void {
    match storage::find(address) {
        Some((raw, offset)) => {
            // SAFETY: the shim passes a place for the offset.
            unsafe { *offset_bytes = offset };
            raw
        }
        None => null_mut(),
    }
}

unsafe extern "C" fn resized(raw: *mut c_void, nbytes: usize, error: *mut abi::Error) -> *mut c_void {
    let mut new = null_mut();
    enter_code(error, |s| {
        // SAFETY: a live storage.
        let slot = unsafe { storage::get(raw) };
        let stream = s.engine.stream(slot.device as usize)?;
        if !stream.memory().has(nbytes as u64) {
            return Err(stream.out_of_memory(nbytes as u64).at(crate::sites::here()).into());
        }
        new = storage::into_raw(stream.resized(
            slot,
            nbytes,
            crate::sites::here(),
            s.engine.switches().mode,
        )?);
        Ok(())
    });
    new
}

unsafe extern "C" fn kept_as(code: i32, itemsize: usize) -> i32 {
    dtype::kept_as(i64::from(code), itemsize).map_or(-1, |code| code as i32)
}

/// Bytes of a tensor's elements, row-major.
fn host_len(t: &TensorRef<'_>) -> usize {
    t.sizes.iter().product::<i64>() as usize * t.dtype.map_or(1, |d| d.size_bytes())
}

unsafe extern "C" fn write(dst: *const Tensor, host: *const c_void, error: *mut abi::Error) -> i32 {
    enter_code(error, |s| {
        // SAFETY: a described tensor, and host memory of its size.
        let (dst, bytes) = unsafe {
            let dst = tensor(&*dst);
            let n = host_len(&dst);
            (dst, slice(host.cast::<u8>(), n))
        };
        let slot = dst.device()?;
        s.engine.stream(slot.device as usize)?.write_host(
            &dst,
            bytes,
            crate::sites::here(),
            s.engine.switches().mode,
        )
    })
}

unsafe extern "C" fn read(src: *const Tensor, host: *mut c_void, error: *mut abi::Error) -> i32 {
    enter_code(error, |s| {
        // SAFETY: a described tensor.
        let src = unsafe { tensor(&*src) };
        let slot = src.device()?;
        if src.numel() == 0 {
            return Ok(());
        }
        // SAFETY: host memory of the tensor's size, written by nobody else during the call.
        let out = unsafe { std::slice::from_raw_parts_mut(host.cast::<u8>(), host_len(&src)) };
        s.engine.stream(slot.device as usize)?.read_host(&src, out, crate::sites::here())
    })
}

unsafe extern "C" fn copy(src: *const Tensor, dst: *const Tensor, error: *mut abi::Error) -> i32 {
    enter_code(error, |s| {
        // SAFETY: described tensors.
        let (src, dst) = unsafe { (tensor(&*src), tensor(&*dst)) };
        let (from, to) = (src.device()?.device as usize, dst.device()?.device as usize);
        let site = crate::sites::here();
        if from == to {
            return s.engine.stream(from)?.copy(&src, &dst, site, &s.engine.switches());
        }
        // Between devices through the host.
        let mut bytes = vec![0; host_len(&src)];
        s.engine.stream(from)?.read_host(&src, &mut bytes, site)?;
        s.engine.stream(to)?.write_converted(&src, &bytes, &dst, site, s.engine.switches().mode)
    })
}

unsafe extern "C" fn pad(
    src: *const Tensor,
    dst: *const Tensor,
    fill: *const c_void,
    error: *mut abi::Error,
) -> i32 {
    let mut done = false;
    let rc = enter_code(error, |s| {
        // SAFETY: described tensors, and the bytes of an element.
        let (src, dst, fill) = unsafe {
            let dst = tensor(&*dst);
            let item = dst.dtype()?.size_bytes();
            (tensor(&*src), dst, slice(fill.cast::<u8>(), item))
        };
        let (stream, mode) = (s.engine.stream(dst.device()?.device as usize)?, s.engine.switches().mode);
        done = stream.pad(&src, &dst, fill, crate::sites::here(), mode)?;
        Ok(())
    });
    if rc == OK && !done { FALLBACK } else { rc }
}
