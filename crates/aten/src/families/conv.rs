use super::matmul::{accumulator, precision};
use crate::context::Ctx;
use crate::dtype::{Category, category, scalar_name, shape_text};
use crate::error::{Error, Result, in_32_bits, runtime, unsupported};
use crate::library::{Item, Outcome, Parts, is_channels_last, word};
use crate::row::Row;
use crate::{Layout, op};
use oxitorch_hlo::{Axes, ConvDims, Convolution, DType, Dims, Padding, TensorType, Value};

/// The rows of this family.
pub static ROWS: &[Row] = &[
    op!("convolution", convolution).layout(Layout::ChannelsLast).products(),
    op!("convolution_overrideable", convolution).layout(Layout::ChannelsLast).products(),
    op!("convolution_backward", convolution_backward).layout(Layout::ChannelsLast).products(),
    op!("convolution_backward_overrideable", convolution_backward_overrideable)
        .layout(Layout::ChannelsLast)
        .products(),
    op!("im2col", im2col),
    op!("col2im", col2im),
];

/// Everything that relates the sizes of input, kernel and output.
#[derive(Clone, Debug)]
struct Geometry {
    stride: Dims,
    padding: Dims,
    dilation: Dims,
    output_padding: Dims,
    groups: i64,
    transposed: bool,
}

type Gradients = (Option<Value>, Option<Value>, Option<Value>);

impl Geometry {
    /// Checks what does not depend on the tensors; single numbers stand for every dimension.
    fn new(
        rank: usize,
        [stride, padding, dilation, output_padding]: [Dims; 4],
        groups: i64,
        transposed: bool,
    ) -> Result<Geometry> {
        for numbers in [&stride, &padding, &dilation, &output_padding] {
            in_32_bits(numbers)?;
        }
        let spread = |name: &str, dims: Dims| match dims.len() {
            1 => Ok(Dims::from_elem(dims[0], rank)),
            n if n == rank => Ok(dims),
            _ => Err(runtime(format!(
                "expected {name} to be a single integer value or a list of {rank} values to match the convolution \
                 dimensions, but got {name}={}",
                shape_text(&dims)
            ))),
        };
        let g = Geometry {
            stride: spread("stride", stride)?,
            padding: spread("padding", padding)?,
            dilation: spread("dilation", dilation)?,
            output_padding: spread("output_padding", output_padding)?,
            groups,
            transposed,
        };
        let bad = |cond: bool, text: &str| if cond { Err(runtime(text)) } else { Ok(()) };
        bad(g.padding.iter().any(|&p| p < 0), "negative padding is not supported")?;
        bad(g.output_padding.iter().any(|&p| p < 0), "negative output_padding is not supported")?;
        bad(g.stride.iter().any(|&s| s <= 0), "non-positive stride is not supported")?;
        let dilation = format!("dilation should be greater than zero, but got {}", shape_text(&g.dilation));
        bad(g.dilation.iter().any(|&d| d <= 0), &dilation)?;
        bad(groups <= 0, "non-positive groups is not supported")?;
        Ok(g)
    }

    /// How far the kernel reaches in spatial dimension `i`.
    fn reach(&self, i: usize, kernel: i64) -> i64 {
        self.dilation[i] * (kernel - 1)
    }

    /// The output's spatial sizes.
    fn output(&self, input: &[i64], kernel: &[i64]) -> Dims {
        let size = |i: usize| {
            let (n, reach) = (input[i], self.reach(i, kernel[i]));
            if self.transposed {
                (n - 1) * self.stride[i] - 2 * self.padding[i] + reach + 1 + self.output_padding[i]
            } else {
                (n + 2 * self.padding[i] - reach - 1).div_euclid(self.stride[i]) + 1
            }
        };
        (0..input.len()).map(size).collect()
    }

    /// Whether the library computes it. `moved` is what each element of the weight is multiplied with. XLA's compiler for
    /// CPUs makes one dense convolution of groups, with zeros for most of the weight: its operations are what a call spares.
    fn is_for_library(&self, c: &Ctx, moved: &[i64], w: Value) -> bool {
        let positions: i64 = moved[0] * moved[2..].iter().product::<i64>();
        let dense = c.numel(w).saturating_mul(self.groups);
        let operations = positions.saturating_mul(dense).saturating_mul(2);
        self.stride.len() <= 3 && c.is_for_library(c.dtype(w), operations)
    }

