"""Devices: how many, which is current, what they are."""

from collections.abc import Mapping
from typing import Any

import torch
from torch._utils import _get_device_index as _torch_device_index

from oxitorch import _activate


def _is_started() -> bool:
    """Whether the platform runs; registering the device does not start it."""
    if not _activate.is_active() or _activate.why_unavailable() is not None:
        return False
    return _activate.core().is_started()


def _get_device_index(device: Any, optional: bool = False, allow_cpu: bool = False) -> int:
    """The index meant by an int, a string, a `torch.device` or None (the current device); -1 stays -1."""
    if isinstance(device, str):
        device = torch.device(device)
    if isinstance(device, torch.device):
        if allow_cpu and device.type == "cpu":
            return -1
        if device.type != "tpu":
            raise ValueError(f"expected a tpu device, got: {device}")
        return current_device() if device.index is None else device.index
    if device is None:
        return current_device()
    return _torch_device_index(device, optional, allow_cpu)


def is_available() -> bool:
    """Whether the device can be used in this process. Never raises.

    As `torch.cuda.is_available()` it starts nothing where plugin and kernel show the hardware, so that a launcher of
    processes, such as `torchrun`, leaves it to them.
    """
    return _activate.is_available()


def device_count() -> int:
    """The number of devices of the chosen platform; 0 where the device is not available.

    Before they are started it is what the kernel shows, as for `is_available()`.
    """
    if _activate.why_unavailable() is not None:
        return 0
    return _activate.core().device_count()


def is_initialized() -> bool:
    """Whether the platform was started in this process."""
    return _is_started() and not _is_in_bad_fork()


def init() -> None:
    """Starts the platform now instead of at the first use.

    Raises RuntimeError with the reason where the device is not available, and in a forked child of a process that
    uses the device.
    """
    _lazy_init()
    _activate.core().platform()  # how many devices there are can be told without a start


def _lazy_init() -> None:
    """PyTorch calls this before the first use of the device."""
    _activate.raise_unavailable()
    if _is_in_bad_fork():
        raise RuntimeError(
            "cannot use device 'tpu' in a forked child of a process that already uses it\n"
            "hint: use the 'spawn' or 'forkserver' start method of multiprocessing"
        )
    _activate.core().device_count()


def _is_in_bad_fork() -> bool:
    """Whether this is a forked child of a process that had started the platform: its threads are not here."""
    return _activate.why_unavailable() is None and _activate.core().is_in_bad_fork()


def current_device() -> int:
    """The index of the current device."""
    return _activate.core().current_device()


def set_device(device: Any) -> None:
    """Makes `device` (int, string or `torch.device`) the current one; a negative index does nothing.

    Starts nothing. Raises RuntimeError for an index that is not below `device_count()`, as far as that is known without
    a start.
    """
    index = _get_device_index(device)
    if index >= 0:
        _activate.core().set_device(index)


def _exchange_device(index: int) -> int:
    """Sets the current device and returns the one before; a negative index only returns -1."""
    if index < 0:
        return -1
    core = _activate.core()
    previous = core.current_device()
    if previous != index:
        core.set_device(index)
    return previous


_maybe_exchange_device = _exchange_device


class device:
    """Context manager that selects a device. `None` and negative indices do nothing.

    Args:
        device: int, string or `torch.device`.
    """

    def __init__(self, device: Any):
        self.idx = -1 if device is None else _get_device_index(device, optional=True)
        self.prev_idx = -1

    def __enter__(self):
        self.prev_idx = _exchange_device(self.idx)

    def __exit__(self, *exc):
        self.idx = _maybe_exchange_device(self.prev_idx)
        return False


_DeviceGuard = device


class device_of(device):
    """Context manager that selects the device of a tensor or storage; does nothing for one that is elsewhere."""

    def __init__(self, obj):
        super().__init__(obj.device.index if obj.device.type == "tpu" else None)


class DeviceProperties(Mapping):
    """What is known about a device: attributes, also readable as a mapping.

    Always there: `name` (the truth, for instance "XLA:CPU (host)"), `platform` ("cpu", "cuda", "tpu"), `kind` (as the
    plugin spells it) and `total_memory` in bytes (0 where the platform does not say). The rest is the plugin's.
    """

    def __init__(self, values: dict[str, Any]):
        self.__dict__.update(values)

    def __getitem__(self, key: str) -> Any:
        return self.__dict__[key]

    def __iter__(self):
        return iter(self.__dict__)

    def __len__(self) -> int:
        return len(self.__dict__)

    def __repr__(self) -> str:
        shown = {k: f"{v // 2**20}MB" if k == "total_memory" else repr(v) for k, v in self.__dict__.items()}
        return f"DeviceProperties({', '.join(f'{k}={v}' for k, v in shown.items())})"


def get_device_properties(device: Any = None) -> DeviceProperties:
    """The properties of `device` (default: the current one)."""
    return DeviceProperties(_activate.core().device_properties(_get_device_index(device, optional=True)))


def get_device_name(device: Any = None) -> str:
    """What the device really is, for instance "XLA:CPU (host)" or "TPU v5e"."""
    return _activate.core().device_name(_get_device_index(device, optional=True))


def get_device_capability(device: Any = None) -> dict[str, Any]:
    """What the device can do: its data types. There is no compute capability number as CUDA has one."""
    _get_device_index(device, optional=True)
    dtypes = (
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
        torch.float32, torch.float64, torch.complex64, torch.complex128,
    )  # fmt: skip
    return {"supported_dtypes": set(dtypes)}


def synchronize(device: Any = None) -> None:
    """Waits until all work of `device` (default: the current one) is done; raises what failed."""
    _activate.core().synchronize(_get_device_index(device, optional=True))


def can_device_access_peer(device: Any, peer_device: Any) -> bool:
    """Whether two devices can copy to each other: always, all devices of a process belong to one client."""
    count = device_count()
    for d in (device, peer_device):
        index = _get_device_index(d)
        if not 0 <= index < count:
            raise AssertionError(f"Invalid device id: {index}")
    return _get_device_index(device) != _get_device_index(peer_device)


def platform() -> str:
    """What runs the work: "cpu", "cuda" or "tpu"."""
    return _activate.core().platform()
