"""Mixtures of experts whose experts get other numbers of rows in each step: the values of `x[mask]`, and few programs."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from support import DEVICE, assert_same
from torch import nn
from torch.tpu import Capacity, Dim

WIDTH, EXPERTS, TOKENS = 4, 3, 60


class Experts(nn.Module):
    """Each token goes to the two experts that the gate chooses; by index, or by the places of a `Capacity`."""

    def __init__(self, capacity=None):
        super().__init__()
        self.gate, self.capacity = nn.Linear(WIDTH, EXPERTS), capacity
        self.experts = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(EXPERTS)
        )

    def forward(self, x):
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        routed = chosen[:, :, None] == torch.arange(EXPERTS, device=x.device)
        out, masks, capacity = torch.zeros_like(x), routed.any(1).T, self.capacity
        places = None if capacity is None else capacity.places(masks)
        for e, expert in enumerate(self.experts):
            weight = (weights * routed[..., e]).sum(1)
            if places is None:
                rows = masks[e].nonzero()[:, 0]
                out = out.index_add(0, rows, expert(x[masks[e]]) * weight[rows, None])
            else:
                rows = expert(capacity.take(x, places[e])) * capacity.take(weight, places[e])[:, None]
                out = capacity.add(out, places[e], rows)
        return out


def model(capacity=None):
    torch.manual_seed(3)
    return nn.Sequential(*(Experts(capacity) for _ in range(2)))


def steps(m, device, batches):
    """The loss of each step, and the programs that are known after it."""
    optimizer = torch.optim.AdamW(m.parameters(), 1e-2)
    for x in batches:
        x = x.to(device)
        loss = F.mse_loss(m(x), x.flip(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item(), torch.tpu.metrics()["programs"]


def batches(n):
    """Batches whose tokens go to some expert more than to others."""
    return [torch.randn(TOKENS, WIDTH) + torch.randn(WIDTH) for _ in range(n)]


def test_experts_by_capacity_compute_what_indexing_computes(fused):
    data = batches(4)
    expected = [loss for loss, _ in steps(model(), "cpu", data)]
    got = [loss for loss, _ in steps(model(Capacity(Dim(max=TOKENS))).to(DEVICE), DEVICE, data)]
    assert got == pytest.approx(expected, rel=1e-4)


def test_there_are_no_programs_for_numbers_of_rows(fused):
    capacity = Capacity(Dim(buckets=[32, TOKENS]))
    m = model(capacity).to(DEVICE)
    made, bounds = [], []
    for _, programs in steps(m, DEVICE, batches(10)):
        made.append(programs)
        bounds.append(capacity.bound)
    new = [b - a for a, b in pairwise(made)]
    # A step is settled in the third round that has its bucket.
    settled = [n for i, n in enumerate(new, 1) if i > 2 and bounds[i - 3 : i + 1] == [bounds[i]] * 4]
    assert len(settled) >= 4 and not any(settled), (new, bounds)


def test_a_place_for_each_row_reads_nothing_on_the_host(fused):
    capacity = Capacity(Dim(buckets=[TOKENS]))
    m = model(capacity).to(DEVICE)
    x = torch.randn(TOKENS, WIDTH).to(DEVICE)
    before = torch.tpu.metrics()["transfers_d2h"]
    y = m(x)
    assert torch.tpu.metrics()["transfers_d2h"] == before
    assert_same(y.detach(), model()(x.cpu()).detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", ["cpu", DEVICE])
def test_places(device):
    masks = torch.tensor([[0, 1, 0, 1, 1], [0, 0, 0, 0, 0], [1, 1, 1, 0, 0]], device=device).bool()
    capacity = Capacity(Dim(max=5, least=2))
    assert capacity.places(masks[1:2]).tolist() == [[-1, -1]]
    places = capacity.places(masks)
    assert places.tolist() == [[1, 3, 4, -1], [-1] * 4, [0, 1, 2, -1]] and capacity.bound == 4
    x = torch.arange(10.0, device=device).view(5, 2).requires_grad_()
    rows = capacity.take(x, places)
    out = capacity.add(torch.zeros(5, 2, device=device), places, rows)
    counts = masks.sum(0)[:, None]
    assert torch.equal(out, x * counts)
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(grad, counts.expand(5, 2).float())
    assert capacity.places(masks[:, :0]).tolist() == [[-1] * 4] * 3


@pytest.mark.parametrize("device", ["cpu", DEVICE])
def test_no_rows_are_taken_from_no_tokens(device):
    capacity = Capacity(Dim(max=5))
    places = capacity.places(torch.ones(3, 0, dtype=torch.bool, device=device))
    for width in ((), (4,), (2, 0)):
        x, out = (torch.ones(0, *width, device=device, requires_grad=True) for _ in range(2))
        rows = capacity.take(x, places)
        assert torch.equal(rows.cpu(), torch.zeros(3, capacity.bound, *width))
        y = capacity.add(out, places, rows)
        assert y.shape == x.shape
        (y.sum() + rows.sum()).backward()
        assert x.grad.shape == out.grad.shape == x.shape
    assert capacity.take(torch.ones(0, 4, device=device), places[:0]).shape == (0, capacity.bound, 4)


def test_experts_without_tokens(fused):
    data = [torch.randn(TOKENS, WIDTH), torch.randn(0, WIDTH)]
    for m, device in ((model(), "cpu"), (model(Capacity(Dim(max=TOKENS))).to(DEVICE), DEVICE)):
        grads = []
        for x in data:
            m.zero_grad()
            y = m(x.to(device))
            assert y.shape == x.shape
            y.sum().backward()
            grads.append([p.grad.cpu() for p in m.parameters() if p.grad is not None])
        assert len(grads[0]) == len(grads[1]) == len([*m.parameters()])
        assert not any(g.any() for g in grads[1])


def test_what_is_refused():
    with pytest.raises(TypeError, match=r"takes a torch\.tpu\.Dim, got 4"):
        Capacity(4)
    masks = torch.ones(2, 6, dtype=torch.bool, device=DEVICE)
    with pytest.raises(ValueError, match="expected bool masks"):
        Capacity(Dim(max=8)).places(masks.long())
    with pytest.raises(ValueError, match=r"a size is 6, and .* allows 4 at most"):
        Capacity(Dim(buckets=[2, 4])).places(masks)
    capacity = Capacity(Dim(max=8))
    places = capacity.places(masks)
    with pytest.raises(ValueError, match=r"expected rows for \[2, 8\] places, got \[2, 6, 3\]"):
        capacity.add(torch.zeros(6, 3, device=DEVICE), places, torch.ones(2, 6, 3, device=DEVICE))
