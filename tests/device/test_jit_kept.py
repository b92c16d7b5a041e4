"""What a function of `torch.tpu.jit` leaves under a name that was there before (an attribute, a buffer, an item of a
dict, the state of an optimizer) each call leaves there, as PyTorch does on the CPU.
"""

import functools

import pytest
import torch
from support import DEVICE
from torch import nn

assert_close = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)


class Net(nn.Module):
    """Keeps things in its attributes and buffers while it computes."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 6)
        self.register_buffer("mean", torch.zeros(8))
        self.aux = self.state = self.before = None
        self.keeps = ()

    def forward(self, x):
        h = torch.tanh(self.first(x))
        if "mean" in self.keeps:
            self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        if "aux" in self.keeps:
            self.aux = h.square().mean()
        if "state" in self.keeps:
            self.before = self.state
            self.state = (h if self.state is None else h + 0.5 * self.state).detach()
            h = h + self.state
        return self.second(h) - self.mean.sum()


class Recorder:
    def __init__(self, module):
        self.output = None
        module.register_forward_hook(self.record)

    def record(self, module, given, output):
        self.output = output.detach()


class Momentum(torch.optim.Optimizer):
    """An optimizer whose state is another tensor after each step."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["m"] = 0.9 * state.get("m", torch.zeros_like(p)) + p.grad
                p.add_(state["m"], alpha=-group["lr"])


def in_a_dict(model, features):
    model.first.register_forward_hook(lambda module, given, output: features.__setitem__("first", output))


def in_an_object(model, features):
    features["recorder"] = Recorder(model.first)


def keeps(*what):
    return lambda model, features: setattr(model, "keeps", what)


def spectral(model, features):
    torch.manual_seed(3)  # of the host, as its vectors are drawn there
    nn.utils.spectral_norm(model.first)


KEPT = {
    "nothing": lambda model, features: None,
    "an item of a dict": in_a_dict,
    "an attribute of an object": in_an_object,
    "a buffer": keeps("mean"),
    "a loss": keeps("aux"),
    "a state, and the one before": keeps("state"),
    "all": keeps("mean", "aux", "state"),
    "spectral norm": spectral,
}


def steps(device, change, optimizer, wrap, between=lambda i, model, features: None, scale=lambda i: 1.0):
    """What five steps of training give and leave; and the function."""
    torch.manual_seed(0)
    model, features = Net(), {}
    change(model, features)
    model.to(device)
    opt = optimizer(model.parameters())

    @wrap
    def step(x, factor):
        opt.zero_grad()
        loss = (model(x) * factor).square().mean()
        if model.aux is not None:
            loss = loss + model.aux
        loss.backward()
        opt.step()
        return loss.detach()

    seen = []
    for i in range(6):
        torch.manual_seed(10 + i)
        loss = step(torch.randn(4, 6).to(device), scale(i))
        kept = [model.mean, model.aux, model.state, model.before, features.get("first"), model.first.weight]
        kept.append(getattr(features.get("recorder"), "output", None))
        kept += [s["m"] for s in opt.state.values() if "m" in s]
        seen.append([loss, *kept])
        between(i, model, features)
    return [[None if x is None else x.detach().cpu() for x in row] for row in seen], step


def compare(change, optimizer=lambda p: torch.optim.SGD(p, 0.1), most=5, **options):
    expected, _ = steps("cpu", change, optimizer, lambda f: f, **options)
    actual, step = steps(DEVICE, change, optimizer, torch.tpu.jit, **options)
    for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
        for x, y in zip(a, b, strict=True):
            assert (x is None) == (y is None), i
            if y is not None:
                assert_close(x, y, msg=lambda m, i=i: f"step {i}: {m}")
    assert step.traces <= most


@pytest.mark.parametrize("name", KEPT)
def test_what_is_left_under_a_name_is_left_in_each_call(name):
    compare(KEPT[name], most=3)


@pytest.mark.parametrize("name", ["nothing", "all"])
def test_a_state_of_an_optimizer_that_is_another_tensor_each_time(name):
    compare(KEPT[name], Momentum, most=3)


@pytest.mark.parametrize("name", ["an item of a dict", "a state, and the one before"])
def test_with_numbers_that_vary(name):
    compare(KEPT[name], scale=lambda i: 1.0 + 0.1 * i, most=5)


def cleared(i, model, features):
    features.pop("first", None)
    if i == 3:
        model.state = model.before = None


@pytest.mark.parametrize("name", ["an item of a dict", "a state, and the one before"])
def test_what_is_cleared_between_calls(name):
    compare(KEPT[name], between=cleared, most=6)


def set_anew(i, model, features):
    if i == 3:
        model.mean = torch.full_like(model.mean, 2.0)
        model.state = torch.ones_like(model.state)


def test_what_is_set_between_calls_is_taken():
    compare(KEPT["all"], between=set_anew, most=4)


