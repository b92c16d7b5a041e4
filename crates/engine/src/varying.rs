//! Windows whose sizes vary by themselves, as those of text that grows do, by programs for all sizes up to a bound.
//!
//! The third size of a window that a model is given makes such a program ([`crate::alike`]): of the window as it would be
//! at the bound, which is compared with the window itself as it is done for functions with `dynamic=`
//! ([`oxitorch_hlo::Outline::bounded`]). What goes in is padded and what comes out is cut by the launch thread, so that all
//! tensors have their own sizes.

use crate::alike::{AtBound, Below, ByBound, Recorded, Varying};
use crate::error::Result;
use crate::executor::Launch;
use crate::flush::Cut;
use crate::graph::{Given, Graph, NAMES_A_SIZE, Source};
use crate::ops::{Ops, PRODUCED};
use crate::pad::enlarged;
use crate::part::Part;
use crate::site::describe;
use crate::stream::Stream;
use crate::value::Value;
use crate::window::Window;
use oxitorch_capture::Reason;
use oxitorch_hlo::TensorType;
use oxitorch_pjrt::Platform;
use smallvec::SmallVec;
use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

/// Shorter windows in which sizes of floats vary are compiled for each: that takes little, and pads nothing. The bookkeeping
/// of tokens and masks is short.
const LEAST: usize = 16;

impl Stream {
    /// Launches a window whose key is set by a program for all sizes up to a bound: a known one, or a new one if its sizes
    /// vary and it has no program of its own size. False if it is to have that.
    pub(crate) fn launch_by_bound(&self, w: &mut Window, part: &mut Part, cut: Cut<'_>) -> Result<bool> {
        let known = w.programs.get_mut(&w.key);
        let by_bound = known.as_ref().and_then(|known| known.by_bound(&part.live, &part.ops.offsets));
        let has_own = known.is_some_and(|known| known.has_own(&part.live));
        let (by, is_new) = match by_bound {
            Some(by) => (by, false),
            None if has_own || !self.may_vary(part, cut) => return Ok(false),
            None => match self.by_bound(w, part, cut).inspect_err(|e| part.fail(e))? {
                Some(made) => made,
                None => return Ok(false),
            },
        };
        if !is_new {
            self.metrics().count(&self.metrics().window_hits);
        }
        self.launch_padded(w, part, &by, cut, is_new);
        Ok(true)
    }

    /// Whether a window may be one for many sizes. Those of training are not: who trains has batches of a few sizes, and
    /// wants each in the fastest form. Nor are those of devices whose memory is not the host's, where padding would go by
    /// way of the host.
    fn may_vary(&self, part: &Part, cut: Cut<'_>) -> bool {
        let ends = matches!(cut.ending.reason, Reason::Read | Reason::Wait | Reason::Loop | Reason::Jit);
        let trains = || part.ops.insts.iter().any(|inst| inst.name().contains("backward"));
        ends && part.ops.len() > 1
            && !part.ops.have_own_sizes()
            && self.compiles()
            && self.devices.is_none()
            && self.target().platform() == Platform::Cpu
            && !trains()
    }

    /// The program for all sizes up to a bound of a window of which nothing is known, and whether it is a new one.
    fn by_bound(&self, w: &mut Window, part: &Part, cut: Cut<'_>) -> Result<Option<(ByBound, bool)>> {
        let (key, own) = w.alike.form_of(&part.ops, &part.inputs, (&part.live, part.options));
        let form = w.alike.form(&key);
        if form.is_refused() {
            return Ok(None);
        }
        let at = match form.least(&own) {
            Some(at) => Some(at),
            None => match form.varies(&own, part.ops.len() < LEAST) {
                Some((varying, moving)) => self.bound_of(w, part, (&key, &own), &varying, &moving)?,
                None => return Ok(None),
            },
        };
        let made = match at {
            Some(at) => self.made_by_bound(w, part, (&key, &own, at), cut)?,
            None => None,
        };
        match &made {
            Some((by, _)) => w.programs.entry(&w.key).by_bound.push(by.clone()),
            None => w.alike.form(&key).failed(),
        }
        Ok(made)
    }

