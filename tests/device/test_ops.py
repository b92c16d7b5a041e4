"""Operations on the device against PyTorch on the CPU: dtype, sizes, strides, values; gradients, `out=`, in place.

A row is a function of tensors and the sizes of its arguments. It runs with each dtype on contiguous arguments, and in
float32 on transposed and on sliced ones, and on every other set of sizes that it names (0-dim, empty, broadcast).
"""

import copy
import itertools
import warnings
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from support import DEVICE, assert_same, outcome, tensors, to_device

aten = torch.ops.aten

HALF = [torch.bfloat16]
FLOATS = [torch.float32, torch.float64, torch.bfloat16]
INTS = [torch.int64, torch.int32, torch.uint8]
NUMBERS = FLOATS + INTS
ALL = [*NUMBERS, torch.bool]
EXACT = [torch.float32, torch.float64]
COMPLEX = [torch.complex64]


@dataclass
class Row:
    """A call, the sizes of its random arguments (other arguments as they are), and what to run it with."""

    f: object
    args: list
    dtypes: list = field(default_factory=lambda: FLOATS)
    # Other sets of arguments, run in float32.
    also: list = field(default_factory=list)
    # Random numbers come from this range; integers too.
    low: float = -3
    high: float = 3
    grad: bool = True
    layouts: bool = True
    # Why strides are not compared, if they are not.
    strides: str = ""
    # Relative and absolute, by dtype, where more than rounding of one operation is involved, with the reason.
    tolerance: dict = field(default_factory=dict)


def random(shape, dtype, row, generator):
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator, dtype=dtype)
    if dtype.is_floating_point or dtype.is_complex:
        wide = torch.complex128 if dtype.is_complex else torch.float64
        x = torch.rand(shape, generator=generator, dtype=torch.float64)
        if dtype.is_complex:
            x = torch.complex(x, torch.rand(shape, generator=generator, dtype=torch.float64))
        return (row.low + (row.high - row.low) * x.to(wide)).to(dtype)
    low = max(row.low, 0) if dtype == torch.uint8 else row.low
    return torch.randint(int(low), int(row.high) + 1, shape, generator=generator).to(dtype)


def transposed(x):
    order = list(range(x.dim()))[::-1]
    return x.permute(order).contiguous().permute(order)


def sliced(x):
    """The same numbers as a view with an offset and gaps."""
    for d in range(min(x.dim(), 2)):
        wide = list(x.shape)
        wide[d] = 2 * wide[d] + 1
        index = [slice(None)] * x.dim()
        index[d] = slice(1, None, 2)
        y = torch.zeros(wide, dtype=x.dtype)[tuple(index)]
        x = y.copy_(x)
    return x


def arguments(row, specs, dtype, layout=None):
    g = torch.Generator().manual_seed(3)
    out = []
    for spec in specs:
        if isinstance(spec, tuple):
            x = random(spec, dtype, row, g)
            out.append(layout(x) if layout else x)
        else:
            out.append(spec(dtype) if callable(spec) else spec)
    return out


def compare(f, args, row, what, strides=True):
    moved = to_device(args)  # before the call: it may write to its arguments
    first = args[0].dtype if isinstance(args[0], torch.Tensor) else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = outcome(f, *copy.deepcopy(args))
        got = outcome(f, *moved)
    if isinstance(expected, Exception):
        assert type(got) is type(expected), f"{what}: {got!r}, on the CPU {expected!r}"
        return None
    if isinstance(got, Exception):
        raise AssertionError(f"{what}: {got}") from got
    rtol, atol = row.tolerance.get(first, (None, None))
    pairs = list(zip(tensors(got), tensors(expected), strict=True))
    for i, (a, b) in enumerate(pairs):
        assert_same(a, b, f"{what}, result {i}", strides=strides and not row.strides, rtol=rtol, atol=atol)
    if not pairs:
        assert got == expected, what
    return expected


def gradients(f, args, device):
    args = [a.detach().requires_grad_(a.is_floating_point() or a.is_complex()) if isinstance(a, torch.Tensor) else a
            for a in args]  # fmt: skip
    if device == DEVICE:
        args = [to_device(a) for a in args]
    results = [r for r in tensors(f(*args)) if r.requires_grad]
    if not results:
        return None
    g = torch.Generator().manual_seed(4)
    weights = [torch.rand(r.shape, generator=g, dtype=torch.float64).to(r.dtype).to(r.device) for r in results]
    wanted = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    return torch.autograd.grad(results, wanted, weights, allow_unused=True)


def compare_gradients(f, args, row, what):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = gradients(f, args, "cpu")
        got = gradients(f, args, DEVICE)
    if expected is None:
        return
    first = next(a.dtype for a in args if isinstance(a, torch.Tensor))
    rtol, atol = row.tolerance.get(first, (None, None))
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert (a is None) == (b is None), f"{what}: gradient {i} is {a}, on the CPU {b}"
        if b is not None:
            # Sums of several rounded terms.
            wide = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (1.6e-2, 2e-2)}.get(b.dtype, (None, None))
            assert_same(a, b, f"{what}, gradient {i}", strides=False, rtol=rtol or wide[0], atol=atol or wide[1])


def run(row):
    """Runs a row in all its forms; raises once, with everything that was wrong."""
    wrong = []

    def attempt(step, *args):
        try:
            return step(*args)
        except Exception as e:
            wrong.append(f"{type(e).__name__} {e}".strip().partition("\nassert ")[0])

    for dtype in row.dtypes:
        args = arguments(row, row.args, dtype)
        attempt(compare, row.f, args, row, f"{dtype}")
        if row.grad and (dtype.is_floating_point or dtype.is_complex):
            attempt(compare_gradients, row.f, args, row, f"{dtype}")
    first = row.dtypes[0]
    if row.layouts:
        for layout in (transposed, sliced):
            attempt(compare, row.f, arguments(row, row.args, first, layout), row, layout.__name__)
        if row.grad and first.is_floating_point:
            attempt(compare_gradients, row.f, arguments(row, row.args, first, transposed), row, "transposed")
    for specs in row.also:
        args = arguments(row, specs, first)
        attempt(compare, row.f, args, row, f"sizes {[s if isinstance(s, tuple) else '...' for s in specs]}")
    assert not wrong, f"{len(wrong)} of its forms are wrong\n" + "\n\n".join(wrong)


# ---------------------------------------------------------------- pointwise, one argument

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


# ---------------------------------------------------------------- pointwise, two arguments

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


# ---------------------------------------------------------------- reductions

