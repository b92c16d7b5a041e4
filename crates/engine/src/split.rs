//! Where a sequence of ops that has no program is cut, so that compiling costs what is new in it.
//!
//! Four things are looked for: runs of ops that stand in a known program, which become programs of their own that later
//! windows share; in a sequence that is too long for one program, parts that repeat, as time steps and layers do;
//! backwards whose gradients add up, where a line makes another number of them, or of other sizes, each time; and lines whose
//! sequences are other ones each time, though their ops are the same, as where a net has the structure of its input.
//! Compilers take more than linear time, and a part that repeats is compiled once.

use crate::site::Site;
use rustc_hash::{FxHashMap, FxHashSet, FxHasher};
use smallvec::SmallVec;
use std::collections::VecDeque;
use std::hash::Hasher;
use std::ops::Range;

/// Ops that identify a place in a sequence.
const GRAM: usize = 8;
/// Shorter sequences are compiled as they are: that takes less time than a program more in each launch.
const LEAST: usize = 64;
/// Shorter runs are no programs of their own.
const RUN: usize = 32;
/// Sequences that are remembered.
const REMEMBERED: usize = 256;
/// A sequence of more ops is cut where it repeats, or else where it has this many.
pub(crate) const MOST: usize = 1536;
/// Ops that parts of such a sequence have, about.
const PART: usize = 320;

/// After so many new sequences of a line more than known ones, each op is launched alone; a known one counts as much as all
/// of these.
const ALWAYS_NEW: u32 = 8;
/// After so many new sequences of several backwards of a line each backward is a part with the forward before it.
const OFTEN_NEW: u32 = 3;
/// Lines, and instances of a line, that are remembered.
const LINES: usize = 256;
const INSTANCES: usize = 4096;

/// An op of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Token {
    /// The number of its instance.
    pub(crate) id: u32,
    /// A hash of its name, which instances for other shapes share.
    name: u32,
}

impl Token {
    pub(crate) fn new(id: u32, name: &str) -> Token {
        let mut hasher = FxHasher::default();
        hasher.write(name.as_bytes());
        Token { id, name: hasher.finish() as u32 }
    }
}

/// The sequences of programs.
#[derive(Debug, Default)]
pub(crate) struct Sequences {
    known: VecDeque<Sequence>,
    /// The number of the first of these; they are counted from the start of the process.
    first: usize,
    /// Where in which of them a gram stands; the latest few.
    grams: FxHashMap<u64, SmallVec<[(usize, usize); 2]>>,
}

/// The sequence of a program.
#[derive(Debug)]
struct Sequence {
    ops: Box<[Token]>,
    /// Whether it is a part of windows that were cut.
    is_part: bool,
}

/// Ops that stand in a known sequence too.
#[derive(Clone, Copy, Debug)]
struct Run {
    at: usize,
    length: usize,
    /// The known sequence, and the place there.
    number: usize,
    there: usize,
}

fn gram(ids: &[Token]) -> Option<u64> {
    let mut hasher = FxHasher::default();
    ids.get(..GRAM)?.iter().for_each(|t| hasher.write_u32(t.id));
    Some(hasher.finish())
}

impl Sequences {
    /// Remembers the sequence of a program.
    pub(crate) fn add(&mut self, ops: Box<[Token]>, is_part: bool) {
        if ops.len() < RUN {
            return;
        }
        if self.known.len() == REMEMBERED {
            self.forget_half();
        }
        let number = self.first + self.known.len();
        for at in 0..ops.len() {
            let Some(gram) = gram(&ops[at..]) else { break };
            let places = self.grams.entry(gram).or_default();
            if places.last().is_some_and(|(n, _)| *n == number) {
                continue; // it repeats: the first place is the one where a run is longest
            }
            if places.len() == 4 {
                places.remove(0);
            }
            places.push((number, at));
        }
        self.known.push_back(Sequence { ops, is_part });
    }

    fn forget_half(&mut self) {
        let gone = self.known.len() / 2;
        self.known.drain(..gone);
        self.first += gone;
        let first = self.first;
        self.grams.retain(|_, places| {
            places.retain(|(n, _)| *n >= first);
            !places.is_empty()
        });
    }

    /// Where to cut a sequence so that its runs that stand in known ones are parts; nothing if they are not most of it, or
    /// if nothing says that what lies between them will go on to change.
    pub(crate) fn cuts(&self, ops: &[Token]) -> Option<Vec<usize>> {
        if ops.len() < LEAST {
            return None;
        }
        let (mut runs, mut at): (Vec<Run>, usize) = (Vec::new(), 0);
        while at < ops.len() {
            match self.runs(ops, at).max_by_key(|r| r.length).filter(|r| r.length >= RUN) {
                Some(run) => {
                    at += run.length;
                    runs.push(run);
                }
                None => at += 1,
            }
        }
        let known: usize = runs.iter().map(|r| r.length).sum();
        if known == ops.len() && runs.len() == 1 || known * 4 < ops.len() * 3 || !self.varies(ops, &runs) {
            return None;
        }
        let mut cuts: Vec<usize> = runs.iter().flat_map(|r| [r.at, r.at + r.length]).collect();
        cuts.retain(|&at| at != 0 && at != ops.len());
        cuts.dedup();
        Some(cuts)
    }

