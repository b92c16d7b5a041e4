"""Architectures that people use: gradients and a training loop with a stock optimizer as on the CPU, no operation on the
CPU, nothing compiled from the third step on."""

import copy
import math
import warnings

import pytest
import torch
from support import DEVICE

for name in ("timm", "torchvision", "transformers"):
    pytest.importorskip(name, reason="the extra `models` is not installed")

import transformers  # noqa: E402
from real_models import MODELS, optimizer_of, step  # noqa: E402

STEPS = 5


def programs():
    """How many programs there are. A window that comes the second time in parts becomes one in the background."""
    return torch.tpu.metrics()["programs"]


def train(model, case, device):
    """The losses, the first step's gradients, and the programs after each step."""
    model = copy.deepcopy(model).to(device).train()
    optimizer = optimizer_of(case, model)
    g = torch.Generator().manual_seed(1)
    losses, counts, gradients = [], [], {}
    for _ in range(STEPS):
        losses.append(step(model, case, optimizer, g, device).item())
        gradients = gradients or {n: p.grad.cpu() for n, p in model.named_parameters() if p.grad is not None}
        counts.append(programs() if device == DEVICE else None)
    return losses, gradients, counts


@pytest.fixture(autouse=True)
def quiet():
    """Notes of other packages about themselves; a fallback still warns, and is looked for in the metrics."""
    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        yield


# Others of a kind that is there already.
SLOW = {"SegFormer", "Swin", "MobileNetV3"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in MODELS])
def test_training(name, no_fallback):
    case = MODELS[name]
    torch.manual_seed(0)
    model = case.make()
    expected, exact, _ = train(model, case, "cpu")
    got, gradients, counts = train(model, case, DEVICE)
    assert gradients.keys() == exact.keys() and len(exact) > 10
    largest = max(float(x.abs().max()) for x in exact.values())
    for key, wanted in exact.items():
        # A sum in another order is off by a part of its largest term, which may be far larger than the sum.
        torch.testing.assert_close(
            gradients[key], wanted, rtol=1e-3, atol=1e-4 * largest, msg=lambda m, key=key: f"{key}: {m}"
        )
    assert all(math.isfinite(x) for x in got)
    assert got == pytest.approx(expected, rel=1e-3), f"device {got}\nCPU    {expected}"
    assert counts[2] == counts[-1], f"programs after each step: {counts}"
