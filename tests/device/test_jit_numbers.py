"""Python's numbers among the arguments of `torch.tpu.jit`, against the same function run by PyTorch on the CPU."""

import math

import numpy as np
import pytest
import torch
from compile_support import fresh_dynamo  # noqa: F401 (a fixture)
from support import DEVICE, assert_close, to_device
from torch.utils._pytree import tree_map, tree_map_only


def decode(cache, token, position):
    """A step of a generation with a cache: writes at a position, and looks at what is before it."""
    cache[:, position] = token
    seen = (torch.arange(cache.shape[1], device=cache.device) <= position).float()
    return (cache * seen[:, None]).sum(1), cache[0, position] * 2, position + 1


def ring(x, n):
    """Where it goes round, other positions are behind the same numbers."""
    return x[n % 4] + x[:, n % 3 : n % 3 + 1].sum()


def or_zero(x, n):
    try:
        return x[n] * 2
    except IndexError:
        return x[0] * 0


def write_parts(x, n):
    x = x.clone()
    x.narrow(0, n, 2).mul_(2.0)
    x[n, 1:] = 5.0
    x[..., n] += x[n + 1, None, 0] * 2
    x[-1] = torch.ones(1, 3, device=x.device)
    return x


def gradient_of_a_part(x, n):
    return torch.func.grad(lambda x: (x[n] ** 2).sum() + x[n + 1 : n + 3].sum())(x)


def gradient_step(w, x, rate, decay):
    """Numbers that are computed with numbers, and Python's own operators."""
    g = torch.func.grad(lambda w: ((x @ w) ** 2).mean())(w)
    return w * (1 - rate * decay) - g * (rate / 2**0.5)


def adam_step(w, x, t):
    return w - x[0, :4] * (0.1 / (1 - 0.9**t)) + max(t, 3) / (1 - 0.99**t) ** 0.5


def with_backward(x, scale):
    x = x.detach().requires_grad_()
    ((x * scale) ** 2).sum().backward()
    return x.grad, scale


W, X = torch.arange(12.0).reshape(3, 4) / 7, torch.linspace(-2, 2, 15).reshape(5, 3)

