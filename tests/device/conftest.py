"""Settings of the device tests: every test starts in strict mode, with the same seed, and with switches as at start."""

from pathlib import Path

import pytest
import tomllib
import torch

HERE = Path(__file__).parent


def pytest_collection_modifyitems(config, items):
    """Marks what `expected_failures.toml` names: it must fail, and an entry must name something."""
    entries = tomllib.loads((HERE / "expected_failures.toml").read_text())
    ours = [item for item in items if item.path.parent == HERE]
    unmatched = dict(entries)
    for item in ours:
        name = f"{item.path.name}::{item.name}"
        for key in (name, name.partition("[")[0]):
            if key in entries:
                unmatched.pop(key, None)
                item.add_marker(pytest.mark.xfail(reason=entries[key], strict=True))
    if config.option.keyword or any("::" in arg for arg in config.args):
        return
    files = {item.path.name for item in ours}
    if stale := [key for key in unmatched if key.partition("::")[0] in files]:
        raise pytest.UsageError(f"expected_failures.toml names tests that do not exist: {', '.join(stale)}")


@pytest.fixture(autouse=True)
def clean_device():
    torch.manual_seed(20)
    torch.tpu.set_device(0)
    with torch.tpu.set_eager_mode("strict"), torch.tpu.set_nan_trap(False):
        yield
        # A failure that belongs to this test must not surface in the next one.
        torch.tpu.synchronize()


@pytest.fixture(params=["strict", "debug"])
def mode(request):
    """Runs the test once in each eager mode."""
    with torch.tpu.set_eager_mode(request.param):
        yield request.param


@pytest.fixture
def no_fallback():
    """Fails a test that ran an op on the CPU."""
    torch.tpu.reset_metrics()
    yield
    assert torch.tpu.metrics()["fallbacks"] == {}
