"""Hugging Face Accelerate, and the Trainer of transformers, which runs on it.

Accelerate asks for each device that it knows whether it is there, and takes the CPU otherwise. It has one setting for
others, the variable ACCELERATE_TORCH_DEVICE. That is not set for everybody: it is stronger than
`Accelerator(cpu=True)` and `TrainingArguments(use_cpu=True)`, and child processes without the device inherit it.
"""

import functools
import inspect
import os
import sys

import torch

from oxitorch import _activate, integrations

_SETTING = "ACCELERATE_TORCH_DEVICE"


def follow(state) -> None:
    """`accelerate.state`: the default device is ours where it would be the CPU."""
    theirs = state.PartialState.default_device.fget

    def default_device(self) -> torch.device:
        device = theirs(self)
        if device.type != "cpu" or not integrations.usable():
            return device
        _agree_with_old_transformers()
        integrations.tell_of_cpu_platform("Accelerate", "`Accelerator(cpu=True)` or `TrainingArguments(use_cpu=True)`")
        return torch.device(_activate.NAME)

    state.PartialState.default_device = property(default_device, doc=theirs.__doc__)


def _agree_with_old_transformers() -> None:
    """Where TrainingArguments does not know the device (transformers 4), it reads this after Accelerate chose."""
    arguments = sys.modules.get("transformers.training_args")
    if arguments is not None and not hasattr(arguments, "is_torch_tpu_available"):
        os.environ.setdefault(_SETTING, _activate.NAME)


def allow_fp16(accelerator) -> None:
    """`accelerate.accelerator`: mixed precision in float16, which Accelerate allows on a list of devices only.

    Where it refuses ours, the Accelerator is made without mixed precision, and then given what it has elsewhere.
    """
    theirs = accelerator.Accelerator.__init__
    signature = inspect.signature(theirs)
    states = accelerator.AcceleratorState

    @functools.wraps(theirs)
    def __init__(self, *args, **kwargs):
        try:
            return theirs(self, *args, **kwargs)
        except ValueError:
            state = states() if states._shared_state else None
            if state is None or state.device.type != _activate.NAME or state._mixed_precision != "fp16":
                raise
        bound = signature.bind(self, *args, **kwargs)
        bound.arguments["mixed_precision"] = None  # what the state says
        state._mixed_precision = "no"
        try:
            theirs(*bound.args, **bound.kwargs)
        finally:
            state._mixed_precision = "fp16"
        options = self.scaler_handler.to_kwargs() if self.scaler_handler is not None else {}
        self.scaler = torch.amp.GradScaler(_activate.NAME, **options)
        self.native_amp = True

    accelerator.Accelerator.__init__ = __init__


def look_back() -> None:
    """Says that Accelerate chose the CPU in this process, where nobody told it to, now that the device is used."""
    state = sys.modules.get("accelerate.state")
    shared = getattr(getattr(state, "PartialState", None), "_shared_state", None) or {}
    device = shared.get("device")
    if device is None or device.type != "cpu" or shared.get("_cpu"):
        return
    if _SETTING not in os.environ:
        reason = "chose the CPU before oxitorch was there"
        hint = f"`import oxitorch` before the Accelerator or the TrainingArguments are made, or set {_SETTING}=tpu"
    elif "transformers.training_args" in sys.modules:
        reason = f"uses the CPU, as {_SETTING} says, which transformers does not read"
        hint = f"unset {_SETTING}, or say `TrainingArguments(use_cpu=True)`"
    else:
        return
    integrations.tell(
        "accelerate on the CPU",
        f"Accelerate {reason}, and now device '{_activate.NAME}' is used: tensors of the two do not go together",
        hint,
    )
