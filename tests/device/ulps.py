"""Comparing floats in units in the last place, each element on its own."""

from collections.abc import Callable
from functools import cached_property

import torch

# How many units a result may be off.
MOST = {
    torch.float16: 2,
    torch.bfloat16: 2,
    torch.float32: 4,
    torch.float64: 4,
    torch.complex64: 4,
    torch.complex128: 4,
}
WIDER = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}


def unit(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The unit in the last place of normal numbers of `dtype` that are as large as `x`, in float64."""
    info = torch.finfo(dtype)
    exponent = torch.frexp(x.double().clamp(min=info.tiny)).exponent - 1
    return info.eps * torch.exp2(exponent.double())


def distance(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """How far apart elements are, in float64; infinite where they are not the same infinity or both not a number.

    `want` may have more digits than `dtype`, the dtype of `got`, and is infinite where it would be in that.
    """
    wide = torch.complex128 if dtype.is_complex else torch.float64
    rounded = want.to(dtype).to(wide)
    got, want = got.to(wide), want.to(wide)
    same = (got == rounded) | (got.isnan() & rounded.isnan())
    finite = got.isfinite() & rounded.isfinite()
    return torch.where(same, 0, torch.where(finite, (got - want).abs(), torch.inf))


def widened(value):
    """The same in float64 or complex128, wherever there are tensors or dtypes of less."""
    if isinstance(value, list | tuple):
        return type(value)(map(widened, value))
    if isinstance(value, dict):
        return {k: widened(v) for k, v in value.items()}
    if isinstance(value, torch.Tensor):
        return value.to(WIDER.get(value.dtype, value.dtype))
    return WIDER.get(value, value) if isinstance(value, torch.dtype) else value


def shaken(value, like, g: torch.Generator):
    """The numbers of `value`, each moved up or down by one unit in the last place that those of `like` have."""
    if isinstance(value, list | tuple):
        return type(value)(shaken(v, w, g) for v, w in zip(value, like, strict=True))
    if isinstance(value, dict):
        return {k: shaken(v, like[k], g) for k, v in value.items()}
    if isinstance(value, torch.Tensor) and like.dtype in MOST:
        sign = torch.randint(0, 2, value.shape, generator=g, dtype=torch.float64) * 2 - 1
        return (value * (1 + sign * torch.finfo(like.dtype).eps)).to(value.dtype)
    return value


class Referee:
    """What the CPU gives: as it is, in float64, and when the inputs are moved by one unit in the last place.

    `run` gives the results of a call, whose arguments it makes anew and changes with a function. Where each element of
    a result comes of one element of each argument (`pointwise`), inputs are not moved: nothing is summed.
    """

    SHAKES = 4

    def __init__(self, run: Callable[[Callable], list[torch.Tensor]], pointwise: bool):
        self.run = run
        self.pointwise = pointwise

    @cached_property
    def in_float64(self) -> list[torch.Tensor] | None:
        """None where the CPU has no float64."""
        return self.attempt(widened)

    @cached_property
    def spread(self) -> list[torch.Tensor] | None:
        """How far elements move with the inputs: no order of a sum can be expected to do better."""
        change = widened if self.in_float64 else lambda args: args
        start = self.attempt(change)
        far = [torch.zeros(t.shape, dtype=torch.float64) for t in start]
        g = torch.Generator().manual_seed(0)
        for _ in range(self.SHAKES):
            moved = self.attempt(lambda args: shaken(change(args), args, g))
            if moved is None or [t.shape for t in moved] != [t.shape for t in start]:
                return None
            far = [
                f.maximum(distance(m, t, t.dtype).nan_to_num(posinf=0)) if t.dtype in MOST else f
                for f, m, t in zip(far, moved, start, strict=True)
            ]
        return far

    def attempt(self, change: Callable) -> list[torch.Tensor] | None:
        try:
            return self.run(change)
        except (RuntimeError, ValueError):
            return None

    def problem(self, i: int, got: torch.Tensor, want: torch.Tensor, floor: float = 0.0) -> str | None:
        """What is wrong with result `i`, if anything is: it is `got`, and the CPU gives `want`.

        An element may be some units in its last place off what the CPU gives, or off what that gives in float64. Where
        elements are summed it may be as many times the spread off. Numbers below `floor` have the unit of `floor`, and
        those that are less than normal may be zero.
        """
        dtype = want.dtype
        off = distance(got, want, dtype)
        units = unit(want.abs().clamp(min=floor), dtype)
        flushed = (got == 0) & (want.abs() < torch.finfo(dtype).tiny)
        allowed = torch.where(flushed, torch.inf, MOST[dtype] * units)
        if (off > allowed).any() and self.in_float64 and self.in_float64[i].shape == want.shape:
            off = off.minimum(distance(got, self.in_float64[i], dtype))
        if (off > allowed).any() and not self.pointwise and self.spread and self.spread[i].shape == want.shape:
            allowed = allowed.maximum(MOST[dtype] * self.spread[i])
        wrong = off > allowed
        if not wrong.any():
            return None
        at = (off / units).masked_fill(~wrong, -1).flatten().argmax()
        return (
            f"{int(wrong.sum())} of {wrong.numel()} elements, the worst {off.flatten()[at] / units.flatten()[at]:.3g} "
            f"units in the last place: {got.flatten()[at].item()}, on the CPU {want.flatten()[at].item()}"
        )
