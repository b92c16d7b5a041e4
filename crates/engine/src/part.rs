//! Recorded ops that are launched together: what goes in, what comes out, and how a sequence is cut into such parts.

use crate::error::Error;
use crate::executor::Asked;
use crate::inst::{Inst, Out};
use crate::known::Indices;
use crate::mark::Note;
use crate::ops::{OpRef, Ops, PRODUCED};
use crate::origin::Found;
use crate::shared::Shared;
use crate::site::Site;
use crate::split::Token;
use crate::value::{State, Value};
use crate::window::Window;
use rustc_hash::{FxHashMap, FxHashSet};
use smallvec::SmallVec;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Ops with what goes in and what comes out: what one program computes.
#[derive(Default)]
pub(crate) struct Part {
    pub(crate) ops: Ops,
    pub(crate) inputs: Vec<Arc<Value>>,
    /// Whether later parts of the window need an input; empty if there are none.
    needed_later: Vec<bool>,
    /// Numbers of the results that somebody can see, and their values.
    pub(crate) live: Indices,
    pub(crate) outputs: SmallVec<[Arc<Value>; 2]>,
    /// The numbers of the results in the window, unless they are the same.
    results: Option<Vec<u32>>,
    /// Number of the compiler options.
    pub(crate) options: u32,
    /// Its sizes that followed from values.
    pub(crate) read: Found,
    /// If it is a collective.
    pub(crate) asked: Option<Asked>,
    /// Marks in it, each with the share of the recorded ops that comes before.
    pub(crate) notes: Vec<(f64, Note)>,
}

impl Part {
    /// A collective on a value.
    pub(crate) fn of_collective(ops: Ops, value: Arc<Value>, result: Arc<Value>, asked: Asked) -> Part {
        let (inputs, outputs) = (vec![value], SmallVec::from_iter([result]));
        Part { ops, inputs, live: SmallVec::from_slice(&[0]), outputs, asked: Some(asked), ..Part::default() }
    }

    /// What is launched again as it was.
    pub(crate) fn again(
        (ops, live, options): (Ops, Indices, u32),
        inputs: Vec<Arc<Value>>,
        outputs: SmallVec<[Arc<Value>; 2]>,
    ) -> Part {
        Part { ops, inputs, live, outputs, options, ..Part::default() }
    }

    /// Nobody will compute its results.
    pub(crate) fn fail(&self, e: &Error) {
        self.outputs.iter().for_each(|v| *v.state.lock() = State::Failed(e.clone()));
    }

    /// Its ops, to be compared with others.
    pub(crate) fn tokens(&self) -> Box<[Token]> {
        self.ops.insts.iter().map(|i| Token::new(i.id, i.name())).collect()
    }

    fn is_needed_later(&self, input: u32) -> bool {
        self.needed_later.get(input as usize).copied().unwrap_or(false)
    }

    /// Inputs that nobody can see or needs any more, and whose memory some result can take.
    pub(crate) fn donated(&self) -> Indices {
        donors(&self.inputs, || self.outputs.iter().map(|o| o.bytes()), |i| self.is_needed_later(i))
    }

    /// What a program that other processes have too is made to overwrite, whatever this one can see: else their programs
    /// would differ.
    pub(crate) fn most_donated(&self) -> Option<Indices> {
        let asked = self.asked.as_ref().filter(|asked| !asked.exchange.devices.is_empty())?;
        let fits = self.outputs.iter().any(|out| out.ty == asked.exchange.ty);
        Some(fits.then_some(0).into_iter().collect())
    }

    /// The results of a program that has more than were asked for: nobody wants the others.
    pub(crate) fn outputs_among(&mut self, live: &[u32]) -> SmallVec<[Arc<Value>; 2]> {
        let outs: Vec<Option<&Out>> = self.ops.insts.iter().flat_map(|i| i.results()).collect();
        let unwanted = |at: u32| {
            let out = outs[at as usize]?;
            Some(Value::sharded(out.stored.clone(), out.sharding.clone(), State::Pending, Site::default()))
        };
        let mut own = self.live.iter().copied().zip(self.outputs.drain(..)).peekable();
        let value = |&at: &u32| own.next_if(|(i, _)| *i == at).map(|(_, v)| v).or_else(|| unwanted(at));
        live.iter().filter_map(value).collect()
    }
}

