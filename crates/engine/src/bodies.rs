//! Recording the bodies of loops and branches, and then these.
//!
//! While a thread records a body, the body's ops are all there is in the window; what was recorded around it is set aside.
//! What the body takes that it is not given are its inputs, as are a window's, and become operands of the loop. A body that
//! needs what only a launch gives, a value on the host or a collective, is none: it is dropped, with the random numbers that
//! it took, and Python goes on as if there were no such thing.

use crate::body::{Around, Asked, Captured, Drawn, Recorded, unknown};
use crate::call::{Meta, Output, Outputs};
use crate::config::{Mode, Switches};
use crate::error::{Error, Refusal, Result};
use crate::inst::{Body, Code, Control, Flow, Input, Kind, Out};
use crate::ops::PRODUCED;
use crate::recipe::{Rng, address};
use crate::shared::Shared;
use crate::site::Site;
use crate::stream::Stream;
use crate::tensor::TensorRef;
use crate::threads::{Thread, here};
use crate::value::{Slot, State, Value};
use crate::window::Window;
use oxitorch_hlo::{DType, TensorType};
use rustc_hash::FxHashMap;
use std::sync::Arc;

impl Window {
    /// Whether a body is being recorded, by the thread whose turn it is.
    pub(crate) fn in_body(&self) -> bool {
        !self.aside && !self.bodies.is_empty()
    }

    /// It is this thread's turn: who records a body finds it, and others what is around.
    pub(crate) fn enter_body(&mut self, thread: u64) {
        if self.bodies.first().is_some_and(|body| (body.thread == thread) == self.aside) {
            self.step_aside();
        }
    }

    /// Exchanges the body that is being recorded and what is around all bodies.
    fn step_aside(&mut self) {
        let Some(mut outermost) = self.bodies.first_mut().map(|b| std::mem::take(&mut b.around)) else {
            return;
        };
        self.exchange(&mut outermost);
        self.bodies[0].around = outermost;
        self.aside = !self.aside;
    }

    /// Does something to what is around the bodies.
    pub(crate) fn around_bodies<T>(&mut self, f: impl FnOnce(&mut Window) -> T) -> T {
        if !self.in_body() {
            return f(self);
        }
        self.step_aside();
        let done = f(self);
        self.step_aside();
        done
    }

    fn exchange(&mut self, other: &mut Around) {
        std::mem::swap(&mut self.ops, &mut other.ops);
        std::mem::swap(&mut self.inputs, &mut other.inputs);
        std::mem::swap(&mut self.produced, &mut other.produced);
        std::mem::swap(&mut self.thread, &mut other.thread);
        std::mem::swap(&mut self.others, &mut other.others);
        std::mem::swap(&mut self.stamps, &mut other.stamps);
        self.mark_all();
    }

    /// Something that a body cannot have: it is none, and nor is what is recorded by a recipe.
    pub(crate) fn leave(&mut self, why: &'static str) -> Result<()> {
        let site = self.site;
        if !self.in_body() {
            self.spoil(why);
            return Ok(());
        }
        if let Some(body) = self.bodies.last_mut() {
            body.spoiled.get_or_insert((why, site));
        }
        Err(Error::runtime(format!("the body of a loop or of a branch needs {why}")))
    }

    /// Notes that an op of the body takes a state of a generator.
    pub(crate) fn note_drawn(&mut self, state: &Arc<Value>, generator: Option<usize>, blocks: u64) {
        if let Some(body) = self.bodies.last_mut() {
            body.drawn.push(Drawn { state: state.clone(), generator, blocks });
        }
    }

    /// Whether a storage is known to be none of the body's.
    pub(crate) fn is_around(&self, slot: &Slot) -> bool {
        let given = self.bodies.last().map_or(0, |body| body.given as u32);
        let is_own =
            |value: &Arc<Value>| self.known_code(value).is_some_and(|c| c & PRODUCED != 0 || c < given);
        self.in_body() && slot.look(is_own).is_some_and(|own| !own)
    }

    /// Ends the body that was begun last, whatever came of it; what it computed is nobody's.
    fn end_body(&mut self) -> Option<Recorded> {
        let mut body = self.bodies.pop()?;
        self.exchange(&mut body.around);
        let gone = unknown();
        let produced = body.around.produced.iter().flatten();
        produced.for_each(|v| *v.state.lock() = State::Failed(gone.clone()));
        Some(body)
    }
}

/// Gives back the random numbers that bodies took.
fn give_back(drawn: &[Drawn], random: Rng<'_>) {
    for Drawn { generator, blocks, .. } in drawn {
        random(*generator, blocks.wrapping_neg());
    }
}

