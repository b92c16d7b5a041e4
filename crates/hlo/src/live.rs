//! Which ops of a module are needed.

use crate::ir::*;

impl Module {
    /// How many ops would be printed, regions included.
    pub fn live_op_count(&self) -> usize {
        live_ops(&self.arena, &self.outputs).iter().filter(|&&l| l).count()
    }

    /// For each parameter, whether the program reads it.
    pub fn used_params(&self) -> Vec<bool> {
        let mut used = vec![false; self.arena.params.len()];
        let mut mark = |v: &Value| {
            if let Def::Param(index) = self.arena.values[v.0 as usize].def {
                used[index as usize] = true;
            }
        };
        self.outputs.iter().for_each(&mut mark);
        for (op, live) in self.arena.ops.iter().zip(live_ops(&self.arena, &self.outputs)) {
            if live {
                op.operands.iter().for_each(&mut mark);
                let returns = |r: &BlockId| self.arena.blocks[*r as usize].returns.iter();
                op.regions.iter().flat_map(returns).for_each(&mut mark);
            }
        }
        used
    }

    /// Whether XLA fuses all that the first so many results need into what reads them, so that they need no memory of
    /// their own.
    pub fn is_fusible(&self, results: usize) -> bool {
        let live = live_ops(&self.arena, &self.outputs[..results.min(self.outputs.len())]);
        self.arena.ops.iter().zip(live).all(|(op, live)| !live || op.op.is_fusible())
    }
}

/// Which ops are needed for the outputs or have a side effect.
pub(crate) fn live_ops(arena: &Arena, outputs: &[Value]) -> Vec<bool> {
    let mut live = vec![false; arena.ops.len()];
    let mark = |live: &mut Vec<bool>, v: Value| {
        if let Def::Op(id) = arena.values[v.0 as usize].def {
            live[id as usize] = true;
        }
    };
    for &v in outputs {
        mark(&mut live, v);
    }
    // An op comes after its operands and after the ops of its regions, so a walk forwards carries side effects out of
    // regions and a walk backwards carries liveness to operands.
    let mut effects = Vec::new();
    for (id, data) in arena.ops.iter().enumerate() {
        let inside =
            |r: &BlockId| arena.blocks[*r as usize].ops.iter().any(|o| effects.binary_search(o).is_ok());
        if data.op.has_side_effect() || data.regions.iter().any(inside) {
            effects.push(id as OpId);
            live[id] = true;
        }
    }
    for id in (0..arena.ops.len()).rev() {
        if !live[id] {
            continue;
        }
        let data = &arena.ops[id];
        for &v in &data.operands {
            mark(&mut live, v);
        }
        for &r in &data.regions {
            for &v in &arena.blocks[r as usize].returns {
                mark(&mut live, v);
            }
        }
    }
    live
}
