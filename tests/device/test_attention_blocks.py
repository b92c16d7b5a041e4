"""Attention whose scores would take much memory is computed for some queries after others, on TPUs and GPUs: what it
gives is what it gives at once. The programs for a TPU run on the CPU here.
"""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

CHILD = """
import json
import sys

import torch

sys.path.insert(0, sys.argv[1])
from test_attention_blocks import CASES, call
with torch.tpu.set_eager_mode("fused"):
    for name in sys.argv[3:]:
        torch.save(call(name, "tpu"), f"{sys.argv[2]}/{name}.pt")
    print(json.dumps([g.stablehlo.count("stablehlo.while") for g in torch.tpu.graphs()]))
"""

# Batch, heads of queries and keys, queries, keys, widths of keys and values; the mask, whether it is causal, dropout.
# From 512 MiB of scores on there are blocks.
CASES = {
    "causal, and shared keys": ((1, 4, 2, 6001, 6001, 8, 12), None, True, 0.0),
    "whole blocks": ((1, 4, 4, 6144, 6144, 8, 8), None, True, 0.0),
    "more keys": ((1, 4, 4, 5000, 7000, 8, 8), None, False, 0.0),
    "mask by query": ((1, 4, 4, 6001, 6100, 8, 12), "float", False, 0.0),
    "mask by key": ((2, 2, 2, 6001, 6001, 8, 8), "keys", False, 0.0),
    "rows without keys": ((1, 4, 4, 6001, 6100, 8, 8), "rows", False, 0.0),
    "dropout": ((1, 4, 4, 6001, 6001, 8, 8), None, True, 0.3),
}
QUICK = "causal, and shared keys"


def operands(name):
    (b, h, hk, queries, keys, d, dv), kind, causal, p = CASES[name]
    g = torch.Generator().manual_seed(len(name))
    q, k, v = (torch.randn(shape, generator=g) for shape in ((b, h, queries, d), (b, hk, keys, d), (b, hk, keys, dv)))
    mask = {
        None: lambda: None,
        "float": lambda: torch.randn(queries, keys, generator=g),
        "keys": lambda: torch.rand(b, 1, 1, keys, generator=g) > 0.3,
        "rows": lambda: (torch.rand(queries, 1, generator=g) > 0.3).expand(queries, keys),
    }[kind]()
    return (q, k, v), mask, causal, p, h != hk


def call(name, device):
    """The result and the gradients."""
    qkv, mask, causal, p, shared = operands(name)
    qkv = [x.to(device).requires_grad_() for x in qkv]
    torch.manual_seed(5)
    mask = mask if mask is None else mask.to(device)
    y = F.scaled_dot_product_attention(*qkv, attn_mask=mask, is_causal=causal, dropout_p=p, enable_gqa=shared)
    weights = torch.linspace(-1, 1, y.shape[-1], device=device)
    return [x.detach().cpu() for x in (y, *torch.autograd.grad((y * weights).square().sum(), qkv))]


@pytest.fixture
def lowered(python, tmp_path):
    """What cases give with the lowerings of a platform, and how many loops there were."""

    def run(platform, names):
        here = str(Path(__file__).parent)
        done = python(CHILD, here, str(tmp_path), *names, timeout=600, OXITORCH_LOWER_FOR=platform)
        loops = sum(json.loads(done.stdout.splitlines()[-1]))
        return [torch.load(tmp_path / f"{name}.pt") for name in names], loops

    return run


def close(made, expected):
    for a, e in zip(made, expected, strict=True):
        assert (a - e).double().norm() <= 5e-6 * e.double().norm()


def test_blocks_are_as_all_at_once(lowered):
    (made,), loops = lowered("tpu", [QUICK])
    assert loops == 2, "one for the result and one for the gradients"
    close(made, call(QUICK, "cpu"))


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_all_cases_in_blocks(lowered, platform):
    names = [name for name in CASES if name != "dropout"]
    made, loops = lowered(platform, names)
    assert loops == 2 * len(names)
    for name, result in zip(names, made, strict=True):
        close(result, call(name, "cpu"))


@pytest.mark.slow
def test_blocks_drop_what_is_dropped_at_once(lowered):
    (blocks,), loops = lowered("tpu", ["dropout"])
    (whole,), none = lowered("cpu", ["dropout"])
    assert (loops, none) == (2, 0)
    close(blocks, whole)


VARYING = """
import torch
import torch.nn.functional as F
from torch.tpu import Dim


def step(x):
    q = x.detach().requires_grad_()
    y = F.scaled_dot_product_attention(q, q[:, :2], q[:, :2, :, :6], enable_gqa=True)
    return y, torch.autograd.grad(y.square().sum(), q)[0]


jitted = torch.tpu.jit(step, dynamic={"x": {2: Dim(buckets=[6144])}})
for size in (6001,):
    x = torch.randn(1, 4, size, 8)
    for made, expected in zip(jitted(x.to("tpu")), step(x), strict=True):
        assert (made.cpu() - expected).norm() <= 2e-5 * expected.norm(), size
print(torch.tpu.metrics()["programs"], sum(g.stablehlo.count("stablehlo.while") for g in torch.tpu.graphs()))
"""


def test_sizes_that_vary_are_one_program_with_blocks(python):
    assert python(VARYING, timeout=300, OXITORCH_LOWER_FOR="tpu").stdout.split() == ["1", "2"]