R = (3, 4, 5)
EMPTY = [[()], [(0,)], [(2, 0, 3)]]
REDUCTIONS = {
    "sum": Row(lambda x: x.sum(), [R], ALL, EMPTY),
    "sum dim": Row(lambda x: [x.sum(1), x.sum((0, 2)), x.sum(-1, keepdim=True)], [R], NUMBERS),
    "sum dtype": Row(lambda x: [x.sum(dtype=torch.float64), x.sum(1, dtype=torch.float32)], [R], NUMBERS),
    "sum of rows of nothing": Row(lambda x: [x.sum(1), x.mean(1), x.prod(1), x.sum(0)], [(2, 0)], grad=False),
    "mean": Row(lambda x: [x.mean(), x.mean(1), x.mean((0, 2), keepdim=True)], [R], FLOATS),
    "prod": Row(
        lambda x: [x.prod(), x.prod(1)], [(3, 4)], [torch.float32, torch.float64, torch.int64], EMPTY[:2], low=1
    ),
    "var": Row(lambda x: [x.var(), x.var(1), x.var((0, 2), unbiased=False), x.var(1, correction=2)], [R]),
    "std": Row(lambda x: [x.std(), x.std(1, keepdim=True), *torch.std_mean(x, 1), *torch.var_mean(x, 0)], [R]),
    "amax": Row(lambda x: [x.amax(), x.amax(1), x.amin((0, 2)), *torch.aminmax(x)], [R], NUMBERS),
    "max": Row(lambda x: [x.max(), *x.max(1)], [R], NUMBERS),
    "min": Row(lambda x: [x.min(), *x.min(-1, keepdim=True)], [R], NUMBERS),
    "argmax": Row(lambda x: [x.argmax(), x.argmax(1), x.argmin(), x.argmin(2, keepdim=True)], [R], NUMBERS, grad=False),
    "any": Row(
        lambda x: [x.any(), x.any(1), x.all(), x.all(1, keepdim=True), x.any((0, 1))], [R], ALL, EMPTY, low=0, high=1
    ),
    "norm": Row(
        lambda x: [
            x.norm(),
            x.norm(dim=1),
            x.norm(p=1),
            x.norm(p=float("inf"), dim=0),
            x.norm(p=3, dim=(1, 2)),
            torch.linalg.vector_norm(x, 0, dim=1),
        ],
        [R],
        EXACT,
    ),
    "logsumexp": Row(lambda x: [x.logsumexp(1), x.logsumexp((0, 2), keepdim=True)], [R]),
    "nansum": Row(lambda x: [torch.nansum(x), torch.nanmean(x, 1)], [R]),
    "count_nonzero": Row(lambda x: [x.count_nonzero(), x.count_nonzero(1)], [R], ALL, low=0, high=2, grad=False),
    "median": Row(lambda x: [x.median(), *x.median(1)], [R], [torch.float32, torch.int64], grad=False),
    "cumsum": Row(lambda x: [x.cumsum(1), x.cumsum(-1)], [R], NUMBERS, [[()], [(0,)]]),
    "cumprod": Row(lambda x: [x.cumprod(1)], [(3, 4)], [torch.float32, torch.float64, torch.int64], low=1),
    "cummax": Row(lambda x: [*x.cummax(1), *x.cummin(0)], [R], [torch.float32, torch.int64], grad=False),
    "logcumsumexp": Row(lambda x: x.logcumsumexp(1), [R], EXACT),
    "trace": Row(lambda x: x.trace(), [(3, 4)], [torch.float32, torch.int64]),
    "diff": Row(lambda x: [x.diff(), x.diff(dim=0)], [R], [torch.float32, torch.int64]),
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions(name):
    run(REDUCTIONS[name])


def test_reductions_out():
    for f, shape in ((torch.sum, (3, 5)), (torch.mean, (3, 5)), (torch.amax, (3, 5)), (torch.logsumexp, (3, 5))):
        for make in (lambda d, s: torch.empty(s, device=d), lambda d, s: torch.zeros(s[::-1], device=d).t(),
                     lambda d, s: torch.empty(0, device=d)):  # fmt: skip
            run(Row(lambda x, f=f, m=make, s=shape: f(x, dim=1, out=m(x.device, s)), [R], [torch.float32], grad=False))


# ---------------------------------------------------------------- matrix products

BF16_SUM = {torch.bfloat16: (1.6e-2, 5e-2)}  # sums of bfloat16 products in another order
MATRIX = {
    "mm": Row(lambda a, b: a @ b, [(3, 4), (4, 5)], [*FLOATS, torch.int64, torch.int32, torch.complex64], [[(0, 4), (4, 5)], [(3, 0), (0, 5)], [(3, 4), (4, 0)]]),
    "mv": Row(lambda a, b: [a @ b, b @ a.t()], [(3, 4), (4,)], [*FLOATS, torch.int64], [[(3, 0), (0,)]]),
    "dot": Row(lambda a, b: [a.dot(b), torch.vdot(a, b), torch.inner(a, b)], [(4,), (4,)], [*FLOATS, torch.int64], [[(0,), (0,)]]),
    "outer": Row(lambda a, b: torch.outer(a, b), [(3,), (4,)], [*FLOATS, torch.int64]),
    "bmm": Row(lambda a, b: torch.bmm(a, b), [(2, 3, 4), (2, 4, 5)], [*FLOATS, torch.int64], [[(0, 3, 4), (0, 4, 5)], [(2, 3, 0), (2, 0, 5)]]),
    "bmm of one": Row(lambda a, b: [torch.bmm(a, b), torch.bmm(a.mT, b.mT)], [(1, 8, 8), (1, 8, 8)], FLOATS),
    "bmm of one, transposed": Row(lambda a, b: [a.mT @ b, a.mT.reshape(1, 1, 8, 12) @ b], [(1, 12, 8), (1, 12, 5)], FLOATS),
    "matmul": Row(lambda a, b: a @ b, [(2, 1, 3, 4), (5, 4, 2)], FLOATS, [[(4,), (2, 4, 3)], [(2, 3, 4), (4,)]]),
    "addmm": Row(lambda c, a, b: [torch.addmm(c, a, b), torch.addmm(c, a, b, beta=0.5, alpha=2), torch.addmm(c, a, b, beta=0)], [(5,), (3, 4), (4, 5)], FLOATS),
    "addmv": Row(lambda c, a, b: torch.addmv(c, a, b, beta=2, alpha=3), [(3,), (3, 4), (4,)]),
    "addbmm": Row(lambda c, a, b: [torch.baddbmm(c, a, b, alpha=2), torch.addbmm(c, a, b)], [(3, 5), (2, 3, 4), (2, 4, 5)]),
    "addr": Row(lambda c, a, b: torch.addr(c, a, b), [(3, 4), (3,), (4,)]),
    "linear": Row(lambda x, w, b: [F.linear(x, w, b), F.linear(x, w)], [(2, 3, 4), (5, 4), (5,)], FLOATS, [[(4,), (5, 4), (5,)]]),
    "bilinear": Row(lambda x, y, w: F.bilinear(x, y, w), [(2, 3), (2, 4), (5, 3, 4)], EXACT),
    "einsum": Row(lambda a, b: [torch.einsum("bij,bjk->bik", a, b), torch.einsum("bij,bjk->ik", a, b)], [(2, 3, 4), (2, 4, 5)]),
    "chain": Row(lambda a, b, c: torch.linalg.multi_dot([a, b, c]), [(3, 4), (4, 5), (5, 2)], EXACT),
    "tensordot": Row(lambda a, b: torch.tensordot(a, b, 2), [(2, 3, 4), (3, 4, 5)]),
    "kron": Row(torch.kron, [(2, 3), (3, 2)], [torch.float32, torch.int64]),
    "matrix_power": Row(lambda a: torch.linalg.matrix_power(a, 3), [(3, 3)], EXACT),
}  # fmt: skip
for row in MATRIX.values():
    row.tolerance = BF16_SUM


@pytest.mark.parametrize("name", MATRIX)
def test_matrix_products(name):
    run(MATRIX[name])


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


OUT_DTYPES = {
    "neg": lambda x, o: torch.neg(x, out=o),
    "exp": lambda x, o: torch.exp(x, out=o),
    "clamp": lambda x, o: torch.clamp(x, 0, 1, out=o),
    "add": lambda x, o: torch.add(x, x, out=o),
    "signbit": lambda x, o: torch.signbit(x, out=o),
    "any": lambda x, o: torch.any(x, 0, out=o),
    "argmax": lambda x, o: torch.argmax(x, 0, out=o),
    "max": lambda x, o: torch.max(x, out=o),
    "sum": lambda x, o: torch.sum(x, 0, out=o),
    "cumsum": lambda x, o: torch.cumsum(x, 0, out=o),
    "mm": lambda x, o: torch.mm(x, x, out=o),
    "cat": lambda x, o: torch.cat([x, x], out=o),
    "nonzero": lambda x, o: torch.nonzero(x, out=o),
    "gather": lambda x, o: torch.gather(x, 0, torch.zeros(1, 3, dtype=torch.int64, device=x.device), out=o),
    "softmax": lambda x, o: torch.softmax(x, 0, out=o),
    "tril": lambda x, o: torch.tril(x, out=o),
    "searchsorted": lambda x, o: torch.searchsorted(x.sort()[0], x, out=o),
    "full": lambda x, o: torch.full((3,), 2.0, out=o),
    "linspace": lambda x, o: torch.linspace(0, 3, 4, out=o),
}


@pytest.mark.parametrize("name", OUT_DTYPES)
def test_out_dtypes(name):
    x = torch.tensor([[0.5, -1.5, 2.25], [1.75, 0.0, -3.0], [4.5, 2.0, 1.0]])
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool):
        if dtype == torch.bool and name in ("cumsum", "linspace"):
            continue  # the CPU has no such kernel
        expected = outcome(OUT_DTYPES[name], x, torch.empty(0, dtype=dtype))
        got = outcome(OUT_DTYPES[name], x.to(DEVICE), torch.empty(0, dtype=dtype, device=DEVICE))
        assert type(got) is type(expected), f"{dtype}: {got!r}, on the CPU {expected!r}"
        if isinstance(expected, torch.Tensor):
            assert_same(got, expected, f"{dtype}", strides=name != "nonzero")


