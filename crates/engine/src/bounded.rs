//! One program for all sizes up to a bound: of a function that was run at the bound, and at the size of a call.
//!
//! Nothing of what a function records says which of its numbers follow from a size. So it is run at two sizes, and what
//! was recorded is compared ([`oxitorch_hlo::Module::bounded`]). What a call needs besides the program, its numbers and
//! how its results look, is that of its own size.

use crate::apart::apart;
use crate::config::Switches;
use crate::error::{Refusal, Result};
use crate::family::Numbers;
use crate::graph::{Given, Graph, Sample, Source as From};
use crate::recipe::{
    AtSize, Bound, GraphOutput, Home, Layout, Moving, Numbering, OfSizes, Recipe, Shape, Source, Whole,
};
use crate::site::{Site, describe};
use crate::spread::Sharded;
use crate::stream::Stream;
use crate::strided::row_major;
use crate::view::dense_order;
use oxitorch_hlo::{DType, Dims, InMemory, TensorType};
use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

impl Stream {
    /// The recipe of a function for arguments of the size of `sample` that are padded to the size of `bound`, by a program
    /// for all such sizes; if `at_bound`, for arguments that fill it. Or why there is none, which is said of the next
    /// program too.
    pub fn bounded(
        &self,
        bound: &Recipe,
        sample: &Recipe,
        at_bound: bool,
        site: Site,
        switches: &Switches,
    ) -> Result<Result<Recipe, String>, Refusal> {
        let made = self.recipe_of_size(bound, sample, at_bound, site, switches)?;
        if let Err(why) = &made {
            self.explainer.remark(format!("for this size alone: {why}"));
        }
        Ok(made)
    }

