"""`torch.func` on the device: what has no tangent, and transforms in compiled functions, against PyTorch on the CPU."""

import copy

import pytest
import torch
from support import DEVICE, assert_same, tensors, to_device
from torch import nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap

INF = torch.tensor([2.0, float("inf"), -float("inf")])
CONSTANT = torch.tensor([3.0, 0.5, -2.0])

# Functions of x and a constant c, whose derivatives PyTorch computes by a tangent of zero for c.
OF_CONSTANTS = {
    "mul": lambda x, c: x * c,
    "div": lambda x, c: x / c,
    "addcmul": lambda x, c: torch.addcmul(c, x, c),
    "addcdiv": lambda x, c: torch.addcdiv(c, x, c),
    "cross": lambda x, c: torch.linalg.cross(x, c),
    "dot": lambda x, c: torch.dot(x, c),
    "lerp": lambda x, c: torch.lerp(x, c, c),
    "where": lambda x, c: torch.where(c > 0, x * c, c),
    "vdot": lambda x, c: torch.vdot(c, x),
    "matrix product": lambda x, c: x.diag() @ c.diag(),
    "norm": lambda x, c: nn.functional.layer_norm(x, (3,), c, c),
    "copy": lambda x, c: c.clone().copy_(x) * c,
}


@pytest.mark.parametrize("name", OF_CONSTANTS)
def test_what_has_no_tangent_adds_nothing(name):
    """Also where it is multiplied by what is infinite."""
    f = OF_CONSTANTS[name]

    def derivatives(x, c):
        return jvp(lambda x: f(x, c), (x,), (torch.ones_like(x),)), jacfwd(lambda x: f(x, c))(x)

    for x in (INF, CONSTANT + 1):
        for a, b in zip(
            tensors(derivatives(*to_device([x, CONSTANT]))), tensors(derivatives(x, CONSTANT)), strict=True
        ):
            assert_same(a, b, name, strides=False, rtol=1e-5, atol=1e-6)


def test_zeros_that_pytorch_knows_can_be_read():
    z = torch._efficientzerotensor((2, 3), device=DEVICE)
    assert torch._is_zerotensor(z) and z.device.type == DEVICE
    x = torch.ones(2, 3, device=DEVICE)
    for f in (lambda z: z, torch.clone, lambda z: z.t() @ z, lambda z: x.clone().copy_(z), lambda z: z.view(3, 2)[1:]):
        assert not f(z).cpu().any()
    assert z.sum().item() == 0 and not torch._is_zerotensor(z.clone()) and (x + z).equal(x)
    with pytest.raises(RuntimeError, match="ZeroTensors are immutable"):
        z.add_(1)


def test_all_second_derivatives_of_a_number():
    """The saved tensors of an operation have the ranks that the CPU's have: `vmap` looks at them."""
    f, x = hessian(nn.functional.logsigmoid), torch.tensor(0.3)
    assert_same(f(x.to(DEVICE)), f(x), rtol=1e-5, atol=1e-6)


# Functions of which a gradient is an operation that takes more than gradients.
WITH_BACKWARDS = {
    "pdist": lambda a, b: nn.functional.pdist(a * b),
    "prelu": lambda a, b: nn.functional.prelu(a, b[0]),
    "layer norm": lambda a, b: nn.functional.layer_norm(a, (3,), b[0], b[1]),
    "maxima": lambda a, b: nn.functional.max_pool1d(a * b, 2),
    "grid": lambda a, b: nn.functional.grid_sample(a[None, None], torch.stack([a, b], -1)[None], align_corners=False),
    "sums": lambda a, b: torch.cumsum(a, 0) * torch.logsumexp(b, 1, keepdim=True),
}


@pytest.mark.parametrize("name", WITH_BACKWARDS)
def test_gradients_alone_may_be_batched(name):
    """As for `jacrev`: what was saved has no batch then."""
    a, b = torch.randn(4, 3, generator=torch.Generator().manual_seed(3)), torch.linspace(-1, 1, 12).view(4, 3)
    result, back = vjp(WITH_BACKWARDS[name], a, b)
    given = torch.randn(2, *result.shape, generator=torch.Generator().manual_seed(4))
    found = vmap(vjp(WITH_BACKWARDS[name], a.to(DEVICE), b.to(DEVICE))[1])(given.to(DEVICE))
    for x, *one_by_one in zip(found, *(back(g) for g in given), strict=True):
        assert_same(x, torch.stack(one_by_one), name, strides=False, rtol=1e-4, atol=1e-5)


def test_gradients_of_cdist_alone_are_refused():
    """PyTorch's rule gives them back without their batch, and on the CPU their sum for each."""
    a = torch.linspace(-1, 1, 12).view(4, 3).to(DEVICE)
    with pytest.raises(RuntimeError, match="cdist: expected a gradient of 2 dimensions, got 3D: `vmap` over gradients"):
        jacrev(torch.cdist)(a, a + 1)
    jacobian = torch.autograd.functional.jacobian
    found, expected = (jacobian(lambda x: torch.cdist(x, x.flip(0)), x) for x in (a, a.cpu()))
    assert_same(found, expected, strides=False, rtol=1e-4, atol=1e-5)


class Net(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.outer = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.LayerNorm(4) if norm else nn.Identity())
        self.register_buffer("shift", torch.linspace(0, 1, 4))

    def forward(self, x):
        return self.outer(torch.tanh(self.inner(x) + self.shift)) * torch.arange(4, device=x.device)


def parameters(net):
    return {name: p.detach() for name, p in net.named_parameters()}


def loss(net, p, x):
    return functional_call(net, p, (x,)).square().sum()


# With a norm, whose weights have no tangents, or without one: PyTorch's own compiler refuses the former's jvp.
IN_COMPILED = {
    "grad": (True, lambda net, x: grad(lambda p: loss(net, p, x))(parameters(net))),
    "vjp": (True, lambda net, x: vjp(net, x)[1](x)),
    "jvp": (False, lambda net, x: jvp(net, (x,), (x.cos(),))),
    "jacrev": (True, lambda net, x: jacrev(net)(x)),
    "jacfwd": (False, lambda net, x: jacfwd(net)(x)),
    "hessian": (False, lambda net, x: hessian(lambda x: net(x).sin().sum())(x)),
    "vmap of grad": (True, lambda net, x: vmap(grad(lambda p, x: loss(net, p, x)), (None, 0))(parameters(net), x)),
    "linearize": (True, lambda net, x: linearize(net, x)[1](x.cos())),
    "linearize by parameters": (
        True,
        lambda net, x: linearize(lambda p: functional_call(net, p, (x,)), parameters(net))[1](parameters(net)),
    ),
}
QUICK = ("linearize", "hessian")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in IN_COMPILED])
def test_in_a_compiled_function(name):
    norm, f = IN_COMPILED[name]
    torch.manual_seed(0)
    net, x = Net(norm), torch.randn(2, 4)
    expected, there = f(net, x), copy.deepcopy(net).to(DEVICE)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: f(there, x), backend="tpu")
    for _ in range(2):
        for a, b in zip(tensors(compiled(x.to(DEVICE))), tensors(expected), strict=True):
            assert_same(a, b, name, strides=False, rtol=1e-4, atol=1e-5)
    torch._dynamo.reset()
