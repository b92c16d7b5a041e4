"""Tensors of the device in the sizes of bounds: no program for a size, and no wait."""

import pytest
import torch
from support import DEVICE, assert_same
from torch.tpu import Dim

COUNTED = ("programs", "transfers_d2h", "pads")


def counts():
    torch.tpu.synchronize()
    metrics = torch.tpu.metrics()
    return [metrics[name] for name in COUNTED]


VIEWS = {
    "whole": lambda x, n: x[:, :n].contiguous(),
    "part": lambda x, n: x[:, 2 : 2 + n],
    "turned": lambda x, n: x.T[:n].T,
    "every other": lambda x, n: x[:, : 2 * n : 2],
    "one row for all": lambda x, n: x[:1, :n].expand(3, n),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.complex64])
def test_a_new_size_compiles_nothing_and_waits_for_nothing(dtype, fused):
    x = torch.arange(3 * 40).view(3, 40).to(dtype)
    f = torch.tpu.jit(lambda x: (x == x[:, :1]).sum(1), dynamic={"x": {1: Dim(buckets=[16])}})
    there = x.to(DEVICE)
    f(there[:, :9].cpu().to(DEVICE))
    before = counts()
    expected = 0
    for name, view in VIEWS.items():
        for n in (5, 12, 15):
            given = view(x, n).to(DEVICE) if name == "whole" else view(there, n)
            actual = f(given)
            expected += 1
            programs, reads, pads = (a - b for a, b in zip(counts(), before, strict=True))
            assert (programs, reads, pads) == (0, 0, expected), (name, n)
            wanted = view(x, n)
            assert_same(actual, (wanted == wanted[:, :1]).sum(1), f"{name} of {n}")
            before[1] += 1  # the comparison reads


def test_what_a_program_made_is_padded(fused):
    f = torch.tpu.jit(lambda x: x.mean(0), dynamic={"x": {0: Dim(buckets=[16])}})
    for n in (5, 16, 9, 1):
        x = torch.randn(n, 300)
        made = x.to(DEVICE) * 2
        reads = counts()[1]
        mean = f(made)
        assert counts()[1] == reads
        del made
        assert_same(mean, x.mean(0) * 2, str(n), rtol=1e-5, atol=1e-6)


def test_what_is_padded_is_that_of_its_time(fused):
    f = torch.tpu.jit(lambda x: x.sum(), dynamic={"x": {0: Dim(buckets=[16])}})
    x = torch.ones(7, device=DEVICE)
    sums = []
    for _ in range(4):
        sums.append(f(x))
        x += 1
    assert [s.item() for s in sums] == [7, 14, 21, 28]


def test_what_has_failed_fails_what_it_is_padded_for(fused):
    f = torch.tpu.jit(lambda x: x.sum(), dynamic={"x": {0: Dim(buckets=[16])}})
    failed = torch.ones(3, device=DEVICE)[torch.tensor([1, 7, 0], device=DEVICE)]
    with pytest.raises(IndexError, match="index is out of bounds for dimension 0 with size 3[^$]*test_dynamic_padding"):
        f(failed).item()


def test_an_error_names_the_size_of_the_call(fused):
    """And not the bound of the program, nor the size for which it was made."""
    f = torch.tpu.jit(lambda x, at: x[at] * 2, dynamic={"x": {0: Dim(buckets=[16])}})
    at = torch.tensor([0, 2], device=DEVICE)
    for n in (5, 9, 16, 5):
        x = torch.arange(n, device=DEVICE)
        assert f(x, at).tolist() == [0, 4]
        with pytest.raises(IndexError, match=f"out of bounds for dimension 0 with size {n}\n"):
            f(x, at + n).tolist()


def test_buckets_pad_where_tensors_are(fused):
    cases = [(torch.randn(3, 5).T, 0, -1.5), (torch.tensor([[3, 4]]), 1, -100), (torch.ones(2, 3).bool(), 1, True)]
    there = [t.to(DEVICE) for t, _, _ in cases]
    for (t, dim, value), own in zip(cases, there, strict=True):
        before = counts()
        with torch.tpu.bucketing(Dim(buckets=[8])) as bucket:
            made = bucket.pad(own, dim, value=value)
        assert [a - b for a, b in zip(counts(), before, strict=True)] == [0, 0, 1]
        shape = [8 if d == dim else n for d, n in enumerate(t.shape)]
        expected = torch.full(shape, value, dtype=t.dtype)
        expected.narrow(dim, 0, t.shape[dim]).copy_(t)
        assert_same(made, expected)
    conjugated = torch.tensor([1 + 2j, 3j], device=DEVICE).conj()
    with torch.tpu.bucketing(Dim(buckets=[4])) as bucket:
        assert_same(bucket.pad(conjugated, 0), torch.tensor([1 - 2j, -3j, 0, 0]))


@pytest.mark.parametrize("dims", [0, 1, (0, 1)])
def test_sums_over_what_varies_are_of_all_that_is_in_use(dims):
    """On the cpu platform large ones are made of slices, in which what is beyond the size is zero."""
    f = torch.tpu.jit(lambda x: (x.sum(dims), x.amax(dims), (x * x).mean(dims)), dynamic={"x": {0: Dim(max=600)}})
    for n in (599, 600, 333, 9, 1):
        x = torch.randint(-9, 9, (n, 40, 64)).float()
        total, largest, mean = f(x.to(DEVICE))
        assert_same(total, x.sum(dims), f"sum of {n}")
        assert_same(largest, x.amax(dims), f"maximum of {n}")
        assert_same(mean, (x * x).mean(dims), f"mean of {n}", rtol=1e-6, atol=1e-6)
