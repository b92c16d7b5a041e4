"""A child of this process, which has all that this one has imported, and does one thing."""

import os
import signal
import sys
from collections.abc import Callable


def run(work: Callable[[], int]) -> int:
    """The exit status of a child that did this: what `work` returns, 1 if it raises, negative if a signal ended it."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = work()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(status)  # nothing of the parent's is cleaned up here
    try:
        _, status = os.waitpid(pid, 0)
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise
    return os.waitstatus_to_exitcode(status)
