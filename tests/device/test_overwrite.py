"""What is written to a part of a tensor is computed from the values before, whatever elements it takes.

A compiler that writes in place may read what it has written already.
"""

import pytest
import torch
import torch.nn.functional as F

INDEX = torch.tensor([0, 2, 3, 1])

# From a matrix to one of that shape, with elements of other places.
TAKES = {
    "cat": lambda y, i: torch.cat([y[2:], y[:2]]),
    "cumsum": lambda y, i: y.cumsum(0),
    "embedding": lambda y, i: F.embedding(i, y),
    "flip": lambda y, i: y.flip(0),
    "gather": lambda y, i: y.gather(0, i[:, None].expand(-1, y.shape[1])),
    "index": lambda y, i: y[i],
    "index_add": lambda y, i: y.index_add(0, i, y),
    "index_copy": lambda y, i: torch.zeros_like(y).index_copy(0, i, y),
    "index_select": lambda y, i: y.index_select(0, i),
    "masked": lambda y, i: y.where(y > y[1], y.flip(1)),
    "mm": lambda y, i: y @ y,
    "narrow": lambda y, i: y.narrow(0, 1, 1).expand_as(y) + y,
    "pad": lambda y, i: F.pad(y, (1, 0))[:, :-1],
    "roll": lambda y, i: y.roll(1, 0),
    "scatter": lambda y, i: torch.zeros_like(y).scatter(0, i[:, None].expand(-1, y.shape[1]), y),
    "softmax": lambda y, i: y.softmax(0),
    "sort": lambda y, i: y.sort(0).values,
    "sub": lambda y, i: y - y[0],
    "sum": lambda y, i: y.sum(0, keepdim=True).expand_as(y),
    "transpose": lambda y, i: y.t() + 0,
}


def each_in_turn(x, f):
    for i in range(len(x)):
        x[i] = f(x[i])


def crossed(x, f):
    for i in range(2):
        x[i] = f(x[1 - i])


def one(x, f):
    x[1] = f(x[1])


def shifted(x, f):
    x[1:] = x[:-1] + f(x[0])
    x[:-1] = x[1:] * 2


def several(x, f):
    x[0].copy_(f(x[0]))
    x[1].copy_(f(x[0]))
    x[2].copy_(f(x[1]))


def columns(x, f):
    y = x.transpose(0, 2)
    for i in range(2):
        y[i, :, :3] = f(x[i])[:, :3]


def added(x, f):
    x[0].add_(f(x[0]))
    x[1:].mul_(f(x[2]))


def scattered(x, f):
    return torch.slice_scatter(torch.select_scatter(x, f(x[0]), 0, 0), f(x[1])[None], 0, 1, 2)


def by_numbers_that_change(x, f):
    for start in (0, 1, 2):
        part = x.narrow(0, start, 1)
        part.copy_(f(x[start])[None])
        part += 1


WAYS = [each_in_turn, crossed, one, shifted, several, columns, added, scattered, by_numbers_that_change]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_part_is_computed_from_the_values_before(way):
    wrong = []
    for name, take in TAKES.items():
        torch.manual_seed(0)
        x = torch.randn(3, 4, 4)
        y, index = x.to("tpu"), INDEX.to("tpu")
        want = way(x, lambda part, take=take: take(part, INDEX))
        got = way(y, lambda part, take=take, index=index: take(part, index))
        want, got = (x, y.cpu()) if want is None else (want, got.cpu())
        if not torch.allclose(got, want, atol=1e-4, rtol=1e-4):
            wrong.append(name)
    assert not wrong


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.bool, torch.complex64], ids=str)
def test_of_any_dtype(dtype):
    x = torch.randn(3, 4, 4).mul(3).to(dtype)
    y = x.to("tpu")
    each_in_turn(x, lambda part: part.flip(0))
    each_in_turn(y, lambda part: part.flip(0))
    assert torch.equal(y.cpu(), x)
