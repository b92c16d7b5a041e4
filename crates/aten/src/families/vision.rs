//! The ops of torchvision that detectors are made of.
//!
//! What is computed is said in the documentation of `torchvision.ops`: RoIAlign is from He et al., "Mask R-CNN" (2017),
//! deformable convolution from Dai et al. (2017), with its mask from Zhu et al. (2018).

use super::grid_sample::{Places, Sampler};
use super::matmul::precision;
use super::scatter::scatter_rows;
use super::sized::{count, true_positions};
use super::sorting::sort_with_index;
use crate::args::{Scalar, Tensor};
use crate::context::Ctx;
use crate::dtype::{Category, category, opmath};
use crate::error::{ErrorKind, Result, in_32_bits, not_implemented, runtime};
use crate::op;
use crate::row::Row;
use oxitorch_hlo::{Binary, Builder, DType, Dims, DotDims, TensorType, Value};

/// The rows of this family.
pub static ROWS: &[Row] = &[
    op!("torchvision::nms", nms).sized_by("torchvision::nms.count"),
    op!("torchvision::nms.count", nms_count).internal(),
    op!("torchvision::roi_align", roi_align),
    op!("torchvision::_roi_align_backward", roi_align_backward),
    op!("torchvision::deform_conv2d", deform_conv).products(),
    op!("torchvision::_deform_conv2d_backward", deform_conv_backward).products(),
];

fn require_float(x: &Tensor, kernel: &str) -> Result<()> {
    if category(x.dtype) == Category::Float { Ok(()) } else { Err(not_implemented(kernel, x.dtype)) }
}

// ---------------------------------------------------------------- nms

/// Which boxes (x1, y1, x2, y2) stay, from the highest score to the lowest, and the place of each: \[n\].
fn survivors(c: &Ctx, boxes: &Tensor, scores: &Tensor, threshold: Scalar) -> Result<(Value, Value)> {
    require_float(boxes, "nms_kernel")?;
    let shape = c.shape(boxes.value);
    if shape.len() != 2 {
        return Err(runtime(format!("boxes should be a 2d tensor, got {}D", shape.len())));
    }
    if shape[1] != 4 {
        return Err(runtime(format!("boxes should have 4 elements in dimension 1, got {}", shape[1])));
    }
    if scores.rank != 1 {
        return Err(runtime(format!("scores should be a 1d tensor, got {}D", scores.rank)));
    }
    let n = shape[0];
    if c.numel(scores.value) != n {
        return Err(runtime(format!(
            "boxes and scores should have same number of elements in dimension 0, got {n} and {}",
            c.numel(scores.value)
        )));
    }
    let (_, order) = sort_with_index(c, scores.value, 0, true);
    let wide = opmath(boxes.dtype);
    let boxes = c.take_dim(c.to(boxes.value, wide), order, 0);
    let side = |i: i64| c.index_dim(boxes, 1, i);
    let (left, top, right, bottom) = (side(0), side(1), side(2), side(3));
    let areas = c.multiply(c.subtract(right, left), c.subtract(bottom, top));
    let earlier = |v: Value| c.broadcast_in_dim(v, &[n, n], &[0]);
    let later = |v: Value| c.broadcast_in_dim(v, &[n, n], &[1]);
    let zero = c.full(c.scalar_f64(wide, 0.0), &[n, n]);
    let overlap = |low: Value, high: Value| {
        let size = c.subtract(c.minimum(earlier(high), later(high)), c.maximum(earlier(low), later(low)));
        c.maximum(size, zero)
    };
    let inter = c.multiply(overlap(left, right), overlap(top, bottom));
    let union = c.subtract(c.add(earlier(areas), later(areas)), inter);
    let square = TensorType::new(DType::S32, [n, n].as_slice());
    let before = c.lt(c.iota(square.clone(), 0), c.iota(square, 1));
    // The threshold is a double, also where the boxes are not.
    let share = c.to(c.divide(inter, union), DType::F64);
    let beats = c.and(before, c.gt(share, c.number_like(threshold, DType::F64, &[n, n])));
    // A box stays unless one that stays beats it. Who stays is found from the front: after k rounds the first k are
    // right, and where a round changes nothing all are. Rounds are as many as boxes that beat each other in a chain.
    let all = c.constant(TensorType::new(DType::Pred, [n].as_slice()), 1.0);
    let round = |b: &Builder, keep: Value| {
        let beaten = b.and(beats, b.broadcast_in_dim(keep, &[n, n], &[0]));
        b.not(b.reduce_any(beaten, &[0]))
    };
    let found = c.while_(
        &[c.scalar_bool(true), all],
        |_, s| s[0],
        |b, s| {
            let keep = round(b, s[1]);
            vec![b.reduce_any(b.ne(keep, s[1]), &[0]), keep]
        },
    );
    Ok((found[1], order))
}

