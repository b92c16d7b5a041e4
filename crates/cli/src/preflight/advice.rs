//! What to do about a program that is too large, in order of what it saves.

use std::collections::BTreeMap;
use std::fmt::Write;

use anstyle::Style;
use serde::Serialize;

use super::buffers::Buffer;
use super::capture::Captured;
use super::parallel::Parallel;
use super::slices::Chip;
use super::text::mark;
use super::verdict::{Judged, Judgement, Verdict};
use crate::graphs::short;
use crate::report::bytes;

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

/// Chips, and how the step is split over them if it is.
#[derive(Clone, Copy, Default)]
pub(crate) struct On<'a> {
    pub(crate) chip: Option<&'a Chip>,
    pub(crate) chips: u32,
    /// `dp`, `fsdp` or `rules`.
    pub(crate) strategy: Option<&'a str>,
    /// Whether it has a backward pass.
    pub(crate) trains: bool,
}

impl On<'_> {
    /// The slice to split the step over, or to split it over in another way; how, and the share of the model and of the
    /// rest that a chip is then rid of.
    fn wider(self) -> Option<(String, Parallel, f64, f64)> {
        let chip = self.chip?;
        let slice = |n: u32| chip.slice_name(n);
        let larger = |n: u32| chip.topologies.iter().map(|(m, _)| *m).find(|m| *m > n);
        let rid = |parts: u32| 1.0 - 1.0 / f64::from(parts);
        Some(match self.strategy {
            None => {
                let n = larger(1)?;
                let rid = rid(n * chip.devices);
                (slice(n), Parallel::Fsdp, rid, rid)
            }
            Some("dp") => (slice(self.chips), Parallel::Fsdp, rid(self.chips * chip.devices), 0.0),
            Some("fsdp") => {
                let n = larger(self.chips)?;
                let rid = 1.0 - f64::from(self.chips) / f64::from(n);
                (slice(n), Parallel::Fsdp, rid, rid)
            }
            Some(_) => return None,
        })
    }
}

/// Lines that are named.
const NAMED: usize = 3;

/// What saves less than this share of a program's memory is not worth a word.
const LEAST: f64 = 0.01;

/// What would make a program smaller on one chip. `need` is all that it needs, in bytes.
pub(crate) fn of(p: &Captured, buffers: &[Buffer], on: On, need: u64) -> Vec<Advice> {
    let sum = |keep: &dyn Fn(&Buffer) -> bool| held(buffers.iter().filter(|b| keep(b)));
    let has_purpose = |b: &Buffer, names: &[&str]| b.purpose.as_deref().is_some_and(|p| names.contains(&p));
    // Where a step is more than one program, what is kept for the backward pass goes from one to the next.
    let is_kept = |b: &Buffer| b.activation || has_purpose(b, &["intermediate"]);
    let named: u64 = p.tensors_beside.iter().filter(|b| b.role.name.is_some()).map(|b| b.bytes).sum();
    let between = p.beside_bytes.saturating_sub(named);
    let (kept, kept_lines) = sum(&is_kept);
    let kept = kept + between;
    let (wide, wide_lines) = sum(&|b| is_kept(b) && b.r#type.starts_with("float32"));
    let (data, _) = sum(&|b| has_purpose(b, &["data"]));
    let (model, _) = sum(&|b| has_purpose(b, &["parameter", "gradient", "state"]));
    let model = model + named;
    let released = p.undonated.iter().filter(|u| u.reason == "held");
    let (released, released_lines) = sums(released.map(|u| (u.line.as_deref(), u.bytes)));
    let mut all = vec![
        Advice {
            what: "checkpoint",
            bytes: if on.trains { kept } else { 0 },
            text:
                "compute again in the backward pass what these lines keep for it (torch.utils.checkpoint); \
                   --fit remat says what that costs"
                    .into(),
            lines: kept_lines,
            compiled: None,
            split: None,
        },
        Advice {
            what: "batch",
            bytes: (kept + data) / 2,
            text: "half the batch; --fit batch=--OPTION finds the largest that fits".into(),
            lines: Vec::new(),
            compiled: None,
            split: None,
        },
        Advice {
            what: "bfloat16",
            bytes: wide / 2,
            text: match on.trains {
                true => "bfloat16 for what is kept in float32 for the backward pass (torch.autocast)".into(),
                false => "bfloat16 for what programs hand on in float32 (torch.autocast)".into(),
            },
            lines: wide_lines,
            compiled: None,
            split: None,
        },
        Advice {
            what: "release",
            bytes: released,
            text: "let go of values that nobody uses again, so that results take their memory (del)".into(),
            lines: released_lines,
            compiled: None,
            split: None,
        },
    ];
    if let Some((slice, parallel, of_model, of_rest)) = on.wider() {
        let what = if of_rest > 0.0 { "the step over more chips" } else { "parameters and state as well" };
        all.push(Advice {
            what: "shard",
            bytes: (model as f64 * of_model + (kept + data) as f64 * of_rest) as u64,
            text: format!("split {what}: --slice {slice} --parallel fsdp"),
            lines: Vec::new(),
            compiled: None,
            split: Some((slice, parallel)),
        });
    }
    rank(&mut all, need);
    all
}

/// The bytes of buffers, and the lines that hold most of them.
fn held<'a>(buffers: impl Iterator<Item = &'a Buffer>) -> (u64, Vec<(String, u64)>) {
    sums(buffers.map(|b| (b.line.as_deref(), b.bytes)))
}