def test_the_dtype_of_out_is_what_dtype_says():
    x = torch.ones(3)
    for dtype in (torch.float32, torch.float64):
        for f in (torch.cumsum, torch.cumprod, torch.sum):
            expected = outcome(f, x, 0, dtype=torch.float64, out=torch.empty(0, dtype=dtype))
            got = outcome(f, x.to(DEVICE), 0, dtype=torch.float64, out=torch.empty(0, dtype=dtype, device=DEVICE))
            assert type(got) is type(expected), f"{f.__name__} {dtype}: {got!r}, on the CPU {expected!r}"


def test_linspace_of_integers():
    for first, last, steps in ((50, 1, 50), (0, 7, 23), (-5, 99, 50)):
        got, expected = (torch.linspace(first, last, steps, dtype=torch.int64, device=d) for d in (DEVICE, "cpu"))
        assert_same(got, expected, f"{first} {last} {steps}")


def test_as_strided_scatter_writes_where_the_storage_is():
    def f(x):
        return x[:, ::2].as_strided_scatter(torch.ones(2, 2, device=x.device), (2, 2), (3, 1), 1)

    x = torch.rand(4, 6)
    assert_same(f(x.to(DEVICE)), f(x))


def test_gradients_of_dropout_in_integers():
    def f(x):
        return aten.native_dropout_backward(x, x > 2, 2.0)

    assert_same(f(torch.arange(5).to(DEVICE)), f(torch.arange(5)))


COUNTED_OUT = {
    "arange": lambda o: torch.arange(6.0, out=o),
    "linspace": lambda o: torch.linspace(0, 5, 6, out=o),
    "logspace": lambda o: torch.logspace(0, 2, 6, out=o),
}


@pytest.mark.parametrize("name", COUNTED_OUT)
def test_out_of_as_many_elements_keeps_its_shape(name):
    for make in (lambda d: torch.empty(2, 3, device=d), lambda d: torch.empty(3, 2, device=d).t(),
                 lambda d: torch.ones(6, 2, device=d)[:, 1], lambda d: torch.empty(0, 2, device=d)):  # fmt: skip
        got, expected = make(DEVICE), make("cpu")
        COUNTED_OUT[name](got)
        COUNTED_OUT[name](expected)
        assert_same(got, expected, rtol=1e-5, atol=1e-5)


RESIZED_OUT = {
    "add": lambda x, o: torch.add(x, 1, out=o),
    "transform": lambda x, o: torch.fft.ifft(x, dim=0, out=o.to(torch.complex64)),
    "real transform": lambda x, o: torch.fft.rfft(x, dim=0, out=o.to(torch.complex64)),
    "cat": lambda x, o: torch.cat([x[None, None], x[None, None]], 1, out=o),
    "nonzero": lambda x, o: torch.nonzero(x, out=o.long()),
    "inverse": lambda x, o: torch.linalg.inv(x[:3] + 4 * torch.eye(3, device=x.device), out=o),
}


@pytest.mark.parametrize("name", RESIZED_OUT)
def test_out_that_is_resized_takes_the_strides_of_a_new_result(name):
    x = torch.rand(3, 4, generator=torch.Generator().manual_seed(1)).t()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for size in ((0,), (7, 2)):
            expected = RESIZED_OUT[name](x, torch.ones(size))
            got = RESIZED_OUT[name](to_device(x), torch.ones(size, device=DEVICE))
            assert_same(got, expected, f"{size}", rtol=1e-5, atol=1e-5)


OVERLAPS = {
    "masked_select": lambda x: torch.masked_select(x, x > 0, out=x.view(-1)),
    "cat": lambda x: torch.cat([x, x], out=x),
    "gather": lambda x: torch.gather(x, 0, torch.zeros(3, 4, dtype=torch.long, device=x.device), out=x),
    "take": lambda x: torch.take(x, torch.zeros(3, 4, dtype=torch.long, device=x.device), out=x),
    "kthvalue": lambda x: torch.kthvalue(x, 1, out=(x[0], torch.empty(3, dtype=torch.long, device=x.device))),
}


@pytest.mark.parametrize("name", OVERLAPS)
def test_out_may_not_be_what_is_read(name):
    x = torch.rand(3, 4)
    with pytest.raises(RuntimeError, match="refer to a single memory location"):
        OVERLAPS[name](x)
    with pytest.raises(RuntimeError, match="refer to a single memory location"):
        OVERLAPS[name](x.to(DEVICE))


