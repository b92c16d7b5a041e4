"""Names under which a function leaves other tensors in each call than it finds there.

They are attributes and buffers of modules, attributes of objects, items of dicts and the state of optimizers: what a
forward hook keeps, `self.aux = loss`, `self.h = cell(x, self.h)`, `state["m"] = b * state["m"] + g`; and the memory of
tensors, which `p.data = x` exchanges. What is left there is a result of the program, which each call puts there anew.
"""

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from oxitorch.jit._values import layout_of


class Memory:
    """What a tensor holds its elements in, as a dict of one name."""

    NAME = "data"

    def __init__(self, tensor: torch.Tensor):
        self._tensor = tensor

    def get(self, _name: str, _default: object) -> torch.Tensor:
        return self._tensor

    def __setitem__(self, _name: str, value: torch.Tensor) -> None:
        self._tensor.data = value


class Place(NamedTuple):
    """A name in a dict, and what was there before the function ran; `_NOTHING` if the dict did not have it. The memory
    of an argument, which is another tensor in each call, has the argument's number as its name, and no dict.
    """

    holder: dict | Memory | None
    key: Any
    before: Any


_NOTHING = object()
_OBJECT = object()
_PLAIN = (type(None), bool, int, float, str)
_HELD = (torch.Tensor, *_PLAIN)


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

    def alters(self, is_known: Callable[[dict, Any], bool]) -> bool:
        """Whether the function has changed what Python may ask of them in its next run: flags, names, numbers."""
        return any(
            isinstance(now, _PLAIN) and not _is_same(now, before.get(key, _NOTHING)) and not is_known(d, key)
            for d, before in self._before.values()
            for key, now in d.items()
        )

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

    def restore(self, everything: bool) -> None:
        """Puts back what was there in place of tensors, or also of flags, names and numbers."""
        kinds = (torch.Tensor, *_PLAIN, torch.SymInt, torch.SymFloat) if everything else torch.Tensor
        for d, before in self._before.values():
            for key, now in list(d.items()):
                if not isinstance(now, kinds) or _is_same(now, before.get(key, _NOTHING)):
                    continue
                if key not in before:
                    del d[key]
                elif before[key] is not _OBJECT:
                    d[key] = before[key]


def _is_same(now: Any, before: Any) -> bool:
    if now is before or not isinstance(now, _PLAIN):
        return now is before
    return type(now) is type(before) and (now == before or now != now)


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

    def __init__(
        self,
        places: list[Place],
        found: list[torch.Tensor],
        results: Callable[[list, list], list],
        sharing: list[tuple[Place, int]],
        seen: set[int],
    ):
        """`sharing`: places where there was another look at the memory of an input of the program, by its number.
        `seen`: places of those among `found` in whose memory the function gives something.
        """
        self._results = results
        # What was there before, but for tensors, of which any may be there that the program takes.
        taken = {id(t) for t in found} | {id(place.before) for place, _ in sharing}
        self._places = [(p.holder, p.key, _kind(p.before, id(p.before) in taken)) for p in places]
        # The first place of each tensor that was there before, by its id.
        first: dict[int, int] = {}
        for i, p in enumerate(places):
            if isinstance(p.before, torch.Tensor):
                first.setdefault(id(p.before), i)
        # Places that had one tensor, and have to have one.
        self._same = [(i, first[id(p.before)]) for i, p in enumerate(places) if first.get(id(p.before), i) != i]
        # Numbers of those among `found`, of which each call has its own.
        self._taken = [(i, first[id(t)]) for i, t in enumerate(found) if id(t) in first]
        # Those that the program may overwrite, and whether nobody else may have the tensor, or only not its memory.
        self._may_give = [(i, not isinstance(places[k].holder, Memory)) for i, k in self._taken if i not in seen]
        self._sharing = [(p.holder, p.key, number, layout_of(p.before)) for p, number in sharing]

    def is_current(self) -> bool:
        """Whether the places have tensors where they had such, and else what they had."""
        for holder, key, before in self._places:
            if holder is None:
                continue
            now = holder.get(key, _NOTHING)
            if now is not before and not (isinstance(now, torch.Tensor) and before in (torch.Tensor, _looks(now))):
                return False
        return all(self._now(i) is self._now(k) for i, k in self._same)

    def let_go(self, found: list[torch.Tensor]) -> None:
        """Of what was in the places when the function was traced."""
        for i, _ in self._taken:
            found[i] = None

    def is_shared(self, inputs: list[torch.Tensor]) -> bool:
        """Whether what is in places is still where it was in the memory of inputs."""
        for holder, key, number, layout in self._sharing:
            now = holder.get(key, _NOTHING)
            if not isinstance(now, torch.Tensor) or layout_of(now) != layout:
                return False
            if now.untyped_storage()._cdata != inputs[number].untyped_storage()._cdata:
                return False
        return True

    def _now(self, i: int) -> Any:
        holder, key, _ = self._places[i]
        return holder.get(key, _NOTHING)

    def take(self, found: list[torch.Tensor]) -> None:
        """Puts what is in the places now among the tensors that the function finds."""
        for i, place in self._taken:
            found[i] = self._now(place)

    def given(self, found: list[torch.Tensor], first: int) -> list[int]:
        """Which tensors in places nobody else has, among the inputs of the program, where those of `found` begin with
        this number: after the call they are let go.
        """
        uses, uses_of_memory = _uses_alone()
        return [
            first + i
            for i, wholly in self._may_give
            if _memory_uses(t := found[i]) == uses_of_memory
            and not (wholly and (t._use_count() != uses or sys.getrefcount(t) > _REFERENCES))
        ]

    def give(self, made: list[torch.Tensor], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Takes what belongs into the places from the end of what the program gave, and leaves it there."""
        count = len(made) - len(self._places)
        for (holder, key, _), t in zip(self._places, self._results(made[count:], inputs), strict=True):
            if holder is None:
                inputs[key].data = t
            else:
                holder[key] = t
        return made[:count]


# Of a tensor in a place: that of the place, of what is found, of the inputs, and of who counts.
_REFERENCES = 5


def _memory_uses(t: torch.Tensor) -> int:
    return torch._C._storage_Use_Count(t.untyped_storage()._cdata)


@functools.cache
def _uses_alone() -> tuple[int, int]:
    """How often a tensor that one variable has is used, and its memory; this differs between versions of PyTorch."""
    t = torch.empty(1)
    return t._use_count(), _memory_uses(t)


def _kind(before: Any, is_taken: bool) -> Any:
    """What has to be in a place: any tensor where the program takes it, and else one that is alike to Python."""
    if not isinstance(before, torch.Tensor):
        return before
    return torch.Tensor if is_taken else _looks(before)


def _looks(t: torch.Tensor) -> tuple:
    return t.dtype, t.shape, t.device, t.requires_grad
