//! From recorded ops to a launch: when a window ends, what of it is computed, and which program that is.
//!
//! In strict and debug mode a window is one op. In fused mode it grows until something has to be known or until a good
//! place to cut it comes by. The places depend on nothing but the ops themselves, so every round of a loop is cut alike
//! and gives the programs that the round before gave:
//!
//! - somebody reads a value, or waits for the device;
//! - an optimizer has made its step;
//! - the Python line that began the window comes again, or the copy from the host that came first in it: a loop came
//!   round. Short loops go round several times in one window, as a launch costs as much as recording some ops;
//! - the window is full.

use crate::config::{Mode, Switches};
use crate::error::{Error, Result};
use crate::events::What;
use crate::family;
use crate::graphs::Source;
use crate::known::{Lent, Places, Split, Wanted};
use crate::launch::Launch;
use crate::ops::{Ops, PRODUCED};
use crate::profile::running;
use crate::program::{Graph, Program};
use crate::site::Site;
use crate::split::{self, Token};
use crate::stream::{Stream, Window};
use crate::value::{State, Value};
use oxitorch_hlo::{DType, TensorType};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

/// Ops that make a window worth a launch when a loop comes round.
const WORTH_A_LAUNCH: usize = 64;

/// Why a window ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The mode runs one op at a time.
    Mode,
    /// A value is read.
    Read,
    /// Somebody waits for the device, or asks whether it is done.
    Wait,
    /// An optimizer has made its step.
    Step,
    /// A loop came round.
    Loop,
    /// So many ops were recorded.
    Ops,
    /// The recorded ops make so many bytes.
    Bytes,
    /// Other compiler options are in force.
    Options,
    /// The user asked for a barrier.
    Barrier,
    /// A part of a window that has no program as a whole.
    Part,
}

impl Reason {
    /// In declaration order.
    pub const ALL: [Reason; 10] = [
        Reason::Mode,
        Reason::Read,
        Reason::Wait,
        Reason::Step,
        Reason::Loop,
        Reason::Ops,
        Reason::Bytes,
        Reason::Options,
        Reason::Barrier,
        Reason::Part,
    ];

    /// As metrics name it.
    pub fn name(self) -> &'static str {
        match self {
            Reason::Mode => "mode",
            Reason::Read => "read",
            Reason::Wait => "wait",
            Reason::Step => "step",
            Reason::Loop => "loop",
            Reason::Ops => "ops",
            Reason::Bytes => "bytes",
            Reason::Options => "options",
            Reason::Barrier => "barrier",
            Reason::Part => "part",
        }
    }
}

impl Window {
    /// Why the window has to end before an op of this line is recorded.
    pub(crate) fn is_over(&self, site: Site, switches: &Switches) -> Option<Reason> {
        if self.ops.is_empty() {
            return None;
        }
        if self.is_watched() {
            return (self.options != switches.compiler_options).then_some(Reason::Options);
        }
        let (began, before) = self.round.unwrap_or((self.ops.sites[0], 0));
        let came_round =
            began == site && before + self.ops.len() >= WORTH_A_LAUNCH && site != Site::default();
        [
            (self.options != switches.compiler_options, Reason::Options),
            (came_round, Reason::Loop),
            (self.ops.len() >= self.limits.ops, Reason::Ops),
            (self.bytes >= self.limits.bytes || self.kept >= self.limits.kept, Reason::Bytes),
        ]
        .into_iter()
        .find_map(|(over, reason)| over.then_some(reason))
    }

    /// Notes a copy from the host; whether the window has to end before it.
    pub(crate) fn uploads(&mut self, site: Site) -> Option<Reason> {
        if self.is_watched() {
            return None;
        }
        if self.ops.len() >= WORTH_A_LAUNCH && self.first_upload == Some(site) && site != Site::default() {
            return Some(Reason::Loop);
        }
        self.first_upload.get_or_insert(site);
        None
    }
}

