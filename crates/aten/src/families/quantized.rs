use crate::context::Ctx;
use crate::error::{Result, runtime, unsupported, value};
use crate::library::{Item, Outcome};
use crate::op;
use crate::row::Row;
use oxitorch_hlo::{DType, Precision, TensorType, Value};

/// The rows of this family: products with weights of few bits.
pub static ROWS: &[Row] = &[
    op!("_scaled_mm", scaled_product),
    op!("_weight_int8pack_mm", int8_product),
    op!("_convert_weight_to_int4pack_for_cpu", int4_pack),
    op!("_weight_int4pack_mm_for_cpu", int4_product),
];

/// `x @ weight.T * scales`, with a scale for each row of the weight.
fn int8_product(c: &Ctx, x: Value, weight: Value, scales: Value) -> Result<Value> {
    let name = "_weight_int8pack_mm_cpu";
    let (dtype, a, b) = (c.dtype(x), c.shape(x), c.shape(weight));
    if !matches!(dtype, DType::F32 | DType::F16 | DType::BF16) {
        return Err(runtime(format!("{name} : expect A to be either 32-bit or 16-bit float tensor.")));
    }
    let &[m, k] = a.as_slice() else {
        return Err(runtime(format!("{name} : expect A to be 2D tensor.")));
    };
    if c.dtype(weight) != DType::S8 {
        return Err(runtime(format!("{name} : expect B to be int8 tensor.")));
    }
    let &[n, depth] = b.as_slice() else {
        return Err(runtime(format!("{name} : expect B to be 2D tensor.")));
    };
    if depth != k {
        return Err(runtime(format!("{name} : expect B.size(1) == {k}")));
    }
    if c.shape(scales)[..] != [n] {
        return Err(runtime(format!("{name} : expect scales to be 1d tensor with size {n}")));
    }
    if c.dtype(scales) != dtype {
        let want = crate::dtype::scalar_name(dtype);
        let got = crate::dtype::scalar_name(c.dtype(scales));
        return Err(runtime(format!("expected scalar type {want} but found {got}")));
    }
    let wide = |v: Value| c.to(v, DType::F32);
    let product = c.matmul(wide(x), c.transpose(wide(weight), &[1, 0]), Precision::Highest, None);
    let scales = c.broadcast_in_dim(wide(scales), &[m, n], &[1]);
    Ok(c.to(c.multiply(product, scales), dtype))
}

/// `(a * scale_a) @ (b * scale_b)` of float8, with one scale each or one for each row of `a` and column of `b`.
fn scaled_product(
    c: &Ctx,
    a: Value,
    b: Value,
    scale_a: Value,
    scale_b: Value,
    bias: Option<Value>,
    scale_result: Option<Value>,
    out_dtype: Option<DType>,
    _fast: bool,
) -> Result<Value> {
    let (&[m, k], &[depth, n]) = (c.shape(a).as_slice(), c.shape(b).as_slice()) else {
        return Err(runtime("_scaled_mm: expected mat1 and mat2 to be matrices"));
    };
    if k != depth {
        return Err(runtime(format!("mat1 and mat2 shapes cannot be multiplied ({m}x{k} and {depth}x{n})")));
    }
    let out = out_dtype.unwrap_or(c.dtype(a));
    let invalid = |why: &str| value(format!("Invalid scaling configuration: {why}"));
    if ![a, b].iter().all(|&v| matches!(c.dtype(v), DType::F8E4M3FN | DType::F8E5M2)) {
        return Err(invalid("expected matrices of float8_e4m3fn or float8_e5m2"));
    }
    // A scale of one element, or of one for each row (column) of the result.
    let scale = |v: Value, at: i64, size: i64| -> Result<Value> {
        if c.dtype(v) != DType::F32 {
            return Err(invalid("expected scales of float32"));
        }
        match c.numel(v) {
            1 => Ok(c.full(c.reshape(v, &[]), &[m, n])),
            count if count == size => Ok(c.broadcast_in_dim(c.reshape(v, &[size]), &[m, n], &[at])),
            _ => Err(unsupported("scales of blocks")),
        }
    };
    let (of_rows, of_columns) = (scale(scale_a, 0, m)?, scale(scale_b, 1, n)?);
    let wide = |v: Value| c.to(v, DType::F32);
    let product = c.matmul(wide(a), wide(b), Precision::Highest, None);
    let mut y = c.multiply(c.multiply(product, of_rows), of_columns);
    if let Some(bias) = bias {
        if c.shape(bias)[..] != [n] {
            return Err(runtime(format!("Bias must be size {n} but got {}", c.numel(bias))));
        }
        y = c.add(y, c.broadcast_in_dim(wide(bias), &[m, n], &[1]));
    }
    if let Some(scale) = scale_result {
        y = c.multiply(y, c.full(c.reshape(wide(scale), &[]), &[m, n]));
    }
    Ok(c.to(y, out))
}

/// A call of torch's kernel: how it packs depends on the processor, and nobody else can read it.
fn host(c: &Ctx, op: &str, args: &[Item<'_>], ty: TensorType) -> Result<Value> {
    if !c.config.target.library {
        return Err(unsupported("weights packed for the host's processor"));
    }
    let out = c.call_library(op, args, &[Some(Outcome::row_major(ty))]);
    out.into_iter().flatten().next().ok_or_else(|| runtime(format!("{op}: no result")))
}

fn int4_pack(c: &Ctx, weight: Value, inner: i64) -> Result<Value> {
    let name = "_convert_weight_to_int4pack_for_cpu";
    if c.dtype(weight) != DType::S32 {
        return Err(runtime(format!("{name} : expect weight to be int32")));
    }
    let &[n, k] = c.shape(weight).as_slice() else {
        return Err(runtime(format!("{name} : expect weight to be 2D tensor.")));
    };
    if n % 16 != 0 || k % 2 != 0 {
        return Err(unsupported("sizes that the packing does not divide"));
    }
    host(
        c,
        name,
        &[Item::Tensor(weight), Item::Int(inner)],
        TensorType::new(DType::U8, [n, k / 2].as_slice()),
    )
}

fn int4_product(c: &Ctx, x: Value, weight: Value, group: i64, scales_and_zeros: Value) -> Result<Value> {
    let name = "_weight_int4pack_mm_for_cpu";
    let (dtype, a, b) = (c.dtype(x), c.shape(x), c.shape(weight));
    if !matches!(dtype, DType::F32 | DType::F16 | DType::BF16) {
        return Err(runtime(format!("{name} : expect A to be either 32-bit or 16-bit float tensor.")));
    }
    let (&[m, k], &[n, half]) = (a.as_slice(), b.as_slice()) else {
        return Err(runtime(format!("{name} : expect A and B to be 2D tensors.")));
    };
    if c.dtype(weight) != DType::U8 || half * 2 != k {
        return Err(runtime(format!("{name} : expect B to be uint8 tensor of {n} by {} elements.", k / 2)));
    }
    if !matches!(group, 32 | 64 | 128 | 256) {
        return Err(runtime(format!("{name}: expect qGroupSize to be 32, 64, 128 or 256, got {group}")));
    }
    if c.dtype(scales_and_zeros) != dtype || !matches!(*c.shape(scales_and_zeros), [_, rows, 2] if rows == n)
    {
        return Err(runtime(format!("{name}: expect qScaleAndZeros to be 3d tensor with sizes [:, {n}, 2]")));
    }
    let args = [Item::Rows(x), Item::Tensor(weight), Item::Int(group), Item::Tensor(scales_and_zeros)];
    host(c, name, &args, TensorType::new(dtype, [m, n].as_slice()))
}
