"""What a script may say to `oxitorch preflight`; see `docs/preflight.md`. In other runs it means nothing.

This module does not import torch.
"""

import functools
import json
import os

from oxitorch import _env

__all__ = ["batch"]


def batch(size: int) -> int:
    """Marks the size of the batch that `oxitorch preflight --fit batch` may change; gives the one to take.

    Example:
        loader = DataLoader(data, batch_size=oxitorch.preflight.batch(32))
    """
    folder = _env.PREFLIGHT.read()
    if folder is None:
        return size
    path = os.path.join(folder, "batch")
    if not os.path.exists(path):
        with open(path, "w", encoding="ascii") as f:
            f.write(str(int(size)))
    tried = _device(folder).get("batch")
    return size if tried is None else tried


@functools.cache
def _device(folder: str) -> dict:
    """What the command says about the device and the run."""
    with open(os.path.join(folder, "device.json"), encoding="utf-8") as f:
        return json.load(f)
