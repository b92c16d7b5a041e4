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
use crate::recipe::{Argument, Drawn, GraphOutput, Home, Layout, Recipe, Source, address};
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
    pub(crate) arguments: Vec<Argument>,
    /// Addresses of the slots of the arguments' storages; compared, never followed.
    pub(crate) slots: Vec<usize>,
    /// What these held.
    pub(crate) before: Vec<Arc<Value>>,
    /// Arguments in host memory, by address.
    pub(crate) host: FxHashMap<usize, u32>,
    pub(crate) known: FxHashMap<usize, Source>,
    /// Keeps what `known` names by address.
    pub(crate) kept: Vec<Arc<Value>>,
    pub(crate) insts: Vec<Shared<Inst>>,
    pub(crate) sites: Vec<Site>,
    pub(crate) operands: Vec<Source>,
    pub(crate) offsets: Vec<i64>,
    pub(crate) results: u32,
    pub(crate) numbers: Vec<Held>,
    pub(crate) drawn: Vec<DrawnState>,
}

/// A state of a generator that an op of the graph used.
pub(crate) struct DrawnState {
    pub(crate) drawn: Drawn,
    /// Seed and offset.
    pub(crate) state: (u64, u64),
    pub(crate) value: Arc<Value>,
}

impl Tape {
    /// A tape that notes nothing, for this reason.
    pub(crate) fn spoiled(why: &'static str, site: Site) -> Tape {
        Tape {
            thread: std::thread::current().id(),
            site,
            spoiled: Some((why, site)),
            whole: false,
            arguments: Vec::new(),
            slots: Vec::new(),
            before: Vec::new(),
            host: FxHashMap::default(),
            known: FxHashMap::default(),
            kept: Vec::new(),
            insts: Vec::new(),
            sites: Vec::new(),
            operands: Vec::new(),
            offsets: Vec::new(),
            results: 0,
            numbers: Vec::new(),
            drawn: Vec::new(),
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
        if self.spoiled.is_some() || args.len() < self.arguments.len() {
            return None;
        }
        let slot_of = |t: &TensorRef<'_>| match t.place {
            Place::Device(slot) if slot.device == device => Some(address(slot)),
            _ => None,
        };
        let mut written = Vec::new();
        let mut seen = vec![false; self.slots.len()];
        for (t, argument) in args.iter().zip(&self.arguments) {
            let (Place::Device(slot), Some(number)) = (t.place, argument.storage) else { continue };
            let number = number as usize;
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
        Some(Recipe {
            device,
            switches: switches.word(),
            arguments: self.arguments,
            types: self.before.iter().map(|v| v.ty.clone()).collect(),
            insts: self.insts,
            sites: self.sites,
            operands: self.operands,
            offsets: self.offsets,
            numbers: self.numbers,
            drawn: self.drawn.iter().map(|d| d.drawn).collect(),
            written,
            made,
            outputs: results,
            whole: None,
        })
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
