//! The printed text of each op family, as files in `snapshots/`. `INSTA_UPDATE=always cargo test` blesses them.

use std::sync::Arc;

use insta::assert_snapshot;
use oxitorch_hlo::*;

fn ty(dtype: DType, shape: &[i64]) -> TensorType {
    TensorType::new(dtype, shape)
}

fn dims(d: &[i64]) -> Dims {
    Dims::from_slice(d)
}

/// Builds a module with one parameter per type, and prints it.
fn text(types: &[TensorType], body: impl FnOnce(&Builder, &[Value]) -> Vec<Value>) -> String {
    let b = Builder::new();
    let params: Vec<Value> = types.iter().map(|t| b.param(t.clone())).collect();
    let outputs = body(&b, &params);
    let module = b.finish(&outputs).unwrap();
    module.verify().unwrap();
    module.to_text()
}

const F32: DType = DType::F32;

#[test]
fn elementwise() {
    let types = [ty(F32, &[2, 3]), ty(F32, &[2, 3]), ty(DType::Pred, &[]), ty(DType::C64, &[2])];
    let text = text(&types, |b, v| {
        let (x, y) = (v[0], v[1]);
        let sum = b.add(x, b.exponential(y));
        let picked = b.select(v[2], sum, x);
        let clamped = b.clamp(b.scalar_f64(F32, 0.0), picked, b.scalar_f64(F32, 1.0));
        let total = b.compare_as(x, y, Direction::Lt, CompareKind::TotalOrder);
        let whole = b.convert(clamped, DType::S32);
        let unsigned = b.gt(b.bitcast_convert(x, DType::U32), b.bitcast_convert(y, DType::U32));
        let flags = b.and(b.and(total, b.eq(whole, b.zeros_like(whole))), b.and(b.is_finite(x), unsigned));
        vec![
            flags,
            b.clamp(x, y, sum),
            b.clamp(b.scalar_f64(F32, 0.0), y, sum),
            b.reduce_precision(x, 5, 10),
            b.abs(v[3]),
            b.complex(b.real(v[3]), b.imag(v[3])),
        ]
    });
    assert_snapshot!(text);
}

#[test]
fn chlo() {
    let text = text(&[ty(F32, &[2, 3])], |b, v| {
        let (values, at) = b.top_k(v[0], 2);
        vec![b.zeta(b.erf(v[0]), b.lgamma(v[0])), values, at]
    });
    assert_snapshot!(text);
}

#[test]
fn constants() {
    let text = text(&[], |b, _| {
        let scalars = DType::all().map(|d| b.scalar_f64(d, 1.5));
        let odd = [0.1, 1e-40, f64::NAN, f64::NEG_INFINITY, -0.0, 1e30].map(|v| b.scalar_f64(F32, v));
        scalars
            .chain(odd)
            .chain([
                b.scalar_c(DType::C128, 0.1, f64::INFINITY),
                b.vector_i64(DType::S32, &[1, -2]),
                b.dense(ty(DType::Pred, &[2, 2]), vec![0, 1, 1, 0]),
                b.dense(ty(F32, &[2]), vec![0; 8]),
                b.constant(ty(F32, &[0, 2]), 1.0),
                b.max_value(DType::U64),
                b.min_value(DType::S64),
            ])
            .collect()
    });
    assert_snapshot!(text);
}

#[test]
fn shape() {
    let text = text(&[ty(F32, &[2, 3])], |b, v| {
        let x = v[0];
        vec![
            b.reshape(x, &[6]),
            b.transpose_last2(x),
            b.broadcast_to(x, &[4, 2, 3]),
            b.slice(x, &[0, 1], &[2, 3], &[1, 2]),
            b.pad(x, b.scalar_f64(F32, 0.0), &[-1, 0], &[0, 2], &[0, 1]),
            b.concatenate(&[x, x], 1),
            b.reverse(x, &[0]),
            b.iota_dim(x, DType::S32, 1),
        ]
    });
    assert_snapshot!(text);
}

