//! The threads that a program runs in, lent to a host function while it is called.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::Thread;

use oxitorch_pjrt_sys as sys;
use sys::CStruct;

/// How often a call looks whether the others are done before it sleeps: about as long as waking up takes.
const SPINS: u32 = 2000;

/// The threads of one call: that which runs it, and the plugin's.
pub struct HostThreads {
    api: *const sys::XLA_FFI_Api,
    context: *mut sys::XLA_FFI_ExecutionContext,
}

/// Work in parts, of which each thread takes the next.
struct Shared {
    work: *const (dyn Fn(usize) + Sync),
    parts: usize,
    next: AtomicUsize,
    left: AtomicUsize,
    panicked: AtomicBool,
    caller: Thread,
}

// SAFETY: what `work` points to is `Sync`, and there while parts are left; see `HostThreads::share`.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl HostThreads {
    /// # Safety
    /// `frame` is live as long as the value.
    pub(crate) unsafe fn new(frame: &sys::XLA_FFI_CallFrame) -> HostThreads {
        HostThreads { api: frame.api, context: frame.ctx }
    }

    /// How many there are, 1 or more.
    pub fn count(&self) -> usize {
        let mut count = 1;
        let mut args = sys::XLA_FFI_ThreadPool_NumThreads_Args::sized();
        args.ctx = self.context;
        args.num_threads = &raw mut count;
        // SAFETY: the table and the context are live.
        unsafe {
            if let Some(ask) = (&raw const (*self.api).XLA_FFI_ThreadPool_NumThreads).read() {
                let error = ask(&mut args);
                if !error.is_null() {
                    self.forget(error);
                    return 1;
                }
            }
        }
        usize::try_from(count).unwrap_or(1).max(1)
    }

    /// Calls `work` with each number below `parts`, in this thread and in those that have nothing else to do.
    ///
    /// # Panics
    /// If `work` has panicked.
    pub fn share(&self, parts: usize, work: &(dyn Fn(usize) + Sync)) {
        let work: *const (dyn Fn(usize) + Sync + '_) = work;
        // SAFETY: only the lifetime differs. It is called for a part that is left only, and this function returns when
        // none is left.
        let work = unsafe {
            std::mem::transmute::<*const (dyn Fn(usize) + Sync + '_), *const (dyn Fn(usize) + Sync)>(work)
        };
        let shared = Arc::new(Shared {
            work,
            parts,
            next: AtomicUsize::new(0),
            left: AtomicUsize::new(parts),
            panicked: AtomicBool::new(false),
            caller: std::thread::current(),
        });
        for _ in 1..parts.min(self.count()) {
            if !self.schedule(shared.clone()) {
                break;
            }
        }
        shared.run();
        let mut spins = 0;
        while shared.left.load(Ordering::Acquire) > 0 {
            if spins < SPINS {
                spins += 1;
                std::hint::spin_loop();
            } else {
                std::thread::park();
            }
        }
        assert!(!shared.panicked.load(Ordering::Relaxed), "a part of a host function panicked");
    }

    /// Whether the plugin took it.
    fn schedule(&self, shared: Arc<Shared>) -> bool {
        let mut args = sys::XLA_FFI_ThreadPool_Schedule_Args::sized();
        args.ctx = self.context;
        args.task = Some(task);
        let data = Arc::into_raw(shared);
        args.data = data.cast_mut().cast();
        // SAFETY: the table and the context are live; the task takes the reference over, if there is one.
        unsafe {
            let error = match (&raw const (*self.api).XLA_FFI_ThreadPool_Schedule).read() {
                Some(schedule) => schedule(&mut args),
                None => {
                    drop(Arc::from_raw(data));
                    return false;
                }
            };
            if !error.is_null() {
                drop(Arc::from_raw(data));
                self.forget(error);
                return false;
            }
        }
        true
    }

    /// Frees an error of the plugin's that says that this thread is alone.
    ///
    /// # Safety
    /// `error` came from this table, and is not used any more.
    unsafe fn forget(&self, error: *mut sys::XLA_FFI_Error) {
        let mut args = sys::XLA_FFI_Error_Destroy_Args::sized();
        args.error = error;
        // SAFETY: passed on to the caller.
        unsafe {
            if let Some(destroy) = (&raw const (*self.api).XLA_FFI_Error_Destroy).read() {
                destroy(&mut args);
            }
        }
    }
}

impl Shared {
    fn run(&self) {
        loop {
            let part = self.next.fetch_add(1, Ordering::Relaxed);
            if part >= self.parts {
                return;
            }
            // SAFETY: the part is left until the count below.
            let work = unsafe { &*self.work };
            if catch_unwind(AssertUnwindSafe(|| work(part))).is_err() {
                self.panicked.store(true, Ordering::Relaxed);
            }
            if self.left.fetch_sub(1, Ordering::AcqRel) == 1 {
                self.caller.unpark();
            }
        }
    }
}

unsafe extern "C" fn task(data: *mut std::ffi::c_void) {
    // SAFETY: the reference that `schedule` gave away.
    unsafe { Arc::from_raw(data.cast::<Shared>()) }.run();
}
