"""Device tensors are ordinary tensors: printing, indexing, conversion, saving, autograd, hooks, functional transforms."""

import copy
import gc
import pickle
import warnings
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support import DEVICE, assert_same, bits, outcome
from torch import nn

# ---------------------------------------------------------------- printing

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


# ---------------------------------------------------------------- Python numbers


def test_numbers():
    for value, dtype in ((2.5, torch.float32), (3, torch.int64), (True, torch.bool), (1 - 2j, torch.complex64), (1.5, torch.bfloat16), (7, torch.uint8)):  # fmt: skip
        x = torch.tensor(value, dtype=dtype, device=DEVICE)
        assert x.item() == value and type(x.item()) is type(value)
        assert x.tolist() == value and x.view(1, 1).item() == value
    assert int(torch.tensor(2.9, device=DEVICE)) == 2 and float(torch.tensor(2, device=DEVICE)) == 2.0
    assert complex(torch.tensor(1j, device=DEVICE)) == 1j and [0, 1, 2][torch.tensor(1, device=DEVICE)] == 1
    assert bool(torch.tensor([1], device=DEVICE)) and not torch.tensor(0.0, device=DEVICE)
    assert round(torch.tensor(2.5, device=DEVICE).item()) == 2
    x = torch.arange(3, device=DEVICE)
    assert len(x) == 3 and list(x) == [0, 1, 2] and 2 in x and 5 not in x
    assert hash(x) == hash(x) and x in {x} and (x == x).all()
    assert x.tolist() == [0, 1, 2] and torch.tensor([[1.5]], device=DEVICE).tolist() == [[1.5]]


def test_comparison_with_numbers():
    x = torch.tensor([1.0, 2.0], device=DEVICE)
    if (x > 0).all() and not (x > 5).any():
        assert (x == torch.tensor([1.0, 2.0], device=DEVICE)).all()
    assert torch.equal(x, x.clone()) and not torch.equal(x, x + 1) and not torch.equal(x, x[:1])
    assert torch.allclose(x, x + 1e-9) and not torch.isclose(x, x + 1).any()
    with pytest.raises(AssertionError):
        torch.testing.assert_close(x, x + 1)
    torch.testing.assert_close(x, x.clone())


# ---------------------------------------------------------------- indexing

INDEXES = {
    "integer": lambda x: x[1],
    "negative": lambda x: x[-1, -2],
    "slice": lambda x: x[1:, ::2],
    "slice beyond": lambda x: x[10:, -100:2],
    "ellipsis": lambda x: x[..., 0],
    "none": lambda x: x[None, :, None, 1],
    "list": lambda x: x[[0, 2]],
    "lists": lambda x: x[[0, 2], [1, 3]],
    "tensor": lambda x: x[torch.tensor([[0, 1], [2, 0]], device=x.device)],
    "tensor on the cpu": lambda x: x[torch.tensor([0, 2])],
    "number tensor": lambda x: x[torch.tensor(1, device=x.device)],
    "bool": lambda x: x[True],
    "false": lambda x: x[False],
    "mask": lambda x: x[x > 4],
    "mask rows": lambda x: x[torch.tensor([True, False, True], device=x.device)],
    "mask and integer": lambda x: x[torch.tensor([True, False, True], device=x.device), 1],
    "mask columns": lambda x: x[:, torch.tensor([True, False, True, True], device=x.device)],
    "numpy": lambda x: x[np.array([0, 2])],
    "range": lambda x: x[range(2)],
    "tuple": lambda x: x[(1, 2)],
    "uint8 mask": lambda x: x[torch.tensor([1, 0, 1], dtype=torch.uint8, device=x.device).bool()],
    "empty list": lambda x: x[[]],
    "int32": lambda x: x[torch.tensor([2, 0], dtype=torch.int32, device=x.device)],
    "take_along_dim": lambda x: x.take_along_dim(x.argsort(1, descending=True), 1),
}


@pytest.mark.parametrize("name", INDEXES)
def test_indexing(name):
    x = torch.arange(12.0).view(3, 4)
    assert_same(INDEXES[name](x.to(DEVICE)), INDEXES[name](x), name)


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


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


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


