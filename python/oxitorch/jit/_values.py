"""Values of tensors of the host that Python read while a function was traced.

A program has what followed from them, so a call goes by it only while the tensors hold the same bits.
"""

import torch

from oxitorch.jit._names import Change, change


class Values:
    """Tensors that the function found outside, and what they held when they were read."""

    def __init__(self):
        # Each with its bits, and the line that read it first.
        self._all: dict[int, tuple[torch.Tensor, tuple, torch.Tensor, str]] = {}

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [t for t, *_ in self._all.values()]

    def note(self, t: torch.Tensor, line: str) -> None:
        if id(t) not in self._all:
            self._all[id(t)] = t, kind_of(t), bits_of(t).clone(), line

    def forget(self, tensors: list[torch.Tensor]) -> None:
        """What Python read of these is compared in another way."""
        for t in tensors:
            self._all.pop(id(t), None)

    def are_same(self) -> bool:
        return all(_is_same(t, kind, bits) for t, kind, bits, _ in self._all.values())

    def changed(self) -> dict[str, Change]:
        """Those that hold something else now, as `Numbers.changed` tells of numbers."""
        lines = [line for t, kind, bits, line in self._all.values() if not _is_same(t, kind, bits)]
        return {"a tensor of the host": change(lines[0])} if lines else {}


def _is_same(t: torch.Tensor, kind: tuple, bits: torch.Tensor) -> bool:
    return kind_of(t) == kind and torch.equal(bits_of(t), bits)


def kind_of(t: torch.Tensor) -> tuple:
    return t.dtype, t.shape


def bits_of(t: torch.Tensor) -> torch.Tensor:
    """What it holds, so that zeros of different signs differ and a NaN is the same as itself."""
    return t.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def layout_of(t: torch.Tensor) -> tuple:
    return t.dtype, t.size(), t.stride(), t.storage_offset()
