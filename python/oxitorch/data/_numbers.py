"""Lengths as they are given, as arrays; and tables of numbers as they are printed."""

from collections.abc import Sequence
from typing import Any

import numpy as np


def positive(name: str, value: Any) -> int:
    """`value`, which must be a whole number of at least one.

    Raises:
        TypeError: it is no whole number.
        ValueError: it is less than one.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}: expected a whole number, got {value!r}")
    if (number := int(value)) < 1:
        raise ValueError(f"{name}: expected at least 1, got {number}")
    return number


def lengths_of(name: str, lengths: Any) -> np.ndarray:
    """The lengths as int64 [n], which may be empty.

    Raises:
        TypeError: they are no whole numbers.
        ValueError: they are not in one dimension, or one is negative.
    """
    array = np.asarray(lengths)
    if array.ndim != 1:
        raise ValueError(f"{name}: expected lengths in one dimension, got the shape {list(array.shape)}")
    if not array.size:
        return np.empty(0, dtype=np.int64)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name}: expected whole numbers as lengths, got {array.dtype}")
    array = array.astype(np.int64)
    if (least := int(array.min())) < 0:
        raise ValueError(f"{name}: expected lengths of at least 0, got {least}")
    return array


def share(part: float, whole: float) -> float:
    """How much `part` is of `whole`; nothing of nothing."""
    return part / whole if whole else 0.0


def percent(fraction: float) -> str:
    """A share as it is printed."""
    return f"{100 * fraction:.1f} %"


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns aligned to the right; whole numbers have commas."""
    text = [list(head)] + [[f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*text, strict=True)]
    lines = ("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in text)
    return "\n".join("  " + line for line in lines)
