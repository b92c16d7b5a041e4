"""What numbers may be relied on: choices among rounded logits, and the largest of many."""

import contextlib
import math
import re

import pytest
import torch
from support import DEVICE, NewGraphs, assert_same, bits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_greedy_choices_are_the_cpus(mode, no_fallback, dtype):
    """Logits of low precision tie often. They are rounded before they are compared, and the first of equals is taken."""
    hidden = torch.randint(-4, 5, (64, 32)).to(dtype) / 4
    head = torch.randint(-4, 5, (32, 500)).to(dtype) / 4
    logits = hidden @ head
    ties = (logits == logits.amax(-1, keepdim=True)).sum(-1)
    assert (ties > 1).any(), "there is nothing to decide"
    got = (hidden.to(DEVICE) @ head.to(DEVICE)).argmax(-1)
    assert got.tolist() == logits.argmax(-1).tolist()
    got = (hidden.to(DEVICE) @ head.to(DEVICE)).max(-1)
    for a, e in zip(got, logits.max(-1), strict=True):
        assert a.tolist() == e.tolist()


def test_rounding_is_not_left_out(no_fallback):
    """A value that is rounded to bfloat16 and read again in float32 is the rounded one, also inside one program."""
    x = torch.full((4,), 1.0, dtype=torch.bfloat16)
    small = torch.full((4,), 2.0**-9, dtype=torch.bfloat16)
    y = (x.to(DEVICE) + small.to(DEVICE)).float() - 1
    assert y.tolist() == ((x + small).float() - 1).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32], ids=str)
def test_topk_is_exact(no_fallback, dtype, largest):
    """All of the largest are found, in order, each where its index says."""
    x = torch.randperm(20000).view(4, 5000).to(torch.int32)
    x = x if dtype == torch.int32 else (x.double() / 7 - 1000).to(dtype)
    values, indices = x.to(DEVICE).topk(300, largest=largest)
    expected = x.topk(300, largest=largest)
    assert_same(values, expected.values)
    assert x.gather(1, indices.cpu()).tolist() == expected.values.tolist()
    assert all(len(set(row)) == 300 for row in indices.tolist())
    if dtype != torch.bfloat16:  # no two are equal
        assert indices.tolist() == expected.indices.tolist()


@pytest.mark.parametrize("largest", [True, False])
def test_topk_orders_what_is_no_number(no_fallback, largest):
    """NaN, of either sign, is larger than infinity, and that than the largest numbers."""
    most, nan, inf = torch.finfo(torch.float32).max, math.nan, math.inf
    x = torch.tensor([1.0, -inf, nan, most, 0.0, inf, -most, math.copysign(nan, -1.0), inf, -1.0, -inf])
    for k in (1, 4, len(x)):
        values, indices = x.to(DEVICE).topk(k, largest=largest)
        expected = x.topk(k, largest=largest).values
        assert_same(values, expected)
        torch.testing.assert_close(x[indices.cpu()], expected, rtol=0, atol=0, equal_nan=True)
        assert len(set(indices.tolist())) == k


# What the operands of a product say, by the ways to ask for it.
PRECISIONS = {
    "tpu highest": (lambda: torch.tpu.precision("highest"), "HIGHEST"),
    "tpu high": (lambda: torch.tpu.precision("high"), "HIGH"),
    "tpu default": (lambda: torch.tpu.precision("default"), "DEFAULT"),
    "torch highest": (lambda: torch_precision("highest"), "HIGHEST"),
    "torch high": (lambda: torch_precision("high"), "HIGH"),
    "torch medium": (lambda: torch_precision("medium"), "DEFAULT"),
}


@contextlib.contextmanager
def torch_precision(name):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("name", PRECISIONS)
def test_precision_reaches_the_program(name):
    make, expected = PRECISIONS[name]
    a = torch.ones(40 + list(PRECISIONS).index(name), 31, device=DEVICE)  # a program of its own
    new = NewGraphs()
    with make():
        (a @ a.mT).sum().item()
    text = "\n".join(g.stablehlo for g in new.take())
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert products
    for line in products:
        said = re.search(r"precision = \[(\w+), (\w+)\]", line)
        assert (said.groups() if said else ("DEFAULT", "DEFAULT")) == (expected, expected), line


# ---------------------------------------------------------------- moving elements

NARROW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
MOVED = [
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64,
]  # fmt: skip


