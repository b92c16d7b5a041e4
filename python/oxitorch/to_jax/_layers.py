"""Layers and functions that flax and jax have not, or have with another meaning.

What a translation uses of them is copied into its `layers.py`; this is never imported. Their parameters have PyTorch's
names and layouts, and images have their channels before height and width: XLA chooses the layout in memory itself.
"""

import math

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax


class Buffer(nnx.Variable):
    """A value of a module that is not trained."""


class Constant(nnx.Variable):
    """A value of a module that is neither trained nor saved."""


def unsupported(what, where):
    """Stands where the PyTorch module does what has no translation."""
    raise NotImplementedError(f"{where}: {what} has no translation to JAX")


class Embedding(nnx.Module):
    """Rows of a table; the row `padding_idx` gets no gradient."""

    def __init__(self, num_embeddings, features, *, padding_idx, rngs):
        self.weight = nnx.Param(jax.random.normal(rngs.params(), (num_embeddings, features)))
        self.padding_idx = padding_idx

    def __call__(self, ids):
        return embedding(ids, self.weight[...], self.padding_idx)


def embedding(ids, table, padding_idx):
    """Rows of a table; the row `padding_idx` gets no gradient."""
    rows = table[ids]
    return jnp.where((ids == padding_idx)[..., None], lax.stop_gradient(rows), rows)


