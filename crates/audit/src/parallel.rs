//! Many files at once, each on a stack that is enough for any text.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::error::Error;

/// The stack of a thread that reads: enough for a tree of the deepest text that is read (`python/nesting.rs`), and taken
/// from the system as it is used.
const STACK: usize = 1 << 30;

/// Runs a function on a stack that is enough for any text.
#[allow(clippy::expect_used, reason = "there is nothing to be done without a thread")]
pub(crate) fn with_stack<R: Send>(run: impl FnOnce() -> R + Send) -> R {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().stack_size(STACK).spawn_scoped(scope, run);
        let thread = thread.expect("the system gives a thread");
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Does something with each item, in as many threads as there are cores; the results are in the items' order.
pub(crate) fn in_parallel<T: Sync, R: Send>(
    items: &[T],
    each: impl Fn(&T) -> R + Sync,
) -> Result<Vec<R>, Error> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(items.len().max(1));
    let next = AtomicUsize::new(0);
    let done = Mutex::new(Vec::with_capacity(items.len()));
    std::thread::scope(|scope| {
        for _ in 0..threads {
            let work = || {
                let mut mine = Vec::new();
                while let Some((i, item)) = {
                    let i = next.fetch_add(1, Ordering::Relaxed);
                    items.get(i).map(|item| (i, item))
                } {
                    mine.push((i, each(item)));
                }
                done.lock().unwrap_or_else(|e| e.into_inner()).extend(mine);
            };
            std::thread::Builder::new().stack_size(STACK).spawn_scoped(scope, work).map_err(Error::Thread)?;
        }
        Ok(())
    })?;
    let mut done = done.into_inner().unwrap_or_else(|e| e.into_inner());
    done.sort_by_key(|(i, _)| *i);
    Ok(done.into_iter().map(|(_, r)| r).collect())
}
