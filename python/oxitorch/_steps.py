"""Where steps of a training end: fused mode cuts the stream of operations there, so that each is its own program.

What is visible at the cut is a result of the program, and has memory of its own. Gradients need not be, if the script
drops them right behind the step (`optimizer.step(); optimizer.zero_grad()`): then the cut is where they are dropped.
Nobody knows whether it will when a line of the script makes its first step, so that cut waits for what the script does
next. If that is something else, or if the gradients are dropped in another round of a loop, where the script may wait
for data before, later steps of that line are cut at once.
"""

import functools
import os
import sys
import threading
from types import CodeType

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from oxitorch import _core, _running

_hook = None


def install() -> None:
    """Sees each step of an optimizer, after the hooks that were there before. Called again: after those that are."""
    global _hook
    if _hook is None:
        torch.optim.Optimizer.zero_grad = torch._disable_dynamo(_seen(torch.optim.Optimizer.zero_grad))
        torch.nn.Module.zero_grad = _seen(torch.nn.Module.zero_grad)
    else:
        _hook.remove()
    _hook = register_optimizer_step_post_hook(_end_of_step)


def _end_of_step(optimizer, *_) -> None:
    # A compiled step is traced, this hook with it; the backend then calls `ended` after the step's graph.
    if torch.compiler.is_compiling():
        return
    steps = _running.steps()
    if steps is None:
        ended(id(optimizer))
    else:
        steps.append(id(optimizer))


def _seen(zero_grad):
    """`Optimizer.zero_grad` or `Module.zero_grad`, of which we are told."""

    @functools.wraps(zero_grad)
    def seen(self, *args, **kwargs):
        result = zero_grad(self, *args, **kwargs)
        if not torch.compiler.is_compiling() and _running.steps() is None and _running.tracer() is None:
            _dropped(self)
        return result

    return seen


# A place in the script: the id of a code object, and the offset of an instruction in it.
_Place = tuple[int, int]


class _Last(threading.local):
    """The last step of a thread, until gradients are dropped."""

    # The optimizer's id; 0: it is not known.
    optimizer = 0
    # The frames of the script in which it was made, by their ids.
    frames: dict[int, _Place] | None = None
    # Where the script made it, if its cut waits.
    waits: tuple[_Place, CodeType] | None = None


_last = _Last()
# Where steps are made behind which gradients are dropped, or were not once. Each has its code, so that no other one
# gets its id.
_followed: dict[_Place, CodeType] = {}
_not_followed: dict[_Place, CodeType] = {}
_TORCH = os.path.join(os.path.dirname(torch.__file__), "")
_OURS = os.path.join(os.path.dirname(__file__), "")


def ended(optimizer: int = 0) -> None:
    """An optimizer has made its step; its id if it is known."""
    if not _core.is_started():
        return
    _give_up()
    frames, script = {}, None
    for frame in _of_script(sys._getframe(1)):
        code = frame.f_code
        frames[id(frame)] = place = (id(code), frame.f_lasti)
        script = script or (place, code)
    _last.optimizer, _last.frames = optimizer, frames
    if script is None:
        _core.step(optimizer, False, False)
    elif _core.step(optimizer, script[0] not in _not_followed, script[0] in _followed):
        _last.waits = script


def _dropped(by) -> None:
    """A module or an optimizer has dropped its gradients."""
    frames = _last.frames
    if frames is None or (isinstance(by, torch.optim.Optimizer) and _last.optimizer not in (0, id(by))):
        return
    _last.frames = None
    waits = _last.waits
    if _core.dropped_gradients() and waits is not None and _is_behind(frames, sys._getframe(1)):
        place, code = waits
        _followed[place] = code
        _last.waits = None
    _give_up()


def _is_behind(frames: dict[int, _Place], frame) -> bool:
    """Whether this call comes after the last step in the innermost frame that both were made in."""
    for caller in _of_script(frame):
        code, at = frames.get(id(caller), (0, 0))
        if code == id(caller.f_code):
            return caller.f_lasti > at
    return False


def _of_script(frame):
    """A frame and its callers, innermost first, without PyTorch's and ours."""
    while frame is not None:
        if not frame.f_code.co_filename.startswith((_TORCH, _OURS)):
            yield frame
        frame = frame.f_back


def _give_up() -> None:
    """If a step's cut waited for the end of its gradients, that did not come, or too late."""
    waits, _last.waits = _last.waits, None
    if waits is not None:
        place, code = waits
        _not_followed[place] = code
