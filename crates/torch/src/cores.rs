//! How many threads the cpu platform computes with in one of several processes that share a machine.
//!
//! XLA takes one for each core, in each process; PyTorch's CPU takes one under `torchrun`, which says so for OpenMP. Here the
//! processes share the cores, unless each was bound to its own, or `NPROC` says how many threads there shall be.

use crate::setup::Setup;
use pyo3::prelude::*;
use std::sync::atomic::Ordering::Relaxed;

/// The variable of the environment by which the plugin is told.
pub(crate) const THREADS: &str = "NPROC";

/// How many threads this process is to have; None: as many as the plugin thinks.
pub(crate) fn threads(setup: &Setup) -> Option<usize> {
    let processes = setup.processes.load(Relaxed);
    if processes < 2 || std::env::var_os(THREADS).is_some() {
        return None;
    }
    let (own, parents) = (cores(0)?, cores(parent())?);
    share(own, parents, processes)
}

/// A process that may use fewer cores than its parent has been bound to those.
fn share(own: usize, parents: usize, processes: usize) -> Option<usize> {
    (own >= parents).then(|| (own / processes).max(1))
}

/// Sets the variable as Python does, and takes it away again: processes that this one starts are not to have it.
pub(crate) fn set(threads: Option<usize>) -> PyResult<()> {
    crate::gil::with(|py| {
        let environ = py.import("os")?.getattr("environ")?;
        match threads {
            Some(n) => environ.set_item(THREADS, n.to_string()),
            None => environ.call_method1("pop", (THREADS, py.None())).map(drop),
        }
    })
}

fn parent() -> libc::pid_t {
    // SAFETY: asks only.
    unsafe { libc::getppid() }
}

/// How many cores a process may use, 0 for this one; None if the system does not say.
fn cores(process: libc::pid_t) -> Option<usize> {
    // SAFETY: the set is plain bits, and as long as is said.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        let asked = libc::sched_getaffinity(process, size_of::<libc::cpu_set_t>(), &raw mut set);
        (asked == 0).then(|| libc::CPU_COUNT(&set) as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_share_the_cores_that_they_are_not_bound_to() {
        assert_eq!((share(8, 8, 2), share(8, 8, 3), share(2, 2, 8)), (Some(4), Some(2), Some(1)));
        assert_eq!(share(4, 8, 2), None);
        let own = cores(0).unwrap();
        assert!(own > 0 && own == std::thread::available_parallelism().unwrap().get());
        assert_eq!(cores(-1), None);
    }
}
