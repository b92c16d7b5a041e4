"""One program for all numbers that a function is given."""

from typing import Any

from oxitorch import _activate
from oxitorch.jit._dry import Dry
from oxitorch.jit._function import Function
from oxitorch.jit._numbers import Run

# Functions that are known of one kind of call, by what they ask of its numbers.
_MAX_FUNCTIONS = 16
# Tries to trace it so; after these calls are traced for each number.
_MAX_TRIES = 2


class Numbered:
    """What is known of a kind of call with numbers that vary."""

    def __init__(self, tensors: int):
        # How many of the leaves are tensors; the others are numbers.
        self._tensors = tensors
        self._functions: list[Function] = []
        # How often that did not come about.
        self._failed = 0

    def call(self, leaves: list) -> tuple[bool, Any]:
        """Whether a program is known for these tensors and numbers, and the results."""
        tensors, numbers = leaves[: self._tensors], leaves[self._tensors :]
        for function in self._functions:
            if function.is_current():
                done, results = function.call(tensors, numbers=numbers)
                if done:
                    return True, results
        return False, None

    def learn(self, jitted, kind, leaves: list, names: list[str]) -> bool:
        """Makes what calls go by with these numbers, and others of which the function asks the same; if it can."""
        if self._failed >= _MAX_TRIES:
            return False
        try:
            function, why = self._trace(jitted, kind, leaves, names)
        except Exception as e:
            # With plain numbers it may work; if it does not, the call raises it.
            function, why = None, f"with others the function raises {type(e).__name__}: {e}"
            self._failed = _MAX_TRIES
        if why is not None:
            self._failed += 1
            _activate.core().remark(f"for these numbers alone: {why}")
        if function is None:
            return False
        self._functions.insert(0, function)
        del self._functions[_MAX_FUNCTIONS:]
        return True

    def _trace(self, jitted, kind, leaves: list, names: list[str]) -> tuple[Function | None, str | None]:
        """The function; or why it is none for other numbers; or neither, if the call is to be traced by itself."""
        tensors, numbers = leaves[: self._tensors], leaves[self._tensors :]
        first = Run(numbers, 0)
        function = Dry(jitted, kind, tensors, names, first).function()
        if function is None:
            return None, None  # what it makes in its first call is not there yet
        if not first.stands and not first.positions:
            where = f" at {first.line}" if first.line else ""
            return None, f"no operation takes them, Python does{where}"
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
                return None, "what it computes of them depends on them"
        stands = [[[run.stands[p] for run in runs] for p in first.stands_of(t)] for t in (float, int)]
        positions = [[run.value(p) for run in runs] for p in first.positions]
        core = _activate.core()
        number = core.new_graph()
        why = core.numbered([f.number for f in functions], *stands, positions, number)
        if why is not None:
            core.forget_graph(number)
            return None, why
        return functions[0].renumbered(number, formulas), None