impl Stream {
    /// This thread begins to record a body, which is given values of these types: row-major tensors. `None` where bodies
    /// cannot be recorded: op by op, on several devices, and while another thread records one.
    pub fn begin_body(
        &self,
        given: &[TensorType],
        site: Site,
        switches: &Switches,
    ) -> Result<Option<Outputs>, Refusal> {
        let mut w = self.lock(site);
        if switches.mode == Mode::Debug || self.devices.is_some() || (w.aside && !w.bodies.is_empty()) {
            return Ok(None);
        }
        let number = here().thread;
        let own = Thread { number, options: switches.compiler_options, ..Thread::default() };
        let mut around = Around { thread: own, ..Around::default() };
        w.exchange(&mut around);
        let body = Recorded { thread: number, around, given: given.len(), spoiled: None, drawn: Vec::new() };
        w.bodies.push(body);
        let mut tensors = Outputs::new();
        for ty in given {
            let value = Value::new(ty.clone(), State::Failed(unknown()));
            w.code(value.clone());
            tensors.push(self.tensor(value));
        }
        Ok(Some(tensors))
    }

    /// A row-major tensor of a value.
    fn tensor(&self, value: Arc<Value>) -> Output {
        let meta = Shared::new(Out::new(value.ty.clone(), None), false);
        Output::New(Slot::with(value.whole_bytes() as usize, self.device, value), Meta::new(&meta))
    }

