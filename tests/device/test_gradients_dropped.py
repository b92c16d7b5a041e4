"""Gradients that a script drops right behind an optimizer's step are no results of the step's program."""

import pytest
import torch
import torch.nn as nn

WIDTH, ROUNDS = 96, 6


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def batches(device):
    g = torch.Generator().manual_seed(1)
    for _ in range(ROUNDS):
        yield torch.randn(8, WIDTH, generator=g).to(device)


def loss_of(m, x):
    return (m(x) - x).square().mean()


def behind(m, opt, x, i):
    loss_of(m, x).backward()
    opt.step()
    opt.zero_grad()


def by_the_module(m, opt, x, i):
    loss_of(m, x).backward()
    opt.step()
    m.zero_grad()


def _update(opt):
    opt.step()


def behind_a_function(m, opt, x, i):
    loss_of(m, x).backward()
    _update(opt)
    opt.zero_grad()


def first_of_a_round(m, opt, x, i):
    opt.zero_grad()
    loss_of(m, x).backward()
    opt.step()


def behind_something_else(m, opt, x, i):
    loss_of(m, x).backward()
    opt.step()
    m.norm = m[0].bias.grad * 2
    opt.zero_grad()


def every_other_round(m, opt, x, i):
    loss_of(m, x).backward()
    opt.step()
    if i % 2:
        opt.zero_grad()


def to_zero(m, opt, x, i):
    loss_of(m, x).backward()
    opt.step()
    opt.zero_grad(set_to_none=False)


def read_in_between(m, opt, x, i):
    loss_of(m, x).backward()
    opt.step()
    m.seen = m[0].weight.grad.sum().item()
    opt.zero_grad()


# How a round goes, and whether its gradients are dropped right behind the step.
LOOPS = [
    (behind, True),
    (by_the_module, True),
    (behind_a_function, True),
    (first_of_a_round, False),
    (behind_something_else, False),
    (every_other_round, False),
    (to_zero, False),
    (read_in_between, False),
]


def trained(device, loop):
    """The state after all rounds; how many programs there were after each; how many results the last one's step has."""
    m = model().to(device)
    opt = torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)
    programs, launches, results = [], {}, 0
    for i, x in enumerate(batches(device)):
        loop(m, opt, x, i)
        if device == "tpu":
            torch.tpu.synchronize()
            programs.append(torch.tpu.metrics()["programs"])
        if device == "tpu" and i >= ROUNDS - 2:
            steps = [g for g in torch.tpu.graphs() if len(g.ops) > 4]
            results = [len(g.outputs) for g in steps if g.launches != launches.get(g.number, 0)]
            launches = {g.number: g.launches for g in steps}
    return m.state_dict(), programs, results


@pytest.mark.parametrize("loop, dropped", LOOPS, ids=lambda v: getattr(v, "__name__", None))
def test_results_of_a_step(loop, dropped, fused):
    want, _, _ = trained("cpu", loop)
    got, programs, results = trained("tpu", loop)
    for a, b in zip(got.values(), want.values(), strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-5, atol=1e-6)
    parameters = len(want)
    # Weights and momenta, and gradients if somebody sees them.
    assert results == [2 * parameters if dropped else 3 * parameters]
    assert programs[-1] == programs[3], "nothing is made after the fourth round"


def test_a_round_waits_for_no_data(fused):
    """Where gradients are dropped at the head of a loop, the script may have waited for data before."""
    m = model().to("tpu")
    opt = torch.optim.SGD(m.parameters(), lr=0.1)
    launched = []
    for x in batches("tpu"):
        opt.zero_grad()
        loss_of(m, x).backward()
        before = torch.tpu.metrics()["flushes"].get("step", 0)
        opt.step()
        launched.append(torch.tpu.metrics()["flushes"].get("step", 0) - before)
    assert launched == [0] + [1] * (ROUNDS - 1)


def test_a_step_is_launched_before_whatever_comes_next(fused):
    m = model().to("tpu")
    x = next(batches("tpu"))
    for look in (
        lambda p, x: p.sum().item(),
        lambda p, x: p.cpu(),
        lambda p, x: torch.tpu.synchronize(),
        lambda p, x: torch.ones(3).to("tpu"),
        lambda p, x: x * 2,
        lambda p, x: torch.tpu.Event().record(),
    ):
        opt = torch.optim.SGD(m.parameters(), lr=0.1)
        loss_of(m, x).backward()
        before = torch.tpu.metrics()["flushes"].get("step", 0)
        eval(compile("opt.step()", f"a line of its own {id(look)}", "eval"), {"opt": opt})
        assert torch.tpu.metrics()["flushes"].get("step", 0) == before
        look(m[0].weight, x)
        assert torch.tpu.metrics()["flushes"].get("step", 0) == before + 1
        assert m[0].weight.grad is not None


def test_two_optimizers(fused):
    """The gradients that one drops say nothing of the other's."""
    states = []
    for device in ("cpu", "tpu"):
        one, two = model().to(device), model().to(device)
        a, b = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (one, two))
        for x in batches(device):
            loss_of(one, x).backward()
            loss_of(two, one(x).detach()).backward()
            a.step()
            b.step()
            a.zero_grad()
            b.zero_grad()
        states.append([p.detach().cpu() for m in (one, two) for p in m.parameters()])
    torch.testing.assert_close(states[1], states[0], rtol=1e-5, atol=1e-6)


def test_compiled_step(fused):
    m = model().to("tpu")
    opt = torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)
    forward, step = torch.compile(loss_of, backend="tpu"), torch.compile(opt.step, backend="tpu")
    for x in batches("tpu"):
        torch.tpu.synchronize()
        launches = {g.number: g.launches for g in torch.tpu.graphs()}
        forward(m, x).backward()
        step()
        opt.zero_grad()
    torch.tpu.synchronize()
    (last,) = [g for g in torch.tpu.graphs() if g.launches != launches.get(g.number, 0)]
    assert len(last.outputs) == 2 * len(list(m.parameters()))
