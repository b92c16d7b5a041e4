"""Parts that are whole at some sizes: padding to a multiple, pieces, every other element.

A bound is a multiple of most numbers, so nothing is left over there, and at other sizes there is.
"""

import pytest
import torch
import torch.nn.functional as F
from sizes_support import check, programs
from support import DEVICE
from torch.tpu import Dim


def padded_to_a_multiple(x):
    return F.pad(x, (0, -x.shape[-1] % 4)).unflatten(-1, (-1, 4)).mean(-1)


def cut_to_a_multiple(x):
    n = x.shape[-1] // 4
    return x[..., : n * 4].reshape(2, -1, n) * 2


def of_odd_sizes(x):
    return F.pad(x, (0, 1)) if x.shape[-1] % 2 else x * 1


def blocks(x):
    y = F.pad(x, (0, -x.shape[-1] % 4)).unflatten(-1, (-1, 4))
    return (y.transpose(-1, -2) @ y).softmax(-1), y.amax(-2)


# With the programs that there may be: of multiples, of others, and of what is left over where it is as at the bound.
PARTS = [(padded_to_a_multiple, 2), (cut_to_a_multiple, 2), (of_odd_sizes, 2), (blocks, 2)]
SIZES = (21, 32, 30, 31, 24, 23, 17)


@pytest.mark.parametrize(("function", "most"), PARTS, ids=lambda x: getattr(x, "__name__", ""))
def test_a_bound_has_a_program_of_whole_parts_and_one_of_others(function, most, fused):
    f = torch.tpu.jit(function, dynamic={"x": {2: Dim(max=32)}})
    before = programs()
    for size in SIZES:
        x = torch.randn(2, 3, size, generator=torch.Generator().manual_seed(size))
        actual, expected = f(x.to(DEVICE)), function(x)
        for a, e in zip(*[t if isinstance(t, tuple) else (t,) for t in (actual, expected)], strict=True):
            check(a, e, str(size))
    torch.tpu.synchronize()
    assert programs() - before <= most, torch.tpu.explain()


def test_the_largest_size_but_one_comes_first(fused):
    f = torch.tpu.jit(padded_to_a_multiple, dynamic={"x": {2: Dim(max=32)}})
    before = programs()
    for size in (31, 19, 26, 31):
        x = torch.randn(2, 3, size)
        check(f(x.to(DEVICE)), padded_to_a_multiple(x), str(size))
    torch.tpu.synchronize()
    assert programs() - before == 1


def test_parts_of_several_sizes(fused):
    def function(x):
        return F.pad(x, (0, -x.shape[-1] % 4, 0, -x.shape[-2] % 4)).unfold(-1, 4, 4).sum(-1).unfold(-2, 4, 4).sum(-1)

    size = Dim(max=16)
    f = torch.tpu.jit(function, dynamic={"x": {1: size, 2: Dim(max=32)}})
    before = programs()
    for sizes in [(9, 17), (10, 23), (15, 30), (16, 32), (12, 20)]:
        x = torch.randn(2, *sizes)
        check(f(x.to(DEVICE)), function(x), str(sizes))
    torch.tpu.synchronize()
    assert programs() - before <= 2


def test_compiled_graphs_have_such_parts(fused):
    torch._dynamo.reset()
    f = torch.compile(padded_to_a_multiple, backend="tpu", dynamic=True)
    counts = []
    for size in (21, 23, 32, 30, 31, 24, 17, 29):
        x = torch.randn(2, 3, size)
        before = programs()
        check(f(x.to(DEVICE)), padded_to_a_multiple(x), str(size))
        torch.tpu.synchronize()
        counts.append(programs() - before)
    assert not any(counts[4:]), counts
