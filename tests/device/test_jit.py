"""`torch.tpu.jit` against the same function run by PyTorch on the CPU."""

import collections
import copy
import threading
import warnings

import pytest
import torch
from support import DEVICE, NewGraphs, assert_close, to_device
from torch import nn


def mlp(width=12):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 5))


def batches(n=5, size=6, width=12):
    torch.manual_seed(1)
    return [(torch.randn(size, width), torch.randint(0, 5, (size,))) for _ in range(n)]


def launches():
    return torch.tpu.metrics()["launches"]


def test_a_call_is_one_launch(fused):
    @torch.tpu.jit
    def f(x, y):
        return (x @ y).relu() + 1, {"sum": x.sum()}

    for i in range(4):
        x, y = torch.randn(3, 4), torch.randn(4, 5)
        a, b = to_device(x), to_device(y)
        torch.tpu.synchronize()
        before = launches()
        result, extra = f(a, b)
        torch.tpu.synchronize()
        assert launches() - before == 1, i
        assert_close(result, (x @ y).relu() + 1)
        assert_close(extra["sum"], x.sum())
    assert (f.calls, f.traces) == (4, 1)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw for each": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adamw amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}


WHERE = [(name, "first") for name in OPTIMIZERS] + [(n, z) for n in ("sgd", "adamw") for z in ("last", "outside")]


