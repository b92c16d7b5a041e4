//! What is known of a sequence of ops: its programs, by what they leave visible and overwrite, or the places where it is cut
//! into parts that are programs of their own.

use crate::config::Remembered;
use crate::family::{Choice, Family, Numbers};
use crate::graph::{Check, Given};
use crate::ops::Along;
use crate::program::Program;
use oxitorch_hlo::TensorType;
use rustc_hash::FxHashMap;
use smallvec::SmallVec;
use std::sync::Arc;

/// Numbers of results or of inputs, ascending.
pub(crate) type Indices = SmallVec<[u32; 8]>;

/// A program serves where one that overwrites other inputs, or keeps fewer results, would be better, until that one is
/// wanted again within so many launches of the sequence: then a loop has settled, and the better one is made. What is wanted
/// more rarely (a checkpoint or an evaluation in the middle of training, a round in which garbage was collected) gains less
/// by a program of its own than that costs.
const SETTLES_WITHIN: u64 = 8;

/// A sequence that was launched in parts this often is worth a program of its own; twice, if nothing else was launched in
/// parts in between: then it is a loop that has settled. Twice, too, where each op is a part.
const WORTH_A_WHOLE: u32 = 64;

/// What is known of sequences of ops, by their keys. Of many, those that were launched last are kept.
#[derive(Debug)]
pub(crate) struct Programs {
    known: FxHashMap<Box<[u32]>, Known>,
    /// Counts lookups.
    clock: u64,
    /// How many there may be.
    pub(crate) most: usize,
}

impl Default for Programs {
    fn default() -> Programs {
        Programs { known: FxHashMap::default(), clock: 0, most: Remembered::default().programs }
    }
}

impl Programs {
    /// Of how many sequences something is known.
    pub(crate) fn len(&self) -> usize {
        self.known.len()
    }

    /// What is known of a sequence.
    pub(crate) fn get_mut(&mut self, key: &[u32]) -> Option<&mut Known> {
        self.clock += 1;
        let known = self.known.get_mut(key)?;
        known.used = self.clock;
        Some(known)
    }

    /// The same, for one of which nothing is known yet too.
    pub(crate) fn entry(&mut self, key: &[u32]) -> &mut Known {
        if self.known.len() >= self.most && !self.known.contains_key(key) {
            self.forget_half();
        }
        self.clock += 1;
        let known = self.known.entry(key.into()).or_default();
        known.used = self.clock;
        known
    }

    fn forget_half(&mut self) {
        let mut used: Vec<u64> = self.known.values().map(|k| k.used).collect();
        let (_, median, _) = used.select_nth_unstable(self.known.len() / 2);
        let median = *median;
        self.known.retain(|_, k| k.used > median);
    }
}

/// What is known of a sequence of ops.
#[derive(Debug, Default)]
pub(crate) struct Known {
    variants: Vec<Variant>,
    /// Counts its launches but the first.
    launches: u64,
    pub(crate) split: Option<Split>,
    /// How it is launched by programs for all sizes up to a bound.
    by_bound: Vec<ByBound>,
    /// When it was looked for last.
    used: u64,
}

/// Its programs with the same results that overwrite the same inputs.
#[derive(Debug)]
struct Variant {
    live: Indices,
    donated: Indices,
    family: Family,
    /// The launch for which another variant's program ran instead last.
    borrowed: Option<u64>,
}

/// A sequence that is launched in parts.
#[derive(Debug)]
pub(crate) struct Split {
    /// Its number among those of the device.
    pub(crate) number: u64,
    /// The part of each op.
    pub(crate) part_of: Arc<[u32]>,
    /// How often it was launched so; none where it is never to be one program.
    uses: Option<u32>,
    whole: Option<Arc<Program>>,
}

impl Split {
    /// `for_good`: it is too long for one program.
    pub(crate) fn new(number: u64, part_of: Vec<u32>, for_good: bool) -> Split {
        Split { number, part_of: part_of.into(), uses: (!for_good).then_some(0), whole: None }
    }

