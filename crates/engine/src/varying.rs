//! Windows whose sizes vary, by programs for all sizes up to a bound.
//!
//! What a window would be at the bound follows from another one that is alike ([`crate::alike`]); it is compared with the
//! window itself as it is done for functions with `dynamic=` ([`oxitorch_hlo::Outline::bounded`]). What goes in is padded and
//! what comes out is cut by the launch thread, so that all tensors have their own sizes.

use crate::alike::{Below, Bound, Differs, Form, Recorded, SizeSource};
use crate::counts::MOST_VARYING;
use crate::error::Result;
use crate::executor::SMALL;
use crate::family::Numbers;
use crate::flush::{Chosen, Cut};
use crate::graph::{Check, Given, Graph, Source};
use crate::inst::Instances;
use crate::known::{ByBound, Indices};
use crate::ops::{Ops, PRODUCED};
use crate::origin::How;
use crate::part::Part;
use crate::site::describe;
use crate::sizes::Sizes;
use crate::stream::Stream;
use crate::view::Shape;
use crate::window::Window;
use oxitorch_hlo::TensorType;
use oxitorch_pjrt::Platform;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

/// Shorter windows need be of no model, if nothing large has to be padded for them: else a program for each size takes less.
const LEAST: usize = 16;
const MOST_PADDED: u64 = 1 << 20;
const DEPENDS: &str = "what is computed depends on the size";
const MANY: &str = "there are many such sizes";

/// A program for all sizes, and whether it is a new one; or why there is none.
type Made<T> = Result<T, String>;

impl Stream {
    /// Launches a window whose key is set by a program for all sizes up to a bound: a known one, or a new one if its sizes
    /// vary by themselves and it has no program of its own size. False if it is to have that.
    pub(crate) fn launch_by_bound(&self, w: &mut Window, part: &mut Part, cut: Cut<'_>) -> Result<bool> {
        let known = w.programs.get_mut(&w.key);
        let by_bound =
            known.as_ref().and_then(|known| known.by_bound(&part.live, || large(part), &part.ops.offsets));
        let has_own = known.is_some_and(|known| known.has_own(&part.live));
        let (by, is_new) = match by_bound {
            Some(by) => (by, false),
            None if has_own || !self.may_vary(part, cut) => return Ok(false),
            None => {
                let source = SizeSource::Seen { is_short: is_short(part), trains: trains(part) };
                match self.by_bound(w, part, source, cut).inspect_err(|e| part.fail(e))? {
                    Some(made) => made,
                    None => return Ok(false),
                }
            }
        };
        if !is_new {
            self.metrics().count(&self.metrics().window_hits);
        }
        self.launch_chosen(w, part, Chosen::by_bound(by, is_new, &part.ops.offsets), None, cut);
        Ok(true)
    }

    /// How a part is launched by a program for all sizes up to a bound, and whether that is new, where the host has read sizes
    /// of it.
    pub(crate) fn by_read_sizes(
        &self,
        w: &mut Window,
        part: &Part,
        cut: Cut<'_>,
    ) -> Result<Option<(ByBound, bool)>> {
        let is_one = self.devices.is_none() && part.asked.is_none() && self.compiles();
        if !is_one || part.read.is_empty() || part.ops.have_own_sizes() {
            return Ok(None);
        }
        let known = w.programs.get_mut(&w.key);
        let known = known.and_then(|k| k.by_bound(&part.live, || large(part), &part.ops.offsets));
        match known {
            Some(known) => Ok(Some((known, false))),
            None => self.by_bound(w, part, SizeSource::Read(&part.read), cut),
        }
    }

    /// The part of each op of a window in which several sizes followed from values, if ops that work with others are to be
    /// other parts: a program for each bound of each size is less than one for each combination of bounds.
    pub(crate) fn parts_by_size(&self, w: &mut Window, part: &Part) -> Option<Vec<u32>> {
        let sizes = part.read.iter().filter(|c| !matches!(c.how, How::Follows | How::Fixed)).count();
        // Where sizes of copies alone vary, as the lengths of texts do, all of a step works with the same ones.
        if part.read.len() < 2
            || !part.read.iter().any(|c| c.how == How::Made)
            || self.devices.is_some()
            || part.asked.is_some()
            || part.ops.have_own_sizes()
        {
            return None;
        }
        if sizes <= MOST_VARYING && !self.is_one_too_many(w, part) {
            return None;
        }
        w.counts.follow(&part.ops, &part.inputs).parts(&part.ops)
    }

    /// Whether a window would be one more of its form, which has programs for some combinations of sizes.
    fn is_one_too_many(&self, w: &mut Window, part: &Part) -> bool {
        let (key, own) = Recorded::of(&part.ops, &part.inputs, &part.donated(), (&part.live, part.options));
        let form = w.alike.form(&key);
        let known = || {
            form.differs(&own, SizeSource::Read(&part.read)).iter().find_map(
                |Differs { other, sizes, .. }| {
                    let mut bounds = sizes.iter().filter_map(|s| s.numbers(other, &own.numbers));
                    bounds.find_map(|numbers| form.known(&numbers, &own.offsets))
                },
            )
        };
        form.varies_much() && known().is_none()
    }