    /// Whether an outline leaves it open.
    fn is_deferred(&self, c: &Ctx, dtype: DType) -> bool {
        c.is_outline() && self.stride.len() <= 3 && c.may_be_for_library(dtype)
    }

    /// The dimensions of input, kernel and output, whose places in space follow from each other.
    fn axes(&self, operands: &[&str], results: &[&str], mixed: &str) -> Axes {
        let n = self.stride.len();
        let [input, kernel, output] = ["xyz", "uvw", "rst"].map(|all| &all[..n]);
        let spelled = |own: &&str| own.replace('X', input).replace('U', kernel).replace('R', output);
        let list = |all: &[&str]| all.iter().map(spelled).collect();
        let first = [input, kernel, output].concat();
        Axes {
            operands: list(operands),
            results: list(results),
            mixed: spelled(&mixed),
            first,
            fixed: if self.groups == 1 { String::new() } else { "co".into() },
            ..Axes::default()
        }
    }

    /// The dimensions of a kernel: what it takes is `c`, what it gives is `o`; in groups, one of them is a part, `g`.
    fn kernel_axes(&self) -> &'static str {
        match (self.transposed, self.groups) {
            (false, 1) => "ocU",
            (false, _) => "ogU",
            (true, 1) => "coU",
            (true, _) => "cgU",
        }
    }

    /// What follows the tensors in the arguments of both directions.
    fn items(&self) -> [Item<'_>; 6] {
        let Geometry { stride, padding, dilation, output_padding, groups, transposed } = self;
        [
            Item::Ints(stride),
            Item::Ints(padding),
            Item::Ints(dilation),
            Item::Bool(*transposed),
            Item::Ints(output_padding),
            Item::Int(*groups),
        ]
    }

    fn library_forward(
        &self,
        c: &Ctx,
        [x, w]: [Value; 2],
        bias: Option<Value>,
        sizes: &[i64],
    ) -> Option<Value> {
        let (xs, ws) = (c.shape(x), c.shape(w));
        let features = if self.transposed { ws[1] * self.groups } else { ws[0] };
        let mut shape = Dims::from_slice(&[xs[0], features]);
        shape.extend_from_slice(sizes);
        if !self.is_for_library(c, if self.transposed { &xs } else { &shape }, w) {
            return None;
        }
        let format = Format::of(c, x, w);
        let mut args = vec![format.item(x), Item::Tensor(w), bias.map_or(Item::None, Item::Tensor)];
        args.extend(self.items());
        let result = format.outcome(c, TensorType::new(c.dtype(x), shape), &[x, w]);
        let parts = Parts { args: &[0, -1, -1, -1, -1, -1, -1, -1, -1], results: &[0], step: 1 };
        let y = c.call_library_in_parts("convolution", &args, &[Some(result)], Some(&parts));
        y.into_iter().next().flatten()
    }

    fn library_backward(&self, c: &Ctx, [dy, x, w]: [Value; 3], mask: [bool; 3]) -> Option<Gradients> {
        if !self.is_for_library(c, &c.shape(if self.transposed { x } else { dy }), w) {
            return None;
        }
        let features = [c.shape(dy)[1]];
        let bias_sizes = if mask[2] { Item::Ints(&features) } else { Item::None };
        let format = Format::of(c, x, w);
        let mut args = vec![format.item(dy), format.item(x), Item::Tensor(w), bias_sizes];
        args.extend(self.items());
        args.push(Item::Bools(&mask));
        let bias = TensorType::new(c.dtype(x), features.as_slice());
        let types = [c.ty(x), c.ty(w), bias].into_iter().zip(mask);
        let results = types.map(|(ty, wanted)| wanted.then(|| format.outcome(c, ty, &[x, w])));
        let results: Vec<_> = results.collect();
        // Each image has a gradient; those of the weight and the bias are sums over all of them.
        let [dx, dw, db] = mask;
        let own = |wanted: bool, how| if wanted { how } else { word::WHOLE };
        let of_results = [own(dx, 0), own(dw, word::SUMMED), own(db, word::SUMMED)];
        let mut of_args = [word::WHOLE; 11];
        of_args[..2].fill(0);
        let parts = Parts { args: &of_args, results: &of_results, step: 1 };
        let gradients = c.call_library_in_parts("convolution_backward", &args, &results, Some(&parts));
        <[Option<Value>; 3]>::try_from(gradients).ok().map(|[dx, dw, db]| (dx, dw, db))
    }
}