    /// The body that this thread records gives these tensors. Says why it is none, and where, if it is none.
    pub fn end_body(
        &self,
        results: &[TensorRef<'_>],
        site: Site,
        random: Rng<'_>,
    ) -> Result<Option<(&'static str, Site)>, Refusal> {
        let mut w = self.lock(site);
        if !w.in_body() {
            return Err(Error::runtime("no body is being recorded").into());
        }
        let read = results.iter().map(|t| w.read(t.device()?, t)).collect::<Result<Vec<_>, Refusal>>();
        let codes: Vec<u32> = read.iter().flatten().map(|value| w.code(value.clone())).collect();
        let Some(recorded) = w.end_body() else { return Ok(None) };
        w.enter();
        if let Some(spoiled) = recorded.spoiled {
            give_back(&recorded.drawn, random);
            return Ok(Some(spoiled));
        }
        let results = read.inspect_err(|_| give_back(&recorded.drawn, random))?;
        w.captured.push(recorded.captured(&codes, results));
        Ok(None)
    }

    /// Drops the body that this thread records, or the one that it recorded last. Says why it is none, if that is known.
    pub fn drop_body(&self, open: bool, site: Site, random: Rng<'_>) -> Option<(&'static str, Site)> {
        let mut w = self.lock(site);
        if open && w.in_body() {
            let recorded = w.end_body()?;
            w.enter();
            give_back(&recorded.drawn, random);
            return recorded.spoiled;
        }
        let thread = w.thread.number;
        if let Some(captured) = w.captured.pop_if(|c| !open && c.thread == thread) {
            give_back(&captured.drawn, random);
        }
        None
    }

    /// Records control flow with the bodies that this thread recorded last; or says why they do not make it. Behind the results
    /// of a scan are the states of generators that its body used, before it.
    pub fn control(
        &self,
        name: &'static str,
        asked: Asked,
        operands: &[TensorRef<'_>],
        site: Site,
        switches: &Switches,
        random: Rng<'_>,
    ) -> Result<Result<Outputs, &'static str>, Refusal> {
        let mut w = self.lock(site);
        let thread = w.thread.number;
        let count = if matches!(asked, Asked::Scan { .. }) { 1 } else { 2 };
        let first = w.captured.len().checked_sub(count);
        let own = first.filter(|&first| w.captured[first..].iter().all(|c| c.thread == thread));
        let Some(first) = own else { return Err(Error::runtime("no body was recorded").into()) };
        let bodies = w.captured.split_off(first);
        let drop_all = || bodies.iter().for_each(|c| give_back(&c.drawn, random));
        self.make_room(&mut w, site, switches).inspect_err(|_| drop_all())?;
        let values = operands.iter().map(|t| w.read(t.device()?, t)).collect::<Result<Vec<_>, Refusal>>();
        let mut values = values.inspect_err(|_| drop_all())?;
        let states = match asked {
            Asked::Scan { states, .. } => values.split_off(values.len().saturating_sub(states)),
            _ => Vec::new(),
        };
        if let Some(why) = refused(asked, &values, &bodies) {
            drop_all();
            return Ok(Err(why));
        }
        let offsets: Vec<i64> = bodies.iter().flat_map(|c| &c.offsets).copied().collect();
        let mut whole = Whole::new(values);
        let generators = whole.generators(asked, &bodies, states, &mut w, random);
        let flow = whole.flow(asked, bodies, &generators);
        let operands = whole.operands.iter().map(|v| v.ty.clone()).collect();
        let control = Control { name, flow, operands };
        let inst = w.instances.get(Kind::Control(Arc::new(control)))?;
        self.refuse_huge(&inst)?;
        let used: Vec<Arc<Value>> =
            generators.iter().map(|g| whole.operands[g.operand as usize].clone()).collect();
        let results = w.record(&inst, whole.operands, &offsets);
        let tensors = results.into_iter().flatten().chain(used).map(|value| self.tensor(value)).collect();
        self.end_call(&mut w, switches.mode)?;
        drop(w);
        self.after_op(switches.mode)?;
        Ok(Ok(tensors))
    }
}

impl Recorded {
    fn captured(self, codes: &[u32], results: Vec<Arc<Value>>) -> Captured {
        let Around { ops, mut inputs, .. } = self.around;
        let code = |&code: &u32| match code & PRODUCED {
            0 => Code::Input(code),
            _ => Code::Result(code & !PRODUCED),
        };
        let input = |i: u32| match i.checked_sub(self.given as u32) {
            None => Input::Given(i),
            Some(taken) => Input::Operand(taken),
        };
        let body = Body {
            operands: ops.operands.iter().map(code).collect(),
            inputs: (0..inputs.len() as u32).map(input).collect(),
            results: codes.iter().map(code).collect(),
            insts: ops.insts,
        };
        let taken = inputs.split_off(self.given);
        Captured { thread: self.thread, body, offsets: ops.offsets, taken, results, drawn: self.drawn }
    }
}

/// Why bodies do not make control flow on these operands, if they do not.
fn refused(asked: Asked, operands: &[Arc<Value>], bodies: &[Captured]) -> Option<&'static str> {
    let types = |c: &Captured| -> Vec<TensorType> { c.results.iter().map(|v| v.ty.clone()).collect() };
    let is_flag = |ty: &TensorType| *ty == TensorType::scalar(DType::Pred);
    let keeps = |results: &[TensorType], n: usize| {
        results.len() >= n
            && operands.len() >= n
            && results.iter().zip(&operands[..n]).all(|(r, o)| *r == o.ty)
    };
    let fits = match asked {
        Asked::Branch => {
            let flag = operands.first().is_some_and(|v| is_flag(&v.ty));
            flag && types(&bodies[0]) == types(&bodies[1]) && !bodies[0].results.is_empty()
        }
        Asked::While => {
            let results = types(&bodies[1]);
            let flag = matches!(types(&bodies[0]).as_slice(), [ty] if is_flag(ty));
            flag && results.len() == operands.len() && keeps(&results, operands.len())
        }
        Asked::Scan { length, carried, .. } => {
            let sliced = operands.get(carried..).unwrap_or_default();
            let cut = sliced.iter().all(|v| v.ty.shape.first() == Some(&length));
            length > 0 && cut && keeps(&types(&bodies[0]), carried) && !bodies[0].results.is_empty()
        }
    };
    if !fits {
        return Some("results of the types that it is given");
    }
    if matches!(asked, Asked::While) {
        if !bodies[0].drawn.is_empty() {
            return Some("random numbers in the condition of a loop");
        }
        if bodies[0].body.checks().next().is_some() {
            return Some("an assertion in the condition of a loop");
        }
    }
    let is_gone = |v: &Arc<Value>| matches!(*v.state.lock(), State::Failed(_));
    if bodies.iter().flat_map(|c| &c.taken).any(is_gone) {
        return Some("a value of another body");
    }
    let mut next: FxHashMap<Option<usize>, (u64, u64)> = FxHashMap::default();
    for drawn in bodies.iter().flat_map(|c| &c.drawn) {
        let Some((seed, offset)) = drawn.state.seed_and_offset() else { return Some("a generator's state") };
        let expected = next.entry(drawn.generator).or_insert((seed, offset));
        if *expected != (seed, offset) {
            return Some("a generator that is set anew");
        }
        expected.1 = expected.1.wrapping_add(drawn.blocks);
    }
    match asked {
        Asked::Scan { states, .. } if states != 0 && states != next.len() => {
            Some("the generators of the loop before")
        }
        _ => None,
    }
}

/// The Philox blocks by which a generator is moved on for a loop of which nobody knows how often it goes round; of the 2^64
/// that a seed has.
const OF_ANY_ROUNDS: u64 = 1 << 32;

