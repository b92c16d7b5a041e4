"""What a function of `torch.tpu.jit` leaves under a name takes the memory of what was there, if nobody else has that; and
nothing of what it found stays.
"""

import gc

import pytest
import torch
from support import DEVICE

SIZE = 1 << 20
BYTES = 4 * SIZE


class State:
    def __init__(self):
        self.h = torch.zeros(SIZE, device=DEVICE)
        self.kept = {"deep": {"h": torch.zeros(SIZE, device=DEVICE)}}
        self.p = torch.nn.Parameter(torch.zeros(SIZE, device=DEVICE))


def attribute(s, x):
    s.h = s.h * 0.5 + x
    return x.sum()


def item(s, x):
    s.kept["deep"]["h"] = s.kept["deep"]["h"] * 0.5 + x
    return x.sum()


def data(s, x):
    s.p.data = s.p.data * 0.5 + x
    return x.sum()


def swapped(s, x):
    s.h, s.kept["deep"]["h"] = s.kept["deep"]["h"], s.h * 0.5 + x
    return x.sum()


NOW = {attribute: lambda s: s.h, item: lambda s: s.kept["deep"]["h"], data: lambda s: s.p.data, swapped: lambda s: s.h}


def stepped(function, calls=6):
    s = State()
    step = torch.tpu.jit(lambda x: function(s, x))
    x = torch.ones((), device=DEVICE)
    for _ in range(calls):
        step(x)
    return s, step, x


@pytest.mark.parametrize("function", NOW, ids=lambda f: f.__name__)
def test_memory(function):
    gc.collect()
    before = torch.tpu.memory_allocated()
    _s, step, x = stepped(function)
    torch.tpu.synchronize()
    held = torch.tpu.memory_allocated() - before
    assert held < 3.5 * BYTES  # the three of the state
    torch.tpu.reset_peak_memory_stats()
    step(x)
    torch.tpu.synchronize()
    assert torch.tpu.memory_allocated() - before == held
    assert torch.tpu.max_memory_allocated() - before < held + 0.5 * BYTES


@pytest.mark.parametrize("function", NOW, ids=lambda f: f.__name__)
@pytest.mark.parametrize("how", ["the tensor", "a part", "a graph"])
def test_what_somebody_else_has_stays(function, how):
    s, step, x = stepped(function)
    now = NOW[function](s)
    value = now[0].item()
    if how == "a graph":
        w = torch.ones((), device=DEVICE, requires_grad=True)
        loss = (now * w).sum()
        del now
    elif how == "a part":
        now = now[1:3]
    step(x), step(x)
    if how == "a graph":
        loss.backward()
        assert w.grad.item() == pytest.approx(value * SIZE)
    else:
        assert now[0].item() == value


def test_what_is_given_back_stays():
    s = State()

    @torch.tpu.jit
    def step(x):
        before, s.h = s.h, s.h + x
        return before, before[:2]

    x = torch.ones((), device=DEVICE)
    for i in range(5):
        before, part = step(x)
        assert (before[0].item(), part.tolist(), s.h[0].item()) == (i, [i, i], i + 1)
    assert step.traces == 2
