//! Watching a compiled graph while it is played: what it records, and where each operand comes from.
//!
//! While a thread plays a graph, a [`Tape`] lies in the window of the device. Each operand of what is recorded must come
//! from somewhere that a later call has too: an argument of the graph, an earlier result, a number of the graph, the
//! generator. Anything else (a value that the host read, a copy of other host memory) spoils the tape, and the graph goes
//! on being played.
//!
//! A graph is a unit, with a tape or with a spoiled one: no window ends inside it unless a value is read.

use crate::config::Switches;
use crate::inst::Inst;
use crate::recipe::{Argument, Between, Drawn, GraphOutput, Home, Layout, Recipe, Source, address};
use crate::shared::Shared;
use crate::site::Site;
use crate::tensor::{Place, TensorRef};
use crate::value::{Held, Slot, Value};
use oxitorch_hlo::DType;
use rustc_hash::FxHashMap;
use std::sync::Arc;
use std::thread::ThreadId;

/// A graph that is being played.
pub(crate) struct Tape {
    pub(crate) thread: ThreadId,
    /// The line that began to watch.
    pub(crate) site: Site,
    /// Why there will be no recipe, and the line.
    pub(crate) spoiled: Option<(&'static str, Site)>,
    /// Whether what is recorded is to be one program.
    pub(crate) whole: bool,
    /// Whether nothing is to be done of what is recorded.
    pub(crate) dry: bool,
    pub(crate) arguments: Vec<Argument>,
    /// Addresses of the slots of the arguments' storages; compared, never followed.
    pub(crate) slots: Vec<usize>,
    /// What these held.
    pub(crate) before: Vec<Arc<Value>>,
    /// Those that held nothing yet.
    pub(crate) unwritten: Vec<u32>,
    /// Arguments in host memory, by address.
    pub(crate) host: FxHashMap<usize, u32>,
    pub(crate) known: FxHashMap<usize, Source>,
    /// Keeps what `known` names by address.
    pub(crate) kept: Vec<Arc<Value>>,
    pub(crate) insts: Vec<Shared<Inst>>,
    pub(crate) between: Vec<Arc<Between>>,
    pub(crate) sites: Vec<Site>,
    pub(crate) operands: Vec<Source>,
    pub(crate) offsets: Vec<i64>,
    pub(crate) results: u32,
    pub(crate) numbers: Vec<Held>,
    pub(crate) draws: Draws,
}

/// The seed of a generator, and its offset in blocks.
type RandomState = (u64, u64);

/// A state of a generator that an op of the graph used.
pub(crate) struct DrawnState {
    pub(crate) drawn: Drawn,
    state: RandomState,
    value: Arc<Value>,
}

/// What generators gave. A recipe moves them on from where they are in each call, so they may be set to states that they
/// had since the first draw, and to no others.
#[derive(Default)]
pub(crate) struct Draws {
    /// Each state once: what a backward computes again takes it once more.
    pub(crate) drawn: Vec<DrawnState>,
    /// Where the device's default generator is, if it was set.
    set: Option<RandomState>,
    /// Where it was when it was asked for its state, before it gave anything.
    began: Option<RandomState>,
}

impl Draws {
    /// The value of a state that an op takes, and where later calls find it, if that is not known yet; `None` if nowhere.
    pub(crate) fn draw(&mut self, state: RandomState, drawn: Drawn) -> Option<(Arc<Value>, Option<Source>)> {
        if drawn.0.is_none() && self.set.is_some() {
            self.set = Some(after(state, drawn.1));
        }
        if let Some(same) = self.drawn.iter_mut().find(|d| d.drawn.0 == drawn.0 && d.state == state) {
            // An op that draws nothing after all leaves the state to the next one.
            same.drawn.1 = same.drawn.1.max(drawn.1);
            return Some((same.value.clone(), None));
        }
        if self.end(drawn.0).is_some_and(|end| end != state) {
            return None;
        }
        let (value, source) = (Value::generator(state), Source::Random(self.drawn.len() as u32));
        self.drawn.push(DrawnState { drawn, state, value: value.clone() });
        Some((value, Some(source)))
    }

    /// Notes that somebody asked the default generator for its state, which it is perhaps set back to.
    pub(crate) fn read(&mut self, state: RandomState) {
        if self.end(None).is_none() {
            self.began = Some(state);
        }
    }