TRANSFORMS = {
    "one": lambda x: torch.fft.fftn(x, dim=[1]),
    "two": lambda x: torch.fft.fftn(x, dim=[2, 0]),
    "real": lambda x: torch.fft.rfftn(x, dim=[0, 2]),
    "real, the other way": lambda x: torch.fft.rfftn(x, dim=[2, 0]),
    "to real": lambda x: torch.fft.irfftn(x, dim=[2, 0]),
    "to real, one": lambda x: torch.fft.irfftn(x, dim=[1]),
    "hermitian": lambda x: torch.fft.hfftn(x, dim=[0, 1]),
    "all": torch.fft.fftn,
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_strides_of_fourier_transforms(name):
    plain = torch.rand(3, 4, 5, 2, generator=torch.Generator().manual_seed(1))
    for x in (plain, plain.transpose(0, 2), plain.permute(3, 1, 0, 2)):
        assert_same(TRANSFORMS[name](to_device(x)), TRANSFORMS[name](x), f"{x.stride()}", rtol=1e-4, atol=1e-4)


def test_strides_of_unique_slices():
    x = torch.randint(3, (5, 40, 2), generator=torch.Generator().manual_seed(1))
    for dim in (0, 1, 2, None):
        for f in (torch.unique, torch.unique_consecutive):
            got, expected = f(x.to(DEVICE), dim=dim, return_inverse=True), f(x, dim=dim, return_inverse=True)
            for g, e in zip(got, expected, strict=True):
                assert_same(g, e, f"{f.__name__} {dim}")


REFUSED_NUMBERS = {
    "softshrink": lambda x: F.softshrink(x, -0.5),
    "softshrink, not a number": lambda x: F.softshrink(x, float("nan")),
    "huber": lambda x: F.huber_loss(x, x, delta=0),
    "smooth l1": lambda x: F.smooth_l1_loss(x, x, beta=-1),
    "unpool": lambda x: aten.max_unpool3d(
        x[None, None, None],
        torch.zeros(1, 1, 1, 3, 4, dtype=torch.long, device=x.device),
        [2, 3, 4],
        [0, 1, 1],
        [0, 0, 0],
    ),
    "dimensions": lambda x: torch.amax(x[(..., *[None] * 63)], dim=0),
}


@pytest.mark.parametrize("name", REFUSED_NUMBERS)
def test_refused_numbers(name):
    x = torch.rand(3, 4)
    expected, got = outcome(REFUSED_NUMBERS[name], x), outcome(REFUSED_NUMBERS[name], x.to(DEVICE))
    assert isinstance(expected, RuntimeError)
    assert type(got) is type(expected) or isinstance(got, type(expected))
    assert str(got).startswith(str(expected).splitlines()[0][:40])


def test_matrix_products_out():
    for make in (lambda d: torch.empty(3, 5, device=d), lambda d: torch.zeros(5, 3, device=d).t(),
                 lambda d: torch.zeros(3, 10, device=d)[:, ::2], lambda d: torch.empty(0, device=d)):  # fmt: skip
        run(Row(lambda a, b, m=make: torch.mm(a, b, out=m(a.device)), [(3, 4), (4, 5)], [torch.float32], grad=False))


def test_products_in_true_float32():
    """The default precision is PyTorch's "highest"."""
    a, b = torch.randn(64, 256), torch.randn(256, 64)
    exact = (a.double() @ b.double()).float()
    assert (a.to(DEVICE) @ b.to(DEVICE)).cpu().sub(exact).abs().max() < 2e-4


# ---------------------------------------------------------------- convolutions


def conv(rank, channels=(4, 6), size=6, kernel=3, groups=1, batch=2, bias=True, transposed=False, **options):
    f = getattr(F, f"conv_transpose{rank}d" if transposed else f"conv{rank}d")
    weight = (channels[0], channels[1] // groups) if transposed else (channels[1], channels[0] // groups)
    args = [(batch, channels[0], *[size] * rank), (*weight, *[kernel] * rank), *([(channels[1],)] if bias else [])]
    call = partial(lambda f, g, o, *a: f(*a, groups=g, **o), f, groups, options)
    tolerance = {torch.float32: (1e-5, 2e-5), **BF16_SUM}
    return Row(call, args, [torch.float32, torch.float64], low=-1, high=1, tolerance=tolerance, layouts=False)


CONVOLUTIONS = {
    "1d": conv(1, padding=1),
    "1d stride": conv(1, stride=2, bias=False),
    "1d same": conv(1, padding="same", dilation=2),
    "1d causal": conv(1, padding=2, dilation=2),
    "1d transposed": conv(1, transposed=True, stride=2, padding=1, output_padding=1),
    "2d": conv(2, padding=1),
    "2d no padding": conv(2),
    "2d stride": conv(2, stride=2, padding=1),
    "2d odd": conv(2, size=7, stride=(2, 3), padding=(1, 0), dilation=(1, 2)),
    "2d dilated": conv(2, dilation=2, padding=2),
    "2d grouped": conv(2, groups=2, padding=1),
    "2d depthwise": conv(2, channels=(4, 4), groups=4, padding=1),
    "2d depthwise multiplied": conv(2, channels=(3, 6), groups=3),
    "2d pointwise": conv(2, kernel=1),
    "2d unbatched": Row(lambda x, w: F.conv2d(x, w), [(3, 5, 5), (2, 3, 3, 3)], EXACT, layouts=False),
    "2d transposed": conv(2, transposed=True, stride=2, padding=1, output_padding=1),
    "2d transposed grouped": conv(2, transposed=True, groups=2, dilation=2),
    "3d": conv(3, size=4, padding=1, channels=(2, 3)),
    "3d transposed": conv(3, size=3, transposed=True, stride=2, channels=(2, 3)),
    "empty batch": conv(2, batch=0, padding=1),
}
CONVOLUTIONS["2d"].dtypes = FLOATS


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(name):
    run(CONVOLUTIONS[name])


def test_gradients_of_determinants_in_other_strides():
    x = torch.eye(3) + torch.rand(2, 3, 3, generator=torch.Generator().manual_seed(1)) / 5
    for f in (torch.linalg.det, lambda x: torch.linalg.slogdet(x)[1], torch.linalg.inv):
        results = []
        for device in ("cpu", DEVICE):
            leaf = x.mT.contiguous().to(device).mT.detach().requires_grad_()
            f(leaf).sum().backward()
            results.append(leaf.grad.cpu())
        torch.testing.assert_close(results[1], results[0])


# ---------------------------------------------------------------- normalisation, pooling

SUMS = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (2e-2, 3e-2)}


def batch_norm(x, w, b, training=True):
    mean, var = torch.zeros(4, device=x.device, dtype=w.dtype), torch.ones(4, device=x.device, dtype=w.dtype)
    y = F.batch_norm(x, mean, var, w, b, training, 0.2)
    return [y, mean, var]


def batch_norm_out(x):
    mean, var = torch.zeros(4, device=x.device), torch.ones(4, device=x.device)
    out, save_mean, save_invstd = (torch.empty(0, device=x.device) for _ in range(3))
    f = aten.native_batch_norm.out
    f(x, None, None, mean, var, True, 0.2, 1e-5, out=out, save_mean=save_mean, save_invstd=save_invstd)
    return [out, save_mean, save_invstd, mean, var]


NORMS = {
    "batch_norm": Row(batch_norm, [(3, 4, 5), (4,), (4,)], FLOATS, [[(3, 4), (4,), (4,)], [(2, 4, 3, 3), (4,), (4,)]]),
    "batch_norm eval": Row(partial(batch_norm, training=False), [(3, 4, 5), (4,), (4,)], FLOATS),
    "batch_norm without statistics": Row(lambda x: F.batch_norm(x, None, None, training=True), [(3, 4, 5)], EXACT),
    # The CPU's own form reads a transposed input in the wrong order.
    "batch_norm out": Row(batch_norm_out, [(3, 4, 5)], [torch.float32], grad=False, layouts=False),
    "instance_norm": Row(lambda x, w: F.instance_norm(x, weight=w, bias=w), [(2, 4, 5), (4,)], EXACT),
    "layer_norm": Row(lambda x, w, b: F.layer_norm(x, (4, 5), w, b), [(3, 4, 5), (4, 5), (4, 5)], FLOATS, [[(0, 4, 5), (4, 5), (4, 5)]]),
    "layer_norm plain": Row(lambda x: F.layer_norm(x, (5,), eps=1e-3), [(3, 4, 5)], FLOATS),
    "group_norm": Row(lambda x, w, b: F.group_norm(x, 2, w, b), [(3, 4, 5), (4,), (4,)], FLOATS),
    "rms_norm": Row(lambda x, w: F.rms_norm(x, (5,), w), [(3, 4, 5), (5,)], FLOATS),
    "normalize": Row(lambda x: F.normalize(x, dim=1), [(3, 4, 5)]),
    "local_response_norm": Row(lambda x: F.local_response_norm(x, 3), [(2, 4, 5)], EXACT),
}  # fmt: skip
POOLS = {
    "max 1d": Row(lambda x: F.max_pool1d(x, 3, 2, 1), [(2, 3, 8)], EXACT),
    "max 2d": Row(lambda x: F.max_pool2d(x, 2), [(2, 3, 6, 6)], FLOATS, [[(3, 6, 6)]]),
    "max 2d indices": Row(lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True), [(2, 3, 7, 7)], EXACT),
    "max 2d dilated": Row(lambda x: F.max_pool2d(x, 2, 1, dilation=2, ceil_mode=True), [(2, 3, 7, 7)], EXACT),
    "max 3d": Row(lambda x: F.max_pool3d(x, 2), [(2, 3, 4, 4, 4)], EXACT),
    "avg 1d": Row(lambda x: F.avg_pool1d(x, 3, 2, 1), [(2, 3, 8)], EXACT),
    "avg 2d": Row(lambda x: F.avg_pool2d(x, 2), [(2, 3, 6, 6)], FLOATS),
    "avg 2d odd": Row(lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False), [(2, 3, 7, 7)], EXACT),
    "avg 2d divisor": Row(lambda x: F.avg_pool2d(x, 2, divisor_override=3), [(2, 3, 6, 6)], EXACT),
    "avg 3d": Row(lambda x: F.avg_pool3d(x, 2), [(2, 3, 4, 4, 4)], EXACT),
    "adaptive avg 1d": Row(lambda x: F.adaptive_avg_pool1d(x, 3), [(2, 3, 8)], EXACT),
    "adaptive avg 2d": Row(lambda x: F.adaptive_avg_pool2d(x, (3, 2)), [(2, 3, 7, 5)], EXACT),
    "global avg": Row(lambda x: F.adaptive_avg_pool2d(x, 1), [(2, 3, 7, 5)], FLOATS, strides="the CPU keeps channels last for one pixel"),
    "adaptive max 2d": Row(lambda x: F.adaptive_max_pool2d(x, (3, 2)), [(2, 3, 7, 5)], EXACT),
    "interpolate nearest": Row(lambda x: F.interpolate(x, scale_factor=2), [(2, 3, 4, 4)], EXACT),
    "interpolate bilinear": Row(lambda x: F.interpolate(x, size=7, mode="bilinear"), [(2, 3, 4, 4)], EXACT),
    "interpolate corners": Row(lambda x: F.interpolate(x, size=7, mode="bilinear", align_corners=True), [(2, 3, 4, 4)], EXACT),
    "pixel_shuffle": Row(lambda x: [F.pixel_shuffle(x, 2), F.pixel_unshuffle(x, 2)], [(2, 4, 4, 4)], EXACT),
    "pad constant": Row(lambda x: [F.pad(x, (1, 2, -1, 1)), F.pad(x, (1, 1), value=2.5)], [(2, 3, 4)], [*FLOATS, torch.int64]),
    "pad reflect": Row(lambda x: [F.pad(x, (1, 2), mode=m) for m in ("reflect", "replicate", "circular")], [(2, 3, 4)], EXACT),
    "unfold fold": Row(lambda x: [F.unfold(x, 2), F.fold(F.unfold(x, 2), (4, 4), 2)], [(2, 3, 4, 4)], EXACT),
}  # fmt: skip
for row in (*NORMS.values(), *POOLS.values()):
    row.tolerance = SUMS


@pytest.mark.parametrize("name", NORMS)
def test_normalisation(name):
    run(NORMS[name])


@pytest.mark.parametrize("name", POOLS)
def test_pooling_and_padding(name):
    run(POOLS[name])


# ---------------------------------------------------------------- indexing


def ints(*values):
    return torch.tensor(values)


