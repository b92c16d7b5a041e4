//! Recipes: what a compiled graph records, to be recorded again in one call. A [`Tape`](crate::tape::Tape) makes them.

use crate::collective::Exchange;
use crate::family::Numbers;
use crate::graph::{Check, Graph};
use crate::inst::Inst;
use crate::known::Indices;
use crate::ops::Ops;
use crate::program::Program;
use crate::shared::Shared;
use crate::site::Site;
use crate::spread::Sharded;
use crate::tensor::{Place as TensorPlace, TensorRef};
use crate::value::{Held, Slot, Value};
use crate::work::{About, Lane, Task};
use oxitorch_capture::Reason;
use oxitorch_hlo::{DType, Dims, Outline, TensorType};
use parking_lot::Mutex;
use rustc_hash::FxHashMap;
use smallvec::SmallVec;
use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Where an operand comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Source {
    /// What a storage of the arguments held before the graph ran.
    Storage(u32),
    /// The host memory of this argument.
    Host(u32),
    /// A result, counted over all instances and collectives in their order.
    Result(u32),
    /// A number of the graph.
    Number(u32),
    /// A state of a generator: which of those that the graph draws.
    Random(u32),
}

/// How a tensor looks at its storage.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Layout {
    pub(crate) dtype: DType,
    pub(crate) sizes: Dims,
    pub(crate) strides: Dims,
    pub(crate) offset: i64,
    pub(crate) conj: bool,
    pub(crate) neg: bool,
}

impl Layout {
    pub(crate) fn of(t: &TensorRef<'_>) -> Option<Layout> {
        Some(Layout {
            dtype: t.dtype?,
            sizes: Dims::from_slice(t.sizes),
            strides: Dims::from_slice(t.strides),
            offset: t.offset,
            conj: t.conj,
            neg: t.neg,
        })
    }

    fn is(&self, t: &TensorRef<'_>) -> bool {
        t.dtype == Some(self.dtype)
            && self.sizes.as_slice() == t.sizes
            && self.strides.as_slice() == t.strides
            && (self.offset, self.conj, self.neg) == (t.offset, t.conj, t.neg)
    }
}

/// An argument of a graph.
#[derive(Clone, Debug)]
pub(crate) struct Argument {
    pub(crate) layout: Layout,
    /// The number of its storage; none: it is in host memory.
    pub(crate) storage: Option<u32>,
}

/// Where the elements of a graph's result are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Home {
    /// In the storage of this argument.
    Argument(usize),
    /// In this one of the storages that the graph made.
    Made(usize),
}

/// A result of a graph.
#[derive(Debug)]
pub struct GraphOutput {
    pub(crate) home: Home,
    pub(crate) layout: Layout,
    pub(crate) contiguous: bool,
}

impl GraphOutput {
    /// The same of another recipe.
    pub(crate) fn again(&self) -> GraphOutput {
        GraphOutput { home: self.home, layout: self.layout.clone(), contiguous: self.contiguous }
    }

    /// Its storage.
    pub fn home(&self) -> Home {
        self.home
    }

    /// dtype, sizes, strides, offset, and whether those strides are row-major.
    pub fn layout(&self) -> (DType, &[i64], &[i64], i64, bool) {
        let l = &self.layout;
        (l.dtype, &l.sizes, &l.strides, l.offset, self.contiguous)
    }
}

/// What a graph records for arguments of one kind.
#[derive(Debug)]
pub struct Recipe {
    pub(crate) device: u16,
    /// What the instances were lowered with.
    pub(crate) switches: u64,
    pub(crate) arguments: Vec<Argument>,
    /// The types of the values in the arguments' storages.
    pub(crate) types: Vec<TensorType>,
    pub(crate) insts: Vec<Shared<Inst>>,
    /// The collectives of several processes between them.
    pub(crate) between: Vec<Arc<Between>>,
    /// The Python line of each instance; unknown if it is the line that calls.
    pub(crate) sites: Vec<Site>,
    pub(crate) operands: Vec<Source>,
    pub(crate) offsets: Vec<i64>,
    /// The offsets that follow from numbers among the arguments.
    pub(crate) moving: Vec<Moving>,
    pub(crate) numbers: Vec<Held>,
    /// What it draws from generators, in this order.
    pub(crate) drawn: Vec<Drawn>,
    /// Storages of the arguments that are empty before and after the function, which writes them before it reads them:
    /// gathered parameters.
    pub(crate) scratch: Vec<u32>,
    /// Storages of the arguments that get other values.
    pub(crate) written: Vec<(u32, Source)>,
    /// Storages that the graph makes, by size and value.
    pub(crate) made: Vec<(usize, Option<Source>)>,
    pub(crate) outputs: Vec<GraphOutput>,
    /// If a call is one program.
    pub(crate) whole: Option<Whole>,
}

