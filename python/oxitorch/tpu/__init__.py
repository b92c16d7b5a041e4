"""`torch.tpu`: the device module, in the shape of `torch.cuda`.

Importing it starts nothing; the platform (the PJRT plugin and its client) starts at the first use of the device.
Every function that takes a device takes an int, a string, a `torch.device`, or None for the current device.
Where the device cannot be used, `is_available()` is False, `device_count()` is 0, and everything else raises
RuntimeError with the reason.
"""

import sys
from types import ModuleType
from typing import Any

import torch

from oxitorch import _activate, _register
from oxitorch._dims import Dim
from oxitorch._offload import checkpoint_name, offload, save_only_these_names

from . import amp, compiler, memory, modes, ops, programs, random, streams, tracing
from ._device import (
    DeviceProperties,
    _DeviceGuard,
    _exchange_device,
    _get_device_index,
    _is_in_bad_fork,
    _lazy_init,
    _maybe_exchange_device,
    can_device_access_peer,
    current_device,
    device,
    device_count,
    device_of,
    get_device_capability,
    get_device_name,
    get_device_properties,
    init,
    is_available,
    is_initialized,
    platform,
    set_device,
    synchronize,
)
from .buckets import Capacity, bucketing
from .memory import (
    empty_cache,
    get_per_process_memory_fraction,
    max_memory_allocated,
    max_memory_reserved,
    mem_get_info,
    memory_allocated,
    memory_reserved,
    memory_stats,
    memory_stats_as_nested_dict,
    memory_summary,
    reset_accumulated_memory_stats,
    reset_max_memory_allocated,
    reset_peak_memory_stats,
    set_per_process_memory_fraction,
)
from .modes import (
    EagerMode,
    Precision,
    explain,
    get_background_compile,
    get_precision,
    get_window,
    max_graphs,
    precision,
    set_allow_excess_precision,
    set_background_compile,
    set_eager_mode,
    set_fallback,
    set_nan_trap,
    set_precision,
    set_window,
)
from .programs import Graph, graphs
from .random import (
    get_rng_state,
    get_rng_state_all,
    initial_seed,
    manual_seed,
    manual_seed_all,
    seed,
    seed_all,
    set_rng_state,
    set_rng_state_all,
)
from .streams import Event, Stream, StreamContext, current_stream, default_stream, set_stream, stream
from .tracing import trace

__all__ = [
    "Capacity", "DeviceProperties", "Dim", "EagerMode", "Event", "Graph", "Precision", "Stream", "StreamContext", "amp",
    "bucketing", "can_device_access_peer", "checkpoint_name",
    "compiler", "current_device", "current_stream", "default_stream", "device", "device_count", "device_of",
    "empty_cache", "explain", "get_amp_supported_dtype", "get_background_compile", "get_device_capability",
    "get_device_name", "get_device_properties",
    "get_per_process_memory_fraction", "get_precision", "get_rng_state", "get_rng_state_all", "get_window",
    "graphs",
    "init", "initial_seed", "is_available", "is_bf16_supported", "is_initialized", "jit", "manual_seed",
    "manual_seed_all",
    "max_graphs", "max_memory_allocated", "max_memory_reserved", "mem_get_info", "memory", "memory_allocated",
    "memory_reserved", "memory_stats", "memory_stats_as_nested_dict", "memory_summary", "metrics",
    "metrics_summary", "metrics_text", "offload", "ops", "platform",
    "precision", "random", "reset_accumulated_memory_stats", "reset_max_memory_allocated", "reset_metrics",
    "reset_peak_memory_stats", "save_only_these_names", "scan_layers", "seed", "seed_all",
    "set_allow_excess_precision", "set_background_compile", "set_device",
    "set_eager_mode", "set_fallback", "set_nan_trap", "set_per_process_memory_fraction",
    "set_precision", "set_rng_state", "set_rng_state_all",
    "set_stream", "set_window", "stream", "synchronize", "trace",
]  # fmt: skip


def jit(fn=None, **options):
    """Makes one program of each kind of calls of a function; see `oxitorch.jit.jit`."""
    from oxitorch.jit import jit

    return jit(fn, **options)


