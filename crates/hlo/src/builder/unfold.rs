//! Matrices whose rows were several dimensions before.

use super::Builder;
use crate::ir::{Arena, Def, Op, Value};
use crate::types::Dims;

impl Builder {
    /// The dimensions that the rows of a matrix were folded from, where a reshape did that: a matrix of 6 rows that was a
    /// tensor of 2 x 3 x n has rows of 2 x 3. Nothing where there are less than two.
    pub fn folded_rows(&self, matrix: Value) -> Option<Dims> {
        let inner = self.inner.borrow();
        let &[rows, columns] = inner.arena.ty(matrix).shape.as_slice() else { return None };
        let root = before_reshapes(&inner.arena, matrix);
        inner.visible(root).ok()?;
        let shape = &inner.arena.ty(root).shape;
        if root == matrix || shape.contains(&0) {
            return None;
        }
        // The first dimensions, together as many as there are rows.
        let mut all = 1;
        let outer = shape.iter().take_while(|&&n| {
            all *= n;
            all <= rows
        });
        let dims: Dims = outer.copied().filter(|&n| n != 1).collect();
        let fits = dims.iter().product::<i64>() == rows && shape.iter().product::<i64>() == rows * columns;
        (fits && dims.len() > 1).then_some(dims)
    }

    /// The matrix with its rows as these dimensions.
    pub fn unfold_rows(&self, matrix: Value, rows: &[i64]) -> Value {
        let (root, columns) = {
            let inner = self.inner.borrow();
            (before_reshapes(&inner.arena, matrix), inner.arena.ty(matrix).shape.last().copied())
        };
        let mut shape = Dims::from_slice(rows);
        shape.extend(columns);
        self.reshape(root, &shape)
    }

    /// What a matrix is the transpose of.
    pub fn transposed_matrix(&self, matrix: Value) -> Option<Value> {
        let inner = self.inner.borrow();
        let Def::Op(op) = inner.arena.values.get(matrix.0 as usize)?.def else { return None };
        let op = &inner.arena.ops[op as usize];
        let is_transpose = matches!(&op.op, Op::Transpose(order) if order.as_slice() == [1, 0]);
        let from = *op.operands.first()?;
        (is_transpose && inner.visible(from).is_ok()).then_some(from)
    }
}

/// The value that was reshaped until it became this one.
fn before_reshapes(arena: &Arena, mut value: Value) -> Value {
    while let Def::Op(op) = arena.values[value.0 as usize].def {
        let op = &arena.ops[op as usize];
        match (&op.op, op.operands.first()) {
            (Op::Reshape, Some(&from)) => value = from,
            _ => break,
        }
    }
    value
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{DType, TensorType};

    fn folded(from: &[i64], through: &[&[i64]]) -> Option<Dims> {
        let b = Builder::new();
        let x = b.param(TensorType::new(DType::F32, from));
        b.folded_rows(through.iter().fold(x, |x, shape| b.reshape(x, shape)))
    }

    #[test]
    fn rows_are_what_they_were() {
        let rows = |dims: &[i64]| Some(Dims::from_slice(dims));
        assert_eq!(folded(&[2, 3, 5], &[&[6, 5]]), rows(&[2, 3]));
        assert_eq!(folded(&[2, 3, 5], &[&[30], &[6, 5]]), rows(&[2, 3]));
        assert_eq!(folded(&[2, 1, 3, 5, 7], &[&[6, 35]]), rows(&[2, 3]), "heads side by side");
        assert_eq!(folded(&[2, 3, 4, 5], &[&[24, 5]]), rows(&[2, 3, 4]));
    }

    #[test]
    fn other_rows_are_no_fold() {
        for (from, to) in [([6, 5], [3, 10]), ([6, 5], [6, 5]), ([30, 1], [6, 5]), ([6, 1], [6, 1])] {
            assert_eq!(folded(&from, &[&to]), None, "{from:?} as {to:?}");
        }
        assert_eq!(folded(&[4, 3, 5], &[&[6, 10]]), None, "rows end within a dimension");
        assert_eq!(folded(&[2, 0, 5], &[&[0, 5]]), None);
    }

    #[test]
    fn unfolded_rows_are_the_value_before() {
        let b = Builder::new();
        let x = b.param(TensorType::new(DType::F32, vec![2, 3, 5]));
        let y = b.reshape(b.reshape(x, &[30]), &[6, 5]);
        assert_eq!(b.unfold_rows(y, &[2, 3]), x);
        let t = b.transpose(y, &[1, 0]);
        assert_eq!((b.transposed_matrix(t), b.transposed_matrix(y)), (Some(y), None));
    }
}
