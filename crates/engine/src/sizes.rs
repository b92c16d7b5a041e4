//! What follows from a size: the numbers of a sequence of ops, compared with another one that differs from it by sizes.
//!
//! Nothing in a recorded op says which of its numbers follow from a size. So a sequence is compared with one that is alike:
//! the numbers that differ are those. Where the sizes among them are known from is another matter ([`crate::seen`],
//! [`crate::counts`]). A wrong guess makes no wrong program, as the elements in use are always those that the sequence
//! itself says (`hlo/src/bounded`); at worst there is none, or one for other bounds.

use rustc_hash::FxHashSet;

/// No bound is less.
pub(crate) const LEAST_BOUND: i64 = 16;
/// Beyond this one there are four fine bounds from one power of two to the next.
const FINE: i64 = 128;

/// The least power of two that is as much as this.
pub(crate) fn bound_for(size: i64) -> i64 {
    (size.max(LEAST_BOUND) as u64).next_power_of_two() as i64
}

/// A bound that is as much as this, for what computes gradients: what is computed beyond a size costs more there than a
/// program.
pub(crate) fn fine_bound_for(size: i64) -> i64 {
    let power = bound_for(size);
    let step = if power <= FINE { power } else { power / 8 };
    (size.max(1) as u64).next_multiple_of(step as u64) as i64
}

/// A size in another sequence and in the own one, and the bound for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Size {
    pub(crate) other: i64,
    pub(crate) own: i64,
    pub(crate) bound: i64,
}

/// The numbers of two sequences that are alike, place by place.
#[derive(Debug, Default)]
pub(crate) struct Compared {
    /// Those that differ, each pair once: the other sequence's, and the own one's.
    pub(crate) pairs: Vec<(i64, i64)>,
    /// Those that are the same.
    pub(crate) same: FxHashSet<i64>,
}

impl Compared {
    pub(crate) fn new(other: &[i64], own: &[i64]) -> Compared {
        let (mut compared, mut known) = (Compared::default(), FxHashSet::default());
        for pair in other.iter().copied().zip(own.iter().copied()) {
            if pair.0 == pair.1 {
                compared.same.insert(pair.0);
            } else if known.insert(pair) {
                compared.pairs.push(pair);
            }
        }
        compared
    }
}

/// The sizes from which all numbers follow that differ.
#[derive(Debug)]
pub(crate) struct Sizes {
    all: Vec<Size>,
    /// Numbers that are two sizes together, one by a term alone, or what one leaves of a whole.
    near: Vec<Size>,
    /// Whether these are sizes for certain. Then a number that is by a factor and a term what one is follows from it; else
    /// that may be chance.
    are_certain: bool,
}

impl Sizes {
    /// Of sequences whose numbers differ so.
    pub(crate) fn new(all: Vec<Size>, pairs: &[(i64, i64)], are_certain: bool) -> Sizes {
        let sum = |&(a, b): &(i64, i64)| {
            let rest = |s: &Size| all.iter().find(|t| (a - s.other, b - s.own) == (t.other, t.own));
            all.iter().find_map(|s| rest(s).map(|t| s.bound + t.bound))
        };
        let term = |&(a, b): &(i64, i64)| {
            let moved = |s: &&Size| b - a == s.own - s.other;
            all.iter().find(moved).map(|s| b + (s.bound - s.own))
        };
        // The padding of a length to that of a cache gets less as the length grows.
        let rest = |&(a, b): &(i64, i64)| {
            let fallen = |s: &&Size| a - b == s.own - s.other;
            all.iter().find(fallen).map(|s| b - (s.bound - s.own)).filter(|left| *left > 0)
        };
        let near = |pair: &(i64, i64)| {
            let bound = sum(pair).or_else(|| term(pair)).or_else(|| rest(pair))?;
            Some(Size { other: pair.0, own: pair.1, bound })
        };
        let near = pairs.iter().filter_map(near).collect();
        Sizes { all, near, are_certain }
    }

    /// Whether each bound is more than the own size, so that a comparison of both says what follows from what.
    pub(crate) fn are_less(&self) -> bool {
        self.all.iter().all(|s| s.bound > s.own)
    }

    pub(crate) fn bounds(&self) -> impl Iterator<Item = i64> {
        self.all.iter().map(|s| s.bound)
    }

    /// The same with bounds of this at most; none if none of them was more.
    pub(crate) fn within(&self, most: i64, pairs: &[(i64, i64)]) -> Option<Sizes> {
        let lower = |s: &Size| Size { bound: s.bound.min(most), ..*s };
        let all: Vec<Size> = self.all.iter().map(lower).collect();
        (all != self.all).then(|| Sizes::new(all, pairs, self.are_certain))
    }