fn sums<'a>(all: impl Iterator<Item = (Option<&'a str>, u64)>) -> (u64, Vec<(String, u64)>) {
    let (mut sum, mut lines) = (0, BTreeMap::<&str, u64>::new());
    for (line, bytes) in all {
        sum += bytes;
        line.into_iter().for_each(|l| *lines.entry(l).or_default() += bytes);
    }
    let mut lines: Vec<(String, u64)> = lines.into_iter().map(|(l, n)| (l.to_owned(), n)).collect();
    lines.sort_by_key(|(_, n)| std::cmp::Reverse(*n));
    lines.retain(|(_, n)| *n as f64 >= LEAST * sum as f64);
    lines.truncate(NAMED);
    (sum, lines)
}

/// The program whose size is the verdict's reason, if there is something to do about it.
pub(crate) fn needed(s: &Judged) -> Option<&Judgement> {
    s.programs.get(needed_at(s)?)
}

/// Its place.
pub(crate) fn needed_at(s: &Judged) -> Option<usize> {
    let tight = matches!(s.verdict, Verdict::DoesNotFit | Verdict::FitsBarely);
    let (at, largest) = s.programs.iter().enumerate().max_by_key(|(_, p)| p.need_bytes)?;
    (tight && !largest.advice.is_empty()).then_some(at)
}

/// Where the numbers are from.
pub(crate) fn source(p: &Judgement) -> &'static str {
    let compiled = p.advice.iter().filter(|a| a.compiled.is_some()).count();
    match compiled {
        0 => "estimates: nothing was compiled for them",
        n if n == p.advice.len() => "compiled with little effort",
        _ => "estimates, but for those that were compiled, with little effort",
    }
}

impl Advice {
    /// What to do, and what came of it.
    pub(crate) fn whole(&self) -> String {
        let then = |c: &Compiled| {
            let notes: String = c.notes.iter().map(|n| format!("; {n}")).collect();
            format!(" (compiled: then {}, {}{notes})", bytes(c.need_bytes), mark(c.verdict).2)
        };
        self.text.clone() + &self.compiled.as_ref().map_or_else(String::new, then)
    }

    /// Takes what came of compiling it. `need` is what the step needed before.
    pub(crate) fn take(&mut self, compiled: Compiled, need: u64) {
        self.bytes = need.saturating_sub(compiled.need_bytes);
        self.compiled = Some(compiled);
    }
}

