use oxitorch_hlo::*;

use crate::common::*;

fn counting(shape: &[i64]) -> Host {
    let n = shape.iter().product::<i64>();
    s32s(shape, &(0..n as i32).collect::<Vec<_>>())
}

#[test]
fn elements_move_where_they_should() {
    let out = run(&[counting(&[2, 3])], |b, v| {
        let x = v[0];
        vec![
            b.reshape(x, &[3, 2]),
            b.transpose(x, &[1, 0]),
            b.slice(x, &[0, 2], &[2, 3], &[1, 1]),
            b.slice_dim(x, 1, 0, 3, 2),
            b.reverse(x, &[1]),
            b.pad(x, b.scalar_i64(DType::S32, -1), &[0, -1], &[1, 1], &[1, 0]),
            b.concatenate(&[x, b.slice_dim(x, 0, 1, 2, 1)], 0),
            b.index_dim(x, 1, 1),
            b.iota_dim(x, DType::S32, 1),
            b.pad_dim(x, b.scalar_i64(DType::S32, 9), 1, 1, 0),
        ]
    });
    let want: &[(&[i64], &[i32])] = &[
        (&[3, 2], &[0, 1, 2, 3, 4, 5]),
        (&[3, 2], &[0, 3, 1, 4, 2, 5]),
        (&[2, 1], &[2, 5]),
        (&[2, 2], &[0, 2, 3, 5]),
        (&[2, 3], &[2, 1, 0, 5, 4, 3]),
        (&[4, 3], &[1, 2, -1, -1, -1, -1, 4, 5, -1, -1, -1, -1]),
        (&[3, 3], &[0, 1, 2, 3, 4, 5, 3, 4, 5]),
        (&[2], &[1, 4]),
        (&[2, 3], &[0, 1, 2, 0, 1, 2]),
        (&[2, 4], &[9, 0, 1, 2, 9, 3, 4, 5]),
    ];
    for (i, (got, (shape, values))) in out.iter().zip(want).enumerate() {
        assert_eq!((&got.ty.shape[..], &got.s32()[..]), (*shape, *values), "{i}");
    }
}

#[test]
fn broadcasting_stretches_ones() {
    let out = run(&[counting(&[2, 1]), counting(&[3])], |b, v| {
        let (x, y) = b.broadcast_pair(v[0], v[1]);
        vec![b.add(x, y), b.broadcast_in_dim(v[1], &[3, 2], &[0]), b.broadcast_to(v[1], &[2, 3])]
    });
    assert_eq!(out[0].s32(), [0, 1, 2, 1, 2, 3]);
    assert_eq!(out[1].s32(), [0, 0, 1, 1, 2, 2]);
    assert_eq!(out[2].s32(), [0, 1, 2, 0, 1, 2]);
}

#[test]
fn iota_counts_in_every_number_type() {
    let numbers: Vec<DType> = DType::all().filter(|&d| d != DType::Pred).collect();
    let out = run(&[], |b, _| {
        let iota = |&d| b.convert(b.iota(TensorType::new(d, vec![2, 3]), 1), DType::F32);
        numbers.iter().map(iota).collect()
    });
    for got in out {
        assert_eq!(got.f32(), [0.0, 1.0, 2.0, 0.0, 1.0, 2.0]);
    }
}

#[test]
fn empty_tensors_pass_through_everything() {
    let out = run(&[zeros(DType::F32, &[0, 3])], |b, v| {
        let x = v[0];
        vec![
            b.reshape(x, &[3, 0]),
            b.transpose(x, &[1, 0]),
            b.slice_dim(x, 1, 1, 2, 1),
            b.pad_dim(x, b.scalar_f64(DType::F32, 7.0), 0, 1, 1),
            b.concatenate(&[x, x], 0),
            b.broadcast_in_dim(x, &[2, 0, 3], &[1, 2]),
            b.reverse(x, &[0]),
            b.reduce_sum(x, &[0]),
            b.reduce_max(x, &[1]),
            b.add(x, x),
            b.iota_dim(x, DType::F32, 0),
        ]
    });
    let shapes: Vec<Vec<i64>> = out.iter().map(|o| o.ty.shape.to_vec()).collect();
    let want: &[&[i64]] =
        &[&[3, 0], &[3, 0], &[0, 1], &[2, 3], &[0, 3], &[2, 0, 3], &[0, 3], &[3], &[0], &[0, 3], &[0, 3]];
    assert_eq!(shapes, want);
    assert_eq!(out[3].f32(), [7.0; 6]);
    assert_eq!(out[7].f32(), [0.0; 3]);
}

