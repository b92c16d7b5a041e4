"""In-place operations and `out=` where the tensor that is written overlaps others or itself, or has another size."""

import warnings

import pytest
import torch
from support import DEVICE, assert_same, outcome

IN_PLACE = {
    "add_": lambda t: t.add_(1),
    "fill_": lambda t: t.fill_(1),
    "zero_": lambda t: t.zero_(),
    "copy_": lambda t: t.copy_(torch.ones(3, 4, device=t.device)),
    "mul_": lambda t: t.mul_(t),
    "relu_": lambda t: t.relu_(),
    "masked_fill_": lambda t: t.masked_fill_(torch.ones(3, 4, dtype=torch.bool, device=t.device), 1),
    "out": lambda t: torch.add(torch.ones(3, 4, device=t.device), 1, out=t),
    "index_add_": lambda t: t.index_add_(0, torch.tensor([0], device=t.device), torch.ones(1, 4, device=t.device)),
    "scatter_": lambda t: t.scatter_(0, torch.zeros(1, 4, dtype=torch.int64, device=t.device), 1.0),
    "clamp_": lambda t: t.clamp_(0, 1),
    "normal_": lambda t: t.normal_(),
    "addcmul_": lambda t: t.addcmul_(torch.ones(4, device=t.device), torch.ones(4, device=t.device)),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_writes_to_expanded_tensors(name):
    """Refused where the CPU refuses; where it does not, the result is the same."""
    results = {}
    for device in ("cpu", DEVICE):
        t = torch.ones(4, device=device).expand(3, 4)
        results[device] = outcome(IN_PLACE[name], t)
    a, b = results["cpu"], results[DEVICE]
    assert type(a) is type(b), (a, b)
    if isinstance(a, Exception):
        assert str(a).splitlines()[0] in str(b)
    elif name != "normal_":
        assert_same(b, a)


OVERLAPS = {
    "add_": lambda a: a[1:].add_(a[:-1]),
    "copy_": lambda a: a[1:].copy_(a[:-1]),
    "out": lambda a: torch.add(a[:-1], 1, out=a[1:]),
    "mul_": lambda a: a[:-1].mul_(a[1:]),
}


@pytest.mark.parametrize("name", OVERLAPS)
def test_partial_overlap_is_refused(name):
    for device in ("cpu", DEVICE):
        a = torch.arange(5.0, device=device)
        with pytest.raises(RuntimeError, match="some elements of the input tensor and the written-to tensor refer"):
            OVERLAPS[name](a)
        assert a.tolist() == [0, 1, 2, 3, 4]


def test_the_results_of_aminmax_lie_apart():
    a, out = torch.arange(6.0, device=DEVICE).reshape(2, 3), torch.zeros(4, device=DEVICE)
    with pytest.raises(ValueError, match="must not overlap"):
        torch.aminmax(a, dim=1, out=(out[:2], out[1:3]))
    torch.aminmax(a, dim=1, out=(out[:2], out[2:]))
    assert out.tolist() == [0, 3, 2, 5]


def test_full_overlap_is_fine(device):
    a = torch.arange(4.0, device=device)
    a.add_(a)
    torch.mul(a, 2, out=a)
    b = a.view(2, 2)
    b.add_(a.view(2, 2))
    assert a.tolist() == [0, 8, 16, 24]


def test_copies_within_a_storage(device):
    a = torch.arange(8.0, device=device)
    a[:4].copy_(a[4:])
    assert a.tolist() == [4, 5, 6, 7, 4, 5, 6, 7]
    m = torch.arange(9.0, device=device).view(3, 3)
    m.copy_(m.t().clone())
    assert m.tolist() == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]


def test_in_place_with_broadcast_and_promotion(device):
    a = torch.zeros(2, 3, device=device)
    a += torch.tensor([1, 2, 3], device=device)
    a[:, 0] -= torch.tensor([1.0, 2.0], device=device)
    a *= 2.5
    assert a.tolist() == [[0, 5, 7.5], [-2.5, 5, 7.5]] and a.dtype == torch.float32


def test_out_resizes_and_aliases(device):
    out = torch.empty(0, device=device)
    assert torch.add(torch.ones(2, 2, device=device), 1, out=out) is out
    assert out.tolist() == [[2, 2], [2, 2]]
    base = torch.zeros(4, device=device)
    torch.add(torch.ones(2, device=device), 1, out=base[1:3])
    assert base.tolist() == [0, 2, 2, 0]
    m = torch.zeros(2, 2, device=device)
    torch.mm(torch.eye(2, device=device), torch.tensor([[1.0, 2], [3, 4]], device=device), out=m.t())
    assert m.tolist() == [[1, 3], [2, 4]]
    with pytest.warns(UserWarning, match="resized"):
        torch.add(torch.ones(3, device=device), 1, out=m)
    assert m.tolist() == [2, 2, 2]


