"""Settings of the device tests: every test starts in the mode of `--mode`, with one seed and switches as at start.

Fixtures import PyTorch, and not the module: xdist's first process, which runs no tests, starts the others after this.
"""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tomllib

HERE = Path(__file__).parent
# Whether torch's kernels are called must not depend on the processor that runs the tests; see `test_library.py`.
os.environ.setdefault("OXITORCH_LIBRARY", "1")
FAILED = pytest.StashKey[bool]()


# A test with one of these sets its mode itself, or is about other processes.
SAME_IN_ANY_MODE = {"fused", "mode", "python", "start_python", "repo"}
# Children are not told for which platform to lower.
SAME_FOR_ANY_PLATFORM = {"python", "start_python"}


def pytest_collection_modifyitems(config, items):
    """Marks what `expected_failures.toml` names: it must fail, and a name must be a test's. In strict mode, leaves out
    what does not depend on the mode, and where another platform is lowered for, what does not depend on that.
    """
    groups = tomllib.loads((HERE / "expected_failures.toml").read_text()).get("expected", [])
    marks = {
        name: pytest.mark.xfail(reason=group["reason"], strict=True) for group in groups for name in group["tests"]
    }
    seen = set()
    for item in items:
        if item.path.parent == HERE:
            case = f"{item.path.name}::{item.name}"
            seen |= {case, case.partition("[")[0]}
            for name in {case, case.partition("[")[0]} & marks.keys():
                item.add_marker(marks[name])
    alike = SAME_IN_ANY_MODE if config.getoption("--mode") == "strict" else set()
    alike = alike | (SAME_FOR_ANY_PLATFORM if "OXITORCH_LOWER_FOR" in os.environ else set())
    same = {item for item in items if alike & {*item.fixturenames}}
    config.hook.pytest_deselected(items=[*same])
    items[:] = [item for item in items if item not in same]
    if config.option.keyword or any("::" in arg for arg in config.args):
        return
    files = {name.partition("::")[0] for name in seen}
    if stale := [name for name in marks if name not in seen and name.partition("::")[0] in files]:
        raise pytest.UsageError(f"expected_failures.toml names tests that do not exist: {', '.join(stale)}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.when == "call":
        item.stash[FAILED] = call.excinfo is not None
    return report


@pytest.fixture(autouse=True)
def clean_device(request):
    import torch

    torch.manual_seed(20)
    torch.tpu.set_device(0)
    with torch.tpu.set_eager_mode(request.config.getoption("--mode")), torch.tpu.set_nan_trap(False):
        yield
        # A failure that belongs to this test must not surface in the next one; where the test failed, once is enough.
        with contextlib.suppress(RuntimeError) if request.node.stash.get(FAILED, False) else contextlib.nullcontext():
            torch.tpu.synchronize()


@pytest.fixture(scope="session")
def start_python(environment):
    """As `python`, for fixtures of wider scope; a process that does not end in time has the return code None."""

    def run(code: str, *args: str, timeout: float, **env: str):
        with subprocess.Popen(
            [sys.executable, "-c", code, *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(**env),
            cwd="/",
        ) as child:
            try:
                out, err = child.communicate(timeout=timeout)
                code = child.returncode
            except subprocess.TimeoutExpired:
                child.kill()
                out, err = child.communicate()
                code = None
        return subprocess.CompletedProcess(child.args, code, out, err)

    return run


@pytest.fixture(params=["cpu", "tpu"])
def device(request):
    """Such a test states what is right, and holds on the CPU too: the statement itself is tested."""
    return request.param


@pytest.fixture(params=["fused", "strict", "debug"])
def mode(request):
    """Runs the test once in each eager mode."""
    import torch

    with torch.tpu.set_eager_mode(request.param):
        yield request.param


@pytest.fixture
def fused():
    """Fused mode whatever the run's is, with nothing recorded and nothing counted."""
    import torch

    with torch.tpu.set_eager_mode("fused"):
        torch.tpu.synchronize()
        torch.tpu.reset_metrics()
        yield


@pytest.fixture
def no_fallback():
    """Nothing may run on the CPU: what would raises where it is called."""
    import torch

    torch.tpu.reset_metrics()
    with torch.tpu.set_fallback("error"):
        yield
    assert torch.tpu.metrics()["fallbacks"] == {}


@pytest.fixture
def no_background_compile():
    """Results are the same bits each time: no quick version of a program runs first."""
    import torch

    with torch.tpu.set_background_compile(False):
        yield