def test_accelerator():
    assert torch.accelerator.current_accelerator().type == DEVICE and torch.accelerator.is_available()
    assert torch.accelerator.device_count() == torch.tpu.device_count() >= 1
    assert torch.get_device_module() is torch.tpu and torch.get_device_module(DEVICE) is torch.tpu
    x = torch.ones(3, device=torch.accelerator.current_accelerator())
    torch.accelerator.synchronize()
    stream = torch.accelerator.current_stream()
    assert stream.device.type == DEVICE
    torch.accelerator.set_stream(stream)
    assert torch.accelerator.memory_allocated() >= x.nbytes
    torch.accelerator.empty_cache()
    with torch.accelerator.device_index(0):
        assert torch.accelerator.current_device_index() == 0


def test_streams_and_events():
    s = torch.Stream(DEVICE)
    e, f = torch.Event(DEVICE, enable_timing=True), torch.Event(DEVICE, enable_timing=True)
    x = torch.ones(256, 256, device=DEVICE)
    e.record()
    with s:
        y = x @ x
    s.wait_stream(torch.tpu.current_stream())
    f.record(s)
    f.synchronize()
    assert e.query() and f.query() and s.query() and e.elapsed_time(f) > 0
    assert y[0, 0].item() == 256
    s.record_event(e)
    s.wait_event(e)
    s.synchronize()
    x.record_stream(s)
    with pytest.raises((RuntimeError, ValueError), match="recorded"):
        torch.Event(DEVICE, enable_timing=True).elapsed_time(f)


def test_events_wait_for_the_device():
    x = torch.randn(1024, 1024, device=DEVICE, dtype=torch.float64)
    (x @ x).sum().item()
    torch.tpu.synchronize()
    e = torch.Event(DEVICE)
    for _ in range(3):
        y = x @ x
    e.record()
    early = e.query()  # the host is far ahead
    e.synchronize()
    assert not early and e.query()
    assert y.isfinite().all()


# ---------------------------------------------------------------- autograd


def both(f):
    """Runs f on both devices and compares all tensors that it returns."""
    a, b = f("cpu"), f(DEVICE)
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        assert_same(y, x, f"result {i}", strides=False, rtol=1e-5, atol=1e-6)


def test_gradients():
    def run(d):
        x = torch.arange(6.0, device=d).view(2, 3).requires_grad_()
        w = torch.ones(3, 2, device=d, requires_grad=True)
        y = torch.relu(x @ w) * x.sum()
        (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (g.pow(2).sum()).backward()
        return x.grad, w.grad, g.detach()

    both(run)


def test_gradient_accumulation_and_retain():
    def run(d):
        x = torch.ones(3, device=d, requires_grad=True)
        y = x * 3
        y.retain_grad()
        z = y.square().sum()
        z.backward(retain_graph=True)
        z.backward()
        return x.grad, y.grad

    both(run)


def test_higher_derivatives_and_jacobians():
    def run(d):
        f = lambda x: (x.sin() * x.flip(0)).sum() + x.prod()  # noqa: E731
        x = torch.tensor([0.3, 0.7, 1.1], device=d)
        return (
            torch.autograd.functional.jacobian(lambda x: x.exp() * x.sum(), x),
            torch.autograd.functional.hessian(f, x),
            torch.autograd.functional.vjp(lambda x: x.tanh(), x, x)[1],
            torch.autograd.functional.hvp(f, x, x)[1],
        )

    both(run)


def test_gradcheck():
    x = torch.randn(3, 4, dtype=torch.float64, device=DEVICE, requires_grad=True)
    w = torch.randn(4, 2, dtype=torch.float64, device=DEVICE, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: (x @ w).tanh().softmax(1), (x, w))
    small = torch.rand(3, dtype=torch.float64, device=DEVICE, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: (x * x.exp()).sum(), (small,))


def test_custom_functions():
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            assert x.is_tpu
            return 3 * x**2 * g

    x = torch.tensor([1.0, 2.0], device=DEVICE, requires_grad=True)
    Cube.apply(x).sum().backward()
    assert x.grad.tolist() == [3, 12]


def test_hooks():
    m = nn.Linear(2, 2).to(DEVICE)
    calls = []
    m.register_forward_pre_hook(lambda m, args: calls.append("pre"))
    m.register_forward_hook(lambda m, args, out: calls.append(("forward", out.is_tpu)))
    m.register_full_backward_hook(lambda m, gi, go: calls.append(("backward", go[0].is_tpu)))
    m.weight.register_hook(lambda g: g * 2)
    m.weight.register_post_accumulate_grad_hook(lambda p: calls.append("accumulated"))
    x = torch.ones(1, 2, device=DEVICE, requires_grad=True)
    m(x).sum().backward()
    assert calls == ["pre", ("forward", True), "accumulated", ("backward", True)] or sorted(map(str, calls)) == sorted(
        map(str, ["pre", ("forward", True), ("backward", True), "accumulated"])
    )
    assert m.weight.grad.tolist() == [[2, 2], [2, 2]] and m.bias.grad.tolist() == [1, 1]


def test_saved_tensor_hooks():
    x = torch.arange(4.0, device=DEVICE, requires_grad=True)
    with torch.autograd.graph.save_on_cpu():
        y = x.exp() * x
    y.sum().backward()
    torch.testing.assert_close(x.grad.cpu(), (torch.arange(4.0).exp() * (torch.arange(4.0) + 1)))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.cpu(), lambda t: t.to(DEVICE)):
        (x * x).sum().backward()