fn nms(c: &Ctx, boxes: Tensor, scores: Tensor, threshold: Scalar, n: i64) -> Result<Value> {
    let (keep, order) = survivors(c, &boxes, &scores, threshold)?;
    if n == 0 {
        return Ok(c.full(c.scalar_i64(DType::S64, 0), &[0]));
    }
    Ok(c.to(c.take_dim(order, true_positions(c, keep, n, 0), 0), DType::S64))
}

fn nms_count(c: &Ctx, boxes: Tensor, scores: Tensor, threshold: Scalar) -> Result<Value> {
    Ok(count(c, survivors(c, &boxes, &scores, threshold)?.0))
}

// ---------------------------------------------------------------- roi_align

/// Boxes on planes, each pooled to a table of bins. A bin is the mean of samples, as many along each side as `ratio` says,
/// or as many as the box has elements for each bin.
struct Regions {
    /// `[batch, channels, height, width]`
    input: [i64; 4],
    boxes: i64,
    /// Bins along height and width.
    bins: [i64; 2],
    ratio: i64,
    wide: DType,
    /// Which plane each box is on, s32 `[boxes]`.
    plane: Value,
    /// Of height and width: where the box begins, how large a bin is, how many samples it has, all `[boxes]`.
    axes: [[Value; 3]; 2],
}

/// The two elements between which samples lie along one side, with their weights: all `[boxes, bins]`.
struct Between {
    at: [Value; 2],
    weights: [Value; 2],
}

/// A coordinate beyond this is outside of every plane.
const FAR: f64 = (1 << 24) as f64;

/// The boxes `[boxes, 5]` with numbers that are finite, of planes that exist.
fn safe_boxes(c: &Ctx, boxes: Value, batch: i64) -> Value {
    let column = c.iota_dim(boxes, DType::S32, 1);
    let is_plane = c.eq(column, c.zeros_like(column));
    let number = |x: f64| c.like(boxes, x);
    let low = c.select(is_plane, number(0.0), number(-FAR));
    let high = c.select(is_plane, number((batch - 1) as f64), number(FAR));
    c.clamp(low, c.select(c.is_nan(boxes), c.zeros_like(boxes), boxes), high)
}

fn check_boxes(c: &Ctx, rois: &Tensor, input: [i64; 4]) -> Result<()> {
    if rois.rank != 2 || c.shape(rois.value)[1] != 5 {
        return Err(runtime("rois must have shape as Tensor[K, 5]"));
    }
    if input.contains(&0) {
        return Err(runtime(format!(
            "roi_align: expected an input with elements, but got one of shape {input:?}"
        )));
    }
    c.assert(ErrorKind::Runtime, "roi_align: a box is of an image that the batch has not", || {
        let plane = c.slice_dim(rois.value, 1, 0, 1, 1);
        c.all(c.and(c.ge(plane, c.zeros_like(plane)), c.lt(plane, c.like(plane, input[0] as f64))))
    });
    Ok(())
}

