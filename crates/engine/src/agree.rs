//! The launcher's part in programs of several processes: before such a launch all members say that they are about to do
//! it. A device would wait for ever for one that does something else, or nothing.
//!
//! The word is passed by the host, on the thread of the group's lane, so that it has its place among the group's tasks.
//! The launch thread waits for it, and Python does not.

use crate::buffers::Done;
use crate::error::{self, Error, Result};
use crate::executor::{Agreement, Launch};
use crate::launch::Launcher;
use crate::site::Site;
use crate::underway::Underway;
use crate::work::Work;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

impl Launcher {
    /// Waits until all members are about to launch this; an error if they are not.
    pub(crate) fn agree(&self, agreement: &Agreement, launch: &Launch) -> Result<()> {
        let Some((mut task, turn)) = agreement.take() else { return Ok(()) };
        let (about, site) = (agreement.work.about(), launch.first);
        let (place, reads, writes) =
            ((self.device, agreement.work.lane()), launch.inputs.iter(), launch.outputs.iter());
        *agreement.underway.lock() = Some(Underway::begin(&self.metrics, about, place, site, reads, writes));
        let said = Arc::new(Work::new(about.clone(), agreement.work.lane()));
        let own = said.clone();
        let job = move || {
            let outcome = catch_unwind(AssertUnwindSafe(|| task.run(&[], &mut [], site)));
            let outcome = outcome.unwrap_or_else(|_| Err("a task panicked; please report this".to_owned()));
            own.finish(outcome.map_err(Error::runtime));
        };
        turn.send(Box::new(job)).map_err(|e| no_thread(&e))?;
        self.await_work(&said)?;
        said.outcome().unwrap_or(Ok(()))
    }

    /// This process does not launch it: tells those who wait for it.
    pub(crate) fn decline(&self, agreement: &Agreement, e: &Error, site: Site) {
        agreement.finish(Err(e.clone()));
        let Some((mut task, turn)) = agreement.take() else { return };
        let why = e.message.to_string();
        let job = move || {
            // What the others answer is no news here.
            let _ = catch_unwind(AssertUnwindSafe(|| task.decline(&why, site)));
        };
        // Without a thread the others wait as for a process that has ended.
        let _ = turn.send(Box::new(job));
    }
}

impl Agreement {
    /// The device runs it, or has run it.
    pub(crate) fn begun(self: &Arc<Self>, name: &str, done: Option<&Done>) {
        let Some(done) = done else { return self.finish(Ok(())) };
        let last = Arc::new(Last { agreement: self.clone(), name: name.to_owned() });
        done.then(move |outcome| last.agreement.finish(outcome.map_err(|e| error::device(&last.name, &e))));
    }
}

/// Finishes a work when nobody will say more of it.
struct Last {
    agreement: Arc<Agreement>,
    name: String,
}

impl Drop for Last {
    fn drop(&mut self) {
        self.agreement.finish(Ok(()));
    }
}

fn no_thread(e: &std::io::Error) -> Error {
    Error::runtime(format!("no thread for a process group: {e}"))
}
