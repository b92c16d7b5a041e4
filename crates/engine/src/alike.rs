//! Sequences of ops that are alike but for their sizes, as those of text that grows are: which other ones are known, and
//! what a sequence would be at a larger size.
//!
//! Nothing in a recorded op says which of its numbers follow from a size. So a sequence is compared with one that was
//! recorded before: the numbers that differ are those. If they all follow from one size, they are known at every other
//! size, too. A wrong guess makes no wrong program, as the elements in use are always those that the sequence itself says
//! (`hlo/src/bounded`); at worst there is none, or one for other bounds.

use crate::graph::Graph;
use crate::inst::Kind;
use crate::ops::Ops;
use crate::program::Program;
use crate::value::Value;
use oxitorch_hlo::{Outline, TensorType};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;
use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

/// Forms that are remembered. If there are more, all are forgotten, and what goes on is soon known again.
const MOST_FORMS: usize = 256;
/// Sequences that are remembered of each.
const MOST_SAMPLES: usize = 8;
/// Numbers of a sequence that may differ from another's by size, at most so many different ones.
const MOST_DIFFERENT: usize = 64;
/// Programs of a form for one bound; what makes more is nothing that follows from a size.
const MOST_PROGRAMS: usize = 8;
/// A bound is at most so many times a number of a sequence.
const MOST_TIMES: i64 = 4;
/// After so many sequences without a program for all sizes nobody looks for one.
const MOST_FAILED: u32 = 4;
/// No bound is less.
const LEAST_BOUND: i64 = 16;

/// What is known of sequences of ops, by what they are without their numbers.
#[derive(Debug, Default)]
pub(crate) struct Alike {
    forms: FxHashMap<Box<[u32]>, Form>,
    /// Numbers of kinds of ops.
    kinds: FxHashMap<Kind, u32>,
}

/// Sequences that are alike but for their numbers.
#[derive(Debug, Default)]
pub(crate) struct Form {
    samples: VecDeque<Recorded>,
    /// Its sequences at bounds.
    pub(crate) bounds: Vec<AtBound>,
    /// Sizes that none of its programs could be for.
    failed: u32,
}

/// The numbers of a sequence, and what it was recorded on.
#[derive(Clone, Debug)]
pub(crate) struct Recorded {
    /// Of its inputs' types, and of its ops.
    pub(crate) numbers: Vec<i64>,
    pub(crate) offsets: Vec<i64>,
    /// Which of the first numbers are sizes of inputs that hold floats.
    floats: Vec<bool>,
    /// Where the values of its inputs are: what a model has in common with itself.
    inputs: Vec<usize>,
}

/// A sequence at a bound.
pub(crate) struct AtBound {
    /// The numbers of its instances.
    pub(crate) key: Vec<u32>,
    /// Its numbers, as [`Recorded::numbers`].
    pub(crate) numbers: Vec<i64>,
    /// Its offsets that are constants.
    pub(crate) constants: Arc<[Option<i64>]>,
    pub(crate) graph: Arc<Graph>,
    pub(crate) outline: Outline,
    /// The first sequence below it.
    pub(crate) below: Option<Below>,
    /// By a hash of their texts.
    pub(crate) programs: Vec<(u64, Arc<Program>)>,
}

/// How a sequence with some results is launched by a program for all sizes up to a bound.
#[derive(Clone, Debug)]
pub(crate) struct ByBound {
    pub(crate) live: SmallVec<[u32; 8]>,
    /// Its offsets that are constants of the program; the others are given to it.
    pub(crate) constants: Arc<[Option<i64>]>,
    pub(crate) program: Arc<Program>,
    /// What follows from the size.
    pub(crate) numbers: Arc<[i64]>,
    /// The types of the program's inputs and results.
    pub(crate) inputs: Arc<[TensorType]>,
    pub(crate) outputs: Arc<[TensorType]>,
}

impl ByBound {
    /// Whether it is for these results and offsets.
    pub(crate) fn is_for(&self, live: &[u32], offsets: &[i64]) -> bool {
        let same = |(own, n): (&Option<i64>, &i64)| own.is_none_or(|own| own == *n);
        self.live.as_slice() == live && self.constants.iter().zip(offsets).all(same)
    }

    /// The offsets that the program is given.
    pub(crate) fn given(&self, offsets: &[i64]) -> Vec<i64> {
        let given = |(own, n): (&Option<i64>, &i64)| own.is_none().then_some(*n);
        self.constants.iter().zip(offsets).filter_map(given).collect()
    }
}

/// A sequence below a bound.
pub(crate) struct Below {
    pub(crate) graph: Graph,
    pub(crate) outline: Outline,
}

impl fmt::Debug for AtBound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AtBound").field("key", &self.key).finish_non_exhaustive()
    }
}

impl AtBound {
    pub(crate) fn is_full(&self) -> bool {
        self.programs.len() >= MOST_PROGRAMS
    }

