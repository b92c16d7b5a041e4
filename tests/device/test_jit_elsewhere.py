"""Numbers of Python that a function of `torch.tpu.jit` finds elsewhere than among its arguments: one that is another one
in each call is an operand of its program, and what the function makes of it each call leaves there.
"""

import types
import warnings

import pytest
import torch
from jit_support import OPTIMIZERS, batches, mlp, training
from support import DEVICE
from torch.nn import functional as F

CALLS = 9


class Scale(torch.nn.Module):
    gain = 1.0

    def __init__(self):
        super().__init__()
        self.beta, self.step = 0.5, 0
        self.cfg = types.SimpleNamespace(temperature=1.0)
        self.options = {"t": 1.0, "deep": {"t": 1.0}}
        self.dropped = torch.nn.Dropout(0.0)

    def by_attribute(self, x):
        return x * self.beta

    def by_object(self, x):
        return (x / self.cfg.temperature).softmax(-1)

    def by_item(self, x):
        return x * self.options["deep"]["t"] + self.options["t"]

    def by_class(self, x):
        return x * Scale.gain

    def by_layer(self, x):
        return F.leaky_relu(x, self.dropped.p)

    def counts(self, x):
        self.step += 1
        return x / (1 - 0.9**self.step)

    def counts_in_a_dict(self, x):
        self.options["n"] = self.options.get("n", 0) + 2
        return x * self.options["n"]

    def counts_and_branches(self, x):
        self.step += 1
        return x + 1 if self.step % 2 == 0 else x * self.step

    def decays(self, x):
        self.beta = 0.9 * self.beta + 0.05
        self.step += x.shape[0]
        return x * self.beta / self.step


def sets(path):
    def change(s, i):
        *names, last = path.split(".")
        for name in names:
            s = s[name] if isinstance(s, dict) else getattr(s, name)
        value = 0.25 + 0.125 * i
        s.update({last: value}) if isinstance(s, dict) else setattr(s, last, value)

    return change


def of_class(s, i):
    Scale.gain = 1.0 + i


def nothing(s, i):
    pass


# What reads a number, and what changes it before each call.
READS = {
    "by_attribute": sets("beta"),
    "by_object": sets("cfg.temperature"),
    "by_item": sets("options.deep.t"),
    "by_class": of_class,
    "by_layer": sets("dropped.p"),
    "counts": nothing,
    "counts_in_a_dict": nothing,
    "counts_and_branches": nothing,
    "decays": nothing,
}


def called(name, device, wrap):
    s = Scale()
    method = getattr(s, name)
    f = wrap(lambda x: method(x))
    done = []
    torch.manual_seed(0)
    for i in range(CALLS):
        READS[name](s, i)
        y = f(torch.randn(2, 3).to(device)).cpu()
        done += [y, s.beta, s.step, s.options.get("n"), s.options["t"], s.dropped.p, s.cfg.temperature]
        assert not any(isinstance(x, (torch.SymInt, torch.SymFloat)) for x in done)
    return done, f


@pytest.mark.parametrize("name", READS)
def test_a_number_that_differs_in_each_call(name):
    wanted, _ = called(name, "cpu", lambda f: f)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got, f = called(name, DEVICE, torch.tpu.jit)
    torch.testing.assert_close(got, wanted)
    assert f.traces <= CALLS
    x = torch.ones(2, 3, device=DEVICE)
    traces = f.traces
    f(x), f(x)
    assert f.traces == traces


def cycled(name, device, change):
    torch.manual_seed(0)
    model = mlp().to(device)
    optimizer = OPTIMIZERS[name](model.parameters())
    scheduler = change(optimizer)
    step = training(model, optimizer)
    f = torch.tpu.jit(step) if device == DEVICE else step
    losses, options = [], []
    for x, y in batches() * 2:
        losses.append(f(x.to(device), y.to(device)).cpu())
        scheduler()
        options.append([{k: v for k, v in g.items() if isinstance(v, (float, tuple))} for g in optimizer.param_groups])
    return losses, options, [p.detach().cpu() for p in model.parameters()], f


def one_cycle(optimizer):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=12).step


def cyclic(optimizer):
    return torch.optim.lr_scheduler.CyclicLR(optimizer, 0.001, 0.01, step_size_up=4).step


def exponential(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9).step


def decayed(optimizer):
    def step():
        for group in optimizer.param_groups:
            group["weight_decay"] = group["weight_decay"] * 0.9 + 0.01

    return step


@pytest.mark.parametrize(
    ("name", "change"),
    [("sgd momentum", one_cycle), ("adamw", one_cycle), ("adam", cyclic), ("adamw", decayed), ("rmsprop", exponential)],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_what_a_scheduler_changes(name, change):
    *wanted, _ = cycled(name, "cpu", change)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        *got, f = cycled(name, DEVICE, change)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    assert f.traces <= 8


def test_what_depends_on_the_class_of_a_number_is_run_in_each_call():
    s = types.SimpleNamespace(beta=0.0)
    f = torch.tpu.jit(lambda x: x * s.beta if isinstance(s.beta, float) else x)
    x = torch.ones(2, device=DEVICE)
    with pytest.warns(UserWarning, match="is run anew in each call, as SimpleNamespace.beta is another number"):
        for i in range(CALLS):
            s.beta = 0.25 * i + 0.5
            assert f(x).tolist() == [s.beta] * 2


def test_a_number_that_follows_from_an_argument_is_left_by_each_call():
    s = types.SimpleNamespace(last=0.0)

    @torch.tpu.jit
    def step(x, rate):
        before = s.last
        s.last = rate * 2
        return x * rate + before

    x = torch.ones(2, device=DEVICE)
    for i in range(CALLS):
        before = s.last
        assert step(x, 0.5 + i).tolist() == [0.5 + i + before] * 2
        assert type(s.last) is float
        assert s.last == 1 + 2 * i
