"""`torch.accelerator`, streams and events."""

import pytest
import torch
from support import DEVICE


def test_accelerator():
    assert torch.accelerator.current_accelerator().type == DEVICE and torch.accelerator.is_available()
    assert torch.accelerator.device_count() == torch.tpu.device_count() >= 1
    assert torch.get_device_module() is torch.tpu and torch.get_device_module(DEVICE) is torch.tpu
    x = torch.ones(3, device=torch.accelerator.current_accelerator())
    torch.accelerator.synchronize()
    stream = torch.accelerator.current_stream()
    assert stream.device.type == DEVICE
    torch.accelerator.set_stream(stream)
    assert torch.accelerator.memory_allocated() >= x.nbytes
    torch.accelerator.empty_cache()
    with torch.accelerator.device_index(0):
        assert torch.accelerator.current_device_index() == 0


def test_streams_and_events():
    s = torch.Stream(DEVICE)
    e, f = torch.Event(DEVICE, enable_timing=True), torch.Event(DEVICE, enable_timing=True)
    x = torch.ones(256, 256, device=DEVICE)
    e.record()
    with s:
        y = x @ x
    s.wait_stream(torch.tpu.current_stream())
    f.record(s)
    f.synchronize()
    assert e.query() and f.query() and s.query() and e.elapsed_time(f) > 0
    assert y[0, 0].item() == 256
    s.record_event(e)
    s.wait_event(e)
    s.synchronize()
    x.record_stream(s)
    with pytest.raises((RuntimeError, ValueError), match="recorded"):
        torch.Event(DEVICE, enable_timing=True).elapsed_time(f)


def test_events_wait_for_the_device():
    x = torch.randn(1024, 1024, device=DEVICE, dtype=torch.float64)
    (x @ x).sum().item()
    torch.tpu.synchronize()
    e = torch.Event(DEVICE)
    for _ in range(3):
        y = x @ x
    e.record()
    early = e.query()  # the host is far ahead
    e.synchronize()
    assert not early and e.query()
    assert y.isfinite().all()