/// How the images of a convolution are given to torch's kernel. For float32 that is oneDNN's, which turns images round at each
/// call if they do not have their channels last, and the weight if they do.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Format {
    AsTheyAre,
    ChannelsLast,
    Rows,
}

impl Format {
    fn of(c: &Ctx, image: Value, weight: Value) -> Format {
        let fits = c.rank(image) == 4 && c.dtype(image) == DType::F32;
        let is_small = is_less_than_its_weight(&c.ty(image), &c.ty(weight));
        match fits {
            true if is_small && is_channels_last(c, image) && !is_channels_last(c, weight) => Format::Rows,
            true if !is_small && c.prefers_channels_last() => Format::ChannelsLast,
            _ => Format::AsTheyAre,
        }
    }

    fn item<'a>(self, image: Value) -> Item<'a> {
        match self {
            Format::AsTheyAre => Item::Tensor(image),
            Format::ChannelsLast => Item::ChannelsLast(image),
            Format::Rows => Item::Dense(image),
        }
    }

    fn outcome(self, c: &Ctx, ty: TensorType, formats: &[Value]) -> Outcome {
        match self {
            Format::ChannelsLast if ty.shape.len() == 4 => Outcome::channels_last(ty),
            Format::AsTheyAre => Outcome::like(c, ty, formats),
            _ => Outcome::row_major(ty),
        }
    }
}

/// Whether it takes longer to turn round the weight of a convolution than the image. The weight of one place need not be.
pub fn is_less_than_its_weight(image: &TensorType, weight: &TensorType) -> bool {
    let places: i64 = weight.shape.iter().skip(2).product();
    places > 1 && image.bytes() < weight.bytes()
}

fn list(sizes: &[i64]) -> String {
    sizes.iter().map(i64::to_string).collect::<Vec<_>>().join(" x ")
}

/// `stride_height: 1 stride_width: 1`
fn by_dim(name: &str, sizes: &[i64]) -> String {
    let dims = ["depth", "height", "width"];
    let dims = &dims[dims.len().saturating_sub(sizes.len())..];
    let parts: Vec<String> = dims.iter().zip(sizes).map(|(d, n)| format!("{name}_{d}: {n}")).collect();
    parts.join(" ")
}

/// The checks of `at::native::check_shape_forward`, with its words.
fn check_shapes(g: &Geometry, x: &[i64], w: &[i64], bias: Option<&[i64]>) -> Result<()> {
    let (xs, ws) = (shape_text(x), shape_text(w));
    let fail = |text: String| Err(runtime(text));
    if x.len() != w.len() {
        let (n, k) = (w.len(), x.len());
        return fail(format!(
            "Expected {n}-dimensional input for {n}-dimensional weight {ws}, but got {k}-dimensional input of size \
             {xs} instead"
        ));
    }
    let groups = g.groups;
    if w[0] < groups {
        return fail(format!(
            "Given groups={groups}, expected weight to be at least {groups} at dimension 0, but got weight of size \
             {ws} instead"
        ));
    }
    if w[0] % groups != 0 {
        return fail(format!(
            "Given groups={groups}, expected weight to be divisible by {groups} at dimension 0, but got weight of \
             size {ws} instead"
        ));
    }
    let (given, channels, features) = match g.transposed {
        true => (format!("transposed={groups}"), w[0], w[1] * groups),
        false => (format!("groups={groups}"), w[1] * groups, w[0]),
    };
    if x[1] != channels {
        return fail(format!(
            "Given {given}, weight of size {ws}, expected input{xs} to have {channels} channels, but got {} channels \
             instead",
            x[1]
        ));
    }
    if let Some(b) = bias.filter(|b| **b != [features]) {
        return fail(format!(
            "Given {}weight of size {ws}, expected bias to be 1-dimensional with {features} elements, but got bias \
             of size {} instead",
            if g.transposed { format!("transposed={groups}, ") } else { String::new() },
            shape_text(b)
        ));
    }
    check_sizes(g, &x[2..], &w[2..])
}