def patterns(dtype):
    """Bits as integers: zeros, denormals, infinities, NaN of both kinds with payloads, with either sign; 240 of them."""
    size = dtype.itemsize
    if size == 1:
        return torch.arange(240, dtype=torch.uint8)
    if dtype.is_complex:
        parts = patterns(torch.float32)
        return torch.stack([parts, parts.flip(0)], 1).view(torch.int64).flatten()
    mantissa = {torch.float64: 52, torch.float32: 23, torch.bfloat16: 7, torch.float16: 10}[dtype]
    infinity, half, sign = (1 << 8 * size - 1) - (1 << mantissa), 1 << mantissa - 1, 1 << 8 * size - 1
    positive = [0, 1, 3, half, 2 * half - 1, 2 * half, infinity]
    positive += [infinity | payload for payload in (1, 5, half - 1, half, half | 5, 2 * half - 1)]
    chosen = [*positive, *(p - sign for p in positive)]
    return torch.tensor(chosen, dtype=NARROW[size]).repeat(10)[:240]


# On the cpu platform LLVM joins the value beside with the elements as floats: a NaN stays one and loses its payload.
LOST = {torch.bfloat16: ["pad"]} if torch.tpu.platform() == "cpu" else {}


def moves(x, i, m):
    """What moves elements and computes nothing; `x` has 240 elements, `i` is an index of 12 and `m` a mask."""
    t, back = x.view(12, 20), x.flip(0)
    u = back.view(12, 20)
    yield "clone", x.clone()
    yield "transpose", t.t().contiguous()
    yield "slice", x[3:50:2].clone()
    yield "cat", torch.cat([x, x[3:7], back])
    yield "stack", torch.stack([x, back], 1)
    yield "chunks", torch.cat(x.chunk(3)[::-1])
    yield "gather", t.gather(0, i.view(-1, 1).expand(12, 5))
    yield "index_select", t.index_select(0, i)
    yield "index", t[i, i]
    yield "take", x.take(i * 7)
    yield "mask", x[m]
    yield "where", torch.where(m, x, back)
    yield "masked_fill", x.masked_fill(m, x[7])
    yield "masked_scatter", x.masked_scatter(m, back)
    yield "scatter", t.scatter(0, i.view(-1, 1).expand(12, 5), u)
    yield "index_copy", t.index_copy(0, i, u)
    yield "index_put", t.clone().index_put_((i,), u)
    yield "index_fill", t.index_fill(0, i[:3], x[9])
    yield "put", x.clone().put_(i, back[40:52])
    yield "flip", back
    yield "roll", x.roll(5)
    yield "pad", torch.nn.functional.pad(x, (3, 2))
    yield "repeat", x.repeat(3)
    yield "repeat_interleave", x.repeat_interleave(2)
    yield "expand", x.view(-1, 1).expand(-1, 3).contiguous()
    yield "tril", t.tril()
    yield "diag", x[:9].diag()
    yield "diagonal", t.diagonal().clone()
    yield "unfold", x.unfold(0, 5, 3).clone()
    yield "select_scatter", t.select_scatter(back[:20], 0, 3)
    yield "embedding", torch.nn.functional.embedding(i, t)
    yield "fill", x.clone().fill_(x[8])
    y = x.clone()
    y[4:9], y[::7] = x[10:15], x[1]
    y.view(12, 20)[2:5].copy_(u[6:9])
    yield "views written", y
    yield "bytes", x.view(torch.uint8).flip(0).clone()
    yield "bytes and back", (x.view(torch.uint8) ^ 1).view(x.dtype).clone()


@pytest.mark.parametrize("dtype", MOVED, ids=str)
def test_what_moves_elements_changes_no_bits(dtype):
    """Denormals and what a NaN carries too: what integers of the same bits give on the CPU."""
    x, i = patterns(dtype), torch.arange(12).flip(0)
    m = torch.arange(240) % 3 == 0
    wanted = dict(moves(x, i, m))
    got = dict(moves(x.view(dtype).to(DEVICE), i.to(DEVICE), m.to(DEVICE)))
    wrong = [name for name in wanted if not torch.equal(bits(got[name]), bits(wanted[name]))]
    assert wrong == LOST.get(dtype, [])
    # Many, so that several threads do it.
    many = x.view(dtype).repeat(4000).to(DEVICE).view(2, -1).t().contiguous()
    assert torch.equal(bits(many), bits(x.repeat(4000).view(2, -1).t()))


