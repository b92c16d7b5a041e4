//! Reductions, windows and sorting.

use super::*;

/// Splits operands into equally many inputs and initial values, and checks them.
fn inputs_and_inits<'a>(s: &Sig<'a>) -> Result<(&'a [&'a TensorType], SmallVec<[DType; 2]>)> {
    let n = s.operands.len() / 2;
    ensure!(n >= 1 && s.operands.len() == 2 * n, "takes as many initial values as inputs, and at least one");
    let (inputs, inits) = s.operands.split_at(n);
    for (i, (x, init)) in inputs.iter().zip(inits).enumerate() {
        ensure!(x.shape == inputs[0].shape, "inputs must have one shape");
        ensure!(
            init.rank() == 0 && init.dtype == x.dtype,
            "initial value {i} must be a scalar of type {}",
            x.dtype
        );
    }
    let dtypes = inputs.iter().map(|t| t.dtype).collect();
    Ok((inputs, dtypes))
}

pub(super) fn reduce(s: &Sig<'_>, dims: &[i64]) -> Result {
    let (inputs, dtypes) = inputs_and_inits(s)?;
    unique_dims(dims, inputs[0].rank(), "dimension")?;
    reducer(s, &dtypes)?;
    let shape = without(&inputs[0].shape, dims);
    Ok(inputs.iter().map(|t| t.with_shape(shape.clone())).collect())
}

fn window_shape(x: &TensorType, w: &Window) -> Result<Dims> {
    let n = x.rank();
    let lens =
        [w.dims.len(), w.strides.len(), w.base_dilations.len(), w.window_dilations.len(), w.padding.len()];
    ensure!(lens.iter().all(|&l| l == n), "every window attribute must have {n} entries");
    let size = |i: usize| {
        window_count(
            x.shape[i],
            w.base_dilations[i],
            w.padding[i],
            w.dims[i],
            w.window_dilations[i],
            w.strides[i],
        )
    };
    (0..n).map(size).collect()
}

pub(super) fn reduce_window(s: &Sig<'_>, w: &Window) -> Result {
    let (inputs, dtypes) = inputs_and_inits(s)?;
    let shape = window_shape(inputs[0], w)?;
    ensure!(w.dims.iter().all(|&d| d >= 1), "window sizes must be at least 1");
    reducer(s, &dtypes)?;
    Ok(inputs.iter().map(|t| t.with_shape(shape.clone())).collect())
}

pub(super) fn select_and_scatter(s: &Sig<'_>, w: &Window) -> Result {
    let (x, source, init) = (s.operands[0], s.operands[1], s.operands[2]);
    let plain = |dims: &Dims| dims.iter().all(|&d| d == 1);
    ensure!(plain(&w.base_dilations) && plain(&w.window_dilations), "dilated windows are not supported");
    let shape = window_shape(x, w)?;
    ensure!(w.dims.iter().all(|&d| d >= 1), "window sizes must be at least 1");
    ensure!(source.shape == shape, "the source must have the windows' shape {shape:?}");
    ensure_types!(source.dtype == x.dtype, "the source must have the operand's element type");
    ensure!(
        init.rank() == 0 && init.dtype == x.dtype,
        "the initial value must be a scalar of type {}",
        x.dtype
    );
    same_len(s.regions.len(), 2, "regions")?;
    for region in s.regions {
        pair_of_scalars(region, &[x.dtype], "select and scatter")?;
    }
    predicate(&s.regions[0], "select")?;
    let returns = &s.regions[1].returns;
    let fits = returns.len() == 1 && returns[0] == TensorType::scalar(x.dtype);
    ensure!(fits, "scatter must return one scalar of type {}, returns ({})", x.dtype, list(returns));
    one(x.clone())
}

pub(super) fn sort(s: &Sig<'_>, dim: i64) -> Result {
    ensure!(!s.operands.is_empty(), "needs at least one operand");
    let x = s.operands[0];
    ensure!(s.operands.iter().all(|t| t.shape == x.shape), "operands must have one shape");
    dim_in_range(dim, x.rank(), "dimension")?;
    same_len(s.regions.len(), 1, "regions")?;
    let fits = s.regions[0].args.len() == 2 * s.operands.len()
        && s.operands.iter().enumerate().all(|(i, t)| {
            let scalar = TensorType::scalar(t.dtype);
            s.regions[0].args[2 * i] == scalar && s.regions[0].args[2 * i + 1] == scalar
        });
    ensure!(fits, "the comparator must take a pair of scalars for each operand");
    predicate(&s.regions[0], "the comparator")?;
    Ok(s.operands.iter().map(|&t| t.clone()).collect())
}
