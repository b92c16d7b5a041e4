//! Processes of one job: how their clients find each other. A plugin is given three functions that look into a store of
//! keys and values which all processes see, and has its own protocol on top of them.

use std::ffi::{c_char, c_int, c_void};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use oxitorch_pjrt_sys as sys;
use sys::Args;

use crate::api::slice;
use crate::error::{Code, Result, err};

/// Keys and values that all processes of a job see. A plugin calls it from threads of its own, also while programs run.
pub trait KeyValueStore: Send + Sync {
    /// The value of a key. Waits for it, at most this long, and then fails with [`Code::DEADLINE_EXCEEDED`].
    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, StoreError>;

    /// The value of a key if it is there now.
    fn try_get(&self, key: &str) -> Result<Option<Vec<u8>>, StoreError>;

    /// Gives a key its value.
    fn put(&self, key: &str, value: &[u8]) -> Result<(), StoreError>;
}

/// Why a store has no answer. The plugin is told, and its error says so.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreError {
    /// What kind of failure it is.
    pub code: Code,
    /// What happened.
    pub message: String,
}

impl StoreError {
    /// An error of this kind.
    pub fn new(code: Code, message: impl Into<String>) -> StoreError {
        StoreError { code, message: message.into() }
    }
}

/// This process's place in a job of several, whose clients are to be one.
#[derive(Clone)]
pub struct Processes {
    /// The number of this one.
    pub index: usize,
    /// How many there are.
    pub count: usize,
    /// Where they meet. It is held until the client is gone.
    pub store: Arc<dyn KeyValueStore>,
}

impl Processes {
    /// An error if there is no such place.
    pub(crate) fn check(&self) -> Result<()> {
        let (index, count) = (self.index, self.count);
        if index < count && i32::try_from(count).is_ok() {
            return Ok(());
        }
        Err(err::invalid(format!("a client cannot be that of process {index} of {count}")))
    }
}

impl fmt::Debug for Processes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Processes({} of {})", self.index, self.count)
    }
}

/// A store at an address that does not change: the plugin has it.
pub(crate) type Shared = Arc<Arc<dyn KeyValueStore>>;

/// Tells a plugin of a store, which has to live until its client is destroyed.
pub(crate) fn offer(store: &Shared, args: &mut Args<sys::PJRT_Client_Create_Args>) {
    let user_arg = Arc::as_ptr(store).cast_mut().cast::<c_void>();
    args.kv_get_callback = Some(get);
    args.kv_get_user_arg = user_arg;
    args.kv_try_get_callback = Some(try_get);
    args.kv_try_get_user_arg = user_arg;
    args.kv_put_callback = Some(put);
    args.kv_put_user_arg = user_arg;
}

unsafe extern "C" fn get(args: *mut sys::PJRT_KeyValueGetCallback_Args) -> *mut sys::PJRT_Error {
    // SAFETY: the plugin gives arguments that live through the call, and the `user_arg` of `offer`, whose store lives.
    unsafe {
        let a = &mut *args;
        let timeout = Duration::from_millis(u64::try_from(a.timeout_in_ms as c_int).unwrap_or(0));
        let found = asked(a.user_arg, a.key, a.key_size, |store, key| store.get(key, timeout));
        answer(a.callback_error, found, |value| {
            (a.value, a.value_size) = give(&value);
            a.value_deleter_callback = Some(free);
        })
    }
}

unsafe extern "C" fn try_get(args: *mut sys::PJRT_KeyValueTryGetCallback_Args) -> *mut sys::PJRT_Error {
    // SAFETY: as in `get`.
    unsafe {
        let a = &mut *args;
        let found = asked(a.user_arg, a.key, a.key_size, |store, key| {
            let absent = || StoreError::new(Code::NOT_FOUND, format!("there is no key `{key}`"));
            store.try_get(key)?.ok_or_else(absent)
        });
        answer(a.callback_error, found, |value| {
            (a.value, a.value_size) = give(&value);
            a.value_deleter_callback = Some(free);
        })
    }
}

unsafe extern "C" fn put(args: *mut sys::PJRT_KeyValuePutCallback_Args) -> *mut sys::PJRT_Error {
    // SAFETY: as in `get`; the value has the length that is said.
    unsafe {
        let a = &*args;
        let value = slice(a.value.cast::<u8>(), a.value_size);
        let done = asked(a.user_arg, a.key, a.key_size, |store, key| store.put(key, value));
        answer(a.callback_error, done, |()| {})
    }
}

/// Asks the store; a panic in it is an error.
///
/// # Safety
/// `user_arg` is from `offer`, its store lives, and `key` has `size` bytes.
unsafe fn asked<T>(
    user_arg: *mut c_void,
    key: *const c_char,
    size: usize,
    ask: impl FnOnce(&dyn KeyValueStore, &str) -> Result<T, StoreError>,
) -> Result<T, StoreError> {
    // SAFETY: passed on to the caller.
    let (store, key) =
        unsafe { (&**user_arg.cast::<Arc<dyn KeyValueStore>>(), slice(key.cast::<u8>(), size)) };
    let key = std::str::from_utf8(key);
    let key = key.map_err(|e| StoreError::new(Code::INVALID_ARGUMENT, format!("a key is no text: {e}")))?;
    let asked = catch_unwind(AssertUnwindSafe(|| ask(store, key)));
    asked.unwrap_or_else(|_| Err(StoreError::new(Code::INTERNAL, format!("the store panicked at `{key}`"))))
}

/// Null and the answer, or an error of the plugin's own make.
///
/// # Safety
/// `make` is null or points to the plugin's function that makes errors.
unsafe fn answer<T>(
    make: *mut sys::PJRT_CallbackError,
    found: Result<T, StoreError>,
    write: impl FnOnce(T),
) -> *mut sys::PJRT_Error {
    let e = match found {
        Ok(found) => {
            write(found);
            return std::ptr::null_mut();
        }
        Err(e) => e,
    };
    // SAFETY: passed on to the caller.
    let make = unsafe { make.as_ref() }.copied().flatten();
    // The headers ask for one. Without it nobody can be told, and the plugin finds an empty value.
    let Some(make) = make else { return std::ptr::null_mut() };
    // SAFETY: the function is the plugin's, which copies the message.
    unsafe { make(e.code.0, e.message.as_ptr().cast(), e.message.len()) }
}

/// A copy of a value that C frees by its address alone.
fn give(value: &[u8]) -> (*mut c_char, usize) {
    // SAFETY: `malloc` gives so many bytes or null; at least one, as it may give null for none.
    unsafe {
        let copy = libc::malloc(value.len().max(1)).cast::<u8>();
        if copy.is_null() {
            return (std::ptr::null_mut(), 0);
        }
        std::ptr::copy_nonoverlapping(value.as_ptr(), copy, value.len());
        (copy.cast(), value.len())
    }
}

unsafe extern "C" fn free(value: *mut c_char) {
    // SAFETY: a value of `give`, which the plugin gives back once.
    unsafe { libc::free(value.cast()) };
}
