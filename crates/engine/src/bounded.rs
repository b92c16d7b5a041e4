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
use oxitorch_hlo::{DType, Dims, InMemory, Module, Outline, Sampled, TensorType};
use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

const DEPENDS: &str = "what is computed depends on the size";

/// The program for a size, and its numbers: at the bound and at the size.
type Served = (OfSizes, Vec<(i64, i64)>);

/// Where that is, for the end of a message.
fn at(site: Site) -> String {
    describe(site).map_or_else(String::new, |line| format!(" at {line}"))
}

impl Stream {
    /// The recipe of a function for arguments of the size of `sample` that are padded to the size of `bound`, by a program
    /// for all such sizes; if `at_bound`, for arguments that fill it. Or why there is none: who asks may know another bound.
    pub fn bounded(
        &self,
        bound: &Recipe,
        sample: &Recipe,
        at_bound: bool,
        site: Site,
        switches: &Switches,
    ) -> Result<Result<Recipe, String>, Refusal> {
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
        let sample_graph = graph(&own, types);
        if let Err(why) = compare(bound, &known.shape, sample, &own) {
            return Ok(Err(known
                .graph
                .differs(&sample_graph)
                .map_or_else(|| why.to_owned(), |(name, site)| format!("{name}: {DEPENDS}{}", at(site)))));
        }
        let checks = if at_bound { &known.graph } else { &sample_graph }.checks().into();
        let outline = sample_graph.outline(self.target().platform())?;
        let (inputs, results) =
            (memory_of_inputs(&known.shape, bound, sample), memory_of_results(&known.shape, bound, sample));
        let made = match known.outline.bounded(&outline, &inputs, &results) {
            Ok(made) => made,
            Err(e) => {
                let (error, site) = known.graph.unbounded(&e);
                return Ok(Err(format!("{}{}", error.message, at(site))));
            }
        };
        let outputs = match outputs(bound, sample, (&known.shape, &own), &results) {
            Ok(outputs) => outputs,
            Err(why) => return Ok(Err(why.to_owned())),
        };
        let text = text_of(&made.module);
        let mut programs = known.programs.lock();
        let of_text = programs.iter().find(|(known, _)| *known == text).map(|(_, of_sizes)| of_sizes.clone());
        let own = Sampled { outline: &outline, params: &inputs, results: &results };
        let served = match of_text {
            Some(of_sizes) => Some((of_sizes, made.numbers.clone())),
            None => self.served(&known.outline, &programs, own)?,
        };
        let (of_sizes, numbers) = match served {
            Some(served) => served,
            None => {
                let vector = TensorType::new(DType::S64, [made.numbers.len() as i64].as_slice());
                let types = known.graph.inputs.iter().cloned().chain([vector]).collect();
                let sample = Sample { graph: sample_graph, inputs, results };
                let (sample, given) = (Some(Arc::new(sample)), known.graph.given.clone());
                let graph = Graph { inputs: types, given, sample, ..graph(&known.shape, Vec::new()) };
                let new = OfSizes { graph: Arc::new(graph), programs: Arc::default() };
                programs.push((text, new.clone()));
                (new, made.numbers)
            }
        };
        drop(programs);
        let numbers: Numbers = numbers.iter().map(|(b, s)| if at_bound { *b } else { *s }).collect();
        let size = if at_bound { bound } else { sample };
        let shape = Shape {
            options: known.shape.options,
            ops: known.shape.ops.clone(),
            inputs: known.shape.inputs.clone(),
            live: known.shape.live.clone(),
            results: known.shape.results.clone(),
            moving: known.shape.moving.clone(),
            programs: of_sizes.programs,
            size: Some(Box::new(AtSize { graph: of_sizes.graph, numbers, checks })),
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

    /// A program that another sample made and that serves this one as well, at which more numbers are what they are at the
    /// bound; with its numbers.
    fn served(
        &self,
        bound: &Outline,
        programs: &[(u64, OfSizes)],
        own: Sampled<'_>,
    ) -> Result<Option<Served>> {
        for (text, of_sizes) in programs {
            let Some(sample) = &of_sizes.graph.sample else { continue };
            let outline = sample.graph.outline(self.target().platform())?;
            let sample = Sampled { outline: &outline, params: &sample.inputs, results: &sample.results };
            if let Ok(made) = bound.of_samples(sample, own)
                && text_of(&made.module) == *text
            {
                return Ok(Some((of_sizes.clone(), made.numbers)));
            }
        }
        Ok(None)
    }
}

fn text_of(module: &Module) -> u64 {
    let mut hasher = DefaultHasher::new();
    module.to_text().hash(&mut hasher);
    hasher.finish()
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
        return Err(DEPENDS);
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

/// The memory of an argument's value, whose tensors show all of it.
fn memory_of_argument(source: Source, bound: &Recipe, sample: &Recipe) -> Option<(InMemory, DType)> {
    let is_own = |(at, storage): (usize, Option<u32>)| match source {
        Source::Storage(i) => storage == Some(i),
        Source::Host(i) => at == i as usize,
        _ => false,
    };
    let pairs = bound.arguments.iter().zip(&sample.arguments).enumerate();
    pairs
        .filter(|(at, (a, _))| is_own((*at, a.storage)))
        .find_map(|(_, (a, b))| in_memory(&a.layout, &b.layout).map(|memory| (memory, b.layout.dtype)))
}

fn memory_of_inputs(shape: &Shape, bound: &Recipe, sample: &Recipe) -> Vec<Option<InMemory>> {
    let of = |input: &Source| match input {
        Source::Storage(_) => memory_of_argument(*input, bound, sample).map(|(memory, _)| memory),
        _ => None,
    };
    shape.inputs.iter().map(of).collect()
}

fn memory_of_results(shape: &Shape, bound: &Recipe, sample: &Recipe) -> Vec<Option<InMemory>> {
    let outputs = || bound.outputs.iter().zip(&sample.outputs);
    let of = |(number, ty, ..): &(u32, TensorType, Sharded, Site)| {
        let made = bound.made.iter().position(|(_, source)| *source == Some(Source::Result(*number)))?;
        // Its bits may be shown as another dtype, too.
        let own = |(a, _): &(&GraphOutput, &GraphOutput)| {
            a.home == Home::Made(made) && a.layout.dtype.size_bytes() == ty.dtype.size_bytes()
        };
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
    let memory_of = |home: Home| match home {
        Home::Argument(at) => {
            memory_of_argument(Source::Storage(bound.arguments[at].storage?), bound, sample)
        }
        Home::Made(made) => match bound.made[made].1? {
            Source::Result(n) => {
                let at = shape.results.iter().position(|r| r.0 == n)?;
                let [large, small] = [shape, of_sample].map(|of| &of.results[at].1);
                let own = || large.shape.iter().copied().zip(small.shape.iter().copied()).collect();
                Some((results[at].clone().unwrap_or_else(own), small.dtype))
            }
            source => memory_of_argument(source, bound, sample),
        },
    };
    let mut outputs = Vec::new();
    for (at_bound, own) in bound.outputs.iter().zip(&sample.outputs) {
        let (large, small) = (&at_bound.layout, &own.layout);
        let stored = memory_of(at_bound.home);
        let layout = match stored {
            None if large == small => Some(small.clone()),
            None => None,
            Some((memory, dtype)) => {
                let same_kind = (large.dtype, large.conj, large.neg) == (small.dtype, small.conj, small.neg);
                let memory = in_units(memory, dtype.size_bytes() as i64, small.dtype.size_bytes() as i64);
                memory.filter(|_| same_kind).and_then(|memory| in_storage(small, &memory))
            }
        };
        let layout = layout.ok_or("a result whose size varies is a part of a larger tensor")?;
        let contiguous = layout.strides == row_major(&layout.sizes);
        outputs.push(GraphOutput { home: at_bound.home, layout, contiguous });
    }
    Ok(outputs)
}

/// The dimensions of some memory, in elements of `wanted` bytes instead of `have`.
fn in_units(mut memory: InMemory, have: i64, wanted: i64) -> Option<InMemory> {
    if have >= wanted {
        memory.push((have / wanted, have / wanted));
        return Some(memory);
    }
    let (large, small) = memory.pop()?;
    let times = wanted / have;
    memory.push((large / times, small / times));
    (large % times == 0 && small % times == 0).then_some(memory)
}

/// How a tensor that lies in a storage of its own lies in a larger one: the place of each element along the dimensions of
/// the storage is the same in both.
fn in_storage(own: &Layout, stored: &InMemory) -> Option<Layout> {
    if own.sizes.contains(&0) {
        return Some(own.clone());
    }
    // What is inside of a dimension and does not vary is part of it: steps are the same in both.
    let mut dims = InMemory::new();
    for &(large, small) in stored {
        match dims.last_mut() {
            Some(last) if large == small => *last = (last.0 * large, last.1 * small),
            _ => dims.push((large, small)),
        }
    }
    let (large, small): (Dims, Dims) = dims.iter().copied().unzip();
    let (to, from) = (row_major(&large), row_major(&small));
    // Places along each dimension; along the outermost one there may be more than it has.
    let places = |step: i64| -> Dims {
        let place = |e: usize| step / from[e].max(1) % if e == 0 { i64::MAX } else { small[e].max(1) };
        (0..from.len()).map(place).collect()
    };
    let moved = |places: &Dims| places.iter().zip(&to).map(|(at, step)| at * step).sum::<i64>();
    let start = places(own.offset);
    let steps: Vec<Dims> = own.strides.iter().map(|&step| places(step)).collect();
    let last = |e: usize| start[e] + steps.iter().zip(&own.sizes).map(|(s, n)| s[e] * (n - 1)).sum::<i64>();
    // No element is in another row than its first one by carrying over.
    (0..small.len()).all(|e| last(e) < small[e].max(1)).then(|| Layout {
        strides: steps.iter().map(moved).collect(),
        offset: moved(&start),
        ..own.clone()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_lie_in_larger_storages() {
        let check = |(sizes, strides, offset): (&[i64], &[i64], i64), stored: &[(i64, i64)], expected| {
            let (sizes, strides) = (Dims::from_slice(sizes), Dims::from_slice(strides));
            let own = Layout { dtype: DType::F32, sizes, strides, offset, conj: false, neg: false };
            let got = in_storage(&own, &stored.to_vec()).map(|l| (l.strides.to_vec(), l.offset));
            assert_eq!(got, expected, "{own:?} in {stored:?}");
        };
        let first: &[(i64, i64)] = &[(16, 5), (3, 3)];
        // Along the first dimension all elements stay where they are: transposed, flat, diagonal, shown again.
        check((&[3, 5], &[1, 3], 0), first, Some((vec![1, 3], 0)));
        check((&[15], &[1], 0), first, Some((vec![1], 0)));
        check((&[3], &[4], 3), first, Some((vec![4], 3)));
        check((&[2, 5, 3], &[0, 3, 1], 0), first, Some((vec![0, 3, 1], 0)));
        // Along another one rows are further apart; a dimension of size 1 may have any stride.
        let second: &[(i64, i64)] = &[(4, 4), (16, 5), (6, 6)];
        check((&[5, 4, 6], &[6, 30, 1], 0), second, Some((vec![6, 96, 1], 0)));
        check((&[4, 30], &[30, 1], 0), second, Some((vec![96, 1], 0)));
        check((&[3, 5], &[30, 6], 31), second, Some((vec![96, 6], 97)));
        check((&[4, 1, 5], &[30, 7, 6], 0), second, Some((vec![96, 7, 6], 0)));
        // What goes on in the next row has no stride there.
        check((&[120], &[1], 0), second, None);
        check((&[3], &[20], 0), second, None);
        check((&[5, 4], &[6, 29], 3), second, None);
    }

    #[test]
    fn memory_is_counted_in_elements_of_another_size() {
        let check = |memory: &[(i64, i64)], (have, wanted), expected: Option<&[(i64, i64)]>| {
            assert_eq!(in_units(memory.to_vec(), have, wanted), expected.map(<[_]>::to_vec));
        };
        check(&[(16, 5)], (8, 4), Some(&[(16, 5), (2, 2)]));
        check(&[(16, 5), (6, 6)], (4, 8), Some(&[(16, 5), (3, 3)]));
        check(&[(16, 5)], (4, 8), None);
    }
}