    /// Whether what lies between the runs is likely to change again: a run was cut out of a window before, or the ops around
    /// it are the same but for their sizes. Else a window may have settled: the first step of an optimizer, which makes its
    /// state, is not like the others.
    fn varies(&self, ops: &[Token], runs: &[Run]) -> bool {
        let Some(longest) = runs.iter().max_by_key(|r| r.length) else { return false };
        let was_cut = |r: &Run| {
            let known = self.sequence(r.number);
            known.is_part && r.there == 0 && r.length == known.ops.len()
        };
        if runs.iter().any(was_cut) {
            return true;
        }
        let there = runs.iter().filter(|r| r.number == longest.number);
        let around_here = names_outside(ops, runs.iter().map(|r| (r.at, r.length)));
        let known = &self.sequence(longest.number).ops;
        around_here == names_outside(known, there.map(|r| (r.there, r.length)))
    }

    fn sequence(&self, number: usize) -> &Sequence {
        &self.known[number - self.first]
    }

    /// The runs that begin at this op.
    fn runs<'a>(&'a self, ops: &'a [Token], at: usize) -> impl Iterator<Item = Run> + 'a {
        let places = gram(&ops[at..]).and_then(|g| self.grams.get(&g));
        places.into_iter().flatten().map(move |&(number, there)| {
            let known = &self.sequence(number).ops[there..];
            let length = ops[at..].iter().zip(known).take_while(|(a, b)| a.id == b.id).count();
            Run { at, length, number, there }
        })
    }
}

/// The Python lines that ended new sequences.
#[derive(Debug, Default)]
pub(crate) struct Lines(FxHashMap<Site, Line>);

#[derive(Debug, Default)]
struct Line {
    /// How many more of its sequences were new than known.
    new: u32,
    /// How many were new and of several backwards, at most one more than [`OFTEN_NEW`].
    sums: u32,
    /// The instances in them.
    ids: FxHashSet<u32>,
}

impl Lines {
    /// A sequence is new. Says whether each of its ops is to be a program: those of its line are other ones each time, and
    /// nearly all of its ops stood in one of them.
    pub(crate) fn is_always_new(&mut self, line: Site, ops: &[Token]) -> bool {
        if self.0.len() == LINES && !self.0.contains_key(&line) {
            self.0.clear();
        }
        let Line { new, ids, .. } = self.0.entry(line).or_default();
        let known = ops.iter().filter(|op| ids.contains(&op.id)).count();
        let is_always = *new >= ALWAYS_NEW && known * 8 >= ops.len() * 7;
        *new = (*new + 1).min(2 * ALWAYS_NEW);
        if ids.len() > INSTANCES {
            ids.clear();
        }
        ids.extend(ops.iter().map(|op| op.id));
        is_always
    }

    /// A sequence of several backwards is new. Says whether they are to be parts, as there were some before.
    pub(crate) fn adds_up_often(&mut self, line: Site) -> bool {
        let line = self.0.entry(line).or_default();
        line.sums = (line.sums + 1).min(OFTEN_NEW + 1);
        line.sums > OFTEN_NEW
    }

    /// A sequence has a program.
    pub(crate) fn is_known(&mut self, line: Site) {
        if let Some(line) = self.0.get_mut(&line) {
            line.new = line.new.saturating_sub(ALWAYS_NEW);
        }
    }
}

/// Where to cut a sequence of several backwards, as of gradients that add up, so that each is a part with its forward and what
/// follows the last one is a part, too. None if there is one at most, or a part is too long. An op of no known line belongs
/// to what it stands behind, and so does what adds a gradient.
pub(crate) fn cuts_behind_backwards(sites: &[Site]) -> Option<Vec<usize>> {
    let (mut cuts, mut backwards, mut is_within) = (Vec::new(), 0, false);
    for (at, site) in sites.iter().enumerate().filter(|(_, site)| **site != Site::default()) {
        match (is_within, site.is_of_backward()) {
            (false, true) => backwards += 1,
            (true, false) => cuts.push(at),
            _ => {}
        }
        is_within = site.is_of_backward();
    }
    let starts = [0].into_iter().chain(cuts.iter().copied());
    let ends = cuts.iter().copied().chain([sites.len()]);
    let are_short = starts.zip(ends).all(|(start, end)| end - start <= MOST);
    (backwards > 1 && are_short).then_some(cuts)
}