impl Regions {
    fn new(
        c: &Ctx,
        boxes: Value,
        input: [i64; 4],
        wide: DType,
        scale: Scalar,
        bins: [i64; 2],
        ratio: i64,
        aligned: bool,
    ) -> Regions {
        let count = c.shape(boxes)[0];
        let number = |x: f64| c.full(c.scalar_f64(wide, x), &[count]);
        let column = |i: i64| c.index_dim(boxes, 1, i);
        let (scale, shift) = (c.number_like(scale, wide, &[count]), number(if aligned { 0.5 } else { 0.0 }));
        let edge = |i: i64| c.subtract(c.multiply(column(i), scale), shift);
        let axis = |low: i64, high: i64, bins: i64, side: i64| {
            let start = edge(low);
            let mut size = c.subtract(edge(high), start);
            if !aligned {
                size = c.maximum(size, number(1.0));
            }
            let bin = c.divide(size, number(bins as f64));
            // Of a bin that is larger than the plane only so many are looked at, as in torchvision's code for GPUs that
            // gives the same in each run: there is a loop over them.
            let samples =
                if ratio > 0 { number(ratio as f64) } else { c.minimum(c.ceil(bin), number(side as f64)) };
            [start, bin, samples]
        };
        let axes = [axis(2, 4, bins[0], input[2]), axis(1, 3, bins[1], input[3])];
        Regions { input, boxes: count, bins, ratio, wide, plane: c.to(column(0), DType::S32), axes }
    }

    /// How many elements of all channels there are, and how many bins of all boxes.
    fn rows(&self) -> (i64, i64) {
        let [batch, _, height, width] = self.input;
        (batch * height * width, self.boxes * self.bins[0] * self.bins[1])
    }

    /// A number of each box, for each of the bins along a side.
    fn along(&self, b: &Builder, v: Value, side: usize) -> Value {
        b.broadcast_in_dim(v, &[self.boxes, self.bins[side]], &[0])
    }

    /// Sample number `i` (a scalar of the wide dtype) of each bin along a side; weights are 0 where there is none.
    fn between(&self, b: &Builder, side: usize, i: Value) -> Between {
        let shape = [self.boxes, self.bins[side]];
        let number = |x: f64| b.full(b.scalar_f64(self.wide, x), &shape);
        let [start, bin, samples] = self.axes[side].map(|v| self.along(b, v, side));
        let (i, size) = (b.full(i, &shape), self.input[2 + side]);
        let bins_before = b.iota(TensorType::new(self.wide, shape.as_slice()), 1);
        let within = b.divide(b.multiply(b.add(i, number(0.5)), bin), b.maximum(samples, number(1.0)));
        let at = b.add(b.add(start, b.multiply(bins_before, bin)), within);
        let inside = b.and(b.ge(at, number(-1.0)), b.le(at, number(size as f64)));
        let there = b.and(inside, b.lt(i, samples));
        let last = number((size - 1) as f64);
        let at = b.clamp(number(0.0), at, last);
        let low = b.floor(at);
        let high = b.minimum(b.add(low, number(1.0)), last);
        let part = b.subtract(at, low);
        let weigh = |w: Value| b.select(there, w, number(0.0));
        Between {
            at: [low, high].map(|v| b.convert(v, DType::S32)),
            weights: [weigh(b.subtract(number(1.0), part)), weigh(part)],
        }
    }

    /// How many samples along each side are gone through: the most that a bin has.
    fn most(&self, c: &Ctx) -> [Value; 2] {
        self.axes.map(|[_, _, samples]| {
            if self.ratio > 0 {
                return c.scalar_i64(DType::S32, self.ratio);
            }
            let none = c.scalar_f64(self.wide, 0.0);
            c.to(c.reduce_with(Binary::Maximum, samples, none, &[0]), DType::S32)
        })
    }

    /// For each bin 1 / its number of samples, `[boxes * bins]`.
    fn share(&self, c: &Ctx) -> Value {
        let one = c.full(c.scalar_f64(self.wide, 1.0), &[self.boxes]);
        let count = c.maximum(c.multiply(self.axes[0][2], self.axes[1][2]), one);
        let all = [self.boxes, self.bins[0] * self.bins[1]];
        c.reshape(c.broadcast_in_dim(count, &all, &[0]), &[self.rows().1])
    }

