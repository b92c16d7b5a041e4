"""What a user is told of a library that takes the device, or does not."""

import sys
import warnings

from oxitorch import _activate, _env

# Whose lines are passed over in a warning.
_LIBRARIES = {
    "accelerate", "dataclasses", "functools", "jsonargparse", "lightning", "lightning_fabric", "oxitorch",
    "pytorch_lightning", "torch", "transformers",
}  # fmt: skip

_told: set[str] = set()


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


def tell_of_cpu_platform(library: str, other: str) -> None:
    """Says it where the device that a library takes is the CPU, and nobody asked for that; `other` avoids it."""
    if _env.PLATFORM.read() is None and _env.PREFLIGHT.read() is None and _activate.core().platform() == "cpu":
        tell(
            f"{library} on the cpu platform",
            f"{library} uses device '{_activate.NAME}', which is XLA on the CPU here",
            f"{other} for PyTorch's own kernels; OXITORCH_PLATFORM=cpu if this is meant",
        )
