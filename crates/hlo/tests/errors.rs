//! Mistakes: what is refused, what the message says, and that building goes on.

use std::sync::Arc;

use oxitorch_hlo::*;

fn ty(dtype: DType, shape: &[i64]) -> TensorType {
    TensorType::new(dtype, shape)
}

const F32: DType = DType::F32;

/// Builds with one parameter per type and returns the first error's message.
#[track_caller]
fn message(types: &[TensorType], body: impl FnOnce(&Builder, &[Value])) -> String {
    let b = Builder::new();
    let params: Vec<Value> = types.iter().map(|t| b.param(t.clone())).collect();
    body(&b, &params);
    b.error().expect("this is a mistake").to_string()
}

#[test]
fn messages_name_op_types_and_reason() {
    let types = [ty(F32, &[4]), ty(F32, &[3]), ty(DType::S32, &[4])];
    type Case = (fn(&Builder, &[Value]) -> Value, &'static str);
    let cases: &[Case] = &[
        (
            |b, v| b.add(v[0], v[1]),
            "`stablehlo.add`(tensor<4xf32>, tensor<3xf32>): operands must have the same type",
        ),
        (
            |b, v| b.floor(v[2]),
            "`stablehlo.floor`(tensor<4xi32>): element type must be one of 8-bit float, float, got i32",
        ),
        (
            |b, v| b.reshape(v[0], &[5]),
            "`stablehlo.reshape`(tensor<4xf32>): 4 elements do not fit tensor<5xf32>",
        ),
        (
            |b, v| b.broadcast_to(v[0], &[2, 3]),
            "`stablehlo.broadcast_in_dim`(tensor<4xf32>): size 4 cannot become 3 in dimension 1 of tensor<2x3xf32>",
        ),
        (
            |b, v| b.transpose(v[0], &[1]),
            "`stablehlo.transpose`(tensor<4xf32>): permutation entry 1 is out of range for rank 1",
        ),
        (
            |b, v| b.slice_dim(v[0], 0, 3, 5, 1),
            "`stablehlo.slice`(tensor<4xf32>): bounds 3:5 do not fit dimension 0 of size 4",
        ),
        (
            |b, v| b.concatenate(&[v[0], v[2]], 0),
            "`stablehlo.concatenate`(tensor<4xf32>, tensor<4xi32>): operand 1 has another element type than operand 0",
        ),
        (
            |b, v| b.dot_general(v[0], v[1], &DotDims::new(&[], &[], &[0], &[0]), Precision::Default, None),
            "`stablehlo.dot_general`(tensor<4xf32>, tensor<3xf32>): lhs dimension 0 of size 4 meets rhs dimension 0 of size 3",
        ),
        (
            |b, v| b.pad_dim(v[0], b.scalar_f64(F32, 0.0), 0, -3, -3),
            "`stablehlo.pad`(tensor<4xf32>, tensor<f32>): dimension 0 would have size -2",
        ),
        (
            |b, v| b.reduce_sum(v[0], &[0, 0]),
            "`stablehlo.reduce`(tensor<4xf32>, tensor<f32>): dimension 0 appears twice",
        ),
        (
            |b, v| b.lt(b.convert(v[0], DType::C64), b.convert(v[0], DType::C64)),
            "`stablehlo.compare`(tensor<4xcomplex<f32>>, tensor<4xcomplex<f32>>): complex numbers have no order",
        ),
        (|b, _| b.concatenate(&[], 0), "`stablehlo.concatenate`(): needs at least one operand"),
        (|b, _| b.dense(ty(F32, &[2]), vec![0; 7]), "`stablehlo.constant`(): 7 bytes given, the type has 8"),
        (|b, _| b.min_value(DType::C64), "`stablehlo.constant`(): complex<f32> has no order"),
        (
            |b, v| b.convolution(v[0], v[1], Convolution::new(1)),
            "`stablehlo.convolution`(tensor<4xf32>, tensor<3xf32>): the input's shape must have 3 entries, got 1",
        ),
    ];
    for (body, want) in cases {
        let got = message(&types, |b, v| {
            body(b, v);
        });
        assert_eq!(got, *want);
    }
}

#[test]
fn the_first_error_stays_and_results_keep_plausible_types() {
    let b = Builder::new();
    let (x, y) = (b.param(ty(F32, &[2, 3])), b.param(ty(F32, &[3, 2])));
    let wrong = b.add(x, y);
    assert_eq!(b.ty(wrong), ty(F32, &[2, 3]));
    assert_eq!(b.ty(b.compare(x, y, Direction::Lt)), ty(DType::Pred, &[2, 3]));
    assert_eq!(b.ty(b.reshape(x, &[7])), ty(F32, &[7]));
    assert_eq!(b.rank(b.matmul(x, x, Precision::Default, Some(DType::F64))), 2);
    let sorted = b.sort(&[x, y], 0, true, |b, l, r| b.lt(l[0], r[0]));
    assert_eq!(sorted.len(), 2);
    let (state, bits) = b.rng_bit_generator(x, ty(F32, &[4]), RngAlgorithm::Philox);
    assert_eq!((b.rank(state), b.ty(bits)), (2, ty(F32, &[4])));
    let first = b.error();
    assert!(first.as_ref().unwrap().to_string().contains("stablehlo.add"));
    assert_eq!(b.finish(&[wrong]).err(), first);
}

#[test]
fn regions_keep_their_values() {
    let x = [ty(F32, &[4])];
    let escaped = message(&x, |b, v| {
        let mut inner = v[0];
        b.for_loop(b.scalar_i64(DType::S32, 0), b.scalar_i64(DType::S32, 2), &[v[0]], |b, _, a| {
            inner = b.exponential(a[0]);
            vec![inner]
        });
        b.negate(inner);
    });
    assert_eq!(escaped, "`stablehlo.negate`: operand 0 is used outside of the region that defines it");
    let captured = message(&[ty(F32, &[4]), ty(F32, &[])], |b, v| {
        let zero = b.scalar_f64(F32, 0.0);
        b.reduce(&[v[0]], &[zero], &[0], |b, acc, el| vec![b.add(acc[0], b.multiply(el[0], v[1]))]);
    });
    assert!(captured.contains("may only use its arguments and constants"), "{captured}");
    let returned = message(&x, |b, v| {
        b.sort(&[v[0]], 0, true, |_, _, _| v[0]);
    });
    assert!(returned.starts_with("`stablehlo.return`: operand 0"), "{returned}");
    let reducer = message(&x, |b, v| {
        b.reduce(&[v[0]], &[b.scalar_f64(F32, 0.0)], &[0], |_, acc, el| vec![acc[0], el[0]]);
    });
    assert!(reducer.contains("the reducer returns (tensor<f32>, tensor<f32>)"), "{reducer}");
    let branches = message(&[ty(DType::Pred, &[])], |b, v| {
        b.if_(v[0], |b| vec![b.scalar_bool(true)], |b| vec![b.scalar_f64(F32, 1.0)]);
    });
    assert!(branches.contains("branch 1 returns (tensor<f32>), branch 0 (tensor<i1>)"), "{branches}");
    let body = message(&x, |b, v| {
        b.while_(&[v[0]], |b, _| b.scalar_bool(false), |b, a| vec![b.reduce_sum(a[0], &[0])]);
    });
    assert!(body.contains("the body returns (tensor<f32>)"), "{body}");
}

#[test]
fn strangers_are_refused() {
    let other = Builder::new();
    for _ in 0..5 {
        other.param(ty(F32, &[2]));
    }
    let stranger = other.param(ty(F32, &[2]));
    let b = Builder::new();
    let x = b.param(ty(F32, &[2]));
    assert_eq!((b.dtype(stranger), b.rank(stranger), b.numel(stranger), b.dim(x, 9)), (F32, 0, 1, 1));
    b.add(x, stranger);
    assert_eq!(b.error().unwrap().to_string(), "`stablehlo.add`: operand 1 belongs to another builder");
    let b = Builder::new();
    let error = b.finish(&[stranger]).unwrap_err();
    assert_eq!(error.to_string(), "output 0 belongs to another builder");
    let b = Builder::new();
    b.param_attr(b.scalar_bool(true), ArgAttr::Donor);
    assert!(matches!(b.error(), Some(Error::NoSuchParam { .. })));
    let mut module = Builder::new().finish(&[]).unwrap();
    assert_eq!(module.set_param_attr(0, ArgAttr::Donor), Err(Error::NoSuchParam { index: 0, params: 0 }));
}

#[test]
fn collectives_and_shardings_fit_their_tensors() {
    let two = ReplicaGroups::all(2).unwrap();
    let types = [ty(F32, &[3]), ty(F32, &[])];
    let check = |words: &str, body: &dyn Fn(&Builder, &[Value])| {
        let message = message(&types, body);
        assert!(message.contains(words), "{message}");
    };
    check("has no 2 equal parts", &|b, v| _ = b.reduce_scatter(v[0], 0, &two, Binary::Add));
    check("has no 2 equal parts", &|b, v| _ = b.all_to_all(v[0], 0, 0, &two));
    check("dimension 0 is out of range", &|b, v| _ = b.all_gather(v[1], 0, &two));
    check("is sent to once", &|b, v| _ = b.collective_permute(v[0], &[(0, 1), (2, 1)]));
    check("counted from 0", &|b, v| _ = b.collective_permute(v[0], &[(-1, 1)]));

    let mesh = Arc::new(Mesh::new(&[("x", 2)]).unwrap());
    let rows = Arc::new(Sharding::new(&mesh, &[&["x"]]).unwrap());
    check("another mesh", &|b, v| _ = b.sharding_constraint(v[0], &rows));
    check("another mesh", &|b, v| b.param_attr(v[0], ArgAttr::Sharding(rows.clone())));
    check("2 equal parts", &|b, v| {
        b.set_mesh(&mesh);
        b.sharding_constraint(v[0], &rows);
    });
    let b = Builder::new();
    b.set_mesh(&mesh);
    let x = b.param(ty(F32, &[4]));
    let mut module = b.finish(&[x]).unwrap();
    assert!(module.set_output_shardings(Vec::new()).unwrap_err().to_string().contains("0 shardings for 1"));
    module.set_output_shardings(vec![rows]).unwrap();
}

#[test]
fn sizes_never_overflow() {
    let huge = i64::MAX;
    let types = [ty(F32, &[huge, 2]), ty(F32, &[2])];
    let b = Builder::new();
    let (x, y) = (b.param(types[0].clone()), b.param(types[1].clone()));
    assert_eq!(b.numel(x), huge);
    b.concatenate(&[x, x], 0);
    b.pad(y, b.scalar_f64(F32, 0.0), &[huge], &[huge], &[huge]);
    b.slice(y, &[i64::MIN], &[huge], &[huge]);
    b.slice_dim(y, i64::MIN, 0, 0, 0);
    b.index_dim(y, 0, huge);
    b.unsqueeze(y, huge);
    b.squeeze(y, &[i64::MIN, huge]);
    b.swap_dims(y, -1, huge);
    b.transpose_last2(y);
    b.iota(ty(F32, &[i64::MIN]), i64::MAX);
    b.constant(ty(F32, &[-1]), 0.0);
    b.full(b.scalar_bool(true), &[i64::MIN]);
    b.reduce_window_with(
        Binary::Add,
        y,
        y,
        &Window { padding: [(huge, huge)].into_iter().collect(), ..Window::new(&[huge]) },
    );
    b.take_dim(y, y, huge);
    b.take_along_dim(y, x, i64::MIN);
    b.fft(y, FftType::Rfft, &[huge, i64::MIN, 0, 0]);
    b.top_k(y, huge);
    b.argmax(y, huge, DType::S64);
    b.gather(y, y, &GatherDims { index_vector_dim: i64::MIN, ..GatherDims::default() }, &[huge], true);
    b.scatter(&[], y, &[], &ScatterDims::default(), ScatterFlags::default(), |_, _, _| vec![]);
    b.sort(&[], 0, true, |b, _, _| b.scalar_bool(true));
    b.reduce(&[], &[], &[], |_, _, _| vec![]);
    b.while_(&[], |b, _| b.scalar_bool(true), |_, _| vec![]);
    b.case(y, 0, |_, _| vec![]);
    b.optimization_barrier(&[]);
    b.dynamic_slice(y, &[], &[huge]);
    b.dynamic_update_slice(y, y, &[x]);
    b.convolution(y, y, Convolution { strides: Dims::new(), feature_group_count: 0, ..Convolution::new(3) });
    assert!(b.error().is_some());
}

/// XLA aborts the process on these.
#[test]
fn sizes_beyond_64_bits_are_refused() {
    for shape in [&[i64::MAX][..], &[1 << 40, 1 << 40], &[1 << 40, 1 << 40, 0], &[1 << 61]] {
        let b = Builder::new();
        b.broadcast_to(b.param(ty(F32, &[])), shape);
        assert!(b.error().unwrap().to_string().contains("too large"), "{shape:?}");
        let b = Builder::new();
        b.param(ty(F32, shape));
        assert!(b.error().is_some());
        let b = Builder::new();
        b.constant(ty(F32, shape), 1.0);
        assert!(b.error().is_some());
    }
}

#[test]
fn no_ops_return_their_operand() {
    let b = Builder::new();
    let x = b.param(ty(F32, &[2, 3]));
    let zero = b.scalar_f64(F32, 0.0);
    for same in [
        b.reshape(x, &[2, 3]),
        b.broadcast_in_dim(x, &[2, 3], &[0, 1]),
        b.convert(x, F32),
        b.bitcast_convert(x, F32),
        b.transpose(x, &[0, 1]),
        b.slice(x, &[0, 0], &[2, 3], &[1, 1]),
        b.pad(x, zero, &[0, 0], &[0, 0], &[0, 0]),
        b.concatenate(&[x], 1),
        b.reverse(x, &[]),
        b.reduce_sum(x, &[]),
        b.real(x),
        b.squeeze(x, &[]),
    ] {
        assert_eq!(same, x);
    }
    assert_eq!(b.scalar_f64(F32, 0.0), zero, "splats are interned");
    assert_ne!(b.scalar_f64(F32, -0.0), zero, "by bits, not by value");
    assert_ne!(b.broadcast_in_dim(x, &[3, 2, 3], &[1, 2]), x);
    assert_eq!(b.error(), None);
}
