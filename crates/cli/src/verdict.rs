//! From captured programs and what the compiler said of them to a verdict: does it fit, how fast could it be, why.

use serde::{Deserialize, Serialize};

use crate::aot::{Memory, Outcome};
use crate::slices::{Chip, Slice};

/// What a run on a device that is not there has left, as the engine writes it.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct Capture {
    /// Training steps that have ended.
    pub(crate) steps: u64,
    pub(crate) programs: Vec<Captured>,
    reads: Vec<Moved>,
    writes: Vec<Moved>,
    fallbacks: Vec<FellBack>,
    resident_peak_bytes: u64,
}

/// A captured program.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct Captured {
    pub(crate) id: String,
    pub(crate) name: String,
    first_line: Option<String>,
    ended_by: Option<String>,
    ended_at: Option<String>,
    pub(crate) ops: Vec<Op>,
    inputs: Vec<String>,
    input_lines: Vec<Option<String>>,
    outputs: Vec<Option<String>>,
    /// The op that makes each output.
    output_ops: Vec<usize>,
    /// Step and launches in it.
    launches: Vec<(u64, u64)>,
    /// The most bytes in use besides its inputs.
    beside_bytes: u64,
    input_bytes: Vec<u64>,
    output_bytes: Vec<u64>,
    donated: Vec<u32>,
    products: Vec<Products>,
}

/// A recorded operation.
#[derive(Debug, Deserialize)]
pub(crate) struct Op {
    op: String,
    line: Option<String>,
}

/// A tensor that goes into a program or comes out of it.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Tensor {
    /// `argument` or `output`.
    pub(crate) role: &'static str,
    /// Dtype and shape.
    pub(crate) r#type: String,
    pub(crate) bytes: u64,
    /// Whether an output takes its memory.
    pub(crate) overwritten: bool,
    /// The operation that makes it, if the program does.
    pub(crate) op: Option<String>,
    /// The Python line that made it; for parameters that of the optimizer's step.
    pub(crate) line: Option<String>,
}

/// Matrix products and convolutions of one type.
#[derive(Debug, Deserialize)]
struct Products {
    dtype: String,
    precision: String,
    flops: f64,
}

/// Copies between host and device that a line makes in a step.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct Moved {
    step: u64,
    pub(crate) line: Option<String>,
    pub(crate) count: u64,
    pub(crate) bytes: u64,
}

/// Ops that ran on the CPU.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct FellBack {
    step: u64,
    pub(crate) line: Option<String>,
    pub(crate) op: String,
    pub(crate) count: u64,
}

/// The answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Verdict {
    /// With at least 5 % to spare.
    Fits,
    /// With less.
    FitsBarely,
    DoesNotFit,
    Unknown,
}

impl Verdict {
    /// Of what needs so much where there is so much.
    fn of(need: u64, limit: u64) -> Verdict {
        match () {
            () if need > limit => Verdict::DoesNotFit,
            () if need as f64 > 0.95 * limit as f64 => Verdict::FitsBarely,
            () => Verdict::Fits,
        }
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
    pub(crate) compiler: String,
    pub(crate) verdict: Verdict,
    /// Why it is not known, or what is in the way.
    pub(crate) reason: Option<String>,
    /// The most that some program needs, with what is there besides.
    pub(crate) need_bytes: Option<u64>,
    pub(crate) limit_bytes: Option<u64>,
    pub(crate) steps_captured: u64,
    pub(crate) resident_peak_bytes: u64,
    pub(crate) step: Option<Step>,
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
    #[serde(flatten)]
    pub(crate) work: Work,
}

/// What has to be done, and how long that takes at least.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Work {
    /// As the compiler counts them.
    pub(crate) flops: f64,
    /// Of matrix products and convolutions alone, counted from the program.
    pub(crate) product_flops: f64,
    /// To and from the device's memory, as the compiler estimates it.
    pub(crate) bytes_accessed: f64,
    /// FLOPs for each byte.
    pub(crate) intensity: f64,
    pub(crate) mxu_s: Option<f64>,
    pub(crate) hbm_s: Option<f64>,
    pub(crate) roofline_s: Option<f64>,
    /// `mxu` or `hbm`.
    pub(crate) bound: Option<&'static str>,
    /// Share of the peak that no run can exceed.
    pub(crate) mfu_ceiling: Option<f64>,
}

