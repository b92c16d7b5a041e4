use crate::args::{Arg, Offset, Scalar, Tensor};
use crate::context::Ctx;
use crate::dtype::shape_text;
use crate::error::{Result, index, runtime, value};
use crate::op;
use crate::out::{self, OutDtype};
use crate::row::{Layout, Row};
use oxitorch_hlo::{DType, Dims, TensorType, Value};

/// The rows of this family.
pub static ROWS: &[Row] = &[
    op!("cat", cat).apart(&[0]).layout(Layout::ChannelsLast).out_dtype(OutDtype::Checked(out::concatenated)),
    op!("stack", stack).apart(&[0]).out_dtype(OutDtype::Checked(out::concatenated)),
    op!("repeat", repeat),
    op!("roll", roll).layout(Layout::ChannelsLast).place_offsets(place_roll),
    op!("flip", flip).layout(Layout::LikeFirst),
    op!("constant_pad_nd", constant_pad_nd).layout(Layout::ChannelsLast).check_numbers(|n| n.fits(2)),
    op!("diag_embed", diag_embed),
    op!("diagonal_backward", diagonal_backward),
    op!("slice_backward", slice_backward).place_offsets(place_slice_backward),
    op!("select_backward", select_backward).place_offsets(place_select_backward),
    op!("slice_scatter", slice_scatter).layout(Layout::LikeFirst).place_offsets(place_slice_scatter),
    op!("select_scatter", select_scatter).layout(Layout::LikeFirst).place_offsets(place_select_scatter),
    op!("diagonal_scatter", diagonal_scatter).layout(Layout::LikeFirst),
    op!("unfold_backward", unfold_backward),
    op!("channel_shuffle", channel_shuffle).layout(Layout::ChannelsLast),
    op!("pixel_shuffle", pixel_shuffle).layout(Layout::ChannelsLast),
    op!("pixel_unshuffle", pixel_unshuffle).layout(Layout::ChannelsLast),
    op!("linalg_cross", linalg_cross),
    // As CUDA does; FSDP2 has gradients of bfloat16 reduced in float32 so.
    op!("_chunk_cat", chunk_cat).out_dtype(OutDtype::Castable),
];

fn zero(c: &Ctx, dtype: DType) -> Value {
    c.scalar_i64(dtype, 0)
}

/// A vector without elements takes part in `cat` with any shapes: torch's old notion of an empty tensor.
fn skipped(c: &Ctx, t: &Tensor) -> bool {
    c.shape(t.value).as_slice() == [0]
}

fn cat(c: &Ctx, tensors: Vec<Tensor>, dim: i64) -> Result<Value> {
    if tensors.is_empty() {
        return Err(value("torch.cat(): expected a non-empty list of Tensors"));
    }
    if let Some(i) = tensors.iter().position(|t| t.rank == 0) {
        return Err(runtime(format!("zero-dimensional tensor (at position {i}) cannot be concatenated")));
    }
    let dtype = c.result_type(&tensors)?;
    let used: Vec<(usize, Value)> = tensors
        .iter()
        .enumerate()
        .filter(|(_, t)| !skipped(c, t))
        .map(|(i, t)| (i, c.to(t.value, dtype)))
        .collect();
    let Some(&(_, first)) = used.first() else { return Ok(c.to(tensors[0].value, dtype)) };
    let shape = c.shape(first);
    let dim = c.dim(dim, shape.len())?;
    for &(i, t) in &used {
        let other = c.shape(t);
        if other.len() != shape.len() {
            let text = "Tensors must have same number of dimensions: got";
            return Err(runtime(format!("{text} {} and {}", shape.len(), other.len())));
        }
        if let Some(d) = (0..shape.len()).find(|&d| d != dim && shape[d] != other[d]) {
            return Err(runtime(format!(
                "Sizes of tensors must match except in dimension {dim}. Expected size {} but got size {} for tensor \
                 number {i} in the list.",
                shape[d], other[d]
            )));
        }
    }
    let values: Vec<Value> = used.into_iter().map(|(_, t)| t).collect();
    Ok(c.concatenate(&values, dim as i64))
}

