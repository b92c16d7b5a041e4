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
use crate::graphs::Source;
use crate::launch::{Checks, Launch};
use crate::profile::running;
use crate::program::{Graph, PRODUCED, Program};
use crate::site::Site;
use crate::stream::{Checked, Stream, Window};
use crate::value::{State, Value};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;
use std::sync::Arc;
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
}

impl Reason {
    /// In declaration order.
    pub const ALL: [Reason; 9] = [
        Reason::Mode,
        Reason::Read,
        Reason::Wait,
        Reason::Step,
        Reason::Loop,
        Reason::Ops,
        Reason::Bytes,
        Reason::Options,
        Reason::Barrier,
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
        }
    }
}

impl Window {
    /// Why the window has to end before an op of this line is recorded.
    pub(crate) fn is_over(&self, site: Site, switches: &Switches) -> Option<Reason> {
        if self.insts.is_empty() {
            return None;
        }
        if self.is_watched() {
            return (self.options != switches.compiler_options).then_some(Reason::Options);
        }
        let (began, before) = self.round.unwrap_or((self.sites[0], 0));
        let came_round =
            began == site && before + self.insts.len() >= WORTH_A_LAUNCH && site != Site::default();
        [
            (self.options != switches.compiler_options, Reason::Options),
            (came_round, Reason::Loop),
            (self.insts.len() >= self.limits.ops, Reason::Ops),
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
        if self.insts.len() >= WORTH_A_LAUNCH && self.first_upload == Some(site) && site != Site::default() {
            return Some(Reason::Loop);
        }
        self.first_upload.get_or_insert(site);
        None
    }
}

/// The part of a window that somebody can still see.
struct Closed {
    /// Positions of the instances that are computed.
    insts: Vec<u32>,
    /// Their operands, with inputs and results numbered anew.
    operands: Vec<u32>,
    /// Positions of the inputs that they take.
    inputs: Vec<u32>,
    live: SmallVec<[u32; 8]>,
}

/// Leaves out what no result needs; nothing where all is needed. `live` are positions in the window's results.
fn close(w: &Window, live: &[u32]) -> Option<Closed> {
    let mut used = vec![false; w.produced.len()];
    live.iter().for_each(|&i| used[i as usize] = true);
    let mut needed = vec![false; w.insts.len()];
    let (mut operand, mut result) = (w.operands.len(), w.produced.len());
    for (i, inst) in w.insts.iter().enumerate().rev() {
        operand -= inst.operands.len();
        result -= inst.outputs.len();
        needed[i] = !inst.checks.is_empty() || used[result..][..inst.outputs.len()].contains(&true);
        if needed[i] {
            for &code in &w.operands[operand..][..inst.operands.len()] {
                if code & PRODUCED != 0 {
                    used[(code & !PRODUCED) as usize] = true;
                }
            }
        }
    }
    if !needed.contains(&false) {
        return None;
    }
    const NONE: u32 = u32::MAX;
    let mut closed = Closed {
        insts: Vec::with_capacity(w.insts.len()),
        operands: Vec::with_capacity(w.operands.len()),
        inputs: Vec::with_capacity(w.inputs.len()),
        live: SmallVec::new(),
    };
    let (mut new_input, mut new_result) = (vec![NONE; w.inputs.len()], vec![NONE; w.produced.len()]);
    let mut results = 0;
    for (i, inst) in w.insts.iter().enumerate() {
        if needed[i] {
            closed.insts.push(i as u32);
            for &code in &w.operands[operand..][..inst.operands.len()] {
                let new = if code & PRODUCED == 0 {
                    let new = &mut new_input[code as usize];
                    if *new == NONE {
                        *new = closed.inputs.len() as u32;
                        closed.inputs.push(code);
                    }
                    *new
                } else {
                    PRODUCED | new_result[(code & !PRODUCED) as usize]
                };
                closed.operands.push(new);
            }
            for new in &mut new_result[result..][..inst.outputs.len()] {
                *new = results;
                results += 1;
            }
        }
        operand += inst.operands.len();
        result += inst.outputs.len();
    }
    closed.live = live.iter().map(|&i| new_result[i as usize]).collect();
    Some(closed)
}

impl Stream {
    /// Launches what was recorded. In debug mode the caller then waits; see [`Stream::after_op`].
    pub(crate) fn flush(&self, w: &mut Window, reason: Reason) -> Result<()> {
        let mut result = Ok(());
        if !w.insts.is_empty() {
            let (began, before) = w.round.unwrap_or((w.sites[0], 0));
            let bound = matches!(reason, Reason::Ops | Reason::Bytes);
            // Else the bounds would cut each round of a loop elsewhere, and each cut makes new programs.
            w.round = bound.then_some((began, before + w.insts.len()));
            result = self.launch(w, reason);
            w.insts.clear();
            w.sites.clear();
            w.operands.clear();
            w.clear_produced();
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
        let began = self.metrics().events.on().then(Instant::now);
        let mut live: SmallVec<[u32; 8]> = SmallVec::new();
        let mut outputs: SmallVec<[Arc<Value>; 2]> = SmallVec::new();
        for (i, value) in w.produced.iter_mut().enumerate() {
            if let Some(value) = value.take_if(|v| v.is_visible()) {
                live.push(i as u32);
                outputs.push(value);
            }
        }
        let checked = w.insts.iter().any(|i| !i.checks.is_empty());
        if live.is_empty() && !checked {
            return Ok(());
        }
        self.metrics().count(&self.metrics().flushes[reason as usize]);
        if w.insts.len() > 1
            && let Some(closed) = close(w, &live)
        {
            w.insts = closed.insts.iter().map(|&i| w.insts[i as usize]).collect();
            w.sites = closed.insts.iter().map(|&i| w.sites[i as usize]).collect();
            w.inputs = closed.inputs.iter().map(|&i| w.inputs[i as usize].clone()).collect();
            w.operands = closed.operands;
            live = closed.live;
        }
        let donated = donated(&w.inputs, &outputs);
        let ops = w.insts.len() as u64;
        let known = w.programs.len();
        let program = match self.program(w, live, donated, reason) {
            Ok(program) => program,
            Err(e) => {
                outputs.iter().for_each(|v| *v.state.lock() = State::Failed(e.clone()));
                return Err(e);
            }
        };
        let mut inputs: SmallVec<[Arc<Value>; 4]> = SmallVec::new();
        inputs.extend(w.inputs.drain(..));
        let checks = checked.then(|| Arc::new(Checks::default()));
        w.checked.extend(checks.iter().map(|c| Checked { checks: c.clone(), program: program.clone() }));
        let window = self.recorded(w, &program, (reason, began), w.programs.len() > known);
        let ends_step = reason == Reason::Step;
        let before = self.launcher.front.launches(ends_step);
        let first = w.sites[0];
        let launch = Launch { program, inputs, outputs, checks, ops, first, window, before, ends_step };
        self.launcher.launch(launch, reason == Reason::Read);
        Ok(())
    }

    /// Tells who listens what was recorded; the window's number, 0 if nobody does.
    fn recorded(
        &self,
        w: &mut Window,
        program: &Program,
        (reason, began): (Reason, Option<Instant>),
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

    fn program(
        &self,
        w: &mut Window,
        live: SmallVec<[u32; 8]>,
        donated: SmallVec<[u32; 4]>,
        reason: Reason,
    ) -> Result<Arc<Program>> {
        w.key.clear();
        let mut codes = w.operands.as_slice();
        for inst in &w.insts {
            let (own, rest) = codes.split_at(inst.operands.len());
            w.key.push(inst.id);
            w.key.extend_from_slice(own);
            codes = rest;
        }
        w.key.push(u32::MAX);
        w.key.push(w.options);
        w.key.extend_from_slice(&live);
        w.key.push(u32::MAX);
        w.key.extend_from_slice(&donated);
        if let Some(program) = w.programs.get(w.key.as_slice()) {
            self.metrics().count(&self.metrics().window_hits);
            return Ok(program.clone());
        }
        let graph = Graph {
            insts: w.insts.clone(),
            operands: w.operands.clone(),
            inputs: w.inputs.iter().map(|v| v.ty.clone()).collect(),
            donated,
            options: w.options,
            live,
            source: Source {
                sites: w.sites.as_slice().into(),
                cut: Some((reason, w.site)),
                ..Source::default()
            },
        };
        let program = Program::new(&graph);
        let explained = self.explainer.explain(&graph, &program, &w.sites, (reason, w.site));
        explained.map_err(|why| {
            Error::runtime(format!(
                "torch.tpu.max_graphs allows no more programs, and a new one is needed\n{why}"
            ))
        })?;
        self.metrics().count(&self.metrics().programs);
        self.compiler.submit(graph, program.clone(), i64::from(self.device));
        w.programs.insert(w.key.as_slice().into(), program.clone());
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

/// Dead inputs whose memory some result can take.
fn donated(inputs: &[Arc<Value>], outputs: &[Arc<Value>]) -> SmallVec<[u32; 4]> {
    let mut out = SmallVec::new();
    // How many results of a size are still without a donor; made when the first donor is found.
    let mut wanting: Option<FxHashMap<i64, usize>> = None;
    for (i, input) in inputs.iter().enumerate() {
        let bytes = input.ty.bytes();
        if input.is_visible() || bytes <= 0 || matches!(*input.state.lock(), State::Host(_)) {
            continue;
        }
        let wanting = wanting.get_or_insert_with(|| {
            let mut sizes = FxHashMap::default();
            outputs.iter().for_each(|o| *sizes.entry(o.ty.bytes()).or_default() += 1);
            sizes
        });
        if let Some(n) = wanting.get_mut(&bytes).filter(|n| **n > 0) {
            *n -= 1;
            out.push(i as u32);
        }
    }
    out
}