    /// Whether a window may be one for many sizes. Those of devices whose memory is not the host's are not: padding would go
    /// by way of the host there.
    fn may_vary(&self, part: &Part, cut: Cut<'_>) -> bool {
        !part.ops.have_own_sizes() && self.parts_may_vary(cut)
    }

    /// The same of its parts, as far as it depends on all of it.
    pub(crate) fn parts_may_vary(&self, cut: Cut<'_>) -> bool {
        cut.ends_any_size()
            && self.compiles()
            && self.devices.is_none()
            && self.target().platform() == Platform::Cpu
    }

    /// The program for all sizes up to a bound of a window of which none is known, and whether it is a new one.
    fn by_bound(
        &self,
        w: &mut Window,
        part: &Part,
        source: SizeSource<'_>,
        cut: Cut<'_>,
    ) -> Result<Option<(ByBound, bool)>> {
        let (key, own) = Recorded::of(&part.ops, &part.inputs, &part.donated(), (&part.live, part.options));
        let form = w.alike.form(&key);
        let sizes = if let SizeSource::Read(counts) = source { counts.len() } else { 0 };
        if form.is_refused(sizes) {
            return Ok(None);
        }
        // Where gradients are computed, what is beyond the size costs more than a program.
        let takes_any = matches!(source, SizeSource::Seen { trains: false, .. });
        let least = takes_any.then(|| form.least(&own)).flatten();
        let at = match least {
            Some(at) => Ok(Some(at)),
            None => {
                let differs = form.differs(&own, source);
                self.bound_of(&mut w.instances, form, part, &own, &differs)
            }
        };
        let made = match at {
            Ok(Some(at)) => self.made_by_bound(w, part, (&key, &own, at), source, cut)?,
            Ok(None) => {
                form.remember(&own);
                return Ok(None);
            }
            Err(why) => Err(why),
        };
        let form = w.alike.form(&key);
        match made {
            Ok((by, is_new)) => {
                form.served();
                w.programs.entry(&w.key).add_by_bound(by.clone());
                Ok(Some((by, is_new)))
            }
            Err(why) => {
                form.failed(&own);
                self.explainer.remark(format!("for this size alone: {why}"));
                Ok(None)
            }
        }
    }

    /// The bound for a window that differs so from others, among those of its form. None if it differs from none by sizes, or
    /// is as large as these can be; or why it is nothing at a bound.
    fn bound_of(
        &self,
        instances: &mut Instances,
        form: &mut Form,
        part: &Part,
        own: &Recorded,
        differs: &[Differs],
    ) -> Made<Option<usize>> {
        let sizes = differs.iter().flat_map(|d: &Differs| d.sizes.iter().map(move |s| (d, s)));
        let all: Vec<(&Differs, &Sizes, Vec<i64>)> =
            sizes.filter_map(|(d, s)| Some((d, s, s.numbers(&d.other, &own.numbers)?))).collect();
        let known = |(_, _, numbers): &(_, _, Vec<i64>)| form.known(numbers, &own.offsets);
        if let Some(at) = all.iter().filter_map(known).find(|&at| holds(&form.bounds[at].graph, part)) {
            return Ok(Some(at));
        }
        if !all.iter().any(|(_, sizes, _)| sizes.are_less()) {
            return Ok(None);
        }
        if form.is_full() {
            return Err(MANY.into());
        }
        for (differs, sizes, numbers) in all.into_iter().filter(|(_, sizes, _)| sizes.are_less()) {
            let Some(graph) = at_bound(instances, part, &numbers, &differs.constants) else { continue };
            let outline = graph.outline(self.target().platform()).map_err(|e| e.message.to_string())?;
            let (constants, bounds) = (differs.constants.clone(), sizes.bounds().collect());
            return Ok(Some(form.add(Bound::new((numbers, bounds, constants), graph, outline))));
        }
        Err(DEPENDS.into())
    }

