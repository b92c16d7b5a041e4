"""`torch.compile` on the device, against eager PyTorch on the CPU."""

import copy
import gc
import sys
import threading

import pytest
import torch
from oxitorch import _compile
from oxitorch._recipes import Recipes
from support import DEVICE, assert_same, to_device
from torch import nn


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(f, **options):
    return torch.compile(f, backend="tpu", **options)


def pair(make):
    """The same module on the CPU and on the device."""
    on_cpu = make()
    return on_cpu, copy.deepcopy(on_cpu).to(DEVICE)


def assert_close(actual, expected, what=""):
    assert_same(actual, expected, what, strides=False, rtol=1e-4, atol=1e-5)


def mlp():
    return nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 5))


class Block(nn.Module):
    """A transformer layer."""

    def __init__(self, width=16, heads=2):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(x)


class Conv(nn.Module):
    """Convolutions with running statistics, which the forward writes."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(128, 4),
        )

    def forward(self, x):
        return self.layers(x)


MODELS = {"mlp": (mlp, (6, 12)), "block": (Block, (2, 7, 16)), "conv": (Conv, (3, 3, 8, 8))}


@pytest.mark.parametrize("name", MODELS)
def test_forward_and_backward(name, mode):
    make, shape = MODELS[name]
    cpu, device = pair(make)
    f = compiled(device, fullgraph=True)
    for _ in range(3):
        x = torch.randn(shape)
        a, z = x.clone().requires_grad_(), to_device(x).requires_grad_()
        expected, actual = cpu(a), f(z)
        assert_close(actual, expected)
        expected.square().mean().backward()
        actual.square().mean().backward()
        assert_close(z.grad, a.grad, "input")
    for (what, p), q in zip(cpu.named_parameters(), device.parameters(), strict=True):
        assert_close(q.grad, p.grad, what)
    for (what, p), q in zip(cpu.named_buffers(), device.buffers(), strict=True):
        assert_close(q, p, what)


def test_inference(mode):
    cpu, device = pair(mlp)
    f = compiled(device.eval())
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(4, 12)
            assert_close(f(to_device(x)), cpu(x))


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw capturable": lambda p: torch.optim.AdamW(p, lr=0.01, capturable=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
}


@pytest.mark.parametrize("compiled_step", [False, True], ids=["eager step", "compiled step"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training(name, compiled_step):
    cpu, device = pair(mlp)
    make = OPTIMIZERS[name]
    reference = make(cpu.parameters()) if name != "adamw capturable" else OPTIMIZERS["adamw"](cpu.parameters())
    optimizer = make(device.parameters())
    f = compiled(device)
    step = compiled(optimizer.step) if compiled_step else optimizer.step
    for i in range(5):
        x, y = torch.randn(8, 12), torch.randint(5, (8,))
        reference.zero_grad()
        expected = nn.functional.cross_entropy(cpu(x), y)
        expected.backward()
        reference.step()
        optimizer.zero_grad()
        actual = nn.functional.cross_entropy(f(x.to(DEVICE)), y.to(DEVICE))
        actual.backward()
        step()
        assert_close(actual, expected, f"loss {i}")
    for (what, p), q in zip(cpu.named_parameters(), device.parameters(), strict=True):
        assert_same(q, p, what, rtol=1e-3, atol=1e-4)


def test_the_default_backend_serves_the_device():
    if not hasattr(torch.compiler, "set_default_backend"):
        pytest.skip("this PyTorch has no default backend that can be set")
    cpu, device = pair(mlp)
    f = torch.compile(device, fullgraph=True)
    x = torch.randn(4, 12)
    torch.tpu.reset_metrics()
    actual = f(x.to(DEVICE))
    assert torch.tpu.metrics()["ops"] + torch.tpu.metrics().get("replays", 0) > 0
    assert_close(actual, cpu(x))


def test_inductor_by_name_says_what_to_do():
    with pytest.raises(Exception, match='backend="tpu"'):
        torch.compile(lambda x: x.sin() + 1, backend="inductor")(torch.ones(3, device=DEVICE))


def test_options_are_refused():
    with pytest.raises(Exception, match="custom_compiler_options"):
        compiled(lambda x: x + 1, options={"epilogue_fusion": True})(torch.ones(3, device=DEVICE))


def test_no_compiler_for_c_plus_plus_is_needed(python):
    done = python(
        "import torch; print(torch.compile(lambda x: x * 2 + 1, backend='tpu')(torch.ones(2, device='tpu')).tolist())",
        CXX="/nonexistent",
        PATH="/nonexistent",
    )
    assert done.stdout == "[3.0, 3.0]\n"


def test_import_of_torch_does_not_import_dynamo(python):
    done = python("import sys, torch; torch.ones(2, device='tpu').cpu(); print('torch._dynamo' in sys.modules)")
    assert done.stdout == "False\n"


def test_graph_breaks(mode):
    def f(x):
        y = x * 2
        torch._dynamo.graph_break()
        if y.sum() > 0:
            return y + 1
        return y - 1

    g = compiled(f)
    for sign in (1, -1, 1):
        x = sign * torch.ones(3)
        assert_close(g(to_device(x)), f(x))


def test_input_mutation(mode):
    def f(x, y):
        x.add_(1)
        y[1:] = x[:-1]
        return x * y

    g = compiled(f, fullgraph=True)
    x, y = torch.randn(4), torch.randn(4)
    a, z = to_device(x), to_device(y)
    for _ in range(3):
        expected, actual = f(x, y), g(a, z)
        assert_close(actual, expected)
        assert_close(a, x)
        assert_close(z, y)


def test_mutation_through_a_view():
    def f(x):
        x[0].mul_(2)
        return x.sum()

    g = compiled(f, fullgraph=True)
    base = torch.randn(4, 3)
    moved = to_device(base)
    for _ in range(3):
        expected = f(base[1:3])
        assert_close(g(moved[1:3]), expected)
        assert_close(moved, base)


def test_results_that_are_views():
    def f(x):
        y = x * 2
        return y, y.t(), y[1:, ::2], x[0], x

    g = compiled(f, fullgraph=True)
    x = torch.randn(4, 6)
    moved = to_device(x)
    for _ in range(3):
        for i, (actual, expected) in enumerate(zip(g(moved), f(x), strict=True)):
            assert_same(actual, expected, f"result {i}", rtol=1e-6, atol=1e-6)
            assert actual.storage_offset() == expected.storage_offset()
    y, t, *_, whole = g(moved)
    y.zero_()
    assert t.cpu().abs().sum() == 0
    assert whole is moved


def test_results_share_storage_and_writes_show():
    def f(x):
        y = x + 1
        return y, y.view(-1)

    g = compiled(f, fullgraph=True)
    for _ in range(3):
        y, flat = g(torch.zeros(2, 2, device=DEVICE))
        flat[3] = 7
        assert y.tolist() == [[1, 1], [1, 7]]


def test_inputs_of_other_layouts(mode):
    def f(x):
        return (x * 2).sum(0) + x[0]

    g = compiled(f, dynamic=False)
    x = torch.randn(4, 4)
    for make in (lambda t: t, torch.t, lambda t: t[:, 1:], lambda t: t[1:], lambda t: t[2:3].expand(4, 4), lambda t: t):
        assert_close(g(make(to_device(x))), f(make(x)))


def test_two_arguments_of_one_storage():
    def f(x, y):
        x.add_(y)
        return x * 2

    g = compiled(f)
    for _ in range(2):
        base, other = torch.arange(6.0), torch.ones(3)
        moved = to_device(base)
        assert_close(g(moved[:3], moved[3:]), f(base[:3], base[3:]))
        assert_close(moved, base)
        assert_close(g(moved[:3], to_device(other)), f(base[:3], other))
        assert_close(moved, base)


def test_dropout_is_that_of_eager(mode):
    def f(x):
        return nn.functional.dropout(x, 0.25) + torch.rand_like(x)

    g = compiled(f, fullgraph=True)
    x = torch.ones(64, 64, device=DEVICE)
    torch.manual_seed(3)
    expected = [f(x).cpu() for _ in range(4)]
    torch.manual_seed(3)
    actual = [g(x).cpu() for _ in range(4)]
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e)
    assert not torch.equal(actual[1], actual[2])


def test_dropout_of_the_backward_is_that_of_the_forward():
    g = compiled(lambda x: nn.functional.dropout(x, 0.5), fullgraph=True)
    for _ in range(3):
        x = torch.ones(1000, device=DEVICE, requires_grad=True)
        y = g(x)
        y.sum().backward()
        assert torch.equal(x.grad.cpu(), y.detach().cpu())
        assert 0.4 < (y > 0).float().mean().item() < 0.6


@pytest.mark.parametrize("autocast", [lambda: torch.autocast("tpu"), lambda: torch.tpu.amp.autocast()])
def test_autocast(autocast):
    model = mlp().to(DEVICE)
    x = torch.randn(4, 12, device=DEVICE)

    def f(x):
        with autocast():
            return model(x)

    g = compiled(f, fullgraph=True)
    for _ in range(3):
        expected, actual = f(x), g(x)
        assert actual.dtype == expected.dtype
        torch.testing.assert_close(actual.cpu(), expected.cpu(), rtol=2e-2, atol=2e-2)
        actual.float().sum().backward()


def test_static_shapes():
    def f(x):
        return x.softmax(-1)

    g = compiled(f, dynamic=False)
    for n in (3, 5, 3, 7, 5):
        x = torch.randn(2, n)
        assert_close(g(to_device(x)), f(x))


def test_shapes_that_become_dynamic():
    def f(x):
        return (x * x.shape[0]).sum() + torch.arange(x.shape[0], device=x.device).sum()

    g = compiled(f)
    for n in (3, 5, 8, 5, 9, 9):
        x = torch.randn(n)
        assert_close(g(to_device(x)), f(x))


def test_sizes_that_depend_on_values():
    def f(x):
        return x[x > 0].sum() + x.nonzero().sum()

    g = compiled(f)
    for _ in range(4):
        x = torch.randn(20)
        assert_close(g(to_device(x)), f(x))


def test_host_values_are_not_constants():
    def f(x, scale):
        return x * scale

    g = compiled(f)
    for i in range(4):
        scale = torch.tensor(float(i))
        assert_close(g(torch.ones(3, device=DEVICE), scale), torch.ones(3) * i)


def test_numbers_that_change():
    def f(x, n):
        return x * n

    g = compiled(f)
    for n in (1.5, 2.5, 3.5, 1.5):
        assert_close(g(torch.ones(3, device=DEVICE), n), torch.ones(3) * n)


@torch.library.custom_op("oxitorch_tests::twice", mutates_args=(), device_types="cpu")
def twice(x: torch.Tensor) -> torch.Tensor:
    """An operation that only the CPU has."""
    return x * 2


@twice.register_fake
def _(x):
    return torch.empty_like(x)


@pytest.mark.filterwarnings("ignore:oxitorch_tests..twice has no lowering")
def test_operations_without_a_lowering_run_on_the_cpu():
    def f(x):
        return twice(x) * 2

    g = compiled(f)
    torch.tpu.reset_metrics()
    for _ in range(3):
        x = torch.randn(4, 4)
        assert_close(g(to_device(x)), f(x))
    assert torch.tpu.metrics()["fallbacks"]["oxitorch_tests::twice"] >= 3


def test_failures_name_the_line():
    def f(x, i):
        y = x * 2
        return y[i] + 1  # here

    g = compiled(f)
    x = torch.ones(4, device=DEVICE)
    line = f.__code__.co_firstlineno + 2
    with torch.tpu.set_eager_mode("debug"), pytest.raises(IndexError, match=f"called at .*test_compile.py:{line} in f"):
        g(x, torch.tensor([9], device=DEVICE))


def test_other_switches_are_other_programs():
    g = compiled(lambda x, y: x @ y)
    x = torch.randn(8, 8)
    moved = to_device(x)
    assert_close(g(moved, moved), x @ x)
    with torch.tpu.set_precision("default"):
        assert_close(g(moved, moved), x @ x)
    assert_close(g(moved, moved), x @ x)


def counts():
    m = torch.tpu.metrics()
    return {name: m[name] for name in ("ops", "plays", "replays", "recipes", "programs", "compiles")}


def test_the_second_call_is_a_replay():
    g = compiled(lambda x: (x * 2).relu().sum() + x.mean(), fullgraph=True)
    x = torch.randn(5, device=DEVICE)
    g(x)
    torch.tpu.reset_metrics()
    for _ in range(3):
        g(x)
    assert counts()["ops"] == counts()["plays"] == 0
    assert counts()["replays"] == 3


def test_no_python_runs_for_an_operation():
    def chain(n):
        def f(x):
            for _ in range(n):
                x = (x * 1.5).sin()
            return x

        return f

    def calls(n):
        torch._dynamo.reset()
        g = compiled(chain(n), fullgraph=True)
        x = torch.randn(5, device=DEVICE)
        for _ in range(3):
            g(x)
        seen = []
        sys.setprofile(lambda frame, event, arg: seen.append(event))
        g(x)
        sys.setprofile(None)
        return len(seen)

    assert calls(30) == calls(3)


def training_loop(model, step_of, loss_of=nn.functional.cross_entropy):
    """Steps of a training loop, one at a time; gives the loss."""
    while True:
        x, y = torch.randn(8, 12).to(DEVICE), torch.randint(5, (8,)).to(DEVICE)
        loss = loss_of(model(x), y)
        loss.backward()
        step_of()
        yield loss


@pytest.mark.parametrize("capturable", [False, True])
def test_a_loop_runs_the_programs_of_eager(capturable):
    """One program in each step, no copies but the batch, every weight and state given back; with the same losses."""
    if torch.tpu.eager_mode is not torch.tpu.EagerMode.FUSED:
        pytest.skip("strict mode has a flush for each operation")
    counted = {}
    for how in ("eager", "model", "model and step"):
        torch._dynamo.reset()
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 5)).to(DEVICE)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, capturable=capturable)
        step = compiled(optimizer.step) if "step" in how else optimizer.step
        loop = training_loop(compiled(model) if "model" in how else model, lambda: (step(), optimizer.zero_grad()))  # noqa: B023
        losses = [next(loop) for _ in range(4)]
        torch.tpu.synchronize()
        torch.tpu.reset_metrics()
        losses += [next(loop) for _ in range(4)]
        torch.tpu.synchronize()
        m = torch.tpu.metrics()
        assert m["compiles"] == m["programs"] == 0, how
        assert m["flushes"] == {"step": 4}, how
        assert m["replays"] == {"eager": 0, "model": 8, "model and step": 12}[how]
        names = ("launches", "transfers_h2d", "bytes_h2d", "transfers_d2h", "donations")
        counted[how] = [m[name] for name in names], [x.item() for x in losses]
    for how in ("model", "model and step"):
        assert counted[how][0] == counted["eager"][0], how
        assert counted[how][1] == pytest.approx(counted["eager"][1], rel=1e-4), how


def test_arguments_with_one_value_are_told_apart_later():
    g = compiled(lambda x, y: x * 2 + y)
    x = torch.randn(4, device=DEVICE)
    y = x.clone()  # shares the value until one of them is written
    assert_close(g(x, y), x.cpu() * 3)
    y.add_(1)
    for _ in range(2):
        assert_close(g(x, y), x.cpu() * 3 + 1)


def test_an_argument_that_holds_a_number_of_the_graph():
    g = compiled(lambda x, y: x * 3.0 + y)
    x = torch.ones(2, device=DEVICE)
    for number in (3.0, 4.0, 5.0):
        y = torch.full((), number, device=DEVICE)
        assert_close(g(x, y), torch.full((2,), 3 + number))


def test_seeds_hold_for_replays():
    g = compiled(lambda x: torch.rand_like(x) + torch.randn_like(x))
    x = torch.zeros(100, device=DEVICE)
    g(x)
    torch.manual_seed(5)
    a, b = g(x).cpu(), g(x).cpu()
    torch.manual_seed(5)
    assert torch.equal(g(x).cpu(), a)
    assert torch.equal(g(x).cpu(), b)
    assert not torch.equal(a, b)


def test_a_graph_that_raises_is_watched_no_more():
    def f(x, y):
        return x @ y

    g = compiled(f, dynamic=False)
    huge = torch.empty(1, device=DEVICE).expand(1 << 30, 1)
    with pytest.raises(RuntimeError):
        g(huge, huge.t()).cpu()
    x = torch.randn(3, 3)
    for _ in range(3):
        assert_close(g(to_device(x), to_device(x)), x @ x)


def test_recipes_end_with_their_graph(monkeypatch):
    numbers = []

    class Numbered(Recipes):
        def __init__(self):
            super().__init__()
            numbers.append(self.number)

    monkeypatch.setattr(_compile, "Recipes", Numbered)
    x = torch.randn(4, device=DEVICE)
    g = compiled(lambda x: x * 3 + 1)
    for _ in range(2):
        g(x)
    (number,) = numbers

    def engine_has_it():
        return torch.ops.oxitorch._replay(number, [x])[0]

    assert engine_has_it()
    del g
    torch._dynamo.reset()
    # Dynamo puts graphs among the globals of the function's module, and leaves them there.
    for name in [name for name in globals() if name.startswith("__compiled_fn")]:
        del globals()[name]
    gc.collect()
    assert not engine_has_it()


STOCK = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")


@pytest.mark.parametrize("name", ["SGD", "AdamW", "NAdam", "RMSprop", "Rprop"])
def test_a_schedule_of_rates_that_are_tensors_is_one_graph(name, fused):
    def losses(device):
        torch.manual_seed(0)
        model = nn.Linear(4, 4).to(device)
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=torch.tensor(0.01))
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        step = compiled(lambda: optimizer.step()) if device == DEVICE else optimizer.step
        found = []
        for i in range(11):  # more than the graphs that Dynamo makes of a function
            if i == 3:
                torch.tpu.synchronize()
                found.append(torch.tpu.metrics()["programs"])
            loss = model(torch.ones(3, 4, device=device)).square().mean()
            loss.backward()
            step()
            schedule.step()
            optimizer.zero_grad()
            found.append(loss.detach().cpu())
        return found

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    got = losses(DEVICE)
    programs = got.pop(3)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert torch.tpu.metrics()["programs"] == programs
    expected = losses("cpu")
    expected.pop(3)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", STOCK)
def test_stock_optimizers_are_replayed(name):
    """Also those that count steps on the CPU."""
    results = {}
    for device in ("cpu", DEVICE):
        torch.manual_seed(2)
        model = mlp().to(device)
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01)
        step = compiled(optimizer.step) if device == DEVICE else optimizer.step
        for i in range(5):
            if i == 3:
                torch.tpu.reset_metrics()
            x, y = torch.randn(8, 12), torch.randint(5, (8,))
            nn.functional.cross_entropy(model(x.to(device)), y.to(device)).backward()
            step()
            optimizer.zero_grad()
        results[device] = [p.detach() for p in model.parameters()]
    m = torch.tpu.metrics()
    assert (m["replays"], m["plays"], m["fallbacks"]) == (2, 0, {})
    for i, (actual, expected) in enumerate(zip(results[DEVICE], results["cpu"], strict=True)):
        assert_same(actual, expected, f"parameter {i}", rtol=1e-3, atol=1e-4)


def test_replays_count_as_writes():
    def f(x, y):
        y.mul_(x)
        return x + 1

    g = compiled(f, fullgraph=True)
    x, y = torch.ones(3, device=DEVICE), torch.ones(3, device=DEVICE)
    seen = []
    for _ in range(4):
        before = x._version, y._version
        g(x, y)
        seen.append((x._version - before[0], y._version - before[1]))
    assert seen[0][0] == 0 < seen[0][1]
    assert seen == seen[:1] * 4
    w = torch.ones(3, device=DEVICE, requires_grad=True)
    z = w * y
    g(x, y)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


def test_a_write_to_what_a_replayed_forward_saved_is_seen():
    g = compiled(lambda x, w: (x * w).sum(), fullgraph=True)
    for _ in range(3):
        x, w = torch.ones(3, device=DEVICE), torch.ones(3, device=DEVICE, requires_grad=True)
        loss = g(x, w)
        x.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_custom_operations_run_in_each_call():
    calls = []

    @torch.library.custom_op("oxitorch_tests::counted", mutates_args=())
    def counted(x: torch.Tensor) -> torch.Tensor:
        calls.append(None)
        return x * len(calls)

    counted.register_fake(lambda x: torch.empty_like(x))
    g = compiled(lambda x: counted(x) + 1, fullgraph=True)
    x = torch.ones(2, device=DEVICE)
    assert [g(x).tolist()[0] for _ in range(3)] == [2, 3, 4]


def test_numbers_on_the_host():
    def f(x, scale, table, step):
        step += 1
        return x * scale + table.to(x.device)[1] + torch.tensor([1.0, 2.0], device=x.device) / step, scale * 2

    g = compiled(f, fullgraph=True)
    x = torch.randn(2)
    moved = to_device(x)
    step, here = torch.zeros(()), torch.zeros(())
    for i in range(4):
        if i == 2:
            torch.tpu.reset_metrics()
        scale, table = torch.tensor(1.5 + i), torch.randn(3, 2)
        (actual, on_host), (expected, doubled) = g(moved, scale, table, step), f(x, scale, table, here)
        assert_close(actual, expected)
        assert torch.equal(on_host, doubled)
        assert step.item() == here.item() == i + 1
    assert counts()["replays"] == 2
    assert counts()["plays"] == 0


def test_functions_of_the_module_run_between_graphs():
    def f(x):
        state = torch.tpu.get_rng_state()
        y = torch.rand_like(x)
        torch.tpu.set_rng_state(state)
        with torch.random.fork_rng(device_type=DEVICE):
            torch.tpu.synchronize()
            z = torch.rand_like(x)
        if torch.tpu.is_available():
            y = y + torch.tpu.device_count()
        return y, z, torch.rand_like(x)

    g = compiled(f)
    for _ in range(3):
        a, b, c = g(torch.ones(3, device=DEVICE))
        assert torch.equal(b, c)
        assert torch.equal(a, b + torch.tpu.device_count())


def test_a_barrier():
    def f(x):
        a, b = torch.tpu.ops.optimization_barrier(x.sin(), x.cos())
        return (a + b).sum()

    g = compiled(f, fullgraph=True)
    for _ in range(2):
        x = torch.ones(3, device=DEVICE, requires_grad=True)
        g(x).backward()
        assert_close(x.grad, torch.ones(3).cos() - torch.ones(3).sin())


def test_indices_on_the_host():
    g = compiled(lambda x, i: x[i] * 2, fullgraph=True)
    x = torch.randn(5, 3)
    torch.tpu.reset_metrics()
    for places in ([0, 2], [4, 1], [3, 3]):
        i = torch.tensor(places)
        assert_close(g(to_device(x), i), x[i] * 2)
    assert counts()["replays"] == 2


def test_dynamic_shapes_are_accepted():
    cpu, device = pair(mlp)
    g = compiled(device, dynamic=True)
    for n in (3, 5, 3):
        x = torch.randn(n, 12)
        assert_close(g(to_device(x)), cpu(x))


@pytest.mark.parametrize("train", [True, False])
def test_sizes_are_symbolic_while_attention_is_chosen(train):
    cpu, device = pair(lambda: nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True).train(train))
    g = compiled(device, dynamic=True)
    for batch, length in ((2, 5), (2, 9), (3, 17), (2, 5)):
        x, mask = torch.randn(batch, length, 16), torch.ones(length, length).triu(1) > 0
        with torch.set_grad_enabled(train):
            expected, actual = cpu(x, src_mask=mask), g(to_device(x), src_mask=to_device(mask))
        assert_close(actual, expected)
        if train:
            expected.sum().backward()
            actual.sum().backward()
    for a, b in zip(device.parameters() if train else (), cpu.parameters() if train else (), strict=True):
        assert_close(a.grad, b.grad)


def test_threads_share_a_compiled_model():
    cpu, device = pair(mlp)
    g = compiled(device)
    inputs = [torch.randn(4, 12) for _ in range(3)]
    g(to_device(inputs[0]))
    failures = []

    def work(x):
        try:
            for _ in range(20):
                assert_close(g(to_device(x)), cpu(x))
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=work, args=(x,)) for x in inputs]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures


def test_a_learning_rate_that_changes():
    w = torch.ones(4, device=DEVICE, requires_grad=True)
    v = torch.ones(4, requires_grad=True)
    ours, reference = torch.optim.AdamW([w], lr=torch.tensor(0.1)), torch.optim.AdamW([v], lr=torch.tensor(0.1))
    step = compiled(ours.step)
    for i in range(5):
        for optimizer, p in ((ours, w), (reference, v)):
            optimizer.param_groups[0]["lr"].fill_(0.1 / (1 + i))
            p.grad = torch.full_like(p, 0.5 + i)
        step()
        reference.step()
        assert_close(w, v, f"step {i}")


def test_a_graph_is_one_program(mode):
    def f(x):
        for _ in range(100):
            x = (x * 1.01).sin()
        return x

    g = compiled(f)
    x = torch.randn({"fused": 7, "strict": 8, "debug": 9}[mode], device=DEVICE)
    torch.tpu.synchronize()
    torch.tpu.reset_metrics()
    for _ in range(3):
        kept = g(x)
        torch.tpu.synchronize()
    assert_close(kept, f(x.cpu()))
    m = torch.tpu.metrics()
    launches, programs = sum(m["flushes"].values()), m["programs"]
    assert (launches, programs) == ((600, 2) if mode == "debug" else (3, 1))


def test_the_engine_knows_the_lines_of_replays():
    def f(x):
        return (x * 2).sin()  # here

    g = compiled(f, fullgraph=True)
    for n in (3, 3, 4):
        g(torch.ones(n, device=DEVICE)).cpu()
    torch.tpu.synchronize()
    text = str(torch.tpu.explain())
    line = f.__code__.co_firstlineno + 1
    assert f"test_compile.py:{line} in f" in text


def test_compiled_functions_under_transforms(mode):
    def loss(w, x):
        return ((x @ w).tanh() ** 2).sum()

    w, x = torch.randn(3, 2), torch.randn(5, 3)
    for f in (torch.func.grad(loss), torch.func.vmap(loss, (None, 0)), torch.func.jacrev(loss)):
        g = compiled(f)
        for _ in range(2):
            assert_close(g(to_device(w), to_device(x)), f(w, x))


def test_checkpoint_recomputes_with_the_same_dropout():
    def block(x, w):
        return nn.functional.dropout((x @ w).relu(), 0.5).sin()

    def f(x, w):
        return torch.utils.checkpoint.checkpoint(block, x, w, use_reentrant=False).sum()

    g = compiled(f)
    for _ in range(3):
        gradients = []
        for h in (g, f):
            torch.manual_seed(4)
            x, w = torch.ones(16, 8, device=DEVICE), torch.ones(8, 8, device=DEVICE, requires_grad=True)
            h(x, w).backward()
            gradients.append(w.grad.cpu())
        torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("mode_name", ["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"])
def test_modes_are_accepted(mode_name):
    x = torch.randn(4)
    assert_close(torch.compile(lambda x: x.sin(), backend="tpu", mode=mode_name)(to_device(x)), x.sin())


def test_dynamo_explains():
    def f(x):
        y = x.sin()
        torch._dynamo.graph_break()
        return y.cos()

    explained = torch._dynamo.explain(f)(torch.ones(3, device=DEVICE))
    assert (explained.graph_count, explained.graph_break_count) == (2, 1)


@pytest.mark.parametrize("name", MODELS)
def test_exported_programs_run(name):
    make, shape = MODELS[name]
    cpu, device = pair(make)
    x = torch.randn(shape)
    exported = torch.export.export(device.eval(), (to_device(x),))
    assert_close(exported.module()(to_device(x)), cpu.eval()(x))
    assert_close(compiled(exported.module())(to_device(x)), cpu(x))


def test_nothing_is_compiled_again():
    g = compiled(mlp().to(DEVICE), dynamic=False, fullgraph=True)
    x = torch.randn(4, 12, device=DEVICE)
    g(x).sum().backward()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(3):
            g(x).sum().backward()
