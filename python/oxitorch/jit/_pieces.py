"""Tensors that a function cuts into pieces, of which there may be more or fewer at another size.

A program has as many operations as it has: where a loop of Python goes over pieces whose number follows from a size,
there is none for several sizes, and what is different is said in the user's words.
"""

import torch

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
