"""What a run of a module leaves behind: a scope for each call of a module, with the operations of its forward."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


class Unsupported(Exception):
    """What has no translation; the message says what, the place is added by who knows it."""


@dataclass(eq=False)
class Value:
    """A tensor within a scope. `shape` has ints and sympy expressions."""

    shape: tuple
    dtype: Any
    name: str | None = None  # of the local variable that held it
    node: Node | None = None  # None: an input
    index: int = 0  # among the node's results
    other_name: str | None = None  # of an input that is a part of an argument


@dataclass(frozen=True)
class Param:
    """A parameter or buffer, by its path in the root module."""

    path: str
    tensor: Any = field(compare=False, hash=False)


@dataclass(frozen=True, eq=False)
class Const:
    """A tensor that is neither computed nor the module's."""

    tensor: Any


@dataclass(frozen=True)
class Size:
    """A size that follows from the sizes of the inputs: a sympy expression."""

    expr: Any


@dataclass(eq=False)
class Node:
    """An ATen operation (`op`, an overload) or the call of a module (`path`)."""

    args: dict[str, Any]
    outs: list[Value]
    place: Place
    op: Any = None
    path: str | None = None
    method: int = 0  # which of the graphs of the module that is called
    many: bool = False  # its result is a list
    nested: tuple | None = None  # the structure of a leaf's result, of numbers of `outs`
    problem: str | None = None  # why it has no translation

    def uses(self):
        """The values among the arguments."""
        return [v for a in self.args.values() for v in leaves(a) if isinstance(v, Value)]


@dataclass(frozen=True)
class Place:
    """Where in the source an operation was called."""

    file: str = ""
    line: int = 0
    text: str = ""  # of the innermost call

    def __str__(self):
        return f"{self.file}:{self.line}"


@dataclass(eq=False)
class Scope:
    """One call of a module."""

    path: str | None
    module: Any
    parent: Scope | None = None
    inputs: list[Value] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    outputs: list = field(default_factory=list)
    keys: list[str] | None = None  # of the outputs, if they are a dict or have names
    values: dict[int, Any] = field(default_factory=dict)  # by the tensor's id
    sizes: dict[Any, str] = field(default_factory=dict)  # local names of sizes
    given_sizes: dict[str, Any] = field(default_factory=dict)  # sizes that are arguments, by their names
    code: Any = None  # of the forward
    frames: dict[int, Any] = field(default_factory=dict)
    lifted: list[Any] = field(default_factory=list)  # tensors of callers that became inputs
    method: int = 0  # which method of its class it was written as
    unused: frozenset[str] = frozenset()  # inputs, by their numbers, and sizes that its text does not have


def leaves(x):
    """What is in lists and tuples."""
    if isinstance(x, (list, tuple)):
        for y in x:
            yield from leaves(y)
    else:
        yield x


def replace(x, change):
    """The same structure with `change` of what is in it."""
    if isinstance(x, (list, tuple)):
        return type(x)(replace(y, change) for y in x)
    return change(x)
