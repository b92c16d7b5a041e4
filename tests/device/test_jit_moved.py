"""Arguments of a function of `torch.tpu.jit` that begin elsewhere in their memory in each call, as batches of data that is
on the device: the function is not run anew for each, and does to them what it does on the CPU.
"""

import functools

import pytest
import torch
from support import DEVICE
from torch import nn

assert_close = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)


def reads(device):
    return lambda x, y, n: (x * y.sum(), None)


def trains(device):
    torch.manual_seed(0)
    model = nn.Linear(3, 2).to(device)

    def f(x, y, n):
        model.zero_grad()
        loss = (model(x).sum(1) - y.view_as(x).sum(1)).square().mean()
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(p.grad, alpha=0.1)
        return loss.detach()

    return f


def takes_a_number(device):
    return lambda x, y, n: x * n + y[0]


def writes(device):
    return lambda x, y, n: (x.add_(1), y * 2)[1]


def writes_what_the_other_sees(device):
    def f(x, y, n):
        x.mul_(2)
        return y + 1

    return f


def gives_it(device):
    return lambda x, y, n: [x, y * 2]


def gives_a_part(device):
    return lambda x, y, n: [x[1:], y * 2]


def writes_for_some_numbers(device):
    def f(x, y, n):
        if n > 5:
            x.add_(n)
        return x + y[0]

    return f


def gives_it_for_some_numbers(device):
    return lambda x, y, n: [x[:1] if n > 5 else x * n, y * 2]


ONLY_READ = [reads, trains, takes_a_number]
OTHERS = [
    writes, writes_what_the_other_sees, gives_it, gives_a_part, writes_for_some_numbers, gives_it_for_some_numbers,
]  # fmt: skip


def called(make, device, numbers, rounds=10):
    data = torch.arange(120.0).reshape(40, 3).div(100).to(device)
    f = make(device)
    f = torch.tpu.jit(f) if device == DEVICE else f
    seen, traces = [], []
    for i in range(rounds):
        x, y = data[i * 4 : i * 4 + 4], data[i * 4 : i * 4 + 4].reshape(-1)
        n = float(i) + 0.5 if numbers else 9.0
        results = f(x, y, n)
        seen.append([r.cpu().clone() for r in torch.utils._pytree.tree_leaves(results) if r is not None])
        if isinstance(results, list):
            results[0].add_(0.25)  # seen in the data, if it is a part of them
        traces.append(getattr(f, "traces", 0))
    return seen, data.cpu(), traces


@pytest.mark.parametrize("numbers", [False, True], ids=["", "numbers"])
@pytest.mark.parametrize("make", ONLY_READ + OTHERS, ids=lambda make: make.__name__)
def test_arguments_that_begin_elsewhere(make, numbers):
    *wanted, _ = called(make, "cpu", numbers)
    *got, traces = called(make, DEVICE, numbers)
    assert_close(got, wanted)
    if make in ONLY_READ:
        assert traces[-1] == traces[-4] <= 8, traces


def test_an_epoch_makes_no_more_programs():
    data, f = torch.randn(30, 3, device=DEVICE), torch.tpu.jit(trains(DEVICE))
    made = []
    for i in range(20):
        f(data[i : i + 4], data[i : i + 4].reshape(-1), 9.0)
        made.append(torch.tpu.metrics()["programs"])
    assert made[-1] == made[9]