/// The inputs that nobody can see or needs any more, and whose memory can be taken by a result of one of these sizes.
pub(crate) fn donors<Sizes: Iterator<Item = u64>>(
    inputs: &[Arc<Value>],
    results: impl Fn() -> Sizes,
    is_needed_later: impl Fn(u32) -> bool,
) -> Indices {
    let mut out = Indices::new();
    // How many results of a size are still without a donor; made when the first donor is found.
    let mut wanting: Option<FxHashMap<u64, usize>> = None;
    let mut before = FxHashSet::<*const Value>::default();
    for (i, input) in inputs.iter().enumerate() {
        let bytes = input.bytes();
        let needed = input.is_visible() || is_needed_later(i as u32);
        if needed || bytes == 0 || matches!(*input.state.lock(), State::Host(_)) {
            continue;
        }
        // What goes in twice, as the value of two arguments, is not taken: each of them is read.
        if !before.insert(Arc::as_ptr(input)) {
            out.retain(|taken| !Arc::ptr_eq(&inputs[*taken as usize], input));
            continue;
        }
        let wanting = wanting.get_or_insert_with(|| {
            let mut sizes = FxHashMap::default();
            results().for_each(|bytes| *sizes.entry(bytes).or_default() += 1);
            sizes
        });
        if let Some(n) = wanting.get_mut(&bytes).filter(|n| **n > 0) {
            *n -= 1;
            out.push(i as u32);
        }
    }
    out
}

/// The values of a window's results.
pub(crate) struct Results<'a> {
    pub(crate) part: &'a Part,
    pub(crate) produced: &'a [Option<Arc<Value>>],
}

impl Results<'_> {
    /// The number in the window.
    pub(crate) fn number(&self, i: u32) -> u32 {
        self.part.results.as_ref().map_or(i, |r| r[i as usize])
    }

    /// The value of a result of the part.
    pub(crate) fn get(&self, i: u32) -> Option<Arc<Value>> {
        match self.part.live.binary_search(&i) {
            Ok(at) => Some(self.part.outputs[at].clone()),
            Err(_) => self.produced[self.number(i) as usize].clone(),
        }
    }
}

/// The last part that needs each input, and each result, of a window that is cut.
struct LastUses {
    inputs: Vec<u32>,
    results: Vec<u32>,
}

impl LastUses {
    fn new(whole: &Part, part_of: &[u32]) -> LastUses {
        let (inputs, results) = (vec![0; whole.inputs.len()], vec![0; whole.ops.results()]);
        let mut uses = LastUses { inputs, results };
        for op in whole.ops.iter() {
            for &code in op.operands {
                let last = uses.of(code);
                *last = part_of[op.at].max(*last);
            }
        }
        uses
    }

    fn of(&mut self, code: u32) -> &mut u32 {
        let at = (code & !PRODUCED) as usize;
        if code & PRODUCED == 0 { &mut self.inputs[at] } else { &mut self.results[at] }
    }
}

/// The part of each op of a sequence that is cut at these places.
pub(crate) fn between(cuts: &[usize], ops: usize) -> Vec<u32> {
    (0..ops).map(|op| cuts.partition_point(|&cut| cut <= op) as u32).collect()
}

/// Where an op is to be launched: a stretch, and a group within it.
pub(crate) type Position = (u32, u64);

