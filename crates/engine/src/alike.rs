//! Sequences of ops that are alike but for their sizes: which ones were recorded before, what is known of the sizes by which
//! a new one differs from them, and at which bounds there are programs for all sizes.

use crate::counts;
use crate::graph::Graph;
use crate::known::{Indices, are_among};
use crate::ops::Ops;
use crate::origin::Count;
use crate::program::Program;
use crate::seen::{self, LEAST_BOUND};
use crate::sizes::{Compared, Sizes};
use crate::value::Value;
use oxitorch_hlo::Outline;
use rustc_hash::FxHashMap;
use std::collections::VecDeque;
use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

/// Forms that are remembered: of more, those that were looked for last.
const MOST_FORMS: usize = 256;
/// Sequences that are remembered of each.
const MOST_SAMPLES: usize = 8;
/// Bounds of a form; what makes more varies in too many ways.
const MOST_BOUNDS: usize = 64;
/// Bounds of a form in which several sizes vary, and sizes that none of its programs could be for, after which its sequences
/// are cut.
const MANY_BOUNDS: usize = 4;
const MANY_FAILED: u32 = 2;
/// Programs of a form for one bound: one, and those of sizes that are by chance what another number is.
const MOST_PROGRAMS: usize = 16;
/// A bound is at most so many times a number of a sequence.
const MOST_TIMES: i64 = 4;
/// After so many sequences in a row without a program for all sizes nobody looks for one.
const MOST_FAILED: u32 = 8;

/// What is known of sequences of ops, by what they are without their numbers.
#[derive(Debug, Default)]
pub(crate) struct Alike {
    forms: FxHashMap<Box<[u32]>, Form>,
    /// Counts lookups.
    clock: u64,
}

/// Sequences that are alike but for their numbers.
#[derive(Debug, Default)]
pub(crate) struct Form {
    samples: VecDeque<Recorded>,
    /// Its sequences at bounds.
    pub(crate) bounds: Vec<Bound>,
    /// Sizes in a row that none of its programs could be for.
    failed: u32,
    /// The most sizes of a sequence that were known to vary.
    sizes: usize,
    /// When it was looked for last.
    used: u64,
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

/// Where the sizes of a sequence are known from.
#[derive(Clone, Copy)]
pub(crate) enum SizeSource<'a> {
    /// They were seen to vary: it is one of three sizes at least that a model was given. A short sequence need not be of one
    /// model, but no size of floats may vary.
    Seen { is_short: bool },
    /// The host has read these of values.
    Read(&'a [Count]),
}

/// By which sizes a sequence differs from one that was recorded before.
pub(crate) struct Differs {
    /// The numbers of that one.
    pub(crate) other: Vec<i64>,
    /// The sizes, with bounds for them, the best first.
    pub(crate) sizes: Vec<Sizes>,
    /// The offsets of the own sequence that are those of others.
    pub(crate) constants: Arc<[Option<i64>]>,
}

/// A sequence at a bound.
pub(crate) struct Bound {
    /// Its numbers, as [`Recorded::numbers`].
    pub(crate) numbers: Vec<i64>,
    /// The bounds of its sizes.
    pub(crate) bounds: Vec<i64>,
    /// Its offsets that are constants.
    pub(crate) constants: Arc<[Option<i64>]>,
    pub(crate) graph: Arc<Graph>,
    pub(crate) outline: Outline,
    /// The first sequence below it.
    pub(crate) below: Option<Below>,
    /// By a hash of their texts, and the inputs that they overwrite.
    programs: Vec<(u64, Indices, Arc<Program>)>,
}

/// A sequence below a bound.
pub(crate) struct Below {
    pub(crate) graph: Graph,
    pub(crate) outline: Outline,
}

impl fmt::Debug for Bound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Bound").field("numbers", &self.numbers).finish_non_exhaustive()
    }
}

impl Bound {
    pub(crate) fn new(
        (numbers, bounds, constants): (Vec<i64>, Vec<i64>, Arc<[Option<i64>]>),
        graph: Graph,
        outline: Outline,
    ) -> Bound {
        let (graph, below, programs) = (Arc::new(graph), None, Vec::new());
        Bound { numbers, bounds, constants, graph, outline, below, programs }
    }

