"""What an op refuses: calls whose dtypes or whose overlapping memory the CPU refuses, with the same class of error; and calls
that it does not refuse. `refusals.toml` has the differences, each with its reason; one that is gone fails.
"""

import itertools
import warnings
from pathlib import Path

import pytest
import tomllib
import torch
import torch.nn.functional as F
from support import DEVICE, outcome

DIFFERENCES = tomllib.loads((Path(__file__).parent / "refusals.toml").read_text())["difference"]


def ones(d, *shape):
    return torch.ones(*shape, device=d)


def ints(d, *values):
    return torch.tensor(values, device=d)


def count(d, *shape):
    return torch.arange(float(torch.Size(shape).numel()), device=d).view(shape)


def index(d):
    return ints(d, 0, 1, 2)


# ---------------------------------------------------------------- overlap

# A write to `x` while `x`, or a part of it, is read.
READS = {
    "index_add_": lambda x, i: x.index_add_(0, i, x),
    "index_copy_": lambda x, i: x.index_copy_(0, i, x),
    "index_reduce_": lambda x, i: x.index_reduce_(0, i, x, "prod"),
    "index_put_": lambda x, i: x.index_put_((i,), x),
    "index_put_ a part": lambda x, i: x[1:].index_put_((i[:2],), x[:-1]),
    "assignment": lambda x, i: x.__setitem__(i, x),
    "scatter_": lambda x, i: x.scatter_(0, i[:, None], x),
    "scatter_add_": lambda x, i: x.scatter_add_(0, i[:, None], x),
    "scatter_reduce_": lambda x, i: x.scatter_reduce_(0, i[:, None], x, "sum"),
    "scatter_ of its index": lambda x, i: i.scatter_(0, i, 1),
    "index_fill_ of its index": lambda x, i: i.index_fill_(0, i, 5),
    "index_fill_ of its value": lambda x, i: x.index_fill_(0, i, x[0, 0]),
    "index_put_ of its index": lambda x, i: i.index_put_((i,), i + 1),
    "gather out": lambda x, i: torch.gather(x, 0, i[None], out=x),
    "gather out, a part": lambda x, i: torch.gather(x[:2], 0, i[None][:, :3] * 0, out=x[:1]),
    "gather into its index": lambda x, i: torch.gather(i + 1, 0, i, out=i),
    "index_select out": lambda x, i: torch.index_select(x, 0, i, out=x),
    "take out": lambda x, i: torch.take(x, i, out=x[0]),
    "put_": lambda x, i: x.put_(i, x[0]),
    "masked_scatter_": lambda x, i: x.masked_scatter_(x > 0, x),
    "masked_fill_ of its mask": lambda x, i: (m := x > 3).masked_fill_(m, False),
    "masked_select out": lambda x, i: torch.masked_select(x, x >= 0, out=x),
    "fill_ of an element": lambda x, i: x.fill_(x[1, 1]),
    "cumsum out": lambda x, i: torch.cumsum(x, 0, out=x),
    "cumsum out, a part": lambda x, i: torch.cumsum(x[:2], 0, out=x[1:]),
    "cumprod out, a part": lambda x, i: torch.cumprod(x[:2], 0, out=x[1:]),
    "stack out": lambda x, i: torch.stack([x[0], x[1], x[2]], out=x),
    "cat out": lambda x, i: torch.cat([x[:1], x[1:]], out=x),
    "sum out": lambda x, i: torch.sum(x, 0, out=x[0]),
    "amax out": lambda x, i: torch.amax(x, 0, out=x[0]),
    "mean out": lambda x, i: torch.mean(x, 0, out=x[0]),
    "max out": lambda x, i: torch.max(x, 0, out=(x[0], i)),
    "sort out": lambda x, i: torch.sort(x[0], out=(x[0], i)),
    "topk out": lambda x, i: torch.topk(x[0], 3, out=(x[0], i)),
    "kthvalue out": lambda x, i: torch.kthvalue(x[0], 1, out=(x[0, 0], i[0])),
    "mm out": lambda x, i: torch.mm(x, x, out=x),
    "addmm_": lambda x, i: x.addmm_(x, x),
    "addr_": lambda x, i: x.addr_(x[0], x[1]),
    "softmax out": lambda x, i: torch.softmax(x, 0, out=x),
    "tril out": lambda x, i: torch.tril(x, out=x),
    "add out, a part": lambda x, i: torch.add(x[:2], 1, out=x[1:]),
    "add_ a part": lambda x, i: x[1:].add_(x[:-1]),
    "add_ transposed": lambda x, i: x.add_(x.t()),
    "copy_ a part": lambda x, i: x[1:].copy_(x[:-1]),
    "copy_": lambda x, i: x.copy_(x),
    "where out, a part": lambda x, i: torch.where(x[:2] > 0, x[:2], x[1:], out=x[1:]),
    "lerp_ a part": lambda x, i: x[1:].lerp_(x[:-1], 0.5),
    "_foreach_add_ a part": lambda x, i: torch._foreach_add_([x[1:]], [x[:-1]]),
    "_foreach_copy_ a part": lambda x, i: torch._foreach_copy_([x[1:]], [x[:-1]]),
}