MASK = torch.tensor([[True, False, True, False, False], [False] * 5, [True] * 5, [False, True, False, True, True]])
INDEXING = {
    "embedding": Row(lambda i, w: F.embedding(i, w), [ints([0, 2], [3, 3]), (4, 5)], FLOATS),
    "embedding padding": Row(lambda i, w: F.embedding(i, w, padding_idx=3), [ints([0, 2], [3, 3]), (4, 5)], EXACT),
    "embedding scaled": Row(lambda i, w: F.embedding(i, w, scale_grad_by_freq=True), [ints([0, 2], [3, 3]), (4, 5)], EXACT),
    "embedding int32": Row(lambda i, w: F.embedding(i.int(), w), [ints(1, 0), (4, 5)], EXACT),
    "embedding_bag": Row(lambda i, w: [F.embedding_bag(i, w, mode=m) for m in ("sum", "mean", "max")], [ints([0, 2], [3, 3]), (4, 5)], EXACT),
    "index": Row(lambda x, i: [x[i], x[:, i], x[i, i], x[i[:, None], i], x[..., i]], [(4, 5), ints(0, 3, 3)], [*FLOATS, torch.int64, torch.bool]),
    "index negative": Row(lambda x, i: [x[i], x[:, i]], [(4, 5), ints(-1, -4)], [torch.float32]),
    "index mixed": Row(lambda x, i: [x[i, :, i], x[:, i, 1], x[None, i], x[1, i, ..., 0]], [(4, 5, 6), ints(0, 3, 3)], [torch.float32]),
    "index nothing": Row(lambda x, i: [x[i], x[:, i]], [(4, 5), torch.empty(0, dtype=torch.int64)], [torch.float32]),
    "boolean index": Row(lambda x, m: [x[m], x[m[:, 0]], x[:, m[0]], x[~m]], [(4, 5), MASK], [*FLOATS, torch.int64]),
    "masked_select": Row(lambda x, m: torch.masked_select(x, m), [(4, 5), MASK], [*FLOATS, torch.int64]),
    "nonzero": Row(lambda x: [x.nonzero(), *x.nonzero(as_tuple=True), torch.argwhere(x)], [(4, 5)], [torch.float32, torch.int64, torch.bool], [[()], [(0,)]], low=0, high=1.4, grad=False),
    "index_put": Row(lambda x, i, v: x.index_put((i, i), v), [(4, 5), ints(0, 3, 2), (3,)], [*FLOATS, torch.int64]),
    "index_put accumulate": Row(lambda x, i, v: x.index_put((i,), v, accumulate=True), [(4, 5), ints(0, 3, 3), (3, 5)], [*EXACT, torch.int64]),
    "index_put mask": Row(lambda x, m, v: x.index_put((m,), v), [(4, 5), MASK, ()], EXACT),
    "masked_fill": Row(lambda x, m: [x.masked_fill(m, 2.0), x.masked_fill(m[:, :1], -1)], [(4, 5), MASK], [*FLOATS, torch.int64]),
    "masked_fill tensor": Row(lambda x, m, v: x.masked_fill(m, v), [(4, 5), MASK, ()], EXACT),
    "masked_scatter": Row(lambda x, m, v: x.masked_scatter(m, v), [(4, 5), MASK, (4, 5)], EXACT),
    "gather": Row(lambda x, i: [x.gather(0, i), x.gather(1, i), torch.take_along_dim(x[:2], i, 1)], [(4, 5), ints([0, 3, 1], [2, 2, 0])], [*FLOATS, torch.int64], [[(4, 5), torch.empty(0, 3, dtype=torch.int64)]]),
    "gather 0-dim": Row(lambda x, i: x.gather(0, i), [(), torch.tensor(0)], [torch.float32]),
    "scatter": Row(lambda x, i, s: [x.scatter(0, i, s), x.scatter(1, i, s)], [(4, 5), ints([0, 3, 1], [2, 2, 0]), (2, 3)], [torch.int64], grad=False),
    "scatter unique": Row(lambda x, i, s: [x.scatter(1, i, s), x.scatter(1, i, 2.5)], [(4, 5), ints([0, 3, 1], [2, 4, 0]), (2, 3)], FLOATS),
    "scatter_add": Row(lambda x, i, s: x.scatter_add(1, i, s), [(4, 5), ints([0, 3, 3], [2, 2, 0]), (2, 3)], [*EXACT, torch.int64]),
    "scatter_reduce": Row(lambda x, i, s: [x.scatter_reduce(1, i, s, m) for m in ("sum", "amax", "amin", "prod", "mean")] + [x.scatter_reduce(1, i, s, "amax", include_self=False)], [(4, 5), ints([0, 3, 3], [2, 2, 0]), (2, 3)], EXACT, low=1),
    "index_select": Row(lambda x, i: [x.index_select(0, i), x.index_select(1, i)], [(4, 5), ints(0, 3, 3)], [*FLOATS, torch.int64]),
    "index_add": Row(lambda x, i, s: x.index_add(0, i, s, alpha=2), [(4, 5), ints(0, 3, 3), (3, 5)], [*EXACT, torch.int64]),
    "index_copy": Row(lambda x, i, s: [x.index_copy(0, i, s), x.index_fill(0, i, 7)], [(4, 5), ints(0, 3, 2), (3, 5)], EXACT),
    "take": Row(lambda x, i: [x.take(i), x.put(i, i.to(x.dtype))], [(4, 5), ints(0, 19, 7)], EXACT),
    "one_hot": Row(lambda i: [F.one_hot(i, 4), F.one_hot(i)], [ints([0, 3], [1, 2])], [torch.float32], grad=False, layouts=False),
    "tril": Row(lambda x: [x.tril(), x.triu(1), x.tril(-1), torch.triu(x, -2)], [(4, 5)], [*FLOATS, torch.int64, torch.bool], [[(2, 3, 3)], [(0, 3)]]),
    "diag": Row(lambda x: [x.diagonal(), torch.diag_embed(x), x.diagonal(1), torch.diagflat(x)], [(3, 4)], [torch.float32, torch.int64]),
    "bucketize": Row(lambda x: [torch.searchsorted(torch.tensor([-1.0, 0, 1], device=x.device), x), torch.bucketize(x, torch.tensor([-1.0, 0, 1], device=x.device), right=True)], [(4, 5)], [torch.float32], grad=False),
    "bincount": Row(lambda i: [torch.bincount(i), torch.bincount(i, minlength=9)], [ints(0, 3, 3, 5)], [torch.float32], grad=False, layouts=False),
    "unique": Row(lambda x: [torch.unique(x), *torch.unique(x, return_inverse=True, return_counts=True)], [(4, 5)], [torch.int64, torch.float32], low=0, high=3, grad=False),
    "repeat_interleave": Row(lambda x, r: [x.repeat_interleave(2), x.repeat_interleave(r, dim=0), x.repeat_interleave(3, dim=1)], [(3, 2), ints(2, 0, 1)], [torch.float32, torch.int64]),
}  # fmt: skip


@pytest.mark.parametrize("name", INDEXING)
def test_indexing(name):
    run(INDEXING[name])


def test_item_assignment():
    def assign(x, i, m, v):
        x[1] = 5
        x[:, 0] = v
        x[i] = 7
        x[i, i] = v[0]
        x[m] = -1
        x[..., -1] = torch.arange(4, device=x.device).to(x.dtype)
        x[2:, 1:3] += 1
        x[[0, 1], 2] = 9
        x[None, 0, 0] = 3
        return x

    for dtype in (torch.float32, torch.int64, torch.bfloat16):
        row = Row(assign, [(4, 5), ints(0, 3), MASK, (4,)], [dtype], grad=False)
        run(row)


# ---------------------------------------------------------------- joining, moving, making

