"""`torch.nn.attention.flex_attention` on the device.

PyTorch's function refuses devices that are not in a list of its own. What it does where no kernel of its is, operations
on the whole matrix of scores, is right for any device; so the device is not asked for there.
"""

import functools
from types import ModuleType

import torch

from oxitorch import _after_import


def install() -> None:
    _after_import.call({"torch.nn.attention.flex_attention": _accept})


def is_flex(target) -> bool:
    """Whether it is one of the two operations that `flex_attention` and its backward are in graphs."""
    return isinstance(target, torch._ops.HigherOrderOperator) and target.name() in _NAMES


def in_operations(target, *args, **kwargs):
    """Does one of the two as operations of PyTorch."""
    return target.py_kernels[torch._C.DispatchKey.CompositeExplicitAutograd](*args, **kwargs)


_NAMES = ("flex_attention", "flex_attention_backward")


def _accept(module: ModuleType) -> None:
    validate = getattr(module, "_validate_device", None)
    if validate is None:
        return

    @functools.wraps(validate)
    def validate_device(query, key, value):
        if query.device.type != "tpu":
            validate(query, key, value)

    module._validate_device = validate_device
