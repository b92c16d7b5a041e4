//! Modules for all sizes up to a bound.

use oxitorch_hlo::*;

/// What a body gives for a bound of 16 and a sample of 5.
fn bounded(body: impl Fn(&Builder, Value, i64) -> Value) -> Result<Bounded, Unbounded> {
    let module = |size: i64| {
        let b = Builder::new();
        let x = b.param(TensorType::new(DType::F32, [2, size].as_slice()));
        b.set_location(Some(7));
        let y = body(&b, x, size);
        Outline::finish(b, &[y]).unwrap()
    };
    let made = module(16).bounded(&module(5), &[], &[])?;
    made.module.verify().unwrap();
    Ok(made)
}

#[test]
fn a_sum_takes_zeros_for_what_is_beyond_the_size() {
    let made = bounded(|b, x, _| b.reduce_sum(b.exponential(x), &[1])).unwrap();
    assert_eq!(made.numbers, [(16, 5)]);
    insta::assert_snapshot!(made.module.to_text());
}

#[test]
fn what_differs_is_a_number() {
    // The mean, and the last element.
    let made = bounded(|b, x, n| {
        let mean = b.divide(b.reduce_sum(x, &[1]), b.full(b.scalar_f64(DType::F32, n as f64), &[2]));
        b.add(mean, b.index_dim(x, 1, n - 1))
    });
    let bits = |x: f32| i64::from(x.to_bits());
    assert_eq!(made.unwrap().numbers, [(16, 5), (bits(16.0), bits(5.0)), (15, 4)]);
}

#[test]
fn a_number_that_is_by_chance_what_it_is_at_the_bound_is_told_by_another_sample() {
    // A quarter of what there is, rounded in two ways: they are one number at 16, at 8 and at 12.
    let module = |n: i64| {
        let b = Builder::new();
        let x = b.param(TensorType::new(DType::F32, [2, n].as_slice()));
        let first = |k: i64| b.reduce_sum(b.exponential(b.slice_dim(x, 1, 0, k, 1)), &[1]);
        let y = b.subtract(first((n + 3) / 4), first(n / 4));
        Outline::finish(b, &[y]).unwrap()
    };
    let check = |(first, own): (i64, i64), expected: Option<&[(i64, i64)]>| {
        let [bound, first, own] = [16, first, own].map(module);
        let sampled = |outline| Sampled { outline, params: &[], results: &[] };
        let known = bound.bounded(&first, &[], &[]).unwrap().module.to_text();
        let made = bound.of_samples(sampled(&first), sampled(&own)).unwrap();
        made.module.verify().unwrap();
        let served = (made.module.to_text() == known).then_some(made.numbers);
        assert_eq!(served.as_deref(), expected);
        let alone = bound.bounded(&own, &[], &[]).unwrap();
        assert!(alone.module.to_text() != known || expected == Some(&alone.numbers));
    };
    // At 13 one of them is 4, as at the bound.
    check((6, 13), Some(&[(4, 4), (4, 3)]));
    check((6, 9), Some(&[(4, 3), (4, 2)]));
    check((6, 8), Some(&[(4, 2), (4, 2)]));
    // A module in which the two are one does not serve where they differ.
    check((8, 9), None);
    check((8, 12), Some(&[(4, 3)]));
}

#[test]
fn a_transform_is_a_convolution_as_long_as_the_bound_wants_it() {
    let made = bounded(|b, x, n| b.abs(b.fft(x, FftType::Rfft, &[n]))).unwrap();
    assert_eq!(made.numbers, [(16, 5)]);
    let text = made.module.to_text();
    // 16 places that go in and 9 that come out.
    assert!(text.contains("32xcomplex<f32>"), "{text}");
    assert!(!text.contains("RFFT"), "{text}");
}

#[test]
fn a_complex_constant_is_a_number_for_each_part() {
    let made = bounded(|b, x, n| {
        let by = b.full(b.scalar_c(DType::C64, n as f64, 1.0), &[2, n]);
        b.imag(b.multiply(b.complex(x, x), by))
    });
    let bits = |x: f32| i64::from(x.to_bits());
    assert_eq!(made.unwrap().numbers, [(bits(16.0), bits(5.0))]);
}

#[test]
fn a_merged_dimension_stays_where_it_is() {
    let text = |body: fn(&Builder, Value, i64) -> Value| bounded(body).unwrap().module.to_text();
    let merged = text(|b, x, n| b.reduce_sum(b.reshape(x, &[2 * n]), &[0]));
    assert!(!merged.contains("stablehlo.gather"), "{merged}");
    // As a result its elements come first.
    let result = text(|b, x, n| b.reshape(x, &[2 * n]));
    assert!(result.contains("stablehlo.gather"), "{result}");
}

#[test]
fn what_cannot_be_bounded_is_named() {
    let check = |body: fn(&Builder, Value, i64) -> Value, op: &str, reason: &str| {
        let refused = bounded(body).unwrap_err();
        let refused = (refused.op, refused.location, refused.reason.as_str());
        assert_eq!(refused, (op, Some(7), reason));
    };
    let rule = "no rule is known for it where sizes vary";
    let planes = |b: &Builder, x, n| b.abs(b.fft(b.complex(x, x), FftType::Fft, &[2, n]));
    check(planes, "stablehlo.fft", rule);
    let other = "what is computed depends on the size";
    check(|b, x, n| if n > 8 { b.abs(x) } else { b.reverse(x, &[1]) }, "stablehlo.abs", other);
    let counted = "a reduction that counts what it begins with";
    check(
        |b, x, _| b.reduce_with(Binary::Add, x, b.scalar_f64(DType::F32, 2.0), &[1]),
        "stablehlo.reduce",
        counted,
    );
}

