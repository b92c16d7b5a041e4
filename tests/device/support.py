"""Comparing the device with PyTorch on the CPU."""

import torch
from torch import nn

DEVICE = "tpu"

# What `torch.testing` allows CUDA against the CPU; integers and bool are exact.
TOLERANCE = {
    torch.float64: (1e-7, 1e-7),
    torch.float32: (1.3e-6, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-5),
    torch.float16: (1e-3, 1e-5),
    torch.complex64: (1.3e-6, 1e-5),
    torch.complex128: (1e-7, 1e-7),
}


def to_device(value):
    """The same value on the device: tensors with their strides and `requires_grad`, containers item by item."""
    if isinstance(value, torch.Tensor):
        moved = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=DEVICE)
        if any(s == 0 and n > 1 for n, s in zip(value.shape, value.stride(), strict=True)):
            moved = value.detach().to(DEVICE)
        else:
            moved.copy_(value.detach())
        return moved.requires_grad_(value.requires_grad)
    if isinstance(value, list | tuple):
        return type(value)(to_device(v) for v in value)
    if isinstance(value, dict):
        return {k: to_device(v) for k, v in value.items()}
    if isinstance(value, torch.device):
        return torch.device(DEVICE)
    return value


class NewGraphs:
    """The graphs that come from now on."""

    def __init__(self):
        torch.tpu.synchronize()
        self.last = (torch.tpu.graphs() or [None])[-1]

    def take(self):
        """Those that came since the last call."""
        torch.tpu.synchronize()
        graphs = torch.tpu.graphs(after=self.last)
        self.last = (graphs or [self.last])[-1]
        return graphs


class LaunchedGraphs:
    """The graphs that run from now on, whether they are new or not."""

    def __init__(self):
        torch.tpu.synchronize()
        self.launches = {g.number: g.launches for g in torch.tpu.graphs()}

    def take(self):
        torch.tpu.synchronize()
        return [g for g in torch.tpu.graphs() if g.launches > self.launches.get(g.number, 0)]


def tensors(value):
    """All tensors in nested containers, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [t for v in value for t in tensors(v)]
    if isinstance(value, dict):
        return [t for v in value.values() for t in tensors(v)]
    return []


def bits(tensor):
    """The elements as bytes, in logical order: NaN payloads and the sign of zero count."""
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype)
    flat.view(tensor.shape).copy_(tensor)
    return flat.view(torch.uint8)


def assert_same_form(actual, expected, what="", *, strides=True):
    """`actual` is on the device and has dtype, sizes and strides of `expected` on the CPU."""
    assert actual.device.type == DEVICE, f"{what}: result is on {actual.device}"
    assert actual.dtype == expected.dtype, f"{what}: dtype {actual.dtype}, on the CPU {expected.dtype}"
    assert actual.shape == expected.shape, f"{what}: {tuple(actual.shape)}, on the CPU {tuple(expected.shape)}"
    if strides:
        assert actual.stride() == expected.stride(), (
            f"{what}: strides {actual.stride()}, on the CPU {expected.stride()} of {tuple(expected.shape)}"
        )


def assert_same(actual, expected, what="", *, strides=True, rtol=None, atol=None):
    """`actual` is on the device and equals `expected` on the CPU: dtype, sizes, strides, values."""
    assert_same_form(actual, expected, what, strides=strides)
    if rtol is None:
        rtol, atol = TOLERANCE.get(expected.dtype, (0, 0))
    torch.testing.assert_close(
        actual.detach().cpu(),
        expected.detach(),
        rtol=rtol,
        atol=atol,
        equal_nan=True,
        check_stride=False,
        msg=lambda text: f"{what}: {text}",
    )


def assert_close(actual, expected, what=""):
    """`actual`, wherever it is, has about the values of `expected` on the CPU, in any strides."""
    if actual.device.type == "cpu":
        actual = to_device(actual)
    assert_same(actual, expected, what, strides=False, rtol=1e-4, atol=1e-5)


def model():
    """A small module with parameters and buffers, each time the same."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


def outcome(f, *args, **kwargs):
    """The result, or the exception, of a call."""
    try:
        return f(*args, **kwargs)
    except Exception as e:
        return e
