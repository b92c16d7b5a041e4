//! From captured programs and what the compiler said of them to a verdict: does it fit, how fast could it be, why.

use std::time::Duration;

use serde::Serialize;

use super::advice::{self, Advice, On};
use super::aot::{Effort, Memory, Outcome};
use super::budget::{self, Held};
use super::buffers::{Buffer, reported};
use super::capture::{Capture, Captured, FellBack, Moved, Tensor, Undonated, Why};
use super::fit::Fitted;
use super::ici::{self, Sent};
use super::padding::Padding;
use super::parallel::Told;
use super::prices::Price;
use super::remat::Rematted;
use super::slices::{Chip, Slice};
use super::work::Work;

/// The answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Verdict {
    /// With at least 5 % to spare.
    Fits,
    /// With less.
    FitsBarely,
    DoesNotFit,
    #[default]
    Unknown,
}

impl Verdict {
    /// Of what needs so much where there is so much.
    fn of(need: u64, limit: u64) -> Verdict {
        match () {
            () if need > limit => Verdict::DoesNotFit,
            () if need > Verdict::barely(limit) => Verdict::FitsBarely,
            () => Verdict::Fits,
        }
    }

    /// What leaves less than 5 % of a limit.
    pub(crate) fn barely(limit: u64) -> u64 {
        (0.95 * limit as f64) as u64
    }

    /// The exit status of the command.
    pub(crate) fn status(self) -> i32 {
        match self {
            Verdict::Fits | Verdict::FitsBarely => 0,
            Verdict::DoesNotFit => 1,
            Verdict::Unknown => 2,
        }
    }
}

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

/// The last step that was captured.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Step {
    pub(crate) launches: u64,
    pub(crate) programs: u64,
    /// What chips send each other, by kind.
    pub(crate) collectives: Vec<ici::Kind>,
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
    pub(crate) ended_by: Option<String>,
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
        let all = [self.verdict.status(), budget::status(&self.budget), fit];
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

    /// Adds what was captured and what the compiler made of it.
    pub(crate) fn judge(&mut self, chip: Option<&Chip>, capture: &Capture, outcomes: &[Outcome]) {
        let last = capture.steps.saturating_sub(1);
        // Executables stay in the device's memory.
        let code = |of: fn(&Outcome) -> Option<Memory>| outcomes.iter().filter_map(of).map(|m| m.code).sum();
        let (code, fast): (u64, u64) = (code(|o| o.memory), code(|o| o.fast.or(o.memory)));
        let limit = self.limit_bytes;
        let strategy = self.parallel.as_ref().map(|p| p.strategy);
        let trains = capture.programs.iter().any(|p| p.ops.iter().any(|o| o.backward));
        let on = On { chip, chips: self.chips, strategy, trains };
        let judge = |p: &Captured| {
            let outcome = outcomes.iter().find(|o| o.id == p.id);
            judgement(p, outcome, on, (last, [code, fast], limit))
        };
        self.programs = capture.programs.iter().map(judge).collect();
        let told = |o: &Outcome| o.memory.is_some() || !o.out_of_memory;
        self.need_is_least = !outcomes.iter().all(told);
        self.need_bytes = self.programs.iter().filter_map(|p| p.need_bytes).max();
        self.conclude();
        let mut step = Step::default();
        let mut whole = true;
        for p in self.programs.iter().filter(|p| p.launches_in_last_step > 0) {
            step.launches += p.launches_in_last_step;
            step.programs += 1;
            match &p.work {
                Some(work) => step.work.add(work, p.launches_in_last_step as f64),
                None => whole = false,
            }
        }
        step.collectives = ici::kinds(
            self.programs.iter().flat_map(|p| p.collectives.iter().map(|c| (c, p.launches_in_last_step))),
        );
        step.work.finish(chip);
        if !whole {
            step.work = Work { product_flops: step.work.product_flops, ..Work::default() };
        }
        self.step = Some(step);
        let of_step = capture.programs.iter().map(|p| (p, p.launches_in(last))).filter(|(_, n)| *n > 0);
        // What tiles waste is known of TPUs.
        self.padding = chip.filter(|c| c.gpu.is_none()).map(|c| Padding::of(c, of_step));
        self.steps_captured = capture.steps;
        self.resident_peak_bytes = capture.resident_peak_bytes;
        let of_last = |all: &[Moved]| all.iter().filter(|m| m.step == last).cloned().collect();
        self.host_reads = of_last(&capture.reads);
        self.host_writes = of_last(&capture.writes);
        self.fallbacks = capture.fallbacks.clone();
    }

    /// The verdict from those of the programs: what does not fit counts more than what is not known.
    fn conclude(&mut self) {
        let has = |v: Verdict| self.programs.iter().find(|p| p.verdict == v);
        self.reason = None;
        self.verdict = Verdict::Fits;
        for verdict in [Verdict::DoesNotFit, Verdict::Unknown, Verdict::FitsBarely] {
            if let Some(p) = has(verdict) {
                self.verdict = verdict;
                self.reason = p.error.as_ref().map(|e| format!("{}: {e}", p.name));
                return;
            }
        }
        if self.programs.is_empty() {
            self.verdict = Verdict::Unknown;
            self.reason = Some("the script ran nothing on the device".to_owned());
        } else if self.limit_bytes.is_none() {
            self.verdict = Verdict::Unknown;
            self.reason = Some("the memory of the device is not known".to_owned());
        }
    }
}