fn check_sizes(g: &Geometry, input: &[i64], kernel: &[i64]) -> Result<()> {
    if kernel.contains(&0) {
        let text = format!("kernel size should be greater than zero, but got {}", by_dim("kernel", kernel));
        return Err(runtime(text));
    }
    let output = g.output(input, kernel);
    let too_far = |i: usize| g.output_padding[i] >= g.stride[i] && g.output_padding[i] >= g.dilation[i];
    if g.transposed && (0..input.len()).any(too_far) {
        return Err(runtime(format!(
            "output padding must be smaller than either stride or dilation, but got {} {} {}",
            by_dim("output_padding", &g.output_padding),
            by_dim("stride", &g.stride),
            by_dim("dilation", &g.dilation)
        )));
    }
    if g.transposed {
        return match output.iter().all(|&n| n >= 1) {
            true => Ok(()),
            false => Err(runtime(format!(
                "Given input size per channel: ({}). Calculated output size per channel: ({}). Output size is too \
                 small",
                list(input),
                list(&output)
            ))),
        };
    }
    let padded: Dims = input.iter().zip(&g.padding).map(|(n, p)| n + 2 * p).collect();
    let window: Dims = kernel.iter().zip(&g.dilation).map(|(k, d)| d * (k - 1) + 1).collect();
    if padded.iter().zip(&window).any(|(n, k)| n < k) {
        return Err(runtime(format!(
            "Calculated padded input size per channel: ({}). Kernel size: ({}). Kernel size can't be greater than \
             actual input size",
            list(&padded),
            list(&window)
        )));
    }
    Ok(())
}

/// A convolution in the accumulation dtype; with nothing to sum it is zero.
fn convolve(c: &Ctx, x: Value, w: Value, mut conv: Convolution) -> Value {
    let dtype = c.dtype(x);
    let acc = accumulator(dtype);
    conv.precision = precision(c, dtype);
    conv.out_dtype = (acc != dtype).then_some(acc);
    let empty = c.numel(x) == 0 || c.numel(w) == 0;
    let y = c.convolution(x, w, conv);
    if empty { c.zeros_like(y) } else { y }
}

/// `y[n, o, s] = sum x[n, i, s * stride + k * dilation - padding] * w[o, i, k]`, with `sizes` positions in space.
fn forward(c: &Ctx, g: &Geometry, x: Value, w: Value, sizes: &[i64]) -> Value {
    let (input, kernel) = (c.shape(x), c.shape(w));
    let n = sizes.len();
    let mut conv = Convolution::new(n);
    conv.strides = g.stride.clone();
    conv.rhs_dilation = g.dilation.clone();
    conv.feature_group_count = g.groups;
    let high =
        |i: usize| (sizes[i] - 1) * g.stride[i] + g.reach(i, kernel[i + 2]) + 1 - input[i + 2] - g.padding[i];
    conv.padding = (0..n).map(|i| (g.padding[i], high(i).max(-input[i + 2] - g.padding[i]))).collect();
    convolve(c, x, w, conv)
}

/// The transpose of [`forward`] in `x`: from values at the output to sums at the input, whose sizes are `sizes`.
fn scatter_back(c: &Ctx, g: &Geometry, y: Value, w: Value, sizes: &[i64]) -> Value {
    let (output, kernel) = (c.shape(y), c.shape(w));
    let n = sizes.len();
    let mut conv = Convolution::new(n);
    conv.dims = ConvDims { kernel_input_feature: 0, kernel_output_feature: 1, ..ConvDims::torch(n) };
    conv.lhs_dilation = g.stride.clone();
    conv.rhs_dilation = g.dilation.clone();
    conv.feature_group_count = g.groups;
    conv.padding = padding_to(n, |i| {
        let reach = g.reach(i, kernel[i + 2]);
        let spread = if output[i + 2] == 0 { 0 } else { (output[i + 2] - 1) * g.stride[i] + 1 };
        let low = reach - g.padding[i];
        (low, sizes[i] + reach - spread - low)
    });
    let spatial: Dims = (2..n as i64 + 2).collect();
    // The CPU plugin's fast path knows no window reversal, so the kernel itself is turned round.
    convolve(c, y, c.reverse(swap_features(c, w, g.groups), &spatial), conv)
}

fn padding_to(n: usize, f: impl Fn(usize) -> (i64, i64)) -> Padding {
    (0..n).map(f).collect()
}

