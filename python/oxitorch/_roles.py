"""Where the device is not there: tells the core what tensors are for, so that their programs can be split over chips.

A tensor is named after the module that nobody else owns: `blocks.0.qkv.weight`, and what belongs to it after that:
`blocks.0.qkv.weight/exp_avg`. Nothing of this runs unless `oxitorch preflight` runs the script.
"""

import gc
import weakref

import torch
import torch.nn as nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from oxitorch import _core

# Modules that no other module owns, and those that were looked at.
_roots: list[weakref.ref] = []
_seen: weakref.WeakSet = weakref.WeakSet()


def install() -> None:
    """Names tensors before and after each step of an optimizer, and before a module is called for the first time."""
    register_module_forward_pre_hook(_before_module)
    register_optimizer_step_pre_hook(_around_step)
    register_optimizer_step_post_hook(_around_step)


def _before_module(module, _) -> None:
    if torch.compiler.is_compiling() or module in _seen:
        return
    _seen.add(module)
    if next(module.parameters(), None) is not None or next(module.buffers(), None) is not None:
        _look()
        _core.label(list(_of_modules()))


def _around_step(optimizer, *_) -> None:
    if torch.compiler.is_compiling():
        return
    names = {id(p): n for root in _roots if (m := root()) is not None for n, p in m.named_parameters()}
    own = [p for group in optimizer.param_groups for p in group["params"]]
    if any(id(p) not in names for p in own):
        _look()
        names = {id(p): n for root in _roots if (m := root()) is not None for n, p in m.named_parameters()}
    _core.label([*_of_modules(), *_of_optimizer(optimizer, own, names)])


def _look() -> None:
    """Finds the modules that nobody owns."""
    modules = [o for o in gc.get_objects() if issubclass(type(o), nn.Module)]
    owned = {id(child) for m in modules for child in m._modules.values()}
    _roots[:] = [weakref.ref(m) for m in modules if id(m) not in owned]
    _seen.update(modules)


def _of_modules():
    for module in (m for root in _roots if (m := root()) is not None):
        for name, p in module.named_parameters():
            yield from _label(p, "parameter", name)
            if p.grad is not None:
                yield from _label(p.grad, "gradient", name)
        for name, b in module.named_buffers():
            yield from _label(b, "buffer", name)


def _of_optimizer(optimizer, own, names):
    for i, p in enumerate(own):
        # What is in no module has a name all the same.
        name = names.get(id(p), f"parameter {i}")
        yield from _label(p, "parameter", name)
        if p.grad is not None:
            yield from _label(p.grad, "gradient", name)
        for key, value in optimizer.state.get(p, {}).items():
            yield from _label(value, "state", f"{name}/{key}")


def _label(tensor, role, name):
    tensor = getattr(tensor, "_local_tensor", tensor)  # a DTensor has no memory of its own
    # A compiled module is a module with the real one in it.
    if torch.is_tensor(tensor) and tensor.device.type == "tpu":
        yield tensor.untyped_storage().data_ptr(), role, name.replace("_orig_mod.", "")
