"""Scripts of many kinds, as users write them: the losses are the CPU's, and nothing is compiled after the third step, in
eager mode, with torch.compile and in torch.tpu.jit.

What a step compiles depends on the script alone; see `test_what_autograd_lets_go_of_late` for what does not.
"""

import copy
import math
import time
import warnings
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from support import DEVICE
from torch import nn
from torch.func import functional_call, grad, stack_module_state, vmap

STEPS = 6
WAYS = {
    "eager": lambda f: f,
    "compile": lambda f: torch.compile(f, backend="tpu"),
    "jit": lambda f: torch.tpu.jit(f),
}
# Else what one way makes would be there for the next.
WIDTHS = {"eager": 12, "compile": 13, "jit": 14}


def mlp(*widths, act=nn.Tanh):
    layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), act())]
    return nn.Sequential(*layers[:-1])


class Batches:
    """Random batches, the same for both devices."""

    def __init__(self, device):
        self.device, self.generator = device, torch.Generator().manual_seed(7)

    def normal(self, *size):
        return torch.randn(*size, generator=self.generator).to(self.device)

    def uniform(self, *size):
        return torch.rand(*size, generator=self.generator).to(self.device)

    def below(self, n, *size):
        return torch.randint(n, size, generator=self.generator).to(self.device)


