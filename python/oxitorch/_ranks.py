"""The file in which this process keeps its latest collectives, for `oxitorch ranks`.

It stays where the process hangs, fails or is killed, and goes when it ends well.
"""

import contextlib
import functools
import json
import os
import re
import socket
import stat
import time
import warnings
from pathlib import Path

from oxitorch import _activate, _core, _env

# Files of runs that did not end well are kept for a week.
_KEPT_S = 7 * 24 * 3600

_file: Path | None = None


@functools.cache
def record(rank: int, ranks: int) -> None:
    """Begins with it once the device is used. Called for each process group; the first has all ranks."""
    if _file is None and _env.PREFLIGHT.read() is None:
        _activate.when_started(lambda: _open(rank, ranks))


def _open(rank: int, ranks: int) -> None:
    global _file
    folder = _env.ranks_folder()
    if folder is None or _file is not None:
        return
    run = _env.run_name()
    head = {"rank": rank, "ranks": ranks, "run": run, "process": os.getpid(), "host": socket.gethostname()}
    head["began_unix_s"] = time.time()
    path = Path(folder, re.sub(r"[^A-Za-z0-9.-]", "_", f"{run}-{rank}")[-200:])
    try:
        _make(Path(folder))
        _core.record_flight(path, json.dumps(head))
        _file = path
    except OSError as e:
        warnings.warn(f"oxitorch: `oxitorch ranks` will not show this process: {e}", UserWarning, stacklevel=2)


def _make(folder: Path) -> None:
    """The folder, which is this user's alone: others may write beside it. Old files go."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    facts = folder.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid() or facts.st_mode & 0o022:
        raise PermissionError(f"{folder} is not a folder that only this user can write to")
    for old in folder.iterdir():
        with contextlib.suppress(OSError):
            if time.time() - old.lstat().st_mtime > _KEPT_S:
                old.unlink()


def forget() -> None:
    """This process ends well."""
    if _file is not None:
        with contextlib.suppress(OSError):
            _file.unlink()