    /// The bound for a window that varies so, among those of its form; none if it is nothing at a bound.
    fn bound_of(
        &self,
        w: &mut Window,
        part: &Part,
        (key, own): (&[u32], &Recorded),
        varying: &Varying,
        moving: &[u32],
    ) -> Result<Option<usize>> {
        let constant = |(at, n): (u32, &i64)| (!moving.contains(&at)).then_some(*n);
        let constants: Arc<[Option<i64>]> = (0..).zip(&part.ops.offsets).map(constant).collect();
        // At the bound itself nothing says what follows from the size, unless something below it was there before.
        for beyond in [false, true] {
            let Some(numbers) = varying.numbers(&own.numbers, varying.bound(beyond)) else { return Ok(None) };
            let Some(graph) = at_bound(w, part, &numbers, &constants) else { return Ok(None) };
            let insts: Vec<u32> = graph.ops.insts.iter().map(|inst| inst.id).collect();
            let bounds = &mut w.alike.form(key).bounds;
            let known = bounds.iter().position(|b| b.key == insts && b.constants == constants);
            if known.is_some() {
                return Ok(known);
            }
            if numbers != own.numbers {
                let outline = graph.outline(self.target().platform())?;
                let (graph, constants) = (Arc::new(graph), constants.clone());
                let (key, below, programs) = (insts, None, Vec::new());
                bounds.push(AtBound { key, numbers, constants, graph, outline, below, programs });
                return Ok(Some(bounds.len() - 1));
            }
        }
        Ok(None)
    }

    /// The program for a window of a form by its bound of this number, and whether it is a new one; none if it has none.
    fn made_by_bound(
        &self,
        w: &mut Window,
        part: &Part,
        (key, own, at): (&[u32], &Recorded, usize),
        cut: Cut<'_>,
    ) -> Result<Option<(ByBound, bool)>> {
        let known = &mut w.alike.form(key).bounds[at];
        let is_at = known.numbers == own.numbers;
        let mut below = None;
        if !is_at {
            let types = part.inputs.iter().map(|v| v.ty.clone()).collect();
            let graph = of_ops(part.ops.clone(), types, part, &known.constants);
            let outline = graph.outline(self.target().platform())?;
            below = Some(Below { graph, outline });
        }
        let Some(sample) = below.as_ref().or(known.below.as_ref()) else { return Ok(None) };
        if !known.graph.checks_alike(&sample.graph) {
            self.explainer.remark(format!("for this size alone: {NAMES_A_SIZE}"));
            return Ok(None);
        }
        let made = match known.outline.bounded(&sample.outline, &[], &[]) {
            Ok(made) => made,
            Err(e) => {
                let (error, site) = known.graph.unbounded(&e);
                let line = describe(site).map_or_else(String::new, |line| format!(" at {line}"));
                self.explainer.remark(format!("for this size alone: {}{line}", error.message));
                return Ok(None);
            }
        };
        let mut hasher = DefaultHasher::new();
        made.module.to_text().hash(&mut hasher);
        let text = hasher.finish();
        let numbers: Arc<[i64]> = made.numbers.iter().map(|(b, s)| if is_at { *b } else { *s }).collect();
        let (graph, constants) = (known.graph.clone(), known.constants.clone());
        let program = known.programs.iter().find(|(known, _)| *known == text).map(|(_, p)| p.clone());
        let (program, is_new) = match (program, below) {
            (Some(program), _) => (program, false),
            (None, Some(below)) if !known.is_full() => {
                let source = Source { ended: Some(cut.ending.at(w.site)), ..Source::default() };
                let own = below.graph.clone();
                known.below.get_or_insert(below);
                let program = self.begin_program(Graph { source, ..graph.for_sizes(numbers.len(), own) })?;
                w.alike.form(key).bounds[at].programs.push((text, program.clone()));
                (program, true)
            }
            _ => return Ok(None),
        };
        let (inputs, outputs) = (graph.inputs[..part.inputs.len()].into(), graph.results().into());
        let live = part.live.clone();
        Ok(Some((ByBound { live, constants, program, numbers, inputs, outputs }, is_new)))
    }

