use oxitorch_hlo::*;

use crate::common::*;

/// What inference accepts can be compiled: one module per op, with every element type.
#[test]
fn every_op_compiles_for_every_element_type_it_accepts() {
    for &op in Unary::all() {
        let types: Vec<_> = DType::all().filter(|&d| op.accepts(d)).map(|d| zeros(d, &[3])).collect();
        run_quick(&types, |b, v| v.iter().map(|&x| b.unary(op, x)).collect());
    }
    for &op in Binary::all() {
        let types: Vec<_> = DType::all().filter(|&d| op.accepts(d)).map(|d| zeros(d, &[3])).collect();
        run_quick(&types, |b, v| v.iter().map(|&x| b.binary(op, x, b.ones_like(x))).collect());
    }
}

#[test]
fn unary_ops_compute_their_function() {
    type F = fn(f64) -> f64;
    let rows: &[(Unary, F)] = &[
        (Unary::Abs, f64::abs),
        (Unary::Cbrt, f64::cbrt),
        (Unary::Ceil, f64::ceil),
        (Unary::Cosine, f64::cos),
        (Unary::Exponential, f64::exp),
        (Unary::ExponentialMinusOne, f64::exp_m1),
        (Unary::Floor, f64::floor),
        (Unary::Log, f64::ln),
        (Unary::LogPlusOne, f64::ln_1p),
        (Unary::Logistic, |x| 1.0 / (1.0 + (-x).exp())),
        (Unary::Negate, |x| -x),
        (Unary::RoundNearestAfz, f64::round),
        (Unary::RoundNearestEven, f64::round_ties_even),
        (Unary::Rsqrt, |x| 1.0 / x.sqrt()),
        (Unary::Sign, |x| if x == 0.0 { 0.0 } else { x.signum() }),
        (Unary::Sine, f64::sin),
        (Unary::Sqrt, f64::sqrt),
        (Unary::Tan, f64::tan),
        (Unary::Tanh, f64::tanh),
        (Unary::Acos, f64::acos),
        (Unary::Acosh, f64::acosh),
        (Unary::Asin, f64::asin),
        (Unary::Asinh, f64::asinh),
        (Unary::Atan, f64::atan),
        (Unary::Atanh, f64::atanh),
        (Unary::Cosh, f64::cosh),
        (Unary::Sinh, f64::sinh),
    ];
    let xs = [-2.5f32, -0.5, 0.25, 0.5, 0.75, 1.5, 2.5, 3.7];
    let out = run(&[f32s(&[8], &xs)], |b, v| rows.iter().map(|r| b.unary(r.0, v[0])).collect());
    for ((_, f), got) in rows.iter().zip(&out) {
        let want: Vec<f32> = xs.iter().map(|&x| f(f64::from(x)) as f32).collect();
        assert_close(&got.f32(), &want, 2e-6);
    }
}

/// Values from Abramowitz & Stegun's tables and from closed forms.
#[test]
fn special_functions_have_their_known_values() {
    let x = f32s(&[2], &[0.5, 1.0]);
    let pi = std::f64::consts::PI;
    let gamma = 0.577_215_664_901_532_9;
    let cases: &[(Unary, [f64; 2])] = &[
        (Unary::Erf, [0.520_499_877_8, 0.842_700_792_9]),
        (Unary::Erfc, [0.479_500_122_2, 0.157_299_207_1]),
        (Unary::Lgamma, [pi.sqrt().ln(), 0.0]),
        (Unary::Digamma, [-gamma - 2.0 * 2f64.ln(), -gamma]),
        (Unary::BesselI1e, [0.257_894_305_4 * (-0.5f64).exp(), 0.565_159_104_0 * (-1f64).exp()]),
    ];
    let out = run(std::slice::from_ref(&x), |b, v| cases.iter().map(|c| b.unary(c.0, v[0])).collect());
    for ((_, want), got) in cases.iter().zip(&out) {
        let want: Vec<f32> = want.iter().map(|&w| w as f32).collect();
        assert_close(&got.f32(), &want, 5e-6);
    }
    let out = run(&[x], |b, v| {
        let two = b.full_like(v[0], 2.0);
        let one = b.ones_like(v[0]);
        vec![b.erf_inv(b.erf(v[0])), b.zeta(two, one), b.polygamma(one, one), b.next_after(v[0], two)]
    });
    assert_close(&out[0].f32()[..1], &[0.5], 1e-5);
    assert_close(&out[1].f32(), &[(pi * pi / 6.0) as f32; 2], 1e-5);
    assert_close(&out[2].f32(), &[(pi * pi / 6.0) as f32; 2], 1e-5);
    assert_eq!(out[3].f32(), [f32::from_bits(0x3f000001), f32::from_bits(0x3f800001)]);
}