/// `[g * o, i, k..]` to `[o, g * i, k..]`: the kernel that reads outputs and gives inputs, group by group.
fn swap_features(c: &Ctx, w: Value, groups: i64) -> Value {
    if groups == 1 {
        return w;
    }
    let shape = c.shape(w);
    let (o, i) = (shape[0] / groups, shape[1]);
    let mut split = Dims::from_slice(&[groups, o, i]);
    split.extend_from_slice(&shape[2..]);
    let mut perm: Dims = (0..split.len() as i64).collect();
    perm.swap(0, 1);
    let mut joined = Dims::from_slice(&[o, groups * i]);
    joined.extend_from_slice(&shape[2..]);
    c.reshape(c.transpose(c.reshape(w, &split), &perm), &joined)
}

/// The gradient of [`forward`] in `w`, whose spatial sizes are `sizes`: the batch is what is summed over.
fn weight_gradient(c: &Ctx, g: &Geometry, x: Value, dy: Value, sizes: &[i64]) -> Value {
    let (input, output) = (c.shape(x), c.shape(dy));
    let n = sizes.len();
    let mut conv = Convolution::new(n);
    conv.dims = ConvDims {
        input_batch: 1,
        input_feature: 0,
        kernel_input_feature: 0,
        kernel_output_feature: 1,
        output_batch: 1,
        output_feature: 0,
        ..ConvDims::torch(n)
    };
    conv.strides = g.dilation.clone();
    conv.rhs_dilation = g.stride.clone();
    conv.batch_group_count = g.groups;
    conv.padding = padding_to(n, |i| {
        let window = (output[i + 2] - 1) * g.stride[i] + 1;
        let low = g.padding[i];
        (low, g.reach(i, sizes[i]) + window - input[i + 2] - low)
    });
    convolve(c, x, dy, conv)
}

fn spatial(c: &Ctx, x: Value) -> Dims {
    c.shape(x)[2..].into()
}

fn same_dtype(c: &Ctx, x: Value, w: Value, bias: Option<Value>) -> Result<()> {
    let names = [x, w].map(|v| scalar_name(c.dtype(v)));
    if names[0] != names[1] {
        return Err(runtime(format!("expected scalar type {} but found {}", names[0], names[1])));
    }
    match bias.map(|b| scalar_name(c.dtype(b))) {
        Some(b) if b != names[0] => {
            let (x, b) = (names[0].to_lowercase(), b.to_lowercase());
            Err(runtime(format!("Input type ({x}) and bias type ({b}) should be the same")))
        }
        _ => Ok(()),
    }
}

#[allow(clippy::too_many_arguments)] // the schema's
fn convolution(
    c: &Ctx,
    x: Value,
    w: Value,
    bias: Option<Value>,
    stride: Dims,
    padding: Dims,
    dilation: Dims,
    transposed: bool,
    output_padding: Dims,
    groups: i64,
) -> Result<Value> {
    let (xs, ws) = (c.shape(x), c.shape(w));
    let rank = ws.len().checked_sub(2).filter(|n| *n > 0).ok_or_else(|| too_flat(&ws))?;
    let g = Geometry::new(rank, [stride, padding, dilation, output_padding], groups, transposed)?;
    check_shapes(&g, &xs, &ws, bias.map(|b| c.shape(b)).as_deref())?;
    same_dtype(c, x, w, bias)?;
    let dtype = c.dtype(x);
    if category(dtype) == Category::Bool {
        return Err(crate::error::not_implemented("slow_conv2d_cpu", dtype));
    }
    let target = c.config.target;
    let is_int = category(dtype) == Category::Int;
    if is_int && target.float_convolutions || dtype == DType::S64 && target.int64_as_pairs {
        return Err(unsupported("convolutions of such integers on this platform"));
    }
    match deferred_convolution(c, &g, [x, w], bias) {
        Some(y) => Ok(y),
        None => Ok(convolved(c, &g, [x, w], bias)),
    }
}

/// A convolution, by the library where that is worth it.
fn convolved(c: &Ctx, g: &Geometry, [x, w]: [Value; 2], bias: Option<Value>) -> Value {
    let sizes = g.output(&spatial(c, x), &spatial(c, w));
    if let Some(y) = g.library_forward(c, [x, w], bias, &sizes) {
        return y;
    }
    let mut y = match g.transposed {
        true => scatter_back(c, g, x, w, &sizes),
        false => forward(c, g, x, w, &sizes),
    };
    if let Some(b) = bias {
        let shape = c.shape(y);
        y = c.add(y, c.broadcast_in_dim(c.to(b, c.dtype(y)), &shape, &[1]));
    }
    c.to(y, c.dtype(x))
}

