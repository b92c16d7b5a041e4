"""What one does with a tensor and a module in Python: numbers, indexing, subclasses, storages, wrappers."""

import weakref

import numpy as np
import pytest
import torch
from support import DEVICE, assert_same
from torch import nn

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
