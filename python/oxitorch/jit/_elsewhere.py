"""Numbers of Python that a function finds elsewhere than among its arguments, and that differ from call to call:
attributes, items of dicts, options of optimizers, variables around it.

They are as numbers among the arguments are (`_numbers.py`), but that a call looks for them where they are, and leaves
there what the function does: `self.step += 1`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

_SYMBOLIC = (torch.SymFloat, torch.SymInt)


class Elsewhere:
    """Where they are: what holds each (a dict, or what has it as an attribute), and its name there."""

    def __init__(self, places: Sequence[tuple[Any, str]]):
        self.places = list(places)
        self._sizes = [len(x) if type(x := get(*place)) is tuple else None for place in self.places]

    def __contains__(self, place: tuple[Any, str]) -> bool:
        return any(place[0] is where and place[1] == name for where, name in self.places)

    def names(self) -> dict[int, list]:
        """By the ids of what holds them."""
        names: dict[int, list] = {}
        for where, name in self.places:
            names.setdefault(id(where), []).append(name)
        return names

    def read(self) -> list | None:
        """The numbers, those of a tuple one after another; nothing if something else is there."""
        numbers: list = []
        for (where, name), size in zip(self.places, self._sizes, strict=True):
            now = get(where, name)
            each = (now,) if size is None else now
            if size is not None and (type(now) is not tuple or len(now) != size):
                return None
            if not all(type(x) in (int, float) for x in each):
                return None
            numbers += each
        return numbers

    @contextmanager
    def shown(self, numbers: Sequence) -> Iterator[None]:
        """These numbers are there, for a run of which nothing is to come."""
        before = [get(*place) for place in self.places]
        rest = iter(numbers)
        self._shown = [next(rest) if size is None else tuple(next(rest) for _ in range(size)) for size in self._sizes]
        try:
            for place, x in zip(self.places, self._shown, strict=True):
                put(*place, x)
            yield
        finally:
            for place, x in zip(self.places, before, strict=True):
                put(*place, x)

    def left(self) -> list[tuple[Any, str, Any]]:
        """What the run has put in their places."""
        now = [(*place, get(*place)) for place in self.places]
        return [of for of, shown in zip(now, self._shown, strict=True) if of[2] is not shown]


def get(where: Any, name: str) -> Any:
    return where.get(name) if isinstance(where, dict) else getattr(where, name, None)


def put(where: Any, name: str, value: Any) -> None:
    if isinstance(where, dict):
        where[name] = value
    else:
        setattr(where, name, value)


def is_number(x: Any) -> bool:
    """Whether it is one, or a tuple of some, as an optimizer's `betas` are."""
    return type(x) in (int, float) or (type(x) is tuple and bool(x) and all(type(i) in (int, float) for i in x))


def is_traced(x: Any) -> bool:
    return isinstance(x, _SYMBOLIC)


def has_traced(x: Any) -> bool:
    return is_traced(x) or (type(x) is tuple and any(map(is_traced, x)))
