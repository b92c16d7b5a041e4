//! Keeping the process's signal handlers while a plugin initialises: libtpu replaces SEGV, ABRT, TERM and others, and
//! Python's own must stay.

/// Runs `f` and puts back every signal handler that it changed.
pub(crate) fn preserved<T>(f: impl FnOnce() -> T) -> T {
    let saved = Saved::take();
    let result = f();
    drop(saved);
    result
}

const SIGNALS: std::ops::RangeInclusive<i32> = 1..=31;

/// Signals that come from timers: libtpu starts a profiling timer and needs its handler for it.
const TIMERS: [i32; 3] = [libc::SIGPROF, libc::SIGVTALRM, libc::SIGALRM];

struct Saved(Vec<(i32, libc::sigaction)>);

impl Saved {
    fn take() -> Saved {
        Saved(SIGNALS.filter_map(|n| Some((n, current(n)?))).collect())
    }
}

impl Drop for Saved {
    fn drop(&mut self) {
        for (signal, action) in &self.0 {
            let default = action.sa_sigaction == libc::SIG_DFL;
            if TIMERS.contains(signal) && default {
                continue; // the plugin's timer keeps running, and the default is to end the process
            }
            let changed = current(*signal).is_some_and(|now| {
                now.sa_sigaction != action.sa_sigaction || now.sa_flags != action.sa_flags
            });
            if changed {
                // SAFETY: `action` was read from the same signal and is a valid disposition.
                unsafe { libc::sigaction(*signal, action, std::ptr::null_mut()) };
            }
        }
    }
}

fn current(signal: i32) -> Option<libc::sigaction> {
    // SAFETY: zeros are a valid `sigaction`, and a null new action only reads the old one.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        (libc::sigaction(signal, std::ptr::null(), &mut action) == 0).then_some(action)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    extern "C" fn handler(_: i32) {}

    #[test]
    fn handlers_are_put_back() {
        let before = current(libc::SIGUSR2).unwrap().sa_sigaction;
        preserved(|| {
            // SAFETY: installs a handler that does nothing.
            unsafe { libc::signal(libc::SIGUSR2, handler as *const () as libc::sighandler_t) };
            assert_ne!(current(libc::SIGUSR2).unwrap().sa_sigaction, before);
        });
        assert_eq!(current(libc::SIGUSR2).unwrap().sa_sigaction, before);
    }

    #[test]
    fn a_timer_keeps_its_handler() {
        assert_eq!(current(libc::SIGPROF).unwrap().sa_sigaction, libc::SIG_DFL);
        // Taken once: a function may have an address in each unit of code generation.
        let own = handler as *const () as libc::sighandler_t;
        // SAFETY: installs a handler that does nothing.
        preserved(|| unsafe { libc::signal(libc::SIGPROF, own) });
        assert_eq!(current(libc::SIGPROF).unwrap().sa_sigaction, own);
    }
}
