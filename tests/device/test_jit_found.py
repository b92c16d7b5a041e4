"""What a function of `torch.tpu.jit` finds in Python may be another one in a later call, which then does what PyTorch does
on the CPU: modules that are changed between steps, variables that are bound anew, sparse tensors.
"""

import functools
import warnings
from pathlib import Path

import pytest
import torch
from support import DEVICE
from torch import nn
from torch.nn.utils import parametrize

assert_close = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
        self.side = nn.Linear(6, 6)  # in no step
        self.register_buffer("scale", torch.ones(6))

    def forward(self, x):
        return self.layers(self.norm(x)) * self.scale


class Halved(nn.Module):
    def forward(self, w):
        return w * 0.5


def filled(layer, value, like):
    with torch.no_grad():
        for p in layer.parameters():
            p.fill_(value)
    return layer.to(like.device)


def a_parameter(m, o):
    old = m.layers[0].weight
    m.layers[0].weight = new = nn.Parameter(old.detach() * 0.5)
    o.param_groups[0]["params"] = [new if p is old else p for p in o.param_groups[0]["params"]]


def a_parameter_unknown_to_the_optimizer(m, o):
    m.layers[0].weight = nn.Parameter(m.layers[0].weight.detach() * 0.5)


def other_sizes(m, o):
    m.layers[0] = filled(nn.Linear(6, 10), 0.1, m.scale)
    m.layers[2] = filled(nn.Linear(10, 6), 0.2, m.scale)
    o.param_groups[0]["params"] = list(m.parameters())


def halved(m):
    return {name: t * 0.5 if t.is_floating_point() else t.clone() for name, t in m.state_dict().items()}


def assigned(m, o):
    m.load_state_dict(halved(m), assign=True)
    o.param_groups[0]["params"] = list(m.parameters())


def a_layer_more(m, o):
    m.layers.append(filled(nn.Linear(6, 6), 0.1, m.scale))
    o.add_param_group({"params": m.layers[-1].parameters(), "lr": 0.02})


def another_group(m, o):
    p = o.param_groups[0]["params"].pop()
    o.state.pop(p, None)
    o.add_param_group({"params": [p], "lr": 0.5})


def another_dtype(m, o):
    m.to(torch.float64)
    o.state.clear()


def to_the_host_and_back(m, o):
    device = m.scale.device
    m.cpu().to(device)


def scheduled(m, o):
    if not hasattr(m, "schedule"):
        m.schedule = torch.optim.lr_scheduler.StepLR(o, 1, 0.5)
    m.schedule.step()


def compiled(m, o):
    m.compile(backend="tpu" if m.scale.device.type == DEVICE else "eager")


def set_all(groups, **options):
    for group in groups:
        group.update(options)


# What is done to a model and its optimizer, twice, and how often the function may be run anew for it.
CHANGES = {
    "nothing": (lambda m, o: None, 0),
    "a parameter": (a_parameter, 4),
    "a parameter unknown to the optimizer": (a_parameter_unknown_to_the_optimizer, 4),
    "other sizes": (other_sizes, 4),
    "assigned": (assigned, 4),
    "loaded": (lambda m, o: m.load_state_dict(halved(m)), 0),
    "a buffer": (lambda m, o: setattr(m, "scale", torch.full((6,), 2.0, device=m.scale.device)), 2),
    "a buffer of another size": (lambda m, o: setattr(m, "scale", torch.full((1,), 3.0, device=m.scale.device)), 2),
    "a buffer in place": (lambda m, o: m.scale.mul_(2), 0),
    "data": (lambda m, o: setattr(m.layers[0].weight, "data", m.layers[0].weight.data * 0.5), 0),
    "frozen": (lambda m, o: m.layers[0].requires_grad_(not m.layers[0].weight.requires_grad), 3),
    "all frozen": (lambda m, o: m.requires_grad_(False).norm.requires_grad_(True), 2),
    "no bias": (lambda m, o: m.layers[2].register_parameter("bias", None), 2),
    "tied": (lambda m, o: setattr(m.layers[2], "bias", m.norm.bias), 2),
    "a layer more": (a_layer_more, 4),
    "another layer": (lambda m, o: m.layers.__setitem__(1, nn.ReLU()), 2),
    "another container": (lambda m, o: setattr(m, "layers", nn.Sequential(*m.layers, nn.Sigmoid())), 2),
    "another forward": (lambda m, o: setattr(m.layers[1], "forward", torch.sin), 1),
    "an option": (lambda m, o: setattr(m.norm, "eps", 0.1), 1),
    "a hook": (lambda m, o: m.layers[0].register_forward_hook(lambda *of: of[-1] * 0.5), 2),
    "parametrized": (lambda m, o: parametrize.register_parametrization(m.layers[0], "weight", Halved()), 4),
    "evaluated": (lambda m, o: m.train(not m.training), 1),
    "another dtype": (another_dtype, 3),
    "to the host and back": (to_the_host_and_back, 2),
    "module.compile()": (compiled, 2),
    "another group": (another_group, 3),
    "weight decay": (lambda m, o: set_all(o.param_groups, weight_decay=0.3), 1),
    "a learning rate": (lambda m, o: set_all(o.param_groups, lr=0.02), 0),
    "scheduled": (scheduled, 1),
}


