"""Python's numbers among the arguments of a function, as operands of its program.

A kind of call whose numbers differ from those of an earlier one is traced with `torch.SymFloat` and `torch.SymInt` in
their places. These note what the function computes of them, and what it asks of them: each answer is a condition under
which later calls go by the trace. An operation gets a value that stands for a number. The function is run twice, with
other values, and the engine compares what the runs record (`numbered.rs`): where the values stand, a call has its own
numbers. Where a number is a position (`x[:, n]`), there is one more run for each that a position follows from, with the
next or the last number, to see what moves with it. Where anything else differs, the function is traced for each number.
"""

import math
import operator
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.fx.experimental.sym_node  # gives SymFloat and SymInt their operators
from torch.overrides import TorchFunctionMode

from oxitorch.jit._effects import user_line

_SYMBOLIC = (torch.SymFloat, torch.SymInt, torch.SymBool)

# More operations on numbers than these make a call slower than its program is worth.
_MAX_STEPS = 1024


class Formulas:
    """What a function computes of its numbers, and what has to hold of them.

    Attributes:
        asked: numbers that Python saw, by place, with what it saw.
        given: places of those that operations take: floats, ints, and then positions.
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
        except (ArithmeticError, ValueError, TypeError):
            return None  # the function raises it
        for place, seen in self.asked.items():
            if not _is_same(values[place], seen):
                return None
        return values if all(type(values[i]) in _DTYPES for i in self.given) else None

    def tensors(self, values: list) -> list[torch.Tensor]:
        """What the program is given of these, in the host's memory (0-d)."""
        return [torch.tensor(values[i], dtype=_DTYPES[type(values[i])]) for i in self.given]

    def same_as(self, other: "Formulas") -> bool:
        """Whether two runs computed, asked and took the same."""
        return (self._steps, self.asked, self.given) == (other._steps, other.asked, other.given)

    def like(self, other: "Formulas") -> bool:
        """The same but for constants, which follow from sizes where two runs are of two sizes."""
        mine, others = ([(type(fn) if type(fn) is _Constant else fn, of) for fn, of in f._steps] for f in (self, other))
        return (mine, self.asked, self.given) == (others, other.asked, other.given)


def _is_same(a, b) -> bool:
    """Whether numbers are the same: zeros of different signs are not, though they are equal."""
    return type(a) is type(b) and a == b and (a != 0 or str(a) == str(b))


_DTYPES = {float: torch.float64, int: torch.int64}

# Numbers up to a size, and the range of those that stand for them, which no function computes with. Operations refuse
# numbers by their signs, probabilities of more than 1, and what does not fit a dtype; so what stands for a number is
# refused where the number is.
_RANGES = {
    float: [(1.0, 0.25, 0.75), (65504.0, 2.25, 3.75), (None, 1e5, 2e5)],
    int: [(2**15 - 1, 2**13, 2**14), (2**31 - 1, 2**17, 2**18), (None, 2**33, 2**34)],
}


