"""Tensors print as on the CPU."""

import pytest
import torch
from support import DEVICE
from torch import nn

SHOWN = {
    "number": torch.tensor(3),
    "float": torch.tensor(2.5),
    "vector": torch.tensor([1.0, 2.5, -3.0]),
    "integers": torch.arange(12).view(3, 4),
    "bool": torch.tensor([[True, False]]),
    "complex": torch.tensor([1 + 2j, -0.5j]),
    "half": torch.tensor([1.5, 2], dtype=torch.float16),
    "bfloat16": torch.tensor([1.5, 2], dtype=torch.bfloat16),
    "double": torch.tensor([1.5, 2], dtype=torch.float64),
    "uint8": torch.tensor([1, 255], dtype=torch.uint8),
    "empty": torch.empty(0),
    "empty rows": torch.empty(0, 3),
    "non-finite": torch.tensor([float("inf"), float("nan"), -1e-30, 1e30]),
    "scientific": torch.tensor([1e-8, 1.0, 12345678.0]),
    "large": torch.arange(3000.0).view(50, 60),
    "larger": torch.linspace(-1, 1, 200_000).view(2, 1000, 100),
    "three dimensions": torch.arange(24).view(2, 3, 4),
    "transposed": torch.arange(6.0).view(2, 3).t(),
    "expanded": torch.ones(1).expand(3),
}


def on_cpu(text):
    """What PyTorch prints on the CPU for the same tensor."""
    return text.replace(f", device='{DEVICE}:0'", "").replace(f"device='{DEVICE}:0', ", "")


@pytest.mark.parametrize("name", SHOWN)
def test_printing(name):
    x = SHOWN[name]
    y = x.to(DEVICE)
    assert f"device='{DEVICE}:0'" in repr(y)
    # Without the device the text is the CPU's, but for line breaks that the device's name pushed around.
    assert on_cpu(repr(y)).split() == repr(x).split()
    assert str(y) == repr(y)
    assert on_cpu(f"{y}").split() == f"{x}".split()


def test_printing_in_context():
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    y = x.detach().to(DEVICE).requires_grad_()
    for f in (lambda t: t, lambda t: t * 2, lambda t: [t, {"a": t}], lambda t: nn.Parameter(t), lambda t: (t.sum(),),
              lambda t: t.view(2, 1).t(), lambda t: torch.conj(torch.complex(t, t))):  # fmt: skip
        assert on_cpu(repr(f(y))).split() == repr(f(x)).split()


def test_print_options():
    x = torch.tensor([1 / 3, 2e5])
    torch.set_printoptions(precision=2, sci_mode=False, threshold=1)
    try:
        assert on_cpu(repr(x.to(DEVICE))) == repr(x)
        assert on_cpu(repr(SHOWN["larger"].to(DEVICE))).split() == repr(SHOWN["larger"]).split()
    finally:
        torch.set_printoptions(profile="default")


def test_formatting_of_numbers():
    x = torch.tensor(2.625, device=DEVICE)
    assert f"{x:.2f}" == "2.62" and f"{x.item()}" == "2.625" and "%d" % torch.tensor(3, device=DEVICE) == "3"  # noqa: UP031


def test_printing_a_large_tensor_moves_little():
    x = torch.zeros(4000, 2000, device=DEVICE)
    torch.tpu.synchronize()
    torch.tpu.reset_metrics()
    repr(x)
    assert torch.tpu.metrics()["bytes_d2h"] < 1 << 20
