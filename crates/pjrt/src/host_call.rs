//! Rust functions that programs call: `stablehlo.custom_call @oxitorch.host_call` with the function's name in
//! `backend_config`, through the plugin's FFI extension. Only where programs run in host memory (the CPU platform).
//!
//! ```text
//! %r = stablehlo.custom_call @oxitorch.host_call(%x) {api_version = 4 : i32, backend_config = {fn = "lu"}} : ...
//! ```
//!
//! Spell the dictionary `backend_config`; under `mhlo.backend_config` it does not arrive.

use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, LazyLock};

use oxitorch_pjrt_sys as sys;
use parking_lot::Mutex;
use sys::{Args, CStruct};

use crate::api::{slice, text};
use crate::element::{Dims, ElementType, checked_bytes};
use crate::error::{Error, HostError, Result};
use crate::host_threads::HostThreads;
use crate::named_value::{Attributes, NamedValue};
use crate::platform::Platform;
use crate::plugin::Plugin;

/// The custom call's target.
pub const HOST_CALL_TARGET: &str = "oxitorch.host_call";

/// The attribute that names the function.
pub const HOST_CALL_NAME: &str = "fn";

/// One call of a host function.
pub struct HostCall<'a> {
    /// The operands.
    pub args: Vec<HostArg<'a>>,
    /// The results, to be written.
    pub results: Vec<HostResult<'a>>,
    /// The dictionary of the call, `fn` included.
    pub attributes: Attributes,
    /// Who may take part in the work.
    pub threads: HostThreads,
}

/// An operand: dense, row-major.
pub struct HostArg<'a> {
    /// Element type.
    pub dtype: ElementType,
    /// Dimensions.
    pub dims: Dims,
    /// The bytes.
    pub bytes: &'a [u8],
}

/// A result: dense, row-major, with any content.
pub struct HostResult<'a> {
    /// Element type.
    pub dtype: ElementType,
    /// Dimensions.
    pub dims: Dims,
    /// The bytes.
    pub bytes: &'a mut [u8],
}

/// A Rust type that an element type's values have in memory.
///
/// # Safety
/// Every bit pattern is a value, and the size is the element type's.
pub unsafe trait HostElement: Copy {
    /// The element type.
    const DTYPE: ElementType;
}

macro_rules! host_elements {
    ($($rust:ty = $dtype:ident),*) => { $(
        // SAFETY: a primitive number of the element type's size.
        unsafe impl HostElement for $rust {
            const DTYPE: ElementType = ElementType::$dtype;
        }
    )* };
}
host_elements!(
    i8 = S8,
    i16 = S16,
    i32 = S32,
    i64 = S64,
    u8 = U8,
    u16 = U16,
    u32 = U32,
    u64 = U64,
    f32 = F32,
    f64 = F64
);

impl HostArg<'_> {
    /// The values, or `None` if they are of another type.
    pub fn values<T: HostElement>(&self) -> Option<&[T]> {
        // SAFETY: any bytes are values of `T`.
        let (before, values, after) = unsafe { self.bytes.align_to::<T>() };
        (self.dtype == T::DTYPE && before.is_empty() && after.is_empty()).then_some(values)
    }
}

impl HostResult<'_> {
    /// The values, or `None` if they are of another type.
    pub fn values_mut<T: HostElement>(&mut self) -> Option<&mut [T]> {
        // SAFETY: any bytes are values of `T`, and any value of `T` is bytes.
        let (before, values, after) = unsafe { self.bytes.align_to_mut::<T>() };
        (self.dtype == T::DTYPE && before.is_empty() && after.is_empty()).then_some(values)
    }
}