fn stack(c: &Ctx, tensors: Vec<Tensor>, dim: i64) -> Result<Value> {
    let Some(first) = tensors.first() else {
        return Err(runtime("stack expects a non-empty TensorList"));
    };
    let (shape, dtype) = (c.shape(first.value), c.result_type(&tensors)?);
    let dim = c.dim(dim, shape.len() + 1)? as i64;
    let mut parts = Vec::new();
    for (i, t) in tensors.iter().enumerate() {
        let other = c.shape(t.value);
        if other != shape {
            return Err(runtime(format!(
                "stack expects each tensor to be equal size, but got {} at entry 0 and {} at entry {i}",
                shape_text(&shape),
                shape_text(&other)
            )));
        }
        parts.push(c.unsqueeze(c.to(t.value, dtype), dim));
    }
    Ok(c.concatenate(&parts, dim))
}

fn repeat(c: &Ctx, x: Value, repeats: Dims) -> Result<Value> {
    let shape = c.shape(x);
    let Some(new) = repeats.len().checked_sub(shape.len()) else {
        return Err(runtime(
            "Number of dimensions of repeat dims can not be smaller than number of dimensions of tensor",
        ));
    };
    let mut padded = Dims::from_elem(1, new);
    padded.extend_from_slice(&shape);
    let result: Dims = padded.iter().zip(&repeats).map(|(n, r)| n * r).collect();
    if let Some(bad) = result.iter().zip(&repeats).find_map(|(n, r)| (*r < 0).then_some(n)) {
        let text = format!("Trying to create tensor with negative dimension {bad}: {}", shape_text(&result));
        return Err(runtime(text));
    }
    // [a, b] repeated (r, s) times is [r, a, s, b] with the odd dimensions broadcast.
    let interleaved: Dims = repeats.iter().zip(&padded).flat_map(|(r, n)| [*r, *n]).collect();
    let from: Dims = (new..repeats.len()).map(|d| 2 * d as i64 + 1).collect();
    Ok(c.reshape(c.broadcast_in_dim(x, &interleaved, &from), &result))
}

fn roll_one(c: &Ctx, x: Value, shift: Offset, dim: i64) -> Value {
    let size = c.shape(x)[dim as usize];
    if size == 0 {
        return x;
    }
    let Some(shift) = shift.known() else {
        // A window of two copies side by side, which begins `shift` elements before the second one.
        let ahead = c.subtract(c.scalar_i64(DType::S64, size), shift.value(c, DType::S64));
        return c.dynamic_slice(c.concatenate(&[x, x], dim), &starts(c, x, dim, ahead), &c.shape(x));
    };
    let split = size - shift.rem_euclid(size);
    if split == size {
        return x;
    }
    c.concatenate(&[c.slice_dim(x, dim, split, size, 1), c.slice_dim(x, dim, 0, split, 1)], dim)
}

/// The start of a slice that begins at `start` in one dimension and at 0 in the others.
pub(super) fn starts(c: &Ctx, x: Value, dim: i64, start: Value) -> Vec<Value> {
    let zero = c.scalar_i64(c.dtype(start), 0);
    (0..c.rank(x) as i64).map(|d| if d == dim { start } else { zero }).collect()
}

/// The sizes of a tensor argument.
fn sizes_of(arg: &Arg) -> &[i64] {
    if let Arg::Tensor(t) = arg { &t.ty.shape } else { &[] }
}

/// The size of a dimension; 1 where there is no such dimension, which the lowering refuses.
fn size_of(sizes: &[i64], dim: i64) -> i64 {
    let dim = if dim < 0 { dim + sizes.len() as i64 } else { dim };
    usize::try_from(dim).ok().and_then(|d| sizes.get(d)).copied().unwrap_or(1)
}

fn place_roll(args: &[Arg], shifts: &mut [i64]) -> Result<()> {
    let [x, _, Arg::Ints(dims)] = args else { return Ok(()) };
    let sizes = sizes_of(x);
    for (i, shift) in shifts.iter_mut().enumerate() {
        let size = dims.get(i).map_or_else(|| sizes.iter().product(), |&d| size_of(sizes, d));
        *shift = shift.rem_euclid(size.max(1));
    }
    Ok(())
}

