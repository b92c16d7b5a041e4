"""To the device and back: other devices, numpy, DLPack, copies, files, loaders."""

import copy
import gc
import pickle

import numpy as np
import pytest
import torch
from support import DEVICE, assert_same, model, outcome
from torch import nn

# ---------------------------------------------------------------- other devices, numpy, dlpack


def test_moving():
    x = torch.arange(6.0).view(2, 3)
    y = x.to(DEVICE)
    assert y.device == torch.device(DEVICE, 0) and y.is_tpu and not y.is_cpu and not y.is_cuda
    assert y.to(DEVICE) is y and y.tpu() is y and y.to(torch.device(DEVICE, 0)) is y
    assert y.to(DEVICE, copy=True) is not y and x.tpu(0).equal(y)
    for z in (y.cpu(), y.to("cpu"), y.to(torch.device("cpu")), y.to(x)):
        assert torch.equal(z, x) and z.device.type == "cpu"
    assert y.to("cpu", torch.int64).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert x.to(DEVICE, torch.bfloat16).dtype == torch.bfloat16 and y.double().is_tpu
    assert y.type() == "torch.tpu.FloatTensor" and y.get_device() == 0 and x.get_device() == -1
    assert x.to(DEVICE, non_blocking=True).cpu(memory_format=torch.preserve_format).equal(x)
    t = x.t().to(DEVICE)
    assert t.stride() == (1, 3) and t.cpu().stride() == (1, 3)
    assert x.new_tensor([1.0], device=DEVICE).is_tpu and y.new_zeros(2).is_tpu
    assert torch.zeros(2, device=y.device).is_tpu and torch.zeros_like(x, device=DEVICE).is_tpu
    assert y.to("meta").is_meta


# Destinations on the CPU for values of (1100, 1030): those that a read can write itself, and those that it cannot.
DESTINATIONS = {
    "row-major": lambda dtype: torch.zeros(1100, 1030, dtype=dtype),
    "rows of more": lambda dtype: torch.zeros(1200, 1030, dtype=dtype)[50:1150],
    "columns of more": lambda dtype: torch.zeros(1100, 1040, dtype=dtype)[:, 3:1033],
    "transposed": lambda dtype: torch.zeros(1030, 1100, dtype=dtype).t(),
    "another dtype": lambda dtype: torch.zeros(1100, 1030, dtype=torch.complex128),
    "conjugated": lambda dtype: torch.zeros(1100, 1030, dtype=dtype).conj(),
    "negated": lambda dtype: torch.zeros(1100, 1030, dtype=torch.complex64).conj().imag,
    "broadcast": lambda dtype: torch.zeros(2, 1100, 1030, dtype=dtype),
}


@pytest.mark.parametrize("where", DESTINATIONS)
def test_large_copies(where):
    """Of so many bytes that several threads copy, in parts; and of views with something lazy."""
    x = torch.arange(1100 * 1030, dtype=torch.float32).view(1100, 1030)
    if where != "negated":
        x = torch.complex(x, -x)
    views = [lambda t: t, torch.conj, lambda t: t[:1].expand(1100, 1030)]
    device = x.to(DEVICE)
    for view in views:
        theirs, ours = DESTINATIONS[where](x.dtype), DESTINATIONS[where](x.dtype)
        version = ours._version
        theirs.copy_(view(x))
        ours.copy_(view(device))
        assert torch.equal(ours, theirs) and ours._version == version + 1
        back = torch.empty_like(theirs, device=DEVICE).copy_(theirs)
        assert torch.equal(back.cpu(), theirs)
    assert torch.equal(device.cpu(), x)


def test_moving_expanded_and_sliced():
    x = torch.arange(4.0)
    for f in (lambda t: t.expand(3, 4), lambda t: t[1:3], lambda t: t[::2], lambda t: t.view(2, 2).t(), lambda t: t.flip(0), lambda t: t.as_strided((3, 2), (1, 1))):  # fmt: skip
        assert_same(f(x).to(DEVICE), f(x), strides=False)
        assert torch.equal(f(x.to(DEVICE)).cpu(), f(x))
    y = torch.zeros(4, device=DEVICE)
    y[1:3].copy_(x[::2])
    z = torch.ones(2, 4)
    z[:, 1::2].copy_(y.view(2, 2))
    assert y.tolist() == [0, 0, 2, 0] and z.tolist() == [[1, 0, 1, 0], [1, 2, 1, 0]]


def test_a_copy_to_the_device_is_taken_at_once():
    """The source may change right after a blocking copy; after a non-blocking one too, as nothing is pinned."""
    x = torch.ones(1 << 16)
    y = x.to(DEVICE)
    x.zero_()
    assert y.sum().item() == 1 << 16


