"""One program for all sizes up to a bound.

A call of a new size runs the function at that size, and at the bound if that is new, without computing anything; the
engine compares what the two record and makes the program (`bounded.rs`). Then arguments are padded to the bound, and
results are views of what the program gives.

A bound is a multiple of most numbers, so that functions that pad to a multiple, or cut into pieces, do there what they
do at such sizes alone. Where the two record other operations, one less is a bound, too, for the sizes up to there.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from oxitorch import _activate
from oxitorch._dims import Dim, below, sample_below
from oxitorch._padding import blank, padded
from oxitorch.jit._function import Function
from oxitorch.jit._numbered import OfTheseAlone
from oxitorch.jit._pieces import differ

# Sizes that are known of one kind of call; with one more the one that came first is forgotten.
_MAX_SIZES = 4096
# Functions that are known of one size, by what they ask of numbers.
_MAX_FUNCTIONS = 16
# What the function makes in its first call is not there yet, so nothing is known of later ones.
_NOT_YET = "not yet"
# Programs that are made ahead.
_MAX_BOUNDS = 64


class Marks:
    """The dimensions that vary in the arguments of a kind of call."""

    def __init__(self, places: list[tuple[int, int, Dim]]):
        # Numbers of tensors, dimensions.
        self._places = places

    def sizes(self, tensors: list[torch.Tensor]) -> tuple[int, ...]:
        return tuple([tensors[i].shape[d] for i, d, _ in self._places])

    def bounds(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        return tuple([dim.bound(n) for n, (_, _, dim) in zip(sizes, self._places, strict=True)])

    def all_bounds(self) -> list[tuple[int, ...]]:
        """The sizes at all bounds; dimensions that are one `Dim` have one size.

        Raises:
            ValueError: a `Dim` has no largest bound, or there are too many.
        """
        dims = list({id(dim): dim for *_, dim in self._places}.values())
        bounds = [dim.bounds() for dim in dims]
        for dim, found in zip(dims, bounds, strict=True):
            if found is None:
                raise ValueError(f"torch.tpu.jit: {dim} has no largest size: give it max= or buckets=")
        if (count := math.prod(map(len, bounds))) > _MAX_BOUNDS:
            raise ValueError(
                f"torch.tpu.jit: there are {count} programs for all bounds, {_MAX_BOUNDS} at most are made"
            )
        each = (dict(zip(map(id, dims), chosen, strict=True)) for chosen in itertools.product(*bounds))
        return [tuple([sizes[id(dim)] for *_, dim in self._places]) for sizes in each]

    def below(self, bounds: tuple[int, ...]) -> list[tuple[int, ...]]:
        """The sizes up to these bounds at which there may be other programs: some of them are one less."""
        dims = {id(dim): (dim, n) for n, (_, _, dim) in zip(bounds, self._places, strict=True)}
        less = {key: (n, n - 1) if n > 1 and dim.bound(n - 1) == n else (n,) for key, (dim, n) in dims.items()}
        each = (dict(zip(less, chosen, strict=True)) for chosen in itertools.product(*less.values()))
        sizes = [tuple([of[id(dim)] for *_, dim in self._places]) for of in each]
        return [own for own in sizes if own != bounds]

    def sample(self, bounds: tuple[int, ...]) -> tuple[int, ...]:
        return tuple([dim.sample(n) for n, (_, _, dim) in zip(bounds, self._places, strict=True)])

    @property
    def arguments(self) -> set[int]:
        """The numbers of the tensors."""
        return {i for i, *_ in self._places}

    @property
    def dims(self) -> list[Dim]:
        return [dim for *_, dim in self._places]

    def resized(
        self, tensors: list[torch.Tensor], sizes: tuple[int, ...], make: Callable = padded
    ) -> list[torch.Tensor]:
        """These tensors with these sizes, as `make` gives a tensor of another shape."""
        shapes: dict[int, list[int]] = {}
        for (i, d, _), n in zip(self._places, sizes, strict=True):
            shapes.setdefault(i, list(tensors[i].shape))[d] = n
        resized = list(tensors)
        for i, shape in shapes.items():
            resized[i] = make(tensors[i], shape)
        return resized

    def have_gradients(self, tensors: list[torch.Tensor]) -> bool:
        return any(tensors[i].requires_grad for i, _, _ in self._places)


def _remark(text: str) -> None:
    _activate.core().remark(text)


def _shapes(tensors: list[torch.Tensor]) -> tuple[torch.Size, ...]:
    return tuple([t.shape for t in tensors])


class Sizes:
    """What is known of a kind of call with sizes that vary."""

    def __init__(self, marks: Marks):
        self.marks = marks
        # By the shapes of a call: how it is made, with its bounds; None if the function is a program of these alone.
        self._functions: dict[tuple, list[tuple[Function, tuple[int, ...]]] | None] = {}
        # By the shapes of arguments at a bound.
        self._bounds: dict[tuple, list[Function]] = {}

    def call(self, tensors: list[torch.Tensor], numbers: Sequence = ()) -> tuple[bool, Any]:
        """Whether a program is known for these arguments, and the results."""
        resized: dict[tuple[int, ...], list[torch.Tensor]] = {}
        for function, bounds in self._functions.get(_shapes(tensors)) or ():
            if not function.is_current():
                continue
            if bounds not in resized:
                resized[bounds] = self.marks.resized(tensors, bounds)
            done, results = function.call(resized[bounds], tensors, numbers)
            if not done:
                continue
            core = _activate.core()
            if core.is_absent():
                for stepped in function.optimizers:
                    # What is kept of a device that is not there is kept by step.
                    core.step(id(stepped.optimizer), False, False)
            return True, results
        return False, None

    def number(self, tensors: list[torch.Tensor]) -> int | None:
        """The number of what a call with these arguments goes by; None if nothing is known."""
        known = self._functions.get(_shapes(tensors)) or ()
        return next((f.number for f, _ in known if f.is_current()), None)

    def known(self, tensors: list[torch.Tensor]) -> list[Function]:
        """What is known of calls of these sizes, the latest first."""
        return [function for function, _ in self._functions.get(_shapes(tensors)) or ()]

    def is_exact(self, tensors: list[torch.Tensor]) -> bool:
        """Whether it is known that no program is for these and other sizes."""
        return self._functions.get(_shapes(tensors), False) is None

    def learn(self, trace: Callable[[list[torch.Tensor]], Function | None], tensors: list[torch.Tensor]) -> bool:
        """Makes the program for these arguments; whether there is one. `trace` runs the function on others."""
        bounds = self.marks.bounds(self.marks.sizes(tensors))  # raises for a size that is too large
        function = None
        if self.marks.have_gradients(tensors):
            _remark("for this size alone: an argument whose size varies requires gradients")
        else:
            try:
                at_sizes = functools.cache(lambda sizes: trace(self.marks.resized(tensors, sizes, blank)))
                function, bounds, why = self._found(trace, at_sizes, tensors, bounds)
                if why is _NOT_YET:
                    return False
                if function is None and why:
                    _remark(f"for this size alone: {why}")
            except OfTheseAlone as e:
                _remark(f"for these numbers alone: {e}")
            except Exception as e:
                # At other sizes than these it may fail; if it does at these, the call raises it.
                _remark(f"for this size alone: at another size the function raises {e}")
        if len(self._functions) >= _MAX_SIZES:
            self._functions.pop(next(iter(self._functions)))
        known = self._functions.setdefault(_shapes(tensors), [])
        if function is None or known is None:
            self._functions[_shapes(tensors)] = None
            return False
        known.insert(0, (function, bounds))
        del known[_MAX_FUNCTIONS:]
        return True

    def _found(
        self, trace, at_sizes: Callable, tensors, bounds: tuple[int, ...]
    ) -> tuple[Function | None, tuple[int, ...], str]:
        """What calls of these sizes go by, and its bounds; or why there is nothing."""
        sizes = self.marks.sizes(tensors)
        sample = self.marks.sample(bounds) if sizes == bounds else sizes
        if sample == bounds:
            return None, bounds, ""
        function, why = self._bounded(trace, tensors, at_sizes(sample), bounds, sizes == bounds)
        less = below(sizes, bounds, self.marks.dims)
        if function is not None or why is _NOT_YET or less is None:
            return function, bounds, why
        try:
            sample = sample_below(less) if sizes == less else sizes
            function, other = self._bounded(trace, tensors, at_sizes(sample), less, sizes == less)
        except OfTheseAlone:
            raise
        except Exception:
            return None, bounds, why  # it did not raise at the bound, which says more of what the user wrote
        return function, less, other if other is _NOT_YET else why

    def _bounded(self, trace, tensors, at_size: Function | None, bounds, at_bound: bool) -> tuple[Function | None, str]:
        """What calls go by whose sizes are padded to these bounds; or why there is nothing."""
        if at_size is None:
            return None, _NOT_YET
        if at_size.told.keys() & self.marks.arguments:
            return None, "it is cut at places of which there are more or fewer in other calls"
        core = _activate.core()
        largest = self.marks.resized(tensors, bounds, blank)
        known = self._bounds.setdefault(_shapes(largest), [])
        at_bounds = next((f for f in known if f.is_current() and f.takes_as(at_size)), None)
        if at_bounds is None:
            at_bounds = trace(largest)
            if at_bounds is None:
                return None, ""
            known.insert(0, at_bounds)
            del known[_MAX_FUNCTIONS:]
        number = core.new_graph()
        device = next((t.device.index for t in tensors if t.device.type == "tpu"), None)
        device = torch.tpu.current_device() if device is None else device
        why = core.bounded(at_bounds.number, at_size.number, at_bound, number, device)
        if why is not None:
            core.forget_graph(number)
            return None, differ(at_size.pieces, at_bounds.pieces) or why
        # What the function gives and computes besides tensors is that of the call's own size.
        own = at_bounds if at_bound else at_size
        return own.renumbered(number, own.formulas), ""
