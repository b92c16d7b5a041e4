"""Sizes that vary: programs for all sizes up to a bound, against PyTorch's CPU at each size."""

import copy

import pytest
import torch
import torch.nn.functional as F
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
            for a, e in zip(*[t if isinstance(t, tuple) else (t,) for t in (actual[name], expected[name])], strict=True):
                check(a, e, f"{name} of {size}")
    assert programs() - before == 1


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
        def step(tokens, labels):
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
    # 16, 32, 64, and the first step, which makes the optimizer's state.
    assert programs() - before == 4
