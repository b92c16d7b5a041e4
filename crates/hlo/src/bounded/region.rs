//! The regions of ops, which are copied as they are.

use super::{Bounding, Result};
use crate::ir::*;
use crate::types::{DType, TensorType};
use rustc_hash::FxHashMap;

impl Bounding<'_> {
    /// A copy of a region that is the same at the bound and in the sample.
    pub(super) fn region(&mut self, p: BlockId, s: BlockId) -> Result<BlockId> {
        let args: Vec<TensorType> = self.types(p);
        let captures = self.bound.blocks[p as usize].captures;
        // The builder's closure borrows it, so that the copy is made in between.
        let (block, values) = self.b.open_region(&args, captures);
        let done = self.body(p, s, &values);
        let returns = done.clone().unwrap_or_default();
        self.b.close_region(block, returns);
        done.map(|_| block)
    }

    fn types(&self, block: BlockId) -> Vec<TensorType> {
        self.bound.blocks[block as usize].args.iter().map(|&v| self.bound.ty(v).clone()).collect()
    }

    /// The ops of a region on these arguments; gives what it returns.
    pub(super) fn body(&mut self, p: BlockId, s: BlockId, args: &[Value]) -> Result<Vec<Value>> {
        let (bound, sample) = (self.bound, self.sample);
        let (p, s) = (&bound.blocks[p as usize], &sample.blocks[s as usize]);
        let differs = || Err("what it does with each element depends on the size".to_owned());
        if p.ops.len() != s.ops.len() || p.args.len() != s.args.len() || p.returns.len() != s.returns.len() {
            return differs();
        }
        self.scopes.push(FxHashMap::default());
        let returns = self.filled(p, s, args);
        self.scopes.pop();
        returns
    }

    fn filled(&mut self, p: &Block, s: &Block, args: &[Value]) -> Result<Vec<Value>> {
        let (bound, sample) = (self.bound, self.sample);
        let differs = || Err("what it does with each element depends on the size".to_owned());
        for ((&a, &b), &new) in p.args.iter().zip(&s.args).zip(args) {
            if bound.ty(a) != sample.ty(b) {
                return differs();
            }
            self.scope(a, b, new);
        }
        for (&p, &s) in p.ops.iter().zip(&s.ops) {
            let (p, s) = (&bound.ops[p as usize], &sample.ops[s as usize]);
            let same =
                p.op == s.op && p.operands.len() == s.operands.len() && p.regions.len() == s.regions.len();
            let types = |arena: &Arena, op: &OpData| -> Vec<TensorType> {
                op.result_values().map(|v| arena.ty(v).clone()).collect()
            };
            let results = types(bound, p);
            if !same || results != types(sample, s) {
                return differs();
            }
            let mut regions = Vec::new();
            for (&a, &b) in p.regions.iter().zip(&s.regions) {
                regions.push(self.region(a, b)?);
            }
            let mut operands = Vec::new();
            for (&a, &b) in p.operands.iter().zip(&s.operands) {
                operands.push(self.inner(a, b)?);
            }
            let made = match &p.op {
                Op::Deferred(d) => self.lowered(d, &operands, &vec![None; d.axes.used.len()]),
                _ => self.b.copied(p.op.clone(), &operands, &results, &regions),
            };
            for ((a, b), new) in p.result_values().zip(s.result_values()).zip(made) {
                self.scope(a, b, new);
            }
        }
        p.returns.iter().zip(&s.returns).map(|(&a, &b)| self.inner(a, b)).collect()
    }

    /// A value of the innermost region: at the bound, in the sample, and in the new module.
    fn scope(&mut self, p: Value, s: Value, new: Value) {
        if let Some(scope) = self.scopes.last_mut() {
            scope.insert(p, (s, new));
        }
    }

    /// A value that a region uses.
    fn inner(&mut self, p: Value, s: Value) -> Result<Value> {
        if let Some(&(pair, new)) = self.scopes.iter().rev().find_map(|scope| scope.get(&p)) {
            return if pair == s { Ok(new) } else { Err("a region depends on the size".into()) };
        }
        let constant = |arena: &Arena, v: Value| match arena.values[v.0 as usize].def {
            Def::Constant(id) => Some(arena.constants[id as usize].clone()),
            _ => None,
        };
        let x = self.operand(p, s, None)?;
        if x.varies() || constant(self.bound, p) != constant(self.sample, s) {
            return Err("a region takes what depends on the size".into());
        }
        Ok(x.v)
    }

    /// The op that a region of two scalars does with them, if it is one.
    pub(super) fn only_op(&self, region: BlockId) -> Option<Binary> {
        let block = &self.bound.blocks[region as usize];
        let [id] = block.ops[..] else { return None };
        let data = &self.bound.ops[id as usize];
        match data.op {
            Op::Binary(op) if data.operands[..] == block.args[..] => Some(op),
            _ => None,
        }
    }

    /// Whether a reduction that is given its start more often gives the same.
    pub(super) fn ignores_start(&self, region: BlockId, starts: &[Value]) -> bool {
        let block = &self.bound.blocks[region as usize];
        let ops = || block.ops.iter().map(|&id| &self.bound.ops[id as usize].op);
        let is = |v: Value, n: f64| match self.bound.values[v.0 as usize].def {
            Def::Constant(id) => {
                let own = &self.bound.constants[id as usize];
                let scalar = |n: f64| {
                    let wanted = self.b.scalar_f64(self.bound.ty(v).dtype, n);
                    self.b.constant_bytes(wanted)
                };
                matches!(own, Constant::Splat(bytes) if Some(bytes) == scalar(n).as_ref())
            }
            _ => false,
        };
        let all = |wanted: Binary, n: f64| {
            ops().all(|op| *op == Op::Binary(wanted))
                && starts.iter().all(|&v| is(v, n) || is(v, -n) && n == 0.0)
        };
        let keeps = |op: &Op| {
            matches!(
                op,
                Op::Binary(Binary::Maximum | Binary::Minimum | Binary::And | Binary::Or)
                    | Op::Compare(..)
                    | Op::Select
                    | Op::Unary(Unary::Not | Unary::IsFinite)
                    | Op::Convert
            )
        };
        let is_neutral = [(Binary::Add, 0.0), (Binary::Xor, 0.0), (Binary::Multiply, 1.0)];
        ops().all(keeps) || is_neutral.into_iter().any(|(op, n)| all(op, n)) || {
            // A sum of booleans is an or.
            let is_pred = starts.iter().all(|&v| self.bound.ty(v).dtype == DType::Pred);
            is_pred && ops().all(|op| matches!(op, Op::Binary(Binary::Add)))
        }
    }
}