    /// Notes that the default generator was set; whether later calls find this state.
    pub(crate) fn set(&mut self, state: RandomState) -> bool {
        self.set = Some(state);
        let mut of_it = self.drawn.iter().filter(|d| d.drawn.0.is_none());
        of_it.any(|d| d.state == state || after(d.state, d.drawn.1) == state) || self.began == Some(state)
    }

    /// Whether the default generator is elsewhere now than where later calls leave it.
    pub(crate) fn is_set_back(&self) -> bool {
        self.set.is_some() && self.set != self.end(None).or(self.began)
    }

    fn end(&self, generator: Option<usize>) -> Option<RandomState> {
        let last = self.drawn.iter().rfind(|d| d.drawn.0 == generator)?;
        Some(after(last.state, last.drawn.1))
    }
}

fn after((seed, offset): RandomState, blocks: u64) -> RandomState {
    (seed, offset.wrapping_add(blocks))
}

impl Tape {
    /// A tape that notes nothing, for this reason.
    pub(crate) fn spoiled(why: &'static str, site: Site) -> Tape {
        Tape {
            thread: std::thread::current().id(),
            site,
            spoiled: Some((why, site)),
            whole: false,
            dry: false,
            arguments: Vec::new(),
            slots: Vec::new(),
            before: Vec::new(),
            unwritten: Vec::new(),
            host: FxHashMap::default(),
            known: FxHashMap::default(),
            kept: Vec::new(),
            insts: Vec::new(),
            between: Vec::new(),
            sites: Vec::new(),
            operands: Vec::new(),
            offsets: Vec::new(),
            results: 0,
            numbers: Vec::new(),
            draws: Draws::default(),
        }
    }

    pub(crate) fn is_here(&self) -> bool {
        self.thread == std::thread::current().id()
    }

    pub(crate) fn know(&mut self, value: &Arc<Value>, source: Source) {
        if self.known.insert(address(&**value), source).is_none() {
            self.kept.push(value.clone());
        }
    }

    pub(crate) fn source(&self, value: &Value) -> Option<Source> {
        self.known.get(&address(value)).copied()
    }

    /// The argument that lies there in host memory and has this type.
    pub(crate) fn host_argument(&self, dtype: DType, sizes: &[i64], bytes: &[u8]) -> Option<u32> {
        let at = *self.host.get(&(bytes.as_ptr() as usize))?;
        let layout = &self.arguments[at as usize].layout;
        (layout.dtype == dtype && layout.sizes.as_slice() == sizes).then_some(at)
    }

