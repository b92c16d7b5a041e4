"""Parts of a tensor that grow or shrink from window to window: the CPU's values, and a few programs, however many sizes come."""

import math

import pytest
import torch
import torch.nn.functional as F
from support import DEVICE

# Of a tensor, the dimension that is cut, and how far.
VIEWS = {
    "from the start": lambda x, d, n: x.narrow(d, 0, n),
    "from the end": lambda x, d, n: x.narrow(d, x.shape[d] - n, n),
    "in the middle": lambda x, d, n: x.narrow(d, (x.shape[d] - n) // 2, n),
    "both ends": lambda x, d, n: x.narrow(d, x.shape[d] - n, n) - x.narrow(d, 0, n),
    "both parts": lambda x, d, n: x.narrow(d, 0, n).mean(d) - x.narrow(d, n, x.shape[d] - n).mean(d),
    "transposed": lambda x, d, n: x.narrow(d, 0, n).movedim(d, 0),
}
# What keeps elements apart, and what mixes them along the dimension that is cut.
OPS = {
    "relu": lambda y, d: F.relu(y),
    "sum": lambda y, d: y.sum(d),
    "all": lambda y, d: (y.sum(), y.max(), y.std()),
    "softmax": lambda y, d: y.softmax(d),
    "cumsum": lambda y, d: y.cumsum(d),
    "sort": lambda y, d: y.sort(d).values,
    "product": lambda y, d: y.movedim(d, 0).flatten(1).T @ y.movedim(d, 0).flatten(1),
    "longer": lambda y, d: torch.cat([y, y * 2], d).amax(d),
}
SHAPES = {"1": ((61,), 0), "2 rows": ((67, 5), 0), "2": ((3, 53), 1), "3": ((2, 59, 3), 1), "large": ((4, 4096), 1)}


def some(size):
    """Sizes below a whole: that grow by one, come back, and are nearly all of it."""
    step = max(1, size // 64)
    return [*range(2, size, 2 * step), *range(size - 6, size), *range(3, size, 7 * step)]


def most(size):
    """Two of their own sizes, then one for each power of two, and one for what is nearly all."""
    return 4 + math.ceil(math.log2(size))


def same(got, want, what):
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4, msg=lambda text: f"{what}: {text}")


def each(result):
    return result if isinstance(result, tuple) else (result,)


def compare(f, x, sizes):
    """Runs `f` for all sizes; gives how many programs there were."""
    y, made = x.to(DEVICE), 0
    for n in sizes:
        before = torch.tpu.metrics()["programs"]
        got = [g.cpu() for g in each(f(y, n))]
        made += torch.tpu.metrics()["programs"] - before
        for g, w in zip(got, each(f(x, n)), strict=True):
            same(g, w, f"size {n}")
    return made


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("view", VIEWS)
def test_a_part_that_grows_is_a_program_for_each_power_of_two(view, shape, fused):
    torch.manual_seed(0)
    size, d = SHAPES[shape]
    x = torch.randn(size)
    made = compare(lambda x, n: F.relu(VIEWS[view](x, d, n)), x, some(size[d]))
    # Both parts have a bound each.
    assert made <= most(size[d]) * (2 if view == "both parts" else 1), f"{made}\n{torch.tpu.explain(5)}"


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("view", ["from the start", "from the end", "in the middle"])
def test_what_mixes_elements_leaves_out_those_beyond(view, op, fused):
    """Also where the part is large enough that what it is cut from could be masked instead."""
    torch.manual_seed(1)
    x = torch.randn(3, 130)
    made = compare(lambda x, n: OPS[op](VIEWS[view](x, 1, n), 1), x, [*range(2, 130, 9), 128, 129, *range(3, 130, 8)])
    assert made <= most(130), f"{made}\n{torch.tpu.explain(5)}"


@pytest.mark.parametrize("op", OPS)
def test_so_does_a_function_with_a_size_that_varies(op, fused):
    """The same rule, without windows: the size comes from another argument."""
    torch.manual_seed(2)
    x = torch.randn(3, 130)

    def f(x, upto):
        return OPS[op](x[:, : upto.shape[0]], 1)

    step = torch.tpu.jit(f, dynamic={"upto": {0: torch.tpu.Dim(max=128)}})
    for n in (5, 40, 70, 33, 100, 127, 17):
        upto = torch.zeros(n)
        got, want = step(x.to(DEVICE), upto.to(DEVICE)), f(x, upto)
        for g, w in zip(each(got), each(want), strict=True):
            same(g.cpu(), w, f"size {n}")


def test_a_cache_that_fills_up(fused):
    """As in generation: rows are written one after another, and what is there is read."""
    torch.manual_seed(3)
    rows, made = torch.randn(100, 2, 8), []

    def run(device):
        cache, out = torch.zeros(2, 100, 8, device=device), []
        for n, row in enumerate(rows.to(device), 1):
            before = torch.tpu.metrics()["programs"]
            cache[:, n - 1] = row
            scores = torch.einsum("hd,hnd->hn", row, cache[:, :n]).softmax(-1)
            out.append(torch.einsum("hn,hnd->hd", scores, cache[:, :n]).cpu())
            made.append(torch.tpu.metrics()["programs"] - before)
        return torch.stack(out)

    got, programs = run(DEVICE), sum(made)
    same(got, run("cpu"), "all rows")
    assert programs <= most(100) + 4, f"{made}\n{torch.tpu.explain(5)}"
