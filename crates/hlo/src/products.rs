//! What a module multiplies: the matrix products and convolutions in it, counted by hand.

use crate::ir::{Convolution, DotDims, Module, Op, OpData, Precision, Value};
use crate::types::DType;
use std::collections::BTreeMap;

/// Products of one kind.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Products {
    /// Type of the operands.
    pub dtype: DType,
    /// Precision that they are multiplied with.
    pub precision: Precision,
    /// Multiplications and additions.
    pub flops: f64,
}

impl Module {
    /// The products that some result needs, by type and precision. A loop's body counts once; what a convolution
    /// multiplies with the zeros of its padding counts as well.
    pub fn products(&self) -> Vec<Products> {
        let mut sums: BTreeMap<(&str, &str), Products> = BTreeMap::new();
        for (op, live) in self.arena.ops.iter().zip(self.live()) {
            let counted = match &op.op {
                Op::DotGeneral(dot) => Some((dot.1, self.dot_flops(op, &dot.0))),
                Op::Convolution(c) => Some((c.precision, self.convolution_flops(op, c))),
                _ => None,
            };
            if let (Some((precision, flops)), true) = (counted, live) {
                let dtype = self.arena.ty(op.operands[0]).dtype;
                let none = Products { dtype, precision, flops: 0.0 };
                sums.entry((dtype.hlo_name(), precision.name())).or_insert(none).flops += flops;
            }
        }
        sums.into_values().collect()
    }

    /// Whether each op is needed. What is inside another is needed with it.
    fn live(&self) -> Vec<bool> {
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

    fn results(&self, op: &OpData) -> f64 {
        op.result_values().next().map_or(0.0, |v| size(self.shape(v)))
    }

    fn dot_flops(&self, op: &OpData, dims: &DotDims) -> f64 {
        let lhs = self.shape(op.operands[0]);
        let contracted: f64 = dims.lhs_contracting.iter().map(|&d| lhs[d as usize] as f64).product();
        2.0 * self.results(op) * contracted
    }

    fn convolution_flops(&self, op: &OpData, c: &Convolution) -> f64 {
        let kernel = self.shape(op.operands[1]);
        let window: f64 = c.dims.kernel_spatial.iter().map(|&d| kernel[d as usize] as f64).product();
        // Between the elements of a dilated input there are zeros, which nobody multiplies.
        let zeros: f64 = c.lhs_dilation.iter().map(|&d| d as f64).product();
        2.0 * self.results(op) * window * kernel[c.dims.kernel_input_feature as usize] as f64 / zeros
    }
}

fn size(shape: &[i64]) -> f64 {
    shape.iter().map(|&n| n as f64).product()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Builder, TensorType};

    fn param(b: &Builder, dtype: DType, shape: &[i64]) -> Value {
        b.param(TensorType::new(dtype, shape))
    }

    #[test]
    fn products_are_counted_by_type_and_precision() {
        let b = Builder::new();
        let (x, w) = (param(&b, DType::BF16, &[8, 32, 64]), param(&b, DType::BF16, &[8, 64, 16]));
        let y = b.dot_general(x, w, &DotDims::matmul(3), Precision::Default, None);
        let (image, kernel) = (param(&b, DType::F32, &[2, 3, 8, 8]), param(&b, DType::F32, &[5, 3, 3, 3]));
        b.dot_general(x, w, &DotDims::matmul(3), Precision::Default, None);
        let z = b.convolution(
            image,
            kernel,
            Convolution { precision: Precision::Highest, ..Convolution::new(2) },
        );
        let found = b.finish(&[y, z]).unwrap().products();
        let expected = [
            Products {
                dtype: DType::BF16,
                precision: Precision::Default,
                flops: 2.0 * (8 * 32 * 64 * 16) as f64,
            },
            Products {
                dtype: DType::F32,
                precision: Precision::Highest,
                flops: 2.0 * (2 * 5 * 6 * 6 * 3 * 3 * 3) as f64,
            },
        ];
        assert_eq!(found, expected);
    }
}