/// A program on a slice.
#[derive(Debug, Serialize)]
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
    pub(crate) need_bytes: Option<u64>,
    /// In use besides its arguments.
    pub(crate) beside_bytes: u64,
    pub(crate) memory_bytes: Option<Memory>,
    /// The largest arguments and outputs.
    pub(crate) tensors: Vec<Tensor>,
    pub(crate) work: Option<Work>,
}

/// How many passes of bfloat16 the matrix unit makes for a product.
fn passes(dtype: &str, precision: &str) -> f64 {
    match (dtype, precision) {
        ("float32", "HIGHEST") => 6.0,
        ("float32", "HIGH") => 3.0,
        _ => 1.0,
    }
}

/// Tensors of a program that are named.
const LARGEST: usize = 16;

impl Captured {
    fn launches_in(&self, step: u64) -> u64 {
        self.launches.iter().filter(|(s, _)| *s == step).map(|(_, n)| n).sum()
    }

    fn work(&self, chip: Option<&Chip>, outcome: &Outcome) -> Option<Work> {
        let (flops, bytes_accessed) = (outcome.flops?, outcome.bytes_accessed?);
        let product_flops = self.products.iter().map(|p| p.flops).sum();
        let passed: f64 = self.products.iter().map(|p| p.flops * passes(&p.dtype, &p.precision)).sum();
        let times = chip.map(|c| (passed / c.device_flops(), bytes_accessed / c.device_bytes_per_s()));
        let mut work = Work {
            flops,
            product_flops,
            bytes_accessed,
            mxu_s: times.map(|t| t.0),
            hbm_s: times.map(|t| t.1),
            roofline_s: times.map(|t| t.0.max(t.1)),
            ..Work::default()
        };
        work.finish(chip);
        Some(work)
    }

    /// The largest tensors that go in and come out.
    fn largest(&self) -> Vec<Tensor> {
        let inputs = self.inputs.iter().enumerate().map(|(i, ty)| Tensor {
            role: "argument",
            r#type: ty.clone(),
            bytes: self.input_bytes.get(i).copied().unwrap_or(0),
            overwritten: self.donated.contains(&(i as u32)),
            op: None,
            line: self.input_lines.get(i).cloned().flatten(),
        });
        let outputs = self.outputs.iter().enumerate().map(|(i, ty)| {
            let made = self.output_ops.get(i).and_then(|&at| self.ops.get(at));
            Tensor {
                role: "output",
                r#type: ty.clone().unwrap_or_default(),
                bytes: self.output_bytes.get(i).copied().unwrap_or(0),
                overwritten: false,
                op: made.map(|o| o.op.clone()),
                line: made.and_then(|o| o.line.clone()),
            }
        });
        let mut all: Vec<Tensor> = inputs.chain(outputs).collect();
        all.sort_by_key(|t| std::cmp::Reverse(t.bytes)); // stable: arguments before the outputs that overwrite them
        all.truncate(LARGEST);
        all
    }

    /// What is known of its memory though the compiler gave up.
    fn known_memory(&self, message: &str) -> Memory {
        let sum = |all: &[u64]| all.iter().sum::<u64>();
        let mut memory = Memory {
            arguments: sum(&self.input_bytes),
            outputs: sum(&self.output_bytes),
            aliased: self.donated.iter().filter_map(|&i| self.input_bytes.get(i as usize)).sum(),
            ..Memory::default()
        };
        let beside_temporaries = memory.arguments + memory.outputs - memory.aliased.min(memory.outputs);
        match amounts(message) {
            (Some(temporaries), _) => {
                memory.temporaries = temporaries;
                memory.peak = beside_temporaries + temporaries;
            }
            (None, Some(used)) => {
                memory.temporaries = used.saturating_sub(beside_temporaries);
                memory.peak = used;
            }
            (None, None) => memory.peak = beside_temporaries,
        }
        memory
    }
}