/// Ops with what goes in and what comes out: what one program computes.
#[derive(Default)]
struct Part {
    ops: Ops,
    inputs: Vec<Arc<Value>>,
    /// Whether later parts of the window need an input; empty if there are none.
    needed_later: Vec<bool>,
    /// Numbers of the results that somebody can see, and their values.
    live: Places,
    outputs: SmallVec<[Arc<Value>; 2]>,
    /// The numbers of the results in the window, unless they are the same.
    results: Option<Vec<u32>>,
}

impl Part {
    fn fail(&self, e: &Error) {
        self.outputs.iter().for_each(|v| *v.state.lock() = State::Failed(e.clone()));
    }

    fn tokens(&self) -> Box<[Token]> {
        self.ops.insts.iter().map(|i| Token::new(i.id, i.name())).collect()
    }

    /// Inputs that nobody can see or needs any more, and whose memory some result can take.
    fn donated(&self) -> Places {
        let mut out = Places::new();
        // How many results of a size are still without a donor; made when the first donor is found.
        let mut wanting: Option<FxHashMap<i64, usize>> = None;
        for (i, input) in self.inputs.iter().enumerate() {
            let bytes = input.ty.bytes();
            let needed = input.is_visible() || self.needed_later.get(i).copied().unwrap_or(false);
            if needed || bytes <= 0 || matches!(*input.state.lock(), State::Host(_)) {
                continue;
            }
            let wanting = wanting.get_or_insert_with(|| {
                let mut sizes = FxHashMap::default();
                self.outputs.iter().for_each(|o| *sizes.entry(o.ty.bytes()).or_default() += 1);
                sizes
            });
            if let Some(n) = wanting.get_mut(&bytes).filter(|n| **n > 0) {
                *n -= 1;
                out.push(i as u32);
            }
        }
        out
    }

    /// The results of a program that has more than were asked for: nobody wants the others.
    fn outputs_among(&mut self, live: &[u32]) -> SmallVec<[Arc<Value>; 2]> {
        let types: Vec<Option<&TensorType>> = self.ops.insts.iter().flat_map(|i| i.stored_types()).collect();
        let unwanted = |at: u32| Some(Value::new(types[at as usize]?.clone(), State::Pending));
        let mut own = self.live.iter().copied().zip(self.outputs.drain(..)).peekable();
        let value = |&at: &u32| own.next_if(|(i, _)| *i == at).map(|(_, v)| v).or_else(|| unwanted(at));
        live.iter().filter_map(value).collect()
    }
}

/// The program that a part is launched as.
struct Chosen {
    lent: Lent,
    is_new: bool,
}

/// Why a window ended, and when if somebody listens.
#[derive(Clone, Copy)]
struct Cut {
    reason: Reason,
    /// Whether it is about a part of the window.
    is_part: bool,
    /// Whether that part may repeat with other offsets.
    repeats: bool,
    began: Option<Instant>,
}

/// The values of a window's results.
struct Results<'a> {
    part: &'a Part,
    produced: &'a [Option<Arc<Value>>],
}

impl Results<'_> {
    fn get(&self, i: u32) -> Option<Arc<Value>> {
        if let Ok(at) = self.part.live.binary_search(&i) {
            return Some(self.part.outputs[at].clone());
        }
        let at = self.part.results.as_ref().map_or(i, |r| r[i as usize]);
        self.produced[at as usize].clone()
    }
}

/// The last part that needs each input, and each result, of a window that is cut.
struct LastUses {
    inputs: Vec<usize>,
    results: Vec<usize>,
}

impl LastUses {
    fn new(whole: &Part, cuts: &[usize]) -> LastUses {
        let (inputs, results) = (vec![0; whole.inputs.len()], vec![0; whole.ops.results()]);
        let mut uses = LastUses { inputs, results };
        for op in whole.ops.iter() {
            let part = part_of(cuts, op.at);
            op.operands.iter().for_each(|&code| *uses.of(code) = part);
        }
        uses
    }

    fn of(&mut self, code: u32) -> &mut usize {
        let at = (code & !PRODUCED) as usize;
        if code & PRODUCED == 0 { &mut self.inputs[at] } else { &mut self.results[at] }
    }
}

fn part_of(cuts: &[usize], op: usize) -> usize {
    cuts.partition_point(|&cut| cut <= op)
}