    /// Goes through all samples and the four elements around each: `step` gets what it gave before, the row of the element
    /// (s32) and its weight for each bin, `[boxes * bins]` both.
    fn fold(&self, c: &Ctx, start: Value, step: impl Fn(&Builder, Value, Value, Value) -> Value) -> Value {
        let [rows, columns] = self.most(c);
        let zero = c.scalar_i64(DType::S32, 0);
        let [_, _, height, width] = self.input;
        let shape = [self.boxes, self.bins[0], self.bins[1]];
        let flat = [self.rows().1];
        let out = c.for_loop(zero, rows, &[start], |b, y, s| {
            b.for_loop(zero, columns, s, |b, x, s| {
                let down = self.between(b, 0, b.convert(y, self.wide));
                let across = self.between(b, 1, b.convert(x, self.wide));
                let mut sum = s[0];
                for (row, wy) in down.at.iter().zip(down.weights) {
                    for (column, wx) in across.at.iter().zip(across.weights) {
                        let of_rows = |v: Value| b.broadcast_in_dim(v, &shape, &[0, 1]);
                        let of_columns = |v: Value| b.broadcast_in_dim(v, &shape, &[0, 2]);
                        let size = |n: i64| b.full(b.scalar_i64(DType::S32, n), &shape);
                        let plane = b.multiply(b.broadcast_in_dim(self.plane, &shape, &[0]), size(height));
                        let at = b.multiply(b.add(plane, of_rows(*row)), size(width));
                        let at = b.reshape(b.add(at, of_columns(*column)), &flat);
                        let weight = b.reshape(b.multiply(of_rows(wy), of_columns(wx)), &flat);
                        sum = step(b, sum, at, weight);
                    }
                }
                vec![sum]
            })
        });
        out[0]
    }
}

fn roi_align(
    c: &Ctx,
    input: Tensor,
    rois: Tensor,
    scale: Scalar,
    height: i64,
    width: i64,
    ratio: i64,
    aligned: bool,
) -> Result<Value> {
    require_float(&input, "roi_align_forward_kernel")?;
    let &[n, channels, h, w] = c.shape(input.value).as_slice() else {
        return Err(runtime(format!("roi_align: expected an input of 4 dimensions, but got {}", input.rank)));
    };
    let sizes = [n, channels, h, w];
    check_boxes(c, &rois, sizes)?;
    let boxes = c.shape(rois.value)[0];
    let shape = [boxes, channels, height, width];
    if height < 1 || width < 1 || boxes == 0 {
        return Ok(c.full(c.scalar_f64(input.dtype, 0.0), &shape));
    }
    let wide = opmath(input.dtype);
    let rois = safe_boxes(c, c.to(rois.value, wide), n);
    let r = Regions::new(c, rois, sizes, wide, scale, [height, width], ratio, aligned);
    let (elements, bins) = r.rows();
    let table = c.reshape(c.transpose(c.to(input.value, wide), &[0, 2, 3, 1]), &[elements, channels]);
    let all = |b: &Builder, v: Value| b.broadcast_in_dim(v, &[bins, channels], &[0]);
    let start = c.full(c.scalar_f64(wide, 0.0), &[bins, channels]);
    let sum = r.fold(c, start, |b, sum, at, weight| {
        b.add(sum, b.multiply(b.take_dim(table, at, 0), all(b, weight)))
    });
    let mean = c.divide(sum, all(c, r.share(c)));
    let mean = c.transpose(c.reshape(mean, &[boxes, height, width, channels]), &[0, 3, 1, 2]);
    Ok(c.to(mean, input.dtype))
}

fn roi_align_backward(
    c: &Ctx,
    grad: Tensor,
    rois: Tensor,
    scale: Scalar,
    height: i64,
    width: i64,
    n: i64,
    channels: i64,
    h: i64,
    w: i64,
    ratio: i64,
    aligned: bool,
) -> Result<Value> {
    require_float(&grad, "roi_align_backward_kernel")?;
    let sizes = [n, channels, h, w];
    check_boxes(c, &rois, sizes)?;
    let boxes = c.shape(rois.value)[0];
    if height < 1 || width < 1 || boxes == 0 {
        return Ok(c.full(c.scalar_f64(grad.dtype, 0.0), &sizes));
    }
    if c.shape(grad.value)[..] != [boxes, channels, height, width] {
        return Err(runtime("roi_align: the gradient has not the shape of the result"));
    }
    let wide = opmath(grad.dtype);
    let rois = safe_boxes(c, c.to(rois.value, wide), n);
    let r = Regions::new(c, rois, sizes, wide, scale, [height, width], ratio, aligned);
    let (elements, bins) = r.rows();
    let all = |b: &Builder, v: Value| b.broadcast_in_dim(v, &[bins, channels], &[0]);
    let rows = c.reshape(c.transpose(c.to(grad.value, wide), &[0, 2, 3, 1]), &[bins, channels]);
    let rows = c.divide(rows, all(c, r.share(c)));
    let start = c.full(c.scalar_f64(wide, 0.0), &[elements, channels]);
    let sum = r.fold(c, start, |b, sum, at, weight| {
        scatter_rows(c, sum, 0, at, b.multiply(rows, all(b, weight)), Some(Binary::Add))
    });
    Ok(c.to(c.transpose(c.reshape(sum, &[n, h, w, channels]), &[0, 3, 1, 2]), grad.dtype))
}

