"""The digits of scikit-learn in batches, and weights to start from: the same for all three programs."""

from itertools import pairwise

import numpy as np
from sklearn.datasets import load_digits

SIZES = (64, 128, 10)


def batches(epochs: int = 2, size: int = 128):
    """Images (float32, size x 64, from 0 to 1) and classes (int64), in an order that is always the same."""
    digits = load_digits()
    x, y = (digits.data / 16).astype(np.float32), digits.target.astype(np.int64)
    order = np.random.default_rng(0)
    for _ in range(epochs):
        at = order.permutation(len(x))
        for i in range(0, len(at) - size + 1, size):
            yield x[at[i : i + size]], y[at[i : i + size]]


def weights() -> dict[str, np.ndarray]:
    """Weights (inputs x outputs) and biases of the two layers."""
    draw = np.random.default_rng(1)
    out = {}
    for i, (n, m) in enumerate(pairwise(SIZES)):
        out[f"w{i}"] = draw.normal(0, n**-0.5, (n, m)).astype(np.float32)
        out[f"b{i}"] = np.zeros(m, np.float32)
    return out
