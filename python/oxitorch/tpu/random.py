"""Random numbers: one Philox generator per device, reproducible from `torch.manual_seed`.

A generator's state is 16 bytes: the seed and the offset into its stream.
"""

import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from oxitorch import _activate

from . import _device

__all__ = [
    "get_rng_state", "get_rng_state_all", "initial_seed", "manual_seed", "manual_seed_all", "seed", "seed_all",
    "set_rng_state", "set_rng_state_all",
]  # fmt: skip


def manual_seed(seed: int) -> None:
    """Seeds the current device's generator."""
    _activate.core().manual_seed(_device.current_device(), _as_u64(seed))


def manual_seed_all(seed: int) -> None:
    """Seeds the generators of all devices. `torch.manual_seed` calls it, so an unavailable device is no error."""
    if _activate.why_unavailable() is None and not _device._is_in_bad_fork():
        # -1: all devices, also those of a platform that is not started yet.
        _activate.core().manual_seed(-1, _as_u64(seed))


def seed() -> None:
    """Seeds the current device's generator from the system's entropy."""
    manual_seed(_entropy())


def seed_all() -> None:
    """Seeds all devices' generators from the system's entropy, all with the same seed."""
    manual_seed_all(_entropy())


def initial_seed() -> int:
    """The seed of the current device's generator."""
    return _activate.core().initial_seed(_device.current_device())


def get_rng_state(device: Any = "tpu") -> Tensor:
    """The state of a device's generator: a uint8 CPU tensor of 16 elements."""
    return torch.frombuffer(
        bytearray(_activate.core().get_rng_state(_device._get_device_index(device))), dtype=torch.uint8
    )


def get_rng_state_all() -> list[Tensor]:
    """The states of all devices' generators."""
    return [get_rng_state(i) for i in range(_device.device_count())]


def set_rng_state(new_state: Tensor, device: Any = "tpu") -> None:
    """Sets the state of a device's generator, as `get_rng_state` gave it."""
    if new_state.dtype != torch.uint8 or new_state.device.type != "cpu":
        raise TypeError("RNG state must be a torch.ByteTensor")
    if new_state.numel() != 16:
        raise RuntimeError(f"RNG state is wrong size: expected 16 bytes, got {new_state.numel()}")
    _activate.core().set_rng_state(_device._get_device_index(device), bytes(new_state.contiguous().tolist()))


def set_rng_state_all(new_states: Iterable[Tensor]) -> None:
    """Sets the states of all devices' generators."""
    for i, state in enumerate(new_states):
        set_rng_state(state, i)


def _entropy() -> int:
    return int.from_bytes(os.urandom(8), "little")


def _as_u64(seed: int) -> int:
    """Negative seeds wrap around, as in `torch.manual_seed`."""
    return int(seed) & 0xFFFF_FFFF_FFFF_FFFF
