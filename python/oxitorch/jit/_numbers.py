"""Python's numbers among the arguments of a function, as operands of its program.

A kind of call whose numbers differ from those of an earlier one is traced with `torch.SymFloat` and `torch.SymInt` in
their places. These note what the function computes of them, and what it asks of them: each answer is a condition under
which later calls go by the trace. An operation gets a value that stands for a number. The function is run twice, with
other values, and the engine compares what the two runs record (`numbered.rs`): where the values stand, a call has its
own numbers, and where anything else differs, the function is traced for each number.
"""

import math
import operator
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx.experimental.sym_node  # gives SymFloat and SymInt their operators

from oxitorch.jit._effects import user_line

_SYMBOLIC = (torch.SymFloat, torch.SymInt, torch.SymBool)

# More operations on numbers than these make a call slower than its program is worth.
_MAX_STEPS = 1024


class Formulas:
    """What a function computes of its numbers, and what has to hold of them.

    Attributes:
        asked: numbers that Python saw, by place, with what it saw.
        given: places of those that operations take: floats, then ints.
    """

    def __init__(self):
        # Each computes one number of those before it.
        self._steps: list[tuple[Callable, tuple[int, ...]]] = []
        self.asked: dict[int, Any] = {}
        self.given: list[int] = []

    def values(self, numbers: Sequence) -> list | None:
        """All numbers of a call with these, or None if it has to be traced."""
        values = list(numbers)
        try:
            for compute, operands in self._steps:
                values.append(compute(*[values[i] for i in operands]))
        except ArithmeticError:
            return None  # the function raises it
        for place, seen in self.asked.items():
            value = values[place]
            if type(value) is not type(seen) or value != seen:
                return None
        return values

    def tensors(self, values: list) -> list[torch.Tensor]:
        """What operations take of these, in the host's memory (0-d)."""
        return [torch.tensor(values[i], dtype=_DTYPES[type(values[i])]) for i in self.given]

    def same_as(self, other: "Formulas") -> bool:
        """Whether two runs computed, asked and took the same."""
        return (self._steps, self.asked, self.given) == (other._steps, other.asked, other.given)


_DTYPES = {float: torch.float64, int: torch.int64}


