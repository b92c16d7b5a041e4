"""`nn.LSTM`, `nn.GRU` and `nn.RNN`: a loop for each direction of a layer, whatever the length of the sequences.

PyTorch composes them of operations for each step. Here a direction of a layer is an operation of our own, `_rnn_layer`
(`recurrent.rs`), and its backward another, with products over all steps before and after them. What a loop cannot do,
derivatives of other kinds, is done step by step (`_unrolled`).

Sequences are (steps, batch, size), or (rows, size) if they are packed. States of a layer are (directions, batch, size).
Weights are those of PyTorch's modules, in their order.
"""

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F

_device = torch._C._get_privateuse1_backend_name()
_ops = torch.ops.oxitorch
# Of each cell, how many derivatives a step saves.
_DERIVATIVES = {"lstm": 6, "gru": 5, "rnn_tanh": 1, "rnn_relu": 1}
_libraries: list[torch.library.Library] = []


def install() -> None:
    """Defines the operations, and takes PyTorch's functions of sequences for tensors of the device."""
    own, aten = torch.library.Library("oxitorch", "FRAGMENT"), torch.library.Library("aten", "IMPL")
    _libraries.extend([own, aten])
    own.define(
        "_rnn_layer(str cell, Tensor gates, Tensor? batch_sizes, Tensor hx, Tensor? cx, Tensor w_hh, Tensor? b_hh, "
        "Tensor? w_hr, bool reverse) -> (Tensor output, Tensor hy, Tensor cy, Tensor saved)"
    )
    own.define(
        "_rnn_layer_backward(str cell, Tensor? grad_output, Tensor grad_hy, Tensor? grad_cy, Tensor saved, "
        "Tensor? batch_sizes, Tensor w_hh, Tensor? w_hr, bool reverse) -> (Tensor grad_gates, Tensor grad_hx, "
        "Tensor grad_cx, Tensor grad_hidden, Tensor grad_projected)"
    )
    own.impl("_rnn_layer", _layer_of_meta, "Meta")
    own.impl("_rnn_layer_backward", _backward_of_meta, "Meta")
    _ops._bind("oxitorch")
    for cell in _DERIVATIVES:
        for overload, kernel in (("input", _of_sequences), ("data", _of_packed)):
            op = getattr(getattr(torch.ops.aten, cell), overload)
            for key in ("AutogradPrivateUse1", "PrivateUse1"):
                aten.impl(f"{cell}.{overload}", functools.partial(kernel, op), key)


def _of_sequences(op, x, states, params, has_biases, layers, dropout, train, bidirectional, batch_first):
    steps_first = x.transpose(0, 1) if batch_first and x.dim() == 3 else x
    net = _Net.of(op, steps_first, None, states, params, has_biases, layers, bidirectional)
    if net is None:
        return _composed(op, x, states, params, has_biases, layers, dropout, train, bidirectional, batch_first)
    output, *states = net.run(dropout if train else 0.0)
    return output.transpose(0, 1) if batch_first else output, *states


def _of_packed(op, data, batch_sizes, states, params, has_biases, layers, dropout, train, bidirectional):
    net = _Net.of(op, data, batch_sizes, states, params, has_biases, layers, bidirectional)
    if net is None:
        return _composed(op, data, batch_sizes, states, params, has_biases, layers, dropout, train, bidirectional)
    return net.run(dropout if train else 0.0)


def _composed(op, *args):
    """PyTorch's own way, and with it PyTorch's words for what is wrong."""
    return op._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args)


class _Weights(NamedTuple):
    """Of a direction of a layer."""

    ih: torch.Tensor  # (gates, input size)
    hh: torch.Tensor  # (gates, output size)
    b_ih: torch.Tensor | None  # (gates,)
    b_hh: torch.Tensor | None  # (gates,)
    hr: torch.Tensor | None  # (output size, hidden size): projects the output