@pytest.mark.parametrize(("name", "zero"), WHERE)
def test_training(name, zero):
    results = {}
    for device in ("cpu", DEVICE):
        model = mlp().to(device)
        optimizer = OPTIMIZERS[name](model.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

        def step(x, y, model=model, optimizer=optimizer):
            if zero == "first":
                optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            if zero == "last":
                optimizer.zero_grad()
            return loss.detach()

        f = torch.tpu.jit(step) if device == DEVICE else step
        losses, grads = [], []
        for x, y in batches(7):
            losses.append(f(x.to(device), y.to(device)))
            grads.append([None if p.grad is None else p.grad.cpu().clone() for p in model.parameters()])
            if zero == "outside":
                optimizer.zero_grad()
            schedule.step()
        results[device] = [x.cpu() for x in losses], grads, [p.detach().cpu() for p in model.parameters()]
        if device == DEVICE:
            assert f.traces <= (4 if name in ("sgd", "sgd momentum", "adam", "adamw", "adamw for each") else 6), f
    for actual, expected in zip(results[DEVICE], results["cpu"], strict=True):
        compare(actual, expected)


def compare(actual, expected):
    if isinstance(expected, (list, tuple)):
        for a, b in zip(actual, expected, strict=True):
            compare(a, b)
    elif expected is None:
        assert actual is None
    else:
        assert_close(actual, expected)


def test_gradients_accumulate():
    cpu = mlp()
    device = copy.deepcopy(cpu).to(DEVICE)

    def step(model):
        return lambda x, y: nn.functional.cross_entropy(model(x), y).backward()

    f, g = torch.tpu.jit(step(device)), step(cpu)
    for i, (x, y) in enumerate(batches(8)):
        f(to_device(x), to_device(y))
        g(x, y)
        for p, q in zip(device.parameters(), cpu.parameters(), strict=True):
            assert_close(p.grad, q.grad)
        if i % 4 == 3:
            device.zero_grad()
            cpu.zero_grad()
    assert f.traces <= 4


def test_a_gradient_that_is_kept_stays():
    model = mlp().to(DEVICE)

    @torch.tpu.jit
    def f(x):
        model.zero_grad()
        model(x).sum().backward()

    kept = []
    for i in range(5):
        f(torch.full((2, 12), float(i), device=DEVICE))
        kept.append(model[0].weight.grad)
    values = [k.sum().item() for k in kept]
    assert len(set(values)) == 5, values


def adam(weights, grads, state, lr):
    m, v, t = state
    t = t + 1
    m = {k: 0.9 * m[k] + 0.1 * g for k, g in grads.items()}
    v = {k: 0.999 * v[k] + 0.001 * g * g for k, g in grads.items()}
    new = {k: w - lr * (m[k] / (1 - 0.9**t)) / ((v[k] / (1 - 0.999**t)).sqrt() + 1e-8) for k, w in weights.items()}
    return new, (m, v, t)


@pytest.mark.parametrize("donate", [(), (1, 2)], ids=["kept", "donated"])
def test_a_functional_step(donate):
    model = mlp()

    def loss_of(weights, x, y):
        return nn.functional.cross_entropy(torch.func.functional_call(model, weights, (x,)), y)

    def train_step(data, weights, state):
        grads, loss = torch.func.grad_and_value(loss_of)(weights, *data)
        weights, state = adam(weights, grads, state, 0.01)
        return weights, state, {"loss": loss}

    def start(device):
        weights = {k: v.detach().clone().to(device) for k, v in model.named_parameters()}
        zeros = lambda: {k: torch.zeros_like(v) for k, v in weights.items()}  # noqa: E731
        return weights, (zeros(), zeros(), torch.zeros((), device=device))

    f = torch.tpu.jit(train_step, donate_argnums=donate)
    weights, state = start(DEVICE)
    expected, expected_state = start("cpu")
    for x, y in batches():
        old = weights
        weights, state, metrics = f((to_device(x), to_device(y)), weights, state)
        expected, expected_state, wanted = train_step((x, y), expected, expected_state)
        assert_close(metrics["loss"], wanted["loss"])
        if donate:
            with pytest.raises(RuntimeError, match="donate_argnums"):
                old["0.weight"].cpu()
        else:
            old["0.weight"].cpu()
    for k, v in expected.items():
        assert_close(weights[k], v, k)
    assert f.traces == 1


def test_forward_backward_and_optimizer_apart():
    model, other = mlp().to(DEVICE), mlp()
    weights = {k: v.detach() for k, v in model.named_parameters()}

    @torch.tpu.jit
    def grads(weights, x, y):
        def loss_of(w):
            return nn.functional.cross_entropy(torch.func.functional_call(model, w, (x,)), y)

        return torch.func.grad_and_value(loss_of)(weights)

    update = torch.tpu.jit(lambda w, g: {k: w[k] - 0.1 * g[k] for k in w}, donate_argnums=0)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    for x, y in batches():
        g, loss = grads(weights, to_device(x), to_device(y))
        weights = update(weights, g)
        optimizer.zero_grad()
        expected = nn.functional.cross_entropy(other(x), y)
        expected.backward()
        optimizer.step()
        assert_close(loss, expected.detach())
    for k, p in other.named_parameters():
        assert_close(weights[k], p.detach(), k)


@pytest.mark.parametrize("zero", ["none", "before", "after", "to_zeros"])
def test_an_optimizer_takes_gradients_that_are_made_outside(zero):
    def run(wrap, device):
        torch.manual_seed(0)
        model = mlp().to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def update():
            optimizer.step()
            if zero == "after":
                optimizer.zero_grad()

        update = wrap(update)
        for x, y in batches():
            if zero in ("before", "to_zeros"):
                optimizer.zero_grad(set_to_none=zero == "before")
            nn.functional.cross_entropy(model(x.to(device)), y.to(device)).backward()
            update()
        return [p.detach().cpu() for p in model.parameters()]

    torch.testing.assert_close(run(torch.tpu.jit, DEVICE), run(lambda f: f, "cpu"), rtol=1e-4, atol=1e-5)


def test_random_numbers_are_those_of_eager_mode():
    def f(x):
        return nn.functional.dropout(x, 0.5), torch.rand(3, device=x.device)

    x = torch.ones(50, device=DEVICE)
    torch.manual_seed(7)
    expected = [[r.cpu() for r in f(x)] for _ in range(4)]
    torch.manual_seed(7)
    g = torch.tpu.jit(f)
    actual = [[r.cpu() for r in g(x)] for _ in range(4)]
    compare(actual, expected)
    assert g.traces == 1


@pytest.mark.parametrize("made", ["inside", "argument"])
def test_a_generator(made):
    def f(x, generator):
        return torch.rand(x.shape, device=x.device, generator=generator) + x

    def results(function):
        generator = torch.Generator(DEVICE).manual_seed(3)
        x = torch.ones(5, device=DEVICE)
        call = function if made == "argument" else (lambda x, _, g=generator: f(x, g))
        jitted = torch.tpu.jit(call) if function is not f else call
        return [jitted(x, generator).cpu() for _ in range(4)]

    compare(results(torch.tpu.jit(f)), results(f))


EVERYTHING = []


def item(x):
    return x + x.sum().item()


def condition(x):
    return x + 1 if x.sum() > 0 else x


def to_host(x):
    return x + x.cpu().sum().to(x.device)


def to_numpy(x):
    return x.detach().cpu().numpy()


def sizes(x):
    return x[x > 0].sum()


def keeps(x):
    EVERYTHING.append(x * 2)
    return x


COUNTER = torch.zeros(())


def counts(x):
    COUNTER.add_(1)
    return x + COUNTER.to(x.device)


def on_host(x):
    return x + (COUNTER * 2).to(x.device)


@pytest.mark.parametrize(
    ("f", "message"),
    [
        (item, "reads a value on the host"),
        (condition, "reads a value on the host"),
        (to_host, "on the host"),
        (to_numpy, "on the host"),
        (sizes, "a size that depends on values"),
        (counts, "writes to a tensor of the host"),
        (on_host, "computes on the host with tensors"),
    ],
)
def test_what_a_program_cannot_do(f, message):
    x = torch.ones(4, device=DEVICE)
    with pytest.raises(RuntimeError, match=f"(?s)torch.tpu.jit: {f.__name__} .*{message}.*test_jit.py:"):
        torch.tpu.jit(f)(x)
    assert_close(x + 1, torch.full((4,), 2.0), "the device works on")


def test_what_is_kept_is_named():
    EVERYTHING.clear()
    f = torch.tpu.jit(keeps)
    f(torch.ones(4, device=DEVICE))  # it may be what a first call does, as that of an optimizer
    with pytest.raises(RuntimeError, match=r"(?s)keeps tensors that it makes.*test_jit.py:"):
        f(torch.ones(4, device=DEVICE))


def prints(x):
    print("once")
    return x + 1


CALLS = 0


def binds(x):
    global CALLS
    CALLS += 1
    return x + 1


@pytest.mark.parametrize(
    ("f", "message"), [(prints, "prints at .*test_jit.py"), (binds, "binds CALLS at .*test_jit.py")]
)
def test_side_effects_are_warned_about(f, message):
    g = torch.tpu.jit(f)
    x = torch.ones(4, device=DEVICE)
    with pytest.warns(UserWarning, match=f"(?s)in later calls.*{message}"):
        g(x)
    assert_close(g(x), torch.full((4,), 2.0))


def test_an_exception_leaves_everything_as_it_was():
    w = torch.ones(4, device=DEVICE)

    @torch.tpu.jit
    def f(x):
        w.add_(x)
        raise KeyError("stop")

    with pytest.raises(KeyError, match="stop"):
        f(torch.ones(4, device=DEVICE))
    assert_close(w, torch.ones(4))


def test_modules_in_another_mode():
    cpu = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    device = copy.deepcopy(cpu).to(DEVICE)
    cpu.eval()

    @torch.tpu.jit
    def f(x):
        return device(x)

    x = torch.randn(8, 4)
    with torch.no_grad():
        f(to_device(x))
        device.eval()
        cpu[1].load_state_dict({k: v.cpu() for k, v in device[1].state_dict().items()})
        assert_close(f(to_device(x)), cpu(x))
        device.train()
        assert (f(to_device(x)) == 0).any().item()
        device.eval()
        cpu[1].load_state_dict({k: v.cpu() for k, v in device[1].state_dict().items()})
        assert_close(f(to_device(x)), cpu(x))
    assert f.traces == 2


def test_weights_that_change():
    model = nn.Linear(3, 2).to(DEVICE)
    f = torch.tpu.jit(lambda x: model(x))
    x = torch.randn(4, 3)
    with torch.no_grad():
        for how in ("same", "written", "loaded", "replaced", "assigned"):
            other = nn.Linear(3, 2)
            if how == "written":
                model.weight.copy_(other.weight)
            elif how == "loaded":
                model.load_state_dict(other.state_dict())
            elif how == "replaced":
                model.weight = nn.Parameter(other.weight.to(DEVICE))
            elif how == "assigned":
                model.load_state_dict({k: v.to(DEVICE) for k, v in other.state_dict().items()}, assign=True)
            assert_close(f(to_device(x)), nn.functional.linear(x, model.weight.cpu(), model.bias.cpu()), how)
    assert f.traces <= 3


def test_the_state_of_an_optimizer_is_loaded():
    model, other = mlp().to(DEVICE), mlp()
    pairs = [(m, torch.optim.AdamW(m.parameters(), lr=0.01)) for m in (model, other)]

    def step_of(model, optimizer):
        def step(x, y):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    f, g = torch.tpu.jit(step_of(*pairs[0])), step_of(*pairs[1])
    data = batches(8)
    for x, y in data[:4]:
        f(to_device(x), to_device(y))
        g(x, y)
    saved = [copy.deepcopy((m.state_dict(), o.state_dict())) for m, o in pairs]
    for x, y in data[4:6]:
        f(to_device(x), to_device(y))
        g(x, y)
    for (m, o), (weights, state) in zip(pairs, saved, strict=True):
        m.load_state_dict(weights)
        o.load_state_dict(state)
    for x, y in data[6:]:
        assert_close(f(to_device(x), to_device(y)), g(x, y))
    # The step of eager mode goes on where the program was.
    x, y = data[0]
    assert_close(step_of(*pairs[0])(to_device(x), to_device(y)), g(x, y))
    assert_close(step_of(*pairs[0])(to_device(x), to_device(y)), g(x, y))


def test_shapes_that_come_again():
    f = torch.tpu.jit(lambda x: x * 2 + 1)
    for n in (3, 4, 3, 4, 5, 3):
        x = torch.randn(n)
        assert_close(f(to_device(x)), x * 2 + 1)
    assert f.traces == 3


Point = collections.namedtuple("Point", "x y")


def test_trees():
    @torch.tpu.jit
    def f(p, *rest, scale=1.0, flag=None):
        if flag:
            return p.x
        return Point(p.x * scale, p.y), [r + 1 for r in rest], {"a": None, "b": (3, p.x + p.y)}

    x, y = torch.randn(3), torch.randn(3)
    p = Point(to_device(x), to_device(y))
    for scale in (1.0, 2.0, 3.0):
        point, rest, extra = f(p, p.x, [p.y][0], scale=scale)
        assert isinstance(point, Point) and point.y is p.y
        assert_close(point.x, x * scale)
        compare(rest, [x + 1, y + 1])
        assert extra["a"] is None and extra["b"][0] == 3
        assert_close(extra["b"][1], x + y)
    assert f(p, flag=True) is p.x
    assert f(p, flag=True) is p.x


def test_static_arguments():
    f = torch.tpu.jit(lambda x, n: x.repeat(n), static_argnums=1)
    x = torch.ones(2, device=DEVICE)
    assert f(x, 3).shape == (6,) and f(x, 2).shape == (4,)
    with pytest.raises(TypeError, match="a static argument is a tensor"):
        f(x, x)
    with pytest.raises(ValueError, match="donate_argnums has 3"):
        torch.tpu.jit(lambda x: x, donate_argnums=3)(x)
    with pytest.raises(TypeError, match="takes a function"):
        torch.tpu.jit(3)


def test_functions_within_functions():
    inner = torch.tpu.jit(lambda x: x * 2)
    outer = torch.tpu.jit(lambda x: inner(x) + 1)
    x = torch.randn(3)
    for _ in range(3):
        assert_close(outer(to_device(x)), x * 2 + 1)
    assert (inner.traces, outer.traces) == (0, 1)
    assert_close(inner(to_device(x)), x * 2)
    compiled = torch.compile(lambda x: inner(x) - 1, backend="tpu")
    assert_close(compiled(to_device(x)), x * 2 - 1)


def test_a_method():
    class Model:
        def __init__(self):
            self.w = torch.ones(3, device=DEVICE)

        @torch.tpu.jit
        def __call__(self, x):
            return x * self.w

    x = torch.randn(3)
    for _ in range(2):
        a = Model()
        assert_close(a(to_device(x)), x)
        a.w.fill_(2.0)
        assert_close(a(to_device(x)), x * 2)


def test_host_arguments():
    table = torch.arange(5.0)
    f = torch.tpu.jit(lambda x, s: x.to(DEVICE) * s + table.to(DEVICE))
    for i in range(3):
        x = torch.randn(5)
        s = torch.tensor(float(i))
        table[0] = i
        assert_close(f(x, s), x * s + table)
    assert f.traces == 1


def test_host_numbers_that_are_equal_for_a_while():
    def f(x, a, b):
        return x * 2.0 + x * a - x / b

    for call in (torch.tpu.jit(f), torch.compile(f, backend="tpu")):
        for a, b in ((2.0, 2.0), (2.0, 2.0), (2.0, 2.0), (3.0, 2.0), (3.0, 5.0), (2.0, 2.0)):
            x = torch.randn(3)
            a, b = torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64)
            assert_close(call(to_device(x), a, b), f(x, a, b))


