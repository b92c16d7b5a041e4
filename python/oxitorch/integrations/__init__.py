"""Libraries that choose a device themselves, or have a list of those they know.

`torch.accelerator.current_accelerator()` is "tpu" where this package is active, on all platforms. What asks PyTorch
that way follows by itself, as transformers does. Accelerate and Lightning have lists of the devices they know and take
the CPU where none of these is there; the modules here put the device in the place of that answer when the library is
imported. safetensors gets files to the device, torchvision's ops are bound. Nothing else of them is changed, and what
the user chose stands. `docs/libraries.md` is for users.
"""

import importlib
import sys
import warnings

from oxitorch import _activate, _after_import, _env

# What is adapted, when it is imported: the module, and the function here that gets it.
_ADAPTED = {
    "safetensors": ("safetensors", "follow"),
    "torchvision.extension": ("torchvision", "follow"),
    "accelerate.state": ("accelerate", "follow"),
    "accelerate.accelerator": ("accelerate", "allow_fp16"),
    "accelerate.utils.dataclasses": ("accelerate", "follow_options"),
    "accelerate.commands.launch": ("accelerate", "launch_processes"),
    "lightning.pytorch.trainer.connectors.accelerator_connector": ("lightning", "follow"),
    "lightning.fabric.connector": ("lightning", "follow"),
    "pytorch_lightning.trainer.connectors.accelerator_connector": ("lightning", "follow"),
    "lightning_fabric.connector": ("lightning", "follow"),
}

# Whose lines are passed over in a warning.
_LIBRARIES = {
    "accelerate", "dataclasses", "functools", "jsonargparse", "lightning", "lightning_fabric", "oxitorch",
    "pytorch_lightning", "torch", "transformers",
}  # fmt: skip

_told: set[str] = set()


def install() -> None:
    """Makes libraries follow, those that are imported already and those that will be."""
    _after_import.call({name: _adapter(*where) for name, where in _ADAPTED.items()})


def _adapter(module: str, function: str):
    def adapt(theirs) -> None:
        try:
            getattr(importlib.import_module(f"oxitorch.integrations.{module}"), function)(theirs)
        except (AttributeError, TypeError) as e:  # another version of theirs, which must be importable all the same
            library = theirs.__name__.partition(".")[0]
            tell(
                module,
                f"this version of {library} is not known, and does not follow the device: {e}",
                "docs/libraries.md says what can be set by hand",
            )

    return adapt


def tell(what: str, text: str, hint: str) -> None:
    """A warning, once in a process for each `what`, with what to do about it."""
    if what not in _told:
        _told.add(what)
        warnings.warn(f"oxitorch: {text}\nhint: {hint}", UserWarning, stacklevel=_users_level())


def _users_level() -> int:
    """The stack level, for who calls `tell`, of the first line that is neither ours nor a library's."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _LIBRARIES:
        level, frame = level + 1, frame.f_back
    return level


def usable() -> bool:
    """Whether the device can be used in this process."""
    from oxitorch import tpu

    return tpu.is_available()


def tell_of_cpu_platform(library: str, other: str) -> None:
    """Says it where the device that a library takes is the CPU, and nobody asked for that; `other` avoids it."""
    from oxitorch import tpu

    if _env.PLATFORM.read() is None and _env.PREFLIGHT.read() is None and tpu.platform() == "cpu":
        tell(
            f"{library} on the cpu platform",
            f"{library} uses device '{_activate.NAME}', which is XLA on the CPU here",
            f"{other} for PyTorch's own kernels; OXITORCH_PLATFORM=cpu if this is meant",
        )


def look_back() -> None:
    """Called once, when the device starts: says which library chose the CPU before that."""
    from oxitorch.integrations import accelerate

    accelerate.look_back()
