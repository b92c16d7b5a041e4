//! Sizes that were seen to vary from sequence to sequence, as those of text that grows: a source of sizes.
//!
//! Nobody said which of the numbers that differ are sizes. So all of them have to follow from one; or from a few, if it takes
//! more.

use crate::sizes::{Compared, Size, Sizes, bound_for, fine_bound_for};
use rustc_hash::FxHashSet;
use std::cmp::Reverse;

/// Numbers of a sequence that may differ from another's by size, at most so many different ones.
const MOST_DIFFERENT: usize = 64;
/// Sizes of what is cut that are tried as bounds.
const MOST_WITHIN: usize = 4;
/// Sizes of a sequence that may vary on their own.
const MOST_VARYING: usize = 4;

/// The size by which a sequence differs from another one, with the bounds for it, the best first; or the sizes, if there has
/// to be more than one. None if no few sizes can be the reason.
pub(crate) fn sizes(
    Compared { pairs, same }: &Compared,
    trains: bool,
    may_be_several: bool,
) -> Option<Vec<Sizes>> {
    if pairs.len() > MOST_DIFFERENT {
        return None;
    }
    let least = pairs.iter().map(step).min_by_key(|d| d.abs())?;
    // What a size leaves of a whole changes by as much: the one that comes first is the size, which inputs have.
    let bound = if trains { fine_bound_for } else { bound_for };
    let mut found: Vec<Sizes> =
        [least, -least].into_iter().flat_map(|step| sizes_by(step, pairs, same, bound)).collect();
    found.extend(both_parts(least, pairs, same, bound));
    if found.is_empty() && may_be_several {
        found.extend(several(pairs, bound));
    }
    (!found.is_empty()).then_some(found)
}

/// The two sizes that a whole is cut into, each with a bound of its own, where one gets as much larger as the other smaller.
fn both_parts(
    least: i64,
    pairs: &[(i64, i64)],
    same: &FxHashSet<i64>,
    bound: fn(i64) -> i64,
) -> Option<Sizes> {
    let largest = |by: i64| pairs.iter().copied().filter(|p| step(p) == by).max_by_key(|p| p.1);
    let (first, second) = (largest(least)?, largest(-least)?);
    let whole = first.1 + second.1;
    if !same.contains(&whole) || [first, second].iter().any(|p| p.0 < 2 || p.1 < 2) {
        return None;
    }
    let size = |(other, own): (i64, i64)| Size { other, own, bound: bound(own + 1).min(whole - 1) };
    // Bounds that differ say which number is which.
    let (first, mut second) = (size(first), size(second));
    second.bound -= i64::from(second.bound == first.bound);
    let sizes = Sizes::new(vec![first, second], pairs, false);
    pairs.iter().all(|&pair| sizes.at_bound(pair).is_some()).then_some(sizes)
}

/// Several sizes: each number that does not follow from those before it. Inputs' sizes come first.
fn several(pairs: &[(i64, i64)], bound: fn(i64) -> i64) -> Option<Sizes> {
    let mut all: Vec<Size> = Vec::new();
    let mut sizes = Sizes::new(Vec::new(), pairs, false);
    for &(other, own) in pairs {
        if other < 2 || own < 2 || all.len() == MOST_VARYING {
            return None;
        }
        if sizes.at_bound((other, own)).is_none() {
            // Bounds that differ say which number is which, where sizes are equal by chance.
            all.push(Size { other, own, bound: bound(own + 1) + all.len() as i64 });
            sizes = Sizes::new(all.clone(), pairs, false);
        }
    }
    Some(sizes)
}

