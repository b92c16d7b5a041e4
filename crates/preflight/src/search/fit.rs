//! `--fit`: the script again and again, until the answer is found.
//!
//! `--fit batch` looks for the largest batch. Memory is about linear in it, so two tries foretell where the limit is; the
//! answer is never foretold, but a batch that fits and the next one that does not, both compiled.

use std::str::FromStr;
use std::time::{Duration, Instant};

use anyhow::bail;
use oxitorch_format::{bytes, many};

use crate::answer::{FitTry as Try, Fitted, Judged};
use crate::progress::say;
use crate::record::Argument;
use crate::session::{Session, Target, Variant};
use crate::verdict::Verdict;

/// What to look for.
#[derive(Clone, Debug, PartialEq)]
pub enum Fit {
    /// The largest batch: the script's argument, or what it marks with `oxitorch.preflight.batch`.
    Batch(Option<Argument>),
    /// What to compute again in the backward pass.
    Remat,
}

impl FromStr for Fit {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Fit> {
        let (what, argument) = text.split_once('=').map_or((text, None), |(w, a)| (w, Some(a)));
        let argument = match argument {
            None if what == "remat" => return Ok(Fit::Remat),
            _ if what != "batch" => bail!("what can be looked for is batch and remat, not `{text}`"),
            None => None,
            Some(a) => match a.split_once("{}") {
                Some((before, behind)) => Some(Argument::Template(before.to_owned(), behind.to_owned())),
                None if a.len() > 1 && a.starts_with('-') => Some(Argument::Option(a.to_owned())),
                None => {
                    bail!("`{a}` is no option of a script: write batch=--batch-size, or batch='size={{}}'")
                }
            },
        };
        Ok(Fit::Batch(argument))
    }
}

/// Bounds of a search.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds {
    /// What batches are multiples of.
    pub(crate) multiple: Option<u64>,
    pub(crate) tries: usize,
    pub(crate) time: Duration,
}

/// Where a search goes on.
#[derive(Clone, Debug, PartialEq)]
enum Next {
    Try(u64),
    /// The largest, and why it is not known to be the largest.
    Done(Option<u64>, Option<String>),
}

/// The batches of a search.
#[derive(Clone, Copy)]
struct Grid(Option<u64>);

/// Up to here every batch is tried, if nobody says of what it is to be a multiple.
const FINE: u64 = 64;
/// Of what it is a multiple above.
const COARSE: u64 = 8;

impl Grid {
    fn step(self, n: u64) -> u64 {
        self.0.unwrap_or(if n < FINE { 1 } else { COARSE })
    }

    fn below(self, n: u64) -> u64 {
        let step = self.step(n);
        (n / step * step).max(self.least())
    }

    fn next(self, n: u64) -> u64 {
        let step = self.step(n);
        (n / step * step).saturating_add(step)
    }

    fn least(self) -> u64 {
        self.0.unwrap_or(1)
    }
}

/// What to try after these.
fn next(tries: &[Try], start: u64, grid: Grid) -> Next {
    let Some(last) = tries.last() else { return Next::Try(grid.below(start)) };
    let hi = tries.iter().filter(|t| t.verdict == Verdict::DoesNotFit).map(|t| t.batch).min();
    let fits = |t: &&Try| t.verdict.status() == 0 && hi.is_none_or(|hi| t.batch < hi);
    let lo = tries.iter().filter(fits).map(|t| t.batch).max();
    if last.verdict == Verdict::Unknown {
        let why = last.reason.clone().unwrap_or_default();
        return Next::Done(lo, Some(format!("batch {}: {why}", last.batch)));
    }
    let same = |t: &&Try| t.batch != last.batch && !t.programs.is_empty() && t.programs == last.programs;
    if let Some(other) = tries.iter().find(same) {
        let (a, b) = (other.batch.min(last.batch), other.batch.max(last.batch));
        let why = format!(
            "batches of {a} and {b} make the same programs: either the script takes its batch from elsewhere, or its data has no more"
        );
        return Next::Done(lo.map(|lo| lo.min(a)), Some(why));
    }
    match (lo, hi) {
        (Some(lo), Some(hi)) if grid.next(lo) >= hi => Next::Done(Some(lo), None),
        (Some(lo), Some(hi)) => {
            let middle = grid.below(lo + (hi - lo) / 2);
            let n = if stalled(tries) { middle } else { foretold(tries).map_or(middle, |n| grid.below(n)) };
            Next::Try(n.clamp(grid.next(lo), hi - 1))
        }
        // Where the line is nearly flat, it says nothing.
        (Some(lo), None) => {
            let n = foretold(tries).filter(|&n| n >= lo);
            let n = n.map_or(lo.saturating_mul(2), |n| grid.below(n));
            // A batch that the script marks may be none of the grid, and below its first.
            Next::Try(n.min(lo.saturating_mul(LEAP)).max(grid.next(lo)))
        }
        (None, Some(hi)) if hi <= grid.least() => Next::Done(None, None),
        (None, Some(hi)) => {
            let n = foretold(tries).filter(|n| *n < hi).unwrap_or(hi / 2);
            Next::Try(grid.below(n.max(hi / LEAP)).min(hi - 1).max(grid.least()))
        }
        (None, None) => Next::Done(None, None),
    }
}