/// The bytes for temporaries and the bytes in all that libtpu's message says: "... required for HLO temporaries (47.50G)
/// exceeds ..." or "Used 17.20G of 15.75G hbm".
fn amounts(message: &str) -> (Option<u64>, Option<u64>) {
    let after = |mark: &str| {
        let (_, rest) = message.split_once(mark)?;
        let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let number: f64 = rest[..end].parse().ok()?;
        let power = "KMGT".find(rest[end..].chars().next()?).map_or(0, |i| i + 1);
        Some((number * 1024f64.powi(power as i32)) as u64)
    };
    (after("temporaries ("), after("Used "))
}

impl Work {
    fn add(&mut self, other: &Work, times: f64) {
        let sum = |a: Option<f64>, b: Option<f64>| Some(a.unwrap_or(0.0) + times * b?);
        self.flops += times * other.flops;
        self.product_flops += times * other.product_flops;
        self.bytes_accessed += times * other.bytes_accessed;
        self.mxu_s = sum(self.mxu_s, other.mxu_s);
        self.hbm_s = sum(self.hbm_s, other.hbm_s);
        self.roofline_s = sum(self.roofline_s, other.roofline_s);
    }

    /// What follows from the rest.
    fn finish(&mut self, chip: Option<&Chip>) {
        if self.bytes_accessed > 0.0 {
            self.intensity = self.flops / self.bytes_accessed;
        }
        self.bound = self.mxu_s.zip(self.hbm_s).map(|(mxu, hbm)| if mxu > hbm { "mxu" } else { "hbm" });
        let share = |(c, s): (&Chip, f64)| self.product_flops / (s * c.device_flops());
        self.mfu_ceiling = chip.zip(self.roofline_s.filter(|s| *s > 0.0)).map(share);
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
            compiler: String::new(),
            verdict: Verdict::Unknown,
            reason: Some(reason),
            need_bytes: None,
            limit_bytes: None,
            steps_captured: 0,
            resident_peak_bytes: 0,
            step: None,
            programs: Vec::new(),
            host_reads: Vec::new(),
            host_writes: Vec::new(),
            fallbacks: Vec::new(),
        }
    }

    /// Adds what was captured and what the compiler made of it.
    pub(crate) fn judge(&mut self, chip: Option<&Chip>, capture: &Capture, outcomes: &[Outcome]) {
        let last = capture.steps.saturating_sub(1);
        // Executables stay in the device's memory.
        let code: u64 = outcomes.iter().filter_map(|o| o.memory).map(|m| m.code).sum();
        let limit = self.limit_bytes;
        for p in &capture.programs {
            let outcome = outcomes.iter().find(|o| o.id == p.id);
            self.programs.push(judgement(p, outcome, chip, (last, code, limit)));
        }
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
        step.work.finish(chip);
        if !whole {
            step.work = Work { product_flops: step.work.product_flops, ..Work::default() };
        }
        self.step = Some(step);
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
    chip: Option<&Chip>,
    (last, code, limit): (u64, u64, Option<u64>),
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
        need_bytes: need,
        beside_bytes: p.beside_bytes,
        memory_bytes: memory,
        tensors: p.largest(),
        work: outcome.and_then(|o| p.work(chip, o)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn capture() -> Capture {
        serde_json::from_value(serde_json::json!({
            "steps": 2,
            "programs": [{
                "id": "a", "name": "mm", "ops": [{"op": "mm", "line": "a.py:3"}, {"op": "add", "line": null}],
                "inputs": ["float32[1000]", "float32[500]"], "input_lines": ["a.py:1", null],
                "outputs": ["float32[1000]"], "output_ops": [0], "launches": [[0, 1], [1, 2]], "beside_bytes": 1000,
                "input_bytes": [4000, 2000], "output_bytes": [4000], "donated": [0],
                "products": [{"dtype": "float32", "precision": "HIGHEST", "flops": 1e12}],
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
