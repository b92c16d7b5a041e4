use crate::args::{Scalar, Tensor};
use crate::dtype::shape_text;
use crate::error::{Result, index, runtime, value};
use crate::lower::Ctx;
use crate::op;
use crate::table::{Layout, Row};
use oxitorch_hlo::{DType, Dims, TensorType, Value};

/// The rows of this family.
pub static ROWS: &[Row] = &[
    op!("cat", cat).layout(Layout::ChannelsLast),
    op!("stack", stack),
    op!("repeat", repeat),
    op!("roll", roll).layout(Layout::ChannelsLast),
    op!("flip", flip).layout(Layout::LikeFirst),
    op!("constant_pad_nd", constant_pad_nd).layout(Layout::ChannelsLast).check_numbers(|n| n.fits(2)),
    op!("diag_embed", diag_embed),
    op!("diagonal_backward", diagonal_backward),
    op!("slice_backward", slice_backward),
    op!("select_backward", select_backward),
    op!("slice_scatter", slice_scatter).layout(Layout::LikeFirst),
    op!("select_scatter", select_scatter).layout(Layout::LikeFirst),
    op!("diagonal_scatter", diagonal_scatter).layout(Layout::LikeFirst),
    op!("unfold_backward", unfold_backward),
    op!("channel_shuffle", channel_shuffle).layout(Layout::ChannelsLast),
    op!("pixel_shuffle", pixel_shuffle).layout(Layout::ChannelsLast),
    op!("pixel_unshuffle", pixel_unshuffle).layout(Layout::ChannelsLast),
    op!("linalg_cross", linalg_cross),
    op!("_chunk_cat", chunk_cat),
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

fn roll_one(c: &Ctx, x: Value, shift: i64, dim: i64) -> Value {
    let size = c.shape(x)[dim as usize];
    if size == 0 {
        return x;
    }
    let split = size - shift.rem_euclid(size);
    if split == size {
        return x;
    }
    c.concatenate(&[c.slice_dim(x, dim, split, size, 1), c.slice_dim(x, dim, 0, split, 1)], dim)
}

fn roll(c: &Ctx, x: Value, shifts: Dims, dims: Dims) -> Result<Value> {
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

/// Which elements of one dimension `x[start:end:step]` takes.
struct Range {
    dim: usize,
    start: i64,
    step: i64,
    length: i64,
    size: i64,
}

impl Range {
    fn new(
        c: &Ctx,
        shape: &[i64],
        dim: i64,
        start: Option<i64>,
        end: Option<i64>,
        step: i64,
    ) -> Result<Range> {
        if shape.is_empty() {
            return Err(index("slice() cannot be applied to a 0-dim tensor."));
        }
        let dim = c.dim(dim, shape.len())?;
        if step <= 0 {
            return Err(runtime("slice step must be positive"));
        }
        let size = shape[dim];
        let clip = |x: i64| if x < 0 { (x + size).max(0) } else { x.min(size) };
        let start = clip(start.unwrap_or(0));
        let end = clip(end.unwrap_or(size)).max(start);
        Ok(Range { dim, start, step, length: (end - start + step - 1) / step, size })
    }

    fn shape(&self, shape: &[i64]) -> Dims {
        let mut out = Dims::from_slice(shape);
        out[self.dim] = self.length;
        out
    }

    /// Spreads a slice back over the whole dimension, `fill` between and around.
    fn spread(&self, c: &Ctx, x: Value, fill: Value) -> Value {
        let rank = c.rank(x);
        let (mut low, mut high, mut interior) =
            (Dims::from_elem(0, rank), Dims::from_elem(0, rank), Dims::from_elem(0, rank));
        let reach = if self.length == 0 { 0 } else { (self.length - 1) * self.step + 1 };
        low[self.dim] = self.start;
        high[self.dim] = self.size - self.start - reach;
        interior[self.dim] = self.step - 1;
        c.pad(x, fill, &low, &high, &interior)
    }
}

fn slice_backward(
    c: &Ctx,
    grad: Value,
    sizes: Dims,
    dim: i64,
    start: i64,
    end: i64,
    step: i64,
) -> Result<Value> {
    let range = Range::new(c, &sizes, dim, Some(start), Some(end), step)?;
    same_slice(&c.shape(grad), &range.shape(&sizes))?;
    Ok(range.spread(c, grad, zero(c, c.dtype(grad))))
}

fn slice_scatter(
    c: &Ctx,
    x: Value,
    src: Value,
    dim: i64,
    start: Option<i64>,
    end: Option<i64>,
    step: i64,
) -> Result<Value> {
    let shape = c.shape(x);
    let range = Range::new(c, &shape, dim, start, end, step)?;
    same_slice(&c.shape(src), &range.shape(&shape))?;
    let src = c.to(src, c.dtype(x));
    if step == 1 {
        let dim = range.dim as i64;
        let before = c.slice_dim(x, dim, 0, range.start, 1);
        let after = c.slice_dim(x, dim, range.start + range.length, range.size, 1);
        let parts: Vec<Value> =
            [before, src, after].into_iter().filter(|v| c.shape(*v)[range.dim] != 0).collect();
        return Ok(if parts.is_empty() { x } else { c.concatenate(&parts, dim) });
    }
    let inside = c.full(c.scalar_bool(true), &c.shape(src));
    let mask = range.spread(c, inside, c.scalar_bool(false));
    Ok(c.select(mask, range.spread(c, src, zero(c, c.dtype(x))), x))
}

/// One element of a dimension, counted from the front.
fn pick(c: &Ctx, shape: &[i64], dim: i64, at: i64) -> Result<(usize, i64)> {
    if shape.is_empty() {
        return Err(index("select() cannot be applied to a 0-dim tensor."));
    }
    let dim = c.dim(dim, shape.len())?;
    let size = shape[dim];
    if !(-size..size).contains(&at) {
        let shape = shape_text(shape);
        let text = format!("select(): index {at} out of range for tensor of size {shape} at dimension {dim}");
        return Err(index(text));
    }
    Ok((dim, at.rem_euclid(size)))
}

fn select_backward(c: &Ctx, grad: Value, sizes: Dims, dim: i64, at: i64) -> Result<Value> {
    let (dim, at) = pick(c, &sizes, dim, at)?;
    let grad = c.unsqueeze(grad, dim as i64);
    Ok(c.pad_dim(grad, zero(c, c.dtype(grad)), dim as i64, at, sizes[dim] - 1 - at))
}

fn select_scatter(c: &Ctx, x: Value, src: Value, dim: i64, at: i64) -> Result<Value> {
    let shape = c.shape(x);
    let (dim, at) = pick(c, &shape, dim, at)?;
    let mut slice = shape.clone();
    slice.remove(dim);
    same_slice(&c.shape(src), &slice)?;
    slice_scatter(c, x, c.unsqueeze(src, dim as i64), dim as i64, Some(at), Some(at + 1), 1)
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
        let range = Range { dim, start: k, step, length: windows, size: sizes[dim].max(end) };
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
    let next = |v: Value, k: i64| roll_one(c, v, -k, at as i64);
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