#[test]
fn contractions() {
    let types = [ty(F32, &[2, 4, 3]), ty(F32, &[2, 3, 5]), ty(F32, &[1, 4, 8, 8]), ty(F32, &[6, 2, 3, 3])];
    let text = text(&types, |b, v| {
        let conv = Convolution {
            strides: dims(&[2, 1]),
            padding: [(1, 1), (-1, 0)].into_iter().collect(),
            lhs_dilation: dims(&[1, 2]),
            rhs_dilation: dims(&[2, 1]),
            feature_group_count: 2,
            precision: Precision::Highest,
            ..Convolution::new(2)
        };
        let square = b.matmul(v[0], b.transpose_last2(v[0]), Precision::Highest, None);
        let lower = b.cholesky(square, true);
        let flags = TriangularSolve {
            left_side: true,
            lower: true,
            unit_diagonal: false,
            transpose_a: Transpose::Adjoint,
        };
        vec![
            b.matmul(v[0], v[1], Precision::Default, Some(DType::F64)),
            b.dot_general(v[0], v[1], &DotDims::new(&[], &[], &[2], &[1]), Precision::High, None),
            b.convolution(v[2], v[3], conv),
            b.triangular_solve(lower, v[0], flags),
            b.fft(v[2], FftType::Rfft, &[8]),
        ]
    });
    assert_snapshot!(text);
}

#[test]
fn reductions() {
    let text = text(&[ty(F32, &[2, 4])], |b, v| {
        let x = v[0];
        let zero = b.scalar_f64(F32, 0.0);
        let window = Window { padding: [(0, 0), (1, -1)].into_iter().collect(), ..Window::new(&[1, 2]) };
        let pooled = b.reduce_window_with(Binary::Maximum, x, b.min_value(F32), &window);
        let back =
            b.select_and_scatter(x, pooled, zero, &window, |b, x, y| b.ge(x, y), |b, x, y| b.add(x, y));
        let sorted = b.sort(&[x, b.iota_dim(x, DType::S64, 1)], 1, true, |b, l, r| b.lt(l[0], r[0]));
        // A constant made outside is printed again where the region uses it.
        let two = b.scalar_f64(F32, 2.0);
        let doubled = b.multiply(x, b.full(two, &[2, 4]));
        let scaled = b.reduce(&[doubled], &[zero], &[1], |b, a, e| vec![b.add(a[0], b.multiply(e[0], two))]);
        vec![b.reduce_sum(x, &[1]), back, sorted[1], scaled[0], two]
    });
    assert_snapshot!(text);
}

#[test]
fn indexing() {
    let types = [ty(F32, &[5, 3]), ty(DType::S64, &[4]), ty(F32, &[4, 3]), ty(DType::S32, &[])];
    let text = text(&types, |b, v| {
        let scatter = ScatterDims {
            update_window_dims: dims(&[1]),
            inserted_window_dims: dims(&[0]),
            scatter_dims_to_operand_dims: dims(&[0]),
            index_vector_dim: 1,
            ..ScatterDims::default()
        };
        let flags = ScatterFlags { indices_are_sorted: false, unique_indices: true };
        let rows = b.unsqueeze(v[1], 1);
        let written = b.scatter(&[v[0]], rows, &[v[2]], &scatter, flags, |_, _, new| vec![new[0]]);
        let slice = b.dynamic_slice(v[0], &[v[3], v[3]], &[2, 3]);
        vec![
            b.take_dim(v[0], v[1], 0),
            b.take_along_dim(v[0], b.convert(v[2], DType::S64), 0),
            written[0],
            b.dynamic_update_slice(v[0], slice, &[v[3], v[3]]),
        ]
    });
    assert_snapshot!(text);
}

#[test]
fn memory_spaces() {
    let b = Builder::new();
    b.use_host_memory(true);
    let (x, y) = (b.param(ty(F32, &[2])), b.param(ty(F32, &[3])));
    b.param_attr(y, ArgAttr::Memory(MemorySpace::PinnedHost));
    b.param_attr(x, ArgAttr::Donor);
    let out = b.annotate_device_placement(b.exponential(x), MemorySpace::PinnedHost);
    let back = b.annotate_device_placement(y, MemorySpace::Device);
    let outputs = [out, b.negate(back), b.negate(x)];
    let mut module = b.finish(&outputs).unwrap();
    module.leave_on_host(0).unwrap();
    module.pair_donors();
    assert_snapshot!(module.to_text());
    assert!(module.leave_on_host(3).is_err());
}

