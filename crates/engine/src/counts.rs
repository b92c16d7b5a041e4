//! Sizes that followed from values, as the number of elements that a mask selects, and windows that differ by these alone.
//!
//! The second such window has a program for all sizes up to a bound, and so have those after it: what its ops are at the
//! bound follows from two of them, as each number that differs does from the counts.

use crate::family::Numbers;
use crate::graph::Graph;
use crate::inst::{Inst, Instances, Kind};
use crate::known::Indices;
use crate::ops::{Ops, PRODUCED};
use crate::program::Program;
use crate::shared::Shared;
use oxitorch_hlo::{Outline, TensorType};
use rustc_hash::{FxHashMap, FxHashSet};
use std::cmp::Reverse;
use std::collections::VecDeque;
use std::sync::Arc;

/// Counts that are remembered.
const COUNTS: usize = 32;
/// Sequences of ops that are remembered, whatever their sizes are.
const FAMILIES: usize = 64;
/// Bounds that a sequence may have: some for each count, and pairs of them where two vary on their own.
const BOUNDS: usize = 24;
/// Programs that a bound may have: one, and those of sizes that are by chance what another number is.
const PROGRAMS: usize = 16;
/// Sizes of a sequence that are remembered.
const CALLS: usize = 256;
/// A sequence for which a program of many sizes could not be made so often in a row has none.
const TRIES: u32 = 8;
/// Sizes around a part of a tensor that are tried as bounds.
const MOST_WITHIN: usize = 4;
const DEPENDS: &str = "what is computed depends on the size";
/// The least bound.
const LEAST: i64 = 16;
/// Beyond this one there are four bounds from one power of two to the next: what is computed beyond the count costs more than
/// a program.
const FINE: i64 = 128;

/// A size that followed from values, and the largest that it could have been.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Count {
    size: i64,
    most: i64,
}

/// The latest sizes that followed from values.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    known: VecDeque<Count>,
    /// Numbers that the host has read, each of which may be a size of what is recorded next.
    numbers: VecDeque<i64>,
}

impl Counts {
    /// The host has read such a size.
    pub(crate) fn add(&mut self, size: i64, most: i64) {
        self.known.retain(|c| c.size != size);
        self.known.truncate(COUNTS - 1);
        self.known.push_front(Count { size, most });
    }

    /// The host has read a number. By chance many others are the same, so it is no size before something is cut to it.
    pub(crate) fn add_number(&mut self, number: i64) {
        if number > 0 && !self.numbers.contains(&number) {
            self.numbers.truncate(COUNTS - 1);
            self.numbers.push_front(number);
        }
    }

    /// Finds the numbers to which ops cut something.
    pub(crate) fn find_cut(&mut self, ops: &Ops) {
        if self.numbers.is_empty() {
            return;
        }
        for inst in &ops.insts {
            let Kind::Read { base, .. } = &inst.kind else { continue };
            for out in inst.results().flatten() {
                for &n in &out.ty.shape {
                    let most = base.shape.iter().copied().filter(|&all| all > n).max();
                    if let Some(most) = most
                        && !base.shape.contains(&n)
                        && self.numbers.contains(&n)
                    {
                        self.add(n, most);
                    }
                }
            }
        }
    }

    /// How many it could have been.
    fn most(&self, size: i64) -> Option<i64> {
        self.known.iter().find(|c| c.size == size).map(|c| c.most)
    }

    /// Whether ops compute with what is of such a size.
    pub(crate) fn are_in(&self, ops: &Ops) -> bool {
        let is_count = |ty: &TensorType| ty.shape.iter().any(|&n| self.most(n).is_some());
        let in_inst = |inst: &Inst| {
            inst.operands.iter().any(is_count) || inst.results().flatten().any(|o| is_count(&o.ty))
        };
        !self.known.is_empty() && ops.insts.iter().any(|inst| in_inst(inst))
    }
}

/// A count in two windows, and the bound for the second one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Varying {
    from: i64,
    to: i64,
    bound: i64,
}

/// What the numbers of a window follow from: the counts that differ from those of another one.
#[derive(Debug)]
struct Varyings(Vec<Varying>);

