"""Nothing that may change between calls is silently a constant of a function of `torch.tpu.jit`: values of tensors of the
host, what is in containers and objects, what the function itself changes, storages that had one value.
"""

import collections
import dataclasses
import functools
import random
import types
import warnings
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from support import DEVICE
from torch import nn

assert_close = functools.partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)


def branch(x, flag):
    if flag:
        return x
    return -x


def rounds(x, n):
    for _ in range(n):
        x = x + 1
    return x


# What Python reads of a tensor of the host that is no argument, and its values before and after.
READS = {
    "item": (lambda x, n: x * n.item(), 2.0, 3.0),
    "float": (lambda x, n: x * float(n), 2.0, 3.0),
    "if": (branch, True, False),
    "range": (rounds, 2, 3),
    "numpy": (lambda x, n: x * float(n.numpy()), 2.0, 3.0),
    "dlpack": (lambda x, n: x * float(np.from_dlpack(n)), 2.0, 3.0),
    "tolist": (lambda x, n: x * n.tolist(), 2.0, 3.0),
    "in": (lambda x, n: x if 2 in n else -x, 2, 3),
    "a size": (lambda x, n: x[:n].sum() + x, 1, 2),
    "printed": (lambda x, n: x * float(f"{n}"), 2.0, 3.0),
    "computed": (lambda x, n: x * (n * 2 + 1).max().item(), 2.0, 3.0),
    "found": (lambda x, n: x * len(n.view(1).nonzero()), 2.0, 0.0),
    "close": (lambda x, n: x if torch.allclose(n, torch.ones(())) else -x, 1.0, 3.0),
    "data": (lambda x, n: x * torch.tensor([n, 1.0]).to(x.device)[0], 2.0, 3.0),
    "sign": (lambda x, n: x / n.item(), 0.0, -0.0),
    "nan": (lambda x, n: x if n.isnan().item() else -x, float("nan"), 1.0),
    "operand": (lambda x, n: x * n, 2.0, 3.0),
}


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("way", ["written", "data", "bound"])
def test_tensors_of_the_host(name, way):
    f, before, after = READS[name]
    n = torch.tensor(before)

    def step(x):
        return f(x, n)

    jitted, x = torch.tpu.jit(step), torch.ones(3)
    for value in (before, before, after, after, before):
        if way == "written":
            n.fill_(value)
        elif way == "data":
            n.data = torch.tensor(value)
        else:
            n = torch.tensor(value)
        assert_close(jitted(x.to(DEVICE)).cpu(), step(x), equal_nan=True)
    assert jitted.traces <= (5 if way == "bound" else 3)
    traces = jitted.traces
    jitted(x.to(DEVICE))
    assert jitted.traces == traces


def test_a_buffer_of_the_host():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.tensor(2.0))

        def forward(self, x):
            return x * self.scale.item()

    net, x = Scaled(), torch.ones(2, device=DEVICE)
    f = torch.tpu.jit(lambda x: net(x))
    for value in (2.0, 3.0, 4.0):
        net.scale = torch.tensor(value)
        assert_close(f(x).cpu(), torch.full((2,), value))
    net.scale.fill_(5.0)
    assert_close(f(x).cpu(), torch.full((2,), 5.0))


GLOBAL = 1.0


def set_global(value):
    global GLOBAL
    GLOBAL = value


class Scale:
    factor = 1.0

    def __init__(self):
        self.own = 1.0
        self.options = types.SimpleNamespace(factor=1.0)
        self.all = [1.0]

    @property
    def doubled(self):
        return self.own * 2

    @staticmethod
    def of_class(x):
        return x * Scale.factor

    @classmethod
    def of_itself(cls, x):
        return x * cls.factor

    def __call__(self, x):
        return x * self.own

    def by_a_local(self, x):
        options = self.options
        return x * options.factor


@dataclasses.dataclass(slots=True)
class Slots:
    factor: float = 1.0


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = Scale()

    def forward(self, x):
        return x * GLOBAL * self.scale.options.factor * self.scale.all[0]


def of_items(value):
    return lambda x: functools.reduce(lambda y, item: y * item, value, x)


def of_default(x, scale=torch.tensor(1.0)):  # noqa: B008
    return x * scale.item()


def around(f):
    @functools.wraps(f)
    def call(*args):
        return f(*args)

    return call


def an_optimizer():
    o = torch.optim.SGD([nn.Parameter(torch.ones(2, device=DEVICE))], lr=1.0)
    return lambda x: x * o.param_groups[0]["lr"], lambda v: o.param_groups[0].update(lr=v)


def made(make, f, change):
    def found():
        of = make()
        return lambda x: f(x, of), lambda value: change(of, value)

    return found


def factor(of, value):
    of.factor = value


def own(of, value):
    of.own = value


