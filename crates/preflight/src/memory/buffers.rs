//! Where the memory of a program is when it needs most: buffers with their tensors, operations and lines.

use oxitorch_capture::{Program, Role};
use serde::Serialize;

use crate::compile::outcome::{self, AtPeak, BufferPlace};

/// A buffer that is alive when a program needs most.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Buffer {
    /// `argument`, `output` or `temporary`.
    pub(crate) role: &'static str,
    /// What an argument is for.
    pub(crate) purpose: Option<Role>,
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

/// All buffers that are known of a program's peak, the largest first.
pub(crate) fn buffers(p: &Program, peak: &AtPeak) -> Vec<Buffer> {
    peak.buffers.iter().filter_map(|b| buffer(p, b)).collect()
}

fn buffer(p: &Program, b: &outcome::Buffer) -> Option<Buffer> {
    let (dtype, dims, layout, unpadded_bytes) = split(&b.shape)?; // tuples are lists of addresses
    let dims: Vec<String> = dims.iter().map(u64::to_string).collect();
    let made = b.op.and_then(|i| p.ops.get(i as usize));
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
        BufferPlace::Argument(n) => {
            let input = p.inputs.get(n as usize);
            out.role = "argument";
            out.overwritten = input.is_some_and(|i| i.donated);
            out.purpose = input.map(|i| i.label.role);
            out.name = input.and_then(|i| i.label.name.clone());
            (out.op, out.line) = (None, input.and_then(|i| i.line.clone()));
            out.backward = false;
        }
        BufferPlace::Output => out.role = "output",
        BufferPlace::Temporary => {
            let first = p.ops.iter().position(|o| o.backward).unwrap_or(usize::MAX);
            let is_forward = b.op.is_some_and(|i| (i as usize) < first);
            out.activation = is_forward && b.last_reader.is_some_and(|i| i as usize >= first);
        }
    }
    Some(out)
}

/// Those that a report has, and the bytes of all others.
pub(crate) fn reported(all: &[Buffer], peak: &AtPeak) -> (Vec<Buffer>, u64) {
    let kept = all.iter().take(REPORTED).cloned().collect();
    let rest: u64 = all.iter().skip(REPORTED).map(|b| b.bytes).sum();
    (kept, rest + peak.rest_bytes + peak.gaps_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use oxitorch_capture::{Input, Label, Op};

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
        let op = |name: &str, line: &str, backward| Op {
            op: name.into(),
            line: Some(line.into()),
            backward,
            ..Op::default()
        };
        let w = Input {
            label: Label { role: Role::Parameter, name: Some("w".into()) },
            line: Some("a.py:1".into()),
            donated: true,
            ..Input::new("float32[8]".parse().unwrap(), 32)
        };
        let program = Program {
            ops: vec![
                op("mm", "a.py:3 in f", false),
                op("tanh", "a.py:4 in f", false),
                op("mm", "a.py:3 in f", true),
            ],
            inputs: vec![w],
            ..Program::default()
        };
        let buffer = |place, op, last_reader| outcome::Buffer {
            place,
            name: "x".into(),
            shape: "f32[8]{0:T(128)}".into(),
            bytes: 512,
            op,
            last_reader,
        };
        let peak = AtPeak {
            buffers: vec![
                buffer(BufferPlace::Temporary, Some(0), Some(2)),
                buffer(BufferPlace::Temporary, Some(0), Some(1)),
                buffer(BufferPlace::Temporary, Some(2), Some(2)),
                buffer(BufferPlace::Argument(0), Some(2), None),
            ],
            ..AtPeak::default()
        };
        let all = buffers(&program, &peak);
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
        let told = (all[3].purpose, all[3].name.as_deref(), all[3].line.as_deref(), all[3].overwritten);
        assert_eq!(told, (Some(Role::Parameter), Some("w"), Some("a.py:1"), true));
        assert_eq!((all[0].r#type.as_str(), all[0].unpadded_bytes), ("float32[8]", 32));
    }
}
