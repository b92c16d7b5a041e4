//! The programs for windows that differ in nothing but offsets.
//!
//! The first program has its offsets as constants, which is the fastest form, and what runs with the same ones again keeps
//! it. When another one is needed because offsets differ, those that do become operands: one more program that serves all
//! further values of them.
//!
//! A write in place has to know whether what it writes was computed from other elements. So offsets along one dimension of a
//! value that is written (`x[s] = x[s - 1] + x[s]`) are one number of that program, as long as they have kept their
//! distance in the windows before. Where they lose it, there is one more program, and after the second such time each
//! offset is a number of its own: a family has two programs more at most than if it had not looked.

use crate::graph::Given;
use crate::ops::Along;
use crate::program::Program;
use rustc_hash::FxHashMap;
use smallvec::SmallVec;
use std::sync::Arc;

/// Numbers that a program takes when it is launched.
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
    /// Those that it takes, by their places.
    given: Box<[Given]>,
    program: Arc<Program>,
    /// How often offsets of this family lost their distance.
    parted: u32,
}

/// After so many times no distance is relied on.
const MAX_PARTED: u32 = 2;

/// The program for some offsets.
#[derive(Debug)]
pub(crate) enum Choice {
    /// This one, with the numbers that it takes.
    Known(Arc<Program>, Numbers),
    /// One that has still to be made: it takes the offsets at these places.
    New(Box<[u32]>),
}

/// The numbers of a program that takes these of the offsets; none if they have not its distances.
pub(crate) fn numbers(given: &[Given], offsets: &[i64]) -> Option<Numbers> {
    let mut numbers = Numbers::new();
    for g in given {
        let number = offsets[g.place as usize].wrapping_sub(g.more);
        match numbers.get(g.number as usize) {
            Some(&known) if known != number => return None,
            Some(_) => {}
            None => numbers.push(number), // they are numbered in the order in which they come
        }
    }
    Some(numbers)
}

impl General {
    /// The numbers that it takes, if it serves these offsets.
    fn numbers(&self, offsets: &[i64]) -> Option<Numbers> {
        let mut given = self.given.iter().map(|g| g.place).peekable();
        let mut pairs = (0u32..).zip(offsets.iter().zip(&self.offsets));
        let serves = pairs.all(|(place, (a, b))| given.next_if_eq(&place).is_some() || a == b);
        if serves { numbers(&self.given, offsets) } else { None }
    }

    /// How often distances were lost, with these offsets.
    fn parted_with(&self, offsets: &[i64]) -> u32 {
        self.parted + u32::from(numbers(&self.given, offsets).is_none())
    }
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
            if let Some(numbers) = general.numbers(offsets) {
                return Choice::Known(general.program.clone(), numbers);
            }
            let mut places: Vec<u32> = differ(&general.offsets).into();
            places.extend(general.given.iter().map(|g| g.place));
            places.sort_unstable();
            places.dedup();
            return Choice::New(places.into());
        }
        if self.fixed.len() < max_fixed {
            return Choice::New(Box::default());
        }
        let nearest = self.fixed.iter().map(|f| differ(&f.offsets)).min_by_key(|d| d.len());
        Choice::New(nearest.unwrap_or_default())
    }

    /// The offsets that a new program takes, which are to be those at these places. `along`: what each of all offsets says
    /// where in; such of one dimension that have kept their distance are one number.
    pub(crate) fn given(&self, offsets: &[i64], places: &[u32], along: &[Option<Along>]) -> Box<[Given]> {
        let relies = self.general.as_ref().is_none_or(|g| g.parted_with(offsets) < MAX_PARTED);
        let before = self.before(offsets.len());
        let mut count = 0;
        // By what its offsets have in common: a number, and the first of them.
        let mut numbers: FxHashMap<_, (u32, i64)> = FxHashMap::default();
        let given = |&place: &u32| {
            let offset = offsets[place as usize];
            let next = (count, offset);
            let (number, first) = match along[place as usize].filter(|_| relies) {
                None => next,
                Some(along) => {
                    let moved: SmallVec<[Moved; 1]> =
                        before.iter().map(|b| (b[place as usize].0, offset - b[place as usize].1)).collect();
                    *numbers.entry((along, moved)).or_insert(next)
                }
            };
            count = count.max(number + 1);
            Given { place, number, more: offset - first }
        };
        places.iter().map(given).collect()
    }

    /// What all offsets were before: a number and how much more than it, for each window that is known.
    fn before(&self, count: usize) -> Vec<Vec<Moved>> {
        let constants = |offsets: &[i64]| -> Vec<Moved> { offsets.iter().map(|&n| (None, n)).collect() };
        let Some(general) = &self.general else {
            // If there was none: only what is equal keeps its distance.
            let none = self.fixed.is_empty().then(|| constants(&vec![0; count]));
            return self.fixed.iter().map(|f| constants(&f.offsets)).chain(none).collect();
        };
        let mut all = constants(&general.offsets);
        general.given.iter().for_each(|g| all[g.place as usize] = (Some(g.number), g.more));
        vec![all]
    }

    /// Adds a program that takes these offsets.
    pub(crate) fn add(&mut self, offsets: &[i64], given: &[Given], program: Arc<Program>) {
        if given.is_empty() {
            self.fixed.push(Fixed { offsets: offsets.into(), program });
            return;
        }
        let parted = self.general.as_ref().map_or(0, |g| g.parted_with(offsets));
        self.general = Some(General { offsets: offsets.into(), given: given.into(), program, parted });
    }
}

