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
    for name in CASES if sys.argv[2] == "all" else sys.argv[2].split(","):
        torch.save(call(name, "tpu"), f"{sys.argv[3]}/{name}.pt")
    print(json.dumps([g.stablehlo.count("stablehlo.while") for g in torch.tpu.graphs()]))
"""

# Batch, heads of queries and keys, queries, keys, widths of keys and values; the mask, whether it is causal, dropout.
CASES = {
    "causal": ((1, 2, 2, 3072, 3072, 8, 8), None, True, 0.0),
    "no whole number of blocks": ((1, 2, 2, 3001, 3001, 8, 8), None, True, 0.0),
    "shared keys": ((1, 4, 2, 3001, 2500, 8, 8), None, False, 0.0),
    "more keys": ((1, 2, 2, 3000, 3100, 8, 12), None, True, 0.0),
    "mask by query": ((1, 2, 2, 3001, 3100, 8, 12), "float", False, 0.0),
    "mask by key": ((2, 2, 2, 2100, 2100, 8, 8), "keys", False, 0.0),
    "rows without keys": ((1, 2, 2, 3001, 3100, 8, 8), "rows", False, 0.0),
    "dropout": ((1, 2, 2, 3001, 3001, 8, 8), None, True, 0.3),
}


def operands(name):
    (b, h, hk, l, s, d, dv), kind, causal, p = CASES[name]
    g = torch.Generator().manual_seed(len(name))
    q, k, v = (torch.randn(shape, generator=g) for shape in ((b, h, l, d), (b, hk, s, d), (b, hk, s, dv)))
    mask = {
        None: lambda: None,
        "float": lambda: torch.randn(l, s, generator=g),
        "keys": lambda: torch.rand(b, 1, 1, s, generator=g) > 0.3,
        "rows": lambda: (torch.rand(l, 1, generator=g) > 0.3).expand(l, s),
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("blocks")


def run(python, folder, names="all", **env):
    done = python(CHILD, str(Path(__file__).parent), names, str(folder), timeout=300, **env)
    return json.loads(done.stdout.splitlines()[-1])


def close(made, expected):
    for a, e in zip(made, expected, strict=True):
        assert (a - e).double().norm() <= 3e-6 * e.double().norm()


def test_blocks_are_as_all_at_once(python, folder):
    loops = run(python, folder, OXITORCH_LOWER_FOR="tpu")
    # One for the results and one for the gradients.
    assert sum(loops) >= 2 * len(CASES)
    for name in CASES:
        if CASES[name][-1] == 0:
            close(torch.load(folder / f"{name}.pt"), call(name, "cpu"))
    # What is dropped is the same as where all is done at once.
    dropped = torch.load(folder / "dropout.pt")
    assert sum(run(python, folder, "dropout", OXITORCH_LOWER_FOR="cpu")) == 0
    close(dropped, torch.load(folder / "dropout.pt"))


VARYING = """
import torch
import torch.nn.functional as F
from torch.tpu import Dim


def step(x):
    q = x.detach().requires_grad_()
    y = F.scaled_dot_product_attention(q, q[:, :2], q[:, :2, :, :6], enable_gqa=True)
    return y, torch.autograd.grad(y.square().sum(), q)[0]


jitted = torch.tpu.jit(step, dynamic={"x": {2: Dim(buckets=[3072])}})
for size in (2900, 3072, 2000):
    x = torch.randn(1, 4, size, 8)
    for made, expected in zip(jitted(x.to("tpu")), step(x), strict=True):
        assert (made.cpu() - expected).norm() <= 2e-5 * expected.norm(), size
print(torch.tpu.metrics()["compiles"], sum(g.stablehlo.count("stablehlo.while") for g in torch.tpu.graphs()))
"""


def test_sizes_that_vary_are_one_program_with_blocks(python):
    assert python(VARYING, timeout=300, OXITORCH_LOWER_FOR="tpu").stdout.split() == ["1", "2"]
