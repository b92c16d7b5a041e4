//! Loops and branches, whose regions are made of the same rules as what is around them.
//!
//! What a loop carries keeps its layout from round to round. How often it goes round is computed like any number: a scan
//! over a dimension that varies takes as many steps as are in use, and leaves what is beyond them as it was.

use super::rules::Pair;
use super::{Bounding, Laid, Result};
use crate::ir::*;
use crate::types::TensorType;

impl Bounding<'_> {
    pub(super) fn repeated(&mut self, pair: Pair<'_>, args: Vec<Laid>) -> Result<Vec<Laid>> {
        let carried: Vec<Laid> = args.into_iter().map(settled).collect();
        let mut regions = Vec::new();
        for (place, (&p, &s)) in pair.p.regions.iter().zip(&pair.s.regions).enumerate() {
            // The body gives what it is given, the condition a number.
            let like = if place == 1 { carried.as_slice() } else { &[] };
            regions.push(self.nested(p, s, &carried, like)?.0);
        }
        let operands: Vec<Value> = carried.iter().map(|x| x.v).collect();
        Ok(self.controlled(pair, &operands, &regions, carried))
    }

    pub(super) fn branched(&mut self, pair: Pair<'_>, args: Vec<Laid>) -> Result<Vec<Laid>> {
        let mut made: Vec<Laid> = Vec::new();
        let mut regions = Vec::new();
        for (&p, &s) in pair.p.regions.iter().zip(&pair.s.regions) {
            // All branches give what the first one does.
            let (region, returns) = self.nested(p, s, &[], &made)?;
            regions.push(region);
            if made.is_empty() {
                made = returns.into_iter().map(settled).collect();
            }
        }
        let operands: Vec<Value> = args.iter().map(|x| x.v).collect();
        Ok(self.controlled(pair, &operands, &regions, made))
    }

    /// The results of such an op, laid like these.
    fn controlled(
        &mut self,
        pair: Pair<'_>,
        operands: &[Value],
        regions: &[BlockId],
        like: Vec<Laid>,
    ) -> Vec<Laid> {
        let types: Vec<TensorType> = pair.p.result_values().map(|v| self.bound.ty(v).clone()).collect();
        let made = self.b.copied(pair.p.op.clone(), operands, &types, regions);
        made.into_iter().zip(like).map(|(v, x)| Laid { v, layout: x.layout }).collect()
    }

    /// A region with these arguments, of whose results the first are laid like others; and its results.
    fn nested(
        &mut self,
        p: BlockId,
        s: BlockId,
        args: &[Laid],
        like: &[Laid],
    ) -> Result<(BlockId, Vec<Laid>)> {
        let (bound, sample) = (self.bound, self.sample);
        let (p, s) = (&bound.blocks[p as usize], &sample.blocks[s as usize]);
        if p.ops.len() != s.ops.len() || p.args.len() != s.args.len() || p.returns.len() != s.returns.len() {
            return Err("what it does depends on the size".into());
        }
        let types: Vec<TensorType> = p.args.iter().map(|&v| bound.ty(v).clone()).collect();
        // What is made within is not seen outside.
        let known = self.known.clone();
        let (block, values) = self.b.open_region(&types, p.captures);
        for (((&a, &b), &v), x) in p.args.iter().zip(&s.args).zip(&values).zip(args) {
            self.know(a, b, Laid { v, layout: x.layout.clone() });
        }
        let returns = self.returned(p, s, like);
        self.known = known;
        let values = returns.iter().flatten().map(|x| x.v).collect();
        self.b.close_region(block, values);
        Ok((block, returns?))
    }

    fn returned(&mut self, p: &Block, s: &Block, like: &[Laid]) -> Result<Vec<Laid>> {
        let (bound, sample) = (self.bound, self.sample);
        for (&p, &s) in p.ops.iter().zip(&s.ops) {
            self.op(&bound.ops[p as usize], &sample.ops[s as usize])?;
        }
        let mut returns = Vec::new();
        for (i, (&a, &b)) in p.returns.iter().zip(&s.returns).enumerate() {
            let mut x = self.operand(a, b)?;
            for (d, to) in like.get(i).map_or(&[][..], |x| &x.layout).iter().enumerate() {
                x = self.relaid(x, d, to)?;
            }
            returns.push(x);
        }
        Ok(returns)
    }
}

/// What may have other elements in each round, or in each branch.
fn settled(mut x: Laid) -> Laid {
    x.layout.iter_mut().for_each(|d| d.even = false);
    x
}
