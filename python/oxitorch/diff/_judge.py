"""Whether what an operation gave is what it should have given for its own inputs.

The referee is the same operation in float64 on the CPU. What float arithmetic may be off from that has a bound:

    products and sums     (4 sqrt(n) + 2) u |x| |y|, and operands rounded to fewer bits
    everything else       (4 sqrt(n) + 2) u |result|, and four times how far an element moves when each input moves by
                          one unit in its last place, and four roundings of numbers as large as its inputs; where
                          elements meet, 16 times, and inputs move by a unit of the largest of them

n is how many numbers an element sums, u half the epsilon of the dtype. That sums err by sqrt(n) and not by n is Higham
and Mary, "A New Approach to Probabilistic Rounding Error Analysis", SIAM J. Sci. Comput. 41 (2019).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from oxitorch.diff import _kinds
from oxitorch.diff._trace import Trace, decode

_SQRT = 4
_SHAKES = 3
# How many times as far as inputs that move by a unit rounding may move a result: where elements meet, numbers are
# rounded more than once between input and result.
_MOVES, _MEET = 4, 16
_WIDER = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}


@dataclass
class Worst:
    """The element that is farthest off, in units of what is allowed."""

    result: int
    index: list[int]
    got: float
    want: float
    error: float
    bound: float
    wrong: int
    of: int

    @property
    def ratio(self) -> float:
        return math.inf if self.bound == 0 and self.error else self.error / self.bound if self.bound else 0.0


class Unjudged(Exception):
    """There is no referee for this operation; the text says why."""


def check(trace: Trace, op: dict, exact: bool = True) -> Worst:
    """How far the results of an operation are from the referee's for the same inputs.

    Args:
        exact: whether the bound is wanted of an operation that is right, too. Otherwise a smaller one may do, which
            costs less: no result is wrong by the bound that is right by a smaller one.

    Raises:
        Unjudged: the operation draws numbers, or the CPU does not know it.
    """
    if op.get("draws"):
        raise Unjudged("it draws random numbers")
    func, args, kwargs = call(trace, op)
    got = [trace.tensor(v) for v in op["results"]]
    want = _referee(func, args, kwargs, got)
    return _worst(trace, op, func, args, kwargs, got, want, exact)


def _worst(trace: Trace, op: dict, func, args, kwargs, got, want, exact: bool) -> Worst:
    """The worst element of all results that can be compared, by the first bound that all keep or by the last."""
    places = []
    for i, (g, w) in enumerate(zip(got, want, strict=False)):
        if g.shape == w.shape and g.numel() and not _is_place(op, i):
            places.append(i)
        elif g.shape != w.shape and g.numel() and w.numel():
            raise Unjudged(f"the CPU gives result {i} the shape {tuple(w.shape)}, it has {tuple(g.shape)}")
    if not places:
        raise Unjudged("nothing that it gives can be compared")
    steps = bounds(trace, func, args, kwargs, got, want)
    if exact:
        *_, last = steps
        steps = iter([last])
    for allowed in steps:
        worst = max((measure(i, got[i], want[i], allowed[i]) for i in places), key=lambda w: w.ratio)
        if worst.ratio <= 1:
            break
    return worst


def call(trace: Trace, op: dict, device: str = "cpu"):
    """The operation and its arguments as they were, on a device.

    Raises:
        Unjudged: it has an argument that is not kept, or is not known here.
    """
    func = _operator(op["name"])
    try:
        args = decode(op["args"], lambda x: _tensor(trace, x, device), device)
        kwargs = {k: decode(v, lambda x: _tensor(trace, x, device), device) for k, v in op["kwargs"].items()}
    except ValueError as e:
        raise Unjudged(str(e)) from None
    return func, args, kwargs


def _referee(func, args, kwargs, got: list[torch.Tensor]) -> list[torch.Tensor]:
    """What the operation should give: in float64, but where only the dtype itself gives the answer."""
    if _kinds.base(func.name()) in _kinds.OF_DTYPE or not any(t.is_floating_point() or t.is_complex() for t in got):
        return run(func, _copied(args), _copied(kwargs))
    return run(func, _widened(args), _widened(kwargs))


def run(func, args, kwargs) -> list[torch.Tensor]:
    """The results of a call on the host.

    Raises:
        Unjudged: the call fails.
    """
    instead = _INSTEAD.get(func.name())
    try:
        with torch.no_grad():
            returned = (instead or func)(*args, **kwargs)
    except (RuntimeError, ValueError, TypeError, IndexError) as e:
        raise Unjudged(f"{func.name()} does not run alone: {str(e).splitlines()[0]}") from None
    return [t.cpu() for t in _kinds.results(func, args, kwargs, returned)]


def bounds(trace: Trace, func, args, kwargs, got, want) -> Iterator[list[torch.Tensor]]:
    """What each element of each result may be off, in float64: smaller bounds that cost less, then the bound itself."""
    header, name = trace.header, func.name()
    results = list(zip(got, want, strict=False))
    floats = [g for g, _ in results if g.is_floating_point() or g.is_complex()]
    if not floats:
        yield [torch.zeros(g.shape, dtype=torch.float64) for g, _ in results]
        return
    coarse = max(torch.finfo(t.dtype).eps for t in (*_floats(args, kwargs), *floats))
    unit = coarse / 2
    # Operands of less than float32 have no more bits than they are rounded to.
    operands = header.get("operand_error", 0.0) if coarse <= torch.finfo(torch.float32).eps else 0.0
    rounded = 2 * operands if _kinds.is_product(name) else 0.0
    shares = [(_SQRT * math.sqrt(_kinds.length(func, args, kwargs, g)) + 2) * unit for g, _ in results]
    sums = _kinds.is_sum(name)
    times = _MOVES if _kinds.is_pointwise(func) else _MEET

    still = []
    for share, (g, w) in zip(shares, results, strict=True):
        if not (g.is_floating_point() or g.is_complex()) or g.shape != w.shape:
            still.append(None)
            continue
        most = share * w.abs().double() + torch.finfo(g.dtype).tiny
        still.append(most if sums else most + times * unit * _sizes(args, kwargs, w))

    def allowed(moves: list[torch.Tensor] | None = None) -> list[torch.Tensor]:
        """With how far the results move, or without."""
        found = []
        for i, most in enumerate(still):
            if most is None:
                most = torch.zeros(got[i].shape, dtype=torch.float64)
            elif moves is not None:
                most = most + ((shares[i] + rounded) if sums else times) * moves[i]
            found.append(most)
        return found

    yield allowed()
    if sums:
        yield allowed([m.double() for m in run(func, *_absolute(_widened(args), _widened(kwargs)))])
    else:
        # Products within an operation round their operands too.
        for moves in _spread(func, args, kwargs, want, operands if _kinds.is_attention(name) else 0.0):
            yield allowed(moves)


def measure(i: int, got: torch.Tensor, want: torch.Tensor, allowed: torch.Tensor) -> Worst:
    """The worst element of a result."""
    rounded = want.to(got.dtype)
    wide = torch.complex128 if got.is_complex() else torch.float64
    g, w = got.to(wide), want.to(wide)
    same = (g == w) | (got == rounded) | (got.isnan() & rounded.isnan())
    finite = got.isfinite() & want.isfinite()
    error = torch.where(same, 0.0, torch.where(finite, (g - w).abs(), torch.inf)).double()
    ratio = torch.where(error == 0, 0.0, error / allowed)
    at = int(ratio.flatten().argmax())
    return Worst(
        i,
        _index(at, got.shape),
        _number(got.flatten()[at]),
        _number(want.flatten()[at]),
        float(error.flatten()[at]),
        float(allowed.flatten()[at]),
        int((ratio > 1).sum()),
        got.numel(),
    )


def _index(at: int, shape) -> list[int]:
    """Where the element of a number is; `torch.unravel_index` imports a second's worth of modules."""
    index = []
    for size in reversed(shape):
        at, place = divmod(at, size)
        index.append(place)
    return index[::-1]