# Those after which an optimizer has other state.
STATES = ("a parameter", "other sizes", "assigned", "frozen", "a layer more", "another dtype", "another group")


def trained(change, make, device):
    torch.manual_seed(0)
    model = Net().to(device)
    optimizer = make(model.parameters())

    def step(x):
        optimizer.zero_grad()
        loss = (model(x) - x.flip(1)).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    step = torch.tpu.jit(step) if device == DEVICE else step
    generator, losses = torch.Generator().manual_seed(1), []

    def run(rounds):
        for _ in range(rounds):
            x = torch.randn(4, 6, generator=generator)
            losses.append(step(x.to(device=device, dtype=model.layers[0].weight.dtype)).cpu())

    run(3)
    before = step.traces if device == DEVICE else 0
    for _ in range(2):
        change(model, optimizer)
        run(2)
    traces = step.traces - before if device == DEVICE else 0
    return losses, [p.detach().cpu() for p in model.parameters()], traces


@pytest.mark.parametrize("name", CHANGES)
def test_a_model_is_changed(name):
    change, most = CHANGES[name]
    make = functools.partial(torch.optim.AdamW if name in STATES else torch.optim.SGD, lr=0.02)
    wanted = trained(change, make, "cpu")
    *got, traces = trained(change, make, DEVICE)
    for a, b in zip([*got[0], *got[1]], [*wanted[0], *wanted[1]], strict=True):
        assert_close(a, b)
    assert traces <= most


FACTOR = 1.0


def set_global(factor):
    global FACTOR
    FACTOR = factor


def by_a_global(device):
    return lambda x: x * FACTOR, set_global


def by_a_variable(device):
    factor = 1.0

    def set_to(new):
        nonlocal factor
        factor = new

    return lambda x: x * factor, set_to


def by_a_helper(device):
    f, set_to = by_a_variable(device)
    return lambda x: f(x) + 1, set_to


def by_a_tensor(device):
    factor = torch.ones((), device=device)

    def set_to(new):
        nonlocal factor
        factor = torch.full((), new, device=device)

    return lambda x: x * factor, set_to


class Trainer:
    def __init__(self, device):
        self.factor, self.steps = 1.0, 0
        self.layers = nn.ModuleList([nn.Linear(3, 3, bias=False)]).to(device)
        self.options = type("Options", (), {"factor": 1.0})()

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

    def step(self, x):
        return (self.forward(x) * self.factor * self.options.factor).detach()


def by_an_attribute(device):
    trainer = Trainer(device)
    return trainer.step, lambda new: setattr(trainer, "factor", new)


def by_an_attribute_of_an_attribute(device):
    trainer = Trainer(device)
    return lambda x: trainer.step(x), lambda new: setattr(trainer.options, "factor", new)


def by_a_list_of_modules(device):
    trainer = Trainer(device)
    add = lambda new: trainer.layers.append(filled(nn.Linear(3, 3, bias=False), new, trainer.layers[0].weight))  # noqa: E731
    return trainer.step, add


def by_another_module(device):
    net = filled(nn.Linear(3, 3), 1.0, torch.ones(1, device=device))

    def set_to(new):
        nonlocal net
        net = filled(nn.Linear(3, 3), new, torch.ones(1, device=device))

    return lambda x: net(x).detach(), set_to


VARIABLES = [
    by_a_global, by_a_variable, by_a_helper, by_a_tensor, by_an_attribute, by_an_attribute_of_an_attribute,
    by_a_list_of_modules, by_another_module,
]  # fmt: skip