def schedule(device, way, width):
    """A schedule, clipping, an evaluation."""
    model = mlp(8, width, width, 4).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    batches = Batches(device)
    # Dynamo makes a graph for each learning rate of an optimizer that it captures, on every device.
    forward = way(model) if way is WAYS["compile"] else model

    def update(x, y):
        optimizer.zero_grad()
        loss = F.cross_entropy(forward(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    update = way(update) if way is WAYS["jit"] else update

    def step():
        loss = update(batches.normal(16, 8), batches.below(4, 16))
        scheduler.step()
        with torch.no_grad():
            return loss.item() + model(batches.normal(4, 8)).sum().item()

    return step


def gan(device, way, width):
    """Two optimizers, a gradient penalty."""
    maker, judge = mlp(4, width, 8).to(device), mlp(8, width, 1).to(device)
    of_maker, of_judge = (torch.optim.Adam(m.parameters(), 1e-3, betas=(0.0, 0.9)) for m in (maker, judge))
    batches = Batches(device)

    @way
    def update_judge(x, z, at):
        fake = maker(z).detach()
        mixed = (at * x + (1 - at) * fake).requires_grad_()
        (slope,) = torch.autograd.grad(judge(mixed).sum(), mixed, create_graph=True)
        loss = judge(fake).mean() - judge(x).mean() + 10 * ((slope.norm(2, 1) - 1) ** 2).mean()
        of_judge.zero_grad()
        loss.backward()
        of_judge.step()
        return loss.detach()

    @way
    def update_maker(z):
        loss = -judge(maker(z)).mean()
        of_maker.zero_grad()
        loss.backward()
        of_maker.step()
        return loss.detach()

    def step():
        for _ in range(2):
            loss = update_judge(batches.normal(16, 8), batches.normal(16, 4), batches.uniform(16, 1))
        return loss.item() + update_maker(batches.normal(16, 4)).item()

    return step


def maml(device, way, width):
    """Gradients of steps along gradients."""
    model = mlp(1, width, 1).to(device)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    batches = Batches(device)

    @way
    def update(x, y):
        optimizer.zero_grad()
        total = 0.0
        for task in range(2):
            inner = dict(model.named_parameters())
            for _ in range(2):
                loss = F.mse_loss(functional_call(model, inner, (x[task, :5],)), y[task, :5])
                slopes = torch.autograd.grad(loss, inner.values(), create_graph=True)
                inner = {k: v - 0.1 * g for (k, v), g in zip(inner.items(), slopes, strict=True)}
            total = total + F.mse_loss(functional_call(model, inner, (x[task, 5:],)), y[task, 5:])
        total.backward()
        optimizer.step()
        return total.detach()

    def step():
        x = batches.uniform(2, 10, 1) * 6
        return update(x, torch.sin(x + batches.uniform(2, 1, 1))).item()

    return step


def pinn(device, way, width):
    """Second derivatives by what goes in."""
    model = mlp(2, width, width, 1).to(device)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    batches = Batches(device)

    @way
    def update(x, t, start):
        optimizer.zero_grad()
        x, t = x.requires_grad_(), t.requires_grad_()
        u = model(torch.cat([x, t], 1))
        u_x, u_t = torch.autograd.grad(u.sum(), (x, t), create_graph=True)
        (u_xx,) = torch.autograd.grad(u_x.sum(), x, create_graph=True)
        at_start = model(torch.cat([start, torch.zeros_like(start)], 1)) + torch.sin(math.pi * start)
        loss = (u_t + u * u_x - 0.01 * u_xx).pow(2).mean() + at_start.pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return lambda: update(*(batches.uniform(16, 1) for _ in range(3))).item()


def ensemble(device, way, width):
    """Models side by side, by vmap."""
    models = [mlp(8, width, 4).to(device) for _ in range(3)]
    base = copy.deepcopy(models[0]).to("meta")
    parameters, buffers = stack_module_state(models)
    optimizer = torch.optim.SGD(parameters.values(), 0.1, momentum=0.9)
    batches = Batches(device)

    @way
    def update(x, y):
        optimizer.zero_grad()
        out = vmap(lambda p, b, x: functional_call(base, (p, b), (x,)), (0, 0, None))(parameters, buffers, x)
        loss = F.cross_entropy(out.flatten(0, 1), y.repeat(3))
        loss.backward()
        optimizer.step()
        return loss.detach()

    return lambda: update(batches.normal(16, 8), batches.below(4, 16)).item()


def private(device, way, width):
    """A gradient for each sample, clipped; no optimizer."""
    model = mlp(8, width, 4).to(device)
    weights = {k: v.detach().clone() for k, v in model.named_parameters()}
    batches = Batches(device)

    def loss_of(w, x, y):
        return F.cross_entropy(functional_call(model, w, (x[None],)), y[None])

    @way
    def update(w, x, y):
        g = vmap(grad(loss_of), (None, 0, 0))(w, x, y)
        norm = torch.sqrt(sum(v.flatten(1).pow(2).sum(1) for v in g.values()))
        scale = (1 / (norm + 1e-6)).clamp(max=1)
        return {k: w[k] - 0.1 * torch.einsum("b,b...->...", scale, g[k]) / len(x) for k in w}, norm.mean()

    def step():
        nonlocal weights
        weights, norm = update(weights, batches.normal(8, 8), batches.below(4, 8))
        return norm.item()

    return step


def policy(device, way, width):
    """Rollouts on the host, then updates on what they gave."""
    body, policy, value = mlp(4, width, 8).to(device), nn.Linear(8, 2).to(device), nn.Linear(8, 1).to(device)
    parameters = [p for m in (body, policy, value) for p in m.parameters()]
    optimizer = torch.optim.Adam(parameters, 3e-4)
    batches = Batches("cpu")
    state = batches.normal(4, 4)

    @way
    def act(s):
        return torch.softmax(policy(body(s)), -1)

    @way
    def update(s, a, old, gain):
        h = body(s)
        log = F.log_softmax(policy(h), -1)
        ratio = (log.gather(1, a[:, None])[:, 0] - old).exp()
        loss = -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean() + F.mse_loss(value(h)[:, 0], gain)
        optimizer.zero_grad()
        (loss + 0.01 * (log * log.exp()).sum(1).mean()).backward()
        nn.utils.clip_grad_norm_(parameters, 0.5)
        optimizer.step()
        return loss.detach()

    def step():
        nonlocal state
        seen, done, old, gains = [], [], [], []
        for _ in range(3):
            with torch.no_grad():
                chances = act(state.to(device)).cpu()
            action = (batches.uniform(4) > chances[:, 0]).long()
            seen, done = [*seen, state], [*done, action]
            old.append(chances.gather(1, action[:, None])[:, 0].log())
            state = 0.9 * state + 0.1 * batches.normal(4, 4)
            gains.append(-state.abs().sum(1))
        given = [torch.cat(x).to(device) for x in (seen, done, old, gains)]
        return sum(update(*given) for _ in range(2)).item()

    return step


def averaged(device, way, width):
    """An average of the weights, looked at in each step."""
    model = mlp(8, width, 4).to(device)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    batches = Batches(device)

    @way
    def update(x, y):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    def step():
        x, y = batches.normal(16, 8), batches.below(4, 16)
        loss = update(x, y)
        average.update_parameters(model)
        with torch.no_grad():
            return loss.item() + F.cross_entropy(average(x), y).item()

    return step


def accumulated(device, way, width):
    """Gradients of several batches for one step."""
    model = mlp(8, width, 4).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    batches = Batches(device)

    @way
    def add(x, y):
        loss = F.cross_entropy(model(x), y) / 3
        loss.backward()
        return loss.detach()

    def step():
        total = sum(add(batches.normal(16, 8), batches.below(4, 16)) for _ in range(3))
        optimizer.step()
        optimizer.zero_grad()
        return total.item()

    return step


def scaled(device, way, width):
    """Autocast and a GradScaler."""
    model = mlp(8, width, 4).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scaler = torch.amp.GradScaler(device, init_scale=256.0)
    batches = Batches(device)

    @way
    def add(x, y):
        with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x).float(), y)
        scaler.scale(loss).backward()
        return loss.detach()

    def step():
        optimizer.zero_grad()
        loss = add(batches.normal(16, 8), batches.below(4, 16))
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return step


