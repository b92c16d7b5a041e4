"""Operations that only a decomposition in Python serves: no Python runs once a recipe was made."""

import sys
import threading
import warnings

import pytest
import torch
from support import DEVICE, assert_same, outcome, to_device
from torch._decomp import decomposition_table

aten = torch.ops.aten
calls = []

torch.library.define("oxitorch_tests::blend", "(Tensor x, Tensor[] ys, float a, *, ScalarType? dtype=None) -> Tensor")
torch.library.define("oxitorch_tests::halves", "(Tensor x, bool lower) -> (Tensor, Tensor)")
torch.library.define("oxitorch_tests::plain", "(Tensor x) -> Tensor")
torch.library.define("oxitorch_tests::noise", "(Tensor x) -> Tensor")
torch.library.define("oxitorch_tests::ratio", "(Tensor x) -> Tensor")
torch.library.define("oxitorch_tests::picky", "(Tensor x, int n) -> Tensor")
ops = torch.ops.oxitorch_tests


@torch.library.impl("oxitorch_tests::blend", "CPU")
@torch._decomp.register_decomposition(ops.blend.default)
def blend(x, ys, a, *, dtype=None):
    calls.append("blend")
    for y in ys:
        x = torch.lerp(x, y, a)
    return x.to(dtype or torch.float32)


@torch.library.impl("oxitorch_tests::halves", "CPU")
def halves(x, lower):
    n = len(x) // 2
    return x[:n] * 2, torch.empty(0) if lower else x[n:].clone()


@torch._decomp.register_decomposition(ops.halves.default)
def halves_decomposition(x, lower):
    calls.append("halves")
    n = len(x) // 2
    return x[:n] * 2, None if lower else x[n:]  # a view: the operation gives tensors of its own


@torch.library.impl("oxitorch_tests::plain", "CPU")
def plain(x):
    return x + 1


@torch._decomp.register_decomposition(ops.noise.default)
def noise(x):
    calls.append("noise")
    return x + torch.rand_like(x)


@torch._decomp.register_decomposition(ops.ratio.default)
def ratio(x):
    calls.append("ratio")
    return x / x


@torch.library.impl("oxitorch_tests::picky", "CPU")
def picky(x, n):
    return x * n


@torch._decomp.register_decomposition(ops.picky.default)
def picky_decomposition(x, n):
    calls.append("picky")
    return x * n if n < 10 else NotImplemented


@pytest.fixture(autouse=True)
def counted():
    """No test sees the recipes of another: sizes are its own."""
    calls.clear()
    torch.tpu.reset_metrics()


def check(op, *args, **kwargs):
    got = op(*to_device(args), **kwargs)
    before = len(calls)
    assert_same(got, op(*args, **kwargs))
    del calls[before:]


def test_python_runs_once_for_arguments_of_a_kind(no_fallback):
    x, ys = torch.randn(3, 5), [torch.randn(5), torch.randn(3, 5)]
    check(ops.blend, x, ys, 0.25)
    assert calls == ["blend"]
    for _ in range(3):
        check(ops.blend, torch.randn(3, 5), ys, 0.25)
    assert calls == ["blend"]
    assert torch.tpu.metrics()["replays"] == 3
    check(ops.blend, torch.randn(2, 5), [torch.randn(2, 5)], 0.25)  # other sizes
    check(ops.blend, x, ys, 0.5)  # another number
    check(ops.blend, x, ys, 0.5, dtype=torch.float16)
    check(ops.blend, x.double(), [y.double() for y in ys], 0.25)
    assert calls == ["blend"] * 5
    for a in (0.25, 0.5):
        check(ops.blend, x, ys, a)
    check(ops.blend, x.double(), [y.double() for y in ys], 0.25)
    check(ops.blend, x, ys, 0.5, dtype=torch.float16)
    assert calls == ["blend"] * 5


def test_no_function_of_python_is_called_by_a_replay(no_fallback):
    x, ys = to_device(torch.randn(4, 7)), [to_device(torch.randn(7))]
    op = ops.blend.default._op  # the builtin below `OpOverload.__call__`
    op(x, ys, 0.75)
    called = []
    sys.setprofile(lambda frame, event, arg: called.append(frame.f_code.co_name) if event == "call" else None)
    try:
        op(x, ys, 0.75)
    finally:
        sys.setprofile(None)
    assert called == [] and calls == ["blend"]