def test_modes_of_autograd():
    x = torch.ones(2, device=DEVICE, requires_grad=True)
    with torch.no_grad():
        assert not (x * 2).requires_grad
    with torch.inference_mode():
        y = x * 2
    assert y.is_inference() and y.tolist() == [2, 2]
    with torch.autograd.detect_anomaly(), pytest.raises(RuntimeError, match="nan"):
        (x - 1).sqrt().mul(0).sum().backward()
    with torch.enable_grad():
        assert (x * 2).requires_grad


def test_gradients_across_devices():
    x = torch.arange(3.0, requires_grad=True)
    (x.to(DEVICE) * 2).cpu().square().sum().backward()
    assert x.grad.tolist() == [0, 8, 16] and x.grad.device.type == "cpu"


def test_graphs_are_freed():
    x = torch.ones(1 << 16, device=DEVICE, requires_grad=True)
    torch.tpu.synchronize()
    gc.collect()
    before = torch.tpu.memory_allocated()
    y = x
    for _ in range(10):
        y = y.sin()
    probe = weakref.ref(y)
    loss = y.sum()
    torch.tpu.synchronize()
    assert torch.tpu.memory_allocated() >= before + 10 * (4 << 16)
    del y, loss
    gc.collect()
    torch.tpu.synchronize()
    assert probe() is None and torch.tpu.memory_allocated() == before


def test_deep_graphs():
    x = torch.ones(2, device=DEVICE, requires_grad=True)
    y = x
    for _ in range(20_000):
        y = y + 1
    y.sum().backward()
    assert x.grad.tolist() == [1, 1]


# ---------------------------------------------------------------- torch.func, checkpointing, autocast


def test_functional_transforms():
    from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

    def run(d):
        x = torch.linspace(0.1, 1, 6, device=d).view(2, 3)
        w = torch.linspace(-1, 1, 12, device=d).view(3, 4)
        f = lambda x: (x.sin() * x.cos().sum()).sum()  # noqa: E731
        m = nn.Linear(3, 2)
        params = {k: torch.full_like(v, 0.5, device=d) for k, v in m.named_parameters()}

        def loss(params, x):
            return functional_call(m, params, (x,)).square().sum()

        per_sample = vmap(grad(loss), in_dims=(None, 0))(params, x)
        out, tangent = jvp(f, (x,), (torch.ones_like(x),))
        return (
            grad(f)(x), vmap(lambda row: row @ w)(x), vmap(grad(f))(x), out, tangent,
            vjp(f, x)[1](torch.ones((), device=d))[0], jacrev(lambda x: x.exp())(x[0]), jacfwd(lambda x: x.exp())(x[0]),
            hessian(f)(x[0]), per_sample["weight"], per_sample["bias"],
            vmap(lambda a, b: (a * b).sum(), in_dims=(0, None))(x, x[0]), vmap(torch.cumsum, in_dims=(0, None))(x, 0),
        )  # fmt: skip

    both(run)


def test_vmap_with_randomness():
    from torch.func import vmap

    x = torch.zeros(3, 100, device=DEVICE)
    different = vmap(lambda r: r + torch.rand_like(r), randomness="different")(x)
    same = vmap(lambda r: r + torch.rand(100, device=DEVICE), randomness="same")(x)
    assert not torch.equal(different[0], different[1]) and torch.equal(same[0], same[1])


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(reentrant):
    m = model().to(DEVICE).eval()
    twin = copy.deepcopy(m)
    x = torch.randn(4, 3, device=DEVICE, requires_grad=True)
    torch.utils.checkpoint.checkpoint(m, x, use_reentrant=reentrant).sum().backward()
    g = x.grad.clone()
    x.grad = None
    twin(x).sum().backward()
    assert torch.equal(g.cpu(), x.grad.cpu())
    assert all(torch.equal(a.grad.cpu(), b.grad.cpu()) for a, b in zip(m.parameters(), twin.parameters(), strict=True))


