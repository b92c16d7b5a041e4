//! `csrc/oxitorch_abi.h` in Rust. Field meanings are documented there; sizes are checked below.

use std::ffi::{c_char, c_void};
use std::ptr::{null, null_mut};

/// The header's numbers, by its names.
#[allow(dead_code, reason = "the shim alone uses some")]
pub(crate) mod header {
    include!(concat!(env!("OUT_DIR"), "/constants.rs"));
}

/// `OXI_ABI_VERSION`
pub(crate) const ABI_VERSION: u32 = header::OXI_ABI_VERSION as u32;

/// `OxiArg::tag`
pub(crate) mod tag {
    use super::header;

    pub(crate) const NONE: u32 = header::OXI_NONE as u32;
    pub(crate) const TENSOR: u32 = header::OXI_TENSOR as u32;
    pub(crate) const TENSORS: u32 = header::OXI_TENSORS as u32;
    pub(crate) const INT: u32 = header::OXI_INT as u32;
    pub(crate) const DOUBLE: u32 = header::OXI_DOUBLE as u32;
    pub(crate) const BOOL: u32 = header::OXI_BOOL as u32;
    pub(crate) const COMPLEX: u32 = header::OXI_COMPLEX as u32;
    pub(crate) const INTS: u32 = header::OXI_INTS as u32;
    pub(crate) const DOUBLES: u32 = header::OXI_DOUBLES as u32;
    pub(crate) const BOOLS: u32 = header::OXI_BOOLS as u32;
    pub(crate) const STR: u32 = header::OXI_STR as u32;
    pub(crate) const GENERATOR: u32 = header::OXI_GENERATOR as u32;
    pub(crate) const DEVICE: u32 = header::OXI_DEVICE as u32;
    pub(crate) const SCALARS: u32 = header::OXI_SCALARS as u32;
}

/// `OxiTensor::flags`
pub(crate) mod flag {
    use super::header;

    pub(crate) const WRAPPED_NUMBER: u8 = header::OXI_WRAPPED_NUMBER as u8;
    pub(crate) const UNDEFINED: u8 = header::OXI_UNDEFINED as u8;
    pub(crate) const CONTIGUOUS: u8 = header::OXI_CONTIGUOUS as u8;
    pub(crate) const CONJ: u8 = header::OXI_CONJ as u8;
    pub(crate) const NEG: u8 = header::OXI_NEG as u8;
}

/// `OxiTensor::device_type`
pub(crate) mod device {
    use super::header;

    pub(crate) const CPU: u8 = header::OXI_DEVICE_CPU as u8;
    pub(crate) const SELF: u8 = header::OXI_DEVICE_SELF as u8;
}

/// `OxiOut::kind`
pub(crate) mod out {
    use super::header;

    pub(crate) const NEW: i32 = header::OXI_OUT_NEW;
    pub(crate) const ARG: i32 = header::OXI_OUT_ARG;
    pub(crate) const ARG_ITEM: i32 = header::OXI_OUT_ARG_ITEM;
    pub(crate) const RESIZED: i32 = header::OXI_OUT_RESIZED;
    pub(crate) const UNDEFINED: i32 = header::OXI_OUT_UNDEFINED;
    pub(crate) const LIST: i32 = header::OXI_OUT_LIST;
    pub(crate) const VIEW_ARG: i32 = header::OXI_OUT_VIEW_ARG;
    pub(crate) const VIEW_OUT: i32 = header::OXI_OUT_VIEW_OUT;
}

pub(crate) const OK: i32 = header::OXI_OK;
pub(crate) const FALLBACK: i32 = header::OXI_FALLBACK;
pub(crate) const ERROR: i32 = header::OXI_ERROR;
pub(crate) const PENDING: i32 = header::OXI_PENDING;

/// What came of a function that is to be one program.
pub(crate) mod traced {
    use super::header;

