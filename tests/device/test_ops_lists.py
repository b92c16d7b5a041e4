"""Operations on lists of tensors, and optimizers."""

import pytest
import torch
from support import DEVICE, assert_same, to_device

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
