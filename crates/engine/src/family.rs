//! The programs for windows that differ in nothing but offsets.
//!
//! The first program has its offsets as constants, which is the fastest form, and what runs with the same ones again keeps
//! it. When another one is needed because offsets differ, those that do become operands: one more program that serves all
//! further values of them.

use crate::program::Program;
use smallvec::SmallVec;
use std::sync::Arc;

/// Offsets that a program takes when it is launched.
pub(crate) type Numbers = SmallVec<[i64; 8]>;

/// The programs for one sequence of ops, by its offsets.
#[derive(Debug, Default)]
pub(crate) struct Family {
    fixed: SmallVec<[Fixed; 1]>,
    general: Option<General>,
}

/// A program with constant offsets.
#[derive(Debug)]
struct Fixed {
    offsets: Box<[i64]>,
    program: Arc<Program>,
}

/// A program that takes some of its offsets as operands.
#[derive(Debug)]
struct General {
    /// Those that it does not take are these.
    offsets: Box<[i64]>,
    /// The places of those that it takes, in order.
    given: Box<[u32]>,
    program: Arc<Program>,
}

/// The program for some offsets.
#[derive(Debug)]
pub(crate) enum Choice {
    /// This one, with the offsets that it takes.
    Known(Arc<Program>, Numbers),
    /// One that has still to be made: it takes the offsets at these places.
    New(Box<[u32]>),
}

impl Family {
    /// The program for these offsets. So many programs may have constant ones.
    pub(crate) fn choose(&self, offsets: &[i64], max_fixed: usize) -> Choice {
        if let Some(fixed) = self.fixed.iter().find(|f| &*f.offsets == offsets) {
            return Choice::Known(fixed.program.clone(), Numbers::new());
        }
        let differ = |base: &[i64]| -> Box<[u32]> {
            let pairs = offsets.iter().zip(base).enumerate();
            pairs.filter(|(_, (a, b))| a != b).map(|(i, _)| i as u32).collect()
        };
        if let Some(general) = &self.general {
            let mut given: Vec<u32> = differ(&general.offsets).into();
            if given.iter().all(|i| general.given.contains(i)) {
                let numbers = general.given.iter().map(|&i| offsets[i as usize]).collect();
                return Choice::Known(general.program.clone(), numbers);
            }
            given.extend(&general.given);
            given.sort_unstable();
            given.dedup();
            return Choice::New(given.into());
        }
        if self.fixed.len() < max_fixed {
            return Choice::New(Box::default());
        }
        let nearest = self.fixed.iter().map(|f| differ(&f.offsets)).min_by_key(|d| d.len());
        Choice::New(nearest.unwrap_or_default())
    }

    /// Adds a program that takes the offsets at these places.
    pub(crate) fn add(&mut self, offsets: &[i64], given: &[u32], program: Arc<Program>) {
        let offsets = offsets.into();
        if given.is_empty() {
            self.fixed.push(Fixed { offsets, program });
        } else {
            self.general = Some(General { offsets, given: given.into(), program });
        }
    }
}

/// Programs with constant offsets for windows of one op, which say little about what varies: the parts of a packed
/// projection are read by one line, at offsets that are always the same few.
pub(crate) const MAX_FIXED_OF_ONE_OP: usize = 4;

#[cfg(test)]
mod tests {
    use super::*;

    fn serve(family: &mut Family, offsets: &[i64], max_fixed: usize) -> (usize, Vec<i64>) {
        match family.choose(offsets, max_fixed) {
            Choice::Known(_, numbers) => (0, numbers.to_vec()),
            Choice::New(given) => {
                family.add(offsets, &given, Arc::new(Program::of_nothing()));
                (1, given.iter().map(|&i| offsets[i as usize]).collect())
            }
        }
    }

    #[test]
    fn the_second_value_is_the_last_program() {
        let mut family = Family::default();
        let made: Vec<_> = (0..5).map(|i| serve(&mut family, &[i, 7, 2 * i], 1)).collect();
        let expected = [(1, vec![]), (1, vec![1, 2]), (0, vec![2, 4]), (0, vec![3, 6]), (0, vec![4, 8])];
        assert_eq!(made, expected);
        assert_eq!(serve(&mut family, &[0, 7, 0], 1), (0, vec![]), "the constant form stays");
        assert_eq!(serve(&mut family, &[5, 8, 0], 1), (1, vec![5, 8, 0]), "another one varies too");
        assert_eq!(serve(&mut family, &[6, 9, 1], 1), (0, vec![6, 9, 1]));
    }

    #[test]
    fn a_few_values_of_single_ops_stay_constants() {
        let mut family = Family::default();
        let made: Vec<_> = (0..7).map(|i| serve(&mut family, &[i], MAX_FIXED_OF_ONE_OP).0).collect();
        assert_eq!(made, [1, 1, 1, 1, 1, 0, 0]);
    }
}
