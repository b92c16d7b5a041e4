"""Names under which a function leaves other tensors in each call than it finds there.

They are attributes and buffers of modules, attributes of objects, items of dicts and the state of optimizers: what a
forward hook keeps, `self.aux = loss`, `self.h = cell(x, self.h)`, `state["m"] = b * state["m"] + g`. What is left there
is a result of the program, which each call puts there anew.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch


class Place(NamedTuple):
    """A name in a dict, and what was there before the function ran; `_NOTHING` if the dict did not have it."""

    holder: dict
    key: Any
    before: Any


_NOTHING = object()
_OBJECT = object()
_HELD = (torch.Tensor, type(None), bool, int, float, str)


class Holders:
    """Dicts in which a function may leave tensors, as they are before it runs."""

    def __init__(self, dicts: Iterable[dict]):
        # Of objects only that there were some: what is put into one that is let go then is not to be held.
        self._before = {
            id(d): (d, {key: value if isinstance(value, _HELD) else _OBJECT for key, value in d.items()}) for d in dicts
        }

    def left(self, is_of_run: Callable[[torch.Tensor], bool]) -> list[tuple[Place, torch.Tensor]]:
        """What the function has left of the tensors that are of the run: those that it takes and those that it made."""
        return [
            (Place(d, key, before.get(key, _NOTHING)), now)
            for d, before in self._before.values()
            for key, now in d.items()
            if isinstance(now, torch.Tensor) and now is not before.get(key) and is_of_run(now)
        ]

    def ids(self) -> set[int]:
        """Of what was in them."""
        return {id(value) for _, before in self._before.values() for value in before.values()}

    def stay(self, tensor: torch.Tensor, places: Sequence[Place]) -> bool:
        """Whether a tensor that was in one of the places is still where it was in another one."""
        apart = {(id(p.holder), p.key) for p in places}
        return any(
            value is tensor and (at, key) not in apart
            for at, (_, before) in self._before.items()
            for key, value in before.items()
        )

    def restore(self) -> None:
        """Puts back what was there in place of tensors."""
        for d, before in self._before.values():
            for key, now in list(d.items()):
                if not isinstance(now, torch.Tensor) or now is before.get(key):
                    continue
                if key not in before:
                    del d[key]
                elif before[key] is not _OBJECT:
                    d[key] = before[key]


def names_by_dict(places: Iterable[Place]) -> dict[int, list]:
    """The names of the places, by the ids of their dicts."""
    names: dict[int, list] = {}
    for place in places:
        names.setdefault(id(place.holder), []).append(place.key)
    return names


class Kept:
    """What each call leaves in places.

    `found` are the tensors that the function found, some of them in these places; `results` makes what is left there of
    what the program gives.
    """

    def __init__(self, places: list[Place], found: list[torch.Tensor], results: Callable[[list, list], list]):
        self._results = results
        # What was there before, but for tensors, of which any may be there.
        self._places = [
            (p.holder, p.key, torch.Tensor if isinstance(p.before, torch.Tensor) else p.before) for p in places
        ]
        # The first place of each tensor that was there before, by its id.
        first: dict[int, int] = {}
        for i, p in enumerate(places):
            if isinstance(p.before, torch.Tensor):
                first.setdefault(id(p.before), i)
        # Places that had one tensor, and have to have one.
        self._same = [(i, first[id(p.before)]) for i, p in enumerate(places) if first.get(id(p.before), i) != i]
        # Numbers of those among `found`.
        self._taken = [(i, first[id(t)]) for i, t in enumerate(found) if id(t) in first]

    def is_current(self) -> bool:
        """Whether the places have tensors where they had such, and else what they had."""
        for holder, key, before in self._places:
            now = holder.get(key, _NOTHING)
            if now is not before and not (before is torch.Tensor and isinstance(now, torch.Tensor)):
                return False
        return all(self._now(i) is self._now(k) for i, k in self._same)

    def _now(self, i: int) -> Any:
        holder, key, _ = self._places[i]
        return holder.get(key, _NOTHING)

    def take(self, found: list[torch.Tensor]) -> None:
        """Puts what is in the places now among the tensors that the function finds."""
        for i, place in self._taken:
            found[i] = self._now(place)

    def give(self, made: list[torch.Tensor], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Takes what belongs into the places from the end of what the program gave, and leaves it there."""
        count = len(made) - len(self._places)
        for (holder, key, _), t in zip(self._places, self._results(made[count:], inputs), strict=True):
            holder[key] = t
        return made[:count]
