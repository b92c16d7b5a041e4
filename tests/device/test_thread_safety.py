"""Threads that compute, write one tensor, fail and let go of tensors at the same time."""

import gc
import threading

import pytest
import torch
from error_support import ones
from support import DEVICE


def test_threads(no_background_compile):
    """Eight threads train at the same time; each gets what it gets alone.

    Up to the last digit: one thread's read ends the window of all, and a program cut elsewhere rounds elsewhere.
    """

    def work(seed):
        g = torch.Generator().manual_seed(seed)
        w = torch.randn(4, 4, generator=g).to(DEVICE).requires_grad_()
        x = torch.randn(2, 4, generator=g).to(DEVICE)
        losses = []
        for _ in range(10):
            loss = (x @ w).tanh().square().mean()
            loss.backward()
            with torch.no_grad():
                w -= 0.5 * w.grad
                w.grad = None
            losses.append(loss.item())
        return losses

    alone = [work(i) for i in range(8)]
    together, errors = [None] * 8, []
    start = threading.Barrier(8)

    def run(i):
        try:
            start.wait()
            together[i] = work(i)
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(120)
    assert not errors and not any(t.is_alive() for t in threads)
    torch.testing.assert_close(torch.tensor(together), torch.tensor(alone))


def test_threads_share_a_tensor():
    x = torch.zeros(8, device=DEVICE)

    def add(i):
        for _ in range(50):
            x[i].add_(1)  # a view: the whole storage is written back each time

    threads = [threading.Thread(target=add, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(120)
    assert x.tolist() == [50] * 8


def test_one_thread_fails_and_the_others_do_not():
    results = []

    def good():
        results.append(sum((ones(DEVICE, 3) + i).sum().item() for i in range(30)))

    def bad():
        for _ in range(30):
            with pytest.raises(RuntimeError, match="size of tensor"):
                ones(DEVICE, 3) + ones(DEVICE, 2)
        results.append("raised")

    threads = [threading.Thread(target=f) for f in (good, bad, good, bad)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(120)
    expected = sum(3 * (1 + i) for i in range(30))
    assert sorted(map(str, results)) == sorted(map(str, [expected * 1.0, expected * 1.0, "raised", "raised"]))


def test_tensors_die_in_other_threads_and_in_the_collector():
    """Cycles that hold tensors are collected in whatever thread runs the collector."""
    torch.tpu.synchronize()
    gc.collect()
    before = torch.tpu.memory_allocated()

    def make():
        for _ in range(20):
            cycle = [ones(DEVICE, 1 << 12)]
            cycle.append(cycle)
            y = (cycle[0] * 2).requires_grad_()
            y.register_hook(lambda g, cycle=cycle: g)

    threads = [threading.Thread(target=make) for _ in range(4)]
    for t in threads:
        t.start()
        gc.collect()
    for t in threads:
        t.join(60)
    gc.collect()
    torch.tpu.synchronize()
    assert torch.tpu.memory_allocated() == before
