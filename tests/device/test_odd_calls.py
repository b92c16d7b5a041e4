"""Results, errors and warnings of odd calls, and dtypes that StableHLO has not."""

import warnings

import pytest
import torch
from support import DEVICE, assert_same, bits, outcome

# ---------------------------------------------------------------- results, errors and warnings of odd calls


def deterministic(f):
    torch.use_deterministic_algorithms(True)
    try:
        return f()
    finally:
        torch.use_deterministic_algorithms(False)


def scripted_assignment(x, m):
    x[m] = 5
    return x


ODD_CALLS = {
    "range of float16": lambda d: torch.zeros(3, dtype=torch.float16, device=d).random_(0, 70000),
    "range of uint8": lambda d: torch.zeros(3, dtype=torch.uint8, device=d).random_(0, 300),
    "new memory": lambda d: deterministic(lambda: torch.empty(2, dtype=torch.int32, device=d)),
    "new strided memory": lambda d: deterministic(lambda: torch.empty_strided((2, 2), (1, 2), device=d)),
    "grown memory": lambda d: deterministic(lambda: torch.ones(2, device=d).resize_(4)),
    "lazy clone": lambda d: torch._lazy_clone(torch.ones(3, device=d)).add_(1),
    "count into floats": lambda d: torch.nonzero(torch.ones(3, device=d), out=torch.empty(0, device=d)),
    "byte mask": lambda d: torch.arange(4, device=d)[torch.tensor([1, 0, 1, 0], dtype=torch.uint8, device=d)],
    "byte mask added to": lambda d: torch.zeros(2, device=d).index_put_(
        (torch.tensor([1, 0], dtype=torch.uint8, device=d),), torch.ones((), device=d), accumulate=True
    ),
    "scripted mask": lambda d: torch.jit.script(scripted_assignment)(
        torch.arange(4.0, device=d), torch.arange(4, device=d) > 1
    ),
    "offset of nothing": lambda d: torch.tensor(torch.arange(4, device=d)[2:].set_().storage_offset(), device=d),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ODD_CALLS)
def test_odd_calls(name):
    found = []
    for device in ("cpu", DEVICE):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            result = outcome(ODD_CALLS[name], device)
        found.append((result, [str(w.message).split(" (Triggered")[0] for w in seen]))
    (cpu, warned_cpu), (device, warned_device) = found
    assert warned_device == warned_cpu
    if isinstance(cpu, Exception):
        assert type(device) is type(cpu)
        assert str(cpu).replace("typeFloat", "type Float") in str(device)
    else:
        assert_same(device, cpu, name)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("f", "words"),
    [
        (lambda: torch.eye(2, device=DEVICE).to_mkldnn(), ("aten::to_mkldnn", "mkldnn layout")),
    ],
)
def test_what_the_device_has_not_is_named(f, words):
    with pytest.raises(NotImplementedError) as e:
        f()
    assert all(word in str(e.value) for word in words)


# ---------------------------------------------------------------- dtypes that StableHLO has not


BITS = [torch.complex32, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu, torch.bits8, torch.bits16]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", BITS, ids=str)
def test_dtypes_that_are_kept_as_bits(dtype):
    """They are copied and shown; their arithmetic runs on the CPU."""
    whole = torch.arange(4 * 6 * dtype.itemsize, dtype=torch.uint8).view(dtype)
    for f in (
        lambda x: x.view(4, 6),
        lambda x: x.view(4, 6)[1:, ::2],
        lambda x: x.view(4, 6).t(),
        lambda x: x.view(torch.uint8),
        lambda x: x.view(4, 6).t().clone(),
        lambda x: torch.empty_like(x).copy_(x),
        lambda x: torch.cat([x, x]),
    ):
        cpu, device = f(whole.clone()), f(whole.to(DEVICE))
        assert device.dtype == cpu.dtype and device.stride() == cpu.stride()
        assert torch.equal(bits(device), bits(cpu))
    x = torch.empty(24, dtype=dtype, device=DEVICE)
    x[3:5] = whole[3:5]
    assert torch.equal(bits(x)[3 * dtype.itemsize : 5 * dtype.itemsize], bits(whole[3:5]))


def complex_halves(device):
    return torch.view_as_complex(torch.arange(8.0, device=device).half().view(4, 2))


COMPLEX32 = {
    "from parts": complex_halves,
    "complex": lambda d: torch.complex(torch.ones(2, device=d).half(), torch.arange(2.0, device=d).half()),
    "polar": lambda d: torch.polar(torch.ones(2, device=d).half(), torch.zeros(2, device=d).half()),
    "chalf": lambda d: torch.arange(3.0, device=d).chalf(),
    "to complex64": lambda d: complex_halves(d).to(torch.complex64),
    "from complex64": lambda d: (torch.arange(3.0, device=d) * 1j).to(torch.complex32),
    "into complex64": lambda d: torch.zeros(4, dtype=torch.complex64, device=d).copy_(complex_halves(d)),
    "conj": lambda d: complex_halves(d).conj(),
    "resolved conj": lambda d: complex_halves(d).conj().resolve_conj(),
    "cloned conj": lambda d: complex_halves(d).conj().clone(),
    "part of conj": lambda d: complex_halves(d).conj().imag,
    "conj to complex64": lambda d: complex_halves(d).conj().to(torch.complex64),
    "copied into conj": lambda d: complex_halves(d).conj().copy_(complex_halves(d)),
    "product of conj": lambda d: complex_halves(d).conj() * 2,
    "real": lambda d: complex_halves(d).real.mul_(2),
    "sum": lambda d: complex_halves(d).add_(1j),
    "half times complex": lambda d: torch.arange(3.0, device=d).half() * 1j,
    "half times 0-d complex": lambda d: torch.arange(3.0, device=d).half() * torch.tensor(1j, device=d),
    "half times complex64": lambda d: torch.arange(3.0, device=d).half() * torch.tensor([1j], device=d),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", COMPLEX32)
def test_complex32(name):
    cpu, device = COMPLEX32[name]("cpu"), COMPLEX32[name](DEVICE)
    assert device.dtype == cpu.dtype and device.is_conj() == cpu.is_conj() and device.stride() == cpu.stride()
    assert torch.equal(bits(device), bits(cpu)), (device, cpu)


@pytest.mark.filterwarnings("ignore:aten")
@pytest.mark.parametrize("number", [2**64 - 1, 2**63, 2**63 - 1])
def test_numbers_of_uint64(number):
    x = torch.tensor([3, 2**64 - 1, 2**63, 2**63 - 1], dtype=torch.uint64)
    for f in (
        lambda x: x.eq(number),
        lambda x: x != number,
        lambda x: x.clone().fill_(number),
        lambda x: torch.full((2,), number, dtype=torch.uint64, device=x.device),
    ):
        assert_same(f(x.to(DEVICE)), f(x))
