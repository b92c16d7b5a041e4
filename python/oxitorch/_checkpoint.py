"""`torch.utils.checkpoint` on the device: a program ends where a block is computed again.

In one program XLA would find that the forward and the backward pass compute the same, and keep it after all.
"""

import functools
from collections.abc import Callable

import torch
from torch.utils import checkpoint

from oxitorch import _activate


def install() -> None:
    """Makes both kinds of checkpoints end a program before they compute again."""
    frame = checkpoint._CheckpointFrame
    make = frame.__init__

    @functools.wraps(make)
    def init(self, recompute_fn, *args, **kwargs):
        make(self, _after_a_cut(recompute_fn), *args, **kwargs)

    frame.__init__ = init
    reentrant = checkpoint.CheckpointFunction
    reentrant.backward = staticmethod(_after_a_cut(reentrant.backward))


def _after_a_cut(fn: Callable) -> Callable:
    @functools.wraps(fn)
    def run(*args, **kwargs):
        if not torch.compiler.is_compiling():
            _activate.core().cut("barrier")
        return fn(*args, **kwargs)

    return run
