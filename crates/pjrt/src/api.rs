//! The table of C functions, and the one way to call them.

use std::mem::offset_of;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use oxitorch_pjrt_sys as sys;
use sys::Args;

use crate::error::{Code, Error, HostError, Result, err};
use crate::platform::Platform;

/// A plugin's function table. It is read where the plugin keeps it, never copied: plugins differ in its size.
#[derive(Clone, Copy)]
pub(crate) struct Api {
    table: NonNull<sys::PJRT_Api>,
    /// `PJRT_Api.struct_size`: slots past it do not exist.
    size: usize,
    platform: Platform,
    version: (i32, i32),
}

// SAFETY: the table is immutable static data of a library that is never unloaded.
unsafe impl Send for Api {}
// SAFETY: as above.
unsafe impl Sync for Api {}

/// The function in a slot of the table, or `Error::Unsupported` if the plugin's table ends before it or has null there.
macro_rules! slot {
    ($api:expr, $name:ident) => {{
        let api: &$crate::api::Api = $api;
        const OFFSET: usize = std::mem::offset_of!(oxitorch_pjrt_sys::PJRT_Api, $name);
        api.slot_at(OFFSET, |table| table.$name).ok_or_else(|| api.absent(stringify!($name)))
    }};
}

/// Calls a function of the table that returns an error pointer. Must stand in an `unsafe` block: the arguments must be
/// what the function's header asks for.
macro_rules! call {
    ($api:expr, $name:ident, $args:expr) => {{
        let api: &$crate::api::Api = $api;
        match $crate::api::slot!(api, $name) {
            Ok(f) => {
                let e = f($args.as_mut_ptr());
                if e.is_null() { Ok(()) } else { Err(api.take_error(stringify!($name), e)) }
            }
            Err(e) => Err(e),
        }
    }};
}

/// As `call!`, for a destructor inside `Drop`, where nobody can be told about a failure: it is counted.
macro_rules! destroy {
    ($api:expr, $name:ident, $args:expr) => {
        if $crate::api::call!($api, $name, $args).is_err() {
            $crate::api::count_failed_destroy();
        }
    };
}

pub(crate) use {call, destroy, slot};

static FAILED_DESTROYS: AtomicU64 = AtomicU64::new(0);

/// How many C objects a plugin refused to destroy, in this process; 0 in a sound program.
pub fn failed_destroys() -> u64 {
    FAILED_DESTROYS.load(Ordering::Relaxed)
}

#[cold]
pub(crate) fn count_failed_destroy() {
    FAILED_DESTROYS.fetch_add(1, Ordering::Relaxed);
}

/// The last slot that a plugin must have; what comes after it is asked for when it is used.
const LAST_REQUIRED: usize = offset_of!(sys::PJRT_Api, PJRT_Executable_OutputDimensions);

impl Api {
    /// Where the table is: in the plugin's library.
    pub(crate) fn address(&self) -> *const std::ffi::c_void {
        self.table.as_ptr().cast()
    }

    /// Looks at a table and refuses one that this crate cannot use.
    ///
    /// # Safety
    /// `table` is null or points to a `PJRT_Api` of at least `struct_size` bytes that is never freed or changed.
    pub(crate) unsafe fn new(table: *const sys::PJRT_Api, platform: Platform) -> Result<Api> {
        let Some(table) = NonNull::new(table.cast_mut()) else {
            return Err(err::incompatible("`GetPjrtApi` returned null"));
        };
        // SAFETY: the first field is there by contract.
        let size = unsafe { (&raw const (*table.as_ptr()).struct_size).read() };
        if size < offset_of!(sys::PJRT_Api, PJRT_Error_Destroy) {
            return Err(err::incompatible(format!(
                "its function table has {size} bytes, too few for a version"
            )));
        }
        // SAFETY: the size covers the version.
        let version = unsafe { (&raw const (*table.as_ptr()).pjrt_api_version).read() };
        let version = (version.major_version, version.minor_version);
        let api = Api { table, size, platform, version };
        if version.0 != sys::PJRT_API_MAJOR as i32 {
            let ours = (sys::PJRT_API_MAJOR, sys::PJRT_API_MINOR);
            return Err(err::incompatible(format!(
                "it speaks PJRT API {}.{}, this crate {}.{}",
                version.0, version.1, ours.0, ours.1
            )));
        }
        if !api.has(LAST_REQUIRED) {
            return Err(err::incompatible(format!(
                "its function table (API {}.{}) has {size} bytes, at least {} are needed",
                version.0,
                version.1,
                LAST_REQUIRED + size_of::<usize>()
            )));
        }
        Ok(api)
    }

    #[inline]
    pub(crate) fn has(&self, offset: usize) -> bool {
        offset + size_of::<usize>() <= self.size
    }