MOVING = {
    "cat": Row(lambda x, y: [torch.cat([x, y]), torch.cat([x, y, x], 0)], [(2, 3), (4, 3)], ALL, [[(0, 3), (4, 3)], [(0,), (2, 3)]]),
    "cat dim": Row(lambda x, y: torch.cat([x, y], -1), [(2, 3), (2, 1)], FLOATS),
    "cat types": Row(lambda x: torch.cat([x, x.int(), x.double()]), [(3,)], [torch.float32]),
    "stack": Row(lambda x, y: [torch.stack([x, y]), torch.stack([x, y], -1), torch.hstack([x, y]), torch.vstack([x, y]), torch.dstack([x, y])], [(2, 3), (2, 3)], [torch.float32, torch.int64], [[(), ()]]),
    "split": Row(lambda x: [*x.split(2), *x.chunk(2, 1), *x.split([1, 2], 1), *x.unbind(1), *x.tensor_split(3)], [(5, 3)], ALL),
    "flip": Row(lambda x: [x.flip(0), x.flip((0, 1)), x.fliplr(), x.rot90()], [(2, 3)], ALL),
    "roll": Row(lambda x: [x.roll(1), x.roll((1, -1), (0, 1)), x.roll(5, 1)], [(2, 3)], ALL),
    "repeat": Row(lambda x: [x.repeat(2, 1), x.repeat(2, 1, 3), x.tile(2), x.expand(4, 2, 3).clone()], [(2, 3)], ALL),
    "permute": Row(lambda x: [x.permute(2, 0, 1) + 1, x.transpose(0, 2).contiguous(), x.movedim(0, -1).clone()], [(2, 3, 4)], [torch.float32]),
    "reshape": Row(lambda x: [x.reshape(6, 4), x.flatten(1), x.t().reshape(-1) if x.dim() == 2 else x.mT.reshape(-1)], [(2, 3, 4)], ALL),
    "meshgrid": Row(lambda x, y: [*torch.meshgrid(x, y, indexing="ij"), torch.cartesian_prod(x, y)], [(2,), (3,)], [torch.float32]),
    "select_scatter": Row(lambda x, y: [x.select_scatter(y, 0, 1), x.slice_scatter(y[None], 0, 1, 2), x.diagonal_scatter(y[:2])], [(2, 3), (3,)], EXACT, strides="PyTorch copies the gaps of a view too"),
    "clone": Row(lambda x: [x.clone(), x.contiguous(), x.clone(memory_format=torch.contiguous_format)], [(2, 3)], ALL, EMPTY),
    "like": Row(lambda x: [torch.zeros_like(x), torch.ones_like(x), torch.full_like(x, 3), torch.zeros_like(x, dtype=torch.int32), x.new_ones(2, 2), x.new_full((2,), 5), x.new_tensor([1, 2])], [(2, 3)], ALL, EMPTY, grad=False),
    "unsafe index": Row(lambda x: [aten._unsafe_index(x, [None, torch.tensor([2, 0], device=x.device)]), aten._unsafe_index_put(x, [torch.tensor([1, 1], device=x.device)], x, True)], [(2, 3)], EXACT),
    "sort": Row(lambda x: [*x.sort(), *x.sort(0, descending=True), x.argsort(dim=1, stable=True), x.msort()], [(4, 5)], [torch.float32, torch.bfloat16], [[()], [(0,)], [(3, 0)]]),
    "sort stable": Row(lambda x: [*x.sort(stable=True), *x.sort(0, descending=True, stable=True)], [(9, 5)], [torch.int64, torch.int32, torch.bool], low=0, high=3, grad=False),
    "topk": Row(lambda x: [*x.topk(2), *x.topk(3, 0, largest=False), x.topk(2, sorted=True)[0]], [(4, 5)], [torch.float32, torch.float64]),
    "kthvalue": Row(lambda x: [*x.kthvalue(2), *x.kthvalue(1, 0)], [(4, 5)], EXACT),
    "cdist": Row(lambda x, y: torch.cdist(x, y), [(3, 4), (5, 4)], EXACT, tolerance={torch.float32: (1e-4, 1e-4)}),
    "cross": Row(lambda x, y: torch.linalg.cross(x, y), [(4, 3), (4, 3)], EXACT),
}  # fmt: skip


@pytest.mark.parametrize("name", MOVING)
def test_joining_moving_sorting(name):
    run(MOVING[name])


CREATION = {
    "zeros": lambda d: torch.zeros(2, 3, device=d),
    "ones int": lambda d: torch.ones(2, dtype=torch.int32, device=d),
    "full": lambda d: torch.full((2, 2), 1.5, device=d),
    "full int": lambda d: torch.full((2,), 7, device=d),
    "full bool": lambda d: torch.full((2,), True, device=d),
    "full complex": lambda d: torch.full((2,), 1 + 2j, device=d),
    "arange": lambda d: torch.arange(5, device=d),
    "arange float": lambda d: torch.arange(1, 2, 0.3, device=d),
    "arange down": lambda d: torch.arange(5, -5, -3, device=d),
    "arange empty": lambda d: torch.arange(3, 3, device=d),
    "arange bf16": lambda d: torch.arange(5, device=d, dtype=torch.bfloat16),
    "linspace": lambda d: torch.linspace(-1, 2, 7, device=d),
    "linspace one": lambda d: torch.linspace(-1, 2, 1, device=d),
    "logspace": lambda d: torch.logspace(0, 2, 5, device=d),
    "eye": lambda d: torch.eye(3, 4, device=d),
    "tensor": lambda d: torch.tensor([[1, 2], [3, 4]], device=d),
    "tensor number": lambda d: torch.tensor(2.5, device=d),
    "tensor empty": lambda d: torch.tensor([], device=d),
    "tril_indices": lambda d: torch.tril_indices(3, 4, device=d),
    "hann_window": lambda d: torch.hann_window(5, device=d),
    "scalar_tensor": lambda d: torch.scalar_tensor(3, device=d),
    "empty_strided": lambda d: torch.empty_strided((2, 3), (1, 2), device=d).fill_(1),
    "channels_last": lambda d: torch.empty(2, 3, 4, 4, device=d, memory_format=torch.channels_last).fill_(1),
    "as_tensor": lambda d: torch.as_tensor([1.0, 2.0], device=d),
    "asarray": lambda d: torch.asarray([1.0, 2.0], device=d),
    "complex": lambda d: torch.tensor([1 + 1j], device=d),
}


@pytest.mark.parametrize("name", CREATION)
def test_creation(name):
    assert_same(CREATION[name](DEVICE), CREATION[name]("cpu"), name)


def test_default_dtype():
    try:
        torch.set_default_dtype(torch.float64)
        for f in (lambda d: torch.ones(2, device=d), lambda d: torch.arange(2, device=d) / 2, lambda d: torch.rand(2, device=d) * 0,
                  lambda d: torch.tensor(1.5, device=d) * torch.tensor([1], device=d)):  # fmt: skip
            assert_same(f(DEVICE), f("cpu"))
    finally:
        torch.set_default_dtype(torch.float32)


# ---------------------------------------------------------------- softmax, losses, attention, recurrent cells