class _Kind(NamedTuple):
    """What layers have in common."""

    cell: str
    directions: int
    has_biases: bool
    batch_sizes: torch.Tensor | None  # (steps,), on the host, if sequences are packed

    def weights(self, params) -> list[_Weights]:
        """Of each direction of a layer."""
        found, each = [], len(params) // self.directions
        for start in range(0, len(params), each):
            ih, hh, *rest = params[start : start + each]
            b_ih, b_hh = rest[:2] if self.has_biases else (None, None)
            found.append(_Weights(ih, hh, b_ih, b_hh, rest[-1] if len(rest) % 2 else None))
        return found


class _Net(NamedTuple):
    """A call of one of the functions, with tensors that fit each other."""

    kind: _Kind
    layers: int
    x: torch.Tensor
    hx: torch.Tensor
    cx: torch.Tensor | None
    params: list[torch.Tensor]

    @classmethod
    def of(cls, op, x, batch_sizes, states, params, has_biases, layers, bidirectional) -> "_Net | None":
        """None if they do not fit."""
        kind = _Kind(op._schema.name.removeprefix("aten::"), 1 + bidirectional, has_biases, batch_sizes)
        states = states if kind.cell == "lstm" else [states]
        tensors = [x, *states, *params]
        if len(states) != 1 + (kind.cell == "lstm") or any(t.device != x.device for t in tensors):
            return None
        if torch.is_autocast_enabled(_device):
            tensors = [_autocast(t) for t in tensors]
        x, states, params = tensors[0], tensors[1 : 1 + len(states)], tensors[1 + len(states) :]
        hx, cx = states if len(states) == 2 else (*states, None)
        each = 2 + 2 * has_biases + (cx is not None and cx.shape[-1] != hx.shape[-1])
        fit = (
            (x.is_floating_point() or x.is_complex())
            and all(t.dtype == x.dtype for t in tensors)
            and len(params) == layers * kind.directions * each
            and all(s.dim() == 3 and s.shape[:2] == (layers * kind.directions, hx.shape[1]) for s in states)
        )
        if batch_sizes is None:
            fit = fit and x.dim() == 3 and x.shape[0] > 0 and x.shape[1] == hx.shape[1]
        else:
            fit = fit and x.dim() == 2 and _are_of(batch_sizes, x.shape[0], hx.shape[1])
        return cls(kind, layers, x, hx, cx, params) if fit else None

    def run(self, dropout: float) -> tuple[torch.Tensor, ...]:
        """The output of the last layer, and the last states of all."""
        layer = self._layer()
        each = len(self.params) // self.layers
        output, last = self.x, []
        for i in range(self.layers):
            own = slice(i * self.kind.directions, (i + 1) * self.kind.directions)
            hx, cx = self.hx[own], None if self.cx is None else self.cx[own]
            output, hy, cy = layer(output, hx, cx, *self.params[i * each : (i + 1) * each])
            last.append([hy] if cy is None else [hy, cy])
            if dropout and i < self.layers - 1:
                output = torch.dropout(output, dropout, True)
        return output, *(s[0] if self.layers == 1 else torch.cat(s) for s in zip(*last, strict=True))

    def _layer(self):
        """A loop, unless somebody asks for what only PyTorch's operations have: forward derivatives, transforms,
        complex numbers, tensors that are several.
        """
        unrolled = (
            self.x.is_complex()
            or torch._C._are_functorch_transforms_active()
            or torch.autograd.forward_ad._current_level >= 0
            or any(hasattr(t, "__tensor_flatten__") for t in (self.x, self.hx, *self.params))
        )
        if unrolled:
            return functools.partial(_unrolled, self.kind)
        sizes = self.kind.batch_sizes
        return functools.partial(_Layer.apply, self.kind, None if sizes is None else sizes.to(self.x.device))


