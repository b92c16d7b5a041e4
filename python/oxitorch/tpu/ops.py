"""Operations that PyTorch has no name for."""

from typing import NamedTuple

import torch

from oxitorch import _activate


def optimization_barrier(*tensors: torch.Tensor):
    """The same tensors, behind a barrier that XLA does not move work across (StableHLO `optimization_barrier`).

    Differentiable; the gradients pass a barrier too. On other devices it copies.

    Returns:
        One tensor for one argument, else a tuple.
    """
    if not tensors:
        raise TypeError("optimization_barrier() needs at least one tensor")
    out = torch.ops.oxitorch.optimization_barrier(list(tensors))
    return out[0] if len(out) == 1 else tuple(out)


class MaskedSelect(NamedTuple):
    """What `masked_select_static` gives.

    Attributes:
        values: `[size, ...]`.
        found: how many the mask selects (int64, 0-d), which may be more than `size`.
    """

    values: torch.Tensor
    found: torch.Tensor


def masked_select_static(input: torch.Tensor, mask: torch.Tensor, *, size: int, fill_value: float = 0) -> MaskedSelect:
    """`input[mask]` in a size that is known beforehand, so that nothing is read: beside `torch.nonzero_static`.

    Works in eager mode, in `torch.compile`d graphs and in functions of `torch.tpu.jit`, on any device. Gradients go to
    what was selected.

    Args:
        input: of any dtype.
        mask: bool; its shape is that of the first dimensions of `input`, or of all.
        size: how many are given. If the mask selects more, the first ones; behind the last there is `fill_value`.
        fill_value: a number.

    Raises:
        ValueError: the mask is not bool or has another shape, or `size` is negative.
    """
    if mask.dtype != torch.bool or mask.shape != input.shape[: mask.dim()] or mask.dim() == 0:
        raise ValueError(
            f"masked_select_static: expected a bool mask with the first dimensions of {list(input.shape)}, got "
            f"{mask.dtype} {list(mask.shape)}"
        )
    if size < 0:
        raise ValueError(f"masked_select_static: size must not be negative, got {size}")
    rows = input.flatten(0, mask.dim() - 1)
    if rows.shape[0] == 0:
        values = rows.new_full((size, *rows.shape[1:]), fill_value)
        return MaskedSelect(values, mask.sum())
    return MaskedSelect(_rows(rows, _places(mask.flatten(), size), fill_value), mask.sum())


class Unique(NamedTuple):
    """What `unique_static` gives.

    Attributes:
        values: `[size]`, ascending.
        found: how many different elements there are (int64, 0-d), which may be more than `size`.
        inverse: for each element of the input, the number of its value, also of those that were left out; int64.
        counts: how often each of `values` is there, 0 for those behind the last; int64, `[size]`.
    """

    values: torch.Tensor
    found: torch.Tensor
    inverse: torch.Tensor
    counts: torch.Tensor


def unique_static(input: torch.Tensor, *, size: int, fill_value: float = 0) -> Unique:
    """`torch.unique` in a size that is known beforehand, so that nothing is read: beside `torch.nonzero_static`.

    Works where `masked_select_static` does. What is not taken of the results is not computed in fused mode and in
    compiled programs.

    Args:
        input: of any dtype that can be sorted; each NaN is a value of its own, as in `torch.unique`.
        size: how many values are given. If there are more, the smallest; behind the last there is `fill_value`.
        fill_value: a number.

    Raises:
        ValueError: `size` is negative.
    """
    if size < 0:
        raise ValueError(f"unique_static: size must not be negative, got {size}")
    ordered, order = input.detach().flatten().sort(stable=True)
    first = torch.ones_like(ordered, dtype=torch.bool)
    first[1:] = ordered[1:] != ordered[:-1]
    rank = first.cumsum(0) - 1
    if ordered.shape[0] == 0:
        values = ordered.new_full((size,), fill_value)
    else:
        values = _rows(ordered, _places(first, size), fill_value)
    inverse = torch.empty_like(rank).scatter(0, order, rank).view(input.shape)
    # What is behind the last one that is given is counted in one more place.
    counts = torch.zeros(size + 1, dtype=torch.int64, device=input.device)
    counts = counts.index_add(0, rank.clamp(max=size), torch.ones_like(rank))[:size]
    return Unique(values, first.sum(), inverse, counts)


def _places(mask: torch.Tensor, size: int) -> torch.Tensor:
    """Where a mask is true, and -1 behind the last place."""
    return torch.nonzero_static(mask, size=size, fill_value=-1)[:, 0]


def _rows(x: torch.Tensor, places: torch.Tensor, fill_value: float) -> torch.Tensor:
    """These rows, and `fill_value` where there is none."""
    rows = x.index_select(0, places.clamp(min=0))
    there = (places >= 0).view(-1, *[1] * (x.dim() - 1))
    return torch.where(there, rows, torch.full((), fill_value, dtype=x.dtype, device=x.device))


def _clone_and_cut(tensors):
    out = [t.clone() for t in tensors]
    _activate.core().cut("barrier")
    return out


def _backward(_ctx, grads):
    # An output that was not used has no gradient.
    present = iter(torch.ops.oxitorch.optimization_barrier([g for g in grads if g is not None]))
    return [None if g is None else next(present) for g in grads]


# The definitions live as long as this.
_library = torch.library.Library("oxitorch", "FRAGMENT")
_library.define("optimization_barrier(Tensor[] tensors) -> Tensor[]")
_library.define("_fence(Tensor x, Tensor after, bool firmly) -> Tensor")
_library.define("_asserted(Tensor x, Tensor ok, str message) -> Tensor")
_library.define("_solved(Tensor x, Tensor info, str message) -> Tensor")
# XLA moves work about inside one program only, so the end of a program is a barrier.
_library.impl("optimization_barrier", _clone_and_cut, "CompositeExplicitAutograd")
torch.library.register_fake(
    "oxitorch::optimization_barrier", lambda tensors: [t.clone() for t in tensors], lib=_library
)
torch.library.register_fake("oxitorch::_asserted", lambda x, ok, message: torch.empty_like(x), lib=_library)
torch.library.register_fake("oxitorch::_solved", lambda x, info, message: torch.empty_like(x), lib=_library)
torch.library.register_autograd("oxitorch::optimization_barrier", _backward, lib=_library)
