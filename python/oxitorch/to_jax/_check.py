"""Runs the PyTorch model for `reference.npz`, and the translation's own test against it in a process with JAX."""

from __future__ import annotations

import ast
import contextlib
import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from oxitorch.to_jax import _leaves, _optimizers, _schedules
from oxitorch.to_jax._capture import arguments_of

# So many elements of a gradient or parameter are kept.
SAMPLE = 1024
# So many steps' learning rates are compared.
RATES = 2000
JAX_TIME_S = 1800


def tensors(x):
    if hasattr(x, "to_tuple") and hasattr(x, "keys"):
        x = {k: x[k] for k in x.keys()}  # noqa: SIM118 - an object with keys
    return [t for t in pytree.tree_leaves(x) if isinstance(t, torch.Tensor)]


def array(t):
    t = t.detach().cpu()
    return (t.float() if t.dtype == torch.bfloat16 else t).numpy().copy()


def sample(t):
    flat = array(t).ravel()
    return flat[:: max(1, flat.size // SAMPLE)]


FLOATS = (torch.float16, torch.bfloat16, torch.float32)


class Wide(TorchFunctionMode):
    """Computes in 64 bits what asks for fewer."""

    METHODS = dict.fromkeys((torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16), torch.Tensor.double)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        args, kwargs = pytree.tree_map(
            lambda x: torch.float64 if isinstance(x, torch.dtype) and x in FLOATS else x, (args, kwargs or {})
        )
        return self.METHODS.get(func, func)(*args, **kwargs)


@contextlib.contextmanager
def in_64_bits():
    """64 bits by default, and wherever a module asks for fewer."""
    was = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with Wide():
            yield
    finally:
        torch.set_default_dtype(was)


def wide(x):
    """Tensors of floating point numbers in 64 bits."""
    return pytree.tree_map(lambda t: t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t, x)


@contextlib.contextmanager
def no_dropout(model):
    """Dropout and stochastic depth as if their probability were 0, whatever mode modules are in."""
    functional = torch.nn.functional
    names = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
    old = {n: getattr(functional, n) for n in names}
    attention = functional.scaled_dot_product_attention
    layers = [m for m in model.modules() if isinstance(m, torch.nn.RNNBase) and m.dropout]
    rates = [m.dropout for m in layers]
    paths = [m for m in model.modules() if _leaves.drops_paths(m)]
    path_rates = [m.drop_prob for m in paths]

    def without(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **options):
        return attention(query, key, value, attn_mask, 0.0, is_causal, **options)

    for n in names:
        setattr(functional, n, lambda input, *args, **kwargs: input)
    functional.scaled_dot_product_attention = without
    for m in layers:
        m.dropout = 0.0
    for m in paths:
        m.drop_prob = 0.0
    try:
        yield
    finally:
        for n, f in old.items():
            setattr(functional, n, f)
        functional.scaled_dot_product_attention = attention
        for m, rate in zip(layers, rates, strict=True):
            m.dropout = rate
        for m, rate in zip(paths, path_rates, strict=True):
            m.drop_prob = rate


def reference(folder: Path, capture, model, args, kwargs, loss, targets, training: dict):
    """Runs forward, gradients and three steps of the optimizer in PyTorch, and writes what came out."""
    first = copy.deepcopy(model)
    state = {f"state/{n}": array(t) for n, t in first.state_dict().items()}
    out = dict(state)
    named = arguments_of(model, args, kwargs)
    inputs = [t for x in named.values() for t in tensors(x)]
    # In the order of the parameters of the translated forward.
    order = [t for t in inputs if t is not None]
    out.update({f"input/{i}": array(t) for i, t in enumerate(used(capture.root, order))})
    batch = [*order, *(t for x in targets.values() for t in tensors(x))]
    batch = batch if loss is not None else used(capture.root, order)
    out.update({f"batch/{i}": array(t) for i, t in enumerate(batch)})

    def total(m, args=args, kwargs=kwargs, targets=targets):
        y = m(*copy_of(args), **copy_of(kwargs))
        if loss is not None:
            return loss(y, **targets)
        return sum(t.float().square().mean() for t in tensors(y) if t.is_floating_point())

    with no_dropout(first), torch.no_grad():
        for kind, training_mode in (("forward", True), ("forward_eval", False)):
            results = tensors(copy.deepcopy(first).train(training_mode)(*copy_of(args), **copy_of(kwargs)))
            names = capture.root.keys or range(len(results))
            out.update({f"{kind}/{n}": array(t) for n, t in zip(names, results, strict=True)})
    m = copy.deepcopy(first).train()
    with no_dropout(m):
        value = total(m)
        if value.requires_grad:
            value.backward()
        out["loss"] = array(value)
        for n, p in m.named_parameters():
            if p.requires_grad:
                out[f"gradient/{n}"] = sample(p.grad if p.grad is not None else torch.zeros_like(p))
    # In 64 bits, where rounding is so small that no steep loss makes it as large as a defect.
    m = copy.deepcopy(first).double().train()
    step = same_optimizer(training["optimizer"], model, m)
    rates = _schedules.rates(step, training["scheduler"], RATES if training["scheduler"] else 3)
    if training["scheduler"]:
        out["learning_rates"] = np.array(rates)
    with no_dropout(m), in_64_bits():
        for n in range(3):
            for group, rate in zip(step.param_groups, rates[n], strict=True):
                group["lr"] = rate
            step.zero_grad()
            value = total(m, *wide((args, kwargs, targets)))
            if value.requires_grad:
                value.backward()
            if training["clip_norm"] is not None:
                torch.nn.utils.clip_grad_norm_(m.parameters(), training["clip_norm"])
            step.step()
    out.update({f"after/{n}": sample(t) for n, t in m.named_parameters()})
    persistent = m.state_dict()
    out.update({f"after/{n}": sample(t) for n, t in m.named_buffers() if n in persistent})
    np.savez(folder / "reference.npz", **out)


def used(root, inputs):
    """The inputs that the translated forward has."""
    return inputs[: len(root.inputs)]


def copy_of(x):
    return pytree.tree_map(lambda t: t.clone() if isinstance(t, torch.Tensor) else t, x)


def same_optimizer(optimizer, model, copied):
    """The same optimizer for a copy of the model, without state."""
    if optimizer is None:
        return _optimizers.default(copied)
    names = {id(p): n for n, p in model.named_parameters()}
    own = dict(copied.named_parameters())
    groups = [
        {
            **{k: v for k, v in g.items() if k != "params"},
            "params": [own[names[id(p)]] for p in g["params"] if id(p) in names],
        }
        for g in optimizer.param_groups
    ]
    return type(optimizer)(groups)


def run(folder: Path) -> dict:
    """Runs the translation's test in a process of its own: the differences, or why there are none."""
    keep = {k: v for k, v in os.environ.items() if k != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    # Each program runs a few times at most: little effort for its code.
    flags = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    )
    env = {**keep, "JAX_PLATFORMS": "cpu", "PYTHONDONTWRITEBYTECODE": "1", "XLA_FLAGS": flags.strip()}
    command = [sys.executable, "-m", f"{folder.name}.test_model"]
    try:
        done = subprocess.run(
            command, cwd=folder.parent, env=env, capture_output=True, text=True, timeout=JAX_TIME_S, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"did not end within {JAX_TIME_S} s"}
    if done.returncode != 0:
        lines = [
            line
            for line in done.stderr.strip().splitlines()
            if line.strip() and not line.startswith("For simplicity, JAX")
        ]
        lines = [line for line in lines if not set(line) <= {"-"}]
        return {"error": lines[-1] if lines else f"ended with status {done.returncode}", "trace": done.stderr[-6000:]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def limits() -> dict:
    """The differences that the test allows."""
    text = (Path(__file__).parent / "templates" / "test_model.py").read_text()
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == "LIMITS":
            return ast.literal_eval(node.value)
    raise AssertionError("the template has no limits")
