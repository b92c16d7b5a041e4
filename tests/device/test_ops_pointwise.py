"""Pointwise operations, and what dtype comes of what."""

import itertools
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from rows import ALL, COMPLEX, EXACT, FLOATS, INTS, NUMBERS, Row, run
from support import DEVICE, assert_same, outcome

# ---------------------------------------------------------------- one argument

S = (4, 3)
UNARY = {}


def unary(names, dtypes=NUMBERS, **options):
    for name in names.split():
        also = [[()], [(0,)], [(2, 0, 3)]]
        UNARY[name] = Row(getattr(torch, name, None) or getattr(F, name), [S], dtypes, also, **options)


unary("exp exp2 expm1 sin cos tan sinh cosh tanh atan asinh sigmoid erf erfc sign neg abs square", NUMBERS, high=2)
unary("log log2 log10 log1p sqrt rsqrt reciprocal digamma lgamma", NUMBERS, low=0.5, high=4)
unary("asin acos atanh erfinv", NUMBERS, low=0, high=0.9)
unary("acosh", NUMBERS, low=1.1, high=4)
unary("ceil floor round trunc frac", NUMBERS, grad=False)
unary("isnan isinf isfinite logical_not sgn signbit positive nan_to_num rad2deg deg2rad", grad=False)
unary("bitwise_not", [*INTS, torch.bool], grad=False)
unary("relu", NUMBERS)
unary("logit", FLOATS, low=0.1, high=0.9, tolerance={torch.bfloat16: (5e-2, 5e-2)})  # the CPU rounds x / (1 - x) too
unary(
    "gelu silu mish elu selu celu softplus softsign hardtanh hardswish hardsigmoid leaky_relu relu6 logsigmoid", FLOATS
)
unary("tanhshrink softshrink hardshrink", FLOATS)
del UNARY["frac"].dtypes[len(FLOATS) :]  # the CPU has it for floats only
UNARY["i0"] = Row(torch.special.i0, [S], FLOATS, grad=False)
UNARY["ndtr"] = Row(torch.special.ndtr, [S], FLOATS)
UNARY["polygamma"] = Row(
    lambda x: [torch.polygamma(1, x), torch.polygamma(3, x)],
    [S],
    EXACT,
    low=-8.9,
    high=5,
    tolerance={torch.float32: (2e-5, 1e-5)},
)  # PyTorch's trigamma takes the sine of a rounded pi * x.
UNARY["logit eps"] = Row(lambda x: [torch.logit(x, 0.2), torch.logit(x, 0.6)], [S], EXACT, low=0, high=1, grad=False)
UNARY["xlogy"] = Row(lambda x: torch.special.xlogy(x, x), [S], FLOATS, low=0.5)
UNARY["gelu tanh"] = Row(lambda x: F.gelu(x, approximate="tanh"), [S])
UNARY["round decimals"] = Row(lambda x: torch.round(x, decimals=1), [S], EXACT, grad=False)
UNARY["round half"] = Row(lambda x: torch.round(x * 2 + 0.5), [S], [torch.float64], grad=False)
UNARY["complex"] = Row(
    lambda x: [x.abs(), x.angle(), x.conj() * 1, x.real, x.imag, x.exp(), x.sqrt(), x.log(), x.tanh(), x.sgn(), -x],
    [S],
    COMPLEX,
)
UNARY["to complex and back"] = Row(lambda x: [torch.complex(x, x + 1), torch.polar(x, x)], [S], EXACT)


@pytest.mark.parametrize("name", UNARY)
def test_pointwise_unary(name):
    run(UNARY[name])


IN_PLACE = """exp_ sin_ tanh_ sigmoid_ erf_ neg_ abs_ sqrt_ rsqrt_ log_ reciprocal_ ceil_ floor_ round_ trunc_ relu_
              logical_not_ sign_ square_ nan_to_num_ zero_""".split()  # noqa: SIM905


@pytest.mark.parametrize("name", IN_PLACE)
def test_pointwise_unary_in_place(name):
    """In place on contiguous, transposed and sliced tensors of floats and integers; integers that cannot hold the result
    raise as on the CPU."""
    row = Row(lambda x: getattr(x, name)(), [S], [torch.float32, torch.int64], grad=False, low=1)
    run(row)


OUT = ["exp", "sin", "tanh", "sigmoid", "neg", "abs", "sqrt", "log", "floor", "logical_not", "isfinite"]


