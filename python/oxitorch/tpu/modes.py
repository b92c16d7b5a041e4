"""Settings of the eager engine: mode, fallback, traps, precision.

Each setter works as a plain call and as a context manager: `torch.tpu.set_eager_mode("debug")` sets it from here on,
`with torch.tpu.set_eager_mode("debug"):` sets it inside the block. All of them hold for the whole process.
"""

import enum
from typing import Any

from oxitorch import _activate, _env, _running


class EagerMode(enum.Enum):
    """How operations outside a compiled region are run.

    STRICT: one operation at a time, asynchronous: Python runs ahead of the device.
    DEBUG: one operation at a time, waiting after each; indices are checked, so an error is raised at its own line.
    FUSED: the stream of operations becomes larger programs by itself; Python runs ahead of the device.

    The names with DEFER are those that TorchTPU uses for the same modes.
    """

    STRICT = "strict"
    DEBUG = "debug"
    FUSED = "fused"
    DEFER_NEVER = "strict"  # noqa: PIE796
    DEFER_NEVER_AND_LAUNCH_BLOCKING = "debug"  # noqa: PIE796
    DEFER_AND_FUSE = "fused"  # noqa: PIE796

    @classmethod
    def _missing_(cls, value):
        if isinstance(value, str):
            by_name = cls.__members__.get(value.upper())
            if by_name is not None:
                return by_name
        raise ValueError(f"unknown eager mode {value!r}: expected one of {', '.join(repr(m.value) for m in cls)}")


class Precision(enum.Enum):
    """The precision of float32 matrix products and convolutions, as StableHLO names it.

    HIGHEST: true float32. HIGH: three bfloat16 passes on a TPU, TF32 on a GPU. DEFAULT: one bfloat16 pass on a TPU.
    The cpu platform computes in float32 in every case.
    """

    HIGHEST = "highest"
    HIGH = "high"
    DEFAULT = "default"


class _Restore:
    """What a setter returns: leaving its `with` block puts the value back that was there before."""

    def __init__(self, set_value, previous: Any):
        self._set = set_value
        self._previous = previous

    def __enter__(self) -> None:
        return None

    def __exit__(self, *exc) -> bool:
        self._set(self._previous)
        return False


def get_eager_mode() -> EagerMode:
    """The mode operations run in now."""
    return EagerMode(_activate.core().get_eager_mode())


def set_eager_mode(mode: EagerMode | str) -> _Restore:
    """Sets the eager mode; also a context manager.

    Raises:
        ValueError: no such mode.
    """
    chosen = mode if isinstance(mode, EagerMode) else EagerMode(mode)
    core = _activate.core()
    previous = core.get_eager_mode()
    core.set_eager_mode(chosen.value)
    return _Restore(core.set_eager_mode, previous)


def get_window() -> dict[str, int]:
    """The bounds that `set_window` sets."""
    ops, size, kept = _activate.core().get_window()
    return {"ops": ops, "bytes": size, "kept_bytes": kept}


def set_window(ops: int | None = None, bytes: int | None = None, kept_bytes: int | None = None) -> _Restore:
    """Bounds what fused mode records before it launches it; also a context manager.

    A larger window gives larger programs, which take longer to compile and hold their inputs for longer. On the cpu
    platform they are slower, too, once their temporary memory is more than malloc keeps at hand.

    Args:
        ops: launch after so many operations; None: 10,000, or what OXITORCH_WINDOW_OPS says.
        bytes: launch when the results of the recorded operations, needed or not, have so many bytes; None: the
            memory of the device on the cpu platform and eight times that elsewhere, or what OXITORCH_WINDOW_BYTES says.
        kept_bytes: the same for those results that XLA does not fuse into the operations that read them: of matrix
            products, convolutions, reductions and the like; None: 256 MiB on the cpu platform and the memory of the
            device elsewhere, or what OXITORCH_WINDOW_KEPT_BYTES says.

    Raises:
        ValueError: a bound below 1.
    """
    for name, value in (("ops", ops), ("bytes", bytes), ("kept_bytes", kept_bytes)):
        if value is not None and value < 1:
            raise ValueError(f"set_window() needs {name} of at least 1, got {value}")
    core = _activate.core()
    previous = core.get_window()
    core.set_window(
        ops or _env.WINDOW_OPS.read(),
        bytes or _env.WINDOW_BYTES.read(),
        kept_bytes or _env.WINDOW_KEPT_BYTES.read(),
    )
    return _Restore(lambda window: core.set_window(*window), previous)