def test_autocast_bfloat16():
    m, x = model().to(DEVICE), torch.randn(4, 3, device=DEVICE)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        h = m[0](x)
        assert h.dtype == torch.bfloat16 and (x @ x.t()).dtype == torch.bfloat16
        assert h.softmax(1).dtype == h.sum().dtype == h.exp().dtype == torch.float32
        assert F.mse_loss(h, h).dtype == torch.float32 and (h + h.sum(0)).dtype == torch.float32
        assert torch.cat([h, h.float()]).dtype == torch.float32
        loss = m(x).float().square().mean()
        with torch.autocast(DEVICE, enabled=False):
            assert (x @ x.t()).dtype == torch.float32
    loss.backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in m.parameters())
    full = m(x).square().mean()
    assert abs(loss.item() - full.item()) < 0.05 * abs(full.item()) + 0.01
    assert torch.is_autocast_enabled(DEVICE) is False and torch.get_autocast_dtype(DEVICE) == torch.bfloat16


def test_autocast_float16_with_scaler():
    torch.manual_seed(0)
    m = nn.Linear(4, 1).to(DEVICE)
    start = m.weight.detach().clone()
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**10, growth_interval=2)
    x = torch.ones(8, 4, device=DEVICE)
    for _ in range(2):
        optimizer.zero_grad()
        with torch.autocast(DEVICE, dtype=torch.float16):
            out = m(x)
        assert out.dtype == torch.float16
        scaler.scale(out.float().mean()).backward()
        scaler.unscale_(optimizer)
        assert torch.allclose(m.weight.grad.cpu(), torch.ones(1, 4))
        nn.utils.clip_grad_norm_(m.parameters(), 10.0)
        scaler.step(optimizer)
        scaler.update()
    assert torch.allclose((start - m.weight).detach().cpu(), torch.full((1, 4), 0.2), atol=1e-6)
    assert scaler.get_scale() == 2.0**11
    before = m.weight.detach().clone()
    optimizer.zero_grad()
    scaler.scale((m(x) * float("inf")).sum()).backward()
    scaler.step(optimizer)  # skipped
    scaler.update()
    assert torch.equal(m.weight.detach().cpu(), before.cpu()) and scaler.get_scale() == 2.0**10


def test_autocast_caches_and_custom_functions():
    class Double(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type=DEVICE, cast_inputs=torch.float32)
        def forward(ctx, x):
            assert x.dtype == torch.float32 and not torch.is_autocast_enabled(DEVICE)
            return x * 2

        @staticmethod
        @torch.amp.custom_bwd(device_type=DEVICE)
        def backward(ctx, g):
            return g * 2

    x = torch.ones(2, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
    with torch.autocast(DEVICE):
        Double.apply(x).sum().backward()
    assert x.grad.tolist() == [2, 2]


def test_matmul_precision():
    """bfloat16 passes show in the result where they are allowed, on platforms that have them; "highest" is true float32."""
    torch.manual_seed(0)
    a, b = torch.randn(128, 128), torch.randn(128, 128)
    exact = a.double() @ b.double()
    for name in ("highest", "high", "default"):
        with torch.tpu.precision(name):
            error = ((a.to(DEVICE) @ b.to(DEVICE)).cpu() - exact).abs().max().item()
        assert error < {"highest": 1e-4, "high": 2e-3, "default": 0.5}[name]


# ---------------------------------------------------------------- subclasses, meta tensors, odds and ends


def test_subclasses_and_modes():
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    class Tagged(torch.Tensor):
        pass

    x = torch.ones(2, device=DEVICE).as_subclass(Tagged)
    assert isinstance(x + 1, Tagged) and (x + 1).is_tpu and "Tagged" in repr(x)
    seen = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, f, types, args=(), kwargs=None):
            seen.append(str(f))
            return f(*args, **(kwargs or {}))

    class Nothing(TorchFunctionMode):
        def __torch_function__(self, f, types, args=(), kwargs=None):
            return f(*args, **(kwargs or {}))

    with Record(), Nothing():
        torch.ones(2, device=DEVICE).add_(1)
    assert "aten.add_.Tensor" in seen


def test_fake_and_meta_tensors():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.ones(2, 3, device=DEVICE)
        y = (x @ x.t()).relu()
        assert y.device.type == DEVICE and y.shape == (2, 2)
    assert torch.empty(2, device="meta").to("meta").is_meta