class Run:
    """One run of a function on numbers that are noted; `seed` chooses the values that stand for them."""

    def __init__(self, numbers: Sequence, seed: int):
        self.formulas = Formulas()
        self._values = list(numbers)
        self._known: dict[tuple, int] = {}
        self._random = random.Random(seed)
        # By place.
        self.stands: dict[int, float | int] = {}
        # Places of numbers that are positions.
        self.positions: list[int] = []
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

    def plain(self, func, args: tuple, kwargs: dict, on_device: bool) -> tuple[tuple, dict]:
        """The arguments of an operation, with values that stand for the numbers.

        On the host, where it computes at once, it gets the numbers themselves, and Python has seen them.
        """
        schema = {a.name: str(a.type) for a in func._schema.arguments}
        given = dict(zip(schema, args, strict=False)) | kwargs
        positions = [name for name in ("index", "start", "end") if isinstance(given.get(name), torch.SymInt)]
        last = _POSITIONS[func](given) if positions and func in _POSITIONS else -1
        plain = {
            name: self._position(x, last)
            if name in positions and last >= 0 and on_device
            else self._plain(x, schema[name], on_device)
            for name, x in given.items()
        }
        return tuple([plain[name] for name in list(schema)[: len(args)]]), {name: plain[name] for name in kwargs}

    def _position(self, x: torch.SymInt, last: int) -> int:
        """A position along a dimension, up to this one."""
        place = x.node.place
        position = self._values[place]
        if not 0 <= position <= last:
            return self.ask(place)
        # What is before the first or behind the last one is something else, or an error.
        self._holds(operator.ge, place, 0)
        self._holds(operator.le, place, last)
        if place not in self.positions:
            self.positions.append(place)
        return position

    def _plain(self, x: Any, type_: str, on_device: bool) -> Any:
        if isinstance(x, (list, tuple)):
            return type(x)([self._plain(item, type_, on_device) for item in x])
        if not isinstance(x, _SYMBOLIC):
            return x
        place = x.node.place
        is_size = any(name in type_ for name in ("Int", "int", "Bool", "bool"))
        if not on_device or is_size or isinstance(x, torch.SymBool):
            return self.ask(place)
        value = self._values[place]
        if not value or not math.isfinite(value):
            return self.ask(place)
        is_positive = self._holds(operator.gt, place, 0)
        size = self.compute(operator.abs, (place,)).place
        low, high = next(
            (low, high)
            for most, low, high in _RANGES[type(value)]
            if most is None or self._holds(operator.le, size, most)
        )
        if place not in self.stands:
            choose = self._random.randint if isinstance(value, int) else self._random.uniform
            stand = choose(low, high)
            self.stands[place] = stand if is_positive else -stand
        return self.stands[place]

    def _holds(self, fn: Callable, place: int, limit: float) -> bool:
        """A condition of later calls."""
        return self.ask(self.compute(fn, (place, self.constant(limit).place)).place)

    def moved(self) -> list[int]:
        """The arguments that positions follow from, unless Python saw them."""
        of: list[set[int]] = [{i} for i in range(len(self.arguments))]
        for _, operands in self.formulas._steps:
            of.append(set().union(*[of[i] for i in operands]))
        return sorted(set().union(*[of[p] for p in self.positions]) - set(self.formulas.asked))

    def finish(self) -> Formulas:
        """What calls go by, when the run has ended."""
        self.formulas.given = self.stands_of(float) + self.stands_of(int) + self.positions
        return self.formulas

    def stands_of(self, type_: type) -> list[int]:
        """The places of the numbers of a type that operations take."""
        return sorted(p for p, x in self.stands.items() if type(x) is type_)


def _index(shape: str) -> Callable[[dict], int]:
    return lambda given: _size(given, shape) - 1


def _end(shape: str) -> Callable[[dict], int]:
    return lambda given: _size(given, shape)


def _size(given: dict, shape: str) -> int:
    of = given[shape]
    return (of.shape if isinstance(of, torch.Tensor) else of)[given.get("dim", 0)]


# Operations that take positions along a dimension, which may move, and the last one.
_ATEN = torch.ops.aten
_POSITIONS = {
    _ATEN.select.int: _index("self"),
    _ATEN.select_scatter.default: _index("self"),
    _ATEN.select_backward.default: _index("input_sizes"),
    _ATEN.slice.Tensor: _end("self"),
    _ATEN.slice_scatter.default: _end("self"),
    _ATEN.slice_backward.default: _end("input_sizes"),
}


