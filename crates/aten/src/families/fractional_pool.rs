use super::pooling::{same_shape, scatter_plane};
use crate::args::Tensor;
use crate::context::Ctx;
use crate::dtype::{opmath, shape_text};
use crate::error::{Result, in_32_bits, not_implemented, runtime};
use crate::op;
use crate::row::Row;
use oxitorch_hlo::{DType, Dims, TensorType, Value};

/// The rows of this family: max pools whose windows start at random places.
pub static ROWS: &[Row] = &[
    op!("fractional_max_pool2d", forward::<2>),
    op!("fractional_max_pool2d_backward", backward::<2>),
    op!("fractional_max_pool3d", forward::<3>),
    op!("fractional_max_pool3d_backward", backward::<3>),
];

/// The sizes of a call.
struct Fractional<const N: usize> {
    name: String,
    /// Dimensions before the spatial ones.
    lead: Dims,
    input: [i64; N],
    kernel: [i64; N],
    output: [i64; N],
}

const AXES: [&str; 3] = ["time", "height", "width"];

impl<const N: usize> Fractional<N> {
    fn new(c: &Ctx, x: Tensor, kernel: &[i64], output: &[i64], suffix: &str) -> Result<Self> {
        let name = format!("fractional_max_pool{N}d{suffix}");
        let shape = c.shape(x.value);
        let each = |list: &[i64], what: &str| {
            <[i64; N]>::try_from(list)
                .map_err(|_| runtime(format!("{name}: {what} must either be a single Int or tuple of Ints")))
        };
        let (kernel, output) = (each(kernel, "kernel_size")?, each(output, "output_size")?);
        in_32_bits(&kernel)?;
        in_32_bits(&output)?;
        if shape.len() != N + 1 && shape.len() != N + 2 {
            let (low, high) = (N + 1, N + 2);
            let got = shape_text(&shape);
            return Err(runtime(format!("{name}(): Expected {low}D or {high}D tensor, but got: {got}")));
        }
        let (lead, plane) = shape.split_at(shape.len() - N);
        if let Some(at) = (shape.len() - N - 1..shape.len()).find(|&d| shape[d] == 0) {
            let got = shape_text(&shape);
            return Err(runtime(format!(
                "{name}(): Expected input to have non-zero size for non-batch dimensions, but got{got} with dimension \
                 {at} being empty."
            )));
        }
        let mut input = [0; N];
        input.copy_from_slice(plane);
        for d in 0..N {
            if output[d] + kernel[d] - 1 > input[d] {
                let axis = AXES[d + 3 - N];
                return Err(runtime(format!(
                    "{name}(): pool {axis} {} too large relative to input {axis} {}",
                    kernel[d], input[d]
                )));
            }
        }
        if !x.dtype.is_float() {
            return Err(not_implemented(&format!("fractional_max_pool{N}d_out_frame"), x.dtype));
        }
        Ok(Fractional { name, lead: lead.into(), input, kernel, output })
    }

    fn check_samples(&self, c: &Ctx, samples: Value, dtype: DType) -> Result<()> {
        if c.dtype(samples) != dtype {
            return Err(runtime("Expect _random_samples to have the same dtype as input"));
        }
        let shape = c.shape(samples);
        if shape.len() != 3 {
            return Err(runtime(format!("Expect _random samples to have 3 dimensions got, {}", shape.len())));
        }
        let batch = if self.lead.len() == 2 { self.lead[0] } else { 1 };
        if shape[0] < batch {
            return Err(runtime("Expect _random_samples.size(0) no less then input batch size."));
        }
        let channels = self.lead[self.lead.len() - 1];
        if shape[1] != channels {
            return Err(runtime("Expect _random_samples.size(1) equals to input channel size."));
        }
        if shape[2] != N as i64 {
            return Err(runtime(format!("Expect _random_samples.size(2) equals to {N}; got {}.", shape[2])));
        }
        Ok(())
    }

    /// Where the windows start along dimension `d`: s32 `[planes, output]`.
    fn starts(&self, c: &Ctx, samples: Value, planes: i64, d: usize) -> Value {
        let (dtype, n) = (c.dtype(samples), self.output[d]);
        let shape = [planes, n];
        let last = c.full(c.scalar_i64(DType::S32, self.input[d] - self.kernel[d]), &shape);
        if n == 1 {
            return last;
        }
        let at = c.iota(TensorType::new(DType::S32, shape.as_slice()), 1);
        // In the dtype of the samples, rounding and all, as torch does.
        let number = |x: i64| c.scalar_i64(dtype, x);
        let step = c.full(c.divide(number(self.input[d] - self.kernel[d]), number(n - 1)), &shape);
        let sample = c.broadcast_in_dim(samples, &shape, &[0]);
        let place = c.multiply(c.add(c.to(at, dtype), sample), step);
        let start = c.subtract(c.to(place, DType::S32), c.to(c.multiply(sample, step), DType::S32));
        c.select(c.eq(at, c.full(c.scalar_i64(DType::S32, n - 1), &shape)), last, start)
    }
}