@pytest.mark.parametrize("name", OUT)
def test_pointwise_unary_out(name):
    """Into the right dtype, a wider one, a view, a tensor of the wrong size, a dtype that cannot hold the result."""
    f = getattr(torch, name)

    def into(make, x):
        return f(x, out=make(x))

    for make in (
        lambda x: torch.empty(S, device=x.device),
        lambda x: torch.empty(S, device=x.device, dtype=torch.float64),
        lambda x: torch.zeros(3, 4, device=x.device).t(),
        lambda x: torch.zeros(4, 6, device=x.device)[:, ::2],
        lambda x: torch.empty(0, device=x.device),
        lambda x: torch.empty(2, device=x.device),
        lambda x: torch.empty(S, device=x.device, dtype=torch.int32),
        lambda x: torch.empty(S, device=x.device, dtype=torch.bool),
    ):
        row = Row(partial(into, make), [S], [torch.float32], grad=False, layouts=False, low=1)
        run(row)


# ---------------------------------------------------------------- two arguments

BINARY = {}
BROADCAST = [[S, (3,)], [(4, 1), (3,)], [S, ()], [(), S], [(), ()], [(2, 1, 3), (4, 1)], [(0, 3), (1, 3)], [(0,), (1,)]]


def binary(names, dtypes=NUMBERS, **options):
    for name in names.split():
        BINARY[name] = Row(getattr(torch, name), [S, S], dtypes, BROADCAST, **options)


binary("add sub mul")
binary("div", low=1, high=4)
binary("maximum minimum atan2 fmax fmin hypot heaviside copysign", NUMBERS, grad=False)
for n in ("maximum", "minimum", "atan2", "copysign"):
    BINARY[n].grad = True
del BINARY["hypot"].dtypes[len(FLOATS) :]
binary("fmod remainder floor_divide", low=1, high=4, grad=False)
binary("pow", low=1, high=3)
binary("eq ne lt le gt ge logical_and logical_or logical_xor", ALL, grad=False)
binary("bitwise_and bitwise_or bitwise_xor", [*INTS, torch.bool], grad=False)
binary("bitwise_left_shift bitwise_right_shift gcd lcm", INTS, low=0, grad=False)
binary("logaddexp logaddexp2 nextafter", FLOATS, grad=False)
BINARY["logaddexp"].grad = True
BINARY["nextafter"].dtypes = EXACT
BINARY["add alpha"] = Row(lambda x, y: torch.add(x, y, alpha=3), [S, (3,)], NUMBERS)
BINARY["sub alpha"] = Row(lambda x, y: torch.sub(x, y, alpha=2), [S, (3,)], NUMBERS)
BINARY["rsub"] = Row(lambda x, y: torch.rsub(x, y), [S, (3,)], NUMBERS)
for mode in ("trunc", "floor"):
    BINARY[f"div {mode}"] = Row(
        partial(lambda m, x, y: torch.div(x, y, rounding_mode=m), mode), [S, (3,)], NUMBERS, low=1, high=4, grad=False
    )
    BINARY[f"div {mode} negative"] = Row(
        partial(lambda m, x, y: torch.div(-x, y, rounding_mode=m), mode),
        [S, (3,)],
        [*EXACT, torch.int64],
        low=1,
        grad=False,
    )
