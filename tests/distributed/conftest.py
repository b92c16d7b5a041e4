"""Runs a script in several processes: under torchrun, or as torchrun would start them."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

import pytest

from tests.conftest import child_environment


@dataclass
class Ran:
    """What came of a script in several processes."""

    status: int
    output: str
    seconds: float

    def results(self) -> list:
        """What the ranks printed as JSON after `RESULT `, sorted."""
        found = [json.loads(line[7:]) for line in self.output.splitlines() if line.startswith("RESULT ")]
        return sorted(found, key=str)


@pytest.fixture
def torchrun(tmp_path):
    """`torchrun(code, *arguments, ranks=2)`: torchrun's own launcher on this machine; nothing is left behind.

    `launcher` are other arguments of Python before the script, and `meanwhile(process)` is called while it runs.
    """

    def run(code: str, *arguments: str, ranks: int = 2, check: bool = True, timeout: float = 240, launcher=None,
            meanwhile=None, **env: str | None) -> Ran:  # fmt: skip
        script = tmp_path / "script.py"
        script.write_text(code)
        default = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command = [sys.executable, *(default if launcher is None else launcher), str(script), *arguments]
        begin = time.monotonic()
        # A group of its own, of which nobody may be left.
        process = subprocess.Popen(
            command,
            env=child_environment(**{"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **env}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            cwd=tmp_path,
        )
        try:
            if meanwhile is not None:
                meanwhile(process)
            output, _ = process.communicate(timeout=timeout)
            seconds = time.monotonic() - begin
        finally:
            left = _end_group(process.pid)
        if check:
            assert process.returncode == 0, output
        assert not left, f"processes are left\n{output}"
        return Ran(process.returncode, output, seconds)

    return run


# What torchrun tells its processes, without importing PyTorch in each of them, which is most of what a launch takes.
RANKS = """
import ctypes, os, signal, socket, sys, types
import torch

script, count = sys.argv[1], int(sys.argv[2])
with socket.socket() as free:
    free.bind(("localhost", 0))
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(free.getsockname()[1]))
os.environ.update(WORLD_SIZE=str(count), LOCAL_WORLD_SIZE=str(count))
left = set()
for rank in range(count):
    pid = os.fork()
    if pid == 0:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: none outlives this launcher
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        del os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"]
        sys.argv = [script, *sys.argv[3:]]
        sys.path[0] = os.path.dirname(script)
        os.chdir(sys.path[0])
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        main.__file__ = script
        torch._import_device_backends()
        with open(script) as file:
            code = compile(file.read(), script, "exec")
        exec(code, main.__dict__)
        sys.exit()
    left.add(pid)
failed = 0
while left:
    pid, status = os.wait()
    left.discard(pid)
    if status:
        failed = 1
        for other in left:
            os.kill(other, signal.SIGTERM)
sys.exit(failed)
"""


@pytest.fixture
def start_ranks(tmp_path, forked):
    """`start_ranks(code, *arguments, ranks=2)`: what `torchrun` does, sooner, for scripts that end well."""

    def run(code: str, *arguments: str, ranks: int = 2, timeout: float = 240, **env: str | None) -> Ran:
        script = tmp_path / "script.py"
        script.write_text(code)
        env = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", **env}
        begin = time.monotonic()
        done = forked.run(RANKS, str(script), str(ranks), *arguments, env=child_environment(**env), timeout=timeout)
        ran = Ran(done.returncode, done.stdout + done.stderr, time.monotonic() - begin)
        assert ran.status == 0, ran.output
        return ran

    return run


def _end_group(group: int, patience: float = 5) -> bool:
    """Whether processes of the group were left, which are ended."""
    until = time.monotonic() + patience
    while time.monotonic() < until:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.05)
    os.killpg(group, signal.SIGKILL)
    return True