fn roll(c: &Ctx, x: Value, shifts: Vec<Offset>, dims: Dims) -> Result<Value> {
    let shape = c.shape(x);
    if shifts.is_empty() {
        return Err(runtime("`shifts` required"));
    }
    if dims.is_empty() && shifts.len() == 1 {
        let flat = c.reshape(x, &[c.numel(x)]);
        return Ok(c.reshape(roll_one(c, flat, shifts[0], 0), &shape));
    }
    if shifts.len() != dims.len() {
        let text = format!("shifts and dimensions must align. shifts: {}, dims:{}", shifts.len(), dims.len());
        return Err(runtime(text));
    }
    let mut out = x;
    for (&shift, &dim) in shifts.iter().zip(&dims) {
        if shape.is_empty() {
            return Err(index(format!("Dimension specified as {dim} but tensor has no dimensions")));
        }
        out = roll_one(c, out, shift, c.dim(dim, shape.len())? as i64);
    }
    Ok(out)
}

fn flip(c: &Ctx, x: Value, dims: Dims) -> Result<Value> {
    // No dimensions means none here, unlike in reductions.
    Ok(if dims.is_empty() { x } else { c.reverse(x, &c.dims(&dims, c.rank(x))?) })
}

fn constant_pad_nd(c: &Ctx, x: Value, pad: Dims, fill: Scalar) -> Result<Value> {
    let shape = c.shape(x);
    let rank = shape.len();
    if !pad.len().is_multiple_of(2) {
        return Err(runtime(format!("Length of pad must be even but instead it equals {}", pad.len())));
    }
    if pad.len() > 2 * rank {
        return Err(runtime(format!(
            "Length of pad should be no more than twice the number of dimensions of the input. Pad length is {}while \
             the input has {rank}dimensions.",
            pad.len()
        )));
    }
    let (mut low, mut high) = (Dims::from_elem(0, rank), Dims::from_elem(0, rank));
    for (i, edges) in pad.chunks_exact(2).enumerate() {
        let d = rank - 1 - i;
        (low[d], high[d]) = (edges[0], edges[1]);
        let size = shape[d] + edges[0] + edges[1];
        if size < 0 {
            return Err(runtime(format!(
                "The input size {}, plus negative padding {} and {} resulted in a negative output size, which is \
                 invalid. Check dimension {d} of your input.",
                shape[d], edges[0], edges[1]
            )));
        }
    }
    Ok(c.pad(x, c.number(fill, c.dtype(x)), &low, &high, &Dims::from_elem(0, rank)))
}

/// The diagonal of two dimensions of a shape: how long it is and where it starts.
struct Diagonal {
    dims: [usize; 2],
    start: [i64; 2],
    length: i64,
}

impl Diagonal {
    fn new(c: &Ctx, shape: &[i64], offset: i64, dim1: i64, dim2: i64) -> Result<Diagonal> {
        let dims = [c.dim(dim1, shape.len())?, c.dim(dim2, shape.len())?];
        if dims[0] == dims[1] {
            let text = format!("diagonal dimensions cannot be identical {dim1}, {dim2}");
            return Err(runtime(text));
        }
        let start = [(-offset).max(0), offset.max(0)];
        let length = (shape[dims[0]] - start[0]).min(shape[dims[1]] - start[1]).max(0);
        Ok(Diagonal { dims, start, length })
    }

    /// The shape that the diagonal of `shape` has: its dimension comes last.
    fn shape(&self, shape: &[i64]) -> Dims {
        let rest = (0..shape.len()).filter(|d| !self.dims.contains(d)).map(|d| shape[d]);
        rest.chain([self.length]).collect()
    }

    /// Where in `shape` the diagonal lies.
    fn mask(&self, c: &Ctx, shape: &[i64]) -> Value {
        let ty = TensorType::new(DType::S64, shape);
        let at = |i: usize| c.iota(ty.clone(), self.dims[i] as i64);
        let shift = c.full(c.scalar_i64(DType::S64, self.start[1] - self.start[0]), shape);
        c.eq(c.subtract(at(1), at(0)), shift)
    }

    /// `x`, a diagonal of `shape`, spread so that it can be selected under [`Diagonal::mask`].
    fn spread(&self, c: &Ctx, x: Value, shape: &[i64]) -> Value {
        let [rows, columns] = self.dims;
        let last = c.rank(x) as i64 - 1;
        let padded =
            c.pad_dim(x, zero(c, c.dtype(x)), last, self.start[0], shape[rows] - self.start[0] - self.length);
        let mut dims: Dims =
            (0..shape.len() as i64).filter(|&d| ![rows, columns].contains(&(d as usize))).collect();
        dims.push(rows as i64);
        // The operand's dimensions need not be in the order of the result's.
        c.broadcast_in_dim(padded, shape, &dims)
    }
}

