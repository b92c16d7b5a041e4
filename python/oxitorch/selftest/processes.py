"""Processes that use the device after each other and at the same time. First, as a TPU is one process's alone."""

import json
import os
import re
import subprocess
import sys
import tempfile

import torch

from oxitorch import _shim
from oxitorch._env import CACHE_SHARED
from oxitorch.selftest import Found, Skip, check

_PROGRAM = """
import json, sys, time, torch
x = torch.arange(64 * 64, dtype=torch.float32).reshape(64, 64).to("tpu") / 4096
y = x
for _ in range(4):
    y = torch.tanh(y @ x)
print(json.dumps({"sum": y.sum().item(), "compiles": torch.tpu.metrics()["compiles"]}))
"""


# A device that is there starts in less.
_PATIENCE_S = 75


def _start(**env: str) -> subprocess.Popen:
    shim = _shim.state(_shim.find_torch())["path"]
    # Programs that others have compiled would be found there.
    inherited = {name: value for name, value in os.environ.items() if name != CACHE_SHARED.name}
    return subprocess.Popen(
        [sys.executable, "-c", _PROGRAM],
        env={"OXITORCH_START_TIMEOUT": str(_PATIENCE_S - 15), **inherited, "OXITORCH_SHIM": str(shim), **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _communicate(process: subprocess.Popen) -> tuple[int, str, str]:
    """Its status, what it wrote, and the error that it ended with."""
    try:
        out, err = process.communicate(timeout=_PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        err += f"\nTimeoutError: did not end within {_PATIENCE_S} s"
    lines = err.strip().splitlines()
    errors = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Interrupt)\b", line)]
    return process.returncode, out, (errors or lines or ["no message"])[-1]


def _end(process: subprocess.Popen) -> dict:
    status, out, last = _communicate(process)
    assert status == 0, f"a process ended with {status}: {last}"
    return json.loads(out.splitlines()[-1])


@check("cache", limit_s=180)
def cache() -> Found:
    """A second process finds the programs of the first."""
    with tempfile.TemporaryDirectory(prefix="oxitorch-selftest-") as folder:
        os.chmod(folder, 0o700)
        first, second = (_end(_start(OXITORCH_CACHE_DIR=folder, OXITORCH_CACHE="on")) for _ in range(2))
    assert first["compiles"] > 0, "the first process compiled nothing"
    assert second["compiles"] == 0, f"the second process compiled {second['compiles']} programs again"
    assert first["sum"] == second["sum"], f"{first['sum']} and then {second['sum']}"
    return Found(f"{first['compiles']} compiled by one process, none by the next", {"compiles": first["compiles"]})


@check("two processes", limit_s=180)
def two_processes() -> Found:
    """Both work, or one says why it cannot: a TPU belongs to one process."""
    both = [_start(OXITORCH_CUDA_PREALLOCATE="0", OXITORCH_CUDA_MEMORY_FRACTION="0.3") for _ in range(2)]
    results = [_communicate(process) for process in both]
    worked = [json.loads(out.splitlines()[-1])["sum"] for status, out, _ in results if status == 0]
    failed = [(status, text) for status, _, text in results if status != 0]
    assert worked, f"neither worked: {failed[0][1]}"
    for status, text in failed:
        assert status > 0, f"one ended with signal {-status}: {text}"
        assert "Error" in text, f"one ended with {status} and said: {text}"
    if failed:
        return Found(f"one has the device, the other says: {failed[0][1][:100]}", {"at_once": 1})
    assert worked[0] == worked[1], f"they computed {worked[0]} and {worked[1]}"
    return Found("both compute the same at the same time", {"at_once": 2})


@check("devices")
def devices() -> Found:
    """The device starts in this process."""
    if not torch.tpu.is_available():
        torch.zeros(1, device="tpu")  # raises the reason
        raise Skip("no device")
    count = torch.tpu.device_count()
    for i in range(count):
        assert (torch.ones(3, device=f"tpu:{i}") + i).tolist() == [1.0 + i] * 3, f"tpu:{i} adds wrongly"
    return Found(f"{count} of {torch.tpu.get_device_name()} ({torch.tpu.platform()})", {"count": count})