    /// Launches a window by a program of a bound.
    fn launch_padded(&self, w: &mut Window, part: &mut Part, by: &ByBound, cut: Cut<'_>, is_new: bool) {
        let site = part.ops.sites[0];
        let mut inputs: SmallVec<[Arc<Value>; 4]> = part.inputs.drain(..).collect();
        self.enlarge(&mut inputs, &by.inputs);
        let given = by.given(&part.ops.offsets);
        for numbers in [&*given, &*by.numbers] {
            if !numbers.is_empty() {
                inputs.push(Value::offsets(numbers));
            }
        }
        let (outputs, larger) = enlarged(std::mem::take(&mut part.outputs), &by.outputs);
        let window = self.recorded(w, &by.program, cut, is_new);
        let ends_step = cut.ending.reason == Reason::Step;
        let launch = Launch {
            program: by.program.clone(),
            inputs,
            outputs,
            donated: None,
            ops: part.ops.len() as u64,
            first: site,
            window,
            before: self.launcher.front.launches(ends_step),
            ends_step,
            agreement: None,
            notes: std::mem::take(&mut part.notes),
        };
        self.executor.launch(launch, cut.ending.reason == Reason::Read && larger.is_empty());
        self.cut_to_size(larger);
    }
}

/// The graph of a window at a bound: what each op is for what comes to it there. None if they do not fit together.
fn at_bound(w: &mut Window, part: &Part, numbers: &[i64], constants: &[Option<i64>]) -> Option<Graph> {
    let mut numbers = numbers.iter().copied();
    let mut inputs = Vec::new();
    for value in &part.inputs {
        let shape: Vec<i64> = numbers.by_ref().take(value.ty.shape.len()).collect();
        inputs.push(TensorType::new(value.ty.dtype, shape.as_slice()));
    }
    let mut ops = Ops { offsets: part.ops.offsets.clone(), ..Ops::default() };
    ops.sites.clone_from(&part.ops.sites);
    ops.operands.clone_from(&part.ops.operands);
    let mut produced: Vec<Option<TensorType>> = Vec::new();
    for op in part.ops.iter() {
        let (_, own) = op.inst.kind.without_numbers();
        let kind = op.inst.kind.with_numbers(numbers.by_ref().take(own.len()));
        let inst = w.instances.get(kind).ok()?;
        let of = |&code: &u32| match code & PRODUCED {
            0 => inputs.get(code as usize),
            _ => produced[(code & !PRODUCED) as usize].as_ref(),
        };
        let fits = inst.operands.len() == op.operands.len()
            && inst.operands.iter().zip(op.operands).all(|(ty, code)| of(code) == Some(ty))
            && inst.offsets == op.offsets.len()
            && inst.outputs.len() == op.inst.outputs.len()
            && inst.is_identity() == op.inst.is_identity();
        let alike = inst.results().zip(op.inst.results()).all(|(a, b)| match (a, b) {
            (Some(a), Some(b)) => a.order == b.order && a.same_as == b.same_as,
            (a, b) => a.is_none() && b.is_none(),
        });
        if !fits || !alike {
            return None;
        }
        produced.extend(inst.results().map(|out| out.map(|out| out.stored.clone())));
        ops.insts.push(inst);
    }
    Some(of_ops(ops, inputs, part, constants))
}

/// The graph of ops that take these inputs, and the offsets that are no constants.
fn of_ops(ops: Ops, inputs: Vec<TensorType>, part: &Part, constants: &[Option<i64>]) -> Graph {
    let places = (0..).zip(constants).filter(|(_, n)| n.is_none());
    let given = places.zip(0..).map(|((place, _), number)| Given { place, number, more: 0 }).collect();
    Graph::plain(ops, inputs, given, &part.live, part.options)
}
