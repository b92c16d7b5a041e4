"""A script on a device that is not there: what `oxitorch preflight` tells it in a folder. This imports no torch."""

import functools
import json
import os


@functools.cache
def description(folder: str) -> dict:
    """What the command says about the device and the run."""
    with open(os.path.join(folder, "device.json"), encoding="utf-8") as f:
        return json.load(f)
