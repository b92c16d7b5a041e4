//! Where the memory of a program is when it needs most: buffers with their tensors, operations and lines.

use std::fmt::Write;

use anstyle::Style;
use serde::Serialize;

use super::capture::Captured;
use super::dumps::{self, AtPeak, Place};
use super::verdict::Judgement;
use crate::graphs::short;
use crate::report::bytes;

/// A buffer that is alive when a program needs most.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Buffer {
    /// `argument`, `output` or `temporary`.
    pub(crate) role: &'static str,
    /// What an argument is for: `parameter`, `gradient`, `state`, `buffer`, `data`, `intermediate`, `number`, `other`.
    pub(crate) purpose: Option<String>,
    /// What Python calls it, such as the name of a parameter.
    pub(crate) name: Option<String>,
    /// Dtype and shape.
    pub(crate) r#type: String,
    /// How it lies in memory, as XLA writes it.
    pub(crate) layout: String,
    pub(crate) bytes: u64,
    /// Without padding.
    pub(crate) unpadded_bytes: u64,
    /// Whether an output takes its memory.
    pub(crate) overwritten: bool,
    /// The operation that makes it.
    pub(crate) op: Option<String>,
    /// The Python line of that; for the backward pass, that of the forward operation.
    pub(crate) line: Option<String>,
    pub(crate) backward: bool,
    /// Whether the forward pass makes it and the backward pass reads it.
    pub(crate) activation: bool,
    /// The instruction of the optimized program.
    pub(crate) instruction: String,
}

/// Buffers in a report.
const REPORTED: usize = 32;
/// Buffers that are listed.
const SHOWN: usize = 8;

/// Dtype and shape of XLA's `f32[8,128]{1,0:T(8,128)}`, its layout, and its bytes without padding.
fn split(shape: &str) -> Option<(&'static str, Vec<u64>, &str, u64)> {
    let (dtype, rest) = shape.split_once('[')?;
    let (dims, layout) = rest.split_once(']')?;
    let dims: Vec<u64> =
        dims.split(',').filter(|d| !d.is_empty()).map(str::parse).collect::<Result<_, _>>().ok()?;
    let (name, bits) = DTYPES.iter().find(|(hlo, ..)| *hlo == dtype).map(|(_, name, bits)| (*name, *bits))?;
    let bytes = (dims.iter().product::<u64>() * bits).div_ceil(8);
    Some((name, dims, layout, bytes))
}

/// XLA's names, PyTorch's, and bits of an element.
const DTYPES: &[(&str, &str, u64)] = &[
    ("pred", "bool", 8),
    ("s4", "int4", 4),
    ("u4", "uint4", 4),
    ("s8", "int8", 8),
    ("s16", "int16", 16),
    ("s32", "int32", 32),
    ("s64", "int64", 64),
    ("u8", "uint8", 8),
    ("u16", "uint16", 16),
    ("u32", "uint32", 32),
    ("u64", "uint64", 64),
    ("f8e4m3fn", "float8_e4m3fn", 8),
    ("f8e5m2", "float8_e5m2", 8),
    ("bf16", "bfloat16", 16),
    ("f16", "float16", 16),
    ("f32", "float32", 32),
    ("f64", "float64", 64),
    ("c64", "complex64", 64),
    ("c128", "complex128", 128),
];

impl Captured {
    /// All buffers that are known of a program's peak, the largest first.
    pub(crate) fn buffers(&self, peak: &AtPeak) -> Vec<Buffer> {
        peak.buffers.iter().filter_map(|b| self.buffer(b)).collect()
    }

    fn buffer(&self, b: &dumps::Buffer) -> Option<Buffer> {
        let (dtype, dims, layout, unpadded_bytes) = split(&b.shape)?; // tuples are lists of addresses
        let dims: Vec<String> = dims.iter().map(u64::to_string).collect();
        let made = b.op.and_then(|i| self.ops.get(i as usize));
        let mut out = Buffer {
            role: "temporary",
            purpose: None,
            name: None,
            r#type: format!("{dtype}[{}]", dims.join(", ")),
            layout: layout.to_owned(),
            bytes: b.bytes,
            unpadded_bytes,
            overwritten: false,
            op: made.map(|o| o.op.clone()),
            line: made.and_then(|o| o.line.clone()),
            backward: made.is_some_and(|o| o.backward),
            activation: false,
            instruction: b.name.clone(),
        };
        match b.place {
            Place::Argument(n) => {
                let n = n as usize;
                out.role = "argument";
                out.overwritten = self.donated.contains(&(n as u32));
                let role = self.input_roles.get(n);
                out.purpose = role.map(|r| r.role.clone());
                out.name = role.and_then(|r| r.name.clone());
                (out.op, out.line) = (None, self.input_lines.get(n).cloned().flatten());
                out.backward = false;
            }
            Place::Output => out.role = "output",
            Place::Temporary => {
                let first = self.ops.iter().position(|o| o.backward).unwrap_or(usize::MAX);
                let is_forward = b.op.is_some_and(|i| (i as usize) < first);
                out.activation = is_forward && b.last_reader.is_some_and(|i| i as usize >= first);
            }
        }
        Some(out)
    }
}

