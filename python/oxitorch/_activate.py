"""Registers the device with PyTorch: the name, the shim, the core, `torch.tpu`, methods, printing.

Three ends are possible. All well; or the backend cannot work here (no compiler, an unknown plugin, a wrong variable):
then `import torch` goes on, `torch.tpu.is_available()` is False and the first use of the device raises the reason; or
somebody else owns PyTorch's one slot for outside devices: that is raised at once, because `device="tpu"` would mean
something else than the user thinks.
"""

import atexit
import importlib
import importlib.metadata
import os
import platform
import sys
import sysconfig
import threading
import time
from collections.abc import Callable

NAME = "tpu"

# Distributions that also claim PyTorch's PrivateUse1 device, by the name they give it.
_RIVALS = {"tpu": ("torch-tpu", "torch_tpu", "torchtpu"), "jax": ("torchax",)}

# Reentrant: importing `oxitorch.tpu` registers it, and registering activates.
_lock = threading.RLock()
_done = False
_registered = False
_unavailable: Exception | None = None
_step_hook = None
# While this thread runs a function that is one program: `made`, the numbers of optimizers that made steps in it.
steps_later = threading.local()


class Unavailable(RuntimeError):
    """The device cannot be used in this process; the message says why and what to do."""

    __module__ = "oxitorch"


def activate() -> None:
    """Does everything once; safe to call from several threads and again."""
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
        importlib.import_module("oxitorch.tpu")


def register(module) -> None:
    """Makes `module` torch.tpu. `oxitorch.tpu` calls this at its end: importing it may be what imports torch."""
    global _registered
    activate()
    with _lock:
        if _registered:
            return
        _registered = True
        import torch

        _register(torch, module)


def is_active() -> bool:
    """Whether the device was registered (it may still be unavailable)."""
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
    from oxitorch import _core

    return _core


def site_dirs() -> list[str]:
    """The folders in which plugin packages are looked for: the import path, in its order."""
    paths = [*sys.path, sysconfig.get_path("platlib"), sysconfig.get_path("purelib")]
    return list(dict.fromkeys(p for p in paths if p))


def _check_machine() -> None:
    machine = platform.machine().lower()
    if not sys.platform.startswith("linux") or machine not in ("x86_64", "amd64", "aarch64", "arm64"):
        raise Unavailable(f"oxitorch runs on Linux on x86-64 and aarch64; this is {platform.system()} on {machine}")


def _start_core() -> None:
    from oxitorch import _core, _env, _shim

    config = _env.core_config()
    torch = _shim.find_torch()
    assert torch is not None  # activate imported it
    config["shim"] = str(_shim.find_or_build(torch))
    config["site_dirs"] = site_dirs()
    # Frames of these folders are not the user's.
    config["library_dirs"] = [str(torch.root), os.path.dirname(__file__)]
    config["on_start"] = _on_start
    config["child"] = _env.child
    _core.init(config)
    atexit.register(_shut_down, _core.shutdown)
    if config["trace"]:
        atexit.register(_write_trace)  # before the device is shut down: exit functions run in reverse


def _shut_down(core: Callable[[], None]) -> None:
    core()
    # From here on operations hold up daemon threads (`Engine::linger`). One that is on its way back from the operation
    # before gets the time to come there: Python would end it in the middle of PyTorch's C++, which aborts the process.
    if any(t.daemon for t in threading.enumerate()):
        time.sleep(0.05)


def _on_start() -> None:
    """Called when the device was started, by the thread that did."""
    from oxitorch import integrations

    integrations.look_back()
    while _at_start:
        _at_start.pop()()


_at_start: list[Callable[[], None]] = []


def when_started(action: Callable[[], None]) -> None:
    """Does something once the device is started; now if it is."""
    if core().is_started():
        action()
    else:
        _at_start.append(action)


def _write_trace() -> None:
    from oxitorch import _core
    from oxitorch.tpu import tracing

    if _core.is_started() and not _core.is_in_bad_fork():
        tracing._write_process()


def _end_of_step(optimizer, *_) -> None:
    """Fused mode cuts the stream of operations here, so that each training step is a program of its own."""
    import torch

    from oxitorch import _core

    # A compiled step is traced, this hook with it; the backend then cuts after the step's graph.
    if torch.compiler.is_compiling():
        return
    made = getattr(steps_later, "made", None)
    if made is None:
        _core.cut("step", id(optimizer))
    else:
        made.append(id(optimizer))


def pretend(device: dict, folder: str) -> None:
    """Makes the device of this process one that is not there; what is asked of it is written into the folder.

    Steps end where they are marked.
    """
    from torch.optim.optimizer import register_optimizer_step_post_hook

    global _step_hook
    if not core().pretend({**device, "marked": True}, folder):
        raise RuntimeError("the device of this process was started already")
    _step_hook.remove()
    _watch(device, folder)
    _step_hook = register_optimizer_step_post_hook(_end_of_step)


def _watch(device: dict, folder: str) -> None:
    """Where the device is not there: what is done to modules, and to types."""
    from oxitorch import _remat, _roles

    _roles.install()
    _remat.install(device.get("remat") or "none", folder)
    if device.get("autocast"):
        import torch

        torch.set_autocast_enabled(NAME, True)


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


def _register(torch, module) -> None:
    torch._register_device_module(NAME, module)
    # `import torch.tpu.random` must give the same module as `torch.tpu.random`.
    for name, value in list(sys.modules.items()):
        if name.startswith("oxitorch.tpu."):
            sys.modules[f"torch.{NAME}.{name.removeprefix('oxitorch.tpu.')}"] = value
    torch.utils.generate_methods_for_privateuse1_backend(
        for_tensor=True, for_module=True, for_packed_sequence=True, for_storage=True
    )
    # PyTorch's default for devices from outside is float16. The setting is per thread: a `torch.autocast("tpu")` in
    # another thread needs its dtype spelled out (`torch.tpu.amp.autocast` does that).
    torch.set_autocast_dtype(NAME, torch.bfloat16)
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from oxitorch import (
        _decompose,
        _default_backend,
        _dlpack,
        _dtensor,
        _env,
        _flops,
        _loops,
        _offload,
        _packed,
        _print,
        _process_group,
        _rnn,
        _share,
        _vmap,
        _while_gradients,
        integrations,
    )

    if _unavailable is None and _env.PREFLIGHT.read() is not None:
        from oxitorch import preflight

        folder = _env.PREFLIGHT.read()
        _watch(preflight._device(folder), folder)  # these hooks run before the one below

    global _step_hook
    _step_hook = register_optimizer_step_post_hook(_end_of_step)
    _print.install(torch)
    _share.install()
    _default_backend.install()
    _process_group.install()
    _dtensor.install()
    _vmap.install()
    _offload.install()
    _flops.install()
    if _unavailable is None:
        _decompose.install()
        _loops.install()
        _while_gradients.install()
        _packed.install()
        _rnn.install()
        _dlpack.install()
        integrations.install()