/// As far as two tries may foretell.
const LEAP: u64 = 64;

/// The largest batch that fits, if memory goes on as between the two tries that are nearest to the limit.
fn foretold(tries: &[Try]) -> Option<u64> {
    let (a, b, limit) = line(tries)?;
    let n = (limit as f64 - a) / b;
    (n >= 0.0).then_some(n as u64)
}

/// Memory without a batch, memory for each sample, and the limit.
fn line(tries: &[Try]) -> Option<(f64, f64, u64)> {
    let limit = tries.last()?.limit_bytes?;
    let mut known: Vec<(u64, u64)> = tries.iter().filter_map(|t| Some((t.batch, t.need_bytes?))).collect();
    known.sort_by_key(|&(n, need)| (need.abs_diff(limit), n));
    let &[(n, need), (m, other), ..] = &known[..] else { return None };
    let each = (need as f64 - other as f64) / (n as f64 - m as f64);
    (each > 0.0).then_some((need as f64 - each * n as f64, each, limit))
}

/// Whether three tries on end have not halved what is left between a batch that fits and one that does not.
fn stalled(tries: &[Try]) -> bool {
    let width = |tries: &[Try]| {
        let hi = tries.iter().filter(|t| t.verdict == Verdict::DoesNotFit).map(|t| t.batch).min()?;
        let lo = tries.iter().filter(|t| t.verdict.status() == 0 && t.batch < hi).map(|t| t.batch).max()?;
        Some(hi - lo)
    };
    let n = tries.len();
    n > 3
        && (n - 2..=n)
            .all(|i| width(&tries[..i - 1]).zip(width(&tries[..i])).is_some_and(|(was, is)| 2 * is > was))
}

/// Looks for the largest batch on a slice; what is said of that one.
pub(crate) fn batch<'a>(
    session: &mut Session<'a>,
    argument: Option<&Argument>,
    bounds: Bounds,
    target: Target<'a>,
) -> anyhow::Result<Judged> {
    let begun = Instant::now();
    let grid = Grid(bounds.multiple);
    let mut tries: Vec<Try> = Vec::new();
    // Of the largest batch that fits, else of the smallest.
    let mut best: Option<(u64, Judged)> = None;
    // A script that marks its batch tells it in the first try.
    let mut start = argument.map(|a| a.of(session.script).unwrap_or(FIRST));
    let done = loop {
        let n = match start.map(|start| next(&tries, start, grid)) {
            None => None,
            Some(Next::Try(n)) => Some(n),
            Some(Next::Done(largest, why)) => break (largest, why),
        };
        let over = match () {
            () if tries.len() >= bounds.tries => {
                Some(format!("{} were made", many(tries.len() as u64, "try").replace("trys", "tries")))
            }
            () if !tries.is_empty() && begun.elapsed() > bounds.time => {
                Some(format!("{} min have gone", bounds.time.as_secs() / 60))
            }
            () => None,
        };
        if let Some(why) = over {
            break (best.as_ref().filter(|(_, j)| j.verdict.status() == 0).map(|(n, _)| *n), Some(why));
        }
        let foretold_bytes = line(&tries).zip(n).map(|((a, each, _), n)| (a + each * n as f64) as u64);
        let what = n.map_or("as the script has it".to_owned(), |n| n.to_string());
        let guess = foretold_bytes.map_or(String::new(), |b| format!(", which may need {}", bytes(b)));
        say(&format!("batch {what} on {}{guess}", target.slice.name));
        let variant = Variant { batch: n.map(|n| (argument.cloned(), n)), ..Variant::default() };
        let (judged, told) = session.judge(target, &variant)?;
        let asked = told.batch;
        let Some(batch) = n.or(asked) else {
            if judged.verdict == Verdict::Unknown {
                return Ok(judged);
            }
            bail!(
                "the script does not ask for oxitorch.preflight.batch(...): say --fit batch=--batch-size if it has such an option"
            );
        };
        start = start.or(asked);
        let one = attempt(batch, foretold_bytes, &judged);
        say(&format!("batch {batch}: {}", one.words()));
        let better = |(n, known): &(u64, Judged)| match (known.verdict.status(), one.verdict.status()) {
            (0, 0) => batch > *n,
            (0, _) => false,
            (_, 0) => true,
            _ => batch < *n,
        };
        if best.as_ref().is_none_or(better) {
            best = Some((batch, judged));
        } else if judged.interrupted {
            best.iter_mut().for_each(|(_, j)| j.interrupted = true);
        }
        tries.push(one);
    };
    let (largest, reason) = done;
    let known = best.filter(|(n, _)| largest.is_none_or(|l| l == *n));
    let Some((_, mut judged)) = known else { bail!("no batch was tried") };
    judged.fit = Some(Fitted { batch: largest, confirmed: reason.is_none(), reason, tries });
    Ok(judged)
}

