"""The second call of a compiled graph is a replay of what the first one recorded; what still runs in each call."""

import gc
import sys
import threading

import pytest
import torch
from compile_support import assert_close, compiled, counts, fresh_dynamo, mlp, pair  # noqa: F401 (a fixture)
from oxitorch import _compile
from oxitorch._recipes import Recipes
from support import DEVICE, to_device


def test_other_switches_are_other_programs():
    g = compiled(lambda x, y: x @ y)
    x = torch.randn(8, 8)
    moved = to_device(x)
    assert_close(g(moved, moved), x @ x)
    with torch.tpu.set_precision("default"):  # on GPUs, TF32
        torch.testing.assert_close(g(moved, moved).cpu(), x @ x, rtol=1e-2, atol=1e-2)
    assert_close(g(moved, moved), x @ x)


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
    assert f"test_compile_replays.py:{line} in f" in text


def test_nothing_is_compiled_again():
    g = compiled(mlp().to(DEVICE), dynamic=False, fullgraph=True)
    x = torch.randn(4, 12, device=DEVICE)
    g(x).sum().backward()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(3):
            g(x).sum().backward()