BINARY["integer division by negatives"] = Row(
    lambda x: [x // -2, x % -2, -x // 2, -x % 2, torch.fmod(x, -2), x // 3],
    [S],
    [torch.int64, torch.int32],
    low=-9,
    high=9,
)
BINARY["numbers"] = Row(
    lambda x: [x + 1, x - 2, 3 - x, x * 2, x / 2, 2 / (x + 7), x**2, 2**x, x > 1, x == 1, x + 0.5, x * True, -x],
    [S],
    [*FLOATS, torch.int64, torch.int32],
    [[()], [(0,)]],
    low=0,
    high=4,
    grad=False,
)
BINARY["powers"] = Row(lambda x: [x**0, x**1, x**2, x**3, x**0.5, x**-1, x**2.5, x**-2], [S], FLOATS, low=0.5)
BINARY["complex"] = Row(lambda x, y: [x + y, x * y, x / y, x - 2j, x == y, x**2], [S, S], COMPLEX, low=0.5)
BINARY["where"] = Row(lambda x, y: torch.where(x > y, x, y), [S, (3,)], ALL, BROADCAST)
BINARY["where numbers"] = Row(
    lambda x: [torch.where(x > 0, x, 0), torch.where(x > 0, 1.0, x)], [S], [torch.float32, torch.int64]
)
BINARY["lerp"] = Row(lambda x, y: [torch.lerp(x, y, 0.3), torch.lerp(x, y, y)], [S, S])
BINARY["addcmul"] = Row(lambda x, y, z: torch.addcmul(x, y, z, value=0.5), [S, (3,), (4, 1)], FLOATS)
BINARY["addcdiv"] = Row(lambda x, y, z: torch.addcdiv(x, y, z, value=0.5), [S, (3,), (4, 1)], FLOATS, low=1)
BINARY["clamp"] = Row(
    lambda x: [x.clamp(-1, 1), x.clamp(min=0), x.clamp(max=1), x.clamp(1, -1), x.clamp(min=x * 0, max=x * 0 + 1)],
    [S],
    [*FLOATS, torch.int64, torch.int32],
    [[()], [(0,)]],
)
BINARY["polar"] = Row(lambda x, y: torch.view_as_real(torch.polar(x, y)), [S, S], EXACT)


@pytest.mark.parametrize("name", BINARY)
def test_pointwise_binary(name):
    run(BINARY[name])


def test_in_place_binary():
    for name in ("add_", "sub_", "mul_", "div_", "pow_", "fmod_", "remainder_", "atan2_", "eq_", "logical_and_"):
        run(Row(lambda x, y, n=name: getattr(x, n)(y), [S, (3,)], [torch.float32, torch.int64], grad=False, low=1))
        run(
            Row(lambda x, n=name: getattr(x, n)(2), [S], [torch.float32], grad=False, low=1)
        ) if name != "atan2_" else None


TYPES = [torch.bool, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
         torch.complex64]  # fmt: skip


@pytest.mark.parametrize("a", TYPES, ids=str)
def test_type_promotion(a):
    """Tensor with tensor, with a 0-dim tensor, with a Python number; by an arithmetic op and by a comparison."""
    x = torch.tensor([1, 2]).to(a)
    wrong = []
    for b in TYPES:
        for y in (torch.tensor([2, 1]).to(b), torch.tensor(2).to(b)):
            for f in (torch.mul, torch.eq):
                expected = outcome(f, x, y)
                if isinstance(expected, NotImplementedError) or expected.dtype == torch.complex32:
                    continue  # complex numbers of halves: XLA has none
                got = f(x.to(DEVICE), y.to(DEVICE))
                if got.dtype != expected.dtype or not torch.equal(got.cpu(), expected):
                    wrong.append(f"{f.__name__}({a}, {b}{list(y.shape)}): {got}, on the CPU {expected}")
    for n in (True, 2, 2.5, 1 + 2j):
        for f in (lambda x, n: x * n, lambda x, n: n + x, lambda x, n: x == n, lambda x, n: x / n):
            expected = outcome(f, x, n)
            if isinstance(expected, NotImplementedError) or expected.dtype == torch.complex32:
                continue
            got = f(x.to(DEVICE), n)
            if got.dtype != expected.dtype or not torch.allclose(got.cpu(), expected):
                wrong.append(f"{a} with {n}: {got}, on the CPU {expected}")
    assert not wrong, "\n".join(wrong)


def test_conversions():
    values = torch.tensor([-2.7, -1.0, 0.0, 0.4, 1.5, 2.5, 100.25], dtype=torch.float64)
    for a, b in itertools.product(TYPES, TYPES):
        x = values.abs().to(a) if a == torch.uint8 or b == torch.uint8 else values.to(a)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert_same(x.to(DEVICE).to(b), x.to(b), f"{a} to {b}")


def test_polygamma_below_zero():
    g = torch.Generator().manual_seed(5)
    x = torch.rand(20_000, generator=g) * 60 - 50
    for n in (1, 2, 3, 4):
        expected = torch.polygamma(n, x.double())  # PyTorch's own float32 is off by up to a factor next to the poles
        got = torch.polygamma(n, x.to(DEVICE)).cpu().double()
        size = expected.abs() + (1 if n % 2 == 0 else 0)  # even ones cross zero
        assert ((got - expected).abs() / size).max() < 1e-5, n
        zeta = torch.special.zeta(n + 1.0, x.to(DEVICE)).cpu().double()
        expected = torch.special.zeta(n + 1.0, x.double())
        assert ((zeta - expected).abs() / (expected.abs() + 1)).max() < 1e-5, n
    poles = torch.tensor([0.0, -1.0, -8.0, -float("inf")])
    for n in (2, 3):
        torch.testing.assert_close(torch.polygamma(n, poles.to(DEVICE)).cpu(), torch.polygamma(n, poles))
