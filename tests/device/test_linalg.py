"""Linear algebra: decompositions run inside programs and give the CPU's results, strides, dtypes and errors."""

import os

import pytest
import torch
from support import DEVICE, assert_same, outcome, tensors, to_device

aten = torch.ops.aten
L = torch.linalg


def calls_the_library():
    return torch.tpu.platform() == "cpu" and os.environ.get("OXITORCH_LOWER_FOR", "cpu") == "cpu"


library_only = pytest.mark.skipif(
    not calls_the_library(), reason="only programs that run in host memory can call LAPACK"
)


def randn(*shape, dtype):
    return torch.randn(*shape, dtype=dtype)


def positive(*shape, dtype):
    a = randn(*shape, dtype=dtype)
    return a @ a.mH + shape[-1] * torch.eye(shape[-1], dtype=dtype)


def packed(*shape, dtype):
    return tuple(torch.geqrf(randn(*shape, dtype=dtype)))


def ldl(*shape, dtype):
    factors, pivots, _ = L.ldl_factor_ex(positive(*shape, dtype=dtype))
    return factors, pivots


# Name: (function of the arguments, the arguments for sizes before the last two, whether results are unique).
CALLS = {
    "geqrf": (torch.geqrf, lambda b, d: (randn(*b, 5, 3, dtype=d),)),
    "geqrf wide": (torch.geqrf, lambda b, d: (randn(*b, 3, 5, dtype=d),)),
    "qr": (L.qr, lambda b, d: (randn(*b, 5, 3, dtype=d),)),
    "qr complete": (lambda x: L.qr(x, mode="complete"), lambda b, d: (randn(*b, 5, 3, dtype=d),)),
    "qr r": (lambda x: L.qr(x, mode="r"), lambda b, d: (randn(*b, 3, 5, dtype=d),)),
    "qr transposed": (lambda x: L.qr(x.mT), lambda b, d: (randn(*b, 5, 3, dtype=d),)),
    "householder_product": (L.householder_product, lambda b, d: packed(*b, 5, 3, dtype=d)),
    "ormqr": (torch.ormqr, lambda b, d: (*packed(*b, 5, 3, dtype=d), randn(*b, 5, 2, dtype=d))),
    "ormqr right": (
        lambda a, t, x: torch.ormqr(a, t, x, left=False, transpose=True),
        lambda b, d: (*packed(*b, 5, 3, dtype=d), randn(*b, 2, 5, dtype=d)),
    ),
    "eig": (L.eig, lambda b, d: (randn(*b, 4, 4, dtype=d),)),
    "eigvals": (L.eigvals, lambda b, d: (randn(*b, 4, 4, dtype=d),)),
    "eigh": (L.eigh, lambda b, d: (positive(*b, 4, 4, dtype=d),)),
    "eigh upper": (lambda x: L.eigh(x, "U"), lambda b, d: (randn(*b, 4, 4, dtype=d),)),
    "eigvalsh": (L.eigvalsh, lambda b, d: (positive(*b, 4, 4, dtype=d),)),
    "svd": (L.svd, lambda b, d: (randn(*b, 5, 3, dtype=d),)),
    "svd reduced": (lambda x: L.svd(x, full_matrices=False), lambda b, d: (randn(*b, 3, 5, dtype=d),)),
    "svdvals": (L.svdvals, lambda b, d: (randn(*b, 5, 3, dtype=d),)),
    "pinv": (L.pinv, lambda b, d: (randn(*b, 5, 3, dtype=d),)),
    "matrix_rank": (L.matrix_rank, lambda b, d: (randn(*b, 5, 3, dtype=d),)),
    "cond": (L.cond, lambda b, d: (positive(*b, 4, 4, dtype=d),)),
    "nuclear norm": (lambda x: L.matrix_norm(x, "nuc"), lambda b, d: (randn(*b, 5, 3, dtype=d),)),
    "ldl_factor_ex": (L.ldl_factor_ex, lambda b, d: (positive(*b, 4, 4, dtype=d),)),
    "ldl_factor": (lambda x: L.ldl_factor(x, hermitian=True), lambda b, d: (positive(*b, 4, 4, dtype=d),)),
    "ldl_solve": (L.ldl_solve, lambda b, d: (*ldl(*b, 4, 4, dtype=d), randn(*b, 4, 2, dtype=d))),
    "lstsq": (L.lstsq, lambda b, d: (randn(*b, 3, 5, dtype=d), randn(*b, 3, 2, dtype=d))),
    "lstsq gels": (
        lambda a, x: L.lstsq(a, x, driver="gels").residuals,
        lambda b, d: (randn(*b, 5, 3, dtype=d), randn(*b, 5, 2, dtype=d)),
    ),
    "lstsq gelsd": (
        lambda a, x: L.lstsq(a, x, driver="gelsd"),
        lambda b, d: (randn(*b, 3, 5, dtype=d), randn(*b, 3, 2, dtype=d)),
    ),
    "matrix_exp": (torch.matrix_exp, lambda b, d: (randn(*b, 4, 4, dtype=d),)),
    "matrix_exp large": (torch.matrix_exp, lambda b, d: (5 * randn(*b, 4, 4, dtype=d),)),
    "matrix_exp small": (torch.matrix_exp, lambda b, d: (1e-3 * randn(*b, 4, 4, dtype=d),)),
    "cholesky": (L.cholesky, lambda b, d: (positive(*b, 4, 4, dtype=d),)),
    "inv": (L.inv, lambda b, d: (positive(*b, 4, 4, dtype=d),)),
    "solve": (L.solve, lambda b, d: (positive(*b, 4, 4, dtype=d), randn(*b, 4, 2, dtype=d))),
    "lu_factor": (L.lu_factor, lambda b, d: (randn(*b, 4, 4, dtype=d),)),
    "det": (L.det, lambda b, d: (randn(*b, 4, 4, dtype=d),)),
    "slogdet": (L.slogdet, lambda b, d: (randn(*b, 4, 4, dtype=d),)),
}
for name in ("polar", "matrix_sqrth"):  # newer than the oldest torch
    if hasattr(L, name):
        CALLS[name] = (getattr(L, name), lambda b, d: (positive(*b, 4, 4, dtype=d),))

