//! What a program has to do, counted from its instructions, for plugins that do not say it.
//!
//! Each instruction of the optimized program reads its operands from memory and writes its result there; those of a fusion
//! stay on the chip. That is how XLA counts, too.

use std::collections::HashMap;

use oxitorch_proto::hlo::{HloComputationProto, HloInstructionProto, ShapeProto};

use crate::collectives::{bytes, module};
use crate::compiled::OptimizedProgram;
use crate::loops::{Computations, rounds};

/// What a launch of a program has to do, on one device.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// Operations on numbers, but those of products and convolutions.
    pub flops: f64,
    /// Bytes to and from the device's memory.
    pub bytes: f64,
}

/// The same with the rounds of loops, and without.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Costs {
    /// Of a launch.
    pub all: Cost,
    /// If each loop went round once, which is how libtpu counts.
    pub once: Cost,
}

impl OptimizedProgram {
    /// What it has to do; none if the format is not known. A loop of which nothing says how often it goes round counts once.
    pub fn costs(&self) -> Option<Costs> {
        let module = module(self)?;
        let computations: Computations<'_> = module.computations.iter().map(|c| (c.id, c)).collect();
        let entry = computations.get(&module.entry_computation_id)?;
        let [all, once] = [true, false].map(|goes_round| of(entry, &computations, goes_round));
        Some(Costs { all, once })
    }
}

