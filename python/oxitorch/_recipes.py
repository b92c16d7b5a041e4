"""Recipes: what the engine noted while Python ran operations, to be recorded again in one call without Python."""

import weakref
from collections.abc import Callable

import torch

from oxitorch import _activate


class Recipes:
    """What is known about a function of tensors, for some values of its arguments that are no tensors."""

    def __init__(self, number: int | None = None):
        core = _activate.core()
        self.number = core.new_graph() if number is None else number
        # The results, with `torch.Tensor` in place of tensors; None: no recipe yet.
        self.results: list | None = None
        self.all_tensors = False
        # The tensors that it writes.
        self.written: list[int] = []
        weakref.finalize(self, core.forget_graph, self.number).atexit = False


def watched(run: Callable, tensors: list, inputs: list, known: Recipes | None) -> list:
    """The results of `run(*inputs)`, as a unit for the engine. Keeps the recipe if there is one."""
    core = _activate.core()
    watching = torch.ops.oxitorch._watch(tensors)
    versions = [_version(t) for t in tensors]
    try:
        results = list(run(*inputs))
        if watching and known is not None:
            shown = [torch.Tensor if isinstance(r, torch.Tensor) else r for r in results]
            written = [i for i, (t, v) in enumerate(zip(tensors, versions, strict=True)) if _version(t) != v]
            if known.results is None or (known.results, known.written) == (shown, written):
                made = [r for r in results if isinstance(r, torch.Tensor)]
                watching = False
                if torch.ops.oxitorch._watched(known.number, tensors, made):
                    known.results, known.all_tensors, known.written = shown, len(made) == len(shown), written
        return results
    finally:
        if watching:
            core.unwatch()


def _version(tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
