//! Numbers that are one by chance.
//!
//! Equal numbers of a function are one operand. One that follows from a size may be equal to another at some size, as the
//! end of `torch.arange(n) / 16` is where `n` is 16, and at others is not. Here each is an operand of its own that is one
//! at two sizes of which either tells it from another.

use crate::recipe::{GraphOutput, Numbering, Recipe, Source, Whole};
use crate::value::{Held, State, Value};
use rustc_hash::FxHashMap;

/// Recipes of one function at two sizes, with as many numbers in the same order. None if they take numbers in other places,
/// or one that is not there to be copied.
pub(crate) fn apart(a: &Recipe, b: &Recipe) -> Option<(Numbering, Recipe, Recipe)> {
    let taken = (numbers_of(a), numbers_of(b));
    if taken.0.len() != taken.1.len() {
        return None;
    }
    let mut known = FxHashMap::default();
    let mut pairs = Vec::new();
    let mut number = |pair: (u32, u32)| {
        *known.entry(pair).or_insert_with(|| {
            pairs.push(pair);
            pairs.len() as u32 - 1
        })
    };
    let numbering: Numbering = taken.0.into_iter().zip(taken.1).map(&mut number).collect();
    let a = with_numbers(a, &numbering, pairs.iter().map(|pair| pair.0))?;
    let b = with_numbers(b, &numbering, pairs.iter().map(|pair| pair.1))?;
    Some((numbering, a, b))
}

/// The places where a recipe says where a value comes from.
fn sources(recipe: &Recipe) -> impl Iterator<Item = Source> {
    let written = recipe.written.iter().map(|(_, source)| *source);
    let made = recipe.made.iter().filter_map(|(_, source)| *source);
    recipe.operands.iter().copied().chain(written).chain(made)
}

fn numbers_of(recipe: &Recipe) -> Vec<u32> {
    let number = |source| match source {
        Source::Number(i) => Some(i),
        _ => None,
    };
    sources(recipe).filter_map(number).collect()
}

/// The recipe with these of its numbers, of which each place takes the one that `numbering` says.
fn with_numbers(recipe: &Recipe, numbering: &[u32], own: impl Iterator<Item = u32>) -> Option<Recipe> {
    let mut is_taken = vec![false; recipe.numbers.len()];
    let number = |i: u32| {
        let own = &recipe.numbers[i as usize];
        // The first of them stays what it is, and is not brought to the device again.
        match std::mem::replace(&mut is_taken[i as usize], true) {
            false => Some(own.clone()),
            true => copy(own),
        }
    };
    let numbers: Vec<Held> = own.map(number).collect::<Option<_>>()?;
    let mut next = numbering.iter();
    let mut renumbered = |source: Source| match source {
        Source::Number(i) => Source::Number(next.next().copied().unwrap_or(i)),
        _ => source,
    };
    let operands = recipe.operands.iter().map(|s| renumbered(*s)).collect();
    let written = recipe.written.iter().map(|(at, s)| (*at, renumbered(*s))).collect();
    let made = recipe.made.iter().map(|(bytes, s)| (*bytes, s.map(&mut renumbered))).collect();
    let whole = |whole: &Whole| Whole {
        ends_step: whole.ends_step,
        donated: whole.donated.clone(),
        ..Whole::default()
    };
    Some(Recipe {
        device: recipe.device,
        switches: recipe.switches,
        arguments: recipe.arguments.clone(),
        types: recipe.types.clone(),
        insts: recipe.insts.clone(),
        between: recipe.between.clone(),
        sites: recipe.sites.clone(),
        operands,
        offsets: recipe.offsets.clone(),
        moving: recipe.moving.clone(),
        numbers,
        drawn: recipe.drawn.clone(),
        scratch: recipe.scratch.clone(),
        written,
        made,
        outputs: recipe.outputs.iter().map(GraphOutput::again).collect(),
        whole: recipe.whole.as_ref().map(whole),
    })
}

/// The same number as another value.
fn copy(number: &Held) -> Option<Held> {
    let value = number.value();
    let state = match &*value.state.lock() {
        State::Host(bytes) => State::Host(bytes.clone()),
        State::Ready(buffers) => State::Ready(buffers.clone()),
        State::Absent(bytes) => State::Absent(bytes.clone()),
        _ => return None,
    };
    Some(Held::new(Value::sharded(value.ty.clone(), value.sharding.clone(), state, value.site)))
}
