//! How often a loop of an optimized program goes round.

use std::collections::HashMap;

use oxitorch_proto::hlo::{HloComputationProto, HloInstructionProto};

/// The computations of a module by their numbers.
pub(crate) type Computations<'m> = HashMap<i64, &'m HloComputationProto>;

/// How often a loop of this computation goes round; 1 if that is not known. XLA's compilers for CPUs and GPUs note it, and
/// libtpu leaves it to the loop's counter.
pub(crate) fn rounds(
    i: &HloInstructionProto,
    outer: &HloComputationProto,
    computations: &Computations<'_>,
) -> u64 {
    noted(&String::from_utf8_lossy(&i.backend_config))
        .or_else(|| counted(i, outer, computations))
        .unwrap_or(1)
}

fn noted(config: &str) -> Option<u64> {
    let (_, rest) = config.split_once("\"known_trip_count\":{\"n\":\"")?;
    rest.split_once('"')?.0.parse().ok()
}

/// Of a loop over a tuple with a counter in it, which goes on while that is less than a constant.
fn counted(
    i: &HloInstructionProto,
    outer: &HloComputationProto,
    computations: &Computations<'_>,
) -> Option<u64> {
    let &[body, condition] = i.called_computation_ids.as_slice() else { return None };
    let (body, condition) = (computations.get(&body)?, computations.get(&condition)?);
    let goes_on = source(condition, condition.root_id)?;
    let &[counter, most] = goes_on.operand_ids.as_slice() else { return None };
    if goes_on.opcode != "compare" || goes_on.comparison_direction != "LT" {
        return None;
    }
    let at = element(condition, counter)?;
    let most = number(condition, most)?;
    let first = number(outer, part(outer, *i.operand_ids.first()?, at)?)?;
    let next = source(body, part(body, body.root_id, at)?)?;
    let &[a, b] = next.operand_ids.as_slice() else { return None };
    let step = match next.opcode.as_str() {
        "add" if element(body, a) == Some(at) => number(body, b)?,
        "add" if element(body, b) == Some(at) => number(body, a)?,
        _ => return None,
    };
    let all = most.checked_sub(first)?;
    (step > 0 && all >= 0).then(|| (all as u64).div_ceil(step as u64))
}

/// An instruction, or what it is a copy of.
fn source(c: &HloComputationProto, id: i64) -> Option<&HloInstructionProto> {
    let mut found = c.instructions.iter().find(|i| i.id == id)?;
    while found.opcode == "copy" {
        let of = *found.operand_ids.first()?;
        found = c.instructions.iter().find(|i| i.id == of)?;
    }
    Some(found)
}

/// The instruction that makes this element of a tuple.
fn part(c: &HloComputationProto, tuple: i64, at: i64) -> Option<i64> {
    let tuple = source(c, tuple).filter(|i| i.opcode == "tuple")?;
    tuple.operand_ids.get(usize::try_from(at).ok()?).copied()
}

/// Which element of the computation's parameter an instruction is.
fn element(c: &HloComputationProto, id: i64) -> Option<i64> {
    let taken = source(c, id).filter(|i| i.opcode == "get-tuple-element")?;
    let of = source(c, *taken.operand_ids.first()?)?;
    (of.opcode == "parameter").then_some(taken.tuple_index)
}

/// The number that an instruction is.
fn number(c: &HloComputationProto, id: i64) -> Option<i64> {
    let constant = source(c, id).filter(|i| i.opcode == "constant")?;
    let l = constant.literal.as_ref()?;
    let (ints, longs) = (l.s32s.first().map(|&n| n.into()), l.s64s.first().copied());
    ints.or(longs).or(l.u32s.first().map(|&n| n.into()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collectives::tests::op;
    use oxitorch_proto::hlo::LiteralProto;

    fn constant(id: i64, n: i32) -> HloInstructionProto {
        let literal = Some(LiteralProto { s32s: vec![n], ..Default::default() });
        HloInstructionProto { literal, ..op(id, "constant", None, &[]) }
    }

    fn taken(id: i64, at: i64) -> HloInstructionProto {
        HloInstructionProto { tuple_index: at, ..op(id, "get-tuple-element", None, &[0]) }
    }

    fn computation(id: i64, instructions: Vec<HloInstructionProto>) -> HloComputationProto {
        let root_id = instructions.last().unwrap().id;
        HloComputationProto { id, root_id, instructions, ..Default::default() }
    }

    /// Of a loop whose counter is the second element of its tuple.
    fn of(first: i32, step: i32, most: i32, direction: &str) -> u64 {
        let looped = HloInstructionProto { called_computation_ids: vec![1, 2], ..op(4, "while", None, &[3]) };
        let all = [
            computation(
                0,
                vec![
                    constant(0, first),
                    op(1, "copy", None, &[0]),
                    op(2, "iota", None, &[]),
                    op(3, "tuple", None, &[2, 1]),
                    looped.clone(),
                ],
            ),
            computation(
                1,
                vec![
                    op(0, "parameter", None, &[]),
                    taken(1, 0),
                    taken(2, 1),
                    constant(3, step),
                    op(4, "add", None, &[3, 2]),
                    op(5, "tuple", None, &[1, 4]),
                ],
            ),
            computation(
                2,
                vec![
                    op(0, "parameter", None, &[]),
                    taken(1, 1),
                    constant(2, most),
                    HloInstructionProto {
                        comparison_direction: direction.into(),
                        ..op(3, "compare", None, &[1, 2])
                    },
                ],
            ),
        ];
        let computations: Computations<'_> = all.iter().map(|c| (c.id, c)).collect();
        rounds(&looped, &all[0], &computations)
    }

    #[test]
    fn counters_say_how_often() {
        assert_eq!(of(0, 1, 8, "LT"), 8);
        assert_eq!(of(2, 3, 9, "LT"), 3, "2, 5 and 8");
        assert_eq!(of(9, 1, 9, "LT"), 0);
    }

    #[test]
    fn what_is_not_known_is_one() {
        assert_eq!(of(0, 1, 8, "NE"), 1);
        assert_eq!(of(0, -1, 8, "LT"), 1, "it has no end");
        assert_eq!(of(9, 1, 8, "LT"), 1, "it does not go round");
    }
}
