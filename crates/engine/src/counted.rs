//! Launching windows whose sizes followed from values by programs for more sizes than theirs (`counts.rs`).
//!
//! Nobody sees it: inputs are padded and results cut by the launch thread, before and after the launch.

use crate::counts::{self, AtBound, Bound, Counted, Counts, Enlarged};
use crate::ending::Ended;
use crate::error::Result;
use crate::executor::Pad;
use crate::family::Numbers;
use crate::graph::{Given, Graph, Sample, Source};
use crate::inst::{Inst, Instances};
use crate::known::Indices;
use crate::ops::Ops;
use crate::part::Part;
use crate::split::Token;
use crate::stream::Stream;
use crate::strided::row_major;
use crate::value::{State, Value};
use crate::view::View;
use crate::window::Window;
use oxitorch_hlo::{Bounded, DType, TensorType};
use smallvec::{SmallVec, smallvec};
use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

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

    fn graph(&self, ops: Ops, inputs: impl IntoIterator<Item = TensorType>) -> Graph {
        let offsets = || TensorType::new(DType::S64, [self.given.len() as i64].as_slice());
        Graph {
            ops,
            inputs: inputs.into_iter().chain((!self.given.is_empty()).then(offsets)).collect(),
            given: self.given.clone(),
            donated: SmallVec::new(),
            options: self.part.options,
            live: self.part.live.iter().copied().collect(),
            spread: None,
            source: Source::default(),
            sample: None,
        }
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
        // What fails is to be found op by op, and what is on the host has its own size there.
        let is_apart = |inst: &Inst| inst.may_fail() || inst.memory().is_some();
        if self.devices.is_some()
            || part.asked.is_some()
            || !self.compiles()
            || !w.counts.are_in(&part.ops)
            || part.ops.insts.iter().any(|inst| is_apart(inst))
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
        let own = taken.graph(part.ops.clone(), part.inputs.iter().map(|v| v.ty.clone()));
        let (at, made) = match self.compared(counted, (&w.counts, &mut w.instances), &taken, &own) {
            None => return Ok(None),
            Some(Ok(made)) => made,
            Some(Err(why)) => {
                counted.failed(&part.ops);
                self.explainer.remark(format!("for this size alone: {why}"));
                return Ok(None);
            }
        };
        let sample = Sample { graph: own, inputs: Vec::new(), results: Vec::new() };
        let (made, is_new) =
            self.program_at(&mut counted.bounds[at], made, sample, donated, (ended, varies))?;
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
            let messages = |graph: &Graph| graph.checks().into_iter().map(|c| c.message).collect::<Vec<_>>();
            match messages(&bound.graph) == messages(own) {
                true => Ok((at, made)),
                false => Err("its error names a size".to_owned()),
            }
        }))
    }

    /// How a part is launched by the program of a module for all sizes up to a bound, and whether that is new.
    fn program_at(
        &self,
        bound: &mut Bound,
        made: Bounded,
        sample: Sample,
        donated: &Indices,
        (ended, varies): (Ended, bool),
    ) -> Result<(AtBound, bool)> {
        let graph = &bound.graph;
        let takes_offsets = !graph.given.is_empty();
        let inputs = graph.inputs[..graph.inputs.len() - usize::from(takes_offsets)].into();
        let results = counts::results(&graph.ops, &graph.live).into();
        let stays = |i: &u32| graph.inputs[*i as usize] == sample.graph.inputs[*i as usize];
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
                let vector = TensorType::new(DType::S64, [numbers.len() as i64].as_slice());
                let program = self.begin_program(Graph {
                    ops: graph.ops.clone(),
                    inputs: graph.inputs.iter().cloned().chain([vector]).collect(),
                    given: graph.given.clone(),
                    donated: donated.iter().copied().collect(),
                    options: graph.options,
                    live: graph.live.clone(),
                    spread: None,
                    source: Source { ended: Some(ended), varies, ..Source::default() },
                    sample: Some(Arc::new(sample)),
                })?;
                bound.add(text, donated, program.clone());
                program
            }
        };
        Ok((AtBound { program, numbers, takes_offsets, inputs, results }, is_new))
    }

    /// Gives inputs these types, with what they hold in the first places of each dimension.
    pub(crate) fn enlarge(&self, inputs: &mut [Arc<Value>], types: &[TensorType]) {
        for (input, ty) in inputs.iter_mut().zip(types).filter(|(input, ty)| input.ty != **ty) {
            let to = Value::sharded(ty.clone(), None, State::Pending, input.site);
            self.executor.pad(Pad {
                from: input.clone(),
                view: first_of(&input.ty.shape, &input.ty),
                to: to.clone(),
                fill: smallvec![0; ty.dtype.size_bytes()],
            });
            *input = to;
        }
    }

    /// Takes the first places of each dimension of results for values that are smaller.
    pub(crate) fn cut_to_size(&self, results: Vec<(Arc<Value>, Arc<Value>)>) {
        for (from, to) in results {
            let (view, fill) = (first_of(&from.ty.shape, &to.ty), smallvec![0; to.ty.dtype.size_bytes()]);
            self.executor.pad(Pad { from, view, to, fill });
        }
    }
}

/// Values of these types for results, and those of them that are larger, with the results.
#[allow(clippy::type_complexity)] // two lists, of which the second has pairs
pub(crate) fn enlarged(
    results: SmallVec<[Arc<Value>; 2]>,
    types: &[TensorType],
) -> (SmallVec<[Arc<Value>; 2]>, Vec<(Arc<Value>, Arc<Value>)>) {
    let mut larger = Vec::new();
    let value = |(own, ty): (Arc<Value>, &TensorType)| {
        if own.ty == *ty {
            return own;
        }
        let made = Value::sharded(ty.clone(), None, State::Pending, own.site);
        larger.push((made.clone(), own));
        made
    };
    (results.into_iter().zip(types).map(value).collect(), larger)
}

/// The first places of each dimension of a row-major tensor of some shape, as many as a type has.
fn first_of(shape: &[i64], ty: &TensorType) -> View {
    let (sizes, strides) = (ty.shape.clone(), row_major(shape));
    View { dtype: ty.dtype, sizes, strides, offset: 0, conj: false, neg: false }
}
