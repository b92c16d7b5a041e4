"""`oxitorch.preflight`: what `oxitorch preflight` says, for a function; and what a script may say to it.

The module is the function: `oxitorch.preflight(fn, args, slice="v5e-1")`. `docs/preflight.md` has the rest. It does not
import torch before it is called.
"""

import os
import sys
import types

from oxitorch import _absent, _core, _env

__all__ = ["batch", "step"]


def batch(size: int) -> int:
    """Marks the size of the batch that `oxitorch preflight --fit batch` may change; gives the one to take.

    Example:
        loader = DataLoader(data, batch_size=oxitorch.preflight.batch(32))
    """
    folder = _env.PREFLIGHT.read()
    if folder is None:
        return size
    path = os.path.join(folder, "batch")
    if not os.path.exists(path):
        with open(path, "w", encoding="ascii") as f:
            f.write(str(int(size)))
    tried = _absent.description(folder).get("batch")
    return size if tried is None else tried


def step() -> None:
    """Marks the end of a step where no optimizer makes one, as in a loop that only predicts.

    In other runs it means nothing.

    Example:
        for x in loader:
            predictions.append(model(x.to("tpu")).cpu())
            oxitorch.preflight.step()
    """
    if _env.PREFLIGHT.read() is not None:
        _core.mark_step()


class _Callable(types.ModuleType):
    def __call__(self, *args, **kwargs):
        from oxitorch import _preflight

        return _preflight.preflight(*args, **kwargs)

    @property
    def Report(self):
        """What a call gives."""
        from oxitorch import _preflight

        return _preflight.Report


sys.modules[__name__].__class__ = _Callable