impl Varyings {
    /// Of all numbers that differ. None if no count does, or one is as large as it can be.
    fn of(pairs: &[(i64, i64)], counts: &Counts) -> Option<Varyings> {
        let mut own: Vec<((i64, i64), i64)> = Vec::new();
        for &pair in pairs {
            let most = counts.most(pair.1);
            let is_new = own.iter().all(|(had, _)| *had != pair);
            own.extend(most.filter(|_| is_new).map(|most| (pair, most)));
        }
        // Twice a count, or two together, are no count of their own.
        let is_multiple = |(from, to): (i64, i64)| {
            own.iter().any(|&((a, b), _)| a > 0 && b > 0 && from > a && from % a == 0 && from / a * b == to)
        };
        let is_sum = |(from, to): (i64, i64)| {
            let is_rest = |a: i64, b: i64| own.iter().any(|(pair, _)| *pair == (from - a, to - b));
            own.iter().any(|&((a, b), _)| a > 0 && b > 0 && is_rest(a, b))
        };
        let firm = own.iter().filter(|(pair, _)| !is_multiple(*pair) && !is_sum(*pair));
        // Bounds that differ say which number is which, where counts are equal by chance.
        let varying = |(i, &((from, to), most)): (i64, &((i64, i64), i64))| {
            let bound = (bound_for(to) + i).min(most);
            (bound > to).then_some(Varying { from, to, bound })
        };
        let all: Vec<Varying> = (0..).zip(firm).map(varying).collect::<Option<_>>()?;
        (!all.is_empty() && all.len() <= 4).then_some(Varyings(all))
    }

    fn bounds(&self) -> Vec<i64> {
        self.0.iter().map(|v| v.bound).collect()
    }

    /// The same with less large bounds, if nothing is larger than one of these sizes, or as large: a part of a tensor.
    fn within(self, sizes: &FxHashSet<i64>) -> Vec<Varyings> {
        let mut sizes: Vec<i64> = sizes.iter().flat_map(|&n| [n, n - 1]).collect();
        sizes.sort_unstable_by_key(|&n| Reverse(n));
        let least = |most: i64| {
            let bounded = |v: &Varying| Varying { bound: v.bound.min(most), ..*v };
            let all: Vec<Varying> = self.0.iter().map(bounded).collect();
            (all != self.0 && all.iter().all(|v| v.bound > v.to)).then_some(Varyings(all))
        };
        let others: Vec<Varyings> = sizes.into_iter().filter_map(least).take(MOST_WITHIN).collect();
        std::iter::once(self).chain(others).collect()
    }

    /// The number at the bound that is the one or the other in the two windows.
    fn at_bound(&self, a: i64, b: i64) -> Option<i64> {
        if a == b {
            return Some(a);
        }
        let times = |v: &Varying| {
            let fits = a.checked_mul(v.to)? == b.checked_mul(v.from)? && v.to > 0;
            let all = b.checked_mul(v.bound)?;
            (fits && all % v.to == 0).then(|| all / v.to)
        };
        let both = |v: &Varying| {
            let is_rest = |w: &&Varying| (a - v.from, b - v.to) == (w.from, w.to);
            self.0.iter().find(is_rest).map(|w| v.bound + w.bound)
        };
        let more = |v: &Varying| {
            let (by, step) = (b - a, v.to - v.from);
            (by % step == 0)
                .then(|| by / step)
                .filter(|k| *k > 0)
                .and_then(|k| Some((k, b.checked_add(k.checked_mul(v.bound - v.to)?)?)))
        };
        let affine = || self.0.iter().filter_map(more).min_by_key(|(k, _)| *k).map(|(_, n)| n);
        self.0.iter().find_map(times).or_else(|| self.0.iter().find_map(both)).or_else(affine)
    }
}

/// The bound that is more than so many.
fn bound_for(count: i64) -> i64 {
    let power = (count as u64 + 1).next_power_of_two() as i64;
    if power <= FINE { power.max(LEAST) } else { (count / (power / 8) + 1) * (power / 8) }
}

/// A window as it was recorded once.
#[derive(Debug)]
struct Seen {
    insts: Vec<Shared<Inst>>,
    offsets: Vec<i64>,
}

/// The programs of a sequence of ops for all sizes up to some.
pub(crate) struct Bound {
    pub(crate) bounds: Vec<i64>,
    /// Its ops and inputs at that size.
    pub(crate) graph: Graph,
    pub(crate) outline: Outline,
    /// By a hash of the module, and the inputs that it overwrites.
    pub(crate) programs: Vec<(u64, Indices, Arc<Program>)>,
}

impl Bound {
    /// Remembers a program.
    pub(crate) fn add(&mut self, module: u64, donated: Indices, program: Arc<Program>) {
        if self.programs.len() >= PROGRAMS {
            self.programs.remove(0);
        }
        self.programs.push((module, donated, program));
    }
}

impl std::fmt::Debug for Bound {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Bound").field("bounds", &self.bounds).finish_non_exhaustive()
    }
}

/// How a window is launched by a program for more sizes than its own.
#[derive(Clone, Debug)]
pub(crate) struct AtBound {
    pub(crate) program: Arc<Program>,
    /// The numbers that follow from the size.
    pub(crate) numbers: Numbers,
    /// Whether it takes offsets.
    pub(crate) takes_offsets: bool,
    /// The types of inputs and results.
    pub(crate) inputs: Arc<[TensorType]>,
    pub(crate) results: Arc<[TensorType]>,
}

