"""The device of this process: takes PyTorch's slot for it under its name, loads the shim and starts the core.

Three ends are possible. All well; or the backend cannot work here (no compiler, an unknown plugin, a wrong variable):
then `import torch` goes on, `torch.tpu.is_available()` is False and the first use of the device raises the reason; or
somebody else owns PyTorch's one slot for outside devices: that is raised at once, because `device="tpu"` would mean
something else than the user thinks.
"""

import atexit
import importlib.metadata
import os
import platform
import sys
import threading
import time
from collections.abc import Callable

from oxitorch import _core, _env, _shim

NAME = "tpu"

# Distributions that also claim PyTorch's PrivateUse1 device, by the name they give it.
_RIVALS = {"tpu": ("torch-tpu", "torch_tpu", "torchtpu"), "jax": ("torchax",)}

_lock = threading.Lock()
_done = False
_unavailable: Exception | None = None
_at_start: list[Callable[[], None]] = []


class Unavailable(RuntimeError):
    """The device cannot be used in this process; the message says why and what to do."""

    __module__ = "oxitorch"


def activate() -> None:
    """Takes the slot and starts the core, once; safe to call from several threads and again."""
    global _done, _unavailable
    # Outside the lock: another thread may hold torch's import lock and be on its way here.
    import torch

    with _lock:
        if _done:
            return
        _refuse_rivals(torch)
        torch.utils.rename_privateuse1_backend(NAME)
        _done = True
        try:
            _check_machine()
            _start_core()
        except Exception as e:
            _unavailable = e


def is_active() -> bool:
    """Whether the slot was taken (the device may still be unavailable)."""
    return _done


def why_unavailable() -> Exception | None:
    """The error that keeps the device from working, None where it works."""
    return _unavailable


def raise_unavailable() -> None:
    """Raises the reason where the device cannot be used."""
    if _unavailable is not None:
        raise Unavailable(f"device '{NAME}' is not available: {_unavailable}") from _unavailable


def core():
    """The Rust core of a device that works."""
    raise_unavailable()
    return _core


def is_available() -> bool:
    """Whether the device can be used in this process. Never raises; starts nothing where plugin and kernel show it."""
    if _unavailable is not None:
        return False
    try:
        return _core.device_count() > 0
    except RuntimeError:
        return False


def _check_machine() -> None:
    machine = platform.machine().lower()
    if not sys.platform.startswith("linux") or machine not in ("x86_64", "amd64", "aarch64", "arm64"):
        raise Unavailable(f"oxitorch runs on Linux on x86-64 and aarch64; this is {platform.system()} on {machine}")


def _start_core() -> None:
    config = _env.core_config()
    torch = _shim.find_torch()
    assert torch is not None  # activate imported it
    config["shim"] = str(_shim.find_or_build(torch))
    config["site_dirs"] = _env.site_dirs()
    # Frames of these folders are not the user's.
    config["library_dirs"] = [str(torch.root), os.path.dirname(__file__)]
    config["on_start"] = _on_start
    config["child"] = _env.child
    _core.init(config)
    atexit.register(_shut_down)


def _shut_down() -> None:
    _core.shutdown()
    # From here on operations hold up daemon threads (`Engine::linger`). One that is on its way back from the operation
    # before gets the time to come there: Python would end it in the middle of PyTorch's C++, and the process with it.
    # On a busy machine that takes a while, and one that computes by itself never comes.
    daemons = [t.native_id for t in threading.enumerate() if t.daemon and _core.is_started()]
    end = time.monotonic() + 1
    while daemons:
        time.sleep(0.05)
        if time.monotonic() > end or not any(map(_wants_to_run, daemons)):
            break


def _wants_to_run(thread: int | None) -> bool:
    """Whether a thread runs, or would if a processor were free."""
    try:
        with open(f"/proc/self/task/{thread}/stat") as f:
            return f.read().rpartition(")")[2].split()[0] == "R"
    except OSError:  # it has ended
        return False


def _on_start() -> None:
    """Called when the device was started, by the thread that did."""
    while _at_start:
        _at_start.pop(0)()


def when_started(action: Callable[[], None]) -> None:
    """Does something once the device is started; now if it is."""
    if core().is_started():
        action()
    else:
        _at_start.append(action)


def _refuse_rivals(torch) -> None:
    """PyTorch has one slot for outside devices (PrivateUse1); a second owner breaks both."""
    taken = torch._C._get_privateuse1_backend_name()
    if taken == "privateuseone":
        return
    installed = [d for d in _RIVALS.get(taken, ()) if _installed(d)]
    who = f"`{installed[0]}`" if installed else "another backend"
    remove = f"uninstall it (`pip uninstall {installed[0]}`)" if installed else "uninstall it"
    raise RuntimeError(
        f"oxitorch: {who} already registered PyTorch's PrivateUse1 device, as '{taken}', and there can be only one\n"
        f"hint: {remove} or uninstall oxitorch; "
        "to keep both, set TORCH_DEVICE_BACKEND_AUTOLOAD=0 and import the one you want"
    )


def _installed(distribution: str) -> bool:
    try:
        importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
