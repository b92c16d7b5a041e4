"""Tensors that come from files and other libraries, and go there; what torch.accelerator says of the device."""

import importlib.util

import numpy as np
import pytest
import torch
from support import DEVICE


@pytest.mark.skipif(importlib.util.find_spec("safetensors") is None, reason="`pip install safetensors`")
def test_safetensors_are_loaded_to_the_device(tmp_path):
    import safetensors
    import safetensors.torch as st

    file = tmp_path / "x.safetensors"
    saved = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(3, dtype=torch.bfloat16)}
    st.save_file({name: t.to(DEVICE) for name, t in saved.items()}, file)
    for device in (DEVICE, f"{DEVICE}:0", torch.device(DEVICE)):
        loaded = st.load_file(file, device=device)
        assert all(t.device.type == DEVICE for t in loaded.values())
        assert all(torch.equal(t.cpu(), saved[name]) for name, t in loaded.items())
    with safetensors.safe_open(file, "pt", device=DEVICE) as opened:
        assert set(opened.keys()) == {"a", "b"}
        assert torch.equal(opened.get_tensor("b").cpu(), saved["b"])
        part = opened.get_slice("a")
        assert part.get_shape() == [2, 3] and part[1:].device.type == DEVICE
        assert torch.equal(part[1:].cpu(), saved["a"][1:])
    assert st.load_file(file)["a"].device.type == "cpu"
    with pytest.raises(Exception, match=r"invalid|unknown|Expected one of"):
        st.load_file(file, device="nowhere")
    model, other = torch.nn.Linear(2, 2).to(DEVICE), torch.nn.Linear(2, 2).to(DEVICE)
    st.save_model(model, str(file))
    st.load_model(other, file, device=DEVICE)
    assert torch.equal(model.weight, other.weight)


def test_dlpack_gives_copies():
    x = torch.arange(6.0, device=DEVICE).view(2, 3)
    assert x.__dlpack_device__()[0] == 1
    got = np.from_dlpack(x)
    assert (got == x.cpu().numpy()).all()
    x.add_(1)
    assert got[0, 0] == 0, "a copy"
    assert (np.from_dlpack(x[:, 1:].t()) == x.cpu().numpy()[:, 1:].T).all()
    for dtype in (torch.bool, torch.int64, torch.bfloat16, torch.complex64):
        y = torch.ones(3, dtype=dtype, device=DEVICE)
        assert torch.equal(torch.utils.dlpack.from_dlpack(y.__dlpack__()), y.cpu())


def test_dlpack_takes_copies():
    x = np.arange(6.0).reshape(2, 3)
    y = torch.from_dlpack(x, device=DEVICE)
    assert y.device.type == DEVICE and (y.cpu().numpy() == x).all()
    assert torch.from_dlpack(x).device.type == "cpu"
    with pytest.raises(BufferError, match="copy=False"):
        torch.from_dlpack(x, device=DEVICE, copy=False)


def test_dlpack_between_tensors_of_the_device():
    x = torch.arange(3.0, device=DEVICE)
    same = torch.from_dlpack(x)
    same[0] = 9
    assert x[0].item() == 9 and same.device.type == DEVICE
    new = torch.from_dlpack(x, copy=True)
    new[0] = 1
    assert x[0].item() == 9
    assert torch.equal(torch.from_dlpack(x, device="cpu"), x.cpu())
    with pytest.raises(BufferError, match="copy=False"):
        torch.from_dlpack(x, device="cpu", copy=False)
    for refuse in (torch.from_dlpack, np.from_dlpack):
        with pytest.raises((BufferError, RuntimeError), match="require"):
            refuse(x.clone().requires_grad_())


def test_capability_of_the_accelerator():
    if not hasattr(torch.accelerator, "get_device_capability"):
        pytest.skip("this PyTorch does not ask")
    assert torch.accelerator.get_device_capability() == torch.tpu.get_device_capability()


def test_a_graph_of_the_accelerator_says_why_not():
    if not hasattr(torch.accelerator, "Graph"):
        pytest.skip("this PyTorch has none")
    with pytest.raises(NotImplementedError, match=r"needs no graphs(.|\n)*torch.compile"):
        torch.accelerator.Graph()
