"""`torch.tpu.scan_layers`: layers of one structure, called one after another by one loop over their stacked weights.

The weights are stacked in the program, so that parameters stay what they are. The body of the forward's loop is one
layer, run once while the engine records it (`_loops.py`); that of the backward is the layer's backward, which autograd
runs once. What the backward needs of each layer comes out of the forward's loop stacked, as a policy says: all that
autograd saves, or the input alone, or the results of some operations too, and then the backward's body begins with the
layer again. Random numbers of layer `i` are those that it takes if layers are called one by one; a backward takes the
forward's again.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._higher_order_ops.scan import ScanAutogradImpl
from torch._higher_order_ops.utils import materialize_as_graph
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

from oxitorch import _activate, _loops, _running

_ATEN = torch.ops.aten
_PRODUCTS = (
    _ATEN.mm, _ATEN.addmm, _ATEN.bmm, _ATEN.baddbmm, _ATEN.convolution, _ATEN.convolution_overrideable,
    _ATEN._scaled_dot_product_flash_attention, _ATEN._scaled_dot_product_efficient_attention,
    _ATEN._scaled_dot_product_fused_attention_overrideable,
)  # fmt: skip

# PyTorch 2.11 refuses graphs of its own scan where gradients are inputs that were saved.
_SCAN_IN_GRAPHS = hasattr(ScanAutogradImpl, "_break_bw_input_output_aliasing")


class ScannedLayers(torch.nn.Sequential):
    """Layers of one structure in a loop; `torch.tpu.scan_layers` makes it.

    It holds the layers as an `nn.Sequential` does: by their names, to be indexed and iterated over.
    """

    def __init__(self, layers: torch.nn.Module, remat: Any):
        super().__init__()
        for name, layer in layers.named_children():
            self.add_module(name, layer)
        if not len(self):
            raise ValueError("scan_layers() needs at least one layer")
        self._saves = _policy(remat)
        self._traced = self._saves and _with_remat(self)
        self.remat = remat if isinstance(remat, str) else "policy"
        _check(list(self.named_children()))

    def __getstate__(self):
        return {name: value for name, value in self.__dict__.items() if name != "_traced"}

    def __setstate__(self, state):
        super().__setstate__(state)
        self._traced = self._saves and _with_remat(self)

    def forward(self, x: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        """Calls each layer with the result of the one before, and with these other arguments, which are the same."""
        if torch.compiler.is_compiling() and not _is_traced():
            return (_in_graph if _SCAN_IN_GRAPHS else ScannedLayers._one_by_one)(self, x, args, kwargs)
        if len(self) == 1 or x.device.type == "cpu" or _is_transformed(x):
            return self._one_by_one(x, args, kwargs)
        try:
            return _Call(self, args, kwargs).run(x)
        except _loops.Played as why:
            _activate.core().note_played("scan_layers", str(why))
            return self._one_by_one(x, args, kwargs)

    def _one_by_one(self, x, args, kwargs):
        for layer in self:
            x = layer(x, *args, **kwargs)
        return x

    def extra_repr(self) -> str:
        return f"remat={self.remat!r}"


def scan_layers(layers: torch.nn.Module, *, remat: Any = "none") -> ScannedLayers:
    """See `torch.tpu.scan_layers`."""
    if not isinstance(layers, (torch.nn.ModuleList, torch.nn.Sequential)):
        raise TypeError(f"scan_layers() takes an nn.ModuleList or nn.Sequential, got {type(layers).__name__}")
    return ScannedLayers(layers, remat)


def _policy(remat: Any) -> Callable | None:
    """Which results of operations the backward finds, besides the input of each layer; None: all that it needs."""
    if remat == "none":
        return None
    if remat == "full":
        return lambda op, *args, **kwargs: False
    if remat == "dots":
        return lambda op, *args, **kwargs: op.overloadpacket in _PRODUCTS
    if isinstance(remat, (list, tuple, set)):
        ops = set(remat)
        return lambda op, *args, **kwargs: op in ops or op.overloadpacket in ops
    if callable(remat):
        wanted = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
        return lambda op, *args, **kwargs: remat(None, op, *args, **kwargs) in wanted
    raise ValueError(f"remat: expected 'none', 'full', 'dots', a list of operations or a policy, got {remat!r}")


def _check(layers: list[tuple[str, torch.nn.Module]]) -> None:
    """Raises if layers differ in more than the values of their parameters and buffers."""

    def structure(layer):
        modules = [(name, type(m), m.training) for name, m in layer.named_modules()]
        tensors = [
            (name, tuple(t.shape), t.dtype, t.device, t.requires_grad) for name, t in _tensors(layer, duplicates=True)
        ]
        return modules, tensors

    first, *rest = layers
    wanted = structure(first[1])
    for name, layer in rest:
        for own, other in zip(structure(layer), wanted, strict=True):
            if own == other:
                continue
            differs = next((pair for pair in zip(own, other, strict=False) if pair[0] != pair[1]), None)
            what = f"{differs[0]} and {differs[1]}" if differs else f"{len(own)} and {len(other)} entries"
            raise ValueError(
                f"scan_layers() needs layers of one structure; layers {name} and {first[0]} differ: {what}"
            )


def _tensors(layer: torch.nn.Module, duplicates: bool = False) -> list[tuple[str, torch.Tensor]]:
    keep = {"remove_duplicate": not duplicates}
    return [*layer.named_parameters(**keep), *layer.named_buffers(**keep)]


def _is_traced() -> bool:
    """Whether a function of `torch.tpu.jit` is run, which says so to PyTorch as compilers do."""
    return _running.tracer() is not None


def _is_transformed(x: torch.Tensor) -> bool:
    transforms = torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0
    return transforms or type(x) not in (torch.Tensor, torch.nn.Parameter)


def _in_graph(layers: ScannedLayers, x, args, kwargs):
    """While Dynamo captures a graph: PyTorch's own scan, whose backward is its autograd's, or two of them."""
    first = layers[0]
    names = [name for name, _ in _tensors(first)]
    stacks = [
        torch.stack(
            [layer.get_parameter(n) if n in dict(layer.named_parameters()) else layer.get_buffer(n) for layer in layers]
        )
        for n in names
    ]
    if layers._saves is not None:
        return layers._traced(x, args, kwargs, stacks)

    def step(x, weights):
        call = functools.partial(torch.func.functional_call, first)
        y = call(dict(zip(names, weights, strict=True)), (x, *args), kwargs)
        return y, ()

    return torch._higher_order_ops.scan(step, x, stacks)[0]


def _with_remat(layers: ScannedLayers) -> Callable:
    """The loop in a graph that AOTAutograd traces, where the backward computes layers again."""
    known = weakref.ref(layers)

    @torch._dynamo.allow_in_graph
    def traced(x, args, kwargs, stacks):
        call = _Call(known(), args, kwargs)
        try:
            return _TracedLoop.apply(call, x, *call.others, *stacks)
        except _loops.Played:  # layers draw random numbers: PyTorch's scan keeps what the backward needs of them

            def step(x, *tensors):
                weights, others = tensors[: len(stacks)], tensors[len(stacks) :]
                return (call.layer(x, others, weights),)

            return torch.ops.higher_order.scan(step, [x], stacks, tuple(call.others))[0]

    return traced


class _Call:
    """A call of all layers, and what its backward has to know of it."""

    def __init__(self, layers: ScannedLayers, args: tuple, kwargs: dict):
        self.layers = list(layers)
        self.saves = layers._saves
        self._leaves, self._tree = pytree.tree_flatten((args, kwargs))
        self.others = [t for t in self._leaves if isinstance(t, torch.Tensor)]
        own = [_tensors(layer) for layer in self.layers]
        self.names = [name for name, _ in own[0]]
        self._own = [[t for _, t in tensors] for tensors in own]
        # For the backward, if it takes all that autograd saved of a layer.
        self.graph: _Graph | None = None

    def run(self, x: torch.Tensor) -> torch.Tensor:
        stacks = [torch.stack(same) for same in zip(*self._own, strict=True)]
        return _Loop.apply(self, x, *self.others, *stacks)

    def split(self, tensors: Sequence[torch.Tensor]) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """The other arguments, and the weights."""
        return tensors[: len(self.others)], tensors[len(self.others) :]

    def layer(self, x, others, weights) -> torch.Tensor:
        """One layer, with these weights."""
        rest = iter(others)
        leaves = [next(rest) if isinstance(t, torch.Tensor) else t for t in self._leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self._tree)
        versions = [w._version for w in weights]
        y = torch.func.functional_call(self.layers[0], dict(zip(self.names, weights, strict=True)), (x, *args), kwargs)
        if not isinstance(y, torch.Tensor) or (y.shape, y.dtype) != (x.shape, x.dtype):
            got = f"{y.dtype}{list(y.shape)}" if isinstance(y, torch.Tensor) else type(y).__name__
            raise _loops.Played(f"a result like the input, {x.dtype}{list(x.shape)}, and it is {got}")
        written = [name for name, w, v in zip(self.names, weights, versions, strict=True) if w._version != v]
        if written:
            raise _loops.Played(f"to write to {written[0]}")
        return y

    def one_by_one(self, x, others, stacks) -> torch.Tensor:
        for weights in zip(*(s.unbind() for s in stacks), strict=True):
            x = self.layer(x, others, weights)
        return x


class _Saved:
    """The tensors that autograd saves of one layer: which they are in the forward, and those that the backward has.

    It knows nothing of the layer's result: the graph of autograd holds it, and nothing finds a circle through that.
    """

    def __init__(self, leaves: Sequence[torch.Tensor]):
        self._leaves = leaves
        self._begins = [t._version for t in leaves]
        # By storage.
        self._places = {_storage(t): i for i, t in reversed(list(enumerate(leaves)))}
        self._known: dict[tuple, int] = {}
        self.tensors: list[torch.Tensor] = []
        # Whether the input is needed besides.
        self.takes_input = False
        # In the backward: these.
        self.tensors_now: Sequence[torch.Tensor] = ()
        self.leaves_now: Sequence[torch.Tensor] = ()

    def pack(self, t: torch.Tensor):
        at = self._places.get(_storage(t))
        layout = (t.size(), t.stride(), t.storage_offset(), t.dtype)
        if t.device.type == "cpu":
            return None, t
        if at is not None and t.dtype == self._leaves[at].dtype and self._leaves[at]._version == self._begins[at]:
            self.takes_input |= at == 0
            return at, layout
        key = (_storage(t), t._version, *layout)
        if key not in self._known:
            self._known[key] = len(self.tensors)
            self.tensors.append(t.detach())
        return -1 - self._known[key], layout

    def unpack(self, packed):
        at, what = packed
        if at is None:
            return what
        if at < 0:
            return self.tensors_now[-1 - at]
        size, stride, offset, _ = what
        return self.leaves_now[at].detach().as_strided(size, stride, offset)


class _Graph:
    """What autograd knows of one layer: its input, weights and result, and the tensors that it saved."""

    def __init__(self, call: _Call, x, others, weights, needs: Sequence[bool], packs: bool):
        leaves = [x, *others, *weights]
        self.leaves = [
            t.detach().requires_grad_(need and t.is_floating_point()) for t, need in zip(leaves, needs, strict=True)
        ]
        self.saved = _Saved(self.leaves)
        x, *rest = self.leaves
        others, weights = call.split(rest)
        hooks = torch.autograd.graph.saved_tensors_hooks(self.saved.pack, self.saved.unpack)
        with torch.enable_grad(), hooks if packs else contextlib.nullcontext():
            self.result = call.layer(x, others, weights)
        self._expect_own()

    def _expect_own(self) -> None:
        """Raises if a gradient would go to a tensor that the layer finds elsewhere."""
        own = {id(t) for t in self.leaves}
        todo, seen = [self.result.grad_fn], set()
        while todo:
            node = todo.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if hasattr(node, "variable") and id(node.variable) not in own:
                raise _loops.Played("a gradient for a tensor that the layer finds elsewhere than among its arguments")
            todo.extend(n for n, _ in node.next_functions)


def _storage(t: torch.Tensor) -> int:
    return t.untyped_storage()._cdata


class _Loop(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call: _Call, x, *tensors):
        others, stacks = call.split(tensors)
        needs = ctx.needs_input_grad[1:]
        ctx.call = call
        body = functools.partial(_forward, call, (any(needs), *needs[1:]), others)
        shape = _loops.record_body(body, [x, *(s[0] for s in stacks)])
        results = _loops.flow("scan", (len(call.layers), 0, 1, 0), [x, *stacks])
        # What it saves of each layer, and the states of the generators that it used.
        y, *kept = results
        if any(needs):
            ctx.saved = shape.count - 1
            ctx.save_for_backward(x, *tensors, *kept)
        return y

    @staticmethod
    def backward(ctx, grad):
        call, needs = ctx.call, ctx.needs_input_grad[1:]
        x, *rest = ctx.saved_tensors
        tensors, kept = rest[: len(needs) - 1], rest[len(needs) - 1 :]
        others, stacks = call.split(tensors)
        saved, states = kept[: ctx.saved], kept[ctx.saved :]
        again = states if call.saves is not None else []  # else no number is taken again
        if torch.is_grad_enabled():
            if states:
                raise RuntimeError(
                    "scan_layers: layers with random numbers in them have no second derivatives\n"
                    "hint: call the layers one by one"
                )
            return None, *_differentiable(call, x, others, stacks, needs, grad)
        of_others, of_stacks = call.split(needs[1:])
        sums = [torch.zeros_like(t) for t, need in zip(others, of_others, strict=True) if need]
        body = functools.partial(_backward, call, (True, *needs[1:]), others, len(sums), len(saved))
        numbers = (len(call.layers), 1, 1 + len(sums), len(again))
        try:
            _loops.record_body(body, [grad, *sums, *(s[0] for s in (*saved, *stacks))])
            of_x, *found = _loops.flow("scan", numbers, [grad, *sums, *saved, *stacks, *again])
        except _loops.Played as why:
            raise RuntimeError(
                f"scan_layers: the backward of a layer cannot be the body of a loop; it needs {why}\n"
                "hint: what an autograd.Function keeps has to go through ctx.save_for_backward(); "
                'or take remat="full"'
            ) from why
        found = iter(found)
        grads = [next(found) if need else None for need in (*of_others, *of_stacks)]
        return None, of_x if needs[0] else None, *grads


class _TracedLoop(torch.autograd.Function):
    """`_Loop` as two of PyTorch's scans, where a policy says what is kept."""

    @staticmethod
    def forward(ctx, call: _Call, x, *tensors):
        others, stacks = call.split(tensors)
        needs = ctx.needs_input_grad[1:]
        ctx.call, ctx.keys = call, _loops.dispatch_keys()

        def body(x, *rest):
            weights, others = rest[: len(stacks)], rest[len(stacks) :]
            with _loops.NothingDrawn():
                return [t.clone() for t in _forward(call, (any(needs), *needs[1:]), others, x, *weights)]

        y, *kept = _scan(body, [x], stacks, others, ctx.keys)
        ctx.save_for_backward(*tensors, *kept)
        return y

    @staticmethod
    def backward(ctx, grad):
        call, needs = ctx.call, ctx.needs_input_grad[1:]
        tensors, kept = ctx.saved_tensors[: len(needs) - 1], ctx.saved_tensors[len(needs) - 1 :]
        others, stacks = call.split(tensors)
        of_others, of_stacks = call.split(needs[1:])
        sums = [torch.zeros_like(t) for t, need in zip(others, of_others, strict=True) if need]
        counts = len(sums), len(kept)

        def body(grad, *rest):
            rest, others = rest[: len(rest) - len(of_others)], rest[len(rest) - len(of_others) :]
            return [t.clone() for t in _backward(call, (True, *needs[1:]), others, *counts, grad, *rest)]

        slices = [t.flip(0) for t in (*kept, *stacks)]
        of_x, *found = _scan(body, [grad.contiguous(), *sums], slices, others, ctx.keys)
        found = iter([*found[: len(sums)], *(t.flip(0) for t in found[len(sums) :])])
        grads = [next(found) if need else None for need in (*of_others, *of_stacks)]
        return None, of_x if needs[0] else None, *grads


