"""A value does not depend on whether a compiler can compute it: constants that are made on the device fold to what the
device computes, and no constant makes the compiler trap."""

import pytest
import torch
import torch.nn.functional as F
from support import DEVICE, assert_same

FOLDS = """
import sys, torch

D = "tpu"
INTS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
FLOATS = [torch.bfloat16, torch.float32]
torch.tpu.set_background_compile(sys.argv[1] == "quick")


def constants(dtype):
    # No Python number: those are operands.
    zero, one = torch.zeros(3, dtype=dtype, device=D), torch.ones(3, dtype=dtype, device=D)
    if dtype.is_floating_point:
        nothing = torch.zeros(3, 0, dtype=dtype, device=D)
        return [zero, -zero, one, (one + one + one) / (one + one), one / zero, -one / zero, zero / zero, nothing.mean(1)]
    bits = torch.ones(torch.iinfo(dtype).bits - 1, dtype=dtype, device=D).sum(dtype=dtype)
    return [zero, one, ~zero, one << bits, ~(one << bits), one + one + one, zero + bits]


PAIRS = {
    "floor_divide": torch.floor_divide,
    "trunc": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "divide": torch.true_divide,
    "remainder": torch.remainder,
    "fmod": torch.fmod,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "clamp": lambda x, y: torch.clamp(x, y, y),
    "fmax": torch.fmax,
    "where": lambda x, y: torch.where(x < y, x, y),
    "pow": torch.pow,
}
OF_INTS = {
    "lshift": lambda x, y: x << y,
    "rshift": lambda x, y: x >> y,
    "gcd": torch.gcd,
    "lcm": torch.lcm,
    "pow 100": lambda x, y: x ** (y * 0 + 100),
    "by a difference": lambda x, y: x // (y - y),
    "remainder by a product": lambda x, y: x % (y * torch.zeros_like(y)),
}
OF_FLOATS = {
    "relu": lambda x, y: x.relu(),
    "relu6": lambda x, y: torch.nn.functional.relu6(x),
    "hardsigmoid": lambda x, y: torch.nn.functional.hardsigmoid(x),
    "hypot": torch.hypot,
    "sign": lambda x, y: x.sign(),
    "amax": lambda x, y: torch.stack([x, y]).amax(0),
    "int": lambda x, y: x.int(),
    "bool": lambda x, y: x.bool(),
    "relu of a mean": lambda x, y: x[:0].mean().relu(),
    "relu of var": lambda x, y: x[:0].var().relu(),
    "relu of std": lambda x, y: x[:1].std().relu(),
}


def results(xs, dtype):
    # Each op once on all pairs; and tensors that are one number, with zeros, as some folders look at those alone.
    n = len(xs)
    x, y = torch.cat([x for x in xs for _ in range(n)]), torch.cat(xs * n)
    ops = PAIRS | (OF_FLOATS if dtype.is_floating_point else OF_INTS)
    values = {name: f(x, y) for name, f in ops.items()}
    values |= {(name, i): PAIRS[name](x, xs[0]) for name in list(PAIRS)[:8] for i, x in enumerate(xs)}
    return {name: value.cpu() for name, value in values.items()}


compared = 0
for dtype in INTS + FLOATS:
    torch.tpu.synchronize()
    folded = results(constants(dtype), dtype)
    computed = results([x.cpu().to(D) for x in constants(dtype)], dtype)
    for name, value in computed.items():
        torch.testing.assert_close(
            folded[name], value, equal_nan=True, msg=lambda text: f"{dtype} {name}: {folded[name]} is {value}"
        )
        compared += 1
print(compared)
"""


@pytest.mark.parametrize("effort", ["quick", pytest.param("full", marks=pytest.mark.slow)])
def test_constants_fold_to_what_the_device_computes(python, effort):
    done = python(FOLDS, effort, timeout=120)
    assert int(done.stdout) == 5 * (18 + 8 * 7) + 2 * (22 + 8 * 8)


@pytest.mark.parametrize("scale", [0.5, 1.5, 2.0])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_a_constant_keeps_the_order_of_its_elements(mode, scale):
    """XLA computes the whole program, in which products of tables have operands in different layouts."""
    values = {}
    for device in ("cpu", DEVICE):
        x = torch.ones(2, 3, 8, 8, device=device).contiguous(memory_format=torch.channels_last)
        y = F.interpolate(x, scale_factor=scale, mode=mode)
        values[device] = (y, y + 1, y.contiguous())
    for device, cpu in zip(values[DEVICE], values["cpu"], strict=True):
        assert_same(device, cpu)


def test_passes_that_a_user_turns_off_come_on_top():
    with torch.tpu.compiler.custom_compiler_options({"xla_disable_hlo_passes": "dce"}):
        x = torch.ones(2, 3, 8, 8, device=DEVICE).contiguous(memory_format=torch.channels_last)
        got = F.interpolate(x, scale_factor=1.5, mode="bicubic")
    x = torch.ones(2, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    assert_same(got, F.interpolate(x, scale_factor=1.5, mode="bicubic"))
