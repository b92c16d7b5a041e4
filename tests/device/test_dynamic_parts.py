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


def by_chance(x):
    """Numbers that follow from the size, and at some sizes are what they are at the bound."""
    n = x.shape[-1]
    kernels = torch.ones(4, 3, 3, device=x.device), torch.ones(2, 4, 3, device=x.device)
    return [
        *[c * 2 for c in x.chunk(4, -1)],
        torch.fft.fftshift(x, -1),
        F.conv1d(F.conv1d(x, kernels[0], stride=2, padding=1), kernels[1], stride=2, padding=1),
        x[..., : (n + 1) // 2] * x[..., n // 2 :],
        x.median(-1)[0],
        x.topk(min(25, n))[0],
    ]


def test_what_a_number_is_at_the_bound_by_chance_makes_no_program(fused):
    f = torch.tpu.jit(by_chance, dynamic={"x": {2: Dim(buckets=[32])}})
    before = programs()
    for size in (21, 29, 31, 30, 32, 25, 26, 18, 17):
        x = torch.randn(2, 3, size, generator=torch.Generator().manual_seed(size))
        for a, e in zip(f(x.to(DEVICE)), by_chance(x), strict=True):
            check(a, e, str(size))
    torch.tpu.synchronize()
    assert programs() - before == 1, torch.tpu.explain()


PIECES = [
    (lambda x: torch.cat([y.exp() for y in x.split(7)]), "split gives 3 tensors, and 5 at the bound, at", "unflatten"),
    (lambda x: torch.stack([(y * y).sum() for y in x]), "unbind gives 20 tensors, and 32 at the bound, at", "vmap"),
]


@pytest.mark.parametrize(("function", "why", "hint"), PIECES)
def test_pieces_of_which_there_are_more_at_the_bound_are_named(function, why, hint, fused):
    f = torch.tpu.jit(function, dynamic={0: {0: Dim(max=32)}})
    x = torch.randn(20, 11)  # a program that no other test has: one that is there is not explained again
    check(f(x.to(DEVICE)), function(x))
    said = torch.tpu.explain(4)  # what is computed in between may have a program, too
    assert f"for this size alone: {why} " in said and "test_dynamic_parts.py" in said and hint in said


def test_what_is_said_to_do_instead_of_pieces_is_one_program(fused):
    def masked_blocks(x):
        n = x.shape[0]
        parts = F.pad(x, (0, 0, 0, -n % 7)).unflatten(0, (-1, 7))
        used = (torch.arange(parts.shape[0] * 7, device=x.device) < n).view(-1, 7, 1)
        return (parts.exp() * used).sum(1)

    def rows(x):
        return torch.vmap(lambda y: (y * y).sum())(x)

    wanted = {
        masked_blocks: lambda x: torch.stack([y.exp().sum(0) for y in x.split(7)]),
        rows: lambda x: torch.stack([(y * y).sum() for y in x]),
    }
    for function, pieces in wanted.items():
        f = torch.tpu.jit(function, dynamic={"x": {0: Dim(max=32)}})
        before = programs()
        for size in (20, 31, 18, 29):
            x = torch.randn(size, 3)
            check(f(x.to(DEVICE)), pieces(x), str(size))
        torch.tpu.synchronize()
        assert programs() - before == 1


def inverse(x, length=None):
    window = torch.hann_window(16, device=x.device)
    spectrum = torch.stft(x, 16, 4, window=window, return_complex=True)
    return torch.istft(spectrum, 16, 4, window=window, length=length)


# Which elements are taken follows from the size in a way of its own.
TAKEN = {
    "area": (lambda x: F.interpolate(x[None], scale_factor=0.5, mode="area")[0], 1),
    "area, larger": (lambda x: F.interpolate(x[None, None], scale_factor=1.5, mode="area")[0, 0], 0),
    "adaptive averages": (lambda x: F.adaptive_avg_pool1d(x.T, x.shape[0] // 2), 0),
    "as many windows as rows": (lambda x: F.adaptive_avg_pool1d(torch.ones(1, 11, device=x.device) * 2, x.shape[0]), 0),
    "their gradients": (torch.func.grad(lambda x: F.adaptive_avg_pool1d(x.T, x.shape[0] // 2).square().sum()), 0),
    "a diagonal": (lambda x: x.diagonal() * 2, 0),
    "a diagonal beside": (lambda x: torch.diagonal_copy(x, 3) + x.diagonal(3), 0),
    "diagonals of a batch": (lambda x: torch.stack([x, x + 1]).diagonal(1, 1, 2) * 2, 0),
    "an inverse Fourier transform": (lambda x: inverse(x), 1),
    "an inverse Fourier transform of a length": (lambda x: inverse(x, x.shape[1]), 1),
    "parts by number": (lambda x: [y * 2 for y in torch.tensor_split(x, torch.tensor([2, 5]))], 0),
    "parts": (lambda x: [y * 2 for y in x.tensor_split(3)], 0),
}


@pytest.mark.parametrize("name", TAKEN)
def test_what_is_taken_is_one_program(name, fused):
    function, dim = TAKEN[name]
    f, made = torch.tpu.jit(function, dynamic={"x": {dim: Dim(max=32)}}), []
    for n in (21, 19, 30, 25, 17):
        shape = [20, 20]
        shape[dim] = n
        x, before = torch.randn(shape, generator=torch.Generator().manual_seed(n)), programs()
        actual, expected = f(x.to(DEVICE)), function(x)
        for a, e in zip(*[t if isinstance(t, list) else [t] for t in (actual, expected)], strict=True):
            check(a, e, str(n))
        made.append(programs() - before)
    # A diagonal is as long as the shorter side, whichever that is.
    assert not any(made[2:]) and sum(made) <= 1 + ("diagonal" in name), (made, torch.tpu.explain())
