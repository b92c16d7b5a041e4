"""The cheapest way from the first to the last of nodes in a row, in a few hops: how all buckets are chosen."""

from collections.abc import Callable

import numpy as np


def cheapest_path(n: int, hops: int, weight: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> np.ndarray:
    """The nodes at which the cheapest path from 0 to `n` with at most `hops` hops lands, ascending; the last is `n`.

    `weight(i, j)` gives the costs of hops from nodes i to later nodes j, from arrays of them. It must be so that longer
    hops that cross cost no less (Monge's condition, or quadrangle inequality): for i <= i' < j <= j'
    weight(i, j) + weight(i', j') <= weight(i, j') + weight(i', j).

    T_h[j] = min over i < j of T_{h-1}[i] + weight(i, j), the least cost of reaching j in h hops or fewer. By the
    condition the leftmost best i grows with j, so that each hop takes n log n weights and not n^2.
    """
    every = np.arange(n + 1)
    total = np.concatenate(([0], weight(np.zeros(n, dtype=np.int64), every[1:])))
    came_from = []
    for _ in range(min(hops, n) - 1):
        before, total = _monotone_minima(total, weight)
        came_from.append(before)
    path, node = [n], n
    for before in reversed(came_from):
        if (node := int(before[node])) == 0:
            break
        path.append(node)
    return np.array(path[::-1])


def _monotone_minima(
    total: np.ndarray, weight: Callable[[np.ndarray, np.ndarray], np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """For each j > 0 the leftmost i < j with the least `total[i] + weight(i, j)`, and that sum.

    Where j is between two others, its i is between theirs. So every second j is found from its neighbours, then every
    second of those left, and each round is a few operations on whole arrays.
    """
    n = len(total) - 1
    best, least = np.zeros(n + 1, dtype=np.int64), np.zeros_like(total)
    step = 1 << (n.bit_length() - 1)
    while step:
        j = np.arange(step, n + 1, 2 * step)
        first = best[j - step]
        last = np.where(j + step <= n, best[np.minimum(j + step, n)], n)
        widths = np.minimum(last, j - 1) - first + 1
        starts = np.cumsum(widths) - widths
        i = np.arange(int(widths.sum())) + np.repeat(first - starts, widths)
        sums = total[i] + weight(i, np.repeat(j, widths))
        least[j] = np.minimum.reduceat(sums, starts)
        best[j] = np.minimum.reduceat(np.where(sums == np.repeat(least[j], widths), i, n), starts)
        step //= 2
    return best, least
