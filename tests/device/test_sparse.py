"""Sparse tensors: every operation against the CPU's, and what people train with them."""

import copy
import io
import pickle
from pathlib import Path

import pytest
import torch
from support import DEVICE
from torch import nn

SIZE = (6, 5)
torch.sparse.check_sparse_tensor_invariants.disable()  # said, so that PyTorch does not warn


@pytest.fixture(autouse=True)
def checked():
    """Sparse tensors whose indices do not fit are refused when they are made."""
    with torch.sparse.check_sparse_tensor_invariants():
        yield


@pytest.fixture(autouse=True)
def on_the_device():
    """No operation runs on the CPU, where a test does not say so."""
    with torch.tpu.set_fallback("error"):
        yield


def strided(size=SIZE, dtype=torch.float32, seed=0, share=0.4):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, generator=generator) * 3
    x = x * (torch.rand(size, generator=generator) < share)
    return x.to(dtype)


def coo(size=SIZE, dtype=torch.float32, seed=0, sparse_dim=None, *, twice=False):
    """With `twice`, some elements are given in two parts."""
    x = strided(size, dtype, seed)
    x = x.to_sparse(len(size) if sparse_dim is None else sparse_dim)
    if twice:
        indices = torch.cat([x._indices(), x._indices()[:, ::2].flip(1)], 1)
        values = torch.cat([x._values(), x._values()[::2].flip(0)])
        x = torch.sparse_coo_tensor(indices, values, x.shape)
    return x


def same(ours, theirs):
    assert type(ours) is type(theirs)
    if not isinstance(theirs, torch.Tensor):
        assert ours == theirs
        return
    assert (ours.layout, ours.dtype, ours.shape) == (theirs.layout, theirs.dtype, theirs.shape)
    assert ours.device.type == DEVICE
    if theirs.layout == torch.sparse_coo:
        assert (ours.sparse_dim(), ours.dense_dim()) == (theirs.sparse_dim(), theirs.dense_dim())
        assert ours.is_coalesced() == theirs.is_coalesced()
        if theirs.is_coalesced():
            assert torch.equal(ours.indices().cpu(), theirs.indices())
    ours, theirs = (t.to_dense() if t.layout != torch.strided else t for t in (ours.cpu(), theirs))
    torch.testing.assert_close(ours, theirs, equal_nan=True)


INPUTS = {
    "matrix": coo(),
    "twice": coo(twice=True),
    "hybrid": coo((4, 3, 2), sparse_dim=2),
    "hybrid twice": coo((4, 3, 2), sparse_dim=1, twice=True),
    "vector": coo((7,)),
    "cube": coo((3, 4, 2), twice=True),
    "empty": torch.sparse_coo_tensor(size=SIZE),
    "float64": coo(dtype=torch.float64),
    "int64": coo(dtype=torch.int64, twice=True),
    "complex64": coo(dtype=torch.complex64, twice=True),
}

UNARY = {
    "coalesce": lambda x: x.coalesce(),
    "to_dense": lambda x: x.to_dense(),
    "clone": lambda x: x.clone(),
    "neg": lambda x: -x,
    "abs": lambda x: x.coalesce().abs(),
    "sin": lambda x: x.coalesce().sin() if not x.is_complex() else x,
    "scaled": lambda x: x * 3,
    "divided": lambda x: x / 2.5,
    "power": lambda x: x**2,
    "sum": lambda x: torch.sparse.sum(x),
    "sum of a dimension": lambda x: torch.sparse.sum(x, 0),
    "sum to strided": lambda x: x.sum(),
    "norm": lambda x: x.norm() if x.is_floating_point() or x.is_complex() else x.float().norm(),
    "transpose": lambda x: x.transpose(0, -1) if x.dense_dim() == 0 else x,
    "permute": lambda x: x.permute(*reversed(range(x.ndim))) if x.dense_dim() == 0 else x,
    "unsqueeze": lambda x: x.unsqueeze(0),
    "cat": lambda x: torch.cat([x, x]),
    "narrow": lambda x: x.coalesce().narrow_copy(0, 1, 2),
    "select": lambda x: x.select(0, 1) if x.sparse_dim() > 1 else x,
    "index_select": lambda x: x.index_select(0, torch.tensor([2, 0, 2, 1], device=x.device)).coalesce(),
    "index_select of the last": lambda x: x.index_select(-1, torch.tensor([1, 0, 1], device=x.device)).coalesce(),
    "to": lambda x: x.to(torch.float64 if not x.is_complex() else torch.complex128),
    "zeros_like": lambda x: torch.zeros_like(x),
    "twice itself": lambda x: (x + x).coalesce(),
    "less itself": lambda x: (x - x.coalesce() * 2).coalesce(),
    "times itself": lambda x: (x * x).coalesce(),
    "isnan": lambda x: x.coalesce().isnan(),
    "parts": lambda x: x.coalesce().values().sum(),
    "nnz": lambda x: x._nnz(),
    "in place": lambda x: x.clone().mul_(2).coalesce(),
    "added in place": lambda x: x.clone().add_(x).coalesce(),
    "zeroed": lambda x: x.clone().zero_(),
}


