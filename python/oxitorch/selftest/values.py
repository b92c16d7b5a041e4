"""Whether what is computed is right: against PyTorch's CPU, and against itself."""

import time
import warnings

import torch
from torch import nn

from oxitorch.selftest import Found, check
from oxitorch.selftest.step import training

F = nn.functional


def _samples():
    """Calls of common operations: a name, a function, its arguments on the CPU."""
    g = torch.Generator().manual_seed(0)

    def r(*shape, dtype=torch.float32):
        return torch.randn(shape, generator=g).to(dtype)

    def i(n, *shape):
        return torch.randint(0, n, shape, generator=g)

    x = r(8, 16)
    for f in ("exp", "log1p", "tanh", "sin", "sqrt", "rsqrt", "sigmoid", "erf", "floor", "lgamma", "digamma", "erfinv"):
        yield f, getattr(torch, f), (x.abs() / 4 + 0.1,)
    for f in ("add", "sub", "mul", "div", "atan2", "fmod", "remainder", "maximum", "pow"):
        yield f, getattr(torch, f), (x.abs() + 0.5, r(8, 16).abs() + 0.5)
    for f in ("sum", "mean", "amax", "argmin", "cumsum", "logsumexp", "softmax", "var"):
        yield f, lambda t, f=f: getattr(torch, f)(t, dim=1), (x,)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        yield f"matmul {dtype}", torch.matmul, (r(33, 65, dtype=dtype), r(65, 17, dtype=dtype))
    yield "bmm", torch.bmm, (r(3, 9, 17), r(3, 17, 5))
    yield "int64 division", torch.div, (i(100, 40) - 50, i(9, 40) + 1)
    yield "conv2d", lambda a, w: F.conv2d(a, w, stride=2, padding=1), (r(2, 3, 11, 13), r(5, 3, 3, 3))
    yield "conv_transpose2d", lambda a, w: F.conv_transpose2d(a, w, stride=2), (r(2, 3, 5, 6), r(3, 4, 3, 3))
    yield "max_pool2d", lambda a: F.max_pool2d(a, 3, 2, 1), (r(2, 3, 9, 9),)
    yield "attention", lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), (r(2, 4, 9, 8),) * 3
    yield "layer_norm", lambda a: F.layer_norm(a, (16,)), (x,)
    yield "embedding", F.embedding, (i(10, 4, 5), r(10, 6))
    yield "cross_entropy", F.cross_entropy, (r(6, 10), i(10, 6))
    yield "interpolate", lambda a: F.interpolate(a, scale_factor=2.0, mode="bilinear"), (r(1, 2, 5, 5),)
    yield "sort", lambda a: torch.sort(a, stable=True), (r(4, 50),)
    yield "topk", lambda a: torch.topk(a, 5), (r(4, 50),)
    yield "index", lambda a, j: a[j], (x, i(8, 5))
    yield "index_add", lambda a, j, b: a.index_add(0, j, b), (x, i(8, 20), r(20, 16))
    yield "scatter_reduce", lambda a, j, b: a.scatter_reduce(1, j, b, "amax"), (x, i(16, 8, 16), r(8, 16))
    yield "nonzero", torch.nonzero, (x > 1,)
    yield "unique", torch.unique, (i(9, 60),)
    yield "where", torch.where, (x > 0, x, -x)
    yield "fft", lambda a: torch.fft.rfft(a).abs(), (x,)
    symmetric = r(6, 6)
    positive = symmetric @ symmetric.T + torch.eye(6)
    yield "cholesky", torch.linalg.cholesky, (positive,)
    yield "eigvalsh", torch.linalg.eigvalsh, (positive,)
    yield "svdvals", torch.linalg.svdvals, (r(7, 5),)
    yield "solve", torch.linalg.solve, (positive, r(6, 3))
    yield "float8", lambda a: a.to(torch.float8_e4m3fn).float(), (x,)
    yield "complex", lambda a, b: torch.view_as_real(torch.complex(a, b) * torch.complex(b, a)), (x, r(8, 16))


def _difference(got, want) -> str | None:
    """What is wrong, with the tolerances of `torch.testing`; float32 products of GPUs and TPUs are a little looser."""
    got = list(got) if isinstance(got, (tuple, list)) else [got]
    want = list(want) if isinstance(want, (tuple, list)) else [want]
    close = {torch.float32: (1e-3, 1e-4), torch.float64: (1e-7, 1e-7), torch.bfloat16: (2e-2, 2e-2)}
    close[torch.complex64] = close[torch.float32]
    for a, b in zip(got, want, strict=True):
        if not isinstance(b, torch.Tensor):
            if a != b:
                return f"{a}, on the CPU {b}"
            continue
        a, (rtol, atol) = a.cpu(), close.get(b.dtype, (0, 0))
        try:
            torch.testing.assert_close(a, b, rtol=rtol, atol=atol, equal_nan=True)
        except AssertionError as e:
            return " ".join(str(e).split())[:160]
    return None