/// A program's number, if it is given one, and how much more than that an offset is.
type Moved = (Option<u32>, i64);

/// Programs with constant offsets for windows of one op, which say little about what varies: the parts of a packed
/// projection are read by one line, at offsets that are always the same few.
pub(crate) const MAX_FIXED_OF_ONE_OP: usize = 4;

#[cfg(test)]
mod tests {
    use super::*;

    /// Offsets of reads and writes along dimensions with these strides of one value; 0: of another kind.
    fn along(strides: &[i64]) -> Vec<Option<Along>> {
        strides.iter().map(|&stride| (stride > 0).then_some(Along::of_input(0, stride))).collect()
    }

    /// How many programs each window makes, and the numbers that its program takes.
    fn serve(family: &mut Family, offsets: &[i64], strides: &[i64], max_fixed: usize) -> (usize, Vec<i64>) {
        match family.choose(offsets, max_fixed) {
            Choice::Known(_, numbers) => (0, numbers.to_vec()),
            Choice::New(places) => {
                let given = family.given(offsets, &places, &along(strides));
                family.add(offsets, &given, Arc::new(Program::of_nothing()));
                (1, numbers(&given, offsets).expect("distances").to_vec())
            }
        }
    }

    #[test]
    fn the_second_value_is_the_last_program() {
        let mut family = Family::default();
        let mut serve = |offsets: &[i64]| serve(&mut family, offsets, &[0, 0, 0], 1);
        let made: Vec<_> = (0..5).map(|i| serve(&[i, 7, 2 * i])).collect();
        let expected = [(1, vec![]), (1, vec![1, 2]), (0, vec![2, 4]), (0, vec![3, 6]), (0, vec![4, 8])];
        assert_eq!(made, expected);
        assert_eq!(serve(&[0, 7, 0]), (0, vec![]), "the constant form stays");
        assert_eq!(serve(&[5, 8, 0]), (1, vec![5, 8, 0]), "another one varies too");
        assert_eq!(serve(&[6, 9, 1]), (0, vec![6, 9, 1]));
    }

    #[test]
    fn a_few_values_of_single_ops_stay_constants() {
        let mut family = Family::default();
        let made: Vec<_> = (0..7).map(|i| serve(&mut family, &[i], &[0], MAX_FIXED_OF_ONE_OP).0).collect();
        assert_eq!(made, [1, 1, 1, 1, 1, 0, 0]);
    }

    #[test]
    fn offsets_that_keep_their_distance_are_one_number() {
        // x[s, t] = x[s - 1, t], and another value that is only read.
        let strides = [10, 1, 10, 1, 0];
        let mut family = Family::default();
        let mut serve = |s, t| serve(&mut family, &[s - 1, t, s, t, s], &strides, 1);
        assert_eq!([serve(4, 2), serve(6, 2)], [(1, vec![]), (1, vec![5, 6])]);
        assert_eq!(serve(9, 2), (0, vec![8, 9]));
        assert_eq!(serve(9, 3), (1, vec![8, 3, 9]), "another one varies too");
        assert_eq!(serve(7, 5), (0, vec![6, 5, 7]));
    }

    #[test]
    fn a_distance_that_is_lost_is_one_more_program_twice() {
        let mut family = Family::default();
        let mut serve = |offsets: &[i64]| serve(&mut family, offsets, &[1, 1, 1, 1], 1);
        assert_eq!([serve(&[0, 0, 1, 5]), serve(&[2, 2, 3, 7])], [(1, vec![]), (1, vec![2])]);
        assert_eq!(serve(&[4, 4, 5, 0]), (1, vec![4, 0]), "the last one goes its own way");
        assert_eq!(serve(&[6, 6, 7, 3]), (0, vec![6, 3]));
        assert_eq!(serve(&[6, 7, 7, 3]), (1, vec![6, 7, 7, 3]), "nothing is relied on any more");
        assert_eq!((0..9).map(|i| serve(&[i * i, 3 * i, 7, i]).0).sum::<usize>(), 0);
    }

    #[test]
    fn without_a_window_before_only_equal_ones_are_one_number() {
        let mut family = Family::default();
        let given = family.given(&[3, 3, 4], &[0, 1, 2], &along(&[1, 1, 1]));
        assert_eq!(given.iter().map(|g| (g.number, g.more)).collect::<Vec<_>>(), [(0, 0), (0, 0), (1, 0)]);
        family.add(&[3, 3, 4], &given, Arc::new(Program::of_nothing()));
        assert_eq!(serve(&mut family, &[8, 8, 9], &[1, 1, 1], 1), (0, vec![8, 9]));
    }
}