# What is tried with all inputs; the rest is with those of the first few kinds.
EVERYWHERE = {"coalesce", "to_dense", "scaled", "sum", "index_select", "twice itself", "times itself"}
KINDS = ["matrix", "hybrid twice", "cube", "complex64"]


@pytest.mark.parametrize(("x", "f"), [(x, f) for x in INPUTS for f in UNARY if x in KINDS or f in EVERYWHERE])
def test_operations_on_one(x, f):
    x, f = INPUTS[x], UNARY[f]
    try:
        expected = f(x)
    except RuntimeError as e:  # what the CPU refuses, so do we
        with pytest.raises(type(e)):
            f(x.to(DEVICE))
        return
    same(f(x.to(DEVICE)), expected)


X, TWICE, HYBRID = coo(), coo(seed=1, twice=True), coo((4, 3, 2), sparse_dim=2)
DENSE = torch.randn(SIZE)

BINARY = {
    "sparse + sparse": (lambda a, b: a + b, X, TWICE),
    "coalesced + coalesced": (lambda a, b: a + b, X, coo(seed=3)),
    "sparse - sparse": (lambda a, b: a - b, TWICE, X),
    "alpha": (lambda a, b: torch.add(a, b, alpha=-0.5), X, TWICE),
    "of two dtypes": (lambda a, b: a + b, X, coo(dtype=torch.float64)),
    "strided + sparse": (lambda a, b: a + b, DENSE, TWICE),
    "strided + hybrid": (lambda a, b: torch.add(a, b, alpha=2), torch.randn(4, 3, 2), HYBRID),
    "added to strided": (lambda a, b: a.clone().add_(b, alpha=-0.1), DENSE, TWICE),
    "added to a transposed one": (lambda a, b: a.t().clone().t().add_(b), DENSE.t(), coo((5, 6))),
    "sparse * sparse": (lambda a, b: (a * b).to_dense(), X, TWICE),
    "sparse * strided": (lambda a, b: a * b, X, DENSE),
    "strided * sparse": (lambda a, b: a * b, DENSE, X),
    "sparse * row": (lambda a, b: a * b, X, torch.randn(5)),
    "sparse * column": (lambda a, b: a * b, X, torch.randn(6, 1)),
    "hybrid * strided": (lambda a, b: a * b, HYBRID, torch.randn(4, 3, 2)),
    "hybrid * its dense part": (lambda a, b: a * b, HYBRID, torch.randn(2)),
    "sparse * number": (lambda a, b: a * b, X, torch.tensor(2.5)),
    "sparse / number": (lambda a, b: a / b, X, torch.tensor(2.5)),
    "mask": (lambda a, b: a.sparse_mask(b), DENSE, X),
    "mask of hybrid": (lambda a, b: a.sparse_mask(b), torch.randn(4, 3, 2), HYBRID),
    "mask of sparse": (lambda a, b: a.coalesce().sparse_mask(b), TWICE, X),
    "mm": (torch.sparse.mm, X, torch.randn(5, 3)),
    "mm of repeated": (torch.mm, TWICE, torch.randn(5, 3)),
    "mm of float64": (torch.mm, coo(dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)),
    "mm of integers": (torch.mm, coo(dtype=torch.int64), torch.randint(9, (5, 3))),
    "@": (lambda a, b: a @ b, X, torch.randn(5, 3)),
    "mv": (torch.mv, X, torch.randn(5)),
    "addmm": (
        lambda a, b: torch.addmm(torch.ones(6, 3, device=b.device), a, b, beta=0.5, alpha=2),
        X,
        torch.randn(5, 3),
    ),
    "sparse.addmm": (lambda a, b: torch.sparse.addmm(torch.ones(3, device=b.device), a, b), X, torch.randn(5, 3)),
    "bmm": (torch.bmm, coo((3, 4, 2), twice=True), torch.randn(3, 2, 5)),
    "copied": (lambda a, b: a.clone().copy_(b), X, TWICE),
    "zeros of all": (lambda a, b: a + b, torch.zeros(SIZE), torch.sparse_coo_tensor(size=SIZE)),
    "shapes that differ": (lambda a, b: a + b, X, coo((5, 6))),
    "sparse + strided": (lambda a, b: a + b, X, DENSE),
    "sizes of a product": (torch.mm, X, torch.randn(4, 3)),
}