/// The largest sizes that the builder lets through compile; running them is a clean error.
#[test]
fn huge_tensors_do_not_abort() {
    for (dtype, shape) in [
        (DType::F32, &[1 << 54][..]),
        (DType::C128, &[1 << 26, 1 << 26]),
        (DType::U8, &[1 << 28, 1 << 28]),
        // Loops over the sizes beside the zero take their time, so these stay moderate.
        (DType::F32, &[1 << 10, 0, 1 << 40]),
    ] {
        let module = build(&[TensorType::scalar(dtype)], |b, v| {
            let x = b.broadcast_to(v[0], shape);
            vec![b.add(x, b.reverse(x, &[0]))]
        });
        match try_run(&module, &[zeros(dtype, &[])]) {
            Ok(out) => assert!(out[0].bytes.is_empty()),
            Err(e) => assert!(e.contains("memory"), "{e}"),
        }
    }
}

/// Moving elements works for every element type, and so do the ops with regions where there is an order.
#[test]
fn every_element_type_moves() {
    let inputs: Vec<Host> = DType::all().map(|d| zeros(d, &[2, 4])).collect();
    run_quick(&inputs, |b, v| {
        let moved = v.iter().flat_map(|&x| {
            let start = b.scalar_i64(DType::S32, 1);
            let rows = b.vector_i64(DType::S32, &[1, 0]);
            let scatter = ScatterDims {
                update_window_dims: dims(&[1]),
                inserted_window_dims: dims(&[0]),
                scatter_dims_to_operand_dims: dims(&[0]),
                index_vector_dim: 1,
                ..ScatterDims::default()
            };
            let flags = ScatterFlags::default();
            let sum = Window::new(&[1, 2]);
            let zero = b.scalar_like(x, 0.0);
            vec![
                b.pad_dim(b.reverse(b.transpose_last2(x), &[0]), zero, 0, 1, -1),
                b.select(b.scalar_bool(true), x, b.ones_like(x)),
                b.dynamic_update_slice(x, b.dynamic_slice(x, &[start, start], &[1, 2]), &[start, start]),
                b.take_dim(x, rows, 0),
                b.scatter(&[x], b.unsqueeze(rows, 1), &[x], &scatter, flags, |b, o, n| {
                    vec![b.add(o[0], n[0])]
                })[0],
                b.reduce_window_with(Binary::Add, x, zero, &sum),
                b.broadcast_to(b.concatenate(&[x, x], 1), &[3, 2, 8]),
            ]
        });
        moved.collect()
    });
    let real: Vec<Host> = inputs.into_iter().filter(|h| !h.ty.dtype.is_complex()).collect();
    run_quick(&real, |b, v| {
        let ordered = v.iter().flat_map(|&x| {
            let window = Window::new(&[1, 4]);
            let source = b.slice_dim(x, 1, 0, 1, 1);
            let zero = b.scalar_like(x, 0.0);
            vec![
                b.sort(&[x], 1, true, |b, l, r| b.lt(l[0], r[0]))[0],
                b.select_and_scatter(x, source, zero, &window, |b, x, y| b.ge(x, y), |b, x, y| b.add(x, y)),
            ]
        });
        ordered.collect()
    });
    let numbers: Vec<Host> = real.into_iter().filter(|h| h.ty.dtype != DType::Pred).collect();
    run_quick(&numbers, |b, v| {
        let both = |&x: &Value| [b.top_k(x, 2).0, b.clamp(b.scalar_like(x, 0.0), x, b.scalar_like(x, 1.0))];
        v.iter().flat_map(both).collect()
    });
}