# What no compiler has and no loop is written for.
HOST_ONLY = ("eig", "eigvals", "ldl_factor_ex", "ldl_factor", "ldl_solve")
# Vectors may have other signs than LAPACK gives them.
SIGNED = ("eigh", "eigh upper", "svd", "svd reduced")

CLOSE = {
    torch.float32: {"rtol": 1e-4, "atol": 1e-4},
    torch.complex64: {"rtol": 1e-4, "atol": 1e-4},
    torch.float64: {"rtol": 1e-9, "atol": 1e-9},
    torch.complex128: {"rtol": 1e-9, "atol": 1e-9},
}


def skip_what_only_the_host_has(name):
    if name in HOST_ONLY and not calls_the_library():
        pytest.skip("only programs that run in host memory can call LAPACK")


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_results_are_the_cpus(no_fallback, name, dtype):
    skip_what_only_the_host_has(name)
    f, make = CALLS[name]
    for batch in ((), (2,), (2, 3)):
        args = make(batch, dtype)
        expected, actual = tensors(f(*args)), tensors(f(*to_device(args)))
        assert len(expected) == len(actual) > 0
        for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
            if name in SIGNED and e.ndim > 1 + len(batch) and not calls_the_library():
                assert (a.shape, a.stride()) == (e.shape, e.stride())
            else:
                assert_same(a, e, f"{name} of {batch}, result {i}", **CLOSE[dtype])


