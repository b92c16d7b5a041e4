use crate::context::Ctx;
use crate::dtype::scalar_name;
use crate::error::{Result, runtime, unsupported};
use crate::out::{OutDtype, OutStrides};
use crate::row::Row;
use crate::{Layout, op};
use oxitorch_hlo::{DType, Dims, FftType, Value};

/// The rows of this family.
pub static ROWS: &[Row] = &[
    op!("_fft_c2c", fft_c2c)
        .layout(Layout::Transformed)
        .out_dtype(OutDtype::Castable)
        .out_strides(OutStrides::RowMajor),
    op!("_fft_r2c", fft_r2c)
        .layout(Layout::Transformed)
        .out_dtype(OutDtype::Castable)
        .out_strides(OutStrides::RowMajor),
    op!("_fft_c2r", fft_c2r)
        .layout(Layout::Transformed)
        .out_dtype(OutDtype::Castable)
        .out_strides(OutStrides::RowMajor),
];

/// `at::native::fft_norm_mode`: what a transform of `n` elements is multiplied with.
fn norm(mode: i64, n: i64) -> Result<f64> {
    match mode {
        0 => Ok(1.0),
        1 => Ok(1.0 / (n as f64).sqrt()),
        2 => Ok(1.0 / n as f64),
        _ => Err(runtime(format!("unsupported normalization type {mode}"))),
    }
}

fn scale(c: &Ctx, x: Value, factor: f64) -> Value {
    // Where sizes vary, a factor may be 1 at one of them.
    if factor == 1.0 && !c.is_outline() {
        return x;
    }
    c.multiply(x, c.full(c.scalar_c(c.dtype(x), factor, 0.0), &c.shape(x)))
}

/// One transform along `dim`, of `length` elements on the real side.
fn transform(c: &Ctx, x: Value, dim: i64, kind: FftType, length: i64) -> Value {
    let last = c.rank(x) as i64 - 1;
    let moved = c.fft(c.swap_dims(x, dim, last), kind, &[length]);
    c.swap_dims(moved, dim, last)
}

/// Transforms along several dimensions without any factor.
fn unscaled(c: &Ctx, x: Value, dims: &[i64], forward: bool) -> Value {
    let mut y = x;
    for &dim in dims {
        let n = c.shape(y)[dim as usize];
        y = if forward {
            transform(c, y, dim, FftType::Fft, n)
        } else {
            scale(c, transform(c, y, dim, FftType::Ifft, n), n as f64)
        };
    }
    y
}

fn size(c: &Ctx, x: Value, dims: &[i64]) -> i64 {
    let shape = c.shape(x);
    dims.iter().map(|&d| shape[d as usize]).product()
}

/// Dimensions from the front, in the given order: the last one is the halved one.
fn ordered(c: &Ctx, dims: &[i64], rank: usize) -> Result<Dims> {
    let dims: Dims = dims.iter().map(|&d| c.dim(d, rank).map(|d| d as i64)).collect::<Result<_>>()?;
    if rank == 0 || (1..dims.len()).any(|i| dims[..i].contains(&dims[i])) {
        return Err(runtime("FFT dims must be unique"));
    }
    Ok(dims)
}

/// Compilers that keep a float64 as two float32 have no transforms of them.
fn transformable(c: &Ctx, x: Value) -> Result<()> {
    if c.config.target.int64_as_pairs && matches!(c.dtype(x), DType::F64 | DType::C128) {
        return Err(unsupported("Fourier transforms of float64 on this platform"));
    }
    Ok(())
}

fn fft_c2c(c: &Ctx, x: Value, dims: Dims, normalization: i64, forward: bool) -> Result<Value> {
    if !c.dtype(x).is_complex() {
        let dtype = scalar_name(c.dtype(x));
        return Err(runtime(format!("Only supports complex dtypes, but found: {dtype}")));
    }
    if dims.is_empty() {
        return Ok(x);
    }
    transformable(c, x)?;
    let dims = ordered(c, &dims, c.rank(x))?;
    let factor = norm(normalization, size(c, x, &dims))?;
    Ok(scale(c, unscaled(c, x, &dims, forward), factor))
}

fn real_input(c: &Ctx, x: Value) -> Result<()> {
    if matches!(c.dtype(x), DType::F32 | DType::F64) {
        return Ok(());
    }
    Err(runtime(format!("Unsupported dtype {}", scalar_name(c.dtype(x)))))
}

fn fft_r2c(c: &Ctx, x: Value, dims: Dims, normalization: i64, onesided: bool) -> Result<Value> {
    real_input(c, x)?;
    transformable(c, x)?;
    let dims = ordered(c, &dims, c.rank(x))?;
    let Some((&last, rest)) = dims.split_last() else { return Err(runtime("FFT dims must not be empty")) };
    let factor = norm(normalization, size(c, x, &dims))?;
    let y = if onesided {
        let half = transform(c, x, last, FftType::Rfft, c.shape(x)[last as usize]);
        unscaled(c, half, rest, true)
    } else {
        unscaled(c, c.complex(x, c.zeros_like(x)), &dims, true)
    };
    Ok(scale(c, y, factor))
}

fn fft_c2r(c: &Ctx, x: Value, dims: Dims, normalization: i64, last_size: i64) -> Result<Value> {
    if !c.dtype(x).is_complex() {
        let dtype = scalar_name(c.dtype(x));
        return Err(runtime(format!("Only supports complex dtypes, but found: {dtype}")));
    }
    let dims = ordered(c, &dims, c.rank(x))?;
    let Some((&last, rest)) = dims.split_last() else { return Err(runtime("FFT dims must not be empty")) };
    transformable(c, x)?;
    if last_size < 1 {
        return Err(runtime(format!("Invalid number of data points ({last_size}) specified")));
    }
    let have = c.shape(x)[last as usize];
    let zero = c.scalar_i64(c.dtype(x), 0);
    let x = c.pad_dim(x, zero, last, 0, last_size / 2 + 1 - have);
    let y = transform(c, unscaled(c, x, rest, false), last, FftType::Irfft, last_size);
    let n = last_size * size(c, x, rest);
    Ok(scale(c, y, norm(normalization, n)? * last_size as f64))
}