    /// The program of a module that overwrites these inputs.
    pub(crate) fn program(&self, text: u64, donated: &Indices) -> Option<Arc<Program>> {
        let found = self.programs.iter().find(|(own, overwritten, _)| *own == text && overwritten == donated);
        found.map(|(_, _, program)| program.clone())
    }

    pub(crate) fn is_full(&self) -> bool {
        self.programs.len() >= MOST_PROGRAMS
    }

    /// Remembers a program.
    pub(crate) fn add(&mut self, text: u64, donated: Indices, program: Arc<Program>) {
        self.programs.push((text, donated, program));
    }

    /// Whether a sequence is one of sizes up to its own, and not much smaller, so that little is computed for nothing.
    fn is_for(&self, own: &Recorded) -> bool {
        let near = |(&bound, &n): (&i64, &i64)| {
            bound == n || (n > 1 && bound > n && (bound <= LEAST_BOUND || bound <= MOST_TIMES * n))
        };
        self.numbers.iter().zip(&own.numbers).all(near) && are_among(&self.constants, &own.offsets)
    }
}

impl Alike {
    /// What is known of a form.
    pub(crate) fn form(&mut self, key: &[u32]) -> &mut Form {
        self.clock += 1;
        if self.forms.len() >= MOST_FORMS && !self.forms.contains_key(key) {
            let latest = self.clock.saturating_sub(MOST_FORMS as u64 / 2);
            self.forms.retain(|_, form| form.used > latest);
        }
        let form = self.forms.entry(key.into()).or_default();
        form.used = self.clock;
        form
    }
}

impl Form {
    /// A program for all sizes serves a sequence of it.
    pub(crate) fn served(&mut self) {
        self.failed = 0;
    }

    /// There can be none for a sequence that differs so.
    pub(crate) fn failed(&mut self, own: &Recorded) {
        self.failed += 1;
        if !self.bounds.is_empty() {
            return;
        }
        // The next one is compared with this one first: the other one may have been of no element, or of one.
        self.samples.retain(|s| s.numbers != own.numbers);
        self.samples.truncate(MOST_SAMPLES - 1);
        self.samples.push_front(own.clone());
    }

    /// Whether it is not worth to look for one in which so many sizes are known to vary; if these are more than before, it is.
    pub(crate) fn is_refused(&mut self, sizes: usize) -> bool {
        if sizes > self.sizes {
            (self.sizes, self.failed) = (sizes, 0);
        }
        self.failed >= MOST_FAILED
    }

    /// Whether so many of its sequences were compiled that others had better be cut into parts of one size each.
    pub(crate) fn varies_much(&self) -> bool {
        self.bounds.len() >= MANY_BOUNDS || self.failed >= MANY_FAILED
    }

    /// Whether it has as many bounds as it may have.
    pub(crate) fn is_full(&self) -> bool {
        self.bounds.len() >= MOST_BOUNDS
    }

    /// Adds a bound; gives its number.
    pub(crate) fn add(&mut self, bound: Bound) -> usize {
        self.bounds.push(bound);
        self.bounds.len() - 1
    }

    /// The bound of these numbers that may have a sequence's offsets.
    pub(crate) fn known(&self, numbers: &[i64], offsets: &[i64]) -> Option<usize> {
        self.bounds.iter().position(|b| b.numbers == numbers && are_among(&b.constants, offsets))
    }

    /// The least known bound for a sequence.
    pub(crate) fn least(&self, own: &Recorded) -> Option<usize> {
        let fit = self.bounds.iter().enumerate().filter(|(_, b)| b.is_for(own));
        fit.min_by_key(|(_, b)| b.numbers.iter().map(|&n| i128::from(n)).sum::<i128>()).map(|(at, _)| at)
    }

    /// Remembers a sequence, to compare others with it.
    pub(crate) fn remember(&mut self, own: &Recorded) {
        self.samples.retain(|s| s.numbers != own.numbers);
        if self.samples.len() == MOST_SAMPLES {
            self.samples.pop_front();
        }
        self.samples.push_back(own.clone());
    }