/// The parts of a window between cuts, in their order.
fn parts(whole: &Part, produced: &[Option<Arc<Value>>], cuts: &[usize]) -> Vec<Part> {
    let values = Results { part: whole, produced };
    let mut uses = LastUses::new(whole, cuts);
    let mut parts: Vec<Part> = (0..=cuts.len()).map(|_| Part::default()).collect();
    // Operand codes of the window in the part.
    let mut codes: FxHashMap<u32, u32> = FxHashMap::default();
    let (mut here, mut next_result) = (0, 0);
    for op in whole.ops.iter() {
        let number = part_of(cuts, op.at);
        if number != here {
            (here, next_result) = (number, 0);
            codes.clear();
        }
        let part = &mut parts[number];
        let mut operands: SmallVec<[u32; 6]> = SmallVec::new();
        for &code in op.operands {
            let new = *codes.entry(code).or_insert(part.inputs.len() as u32);
            if new as usize == part.inputs.len() && new & PRODUCED == 0 {
                let at = code & !PRODUCED;
                // Whoever reads a result knows that there is one.
                let value = if code & PRODUCED == 0 {
                    Some(whole.inputs[at as usize].clone())
                } else {
                    values.get(at)
                };
                part.inputs.extend(value);
                part.needed_later.push(*uses.of(code) > number);
            }
            operands.push(new);
        }
        part.ops.push(&op, operands);
        for i in op.results().map(|i| i as u32) {
            codes.insert(PRODUCED | i, PRODUCED | next_result);
            let is_wanted = *uses.of(PRODUCED | i) > number || whole.live.binary_search(&i).is_ok();
            if let Some(value) = values.get(i).filter(|_| is_wanted) {
                part.live.push(next_result);
                part.outputs.push(value);
            }
            next_result += 1;
        }
    }
    parts
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
    Some(Needed { ops: kept, inputs: numbers.taken, live, results: numbers.kept })
}

/// What of some ops is needed.
struct Needed {
    ops: Ops,
    /// The inputs that they take.
    inputs: Vec<u32>,
    live: Places,
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
    /// Makes the key of these ops.
    fn set_key(&mut self, ops: &Ops) {
        self.key.clear();
        self.key.push(self.options);
        for op in ops.iter() {
            self.key.push(op.inst.id);
            self.key.extend_from_slice(op.operands);
        }
    }

    /// Takes what was recorded, without what nobody can see any more.
    fn take_part(&mut self) -> Part {
        let mut part = Part { ops: std::mem::take(&mut self.ops), ..Part::default() };
        part.inputs = std::mem::take(&mut self.inputs);
        for (i, value) in self.produced.iter_mut().enumerate() {
            if let Some(value) = value.take_if(|v| v.is_visible()) {
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
        }
        part
    }
}

impl Stream {
    /// Launches what was recorded. In debug mode the caller then waits; see [`Stream::after_op`].
    pub(crate) fn flush(&self, w: &mut Window, reason: Reason) -> Result<()> {
        let mut result = Ok(());
        if !w.ops.is_empty() {
            let (began, before) = w.round.unwrap_or((w.ops.sites[0], 0));
            let bound = matches!(reason, Reason::Ops | Reason::Bytes);
            // Else the bounds would cut each round of a loop elsewhere, and each cut makes new programs.
            w.round = bound.then_some((began, before + w.ops.len()));
            result = self.launch(w, reason);
            w.ops.clear();
            w.clear_produced();
            w.instances.tick();
            (w.bytes, w.kept) = (0, 0);
            w.stamps.clear();
            w.stamped = self.metrics().events.on();
            w.epoch = w.epoch.wrapping_add(1).max(1);
        }
        w.inputs.clear();
        w.first_upload = None;
        result
    }

    fn launch(&self, w: &mut Window, reason: Reason) -> Result<()> {
        let cut = Cut {
            reason,
            is_part: false,
            repeats: false,
            began: self.metrics().events.on().then(Instant::now),
        };
        let mut part = w.take_part();
        let mut result = Ok(());
        if !part.outputs.is_empty() {
            self.metrics().count(&self.metrics().flushes[reason as usize]);
            result = self.launch_whole(w, &mut part, cut);
        }
        if w.ops.is_empty() {
            w.ops = part.ops; // its memory
        }
        w.inputs = part.inputs;
        result
    }