# Functions, and what changes what they read.
PLACES = {
    "a dict": made(lambda: {"a": 1.0}, lambda x, d: x * d["a"], lambda d, v: d.update(a=v)),
    "get": made(lambda: {"a": 1.0}, lambda x, d: x * d.get("a"), lambda d, v: d.update(a=v)),
    "a dict in a dict": made(
        lambda: {"a": {"b": 1.0}}, lambda x, d: x * d["a"]["b"], lambda d, v: d["a"].update(b=v)
    ),
    "a key more": made(dict, lambda x, d: x * (1 + len(d)), lambda d, v: d.update({v: v})),
    "a list": made(lambda: [1.0], lambda x, items: x * items[0], lambda d, v: d.__setitem__(0, v)),
    "a longer list": made(lambda: [1.0], lambda x, items: x * len(items), lambda d, v: d.append(v)),
    "a loop": made(lambda: [1.0], lambda x, items: of_items(items)(x), lambda d, v: d.append(v)),
    "a set": made(set, lambda x, s: x * (1 + len(s)), lambda s, v: s.add(v)),
    "a deque": made(lambda: collections.deque([1.0]), lambda x, d: x * d[0], lambda d, v: d.appendleft(v)),
    "an array": made(lambda: np.ones(2), lambda x, a: x * float(a[0]), lambda a, v: a.fill(v)),
    "a copied array": made(
        lambda: np.ones(2, "float32"), lambda x, a: x * torch.from_numpy(a).to(x.device), lambda a, v: a.fill(v)
    ),
    "a tensor in a dict": made(
        lambda: {"w": torch.ones(2)}, lambda x, d: x * d["w"].to(x.device), lambda d, v: d.update(w=torch.full((2,), v))
    ),
    "a class": made(lambda: Scale, lambda x, c: x * c.factor, factor),
    "an object over its class": made(Scale, lambda x, o: x * o.factor, factor),
    "the class of an object": made(Scale, lambda x, o: x * o.factor, lambda o, v: factor(Scale, v)),
    "a static method": made(Scale, lambda x, o: o.of_class(x), lambda o, v: factor(Scale, v)),
    "a class method": made(Scale, lambda x, o: o.of_itself(x), lambda o, v: factor(Scale, v)),
    "a property": made(Scale, lambda x, o: x * o.doubled, own),
    "an object that is called": made(Scale, lambda x, o: o(x), own),
    "slots": made(Slots, lambda x, o: x * o.factor, factor),
    "a local variable": made(Scale, lambda x, o: o.by_a_local(x), lambda o, v: factor(o.options, v)),
    "getattr": made(Scale, lambda x, o: x * getattr(o, "own"), own),  # noqa: B009
    "a global of a module": made(Net, lambda x, net: net(x), lambda net, v: set_global(v)),
    "options of a module": made(Net, lambda x, net: net(x), lambda net, v: factor(net.scale.options, v)),
    "a list of a module": made(Net, lambda x, net: net(x), lambda net, v: net.scale.all.__setitem__(0, v)),
    "a partial": made(
        Scale, lambda x, o: functools.partial(lambda o, x: x * o.own, o)(x), own
    ),
    "functions in a dict": made(Scale, lambda x, o: {"f": o.__call__}["f"](x), own),
    "a decorator": made(Scale, lambda x, o: around(lambda y: y * o.own)(x), own),
    "no_grad": made(Scale, lambda x, o: torch.no_grad()(lambda y: y * o.own)(x), own),
    "a default": lambda: (of_default, lambda v: of_default.__defaults__[0].fill_(v)),
    "groups of an optimizer": an_optimizer,
}  # fmt: skip


@pytest.fixture
def as_before():
    yield
    set_global(1.0)
    Scale.factor = 1.0
    of_default.__defaults__[0].fill_(1.0)


@pytest.mark.parametrize("name", PLACES)
def test_what_is_in_objects(name, as_before):
    f, change = PLACES[name]()
    jitted, x = torch.tpu.jit(f), torch.ones(2)
    for value in (None, 2.0, None, 3.0):
        if value is not None:
            change(value)
        for _ in range(2):
            assert_close(jitted(x.to(DEVICE)).cpu(), f(x))
    assert jitted.traces <= 3


class Accumulating:
    def __init__(self, device):
        torch.manual_seed(0)
        self.model = nn.Linear(4, 4).to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)
        self.rounds = 0

    def counted(self, x):
        loss = self.model(x).square().mean()
        loss.backward()
        self.rounds += 1
        if self.rounds % 2 == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss.detach()

    def scheduled(self, x):
        loss = self.model(x).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        return loss.detach()


