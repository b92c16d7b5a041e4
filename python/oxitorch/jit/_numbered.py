"""One program for all numbers that a function is given."""

from typing import Any

import torch

from oxitorch import _activate
from oxitorch.jit._dry import Dry
from oxitorch.jit._function import Function
from oxitorch.jit._numbers import Run

# Functions that are known of one kind of call, by what they ask of its numbers.
_MAX_FUNCTIONS = 16
# Tries to trace it so; after these calls are traced for each number.
_MAX_TRIES = 2


class OfTheseAlone(Exception):
    """What is known of a function with some numbers is not so with others."""


class Numbered:
    """What is known of a kind of call with numbers that vary."""

    def __init__(self):
        self.functions: list[Function] = []
        # How often that did not come about, and before the latest try.
        self._failed = self._failed_before = 0

    def call(self, tensors: list[torch.Tensor], numbers: list) -> tuple[bool, Any]:
        """Whether a program is known for these, and the results."""
        for function in self.functions:
            if function.is_current():
                done, results = function.call(tensors, numbers=numbers)
                if done:
                    return True, results
        return False, None

    def learn(self, jitted, kind, tensors: list[torch.Tensor], numbers: list, names: list[str]) -> bool:
        """Makes what calls go by with these numbers, and others of which the function asks the same; if it can."""
        if self._failed >= _MAX_TRIES:
            return False
        self._failed_before = self._failed
        try:
            function = self.trace(jitted, kind, tensors, numbers, names)
        except OfTheseAlone as e:
            self._failed += 1
            _activate.core().remark(f"for these numbers alone: {e}")
            return False
        except Exception as e:
            # With plain numbers it may work; if it does not, the call raises it.
            self._failed = _MAX_TRIES
            _activate.core().remark(f"for these numbers alone: with others the function raises {type(e).__name__}: {e}")
            return False
        if function is None or not kind.moved.may_call(function):
            return False
        self.functions.insert(0, function)
        del self.functions[_MAX_FUNCTIONS:]
        return True

    def raised(self) -> None:
        """The function raises with plain numbers, too: nothing is known yet of what it does with others."""
        self._failed = self._failed_before

    def trace(self, jitted, kind, tensors: list[torch.Tensor], numbers: list, names: list[str]) -> Function | None:
        """What is known of the function with any numbers; None if this call is to be traced by itself.

        Raises:
            OfTheseAlone: it will never be known.
        """
        first = Run(numbers, 0)
        function = Dry(jitted, kind, tensors, names, first).function()
        if function is None:
            return None  # what it makes in its first call is not there yet
        if not first.stands and not first.positions:
            formulas = first.finish()
            if all(type(seen) is bool for seen in formulas.asked.values()):
                # What Python asks of a number's type is not seen.
                same = self._same(function, Dry(jitted, kind, tensors, names, shown=numbers).function())
                if same is not None:
                    return function.renumbered(same, formulas)
                self._failed = _MAX_TRIES  # so it is with each number
            where = f" at {first.line}" if first.line else ""
            raise OfTheseAlone(f"no operation takes them, Python does{where}")
        if kind.elsewhere is not None:
            # Code that finds a number asks what class it is of more often than code that is given one.
            plain = Dry(jitted, kind, tensors, names, shown=numbers).function()
            if plain is None or plain.trail != function.trail:
                raise OfTheseAlone("what is computed depends on the class of a number that it finds")
        formulas = first.finish()
        moved = first.moved()
        functions, runs = [function], [first]
        for i in moved or [None]:
            for step in (1, -1):
                other = list(numbers)
                if i is not None:
                    other[i] += step
                run = Run(other, len(runs))
                try:
                    function = Dry(jitted, kind, tensors, names, run).function()
                except IndexError:
                    continue  # behind the last
                if function is not None and formulas.same_as(run.finish()):
                    functions.append(function)
                    runs.append(run)
                    break
            else:
                raise OfTheseAlone("what it computes of them depends on them")
        stands = [[[run.stands[p] for run in runs] for p in first.stands_of(t)] for t in (float, int)]
        positions = [[run.value(p) for run in runs] for p in first.positions]
        for place, values in zip(first.positions, positions, strict=True):
            if len(set(values)) == 1:
                formulas.asked[place] = values[0]  # nobody has seen what moves with it
        core = _activate.core()
        number = core.new_graph()
        why = core.numbered([f.number for f in functions], *stands, positions, number)
        if why is not None:
            core.forget_graph(number)
            raise OfTheseAlone(why)
        return functions[0].renumbered(number, formulas)

    def _same(self, function: Function, other: Function | None) -> int | None:
        """The program of two functions that take no numbers, if they are the same."""
        if other is None:
            return None
        core = _activate.core()
        number = core.new_graph()
        if core.numbered([function.number, other.number], [], [], [], number) is None:
            return number
        core.forget_graph(number)
        return None