// ---------------------------------------------------------------- deform_conv2d

/// A convolution whose kernel reads at places that `offset` shifts, and may weigh with `mask`.
struct Deformed {
    n: i64,
    channels: i64,
    /// Channels of the result.
    out: i64,
    kernel: [i64; 2],
    size: [i64; 2],
    groups: i64,
    /// Groups of channels that share offsets.
    offset_groups: i64,
    sampler: Sampler<2>,
    /// Of all `n * offset_groups` planes.
    planes: Value,
    places: Places<2>,
    /// `[n * offset_groups, 1, points]`
    mask: Option<Value>,
    wide: DType,
}

/// The integers of the schema.
struct Settings {
    stride: [i64; 2],
    pad: [i64; 2],
    dilation: [i64; 2],
    groups: i64,
    offset_groups: i64,
}

impl Settings {
    fn new(
        [stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w]: [i64; 6],
        groups: i64,
        offset_groups: i64,
    ) -> Self {
        Settings {
            stride: [stride_h, stride_w],
            pad: [pad_h, pad_w],
            dilation: [dilation_h, dilation_w],
            groups,
            offset_groups,
        }
    }
}

/// What a call says of sizes.
struct DeformedSizes {
    n: i64,
    channels: i64,
    image: [i64; 2],
    out: i64,
    kernel: [i64; 2],
    size: [i64; 2],
}

impl DeformedSizes {
    /// Those of operands that fit each other.
    fn of(
        c: &Ctx,
        input: &Tensor,
        weight: &Tensor,
        offset: &Tensor,
        mask: Option<Value>,
        s: &Settings,
    ) -> Result<Self> {
        require_float(input, "deformable_im2col")?;
        in_32_bits(&[s.stride, s.pad, s.dilation].concat())?;
        let shape = |t: &Tensor| c.shape(t.value);
        let (x, w, o) = (shape(input), shape(weight), shape(offset));
        let (&[n, channels, height, width], &[out, per_group, kh, kw], &[_, _, oh, ow]) =
            (x.as_slice(), w.as_slice(), o.as_slice())
        else {
            return Err(runtime("deform_conv2d: expected input, weight and offset of 4 dimensions"));
        };
        let all = s.stride.iter().chain(&s.dilation).chain([&s.groups, &s.offset_groups, &kh, &kw]);
        if all.copied().any(|v| v < 1) || s.pad.iter().any(|&p| p < 0) {
            return Err(runtime(
                "deform_conv2d: expected kernels, strides, dilations and groups above 0, and padding from 0",
            ));
        }
        let fits = per_group * s.groups == channels && out % s.groups == 0 && channels % s.offset_groups == 0;
        if !fits {
            return Err(runtime(format!(
                "deform_conv2d: an input of {channels} channels and a weight of shape {w:?} do not fit {} groups and {} \
                 groups of offsets",
                s.groups, s.offset_groups
            )));
        }
        let (kernel, size) = ([kh, kw], [oh, ow]);
        let expected: [i64; 2] = std::array::from_fn(|d| {
            (x[2 + d] + 2 * s.pad[d] - (s.dilation[d] * (kernel[d] - 1) + 1)).div_euclid(s.stride[d]) + 1
        });
        let taps = s.offset_groups * kh * kw;
        if size != expected || o[..2] != [n, 2 * taps] {
            let [h, w] = expected;
            return Err(runtime(format!(
                "deform_conv2d: expected an offset of shape {:?}, but got {o:?}",
                [n, 2 * taps, h, w]
            )));
        }
        if let Some(mask) = mask
            && c.shape(mask)[..] != [n, taps, oh, ow]
        {
            return Err(runtime(format!(
                "deform_conv2d: expected a mask of shape {:?}, but got {:?}",
                [n, taps, oh, ow],
                c.shape(mask)
            )));
        }
        Ok(DeformedSizes { n, channels, image: [height, width], out, kernel, size })
    }
}

