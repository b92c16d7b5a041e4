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
use crate::recipe::{Argument, AtSize, Drawn, Layout, Prepared, Recipe, Rng, Shape, Source, Whole, address};
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
use std::sync::atomic::Ordering;

/// Values of arguments in host memory, with the places of these.
type Hosts = SmallVec<[(u32, Arc<Value>); 4]>;

/// What the sources of a recipe mean in one call.
pub(crate) struct Values<'x> {
    numbers: &'x [Held],
    random: Rng<'x>,
    draws: &'x [Drawn],
    /// By storage.
    before: SmallVec<[Arc<Value>; 16]>,
    /// By argument.
    hosts: Hosts,
    pub(crate) results: Vec<Option<Arc<Value>>>,
    /// States of generators, and by how much these moved on.
    drawn: Vec<(Drawn, Arc<Value>)>,
}

/// How far a recipe has been recorded.
#[derive(Default)]
pub(crate) struct Recorded {
    insts: usize,
    operands: usize,
    offsets: usize,
}

impl Values<'_> {
    /// `None` for a result that an instance does not have.
    pub(crate) fn of(&mut self, source: Source) -> Option<Arc<Value>> {
        match source {
            Source::Storage(i) => Some(self.before[i as usize].clone()),
            Source::Host(i) => self.hosts.iter().find(|(at, _)| *at == i).map(|(_, v)| v.clone()),
            Source::Result(i) => self.results[i as usize].clone(),
            Source::Number(i) => Some(self.numbers[i as usize].value().clone()),
            Source::Random(i) => {
                self.draw(i as usize + 1);
                Some(self.drawn[i as usize].1.clone())
            }
        }
    }

    /// Draws the first so many states of generators.
    fn draw(&mut self, count: usize) {
        while self.drawn.len() < count {
            let drawn = self.draws[self.drawn.len()];
            self.drawn.push((drawn, Value::generator((self.random)(drawn.0, drawn.1))));
        }
    }

    /// Moves generators on as the whole function does.
    pub(crate) fn draw_all(&mut self) {
        self.draw(self.draws.len());
    }

    /// The inputs and the results of a program that is launched so and is the last of the call.
    fn launched(mut self, shape: &Shape) -> Launched {
        let mut before: SmallVec<[Option<Arc<Value>>; 16]> =
            std::mem::take(&mut self.before).into_iter().map(Some).collect();
        let input = |source: &Source| match *source {
            // Each is one input.
            Source::Storage(i) => before[i as usize].take(),
            source => self.of(source),
        };
        let inputs: SmallVec<_> = shape.inputs.iter().filter_map(input).collect();
        debug_assert_eq!(inputs.len(), shape.inputs.len(), "a storage is two inputs");
        (inputs, shape.results.iter().filter_map(|(i, ..)| self.results[*i as usize].take()).collect())
    }

    /// Where each input of what was recorded comes from; nothing for one that is none of these.
    fn inputs(&self, inputs: &[Arc<Value>]) -> Option<Vec<Source>> {
        let before = self.before.iter().zip(0..).map(|(v, i)| (v, Source::Storage(i)));
        let hosts = self.hosts.iter().map(|(i, v)| (v, Source::Host(*i)));
        let numbers = self.numbers.iter().zip(0..).map(|(v, i)| (v.value(), Source::Number(i)));
        let drawn = self.drawn.iter().zip(0..).map(|((_, v), i)| (v, Source::Random(i)));
        // Of the program before.
        let results = self.results.iter().zip(0..);
        let results = results.filter_map(|(v, i)| Some((v.as_ref()?, Source::Result(i))));
        let all = results.chain(before).chain(hosts).chain(numbers).chain(drawn);
        let known: FxHashMap<usize, Source> = all.map(|(v, source)| (address(&**v), source)).collect();
        inputs.iter().map(|v| known.get(&address(&**v)).copied()).collect()
    }

    /// Whether one of these inputs is the value of several storages, as that of a copy is. In another call it may not be.
    fn shares(&self, inputs: &[Arc<Value>]) -> bool {
        let mut storages = FxHashMap::<usize, usize>::default();
        self.before.iter().for_each(|v| *storages.entry(address(&**v)).or_default() += 1);
        inputs.iter().any(|v| storages.get(&address(&**v)).is_some_and(|n| *n > 1))
    }
}