    /// The program for a window of a form by its bound of this number, and whether it is a new one; or why it has none.
    fn made_by_bound(
        &self,
        w: &mut Window,
        part: &Part,
        (key, own, at): (&[u32], &Recorded, usize),
        source: SizeSource<'_>,
        cut: Cut<'_>,
    ) -> Result<Made<(ByBound, bool)>> {
        let bound = &mut w.alike.form(key).bounds[at];
        let is_at = bound.numbers == own.numbers;
        let mut below = None;
        if !is_at {
            let types = part.inputs.iter().map(|v| v.ty.clone()).collect();
            let graph = of_ops(part.ops.clone(), types, part, &bound.constants);
            let outline = match graph.outline(self.target().platform()) {
                Ok(outline) => outline,
                Err(e) => return Ok(Err(e.message.to_string())),
            };
            below = Some(Below { graph, outline });
        }
        let Some(sample) = below.as_ref().or(bound.below.as_ref()) else { return Ok(Err(DEPENDS.into())) };
        let checks: Arc<[Check]> = below.as_ref().map_or(&*bound.graph, |own| &own.graph).checks().into();
        if checks.len() != bound.graph.checks().len() {
            return Ok(Err(DEPENDS.into()));
        }
        let made = match bound.outline.bounded(&sample.outline, &[], &[]) {
            Ok(made) => made,
            Err(e) => {
                let (error, site) = bound.graph.unbounded(&e);
                let line = describe(site).map_or_else(String::new, |line| format!(" at {line}"));
                return Ok(Err(format!("{}{line}", error.message)));
            }
        };
        let mut hasher = DefaultHasher::new();
        made.module.to_text().hash(&mut hasher);
        let text = hasher.finish();
        let numbers: Numbers = made.numbers.iter().map(|(b, s)| if is_at { *b } else { *s }).collect();
        let (graph, constants) = (bound.graph.clone(), bound.constants.clone());
        let inputs: Arc<[TensorType]> = graph.inputs[..part.inputs.len()].into();
        // What is padded is a value of its own, and nobody else's to be overwritten.
        let stays = |i: &u32| inputs[*i as usize] == part.inputs[*i as usize].ty;
        let donated = large(part);
        let overwrites: Indices = donated.iter().copied().filter(stays).collect();
        let known = bound.program(text, &overwrites);
        let is_new = known.is_none();
        let program = match (known, below) {
            (Some(program), _) => program,
            (None, Some(below)) if !bound.is_full() => {
                let bounds = bound.bounds.iter().map(i64::to_string).collect::<Vec<_>>().join(" and ");
                self.explainer.remark(match source {
                    SizeSource::Read(_) => format!("for all sizes below {bounds} that follow from values"),
                    SizeSource::Seen { .. } => format!("for all sizes up to {bounds}, as they vary"),
                });
                let (ended, varies) = (Some(cut.ending.at(w.site)), cut.varies());
                let program = self.begin_program(Graph {
                    donated: overwrites.iter().copied().collect(),
                    source: Source { ended, varies, ..Source::default() },
                    ..graph.for_sizes(numbers.len(), below.graph.clone())
                })?;
                let bound = &mut w.alike.form(key).bounds[at];
                bound.below.get_or_insert(below);
                bound.add(text, overwrites, program.clone());
                program
            }
            _ => return Ok(Err(MANY.into())),
        };
        let (live, results) = (part.live.clone(), graph.results().into());
        Ok(Ok((ByBound { live, donated, constants, program, numbers, checks, inputs, results }, is_new)))
    }
}

fn is_short(part: &Part) -> bool {
    part.ops.len() < LEAST && part.inputs.iter().all(|v| v.bytes() <= MOST_PADDED)
}

/// Whether gradients are computed. Who trains has batches of a few sizes as a rule, and wants each in the fastest form.
fn trains(part: &Part) -> bool {
    part.ops.insts.iter().any(|inst| inst.name().contains("backward"))
}

/// The inputs that a program may overwrite, of which a copy would take long: for others it is worth no program of its own.
fn large(part: &Part) -> Indices {
    let is_large = |i: &u32| part.inputs[*i as usize].bytes() > SMALL;
    part.donated().into_iter().filter(is_large).collect()
}

/// The graph of a window at a bound: what each op is for what comes to it there. None if they do not fit together.
fn at_bound(
    instances: &mut Instances,
    part: &Part,
    numbers: &[i64],
    constants: &[Option<i64>],
) -> Option<Graph> {
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
        let inst = instances.get(kind).ok()?;
        let of = |&code: &u32| match code & PRODUCED {
            0 => inputs.get(code as usize),
            _ => produced[(code & !PRODUCED) as usize].as_ref(),
        };
        let fits = inst.operands.len() == op.operands.len()
            && inst.operands.iter().zip(op.operands).all(|(ty, code)| of(code) == Some(ty))
            && inst.offsets == op.offsets.len()
            && inst.kind.shape().map(Shape::is_box) == op.inst.kind.shape().map(Shape::is_box)
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
    let graph = of_ops(ops, inputs, part, constants);
    holds(&graph, part).then_some(graph)
}

/// Whether no tensor of a window is larger than at a bound: where one is what a size leaves of a whole, it is less there.
fn holds(bound: &Graph, part: &Part) -> bool {
    fn results(ops: &Ops) -> impl Iterator<Item = &TensorType> {
        ops.insts.iter().flat_map(|inst| inst.results().flatten().map(|out| &out.stored))
    }
    let own = part.inputs.iter().map(|v| &v.ty).chain(results(&part.ops));
    let mut pairs = own.zip(bound.inputs.iter().take(part.inputs.len()).chain(results(&bound.ops)));
    pairs.all(|(own, bound)| own.shape.iter().zip(&bound.shape).all(|(n, most)| n <= most))
}

/// The graph of ops that take these inputs, and the offsets that are no constants.
fn of_ops(ops: Ops, inputs: Vec<TensorType>, part: &Part, constants: &[Option<i64>]) -> Graph {
    let places = (0..).zip(constants).filter(|(_, n)| n.is_none());
    let given = places.zip(0..).map(|((place, _), number)| Given { place, number, more: 0 }).collect();
    Graph::plain(ops, inputs, given, &part.live, part.options)
}