/// Those that a report has, and the bytes of all others.
pub(crate) fn reported(all: &[Buffer], peak: &AtPeak) -> (Vec<Buffer>, u64) {
    let kept = all.iter().take(REPORTED).cloned().collect();
    let rest: u64 = all.iter().skip(REPORTED).map(|b| b.bytes).sum();
    (kept, rest + peak.rest_bytes + peak.gaps_bytes)
}

impl Buffer {
    fn text(&self) -> String {
        let mut out = format!("{:>10}  {:9} {}", bytes(self.bytes), self.role, self.r#type);
        if self.bytes > self.unpadded_bytes + self.unpadded_bytes / 10 {
            let _ = write!(out, " padded from {}", bytes(self.unpadded_bytes));
        }
        if let Some(name) = &self.name {
            let _ = write!(out, ", {name}");
        }
        let line = self.line.as_deref().map_or("an unknown line", short);
        let _ = write!(out, ", {line}");
        if let Some(op) = &self.op {
            let _ = write!(out, " {op}");
        }
        let notes = [
            (self.backward, "backward"),
            (self.activation, "kept for the backward"),
            (self.overwritten, "overwritten"),
        ];
        for (_, note) in notes.iter().filter(|(is, _)| *is) {
            let _ = write!(out, ", {note}");
        }
        out
    }
}

/// The largest of a program, for the terminal.
pub(crate) fn text(p: &Judgement) -> String {
    let bold = Style::new().bold();
    let mut out = format!("\n  {bold}its largest buffers when it needs most{bold:#}\n");
    for b in p.buffers_at_peak.iter().take(SHOWN) {
        let _ = writeln!(out, "    {}", b.text());
    }
    let rest: u64 = p.buffers_at_peak.iter().skip(SHOWN).map(|b| b.bytes).sum();
    let _ = writeln!(out, "    {:>10}  all others, and gaps", bytes(rest + p.buffers_rest_bytes));
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_are_read() {
        assert_eq!(
            split("bf16[3,4]{1,0:T(8,128)(2,1)}"),
            Some(("bfloat16", vec![3, 4], "{1,0:T(8,128)(2,1)}", 24))
        );
        assert_eq!(split("f32[]{:T(128)}"), Some(("float32", vec![], "{:T(128)}", 4)));
        assert_eq!(split("(f32[8]{0}, f32[])"), None);
    }

    #[test]
    fn what_the_backward_reads_is_an_activation() {
        let op = |name: &str, line: &str, backward: bool| serde_json::json!({"op": name, "line": line, "backward": backward});
        let captured: Captured = serde_json::from_value(serde_json::json!({
            "id": "a", "name": "mm", "first_line": null, "ended_by": null, "ended_at": null,
            "ops": [op("mm", "a.py:3 in f", false), op("tanh", "a.py:4 in f", false), op("mm", "a.py:3 in f", true)],
            "inputs": ["float32[8]"], "input_lines": ["a.py:1"], "input_roles": [{"role": "parameter", "name": "w"}],
            "outputs": [], "output_ops": [], "launches": [], "beside_bytes": 0,
            "input_bytes": [32], "output_bytes": [], "donated": [0], "products": [],
        }))
        .unwrap();
        let buffer = |place, op, last_reader| dumps::Buffer {
            place,
            name: "x".into(),
            shape: "f32[8]{0:T(128)}".into(),
            bytes: 512,
            op,
            last_reader,
        };
        let peak = AtPeak {
            buffers: vec![
                buffer(Place::Temporary, Some(0), Some(2)),
                buffer(Place::Temporary, Some(0), Some(1)),
                buffer(Place::Temporary, Some(2), Some(2)),
                buffer(Place::Argument(0), Some(2), None),
            ],
            ..AtPeak::default()
        };
        let all = captured.buffers(&peak);
        let told: Vec<_> = all.iter().map(|b| (b.role, b.activation, b.backward)).collect();
        let temporary = "temporary";
        assert_eq!(
            told,
            [
                (temporary, true, false),
                (temporary, false, false),
                (temporary, false, true),
                ("argument", false, false)
            ]
        );
        let text = all[0].text();
        assert!(text.ends_with("float32[8] padded from 32 B, a.py:3 mm, kept for the backward"), "{text}");
        let text = all[3].text();
        assert!(text.ends_with(", w, a.py:1, overwritten"), "{text}");
    }
}
