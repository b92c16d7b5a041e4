//! What a module multiplies: the matrix products and convolutions in it, counted by hand.

use crate::ir::{Arena, Binary, Convolution, Direction, DotDims, Module, Op, OpData, Precision, ROOT, Value};
use crate::types::{DType, Dims};

/// A matrix product or convolution: `batch` products of an `m` x `k` by a `k` x `n` matrix.
///
/// A convolution is taken as the product that it is when each position of its window is a row of the kernel's matrix:
/// `m` counts the places of its result, `n` the features that come out, `k` what is added up for each, `batch` its groups.
#[derive(Clone, Copy, Debug, PartialEq)]
#[allow(missing_docs)] // as above
pub struct Product {
    pub batch: f64,
    pub m: f64,
    pub n: f64,
    pub k: f64,
    /// Type of the operands.
    pub dtype: DType,
    /// Precision that they are multiplied with.
    pub precision: Precision,
    /// The number of the op's location, if it was given one.
    pub location: Option<u32>,
    /// How often it is done: as often as the loops that it is in go round, where that is known.
    pub times: u64,
}

impl Product {
    /// Multiplications and additions, all times.
    pub fn flops(&self) -> f64 {
        2.0 * self.batch * self.m * self.n * self.k * self.times as f64
    }
}

impl Module {
    /// The products that some result needs, in their order. The body of a loop of which nobody knows how often it goes
    /// round counts once; what a convolution multiplies with the zeros of its padding counts as well.
    pub fn products(&self) -> Vec<Product> {
        let (live, times) = (self.live(), self.times());
        let ops = self.arena.ops.iter().zip(live).zip(times).filter(|((_, live), _)| *live);
        ops.filter_map(|((op, _), times)| self.product(op, times)).collect()
    }

    /// How often each op is done.
    fn times(&self) -> Vec<u64> {
        let arena = &self.arena;
        let mut times = vec![1; arena.ops.len()];
        let mut todo = vec![(ROOT, 1u64)];
        while let Some((block, n)) = todo.pop() {
            for &id in &arena.blocks[block as usize].ops {
                let op = &arena.ops[id as usize];
                times[id as usize] = n;
                let rounds = if matches!(op.op, Op::While) { arena.rounds(op).unwrap_or(1) } else { 1 };
                todo.extend(op.regions.iter().map(|&region| (region, n.saturating_mul(rounds))));
            }
        }
        times
    }

    fn product(&self, op: &OpData, times: u64) -> Option<Product> {
        let (precision, [batch, m, n, k]) = match &op.op {
            Op::DotGeneral(dot) => (dot.1, self.dot_sizes(op, &dot.0)),
            Op::Convolution(c) => (c.precision, self.convolution_sizes(op, c)),
            _ => return None,
        };
        let dtype = self.arena.ty(op.operands[0]).dtype;
        let location = op.location.checked_sub(1);
        Some(Product { batch, m, n, k, dtype, precision, location, times })
    }

    /// Whether each op is needed. What is inside another is needed with it.
    pub(crate) fn live(&self) -> Vec<bool> {
        let arena = &self.arena;
        let mut used = vec![false; arena.values.len()];
        self.outputs.iter().for_each(|v| used[v.0 as usize] = true);
        for block in &arena.blocks {
            block.returns.iter().for_each(|v| used[v.0 as usize] = true);
        }
        let mut live = vec![false; arena.ops.len()];
        for (i, op) in arena.ops.iter().enumerate().rev() {
            live[i] = op.op.has_side_effect() || op.result_values().any(|v| used[v.0 as usize]);
            if live[i] {
                op.operands.iter().for_each(|v| used[v.0 as usize] = true);
            }
        }
        live
    }

    fn shape(&self, v: Value) -> &[i64] {
        &self.arena.ty(v).shape
    }

    /// Batch, m, n and k.
    fn dot_sizes(&self, op: &OpData, dims: &DotDims) -> [f64; 4] {
        let (lhs, rhs) = (self.shape(op.operands[0]), self.shape(op.operands[1]));
        let (batch, k) = (picked(lhs, &dims.lhs_batching), picked(lhs, &dims.lhs_contracting));
        let rest = |shape: &[i64], taken: [&Dims; 2]| {
            let free = (0..shape.len() as i64).filter(|d| !taken.iter().any(|t| t.contains(d)));
            picked(shape, &free.collect())
        };
        let m = rest(lhs, [&dims.lhs_batching, &dims.lhs_contracting]);
        let n = rest(rhs, [&dims.rhs_batching, &dims.rhs_contracting]);
        [batch, m, n, k]
    }