def scan_layers(layers, *, remat="none"):
    """Makes one loop of layers that are called one after another.

    A program then has the operations of one layer, however many there are. The layers have the same structure, and
    differ in the values of their parameters and buffers alone; each gives a tensor like the one that it takes.
    Parameters stay those of the layers, with their names: they are stacked in the program.

    Args:
        layers: an `nn.ModuleList` or `nn.Sequential`.
        remat: what the backward finds of each layer's forward. "none": all that it needs, as in PyTorch. "full": the
            input, from which it computes the layer again. "dots": the results of matrix products, convolutions and
            attention besides. A list of operations, or a policy, as `torch.utils.checkpoint`'s
            `create_selective_checkpoint_contexts` takes: what they name.

    Returns:
        An `nn.Sequential` with the layers under their names; `forward(x, *args, **kwargs)` calls each with the result
        of the one before and with the same other arguments.

    Raises:
        ValueError: the layers differ in structure, or `remat` is none of these.
    """
    from oxitorch._scan_layers import scan_layers

    return scan_layers(layers, remat=remat)


def get_amp_supported_dtype() -> list[torch.dtype]:
    """The types `torch.autocast("tpu")` can compute in."""
    return [torch.bfloat16, torch.float16]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """Whether bfloat16 works: on every platform."""
    return True


def metrics() -> dict[str, Any]:
    """What the engine did in this process since the start or `reset_metrics`; `docs/metrics.md` explains each entry.

    Among them: "ops", "programs", "launches", "window_hits", "compiles", "compile_s", "compile_times" (upper end in
    seconds to number), "background_compiles" and "swaps" (see `set_background_compile`), "loads" (programs that
    another process had compiled), "load_s", "cache_hits", "transfers_h2d", "transfers_d2h" and their bytes,
    "donations" and "bytes_donated", "offloads" and "reloads" (values that went to the host and came back) and their
    bytes, "flushes" (by reason), "fallbacks" (operation name to how often it ran on the
    CPU), "cache" (hits of each tier, what was written, evicted, damaged, waited for and saved) and "devices": for
    each device its memory, its queue, and where its time and that of its last step went.
    """
    return _activate.core().metrics()


def metrics_text() -> str:
    """The metrics in Prometheus' text exposition format (version 0.0.4): write it to a file for the node exporter's
    textfile collector, or answer with it as `text/plain; version=0.0.4`.
    """
    return _activate.core().metrics_text()


def metrics_summary() -> str:
    """The metrics for people: what bounds the device and what to do about it, programs, caches, copies, memory."""
    return _activate.core().metrics_summary()


def reset_metrics() -> None:
    """Makes all counters of `metrics` start again at zero."""
    _activate.core().reset_metrics()


class _TpuModule(ModuleType):
    """The class of this module: settings that read and assign like variables."""

    @property
    def _initialized(self) -> bool:
        """What `torch.utils.checkpoint` asks before it saves the random state."""
        return is_initialized()

    @property
    def eager_mode(self) -> EagerMode:
        """The eager mode; assign an `EagerMode` or its name."""
        return modes.get_eager_mode()

    @eager_mode.setter
    def eager_mode(self, mode: EagerMode | str) -> None:
        set_eager_mode(mode)

    @property
    def nan_trap(self) -> bool:
        """Whether debug mode raises at the first NaN or infinity."""
        return _activate.core().get_nan_trap()

    @nan_trap.setter
    def nan_trap(self, enabled: bool) -> None:
        set_nan_trap(enabled)

    @property
    def allow_excess_precision(self) -> bool:
        """Whether XLA may compute in more precision than the types say."""
        return _activate.core().get_allow_excess_precision()

    @allow_excess_precision.setter
    def allow_excess_precision(self, allow: bool) -> None:
        set_allow_excess_precision(allow)

    @property
    def default_generators(self) -> tuple[torch.Generator, ...]:
        """The generator of each device. AttributeError with a torch that does not give them out (2.11)."""
        return tuple(torch._C._accelerator_getDefaultGenerator(i) for i in range(device_count()))


sys.modules[__name__].__class__ = _TpuModule
_register.register(sys.modules[__name__])
tracing._write_at_exit()
