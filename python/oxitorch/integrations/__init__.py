"""Libraries that choose a device themselves, or have a list of those they know.

`torch.accelerator.current_accelerator()` is "tpu" where this package is active, on all platforms. What asks PyTorch
that way follows by itself, as transformers does. Accelerate and Lightning have lists of the devices they know and take
the CPU where none of these is there; the modules here put the device in the place of that answer when the library is
imported. safetensors gets files to the device, torchvision's ops are bound. Nothing else of them is changed, and what
the user chose stands. `docs/libraries.md` is for users.
"""

import importlib

from oxitorch import _activate, _after_import
from oxitorch.integrations import _tell

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


def install() -> None:
    """Makes libraries follow, those that are imported already and those that will be."""
    _after_import.call({name: _adapter(*where) for name, where in _ADAPTED.items()})
    _activate.when_started(_look_back)


def _adapter(module: str, function: str):
    def adapt(theirs) -> None:
        try:
            getattr(importlib.import_module(f"oxitorch.integrations.{module}"), function)(theirs)
        except (AttributeError, TypeError) as e:  # another version of theirs, which must be importable all the same
            library = theirs.__name__.partition(".")[0]
            _tell.tell(
                module,
                f"this version of {library} is not known, and does not follow the device: {e}",
                "docs/libraries.md says what can be set by hand",
            )

    return adapt


def _look_back() -> None:
    """Called once, when the device starts: says which library chose the CPU before that."""
    from oxitorch.integrations import accelerate

    accelerate.look_back()
