"""Errors: the class PyTorch raises on the CPU; op, shapes, dtypes and the Python line in the message; nothing crashes.

Each row of the tables is a call. What the call does on the CPU is the expectation; the tables say no more than which op
the message has to name.
"""

import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from compile_support import WAYS
from error_support import ints, names_the_line, ones
from support import DEVICE, outcome

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


# The same operations, on lines of their own.
SAME_OPS = [
    lambda x, i: (x * 2)[i].exp() + 1,
    lambda x, i: (x * 2)[i].exp() + 1,
    lambda x, i: (x * 2)[i].exp() + 1,
]


@pytest.mark.parametrize("way", WAYS)
def test_a_failed_check_names_the_line_that_ran_and_not_the_one_that_made_the_program(fused, way):
    torch._dynamo.reset()
    x, fine, beyond = ones(DEVICE, 5), ints(DEVICE, 0, 4), ints(DEVICE, 1, 5)
    calls = [(f, WAYS[way](f)) for f in SAME_OPS]
    for _ in range(3):
        for _, call in calls:
            torch.tpu.synchronize()
            call(x, fine).tolist()
    torch.tpu.synchronize()
    before = torch.tpu.metrics()["programs"]
    for f, call in calls:
        with pytest.raises(IndexError, match="out of bounds") as error:
            call(x, beyond).tolist()
        assert names_the_line(error.value, f), error.value
    assert torch.tpu.metrics()["programs"] == before


# ---------------------------------------------------------------- processes


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


LOWERED_FOR_OTHERS = {
    "interpolation of bytes": lambda: F.interpolate(torch.ones(1, 1, 4, 4, dtype=torch.uint8).to(DEVICE), (2, 2), mode="bilinear"),
    "logsumexp of complex numbers": lambda: torch.ones(3, dtype=torch.complex64).to(DEVICE).logsumexp(0),
    "addr of bool": lambda: torch.addr(*(torch.ones(n, dtype=torch.bool).to(DEVICE) for n in ((2, 2), 2, 2))),
}  # fmt: skip


@pytest.mark.parametrize("why", LOWERED_FOR_OTHERS)
def test_where_some_arguments_have_no_lowering_these_are_named(fused, why):
    text = rf"aten::\S+ has no lowering for the tpu device for these arguments \({why}\), and OXITORCH_FALLBACK"
    with torch.tpu.set_fallback("error"):
        with pytest.raises(NotImplementedError, match=text):
            LOWERED_FOR_OTHERS[why]()
        with pytest.raises(NotImplementedError, match="aten::_add_relu.Tensor has no lowering for the tpu device, and"):
            torch.ops.aten._add_relu(torch.eye(3, device=DEVICE), torch.eye(3, device=DEVICE))
