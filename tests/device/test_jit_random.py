"""Random numbers in functions of `torch.tpu.jit` are those of eager mode."""

import warnings

import pytest
import torch
from jit_support import compare
from support import DEVICE, assert_close
from torch import nn


def test_random_numbers_are_those_of_eager_mode():
    def f(x):
        return nn.functional.dropout(x, 0.5), torch.rand(3, device=x.device)

    x = torch.ones(50, device=DEVICE)
    torch.manual_seed(7)
    expected = [[r.cpu() for r in f(x)] for _ in range(4)]
    torch.manual_seed(7)
    g = torch.tpu.jit(f)
    actual = [[r.cpu() for r in g(x)] for _ in range(4)]
    compare(actual, expected)
    assert g.traces == 1


@pytest.mark.parametrize("made", ["inside", "argument"])
def test_a_generator(made):
    def f(x, generator):
        return torch.rand(x.shape, device=x.device, generator=generator) + x

    def results(function):
        generator = torch.Generator(DEVICE).manual_seed(3)
        x = torch.ones(5, device=DEVICE)
        call = function if made == "argument" else (lambda x, _, g=generator: f(x, g))
        jitted = torch.tpu.jit(call) if function is not f else call
        return [jitted(x, generator).cpu() for _ in range(4)]

    compare(results(torch.tpu.jit(f)), results(f))


@pytest.mark.parametrize("chunk_size", [None, 2])
@pytest.mark.parametrize("randomness", ["different", "same"])
def test_random_numbers_under_vmap(randomness, chunk_size):
    def f(x):
        def of_row(row):
            return row + torch.rand(2, device=row.device).sum(), torch.randn_like(row)

        return torch.func.vmap(of_row, randomness=randomness, chunk_size=chunk_size)(x)

    def results(function):
        torch.manual_seed(1)
        drawn = [function(torch.zeros(5, device=DEVICE)) for _ in range(3)], torch.rand(2, device=DEVICE)
        return torch.utils._pytree.tree_map(torch.Tensor.cpu, drawn)

    expected = results(f)
    for rows in expected[0][0]:
        assert len(set(rows.tolist())) == (1 if randomness == "same" else 5)
    compare(results(torch.tpu.jit(f)), expected)
    compare(results(torch.compile(f, backend="tpu")), expected)


def test_chunk_vmap_draws_the_same_in_each_chunk():
    x = torch.zeros(5, 2, device=DEVICE)
    with warnings.catch_warnings(action="ignore"):
        rows = torch._functorch.apis.chunk_vmap(lambda x: x + torch.rand_like(x), randomness="same", chunks=3)(x)
    assert len({tuple(row) for row in rows.tolist()}) == 1


def test_generators_that_are_set():
    """A program moves generators on from where they are, so they may be set back to where it had them."""

    def back(x):
        first = torch.randn(3, device=DEVICE)
        state = torch.tpu.get_rng_state()
        a = x + torch.rand(2, device=DEVICE)
        torch.tpu.set_rng_state(state)
        return first, a, torch.rand(2, device=DEVICE), torch.rand(2, device=DEVICE)

    def results(function):
        torch.manual_seed(1)
        return [[t.cpu() for t in function(torch.zeros(2, device=DEVICE))] for _ in range(3)]

    expected = results(back)
    compare(results(torch.tpu.jit(back)), expected)
    assert torch.equal(expected[1][1], expected[1][2])

    def seeds(x):
        torch.manual_seed(3)
        return x + torch.rand(2, device=DEVICE)

    def seeds_between(x):
        y = x + torch.rand(2, device=DEVICE)
        torch.tpu.manual_seed(3)
        return y + torch.rand(2, device=DEVICE)

    def goes_back(x):
        y = x + torch.rand(2, device=DEVICE)
        state = torch.tpu.get_rng_state()
        y = y + torch.rand(2, device=DEVICE)
        torch.tpu.set_rng_state(state)
        return y

    for f in (seeds, seeds_between, goes_back):
        with pytest.raises(RuntimeError, match="the state that a random generator is set to"):
            torch.tpu.jit(f)(torch.zeros(2, device=DEVICE))


def test_a_generator_is_set_back_where_nothing_was_drawn():
    def f(x):
        before = torch.tpu.get_rng_state()
        y = x + 1
        torch.tpu.set_rng_state(before)
        return y + torch.rand(2, device=DEVICE)

    jitted, x = torch.tpu.jit(f), torch.zeros(2, device=DEVICE)
    torch.manual_seed(0)
    expected = [f(x).cpu() for _ in range(3)]
    torch.manual_seed(0)
    for e in expected:
        assert_close(jitted(x), e)