impl Deformed {
    fn new(
        c: &Ctx,
        input: &Tensor,
        weight: &Tensor,
        offset: &Tensor,
        mask: Option<Value>,
        s: &Settings,
    ) -> Result<Self> {
        let sizes = DeformedSizes::of(c, input, weight, offset, mask, s)?;
        let DeformedSizes { n, channels, image, out, kernel, size } = sizes;
        let wide = opmath(input.dtype);
        let ([kh, kw], [oh, ow]) = (kernel, size);
        let (planes, points) = (n * s.offset_groups, [kh, kw, oh, ow]);
        let count: i64 = points.iter().product();
        let sampler =
            Sampler::linear(image, planes, channels / s.offset_groups, Dims::from_slice(&points), wide);
        let shifts = c.reshape(c.to(offset.value, wide), &[planes, kh * kw, 2, oh * ow]);
        let places = std::array::from_fn(|d| {
            let along = |dim: usize, step: i64| {
                let at = c.iota(TensorType::new(wide, points.as_slice()), dim as i64);
                c.multiply(at, c.like(at, step as f64))
            };
            let at = c.add(along(2 + d, s.stride[d]), along(d, s.dilation[d]));
            let at = c.subtract(at, c.like(at, s.pad[d] as f64));
            let at = c.broadcast_in_dim(c.reshape(at, &[count]), &[planes, count], &[1]);
            let shift = c.reshape(c.index_dim(shifts, 2, d as i64), &[planes, count]);
            (c.add(at, shift), sampler.number(c, 1.0))
        });
        Ok(Deformed {
            n,
            channels,
            out,
            kernel,
            size,
            groups: s.groups,
            offset_groups: s.offset_groups,
            planes: sampler.planes(c, input.value),
            sampler,
            places,
            mask: mask.map(|m| c.reshape(c.to(m, wide), &[planes, 1, count])),
            wide,
        })
    }

    /// Points of the kernel, and positions of the result.
    fn counts(&self) -> (i64, i64) {
        (self.kernel.iter().product(), self.size.iter().product())
    }

    /// Rows of a group's matrix: its channels at each point of the kernel.
    fn depth(&self) -> i64 {
        self.channels / self.groups * self.counts().0
    }

    fn masked(&self, c: &Ctx, samples: Value) -> Value {
        let mask = self.mask.map(|m| c.broadcast_in_dim(c.squeeze(m, &[1]), &c.shape(samples), &[0, 2]));
        mask.map_or(samples, |m| c.multiply(samples, m))
    }

    /// `[planes, channels, points]` as `[n, groups, depth, positions]`.
    fn columns(&self, c: &Ctx, samples: Value) -> Value {
        c.reshape(samples, &[self.n, self.groups, self.depth(), self.counts().1])
    }

    /// `[groups, out / groups, depth]`
    fn weight(&self, c: &Ctx, weight: Value) -> Value {
        c.reshape(c.to(weight, self.wide), &[self.groups, self.out / self.groups, self.depth()])
    }

    /// `[n, groups, out / groups, positions]`
    fn grouped(&self, c: &Ctx, grad: Value) -> Value {
        c.reshape(c.to(grad, self.wide), &[self.n, self.groups, self.out / self.groups, self.counts().1])
    }
}

/// Products of each group: dimension 0 of `lhs` with 1 of `rhs`.
fn per_group(c: &Ctx, lhs: Value, rhs: Value, contract: (&[i64], &[i64])) -> Value {
    let dims = DotDims {
        lhs_batching: Dims::from_slice(&[0]),
        rhs_batching: Dims::from_slice(&[1]),
        lhs_contracting: Dims::from_slice(contract.0),
        rhs_contracting: Dims::from_slice(contract.1),
    };
    c.dot_general(lhs, rhs, &dims, precision(c, c.dtype(lhs)), None)
}

