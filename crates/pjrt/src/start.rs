//! Waiting for a client that begins when all of its hosts or processes are there: plugins wait without a word.

use parking_lot::Mutex;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// How long something is waited for.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// After this time it is told.
    pub tell: Duration,
    /// After this time nobody waits any longer.
    pub limit: Duration,
    /// How often it is asked whether to go on.
    pub poll: Duration,
}

/// Why something was not waited for until its end.
#[derive(Debug)]
pub enum StartError<E> {
    /// Whoever waits was interrupted.
    Interrupted(E),
    /// It cannot be done.
    Failed(String),
}

/// What is done once, by a thread of its own, since it cannot be stopped: who asks again waits for the same.
pub struct Start<T>(Mutex<Option<Receiver<T>>>);

impl<T: Send + 'static> Default for Start<T> {
    fn default() -> Self {
        Start::new()
    }
}

impl<T: Send + 'static> Start<T> {
    /// Nothing that was begun.
    pub const fn new() -> Self {
        Start(Mutex::new(None))
    }

    /// What `work` gives; nothing if that takes too long, and then it goes on.
    ///
    /// # Errors
    /// If `interrupt` gives one, if `work` panicked, or if there are no more threads.
    pub fn run<E>(
        &self,
        patience: &Patience,
        work: impl FnOnce() -> T + Send + 'static,
        tell: impl Fn(),
        interrupt: impl Fn() -> Result<(), E>,
    ) -> Result<Option<T>, StartError<E>> {
        let mut begun = self.0.lock();
        if begun.is_none() {
            let (send, receive) = channel();
            let thread = std::thread::Builder::new().name("oxi-start".to_owned());
            // Nobody may be there any more to get it.
            let work = move || drop(send.send(work()));
            let failed = |e| StartError::Failed(format!("cannot start a thread: {e}"));
            thread.spawn(work).map_err(failed)?;
            *begun = Some(receive);
        }
        let (since, mut told) = (Instant::now(), false);
        while let Some(receive) = begun.as_ref() {
            match receive.recv_timeout(patience.poll) {
                Ok(done) => {
                    *begun = None;
                    return Ok(Some(done));
                }
                Err(RecvTimeoutError::Disconnected) => {
                    *begun = None;
                    let message = "the thread that starts the device panicked; please report this";
                    return Err(StartError::Failed(message.to_owned()));
                }
                Err(RecvTimeoutError::Timeout) => interrupt().map_err(StartError::Interrupted)?,
            }
            if !told && since.elapsed() >= patience.tell {
                told = true;
                tell();
            }
            if since.elapsed() >= patience.limit {
                break;
            }
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    const SHORT: Patience = Patience {
        tell: Duration::from_millis(20),
        limit: Duration::from_millis(60),
        poll: Duration::from_millis(5),
    };

    fn go_on() -> Result<(), &'static str> {
        Ok(())
    }

    #[test]
    fn what_is_soon_done_is_given_without_a_word() {
        let start = Start::new();
        let done = start.run(&SHORT, || 7, || panic!("told"), go_on);
        assert_eq!(done.unwrap(), Some(7));
    }

    #[test]
    fn what_takes_too_long_is_told_of_once_and_waited_for_again() {
        let (start, told, begun) = (Start::new(), AtomicUsize::new(0), Arc::new(AtomicUsize::new(0)));
        let (release, held) = channel::<()>();
        let counts = begun.clone();
        let work = move || {
            counts.fetch_add(1, Ordering::SeqCst);
            held.recv().is_ok()
        };
        let tell = || _ = told.fetch_add(1, Ordering::SeqCst);
        assert_eq!(start.run(&SHORT, work, tell, go_on).unwrap(), None);
        assert_eq!(told.load(Ordering::SeqCst), 1);
        release.send(()).unwrap();
        let again = start.run(&SHORT, || panic!("begun twice"), tell, go_on);
        assert_eq!((again.unwrap(), begun.load(Ordering::SeqCst)), (Some(true), 1));
    }

    #[test]
    fn a_signal_ends_the_wait() {
        let (start, (_release, held)) = (Start::new(), channel::<()>());
        let ended = start.run(&SHORT, move || held.recv().is_ok(), || (), || Err("Ctrl-C"));
        assert!(matches!(ended, Err(StartError::Interrupted("Ctrl-C"))));
    }

    #[test]
    fn a_panic_is_an_error() {
        let start: Start<()> = Start::new();
        // Writing the panic down takes its time.
        let patience = Patience { limit: Duration::from_secs(60), tell: Duration::from_secs(60), ..SHORT };
        let failed = start.run(&patience, || panic!("on purpose"), || (), go_on);
        assert!(matches!(failed, Err(StartError::Failed(message)) if message.contains("panicked")));
    }
}