def _autocast(t: torch.Tensor) -> torch.Tensor:
    return t.to(torch.get_autocast_dtype(_device)) if t.is_floating_point() and t.dtype != torch.float64 else t


def _are_of(batch_sizes, rows: int, batch: int) -> bool:
    """Whether these are numbers of samples that begin with all and never grow. While a graph is captured there are no
    numbers."""
    if batch_sizes.device.type != "cpu":
        raise RuntimeError(f"batch_sizes should be on the CPU, got a tensor on {batch_sizes.device}")
    if type(batch_sizes) is not torch.Tensor:
        return True
    if batch_sizes.dtype != torch.int64 or batch_sizes.dim() != 1 or len(batch_sizes) == 0:
        return False
    sizes = batch_sizes.tolist()
    return sizes[0] == batch and sizes[-1] > 0 and sum(sizes) == rows and sizes == sorted(sizes, reverse=True)


class _Layer(torch.autograd.Function):
    """All directions of a layer: the output and the last states."""

    @staticmethod
    def forward(ctx, kind, sizes, x, hx, cx, *params):
        outputs, last_h, last_c, saved = [], [], [], []
        for d, w in enumerate(kind.weights(params)):
            gates = F.linear(x, w.ih, w.b_ih)
            c = None if cx is None else cx[d]
            output, hy, cy, s = _ops._rnn_layer(kind.cell, gates, sizes, hx[d], c, w.hh, w.b_hh, w.hr, d == 1)
            outputs.append(output), last_h.append(hy), last_c.append(cy), saved.append(s)
        ctx.kind = kind
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(sizes, x, hx, cx, *params, *saved)
        return _joined(outputs, last_h, last_c)

    @staticmethod
    def backward(ctx, grad_output, grad_hy, grad_cy):
        kind, grads = ctx.kind, (grad_output, grad_hy, grad_cy)
        sizes, x, hx, cx, *params = ctx.saved_tensors
        params, saved = params[: -kind.directions], params[-kind.directions :]
        inputs = [x, hx, cx, *params]
        if all(g is None for g in grads):
            return (None,) * (2 + len(inputs))
        if torch.is_grad_enabled():
            return None, None, *_differentiable(kind, inputs, grads)
        grad_x, grad_hx, grad_cx, grad_params = None, [], [], []
        for d, w in enumerate(kind.weights(params)):
            of_direction = [g if g is None or kind.directions == 1 else g.chunk(2, -1)[d] for g in (grad_output,)]
            of_hy = torch.zeros_like(hx[d]) if grad_hy is None else grad_hy[d]
            of_cy = None if grad_cy is None else grad_cy[d]
            gates, of_hx, of_cx, hidden, projected = _ops._rnn_layer_backward(
                kind.cell, *of_direction, of_hy, of_cy, saved[d], sizes, w.hh, w.hr, d == 1
            )
            grad_hx.append(of_hx), grad_cx.append(of_cx)
            rows = gates.flatten(0, -2)
            hidden = rows if hidden is None else hidden.flatten(0, -2)
            # Behind the derivatives: if the output is projected, what it was before; and the states before each step.
            before = saved[d].flatten(0, -2)[: len(rows), -w.hh.shape[1] :]
            grad_params += [rows.t() @ x.reshape(-1, x.shape[-1]), hidden.t() @ before]
            if kind.has_biases:
                grad_params += [rows.sum(0), hidden.sum(0)]
            if w.hr is not None:
                raw = saved[d].flatten(0, -2)[: len(rows), -sum(w.hr.shape) : -w.hh.shape[1]]
                grad_params.append(projected.flatten(0, -2).t() @ raw)
            of_x = rows @ w.ih
            grad_x = of_x if grad_x is None else grad_x + of_x
        grad_cx = None if cx is None else torch.stack(grad_cx)
        return None, None, grad_x.view(x.shape), torch.stack(grad_hx), grad_cx, *grad_params


