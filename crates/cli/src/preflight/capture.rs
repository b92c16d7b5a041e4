//! What a run on a device that is not there has left, as the engine writes it.

use serde::{Deserialize, Serialize};

use super::aot::{Memory, Outcome};
use super::slices::Chip;
use super::work::Work;

/// What a run on a device that is not there has left, as the engine writes it.
#[derive(Clone, Debug, Default, Deserialize)]
pub(crate) struct Capture {
    /// Training steps that have ended.
    pub(crate) steps: u64,
    /// Whether the script wanted to know the device's name or memory.
    pub(crate) described: bool,
    pub(crate) programs: Vec<Captured>,
    pub(crate) reads: Vec<Moved>,
    pub(crate) writes: Vec<Moved>,
    pub(crate) fallbacks: Vec<FellBack>,
    pub(crate) resident_peak_bytes: u64,
    /// The batch that the script marks with `oxitorch.preflight.batch`.
    #[serde(skip)]
    pub(crate) marked_batch: Option<u64>,
}

/// A captured program.
#[derive(Clone, Debug, Default, Deserialize)]
pub(crate) struct Captured {
    pub(crate) id: String,
    pub(crate) name: String,
    pub(crate) first_line: Option<String>,
    pub(crate) ended_by: Option<String>,
    pub(crate) ended_at: Option<String>,
    pub(crate) ops: Vec<Op>,
    pub(crate) inputs: Vec<String>,
    pub(crate) input_lines: Vec<Option<String>>,
    pub(crate) outputs: Vec<Option<String>>,
    /// The op that makes each output.
    pub(crate) output_ops: Vec<usize>,
    /// Step and launches in it.
    pub(crate) launches: Vec<(u64, u64)>,
    /// The most bytes in use besides its inputs.
    pub(crate) beside_bytes: u64,
    pub(crate) input_bytes: Vec<u64>,
    pub(crate) output_bytes: Vec<u64>,
    pub(crate) donated: Vec<u32>,
    #[serde(default)]
    pub(crate) input_roles: Vec<Role>,
    #[serde(default)]
    pub(crate) output_roles: Vec<Role>,
    /// The tensors that `beside_bytes` is of, as far as they are known.
    #[serde(default)]
    pub(crate) tensors_beside: Vec<Beside>,
    /// Along which axes of a mesh the dimensions of each argument are split.
    #[serde(skip)]
    pub(crate) input_splits: Vec<Option<String>>,
    #[serde(skip)]
    pub(crate) output_splits: Vec<Option<String>>,
    pub(crate) products: Vec<Products>,
    #[serde(default)]
    pub(crate) why: Option<Why>,
    #[serde(default)]
    pub(crate) undonated: Vec<Undonated>,
}

/// What a tensor is for: `parameter`, `gradient`, `state`, `buffer` with names; `data` came from the host in the step,
/// `intermediate` from another program of it, `other` was there before; `number` goes along with a launch.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub(crate) struct Role {
    pub(crate) role: String,
    pub(crate) name: Option<String>,
}

impl Role {
    /// Role and name in one.
    pub(crate) fn key(&self) -> String {
        format!("{} {}", self.role, self.name.as_deref().unwrap_or_default())
    }
}

/// A tensor that is alive while a program runs that does not take it.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Beside {
    #[serde(flatten)]
    pub(crate) role: Role,
    pub(crate) shape: Vec<u64>,
    pub(crate) bytes: u64,
}

impl Beside {
    /// What it is split by.
    pub(crate) fn key(&self) -> (String, Vec<u64>) {
        (self.role.key(), self.shape.clone())
    }
}

/// A recorded operation.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Op {
    pub(crate) op: String,
    pub(crate) line: Option<String>,
    /// Whether it is of the backward pass of that line.
    #[serde(default)]
    pub(crate) backward: bool,
}

/// Matrix products and convolutions of a line that are alike: batches of products of an m x k by a k x n matrix.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Products {
    pub(crate) dtype: String,
    pub(crate) precision: String,
    pub(crate) batch: f64,
    pub(crate) m: f64,
    pub(crate) n: f64,
    pub(crate) k: f64,
    pub(crate) op: Option<String>,
    pub(crate) line: Option<String>,
    pub(crate) count: f64,
    /// Of all of them.
    pub(crate) flops: f64,
}

impl Undonated {
    /// Why it is not overwritten.
    pub(crate) fn why(&self) -> &'static str {
        match self.reason.as_str() {
            "held" => {
                "a variable or the gradients' graph still holds it: del it, or let a function's end do so"
            }
            _ => "no result has its size",
        }
    }
}

/// Why a program is a new one.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct Why {
    /// Programs are counted from 1.
    pub(crate) number: u64,
    /// Why and where it was launched.
    pub(crate) launched: String,
    /// The number of the program before that is most like it.
    pub(crate) nearest: Option<u64>,
    /// In a word.
    pub(crate) cause: String,
    /// What differs from that.
    pub(crate) differences: Vec<String>,
    pub(crate) hint: Option<String>,
}

impl Why {
    /// In a line.
    pub(crate) fn text(&self) -> String {
        match (self.nearest, self.differences.first()) {
            (Some(nearest), Some(first)) => format!("unlike program {nearest}: {}", brief(first)),
            (Some(nearest), None) => format!("unlike program {nearest}"),
            (None, _) if self.cause == "first" => "the first program".to_owned(),
            (None, _) => "these lines run for the first time".to_owned(),
        }
    }
}

/// The text with the last part of each path alone.
pub(crate) fn brief(text: &str) -> String {
    let word = |w: &str| w.rsplit('/').next().unwrap_or(w).to_owned();
    let words = text.split(' ').map(|w| if w.starts_with('/') { word(w) } else { w.to_owned() });
    words.collect::<Vec<_>>().join(" ")
}

