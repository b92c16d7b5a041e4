use oxitorch_hlo::*;

use crate::common::*;

#[test]
fn reductions_of_every_kind() {
    let x = s32s(&[2, 3], &[1, -2, 3, 4, 5, 6]);
    let out = run(&[x], |b, v| {
        vec![
            b.reduce_sum(v[0], &[1]),
            b.reduce_prod(v[0], &[0]),
            b.reduce_max(v[0], &[0, 1]),
            b.reduce_min(v[0], &[1]),
            b.reduce_any(v[0], &[1]),
            b.reduce_all(v[0], &[1]),
            b.reduce_sum(v[0], &[]),
        ]
    });
    assert_eq!(out[0].s32(), [2, 15]);
    assert_eq!(out[1].s32(), [4, -10, 18]);
    assert_eq!(out[2].s32(), [6]);
    assert_eq!(out[3].s32(), [-2, 4]);
    assert_eq!(out[4].s32(), [-1, 7]);
    assert_eq!(out[5].s32(), [0, 4]);
    assert_eq!(out[6].s32(), [1, -2, 3, 4, 5, 6]);
    let out = run(&[preds(&[3], &[true, false, true])], |b, v| {
        vec![
            b.reduce_any(v[0], &[0]),
            b.reduce_all(v[0], &[0]),
            b.reduce_max(v[0], &[0]),
            b.reduce_sum(v[0], &[0]),
        ]
    });
    assert_eq!(out.iter().map(|o| o.pred()[0]).collect::<Vec<_>>(), [true, false, true, true]);
}

#[test]
fn sums_and_maxima_run_in_every_element_type() {
    let inputs: Vec<_> = DType::all().map(|d| zeros(d, &[3])).collect();
    run_quick(&inputs, |b, v| v.iter().map(|&x| b.reduce_sum(x, &[0])).collect());
    run_quick(&inputs, |b, v| v.iter().map(|&x| b.reduce_prod(x, &[0])).collect());
    let real: Vec<_> = inputs.into_iter().filter(|h| !h.ty.dtype.is_complex()).collect();
    run_quick(&real, |b, v| v.iter().map(|&x| b.reduce_max(x, &[0])).collect());
    run_quick(&real, |b, v| v.iter().map(|&x| b.argmax(x, 0, DType::S64).1).collect());
}

#[test]
fn argmax_takes_the_first_and_nan_wins() {
    let nan = f32::NAN;
    let x = f32s(
        &[4, 3],
        &[1.0, 3.0, 3.0, nan, 2.0, nan, -1.0, -5.0, -5.0, f32::NEG_INFINITY, f32::NEG_INFINITY, 0.0],
    );
    let out = run(&[x], |b, v| {
        let (max, at) = b.argmax(v[0], 1, DType::S64);
        let (min, min_at) = b.argmin(v[0], 1, DType::S32);
        vec![max, at, min, min_at]
    });
    assert_close(&out[0].f32(), &[3.0, nan, -1.0, 0.0], 0.0);
    assert_eq!(out[1].s64(), [1, 0, 0, 2]);
    assert_close(&out[2].f32(), &[1.0, nan, -5.0, f32::NEG_INFINITY], 0.0);
    assert_eq!(out[3].s32(), [0, 0, 1, 0]);
    let lowest = run(&[s8s(&[3], &[-128, -128, -128])], |b, v| vec![b.argmax(v[0], 0, DType::S64).1]);
    assert_eq!(lowest[0].s64(), [0]);
}

#[test]
fn variadic_reduction_uses_constants_in_its_region() {
    let out = run(&[f32s(&[3], &[1.0, 2.0, 3.0])], |b, v| {
        let zero = b.scalar_f64(DType::F32, 0.0);
        // The sum and the sum of doubled elements; the 2 is a constant of the region.
        b.reduce(&[v[0], v[0]], &[zero, zero], &[0], |b, acc, el| {
            let doubled = b.multiply(el[1], b.scalar_f64(DType::F32, 2.0));
            vec![b.add(acc[0], el[0]), b.add(acc[1], doubled)]
        })
    });
    assert_eq!((out[0].f32(), out[1].f32()), (vec![6.0], vec![12.0]));
}

