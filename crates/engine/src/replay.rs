//! Recording by a recipe.

use crate::config::{Mode, Switches};
use crate::ending::Ending;
use crate::error::{Refusal, Result};
use crate::family::Numbers;
use crate::flush::Direct;
use crate::graph::{self, Graph};
use crate::known::Indices;
use crate::part::{Part, Results, donors};
use crate::program::Program;
use crate::recipe::{Argument, AtSize, Drawn, Input, Layout, Recipe, Rng, Shape, Source, Whole, address};
use crate::site::Site;
use crate::stream::Stream;
use crate::tensor::{Place, TensorRef};
use crate::value::{Held, Slot, State, Value};
use crate::window::Window;
use oxitorch_capture::Reason;
use oxitorch_hlo::TensorType;
use rustc_hash::FxHashMap;
use smallvec::SmallVec;
use std::sync::Arc;

/// Values of arguments in host memory, with the places of these.
type Hosts = SmallVec<[(u32, Arc<Value>); 4]>;

/// What the sources of a recipe mean in one call.
struct Values<'x> {
    numbers: &'x [Held],
    random: Rng<'x>,
    draws: &'x [Drawn],
    /// By storage.
    before: SmallVec<[Arc<Value>; 16]>,
    /// By argument.
    hosts: Hosts,
    results: Vec<Option<Arc<Value>>>,
    /// States of generators, and by how much these moved on.
    drawn: Vec<(Drawn, Arc<Value>)>,
}

impl Values<'_> {
    /// `None` for a result that an instance does not have.
    fn of(&mut self, source: Source) -> Option<Arc<Value>> {
        match source {
            Source::Storage(i) => Some(self.before[i as usize].clone()),
            Source::Host(i) => self.hosts.iter().find(|(at, _)| *at == i).map(|(_, v)| v.clone()),
            Source::Result(i) => self.results[i as usize].clone(),
            Source::Number(i) => Some(self.numbers[i as usize].value().clone()),
            Source::Random(i) => {
                while self.drawn.len() <= i as usize {
                    let drawn = self.draws[self.drawn.len()];
                    self.drawn.push((drawn, Value::generator((self.random)(drawn.0, drawn.1))));
                }
                Some(self.drawn[i as usize].1.clone())
            }
        }
    }

    /// Where each input of what was recorded comes from; nothing for one that is none of these.
    fn inputs(&self, inputs: &[Arc<Value>]) -> Option<Vec<Input>> {
        let before = self.before.iter().zip(0..).map(|(v, i)| (v, Input::Of(Source::Storage(i))));
        let hosts = self.hosts.iter().map(|(i, v)| (v, Input::Of(Source::Host(*i))));
        let numbers = self.numbers.iter().zip(0..).map(|(v, i)| (v.value(), Input::Of(Source::Number(i))));
        let drawn = self.drawn.iter().map(|(_, v)| (v, Input::Random));
        let all = before.chain(hosts).chain(numbers).chain(drawn);
        let known: FxHashMap<usize, Input> = all.map(|(v, input)| (address(&**v), input)).collect();
        inputs.iter().map(|v| known.get(&address(&**v)).copied()).collect()
    }
}

/// A call of a recipe: its line, and what is in force.
#[derive(Clone, Copy)]
struct Called<'x> {
    recipe: &'x Recipe,
    /// The recipe's, or those of this call.
    offsets: &'x [i64],
    slots: &'x [&'x Slot],
    device: u16,
    site: Site,
}

