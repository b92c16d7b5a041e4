"""What a function computes on the host of tensors that it finds there: `AveragedModel` counts its updates so.

No program does that. It is noted, and done again in each call, on copies. What Python reads on the way is a condition
of the call, what the device takes is given to the program, and what the copies hold in the end is written when that was
launched.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map_only

from oxitorch.jit._values import bits_of, kind_of

# Of tensors with which what is done is noted.
_MAX_BYTES = 1 << 20


class _Slot(int):
    """The number of a tensor among those that are noted."""


class _Constant(NamedTuple):
    """A tensor that is the same in each call, until an operation writes to it."""

    value: torch.Tensor


class _Op(NamedTuple):
    """An operation. Without one, what Python read of a tensor, or that it is an input of the program."""

    func: Callable | None
    args: tuple
    kwargs: dict
    results: tuple[int, ...]
    seen: torch.Tensor | None = None
    place: int = 0

    @property
    def slots(self) -> set[int]:
        found: set[int] = set(self.results)
        tree_map_only(_Slot, found.add, (self.args, self.kwargs))
        return found


class HostOps:
    """The operations of a run on tensors of the host that another call may find changed."""

    def __init__(self) -> None:
        self._ops: list[_Op] = []
        # By the ids of tensors, which are held so that no other has them.
        self._slots: dict[int, _Slot] = {}
        self._held: list[torch.Tensor] = []
        # Tensors that were there before the function, by slot, with what they held.
        self._found: dict[_Slot, tuple[torch.Tensor, torch.Tensor]] = {}
        self._written: set[int] = set()
        # Roots of what Python read of tensors that are not noted.
        self._unplaced: list[torch.Tensor] = []

    def find(self, t: torch.Tensor) -> None:
        """Meets a tensor that was there before. What is done with one that is large is not noted."""
        if t.untyped_storage().nbytes() <= _MAX_BYTES:
            self._found[self._add(t)] = t, t.detach().clone()

    def knows(self, taken: list[torch.Tensor], is_constant: Callable[[torch.Tensor], bool]) -> bool:
        """Whether what an operation does that takes these can be noted."""
        return all(id(t) in self._slots or is_constant(t) for t in taken)

    def _add(self, t: torch.Tensor) -> _Slot:
        slot = self._slots[id(t)] = _Slot(len(self._held))
        self._held.append(t)
        return slot

    def is_written(self, t: torch.Tensor) -> bool:
        return _storage(t) in self._written

    def before(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """The arguments of an operation as they are noted: what is the same in each call is copied."""

        def of(t: torch.Tensor) -> Any:
            slot = self._slots.get(id(t))
            return _Constant(t.detach().clone()) if slot is None else slot

        return tree_map_only(torch.Tensor, of, (args, kwargs))

    def note(self, func: Callable, noted: tuple[tuple, dict], results: Any, writes: torch.Tensor | None) -> None:
        made = [t for t in results if isinstance(t, torch.Tensor)] if isinstance(results, (list, tuple)) else [results]
        if not all(isinstance(t, torch.Tensor) for t in made):
            return  # Python has read it
        if writes is not None:
            self._written.add(_storage(writes))
        slots = tuple(slot if (slot := self._slots.get(id(t))) is not None else self._add(t) for t in made)
        self._ops.append(_Op(func, *noted, slots))

    def read(self, t: torch.Tensor, roots: Sequence[torch.Tensor]) -> None:
        """Python reads a tensor, which was made of these."""
        slot = self._slots.get(id(t))
        if slot is None:
            self._unplaced += roots
        else:
            self._ops.append(_Op(None, (slot,), {}, (), seen=bits_of(t).clone()))

    def take(self, t: torch.Tensor, place: int) -> bool:
        """The program takes a tensor as its input of this number; whether each call can make it."""
        slot = self._slots.get(id(t))
        if slot is not None:
            self._ops.append(_Op(None, (slot,), {}, (), place=place))
        return slot is not None

    def undo(self) -> None:
        for t, before in self._found.values():
            if self.is_written(t):
                t.detach().copy_(before)

    def finish(self, first: int) -> "Counts | None":
        """What each call does; nothing if the function writes to no tensor that was there before, and the device takes
        none that is made of them. `first`: how many inputs of the program are arguments.
        """
        written = {slot: t for slot, (t, _) in self._found.items() if self.is_written(t)}
        taken = [op for op in self._ops if op.func is None and op.seen is None]
        related = set(written).union(*[op.slots for op in taken])
        if not related:
            return None
        while any(related & op.slots and not op.slots <= related for op in self._ops):
            for op in self._ops:
                if related & op.slots:
                    related |= op.slots
        found = {slot: t for slot, (t, _) in self._found.items() if slot in related}
        ops = [op._replace(place=op.place - first) for op in self._ops if related & op.slots]
        return Counts(found, written, ops)

    def is_whole(self) -> bool:
        """Whether all that Python read of what the function writes to was seen."""
        return not any(map(self.is_written, self._unplaced))


class Counts:
    """What each call computes on the host.

    Attributes:
        tensors: what it finds there for that.
    """

    def __init__(self, found: dict[_Slot, torch.Tensor], written: dict[_Slot, torch.Tensor], ops: list[_Op]):
        self._found = [(slot, t, kind_of(t)) for slot, t in found.items()]
        self._written = list(written.items())
        self._ops = ops
        self.tensors = list(found.values())

    def values(self, inputs: list[torch.Tensor]) -> list[torch.Tensor] | None:
        """What the tensors that are written to will hold after a call; None if Python would read something else on the
        way. Puts what the program takes among its inputs.
        """
        at: dict[int, torch.Tensor] = {}
        with torch.no_grad():
            for slot, t, kind in self._found:
                if kind_of(t) != kind:
                    return None
                at[slot] = t.clone()
            for func, args, kwargs, results, seen, place in self._ops:
                if func is not None:
                    args, kwargs = _filled(args, at), {name: _filled(x, at) for name, x in kwargs.items()}
                    made = func(*args, **kwargs)
                    at.update(zip(results, made if isinstance(made, (list, tuple)) else [made], strict=True))
                elif seen is None:
                    inputs[place] = at[args[0]].clone()
                elif not torch.equal(bits_of(at[args[0]]), seen):
                    return None
        return [at[slot] for slot, _ in self._written]

    def write(self, values: list[torch.Tensor]) -> None:
        with torch.no_grad():
            for (_, t), value in zip(self._written, values, strict=True):
                t.copy_(value)


def _filled(x: Any, at: dict[int, torch.Tensor]) -> Any:
    """An argument of an operation, with the tensors of a call."""
    if isinstance(x, _Slot):
        return at[x]
    if isinstance(x, _Constant):
        return x.value.clone()
    return type(x)([_filled(item, at) for item in x]) if type(x) in (list, tuple) else x


def _storage(t: torch.Tensor) -> int:
    return t.untyped_storage()._cdata