/// The first batch to try if the script's arguments say none.
const FIRST: u64 = 8;

fn attempt(batch: u64, foretold_bytes: Option<u64>, judged: &Judged) -> Try {
    let roofline_s = judged.step.as_ref().and_then(|s| s.work.roofline_s);
    Try {
        batch,
        verdict: judged.verdict,
        reason: judged.reason.clone().filter(|_| judged.verdict == Verdict::Unknown),
        need_bytes: judged.need_bytes,
        limit_bytes: judged.limit_bytes,
        roofline_s,
        samples_per_s: roofline_s.filter(|s| *s > 0.0).map(|s| batch as f64 / s),
        foretold_bytes,
        programs: judged.programs.iter().map(|p| p.id.clone()).collect(),
    }
}

impl Try {
    fn words(&self) -> String {
        let words = self.verdict.words();
        match self.need_bytes.zip(self.limit_bytes) {
            Some((need, limit)) => format!("{words}, {} of {}", bytes(need), bytes(limit)),
            None => words.to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    fn args(script: &[&str]) -> Vec<String> {
        script.iter().map(|s| (*s).to_owned()).collect()
    }

    #[test]
    fn the_batch_is_put_into_the_arguments() {
        for (fit, script, batch, expected) in [
            (
                "batch=--batch-size",
                &["t.py", "--batch-size", "16"][..],
                Some(16),
                &["t.py", "--batch-size", "9"][..],
            ),
            (
                "batch=--batch-size",
                &["t.py", "--batch-size=16", "x"],
                Some(16),
                &["t.py", "--batch-size=9", "x"],
            ),
            (
                "batch=--batch",
                &["t.py", "--batch-size=16"],
                None,
                &["t.py", "--batch-size=16", "--batch", "9"],
            ),
            ("batch=-b", &["t.py", "-b", "1", "-b", "2"], Some(2), &["t.py", "-b", "1", "-b", "9"]),
            ("batch=data.batch={}", &["t.py", "data.batch=4"], Some(4), &["t.py", "data.batch=9"]),
            ("batch=size={}x", &["t.py", "size=4"], None, &["t.py", "size=4", "size=9x"]),
        ] {
            let Fit::Batch(Some(argument)) = fit.parse().unwrap() else { panic!("{fit}") };
            let script = args(script);
            assert_eq!((argument.of(&script), argument.set(&script, 9)), (batch, args(expected)), "{fit}");
        }
        assert_eq!("batch".parse::<Fit>().unwrap(), Fit::Batch(None));
        for (text, said) in
            [("size", "not `size`"), ("batch=size", "batch=--batch-size"), ("batch=", "no option")]
        {
            let message = text.parse::<Fit>().unwrap_err().to_string();
            assert!(message.contains(said), "{message}");
        }
    }

    /// Searches where a batch needs so much and there are 1000; the answer and the batches that were tried.
    fn search(start: u64, multiple: Option<u64>, need: impl Fn(u64) -> Option<u64>) -> (Next, Vec<u64>) {
        search_in(u64::MAX, start, multiple, need)
    }

    /// The same where the data has only so many samples.
    fn search_in(
        data: u64,
        start: u64,
        multiple: Option<u64>,
        need: impl Fn(u64) -> Option<u64>,
    ) -> (Next, Vec<u64>) {
        let mut tries: Vec<Try> = Vec::new();
        loop {
            let n = match next(&tries, start, Grid(multiple)) {
                Next::Try(n) => n,
                done => return (done, tries.iter().map(|t| t.batch).collect()),
            };
            assert!(tries.iter().all(|t| t.batch != n), "{n} is tried again");
            assert!(tries.len() < 30);
            let need_bytes = need(n);
            let verdict = match need_bytes {
                None => Verdict::Unknown,
                Some(bytes) if bytes > 1000 => Verdict::DoesNotFit,
                Some(_) => Verdict::Fits,
            };
            tries.push(Try {
                batch: n,
                verdict,
                reason: None,
                need_bytes,
                limit_bytes: Some(1000),
                roofline_s: None,
                samples_per_s: None,
                foretold_bytes: None,
                programs: BTreeSet::from([n.min(data).to_string()]),
            });
        }
    }

    #[test]
    fn where_memory_is_linear_four_tries_are_enough() {
        // From below and from above.
        assert_eq!(search(4, None, |n| Some(100 + 20 * n)), (Next::Done(Some(45), None), vec![4, 8, 45, 46]));
        assert_eq!(
            search(90, None, |n| Some(100 + 20 * n)),
            (Next::Done(Some(45), None), vec![88, 44, 45, 46])
        );
        assert_eq!(
            search(32, None, |n| Some(100 + n)),
            (Next::Done(Some(896), None), vec![32, 64, 896, 904])
        );
        assert_eq!(search(32, Some(16), Some), (Next::Done(Some(992), None), vec![32, 64, 992, 1008]));
        // One sample is all, or too much.
        assert_eq!(search(1, None, |n| Some(600 * n)), (Next::Done(Some(1), None), vec![1, 2]));
        assert_eq!(search(8, None, |n| Some(1200 * n)).0, Next::Done(None, None));
        assert_eq!(search(64, Some(64), |n| Some(1200 * n)), (Next::Done(None, None), vec![64]));
    }

    #[test]
    fn every_curve_that_rises_has_an_end() {
        type Curve = (&'static str, fn(u64) -> u64);
        let curves: [Curve; 5] = [
            ("square", |n| 10 + n.saturating_mul(n) / 4),
            ("steps", |n| 100 + n.div_ceil(32) * 90 + n % 2),
            ("late", |n| if n < 100 { 10 + n } else { 10 + n + (n - 99) * 7 }),
            ("root", |n| (40.0 * (n as f64).sqrt()) as u64 + n / 8),
            ("jump", |n| if n > 300 { 5000 } else { 10 + n }),
        ];
        for (name, need) in curves {
            for start in [1, 7, 64, 1000, 100_000] {
                let (Next::Done(Some(n), None), tried) = search(start, None, |n| Some(need(n))) else {
                    panic!("{name} from {start}")
                };
                assert!(need(n) <= 1000 && need(Grid(None).next(n)) > 1000, "{name} from {start}: {n}");
                assert!(tried.contains(&n) && tried.len() < 24, "{name} from {start}: {tried:?}");
            }
        }
    }

    #[test]
    fn a_marked_batch_may_be_none_of_those_that_are_tried() {
        let fits = |batch| Try {
            batch,
            verdict: Verdict::Fits,
            reason: None,
            need_bytes: Some(10),
            limit_bytes: Some(1000),
            roofline_s: None,
            samples_per_s: None,
            foretold_bytes: None,
            programs: BTreeSet::new(),
        };
        assert_eq!(next(&[fits(0)], 0, Grid(None)), Next::Try(1));
        assert_eq!(next(&[fits(8)], 8, Grid(Some(1000))), Next::Try(1000));
        assert_eq!(next(&[fits(u64::MAX)], u64::MAX, Grid(None)), Next::Try(u64::MAX));
    }

    #[test]
    fn what_cannot_be_told_ends_the_search() {
        let (done, tried) = search(4, None, |n| (n < 30).then_some(n));
        assert!(matches!(done, Next::Done(Some(8), Some(why)) if why.contains("batch 512")), "{tried:?}");
        // The batch is no batch, or the data has an end.
        let (done, _) = search_in(5, 4, None, |n| Some(n.min(5)));
        assert!(
            matches!(done, Next::Done(Some(8), Some(why)) if why.contains("8 and 512 make the same programs"))
        );
    }
}
