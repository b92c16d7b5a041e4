"""What numbers may be relied on: choices among rounded logits, and the largest of many."""

import contextlib
import re

import pytest
import torch
from support import DEVICE, assert_same


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_greedy_choices_are_the_cpus(mode, no_fallback, dtype):
    """Logits of low precision tie often. They are rounded before they are compared, and the first of equals is taken."""
    hidden = torch.randint(-4, 5, (64, 32)).to(dtype) / 4
    head = torch.randint(-4, 5, (32, 500)).to(dtype) / 4
    logits = hidden @ head
    ties = (logits == logits.amax(-1, keepdim=True)).sum(-1)
    assert (ties > 1).any(), "there is nothing to decide"
    got = (hidden.to(DEVICE) @ head.to(DEVICE)).argmax(-1)
    assert got.tolist() == logits.argmax(-1).tolist()
    got = (hidden.to(DEVICE) @ head.to(DEVICE)).max(-1)
    for a, e in zip(got, logits.max(-1), strict=True):
        assert a.tolist() == e.tolist()


def test_rounding_is_not_left_out(no_fallback):
    """A value that is rounded to bfloat16 and read again in float32 is the rounded one, also inside one program."""
    x = torch.full((4,), 1.0, dtype=torch.bfloat16)
    small = torch.full((4,), 2.0**-9, dtype=torch.bfloat16)
    y = (x.to(DEVICE) + small.to(DEVICE)).float() - 1
    assert y.tolist() == ((x + small).float() - 1).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32], ids=str)
def test_topk_is_exact(no_fallback, dtype, largest):
    """All of the largest are found, in order, each where its index says."""
    x = torch.randperm(20000).view(4, 5000).to(torch.int32)
    x = x if dtype == torch.int32 else (x.double() / 7 - 1000).to(dtype)
    values, indices = x.to(DEVICE).topk(300, largest=largest)
    expected = x.topk(300, largest=largest)
    assert_same(values, expected.values)
    assert x.gather(1, indices.cpu()).tolist() == expected.values.tolist()
    assert all(len(set(row)) == 300 for row in indices.tolist())
    if dtype != torch.bfloat16:  # no two are equal
        assert indices.tolist() == expected.indices.tolist()


# What the operands of a product say, by the ways to ask for it.
PRECISIONS = {
    "tpu highest": (lambda: torch.tpu.precision("highest"), "HIGHEST"),
    "tpu high": (lambda: torch.tpu.precision("high"), "HIGH"),
    "tpu default": (lambda: torch.tpu.precision("default"), "DEFAULT"),
    "torch highest": (lambda: torch_precision("highest"), "HIGHEST"),
    "torch high": (lambda: torch_precision("high"), "HIGH"),
    "torch medium": (lambda: torch_precision("medium"), "DEFAULT"),
}


@contextlib.contextmanager
def torch_precision(name):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("name", PRECISIONS)
def test_precision_reaches_the_program(name):
    make, expected = PRECISIONS[name]
    a = torch.ones(40 + list(PRECISIONS).index(name), 31, device=DEVICE)  # a program of its own
    torch.tpu.synchronize()
    known = len(torch.tpu.graphs())
    with make():
        (a @ a.mT).sum().item()
    text = "\n".join(g.stablehlo for g in torch.tpu.graphs()[known:])
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert products
    for line in products:
        said = re.search(r"precision = \[(\w+), (\w+)\]", line)
        assert (said.groups() if said else ("DEFAULT", "DEFAULT")) == (expected, expected), line