#[test]
fn windows_slide_pad_and_dilate() {
    let x = f32s(&[5], &[1.0, 2.0, 3.0, 4.0, 5.0]);
    let out = run(&[x, f32s(&[], &[0.0])], |b, v| {
        let max = b.min_value(DType::F32);
        let zero = b.scalar_f64(DType::F32, 0.0);
        let w = || Window::new(&[2]);
        let cumulative = Window { padding: [(4, 0)].into_iter().collect(), ..Window::new(&[5]) };
        vec![
            b.reduce_window_with(Binary::Maximum, v[0], max, &Window { strides: dims(&[2]), ..w() }),
            b.reduce_window_with(Binary::Add, v[0], zero, &cumulative),
            b.reduce_window_with(Binary::Add, v[0], zero, &Window { window_dilations: dims(&[3]), ..w() }),
            b.reduce_window_with(Binary::Add, v[0], zero, &Window { base_dilations: dims(&[2]), ..w() }),
            b.reduce_window_with(
                Binary::Add,
                v[0],
                zero,
                &Window { padding: [(-1, -1)].into_iter().collect(), ..w() },
            ),
            b.reduce_window_with(Binary::Add, v[1], zero, &Window::new(&[])),
        ]
    });
    let want: &[&[f32]] = &[
        &[2.0, 4.0],
        &[1.0, 3.0, 6.0, 10.0, 15.0],
        &[5.0, 7.0],
        &[1.0, 2.0, 2.0, 3.0, 3.0, 4.0, 4.0, 5.0],
        &[5.0, 7.0],
        &[0.0],
    ];
    for (got, want) in out.iter().zip(want) {
        assert_eq!(got.f32(), *want);
    }
}

#[test]
fn windows_reduce_several_operands_together() {
    let x = f32s(&[4], &[1.0, 9.0, 3.0, 4.0]);
    let out = run(&[x], |b, v| {
        let at = b.iota_dim(v[0], DType::S32, 0);
        let inits = [b.min_value(DType::F32), b.scalar_i64(DType::S32, -1)];
        b.reduce_window(&[v[0], at], &inits, &Window::new(&[2]), |b, acc, el| {
            let keep = b.ge(acc[0], el[0]);
            vec![b.select(keep, acc[0], el[0]), b.select(keep, acc[1], el[1])]
        })
    });
    assert_eq!(out[0].f32(), [9.0, 9.0, 4.0]);
    assert_eq!(out[1].s32(), [1, 1, 3]);
}

#[test]
fn select_and_scatter_is_the_gradient_of_max_pooling() {
    let x = f32s(&[1, 5], &[1.0, 7.0, 3.0, 8.0, 2.0]);
    let out = run1(&[x, f32s(&[1, 3], &[10.0, 20.0, 30.0])], |b, v| {
        let window = Window {
            strides: dims(&[1, 2]),
            padding: [(0, 0), (1, 1)].into_iter().collect(),
            ..Window::new(&[1, 3])
        };
        let zero = b.scalar_f64(DType::F32, 0.0);
        b.select_and_scatter(v[0], v[1], zero, &window, |b, x, y| b.ge(x, y), |b, x, y| b.add(x, y))
    });
    assert_eq!(out.f32(), [0.0, 10.0, 0.0, 50.0, 0.0]);
}

#[test]
fn sort_moves_operands_together_and_is_stable() {
    let keys = f32s(&[2, 3], &[3.0, 1.0, 2.0, 5.0, 5.0, 4.0]);
    let out = run(&[keys], |b, v| {
        let at = b.iota_dim(v[0], DType::S32, 1);
        let down = b.sort(&[v[0], at], 1, true, |b, l, r| b.gt(l[0], r[0]));
        let up = b.sort(&[v[0]], 0, false, |b, l, r| {
            b.compare_as(l[0], r[0], Direction::Lt, CompareKind::TotalOrder)
        });
        [down, up].concat()
    });
    assert_eq!(out[0].f32(), [3.0, 2.0, 1.0, 5.0, 5.0, 4.0]);
    assert_eq!(out[1].s32(), [0, 2, 1, 0, 1, 2]);
    assert_eq!(out[2].f32(), [3.0, 1.0, 2.0, 5.0, 5.0, 4.0]);
}

