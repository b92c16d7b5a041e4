"""Streams and events: `torch.Stream` and `torch.Event` with the device filled in."""

from typing import Any

import torch

from . import _device

__all__ = ["Event", "Stream", "StreamContext", "current_stream", "default_stream", "set_stream", "stream"]


class Stream(torch.Stream):
    """A queue of work of one device.

    Args:
        device: where (default: the current device).
        priority: lower is more urgent; a hint that a platform may ignore.
    """

    def __new__(cls, device: Any = None, priority: int = 0, **kwargs):
        if "stream_id" in kwargs:
            kwargs.setdefault("device_type", int(torch._C._autograd.DeviceType.PrivateUse1.value))
            return super().__new__(cls, **kwargs)
        return super().__new__(
            cls, torch.device("tpu", _device._get_device_index(device, optional=True)), priority=priority
        )

    def record_event(self, event=None):
        """Records `event` (a new one if None) behind the work queued so far and returns it."""
        if event is None:
            event = Event()
        event.record(self)
        return event

    def __repr__(self) -> str:
        return f"torch.tpu.Stream(device={self.device}, stream_id={self.stream_id})"


class _EventType(type):
    def __instancecheck__(cls, instance) -> bool:
        return isinstance(instance, torch.Event) and instance.device.type == "tpu"


class Event(metaclass=_EventType):
    """A point in a stream that can be waited for and timed: a `torch.Event` of this device.

    Not a subclass, because PyTorch's `elapsed_time` takes nothing but plain `torch.Event`s; `isinstance` works.

    Args:
        enable_timing: measure when the device reaches the event (`elapsed_time` needs it on both events).
        blocking: accepted for compatibility with CUDA.
        interprocess: not supported; RuntimeError.
        device: where (default: the current device).
    """

    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, device: Any = None
    ) -> torch.Event:
        if interprocess:
            raise RuntimeError("torch.tpu.Event: interprocess events are not supported")
        index = _device._get_device_index(device, optional=True)
        return torch.Event(torch.device("tpu", index), enable_timing=enable_timing, blocking=blocking)


class StreamContext:
    """Makes a stream, and its device, current inside a `with` block; `None` does nothing."""

    def __init__(self, stream):
        self.stream = stream
        self._previous = None
        self._device = None

    def __enter__(self):
        if self.stream is None:
            return None
        self._device = _device._exchange_device(self.stream.device_index)
        self._previous = current_stream(self.stream.device)
        set_stream(self.stream)
        return self.stream

    def __exit__(self, *exc):
        if self.stream is not None:
            set_stream(self._previous)
            _device._maybe_exchange_device(self._device)
        return False


def stream(stream) -> StreamContext:
    """`with torch.tpu.stream(s):` runs what is inside on `s`."""
    return StreamContext(stream)


def set_stream(stream) -> None:
    """Makes `stream` the current one of its device; `None` does nothing."""
    if stream is not None:
        torch._C._accelerator_setStream(stream)


def current_stream(device: Any = None) -> Stream:
    """The stream of `device` (default: the current device) that work goes to."""
    s = torch._C._accelerator_getStream(_device._get_device_index(device, optional=True))
    return Stream(stream_id=s.stream_id, device_index=s.device_index)


def default_stream(device: Any = None) -> Stream:
    """The stream that a device starts with."""
    return Stream(stream_id=0, device_index=_device._get_device_index(device, optional=True))
