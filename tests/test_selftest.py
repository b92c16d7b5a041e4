"""`oxitorch selftest` on the cpu platform, and where there is no device."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = Path(sys.executable).parent / "oxitorch"


def selftest(tmp_path, env, *args):
    report = tmp_path / "report.json"
    done = subprocess.run(
        [COMMAND, "selftest", "--json", report, *args], capture_output=True, text=True, env=env, timeout=400
    )
    assert report.exists(), done.stderr
    return done, json.loads(report.read_text())


def test_all_is_well_on_the_cpu_platform(tmp_path, environment):
    done, report = selftest(tmp_path, environment(OXITORCH_PLATFORM="cpu"), "--quick")
    assert done.returncode == 0, done.stdout
    assert report["device"]["platform"] == "cpu" and report["environment"]["OXITORCH_PLATFORM"] == "cpu"
    assert len(report["checks"]) == 16 and {c["status"] for c in report["checks"]} == {"pass"}
    assert all(f"✓ {c['name']}" in done.stdout for c in report["checks"])
    measured = {c["name"]: c["measured"] for c in report["checks"]}
    assert measured["products"]["float32_flops_per_s"] > 1e9
    assert measured["cache"]["compiles"] > 0


def test_a_device_that_does_not_start_is_said_once(tmp_path, environment):
    done, report = selftest(tmp_path, environment(OXITORCH_PLATFORM="cuda"), "--quick")
    assert done.returncode == 1
    status = {c["name"]: c["status"] for c in report["checks"]}
    assert status["devices"] == "fail" and status["cache"] == "fail"
    assert status["training"] == status["launches"] == "skip"
    assert "cuda" in next(c["found"] for c in report["checks"] if c["name"] == "devices")


COUNTS = """
import sys
import torch
from oxitorch.selftest import memory

real, calls = torch.tpu.memory_stats, []


def stats():
    calls.append(1)
    return real() | {"plugin_bytes.current": int(sys.argv[1]) * memory.MIB if len(calls) == 2 else 0}


torch.tpu.memory_stats = stats
torch.ones(1, device="tpu").cpu()
try:
    print(memory.accounts().text)
except AssertionError as e:
    print(e)
"""


@pytest.mark.parametrize(
    "counted, said", [("64", "64.0 (the plugin)"), ("0", "the plugin: a tensor of 67108864 bytes is counted as 0")]
)
def test_what_the_plugin_counts_is_compared(python, counted, said):
    """The plugin of the CPU counts nothing; here one is made up."""
    assert said in python(COUNTS, counted).stdout