CLASSES = ints(1, 0, 4)
LOSSES = {
    "softmax": Row(lambda x: [x.softmax(1), x.softmax(0), x.log_softmax(-1), F.softmin(x, 1)], [(3, 5)], FLOATS, [[()], [(0, 5)], [(3, 0)]]),
    "softmax dtype": Row(lambda x: [x.softmax(1, dtype=torch.float64), x.log_softmax(1, dtype=torch.float32)], [(3, 5)], [torch.float32, torch.bfloat16]),
    "cross_entropy": Row(lambda x, t: [F.cross_entropy(x, t, reduction=r) for r in ("mean", "sum", "none")], [(3, 5), CLASSES], FLOATS),
    "cross_entropy weights": Row(lambda x, t, w: [F.cross_entropy(x, t, w.abs().detach(), label_smoothing=0.1), F.cross_entropy(x, t, w.abs().detach(), ignore_index=0)], [(3, 5), CLASSES, (5,)], EXACT),
    "cross_entropy probabilities": Row(lambda x, p: F.cross_entropy(x, p.softmax(1)), [(3, 5), (3, 5)], EXACT),
    "cross_entropy images": Row(lambda x, t: F.cross_entropy(x, t), [(2, 5, 3), ints([1, 0, 4], [2, 2, 3])], EXACT),
    "cross_entropy all ignored": Row(lambda x, t: F.cross_entropy(x, t, ignore_index=1), [(1, 5), ints(1)], [torch.float32]),
    "nll_loss": Row(lambda x, t: F.nll_loss(x.log_softmax(1), t), [(3, 5), CLASSES], FLOATS),
    "mse": Row(lambda x, y: [F.mse_loss(x, y, reduction=r) for r in ("mean", "sum", "none")], [(3, 5), (3, 5)], FLOATS, [[(0,), (0,)]]),
    "l1": Row(lambda x, y: [F.l1_loss(x, y), F.smooth_l1_loss(x, y, beta=0.5), F.huber_loss(x, y, delta=0.7)], [(3, 5), (3, 5)], EXACT),
    "bce": Row(lambda x, y: [F.binary_cross_entropy(x, y.detach()), F.binary_cross_entropy(x, y.detach(), y.detach())], [(3, 5), (3, 5)], EXACT, low=0.1, high=0.9),
    "bce logits": Row(lambda x, y: [F.binary_cross_entropy_with_logits(x, y.sigmoid().detach(), pos_weight=y.abs()[0].detach()), F.binary_cross_entropy_with_logits(x, y.sigmoid().detach())], [(3, 5), (3, 5)], EXACT),
    "kl_div": Row(lambda x, y: [F.kl_div(x.log_softmax(1), y.softmax(1), reduction="batchmean"), F.kl_div(x, y, log_target=True)], [(3, 5), (3, 5)], EXACT),
    "margin": Row(lambda x, y: [F.margin_ranking_loss(x, y, y.sign().detach()), F.cosine_embedding_loss(x, y, y[:, 0].sign().detach()), F.triplet_margin_loss(x, y, x + y), F.hinge_embedding_loss(x, y.sign().detach())], [(3, 5), (3, 5)], EXACT),
    "multi": Row(lambda x, t: [F.multi_margin_loss(x, t), F.soft_margin_loss(x, x.sign().detach()), F.multilabel_soft_margin_loss(x, (x > 0).to(x.dtype))], [(3, 5), CLASSES], EXACT),
    "gaussian": Row(lambda x, y: [F.gaussian_nll_loss(x, y, y.abs() + 1), F.poisson_nll_loss(x, y.abs())], [(3, 5), (3, 5)], EXACT),
    "cosine": Row(lambda x, y: [F.cosine_similarity(x, y), F.pairwise_distance(x, y)], [(3, 5), (3, 5)], EXACT),
    "ctc": Row(lambda x: F.ctc_loss(x.log_softmax(2), ints([1, 2], [2, 1]).to(x.device), ints(6, 6), ints(2, 2)), [(6, 2, 4)], EXACT),
    "glu": Row(lambda x: [F.glu(x, 1), F.glu(x, 0)], [(4, 6)], FLOATS),
    "prelu": Row(lambda x, w: F.prelu(x, w), [(3, 5), (5,)], EXACT),
    "rrelu eval": Row(lambda x: [F.rrelu(x), F.threshold(x, 0.5, -1), F.hardtanh(x, -2, 0.5)], [(3, 5)], EXACT),
}  # fmt: skip
for row in LOSSES.values():
    row.tolerance = SUMS


@pytest.mark.parametrize("name", LOSSES)
def test_softmax_and_losses(name):
    run(LOSSES[name])


ATTENTION = (2, 3, 4, 8)
sdpa = F.scaled_dot_product_attention
ATTENTIONS = {
    "plain": Row(lambda q, k, v: sdpa(q, k, v), [ATTENTION] * 3, FLOATS),
    "causal": Row(lambda q, k, v: sdpa(q, k, v, is_causal=True), [ATTENTION] * 3, FLOATS),
    "scaled": Row(lambda q, k, v: sdpa(q, k, v, scale=0.3), [ATTENTION] * 3, EXACT),
    "longer keys": Row(lambda q, k, v: sdpa(q, k, v), [ATTENTION, (2, 3, 6, 8), (2, 3, 6, 5)], EXACT),
    "mask": Row(lambda q, k, v, m: sdpa(q, k, v, m > 0.2), [*[ATTENTION] * 3, torch.linspace(0, 1, 16).view(4, 4)], EXACT),
    "float mask": Row(lambda q, k, v, m: sdpa(q, k, v, m), [*[ATTENTION] * 3, (2, 1, 4, 4)], EXACT),
    "grouped": Row(lambda q, k, v: sdpa(q, k, v, enable_gqa=True), [(2, 4, 3, 8), (2, 2, 3, 8), (2, 2, 3, 8)], EXACT),
    "three dimensions": Row(lambda q, k, v: sdpa(q, k, v), [(2, 4, 8)] * 3, EXACT),
    "of the transposed": Row(lambda q, k, v: sdpa(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True).transpose(1, 2).reshape(2, 4, -1), [(2, 4, 3, 8)] * 3, EXACT),
}  # fmt: skip
for row in ATTENTIONS.values():
    row.tolerance = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (3e-2, 3e-2)}
    row.strides = "the CPU's composite, which it takes where elements lie apart, has others than its fused kernel"


@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention(name):
    run(ATTENTIONS[name])


# Queries, keys and values of batch, heads, length, width as projections give them.
HEADS = {
    "row-major": lambda b, h, n, w: torch.rand(b, h, n, w),
    "transposed": lambda b, h, n, w: torch.rand(b, n, h, w).transpose(1, 2),
    "of a joint projection": lambda b, h, n, w: torch.rand(b, n, 3, h, w).permute(2, 0, 3, 1, 4)[1],
    "length first": lambda b, h, n, w: torch.rand(n, b, h, w).permute(1, 2, 0, 3),
    "expanded": lambda b, h, n, w: torch.rand(1, h, n, w).expand(b, h, n, w),
}


@pytest.mark.parametrize("name", HEADS)
def test_attention_keeps_the_order_of_the_heads(name):
    """Strides are those of PyTorch's fused kernel and of the op's meta function, by which `torch.compile` makes views."""
    op = torch.ops.aten._scaled_dot_product_fused_attention_overrideable

    def strides(device, widths, bias):
        q, k, v = (HEADS[name](2, 4, 6, w).to(device) for w in widths)
        mask = torch.zeros(2, 4, 6, 6, device=device) if bias else None
        out, logsumexp, *_, seed, offset, _ = op(q, k, v, mask)
        need = [True, True, True, bias]
        grads = torch.ops.aten._scaled_dot_product_fused_attention_overrideable_backward(
            out, q, k, v, mask, need, out, logsumexp, None, None, 6, 6, 0.0, False, seed, offset
        )
        return [t.stride() for t in (out, logsumexp, *grads) if t is not None]

    for widths in ((8, 8, 8), (8, 8, 5)):
        for bias in (False, True):
            assert strides(DEVICE, widths, bias) == strides("meta", widths, bias), (widths, bias)
    q = HEADS[name](2, 4, 6, 8)
    assert sdpa(*[to_device(q)] * 3).stride() == sdpa(q, q, q).stride()


@pytest.mark.parametrize(
    "kernel", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "OVERRIDEABLE", "MATH"]
)
def test_attention_by_the_name_of_a_kernel(kernel):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q = torch.ones(1, 2, 4, 8, device=DEVICE)
    with sdpa_kernel(getattr(SDPBackend, kernel)):
        taken = torch._fused_sdp_choice(q, q, q)
    assert taken == (SDPBackend.MATH if kernel == "MATH" else SDPBackend.OVERRIDEABLE).value


def module_results(make, *inputs):
    """Outputs and all gradients of a module on the CPU and on the device, from the same weights."""
    torch.manual_seed(1)
    module = make()
    twin = make().to(DEVICE)
    twin.load_state_dict(module.state_dict())
    results = []
    for m, device in ((module, "cpu"), (twin, DEVICE)):
        args = [i.detach().clone().to(device).requires_grad_() for i in inputs]
        out = tensors(m(*args))
        sum(
            (o * torch.linspace(0, 1, o.numel(), device=device, dtype=o.dtype).view(o.shape)).sum() for o in out
        ).backward()
        results.append(
            out + [a.grad for a in args if a.requires_grad] + [p.grad for p in m.parameters()] + list(m.buffers())
        )
    return results


MODULES = {
    "LSTM": (lambda: torch.nn.LSTM(3, 4, num_layers=2, batch_first=True), [(2, 5, 3)]),
    "LSTM bidirectional": (lambda: torch.nn.LSTM(3, 4, bidirectional=True), [(5, 2, 3)]),
    "GRU": (lambda: torch.nn.GRU(3, 4, num_layers=2), [(5, 2, 3)]),
    "RNN": (lambda: torch.nn.RNN(3, 4, nonlinearity="relu"), [(5, 2, 3)]),
    "LSTMCell": (lambda: torch.nn.LSTMCell(3, 4), [(2, 3)]),
    "GRUCell": (lambda: torch.nn.GRUCell(3, 4), [(2, 3)]),
    "MultiheadAttention": (lambda: Attend(torch.nn.MultiheadAttention(8, 2, batch_first=True)), [(2, 5, 8)]),
    "TransformerEncoderLayer": (lambda: torch.nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), [(2, 5, 8)]),
    "BatchNorm2d": (lambda: torch.nn.BatchNorm2d(3), [(2, 3, 4, 4)]),
    "Bilinear": (lambda: torch.nn.Bilinear(3, 4, 5), [(2, 3), (2, 4)]),
}


