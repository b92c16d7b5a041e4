"""Tensors in the size of a bound."""

import torch

from oxitorch import _activate


def padded(t: torch.Tensor, shape: list[int]) -> torch.Tensor:
    """A tensor of this shape that begins with `t`, is all of its storage, and goes on with anything, or is cut.

    Nothing is compiled, and nothing waits: a view of a tensor of that shape, as results of programs are, is that
    tensor, and others are copied to the beginning of one, row-major. Only lazy conjugates and negations go by way of
    the host.
    """
    if t.device.type != "cpu" and 0 in (*t.shape, *shape):
        return blank(t, shape)  # there is nothing to copy
    if t.device.type != "cpu":
        whole = _whole(t, shape, packed(shape, range(len(shape)))) or _whole(t, shape, list(t.stride()))
        if whole is not None:
            return whole[0]
        made = filled(t.detach(), shape, 0)
        if made is None and _activate.core().is_absent():
            return blank(t, shape)  # there is nothing to read
        return padded(t.detach().cpu(), shape).to(t.device) if made is None else made
    pads: list[int] = []
    for have, want in zip(reversed(t.shape), reversed(shape), strict=True):
        pads += (0, want - have)
    return torch.nn.functional.pad(t.detach(), pads).contiguous() if any(pads) else t.contiguous()


def filled(t: torch.Tensor, shape: list[int], value: float) -> torch.Tensor | None:
    """A tensor of this shape that begins with `t`, a tensor of the device, and goes on with `value`, made without a
    program and without a wait; None where that cannot be done, as `t` is no plain tensor.
    """
    return torch.ops.oxitorch._pad.default(t, shape, value)


def blank(t: torch.Tensor, shape: list[int]) -> torch.Tensor:
    """A tensor of this shape beside `t`, for a run of which nothing is computed: it comes from the host, as what the
    device makes would be a program.
    """
    return torch.zeros(shape, dtype=t.dtype).to(t.device)


def order(t: torch.Tensor, shape: list[int]) -> tuple[int, ...]:
    """The dimensions in the order in which `padded` gives them, slowest first."""
    natural = tuple(range(len(shape)))
    if t.device.type == "cpu" or _whole(t, shape, packed(shape, natural)) is not None:
        return natural
    if _whole(t, shape, list(t.stride())) is None:
        return natural
    return tuple(sorted(natural, key=lambda d: -t.stride(d)))


def is_part(t: torch.Tensor) -> bool:
    """Whether a tensor shows a part of its storage; what it shows again along a stride of 0 counts once."""
    numel = 1
    for n, step in sorted(zip(t.shape, t.stride(), strict=True), key=lambda dim: dim[1]):
        if n == 1 or step == 0:
            continue
        if step != numel:
            return True
        numel *= n
    return t.numel() > 0 and numel * t.element_size() != t.untyped_storage().nbytes()


def packed(shape: list[int], order) -> list[int]:
    """The strides of a tensor without gaps whose dimensions are in this order."""
    strides, numel = [0] * len(shape), 1
    for d in reversed(list(order)):
        strides[d] = numel
        numel *= shape[d]
    return strides


def _whole(t: torch.Tensor, shape: list[int], strides: list[int]) -> tuple[torch.Tensor] | None:
    """All of the storage of a tensor that is the beginning of one of this shape with these strides."""
    fits = all(n == 1 or own == s for n, own, s in zip(t.shape, t.stride(), strides, strict=True))
    numel = 1
    for n in shape:
        numel *= n
    end = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    fits = fits and end == numel and t.storage_offset() == 0
    if not fits or t.untyped_storage().nbytes() != numel * t.element_size() or any(map(int.__gt__, t.shape, shape)):
        return None
    return (t if list(t.shape) == shape else t.detach().as_strided(shape, strides),)
