"""`torch.tpu.Dim` and steps of eager mode in its buckets."""

import copy

import pytest
import torch
import torch.nn.functional as F
from sizes_support import GPT, batches, check, loss_of, programs, trained
from support import DEVICE, assert_same
from torch import nn
from torch.tpu import Dim


def test_eager_steps_in_buckets_are_programs_of_buckets(fused):
    torch.manual_seed(0)
    reference = GPT()
    model = copy.deepcopy(reference).to(DEVICE)
    ours, theirs = trained(model), trained(reference)
    before = []
    for tokens, labels in list(batches())[:8]:
        known = programs()
        with torch.tpu.bucketing(Dim(buckets=[40, 64])) as bucket:
            padded = bucket.pad(tokens.to(DEVICE), 1), bucket.pad(labels, 1, value=-100).to(DEVICE)
            assert {t.shape for t in padded} == {(4, bucket.bound)} and bucket.size == tokens.shape[1]
            logits = model(padded[0])
            loss = loss_of(logits, padded[1])
            ours.zero_grad()
            loss.backward()
            ours.step()
        made = bucket.cut(logits, 1).detach()
        before.append(programs() - known)
        expected = reference(tokens)
        theirs.zero_grad()
        loss_of(expected, labels).backward()
        theirs.step()
        assert_same(made, expected.detach(), str(tokens.shape), strides=False, rtol=1e-4, atol=1e-4)
    # The first three make both buckets known, and the first step makes the optimizer's state.
    assert not any(before[3:]), before
    assert "in the bucket 40 of Dim(buckets=[40, 64])" in torch.tpu.explain()
    assert "in the bucket 64 of Dim(buckets=[40, 64])" in torch.tpu.explain()
    outside = torch.ones(3, 7, device=DEVICE).cosh().sinh()
    outside.cpu()
    assert "in the bucket" not in torch.tpu.explain(1)


def test_what_depends_on_padding_is_told(fused):
    with torch.tpu.bucketing(Dim(max=16)) as bucket:
        x = bucket.pad(torch.randn(2, 5, 3, device=DEVICE), 1)
        kept, mask = bucket.mask()[:, None], torch.ones(2, 16, dtype=torch.bool)
        mask[:, 5:] = False
        check(bucket.mask(), mask[0])
        bucket.check(lambda x: x.cumsum(1), x, dims=[1])
        bucket.check(lambda x: torch.where(kept, x, 0).sum(1), x, dims=[1])
        bucket.check(lambda x: F.dropout(x, 0.5), x, dims=[1])
        with pytest.raises(RuntimeError, match=r"result 1 depends on padding: it differs by up to \d"):
            bucket.check(lambda x: (x, x.mean(1)), x, dims=[1])
        norm = nn.BatchNorm1d(16).to(DEVICE)
        bucket.check(norm, x, dims=[1])
        check(norm.running_mean, torch.zeros(16))
        with pytest.raises(ValueError, match="has size 6 along dimension 1, and the one that was padded first has 5"):
            bucket.pad(torch.ones(2, 6), 1)
        with pytest.raises(ValueError, match="the bucket is 16, and the tensor has 3 along dimension 2"):
            bucket.cut(x, 2)
        assert bucket.cut(x, 1).shape == (2, 5, 3)
    with torch.tpu.bucketing(Dim(max=16)) as bucket:
        for early in (bucket.mask, lambda: bucket.cut(x, 1)):
            with pytest.raises(RuntimeError, match="nothing was padded in this block yet"):
                early()
        x = bucket.pad(torch.ones(16, 2, requires_grad=True, device=DEVICE), 0)
        with pytest.raises(RuntimeError, match="size 16 fills its bucket"):
            bucket.check(torch.sum, x, dims=[0])
        with pytest.raises(ValueError, match="a size is 17"):
            torch.tpu.bucketing(Dim(max=16)).pad(torch.ones(17), 0)
    with torch.tpu.bucketing(Dim(max=16)) as bucket:
        w = torch.ones(3, device=DEVICE, requires_grad=True)
        (bucket.pad(w * 2, 0) * torch.arange(16, device=DEVICE)).sum().backward()
        check(w.grad, torch.tensor([0.0, 2, 4]))
    with pytest.raises(TypeError, match=r"takes a torch.tpu.Dim, got 16"):
        torch.tpu.bucketing(16)


def test_bounds():
    def bounds(dim, *sizes):
        return [dim.bound(n) for n in sizes]

    assert bounds(Dim(max=100), 1, 16, 17, 64, 65, 100) == [16, 16, 32, 64, 100, 100]
    assert bounds(Dim(), 1, 20, 1000) == [16, 32, 1024]
    assert bounds(Dim(min=30), 1, 40) == [32, 64]
    assert bounds(Dim(max=100, multiple=24), 1, 24, 25, 97) == [24, 24, 48, 100]
    assert bounds(Dim(buckets=[8, 24]), 8, 9) == [8, 24]
    assert bounds(Dim(buckets=[8, 24], max=30), 25, 30) == [30, 30]
    for dim, size in [(Dim(max=100), 101), (Dim(buckets=[8, 24]), 25)]:
        with pytest.raises(ValueError, match=f"a size is {size}, and Dim.* allows {size - 1} at most"):
            dim.bound(size)
    for wrong in [{"buckets": [8, 8]}, {"buckets": []}, {"max": 0}, {"max": 8, "multiple": -1}]:
        with pytest.raises(ValueError, match="bounds must be positive and ascend"):
            Dim(**wrong)
    with pytest.raises(ValueError, match="give buckets or multiple"):
        Dim(buckets=[8], multiple=8)
