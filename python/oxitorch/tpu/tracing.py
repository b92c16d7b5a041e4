"""Timelines of what a program does: what Python recorded, what was compiled, copied, waited for, and run.

The files are in the trace event format: open them at https://ui.perfetto.dev or in chrome://tracing.
"""

import atexit
import gzip
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from oxitorch import _activate, _core, _env


class trace:
    """Context manager that writes a timeline of its block into a file; `docs/tools.md` explains what is in it.

    Leaving the block waits for the device. The file is there after it, also when the block raised.

    Args:
        path: the file; with a name that ends with `.gz` it is compressed, which Perfetto opens as it is.

    Raises:
        FileNotFoundError: the folder of the file does not exist.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self._number: int | None = None

    def __enter__(self) -> "trace":
        if not self.path.absolute().parent.is_dir():
            raise FileNotFoundError(f"torch.tpu.trace: no such folder: {self.path.absolute().parent}")
        self._number = _activate.core().trace_start()
        return self

    def __exit__(self, *exc: Any) -> None:
        number, self._number = self._number, None
        if number is not None:
            _write(number, self.path)


def _write(number: int, path: Path) -> None:
    """Ends a timeline and writes it: under another name first, so that there is no half file."""
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.absolute().parent) as folder:
        plain = whole = os.path.join(folder, "plain")
        if _activate.core().trace_stop(number, plain, _rank()) is None:
            return  # the device was never used
        if path.name.endswith(".gz"):
            whole = os.path.join(folder, "compressed")
            with open(plain, "rb") as source, gzip.open(whole, "wb", compresslevel=4) as target:
                shutil.copyfileobj(source, target)
        os.replace(whole, path)


def _rank() -> int | None:
    """Which of the processes of `torch.distributed` this is, if it is one."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is not None and c10d.is_initialized():
        return c10d.get_rank()
    return _env.rank()


def _write_at_exit() -> None:
    """Will write the timeline that OXITORCH_TRACE asks for, if it does."""
    if _activate.why_unavailable() is None and _env.TRACE.read() is not None:
        atexit.register(_write_process)  # before the device is shut down: exit functions run in reverse


def _write_process() -> None:
    if not _core.is_started() or _core.is_in_bad_fork():
        return
    path = str(_env.TRACE.read()).replace("%p", str(os.getpid())).replace("%r", str(_rank() or 0))
    path = Path(os.path.expanduser(path))
    path.absolute().parent.mkdir(parents=True, exist_ok=True)
    _write(0, path)