def test_weak_references_and_memory():
    torch.tpu.synchronize()
    before = torch.tpu.memory_allocated()
    x = torch.ones(1000, device=DEVICE)
    r = weakref.ref(x)
    storage = x.untyped_storage()
    del x
    assert r() is None and storage.nbytes() == 4000
    del storage
    torch.tpu.synchronize()
    assert torch.tpu.memory_allocated() == before


def test_storages():
    x = torch.arange(4.0, device=DEVICE)
    s = x.untyped_storage()
    assert s.device == x.device and s.nbytes() == 16 and len(s) == 16 and not s.is_pinned()
    assert s.cpu().tolist()[:8] == [0, 0, 0, 0, 0, 0, 0x80, 0x3F]
    assert s.clone().data_ptr() != s.data_ptr()
    y = torch.empty(0, device=DEVICE).set_(s, 1, (2,))
    y.fill_(7)
    assert x.tolist() == [0, 7, 7, 3]
    assert torch.UntypedStorage(8, device=DEVICE).nbytes() == 8


def test_quantised_tensors_say_so():
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.quantize_per_tensor(torch.ones(2, device=DEVICE), 0.1, 0, torch.qint8)


def test_module_devices():
    m = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Embedding(3, 2)}).tpu()
    assert {p.device.type for p in m.parameters()} == {DEVICE}
    m.cpu()
    assert {p.device.type for p in m.parameters()} == {"cpu"}
    rnn = nn.LSTM(2, 3).to(DEVICE)
    rnn.flatten_parameters()
    packed = nn.utils.rnn.pack_padded_sequence(torch.ones(3, 2, 2, device=DEVICE), torch.tensor([3, 2]))
    out, _ = nn.utils.rnn.pad_packed_sequence(rnn(packed)[0])
    assert out.shape == (3, 2, 3) and out.is_tpu


def test_parametrizations_and_pruning():
    m = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)).to(DEVICE)
    m(torch.ones(1, 3, device=DEVICE)).sum().backward()
    assert m.parametrizations.weight.original0.grad.is_tpu
    m = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 2)).to(DEVICE)
    m(torch.ones(1, 3, device=DEVICE)).sum().backward()
    import torch.nn.utils.prune as prune

    pruned = prune.l1_unstructured(nn.Linear(4, 4).to(DEVICE), "weight", 0.5)
    assert (pruned.weight == 0).sum().item() == 8


# ---------------------------------------------------------------- results, errors and warnings of odd calls


def deterministic(f):
    torch.use_deterministic_algorithms(True)
    try:
        return f()
    finally:
        torch.use_deterministic_algorithms(False)


def scripted_assignment(x, m):
    x[m] = 5
    return x


ODD_CALLS = {
    "range of float16": lambda d: torch.zeros(3, dtype=torch.float16, device=d).random_(0, 70000),
    "range of uint8": lambda d: torch.zeros(3, dtype=torch.uint8, device=d).random_(0, 300),
    "new memory": lambda d: deterministic(lambda: torch.empty(2, dtype=torch.int32, device=d)),
    "new strided memory": lambda d: deterministic(lambda: torch.empty_strided((2, 2), (1, 2), device=d)),
    "grown memory": lambda d: deterministic(lambda: torch.ones(2, device=d).resize_(4)),
    "lazy clone": lambda d: torch._lazy_clone(torch.ones(3, device=d)).add_(1),
    "count into floats": lambda d: torch.nonzero(torch.ones(3, device=d), out=torch.empty(0, device=d)),
    "byte mask": lambda d: torch.arange(4, device=d)[torch.tensor([1, 0, 1, 0], dtype=torch.uint8, device=d)],
    "byte mask added to": lambda d: torch.zeros(2, device=d).index_put_(
        (torch.tensor([1, 0], dtype=torch.uint8, device=d),), torch.ones((), device=d), accumulate=True
    ),
    "scripted mask": lambda d: torch.jit.script(scripted_assignment)(
        torch.arange(4.0, device=d), torch.arange(4, device=d) > 1
    ),
    "offset of nothing": lambda d: torch.tensor(torch.arange(4, device=d)[2:].set_().storage_offset(), device=d),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ODD_CALLS)
