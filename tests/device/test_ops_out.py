"""What `out=` may be, and what becomes of it."""

import warnings

import pytest
import torch
from support import DEVICE, assert_same, outcome, to_device

OUT_DTYPES = {
    "neg": lambda x, o: torch.neg(x, out=o),
    "exp": lambda x, o: torch.exp(x, out=o),
    "clamp": lambda x, o: torch.clamp(x, 0, 1, out=o),
    "add": lambda x, o: torch.add(x, x, out=o),
    "signbit": lambda x, o: torch.signbit(x, out=o),
    "any": lambda x, o: torch.any(x, 0, out=o),
    "argmax": lambda x, o: torch.argmax(x, 0, out=o),
    "max": lambda x, o: torch.max(x, out=o),
    "sum": lambda x, o: torch.sum(x, 0, out=o),
    "cumsum": lambda x, o: torch.cumsum(x, 0, out=o),
    "mm": lambda x, o: torch.mm(x, x, out=o),
    "cat": lambda x, o: torch.cat([x, x], out=o),
    "nonzero": lambda x, o: torch.nonzero(x, out=o),
    "gather": lambda x, o: torch.gather(x, 0, torch.zeros(1, 3, dtype=torch.int64, device=x.device), out=o),
    "softmax": lambda x, o: torch.softmax(x, 0, out=o),
    "tril": lambda x, o: torch.tril(x, out=o),
    "searchsorted": lambda x, o: torch.searchsorted(x.sort()[0], x, out=o),
    "full": lambda x, o: torch.full((3,), 2.0, out=o),
    "linspace": lambda x, o: torch.linspace(0, 3, 4, out=o),
}


@pytest.mark.parametrize("name", OUT_DTYPES)
def test_out_dtypes(name):
    x = torch.tensor([[0.5, -1.5, 2.25], [1.75, 0.0, -3.0], [4.5, 2.0, 1.0]])
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool):
        if dtype == torch.bool and name in ("cumsum", "linspace"):
            continue  # the CPU has no such kernel
        expected = outcome(OUT_DTYPES[name], x, torch.empty(0, dtype=dtype))
        got = outcome(OUT_DTYPES[name], x.to(DEVICE), torch.empty(0, dtype=dtype, device=DEVICE))
        assert type(got) is type(expected), f"{dtype}: {got!r}, on the CPU {expected!r}"
        if isinstance(expected, torch.Tensor):
            assert_same(got, expected, f"{dtype}", strides=name != "nonzero")


def test_the_dtype_of_out_is_what_dtype_says():
    x = torch.ones(3)
    for dtype in (torch.float32, torch.float64):
        for f in (torch.cumsum, torch.cumprod, torch.sum):
            expected = outcome(f, x, 0, dtype=torch.float64, out=torch.empty(0, dtype=dtype))
            got = outcome(f, x.to(DEVICE), 0, dtype=torch.float64, out=torch.empty(0, dtype=dtype, device=DEVICE))
            assert type(got) is type(expected), f"{f.__name__} {dtype}: {got!r}, on the CPU {expected!r}"


COUNTED_OUT = {
    "arange": lambda o: torch.arange(6.0, out=o),
    "linspace": lambda o: torch.linspace(0, 5, 6, out=o),
    "logspace": lambda o: torch.logspace(0, 2, 6, out=o),
}


@pytest.mark.parametrize("name", COUNTED_OUT)
def test_out_of_as_many_elements_keeps_its_shape(name):
    for make in (lambda d: torch.empty(2, 3, device=d), lambda d: torch.empty(3, 2, device=d).t(),
                 lambda d: torch.ones(6, 2, device=d)[:, 1], lambda d: torch.empty(0, 2, device=d)):  # fmt: skip
        got, expected = make(DEVICE), make("cpu")
        COUNTED_OUT[name](got)
        COUNTED_OUT[name](expected)
        assert_same(got, expected, rtol=1e-5, atol=1e-5)


RESIZED_OUT = {
    "add": lambda x, o: torch.add(x, 1, out=o),
    "transform": lambda x, o: torch.fft.ifft(x, dim=0, out=o.to(torch.complex64)),
    "real transform": lambda x, o: torch.fft.rfft(x, dim=0, out=o.to(torch.complex64)),
    "cat": lambda x, o: torch.cat([x[None, None], x[None, None]], 1, out=o),
    "nonzero": lambda x, o: torch.nonzero(x, out=o.long()),
    "inverse": lambda x, o: torch.linalg.inv(x[:3] + 4 * torch.eye(3, device=x.device), out=o),
}


@pytest.mark.parametrize("name", RESIZED_OUT)
def test_out_that_is_resized_takes_the_strides_of_a_new_result(name):
    x = torch.rand(3, 4, generator=torch.Generator().manual_seed(1)).t()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for size in ((0,), (7, 2)):
            expected = RESIZED_OUT[name](x, torch.ones(size))
            got = RESIZED_OUT[name](to_device(x), torch.ones(size, device=DEVICE))
            assert_same(got, expected, f"{size}", rtol=1e-5, atol=1e-5)


OVERLAPS = {
    "masked_select": lambda x: torch.masked_select(x, x > 0, out=x.view(-1)),
    "cat": lambda x: torch.cat([x, x], out=x),
    "gather": lambda x: torch.gather(x, 0, torch.zeros(3, 4, dtype=torch.long, device=x.device), out=x),
    "take": lambda x: torch.take(x, torch.zeros(3, 4, dtype=torch.long, device=x.device), out=x),
    "kthvalue": lambda x: torch.kthvalue(x, 1, out=(x[0], torch.empty(3, dtype=torch.long, device=x.device))),
}


@pytest.mark.parametrize("name", OVERLAPS)
def test_out_may_not_be_what_is_read(name):
    x = torch.rand(3, 4)
    with pytest.raises(RuntimeError, match="refer to a single memory location"):
        OVERLAPS[name](x)
    with pytest.raises(RuntimeError, match="refer to a single memory location"):
        OVERLAPS[name](x.to(DEVICE))
