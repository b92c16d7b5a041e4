//! Who runs the programs of a stream and makes its values: the devices of a client, or a device that is not there.

use crate::collective::Exchange;
use crate::error::{Error, Result};
use crate::graph::Check;
use crate::known::Indices;
use crate::lanes::Turn;
use crate::mark::Note;
use crate::program::Program;
use crate::site::Site;
use crate::spread::Sharded;
use crate::timing::Before;
use crate::underway::Underway;
use crate::value::{State, Value};
use crate::view::View;
use crate::work::{Task, Work};
use oxitorch_hlo::TensorType;
use oxitorch_pjrt as pjrt;
use parking_lot::Mutex;
use smallvec::SmallVec;
use std::fmt;
use std::sync::Arc;

/// One execution of a program.
pub(crate) struct Launch {
    pub(crate) program: Arc<Program>,
    pub(crate) inputs: SmallVec<[Arc<Value>; 4]>,
    pub(crate) outputs: SmallVec<[Arc<Value>; 2]>,
    /// The inputs that it may overwrite, where the program would overwrite others too.
    pub(crate) donated: Option<Indices>,
    /// How many ops it runs.
    pub(crate) ops: u64,
    /// The Python line of the first.
    pub(crate) first: Site,
    /// The number of its window for who listens; see [`Events`](crate::events::Events).
    pub(crate) window: u64,
    /// What Python did before it.
    pub(crate) before: Before,
    /// Whether it is the last of an optimizer's step.
    pub(crate) ends_step: bool,
    /// If other processes launch it too.
    pub(crate) agreement: Option<Arc<Agreement>>,
    /// What it checks, where the program is for many sizes, whose messages name another one, or was made for other lines.
    pub(crate) checks: Option<Arc<[Check]>>,
    /// Marks in it, each with the share of the recorded ops that comes before.
    pub(crate) notes: Vec<(f64, Note)>,
}

impl Launch {
    /// The inputs that it overwrites.
    pub(crate) fn donated(&self) -> &[u32] {
        self.donated.as_deref().unwrap_or(&self.program.donated)
    }

    /// The inputs that the program would overwrite, and this launch may not.
    pub(crate) fn kept(&self) -> SmallVec<[i64; 4]> {
        let Some(donated) = &self.donated else { return SmallVec::new() };
        let kept = self.program.donated.iter().filter(|i| !donated.contains(i));
        kept.map(|&i| i64::from(i)).collect()
    }

    /// Whether launching it runs it, if its inputs are there.
    pub(crate) fn is_inline(&self, platform: pjrt::Platform) -> bool {
        let small = |v: &Arc<Value>| v.bytes() <= SMALL;
        let all_small = || self.inputs.iter().all(small) && self.outputs.iter().all(small);
        platform == pjrt::Platform::Cpu && self.ops == 1 && self.program.spread.is_none() && all_small()
    }

    /// The Python line to blame when it fails: that of its largest result.
    pub(crate) fn site(&self) -> Site {
        self.outputs.iter().max_by_key(|v| v.bytes()).map_or(Site::default(), |v| v.site)
    }
}

/// A collective that was asked for.
#[derive(Debug)]
pub(crate) struct Asked {
    pub(crate) exchange: Arc<Exchange>,
    /// The members of each group, by the ids of their devices.
    pub(crate) groups: Box<[Vec<i32>]>,
    /// How many collectives these groups have done before: all members count alike.
    pub(crate) number: u64,
    /// If other processes are members.
    pub(crate) agreement: Option<Arc<Agreement>>,
}

/// How processes agree to launch a program together.
pub(crate) struct Agreement {
    /// Compares what they are about to do, in its turn. None when it has begun.
    task: Mutex<Option<(Box<dyn Task>, Turn)>>,
    /// Done when the device has run the program.
    pub(crate) work: Arc<Work>,
    /// From when they compare until then.
    pub(crate) underway: Mutex<Option<Underway>>,
}