/// The names of the ops that are in none of these stretches.
fn names_outside(ops: &[Token], stretches: impl Iterator<Item = (usize, usize)>) -> Vec<u32> {
    let mut outside = vec![true; ops.len()];
    stretches.for_each(|(at, length)| outside[at..at + length].fill(false));
    ops.iter().zip(outside).filter_map(|(op, outside)| outside.then_some(op.name)).collect()
}

/// Where to cut a sequence that is too long: around parts that repeat, several of them together.
pub(crate) fn cuts_of_long(ops: &[Token]) -> Option<Vec<usize>> {
    if ops.len() <= MOST {
        return None;
    }
    let next = next_places(ops);
    let mut cuts = Vec::new();
    // Time steps before the layers or directions that they are part of.
    cut_repeats(ops, &next, 0..ops.len(), PART, &mut cuts);
    cuts.sort_unstable();
    cuts.dedup();
    cuts.retain(|&at| at != 0 && at != ops.len());
    Some(cuts)
}

/// Cuts a stretch around parts of at most so many ops that repeat, and what lies between them around larger ones.
fn cut_repeats(
    ops: &[Token],
    next: &[Option<usize>],
    stretch: Range<usize>,
    longest: usize,
    cuts: &mut Vec<usize>,
) {
    let between = |rest: Range<usize>, cuts: &mut Vec<usize>| {
        if rest.len() > MOST && longest < ops.len() {
            cut_repeats(ops, next, rest, 4 * longest, cuts);
        } else {
            cut_evenly(rest, cuts);
        }
    };
    let (mut at, mut rest) = (stretch.start, stretch.start);
    while at < stretch.end {
        let Some((period, count)) = repeats(&ops[..stretch.end], next, at).filter(|r| r.0 <= longest) else {
            at += 1;
            continue;
        };
        between(rest..at, cuts);
        cut_repeated(at..at + period * count, period, cuts);
        at += period * count;
        rest = at;
    }
    between(rest..stretch.end, cuts);
}

/// For each place the next one with the same gram.
fn next_places(ops: &[Token]) -> Vec<Option<usize>> {
    let mut last: FxHashMap<u64, usize> = FxHashMap::default();
    let mut next = vec![None; ops.len()];
    for at in 0..ops.len() {
        let Some(gram) = gram(&ops[at..]) else { break };
        if let Some(before) = last.insert(gram, at) {
            next[before] = Some(at);
        }
    }
    next
}

/// The length of what begins here and comes again at once, and how often it comes, if that makes two parts or more.
fn repeats(ops: &[Token], next: &[Option<usize>], at: usize) -> Option<(usize, usize)> {
    let period = next[at]? - at;
    let there = ops.get(at + period..)?;
    let same = ops[at..].iter().zip(there).take_while(|(a, b)| a.id == b.id).count();
    let count = same / period + 1;
    (count >= 2 && period * count >= PART).then_some((period, count))
}

/// Cuts a stretch of repeated parts into pieces of at most [`PART`] ops if a part has no more. Each has a power of two of
/// parts, so that few programs serve stretches of all lengths.
fn cut_repeated(stretch: Range<usize>, period: usize, cuts: &mut Vec<usize>) {
    let most = period * (PART / period).checked_ilog2().map_or(1, |n| 1 << n);
    let (mut at, mut piece) = (stretch.start, most);
    while at < stretch.end {
        while piece > stretch.end - at {
            piece /= 2;
        }
        cuts.push(at);
        at += piece;
    }
    cuts.push(stretch.end);
}

/// Cuts a stretch in which nothing repeats into equal pieces of about [`PART`] ops.
fn cut_evenly(stretch: Range<usize>, cuts: &mut Vec<usize>) {
    let pieces = (stretch.len() / PART).max(1);
    let step = stretch.len().div_ceil(pieces).max(1);
    cuts.push(stretch.end);
    cuts.extend(stretch.step_by(step));
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init)] // a list of one range is meant
mod tests {
    use super::*;

    /// Ops of these numbers; their names are numbers modulo 1000.
    fn sequence(parts: &[Range<u32>]) -> Vec<Token> {
        let token = |id: u32| Token { id, name: id % 1000 };
        parts.iter().cloned().flatten().map(token).collect()
    }

    #[test]
    fn what_is_known_is_a_part() {
        let mut known = Sequences::default();
        known.add(sequence(&[0..5, 100..200, 10..15]).into(), false);
        // The same between ops for other sizes.
        assert_eq!(known.cuts(&sequence(&[1000..1005, 100..200, 1010..1015])), Some(vec![5, 105]));
        // A step of an optimizer that makes no state any more is no reason.
        assert_eq!(known.cuts(&sequence(&[0..5, 100..200, 30..33])), None);
        known.add(sequence(&[500..600]).into(), true);
        assert_eq!(
            known.cuts(&sequence(&[50..55, 500..600, 60..68])),
            Some(vec![5, 105]),
            "it was cut out before"
        );
        assert_eq!(known.cuts(&sequence(&[100..200])), None, "all of it is known: other results are wanted");
        assert_eq!(known.cuts(&sequence(&[500..540, 300..400])), None, "little of it is known");
        assert_eq!(known.cuts(&sequence(&[500..530, 5..10])), None, "it is short");
    }