def test_all_dtypes_go_and_come_back():
    for dtype in (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
                  torch.float32, torch.float64, torch.complex64, torch.complex128, torch.uint16, torch.uint32, torch.uint64,
                  torch.float8_e4m3fn, torch.float8_e5m2):  # fmt: skip
        x = torch.tensor([0, 1, 2, 3]).to(dtype)
        y = x.to(DEVICE)
        assert y.dtype == dtype and torch.equal(y.cpu().view(torch.uint8), x.view(torch.uint8)), dtype
        assert (
            y[1:3].cpu().to(torch.float64 if not dtype.is_complex else dtype).tolist()
            == x[1:3].to(torch.float64 if not dtype.is_complex else dtype).tolist()
        ), dtype


def test_numpy():
    y = torch.arange(4.0, device=DEVICE)
    assert y.cpu().numpy().tolist() == [0, 1, 2, 3]
    for f in (lambda: y.numpy(), lambda: np.asarray(y), lambda: np.ones(4) + np.array(y)):
        with pytest.raises(TypeError, match=r"(?i)cpu\(\)"):
            f()
    assert torch.as_tensor(np.ones(3), device=DEVICE).dtype == torch.float64
    assert torch.from_numpy(np.arange(3)).to(DEVICE).tolist() == [0, 1, 2]
    assert y.numpy(force=True).tolist() == [0, 1, 2, 3]
    assert (y * np.float32(2)).tolist() == [0, 2, 4, 6] and (np.float64(2) * torch.ones(1)).item() == 2


def test_a_dlpack_capsule_stays_on_the_device():
    # The capsule says that its memory is an extension device's: nobody else may read it, PyTorch finds the storage again.
    y = torch.arange(6.0, device=DEVICE)
    capsule = torch.utils.dlpack.to_dlpack(y.view(2, 3).t()[1:])
    for f in (lambda: y.__cuda_array_interface__, lambda: y.__array_interface__, lambda: np.asarray(y)):
        assert isinstance(outcome(f), (BufferError, RuntimeError, AttributeError, TypeError, ValueError)), f
    alias = torch.from_dlpack(capsule)
    assert alias.is_tpu and alias.stride() == (1, 3)
    alias.add_(10)
    assert y.tolist() == [0, 11, 12, 3, 14, 15]
    y = None
    gc.collect()
    assert alias.tolist() == [[11, 14], [12, 15]]


def test_dlpack_by_way_of_the_host():
    y = torch.arange(3.0, device=DEVICE)
    assert torch.from_dlpack(y.__dlpack__(dl_device=(1, 0), copy=True)).tolist() == [0, 1, 2]
    assert np.from_dlpack(y.cpu()).tolist() == [0, 1, 2]


def test_addresses():
    x, y = torch.ones(4, device=DEVICE), torch.ones(4, device=DEVICE)
    assert x.data_ptr() != y.data_ptr() != 0 and x[1:].data_ptr() == x.data_ptr() + 4
    assert torch.empty(0, device=DEVICE).data_ptr() == 0 or torch.empty(0, device=DEVICE).numel() == 0


def test_default_device():
    with torch.device(DEVICE):
        x = torch.ones(2)
        m = nn.Linear(2, 2)
    assert x.is_tpu and m.weight.is_tpu
    torch.set_default_device(DEVICE)
    try:
        assert torch.arange(3).is_tpu and torch.tensor([1.0]).is_tpu and torch.rand(2).is_tpu
    finally:
        torch.set_default_device(None)


# ---------------------------------------------------------------- copying and saving


def test_deepcopy():
    m = model().to(DEVICE)
    n = copy.deepcopy(m)
    with torch.no_grad():
        m[0].weight.zero_()
    assert n[0].weight.abs().sum().item() > 0 and n[0].weight.is_tpu and n[0].weight.requires_grad
    x = copy.deepcopy(torch.arange(3, device=DEVICE))
    assert x.tolist() == [0, 1, 2] and copy.copy(x).data_ptr() == x.data_ptr()


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_pickle(protocol):
    for x in (torch.arange(3, device=DEVICE), torch.ones(2, 2, device=DEVICE, requires_grad=True), torch.tensor(1 + 2j, device=DEVICE),
              nn.Parameter(torch.ones(2, device=DEVICE)), torch.empty(0, 3, device=DEVICE), torch.ones(2, device=DEVICE).bfloat16()):  # fmt: skip
        y = pickle.loads(pickle.dumps(x, protocol))
        assert y.device == x.device and y.dtype == x.dtype and y.requires_grad == x.requires_grad and type(y) is type(x)
        assert torch.equal(y.cpu(), x.cpu())


