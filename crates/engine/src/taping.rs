//! Noting a recipe while a compiled graph is played.

use crate::config::{Mode, Switches};
use crate::error::{Error, Refusal, Result};
use crate::inst::{Inst, Kind};
use crate::mesh::Exchanged;
use crate::processes::{Target, named};
use crate::recipe::{Argument, Between, Drawn, How, Layout, Recipe, Source, address};
use crate::shared::Shared;
use crate::site::Site;
use crate::stream::Stream;
use crate::tape::{Ends, Tape, Traced};
use crate::tensor::{Place, TensorRef};
use crate::value::{Held, Slot, Value};
use crate::view::dense_order;
use crate::window::Window;
use crate::work::{About, Lane, Task};
use oxitorch_capture::Reason;
use oxitorch_hlo::{DType, Dims, TensorType};
use parking_lot::Mutex;
use std::sync::Arc;

impl Tape {
    /// A tape for these arguments; one that is spoiled where they are of a kind that no recipe can have.
    fn new(
        device: u16,
        args: &[TensorRef<'_>],
        w: &mut Window,
        site: Site,
        (whole, dry): (bool, bool),
    ) -> Result<Tape, Refusal> {
        let mut tape = Tape { spoiled: None, whole, dry, ..Tape::spoiled("", site) };
        for t in args {
            tape.add(device, t, w)?;
            if tape.spoiled.is_some() {
                break;
            }
        }
        Ok(tape)
    }

    /// One more argument, of which nothing recorded so far has the value.
    fn add(&mut self, device: u16, t: &TensorRef<'_>, w: &mut Window) -> Result<(), Refusal> {
        let refused = Some(("an argument that is no plain tensor of the device or of the host", w.site));
        let Some(layout) = Layout::of(t) else {
            self.spoiled = refused;
            return Ok(());
        };
        let storage = match t.place {
            Place::Device(slot) if slot.device == device => {
                let at = address(slot);
                let known = self.slots.iter().position(|s| *s == at);
                let number = match known {
                    Some(number) => number,
                    None => {
                        let is_written = slot.value().is_some();
                        let value = self.own_value(slot, &layout, w)?;
                        let number = self.slots.len();
                        if !is_written {
                            self.unwritten.push(number as u32);
                        }
                        self.slots.push(at);
                        self.before.push(value.clone());
                        self.know(&value, Source::Storage(number as u32));
                        number
                    }
                };
                Some(number as u32)
            }
            Place::Host(bytes) if t.contiguous && !t.conj && !t.neg => {
                self.host.insert(bytes.as_ptr() as usize, self.arguments.len() as u32);
                None
            }
            _ => {
                self.spoiled = refused;
                return Ok(());
            }
        };
        self.arguments.push(Argument { layout, storage });
        Ok(())
    }

    /// The value of a storage. Where another storage has the same one, an operand could be either's: then this one gets a
    /// copy, or there is no recipe.
    fn own_value(&mut self, slot: &Slot, layout: &Layout, w: &mut Window) -> Result<Arc<Value>, Refusal> {
        let mut value = w.slot_value(slot, layout.dtype, &layout.sizes)?;
        if self.whole
            && let Some(order) = dense_order(&layout.sizes, &layout.strides)
        {
            let sizes: Dims = order.iter().map(|&d| layout.sizes[d as usize]).collect();
            value = w.retyped(slot, &value, &TensorType::new(layout.dtype, sizes))?.unwrap_or(value);
        }
        if self.source(&value).is_none() {
            return Ok(value);
        }
        if !self.whole {
            self.spoiled = Some(("two arguments that share a value", w.site));
            return Ok(value);
        }
        let copy = w.apply(Kind::Copy(value.ty.clone()), [value])?;
        slot.bind(copy.clone());
        Ok(copy)
    }
}

const UNKNOWN: &str = "a tensor that is neither an argument nor a result";
const COLLECTIVE: &str = "a collective";
/// Python goes on with what it says.
const WAITS: &str = "a collective for which Python waits";
/// Later calls start with another state of the generator.
const SET: &str = "the state that a random generator is set to";

impl Window {
    /// Whether this thread plays a graph, or records the body of a loop: the window goes on.
    pub(crate) fn is_watched(&self) -> bool {
        self.in_body() || self.tape.as_deref().is_some_and(Tape::is_here)
    }