    /// By which sizes a sequence differs from one that is remembered, if these are known from there.
    pub(crate) fn differs(&self, own: &Recorded, source: SizeSource<'_>) -> Option<Differs> {
        let compared = |s: &Recorded| Compared::new(&s.numbers, &own.numbers);
        let numbered = self.samples.iter().enumerate();
        let (at, sizes, related): (_, _, Vec<&Recorded>) = match source {
            SizeSource::Seen { is_short } => {
                let related: Vec<_> = numbered.filter(|(_, s)| s.is_related(own, is_short)).collect();
                let sizes = |&(at, s): &(usize, &Recorded)| {
                    let compared = compared(s);
                    Some((at, seen::sizes(&compared)?, compared.pairs.len()))
                };
                let found = related.iter().filter(|_| related.len() > 1).filter_map(sizes);
                let (at, sizes, _) = found.min_by_key(|(_, _, different)| *different)?;
                (at, sizes, related.into_iter().map(|(_, s)| s).collect())
            }
            SizeSource::Read(counts) => {
                let (at, sizes) =
                    numbered.filter_map(|(at, s)| Some((at, counts::sizes(counts, &compared(s))?))).next()?;
                (at, sizes, vec![&self.samples[at]])
            }
        };
        let constants = self.constants(own, &related);
        Some(Differs { other: self.samples[at].numbers.clone(), sizes, constants })
    }

    /// The offsets of a sequence that are those of others. Where programs were made with some as constants that differ now,
    /// all are to be given.
    fn constants(&self, own: &Recorded, others: &[&Recorded]) -> Arc<[Option<i64>]> {
        let all_move = self.bounds.iter().any(|b| !are_among(&b.constants, &own.offsets));
        let moves = |at: usize| all_move || others.iter().any(|s| s.offsets[at] != own.offsets[at]);
        (0..).zip(&own.offsets).map(|(at, n)| (!moves(at)).then_some(*n)).collect()
    }
}

impl Recorded {
    /// The form of a sequence with such results, and its numbers.
    pub(crate) fn of(
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
            let mut hasher = DefaultHasher::new();
            kind.hash(&mut hasher);
            let kind = hasher.finish();
            key.extend([kind as u32, (kind >> 32) as u32]);
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

    /// Whether another sequence is of the same model, or, of short ones, differs in no size of floats.
    fn is_related(&self, own: &Recorded, is_short: bool) -> bool {
        if is_short {
            let mut sizes = own.floats.iter().zip(self.numbers.iter().zip(&own.numbers));
            return sizes.all(|(is_float, (a, b))| !is_float || a == b);
        }
        self.inputs.iter().zip(&own.inputs).any(|(a, b)| a == b && *a != 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::origin::{How, Origin};

    fn recorded(n: i64, model: usize, at: i64) -> Recorded {
        Recorded {
            numbers: vec![n, 8],
            offsets: vec![at, 0],
            floats: vec![true, false],
            inputs: vec![model, 0, n as usize],
        }
    }

    #[test]
    fn the_third_size_varies() {
        let seen = |is_short| SizeSource::Seen { is_short };
        let mut form = Form::default();
        let mut is_new = |n, model| {
            let own = recorded(n, model, n);
            let is_new = form.differs(&own, seen(false)).is_none();
            form.remember(&own);
            is_new
        };
        assert!(is_new(5, 1) && is_new(6, 1));
        assert!(is_new(7, 2), "of another model");
        let own = recorded(8, 1, 8);
        let differs = form.differs(&own, seen(false)).expect("the third");
        let numbers = differs.sizes[0].numbers(&differs.other, &own.numbers);
        assert_eq!(numbers, Some(vec![16, 8]));
        assert_eq!(*differs.constants, [None, Some(0)], "the other offset is a constant");
        assert!(
            form.differs(&recorded(9, 1, 9), seen(true)).is_none(),
            "it is short, and computes with floats"
        );
    }

    #[test]
    fn the_second_size_that_was_read_varies() {
        let count = |size| Count { size, most: 100, origin: Origin(size as u64), how: How::Made };
        let counts = [count(6), count(9)];
        let read = SizeSource::Read(&counts);
        let mut form = Form::default();
        form.remember(&recorded(5, 1, 0));
        let own = recorded(6, 2, 0);
        let differs = form.differs(&own, read).expect("of whatever model");
        assert_eq!((&differs.other[..], &*differs.constants), (&[5, 8][..], &[Some(0), Some(0)][..]));
        assert!(form.differs(&recorded(7, 1, 0), read).is_none(), "it was not read");
        form.failed(&own);
        let differs = form.differs(&recorded(9, 1, 0), read).expect("it was read");
        assert_eq!(differs.other, [6, 8], "the one before was of no use");
    }
}
