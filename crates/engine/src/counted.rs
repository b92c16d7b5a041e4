//! Launching windows whose sizes followed from values by programs for more sizes than theirs (`counts.rs`).
//!
//! Nobody sees it: inputs are padded and results cut by the launch thread, before and after the launch.

use crate::counts::{self, AtBound, Bound, Counted, Counts, Enlarged};
use crate::ending::Ended;
use crate::error::Result;
use crate::family::Numbers;
use crate::graph::{Given, Graph, NAMES_A_SIZE, Source};
use crate::inst::{Inst, Instances};
use crate::known::Indices;
use crate::ops::Ops;
use crate::part::Part;
use crate::split::Token;
use crate::stream::Stream;
use crate::window::Window;
use oxitorch_hlo::{Bounded, TensorType};
use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};

/// A part of which graphs are made: its own, and that at a bound.
struct Taken<'a> {
    part: &'a Part,
    /// All of its offsets, if programs take them.
    given: Box<[Given]>,
}

impl<'a> Taken<'a> {
    fn new(part: &'a Part, takes_offsets: bool) -> Taken<'a> {
        let places = 0..if takes_offsets { part.ops.offsets.len() as u32 } else { 0 };
        Taken { part, given: places.map(|place| Given { place, number: place, more: 0 }).collect() }
    }

    fn graph(&self, ops: Ops, inputs: Vec<TensorType>) -> Graph {
        Graph::plain(ops, inputs, self.given.clone(), &self.part.live, self.part.options)
    }
}

impl Stream {
    /// How a part is launched by a program for more sizes, and whether that is new. None if no size of it is known to have
    /// followed from values, if it is the first with such sizes, or if there can be no such program.
    pub(crate) fn at_bound(
        &self,
        w: &mut Window,
        part: &Part,
        donated: &Indices,
        (ended, varies): (Ended, bool),
    ) -> Result<Option<(AtBound, bool)>> {
        w.counts.find_cut(&part.ops);
        if self.devices.is_some()
            || part.asked.is_some()
            || !self.compiles()
            || !w.counts.are_in(&part.ops)
            || part.ops.have_own_sizes()
        {
            return Ok(None);
        }
        let name = |inst: &Inst| Token::new(0, inst.name()).name();
        let key = counts::key(part.options, part.inputs.len(), &part.live, &part.ops, name);
        let Some(counted) = w.counted.get(key, &part.ops) else { return Ok(None) };
        if counted.is_given_up() {
            return Ok(None);
        }
        counted.look_at_offsets(&part.ops);
        let insts = part.ops.insts.iter().map(|inst| inst.id);
        let call: Box<[u32]> = donated.iter().copied().chain([u32::MAX]).chain(insts).collect();
        if let Some(known) = counted.call(&call) {
            return Ok(Some((known.clone(), false)));
        }
        let taken = Taken::new(part, counted.moves);
        let own = taken.graph(part.ops.clone(), part.inputs.iter().map(|v| v.ty.clone()).collect());
        let (at, made) = match self.compared(counted, (&w.counts, &mut w.instances), &taken, &own) {
            None => return Ok(None),
            Some(Ok(made)) => made,
            Some(Err(why)) => {
                counted.failed(&part.ops);
                self.explainer.remark(format!("for this size alone: {why}"));
                return Ok(None);
            }
        };
        let (made, is_new) = self.program_at(&mut counted.bounds[at], made, own, donated, (ended, varies))?;
        counted.add(call, made.clone());
        Ok(Some((made, is_new)))
    }

    /// The number of the bound for a part, and the module for all sizes up to it. None if it is not to have one, or why there
    /// is none.
    fn compared(
        &self,
        counted: &mut Counted,
        (counts, instances): (&Counts, &mut Instances),
        taken: &Taken<'_>,
        own: &Graph,
    ) -> Option<Result<(usize, Bounded), String>> {
        let platform = self.target().platform();
        let outline = |graph: &Graph| graph.outline(platform).map_err(|e| e.message.to_string());
        let enlarged = counted.enlarged((&own.ops, taken.part.inputs.len()), counts, instances)?;
        let at = enlarged.map_err(str::to_owned).and_then(|enlarged| match enlarged {
            Enlarged::Known(at) => Ok(at),
            Enlarged::New(bounds, ops, inputs) => {
                let graph = taken.graph(ops, inputs);
                outline(&graph).map(|outline| counted.add_bound(bounds, graph, outline))
            }
        });
        Some(at.and_then(|at| {
            let bound = &counted.bounds[at];
            let made = bound.outline.bounded(&outline(own)?, &[], &[]);
            let made = made.map_err(|e| bound.graph.unbounded(&e).0.message.to_string())?;
            if bound.graph.checks_alike(own) { Ok((at, made)) } else { Err(NAMES_A_SIZE.to_owned()) }
        }))
    }

    /// How a part is launched by the program of a module for all sizes up to a bound, and whether that is new.
    fn program_at(
        &self,
        bound: &mut Bound,
        made: Bounded,
        own: Graph,
        donated: &Indices,
        (ended, varies): (Ended, bool),
    ) -> Result<(AtBound, bool)> {
        let graph = &bound.graph;
        let takes_offsets = !graph.given.is_empty();
        let inputs = graph.inputs[..graph.inputs.len() - usize::from(takes_offsets)].into();
        let results = graph.results().into();
        let stays = |i: &u32| graph.inputs[*i as usize] == own.inputs[*i as usize];
        let donated: Indices = donated.iter().copied().filter(stays).collect();
        let mut hasher = DefaultHasher::new();
        made.module.to_text().hash(&mut hasher);
        let text = hasher.finish();
        let numbers: Numbers = made.numbers.iter().map(|(_, own)| *own).collect();
        let known = bound.programs.iter().find(|(t, d, _)| *t == text && *d == donated).map(|p| p.2.clone());
        let is_new = known.is_none();
        let program = match known {
            Some(program) => program,
            None => {
                let below = bound.bounds.iter().map(i64::to_string).collect::<Vec<_>>().join(" and ");
                self.explainer.remark(format!("for all sizes below {below} that follow from values"));
                let program = self.begin_program(Graph {
                    donated: donated.iter().copied().collect(),
                    source: Source { ended: Some(ended), varies, ..Source::default() },
                    ..graph.for_sizes(numbers.len(), own)
                })?;
                bound.add(text, donated, program.clone());
                program
            }
        };
        Ok((AtBound { program, numbers, takes_offsets, inputs, results }, is_new))
    }
}