def test_constants_of_python():
    def f(x):
        for i in range(4):  # each where one was before
            x = (x * torch.tensor([1.0, 2.0, 3.0], device=x.device) + (torch.arange(3) * 2 + i).to(x.device)).relu()
        return x + torch.tensor(2.0) * torch.tensor(3.0)

    g = torch.tpu.jit(f)
    for _ in range(4):
        x = torch.randn(3)
        assert_close(g(to_device(x)), f(x))
    assert g.traces == 1


def test_values_that_are_shared():
    x = torch.randn(4)
    a = to_device(x)
    b = a.clone()
    f = torch.tpu.jit(lambda p, q: (p.add_(1), q * 2))
    for i in range(3):
        _, q = f(a, b)
        assert_close(q, x * 2)
        assert_close(a, x + i + 1)
        assert_close(b, x)
    model = mlp().to(DEVICE)
    average = copy.deepcopy(model)

    @torch.tpu.jit
    def update():
        with torch.no_grad():
            for p, q in zip(model.parameters(), average.parameters(), strict=True):
                p.add_(1)
                q.lerp_(p, 0.5)

    before = model[0].weight.cpu().clone()
    for _ in range(3):
        update()
    assert_close(average[0].weight, before + 2.125)


def test_in_place_and_views():
    cache = torch.zeros(4, 3, device=DEVICE)

    @torch.tpu.jit
    def f(x, at):
        cache.index_copy_(0, at, x[None])
        return cache[1:], cache.sum()

    expected = torch.zeros(4, 3)
    for i in range(4):
        x = torch.randn(3)
        view, total = f(to_device(x), torch.tensor([i], device=DEVICE))
        expected[i] = x
        assert_close(view, expected[1:])
        assert_close(total, expected.sum())
        assert view.data_ptr() == cache[1:].data_ptr()
    assert f.traces == 1


