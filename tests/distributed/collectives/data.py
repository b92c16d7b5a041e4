"""What ranks know of each other's data, and the comparison with the host."""

import torch
import torch.distributed as dist

DEVICES = ("cpu", "tpu")
SUMMED = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64,
]  # fmt: skip
FLOAT8 = [
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
]  # fmt: skip
UNSIGNED = [torch.uint16, torch.uint32, torch.uint64]
MOVED = [
    *SUMMED, torch.bool, torch.int16, *UNSIGNED, torch.complex32, torch.complex64, torch.complex128, *FLOAT8,
]  # fmt: skip


def rank() -> int:
    return dist.get_rank()


def size() -> int:
    return dist.get_world_size()


def data(*shape, dtype=torch.float32, device="cpu", seed=0, of=None):
    """The tensor of a rank: this one, unless another is named."""
    generator = torch.Generator().manual_seed(100 * seed + (rank() if of is None else of))
    x = torch.randint(0, 4, shape, generator=generator)
    if dtype == torch.float8_e8m0fnu:
        x += 1  # it has no zero
    return (x % 2 == 0 if dtype == torch.bool else x.to(dtype)).to(device)


def bits(t):
    """What can be compared: of dtypes that PyTorch hardly computes with, their bytes."""
    t = t.detach().cpu().contiguous()
    return t.view(torch.uint8) if t.dtype in (*FLOAT8, torch.complex32) else t


def same(got, wanted):
    torch.testing.assert_close(bits(got), bits(wanted), rtol=0, atol=0)


def as_on_cpu(f):
    """What `f(device)` gives on the device is what it gives on the CPU."""
    wanted, got = f("cpu"), f("tpu")
    assert len(wanted) == len(got)
    for g, w in zip(got, wanted, strict=True):
        assert g.device.type == "tpu"
        same(g, w)


# A little data goes with the words by which ranks know that they do the same.
LITTLE, MORE = 3, 75


def mean(total):
    if not total.is_floating_point() and not total.is_complex():
        return total.div(size(), rounding_mode="trunc")
    # PyTorch's division of complex numbers rounds more than once, also where the divisor is real.
    return torch.view_as_complex(torch.view_as_real(total) / size()) if total.is_complex() else total / size()


def rounds() -> int:
    """The messages of a rank by which all know what all are about."""
    return (size() - 1).bit_length()
