"""Runs a script under torchrun."""

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