#[test]
fn a_loop_over_what_varies_takes_as_many_steps() {
    let made = bounded(|b, x, n| {
        let number = |n: i64| b.scalar_i64(DType::S32, n);
        let inits = [b.zeros_like(x), b.full(b.scalar_f64(DType::F32, 0.0), &[2, 1])];
        let done = b.for_loop(number(0), number(n), &inits, |b, i, s| {
            // From the last one on.
            let start = [number(0), b.subtract(number(n - 1), i)];
            let sum = b.add(s[1], b.dynamic_slice(x, &start, &[2, 1]));
            // A sum within, of all that is in use.
            let all = b.reduce_sum(x, &[1]);
            vec![b.dynamic_update_slice(s[0], sum, &start), b.add(sum, b.reshape(all, &[2, 1]))]
        });
        b.add(b.reduce_sum(done[0], &[1]), b.reshape(done[1], &[2]))
    });
    let made = made.unwrap();
    assert_eq!(made.numbers, [(16, 5), (15, 4)]);
    insta::assert_snapshot!(made.module.to_text());
}

#[test]
fn branches_give_what_lies_alike() {
    let made = bounded(|b, x, n| {
        let merged = b.reshape(x, &[2 * n]);
        let sum = b.reduce_sum(merged, &[0]);
        let is_large = b.gt(sum, b.scalar_f64(DType::F32, n as f64));
        let size = |b: &Builder| b.full(b.scalar_f64(DType::F32, n as f64), &[2 * n]);
        b.reshape(b.if_(is_large, |b| vec![b.negate(merged)], |b| vec![size(b)])[0], &[2, n])
    });
    let text = made.unwrap().module.to_text();
    assert!(!text.contains("stablehlo.gather"), "{text}");
    let differs = bounded(|b, x, n| {
        let i = b.scalar_i64(DType::S32, 0);
        b.case(i, 2, |b, k| vec![if k == 1 && n > 8 { b.abs(b.negate(x)) } else { b.abs(x) }])[0]
    });
    assert_eq!(differs.unwrap_err().reason, "what it does depends on the size");
}

#[test]
fn what_is_taken_with_zeros_is_so_for_all() {
    let count = |body: fn(&Builder, Value) -> Value| {
        let made = bounded(|b, x, _| {
            let y = body(b, x);
            // It is taken with zeros twice, of two shapes, and once as it is.
            let sums = b.add(b.reduce_sum(y, &[1]), b.reduce_sum(b.transpose(y, &[1, 0]), &[0]));
            b.add(b.multiply(y, x), b.broadcast_in_dim(sums, &b.shape(x), &[0]))
        });
        let text = made.unwrap().module.to_text();
        (text.matches("stablehlo.select").count(), text.matches("stablehlo.exponential").count())
    };
    assert_eq!(count(|b, x| b.exponential(x)), (1, 1));
    // Zeros are put in before a product, and both of its operands have them.
    assert_eq!(count(|b, x| b.multiply(b.exponential(x), x)), (2, 1));
    // The sum of what is the same along a dimension takes zeros by itself.
    assert_eq!(
        count(|b, x| b.add(b.exponential(x), b.full(b.scalar_f64(DType::F32, 1.0), &b.shape(x)))),
        (1, 1)
    );
}

#[test]
fn what_is_deferred_is_made_of_what_is_masked() {
    // Rows that are shared out, one of the other operand for each; what is mixed is zero where it is not in use.
    let module = |size: i64| {
        let b = Builder::new();
        b.set_outline(true);
        let x = b.param(TensorType::new(DType::F32, [size, 2].as_slice()));
        let w = b.param(TensorType::new(DType::F32, [size].as_slice()));
        let axes = Axes {
            operands: vec!["ne".into(), "n".into()],
            results: vec!["e".into(), "n".into()],
            mixed: "n".into(),
            first: "n".into(),
            used: "en".into(),
            fixed: String::new(),
        };
        let lower = |b: &Builder, x: &[Value], used: &[Option<Value>]| {
            assert!(used[0].is_none(), "all of e is in use");
            vec![b.reduce_sum(x[0], &[0]), b.select(used[1].unwrap_or(x[1]), x[1], x[1])]
        };
        let types = [[2], [size]].map(|shape| TensorType::new(DType::F32, shape.as_slice()));
        let turned = b.transpose(b.transpose(x, &[1, 0]), &[1, 0]);
        let made = b.deferred("a sum".into(), &[b.exponential(turned), w], &types, axes, Box::new(lower));
        let more = b.reduce_sum(b.negate(made[1]), &[0]);
        Outline::finish(b, &[made[0], more]).unwrap()
    };
    let made = module(16).bounded(&module(5), &[], &[]).unwrap();
    made.module.verify().unwrap();
    assert_eq!(made.numbers, [(16, 5)]);
    let text = made.module.to_text();
    // Both operands are masked, and what follows masks again what it mixes.
    assert_eq!((text.matches("stablehlo.select").count(), text.contains("deferred")), (4, false), "{text}");
}
