"""`torch.tpu.offload` and `save_on_cpu`: saved tensors in the memory of the host, with the gradients of without."""

import copy
import functools

import pytest
import torch
from support import DEVICE
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

ROWS, WIDTH, BLOCKS = 1024, 64, 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256), nn.Linear(256, WIDTH)

    def forward(self, x):
        wide = torch.tpu.checkpoint_name(self.wide(self.norm(x)), "wide")
        return x + self.narrow(nn.functional.gelu(wide))


def by_name(block, x):
    policy = torch.tpu.save_only_these_names("wide")
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    return checkpoint(block, x, use_reentrant=False, context_fn=contexts, respect_saved_tensors_hooks=True)


def plain(block, x):
    return block(x)


def remat(block, x):
    return checkpoint(block, x, use_reentrant=False)


def reentrant(block, x):
    return checkpoint(block, x, use_reentrant=True)


ACTIVATION = ROWS * WIDTH * 4
# Each way with how a block is called, and the bytes that have to leave the device, at least, and at most.
INNER, INPUTS, NAMED = BLOCKS * 9 * ACTIVATION, BLOCKS * ACTIVATION, BLOCKS * 4 * ACTIVATION
WAYS = {
    "all": (torch.tpu.offload, plain, INNER, 2 * INNER),
    "save_on_cpu": (save_on_cpu, plain, INNER, 2 * INNER),
    "pinned": (functools.partial(save_on_cpu, pin_memory=True), plain, INNER, 2 * INNER),
    "named": (functools.partial(torch.tpu.offload, "wide"), plain, NAMED, NAMED),
    "chosen": (functools.partial(torch.tpu.offload, lambda t: t.shape[-1] == 256), plain, NAMED, 3 * NAMED),
    "inputs of checkpoints": (torch.tpu.offload, remat, INPUTS, INPUTS),
    "inputs of reentrant ones": (torch.tpu.offload, reentrant, INPUTS, INPUTS),
    "names that a policy keeps": (functools.partial(torch.tpu.offload, "wide"), by_name, NAMED, NAMED),
}
needs_policies = pytest.mark.skipif(
    not hasattr(torch.utils.checkpoint, "_current_user_saved_tensors_hooks"),
    reason="this PyTorch's policies see no hooks",
)


@functools.cache
def made():
    torch.manual_seed(0)
    return nn.ModuleList(Block() for _ in range(BLOCKS)), torch.randn(ROWS, WIDTH)


def forward(blocks, x, call):
    for block in blocks:
        x = call(block, x)
    return x.square().mean()


@functools.cache
def wanted():
    blocks, x = made()
    blocks = copy.deepcopy(blocks).to(DEVICE)
    forward(blocks, x.to(DEVICE).requires_grad_(), plain).backward()
    return [p.grad.cpu() for p in blocks.parameters()]


def check(blocks):
    for p, g in zip(blocks.parameters(), wanted(), strict=True):
        torch.testing.assert_close(p.grad.cpu(), g, rtol=1e-4, atol=1e-6)


def counted():
    m = torch.tpu.metrics()
    return {k: m[k] for k in ("bytes_offloaded", "bytes_reloaded", "bytes_d2h")} | {"read": m["flushes"].get("read", 0)}


@pytest.mark.parametrize(
    "way", [pytest.param(w, marks=[needs_policies] if w.startswith("names") else []) for w in WAYS]
)
def test_between_forward_and_backward_it_is_on_the_host(way, fused):
    context, call, least, most = WAYS[way]
    blocks, x = made()
    blocks, x = copy.deepcopy(blocks).to(DEVICE), x.to(DEVICE).requires_grad_()
    torch.tpu.synchronize()
    before, on_device = counted(), torch.tpu.memory_allocated()
    with context():
        loss = forward(blocks, x, call)
    after = counted()
    assert (after["read"], after["bytes_d2h"]) == (before["read"], before["bytes_d2h"])  # nobody has waited
    loss.item()
    torch.tpu.synchronize()
    kept = torch.tpu.memory_allocated() - on_device
    moved = counted()["bytes_offloaded"] - before["bytes_offloaded"]
    assert least <= moved <= most, (moved, least, most)
    if way in ("all", "save_on_cpu", "pinned", "inputs of checkpoints"):
        assert kept < ACTIVATION, kept
    loss.backward()
    check(blocks)
    assert counted()["bytes_reloaded"] - before["bytes_reloaded"] == moved


