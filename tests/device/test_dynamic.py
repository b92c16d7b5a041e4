"""Sizes that vary: programs for all sizes up to a bound, against PyTorch's CPU at each size."""

import pytest
import torch
import torch.nn.functional as F
from sizes_support import SIZES, check, programs
from support import DEVICE
from torch.tpu import Dim


def reductions(x):
    return {
        "sum": x.sum(1),
        "all": x.sum(),
        "mean": x.mean(1),
        "mean of all": x.mean(),
        "std": x.std(1),
        "var": x.var(),
        "max": x.max(1),
        "argmin": x.argmin(1),
        "prod": x.prod(1),
        "norm": x.norm(dim=1),
        "logsumexp": x.logsumexp(1),
        "any": (x > 1).any(1),
        "median": x.median(1),
        "top": x.topk(3, 1),
        "count": (x > 0).sum(1),
    }


def along(x):
    return {
        "softmax": x.softmax(1),
        "log_softmax": x.log_softmax(1),
        "cumsum": x.cumsum(1),
        "sort": x.sort(1),
        "layer norm": F.layer_norm(x, (6,)),
        "normalize": F.normalize(x, dim=1),
    }


def moves(x):
    n = x.shape[1]
    return {
        "cat": torch.cat([x, x * 2, x[:, :3]], 1),
        "stack": torch.stack([x, -x], 1),
        "repeat": x.repeat(1, 2, 1),
        "pad": F.pad(x, (0, 0, 2, 1)),
        "flip": x.flip(1),
        "roll": x.roll(1, 1) + 0,
        "roll back": x.roll(-2, 1) + 0,
        "differences": x[:, 1:] - x[:, :-1],
        "last": x[:, -1] + 0,
        "last three": x[:, -3:] + 0,
        "all but the ends": x[:, 1:-1] * 2,
        "chosen": x[:, torch.tensor([0, 2, 1], device=x.device)],
        "reversed": x[:, torch.arange(n - 1, -1, -1, device=x.device)],
        "windows": x.unfold(1, 3, 1).sum(-1),
        "places": x + torch.arange(n, device=x.device)[None, :, None],
        "linspace": x * torch.linspace(0, 1, n, device=x.device)[None, :, None],
        "merged": x.flatten(0, 1).sum(0),
        "merged, sorted": x.flatten(0, 1).sort(0)[0],
        "merged, split": (x.flatten(0, 1) * 2).view(3, n, 2, 3).transpose(1, 2) + 1,
        "merged, the last": (x * 2).flatten(0, 1)[-1] + 0,
        "all in a row": (x * 2).flatten().cumsum(0),
        "one hot": F.one_hot((x > 0).long(), 2).sum(1),
        "transposed": (x + 1).transpose(0, 1).contiguous(),
        "zero": torch.zeros(n, device=x.device) + x[0, :, 0],
    }


def products(x):
    w = torch.ones(4, 6, 3, device=x.device) / 7
    channels = x.transpose(1, 2)
    q = x[:, None]
    return {
        "linear": x @ w[:, :, 0].T,
        "gram": x.flatten(0, 1).T @ x.flatten(0, 1),
        "scores": torch.einsum("bld,bmd->blm", x, x).softmax(-1) @ x,
        "outer": x.transpose(1, 2) @ x,
        "lower": (x @ x.transpose(1, 2)).tril().sum((1, 2)),
        "convolution": F.conv1d(channels, w, padding=1),
        "with a stride": F.conv1d(channels, w, stride=2),
        "transposed": F.conv_transpose1d(channels, w.transpose(0, 1), stride=2),
        "causal": F.scaled_dot_product_attention(q, q, q, is_causal=True),
        "attention": F.scaled_dot_product_attention(q, q, q),
        "masked": F.scaled_dot_product_attention(q, q, q, attn_mask=(x[:, None, None, :, 0] > -1)),
    }


def scattered(x):
    n = x.shape[1]
    index = (x[:, :, 0].abs() * 3).long() % 4
    return {
        "index_add": torch.zeros(3, 4, 6, device=x.device).index_add(1, index[0], x),
        "scatter_add": torch.zeros(3, 4, device=x.device).scatter_add(1, index, x[:, :, 1]),
        "index_put": torch.zeros(4, 6, device=x.device).index_put((index,), x, accumulate=True),
        "gather": x.gather(1, index[:, :3, None].expand(3, 3, 6)),
        "bincount": torch.zeros(4, device=x.device).index_add(0, index.flatten(), torch.ones(3 * n, device=x.device)),
        "where": torch.where(x > 0, x, x.new_zeros(())).amax(1),
    }


