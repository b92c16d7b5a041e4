"""Indexing, joining, moving and making tensors, and the strides of results."""

import pytest
import torch
import torch.nn.functional as F
from rows import ALL, EMPTY, EXACT, FLOATS, Row, aten, ints, run
from support import DEVICE, assert_same, to_device


def test_linspace_of_integers():
    for first, last, steps in ((50, 1, 50), (0, 7, 23), (-5, 99, 50)):
        got, expected = (torch.linspace(first, last, steps, dtype=torch.int64, device=d) for d in (DEVICE, "cpu"))
        assert_same(got, expected, f"{first} {last} {steps}")


def test_as_strided_scatter_writes_where_the_storage_is():
    def f(x):
        return x[:, ::2].as_strided_scatter(torch.ones(2, 2, device=x.device), (2, 2), (3, 1), 1)

    x = torch.rand(4, 6)
    assert_same(f(x.to(DEVICE)), f(x))


TRANSFORMS = {
    "one": lambda x: torch.fft.fftn(x, dim=[1]),
    "two": lambda x: torch.fft.fftn(x, dim=[2, 0]),
    "real": lambda x: torch.fft.rfftn(x, dim=[0, 2]),
    "real, the other way": lambda x: torch.fft.rfftn(x, dim=[2, 0]),
    "to real": lambda x: torch.fft.irfftn(x, dim=[2, 0]),
    "to real, one": lambda x: torch.fft.irfftn(x, dim=[1]),
    "hermitian": lambda x: torch.fft.hfftn(x, dim=[0, 1]),
    "all": torch.fft.fftn,
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_strides_of_fourier_transforms(name):
    plain = torch.rand(3, 4, 5, 2, generator=torch.Generator().manual_seed(1))
    for x in (plain, plain.transpose(0, 2), plain.permute(3, 1, 0, 2)):
        assert_same(TRANSFORMS[name](to_device(x)), TRANSFORMS[name](x), f"{x.stride()}", rtol=1e-4, atol=1e-4)


def test_strides_of_unique_slices():
    x = torch.randint(3, (5, 40, 2), generator=torch.Generator().manual_seed(1))
    for dim in (0, 1, 2, None):
        for f in (torch.unique, torch.unique_consecutive):
            got, expected = f(x.to(DEVICE), dim=dim, return_inverse=True), f(x, dim=dim, return_inverse=True)
            for g, e in zip(got, expected, strict=True):
                assert_same(g, e, f"{f.__name__} {dim}")


def test_gradients_of_determinants_in_other_strides():
    x = torch.eye(3) + torch.rand(2, 3, 3, generator=torch.Generator().manual_seed(1)) / 5
    for f in (torch.linalg.det, lambda x: torch.linalg.slogdet(x)[1], torch.linalg.inv):
        results = []
        for device in ("cpu", DEVICE):
            leaf = x.mT.contiguous().to(device).mT.detach().requires_grad_()
            f(leaf).sum().backward()
            results.append(leaf.grad.cpu())
        torch.testing.assert_close(results[1], results[0])


# ---------------------------------------------------------------- indexing

MASK = torch.tensor([[True, False, True, False, False], [False] * 5, [True] * 5, [False, True, False, True, True]])
INDEXING = {
    "embedding": Row(lambda i, w: F.embedding(i, w), [ints([0, 2], [3, 3]), (4, 5)], FLOATS),
    "embedding padding": Row(lambda i, w: F.embedding(i, w, padding_idx=3), [ints([0, 2], [3, 3]), (4, 5)], EXACT),
    "embedding scaled": Row(lambda i, w: F.embedding(i, w, scale_grad_by_freq=True), [ints([0, 2], [3, 3]), (4, 5)], EXACT),
    "embedding int32": Row(lambda i, w: F.embedding(i.int(), w), [ints(1, 0), (4, 5)], EXACT),
    "embedding_bag": Row(lambda i, w: [F.embedding_bag(i, w, mode=m) for m in ("sum", "mean", "max")], [ints([0, 2], [3, 3]), (4, 5)], EXACT),
    "index": Row(lambda x, i: [x[i], x[:, i], x[i, i], x[i[:, None], i], x[..., i]], [(4, 5), ints(0, 3, 3)], [*FLOATS, torch.int64, torch.bool]),
    "index negative": Row(lambda x, i: [x[i], x[:, i]], [(4, 5), ints(-1, -4)], [torch.float32]),
    "index mixed": Row(lambda x, i: [x[i, :, i], x[:, i, 1], x[None, i], x[1, i, ..., 0]], [(4, 5, 6), ints(0, 3, 3)], [torch.float32]),
    "index nothing": Row(lambda x, i: [x[i], x[:, i]], [(4, 5), torch.empty(0, dtype=torch.int64)], [torch.float32]),
    "boolean index": Row(lambda x, m: [x[m], x[m[:, 0]], x[:, m[0]], x[~m]], [(4, 5), MASK], [*FLOATS, torch.int64]),
    "masked_select": Row(lambda x, m: torch.masked_select(x, m), [(4, 5), MASK], [*FLOATS, torch.int64]),
    "nonzero": Row(lambda x: [x.nonzero(), *x.nonzero(as_tuple=True), torch.argwhere(x)], [(4, 5)], [torch.float32, torch.int64, torch.bool], [[()], [(0,)]], low=0, high=1.4, grad=False),
    "index_put": Row(lambda x, i, v: x.index_put((i, i), v), [(4, 5), ints(0, 3, 2), (3,)], [*FLOATS, torch.int64]),
    "index_put accumulate": Row(lambda x, i, v: x.index_put((i,), v, accumulate=True), [(4, 5), ints(0, 3, 3), (3, 5)], [*EXACT, torch.int64]),
    "index_put mask": Row(lambda x, m, v: x.index_put((m,), v), [(4, 5), MASK, ()], EXACT),
    "masked_fill": Row(lambda x, m: [x.masked_fill(m, 2.0), x.masked_fill(m[:, :1], -1)], [(4, 5), MASK], [*FLOATS, torch.int64]),
    "masked_fill tensor": Row(lambda x, m, v: x.masked_fill(m, v), [(4, 5), MASK, ()], EXACT),
    "masked_scatter": Row(lambda x, m, v: x.masked_scatter(m, v), [(4, 5), MASK, (4, 5)], EXACT),
    "gather": Row(lambda x, i: [x.gather(0, i), x.gather(1, i), torch.take_along_dim(x[:2], i, 1)], [(4, 5), ints([0, 3, 1], [2, 2, 0])], [*FLOATS, torch.int64], [[(4, 5), torch.empty(0, 3, dtype=torch.int64)]]),
    "gather 0-dim": Row(lambda x, i: x.gather(0, i), [(), torch.tensor(0)], [torch.float32]),
    "scatter": Row(lambda x, i, s: [x.scatter(0, i, s), x.scatter(1, i, s)], [(4, 5), ints([0, 3, 1], [2, 2, 0]), (2, 3)], [torch.int64], grad=False),
    "scatter unique": Row(lambda x, i, s: [x.scatter(1, i, s), x.scatter(1, i, 2.5)], [(4, 5), ints([0, 3, 1], [2, 4, 0]), (2, 3)], FLOATS),
    "scatter_add": Row(lambda x, i, s: x.scatter_add(1, i, s), [(4, 5), ints([0, 3, 3], [2, 2, 0]), (2, 3)], [*EXACT, torch.int64]),
    "scatter_reduce": Row(lambda x, i, s: [x.scatter_reduce(1, i, s, m) for m in ("sum", "amax", "amin", "prod", "mean")] + [x.scatter_reduce(1, i, s, "amax", include_self=False)], [(4, 5), ints([0, 3, 3], [2, 2, 0]), (2, 3)], EXACT, low=1),
    "index_select": Row(lambda x, i: [x.index_select(0, i), x.index_select(1, i)], [(4, 5), ints(0, 3, 3)], [*FLOATS, torch.int64]),
    "index_add": Row(lambda x, i, s: x.index_add(0, i, s, alpha=2), [(4, 5), ints(0, 3, 3), (3, 5)], [*EXACT, torch.int64]),
    "index_copy": Row(lambda x, i, s: [x.index_copy(0, i, s), x.index_fill(0, i, 7)], [(4, 5), ints(0, 3, 2), (3, 5)], EXACT),
    "take": Row(lambda x, i: [x.take(i), x.put(i, i.to(x.dtype))], [(4, 5), ints(0, 19, 7)], EXACT),
    "one_hot": Row(lambda i: [F.one_hot(i, 4), F.one_hot(i)], [ints([0, 3], [1, 2])], [torch.float32], grad=False, layouts=False),
    "tril": Row(lambda x: [x.tril(), x.triu(1), x.tril(-1), torch.triu(x, -2)], [(4, 5)], [*FLOATS, torch.int64, torch.bool], [[(2, 3, 3)], [(0, 3)]]),
    "diag": Row(lambda x: [x.diagonal(), torch.diag_embed(x), x.diagonal(1), torch.diagflat(x)], [(3, 4)], [torch.float32, torch.int64]),
    "bucketize": Row(lambda x: [torch.searchsorted(torch.tensor([-1.0, 0, 1], device=x.device), x), torch.bucketize(x, torch.tensor([-1.0, 0, 1], device=x.device), right=True)], [(4, 5)], [torch.float32], grad=False),
    "bincount": Row(lambda i: [torch.bincount(i), torch.bincount(i, minlength=9)], [ints(0, 3, 3, 5)], [torch.float32], grad=False, layouts=False),
    "unique": Row(lambda x: [torch.unique(x), *torch.unique(x, return_inverse=True, return_counts=True)], [(4, 5)], [torch.int64, torch.float32], low=0, high=3, grad=False),
    "repeat_interleave": Row(lambda x, r: [x.repeat_interleave(2), x.repeat_interleave(r, dim=0), x.repeat_interleave(3, dim=1)], [(3, 2), ints(2, 0, 1)], [torch.float32, torch.int64]),
}  # fmt: skip


@pytest.mark.parametrize("name", INDEXING)
def test_indexing(name):
    run(INDEXING[name])


def test_item_assignment():
    def assign(x, i, m, v):
        x[1] = 5
        x[:, 0] = v
        x[i] = 7
        x[i, i] = v[0]
        x[m] = -1
        x[..., -1] = torch.arange(4, device=x.device).to(x.dtype)
        x[2:, 1:3] += 1
        x[[0, 1], 2] = 9
        x[None, 0, 0] = 3
        return x

    for dtype in (torch.float32, torch.int64, torch.bfloat16):
        row = Row(assign, [(4, 5), ints(0, 3), MASK, (4,)], [dtype], grad=False)
        run(row)


# ---------------------------------------------------------------- joining, moving, making

MOVING = {
    "cat": Row(lambda x, y: [torch.cat([x, y]), torch.cat([x, y, x], 0)], [(2, 3), (4, 3)], ALL, [[(0, 3), (4, 3)], [(0,), (2, 3)]]),
    "cat dim": Row(lambda x, y: torch.cat([x, y], -1), [(2, 3), (2, 1)], FLOATS),
    "cat types": Row(lambda x: torch.cat([x, x.int(), x.double()]), [(3,)], [torch.float32]),
    "stack": Row(lambda x, y: [torch.stack([x, y]), torch.stack([x, y], -1), torch.hstack([x, y]), torch.vstack([x, y]), torch.dstack([x, y])], [(2, 3), (2, 3)], [torch.float32, torch.int64], [[(), ()]]),
    "split": Row(lambda x: [*x.split(2), *x.chunk(2, 1), *x.split([1, 2], 1), *x.unbind(1), *x.tensor_split(3)], [(5, 3)], ALL),
    "flip": Row(lambda x: [x.flip(0), x.flip((0, 1)), x.fliplr(), x.rot90()], [(2, 3)], ALL),
    "roll": Row(lambda x: [x.roll(1), x.roll((1, -1), (0, 1)), x.roll(5, 1)], [(2, 3)], ALL),
    "repeat": Row(lambda x: [x.repeat(2, 1), x.repeat(2, 1, 3), x.tile(2), x.expand(4, 2, 3).clone()], [(2, 3)], ALL),
    "permute": Row(lambda x: [x.permute(2, 0, 1) + 1, x.transpose(0, 2).contiguous(), x.movedim(0, -1).clone()], [(2, 3, 4)], [torch.float32]),
    "reshape": Row(lambda x: [x.reshape(6, 4), x.flatten(1), x.t().reshape(-1) if x.dim() == 2 else x.mT.reshape(-1)], [(2, 3, 4)], ALL),
    "meshgrid": Row(lambda x, y: [*torch.meshgrid(x, y, indexing="ij"), torch.cartesian_prod(x, y)], [(2,), (3,)], [torch.float32]),
    "select_scatter": Row(lambda x, y: [x.select_scatter(y, 0, 1), x.slice_scatter(y[None], 0, 1, 2), x.diagonal_scatter(y[:2])], [(2, 3), (3,)], EXACT, strides="PyTorch copies the gaps of a view too"),
    "clone": Row(lambda x: [x.clone(), x.contiguous(), x.clone(memory_format=torch.contiguous_format)], [(2, 3)], ALL, EMPTY),
    "like": Row(lambda x: [torch.zeros_like(x), torch.ones_like(x), torch.full_like(x, 3), torch.zeros_like(x, dtype=torch.int32), x.new_ones(2, 2), x.new_full((2,), 5), x.new_tensor([1, 2])], [(2, 3)], ALL, EMPTY, grad=False),
    "unsafe index": Row(lambda x: [aten._unsafe_index(x, [None, torch.tensor([2, 0], device=x.device)]), aten._unsafe_index_put(x, [torch.tensor([1, 1], device=x.device)], x, True)], [(2, 3)], EXACT),
    "sort": Row(lambda x: [*x.sort(), *x.sort(0, descending=True), x.argsort(dim=1, stable=True), x.msort()], [(4, 5)], [torch.float32, torch.bfloat16], [[()], [(0,)], [(3, 0)]]),
    "sort stable": Row(lambda x: [*x.sort(stable=True), *x.sort(0, descending=True, stable=True)], [(9, 5)], [torch.int64, torch.int32, torch.bool], low=0, high=3, grad=False),
    "topk": Row(lambda x: [*x.topk(2), *x.topk(3, 0, largest=False), x.topk(2, sorted=True)[0]], [(4, 5)], [torch.float32, torch.float64]),
    "kthvalue": Row(lambda x: [*x.kthvalue(2), *x.kthvalue(1, 0)], [(4, 5)], EXACT),
    "cdist": Row(lambda x, y: torch.cdist(x, y), [(3, 4), (5, 4)], EXACT, tolerance={torch.float32: (1e-4, 1e-4)}),
    "cross": Row(lambda x, y: torch.linalg.cross(x, y), [(4, 3), (4, 3)], EXACT),
}  # fmt: skip


@pytest.mark.parametrize("name", MOVING)
def test_joining_moving_sorting(name):
    run(MOVING[name])


CREATION = {
    "zeros": lambda d: torch.zeros(2, 3, device=d),
    "ones int": lambda d: torch.ones(2, dtype=torch.int32, device=d),
    "full": lambda d: torch.full((2, 2), 1.5, device=d),
    "full int": lambda d: torch.full((2,), 7, device=d),
    "full bool": lambda d: torch.full((2,), True, device=d),
    "full complex": lambda d: torch.full((2,), 1 + 2j, device=d),
    "arange": lambda d: torch.arange(5, device=d),
    "arange float": lambda d: torch.arange(1, 2, 0.3, device=d),
    "arange down": lambda d: torch.arange(5, -5, -3, device=d),
    "arange empty": lambda d: torch.arange(3, 3, device=d),
    "arange bf16": lambda d: torch.arange(5, device=d, dtype=torch.bfloat16),
    "linspace": lambda d: torch.linspace(-1, 2, 7, device=d),
    "linspace one": lambda d: torch.linspace(-1, 2, 1, device=d),
    "logspace": lambda d: torch.logspace(0, 2, 5, device=d),
    "eye": lambda d: torch.eye(3, 4, device=d),
    "tensor": lambda d: torch.tensor([[1, 2], [3, 4]], device=d),
    "tensor number": lambda d: torch.tensor(2.5, device=d),
    "tensor empty": lambda d: torch.tensor([], device=d),
    "tril_indices": lambda d: torch.tril_indices(3, 4, device=d),
    "hann_window": lambda d: torch.hann_window(5, device=d),
    "scalar_tensor": lambda d: torch.scalar_tensor(3, device=d),
    "empty_strided": lambda d: torch.empty_strided((2, 3), (1, 2), device=d).fill_(1),
    "channels_last": lambda d: torch.empty(2, 3, 4, 4, device=d, memory_format=torch.channels_last).fill_(1),
    "as_tensor": lambda d: torch.as_tensor([1.0, 2.0], device=d),
    "asarray": lambda d: torch.asarray([1.0, 2.0], device=d),
    "complex": lambda d: torch.tensor([1 + 1j], device=d),
}


@pytest.mark.parametrize("name", CREATION)
def test_creation(name):
    assert_same(CREATION[name](DEVICE), CREATION[name]("cpu"), name)


def test_default_dtype():
    try:
        torch.set_default_dtype(torch.float64)
        for f in (lambda d: torch.ones(2, device=d), lambda d: torch.arange(2, device=d) / 2, lambda d: torch.rand(2, device=d) * 0,
                  lambda d: torch.tensor(1.5, device=d) * torch.tensor([1], device=d)):  # fmt: skip
            assert_same(f(DEVICE), f("cpu"))
    finally:
        torch.set_default_dtype(torch.float32)