    /// Whether its parts come again, so that their offsets are operands from the start: it is too long for one program, or
    /// each op is a part.
    pub(crate) fn repeats(&self) -> bool {
        self.uses.is_none() || self.is_each_op()
    }

    fn is_each_op(&self) -> bool {
        self.part_of.last().is_some_and(|last| *last as usize + 1 == self.part_of.len())
    }

    /// Counts a launch; whether this is the time to make one program of it. `last` is the number of the one that was
    /// launched in parts before.
    pub(crate) fn used(&mut self, last: u64) -> bool {
        let is_each_op = self.is_each_op();
        let Some(uses) = &mut self.uses else { return false };
        *uses += 1;
        // Each op was a part because nothing came twice.
        let is_loop = *uses > 1 && (last == self.number || is_each_op);
        self.whole.is_none() && (is_loop || *uses == WORTH_A_WHOLE)
    }

    /// It has a program now.
    pub(crate) fn set_whole(&mut self, program: Arc<Program>) {
        self.whole = Some(program);
    }

    /// Whether it is launched as one program from now on.
    pub(crate) fn is_over(&self, deterministic: bool) -> bool {
        self.whole.as_ref().is_some_and(|p| deterministic || (p.is_done() && !p.is_broken()))
    }
}

/// How a sequence with some results is launched by a program for all sizes up to a bound.
#[derive(Clone, Debug)]
pub(crate) struct ByBound {
    pub(crate) live: Indices,
    /// The inputs that the launch may overwrite, of which a copy would take long.
    pub(crate) donated: Indices,
    /// Its offsets that are constants of the program; the others are given to it.
    pub(crate) constants: Arc<[Option<i64>]>,
    pub(crate) program: Arc<Program>,
    /// What follows from the size.
    pub(crate) numbers: Numbers,
    /// What it checks: messages name its own sizes.
    pub(crate) checks: Arc<[Check]>,
    /// The types of the program's inputs and results.
    pub(crate) inputs: Arc<[TensorType]>,
    pub(crate) results: Arc<[TensorType]>,
}

impl ByBound {
    fn is_for(&self, live: &[u32], donated: &Indices, offsets: &[i64]) -> bool {
        self.live.as_slice() == live && self.donated == *donated && are_among(&self.constants, offsets)
    }

    /// The offsets that the program is given.
    pub(crate) fn given(&self, offsets: &[i64]) -> Numbers {
        let given = |(own, n): (&Option<i64>, &i64)| own.is_none().then_some(*n);
        self.constants.iter().zip(offsets).filter_map(given).collect()
    }
}

/// Whether offsets are these, where these are constants.
pub(crate) fn are_among(constants: &[Option<i64>], offsets: &[i64]) -> bool {
    constants.iter().zip(offsets).all(|(own, n)| own.is_none_or(|own| own == *n))
}

/// The program for a launch.
#[derive(Debug)]
pub(crate) struct Lent {
    pub(crate) program: Arc<Program>,
    /// The offsets that it takes.
    pub(crate) numbers: Numbers,
    /// The results that it has, if they are more than were asked for.
    pub(crate) live: Option<Indices>,
    /// The inputs that it may overwrite, if it would overwrite others too.
    pub(crate) donated: Option<Indices>,
    /// Whether it is another one than what was asked for, which may also overwrite fewer inputs.
    pub(crate) stands_in: bool,
}

/// What is wanted of a program.
#[derive(Clone, Copy)]
pub(crate) struct Wanted<'a> {
    /// Results that are visible.
    pub(crate) live: &'a Indices,
    /// Inputs that it may overwrite.
    pub(crate) donated: &'a Indices,
    pub(crate) offsets: &'a [i64],
    /// Programs that may have constant offsets.
    pub(crate) max_fixed: usize,
    /// Whether another program may stand in.
    pub(crate) may_lend: bool,
    /// Whether the launch ends a round of a loop, as an optimizer's step and a call of a function do.
    pub(crate) ends_round: bool,
}

