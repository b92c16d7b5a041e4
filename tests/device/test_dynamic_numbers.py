"""Numbers and positions of Python that vary beside sizes."""

import pytest
import torch
from sizes_support import SIZES, check, programs
from support import DEVICE, assert_same
from torch.tpu import Dim


def test_numbers_vary_beside_sizes(fused):
    torch.manual_seed(0)
    weights = {"a": torch.randn(8, 4), "b": torch.randn(4)}

    def step(w, x, rate, t):
        def loss(w):
            return (x @ w["a"] + w["b"]).square().sum(-1).mean()

        grads = torch.func.grad(loss)(w)
        factor = rate / (1 - 0.9**t) if t < 6 else rate
        return {k: w[k] - factor * g for k, g in grads.items()}

    f = torch.tpu.jit(step, dynamic={"x": {1: Dim(max=16)}})
    moved = {k: w.to(DEVICE) for k, w in weights.items()}
    before = programs()
    for t, size in enumerate([5, 9, 16, 5, 3, 9, 16, 5, 3, 11], 1):
        x = torch.randn(2, size, 8)
        weights, moved = step(weights, x, 0.1 / t, t), f(moved, x.to(DEVICE), 0.1 / t, t)
        for name, w in weights.items():
            assert_same(moved[name], w, name, strides=False, rtol=1e-4, atol=1e-5)
    # With the first number that of one number; the sizes beside it are known at once.
    assert programs() - before <= 3
    traces = f.traces
    f(moved, x.to(DEVICE), 0.01, 9)
    assert f.traces == traces


def write_and_read(cache, x, n, scale):
    cache = cache.clone()
    cache[:, n] = x.sum(1) * scale
    return cache, cache[:, n : n + 4].sum(1)


def along_what_varies(cache, x, n, scale):
    return x[:, n] * scale, x[:, x.shape[1] - 1 - n] + cache[:, n], x.softmax(1)


@pytest.mark.parametrize("function", [write_and_read, along_what_varies], ids=lambda f: f.__name__)
def test_positions_vary_beside_sizes(function, fused):
    torch.manual_seed(0)
    f = torch.tpu.jit(function, dynamic={"x": {1: Dim(buckets=[16])}})
    before = programs()
    for n, size in [(0, 5), (1, 9), (2, 16), (1, 12), (2, 5), (2, 9), (3, 16), (1, 7)]:
        cache, x, scale = torch.randn(3, 20), torch.randn(3, size), 0.1 + 0.2 * n
        for a, e in zip(f(cache.to(DEVICE), x.to(DEVICE), n, scale), function(cache, x, n, scale), strict=True):
            check(a, e, f"{n}, {size}")
    # That of the first numbers, and one for all others.
    assert programs() - before == 2
    traces = f.traces
    f(cache.to(DEVICE), x.to(DEVICE), 2, 0.7)
    assert f.traces == traces


def test_positions_vary_where_sizes_cannot(fused):
    def function(cache, x, n):
        return cache[n] + sum(y.exp().sum() for y in x.split(2))

    f = torch.tpu.jit(function, dynamic={"x": {0: Dim(max=16)}})
    before = programs()
    for n, size in [(0, 5), (1, 5), (2, 9), (2, 5), (3, 5), (4, 9), (5, 9), (6, 5), (7, 5), (8, 9)]:
        cache, x = torch.randn(20), torch.randn(size)
        check(f(cache.to(DEVICE), x.to(DEVICE), n), function(cache, x, n), f"{n}, {size}")
    # For each size one, and one that takes positions; and that of the first position.
    assert programs() - before <= 2 * 2 + 1
    assert "tensors, and 8 at the bound, at" in torch.tpu.explain()


def test_what_follows_from_a_size_is_of_the_call(fused):
    def function(x, rate):
        n = x.shape[1]
        return x * (rate / n), n, {"of the rate": rate * n, "list": [n + 1]}

    f = torch.tpu.jit(function, dynamic={"x": {1: Dim(max=16)}})
    g = torch.tpu.jit(lambda x: function(x, 0.5), dynamic={"x": {1: Dim(max=16)}})
    for i, size in enumerate(SIZES):
        x, rate = torch.randn(3, size), 0.1 * (i + 1)
        for got, wanted in [(f(x.to(DEVICE), rate), function(x, rate)), (g(x.to(DEVICE)), function(x, 0.5))]:
            check(got[0], wanted[0], str(size))
            assert got[1:] == wanted[1:]
