"""Operations on the device against PyTorch on the CPU: dtype, sizes, strides, values; gradients, `out=`, in place.

A row is a function of tensors and the sizes of its arguments. It runs with each dtype on contiguous arguments, and in
float32 on transposed and on sliced ones, and on every other set of sizes that it names (0-dim, empty, broadcast).
"""

import copy
import warnings
from dataclasses import dataclass, field

import torch
from support import DEVICE, assert_same, outcome, tensors, to_device

aten = torch.ops.aten

HALF = [torch.bfloat16]
FLOATS = [torch.float32, torch.float64, torch.bfloat16]
INTS = [torch.int64, torch.int32, torch.uint8]
NUMBERS = FLOATS + INTS
ALL = [*NUMBERS, torch.bool]
EXACT = [torch.float32, torch.float64]
COMPLEX = [torch.complex64]

# Sizes of no elements, and of one without dimensions.
EMPTY = [[()], [(0,)], [(2, 0, 3)]]


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


def compare(f, args, row, what):
    """Records the call; from the `yield` on looks at what it gave."""
    moved = to_device(args)  # before the call: it may write to its arguments
    first = args[0].dtype if isinstance(args[0], torch.Tensor) else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = outcome(f, *copy.deepcopy(args))
        got = outcome(f, *moved)
    yield
    if isinstance(expected, Exception):
        assert type(got) is type(expected), f"{what}: {got!r}, on the CPU {expected!r}"
        return
    if isinstance(got, Exception):
        raise AssertionError(f"{what}: {got}") from got
    rtol, atol = row.tolerance.get(first, (None, None))
    pairs = list(zip(tensors(got), tensors(expected), strict=True))
    for i, (a, b) in enumerate(pairs):
        assert_same(a, b, f"{what}, result {i}", strides=not row.strides, rtol=rtol, atol=atol)
    if not pairs:
        assert got == expected, what


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
    """The same of the gradients."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = gradients(f, args, "cpu")
        got = gradients(f, args, DEVICE)
    yield
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


def forms(row):
    """The row in all its forms, each recorded and then compared."""
    for dtype in row.dtypes:
        args = arguments(row, row.args, dtype)
        yield compare(row.f, args, row, f"{dtype}")
        if row.grad and (dtype.is_floating_point or dtype.is_complex):
            yield compare_gradients(row.f, args, row, f"{dtype}")
    first = row.dtypes[0]
    if row.layouts:
        for layout in (transposed, sliced):
            yield compare(row.f, arguments(row, row.args, first, layout), row, layout.__name__)
        if row.grad and first.is_floating_point:
            yield compare_gradients(row.f, arguments(row, row.args, first, transposed), row, "transposed")
    for specs in row.also:
        args = arguments(row, specs, first)
        yield compare(row.f, args, row, f"sizes {[s if isinstance(s, tuple) else '...' for s in specs]}")


def run(row):
    """Runs a row in all its forms; raises once, with everything that was wrong.

    All are recorded before one is read, so that they are one program: most of the time goes into compiling.
    """
    wrong = []

    def attempt(form):
        try:
            next(form, None)
        except Exception as e:
            wrong.append(f"{type(e).__name__} {e}".strip().partition("\nassert ")[0])

    recorded = list(forms(row))
    for _ in ("recorded", "compared"):
        for form in recorded:
            attempt(form)
    assert not wrong, f"{len(wrong)} of its forms are wrong\n" + "\n\n".join(wrong)


BF16_SUM = {torch.bfloat16: (1.6e-2, 5e-2)}  # sums of bfloat16 products in another order


def ints(*values):
    return torch.tensor(values)
