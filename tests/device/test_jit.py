"""`torch.tpu.jit` against the same function run by PyTorch on the CPU: what a call takes and gives."""

import collections
import copy
import threading
import warnings

import pytest
import torch
from jit_support import batches, compare, launches, mlp
from support import DEVICE, NewGraphs, assert_close, to_device
from torch import nn


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