def _scan(body: Callable, init, slices, others, keys) -> Sequence[torch.Tensor]:
    """A scan of which nothing is differentiated from outside, though its body may do so itself."""
    first = [s[0].clone() for s in slices]
    graph = materialize_as_graph(body, (*init, *first, *others), *keys, force_enable_grad=True)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.higher_order.scan(graph, list(init), list(slices), tuple(others))


def _forward(call: _Call, needs: Sequence[bool], others, x, *weights):
    """The body of the forward's loop: the result of a layer, and what the backward has of it."""
    if not any(needs):
        return [call.layer(x, others, weights)]
    if call.saves is None:
        call.graph = graph = _Graph(call, x, others, weights, needs, True)
        return [graph.result.detach(), *([x] if graph.saved.takes_input else []), *graph.saved.tensors]
    with _Keep(call.saves) as keep:
        graph = _Graph(call, x, others, weights, needs, False)
    return [graph.result.detach(), x, *keep.kept]


def _backward(call: _Call, needs: Sequence[bool], others, n_sums: int, n_saved: int, grad, *rest):
    """The body of the backward's loop."""
    sums, saved, weights = rest[:n_sums], rest[n_sums : n_sums + n_saved], rest[n_sums + n_saved :]
    if call.saves is None:
        graph = call.graph
        takes_input = graph.saved.takes_input
        x, graph.saved.tensors_now = (saved[0], saved[1:]) if takes_input else (None, saved)
        graph.saved.leaves_now = [x, *others, *weights]
    else:
        x, *saved = saved
        with _Give(call.saves, saved):
            graph = _Graph(call, x, others, weights, needs, False)
    wanted = [t for t in graph.leaves if t.requires_grad]
    # In this thread, which is the one that records.
    with torch.autograd.set_multithreading_enabled(False):
        found = torch.autograd.grad(graph.result, wanted, grad, allow_unused=True, retain_graph=True)
    found = [torch.zeros_like(t) if g is None else g for t, g in zip(wanted, found, strict=True)]
    graph.saved.tensors_now = graph.saved.leaves_now = ()
    of_x, of_others, of_weights = found[0], found[1 : 1 + n_sums], found[1 + n_sums :]
    return [of_x, *(a + b for a, b in zip(sums, of_others, strict=True)), *of_weights]