    fn recipe_of_size(
        &self,
        bound: &Recipe,
        sample: &Recipe,
        at_bound: bool,
        site: Site,
        switches: &Switches,
    ) -> Result<Result<Recipe, String>> {
        let nothing = || Ok(Err("it computes nothing".to_owned()));
        let (Some(whole), true) = (&bound.whole, sample.whole.is_some()) else { return nothing() };
        if !bound.between.is_empty() || !sample.between.is_empty() {
            return Ok(Err("a collective ends its program".to_owned()));
        }
        let apart = apart(bound, sample);
        let (numbering, bound, sample) = match &apart {
            Some((numbering, bound, sample)) => (numbering.as_slice(), bound, sample),
            None => (&[][..], bound, sample),
        };
        let of = |known: &[(Numbering, Arc<Bound>)]| {
            known.iter().find(|(own, _)| own == numbering).map(|(_, known)| known.clone())
        };
        let known = of(&whole.bounds.lock());
        let known = match known {
            Some(known) => known,
            None => {
                let Some((shape, types)) = self.shape_of(bound, site, switches)? else { return nothing() };
                if shape.ops.is_empty() {
                    return nothing();
                }
                let graph = graph(&shape, types);
                let outline = graph.outline(self.target().platform())?;
                let made = Arc::new(Bound { shape, graph, outline, programs: Default::default() });
                whole.bounds.lock().push((numbering.to_vec(), made.clone()));
                made
            }
        };
        let Some((own, types)) = self.shape_of(sample, site, switches)? else { return nothing() };
        if let Err(why) = compare(bound, &known.shape, sample, &own) {
            return Ok(Err(why.to_owned()));
        }
        let sample_graph = graph(&own, types);
        let outline = sample_graph.outline(self.target().platform())?;
        let (inputs, results) =
            (memory_of_inputs(&known.shape, bound, sample), memory_of_results(&known.shape, bound, sample));
        let made = match known.outline.bounded(&outline, &inputs, &results) {
            Ok(made) => made,
            Err(e) => {
                let (error, site) = known.graph.unbounded(&e);
                let line = describe(site).map_or_else(String::new, |line| format!(" at {line}"));
                return Ok(Err(format!("{}{line}", error.message)));
            }
        };
        let outputs = match outputs(bound, sample, (&known.shape, &own), &results) {
            Ok(outputs) => outputs,
            Err(why) => return Ok(Err(why.to_owned())),
        };
        let sample_graph = Sample { graph: sample_graph, inputs, results };
        let mut hasher = DefaultHasher::new();
        made.module.to_text().hash(&mut hasher);
        let text = hasher.finish();
        let numbers: Numbers = made.numbers.iter().map(|(b, s)| if at_bound { *b } else { *s }).collect();
        let mut programs = known.programs.lock();
        let of_sizes = match programs.iter().find(|(known, _)| *known == text) {
            Some((_, of_sizes)) => of_sizes.clone(),
            None => {
                let vector = TensorType::new(DType::S64, [numbers.len() as i64].as_slice());
                let types = known.graph.inputs.iter().cloned().chain([vector]).collect();
                let (sample, given) = (Some(Arc::new(sample_graph)), known.graph.given.clone());
                let graph = Graph { inputs: types, given, sample, ..graph(&known.shape, Vec::new()) };
                let new = OfSizes { graph: Arc::new(graph), programs: Arc::default() };
                programs.push((text, new.clone()));
                new
            }
        };
        drop(programs);
        let size = if at_bound { bound } else { sample };
        let shape = Shape {
            options: known.shape.options,
            ops: known.shape.ops.clone(),
            inputs: known.shape.inputs.clone(),
            live: known.shape.live.clone(),
            results: known.shape.results.clone(),
            moving: known.shape.moving.clone(),
            programs: of_sizes.programs,
            size: Some(AtSize { graph: of_sizes.graph, numbers }),
        };
        self.metrics().count(&self.metrics().recipes);
        Ok(Ok(Recipe {
            device: bound.device,
            switches: bound.switches,
            arguments: bound.arguments.clone(),
            types: bound.types.clone(),
            insts: Vec::new(),
            between: Vec::new(),
            sites: bound.sites.first().copied().into_iter().collect(),
            operands: Vec::new(),
            offsets: size.offsets.clone(),
            moving: size.moving.clone(),
            numbers: size.numbers.clone(),
            drawn: size.drawn.clone(),
            scratch: bound.scratch.clone(),
            written: bound.written.clone(),
            made: bound.made.clone(),
            outputs: if at_bound { bound.outputs.iter().map(GraphOutput::again).collect() } else { outputs },
            whole: Some(Whole {
                ends_step: whole.ends_step,
                donated: whole.donated.clone(),
                shape: Some(Arc::new(shape)).into(),
                ..Whole::default()
            }),
        }))
    }
}

/// The graph for inputs of these types; offsets that move are one more.
fn graph(shape: &Shape, mut inputs: Vec<TensorType>) -> Graph {
    let given: Box<[Given]> =
        shape.moving.iter().zip(0..).map(|(&(_, place), number)| Given { place, number, more: 0 }).collect();
    if !given.is_empty() {
        inputs.push(TensorType::new(DType::S64, [given.len() as i64].as_slice()));
    }
    Graph {
        ops: (*shape.ops).clone(),
        inputs,
        given,
        donated: Default::default(),
        options: shape.options,
        live: shape.live.clone(),
        spread: None,
        source: From::default(),
        sample: None,
    }
}