def _joined(outputs, last_h, last_c):
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
    return output, torch.stack(last_h), None if last_c[0] is None else torch.stack(last_c)


def _differentiable(kind, inputs, grads):
    """Gradients that have gradients: of the layer done step by step."""
    # Of views, as one of the inputs may be computed from another.
    views = [None if t is None else t.view_as(t) for t in inputs]
    results = _unrolled(kind, *views)
    wanted = [v for v in views if v is not None and v.requires_grad]
    given = [(r, g) for r, g in zip(results, grads, strict=True) if g is not None]
    found = iter(torch.autograd.grad(*zip(*given, strict=True), create_graph=True, allow_unused=True, inputs=wanted))
    return [next(found) if v is not None and v.requires_grad else None for v in views]


def _unrolled(kind, x, hx, cx, *params):
    """What `_Layer` computes, in PyTorch's operations for each step."""
    outputs, last_h, last_c = [], [], []
    for d, w in enumerate(kind.weights(params)):
        gates = F.linear(x, w.ih, w.b_ih)
        packed = kind.batch_sizes is not None
        steps = gates.split(kind.batch_sizes.tolist()) if packed else gates.unbind()
        h, c, output = hx[d], None if cx is None else cx[d], [None] * len(steps)
        for t in reversed(range(len(steps))) if d else range(len(steps)):
            n = len(steps[t])
            old, old_c = h[:n], None if c is None else c[:n]
            output[t], new_c = _step(kind.cell, steps[t], old, old_c, w)
            h = output[t] if n == len(h) else torch.cat([output[t], h[n:]])
            if c is not None:
                c = new_c if n == len(c) else torch.cat([new_c, c[n:]])
        outputs.append(torch.cat(output) if packed else torch.stack(output))
        last_h.append(h), last_c.append(c)
    return _joined(outputs, last_h, last_c)


def _step(cell, gates, h, c, w):
    hidden = F.linear(h, w.hh, w.b_hh)
    if cell == "lstm":
        i, f, g, o = (gates + hidden).chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        return h if w.hr is None else F.linear(h, w.hr), c
    if cell == "gru":
        (reset, update, new), (of_reset, of_update, of_new) = gates.chunk(3, -1), hidden.chunk(3, -1)
        new = (new + (reset + of_reset).sigmoid() * of_new).tanh()
        return new + (update + of_update).sigmoid() * (h - new), None
    return (gates + hidden).tanh() if cell == "rnn_tanh" else (gates + hidden).relu(), None


# What the operations give, as shapes and dtypes.


def _layer_of_meta(cell, gates, batch_sizes, hx, cx, w_hh, b_hh, w_hr, reverse):
    hidden = w_hh.shape[0] if cx is None else cx.shape[-1]
    if cell == "gru":
        hidden = hidden // 3
    width = _DERIVATIVES[cell] * hidden + (0 if w_hr is None else hidden) + hx.shape[-1]
    rows = gates.shape[:-1] if batch_sizes is None else (gates.shape[0] + hx.shape[0],)
    output, saved = gates.new_empty((*gates.shape[:-1], hx.shape[-1])), gates.new_empty((*rows, width))
    return output, torch.empty_like(hx), None if cx is None else torch.empty_like(cx), saved


def _backward_of_meta(cell, grad_output, grad_hy, grad_cy, saved, batch_sizes, w_hh, w_hr, reverse):
    rows = saved.shape[:-1] if batch_sizes is None else (saved.shape[0] - grad_hy.shape[0],)
    gates = saved.new_empty((*rows, w_hh.shape[0]))
    cx = grad_hy.new_empty((len(grad_hy), w_hh.shape[0] // 4)) if cell == "lstm" else None
    hidden = torch.empty_like(gates) if cell == "gru" else None
    projected = None if w_hr is None else saved.new_empty((*rows, grad_hy.shape[-1]))
    return gates, torch.empty_like(grad_hy), cx, hidden, projected
