//! Sequences of ops that are alike but for their sizes: which ones were recorded before, what is known of the sizes by which
//! a new one differs from them, and at which bounds there are programs for all sizes.

use crate::counts;
use crate::graph::Graph;
use crate::known::{Indices, are_among};
use crate::ops::Ops;
use crate::origin::Count;
use crate::program::Program;
use crate::seen;
use crate::sizes::{Compared, LEAST_BOUND, Sizes};
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
/// A sequence of one model that is of this many sizes, or more, has sizes that vary.
const VARIES_FROM: usize = 3;
/// The same of a short one, of whatever model, in which sizes of floats differ: to compile it takes little, and pads nothing.
const SHORT_VARIES_FROM: usize = 5;
/// The same of one that trains: batches of a few sizes are to have the fastest form.
const TRAINING_VARIES_FROM: usize = 9;
/// After so many sequences in a row without a program for all sizes one is looked for rarely.
const MOST_FAILED: u32 = 8;
const RARELY: u32 = 32;

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
    /// Which of them are sizes of inputs that it overwrites.
    overwritten: Vec<bool>,
    /// The identities of its inputs: what a model has in common with itself. Numbers, which all share, are 0.
    inputs: Vec<u64>,
}

/// Where the sizes of a sequence are known from.
#[derive(Clone, Copy)]
pub(crate) enum SizeSource<'a> {
    /// They were seen to vary: it is one of some sizes at least that a model was given. A short sequence need not be of one
    /// model.
    Seen { is_short: bool, trains: bool },
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
        // The next one is compared with this one first: the other one may have been of no element, or of one.
        self.samples.retain(|s| s.numbers != own.numbers);
        self.samples.truncate(MOST_SAMPLES - 1);
        self.samples.push_front(own.clone());
    }

    /// Whether it is not worth to look for one in which so many sizes are known to vary, this time; if these are more than
    /// before, it is. Short sequences of one form may have nothing else in common.
    pub(crate) fn is_refused(&mut self, sizes: usize) -> bool {
        if sizes > self.sizes {
            (self.sizes, self.failed) = (sizes, 0);
        }
        let is_refused = self.failed >= MOST_FAILED && !self.failed.is_multiple_of(RARELY);
        self.failed += u32::from(is_refused);
        is_refused
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

    /// By which sizes a sequence differs from those that are remembered, as far as these are known from there; the one that
    /// differs least first.
    pub(crate) fn differs(&self, own: &Recorded, source: SizeSource<'_>) -> Vec<Differs> {
        let compared = |s: &Recorded| Compared::new(&s.numbers, &own.numbers);
        match source {
            SizeSource::Seen { is_short, trains } => {
                let (related, are_of_one_model) = self.varying(own, is_short, trains);
                let constants = self.constants(own, &related);
                let differs = |s: &&Recorded| {
                    let compared = compared(s);
                    let (other, constants) = (s.numbers.clone(), constants.clone());
                    let sizes = seen::sizes(&compared, trains, are_of_one_model)?;
                    Some((compared.pairs.len(), Differs { other, sizes, constants }))
                };
                let mut found: Vec<_> = related.iter().filter_map(differs).collect();
                found.sort_by_key(|(different, _)| *different);
                found.into_iter().map(|(_, differs)| differs).collect()
            }
            SizeSource::Read(counts) => {
                let differs = |s: &Recorded| {
                    let sizes = counts::sizes(counts, &compared(s))?;
                    let constants = self.constants(own, &[s]);
                    Some(Differs { other: s.numbers.clone(), sizes, constants })
                };
                self.samples.iter().find_map(differs).into_iter().collect()
            }
        }
    }

    /// The sequences of which a sequence is another size, if there are enough of them, and whether they are of one model.
    fn varying(&self, own: &Recorded, is_short: bool, trains: bool) -> (Vec<&Recorded>, bool) {
        let is_small = is_short && !trains;
        let is_related =
            |s: &Recorded| s.is_of_same_model(own) || (is_small && s.is_same_in(own, &own.floats));
        let related: Vec<_> = self.samples.iter().filter(|s| is_related(s)).collect();
        let least = if trains { TRAINING_VARIES_FROM } else { VARIES_FROM };
        if related.len() + 1 >= least {
            return (related, true);
        }
        let varies = is_small && self.samples.len() + 1 >= SHORT_VARIES_FROM;
        (if varies { self.samples.iter().collect() } else { Vec::new() }, false)
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
        donated: &[u32],
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
        let of_sizes = |of: &dyn Fn(usize, &Value) -> bool| -> Vec<bool> {
            let each = inputs.iter().enumerate();
            each.flat_map(|(i, v)| std::iter::repeat_n(of(i, v), v.ty.shape.len())).collect()
        };
        let floats = of_sizes(&|_, v| v.ty.dtype.is_float() || v.ty.dtype.is_complex());
        let overwritten = of_sizes(&|i, _| donated.contains(&(i as u32)));
        let inputs = inputs.iter().map(|v| if v.ty.shape.is_empty() { 0 } else { v.identity() }).collect();
        (key.into(), Recorded { numbers, offsets: ops.offsets.clone(), floats, overwritten, inputs })
    }

    /// Whether another sequence is of the same model: it takes a tensor that this one takes, or overwrites as many of the same
    /// sizes, as a step of training does.
    fn is_of_same_model(&self, own: &Recorded) -> bool {
        let shares = self.inputs.iter().zip(&own.inputs).any(|(a, b)| a == b && *a != 0);
        shares || (own.overwritten.contains(&true) && self.is_same_in(own, &own.overwritten))
    }

    /// Whether it has the same sizes where this is so.
    fn is_same_in(&self, own: &Recorded, which: &[bool]) -> bool {
        let mut sizes = which.iter().zip(self.numbers.iter().zip(&own.numbers));
        sizes.all(|(is_asked, (a, b))| !is_asked || a == b)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::origin::{How, Origin};

    fn recorded(n: i64, model: u64, at: i64) -> Recorded {
        Recorded {
            numbers: vec![n, 8],
            offsets: vec![at, 0],
            floats: vec![true, false],
            overwritten: vec![false, false],
            inputs: vec![model, 0, n as u64],
        }
    }

    #[test]
    fn the_third_size_varies() {
        let seen = |is_short| SizeSource::Seen { is_short, trains: false };
        let mut form = Form::default();
        let mut is_new = |n, model| {
            let own = recorded(n, model, n);
            let is_new = form.differs(&own, seen(false)).is_empty();
            form.remember(&own);
            is_new
        };
        assert!(is_new(5, 1) && is_new(6, 1));
        assert!(is_new(7, 2), "of another model");
        let own = recorded(8, 1, 8);
        let differs = &form.differs(&own, seen(false))[0];
        let numbers = differs.sizes[0].numbers(&differs.other, &own.numbers);
        assert_eq!(numbers, Some(vec![16, 8]));
        assert_eq!(*differs.constants, [None, Some(0)], "the other offset is a constant");
        assert!(form.differs(&recorded(9, 3, 9), seen(true)).is_empty(), "it is short, and of no model");
        form.remember(&own);
        assert!(!form.differs(&recorded(9, 3, 9), seen(true)).is_empty(), "the fifth");
        assert!(form.differs(&recorded(9, 3, 9), seen(false)).is_empty(), "it is of another model");
    }

    #[test]
    fn the_second_size_that_was_read_varies() {
        let count = |size| Count { size, most: 100, origin: Origin(size as u64), how: How::Made };
        let counts = [count(6), count(9)];
        let read = SizeSource::Read(&counts);
        let mut form = Form::default();
        form.remember(&recorded(5, 1, 0));
        let own = recorded(6, 2, 0);
        let differs = &form.differs(&own, read)[0]; // of whatever model
        assert_eq!((&differs.other[..], &*differs.constants), (&[5, 8][..], &[Some(0), Some(0)][..]));
        assert!(form.differs(&recorded(7, 1, 0), read).is_empty(), "it was not read");
        form.failed(&own);
        let differs = &form.differs(&recorded(9, 1, 0), read)[0];
        assert_eq!(differs.other, [6, 8], "the one before was of no use");
    }
}
