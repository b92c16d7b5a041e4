"""Sizes that vary: programs for all sizes up to a bound, against PyTorch's CPU at each size."""

import copy

import pytest
import torch
import torch.nn.functional as F
from steps import training
from support import DEVICE, assert_same
from torch import nn
from torch.tpu import Dim

SIZES = (5, 9, 16, 13, 5, 16)


def programs():
    return torch.tpu.metrics()["programs"]


def check(actual, expected, what=""):
    assert_same(actual, expected, what, strides=False, rtol=1e-5, atol=1e-5)


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


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(self.first(x)).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, n, d))
        return x + self.mlp(self.second(x))


class GPT(nn.Module):
    def __init__(self, tokens=50, width=16, most=64):
        super().__init__()
        self.token, self.place = nn.Embedding(tokens, width), nn.Embedding(most, width)
        self.block, self.norm, self.head = Block(width, 2), nn.LayerNorm(width), nn.Linear(width, tokens)

    def forward(self, x):
        places = torch.arange(x.shape[1], device=x.device)
        return self.head(self.norm(self.block(self.token(x) + self.place(places))))


LENGTHS = (7, 33, 64, 12, 50, 21, 40, 9, 30, 61, 16, 17, 32, 5, 28, 44, 55, 10, 36, 63)


def batches():
    torch.manual_seed(1)
    for length in LENGTHS:
        tokens, labels = torch.randint(50, (4, length)), torch.randint(50, (4, length))
        labels[0, : length // 2] = -100
        yield tokens, labels


def trained(model):
    # Momentum makes differences of rounding no larger, as Adam does where a gradient is about zero.
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def loss_of(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("on_host", [False, True])
def test_a_step_over_twenty_lengths_is_a_program_for_each_bucket(on_host, fused):
    torch.manual_seed(0)
    reference = GPT()
    model = copy.deepcopy(reference).to(DEVICE)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (model, reference)]

    def step_of(model, optimizer):
        device = model.head.weight.device

        def step(tokens, labels):
            tokens, labels = tokens.to(device), labels.to(device)
            optimizer.zero_grad()
            logits = model(tokens)
            loss = loss_of(logits, labels)
            loss.backward()
            optimizer.step()
            return loss.detach(), logits.detach()

        return step

    size = Dim(max=64)
    step = torch.tpu.jit(step_of(model, optimizers[0]), dynamic={"tokens": {1: size}, "labels": {1: size}})
    expected = step_of(reference, optimizers[1])
    before = programs()
    for tokens, labels in batches():
        moved = (tokens, labels) if on_host else (tokens.to(DEVICE), labels.to(DEVICE))
        for actual, wanted in zip(step(*moved), expected(tokens, labels), strict=True):
            assert_same(actual, wanted, f"{tokens.shape}", strides=False, rtol=1e-4, atol=2e-4)
    # 16, 32, 64, and the first step, which makes the optimizer's state and may be known already.
    assert programs() - before <= 4


def test_numbers_vary_beside_sizes(fused):
    torch.manual_seed(0)
    weights = {"a": torch.randn(8, 4), "b": torch.randn(4)}

    def step(w, x, rate, t):
        def loss(w):
            return (x @ w["a"] + w["b"]).square().sum(-1).mean()

        grads = torch.func.grad(loss)(w)
        factor = rate / (1 - 0.9**t) if t < 6 else rate
        return {k: w[k] - factor * g for k, g in grads.items()}

    f = torch.tpu.jit(step, dynamic={"x": {1: Dim(max=16)}})
    moved = {k: w.to(DEVICE) for k, w in weights.items()}
    before = programs()
    for t, size in enumerate([5, 9, 16, 5, 3, 9, 16, 5, 3, 11], 1):
        x = torch.randn(2, size, 8)
        weights, moved = step(weights, x, 0.1 / t, t), f(moved, x.to(DEVICE), 0.1 / t, t)
        for name, w in weights.items():
            assert_same(moved[name], w, name, strides=False, rtol=1e-4, atol=1e-5)
    # With the first number that of one number; the sizes beside it are known at once.
    assert programs() - before <= 3
    traces = f.traces
    f(moved, x.to(DEVICE), 0.01, 9)
    assert f.traces == traces


def write_and_read(cache, x, n, scale):
    cache = cache.clone()
    cache[:, n] = x.sum(1) * scale
    return cache, cache[:, n : n + 4].sum(1)


def along_what_varies(cache, x, n, scale):
    return x[:, n] * scale, x[:, x.shape[1] - 1 - n] + cache[:, n], x.softmax(1)


@pytest.mark.parametrize("function", [write_and_read, along_what_varies], ids=lambda f: f.__name__)
def test_positions_vary_beside_sizes(function, fused):
    torch.manual_seed(0)
    f = torch.tpu.jit(function, dynamic={"x": {1: Dim(buckets=[16])}})
    before = programs()
    for n, size in [(0, 5), (1, 9), (2, 16), (1, 12), (2, 5), (2, 9), (3, 16), (1, 7)]:
        cache, x, scale = torch.randn(3, 20), torch.randn(3, size), 0.1 + 0.2 * n
        for a, e in zip(f(cache.to(DEVICE), x.to(DEVICE), n, scale), function(cache, x, n, scale), strict=True):
            check(a, e, f"{n}, {size}")
    # That of the first numbers, and one for all others.
    assert programs() - before == 2
    traces = f.traces
    f(cache.to(DEVICE), x.to(DEVICE), 2, 0.7)
    assert f.traces == traces


def test_positions_vary_where_sizes_cannot(fused):
    def function(cache, x, n):
        return cache[n] + sum(y.exp().sum() for y in x.split(2))

    f = torch.tpu.jit(function, dynamic={"x": {0: Dim(max=16)}})
    before = programs()
    for n, size in [(0, 5), (1, 5), (2, 9), (2, 5), (3, 5), (4, 9), (5, 9), (6, 5), (7, 5), (8, 9)]:
        cache, x = torch.randn(20), torch.randn(size)
        check(f(cache.to(DEVICE), x.to(DEVICE), n), function(cache, x, n), f"{n}, {size}")
    # For each size one, and one that takes positions; and that of the first position.
    assert programs() - before <= 2 * 2 + 1
    assert "what is computed depends on the size" in torch.tpu.explain()


def test_what_follows_from_a_size_is_of_the_call(fused):
    def function(x, rate):
        n = x.shape[1]
        return x * (rate / n), n, {"of the rate": rate * n, "list": [n + 1]}

    f = torch.tpu.jit(function, dynamic={"x": {1: Dim(max=16)}})
    g = torch.tpu.jit(lambda x: function(x, 0.5), dynamic={"x": {1: Dim(max=16)}})
    for i, size in enumerate(SIZES):
        x, rate = torch.randn(3, size), 0.1 * (i + 1)
        for got, wanted in [(f(x.to(DEVICE), rate), function(x, rate)), (g(x.to(DEVICE)), function(x, 0.5))]:
            check(got[0], wanted[0], str(size))
            assert got[1:] == wanted[1:]


class Mixed(nn.Module):
    """A convolution and attention that are large enough for kernels that are not XLA's."""

    def __init__(self, causal, bias=True):
        super().__init__()
        self.causal = causal
        self.conv, self.qkv = nn.Conv1d(64, 64, 3, padding=1, bias=bias), nn.Linear(64, 192)

    def forward(self, x):
        x = self.conv(x.transpose(1, 2)).transpose(1, 2)
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 32).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, scale=None if self.causal else 0.2)
        return y.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("causal", [False, True])