def test_results_that_are_missing_or_views(no_fallback):
    for _ in range(2):
        for lower in (False, True):
            x = torch.randn(6, 2)
            there = x.to(DEVICE)
            first, second = ops.halves(there, lower)
            assert_same(first, x[:3] * 2)
            if lower:
                assert second is None
            else:
                second.zero_()
                assert_same(there, x)
    assert calls == ["halves", "halves"]


def test_random_numbers_go_on():
    x = torch.zeros(4, 9, device=DEVICE)
    torch.manual_seed(3)
    drawn = [ops.noise(x).cpu() for _ in range(3)]
    assert calls == ["noise"] and not drawn[1].equal(drawn[2])
    torch.manual_seed(3)
    torch.testing.assert_close([(x + torch.rand_like(x)).cpu() for _ in range(3)], drawn)


def test_what_a_decomposition_does_not_take_runs_on_the_cpu():
    check(ops.picky, torch.randn(3), 2)
    assert torch.tpu.metrics()["fallbacks"] == {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(ops.picky, torch.randn(3), 12)
        check(ops.plain, torch.randn(3))
    assert torch.tpu.metrics()["fallbacks"] == {"oxitorch_tests::picky": 1, "oxitorch_tests::plain": 1}


def test_errors_of_a_decomposition_come_through():
    there = torch.ones(3, device=DEVICE)
    e = outcome(ops.blend, there, [torch.ones(4, device=DEVICE)], 0.5)
    assert isinstance(e, RuntimeError) and "size" in str(e)
    check(ops.blend, torch.ones(3), [torch.ones(3)], 0.5)  # and nothing is left over


def test_the_line_of_a_replay_is_the_callers(fused):
    x = torch.ones(11, 13, device=DEVICE)
    ops.ratio(x).cpu()
    y = ops.ratio(x)  # this line
    assert calls == ["ratio"]
    y.exp().cpu()
    with open(__file__) as f:
        number = next(n for n, text in enumerate(f, 1) if text.endswith("# this line\n"))
    first = torch.tpu.graphs()[-1].ops[0]
    assert first["line"].startswith(f"{__file__}:{number} "), first


def test_several_threads_at_once(no_fallback):
    x = torch.randn(8, 3)
    wrong = []

    def work():
        for _ in range(20):
            y = ops.blend(x.to(DEVICE), [x.to(DEVICE)], 0.5).cpu()
            wrong.extend([] if torch.allclose(y, x) else [y])

    threads = [threading.Thread(target=work) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_ops_of_pytorch_that_have_no_row(no_fallback, monkeypatch):
    for op in (aten._fused_dropout.default, aten.cudnn_batch_norm.default):
        decomposition = decomposition_table[op]
        monkeypatch.setitem(decomposition_table, op, lambda *a, f=decomposition: calls.append(f) or f(*a))
    for n in (5, 5, 5, 6):
        x = torch.randn(n, 3)
        y, kept = aten._fused_dropout(x.to(DEVICE), 0.5)
        assert_same(y, x * kept.cpu() * 2)
        statistics = torch.ones(3), torch.ones(3)
        there = to_device(statistics)
        y = aten.cudnn_batch_norm(x.to(DEVICE), there[0], None, *there, True, 0.1, 1e-5)[0]
        want = aten.native_batch_norm(x, torch.ones(3), None, *statistics, True, 0.1, 1e-5)[0]
        assert_same(y, want, rtol=1e-5, atol=1e-5)
        for got, expected in zip(there, statistics, strict=True):
            assert_same(got, expected, rtol=1e-5, atol=1e-5)
    assert len(calls) == 4


def test_inside_a_compiled_graph(no_fallback):
    x = torch.randn(5, 3)

    def f(x):
        return ops.blend(x.sin(), [x], 0.5).cos()

    g = torch.compile(f, backend="tpu")
    torch.library.register_fake("oxitorch_tests::blend", lambda x, ys, a, dtype=None: torch.empty_like(x))
    for _ in range(3):
        assert_same(g(x.to(DEVICE)), f(x), rtol=1e-5, atol=1e-5)
