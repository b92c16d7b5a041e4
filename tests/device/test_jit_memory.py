"""What shares memory with something else after a call of a function of `torch.tpu.jit`: tensors that were given another
memory (`p.data = x`), and what it leaves under a name that is a part of what was there, or was under another name.
"""

import pytest
import torch
from support import DEVICE, assert_close


class State:
    """What a function finds and leaves."""

    def __init__(self, device):
        torch.manual_seed(0)
        self.p = torch.nn.Parameter(torch.randn(4).to(device))
        self.q = torch.nn.Parameter(torch.randn(4).to(device), requires_grad=False)
        self.h, self.g, self.last = (torch.full((4,), float(i), device=device) for i in range(3))
        self.kept = {}


def descend(s, x):
    s.p.grad = None
    loss = (s.p * x).square().sum()
    loss.backward()
    return loss.detach()


def decays(s, x):
    loss = descend(s, x)
    s.p.data = s.p.data * 0.9 - 0.1 * s.p.grad
    return loss


def averages(s, x):
    s.q.data = 0.9 * s.q.data + 0.1 * x[0]
    return s.q.sum()


def climbs(s, x):
    """As SAM does: up, and back to a copy that is kept, which is the parameter itself afterwards."""
    loss = descend(s, x)
    s.kept["old"] = s.p.data.clone()
    with torch.no_grad():
        s.p.add_(s.p.grad, alpha=0.05)
    descend(s, x)
    s.p.data = s.kept["old"]
    with torch.no_grad():
        s.p.sub_(s.p.grad, alpha=0.1)
    return loss


def climbs_in_place(s, x):
    loss = descend(s, x)
    old = s.p.data.clone()
    s.p.data.add_(s.p.grad, alpha=0.05)
    descend(s, x)
    s.p.data.copy_(old - 0.1 * s.p.grad)
    return loss


def comes_back(s, x):
    loss = descend(s, x)
    own = s.p.data
    s.p.data = s.p.data + 0.05 * s.p.grad
    descend(s, x)
    s.p.data = own
    s.p.data.sub_(s.p.grad, alpha=0.1)
    return loss


def becomes_another(s, x):
    s.q.data = s.p.data
    s.p.data.add_(x[0])
    return s.q.sum()


def swaps_data(s, x):
    s.p.data, s.q.data = s.q.data, s.p.data + x[0]
    return x.sum()


def swaps(s, x):
    s.h, s.g = s.g, s.h * 2 + x.sum()
    return x.sum()


def only_swaps(s, x):
    s.h, s.g = s.g, s.h
    return x.sum()


def leaves_row(s, x):
    s.last = x[0]
    return x.sum()


def leaves_detached(s, x):
    s.last = x.detach()
    return x.sum()


def leaves_part_of_state(s, x):
    s.h = s.h + x.sum()
    s.last = s.h[:2]
    return x.sum()


def reads_what_it_left(s, x):
    s.last, before = x[1], s.last
    return (before * 2).sum()


def leaves_data(s, x):
    s.kept["p"] = s.p.data
    s.p.data = s.p.data + x[0]
    return s.kept["p"].sum()


def cuts_state(s, x):
    s.h = s.h[:2] if len(s.h) > 2 else s.h + x.sum()
    return s.h.sum()


def asks_a_size(s, x):
    s.h = torch.zeros(2, device=x.device) + x.sum() if s.h.numel() > 2 else torch.ones(2, device=x.device) * x[0, 0]
    return s.h.sum()


def seen(s):
    tensors = [s.p, s.q, s.h, s.g, s.last, *s.kept.values()]
    grads = [p.grad for p in (s.p, s.q) if p.grad is not None]
    shared = [a.untyped_storage()._cdata == b.untyped_storage()._cdata for a in tensors for b in tensors]
    return [t.detach().clone() for t in (*tensors, *grads)], shared


def calls(function, device, wrap, between, n=6):
    s = State(device)
    step = wrap(lambda x: function(s, x))
    torch.manual_seed(1)
    done = []
    for i in range(n):
        between(s, i)
        done.append((step(torch.randn(3, 4).to(device)).detach(), *seen(s)))
    return done, step, s