def test_kernels_that_are_kept_take_sizes_that_vary(causal, fused):
    torch.manual_seed(0)
    reference = Mixed(causal)
    model = copy.deepcopy(reference).to(DEVICE)

    def step_of(model):
        def step(x):
            model.zero_grad()
            y = model(x)
            y.square().mean().backward()
            return [y.detach(), *(p.grad for p in model.parameters())]

        return step

    f, g = torch.tpu.jit(step_of(model), dynamic={"x": {1: Dim(buckets=[256])}}), step_of(reference)
    calls, before = torch.tpu.metrics()["library_calls"], programs()
    for size in (255, 200, 256):
        x = torch.randn(4, size, 64)
        for i, (a, e) in enumerate(zip(f(x.to(DEVICE)), g(x), strict=True)):
            assert_same(a, e, f"{i} of {size}", strides=False, rtol=1e-4, atol=1e-5)
    # One for all sizes, and the first call, which finds out which gradients there are.
    assert programs() - before <= 2
    # Each way of the convolution and of attention, and padding that is NaN changes nothing.
    assert torch.tpu.metrics()["library_calls"] - calls >= 4 * 3
    whole = torch.full((4, 256, 64), float("nan"))
    whole[:, :200] = torch.randn(4, 200, 64)
    whole = whole.to(DEVICE)
    for a, e in zip(f(whole[:, :200]), g(whole.cpu()[:, :200]), strict=True):
        assert_same(a, e, "beside NaN", strides=False, rtol=1e-4, atol=1e-5)


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


def test_an_optimizer_and_a_mode_that_change_are_noticed(fused):
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(6, 4), nn.Dropout(1.0), nn.Linear(4, 1))
    model = copy.deepcopy(reference).to(DEVICE)

    def step_of(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return optimizer, training(model, optimizer)

    (ours, step), (theirs, expected) = step_of(model), step_of(reference)
    step = torch.tpu.jit(step, dynamic={"x": {1: Dim(max=8)}})
    for i, size in enumerate((5, 8, 3, 5, 6, 8, 3, 5)):
        for m in (model, reference):
            m.train(i < 4)
        for optimizer in (ours, theirs):
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + i)
        x = torch.randn(2, size, 6)
        check(step(x.to(DEVICE)), expected(x), str(i))
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        check(p.detach(), q.detach())
        check(p.grad, q.grad)


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


@pytest.mark.parametrize("dynamic", [3, {"x": Dim(max=8)}, {"x": {1: 8}}, {1.5: {1: Dim(max=8)}}])
def test_dynamic_has_a_form(dynamic):
    with pytest.raises(TypeError, match="dynamic is of the form"):
        torch.tpu.jit(lambda x: x, dynamic=dynamic)


def test_dynamic_names_arguments(fused):
    with pytest.raises(TypeError, match="dynamic names 'y', which is no argument of this call"):
        torch.tpu.jit(lambda x: x + 1, dynamic={"y": {0: Dim(max=8)}})(torch.ones(3))
    with pytest.raises(ValueError, match="a size is 9"):
        torch.tpu.jit(lambda x: x + 1, dynamic={"x": {0: Dim(max=8)}})(torch.ones(9))