# Functions; calls; and how often the function may be run for them: once for the first numbers, twice for all others.
NUMBERS = {
    "factor": (lambda x, s: x * s, [(X, s) for s in (0.1, 0.2, 1.0, -3.5, 0.0)], 7),
    "whole": (lambda x, n: x * n + n, [(X, n) for n in (1, 2, 3, -4)], 5),
    "a constant that is the same": (lambda x, s: x * s + x * 2.0, [(X, s) for s in (2.0, 1.0, 2.0, 3.0, 1.0)], 5),
    "two that are the same": (
        lambda x, a, b: x * a - x / b,
        [(X, a, b) for a, b in ((1.5, 2.5), (2.0, 2.0), (3.0, 2.0))],
        3,
    ),
    "in a tree": (lambda d: d["x"] * d["rates"][1], [({"x": X, "rates": [0.1, s]},) for s in (0.1, 0.2, 0.3)], 3),
    "one and then another": (
        lambda x, a, b: x * a + b,
        [(X, 1.0, 1.0), (X, 2.0, 1.0), (X, 3.0, 1.0), (X, 3.0, 2.0), (X, 4.0, 5.0)],
        5,
    ),
    "scalars of operations": (
        lambda x, a: torch.add(x, x, alpha=a).clamp(-a, a).lerp(x, 1 - a).addcdiv(x, x.exp(), value=-a),
        [(X, a) for a in (0.1, 0.5, 0.9)],
        3,
    ),
    "comparisons": (lambda x, a: torch.where(x > a, x, a) ** 2, [(X, a) for a in (0.1, 0.5, 0.9)], 3),
    "filled": (lambda x, a: torch.full((5, 3), a, device=x.device) + x, [(X, a) for a in (0.1, 0.5, 0.9)], 3),
    "integers": (lambda x, n: (x * 10).int() // n % n, [(X, n) for n in (2, 3, 7)], 3),
    "gradients": (gradient_step, [(W, X, a, a / 3) for a in (0.1, 0.2, 0.05)], 3),
    "bias correction": (adam_step, [(W, torch.ones(3, 4), t) for t in (1, 2, 3, 4, 10)], 5),
    "backward": (with_backward, [(X, a) for a in (0.1, 0.5, 0.9)], 3),
    "branches": (lambda x, t: x * t if t < 3 else x - t, [(X, t) for t in (1, 2, 3, 4, 1, 5)], 5),
    # Positions: one run more for each number that they follow from.
    "an index": (lambda x, n: x[n] * 2, [(X, n) for n in (1, 2, 3, 4, 0)], 3),
    "an index that is none": (or_zero, [(X, n) for n in (1, 2, 4, 5, 6, 3)], 9),
    "an index from the end": (lambda x, n: x[n], [(X, n) for n in (1, 2, 3, -1, -2)], 9),
    "parts": (lambda x, n: x[n : n + 2] * 2 + x[n - 1], [(X, n) for n in (1, 2, 3)], 3),
    "rows and columns": (lambda x, i, j: x[i, j] + x[i] * j, [(X, 0, 1), (X, 1, 2), (X, 4, 1), (X, 0, 0)], 7),
    "a cache": (decode, [(torch.zeros(2, 8, 3), torch.ones(2, 3), n) for n in (0, 1, 2, 5, 7)], 3),
    "a ring": (ring, [(X, n) for n in (0, 1, 2, 3, 4, 5, 7, 11, 12)], 18),
    "an index that moves seldom": (lambda x, n: x[n // 2] + x[n * n % 5], [(X, n) for n in (0, 1, 2, 3, 4, 5, 7)], 25),
    "gradients of parts": (gradient_of_a_part, [(X, n) for n in (0, 1, 2)], 3),
    "written parts": (write_parts, [(X, n) for n in (0, 1, 2)], 3),
    # What Python has to know: the function is run for each.
    "tensors of the host": (
        lambda x, a: x * torch.full((3,), a).to(x.device) + (torch.ones(3) * a)[:1].to(x.device),
        [(X, a) for a in (0.1, 0.5, 0.9)],
        5,
    ),
    "outside of a domain": (lambda x, t: x * t**0.5 if t >= 0 else x, [(X, t) for t in (4.0, 2.0, -1.0, 9.0)], 7),
    "sizes": (lambda x, n: x[:n] * 2, [(X, n) for n in (1, 2, 3, 1)], 7),
    "rounds": (lambda x, n: sum(x * i for i in range(n)), [(X, n) for n in (2, 3, 4, 2)], 5),
    "functions of Python": (lambda x, t: x * math.cos(t), [(X, t) for t in (0.1, 0.5, 0.9)], 5),
    "text": (lambda x, t: x * len(f"{t}"), [(X, t) for t in (0.5, 0.25, 0.75)], 5),
    "floor of floats": (lambda x, t: x * (t // 0.1), [(X, t) for t in (0.7, 1.0, 7.0)], 4),
    "type": (lambda x, t: x * t if type(t) is float else x, [(X, t) for t in (0.5, 0.25, 0.75)], 5),
    "numbers of numpy": (
        lambda x, a, n: x * a + x[n],
        [
            (X, t(0.5 * i), n(i))
            for i, (t, n) in enumerate([(np.float64, np.int64), (float, np.int32), (np.float32, int)])
        ],
        3,
    ),
    "other types": (lambda x, t: x * t, [(X, t) for t in (2, 2.5, True, 3, 3.5, False)], 8),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_vary(name):
    f, calls, runs = NUMBERS[name]
    g = torch.tpu.jit(f)
    for call in calls:
        given = tree_map_only(torch.Tensor, to_device, call)
        expected = tree_map_only(torch.Tensor, to_device, f(*call))
        tree_map(
            lambda a, b: assert_close(a, b.cpu()) if torch.is_tensor(b) else check_equal(a, b), g(*given), expected
        )
    assert g.traces <= runs
    torch.tpu.synchronize()
    before = torch.tpu.metrics()["programs"]
    for call in calls:
        g(*tree_map_only(torch.Tensor, to_device, call))
    assert torch.tpu.metrics()["programs"] == before


SIGNED = {
    "given": (lambda x, s: x.atan2(torch.full_like(x, s)), (), [0.0, -0.0, 0.0, 2.0, -0.0, 3.0, 0.0, -0.0]),
    "asked": (lambda x, s: x + math.copysign(1, s), (), [0.0, -0.0, 2.0, -0.0, -3.0, 0.0]),
    "static": (lambda x, s: x + math.copysign(1, s), (1,), [0.0, -0.0, 0.0, -0.0]),
    "in a tree": (lambda x, s: x + math.copysign(1, s[0]["a"]), (), [({"a": a},) for a in (0.0, -0.0, 0.0)]),
    "complex": (lambda x, s: x + math.copysign(1, s.imag), (), [1 + 0j, complex(1, -0.0), 1 + 0j, 2j]),
    "of numpy": (lambda x, s: x + math.copysign(1, s), (), [np.float64(0.0), np.float64(-0.0), np.float64(0.0)]),
}


@pytest.mark.parametrize("name", SIGNED)
def test_zeros_of_both_signs(name):
    f, static, numbers = SIGNED[name]
    g = torch.tpu.jit(f, static_argnums=static)
    for s in numbers:
        x = torch.zeros(3)
        assert_close(g(to_device(x), s), f(x, s))


def test_a_nan_is_the_same_number():
    f = torch.tpu.jit(lambda x, s: x + len(f"{s}"), static_argnums=1)
    for _ in range(4):
        f(torch.zeros(3, device=DEVICE), float("nan"))
    assert f.traces == 1


def check_equal(a, b):
    assert (type(a), a) == (type(b), b)


REFUSED = {
    "a division by zero": (lambda x, n: x.int() // n, [3, 2, 0], "ZeroDivisionError"),
    "a probability": (lambda x, p: x.bernoulli_(p), [0.5, 0.25, 1.5], "p"),
    "a power": (lambda x, n: x.int() ** n, [3, 2, -1], "negative"),
    "more than an int32": (lambda x, n: x.int().fill_(n), [3, 2, 2**40], "without overflow"),
    "more than an int16": (lambda x, n: x.short().fill_(n), [3, 2, 2**16], "without overflow"),
    "more than a float16": (lambda x, a: x.half().fill_(a), [3.5, 2.0, 1e6], "without overflow"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_number_that_an_operation_refuses(name):
    f, (*good, bad), message = REFUSED[name]
    g = torch.tpu.jit(f)
    for n in good:
        g(torch.ones(3, device=DEVICE), n)
    with pytest.raises((RuntimeError, ZeroDivisionError), match=message):
        g(torch.ones(3, device=DEVICE), bad).cpu()
    g(torch.ones(3, device=DEVICE), good[-1])


def test_why_a_number_is_in_the_program(fused):
    f = torch.tpu.jit(lambda x, n: x.new_ones(n) * n)
    x = torch.ones(2, device=DEVICE)
    for n in (3, 4):
        f(x, n)
    torch.tpu.synchronize()
    assert "for these numbers alone: no operation takes them, Python does at " in torch.tpu.explain()


def ctc(x, lengths, reduction):
    """The lengths are lists; of a mean PyTorch makes a tensor of them."""
    targets = torch.tensor([[1, 2, 3, 1], [2, 2, 1, 3]], device=x.device)
    return torch.nn.functional.ctc_loss(x.log_softmax(-1), targets, *lengths, reduction=reduction)


def ctc_gradient(x, lengths):
    x = x.detach().requires_grad_()
    return torch.autograd.grad(ctc(x, lengths, "mean"), x)[0]


BOTH = ((6, 5), (3, 2))
# Lists that are in the function, and those that are arguments of it.
LISTS = {
    "no reduction": (lambda x, _: ctc(x, BOTH, "none"), [0, 0]),
    "a sum": (lambda x, _: ctc(x, BOTH, "sum"), [0, 0]),
    "a mean": (lambda x, _: ctc(x, BOTH, "mean"), [0, 0]),
    "a gradient": (lambda x, _: ctc_gradient(x, BOTH), [0, 0]),
    "lengths": (lambda x, lengths: ctc_gradient(x, lengths), [BOTH, BOTH, ((6, 6), (4, 1)), BOTH]),
    "one length": (lambda x, n: ctc(x, ((6, n), (3, 2)), "none"), [5, 6, 5]),
    "a scale and lengths": (lambda x, a: ctc(x, BOTH, "none") * a, [2.0, 3.0, 4.0]),
    "a range": (lambda x, _: torch.histogram(x, 4, range=(-1.0, 1.0))[0], [0, 0]),
    "a range of arguments": (lambda x, a: torch.histogram(x, 4, range=(-a, a))[0], [1.0, 0.5, 1.5]),
    "ranges": (lambda x, _: torch.histogramdd(x.flatten(0, 1), [2, 2, 1, 3], range=[-1.0, 1.0] * 4)[0], [0, 0]),
}


# Lengths that are tensors of the host, as scripts have them: made in the function, found by it, arguments of it.
HELD = tuple(map(torch.tensor, BOTH))
LENGTHS = {
    "made": lambda x, _: ctc_gradient(x, tuple(map(torch.tensor, BOTH))),
    "found": lambda x, _: ctc_gradient(x, HELD),
    "arguments": ctc_gradient,
    "no gradient": torch.no_grad()(lambda x, lengths: ctc(x, lengths, "mean")),
}


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("compiled", [False, True], ids=["jit", "compile"])
@pytest.mark.parametrize("name", LENGTHS)
def test_lengths_that_are_tensors_of_the_host(name, compiled):
    f = LENGTHS[name]
    g = torch.compile(f, backend="tpu") if compiled else torch.tpu.jit(f)
    for i, lengths in enumerate([BOTH, ((6, 6), (4, 1)), BOTH]):
        x = torch.linspace(-2, 2, 48).reshape(6, 2, 4).roll(i, 0)
        lengths = tuple(map(torch.tensor, lengths))
        assert_close(g(to_device(x), lengths), f(x, lengths))


@pytest.mark.parametrize("name", LISTS)
def test_lists_that_an_operation_takes(name):
    f, given = LISTS[name]
    g = torch.tpu.jit(f)
    for i, n in enumerate(given):
        x = torch.linspace(-2, 2, 48).reshape(6, 2, 4).roll(i, 0)
        assert_close(g(to_device(x), n), f(x, n))
    assert g.traces <= 2 + len(set(given))