def _wrong(samples, limit_s: float) -> tuple[int, list[str]]:
    """How many calls were made in this time, and which of them are wrong."""
    wrong, ran, began = [], 0, time.perf_counter()
    for name, f, args in samples:
        if time.perf_counter() - began > limit_s:
            break
        try:
            want = f(*args)
        except Exception:  # the CPU has no answer to compare with
            continue
        ran += 1
        moved = [a.to("tpu") if isinstance(a, torch.Tensor) else a for a in args]
        try:
            problem = _difference(f(*moved), want)
        except Exception as e:
            problem = f"{type(e).__name__}: {str(e).splitlines()[0][:120]}"
        if problem:
            wrong.append(f"{name}: {problem}")
    return ran, wrong


@check("operations", limit_s=240)
def operations() -> Found:
    """Common operations give the CPU's results, and none of them runs on the CPU."""
    torch.tpu.reset_metrics()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ran, wrong = _wrong(_samples(), limit_s=200)
    fallbacks = torch.tpu.metrics()["fallbacks"]
    assert not wrong, f"{len(wrong)} of {ran} are wrong: " + "; ".join(wrong[:5])
    on_cpu = f", on the CPU: {', '.join(fallbacks)}" if fallbacks else ""
    return Found(f"{ran} calls as on the CPU{on_cpu}", {"calls": ran, "fallbacks": fallbacks})


def _database():
    from torch.testing._internal.common_methods_invocations import op_db

    for op in op_db:
        if torch.float32 in op.supported_dtypes("cpu") and not op.name.startswith(("empty", "new_empty", "rand")):
            try:
                sample = next(iter(op.sample_inputs("cpu", torch.float32)))
            except Exception:  # entries for builds with other libraries
                continue
            if isinstance(sample.input, torch.Tensor) and not any(isinstance(a, (list, tuple)) for a in sample.args):
                arguments = (sample.input, *sample.args)
                yield op.name, lambda *a, op=op, kw=sample.kwargs: op(*a, **_moved(kw, a[0])), arguments


def _moved(kwargs: dict, like: torch.Tensor) -> dict:
    return {k: v.to(like.device) if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}


# What gives something else each time or in another basis, and what wants its indices on the CPU.
_UNLIKE = (
    "bernoulli", "cauchy", "dropout", "exponential", "geometric", "log_normal", "multinomial", "normal", "uniform",
    "svd", "pca_lowrank", "eig", "qr", "lobpcg", "rrelu", "fractional_max_pool", "gumbel_softmax", "pinverse", "hash",
    "tensor_split",
)  # fmt: skip


@check("PyTorch's database", quick=False, limit_s=330)
def database() -> Found:
    """The first float32 sample of PyTorch's entries for operations, as many as four minutes allow."""
    torch.tpu.reset_metrics()
    samples = (s for s in _database() if not any(word in s[0] for word in _UNLIKE))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ran, wrong = _wrong(samples, limit_s=240)
    # Some entries draw numbers, or have results that only hold together.
    share = 1 - len(wrong) / max(ran, 1)
    assert share >= 0.97, f"{len(wrong)} of {ran} are wrong: " + "; ".join(wrong[:5])
    return Found(f"{ran - len(wrong)} of {ran} entries as on the CPU", {"entries": ran, "wrong": wrong})


@check("determinism")
def determinism() -> Found:
    """The same again gives the same bits, sums of many into few places too when PyTorch is asked for it."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        g = torch.Generator().manual_seed(0)
        x, index = torch.randn(20000, 8, generator=g).to("tpu"), torch.randint(0, 50, (20000,), generator=g).to("tpu")
        sums = [torch.zeros(50, 8, device="tpu").index_add(0, index, x).cpu() for _ in range(5)]
        products = [(x.T @ x).cpu() for _ in range(5)]
        torch.tpu.manual_seed(7)
        drawn = torch.randn(1000, device="tpu").cpu()
        torch.tpu.manual_seed(7)
        again = torch.randn(1000, device="tpu").cpu()
    finally:
        torch.use_deterministic_algorithms(before)
    assert all(torch.equal(s, sums[0]) for s in sums), "sums into few places differ"
    assert all(torch.equal(p, products[0]) for p in products), "products differ"
    assert torch.equal(drawn, again), "a seed gives other numbers the second time"
    return Found("sums, products and random numbers are the same each time")


@check("training", limit_s=300)
def train() -> Found:
    """Two steps of a transformer with Adam and of a convolutional net with SGD lose what they lose on the CPU."""

    def convolutions(device):
        torch.manual_seed(0)
        layers = [
            nn.Conv2d(3, 8, 3),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(8 * 49, 10),
        ]
        model = nn.Sequential(*layers).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        x = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(1)).to(device)

        def step():
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    worst = 0.0
    for make in (lambda device: training(device, batch=2, length=32), convolutions):
        there, here = make("tpu"), make("cpu")
        for _ in range(2):
            got, want = there().item(), here().item()
            worst = max(worst, abs(got - want) / abs(want))
    assert worst < 1e-3, f"a loss is {worst:.1e} away from the CPU's"
    return Found(f"losses are within {worst:.0e} of the CPU's", {"worst_relative": worst})
