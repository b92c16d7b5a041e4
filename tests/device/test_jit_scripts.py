"""Idioms of training scripts in functions of `torch.tpu.jit`: what they give and leave is what it is on the CPU, and the
function is not run anew in each call.
"""

import functools
import itertools
import warnings

import pytest
import torch
from support import DEVICE
from torch import nn

assert_close = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)


def compare(build, steps=6, traces=None):
    """`build(device, wrap)` gives a function of the step's number, and the functions that it has jitted."""

    def run(device, wrap):
        torch.manual_seed(0)
        step, jitted = build(device, wrap)
        return [[x.detach().clone().cpu() for x in step(i)] for i in range(steps)], jitted

    expected, _ = run("cpu", lambda f: f)
    actual, jitted = run(DEVICE, torch.tpu.jit)
    for a, b in zip(actual, expected, strict=True):
        assert_close(a, b)
    if traces is not None:
        assert [f.traces for f in jitted] == traces


def of_step(i, *size):
    return torch.randn(*size, generator=torch.Generator().manual_seed(i))


def small(*sizes):
    layers = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in itertools.pairwise(sizes)]
    return nn.Sequential(*layers)


def tell(module, on):
    for p in module.parameters():
        p.requires_grad_(on)


def tell_by_attribute(module, on):
    for p in module.parameters():
        p.requires_grad = on


@pytest.mark.parametrize("tell", [tell, tell_by_attribute, lambda module, on: module.requires_grad_(on)])
@pytest.mark.parametrize("in_one", [False, True])
def test_one_of_two_models_is_frozen_within_a_step(tell, in_one):
    """As GANs do: what requires gradients is another one when the function ends, and each call leaves it so."""

    def build(device, wrap):
        maker, judge = small(4, 6).to(device), small(6, 1).to(device)
        of_maker, of_judge = (torch.optim.SGD(m.parameters(), 0.1) for m in (maker, judge))

        def for_judge(x, z):
            tell(maker, False)
            tell(judge, True)
            of_judge.zero_grad()
            loss = (judge(x) - judge(maker(z))).mean()
            loss.backward()
            of_judge.step()
            return loss.detach()

        def for_maker(z):
            tell(maker, True)
            tell(judge, False)
            of_maker.zero_grad()
            loss = -judge(maker(z)).mean()
            loss.backward()
            of_maker.step()
            return loss.detach()

        both = [wrap(lambda x, z: (for_judge(x, z), for_maker(z)))]
        each = [wrap(for_judge), wrap(for_maker)]

        def step(i):
            x, z = of_step(i, 5, 6).to(device), of_step(-i - 1, 5, 4).to(device)
            losses = both[0](x, z) if in_one else (each[0](x, z), each[1](z))
            flags = [torch.tensor(p.requires_grad) for m in (maker, judge) for p in m.parameters()]
            return [*losses, *flags, *maker.parameters(), *judge.parameters()]

        return step, both if in_one else each

    compare(build, traces=[2] if in_one else [2, 2])


def test_a_run_that_raises_tells_nothing():
    model = small(3, 3).to(DEVICE)

    def f(x):
        tell(model, False)
        raise ValueError("of the function")

    with pytest.raises(ValueError, match="of the function"):
        torch.tpu.jit(f)(torch.ones(3, device=DEVICE))
    assert all(p.requires_grad for p in model.parameters())


TENSORS = {
    "on the device": lambda x, t: torch.tensor([t, 1 / t, 3.0], device=x.device),
    "moved": lambda x, t: torch.tensor([t, 2 * t, 1.0]).to(x.device),
    "moved to a dtype": lambda x, t: torch.tensor((t, 2.5, -t)).to(x.device, torch.float64).float(),
    "of lists": lambda x, t: torch.tensor([[t], [t * t], [0.5]], device=x.device)[:, 0],
    "like another": lambda x, t: x.new_tensor([t, t + 1, t + 2]),
    "as_tensor": lambda x, t: torch.as_tensor([t, t, 1.0], device=x.device),
    "of one": lambda x, t: torch.tensor(t, device=x.device),
    "seen on the host": lambda x, t: torch.tensor([t, 1.0, 2.0]).sum().item() * x,
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_of_numbers_that_vary(name):
    def build(device, wrap):
        f = wrap(lambda x, t: TENSORS[name](x, t) * x)
        return (lambda i: [f(of_step(i, 3).to(device), 0.31 + 0.03 * i)]), [f]

    compare(build, traces=[8] if name == "seen on the host" else [3])


def test_a_list_of_numbers_that_is_given():
    def build(device, wrap):
        f = wrap(lambda x, weights: torch.tensor(weights, device=x.device) * x)
        return (lambda i: [f(of_step(i, 3).to(device), [0.1 + i, 0.5, 1.0 / (i + 1)])]), [f]

    compare(build)


MOVES = {
    "to": lambda x, device: x.to(device, torch.float64),
    "to by names": lambda x, device: x.to(device=device, dtype=torch.float16, non_blocking=True),
    "copy_": lambda x, device: torch.empty(3, dtype=torch.float64, device=device).copy_(x),
    "written to a part": lambda x, device: torch.zeros(2, 3, dtype=torch.float64, device=device).index_put(
        (torch.tensor([1], device=device),), x.to(device, torch.float64)
    ),
}


@pytest.mark.parametrize("name", MOVES)
def test_a_move_that_converts(name):
    """Of a tensor of the host that is given, and of one that the function makes."""

    def build(device, wrap):
        given = wrap(lambda x: MOVES[name](x, device) * 2)
        made = wrap(lambda x: MOVES[name](torch.tensor([1.5, 2.5, -3.25]), device) + x.to(device))
        return (lambda i: [given(of_step(i, 3)), made(of_step(i, 3))]), [given, made]

    compare(build, traces=[1, 1])


DISTRIBUTIONS = {
    "categorical": lambda d, h: d.Categorical(logits=h),
    "normal": lambda d, h: d.Independent(d.Normal(h, h.exp()), 1),
    "bernoulli": lambda d, h: d.Independent(d.Bernoulli(logits=h), 1),
    "beta": lambda d, h: d.Independent(d.Beta(h.exp(), h.exp() + 1), 1),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_distributions(name):
    """What PyTorch checks of their parameters would be read on the host."""

    def build(device, wrap):
        policy = small(4, 3).to(device)
        opt = torch.optim.SGD(policy.parameters(), 0.1)

        def f(x, action):
            opt.zero_grad()
            of = DISTRIBUTIONS[name](torch.distributions, policy(x))
            loss = -(of.log_prob(action) + 0.1 * of.entropy()).mean()
            loss.backward()
            opt.step()
            return loss.detach()

        f = wrap(f)

        def step(i):
            action = torch.arange(5) % 3 if name == "categorical" else (of_step(i, 5, 3) > 0).float().clamp(0.1, 0.9)
            action = action.round() if name == "bernoulli" else action
            return [f(of_step(i, 5, 4).to(device), action.to(device)), *policy.parameters()]

        return step, [f]

    compare(build, traces=[2])


def test_a_momentum_that_a_scheduler_changes_is_an_operand():
    model = small(3, 3).to(DEVICE)
    opt = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(opt, 0.3, total_steps=20)

    @torch.tpu.jit
    def step(x):
        opt.zero_grad()
        model(x).square().mean().backward()
        opt.step()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i in range(12):
            step(of_step(i, 2, 3).to(DEVICE))
            schedule.step()
            if i == 7:
                traces = step.traces
    assert step.traces == traces
