use oxitorch_hlo::*;

use crate::common::*;

/// Small integers as floats, so that sums are exact in any order.
fn small(shape: &[i64], seed: u32) -> Host {
    let n = shape.iter().product::<i64>();
    let mut state = seed.wrapping_mul(747796405).wrapping_add(1);
    let mut next = || {
        state = state.wrapping_mul(1664525).wrapping_add(1013904223);
        ((state >> 24) % 7) as f32 - 3.0
    };
    f32s(shape, &(0..n).map(|_| next()).collect::<Vec<_>>())
}

#[test]
fn dot_general_contracts_and_batches() {
    let (x, y) = (small(&[2, 3, 4], 1), small(&[2, 4, 5], 2));
    let (xs, ys) = (x.f32(), y.f32());
    let mut want = vec![0.0; 30];
    for (b, i, j, k) in (0..2 * 3 * 5 * 4).map(|t| (t / 60, t / 20 % 3, t / 4 % 5, t % 4)) {
        want[b * 15 + i * 5 + j] += xs[b * 12 + i * 4 + k] * ys[b * 20 + k * 5 + j];
    }
    let out = run(&[x, y], |b, v| {
        let (x, y) = (v[0], v[1]);
        let bf = |x| b.convert(x, DType::BF16);
        let s8 = |x| b.convert(x, DType::S8);
        let turned = DotDims::new(&[0], &[0], &[2], &[2]);
        vec![
            b.matmul(x, y, Precision::Highest, None),
            b.dot_general(x, b.transpose_last2(y), &turned, Precision::High, None),
            b.matmul(bf(x), bf(y), Precision::Default, Some(DType::F32)),
            b.convert(b.matmul(s8(x), s8(y), Precision::Default, Some(DType::S32)), DType::F32),
        ]
    });
    for got in &out {
        assert_eq!(got.ty.shape[..], [2, 3, 5]);
        assert_eq!(got.f32(), want);
    }
}

#[test]
fn dot_general_of_scalars_vectors_and_nothing() {
    let out = run(&[f32s(&[3], &[1.0, 2.0, 3.0]), zeros(DType::F32, &[2, 0])], |b, v| {
        let inner = DotDims::new(&[], &[], &[0], &[0]);
        let outer = DotDims::default();
        let p = Precision::Default;
        vec![
            b.dot_general(v[0], v[0], &inner, p, None),
            b.dot_general(v[0], v[0], &outer, p, None),
            b.matmul(v[1], b.transpose_last2(v[1]), p, None),
        ]
    });
    assert_eq!(out[0].f32(), [14.0]);
    assert_eq!(out[1].f32(), [1.0, 2.0, 3.0, 2.0, 4.0, 6.0, 3.0, 6.0, 9.0]);
    assert_eq!(out[2].f32(), [0.0; 4]);
}

#[test]
fn dots_run_in_every_element_type() {
    let numbers: Vec<DType> = DType::all().filter(|&d| d != DType::Pred).collect();
    let inputs: Vec<_> = numbers.iter().map(|&d| zeros(d, &[2, 2])).collect();
    let out = run(&inputs, |b, v| {
        let dot = |&x| b.matmul(x, b.ones_like(x), Precision::Default, None);
        v.iter().map(dot).collect()
    });
    assert_eq!(out, inputs);
}

/// The definition, element by element, for one spatial dimension in PyTorch's layout.
fn conv1d(x: &[f32], k: &[f32], n: [i64; 3], m: [i64; 3], c: &Convolution, len: i64) -> Vec<f32> {
    let ([batch, features, size], [out_features, kernel_in, window]) = (n, m);
    let (groups, batch_groups) = (c.feature_group_count, c.batch_group_count);
    let out_batch = batch / batch_groups;
    let mut out = vec![0.0; (out_batch * out_features * len) as usize];
    for (ob, of, at) in (0..out_batch * out_features * len)
        .map(|t| (t / (out_features * len), t / len % out_features, t % len))
    {
        // A feature group reads its own input features, a batch group its own part of the batch.
        let feature_group = of / (out_features / groups);
        let batch_group = of / (out_features / batch_groups);
        let mut sum = 0.0;
        for (kf, w) in (0..kernel_in * window).map(|t| (t / window, t % window)) {
            let tap = if c.reversal[0] { window - 1 - w } else { w };
            let padded = at * c.strides[0] + w * c.rhs_dilation[0] - c.padding[0].0;
            let (i, rest) = (padded.div_euclid(c.lhs_dilation[0]), padded.rem_euclid(c.lhs_dilation[0]));
            // Negative padding cuts the dilated input at its end.
            let end = (size - 1) * c.lhs_dilation[0] + 1 + c.padding[0].1.min(0);
            if rest != 0 || i < 0 || i >= size || padded >= end {
                continue;
            }
            let feature = feature_group * (features / groups) + kf;
            let b = batch_group * out_batch + ob;
            sum += x[((b * features + feature) * size + i) as usize]
                * k[((of * kernel_in + kf) * window + tap) as usize];
        }
        out[((ob * out_features + of) * len + at) as usize] = sum;
    }
    out
}