/// The part of each op, and the place of each part. A stretch comes after the one before. A group of a stretch is one part,
/// but for what ops of other groups need: that comes before those, in as few parts as can be. So each op is in as late a
/// part as can be.
pub(crate) fn grouped(ops: &Ops, places: &[Position]) -> (Vec<u32>, Vec<Position>) {
    let mut made_by = Vec::with_capacity(ops.results());
    ops.iter().for_each(|op| made_by.resize(op.results().end, op.at));
    // How many parts of its stretch come after that of an op, at least.
    let mut after = vec![0; ops.len()];
    let all: Vec<OpRef<'_>> = ops.iter().collect();
    for op in all.iter().rev() {
        let (stretch, group) = places[op.at];
        for code in op.operands.iter().filter(|&code| code & PRODUCED != 0) {
            let maker = made_by[(code & !PRODUCED) as usize];
            if places[maker].0 == stretch {
                let least = after[op.at] + u32::from(places[maker].1 != group);
                after[maker] = least.max(after[maker]);
            }
        }
    }
    let order = |at: usize| (places[at].0, Reverse(after[at]), places[at].1);
    let mut numbers: BTreeMap<_, u32> = (0..ops.len()).map(|at| (order(at), 0)).collect();
    numbers.values_mut().zip(0..).for_each(|(number, n)| *number = n);
    let part_of = (0..ops.len()).map(|at| numbers[&order(at)]).collect();
    (part_of, numbers.into_keys().map(|(stretch, _, group)| (stretch, group)).collect())
}

/// A part that is being made.
#[derive(Default)]
struct Building {
    part: Part,
    results: Vec<u32>,
}

/// Operand codes of a window's values in the part that has taken them last: that part, and the code.
struct Codes {
    inputs: Vec<(u32, u32)>,
    results: Vec<(u32, u32)>,
}

impl Codes {
    fn new(whole: &Part) -> Codes {
        let of_none = |values: usize| vec![(u32::MAX, 0); values];
        Codes { inputs: of_none(whole.inputs.len()), results: of_none(whole.ops.results()) }
    }

    fn of(&mut self, code: u32) -> &mut (u32, u32) {
        let at = (code & !PRODUCED) as usize;
        if code & PRODUCED == 0 { &mut self.inputs[at] } else { &mut self.results[at] }
    }
}

/// Cuts a window into so many parts, which are to be launched in their order; `part_of` says where each op goes, never
/// before an op that it needs.
pub(crate) fn parts(values: &Results<'_>, part_of: &[u32], count: usize) -> Vec<Part> {
    let whole = values.part;
    let mut uses = LastUses::new(whole, part_of);
    let mut is_live = vec![false; whole.ops.results()];
    whole.live.iter().for_each(|&i| is_live[i as usize] = true);
    let mut parts: Vec<Building> = (0..count).map(|_| Building::default()).collect();
    // Part by part, so that a list is enough for where values are: windows that are cut have thousands of ops.
    let mut codes = Codes::new(whole);
    let mut ops: Vec<OpRef<'_>> = whole.ops.iter().collect();
    ops.sort_by_key(|op| part_of[op.at]);
    for op in ops {
        let number = part_of[op.at];
        let Building { part, results } = &mut parts[number as usize];
        let mut operands: SmallVec<[u32; 6]> = SmallVec::new();
        for &code in op.operands {
            let place = codes.of(code);
            if place.0 != number {
                *place = (number, part.inputs.len() as u32);
                let at = code & !PRODUCED;
                // Whoever reads a result knows that there is one.
                let (value, needed_after) = if code & PRODUCED == 0 {
                    (Some(whole.inputs[at as usize].clone()), whole.is_needed_later(at))
                } else {
                    (values.get(at), is_live[at as usize])
                };
                part.inputs.extend(value);
                part.needed_later.push(needed_after || *uses.of(code) > number);
            }
            operands.push(place.1);
        }
        part.ops.push(&op, operands);
        for i in op.results().map(|i| i as u32) {
            let new = results.len() as u32;
            results.push(values.number(i));
            codes.results[i as usize] = (number, PRODUCED | new);
            let is_wanted = *uses.of(PRODUCED | i) > number || is_live[i as usize];
            if let Some(value) = is_wanted.then(|| values.get(i)).flatten() {
                part.live.push(new);
                part.outputs.push(value);
            }
        }
    }
    let built = |b: Building| Part { results: Some(b.results), options: whole.options, ..b.part };
    parts.into_iter().map(built).collect()
}