    /// Whether a sequence is one of sizes up to its own, and not much smaller, so that little is computed for nothing.
    fn is_for(&self, own: &Recorded) -> bool {
        let near = |(&bound, &n): (&i64, &i64)| {
            bound == n || (n > 1 && bound > n && (bound <= LEAST_BOUND || bound <= MOST_TIMES * n))
        };
        let same = |(known, n): (&Option<i64>, &i64)| known.is_none_or(|known| known == *n);
        self.numbers.iter().zip(&own.numbers).all(near) && self.constants.iter().zip(&own.offsets).all(same)
    }
}

impl Alike {
    /// The form of a sequence, and its numbers.
    pub(crate) fn form_of(
        &mut self,
        ops: &Ops,
        inputs: &[Arc<Value>],
        (live, options): (&[u32], u32),
    ) -> (Box<[u32]>, Recorded) {
        let mut key = vec![options, live.len() as u32, inputs.len() as u32];
        key.extend_from_slice(live);
        key.extend(inputs.iter().map(|v| v.ty.shape.len() as u32));
        let mut numbers: Vec<i64> = inputs.iter().flat_map(|v| v.ty.shape.iter().copied()).collect();
        for op in ops.iter() {
            let (kind, own) = op.inst.kind.without_numbers();
            let next = self.kinds.len() as u32;
            key.push(*self.kinds.entry(kind).or_insert(next));
            key.push(op.offsets.len() as u32); // a view may be a box of its storage at one size, and none at another
            key.extend_from_slice(op.operands);
            numbers.extend(own);
        }
        let is_float = |v: &Arc<Value>| v.ty.dtype.is_float() || v.ty.dtype.is_complex();
        let floats = inputs.iter().flat_map(|v| v.ty.shape.iter().map(move |_| is_float(v))).collect();
        // Numbers are shared by all.
        let place = |v: &Arc<Value>| if v.ty.shape.is_empty() { 0 } else { Arc::as_ptr(v) as usize };
        let inputs = inputs.iter().map(place).collect();
        (key.into(), Recorded { numbers, offsets: ops.offsets.clone(), floats, inputs })
    }

    /// What is known of a form.
    pub(crate) fn form(&mut self, key: &[u32]) -> &mut Form {
        if self.forms.len() >= MOST_FORMS && !self.forms.contains_key(key) {
            self.forms.clear();
            self.kinds.clear();
        }
        self.forms.entry(key.into()).or_default()
    }
}

impl Form {
    /// A sequence of it has no program for all sizes.
    pub(crate) fn failed(&mut self) {
        self.failed += 1;
    }

    /// Whether it is not worth to look for one.
    pub(crate) fn is_refused(&self) -> bool {
        self.failed >= MOST_FAILED
    }

    /// The least known bound for a sequence.
    pub(crate) fn least(&self, own: &Recorded) -> Option<usize> {
        let fit = self.bounds.iter().enumerate().filter(|(_, b)| b.is_for(own));
        fit.min_by_key(|(_, b)| b.numbers.iter().map(|&n| i128::from(n)).sum::<i128>()).map(|(at, _)| at)
    }

    /// Remembers a sequence. How it varies, if it is one of three sizes at least that a model was given, and its numbers
    /// follow from one size. If it is short, it need not be of one model, but no size of floats may vary.
    pub(crate) fn varies(&mut self, own: &Recorded, is_short: bool) -> Option<(Varying, Vec<u32>)> {
        let same_floats = |s: &Recorded| {
            let mut sizes = own.floats.iter().zip(s.numbers.iter().zip(&own.numbers));
            sizes.all(|(is_float, (a, b))| !is_float || a == b)
        };
        let same_model = |s: &Recorded| s.inputs.iter().zip(&own.inputs).any(|(a, b)| a == b && *a != 0);
        let related = |s: &&Recorded| if is_short { same_floats(s) } else { same_model(s) };
        let related: Vec<&Recorded> = self.samples.iter().filter(related).collect();
        let found = (related.len() > 1).then(|| {
            let varying = related.iter().filter_map(|s| Varying::between(&s.numbers, &own.numbers));
            let varying = varying.min_by_key(|v| v.pairs.len())?;
            let places = 0..own.offsets.len();
            let moves = |&at: &usize| related.iter().any(|s| s.offsets[at] != own.offsets[at]);
            Some((varying, places.filter(moves).map(|at| at as u32).collect()))
        });
        match found.flatten() {
            Some(found) => Some(found),
            None => {
                self.samples.retain(|s| s.numbers != own.numbers);
                if self.samples.len() == MOST_SAMPLES {
                    self.samples.pop_front();
                }
                self.samples.push_back(own.clone());
                None
            }
        }
    }
}

/// Numbers of one sequence and another that differ, and the size that they follow from.
#[derive(Debug)]
pub(crate) struct Varying {
    /// The other one's.
    other: Vec<i64>,
    /// Those that differ, each pair once.
    pairs: Vec<(i64, i64)>,
    /// The size.
    size: (i64, i64),
    /// By how much other sizes are more.
    more: Vec<i64>,
}