/// `x` with its diagonal replaced.
fn with_diagonal(c: &Ctx, x: Value, src: Value, offset: i64, dim1: i64, dim2: i64) -> Result<Value> {
    let shape = c.shape(x);
    let d = Diagonal::new(c, &shape, offset, dim1, dim2)?;
    same_slice(&c.shape(src), &d.shape(&shape))?;
    let src = c.to(src, c.dtype(x));
    if d.length == 0 {
        return Ok(x);
    }
    Ok(c.select(d.mask(c, &shape), d.spread(c, src, &shape), x))
}

fn same_slice(src: &[i64], slice: &[i64]) -> Result<()> {
    if src == slice {
        return Ok(());
    }
    Err(runtime(format!(
        "expected src to have a size equal to the slice of self. src size = {}, slice size = {}",
        shape_text(src),
        shape_text(slice)
    )))
}

fn diag_embed(c: &Ctx, x: Value, offset: i64, dim1: i64, dim2: i64) -> Result<Value> {
    let shape = c.shape(x);
    let rank = shape.len() + 1;
    let (a, b) = (c.dim(dim1, rank)?, c.dim(dim2, rank)?);
    if a == b {
        return Err(runtime(format!("diagonal dimensions cannot be identical {dim1}, {dim2}")));
    }
    let size = shape.last().copied().unwrap_or(1) + offset.abs();
    let mut result: Dims = shape[..shape.len().saturating_sub(1)].into();
    for d in [a.min(b), a.max(b)] {
        result.insert(d, size);
    }
    let base = c.full(zero(c, c.dtype(x)), &result);
    with_diagonal(c, base, x, offset, a as i64, b as i64)
}

fn diagonal_backward(c: &Ctx, grad: Value, sizes: Dims, offset: i64, dim1: i64, dim2: i64) -> Result<Value> {
    let base = c.full(zero(c, c.dtype(grad)), &sizes);
    with_diagonal(c, base, grad, offset, dim1, dim2)
}

fn diagonal_scatter(c: &Ctx, x: Value, src: Value, offset: i64, dim1: i64, dim2: i64) -> Result<Value> {
    with_diagonal(c, x, src, offset, dim1, dim2)
}

/// Equally spaced elements of one dimension, as `x[start:end:step]` takes them.
struct Range {
    dim: usize,
    start: Offset,
    step: i64,
    length: i64,
    size: i64,
}

impl Range {
    /// So many elements of a dimension.
    fn new(c: &Ctx, shape: &[i64], dim: i64, start: Offset, length: i64, step: i64) -> Result<Range> {
        let dim = c.dim(dim, shape.len())?;
        Ok(Range { dim, start, step, length, size: shape[dim] })
    }

    /// Spreads a slice back over the whole dimension, `fill` between and around.
    fn spread(&self, c: &Ctx, x: Value, fill: Value) -> Value {
        let rank = c.rank(x);
        let zeros = Dims::from_elem(0, rank);
        let (mut low, mut high, mut interior) = (zeros.clone(), zeros.clone(), zeros.clone());
        let reach = if self.length == 0 { 0 } else { (self.length - 1) * self.step + 1 };
        interior[self.dim] = self.step - 1;
        if let Some(start) = self.start.known() {
            (low[self.dim], high[self.dim]) = (start, self.size - start - reach);
            return c.pad(x, fill, &low, &high, &interior);
        }
        let mut shape = c.shape(x);
        shape[self.dim] = self.size;
        let start = starts(c, x, self.dim as i64, self.start.value(c, DType::S64));
        c.dynamic_update_slice(c.full(fill, &shape), c.pad(x, fill, &low, &high, &interior), &start)
    }
}

/// `x[start:end:step]` of a dimension of this size: where it starts, and its length.
fn place_slice(size: i64, start: i64, end: i64, step: i64) -> Result<(i64, i64)> {
    if step <= 0 {
        return Err(runtime("slice step must be positive"));
    }
    let clip = |x: i64| if x < 0 { (x + size).max(0) } else { x.min(size) };
    let start = clip(start);
    let end = clip(end).max(start);
    Ok((start, (end - start + step - 1) / step))
}

