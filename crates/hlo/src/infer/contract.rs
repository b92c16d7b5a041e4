//! Products, convolutions, decompositions and transforms.

use super::*;

/// `requested[0]` states the result's element type when it is not the operands'.
pub(super) fn dot_general(l: &TensorType, r: &TensorType, d: &DotDims, requested: &[TensorType]) -> Result {
    let dtype = match requested.first() {
        Some(want) => want.dtype,
        None => l.dtype,
    };
    ensure_types!(
        l.dtype == r.dtype || !requested.is_empty(),
        "operands must have one element type or the result type be stated"
    );
    ensure!(l.dtype.is_complex() == r.dtype.is_complex(), "complex and real operands cannot be mixed");
    ensure!(
        l.dtype.class() == dtype.class() || l.dtype == DType::Pred,
        "cannot accumulate {} in {dtype}",
        l.dtype
    );
    same_len(d.rhs_batching.len(), d.lhs_batching.len(), "rhs_batching_dimensions")?;
    same_len(d.rhs_contracting.len(), d.lhs_contracting.len(), "rhs_contracting_dimensions")?;
    let lhs: Dims = d.lhs_batching.iter().chain(&d.lhs_contracting).copied().collect();
    let rhs: Dims = d.rhs_batching.iter().chain(&d.rhs_contracting).copied().collect();
    unique_dims(&lhs, l.rank(), "lhs dimension")?;
    unique_dims(&rhs, r.rank(), "rhs dimension")?;
    for (&a, &b) in lhs.iter().zip(&rhs) {
        let (n, m) = (l.shape[a as usize], r.shape[b as usize]);
        ensure!(n == m, "lhs dimension {a} of size {n} meets rhs dimension {b} of size {m}");
    }
    let batch = d.lhs_batching.iter().map(|&i| l.shape[i as usize]);
    let shape: Dims = batch.chain(without(&l.shape, &lhs)).chain(without(&r.shape, &rhs)).collect();
    one(TensorType::new(dtype, shape))
}

pub(super) fn convolution(x: &TensorType, k: &TensorType, c: &Convolution) -> Result {
    let n = c.dims.input_spatial.len();
    same_len(x.rank(), n + 2, "the input's shape")?;
    same_len(k.rank(), n + 2, "the kernel's shape")?;
    conv_dims(&c.dims, n)?;
    let lens =
        [c.strides.len(), c.padding.len(), c.lhs_dilation.len(), c.rhs_dilation.len(), c.reversal.len()];
    ensure!(lens.iter().all(|&l| l == n), "strides, padding, dilations and reversal must have {n} entries");
    ensure_types!(
        x.dtype == k.dtype || c.out_dtype.is_some(),
        "operands must have one element type or the result type be stated"
    );
    accepts(DTypeSet::NUMBER, x)?;
    let (batch, out_features) = conv_groups(x, k, c)?;
    let mut shape = Dims::from_elem(0, n + 2);
    shape[c.dims.output_batch as usize] = batch;
    shape[c.dims.output_feature as usize] = out_features;
    for i in 0..n {
        let size = x.shape[c.dims.input_spatial[i] as usize];
        let window = k.shape[c.dims.kernel_spatial[i] as usize];
        shape[c.dims.output_spatial[i] as usize] =
            window_count(size, c.lhs_dilation[i], c.padding[i], window, c.rhs_dilation[i], c.strides[i])?;
    }
    one(TensorType::new(c.out_dtype.unwrap_or(x.dtype), shape))
}

fn conv_dims(d: &ConvDims, n: usize) -> Result<()> {
    let check = |a: i64, b: i64, spatial: &[i64], what: &str| {
        same_len(spatial.len(), n, what)?;
        let all: Dims = [a, b].iter().chain(spatial).copied().collect();
        unique_dims(&all, n + 2, what)
    };
    check(d.input_batch, d.input_feature, &d.input_spatial, "input dimension")?;
    check(d.kernel_input_feature, d.kernel_output_feature, &d.kernel_spatial, "kernel dimension")?;
    check(d.output_batch, d.output_feature, &d.output_spatial, "output dimension")
}