    pub(crate) const REFUSED: i32 = header::OXI_TRACED_REFUSED;
    pub(crate) const FUNCTION: i32 = header::OXI_TRACED_FUNCTION;
    pub(crate) const KEPT: i32 = header::OXI_TRACED_KEPT;
}

/// `OxiError::kind`
pub(crate) mod error {
    use super::header;

    pub(crate) const RUNTIME: i32 = header::OXI_ERR_RUNTIME;
    pub(crate) const INDEX: i32 = header::OXI_ERR_INDEX;
    pub(crate) const TYPE: i32 = header::OXI_ERR_TYPE;
    pub(crate) const VALUE: i32 = header::OXI_ERR_VALUE;
    pub(crate) const NOT_IMPLEMENTED: i32 = header::OXI_ERR_NOT_IMPLEMENTED;
    pub(crate) const OUT_OF_MEMORY: i32 = header::OXI_ERR_OUT_OF_MEMORY;
    pub(crate) const INTERRUPTED: i32 = header::OXI_ERR_INTERRUPTED;
    pub(crate) const LINALG: i32 = header::OXI_ERR_LINALG;
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Tensor {
    pub(crate) slot: *mut c_void,
    pub(crate) host: *const c_void,
    pub(crate) sizes: *const i64,
    pub(crate) strides: *const i64,
    pub(crate) offset: i64,
    pub(crate) ndim: i32,
    pub(crate) dtype: i16,
    pub(crate) device_type: u8,
    pub(crate) flags: u8,
    pub(crate) device_index: i32,
    pub(crate) reserved: i32,
}

/// A slice that may be empty over a null pointer.
///
/// # Safety
/// `p` has `n` elements that live during `'a`.
pub(crate) unsafe fn slice<'a, T>(p: *const T, n: usize) -> &'a [T] {
    if n == 0 {
        &[]
    } else {
        // SAFETY: by the caller's promise.
        unsafe { std::slice::from_raw_parts(p, n) }
    }
}

impl Tensor {
    /// Its sizes.
    pub(crate) fn sizes(&self) -> &[i64] {
        // SAFETY: there are as many as dimensions, which nobody counts below zero.
        unsafe { slice(self.sizes, self.ndim as usize) }
    }

    /// Its strides, in elements.
    pub(crate) fn strides(&self) -> &[i64] {
        // SAFETY: as above.
        unsafe { slice(self.strides, self.ndim as usize) }
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) union Payload {
    pub(crate) i: i64,
    pub(crate) d: f64,
    pub(crate) t: *const Tensor,
    pub(crate) ints: *const i64,
    pub(crate) doubles: *const f64,
    pub(crate) s: *const c_char,
    pub(crate) args: *const Arg,
    pub(crate) p: *mut c_void,
}

#[repr(C)]
pub(crate) struct Arg {
    pub(crate) tag: u32,
    pub(crate) len: u32,
    pub(crate) u: Payload,
}

#[repr(C)]
pub(crate) struct Out {
    pub(crate) kind: i32,
    pub(crate) arg: i32,
    pub(crate) item: i32,
    pub(crate) dtype: i16,
    pub(crate) contiguous: u8,
    pub(crate) reserved: u8,
    pub(crate) ndim: i32,
    pub(crate) device_index: i32,
    pub(crate) slot: *mut c_void,
    pub(crate) sizes: *const i64,
    pub(crate) strides: *const i64,
    pub(crate) nbytes: i64,
    pub(crate) offset: i64,
}

impl Default for Out {
    fn default() -> Out {
        Out {
            kind: out::UNDEFINED,
            arg: 0,
            item: 0,
            dtype: 0,
            contiguous: 0,
            reserved: 0,
            ndim: 0,
            device_index: 0,
            slot: null_mut(),
            sizes: null(),
            strides: null(),
            nbytes: 0,
            offset: 0,
        }
    }
}

#[repr(C)]
pub(crate) struct Error {
    pub(crate) kind: i32,
    pub(crate) message: *const c_char,
}

#[repr(C)]
pub(crate) struct Reply {
    pub(crate) outs: *const Out,
    pub(crate) nouts: u32,
    pub(crate) error: Error,
    pub(crate) only: Out,
}

impl Default for Reply {
    fn default() -> Reply {
        Reply {
            outs: null(),
            nouts: 0,
            error: Error { kind: error::RUNTIME, message: null() },
            only: Out::default(),
        }
    }
}

/// `OxiSpan`: something that took time, for profilers.
#[repr(C)]
pub(crate) struct Span {
    pub(crate) kind: i32,
    pub(crate) device: i32,
    pub(crate) start_ns: i64,
    pub(crate) end_ns: i64,
    pub(crate) thread: i64,
    pub(crate) window: u64,
    pub(crate) launched_in: u64,
    pub(crate) bytes: i64,
    pub(crate) name: *const c_char,
    pub(crate) line: *const c_char,
}

/// What a [`Span`] is.
pub(crate) mod span {
    use super::header;

