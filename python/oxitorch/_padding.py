"""Tensors in the size of a bound."""

import torch


def padded(t: torch.Tensor, shape: list[int], strides: list[int] | None = None) -> torch.Tensor | None:
    """A tensor of this shape that begins with `t` and goes on with zeros, or is cut; row-major unless strides are given.

    Nothing is compiled: a view of a tensor of that shape, as results of programs are, is that tensor, and others go by
    way of the host. None if `t` lies otherwise than these strides say.
    """
    dense = _row_major(shape)
    strides = dense if strides is None else strides
    if list(t.shape) == shape and (all(map(_fits, t.shape, t.stride(), strides))):
        return t
    if t.device.type == "tpu":
        whole = _whole(t, shape, strides)
        if whole is not None:
            return whole
    if strides != dense:
        return None
    if t.device.type != "cpu":
        on_host = padded(t.detach().cpu(), shape)
        return None if on_host is None else on_host.to(t.device)
    pads: list[int] = []
    for have, want in zip(reversed(t.shape), reversed(shape), strict=True):
        pads += (0, want - have)
    return torch.nn.functional.pad(t.detach(), pads).contiguous()


def _fits(size: int, stride: int, wanted: int) -> bool:
    return size == 1 or stride == wanted


def _row_major(shape: list[int]) -> list[int]:
    strides, numel = [], 1
    for n in reversed(shape):
        strides.insert(0, numel)
        numel *= n
    return strides


def _whole(t: torch.Tensor, shape: list[int], strides: list[int]) -> torch.Tensor | None:
    """All of the storage of a tensor that is the beginning of one of this shape."""
    bytes = (1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))) * t.element_size()
    fits = all(map(_fits, t.shape, t.stride(), strides)) and t.storage_offset() == 0
    if not fits or t.untyped_storage().nbytes() != bytes or any(map(int.__gt__, t.shape, shape)):
        return None
    return t.detach().as_strided(shape, strides)