type HostFn = dyn Fn(&mut HostCall<'_>) -> std::result::Result<(), HostError> + Send + Sync;

static FUNCTIONS: LazyLock<Mutex<HashMap<String, Arc<HostFn>>>> = LazyLock::new(Default::default);

impl Plugin {
    /// Makes a function callable from programs under a name; a later one of the same name replaces it. What it returns
    /// as an error, and a panic, become the error of the launch's results. It runs on a thread of the plugin's and must
    /// not wait for the device.
    pub fn register_host_fn(
        &self,
        name: &str,
        function: impl Fn(&mut HostCall<'_>) -> std::result::Result<(), HostError> + Send + Sync + 'static,
    ) -> Result<()> {
        self.register_target()?;
        FUNCTIONS.lock().insert(name.to_string(), Arc::new(function));
        Ok(())
    }

    fn register_target(&self) -> Result<()> {
        let unsupported = |what: &str| Error::Unsupported {
            platform: self.platform(),
            version: self.api_version(),
            what: what.to_string(),
        };
        if self.platform() != Platform::Cpu {
            return Err(unsupported("host functions: its programs do not run in host memory"));
        }
        let mut registered = self.host_calls.lock();
        if *registered {
            return Ok(());
        }
        let extension = self.api().extension(sys::PJRT_Extension_Type_FFI);
        let extension =
            extension.ok_or_else(|| unsupported("the FFI extension"))?.cast::<sys::PJRT_FFI_Extension>();
        // SAFETY: an extension of this type has this layout, up to its own size.
        let register = unsafe {
            let size = (&raw const (*extension.as_ptr()).base.struct_size).read();
            if size < size_of::<sys::PJRT_FFI_Extension>() {
                return Err(unsupported("`PJRT_FFI_Register_Handler`"));
            }
            (&raw const (*extension.as_ptr()).register_handler).read()
        };
        let register = register.ok_or_else(|| unsupported("`PJRT_FFI_Register_Handler`"))?;
        const HOST: &str = "Host";
        let mut args = Args::<sys::PJRT_FFI_Register_Handler_Args>::new();
        args.target_name = HOST_CALL_TARGET.as_ptr().cast();
        args.target_name_size = HOST_CALL_TARGET.len();
        args.handler = entry as unsafe extern "C" fn(_) -> _ as *mut c_void;
        args.platform_name = HOST.as_ptr().cast();
        args.platform_name_size = HOST.len();
        // SAFETY: the names live through the call and the handler for ever.
        let error = unsafe { register(args.as_mut_ptr()) };
        if !error.is_null() {
            return Err(self.api().take_error("PJRT_FFI_Register_Handler", error));
        }
        *registered = true;
        Ok(())
    }
}

/// What the plugin calls, for every function.
unsafe extern "C" fn entry(frame: *mut sys::XLA_FFI_CallFrame) -> *mut sys::XLA_FFI_Error {
    // SAFETY: the plugin gives a live frame.
    unsafe {
        let api = (*frame).api;
        if answer_metadata(frame) || (*frame).stage != sys::XLA_FFI_ExecutionStage_EXECUTE {
            return std::ptr::null_mut();
        }
        let called = catch_unwind(AssertUnwindSafe(|| call(&*frame)));
        match called {
            Ok(Ok(())) => std::ptr::null_mut(),
            Ok(Err(e)) => error(api, &e),
            Err(_) => error(api, &"the host function panicked".into()),
        }
    }
}

/// A plugin's first call asks which FFI version the handler has: whichever the plugin has, since only its oldest parts
/// are used here.
///
/// # Safety
/// `frame` is live.
unsafe fn answer_metadata(frame: *mut sys::XLA_FFI_CallFrame) -> bool {
    // SAFETY: the frame, its extensions and its API table are live.
    unsafe {
        let mut extension = (*frame).extension_start;
        while !extension.is_null() {
            if (*extension).type_ == sys::XLA_FFI_Extension_Metadata {
                let metadata = (*extension.cast::<sys::XLA_FFI_Metadata_Extension>()).metadata;
                let (mut major, mut minor) = (sys::XLA_FFI_API_MAJOR as i32, sys::XLA_FFI_API_MINOR as i32);
                if let Some(api) = (*frame).api.as_ref() {
                    (major, minor) = (api.api_version.major_version, api.api_version.minor_version);
                }
                (&raw mut (*metadata).api_version.major_version).write(major);
                (&raw mut (*metadata).api_version.minor_version).write(minor);
                (&raw mut (*metadata).traits).write(0);
                return true;
            }
            extension = (*extension).next;
        }
    }
    false
}

/// # Safety
/// The frame is live, and its buffers are host memory that nothing else touches during the call.
unsafe fn call(frame: &sys::XLA_FFI_CallFrame) -> std::result::Result<(), HostError> {
    // SAFETY: passed on to the caller.
    let (attributes, args, results) = unsafe {
        (
            attributes(&frame.attrs),
            buffers(frame.args.args, frame.args.size)?,
            buffers(frame.rets.rets, frame.rets.size)?,
        )
    };
    let name = attributes.get(HOST_CALL_NAME).and_then(NamedValue::as_str);
    let name = name.ok_or_else(|| format!("{HOST_CALL_TARGET}: no attribute `{HOST_CALL_NAME}`"))?;
    let function = FUNCTIONS.lock().get(name).cloned();
    let function =
        function.ok_or_else(|| format!("{HOST_CALL_TARGET}: no function `{name}` is registered"))?;
    for (i, result) in results.iter().enumerate() {
        if args.iter().chain(&results[..i]).any(|other| other.overlaps(result)) {
            return Err(
                format!("host function `{name}`: result {i} shares memory with another buffer").into()
            );
        }
    }
    let mut call = HostCall {
        args: args
            .into_iter()
            // SAFETY: the memory has these bytes, for the duration of the call.
            .map(|b| HostArg { dtype: b.dtype, bytes: unsafe { slice(b.data, b.len) }, dims: b.dims })
            .collect(),
        results: results
            .into_iter()
            // SAFETY: as above, and no other buffer of the call overlaps it.
            .map(|b| HostResult { dtype: b.dtype, bytes: unsafe { slice_mut(b.data, b.len) }, dims: b.dims })
            .collect(),
        attributes,
        // SAFETY: the call is over before the frame is.
        threads: unsafe { HostThreads::new(frame) },
    };
    function(&mut call)
}

struct RawBuffer {
    dtype: ElementType,
    dims: Dims,
    data: *mut u8,
    len: usize,
}

impl RawBuffer {
    fn overlaps(&self, other: &RawBuffer) -> bool {
        let (a, b) = (self.data as usize, other.data as usize);
        self.len > 0 && other.len > 0 && a < b + other.len && b < a + self.len
    }
}

/// # Safety
/// `list` points to `count` live `XLA_FFI_Buffer`s.
unsafe fn buffers(list: *mut *mut c_void, count: i64) -> std::result::Result<Vec<RawBuffer>, String> {
    // SAFETY: passed on to the caller.
    let list = unsafe { slice(list, count as usize) };
    let read = |&ptr: &*mut c_void| {
        // SAFETY: passed on to the caller.
        let (buffer, dims) = unsafe {
            let buffer = &*ptr.cast::<sys::XLA_FFI_Buffer>();
            (buffer, Dims::from_slice(slice(buffer.dims, buffer.rank as usize)))
        };
        let dtype =
            element_type(buffer.dtype).ok_or_else(|| format!("unknown FFI element type {}", buffer.dtype))?;
        let len = checked_bytes(dtype, &dims).map_err(|e| e.to_string())?;
        Ok(RawBuffer { dtype, dims, data: buffer.data.cast(), len })
    };
    list.iter().map(read).collect()
}

/// # Safety
/// `data` is null, or points to `len` bytes that nothing else touches for `'a`.
unsafe fn slice_mut<'a>(data: *mut u8, len: usize) -> &'a mut [u8] {
    if data.is_null() || len == 0 {
        return &mut [];
    }
    // SAFETY: passed on to the caller.
    unsafe { std::slice::from_raw_parts_mut(data, len) }
}

/// # Safety
/// `attrs` is live.
unsafe fn attributes(attrs: &sys::XLA_FFI_Attrs) -> Attributes {
    let count = attrs.size as usize;
    let mut out = Attributes::new();
    // SAFETY: the lists have `size` entries; an attribute's memory is what its type says.
    unsafe {
        let (names, types) = (slice(attrs.names, count), slice(attrs.types, count));
        for ((name, &kind), &at) in names.iter().zip(types).zip(slice(attrs.attrs, count)) {
            let value = match kind {
                sys::XLA_FFI_AttrType_STRING => {
                    let span = &*at.cast::<sys::XLA_FFI_ByteSpan>();
                    NamedValue::String(text(span.ptr, span.len))
                }
                sys::XLA_FFI_AttrType_SCALAR => {
                    let scalar = &*at.cast::<sys::XLA_FFI_Scalar>();
                    number(scalar.dtype, scalar.value)
                }
                sys::XLA_FFI_AttrType_ARRAY => {
                    let array = &*at.cast::<sys::XLA_FFI_Array>();
                    match array.dtype {
                        sys::XLA_FFI_DataType_S64 => {
                            NamedValue::Ints(slice(array.data.cast(), array.size).to_vec())
                        }
                        _ => NamedValue::Unknown(kind),
                    }
                }
                _ => NamedValue::Unknown(kind),
            };
            out.insert(text((**name).ptr, (**name).len), value);
        }
    }
    out
}

/// # Safety
/// `at` points to a value of this type.
unsafe fn number(dtype: sys::XLA_FFI_DataType, at: *const c_void) -> NamedValue {
    // SAFETY: passed on to the caller; a bool is read as the byte that it is.
    unsafe {
        match dtype {
            sys::XLA_FFI_DataType_PRED => NamedValue::Bool(at.cast::<u8>().read() != 0),
            sys::XLA_FFI_DataType_S32 => NamedValue::Int(at.cast::<i32>().read().into()),
            sys::XLA_FFI_DataType_S64 => NamedValue::Int(at.cast::<i64>().read()),
            sys::XLA_FFI_DataType_F32 => NamedValue::Float(at.cast::<f32>().read()),
            other => NamedValue::Unknown(other),
        }
    }
}

/// FFI numbers element types like PJRT up to `f64`, and in its own way from there.
fn element_type(code: sys::XLA_FFI_DataType) -> Option<ElementType> {
    Some(match code {
        sys::XLA_FFI_DataType_BF16 => ElementType::Bf16,
        sys::XLA_FFI_DataType_C64 => ElementType::C64,
        sys::XLA_FFI_DataType_C128 => ElementType::C128,
        sys::XLA_FFI_DataType_F8E5M2 => ElementType::F8E5M2,
        sys::XLA_FFI_DataType_F8E4M3FN => ElementType::F8E4M3FN,
        1..=12 => return ElementType::from_code(code),
        _ => return None,
    })
}

/// # Safety
/// `api` is the table of a live frame.
unsafe fn error(api: *const sys::XLA_FFI_Api, error: &HostError) -> *mut sys::XLA_FFI_Error {
    let message = CString::new(error.message().replace('\0', " ")).unwrap_or_default();
    let mut args = sys::XLA_FFI_Error_Create_Args::sized();
    args.message = message.as_ptr();
    args.errc = error.code().0; // numbered alike
    // SAFETY: the table is live; the plugin copies the message.
    unsafe {
        match (&raw const (*api).XLA_FFI_Error_Create).read() {
            Some(create) => create(&mut args),
            None => std::ptr::null_mut(),
        }
    }
}
