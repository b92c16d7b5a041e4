"""Weights that torchao has quantized, on the device, and moved there: as on the CPU, with no operation on the CPU."""

import copy

import pytest
import torch
from support import DEVICE
from torch import nn

q = pytest.importorskip("torchao.quantization", reason="the extra `models` is not installed")

# What torchao does on a CPU; its other ways are for CUDA alone.
CONFIGS = {
    "int8": lambda: q.Int8WeightOnlyConfig(),
    "int8, activations too": lambda: q.Int8DynamicActivationInt8WeightConfig(),
    "int4 in groups": lambda: q.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=q.PerGroup(64)),
    "int4 in groups, activations int8": lambda: q.Int8DynamicActivationIntxWeightConfig(
        weight_dtype=torch.int4, weight_granularity=q.PerGroup(64)
    ),
    "float8": lambda: q.Float8WeightOnlyConfig(),
}


@pytest.mark.parametrize("moved", [False, True], ids=["made there", "moved there"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_quantized_linear(name, dtype, moved, no_fallback):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 192), nn.ReLU(), nn.Linear(192, 64)).eval().to(dtype)
    x = torch.randn(8, 128, dtype=dtype)
    there = copy.deepcopy(model)
    q.quantize_(model, CONFIGS[name]())
    if moved:
        there = copy.deepcopy(model).to(DEVICE)
    else:
        q.quantize_(there.to(DEVICE), CONFIGS[name]())
    with torch.no_grad():
        got, want = there(x.to(DEVICE)).cpu(), model(x)
    # In bfloat16 a sum may be rounded to the other side.
    rtol, atol = (1e-5, 1e-5) if dtype == torch.float32 else (1.6e-2, 1e-2)
    torch.testing.assert_close(got, want, rtol=rtol, atol=atol)