/// The same, left open in an outline if the library may do it.
fn deferred_convolution(c: &Ctx, g: &Geometry, [x, w]: [Value; 2], bias: Option<Value>) -> Option<Value> {
    if !g.is_deferred(c, c.dtype(x)) {
        return None;
    }
    let axes = g.axes(&["ncX", g.kernel_axes(), "o"][..2 + usize::from(bias.is_some())], &["noR"], "cXU");
    let features = if g.transposed { c.shape(w)[1] * g.groups } else { c.shape(w)[0] };
    let mut shape = Dims::from_slice(&[c.shape(x)[0], features]);
    shape.extend_from_slice(&g.output(&spatial(c, x), &spatial(c, w)));
    let operands: Vec<Value> = [x, w].into_iter().chain(bias).collect();
    let (name, own) = (format!("convolution {g:?}"), g.clone());
    let made = c.deferred(name, &operands, &[TensorType::new(c.dtype(x), shape)], axes, move |c, x, _| {
        Ok(vec![convolved(c, &own, [x[0], x[1]], x.get(2).copied())])
    });
    made?.first().copied()
}

fn too_flat(weight: &[i64]) -> Error {
    runtime(format!("weight should have at least three dimensions, got {}", shape_text(weight)))
}

#[allow(clippy::too_many_arguments)] // the schema's
fn convolution_backward(
    c: &Ctx,
    dy: Value,
    x: Value,
    w: Value,
    _bias_sizes: Option<Dims>,
    stride: Dims,
    padding: Dims,
    dilation: Dims,
    transposed: bool,
    output_padding: Dims,
    groups: i64,
    mask: Vec<bool>,
) -> Result<Gradients> {
    convolution_backward_overrideable(
        c,
        dy,
        x,
        w,
        stride,
        padding,
        dilation,
        transposed,
        output_padding,
        groups,
        mask,
    )
}

#[allow(clippy::too_many_arguments)] // the schema's
fn convolution_backward_overrideable(
    c: &Ctx,
    dy: Value,
    x: Value,
    w: Value,
    stride: Dims,
    padding: Dims,
    dilation: Dims,
    transposed: bool,
    output_padding: Dims,
    groups: i64,
    mask: Vec<bool>,
) -> Result<Gradients> {
    let &[want_x, want_w, want_b] = mask.as_slice() else {
        return Err(runtime("convolution_backward: output_mask must have 3 entries"));
    };
    let ws = c.shape(w);
    let rank = ws.len().checked_sub(2).filter(|n| *n > 0).ok_or_else(|| too_flat(&ws))?;
    let g = Geometry::new(rank, [stride, padding, dilation, output_padding], groups, transposed)?;
    check_shapes(&g, &c.shape(x), &ws, None)?;
    let spatial = g.output(&c.shape(x)[2..], &ws[2..]);
    let features = if g.transposed { ws[1] * groups } else { ws[0] };
    let want: Dims = [c.shape(x)[0], features].into_iter().chain(spatial).collect();
    if c.shape(dy) != want {
        let (want, got) = (shape_text(&want), shape_text(&c.shape(dy)));
        return Err(runtime(format!("expected grad_output of size {want}, but got {got}")));
    }
    same_dtype(c, dy, w, None)?;
    same_dtype(c, x, w, None)?;
    let wanted = [want_x, want_w, want_b];
    match deferred_gradients(c, &g, [dy, x, w], wanted) {
        Some(gradients) => Ok(gradients),
        None => Ok(gradients(c, &g, [dy, x, w], wanted)),
    }
}

/// The gradients of a convolution, by the library where that is worth it.
fn gradients(c: &Ctx, g: &Geometry, [dy, x, w]: [Value; 3], wanted: [bool; 3]) -> Gradients {
    if let Some(gradients) = g.library_backward(c, [dy, x, w], wanted) {
        return gradients;
    }
    let (dtype, kernel) = (c.dtype(x), spatial(c, w));
    let dx = || match g.transposed {
        true => forward(c, g, dy, w, &spatial(c, x)),
        false => scatter_back(c, g, dy, w, &spatial(c, x)),
    };
    let dw = || match g.transposed {
        true => weight_gradient(c, g, dy, x, &kernel),
        false => weight_gradient(c, g, x, dy, &kernel),
    };
    let db = || {
        let dims: Dims = (0..c.rank(dy) as i64).filter(|&d| d != 1).collect();
        c.reduce_sum(c.to(dy, accumulator(dtype)), &dims)
    };
    let round = |v: Value| c.to(v, dtype);
    let [want_x, want_w, want_b] = wanted;
    (want_x.then(|| round(dx())), want_w.then(|| round(dw())), want_b.then(|| round(db())))
}