@pytest.mark.parametrize("name", ["counted", "scheduled"])
def test_a_function_that_changes_what_it_reads(name):
    on_device, on_host = Accumulating(DEVICE), Accumulating("cpu")
    f, g = torch.tpu.jit(getattr(on_device, name)), getattr(on_host, name)
    why = r"is run anew in each call, as \w+\.last_epoch is another number"
    with nullcontext() if name == "counted" else pytest.warns(UserWarning, match=why):
        for i in range(9):
            x = torch.full((2, 4), 1.0 + i)
            assert_close(f(x.to(DEVICE)).cpu(), g(x))
    assert on_device.rounds == on_host.rounds
    traces = f.traces
    f(x.to(DEVICE)), f(x.to(DEVICE))
    assert f.traces == traces + (2 if name == "scheduled" else 0)


DRAWS = {
    "random": lambda x: x * random.random(),
    "numpy": lambda x: x * np.random.beta(0.4, 0.4),
    "torch": lambda x: x * torch.rand(()).item(),
}


@pytest.mark.parametrize("name", DRAWS)
def test_random_numbers_of_the_host_are_warned_about(name):
    f = torch.tpu.jit(DRAWS[name])
    with pytest.warns(UserWarning, match=rf"(?s)not in later calls.*random number.*{__file__}:\d+ in "):
        f(torch.ones(2, device=DEVICE))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.tpu.jit(lambda x: x + torch.rand_like(x))(torch.ones(2, device=DEVICE))


@pytest.mark.parametrize("given", [False, True], ids=["found", "given"])
@pytest.mark.parametrize("when", [(0,), (1,), (2,), (0, 1), (1, 2), (1, 3), tuple(range(6))], ids=str)
def test_storages_that_have_one_value_now_and_then(when, given, fused):
    """As a target network has that of the network, once it is a copy: in each call it may be one's own or another's."""

    def run(device):
        w, target = torch.ones(3, device=device), torch.zeros(3, device=device)

        def body(w, target, x):
            w.mul_(2)
            return target * 10 + x + w

        f = torch.tpu.jit(body) if device == DEVICE else body
        if not given:
            found = lambda x: body(w, target, x)  # noqa: E731
            f = torch.tpu.jit(found) if device == DEVICE else found
        results = []
        for i in range(6):
            if i in when:
                target.copy_(w)
            x = torch.full((3,), float(i), device=device)
            results.append((f(w, target, x) if given else f(x)).cpu())
        return torch.stack([*results, w.cpu(), target.cpu()])

    assert_close(run(DEVICE), run("cpu"))


def test_storages_that_always_have_one_value():
    """A frozen copy of a model shares its memory; calls go by what is known all the same."""
    w = torch.ones(3, device=DEVICE)
    copy, x = w.clone(), torch.ones(3, device=DEVICE)
    copy.copy_(w)
    f = torch.tpu.jit(lambda x: x + w * copy)
    for _ in range(4):
        assert_close(f(x).cpu(), torch.full((3,), 2.0))
    w.mul_(3)
    assert_close(w.cpu(), torch.full((3,), 3.0))
    before = torch.tpu.metrics()["compiles"]
    assert_close(f(x).cpu(), torch.full((3,), 4.0))
    assert f.traces == 1 and torch.tpu.metrics()["compiles"] == before


PARTS = {
    "transposed": lambda t: t.t(),
    "of another order": lambda t: t.view(2, 3, 4).permute(2, 0, 1),
    "expanded": lambda t: t[0].expand(5, -1),
    "every other column": lambda t: t[:, ::2],
    "channels last": lambda t: t.view(1, 2, 3, 4).to(memory_format=torch.channels_last),
}
MOVES = {
    "to": lambda t, device: t.to(device),
    "to and converted": lambda t, device: t.to(device, torch.float64),
    "contiguous": lambda t, device: t.to(device, memory_format=torch.contiguous_format),
    "copied into": lambda t, device: torch.zeros(t.shape, device=device).copy_(t),
}


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("part", PARTS)
def test_parts_of_tensors_of_the_host_are_moved(part, move):
    """As prompts of PEFT are: numbers that a module has on the host, expanded for a batch."""

    def calls(device, wrap):
        held = torch.arange(24.0).view(6, 4)
        f = wrap(lambda x: (MOVES[move](PARTS[part](held), device), x + MOVES[move](PARTS[part](held), device).sum()))
        for i in range(4):
            held += i
            moved, total = f(torch.ones(2, device=device))
            yield moved.cpu(), total.cpu(), moved.stride()

    ways = calls(DEVICE, torch.tpu.jit), calls(DEVICE, lambda f: f), calls("cpu", lambda f: f)
    for actual, eager, expected in zip(*ways, strict=True):
        assert torch.equal(actual[0], expected[0]) and torch.equal(actual[1], expected[1])
        assert actual[2] == eager[2]
