"""Storages that are set, resized, swapped, saved and copied: who shares one stays as on the CPU."""

import copy
import io
import pickle

import pytest
import torch
from support import DEVICE

# ---------------------------------------------------------------- named cases


def test_flat_parameter_freed_and_regrown(device):
    """FSDP frees the storage between uses; the views stay and show what is written after it is there again."""
    flat = torch.arange(6.0, device=device)
    view = flat[2:5]
    size = flat.untyped_storage().nbytes()
    flat.untyped_storage().resize_(0)
    assert flat.untyped_storage().nbytes() == 0 and flat.shape == (6,)
    flat.untyped_storage().resize_(size)
    flat.copy_(torch.arange(10.0, 16.0, device=device))
    assert view.tolist() == [12, 13, 14]


def test_data_and_detach(device):
    p = torch.nn.Parameter(torch.ones(3, device=device))
    p.data[1] = 5
    p.detach().mul_(2)
    assert p.tolist() == [2, 10, 2] and p._version == 1  # `.data` does not count, `detach` does
    new = torch.zeros(2, 2, device=device)
    p.data = new
    assert p.shape == (2, 2) and p.requires_grad and p.data_ptr() == new.data_ptr()
    new.fill_(3)
    assert p.tolist() == [[3, 3], [3, 3]]


def test_swapping_data(device):
    a, b = torch.zeros(2, device=device), torch.ones(3, device=device)
    view = a[:1]
    a.data, b.data = b.data, a.data
    assert a.tolist() == [1, 1, 1] and b.tolist() == [0, 0]
    view.fill_(7)
    assert b.tolist() == [7, 0]
    p, q = torch.nn.Parameter(a), torch.nn.Parameter(b)
    torch.utils.swap_tensors(p, q)
    assert p.tolist() == [7, 0] and q.tolist() == [1, 1, 1]


def test_set(device):
    a, b = torch.zeros(4, device=device), torch.arange(4.0, device=device)
    view = a[1:]
    a.set_(b)
    a[0] = 9
    assert b.tolist() == [9, 1, 2, 3] and view.tolist() == [0, 0, 0]
    a.set_(b.untyped_storage(), 1, (2,), (2,))
    assert a.tolist() == [1, 3]
    a.set_()
    assert a.shape == (0,) and a.untyped_storage().nbytes() == 0
    part = torch.arange(5.0, device=device)[2:4]
    part.set_()
    assert part.shape == (0,) and part.storage_offset() == 0


def test_resize(device):
    a = torch.arange(6.0, device=device)
    b = a[1:3]
    a.resize_(2, 2)
    assert a.tolist() == [[0, 1], [2, 3]] and a.untyped_storage().nbytes() == 24
    a.resize_(3, 4)
    assert a.untyped_storage().nbytes() == 48 and a.flatten()[:6].tolist() == [0, 1, 2, 3, 4, 5]
    b.fill_(7)
    assert a.flatten()[:4].tolist() == [0, 7, 7, 3]  # still one storage
    b.resize_(4)
    assert b.tolist() == [7, 7, 3, 4]
    c = torch.zeros(2, 3, 4, 5, device=device).resize_(2, 3, 2, 2, memory_format=torch.channels_last)
    assert c.stride() == (12, 1, 6, 3)
    assert a.resize_as_(torch.zeros(2, device=device)).shape == (2,)


def test_set_grows_the_storage(device):
    a = torch.arange(4.0, device=device)
    b = torch.empty(0, device=device)
    b.set_(a.untyped_storage(), 1, [2, 2], [3, 1])  # the last place is 5
    assert a.untyped_storage().nbytes() == 24
    b.fill_(7)
    assert a.tolist() == [0, 7, 7, 3] and b.tolist() == [[7, 7], [7, 7]]


def test_storage_resize_keeps_bytes(device):
    a = torch.arange(4.0, device=device)
    a.untyped_storage().resize_(8)
    a.untyped_storage().resize_(16)
    assert a[:2].tolist() == [0, 1]
    a.untyped_storage().resize_(1024)
    assert a[:2].tolist() == [0, 1] and a.untyped_storage().nbytes() == 1024


