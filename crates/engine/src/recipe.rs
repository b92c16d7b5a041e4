//! Recipes: what a compiled graph records, to be recorded again in one call. A [`Tape`](crate::tape::Tape) makes them.

use crate::config::{Mode, Switches};
use crate::error::Refusal;
use crate::inst::Inst;
use crate::shared::Shared;
use crate::site::Site;
use crate::stream::Stream;
use crate::tape::are_distinct;
use crate::tensor::{Place as TensorPlace, TensorRef};
use crate::value::{Held, Slot, Value};
use oxitorch_hlo::{DType, Dims, TensorType};
use smallvec::SmallVec;
use std::sync::Arc;

/// Where an operand comes from.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Source {
    /// What a storage of the arguments held before the graph ran.
    Storage(u32),
    /// The host memory of this argument.
    Host(u32),
    /// A result, counted over all instances.
    Result(u32),
    /// A number of the graph.
    Number(u32),
    /// The default generator, moved on by so many blocks.
    Random(u64),
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

/// Where an argument is.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Place {
    /// In the storage of this number.
    Storage(u32),
    Host,
}

/// An argument of a graph.
#[derive(Debug)]
pub(crate) struct Argument {
    pub(crate) layout: Layout,
    pub(crate) place: Place,
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
    /// The Python line of each; unknown if it is the line that calls.
    pub(crate) sites: Vec<Site>,
    pub(crate) operands: Vec<Source>,
    pub(crate) offsets: Vec<i64>,
    pub(crate) numbers: Vec<Held>,
    /// Storages of the arguments that get other values.
    pub(crate) written: Vec<(u32, Source)>,
    /// Storages that the graph makes, by size and value.
    pub(crate) made: Vec<(usize, Option<Source>)>,
    pub(crate) outputs: Vec<GraphOutput>,
}

/// Values of arguments in host memory, with the places of these.
type Hosts = SmallVec<[(u32, Arc<Value>); 4]>;

/// What the sources of a recipe mean in one call.
struct Values<'x> {
    numbers: &'x [Held],
    random: &'x dyn Fn(u64) -> (u64, u64),
    /// By storage.
    before: SmallVec<[Arc<Value>; 16]>,
    /// By argument.
    hosts: Hosts,
    results: Vec<Option<Arc<Value>>>,
}

impl Values<'_> {
    /// `None` for a result that an instance does not have.
    fn of(&self, source: Source) -> Option<Arc<Value>> {
        match source {
            Source::Storage(i) => Some(self.before[i as usize].clone()),
            Source::Host(i) => self.hosts.iter().find(|(at, _)| *at == i).map(|(_, v)| v.clone()),
            Source::Result(i) => self.results[i as usize].clone(),
            Source::Number(i) => Some(self.numbers[i as usize].value().clone()),
            Source::Random(blocks) => Some(Value::generator((self.random)(blocks))),
        }
    }
}

impl Recipe {
    /// The graph's results.
    pub fn outputs(&self) -> &[GraphOutput] {
        &self.outputs
    }

    /// The storages of the arguments, if these are arguments of the recipe's kind.
    fn storages<'a>(&self, args: &[TensorRef<'a>]) -> Option<SmallVec<[&'a Slot; 16]>> {
        if self.arguments.len() != args.len() {
            return None;
        }
        let mut slots: SmallVec<[&'a Slot; 16]> = SmallVec::new();
        for (t, argument) in args.iter().zip(&self.arguments) {
            if !argument.layout.is(t) {
                return None;
            }
            match (t.place, argument.place) {
                (TensorPlace::Device(slot), Place::Storage(number)) if slot.device == self.device => {
                    match slots.get(number as usize) {
                        None => slots.push(slot),
                        Some(known) if std::ptr::eq(*known, slot) => {}
                        Some(_) => return None,
                    }
                }
                (TensorPlace::Host(_), Place::Host) if t.contiguous => {}
                _ => return None,
            }
        }
        (self.written.is_empty() || are_distinct(&slots)).then_some(slots)
    }
}

impl Stream {
    /// Records what a recipe says on these arguments; gives the storages that it makes. `None`: the arguments, or the
    /// switches, are not those of the recipe, and nothing was recorded.
    pub fn replay(
        &self,
        recipe: &Recipe,
        args: &[TensorRef<'_>],
        site: Site,
        switches: &Switches,
        random: &dyn Fn(u64) -> (u64, u64),
    ) -> Result<Option<Vec<Slot>>, Refusal> {
        let same = recipe.switches == switches.word() && recipe.device == self.device;
        if switches.mode == Mode::Debug || !same {
            return Ok(None);
        }
        let Some(slots) = recipe.storages(args) else { return Ok(None) };
        let mut hosts = self.uploads(args)?;
        let line = |s: Site| if s == Site::default() { site } else { s };
        let first = recipe.sites.first().map_or(site, |s| line(*s));
        let mut w = self.lock(site);
        if w.tape.is_some() {
            return Ok(None);
        }
        self.make_room(&mut w, first, switches)?;
        w.thread.options = switches.compiler_options;
        let mut before = SmallVec::new();
        for (slot, ty) in slots.iter().zip(&recipe.types) {
            let value = w.slot_value(slot, ty.dtype, &ty.shape)?;
            if value.ty != *ty {
                return Ok(None);
            }
            before.push(value);
        }
        for (i, t) in args.iter().enumerate() {
            if let (TensorPlace::Host(bytes), []) = (t.place, t.sizes) {
                let dtype = t.dtype()?;
                hosts.push((i as u32, w.number(dtype, &bytes[..dtype.size_bytes()])));
            }
        }
        let results = Vec::with_capacity(recipe.insts.len());
        let mut values = Values { numbers: &recipe.numbers, random, before, hosts, results };
        let mut sources = recipe.operands.iter();
        let mut offsets = recipe.offsets.as_slice();
        for (inst, at) in recipe.insts.iter().zip(&recipe.sites) {
            let operands = sources.by_ref().take(inst.operands.len()).filter_map(|s| values.of(*s));
            let operands: SmallVec<[Arc<Value>; 6]> = operands.collect();
            w.site = line(*at);
            let (own, rest) = offsets.split_at(inst.offsets);
            offsets = rest;
            values.results.extend(w.record(inst, operands, own));
        }
        for (storage, source) in &recipe.written {
            if let Some(value) = values.of(*source) {
                slots[*storage as usize].bind(value);
            }
        }
        let made = recipe.made.iter().map(|(nbytes, source)| match source.and_then(|s| values.of(s)) {
            Some(value) => Slot::with(*nbytes, self.device, value),
            None => Slot::new(*nbytes, self.device),
        });
        let made = made.collect();
        self.end_call(&mut w, switches.mode)?;
        drop(w);
        self.metrics().count(&self.metrics().replays);
        self.after_op(switches.mode)?;
        Ok(Some(made))
    }

    /// Copies the arguments in host memory that are more than a number.
    fn uploads(&self, args: &[TensorRef<'_>]) -> Result<Hosts, Refusal> {
        let mut hosts = Hosts::new();
        for (i, t) in args.iter().enumerate() {
            if let TensorPlace::Host(bytes) = t.place
                && !t.sizes.is_empty()
                && t.numel() > 0
            {
                hosts.push((i as u32, self.upload(t.ty()?, bytes)?));
            }
        }
        Ok(hosts)
    }
}