@pytest.mark.parametrize("case", BINARY.values(), ids=BINARY.keys())
def test_operations_on_two(case):
    f, *args = case
    moved = [a.to(DEVICE) for a in args]
    try:
        expected = f(*args)
    except RuntimeError as e:
        with pytest.raises(type(e)):
            f(*moved)
        return
    same(f(*moved), expected)


COMPRESSED = {
    "csr": lambda x: x.to_sparse_csr(),
    "csc": lambda x: x.to_sparse_csc(),
    "bsr": lambda x: x.to_sparse_bsr((2, 1)),
    "bsc": lambda x: x.to_sparse_bsc((2, 1)),
}


@pytest.mark.filterwarnings("ignore:Sparse CS")
@pytest.mark.parametrize("kind", COMPRESSED)
def test_compressed(kind):
    make = COMPRESSED[kind]
    x = make(DENSE * (DENSE > 0))
    same(make((DENSE * (DENSE > 0)).to(DEVICE)), x)
    moved = x.to(DEVICE)
    for f in (
        lambda x: x,
        lambda x: x.to_dense(),
        lambda x: x.clone(),
        lambda x: x * 2,
        lambda x: -x,
        lambda x: x.sin(),
        lambda x: x.values().sum(),
        lambda x: x.to(torch.float64),
    ):
        same(f(moved), f(x))


@pytest.mark.filterwarnings("ignore:Sparse CS")
@pytest.mark.parametrize("kind", ["csr", "csc"])
def test_products_of_compressed(kind):
    x = COMPRESSED[kind](DENSE * (DENSE > 0))
    right, left, vector = torch.randn(5, 3), torch.randn(4, 6), torch.randn(5)
    moved = x.to(DEVICE)
    for f, other in (
        (lambda x, o: torch.sparse.mm(x, o), right),
        (lambda x, o: x @ o, right),
        (lambda x, o: o @ x, left),
        (lambda x, o: x @ o, vector),
        (lambda x, o: torch.addmm(torch.ones(6, 3, device=o.device), x, o, alpha=3), right),
        (lambda x, o: x.t() @ o, torch.randn(6, 2)),
        (lambda x, o: o + x, DENSE),
    ):
        same(f(moved, other.to(DEVICE)), f(x, other))
    if kind == "csr":
        same(moved + moved * 2, x + x * 2)
        a, b = torch.randn(6, 3), torch.randn(3, 5)
        same(
            torch.sparse.sampled_addmm(moved, a.to(DEVICE), b.to(DEVICE), beta=0.5),
            torch.sparse.sampled_addmm(x, a, b, beta=0.5),
        )


@pytest.mark.filterwarnings("ignore:Sparse CS")
def test_conversions():
    kinds = [
        lambda x: x.to_sparse_coo() if x.layout != torch.strided else x.to_sparse(),
        lambda x: x.to_sparse_csr(),
        lambda x: x.to_sparse_csc(),
        lambda x: x.to_dense() if x.layout != torch.strided else x,
    ]
    x = DENSE * (DENSE > 0)
    for first in kinds:
        for then in kinds:
            same(then(first(x.to(DEVICE))), then(first(x)))


def test_creation():
    i, v = torch.tensor([[0, 1, 1], [2, 0, 2]]), torch.tensor([3.0, 4.0, 5.0])
    same(torch.sparse_coo_tensor(i, v, (2, 4), device=DEVICE), torch.sparse_coo_tensor(i, v, (2, 4)))
    same(torch.sparse_coo_tensor(i.to(DEVICE), v.to(DEVICE)), torch.sparse_coo_tensor(i, v))
    same(torch.sparse_coo_tensor(i.tolist(), v.tolist(), device=DEVICE), torch.sparse_coo_tensor(i, v))
    same(torch.sparse_coo_tensor(size=(2, 3), device=DEVICE), torch.sparse_coo_tensor(size=(2, 3)))
    same(torch.zeros(2, 3, layout=torch.sparse_coo, device=DEVICE), torch.zeros(2, 3, layout=torch.sparse_coo))
    same(torch.eye(3, device=DEVICE).to_sparse(), torch.eye(3).to_sparse())
    for wrong in ([[0, 2], [0, 0]], [[0, -1], [0, 0]]):
        with pytest.raises(RuntimeError, match="index"):
            torch.sparse_coo_tensor(torch.tensor(wrong, device=DEVICE), torch.ones(2, device=DEVICE), (2, 2))
    with pytest.raises(RuntimeError):
        torch.sparse_csr_tensor([0, 3, 2], [0, 1], [1.0, 2.0], size=(2, 2), device=DEVICE)