# A write to `x`, which shows one element three times.
REPEATED = {
    "add_": lambda x, i, v: x.add_(v),
    "add out": lambda x, i, v: torch.add(v, 1, out=x),
    "fill_": lambda x, i, v: x.fill_(2),
    "zero_": lambda x, i, v: x.zero_(),
    "copy_": lambda x, i, v: x.copy_(v),
    "index_fill_": lambda x, i, v: x.index_fill_(0, i, 5),
    "index_fill_ a tensor": lambda x, i, v: x.index_fill_(0, i, v[0]),
    "masked_fill_": lambda x, i, v: x.masked_fill_(v > 0, 2),
    "index_put_": lambda x, i, v: x.index_put_((i,), v),
    "index_add_": lambda x, i, v: x.index_add_(0, i, v),
    "index_copy_": lambda x, i, v: x.index_copy_(0, i, v),
    "scatter_": lambda x, i, v: x.scatter_(0, i, 1.0),
    "masked_scatter_": lambda x, i, v: x.masked_scatter_(v > 0, v),
    "put_": lambda x, i, v: x.put_(i, v),
    "normal_": lambda x, i, v: x.normal_(),
    "bernoulli_": lambda x, i, v: x.bernoulli_(0.5),
    "random_": lambda x, i, v: x.random_(),
    "sum out": lambda x, i, v: torch.sum(v.expand(2, 3), 0, out=x),
    "cumsum out": lambda x, i, v: torch.cumsum(v, 0, out=x),
    "cat out": lambda x, i, v: torch.cat([v], out=x),
    "gather out": lambda x, i, v: torch.gather(v, 0, i, out=x),
    "sort out": lambda x, i, v: torch.sort(v, out=(x, i)),
    "arange out": lambda x, i, v: torch.arange(3, out=x),
    "full out": lambda x, i, v: torch.full((3,), 1.0, out=x),
    "zeros out": lambda x, i, v: torch.zeros(3, out=x),
    "_foreach_zero_": lambda x, i, v: torch._foreach_zero_([x]),
    "_foreach_add_": lambda x, i, v: torch._foreach_add_([x], 1),
    "_foreach_copy_": lambda x, i, v: torch._foreach_copy_([x], [v]),
}

CALLS = {
    "storage of a negative size": lambda d: ones(d, 3).untyped_storage().resize_(-1),
    "a generator's state of floats": lambda d: torch.Generator(d).set_state(ones("cpu", 3)),
    "index_select of nothing": lambda d: ones(d, 0, 3).index_select(0, ints(d, 0)),
    "index_select of nothing, none": lambda d: ones(d, 0, 3).index_select(0, ints(d, 0)[:0]),
    "view_as_complex": lambda d: torch.view_as_complex(ones(d, 3, 2).bfloat16()),
    "gcd of NaN": lambda d: torch.gcd(ones(d, 3) * float("nan"), ones(d, 3)),
}

# ---------------------------------------------------------------- dtypes

DTYPES = [torch.bool, torch.uint8, torch.int32, torch.float16, torch.float32, torch.complex64]

METHODS = """abs abs_ neg sign sign_ sgn relu relu_ exp log sqrt sqrt_ ceil floor round trunc trunc_ frac frac_ isposinf isneginf
    bitwise_not erf digamma lgamma sigmoid sigmoid_ reciprocal_ nan_to_num signbit angle mean prod std amax max argmax cumsum_
    sort msort median unique trace tril i0 sinc logit rsqrt deg2rad aminmax quantile nanmean bincount random_ uniform_
    exponential_ geometric_ log_normal_ cauchy_ bernoulli_ bernoulli""".split()  # noqa: SIM905
FUNCTIONS = """relu6 elu elu_ selu celu gelu silu mish softplus hardtanh hardtanh_ hardswish hardsigmoid leaky_relu leaky_relu_
    logsigmoid softshrink hardshrink dropout rrelu rrelu_""".split()  # noqa: SIM905
