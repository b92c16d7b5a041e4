"""Where steps of a training end: fused mode cuts the stream of operations there, so that each is its own program."""

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from oxitorch import _core, _running

_hook = None


def install() -> None:
    """Sees each step of an optimizer, after the hooks that were there before. Called again: after those that are."""
    global _hook
    if _hook is not None:
        _hook.remove()
    _hook = register_optimizer_step_post_hook(_end_of_step)


def _end_of_step(optimizer, *_) -> None:
    # A compiled step is traced, this hook with it; the backend then cuts after the step's graph.
    if torch.compiler.is_compiling():
        return
    steps = _running.steps()
    if steps is None:
        _core.cut("step", id(optimizer))
    else:
        steps.append(id(optimizer))
