//! All that is said about slices, as data: what judges and advises writes it, what shows reads it.

use std::collections::BTreeSet;
use std::time::Duration;

use oxitorch_capture::{FellBack, Moved, Reason, Undonated, Why};
use serde::Serialize;

use crate::compile::{Asked, Effort, Memory};
use crate::hardware::ici::{Sent, Total, totals};
use crate::hardware::{Slice, Work};
use crate::memory::{Buffer, Padding, Tensor};
use crate::record::Policy;
use crate::split::{Parallel, Told};
use crate::verdict::Verdict;

/// All that is said about a slice.
#[derive(Debug, Serialize)]
pub(crate) struct Judged {
    pub(crate) slice: String,
    pub(crate) platform: &'static str,
    /// The plugin's name.
    pub(crate) topology: Option<String>,
    /// How the device calls itself.
    pub(crate) device: String,
    pub(crate) chips: u32,
    /// How many of them the script's programs run on.
    pub(crate) chips_used: u32,
    /// How the work is split over them.
    pub(crate) parallel: Option<Told>,
    /// What the script's process sends others, if it makes a group of several; all else is of the first.
    pub(crate) processes: Option<Processes>,
    pub(crate) compiler: String,
    pub(crate) verdict: Verdict,
    /// Why it is not known, or what is in the way.
    pub(crate) reason: Option<String>,
    /// Whether Ctrl-C came before all was known.
    pub(crate) interrupted: bool,
    /// The script's run and the first compiling of its programs.
    #[serde(skip)]
    pub(crate) took: Duration,
    /// What `--budget` asked for.
    pub(crate) budget: Vec<Held>,
    /// What `--fit` found; all else is of the largest batch that fits.
    pub(crate) fit: Option<Fitted>,
    /// What `--fit remat` found; all else is of the policy that is recommended.
    pub(crate) remat: Option<Rematted>,
    /// The most that some program needs, with what is there besides.
    pub(crate) need_bytes: Option<u64>,
    pub(crate) limit_bytes: Option<u64>,
    /// Whether it may need more: the compiler only said what is in the way.
    pub(crate) need_is_least: bool,
    pub(crate) steps_captured: u64,
    pub(crate) resident_peak_bytes: u64,
    pub(crate) step: Option<Step>,
    /// None where nobody knows a price.
    pub(crate) price: Option<Price>,
    /// From 1 on: the cheapest that fits is first.
    pub(crate) rank: u64,
    /// What tiles waste in the last step.
    pub(crate) padding: Option<Padding>,
    pub(crate) programs: Vec<Judgement>,
    /// Of the last step.
    pub(crate) host_reads: Vec<Moved>,
    /// Of the last step.
    pub(crate) host_writes: Vec<Moved>,
    /// Of all steps.
    pub(crate) fallbacks: Vec<FellBack>,
}

/// The processes that a script is one of.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Processes {
    /// How many there are, each with a device.
    pub(crate) count: u64,
    /// The collectives of the last step in their order, those that are alike as one.
    pub(crate) collectives: Vec<Called>,
    /// The same by the Python line that asks for them.
    pub(crate) lines: Vec<CallingLine>,
}

/// Collectives that a line asks for, of one kind and size.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Called {
    /// As `torch.distributed` calls it.
    pub(crate) name: String,
    pub(crate) line: Option<String>,
    /// Whether the backward pass of that line asks for it.
    pub(crate) backward: bool,
    /// What is sent, and how long that takes at least.
    #[serde(flatten)]
    pub(crate) sent: Sent,
}

/// A Python line that asks for collectives.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct CallingLine {
    pub(crate) line: Option<String>,
    #[serde(flatten)]
    pub(crate) total: Total,
}

/// What chips send each other by collectives of one kind.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Kind {
    /// XLA's name.
    pub(crate) kind: String,
    #[serde(flatten)]
    pub(crate) total: Total,
}

/// The last step that was captured.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Step {
    pub(crate) launches: u64,
    pub(crate) programs: u64,
    /// What chips send each other, by kind.
    pub(crate) collectives: Vec<Kind>,
    /// How long it takes at least where nothing is computed while processes send; none without a group of them.
    pub(crate) without_overlap_s: Option<f64>,
    #[serde(flatten)]
    pub(crate) work: Work,
}

