"""A script that runs on a platform, and is recorded; `__main__` makes a process for each run."""

import os
import random
import runpy
import sys
from pathlib import Path

import numpy
import torch

from oxitorch.diff._platform import Platform
from oxitorch.diff._record import Recorder
from oxitorch.diff._trace import Trace, Writer

# A script's device, where it takes one as an argument.
DEVICE = "{device}"


def record(script: list[str], on: Platform, path: str, detail: int, steps: int, seed: int, share: str | None) -> int:
    """Runs the script; 0 where it, or the last of its steps, ended it.

    Args:
        script: its file, or `-m` and a module, and its arguments.
        path: the file of the recorded run.
        detail: the step that is recorded op by op.
        share: the file of a run whose random numbers this one takes.

    Raises:
        BaseException: what the script does, `SystemExit` too.
    """
    os.dup2(2, 1)  # what the script prints is not the report
    script = [x.replace(DEVICE, on.device) for x in script]
    _seed(seed)
    ended = _Ended()
    recorder = Recorder(Writer(path), lambda step: step == detail, Trace(share) if share else None, ended.after(steps))
    try:
        with on.active():
            try:
                with recorder:
                    _run(script)
            finally:
                recorder.finish(on.header() | {"script": script})
    except SystemExit as e:
        if e is not ended.by:
            raise
    return 0


class _Ended:
    """Ends a script after so many steps."""

    by: SystemExit | None = None

    def after(self, steps: int):
        def stop(step: int) -> None:
            if step >= steps:
                self.by = SystemExit(0)
                raise self.by

        return stop


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)


def _run(script: list[str]) -> None:
    """Runs it as `python` would."""
    if script[0] == "-m":
        sys.argv = script[1:]
        sys.path[0] = ""
        runpy.run_module(script[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = script
        sys.path[0] = str(Path(script[0]).resolve().parent)
        runpy.run_path(script[0], run_name="__main__")