UNARY = {
    **{name: lambda x, name=name: getattr(x, name)() for name in METHODS},
    **{name: lambda x, name=name: getattr(F, name)(x) for name in FUNCTIONS},
    "softmax": lambda x: x.softmax(0),
    "logcumsumexp": lambda x: x.logcumsumexp(0),
    "cummax": lambda x: x.cummax(0),
    "topk": lambda x: x.topk(1),
    "round to decimals": lambda x: x.round(decimals=1),
    "clamp": lambda x: x.clamp(0, 1),
    "clamp_": lambda x: x.clamp_(0, 1),
    "clamp by a tensor": lambda x: x.clamp(max=x),
    "clamp_max": lambda x: x.clamp_max(x),
    "threshold": lambda x: F.threshold(x, 0, 1),
    "lerp": lambda x: torch.lerp(x, x, 0.5),
    "lerp_ by a tensor": lambda x: x.lerp_(x, x),
    "addcmul": lambda x: torch.addcmul(x, x, x),
    "addcdiv": lambda x: torch.addcdiv(x, x, x),
    "add with alpha": lambda x: torch.add(x, x, alpha=1.5),
    "pow -1": lambda x: x**-1,
    "norm": lambda x: torch.linalg.vector_norm(x),
    "dot": lambda x: x.dot(x),
    "conv1d": lambda x: F.conv1d(x.view(1, 1, 3), x.view(1, 1, 3)),
    "max_pool1d": lambda x: F.max_pool1d(x.view(1, 1, 3), 2),
    "layer_norm": lambda x: F.layer_norm(x, (3,)),
    "mse_loss": lambda x: F.mse_loss(x, x),
    "cdist": lambda x: torch.cdist(x.view(3, 1), x.view(3, 1)),
    "multinomial": lambda x: torch.multinomial(x, 1),
    "normal of means": lambda x: torch.normal(x, 1.0),
    "histc": lambda x: x.histc(3),
    "fft": lambda x: torch.fft.fft(x),
    "det": lambda x: torch.linalg.det(x[:1].view(1, 1)),
    "linspace": lambda x: torch.linspace(0, 1, 3, dtype=x.dtype, device=x.device),
    "randint": lambda x: torch.randint(0, 2, (3,), dtype=x.dtype, device=x.device),
    "randperm": lambda x: torch.randperm(3, dtype=x.dtype, device=x.device),
    "arange": lambda x: torch.arange(3, dtype=x.dtype, device=x.device),
    "gather by": lambda x: ones(x.device, 3).gather(0, x),
    "index by": lambda x: ones(x.device, 3)[x],
    "where by": lambda x: torch.where(x, 1, 2),
    "masked_fill by": lambda x: ones(x.device, 3).masked_fill(x, 2),
    "embedding by": lambda x: F.embedding(x, ones(x.device, 3, 1)),
}
BINARY = """add sub mul div floor_divide remainder fmod pow atan2 maximum minimum fmax fmin lt logical_and bitwise_and
    bitwise_left_shift hypot copysign nextafter heaviside xlogy logaddexp gcd lcm ldexp""".split()  # noqa: SIM905
IN_PLACE = "add_ mul_ div_ pow_ atan2_ lt_ bitwise_and_ bitwise_left_shift_ hypot_ gcd_ masked_fill_ copy_".split()  # noqa: SIM905


def cases():
    for name, f in READS.items():
        yield f"reads: {name}", lambda d, f=f: f(count(d, 3, 3), index(d))
    for name, f in REPEATED.items():
        yield f"repeated: {name}", lambda d, f=f: f(ones(d, 1).expand(3), index(d), count(d, 3))
    for name, f in CALLS.items():
        yield f"calls: {name}", f
    for (name, f), dtype in itertools.product(UNARY.items(), DTYPES):
        yield f"{name} {dtype}", lambda d, f=f, dtype=dtype: f(ones(d, 3).to(dtype))
    wide = [torch.bool, torch.int32, torch.float32, torch.complex64]
    for name, a, b in itertools.product(BINARY + IN_PLACE, wide, wide):
        f = getattr(torch.Tensor, name)
        yield f"{name} {a} {b}", lambda d, f=f, a=a, b=b: f(ones(d, 3).to(a), ones(d, 3).to(b))


def family(name):
    """`pow` of `pow torch.bool torch.bool`; the whole name where memory overlaps."""
    return name if ":" in name else name.partition(" torch.")[0]


@pytest.mark.filterwarnings("ignore")
def test_what_the_cpu_refuses_is_refused(fused):
    reasons = {case: d["reason"] for d in DIFFERENCES for case in d.get("cases", [])}
    found = {}
    for name, f in cases():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            cpu, device = outcome(f, "cpu"), outcome(f, DEVICE)
        kinds = [type(r) if isinstance(r, Exception) else None for r in (cpu, device)]
        if kinds[0] != kinds[1]:
            found[name] = f"the CPU gives {cpu!r:.200}, the device {device!r:.200}"
    known = {name for name in found if name in reasons or family(name) in reasons}
    fresh = "\n".join(f"{name}: {what}" for name, what in found.items() if name not in known)
    assert not fresh, fresh
    gone = [case for case in reasons if not any(case in (name, family(name)) for name in found)]
    assert not gone, f"no difference any more: {gone}"