/// A collective of several processes, between the instances of a recipe that is one function.
pub(crate) struct Between {
    /// How many instances come before, and how many results.
    pub(crate) at: usize,
    pub(crate) first: u32,
    pub(crate) lane: Lane,
    pub(crate) site: Site,
    pub(crate) about: About,
    /// What later calls do once more.
    pub(crate) pattern: Mutex<Box<dyn Task>>,
    pub(crate) how: How,
}

/// How a collective is done.
#[derive(Debug, PartialEq)]
pub(crate) enum How {
    /// By the task, on what it reads and what it writes: the types, and what was there if it finds that.
    Task {
        reads: Vec<Option<Source>>,
        writes: Vec<Option<(TensorType, Option<Source>)>>,
        named: SmallVec<[TensorType; 2]>,
    },
    /// By a program of the processes' devices.
    Program { exchange: Arc<Exchange>, groups: Box<[Vec<i32>]>, read: Source, result: TensorType },
}

impl How {
    /// The values that it takes.
    pub(crate) fn sources(&self) -> SmallVec<[Source; 4]> {
        match self {
            How::Task { reads, writes, .. } => {
                let old = writes.iter().flatten().filter_map(|(_, old)| *old);
                reads.iter().flatten().copied().chain(old).collect()
            }
            How::Program { read, .. } => SmallVec::from_slice(&[*read]),
        }
    }

    /// The types that name it: those of what it writes, or of what it reads.
    pub(crate) fn named(&self) -> SmallVec<[TensorType; 2]> {
        match self {
            How::Task { named, .. } => named.clone(),
            How::Program { result, .. } => SmallVec::from_iter([result.clone()]),
        }
    }

    /// The types of its results.
    pub(crate) fn results(&self) -> impl Iterator<Item = &TensorType> {
        let (written, result) = match self {
            How::Task { writes, .. } => (&writes[..], None),
            How::Program { result, .. } => (&[][..], Some(result)),
        };
        written.iter().flatten().map(|(ty, _)| ty).chain(result)
    }
}

impl Between {
    /// The call with its tensors: `all_reduce(float32[1000])`.
    pub(crate) fn call(&self) -> String {
        self.about.call(self.how.named().iter())
    }

    /// Whether it does the same.
    pub(crate) fn is_like(&self, other: &Between) -> bool {
        (self.at, self.lane, self.about.name) == (other.at, other.lane, other.about.name)
            && self.how == other.how
    }
}

impl std::fmt::Debug for Between {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} behind {} instances, {:?}", self.about.name, self.at, self.how)
    }
}

/// An offset that follows from a number of the host.
#[derive(Clone, Debug)]
pub(crate) struct Moving {
    /// Which offset.
    pub(crate) at: usize,
    /// What it may follow from. They have to say the same.
    pub(crate) places: Vec<Place>,
}

/// A number of the host, times a factor, and a term.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Place {
    pub(crate) argument: usize,
    pub(crate) factor: i64,
    pub(crate) term: i64,
}

/// What is known of a recipe that is one program.
#[derive(Debug, Default)]
pub(crate) struct Whole {
    /// Whether it makes the step of an optimizer.
    pub(crate) ends_step: bool,
    /// The storages of arguments that the caller gives away, and what they hold afterwards.
    pub(crate) donated: Vec<(u32, Arc<Value>)>,
    /// How it is launched, from the second call on.
    pub(crate) shape: Mutex<Option<Arc<Shape>>>,
    /// Whether that was not to be seen in the last call, as storages had one value.
    pub(crate) shares: AtomicBool,
    /// How it is launched if collectives are between.
    pub(crate) steps: Mutex<Option<Arc<Steps>>>,
    /// If it is a bound: what is compared with it, and its programs, by which of its numbers are one.
    pub(crate) bounds: Mutex<Vec<(Numbering, Arc<Bound>)>>,
}

/// How a call is launched that is several programs, with collectives between them.
#[derive(Debug)]
pub(crate) struct Steps {
    /// Number of the compiler options.
    pub(crate) options: u32,
    pub(crate) steps: Vec<Step>,
    /// How many results there are, up to the last that comes out of one.
    pub(crate) results: usize,
    /// Values that later steps need than the one that makes them, or than the first, by the last of these.
    pub(crate) held: Vec<(usize, Source)>,
}