class Run:
    """One run of a function on numbers that are noted; `seed` chooses the values that stand for them."""

    def __init__(self, numbers: Sequence, seed: int):
        self.formulas = Formulas()
        self._values = list(numbers)
        self._known: dict[tuple, int] = {}
        self._random = random.Random(seed)
        # By place.
        self.stands: dict[int, float | int] = {}
        # The line at which Python saw a number first.
        self.line: str | None = None
        self.arguments = [_symbolic(_Node(self, i)) for i in range(len(numbers))]

    def value(self, place: int) -> Any:
        return self._values[place]

    def compute(self, fn: Callable, operands: tuple[int, ...]) -> "_Node":
        key = (fn, operands)
        place = self._known.get(key)
        if place is None:
            if len(self.formulas._steps) >= _MAX_STEPS:
                raise NotImplementedError(f"it computes more than {_MAX_STEPS} numbers")
            value = fn(*[self._values[i] for i in operands])
            place = self._known[key] = len(self._values)
            self._values.append(value)
            self.formulas._steps.append(key)
        return _Node(self, place)

    def constant(self, value: Any) -> "_Node":
        return self.compute(_Constant(value), ())

    def ask(self, place: int) -> Any:
        """The value, which Python sees."""
        if self.line is None:
            self.line = user_line()
        return self.formulas.asked.setdefault(place, self._values[place])

    def plain(self, func, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """The arguments of an operation, with values that stand for the numbers."""
        schema = {a.name: str(a.type) for a in func._schema.arguments}
        types = list(schema.values())
        return (
            tuple([self._plain(x, types[i] if i < len(types) else "") for i, x in enumerate(args)]),
            {name: self._plain(x, schema.get(name, "")) for name, x in kwargs.items()},
        )

    def _plain(self, x: Any, type_: str) -> Any:
        if isinstance(x, (list, tuple)):
            return type(x)([self._plain(item, type_) for item in x])
        if not isinstance(x, _SYMBOLIC):
            return x
        place = x.node.place
        if any(name in type_ for name in ("SymInt", "SymBool", "int", "bool")) or isinstance(x, torch.SymBool):
            return self.ask(place)  # a size, a dimension, a position
        if place not in self.stands:
            # Nothing that a function computes with, and of a size that operations take.
            is_int = isinstance(x, torch.SymInt)
            self.stands[place] = self._random.randrange(8192, 16384) if is_int else self._random.uniform(0.25, 0.75)
        return self.stands[place]

    def finish(self) -> Formulas:
        places = sorted(self.stands)
        self.formulas.given = [p for t in (float, int) for p in places if type(self.stands[p]) is t]
        return self.formulas


class _Constant:
    """Gives a number, whatever happens."""

    def __init__(self, value):
        self._value = value

    def __call__(self):
        return self._value

    def _key(self):
        return type(self._value), repr(self._value)

    def __eq__(self, other):
        return isinstance(other, _Constant) and self._key() == other._key()

    def __hash__(self):
        return hash(self._key())


class _Node:
    """A number behind a `torch.SymFloat`, a `SymInt` or a `SymBool`, as PyTorch asks it."""

    def __init__(self, run: Run, place: int):
        self._run = run
        self.place = place

    def _value(self):
        return self._run.value(self.place)

    def is_int(self):
        return type(self._value()) is int

    def is_float(self):
        return type(self._value()) is float

    def is_bool(self):
        return type(self._value()) is bool

    def is_symbolic(self):
        return True

    def is_constant(self):
        return False

    def is_nested_int(self):
        return False

    def nested_int(self):
        return None

    def maybe_as_int(self):
        return None

    def clone(self):
        return self

    def has_hint(self):
        return True

    def wrap_int(self, value):
        return self._run.constant(int(value))

    wrap_float = wrap_bool = lambda self, value: self._run.constant(value)

    def seen(self, *_):
        return self._run.ask(self.place)

    guard_int = guard_float = guard_bool = guard_size_oblivious = guard_or_false = guard_or_true = expect_true = seen
    statically_known_true = int_ = bool_ = seen

    def str(self):
        return str(self.seen())

    __str__ = __repr__ = _graph_repr = str


def _asks(fn: Callable) -> Callable:
    def method(self: _Node, *others: _Node) -> _Node:
        return self._run.compute(fn, (self.place, *[other.place for other in others]))

    return method


# PyTorch's names for what it does with such numbers. There is no floor: it makes floor division of floats of it, which
# Python rounds otherwise.
_OPERATORS = ("add", "sub", "mul", "mod", "floordiv", "truediv", "pow", "neg", "pos", "abs")
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_FUNCTIONS = ("sqrt", "cos", "cosh", "sin", "sinh", "tan", "tanh", "asin", "acos", "atan", "log2")
_METHODS: dict[str, Callable] = {
    **{name: getattr(operator, name) for name in (*_OPERATORS, *_COMPARISONS)},
    **{f"sym_{name}": getattr(math, name) for name in _FUNCTIONS},
    **dict.fromkeys(("int_truediv", "float_truediv"), operator.truediv),
    **dict.fromkeys(("pow_by_natural", "float_pow"), operator.pow),
    **dict.fromkeys(("and", "sym_and"), operator.and_),
    **dict.fromkeys(("or", "sym_or"), operator.or_),
    "int_floordiv": operator.floordiv,
    "sym_not": operator.not_,
    "sym_float": float,
    "sym_min": min,
    "sym_max": max,
    "ceil": math.ceil,
    "trunc": math.trunc,
    "round": round,
    "is_integer": float.is_integer,
}
for _name, _fn in _METHODS.items():
    setattr(_Node, _name, _asks(_fn))


def _symbolic(node: _Node) -> Any:
    return (torch.SymFloat if node.is_float() else torch.SymInt)(node)