impl Known {
    /// The program for a launch, or the places of the offsets that a new one should take.
    pub(crate) fn choose(&mut self, wanted: &Wanted<'_>) -> Result<Lent, Box<[u32]>> {
        self.launches += 1;
        let now = self.launches;
        let own = self.variants.iter().position(|v| v.is_for(wanted));
        let given = match own.map(|i| self.variants[i].family.choose(wanted.offsets, wanted.max_fixed)) {
            Some(Choice::Known(program, numbers)) => {
                return Ok(Lent { program, numbers, live: None, donated: None, stands_in: false });
            }
            Some(Choice::New(given)) => given,
            None => Box::default(),
        };
        let borrowed = own.and_then(|i| self.variants[i].borrowed);
        // The second round of a loop is like those that follow, and the first one often is not.
        let settles =
            borrowed.is_some_and(|last| now - last <= SETTLES_WITHIN) || (wanted.ends_round && now == 1);
        if !wanted.may_lend || settles {
            return Err(given);
        }
        let Some(lent) = self.variants.iter().find_map(|v| v.lend(wanted)) else { return Err(given) };
        let own = own.unwrap_or_else(|| self.push(wanted));
        self.variants[own].borrowed = Some(now);
        Ok(lent)
    }

    /// The offsets that a new program takes, which are to be those at these places.
    pub(crate) fn given(&self, wanted: &Wanted<'_>, places: &[u32], along: &[Option<Along>]) -> Box<[Given]> {
        let none = Family::default();
        let family = self.variants.iter().find(|v| v.is_for(wanted)).map_or(&none, |v| &v.family);
        family.given(wanted.offsets, places, along)
    }

    /// How it is launched by a program for all sizes up to a bound, if it is. `donated`: what it may overwrite.
    pub(crate) fn by_bound(
        &self,
        live: &[u32],
        donated: impl FnOnce() -> Indices,
        offsets: &[i64],
    ) -> Option<ByBound> {
        let donated = if self.by_bound.is_empty() { return None } else { donated() };
        self.by_bound.iter().find(|by| by.is_for(live, &donated, offsets)).cloned()
    }

    /// Remembers how it is launched so.
    pub(crate) fn add_by_bound(&mut self, by: ByBound) {
        self.by_bound.push(by);
    }

    /// Whether programs of its own size are known.
    pub(crate) fn has_programs(&self) -> bool {
        self.split.is_some() || !self.variants.is_empty()
    }

    /// Whether a program of its own size is known that has these results.
    pub(crate) fn has_own(&self, live: &[u32]) -> bool {
        let has_all = |v: &Variant| live.iter().all(|i| v.live.binary_search(i).is_ok());
        self.split.is_some() || self.variants.iter().any(has_all)
    }

    /// Adds a program that takes these offsets.
    pub(crate) fn add(&mut self, wanted: &Wanted<'_>, given: &[Given], program: Arc<Program>) {
        let own = self.variants.iter().position(|v| v.is_for(wanted)).unwrap_or_else(|| self.push(wanted));
        self.variants[own].family.add(wanted.offsets, given, program);
    }

    fn push(&mut self, wanted: &Wanted<'_>) -> usize {
        let (live, donated) = (wanted.live.clone(), wanted.donated.clone());
        self.variants.push(Variant { live, donated, family: Family::default(), borrowed: None });
        self.variants.len() - 1
    }
}

impl Variant {
    fn is_for(&self, wanted: &Wanted<'_>) -> bool {
        self.live == *wanted.live && self.donated == *wanted.donated
    }

