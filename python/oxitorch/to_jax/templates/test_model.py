"""Compares this model with what PyTorch computed, of which `reference.npz` keeps the numbers.

Dropout is off on both sides, as random numbers differ. Of gradients, and of parameters after three steps of the
optimizer, a sample is kept. A difference is the largest one, divided by the largest number of the tensor it is of;
that of the steps is the length of the difference, divided by the length of the step, or by a tenth of the longest step
of other parameters, for their number of elements, if that is more.

The steps are taken in 64 bits on both sides. In 32 bits a steep loss, or an optimizer that divides by the size of a
gradient that is rounding, makes rounding as large as a defect.
"""

import contextlib
import json
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from . import train
from .model import create
from .train import create_optimizer, loss_fn, train_step
from .weights import from_torch, gradients, to_torch

LIMITS = {
    "forward": 1e-4,
    "forward_eval": 1e-4,
    "loss": 1e-4,
    "gradients": 2e-3,
    "learning_rates": 1e-6,
    "steps": 1e-6,
    "round_trip": 0.0,
}


def part(reference, kind):
    return {k.removeprefix(kind + "/"): v for k, v in reference.items() if k.startswith(kind + "/")}


def sample(x, size=1024):
    x = np.asarray(x, np.float64).ravel()
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


def by_name(out):
    """Results by their names, or numbers."""
    if isinstance(out, dict):
        return out
    return {str(i): x for i, x in enumerate(out if isinstance(out, tuple) else [out])}


def load(reference):
    """The model with PyTorch's weights, as its author trains it but for dropout."""
    model = from_torch(create(), part(reference, "state"))
    model.train()
    model.set_attributes(deterministic=True, raise_if_not_found=False)
    return model


def wide(x):
    """Arrays of floating point numbers in 64 bits."""
    return x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x


def attention(query, key, value, bias=None, mask=None, *, scale=None, is_causal=False):
    """`jax.nn.dot_product_attention`, which computes its softmax in 32 bits whatever its inputs have."""
    key, value = (jnp.repeat(t, query.shape[2] // t.shape[2], axis=2) for t in (key, value))
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if bias is None else scores + bias
    scores = scores if mask is None else jnp.where(mask, scores, -1e300)
    if is_causal:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e300)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1), value)


@contextlib.contextmanager
def in_64_bits():
    """64 bits by default, and wherever the model asks for fewer."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.enable_x64(True))
        for name in ("float16", "bfloat16", "float32"):
            stack.enter_context(mock.patch.object(jnp, name, jnp.float64))
        stack.enter_context(mock.patch.object(jax.nn, "dot_product_attention", attention))
        yield


def steps(model, reference, batch):
    """How far the parameters and buffers are from PyTorch's after three steps."""
    nnx.update(model, jax.tree.map(wide, nnx.state(model)))
    model.set_attributes(nnx.Embed, dtype=jnp.float64, raise_if_not_found=False)
    before = to_torch(model)
    optimizer = create_optimizer(model)
    for _ in range(3):
        train_step(model, optimizer, *(wide(x) for x in batch))
    after = to_torch(model)
    rows = {"parameters": [], "buffers": []}
    for name, b in part(reference, "after").items():
        start, a = sample(before[name]), sample(after[name])
        kind = "parameters" if f"gradient/{name}" in reference else "buffers"
        rows[kind].append((np.linalg.norm(a - b), np.linalg.norm(b - start), max(1, b.size) ** 0.5))
    found = [0.0]
    for of_kind in rows.values():
        # Where the gradient is zero but for rounding, as before a batch norm, the step is rounding too.
        largest = max((step / root for _, step, root in of_kind), default=0.0)
        found += [differ / max(step, 0.1 * largest * root, 1e-12) for differ, step, root in of_kind]
    return float(max(found))


def differences():
    """What this model and PyTorch's differ in, by what was compared."""
    with np.load(Path(__file__).with_name("reference.npz")) as file:
        reference = {k: file[k] for k in file.files}
    inputs = list(part(reference, "input").values())
    batch = list(part(reference, "batch").values())
    fresh = load(reference)
    back, state = to_torch(fresh), part(reference, "state")
    out = {}
    forward = nnx.jit(lambda model, *args: model(*args))
    for kind in ("forward", "forward_eval"):
        model = nnx.clone(fresh)
        if kind == "forward_eval":
            model.eval()
        got, expected = by_name(forward(model, *inputs)), part(reference, kind)
        if got.keys() != expected.keys():
            raise AssertionError(f"the results are {list(got)}, expected {list(expected)}")
        out[kind] = max(difference(got[n], expected[n]) for n in expected)

    model = nnx.clone(fresh)
    loss, grads = nnx.jit(nnx.value_and_grad(loss_fn))(model, *batch)
    out["loss"] = difference(loss, reference["loss"])
    expected = part(reference, "gradient")
    scale = max((np.abs(g).max() for g in expected.values()), default=0.0)
    got = gradients(model, grads)
    differ = (difference(sample(got[n]), g, max(1e-3 * scale, 1e-30)) for n, g in expected.items())
    out["gradients"] = max(differ, default=0.0)

    with in_64_bits():
        if "learning_rates" in reference:
            expected = reference["learning_rates"]
            got = [jax.vmap(f)(jnp.arange(len(expected))) for f in train.SCHEDULES]
            out["learning_rates"] = difference(np.stack(got, 1), expected)
        out["steps"] = steps(fresh, reference, batch)

    names = set(state) == set(back)
    out["round_trip"] = max((difference(back[n], state[n]) for n in state), default=0.0) if names else float("inf")
    return out


def test_agrees_with_torch():
    found = differences()
    assert {k: v for k, v in found.items() if not v <= LIMITS[k]} == {}, found


if __name__ == "__main__":
    print(json.dumps(differences()))
