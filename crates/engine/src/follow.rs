//! Where sizes that followed from values go in a sequence of ops: which ops work with which of them.

use crate::counts::Counts;
use crate::inst::Kind;
use crate::ops::{OpRef, Ops, PRODUCED};
use crate::origin::{Along, Count, Found, How, Origin, Sized, add};
use crate::part::Part;
use crate::strided::row_major;
use crate::value::Value;
use crate::view::View;
use crate::window::Window;
use oxitorch_aten as aten;
use oxitorch_hlo::TensorType;
use rustc_hash::FxHashMap;
use smallvec::SmallVec;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Sizes of a sequence that followed from values.
#[derive(Debug, Default)]
pub(crate) struct Followed {
    pub(crate) found: Found,
    /// What each op works with. Empty if there are no such sizes.
    ops: Vec<Found>,
    /// The sizes of each result.
    results: Vec<Sized>,
}

impl Followed {
    /// The part of each op, if ops that work with other sizes are other parts; none if all that work with some work with the
    /// same ones. An op is in as early a part as can be, so that what a backward computes of one size is one part, and what
    /// takes the results of several parts is in one behind them.
    pub(crate) fn parts(&self, ops: &Ops) -> Option<Vec<u32>> {
        let mut groups: FxHashMap<Option<Origin>, usize> = FxHashMap::default();
        let mut levels: Vec<(usize, usize)> = Vec::with_capacity(self.results.len());
        let mut place = |op: OpRef<'_>| {
            let with: Found = self.ops[op.at].iter().filter(|c| c.how != How::Fixed).copied().collect();
            // In the order in which they come, as origins are other numbers each time.
            let next = groups.len();
            let group = *groups.entry((!with.is_empty()).then(|| Origin::joint(&with))).or_insert(next);
            let needed = op.operands.iter().filter(|&code| code & PRODUCED != 0);
            let after = needed.map(|code| levels[(code & !PRODUCED) as usize]);
            let level = after.map(|(level, of)| level + usize::from(of != group)).max().unwrap_or(0);
            levels.resize(op.results().end, (level, group));
            (level, group)
        };
        let places: Vec<(usize, usize)> = ops.iter().map(&mut place).collect();
        if groups.keys().flatten().count() < 2 {
            return None;
        }
        let mut numbers: BTreeMap<_, u32> = places.iter().map(|place| (*place, 0)).collect();
        numbers.values_mut().zip(0..).for_each(|(number, n)| *number = n);
        Some(places.iter().map(|place| numbers[place]).collect())
    }
}

impl Counts {
    /// Follows sizes from ops that make or cut something to them, and from inputs that were made so. That another size is by
    /// chance the same as one that was read means nothing.
    pub(crate) fn follow(&mut self, ops: &Ops, inputs: &[Arc<Value>]) -> Followed {
        let mut followed = Followed::default();
        if self.is_empty() {
            return followed;
        }
        inputs.iter().flat_map(|v| v.counts()).for_each(|s| add(&mut followed.found, s.count));
        for inst in &ops.insts {
            match &inst.kind {
                Kind::Row { op, .. } if aten::row(*op).sized_by.is_some() => {
                    inst.results()
                        .flatten()
                        .for_each(|out| self.find(&out.stored.shape, &mut followed.found));
                }
                Kind::Read { shape, .. } => self.find_cut(shape, &mut followed.found),
                _ => {}
            }
        }
        if followed.found.is_empty() {
            return followed;
        }
        for op in ops.iter() {
            let of = |&code: &u32| match code & PRODUCED {
                0 => inputs[code as usize].counts(),
                _ => &followed.results[(code & !PRODUCED) as usize],
            };
            let operands: SmallVec<[(&TensorType, &[Along]); 4]> =
                op.inst.operands.iter().zip(op.operands.iter().map(of)).collect();
            let mut with = Found::new();
            operands.iter().flat_map(|(_, own)| *own).for_each(|s| add(&mut with, s.count));
            let results = || op.inst.results().flatten().map(|out| &out.stored);
            let mut made = Found::new();
            match &op.inst.kind {
                Kind::Row { op, .. } if aten::row(*op).sized_by.is_some() => {
                    results().for_each(|ty| self.find(&ty.shape, &mut made));
                }
                Kind::Read { shape, .. } => self.find_cut(shape, &mut made),
                _ => {}
            }
            if with.is_empty() && made.is_empty() {
                let has = |n: &i64| operands.iter().any(|(operand, _)| operand.shape.contains(n));
                let known = |n: i64| followed.found.iter().find(|c| c.size == n).copied();
                let named = named_sizes(&op.inst.kind, results());
                named.into_iter().filter(|n| !has(n)).filter_map(known).for_each(|c| add(&mut made, c));
            }
            let mut sizes: Vec<Sized> = op
                .inst
                .results()
                .map(|out| out.map_or_else(Sized::new, |out| sizes_of(&out.stored, &operands, &with, &made)))
                .collect();
            if let (Kind::Read { base, shape }, [(_, own)]) = (&op.inst.kind, &operands[..])
                && let seen = seen_in(shape.at_zero(), base, own)
                && !seen.is_empty()
                && made.is_empty()
            {
                sizes[0] = seen;
            }
            made.iter().for_each(|c| add(&mut with, *c));
            let all = sizes.iter().flatten().map(|s| s.count).chain(with.iter().copied());
            all.for_each(|c| add(&mut followed.found, c));
            drop(operands);
            followed.results.extend(sizes);
            followed.ops.push(with);
        }
        followed
    }
}