@pytest.mark.parametrize("of", VARIABLES, ids=lambda f: f.__name__)
def test_a_variable_is_bound_anew(of):
    def run(device):
        torch.manual_seed(0)
        f, set_to = of(device)
        f = torch.tpu.jit(f) if device == DEVICE else f
        x, results = torch.arange(6.0).view(2, 3).to(device), []
        set_to(1.0)
        for factor in (1.0, 2.0, 3.0):
            if factor > 1:
                set_to(factor)
            results += [f(x).cpu(), f(x).cpu()]
        return results, getattr(f, "traces", 3)

    (wanted, _), (got, traces) = run("cpu"), run(DEVICE)
    for a, b in zip(got, wanted, strict=True):
        assert_close(a, b)
    assert traces == 3


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = 1.0

    def forward(self, x):
        return x * self.factor


def by_an_attribute_of_a_module(device):
    net = Scaled().to(device)
    return lambda x: net(x), lambda new: setattr(net, "factor", new)


NUMBERS = [
    (by_a_global, "FACTOR"), (by_a_variable, "factor"), (by_an_attribute, "Trainer.factor"),
    (by_an_attribute_of_an_attribute, "Options.factor"), (by_an_attribute_of_a_module, "Scaled.factor"),
]  # fmt: skip


@pytest.mark.parametrize(("of", "called"), NUMBERS, ids=lambda x: getattr(x, "__name__", ""))
def test_a_number_that_changes_before_each_call_is_warned_of_once(of, called):
    """Where sizes vary; else it is an operand (test_jit_elsewhere.py)."""
    f, set_to = of(DEVICE)
    f = torch.tpu.jit(f, dynamic={0: {0: torch.tpu.Dim(max=8)}})
    x, said = torch.ones(2, 3, device=DEVICE), []
    for step in range(7):
        set_to(2.0 + step)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            f(x)
        said += [(step, str(w.message), w.filename) for w in caught if "another number each time" in str(w.message)]
    ((at, message, file),) = said
    assert at == 3 and file == __file__
    assert (
        f"as {called} is another number each time, read at {__file__}:" in message and "hint: make it an arg" in message
    )
    line = int(message.split(f"{__file__}:")[1].split()[0])
    assert called.rpartition(".")[2] in Path(__file__).read_text().splitlines()[line - 1]


def test_a_number_that_changes_now_and_then_is_not_warned_of():
    f, set_to = by_an_attribute_of_a_module(DEVICE)
    f, x = torch.tpu.jit(f), torch.ones(2, 3, device=DEVICE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(20):
            set_to(float(step // 4))
            f(x)
    assert f.traces == 5


def test_what_a_function_does_not_read_is_free():
    """No counter of a loop, no list of losses, no other attribute has a function run anew."""
    trainer, losses = Trainer(DEVICE), []
    f = torch.tpu.jit(trainer.step)
    x = torch.ones(2, 3, device=DEVICE)
    for _ in range(4):
        losses.append(f(x))
        trainer.steps += 1
        trainer.latest = losses[-1]
    assert f.traces == 1


def sparse_gradient():
    table = nn.Embedding(10, 4, sparse=True).to(DEVICE)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)

    def step(x):
        optimizer.zero_grad()
        table(x).sum().backward()
        optimizer.step()

    return step, (torch.tensor([1, 2], device=DEVICE),)


def sparse_variable():
    s = torch.eye(3).to_sparse_csr().to(DEVICE)
    return lambda x: s @ x, (torch.eye(3, device=DEVICE),)


SPARSE = {
    "made by a backward": sparse_gradient,
    "made": lambda: (lambda x: x.to_sparse().to_dense(), (torch.eye(3, device=DEVICE),)),
    "given": lambda: (lambda x: x.to_dense(), (torch.eye(3).to_sparse().to(DEVICE),)),
    "found": sparse_variable,
}


@pytest.mark.parametrize("name", SPARSE)
def test_sparse_tensors_are_refused_with_the_line(name):
    f, args = SPARSE[name]()
    with pytest.raises(RuntimeError, match=r"sparse tensor.* at .*test_jit_found\.py:\d+ in "):
        torch.tpu.jit(f)(*args)
    # The device goes on.
    assert_close((torch.ones(2, device=DEVICE) * 2).cpu(), torch.full((2,), 2.0))
