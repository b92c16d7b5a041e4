"""What fails after it was recorded, for lack of memory, or in the middle of something: an error where the result is used, and
the rest works on."""

import gc
import sys

import pytest
import torch
import torch.nn.functional as F
from error_support import ints, names_the_line, ones
from support import DEVICE, assert_same, outcome

# ---------------------------------------------------------------- errors that come later


def failing_op():
    """An op whose compilation fails, and its line."""
    # A shape of its own, so that no program of another test is used again.
    x = torch.ones(3, 7, 1, 11, device=DEVICE)
    torch.tpu.synchronize()
    with torch.tpu.compiler.custom_compiler_options({"xla_no_such_option": True}):
        y = x.erfinv()
    return y, sys._getframe().f_lineno - 1


USES = {
    "cpu": lambda y: y.cpu(),
    "item": lambda y: y[0, 0, 0, 0].item(),
    "repr": lambda y: repr(y),
    "chain": lambda y: (((y + 1) * 2).sum() + 1).item(),
    "in place": lambda y: torch.ones(3, 7, 1, 11, device=DEVICE).add_(y).cpu(),
    "into a view": lambda y: torch.zeros(4, 7, 1, 11, device=DEVICE)[1:].copy_(y).cpu(),
    "bool": lambda y: bool(y.any()),
    "equal": lambda y: torch.equal(y, y + 1),
    "save": lambda y: __import__("pickle").dumps(y),
    "synchronize": lambda y: torch.tpu.synchronize(),
    "event": lambda y: [(e := torch.Event(DEVICE)).record(), e.synchronize(), torch.tpu.synchronize()],
}


@pytest.mark.parametrize("name", USES)
def test_a_failed_compile_surfaces_where_the_result_is_used(name):
    y, line = failing_op()  # the op itself does not wait
    with pytest.raises(RuntimeError) as e:
        USES[name](y)
    text = str(e.value)
    assert "erfinv" in text and "xla_no_such_option" in text, text
    assert f"{__file__}:{line}" in text, f"line {line} is not in: {text}"
    outcome(torch.tpu.synchronize)
    torch.tpu.synchronize()  # a failure is reported once
    with pytest.raises(RuntimeError, match="erfinv"):
        y.cpu()  # what depends on it stays failed
    assert torch.ones(3, 7, 1, 11, device=DEVICE).sum().item() == 231


REPLACES = {
    "fill_": lambda y: y.fill_(2),
    "zero_": lambda y: y.zero_(),
    "copy_": lambda y: y.copy_(torch.ones_like(y)),
    "copy_ from the host": lambda y: y.copy_(torch.ones(y.shape)),
    "assignment": lambda y: y.__setitem__(..., 3.0),
    "normal_": lambda y: y.normal_(),
    "uniform_": lambda y: y.uniform_(),
    "bernoulli_": lambda y: y.bernoulli_(0.5),
    "exponential_": lambda y: y.exponential_(),
    "random_": lambda y: y.random_(5),
    "out=": lambda y: torch.add(torch.ones_like(y), 1, out=y),
    "foreach": lambda y: torch._foreach_zero_([y]),
}


@pytest.mark.parametrize("name", REPLACES)
def test_a_failed_value_can_be_replaced(name):
    y, _ = failing_op()
    outcome(torch.tpu.synchronize)
    REPLACES[name](y)
    assert torch.isfinite(y).all().item()


def test_what_is_overwritten_is_not_kept():
    """The old value is no operand of what replaces it: nothing waits for it, and its memory is free before."""
    x = torch.ones(1 << 20, device=DEVICE)
    torch.tpu.synchronize()
    before = torch.tpu.memory_allocated()
    for f in (lambda: x.fill_(3), lambda: x.normal_(), lambda: x.zero_()):
        torch.tpu.reset_peak_memory_stats()
        f()
        torch.tpu.synchronize()
        assert torch.tpu.memory_allocated() == before
        assert torch.tpu.max_memory_allocated() < before + 4096


def test_a_dropped_failure_does_not_poison_the_process():
    failing_op()
    gc.collect()
    outcome(torch.tpu.synchronize)
    torch.tpu.synchronize()
    assert (ones(DEVICE, 3) * 2).tolist() == [2, 2, 2]


# ---------------------------------------------------------------- out of memory and huge shapes


HUGE = {
    "empty": lambda d: torch.empty(2**48, device=d),
    "zeros": lambda d: torch.zeros(2**40, 2**8, device=d),
    "randn": lambda d: torch.randn(2**48, device=d),
    "arange": lambda d: torch.arange(2**48, device=d),
    "expand and clone": lambda d: ones(d, 1).expand(2**48).clone(),
    "expand and add": lambda d: ones(d, 1).expand(2**48) + 1,
    "outer": lambda d: ones(d, 2**20, 1) * ones(d, 2**23),
    "repeat": lambda d: ones(d, 3).repeat(2**45),
    "resize": lambda d: ones(d, 3).resize_(2**48),
    "storage": lambda d: ones(d, 3).untyped_storage().resize_(2**50),
    "cat": lambda d: torch.cat([ones(d, 1).expand(2**47)] * 2),
    "eye": lambda d: torch.eye(2**24, device=d),
    "new_zeros": lambda d: ones(d, 3).new_zeros(2**48),
}