@pytest.mark.parametrize("way", ["all", "pinned", "inputs of checkpoints"])
def test_in_one_program_the_compiler_moves_it(way, fused):
    context, call, _, _ = WAYS[way]
    blocks, x = made()
    blocks, x = copy.deepcopy(blocks).to(DEVICE), x.to(DEVICE)

    @torch.tpu.jit
    def step(x):
        blocks.zero_grad()
        with context():
            loss = forward(blocks, x, call)
        loss.backward()
        return loss

    before = counted()
    for _ in range(3):
        step(x)
    check(blocks)
    assert counted()["bytes_offloaded"] == before["bytes_offloaded"]


def test_around_a_compiled_module(fused):
    blocks, x = made()
    blocks, x = copy.deepcopy(blocks).to(DEVICE), x.to(DEVICE)
    compiled = torch.compile(functools.partial(forward, blocks, call=plain), backend="tpu")
    for _ in range(2):
        blocks.zero_grad()
        with torch.tpu.offload():
            loss = compiled(x)
        loss.backward()
    check(blocks)


def of(values, how):
    """A leaf, and what an operation saves that is such a view of memory."""
    leaf = torch.tensor(values, dtype=torch.float32).to(DEVICE).requires_grad_()
    return leaf, how(leaf * 1.0)


VIEWS = {
    "all": lambda x: x,
    "transposed": lambda x: x.t(),
    "a part": lambda x: x[1:, :2],
    "every second": lambda x: x[:, ::2],
    "expanded": lambda x: x[:1].expand(3, 4),
    "a number": lambda x: x[1, 2],
    "flat": lambda x: x.reshape(-1),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize(("context", "mode"), [(torch.tpu.offload, "fused"), (save_on_cpu, "strict")])
def test_views(view, context, mode):
    with torch.tpu.set_eager_mode(mode):
        saves_view(VIEWS[view], context)


def saves_view(view, context):
    values = torch.arange(12.0).reshape(3, 4).tolist()
    leaf, x = of(values, view)
    with context():
        y = (x * x * x).sum()
    y.item()
    y.backward(retain_graph=True)
    y.backward()
    host = torch.tensor(values, requires_grad=True)
    z = (view(host * 1.0) ** 3).sum()
    z.backward(retain_graph=True)
    z.backward()
    torch.testing.assert_close(leaf.grad.cpu(), host.grad)


def test_what_is_overwritten_meanwhile():
    w = torch.ones(3, device=DEVICE, requires_grad=True)
    x = torch.full((3,), 2.0, device=DEVICE, requires_grad=True)
    y = x * 1.0
    with torch.tpu.offload():
        kept, moved = (w * x), (y * y)
    with torch.no_grad():
        w.add_(5.0)
        y.add_(1.0)
    torch.testing.assert_close(torch.autograd.grad(moved.sum(), x)[0].cpu(), torch.full((3,), 4.0))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.sum().backward()
    w = torch.ones(3, device=DEVICE, requires_grad=True)
    with save_on_cpu():
        copied = w * x
    with torch.no_grad():
        w.add_(5.0)
    torch.testing.assert_close(torch.autograd.grad(copied.sum(), x)[0].cpu(), torch.ones(3))


def test_tensors_of_other_devices_stay():
    x = torch.ones(3, requires_grad=True)
    with torch.tpu.offload():
        y = torch.tpu.checkpoint_name(x * 2, "y").square().sum()
    y.backward()
    torch.testing.assert_close(x.grad, torch.full((3,), 8.0))


@pytest.mark.parametrize("policy", [3, [1, "a"], [None]])
def test_what_is_no_policy(policy):
    with pytest.raises(TypeError, match="names or a function"):
        torch.tpu.offload(policy)


def test_the_host_has_what_it_was_and_a_second_derivative():
    x = torch.linspace(-1, 1, 5, device=DEVICE, requires_grad=True)
    with torch.tpu.offload():
        y = (x * 1.0).tanh().sum()
        (g,) = torch.autograd.grad(y, x, create_graph=True)
    (h,) = torch.autograd.grad(g.sum(), x)
    host = torch.linspace(-1, 1, 5, requires_grad=True)
    (a,) = torch.autograd.grad(host.tanh().sum(), host, create_graph=True)
    (b,) = torch.autograd.grad(a.sum(), host)
    torch.testing.assert_close(h.cpu(), b)