fn judgement(
    p: &Captured,
    outcome: Option<&Outcome>,
    on: On,
    (last, [code, fast_code], limit): (u64, [u64; 2], Option<u64>),
) -> Judgement {
    let full = outcome.filter(|o| o.out_of_memory);
    let memory = match (outcome.and_then(|o| o.memory), full) {
        (None, Some(o)) => Some(p.known_memory(o.error.as_deref().unwrap_or_default())),
        (known, _) => known,
    };
    let need = memory.map(|m| p.beside_bytes + m.peak + code);
    let verdict = match (need, limit) {
        _ if full.is_some() => Verdict::DoesNotFit,
        (Some(need), Some(limit)) => Verdict::of(need, limit),
        _ => Verdict::Unknown,
    };
    let fast = outcome.and_then(|o| o.fast).map(|m| p.beside_bytes + m.peak + fast_code);
    let peak = outcome.and_then(|o| o.at_peak.as_ref());
    let buffers = peak.map_or_else(Vec::new, |peak| p.buffers(peak));
    let (buffers_at_peak, buffers_rest_bytes) = peak.map_or((Vec::new(), 0), |peak| reported(&buffers, peak));
    let tight = matches!(verdict, Verdict::DoesNotFit | Verdict::FitsBarely);
    let advice = if tight { advice::of(p, &buffers, on, need.unwrap_or(0)) } else { Vec::new() };
    let not_reached = || Some("it was not compiled".to_owned());
    Judgement {
        id: p.id.clone(),
        name: p.name.clone(),
        ops: p.ops.len(),
        first_line: p.first_line.clone(),
        ended_by: p.ended_by.clone(),
        ended_at: p.ended_at.clone(),
        launches: p.launches.iter().map(|(_, n)| n).sum(),
        launches_in_last_step: p.launches_in(last),
        verdict,
        error: outcome.map_or_else(not_reached, |o| o.error.clone()),
        compile_s: outcome.map_or(0.0, |o| o.compile_s),
        effort: outcome.map(|o| o.effort).unwrap_or_default(),
        fast_need_bytes: fast,
        need_bytes: need,
        beside_bytes: p.beside_bytes,
        memory_bytes: memory,
        why: p.why.clone(),
        tensors: p.largest(),
        undonated: p.undonated.clone(),
        buffers_at_peak,
        buffers_rest_bytes,
        advice,
        work: outcome.and_then(|o| p.work(on.chip, o)),
        collectives: outcome.and_then(|o| o.collectives.clone()).unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::preflight::capture::amounts;

    fn capture() -> Capture {
        serde_json::from_value(serde_json::json!({
            "steps": 2, "described": false,
            "programs": [{
                "id": "a", "name": "mm", "ops": [{"op": "mm", "line": "a.py:3"}, {"op": "add", "line": null}],
                "inputs": ["float32[1000]", "float32[500]"], "input_lines": ["a.py:1", null],
                "outputs": ["float32[1000]"], "output_ops": [0], "launches": [[0, 1], [1, 2]], "beside_bytes": 1000,
                "input_bytes": [4000, 2000], "output_bytes": [4000], "donated": [0],
                "products": [{"dtype": "float32", "precision": "HIGHEST", "flops": 1e12, "batch": 1, "m": 1e4, "n": 5e3, "k": 1e4,
                              "count": 1, "op": "mm", "line": "a.py:3"}],
            }],
            "reads": [{"step": 0, "line": "a.py:1", "count": 9, "bytes": 9}, {"step": 1, "line": "a.py:2", "count": 1, "bytes": 4}],
            "writes": [], "fallbacks": [], "resident_peak_bytes": 7000,
        }))
        .unwrap()
    }

    fn compiled() -> Outcome {
        let memory = Memory { peak: 8000, code: 1000, ..Memory::default() };
        let (flops, bytes_accessed) = (Some(2e12), Some(819e9 * 0.001));
        Outcome { id: "a".into(), memory: Some(memory), flops, bytes_accessed, ..Outcome::default() }
    }

    fn judged(limit: u64, outcome: Outcome) -> Judged {
        let slice = Slice::parse("v5e-1").unwrap();
        let mut judged = Judged::unknown(&slice, "nothing was done".into());
        judged.limit_bytes = Some(limit);
        judged.judge(slice.chip(), &capture(), &[outcome]);
        judged
    }

    #[test]
    fn what_is_besides_and_the_code_need_memory_too() {
        for (limit, verdict) in
            [(9999, Verdict::DoesNotFit), (10_000, Verdict::FitsBarely), (11_000, Verdict::Fits)]
        {
            let judged = judged(limit, compiled());
            assert_eq!((judged.verdict, judged.need_bytes), (verdict, Some(10_000)), "{limit}");
        }
    }

    #[test]
    fn a_step_is_the_last_one() {
        let judged = judged(20_000, compiled());
        let step = judged.step.unwrap();
        assert_eq!((step.launches, step.programs, step.work.flops), (2, 1, 4e12));
        // Six passes for each of two products, at 197 TFLOP/s.
        let expected = 2.0 * 6e12 / 197e12;
        assert!((step.work.roofline_s.unwrap() / expected - 1.0).abs() < 1e-9);
        assert_eq!(step.work.bound, Some("mxu"));
        assert!((step.work.mfu_ceiling.unwrap() - 1.0 / 6.0).abs() < 1e-9);
        assert_eq!(judged.host_reads.iter().map(|m| m.count).sum::<u64>(), 1);
    }

    #[test]
    fn out_of_memory_is_a_verdict_with_numbers() {
        let error =
            "E1000: the total memory required for HLO temporaries (47.50G) exceeds available HBM (15.75G)";
        let outcome =
            Outcome { id: "a".into(), error: Some(error.into()), out_of_memory: true, ..Outcome::default() };
        let judged = judged(1 << 34, outcome);
        assert_eq!(judged.verdict, Verdict::DoesNotFit);
        let memory = judged.programs[0].memory_bytes.unwrap();
        assert_eq!(
            (memory.arguments, memory.aliased, memory.temporaries),
            (6000, 4000, (47.5 * 1024f64.powi(3)) as u64)
        );
        assert_eq!(judged.need_bytes, Some(1000 + 6000 + memory.temporaries));
        assert_eq!(amounts("Used 1.5K of 1K hbm"), (None, Some(1536)));
    }

    #[test]
    fn the_largest_tensors_have_lines() {
        let judged = judged(20_000, compiled());
        let told: Vec<_> = judged.programs[0]
            .tensors
            .iter()
            .map(|t| (t.role, t.bytes, t.overwritten, t.line.as_deref()))
            .collect();
        let expected = [
            ("argument", 4000, true, Some("a.py:1")),
            ("output", 4000, false, Some("a.py:3")),
            ("argument", 2000, false, None),
        ];
        assert_eq!(told, expected);
    }

    #[test]
    fn other_errors_are_no_verdict() {
        let outcome = Outcome { id: "a".into(), error: Some("odd".into()), ..Outcome::default() };
        let judged = judged(1 << 34, outcome);
        assert_eq!((judged.verdict, judged.reason), (Verdict::Unknown, Some("mm: odd".into())));
    }
}