FUNCTIONS = [
    decays, averages, climbs, climbs_in_place, comes_back, becomes_another, swaps_data, swaps, only_swaps, leaves_row,
    leaves_detached, leaves_part_of_state, reads_what_it_left, leaves_data, cuts_state, asks_a_size,
]  # fmt: skip


def compare(function, between=lambda s, i: None):
    expected, *_ = calls(function, "cpu", lambda f: f, between)
    actual, step, _ = calls(function, DEVICE, torch.tpu.jit, between)
    for (a, own, shared), (b, others, expected_shared) in zip(actual, expected, strict=True):
        assert_close(a.cpu(), b)
        for t, other in zip(own, others, strict=True):
            assert_close(t.cpu(), other)
        assert shared == expected_shared
    return step


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_values_and_what_shares_memory(function):
    assert compare(function).traces <= 3


def meddles(s, i):
    """Somebody else has what the function left, and puts other tensors there."""
    s.kept[i] = s.h
    s.kept[-i - 1] = s.p.data
    if i == 4:
        s.h, s.last = torch.full_like(s.h, 7.0), torch.full_like(s.g, 5.0)
        s.p.data = torch.full_like(s.p.data, 3.0)
        s.q.data = torch.full_like(s.q.data, 2.0)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_what_others_do_between_calls(function):
    compare(function, meddles)


def test_memory_of_an_argument():
    def step(p, x):
        p.data = p.data * 0.5 + x
        return p.sum()

    f, x = torch.tpu.jit(step), torch.ones(3, device=DEVICE)
    for i in range(5):
        p = torch.full((3,), float(i), device=DEVICE)
        memory = p.data
        assert f(p, x).item() == 3 * (i * 0.5 + 1)
        assert p.tolist() == [i * 0.5 + 1] * 3
        assert memory.tolist() == [i] * 3
    assert f.traces <= 2


def test_a_function_that_raises_gives_no_memory():
    s = State(DEVICE)
    before, memory = s.p.detach().cpu(), s.p.untyped_storage()._cdata

    @torch.tpu.jit
    def step(x):
        s.p.data = s.p.data * 2
        s.p.data.add_(1)
        raise KeyError("no")

    for _ in range(3):
        with pytest.raises(KeyError):
            step(torch.ones(2, device=DEVICE))
        assert s.p.untyped_storage()._cdata == memory
        assert_close(s.p.detach().cpu(), before)


def test_a_state_of_an_optimizer_that_is_loaded():
    class Momentum(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.1})

        @torch.no_grad()
        def step(self):
            for p in self.param_groups[0]["params"]:
                state = self.state[p]
                state["m"] = 0.9 * state.get("m", torch.zeros_like(p)) + p.grad
                p.sub_(state["m"], alpha=0.1)

    def losses(device, wrap):
        s = State(device)
        opt = Momentum([s.p])

        @wrap
        def step(x):
            loss = descend(s, x)
            opt.step()
            return loss

        torch.manual_seed(1)
        done = []
        for i in range(8):
            if i == 4:
                opt.load_state_dict({**opt.state_dict(), "state": {0: {"m": torch.full((4,), 2.0)}}})
            done.append(step(torch.randn(3, 4).to(device)).item())
        return done

    assert_close(torch.tensor(losses(DEVICE, torch.tpu.jit)), torch.tensor(losses("cpu", lambda f: f)))


def test_parameters_in_one_memory():
    """Each has its own gradient, also when they are parted later."""

    def steps(device, wrap):
        s = State(device)
        s.q.requires_grad_()
        s.q.data = s.p.data

        @wrap
        def step(x):
            s.p.grad = s.q.grad = None
            loss = (s.p * x + s.q.square()).sum()
            loss.backward()
            with torch.no_grad():
                s.p.sub_(s.p.grad, alpha=0.1)
            return loss.detach()

        done = []
        for i in range(6):
            if i == 3:
                s.q.data = torch.full_like(s.q.data, 0.5)
            done += [step(torch.full((3, 4), 1.0 + i, device=device)), *(t.clone() for t in (s.p.grad, s.q.grad, s.p))]
        return [t.detach().cpu() for t in done]

    for actual, expected in zip(steps(DEVICE, torch.tpu.jit), steps("cpu", lambda f: f), strict=True):
        torch.testing.assert_close(actual, expected)