@pytest.mark.parametrize("to", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("scale", [1e-5, 1e-2, 1.0, 300.0, 1e5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_float8_is_rounded_once(dtype, scale, to):
    """XLA goes by float16, which rounds twice, and makes what is too large any number."""
    g = torch.Generator().manual_seed(1)
    x = (torch.randn(20000, generator=g, dtype=torch.float64) * scale).to(dtype)
    ties = torch.tensor([448, 464, 480, 511, 1e4, 57344, 61440, 2**-9, 2**-10, 2**-17, -0.0], dtype=torch.float64)
    x = torch.cat([x, ties.to(dtype), -ties.to(dtype)])
    assert torch.equal(x.to("tpu").to(to).cpu().view(torch.uint8), x.to(to).view(torch.uint8))


@pytest.mark.parametrize("dtype, scale", [(torch.float32, torch.float32), (torch.float8_e4m3fn, torch.float64)])
def test_scaled_products_refuse_what_the_cpu_refuses(dtype, scale):
    """With the words of PyTorch's own kernel; that of oneDNN, which some processors have, looks at less."""
    a, one = torch.ones(16, 16, device=DEVICE).to(dtype), torch.ones((), dtype=scale, device=DEVICE)
    with pytest.raises(ValueError, match="Invalid scaling configuration"):
        torch._scaled_mm(a, a.t(), one, one, out_dtype=torch.float32)


@pytest.mark.parametrize("shape", [(1021, 40), (40, 1021), (3, 100, 100), (40_003,)], ids=str)
def test_large_reductions_see_a_nan_and_the_first_of_equals(shape):
    """They are made of slices on the cpu platform."""
    dims = range(len(shape))
    for place in (0, 1, 20_000, 29_999):
        x = torch.randint(-99, 99, shape).float()
        nan = x.clone()
        nan.view(-1)[place] = float("nan")
        for d in dims:
            for given in (x, nan, x.long()):
                for name in ("sum", "amax", "amin", "argmax", "argmin"):
                    f = getattr(torch, name)
                    assert_same(f(given.to(DEVICE), d), f(given, d), f"{name} of {given.dtype} along {d}")
                got, wanted = given.to(DEVICE).max(d), given.max(d)
                assert_same(got.values, wanted.values, "max")
                assert_same(got.indices, wanted.indices, "its place")


def test_a_row_with_a_nan_keeps_it():
    """XLA's library for reductions loses a NaN in a maximum and a minimum, so it is given none but those of a softmax."""
    x = torch.randn(1024, 64)
    x[3, 5], x[7], x[9, :3] = float("nan"), float("nan"), -float("inf")
    x[11] = -float("inf")
    x[13, 1] = float("inf")
    for given in (x, x.t(), x.view(1024, 8, 8), x.double(), x.bfloat16()):
        for f in (
            lambda t: t.amax(-1), lambda t: t.amin(-1), lambda t: t.amax(), lambda t: t.amin(0), lambda t: t.max(-1)[0],
            lambda t: t.argmax(-1), lambda t: (t + 1).amax(-1), lambda t: torch.aminmax(t, dim=-1)[0],
            lambda t: t.softmax(-1), lambda t: t.log_softmax(-1), lambda t: t.logsumexp(-1), lambda t: t.softmax(0),
            lambda t: t.sum(-1), lambda t: t.norm(p=float("inf"), dim=-1) if t.is_floating_point() else t,
        ):  # fmt: skip
            got, wanted = f(given.to(DEVICE)).cpu(), f(given)
            torch.testing.assert_close(
                got, wanted, equal_nan=True, rtol=2e-2 if given.dtype == torch.bfloat16 else 2e-6, atol=1e-5
            )


SUMS = [
    ((4, 3, 32, 32), None), ((4, 3, 32, 32), (0, 2, 3)), ((4, 3, 32, 32), (1, 2, 3)), ((8, 8, 8, 8, 8), None), ((8, 8, 8, 8, 8), (1, 3, 4)),
    ((2,) * 14, tuple(range(13))), ((16, 3, 7, 7, 30), (1, 2, 3, 4)), ((3, 16, 16, 16), (0, 1, 2)), ((100, 30, 30), None),
    ((30, 30, 100), (1, 2)), ((64, 64), None), ((20, 20, 20, 20), (1, 2, 3)), ((1 << 20,), None), ((16, 50257), (1,)),
    ((4096, 50), (0,)), ((8, 16, 56, 56), (0, 2, 3)), ((16, 3, 64, 64), (1, 2, 3)), ((40, 20, 20), None),
]  # fmt: skip


@pytest.mark.parametrize("shape, dims", SUMS, ids=str)
def test_a_long_sum_has_lost_few_digits(shape, dims):
    """Against float64, in units of 2**-24 of the sum: numbers that are added one after another lose as many as there are."""
    x = torch.rand(shape, generator=torch.Generator().manual_seed(0)) + 0.5
    for f in (lambda t: t.sum(dims), lambda t: t.mean(dims), lambda t: (t * t).sum(dims), lambda t: t.exp().sum(dims)):
        wanted = f(x.double())
        lost = ((f(x.to(DEVICE)).cpu().double() - wanted).abs() / wanted).max().item() * 2**24
        assert lost < 16, lost
