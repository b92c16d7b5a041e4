"""Which operation of one run is which of another."""

from collections.abc import Iterator
from difflib import SequenceMatcher

from oxitorch.diff import _kinds
from oxitorch.diff._trace import Trace

# Operations that stand for each other: a run of either, at the same place in its own.
Block = tuple[list[int], list[int]]


def align(a: Trace, b: Trace) -> Iterator[Block]:
    """Blocks of operations in their order, by number: of one and one of a name, or of those between such pairs."""
    keys = [[_key(op) for op in trace.ops] for trace in (a, b)]
    first = 0
    while first < min(map(len, keys)) and keys[0][first] == keys[1][first]:
        yield [first], [first]
        first += 1
    last = 0
    while last < min(map(len, keys)) - first and keys[0][-1 - last] == keys[1][-1 - last]:
        last += 1
    middle = [k[first : len(k) - last] for k in keys]
    for tag, i, j, k, m in SequenceMatcher(None, *middle, autojunk=False).get_opcodes():
        if tag == "equal":
            for n in range(j - i):
                yield [first + i + n], [first + k + n]
        else:
            yield list(range(first + i, first + j)), list(range(first + k, first + m))
    for n in range(last):
        yield [len(keys[0]) - last + n], [len(keys[1]) - last + n]


def _key(op: dict) -> tuple:
    name = _kinds.base(op["name"])
    return op["step"], op["phase"], op["module"], name