    /// Launches a window: as one program, or in parts if it has none and parts of it are known or repeat.
    fn launch_whole(&self, w: &mut Window, whole: &mut Part, cut: Cut) -> Result<()> {
        w.set_key(&whole.ops);
        let deterministic = self.compiler.policy.is_deterministic();
        let cuts = match w.programs.get_mut(&w.key) {
            Some(known) => {
                let split = known.split.as_ref().filter(|s| !s.is_over(deterministic));
                split.map(|s| (s.cuts.clone(), s.is_for_good()))
            }
            None => self.cuts(w, whole, cut),
        };
        let Some((cuts, repeats)) = cuts else { return self.launch_part(w, whole, cut) };
        self.count_split(w, whole, cut).inspect_err(|e| whole.fail(e))?;
        let mut parts = parts(whole, &w.produced, &cuts);
        let last = parts.len() - 1;
        let mut failed = None;
        for (i, part) in parts.iter_mut().enumerate() {
            if part.outputs.is_empty() {
                continue;
            }
            match &failed {
                Some(e) => part.fail(e),
                None => {
                    w.set_key(&part.ops);
                    let reason = if i == last { cut.reason } else { Reason::Part };
                    let cut = Cut { reason, is_part: true, repeats, ..cut };
                    failed = self.launch_part(w, part, cut).err();
                }
            }
        }
        whole.outputs.clear();
        failed.map_or(Ok(()), Err)
    }

    /// Where to cut a window that was not seen before, and whether its parts repeat. One that is captured to be looked at
    /// stays whole.
    fn cuts(&self, w: &mut Window, part: &Part, cut: Cut) -> Option<(Arc<[usize]>, bool)> {
        if cut.reason == Reason::Mode || !self.compiles() {
            return None;
        }
        let tokens = part.tokens();
        let number = self.metrics().splits.load(Relaxed) + 1;
        let split = match split::cuts_of_long(&tokens) {
            Some(cuts) => Split::new(number, cuts, true),
            None => Split::new(number, w.sequences.cuts(&tokens)?, false),
        };
        let cuts = (split.cuts.clone(), split.is_for_good());
        self.metrics().count(&self.metrics().splits);
        w.programs.entry(&w.key).split = Some(split);
        Some(cuts)
    }

    /// Counts a launch in parts; after some, a program of the whole window is compiled while parts go on.
    fn count_split(&self, w: &mut Window, whole: &Part, cut: Cut) -> Result<()> {
        let known = w.programs.get_mut(&w.key);
        let Some(split) = known.and_then(|k| k.split.as_mut()) else { return Ok(()) };
        let is_worth_it = split.used(w.last_split);
        w.last_split = split.number;
        if !is_worth_it {
            return Ok(());
        }
        let program = self.program(w, whole, &whole.donated(), cut)?.lent.program;
        if let Some(split) = w.programs.get_mut(&w.key).and_then(|k| k.split.as_mut()) {
            split.set_whole(program);
        }
        Ok(())
    }

    /// Launches a part by a program of its key.
    fn launch_part(&self, w: &mut Window, part: &mut Part, cut: Cut) -> Result<()> {
        let donated = part.donated();
        let Chosen { lent, is_new } = self.program(w, part, &donated, cut).inspect_err(|e| part.fail(e))?;
        let program = lent.program;
        let mut inputs: SmallVec<[Arc<Value>; 4]> = SmallVec::new();
        inputs.extend(part.inputs.drain(..));
        if !lent.numbers.is_empty() {
            inputs.push(Value::offsets(&lent.numbers));
        }
        let window = self.recorded(w, &program, cut, is_new);
        let ends_step = cut.reason == Reason::Step;
        let before = self.launcher.front.launches(ends_step);
        let (first, ops) = (part.ops.sites[0], part.ops.len() as u64);
        let outputs = match &lent.live {
            Some(live) => part.outputs_among(live),
            None => std::mem::take(&mut part.outputs),
        };
        let donated = lent.donated;
        let launch = Launch { program, inputs, outputs, donated, ops, first, window, before, ends_step };
        self.launcher.launch(launch, cut.reason == Reason::Read);
        Ok(())
    }