/// Of the instructions of a computation that lie in memory.
fn of(c: &HloComputationProto, computations: &Computations<'_>, goes_round: bool) -> Cost {
    let shapes = shapes(c);
    let mut sum = Cost::default();
    for i in &c.instructions {
        let called = || i.called_computation_ids.iter().filter_map(|id| computations.get(id).copied());
        let costs = || called().map(|c| of(c, computations, goes_round));
        let inner = |times: f64| costs().fold(Cost::default(), |a, b| a.plus(b, times));
        let one = match i.opcode.as_str() {
            "while" => inner(if goes_round { rounds(i, c, computations) as f64 } else { 1.0 }),
            // Of several branches one is taken.
            "conditional" => costs().fold(Cost::default(), Cost::most),
            "call" | "async-start" => inner(1.0),
            "fusion" => Fusion::of(i, computations).map_or_else(Cost::default, |f| f.cost(i, &shapes)),
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

/// Room in memory for what is written piece by piece.
const ROOM: &str = "AllocateBuffer";

/// Bytes of an instruction's operands and result.
fn traffic(i: &HloInstructionProto, shapes: &Shapes<'_>) -> f64 {
    let opcode = i.opcode.as_str();
    if FREE.contains(&opcode) || opcode.ends_with("-done") || i.custom_call_target == ROOM {
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
/// libtpu's have fusions in them.
struct Fusion<'m> {
    instructions: HashMap<i64, &'m HloInstructionProto>,
    shapes: Shapes<'m>,
    root: i64,
    computations: &'m Computations<'m>,
}

impl<'m> Fusion<'m> {
    fn of(i: &HloInstructionProto, computations: &'m Computations<'m>) -> Option<Fusion<'m>> {
        let c = *computations.get(i.called_computation_ids.first()?)?;
        let instructions = c.instructions.iter().map(|i| (i.id, i)).collect();
        Some(Fusion { instructions, shapes: shapes(c), root: c.root_id, computations })
    }

    fn inner(&self, i: &HloInstructionProto) -> Option<Fusion<'m>> {
        (i.opcode == "fusion").then(|| Fusion::of(i, self.computations)).flatten()
    }

    /// The instruction that this one is, or is another name for.
    fn named(&self, mut id: i64) -> i64 {
        while let Some(of) = self.instructions.get(&id).filter(|i| i.opcode == "bitcast") {
            let Some(&operand) = of.operand_ids.first() else { break };
            id = operand;
        }
        id
    }

    fn results(&self) -> Vec<i64> {
        match self.instructions.get(&self.root) {
            Some(root) if root.opcode == "tuple" => {
                root.operand_ids.iter().map(|&id| self.named(id)).collect()
            }
            _ => vec![self.named(self.root)],
        }
    }

    /// Bytes of a parameter that are read; more than there are if all of it is.
    fn read(&self, parameter: usize) -> f64 {
        let is_it =
            |i: &&&HloInstructionProto| i.opcode == "parameter" && i.parameter_number == parameter as i64;
        let Some(it) = self.instructions.values().find(is_it) else { return 0.0 };
        if self.results().contains(&it.id) {
            return f64::INFINITY;
        }
        let reads = |r: &HloInstructionProto| -> f64 {
            let places = (0..).zip(&r.operand_ids).filter(|(_, id)| self.named(**id) == it.id);
            let read = |(at, _): (usize, _)| match r.opcode.as_str() {
                "bitcast" => 0.0,
                "slice" | "dynamic-slice" | "gather" if at == 0 => size(r.shape.as_ref()),
                "dynamic-update-slice" if at == 0 => 0.0,
                _ => self.inner(r).map_or(f64::INFINITY, |inner| inner.read(at)),
            };
            places.map(read).sum()
        };
        self.instructions.values().map(|r| reads(r)).sum()
    }

    fn written(&self) -> f64 {
        let result = |r: &&HloInstructionProto| match r.opcode.as_str() {
            "dynamic-update-slice" => size(r.operand_ids.get(1).and_then(|id| self.shapes.get(id)).copied()),
            _ => self.inner(r).map_or_else(|| size(r.shape.as_ref()), |inner| inner.written()),
        };
        self.results().iter().filter_map(|id| self.instructions.get(id)).map(result).sum()
    }

    fn flops(&self) -> f64 {
        let of = |i: &&HloInstructionProto| {
            self.inner(i).map_or_else(|| flops(i, &self.shapes), |inner| inner.flops())
        };
        self.instructions.values().map(of).sum()
    }

    /// Of it with these operands.
    fn cost(&self, i: &HloInstructionProto, outer: &Shapes<'_>) -> Cost {
        let read = |(at, id): (usize, &i64)| self.read(at).min(size(outer.get(id).copied()));
        let bytes = i.operand_ids.iter().enumerate().map(read).sum::<f64>() + self.written();
        Cost { flops: self.flops(), bytes }
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
        costs(computations).all
    }

    fn costs(computations: Vec<Vec<HloInstructionProto>>) -> Costs {
        let computations = computations.into_iter().enumerate().map(|(id, instructions)| {
            let root_id = instructions.last().unwrap().id;
            HloComputationProto { id: id as i64, root_id, instructions, ..Default::default() }
        });
        let module = HloModuleProto { computations: computations.collect(), ..Default::default() };
        OptimizedProgram { format: "hlo".into(), code: module.encode_to_vec() }.costs().unwrap()
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
    fn a_fusion_in_a_fusion_takes_parts_of_what_comes_to_both() {
        let found = cost(vec![
            vec![parameter(0, 0, &[100]), calls(op(2, "fusion", f32s(&[100]), &[0, 0]), 1)],
            vec![
                parameter(10, 0, &[100]),
                parameter(11, 1, &[100]),
                op(12, "bitcast", f32s(&[10, 10]), &[11]),
                calls(op(13, "fusion", f32s(&[10]), &[12]), 2),
                op(14, "constant", f32s(&[]), &[]),
                op(15, "dynamic-update-slice", f32s(&[100]), &[10, 13, 14]),
                op(16, "bitcast", f32s(&[100]), &[15]),
            ],
            vec![
                parameter(20, 0, &[10, 10]),
                op(21, "slice", f32s(&[1, 10]), &[20]),
                op(22, "negate", f32s(&[1, 10]), &[21]),
                op(23, "bitcast", f32s(&[10]), &[22]),
            ],
        ]);
        assert_eq!(found, Cost { flops: 10.0, bytes: 4.0 * (10.0 + 10.0) });
    }

    #[test]
    fn loops_count_as_often_as_they_go_round() {
        let body = vec![parameter(10, 0, &[6]), op(11, "negate", f32s(&[6]), &[10])];
        let known = HloInstructionProto {
            backend_config: b"{\"known_trip_count\":{\"n\":\"5\"}}".to_vec(),
            ..calls(op(1, "while", None, &[0]), 1)
        };
        let found = costs(vec![vec![parameter(0, 0, &[6]), known], body]);
        let once = Cost { flops: 6.0, bytes: 48.0 };
        assert_eq!(found, Costs { all: Cost { flops: 30.0, bytes: 5.0 * 48.0 }, once });
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
