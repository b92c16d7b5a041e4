"""Bytes to the device and back."""

import torch

from oxitorch.selftest import Found, check

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


def _random(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    if dtype == torch.bool:
        return torch.rand(shape) < 0.5
    if dtype.is_complex:
        return torch.randn(shape, dtype=dtype)
    return (torch.randn(shape) * 20).to(dtype)


def _bytes(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().reshape(-1).view(torch.uint8)


LAYOUTS = {
    "whole": lambda t: t,
    "transposed": lambda t: t.transpose(0, 2),
    "every second": lambda t: t[:, ::2],
    "part": lambda t: t[1:, 2:5],
    "expanded": lambda t: t[:1].expand(3, -1, -1),
    "one number": lambda t: t[0, 0, 0],
    "nothing": lambda t: t[:0],
    "channels last": lambda t: t.unsqueeze(0).contiguous(memory_format=torch.channels_last),
}


@check("transfers", limit_s=240)
def transfers() -> Found:
    """Each dtype in each layout comes back bit for bit, also where the view is taken on the device."""
    for dtype in DTYPES:
        x = _random(dtype, 3, 6, 4)
        whole = x.to("tpu")
        for name, view in LAYOUTS.items():
            want = view(x)
            for how, there in (("sent", want.to("tpu")), ("viewed there", view(whole))):
                got = there.cpu()
                assert got.dtype == dtype and got.shape == want.shape, f"{name} of {dtype}, {how}: {got.shape}"
                assert torch.equal(_bytes(got), _bytes(want)), f"{name} of {dtype}, {how}: other bytes"
    return Found(f"{len(DTYPES)} dtypes in {len(LAYOUTS)} layouts", {"dtypes": len(DTYPES)})


@check("asynchronous copies")
def asynchronous_copies() -> Found:
    """Copies that do not wait, from memory that is pinned and that is not."""
    for pinned in (False, True):
        source = torch.arange(1 << 16)
        source = source.pin_memory() if pinned else source
        there = source.to("tpu", non_blocking=True)
        back = (there * 2).to("cpu", non_blocking=True)
        torch.tpu.synchronize()
        assert torch.equal(back, torch.arange(1 << 16) * 2), f"pinned: {pinned}"
    return Found("to the device and back, pinned and not")
