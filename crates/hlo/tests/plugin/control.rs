use oxitorch_hlo::*;

use crate::common::*;

#[test]
fn loops_read_outer_values() {
    let out = run(&[s32s(&[], &[5]), f32s(&[2], &[1.0, 2.0])], |b, v| {
        let step = b.multiply(v[1], b.full_like(v[1], 3.0));
        let zero = b.scalar_i64(DType::S32, 0);
        let sums = b.for_loop(zero, v[0], &[b.zeros_like(v[1])], |b, i, acc| {
            let i = b.full(b.convert(i, DType::F32), &[2]);
            vec![b.add(b.add(acc[0], step), i)]
        });
        let nested = b.for_loop(zero, v[0], &[zero], |b, i, acc| {
            b.for_loop(zero, i, &[acc[0]], |b, _, acc| vec![b.add(acc[0], b.scalar_i64(DType::S32, 1))])
        });
        vec![sums[0], nested[0]]
    });
    assert_eq!(out[0].f32(), [25.0, 40.0]);
    assert_eq!(out[1].s32(), [10]);
}

#[test]
fn while_stops_on_its_condition() {
    let out = run(&[s64s(&[], &[27])], |b, v| {
        // Collatz: how many steps to 1.
        let one = b.scalar_i64(DType::S64, 1);
        b.while_(
            &[v[0], b.scalar_i64(DType::S64, 0)],
            |b, a| b.ne(a[0], one),
            |b, a| {
                let two = b.scalar_i64(DType::S64, 2);
                let odd = b.eq(b.remainder(a[0], two), one);
                let up = b.add(b.multiply(a[0], b.scalar_i64(DType::S64, 3)), one);
                vec![b.select(odd, up, b.divide(a[0], two)), b.add(a[1], one)]
            },
        )
    });
    assert_eq!(out[1].s64(), [111]);
}

#[test]
fn branches_read_outer_values() {
    for (flag, index, want) in [(true, 0, [4.0, 1.0]), (false, 1, [-2.0, 2.0]), (false, 9, [-2.0, 3.0])] {
        let out = run(&[preds(&[], &[flag]), s32s(&[], &[index]), f32s(&[], &[2.0])], |b, v| {
            let x = v[2];
            let picked = b.if_(v[0], |b| vec![b.multiply(x, x)], |b| vec![b.negate(x)]);
            let case = b.case(v[1], 3, |b, i| vec![b.scalar_f64(DType::F32, i as f64 + 1.0)]);
            vec![picked[0], case[0]]
        });
        assert_eq!([out[0].f32()[0], out[1].f32()[0]], want);
    }
}

#[test]
fn regions_inside_regions() {
    let out = run(&[f32s(&[2, 2], &[1.0, 2.0, 3.0, 4.0]), preds(&[], &[true])], |b, v| {
        b.if_(
            v[1],
            |b| {
                let sum = b.reduce_sum(v[0], &[0]);
                let sorted = b.sort(&[sum], 0, true, |b, l, r| b.gt(l[0], r[0]));
                vec![b.add(sorted[0], b.full_like(sorted[0], 0.5))]
            },
            |b| vec![b.constant(TensorType::new(DType::F32, vec![2]), 0.5)],
        )
    });
    assert_eq!(out[0].f32(), [6.5, 4.5]);
}

#[test]
fn barriers_pass_values_through() {
    let out = run(&[f32s(&[1], &[1.0]), s32s(&[2], &[2, 3])], |b, v| b.optimization_barrier(v));
    assert_eq!((out[0].f32(), out[1].s32()), (vec![1.0], vec![2, 3]));
    let one = run(&[f32s(&[1], &[1.0])], |b, v| b.optimization_barrier(v));
    assert_eq!(one[0].f32(), [1.0]);
}

#[test]
fn random_bits_depend_on_the_state_alone() {
    let bits = |state: &[u64], algorithm| {
        let n = state.len() as i64;
        run_quick(&[u64s(&[n], state)], |b, v| {
            let (next, bits) = b.rng_bit_generator(v[0], TensorType::new(DType::U32, vec![8]), algorithm);
            vec![next, bits]
        })
    };
    for (state, algorithm) in [
        (&[1u64, 2][..], RngAlgorithm::ThreeFry),
        (&[1, 2], RngAlgorithm::Philox),
        (&[1, 2, 0], RngAlgorithm::Philox),
        (&[1, 2], RngAlgorithm::Default),
    ] {
        let first = bits(state, algorithm);
        assert_eq!(first, bits(state, algorithm));
        assert_ne!(first[0].u64(), state, "the state advances");
        assert_ne!(first[1], bits(&first[0].u64(), algorithm)[1]);
    }
    run_quick(&[u64s(&[2], &[1, 2])], |b, v| {
        let numbers = DType::all().filter(|d| d.is_integral() || d.is_float());
        numbers
            .map(|d| b.rng_bit_generator(v[0], TensorType::new(d, vec![3]), RngAlgorithm::Philox).1)
            .collect()
    });
}

#[test]
fn an_unknown_custom_call_is_a_clean_error() {
    let ty = TensorType::new(DType::F32, vec![2]);
    let module = build(std::slice::from_ref(&ty), |b, v| {
        let call = CustomCall {
            target: "oxitorch \"no such\" target".into(),
            backend_config: "axis = 1 : i64, name = \"x\"".into(),
            output_operand_aliases: [(0, 0)].into_iter().collect(),
            ..CustomCall::default()
        };
        b.custom_call(&[v[0]], std::slice::from_ref(&ty), call)
    });
    let error = try_run(&module, &[zeros(DType::F32, &[2])]).unwrap_err();
    assert!(error.contains("no such") && !error.contains("expected"), "{error}");
}

#[test]
fn donated_and_named() {
    let b = Builder::new();
    b.set_name("a b/c");
    b.set_location(Some(0));
    let ty = TensorType::new(DType::F32, vec![2]);
    let (x, y) = (b.param(ty.clone()), b.param(ty));
    b.param_attr(x, ArgAttr::Donor);
    let sum = b.add(x, y);
    let mut module = b.finish(&[sum, y]).unwrap();
    module.set_param_attr(1, ArgAttr::Other("mhlo.sharding = \"{replicated}\"".into())).unwrap();
    let location = Location { name: "add".into(), line: Some(("a \"b\".py".into(), 12)) };
    let text = module.to_text_with(PrintOptions { locations: &[location] });
    assert!(text.contains("module @a_b_c"), "{text}");
    assert!(
        text.contains(r##"loc(#op0)"##) && text.ends_with("#op0 = loc(\"add\"(\"a \\22b\\22.py\":12:0))\n"),
        "{text}"
    );
    let out = try_run(&module, &[f32s(&[2], &[1.0, 2.0]), f32s(&[2], &[3.0, 4.0])]).unwrap();
    assert_eq!(out[0].f32(), [4.0, 6.0]);
}
