"""Gradients of PyTorch's `while_loop`: two loops of one program, however often it goes round.

A backward needs what each round was given, and how often the loop goes round only the device knows. So the forward
keeps that of the last rounds, and that of each round in so many (`_rows`); the backward goes from round to round, and
where it comes to rounds of which nothing was kept, it computes them again from the one before them that was.
PyTorch's own gradients are not taken: in 2.15 they are those of one round where there was none, leave out what goes
through values that need no gradient before the loop, and are not differentiable.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._higher_order_ops.utils import materialize_as_graph
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from oxitorch import _activate, _loops

_OP = torch.ops.higher_order.while_loop
# Rounds between two that are kept, and bytes that what is kept may take.
_MOST_ROWS, _FEWEST_ROWS, _BYTES = 64, 8, 2**26


def install() -> None:
    _OP.py_impl(torch._C.DispatchKey.AutogradPrivateUse1)(_while_loop)


def _while_loop(cond_fn, body_fn, carried, additional, **kwargs):
    tensors = [t for t in (*carried, *additional) if isinstance(t, torch.Tensor)]
    if not torch.is_grad_enabled() or not any(t.requires_grad for t in tensors):
        with torch._C._AutoDispatchBelowAutograd():
            return _OP(cond_fn, body_fn, carried, additional, **kwargs)
    if kwargs.get("mutated_arg_indices"):
        raise RuntimeError("while_loop: a loop that writes to tensors around it has no gradients")
    if any(isinstance(t, FakeTensor) for t in tensors):
        # Dynamo asks what the results are like.
        return _OP.py_kernels[torch._C.DispatchKey.Autograd](cond_fn, body_fn, carried, additional)
    call = _Call(cond_fn, body_fn, len(carried), any(isinstance(t, FunctionalTensor) for t in tensors))
    try:
        if not all(isinstance(t, torch.Tensor) for t in carried):
            raise _loops.Played("tensors alone that are carried from round to round, where gradients are needed")
        return _Loop.apply(call, *carried, *additional)
    except _loops.Played as why:
        if call.traced:
            raise RuntimeError(
                f"while_loop: no gradients in a compiled function; its body needs {why}\n"
                "hint: leave the loop out of it (torch.compiler.disable)"
            ) from None
        _activate.core().note_played("while_loop", str(why))
    return call.one_by_one(carried, additional)


class _Call:
    """A loop: its condition and its body, and whether it is traced for a graph."""

    def __init__(self, cond_fn: Callable, body_fn: Callable, n_carried: int, traced: bool):
        self.goes_on, self.body = cond_fn, body_fn
        self.n_carried, self.traced = n_carried, traced
        self.keys = _loops.dispatch_keys()

    def step(self, *args) -> list[torch.Tensor]:
        return list(_loops.function_of(self.body)(*args))

    def one_by_one(self, carried, additional) -> tuple:
        now, goes_on = list(carried), _loops.function_of(self.goes_on)
        while goes_on(*now, *additional):
            now = self.step(*now, *additional)
        # A loop's results are others than what it is given.
        return tuple(t.clone() if t is before else t for t, before in zip(now, carried, strict=True))

    def loop(self, goes_on: Callable, body: Callable, carried: Sequence, additional: Sequence) -> tuple:
        """A `while_loop`, of which nothing is differentiated from outside, though its body may do so itself."""
        if not self.traced:
            return _loops.while_loop(goes_on, body, carried, additional)
        args = (*carried, *additional)
        graphs = [materialize_as_graph(fn, args, *self.keys, force_enable_grad=True) for fn in (goes_on, body)]
        with torch._C._AutoDispatchBelowAutograd():
            return _OP(*graphs, tuple(carried), tuple(additional))


class _Loop(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call: _Call, *args):
        carried, additional = args[: call.n_carried], args[call.n_carried :]
        rows = _rows(carried)
        n = len(carried)
        count = torch.zeros((), dtype=torch.int64, device=carried[0].device)
        starts, latest = ([t.new_zeros(length, *t.shape) for t in carried] for length in (rows + 1, rows))

        def goes_on(*now):
            return _loops.function_of(call.goes_on)(*now[1 + 2 * n :])

        def body(*now):
            (i,), starts, latest, now, additional = _parts(now, 1, n, n, n)
            at = torch.where((i % rows == 0) & (i < rows * rows), i // rows, rows)
            with _loops.NothingDrawn():
                after = call.step(*now, *additional)
            return (i + 1, *map(_put(at), starts, now), *map(_put(i % rows), latest, now), *after)

        found = call.loop(goes_on, body, [count, *starts, *latest, *carried], additional)
        (count,), starts, latest, results, _ = _parts(found, 1, n, n, n)
        ctx.call, ctx.rows = call, rows
        ctx.others = [None if isinstance(x, torch.Tensor) else x for x in additional]
        given = [x for x in additional if isinstance(x, torch.Tensor)]
        ctx.save_for_backward(count, *starts, *latest, *carried, *given)
        ctx.mark_non_differentiable(*(t for t in results if not _is_differentiable(t)))
        return tuple(results)

    @staticmethod
    def backward(ctx, *grads):
        call, rows, n = ctx.call, ctx.rows, ctx.call.n_carried
        (count,), starts, latest, carried, given = _parts(ctx.saved_tensors, 1, n, n, n)
        rest = iter(given)
        additional = [next(rest) if x is None else x for x in ctx.others]
        needs = [*map(_is_differentiable, carried), *ctx.needs_input_grad[1 + n :]]
        if torch.is_grad_enabled():
            return None, *_differentiable(call, carried, additional, needs, grads)
        try:
            found = _backward(call, rows, (count, starts, latest), additional, needs, grads)
        except _loops.Played as why:
            raise RuntimeError(f"while_loop: the backward of its body cannot be one; it needs {why}") from why
        return None, *found


def _backward(call: _Call, rows: int, kept: tuple, additional, needs: Sequence[bool], grads) -> list:
    count, starts, latest = kept
    n = call.n_carried
    of_last = [g.clone(memory_format=torch.contiguous_format) for g, need in zip(grads, needs[:n], strict=True) if need]
    zeros = [torch.zeros_like(t) for t, need in zip(additional, needs[n:], strict=True) if need]

    def body(*now):
        (r,), of_carried, sums, latest, (count,), starts, additional = _parts(now, 1, len(of_last), len(zeros), n, 1, n)
        missing = (r % rows == rows - 1) & (r != count - 1)
        latest = _rounds_again(call, rows, r // rows, missing, starts, latest, additional)
        given = [*map(_take(r % rows), latest), *additional]
        of_carried, more = _vjp(call, given, needs, of_carried)
        sums = [(a + b).clone() for a, b in zip(sums, more, strict=True)]
        return (r - 1, *of_carried, *sums, *latest)

    found = call.loop(lambda r, *_: r >= 0, body, [count - 1, *of_last, *zeros, *latest], [count, *starts, *additional])
    found = iter(found[1 : 1 + len(of_last) + len(zeros)])
    return [next(found) if need else None for need in needs]


def _rounds_again(call: _Call, rows: int, part, missing, starts, latest, additional) -> list:
    """What each round of a part of so many was given, if it is missing."""
    n = call.n_carried
    nearest = part.clamp(max=rows - 1)
    first = nearest * rows
    end = torch.where(missing, (part + 1) * rows, first)

    def body(*now):
        (i,), latest, now, _, additional = _parts(now, 1, n, n, 1)
        return (i + 1, *map(_put(i % rows), latest, now), *call.step(*now, *additional))

    begin = [first, *latest, *map(_take(nearest), starts)]
    loop = _inner_loop if call.traced else _loops.while_loop
    return list(loop(lambda i, *now: i < now[2 * n], body, begin, [end, *additional])[1 : 1 + n])


def _inner_loop(goes_on, body, carried, additional):
    with torch.no_grad():
        return _OP(goes_on, body, tuple(carried), tuple(additional))


def _vjp(call: _Call, given: Sequence, needs: Sequence[bool], grads: Sequence[torch.Tensor]) -> tuple[list, list]:
    """Gradients of a round: of what is carried, and of what it takes besides."""
    leaves = [
        t.detach().requires_grad_(need) if isinstance(t, torch.Tensor) else t
        for t, need in zip(given, needs, strict=True)
    ]
    with torch.enable_grad():
        results = [t for t in call.step(*leaves) if _is_differentiable(t)]
        pairs = [(t, g) for t, g in zip(results, grads, strict=True) if t.requires_grad]
    wanted = [t for t, need in zip(leaves, needs, strict=True) if need]
    # In this thread, which is the one that records.
    with torch.autograd.set_multithreading_enabled(False):
        found = _grad(pairs, wanted, create_graph=False)
    found = [torch.zeros_like(t) if g is None else g.clone() for t, g in zip(wanted, found, strict=True)]
    return found[: len(grads)], found[len(grads) :]


def _differentiable(call: _Call, carried, additional, needs, grads) -> list:
    """Gradients that have gradients: of the rounds one by one."""
    tensors = [t.view_as(t) if isinstance(t, torch.Tensor) else t for t in (*carried, *additional)]
    # A carried tensor of which no gradient was asked may get one on its way.
    wanted = [t for t, need in zip(tensors, needs, strict=True) if need and t.requires_grad]
    results = call.one_by_one(tensors[: len(carried)], tensors[len(carried) :])
    pairs = [(t, g) for t, g in zip(results, grads, strict=True) if t.requires_grad]
    found = iter(_grad(pairs, wanted, create_graph=True))
    return [next(found) if need and t.requires_grad else None for t, need in zip(tensors, needs, strict=True)]


def _grad(pairs: Sequence[tuple], wanted: Sequence[torch.Tensor], create_graph: bool) -> Sequence:
    """Of results with their gradients; None where there is none."""
    if not pairs or not wanted:
        return [None] * len(wanted)
    results, grads = zip(*pairs, strict=True)
    return torch.autograd.grad(results, wanted, grads, create_graph=create_graph, allow_unused=True)


def _rows(carried: Sequence[torch.Tensor]) -> int:
    """How many rounds are kept at once; with the square of it, no round is computed more than twice."""
    size = sum(t.numel() * t.element_size() for t in carried)
    return max(_FEWEST_ROWS, min(_MOST_ROWS, _BYTES // max(size, 1)))


def _put(at: torch.Tensor) -> Callable:
    return lambda rows, t: rows.index_copy(0, at.reshape(1), t.unsqueeze(0))


def _take(at: torch.Tensor) -> Callable:
    return lambda rows: rows.index_select(0, at.reshape(1)).squeeze(0)


def _parts(values: Sequence, *counts: int) -> list[list]:
    """So many values each, and what is left."""
    ends = [*itertools.accumulate(counts)]
    return [list(values[begin:end]) for begin, end in zip([0, *ends], [*ends, None], strict=True)]


def _is_differentiable(t: Any) -> bool:
    return isinstance(t, torch.Tensor) and (t.is_floating_point() or t.is_complex())