#[test]
fn top_k_gives_values_and_positions() {
    let x = f32s(&[2, 4], &[1.0, 4.0, 4.0, 0.0, f32::NAN, 3.0, 2.0, 9.0]);
    let out = run(&[x, zeros(DType::S32, &[3])], |b, v| {
        let (values, at) = b.top_k(v[0], 2);
        let (none, _) = b.top_k(v[1], 0);
        vec![values, at, none]
    });
    assert_close(&out[0].f32(), &[4.0, 4.0, f32::NAN, 9.0], 0.0);
    assert_eq!(out[1].s32(), [1, 2, 0, 3]);
    assert_eq!(out[2].ty.shape[..], [0]);
}

/// Down the columns, along the rows and of everything, number by number and by slices.
#[test]
fn reductions_by_slices_give_the_same() {
    let shapes: [(&[i64], &[i64]); 15] = [
        (&[1021, 17], &[0]),
        (&[8, 8192], &[0]),
        (&[16, 1024], &[0]),
        (&[17, 1024], &[0]),
        (&[3, 700, 8], &[1]),
        (&[5, 61, 64], &[0, 1]),
        (&[6, 9, 40, 8], &[2, 0]),
        (&[4096, 2, 4], &[0]),
        (&[300, 64], &[1]),
        (&[16, 1027], &[1]),
        (&[20_011], &[0]),
        (&[128, 129], &[0, 1]),
        (&[4, 9, 50, 10], &[1, 2, 3]),
        (&[2, 100, 100], &[1, 2]),
        (&[3, 6000, 2], &[1]),
    ];
    for (shape, dims) in shapes {
        let n = shape.iter().product::<i64>() as usize;
        // Whole numbers, of which sums are exact in any order.
        let x: Vec<f32> = (0..n).map(|i| (i * 7919 % 101) as f32 - 50.0).collect();
        let ones: Vec<f32> = (0..n).map(|i| if i % 997 == 5 { -1.0 } else { 1.0 }).collect();
        let inputs = [f32s(shape, &x), f32s(shape, &ones)];
        let run_with = |by_slices: bool| {
            let out = run(&inputs, |b, v| {
                b.vectorize_reductions(by_slices);
                vec![
                    b.reduce_sum(v[0], dims),
                    b.reduce_prod(v[1], dims),
                    b.reduce_max(v[0], dims),
                    b.reduce_min(v[0], dims),
                ]
            });
            out.iter().map(|o| (o.ty.shape.clone(), o.f32())).collect::<Vec<_>>()
        };
        for ((shape, whole), (own, slices)) in run_with(false).into_iter().zip(run_with(true)) {
            assert_eq!(shape, own);
            assert_close(&slices, &whole, 0.0);
        }
    }
}

#[test]
fn only_large_reductions_are_of_slices() {
    let reductions = |shape: &[i64], dims: &[i64]| {
        let b = Builder::new();
        b.vectorize_reductions(true);
        let x = b.param(TensorType::new(DType::F32, shape));
        let y = b.reduce_sum(x, dims);
        let text = b.finish(&[y]).unwrap().to_text();
        let of = |line: &str| {
            line.contains("stablehlo.reduce(").then(|| line.split_once(" : (").unwrap().1.to_owned())
        };
        text.lines()
            .filter_map(of)
            .map(|types| types[..types.find(',').unwrap()].to_owned())
            .collect::<Vec<_>>()
    };
    assert_eq!(reductions(&[1024, 256], &[0]), ["tensor<2x256xf32>"], "down columns");
    assert_eq!(reductions(&[4, 256, 64], &[0, 1]), ["tensor<2x2x64xf32>"], "down columns of two dimensions");
    assert_eq!(reductions(&[1024, 256], &[1]), ["tensor<1024x256xf32>"], "rows for the library");
    assert_eq!(reductions(&[64, 10_000], &[1]), ["tensor<64x1250xf32>"], "rows that are too long for it");
    assert_eq!(reductions(&[1024, 256], &[0, 1]), ["tensor<2x32xf32>"], "all of it");
    assert_eq!(reductions(&[4, 3, 32, 32], &[0, 1, 2, 3]), ["tensor<1536xf32>"], "short dimensions together");
    assert_eq!(reductions(&[3, 4, 4, 4], &[1, 2, 3]), ["tensor<3x4x4x4xf32>"], "few numbers");
    assert_eq!(reductions(&[16, 16], &[0]), ["tensor<16x16xf32>"], "small");
    assert_eq!(reductions(&[10_000, 4], &[1]), ["tensor<10000x4xf32>"], "narrow");
}