/// The same for a size that differs by so much.
fn sizes_by(least: i64, pairs: &[(i64, i64)], same: &FxHashSet<i64>, bound: fn(i64) -> i64) -> Vec<Sizes> {
    let size = pairs.iter().copied().filter(|p| step(p) == least).max_by_key(|p| p.1);
    let Some((other, own)) = size else { return Vec::new() };
    let left = || pairs.iter().filter(|p| step(p) == -least).map(|p| p.1).min();
    // What has a size of one, or none, is another thing: it is broadcast, or there is nothing of it.
    let is_one = |p: &(i64, i64)| (p.0 < 2 || p.1 < 2) && step(p) != -least;
    let for_bound = |bound| Sizes::new(vec![Size { other, own, bound }], pairs, false);
    let follows = |sizes: &Sizes| pairs.iter().all(|&pair| sizes.at_bound(pair).is_some());
    if pairs.iter().any(is_one) {
        return Vec::new();
    }
    // At the bound itself nothing says what follows from the size, unless something below it was there before. If a power
    // of two leaves nothing of a whole, the bound is what leaves one.
    let mut bounds = vec![bound(own), bound(own + 1)];
    bounds.extend(left().map(|left| own + left - 1));
    // A part of a tensor is less than the whole, which is not cut.
    let mut within: Vec<i64> = same.iter().map(|n| n - 1).filter(|n| (own..bounds[1]).contains(n)).collect();
    within.sort_unstable_by_key(|&n| Reverse(n));
    bounds.extend(within.into_iter().take(MOST_WITHIN));
    bounds.dedup();
    bounds.into_iter().map(for_bound).filter(follows).collect()
}

/// How much larger a number is.
fn step(&(other, own): &(i64, i64)) -> i64 {
    own - other
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The numbers of a sequence at its bounds, from those of another one and its own.
    fn at_bounds(other: &[i64], own: &[i64]) -> Option<Vec<Vec<i64>>> {
        sizes(&Compared::new(other, own), false, true)?.iter().map(|s| s.numbers(other, own)).collect()
    }

    #[test]
    fn numbers_follow_from_one_size() {
        // Keys of 20 places become keys of 21, of 2 heads with 8 numbers each; 16 and 21 are constants elsewhere.
        let sizes = |n: i64| vec![2, n, n + 1, 16 * n, 2 * 16 * (n + 1), 16, 21];
        let one = |n: Vec<i64>| Some(vec![n]);
        assert_eq!(at_bounds(&sizes(20), &sizes(24)), one(sizes(31)), "the largest size is the bound");
        assert_eq!(at_bounds(&sizes(24), &sizes(20)), one(sizes(31)), "also from a larger one");
        let masks = |n: i64| vec![n, n, n * n, 4 * n * n];
        assert_eq!(at_bounds(&masks(9), &masks(11)), one(masks(16)));
        assert_eq!(at_bounds(&masks(9), &masks(16)), Some(vec![masks(16), masks(32)]), "at a bound");
    }

    #[test]
    fn what_a_size_leaves_of_a_whole_follows_from_it() {
        let padded = |n: i64| vec![2, n, 48 - n, 48, 2 * n];
        // Behind these are those of what is left, for which no tensor of such a sequence is large enough.
        let first = |other: i64, own: i64, count: usize| {
            let all = at_bounds(&padded(other), &padded(own));
            all.into_iter().flatten().take(count).collect::<Vec<_>>()
        };
        assert_eq!(first(20, 24, 2), [padded(32), padded(47)], "or as much as leaves one");
        assert_eq!(first(24, 20, 2), [padded(32), padded(47)]);
        assert_eq!(first(20, 41, 1), [padded(47)], "64 are more than there are");
    }

    #[test]
    fn what_follows_from_no_single_size_is_refused() {
        assert_eq!(at_bounds(&[1, 20], &[2, 21]), None, "a size of one is broadcast");
        assert_eq!(at_bounds(&[20, 16], &[20, 16]), None, "nothing varies");
        let (other, own): (Vec<i64>, Vec<i64>) =
            [(3, 5), (7, 13), (11, 29), (9, 32), (8, 21)].into_iter().unzip();
        assert_eq!(at_bounds(&other, &own), None, "five sizes");
    }

    #[test]
    fn a_batch_and_a_length_follow_from_two_sizes() {
        let sizes = |b: i64, n: i64| vec![b, n, b * n, 8 * b, 4 * b * n];
        assert_eq!(at_bounds(&sizes(3, 20), &sizes(5, 27)), Some(vec![sizes(16, 33)]));
        assert_eq!(at_bounds(&sizes(3, 20), &sizes(3, 27)), Some(vec![sizes(3, 32)]), "a length alone");
    }
}