impl Called<'_> {
    /// The line of an op.
    fn line(&self, own: Site) -> Site {
        if own == Site::default() { self.site } else { own }
    }

    /// Gives the storages their new values, and makes those that the recipe makes.
    fn bind(&self, values: &mut Values<'_>) -> Vec<Slot> {
        for (storage, source) in &self.recipe.written {
            if let Some(value) = values.of(*source) {
                self.slots[*storage as usize].bind(value);
            }
        }
        for (storage, gone) in self.recipe.whole.iter().flat_map(|whole| &whole.donated) {
            self.slots[*storage as usize].bind(gone.clone());
        }
        let made = |(nbytes, source): &(usize, Option<Source>)| match source.and_then(|s| values.of(s)) {
            Some(value) => Slot::with(*nbytes, self.device, value),
            None => Slot::new(*nbytes, self.device),
        };
        self.recipe.made.iter().map(made).collect()
    }

    /// Records the ops one by one.
    fn record(&self, w: &mut Window, values: &mut Values<'_>) {
        let recipe = self.recipe;
        let mut sources = recipe.operands.iter();
        let mut offsets = self.offsets;
        for (inst, at) in recipe.insts.iter().zip(&recipe.sites) {
            let operands = sources.by_ref().take(inst.operands.len()).filter_map(|s| values.of(*s));
            let operands: SmallVec<[Arc<Value>; 6]> = operands.collect();
            w.site = self.line(*at);
            let (own, rest) = offsets.split_at(inst.offsets);
            offsets = rest;
            values.results.extend(w.record(inst, operands, own));
        }
        if w.in_body() {
            values
                .drawn
                .iter()
                .for_each(|((generator, blocks), state)| w.note_drawn(state, *generator, *blocks));
        }
        w.site = self.site;
    }

    /// How a program is launched that was recorded so.
    fn shape(&self, recorded: &Results<'_>, values: &Values<'_>) -> Option<Shape> {
        let part = recorded.part;
        let inputs = values.inputs(&part.inputs)?;
        let result = |(&i, v): (&u32, &Arc<Value>)| {
            // A line of the recipe's own, or of the caller's.
            let site = if v.site == self.site { Site::default() } else { v.site };
            (recorded.number(i), v.ty.clone(), v.sharding.clone(), site)
        };
        let place = |v: &Arc<Value>| part.inputs.iter().position(|input| Arc::ptr_eq(input, v));
        Some(Shape {
            options: part.options,
            ops: Arc::new(part.ops.clone()),
            inputs,
            live: part.live.clone(),
            results: part.live.iter().zip(&part.outputs).map(result).collect(),
            random: values.drawn.iter().map(|(n, v)| (*n, place(v).map(|at| at as u32))).collect(),
            moving: Box::default(),
            programs: Arc::default(),
            size: None,
        })
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
        random: Rng<'_>,
    ) -> Result<Option<Vec<Slot>>, Refusal> {
        let same = recipe.switches == switches.word() && recipe.device == self.device;
        if switches.mode == Mode::Debug || !same || self.is_outdated(recipe, switches) {
            return Ok(None);
        }
        let Some(slots) = recipe.storages(args) else { return Ok(None) };
        let Some(offsets) = recipe.offsets_with(args) else { return Ok(None) };
        let mut hosts = self.uploads(args)?;
        let call = Called { recipe, offsets: &offsets, slots: &slots, device: self.device, site };
        let first = recipe.sites.first().map_or(site, |s| call.line(*s));
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
                let bytes = &bytes[..dtype.size_bytes()];
                let stays = w.number(dtype, bytes);
                // A number that the function or another argument has, too, is so in this call, and not in each.
                let is_other = |v: &Arc<Value>| Arc::ptr_eq(v, &stays);
                let is_known = recipe.numbers.iter().any(|v| is_other(v.value()))
                    || hosts.iter().any(|(_, v)| is_other(v));
                hosts.push((i as u32, if is_known { Value::scalar(dtype, bytes) } else { stays }));
            }
        }
        let values = Values {
            numbers: &recipe.numbers,
            random,
            draws: &recipe.drawn,
            before,
            hosts,
            results: Vec::new(),
            drawn: Vec::new(),
        };
        let made = match &recipe.whole {
            Some(whole) => self.run_whole(&mut w, call, values, whole, switches)?,
            None => {
                let mut values = values;
                values.results.reserve(recipe.insts.len());
                call.record(&mut w, &mut values);
                let made = call.bind(&mut values);
                self.end_call(&mut w, switches.mode)?;
                made
            }
        };
        drop(w);
        self.metrics().count(&self.metrics().replays);
        self.after_op(switches.mode)?;
        Ok(Some(made))
    }

    /// Whether a recipe is for a size and other compiler options than are in force, for which nothing is known of it.
    fn is_outdated(&self, recipe: &Recipe, switches: &Switches) -> bool {
        let Some(shape) = recipe.whole.as_ref().and_then(|whole| whole.shape.lock().clone()) else {
            return false;
        };
        shape.size.is_some() && shape.options != self.compiler.in_force(switches.compiler_options)
    }

    /// Launches a recipe that is one program.
    fn run_whole(
        &self,
        w: &mut Window,
        call: Called<'_>,
        mut values: Values<'_>,
        whole: &Whole,
        switches: &Switches,
    ) -> Result<Vec<Slot>, Refusal> {
        self.flush(w, Reason::Jit)?;
        w.thread.options = switches.compiler_options;
        let reason = whole.reason();
        let known = whole.shape.lock().clone();
        let options = self.compiler.in_force(switches.compiler_options);
        if let Some(shape) = known.filter(|shape| shape.options == options) {
            return Ok(self.launch_shape(w, call, values, &shape, reason)?);
        }
        call.record(w, &mut values);
        let made = call.bind(&mut values);
        if w.others.ops > 0 {
            self.flush(w, reason)?; // with what other threads recorded
            return Ok(made);
        }
        self.flush_whole(w, reason, |recorded| {
            // The numbers of a program that takes offsets are of this call.
            let stays = call.recipe.moving.is_empty();
            let shape = stays.then(|| call.shape(recorded, &values)).flatten().map(Arc::new);
            *whole.shape.lock() = shape.clone();
            move |direct: Direct| {
                if let Some(shape) = shape {
                    shape.programs.lock().push(direct);
                }
            }
        })?;
        Ok(made)
    }

    /// Launches a recipe that was launched before.
    fn launch_shape(
        &self,
        w: &mut Window,
        call: Called<'_>,
        mut values: Values<'_>,
        shape: &Shape,
        reason: Reason,
    ) -> Result<Vec<Slot>> {
        let mut states = SmallVec::<[(u32, Arc<Value>); 4]>::new();
        for ((generator, blocks), input) in &shape.random {
            let state = Value::generator((values.random)(*generator, *blocks));
            states.extend(input.map(|i| (i, state)));
        }
        let state = |at: u32| states.iter().find(|(i, _)| *i == at).map(|(_, v)| v.clone());
        let input = |(input, at): (&Input, u32)| match input {
            Input::Of(source) => values.of(*source),
            Input::Random => state(at),
        };
        let mut inputs: SmallVec<[Arc<Value>; 4]> = shape.inputs.iter().zip(0..).filter_map(input).collect();
        let mut outputs = SmallVec::<[Arc<Value>; 2]>::new();
        values.results.resize(shape.results.last().map_or(0, |(i, ..)| *i as usize + 1), None);
        for (number, ty, sharding, site) in &shape.results {
            let value = Value::sharded(ty.clone(), sharding.clone(), State::Pending, call.line(*site));
            values.results[*number as usize] = Some(value.clone());
            outputs.push(value);
        }
        let made = call.bind(&mut values);
        drop(values);
        let donated = donors(&inputs, &outputs, |_| false);
        if !shape.moving.is_empty() {
            let offsets: Numbers = shape.moving.iter().map(|(at, _)| call.offsets[*at]).collect();
            inputs.push(Value::offsets(&offsets));
        }
        let known = shape.programs.lock().iter().find(|(d, ..)| *d == donated).cloned();
        let Some((_, program, numbers)) = known else {
            if let Some(size) = &shape.size {
                let program = self.of_sizes(size, &donated, w, reason)?;
                shape.programs.lock().push((donated, program.clone(), Numbers::new()));
                let first = (call.line(shape.ops.sites[0]), shape.ops.len());
                self.launch_known(w, inputs, outputs, first, (program, &size.numbers), reason);
                return Ok(made);
            }
            let same = ((*shape.ops).clone(), shape.live.clone(), shape.options);
            let mut part = Part::again(same, inputs.into_iter().collect(), outputs);
            self.launch_whole(w, &mut part, reason, |direct| shape.programs.lock().push(direct))?;
            return Ok(made);
        };
        let first = (call.line(shape.ops.sites[0]), shape.ops.len());
        let numbers = shape.size.as_ref().map_or(&numbers, |size| &size.numbers);
        self.launch_known(w, inputs, outputs, first, (program, numbers), reason);
        Ok(made)
    }

    /// A program for all sizes up to a bound that overwrites these inputs.
    fn of_sizes(&self, size: &AtSize, donated: &Indices, w: &Window, reason: Reason) -> Result<Arc<Program>> {
        let Graph { ops, inputs, given, options, live, sample, .. } = &*size.graph;
        self.begin_program(Graph {
            ops: ops.clone(),
            inputs: inputs.clone(),
            given: given.clone(),
            donated: donated.iter().copied().collect(),
            options: *options,
            live: live.clone(),
            spread: None,
            source: graph::Source { ended: Some(Ending::from(reason).at(w.site)), ..Default::default() },
            sample: sample.clone(),
        })
    }

    /// Makes the program of a recipe that is one, as a call would on arguments that nobody else has.
    pub(crate) fn prepare(
        &self,
        recipe: &Recipe,
        site: Site,
        switches: &Switches,
    ) -> Result<Option<Arc<Program>>> {
        let Some(whole) = &recipe.whole else { return Ok(None) };
        let program = self.rehearse(recipe, &recipe.offsets, site, switches, |w, _, _| {
            self.program_of_whole(w, whole.reason())
        })?;
        Ok(program.flatten())
    }

    /// How a recipe that is one program would be launched, and the types of the program's inputs.
    pub(crate) fn shape_of(
        &self,
        recipe: &Recipe,
        site: Site,
        switches: &Switches,
    ) -> Result<Option<(Shape, Vec<TensorType>)>> {
        let found = self.rehearse(recipe, &recipe.marked(), site, switches, |w, call, values| {
            let mut found = None;
            self.look_at_whole(w, Reason::Jit, |recorded| {
                let types = recorded.part.inputs.iter().map(|v| v.ty.clone()).collect();
                found = call.shape(recorded, values).map(|shape| (shape, types));
            })?;
            Ok(found)
        })?;
        let mut found = found.flatten();
        if let Some((shape, _)) = &mut found {
            shape.moving = recipe.unmark(&mut Arc::make_mut(&mut shape.ops).offsets);
        }
        Ok(found)
    }

    /// Records what a recipe says, with these offsets, on arguments that nobody else has, and looks at it. Nothing if other
    /// threads record.
    fn rehearse<T>(
        &self,
        recipe: &Recipe,
        offsets: &[i64],
        site: Site,
        switches: &Switches,
        look: impl FnOnce(&mut Window, &Called<'_>, &Values<'_>) -> Result<T>,
    ) -> Result<Option<T>> {
        let pending = |ty: &TensorType| Value::new(ty.clone(), State::Pending);
        let before: SmallVec<[Arc<Value>; 16]> = recipe.types.iter().map(pending).collect();
        let storages = recipe.arguments.iter().filter_map(|a| a.storage).max().map_or(0, |last| last + 1);
        let slot = |i: u32| match before.get(i as usize) {
            Some(value) => Slot::with(value.whole_bytes() as usize, self.device, value.clone()),
            None => Slot::new(0, self.device), // of what the function makes
        };
        let slots: Vec<Slot> = (0..storages).map(slot).collect();
        let slots: Vec<&Slot> = slots.iter().collect();
        let host = |(i, argument): (u32, &Argument)| {
            let Layout { dtype, sizes, .. } = &argument.layout;
            let value = match sizes.is_empty() {
                true => Value::scalar(*dtype, &vec![0; dtype.size_bytes()]),
                false => pending(&TensorType::new(*dtype, sizes.as_slice())),
            };
            argument.storage.is_none().then_some((i, value))
        };
        let hosts = (0..).zip(&recipe.arguments).filter_map(host).collect();
        let call = Called { recipe, offsets, slots: &slots, device: self.device, site };
        let (results, drawn, random) = (Vec::new(), Vec::new(), &|_: Option<usize>, _: u64| (0, 0));
        let (numbers, draws) = (&recipe.numbers, &recipe.drawn);
        let mut values = Values { numbers, random, draws, before, hosts, results, drawn };
        let mut w = self.lock(site);
        if w.tape.is_some() {
            return Ok(None);
        }
        self.flush(&mut w, Reason::Jit)?;
        w.thread.options = switches.compiler_options;
        if w.others.ops > 0 {
            return Ok(None); // what other threads recorded is in the window
        }
        call.record(&mut w, &mut values);
        let made = call.bind(&mut values);
        let found = look(&mut w, &call, &values)?;
        drop((made, values));
        Ok(Some(found))
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