def alone(trace: Trace, op: dict, device: str) -> Worst:
    """The same operation with the same inputs by itself on a device, against the referee.

    Raises:
        Unjudged: that cannot be done.
    """
    func, args, kwargs = call(trace, op, device)
    try:
        returned = func(*args, **kwargs)
        got = [t.cpu() for t in _kinds.results(func, args, kwargs, returned)]
    except (RuntimeError, ValueError, TypeError) as e:
        raise Unjudged(f"{func.name()} fails there: {str(e).splitlines()[0]}") from None
    _, args, kwargs = call(trace, op)
    want = _referee(func, args, kwargs, got)
    return _worst(trace, op, func, args, kwargs, got, want, exact=True)


def tie(a: Trace, op_a: dict, b: Trace, op_b: dict) -> str | None:
    """Why two runs may have chosen other elements, in words; None if they may not."""
    name = _kinds.base(op_a["name"])
    if name not in _kinds.CHOOSES or len(op_a["results"]) <= _kinds.CHOOSES[name]:
        return None
    at = [t.tensor(op["results"][_kinds.CHOOSES[name]]) for t, op in ((a, op_a), (b, op_b))]
    inputs = [t.tensor(op["args"][0]["value"]).double() for t, op in ((a, op_a), (b, op_b))]
    if at[0].shape != at[1].shape or inputs[0].shape != inputs[1].shape:
        return None
    func, args, kwargs = call(a, op_a)
    dim = _kinds.named(func, args, kwargs).get("dim", -1)
    chosen = [_gather(name, inputs[0], i, dim) for i in at]
    gap = float((chosen[0] - chosen[1]).abs().max())
    apart = float((inputs[0] - inputs[1]).abs().max())
    if gap == 0:
        return "the elements that were chosen are equal"
    if gap <= 2 * apart:
        return f"the elements that were chosen are {gap:.3g} apart, and the inputs of a and b up to {apart:.3g}"
    return None


