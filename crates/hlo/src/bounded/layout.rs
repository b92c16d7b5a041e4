//! Where the elements of a smaller tensor lie in a larger one that stands for it.

use crate::types::Dims;
use smallvec::{SmallVec, smallvec};

/// A run of places of which the first ones are used.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct Factor {
    /// Places.
    pub(super) size: i64,
    /// Those that are used in the sample.
    pub(super) used: i64,
}

impl Factor {
    pub(super) fn varies(self) -> bool {
        self.size != self.used
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
    pub(super) fn prefix(size: i64, used: i64) -> Dim {
        Dim { factors: merged([Factor { size, used }]), even: false }
    }

    pub(super) fn even(size: i64, used: i64) -> Dim {
        Dim { even: true, ..Dim::prefix(size, used) }
    }

    /// Size at the bound.
    pub(super) fn size(&self) -> i64 {
        self.factors.iter().map(|f| f.size).product()
    }

    /// Size in the sample.
    pub(super) fn used(&self) -> i64 {
        self.factors.iter().map(|f| f.used).product()
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
        Dim { even: self.even, ..Dim::prefix(self.size(), self.used()) }
    }
}

/// How a value lies.
pub(super) type Layout = Vec<Dim>;

/// Of a value whose used places come first in each dimension.
pub(super) fn prefixes(bound: &Dims, sample: &Dims) -> Layout {
    bound.iter().zip(sample).map(|(&size, &used)| Dim::prefix(size, used)).collect()
}

/// The factors with the same places that are fewest: a run of used places and what is inside of it is one run.
pub(super) fn merged(factors: impl IntoIterator<Item = Factor>) -> Factors {
    let mut out = Factors::new();
    for f in factors {
        match out.last_mut() {
            _ if f.size == 1 && f.used == 1 => {}
            Some(last) if !f.varies() => {
                *last = Factor { size: last.size * f.size, used: last.used * f.used };
            }
            _ => out.push(f),
        }
    }
    out
}

/// The factors of each dimension of these sizes, for places that are those of `flat`; nothing if a dimension begins or ends
/// within a factor.
pub(super) fn split(flat: &[Factor], bound: &Dims, sample: &Dims) -> Option<Vec<Factors>> {
    let mut rest: Vec<Factor> = merged(flat.iter().copied()).into_iter().rev().collect();
    let mut out = Vec::new();
    for (&size, &used) in bound.iter().zip(sample) {
        let mut dim: Factors = smallvec![];
        let (mut have, mut has_used) = (1, 1);
        while (have, has_used) != (size, used) {
            let next = rest.pop()?;
            let (want, want_used) = (divided(size, have)?, divided(used, has_used)?);
            // All of it, or as much as this dimension has: the rest of it is inside.
            let inside = match (divided(next.size, want), divided(next.used, want_used)) {
                _ if divided(want, next.size).is_some() && divided(want_used, next.used).is_some() => 1,
                (Some(a), Some(b)) if a == b && a > 0 => a,
                _ => return None,
            };
            let taken = Factor { size: next.size / inside, used: next.used / inside };
            if inside > 1 {
                rest.push(Factor { size: inside, used: inside });
            }
            (have, has_used) = (have * taken.size, has_used * taken.used);
            dim.push(taken);
        }
        out.push(merged(dim));
    }
    rest.iter().all(|f| (f.size, f.used) == (1, 1)).then_some(out)
}

fn divided(a: i64, b: i64) -> Option<i64> {
    (b != 0 && a % b == 0).then(|| a / b)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(list: &[(i64, i64)]) -> Vec<Factor> {
        list.iter().map(|&(size, used)| Factor { size, used }).collect()
    }

    #[test]
    fn dimensions_are_merged_and_split() {
        let d = Dims::from_slice;
        let check =
            |flat: &[(i64, i64)], bound: &[i64], sample: &[i64], expected: Option<&[&[(i64, i64)]]>| {
                let got = split(&of(flat), &d(bound), &d(sample));
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