/// One of them.
#[derive(Debug)]
pub(crate) enum Step {
    Program(Shape),
    /// The number of the collective.
    Between(usize),
}

/// A step of a function that is not called: a program, or a collective in words.
#[derive(Debug)]
pub enum Prepared<P> {
    /// The program, or its number among those of the process.
    Program(P),
    /// The call with its tensors.
    Collective(String),
}

/// Which of a recipe's numbers each operand is that is one, in their order.
pub(crate) type Numbering = Vec<u32>;

/// A recipe at the bound of a size.
#[derive(Debug)]
pub(crate) struct Bound {
    pub(crate) shape: Shape,
    pub(crate) graph: Graph,
    /// The module of the graph.
    pub(crate) outline: Outline,
    /// By a hash of the text.
    pub(crate) programs: Mutex<Vec<(u64, OfSizes)>>,
}

/// A program for all sizes up to a bound, in versions that overwrite other inputs.
#[derive(Clone, Debug)]
pub(crate) struct OfSizes {
    pub(crate) graph: Arc<Graph>,
    pub(crate) programs: Versions,
}

impl Whole {
    /// Why a window ends that is a call of it.
    pub(crate) fn reason(&self) -> Reason {
        if self.ends_step { Reason::Step } else { Reason::Jit }
    }
}

/// Programs of one function, by the inputs that they overwrite, and the offsets that they are given.
pub(crate) type Versions = Arc<Mutex<Vec<(Indices, Arc<Program>, Numbers)>>>;

/// What is launched in each call of a recipe that is one program.
#[derive(Debug)]
pub(crate) struct Shape {
    /// Number of the compiler options.
    pub(crate) options: u32,
    /// The ops that are needed.
    pub(crate) ops: Arc<Ops>,
    pub(crate) inputs: Vec<Source>,
    /// The results: their numbers among those of the ops that are needed, and of the recipe's, and what they are.
    pub(crate) live: Indices,
    pub(crate) results: Vec<(u32, TensorType, Sharded, Site)>,
    /// Offsets that follow from numbers, of the ops that are needed: their places among the recipe's, and among these ops'.
    pub(crate) moving: Box<[(usize, u32)]>,
    /// By the inputs that they overwrite.
    pub(crate) programs: Versions,
    /// If the programs are for all sizes up to this one. Then they are given the offsets that move.
    pub(crate) size: Option<Box<AtSize>>,
}

/// A size, of a recipe whose programs are for all sizes up to a bound.
#[derive(Debug)]
pub(crate) struct AtSize {
    /// The graph at the bound, whose sample is at a size for which the same program was made.
    pub(crate) graph: Arc<Graph>,
    /// What the program is given for this size.
    pub(crate) numbers: Numbers,
    /// What it checks: messages name this size.
    pub(crate) checks: Arc<[Check]>,
}

/// Reserves Philox blocks of a generator (`None`: the device's default one): gives seed and offset.
pub type Rng<'a> = &'a dyn Fn(Option<usize>, u64) -> (u64, u64);

/// A generator, none being the default one, and by how many blocks it moves on.
pub(crate) type Drawn = (Option<usize>, u64);

impl Recipe {
    /// Of a function that is one program, which may make the step of an optimizer, and may overwrite these arguments.
    pub(crate) fn whole(self, ends_step: bool, donated: &[u32]) -> Recipe {
        let is_given = |number: &u32| {
            let is_result = |o: &GraphOutput| match o.home {
                Home::Argument(at) => self.arguments[at].storage == Some(*number),
                Home::Made(_) => false,
            };
            self.written.iter().all(|(n, _)| n != number) && !self.outputs.iter().any(is_result)
        };
        let storages = donated.iter().filter_map(|&i| self.arguments.get(i as usize)?.storage);
        let mut donated: Vec<u32> = storages.filter(is_given).collect();
        donated.sort_unstable();
        donated.dedup();
        let donated = donated.into_iter().map(|i| (i, Value::given_away(&self.types[i as usize]))).collect();
        Recipe { whole: Some(Whole { ends_step, donated, ..Whole::default() }), ..self }
    }

