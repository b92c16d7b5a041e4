"""Small models, the compiler and the comparison, for the tests of `torch.compile`."""

import copy

import pytest
import torch
from support import DEVICE, assert_same
from torch import nn


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(f, **options):
    return torch.compile(f, backend="tpu", **options)


# A function as it is, in graphs, and as one program.
WAYS = {"eager": lambda f: f, "compile": compiled, "jit": lambda f: torch.tpu.jit(f)}


def pair(make):
    """The same module on the CPU and on the device."""
    on_cpu = make()
    return on_cpu, copy.deepcopy(on_cpu).to(DEVICE)


def assert_close(actual, expected, what=""):
    assert_same(actual, expected, what, strides=False, rtol=1e-4, atol=1e-5)


def mlp():
    return nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 5))


def counts():
    m = torch.tpu.metrics()
    return {name: m[name] for name in ("ops", "plays", "replays", "recipes", "programs", "compiles")}
