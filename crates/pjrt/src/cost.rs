//! What a program has to do, counted from its instructions, for plugins that do not say it.
//!
//! Each instruction of the optimized program reads its operands from memory and writes its result there; those of a fusion
//! stay on the chip. That is how XLA counts, too.

use std::collections::HashMap;

use oxitorch_proto::hlo::{HloComputationProto, HloInstructionProto, ShapeProto};

use crate::collectives::{bytes, module, trips};
use crate::compiled::OptimizedProgram;

/// What a launch of a program has to do, on one device.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// Operations on numbers, but those of products and convolutions.
    pub flops: f64,
    /// Bytes to and from the device's memory.
    pub bytes: f64,
}

impl OptimizedProgram {
    /// What it has to do; none if the format is not known. A loop that does not say how often it goes round counts once.
    pub fn cost(&self) -> Option<Cost> {
        let module = module(self)?;
        let computations: Computations<'_> = module.computations.iter().map(|c| (c.id, c)).collect();
        Some(of(computations.get(&module.entry_computation_id)?, &computations))
    }
}

type Computations<'m> = HashMap<i64, &'m HloComputationProto>;

/// Of the instructions of a computation that lie in memory.
fn of(c: &HloComputationProto, computations: &Computations<'_>) -> Cost {
    let shapes = shapes(c);
    let mut sum = Cost::default();
    for i in &c.instructions {
        let called = || i.called_computation_ids.iter().filter_map(|id| computations.get(id).copied());
        let inner =
            |times: f64| called().map(|c| of(c, computations)).fold(Cost::default(), |a, b| a.plus(b, times));
        let one = match i.opcode.as_str() {
            "while" => inner(trips(&String::from_utf8_lossy(&i.backend_config)) as f64),
            // Of several branches one is taken.
            "conditional" => called().map(|c| of(c, computations)).fold(Cost::default(), Cost::most),
            "call" | "async-start" => inner(1.0),
            "fusion" => called().next().map_or_else(Cost::default, |fused| of_fusion(i, fused, &shapes)),
            _ => Cost { flops: flops(i, &shapes), bytes: traffic(i, &shapes) },
        };
        sum = sum.plus(one, 1.0);
    }
    sum
}

impl Cost {
    fn plus(self, other: Cost, times: f64) -> Cost {
        Cost { flops: self.flops + times * other.flops, bytes: self.bytes + times * other.bytes }
    }

    fn most(self, other: Cost) -> Cost {
        Cost { flops: self.flops.max(other.flops), bytes: self.bytes.max(other.bytes) }
    }
}

type Shapes<'m> = HashMap<i64, &'m ShapeProto>;

fn shapes(c: &HloComputationProto) -> Shapes<'_> {
    c.instructions.iter().filter_map(|i| Some((i.id, i.shape.as_ref()?))).collect()
}

fn elements(s: Option<&ShapeProto>) -> f64 {
    s.map_or(0.0, |s| s.dimensions.iter().map(|&d| d.max(0) as f64).product())
}

fn size(s: Option<&ShapeProto>) -> f64 {
    s.map_or(0, bytes) as f64
}

/// What is in memory already, is only a name for it, or moves nothing.
const FREE: [&str; 13] = [
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "after-all",
    "partition-id",
    "replica-id",
    "add-dependency",
    "opt-barrier",
    "async-update",
    "async-done",
    "copy-done",
];

/// Bytes of an instruction's operands and result.
fn traffic(i: &HloInstructionProto, shapes: &Shapes<'_>) -> f64 {
    let opcode = i.opcode.as_str();
    if FREE.contains(&opcode) || opcode.ends_with("-done") {
        return 0.0;
    }
    let of = |n: usize| size(i.operand_ids.get(n).and_then(|id| shapes.get(id)).copied());
    let result = written(i);
    match opcode {
        "slice" | "dynamic-slice" | "gather" => 2.0 * result,
        "dynamic-update-slice" => 2.0 * of(1),
        "scatter" => 3.0 * of(2), // updates, and the places they go to
        "iota" | "rng" => result,
        _ => (0..i.operand_ids.len()).map(of).sum::<f64>() + result,
    }
}

