"""Autograd and what stands on it: hooks, modes, `torch.func`, checkpointing, autocast; as on the CPU."""

import copy
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from support import DEVICE, assert_same, model
from torch import nn

# ---------------------------------------------------------------- autograd


def both(f):
    """Runs f on both devices and compares all tensors that it returns."""
    a, b = f("cpu"), f(DEVICE)
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        assert_same(y, x, f"result {i}", strides=False, rtol=1e-5, atol=1e-6)


def test_gradients():
    def run(d):
        x = torch.arange(6.0, device=d).view(2, 3).requires_grad_()
        w = torch.ones(3, 2, device=d, requires_grad=True)
        y = torch.relu(x @ w) * x.sum()
        (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (g.pow(2).sum()).backward()
        return x.grad, w.grad, g.detach()

    both(run)


def test_gradient_accumulation_and_retain():
    def run(d):
        x = torch.ones(3, device=d, requires_grad=True)
        y = x * 3
        y.retain_grad()
        z = y.square().sum()
        z.backward(retain_graph=True)
        z.backward()
        return x.grad, y.grad

    both(run)


def test_higher_derivatives_and_jacobians():
    def run(d):
        f = lambda x: (x.sin() * x.flip(0)).sum() + x.prod()  # noqa: E731
        x = torch.tensor([0.3, 0.7, 1.1], device=d)
        return (
            torch.autograd.functional.jacobian(lambda x: x.exp() * x.sum(), x),
            torch.autograd.functional.hessian(f, x),
            torch.autograd.functional.vjp(lambda x: x.tanh(), x, x)[1],
            torch.autograd.functional.hvp(f, x, x)[1],
        )

    both(run)


def test_gradcheck():
    x = torch.randn(3, 4, dtype=torch.float64, device=DEVICE, requires_grad=True)
    w = torch.randn(4, 2, dtype=torch.float64, device=DEVICE, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: (x @ w).tanh().softmax(1), (x, w))
    small = torch.rand(3, dtype=torch.float64, device=DEVICE, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: (x * x.exp()).sum(), (small,))


def test_custom_functions():
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            assert x.is_tpu
            return 3 * x**2 * g

    x = torch.tensor([1.0, 2.0], device=DEVICE, requires_grad=True)
    Cube.apply(x).sum().backward()
    assert x.grad.tolist() == [3, 12]


def test_hooks():
    m = nn.Linear(2, 2).to(DEVICE)
    calls = []
    m.register_forward_pre_hook(lambda m, args: calls.append("pre"))
    m.register_forward_hook(lambda m, args, out: calls.append(("forward", out.is_tpu)))
    m.register_full_backward_hook(lambda m, gi, go: calls.append(("backward", go[0].is_tpu)))
    m.weight.register_hook(lambda g: g * 2)
    m.weight.register_post_accumulate_grad_hook(lambda p: calls.append("accumulated"))
    x = torch.ones(1, 2, device=DEVICE, requires_grad=True)
    m(x).sum().backward()
    assert calls == ["pre", ("forward", True), "accumulated", ("backward", True)] or sorted(map(str, calls)) == sorted(
        map(str, ["pre", ("forward", True), ("backward", True), "accumulated"])
    )
    assert m.weight.grad.tolist() == [[2, 2], [2, 2]] and m.bias.grad.tolist() == [1, 1]


def test_saved_tensor_hooks():
    x = torch.arange(4.0, device=DEVICE, requires_grad=True)
    with torch.autograd.graph.save_on_cpu():
        y = x.exp() * x
    y.sum().backward()
    torch.testing.assert_close(x.grad.cpu(), (torch.arange(4.0).exp() * (torch.arange(4.0) + 1)))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.cpu(), lambda t: t.to(DEVICE)):
        (x * x).sum().backward()


def test_modes_of_autograd():
    x = torch.ones(2, device=DEVICE, requires_grad=True)
    with torch.no_grad():
        assert not (x * 2).requires_grad
    with torch.inference_mode():
        y = x * 2
    assert y.is_inference() and y.tolist() == [2, 2]
    with torch.autograd.detect_anomaly(), pytest.raises(RuntimeError, match="nan"):
        (x - 1).sqrt().mul(0).sum().backward()
    with torch.enable_grad():
        assert (x * 2).requires_grad


def test_gradients_across_devices():
    x = torch.arange(3.0, requires_grad=True)
    (x.to(DEVICE) * 2).cpu().square().sum().backward()
    assert x.grad.tolist() == [0, 8, 16] and x.grad.device.type == "cpu"


def test_graphs_are_freed():
    x = torch.ones(1 << 16, device=DEVICE, requires_grad=True)
    torch.tpu.synchronize()
    gc.collect()
    before = torch.tpu.memory_allocated()
    y = x
    for _ in range(10):
        y = y.sin()
    probe = weakref.ref(y)
    loss = y.sum()
    torch.tpu.synchronize()
    assert torch.tpu.memory_allocated() >= before + 10 * (4 << 16)
    del y, loss
    gc.collect()
    torch.tpu.synchronize()
    assert probe() is None and torch.tpu.memory_allocated() == before


def test_deep_graphs():
    x = torch.ones(2, device=DEVICE, requires_grad=True)
    y = x
    for _ in range(20_000):
        y = y + 1
    y.sum().backward()
    assert x.grad.tolist() == [1, 1]


# ---------------------------------------------------------------- torch.func, checkpointing, autocast