impl Agreement {
    pub(crate) fn new(task: Box<dyn Task>, turn: Turn) -> Agreement {
        let work = Arc::new(Work::new(task.about(), turn.lane()));
        Agreement { task: Mutex::new(Some((task, turn))), work, underway: Mutex::default() }
    }

    /// It is done, or will not be. The first word counts.
    pub(crate) fn finish(&self, outcome: Result<()>) {
        if let Some(underway) = self.underway.lock().take() {
            underway.end(outcome.is_err());
        }
        self.work.finish(outcome);
    }

    /// The first time: what is to be run, or declined.
    pub(crate) fn take(&self) -> Option<(Box<dyn Task>, Turn)> {
        self.task.lock().take()
    }
}

impl fmt::Debug for Agreement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Agreement({})", self.work.lane())
    }
}

/// A task of this process in a collective of several, with the values that it reads and those that it writes. There are none
/// of tensors without elements.
pub(crate) struct GroupTask {
    pub(crate) task: Box<dyn Task>,
    pub(crate) work: Arc<Work>,
    pub(crate) reads: SmallVec<[Option<Arc<Value>>; 1]>,
    pub(crate) writes: SmallVec<[Option<Written>; 1]>,
    /// The Python line that asked for it.
    pub(crate) site: Site,
}

/// A value that a task writes, and the one whose memory it writes to.
pub(crate) struct Written {
    pub(crate) value: Arc<Value>,
    pub(crate) old: Old,
}

/// What a task writes over.
pub(crate) enum Old {
    /// Memory that nobody has used.
    Nothing,
    /// A value that nobody else wants: in its memory.
    Taken(Arc<Value>),
    /// A copy of a value.
    Copied(Arc<Value>),
}

impl GroupTask {
    /// The values that it makes.
    pub(crate) fn results(&self) -> impl Iterator<Item = &Arc<Value>> + Clone {
        self.writes.iter().flatten().map(|w| &w.value)
    }

    /// It will not be done.
    pub(crate) fn fail(&self, e: &Error) {
        self.results().for_each(|v| {
            v.charge.release();
            *v.state.lock() = State::Failed(e.clone());
        });
        self.work.finish(Err(e.clone()));
    }
}

/// A tensor that is to be given a larger size.
pub(crate) struct Pad {
    pub(crate) from: Arc<Value>,
    /// What the tensor shows of it.
    pub(crate) view: View,
    /// What has the larger size.
    pub(crate) to: Arc<Value>,
    /// The bytes of an element behind those of the tensor.
    pub(crate) fill: SmallVec<[u8; 16]>,
}

/// The CPU platform runs an op with results of so many bytes while it is launched.
pub(crate) const SMALL: u64 = 64 << 10;

/// Runs the programs of a stream, and makes its values.
pub(crate) trait Executor: Send + Sync {
    /// Runs a program, or queues it. `awaited`: the caller is about to wait for it.
    fn launch(&self, launch: Launch, awaited: bool);

    /// Does a collective in its turn, by the program in the launch or as it can.
    fn collective(&self, launch: Launch, asked: Asked);

    /// Does a task of this process in its turn, beside what does not need its results.
    fn task(&self, task: GroupTask, turn: Turn);

    /// Pads a tensor in its turn.
    fn pad(&self, pad: Pad);

    /// A step of an optimizer that was still to be launched is.
    fn stepped(&self) {}

    /// Makes a value of row-major bytes of the host. `first`: nothing was recorded since the last launch.
    fn upload(&self, ty: TensorType, sharding: Sharded, bytes: &[u8], first: bool) -> Result<Arc<Value>>;

    /// The host reads a value that was never computed, of which the bytes may be known.
    fn read_absent(&self, value: &Arc<Value>, known: Option<&[u8]>, out: &mut [u8]) -> Result<()>;
}