@pytest.mark.parametrize("name", HUGE)
def test_out_of_memory(name):
    f = HUGE[name]
    before = torch.tpu.memory_allocated()
    ooms = torch.tpu.memory_stats()["num_ooms"]
    with pytest.raises(torch.OutOfMemoryError, match=r"out of memory\. Tried to allocate [\d.]+ GiB") as e:
        f(DEVICE)
    assert names_the_line(e.value, f), e.value
    assert name == "storage" or "in aten::" in str(e.value), e.value
    del e
    gc.collect()
    torch.tpu.synchronize()
    assert torch.tpu.memory_allocated() <= before + 64
    assert torch.tpu.memory_stats()["num_ooms"] == ooms + 1
    assert (ones(DEVICE, 3) + 1).tolist() == [2, 2, 2]


IMPOSSIBLE = {
    "zeros": lambda d: torch.zeros(2**62, device=d),
    "zeros twice": lambda d: torch.zeros(2**62, 2**62, device=d),
    "empty": lambda d: torch.empty(2**62, device=d),
    "randn": lambda d: torch.randn(2**62, 4, device=d),
    "arange": lambda d: torch.arange(2**62, device=d),
    "full": lambda d: torch.full((2**62, 2), 1.0, device=d),
    "eye": lambda d: torch.eye(2**62, device=d),
    "linspace": lambda d: torch.linspace(0, 1, 2**62, device=d),
    "resize": lambda d: ones(d, 3).resize_(2**62),
    "expand and sum": lambda d: ones(d, 1).expand(2**62, 4).sum(),
    "expand and add": lambda d: ones(d, 1).expand(2**62) + 1,
    "as_strided": lambda d: ones(d, 1).as_strided((2**62, 2), (0, 2**62)),
    "as_strided and clone": lambda d: ones(d, 1).as_strided((2**62,), (0,)).clone(),
    "repeat": lambda d: ones(d, 3).repeat(2**62),
    "repeat_interleave": lambda d: ones(d, 3).repeat_interleave(2**62),
    "pad": lambda d: F.pad(ones(d, 3), (2**62, 0)),
    "one_hot": lambda d: F.one_hot(ints(d, 1), 2**62),
    "interpolate": lambda d: F.interpolate(ones(d, 1, 1, 2), size=2**61),
    "tril_indices": lambda d: torch.tril_indices(2**31, 2**31, device=d),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_impossible_shapes(name):
    f = IMPOSSIBLE[name]
    with pytest.raises((RuntimeError, ValueError)):  # OutOfMemoryError is a RuntimeError
        f(DEVICE)
    assert (ones(DEVICE, 3) + 1).tolist() == [2, 2, 2]


HUGE_BUT_EMPTY = {
    "zeros": lambda d: torch.zeros(2**40, 0, device=d),
    "add": lambda d: torch.zeros(2**40, 0, device=d) + 1,
    "sum": lambda d: torch.zeros(0, 2**20, device=d).sum(),
    "sum dim": lambda d: torch.zeros(3, 2**40, 0, device=d).sum((1, 2)),
    "expand": lambda d: ones(d, 1).expand(2**40)[5],
}


@pytest.mark.parametrize("name", HUGE_BUT_EMPTY)
def test_huge_but_empty(name):
    f = HUGE_BUT_EMPTY[name]
    assert_same(f(DEVICE), f("cpu"), name)


# ---------------------------------------------------------------- exceptions in the middle


def test_an_exception_in_a_hook():
    x = ones(DEVICE, 3).requires_grad_()
    y = x * 2

    def hook(g):
        raise KeyError("in a hook")

    y.register_hook(hook)
    with pytest.raises(KeyError, match="in a hook"):
        y.sum().backward()
    assert x.grad is None
    (x * 3).sum().backward()
    assert x.grad.tolist() == [3, 3, 3]


def test_an_exception_in_a_python_function():
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return g + ones(DEVICE, 7)

    x = ones(DEVICE, 3).requires_grad_()
    with pytest.raises(RuntimeError, match="size of tensor") as e:
        Broken.apply(x).sum().backward()
    assert __file__ in str(e.value)
    assert (x + 1).tolist() == [2, 2, 2]


def test_an_error_keeps_the_tensor_unchanged():
    x = torch.arange(3.0, device=DEVICE)
    version = x._version
    with pytest.raises(RuntimeError):
        x.add_(ones(DEVICE, 4))
    with pytest.raises(RuntimeError):
        x.copy_(ones(DEVICE, 4))
    with pytest.raises(RuntimeError):
        torch.add(x, 1, out=x.int())
    assert x.tolist() == [0, 1, 2] and x._version == version