class Attend(torch.nn.Module):
    """Attention of a sequence to itself."""

    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, x):
        return self.attention(x, x, x)


@pytest.mark.parametrize("name", MODULES)
def test_modules(name):
    make, shapes = MODULES[name]
    torch.manual_seed(2)
    expected, got = module_results(make, *[torch.randn(s) for s in shapes])
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert_same(a, b, f"{name}, {i}", strides=False, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------- lists of tensors, optimizers

LISTS = {
    "add": lambda a, b: torch._foreach_add(a, b, alpha=2),
    "add number": lambda a, b: torch._foreach_add(a, 2),
    "add numbers": lambda a, b: torch._foreach_add(a, [1.0, 2.0, 3.0]),
    "sub": lambda a, b: torch._foreach_sub(a, b),
    "mul": lambda a, b: torch._foreach_mul(a, b),
    "mul tensor": lambda a, b: torch._foreach_mul(a, torch.tensor(2.0, device=a[0].device)),
    "div": lambda a, b: torch._foreach_div(a, [4.0, 2.0, 1.0]),
    "sqrt": lambda a, b: torch._foreach_sqrt(torch._foreach_abs(a)),
    "exp": lambda a, b: torch._foreach_exp(a),
    "neg": lambda a, b: torch._foreach_neg(a),
    "norm": lambda a, b: torch._foreach_norm(a),
    "norm inf": lambda a, b: torch._foreach_norm(a, float("inf")),
    "lerp": lambda a, b: torch._foreach_lerp(a, b, 0.25),
    "addcmul": lambda a, b: torch._foreach_addcmul(a, b, b, 0.5),
    "addcdiv": lambda a, b: torch._foreach_addcdiv(a, b, torch._foreach_add(torch._foreach_abs(b), 1), [0.5, 1.0, 2.0]),
    "maximum": lambda a, b: torch._foreach_maximum(a, b),
    "clamp": lambda a, b: torch._foreach_clamp_max(a, 0.5),
    "pow": lambda a, b: torch._foreach_pow(torch._foreach_abs(a), 2),
    "in place": lambda a, b: [torch._foreach_add_(a, b), torch._foreach_mul_(a, 2), torch._foreach_addcmul_(a, b, b), a][-1],
    "copy": lambda a, b: [torch._foreach_copy_(a, b), a][-1],
    "zero": lambda a, b: [torch._foreach_zero_(a), a][-1],
}  # fmt: skip


@pytest.mark.parametrize("name", LISTS)
def test_foreach(name):
    def run(device):
        g = torch.Generator().manual_seed(0)
        shapes = [(2, 3), (4,), ()]
        a, b = ([torch.randn(s, generator=g).to(device) for s in shapes] for _ in range(2))
        return list(LISTS[name](a, b))

    for i, (x, y) in enumerate(zip(run(DEVICE), run("cpu"), strict=True)):
        assert_same(x, y, f"{name}, element {i}")


OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "SGD momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}),
    "SGD dampening": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "maximize": True}),
    "Adam": (torch.optim.Adam, {"lr": 0.1}),
    "Adam amsgrad": (torch.optim.Adam, {"lr": 0.1, "amsgrad": True, "weight_decay": 0.1}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.1, "betas": (0.8, 0.9)}),
    "AdamW maximize": (torch.optim.AdamW, {"lr": 0.1, "maximize": True}),
    "AdamW capturable": (torch.optim.AdamW, {"lr": torch.tensor(0.1), "capturable": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.1, "momentum": 0.5, "centered": True}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.1}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.1}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.1}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 0.1}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.1}),
    "ASGD": (torch.optim.ASGD, {"lr": 0.1}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.1}),
}
FUSED = ("SGD", "Adam", "AdamW", "Adagrad")


def step_three_times(make, options, device):
    g = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(s, generator=g).to(device)) for s in [(2, 3), (4,), ()]]
    options = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    optimizer = make(params, **options)
    for _ in range(3):
        for p in params:
            p.grad = torch.randn(p.shape, generator=g).to(device)
        optimizer.step()
    state = [v for p in params for _, v in sorted(optimizer.state[p].items()) if isinstance(v, torch.Tensor)]
    return [p.detach() for p in params] + state


@pytest.mark.parametrize("form", ["single", "foreach", "fused"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name, form):
    make, options = OPTIMIZERS[name]
    if form == "fused" and (make.__name__ not in FUSED or options.get("capturable")):
        with pytest.raises((TypeError, RuntimeError)):
            make([torch.nn.Parameter(torch.ones(1, device=DEVICE))], **options, fused=True, foreach=True)
        return
    chosen = {"foreach": form == "foreach", **({"fused": form == "fused"} if make.__name__ in FUSED else {})}
    plain = {k: v for k, v in options.items() if k != "capturable"}
    expected = step_three_times(make, plain, "cpu")
    got = step_three_times(make, {**options, **chosen}, DEVICE)
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        # Step counts may live on either device, as in PyTorch.
        torch.testing.assert_close(a.cpu(), b, rtol=1e-5, atol=1e-6, msg=lambda m, i=i: f"{name}, {i}: {m}")


@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
@pytest.mark.parametrize("where", ["cpu", DEVICE])
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad])
def test_fused_optimizers_take_the_rate_as_a_tensor(make, where, shape):
    """On either device, and of any shape with one element, as on CUDA; the rate may change."""

    def steps(device, rate, **options):
        p = torch.nn.Parameter(torch.arange(3.0, device=device))
        optimizer = make([p], lr=rate, **options)
        for factor in (1, 0.5):
            rate.mul_(factor)
            p.grad = torch.ones_like(p)
            optimizer.step()
        return p.detach()

    expected = steps("cpu", torch.full(shape, 0.1), foreach=False)
    assert_same(steps(DEVICE, torch.full(shape, 0.1, device=where), fused=True), expected)


def test_the_default_optimizer_runs_on_lists():
    """PyTorch picks the foreach form for the device by itself: programs stay few."""
    params = [torch.nn.Parameter(torch.ones(3, device=DEVICE)) for _ in range(4)]
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer = torch.optim.AdamW(params)
    optimizer.step()
    torch.tpu.reset_metrics()
    optimizer.step()
    assert torch.tpu.metrics()["ops"] < 4 * 10


def test_gradient_clipping():
    for form in (True, False):
        norms = []
        for device in ("cpu", DEVICE):
            params = [torch.nn.Parameter(torch.ones(s, device=device)) for s in [(2, 3), (4,)]]
            for p in params:
                p.grad = torch.full_like(p, 3.0)
            norms.append(torch.nn.utils.clip_grad_norm_(params, 1.0, foreach=form))
            torch.nn.utils.clip_grad_value_(params, 0.2, foreach=form)
            assert all(abs(g - 0.2) < 1e-6 for p in params for g in p.grad.flatten().tolist())
        assert_same(norms[1], norms[0])


def test_nothing_above_ran_on_the_cpu():
    """Ops of the models that the device is built for; the rest of this file may fall back and is counted."""
    torch.tpu.reset_metrics()
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
        torch.nn.Flatten(), torch.nn.LayerNorm(16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 5),
    ).to(DEVICE)  # fmt: skip
    loss = F.cross_entropy(model(torch.randn(2, 3, 4, 4, device=DEVICE)), torch.tensor([1, 4], device=DEVICE))
    loss.backward()
    assert torch.tpu.metrics()["fallbacks"] == {}


FOREACH = [torch.arange(1.0, 5.0), torch.full((2, 3), 2.0), torch.tensor(3.0)]


@pytest.mark.parametrize("name", ["_foreach_addcmul", "_foreach_addcdiv"])
def test_numbers_of_foreach_ops_come_in_any_dtype(name):
    """One list after the other in one process: numbers of Python, and tensors of numbers here and there."""
    ours = [[to_device(x) for x in xs] for xs in (FOREACH, FOREACH, FOREACH)]
    numbers = [[0.5, -2.0, 3.0], [1, 2, 3]]
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8]
    numbers += [torch.tensor([2, 0, 3], dtype=dtype) for dtype in dtypes]
    for given in numbers:
        wanted = getattr(torch, name)(FOREACH, FOREACH, FOREACH, given)
        places = [given] if isinstance(given, list) else [given, to_device(given)]
        for there in places:
            for got, want in zip(getattr(torch, name)(*ours, there), wanted, strict=True):
                torch.testing.assert_close(got.cpu(), want)
