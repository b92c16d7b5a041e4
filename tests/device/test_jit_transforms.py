"""Transforms of functions in functions of `torch.tpu.jit`."""

import pytest
import torch
import torch.fx.experimental.proxy_tensor
from jit_support import batches, compare, mlp
from support import DEVICE, assert_close, to_device
from torch import nn

MATRIX = torch.arange(16.0).reshape(4, 4) / 16


def curve(x):
    return torch.tanh(x @ MATRIX.to(x.device)).sin().sum(-1)


TRANSFORMS = {
    "vjp": lambda x: torch.func.vjp(curve, x)[1](torch.ones(3, device=x.device))[0],
    "jvp": lambda x: torch.func.jvp(curve, (x,), (torch.ones_like(x),)),
    "jacrev": lambda x: torch.func.jacrev(curve)(x),
    "jacfwd": lambda x: torch.func.jacfwd(curve)(x),
    "hessian": lambda x: torch.func.hessian(lambda y: curve(y).sum())(x),
    "vmap": lambda x: torch.func.vmap(lambda row: curve(row) * 2)(x),
    "vmap in chunks": lambda x: torch.func.vmap(curve, chunk_size=2)(x),
    "gradients of each": lambda x: torch.func.vmap(torch.func.grad(curve))(x),
    "linearize": lambda x: torch.func.linearize(lambda x: curve(x) * 3.5 + torch.ones(3, device=x.device), x)[1](x + 1),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(name):
    f = torch.tpu.jit(TRANSFORMS[name])
    for _ in range(3):
        x = torch.randn(3, 4)
        compare(f(to_device(x)), TRANSFORMS[name](x))
    assert f.traces <= 2


def test_an_ensemble():
    models = [nn.Linear(4, 2).to(DEVICE) for _ in range(3)]
    state = torch.func.stack_module_state(models)
    base = nn.Linear(4, 2, device="meta")

    @torch.tpu.jit
    def f(parameters, buffers, x):
        call = lambda p, b: torch.func.functional_call(base, (p, b), (x,))  # noqa: E731
        return torch.func.vmap(call)(parameters, buffers)

    x = torch.randn(5, 4)
    with torch.no_grad():
        for _ in range(2):
            assert_close(f(*state, to_device(x)), torch.stack([m(to_device(x)).cpu() for m in models]))


def test_checkpoints_and_higher_order():
    model, other = mlp().to(DEVICE), mlp()

    def f(model):
        def run(x):
            def inner(x):
                y = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
                return y.square().sum()

            x = x.detach().requires_grad_()
            (g,) = torch.autograd.grad(inner(x), x, create_graph=True)
            (h,) = torch.autograd.grad(g.square().sum(), x)
            return g.detach(), h

        return run

    jitted = torch.tpu.jit(f(model))
    for x, _ in batches(3):
        compare(jitted(to_device(x)), f(other)(x))
    assert jitted.traces <= 2


def total(x):
    return (torch.tanh(x) * x).sum()


def double(x):
    return x.sin() * 2, x.sum()


# Transforms of a jitted function from outside.
AROUND = {
    "grad": lambda of, x: torch.func.grad(of(total))(x),
    "value and grad": lambda of, x: torch.func.grad_and_value(of(total))(x),
    "vjp": lambda of, x: torch.func.vjp(of(total), x)[1](torch.ones((), device=x.device)),
    "jvp": lambda of, x: torch.func.jvp(of(total), (x,), (torch.ones_like(x),)),
    "jacrev": lambda of, x: torch.func.jacrev(of(torch.tanh))(x),
    "jacfwd": lambda of, x: torch.func.jacfwd(of(torch.tanh))(x),
    "hessian": lambda of, x: torch.func.hessian(of(total))(x),
    "vmap": lambda of, x: torch.func.vmap(of(double))(x),
    "vmap of grad": lambda of, x: torch.func.vmap(torch.func.grad(of(total)))(x),
    "linearize": lambda of, x: torch.func.linearize(of(torch.tanh), x)[1](x),
    "functionalize": lambda of, x: torch.func.functionalize(of(torch.tanh))(x),
    "make_fx": lambda of, x: torch.fx.experimental.proxy_tensor.make_fx(of(total))(x + 1)(x),
}


@pytest.mark.parametrize("name", AROUND)
@pytest.mark.parametrize("known", [False, True], ids=["new", "known"])
def test_transforms_from_outside(name, known):
    made = []

    def of(f):
        jitted = torch.tpu.jit(f)
        made.append(jitted)
        for _ in range(3 * known):
            jitted(to_device(torch.ones(3, 4)))
        return jitted

    x = torch.randn(3, 4)
    compare(AROUND[name](of, to_device(x)), AROUND[name](lambda f: f, x))
    (jitted,) = made
    with torch.no_grad():
        compare(jitted(to_device(x)), jitted.__wrapped__(x))