    /// Tells who listens what was recorded; the window's number, 0 if nobody does.
    fn recorded(
        &self,
        w: &mut Window,
        program: &Program,
        Cut { reason, began, .. }: Cut,
        is_new: bool,
    ) -> u64 {
        let events = &self.metrics().events;
        let number = events.window();
        if let Some(cut) = began {
            let start = w.stamps.first().map_or(cut, |s| s.at);
            events.add(start, || What::Window {
                device: self.device,
                number,
                program: program.name.clone(),
                is_new,
                reason,
                site: w.site,
                ops: std::mem::take(&mut w.stamps),
                cut,
                launched_in: running(),
            });
        }
        number
    }

    /// The program for a part whose key is set.
    fn program(&self, w: &mut Window, part: &Part, donated: &Places, cut: Cut) -> Result<Chosen> {
        let wanted = Wanted {
            live: &part.live,
            donated,
            offsets: &part.ops.offsets,
            max_fixed: if cut.reason == Reason::Mode { family::MAX_FIXED_OF_ONE_OP } else { 1 },
            may_lend: cut.reason != Reason::Mode && self.compiles(),
        };
        let given = match w.programs.get_mut(&w.key).map(|k| k.choose(&wanted)) {
            Some(Ok(lent)) => {
                self.metrics().count(&self.metrics().window_hits);
                return Ok(Chosen { lent, is_new: false });
            }
            Some(Err(given)) => part.ops.whole(&given),
            None if cut.repeats => (0..part.ops.offsets.len() as u32).collect(),
            None => Box::default(),
        };
        let program = self.make(w, part, donated, &given, cut)?;
        if cut.reason != Reason::Mode {
            w.sequences.add(part.tokens(), cut.is_part);
        }
        let known = w.programs.entry(&w.key);
        known.add(&wanted, &given, program.clone());
        let numbers = given.iter().map(|&i| part.ops.offsets[i as usize]).collect();
        Ok(Chosen { lent: Lent { program, numbers, live: None, donated: None }, is_new: true })
    }

    /// Whether programs are compiled here, and not only captured.
    fn compiles(&self) -> bool {
        self.target().absent().is_none()
    }

    /// Makes a program for a part, which takes the offsets at these places.
    fn make(
        &self,
        w: &Window,
        part: &Part,
        donated: &Places,
        given: &[u32],
        Cut { reason, is_part, repeats, .. }: Cut,
    ) -> Result<Arc<Program>> {
        let numbers = TensorType::new(DType::S64, [given.len() as i64].as_slice());
        let inputs = part.inputs.iter().map(|v| v.ty.clone());
        let graph = Graph {
            ops: part.ops.clone(),
            inputs: inputs.chain((!given.is_empty()).then_some(numbers)).collect(),
            given: given.iter().copied().zip(0..).collect(),
            donated: donated.iter().copied().collect(),
            options: w.options,
            live: part.live.clone(),
            source: Source { cut: Some((reason, w.site)), varies: is_part && !repeats, ..Source::default() },
        };
        let program = Program::new(&graph);
        let explained = self.explainer.explain(&graph, &program, (reason, w.site));
        explained.map_err(|why| {
            Error::runtime(format!(
                "torch.tpu.max_graphs allows no more programs, and a new one is needed\n{why}"
            ))
        })?;
        self.metrics().count(&self.metrics().programs);
        self.compiler.submit(graph, program.clone(), i64::from(self.device));
        Ok(program)
    }

    /// Fused mode: launches what was recorded if it has to end before an op of this line.
    pub(crate) fn make_room(&self, w: &mut Window, site: Site, switches: &Switches) -> Result<()> {
        if switches.mode != Mode::Fused {
            return Ok(());
        }
        w.is_over(site, switches).map_or(Ok(()), |reason| self.flush(w, reason))
    }
}
