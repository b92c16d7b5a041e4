//! Checks a finished module from scratch: what the builder promises, proved again without trusting it.

use smallvec::SmallVec;

use crate::builder::region_sig;
use crate::error::Error;
use crate::infer::{Broken, RegionSig, Sig, infer};
use crate::ir::*;
use crate::types::TensorType;

impl Module {
    /// Every op's operands are defined before it and visible, and its result types are what inference says.
    pub fn verify(&self) -> Result<(), Error> {
        let mut defined = vec![false; self.arena.values.len()];
        for &p in &self.arena.params {
            defined[p.0 as usize] = true;
        }
        let mut verifier = Verifier { arena: &self.arena, defined, open: SmallVec::new() };
        verifier.block(ROOT)?;
        for (index, &v) in self.outputs.iter().enumerate() {
            if !verifier.available(v, &[ROOT]) {
                return Err(Error::Output { index, reason: "is not defined in the function's body" });
            }
        }
        Ok(())
    }
}

struct Verifier<'a> {
    arena: &'a Arena,
    defined: Vec<bool>,
    open: SmallVec<[BlockId; 4]>,
}

impl Verifier<'_> {
    fn available(&self, v: Value, open: &[BlockId]) -> bool {
        let Some(data) = self.arena.values.get(v.0 as usize) else { return false };
        match data.def {
            Def::Constant(_) => true,
            Def::Poison => false,
            Def::Param(_) | Def::BlockArg | Def::Op(_) => {
                self.defined[v.0 as usize] && self.reachable(data.block, open)
            }
        }
    }

    /// Whether code in the innermost open block may use values of `block`.
    fn reachable(&self, block: BlockId, open: &[BlockId]) -> bool {
        for &b in open.iter().rev() {
            if b == block {
                return true;
            }
            if !self.arena.blocks[b as usize].captures {
                return false;
            }
        }
        false
    }

    fn block(&mut self, id: BlockId) -> Result<(), Error> {
        self.open.push(id);
        let arena = self.arena;
        let block = &arena.blocks[id as usize];
        for &arg in &block.args {
            self.defined[arg.0 as usize] = true;
        }
        for &op in &block.ops {
            self.op(op)?;
        }
        self.open.pop();
        Ok(())
    }

    fn op(&mut self, id: OpId) -> Result<(), Error> {
        let arena = self.arena;
        let data = &arena.ops[id as usize];
        let invalid = |reason: String| Err(Error::Invalid { op: data.op.name(), id, reason });
        for (i, &v) in data.operands.iter().enumerate() {
            if !self.available(v, &self.open) {
                return invalid(format!("operand {i} is not defined here"));
            }
        }
        for &region in &data.regions {
            if arena.blocks[region as usize].captures != data.op.regions_capture() {
                return invalid("a region captures values though it must not, or the reverse".to_owned());
            }
            self.block(region)?;
            let mut open = self.open.clone();
            open.push(region);
            if !arena.blocks[region as usize].returns.iter().all(|&v| self.available(v, &open)) {
                return invalid("a region returns a value that is not defined in it".to_owned());
            }
        }
        self.result_types(data).or_else(invalid)?;
        for v in data.result_values() {
            self.defined[v.0 as usize] = true;
        }
        Ok(())
    }

    fn result_types(&self, data: &OpData) -> Result<(), String> {
        let arena = self.arena;
        let operands: SmallVec<[&TensorType; 4]> = data.operands.iter().map(|&v| arena.ty(v)).collect();
        let regions: SmallVec<[RegionSig; 2]> = data.regions.iter().map(|&r| region_sig(arena, r)).collect();
        let results: SmallVec<[TensorType; 2]> = data.result_values().map(|v| arena.ty(v).clone()).collect();
        // Random bits state the type of their second result; the first is the state's.
        let skip = usize::from(matches!(data.op, Op::RngBitGenerator(_)));
        let requested = results.get(skip..).unwrap_or_default();
        let signature = Sig { op: &data.op, operands: &operands, requested, regions: &regions };
        let inferred = infer(&signature).map_err(Broken::into_reason)?;
        if inferred[..] != results[..] {
            return Err(format!("result types {results:?} differ from the inferred {inferred:?}"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Builder, DType};

    /// A module with a loop, broken by `harm`.
    fn broken(harm: impl FnOnce(&mut Arena)) -> Result<(), Error> {
        let b = Builder::new();
        let x = b.param(TensorType::new(DType::F32, vec![2]));
        let y = b.exponential(x);
        let zero = b.scalar_i64(DType::S32, 0);
        let looped = b.for_loop(zero, b.scalar_i64(DType::S32, 3), &[y], |b, _, a| vec![b.add(a[0], y)]);
        let sum = b.reduce_sum(looped[0], &[0]);
        let mut module = b.finish(&[sum])?;
        harm(&mut module.arena);
        module.verify()
    }

    fn find(arena: &Arena, name: &str) -> usize {
        arena.ops.iter().position(|o| o.op.name() == name).unwrap()
    }

    #[test]
    fn whole_modules_pass() {
        assert_eq!(broken(|_| ()), Ok(()));
    }

    #[test]
    fn wrong_types_are_found() {
        let error = broken(|a| a.values[1].ty.dtype = DType::F64).unwrap_err().to_string();
        assert!(error.contains("`stablehlo.exponential` (op 0): result types"), "{error}");
    }

    #[test]
    fn use_before_definition_is_found() {
        let error = broken(|a| a.blocks[ROOT as usize].ops.reverse()).unwrap_err().to_string();
        assert!(error.contains("operand 0 is not defined here"), "{error}");
    }

    #[test]
    fn values_of_other_regions_are_found() {
        let error = broken(|a| {
            // The loop's condition sees only its own arguments; take one of the body's.
            let (compare, add) = (find(a, "stablehlo.compare"), find(a, "stablehlo.add"));
            a.ops[compare].operands[0] = a.ops[add].operands[0];
        });
        assert!(error.unwrap_err().to_string().contains("operand 0 is not defined here"));
    }

    #[test]
    fn foreign_returns_are_found() {
        let error = broken(|a| {
            let body = a.ops[find(a, "stablehlo.while")].regions[1];
            a.blocks[body as usize].returns[1] = Value(u32::MAX);
        });
        assert!(error.unwrap_err().to_string().contains("returns a value that is not defined"));
    }

    #[test]
    fn captures_in_isolated_regions_are_found() {
        let error = broken(|a| {
            let reduce = find(a, "stablehlo.reduce");
            let region = a.ops[reduce].regions[0];
            let inner = a.blocks[region as usize].ops[0] as usize;
            let outer = a.ops[reduce].operands[0];
            a.ops[inner].operands[0] = outer;
        });
        assert!(error.unwrap_err().to_string().contains("operand 0 is not defined here"));
    }

    #[test]
    fn missing_outputs_are_found() {
        let b = Builder::new();
        let x = b.param(TensorType::scalar(DType::F32));
        let mut module = b.finish(&[x]).unwrap();
        module.outputs.push(Value(7));
        assert!(matches!(module.verify(), Err(Error::Output { index: 1, .. })));
    }
}