# ---------------------------------------------------------------- numbers

# What is refused for a number is found when it is recorded: nothing is computed here.
VALUES = [0, 1, -1, -7, 2.5, -0.5, 300, 2**40, float("inf"), float("nan"), True]
NUMBER_DTYPES = [torch.bool, torch.uint8, torch.int32, torch.int64, torch.float32]
NUMBERS = {
    "pow": lambda x, v: x**v,
    "pow_": lambda x, v: x.pow_(v),
    "pow of a number": lambda x, v: v**x,
    "floor_divide": lambda x, v: x // v,
    "remainder": lambda x, v: x % v,
    "fmod": lambda x, v: torch.fmod(x, v),
    "div floor": lambda x, v: torch.div(x, v, rounding_mode="floor"),
    "div trunc": lambda x, v: x.div_(v, rounding_mode="trunc"),
    "add_": lambda x, v: x.add_(v),
    "add with alpha": lambda x, v: torch.add(x, x, alpha=v),
    "sub with alpha": lambda x, v: torch.sub(x, x, alpha=v),
    "addcmul": lambda x, v: torch.addcmul(x, x, x, value=v),
    "lerp": lambda x, v: torch.lerp(x, x, v),
    "bitwise_and": lambda x, v: x & v,
    "fill_": lambda x, v: x.fill_(v),
    "full": lambda x, v: torch.full((2,), v, dtype=x.dtype, device=x.device),
    "masked_fill": lambda x, v: x.masked_fill(x > 0, v),
    "index_fill": lambda x, v: x.index_fill(0, ints(x.device, 0), v),
    "scatter": lambda x, v: x.scatter(0, ints(x.device, 0), v),
    "pad": lambda x, v: F.pad(x, (1, 1), value=v),
    "clamp": lambda x, v: torch.clamp(x, min=v, max=3),
    "elu": lambda x, v: F.elu(x, v),
    "celu": lambda x, v: F.celu(x, v),
    "threshold": lambda x, v: F.threshold(x, v, v),
    "hardshrink": lambda x, v: F.hardshrink(x, v),
    "softshrink": lambda x, v: F.softshrink(x, v),
    "hardtanh": lambda x, v: F.hardtanh(x, v, 1.0),
    "huber_loss": lambda x, v: F.huber_loss(x, x, delta=v),
    "smooth_l1_loss": lambda x, v: F.smooth_l1_loss(x, x, beta=v),
    "dropout": lambda x, v: F.dropout(x, v),
    "bernoulli_": lambda x, v: x.bernoulli_(v),
    "uniform_": lambda x, v: x.uniform_(v, 1),
    "normal_": lambda x, v: x.normal_(0, v),
    "exponential_": lambda x, v: x.exponential_(v),
    "geometric_": lambda x, v: x.geometric_(v),
    "cauchy_": lambda x, v: x.cauchy_(0, v),
    "log_normal_": lambda x, v: x.log_normal_(0, v),
    "random_": lambda x, v: x.random_(0, v),
    "multinomial": lambda x, v: torch.multinomial(x, v),
    "arange": lambda x, v: torch.arange(0, 4, v, dtype=x.dtype, device=x.device),
    "renorm": lambda x, v: torch.renorm(x[None], 2, 0, v),
    "cdist": lambda x, v: torch.cdist(x[None], x[None], p=v),
    "quantile": lambda x, v: torch.quantile(x, v),
    "histc": lambda x, v: torch.histc(x, 4, v, 5),
    "addmm": lambda x, v: torch.addmm(x[None], x[None, :1], x[None], beta=v),
    "index_add": lambda x, v: x.index_add(0, ints(x.device, 0), x[:1], alpha=v),
    "topk": lambda x, v: x.topk(v),
    "kthvalue": lambda x, v: x.kthvalue(v),
    "narrow": lambda x, v: x.narrow(0, v, 1),
    "select": lambda x, v: x.select(0, v),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_the_cpu_refuses_are_refused(name, fused):
    f, found = NUMBERS[name], {}
    for dtype, value in itertools.product(NUMBER_DTYPES, VALUES):
        cpu, device = [outcome(f, ints(d, 1, 2, 3).to(dtype), value) for d in ("cpu", DEVICE)]
        if isinstance(cpu, Exception) != isinstance(device, Exception):
            found[f"{name} {dtype} {value}"] = cpu, device
    known = [case for d in DIFFERENCES for case in d.get("numbers", []) if family(case) == name]
    assert bool(found) == bool(known), found
    assert name in known or set(found) == set(known), {case: found.get(case) for case in set(found) ^ set(known)}
