//! Ops that StableHLO's own constant folder, which plugins run before XLA sees a program, folds wrongly: it divides
//! integers with the host's instruction, which traps on zero, and its maxima and minima lose NaN.
//!
//! So no program divides an integer by what may be zero, and no maximum of constants is left to that folder alone.

use super::{Builder, Inner};
use crate::ir::{Binary, Direction, Op, Value};

impl Builder {
    /// Division or remainder of integers, whose divisor is nowhere zero: a quotient by zero is -1 (all bits are set), a
    /// remainder by zero is the dividend, as XLA has it.
    pub(super) fn divide_integers(&self, op: Binary, lhs: Value, rhs: Value) -> Value {
        if self.is_never_zero(rhs) {
            return self.op(Op::Binary(op), &[lhs, rhs]);
        }
        let none = self.eq(rhs, self.zeros_like(rhs));
        let divisor = self.select(none, self.ones_like(rhs), rhs);
        let by_zero = if op == Binary::Remainder {
            lhs
        } else {
            self.full(self.scalar_i64(self.dtype(lhs), -1), &self.shape(lhs))
        };
        self.select(none, by_zero, self.op(Op::Binary(op), &[lhs, divisor]))
    }

    /// Whether an integer is seen not to be zero anywhere: a constant, at least 1, or replaced where it is zero.
    fn is_never_zero(&self, x: Value) -> bool {
        if let Some(number) = self.constant_i64(x) {
            return number != 0;
        }
        let inner = self.inner.borrow();
        let Some((op, operands)) = inner.made_by(x) else { return false };
        match (op, operands) {
            (Op::BroadcastInDim(_) | Op::Reshape, [x]) => self.is_never_zero(*x),
            (Op::Binary(Binary::Maximum), [_, least]) => self.constant_i64(*least).is_some_and(|n| n > 0),
            (Op::Select, [at_zero, instead, x]) => {
                let asks = match inner.made_by(*at_zero) {
                    Some((Op::Compare(Direction::Eq, _), [y, zero])) => {
                        y == x && self.constant_i64(*zero) == Some(0)
                    }
                    _ => false,
                };
                asks && self.is_never_zero(*instead)
            }
            _ => false,
        }
    }

    /// Maximum or minimum of floats that the folder may take for constants.
    pub(super) fn extreme_of_constants(&self, op: Binary, lhs: Value, rhs: Value) -> Value {
        let number = self.op(Op::Binary(op), &[lhs, rhs]);
        self.select(self.is_nan(lhs), lhs, self.select(self.is_nan(rhs), rhs, number))
    }

    /// Whether these are floats that a compiler may find to be constants.
    pub(super) fn are_constant_floats(&self, xs: &[Value]) -> bool {
        let inner = self.inner.borrow();
        xs.iter().all(|&x| inner.is_constant(x) && inner.arena.ty(x).dtype.is_float())
    }
}

impl Inner {
    /// The op whose result a value is.
    pub(super) fn made_by(&self, x: Value) -> Option<(&Op, &[Value])> {
        self.arena.made_by(x)
    }

    fn is_constant(&self, x: Value) -> bool {
        self.arena.values.get(x.0 as usize).is_some_and(|d| d.constant)
    }

    /// Whether a compiler may find the results of an op to be constants: all its operands are, or the one that decides is.
    pub(super) fn makes_constants(&self, op: &Op, operands: &[Value]) -> bool {
        let constant = |i: usize| operands.get(i).is_some_and(|&x| self.is_constant(x));
        let is_float = operands.first().is_some_and(|&x| self.arena.ty(x).dtype.is_float());
        match op {
            Op::OptimizationBarrier
            | Op::AnnotateDevicePlacement(_)
            | Op::CustomCall(_)
            | Op::Deferred(_) => false,
            Op::Select => constant(1) && constant(2),
            Op::Gather(..) | Op::DynamicSlice(_) => constant(0),
            Op::DynamicUpdateSlice => constant(1),
            Op::Binary(Binary::Multiply | Binary::And | Binary::Or) if !is_float => {
                constant(0) || constant(1)
            }
            Op::Binary(Binary::Subtract | Binary::Xor)
                if !is_float && operands.first() == operands.get(1) =>
            {
                true
            }
            _ => (0..operands.len()).all(constant),
        }
    }
}
