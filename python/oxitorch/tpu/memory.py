"""Device memory: what tensors hold now, what they held at most, what the device has, how much of it a process may use.

The numbers count the buffers that oxitorch owns on the device. The memory of XLA's own temporaries inside a running
program is not among them; on the cpu platform a program is launched only if there is room for them too.
"""

from collections import OrderedDict
from typing import Any

from oxitorch import _activate

from . import _device

__all__ = [
    "empty_cache", "get_per_process_memory_fraction",
    "max_memory_allocated", "max_memory_reserved", "mem_get_info", "memory_allocated",
    "memory_reserved", "memory_stats", "memory_stats_as_nested_dict", "memory_summary",
    "reset_accumulated_memory_stats", "reset_max_memory_allocated", "reset_peak_memory_stats",
    "set_per_process_memory_fraction",
]  # fmt: skip


def memory_stats(device: Any = None) -> "OrderedDict[str, int]":
    """All counters, under the names of `torch.cuda.memory_stats`: "allocated_bytes.all.current", ".peak", ".allocated"
    and ".freed" in bytes, "allocation.all.*" as counts of buffers, and so on. Where the plugin counts for itself, as
    on GPUs and TPUs, "plugin_bytes.current", ".peak" and ".limit" are its numbers, which include the temporaries of
    programs. Empty before the first use of the device.
    """
    index = _device._get_device_index(device, optional=True)
    if not _device.is_initialized():
        return OrderedDict()
    return OrderedDict(sorted(_activate.core().memory_stats(index).items()))


def memory_stats_as_nested_dict(device: Any = None) -> dict[str, Any]:
    """`memory_stats`, with the dots of the names as levels."""
    out: dict[str, Any] = {}
    for name, value in memory_stats(device).items():
        *path, leaf = name.split(".")
        level = out
        for part in path:
            level = level.setdefault(part, {})
        level[leaf] = value
    return out


def memory_allocated(device: Any = None) -> int:
    """Bytes that live tensors hold on the device now."""
    return memory_stats(device).get("allocated_bytes.all.current", 0)


def max_memory_allocated(device: Any = None) -> int:
    """The most bytes held at once since the start or the last `reset_peak_memory_stats`."""
    return memory_stats(device).get("allocated_bytes.all.peak", 0)


def memory_reserved(device: Any = None) -> int:
    """Bytes taken from the device; the same as allocated where the plugin keeps no cache."""
    stats = memory_stats(device)
    return stats.get("reserved_bytes.all.current", stats.get("allocated_bytes.all.current", 0))


def max_memory_reserved(device: Any = None) -> int:
    """The most bytes taken from the device at once."""
    stats = memory_stats(device)
    return stats.get("reserved_bytes.all.peak", stats.get("allocated_bytes.all.peak", 0))


def set_per_process_memory_fraction(fraction: float, device: Any = None) -> None:
    """Lets the tensors of this process use no more than this part of the device's memory; more is a
    `torch.OutOfMemoryError`. What is in use stays. 1 at the start; on the cpu platform, where the memory is the host's,
    0.8.

    Args:
        fraction: from 0 to 1.
    """
    index = _device._get_device_index(device, optional=True)
    if not isinstance(fraction, float):
        raise TypeError("Invalid type for fraction argument, must be `float`")
    if not 0 <= fraction <= 1:
        raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
    _activate.core().set_memory_fraction(index, fraction)


def get_per_process_memory_fraction(device: Any = None) -> float:
    """The part of the device's memory that this process may use."""
    return _activate.core().get_memory_fraction(_device._get_device_index(device, optional=True))


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """How much more this process may use, and what the device has, in bytes."""
    free, total = _activate.core().mem_get_info(_device._get_device_index(device, optional=True))
    return free, total


def reset_peak_memory_stats(device: Any = None) -> None:
    """Makes the peaks start again at what is held now."""
    if _device.is_initialized():
        _activate.core().reset_peak_memory_stats(_device._get_device_index(device, optional=True))


reset_max_memory_allocated = reset_peak_memory_stats


def reset_accumulated_memory_stats(device: Any = None) -> None:
    """Makes the ".allocated" and ".freed" sums start again at zero."""
    if _device.is_initialized():
        _activate.core().reset_accumulated_memory_stats(_device._get_device_index(device, optional=True))


def empty_cache() -> None:
    """Gives memory that is kept for reuse back to the device."""
    if _device.is_initialized():
        _activate.core().empty_cache()


def memory_summary(device: Any = None, abbreviated: bool = False) -> str:
    """A readable table of `memory_stats`.

    Args:
        abbreviated: only what is held now and at most.
    """
    index = _device._get_device_index(device, optional=True)
    stats = memory_stats(index)
    columns = ("current", "peak") if abbreviated else ("current", "peak", "allocated", "freed")
    families = list(dict.fromkeys(name.rsplit(".", 1)[0] for name in stats if "." in name))
    rows = []
    for family in families:
        values = [stats.get(f"{family}.{c}") for c in columns]
        if any(v is not None for v in values):
            show = _bytes if "bytes" in family else str
            rows.append([family.removesuffix(".all"), *("" if v is None else show(v) for v in values)])
    head = ["", *columns]
    widths = [max(len(r[i]) for r in [head, *rows]) for i in range(len(head))]

    def line(cells):
        return "  ".join(
            [cells[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True))]
        ).rstrip()

    title = f"Memory of tpu:{index}, {_device.get_device_name(index)}"
    return "\n".join([title, line(head), *map(line, rows)])


def _bytes(n: int) -> str:
    """1536 -> "1.5 KiB"."""
    size, units = float(n), ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(size) >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{n} B" if units[0] == "B" else f"{size:.1f} {units[0]}"
