"""Compares this model with what PyTorch computed, of which `reference.npz` keeps the numbers.

Dropout is off on both sides, as random numbers differ. Of gradients, and of parameters after three steps of the
optimizer, a sample is kept. A difference is the largest one, divided by the largest number of the tensor it is of;
that of the steps is the length of the difference, divided by the length of the step.
"""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx

from .model import create
from .train import create_optimizer, loss_fn, train_step
from .weights import from_torch, gradients, to_torch

LIMITS = {"forward": 1e-4, "forward_eval": 1e-4, "loss": 1e-4, "gradients": 2e-3, "steps": 1e-2, "round_trip": 0.0}


def part(reference, kind):
    return {k.removeprefix(kind + "/"): v for k, v in reference.items() if k.startswith(kind + "/")}


def sample(x, size=1024):
    x = np.asarray(x, np.float32).ravel()
    return x[:: max(1, x.size // size)]


def difference(a, b, least=1e-30):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if a.shape != b.shape:
        raise AssertionError(f"the shape is {a.shape}, expected {b.shape}")
    finite = np.isfinite(b)
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return float("inf")
    a, b = a[finite], b[finite]
    return float(np.abs(a - b).max() / max(np.abs(b).max(), least)) if a.size else 0.0


def flat(out):
    if isinstance(out, dict):
        return list(out.values())
    return list(out) if isinstance(out, tuple) else [out]


def load(reference):
    model = from_torch(create(), part(reference, "state"))
    model.train()
    model.set_attributes(deterministic=True, raise_if_not_found=False)
    return model


def differences():
    """What this model and PyTorch's differ in, by what was compared."""
    with np.load(Path(__file__).with_name("reference.npz")) as file:
        reference = {k: file[k] for k in file.files}
    inputs = [jnp.asarray(v) for v in part(reference, "input").values()]
    batch = [jnp.asarray(v) for v in part(reference, "batch").values()]
    out = {}
    forward = nnx.jit(lambda model, *args: model(*args))
    for kind in ("forward", "forward_eval"):
        model = load(reference)
        if kind == "forward_eval":
            model.eval()
        got, expected = flat(forward(model, *inputs)), list(part(reference, kind).values())
        if len(got) != len(expected):
            raise AssertionError(f"{len(got)} results, expected {len(expected)}")
        out[kind] = max(difference(a, b) for a, b in zip(got, expected, strict=True))

    model = load(reference)
    loss, grads = nnx.jit(nnx.value_and_grad(loss_fn))(model, *batch)
    out["loss"] = difference(loss, reference["loss"])
    expected = part(reference, "gradient")
    scale = max((np.abs(g).max() for g in expected.values()), default=0.0)
    got = gradients(model, grads)
    differ = (difference(sample(got[n]), g, max(1e-3 * scale, 1e-30)) for n, g in expected.items())
    out["gradients"] = max(differ, default=0.0)

    model = load(reference)
    before = to_torch(model)
    optimizer = create_optimizer(model)
    for _ in range(3):
        train_step(model, optimizer, *batch)
    after = to_torch(model)
    steps = [0.0]
    for name, b in part(reference, "after").items():
        start = sample(before[name])
        step, a = b - start, sample(after[name]) - start
        if name in expected:
            # Where the gradient is rounding, an optimizer that divides by its size steps anywhere.
            g, own = np.abs(expected[name]), np.abs(sample(got[name]))
            known = ((g == 0) & (own == 0)) | (g > 1e-4 * scale)
            a, step = a[known], step[known]
        # Of the whole step: an element whose gradient passes zero may step to the other side.
        least = 1e-6 * max(1.0, np.linalg.norm(start))
        steps.append(float(np.linalg.norm(a - step) / max(np.linalg.norm(step), least)))
    out["steps"] = max(steps)

    state = part(reference, "state")
    back = to_torch(load(reference))
    names = set(state) == set(back)
    out["round_trip"] = max((difference(back[n], state[n]) for n in state), default=0.0) if names else float("inf")
    return out


def test_agrees_with_torch():
    found = differences()
    assert {k: v for k, v in found.items() if not v <= LIMITS[k]} == {}, found


if __name__ == "__main__":
    print(json.dumps(differences()))