/// The bytes of the result. That of a library's product has room for its work beside it.
fn written(i: &HloInstructionProto) -> f64 {
    let Some(s) = i.shape.as_ref() else { return 0.0 };
    match (i.opcode.as_str(), s.tuple_shapes.split_last()) {
        ("custom-call", Some((last, results)))
            if BYTES.contains(&last.element_type) && last.dimensions.len() == 1 =>
        {
            results.iter().map(|s| bytes(s) as f64).sum()
        }
        // What begins here has its operands in its result.
        (opcode, Some((last, _))) if opcode.ends_with("-start") => bytes(last) as f64,
        _ => bytes(s) as f64,
    }
}

/// `PrimitiveType` of 8-bit integers.
const BYTES: [i32; 2] = [2, 6];

/// A fusion reads its parameters, or the parts of them that it takes, and writes its results, or the parts that it changes.
fn of_fusion(i: &HloInstructionProto, fused: &HloComputationProto, outer: &Shapes<'_>) -> Cost {
    let shapes = shapes(fused);
    let mut readers: HashMap<i64, Vec<&HloInstructionProto>> = HashMap::new();
    for reader in &fused.instructions {
        reader.operand_ids.iter().for_each(|&id| readers.entry(id).or_default().push(reader));
    }
    let read = |p: &HloInstructionProto| -> f64 {
        let whole =
            size(i.operand_ids.get(p.parameter_number.max(0) as usize).and_then(|id| outer.get(id)).copied());
        let parts = readers.get(&p.id).into_iter().flatten().map(|r| match r.opcode.as_str() {
            "slice" | "dynamic-slice" | "gather" if r.operand_ids.first() == Some(&p.id) => {
                size(r.shape.as_ref())
            }
            "dynamic-update-slice" if r.operand_ids.first() == Some(&p.id) => 0.0,
            _ => f64::INFINITY,
        });
        parts.sum::<f64>().min(whole)
    };
    let by_id: HashMap<i64, &HloInstructionProto> = fused.instructions.iter().map(|i| (i.id, i)).collect();
    let root = by_id.get(&fused.root_id).copied();
    let results: Vec<&HloInstructionProto> = match root {
        Some(r) if r.opcode == "tuple" => {
            r.operand_ids.iter().filter_map(|id| by_id.get(id).copied()).collect()
        }
        root => root.into_iter().collect(),
    };
    let write = |r: &HloInstructionProto| match r.opcode.as_str() {
        "dynamic-update-slice" => size(r.operand_ids.get(1).and_then(|id| shapes.get(id)).copied()),
        _ => size(r.shape.as_ref()),
    };
    let parameters = fused.instructions.iter().filter(|i| i.opcode == "parameter");
    Cost {
        flops: fused.instructions.iter().map(|i| flops(i, &shapes)).sum(),
        bytes: parameters.map(read).sum::<f64>() + results.into_iter().map(write).sum::<f64>(),
    }
}

