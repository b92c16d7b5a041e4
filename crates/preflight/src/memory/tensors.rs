//! The tensors that go into a program and come out of it, and what they take.

use oxitorch_capture::{Program, TensorType};
use serde::Serialize;

use crate::compile::Memory;

/// A tensor that goes into a program or comes out of it.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Tensor {
    /// `argument` or `output`.
    pub(crate) role: &'static str,
    /// Dtype and shape.
    pub(crate) r#type: TensorType,
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

/// Tensors of a program that are named.
const LARGEST: usize = 16;

/// The largest tensors that go in and come out.
pub(crate) fn largest(p: &Program) -> Vec<Tensor> {
    let mut all = tensors(p);
    all.sort_by_key(|t| std::cmp::Reverse(t.bytes)); // stable: arguments before the outputs that overwrite them
    all.truncate(LARGEST);
    all
}

/// What goes in and what comes out, without numbers that check others.
pub(super) fn tensors(p: &Program) -> Vec<Tensor> {
    let inputs = p.inputs.iter().map(|i| Tensor {
        role: "argument",
        r#type: i.r#type.clone(),
        bytes: i.bytes,
        split: i.split.clone(),
        overwritten: i.donated,
        op: None,
        line: i.line.clone(),
    });
    let outputs = p.outputs.iter().filter_map(|o| {
        let made = p.made(o);
        Some(Tensor {
            role: "output",
            r#type: o.r#type.clone()?,
            bytes: o.bytes,
            split: o.split.clone(),
            overwritten: false,
            op: made.map(|m| m.op.clone()),
            line: made.and_then(|m| m.line.clone()),
        })
    });
    inputs.chain(outputs).collect()
}

/// What is known of a program's memory though the compiler gave up.
pub(crate) fn known_memory(p: &Program, message: &str) -> Memory {
    let mut memory = Memory {
        arguments: p.input_bytes(),
        outputs: p.output_bytes(),
        aliased: p.donated_bytes(),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_are_read_from_messages() {
        assert_eq!(amounts("Used 1.5K of 1K hbm"), (None, Some(1536)));
        assert_eq!(amounts("required for HLO temporaries (2.00M) exceeds"), (Some(2 << 20), None));
        assert_eq!(amounts("odd"), (None, None));
    }
}
