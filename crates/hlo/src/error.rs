//! What can go wrong while a module is built or verified.

use crate::types::TensorType;

/// A mistake in a program. The builder keeps the first one and `finish` returns it.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Error {
    /// The operands or attributes do not fit the op.
    #[error("`{op}`({}): {reason}", list(operands))]
    Op {
        /// Full op name.
        op: &'static str,
        /// Types of the operands.
        operands: Vec<TensorType>,
        /// What was expected and what was found.
        reason: String,
    },
    /// The op does not take these element types, or not together.
    #[error("`{op}`({}): {reason}", list(operands))]
    ElementType {
        /// Full op name.
        op: &'static str,
        /// Types of the operands.
        operands: Vec<TensorType>,
        /// What was expected and what was found.
        reason: String,
    },
    /// A value is used where it is not visible, or belongs to another builder.
    #[error("`{op}`: operand {index} {reason}")]
    Operand {
        /// Full op name.
        op: &'static str,
        /// Position of the operand.
        index: usize,
        /// Why it cannot be used here.
        reason: &'static str,
    },
    /// `finish` was called with a value that cannot be an output.
    #[error("output {index} {reason}")]
    Output {
        /// Position of the output.
        index: usize,
        /// Why it cannot be returned.
        reason: &'static str,
    },
    /// A memory space for something that is no output.
    #[error("there is no output {index}: the module has {outputs}")]
    NoSuchOutput {
        /// The number asked for.
        index: usize,
        /// How many there are.
        outputs: usize,
    },
    /// A parameter attribute for something that is no parameter.
    #[error("there is no parameter {index}: the module has {params}")]
    NoSuchParam {
        /// The number asked for.
        index: usize,
        /// How many there are.
        params: usize,
    },
    /// A mesh, a sharding or a group that cannot be, or not for this tensor.
    #[error("{reason}")]
    Sharding {
        /// What is wrong.
        reason: String,
    },
    /// The verifier found a module that the builder should not have made.
    #[error("invalid module: `{op}` (op {id}): {reason}")]
    Invalid {
        /// Full op name.
        op: &'static str,
        /// Its index in the arena.
        id: u32,
        /// What is wrong.
        reason: String,
    },
}

fn list(types: &[TensorType]) -> String {
    types.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}
