"""Tensors that a function cuts into pieces, of which there may be more or fewer at another size.

A program has as many operations as it has: where a loop of Python goes over pieces whose number follows from a size,
there is none for several sizes, and what is different is said in the user's words.
"""

import re

import torch
from torch.fx import GraphModule, Node

from oxitorch._lines import is_library

_aten = torch.ops.aten
# With what to do instead.
_SPLIT = "pad to a multiple, and `unflatten` has all pieces in one tensor"
_UNBIND = "compute with the whole tensor (`torch.vmap`), or loop with `torch._higher_order_ops.map` or `scan`"
HINTS = {
    _aten.split.Tensor: _SPLIT,
    _aten.split_copy.Tensor: _SPLIT,
    _aten.unsafe_split.Tensor: _SPLIT,
    _aten.split_with_sizes.default: _SPLIT,
    _aten.unbind.int: _UNBIND,
    _aten.unbind_copy.int: _UNBIND,
}


class Pieces:
    """What an operation cut: how many pieces there were, at which line."""

    def __init__(self, func, count: int, line: str | None):
        self._func, self._count, self._line = func, count, line

    def differs(self, bound: "Pieces") -> str | None:
        """Why another number of them at the bound is no program for both; None if there are as many."""
        if self._func is not bound._func or self._line != bound._line or self._count == bound._count:
            return None
        name = self._func._opname
        return (
            f"{name} gives {self._count} tensors, and {bound._count} at the bound, at {self._line}\n"
            f"  hint: {HINTS[self._func]}"
        )


def differ(at_size: list[Pieces], at_bound: list[Pieces]) -> str | None:
    """The first operation that gives another number of pieces at the bound, if there is one."""
    found = (own.differs(bound) for own, bound in zip(at_size, at_bound, strict=False))
    return next((why for why in found if why), None)


# How many pieces there were last, in graphs of `torch.compile`: by operation, line and which of those there it is; with
# one more all are forgotten.
_counts: dict[tuple[str, str, int], int] = {}
_MAX_COUNTS = 4096


def recounted(gm: GraphModule) -> str | None:
    """Which operation of a new graph gives another number of pieces than it gave in the graph before, if one does.

    Dynamo makes a graph for each number of them.
    """
    found = None
    places: list[tuple[str, str]] = []
    for func, count, line in _cut(gm):
        place = func._opname, line
        key = (*place, places.count(place))
        places.append(place)
        before = _counts.get(key, count)
        if len(_counts) >= _MAX_COUNTS:
            _counts.clear()
        _counts[key] = count
        if before != count and found is None:
            found = f"{func._opname} gives {count} tensors, and gave {before}, at {line}\n  hint: {HINTS[func]}"
    return found


def _cut(gm: GraphModule):
    """The operations that cut something: which, how many pieces there are, and the line. `unbind` is many `select`s."""
    selected: dict[tuple, set[int]] = {}
    for n in gm.graph.nodes:
        if n.op != "call_function":
            continue
        trace = n.meta.get("stack_trace") or ""
        if n.target in HINTS:
            yield n.target, len(n.meta["val"]), _line(trace)
        elif n.target is _aten.select.int and isinstance(n.args[2], int):
            of, dim, at = n.args
            count = of.meta["val"].shape[dim] if isinstance(of, Node) else 0
            seen = selected.setdefault((of, dim, trace), set())
            seen.add(at)
            if len(seen) > 1 and len(seen) == count and at == count - 1:
                yield _aten.unbind.int, int(count), _line(trace)


def _line(trace: str) -> str:
    """The innermost line of the user's in a trace."""
    frames = re.findall(r'File "(.*)", line (\d+), in (\S+)', trace)
    own = [frame for frame in frames if not is_library(frame[0])]
    return "{}:{} in {}".format(*own[-1]) if own else "a line of a library"