#[test]
fn control() {
    let types = [ty(F32, &[2]), ty(DType::S32, &[]), ty(DType::U64, &[3])];
    let text = text(&types, |b, v| {
        let step = b.exponential(v[0]);
        let looped =
            b.for_loop(b.scalar_i64(DType::S32, 0), v[1], &[v[0]], |b, _, a| vec![b.add(a[0], step)]);
        let flag = b.gt(v[1], b.scalar_i64(DType::S32, 3));
        let picked = b.if_(flag, |b| vec![b.negate(step)], |_| vec![step]);
        let case = b.case(v[1], 2, |b, i| vec![b.scalar_f64(F32, i as f64)]);
        let (state, bits) = b.rng_bit_generator(v[2], ty(DType::S32, &[4]), RngAlgorithm::Philox);
        let call = CustomCall {
            target: "oxitorch.eig".into(),
            backend_config: "n = 2 : i64".into(),
            has_side_effect: true,
            ..CustomCall::default()
        };
        b.custom_call(&[v[0]], &[], call);
        let barrier = b.optimization_barrier(&[looped[0], picked[0]]);
        vec![barrier[1], case[0], state, bits]
    });
    assert_snapshot!(text);
}

#[test]
fn collectives() {
    let text = text(&[ty(F32, &[4, 6])], |b, v| {
        let pairs = ReplicaGroups::new(vec![vec![0, 2], vec![1, 3]]).unwrap();
        let all = ReplicaGroups::all(4).unwrap();
        vec![
            b.all_reduce(v[0], &all, Binary::Maximum),
            b.all_gather(v[0], 1, &pairs),
            b.reduce_scatter(v[0], 1, &pairs, Binary::Add),
            b.all_to_all(v[0], 0, 1, &all),
            b.collective_permute(v[0], &[(0, 1), (1, 0)]),
        ]
    });
    assert_snapshot!(text);
}

#[test]
fn values_that_are_cut_over_a_mesh() {
    let mesh = Arc::new(Mesh::new(&[("x", 2), ("y", 4)]).unwrap());
    let cut = |dims: &[&[&str]]| Arc::new(Sharding::new(&mesh, dims).unwrap());
    let b = Builder::new();
    b.set_mesh(&mesh);
    let (x, y) = (b.param(ty(F32, &[8, 8])), b.param(ty(F32, &[8, 8])));
    for (v, sharding) in [(x, cut(&[&["x"], &["y"]])), (y, cut(&[&["y", "x"]]))] {
        b.param_attr(v, ArgAttr::Donor);
        b.param_attr(v, ArgAttr::Sharding(sharding));
    }
    let sum = b.add(x, b.sharding_constraint(y, &cut(&[&[], &["x"]])));
    let total = b.reduce_sum(sum, &[0, 1]);
    let mut module = b.finish(&[sum, total]).unwrap();
    module.set_output_shardings(vec![cut(&[&["y", "x"]]), cut(&[])]).unwrap();
    // The first argument has the result's type too, and another part of it on each device.
    module.pair_donors();
    module.verify().unwrap();
    assert_snapshot!(module.to_text());
}

#[test]
fn module_with_attributes_and_locations() {
    let b = Builder::new();
    b.set_name("train step");
    let (x, y) = (b.param(ty(F32, &[2])), b.param(ty(F32, &[2])));
    b.param_attr(x, ArgAttr::Donor);
    b.param_attr(y, ArgAttr::AliasingOutput(0));
    b.set_location(Some(1));
    let sum = b.add(x, y);
    b.set_location(None);
    b.exponential(sum); // nobody uses it
    let module = b.finish(&[sum]).unwrap();
    assert_eq!(module.live_op_count(), 1);
    assert!(!module.to_text().contains("loc("));
    let line = Some(("train.py".to_owned(), 3));
    let locations = [Location::default(), Location { name: "aten::add".to_owned(), line }];
    let text = module.to_text_with(PrintOptions { locations: &locations });
    assert_snapshot!(text);
}
