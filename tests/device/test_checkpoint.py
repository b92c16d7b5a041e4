"""`torch.utils.checkpoint` where forward and backward are one program: what is dropped is not kept all the same."""

import copy
import functools

import pytest
import torch
from support import DEVICE, LaunchedGraphs
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

BLOCKS, ROWS, WIDTH = 5, 2048, 32


class Block(nn.Module):
    def __init__(self, p=0.0):
        super().__init__()
        self.norm, self.wide, self.narrow = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.Linear(4 * WIDTH, WIDTH),
        )
        self.drop = nn.Dropout(p)

    def forward(self, x):
        return x + self.drop(self.narrow(nn.functional.gelu(self.wide(self.norm(x)))))


def each(run):
    """A model's forward that runs each block so."""

    def forward(blocks, x):
        for block in blocks:
            x = run(block, x)
        return x

    return forward


def keeps_products(_ctx, op, *_args, **_kwargs):
    is_product = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


def selective(block, x):
    contexts = functools.partial(create_selective_checkpoint_contexts, keeps_products)
    return checkpoint(block, x, use_reentrant=False, context_fn=contexts)


def nested(blocks, x):
    inner = each(lambda block, x: checkpoint(block, x, use_reentrant=False))
    for i in range(0, len(blocks), 2):
        x = checkpoint(inner, blocks[i : i + 2], x, use_reentrant=False)
    return x


# Forms, and which share of the temporaries without checkpoints there may be.
FORMS = {
    "plain": (each(lambda block, x: checkpoint(block, x, use_reentrant=False)), 0.5),
    "reentrant": (each(lambda block, x: checkpoint(block, x, use_reentrant=True)), 0.5),
    "nested": (nested, 0.75),
    "sequential": (lambda blocks, x: checkpoint_sequential(blocks, BLOCKS, x, use_reentrant=False), 0.6),
    "selective": (each(selective), 0.9),
}
NONE = each(lambda block, x: block(x))


def trained(forward, run, p=0.0):
    """Temporaries of a step's program, and the gradients that the program's third call gives."""
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Block(p) for _ in range(BLOCKS))).to(DEVICE)
    x = torch.randn(ROWS, WIDTH).to(DEVICE).requires_grad_()
    function = functools.partial(forward, blocks)
    if run == "compile":
        torch._dynamo.reset()
        function = torch.compile(function, backend="tpu")

    def step(x):
        blocks.zero_grad()
        function(x).square().mean().backward()

    step = torch.tpu.jit(step) if run == "jit" else step
    for _ in range(3):
        torch.tpu.manual_seed(5)
        graphs = LaunchedGraphs()
        step(x)
    largest = max(g.memory_bytes["temporaries"] for g in graphs.take())
    return largest, [p.grad.cpu() for p in blocks.parameters()]


@pytest.fixture(scope="module")
def without():
    """What it is without checkpoints, by how it is run and the share that is dropped."""
    return functools.cache(functools.partial(trained, NONE))


QUICK = {("jit", "plain"), ("jit", "selective"), ("compile", "plain")}


@pytest.mark.parametrize(
    ("run", "form"),
    [pytest.param(r, f, marks=[] if (r, f) in QUICK else pytest.mark.slow) for r in ("jit", "compile") for f in FORMS],
)
def test_one_program_has_fewer_temporaries(run, form, without, fused):
    forward, share = FORMS[form]
    before, wanted = without(run)
    temporaries, gradients = trained(forward, run)
    assert temporaries < share * before, (temporaries, before)
    for got, g in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(got, g, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("run", ["jit", pytest.param("compile", marks=pytest.mark.slow)])
def test_dropout_is_the_same_once_more(run, without, fused):
    _, wanted = without(run, 0.3)
    _, gradients = trained(FORMS["plain"][0], run, 0.3)
    for got, g in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(got, g, rtol=1e-4, atol=1e-6)
    assert any((a - b).abs().max() > 1e-6 for a, b in zip(gradients, without(run)[1], strict=True))


@pytest.mark.parametrize("pin", [False, True])
def test_saved_tensors_on_the_host(pin):
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    other = copy.deepcopy(model).to(DEVICE)
    x = torch.randn(5, 8)
    model(x).square().mean().backward()
    with torch.autograd.graph.save_on_cpu(pin_memory=pin):
        y = other(x.to(DEVICE)).square().mean()
    y.backward()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(q.grad.cpu(), p.grad, rtol=1e-5, atol=1e-6)
