//! Sizes that followed from values, as the number of elements that a mask selects, and numbers that the host has read and
//! to which something was cut: a source of sizes.

use crate::origin::{Along, Count, Found, How, Origin, Sized, add};
use crate::site::Site;
use crate::sizes::{Compared, Size, Sizes, fine_bound_for};
use crate::view::Shape;
use rustc_hash::FxHashMap;
use smallvec::SmallVec;
use std::cmp::Reverse;
use std::collections::VecDeque;

/// Counts that are remembered.
const COUNTS: usize = 32;
/// Counts of a sequence that have bounds of their own. More have one together: what is computed beyond them costs less than
/// a program for each combination.
pub(crate) const MOST_VARYING: usize = 4;
/// Sizes around a part of a tensor that are tried as bounds.
const MOST_WITHIN: usize = 4;
/// More sizes than this of what a line copies from the host are many.
const FEW_COPIED: usize = 8;
/// Lines, and dimensions of what they copy, whose sizes are remembered.
const MOST_LINES: usize = 256;

/// The sizes of a dimension of what a line copies.
#[derive(Debug, Default)]
struct Copied {
    sizes: SmallVec<[i64; 8]>,
    /// The window in which the last one came.
    window: u32,
}

/// The latest sizes that followed from values.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    known: VecDeque<Count>,
    /// How many there were, with those of copies.
    all: u64,
    /// The size that a line has read first; none once it has read another one.
    first: FxHashMap<Site, Option<i64>>,
    /// The sizes of what lines copied from the host, of a dimension each, until they are many.
    copied: FxHashMap<(Site, usize, usize), Copied>,
    /// The latest sizes of copies that are many.
    many: VecDeque<Count>,
    /// Numbers that the host has read, each of which may be a size of what is recorded next.
    numbers: VecDeque<i64>,
}

impl Counts {
    /// Whether none is known.
    pub(crate) fn is_empty(&self) -> bool {
        self.known.is_empty() && self.numbers.is_empty() && self.many.is_empty()
    }

    /// A line copies a tensor of this shape from the host. Gives the sizes of it that are other ones so often that they are
    /// sizes like those that are read, as the number of objects in an image is; batches have a few. What is copied within one
    /// window counts once, as a line may copy a model.
    pub(crate) fn copied(&mut self, line: Site, shape: &[i64], window: u32) -> Sized {
        if self.copied.len() >= MOST_LINES {
            self.copied.clear();
        }
        let mut found = Sized::new();
        for (at, &size) in shape.iter().enumerate() {
            let seen = self.copied.entry((line, shape.len(), at)).or_default();
            if seen.window != window && seen.sizes.len() <= FEW_COPIED && !seen.sizes.contains(&size) {
                seen.sizes.push(size);
                seen.window = window;
            }
            if seen.sizes.len() > FEW_COPIED {
                found.push(Along { at: at as u32, count: self.count_of_copy(size) });
            }
        }
        found
    }

    /// Several tensors of one sample have the same sizes.
    fn count_of_copy(&mut self, size: i64) -> Count {
        if let Some(known) = self.many.iter().find(|c| c.size == size) {
            return *known;
        }
        self.all += 1;
        let count = Count { size, most: i64::MAX, origin: Origin(self.all), how: How::Copied };
        self.many.truncate(COUNTS - 1);
        self.many.push_front(count);
        count
    }

    /// A line has read a size, to make a result of it.
    pub(crate) fn read(&mut self, line: Site, size: i64, most: i64) {
        if self.first.len() >= MOST_LINES {
            self.first.clear();
        }
        let first = self.first.entry(line).or_insert(Some(size));
        *first = first.filter(|n| *n == size);
        let how = if first.is_some() { How::Fixed } else { How::Made };
        self.add(size, most, how);
    }

    fn add(&mut self, size: i64, most: i64, how: How) {
        self.all += 1;
        self.known.retain(|c| c.size != size);
        self.known.truncate(COUNTS - 1);
        self.known.push_front(Count { size, most, origin: Origin(self.all), how });
    }

