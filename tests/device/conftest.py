"""Settings of the device tests: every test starts in strict mode, with the same seed, and with switches as at start."""

import pytest
import torch


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
