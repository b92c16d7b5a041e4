"""`nn.LSTM`, `nn.GRU` and `nn.RNN`: a loop for each direction of a layer, whatever the length of the sequences.

PyTorch composes them of operations for each step. Here a direction of a layer is an operation of our own, `_rnn_layer`
(`recurrent.rs`), and its backward another, with products over all steps before and after them. What a loop cannot do,
derivatives of other kinds, is done step by step (`_unrolled`).

Sequences are (steps, batch, size), or (rows, size) if they are packed (`_packed.py`). States of a layer are
(directions, batch, size). Weights are those of PyTorch's modules, in their order.
"""

import functools
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F

from oxitorch import _after_import
from oxitorch._packed import Rows, Varying, are_numbers_of, in_parts, is_transformed, not_varying

_device = torch._C._get_privateuse1_backend_name()
_ops = torch.ops.oxitorch
# The functions, and how many derivatives a step of each saves.
CELLS = {"lstm": 6, "gru": 5, "rnn_tanh": 1, "rnn_relu": 1}
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
    for cell in CELLS:
        for overload, kernel in (("input", _of_sequences), ("data", _of_packed)):
            op = getattr(getattr(torch.ops.aten, cell), overload)
            for key in ("AutogradPrivateUse1", "PrivateUse1"):
                aten.impl(f"{cell}.{overload}", functools.partial(kernel, op), key)
    _after_import.call({"torch.utils.flop_counter": _count_flops})


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
    rows: Rows | None  # of packed sequences, if layers are loops

    @classmethod
    def of(cls, op, x, batch_sizes, states, params, has_biases, layers, bidirectional) -> "_Net | None":
        """None if they do not fit."""
        kind = _Kind(op._schema.name.removeprefix("aten::"), 1 + bidirectional, has_biases, batch_sizes)
        states = states if kind.cell == "lstm" else [states]
        tensors = [x, *states, *params]
        if batch_sizes is not None:
            _check_batch_sizes(batch_sizes, x)
        if len(states) != 1 + (kind.cell == "lstm") or any(s.dim() != 3 for s in states):
            return None
        if x.dim() != (3 if batch_sizes is None else 2) or any(t.device != x.device for t in tensors):
            return None
        if batch_sizes is None:
            batch, rows = x.shape[1], None
        else:  # while a graph is captured there are no numbers
            known = type(batch_sizes) is torch.Tensor
            batch = int(batch_sizes[0]) if known else states[0].shape[1]
            rows = Rows.of(x, batch_sizes) if known and x.shape[1] and not in_parts(*tensors) else None
            tensors[0] = x if rows is None else rows.whole
        if torch.is_autocast_enabled(_device):
            tensors = [_autocast(t) for t in tensors]
        x, states, params = tensors[0], tensors[1 : 1 + len(states)], tensors[1 + len(states) :]
        hx, cx = states if len(states) == 2 else (*states, None)
        each = 2 + 2 * has_biases + (cx is not None and cx.shape[-1] != hx.shape[-1])
        fit = (
            (x.is_floating_point() or x.is_complex())
            and all(t.dtype == x.dtype for t in tensors)
            and len(params) == layers * kind.directions * each
            and all(s.shape[:2] == (layers * kind.directions, batch) for s in states)
            and x.shape[0] > 0
        )
        return cls(kind, layers, x, hx, cx, params, rows) if fit else None

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
        output = output if self.rows is None else self.rows.cut(output)
        return output, *(s[0] if self.layers == 1 else torch.cat(s) for s in zip(*last, strict=True))

    def _layer(self):
        """A loop, unless somebody asks for what only PyTorch's operations have: forward derivatives, transforms,
        complex numbers, tensors that are several.
        """
        if in_parts(self.x, self.hx, *self.params):
            return functools.partial(_unrolled, self.kind)
        sizes = self.kind.batch_sizes
        if sizes is not None:
            sizes = sizes.to(self.x.device) if self.rows is None else self.rows.batch_sizes
        return functools.partial(_Layer.apply, self.kind, sizes)


def _autocast(t: torch.Tensor) -> torch.Tensor:
    return t.to(torch.get_autocast_dtype(_device)) if t.is_floating_point() and t.dtype != torch.float64 else t


