"""Sizes that follow from values, with a bound that is asked for: nothing is read."""

import pytest
import torch
import torch.nn.functional as F
from sizes_support import check
from support import DEVICE


def test_a_count_that_is_bounded_stays_on_the_device(fused):
    def f(x):
        at = torch.nonzero_static(x > 0, size=6, fill_value=-1)
        return at, torch.where(at[:, 0] >= 0, x[at[:, 0]], 0).sum()

    x = torch.tensor([1.0, -2, 3, 4, -5, 6])
    for g in (f, torch.tpu.jit(f), torch.compile(f, backend="tpu", fullgraph=True)):
        for _ in range(2):
            reads = torch.tpu.metrics()["transfers_d2h"]
            at, total = g(x.to(DEVICE))
            assert torch.tpu.metrics()["transfers_d2h"] == reads
            check(at, f(x)[0])
            check(total, f(x)[1])


STATIC = {
    "elements": lambda x: torch.tpu.ops.masked_select_static(x, x > 0, size=9, fill_value=-1),
    "fewer": lambda x: torch.tpu.ops.masked_select_static(x, x > 0, size=2),
    "rows": lambda x: torch.tpu.ops.masked_select_static(x, x[:, 0] > 0, size=3),
    "unique": lambda x: torch.tpu.ops.unique_static(x, size=9, fill_value=7),
    "unique, fewer": lambda x: torch.tpu.ops.unique_static(x, size=3),
}


@pytest.mark.parametrize("way", ["eager", "jit", "compile"])
def test_masks_and_unique_of_a_size_stay_on_the_device(way, fused):
    x = torch.tensor([[2.0, -1, 2], [-1, 0, 3], [5, 5, -1]])
    seen, count = x.unique(return_counts=True)[0], int((x > 0).sum())
    expected = {
        "elements": (F.pad(x[x > 0], (0, 9 - count), value=-1), count),
        "fewer": (x[x > 0][:2], count),
        "rows": (F.pad(x[[0, 2]], (0, 0, 0, 1)), 2),
    }
    _, inverse, counts = x.unique(return_inverse=True, return_counts=True)
    expected["unique"] = (F.pad(seen, (0, 4), value=7), 5, inverse, F.pad(counts, (0, 4)))
    expected["unique, fewer"] = (seen[:3], 5, inverse, counts[:3])

    def all_of_them(x):
        return {name: tuple(f(x)) for name, f in STATIC.items()}

    ways = {"jit": torch.tpu.jit, "compile": lambda f: torch.compile(f, backend="tpu", fullgraph=True)}
    f = ways.get(way, lambda f: f)
    made = f(all_of_them)
    made(x.to(DEVICE))
    reads = torch.tpu.metrics()["transfers_d2h"]
    results = made(x.to(DEVICE))
    assert torch.tpu.metrics()["transfers_d2h"] == reads
    for name, wanted in expected.items():
        for got, value in zip(results[name], wanted, strict=True):
            check(got, torch.as_tensor(value), name)


def test_what_a_mask_selects_has_gradients_and_sizes_are_checked(fused):
    x = torch.tensor([1.0, -2, 3, 4], device=DEVICE, requires_grad=True)
    torch.tpu.ops.masked_select_static(x, x > 0, size=4).values.square().sum().backward()
    check(x.grad, torch.tensor([2.0, 0, 6, 8]))
    for empty in (torch.zeros(0, device=DEVICE), torch.zeros(0, dtype=torch.int32, device=DEVICE)):
        values, found = torch.tpu.ops.masked_select_static(empty, empty > 0, size=2, fill_value=5)
        check(values, torch.full((2,), 5, dtype=empty.dtype))
        assert found.item() == 0 and torch.tpu.ops.unique_static(empty, size=2).found.item() == 0
    for mask in (x, x.detach()[:2] > 0, (x > 0).any()):
        with pytest.raises(ValueError, match="expected a bool mask with the first dimensions of"):
            torch.tpu.ops.masked_select_static(x, mask, size=2)
    with pytest.raises(ValueError, match="masked_select_static: size must not be negative, got -1"):
        torch.tpu.ops.masked_select_static(x, x > 0, size=-1)
    with pytest.raises(ValueError, match="unique_static: size must not be negative, got -1"):
        torch.tpu.ops.unique_static(x, size=-1)