/// What of some ops is needed for the live results: which ops, and their operands, inputs and live results numbered anew.
/// Nothing where all ops are needed.
fn needed(ops: &Ops, inputs: usize, live: &[u32]) -> Option<Needed> {
    let mut used = vec![false; ops.results()];
    live.iter().for_each(|&i| used[i as usize] = true);
    let mut needed = vec![false; ops.len()];
    let (mut operand, mut result) = (ops.operands.len(), used.len());
    for (i, inst) in ops.insts.iter().enumerate().rev() {
        operand -= inst.operands.len();
        result -= inst.outputs.len();
        needed[i] = used[result..][..inst.outputs.len()].contains(&true);
        if needed[i] {
            for &code in &ops.operands[operand..][..inst.operands.len()] {
                if code & PRODUCED != 0 {
                    used[(code & !PRODUCED) as usize] = true;
                }
            }
        }
    }
    if !needed.contains(&false) {
        return None;
    }
    let mut kept = Ops::default();
    let mut numbers = Renumbered::new(inputs, used.len());
    for op in ops.iter().filter(|op| needed[op.at]) {
        kept.push(&op, op.operands.iter().map(|&code| numbers.operand(code)));
        op.results().for_each(|i| numbers.result(i));
    }
    let live = live.iter().map(|&i| numbers.results[i as usize]).collect();
    Some(Needed { ops: kept, needed, inputs: numbers.taken, live, results: numbers.kept })
}

/// What of some ops is needed.
struct Needed {
    ops: Ops,
    /// Of all ops, whether they are among these.
    needed: Vec<bool>,
    /// The inputs that they take.
    inputs: Vec<u32>,
    live: Indices,
    /// The results that they have.
    results: Vec<u32>,
}

/// New numbers for the inputs and results of some ops of a sequence, in the order in which they come.
struct Renumbered {
    inputs: Vec<u32>,
    results: Vec<u32>,
    /// The inputs that have one, by it.
    taken: Vec<u32>,
    /// The results that have one, by it.
    kept: Vec<u32>,
}

impl Renumbered {
    const NONE: u32 = u32::MAX;

    fn new(inputs: usize, results: usize) -> Renumbered {
        Renumbered {
            inputs: vec![Self::NONE; inputs],
            results: vec![Self::NONE; results],
            taken: Vec::with_capacity(inputs),
            kept: Vec::with_capacity(results),
        }
    }

    fn operand(&mut self, code: u32) -> u32 {
        if code & PRODUCED != 0 {
            return PRODUCED | self.results[(code & !PRODUCED) as usize];
        }
        let new = &mut self.inputs[code as usize];
        if *new == Self::NONE {
            *new = self.taken.len() as u32;
            self.taken.push(code);
        }
        *new
    }

    fn result(&mut self, i: usize) {
        self.results[i] = self.kept.len() as u32;
        self.kept.push(i as u32);
    }
}

impl Window {
    /// Takes what was recorded, without what nobody can see any more. Says which ops these are, if they are not all.
    pub(crate) fn take_part(&mut self) -> (Part, Option<Vec<bool>>) {
        let ops = std::mem::take(&mut self.ops);
        let mut part = Part { ops, options: self.thread.options, ..Part::default() };
        part.inputs = std::mem::take(&mut self.inputs);
        // With one of its results an op stays.
        let first_stays = |inst: &Shared<Inst>| {
            let stays = inst.only_asserts;
            (0..inst.outputs.len()).map(move |i| stays && i == 0)
        };
        let stays = part.ops.insts.iter().flat_map(first_stays);
        for (i, (value, stays)) in self.produced.iter_mut().zip(stays).enumerate() {
            if let Some(value) = value.take_if(|v| stays || v.is_visible()) {
                part.live.push(i as u32);
                part.outputs.push(value);
            }
        }
        if part.ops.len() > 1
            && let Some(needed) = needed(&part.ops, part.inputs.len(), &part.live)
        {
            self.ops = std::mem::replace(&mut part.ops, needed.ops);
            part.inputs = needed.inputs.into_iter().map(|i| part.inputs[i as usize].clone()).collect();
            part.live = needed.live;
            part.results = Some(needed.results);
            return (part, Some(needed.needed));
        }
        (part, None)
    }
}
