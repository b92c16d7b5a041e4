"""Sizes that vary, and the sizes that programs are made for."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any


class Dim:
    """A size that varies: programs are made for a few bounds, each for all sizes up to it and above the one before.

    Args:
        max: the largest size, which is the last bound.
        min: the smallest size that there is. It makes no bounds below it.
        buckets: the bounds, ascending; also a `Buckets` of `oxitorch.data.bucketize`.
        multiple: bounds are the multiples of this. By default they are the powers of two from `least` on.
        least: the smallest bound.

    Raises:
        ValueError: the bounds are not positive, or do not ascend.
    """

    def __init__(
        self,
        *,
        max: int | None = None,
        min: int = 1,
        buckets: Sequence[int] | None = None,
        multiple: int | None = None,
        least: int = 16,
    ):
        if buckets is not None and multiple is not None:
            raise ValueError("Dim: give buckets or multiple, not both")
        self.max = max
        self.buckets = None if buckets is None else tuple(int(b) for b in buckets)
        self._multiple = multiple
        self._least = _greatest(least, min)
        ordered = self.buckets is None or all(a < b for a, b in pairwise(self.buckets))
        if not ordered or _least_of([max, min, multiple, least, *(self.buckets or ())]) < 1 or self.buckets == ():
            raise ValueError(f"Dim: bounds must be positive and ascend, got {self}")

    def bound(self, size: int) -> int:
        """The bound that a size belongs to.

        Raises:
            ValueError: the size is larger than all bounds.
        """
        most = self.max if self.buckets is None else self.buckets[-1] if self.max is None else self.max
        if most is not None and size > most:
            raise ValueError(f"a size is {size}, and {self} allows {most} at most")
        if self.buckets is not None:
            at = bisect_left(self.buckets, size)
            bound = self.buckets[at] if at < len(self.buckets) else most
        elif self._multiple is not None:
            bound = -(-size // self._multiple) * self._multiple
        else:
            bound = 1 << (_greatest(size, self._least) - 1).bit_length()
        return bound if most is None or bound < most else most

    def bounds(self) -> list[int] | None:
        """All bounds, ascending; None if there is no largest one."""
        most = self.buckets[-1] if self.buckets is not None and self.max is None else self.max
        if most is None:
            return None
        found = [self.bound(1)]
        while found[-1] < most:
            found.append(self.bound(found[-1] + 1))
        return found

    def sample(self, bound: int) -> int:
        """A smaller size that belongs to a bound, or the bound: not 1, at which tensors are expanded."""
        for size in (bound - bound // 4, bound - bound // 8, bound - 1):
            if 1 < size < bound and self.bound(size) == bound:
                return size
        return bound

    def __repr__(self) -> str:
        parts = {"max": self.max, "buckets": self.buckets and list(self.buckets), "multiple": self._multiple}
        return f"Dim({', '.join(f'{k}={v}' for k, v in parts.items() if v is not None)})"


def below(sizes: tuple[int, ...], bounds: tuple[int, ...], dims: Sequence[Dim | None]) -> tuple[int, ...] | None:
    """The largest sizes below these bounds, or what does not vary or is at its bound; None if that is all."""
    less = tuple([b - 1 if d is not None and n < b else b for n, b, d in zip(sizes, bounds, dims, strict=True)])
    return None if less == bounds else less


def sample_below(bounds: tuple[int, ...]) -> tuple[int, ...]:
    """Smaller sizes that leave over what these do, by as large a power of two as there is."""
    return tuple([n - (1 << max((n // 3).bit_length() - 1, 0)) if n > 2 else n for n in bounds])


def _greatest(a: int, b: int) -> int:
    return a if a > b else b


def _least_of(numbers: list[int | None]) -> int:
    return min(n for n in numbers if n is not None)


# Dimensions that vary, of each argument by its name or place.
Dynamic = Mapping[str | int, Mapping[int, Dim]]


def checked(dynamic: Any) -> dict[str | int, dict[int, Dim]]:
    """What `dynamic=` says.

    Raises:
        TypeError: it is not of the form `{"tokens": {1: Dim(max=2048)}}`.
    """
    form = 'dynamic is of the form {"tokens": {1: torch.tpu.Dim(max=2048)}}'
    if not isinstance(dynamic, Mapping):
        raise TypeError(f"torch.tpu.jit: {form}, got {dynamic!r}")
    for argument, dims in dynamic.items():
        right = isinstance(argument, (str, int)) and isinstance(dims, Mapping)
        if not right or not all(isinstance(d, int) and isinstance(dim, Dim) for d, dim in dims.items()):
            raise TypeError(f"torch.tpu.jit: {form}, got {argument!r}: {dims!r}")
    return {argument: dict(dims) for argument, dims in dynamic.items()}