class Conv(nnx.Module):
    """Convolution of [N, C, ...]; the kernel is [out, in / groups, ...], as in PyTorch."""

    def __init__(
        self, in_features, out_features, kernel_size, *, strides=1, padding=0, dilation=1, groups=1, use_bias=True, rngs
    ):
        shape = (out_features, in_features // groups, *kernel_size)
        self.weight = nnx.Param(nnx.initializers.he_uniform(in_axis=1, out_axis=0)(rngs.params(), shape))
        self.bias = nnx.Param(jnp.zeros(out_features)) if use_bias else None
        self.strides, self.padding, self.dilation, self.groups = strides, padding, dilation, groups

    def __call__(self, x):
        bias = None if self.bias is None else self.bias[...]
        return conv(x, self.weight[...], bias, self.strides, self.padding, self.dilation, self.groups)


def per_dimension(x, rank):
    """One number for each dimension."""
    if isinstance(x, int):
        return (x,) * rank
    return tuple(x) * rank if len(x) == 1 else tuple(x)


def conv(x, weight, bias=None, strides=1, padding=0, dilation=1, groups=1):
    """Convolution of [N, C, ...] with a kernel [out, in / groups, ...]; padding is numbers, "same" or "valid"."""
    rank = weight.ndim - 2
    if not isinstance(padding, str):
        padding = [(p, p) for p in per_dimension(padding, rank)]
    y = lax.conv_general_dilated(
        x,
        weight,
        per_dimension(strides, rank),
        padding,
        rhs_dilation=per_dimension(dilation, rank),
        dimension_numbers=("NC" + "DHW"[-rank:], "OI" + "DHW"[-rank:], "NC" + "DHW"[-rank:]),
        feature_group_count=groups,
    )
    return y if bias is None else y + bias.reshape(-1, *[1] * rank)


class ConvTranspose(nnx.Module):
    """The transpose of a convolution of [N, C, ...]; the kernel is [in, out / groups, ...], as in PyTorch."""

    def __init__(
        self,
        in_features,
        out_features,
        kernel_size,
        *,
        strides=1,
        padding=0,
        output_padding=0,
        dilation=1,
        groups=1,
        use_bias=True,
        rngs,
    ):
        shape = (in_features, out_features // groups, *kernel_size)
        self.weight = nnx.Param(nnx.initializers.he_uniform(in_axis=0, out_axis=1)(rngs.params(), shape))
        self.bias = nnx.Param(jnp.zeros(out_features)) if use_bias else None
        self.strides, self.padding, self.output_padding = strides, padding, output_padding
        self.dilation, self.groups = dilation, groups

    def __call__(self, x):
        bias = None if self.bias is None else self.bias[...]
        return conv_transpose(
            x, self.weight[...], bias, self.strides, self.padding, self.output_padding, self.groups, self.dilation
        )


def conv_transpose(x, weight, bias=None, strides=1, padding=0, output_padding=0, groups=1, dilation=1):
    """The transpose of a convolution of [N, C, ...] with a kernel [in, out / groups, ...]."""
    rank = weight.ndim - 2
    strides, padding, output_padding, dilation = (
        per_dimension(n, rank) for n in (strides, padding, output_padding, dilation)
    )
    kernel = weight.shape[2:]
    reach = [d * (k - 1) for d, k in zip(dilation, kernel)]
    # [in, out / groups, ...] -> [out, in / groups, ...], turned around
    w = weight.reshape(groups, weight.shape[0] // groups, *weight.shape[1:]).swapaxes(1, 2)
    w = jnp.flip(w.reshape(-1, weight.shape[0] // groups, *kernel), range(2, 2 + rank))
    y = lax.conv_general_dilated(
        x,
        w,
        (1,) * rank,
        [(r - p, r - p + o) for r, p, o in zip(reach, padding, output_padding)],
        lhs_dilation=strides,
        rhs_dilation=dilation,
        dimension_numbers=("NC" + "DHW"[-rank:], "OI" + "DHW"[-rank:], "NC" + "DHW"[-rank:]),
        feature_group_count=groups,
    )
    return y if bias is None else y + bias.reshape(-1, *[1] * rank)


class BatchNorm(nnx.Module):
    """Normalization of [N, C, ...] over all but the channels; the running variance is the unbiased one."""

    def __init__(self, num_features, *, momentum=0.1, epsilon=1e-5, affine=True, rngs):
        self.weight = nnx.Param(jnp.ones(num_features)) if affine else None
        self.bias = nnx.Param(jnp.zeros(num_features)) if affine else None
        self.running_mean = Buffer(jnp.zeros(num_features))
        self.running_var = Buffer(jnp.ones(num_features))
        self.num_batches_tracked = Buffer(jnp.zeros((), jnp.int32))
        self.momentum, self.epsilon = momentum, epsilon
        self.use_running_average = False

    def __call__(self, x):
        if not self.use_running_average:
            self.num_batches_tracked[...] += 1
        weight, bias = (None if p is None else p[...] for p in (self.weight, self.bias))
        running = self.running_mean, self.running_var
        return batch_norm(x, weight, bias, *running, self.momentum, self.epsilon, self.use_running_average)


def batch_norm(x, weight, bias, running_mean, running_var, momentum, epsilon, use_running_average):
    """Normalization of [N, C, ...] over all but the channels; updates the running ones if it does not use them."""
    shape = (1, -1, *[1] * (x.ndim - 2))
    if use_running_average:
        mean, var = running_mean[...], running_var[...]
    else:
        axes = (0, *range(2, x.ndim))
        count = x.size // x.shape[1]
        mean, var = x.mean(axes), x.var(axes)
        if running_mean is not None:
            running_mean[...] += momentum * (lax.stop_gradient(mean) - running_mean[...])
            running_var[...] += momentum * (lax.stop_gradient(var) * count / (count - 1) - running_var[...])
    y = (x - mean.reshape(shape)) * lax.rsqrt(var.reshape(shape) + epsilon)
    y = y if weight is None else y * weight.reshape(shape)
    return y if bias is None else y + bias.reshape(shape)


class GroupNorm(nnx.Module):
    """Normalization of groups of channels of [N, C, ...]."""

    def __init__(self, num_groups, num_features, *, epsilon=1e-5, affine=True, rngs):
        self.weight = nnx.Param(jnp.ones(num_features)) if affine else None
        self.bias = nnx.Param(jnp.zeros(num_features)) if affine else None
        self.num_groups, self.epsilon = num_groups, epsilon

    def __call__(self, x):
        weight, bias = (None if p is None else p[...] for p in (self.weight, self.bias))
        return group_norm(x, self.num_groups, weight, bias, self.epsilon)


def group_norm(x, num_groups, weight=None, bias=None, epsilon=1e-5):
    """Normalization of groups of channels of [N, C, ...]."""
    groups = x.reshape(x.shape[0], num_groups, -1)
    mean, var = groups.mean(-1, keepdims=True), groups.var(-1, keepdims=True)
    y = ((groups - mean) * lax.rsqrt(var + epsilon)).reshape(x.shape)
    shape = (-1, *[1] * (x.ndim - 2))
    y = y if weight is None else y * weight.reshape(shape)
    return y if bias is None else y + bias.reshape(shape)


def layer_norm(x, rank, weight=None, bias=None, epsilon=1e-5):
    """Normalization over the last `rank` dimensions."""
    axes = tuple(range(-rank, 0))
    y = (x - x.mean(axes, keepdims=True)) * lax.rsqrt(x.var(axes, keepdims=True) + epsilon)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def rms_norm(x, rank, weight=None, epsilon=None):
    """Division by the root of the mean square over the last `rank` dimensions."""
    epsilon = jnp.finfo(x.dtype).eps if epsilon is None else epsilon
    y = x * lax.rsqrt(jnp.square(x).mean(tuple(range(-rank, 0)), keepdims=True) + epsilon)
    return y if weight is None else y * weight


class DropPath(nnx.Module):
    """Stochastic depth: the branch of a residual block is zero for some of the samples."""

    def __init__(self, rate, *, rngs):
        self.dropout = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x):
        return x * self.dropout(jnp.ones((x.shape[0], *[1] * (x.ndim - 1)), x.dtype))


def weight_norm(direction, size, axis):
    """A weight of which the norm over all but one axis is `size`."""
    axes = tuple(n for n in range(direction.ndim) if n != axis % direction.ndim)
    return direction * (size * lax.rsqrt(jnp.square(direction).sum(axes, keepdims=True)))


class LSTM(nnx.Module):
    """Layers of long short-term memory over [time, batch, features], or [batch, time, features]."""

    def __init__(
        self, input_size, hidden_size, *, num_layers=1, use_bias=True, batch_first=False, bidirectional=False,
        dropout=0.0, rngs,
    ):  # fmt: skip
        self.ends = [f"_l{n}{way}" for n in range(num_layers) for way in ["", "_reverse"][: 1 + bidirectional]]
        self.gates, self.ways, self.batch_first, self.use_bias = 4, 1 + bidirectional, batch_first, use_bias
        self.hidden_size = hidden_size
        recurrent_parameters(self, input_size, rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x, state=None):
        def step(carry, gates, weight, bias):
            h, c = carry
            i, f, g, o = jnp.split(gates + h @ weight.T + bias, 4, -1)
            c = nnx.sigmoid(f) * c + nnx.sigmoid(i) * jnp.tanh(g)
            h = nnx.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        y, (h, c) = recurrent(self, x, state, 2, step)
        return y, (h, c)


class GRU(nnx.Module):
    """Layers of gated recurrent units over [time, batch, features], or [batch, time, features]."""

    def __init__(
        self, input_size, hidden_size, *, num_layers=1, use_bias=True, batch_first=False, bidirectional=False,
        dropout=0.0, rngs,
    ):  # fmt: skip
        self.ends = [f"_l{n}{way}" for n in range(num_layers) for way in ["", "_reverse"][: 1 + bidirectional]]
        self.gates, self.ways, self.batch_first, self.use_bias = 3, 1 + bidirectional, batch_first, use_bias
        self.hidden_size = hidden_size
        recurrent_parameters(self, input_size, rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x, state=None):
        def step(carry, gates, weight, bias):
            (h,) = carry
            r, z, n = jnp.split(gates, 3, -1)
            hr, hz, hn = jnp.split(h @ weight.T + bias, 3, -1)
            r, z = nnx.sigmoid(r + hr), nnx.sigmoid(z + hz)
            n = jnp.tanh(n + r * hn)
            h = (1 - z) * n + z * h
            return (h,), h

        y, (h,) = recurrent(self, x, None if state is None else (state,), 1, step)
        return y, h


def recurrent_parameters(layer, input_size, rngs):
    """Makes the parameters of LSTM and GRU, by PyTorch's names."""
    init = nnx.initializers.uniform(layer.hidden_size**-0.5)
    for n, end in enumerate(layer.ends):
        features = input_size if n < layer.ways else layer.hidden_size * layer.ways
        rows = layer.gates * layer.hidden_size
        setattr(layer, "weight_ih" + end, nnx.Param(init(rngs.params(), (rows, features))))
        setattr(layer, "weight_hh" + end, nnx.Param(init(rngs.params(), (rows, layer.hidden_size))))
        if layer.use_bias:
            setattr(layer, "bias_ih" + end, nnx.Param(jnp.zeros(rows)))
            setattr(layer, "bias_hh" + end, nnx.Param(jnp.zeros(rows)))


def recurrent(layer, x, state, carries, step):
    """Runs the layers of LSTM and GRU; the output, and the last carries of all layers."""
    unbatched = x.ndim == 2
    if unbatched:
        x = x[:, None]
        state = None if state is None else tuple(s[:, None] for s in state)
    elif layer.batch_first:
        x = x.swapaxes(0, 1)
    if state is None:
        state = (jnp.zeros((len(layer.ends), x.shape[1], layer.hidden_size), x.dtype),) * carries
    last = []
    for first in range(0, len(layer.ends), layer.ways):
        if first:
            x = layer.dropout(x)
        outputs = []
        for way, end in enumerate(layer.ends[first : first + layer.ways]):
            weight = getattr(layer, "weight_hh" + end)[...]
            bias_ih, bias_hh = (
                getattr(layer, name + end)[...] if layer.use_bias else 0 for name in ("bias_ih", "bias_hh")
            )
            gates = x @ getattr(layer, "weight_ih" + end)[...].T + bias_ih
            carry, y = lax.scan(
                lambda carry, g, w=weight, b=bias_hh: step(carry, g, w, b),
                tuple(s[first + way] for s in state),
                gates,
                reverse=bool(way),
            )
            last.append(carry)
            outputs.append(y)
        x = outputs[0] if len(outputs) == 1 else jnp.concatenate(outputs, -1)
    last = tuple(jnp.stack(c) for c in zip(*last))
    if unbatched:
        return x[:, 0], tuple(c[:, 0] for c in last)
    return (x.swapaxes(0, 1) if layer.batch_first else x), last


def attention(q, k, v, mask=None, is_causal=False, scale=None, dropout=None):
    """Scaled dot product attention of [..., heads, time, features]; fewer heads of k and v serve several of q.

    A mask of booleans says what is seen, one of numbers is added.
    """
    if k.shape[-3] != q.shape[-3]:
        k, v = (jnp.repeat(t, q.shape[-3] // t.shape[-3], axis=-3) for t in (k, v))
    scores = q @ k.swapaxes(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    if mask is not None:
        scores = jnp.where(mask, scores, -jnp.inf) if mask.dtype == bool else scores + mask
    weights = jax.nn.softmax(scores, axis=-1)
    return (weights if dropout is None else dropout(weights)) @ v


def cross_entropy(logits, labels, ignore_index=-100):
    """The mean over the labels that are not `ignore_index`; the classes are the second dimension of the logits."""
    seen = labels != ignore_index
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.where(seen, labels, 0), axis=1)
    return jnp.where(seen, losses, 0).sum() / seen.sum()


def weighted_cross_entropy(logits, labels, weight=None, reduction="mean", ignore_index=-100, label_smoothing=0.0):
    """PyTorch's cross entropy of [N, classes, ...] and labels [N, ...], or probabilities of logits' shape."""
    axis = 0 if logits.ndim == 1 else 1
    logp = jax.nn.log_softmax(logits, axis)
    classes = logits.shape[axis]
    by_class = jnp.ones(classes, logp.dtype) if weight is None else weight
    shape = tuple(classes if n == axis else 1 for n in range(logits.ndim))
    weighted = logp * by_class.reshape(shape)
    if labels.ndim == logits.ndim:
        labels = labels * (1 - label_smoothing) + label_smoothing / classes
        losses = -(weighted * labels).sum(axis)
        total = losses.size if logits.ndim > 1 else 1
    else:
        seen = labels != ignore_index
        safe = jnp.where(seen, labels, 0)
        picked = -jnp.take_along_axis(weighted, jnp.expand_dims(safe, axis), axis).squeeze(axis)
        losses = (1 - label_smoothing) * picked - label_smoothing / classes * weighted.sum(axis)
        losses = jnp.where(seen, losses, 0)
        total = jnp.where(seen, by_class[safe], 0).sum()
    return {"mean": lambda: losses.sum() / total, "sum": losses.sum, "none": lambda: losses}[reduction]()


def reduce_loss(losses, reduction):
    """The mean, the sum or all of the losses."""
    return {"mean": losses.mean, "sum": losses.sum, "none": lambda: losses}[reduction]()


def pool(x, window, strides, padding, ceil_mode, start, combine, dilation=1):
    """A reduction over windows of the last dimensions, as many as `window` has."""
    rank = len(window)
    padding, dilation = per_dimension(padding, rank), per_dimension(dilation, rank)
    strides = per_dimension(strides or window, rank)
    pads = []
    for size, k, s, p, d in zip(x.shape[-rank:], window, strides, padding, dilation):
        span = size + 2 * p - d * (k - 1) - 1
        count = span // s + 1
        if ceil_mode and -(-span // s) * s < size + p:
            count = -(-span // s) + 1
        pads.append((p, max(p, (count - 1) * s + d * (k - 1) + 1 - size - p) if ceil_mode else p))
    ones = (1,) * (x.ndim - rank)
    return lax.reduce_window(
        x,
        start,
        combine,
        (*ones, *window),
        (*ones, *strides),
        [(0, 0)] * (x.ndim - rank) + pads,
        window_dilation=(*ones, *dilation),
    )


def max_pool(x, window, strides=None, padding=0, dilation=1, ceil_mode=False):
    """The largest of each window of the last dimensions; windows do not overlap if no strides are given."""
    least = -jnp.inf if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo(x.dtype).min
    return pool(x, window, strides, padding, ceil_mode, least, lax.max, dilation)


def avg_pool(x, window, strides=None, padding=0, ceil_mode=False, count_include_pad=True, divisor=None):
    """The mean of each window of the last dimensions; windows do not overlap if no strides are given."""
    sums = pool(x, window, strides, padding, ceil_mode, 0.0, lax.add)
    if divisor is not None:
        return sums / divisor
    ones = jnp.ones(x.shape[-len(window) :], x.dtype)
    if count_include_pad and not ceil_mode:
        return sums / math.prod(window)
    if count_include_pad:
        ones = jnp.pad(ones, [(p, p) for p in per_dimension(padding, len(window))], constant_values=1)
        padding = 0
    return sums / pool(ones, window, strides, padding, ceil_mode, 0.0, lax.add)


def adaptive_avg_pool(x, output_size):
    """Means over parts of the last dimensions, as many as asked for."""
    for axis, out in zip(range(-len(output_size), 0), output_size):
        size = x.shape[axis]
        parts = [
            lax.slice_in_dim(x, i * size // out, -(-(i + 1) * size // out), axis=axis).mean(axis, keepdims=True)
            for i in range(out)
        ]
        x = jnp.concatenate(parts, axis)
    return x


def interpolate_nearest(x, size):
    """[N, C, ...] with each of the last dimensions of another size, by the nearest element before."""
    for axis, out in zip(range(-len(size), 0), size):
        x = jnp.take(x, jnp.arange(out) * x.shape[axis] // out, axis=axis)
    return x


def interpolate_linear(x, size, align_corners=False, scales=None):
    """[N, C, ...] with each of the last dimensions of another size, linearly between elements."""
    for n, (axis, out) in enumerate(zip(range(-len(size), 0), size)):
        old = x.shape[axis]
        if align_corners:
            at = jnp.arange(out) * ((old - 1) / max(out - 1, 1))
        else:
            step = 1 / scales[n] if scales and scales[n] else old / out
            at = jnp.maximum((jnp.arange(out) + 0.5) * step - 0.5, 0)
        low = jnp.minimum(jnp.floor(at).astype(jnp.int32), old - 1)
        high = jnp.minimum(low + 1, old - 1)
        shape = [1] * x.ndim
        shape[axis] = out
        part = (at - low).astype(x.dtype).reshape(shape)
        x = jnp.take(x, low, axis=axis) * (1 - part) + jnp.take(x, high, axis=axis) * part
    return x


def interpolate_cubic(x, size, align_corners=False, a=-0.75):
    """[N, C, ...] with each of the last dimensions of another size, by cubic convolution."""
    for axis, out in zip(range(-len(size), 0), size):
        old = x.shape[axis]
        if align_corners:
            at = jnp.arange(out) * ((old - 1) / max(out - 1, 1))
        else:
            at = (jnp.arange(out) + 0.5) * (old / out) - 0.5
        low = jnp.floor(at).astype(jnp.int32)
        shape = [1] * x.ndim
        shape[axis] = out
        y = 0
        for offset in range(-1, 3):
            d = jnp.abs(at - (low + offset))
            near = ((a + 2) * d - (a + 3)) * d * d + 1
            far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
            weight = jnp.where(d <= 1, near, far).astype(x.dtype).reshape(shape)
            y = y + weight * jnp.take(x, jnp.clip(low + offset, 0, old - 1), axis=axis)
        x = y
    return x


def pad(x, pads, mode="constant", value=0.0):
    """Pads the last dimensions; `pads` has before and after of the last, then of the one before it, and so on."""
    widths = [(0, 0)] * (x.ndim - len(pads) // 2) + [(pads[i], pads[i + 1]) for i in range(len(pads) - 2, -1, -2)]
    if mode == "constant":
        return lax.pad(x, jnp.asarray(value, x.dtype), [(*w, 0) for w in widths])
    return jnp.pad(x, widths, mode={"reflect": "reflect", "replicate": "edge", "circular": "wrap"}[mode])


def index_set(x, indices, values, accumulate=False):
    """The tensor with new values at indices, of which None takes all."""
    at = x.at[tuple(slice(None) if i is None else i for i in indices)]
    return at.add(values) if accumulate else at.set(values)


def top_k(x, k, axis=-1):
    """The largest values along an axis, and where they are."""
    values, indices = lax.top_k(jnp.moveaxis(x, axis, -1), k)
    return jnp.moveaxis(values, -1, axis), jnp.moveaxis(indices, -1, axis)


def norm(x, p=2.0, axis=None, keepdims=False):
    """The p-norm over axes."""
    if p == 2:
        return jnp.sqrt(jnp.square(x).sum(axis, keepdims=keepdims))
    return (jnp.abs(x) ** p).sum(axis, keepdims=keepdims) ** (1 / p)


def clip_grad_norm(max_norm):
    """`optax.clip_by_global_norm`, with the 1e-6 that PyTorch adds to the norm."""

    def clip(grads, _):
        scale = jnp.minimum(1.0, max_norm / (optax.global_norm(grads) + 1e-6))
        return jax.tree.map(lambda g: g * scale, grads)

    return optax.stateless(clip)


def scale_by_nadam(b1, b2, eps, momentum_decay):
    """Adam with Nesterov's momentum, whose share grows with the steps (Dozat 2016); `optax.nadam` keeps it constant."""

    def momentum(step):
        return b1 * (1 - 0.5 * 0.96 ** (step * momentum_decay))

    def init(params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        return jnp.zeros((), jnp.int32), jnp.ones(()), zeros, zeros

    def update(grads, state, _=None):
        count, product, mu, nu = state
        count = count + 1
        now, then = momentum(count), momentum(count + 1)
        product = product * now
        mu = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, mu, grads)
        nu = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, nu, grads)
        own, old = (1 - now) / (1 - product), then / (1 - product * then)

        def step(g, m, v):
            return (own * g + old * m) / (jnp.sqrt(v / (1 - b2**count)) + eps)

        return jax.tree.map(step, grads, mu, nu), (count, product, mu, nu)

    return optax.GradientTransformation(init, update)


def smooth_l1(x, y, beta=1.0):
    """Squares where the difference is below `beta`, else its size."""
    d = jnp.abs(x - y)
    return jnp.where(d < beta, 0.5 * d * d / beta, d - 0.5 * beta)


def as_strided_windows(x, axis, size, step):
    """Windows along an axis, as a new last dimension."""
    starts = jnp.arange(0, x.shape[axis] - size + 1, step)
    windows = jnp.take(x, starts[:, None] + jnp.arange(size), axis=axis)
    return jnp.moveaxis(windows, axis % x.ndim + 1, -1)
