"""Errors: the class PyTorch raises on the CPU; op, shapes, dtypes and the Python line in the message; nothing crashes.

Each row of the tables is a call. What the call does on the CPU is the expectation; the tables say no more than which op
the message has to name.
"""

import concurrent.futures
import contextlib
import gc
import math
import re
import sys
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from support import DEVICE, assert_same, outcome, tensors


def ones(d, *shape):
    return torch.ones(*shape, device=d)


def ints(d, *values):
    return torch.tensor(values, device=d)


def names_the_line(error, f, below=0):
    """Whether the message names this file and the line of the lambda, or one below the line where a function begins."""
    return re.search(rf"{re.escape(__file__)}:{f.__code__.co_firstlineno + below}\b", str(error)) is not None


# ---------------------------------------------------------------- wrong arguments

# Name: the call, and how the message writes op and arguments; None where PyTorch itself refuses before an op is reached.
WRONG = {
    "shapes": (lambda d: ones(d, 3, 4) + ones(d, 5), "aten::add.Tensor(float32[3, 4], float32[5], 1)"),
    "shapes in place": (lambda d: ones(d, 3).add_(ones(d, 2, 3)), "aten::add_.Tensor(float32[3], float32[2, 3], 1)"),
    "mm": (lambda d: ones(d, 3, 4) @ ones(d, 3, 4), "aten::mm(float32[3, 4], float32[3, 4])"),
    "mm dtypes": (lambda d: ones(d, 2, 2).int() @ ones(d, 2, 2), "aten::mm(int32[2, 2], float32[2, 2])"),
    "mm vector": (lambda d: torch.mm(ones(d, 2), ones(d, 2, 2)), "aten::mm(float32[2], float32[2, 2])"),
    "bmm": (lambda d: torch.bmm(ones(d, 2, 3, 4), ones(d, 3, 4, 5)), "aten::bmm(float32[2, 3, 4], float32[3, 4, 5])"),
    "addmm": (lambda d: torch.addmm(ones(d, 7), ones(d, 2, 3), ones(d, 3, 4)), "aten::addmm(float32[7]"),
    "dot": (lambda d: ones(d, 3).dot(ones(d, 4)), "aten::dot(float32[3], float32[4])"),
    "result type": (lambda d: ones(d, 3).long().add_(ones(d, 3)), "aten::add_.Tensor(int64[3], float32[3], 1)"),
    "result type number": (lambda d: ones(d, 3).int().mul_(1.5), "aten::mul_.Tensor(int32[3], float64[])"),
    "result type nan": (lambda d: ones(d, 3).int().add_(float("nan")), "aten::add_.Tensor(int32[3], float64[], 1)"),
    "out dtype": (lambda d: torch.add(ones(d, 3), 1, out=ones(d, 3).int()), "aten::add.out(float32[3]"),
    "out dtype exp": (lambda d: torch.exp(ones(d, 3), out=ones(d, 3).int()), "aten::exp.out(float32[3], int32[3])"),
    "bool minus": (lambda d: ones(d, 3).bool() - ones(d, 3).bool(), "aten::sub.Tensor(bool[3], bool[3], 1)"),
    "bitwise on float": (lambda d: ones(d, 3) & ones(d, 3), "aten::bitwise_and.Tensor(float32[3], float32[3])"),
    "sum dim": (lambda d: ones(d, 3).sum(3), "aten::sum.dim_IntList(float32[3], [3]"),
    "sum dims twice": (lambda d: ones(d, 3, 3).sum((0, 0)), "aten::sum.dim_IntList(float32[3, 3], [0, 0]"),
    "mean of ints": (lambda d: ones(d, 3).int().mean(), "aten::mean(int32[3]"),
    "max of nothing": (lambda d: ones(d, 0).max(), "aten::max(float32[0])"),
    "argmax of nothing": (lambda d: ones(d, 0).argmax(), "aten::argmax(float32[0]"),
    "argmax dim": (lambda d: ones(d, 3).argmax(1), "aten::argmax(float32[3], 1"),
    "softmax dim": (lambda d: ones(d, 3).softmax(2), "aten::_softmax(float32[3], 2"),
    "cumsum dim": (lambda d: ones(d, 3).cumsum(4), "cumsum"),
    "cat ranks": (lambda d: torch.cat([ones(d, 3), ones(d, 3, 4)]), "aten::cat([float32[3], float32[3, 4]], 0)"),
    "cat sizes": (lambda d: torch.cat([ones(d, 2, 3), ones(d, 2, 4)]), "aten::cat([float32[2, 3], float32[2, 4]], 0)"),
    "stack": (lambda d: torch.stack([ones(d, 2), ones(d, 3)]), "stack"),
    "gather rank": (lambda d: ones(d, 3, 4).gather(1, ints(d, 1)), "aten::gather(float32[3, 4], 1, int64[1]"),
    "gather index dtype": (lambda d: ones(d, 3).gather(0, ones(d, 1)), "aten::gather(float32[3], 0, float32[1]"),
    "scatter dtype": (lambda d: ones(d, 3).scatter_(0, ints(d, 0), ones(d, 1).int()), "aten::scatter_.src(float32[3]"),
    "index_select dtype": (lambda d: ones(d, 3).index_select(0, ones(d, 1)), "aten::index_select(float32[3], 0, float"),
    "index shapes": (lambda d: ones(d, 3, 4)[ints(d, 0, 1), ints(d, 0, 1, 2)], "aten::index.Tensor(float32[3, 4]"),
    "mask shape": (lambda d: ones(d, 3)[ones(d, 4).bool()], "aten::index.Tensor(float32[3]"),
    "embedding dtype": (lambda d: F.embedding(ones(d, 2), ones(d, 3, 4)), "aten::embedding("),
    "conv channels": (
        lambda d: F.conv2d(ones(d, 1, 3, 4, 4), ones(d, 2, 4, 3, 3)),
        "aten::convolution(float32[1, 3, 4, 4], float32[2, 4, 3, 3]",
    ),
    "conv kernel": (lambda d: F.conv2d(ones(d, 1, 3, 2, 2), ones(d, 2, 3, 3, 3)), "aten::convolution("),
    "conv dtype": (lambda d: F.conv2d(ones(d, 1, 1, 3, 3), ones(d, 1, 1, 2, 2).double()), "aten::convolution("),
    "conv groups": (lambda d: F.conv2d(ones(d, 1, 3, 3, 3), ones(d, 2, 1, 2, 2), groups=2), "aten::convolution("),
    "pool": (lambda d: F.max_pool2d(ones(d, 1, 3, 2, 2), 3), "aten::max_pool2d_with_indices(float32[1, 3, 2, 2]"),
    "layer norm": (lambda d: F.layer_norm(ones(d, 3, 4), [5]), "aten::native_layer_norm(float32[3, 4], [5]"),
    "group norm": (lambda d: F.group_norm(ones(d, 2, 4, 3), 3), None),
    "batch norm": (lambda d: F.batch_norm(ones(d, 2, 4), ones(d, 3), ones(d, 3)), None),
    "nll dtype": (lambda d: F.nll_loss(ones(d, 2, 3), ones(d, 2)), "aten::nll_loss_forward("),
    "nll batch": (lambda d: F.nll_loss(ones(d, 2, 3), ints(d, 0)), None),
    "mse": (lambda d: F.mse_loss(ones(d, 3), ones(d, 2)), None),
    "topk": (lambda d: ones(d, 3).topk(5), "topk"),
    "where": (lambda d: torch.where(ones(d, 2).bool(), ones(d, 3), ones(d, 2)), "aten::where.self(bool[2], float32[3]"),
    "masked_fill mask": (lambda d: ones(d, 3).masked_fill(ones(d, 3), 1.0), "aten::masked_fill"),
    "index_add": (lambda d: ones(d, 3).index_add(0, ints(d, 0), ones(d, 2)), "aten::index_add"),
    "arange step": (lambda d: torch.arange(0, 10, 0, device=d), "aten::arange.start_step(0, 10, 0"),
    "arange infinite": (lambda d: torch.arange(0, float("inf"), 1, device=d), "aten::arange.start_step(0, inf, 1"),
    "arange nan": (lambda d: torch.arange(float("nan"), 1, device=d), "aten::arange"),
    "linspace": (lambda d: torch.linspace(0, 1, -1, device=d), "aten::linspace(0, 1, -1"),
    "randint": (lambda d: torch.randint(5, 2, (3,), device=d), "random_"),
    "normal std": (lambda d: ones(d, 3).normal_(0, -1), "normal"),
    "uniform": (lambda d: ones(d, 3).uniform_(2, 1), "uniform_"),
    "uniform nan": (lambda d: ones(d, 3).uniform_(float("nan"), 1), "uniform_"),
    "exponential": (lambda d: ones(d, 3).exponential_(-1), "exponential_"),
    "fill overflow": (lambda d: ones(d, 3).int().fill_(2**40), "fill_"),
    "fill nan": (lambda d: ones(d, 3).int().fill_(float("nan")), "fill_"),
    "fill infinity": (lambda d: ones(d, 3).long().fill_(float("inf")), "fill_"),
    "fill complex": (lambda d: ones(d, 3).fill_(1j), "fill_"),
    "full nan": (lambda d: torch.full((2,), float("nan"), dtype=torch.int32, device=d), "f"),
    "masked_fill overflow": (lambda d: ones(d, 3).to(torch.int8).masked_fill_(ones(d, 3).bool(), 300), "masked_fill_"),
    "clamp": (lambda d: torch.clamp(ones(d, 3)), "aten::clamp.Tensor(float32[3]"),
    "pow of ints": (lambda d: ones(d, 3).int() ** -1, "aten::pow.Tensor_Scalar(int32[3], -1)"),
    "by zero": (lambda d: ones(d, 3).int() // 0, "aten::floor_divide(int32[3], int64[])"),
    "by zero in place": (lambda d: ones(d, 3).int().floor_divide_(0), "aten::floor_divide_"),
    "by zero truncated": (lambda d: torch.div(ones(d, 3).int(), 0, rounding_mode="trunc"), "aten::div"),
    "by zero of the host": (
        lambda d: ones(d, 3).int() // torch.tensor(0),
        "aten::floor_divide(int32[3], int64[] on cpu)",
    ),
    "by zero of bools": (lambda d: ones(d, 3).bool() % 0, "aten::remainder"),
    "by false": (lambda d: ones(d, 3).int() % False, "aten::remainder"),
    "remainder by zero": (lambda d: ones(d, 3).int() % 0, "aten::remainder.Scalar(int32[3], 0)"),
    "fmod by zero": (lambda d: ones(d, 3).int().fmod_(0), "aten::fmod_"),
    "gcd of floats": (lambda d: torch.gcd(ones(d, 3) * float("nan"), ones(d, 3)), "aten::gcd(float32[3], float32[3])"),
    "tril of a vector": (lambda d: ones(d, 3).tril(), "aten::tril(float32[3]"),
    "trace": (lambda d: ones(d, 3).trace(), "aten::trace(float32[3])"),
    "flip": (lambda d: ones(d, 3).flip(2), "aten::flip(float32[3], [2])"),
    "roll": (lambda d: ones(d, 3).roll([1, 2], [0]), "aten::roll(float32[3]"),
    "pad": (lambda d: F.pad(ones(d, 3), (-2, -2)), None),
    "negative size": (lambda d: torch.zeros(-3, device=d), None),
    "negative size empty": (lambda d: torch.empty(2, -3, device=d), None),
    "negative size randn": (lambda d: torch.randn(2, -3, device=d), None),
    "negative narrow": (lambda d: ones(d, 3).narrow(0, -5, 1), None),
    "negative resize": (lambda d: ones(d, 3).resize_(-1), None),
    "negative repeat": (lambda d: ones(d, 3).repeat(-1), None),
    "view": (lambda d: ones(d, 3).view(5), None),
    "view dtype": (lambda d: ones(d, 3).view(torch.float64), None),
    "view of a transposed": (lambda d: ones(d, 2, 3).t().view(6), None),
    "reshape": (lambda d: ones(d, 3, 3).reshape(2, -1), None),
    "expand": (lambda d: ones(d, 3).expand(4), None),
    "permute": (lambda d: ones(d, 3, 2).permute(0, 0), None),
    "as_strided": (lambda d: ones(d, 3).as_strided((3, 3), (3, 1)), None),
    "as_strided negative": (lambda d: ones(d, 3).as_strided((2,), (-1,)), None),
    "index": (lambda d: ones(d, 3)[5], None),
    "index many": (lambda d: ones(d, 3)[0, 0], None),
    "select": (lambda d: ones(d, 3).select(0, 3), None),
    "unfold": (lambda d: ones(d, 3).unfold(0, 4, 1), None),
    "split": (lambda d: ones(d, 3).split([1, 1]), None),
    "squeeze": (lambda d: ones(d, 3).squeeze(2), None),
    "item": (lambda d: ones(d, 3).item(), None),
    "bool": (lambda d: bool(ones(d, 3)), None),
    "int of nothing": (lambda d: int(ones(d, 0)), None),
    "len of a number": (lambda d: len(ones(d, 2).sum()), None),
    "iterate a number": (lambda d: list(ones(d, 2).sum()), None),
    "full of text": (lambda d: torch.full((2,), "a", device=d), None),
    "too big": (lambda d: torch.tensor(2**64, device=d), None),
    "set dtype": (lambda d: ones(d, 3).set_(ones(d, 3).int()), None),
    "leaf": (lambda d: ones(d, 3).requires_grad_().add_(1), None),
    "int grad": (lambda d: ones(d, 3).int().requires_grad_(), None),
    "no grad_fn": (lambda d: ones(d, 3).backward(), None),
    "grad shape": (lambda d: (ones(d, 3).requires_grad_() * 2).backward(ones(d, 2)), None),
    "backward twice": (lambda d: [(y := ones(d, 3).requires_grad_().exp().sum()).backward(), y.backward()], None),
    "dropout": (lambda d: F.dropout(ones(d, 3), 1.5), None),
    "attention dropout": (
        lambda d: F.scaled_dot_product_attention(*[ones(d, 1, 1, 2, 4)] * 3, dropout_p=1.5),
        "got 1.5",
    ),
    "attention dropout -1": (
        lambda d: F.scaled_dot_product_attention(*[ones(d, 1, 1, 2, 4)] * 3, dropout_p=-1),
        "got -1",
    ),
    "attention dropout nan": (
        lambda d: F.scaled_dot_product_attention(*[ones(d, 1, 1, 2, 4)] * 3, dropout_p=math.nan),
        "probability has to be between 0 and 1, but got",
    ),
    "inverse": (lambda d: torch.linalg.inv(torch.zeros(3, 3, device=d)), None),
    "cholesky": (lambda d: torch.linalg.cholesky(-torch.eye(3, device=d)), None),
    "foreach lengths": (lambda d: torch._foreach_add([ones(d, 2)], [ones(d, 2), ones(d, 2)]), None),
    "addr beta": (
        lambda d: torch.addr(ints(d, [1]), ints(d, 1), ints(d, 1), beta=2.0),
        "argument beta must not be a floating",
    ),
    "addr alpha": (lambda d: torch.addr(ones(d, 2, 2), ones(d, 2), ones(d, 2), alpha=True), "Boolean alpha only"),
    "foreach numbers": (
        lambda d: torch._foreach_mul([ones(d, 2)] * 2, [1.0]),
        "same number of elements as scalar list",
    ),
    "foreach numbers in place": (
        lambda d: torch._foreach_pow_([ones(d, 2)], []),
        "same number of elements as scalar list",
    ),
    "foreach packed numbers": (
        lambda d: torch._foreach_addcmul(*[[ones(d, 2)] * 2] * 3, torch.ones(3)),
        "Expected length of scalars to match input of length 2 but got 3 instead.",
    ),
    "foreach packed rank": (
        lambda d: torch._foreach_addcmul(*[[ones(d, 2)] * 2] * 3, torch.ones(2, 2)),
        "Expected packed scalar Tensor to be of dimension 1. Got 2 instead.",
    ),
    "foreach complex maximum": (lambda d: torch._foreach_maximum(*[[ones(d, 2) * 1j]] * 2), "complex"),
    "foreach complex minimum": (lambda d: torch._foreach_minimum_(*[[ones(d, 2) * 1j]] * 2), "complex"),
    "two sizes": (lambda d: ones(d, 2, 3) + ones(d, 4, 5), "at non-singleton dimension 1"),
    "foreach two sizes": (
        lambda d: torch._foreach_clamp_min(*[[ones(d, n, n)] for n in (2, 3)]),
        "singleton dimension 1",
    ),
    "foreach shapes": (lambda d: torch._foreach_add([ones(d, 2)], [ones(d, 3)]), "_foreach_add"),
    "pinned": (lambda d: torch.empty(2, device=d, pin_memory=True) if d != "cpu" else [][1], None),
}
# Where the CPU has no error to compare with.
OWN_CLASS = {"pinned": (RuntimeError,)}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name):
    f, words = WRONG[name]
    expected, got = outcome(f, "cpu"), outcome(f, DEVICE)
    assert isinstance(got, Exception), f"no error; on the CPU {expected!r}"
    if name in OWN_CLASS:
        assert isinstance(got, OWN_CLASS[name])
    else:
        assert type(got) is type(expected), f"{got!r}\non the CPU {expected!r}"
    if words is not None:
        assert words in str(got), got
        assert names_the_line(got, f), f"line {f.__code__.co_firstlineno} is not in: {got}"
    assert len(str(got)) < 1500 and "C++" not in str(got), "a wall of text"
    assert ones(DEVICE, 2).sum().item() == 2


