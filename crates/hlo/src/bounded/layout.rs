//! Where the elements of a smaller tensor lie in a larger one that stands for it.

use crate::types::Dims;
use smallvec::{SmallVec, smallvec};

/// A number at the bound, in the sample, and in the other sample.
pub(super) type Three = [i64; 3];

pub(super) fn varies([bound, sample, other]: Three) -> bool {
    bound != sample || bound != other
}

pub(super) fn each(a: Three, b: Three, of: impl Fn(i64, i64) -> i64) -> Three {
    std::array::from_fn(|i| of(a[i], b[i]))
}

/// A run of places of which the first ones are used.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct Factor {
    /// Places.
    pub(super) size: i64,
    /// Those that are used in the sample.
    pub(super) used: i64,
    /// And in the other sample.
    pub(super) other: i64,
}

impl Factor {
    pub(super) fn of([size, used, other]: Three) -> Factor {
        Factor { size, used, other }
    }

    pub(super) fn three(self) -> Three {
        [self.size, self.used, self.other]
    }

    pub(super) fn varies(self) -> bool {
        varies(self.three())
    }
}

/// Factors, slowest first.
pub(super) type Factors = SmallVec<[Factor; 2]>;

/// One dimension: its places are those of the factors, row-major. None is a dimension of size 1.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Dim {
    pub(super) factors: Factors,
    /// Whether all elements along it are the same, so that any of its layouts is right.
    pub(super) even: bool,
}

impl Dim {
    /// The used places come first.
    pub(super) fn prefix(sizes: Three) -> Dim {
        Dim { factors: merged([Factor::of(sizes)]), even: false }
    }

    pub(super) fn even(sizes: Three) -> Dim {
        Dim { even: true, ..Dim::prefix(sizes) }
    }

    /// Size at the bound.
    pub(super) fn size(&self) -> i64 {
        self.factors.iter().map(|f| f.size).product()
    }

    pub(super) fn sizes(&self) -> Three {
        self.factors.iter().fold([1; 3], |all, f| each(all, f.three(), |a, b| a * b))
    }

    pub(super) fn varies(&self) -> bool {
        self.factors.iter().any(|f| f.varies())
    }

    /// Whether the used places come first.
    pub(super) fn is_prefix(&self) -> bool {
        !self.varies() || self.factors.len() == 1
    }

    /// The same elements with the used places first.
    pub(super) fn to_prefix(&self) -> Dim {
        Dim { even: self.even, ..Dim::prefix(self.sizes()) }
    }
}

/// How a value lies.
pub(super) type Layout = Vec<Dim>;

/// Of a value whose used places come first in each dimension.
pub(super) fn prefixes(shapes: [&Dims; 3]) -> Layout {
    threes(shapes).map(Dim::prefix).collect()
}

/// Shapes of one rank, by dimension.
pub(super) fn threes([bound, sample, other]: [&Dims; 3]) -> impl Iterator<Item = Three> {
    bound.iter().zip(sample).zip(other).map(|((&bound, &sample), &other)| [bound, sample, other])
}

/// The factors with the same places that are fewest: a run of used places and what is inside of it is one run.
pub(super) fn merged(factors: impl IntoIterator<Item = Factor>) -> Factors {
    let mut out = Factors::new();
    for f in factors {
        match out.last_mut() {
            _ if f.three() == [1; 3] => {}
            Some(last) if !f.varies() => {
                *last = Factor::of(each(last.three(), f.three(), |a, b| a * b));
            }
            _ => out.push(f),
        }
    }
    out
}

/// The factors of each dimension of these sizes, for places that are those of `flat`; nothing if a dimension begins or ends
/// within a factor.
pub(super) fn split(flat: &[Factor], shapes: [&Dims; 3]) -> Option<Vec<Factors>> {
    let mut rest: Vec<Factor> = merged(flat.iter().copied()).into_iter().rev().collect();
    let mut out = Vec::new();
    for sizes in threes(shapes) {
        let mut dim: Factors = smallvec![];
        let mut have = [1; 3];
        while have != sizes {
            let next = rest.pop()?.three();
            let want = divided(sizes, have)?;
            // All of it, or as much as this dimension has: the rest of it is inside.
            let inside = match divided(next, want) {
                _ if divided(want, next).is_some() => 1,
                Some(inside) if !varies(inside) && inside[0] > 0 => inside[0],
                _ => return None,
            };
            let taken = next.map(|n| n / inside);
            if inside > 1 {
                rest.push(Factor::of([inside; 3]));
            }
            have = each(have, taken, |a, b| a * b);
            dim.push(Factor::of(taken));
        }
        out.push(merged(dim));
    }
    rest.iter().all(|f| f.three() == [1; 3]).then_some(out)
}

fn divided(a: Three, b: Three) -> Option<Three> {
    (0..3).all(|i| b[i] != 0 && a[i] % b[i] == 0).then(|| each(a, b, |a, b| a / b))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(list: &[(i64, i64)]) -> Vec<Factor> {
        list.iter().map(|&(size, used)| Factor::of([size, used, used])).collect()
    }

    #[test]
    fn dimensions_are_merged_and_split() {
        let d = Dims::from_slice;
        let check =
            |flat: &[(i64, i64)], bound: &[i64], sample: &[i64], expected: Option<&[&[(i64, i64)]]>| {
                let got = split(&of(flat), [&d(bound), &d(sample), &d(sample)]);
                let expected =
                    expected.map(|dims| dims.iter().map(|f| of(f).into()).collect::<Vec<Factors>>());
                assert_eq!(got, expected, "{flat:?} as {bound:?}");
            };
        // [4, n, 6] with n of 16 as [4 n, 6], as [4, n, 2, 3], as [4 n 6].
        let flat: &[(i64, i64)] = &[(4, 4), (16, 5), (6, 6)];
        check(flat, &[64, 6], &[20, 6], Some(&[&[(4, 4), (16, 5)], &[(6, 6)]]));
        check(flat, &[4, 16, 2, 3], &[4, 5, 2, 3], Some(&[&[(4, 4)], &[(16, 5)], &[(2, 2)], &[(3, 3)]]));
        check(flat, &[384], &[120], Some(&[&[(4, 4), (96, 30)]]));
        // [2 n] as [n, 2]: the first 2 n places are used.
        check(&[(32, 10)], &[16, 2], &[5, 2], Some(&[&[(16, 5)], &[(2, 2)]]));
        // [4 n], the first places used, is not [4, n].
        check(&[(64, 20)], &[4, 16], &[4, 5], None);
        check(&[(4, 4), (16, 5)], &[16, 4], &[5, 4], None);
        // What has no elements may lie anyhow.
        check(&[(0, 0)], &[4, 0], &[4, 0], None);
    }
}
