"""Numbers, empty tensors, values that are not finite and bounds out of range: what the CPU gives, errors included."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from support import DEVICE, assert_same, outcome, tensors

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