    /// The number at the bounds that is the one or the other in the two sequences; none if it does not follow from the sizes.
    pub(crate) fn at_bound(&self, (other, own): (i64, i64)) -> Option<i64> {
        if other == own {
            return Some(own);
        }
        let pair = (other, own);
        let is_near = |s: &&Size| (s.other, s.own) == pair;
        self.multiple(&self.all, pair)
            .or_else(|| self.near.iter().find(is_near).map(|s| s.bound))
            .or_else(|| self.multiple(&self.near, pair))
            .or_else(|| self.product(pair))
            .or_else(|| self.affine(pair).filter(|_| self.are_certain))
    }

    /// All numbers of the own sequence at the bounds.
    pub(crate) fn numbers(&self, other: &[i64], own: &[i64]) -> Option<Vec<i64>> {
        other.iter().zip(own).map(|(&a, &b)| self.at_bound((a, b))).collect()
    }

    /// One of these by a factor, which may be a fraction.
    fn multiple(&self, sizes: &[Size], (other, own): (i64, i64)) -> Option<i64> {
        let times = |s: &Size| {
            let fits = s.own > 0 && other.checked_mul(s.own)? == own.checked_mul(s.other)?;
            let all = own.checked_mul(s.bound).filter(|_| fits)?;
            (all % s.own == 0).then(|| all / s.own)
        };
        sizes.iter().find_map(times)
    }

    /// The product of two of them, by a factor.
    fn product(&self, (other, own): (i64, i64)) -> Option<i64> {
        let of = |s: &Size, t: &Size| {
            let (a, b) = (s.other.checked_mul(t.other)?, s.own.checked_mul(t.own)?);
            let divides = a != 0 && b != 0 && other % a == 0 && own % b == 0 && other / a == own / b;
            s.bound.checked_mul(t.bound)?.checked_mul(own / b.max(1)).filter(|_| divides)
        };
        let each = || self.all.iter().chain(&self.near);
        each().find_map(|s| each().find_map(|t| of(s, t)))
    }

    /// One of them by the least factor and a term.
    fn affine(&self, (other, own): (i64, i64)) -> Option<i64> {
        let by = |s: &Size| {
            let (by, step) = (own - other, s.own - s.other);
            let k = (by % step == 0).then(|| by / step).filter(|k| *k > 0)?;
            Some((k, own.checked_add(k.checked_mul(s.bound - s.own)?)?))
        };
        self.all.iter().filter_map(by).min_by_key(|(k, _)| *k).map(|(_, n)| n)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_are_few() {
        let mut bounds: Vec<i64> = (0..1024).map(fine_bound_for).collect();
        bounds.dedup();
        let expected = [16, 32, 64, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024];
        assert_eq!(bounds, expected);
        assert!((0..5000).all(|n| fine_bound_for(n) >= n && bound_for(n) >= fine_bound_for(n)));
    }

    fn size(other: i64, own: i64, bound: i64) -> Size {
        Size { other, own, bound }
    }

    #[test]
    fn numbers_follow_from_sizes() {
        let pairs = [(5, 9), (7, 20), (12, 29), (4, 8), (43, 39), (5, 1)];
        let two = Sizes::new(vec![size(5, 9, 16), size(7, 20, 33)], &pairs, true);
        let cases = [
            ((7, 7), Some(7), "the same"),
            ((5, 9), Some(16), "a size"),
            ((80, 144), Some(256), "a multiple"),
            ((70, 200), Some(330), "of the other one"),
            ((4, 8), Some(15), "a term away"),
            ((12, 24), Some(45), "a multiple of that"),
            ((12, 29), Some(49), "both together"),
            ((43, 39), Some(32), "what is left of 48"),
            ((86, 78), Some(64), "a multiple of that"),
            ((5, 1), None, "nothing is left"),
            ((35, 180), Some(16 * 33), "a product"),
            ((20, 72), Some(240), "a product of what is a term away"),
            ((11, 19), Some(33), "by a factor and a term"),
            ((5, 8), None, "nothing of the kind"),
        ];
        for (pair, expected, why) in cases {
            assert_eq!(two.at_bound(pair), expected, "{why}");
        }
        let uncertain = Sizes::new(vec![size(5, 9, 16)], &pairs, false);
        assert_eq!(uncertain.at_bound((11, 19)), None, "by chance");
        assert_eq!(uncertain.at_bound((4, 8)), Some(15));
    }

    #[test]
    fn bounds_are_lowered() {
        let pairs = [(5, 9), (6, 10)];
        let one = Sizes::new(vec![size(5, 9, 16)], &pairs, true);
        let lower = one.within(12, &pairs).expect("it was more");
        assert_eq!((lower.at_bound((5, 9)), lower.at_bound((6, 10))), (Some(12), Some(13)));
        assert!(one.within(16, &pairs).is_none());
        assert!(one.are_less() && !one.within(9, &pairs).is_some_and(|s| s.are_less()));
    }
}