/// What is known of a sequence of ops, whatever its sizes are.
#[derive(Debug)]
pub(crate) struct Counted {
    seen: Seen,
    /// Whether its offsets differed: then programs take them.
    pub(crate) moves: bool,
    pub(crate) bounds: Vec<Bound>,
    /// By instances and inputs that are overwritten.
    calls: FxHashMap<Box<[u32]>, AtBound>,
    failures: u32,
    used: u64,
}

/// Sequences of ops by their names and operands.
#[derive(Debug, Default)]
pub(crate) struct AllCounted {
    known: FxHashMap<Box<[u32]>, Counted>,
    clock: u64,
}

impl AllCounted {
    /// What is known of a sequence; one that is new is remembered.
    pub(crate) fn get(&mut self, key: Box<[u32]>, ops: &Ops) -> Option<&mut Counted> {
        self.clock += 1;
        if !self.known.contains_key(&key) {
            if self.known.len() >= FAMILIES {
                let oldest = self.known.values().map(|c| c.used).min().unwrap_or(0);
                self.known.retain(|_, c| c.used > oldest);
            }
            self.known.insert(key, Counted::new(ops, self.clock));
            return None;
        }
        let known = self.known.get_mut(&key)?;
        known.used = self.clock;
        Some(known)
    }
}

impl Counted {
    fn new(ops: &Ops, used: u64) -> Counted {
        let (bounds, calls) = (Vec::new(), FxHashMap::default());
        Counted { seen: Seen::of(ops), moves: false, bounds, calls, failures: 0, used }
    }

    /// Whether there are no more programs of many sizes to be tried.
    pub(crate) fn is_given_up(&self) -> bool {
        self.failures >= TRIES
    }

    /// Where a window says nothing of offsets, they have to be those of all others.
    pub(crate) fn look_at_offsets(&mut self, ops: &Ops) {
        if !self.moves && self.seen.offsets != ops.offsets {
            self.moves = true;
            self.bounds.clear();
            self.calls.clear();
        }
    }

    /// How a window of these sizes was launched before.
    pub(crate) fn call(&self, key: &[u32]) -> Option<&AtBound> {
        self.calls.get(key)
    }

    /// Remembers how one was.
    pub(crate) fn add(&mut self, key: Box<[u32]>, call: AtBound) {
        if self.calls.len() >= CALLS {
            self.calls.clear();
        }
        self.failures = 0;
        self.calls.insert(key, call);
    }

    /// No program of many sizes could be made for a window.
    pub(crate) fn failed(&mut self, ops: &Ops) {
        self.failures += 1;
        if self.bounds.is_empty() {
            self.seen = Seen::of(ops); // the first one may have been of no element, or of one
            self.moves = false;
        }
    }

    /// The ops of a window that takes so many inputs at the bound of its counts. None if no count differs from those that
    /// were seen before, or is less than it can be; an error if there are no such ops.
    pub(crate) fn enlarged(
        &self,
        (ops, taken): (&Ops, usize),
        counts: &Counts,
        instances: &mut Instances,
    ) -> Option<Result<Enlarged, &'static str>> {
        let (mut pairs, mut same) = (Vec::new(), FxHashSet::default());
        let kinds = || self.seen.insts.iter().zip(&ops.insts);
        for (a, b) in kinds() {
            let found = a.kind.resized(&b.kind, &mut |a, b| {
                if a != b {
                    pairs.push((a, b));
                } else {
                    same.insert(a);
                }
                Some(b)
            });
            if found.is_none() {
                return Some(Err(DEPENDS));
            }
        }
        let all = Varyings::of(&pairs, counts)?.within(&same);
        let known = |v: &Varyings| self.bounds.iter().position(|b| b.bounds == v.bounds());
        if let Some(at) = all.iter().find_map(known) {
            return Some(Ok(Enlarged::Known(at)));
        }
        if self.bounds.len() >= BOUNDS {
            return Some(Err("there are many such sizes"));
        }
        let mut make = |varyings: &Varyings| {
            let inst = |(a, b): (&Shared<Inst>, &Shared<Inst>)| {
                let kind = a.kind.resized(&b.kind, &mut |a, b| varyings.at_bound(a, b))?;
                instances.get(kind).ok().filter(|inst| is_like(inst, b))
            };
            let insts = kinds().map(inst).collect::<Option<_>>()?;
            let ops = Ops { insts, ..ops.clone() };
            let types = inputs(&ops).filter(|types| types.len() == taken)?;
            Some(Enlarged::New(varyings.bounds(), ops, types))
        };
        Some(all.iter().find_map(&mut make).ok_or(DEPENDS))
    }

    /// Adds a bound; gives its number.
    pub(crate) fn add_bound(&mut self, bounds: Vec<i64>, graph: Graph, outline: Outline) -> usize {
        self.bounds.push(Bound { bounds, graph, outline, programs: Vec::new() });
        self.bounds.len() - 1
    }
}