/// A call of a recipe: its line, and what is in force.
#[derive(Clone, Copy)]
pub(crate) struct Called<'x> {
    pub(crate) recipe: &'x Recipe,
    /// The recipe's, or those of this call.
    offsets: &'x [i64],
    slots: &'x [&'x Slot],
    /// Arguments that nobody else has and nobody looks at afterwards, by their numbers.
    given: &'x [u32],
    device: u16,
    pub(crate) site: Site,
}

impl<'x> Called<'x> {
    /// A call without arguments yet, from this line.
    pub(crate) fn of(recipe: &'x Recipe, device: u16, site: Site) -> Called<'x> {
        Called { recipe, offsets: &recipe.offsets, slots: &[], given: &[], device, site }
    }

    /// The same with other storages.
    pub(crate) fn with<'y>(self, slots: &'y [&'y Slot]) -> Called<'y>
    where
        'x: 'y,
    {
        Called { slots, ..self }
    }
}

/// The inputs and the results of a program.
type Launched = (SmallVec<[Arc<Value>; 4]>, SmallVec<[Arc<Value>; 2]>);

impl Called<'_> {
    /// The line of an op.
    pub(crate) fn line(&self, own: Site) -> Site {
        if own == Site::default() { self.site } else { own }
    }

    /// Gives the storages their new values, and makes those that the recipe makes.
    pub(crate) fn bind(&self, values: &mut Values<'_>) -> Vec<Slot> {
        for (storage, source) in &self.recipe.written {
            if let Some(value) = values.of(*source) {
                self.slots[*storage as usize].bind(value);
            }
        }
        for (storage, gone) in self.recipe.whole.iter().flat_map(|whole| &whole.donated) {
            self.slots[*storage as usize].bind(gone.clone());
        }
        for argument in self.given {
            if let Some(storage) = self.recipe.arguments.get(*argument as usize).and_then(|a| a.storage) {
                let gone = Value::given_away(&self.recipe.types[storage as usize]);
                self.slots[storage as usize].bind(gone);
            }
        }
        let made = |(nbytes, source): &(usize, Option<Source>)| match source.and_then(|s| values.of(s)) {
            Some(value) => Slot::with(*nbytes, self.device, value),
            None => Slot::new(*nbytes, self.device),
        };
        self.recipe.made.iter().map(made).collect()
    }

    /// Records the ops one by one.
    fn record(&self, w: &mut Window, values: &mut Values<'_>) {
        self.record_until(w, values, &mut Recorded::default(), self.recipe.insts.len());
    }

    /// Records the next ops, up to this one.
    pub(crate) fn record_until(
        &self,
        w: &mut Window,
        values: &mut Values<'_>,
        recorded: &mut Recorded,
        end: usize,
    ) {
        let recipe = self.recipe;
        let mut sources = recipe.operands[recorded.operands..].iter();
        let mut offsets = &self.offsets[recorded.offsets..];
        let next = recorded.insts..end;
        for (inst, at) in recipe.insts[next.clone()].iter().zip(&recipe.sites[next]) {
            let operands = sources.by_ref().take(inst.operands.len()).filter_map(|s| values.of(*s));
            let operands: SmallVec<[Arc<Value>; 6]> = operands.collect();
            w.site = self.line(*at);
            let (own, rest) = offsets.split_at(inst.offsets);
            offsets = rest;
            values.results.extend(w.record(inst, operands, own));
        }
        *recorded = Recorded {
            insts: end,
            operands: recipe.operands.len() - sources.len(),
            offsets: self.offsets.len() - offsets.len(),
        };
        if w.in_body() {
            values
                .drawn
                .iter()
                .for_each(|((generator, blocks), state)| w.note_drawn(state, *generator, *blocks));
        }
        w.site = self.site;
    }

    /// Makes the results of a program that is launched so.
    fn begin(&self, values: &mut Values<'_>, shape: &Shape) {
        values.draw_all();
        values.results.resize_with(shape.results.last().map_or(0, |(i, ..)| *i as usize + 1), || None);
        for (number, ty, sharding, site) in &shape.results {
            let value = Value::sharded(ty.clone(), sharding.clone(), State::Pending, self.line(*site));
            values.results[*number as usize] = Some(value);
        }
    }

    /// How a program is launched that was recorded so, whose results are those from `first` on. None if it is not known in
    /// which storage an input is.
    pub(crate) fn shape(&self, recorded: &Results<'_>, values: &Values<'_>, first: u32) -> Option<Shape> {
        let part = recorded.part;
        if values.shares(&part.inputs) {
            return None;
        }
        let inputs = values.inputs(&part.inputs)?;
        let result = |(&i, v): (&u32, &Arc<Value>)| {
            // A line of the recipe's own, or of the caller's.
            let site = if v.site == self.site { Site::default() } else { v.site };
            (first + recorded.number(i), v.ty.clone(), v.sharding.clone(), site)
        };
        Some(Shape {
            options: part.options,
            ops: Arc::new(part.ops.clone()),
            inputs,
            live: part.live.clone(),
            results: part.live.iter().zip(&part.outputs).map(result).collect(),
            moving: Box::default(),
            programs: Arc::default(),
            size: None,
        })
    }
}

/// Arguments of a recipe that nobody else has, and of which nothing is known.
pub(crate) struct Rehearsal {
    slots: Vec<Slot>,
    before: SmallVec<[Arc<Value>; 16]>,
    hosts: Hosts,
}

impl Rehearsal {
    pub(crate) fn new(recipe: &Recipe, device: u16) -> Rehearsal {
        let pending = |ty: &TensorType| Value::new(ty.clone(), State::Pending);
        let before: SmallVec<[Arc<Value>; 16]> = recipe.types.iter().map(pending).collect();
        let storages = recipe.arguments.iter().filter_map(|a| a.storage).max().map_or(0, |last| last + 1);
        let slot = |i: u32| match before.get(i as usize) {
            Some(value) => Slot::with(value.whole_bytes() as usize, device, value.clone()),
            None => Slot::new(0, device), // of what the function makes
        };
        let host = |(i, argument): (u32, &Argument)| {
            let Layout { dtype, sizes, .. } = &argument.layout;
            let value = match sizes.is_empty() {
                true => Value::scalar(*dtype, &vec![0; dtype.size_bytes()]),
                false => pending(&TensorType::new(*dtype, sizes.as_slice())),
            };
            argument.storage.is_none().then_some((i, value))
        };
        let hosts = (0..).zip(&recipe.arguments).filter_map(host).collect();
        Rehearsal { slots: (0..storages).map(slot).collect(), before, hosts }
    }