impl Varying {
    /// How the numbers of a sequence differ from those of another one; none if no single size can be the reason.
    fn between(other: &[i64], own: &[i64]) -> Option<Varying> {
        let mut pairs: Vec<(i64, i64)> = Vec::new();
        for pair in other.iter().copied().zip(own.iter().copied()).filter(|(a, b)| a != b) {
            if !pairs.contains(&pair) {
                pairs.push(pair);
            }
            // What has a size of one, or none, is another thing: it is broadcast, or there is nothing of it.
            if pair.0 < 2 || pair.1 < 2 || pairs.len() > MOST_DIFFERENT {
                return None;
            }
        }
        let step = |&(a, b): &(i64, i64)| b - a;
        let least = pairs.iter().map(step).min_by_key(|d| d.abs())?;
        let size = pairs.iter().copied().filter(|p| step(p) == least).max_by_key(|p| p.1)?;
        let more = pairs.iter().filter(|p| step(p) == least).map(|p| p.1 - size.1).collect();
        let varying = Varying { other: other.to_vec(), pairs, size, more };
        varying.pairs.iter().all(|&pair| varying.at(pair, size.1 + 1).is_some()).then_some(varying)
    }

    /// The least bound for the sequence, beyond its own size if it has to be.
    pub(crate) fn bound(&self, beyond: bool) -> i64 {
        let least = self.size.1 + i64::from(beyond);
        (least.max(LEAST_BOUND) as u64).next_power_of_two() as i64
    }

    /// What a number is if the size is this one.
    fn at(&self, pair: (i64, i64), size: i64) -> Option<i64> {
        let step = self.size.1 - self.size.0;
        if (pair.1 - pair.0) % step == 0 {
            let times = (pair.1 - pair.0) / step;
            let rest = pair.1 - times * self.size.1;
            if times == 1 || self.more.iter().any(|more| more * times == rest) {
                return Some(times * size + rest);
            }
        }
        // A multiple of the product of two sizes.
        let product = |a: i64, b: i64| {
            let of = |size: i64| (size + a) * (size + b);
            let (before, own) = (of(self.size.0), of(self.size.1));
            let divides = before != 0 && own != 0 && pair.0 % before == 0 && pair.1 % own == 0;
            (divides && pair.0 / before == pair.1 / own).then(|| pair.1 / own * of(size))
        };
        self.more.iter().find_map(|&a| self.more.iter().find_map(|&b| product(a, b)))
    }

    /// The numbers of the sequence if the size is this one, from those of its own.
    pub(crate) fn numbers(&self, own: &[i64], size: i64) -> Option<Vec<i64>> {
        let number = |(&a, &b): (&i64, &i64)| if a == b { Some(b) } else { self.at((a, b), size) };
        self.other.iter().zip(own).map(number).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The numbers of a sequence at the least bound, and the bound, from those of another one and its own.
    fn at_bound(other: &[i64], own: &[i64]) -> Option<(i64, Vec<i64>)> {
        let varying = Varying::between(other, own)?;
        let bound = varying.bound(false);
        Some((bound, varying.numbers(own, bound)?))
    }

    #[test]
    fn numbers_follow_from_one_size() {
        // Keys of 20 places become keys of 21, of 2 heads with 8 numbers each; 16 and 21 are constants elsewhere.
        let sizes = |n: i64| vec![2, n, n + 1, 16 * n, 2 * 16 * (n + 1), 16, 21];
        assert_eq!(at_bound(&sizes(20), &sizes(24)), Some((32, sizes(31))), "the largest size is the bound");
        assert_eq!(at_bound(&sizes(24), &sizes(20)), Some((32, sizes(31))), "also from a larger one");
        let masks = |n: i64| vec![n, n, n * n, 4 * n * n];
        assert_eq!(at_bound(&masks(9), &masks(11)), Some((16, masks(16))));
    }

    #[test]
    fn what_follows_from_no_single_size_is_refused() {
        assert_eq!(at_bound(&[2, 20, 40], &[3, 27, 81]), None, "a batch and a length");
        assert_eq!(at_bound(&[1, 20], &[2, 21]), None, "a size of one is broadcast");
        assert_eq!(at_bound(&[20, 16], &[20, 16]), None, "nothing varies");
    }

    #[test]
    fn the_third_size_varies() {
        let recorded = |n: i64, model: usize, at: i64| Recorded {
            numbers: vec![n, 8],
            offsets: vec![at, 0],
            floats: vec![true, false],
            inputs: vec![model, 0, n as usize],
        };
        let mut form = Form::default();
        assert!(form.varies(&recorded(5, 1, 5), false).is_none());
        assert!(form.varies(&recorded(6, 1, 6), false).is_none());
        assert!(form.varies(&recorded(7, 2, 7), false).is_none(), "of another model");
        let (varying, moving) = form.varies(&recorded(8, 1, 8), false).expect("the third");
        assert_eq!((varying.bound(false), varying.bound(true)), (16, 16));
        assert_eq!(moving, [0], "the other offset is a constant");
        assert!(form.varies(&recorded(9, 1, 9), true).is_none(), "it is short, and computes with floats");
    }
}
