"""Sizes that vary in graphs of `torch.compile`, against PyTorch's CPU at each size."""

import copy

import pytest
import torch
from sizes_support import GPT, batches, check, loss_of, programs, trained
from support import DEVICE, assert_same


def test_a_size_may_be_told_by_what_follows_from_it(fused):
    """The backward of a graph finds nothing of the size itself, but what is saved of a part of what has it."""
    f = torch.compile(lambda x, w: (x[:, 1:] * w).tanh().cumsum(1)[:, 1:].sum(), dynamic=True)
    counts = []
    for size in (5, 9, 12, 16, 10, 14):
        x = torch.randn(3, size, generator=torch.Generator().manual_seed(size))
        w = torch.tensor(0.7, requires_grad=True)
        v = w.detach().to(DEVICE).requires_grad_()
        (x[:, 1:] * w).tanh().cumsum(1)[:, 1:].sum().backward()
        torch.tpu.synchronize()
        before = programs()
        f(x.to(DEVICE), v).backward()
        torch.tpu.synchronize()
        counts.append(programs() - before)
        check(v.grad, w.grad, str(size))
    assert sum(counts[3:]) == 0, counts


@pytest.mark.parametrize("way", ["dynamic", "mark_dynamic"])
def test_compiled_graphs(way, fused):
    torch._dynamo.reset()
    torch.manual_seed(0)
    reference = GPT()
    model = copy.deepcopy(reference).to(DEVICE)
    ours, theirs = trained(model), trained(reference)

    def loss(model, tokens, labels):
        return loss_of(model(tokens), labels)

    compiled = torch.compile(loss, backend="tpu", dynamic=True if way == "dynamic" else None)
    made, plays = [], torch.tpu.metrics()["plays"]
    for tokens, labels in batches():
        before = programs()
        moved = tokens.to(DEVICE), labels.to(DEVICE)
        if way == "mark_dynamic":
            for x in moved:
                torch._dynamo.mark_dynamic(x, 1, min=2, max=64)
        results = []
        for f, m, optimizer, given in [(compiled, model, ours, moved), (loss, reference, theirs, (tokens, labels))]:
            optimizer.zero_grad()
            result = f(m, *given)
            result.backward()
            optimizer.step()
            results.append(result.detach())
        assert_same(results[0], results[1], str(tokens.shape), strides=False, rtol=1e-4, atol=1e-5)
        made.append(programs() - before)
    # The first length is a program of its own; then forward and backward for 64, 16, 32 and 8, and two around them.
    assert sum(made) <= 1 + 2 * 4 + 2 + 1
    assert not any(made[14:])
    assert torch.tpu.metrics()["plays"] - plays <= 4


def test_a_check_is_a_bound(fused):
    torch._dynamo.reset()

    def function(x):
        torch._check(x.shape[0] >= 2)
        torch._check(x.shape[0] <= 40)
        return (x * 2).softmax(0).sum(1)

    compiled, before = torch.compile(function, backend="tpu", dynamic=True, fullgraph=True), programs()
    for size in (3, 33, 40, 39, 35):
        x = torch.randn(size, 4)
        check(compiled(x.to(DEVICE)), function(x), str(size))
    # The first size, and 40, which is no power of two.
    assert programs() - before == 2
    with pytest.raises(RuntimeError, match="Expected cond to be True"):
        compiled(torch.randn(41, 4, device=DEVICE))
