"""Buckets of lengths: the few lengths to which sequences are padded."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from ._cheapest_path import cheapest_path
from ._numbers import lengths_of, percent, positive, share, table


class Buckets:
    """Lengths to which sequences are padded, each to the smallest that holds it.

    Attributes:
        sizes: the lengths, ascending.
        counts: how many of the sequences each bucket has.
        tokens: how many elements those have before they are padded.

    Args:
        sizes: the lengths, in any order.
        lengths: the lengths of the sequences, from which `counts`, `tokens` and `waste` are.

    Raises:
        ValueError: there is no size, one is less than 1, or a sequence is longer than the largest.
    """

    def __init__(self, sizes: Iterable[int], lengths: Any = ()):
        self.sizes = tuple(sorted({positive("Buckets: a size", size) for size in sizes}))
        if not self.sizes:
            raise ValueError("Buckets: expected at least one size")
        array = lengths_of("Buckets", lengths)
        index = self.index(array)
        counts = np.bincount(index, minlength=len(self.sizes))
        tokens = np.zeros(len(self.sizes), dtype=np.int64)
        np.add.at(tokens, index, array)
        self.counts, self.tokens = tuple(counts.tolist()), tuple(tokens.tolist())

    def index(self, lengths: Any) -> np.ndarray:
        """The number of each length's bucket, int64 [n].

        Raises:
            ValueError: one is longer than the largest size.
        """
        array = lengths_of("Buckets.index", lengths)
        if array.size and (longest := int(array.max())) > self.sizes[-1]:
            many = int((array > self.sizes[-1]).sum())
            raise ValueError(
                f"Buckets: {many:,} of {array.size:,} sequences are longer than the largest bucket, {self.sizes[-1]}; "
                f"the longest has {longest}\nhint: cut them, leave them out, or add a bucket"
            )
        return np.searchsorted(self.sizes, array).astype(np.int64)

    def of(self, lengths: Any) -> "Buckets":
        """The same sizes, counted for sequences of these lengths."""
        return Buckets(self.sizes, lengths)

    def assign(self, length: int) -> int:
        """The size to which a sequence of this length is padded."""
        return self.sizes[int(self.index([length])[0])]

    @property
    def shapes(self) -> list[tuple[int]]:
        """What each bucket makes of a sample."""
        return [(size,) for size in self.sizes]

    @property
    def padded(self) -> int:
        """The elements of all sequences once they are padded."""
        return sum(size * count for size, count in zip(self.sizes, self.counts, strict=True))

    @property
    def waste(self) -> float:
        """The share of `padded` that is padding, 0 to 1."""
        return share(self.padded - sum(self.tokens), self.padded)

    @property
    def waste_text(self) -> str:
        """The waste in words."""
        return f"{percent(self.waste)} of the elements are padding"

    def report(self) -> str:
        """The buckets with what each has and wastes, and what one bucket for all would waste."""
        rows = [
            (size, count, tokens, size * count, percent(share(size * count - tokens, size * count)))
            for size, count, tokens in zip(self.sizes, self.counts, self.tokens, strict=True)
        ]
        count, tokens, one = sum(self.counts), sum(self.tokens), self.sizes[-1] * sum(self.counts)
        lines = [
            f"{len(self)} bucket{'s' * (len(self) > 1)}: {self.waste_text} "
            f"({percent(share(one - tokens, one))} if all were padded to {self.sizes[-1]:,})",
            table(
                ("length", "sequences", "elements", "padded", "waste"),
                [*rows, ("all", count, tokens, self.padded, percent(self.waste))],
            ),
        ]
        return "\n".join(lines)

    def __len__(self) -> int:
        return len(self.sizes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Buckets) and self.sizes == other.sizes

    def __hash__(self) -> int:
        return hash(self.sizes)

    def __str__(self) -> str:
        return self.report()

    def __repr__(self) -> str:
        return f"Buckets({list(self.sizes)}, waste={percent(self.waste)})"


def bucketize(lengths: Any, max_graphs: int, *, multiple_of: int = 1, max_length: int | None = None) -> Buckets:
    """The at most `max_graphs` lengths to pad to, with the least padding in all: no other choice has less.

    Args:
        lengths: of all sequences, whole numbers of at least 0; an array, a list, or a tensor of the host.
        max_graphs: the most buckets. A step is a program, or a few, for each.
        multiple_of: each size is a multiple of it, as tiles of the hardware like (8 or 128 on a TPU).
        max_length: sequences that are longer count as this long, as they are where they are cut; no size is larger,
            even if it is no multiple then.

    Takes seconds for a million sequences with tens of thousands of different lengths: n log n steps for each bucket and
    n different lengths.

    Raises:
        ValueError: there are no lengths, a number is less than 1, or all padding could not be counted in 62 bits.
    """
    array = lengths_of("bucketize", lengths)
    max_graphs = positive("bucketize: max_graphs", max_graphs)
    multiple_of = positive("bucketize: multiple_of", multiple_of)
    if not array.size:
        raise ValueError("bucketize: expected at least one length")
    if max_length is not None:
        array = np.minimum(array, positive("bucketize: max_length", max_length))
    if (int(array.max()) + multiple_of) * len(array) >= 1 << 62:
        raise ValueError(f"bucketize: {len(array):,} sequences of up to {int(array.max()):,} elements are too many")
    sizes = np.maximum(-(-array // multiple_of), 1) * multiple_of
    if max_length is not None:
        sizes = np.minimum(sizes, max_length)
    distinct, counts = np.unique(sizes, return_counts=True)
    # Node j stands for the sequences of the first j sizes, and a hop for a bucket of those that it passes over.
    size, before = np.concatenate(([0], distinct)), np.concatenate(([0], np.cumsum(counts)))
    path = cheapest_path(len(distinct), max_graphs, lambda i, j: size[j] * (before[j] - before[i]))
    return Buckets(size[path].tolist(), array)