def test_the_line_is_where_the_user_called():
    """Through layers of torch.nn, the line is this file's; in backward it is the line of the forward op."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU()).to(DEVICE)
    x = ones(DEVICE, 2, 5)
    with pytest.raises(RuntimeError) as e:
        model(x)
    line = e.tb.tb_lineno
    assert f"{__file__}:{line}" in str(e.value) and "float32[2, 5]" in str(e.value), e.value


# ---------------------------------------------------------------- mixed devices

MIXED = {
    "add": (lambda: ones(DEVICE, 3) + ones("cpu", 3), "aten::add.Tensor(float32[3], float32[3] on cpu, 1)"),
    "add reversed": (lambda: ones("cpu", 3) + ones(DEVICE, 3), "aten::add.Tensor(float32[3] on cpu, float32[3], 1)"),
    "in place": (lambda: ones(DEVICE, 3).add_(ones("cpu", 3)), "aten::add_.Tensor(float32[3], float32[3] on cpu, 1)"),
    "into the cpu": (lambda: ones("cpu", 3).add_(ones(DEVICE, 3)), "cpu"),
    "mm": (lambda: ones(DEVICE, 2, 2) @ ones("cpu", 2, 2), "aten::mm(float32[2, 2], float32[2, 2] on cpu)"),
    "linear": (lambda: torch.nn.Linear(3, 2)(ones(DEVICE, 2, 3)), "cpu"),
    "out": (lambda: torch.add(ones(DEVICE, 3), 1, out=ones("cpu", 3)), "cpu"),
    "out reversed": (lambda: torch.add(ones("cpu", 3), 1, out=ones(DEVICE, 3)), "cpu"),
    "cat": (lambda: torch.cat([ones(DEVICE, 3), ones("cpu", 3)]), "aten::cat([float32[3], float32[3] on cpu], 0)"),
    "embedding": (lambda: F.embedding(ints("cpu", 1), ones(DEVICE, 3, 4)), "aten::embedding("),
    "gather": (lambda: ones(DEVICE, 3).gather(0, ints("cpu", 1)), "aten::gather("),
    "where": (lambda: torch.where(ones("cpu", 3).bool(), ones(DEVICE, 3), 0.0), "aten::where"),
    "conv": (lambda: F.conv1d(ones(DEVICE, 1, 1, 3), ones("cpu", 1, 1, 2)), "aten::convolution("),
    "cross_entropy": (lambda: F.cross_entropy(ones(DEVICE, 2, 3), ints("cpu", 0, 1)), "aten::nll_loss_forward("),
    "generator": (lambda: torch.rand(3, generator=torch.Generator(), device=DEVICE), "enerator"),
    "generator reversed": (lambda: torch.rand(3, generator=torch.Generator(DEVICE)), "enerator"),
    "cpu index mask": (lambda: ones("cpu", 3)[ints(DEVICE, 1)], "cpu"),
}


@pytest.mark.parametrize("name", MIXED)
def test_mixed_devices(name):
    f, words = MIXED[name]
    with pytest.raises(RuntimeError) as e:
        f()
    assert words in str(e.value) and DEVICE in str(e.value), e.value
    if words.startswith("aten::"):
        assert names_the_line(e.value, f), e.value


def test_what_may_be_mixed():
    """Numbers, 0-dim CPU tensors, CPU index tensors: as with CUDA."""
    x = torch.arange(4.0, device=DEVICE)
    assert (x + torch.tensor(2.0)).tolist() == [2, 3, 4, 5]
    assert (torch.tensor(2) * x).tolist() == [0, 2, 4, 6]
    assert (x + torch.tensor(2, dtype=torch.float64)).dtype == torch.float32
    assert x[torch.tensor([3, 1])].tolist() == [3, 1]
    assert x[torch.tensor([True, False, True, False])].tolist() == [0, 2]
    x[torch.tensor([0])] = 7
    x[1:3] = torch.tensor([8.0, 9.0])
    assert x.tolist() == [7, 8, 9, 3]
    x.copy_(torch.zeros(4))
    assert x.tolist() == [0, 0, 0, 0]
    assert torch.where(x == 0, x, torch.tensor(1.0)).tolist() == [0, 0, 0, 0]
    assert x.index_fill(0, torch.tensor([3, -3]), 5.0).tolist() == [0, 5, 0, 5]
    assert x.index_fill_(0, torch.tensor([0]), torch.tensor(6)).tolist() == [6, 0, 0, 0]
    with pytest.raises(IndexError, match="out of bounds"):
        x.index_fill(0, torch.tensor([4]), 1.0).tolist()


# ---------------------------------------------------------------- values that are wrong, in debug mode

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


# ---------------------------------------------------------------- 0-dim, empty, non-finite

UNARY = """abs exp log sqrt rsqrt sin cos tanh sigmoid neg sign ceil floor round relu square reciprocal
           isnan isinf isfinite logical_not erf log1p expm1 sum mean prod std var amax amin any all argmax norm
           cumsum cumprod sort argsort softmax log_softmax flip unique nonzero clone t tril median
           logsumexp count_nonzero nan_to_num gelu silu softplus flatten ravel""".split()  # noqa: SIM905
BINARY = """add sub mul div pow fmod remainder atan2 maximum minimum eq lt logical_and matmul true_divide
            floor_divide where dot outer bmm cat stack cross_entropy mse_loss""".split()  # noqa: SIM905


def unary(name, x):
    if name in ("cumsum", "cumprod", "softmax", "log_softmax", "logsumexp"):
        return getattr(x, name)(0)
    if name == "flip":
        return x.flip(list(range(x.dim())))
    if hasattr(x, name):
        return getattr(x, name)()
    return getattr(F, name)(x)


def binary(name, x, y):
    if name == "where":
        return torch.where(x > 0, x, y)
    if name in ("cat", "stack"):
        return getattr(torch, name)([x, y])
    if hasattr(torch, name):
        return getattr(torch, name)(x, y)
    return getattr(F, name)(x, y)


ODD = {
    "number": torch.tensor(1.5),
    "empty": torch.empty(0),
    "no rows": torch.empty(0, 3),
    "no columns": torch.empty(3, 0),
    "non-finite": torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0, -0.0, 3.0]),
}


def agree(f, *args):
    """Runs on the CPU and on the device: the same class of error, or the same result."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = outcome(f, *args)
        got = outcome(f, *[a.to(DEVICE) if isinstance(a, torch.Tensor) else a for a in args])
    if isinstance(expected, Exception):
        assert type(got) is type(expected), f"{got!r}\non the CPU {expected!r}"
        return
    assert not isinstance(got, Exception), got
    for a, b in zip(tensors(got), tensors(expected), strict=True):
        assert_same(a, b, strides=False)


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("name", UNARY)
def test_odd_tensors(name, kind):
    if (name, kind) == ("gelu", "non-finite"):
        # The CPU's vectorised gelu gives NaN at infinity; CUDA and the formula give infinity.
        assert F.gelu(ODD[kind].to(DEVICE))[[0, 3, 4]].tolist() == [float("inf"), 0, 0]
        return
    agree(lambda x: unary(name, x), ODD[kind])


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("name", BINARY)
def test_odd_pairs(name, kind):
    x = ODD[kind]
    agree(lambda x, y: binary(name, x, y), x, x.flip(0) if x.dim() == 1 else x.clone())


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan"), 0, 1e300, True, 2**62, -(2**63)])
def test_odd_numbers(value):
    x = torch.tensor([1.0, -2.0, 0.5])
    for f in (
        lambda x: x + value,
        lambda x: x * value,
        lambda x: x / value,
        lambda x: x.clone().fill_(value),
        lambda x: torch.full_like(x, value),
        lambda x: x.clamp(max=value),
        lambda x: x > value,
        lambda x: torch.add(x, x, alpha=value),
        lambda x: x.pow(value),
        lambda x: x.masked_fill(x > 0, value),
        lambda x: F.pad(x, (1, 1), value=value),
        lambda x: x.int() + value,
        lambda x: x.int() * value,
        lambda x: x.addcmul(x, x, value=value),
        lambda x: torch.addmm(x.view(1, 3), x.view(1, 3), x.diag(), beta=value),
        lambda x: x.index_fill(0, (x > 5).int().argmax().view(1), value),
    ):
        agree(f, x)
    if value != 1e300:  # accelerators convert it without a check
        agree(lambda x: torch.where(x > 0, x, value), x)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64])
