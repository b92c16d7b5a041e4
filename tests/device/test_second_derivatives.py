"""Second derivatives of what has a kernel of its own, against PyTorch's composite on the CPU."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from support import DEVICE
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel


def inputs(heads=2, key_heads=2, queries=5, keys=7, width=4, value_width=4, dtype=torch.float64):
    torch.manual_seed(0)
    return [
        torch.randn(2, heads, queries, width, dtype=dtype),
        torch.randn(2, key_heads, keys, width, dtype=dtype),
        torch.randn(2, key_heads, keys, value_width, dtype=dtype),
    ]


def mask_with_an_empty_row():
    torch.manual_seed(1)
    mask = torch.rand(5, 7) > 0.4
    mask[2] = False
    return mask


FORMS = {
    "plain": (inputs(), {}),
    "causal": (inputs(queries=6, keys=6), {"is_causal": True}),
    "causal, fewer queries": (inputs(queries=4, keys=6), {"is_causal": True}),
    "causal, fewer keys": (inputs(queries=6, keys=4), {"is_causal": True}),
    "mask": (inputs(), {"attn_mask": mask_with_an_empty_row()}),
    "shared heads": (inputs(heads=4), {"enable_gqa": True}),
    "shared heads, causal": (inputs(heads=4, queries=6, keys=6), {"enable_gqa": True, "is_causal": True}),
    "width of values": (inputs(value_width=3), {}),
    "scale": (inputs(), {"scale": 0.3}),
    "float32": (inputs(dtype=torch.float32), {}),
    "bias with a gradient": ([*inputs(), torch.linspace(-1, 1, 70, dtype=torch.float64).view(2, 1, 5, 7)], {}),
}


def attention(q, k, v, bias=None, **options):
    options = {name: o.to(q.device) if isinstance(o, torch.Tensor) else o for name, o in options.items()}
    return F.scaled_dot_product_attention(q, k, v, **({"attn_mask": bias} if bias is not None else {}), **options)


def derivatives(f, values):
    """The first, second and third derivatives of a function, summed up with fixed weights, by its inputs and by the
    gradient of its result.
    """

    def wave(x, wave):
        return wave(torch.arange(x.numel(), dtype=torch.float64)).view(x.shape).to(x)

    values = [v.detach().clone().requires_grad_() for v in values]
    y = f(*values)
    seed = wave(y, torch.sin).requires_grad_()
    first = torch.autograd.grad(y, values, seed, create_graph=True)
    second = torch.autograd.grad(sum((g * wave(g, torch.cos)).sum() for g in first), [*values, seed], create_graph=True)
    third = torch.autograd.grad(sum(g.square().sum() for g in second), [*values, seed])
    return [g.detach().cpu() for g in (*first, *second, *third)]


# What each of the others adds to these is in some of them.
QUICK_FORMS = ("mask", "shared heads, causal")


@pytest.mark.parametrize("form", [pytest.param(f, marks=[] if f in QUICK_FORMS else pytest.mark.slow) for f in FORMS])
def test_attention(form):
    values, options = FORMS[form]
    with sdpa_kernel(SDPBackend.MATH):
        wanted = derivatives(lambda *x: attention(*x, **options), values)
    got = derivatives(lambda *x: attention(*x, **options), [v.to(DEVICE) for v in values])
    tolerance = 1e-9 if values[0].dtype == torch.float64 else 1e-3
    for g, w in zip(got, wanted, strict=True):
        torch.testing.assert_close(g, w, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
def test_attention_draws_the_same_dropout():
    """Along a direction, the second derivative is that of the first by differences."""
    values = [v.to(DEVICE).requires_grad_() for v in inputs(heads=4)]

    def first(values):
        torch.manual_seed(3)
        y = attention(*values, dropout_p=0.4, enable_gqa=True)
        return torch.autograd.grad(y.sin().sum(), values, create_graph=True)

    torch.manual_seed(4)
    weights, direction = ([torch.randn_like(v) for v in values] for _ in range(2))
    step = 1e-6
    second = torch.autograd.grad(sum((g * w).sum() for g, w in zip(first(values), weights, strict=True)), values)
    ahead, behind = (
        first([(v + s * d).detach().requires_grad_() for v, d in zip(values, direction, strict=True)])
        for s in (step, -step)
    )
    wanted = sum(((a - b) / (2 * step) * w).sum() for a, b, w in zip(ahead, behind, weights, strict=True))
    got = sum((s * d).sum() for s, d in zip(second, direction, strict=True))
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)


def loss(q, k, v, **options):
    return F.scaled_dot_product_attention(q, k, v, **options).sin().sum()


def forward_over_reverse(q, k, v):
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q.clone().requires_grad_(), q.cos())
        (g,) = torch.autograd.grad(loss(dual, k, v), dual, create_graph=True)
        return torch.autograd.forward_ad.unpack_dual(g).tangent


def tangent_of_a_gradient(q, k, v):
    q = q.clone().requires_grad_()
    y = F.scaled_dot_product_attention(q, k, v)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(y.detach().cos(), y.detach().sin())
        (g,) = torch.autograd.grad(y, q, dual)
        return torch.autograd.forward_ad.unpack_dual(g).tangent


TRANSFORMS = {
    "hessian": lambda q, k, v: hessian(lambda q: loss(q, k, v))(q),
    "hessian of two": lambda q, k, v: hessian(lambda k, v: loss(q, k, v), argnums=(0, 1))(k, v),
    "jvp of grad": lambda q, k, v: jvp(grad(lambda q: loss(q, k, v, is_causal=True)), (q,), (q.cos(),)),
    "grad of grad": lambda q, k, v: grad(lambda q: grad(lambda q: loss(q, k, v))(q).square().sum())(q),
    "jacrev of jacrev": lambda q, k, v: jacrev(jacrev(lambda q: loss(q, k, v)))(q),
    "jacfwd of jacrev": lambda q, k, v: jacfwd(jacrev(lambda q: loss(q, k, v)))(q),
    "jacrev of jacfwd": lambda q, k, v: jacrev(jacfwd(lambda q: loss(q, k, v)))(q),
    "grad of each": lambda q, k, v: vmap(grad(lambda q, k, v: loss(q[None], k[None], v[None])))(q, k, v),
    "hessian of each": lambda q, k, v: vmap(hessian(lambda q, k, v: loss(q[None], k[None], v[None])))(q, k, v),
    "forward over reverse": forward_over_reverse,
    "tangent of a gradient": tangent_of_a_gradient,
}
RUNS = {
    "eager": lambda f: f,
    "jit": lambda f: torch.tpu.jit(f),
    "compile": lambda f: torch.compile(f, backend="tpu"),
}
# One of each path: forward over reverse, reverse over reverse, vmap inside of it and outside.
QUICK = {
    ("eager", "forward over reverse"),
    ("eager", "grad of each"),
    ("jit", "jacfwd of jacrev"),
    ("jit", "jacrev of jacrev"),
}


def flat(x):
    return [x.detach().cpu()] if isinstance(x, torch.Tensor) else [t for y in x for t in flat(y)]


@pytest.mark.parametrize(
    ("run", "name"),
    [pytest.param(r, t, marks=[] if (r, t) in QUICK else pytest.mark.slow) for r in RUNS for t in TRANSFORMS],
)
def test_attention_in_transforms(run, name):
    values, f = inputs(queries=3, keys=3, width=2, value_width=2), TRANSFORMS[name]
    with sdpa_kernel(SDPBackend.MATH):
        wanted = flat(f(*values))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # that vmap does one sample after another
        warnings.filterwarnings("ignore", message=".*(insert a get_attr|lookup|Dynamo|deprecated).*")
        g = RUNS[run](f)
        for _ in range(2):
            got = flat(g(*(v.to(DEVICE) for v in values)))
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_the_first_derivative_is_fused():
    """Only who wants more gets the composite: `torch.func.grad` keeps the graph of the backward, too."""
    values = [v.to(DEVICE).float() for v in inputs()]
    torch.tpu.synchronize()
    last = (torch.tpu.graphs() or [None])[-1]
    grad(lambda q: loss(q, *values[1:]))(values[0]).cpu()
    names = {op["op"] for g in torch.tpu.graphs(after=last) for op in g.ops}
    assert "_scaled_dot_product_fused_attention_overrideable_backward" in names
    assert not names & {"bmm", "_safe_softmax", "_softmax"}, names