    pub(crate) const LAUNCH: i32 = header::OXI_SPAN_LAUNCH;
    pub(crate) const COMPILE: i32 = header::OXI_SPAN_COMPILE;
    pub(crate) const WAIT: i32 = header::OXI_SPAN_WAIT;
    pub(crate) const COPY: i32 = header::OXI_SPAN_COPY;
    pub(crate) const PROGRAM: i32 = header::OXI_SPAN_PROGRAM;
}

const _: () = {
    assert!(size_of::<Span>() == 72);
    assert!(size_of::<Tensor>() == 56);
    assert!(size_of::<Arg>() == 16);
    assert!(size_of::<Out>() == 64);
    assert!(size_of::<Error>() == 16);
    assert!(size_of::<Reply>() == 96);
    assert!(size_of::<Caller>() == 32);
    assert!(size_of::<Task>() == 32);
    assert!(size_of::<Memory>() == 16);
    assert!(size_of::<Collective>() == 24);
};

/// `OxiTask`
#[repr(C)]
pub(crate) struct Task {
    pub(crate) context: *mut c_void,
    pub(crate) name: *const c_char,
    pub(crate) group: *const c_void,
    pub(crate) lane: u64,
}

/// `OxiCollective`
#[repr(C)]
pub(crate) struct Collective {
    pub(crate) kind: i32,
    pub(crate) reduction: i32,
    pub(crate) root: i32,
    pub(crate) ndevices: u32,
    pub(crate) devices: *const i32,
}

/// `OxiMemory`
#[repr(C)]
pub(crate) struct Memory {
    pub(crate) bytes: *mut c_void,
    pub(crate) len: usize,
}

/// `OxiCore`: what the shim may call.
#[repr(C)]
pub(crate) struct Core {
    pub(crate) abi_version: u32,
    pub(crate) bind: unsafe extern "C" fn(*const c_char, i32) -> *const c_void,
    pub(crate) warns_of_expanded: unsafe extern "C" fn(*const c_void) -> *const c_char,
    pub(crate) knows: unsafe extern "C" fn(*const c_char) -> i32,
    pub(crate) sparse: unsafe extern "C" fn(i32, *const c_char) -> i32,
    pub(crate) dispatch: unsafe extern "C" fn(*const c_void, i32, *const Arg, u32, *mut Reply) -> i32,
    pub(crate) fallback: unsafe extern "C" fn(*const c_char, *mut *const c_char, *mut Error) -> i32,
    pub(crate) alloc: unsafe extern "C" fn(usize, i32, *mut Error) -> *mut c_void,
    pub(crate) drop_slot: unsafe extern "C" fn(*mut c_void),
    pub(crate) address: unsafe extern "C" fn(*mut c_void) -> usize,
    pub(crate) find: unsafe extern "C" fn(usize, *mut i64) -> *mut c_void,
    pub(crate) resized: unsafe extern "C" fn(*mut c_void, usize, *mut Error) -> *mut c_void,
    pub(crate) kept_as: unsafe extern "C" fn(i32, usize) -> i32,
    pub(crate) write: unsafe extern "C" fn(*const Tensor, *const c_void, *mut Error) -> i32,
    pub(crate) read: unsafe extern "C" fn(*const Tensor, *mut c_void, *mut Error) -> i32,
    pub(crate) copy: unsafe extern "C" fn(*const Tensor, *const Tensor, *mut Error) -> i32,
    pub(crate) pad: unsafe extern "C" fn(*const Tensor, *const Tensor, *const c_void, *mut Error) -> i32,
    pub(crate) device_count: unsafe extern "C" fn() -> i32,
    pub(crate) check_device: unsafe extern "C" fn(i32, *mut Error) -> i32,
    pub(crate) synchronize: unsafe extern "C" fn(i32, *mut Error) -> i32,
    pub(crate) is_idle: unsafe extern "C" fn(i32) -> i32,
    pub(crate) event_record: unsafe extern "C" fn(i32) -> u64,
    pub(crate) event_note: unsafe extern "C" fn(i32, u8) -> u64,
    pub(crate) event_query: unsafe extern "C" fn(u64) -> i32,
    pub(crate) event_wait: unsafe extern "C" fn(u64, *mut Error) -> i32,
    pub(crate) event_elapsed_ms: unsafe extern "C" fn(u64, u64, *mut Error) -> f64,
    pub(crate) event_drop: unsafe extern "C" fn(u64),
    pub(crate) memory: unsafe extern "C" fn(i32, *mut i64),
    pub(crate) memory_info: unsafe extern "C" fn(i32, *mut usize, *mut usize),
    pub(crate) reset_peak: unsafe extern "C" fn(i32),
    pub(crate) reset_accumulated: unsafe extern "C" fn(i32),
    pub(crate) interrupted_by: unsafe extern "C" fn() -> *mut c_void,
    pub(crate) watch: unsafe extern "C" fn(i32, *const Tensor, u32, *mut Error) -> i32,
    pub(crate) watched:
        unsafe extern "C" fn(i64, i32, *const Tensor, u32, *const Tensor, u32, *mut Error) -> i32,
    pub(crate) replay: unsafe extern "C" fn(i64, i32, *const Tensor, u32, *mut Reply) -> i32,
    pub(crate) trace: unsafe extern "C" fn(i32, *const Tensor, u32, i32, *mut Error) -> i32,
    pub(crate) trace_also: unsafe extern "C" fn(i32, *const Tensor, *mut Error) -> i32,
    pub(crate) traced: unsafe extern "C" fn(
        i64,
        i32,
        *const Tensor,
        u32,
        *const Tensor,
        u32,
        u8,
        u8,
        *const u32,
        u32,
        *mut Error,
    ) -> i32,
    pub(crate) untrace: unsafe extern "C" fn(i32, *const Tensor, u32, *mut Error) -> i32,
    pub(crate) trace_pause: unsafe extern "C" fn(i32, u8, *mut Error) -> i32,
    pub(crate) body_begin: unsafe extern "C" fn(i32, *const Tensor, u32, *mut Reply) -> i32,
    pub(crate) body_end: unsafe extern "C" fn(i32, *const Tensor, u32, *mut Error) -> i32,
    pub(crate) body_drop: unsafe extern "C" fn(i32, u8, *mut Error),
    pub(crate) control:
        unsafe extern "C" fn(i32, *const c_char, *const i64, *const Tensor, u32, *mut Reply) -> i32,
    pub(crate) decomposable: unsafe extern "C" fn(*const c_char, *const c_char) -> *const c_void,
    pub(crate) decomposed:
        unsafe extern "C" fn(*const c_void, i32, *const Arg, u32, *mut i64, *mut Reply) -> i32,
    pub(crate) group: unsafe extern "C" fn(*const c_char, *const u64, u32) -> *mut c_void,
    pub(crate) group_drop: unsafe extern "C" fn(*mut c_void),
    pub(crate) group_number: unsafe extern "C" fn(*const c_void, u64) -> u64,
    pub(crate) task: unsafe extern "C" fn(
        *const Task,
        i32,
        *const Tensor,
        u32,
        *const Tensor,
        u32,
        u8,
        *mut Error,
    ) -> *mut c_void,
    pub(crate) are_programs: unsafe extern "C" fn(*const i32, u32) -> i32,
    pub(crate) collective: unsafe extern "C" fn(
        *const Task,
        *const Collective,
        *const Tensor,
        *const Tensor,
        *mut Error,
    ) -> *mut c_void,
    pub(crate) task_outcome: unsafe extern "C" fn(*const c_void, i32, i64, *mut Error) -> i32,
    pub(crate) task_number: unsafe extern "C" fn(*const c_void) -> u64,
    pub(crate) task_drop: unsafe extern "C" fn(*mut c_void),
    pub(crate) profile_start: unsafe extern "C" fn() -> u64,
    pub(crate) profile_stop:
        unsafe extern "C" fn(u64, unsafe extern "C" fn(*mut c_void, *const Span), *mut c_void),
}

/// `OxiCaller`
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[repr(C)]
pub(crate) struct Caller {
    pub(crate) thread: u64,
    pub(crate) task: i64,
    pub(crate) forward: u64,
    pub(crate) grad: u8,
    pub(crate) keeps: u8,
}

impl Caller {
    /// No thread.
    pub(crate) const NOBODY: Caller = Caller { thread: 0, task: -1, forward: 0, grad: 0, keeps: 0 };
}

/// `OxiShim`: what the core may call.
#[repr(C)]
pub(crate) struct Shim {
    pub(crate) abi_version: u32,
    pub(crate) rng_advance: unsafe extern "C" fn(*mut c_void, i32, u64, *mut u64, *mut u64),
    pub(crate) rng_get: unsafe extern "C" fn(i32, *mut u64, *mut u64),
    pub(crate) rng_set: unsafe extern "C" fn(i32, u64, u64),
    pub(crate) last_node: unsafe extern "C" fn() -> u64,
    pub(crate) running_node: unsafe extern "C" fn() -> u64,
    pub(crate) caller: unsafe extern "C" fn(*mut Caller),
    pub(crate) settle: unsafe extern "C" fn(i32),
    pub(crate) current_device: unsafe extern "C" fn() -> i32,
    pub(crate) set_device: unsafe extern "C" fn(i32),
    pub(crate) default_dtype: unsafe extern "C" fn() -> i32,
    pub(crate) float32_precision: unsafe extern "C" fn() -> u32,
    pub(crate) deterministic: unsafe extern "C" fn() -> u8,
    pub(crate) profiled: unsafe extern "C" fn() -> u64,
    pub(crate) torch_version: unsafe extern "C" fn() -> *const c_char,
    pub(crate) call:
        unsafe extern "C" fn(*const c_char, *const Arg, u32, *const Tensor, u32, u8, *mut Error) -> i32,
    pub(crate) task_run: unsafe extern "C" fn(
        *mut c_void,
        *const c_char,
        *const Memory,
        u32,
        *const Memory,
        u32,
        unsafe extern "C" fn(*const c_void, *mut c_char, usize),
        *const c_void,
        *mut Error,
    ) -> i32,
    pub(crate) task_begin: unsafe extern "C" fn(*mut c_void, u64),
    pub(crate) task_again: unsafe extern "C" fn(*const c_void) -> *mut c_void,
    pub(crate) task_drop: unsafe extern "C" fn(*mut c_void),
    pub(crate) describe_held: unsafe extern "C" fn(*const *const c_void, u32, *mut Tensor) -> u8,
    pub(crate) requires_grad: unsafe extern "C" fn(*const c_void) -> u8,
    pub(crate) objects:
        unsafe extern "C" fn(*const Reply, *const *const c_void, *mut *mut c_void, *mut Error) -> i32,
}

/// `OxiShimInit`
pub(crate) type ShimInit = unsafe extern "C" fn(*const Core, *mut *const c_char) -> *const Shim;
