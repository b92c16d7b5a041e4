"""Products of groups, and the histograms that routers of experts make their offsets with."""

import pytest
import torch
import torch.nn.functional as F
from support import DEVICE, assert_same, to_device

pytestmark = pytest.mark.usefixtures("no_fallback")

GROUPED_MM = getattr(F, "grouped_mm", None) or torch._grouped_mm
ENDS = {"some": [2, 5, 12], "empty groups": [0, 8, 8], "one": [12, 12, 12], "a rest": [3, 4, 9]}


def operands(form, dtype, ends, g):
    """Two operands and their offsets; the last dimensions are multiples of 16 bytes, as the CPU wants them."""
    shapes = {
        "rows": ((12, 16), (3, 16, 8)),
        "columns": ((3, 8, 16), (16, 12 if dtype == torch.float32 else 16)),
        "contracted": ((8, 12 if dtype == torch.float32 else 16), (12 if dtype == torch.float32 else 16, 8)),
        "batch": ((3, 8, 16), (3, 16, 8)),
    }
    l, r = (torch.randn(s, generator=g).to(dtype) for s in shapes[form])  # noqa: E741
    return l, r, None if form == "batch" else torch.tensor(ENDS[ends], dtype=torch.int32)


def defined(form, out, ends):
    """What belongs to a group."""
    last = None if ends is None else int(ends[-1])
    return {"rows": lambda: out[:last], "columns": lambda: out[:, :last]}.get(form, lambda: out)()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("form", ["rows", "columns", "contracted", "batch"])
def test_forms(form, ends, dtype):
    l, r, ends = operands(form, dtype, ends, torch.Generator().manual_seed(0))  # noqa: E741
    wanted = GROUPED_MM(l, r, offs=ends)
    got = GROUPED_MM(*to_device([l, r]), offs=None if ends is None else ends.to(DEVICE))
    assert_same(defined(form, got, ends), defined(form, wanted, ends), strides=False)


def test_gradients_of_experts():
    x, w, ends = operands("rows", torch.float32, "some", torch.Generator().manual_seed(0))
    results = []
    for device in ("cpu", DEVICE):
        a, b = (t.detach().to(device).requires_grad_() for t in (x, w))
        GROUPED_MM(a, b, offs=ends.to(device)).square().sum().backward()
        results.append((a.grad, b.grad))
    for wanted, got in zip(*results, strict=True):
        assert_same(got, wanted, strides=False, rtol=1e-5, atol=1e-5)


def test_what_does_not_concern_a_group_does_not_reach_it():
    x, w = torch.ones(4, 8, device=DEVICE), torch.ones(2, 8, 8, device=DEVICE)
    w[1] = float("nan")
    ends = torch.tensor([2, 4], dtype=torch.int32, device=DEVICE)
    y = GROUPED_MM(x, w, offs=ends).isnan()
    assert not y[:2].any() and y[2:].all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.int8, torch.uint8], ids=str)
def test_histograms_of_whole_numbers(dtype):
    x = torch.tensor([3, 0, 1, 1, 7, 3, 3, 9], dtype=dtype)
    for bins, low, high in [(4, 0, 3), (8, 0, 7), (3, 0, 9), (5, 0, 0), (2, 3, 3)]:
        got = torch.histc(x.to(DEVICE), bins, low, high)
        assert got.dtype == dtype
        assert got.cpu().tolist() == torch.histc(x.double(), bins, low, high).tolist()
