"""Sizes that vary in graphs of `torch.compile`, against PyTorch's CPU at each size."""

import copy

import pytest
import torch
from compile_support import counts
from sizes_support import GPT, batches, check, loss_of, programs, trained
from support import DEVICE, assert_same


def test_a_size_may_be_told_by_what_follows_from_it(fused):
    """The backward of a graph finds nothing of the size itself, but what is saved of a part of what has it."""
    f = torch.compile(lambda x, w: (x[:, 1:] * w).tanh().cumsum(1)[:, 1:].sum(), backend="tpu", dynamic=True)
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


def parts(x, i):
    return x[:, i : i + 3].tanh() + x[:, 2 * i : 2 * i + 3], i + 1


def written(x, i):
    x[:, i : i + 2] = x[:, i + 1 : i + 3] * 2
    return x.sum(0)


def operands(x, i):
    return (x * i).tanh() / (2 * i + 1) + torch.full_like(x, i)


def rows(x, i):
    return x[i : i + 4].cumsum(0)


# With the numbers of calls; the first is a constant, and zero may be something else.
NUMBERS = [
    (parts, (3, 5, 6, 0, 4)),
    (written, (3, 5, 6, 0, 12)),
    (operands, (3, 5, 9, 7, 300)),
    (rows, (1, 2, 0, 4, 3)),
]


@pytest.mark.parametrize(("function", "numbers"), NUMBERS, ids=lambda x: getattr(x, "__name__", ""))
def test_a_number_that_is_no_size_has_one_recipe(function, numbers, fused):
    torch._dynamo.reset()
    f, made = torch.compile(function, backend="tpu", dynamic=True), []
    for i in numbers:
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(i))
        there, before = x.to(DEVICE), counts()
        actual, expected = f(there, i), function(x, i)
        for a, e in zip(*[t if isinstance(t, tuple) else (t,) for t in (actual, expected)], strict=True):
            assert a == e if isinstance(e, int) else check(a, e, str(i)) is None
        check(there, x, str(i))
        torch.tpu.synchronize()
        made.append(
            {name: n - before[name] for name, n in counts().items() if name in ("programs", "recipes", "plays")}
        )
    assert all(n == 0 for new in made[2:] for n in new.values()), made


def test_numbers_and_sizes_vary_in_training(fused):
    torch._dynamo.reset()

    def function(x, i):
        return (x[:, i : i + 3].tanh() * x.mean(0)[:3]).sum()

    f, made = torch.compile(function, backend="tpu", dynamic=True), []
    for n, i in [(5, 3), (9, 5), (12, 6), (16, 0), (10, 12), (14, 1)]:
        x = torch.randn(n, 16, generator=torch.Generator().manual_seed(n)).requires_grad_()
        there, before = x.detach().to(DEVICE).requires_grad_(), programs()
        f(there, i).backward()
        function(x, i).backward()
        check(there.grad, x.grad, f"{n}, {i}")
        torch.tpu.synchronize()
        made.append(programs() - before)
    assert not any(made[3:]), made


def test_a_part_of_a_tensor_is_written_where_it_is(fused):
    torch._dynamo.reset()

    def function(part, x):
        part[:, :2].add_(x.sum(0)[:2])
        return x * 2

    f = torch.compile(function, backend="tpu", dynamic=True)
    for n in (5, 9, 12, 9):
        x, whole = torch.randn(n, 4), torch.zeros(4, 8)
        there = whole.to(DEVICE)
        check(f(there[:, ::2], x.to(DEVICE)), function(whole[:, ::2], x), str(n))
        check(there, whole, str(n))


def test_zero_and_small_numbers_are_right_after_large_ones(fused):
    torch._dynamo.reset()
    f = torch.compile(lambda x, i: (x + i) * (i - 5), backend="tpu", dynamic=True)
    x = torch.randn(6)
    for i in (7, 9, 5, 0, -3, 1, 70000, 3, -8):
        assert_same(f(x.to(DEVICE), i), (x + i) * (i - 5), str(i), rtol=1e-5, atol=1e-5)


def test_as_many_pieces_are_one_program(fused):
    """Dynamo makes a graph for each number of pieces, which its guards allow for some sizes."""
    torch._dynamo.reset()

    def function(x):
        return torch.cat([y.exp() for y in x.split(7)])

    f, made = torch.compile(function, backend="tpu", dynamic=True), []
    for n in (20, 17, 21, 18, 19, 25):
        x, before = torch.randn(n, 3), programs()
        check(f(x.to(DEVICE)), function(x), str(n))
        torch.tpu.synchronize()
        made.append(programs() - before)
    assert sum(made[2:5]) == 0, made
    said = torch.tpu.explain(1)
    assert "for this number of pieces alone: split gives 4 tensors, and gave 3, at" in said
    assert "test_dynamic_compile.py" in said and "unflatten" in said


def test_rows_of_which_there_are_others_are_named(fused):
    torch._dynamo.reset()
    f = torch.compile(lambda x: torch.stack([(y * y).sum() for y in x]), backend="tpu", dynamic=True)
    for n in (3, 4):
        x = torch.randn(n, 5)
        check(f(x.to(DEVICE)), (x * x).sum(1), str(n))
    said = torch.tpu.explain(1)
    assert "unbind gives 4 tensors, and gave 3, at" in said and "test_dynamic_compile.py" in said and "vmap" in said


def test_operations_of_torchvision_are_for_all_sizes(fused):
    ops = pytest.importorskip("torchvision").ops
    torch._dynamo.reset()

    def function(x, boxes):
        return ops.roi_align(x, torch.cat([torch.zeros_like(boxes[:, :1]), boxes], 1), 2, 0.5, 2)

    f, made, x = torch.compile(function, backend="tpu", dynamic=True), [], torch.randn(1, 2, 8, 8)
    for n in (5, 9, 12, 15, 11):
        boxes = torch.rand(n, 4) * 6 + torch.tensor([0.0, 0, 6, 6])
        before = programs()
        check(f(x.to(DEVICE), boxes.to(DEVICE)), function(x, boxes), str(n))
        torch.tpu.synchronize()
        made.append(programs() - before)
    assert not any(made[2:]), made
