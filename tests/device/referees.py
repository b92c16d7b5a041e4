"""What the CPU has no kernel for, written out in operations that it has: functions of the same arguments."""

import torch
from torch import sigmoid, tanh


def with_dtype(product):
    """A product of 16-bit numbers with a result of another dtype."""

    def referee(*args, **kwargs):
        tensors = [
            a.to(dtype) for dtype in args if isinstance(dtype, torch.dtype) for a in args if isinstance(a, torch.Tensor)
        ]
        return product(*tensors, **kwargs)

    return referee


def of_float(f):
    """A softmax of bfloat16 with a result in float32."""

    def referee(x, dim, half_to_float):
        return f(x.float() if half_to_float and x.dtype != torch.float64 else x, dim, False)

    return referee


def linear_backward(x, grad, weight, mask):
    return grad @ weight, grad.mT @ x, grad.sum(0)


def rms_norm_backward(grad, x, shape, rstd, weight, mask):
    scaled = grad * weight
    d_x = rstd * (scaled - x * rstd.square() * (scaled * x).mean(-1, keepdim=True))
    return d_x, (grad * x * rstd).sum(0)


def attention_backward(grad, q, k, v, bias, mask, out, logsumexp, *rest, scale=None):
    """As flash attention: from the result and the sums of the softmax."""
    is_causal, scale = rest[5], scale or q.shape[-1] ** -0.5
    scores = q @ k.mT * scale + (0 if bias is None else bias)
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    p = (scores - logsumexp[..., None]).exp()
    d_scores = p * (grad @ v.mT - (grad * out).sum(-1, keepdim=True))
    d_bias = d_scores.sum_to_size(bias.shape) if mask[3] else None
    return d_scores @ k * scale, d_scores.mT @ q * scale, p.mT @ grad, d_bias


def slope(y):
    """Of a sigmoid, from its value."""
    return y * (1 - y)


def lstm_cell(input_gates, hidden_gates, cx, input_bias=None, hidden_bias=None):
    gates = sum(t for t in (input_gates, hidden_gates, input_bias, hidden_bias) if t is not None)
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = sigmoid(i), sigmoid(f), tanh(g), sigmoid(o)
    cy = f * cx + i * g
    return o * tanh(cy), cy, torch.cat([i, f, g, o], 1)


def lstm_cell_backward(grad_hy, grad_cy, cx, cy, workspace, has_bias):
    i, f, g, o = workspace.chunk(4, 1)
    d_c = (0 if grad_cy is None else grad_cy) + grad_hy * o * (1 - tanh(cy) ** 2) if grad_hy is not None else grad_cy
    d_o = torch.zeros_like(o) if grad_hy is None else grad_hy * tanh(cy) * slope(o)
    gates = torch.cat([d_c * g * slope(i), d_c * cx * slope(f), d_c * i * (1 - g**2), d_o], 1)
    return gates, d_c * f, gates.sum(0) if has_bias else None


def gru_cell(input_gates, hidden_gates, hx, input_bias, hidden_bias):
    (ir, iz, new), (hr, hz, hidden_new) = (
        (input_gates + input_bias).chunk(3, 1),
        (hidden_gates + hidden_bias).chunk(3, 1),
    )
    reset, update = sigmoid(ir + hr), sigmoid(iz + hz)
    new = tanh(new + reset * hidden_new)
    return new + update * (hx - new), torch.cat([reset, update, new, hx, hidden_new], 1)


def gru_cell_backward(grad, workspace, has_bias):
    reset, update, new, hx, hidden_new = workspace.chunk(5, 1)
    d_new = grad * (1 - update) * (1 - new**2)
    d_reset, d_update = d_new * hidden_new * slope(reset), grad * (hx - new) * slope(update)
    d_input, d_hidden = torch.cat([d_reset, d_update, d_new], 1), torch.cat([d_reset, d_update, d_new * reset], 1)
    return d_input, d_hidden, grad * update, d_input.sum(0), d_hidden.sum(0)


def rnn_layer(cell, gates, sizes, hx, cx, w_hh, b_hh, w_hr, reverse):
    """PyTorch's function of one layer, with the unit matrix for the weights of the input. What is for the backward is not
    there."""
    n, directions = len(w_hh), 1 + reverse
    zeros = torch.zeros(n, dtype=gates.dtype)
    weights = [torch.eye(n, dtype=gates.dtype), w_hh, zeros, zeros if b_hh is None else b_hh]
    weights = [*weights, *([] if w_hr is None else [w_hr])] * directions
    states = [torch.stack([s] * directions) for s in (hx, cx) if s is not None]
    packed = [] if sizes is None else [sizes]
    rest = [] if packed else [False]
    states = states if cell == "lstm" else states[0]
    y, *last = getattr(torch, cell)(gates, *packed, states, weights, True, 1, 0.0, False, reverse, *rest)
    return y[..., -hx.shape[-1] :].contiguous(), *(s[-1] for s in last), torch.zeros(())


def pack_rows(padded, sizes, rows):
    samples = torch.cat([step[:n] for step, n in zip(padded, sizes.tolist(), strict=False)])
    return torch.cat([samples, padded.new_zeros(rows - len(samples), *padded.shape[2:])])


def pad_rows(rows, sizes, steps, batch, value):
    result = rows.new_full((steps, batch, *rows.shape[1:]), value)
    for step, part in zip(result, rows[: sizes.sum()].split(sizes.tolist()), strict=False):
        step[: len(part)] = part
    return result


def batch_sizes(lengths, steps):
    return (lengths > torch.arange(steps)[:, None]).sum(1)


def packed_rows(rows, sizes):
    result = rows.clone()
    result[sizes.sum() :] = 0
    return result