/// Checks the group counts and returns the output's batch and feature sizes.
fn conv_groups(x: &TensorType, k: &TensorType, c: &Convolution) -> Result<(i64, i64)> {
    let (groups, batch_groups) = (c.feature_group_count, c.batch_group_count);
    ensure!(groups >= 1 && batch_groups >= 1, "group counts must be at least 1");
    ensure!(
        groups == 1 || batch_groups == 1,
        "feature_group_count and batch_group_count cannot both be above 1"
    );
    let batch = x.shape[c.dims.input_batch as usize];
    let features = x.shape[c.dims.input_feature as usize];
    let kernel_in = k.shape[c.dims.kernel_input_feature as usize];
    let kernel_out = k.shape[c.dims.kernel_output_feature as usize];
    ensure!(batch % batch_groups == 0, "batch {batch} is not divisible by batch_group_count {batch_groups}");
    ensure!(
        features % groups == 0,
        "{features} input features are not divisible by feature_group_count {groups}"
    );
    ensure!(
        features / groups == kernel_in,
        "{features} input features in {groups} groups do not fit a kernel of {kernel_in} input features"
    );
    ensure!(
        kernel_out % groups == 0 && kernel_out % batch_groups == 0,
        "{kernel_out} output features are not divisible by the group count"
    );
    Ok((batch / batch_groups, kernel_out))
}

/// The last two dimensions form square matrices.
fn square(a: &TensorType) -> Result<()> {
    accepts(DTypeSet::FLOAT_COMPLEX, a)?;
    let n = a.rank();
    ensure!(n >= 2 && a.shape[n - 1] == a.shape[n - 2], "the last two dimensions must be equal");
    Ok(())
}

pub(super) fn cholesky(a: &TensorType) -> Result {
    square(a)?;
    one(a.clone())
}

pub(super) fn triangular_solve(a: &TensorType, b: &TensorType, flags: &TriangularSolve) -> Result {
    square(a)?;
    ensure_types!(a.dtype == b.dtype && a.rank() == b.rank(), "operands must have one element type and rank");
    let n = a.rank();
    ensure!(a.shape[..n - 2] == b.shape[..n - 2], "batch dimensions must agree");
    let side = if flags.left_side { n - 2 } else { n - 1 };
    ensure!(b.shape[side] == a.shape[n - 1], "dimension {side} of b must have size {}", a.shape[n - 1]);
    one(b.clone())
}

pub(super) fn fft(x: &TensorType, kind: FftType, length: &[i64]) -> Result {
    let n = length.len();
    ensure!(
        (1..=3).contains(&n) && n <= x.rank(),
        "fft_length must have 1 to 3 entries and no more than the rank"
    );
    ensure!(length.iter().all(|&l| l >= 0), "fft_length {length:?} is negative");
    let real = matches!(kind, FftType::Rfft);
    ensure_types!(
        if real { matches!(x.dtype, DType::F32 | DType::F64) } else { x.dtype.is_complex() },
        "{} of element type {} is not defined",
        kind.name(),
        x.dtype
    );
    let inner = x.rank() - n;
    let half = |l: i64| if l == 0 { 0 } else { l / 2 + 1 };
    for (i, &l) in length.iter().enumerate() {
        let want = if kind == FftType::Irfft && i + 1 == n { half(l) } else { l };
        let got = x.shape[inner + i];
        ensure!(got == want, "dimension {} must have size {want}, got {got}", inner + i);
    }
    let mut shape = x.shape.clone();
    let last = x.rank() - 1;
    let dtype = match kind {
        FftType::Fft | FftType::Ifft => x.dtype,
        FftType::Rfft => {
            shape[last] = half(length[n - 1]);
            x.dtype.complex()
        }
        FftType::Irfft => {
            shape[last] = length[n - 1];
            x.dtype.real()
        }
    };
    one(TensorType::new(dtype, shape))
}