/// The same, left open in an outline if the library may do it.
fn deferred_gradients(c: &Ctx, g: &Geometry, [dy, x, w]: [Value; 3], wanted: [bool; 3]) -> Option<Gradients> {
    if !g.is_deferred(c, c.dtype(x)) {
        return None;
    }
    let bias = TensorType::new(c.dtype(x), [c.shape(dy)[1]].as_slice());
    let all = [(c.ty(x), "ncX"), (c.ty(w), g.kernel_axes()), (bias, "o")].into_iter().zip(wanted);
    let (types, results): (Vec<_>, Vec<_>) = all.filter_map(|(own, wanted)| wanted.then_some(own)).unzip();
    let axes = g.axes(&["noR", "ncX", g.kernel_axes()], &results, "ncoXUR");
    let (name, own) = (format!("gradients {wanted:?} of convolution {g:?}"), g.clone());
    let made = c.deferred(name, &[dy, x, w], &types, axes, move |c, x, _| {
        let (dx, dw, db) = gradients(c, &own, [x[0], x[1], x[2]], wanted);
        Ok([dx, dw, db].into_iter().flatten().collect())
    });
    let mut made = made?.into_iter();
    let [dx, dw, db] = wanted.map(|wanted| if wanted { made.next() } else { None });
    Some((dx, dw, db))
}

/// A sliding window over the last two dimensions.
struct Blocks {
    kernel: [i64; 2],
    dilation: [i64; 2],
    padding: [i64; 2],
    stride: [i64; 2],
    /// How many positions the window has.
    count: [i64; 2],
}

fn pair(name: &str, v: &[i64]) -> Result<[i64; 2]> {
    match *v {
        [a] => Ok([a, a]),
        [a, b] => Ok([a, b]),
        _ => Err(runtime(format!("It is expected {name} equals to 2, but got size {}", v.len()))),
    }
}

fn two([a, b]: [i64; 2]) -> String {
    format!("({a}, {b})")
}

impl Blocks {
    fn new(size: [i64; 2], kernel: Dims, dilation: Dims, padding: Dims, stride: Dims) -> Result<Blocks> {
        let (kernel, dilation) = (pair("kernel_size", &kernel)?, pair("dilation", &dilation)?);
        let (padding, stride) = (pair("padding", &padding)?, pair("stride", &stride)?);
        for (name, v) in [("kernel", kernel), ("stride", stride), ("dilation", dilation)] {
            if v[0] <= 0 || v[1] <= 0 {
                let text = format!(
                    "{name} should be greater than zero, but got {name}_height: {} {name}_width: {}",
                    v[0], v[1]
                );
                return Err(runtime(text));
            }
        }
        let positions = |i: usize| {
            (size[i] + 2 * padding[i] - dilation[i] * (kernel[i] - 1) - 1).div_euclid(stride[i]) + 1
        };
        let count = [positions(0), positions(1)];
        if count[0] < 1 || count[1] < 1 {
            return Err(runtime(format!(
                "Given input with spatial size {}, kernel_size={}, dilation={}, padding={}, calculated shape of the \
                 array of sliding blocks as {}, but its components must be at least one.",
                two(size),
                two(kernel),
                two(dilation),
                two(padding),
                two(count)
            )));
        }
        Ok(Blocks { kernel, dilation, padding, stride, count })
    }

    /// Offsets of the kernel's elements in the padded image, row by row.
    fn offsets(&self) -> impl Iterator<Item = [i64; 2]> + '_ {
        let row =
            move |i: i64| (0..self.kernel[1]).map(move |j| [i * self.dilation[0], j * self.dilation[1]]);
        (0..self.kernel[0]).flat_map(row)
    }

    fn kernel_size(&self) -> i64 {
        self.kernel[0] * self.kernel[1]
    }
}

/// Images with a batch dimension, and whether it was added.
fn batched(c: &Ctx, x: Value, rank: usize) -> (Value, bool) {
    let added = c.rank(x) + 1 == rank;
    (if added { c.unsqueeze(x, 0) } else { x }, added)
}

