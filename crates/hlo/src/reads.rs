//! Arguments are read before they are overwritten.
//!
//! A backward multiplies by a weight, and the optimizer overwrites it. Nothing says which comes first, as the new weight
//! follows from another product, so XLA copies the weight. Where both products are calls of the host, the second is given a
//! result of the first, which it does not look at.

use crate::ir::{Arena, ArgAttr, Def, Module, Op, OpId, Value};

impl Module {
    /// Has calls of this target that read an argument come before the result that overwrites it, where a call of the same
    /// target is on the way to that result. The target must not mind more operands than it knows of.
    pub fn read_before_overwriting(&mut self, target: &str) {
        let arena = &self.arena;
        let entry = &arena.blocks[0].ops;
        let is_call =
            |id: &OpId| matches!(&arena.ops[*id as usize].op, Op::CustomCall(c) if c.target == target);
        let calls: Vec<usize> = (0..entry.len()).filter(|&at| is_call(&entry[at])).collect();
        if calls.len() < 2 {
            return;
        }
        let mut place = vec![usize::MAX; arena.ops.len()];
        entry.iter().enumerate().for_each(|(at, id)| place[*id as usize] = at);
        let mut later: Vec<(OpId, Value)> = Vec::new();
        for (&param, attrs) in arena.params.iter().zip(&arena.param_attrs) {
            let overwritten = attrs.iter().find_map(|a| match a {
                ArgAttr::AliasingOutput(output) => self.outputs.get(*output as usize),
                _ => None,
            });
            let Some(&new) = overwritten else { continue };
            let reads = |at: &&usize| arena.ops[entry[**at] as usize].operands.contains(&param);
            let mut readers = calls.iter().filter(reads).peekable();
            if readers.peek().is_none() {
                continue;
            }
            let before = before(arena, &place, entry.len(), new);
            for &reader in readers.filter(|at| !before[**at]) {
                let first = arena.ops[entry[reader] as usize].result_values().next();
                let next = calls.iter().find(|at| **at > reader && before[**at]);
                later.extend(next.zip(first).map(|(at, result)| (entry[*at], result)));
            }
        }
        for (op, result) in later {
            let operands = &mut self.arena.ops[op as usize].operands;
            if !operands.contains(&result) {
                operands.push(result);
            }
        }
    }
}

/// Which ops of the main function, by their places, a value follows from.
fn before(arena: &Arena, place: &[usize], count: usize, value: Value) -> Vec<bool> {
    let mut before = vec![false; count];
    let mut open = vec![value];
    while let Some(v) = open.pop() {
        let Def::Op(id) = arena.values[v.0 as usize].def else { continue };
        let at = place[id as usize];
        if at != usize::MAX && !std::mem::replace(&mut before[at], true) {
            open.extend(&arena.ops[id as usize].operands);
        }
    }
    before
}

#[cfg(test)]
mod tests {
    use crate::ir::{ArgAttr, CustomCall, Module, Value};
    use crate::{Builder, DType, TensorType};

    fn ty() -> TensorType {
        TensorType::new(DType::F32, vec![8])
    }

    fn call(b: &Builder, target: &str, operands: &[Value]) -> Value {
        let custom = CustomCall { target: target.into(), ..CustomCall::default() };
        b.custom_call(operands, &[ty()], custom)[0]
    }

    /// A weight that a backward reads for the gradient of its input, and that an optimizer overwrites.
    fn backward(input_first: bool, target: &str) -> Module {
        let b = Builder::new();
        let (weight, grad, x) = (b.param(ty()), b.param(ty()), b.param(ty()));
        b.param_attr(weight, ArgAttr::Donor);
        let of_input = |b: &Builder| call(b, target, &[grad, weight]);
        let of_weight = |b: &Builder| call(b, target, &[grad, x]);
        let (dx, dw) = match input_first {
            true => (of_input(&b), of_weight(&b)),
            false => {
                let dw = of_weight(&b);
                (of_input(&b), dw)
            }
        };
        let new = b.subtract(weight, dw);
        let mut module = b.finish(&[new, dx]).unwrap();
        module.pair_donors();
        module.read_before_overwriting("host");
        module
    }

    fn operands(module: &Module) -> Vec<usize> {
        let is_call = |op: &&crate::ir::OpData| matches!(op.op, crate::ir::Op::CustomCall(_));
        module.arena.ops.iter().filter(is_call).map(|op| op.operands.len()).collect()
    }

    #[test]
    fn the_gradient_of_a_weight_waits_for_who_reads_the_weight() {
        let module = backward(true, "host");
        assert_eq!(operands(&module), [2, 3]);
        assert!(module.to_text().contains("stablehlo.custom_call"));
    }

    #[test]
    fn what_comes_later_and_other_targets_stay() {
        assert_eq!(operands(&backward(false, "host")), [2, 2]);
        assert_eq!(operands(&backward(true, "other")), [2, 2]);
    }

    #[test]
    fn who_is_before_the_result_already_stays() {
        let b = Builder::new();
        let (weight, x) = (b.param(ty()), b.param(ty()));
        b.param_attr(weight, ArgAttr::Donor);
        let y = call(&b, "host", &[x, weight]);
        let new = b.subtract(weight, call(&b, "host", &[y, x]));
        let mut module = b.finish(&[new]).unwrap();
        module.pair_donors();
        module.read_before_overwriting("host");
        assert_eq!(operands(&module), [2, 2]);
    }
}
