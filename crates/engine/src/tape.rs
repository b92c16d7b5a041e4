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
use crate::recipe::{Argument, GraphOutput, Home, Layout, Recipe, Source, address};
use crate::shared::Shared;
use crate::site::Site;
use crate::tensor::{Place, TensorRef};
use crate::value::{Held, Value};
use oxitorch_hlo::DType;
use rustc_hash::FxHashMap;
use std::sync::Arc;
use std::thread::ThreadId;

/// A graph that is being played.
pub(crate) struct Tape {
    pub(crate) thread: ThreadId,
    /// The line that began to watch.
    pub(crate) site: Site,
    pub(crate) spoiled: bool,
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
}

impl Tape {
    /// A tape that notes nothing.
    pub(crate) fn spoiled(site: Site) -> Tape {
        Tape {
            thread: std::thread::current().id(),
            site,
            spoiled: true,
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

    /// The recipe, now that the graph was played with these arguments and results.
    pub(crate) fn recipe(
        self,
        device: u16,
        args: &[TensorRef<'_>],
        outputs: &[TensorRef<'_>],
        switches: &Switches,
    ) -> Option<Recipe> {
        if self.spoiled || args.len() != self.arguments.len() {
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
            written,
            made,
            outputs: results,
        })
    }
}