def test_a_tensor_over_a_shrunk_storage_is_an_error():
    """On the CPU this is undefined; on the device it must be an exception, not a crash."""
    a = torch.arange(64.0, device=DEVICE)
    a.untyped_storage().resize_(0)
    for f in (
        lambda: a + 1,
        lambda: a.add_(1),
        lambda: a.cpu(),
        lambda: a[3].item(),
        lambda: repr(a),
        lambda: a.clone(),
    ):
        with pytest.raises(RuntimeError, match="storage"):
            f()


# ---------------------------------------------------------------- copies that keep or cut aliasing


def test_saving_keeps_aliasing(device):
    a = torch.arange(6.0, device=device)
    saved = {"a": a, "row": a.view(2, 3)[1], "every": a[::2]}
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    back = torch.load(file, weights_only=True)
    assert all(t.device == a.device for t in back.values())
    back["a"][4] = 40
    assert back["row"].tolist() == [3, 40, 5] and back["every"].tolist() == [0, 2, 40]
    assert back["a"].tolist() == [0, 1, 2, 3, 40, 5]
    assert back["row"].stride() == saved["row"].stride() and back["every"].stride() == (2,)
    assert a.tolist() == [0, 1, 2, 3, 4, 5]


def test_deepcopy_keeps_aliasing(device):
    a = torch.arange(4.0, device=device)
    b, v = copy.deepcopy((a, a[1:3]))
    v.fill_(9)
    assert b.tolist() == [0, 9, 9, 3] and a.tolist() == [0, 1, 2, 3]


def test_tied_weights_stay_tied(device):
    m = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False)).to(device)
    m[1].weight = m[0].weight
    n = copy.deepcopy(m)
    assert n[0].weight is n[1].weight and n[0].weight is not m[0].weight
    n = pickle.loads(pickle.dumps(m))
    with torch.no_grad():
        n[0].weight.zero_()
    assert n[1].weight.abs().sum().item() == 0 and m[0].weight.abs().sum().item() > 0


def test_pickled_views(device):
    a = torch.arange(12.0, device=device).view(3, 4)
    for v in (a.t(), a[1], a[:, 1::2], a[2:, 2:], a[0, :0]):
        w = pickle.loads(pickle.dumps(v))
        assert w.tolist() == v.tolist() and w.stride() == v.stride() and w.device == v.device


def test_clone_cuts(device):
    a = torch.arange(6.0, device=device).view(2, 3)
    b, c, d = a.clone(), a.t().contiguous(), a.to(torch.float32, copy=True)
    a.zero_()
    assert b.sum().item() == c.sum().item() == d.sum().item() == 15
    assert a.contiguous() is a and a.to(torch.float32) is a


LAZY_WRITES = {
    "add_": lambda t: t.add_(1),
    "fill_": lambda t: t.fill_(7),
    "copy_": lambda t: t.copy_(torch.arange(4.0) + 9),
    "view": lambda t: t.view(2, 2)[1].mul_(3),
    "setitem": lambda t: t.__setitem__(2, 8.0),
    "out=": lambda t: torch.add(t, 1, out=t),
    "foreach": lambda t: torch._foreach_mul_([t, t.new_ones(2)], 2.0),
    "resize_": lambda t: t.resize_(3).fill_(1),
    "random": lambda t: t.bernoulli_(1.0),
    "on the CPU": lambda t: torch.nn.init.uniform_(t, 1.0, 1.0),
}


@pytest.mark.parametrize("original", [True, False])
@pytest.mark.parametrize("name", LAZY_WRITES)
def test_a_write_to_a_lazy_clone_is_its_own(name, original):
    """The other storage, and what was computed of either, keep their values; both may be written in turn."""
    found = {}
    for device in ("cpu", DEVICE):
        t = torch.arange(4.0, device=device)
        clone = t._lazy_clone()
        second = clone._lazy_clone()
        before = clone + t
        assert torch._C._is_cow_tensor(t) and torch._C._is_cow_tensor(clone)
        first, then = (t, clone) if original else (clone, t)
        LAZY_WRITES[name](first)
        assert not torch._C._is_cow_tensor(first) and torch._C._is_cow_tensor(then)
        LAZY_WRITES["add_"](then)
        LAZY_WRITES["add_"](second)
        found[device] = [first.cpu(), then.cpu(), second.cpu(), before.cpu()]
    for device, cpu in zip(found[DEVICE], found["cpu"], strict=True):
        assert torch.equal(device, cpu), name