    /// The program that computes all that is wanted, and perhaps more.
    fn lend(&self, wanted: &Wanted<'_>) -> Option<Lent> {
        if !wanted.live.iter().all(|i| self.live.binary_search(i).is_ok()) {
            return None;
        }
        let Choice::Known(program, numbers) = self.family.choose(wanted.offsets, wanted.max_fixed) else {
            return None;
        };
        let allowed: Indices = self.donated.iter().filter(|i| wanted.donated.contains(i)).copied().collect();
        let live = (self.live != *wanted.live).then(|| self.live.clone());
        let donated = (allowed != self.donated).then_some(allowed);
        Some(Lent { program, numbers, live, donated, stands_in: true })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted<'a>(live: &'a Indices, donated: &'a Indices) -> Wanted<'a> {
        Wanted { live, donated, offsets: &[], max_fixed: 1, may_lend: true, ends_round: false }
    }

    #[test]
    fn what_comes_again_becomes_a_whole() {
        let mut split = Split::new(3, vec![40], false);
        assert!(!split.used(2) && split.used(3), "a loop");
        let mut split = Split::new(3, vec![40], false);
        assert_eq!((0..70).position(|_| split.used(4)), Some(63), "among others");
        let mut split = Split::new(3, vec![0, 1, 2], false);
        assert_eq!((0..70).position(|_| split.used(4)), Some(1), "each op was a part");
        let mut split = Split::new(3, vec![40], true);
        assert!((0..70).all(|_| !split.used(3)), "too long");
    }

    #[test]
    fn what_is_hot_is_kept() {
        let mut programs = Programs { most: 100, ..Programs::default() };
        for n in 0..300 {
            programs.entry(&[n]);
            programs.get_mut(&[7]);
            assert!(programs.known.len() <= 100);
        }
        assert!(programs.get_mut(&[7]).is_some() && programs.get_mut(&[8]).is_none());
    }

    /// What each of these launches, of all results or of one, runs by: a program that stands in, or its own, which is made
    /// if it is not there.
    fn stands_in(launches: impl IntoIterator<Item = bool>) -> Vec<bool> {
        let mut known = Known::default();
        let (all, most) = (Indices::from_slice(&[1, 4, 7]), Indices::from_slice(&[0, 2]));
        let (fewer, one) = (Indices::from_slice(&[4]), Indices::from_slice(&[2]));
        known.add(&wanted(&all, &most), &[], Arc::new(Program::of_nothing()));
        let mut launch = |whole: bool| {
            let wanted = if whole { wanted(&all, &most) } else { wanted(&fewer, &one) };
            let Ok(lent) = known.choose(&wanted) else {
                known.add(&wanted, &[], Arc::new(Program::of_nothing()));
                return false;
            };
            assert!(!whole || (lent.live.is_none() && lent.donated.is_none()), "its own");
            lent.live.is_some_and(|live| live == all) && lent.donated.is_some_and(|donated| donated == one)
        };
        launches.into_iter().map(&mut launch).collect()
    }

    #[test]
    fn a_program_stands_in_until_a_loop_settles() {
        assert_eq!(
            stands_in([true, false, false, false]),
            [false, true, false, false],
            "from the second round on"
        );
        let alternate = stands_in((0..8).map(|i| i % 2 == 0));
        assert_eq!(alternate.iter().position(|&lent| lent), Some(1));
        assert_eq!(
            alternate.iter().filter(|&&lent| lent).count(),
            1,
            "every second round is one of a loop, too"
        );
        let rare = stands_in((0..90).map(|i| i % 9 != 8));
        assert_eq!(rare.iter().filter(|&&lent| lent).count(), 10, "rounds that are rare make no program");
    }

    #[test]
    fn the_second_round_of_a_loop_has_its_own_program() {
        let mut known = Known::default();
        let (all, none) = (Indices::from_slice(&[1, 4]), Indices::new());
        known.add(&wanted(&all, &none), &[], Arc::new(Program::of_nothing()));
        let fewer = Indices::from_slice(&[4]);
        let in_loop = |live| Wanted { ends_round: true, ..wanted(live, &none) };
        assert!(known.choose(&in_loop(&fewer)).is_err());
        known.add(&in_loop(&fewer), &[], Arc::new(Program::of_nothing()));
        assert!(known.choose(&in_loop(&fewer)).is_ok());
        assert!(
            known.choose(&in_loop(&Indices::from_slice(&[1]))).is_ok(),
            "a later round is an exception at first"
        );
    }

    #[test]
    fn no_program_stands_in_without_a_result() {
        let mut known = Known::default();
        let (one, other) = (Indices::from_slice(&[1]), Indices::from_slice(&[3]));
        known.add(&wanted(&one, &one), &[], Arc::new(Program::of_nothing()));
        assert!(known.choose(&wanted(&other, &one)).is_err());
    }
}
