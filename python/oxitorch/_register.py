"""What `import torch` with this package does to PyTorch: `torch.tpu`, methods, and a line for each that hooks in.

This module is above all that it names, and `oxitorch.tpu` alone imports it.
"""

import sys
import threading
from types import ModuleType

import torch

from oxitorch import (
    _accelerators,
    _activate,
    _asserts,
    _ctc,
    _decompose,
    _default_backend,
    _dlpack,
    _dtensor,
    _flex,
    _flops,
    _loops,
    _offload,
    _packed,
    _pretend,
    _print,
    _process_group,
    _rnn,
    _share,
    _steps,
    _vmap,
    _while_gradients,
    integrations,
)

# What each module hooks into PyTorch, and whether it does so only where the device works. In this order: of two that
# see the steps of optimizers, the first is asked first.
_HOOKS = (
    (_accelerators.install, False),
    (_pretend.install, True),
    (_steps.install, False),
    (_print.install, False),
    (_share.install, False),
    (_default_backend.install, False),
    (_process_group.install, False),
    (_dtensor.install, False),
    (_vmap.install, False),
    (_flex.install, True),
    (_offload.install, False),
    (_flops.install, False),
    (_decompose.install, True),
    (_asserts.install, True),
    (_ctc.install, True),
    (_loops.install, True),
    (_while_gradients.install, True),
    (_packed.install, True),
    (_rnn.install, True),
    (_dlpack.install, True),
    (integrations.install, True),
)

_lock = threading.Lock()
_done = False


def register(module: ModuleType) -> None:
    """Makes `module` torch.tpu. `oxitorch.tpu` calls this at its end: importing it may be what imports torch."""
    global _done
    _activate.activate()
    with _lock:
        if _done:
            return
        _done = True
        name = _activate.NAME
        torch._register_device_module(name, module)
        # `import torch.tpu.random` must give the same module as `torch.tpu.random`.
        for full, value in list(sys.modules.items()):
            if full.startswith("oxitorch.tpu."):
                sys.modules[f"torch.{name}.{full.removeprefix('oxitorch.tpu.')}"] = value
        torch.utils.generate_methods_for_privateuse1_backend(
            for_tensor=True, for_module=True, for_packed_sequence=True, for_storage=True
        )
        # PyTorch's default for devices from outside is float16. The setting is per thread: a `torch.autocast("tpu")` in
        # another thread needs its dtype spelled out (`torch.tpu.amp.autocast` does that).
        torch.set_autocast_dtype(name, torch.bfloat16)
        works = _activate.why_unavailable() is None
        for install, needs_device in _HOOKS:
            if works or not needs_device:
                install()
