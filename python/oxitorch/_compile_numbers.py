"""Numbers of a graph of `torch.compile` that are no sizes: where slices begin and end, and operands.

Dynamo makes a number of Python's that has changed a symbol, as it does a size. What a graph does, does not follow from
one that only says where, or that operations take as a number; so one recipe is for all of them (`numbered.rs`). Such is
a symbol if all that is made of it is a multiple of it and a term, which is the start or the end of a slice, a number
that an operation takes, or a result.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

_aten = torch.ops.aten
# Where the sizes are of what is sliced.
_SLICES = {
    _aten.slice.Tensor: "self",
    _aten.slice_scatter.default: "self",
    _aten.slice_backward.default: "input_sizes",
}
# Types of parameters that take a number as an operand.
_OPERANDS = ("number", "Tensor", "Optional[number]", "Optional[Tensor]")
# Numbers up to a size, and the range of those that stand for them, which no function computes with: what stands for a
# number is refused by operations where the number is.
_RANGES = [(2**15 - 1, 2**13, 2**14), (2**31 - 1, 2**17, 2**18), (2**62, 2**33, 2**34)]


@dataclass(frozen=True)
class Line:
    """A number that is a symbol times a factor, and a term."""

    symbol: Any
    factor: int
    term: int

    @staticmethod
    def of(expr) -> "Line | None":
        """None for a number that is something else."""
        symbols = symbols_of(expr)
        if len(symbols) != 1:
            return None
        (symbol,) = symbols
        term = expr.subs(symbol, 0)
        factor = expr.subs(symbol, 1) - term
        is_line = (
            factor.is_Integer and factor != 0 and term.is_Integer and (factor * symbol + term - expr).expand() == 0
        )
        return Line(symbol, int(factor), int(term)) if is_line else None

    def at(self, number: int) -> int:
        return self.factor * number + self.term


class Numbers:
    """The symbols of a graph that are such numbers.

    Attributes:
        symbols: these.
        places: starts and ends of slices that are made of them, each with the size along which it lies.
        operands: numbers that operations take.
        results: numbers that are made of them, by the places where they are results.
    """

    def __init__(self, gm: GraphModule, candidates: set):
        self.symbols = set(candidates)
        self.places: list[tuple[Line, Any]] = []
        self.operands: list[Line] = []
        self.results: dict[int, Line] = {}
        for n in gm.graph.nodes:
            if n.op != "placeholder":
                self._look(n)
        self.places = [(line, size) for line, size in self.places if line.symbol in self.symbols]
        self.operands = [line for line in dict.fromkeys(self.operands) if line.symbol in self.symbols]
        self.results = {at: line for at, line in self.results.items() if line.symbol in self.symbols}

    def clear(self) -> None:
        """There are none."""
        self.symbols, self.places, self.operands, self.results = set(), [], [], {}

    def stand(self, symbol, number: int, seed: int) -> int:
        """What stands for a number; where it says where, one of its neighbours."""
        if any(line.symbol == symbol for line, _ in self.places):
            return number + (0, 1, -1)[seed]
        low, high = next((low, high) for most, low, high in _RANGES if abs(number) <= most)
        stand = random.Random(f"{symbol} {seed}").randint(low, high)
        return -stand if number < 0 else stand

    def _look(self, n: Node) -> None:
        for v in _tensors(n.meta.get("val")):
            self.symbols -= set().union(*map(symbols_of, map(expr_of, v.shape)))
        used = [i for i in n.all_input_nodes if self._of(i)]
        if not used or isinstance(n.meta.get("val"), torch.SymInt):
            return
        allowed: set[Node] = set()
        if n.op == "output":
            for at, x in enumerate(n.args[0]):
                if x in used and (line := _line(x)) is not None:
                    self.results[at] = line
                    allowed.add(x)
        elif isinstance(n.target, torch._ops.OpOverload):
            types = {a.name: str(a.type) for a in n.target._schema.arguments}
            given = dict(zip(types, n.args, strict=False)) | n.kwargs
            for name, x in given.items():
                if not isinstance(x, Node) or x not in used or (line := _line(x)) is None:
                    continue
                if n.target in _SLICES and name in ("start", "end"):
                    self.places.append((line, _size(given[_SLICES[n.target]], given.get("dim", 0))))
                    allowed.add(x)
                elif types[name] in _OPERANDS:
                    self.operands.append(line)
                    allowed.add(x)
            # Whatever else takes it, as a list of sizes does.
            of = {x for x in given.values() if isinstance(x, Node)}
            allowed &= of
            allowed -= {x for v in given.values() if isinstance(v, (list, tuple)) for x in v if isinstance(x, Node)}
        for x in used:
            if x not in allowed:
                self.symbols -= self._of(x)

    def _of(self, n: Node) -> set:
        v = n.meta.get("val")
        return symbols_of(expr_of(v)) & self.symbols if isinstance(v, torch.SymInt) else set()


class Given:
    """The numbers of a call: what the program is told of them, and what has to hold.

    Args:
        numbers: those of the graph.
        symbols: all symbols, in the order of their values.
        run: what stands for these.
        size: gives the number that a size is.
    """

    def __init__(self, numbers: Numbers, symbols: Sequence, run: tuple, size):
        at = {symbol: k for k, symbol in enumerate(symbols)}
        self._places = [at[symbol] for symbol in symbols if symbol in numbers.symbols]
        self._operands = [(at[line.symbol], line) for line in numbers.operands]
        self._results = {place: (at[line.symbol], line) for place, line in numbers.results.items()}
        # Numbers that are made of them, and the least and the largest that each may be.
        self._limits = [(at[line.symbol], line, 0, size(n)) for line, n in numbers.places]
        for k, line in self._operands:
            stands = line.at(run[k])
            most = next(most for most, *_ in _RANGES if abs(stands) <= most)
            self._limits.append((k, line, 1, most) if stands > 0 else (k, line, -most, -1))

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """The limits of the operands."""
        return [(low, high) for *_, low, high in self._limits[len(self._limits) - len(self._operands) :]]

    def fits(self, values: tuple) -> bool:
        return all(low <= line.at(values[k]) <= high for k, line, low, high in self._limits)

    def stands(self, runs: list[tuple]) -> tuple[list[list[int]], list[list[int]]]:
        """The operands, and the symbols as positions, in each of these runs."""
        operands = [[line.at(run[k]) for run in runs] for k, line in self._operands]
        return operands, [[run[k] for run in runs] for k in self._places]

    def tensors(self, values: tuple) -> list[torch.Tensor]:
        """What the program is given, in the host's memory (0-d)."""
        numbers = [line.at(values[k]) for k, line in self._operands] + [values[k] for k in self._places]
        return [torch.tensor(n, device="cpu") for n in numbers]

    def result(self, results: list, values: tuple) -> list:
        for place, (k, line) in self._results.items():
            results[place] = line.at(values[k])
        return results


def expr_of(n):
    return n.node.expr if isinstance(n, torch.SymInt) else n


def symbols_of(expr) -> set:
    """Those of a number; none of what is no number."""
    return set(getattr(expr, "free_symbols", ()))


def _line(n: Node) -> Line | None:
    return Line.of(expr_of(n.meta["val"]))


def _size(of, dim: int):
    size = (of.meta["val"].shape if isinstance(of, Node) else of)[dim]
    return expr_of(size.meta["val"] if isinstance(size, Node) else size)


def _tensors(v) -> list[torch.Tensor]:
    return [t for t in (v if isinstance(v, (list, tuple)) else [v]) if isinstance(t, torch.Tensor)]
