//! What `torch.profiler` asks for, through the shim.

use crate::abi;
use crate::state;
use oxitorch_engine::SeenKind;
use std::ffi::{CString, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// The operation or range that runs in this thread, as PyTorch's profiler counts them.
pub(crate) fn running() -> u64 {
    // SAFETY: reads a thread-local of the shim.
    state::setup().map_or(0, |setup| unsafe { (setup.shim.profiled)() })
}

/// Begins to keep what happens; the number for [`stop`], 0 if that failed. Starts no device.
pub(crate) unsafe extern "C" fn start() -> u64 {
    catch_unwind(state::listen).unwrap_or(0)
}

/// Calls `visit` for everything that happened since, once each.
pub(crate) unsafe extern "C" fn stop(
    number: u64,
    visit: unsafe extern "C" fn(*mut c_void, *const abi::Span),
    context: *mut c_void,
) {
    // A panic leaves the profile empty; the panic hook has printed it.
    let heard = catch_unwind(AssertUnwindSafe(|| state::heard(number).map(|h| h.seen())));
    for seen in heard.ok().flatten().unwrap_or_default() {
        let text = |s: &str| CString::new(s.replace('\0', " ")).unwrap_or_default();
        let (name, line) = (text(&seen.name), text(&seen.line));
        let span = abi::Span {
            kind: match seen.kind {
                SeenKind::Launch => abi::span::LAUNCH,
                SeenKind::Compile => abi::span::COMPILE,
                SeenKind::Wait => abi::span::WAIT,
                SeenKind::Copy => abi::span::COPY,
                SeenKind::Program => abi::span::PROGRAM,
            },
            device: i32::from(seen.device),
            start_ns: seen.start_ns,
            end_ns: seen.end_ns,
            thread: i64::from(seen.thread),
            window: seen.window,
            launched_in: seen.launched_in,
            bytes: seen.bytes,
            name: name.as_ptr(),
            line: line.as_ptr(),
        };
        // SAFETY: the shim's function, with the context that came with it; the texts live during the call.
        unsafe { visit(context, &span) };
    }
}