def arguments(op: dict, other: dict) -> tuple[float, str]:
    """How far the numbers and flags are apart that two calls were given beside tensors, by the larger.

    Infinite where they are no floats. And which they are, in words; nothing of operations that are not known here.
    """
    worst, why = 0.0, ""
    try:
        mine, theirs = (_kinds.given(_operator(o["name"]), o["args"], o["kwargs"]) for o in (op, other))
    except Unjudged:
        return worst, why
    for name in (n for n in mine if n in theirs and n not in _kinds.OF_PLATFORM):
        off = _apart(mine[name], theirs[name])
        if off > worst:
            worst, why = off, f"`{name}` is {mine[name]} in a and {theirs[name]} in b"
    return worst, why


def _apart(x, y) -> float:
    """How far two arguments are apart that are no tensors; what stands for tensors, dtypes and devices is left out."""
    if isinstance(x, dict) or isinstance(y, dict):
        return 0.0
    if isinstance(x, list) and isinstance(y, list) and len(x) == len(y):
        return max(map(_apart, x, y), default=0.0)
    if isinstance(x, float) and isinstance(y, float) and math.isfinite(x) and math.isfinite(y):
        return abs(x - y) / max(abs(x), abs(y)) if x != y else 0.0
    return 0.0 if x == y or (x != x and y != y) else math.inf


def relative(x: torch.Tensor, y: torch.Tensor) -> float:
    """The largest difference by the largest element; infinite where only one is finite."""
    if x.shape != y.shape:
        return math.inf
    if x.numel() == 0:
        return 0.0
    if x.dtype == y.dtype == torch.float32:
        off, size = _largest(x - y), _largest(x)
        if math.isfinite(off) and math.isfinite(size):
            return off / size if size else (math.inf if off else 0.0)
    wide = torch.complex128 if x.is_complex() or y.is_complex() else torch.float64
    x, y = x.to(wide), y.to(wide)
    finite = x.isfinite() & y.isfinite()
    same = (x == y) | (x.isnan() & y.isnan())
    if not (finite | same).all():
        return math.inf
    off = torch.where(same, 0.0, (x - y).abs()).max().item()
    size = torch.where(finite, x.abs(), 0.0).max().item()
    return off / size if size else (math.inf if off else 0.0)


