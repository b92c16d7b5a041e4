"""Makes the device of this process one that is not there, as `oxitorch preflight` runs a script."""

import torch

from oxitorch import _absent, _activate, _env, _steps


def install() -> None:
    """Does what has to be done to modules and types, if the command runs this process."""
    folder = _env.PREFLIGHT.read()
    if folder is not None:
        _watch(_absent.description(folder), folder)


def pretend(device: dict, folder: str) -> None:
    """Makes the device one that is not there; what is asked of it is written into the folder.

    Steps end where they are marked.
    """
    if not _activate.core().pretend({**device, "marked": True}, folder):
        raise RuntimeError("the device of this process was started already")
    _watch(device, folder)
    _steps.install()  # behind the hooks that name what a step has written


def _watch(device: dict, folder: str) -> None:
    from oxitorch import _remat, _roles

    _roles.install()
    _remat.install(device.get("remat") or "none", folder)
    if device.get("autocast"):
        torch.set_autocast_enabled(_activate.NAME, True)
