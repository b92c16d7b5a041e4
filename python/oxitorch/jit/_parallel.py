"""Modules that train in several processes: what they keep in Python, which a program neither sees nor changes."""

import sys
from contextlib import contextmanager

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass_type


def is_parallel(module: torch.nn.Module) -> bool:
    """Whether it is one of DDP or of FSDP2."""
    return isinstance(module, DistributedDataParallel) or is_sharded(module)


def is_sharded(module: torch.nn.Module) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return isinstance(module, getattr(fsdp, "FSDPModule", ()))


def settle(module: torch.nn.Module) -> bool:
    """Has DDP make the buckets of its later steps, if its next step would begin with that; whether it has.

    Its first backward shows in which order gradients come, and the processes agree on buckets in this order.
    """
    if is_sharded(module):
        return False
    if not module._lazy_init_ran:
        module._lazy_init()
    if not module.reducer._rebuild_buckets():
        return False
    module._has_rebuilt_buckets = True
    return True


def settle_before(module: torch.nn.Module) -> None:
    """The same within a function that is traced, of which it is no part."""
    with apart():
        settle(module)


@contextmanager
def apart():
    """What is done in it is no part of the function that is noted."""
    torch.ops.oxitorch._trace_pause(True)
    try:
        with _disable_current_modes():
            yield
    finally:
        torch.ops.oxitorch._trace_pause(False)


def is_of_processes(func) -> bool:
    """Whether an operation is a collective."""
    return getattr(func, "namespace", None) in ("c10d", "_c10d_functional")


def is_wrapped(cls: type) -> bool:
    """Whether tensors of a class are around others: DTensors, and those that wait for a functional collective."""
    return cls is not torch.Tensor and is_traceable_wrapper_subclass_type(cls)


def plain(t: torch.Tensor) -> torch.Tensor:
    """The tensor that this is or is around: the part of a DTensor that this process has."""
    while is_wrapped(type(t)):
        t = t.trigger_wait() if hasattr(t, "trigger_wait") else _inner(t)[1]
    return t


def _inner(t: torch.Tensor) -> tuple[str, torch.Tensor]:
    """The only tensor in this one, with its name."""
    found = [(name, x) for name in t.__tensor_flatten__()[0] if isinstance(x := getattr(t, name), torch.Tensor)]
    if len(found) != 1:
        raise TypeError(f"torch.tpu.jit: a {type(t).__name__} is several tensors, and no function takes or gives one")
    return found[0]


class Wrapped:
    """How an argument or a result is around another tensor."""

    def __init__(self, t: torch.Tensor):
        self._class, self._size, self._stride = type(t), t.size(), t.stride()
        names, self._context = t.__tensor_flatten__()
        self._name, _ = _inner(t)
        self._rest = {name: getattr(t, name) for name in names if name != self._name}

    @staticmethod
    def of(t: torch.Tensor) -> "Wrapped | None":
        """None if it is a plain tensor, or only waits to be one."""
        return Wrapped(t) if is_wrapped(type(t)) and not hasattr(t, "trigger_wait") else None

    def __eq__(self, other) -> bool:
        return isinstance(other, Wrapped) and self._key() == other._key()

    __hash__ = None

    def _key(self) -> tuple:
        return self._class, self._size, self._stride, self._context, self._name, self._rest

    @staticmethod
    def among(tensors: list[torch.Tensor]) -> "dict[int, Wrapped]":
        """Those of some tensors, by their places."""
        return {i: how for i, t in enumerate(tensors) if (how := Wrapped.of(t)) is not None}

    def around(self, t: torch.Tensor) -> torch.Tensor:
        return self._class.__tensor_unflatten__({**self._rest, self._name: t}, self._context, self._size, self._stride)


def begins(module: torch.nn.Module) -> bool:
    """Whether the next step of a module is its first, and another than all later ones."""
    return not is_sharded(module) and module.static_graph and not module._static_graph_delay_allreduce_enqueued


def asks(module: torch.nn.Module) -> tuple[str, str] | None:
    """Why Python has to run in each step of a module, and what helps; None if a step is a program."""
    if is_sharded(module):
        return None
    if module.find_unused_parameters and not module.static_graph:
        return (
            "trains by DDP with find_unused_parameters=True, which asks the other processes for what each has used",
            "leave it out where each step uses all parameters, or say static_graph=True where each leaves out the same",
        )
    if module._join_config.enable:
        return (
            "trains in a Join context",
            "there each step asks the other processes whether they go on: train without it",
        )
    if not all(_stays(state) for _, state in module._comm_hooks):
        return (
            "trains by a communication hook of DDP that has a state",
            "the state is Python's: register a hook without one",
        )
    return None


def _stays(state) -> bool:
    """Whether the state of a hook is nothing that it could change."""
    return state is None or isinstance(state, (torch.distributed.ProcessGroup, int, float, str))


class SyncedStatistics(TorchFunctionMode):
    """While a `SyncBatchNorm` computes: processes with nothing keep their rows.

    It leaves them out, for which it has to see how much each has. Rows of nothing add nothing to the statistics.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.__getitem__ and sys._getframe(1).f_code is _STATISTICS:
            return args[0]
        return func(*args, **(kwargs or {}))


_STATISTICS = torch.nn.modules._functions.SyncBatchNorm.forward.__code__


class Synced:
    """A DDP module that a function calls: whether its steps are of all processes, before the function and after it."""

    def __init__(self, module: DistributedDataParallel):
        self._module = module
        self._buffers_before = module.require_forward_param_sync

    def finish(self) -> "Synced":
        """The function has run."""
        # What `no_sync` sets within the function is set back.
        self._gradients = self._module.require_backward_grad_sync
        self._buffers_after = self._module.require_forward_param_sync
        return self

    def differs(self) -> bool:
        """Whether the function leaves it in a state in which no call can find it: none is known."""
        return False

    def is_current(self) -> bool:
        m = self._module
        return m.require_backward_grad_sync == self._gradients and m.require_forward_param_sync == self._buffers_before

    def give(self) -> None:
        """Leaves the module as the function does."""
        self._module.require_forward_param_sync = self._buffers_after


# Of FSDP2's groups of parameters: where they are in a step, and what a script may set between steps.
_SHARDED_STATE = (
    "_sharded_state",
    "_training_state",
    "reduce_grads",
    "all_reduce_grads",
    "reshard_after_backward",
    "unshard_in_backward",
    "post_forward_mesh_info",
    "gradient_divide_factor",
)


class Sharded:
    """A module of FSDP2 that a function calls: the state that a program neither sees nor changes."""

    def __init__(self, module: torch.nn.Module):
        self._module = module
        self._before = self._state()

    def _state(self) -> list:
        state = self._module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        return [state._state_ctx.is_last_backward] + [
            getattr(group, name, None) for group in groups for name in _SHARDED_STATE
        ]

    def finish(self) -> "Sharded":
        return self

    def differs(self) -> bool:
        """Whether the function leaves it in another state than it finds it in."""
        return self._state() != self._before

    def is_current(self) -> bool:
        return not self.differs()

    def give(self) -> None:
        """It is as before already."""