def rnn_layer_backward(cell, d_output, d_h, d_c, saved, sizes, w_hh, w_hr, reverse):
    """From the derivatives of each step, which lie side by side."""
    n = len(w_hh) // {"lstm": 4, "gru": 3}.get(cell, 1)
    rows = len(d_h)
    steps = saved[:-rows].split(rows) if sizes is not None else saved.unbind()
    d_output = None if d_output is None else d_output.reshape(len(steps), rows, -1)
    found = [None] * len(steps)
    d_c = torch.zeros(()) if d_c is None else d_c
    for t in range(len(steps)) if reverse else reversed(range(len(steps))):
        d = steps[t].split(n, 1)
        d_y = d_h = d_h if d_output is None else d_h + d_output[t]
        d_h = d_h if w_hr is None else d_h @ w_hr
        if cell == "lstm":
            d_c = d_c + d_h * d[0]
            gates = hidden = torch.cat([d_c * d[1], d_c * d[2], d_c * d[3], d_h * d[5]], 1)
            d_c = d_c * d[4]
        elif cell == "gru":
            gates, hidden = (torch.cat([d_h * d[0], d_h * d[1], d_h * d[k]], 1) for k in (2, 3))
        else:
            gates = hidden = d_h * d[0] if cell == "rnn_tanh" else d_h * (d[0] > 0)
        d_h = hidden @ w_hh + (d_h * d[4] if cell == "gru" else 0)
        found[t] = gates, hidden, d_y
    gates, hidden, d_y = ((torch.stack if sizes is None else torch.cat)(x) for x in zip(*found, strict=True))
    besides = [d_c] if cell == "lstm" else [hidden] if cell == "gru" else []
    return gates, d_h, *besides, *([] if w_hr is None else [d_y])


def statistics(x):
    """Of each channel, in what batch norms of several processes have them."""
    x = x.to(torch.promote_types(x.dtype, torch.float32)).transpose(0, 1).flatten(1)
    return x.mean(1), x.var(1, correction=0)


def gathered(x, means, invstds, running_mean, running_var, momentum, eps, counts):
    """From the statistics of parts."""
    counts = counts.to(means.dtype).expand(len(means))[:, None]
    mean = (counts * means).sum(0) / counts.sum()
    squares = (counts * (invstds**-2 - eps + (means - mean) ** 2)).sum(0)
    return mean, (squares / counts.sum() + eps).rsqrt()


def along(v, x):
    """A value per channel."""
    return 1 if v is None else v.view(-1, *[1] * (x.dim() - 2))


def batch_norm_elemt(x, weight, bias, mean, invstd, eps):
    y = (x - along(mean, x)) * along(invstd, x) * along(weight, x)
    return (y if bias is None else y + along(bias, x)).to(x.dtype)


def batch_norm_backward_reduce(grad, x, mean, invstd, weight, *wanted):
    dims = [d for d in range(x.dim()) if d != 1]
    grad = grad.to(mean.dtype)
    sums = grad.sum(dims), (grad * (x - along(mean, x))).sum(dims)
    found = *sums, sums[1] * invstd, sums[0]
    return tuple(t if w else None for t, w in zip(found, (wanted[0], *wanted), strict=True))


def batch_norm_backward_elemt(grad, x, mean, invstd, weight, sum_dy, sum_dy_xmu, count):
    mean_dy, mean_dy_xmu = along(sum_dy / count.sum(), x), along(sum_dy_xmu / count.sum(), x)
    rstd = along(invstd, x)
    y = (grad - mean_dy - (x - along(mean, x)) * rstd**2 * mean_dy_xmu) * rstd * along(weight, x)
    return y.to(x.dtype)


REFEREES = {
    "batch_norm_stats": lambda x, eps: (statistics(x)[0], (statistics(x)[1] + eps).rsqrt()),
    "batch_norm_gather_stats": lambda *args: gathered(*args[:-1], torch.tensor([args[-1]])),
    "batch_norm_gather_stats_with_counts": gathered,
    "batch_norm_elemt": batch_norm_elemt,
    "batch_norm_backward_reduce": batch_norm_backward_reduce,
    "batch_norm_backward_elemt": batch_norm_backward_elemt,
    "mm.dtype": with_dtype(torch.mm),
    "bmm.dtype": with_dtype(torch.bmm),
    "addmm.dtype": with_dtype(torch.addmm),
    "baddbmm.dtype": with_dtype(torch.baddbmm),
    "_softmax": of_float(torch._softmax),
    "_log_softmax": of_float(torch._log_softmax),
    "_masked_scale": lambda x, mask, scale: x * mask * scale,
    "linear_backward": linear_backward,
    "_fused_rms_norm_backward": rms_norm_backward,
    "convolution_overrideable": torch.ops.aten.convolution,
    "convolution_backward_overrideable": lambda grad, x, weight, *rest: torch.ops.aten.convolution_backward(
        grad, x, weight, [weight.shape[0]], *rest
    ),
    "_scaled_dot_product_fused_attention_overrideable_backward": attention_backward,
    "histc": lambda x, *rest: torch.histc(x.double(), *rest).to(x.dtype),
    "_thnn_fused_lstm_cell": lstm_cell,
    "_thnn_fused_lstm_cell_backward_impl": lstm_cell_backward,
    "_thnn_fused_gru_cell": gru_cell,
    "_thnn_fused_gru_cell_backward": gru_cell_backward,
    "oxitorch::_rnn_layer": rnn_layer,
    "oxitorch::_pack_rows": pack_rows,
    "oxitorch::_pad_rows": pad_rows,
    "oxitorch::_packed_rows": packed_rows,
    "oxitorch::_batch_sizes": batch_sizes,
    "oxitorch::_full_length": torch.clone,
    "oxitorch::_rnn_layer_backward": rnn_layer_backward,
}