    pub(crate) fn slots(&self) -> Vec<&Slot> {
        self.slots.iter().collect()
    }

    pub(crate) fn values<'x>(&self, recipe: &'x Recipe) -> Values<'x> {
        Values {
            numbers: &recipe.numbers,
            random: &|_, _| (0, 0),
            draws: &recipe.drawn,
            before: self.before.clone(),
            hosts: self.hosts.clone(),
            results: Vec::new(),
            drawn: Vec::new(),
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
        random: Rng<'_>,
    ) -> Result<Option<Vec<Slot>>, Refusal> {
        self.replay_giving(recipe, (args, &[]), site, switches, random)
    }

    /// The same. Of these arguments the program may overwrite some, by their numbers: nobody looks at them afterwards, nor
    /// is a result in their memory.
    pub fn replay_giving(
        &self,
        recipe: &Recipe,
        (args, given): (&[TensorRef<'_>], &[u32]),
        site: Site,
        switches: &Switches,
        random: Rng<'_>,
    ) -> Result<Option<Vec<Slot>>, Refusal> {
        let same = recipe.switches == switches.word() && recipe.device == self.device;
        if switches.mode == Mode::Debug || !same || self.is_outdated(recipe, switches) {
            return Ok(None);
        }
        self.rehearse_shared(recipe, site, switches)?;
        let Some(slots) = recipe.storages(args) else { return Ok(None) };
        let Some(offsets) = recipe.offsets_with(args) else { return Ok(None) };
        let mut hosts = self.uploads(args)?;
        let call = Called { recipe, offsets: &offsets, slots: &slots, given, device: self.device, site };
        let first = recipe.sites.first().map_or(site, |s| call.line(*s));
        // Before the window is locked, as who records a collective does.
        let mut orders = recipe.orders();
        let mut w = self.lock(site);
        if w.tape.is_some() {
            return Ok(None);
        }
        self.make_room(&mut w, first, switches)?;
        let mut before = SmallVec::new();
        for ((slot, ty), number) in slots.iter().zip(&recipe.types).zip(0..) {
            if recipe.scratch.contains(&number) {
                if slot.nbytes > 0 {
                    return Ok(None);
                }
                before.push(Value::new(ty.clone(), State::Pending)); // which nothing takes
                continue;
            }
            let value = w.slot_value(slot, ty.dtype, &ty.shape)?;
            match value.ty == *ty {
                true => before.push(value),
                false => match w.retyped(slot, &value, ty)? {
                    Some(value) => before.push(value),
                    None => return Ok(None),
                },
            }
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
            Some(whole) if !recipe.between.is_empty() => {
                match self.run_steps(&mut w, call, values, whole, &mut orders, switches)? {
                    Some(made) => made,
                    None => return Ok(None),
                }
            }
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
        drop(orders);
        self.metrics().count(&self.metrics().replays);
        self.after_op(switches.mode)?;
        Ok(Some(made))
    }

    /// Finds out how a recipe is launched that shared values when it was recorded, on arguments that share none.
    fn rehearse_shared(&self, recipe: &Recipe, site: Site, switches: &Switches) -> Result<()> {
        if let Some(whole) = &recipe.whole
            && whole.shares.swap(false, Ordering::Relaxed)
            && let Some((shape, _)) = self.shape_of(recipe, site, switches)?
        {
            *whole.shape.lock() = Some(Arc::new(shape));
        }
        Ok(())
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
            let shape = stays.then(|| call.shape(recorded, &values, 0)).flatten().map(Arc::new);
            *whole.shape.lock() = shape.clone();
            whole.shares.store(stays && values.shares(&recorded.part.inputs), Ordering::Relaxed);
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
        call.begin(&mut values, shape);
        let made = call.bind(&mut values);
        let (inputs, outputs) = values.launched(shape);
        self.launch_program(w, call, shape, inputs, outputs, reason.into())?;
        Ok(made)
    }

    /// Launches a program that was launched before, on these inputs.
    pub(crate) fn launch_program(
        &self,
        w: &mut Window,
        call: Called<'_>,
        shape: &Shape,
        mut inputs: SmallVec<[Arc<Value>; 4]>,
        outputs: SmallVec<[Arc<Value>; 2]>,
        ending: Ending<'_>,
    ) -> Result<()> {
        let donated = donors(&inputs, || outputs.iter().map(|o| o.bytes()), |_| false);
        if !shape.moving.is_empty() {
            let offsets: Numbers = shape.moving.iter().map(|(at, _)| call.offsets[*at]).collect();
            inputs.push(Value::offsets(&offsets));
        }
        let known = shape
            .programs
            .lock()
            .iter()
            .find(|(d, ..)| *d == donated)
            .map(|(_, p, n)| (p.clone(), n.clone()));
        let Some((program, numbers)) = known else {
            if let Some(size) = &shape.size {
                let program = self.of_sizes(size, &donated, w, ending)?;
                shape.programs.lock().push((donated, program.clone(), Numbers::new()));
                let first = (call.line(shape.ops.sites[0]), shape.ops.len());
                let known = (program, &size.numbers, Some(size.checks.clone()));
                self.launch_known(w, inputs, outputs, first, known, ending);
                return Ok(());
            }
            let same = ((*shape.ops).clone(), shape.live.clone(), shape.options);
            let mut part = Part::again(same, inputs.into_iter().collect(), outputs);
            return self.launch_whole(w, &mut part, ending, |direct| shape.programs.lock().push(direct));
        };
        let first = (call.line(shape.ops.sites[0]), shape.ops.len());
        let (numbers, checks) = match &shape.size {
            Some(size) => (&size.numbers, Some(size.checks.clone())),
            None => (&numbers, program.checks_at(&shape.ops.sites, |site| call.line(site))),
        };
        self.launch_known(w, inputs, outputs, first, (program, numbers, checks), ending);
        Ok(())
    }

    /// A program for all sizes up to a bound that overwrites these inputs.
    fn of_sizes(
        &self,
        size: &AtSize,
        donated: &Indices,
        w: &Window,
        ending: Ending<'_>,
    ) -> Result<Arc<Program>> {
        let Graph { ops, inputs, given, options, live, sample, .. } = &*size.graph;
        self.begin_program(Graph {
            ops: ops.clone(),
            inputs: inputs.clone(),
            given: given.clone(),
            donated: donated.iter().copied().collect(),
            options: *options,
            live: live.clone(),
            spread: None,
            source: graph::Source { ended: Some(ending.at(w.site)), ..Default::default() },
            sample: sample.clone(),
        })
    }

    /// Makes the programs of a recipe that is a function, as a call would on arguments that nobody else has; none if it
    /// computes nothing.
    pub(crate) fn prepare(
        &self,
        recipe: &Recipe,
        site: Site,
        switches: &Switches,
    ) -> Result<Vec<Prepared<Arc<Program>>>> {
        let Some(whole) = &recipe.whole else { return Ok(Vec::new()) };
        if !recipe.between.is_empty() {
            return self.prepare_steps(recipe, whole, site, switches);
        }
        let known = whole.shape.lock().clone();
        if let Some(shape) = &known
            && let Some(size) = &shape.size
        {
            let program = self.prepare_size(recipe, shape, size, whole.reason(), site)?;
            return Ok(vec![Prepared::Program(program)]);
        }
        let program = self.rehearse(recipe, &recipe.offsets, site, switches, |w, _, _| {
            self.program_of_whole(w, whole.reason().into())
        })?;
        Ok(program.flatten().map(Prepared::Program).into_iter().collect())
    }

    /// The same of a recipe for a size, whose program is for all sizes up to a bound.
    fn prepare_size(
        &self,
        recipe: &Recipe,
        shape: &Shape,
        size: &AtSize,
        reason: Reason,
        site: Site,
    ) -> Result<Arc<Program>> {
        let rehearsal = Rehearsal::new(recipe, self.device);
        let slots = rehearsal.slots();
        let call = Called { slots: &slots, ..Called::of(recipe, self.device, site) };
        let mut values = rehearsal.values(recipe);
        call.begin(&mut values, shape);
        let made = call.bind(&mut values);
        let (inputs, outputs) = values.launched(shape);
        let donated = donors(&inputs, || outputs.iter().map(|o| o.bytes()), |_| false);
        drop(made);
        let known = shape.programs.lock().iter().find(|(d, ..)| *d == donated).map(|(_, p, _)| p.clone());
        if let Some(program) = known {
            return Ok(program);
        }
        let program = self.of_sizes(size, &donated, &self.lock(site), reason.into())?;
        shape.programs.lock().push((donated, program.clone(), Numbers::new()));
        Ok(program)
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
                found = call.shape(recorded, values, 0).map(|shape| (shape, types));
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
        let rehearsal = Rehearsal::new(recipe, self.device);
        let slots = rehearsal.slots();
        let call = Called { recipe, offsets, slots: &slots, given: &[], device: self.device, site };
        let mut values = rehearsal.values(recipe);
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