/// Whether two sizes record the same but for sizes and numbers.
fn compare(bound: &Recipe, b: &Shape, sample: &Recipe, s: &Shape) -> Result<(), &'static str> {
    let numbers = |shape: &Shape| shape.results.iter().map(|r| r.0).collect::<Vec<_>>();
    let drawn = |recipe: &Recipe| recipe.drawn.iter().map(|(g, _)| *g).collect::<Vec<_>>();
    let homes = |recipe: &Recipe| recipe.outputs.iter().map(|o| o.home).collect::<Vec<_>>();
    let sources = |recipe: &Recipe| recipe.made.iter().map(|(_, source)| *source).collect::<Vec<_>>();
    let same = b.inputs == s.inputs
        && b.live == s.live
        && numbers(b) == numbers(s)
        && drawn(bound) == drawn(sample)
        && homes(bound) == homes(sample)
        && sources(bound) == sources(sample)
        && bound.written == sample.written;
    if !same {
        return Err("what is computed depends on the size");
    }
    // If several numbers could be the one, it is one that says the same at both sizes: a call has all of them agree.
    let moves_alike =
        |(a, b): (&Moving, &Moving)| a.at == b.at && a.places.iter().any(|p| b.places.contains(p));
    let mut moving = bound.moving.iter().zip(&sample.moving);
    if b.moving != s.moving || bound.moving.len() != sample.moving.len() || !moving.all(moves_alike) {
        return Err("a position follows from a number of Python's and from the size");
    }
    let ty = |shape: &Shape, source: Source| match source {
        Source::Result(n) => shape.results.iter().find(|r| r.0 == n).map(|r| r.1.clone()),
        _ => None,
    };
    if bound.written.iter().any(|(_, source)| ty(b, *source) != ty(s, *source)) {
        return Err("a tensor is written whose size varies, or that is no argument and has such a size");
    }
    Ok(())
}

/// How the memory of an argument or result is cut into dimensions, if a tensor shows all of it.
fn in_memory(large: &Layout, small: &Layout) -> Option<InMemory> {
    let dims = |layout: &Layout| -> Option<Dims> {
        let order = dense_order(&layout.sizes, &layout.strides)?;
        (layout.offset == 0).then_some(order)
    };
    let order = dims(large)?;
    let steps = |layout: &Layout| order.iter().map(|&d| layout.strides[d as usize]).collect::<Dims>();
    let sizes = |layout: &Layout| order.iter().map(|&d| layout.sizes[d as usize]).collect::<Dims>();
    if small.sizes.len() != order.len() || small.offset != 0 {
        return None;
    }
    let own = sizes(small);
    let mut packed = own.iter().zip(steps(small)).zip(row_major(&own));
    packed.all(|((&n, step), wanted)| n < 2 || step == wanted).then_some(())?;
    Some(sizes(large).into_iter().zip(sizes(small)).collect())
}

fn memory_of_inputs(shape: &Shape, bound: &Recipe, sample: &Recipe) -> Vec<Option<InMemory>> {
    let pairs = || bound.arguments.iter().zip(&sample.arguments);
    let of = |input: &Source| match input {
        Source::Storage(i) => {
            pairs().filter(|(a, _)| a.storage == Some(*i)).find_map(|(a, b)| in_memory(&a.layout, &b.layout))
        }
        _ => None,
    };
    shape.inputs.iter().map(of).collect()
}

fn memory_of_results(shape: &Shape, bound: &Recipe, sample: &Recipe) -> Vec<Option<InMemory>> {
    let outputs = || bound.outputs.iter().zip(&sample.outputs);
    let of = |(number, ..): &(u32, TensorType, Sharded, Site)| {
        let made = bound.made.iter().position(|(_, source)| *source == Some(Source::Result(*number)))?;
        let own = |(a, _): &(&GraphOutput, &GraphOutput)| a.home == Home::Made(made);
        outputs().filter(own).find_map(|(a, b)| in_memory(&a.layout, &b.layout))
    };
    shape.results.iter().map(of).collect()
}