@pytest.mark.parametrize("function", [reductions, along, moves, products, scattered], ids=lambda f: f.__name__)
def test_one_program_gives_what_each_size_gives(function, fused):
    f = torch.tpu.jit(function, dynamic={"x": {1: Dim(max=16)}})
    before = programs()
    for size in SIZES:
        torch.manual_seed(size)
        x = torch.randn(3, size, 6)
        actual, expected = f(x.to(DEVICE)), function(x)
        assert actual.keys() == expected.keys()
        for name in expected:
            for a, e in zip(
                *[t if isinstance(t, tuple) else (t,) for t in (actual[name], expected[name])], strict=True
            ):
                check(a, e, f"{name} of {size}")
    assert programs() - before == 1


def equal_numbers(x):
    """Numbers that are the size, the bound or another number at some sizes, and at others are not."""
    n = x.shape[0]
    places = torch.arange(n, device=x.device)
    return {
        "scaled": [places / k + x[:, 0] for k in (5, 6, 7, 8)],
        "full": [torch.full((n,), 8.0, device=x.device), x / n + 7, x * (2 * n) - 16],
    }


def steps(x):
    return {
        "every other": [x[::2] * 2, x[1::2].sum(0), x.flip(0)[::3] + 1],
        "one place": [y * 2 for y in x[: x.shape[0] // 4 + 1].split(1)[:1]],
        "pieces": [y * 2 for y in x.tensor_split(3)],
    }


def parts(x):
    y = x * 2
    return {
        "of a result": [y, y[-1], y[1:], y[: len(y) // 2 + 1, 1:]],
        "of an argument": [x[-1], x[len(x) // 3 :], x.T],
    }


def views(x):
    """Results that show their memory in other dimensions than it has."""
    y, pairs = x + 1, torch.complex(x, -x)
    return {
        "of an argument": [x.T, x.flatten(), x.view(3, -1), x[:, None].expand(-1, 2, -1), x.T.flatten()],
        "of a result": [y.T, y.flatten(), y.view(-1, 3, 1).transpose(0, 2), y[:, 0].expand(2, -1)],
        "of another type": [
            torch.view_as_real(pairs).transpose(0, 1),
            torch.view_as_complex(torch.stack([y, x], -1)).T,
        ],
        "lazy": [pairs.mH, pairs.conj().flatten()],
    }


def views_along_another(x):
    y = x.T * 2
    return {
        "of a result": [y.T, y, y.unsqueeze(-1).expand(-1, -1, 2), y[:, None].transpose(0, 2)],
        "merged": [(y[..., None] * torch.ones(2, device=x.device)).flatten(1)],
    }


def solved(x):
    a = torch.eye(3, device=x.device).tril() * 2 + torch.ones(3, 3, device=x.device).tril()
    return {
        "matrices": [torch.linalg.solve_triangular(a + x[:, :, None].abs() * a, x[:, :, None], upper=False)],
        "right sides": [torch.linalg.solve_triangular(a, x.T, upper=False)],
    }


# With the sizes at which fewer of its numbers differ from those at the bound: they have a program of their own.
CLASSES = [(equal_numbers, 1), (steps, 3), (parts, 3), (views, 1), (views_along_another, 1), (solved, 1)]


@pytest.mark.parametrize(("function", "most"), CLASSES, ids=lambda x: getattr(x, "__name__", ""))
def test_no_size_has_a_program_by_chance(function, most, fused):
    f = torch.tpu.jit(function, dynamic={"x": {0: Dim(buckets=[8])}})
    before = programs()
    for size in (5, 8, 6, 7, 4):
        torch.manual_seed(size)
        x = torch.randn(size, 3)
        actual, expected = f(x.to(DEVICE)), function(x)
        for name in expected:
            for a, e in zip(actual[name], expected[name], strict=True):
                check(a, e, f"{name} of {size}")
    assert programs() - before <= most and "alone" not in torch.tpu.explain(most)


def test_random_numbers_are_those_of_the_size(fused):
    def f(x):
        return F.dropout(x, 0.5), torch.rand_like(x), x * 2

    g = torch.tpu.jit(f, dynamic={"x": {1: Dim(max=16)}})
    for size in SIZES:
        x = torch.randn(2, size, 3, device=DEVICE)
        torch.tpu.manual_seed(size)
        expected, after = f(x), torch.rand(2, device=DEVICE)
        torch.tpu.manual_seed(size)
        for a, e in zip(g(x), expected, strict=True):
            check(a, e.cpu())
        check(torch.rand(2, device=DEVICE), after.cpu())


def test_results_are_taken_by_other_functions_as_they_are(fused):
    size = {0: {1: Dim(max=16)}}
    f, g = torch.tpu.jit(lambda x: x * 2, dynamic=size), torch.tpu.jit(lambda x: x.mean(1), dynamic=size)
    for length in SIZES:
        x = torch.randn(3, length)
        twice = f(x.to(DEVICE))
        assert twice.shape == x.shape
        reads = torch.tpu.metrics()["transfers_d2h"]
        mean = g(twice)
        assert torch.tpu.metrics()["transfers_d2h"] == reads
        check(mean, x.mean(1) * 2)
        check(twice, x * 2)


def test_a_cache_that_grows_is_a_program_for_each_bound(fused):
    def decode(x, k, v):
        k, v = torch.cat([k, x * 2], 1), torch.cat([v, x + 1], 1)
        return F.scaled_dot_product_attention(x[:, None], k[:, None], v[:, None])[:, 0], k, v

    cached = {1: Dim(buckets=[8, 16])}
    f = torch.tpu.jit(decode, dynamic={"k": cached, "v": cached})
    before = programs()
    k, v = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    there = [k.to(DEVICE), v.to(DEVICE)]
    for step in range(13):
        x = torch.randn(2, 1, 8)
        expected, k, v = decode(x, k, v)
        actual, *there = f(x.to(DEVICE), *there)
        for a, e in zip((actual, *there), (expected, k, v), strict=True):
            check(a, e, str(step))
    assert programs() - before == 2
    f(x.to(DEVICE), there[0].requires_grad_(), there[1])
    assert "for this size alone: an argument whose size varies requires gradients" in torch.tpu.explain(1)


def test_several_sizes_vary(fused):
    f = torch.tpu.jit(
        lambda a, b: (a @ b).softmax(-1).sum(0),
        dynamic={"a": {0: Dim(buckets=[4, 8])}, "b": {-1: Dim(max=32, multiple=16)}},
    )
    before = programs()
    for rows, columns in [(3, 5), (4, 16), (2, 11), (3, 3), (7, 20), (8, 17)]:
        a, b = torch.randn(rows, 4), torch.randn(4, columns)
        check(f(a.to(DEVICE), b.to(DEVICE)), (a @ b).softmax(-1).sum(0))
    # Bounds of 4 and 16, of 8 and 32; and rows and columns that are as many and were taken for one number.
    assert programs() - before <= 3


def test_what_a_function_does_at_one_size_alone(fused):
    def f(x):
        return x.sum(1) if x.shape[1] == 7 else x.mean(1)

    g = torch.tpu.jit(f, dynamic={"x": {1: Dim(max=8)}})
    before = programs()
    for size in (5, 7, 6, 8, 7):
        x = torch.randn(2, size)
        check(g(x.to(DEVICE)), f(x), str(size))
    assert programs() - before == 2


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: sum(y.exp().sum() for y in x.split(16)), "what is computed depends on the size"),
        (lambda x: x.cumsum(0) if len(x) == 20 else x.exp(), "what is computed depends on the size"),
        (lambda x: x.mul_(2).sum(), "a tensor is written whose size varies"),
        (lambda x: x + torch.ones(50, device=x.device)[: len(x)], "at another size the function raises The size of"),
    ],
)
def test_what_cannot_be_bounded_is_explained(function, reason, fused):
    f = torch.tpu.jit(function, dynamic={0: {0: Dim(max=64)}})
    for size in (20, 50, 20):
        x = torch.randn(size)
        check(f(x.to(DEVICE)), function(x.clone()))
    assert reason in torch.tpu.explain() and "test_dynamic.py" in torch.tpu.explain()


@pytest.mark.parametrize("dynamic", [3, {"x": Dim(max=8)}, {"x": {1: 8}}, {1.5: {1: Dim(max=8)}}])
def test_dynamic_has_a_form(dynamic):
    with pytest.raises(TypeError, match="dynamic is of the form"):
        torch.tpu.jit(lambda x: x, dynamic=dynamic)


def test_dynamic_names_arguments(fused):
    with pytest.raises(TypeError, match="dynamic names 'y', which is no argument of this call"):
        torch.tpu.jit(lambda x: x + 1, dynamic={"y": {0: Dim(max=8)}})(torch.ones(3))
    with pytest.raises(ValueError, match="a size is 9"):
        torch.tpu.jit(lambda x: x + 1, dynamic={"x": {0: Dim(max=8)}})(torch.ones(9))