def test_copies_and_files():
    x = coo(twice=True).to(DEVICE)
    same(x.cpu().to(DEVICE), x.cpu())
    same(copy.deepcopy(x), x.cpu())
    same(pickle.loads(pickle.dumps(x)), x.cpu())
    file = io.BytesIO()
    torch.save({"x": x}, file)
    file.seek(0)
    same(torch.load(file)["x"], x.cpu())
    assert "layout=torch.sparse_coo" in repr(x) and "tpu:0" in repr(x)


def test_an_index_out_of_range_is_an_error_and_no_crash():
    """Not even where nobody checked the indices."""
    for dtype in (torch.float32, torch.int32):
        for wrong in (9, -1, 2**40):
            for indices in ([[0], [wrong]], [[wrong], [0]]):
                i, v = torch.tensor(indices, device=DEVICE), torch.ones(1, dtype=dtype, device=DEVICE)
                with torch.sparse.check_sparse_tensor_invariants(False):
                    x = torch.sparse_coo_tensor(i, v, (2, 2))
                with pytest.raises(RuntimeError, match="out of"):
                    (x @ torch.ones(2, 2, dtype=dtype, device=DEVICE)).cpu()


def test_what_no_kernel_has_is_said_in_a_sentence():
    with pytest.raises(
        NotImplementedError, match=r"aten::exp is not available .*layout torch.sparse_coo(.|\n)*to_dense"
    ):
        X.to(DEVICE).exp()


def test_the_rest_runs_on_the_cpu_and_is_counted():
    torch.tpu.set_fallback("warn")
    a, b = coo((4, 4)), coo((4, 4), seed=2)
    with pytest.warns(UserWarning, match="_sparse_sparse_matmul has no lowering"):
        same(torch.sparse.mm(a.to(DEVICE), b.to(DEVICE)), torch.sparse.mm(a, b))
    same(torch.sparse.softmax(a.to(DEVICE), 1), torch.sparse.softmax(a, 1))
    assert torch.tpu.metrics()["fallbacks"]["aten::_sparse_sparse_matmul"] > 0


@pytest.mark.filterwarnings("ignore:Sparse CS")
@pytest.mark.parametrize("reduce", ["sum", "mean", "amax", "amin"])
def test_products_that_reduce(reduce):
    matrix = (DENSE * (DENSE > 0.5)).to_sparse_csr()

    def run(device):
        x = matrix.to(device, copy=True).requires_grad_()
        w = torch.arange(15.0).view(5, 3).sin().to(device).requires_grad_()
        y = torch.sparse.mm(x, w, reduce)
        (y * torch.arange(18.0, device=device).view(6, 3)).sum().backward()
        return y, w.grad, x.grad.to_dense()

    for ours, theirs in zip(run(DEVICE), run("cpu"), strict=True):
        same(ours.detach(), theirs.detach())


