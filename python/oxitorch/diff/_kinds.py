"""What is known of operations, by their names without overload: what they draw, sum, choose and write."""

import math
from typing import Any

import torch

# What is no operation on tensors.
UNSEEN = ("profiler::", "aten::_local_scalar_dense", "aten::lift_fresh")
# Their results have no value yet.
UNINITIALISED = ("aten::empty", "aten::new_empty")

# Those that draw random numbers; NOISE says which result has them, where that is not the first.
_DRAWS = frozenset(
    {
        "bernoulli", "bernoulli_", "uniform_", "normal", "normal_", "random_", "exponential_", "geometric_",
        "cauchy_", "log_normal_", "rand", "randn", "rand_like", "randn_like", "randint", "randint_like",
        "randperm", "multinomial", "native_dropout", "poisson", "binomial", "_standard_gamma",
        "_sample_dirichlet",
    }
)  # fmt: skip
NOISE = {"native_dropout": 1}
# Attention in one kernel.
_ATTENTION = "_scaled_dot_product_"
# Operations that draw the same thing under several names.
_SAME_DRAW = {"bernoulli": "mask", "native_dropout": "mask"}

# Products: operands may be rounded to less than float32 (precision), and an element sums so many products.
_PRODUCTS = {
    "mm": lambda a: a[0].shape[-1],
    "bmm": lambda a: a[0].shape[-1],
    "mv": lambda a: a[0].shape[-1],
    "dot": lambda a: a[0].numel(),
    "addmm": lambda a: a[1].shape[-1],
    "addmv": lambda a: a[1].shape[-1],
    "baddbmm": lambda a: a[1].shape[-1],
    "linear": lambda a: a[0].shape[-1],
    "convolution": lambda a: a[1].numel() // max(1, min(a[1].shape[:2])),
    "convolution_backward": lambda a: max(a[0].numel() // a[0].shape[1], a[2].numel() // max(1, min(a[2].shape[:2]))),
}
# Sums of their arguments: with the products, these do not decrease where arguments increase, so the same of absolute
# values bounds what is summed.
_SUMS = frozenset(
    {
        "sum", "mean", "nansum", "embedding_dense_backward", "avg_pool2d", "_adaptive_avg_pool2d",
        "scatter_add", "index_add",
    }
)  # fmt: skip

# Those that choose an element: which result is a place, and in what it is one.
CHOOSES = {
    "argmax": 0,
    "argmin": 0,
    "argsort": 0,
    "max": 1,
    "min": 1,
    "topk": 1,
    "sort": 1,
    "kthvalue": 1,
    "median": 1,
    "mode": 1,
    "max_pool2d_with_indices": 1,
    "max_pool3d_with_indices": 1,
    "adaptive_max_pool2d": 1,
}

# Arguments that say where a tensor is and how it comes there, and not what it has.
OF_PLATFORM = frozenset({"device", "layout", "pin_memory", "non_blocking", "memory_format"})

# What asks for the bits or the neighbours of numbers: of float64 it is something else.
OF_DTYPE = frozenset(
    {
        "nextafter", "nextafter_", "frexp", "view_copy",
    }
)  # fmt: skip

# What writes to arguments of which its schema does not tell.
_ALSO_WRITES = {
    "native_batch_norm": ("running_mean", "running_var"),
    "cudnn_batch_norm": ("running_mean", "running_var"),
    "miopen_batch_norm": ("running_mean", "running_var"),
}


def base(name: str) -> str:
    """`mm` of `aten.mm.default` and `aten::mm.out`."""
    return name.replace("::", ".").split(".")[1]


def drawn(name: str) -> str | None:
    """What an operation draws that another run can be given, or None."""
    op = base(name)
    plain = op.removesuffix("_")
    return _SAME_DRAW.get(plain, plain) if op in _DRAWS else None


def draws_within(func, args, kwargs) -> bool:
    """Whether the numbers that it draws are seen by nobody: dropout in a kernel of attention."""
    return is_attention(func.name()) and bool(named(func, args, kwargs).get("dropout_p"))


def is_attention(name: str) -> bool:
    """Whether it is attention in one kernel, forward or backward."""
    return base(name).startswith(_ATTENTION)


def operator(name: str) -> Any:
    """The overload of a name as `aten.mm.default`, or None."""
    namespace, op, overload = name.split(".", 2)
    return getattr(getattr(getattr(torch.ops, namespace), op, None), overload, None)


def named(func, args, kwargs) -> dict:
    """Arguments by their names."""
    return {s.name: a for s, a in zip(func._schema.arguments, args, strict=False)} | dict(kwargs)


def given(func, args, kwargs) -> dict:
    """The same with what was left out, by its default."""
    defaults = {s.name: s.default_value for s in func._schema.arguments if s.has_default_value()}
    return defaults | named(func, args, kwargs)


def written(func, args, kwargs) -> list[torch.Tensor]:
    """The tensors that an operation writes to."""
    also = _ALSO_WRITES.get(base(func.name()), ())
    if not func._schema.is_mutable and not also:
        return []
    given = named(func, args, kwargs)
    names = [s.name for s in func._schema.arguments if s.alias_info is not None and s.alias_info.is_write]
    return [t for n in (*names, *also) for t in flat(given.get(n))]


def results(func, args, kwargs, returned) -> list[torch.Tensor]:
    """The tensors that have values of an operation: those it returns, and those it writes to."""
    wrote = written(func, args, kwargs)
    return [t for t in flat(returned) if not any(t is w for w in wrote)] + wrote


def flat(x) -> list[torch.Tensor]:
    """The tensors in lists."""
    if isinstance(x, torch.Tensor):
        return [x]
    return [t for v in x for t in flat(v)] if isinstance(x, list | tuple) else []


def is_product(name: str) -> bool:
    return base(name) in _PRODUCTS


def is_sum(name: str) -> bool:
    return base(name) in _PRODUCTS or base(name) in _SUMS


def is_pointwise(func) -> bool:
    """Whether an element of a result comes of one element of each argument."""
    return torch.Tag.pointwise in func.tags or base(func.name()).startswith("_foreach")


def length(func, args, kwargs, result: torch.Tensor) -> int:
    """How many numbers an element of the result sums at most, as far as it is known."""
    op = base(func.name())
    if op in _PRODUCTS:
        return max(1, int(_PRODUCTS[op](args)))
    given = named(func, args, kwargs)
    inputs = [t for a in given.values() for t in flat(a)]
    if not inputs:
        return 1
    x = max(inputs, key=torch.Tensor.numel)
    if "normalized_shape" in given:
        return max(1, math.prod(given["normalized_shape"]))
    if "batch_norm" in op:
        return max(1, x.numel() // x.shape[1])
    if "group_norm" in op:
        return max(1, x.numel() // (x.shape[0] * given["group"]))
    dims = given.get("dim")
    if dims is not None and not op.startswith("_foreach"):
        dims = [dims] if isinstance(dims, int) else dims or range(x.dim())
        return max(1, math.prod(x.shape[d] for d in dims if isinstance(d, int) and -x.dim() <= d < x.dim()))
    return max(1, x.numel() // max(1, result.numel()))
