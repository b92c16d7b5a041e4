//! Which accelerator PyTorch takes itself to have where it has CUDA too.
//!
//! PyTorch has one accelerator in a process, and a device from outside is it as soon as it is registered. Its backward
//! takes streams of the accelerator alone, and so that of CUDA tensors ends with an internal assertion
//! (pytorch/pytorch#161129); `torch.accelerator` and pinned memory are the device's, too. A package that is installed must
//! not do that to scripts that train on CUDA. What PyTorch asks is `c10::is_privateuse1_backend_registered()`, which
//! libtorch_cpu imports from another library; here it is given another function.
//!
//! With it the accelerator is CUDA until the device is started, and for backwards of CUDA tensors afterwards.

use crate::state;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

/// Backwards of CUDA tensors that run.
static ELSEWHERE: AtomicU64 = AtomicU64::new(0);

extern "C" fn is_accelerator() -> bool {
    state::started().is_some() && ELSEWHERE.load(SeqCst) == 0
}

/// A backward of CUDA tensors begins, or ends.
pub(crate) fn backward_elsewhere(begins: bool) {
    match begins {
        true => ELSEWHERE.fetch_add(1, SeqCst),
        false => ELSEWHERE.fetch_sub(1, SeqCst),
    };
}

/// Lets PyTorch ask here. False if it does not import what it asks, as where it is one library.
#[cfg(all(target_os = "linux", target_env = "gnu", any(target_arch = "x86_64", target_arch = "aarch64")))]
pub(crate) fn share() -> bool {
    use libloading::os::unix::{Library, RTLD_NOW};
    // SAFETY: nothing is loaded; what is loaded already is found by its name.
    let Ok(torch) = (unsafe { Library::open(Some("libtorch_cpu.so"), RTLD_NOW | libc::RTLD_NOLOAD) }) else {
        return false;
    };
    // SAFETY: only its address is taken: it is one of the functions that ask.
    let asks = unsafe { torch.get::<extern "C" fn()>(b"_ZN2at11accelerator14getAcceleratorEb\0") };
    asks.is_ok_and(|asks| {
        let (name, here) = (c"_ZN3c1033is_privateuse1_backend_registeredEv", is_accelerator as *mut _);
        // SAFETY: `bool()` both, and neither library is ever unloaded.
        unsafe { oxitorch_pjrt::replace_import(*asks as *const _, name, here) }
    })
}

#[cfg(not(all(
    target_os = "linux",
    target_env = "gnu",
    any(target_arch = "x86_64", target_arch = "aarch64")
)))]
pub(crate) fn share() -> bool {
    false
}