fn unbatch(c: &Ctx, x: Value, added: bool) -> Value {
    if added { c.squeeze(x, &[0]) } else { x }
}

fn im2col(c: &Ctx, x: Value, kernel: Dims, dilation: Dims, padding: Dims, stride: Dims) -> Result<Value> {
    let (x, added) = batched(c, x, 4);
    let &[n, channels, height, width] = c.shape(x).as_slice() else {
        let text = "Expected 3D or 4D (batch mode) tensor with possibly 0 batch size and other non-zero dimensions for input";
        return Err(runtime(format!("{text}, but got: {}", shape_text(&c.shape(x)))));
    };
    let blocks = Blocks::new([height, width], kernel, dilation, padding, stride)?;
    let [ph, pw] = blocks.padding;
    let edge = [0, 0, ph, pw];
    let padded = c.pad(x, c.scalar_i64(c.dtype(x), 0), &edge, &edge, &[0; 4]);
    let count = blocks.count[0] * blocks.count[1];
    let take = |[i, j]: [i64; 2]| {
        let last = |k: usize, at: i64| at + (blocks.count[k] - 1) * blocks.stride[k] + 1;
        let [sh, sw] = blocks.stride;
        let part = c.slice(padded, &[0, 0, i, j], &[n, channels, last(0, i), last(1, j)], &[1, 1, sh, sw]);
        c.reshape(part, &[n, channels, 1, count])
    };
    let parts: Vec<Value> = blocks.offsets().map(take).collect();
    let out = c.reshape(c.concatenate(&parts, 2), &[n, channels * blocks.kernel_size(), count]);
    Ok(unbatch(c, out, added))
}

fn col2im(
    c: &Ctx,
    x: Value,
    size: Dims,
    kernel: Dims,
    dilation: Dims,
    padding: Dims,
    stride: Dims,
) -> Result<Value> {
    let size = pair("output_size", &size)?;
    let (x, added) = batched(c, x, 3);
    let &[n, planes, length] = c.shape(x).as_slice() else {
        let text = "Expected 2D or 3D (batch mode) tensor for input with possibly 0 batch size and non-zero dimensions for input";
        return Err(runtime(format!("{text}, but got: {}", shape_text(&c.shape(x)))));
    };
    let blocks = Blocks::new(size, kernel, dilation, padding, stride)?;
    let (area, [rows, columns]) = (blocks.kernel_size(), blocks.count);
    if planes % area != 0 {
        let [kh, kw] = blocks.kernel;
        return Err(runtime(format!(
            "Expected size of input's dimension 1 to be divisible by the product of kernel_size, but got \
             input.size(1)={planes} and kernel_size=({kh}, {kw})."
        )));
    }
    if length != rows * columns {
        return Err(runtime(format!(
            "Given output_size={}, kernel_size={}, dilation={}, padding={}, stride={}, expected size of input's \
             dimension 2 to match the calculated number of sliding blocks {rows} * {columns} = {}, but got \
             input.size(2)={length}.",
            two(size),
            two(blocks.kernel),
            two(blocks.dilation),
            two(blocks.padding),
            two(blocks.stride),
            rows * columns
        )));
    }
    let channels = planes / area;
    let x = c.reshape(x, &[n, channels, area, rows, columns]);
    let (dtype, [sh, sw], [ph, pw]) = (c.dtype(x), blocks.stride, blocks.padding);
    let zero = c.scalar_i64(accumulator(dtype), 0);
    let place = |(k, [i, j]): (usize, [i64; 2])| {
        let part = c.to(c.index_dim(x, 2, k as i64), accumulator(dtype));
        let spread = |size: i64, stride: i64| (size - 1) * stride + 1;
        let high = [size[0] + 2 * ph - i - spread(rows, sh), size[1] + 2 * pw - j - spread(columns, sw)];
        // Edges that fall into the padding are cut off by negative amounts.
        let (low, high) = ([0, 0, i - ph, j - pw], [0, 0, high[0] - ph, high[1] - pw]);
        c.pad(part, zero, &low, &high, &[0, 0, sh - 1, sw - 1])
    };
    let sum = blocks.offsets().enumerate().map(place).reduce(|a, b| c.add(a, b));
    let sum = sum.ok_or_else(|| runtime("col2im: empty kernel"))?;
    Ok(unbatch(c, c.to(sum, dtype), added))
}
