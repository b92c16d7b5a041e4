//! What to do about a program that is too large, in order of what it saves.

use oxitorch_capture::{Program, Reason, Role, UndonatedReason};
use std::collections::BTreeMap;

use crate::answer::Advice;
use crate::hardware::Chip;
use crate::memory::Buffer;
use crate::split::Parallel;

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
pub(crate) fn of(p: &Program, buffers: &[Buffer], on: On, need: u64) -> Vec<Advice> {
    let sum = |keep: &dyn Fn(&Buffer) -> bool| held(buffers.iter().filter(|b| keep(b)));
    let is_for = |b: &Buffer, roles: &[Role]| b.purpose.is_some_and(|p| roles.contains(&p));
    // Where a step is more than one program, what is kept for the backward pass goes from one to the next.
    let is_kept = |b: &Buffer| b.activation || is_for(b, &[Role::Intermediate]);
    let named: u64 = p.tensors_beside.iter().filter(|b| b.label.name.is_some()).map(|b| b.bytes).sum();
    let between = p.beside_bytes.saturating_sub(named);
    let (kept, kept_lines) = sum(&is_kept);
    let kept = kept + between;
    let (wide, wide_lines) = sum(&|b| is_kept(b) && b.r#type.starts_with("float32"));
    let (data, _) = sum(&|b| is_for(b, &[Role::Data]));
    let (model, _) = sum(&|b| is_for(b, &[Role::Parameter, Role::Gradient, Role::State]));
    let model = model + named;
    let released = p.undonated.iter().filter(|u| u.reason == UndonatedReason::Held);
    let (released, released_lines) = sums(released.map(|u| (u.line.as_deref(), u.bytes)));
    // Gradients that the script drops right behind the step are no results of it.
    let ends_step = p.ended_by == Some(Reason::Step);
    let gradients = p.outputs.iter().filter(|o| ends_step && o.label.role == Role::Gradient);
    let (gradients, step_lines) = sums(gradients.map(|o| (p.ended_at.as_deref(), o.bytes)));
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
            what: "gradients",
            bytes: gradients,
            text:
                "drop the gradients right behind the step, before any data is fetched (optimizer.zero_grad())"
                    .into(),
            lines: step_lines,
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

/// Leaves out what saves little, and sorts the rest.
pub(crate) fn rank(all: &mut Vec<Advice>, need: u64) {
    all.retain(|a| a.bytes as f64 >= LEAST * need as f64 && a.bytes > 0);
    all.sort_by_key(|a| std::cmp::Reverse(a.bytes));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hardware::Slice;
    use oxitorch_capture::{Beside, Label, Output, Undonated};

    fn buffer(bytes: u64, line: &str, activation: bool, purpose: Option<Role>) -> Buffer {
        Buffer {
            role: if purpose.is_some() { "argument" } else { "temporary" },
            purpose,
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
            buffer(1000, "a.py:4", false, Some(Role::Data)),
            buffer(2000, "a.py:5", false, Some(Role::Parameter)),
        ];
        let beside = |label: Label, bytes| Beside { label, shape: vec![10], bytes };
        let output = |bytes, role: Role| Output { label: role.into(), ..Output::new(None, bytes, 0) };
        let undonated = |input, bytes, line: Option<&str>, reason| Undonated {
            input,
            r#type: "float32[4]".parse().unwrap(),
            bytes,
            line: line.map(str::to_owned),
            reason,
        };
        let p = Program {
            beside_bytes: 1000,
            ended_by: Some(Reason::Step),
            ended_at: Some("a.py:8".into()),
            outputs: vec![
                output(2000, Role::Parameter),
                output(1000, Role::Gradient),
                output(1500, Role::Gradient),
            ],
            tensors_beside: vec![
                beside(Label { role: Role::State, name: Some("w/exp_avg".into()) }, 400),
                beside(Role::Intermediate.into(), 40),
            ],
            undonated: vec![
                undonated(0, 500, Some("a.py:6"), UndonatedReason::Held),
                undonated(1, 700, Some("a.py:7"), UndonatedReason::Size),
                undonated(2, 10, None, UndonatedReason::Held),
            ],
            ..Program::default()
        };
        let slice = Slice::parse("v5e-1").unwrap();
        let on = On { chip: slice.chip(), chips: 1, strategy: None, trains: true };
        let all = of(&p, &buffers, on, 20_000);
        let told: Vec<_> = all.iter().map(|a| (a.what, a.bytes)).collect();
        // 600 bytes are not named and go from program to program. Of 12000 that four chips share, three quarters go.
        let expected = [
            ("shard", 9000),
            ("checkpoint", 8600),
            ("batch", 4800),
            ("bfloat16", 4000),
            ("gradients", 2500),
            ("release", 510),
        ];
        assert_eq!(told, expected);
        assert_eq!(all[1].lines, [("a.py:1".to_owned(), 4000), ("a.py:2".to_owned(), 4000)]);
        assert!(all[0].text.contains("--slice v5e-4 --parallel fsdp"));
        assert!(of(&p, &buffers, On { trains: false, ..on }, 20_000).iter().all(|a| a.what != "checkpoint"));
        assert_eq!(all[4].lines, [("a.py:8".to_owned(), 2500)]);
        let others = Program { ended_by: Some(Reason::Read), ..p.clone() };
        assert!(of(&others, &buffers, on, 20_000).iter().all(|a| a.what != "gradients"));
        assert!(of(&p, &buffers, on, 1 << 30).is_empty(), "a drop in the bucket");
    }
}