def test_bounds_out_of_range(dtype):
    x = torch.tensor([0, 1, 5, 127], dtype=dtype)
    for value in (300, 2**40, -300, -(2**40), 3):
        agree(lambda x, v=value: x.clamp(max=v), x)
        agree(lambda x, v=value: x.clamp(min=v), x)
        agree(lambda x, v=value: x.clamp_(-v, v), x)
    agree(lambda x: torch.add(x, x, alpha=2**40), x)
    agree(lambda x: F.pad(x, (1, 1), value=2**40), x)


# ---------------------------------------------------------------- threads


def test_threads(no_background_compile):
    """Eight threads train at the same time; each gets what it gets alone.

    Up to the last digit: one thread's read ends the window of all, and a program cut elsewhere rounds elsewhere.
    """

    def work(seed):
        g = torch.Generator().manual_seed(seed)
        w = torch.randn(4, 4, generator=g).to(DEVICE).requires_grad_()
        x = torch.randn(2, 4, generator=g).to(DEVICE)
        losses = []
        for _ in range(10):
            loss = (x @ w).tanh().square().mean()
            loss.backward()
            with torch.no_grad():
                w -= 0.5 * w.grad
                w.grad = None
            losses.append(loss.item())
        return losses

    alone = [work(i) for i in range(8)]
    together, errors = [None] * 8, []
    start = threading.Barrier(8)

    def run(i):
        try:
            start.wait()
            together[i] = work(i)
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(120)
    assert not errors and not any(t.is_alive() for t in threads)
    torch.testing.assert_close(torch.tensor(together), torch.tensor(alone))


