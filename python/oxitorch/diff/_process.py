"""Processes that have PyTorch from their start, as children of one that has imported it and has done nothing with it.

A run and a comparison need a process each, since both start devices and threads. Importing PyTorch, with what its
optimizers import, takes longer than a few steps of a small model, so that it is done once.
"""

import atexit
import signal
import sys
import threading
import traceback
from collections.abc import Callable

import torch._dynamo  # noqa: F401 -- what the first optimizer of a process imports

from oxitorch import _fork


def run(work: Callable[[], int]) -> int:
    """The exit status of a process that did this, as a Python program has one; negative if a signal ended it."""
    return _fork.run(lambda: _as_program(work))


def _as_program(work: Callable[[], int]) -> int:
    """What the interpreter does with a program: what it raises and what it registered for its exit."""
    status = 1
    try:
        status = work()
    except SystemExit as e:
        status = _status(e.code)
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            threading._shutdown()
            atexit._run_exitfuncs()
        except BaseException:
            traceback.print_exc()
    return status


def _status(code) -> int:
    """The exit status of what `sys.exit` was given."""
    if code is None or isinstance(code, int):
        return (code or 0) & 0xFF
    print(code, file=sys.stderr)
    return 1
