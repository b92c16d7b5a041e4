"""Reductions and matrix products."""

import pytest
import torch
import torch.nn.functional as F
from rows import ALL, BF16_SUM, EMPTY, EXACT, FLOATS, NUMBERS, Row, run
from support import DEVICE

# ---------------------------------------------------------------- reductions

R = (3, 4, 5)
REDUCTIONS = {
    "sum": Row(lambda x: x.sum(), [R], ALL, EMPTY),
    "sum dim": Row(lambda x: [x.sum(1), x.sum((0, 2)), x.sum(-1, keepdim=True)], [R], NUMBERS),
    "sum dtype": Row(lambda x: [x.sum(dtype=torch.float64), x.sum(1, dtype=torch.float32)], [R], NUMBERS),
    "sum of rows of nothing": Row(lambda x: [x.sum(1), x.mean(1), x.prod(1), x.sum(0)], [(2, 0)], grad=False),
    "mean": Row(lambda x: [x.mean(), x.mean(1), x.mean((0, 2), keepdim=True)], [R], FLOATS),
    "prod": Row(
        lambda x: [x.prod(), x.prod(1)], [(3, 4)], [torch.float32, torch.float64, torch.int64], EMPTY[:2], low=1
    ),
    "var": Row(lambda x: [x.var(), x.var(1), x.var((0, 2), unbiased=False), x.var(1, correction=2)], [R]),
    "std": Row(lambda x: [x.std(), x.std(1, keepdim=True), *torch.std_mean(x, 1), *torch.var_mean(x, 0)], [R]),
    "amax": Row(lambda x: [x.amax(), x.amax(1), x.amin((0, 2)), *torch.aminmax(x)], [R], NUMBERS),
    "max": Row(lambda x: [x.max(), *x.max(1)], [R], NUMBERS),
    "min": Row(lambda x: [x.min(), *x.min(-1, keepdim=True)], [R], NUMBERS),
    "argmax": Row(lambda x: [x.argmax(), x.argmax(1), x.argmin(), x.argmin(2, keepdim=True)], [R], NUMBERS, grad=False),
    "any": Row(
        lambda x: [x.any(), x.any(1), x.all(), x.all(1, keepdim=True), x.any((0, 1))], [R], ALL, EMPTY, low=0, high=1
    ),
    "norm": Row(
        lambda x: [
            x.norm(),
            x.norm(dim=1),
            x.norm(p=1),
            x.norm(p=float("inf"), dim=0),
            x.norm(p=3, dim=(1, 2)),
            torch.linalg.vector_norm(x, 0, dim=1),
        ],
        [R],
        EXACT,
    ),
    "logsumexp": Row(lambda x: [x.logsumexp(1), x.logsumexp((0, 2), keepdim=True)], [R]),
    "nansum": Row(lambda x: [torch.nansum(x), torch.nanmean(x, 1)], [R]),
    "count_nonzero": Row(lambda x: [x.count_nonzero(), x.count_nonzero(1)], [R], ALL, low=0, high=2, grad=False),
    "median": Row(lambda x: [x.median(), *x.median(1)], [R], [torch.float32, torch.int64], grad=False),
    "cumsum": Row(lambda x: [x.cumsum(1), x.cumsum(-1)], [R], NUMBERS, [[()], [(0,)]]),
    "cumprod": Row(lambda x: [x.cumprod(1)], [(3, 4)], [torch.float32, torch.float64, torch.int64], low=1),
    "cummax": Row(lambda x: [*x.cummax(1), *x.cummin(0)], [R], [torch.float32, torch.int64], grad=False),
    "logcumsumexp": Row(lambda x: x.logcumsumexp(1), [R], EXACT),
    "trace": Row(lambda x: x.trace(), [(3, 4)], [torch.float32, torch.int64]),
    "diff": Row(lambda x: [x.diff(), x.diff(dim=0)], [R], [torch.float32, torch.int64]),
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions(name):
    run(REDUCTIONS[name])


def test_reductions_out():
    for f, shape in ((torch.sum, (3, 5)), (torch.mean, (3, 5)), (torch.amax, (3, 5)), (torch.logsumexp, (3, 5))):
        for make in (lambda d, s: torch.empty(s, device=d), lambda d, s: torch.zeros(s[::-1], device=d).t(),
                     lambda d, s: torch.empty(0, device=d)):  # fmt: skip
            run(Row(lambda x, f=f, m=make, s=shape: f(x, dim=1, out=m(x.device, s)), [R], [torch.float32], grad=False))


# ---------------------------------------------------------------- matrix products

MATRIX = {
    "mm": Row(lambda a, b: a @ b, [(3, 4), (4, 5)], [*FLOATS, torch.int64, torch.int32, torch.complex64], [[(0, 4), (4, 5)], [(3, 0), (0, 5)], [(3, 4), (4, 0)]]),
    "mv": Row(lambda a, b: [a @ b, b @ a.t()], [(3, 4), (4,)], [*FLOATS, torch.int64], [[(3, 0), (0,)]]),
    "dot": Row(lambda a, b: [a.dot(b), torch.vdot(a, b), torch.inner(a, b)], [(4,), (4,)], [*FLOATS, torch.int64], [[(0,), (0,)]]),
    "outer": Row(lambda a, b: torch.outer(a, b), [(3,), (4,)], [*FLOATS, torch.int64]),
    "bmm": Row(lambda a, b: torch.bmm(a, b), [(2, 3, 4), (2, 4, 5)], [*FLOATS, torch.int64], [[(0, 3, 4), (0, 4, 5)], [(2, 3, 0), (2, 0, 5)]]),
    "bmm of one": Row(lambda a, b: [torch.bmm(a, b), torch.bmm(a.mT, b.mT)], [(1, 8, 8), (1, 8, 8)], FLOATS),
    "bmm of one, transposed": Row(lambda a, b: [a.mT @ b, a.mT.reshape(1, 1, 8, 12) @ b], [(1, 12, 8), (1, 12, 5)], FLOATS),
    "matmul": Row(lambda a, b: a @ b, [(2, 1, 3, 4), (5, 4, 2)], FLOATS, [[(4,), (2, 4, 3)], [(2, 3, 4), (4,)]]),
    "addmm": Row(lambda c, a, b: [torch.addmm(c, a, b), torch.addmm(c, a, b, beta=0.5, alpha=2), torch.addmm(c, a, b, beta=0)], [(5,), (3, 4), (4, 5)], FLOATS),
    "addmv": Row(lambda c, a, b: torch.addmv(c, a, b, beta=2, alpha=3), [(3,), (3, 4), (4,)]),
    "addbmm": Row(lambda c, a, b: [torch.baddbmm(c, a, b, alpha=2), torch.addbmm(c, a, b)], [(3, 5), (2, 3, 4), (2, 4, 5)]),
    "addr": Row(lambda c, a, b: torch.addr(c, a, b), [(3, 4), (3,), (4,)]),
    "linear": Row(lambda x, w, b: [F.linear(x, w, b), F.linear(x, w)], [(2, 3, 4), (5, 4), (5,)], FLOATS, [[(4,), (5, 4), (5,)]]),
    "bilinear": Row(lambda x, y, w: F.bilinear(x, y, w), [(2, 3), (2, 4), (5, 3, 4)], EXACT),
    "einsum": Row(lambda a, b: [torch.einsum("bij,bjk->bik", a, b), torch.einsum("bij,bjk->ik", a, b)], [(2, 3, 4), (2, 4, 5)]),
    "chain": Row(lambda a, b, c: torch.linalg.multi_dot([a, b, c]), [(3, 4), (4, 5), (5, 2)], EXACT),
    "tensordot": Row(lambda a, b: torch.tensordot(a, b, 2), [(2, 3, 4), (3, 4, 5)]),
    "kron": Row(torch.kron, [(2, 3), (3, 2)], [torch.float32, torch.int64]),
    "matrix_power": Row(lambda a: torch.linalg.matrix_power(a, 3), [(3, 3)], EXACT),
}  # fmt: skip
for row in MATRIX.values():
    row.tolerance = BF16_SUM


@pytest.mark.parametrize("name", MATRIX)
def test_matrix_products(name):
    run(MATRIX[name])


def test_matrix_products_out():
    for make in (lambda d: torch.empty(3, 5, device=d), lambda d: torch.zeros(5, 3, device=d).t(),
                 lambda d: torch.zeros(3, 10, device=d)[:, ::2], lambda d: torch.empty(0, device=d)):  # fmt: skip
        run(Row(lambda a, b, m=make: torch.mm(a, b, out=m(a.device)), [(3, 4), (4, 5)], [torch.float32], grad=False))


def test_products_in_true_float32():
    """The default precision is PyTorch's "highest"."""
    a, b = torch.randn(64, 256), torch.randn(256, 64)
    exact = (a.double() @ b.double()).float()
    assert (a.to(DEVICE) @ b.to(DEVICE)).cpu().sub(exact).abs().max() < 2e-4