def _differentiable(call: _Call, x, others, stacks, needs, grad) -> list:
    """Gradients that have gradients: of the layers called one by one."""
    tensors = [t.view_as(t) for t in (x, *others, *stacks)]
    y = call.one_by_one(tensors[0], *call.split(tensors[1:]))
    wanted = [t for t, need in zip(tensors, needs, strict=True) if need]
    found = iter(torch.autograd.grad(y, wanted, grad, create_graph=True, allow_unused=True))
    return [next(found) if need else None for need in needs]


class _Keep(TorchDispatchMode):
    """Keeps the results of the operations that a policy names."""

    def __init__(self, saves: Callable):
        super().__init__()
        self._saves = saves
        self.kept: list[torch.Tensor] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        if self._saves(func, *args, **(kwargs or {})):
            self.kept += [t.detach() for t in pytree.tree_leaves(results) if isinstance(t, torch.Tensor)]
        return results


class _Give(TorchDispatchMode):
    """Gives what was kept in place of the results of these operations."""

    def __init__(self, saves: Callable, kept: Sequence[torch.Tensor]):
        super().__init__()
        self._saves = saves
        self._kept = iter(kept)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        if not self._saves(func, *args, **(kwargs or {})):
            return results
        # The program leaves out what nobody takes, here what the operation computes.
        return pytree.tree_map_only(torch.Tensor, lambda _: next(self._kept).detach(), results)