#[test]
fn convolution_with_every_attribute() {
    let plain = || Convolution::new(1);
    let cases: Vec<([i64; 3], [i64; 3], Convolution)> = vec![
        ([2, 3, 7], [4, 3, 3], plain()),
        (
            [2, 3, 7],
            [4, 3, 3],
            Convolution { strides: dims(&[2]), padding: [(1, 2)].into_iter().collect(), ..plain() },
        ),
        ([1, 2, 9], [3, 2, 3], Convolution { rhs_dilation: dims(&[2]), ..plain() }),
        (
            [1, 2, 5],
            [3, 2, 3],
            Convolution { lhs_dilation: dims(&[3]), padding: [(2, 1)].into_iter().collect(), ..plain() },
        ),
        ([1, 2, 9], [3, 2, 3], Convolution { padding: [(-2, -1)].into_iter().collect(), ..plain() }),
        (
            [1, 2, 6],
            [1, 2, 2],
            Convolution { lhs_dilation: dims(&[2]), padding: [(-1, -3)].into_iter().collect(), ..plain() },
        ),
        ([2, 4, 5], [6, 2, 2], Convolution { feature_group_count: 2, ..plain() }),
        (
            [2, 4, 5],
            [4, 1, 2],
            Convolution { feature_group_count: 4, precision: Precision::Highest, ..plain() },
        ),
        ([4, 3, 5], [6, 3, 2], Convolution { batch_group_count: 2, ..plain() }),
        ([1, 2, 5], [2, 2, 3], Convolution { reversal: [true].into_iter().collect(), ..plain() }),
        ([1, 2, 2], [2, 2, 5], plain()),
    ];
    for (i, (n, m, c)) in cases.into_iter().enumerate() {
        let (x, k) = (small(&n, i as u32), small(&m, 100 + i as u32));
        let got = run1(&[x.clone(), k.clone()], |b, v| b.convolution(v[0], v[1], c.clone()));
        let len = got.ty.shape[2];
        assert_eq!(got.f32(), conv1d(&x.f32(), &k.f32(), n, m, &c, len), "case {i}");
    }
}

/// A layout other than PyTorch's is the transposed convolution of transposed operands; also two and three dimensions,
/// and none, which is a matrix product.
#[test]
fn convolution_layouts_and_ranks() {
    let (x, k) = (small(&[2, 3, 5, 6], 1), small(&[4, 3, 2, 3], 2));
    let out = run(&[x, k], |b, v| {
        let (x, k) = (v[0], v[1]);
        let here = b.convolution(x, k, Convolution::new(2));
        let layout = ConvDims {
            input_batch: 0,
            input_spatial: dims(&[1, 2]),
            input_feature: 3,
            kernel_spatial: dims(&[0, 1]),
            kernel_input_feature: 2,
            kernel_output_feature: 3,
            output_feature: 0,
            output_spatial: dims(&[1, 3]),
            output_batch: 2,
        };
        let nhwc = b.transpose(x, &[0, 2, 3, 1]);
        let hwio = b.transpose(k, &[2, 3, 1, 0]);
        let there = b.convolution(nhwc, hwio, Convolution { dims: layout, ..Convolution::new(2) });
        let cubes = b.convolution(b.unsqueeze(x, 4), b.unsqueeze(k, 4), Convolution::new(3));
        vec![here, b.transpose(there, &[2, 0, 1, 3]), b.squeeze(cubes, &[4])]
    });
    assert_eq!(out[0].ty.shape[..], [2, 4, 4, 4]);
    assert_eq!(out[0].f32(), out[1].f32());
    assert_eq!(out[0].f32(), out[2].f32());
    let (x, k) = (small(&[2, 3], 5), small(&[4, 3], 6));
    let out = run(&[x, k], |b, v| {
        let product = b.matmul(v[0], b.transpose_last2(v[1]), Precision::Default, None);
        vec![b.convolution(v[0], v[1], Convolution::new(0)), product]
    });
    assert_eq!(out[0], out[1]);
}

