//! Which result takes the memory of which argument that is given away.
//!
//! XLA pairs donated arguments and results by size alone, and copies an argument that is still read when another value
//! is to overwrite it. A result that is computed element by element from an argument (a weight and what the optimizer
//! makes of it) can overwrite it in place, so those are told to XLA as pairs.

use crate::ir::{ArgAttr, Module, Op, Value};
use rustc_hash::FxHashSet;
use smallvec::SmallVec;

/// Parameters that a value is computed from in place, by number. Long sums reach many; a few are enough.
type Sources = SmallVec<[u32; 4]>;
const MAX_SOURCES: usize = 8;

impl Module {
    /// Turns [`ArgAttr::Donor`] into [`ArgAttr::AliasingOutput`] where a result is computed in place.
    pub fn pair_donors(&mut self) {
        for (param, output) in self.pairs() {
            let attrs = &mut self.arena.param_attrs[param as usize];
            attrs.retain(|a| *a != ArgAttr::Donor);
            attrs.push(ArgAttr::AliasingOutput(output as i32));
        }
    }

    /// Parameters and outputs that have a type and a sharding in common and one memory.
    fn pairs(&self) -> Vec<(u32, usize)> {
        let sources = self.sources();
        let mut open: Vec<(usize, Sources)> = Vec::new();
        let mut seen: FxHashSet<Value> = FxHashSet::default();
        for (output, &v) in self.outputs.iter().enumerate() {
            if self.host_outputs.contains(&output) {
                continue;
            }
            let cut = self.output_shardings.get(output);
            let fits = |&&p: &&u32| {
                let arena = &self.arena;
                arena.ty(arena.params[p as usize]) == arena.ty(v) && arena.param_sharding(p as usize) == cut
            };
            let fitting: Sources = sources[v.0 as usize].iter().filter(fits).copied().collect();
            // A value that is returned twice has one memory all the same.
            if !fitting.is_empty() && seen.insert(v) {
                open.push((output, fitting));
            }
        }
        let mut pairs = Vec::new();
        // What has one choice goes first: moments come from themselves alone, a weight also from its moments.
        while let Some(i) = (0..open.len()).min_by_key(|&i| open[i].1.len()) {
            let (output, fitting) = open.remove(i);
            pairs.push((fitting[0], output));
            open.iter_mut().for_each(|(_, rest)| rest.retain(|p| *p != fitting[0]));
            open.retain(|(_, rest)| !rest.is_empty());
        }
        pairs
    }

    /// For each value the donated parameters that it is computed from element by element.
    fn sources(&self) -> Vec<Sources> {
        let arena = &self.arena;
        let mut sources = vec![Sources::new(); arena.values.len()];
        for (i, attrs) in arena.param_attrs.iter().enumerate() {
            if attrs.contains(&ArgAttr::Donor) {
                sources[arena.params[i].0 as usize].push(i as u32);
            }
        }
        for op in &arena.ops {
            let inputs: &[Value] = match &op.op {
                Op::Unary(_)
                | Op::Binary(_)
                | Op::Select
                | Op::Clamp
                | Op::Convert
                | Op::ReducePrecision { .. }
                | Op::Reshape
                | Op::ShardingConstraint(_) => &op.operands,
                // What is written into.
                Op::DynamicUpdateSlice | Op::Scatter(..) => &op.operands[..1],
                _ => continue,
            };
            let mut all = Sources::new();
            for v in inputs {
                for &p in &sources[v.0 as usize] {
                    if all.len() < MAX_SOURCES && !all.contains(&p) {
                        all.push(p);
                    }
                }
            }
            sources[op.first_result as usize] = all;
        }
        sources
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Builder, DType, TensorType};

    fn param(b: &Builder, n: i64) -> Value {
        let v = b.param(TensorType::new(DType::F32, vec![n]));
        b.param_attr(v, ArgAttr::Donor);
        v
    }

    #[test]
    fn an_optimizer_step_overwrites_each_of_its_tensors() {
        let b = Builder::new();
        let [gradient, weight, first, second] = [0; 4].map(|_| param(&b, 8));
        let new_first = b.add(first, gradient);
        let new_second = b.add(second, b.multiply(gradient, gradient));
        let new_weight = b.subtract(weight, b.divide(new_first, new_second));
        let mut module = b.finish(&[new_weight, new_first, new_second]).unwrap();
        let mut pairs = module.pairs();
        pairs.sort_unstable();
        assert_eq!(pairs, [(1, 0), (2, 1), (3, 2)]);
        module.pair_donors();
        assert!(module.to_text().contains("tf.aliasing_output = 0"));
    }

    #[test]
    fn other_types_and_what_is_moved_do_not_pair() {
        let b = Builder::new();
        let (x, y) = (param(&b, 8), param(&b, 1));
        let moved = b.reverse(x, &[0]);
        let wide = b.broadcast_in_dim(y, &[8], &[0]);
        let other = b.convert(x, DType::F64);
        let module = b.finish(&[moved, wide, other]).unwrap();
        assert_eq!(module.pairs(), []);
    }

    #[test]
    fn a_value_that_is_returned_twice_pairs_once() {
        let b = Builder::new();
        let (x, y) = (param(&b, 8), param(&b, 8));
        let sum = b.add(x, y);
        let module = b.finish(&[sum, sum]).unwrap();
        assert_eq!(module.pairs(), [(0, 0)]);
    }
}