/// A program on a slice.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Judgement {
    pub(crate) id: String,
    pub(crate) name: String,
    pub(crate) ops: usize,
    pub(crate) first_line: Option<String>,
    pub(crate) ended_by: Option<Reason>,
    /// Which one, if a collective is the reason.
    pub(crate) ended_by_collective: Option<String>,
    pub(crate) ended_at: Option<String>,
    pub(crate) launches: u64,
    pub(crate) launches_in_last_step: u64,
    pub(crate) verdict: Verdict,
    pub(crate) error: Option<String>,
    pub(crate) compile_s: f64,
    pub(crate) effort: Effort,
    /// What it needs by fast mode, if it was compiled with full effort after that.
    pub(crate) fast_need_bytes: Option<u64>,
    pub(crate) need_bytes: Option<u64>,
    /// In use besides its arguments.
    pub(crate) beside_bytes: u64,
    pub(crate) memory_bytes: Option<Memory>,
    /// Why it is a program of its own.
    pub(crate) why: Option<Why>,
    /// The largest arguments and outputs.
    pub(crate) tensors: Vec<Tensor>,
    /// Arguments that nobody uses after it in the last step and that no output overwrites.
    pub(crate) undonated: Vec<Undonated>,
    /// The largest buffers that are alive when it needs most; none if the compiler did not write them.
    pub(crate) buffers_at_peak: Vec<Buffer>,
    /// Others, and gaps between temporaries.
    pub(crate) buffers_rest_bytes: u64,
    /// What would make it smaller, most first; none if it fits with something to spare.
    pub(crate) advice: Vec<Advice>,
    pub(crate) work: Option<Work>,
    /// What chips send each other in a launch, the most bytes first.
    pub(crate) collectives: Vec<Sent>,
}

impl Step {
    /// Adds so many launches of collectives, by kind.
    pub(crate) fn send<'a>(&mut self, all: impl Iterator<Item = (&'a Sent, u64)>) {
        let kinds = totals(all.map(|(sent, launches)| (&*sent.kind, sent, launches))).into_iter();
        self.collectives.extend(kinds.map(|(kind, total)| Kind { kind: kind.to_owned(), total }));
    }
}

impl Judged {
    /// A slice of which nothing is known yet.
    pub(crate) fn unknown(slice: &Slice, reason: String) -> Judged {
        Judged {
            slice: slice.name.clone(),
            platform: slice.platform().name(),
            topology: slice.topology().map(str::to_owned),
            device: slice.chip().map_or("this machine's processor", |c| c.kind).to_owned(),
            chips: slice.chips,
            chips_used: 1,
            parallel: None,
            processes: None,
            compiler: String::new(),
            verdict: Verdict::Unknown,
            reason: Some(reason),
            interrupted: false,
            took: Duration::ZERO,
            budget: Vec::new(),
            fit: None,
            remat: None,
            need_bytes: None,
            limit_bytes: None,
            need_is_least: false,
            steps_captured: 0,
            resident_peak_bytes: 0,
            step: None,
            price: None,
            rank: 1,
            padding: None,
            programs: Vec::new(),
            host_reads: Vec::new(),
            host_writes: Vec::new(),
            fallbacks: Vec::new(),
        }
    }

    /// Its exit status, the budget included: 1 if something is not as it should be, else 2 if something is not known.
    pub(crate) fn status(&self) -> i32 {
        let fit = self.fit.as_ref().map_or(0, Fitted::status);
        let all = [self.verdict.status(), held_status(&self.budget), fit];
        [1, 2].into_iter().find(|s| all.contains(s)).unwrap_or(0)
    }

    /// Programs that are not the same.
    pub(crate) fn distinct_programs(&self) -> usize {
        self.programs.iter().map(|p| &p.id).collect::<std::collections::BTreeSet<_>>().len()
    }

    /// How long a step takes at least.
    pub(crate) fn least_s(&self) -> Option<f64> {
        self.step.as_ref().and_then(|s| s.work.roofline_s)
    }

    /// The program whose size is the verdict's reason, if there is something to do about it.
    pub(crate) fn needed(&self) -> Option<&Judgement> {
        self.programs.get(self.needed_at()?)
    }

    /// Its place.
    pub(crate) fn needed_at(&self) -> Option<usize> {
        let tight = matches!(self.verdict, Verdict::DoesNotFit | Verdict::FitsBarely);
        let (at, largest) = self.programs.iter().enumerate().max_by_key(|(_, p)| p.need_bytes)?;
        (tight && !largest.advice.is_empty()).then_some(at)
    }
}

/// A limit and what it is held against.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Held {
    pub(crate) name: &'static str,
    pub(crate) limit: Option<f64>,
    pub(crate) value: Option<f64>,
    /// Not known if one of them is not.
    pub(crate) ok: Option<bool>,
}

/// The exit status of what was held: 1 if a limit is not kept, else 2 if one is not known.
pub(crate) fn held_status(held: &[Held]) -> i32 {
    match held {
        _ if held.iter().any(|h| h.ok == Some(false)) => 1,
        _ if held.iter().any(|h| h.ok.is_none()) => 2,
        _ => 0,
    }
}

/// What a slice costs. All but the price of an hour are lower bounds, as the step's time is.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Price {
    pub(crate) usd_per_chip_hour: f64,
    /// Where that comes from: `list` or `file`.
    pub(crate) source: &'static str,
    /// The region of a list price.
    pub(crate) region: Option<&'static str>,
    /// The day on which the list was read.
    pub(crate) read: Option<&'static str>,
    /// Of all chips of the slice.
    pub(crate) usd_per_hour: f64,
    pub(crate) usd_per_step: Option<f64>,
    /// Of `--run-steps` steps.
    pub(crate) usd_per_run: Option<f64>,
}