    /// The storages of arguments that hold something else than before, and what they held.
    pub(crate) fn changed<'a>(&self, args: &[TensorRef<'a>]) -> Vec<(&'a Slot, Arc<Value>)> {
        let mut changed = Vec::new();
        for (t, argument) in args.iter().zip(&self.arguments) {
            let (Place::Device(slot), Some(number)) = (t.place, argument.storage) else { continue };
            let before = &self.before[number as usize];
            if slot.value().is_none_or(|now| !Arc::ptr_eq(&now, before)) {
                changed.push((slot, before.clone()));
            }
        }
        changed
    }

    /// The lines of results that are still seen, though by none of these tensors.
    pub(crate) fn kept_elsewhere(&self, args: &[TensorRef<'_>], outputs: &[TensorRef<'_>]) -> Vec<Site> {
        let mut seen: FxHashMap<usize, u32> = FxHashMap::default();
        let mut slots: Vec<&Slot> = args.iter().chain(outputs).filter_map(|t| t.device().ok()).collect();
        slots.sort_unstable_by_key(|slot| address(*slot));
        slots.dedup_by_key(|slot| address(*slot));
        for value in slots.into_iter().filter_map(Slot::value) {
            *seen.entry(address(&*value)).or_default() += 1;
        }
        let is_result = |v: &Value| matches!(self.source(v), Some(Source::Result(_)));
        let is_kept = |v: &Value| v.holders() > seen.get(&address(v)).copied().unwrap_or(0);
        self.kept.iter().filter(|v| is_result(v) && is_kept(v)).map(|v| v.site).collect()
    }

    /// The recipe, now that the graph was played with these arguments and results. Tensors behind the arguments are made
    /// by the graph, and written anew in each call.
    pub(crate) fn recipe(
        mut self,
        device: u16,
        args: &[TensorRef<'_>],
        outputs: &[TensorRef<'_>],
        switches: &Switches,
    ) -> Option<Recipe> {
        if self.spoiled.is_some() || self.draws.is_set_back() || args.len() < self.arguments.len() {
            return None;
        }
        let slot_of = |t: &TensorRef<'_>| match t.place {
            Place::Device(slot) if slot.device == device => Some(address(slot)),
            _ => None,
        };
        let (mut written, mut scratch) = (Vec::new(), Vec::new());
        let mut seen = vec![false; self.slots.len()];
        for (t, argument) in args.iter().zip(&self.arguments) {
            let (Place::Device(slot), Some(number)) = (t.place, argument.storage) else { continue };
            let number = number as usize;
            if slot.nbytes == 0 && t.numel() > 0 {
                // It was there for a while, and is empty again.
                if !self.unwritten.contains(&(number as u32)) {
                    return None;
                }
                // Emptying it made another slot, and one that is new may lie where the old one lay.
                self.slots[number] = address(slot);
                if !std::mem::replace(&mut seen[number], true) {
                    scratch.push(number as u32);
                }
                continue;
            }
            if address(slot) != self.slots[number] {
                return None; // it was given another storage
            }
            if !std::mem::replace(&mut seen[number], true) {
                let now = slot.value()?;
                if !Arc::ptr_eq(&now, &self.before[number]) {
                    written.push((number as u32, self.source(&now)?));
                }
            }
        }
        for t in &args[self.arguments.len()..] {
            let Place::Device(slot) = t.place else { return None };
            let (at, layout) = (slot_of(t)?, Layout::of(t)?);
            let known = self.slots.iter().position(|s| *s == at);
            let number = match known {
                Some(number) => number as u32,
                None => {
                    let number = self.slots.len() as u32;
                    self.slots.push(at);
                    let value = slot.value()?;
                    written.push((number, self.source(&value)?));
                    number
                }
            };
            self.arguments.push(Argument { layout, storage: Some(number) });
        }
        let mut made = Vec::new();
        let mut made_at: FxHashMap<usize, usize> = FxHashMap::default();
        let mut results = Vec::new();
        for t in outputs {
            let Place::Device(slot) = t.place else { return None };
            let (at, layout) = (slot_of(t)?, Layout::of(t)?);
            if layout.conj || layout.neg {
                return None;
            }
            let home = match args.iter().position(|a| slot_of(a) == Some(at)) {
                Some(argument) => Home::Argument(argument),
                None => {
                    if let Some(&number) = made_at.get(&at) {
                        Home::Made(number)
                    } else {
                        let source = match slot.value() {
                            Some(value) => Some(self.source(&value)?),
                            None => None,
                        };
                        made_at.insert(at, made.len());
                        made.push((slot.nbytes, source));
                        Home::Made(made.len() - 1)
                    }
                }
            };
            results.push(GraphOutput { home, layout, contiguous: t.contiguous });
        }
        let recipe = Recipe {
            device,
            switches: switches.word(),
            arguments: self.arguments,
            types: self.before.iter().map(|v| v.ty.clone()).collect(),
            insts: self.insts,
            between: self.between,
            sites: self.sites,
            operands: self.operands,
            offsets: self.offsets,
            moving: Vec::new(),
            numbers: self.numbers,
            drawn: self.draws.drawn.iter().map(|d| d.drawn).collect(),
            scratch,
            written,
            made,
            outputs: results,
            whole: None,
        };
        let is_taken = recipe.scratch.iter().any(|&storage| recipe.takes(storage));
        (!is_taken).then_some(recipe)
    }
}

/// How a function ends that is to be one program.
#[derive(Clone, Copy, Debug)]
pub struct Ends<'a> {
    /// It made the step of an optimizer.
    pub step: bool,
    /// It was run to find out what it records, and nothing is to come of it.
    pub dry: bool,
    /// The arguments that it was given.
    pub donated: &'a [u32],
}

/// What came of a function that is to be one program.
#[derive(Debug)]
pub enum Traced {
    /// Later calls are recorded so.
    Function(Box<Recipe>),
    /// Tensors that it made are still seen though it does not return them, by the lines that made them.
    Kept(Vec<Site>),
    /// Later calls cannot be recorded so, for this reason, with its line.
    Refused(&'static str, Site),
}