def explain(last: int | None = None) -> str:
    """Why each program of this process was made, oldest first.

    Each entry says what cut the stream of operations, with the Python line; the earlier program that is most like the
    new one; the first operations that differ, with their lines, shapes, dtypes and arguments; and what to do.
    `OXITORCH_EXPLAIN=1` prints the entries as they come. The last 1000 are kept. Behind them are the functions of
    `torch.tpu.jit` that are run anew in each call, and why.

    Args:
        last: only so many of the newest.
    """
    entries = _activate.core().explanations()
    entries = entries[len(entries) - last :] if last is not None and last < len(entries) else entries
    return "\n".join([*entries, *_running.run_anew] if last is None else entries)


def max_graphs(n: int | None) -> _Restore:
    """Allows `n` new programs from here on; one more raises RuntimeError and says why it is new. None: any number.

    Also a context manager: after the warm-up, `with torch.tpu.max_graphs(0):` proves that a loop compiles nothing.

    Raises:
        ValueError: n is negative.
    """
    if n is not None and n < 0:
        raise ValueError(f"max_graphs() needs a number of programs, got {n}")
    core = _activate.core()
    return _Restore(core.allow_programs, core.allow_programs(n))


def get_background_compile() -> bool:
    """Whether a program that takes long to compile runs in a quick version first."""
    return _activate.core().get_background_compile()


def set_background_compile(enabled: bool) -> _Restore:
    """Sets whether a program that takes long to compile runs in a quick version first; also a context manager.

    The quick version computes the same, slower, and may round differently; when the program is launched again, it is
    compiled with all effort on a thread of its own and replaces the quick version by itself. When that happens depends
    on the time that compiling takes, so the last digits of results may differ from run to run.
    Turning it off (also: `torch.use_deterministic_algorithms(True)`) compiles with all effort at once, and replaces
    quick versions before they are launched again.
    """
    core = _activate.core()
    previous = core.get_background_compile()
    core.set_background_compile(bool(enabled))
    return _Restore(core.set_background_compile, previous)


def set_nan_trap(enabled: bool) -> _Restore:
    """Turns the trap for NaN and infinity on or off; also a context manager.

    In debug mode, an operation whose result holds a NaN or an infinity raises RuntimeError with its name and line.
    """
    core = _activate.core()
    previous = core.get_nan_trap()
    core.set_nan_trap(bool(enabled))
    return _Restore(core.set_nan_trap, previous)


def set_fallback(what: str) -> _Restore:
    """What happens at an operation without a lowering; also a context manager.

    Args:
        what: "warn": run it on the CPU, warn once per operation, count it in `torch.tpu.metrics()["fallbacks"]`;
            "error": raise NotImplementedError.
    """
    if what not in ("warn", "error"):
        raise ValueError(f"unknown fallback {what!r}: expected 'warn' or 'error'")
    core = _activate.core()
    previous = core.get_fallback()
    core.set_fallback(what)
    return _Restore(core.set_fallback, previous)


def set_precision(mode: Precision | str | None) -> _Restore:
    """Overrides `torch.set_float32_matmul_precision` for the device, None follows it again; also a context manager."""
    if isinstance(mode, str):
        mode = mode.lower()
    chosen = None if mode is None else Precision(mode).value
    core = _activate.core()
    previous = core.get_precision_override()
    core.set_precision(chosen)
    return _Restore(core.set_precision, previous)


precision = set_precision


def get_precision() -> Precision:
    """The precision that float32 products have now: the override, else what PyTorch is set to ("medium" is DEFAULT)."""
    return Precision(_activate.core().get_precision())


def set_allow_excess_precision(allow: bool) -> _Restore:
    """Whether XLA may keep more precision than the types say, for instance skip a rounding to bfloat16 between two
    operations of one program; off by default, so that results match PyTorch's. Also a context manager.
    """
    core = _activate.core()
    previous = core.get_allow_excess_precision()
    core.set_allow_excess_precision(bool(allow))
    return _Restore(core.set_allow_excess_precision, previous)