/// Something that makes a program smaller.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Advice {
    /// `checkpoint`, `batch`, `shard`, `bfloat16` or `release`.
    pub(crate) what: &'static str,
    /// What it saves: an estimate from the buffers at the peak, or what was compiled for it.
    pub(crate) bytes: u64,
    /// What came of compiling it.
    pub(crate) compiled: Option<Compiled>,
    /// The slice and the split of it that are meant.
    #[serde(skip)]
    pub(crate) split: Option<(String, Parallel)>,
    /// What to do.
    pub(crate) text: String,
    /// The lines that hold most of it, with their bytes.
    pub(crate) lines: Vec<(String, u64)>,
}

/// A step with the advice taken, compiled.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Compiled {
    pub(crate) need_bytes: u64,
    pub(crate) verdict: Verdict,
    /// What is not as it was meant.
    pub(crate) notes: Vec<String>,
}

impl Advice {
    /// Takes what came of compiling it. `need` is what the step needed before.
    pub(crate) fn take(&mut self, compiled: Compiled, need: u64) {
        self.bytes = need.saturating_sub(compiled.need_bytes);
        self.compiled = Some(compiled);
    }
}

/// What was found, and how.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Fitted {
    /// The largest batch that fits.
    pub(crate) batch: Option<u64>,
    /// Whether it is known that the next one does not fit.
    pub(crate) confirmed: bool,
    /// Why not, if not.
    pub(crate) reason: Option<String>,
    pub(crate) tries: Vec<FitTry>,
}

/// One batch.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct FitTry {
    pub(crate) batch: u64,
    pub(crate) verdict: Verdict,
    pub(crate) reason: Option<String>,
    pub(crate) need_bytes: Option<u64>,
    pub(crate) limit_bytes: Option<u64>,
    pub(crate) roofline_s: Option<f64>,
    /// At the roofline.
    pub(crate) samples_per_s: Option<f64>,
    /// What was foretold of its memory.
    pub(crate) foretold_bytes: Option<u64>,
    /// Its programs.
    #[serde(skip)]
    pub(crate) programs: BTreeSet<String>,
}

impl Fitted {
    pub(crate) fn status(&self) -> i32 {
        if self.confirmed { 0 } else { 2 }
    }
}

/// What was found.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Rematted {
    /// That which fits with the fewest FLOPs.
    pub(crate) policy: Option<Policy>,
    /// What to write where a block is called.
    pub(crate) code: Option<&'static str>,
    pub(crate) blocks: u64,
    pub(crate) classes: Vec<String>,
    pub(crate) tries: Vec<RematTry>,
}

/// One policy.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct RematTry {
    pub(crate) policy: Policy,
    pub(crate) verdict: Verdict,
    pub(crate) reason: Option<String>,
    pub(crate) need_bytes: Option<u64>,
    pub(crate) product_flops: Option<f64>,
    /// Share of the product FLOPs without checkpoints.
    pub(crate) added: Option<f64>,
    pub(crate) roofline_s: Option<f64>,
}

/// What came of it; serialized, the report as JSON.
#[derive(Debug, Serialize)]
pub struct Report {
    pub(crate) version: u32,
    pub(crate) oxitorch: &'static str,
    pub(crate) script: Vec<String>,
    pub(crate) steps: u64,
    /// Steps of the whole training.
    pub(crate) run_steps: Option<u64>,
    pub(crate) effort: Asked,
    pub(crate) elapsed_s: f64,
    pub(crate) slices: Vec<Judged>,
}

impl Report {
    /// The slices, the cheapest that fits first.
    pub(crate) fn ranked(&self) -> Vec<&Judged> {
        let mut slices: Vec<&Judged> = self.slices.iter().collect();
        slices.sort_by_key(|s| s.rank);
        slices
    }

    /// The exit status: 1 if something does not fit, else 2 if something is not known.
    pub fn status(&self) -> i32 {
        status(&self.slices)
    }
}

/// The exit status for several slices: 1 if something does not fit, else 2 if something is not known.
fn status(slices: &[Judged]) -> i32 {
    let of = |status: i32| slices.iter().any(|s| s.status() == status);
    [1, 2].into_iter().find(|&s| of(s)).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_fit_counts_more_than_what_is_not_known() {
        let judged = |verdict| {
            let slice = Slice::parse("v5e-1").unwrap();
            Judged { verdict, ..Judged::unknown(&slice, String::new()) }
        };
        for (verdicts, expected) in [
            (&[Verdict::Fits, Verdict::FitsBarely][..], 0),
            (&[Verdict::Fits, Verdict::Unknown], 2),
            (&[Verdict::Unknown, Verdict::DoesNotFit, Verdict::Fits], 1),
        ] {
            let slices: Vec<Judged> = verdicts.iter().map(|v| judged(*v)).collect();
            assert_eq!(status(&slices), expected);
        }
    }
}