def _check_batch_sizes(batch_sizes: torch.Tensor, data: torch.Tensor) -> None:
    """Raises if these are no numbers of samples for all rows, or grow: PyTorch would read what is not there."""
    if batch_sizes.device.type != "cpu" or batch_sizes.dtype != torch.int64 or batch_sizes.dim() != 1:
        form = f"{batch_sizes.dtype} {tuple(batch_sizes.shape)} on {batch_sizes.device}"
        raise RuntimeError(f"batch_sizes: expected a vector of int64 on the CPU, got {form}")
    if type(batch_sizes) is not torch.Tensor:
        return
    rows = data.shape[0] if data.dim() else 0
    if not are_numbers_of(batch_sizes, rows):
        raise RuntimeError(
            f"batch_sizes: expected numbers of samples that do not grow, {rows} in all, got {batch_sizes.tolist()}\n"
            "hint: torch.nn.utils.rnn.pack_padded_sequence and pack_sequence make them"
        )


class _Layer(torch.autograd.Function):
    """All directions of a layer: the output and the last states."""

    @staticmethod
    def forward(ctx, kind, sizes, x, hx, cx, *params):
        outputs, last_h, last_c, saved = [], [], [], []
        for d, w in enumerate(kind.weights(params)):
            gates, c = F.linear(x, w.ih, w.b_ih), None if cx is None else cx[d]
            output, hy, cy, s = _ops._rnn_layer(kind.cell, gates, sizes, hx[d], c, w.hh, w.b_hh, w.hr, d == 1)
            outputs.append(output)
            last_h.append(hy)
            last_c.append(cy)
            saved.append(s)
        ctx.kind = kind
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(sizes, x, hx, cx, *params, *saved)
        return _joined(outputs, last_h, last_c)

    @staticmethod
    def backward(ctx, *grads):
        kind = ctx.kind
        sizes, x, hx, cx, *params = ctx.saved_tensors
        params, saved = params[: -kind.directions], params[-kind.directions :]
        if all(g is None for g in grads):
            return (None,) * (5 + len(params))
        if torch.is_grad_enabled() or any(g is not None and is_transformed(g) for g in grads):
            return None, None, *_differentiable(kind, [x, hx, cx, *params], grads)
        _, _, of_x, _, _, *of_params = ctx.needs_input_grad
        found = []
        for d, w in enumerate(kind.weights(params)):
            output, hy, cy = grads
            output = None if output is None else output.chunk(kind.directions, -1)[d]
            hy = torch.zeros_like(hx[d]) if hy is None else hy[d]
            cy = None if cy is None else cy[d]
            loop = _ops._rnn_layer_backward(kind.cell, output, hy, cy, saved[d], sizes, w.hh, w.hr, d == 1)
            rows = loop[0].flatten(0, -2)
            weights = (
                _of_weights(w, x, saved[d], rows, loop) if any(of_params) else [None] * (len(params) // kind.directions)
            )
            found.append((rows @ w.ih if of_x else None, loop[1], loop[2], weights))
        xs, hxs, cxs, weights = zip(*found, strict=True)
        grad_x = functools.reduce(torch.add, xs).view(x.shape) if of_x else None
        grad_cx = None if cx is None else torch.stack(cxs)
        return None, None, grad_x, torch.stack(hxs), grad_cx, *(g for of in weights for g in of)


def _of_weights(w, x, saved, rows, loop) -> list[torch.Tensor]:
    """Gradients of the weights of a direction, from those of its gates (`rows`: of all samples of all steps)."""
    hidden, projected = (None if g is None else g.flatten(0, -2) for g in loop[3:])
    hidden = rows if hidden is None else hidden
    saved = saved.flatten(0, -2)[: rows.shape[0]]
    size = w.hh.shape[1]
    # Behind the derivatives: if the output is projected, what it was before; and the states before each step.
    found = [rows.t() @ x.reshape(-1, x.shape[-1]), hidden.t() @ saved[:, -size:]]
    if w.b_ih is not None:
        found += [rows.sum(0), hidden.sum(0)]
    if w.hr is not None:
        found.append(projected.t() @ saved[:, -size - w.hr.shape[1] : -size])
    return found


def _joined(outputs, last_h, last_c):
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
    return output, torch.stack(last_h), None if last_c[0] is None else torch.stack(last_c)


def _differentiable(kind, inputs, grads):
    """Gradients in PyTorch's operations, so that they have gradients: of the layer done step by step."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        # Of views, as one of the inputs may be computed from another.
        views = [None if t is None else t.view_as(t) for t in inputs]
        results = _unrolled(kind, *views)
        wanted = [v for v in views if v is not None and v.requires_grad]
        given, of_given = zip(*((r, g) for r, g in zip(results, grads, strict=True) if g is not None), strict=True)
        found = iter(torch.autograd.grad(given, wanted, of_given, create_graph=again, allow_unused=True))
    return [next(found) if v is not None and v.requires_grad else None for v in views]


def _unrolled(kind, x, hx, cx, *params):
    """What `_Layer` computes, in PyTorch's operations for each step."""
    if Varying.behind(kind.batch_sizes) is not None:
        raise RuntimeError(not_varying("transforms and second derivatives of recurrent nets over packed sequences"))
    outputs, last_h, last_c = [], [], []
    for d, w in enumerate(kind.weights(params)):
        gates = F.linear(x, w.ih, w.b_ih)
        sizes = None if kind.batch_sizes is None else kind.batch_sizes.tolist()
        steps = gates.unbind() if sizes is None else gates[: sum(sizes)].split(sizes)
        h, c, output = hx[d], None if cx is None else cx[d], [None] * len(steps)
        for t in reversed(range(len(steps))) if d else range(len(steps)):
            n = len(steps[t])
            old, old_c = h[:n], None if c is None else c[:n]
            output[t], new_c = _step(kind.cell, steps[t], old, old_c, w)
            h = output[t] if n == len(h) else torch.cat([output[t], h[n:]])
            if c is not None:
                c = new_c if n == len(c) else torch.cat([new_c, c[n:]])
        output = torch.stack(output) if sizes is None else torch.cat(output)
        # Packed sequences may have rows behind those of the samples.
        outputs.append(F.pad(output, (0, 0, 0, len(gates) - len(output))) if len(output) < len(gates) else output)
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
    width = CELLS[cell] * hidden + (0 if w_hr is None else hidden) + hx.shape[-1]
    rows = gates.shape[:-1] if batch_sizes is None else (gates.shape[0] + hx.shape[0],)
    output, saved = gates.new_empty((*gates.shape[:-1], hx.shape[-1])), gates.new_empty((*rows, width))
    return output, torch.empty_like(hx), None if cx is None else torch.empty_like(cx), saved


def _backward_of_meta(cell, grad_output, grad_hy, grad_cy, saved, batch_sizes, w_hh, w_hr, reverse):
    rows = saved.shape[:-1] if batch_sizes is None else (saved.shape[0] - grad_hy.shape[0],)
    gates = saved.new_empty((*rows, w_hh.shape[0]))
    cx = grad_hy.new_empty((grad_hy.shape[0], w_hh.shape[0] // 4)) if cell == "lstm" else None
    hidden = torch.empty_like(gates) if cell == "gru" else None
    projected = None if w_hr is None else saved.new_empty((*rows, grad_hy.shape[-1]))
    return gates, torch.empty_like(grad_hy), cx, hidden, projected


# For `torch.utils.flop_counter`, which counts by the shapes of arguments.


def _count_flops(flop_counter) -> None:
    flop_counter.register_flop_formula(_ops._rnn_layer)(_flops_of_layer)
    flop_counter.register_flop_formula(_ops._rnn_layer_backward)(_flops_of_backward)


def _flops_of_layer(cell, gates, batch_sizes, hx, cx, w_hh, b_hh, w_hr, *args, **kwargs) -> int:
    return 2 * math.prod(gates[:-1]) * (math.prod(w_hh) + (0 if w_hr is None else math.prod(w_hr)))


def _flops_of_backward(cell, output, hy, cy, saved, batch_sizes, w_hh, w_hr, *args, out_shape, **kwargs) -> int:
    return _flops_of_layer(cell, out_shape[0], batch_sizes, hy, cy, w_hh, None, w_hr)
