"""Arguments that are parts of larger tensors, and begin elsewhere in each call: batches of data that is on the device.

Where an argument begins is a constant of a function's program. One that moves is therefore copied before the call, so
that it begins at zero, if the function only reads it.
"""

from collections.abc import Iterable

import torch
from torch.utils import _pytree as pytree


def begins_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    return [t.storage_offset() for t in tensors]


class Moved:
    """Which arguments of a kind of calls move, by their numbers."""

    def __init__(self):
        self._places: frozenset[int] = frozenset()
        # Not once the function was seen to do more than reading one.
        self._may = True

    def __bool__(self) -> bool:
        return bool(self._places)

    def find(self, functions: list, tensors: list[torch.Tensor]) -> None:
        """Compares a call for which no function is known with what is known of others."""
        if not self._may or torch.is_inference_mode_enabled():
            return
        for function in functions:
            if len(function.begins) != len(tensors):
                continue
            known = enumerate(zip(function.begins, tensors, strict=True))
            moved = {i for i, (begin, t) in known if t.device.type == "tpu" and begin != t.storage_offset()}
            may = moved <= function.reads and all(_may_be_copied(tensors[i]) for i in moved)
            if moved and may and function.is_current():
                self._places |= moved
                return

    def together(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors, with copies of those that move."""
        with torch.no_grad():
            return [t.clone() if i in self._places and _may_be_copied(t) else t for i, t in enumerate(tensors)]

    def may_call(self, function) -> bool:
        """Whether a function may be given copies; else there are none from now on."""
        if self._places <= function.reads:
            return True
        self._stop()
        return False

    def undo(self, tensors: list[torch.Tensor], copies: list[torch.Tensor], results):
        """The function was run on copies, and may have written to them or given parts of them: so it is with the
        tensors themselves. Gives the results.
        """
        copied = {id(c): (t, c) for t, c in zip(tensors, copies, strict=True) if t is not c}
        storages = {c.untyped_storage()._cdata: t for t, c in copied.values()}
        with torch.no_grad():
            for t, c in copied.values():
                if c._version:
                    t.copy_(c)
                    self._stop()

        def own(x):
            t = storages.get(x.untyped_storage()._cdata) if isinstance(x, torch.Tensor) else None
            if t is None:
                return x
            self._stop()
            return t.as_strided(x.size(), x.stride(), t.storage_offset() + x.storage_offset())

        return pytree.tree_map(own, results)

    def _stop(self) -> None:
        self._places, self._may = frozenset(), False


def _may_be_copied(t: torch.Tensor) -> bool:
    """Whether a copy has the same strides, and takes part in no graph of autograd, as the tensor itself."""
    return type(t) is torch.Tensor and t.device.type == "tpu" and t.is_contiguous() and not t.requires_grad
