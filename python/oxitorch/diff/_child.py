"""A process that runs a script on a platform and records it; `__main__` starts one for each run."""

import argparse
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


def main(argv: list[str] | None = None) -> int:
    """Runs the script; the exit status is the script's, and 0 where its steps ended it."""
    parser = argparse.ArgumentParser(prog="oxitorch.diff._child")
    parser.add_argument("--on", type=Platform, required=True)
    parser.add_argument("--trace", required=True)
    parser.add_argument("--detail", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--share")
    parser.add_argument("script", nargs=argparse.REMAINDER)
    asked = parser.parse_args(argv)
    script = asked.script[1:] if asked.script[:1] == ["--"] else asked.script
    script = [x.replace(DEVICE, asked.on.device) for x in script]
    _seed(asked.seed)
    ended = _Ended()
    share = Trace(asked.share) if asked.share else None
    recorder = Recorder(Writer(asked.trace), lambda step: step == asked.detail, share, ended.after(asked.steps))
    try:
        with asked.on.active():
            try:
                with recorder:
                    _run(script)
            finally:
                recorder.finish(asked.on.header() | {"script": script})
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


if __name__ == "__main__":
    sys.exit(main())
