"""Nested tensors, and what PyTorch makes of them by itself: encoders that are not in training, with padded sequences."""

import copy
import warnings

import pytest
import torch
from support import DEVICE, assert_same, tensors
from torch import nn

warnings.filterwarnings("ignore", "The PyTorch API of nested tensors is in prototype stage")

LENGTHS = (5, 3, 1)


def padding(lengths=LENGTHS, left=False):
    mask = torch.arange(max(lengths)) >= torch.tensor(lengths)[:, None]
    return mask.flip(1) if left else mask


def encoder():
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)


MODELS = {
    "encoder": (encoder, lambda model, x, mask: model(x, src_key_padding_mask=mask)),
    "translation": (
        lambda: nn.Transformer(8, 2, 1, 1, 16, batch_first=True),
        lambda model, x, mask: model(x, x, src_key_padding_mask=mask, memory_key_padding_mask=mask),
    ),
}


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize("name", MODELS)
def test_encoders_that_are_not_in_training_take_padded_sequences(name, left):
    """What is padding differs: PyTorch's nested tensors give zeros there, but not where the mask is one of the left."""
    torch.manual_seed(0)
    make, call = MODELS[name]
    reference = make().eval()
    model = copy.deepcopy(reference).to(DEVICE)
    x, mask = torch.randn(3, 5, 8), padding(left=left)
    reads = torch.tpu.metrics()["transfers_d2h"]
    with torch.no_grad(), torch.tpu.set_fallback("error"):
        expected, ours = call(reference, x, mask), call(model, x.to(DEVICE), mask.to(DEVICE))
    assert torch.tpu.metrics()["transfers_d2h"] == reads
    used = ~mask if name == "encoder" else torch.ones_like(mask)
    torch.testing.assert_close(ours.cpu()[used], expected[used], rtol=1e-4, atol=1e-5)
    assert ours.isfinite().all()


def parts():
    return [torch.randn(n, 6, device=DEVICE) for n in LENGTHS]


def of_a_mask():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1, mask_check=False).to(
        DEVICE
    )
    with torch.no_grad():
        model.eval()(torch.randn(3, 5, 8, device=DEVICE), src_key_padding_mask=padding().to(DEVICE))


STRIDED = {
    "nested_tensor": lambda: torch.nested.nested_tensor(parts()),
    "as_nested_tensor": lambda: torch.nested.as_nested_tensor(parts()),
    "device": lambda: torch.nested.nested_tensor([x.cpu() for x in parts()], device=DEVICE).to_padded_tensor(0.0),
    "to": lambda: torch.nested.nested_tensor([x.cpu() for x in parts()]).to(DEVICE),
    "an encoder that is told not to check": of_a_mask,
}


@pytest.mark.parametrize("name", STRIDED)
def test_the_strided_layout_is_refused_with_what_to_do(name):
    with pytest.raises(NotImplementedError, match=r"no nested tensors of layout torch.strided\nhint: .*torch.jagged"):
        STRIDED[name]()


JAGGED = {
    "linear": lambda nt, w: torch.nn.functional.linear(nt, w).values(),
    "relu": lambda nt, w: nt.relu().values(),
    "padded": lambda nt, w: nt.to_padded_tensor(0.0),
    "sum": lambda nt, w: nt.sum(1),
    "softmax": lambda nt, w: nt.softmax(-1).values(),
    "layer_norm": lambda nt, w: torch.nn.functional.layer_norm(nt, (6,)).values(),
    "unbind": lambda nt, w: [x * 2 for x in nt.unbind()],
}


@pytest.mark.parametrize("name", JAGGED)
def test_the_jagged_layout_computes(name):
    torch.manual_seed(0)
    xs, w = [torch.randn(n, 6) for n in LENGTHS], torch.randn(6, 6)
    results = []
    for device in ("cpu", DEVICE):
        nt = torch.nested.nested_tensor([x.to(device) for x in xs], layout=torch.jagged)
        leaf = w.to(device, copy=True).requires_grad_()
        result = JAGGED[name](nt, leaf)
        if name == "linear":
            result.square().sum().backward()
            result = [result.detach(), leaf.grad]
        results.append(result)
    for ours, expected in zip(*map(tensors, reversed(results)), strict=True):
        assert_same(ours, expected, name, rtol=1e-4, atol=1e-5)