def test_threads_share_a_tensor():
    x = torch.zeros(8, device=DEVICE)

    def add(i):
        for _ in range(50):
            x[i].add_(1)  # a view: the whole storage is written back each time

    threads = [threading.Thread(target=add, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(120)
    assert x.tolist() == [50] * 8


def test_one_thread_fails_and_the_others_do_not():
    results = []

    def good():
        results.append(sum((ones(DEVICE, 3) + i).sum().item() for i in range(30)))

    def bad():
        for _ in range(30):
            with pytest.raises(RuntimeError, match="size of tensor"):
                ones(DEVICE, 3) + ones(DEVICE, 2)
        results.append("raised")

    threads = [threading.Thread(target=f) for f in (good, bad, good, bad)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(120)
    expected = sum(3 * (1 + i) for i in range(30))
    assert sorted(map(str, results)) == sorted(map(str, [expected * 1.0, expected * 1.0, "raised", "raised"]))


def test_tensors_die_in_other_threads_and_in_the_collector():
    """Cycles that hold tensors are collected in whatever thread runs the collector."""
    torch.tpu.synchronize()
    gc.collect()
    before = torch.tpu.memory_allocated()

    def make():
        for _ in range(20):
            cycle = [ones(DEVICE, 1 << 12)]
            cycle.append(cycle)
            y = (cycle[0] * 2).requires_grad_()
            y.register_hook(lambda g, cycle=cycle: g)

    threads = [threading.Thread(target=make) for _ in range(4)]
    for t in threads:
        t.start()
        gc.collect()
    for t in threads:
        t.join(60)
    gc.collect()
    torch.tpu.synchronize()
    assert torch.tpu.memory_allocated() == before


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


# ---------------------------------------------------------------- processes


def test_a_forked_child_gets_an_error_and_the_parent_is_unharmed(python):
    code = """
import os, torch
x = torch.arange(4.0, device="tpu")
y = x + 1
pid = os.fork()
if pid == 0:
    for use in (lambda: x + 1, lambda: x.cpu(), lambda: x.tolist(), lambda: torch.ones(2, device="tpu"),
                lambda: torch.tpu.synchronize(), lambda: torch.randn(2, device="tpu"), lambda: repr(x)):
        try:
            use()
        except RuntimeError as e:
            assert "fork" in str(e) and "spawn" in str(e), e
        else:
            os._exit(3)
    assert torch.ones(3).sum().item() == 3
    del x, y
    raise SystemExit(7)
_, status = os.waitpid(pid, 0)
assert os.waitstatus_to_exitcode(status) == 7, status
assert (x + y).tolist() == [1, 3, 5, 7]
print("parent works")
"""
    done = python(code, timeout=60)
    assert done.stdout == "parent works\n" and done.stderr == ""


def test_fork_before_the_device_is_used(python):
    code = """
import os, torch
assert not torch.tpu.is_initialized()
pid = os.fork()
assert torch.arange(3, device="tpu").sum().item() == 3
if pid == 0:
    raise SystemExit(0)
_, status = os.waitpid(pid, 0)
assert status == 0, status
print("both work")
"""
    assert "both work" in python(code, timeout=60).stdout


def test_spawned_children(python, tmp_path):
    script = tmp_path / "spawned.py"
    script.write_text("""
import torch, torch.multiprocessing as mp
def work(rank, queue):
    queue.put((rank, (torch.ones(2, device="tpu") * rank).tolist()))
if __name__ == "__main__":
    torch.ones(1, device="tpu").item()
    queue = mp.get_context("spawn").Queue()
    mp.spawn(work, (queue,), nprocs=2)
    print(sorted(queue.get() for _ in range(2)))
""")
    assert python("", str(script), timeout=120).stdout == "[(0, [0.0, 0.0]), (1, [1.0, 1.0])]\n"


LOADER = """
import torch
from torch.utils.data import DataLoader, Dataset
class Data(Dataset):
    def __len__(self): return 8
    def __getitem__(self, i): return BODY
torch.ones(1, device="tpu").item()
loader = DataLoader(Data(), batch_size=4, num_workers=2, multiprocessing_context="fork", pin_memory=True)
"""


def test_loaders_with_forked_workers(python):
    code = (
        LOADER.replace("BODY", "torch.full((2,), float(i))")
        + """
for epoch in range(2):
    total = sum(batch.to("tpu", non_blocking=True).sum() for batch in loader)
    assert total.item() == 56, total
print("done")
"""
    )
    done = python(code, timeout=90)
    assert done.stdout == "done\n" and done.stderr == ""


def test_a_forked_worker_that_uses_the_device(python):
    code = (
        LOADER.replace("BODY", 'torch.ones(2, device="tpu")')
        + """
try:
    next(iter(loader))
except RuntimeError as e:
    print("fork" in str(e))
"""
    )
    assert python(code, timeout=90).stdout == "True\n"


EXITS = {
    "work in flight": """
x = torch.randn(1024, 1024, device="tpu")
for _ in range(20):
    x = x @ x
""",
    "compiles in flight": """
for n in range(1, 12):
    torch.randn(n, 3, device="tpu").sin().softmax(0)
""",
    "objects alive": """
import atexit, builtins, threading
x = torch.ones(3, device="tpu", requires_grad=True)
y = (x * 2).sum()
y.backward()
cycle = [x, y]; cycle.append(cycle)
local = threading.local(); local.x = x
torch.keep = x  # dies with torch's module
builtins.keep = y
atexit.register(lambda: x.detach().add_(1).tolist() == [2, 2, 2] or print("wrong"))
class Late:
    def __init__(self): self.x = torch.ones(3, device="tpu")
    def __del__(self): del self.x
late = Late(); late.self = late
e = torch.tpu.Event(enable_timing=True); e.record(); s = torch.tpu.Stream()
""",
    "daemon thread": """
import threading, time
def work():
    x = torch.ones(4, device="tpu")
    while True:
        x = x * 1.0
threading.Thread(target=work, daemon=True).start()
time.sleep(0.3)
""",
    "daemon threads that wait for programs": """
import threading, time
def work(k):
    for n in range(1, 10**6):
        (torch.ones(n, k + 1, device="tpu") * 2).sum().item()
for k in range(3):
    threading.Thread(target=work, args=(k,), daemon=True).start()
time.sleep(0.7)
""",
    "operations of finalizers": """
class Owner:
    def __init__(self):
        self.t = torch.ones(3, device="tpu")
    def __del__(self):
        try:
            (self.t * 3).tolist()
        except RuntimeError:
            pass
kept = Owner()
kept.own = kept
globals_too = [Owner()]
""",
    "a backward that just failed": """
x = torch.zeros(3, device="tpu", requires_grad=True)
torch.tpu.eager_mode = "debug"
torch.tpu.nan_trap = True
try:
    x.sqrt().sum().backward()
except RuntimeError:
    pass
""",
    "backward in a thread": """
import threading
def work():
    x = torch.ones(4, device="tpu", requires_grad=True)
    (x * 2).sum().backward()
t = threading.Thread(target=work); t.start(); t.join()
""",
    # One batch: PyTorch's own thread raises when a worker ends with more of them on their way.
    "loader": """
from torch.utils.data import DataLoader, TensorDataset
loader = iter(DataLoader(TensorDataset(torch.ones(1, 2)), num_workers=1, pin_memory=True))
next(loader)[0].to("tpu")
""",
    "device never used": "",
    "failed value": """
with torch.tpu.compiler.custom_compiler_options({"xla_no_such_option": True}):
    y = torch.ones(3, 5, device="tpu").erfinv()
""",
}


@pytest.mark.parametrize("name", EXITS)
def test_exits_are_quiet(python, name):
    # Programs that another test has compiled would not be in flight for long.
    done = python("import torch\n" + EXITS[name], check=False, timeout=60, OXITORCH_CACHE="off")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_exit_codes(python):
    body = """
import os, sys, torch
x = torch.randn(512, 512, device="tpu")
for _ in range(20):
    x = x @ x
"""
    assert python(body + "sys.exit(5)", check=False, timeout=60).returncode == 5
    assert python(body + "os._exit(6)", check=False, timeout=60).returncode == 6
    done = python(body + "raise ValueError('mine')", check=False, timeout=60)
    assert done.returncode == 1 and "ValueError: mine" in done.stderr


WAITS = {
    "item": "y[0, 0].item()",
    "item behind others": "\nfor _ in range(2): y = torch.tpu.ops.optimization_barrier(y @ x)\ny[0, 0].item()",
    "synchronize": "torch.tpu.synchronize()",
    "event": "e = torch.Event('tpu'); e.record(); e.synchronize()",
    "running ahead": "\nwhile True: y = y @ x",
    "compiling": "\ntorch.tpu.synchronize()\nfor n in range(1, 100000): (torch.ones(n, device='tpu') * 2).sum().item()",
}


@pytest.mark.parametrize("name", WAITS)
def test_an_interrupt_ends_a_wait(python, name):
    """Seconds of device work are queued; SIGINT must raise KeyboardInterrupt within a second."""
    code = f"""
import os, signal, threading, time, torch
x = torch.randn(2000, 2000, device="tpu", dtype=torch.float64)
torch.tpu.synchronize()
y = x @ x
for _ in range({0 if name == "compiling" else 60}):
    y = y @ x
due = time.monotonic() + 1
threading.Timer(1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
try:
    {WAITS[name].replace(chr(10), chr(10) + "    ")}
    print("nothing to interrupt", flush=True)
except KeyboardInterrupt:
    late = time.monotonic() - due
    print("in time" if 0 <= late < 1 else f"after {{late}} s", flush=True)
os._exit(0)
"""
    assert python(code, timeout=90).stdout == "in time\n"


HANDLERS = """
import signal, torch

class Late(Exception):
    pass

def handler(*_):
    # Runs inside the wait, PyTorch lets go of the GIL in it, and its lines are new.
    seen.append((torch.ones(3, 5, device="tpu") * len(seen)).sum())
    if len(seen) == 3:
        raise Late("too late")
    signal.setitimer(signal.ITIMER_REAL, 0.05)

seen = []
x = torch.randn(1500, 1500, device="tpu", dtype=torch.float64)
torch.tpu.synchronize()
for wait in (lambda: y.sum().item(), torch.tpu.synchronize):
    seen.clear()
    y = x
    for _ in range(10):
        y = y @ x / 1500
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        wait()
        print("nothing to interrupt")
    except Late as e:
        print(e, [t.item() for t in seen])
    signal.setitimer(signal.ITIMER_REAL, 0)
"""


def test_signal_handlers_run_ops_and_raise_what_they_like(python):
    done = python(HANDLERS, timeout=90)
    assert done.stdout == "too late [0.0, 15.0, 30.0]\n" * 2


def test_the_device_works_after_an_interrupt(python):
    code = """
import os, signal, threading, time, torch
x = torch.randn(2000, 2000, device="tpu", dtype=torch.float64)
torch.tpu.synchronize()
y = x @ x
threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
try:
    y.sum().item()
    time.sleep(5)
    print("not interrupted")
except KeyboardInterrupt:
    pass
assert torch.allclose(y[:2].cpu(), x[:2].cpu() @ x.cpu())
print("works")
"""
    assert python(code, timeout=90).stdout == "works\n"


def test_fallback_policy_error(python):
    code = """
import torch
x = torch.eye(3, device="tpu")
try:
    torch.ops.aten._add_relu(x, x)
except NotImplementedError as e:
    print("_add_relu" in str(e), "<string>:5" in str(e), "OXITORCH_FALLBACK" in str(e))
print(torch.tpu.metrics()["fallbacks"])
"""
    done = python(code, OXITORCH_FALLBACK="error", timeout=60)
    assert done.stdout == "True True True\n{}\n" and done.stderr == ""


def test_fallbacks_warn_once_with_the_line_and_are_counted():
    x = torch.eye(3, device=DEVICE)
    before = sum(torch.tpu.metrics()["fallbacks"].values())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            y = torch.ops.aten._add_relu(x, -2 * x)
    assert y.cpu().tolist() == torch.zeros(3, 3).tolist()
    counted = torch.tpu.metrics()["fallbacks"]
    assert sum(counted.values()) - before >= 3 and any("_add_relu" in name for name in counted)
    ours = [w for w in caught if "_add_relu" in str(w.message)]
    assert len(ours) <= 1 and all(__file__ in str(w.message) for w in ours)


def test_tensors_go_to_other_processes(python, tmp_path):
    """As copies, which share storages among them as they did."""
    script = tmp_path / "sent.py"
    script.write_text("""
import torch, torch.multiprocessing as mp
class Data(torch.utils.data.Dataset):
    def __len__(self): return 2
    def __getitem__(self, i): return torch.full((3,), float(i), device="tpu")
def work(given, back, w, none):
    x, view, p, h, e, cpu = given.get()
    view.add_(1)
    back.put((x, view, p, h, e, cpu, w + 1, none))
    given.get()
if __name__ == "__main__":
    ctx = mp.get_context("spawn")
    given, back = ctx.Queue(), ctx.Queue()
    x = torch.arange(6.0, device="tpu").view(2, 3)
    arguments = torch.ones(2, device="tpu"), torch.ones(0, device="tpu")
    child = ctx.Process(target=work, args=(given, back, *arguments))
    child.start()
    p = torch.nn.Parameter(x[0] * 3)
    given.put((x, x[1, 1:], p, x.half().t(), x[:0], torch.ones(2)))
    for t in back.get(): print(type(t).__name__, t.device, t.requires_grad, t.dtype, t.stride(), t.tolist())
    given.put(None)
    child.join()
    print(child.exitcode, x.tolist())
    loader = torch.utils.data.DataLoader(Data(), num_workers=1, multiprocessing_context="spawn")
    print([t.tolist() for t in loader])
""")
    assert (
        python("", str(script), timeout=120).stdout
        == """\
Tensor tpu:0 False torch.float32 (3, 1) [[0.0, 1.0, 2.0], [3.0, 5.0, 6.0]]
Tensor tpu:0 False torch.float32 (1,) [5.0, 6.0]
Parameter tpu:0 True torch.float32 (1,) [0.0, 3.0, 6.0]
Tensor tpu:0 False torch.float16 (1, 3) [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
Tensor tpu:0 False torch.float32 (3, 1) []
Tensor cpu False torch.float32 (1,) [1.0, 1.0]
Tensor tpu:0 False torch.float32 (1,) [2.0, 2.0]
Tensor tpu:0 False torch.float32 (1,) []
0 [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
[[[0.0, 0.0, 0.0]], [[1.0, 1.0, 1.0]]]
"""
    )
