"""Several sequences in one row of a fixed length."""

from bisect import bisect_left, insort
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ._numbers import lengths_of, percent, positive, share, table

if TYPE_CHECKING:
    import torch


class Packing:
    """Which sequences are in which row, and where.

    The longest sequences are placed first, each in the row in which least is left over (best fit decreasing). That
    takes at most 11/9 of the fewest rows there can be, and 4 more (D. S. Johnson, A. Demers, J. D. Ullman, M. R. Garey,
    R. L. Graham, Worst-case performance bounds for simple one-dimensional packing algorithms, SIAM J. Comput. 3, 1974).

    Attributes:
        length: of a row.
        bins: the numbers of the sequences in each row, in their order in it.
        lengths: of the sequences, int64 [n].

    Args:
        lengths: of the sequences.
        length: of a row.
        rows: how many rows there are, the last of them empty, where the number must not vary. By default those needed.

    Raises:
        ValueError: a sequence is empty or longer than a row, or `rows` are too few.
    """

    def __init__(self, lengths: Any, length: int, rows: int | None = None):
        self.length, self.lengths = positive("Packing: length", length), lengths_of("Packing", lengths)
        if (long := self.lengths > self.length).any():
            raise ValueError(
                f"Packing: {int(long.sum()):,} of {len(long):,} sequences are longer than a row of {self.length:,}; "
                f"the longest has {int(self.lengths.max()):,}\nhint: cut them, leave them out, or take longer rows"
            )
        if not self.lengths.all():
            raise ValueError(f"Packing: sequence {int(np.argmin(self.lengths))} is empty\nhint: leave it out")
        self.bins = _best_fit_decreasing(self.lengths, self.length)
        if rows is not None:
            if len(self.bins) > positive("Packing: rows", rows):
                raise ValueError(
                    f"Packing: {len(self.lengths):,} sequences need {len(self.bins):,} rows of {self.length:,}, and "
                    f"rows={rows:,}\nhint: give fewer sequences at a time, or more rows"
                )
            self.bins += [[] for _ in range(rows - len(self.bins))]

    @cached_property
    def _placed(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """The sequences in the order of the rows; and of each its row, its number in it, and where it begins there."""
        order = np.array([i for bin in self.bins for i in bin], dtype=np.int64)
        counts = np.array([len(bin) for bin in self.bins], dtype=np.int64)
        firsts = np.cumsum(counts) - counts
        row = np.repeat(np.arange(len(self.bins)), counts)
        ends = np.concatenate(([0], np.cumsum(self.lengths[order])))
        return order, row, np.arange(len(order)) - firsts[row], ends[:-1] - ends[firsts[row]]

    @cached_property
    def _elements(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of all elements in the order of the rows: where each is in the rows laid end to end, segment, position."""
        order, row, number, begin = self._placed
        lengths = self.lengths[order]
        position = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        return np.repeat(row * self.length + begin, lengths) + position, np.repeat(number + 1, lengths), position

    def pack(self, sequences: Sequence[Any], padding_value: float = 0) -> "torch.Tensor":
        """Lays sequences of these lengths into their rows.

        Args:
            sequences: tensors, arrays or lists [length of each, *], of one dtype but for promotion; the same ones of
                which the lengths are, or others that go with them, like labels.
            padding_value: what stands where there is no sequence.

        Returns:
            [rows, length, *] on the host, or on the device of the sequences.

        Raises:
            ValueError: there are not as many, or one has another length.
        """
        import torch

        if len(sequences) != len(self.lengths):
            raise ValueError(f"Packing.pack: expected {len(self.lengths):,} sequences, got {len(sequences):,}")
        parts = [torch.as_tensor(sequence) for sequence in sequences]
        for i, (part, length) in enumerate(zip(parts, self.lengths.tolist(), strict=True)):
            if part.dim() == 0 or part.shape[0] != length:
                raise ValueError(
                    f"Packing.pack: sequence {i} has the shape {list(part.shape)}, and {length} is its length"
                )
        if not parts:
            return torch.full((len(self.bins), self.length), padding_value)
        flat = torch.cat([parts[i] for i in self._placed[0].tolist()])
        rows = flat.new_full((len(self.bins) * self.length, *flat.shape[1:]), padding_value)
        rows[self._index.to(flat.device)] = flat
        return rows.unflatten(0, (len(self.bins), self.length))

    def unpack(self, rows: "torch.Tensor") -> "list[torch.Tensor]":
        """The sequences in their order, [length of each, *], out of rows [rows, length, *]: undoes `pack`.

        Raises:
            ValueError: these are other rows.
        """
        if tuple(rows.shape[:2]) != (len(self.bins), self.length):
            raise ValueError(
                f"Packing.unpack: expected the shape [{len(self.bins)}, {self.length}, ...], got {list(rows.shape)}"
            )
        order = self._placed[0]
        parts = rows.flatten(0, 1)[self._index.to(rows.device)].split(self.lengths[order].tolist())
        found = dict(zip(order.tolist(), parts, strict=True))
        return [found[i] for i in range(len(found))]

    @cached_property
    def _index(self) -> "torch.Tensor":
        import torch

        return torch.from_numpy(self._elements[0])

    @cached_property
    def segment_ids(self) -> "torch.Tensor":
        """Which sequence of its row each element is of, int64 [rows, length]: 1, 2, ..., and 0 for padding."""
        return self._of_elements(self._elements[1])

    @cached_property
    def positions(self) -> "torch.Tensor":
        """Where in its sequence each element is, int64 [rows, length], from 0; 0 for padding."""
        return self._of_elements(self._elements[2])

    def _of_elements(self, values: np.ndarray) -> "torch.Tensor":
        import torch

        rows = np.zeros(len(self.bins) * self.length, dtype=np.int64)
        rows[self._elements[0]] = values
        return torch.from_numpy(rows.reshape(len(self.bins), self.length))

    @property
    def waste(self) -> float:
        """The share of the rows that is padding, 0 to 1."""
        size = len(self.bins) * self.length
        return share(size - int(self.lengths.sum()), size)

    def report(self) -> str:
        """The rows, what is wasted, and what a row for each sequence would waste."""
        tokens, n = int(self.lengths.sum()), len(self.lengths)
        fewest = -(-tokens // self.length)
        rows = [
            ("packed", len(self.bins), len(self.bins) * self.length, percent(self.waste)),
            ("a row each", n, n * self.length, percent(share(n * self.length - tokens, n * self.length))),
        ]
        return (
            f"1 shape: {n:,} sequences in {len(self.bins):,} rows of {self.length:,}, "
            f"{percent(self.waste)} of the elements are padding; {tokens:,} elements need at least {fewest:,} rows\n"
        ) + table(("", "rows", "elements", "waste"), rows)

    def __len__(self) -> int:
        return len(self.bins)

    def __str__(self) -> str:
        return self.report()

    def __repr__(self) -> str:
        waste = percent(self.waste)
        return f"Packing({len(self.lengths)} sequences, rows={len(self)}, length={self.length}, waste={waste})"


class Packed(NamedTuple):
    """Sequences in rows, with what a model needs to keep them apart; all [rows, length], but for the last.

    Attributes:
        tokens: the sequences' elements [rows, length, *].
        segment_ids: which sequence of its row each is of: 1, 2, ..., and 0 for padding. `segment_mask` takes them.
        positions: where in its sequence each is, from 0, for embeddings of positions.
        packing: the rows as numbers, with the waste; its `pack` lays out labels that go with the sequences.
    """

    tokens: "torch.Tensor"
    segment_ids: "torch.Tensor"
    positions: "torch.Tensor"
    packing: Packing


def pack_sequences(
    sequences: Sequence[Any], length: int, *, rows: int | None = None, padding_value: float = 0
) -> Packed:
    """Lays sequences into as few rows of a fixed length as best fit decreasing finds; see `Packing`.

    Args:
        sequences: tensors, arrays or lists [length of each, *], none empty.
        length: of a row; no sequence may be longer.
        rows: how many rows there are, where the number must not vary: as `collate_fn` for a batch of sequences,
            `functools.partial(pack_sequences, length=512, rows=8)`. By default those needed.
        padding_value: what stands where there is no sequence.

    Raises:
        ValueError: a sequence is empty or longer than a row, or `rows` are too few.
    """
    packing = Packing([len(sequence) for sequence in sequences], length, rows)
    return Packed(packing.pack(sequences, padding_value), packing.segment_ids, packing.positions, packing)


def _best_fit_decreasing(lengths: np.ndarray, length: int) -> list[list[int]]:
    """The numbers of the sequences in each row. Of equal ones the first comes first; log(length) steps for each."""
    bins: list[list[int]] = []
    rest: list[int] = []  # what is left over in rows, ascending, each number once
    with_rest: dict[int, list[int]] = {}  # the rows with so much left over
    for i in np.argsort(-lengths, kind="stable").tolist():
        need = int(lengths[i])
        at = bisect_left(rest, need)
        if at == len(rest):
            row, left = len(bins), length
            bins.append([])
        else:
            left = rest[at]
            row = with_rest[left].pop()
            if not with_rest[left]:
                del rest[at], with_rest[left]
        bins[row].append(i)
        if left := left - need:
            if left not in with_rest:
                insort(rest, left)
                with_rest[left] = []
            with_rest[left].append(row)
    return bins