#[test]
fn binary_ops_compute_their_function() {
    let (x, y) = ([-7i32, 7, 12, 1 << 30], [2i32, -2, 10, 3]);
    let out = run(&[s32s(&[4], &x), s32s(&[4], &y)], |b, v| {
        let (x, y) = (v[0], v[1]);
        let shift = b.vector_i64(DType::S32, &[1, 2, 40, 3]);
        vec![
            b.add(x, y),
            b.divide(x, y),
            b.remainder(x, y),
            b.and(x, y),
            b.xor(x, y),
            b.maximum(x, y),
            b.shift_left(x, shift),
            b.shift_right_arithmetic(x, shift),
            b.shift_right_logical(x, shift),
            b.power(y, b.full_like(y, 3.0)),
            b.popcnt(x),
            b.count_leading_zeros(x),
        ]
    });
    let want: [[i32; 4]; 12] = [
        [-5, 5, 22, (1 << 30) + 3],
        [-3, -3, 1, (1 << 30) / 3],
        [-1, 1, 2, 1],
        [-7 & 2, 7 & -2, 12 & 10, 0],
        [-7 ^ 2, 7 ^ -2, 12 ^ 10, (1 << 30) ^ 3],
        [2, 7, 12, 1 << 30],
        [-14, 28, 0, 0],
        [-4, 1, 0, 1 << 27],
        [0x7fff_fffc, 1, 0, 1 << 27],
        [8, -8, 1000, 27],
        [30, 3, 2, 1],
        [0, 29, 28, 1],
    ];
    for (i, (got, want)) in out.iter().zip(want).enumerate() {
        assert_eq!(got.s32(), want, "{i}");
    }
    let out = run(&[f32s(&[2], &[-5.5, 3.0]), f32s(&[2], &[2.0, -4.0])], |b, v| {
        vec![b.remainder(v[0], v[1]), b.atan2(v[0], v[1]), b.power(v[0], v[1]), b.minimum(v[0], v[1])]
    });
    assert_close(&out[0].f32(), &[-1.5, 3.0], 0.0);
    assert_close(&out[1].f32(), &[(-5.5f32).atan2(2.0), 3f32.atan2(-4.0)], 1e-6);
    assert_close(&out[2].f32(), &[30.25, 1.0 / 81.0], 1e-6);
    assert_close(&out[3].f32(), &[-5.5, -4.0], 0.0);
}

#[test]
fn compare_knows_nan_signs_and_order() {
    let nan = f32::NAN;
    let (x, y) = (f32s(&[4], &[1.0, nan, -0.0, 3.0]), f32s(&[4], &[2.0, nan, 0.0, 3.0]));
    let out = run(&[x, y], |b, v| {
        let (x, y) = (v[0], v[1]);
        let total = |d| b.compare_as(x, y, d, CompareKind::TotalOrder);
        vec![
            b.eq(x, y),
            b.ne(x, y),
            b.lt(x, y),
            b.le(x, y),
            b.gt(y, x),
            b.ge(x, y),
            total(Direction::Eq),
            total(Direction::Lt),
            b.is_nan(x),
            b.is_finite(y),
        ]
    });
    let want = [
        [false, false, true, true],
        [true, true, false, false],
        [true, false, false, false],
        [true, false, true, true],
        [true, false, false, false],
        [false, false, true, true],
        [false, true, false, true],
        [true, false, true, false],
        [false, true, false, false],
        [true, false, true, true],
    ];
    for (i, (got, want)) in out.iter().zip(want).enumerate() {
        assert_eq!(got.pred(), want, "{i}");
    }
    let unsigned = run1(&[u8s(&[2], &[200, 1])], |b, v| b.gt(v[0], b.full_like(v[0], 100.0)));
    assert_eq!(unsigned.pred(), [true, false]);
    let bools = run1(&[preds(&[2], &[false, true])], |b, v| b.lt(v[0], b.full_like(v[0], 1.0)));
    assert_eq!(bools.pred(), [true, false]);
    let complex = run1(&[c64s(&[2], &[1.0, 2.0, 1.0, 3.0])], |b, v| {
        b.eq(v[0], b.full(b.scalar_c(DType::C64, 1.0, 2.0), &[2]))
    });
    assert_eq!(complex.pred(), [true, false]);
}

