"""`oxitorch.diff`: the same program on two platforms, compared operation by operation.

The module is the function: `oxitorch.diff(module, args, a="cpu", b="tpu")`. `docs/diff.md` has the rest. It does not
import torch before it is called.
"""

import sys
import types

__all__: list[str] = []


class _Callable(types.ModuleType):
    def __call__(self, *args, **kwargs):
        from oxitorch.diff import _call

        return _call.diff(*args, **kwargs)

    @property
    def Report(self):
        """What a call gives."""
        from oxitorch.diff import _report

        return _report.Report


sys.modules[__name__].__class__ = _Callable