def test_gradients():
    """Of the matrix, of what it is multiplied with, of sums, of conversions."""

    def run(device):
        x = X.to(device, copy=True).requires_grad_()
        w = torch.arange(10.0).view(5, 2).to(device).requires_grad_()
        values = torch.arange(1.0, 4.0).to(device).requires_grad_()
        (torch.sparse.mm(x, w) ** 2).sum().backward()
        made = torch.sparse_coo_tensor(torch.tensor([[0, 1, 1], [0, 0, 4]], device=device), values, (2, 5))
        (torch.sparse.mm(made, w.detach()) ** 2).sum().backward()
        found = [x.grad.to_dense(), w.grad, values.grad]
        for f in (
            lambda x: torch.sparse.sum(x),
            lambda x: torch.sparse.sum(x, 0).to_dense().square().sum(),
            lambda x: (x.to_dense() ** 2).sum(),
            lambda x: (x * 3).coalesce().values().sum(),
        ):
            x = X.to(device, copy=True).requires_grad_()
            f(x).backward()
            found.append(x.grad.to_dense() if x.grad.layout != torch.strided else x.grad)
        return found

    for ours, theirs in zip(run(DEVICE), run("cpu"), strict=True):
        assert ours.device.type == DEVICE
        torch.testing.assert_close(ours.cpu(), theirs)


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.SparseAdam(p, lr=0.1),
        lambda p: torch.optim.Adagrad(p, lr=0.1),
    ],
    ids=["SGD", "SparseAdam", "Adagrad"],
)
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag], ids=["Embedding", "EmbeddingBag"])
def test_a_recommender_trains(kind, optimizer):
    def run(device):
        torch.manual_seed(0)
        users, items = kind(20, 4, sparse=True), kind(30, 4, sparse=True)
        model = nn.ModuleList([users, items]).to(device)
        steps = optimizer(list(model.parameters()))
        generator, losses = torch.Generator().manual_seed(0), []
        for _ in range(6):
            u = torch.randint(20, (8, 1), generator=generator).to(device)
            i = torch.randint(30, (8, 1), generator=generator).to(device)
            loss = ((users(u) * items(i)).sum(-1) - 1).square().mean()
            steps.zero_grad()
            loss.backward()
            assert users.weight.grad.layout == torch.sparse_coo
            steps.step()
            losses.append(loss.item())
        return losses, model.state_dict()

    (ours, state), (theirs, expected) = run(DEVICE), run("cpu")
    assert ours == pytest.approx(theirs, rel=1e-4)
    for name, value in state.items():
        torch.testing.assert_close(value.cpu(), expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:Sparse CS")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
def test_a_graph_convolution_trains(layout):
    generator = torch.Generator().manual_seed(0)
    edges = (torch.rand(50, 50, generator=generator) < 0.1).float() + torch.eye(50)
    features, labels = torch.randn(50, 8, generator=generator), torch.randint(3, (50,), generator=generator)

    def run(device):
        torch.manual_seed(0)
        a = (edges / edges.sum(1, keepdim=True)).to_sparse(layout=layout).to(device)
        first, second = nn.Linear(8, 16).to(device), nn.Linear(16, 3).to(device)
        optimizer = torch.optim.Adam([*first.parameters(), *second.parameters()], lr=0.01)
        x, y, losses = features.to(device), labels.to(device), []
        for _ in range(8):
            out = torch.sparse.mm(a, second(torch.relu(torch.sparse.mm(a, first(x)))))
            loss = nn.functional.cross_entropy(out, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    assert run(DEVICE) == pytest.approx(run("cpu"), rel=1e-4)


def test_a_step_over_a_sparse_matrix_is_compiled_once():
    a = coo((50, 40)).to(DEVICE)
    x = torch.randn(40, 8, device=DEVICE, requires_grad=True)
    counts = []
    for _ in range(5):
        torch.sparse.mm(a, x).square().sum().backward()
        x.grad.cpu()
        counts.append(torch.tpu.metrics()["compiles"])
    assert counts[-1] == counts[1]


def test_kernels_that_are_shared_are_those_of_the_cpu_and_of_cuda():
    """See `crates/aten/src/sparse.rs`: what PyTorch calls for both reads no memory."""
    import yaml

    folder = Path(torch.__file__).parent.parent / "torchgen/packaged/ATen/native"
    functions = yaml.safe_load((folder / "native_functions.yaml").read_text())
    same_kernel = {layout: set() for layout in ("", "Sparse", "SparseCsr")}
    for function in functions:
        kernels = {k.strip(): v for ks, v in (function.get("dispatch") or {}).items() for k in ks.split(",")}
        for layout, names in same_kernel.items():
            if kernels.get(f"{layout}CPU") == kernels.get(f"{layout}CUDA", ""):
                names.add(function["func"].split("(")[0])
    text = (Path(__file__).parents[2] / "crates/aten/src/sparse.rs").read_text()
    lists = {
        name: text.partition(f'const {name}: &str = "')[2].partition('"')[0].split()
        for name in ("STRIDED", "POINTWISE", "COO", "COMPRESSED")
    }
    assert all(len(names) > 5 for names in lists.values())
    for layout, key in (("", "STRIDED"), ("Sparse", "COO"), ("SparseCsr", "COMPRESSED")):
        there = torch._C._dispatch_get_registrations_for_dispatch_key(f"{layout}CPU")
        names = set(lists[key])
        for base in lists["POINTWISE"] if layout else ():
            names |= {base, f"{base}_", f"{base}.out"}
        assert {n for n in names if f"aten::{n}" in there} <= same_kernel[layout]
