//! Sizes that followed from values, as the number of elements that a mask selects, and numbers that the host has read and
//! to which something was cut: a source of sizes.

use crate::inst::Kind;
use crate::ops::Ops;
use crate::sizes::{Compared, Size, Sizes, fine_bound_for};
use crate::value::Value;
use crate::view::Shape;
use oxitorch_aten as aten;
use oxitorch_hlo::TensorType;
use smallvec::SmallVec;
use std::cmp::Reverse;
use std::collections::VecDeque;
use std::sync::Arc;

/// Counts that are remembered.
const COUNTS: usize = 32;
/// Counts of a sequence that may vary on their own.
const MOST_VARYING: usize = 4;
/// Sizes around a part of a tensor that are tried as bounds.
const MOST_WITHIN: usize = 4;

/// A size that followed from values, and the largest that it could have been.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Count {
    size: i64,
    most: i64,
}

impl Count {
    pub(crate) fn new(size: i64, most: i64) -> Count {
        Count { size, most }
    }
}

/// Some of them.
pub(crate) type Found = SmallVec<[Count; 2]>;

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
        self.known.push_front(Count::new(size, most));
    }

    /// The host has read a number. By chance many others are the same, so it is no size before something is cut to it.
    pub(crate) fn add_number(&mut self, number: i64) {
        if number > 0 && !self.numbers.contains(&number) {
            self.numbers.truncate(COUNTS - 1);
            self.numbers.push_front(number);
        }
    }

    /// The sizes of ops that followed from values: those that some of them make or cut something to, and those of inputs that
    /// were made so. That another size is by chance the same as one that was read means nothing.
    pub(crate) fn of(&mut self, ops: &Ops, inputs: &[Arc<Value>]) -> Found {
        let mut found = Found::new();
        if self.known.is_empty() && self.numbers.is_empty() {
            return found;
        }
        for input in inputs.iter().filter(|input| input.has_read_size()) {
            self.find(&input.ty.shape, &mut found);
        }
        for inst in &ops.insts {
            match &inst.kind {
                Kind::Row { op, .. } if aten::row(*op).sized_by.is_some() => {
                    inst.results().flatten().for_each(|out| self.find(&out.ty.shape, &mut found));
                }
                Kind::Read { shape, .. } => self.find_cut(shape, &mut found),
                _ => {}
            }
        }
        found
    }

    /// Finds those of these sizes that were read.
    fn find(&self, sizes: &[i64], found: &mut Found) {
        for count in sizes.iter().filter_map(|&n| self.known.iter().find(|c| c.size == n)) {
            if !found.contains(count) {
                found.push(*count);
            }
        }
    }

    /// Finds the sizes and numbers to which a tensor was cut.
    fn find_cut(&mut self, shape: &Shape, found: &mut Found) {
        for (n, most) in shape.cuts() {
            if self.numbers.contains(&n) {
                self.add(n, most);
            }
            self.find(&[n], found);
        }
    }
}

/// Whether a tensor is of such a size.
pub(crate) fn are_in(counts: &[Count], ty: &TensorType) -> bool {
    ty.shape.iter().any(|&n| counts.iter().any(|c| c.size == n))
}

/// The sizes, all of which followed from values, by which a sequence differs from another one, with the bounds for them, the
/// best first. None if none of these differs, or too many do.
pub(crate) fn sizes(counts: &[Count], Compared { pairs, same }: &Compared) -> Option<Vec<Sizes>> {
    let most = |size: i64| counts.iter().find(|c| c.size == size).map(|c| c.most);
    let own: Vec<((i64, i64), i64)> = pairs.iter().filter_map(|&pair| Some((pair, most(pair.1)?))).collect();
    // Twice a count, or two together, are no count of their own.
    let is_multiple = |(other, n): (i64, i64)| {
        own.iter().any(|&((a, b), _)| a > 0 && b > 0 && other > a && other % a == 0 && other / a * b == n)
    };
    let is_sum = |(other, n): (i64, i64)| {
        let is_rest = |a: i64, b: i64| own.iter().any(|(pair, _)| *pair == (other - a, n - b));
        own.iter().any(|&((a, b), _)| a > 0 && b > 0 && is_rest(a, b))
    };
    let firm = own.iter().filter(|(pair, _)| !is_multiple(*pair) && !is_sum(*pair));
    // Bounds that differ say which number is which, where counts are equal by chance.
    let size = |(i, &((other, n), most)): (i64, &((i64, i64), i64))| Size {
        other,
        own: n,
        bound: (fine_bound_for(n + 1) + i).min(most.max(n)),
    };
    let all: Vec<Size> = (0..).zip(firm).map(size).collect();
    if all.is_empty() || all.len() > MOST_VARYING {
        return None;
    }
    let widest = Sizes::new(all, pairs, true);
    // If nothing is larger than one of the other sizes, or as large, it is a part of a tensor.
    let mut around: Vec<i64> = same.iter().flat_map(|&n| [n, n - 1]).collect();
    around.sort_unstable_by_key(|&n| Reverse(n));
    let part = |most: i64| widest.within(most, pairs).filter(Sizes::are_less);
    let parts: Vec<Sizes> = around.into_iter().filter_map(part).take(MOST_WITHIN).collect();
    Some(std::iter::once(widest).chain(parts).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(all: &[(i64, i64)]) -> Vec<Count> {
        all.iter().map(|&(size, most)| Count::new(size, most)).collect()
    }

    /// The bounds for numbers that differ so.
    fn bounds(counts: &[Count], pairs: &[(i64, i64)]) -> Option<Vec<i64>> {
        let (other, own): (Vec<i64>, Vec<i64>) = pairs.iter().copied().unzip();
        let all = sizes(counts, &Compared::new(&other, &own))?;
        Some(all.first()?.bounds().collect())
    }

    #[test]
    fn counts_are_sizes() {
        let counts = counts(&[(9, 100), (20, 1000), (29, 29)]);
        assert_eq!(bounds(&counts, &[(5, 9), (80, 144)]), Some(vec![16]), "a count varies");
        assert_eq!(
            bounds(&counts, &[(5, 9), (7, 20), (12, 29)]),
            Some(vec![16, 33]),
            "two, and both together"
        );
        assert_eq!(bounds(&counts, &[(10, 18), (5, 9)]), Some(vec![16]), "one, and twice that");
        assert_eq!(bounds(&counts, &[(5, 8)]), None, "no count");
    }

    #[test]
    fn a_count_is_at_most_its_bound() {
        let of = |most| bounds(&counts(&[(16, most)]), &[(5, 16)]);
        assert_eq!([of(1000), of(20), of(16)], [Some(vec![32]), Some(vec![20]), Some(vec![16])]);
    }
}