def contrastive(device, way, width):
    """A model that follows another one, and a queue that is written round and round."""
    model = mlp(8, width, 8).to(device)
    follower = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), 0.03, momentum=0.9)
    batches = Batches(device)
    queue, at = F.normalize(batches.normal(8, 48), dim=0), 0

    @way
    def update(x, y, queue):
        optimizer.zero_grad()
        a = F.normalize(model(x), dim=1)
        with torch.no_grad():
            for p, q in zip(follower.parameters(), model.parameters(), strict=True):
                p.mul_(0.99).add_(q, alpha=0.01)
            b = F.normalize(follower(y), dim=1)
        scores = torch.cat([(a * b).sum(1, keepdim=True), a @ queue.clone()], 1)
        loss = F.cross_entropy(scores / 0.07, torch.zeros(16, dtype=torch.long, device=device))
        loss.backward()
        optimizer.step()
        return loss.detach(), b

    def step():
        nonlocal at
        x = batches.normal(16, 8)
        loss, b = update(x + 0.1, x - 0.1, queue)
        queue[:, at : at + 16] = b.T
        at = (at + 16) % 48
        return loss.item()

    return step


SCRIPTS: list[Callable] = [
    schedule, gan, maml, pinn, ensemble, private, policy, averaged, accumulated, scaled, contrastive,
]  # fmt: skip


def losses_of(script, device, wrap, width, after_step=lambda: None) -> list[float]:
    torch.manual_seed(0)
    step = script(device, wrap, width)
    losses = []
    for _ in range(STEPS):
        losses.append(step())
        after_step()
    return losses


def count() -> int:
    torch.tpu.synchronize()
    return torch.tpu.metrics()["programs"]


# Dynamo takes seconds for these.
SLOW = (gan, maml, pinn, policy, ensemble, private)
CASES = [
    pytest.param(
        script,
        way,
        marks=pytest.mark.slow if way == "compile" and script in SLOW else (),
        id=f"{script.__name__}-{way}",
    )
    for script in SCRIPTS
    for way in WAYS
]


@pytest.mark.parametrize(("script", "way"), CASES)
def test_nothing_is_compiled_after_the_third_step(script, way):
    torch._dynamo.reset()
    counts = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Dynamo, that it leaves out a profiler's range
        expected = losses_of(script, "cpu", WAYS["eager"], WIDTHS[way])
        got = losses_of(script, DEVICE, WAYS[way], WIDTHS[way], lambda: counts.append(count()))
    assert got == pytest.approx(expected, rel=1e-3, abs=1e-4)
    assert counts[2] == counts[-1], f"programs after each step: {counts}\n{torch.tpu.explain()}"


class Late:
    """Something of which it takes long to let go."""

    def __del__(self):
        time.sleep(0.02)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x * 2
        ctx.late, ctx.result = Late(), y
        return y

    @staticmethod
    def backward(ctx, g):
        return g * ctx.result


@pytest.mark.parametrize("ends", ["grad", "create_graph", "backward"])
def test_what_autograd_lets_go_of_late(ends):
    """Autograd's thread holds what it ran last for some time after the backward: it is visible to nobody else."""

    def step():
        # The leaf is seen by nobody after its gradient is there.
        x = torch.ones(3, device=DEVICE, requires_grad=True)
        y = Doubled.apply(x).sum()
        if ends == "backward":
            y.backward()
            g = x.grad
        else:
            (g,) = torch.autograd.grad(y, x, create_graph=ends == "create_graph")
        del x, y
        return (g.detach() * len(ends)).sum()

    counts = []
    with torch.autograd.set_multithreading_enabled(True):
        for _ in range(5):
            assert step().item() == 6 * len(ends)
            counts.append(count())
    assert counts[2] == counts[-1], counts
