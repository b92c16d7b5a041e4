use crate::args::{Scalar, Tensor};
use crate::context::Ctx;
use crate::domain;
use crate::error::Result;
use crate::pointwise;
use crate::pointwise::binary as run_binary;
use crate::promote::Promote::Same;
use crate::row::{Row, binary, unary};
use oxitorch_hlo::{Builder, Value};

/// The rows of this family. Shifts by the width or more give 0 (or all sign bits), as in torch.
pub static ROWS: &[Row] = &[
    binary("bitwise_and.Tensor", Same, Builder::and).dtypes(domain::bits),
    binary("bitwise_or.Tensor", Same, Builder::or).dtypes(domain::bits),
    binary("bitwise_xor.Tensor", Same, Builder::xor).dtypes(domain::bits),
    unary("bitwise_not", Same, Builder::not).dtypes(domain::bits),
    pointwise!("bitwise_left_shift.Tensor", left).dtypes(domain::integers),
    pointwise!("bitwise_right_shift.Tensor", right).dtypes(domain::integers),
    pointwise!("__lshift__.Tensor", left).dtypes(domain::integers).serves(&["__ilshift__.Tensor"]),
    pointwise!("__lshift__.Scalar", |c: &Ctx, x: Tensor, y: Scalar| left(c, x, y.tensor()))
        .dtypes(domain::integers)
        .serves(&["__ilshift__.Scalar"]),
    pointwise!("__rshift__.Tensor", right).dtypes(domain::integers).serves(&["__irshift__.Tensor"]),
    pointwise!("__rshift__.Scalar", |c: &Ctx, x: Tensor, y: Scalar| right(c, x, y.tensor()))
        .dtypes(domain::integers)
        .serves(&["__irshift__.Scalar"]),
];

fn left(c: &Ctx, x: Tensor, y: Tensor) -> Result<Value> {
    // A negative shift reads as a huge one, so it gives 0 too.
    run_binary(c, Same, None, Builder::shift_left, x, y)
}

fn right(c: &Ctx, x: Tensor, y: Tensor) -> Result<Value> {
    let f = if c.result_type(&[x, y])?.is_signed() {
        Builder::shift_right_arithmetic
    } else {
        Builder::shift_right_logical
    };
    run_binary(c, Same, None, f, x, y)
}
