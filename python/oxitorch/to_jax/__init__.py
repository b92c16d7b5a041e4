"""PyTorch modules as readable JAX: the package of `oxitorch to-jax`.

`convert` runs a module once, writes a package with a flax.nnx module of the same structure and names, its weights both
ways, a training step and a test, and runs both for the measured differences.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from oxitorch.to_jax import _check, _files
from oxitorch.to_jax._capture import capture
from oxitorch.to_jax._emit import Emitter

__all__ = ["Result", "convert"]


@dataclass
class Result:
    """What became of a module.

    `status` is "converted" if the translation was run and agrees with PyTorch, "incomplete" if there are problems or
    what could not be compared, "differs" if it was run and does not agree, "failed" if it did not run,
    "not run" if that was not asked for.
    """

    folder: Path
    status: str
    problems: list[str] = field(default_factory=list)
    differences: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    error: str | None = None
    trace: str | None = None

    @property
    def converted(self) -> bool:
        return self.status == "converted"


def convert(
    model: torch.nn.Module,
    args: tuple = (),
    kwargs: dict[str, Any] | None = None,
    *,
    folder: str | Path,
    loss: Callable | None = None,
    targets: dict[str, Any] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: torch.optim.lr_scheduler.LRScheduler | Callable | None = None,
    clip_norm: float | None = None,
    places: dict[str, str] | None = None,
    run: bool = True,
) -> Result:
    """Writes `model` as a JAX package.

    Args:
        model: on the CPU, or on a device from which it is copied.
        args, kwargs: example inputs; sizes that the module's Python does not decide on stay variable.
        folder: the package to write; its name has to be an identifier.
        loss: `loss(output, **targets)` is a scalar tensor; without it the test takes the mean of the outputs' squares.
        targets: further inputs of the loss, by name.
        optimizer: one of torch.optim for the model's parameters; without it, SGD with momentum.
        scheduler: the optimizer's scheduler, which has taken no steps; or a function of the step (0 in the first) whose
            result is the learning rate of all groups.
        clip_norm: the largest norm of all gradients together, as of `torch.nn.utils.clip_grad_norm_`.
        places: where the "optimizer" and "scheduler" were made, for messages: `train.py:12`.
        run: whether to run both, which needs jax, flax and optax.

    Raises:
        ValueError: the folder's name is none for a package, or the scheduler has taken steps.
    """
    folder = Path(folder).absolute()
    if not folder.name.isidentifier():
        raise ValueError(f"the folder `{folder.name}` cannot be imported: its name has to be an identifier")
    kwargs, targets = dict(kwargs or {}), dict(targets or {})
    was = model.training
    modes = {m: m.training for m in model.modules()}
    model.train()
    try:
        found, fixed = capture(model, args, kwargs, loss, targets)
        emitter = Emitter(found, Path.cwd()).write()
        root = type(model)
        title = f"`{root.__name__}` in JAX, translated from `{root.__module__}` by oxitorch to-jax."
        training = {"optimizer": optimizer, "scheduler": scheduler, "clip_norm": clip_norm}
        _files.write(folder, emitter, loss, {**training, "places": places}, title)
        result = Result(folder, "not run", [str(p) for p in emitter.problems])
        if fixed is not None:
            result.notes.append(f"all sizes are those of the example, as they could not be variable: {fixed}")
        for name, place in dict.fromkeys((n, str(p)) for n, p in found.random):
            if "dropout" not in name and "scaled_dot" not in name:
                result.notes.append(f"{Path(place).name}: `{name}` draws random numbers, which differ from PyTorch's")
        if run:
            _check.reference(folder, found, model, args, kwargs, loss, targets, training)
            judge(result, _check.run(folder))
    finally:
        for m, mode in modes.items():
            m.training = mode
        model.training = was
    write_report(result)
    return result


def judge(result: Result, measured: dict):
    """What the measured differences say."""
    if "error" in measured:
        result.status = "incomplete" if result.problems else "failed"
        result.error, result.trace = measured["error"], measured.get("trace")
        return
    result.differences = measured
    limits = _check.limits()
    agrees = all(v <= limits[k] for k, v in measured.items())
    random = any("random numbers" in n for n in result.notes)
    result.status = ("incomplete" if result.problems or random else "converted") if agrees else "differs"


def write_report(result: Result):
    data = {
        "status": result.status,
        "differences": result.differences,
        "limits": _check.limits(),
        "problems": result.problems,
        "notes": result.notes,
        "error": result.error,
    }
    (result.folder / "report.json").write_text(json.dumps(data, indent=2) + "\n")
