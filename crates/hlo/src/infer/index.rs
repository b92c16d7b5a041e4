//! Gathers, scatters and the largest elements.

use super::*;

/// Size of the index vector, and the shape of the indices without it.
fn index_shape(indices: &TensorType, index_vector_dim: i64) -> Result<(i64, Dims)> {
    ensure!(indices.dtype.is_integral(), "indices must be integers, got {}", indices.dtype);
    let rank = indices.rank() as i64;
    ensure!((0..=rank).contains(&index_vector_dim), "index_vector_dim {index_vector_dim} is out of range");
    let size = if index_vector_dim == rank { 1 } else { indices.shape[index_vector_dim as usize] };
    Ok((size, without(&indices.shape, &[index_vector_dim])))
}

/// The batching dimensions of an indexed operand and of its indices come in pairs of one size.
fn batching_pairs(
    x: &TensorType,
    dims: &[i64],
    indices: &TensorType,
    index_dims: &[i64],
    vector: i64,
) -> Result<()> {
    same_len(index_dims.len(), dims.len(), "the indices' batching dimensions")?;
    unique_dims(index_dims, indices.rank(), "batching dimension of the indices")?;
    for (&d, &i) in dims.iter().zip(index_dims) {
        ensure!(i != vector, "batching dimension {i} of the indices is index_vector_dim");
        let (n, m) = (x.shape[d as usize], indices.shape[i as usize]);
        ensure!(n == m, "batching dimension {d} of size {n} meets dimension {i} of the indices of size {m}");
    }
    Ok(())
}

pub(super) fn gather(x: &TensorType, indices: &TensorType, d: &GatherDims, sizes: &[i64]) -> Result {
    let (vector, batch) = index_shape(indices, d.index_vector_dim)?;
    same_len(sizes.len(), x.rank(), "slice_sizes")?;
    same_len(d.start_index_map.len(), vector.max(0) as usize, "start_index_map")?;
    let removed: Dims = d.collapsed_slice_dims.iter().chain(&d.operand_batching_dims).copied().collect();
    unique_dims(&removed, x.rank(), "collapsed or batching dimension")?;
    ascending(&d.collapsed_slice_dims, "collapsed_slice_dims")?;
    ascending(&d.operand_batching_dims, "operand_batching_dims")?;
    ascending(&d.offset_dims, "offset_dims")?;
    let indexed: Dims = d.start_index_map.iter().chain(&d.operand_batching_dims).copied().collect();
    unique_dims(&indexed, x.rank(), "start_index_map or batching dimension")?;
    for (i, (&size, &of)) in sizes.iter().zip(&x.shape).enumerate() {
        ensure!(0 <= size && size <= of, "slice size {size} does not fit dimension {i} of size {of}");
    }
    for &i in &removed {
        ensure!(
            sizes[i as usize] <= 1,
            "slice size {} of removed dimension {i} must be at most 1",
            sizes[i as usize]
        );
    }
    batching_pairs(x, &d.operand_batching_dims, indices, &d.start_indices_batching_dims, d.index_vector_dim)?;
    let offsets = without(sizes, &removed);
    same_len(d.offset_dims.len(), offsets.len(), "offset_dims")?;
    let rank = batch.len() + offsets.len();
    unique_dims(&d.offset_dims, rank, "offset dimension")?;
    let (mut batch, mut offsets) = (batch.into_iter(), offsets.into_iter());
    let shape: Dims = (0..rank as i64)
        .filter_map(|i| if d.offset_dims.contains(&i) { offsets.next() } else { batch.next() })
        .collect();
    one(x.with_shape(shape))
}

pub(super) fn scatter(s: &Sig<'_>, d: &ScatterDims) -> Result {
    ensure!(s.operands.len() >= 3 && s.operands.len() % 2 == 1, "takes n inputs, the indices and n updates");
    let n = s.operands.len() / 2;
    let (inputs, indices, updates) = (&s.operands[..n], s.operands[n], &s.operands[n + 1..]);
    let (x, update) = (inputs[0], updates[0]);
    for i in 0..n {
        ensure!(inputs[i].shape == x.shape, "inputs must have one shape");
        ensure!(updates[i].shape == update.shape, "updates must have one shape");
        ensure_types!(inputs[i].dtype == updates[i].dtype, "update {i} must have its input's element type");
    }
    scatter_dims(x, indices, update, d)?;
    let dtypes: SmallVec<[DType; 2]> = inputs.iter().map(|t| t.dtype).collect();
    reducer(s, &dtypes)?;
    Ok(inputs.iter().map(|&t| t.clone()).collect())
}

fn scatter_dims(x: &TensorType, indices: &TensorType, update: &TensorType, d: &ScatterDims) -> Result<()> {
    let (vector, batch) = index_shape(indices, d.index_vector_dim)?;
    same_len(d.scatter_dims_to_operand_dims.len(), vector.max(0) as usize, "scatter_dims_to_operand_dims")?;
    let removed: Dims = d.inserted_window_dims.iter().chain(&d.input_batching_dims).copied().collect();
    unique_dims(&removed, x.rank(), "inserted or batching dimension")?;
    ascending(&d.inserted_window_dims, "inserted_window_dims")?;
    ascending(&d.input_batching_dims, "input_batching_dims")?;
    ascending(&d.update_window_dims, "update_window_dims")?;
    let indexed: Dims =
        d.scatter_dims_to_operand_dims.iter().chain(&d.input_batching_dims).copied().collect();
    unique_dims(&indexed, x.rank(), "scatter_dims_to_operand_dims or batching dimension")?;
    batching_pairs(x, &d.input_batching_dims, indices, &d.scatter_indices_batching_dims, d.index_vector_dim)?;
    same_len(update.rank(), batch.len() + d.update_window_dims.len(), "the updates' shape")?;
    unique_dims(&d.update_window_dims, update.rank(), "update window dimension")?;
    same_len(
        d.update_window_dims.len() + removed.len(),
        x.rank(),
        "window, inserted and batching dimensions",
    )?;
    let limits = without(&x.shape, &removed);
    let (mut batch, mut limits) = (batch.into_iter(), limits.into_iter());
    for (i, &size) in update.shape.iter().enumerate() {
        if d.update_window_dims.contains(&(i as i64)) {
            let of = limits.next().unwrap_or(0);
            ensure!(size <= of, "window size {size} of update dimension {i} exceeds the input's {of}");
        } else {
            let of = batch.next().unwrap_or(0);
            ensure!(size == of, "update dimension {i} has size {size}, the indices have {of}");
        }
    }
    Ok(())
}

pub(super) fn top_k(x: &TensorType, k: i64) -> Result {
    let last = *x.shape.last().ok_or_else(|| Broken::Other("needs at least one dimension".to_owned()))?;
    accepts(DTypeSet::INT.or(DTypeSet::FLOAT), x)?;
    ensure!(0 <= k && k <= last, "k = {k} does not fit the last dimension of size {last}");
    let mut shape = x.shape.clone();
    shape[x.rank() - 1] = k;
    Ok(smallvec![x.with_shape(shape.clone()), TensorType::new(DType::S32, shape)])
}
