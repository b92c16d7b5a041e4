"""oxitorch: PyTorch on ``device="tpu"`` through a Rust core, StableHLO and PJRT plugins.

Nothing has to be called: ``import torch`` finds this package (entry point group ``torch.backends``) and the device is
there. This module does not import torch, so that the command line stays light: when torch is already imported the
device is registered now, otherwise when torch is imported.
"""

import sys as _sys

__all__ = ["activate"]


def activate() -> None:
    """Registers ``device="tpu"`` and ``torch.tpu`` with PyTorch; imports torch if needed. Does nothing the second time.

    Only needed where ``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` turns PyTorch's own discovery off and this package was
    imported before torch.
    """
    import importlib

    from oxitorch import _activate

    _activate.activate()
    importlib.import_module("oxitorch.tpu")  # which registers itself at its end


def _autoload() -> None:
    """What PyTorch calls at the end of ``import torch``."""
    activate()


def __getattr__(name: str):
    if name == "__version__":
        from oxitorch import _core

        return _core.version()
    if name in ("data", "diff", "preflight", "tpu"):
        import importlib

        return importlib.import_module(f"oxitorch.{name}")
    if name == "Unavailable":
        from oxitorch._activate import Unavailable

        return Unavailable
    raise AttributeError(f"module 'oxitorch' has no attribute {name!r}")


# `torch.device` is there long before autoload runs, but a half-imported torch must be left to its own autoload.
_torch = _sys.modules.get("torch")
if _torch is not None and not getattr(getattr(_torch, "__spec__", None), "_initializing", False):
    activate()
del _torch
