"""Runs functions in several processes, as torchrun would start them, and says what came of each.

Each process runs the cases of a module, or of the modules of a package, one after another and writes what each raised.
A rank that fails a case goes on with the next one after a barrier of the host.
"""

import fcntl
import hashlib
import importlib
import json
import os
import pkgutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from importlib import metadata
from pathlib import Path

import pytest

# The oldest that is supported can less: docs/distributed.md says what.
IS_TORCH_2_11 = metadata.version("torch").startswith("2.11")
# By the module or package here that has them.
CASES: dict[str, dict[str, Callable[[], None]]] = {}
ONLY_WITH: dict[Callable[[], None], tuple[int, ...]] = {}


def case(f: Callable[[], None] | None = None, *, ranks: tuple[int, ...] | None = None) -> Callable:
    """A function that all ranks run, of so many if it says how many; it fails if it raises in one."""
    if f is None:
        return lambda f: case(f, ranks=ranks)
    CASES.setdefault(f.__module__.split(".")[2], {})[f.__name__] = f
    if ranks is not None:
        ONLY_WITH[f] = ranks
    return f


def names(module: str, ranks: int, starting: str | tuple[str, ...] = "") -> list[str]:
    """The cases of a module or package of this package that so many ranks run and whose names start so."""
    name = f"tests.distributed.{module}"
    for part in pkgutil.iter_modules(getattr(importlib.import_module(name), "__path__", [])):
        importlib.import_module(f"{name}.{part.name}")
    return [n for n, f in CASES[module].items() if ranks in ONLY_WITH.get(f, (ranks,)) and n.startswith(starting)]


def parameters(module: str, sizes: tuple[int, ...] = (2, 4, 8), starting: str | tuple[str, ...] = "") -> list:
    """The cases with so many ranks, for pytest; those of more than 2 are slow."""
    marks = {n: (pytest.mark.slow,) if n > 2 else () for n in sizes}
    return [pytest.param(n, name, marks=marks[n]) for n in sizes for name in names(module, n, starting)]


class Outcomes:
    """What came of the cases of a module in some processes, which run when the first is asked for.

    Of pytest's workers, which share the tests of a file, the first that asks runs them all, and others wait for it.
    """

    def __init__(self, environ: Callable[[], dict[str, str]] = dict, starting: str | tuple[str, ...] = ""):
        self._environ = environ
        self._starting = starting
        self._known: dict[tuple[str, int], dict[str, str]] = {}

    def check(self, module: str, ranks: int, name: str) -> None:
        """Raises what a rank raised."""
        key = (module, ranks)
        if key not in self._known:
            self._known[key] = self._outcomes(module, ranks)
        found = self._known[key].get(name, "it was not run: an earlier case ended a process\n" + self._known[key][""])
        assert not found, found

    def _outcomes(self, module: str, ranks: int) -> dict[str, str]:
        environ, only = self._environ(), names(module, ranks, self._starting)
        testrun = os.environ.get("PYTEST_XDIST_TESTRUNUID")
        if testrun is None:
            return run(module, ranks, only, environ=environ)
        which = hashlib.sha256(repr((module, only, sorted(environ.items()))).encode()).hexdigest()[:16]
        folder = Path(os.environ["OXITORCH_CACHE_DIR"]).with_name("outcomes") / testrun
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / f"{which}.{ranks}", "a+") as known:
            fcntl.flock(known, fcntl.LOCK_EX)
            known.seek(0)
            if text := known.read():
                return json.loads(text)
            outcomes = run(module, ranks, only, environ=environ)
            known.write(json.dumps(outcomes))
            return outcomes


def run(
    module: str, ranks: int, only: list[str] | None = None, timeout: float = 600, environ: dict[str, str] | None = None
) -> dict[str, str]:
    """Runs the cases of a module in so many processes: what went wrong in each, and under "" what they printed."""
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
        env |= environ or {}
        start = "import sys; from tests.distributed import ranks; ranks.main(sys.argv[1], sys.argv[2], sys.argv[3:])"
        command = [sys.executable, "-c", start, module, folder, *(only or [])]
        processes, logs = [], []
        for rank in range(ranks):
            logs.append(open(f"{folder}/log.{rank}", "w+"))  # noqa: SIM115
            each = env | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            processes.append(subprocess.Popen(command, env=each, stdout=logs[-1], stderr=logs[-1]))
        printed = ""
        for rank, process in enumerate(processes):
            try:
                process.wait(timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            logs[rank].seek(0)
            printed += f"--- rank {rank} ended with {process.returncode}\n{logs[rank].read()[-6000:]}"
            logs[rank].close()
        outcomes: dict[str, str] = {}
        for name in only or names(module, ranks):
            files = [Path(folder, f"{name}.{rank}") for rank in range(ranks)]
            if all(f.exists() for f in files):
                outcomes[name] = "\n".join(filter(None, (f.read_text() for f in files)))
        outcomes[""] = printed
        return outcomes


def main(module: str, folder: str, only: list[str]) -> None:
    """One of the processes."""
    import torch.distributed as dist

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group("cpu:gloo,tpu:tpu", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=180))
    host = dist.new_group(backend="gloo")
    every = names(module, size)
    for name in only or every:
        try:
            CASES[module][name]()
            text = ""
        except (Exception, pytest.fail.Exception):
            text = f"rank {rank}: {traceback.format_exc()}"
        Path(folder, f"{name}.{rank}").write_text(text)
        dist.barrier(host)
    dist.destroy_process_group()