/// Places the start and the end of a slice that has as many elements as `src`.
fn place_slice_of(sizes: &[i64], src: &[i64], dim: i64, offsets: &mut [i64], step: i64) -> Result<()> {
    if sizes.is_empty() {
        return Err(index("slice() cannot be applied to a 0-dim tensor."));
    }
    let [start, end] = offsets else { return Ok(()) };
    let length;
    (*start, length) = place_slice(size_of(sizes, dim), *start, *end, step)?;
    let mut slice = Dims::from_slice(sizes);
    if let Some(n) = slice.get_mut(dim.rem_euclid(sizes.len() as i64) as usize) {
        *n = length;
    }
    same_slice(src, &slice)
}

fn place_slice_backward(args: &[Arg], offsets: &mut [i64]) -> Result<()> {
    let [grad, Arg::Ints(sizes), Arg::Int(dim), _, _, Arg::Int(step)] = args else { return Ok(()) };
    place_slice_of(sizes, sizes_of(grad), *dim, offsets, *step)
}

fn slice_backward(
    c: &Ctx,
    grad: Value,
    sizes: Dims,
    dim: i64,
    start: Offset,
    _end: Offset,
    step: i64,
) -> Result<Value> {
    let length = size_of(&c.shape(grad), dim);
    let range = Range::new(c, &sizes, dim, start, length, step)?;
    Ok(range.spread(c, grad, zero(c, c.dtype(grad))))
}

fn place_slice_scatter(args: &[Arg], offsets: &mut [i64]) -> Result<()> {
    let [x, src, Arg::Int(dim), start, end, Arg::Int(step)] = args else { return Ok(()) };
    let sizes = sizes_of(x);
    let mut given = offsets.iter_mut();
    let mut next = |arg: &Arg| if let Arg::Offset(_) = arg { given.next() } else { None };
    let (start, end) = (next(start), next(end));
    let mut all = [start.as_deref().copied().unwrap_or(0), end.as_deref().copied().unwrap_or(i64::MAX)];
    place_slice_of(sizes, sizes_of(src), *dim, &mut all, *step)?;
    start.into_iter().for_each(|s| *s = all[0]);
    Ok(())
}

fn slice_scatter(
    c: &Ctx,
    x: Value,
    src: Value,
    dim: i64,
    start: Option<Offset>,
    _end: Option<Offset>,
    step: i64,
) -> Result<Value> {
    let shape = c.shape(x);
    let length = size_of(&c.shape(src), dim);
    let range = Range::new(c, &shape, dim, start.unwrap_or(Offset::Known(0)), length, step)?;
    let src = c.to(src, c.dtype(x));
    if step != 1 {
        let inside = c.full(c.scalar_bool(true), &c.shape(src));
        let mask = range.spread(c, inside, c.scalar_bool(false));
        return Ok(c.select(mask, range.spread(c, src, zero(c, c.dtype(x))), x));
    }
    let dim = range.dim as i64;
    let Some(start) = range.start.known() else {
        let start = starts(c, x, dim, range.start.value(c, DType::S64));
        return Ok(c.overwrite(x, src, &start));
    };
    let before = c.slice_dim(x, dim, 0, start, 1);
    let after = c.slice_dim(x, dim, start + range.length, range.size, 1);
    let parts: Vec<Value> =
        [before, src, after].into_iter().filter(|v| c.shape(*v)[range.dim] != 0).collect();
    Ok(if parts.is_empty() { x } else { c.concatenate(&parts, dim) })
}

/// Places the index of one element of a dimension.
fn place_index(sizes: &[i64], dim: i64, offsets: &mut [i64]) -> Result<()> {
    if sizes.is_empty() {
        return Err(index("select() cannot be applied to a 0-dim tensor."));
    }
    let size = size_of(sizes, dim);
    for at in offsets {
        if !(-size..size).contains(at) {
            let shape = shape_text(sizes);
            let text =
                format!("select(): index {at} out of range for tensor of size {shape} at dimension {dim}");
            return Err(index(text));
        }
        *at = at.rem_euclid(size);
    }
    Ok(())
}