/// The operands of control flow.
struct Whole {
    operands: Vec<Arc<Value>>,
    /// How many of them are none that bodies take from outside.
    given: u32,
    /// By address.
    numbers: FxHashMap<usize, u32>,
}

/// A generator that bodies use.
struct Generator {
    name: Option<usize>,
    /// The operand that is its state before.
    operand: u32,
    /// The blocks that each body takes.
    blocks: [u64; 2],
}

impl Whole {
    fn new(operands: Vec<Arc<Value>>) -> Whole {
        Whole { given: operands.len() as u32, operands, numbers: FxHashMap::default() }
    }

    fn operand(&mut self, value: Arc<Value>) -> u32 {
        let Whole { operands, numbers, .. } = self;
        *numbers.entry(address(&*value)).or_insert_with(|| {
            operands.push(value);
            operands.len() as u32 - 1
        })
    }

    /// What is done with the bodies, whose inputs are operands from now on.
    fn flow(&mut self, asked: Asked, bodies: Vec<Captured>, generators: &[Generator]) -> Flow {
        let given = self.given;
        let mut types = Vec::new();
        let mut made = Vec::new();
        for (which, captured) in bodies.into_iter().enumerate() {
            types = captured.results.iter().map(|v| v.ty.clone()).collect();
            made.push(self.placed(captured, which, generators));
        }
        let mut made = made.into_iter();
        let mut next = || made.next().unwrap_or_else(Body::empty);
        match asked {
            Asked::Branch => Flow::Branch { bodies: [next(), next()], given: given - 1 },
            Asked::While => Flow::While { bodies: [next(), next()], carried: given },
            Asked::Scan { length, reverse, carried, .. } => Flow::Scan {
                body: Box::new(next()),
                length,
                reverse,
                carried: carried as u32,
                sliced: given - carried as u32,
                stacked: types.split_off(carried),
            },
        }
    }

    /// The generators that bodies use, each moved on by what the whole takes.
    fn generators(
        &mut self,
        asked: Asked,
        bodies: &[Captured],
        states: Vec<Arc<Value>>,
        w: &mut Window,
        random: Rng<'_>,
    ) -> Vec<Generator> {
        let mut generators: Vec<(Generator, (u64, u64))> = Vec::new();
        for (which, captured) in bodies.iter().enumerate() {
            for drawn in &captured.drawn {
                let name = drawn.generator;
                let known = generators.iter().position(|(g, _)| g.name == name);
                let at = known.unwrap_or_else(|| {
                    let before = drawn.state.seed_and_offset().unwrap_or_default();
                    generators.push((Generator { name, operand: 0, blocks: [0; 2] }, before));
                    generators.len() - 1
                });
                generators[at].0.blocks[which] += drawn.blocks;
            }
        }
        let mut states = states.into_iter();
        let settle = |(mut generator, before): (Generator, (u64, u64))| {
            let [first, second] = generator.blocks;
            generator.operand = self.operands.len() as u32;
            if let Some(state) = states.next() {
                random(generator.name, first.wrapping_neg());
                self.operands.push(state);
                return generator;
            }
            // Which branch is taken, nobody knows: both begin with the same numbers. Nor how often a loop goes round.
            let all = match asked {
                Asked::Scan { length, .. } => first.wrapping_mul(length as u64),
                Asked::While => OF_ANY_ROUNDS,
                _ => first.max(second),
            };
            random(generator.name, all.wrapping_sub(first + second));
            self.operands.push(w.random(before, (generator.name, all)));
            generator
        };
        generators.into_iter().map(settle).collect()
    }

    fn placed(&mut self, captured: Captured, which: usize, generators: &[Generator]) -> Body {
        let Captured { mut body, taken, drawn, .. } = captured;
        let mut states: FxHashMap<usize, Input> = FxHashMap::default();
        let mut taken_of = vec![0; generators.len()];
        for one in &drawn {
            let Some(at) = generators.iter().position(|g| g.name == one.generator) else { continue };
            let Generator { operand, blocks, .. } = generators[at];
            let state = Input::State { operand, after: taken_of[at], each: blocks[which] };
            states.insert(address(&*one.state), state);
            taken_of[at] += one.blocks;
        }
        for input in &mut body.inputs {
            if let Input::Operand(i) = *input {
                let value = &taken[i as usize];
                *input = match states.get(&address(&**value)) {
                    Some(state) => *state,
                    None => Input::Operand(self.operand(value.clone())),
                };
            }
        }
        body
    }
}