    fn tape(&mut self) -> Option<&mut Tape> {
        self.tape.as_deref_mut().filter(|t| t.is_here() && t.spoiled.is_none())
    }

    /// What is recorded depends on more than the graph.
    pub(crate) fn spoil(&mut self, why: &'static str) {
        let site = self.site;
        if let Some(tape) = self.tape() {
            tape.spoiled = Some((why, site));
        }
    }

    /// A collective of several processes comes: it is a part of a function, and of nothing else.
    pub(crate) fn meets_collective(&mut self) -> Result<()> {
        if self.in_body() || !self.tape().is_some_and(|tape| tape.whole) {
            return self.leave(COLLECTIVE);
        }
        Ok(())
    }

    /// Whether this thread runs a function of which nothing is to be done.
    pub(crate) fn is_dry(&self) -> bool {
        self.tape.as_deref().is_some_and(|tape| tape.is_here() && tape.dry)
    }

    /// Where a value comes from in later calls; nothing if none is noted, or if it cannot be noted.
    fn source(&mut self, value: &Value) -> Option<Source> {
        let site = self.site;
        let tape = self.tape()?;
        let source = tape.source(value);
        if source.is_none() {
            tape.spoiled = Some((UNKNOWN, site));
        }
        source
    }

    /// Notes a task on these values.
    pub(crate) fn note_task(
        &mut self,
        (task, lane): (&dyn Task, Lane),
        (given, reads): (&[TensorRef<'_>], &[Option<Held>]),
        (targets, old): (&[Target<'_>], &[Option<Held>]),
    ) -> Result<(), Refusal> {
        if self.tape().is_none() {
            return Ok(());
        }
        let mut source = |held: &Option<Held>| self.source(held.as_ref()?.value());
        let reads = reads.iter().map(&mut source).collect();
        let (mut writes, named) = (Vec::new(), named(given, targets));
        for (target, old) in targets.iter().zip(old) {
            let is_written = target.tensor.numel() > 0;
            writes
                .push(is_written.then(|| Ok::<_, Refusal>((target.tensor.ty()?, source(old)))).transpose()?);
        }
        self.note_between(task, lane, How::Task { reads, writes, named });
        Ok(())
    }

    /// Notes a collective that is a program.
    pub(crate) fn note_program(
        &mut self,
        (task, lane): (&dyn Task, Lane),
        Exchanged { exchange, groups, value, result, .. }: &Exchanged,
    ) {
        if let Some(read) = self.source(value.value()) {
            let (exchange, groups, result) = (exchange.clone(), groups.clone(), result.clone());
            self.note_between(task, lane, How::Program { exchange, groups, read, result });
        }
    }

    fn note_between(&mut self, task: &dyn Task, lane: Lane, how: How) {
        let site = self.site;
        let Some(tape) = self.tape() else { return };
        let Some(pattern) = task.again() else {
            tape.spoiled = Some((WAITS, site));
            return;
        };
        let (at, about) = (tape.insts.len(), About { number: 0, ..task.about() });
        let site = if site == tape.site { Site::default() } else { site };
        let (first, pattern) = (tape.results, Mutex::new(pattern));
        let between = Between { at, first, lane, site, about, pattern, how };
        tape.between.push(Arc::new(between));
    }

    /// Notes a result of the collective that was noted last.
    pub(crate) fn note_result(&mut self, value: &Arc<Value>) {
        if let Some(tape) = self.tape() {
            tape.know(value, Source::Result(tape.results));
            tape.results += 1;
        }
    }

    /// Notes a number of the graph.
    pub(crate) fn note_number(&mut self, value: &Arc<Value>) {
        let site = self.site;
        let Some(tape) = self.tape() else { return };
        match tape.source(value) {
            None => {
                tape.know(value, Source::Number(tape.numbers.len() as u32));
                tape.numbers.push(Held::new(value.clone()));
            }
            Some(Source::Number(_)) => {}
            Some(_) => tape.spoiled = Some(("a number that an argument holds too", site)),
        }
    }

    /// The state of a generator that an op uses, which is noted. Of others than the default one nobody knows how long there
    /// are any, but who calls a function that is one program keeps them.
    pub(crate) fn random(&mut self, state: (u64, u64), drawn: Drawn) -> Arc<Value> {
        if self.in_body() {
            let value = Value::generator(state);
            self.note_drawn(&value, drawn.0, drawn.1);
            return value;
        }
        let site = self.site;
        let Some(tape) = self.tape().filter(|t| drawn.0.is_none() || t.whole) else {
            return Value::generator(state);
        };
        let Some((value, source)) = tape.draws.draw(state, drawn) else {
            tape.spoiled = Some((SET, site));
            return Value::generator(state);
        };
        if let Some(source) = source {
            tape.know(&value, source);
        }
        value
    }

    /// Notes a value that was copied from host memory.
    pub(crate) fn note_upload(&mut self, value: &Arc<Value>, bytes: &[u8]) {
        if let Some(tape) = self.tape()
            && let Some(argument) = tape.host_argument(value.ty.dtype, &value.ty.shape, bytes)
        {
            tape.know(value, Source::Host(argument));
        }
    }

    /// The number in a 0-d tensor of the host, as an operand.
    pub(crate) fn host_number(&mut self, dtype: DType, bytes: &[u8], wrapped: bool) -> Arc<Value> {
        let bytes = &bytes[..dtype.size_bytes()];
        let argument = match self.tape() {
            None => return self.number(dtype, bytes),
            Some(tape) => tape.host_argument(dtype, &[], bytes),
        };
        match argument {
            // Not one of the numbers that stay: the graph may have the same one, and that is always the same.
            Some(_) => {
                let value = Value::scalar(dtype, bytes);
                self.note_upload(&value, bytes);
                value
            }
            None => {
                if !wrapped {
                    self.spoil("a number of the host that the next call may find changed");
                }
                self.number(dtype, bytes)
            }
        }
    }

    /// Notes the instance that was recorded last.
    pub(crate) fn note(&mut self, inst: &Shared<Inst>) {
        let site = self.site;
        let Some(mut tape) = self.tape.take() else { return };
        if tape.is_here() && tape.spoiled.is_none() {
            let operands = &self.ops.operands;
            for &code in &operands[operands.len() - inst.operands.len()..] {
                match self.value(code).and_then(|v| tape.source(v)) {
                    Some(source) => tape.operands.push(source),
                    None => tape.spoiled = Some((UNKNOWN, site)),
                }
            }
            let offsets = &self.ops.offsets;
            tape.offsets.extend_from_slice(&offsets[offsets.len() - inst.offsets..]);
            tape.insts.push(inst.clone());
            tape.sites.push(if site == tape.site { Site::default() } else { site });
            for output in &self.produced[self.produced.len() - inst.outputs.len()..] {
                if let Some(value) = output {
                    tape.know(value, Source::Result(tape.results));
                }
                tape.results += 1;
            }
        }
        self.tape = Some(tape);
    }
}

impl Window {
    /// The storages that a function made hold values of the shapes that its results have: where that is so, how a larger
    /// storage is cut does not depend on what has made it.
    fn shape_results(&mut self, results: &[TensorRef<'_>]) -> Result<()> {
        for t in results {
            let (Place::Device(slot), Some(dtype), 0) = (t.place, t.dtype, t.offset) else { continue };
            let (Some(order), Some(value)) = (dense_order(t.sizes, t.strides), slot.value()) else {
                continue;
            };
            let is_made = self.tape().is_some_and(|tape| !tape.slots.contains(&address(slot)));
            let sizes: Dims = order.iter().map(|&d| t.sizes[d as usize]).collect();
            let to = TensorType::new(dtype, sizes);
            let fits = value.ty.dtype == dtype && value.ty.numel() == to.numel();
            if is_made && fits && value.ty != to {
                let value = self.apply(Kind::Resize { from: value.ty.clone(), to }, [value]);
                slot.bind(value.map_err(|e| match e {
                    Refusal::Error(e) => e,
                    Refusal::Fallback(why) => Error::runtime(why),
                })?);
            }
        }
        Ok(())
    }
}

impl Stream {
    /// This thread begins to play a graph on these arguments. False in debug mode, which looks at each op, and while
    /// another thread plays one.
    pub fn watch(&self, args: &[TensorRef<'_>], site: Site, switches: &Switches) -> Result<bool, Refusal> {
        self.begin(args, site, switches, (false, false))
    }

    /// This thread begins to run a function that is to be one program, on these arguments; as [`Stream::watch`].
    pub fn trace(
        &self,
        args: &[TensorRef<'_>],
        site: Site,
        switches: &Switches,
        dry: bool,
    ) -> Result<bool, Refusal> {
        // Of a device that is not there it is kept what each step records.
        let begins = dry || self.target().is_present();
        Ok(begins && self.begin(args, site, switches, (true, dry))?)
    }

    fn begin(
        &self,
        args: &[TensorRef<'_>],
        site: Site,
        switches: &Switches,
        (whole, dry): (bool, bool),
    ) -> Result<bool, Refusal> {
        let mut w = self.lock(site);
        if w.tape.is_some() || w.in_body() || switches.mode == Mode::Debug {
            return Ok(false);
        }
        self.make_room(&mut w, site, switches)?;
        let tape = Tape::new(self.device, args, &mut w, site, (whole, dry))?;
        if whole {
            self.flush(&mut w, Reason::Jit)?;
            w.thread.options = switches.compiler_options;
        }
        w.tape = Some(Box::new(tape));
        Ok(true)
    }

    /// The function that this thread runs takes one more tensor, which it finds elsewhere than among its arguments.
    pub fn trace_also(&self, tensor: &TensorRef<'_>, site: Site) -> Result<(), Refusal> {
        let mut w = self.lock(site);
        let Some(mut tape) = w.tape.take_if(|t| t.is_here() && t.spoiled.is_none()) else { return Ok(()) };
        let added = w.around_bodies(|w| tape.add(self.device, tensor, w));
        w.tape = Some(tape);
        added
    }

    /// Whether what this thread records is a part of the function that it runs, from here on.
    pub fn trace_pause(&self, on: bool) {
        let mut w = self.lock(Site::default());
        if on {
            let tape = w.tape.take_if(|t| t.is_here());
            w.paused = w.paused.take().or(tape);
        } else if w.tape.is_none() {
            w.tape = w.paused.take_if(|t| t.is_here());
        }
    }

    /// The device's default generator was asked for its seed and offset.
    pub fn generator_read(&self, seed: u64, offset: u64, site: Site) {
        if let Some(tape) = self.lock(site).tape() {
            tape.draws.read((seed, offset));
        }
    }

    /// The device's default generator was set to this seed and offset.
    pub fn generator_set(&self, seed: u64, offset: u64, site: Site) {
        let mut w = self.lock(site);
        if w.tape().is_some_and(|tape| !tape.draws.set((seed, offset))) {
            w.spoil(SET);
        }
    }

    /// The function was run with these arguments, those that came later included; tensors behind them it made and
    /// writes anew in each call. What it recorded is launched, unless nothing comes of it; where it is one program, by
    /// [`Stream::launch_noted`].
    pub fn traced(
        &self,
        args: &[TensorRef<'_>],
        outputs: &[TensorRef<'_>],
        switches: &Switches,
        Ends { step, dry, donated }: Ends<'_>,
    ) -> Result<Traced> {
        let mut w = self.lock(Site::default());
        if dry {
            w.shape_results(outputs)?;
        }
        let Some(tape) = w.tape.take_if(|t| t.is_here()) else {
            return Ok(Traced::Refused("the device runs in debug mode", Site::default()));
        };
        let set_back = tape.draws.is_set_back().then_some((SET, tape.site));
        if let Some((why, site)) = tape.spoiled.or(set_back) {
            if dry {
                tape.changed(args).into_iter().for_each(|(slot, before)| slot.bind(before));
            }
            self.flush(&mut w, Reason::Jit)?;
            return Ok(Traced::Refused(why, site));
        }
        let kept = tape.kept_elsewhere(args, outputs);
        let undone = if dry { tape.changed(args) } else { Vec::new() };
        let traced = match tape.recipe(self.device, args, outputs, switches) {
            _ if !kept.is_empty() => Traced::Kept(kept),
            Some(recipe) => {
                self.metrics().count(&self.metrics().recipes);
                let recipe = recipe.whole(step, donated);
                if !dry {
                    self.give_away(&recipe, args);
                }
                Traced::Function(Box::new(recipe))
            }
            None => {
                let why = "a result or an argument that has no storage of its own";
                Traced::Refused(why, Site::default())
            }
        };
        let reason = if step { Reason::Step } else { Reason::Jit };
        match &traced {
            _ if dry => undone.into_iter().for_each(|(slot, before)| slot.bind(before)),
            // The program that later calls launch.
            Traced::Function(recipe) if recipe.between.is_empty() => w.thread.noted_waits = Some(reason),
            Traced::Function(_) if w.others.ops == 0 => self.flush_whole(&mut w, reason, |_| drop)?,
            _ => self.flush(&mut w, Reason::Jit)?,
        }
        drop(w);
        if let (Traced::Function(recipe), false) = (&traced, dry) {
            self.prepare_later(recipe, switches)?;
        }
        Ok(traced)
    }

    /// Python has let go of what it held for a function that was noted: launches what that recorded, if it is one program
    /// and not launched yet.
    pub fn launch_noted(&self, site: Site) -> Result<()> {
        let mut w = self.lock(site);
        if w.thread.noted_waits.is_some() { self.flush(&mut w, Reason::Jit) } else { Ok(()) }
    }

    /// While a function is traced, its variables keep tensors past a collective that later calls let go of: what these
    /// launch is made now.
    fn prepare_later(&self, recipe: &Recipe, switches: &Switches) -> Result<()> {
        if recipe.between.is_empty() || !self.compiles() {
            return Ok(());
        }
        self.prepare(recipe, Site::default(), switches).map(drop)
    }

    /// The arguments that a function was given hold nothing any more.
    fn give_away(&self, recipe: &Recipe, args: &[TensorRef<'_>]) {
        let Some(slots) = recipe.storages(args) else { return };
        for (storage, gone) in recipe.whole.iter().flat_map(|whole| &whole.donated) {
            slots[*storage as usize].bind(gone.clone());
        }
    }

    /// The function that this thread runs has not been run: its arguments hold what they held before.
    pub fn untrace(&self, args: &[TensorRef<'_>], switches: &Switches) -> Result<()> {
        let mut w = self.lock(Site::default());
        let Some(tape) = w.tape.take_if(|t| t.is_here()) else { return Ok(()) };
        tape.changed(args).into_iter().for_each(|(slot, before)| slot.bind(before));
        drop(tape);
        self.flush(&mut w, if switches.mode == Mode::Strict { Reason::Mode } else { Reason::Jit })
    }

    /// The graph was played; gives the recipe, if a later call can do with it.
    pub fn watched(
        &self,
        args: &[TensorRef<'_>],
        outputs: &[TensorRef<'_>],
        switches: &Switches,
    ) -> Result<Option<Recipe>> {
        let Some(tape) = self.unwatch(switches.mode)? else { return Ok(None) };
        let recipe = tape.recipe(self.device, args, outputs, switches);
        if recipe.is_some() {
            self.metrics().count(&self.metrics().recipes);
        }
        Ok(recipe)
    }

    /// This thread plays no graph any more.
    pub(crate) fn unwatch(&self, mode: Mode) -> Result<Option<Box<Tape>>> {
        let mut w = self.lock(Site::default());
        let tape = w.tape.take_if(|t| t.is_here());
        if tape.is_some() && mode == Mode::Strict {
            self.flush(&mut w, Reason::Mode)?;
        }
        Ok(tape)
    }
}