/// The results of a call of some size: as the function gives them, in storages that have the size of the bound.
fn outputs(
    bound: &Recipe,
    sample: &Recipe,
    (shape, of_sample): (&Shape, &Shape),
    results: &[Option<InMemory>],
) -> Result<Vec<GraphOutput>, &'static str> {
    let place = |home: Home| match home {
        Home::Made(at) => match bound.made[at].1 {
            Some(Source::Result(n)) => shape.results.iter().position(|r| r.0 == n),
            _ => None,
        },
        Home::Argument(_) => None,
    };
    let mut outputs = Vec::new();
    for (at_bound, own) in bound.outputs.iter().zip(&sample.outputs) {
        let (large, small) = (&at_bound.layout, &own.layout);
        let at = place(at_bound.home);
        let stays = at.is_some_and(|at| shape.results[at].1 == of_sample.results[at].1);
        let stored = match at_bound.home {
            Home::Argument(at) => in_memory(&bound.arguments[at].layout, &sample.arguments[at].layout),
            Home::Made(_) => at.and_then(|at| results[at].clone()),
        };
        let made = || {
            let [large, small] = [shape, of_sample].map(|of| at.map(|at| &of.results[at].1.shape));
            large.zip(small).map(|(large, small)| large.iter().copied().zip(small.iter().copied()).collect())
        };
        let memory = stored.clone().or_else(made);
        let same = large == small && memory.is_none_or(|memory| is_at_its_place(small, &memory));
        let layout = if same || stays && are_expanded(large, small) {
            small.clone()
        } else {
            stored
                .and_then(|stored| in_storage(large, small, &stored))
                .ok_or("a result whose size varies is a part of a larger tensor")?
        };
        let contiguous = layout.strides == row_major(&layout.sizes);
        outputs.push(GraphOutput { home: at_bound.home, layout, contiguous });
    }
    Ok(outputs)
}

/// Whether two tensors show the same elements but for how often.
fn are_expanded(large: &Layout, small: &Layout) -> bool {
    let same_kind = (large.dtype, large.conj, large.neg) == (small.dtype, small.conj, small.neg);
    let same_place = large.offset == small.offset && large.strides == small.strides;
    let mut sizes = large.sizes.iter().zip(&small.sizes).zip(&large.strides);
    same_kind
        && same_place
        && large.sizes.len() == small.sizes.len()
        && sizes.all(|((a, b), step)| a == b || *step == 0)
}

/// Whether each element of a tensor is where it is in its own storage, in one that is larger: up to the end of the first row
/// of a size that varies they are.
fn is_at_its_place(own: &Layout, stored: &InMemory) -> bool {
    let Some(varies) = stored.iter().rposition(|(large, small)| large != small) else { return true };
    let row: i64 = stored[varies..].iter().map(|(large, small)| *large.min(small)).product();
    let reach: i64 = own.sizes.iter().zip(&own.strides).map(|(n, step)| (n - 1).max(0) * step).sum();
    varies == 0 || own.sizes.contains(&0) || own.offset + reach < row
}

/// How a tensor lies in a storage that is larger than its own.
fn in_storage(large: &Layout, small: &Layout, stored: &InMemory) -> Option<Layout> {
    let same_kind = (large.dtype, large.conj, large.neg) == (small.dtype, small.conj, small.neg);
    if !same_kind || large.sizes.len() != small.sizes.len() {
        return None;
    }
    let sizes: (Dims, Dims) = stored.iter().copied().unzip();
    let steps = (row_major(&sizes.0), row_major(&sizes.1));
    // Along a dimension that varies, steps are those of one dimension of the storage.
    for d in (0..large.sizes.len()).filter(|&d| large.sizes[d] != small.sizes[d]) {
        let is_own = |e: usize| {
            (steps.0[e], steps.1[e]) == (large.strides[d], small.strides[d])
                && sizes.0[e] - large.sizes[d] == sizes.1[e] - small.sizes[d]
        };
        if large.strides[d] != 0 && !(0..stored.len()).any(is_own) {
            return None;
        }
    }
    let place = |offset: i64, sizes: &Dims, steps: &Dims| -> Vec<i64> {
        sizes.iter().zip(steps).map(|(&size, &step)| offset / step.max(1) % size.max(1)).collect()
    };
    let same_place = place(large.offset, &sizes.0, &steps.0) == place(small.offset, &sizes.1, &steps.1);
    same_place.then(|| Layout { sizes: small.sizes.clone(), ..large.clone() })
}
