//! Recording by a recipe.

use crate::config::{Mode, Switches};
use crate::error::Refusal;
use crate::recipe::{Recipe, Source};
use crate::site::Site;
use crate::stream::Stream;
use crate::tensor::{Place, TensorRef};
use crate::value::{Held, Slot, Value};
use smallvec::SmallVec;
use std::sync::Arc;

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
            if let (Place::Host(bytes), []) = (t.place, t.sizes) {
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
            if let Place::Host(bytes) = t.place
                && !t.sizes.is_empty()
                && t.numel() > 0
            {
                hosts.push((i as u32, self.upload(t.ty()?, bytes)?));
            }
        }
        Ok(hosts)
    }
}