fn place_select_backward(args: &[Arg], offsets: &mut [i64]) -> Result<()> {
    let [_, Arg::Ints(sizes), Arg::Int(dim), _] = args else { return Ok(()) };
    place_index(sizes, *dim, offsets)
}

fn select_backward(c: &Ctx, grad: Value, sizes: Dims, dim: i64, at: Offset) -> Result<Value> {
    if sizes.is_empty() {
        return Err(index("select() cannot be applied to a 0-dim tensor."));
    }
    let range = Range::new(c, &sizes, dim, at, 1, 1)?;
    let grad = c.unsqueeze(grad, range.dim as i64);
    Ok(range.spread(c, grad, zero(c, c.dtype(grad))))
}

fn place_select_scatter(args: &[Arg], offsets: &mut [i64]) -> Result<()> {
    let [x, _, Arg::Int(dim), _] = args else { return Ok(()) };
    place_index(sizes_of(x), *dim, offsets)
}

fn select_scatter(c: &Ctx, x: Value, src: Value, dim: i64, at: Offset) -> Result<Value> {
    let mut slice = c.shape(x);
    if slice.is_empty() {
        return Err(index("select() cannot be applied to a 0-dim tensor."));
    }
    let dim = c.dim(dim, slice.len())?;
    slice.remove(dim);
    same_slice(&c.shape(src), &slice)?;
    slice_scatter(c, x, c.unsqueeze(src, dim as i64), dim as i64, Some(at), None, 1)
}

/// The sum over all windows that an element was part of.
fn unfold_backward(c: &Ctx, grad: Value, sizes: Dims, dim: i64, size: i64, step: i64) -> Result<Value> {
    if sizes.is_empty() {
        return Ok(c.reshape(grad, &[]));
    }
    let dim = c.dim(dim, sizes.len())?;
    let (windows, last) = (c.shape(grad)[dim], c.rank(grad) as i64 - 1);
    if windows == 0 || size == 0 {
        return Ok(c.full(zero(c, c.dtype(grad)), &sizes));
    }
    let place = |k: i64| {
        let end = k + (windows - 1) * step + 1;
        let range = Range { dim, start: Offset::Known(k), step, length: windows, size: sizes[dim].max(end) };
        let whole = range.spread(c, c.index_dim(grad, last, k), zero(c, c.dtype(grad)));
        c.slice_dim(whole, dim as i64, 0, sizes[dim], 1)
    };
    let sum = (0..size).map(place).reduce(|a, b| c.add(a, b));
    sum.ok_or_else(|| runtime("unfold_backward: no windows"))
}

/// Reshapes to `split`, permutes, reshapes to `joined`.
fn rearrange(c: &Ctx, x: Value, split: &[i64], perm: &[i64], joined: &[i64]) -> Value {
    c.reshape(c.transpose(c.reshape(x, split), perm), joined)
}

fn channel_shuffle(c: &Ctx, x: Value, groups: i64) -> Result<Value> {
    let shape = c.shape(x);
    if shape.len() <= 2 {
        let text = format!(
            "channel_shuffle expects input with > 2 dims, but got input with sizes {}",
            shape_text(&shape)
        );
        return Err(runtime(text));
    }
    if groups <= 0 {
        let text = "Number of groups to divide channels in must be positive. Value of groups:";
        return Err(runtime(format!("{text}{groups}")));
    }
    let (batch, channels) = (shape[0], shape[1]);
    if channels % groups != 0 {
        return Err(runtime(format!(
            "Number of channels must be divisible by groups. Got {channels} channels and {groups} groups."
        )));
    }
    let rest = shape[2..].iter().product();
    Ok(rearrange(c, x, &[batch, groups, channels / groups, rest], &[0, 2, 1, 3], &shape))
}

fn images(op: &str, shape: &[i64], factor: i64, what: &str) -> Result<()> {
    if shape.len() < 3 {
        let text = format!(
            "{op} expects input to have at least 3 dimensions, but got input with {} dimension(s)",
            shape.len()
        );
        return Err(runtime(text));
    }
    if factor <= 0 {
        return Err(runtime(format!("{op} expects a positive {what}, but got {factor}")));
    }
    Ok(())
}