    /// The offsets of a call with these arguments; none if what they follow from does not agree.
    pub(crate) fn offsets_with(&self, args: &[TensorRef<'_>]) -> Option<Cow<'_, [i64]>> {
        if self.moving.is_empty() {
            return Some(Cow::Borrowed(&self.offsets));
        }
        let mut offsets = self.offsets.clone();
        for moving in &self.moving {
            let mut all = moving.places.iter().map(|place| {
                let TensorPlace::Host(bytes) = args[place.argument].place else { return None };
                let number = i64::from_le_bytes(bytes.get(..8)?.try_into().ok()?);
                number.checked_mul(place.factor)?.checked_add(place.term)
            });
            let first = all.next()??;
            if !all.all(|other| other == Some(first)) {
                return None;
            }
            offsets[moving.at] = first;
        }
        Some(Cow::Owned(offsets))
    }

    /// The offsets, in which each that moves is a number that no other is.
    pub(crate) fn marked(&self) -> Vec<i64> {
        let mut offsets = self.offsets.clone();
        self.moving.iter().zip(0..).for_each(|(moving, i)| offsets[moving.at] = i64::MIN + i);
        offsets
    }

    /// Puts the offsets back into ops that were recorded with them marked; gives the places of those that move.
    pub(crate) fn unmark(&self, ops: &mut [i64]) -> Box<[(usize, u32)]> {
        let mut places = Vec::new();
        for (moving, i) in self.moving.iter().zip(0..) {
            if let Some(place) = ops.iter().position(|&offset| offset == i64::MIN + i) {
                ops[place] = self.offsets[moving.at];
                places.push((moving.at, place as u32));
            }
        }
        places.into()
    }

    /// Whether an instance or a collective takes what a storage held before.
    pub(crate) fn takes(&self, storage: u32) -> bool {
        let own = Source::Storage(storage);
        self.operands.contains(&own) || self.between.iter().any(|b| b.how.sources().contains(&own))
    }

    /// The last part that needs each result: parts are the instances between collectives, each with the collective before
    /// it; none if no other one does than that which makes it.
    pub(crate) fn last_uses(&self) -> FxHashMap<u32, usize> {
        let mut last = FxHashMap::default();
        let mut uses = |source: &Source, part: usize| {
            if let Source::Result(number) = source {
                let known = last.entry(*number).or_default();
                *known = part.max(*known);
            }
        };
        let mut operands = self.operands.iter();
        for (at, inst) in self.insts.iter().enumerate() {
            let part = self.between.partition_point(|b| b.at <= at);
            operands.by_ref().take(inst.operands.len()).for_each(|s| uses(s, part));
        }
        for (at, between) in self.between.iter().enumerate() {
            between.how.sources().iter().for_each(|s| uses(s, at + 1));
        }
        let ends =
            self.written.iter().map(|(_, s)| s).chain(self.made.iter().filter_map(|(_, s)| s.as_ref()));
        ends.for_each(|s| uses(s, usize::MAX));
        last
    }

    /// The graph's results.
    pub fn outputs(&self) -> &[GraphOutput] {
        &self.outputs
    }

    /// The storages of the arguments, if these are arguments of the recipe's kind.
    pub(crate) fn storages<'a>(&self, args: &[TensorRef<'a>]) -> Option<SmallVec<[&'a Slot; 16]>> {
        if self.arguments.len() != args.len() {
            return None;
        }
        let mut slots: SmallVec<[&'a Slot; 16]> = SmallVec::new();
        for (t, argument) in args.iter().zip(&self.arguments) {
            if !argument.layout.is(t) {
                return None;
            }
            match (t.place, argument.storage) {
                (TensorPlace::Device(slot), Some(number)) if slot.device == self.device => {
                    match slots.get(number as usize) {
                        None => slots.push(slot),
                        Some(known) if std::ptr::eq(*known, slot) => {}
                        Some(_) => return None,
                    }
                }
                (TensorPlace::Host(_), None) if t.contiguous => {}
                _ => return None,
            }
        }
        (self.written.is_empty() || are_distinct(&slots)).then_some(slots)
    }
}

/// Where something lies, to be compared and never followed.
pub(crate) fn address<T>(x: &T) -> usize {
    std::ptr::from_ref(x) as usize
}

/// Whether no storage is there twice.
pub(crate) fn are_distinct(slots: &[&Slot]) -> bool {
    let mut addresses: smallvec::SmallVec<[usize; 64]> = slots.iter().map(|s| address(*s)).collect();
    addresses.sort_unstable();
    addresses.windows(2).all(|pair| pair[0] != pair[1])
}