STRIDED = {
    "complex transform": (torch.complex64, lambda x, out: torch.fft.fft2(x.cfloat(), dim=(0, 1), out=out)),
    "transform of reals": (torch.complex64, lambda x, out: torch.fft.rfft2(x, dim=(0, 1), out=out)),
    "transform to reals": (torch.float32, lambda x, out: torch.fft.irfft2(x.cfloat(), dim=(0, 1), out=out)),
    "of a permuted tensor": (torch.float32, lambda x, out: torch.add(x.permute(2, 0, 1), 1, out=out)),
    "inverse": (torch.float32, lambda x, out: torch.linalg.inv(torch.eye(3, device=x.device), out=out)),
    "cholesky_inverse": (torch.float32, lambda x, out: torch.cholesky_inverse(torch.eye(3, device=x.device), out=out)),
    "arange": (torch.float32, lambda x, out: torch.arange(6, out=out)),
}


@pytest.mark.parametrize("name", STRIDED)
@pytest.mark.parametrize("form", ["empty", "wrong size"])
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_out_that_is_resized_gets_the_strides_of_the_cpu(device, name, form):
    dtype, f = STRIDED[name]
    shape = (0,) if form == "empty" else (2, 5)
    expected, got = (torch.zeros(shape, dtype=dtype, device=d) for d in ("cpu", device))
    for out in (expected, got):
        f(torch.arange(120.0).reshape(4, 6, 5).to(out.device), out)
    assert (got.shape, got.stride()) == (expected.shape, expected.stride())


EXPANDED = {
    "index_put_": lambda x, i, v: x.index_put_((i,), v),
    "index_put_ that adds": lambda x, i, v: x.index_put_((i,), v, accumulate=True),
    "index_fill_": lambda x, i, v: x.index_fill_(0, i, 5.0),
    "index_fill_ of a tensor": lambda x, i, v: x.index_fill_(0, i, v[0]),
    "masked_fill_": lambda x, i, v: x.masked_fill_(x > 0, 5.0),
    "masked_fill_ of a tensor": lambda x, i, v: x.masked_fill_(x > 0, v[0]),
    "x[i] = v": lambda x, i, v: x.__setitem__(i, v),
    "x[mask] = number": lambda x, i, v: x.__setitem__(x > 0, 5.0),
}


@pytest.mark.parametrize("name", EXPANDED)
def test_indexed_writes_to_expanded_tensors_are_warned_of(name):
    """As on the CPU, and only for these tensors."""
    seen = {}
    torch.set_warn_always(True)
    try:
        for device in ("cpu", DEVICE):
            for expanded in (True, False):
                x = torch.ones(1, device=device).expand(3)
                x = x if expanded else x.contiguous()
                i, v = torch.tensor([0, 2], device=device), torch.tensor([2.0, 2.0], device=device)
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    EXPANDED[name](x, i, v)
                seen[device, expanded] = [str(w.message).split(" (Triggered")[0] for w in caught]
    finally:
        torch.set_warn_always(False)
    assert seen["cpu", True] and not seen["cpu", False]
    assert [seen[DEVICE, e] for e in (True, False)] == [seen["cpu", e] for e in (True, False)]


@pytest.mark.filterwarnings("ignore:Use of")
def test_masked_writes_to_expanded_tensors(device):
    """What the mask leaves out does not undo what it lets through elsewhere."""
    mask = torch.tensor([[True, False, False], [False, False, True]], device=device)
    for start in ([1.0, 2.0, 3.0], [float("nan"), 0.0, float("nan")]):
        base = torch.tensor(start, device=device)
        base.expand(2, 3).masked_fill_(mask, -0.0)
        assert base.tolist()[::2] == [0, 0] and str(base.tolist()[0]) == "-0.0"
    base = torch.tensor([1.0, 2.0, 3.0], device=device)
    base.expand(2, 3)[mask] = 5.0
    assert base.tolist() == [5, 2, 5]
    base.expand(2, 3).index_put_((torch.tensor([0, 1], device=device), torch.tensor([1, 1], device=device)), base[0])
    assert base.tolist() == [5, 5, 5]
    base = torch.tensor([1j, 2j], device=device)
    base[:1].expand(3).masked_fill_(torch.tensor([False, True, False], device=device), 1 + 1j)
    assert base.tolist() == [1 + 1j, 2j]


def test_an_operand_is_not_resized(device):
    wide = torch.full((5, 5), 2.0, device=device)
    y = torch.ones(5, 1, device=device)
    for f in (lambda: torch.mul(y, wide, out=y), lambda: y.ldexp_(wide), lambda: y.mul_(wide)):
        with pytest.raises(
            RuntimeError, match=r"output with shape \[5, 1\] doesn't match the broadcast shape \[5, 5\]"
        ):
            f()
    assert y.shape == (5, 1) and y.sum().item() == 5
    assert torch.mul(y, 3, out=y) is y and y.sum().item() == 15