    /// The host has read a number. By chance many others are the same, so it is no size before something is cut to it.
    pub(crate) fn add_number(&mut self, number: i64) {
        if number > 0 && !self.numbers.contains(&number) {
            self.numbers.truncate(COUNTS - 1);
            self.numbers.push_front(number);
        }
    }

    /// Finds those of these sizes that were read.
    pub(crate) fn find(&self, sizes: &[i64], found: &mut Found) {
        let known = |n: &i64| self.known.iter().find(|c| c.size == *n);
        sizes.iter().filter_map(known).for_each(|c| add(found, *c));
    }

    /// Finds the sizes and numbers to which a tensor was cut.
    pub(crate) fn find_cut(&mut self, shape: &Shape, found: &mut Found) {
        for (n, most) in shape.cuts() {
            if self.numbers.contains(&n) {
                match self.known.iter_mut().find(|c| c.size == n) {
                    Some(known) => known.most = most,
                    None => self.add(n, most, How::Made),
                }
            }
            let known = self.known.iter().find(|c| c.size == n);
            known.into_iter().for_each(|c| add(found, Count { how: How::Cut, ..*c }));
        }
    }
}

/// The sizes, all of which followed from values, by which a sequence differs from another one, with the bounds for them, the
/// best first. None if none of these differs.
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
    let firm = || own.iter().filter(|(pair, _)| !is_multiple(*pair) && !is_sum(*pair));
    let together = if firm().count() > MOST_VARYING { firm().map(|((_, n), _)| *n).max() } else { None };
    // Bounds that differ say which number is which, where counts are equal by chance.
    let size = |(i, &((other, n), most)): (i64, &((i64, i64), i64))| Size {
        other,
        own: n,
        bound: (fine_bound_for(together.unwrap_or(n) + 1) + i).min(most.max(n)),
    };
    let all: Vec<Size> = (0..).zip(firm()).map(size).collect();
    if all.is_empty() {
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
        (1..)
            .zip(all)
            .map(|(n, &(size, most))| Count { size, most, origin: Origin(n), how: How::Made })
            .collect()
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
    fn many_counts_have_a_bound_together() {
        let all: Vec<(i64, i64)> = (0..6).map(|i| (20 + 7 * i, 1000)).collect();
        let pairs: Vec<(i64, i64)> = (0..6).map(|i| (9 + 2 * i, 20 + 7 * i)).collect();
        assert_eq!(bounds(&counts(&all), &pairs), Some(vec![64, 65, 66, 67, 68, 69]));
        assert_eq!(bounds(&counts(&all[..2]), &pairs[..2]), Some(vec![32, 33]), "few have their own");
    }

    #[test]
    fn copies_are_of_many_sizes() {
        let (mut counts, line) = (Counts::default(), Site(1));
        let mut is_many = |window: u32, size| !counts.copied(line, &[size, 4], window).is_empty();
        assert!((0..40).all(|n| !is_many(1, n)), "a model is copied");
        assert!((0..40).all(|n| !is_many(n as u32 + 2, 8 * (n % 8))), "batches have few sizes");
        assert!((0..40).any(|n| is_many(n as u32 + 50, n)), "images have many objects");
        let sizes = counts.copied(line, &[77, 4], 100);
        assert_eq!(sizes.iter().map(|s| (s.at, s.count.size)).collect::<Vec<_>>(), [(0, 77)]);
        let again = counts.copied(line, &[77, 4], 100);
        assert_eq!(again[0].count.origin, sizes[0].count.origin, "of one image");
    }

    #[test]
    fn a_count_is_at_most_its_bound() {
        let of = |most| bounds(&counts(&[(16, most)]), &[(5, 16)]);
        assert_eq!([of(1000), of(20), of(16)], [Some(vec![32]), Some(vec![20]), Some(vec![16])]);
    }
}
