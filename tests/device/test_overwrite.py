"""What is written to a part of a tensor is computed from the values before, whatever elements it takes.

A compiler that writes in place may read what it has written already.
"""

from random import Random

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


# ---------------------------------------------------------------- programs drawn at random

VIEWS = {
    "select": lambda x, a, b: x.select(a % x.dim(), b % x.shape[a % x.dim()]),
    "narrow": lambda x, a, b: x.narrow(a % x.dim(), (n := b % x.shape[a % x.dim()]), x.shape[a % x.dim()] - n),
    "head": lambda x, a, b: x.narrow(a % x.dim(), 0, 1 + b % x.shape[a % x.dim()]),
    "transpose": lambda x, a, b: x.transpose(a % x.dim(), b % x.dim()),
    "flat": lambda x, a, b: x.view(-1),
    "halves": lambda x, a, b: x.view(2, x.shape[0] // 2, *x.shape[1:]) if x.shape[0] % 2 == 0 else x,
    "steps": lambda x, a, b: x[(slice(None),) * (a % x.dim()) + (slice(None, None, 2),)],
}
COMPUTES = [
    lambda y: y + 1,
    lambda y: y * 2 - 3,
    lambda y: y.flip(0),
    lambda y: y.roll(1, -1),
    lambda y: y - y.flatten()[0],
    lambda y: y.cumsum(0),
    lambda y: torch.where(y > 0, y.flip(-1), y),
    lambda y: y.sort(-1).values,
    lambda y: y.reshape(-1).flip(0).reshape(y.shape),
    lambda y: y.max(0, keepdim=True).values - y,
]


def view_of(x, chain):
    for name, a, b in chain:
        if x.dim():
            try:
                x = VIEWS[name](x, a, b)
            except RuntimeError:  # not a view of these strides
                continue
    return x if x.dim() else x[None]


def drawn(seed):
    """A tensor, and parts of it to be computed from others: where, from where, by what, and whether they are added."""
    random = Random(seed)
    shape = [random.choice([1, 2, 3, 4, 6]) for _ in range(random.randint(1, 4))]

    def chain():
        return [
            (random.choice(list(VIEWS)), random.randrange(12), random.randrange(12))
            for _ in range(random.randint(1, 4))
        ]

    writes = []
    for _ in range(random.randint(1, 5)):
        to = chain()
        read = to if random.random() < 0.5 else chain()
        writes.append((to, read, random.choices(COMPUTES, k=2), random.random() < 0.3))
    return torch.randint(-9, 9, shape, generator=torch.Generator().manual_seed(seed)), writes


def written(x, writes):
    for to, read, (first, second), is_added in writes:
        target, found = view_of(x, to), second(first(view_of(x, read)))
        times = -(-target.numel() // found.numel())
        found = found.reshape(-1).repeat(times)[: target.numel()].reshape(target.shape)
        if is_added:
            target.add_(found)
        else:
            target.copy_(found)
    return x


def drawn_rows(seed):
    """Rounds of the same writes to rows of a tensor: where to, where from, how many rows, and by what. Most move together."""
    random = Random(seed)
    count = random.randint(1, 4)
    writes = [(random.randint(1, 4), random.choices(COMPUTES, k=2), random.random() < 0.3) for _ in range(count)]
    at = [(random.randint(0, 5), random.randint(0, 5)) for _ in range(count)]
    rounds = []
    for _ in range(5):
        shift = random.randint(0, 5)
        strays = [random.random() < 0.1 for _ in range(count)]
        own = [(to + shift, random.randint(0, 10) if s else of + shift) for (to, of), s in zip(at, strays, strict=True)]
        rounds.append([(to, of, *write) for (to, of), write in zip(own, writes, strict=True)])
    return torch.randint(-9, 9, [16, 3, 4], generator=torch.Generator().manual_seed(seed)), rounds


def written_rows(x, writes):
    for to, of, rows, (first, second), is_added in writes:
        target, found = x[to : to + rows], second(first(x[of : of + rows])).expand(rows, 3, 4)
        if is_added:
            target.add_(found)
        else:
            target.copy_(found)
    return x


@pytest.mark.parametrize("block", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 5))])
def test_of_rows_that_move(block):
    wrong = []
    for seed in range(12 * block, 12 * block + 12):
        x, rounds = drawn_rows(seed)
        y = x.to("tpu")
        for writes in rounds:
            written_rows(y, writes)
            torch.tpu.synchronize()
            written_rows(x, writes)
        if not torch.equal(y.cpu(), x):
            wrong.append(seed)
    assert not wrong


@pytest.mark.parametrize("block", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 10))])
def test_of_parts_drawn_at_random(block):
    wrong = []
    for seed in range(60 * block, 60 * block + 60):
        x, writes = drawn(seed)
        got = written(x.to("tpu"), writes).cpu()
        if not torch.equal(got, written(x, writes)):
            wrong.append(seed)
    assert not wrong