def test_each_call_leaves_a_tensor_of_its_own():
    model = Net().to(DEVICE)
    model.keeps = ("aux",)
    f = torch.tpu.jit(lambda x: model(x).detach())
    seen = []
    with torch.no_grad():
        for i in range(5):
            f(torch.full((4, 6), float(i), device=DEVICE))
            seen.append(model.aux)
    values = [x.item() for x in seen]
    assert len({*values}) == len(values)


def test_two_names_of_one_tensor():
    """What both names had at first is not what they have later."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = self.b = torch.ones(3)

        def forward(self, x):
            y = self.a * x + self.b
            self.a = y
            return y

    def run(wrap, device):
        m = Two()
        m.a = m.b = m.a.to(device)
        f = wrap(m)
        return [f(torch.full((3,), 2.0, device=device)).cpu() for _ in range(5)]

    for a, b in zip(run(torch.tpu.jit, DEVICE), run(lambda m: m, "cpu"), strict=True):
        assert_close(a, b)


def test_what_a_hook_reads_is_noticed():
    """A variable around a hook is one of the function's."""

    def run(wrap, device):
        layer, options = nn.Linear(3, 3), {"scale": 2.0}
        with torch.no_grad():
            layer.weight.fill_(0.5)
            layer.bias.zero_()
        layer.to(device).register_forward_hook(lambda module, given, output: output * options["scale"])
        f = wrap(lambda x: layer(x).detach())
        results = []
        for scale in (2.0, 2.0, 3.0, 3.0):
            options["scale"] = scale
            results.append(f(torch.ones(2, 3, device=device)).cpu())
        return results

    for a, b in zip(run(torch.tpu.jit, DEVICE), run(lambda f: f, "cpu"), strict=True):
        assert_close(a, b)


def test_gradients_of_what_is_left_are_refused():
    model = Net().to(DEVICE)
    model.keeps = ("aux",)
    f = torch.tpu.jit(lambda x: model(x).detach())
    for _ in range(4):
        f(torch.ones(4, 6, device=DEVICE))
    with pytest.raises(RuntimeError, match="take part in no autograd graph"):
        model.aux.backward()


def test_the_program_can_be_looked_at():
    model = Net().to(DEVICE)
    model.keeps = ("state",)
    f = torch.tpu.jit(lambda x: model(x).detach())
    x = torch.ones(4, 6, device=DEVICE)
    for _ in range(2):
        f(x)
    before = model.state
    assert "stablehlo" in f.lower(x).as_text()
    assert model.state is before


class Counting(nn.Module):
    """Counts its calls in a number, as metrics do, and leaves another tensor under a name in each."""

    def __init__(self, width):
        super().__init__()
        self.calls = 0
        self.register_buffer("total", torch.zeros(width))

    def forward(self, x):
        self.calls += 1
        self.total = self.total + x.detach().sum(0)
        return self.total.sum()


def counting(width):
    return Counting(width).to(DEVICE)


def counting_in_training(width, optimizer=torch.optim.Adam, counts=True):
    layer, seen = nn.Linear(width, width).to(DEVICE), Counting(width).to(DEVICE)
    opt = optimizer(layer.parameters())

    def step(x):
        opt.zero_grad()
        y = layer(x)
        loss = y.square().sum()
        if counts:
            seen(y)
        else:
            seen.total = seen.total * 0.9 + y.detach().sum(0)
        loss.backward()
        opt.step()
        return loss.detach()

    return step


def counting_with_the_number(width):
    state = {"n": 0, "mean": torch.zeros(width, device=DEVICE)}

    def step(x):
        state["n"] += 1
        state["mean"] = state["mean"] + (x.sum(0) - state["mean"]) / (state["n"] + 0.25)
        return state["mean"].sum()

    return step


def other_memory(width):
    p, state = nn.Parameter(torch.zeros(width, device=DEVICE)), {"n": 0}

    def step(x):
        state["n"] += 1
        p.data = p.data * 0.5 + x.sum(0)
        return p.detach().sum()

    return step


SETTLED = {
    "a count and a buffer": counting,
    "a count and a buffer in training": counting_in_training,
    "a buffer in training": functools.partial(counting_in_training, counts=False),
    "a state that is another tensor each time": functools.partial(counting_in_training, optimizer=Momentum),
    "a count that is computed with": counting_with_the_number,
    "the memory of a parameter": other_memory,
}


@pytest.mark.parametrize("name", SETTLED)
def test_no_call_makes_a_program_after_the_second(name):
    width = 21 + list(SETTLED).index(name)  # else what one makes is there for the next
    step = torch.tpu.jit(SETTLED[name](width))
    counts = []
    for _ in range(8):
        step(torch.ones(4, width).to(DEVICE))
        torch.tpu.synchronize()
        counts.append(torch.tpu.metrics()["programs"])
    assert counts[1] == counts[-1], f"programs after each call: {counts}\n{torch.tpu.explain()}"