def _largest(x: torch.Tensor) -> float:
    """The largest size of an element, in one pass; NaN if there is one."""
    low, high = torch.aminmax(x)
    return max(abs(low.item()), abs(high.item()))


def _is_place(op: dict, i: int) -> bool:
    return _kinds.CHOOSES.get(_kinds.base(op["name"])) == i


def _gather(name: str, x: torch.Tensor, index: torch.Tensor, dim) -> torch.Tensor:
    if "pool" in name:
        flat = x.flatten(-2) if "2d" in name else x.flatten(-3)
        places = index.flatten(-2) if "2d" in name else index.flatten(-3)
        return flat.gather(-1, places)
    if dim is None or x.dim() == 0:
        return x.flatten()[index]
    return x.gather(dim, index if index.dim() == x.dim() else index.unsqueeze(dim))


def _operator(name: str):
    try:
        func = _kinds.operator(name)
    except (ValueError, AttributeError):
        func = None
    if func is None:
        raise Unjudged(f"{name} is not known here")
    if not (any("Tensor" in str(s.type) for s in func._schema.arguments) or _makes_tensor(func)):
        raise Unjudged(f"{name} takes no tensors")
    return func


def _makes_tensor(func) -> bool:
    """Whether it gives a tensor of numbers alone, as `zeros`; what takes names may open files."""
    schema = func._schema
    numbers = not any("str" in str(s.type) for s in schema.arguments)
    return func.namespace == "aten" and numbers and [str(r.type) for r in schema.returns] == ["Tensor"]


def _tensor(trace: Trace, x: dict, device: str) -> torch.Tensor:
    """A tensor with the strides that it had, unless elements share memory."""
    plain = trace.tensor(x["value"])
    stride = x["stride"]
    if tuple(stride) != plain.stride() and plain.numel() and all(s > 0 for s in stride):
        made = torch.empty_strided(plain.shape, stride, dtype=plain.dtype)
        if made.untyped_storage().nbytes() == plain.untyped_storage().nbytes():
            plain = made.copy_(plain)
    return plain.to(device)


def _map(x, change):
    if isinstance(x, list | tuple):
        return [_map(v, change) for v in x]
    if isinstance(x, dict):
        return {k: _map(v, change) for k, v in x.items()}
    return change(x)


def _widened(x):
    def widen(v):
        if isinstance(v, torch.Tensor):
            return v.to(_WIDER.get(v.dtype, v.dtype), copy=True)
        return _WIDER.get(v, v) if isinstance(v, torch.dtype) else v

    return _map(x, widen)


def _copied(x):
    return _map(x, lambda v: v.clone() if isinstance(v, torch.Tensor) else v)


def _absolute(*parts):
    def absolute(v):
        if isinstance(v, torch.Tensor):
            return v.abs() if v.is_floating_point() or v.is_complex() else v
        return abs(v) if isinstance(v, float) else v

    return [_map(p, absolute) for p in parts]