def test_results_take_part_in_no_graph():
    model = nn.Linear(3, 1).to(DEVICE)
    f = torch.tpu.jit(lambda x: model(x))
    x = torch.randn(2, 3, device=DEVICE)
    for _ in range(3):
        y = f(x)
        with pytest.raises(RuntimeError, match="torch.tpu.jit"):
            y.sum().backward()
    with torch.no_grad():
        assert not f(x).requires_grad


MATRIX = torch.arange(16.0).reshape(4, 4) / 16


def curve(x):
    return torch.tanh(x @ MATRIX.to(x.device)).sin().sum(-1)


TRANSFORMS = {
    "vjp": lambda x: torch.func.vjp(curve, x)[1](torch.ones(3, device=x.device))[0],
    "jvp": lambda x: torch.func.jvp(curve, (x,), (torch.ones_like(x),)),
    "jacrev": lambda x: torch.func.jacrev(curve)(x),
    "jacfwd": lambda x: torch.func.jacfwd(curve)(x),
    "hessian": lambda x: torch.func.hessian(lambda y: curve(y).sum())(x),
    "vmap": lambda x: torch.func.vmap(lambda row: curve(row) * 2)(x),
    "vmap in chunks": lambda x: torch.func.vmap(curve, chunk_size=2)(x),
    "gradients of each": lambda x: torch.func.vmap(torch.func.grad(curve))(x),
    "linearize": lambda x: torch.func.linearize(lambda x: curve(x) * 3.5 + torch.ones(3, device=x.device), x)[1](x + 1),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(name):
    f = torch.tpu.jit(TRANSFORMS[name])
    for _ in range(3):
        x = torch.randn(3, 4)
        compare(f(to_device(x)), TRANSFORMS[name](x))
    assert f.traces <= 2


@pytest.mark.parametrize("chunk_size", [None, 2])
@pytest.mark.parametrize("randomness", ["different", "same"])
def test_random_numbers_under_vmap(randomness, chunk_size):
    def f(x):
        def of_row(row):
            return row + torch.rand(2, device=row.device).sum(), torch.randn_like(row)

        return torch.func.vmap(of_row, randomness=randomness, chunk_size=chunk_size)(x)

    def results(function):
        torch.manual_seed(1)
        drawn = [function(torch.zeros(5, device=DEVICE)) for _ in range(3)], torch.rand(2, device=DEVICE)
        return torch.utils._pytree.tree_map(torch.Tensor.cpu, drawn)

    expected = results(f)
    for rows in expected[0][0]:
        assert len(set(rows.tolist())) == (1 if randomness == "same" else 5)
    compare(results(torch.tpu.jit(f)), expected)
    compare(results(torch.compile(f, backend="tpu")), expected)


def test_chunk_vmap_draws_the_same_in_each_chunk():
    x = torch.zeros(5, 2, device=DEVICE)
    with warnings.catch_warnings(action="ignore"):
        rows = torch._functorch.apis.chunk_vmap(lambda x: x + torch.rand_like(x), randomness="same", chunks=3)(x)
    assert len({tuple(row) for row in rows.tolist()}) == 1


def test_generators_that_are_set():
    """A program moves generators on from where they are, so they may be set back to where it had them."""

    def back(x):
        first = torch.randn(3, device=DEVICE)
        state = torch.tpu.get_rng_state()
        a = x + torch.rand(2, device=DEVICE)
        torch.tpu.set_rng_state(state)
        return first, a, torch.rand(2, device=DEVICE), torch.rand(2, device=DEVICE)

    def results(function):
        torch.manual_seed(1)
        return [[t.cpu() for t in function(torch.zeros(2, device=DEVICE))] for _ in range(3)]

    expected = results(back)
    compare(results(torch.tpu.jit(back)), expected)
    assert torch.equal(expected[1][1], expected[1][2])

    def seeds(x):
        torch.manual_seed(3)
        return x + torch.rand(2, device=DEVICE)

    def seeds_between(x):
        y = x + torch.rand(2, device=DEVICE)
        torch.tpu.manual_seed(3)
        return y + torch.rand(2, device=DEVICE)

    def goes_back(x):
        y = x + torch.rand(2, device=DEVICE)
        state = torch.tpu.get_rng_state()
        y = y + torch.rand(2, device=DEVICE)
        torch.tpu.set_rng_state(state)
        return y

    for f in (seeds, seeds_between, goes_back):
        with pytest.raises(RuntimeError, match="the state that a random generator is set to"):
            torch.tpu.jit(f)(torch.zeros(2, device=DEVICE))


def test_a_generator_is_set_back_where_nothing_was_drawn():
    def f(x):
        before = torch.tpu.get_rng_state()
        y = x + 1
        torch.tpu.set_rng_state(before)
        return y + torch.rand(2, device=DEVICE)

    jitted, x = torch.tpu.jit(f), torch.zeros(2, device=DEVICE)
    torch.manual_seed(0)
    expected = [f(x).cpu() for _ in range(3)]
    torch.manual_seed(0)
    for e in expected:
        assert_close(jitted(x), e)


def test_an_ensemble():
    models = [nn.Linear(4, 2).to(DEVICE) for _ in range(3)]
    state = torch.func.stack_module_state(models)
    base = nn.Linear(4, 2, device="meta")

    @torch.tpu.jit
    def f(parameters, buffers, x):
        call = lambda p, b: torch.func.functional_call(base, (p, b), (x,))  # noqa: E731
        return torch.func.vmap(call)(parameters, buffers)

    x = torch.randn(5, 4)
    with torch.no_grad():
        for _ in range(2):
            assert_close(f(*state, to_device(x)), torch.stack([m(to_device(x)).cpu() for m in models]))


def test_checkpoints_and_higher_order():
    model, other = mlp().to(DEVICE), mlp()

    def f(model):
        def run(x):
            def inner(x):
                y = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
                return y.square().sum()

            x = x.detach().requires_grad_()
            (g,) = torch.autograd.grad(inner(x), x, create_graph=True)
            (h,) = torch.autograd.grad(g.square().sum(), x)
            return g.detach(), h

        return run

    jitted = torch.tpu.jit(f(model))
    for x, _ in batches(3):
        compare(jitted(to_device(x)), f(other)(x))
    assert jitted.traces <= 2


def test_threads():
    f = torch.tpu.jit(lambda x: (x * 2).sum())
    failed = []

    def run(k):
        try:
            for i in range(20):
                n = 3 + (i + k) % 3
                assert f(torch.ones(n, device=DEVICE)).item() == 2 * n
        except Exception as e:
            failed.append(e)

    threads = [threading.Thread(target=run, args=(k,)) for k in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failed, failed


@pytest.mark.parametrize("where", ["inside", "around"])
def test_compiled_modules(where):
    """They become a part, as any module; loops and branches besides them are captured as ever."""
    model, other = mlp().to(DEVICE), mlp()
    compiled = torch.compile(model if where == "inside" else nn.Sequential(model))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, other)]

    def step_of(model, optimizer):
        def step(x, y):
            optimizer.zero_grad()
            logits = torch.cond(x.sum() > 0, lambda z: z * 2, lambda z: z + 1, (model(x),))
            loss = nn.functional.cross_entropy(logits, y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    f, g = torch.tpu.jit(step_of(compiled, optimizers[0])), step_of(other, optimizers[1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for x, y in batches(4):
            assert_close(f(to_device(x), to_device(y)), g(x, y))
    assert f.traces == 2


def test_a_scaler_of_gradients():
    results = []
    for device in ("cpu", DEVICE):
        model = mlp().to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        scaler = torch.amp.GradScaler(device, init_scale=4.0, growth_interval=2)

        def step(x, y, model=model, optimizer=optimizer, scaler=scaler):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            return loss.detach()

        f = torch.tpu.jit(step) if device == DEVICE else step
        losses = []
        for i, (x, y) in enumerate(batches(8)):
            x = x * float("inf") if i == 4 else x  # a step that is left out
            losses.append(f(x.to(device), y.to(device)).cpu())
        results.append((torch.stack(losses), scaler.get_scale(), [p.detach().cpu() for p in model.parameters()]))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5, equal_nan=True)
    assert f.traces <= 2


def test_without_tensors():
    f = torch.tpu.jit(lambda: torch.full((2,), 3.0, device=DEVICE) + 1)
    for _ in range(3):
        assert_close(f(), torch.full((2,), 4.0))
    assert f.traces == 1


def test_failures_have_their_line(fused):
    f = torch.tpu.jit(lambda x, i: torch.nn.functional.one_hot(i, 3) + x)
    x, good = torch.zeros(1, 3, device=DEVICE), torch.tensor([1], device=DEVICE)
    f(x, good)
    with pytest.raises(RuntimeError, match="test_jit.py"):
        f(x, torch.tensor([7], device=DEVICE)).cpu()
        torch.tpu.synchronize()
    f(x, good).cpu()


def test_debug_mode_runs_the_function():
    f = torch.tpu.jit(lambda x: x * x.sum().item())
    with torch.tpu.set_eager_mode("debug"):
        assert_close(f(torch.ones(3, device=DEVICE)), torch.full((3,), 3.0))


def test_stages(fused):
    model = mlp().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    @torch.tpu.jit
    def step(x, y):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(nn.functional.dropout(model(x), 0.1), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    x, y = (to_device(t) for t in batches(1)[0])
    before = [p.detach().cpu() for p in model.parameters()]
    random = torch.tpu.get_rng_state()
    graphs = NewGraphs()
    lowered = step.lower(x, y)
    assert "stablehlo.dot_general" in lowered.as_text()
    # What has products is compiled once, and nothing of it runs.
    assert [g.launches for g in graphs.take() if "dot_general" in g.stablehlo] == [0]
    compiled = lowered.compile()
    assert compiled.cost_analysis()["flops"] > 1000
    assert compiled.memory_analysis()["arguments"] > 0
    assert "HloModule" in compiled.as_text()
    # Nothing was done.
    compare([p.detach().cpu() for p in model.parameters()], before)
    assert not optimizer.state and all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.tpu.get_rng_state(), random)
    assert (step.calls, step.traces) == (0, 0)
    # It is the program that later calls run.
    compiled(x, y)
    torch.tpu.synchronize()
    programs = torch.tpu.metrics()["programs"]
    for _ in range(3):
        compiled(x, y)
    torch.tpu.synchronize()
    assert torch.tpu.metrics()["programs"] == programs
    with torch.tpu.set_eager_mode("debug"), pytest.raises(RuntimeError, match="no program in debug mode"):
        step.lower(x, y)


@pytest.mark.parametrize("dynamic", [{}, {0: {0: torch.tpu.Dim(buckets=[8])}}], ids=["exact", "dynamic"])
@pytest.mark.parametrize("f", [torch.conj, lambda x: {"one": x.conj().imag, "other": [(x + 1).mH, 3]}, torch.fft.ihfft])
def test_lazy_conjugates_and_negations_are_computed(f, dynamic):
    x = torch.randn(5, 4, dtype=torch.float32 if f is torch.fft.ihfft else torch.complex64)
    step = torch.tpu.jit(f, dynamic=dynamic)
    for _ in range(2):
        got, wanted = torch.utils._pytree.tree_leaves(step(x.to("tpu"))), torch.utils._pytree.tree_leaves(f(x))
        for a, b in zip(got, wanted, strict=True):
            torch.testing.assert_close(torch.as_tensor(a).cpu(), torch.as_tensor(b), rtol=1e-4, atol=1e-5)