/// An input that no result overwrites, though nobody uses it after the program.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct Undonated {
    pub(crate) input: u64,
    pub(crate) r#type: String,
    pub(crate) bytes: u64,
    /// The Python line that made it.
    pub(crate) line: Option<String>,
    /// `size`: no result has its size; `held`: something still held it.
    pub(crate) reason: String,
}

/// A tensor that goes into a program or comes out of it.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Tensor {
    /// `argument` or `output`.
    pub(crate) role: &'static str,
    /// Dtype and shape.
    pub(crate) r#type: String,
    /// On one device.
    pub(crate) bytes: u64,
    /// Along which axes of the mesh each dimension is split, `-` for none.
    pub(crate) split: Option<String>,
    /// Whether an output takes its memory.
    pub(crate) overwritten: bool,
    /// The operation that makes it, if the program does.
    pub(crate) op: Option<String>,
    /// The Python line that made it; for parameters that of the optimizer's step.
    pub(crate) line: Option<String>,
}

/// Copies between host and device that a line makes in a step.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct Moved {
    pub(crate) step: u64,
    pub(crate) line: Option<String>,
    pub(crate) count: u64,
    pub(crate) bytes: u64,
}

/// Ops that ran on the CPU.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct FellBack {
    pub(crate) step: u64,
    pub(crate) line: Option<String>,
    pub(crate) op: String,
    pub(crate) count: u64,
}

const UNKNOWN: &Role = &Role { role: String::new(), name: None };

/// The dimensions in `float32[64, 32]`.
pub(crate) fn shape(text: &str) -> Vec<u64> {
    let inner = text.split_once('[').and_then(|(_, rest)| rest.split_once(']')).map_or("", |(dims, _)| dims);
    inner.split(',').filter_map(|n| n.trim().parse().ok()).collect()
}

/// Tensors of a program that are named.
const LARGEST: usize = 16;

impl Capture {
    /// Whether another memory or kind of device could have led to other programs: the script asked for them, or a program
    /// was cut because of its memory.
    pub(crate) fn depends_on_device(&self) -> bool {
        self.described || self.programs.iter().any(|p| p.ended_by.as_deref() == Some("bytes"))
    }
}

impl Captured {
    pub(crate) fn input_role(&self, i: usize) -> &Role {
        self.input_roles.get(i).unwrap_or(UNKNOWN)
    }

    pub(crate) fn output_role(&self, i: usize) -> &Role {
        self.output_roles.get(i).unwrap_or(UNKNOWN)
    }

    pub(crate) fn input_shape(&self, i: usize) -> Vec<u64> {
        self.inputs.get(i).map_or_else(Vec::new, |t| shape(t))
    }

    pub(crate) fn output_shape(&self, i: usize) -> Vec<u64> {
        self.outputs.get(i).and_then(Option::as_deref).map_or_else(Vec::new, shape)
    }

    pub(crate) fn launches_in(&self, step: u64) -> u64 {
        self.launches.iter().filter(|(s, _)| *s == step).map(|(_, n)| n).sum()
    }

    pub(crate) fn work(&self, chip: Option<&Chip>, outcome: &Outcome) -> Option<Work> {
        let (flops, bytes_accessed) = (outcome.flops?, outcome.bytes_accessed?);
        let product_flops = self.products.iter().map(|p| p.flops).sum();
        let passed =
            |c: &Chip| self.products.iter().map(|p| p.flops * c.passes(&p.dtype, &p.precision)).sum::<f64>();
        let times = chip.map(|c| (passed(c) / c.device_flops(), bytes_accessed / c.device_bytes_per_s()));
        let ici = outcome.collectives.as_ref().map(|all| all.iter().filter_map(|c| c.ici_s).sum::<f64>());
        let mut work = Work {
            flops,
            product_flops,
            bytes_accessed,
            mxu_s: times.map(|t| t.0),
            hbm_s: times.map(|t| t.1),
            ici_s: ici,
            roofline_s: times.map(|t| t.0.max(t.1).max(ici.unwrap_or(0.0))),
            ..Work::default()
        };
        work.finish(chip);
        Some(work)
    }

    /// The largest tensors that go in and come out.
    pub(crate) fn largest(&self) -> Vec<Tensor> {
        let mut all = self.tensors();
        all.sort_by_key(|t| std::cmp::Reverse(t.bytes)); // stable: arguments before the outputs that overwrite them
        all.truncate(LARGEST);
        all
    }

    /// What goes in and what comes out.
    pub(crate) fn tensors(&self) -> Vec<Tensor> {
        let inputs = self.inputs.iter().enumerate().map(|(i, ty)| Tensor {
            role: "argument",
            r#type: ty.clone(),
            bytes: self.input_bytes.get(i).copied().unwrap_or(0),
            split: self.input_splits.get(i).cloned().flatten(),
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
                split: self.output_splits.get(i).cloned().flatten(),
                overwritten: false,
                op: made.map(|o| o.op.clone()),
                line: made.and_then(|o| o.line.clone()),
            }
        });
        inputs.chain(outputs).collect()
    }

    /// What is known of its memory though the compiler gave up.
    pub(crate) fn known_memory(&self, message: &str) -> Memory {
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
pub(crate) fn amounts(message: &str) -> (Option<u64>, Option<u64>) {
    let after = |mark: &str| {
        let (_, rest) = message.split_once(mark)?;
        let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let number: f64 = rest[..end].parse().ok()?;
        let power = "KMGT".find(rest[end..].chars().next()?).map_or(0, |i| i + 1);
        Some((number * 1024f64.powi(power as i32)) as u64)
    };
    (after("temporaries ("), after("Used "))
}