/// The ops of a window at a bound.
pub(crate) enum Enlarged {
    /// That bound is known, by its number.
    Known(usize),
    /// It is new: the bound of each count, the ops, and the types of their inputs.
    New(Vec<i64>, Ops, Vec<TensorType>),
}

impl Seen {
    fn of(ops: &Ops) -> Seen {
        Seen { insts: ops.insts.clone(), offsets: ops.offsets.clone() }
    }
}

/// Whether two instances take and give as many values and numbers.
fn is_like(a: &Inst, b: &Inst) -> bool {
    let given = |inst: &Inst| inst.results().map(|o| o.map(|o| o.order.clone())).collect::<Vec<_>>();
    (a.operands.len(), a.offsets, a.is_identity()) == (b.operands.len(), b.offsets, b.is_identity())
        && given(a) == given(b)
}

/// The types of what ops take that they do not make. None if they do not take what they make.
fn inputs(ops: &Ops) -> Option<Vec<TensorType>> {
    let made: Vec<Option<&TensorType>> =
        ops.insts.iter().flat_map(|inst| inst.results()).map(|o| o.map(|o| &o.stored)).collect();
    let mut inputs: Vec<Option<&TensorType>> = Vec::new();
    for op in ops.iter() {
        for (&code, ty) in op.operands.iter().zip(&op.inst.operands) {
            let at = (code & !PRODUCED) as usize;
            let known = if code & PRODUCED != 0 {
                made[at]
            } else {
                inputs.resize(inputs.len().max(at + 1), None);
                inputs[at].get_or_insert(ty);
                inputs[at]
            };
            if known != Some(ty) {
                return None;
            }
        }
    }
    inputs.into_iter().map(|ty| ty.cloned()).collect()
}

/// What a sequence is known by, whatever its sizes are.
pub(crate) fn key(
    options: u32,
    inputs: usize,
    live: &[u32],
    ops: &Ops,
    name: impl Fn(&Inst) -> u32,
) -> Box<[u32]> {
    let mut key = vec![options, inputs as u32, live.len() as u32];
    key.extend_from_slice(live);
    for op in ops.iter() {
        key.push(name(op.inst));
        key.extend_from_slice(op.operands);
    }
    key.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(all: &[(i64, i64)]) -> Counts {
        let mut counts = Counts::default();
        all.iter().for_each(|&(size, most)| counts.add(size, most));
        counts
    }

    #[test]
    fn numbers_follow_from_counts() {
        let counts = counts(&[(9, 100), (20, 1000), (29, 29)]);
        let of = |pairs: &[(i64, i64)]| Varyings::of(pairs, &counts);
        let one = of(&[(5, 9), (80, 144)]).expect("a count varies");
        assert_eq!(one.bounds(), [16]);
        let check = |numbers: (i64, i64), expected| assert_eq!(one.at_bound(numbers.0, numbers.1), expected);
        check((7, 7), Some(7));
        check((5, 9), Some(16));
        check((80, 144), Some(256));
        check((4, 8), Some(15));
        check((11, 19), Some(33));
        check((5, 8), None);
        let two = of(&[(5, 9), (7, 20), (12, 29)]).expect("two vary");
        assert_eq!(two.bounds(), [16, 33]);
        assert_eq!(two.at_bound(12, 29), Some(49));
        assert_eq!(two.at_bound(70, 200), Some(330));
        assert!(of(&[(5, 8)]).is_none(), "no count");
        assert!(of(&[(10, 18), (5, 9)]).is_some_and(|v| v.bounds() == [16]));
    }

    #[test]
    fn bounds_are_few() {
        let bounds = |counts: std::ops::Range<i64>| {
            let mut bounds: Vec<i64> = counts.map(bound_for).collect();
            bounds.dedup();
            bounds
        };
        assert_eq!(
            bounds(0..1024),
            [16, 32, 64, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024]
        );
        assert!((0..5000).all(|n| bound_for(n) > n));
    }

    #[test]
    fn a_count_is_less_than_its_bound() {
        let of = |most| Varyings::of(&[(5, 16)], &counts(&[(16, most)])).map(|v| v.bounds());
        assert_eq!(of(1000), Some(vec![32]));
        assert_eq!(of(20), Some(vec![20]));
        assert_eq!(of(16), None);
    }
}