impl Window {
    /// The sizes that followed from values in ops with these inputs and results; these are of such sizes from now on, too.
    pub(crate) fn read_sizes(&mut self, part: &Part) -> Found {
        let followed = self.counts.follow(&part.ops, &part.inputs);
        for (value, &result) in part.outputs.iter().zip(&part.live) {
            value.set_counts(followed.results.get(result as usize).map_or(&[], |own| own));
        }
        followed.found
    }

    /// The same of ops of which nothing is known but their inputs and results.
    pub(crate) fn take_sizes(&self, inputs: &[Arc<Value>], results: &[Arc<Value>]) {
        if self.counts.is_empty() {
            return;
        }
        let mut found = Found::new();
        inputs.iter().flat_map(|v| v.counts()).for_each(|s| add(&mut found, s.count));
        for value in results.iter().filter(|_| !found.is_empty()) {
            value.set_counts(&sizes_of(&value.ty, &[], &found, &[]));
        }
    }
}

/// The sizes of a result of an op on such operands: those that it has, or one that is made of them, as the rows of several
/// tensors together are. `with`: the sizes of the operands; `made`: those that the op makes.
fn sizes_of(ty: &TensorType, operands: &[(&TensorType, &[Along])], with: &[Count], made: &[Count]) -> Sized {
    if with.is_empty() && made.is_empty() {
        return Sized::new();
    }
    // What is as large as an operand is so along the same dimensions, and what has a fixed size once has it always.
    let alike = operands.iter().filter(|(operand, _)| operand.shape == ty.shape && !ty.shape.is_empty());
    if let Some((_, own)) = alike.min_by_key(|(_, own)| own.len()) {
        return (*own).into();
    }
    let mut own = Sized::new();
    for (at, &n) in (0..).zip(&ty.shape) {
        let made = made.iter().find(|c| c.size == n);
        let carried = || with.iter().find(|c| c.size == n && is_along(at, c, operands));
        own.extend(made.or_else(carried).map(|&count| Along { at, count }));
    }
    if own.is_empty() && !operands.is_empty() && with.iter().any(|c| c.how != How::Cut) {
        let is_new = |n: i64| n > 1 && !operands.iter().any(|(operand, _)| operand.shape.contains(&n));
        let new = (0..).zip(&ty.shape).find(|(_, n)| is_new(**n));
        let joint =
            |&size: &i64| Count { size, most: i64::MAX, origin: Origin::joint(with), how: How::Follows };
        own.extend(new.map(|(at, size)| Along { at, count: joint(size) }));
    }
    own
}

/// The sizes of a result that come of no tensor: of places along a size (`randperm`, `arange`), and of what is expanded to it.
fn named_sizes<'a>(kind: &Kind, results: impl Iterator<Item = &'a TensorType>) -> Vec<i64> {
    if let Kind::Read { shape, .. } = kind {
        let View { sizes, strides, .. } = shape.at_zero();
        return sizes.iter().zip(strides).filter(|(_, stride)| **stride == 0).map(|(&n, _)| n).collect();
    }
    results.filter(|ty| ty.shape.len() == 1).map(|ty| ty.shape[0]).collect()
}

/// The sizes of a view of a tensor: of the dimensions that are those of the tensor.
fn seen_in(view: &View, base: &TensorType, own: &[Along]) -> Sized {
    let strides = row_major(&base.shape);
    let is =
        |at: usize, s: &Along| view.sizes[at] == s.count.size && view.strides[at] == strides[s.at as usize];
    let of = |at: usize| own.iter().find(|s| is(at, s)).map(|s| Along { at: at as u32, count: s.count });
    (0..view.sizes.len()).filter_map(of).collect()
}

/// Whether a dimension of a result that is as long as a size is that size. Where a fixed dimension of an operand is by chance
/// as long, it is along the dimension that has the size in all operands.
fn is_along(at: u32, count: &Count, operands: &[(&TensorType, &[Along])]) -> bool {
    let has = |own: &[Along], at: u32| own.iter().any(|s| s.at == at && s.count.origin == count.origin);
    let fixed = |(operand, own): &(&TensorType, &[Along])| {
        (0..).zip(&operand.shape).any(|(at, &n)| n == count.size && !has(own, at))
    };
    if !operands.iter().any(fixed) {
        return true;
    }
    let mut with = operands.iter().filter(|(_, own)| own.iter().any(|s| s.count.origin == count.origin));
    with.all(|(_, own)| has(own, at))
}
