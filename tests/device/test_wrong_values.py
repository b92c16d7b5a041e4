"""Values that an operation does not allow: errors in debug mode, no crash in others; the trap for NaN."""

import concurrent.futures
import contextlib
import re

import pytest
import torch
import torch.nn.functional as F
from error_support import ints, names_the_line, ones
from support import DEVICE, outcome

INDEX = {
    "gather": (lambda d: ones(d, 3, 4).gather(1, ints(d, [5])), "gather"),
    "gather negative": (lambda d: ones(d, 3, 4).gather(1, ints(d, [-1])), "gather"),
    "index_select": (lambda d: ones(d, 3, 4).index_select(0, ints(d, 5)), "index_select"),
    "index": (lambda d: ones(d, 3, 4)[ints(d, 5)], "index.Tensor"),
    "index negative": (lambda d: ones(d, 3, 4)[:, ints(d, -5)], "index.Tensor"),
    "index_put": (lambda d: ones(d, 3, 4).index_put_((ints(d, 5),), ones(d, 4)), "index_put"),
    "setitem": (lambda d: ones(d, 3, 4).__setitem__(ints(d, 3), 2.0), "index_"),
    "embedding": (lambda d: F.embedding(ints(d, 5), ones(d, 3, 4)), "embedding"),
    "embedding negative": (lambda d: F.embedding(ints(d, -1), ones(d, 3, 4)), "embedding"),
    "scatter": (lambda d: ones(d, 3, 4).scatter_(1, ints(d, [5]), 1.0), "scatter"),
    "scatter_add": (lambda d: ones(d, 3).scatter_add_(0, ints(d, 3), ones(d, 1)), "scatter_add"),
    "scatter_reduce": (lambda d: ones(d, 3).scatter_reduce(0, ints(d, 4), ones(d, 1), "amax"), "scatter_reduce"),
    "index_add": (lambda d: ones(d, 3).index_add_(0, ints(d, 3), ones(d, 1)), "index_add"),
    "index_copy": (lambda d: ones(d, 3).index_copy_(0, ints(d, 3), ones(d, 1)), "index_copy"),
    "index_fill": (lambda d: ones(d, 3).index_fill_(0, ints(d, 3), 1.0), "index_fill"),
    "take": (lambda d: ones(d, 3).take(ints(d, 7)), "take"),
    "cross_entropy": (lambda d: F.cross_entropy(ones(d, 2, 3), ints(d, 0, 7)), "nll_loss_forward"),
    "cross_entropy negative": (lambda d: F.cross_entropy(ones(d, 2, 3), ints(d, 0, -1)), "nll_loss_forward"),
    "one_hot": (lambda d: F.one_hot(ints(d, 1, 7), 3), "scatter"),
    "multinomial": (lambda d: torch.multinomial(-ones(d, 3), 1), "multinomial"),
    "bernoulli": (lambda d: torch.bernoulli(ones(d, 3) * 2), "bernoulli"),
}


@pytest.mark.parametrize("name", INDEX)
def test_values_are_checked_in_debug_mode(name):
    f, op = INDEX[name]
    expected = outcome(f, "cpu")
    with torch.tpu.set_eager_mode("debug"):
        got = outcome(f, DEVICE)
    assert type(got) is type(expected), f"{got!r}\non the CPU {expected!r}"
    assert re.search(rf"aten::{re.escape(op)}\w*(\.\w+)?\((float32|int64|\[)", str(got)), f"op and arguments: {got}"
    assert names_the_line(got, f), got
    assert ones(DEVICE, 2).sum().item() == 2


@pytest.mark.parametrize("name", INDEX)
def test_wrong_values_do_not_crash_in_strict_mode(name):
    f, _ = INDEX[name]
    got = outcome(f, DEVICE)
    with contextlib.suppress(IndexError, RuntimeError):
        torch.tpu.synchronize()
    assert isinstance(got, torch.Tensor | None.__class__ | IndexError | RuntimeError)
    assert ones(DEVICE, 2).sum().item() == 2