    #[test]
    fn lines_that_are_always_new() {
        let mut lines = Lines::default();
        let (line, other) = (Site(1), Site(2));
        let turned = |n: u32| sequence(&[n..16, 0..n]);
        assert!((0..8).all(|n| !lines.is_always_new(line, &turned(n))), "they may settle");
        assert!(lines.is_always_new(line, &turned(8)));
        assert!(!lines.is_always_new(other, &turned(9)), "another line");
        assert!(lines.is_always_new(line, &sequence(&[0..14, 50..52])), "few are new");
        assert!(!lines.is_always_new(line, &sequence(&[0..13, 60..63])), "many are new, as for another size");
        lines.is_known(line);
        assert!(!lines.is_always_new(line, &turned(10)), "one came again");
        for n in 0..2 * LINES as u32 {
            lines.is_always_new(Site(n), &turned(1));
        }
        assert!(lines.0.len() <= LINES);
        for n in 0..INSTANCES as u32 {
            lines.is_always_new(line, &sequence(&[8 * n..8 * n + 8]));
        }
        assert!(lines.0[&line].ids.len() <= INSTANCES + 8);
    }

    #[test]
    fn each_backward_is_a_part() {
        let cuts = |marks: &str| {
            let site = |c: char| match c {
                'b' => Site(Site::OF_BACKWARD | 1),
                '-' => Site::default(),
                _ => Site(1),
            };
            cuts_behind_backwards(&marks.chars().map(site).collect::<Vec<_>>())
        };
        assert_eq!(cuts("ffbbfbbss"), Some(vec![4, 7]), "the last part is the optimizer's step");
        assert_eq!(cuts("fbfbfb"), Some(vec![2, 4]));
        assert_eq!(cuts("-fb-b-f-b-s"), Some(vec![6, 10]), "gradients are added at no line");
        assert_eq!([cuts("ffbbss"), cuts("ffbb"), cuts("ff"), cuts("bbf"), cuts("--")], [const { None }; 5]);
    }

    #[test]
    fn sequences_are_forgotten() {
        let mut known = Sequences::default();
        for n in 0..2 * REMEMBERED as u32 {
            known.add(sequence(&[n * 1000..n * 1000 + 80]).into(), true);
        }
        assert!(known.known.len() <= REMEMBERED && known.grams.len() <= 80 * REMEMBERED);
        let last = 2 * REMEMBERED as u32 - 1;
        assert_eq!(known.cuts(&sequence(&[900..909, last * 1000..last * 1000 + 80])), Some(vec![9]));
    }

    #[test]
    fn time_steps_are_parts() {
        let step = sequence(&[0..20]);
        let ids: Vec<Token> = [sequence(&[50..57]), step.repeat(80), sequence(&[60..70])].concat();
        let cuts = cuts_of_long(&ids).expect("cuts");
        assert_eq!(cuts, [7, 327, 647, 967, 1287, 1607]);
        let parts: Vec<&[Token]> = cuts.windows(2).map(|w| &ids[w[0]..w[1]]).collect();
        assert!(parts.iter().all(|p| *p == parts[0]), "each is 16 steps");
        assert_eq!(cuts_of_long(&step.repeat(70)), None, "short enough");
        assert_eq!(cuts_of_long(&sequence(&[0..2000])).map(|c| c.len()), Some(5));
        // Two directions of 200 steps each: the steps count, and not the directions.
        let direction = [sequence(&[50..57]), sequence(&[0..6]).repeat(200)].concat();
        let cuts = cuts_of_long(&direction.repeat(2)).expect("cuts");
        assert!(cuts.windows(2).all(|w| w[1] - w[0] <= 2 * PART), "{cuts:?}");
        let both = |at: &usize| cuts.contains(at) && cuts.contains(&(at + direction.len()));
        assert!(cuts.iter().filter(|at| both(at)).count() >= 3, "{cuts:?}");
        // Another length has the same parts.
        let lengths = |count: usize| -> Vec<usize> {
            let cuts = cuts_of_long(&step.repeat(count)).expect("cuts");
            cuts.iter().zip([0].iter().chain(&cuts)).map(|(to, from)| to - from).collect()
        };
        assert!(lengths(90).starts_with(&[320; 5]) && lengths(103).starts_with(&[320; 6]));
        assert_eq!(lengths(103)[6..], [80, 40]);
    }
}
