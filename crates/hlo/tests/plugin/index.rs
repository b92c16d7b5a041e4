use oxitorch_hlo::*;

use crate::common::*;

fn counting(shape: &[i64]) -> Host {
    let n = shape.iter().product::<i64>();
    s32s(shape, &(0..n as i32).collect::<Vec<_>>())
}

#[test]
fn take_picks_along_a_dimension() {
    let out = run(&[counting(&[3, 4]), s64s(&[2, 2], &[2, 0, 7, -1])], |b, v| {
        vec![
            b.take_dim(v[0], v[1], 1),
            b.take_dim(v[0], v[1], 0),
            b.take_dim(v[0], b.scalar_i64(DType::S32, 1), 0),
        ]
    });
    assert_eq!(out[0].ty.shape[..], [3, 2, 2]);
    assert_eq!(out[0].s32()[..4], [2, 0, 3, 0], "out of range indices are clamped");
    assert_eq!(out[1].ty.shape[..], [2, 2, 4]);
    assert_eq!(out[1].s32()[..8], [8, 9, 10, 11, 0, 1, 2, 3]);
    assert_eq!(out[2].s32(), [4, 5, 6, 7]);
}

#[test]
fn take_along_uses_one_index_per_element() {
    let indices = s64s(&[2, 2], &[3, 0, 1, 1]);
    let out = run1(&[counting(&[3, 4]), indices], |b, v| b.take_along_dim(v[0], v[1], 1));
    assert_eq!(out.s32(), [3, 0, 5, 5]);
}

#[test]
fn gather_of_empty_things() {
    let out = run(&[zeros(DType::F32, &[0, 3]), zeros(DType::S64, &[0])], |b, v| {
        vec![b.take_dim(v[0], v[1], 1), b.take_dim(v[0], v[1], 0), b.take_dim(v[0], b.zeros_like(v[1]), 0)]
    });
    assert_eq!(out[0].ty.shape[..], [0, 0]);
    assert_eq!(out[1].ty.shape[..], [0, 3]);
}

#[test]
fn gather_takes_windows() {
    let dims = GatherDims {
        offset_dims: dims(&[1, 2]),
        start_index_map: dims(&[0, 1]),
        index_vector_dim: 1,
        ..GatherDims::default()
    };
    let starts = s32s(&[2, 2], &[0, 1, 5, 5]);
    let out = run1(&[counting(&[3, 4]), starts], |b, v| b.gather(v[0], v[1], &dims, &[2, 2], false));
    assert_eq!(out.ty.shape[..], [2, 2, 2]);
    assert_eq!(out.s32(), [1, 2, 5, 6, 6, 7, 10, 11]);
}

#[test]
fn scatter_combines_and_drops() {
    let dims = ScatterDims {
        update_window_dims: dims(&[1]),
        inserted_window_dims: dims(&[0]),
        scatter_dims_to_operand_dims: dims(&[0]),
        index_vector_dim: 1,
        ..ScatterDims::default()
    };
    let updates = s32s(&[4, 2], &[1, 2, 3, 4, 5, 6, 7, 8]);
    let rows = s32s(&[4, 1], &[2, 0, 2, 3]);
    let out = run(&[counting(&[3, 2]), rows, updates], |b, v| {
        let flags = ScatterFlags::default();
        let add = b.scatter(&[v[0]], v[1], &[v[2]], &dims, flags, |b, old, new| vec![b.add(old[0], new[0])]);
        let set = b.scatter(&[v[0]], v[1], &[v[2]], &dims, flags, |_, _, new| vec![new[0]]);
        let scaled = b.scatter(&[v[0], b.negate(v[0])], v[1], &[v[2], v[2]], &dims, flags, |b, old, new| {
            vec![b.maximum(old[0], new[0]), b.add(old[1], b.multiply(new[1], b.scalar_i64(DType::S32, 10)))]
        });
        vec![add[0], set[0], scaled[0], scaled[1]]
    });
    assert_eq!(out[0].s32(), [3, 5, 2, 3, 10, 13]);
    assert_eq!(out[1].s32(), [3, 4, 2, 3, 5, 6]);
    assert_eq!(out[2].s32(), [3, 4, 2, 3, 5, 6]);
    assert_eq!(out[3].s32(), [30, 39, -2, -3, 56, 75]);
}

#[test]
fn scatter_with_batching_dimensions() {
    // out[i][indices[i][j]] += updates[i][j]: PyTorch's scatter_add along the last dimension.
    let dims = ScatterDims {
        inserted_window_dims: dims(&[1]),
        input_batching_dims: dims(&[0]),
        scatter_indices_batching_dims: dims(&[0]),
        scatter_dims_to_operand_dims: dims(&[1]),
        index_vector_dim: 2,
        ..ScatterDims::default()
    };
    let (at, updates) = (s64s(&[2, 2], &[0, 0, 2, 1]), s32s(&[2, 2], &[1, 2, 3, 4]));
    let out = run(&[zeros(DType::S32, &[2, 3]), at, updates], |b, v| {
        b.scatter(&[v[0]], v[1], &[v[2]], &dims, ScatterFlags::default(), |b, old, new| {
            vec![b.add(old[0], new[0])]
        })
    });
    assert_eq!(out[0].s32(), [3, 0, 0, 0, 4, 3]);
}

#[test]
fn dynamic_slices_clamp() {
    let out = run(&[counting(&[3, 4]), s32s(&[], &[1]), s32s(&[], &[9])], |b, v| {
        let update = b.full(b.scalar_i64(DType::S32, -1), &[1, 2]);
        vec![
            b.dynamic_slice(v[0], &[v[1], v[2]], &[1, 2]),
            b.dynamic_update_slice(v[0], update, &[v[1], v[2]]),
        ]
    });
    assert_eq!(out[0].s32(), [6, 7]);
    assert_eq!(out[1].s32(), [0, 1, 2, 3, 4, 5, -1, -1, 8, 9, 10, 11]);
    let scalar = run1(&[s32s(&[], &[5])], |b, v| b.dynamic_slice(v[0], &[], &[]));
    assert_eq!(scalar.s32(), [5]);
}