    /// Batch, m, n and k.
    fn convolution_sizes(&self, op: &OpData, c: &Convolution) -> [f64; 4] {
        let kernel = self.shape(op.operands[1]);
        let Some(result) = op.result_values().next() else { return [0.0; 4] };
        let result = self.shape(result);
        let groups = (c.feature_group_count * c.batch_group_count) as f64;
        let features = result[c.dims.output_feature as usize] as f64;
        let m = picked(result, &c.dims.output_spatial) * result[c.dims.output_batch as usize] as f64;
        // Between the elements of a dilated input there are zeros, which nobody multiplies.
        let zeros: f64 = c.lhs_dilation.iter().map(|&d| d as f64).product();
        let window = picked(kernel, &c.dims.kernel_spatial) / zeros;
        [groups, m, features / groups, window * kernel[c.dims.kernel_input_feature as usize] as f64]
    }
}

impl Arena {
    /// How often a loop goes round that counts from one number to another.
    fn rounds(&self, op: &OpData) -> Option<u64> {
        let &[cond, body] = op.regions.as_slice() else { return None };
        let [cond, body] = [cond, body].map(|region| &self.blocks[region as usize]);
        let (Op::Compare(Direction::Lt, _), &[counter, limit]) = self.made_by(*cond.returns.first()?)? else {
            return None;
        };
        let at = cond.args.iter().position(|&arg| arg == counter)?;
        let (Op::Binary(Binary::Add), &[before, step]) = self.made_by(body.returns[at])? else { return None };
        let counts = before == body.args[at] && self.constant_i64(step) == Some(1);
        let (start, limit) = (self.constant_i64(op.operands[at])?, self.constant_i64(limit)?);
        counts.then(|| limit.saturating_sub(start).max(0) as u64)
    }
}

/// How many elements these dimensions have together.
fn picked(shape: &[i64], dims: &Dims) -> f64 {
    dims.iter().map(|&d| shape[d as usize] as f64).product()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Builder, TensorType};

    fn param(b: &Builder, dtype: DType, shape: &[i64]) -> Value {
        b.param(TensorType::new(dtype, shape))
    }

    #[test]
    fn products_are_those_that_a_result_needs() {
        let b = Builder::new();
        let (x, w) = (param(&b, DType::BF16, &[8, 32, 64]), param(&b, DType::BF16, &[8, 64, 16]));
        b.set_location(Some(7));
        let y = b.dot_general(x, w, &DotDims::matmul(3), Precision::Default, None);
        b.set_location(None);
        let (image, kernel) = (param(&b, DType::F32, &[2, 3, 8, 8]), param(&b, DType::F32, &[5, 3, 3, 3]));
        b.dot_general(x, w, &DotDims::matmul(3), Precision::Default, None);
        let convolution = Convolution { precision: Precision::Highest, ..Convolution::new(2) };
        let z = b.convolution(image, kernel, convolution);
        let module = b.finish(&[y, z]).unwrap();
        let found = module.products();
        let (dtype, precision) = (DType::BF16, Precision::Default);
        let dot =
            Product { batch: 8.0, m: 32.0, n: 16.0, k: 64.0, dtype, precision, location: Some(7), times: 1 };
        let (dtype, precision) = (DType::F32, Precision::Highest);
        let folded =
            Product { batch: 1.0, m: 72.0, n: 5.0, k: 27.0, dtype, precision, location: None, times: 1 };
        assert_eq!(found, [dot, folded]);
        assert_eq!(found[0].flops(), (2 * 8 * 32 * 64 * 16) as f64);
        assert_eq!(found[1].flops(), (2 * 2 * 5 * 6 * 6 * 3 * 3 * 3) as f64);
    }

    #[test]
    fn a_loop_counts_as_often_as_it_goes_round() {
        let rounds = |limit: fn(&Builder) -> Value| {
            let b = Builder::new();
            let (x, number) = (param(&b, DType::F32, &[4, 4]), |n| b.scalar_i64(DType::S32, n));
            let square = |b: &Builder, x| b.matmul(x, x, Precision::Default, None);
            let inner =
                |b: &Builder, x| b.for_loop(number(1), number(3), &[x], |b, _, s| vec![square(b, s[0])])[0];
            let y = b.for_loop(number(0), limit(&b), &[x], |b, _, s| vec![inner(b, square(b, s[0]))]);
            let module = b.finish(&y).unwrap();
            module.products().iter().map(|p| p.times).collect::<Vec<_>>()
        };
        assert_eq!(rounds(|b| b.scalar_i64(DType::S32, 5)), [5, 10]);
        assert_eq!(rounds(|b| param(b, DType::S32, &[])), [1, 2]);
    }

    #[test]
    fn groups_are_a_batch() {
        let b = Builder::new();
        let (image, kernel) = (param(&b, DType::F32, &[2, 8, 5, 5]), param(&b, DType::F32, &[12, 2, 3, 3]));
        let y = b.convolution(image, kernel, Convolution { feature_group_count: 4, ..Convolution::new(2) });
        let module = b.finish(&[y]).unwrap();
        let found = &module.products()[0];
        assert_eq!([found.batch, found.m, found.n, found.k], [4.0, 18.0, 3.0, 18.0]);
    }
}