#[test]
fn convolution_of_half_precision_and_of_nothing() {
    let (x, k) = (small(&[1, 2, 6], 1), small(&[3, 2, 3], 2));
    let out = run(&[x, k, zeros(DType::F32, &[0, 2, 6])], |b, v| {
        let bf = |x| b.convert(x, DType::BF16);
        let wide = Convolution { out_dtype: Some(DType::F32), ..Convolution::new(1) };
        let whole = |x| b.convert(x, DType::S32);
        vec![
            b.convolution(v[0], v[1], Convolution::new(1)),
            b.convolution(bf(v[0]), bf(v[1]), wide),
            b.convert(b.convolution(whole(v[0]), whole(v[1]), Convolution::new(1)), DType::F32),
            b.convolution(v[2], v[1], Convolution::new(1)),
        ]
    });
    assert_eq!(out[0], out[1]);
    assert_eq!(out[0], out[2]);
    assert_eq!(out[3].ty.shape[..], [0, 3, 4]);
}

#[test]
fn cholesky_and_triangular_solve() {
    let a = f32s(&[2, 2], &[4.0, 2.0, 2.0, 5.0]);
    let out = run(&[a, f32s(&[2, 1], &[2.0, 9.0])], |b, v| {
        let lower = b.cholesky(v[0], true);
        let flags = TriangularSolve {
            left_side: true,
            lower: true,
            unit_diagonal: false,
            transpose_a: Transpose::No,
        };
        let y = b.triangular_solve(lower, v[1], flags);
        let turned = TriangularSolve { transpose_a: Transpose::Yes, ..flags };
        let right = TriangularSolve { left_side: false, ..flags };
        let adjoint = TriangularSolve { transpose_a: Transpose::Adjoint, unit_diagonal: true, ..flags };
        vec![
            b.triangular_solve(lower, y, turned),
            b.triangular_solve(lower, b.transpose_last2(v[1]), right),
            b.triangular_solve(lower, v[1], adjoint),
        ]
    });
    // Lower factor [[2, 0], [1, 2]]; the first two solves together solve a x = b.
    assert_close(&out[0].f32(), &[-0.5, 2.0], 1e-5);
    assert_close(&out[1].f32(), &[-1.25, 4.5], 1e-5);
    assert_close(&out[2].f32(), &[-7.0, 9.0], 1e-5);
}

#[test]
fn fourier_transforms_invert_each_other() {
    let x = f32s(&[2, 5], &[1.0, 2.0, 3.0, 4.0, 5.0, 0.0, 1.0, 0.0, -1.0, 2.0]);
    let out = run(std::slice::from_ref(&x), |b, v| {
        let half = b.fft(v[0], FftType::Rfft, &[5]);
        let z = b.complex(v[0], b.zeros_like(v[0]));
        let plane = b.fft(z, FftType::Fft, &[2, 5]);
        vec![half, b.fft(half, FftType::Irfft, &[5]), b.real(b.fft(plane, FftType::Ifft, &[2, 5]))]
    });
    assert_eq!(out[0].ty.shape[..], [2, 3]);
    assert_close(&out[0].c64()[..2], &[15.0, 0.0], 1e-5);
    assert_close(&out[1].f32(), &x.f32(), 1e-5);
    assert_close(&out[2].f32(), &x.f32(), 1e-5);
}

#[test]
fn convolutions_and_factorisations_run_in_every_element_type_they_accept() {
    let numbers: Vec<Host> =
        DType::all().filter(|&d| d != DType::Pred).map(|d| zeros(d, &[1, 1, 3])).collect();
    run_quick(&numbers, |b, v| v.iter().map(|&x| b.convolution(x, x, Convolution::new(1))).collect());
    for dtype in DType::all().filter(|d| d.is_float() || d.is_complex()) {
        let b = Builder::new();
        let x = b.param(TensorType::new(dtype, vec![2, 2]));
        let flags = TriangularSolve {
            left_side: true,
            lower: true,
            unit_diagonal: true,
            transpose_a: Transpose::Adjoint,
        };
        let lower = b.cholesky(x, true);
        let solved = b.triangular_solve(x, x, flags);
        if let Ok(module) = b.finish(&[lower, solved]) {
            let run = try_run_with(&module, &[zeros(dtype, &[2, 2])], &quick());
            assert!(run.is_ok(), "{dtype}: {}", run.unwrap_err());
        }
    }
}