/// Operations on numbers: one for each element of the result, and for each that is summed up.
fn flops(i: &HloInstructionProto, shapes: &Shapes<'_>) -> f64 {
    match i.opcode.as_str() {
        "add"
        | "subtract"
        | "multiply"
        | "divide"
        | "negate"
        | "abs"
        | "sign"
        | "maximum"
        | "minimum"
        | "compare"
        | "select"
        | "clamp"
        | "and"
        | "or"
        | "xor"
        | "not"
        | "remainder"
        | "power"
        | "sqrt"
        | "rsqrt"
        | "cbrt"
        | "exponential"
        | "exponential-minus-one"
        | "log"
        | "log-plus-one"
        | "logistic"
        | "tanh"
        | "tan"
        | "sine"
        | "cosine"
        | "erf"
        | "atan2"
        | "floor"
        | "ceil"
        | "round-nearest-even"
        | "round-nearest-afz"
        | "shift-left"
        | "shift-right-logical"
        | "shift-right-arithmetic" => elements(i.shape.as_ref()),
        "reduce" => {
            // The first half are what is summed, the others where the sums begin.
            let summed = i.operand_ids.len() / 2;
            i.operand_ids.iter().take(summed).map(|id| elements(shapes.get(id).copied())).sum()
        }
        "reduce-window" | "select-and-scatter" => {
            let window = i.window.iter().flat_map(|w| &w.dimensions).map(|d| d.size as f64);
            elements(i.shape.as_ref()) * window.product::<f64>()
        }
        _ => 0.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collectives::tests::{calls, f32s, op};
    use oxitorch_proto::Message;
    use oxitorch_proto::hlo::HloModuleProto;

    fn cost(computations: Vec<Vec<HloInstructionProto>>) -> Cost {
        let computations = computations.into_iter().enumerate().map(|(id, instructions)| {
            let root_id = instructions.last().unwrap().id;
            HloComputationProto { id: id as i64, root_id, instructions, ..Default::default() }
        });
        let module = HloModuleProto { computations: computations.collect(), ..Default::default() };
        OptimizedProgram { format: "hlo".into(), code: module.encode_to_vec() }.cost().unwrap()
    }

    fn parameter(id: i64, n: i64, dims: &[i64]) -> HloInstructionProto {
        HloInstructionProto { parameter_number: n, ..op(id, "parameter", f32s(dims), &[]) }
    }

    #[test]
    fn instructions_read_their_operands_and_write_their_results() {
        let found = cost(vec![vec![
            parameter(0, 0, &[8, 4]),
            parameter(1, 1, &[8, 4]),
            op(2, "add", f32s(&[8, 4]), &[0, 1]),
            op(3, "bitcast", f32s(&[32]), &[2]),
            op(4, "slice", f32s(&[2]), &[3]),
            op(5, "dot", f32s(&[8, 8]), &[2, 1]),
        ]]);
        assert_eq!(found, Cost { flops: 32.0, bytes: 4.0 * (3.0 * 32.0 + 2.0 * 2.0 + 32.0 + 32.0 + 64.0) });
    }

    #[test]
    fn a_fusion_reads_what_it_takes_and_writes_what_it_changes() {
        let found = cost(vec![
            vec![
                parameter(0, 0, &[100]),
                parameter(1, 1, &[100]),
                calls(op(2, "fusion", f32s(&[100]), &[0, 1]), 1),
            ],
            vec![
                parameter(10, 0, &[100]),
                parameter(11, 1, &[100]),
                op(12, "constant", f32s(&[]), &[]),
                op(13, "dynamic-slice", f32s(&[4]), &[11, 12]),
                op(14, "multiply", f32s(&[4]), &[13, 13]),
                op(15, "dynamic-update-slice", f32s(&[100]), &[10, 14, 12]),
            ],
        ]);
        assert_eq!(found, Cost { flops: 4.0, bytes: 4.0 * (4.0 + 4.0) });
    }

    #[test]
    fn loops_count_as_often_as_they_go_round() {
        let body = vec![parameter(10, 0, &[6]), op(11, "negate", f32s(&[6]), &[10])];
        let known = HloInstructionProto {
            backend_config: b"{\"known_trip_count\":{\"n\":\"5\"}}".to_vec(),
            ..calls(op(1, "while", None, &[0]), 1)
        };
        let found = cost(vec![vec![parameter(0, 0, &[6]), known], body]);
        assert_eq!(found, Cost { flops: 30.0, bytes: 5.0 * 48.0 });
    }

    #[test]
    fn room_for_a_librarys_work_is_no_result() {
        let room = ShapeProto { element_type: BYTES[0], dimensions: vec![1 << 20], ..Default::default() };
        let both = ShapeProto {
            element_type: 13,
            tuple_shapes: vec![f32s(&[4, 4]).unwrap(), room],
            ..Default::default()
        };
        let found = cost(vec![vec![parameter(0, 0, &[4, 4]), op(1, "custom-call", Some(both), &[0, 0])]]);
        assert_eq!(found, Cost { flops: 0.0, bytes: 3.0 * 64.0 });
    }
}