# What docs/errors.md says comes out, be it checked or not.
UNCHECKED = {
    "index": (lambda d: torch.arange(3.0, device=d)[ints(d, 5, -7)], [2, 0]),
    "gather": (lambda d: torch.arange(3.0, device=d).gather(0, ints(d, 5, -7)), [2, 0]),
    "index_select": (lambda d: torch.arange(3.0, device=d).index_select(0, ints(d, 5, -7)), [2, 0]),
    "take": (lambda d: torch.arange(3.0, device=d).take(ints(d, 5, -7)), [2, 0]),
    "embedding": (lambda d: F.embedding(ints(d, 5, -1), torch.arange(3.0, device=d)[:, None]), [[2], [0]]),
    "index_put": (lambda d: ones(d, 3).index_put_((ints(d, 5, -7),), ones(d, 2)), [1, 1, 1]),
    "scatter": (lambda d: ones(d, 3).scatter_(0, ints(d, 5, -7), 9.0), [1, 1, 1]),
    "index_add": (lambda d: ones(d, 3).index_add_(0, ints(d, 5, -7), ones(d, 2)), [1, 1, 1]),
    "index_copy": (lambda d: ones(d, 3).index_copy_(0, ints(d, 5, -7), ones(d, 2)), [1, 1, 1]),
    "index_fill": (lambda d: ones(d, 3).index_fill_(0, ints(d, 5, -7), 9.0), [1, 1, 1]),
    "one_hot": (lambda d: F.one_hot(ints(d, 1, 7), 3), [[0, 1, 0], [0, 0, 0]]),
    "class too large": (lambda d: F.nll_loss(torch.arange(3.0, device=d)[None], ints(d, 7)), -2),
    "class too small": (lambda d: F.nll_loss(torch.arange(3.0, device=d)[None], ints(d, -1)), 0),
    "bernoulli": (lambda d: torch.bernoulli(torch.tensor([2.0, -1.0, float("nan")], device=d)), [1, 0, 0]),
    "poisson": (lambda d: torch.poisson(-ones(d, 2)), [0, 0]),
    "floor_divide": (lambda d: ints(d, 5, -5) // ints(d, 0, 0), [-1, -1]),
    "remainder": (lambda d: ints(d, 5, -5) % ints(d, 0, 0), [5, -5]),
    "convert": (lambda d: torch.tensor([float("nan"), 1e30, -1e30], device=d).int(), [0, 2**31 - 1, -(2**31)]),
}


@pytest.mark.parametrize("mode", ["fused", "strict"])
def test_what_comes_of_wrong_values(mode):
    with torch.tpu.set_eager_mode(mode):
        got = {}
        for name, (f, _) in UNCHECKED.items():
            value = f(DEVICE)
            with contextlib.suppress(IndexError, RuntimeError):
                torch.tpu.synchronize()
            got[name] = value.tolist()
    assert got == {name: expected for name, (_, expected) in UNCHECKED.items()}


def test_ignored_targets_are_no_error():
    with torch.tpu.set_eager_mode("debug"):
        loss = F.cross_entropy(ones(DEVICE, 2, 3), ints(DEVICE, 0, -100))
        assert loss.item() == pytest.approx(1.0986, abs=1e-4)
        padded = F.embedding(ints(DEVICE, 0, 2), ones(DEVICE, 3, 4), padding_idx=2)
        assert padded.sum().item() == 8
        assert ones(DEVICE, 3)[ints(DEVICE, -3, 2)].tolist() == [1, 1]


TRAPS = {
    "log": (lambda: torch.log(-ones(DEVICE, 3)), "log"),
    "divide": (lambda: ones(DEVICE, 3) / 0, "div"),
    "in place": (lambda: (-ones(DEVICE, 3)).sqrt_(), "sqrt"),
    "out": (lambda: torch.log(-ones(DEVICE, 3), out=ones(DEVICE, 3)), "log"),
    "overflow": (lambda: torch.exp(ones(DEVICE, 3) * 1000), "exp"),
    "half": (lambda: ones(DEVICE, 3).half() * 1e6, "mul"),
    "foreach": (lambda: torch._foreach_log([-ones(DEVICE, 3)]), "log"),
    "softmax": (lambda: torch.full((3,), -float("inf"), device=DEVICE).softmax(0), ""),
}


@pytest.mark.parametrize("name", TRAPS)
def test_the_nan_trap(name):
    f, op = TRAPS[name]
    with torch.tpu.set_eager_mode("debug"):
        outcome(f)
        torch.tpu.synchronize()  # without the trap nothing is raised
        with torch.tpu.set_nan_trap(True), pytest.raises(RuntimeError, match="(?i)nan") as e:
            f()
    assert op in str(e.value) and names_the_line(e.value, f), e.value


FIRST_NODE = """
import torch
x = torch.zeros(3, device="tpu", requires_grad=True)
torch.tpu.eager_mode = "debug"
torch.tpu.nan_trap = True
y = x.sqrt()
y = y.sum()
try:
    y.backward()
except RuntimeError as e:
    assert "<string>:6" in str(e), e
else:
    raise AssertionError("no error")
"""


def test_the_first_autograd_node_knows_its_line(python):
    assert python(FIRST_NODE).returncode == 0


def root(x):
    return x.sqrt()


def test_the_nan_trap_in_backward():
    x = torch.zeros(3, device=DEVICE, requires_grad=True)
    with torch.tpu.set_eager_mode("debug"), torch.tpu.set_nan_trap(True):
        y = root(x).sum()
        with pytest.raises(RuntimeError, match="(?i)nan") as e:
            y.backward()
    assert names_the_line(e.value, root, below=1), e.value


def test_backward_lines_of_several_threads():
    """Autograd counts its nodes in each thread: the same number is another op elsewhere."""

    def busy():
        y = ones(DEVICE, 3).requires_grad_()
        for _ in range(100):
            y = y * 2
        return y

    def work(_):
        busy()
        x = torch.zeros(3, device=DEVICE, requires_grad=True)
        y = root(x).sum()
        busy()
        return y

    busy()
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        results = list(pool.map(work, range(8)))
    with torch.tpu.set_eager_mode("debug"), torch.tpu.set_nan_trap(True):
        for y in results:
            with pytest.raises(RuntimeError, match="(?i)nan") as e:
                y.backward()
            assert names_the_line(e.value, root, below=1), e.value


def test_the_nan_trap_in_the_backward_of_a_backward():
    x = torch.zeros(3, device=DEVICE, requires_grad=True)
    y = x.pow(1.5).sum()
    (g,) = torch.autograd.grad(y, x, create_graph=True)  # 1.5 * x ** 0.5; its derivative is infinite at 0
    debug, trap = torch.tpu.set_eager_mode("debug"), torch.tpu.set_nan_trap(True)
    with debug, trap, pytest.raises(RuntimeError, match="(?i)nan") as e:
        g.sum().backward()
    assert names_the_line(e.value, test_the_nan_trap_in_the_backward_of_a_backward, below=2), e.value


def test_the_nan_trap_leaves_numbers_alone():
    with torch.tpu.set_eager_mode("debug"), torch.tpu.set_nan_trap(True):
        model = torch.nn.Linear(3, 2).to(DEVICE)
        model(ones(DEVICE, 2, 3)).sum().backward()
        assert (ints(DEVICE, 1, 2) * 2).tolist() == [2, 4]