fn forward<const N: usize>(
    c: &Ctx,
    x: Tensor,
    kernel: Dims,
    output: Dims,
    samples: Value,
) -> Result<(Value, Value)> {
    let f = Fractional::<N>::new(c, x, &kernel, &output, "")?;
    f.check_samples(c, samples, x.dtype)?;
    let planes: i64 = f.lead.iter().product();
    let all: i64 = f.input.iter().product();
    let out = super::linalg::with_batch(&f.lead, &f.output);
    if planes == 0 {
        return Ok((c.full(c.scalar_i64(x.dtype, 0), &out), c.full(c.scalar_i64(DType::S64, 0), &out)));
    }
    let samples = c.slice_dim(samples, 0, 0, planes / f.lead[f.lead.len() - 1], 1);
    let samples = c.reshape(samples, &[planes, N as i64]);
    // Places in a plane: `[planes, outputs.., kernel..]`.
    let mut shape = Dims::from_slice(&[planes]);
    shape.extend(f.output.iter().chain(&f.kernel).copied());
    let mut place = c.full(c.scalar_i64(DType::S32, 0), &shape);
    for d in 0..N {
        // Samples are in the order of x, y, z; in three dimensions of z, y, x.
        let own = if N == 2 { 1 - d } else { d } as i64;
        let sample = c.reshape(c.slice_dim(samples, 1, own, own + 1, 1), &[planes]);
        let start = c.broadcast_in_dim(f.starts(c, sample, planes, d), &shape, &[0, 1 + d as i64]);
        let within = c.iota(TensorType::new(DType::S32, shape.clone()), (1 + N + d) as i64);
        let size = c.full(c.scalar_i64(DType::S32, f.input[d]), &shape);
        place = c.add(c.multiply(place, size), c.add(start, within));
    }
    let windows: i64 = f.output.iter().product();
    let window: i64 = f.kernel.iter().product();
    let place = c.reshape(place, &[planes, windows * window]);
    let values = c.take_along_dim(c.reshape(x.value, &[planes, all]), place, 1);
    let each = [planes, windows, window];
    let (values, place) = (c.reshape(values, &each), c.reshape(place, &each));
    let order = c.iota(TensorType::new(DType::S32, each.as_slice()), 2);
    let init =
        [c.scalar_f64(x.dtype, f64::NEG_INFINITY), c.scalar_i64(DType::S32, -1), c.scalar_i64(DType::S32, 0)];
    // The first of the largest, but the last NaN.
    let best = c.reduce(&[values, order, place], &init, &[2], |b, x, y| {
        let (x_nan, y_nan) = (b.ne(x[0], x[0]), b.ne(y[0], y[0]));
        let later = b.gt(y[1], x[1]);
        let larger = b.or(
            b.gt(y[0], x[0]),
            b.and(b.eq(y[0], x[0]), b.and(b.not(later), b.ge(y[1], b.zeros_like(y[1])))),
        );
        let first = b.and(b.lt(x[1], b.zeros_like(x[1])), b.ge(y[1], b.zeros_like(y[1])));
        let numbers = b.and(b.not(x_nan), b.or(larger, first));
        let take = b.or(b.and(y_nan, b.or(b.not(x_nan), later)), b.and(b.not(y_nan), numbers));
        (0..3).map(|i| b.select(take, y[i], x[i])).collect()
    });
    Ok((c.reshape(best[0], &out), c.to(c.reshape(best[2], &out), DType::S64)))
}

fn backward<const N: usize>(
    c: &Ctx,
    grad: Tensor,
    x: Tensor,
    kernel: Dims,
    output: Dims,
    indices: Value,
) -> Result<Value> {
    let f = Fractional::<N>::new(c, x, &kernel, &output, "_backward")?;
    let out = super::linalg::with_batch(&f.lead, &f.output);
    if same_shape(&out, &c.shape(grad.value)).is_err() {
        return Err(runtime(format!("{}(): gradOutput sizes unexpected", f.name)));
    }
    same_shape(&out, &c.shape(indices))?;
    let wide = c.to(grad.value, opmath(grad.dtype));
    let sum = scatter_plane(c, wide, indices, &c.shape(x.value), f.lead.len(), true);
    Ok(c.to(sum, grad.dtype))
}