#[allow(clippy::too_many_arguments)] // the schema's
fn deform_conv(
    c: &Ctx,
    input: Tensor,
    weight: Tensor,
    offset: Tensor,
    mask: Tensor,
    bias: Tensor,
    stride_h: i64,
    stride_w: i64,
    pad_h: i64,
    pad_w: i64,
    dilation_h: i64,
    dilation_w: i64,
    groups: i64,
    offset_groups: i64,
    use_mask: bool,
) -> Result<Value> {
    let s = Settings::new([stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w], groups, offset_groups);
    let d = Deformed::new(c, &input, &weight, &offset, use_mask.then_some(mask.value), &s)?;
    if c.shape(bias.value)[..] != [d.out] {
        return Err(runtime(format!("deform_conv2d: expected a bias of {} elements", d.out)));
    }
    let shape = [d.n, d.out, d.size[0], d.size[1]];
    let samples = d.masked(c, d.sampler.sample(c, d.planes, &d.places));
    // \[groups, out / groups, n, positions\]
    let product = per_group(c, d.weight(c, weight.value), d.columns(c, samples), (&[2], &[2]));
    let out = c.reshape(c.transpose(product, &[2, 0, 1, 3]), &shape);
    let out = c.add(out, c.broadcast_in_dim(c.to(bias.value, d.wide), &shape, &[1]));
    Ok(c.to(out, input.dtype))
}

#[allow(clippy::too_many_arguments)] // the schema's
fn deform_conv_backward(
    c: &Ctx,
    grad: Tensor,
    input: Tensor,
    weight: Tensor,
    offset: Tensor,
    mask: Tensor,
    bias: Tensor,
    stride_h: i64,
    stride_w: i64,
    pad_h: i64,
    pad_w: i64,
    dilation_h: i64,
    dilation_w: i64,
    groups: i64,
    offset_groups: i64,
    use_mask: bool,
) -> Result<Vec<Value>> {
    let s = Settings::new([stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w], groups, offset_groups);
    let d = Deformed::new(c, &input, &weight, &offset, use_mask.then_some(mask.value), &s)?;
    if c.shape(grad.value)[..] != [d.n, d.out, d.size[0], d.size[1]] || c.shape(bias.value)[..] != [d.out] {
        return Err(runtime("deform_conv2d: the gradient or the bias has not the shape of the result"));
    }
    let inputs = [input, weight, offset, mask, bias];
    let types = inputs.map(|t| TensorType::new(input.dtype, c.shape(t.value)));
    let (taps, positions) = d.counts();
    let samples = d.sampler.sample(c, d.planes, &d.places);
    let g = d.grouped(c, grad.value);
    // \[groups, depth, n, positions\]
    let of_columns = per_group(c, d.weight(c, weight.value), g, (&[1], &[2]));
    let of_columns = c.reshape(c.transpose(of_columns, &[2, 0, 1, 3]), &c.shape(samples));
    let (of_planes, slopes) = d.sampler.backward(c, d.planes, &d.places, d.masked(c, of_columns), true);
    let slopes: Vec<Value> =
        slopes.iter().map(|v| c.reshape(*v, &[d.n * d.offset_groups, taps, 1, positions])).collect();
    let of_mask = match d.mask {
        Some(_) => c.reduce_sum(c.multiply(of_columns, samples), &[1]),
        None => c.full(c.scalar_f64(d.wide, 0.0), &types[3].shape),
    };
    let columns = d.columns(c, d.masked(c, samples));
    // \[groups, out / groups, depth\], by way of the groups in front.
    let of_weight = per_group(c, c.transpose(g, &[1, 0, 2, 3]), columns, (&[1, 3], &[0, 3]));
    let shaped = |v: Option<Value>, i: usize| {
        v.map(|v| c.to(c.reshape(v, &types[i].shape), types[i].dtype))
            .unwrap_or_else(|| c.constant(types[i].clone(), 0.0))
    };
    Ok(vec![
        shaped(of_planes, 0),
        shaped(Some(of_weight), 1),
        shaped(Some(c.concatenate(&slopes, 2)), 2),
        shaped(Some(of_mask), 3),
        shaped(Some(c.reduce_sum(c.to(grad.value, d.wide), &[0, 2, 3])), 4),
    ])
}