def test_functional_transforms():
    from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

    def run(d):
        x = torch.linspace(0.1, 1, 6, device=d).view(2, 3)
        w = torch.linspace(-1, 1, 12, device=d).view(3, 4)
        f = lambda x: (x.sin() * x.cos().sum()).sum()  # noqa: E731
        m = nn.Linear(3, 2)
        params = {k: torch.full_like(v, 0.5, device=d) for k, v in m.named_parameters()}

        def loss(params, x):
            return functional_call(m, params, (x,)).square().sum()

        per_sample = vmap(grad(loss), in_dims=(None, 0))(params, x)
        out, tangent = jvp(f, (x,), (torch.ones_like(x),))
        return (
            grad(f)(x), vmap(lambda row: row @ w)(x), vmap(grad(f))(x), out, tangent,
            vjp(f, x)[1](torch.ones((), device=d))[0], jacrev(lambda x: x.exp())(x[0]), jacfwd(lambda x: x.exp())(x[0]),
            hessian(f)(x[0]), per_sample["weight"], per_sample["bias"],
            vmap(lambda a, b: (a * b).sum(), in_dims=(0, None))(x, x[0]), vmap(torch.cumsum, in_dims=(0, None))(x, 0),
        )  # fmt: skip

    both(run)


def test_vmap_with_randomness():
    from torch.func import vmap

    x = torch.zeros(3, 100, device=DEVICE)
    different = vmap(lambda r: r + torch.rand_like(r), randomness="different")(x)
    same = vmap(lambda r: r + torch.rand(100, device=DEVICE), randomness="same")(x)
    assert not torch.equal(different[0], different[1]) and torch.equal(same[0], same[1])


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(reentrant):
    m = model().to(DEVICE).eval()
    twin = copy.deepcopy(m)
    x = torch.randn(4, 3, device=DEVICE, requires_grad=True)
    torch.utils.checkpoint.checkpoint(m, x, use_reentrant=reentrant).sum().backward()
    g = x.grad.clone()
    x.grad = None
    twin(x).sum().backward()
    assert torch.equal(g.cpu(), x.grad.cpu())
    assert all(torch.equal(a.grad.cpu(), b.grad.cpu()) for a, b in zip(m.parameters(), twin.parameters(), strict=True))


def test_autocast_bfloat16():
    m, x = model().to(DEVICE), torch.randn(4, 3, device=DEVICE)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        h = m[0](x)
        assert h.dtype == torch.bfloat16 and (x @ x.t()).dtype == torch.bfloat16
        assert h.softmax(1).dtype == h.sum().dtype == h.exp().dtype == torch.float32
        assert F.mse_loss(h, h).dtype == torch.float32 and (h + h.sum(0)).dtype == torch.float32
        assert torch.cat([h, h.float()]).dtype == torch.float32
        loss = m(x).float().square().mean()
        with torch.autocast(DEVICE, enabled=False):
            assert (x @ x.t()).dtype == torch.float32
    loss.backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in m.parameters())
    full = m(x).square().mean()
    assert abs(loss.item() - full.item()) < 0.05 * abs(full.item()) + 0.01
    assert torch.is_autocast_enabled(DEVICE) is False and torch.get_autocast_dtype(DEVICE) == torch.bfloat16


def test_autocast_float16_with_scaler():
    torch.manual_seed(0)
    m = nn.Linear(4, 1).to(DEVICE)
    start = m.weight.detach().clone()
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**10, growth_interval=2)
    x = torch.ones(8, 4, device=DEVICE)
    for _ in range(2):
        optimizer.zero_grad()
        with torch.autocast(DEVICE, dtype=torch.float16):
            out = m(x)
        assert out.dtype == torch.float16
        scaler.scale(out.float().mean()).backward()
        scaler.unscale_(optimizer)
        assert torch.allclose(m.weight.grad.cpu(), torch.ones(1, 4))
        nn.utils.clip_grad_norm_(m.parameters(), 10.0)
        scaler.step(optimizer)
        scaler.update()
    assert torch.allclose((start - m.weight).detach().cpu(), torch.full((1, 4), 0.2), atol=1e-6)
    assert scaler.get_scale() == 2.0**11
    before = m.weight.detach().clone()
    optimizer.zero_grad()
    scaler.scale((m(x) * float("inf")).sum()).backward()
    scaler.step(optimizer)  # skipped
    scaler.update()
    assert torch.equal(m.weight.detach().cpu(), before.cpu()) and scaler.get_scale() == 2.0**10


def test_autocast_caches_and_custom_functions():
    class Double(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type=DEVICE, cast_inputs=torch.float32)
        def forward(ctx, x):
            assert x.dtype == torch.float32 and not torch.is_autocast_enabled(DEVICE)
            return x * 2

        @staticmethod
        @torch.amp.custom_bwd(device_type=DEVICE)
        def backward(ctx, g):
            return g * 2

    x = torch.ones(2, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
    with torch.autocast(DEVICE):
        Double.apply(x).sum().backward()
    assert x.grad.tolist() == [2, 2]


def test_matmul_precision():
    """bfloat16 passes show in the result where they are allowed, on platforms that have them; "highest" is true float32."""
    torch.manual_seed(0)
    a, b = torch.randn(128, 128), torch.randn(128, 128)
    exact = a.double() @ b.double()
    for name in ("highest", "high", "default"):
        with torch.tpu.precision(name):
            error = ((a.to(DEVICE) @ b.to(DEVICE)).cpu() - exact).abs().max().item()
        assert error < {"highest": 1e-4, "high": 2e-3, "default": 0.5}[name]