@pytest.mark.parametrize("weights_only", [True, False])
def test_save_and_load(tmp_path, weights_only):
    m = model().to(DEVICE)
    optimizer = torch.optim.AdamW(m.parameters())
    m(torch.randn(5, 3, device=DEVICE)).sum().backward()
    optimizer.step()
    path = tmp_path / "checkpoint.pt"
    torch.save({"model": m.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}, path)
    for place in (None, "cpu", DEVICE, f"{DEVICE}:0", {f"{DEVICE}:0": "cpu"}, lambda storage, where: storage):
        back = torch.load(path, map_location=place, weights_only=weights_only)
        weight = back["model"]["0.weight"]
        expected = "cpu" if place == "cpu" or isinstance(place, dict) or callable(place) else DEVICE
        assert weight.device.type == expected, place
        assert torch.equal(weight.cpu(), m[0].weight.detach().cpu()) and back["epoch"] == 3
    fresh = model().to(DEVICE)
    fresh.load_state_dict(torch.load(path, weights_only=weights_only)["model"])
    other = torch.optim.AdamW(fresh.parameters())
    other.load_state_dict(back["optimizer"])
    assert all(
        torch.equal(a.cpu(), b.cpu()) for a, b in zip(m.state_dict().values(), fresh.state_dict().values(), strict=True)
    )
    assert other.state[fresh[0].weight]["exp_avg"].is_tpu  # moved to where the parameter is


def test_load_of_a_cpu_checkpoint(tmp_path):
    torch.save(model().state_dict(), tmp_path / "cpu.pt")
    state = torch.load(tmp_path / "cpu.pt", map_location=DEVICE)
    assert all(v.is_tpu for v in state.values())
    m = model().to(DEVICE)
    m.load_state_dict(torch.load(tmp_path / "cpu.pt"))
    m.load_state_dict(torch.load(tmp_path / "cpu.pt", mmap=True), assign=True)
    assert not next(m.parameters()).is_tpu


def test_a_device_checkpoint_needs_no_oxitorch(tmp_path, python):
    torch.save(
        {"w": torch.arange(3.0, device=DEVICE), "p": nn.Parameter(torch.ones(2, device=DEVICE))}, tmp_path / "x.pt"
    )
    code = f"""
import torch
back = torch.load({str(tmp_path / "x.pt")!r}, map_location="cpu", weights_only=True)
print(back["w"].tolist(), back["p"].device, hasattr(torch, "tpu"))
"""
    assert python(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0").stdout == "[0.0, 1.0, 2.0] cpu False\n"


def test_state_dicts():
    m = model().to(DEVICE)
    state = m.state_dict()
    assert all(v.is_tpu for v in state.values()) and state["1.num_batches_tracked"].item() == 0
    m.load_state_dict(model().state_dict())
    m.load_state_dict({k: v.clone() for k, v in state.items()})
    with pytest.raises(RuntimeError, match="size mismatch"):
        m.load_state_dict({**state, "0.weight": torch.zeros(1, 1, device=DEVICE)})
    m.to("cpu").to(DEVICE).double()
    assert all(p.is_tpu and p.dtype == torch.float64 for p in m.parameters())
    assert nn.Linear(2, 2, device="meta").to_empty(device=DEVICE).weight.is_tpu


def test_module_parameters_stay_the_same_objects():
    """As with CUDA: an optimizer that was made before the module moved keeps training it."""
    m = nn.Linear(2, 2)
    weight = m.weight
    optimizer = torch.optim.SGD(m.parameters(), lr=1.0)
    m.to(DEVICE)
    assert m.weight is weight and weight.is_tpu and weight.is_leaf
    m(torch.ones(1, 2, device=DEVICE)).sum().backward()
    before = m.bias.tolist()
    optimizer.step()
    assert m.bias.tolist() == pytest.approx([b - 1 for b in before])
    m.to("cpu")
    assert m.weight is weight and weight.device.type == "cpu"


# ---------------------------------------------------------------- data loading, streams, accelerator


def test_loaders():
    data = torch.utils.data.TensorDataset(torch.arange(12.0).view(6, 2), torch.arange(6))
    for pin in (False, True):
        loader = torch.utils.data.DataLoader(data, batch_size=4, pin_memory=pin)
        batches = [(x.to(DEVICE, non_blocking=True), y.to(DEVICE, non_blocking=True)) for x, y in loader]
        assert [len(x) for x, _ in batches] == [4, 2] and batches[1][1].tolist() == [4, 5]
        assert sum(x.sum().item() for x, _ in batches) == 66
    on_device = torch.utils.data.TensorDataset(torch.arange(12.0, device=DEVICE).view(6, 2))
    assert [b[0].device.type for b in torch.utils.data.DataLoader(on_device, batch_size=3, shuffle=True)] == [
        DEVICE
    ] * 2


def test_pinned_memory():
    x = torch.ones(3).pin_memory()
    assert x.is_pinned() and not torch.ones(3).is_pinned() and x[1:].is_pinned()
    assert x.to(DEVICE, non_blocking=True).tolist() == [1, 1, 1]
    assert torch.empty(3, pin_memory=True).is_pinned()
    with pytest.raises(RuntimeError, match="(?i)pin"):
        torch.ones(3, device=DEVICE).pin_memory()
