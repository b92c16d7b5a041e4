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
        for (place, region) in pair.regions().enumerate() {
            // The body gives what it is given, the condition a number.
            let like = if place == 1 { carried.as_slice() } else { &[] };
            regions.push(self.nested(region, &carried, like)?.0);
        }
        let operands: Vec<Value> = carried.iter().map(|x| x.v).collect();
        Ok(self.controlled(pair, &operands, &regions, carried))
    }

    pub(super) fn branched(&mut self, pair: Pair<'_>, args: Vec<Laid>) -> Result<Vec<Laid>> {
        let mut made: Vec<Laid> = Vec::new();
        let mut regions = Vec::new();
        for region in pair.regions() {
            // All branches give what the first one does.
            let (region, returns) = self.nested(region, &[], &made)?;
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
        [p, s, o]: [BlockId; 3],
        args: &[Laid],
        like: &[Laid],
    ) -> Result<(BlockId, Vec<Laid>)> {
        let bound = self.bound;
        let p = &bound.blocks[p as usize];
        let (s, o) = (&self.sample.blocks[s as usize], &self.other.blocks[o as usize]);
        let counts = |block: &Block| (block.ops.len(), block.args.len(), block.returns.len());
        if counts(p) != counts(s) || counts(p) != counts(o) {
            return Err("what it does depends on the size".into());
        }
        let types: Vec<TensorType> = p.args.iter().map(|&v| bound.ty(v).clone()).collect();
        // What is made within is not seen outside.
        let known = self.known.clone();
        let (block, values) = self.b.open_region(&types, p.captures);
        let samples = s.args.iter().copied().zip(o.args.iter().copied());
        for (((&a, samples), &v), x) in p.args.iter().zip(samples).zip(&values).zip(args) {
            self.know(a, samples, Laid { v, layout: x.layout.clone() });
        }
        let returns = self.returned(p, (s, o), like);
        self.known = known;
        let values = returns.iter().flatten().map(|x| x.v).collect();
        self.b.close_region(block, values);
        Ok((block, returns?))
    }

    fn returned(&mut self, p: &Block, (s, o): (&Block, &Block), like: &[Laid]) -> Result<Vec<Laid>> {
        let (bound, sample, other) = (self.bound, self.sample, self.other);
        for (&p, (&s, &o)) in p.ops.iter().zip(s.ops.iter().zip(&o.ops)) {
            self.op(&bound.ops[p as usize], &sample.ops[s as usize], &other.ops[o as usize])?;
        }
        let mut returns = Vec::new();
        for (i, (&a, (&b, &c))) in p.returns.iter().zip(s.returns.iter().zip(&o.returns)).enumerate() {
            let mut x = self.operand(a, b, Some(c))?;
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