fn pixel_shuffle(c: &Ctx, x: Value, factor: i64) -> Result<Value> {
    let shape = c.shape(x);
    images("pixel_shuffle", &shape, factor, "upscale_factor")?;
    let (lead, &[channels, h, w]) = (&shape[..shape.len() - 3], &shape[shape.len() - 3..]) else {
        return Err(runtime("pixel_shuffle expects images"));
    };
    let (batch, area) = (lead.iter().product(), factor * factor);
    if channels % area != 0 {
        return Err(runtime(format!(
            "pixel_shuffle expects its input's 'channel' dimension to be divisible by the square of upscale_factor, \
             but input.size(-3)={channels} is not divisible by {area}"
        )));
    }
    let mut joined: Dims = lead.into();
    joined.extend_from_slice(&[channels / area, h * factor, w * factor]);
    Ok(rearrange(c, x, &[batch, channels / area, factor, factor, h, w], &[0, 1, 4, 2, 5, 3], &joined))
}

fn pixel_unshuffle(c: &Ctx, x: Value, factor: i64) -> Result<Value> {
    let shape = c.shape(x);
    images("pixel_unshuffle", &shape, factor, "downscale_factor")?;
    let (lead, &[channels, h, w]) = (&shape[..shape.len() - 3], &shape[shape.len() - 3..]) else {
        return Err(runtime("pixel_unshuffle expects images"));
    };
    for (name, dim, size) in [("height", -2, h), ("width", -1, w)] {
        if size % factor != 0 {
            return Err(runtime(format!(
                "pixel_unshuffle expects {name} to be divisible by downscale_factor, but input.size({dim})={size} is \
                 not divisible by {factor}"
            )));
        }
    }
    let (batch, rows, columns) = (lead.iter().product(), h / factor, w / factor);
    let mut joined: Dims = lead.into();
    joined.extend_from_slice(&[channels * factor * factor, rows, columns]);
    Ok(rearrange(c, x, &[batch, channels, rows, factor, columns, factor], &[0, 1, 3, 5, 2, 4], &joined))
}

fn linalg_cross(c: &Ctx, x: Tensor, y: Tensor, dim: i64) -> Result<Value> {
    if x.rank != y.rank {
        return Err(runtime("linalg.cross: inputs must have the same number of dimensions."));
    }
    let at = c.dim(dim, x.rank)?;
    let size = |t: Tensor| c.shape(t.value).get(at).copied().unwrap_or(1);
    if size(x) != 3 || size(y) != 3 {
        let (a, b) = (size(x), size(y));
        return Err(runtime(format!(
            "linalg.cross: inputs dimension {dim} must have length 3. Got {a} and {b}"
        )));
    }
    let [x, y] = c.align([x.value, y.value], c.result_type(&[x, y])?)?;
    let next = |v: Value, k: i64| roll_one(c, v, Offset::Known(-k), at as i64);
    let ahead = c.multiply(next(x, 1), next(y, 2));
    Ok(c.subtract(ahead, c.multiply(next(x, 2), next(y, 1))))
}

/// Tensors cut into equal chunks along their leading dimension (padded with zeros), chunk `i` of each side by side.
fn chunk_cat(c: &Ctx, tensors: Vec<Tensor>, dim: i64, chunks: i64) -> Result<Value> {
    let Some(first) = tensors.first() else {
        return Err(runtime("_chunk_cat expects a non-empty input tensor list"));
    };
    if chunks < 1 {
        return Err(runtime("_chunk_cat expects positive num_chunks"));
    }
    let dim = c.dim(dim, first.rank)?;
    let mut parts = Vec::new();
    for t in &tensors {
        let shape = c.shape(t.value);
        if t.rank <= dim || c.numel(t.value) == 0 {
            return Err(runtime("_chunk_cat expects non-empty tensor"));
        }
        let each = (shape[dim] + chunks - 1) / chunks;
        let fill = each * chunks - shape[dim];
        let padded = c.pad_dim(t.value, zero(c, t.dtype), dim as i64, 0, fill);
        let mut split: Dims = shape[..dim].into();
        let rest: i64 = shape[dim + 1..].iter().product();
        split.extend_from_slice(&[chunks, each * rest]);
        parts.push(c.reshape(padded, &split));
    }
    Ok(c.concatenate(&parts, dim as i64 + 1))
}
