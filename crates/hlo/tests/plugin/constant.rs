use oxitorch_hlo::*;

use crate::common::*;

/// Bytes without pattern (a multiplicative generator), each `Pred` byte cut to 0 or 1.
fn noise(dtype: DType, n: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 56) as u8
    };
    (0..n * dtype.size_bytes()).map(|_| if dtype == DType::Pred { next() & 1 } else { next() }).collect()
}

#[test]
fn dense_constants_keep_every_bit() {
    let types: Vec<_> = DType::all().map(|d| (TensorType::new(d, vec![5, 3]), noise(d, 15))).collect();
    let out = run(&[], |b, _| types.iter().map(|(t, bytes)| b.dense(t.clone(), bytes.clone())).collect());
    for ((_, want), got) in types.iter().zip(&out) {
        assert_eq!(got.bytes, *want, "{}", got.ty);
    }
}

/// Splats are printed as decimals where that is exact; random bits find the ones where it is not.
#[test]
fn splats_keep_every_bit() {
    for dtype in DType::all() {
        let size = dtype.size_bytes();
        let bytes = noise(dtype, 200);
        let out = run(&[], |b, _| {
            let scalars = bytes.chunks(size).map(|c| b.dense(TensorType::scalar(dtype), c.to_vec()));
            let rows: Vec<Value> = scalars.map(|s| b.reshape(s, &[1])).collect();
            vec![b.concatenate(&rows, 0)]
        });
        let finite_or_equal = out[0].bytes.chunks(size).zip(bytes.chunks(size)).all(|(g, w)| g == w);
        assert!(finite_or_equal, "{dtype}: {:?}\n{:?}", out[0].bytes, bytes);
    }
}

#[test]
fn special_floats_and_extremes_arrive() {
    let floats = [DType::F16, DType::BF16, DType::F32, DType::F64];
    let out = run(&[], |b, _| {
        floats
            .iter()
            .flat_map(|&d| {
                let special =
                    [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -0.0, 0.1].map(|v| b.scalar_f64(d, v));
                special.map(|v| b.convert(v, DType::F64))
            })
            .collect()
    });
    for five in out.chunks(5) {
        let v: Vec<f64> = five.iter().map(|h| h.f64()[0]).collect();
        assert!(v[0].is_nan() && v[1] == f64::INFINITY && v[2] == f64::NEG_INFINITY);
        assert!(v[3] == 0.0 && v[3].is_sign_negative() && (v[4] - 0.1).abs() < 1e-3);
    }
    let out = run(&[], |b, _| {
        vec![
            b.min_value(DType::S64),
            b.max_value(DType::S64),
            b.max_value(DType::U64),
            b.min_value(DType::F32),
            b.max_value(DType::Pred),
        ]
    });
    assert_eq!(out[0].s64(), [i64::MIN]);
    assert_eq!(out[1].s64(), [i64::MAX]);
    assert_eq!(out[2].u64(), [u64::MAX]);
    assert_eq!(out[3].f32(), [f32::NEG_INFINITY]);
    assert_eq!(out[4].pred(), [true]);
}

#[test]
fn empty_and_large_constants() {
    let values: Vec<i32> = (0..5000).collect();
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    let flags: Vec<bool> = (0..5000).map(|i| i % 3 == 0).collect();
    let out = run(&[], |b, _| {
        vec![
            b.constant(TensorType::new(DType::F32, vec![0, 4]), 1.0),
            b.dense(TensorType::new(DType::S32, vec![50, 100]), bytes.clone()),
            b.dense(TensorType::new(DType::Pred, vec![5000]), flags.iter().map(|&f| u8::from(f)).collect()),
            b.full(b.scalar_c(DType::C64, 1.0, -2.0), &[2]),
            b.dense(TensorType::new(DType::Pred, vec![2, 0, 3]), vec![]),
        ]
    });
    assert!(out[0].bytes.is_empty());
    assert_eq!(out[1].s32(), values);
    assert_eq!(out[2].pred(), flags);
    assert_eq!(out[3].c64(), [1.0, -2.0, 1.0, -2.0]);
}