def test_odd_calls(name):
    found = []
    for device in ("cpu", DEVICE):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            result = outcome(ODD_CALLS[name], device)
        found.append((result, [str(w.message).split(" (Triggered")[0] for w in seen]))
    (cpu, warned_cpu), (device, warned_device) = found
    assert warned_device == warned_cpu
    if isinstance(cpu, Exception):
        assert type(device) is type(cpu)
        assert str(cpu).replace("typeFloat", "type Float") in str(device)
    else:
        assert_same(device, cpu, name)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("f", "words"),
    [
        (lambda: torch.eye(2, device=DEVICE).to_mkldnn(), ("aten::to_mkldnn", "mkldnn layout")),
    ],
)
def test_what_the_device_has_not_is_named(f, words):
    with pytest.raises(NotImplementedError) as e:
        f()
    assert all(word in str(e.value) for word in words)


# ---------------------------------------------------------------- dtypes that StableHLO has not

BITS = [torch.complex32, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu, torch.bits8, torch.bits16]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", BITS, ids=str)
def test_dtypes_that_are_kept_as_bits(dtype):
    """They are copied and shown; their arithmetic runs on the CPU."""
    whole = torch.arange(4 * 6 * dtype.itemsize, dtype=torch.uint8).view(dtype)
    for f in (
        lambda x: x.view(4, 6),
        lambda x: x.view(4, 6)[1:, ::2],
        lambda x: x.view(4, 6).t(),
        lambda x: x.view(torch.uint8),
        lambda x: x.view(4, 6).t().clone(),
        lambda x: torch.empty_like(x).copy_(x),
        lambda x: torch.cat([x, x]),
    ):
        cpu, device = f(whole.clone()), f(whole.to(DEVICE))
        assert device.dtype == cpu.dtype and device.stride() == cpu.stride()
        assert torch.equal(bits(device), bits(cpu))
    x = torch.empty(24, dtype=dtype, device=DEVICE)
    x[3:5] = whole[3:5]
    assert torch.equal(bits(x)[3 * dtype.itemsize : 5 * dtype.itemsize], bits(whole[3:5]))


def complex_halves(device):
    return torch.view_as_complex(torch.arange(8.0, device=device).half().view(4, 2))


COMPLEX32 = {
    "from parts": complex_halves,
    "complex": lambda d: torch.complex(torch.ones(2, device=d).half(), torch.arange(2.0, device=d).half()),
    "polar": lambda d: torch.polar(torch.ones(2, device=d).half(), torch.zeros(2, device=d).half()),
    "chalf": lambda d: torch.arange(3.0, device=d).chalf(),
    "to complex64": lambda d: complex_halves(d).to(torch.complex64),
    "from complex64": lambda d: (torch.arange(3.0, device=d) * 1j).to(torch.complex32),
    "into complex64": lambda d: torch.zeros(4, dtype=torch.complex64, device=d).copy_(complex_halves(d)),
    "conj": lambda d: complex_halves(d).conj(),
    "resolved conj": lambda d: complex_halves(d).conj().resolve_conj(),
    "cloned conj": lambda d: complex_halves(d).conj().clone(),
    "part of conj": lambda d: complex_halves(d).conj().imag,
    "conj to complex64": lambda d: complex_halves(d).conj().to(torch.complex64),
    "copied into conj": lambda d: complex_halves(d).conj().copy_(complex_halves(d)),
    "product of conj": lambda d: complex_halves(d).conj() * 2,
    "real": lambda d: complex_halves(d).real.mul_(2),
    "sum": lambda d: complex_halves(d).add_(1j),
    "half times complex": lambda d: torch.arange(3.0, device=d).half() * 1j,
    "half times 0-d complex": lambda d: torch.arange(3.0, device=d).half() * torch.tensor(1j, device=d),
    "half times complex64": lambda d: torch.arange(3.0, device=d).half() * torch.tensor([1j], device=d),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", COMPLEX32)
def test_complex32(name):
    cpu, device = COMPLEX32[name]("cpu"), COMPLEX32[name](DEVICE)
    assert device.dtype == cpu.dtype and device.is_conj() == cpu.is_conj() and device.stride() == cpu.stride()
    assert torch.equal(bits(device), bits(cpu)), (device, cpu)


@pytest.mark.filterwarnings("ignore:aten")
@pytest.mark.parametrize("number", [2**64 - 1, 2**63, 2**63 - 1])
def test_numbers_of_uint64(number):
    x = torch.tensor([3, 2**64 - 1, 2**63, 2**63 - 1], dtype=torch.uint64)
    for f in (
        lambda x: x.eq(number),
        lambda x: x != number,
        lambda x: x.clone().fill_(number),
        lambda x: torch.full((2,), number, dtype=torch.uint64, device=x.device),
    ):
        assert_same(f(x.to(DEVICE)), f(x))