    /// The function at an offset of the table, if the table reaches that far. `_witness` names the field for its type.
    #[inline]
    pub(crate) fn slot_at<F: Copy>(
        &self,
        offset: usize,
        _witness: fn(&sys::PJRT_Api) -> Option<F>,
    ) -> Option<F> {
        if !self.has(offset) {
            return None;
        }
        // SAFETY: the plugin's table covers the slot, which holds a nullable function pointer of the witness's type.
        unsafe { self.table.as_ptr().byte_add(offset).cast::<Option<F>>().read() }
    }

    pub(crate) fn platform(&self) -> Platform {
        self.platform
    }

    pub(crate) fn version(&self) -> (i32, i32) {
        self.version
    }

    #[cold]
    pub(crate) fn absent(&self, what: &str) -> Error {
        Error::Unsupported { platform: self.platform, version: self.version, what: format!("`{what}`") }
    }

    /// Turns a plugin's error into ours and frees it.
    #[cold]
    pub(crate) fn take_error(&self, call: &'static str, error: *mut sys::PJRT_Error) -> Error {
        let mut message = Args::<sys::PJRT_Error_Message_Args>::new();
        message.error = error;
        let mut code = Args::<sys::PJRT_Error_GetCode_Args>::new();
        code.error = error;
        let mut free = Args::<sys::PJRT_Error_Destroy_Args>::new();
        free.error = error;
        // SAFETY: `error` is live until `PJRT_Error_Destroy`, and the message is copied before that. An error from
        // `PJRT_Error_GetCode` itself is dropped with the code left at 0; there is no error about errors.
        unsafe {
            let text = match slot!(self, PJRT_Error_Message) {
                Ok(f) => {
                    f(message.as_mut_ptr());
                    text(message.message, message.message_size)
                }
                Err(_) => String::from("the plugin gave no message"),
            };
            if let Ok(f) = slot!(self, PJRT_Error_GetCode) {
                f(code.as_mut_ptr());
            }
            if let Ok(f) = slot!(self, PJRT_Error_Destroy) {
                f(free.as_mut_ptr());
            }
            status(self.platform, call, Code(code.code), text)
        }
    }

    /// The first extension of a kind in the plugin's list.
    pub(crate) fn extension(&self, kind: u32) -> Option<NonNull<sys::PJRT_Extension_Base>> {
        self.extensions().find(|e| e.0 == kind).map(|e| e.1)
    }

    pub(crate) fn extensions(
        &self,
    ) -> impl Iterator<Item = (u32, NonNull<sys::PJRT_Extension_Base>)> + use<> {
        // SAFETY: `new` checked that the table covers this field.
        let mut next = unsafe { (&raw const (*self.table.as_ptr()).extension_start).read() };
        std::iter::from_fn(move || {
            let here = NonNull::new(next)?;
            // SAFETY: a plugin's extensions are a null-terminated list of static structs with this head.
            let base = unsafe { here.as_ptr().read() };
            next = base.next;
            Some((base.type_, here))
        })
    }
}

fn status(platform: Platform, call: &'static str, code: Code, message: String) -> Error {
    if platform == Platform::Cpu && code == HostError::NO_RESULT {
        return Error::NoResult { call, message };
    }
    // The CPU plugin reports a temporary that it cannot allocate as an internal error, which only its text tells apart.
    if code == Code::RESOURCE_EXHAUSTED || message.contains("Out of memory allocating") {
        return Error::OutOfMemory { message };
    }
    Error::Status { call, code, message }
}

/// Copies a C string with a length; null gives an empty one, invalid UTF-8 is replaced.
///
/// # Safety
/// `data` is null or points to `len` readable bytes.
pub(crate) unsafe fn text(data: *const std::ffi::c_char, len: usize) -> String {
    // SAFETY: passed on to the caller.
    String::from_utf8_lossy(unsafe { slice(data.cast::<u8>(), len) }).into_owned()
}

/// A slice from a pointer that may be null when the length is 0.
///
/// # Safety
/// `data` is null, or points to `len` values that live and stay unchanged for `'a`.
pub(crate) unsafe fn slice<'a, T>(data: *const T, len: usize) -> &'a [T] {
    if data.is_null() || len == 0 {
        return &[];
    }
    // SAFETY: passed on to the caller.
    unsafe { std::slice::from_raw_parts(data, len) }
}

/// The pointer in an output field, or an error if the plugin reported success and left it null.
pub(crate) fn non_null<T>(call: &'static str, ptr: *mut T) -> Result<NonNull<T>> {
    NonNull::new(ptr).ok_or_else(|| null_output(call))
}

#[cold]
pub(crate) fn null_output(call: &'static str) -> Error {
    let message = "the plugin reported success and returned null".into();
    Error::Status { call, code: Code::INTERNAL, message }
}