/// Leaves out what saves little, and sorts the rest.
pub(crate) fn rank(all: &mut Vec<Advice>, need: u64) {
    all.retain(|a| a.bytes as f64 >= LEAST * need as f64 && a.bytes > 0);
    all.sort_by_key(|a| std::cmp::Reverse(a.bytes));
}

/// What to do, for the terminal.
pub(crate) fn text(s: &Judged) -> String {
    let Some(p) = needed(s) else { return String::new() };
    let (bold, dim) = (Style::new().bold(), Style::new().dimmed());
    let mut out = format!("\n  {bold}what makes it smaller{bold:#} {dim}({}){dim:#}\n", source(p));
    for a in &p.advice {
        let _ = writeln!(out, "    {:>10}  {}", bytes(a.bytes), a.whole());
        for (line, n) in &a.lines {
            let _ = writeln!(out, "                {dim}{} in {}{dim:#}", bytes(*n), short(line));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::preflight::slices::Slice;

    fn buffer(bytes: u64, line: &str, activation: bool, purpose: Option<&str>) -> Buffer {
        Buffer {
            role: if purpose.is_some() { "argument" } else { "temporary" },
            purpose: purpose.map(str::to_owned),
            name: None,
            r#type: "float32[8]".into(),
            layout: String::new(),
            bytes,
            unpadded_bytes: bytes,
            overwritten: false,
            op: None,
            line: Some(line.into()),
            backward: false,
            activation,
            instruction: String::new(),
        }
    }

    #[test]
    fn what_saves_most_is_first_and_lines_are_summed() {
        let buffers = [
            buffer(4000, "a.py:1", true, None),
            buffer(1000, "a.py:2", true, None),
            buffer(3000, "a.py:2", true, None),
            buffer(9000, "a.py:3", false, None),
            buffer(1000, "a.py:4", false, Some("data")),
            buffer(2000, "a.py:5", false, Some("parameter")),
        ];
        let p: Captured = serde_json::from_value(serde_json::json!({
            "id": "a", "name": "mm", "first_line": null, "ended_by": null, "ended_at": null, "ops": [],
            "inputs": [], "input_lines": [], "outputs": [], "output_ops": [], "launches": [], "beside_bytes": 1000,
            "tensors_beside": [
                {"role": "state", "name": "w/exp_avg", "shape": [10], "bytes": 400},
                {"role": "intermediate", "shape": [10], "bytes": 40},
            ],
            "input_bytes": [], "output_bytes": [], "donated": [], "products": [],
            "undonated": [
                {"input": 0, "type": "float32[4]", "bytes": 500, "line": "a.py:6", "reason": "held"},
                {"input": 1, "type": "float32[4]", "bytes": 700, "line": "a.py:7", "reason": "size"},
                {"input": 2, "type": "float32[4]", "bytes": 10, "line": null, "reason": "held"},
            ],
        }))
        .unwrap();
        let slice = Slice::parse("v5e-1").unwrap();
        let on = On { chip: slice.chip(), chips: 1, strategy: None, trains: true };
        let all = of(&p, &buffers, on, 20_000);
        let told: Vec<_> = all.iter().map(|a| (a.what, a.bytes)).collect();
        // 600 bytes are not named and go from program to program. Of 12000 that four chips share, three quarters go.
        let expected =
            [("shard", 9000), ("checkpoint", 8600), ("batch", 4800), ("bfloat16", 4000), ("release", 510)];
        assert_eq!(told, expected);
        assert_eq!(all[1].lines, [("a.py:1".to_owned(), 4000), ("a.py:2".to_owned(), 4000)]);
        assert!(all[0].text.contains("--slice v5e-4 --parallel fsdp"));
        assert!(of(&p, &buffers, On { trains: false, ..on }, 20_000).iter().all(|a| a.what != "checkpoint"));
        assert!(of(&p, &buffers, on, 1 << 30).is_empty(), "a drop in the bucket");
    }
}
