use crate::args::Tensor;
use crate::context::Ctx;
use crate::error::{Error, Result, runtime, unsupported};
use crate::out::{self, OutDtype};
use crate::pointwise;
use crate::row::Row;
use oxitorch_hlo::{DType, Value};

/// The rows of this family.
pub static ROWS: &[Row] = &[
    pointwise!("complex", complex).out_dtype(OutDtype::Checked(out::of_parts)),
    pointwise!("polar", polar).out_dtype(OutDtype::Checked(out::of_parts)),
    pointwise!("_conj_physical", conj)
        .out_dtype(OutDtype::Same)
        .serves(&["conj_physical.out", "conj_physical_"]),
];

fn parts(c: &Ctx, x: Tensor, y: Tensor) -> Result<[Value; 2]> {
    let known = |t: &Tensor| matches!(t.dtype, DType::F16 | DType::F32 | DType::F64);
    if !known(&x) || !known(&y) {
        return Err(Error::NotImplemented(format!(
            "Expected both inputs to be Half, Float or Double tensors but got {} and {}",
            crate::dtype::scalar_name(x.dtype),
            crate::dtype::scalar_name(y.dtype)
        )));
    }
    if x.dtype != y.dtype {
        return Err(runtime(format!(
            "Expected object of scalar type {} but got scalar type {} for second argument",
            crate::dtype::scalar_name(x.dtype),
            crate::dtype::scalar_name(y.dtype)
        )));
    }
    if x.dtype == DType::F16 {
        return Err(unsupported("complex32"));
    }
    if !matches!(x.dtype, DType::F32 | DType::F64) {
        return Err(runtime(format!(
            "Expected both inputs to be Half, Float or Double tensors but got {0} and {0}",
            crate::dtype::scalar_name(x.dtype)
        )));
    }
    c.align([x.value, y.value], x.dtype)
}

fn complex(c: &Ctx, re: Tensor, im: Tensor) -> Result<Value> {
    let [re, im] = parts(c, re, im)?;
    Ok(c.complex(re, im))
}

fn polar(c: &Ctx, abs: Tensor, angle: Tensor) -> Result<Value> {
    let [abs, angle] = parts(c, abs, angle)?;
    Ok(c.complex(c.multiply(abs, c.cosine(angle)), c.multiply(abs, c.sine(angle))))
}

/// The conjugate, computed rather than marked.
fn conj(c: &Ctx, x: Tensor) -> Value {
    if !x.dtype.is_complex() {
        return x.value;
    }
    c.complex(c.real(x.value), c.negate(c.imag(x.value)))
}