# Functions of which every gradient is defined, and that are the same for all choices of signs.
GRADIENTS = {
    "householder_product": CALLS["householder_product"],
    "ormqr": CALLS["ormqr"],
    "qr": CALLS["qr"],
    "eigvals": (lambda x: L.eigvals(x).abs(), CALLS["eigvals"][1]),
    "eigvalsh": CALLS["eigvalsh"],
    "eigh": (lambda x: L.eigh(x)[1].abs(), CALLS["eigh"][1]),
    "svdvals": CALLS["svdvals"],
    "svd": (lambda x: L.svd(x, full_matrices=False)[0].abs(), CALLS["svdvals"][1]),
    "pinv": CALLS["pinv"],
    "lstsq": (lambda a, b: L.lstsq(a, b).solution, CALLS["lstsq"][1]),
    "matrix_exp": CALLS["matrix_exp"],
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_are_the_cpus(no_fallback, name):
    skip_what_only_the_host_has(name)
    f, make = GRADIENTS[name]
    args = [x.detach().requires_grad_() for x in make((2,), torch.float64)]
    moved = to_device(args)
    for xs in (args, moved):
        sum(y.sin().sum() for y in tensors(f(*xs)) if y.requires_grad).backward()
    for i, (a, e) in enumerate(zip(moved, args, strict=True)):
        if e.grad is not None:
            assert_same(a.grad, e.grad, f"gradient {i}", strides=False, rtol=1e-7, atol=1e-7)


EMPTY = {
    "geqrf": (torch.geqrf, [(0, 3), (3, 0), (0, 3, 3), (2, 0, 0)]),
    "qr": (L.qr, [(0, 3), (3, 0), (0, 3, 3), (2, 0, 0)]),
    "qr complete": (lambda x: L.qr(x, mode="complete"), [(0, 3), (3, 0), (2, 3, 0)]),
    "eig": (L.eig, [(0, 0), (0, 3, 3), (2, 0, 0)]),
    "eigvals": (L.eigvals, [(0, 0), (0, 3, 3), (2, 0, 0)]),
    "eigh": (L.eigh, [(0, 0), (0, 3, 3), (2, 0, 0)]),
    "svd": (L.svd, [(0, 3), (3, 0), (0, 3, 3), (2, 0, 0)]),
    "svdvals": (L.svdvals, [(0, 3), (3, 0), (0, 3, 3), (2, 0, 0)]),
    "ldl_factor_ex": (L.ldl_factor_ex, [(0, 0), (0, 3, 3), (2, 0, 0)]),
    "matrix_exp": (torch.matrix_exp, [(0, 0), (0, 3, 3), (2, 0, 0), (1, 1)]),
}


@pytest.mark.parametrize("name", EMPTY)
def test_matrices_without_elements(no_fallback, name):
    f, shapes = EMPTY[name]
    for shape in shapes:
        x = torch.zeros(shape)
        for i, (a, e) in enumerate(zip(tensors(f(to_device(x))), tensors(f(x)), strict=True)):
            assert_same(a, e, f"{name} of {shape}, result {i}")


NAN = torch.full((3, 3), float("nan"))
SINGULAR = torch.ones(3, 3)
INDEFINITE = -torch.eye(3)
ERRORS = {
    "inv": (L.inv, SINGULAR),
    "solve": (lambda x: L.solve(x, x), SINGULAR),
    "cholesky": (L.cholesky, INDEFINITE),
    "tensorinv": (lambda x: L.tensorinv(x.view(3, 3), 1), SINGULAR),
    "eigh": (L.eigh, NAN),
    "eigvalsh": (L.eigvalsh, NAN),
    "svd": (L.svd, NAN),
    "eig": (L.eig, NAN),
    "not square": (L.eig, torch.ones(2, 3)),
    "not a matrix": (L.qr, torch.ones(3)),
    "integers": (L.svd, torch.ones(3, 3, dtype=torch.int32)),
    "half": (L.qr, torch.ones(3, 3, dtype=torch.float16)),
    "unknown mode": (lambda x: L.qr(x, mode="r2"), SINGULAR),
    "unknown triangle": (lambda x: L.eigh(x, "X"), SINGULAR),
    "unknown driver": (lambda x: L.lstsq(x, x, driver="x"), SINGULAR),
    "wide reflections": (lambda x: L.householder_product(x[:2], x[0]), SINGULAR),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_of_the_same_class(name):
    f, x = ERRORS[name]

    def run(x):
        return [t.cpu() for t in tensors(f(x))]

    expected, got = outcome(run, x), outcome(run, to_device(x))
    assert isinstance(expected, Exception)
    assert type(got) is type(expected), repr(got)
    if name not in ("integers", "half"):
        assert str(expected).split(":")[0] in str(got)


def test_info_tells_what_errors_do_not(no_fallback):
    """The forms with `_ex` give `info` and raise only when asked to."""
    x = torch.stack([torch.eye(3), SINGULAR, INDEFINITE])
    for f in (L.inv_ex, L.cholesky_ex, L.lu_factor_ex, L.ldl_factor_ex):
        if f is L.ldl_factor_ex and not calls_the_library():
            continue
        assert f(to_device(x)).info.tolist() == f(x).info.tolist()


@pytest.mark.filterwarnings("ignore:.*runs on the CPU")
@pytest.mark.parametrize("f", [L.inv_ex, L.lu_factor_ex, L.solve_ex, L.cholesky_ex, L.ldl_factor_ex])
def test_info_is_looked_at_when_asked(f):
    """An error at the call that depends on values needs a look at them: the CPU does these."""
    bad = (-torch.eye(3) * torch.tensor([1.0, 0, 1]),) * (2 if f is L.solve_ex else 1)
    expected = outcome(f, *bad, check_errors=True)
    got = outcome(f, *to_device(bad), check_errors=True)
    assert isinstance(expected, RuntimeError)
    assert type(got) is type(expected), repr(got)


@library_only
def test_eigenvalues_of_what_is_not_finite():
    """LAPACK may crash on it; batches that are finite keep their eigenvalues."""
    x = torch.stack([torch.diag(torch.tensor([1.0, 2, 3])), NAN])
    values = L.eigvals(x.to(DEVICE)).cpu()
    assert values[0].real.sort().values.tolist() == [1, 2, 3]
    assert values[1].real.isnan().all()


def test_results_go_where_out_says(no_fallback):
    x = randn(2, 4, 3, dtype=torch.float64)
    for f, shapes in (
        (L.qr, [(2, 4, 3), (2, 3, 3)]),
        (L.svd, [(2, 4, 4), (2, 3), (2, 3, 3)]),
        (torch.geqrf, [(2, 4, 3), (2, 3)]),
    ):
        if f is L.svd and not calls_the_library():
            continue
        out = tuple(torch.empty(s, dtype=x.dtype, device=DEVICE) for s in shapes)
        given = [o.data_ptr() for o in out]
        f(x.to(DEVICE), out=out)
        assert [o.data_ptr() for o in out] == given
        for a, e in zip(out, f(x), strict=True):
            assert_same(a, e, strides=False)


@pytest.mark.parametrize("a, b, left", [
    ((2, 5, 5), (2, 5), True), ((2, 2, 5, 5), (2, 2, 5), True), ((5, 5), (5,), True), ((5, 5), (2, 5, 3), True),
    ((2, 5, 5), (5, 3), True), ((2, 5, 5), (2, 3, 5), False), ((0, 5, 5), (0, 5), True),
])  # fmt: skip
def test_solutions_have_the_cpus_strides(no_fallback, a, b, left):
    args = randn(*a, dtype=torch.float64) + 5 * torch.eye(a[-1], dtype=torch.float64), randn(*b, dtype=torch.float64)
    results = torch.ops.aten._linalg_solve_ex(*to_device(args), left=left)
    for got, want in zip(results, torch.ops.aten._linalg_solve_ex(*args, left=left), strict=True):
        assert_same(got, want)


def test_without_the_library(python):
    """Where programs cannot call LAPACK there are loops, or the CPU, which is counted."""
    code = f"""
import sys, warnings
import torch
sys.path.insert(0, {str(__file__.rpartition("/")[0])!r})
from support import assert_same, tensors, to_device
from test_linalg import CALLS, CLOSE, HOST_ONLY, SIGNED
warnings.simplefilter("ignore")
torch.manual_seed(3)
for name, (f, make) in CALLS.items():
    for dtype in (torch.float32, torch.complex128):
        close = CLOSE[dtype]
        torch.tpu.reset_metrics()
        args = make((2,), dtype)
        for i, (a, e) in enumerate(zip(tensors(f(*to_device(args))), tensors(f(*args)), strict=True)):
            if name in SIGNED and e.ndim > 2:
                assert (a.shape, a.stride()) == (e.shape, e.stride()), name
            else:
                assert_same(a, e, f"{{name}} of {{dtype}}, result {{i}}", **close)
        ran = torch.tpu.metrics()
        assert ran["library_calls"] == 0, name
        assert bool(ran["fallbacks"]) == (name in HOST_ONLY), (name, ran["fallbacks"])
print("done")
"""
    done = python(code, OXITORCH_LIBRARY="0", timeout=300)
    assert done.stdout.split() == ["done"], done.stderr


# Sizes and kinds of matrices that a decomposition by rotations has to get right.
MATRICES = {
    "one number": lambda d: randn(1, 1, dtype=d),
    "even": lambda d: randn(2, 4, 4, dtype=d),
    "odd": lambda d: randn(7, 7, dtype=d),
    "tall": lambda d: randn(2, 3, 9, 4, dtype=d),
    "wide": lambda d: randn(2, 3, 8, dtype=d),
    "a column": lambda d: randn(5, 1, dtype=d),
    "a row": lambda d: randn(1, 5, dtype=d),
    "of rank one": lambda d: randn(6, 1, dtype=d) @ randn(1, 6, dtype=d),
    "zero": lambda d: torch.zeros(3, 3, dtype=d),
    "equal values": lambda d: 1e-3 * torch.eye(5, dtype=d),
    "opposite values": lambda d: torch.diag(torch.tensor([2.0, -2, 1, -1])).to(d),
    "large": lambda d: 1e25 * randn(4, 4, dtype=d),
    "small": lambda d: 1e-25 * randn(4, 4, dtype=d),
}


@pytest.mark.slow
def test_rotations(python):
    """Where there is no LAPACK, singular values and eigenvalues come from rotations of columns."""
    code = f"""
import sys
import torch
sys.path.insert(0, {str(__file__.rpartition("/")[0])!r})
from test_linalg import MATRICES
torch.manual_seed(5)
near = lambda a, b, tol: torch.testing.assert_close(a, b, rtol=0, atol=tol)
for dtype in (torch.float32, torch.float64, torch.complex64, torch.complex128):
    for name, make in MATRICES.items():
        x = make(dtype)
        size = x.abs().max().item() or 1
        tol = 1e-4 if torch.finfo(dtype).bits == 32 else 1e-12
        one = lambda n: torch.eye(n, dtype=dtype).expand(*x.shape[:-2], n, n)
        for full in (False, True):
            u, s, vh = (t.cpu() for t in torch.linalg.svd(x.to("tpu"), full_matrices=full))
            n = s.shape[-1]
            near((u[..., :n] * (s / size)[..., None, :].to(dtype)) @ vh[..., :n, :], x / size, tol)
            near(u.mH @ u, one(u.shape[-1]), tol)
            near(vh @ vh.mH, one(vh.shape[-2]), tol)
            near(s / size, torch.linalg.svdvals(x) / size, tol)
        if x.shape[-1] == x.shape[-2]:
            values, v = (t.cpu() for t in torch.linalg.eigh(x.to("tpu")))
            near(values / size, torch.linalg.eigvalsh(x) / size, tol)
            near(v.mH @ v, one(v.shape[-1]), tol)
            half = x.tril(-1) / size
            whole = half + half.mH + torch.diag_embed(x.diagonal(dim1=-2, dim2=-1).real / size).to(dtype)
            near(whole @ v, v * (values / size)[..., None, :].to(dtype), tol)
try:
    torch.linalg.svdvals(torch.full((3, 3), float("nan")).to("tpu")).cpu()
    raise AssertionError("no error")
except torch.linalg.LinAlgError:
    pass
assert torch.tpu.metrics()["fallbacks"] == {{}} and torch.tpu.metrics()["library_calls"] == 0
print("done")
"""
    done = python(code, OXITORCH_LIBRARY="0", timeout=300)
    assert done.stdout.split() == ["done"], done.stderr
