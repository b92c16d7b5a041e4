"""`torch.compile` on the device, against eager PyTorch on the CPU."""

import pytest
import torch
from compile_support import assert_close, compiled, fresh_dynamo, mlp, pair  # noqa: F401 (a fixture)
from support import DEVICE, to_device
from torch import nn


class Block(nn.Module):
    """A transformer layer."""

    def __init__(self, width=16, heads=2):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(x)


class Conv(nn.Module):
    """Convolutions with running statistics, which the forward writes."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(128, 4),
        )

    def forward(self, x):
        return self.layers(x)


MODELS = {"mlp": (mlp, (6, 12)), "block": (Block, (2, 7, 16)), "conv": (Conv, (3, 3, 8, 8))}


@pytest.mark.parametrize("name", MODELS)
def test_forward_and_backward(name, mode):
    make, shape = MODELS[name]
    cpu, device = pair(make)
    f = compiled(device, fullgraph=True)
    for _ in range(3):
        x = torch.randn(shape)
        a, z = x.clone().requires_grad_(), to_device(x).requires_grad_()
        expected, actual = cpu(a), f(z)
        assert_close(actual, expected)
        expected.square().mean().backward()
        actual.square().mean().backward()
        assert_close(z.grad, a.grad, "input")
    for (what, p), q in zip(cpu.named_parameters(), device.parameters(), strict=True):
        assert_close(q.grad, p.grad, what)
    for (what, p), q in zip(cpu.named_buffers(), device.buffers(), strict=True):
        assert_close(q, p, what)


def test_inference(mode):
    cpu, device = pair(mlp)
    f = compiled(device.eval())
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(4, 12)
            assert_close(f(to_device(x)), cpu(x))


def test_the_default_backend_serves_the_device():
    if not hasattr(torch.compiler, "set_default_backend"):
        pytest.skip("this PyTorch has no default backend that can be set")
    cpu, device = pair(mlp)
    f = torch.compile(device, fullgraph=True)
    x = torch.randn(4, 12)
    torch.tpu.reset_metrics()
    actual = f(x.to(DEVICE))
    assert torch.tpu.metrics()["ops"] + torch.tpu.metrics().get("replays", 0) > 0
    assert_close(actual, cpu(x))


def test_inductor_by_name_says_what_to_do():
    with pytest.raises(Exception, match='backend="tpu"'):
        torch.compile(lambda x: x.sin() + 1, backend="inductor")(torch.ones(3, device=DEVICE))


def test_options_are_refused():
    with pytest.raises(Exception, match="custom_compiler_options"):
        compiled(lambda x: x + 1, options={"epilogue_fusion": True})(torch.ones(3, device=DEVICE))


def test_no_compiler_for_c_plus_plus_is_needed(python):
    done = python(
        "import torch; print(torch.compile(lambda x: x * 2 + 1, backend='tpu')(torch.ones(2, device='tpu')).tolist())",
        CXX="/nonexistent",
        PATH="/nonexistent",
    )
    assert done.stdout == "[3.0, 3.0]\n"


def test_import_of_torch_does_not_import_dynamo(python):
    done = python("import sys, torch; torch.ones(2, device='tpu').cpu(); print('torch._dynamo' in sys.modules)")
    assert done.stdout == "False\n"


def test_dropout_is_that_of_eager(mode):
    def f(x):
        return nn.functional.dropout(x, 0.25) + torch.rand_like(x)

    g = compiled(f, fullgraph=True)
    x = torch.ones(64, 64, device=DEVICE)
    torch.manual_seed(3)
    expected = [f(x).cpu() for _ in range(4)]
    torch.manual_seed(3)
    actual = [g(x).cpu() for _ in range(4)]
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e)
    assert not torch.equal(actual[1], actual[2])


def test_dropout_of_the_backward_is_that_of_the_forward():
    g = compiled(lambda x: nn.functional.dropout(x, 0.5), fullgraph=True)
    for _ in range(3):
        x = torch.ones(1000, device=DEVICE, requires_grad=True)
        y = g(x)
        y.sum().backward()
        assert torch.equal(x.grad.cpu(), y.detach().cpu())
        assert 0.4 < (y > 0).float().mean().item() < 0.6


@pytest.mark.parametrize("autocast", [lambda: torch.autocast("tpu"), lambda: torch.tpu.amp.autocast()])
def test_autocast(autocast):
    model = mlp().to(DEVICE)
    x = torch.randn(4, 12, device=DEVICE)

    def f(x):
        with autocast():
            return model(x)

    g = compiled(f, fullgraph=True)
    for _ in range(3):
        expected, actual = f(x), g(x)
        assert actual.dtype == expected.dtype
        torch.testing.assert_close(actual.cpu(), expected.cpu(), rtol=2e-2, atol=2e-2)
        actual.float().sum().backward()


@torch.library.custom_op("oxitorch_tests::twice", mutates_args=(), device_types="cpu")
def twice(x: torch.Tensor) -> torch.Tensor:
    """An operation that only the CPU has."""
    return x * 2


@twice.register_fake
def _(x):
    return torch.empty_like(x)


@pytest.mark.filterwarnings("ignore:oxitorch_tests..twice has no lowering")
def test_operations_without_a_lowering_run_on_the_cpu():
    def f(x):
        return twice(x) * 2

    g = compiled(f)
    torch.tpu.reset_metrics()
    for _ in range(3):
        x = torch.randn(4, 4)
        assert_close(g(to_device(x)), f(x))
    assert torch.tpu.metrics()["fallbacks"]["oxitorch_tests::twice"] >= 3


def test_failures_name_the_line():
    def f(x, i):
        y = x * 2
        return y[i] + 1  # here

    g = compiled(f)
    x = torch.ones(4, device=DEVICE)
    line = f.__code__.co_firstlineno + 2
    with torch.tpu.set_eager_mode("debug"), pytest.raises(IndexError, match=f"called at .*test_compile.py:{line} in f"):
        g(x, torch.tensor([9], device=DEVICE))


def test_a_barrier():
    def f(x):
        a, b = torch.tpu.ops.optimization_barrier(x.sin(), x.cos())
        return (a + b).sum()

    g = compiled(f, fullgraph=True)
    for _ in range(2):
        x = torch.ones(3, device=DEVICE, requires_grad=True)
        g(x).backward()
        assert_close(x.grad, torch.ones(3).cos() - torch.ones(3).sin())


def test_compiled_functions_under_transforms(mode):
    def loss(w, x):
        return ((x @ w).tanh() ** 2).sum()

    w, x = torch.randn(3, 2), torch.randn(5, 3)
    for f in (torch.func.grad(loss), torch.func.vmap(loss, (None, 0)), torch.func.jacrev(loss)):
        g = compiled(f)
        for _ in range(2):
            assert_close(g(to_device(w), to_device(x)), f(w, x))


def test_checkpoint_recomputes_with_the_same_dropout():
    def block(x, w):
        return nn.functional.dropout((x @ w).relu(), 0.5).sin()

    def f(x, w):
        return torch.utils.checkpoint.checkpoint(block, x, w, use_reentrant=False).sum()

    g = compiled(f)
    for _ in range(3):
        gradients = []
        for h in (g, f):
            torch.manual_seed(4)
            x, w = torch.ones(16, 8, device=DEVICE), torch.ones(8, 8, device=DEVICE, requires_grad=True)
            h(x, w).backward()
            gradients.append(w.grad.cpu())
        torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("mode_name", ["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"])
def test_modes_are_accepted(mode_name):
    x = torch.randn(4)
    assert_close(torch.compile(lambda x: x.sin(), backend="tpu", mode=mode_name)(to_device(x)), x.sin())


def test_dynamo_explains():
    def f(x):
        y = x.sin()
        torch._dynamo.graph_break()
        return y.cos()

    explained = torch._dynamo.explain(f)(torch.ones(3, device=DEVICE))
    assert (explained.graph_count, explained.graph_break_count) == (2, 1)


@pytest.mark.parametrize("name", MODELS)
def test_exported_programs_run(name):
    make, shape = MODELS[name]
    cpu, device = pair(make)
    x = torch.randn(shape)
    exported = torch.export.export(device.eval(), (to_device(x),))
    assert_close(exported.module()(to_device(x)), cpu.eval()(x))
    assert_close(compiled(exported.module())(to_device(x)), cpu(x))
