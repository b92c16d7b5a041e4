"""What the tests of sizes that vary share: a model, its batches, and comparisons."""

import torch
import torch.nn.functional as F
from support import assert_same
from torch import nn

SIZES = (5, 9, 16, 13, 5, 16)


def programs():
    return torch.tpu.metrics()["programs"]


def check(actual, expected, what=""):
    assert_same(actual, expected, what, strides=False, rtol=1e-5, atol=1e-5)


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