def _spread(func, args, kwargs, want: list[torch.Tensor], least: float = 0.0) -> Iterator[list[torch.Tensor]]:
    """How far the elements of results move with the inputs, in float64: the sum of how far they move with each, by a
    unit in their last place, or by `least` where that is more. After each input what the sum is by then.
    """
    g = torch.Generator().manual_seed(0)
    unit = max([torch.finfo(t.dtype).eps for t in _floats(args, kwargs)], default=torch.finfo(torch.float32).eps)
    unit = max(unit, least)

    pointwise = _kinds.is_pointwise(func)

    def shake(v, n: int):
        if isinstance(v, float):
            return v * (1 + unit)
        if not isinstance(v, torch.Tensor) or not v.numel() or not (v.is_floating_point() or v.is_complex()):
            return v
        if pointwise:
            return v * (1 + unit)
        # Where elements meet, as in a norm, what is between is as large as the largest of them. Neighbours along each
        # dimension move apart once, and then all move at random.
        if n < v.dim():
            sign = 1 - 2 * (torch.arange(v.shape[n], dtype=torch.float64) % 2)
            sign = sign.reshape([-1 if d == n else 1 for d in range(v.dim())])
        else:
            sign = torch.randint(0, 2, v.shape, generator=g, dtype=torch.float64) * 2 - 1
        return v + sign * unit * v.abs().max()

    total = [torch.zeros(w.shape, dtype=torch.float64) for w in want]
    for place in [*range(len(args)), *kwargs]:
        mine = args if isinstance(place, int) else kwargs
        if not _any_float(mine[place]):
            continue
        far = [torch.zeros(w.shape, dtype=torch.float64) for w in want]
        dims = max((t.dim() for t in _kinds.flat(mine[place])), default=0)
        for n in range(dims + _SHAKES if dims and not pointwise else 1):
            moved = [_widened(args), _widened(kwargs)]
            at = moved[0] if isinstance(place, int) else moved[1]
            at[place] = _map(at[place], lambda v, n=n: shake(v, n))
            for f, m, w in zip(far, run(func, *moved), want, strict=True):
                off = (m.to(w.dtype) - w).abs() if w.dtype != torch.bool else m != w
                torch.maximum(f, off.double().nan_to_num(nan=0.0, posinf=0.0), out=f)
        for t, f in zip(total, far, strict=True):
            t += f
        yield total


def _sizes(args, kwargs, want: torch.Tensor) -> torch.Tensor:
    """How large the inputs of each element are, of inputs that have an element for each."""
    size = torch.zeros(want.shape, dtype=torch.float64)
    for t in _floats(args, kwargs):
        if t.shape == want.shape:
            size = size.maximum(t.abs().double().nan_to_num(nan=0.0, posinf=0.0))
    return size


def _floats(args, kwargs) -> list[torch.Tensor]:
    return [t for t in _kinds.flat([*args, *kwargs.values()]) if t.is_floating_point() or t.is_complex()]


def _any_float(x) -> bool:
    return isinstance(x, float) or bool(_floats([x], {}))


def _number(x: torch.Tensor) -> float:
    return float(x.abs() if x.is_complex() else x)


def _attention(q, k, v, bias=None, dropout=0.0, causal=False, *args, scale=None, **kwargs):
    """What the fused kernels of attention compute, in PyTorch's own operations."""
    shared = q.shape[-3] != k.shape[-3]
    math = torch.ops.aten._scaled_dot_product_attention_math
    return math(q, k, v, bias, 0.0, causal, scale=scale, enable_gqa=shared)[:1]


def _attention_cpu(q, k, v, dropout=0.0, causal=False, *, attn_mask=None, scale=None):
    return _attention(q, k, v, attn_mask, dropout, causal, scale=scale)


def _attention_backward(grad, q, k, v, bias, wanted, *rest, scale=None):
    """The gradients of `q`, `k`, `v` and `bias` that are wanted, by autograd."""
    causal = rest[_CAUSAL]
    leaves = [t if t is None else t.detach().requires_grad_(w) for t, w in zip((q, k, v, bias), wanted, strict=True)]
    with torch.enable_grad():
        (made,) = _attention(*leaves, causal=causal, scale=scale)
        return torch.autograd.grad(made, [t for t, w in zip(leaves, wanted, strict=True) if w], grad)


# Of the arguments of that backward after `grad_input_mask`, `is_causal`.
_CAUSAL = 7

# Operations that the CPU has under another name, or not at all.
_INSTEAD = {
    "aten::_scaled_dot_product_fused_attention_overrideable": _attention,
    "aten::_scaled_dot_product_fused_attention_overrideable_backward": _attention_backward,
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention_cpu,
}
