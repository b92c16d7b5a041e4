use crate::args::{Scalar, Tensor};
use crate::dtype::{Category, category};
use crate::error::{Result, not_implemented};
use crate::lower::{Ctx, binary};
use crate::pointwise;
use crate::table::Promote::Same;
use crate::table::Row;
use oxitorch_hlo::{Builder, DType, Value};

/// The rows of this family. Shifts by the width or more give 0 (or all sign bits), as in torch.
pub static ROWS: &[Row] = &[
    pointwise!("bitwise_and.Tensor", |c: &Ctx, x: Tensor, y: Tensor| bits(
        c,
        "bitwise_and",
        x,
        y,
        Builder::and
    )),
    pointwise!("bitwise_or.Tensor", |c: &Ctx, x: Tensor, y: Tensor| bits(c, "bitwise_or", x, y, Builder::or)),
    pointwise!("bitwise_xor.Tensor", |c: &Ctx, x: Tensor, y: Tensor| bits(
        c,
        "bitwise_xor",
        x,
        y,
        Builder::xor
    )),
    pointwise!("bitwise_not", bitwise_not),
    pointwise!("bitwise_left_shift.Tensor", left),
    pointwise!("bitwise_right_shift.Tensor", right),
    pointwise!("__lshift__.Tensor", left),
    pointwise!("__lshift__.Scalar", |c: &Ctx, x: Tensor, y: Scalar| left(c, x, y.tensor())),
    pointwise!("__rshift__.Tensor", right),
    pointwise!("__rshift__.Scalar", |c: &Ctx, x: Tensor, y: Scalar| right(c, x, y.tensor())),
];

fn integers(c: &Ctx, name: &str, tensors: &[Tensor], bool_too: bool) -> Result<()> {
    let dtype = c.result_type(tensors)?;
    let ok = category(dtype) == Category::Int || bool_too && dtype == DType::Pred;
    if ok { Ok(()) } else { Err(not_implemented(&format!("{name}_cpu"), dtype)) }
}

fn bits(c: &Ctx, name: &str, x: Tensor, y: Tensor, f: fn(&Builder, Value, Value) -> Value) -> Result<Value> {
    integers(c, name, &[x, y], true)?;
    binary(c, Same, f, x, y)
}

fn bitwise_not(c: &Ctx, x: Tensor) -> Result<Value> {
    integers(c, "bitwise_not", &[x], true)?;
    Ok(c.not(x.value))
}

fn left(c: &Ctx, x: Tensor, y: Tensor) -> Result<Value> {
    integers(c, "lshift", &[x, y], false)?;
    // A negative shift reads as a huge one, so it gives 0 too.
    binary(c, Same, Builder::shift_left, x, y)
}

fn right(c: &Ctx, x: Tensor, y: Tensor) -> Result<Value> {
    integers(c, "rshift", &[x, y], false)?;
    let f = if c.result_type(&[x, y])?.is_signed() {
        Builder::shift_right_arithmetic
    } else {
        Builder::shift_right_logical
    };
    binary(c, Same, f, x, y)
}