class Unread(TorchFunctionMode):
    """Has numbers that are traced select along a dimension where they are indices, and be elements of the tensors that
    are made of them: PyTorch would read them.

    `stands_for` is told of tensors of the host that are made of such numbers, what makes them on a device, and what
    asks for the numbers.
    """

    def __init__(self, stands_for: Callable[[torch.Tensor, Callable, Callable], None]):
        super().__init__()
        self._stands_for = stands_for

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in _MAKE_TENSORS:
            elements = _Elements.of(func, args, kwargs or {})
            if elements is not None:
                return self._made(elements)
        if func is torch.Tensor.__getitem__:
            return _selected(*args)
        if func is torch.Tensor.__setitem__:
            x, index, value = args
            part = _selected(x, index, take=False)
            return func(x, index, value) if part is None else func(part, ..., value)
        return func(*args, **(kwargs or {}))

    def _made(self, elements: "_Elements") -> torch.Tensor:
        if elements.device.type == "tpu":
            made = elements.on(elements.device)
        else:
            made = torch.tensor([_value(x) for x in elements.flat], dtype=elements.dtype, device=elements.device)
            made = made.reshape(elements.shape)
            self._stands_for(made, elements.on, elements.ask)
        return made.requires_grad_() if elements.requires_grad else made


_MAKE_TENSORS = {torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor}
# A tensor of more numbers is made anew for other ones.
_MAX_ELEMENTS = 256


class _Elements(NamedTuple):
    """What a tensor is to be made of: numbers, some of which are traced."""

    flat: list
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @staticmethod
    def of(func: Callable, args: tuple, kwargs: dict) -> "_Elements | None":
        """None of what is no such tensor."""
        like = args[0] if func is torch.Tensor.new_tensor else None
        given = args if like is None else args[1:]
        if len(given) != 1 or not {*kwargs} <= {"dtype", "device", "requires_grad"}:
            return None
        found = _flat(given[0])
        if found is None or not any(isinstance(x, _SYMBOLIC) for x in found[0]) or len(found[0]) > _MAX_ELEMENTS:
            return None
        has_floats = any(isinstance(x, (float, torch.SymFloat)) for x in found[0])
        dtype = (torch.get_default_dtype() if has_floats else torch.int64) if like is None else like.dtype
        device = torch.get_default_device() if like is None else like.device
        return _Elements(
            *found,
            kwargs.get("dtype") or dtype,
            torch.device(device if kwargs.get("device") is None else kwargs["device"]),
            bool(kwargs.get("requires_grad")),
        )

    def ask(self) -> None:
        for x in self.flat:
            if isinstance(x, _SYMBOLIC):
                x.node.seen()

    def on(self, device: torch.device) -> torch.Tensor:
        each = [torch.full((), x, dtype=self.dtype, device=device) for x in self.flat]
        return torch.stack(each).reshape(self.shape)


def _flat(data: Any) -> tuple[list, tuple[int, ...]] | None:
    """The numbers in nested lists of one length each, and how many there are; None of anything else."""
    if not isinstance(data, (list, tuple)):
        plain = type(data) in (int, float) or isinstance(data, (torch.SymInt, torch.SymFloat))
        return ([data], ()) if plain else None
    rows = [_flat(row) for row in data]
    if not rows or any(row is None or row[1] != rows[0][1] for row in rows):
        return None
    return [x for row in rows for x in row[0]], (len(rows), *rows[0][1])


def _value(x: Any) -> Any:
    return x.node._value() if isinstance(x, _SYMBOLIC) else x


def _selected(x: torch.Tensor, index: Any, take: bool = True) -> torch.Tensor | None:
    """`x[index]`; None if `take` is not set and the index has no number that is traced."""
    items = index if isinstance(index, tuple) else (index,)
    plain = (int, slice, torch.SymInt, type(None), type(...))
    numbers = [item for item in items if isinstance(item, torch.SymInt)]
    if not numbers or not all(isinstance(item, plain) and not isinstance(item, bool) for item in items):
        return x[index] if take else None
    rest = x.dim() - sum(item is not None and item is not ... for item in items)
    part = x[tuple([slice(None) if isinstance(item, torch.SymInt) else item for item in items])]
    dim = 0
    for item in items:
        if isinstance(item, torch.SymInt):
            part = part.select(dim, item)
        elif item is ...:
            dim += rest
        elif not isinstance(item, int):
            dim += 1
    return part


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