#[test]
fn compare_works_for_every_element_type() {
    let inputs: Vec<_> = DType::all().map(|d| zeros(d, &[2])).collect();
    let out = run(&inputs, |b, v| v.iter().map(|&x| b.eq(x, b.zeros_like(x))).collect());
    assert!(out.iter().all(|o| o.pred() == [true, true]));
}

#[test]
fn select_and_clamp_take_scalars_and_tensors() {
    let x = f32s(&[3], &[-1.0, 0.5, 9.0]);
    let out = run(&[x, preds(&[3], &[true, false, true]), preds(&[], &[false])], |b, v| {
        let (low, high) = (b.scalar_f64(DType::F32, 0.0), b.scalar_f64(DType::F32, 1.0));
        let (lows, highs) = (b.vector_f64(DType::F32, &[-5.0, 1.0, 2.0]), b.full(high, &[3]));
        vec![
            b.select(v[1], v[0], b.zeros_like(v[0])),
            b.select(v[2], v[0], b.zeros_like(v[0])),
            b.clamp(low, v[0], high),
            b.clamp(lows, v[0], highs),
            b.clamp(lows, v[0], high),
        ]
    });
    assert_eq!(out[0].f32(), [-1.0, 0.0, 9.0]);
    assert_eq!(out[1].f32(), [0.0; 3]);
    assert_eq!(out[2].f32(), [0.0, 0.5, 1.0]);
    assert_eq!(out[3].f32(), [-1.0, 1.0, 1.0]);
    assert_eq!(out[4].f32(), [-1.0, 1.0, 1.0]);
}

#[test]
fn convert_goes_between_all_element_types() {
    for from in DType::all() {
        let out = run_quick(&[zeros(from, &[])], |b, v| {
            DType::all().map(|to| b.convert(b.add(v[0], b.ones_like(v[0])), to)).collect()
        });
        let one = run_quick(&[], |b, _| DType::all().map(|to| b.scalar_f64(to, 1.0)).collect());
        assert_eq!(out, one, "{from}");
    }
    let out = run(&[f32s(&[4], &[-1.7, 300.0, f32::NAN, 0.3])], |b, v| {
        vec![b.convert(v[0], DType::S8), b.convert(v[0], DType::Pred), b.convert(v[0], DType::S32)]
    });
    assert_eq!(out[0].s8(), [-1, 127, 0, 0]);
    assert_eq!(out[1].pred(), [true; 4]);
    assert_eq!(out[2].s32(), [-1, 300, 0, 0]);
}

#[test]
fn complex_numbers_come_apart_and_together() {
    let z = c64s(&[2], &[3.0, 4.0, 0.0, -2.0]);
    let out = run(&[z], |b, v| {
        let z = v[0];
        vec![
            b.real(z),
            b.imag(z),
            b.abs(z),
            b.complex(b.imag(z), b.real(z)),
            b.multiply(z, z),
            b.convert(z, DType::S32),
            b.convert(z, DType::Pred),
            b.sqrt(b.multiply(z, z)),
        ]
    });
    assert_eq!(out[0].f32(), [3.0, 0.0]);
    assert_eq!(out[1].f32(), [4.0, -2.0]);
    assert_close(&out[2].f32(), &[5.0, 2.0], 1e-6);
    assert_eq!(out[3].c64(), [4.0, 3.0, -2.0, 0.0]);
    assert_eq!(out[4].c64(), [-7.0, 24.0, -4.0, 0.0]);
    assert_eq!(out[5].s32(), [3, 0]);
    assert_eq!(out[6].pred(), [true, true]);
    assert_close(&out[7].c64(), &[3.0, 4.0, 0.0, 2.0], 1e-5);
}

#[test]
fn bits_are_reinterpreted() {
    let out = run(&[f32s(&[2], &[1.0, -2.0])], |b, v| {
        let bytes = b.bitcast_convert(v[0], DType::U8);
        vec![b.bitcast_convert(v[0], DType::U32), bytes, b.bitcast_convert(bytes, DType::F32)]
    });
    assert_eq!(out[0].u32(), [0x3f80_0000, 0xc000_0000]);
    assert_eq!(out[1].ty.shape[..], [2, 4]);
    assert_eq!(out[1].u8(), [0, 0, 0x80, 0x3f, 0, 0, 0, 0xc0]);
    assert_eq!(out[2].f32(), [1.0, -2.0]);
}

#[test]
fn precision_is_reduced() {
    let third = 1.0f32 / 3.0;
    let out = run1(&[f32s(&[], &[third])], |b, v| b.reduce_precision(v[0], 8, 7));
    assert_eq!(out.f32(), [half::bf16::from_f32(third).to_f32()]);
}
