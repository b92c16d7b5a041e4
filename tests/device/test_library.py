"""Programs of the cpu platform call PyTorch's own kernels for large products, convolutions and attention: the results are
the CPU's but for rounding, views are read in place, large calls are made in parts, and small ones stay with XLA."""

import concurrent.futures
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support import DEVICE, assert_same, tensors, to_device

pytestmark = pytest.mark.skipif(
    torch.tpu.platform() != "cpu", reason="only programs that run in host memory can call the host's kernels"
)


def calls():
    torch.tpu.synchronize()
    return torch.tpu.metrics()["library_calls"]


def same(f, *args, times: int | None = 1, **tolerance):
    """`f` gives on the device what it gives on the CPU, with so many calls of the library."""
    expected = tensors(f(*args))
    moved = to_device(args)
    before = calls()
    actual = tensors(f(*moved))
    done = calls() - before
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert_same(a, e, f"result {i}", strides=False, **tolerance)
    assert times is None or done == times, f"{done} library calls"


def gradients(f, *args):
    """Result and gradients of a sum that has another gradient for each element."""
    args = [a.detach().clone(memory_format=torch.preserve_format).requires_grad_() for a in args]
    y = f(*args)
    F.softsign(y).sum().backward()
    return [y, *(a.grad for a in args)]


def randn(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=dtype)


# ---------------------------------------------------------------- products

# Makes a [256, 192] matrix that has this layout.
LAYOUTS = {
    "dense": lambda dtype: randn(256, 192, dtype=dtype),
    "transposed": lambda dtype: randn(192, 256, dtype=dtype).t(),
    "columns": lambda dtype: randn(256, 500, dtype=dtype)[:, 7:199],
    "rows": lambda dtype: randn(600, 192, dtype=dtype)[3:515:2],
    "steps": lambda dtype: randn(256, 384, dtype=dtype)[:, ::2],
    "part of a transposed one": lambda dtype: randn(300, 270, dtype=dtype).t()[5:261, 8:200],
    "expanded": lambda dtype: randn(256, 1, dtype=dtype).expand(256, 192),
    "reshaped": lambda dtype: randn(4, 192, 64, dtype=dtype).transpose(1, 2).reshape(256, 192),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("right", LAYOUTS)
@pytest.mark.parametrize("left", LAYOUTS)
def test_products_of_all_layouts(left, right, dtype):
    same(lambda a, b: a.t() @ b, LAYOUTS[left](dtype), LAYOUTS[right](dtype), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("columns", [10, 47, 97, 1001])
def test_products_in_uneven_parts(columns):
    left, right = randn(1501, 300), randn(300, columns)
    same(lambda a, b: a @ b, left, right)
    same(lambda a, b: b.t() @ a.t(), left, right)


def test_products_of_batches():
    same(torch.bmm, randn(8, 128, 64), randn(8, 64, 96), rtol=1e-5, atol=1e-4)
    same(torch.bmm, randn(8, 64, 128).mT, randn(96, 8, 64).permute(1, 2, 0), rtol=1e-5, atol=1e-4)
    same(torch.baddbmm, randn(96), randn(8, 128, 64), randn(8, 64, 96), rtol=1e-5, atol=1e-4)
    # Batch and heads have no common stride: the heads are copied together.
    heads = lambda x: x.view(4, 64, 8, 64).transpose(1, 2)  # noqa: E731
    same(lambda q, k: heads(q) @ heads(k).mT, randn(4, 64, 512), randn(4, 64, 512), rtol=1e-5, atol=1e-4)


def test_products_with_something_added():
    same(torch.addmm, randn(192), randn(256, 300), randn(300, 192), rtol=1e-5, atol=1e-4)
    x = (randn(256, 192), randn(256, 300), randn(300, 192))
    same(lambda *x: torch.addmm(*x, beta=0.5, alpha=2), *x, rtol=1e-5, atol=1e-4)
    same(lambda x: torch.einsum("bij,bkj->ik", x, x), randn(20, 100, 100), rtol=1e-5, atol=1e-3)


def test_linear_and_its_gradients():
    x, w, b = randn(8, 64, 128), randn(256, 128), randn(256)
    same(lambda *a: gradients(F.linear, *a), x, w, b, times=3, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((8, 8), (8, 8)),
        ((0, 512), (512, 512)),
        ((512, 0), (0, 512)),
        ((4096, 4096), (4096, 1)),
        ((1, 4096), (4096, 4096)),
    ],
    ids=str,
)
def test_small_and_flat_products_stay(left, right):
    same(torch.mm, randn(*left), randn(*right), times=0, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int32, torch.complex64], ids=str)
def test_other_dtypes_stay(dtype):
    before = calls()
    a = torch.ones(512, 512, dtype=dtype)
    assert_same(a.to(DEVICE) @ a.to(DEVICE), a @ a)
    assert calls() == before


def test_lower_precision_stays():
    before = calls()
    torch.set_float32_matmul_precision("medium")
    try:
        a = torch.ones(512, 512, device=DEVICE)
        (a @ a).sum().item()
    finally:
        torch.set_float32_matmul_precision("highest")
    assert calls() == before


# ---------------------------------------------------------------- convolutions

# Input, weight, arguments.
CONVOLUTIONS = {
    "1d": ((8, 32, 500), (32, 32, 5), {"padding": 2}),
    "2d": ((8, 16, 32, 32), (32, 16, 3, 3), {"padding": 1}),
    "2d strided": ((8, 16, 64, 64), (32, 16, 3, 3), {"stride": 2, "padding": 1}),
    "2d dilated": ((8, 16, 32, 32), (32, 16, 3, 3), {"dilation": (2, 3)}),
    "2d grouped": ((8, 32, 32, 32), (64, 8, 3, 3), {"groups": 4, "padding": (0, 1)}),
    "2d depthwise": ((8, 64, 64, 64), (64, 1, 5, 5), {"groups": 64, "padding": 2}),
    # Few operations, but XLA's compiler for CPUs makes dense convolutions of groups: 64 times as many.
    "2d depthwise, small": ((4, 64, 8, 8), (64, 1, 5, 5), {"groups": 64, "padding": 2}),
    "1d grouped, small": ((4, 64, 100), (64, 4, 5), {"groups": 16}),
    "2d transposed depthwise, small": ((4, 64, 8, 8), (64, 1, 4, 4), {"transposed": True, "stride": 2, "groups": 64}),
    "2d pointwise": ((8, 64, 32, 32), (64, 64, 1, 1), {}),
    "3d": ((2, 8, 16, 16, 16), (16, 8, 3, 3, 3), {"padding": 1}),
    "1d transposed": ((8, 32, 500), (32, 32, 4), {"transposed": True, "stride": 2}),
    "2d transposed": ((8, 32, 16, 16), (32, 16, 3, 3), {"transposed": True, "stride": 2, "output_padding": 1}),
    "2d transposed grouped": ((8, 32, 32, 32), (32, 8, 3, 3), {"transposed": True, "groups": 2, "dilation": 2}),
    "3d transposed": ((2, 16, 12, 12, 12), (16, 8, 3, 3, 3), {"transposed": True, "padding": 1}),
}


def convolution(shape, weight, arguments):
    n = len(shape) - 2
    spread = lambda name, default: torch.nn.modules.utils._ntuple(n)(arguments.get(name, default))  # noqa: E731
    stride, padding, dilation, output_padding = (
        spread(name, default)
        for name, default in [("stride", 1), ("padding", 0), ("dilation", 1), ("output_padding", 0)]
    )
    transposed, groups = arguments.get("transposed", False), arguments.get("groups", 1)
    features = weight[1] * groups if transposed else weight[0]

    def f(x, w, b):
        return torch.convolution(x, w, b, stride, padding, dilation, transposed, output_padding, groups)

    return f, randn(*shape), randn(*weight), randn(features)


@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_convolutions_and_their_gradients(case):
    f, *args = convolution(*CONVOLUTIONS[case])
    same(lambda *a: gradients(f, *a), *args, times=2, rtol=1e-4, atol=2e-3)


@pytest.mark.parametrize(
    "wanted", [(True, False, False), (False, True, False), (False, False, True), (False, True, True)]
)
def test_only_the_gradients_that_are_wanted(wanted):
    f, *args = convolution(*CONVOLUTIONS["2d"])

    def some(*args):
        args = [a.detach().requires_grad_(w) for a, w in zip(args, wanted, strict=True)]
        y = f(*args)
        F.softsign(y).sum().backward()
        return [a.grad for a in args if a.grad is not None]

    same(some, *args, times=2, rtol=1e-4, atol=2e-3)


def test_convolution_of_views():
    x = randn(64, 8, 40, 36).permute(1, 0, 3, 2)[:, 4:20, 2:34, 3:35]
    w = randn(3, 3, 16, 32).permute(3, 2, 0, 1)
    same(lambda x, w: F.conv2d(x, w, padding=1), x, w, rtol=1e-4, atol=1e-3)
    same(lambda x, w: F.conv2d(x, w), x.contiguous(memory_format=torch.channels_last), w, rtol=1e-4, atol=1e-3)


def test_results_are_written_where_they_belong():
    """PyTorch's kernels are given the memory of results by their size: gradients of one size are not mixed up, and what a
    kernel makes on the way is no result."""
    x, w = randn(48, 48, 8, 8), randn(48, 48, 8, 8)
    for memory_format in (torch.contiguous_format, torch.channels_last):
        args = (x.to(memory_format=memory_format), w)
        same(lambda x, w: gradients(lambda x, w: F.conv2d(x, w, padding=4), x, w), *args, times=2, rtol=1e-3, atol=1e-2)
    # Memory that a kernel was given is the program's: it is not there any more when that has ended.
    done = [F.conv2d(to_device(x), to_device(w), padding=4) for _ in range(3)]
    for y in done:
        assert_same(y, F.conv2d(x, w, padding=4), "again", strides=False, rtol=1e-3, atol=1e-2)


def test_convolution_of_float64():
    x, w = randn(4, 16, 32, 32, dtype=torch.float64), randn(32, 16, 3, 3, dtype=torch.float64)
    same(lambda *a: gradients(F.conv2d, *a), x, w, times=2)


@pytest.mark.parametrize("images", [1, 2, 3, 7])
def test_gradients_of_few_images(images):
    """They are made in parts by image; those of weight and bias are sums of what the parts give."""
    f, x, w, b = convolution((images, 16, 96, 96), (32, 16, 3, 3), {"padding": 1})
    for memory_format in (torch.contiguous_format, torch.channels_last):
        args = (x.to(memory_format=memory_format), w, b)
        same(lambda *a: gradients(f, *a), *args, times=2, rtol=1e-4, atol=5e-3)


def test_weights_larger_than_the_images():
    """Each part would need memory for all of them."""
    f, *args = convolution((4, 256, 4, 4), (256, 256, 3, 3), {"padding": 1})
    same(lambda *a: gradients(f, *a), *args, times=2, rtol=1e-4, atol=2e-3)


def test_small_convolutions_stay():
    same(F.conv2d, randn(1, 3, 8, 8), randn(4, 3, 3, 3), times=0)
    same(F.conv2d, randn(0, 16, 32, 32), randn(32, 16, 3, 3), times=0)


# ---------------------------------------------------------------- attention


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_attention_of_a_joint_projection(causal, scale):
    def attention(x):
        q, k, v = (z.view(-1, 128, 4, 32).transpose(1, 2) for z in x.split(128, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
        return y.transpose(1, 2).reshape(-1, 128, 128)

    same(lambda x: gradients(attention, x), randn(4, 128, 384), times=2, rtol=1e-4, atol=1e-4)
    same(lambda x: gradients(attention, x[:3]), randn(4, 128, 384), times=2, rtol=1e-4, atol=1e-4)


def test_attention_with_more_keys_than_queries():
    shapes = (2, 4, 100, 64), (2, 4, 300, 64), (2, 4, 300, 64)
    attention = F.scaled_dot_product_attention
    same(lambda *a: gradients(attention, *a), *(randn(*s) for s in shapes), times=2, rtol=1e-4, atol=1e-4)
    same(lambda *a: attention(*a, is_causal=True), *(randn(*s) for s in shapes), rtol=1e-4, atol=1e-4)


def test_attention_whose_values_have_another_width():
    shapes = (4, 8, 128, 32), (4, 8, 128, 32), (4, 8, 128, 64)
    attention = F.scaled_dot_product_attention
    expected = gradients(attention, *(qkv := [randn(*s) for s in shapes]))
    for a, e in zip(gradients(attention, *to_device(qkv)), expected, strict=True):
        assert_same(a, e, strides=False, rtol=1e-4, atol=1e-4)


def test_attention_of_columns():
    # The last dimension is not dense, which the kernel needs: it is copied.
    qkv = [randn(2, 4, 64, 128).mT for _ in range(3)]
    same(F.scaled_dot_product_attention, *qkv, rtol=1e-4, atol=1e-4)


# ---------------------------------------------------------------- elements one by one

# No subnormal numbers: XLA's threads take them for zero, whoever computes there.
ODD = torch.tensor([0.0, -0.0, 1.0, -1.0, 0.5, torch.inf, -torch.inf, torch.nan, 3e38, 1e-20])


def odd(*shape, dtype=torch.float32):
    """Numbers some of which are NaN, infinite, very large or small, or equal."""
    x = randn(*shape, dtype=dtype)
    places = torch.randint(x.numel(), (x.numel() // 20,))
    x.view(-1)[places] = ODD.to(dtype)[torch.randint(len(ODD), places.shape)]
    return x


FUNCTIONS = {
    **{
        name: getattr(torch, name)
        for name in ["acos", "asin", "atan", "cos", "digamma", "erfinv", "lgamma", "sin", "tan", "atan2", "pow"]
    },
    "floor_divide": torch.floor_divide,
    "div floor": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "number to a power": lambda x, y: 1.7**x,
    "power of a number": lambda x, y: x**1.7,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_numbers(name, dtype):
    f = FUNCTIONS[name]
    binary = name in ("atan2", "pow") or " " in name or "_" in name
    g = f if binary else lambda x, y: f(x)
    x, y = odd(96, 200, dtype=dtype), odd(200, dtype=dtype)
    same(g, x, y)
    same(g, x.t(), y[:96].expand(200, 96))
    same(g, odd(4, 8, 20, 30, dtype=dtype).to(memory_format=torch.channels_last), y[:30])


SCANS = ["cummax", "cummin", "logcumsumexp", "cumsum", "cumprod"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64], ids=str)
@pytest.mark.parametrize("name", SCANS)
def test_scans(name, dtype):
    if dtype == torch.int64 and name == "logcumsumexp":
        pytest.skip("PyTorch has none of integers")
    x = odd(300, 40, dtype=torch.float64).t() if dtype == torch.float64 else torch.randint(9, (40, 300)).to(dtype)
    same(lambda x: getattr(torch, name)(x, 1), x)
    for shape in [(40, 50), (5000,), (3, 20, 40), (2, 1, 2000)]:
        x = torch.randint(9, shape) if dtype == torch.int64 else odd(*shape, dtype=dtype)
        for dim in range(len(shape)):
            along_rows = dim + 1 == len(shape) or not name.startswith(("cumsum", "cumprod"))
            done = getattr(torch, name)
            # A program of ours adds up in parts, which give another NaN or infinity where both are there.
            if along_rows:
                # Sizes that vary would come to be one program, which calls nothing.
                with torch.tpu.set_eager_mode("strict"):
                    same(lambda x, done=done, dim=dim: done(x, dim), x)


PICKS = {
    "kthvalue": lambda x, dim, keep: torch.kthvalue(x, 7, dim, keep),
    "median": lambda x, dim, keep: torch.median(x, dim, keep),
    "nanmedian": lambda x, dim, keep: torch.nanmedian(x, dim, keep),
    "mode": lambda x, dim, keep: torch.mode(x, dim, keep),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32], ids=str)
@pytest.mark.parametrize("name", PICKS)
def test_order_statistics(name, dtype):
    for shape in [(40, 50), (5000,), (9, 20, 30), (1, 8, 2000)]:
        x = torch.randint(99, shape).to(dtype) if dtype == torch.int32 else odd(*shape, dtype=dtype)
        for dim in range(len(shape)):
            if shape[dim] >= 7:
                keep = dim % 2 == 0
                same(lambda x, dim=dim, keep=keep: PICKS[name](x, dim, keep)[0], x)
                # Which of several equal ones it is, is the kernel's to say; that it is one of them, is not.
                values, index = PICKS[name](x.to(DEVICE), dim, True)
                assert_same(values, x.gather(dim, index.cpu()), "where it is")
    same(torch.median, odd(3, 2000))
    same(torch.nanmedian, odd(3, 2000))


def test_the_place_of_an_order_statistic_is_no_constant():
    x = randn(40, 300)
    for k in (1, 5, 77, 300, 12):
        same(lambda x, k=k: torch.kthvalue(x, k, 1), x)


POOLS = {
    "2d": (F.max_pool2d, (2, 6, 21, 30), (3, 2, 1)),
    "2d, windows that overlap much": (F.max_pool2d, (2, 6, 21, 30), (5, 1, 2)),
    "2d, dilated": (F.max_pool2d, (2, 6, 21, 30), (3, 2, 1, 2)),
    "2d, no batch": (F.max_pool2d, (6, 50, 60), (3, 2)),
    "3d": (F.max_pool3d, (2, 4, 9, 20, 22), (3, 2)),
    "adaptive 2d": (F.adaptive_max_pool2d, (2, 6, 21, 30), (5,)),
    "adaptive 2d, even": (F.adaptive_max_pool2d, (3, 6, 21, 30), ((7, 10),)),
    "adaptive 3d": (F.adaptive_max_pool3d, (2, 4, 9, 20, 22), (4,)),
}


@pytest.mark.parametrize("last", [False, True], ids=["rows", "channels last"])
@pytest.mark.parametrize("case", POOLS)
def test_maxima_of_windows_and_their_gradients(case, last):
    pool, shape, arguments = POOLS[case]
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    x = randn(*shape)
    if last and len(shape) == 3:
        pytest.skip("an image without a batch has no such format")
    x = x.to(memory_format=formats[len(shape)]) if last else x
    expected = gradients(lambda x: pool(x, *arguments), x)
    found = gradients(lambda x: pool(x, *arguments), x.to(DEVICE))
    for f, e in zip(found, expected, strict=True):
        assert_same(f, e, rtol=1e-5, atol=1e-5)


def test_indices_of_maxima_that_are_nowhere():
    """PyTorch's kernel writes where an index says; a program leaves out what is in no plane."""
    x, y = randn(2, 4, 40, 40).to(DEVICE), torch.ones(2, 4, 19, 19, device=DEVICE)
    index = torch.full((2, 4, 19, 19), 10**12, device=DEVICE)
    index[..., 0, 0], index[..., 0, 1] = -7, 5
    backward = torch.ops.aten.max_pool2d_with_indices_backward
    got = backward(y, x, [3, 3], [2, 2], [0, 0], [1, 1], False, index)
    assert got.sum().item() == 8 and (got.flatten(2)[..., 5] == 1).all()


def test_sums_by_an_index():
    x, updates = randn(60, 70, 30), randn(60, 90, 30)
    for dim, size in ((0, 60), (1, 70), (2, 30)):
        x_updates = updates.transpose(1, dim).contiguous()[:60] if dim else updates
        index = torch.randint(size, x_updates.shape)
        fits = [slice(0, x.shape[d]) if d != dim else slice(None) for d in range(3)]
        index, source = index[fits], x_updates[fits]
        for ours in (
            lambda x, i, s, dim=dim: x.scatter_add(dim, i, s),
            lambda x, i, s, dim=dim: x[:0].new_zeros(x.shape).scatter_add(dim, i, s),
        ):
            same(ours, x, index, source, times=0, rtol=1e-5, atol=1e-4)
        rows = torch.randint(size, (200,))
        shape = [*x.shape]
        shape[dim] = 200
        same(lambda x, i, s, dim=dim: x.index_add(dim, i, s), x, rows, randn(*shape), times=0, rtol=1e-5, atol=1e-4)
    table = randn(50, 64)
    same(
        lambda t, i: gradients(lambda t: F.embedding(i, t, padding_idx=3), t),
        table,
        torch.randint(50, (300,)),
        times=0,
        rtol=1e-5,
        atol=1e-4,
    )
    double = randn(500, 20, dtype=torch.float64)
    same(lambda t, i: gradients(lambda t: t.gather(0, i), t), double, torch.randint(500, (400, 20)), times=0)


def test_cholesky_factors():
    for shape in [(6, 6), (5, 20, 20), (2, 3, 9, 9), (1, 1)]:
        for dtype in (torch.float32, torch.float64, torch.complex64):
            x = randn(*shape, dtype=dtype)
            x = x @ x.mH + shape[-1] * torch.eye(shape[-1], dtype=dtype)
            for upper in (False, True):
                same(lambda x, upper=upper: torch.linalg.cholesky(x, upper=upper), x, rtol=1e-4, atol=1e-4)
    broken = torch.eye(5).repeat(3, 1, 1)
    broken[1, 3, 3] = -1.0
    assert torch.linalg.cholesky_ex(broken.to(DEVICE)).info.tolist() == [0, 4, 0]
    with pytest.raises(torch.linalg.LinAlgError, match="minor of order 4"):
        torch.linalg.cholesky(broken.to(DEVICE)).cpu()


@pytest.mark.parametrize("rows", [1, 2, 7, 64])
def test_products_with_few_rows(rows):
    """Of a layer whose weight lies the other way round, which a compiler would turn for each of them."""
    x, w = randn(rows, 300), randn(260, 300)
    same(F.linear, x, w, times=int(rows > 1), rtol=1e-5, atol=1e-4)
    same(lambda w, v: w.t() @ v, w, randn(260), rtol=1e-5, atol=1e-4)


def test_samples():
    weights = torch.rand(3, 5000)
    weights[:, ::3] = 0
    for replacement in (False, True):
        for samples in (1, 40, 1000):
            index = torch.multinomial(weights.to(DEVICE), samples, replacement).cpu()
            assert (weights.gather(1, index) > 0).all()
            assert replacement or all(len({*row.tolist()}) == samples for row in index)
    share = torch.tensor([0.1, 0.0, 0.6, 0.3])
    for replacement, samples in ((True, 40_000), (False, 1)):
        given = share if replacement else share.expand(40_000, 4)
        found = torch.multinomial(given.to(DEVICE), samples, replacement).flatten().cpu().bincount(minlength=4) / 40_000
        assert (found - share).abs().max() < 0.01
    order = torch.randperm(5000, device=DEVICE)
    assert_same(order.sort()[0], torch.arange(5000))


SYSTEMS = [(1, 1), (7, 7), (5, 20, 20), (2, 3, 9, 9), (70, 70), (0, 3, 3)]
DTYPES = [torch.float32, torch.float64, torch.complex64, torch.complex128]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SYSTEMS, ids=str)
def test_systems_of_equations(shape, dtype):
    """LAPACK does them, of any layout and with whatever is broadcast."""
    n = shape[-1]
    a = randn(*shape, dtype=dtype) + n * torch.eye(n, dtype=dtype)
    b, vector = randn(*shape[:-1], 3, dtype=dtype), randn(n, dtype=dtype)
    tolerance = {"rtol": 1e-3, "atol": 1e-4, "times": None}
    solve, triangular = torch.linalg.solve, torch.linalg.solve_triangular
    for turn in (lambda a: a, lambda a: a.mT, lambda a: a.mH):
        same(lambda a, b, turn=turn: solve(turn(a), b), a, b, **tolerance)
    same(solve, a, vector[:, None], **tolerance)
    same(lambda a, b: solve(a, b.mT, left=False), a, b, **tolerance)
    same(torch.linalg.inv, a, **tolerance)
    same(torch.linalg.lu_factor_ex, a, **tolerance)
    same(torch.linalg.lu_factor_ex, b, **tolerance)
    same(torch.linalg.slogdet, a, **tolerance)
    factors, pivots = torch.linalg.lu_factor(a)
    for adjoint in (False, True):
        f = lambda *args, adjoint=adjoint: torch.linalg.lu_solve(*args, adjoint=adjoint)  # noqa: E731
        same(f, factors, pivots, b, **tolerance)
        same(lambda x, p, b, f=f: f(x, p, b), factors, pivots, b[..., :1], **tolerance)
    for upper in (False, True):
        for unit in (False, True):
            how = {"upper": upper, "unitriangular": unit}
            # With ones on the diagonal, what is beside it must not be large.
            m = a / n if unit else a
            same(lambda a, b, how=how: triangular(a, b, **how), m, b, **tolerance)
            same(lambda a, b, how=how: triangular(a.mT, b.mT, left=False, **how), m, b, **tolerance)
            if len(shape) == 2:
                same(lambda a, b, u=upper: torch.triangular_solve(b, a.mT, upper=u, transpose=True), a, b, **tolerance)
    if len(shape) == 2:
        same(torch.cholesky_inverse, torch.linalg.cholesky(a @ a.mH), **tolerance)


def test_systems_are_solved_by_lapack():
    a, b = randn(6, 6), randn(6, 2)
    same(torch.linalg.solve, a, b, times=2, rtol=1e-3, atol=1e-3)
    same(lambda a, b: gradients(torch.linalg.solve, a, b), a, b, times=3, rtol=1e-2, atol=1e-2)
    singular = torch.eye(5).repeat(3, 1, 1)
    singular[1, 3, 3] = 0.0
    assert torch.linalg.lu_factor_ex(singular.to(DEVICE)).info.tolist() == [0, 4, 0]
    with pytest.raises(torch.linalg.LinAlgError, match="singular"):
        torch.linalg.solve(singular.to(DEVICE), singular.to(DEVICE)).cpu()


def test_pivots_that_are_no_rows_end_nothing():
    factors, b = randn(40, 40).to(DEVICE), randn(40, 2).to(DEVICE)
    for pivot in (-(2**31), 0, 41, 2**31 - 1):
        pivots = torch.full((40,), pivot, dtype=torch.int32, device=DEVICE)
        assert torch.linalg.lu_solve(factors, pivots, b).shape == (40, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("p", [0.0, 1.0, 2.0, torch.inf, 0.5, 3.0])
def test_distances_of_pairs(p, dtype):
    known = p in (0.0, 1.0, 2.0, torch.inf)
    x = randn(60, 40, dtype=dtype)
    x[3], x[7, 5] = x[9], x[8, 5]
    distances = lambda x: F.pdist(x, p)  # noqa: E731
    tolerance = {"rtol": 1e-4, "atol": 1e-4}
    same(distances, x, times=int(known), **tolerance)
    same(distances, x.t(), times=int(known), **tolerance)
    same(distances, x[::2, 1::2], times=0, **tolerance)
    same(lambda x: gradients(distances, x), x, times=2 * known, **tolerance)
    same(lambda x: gradients(lambda x: distances(x[5:55, 3:33]), x), x, times=2 * known, **tolerance)
    same(distances, odd(60, 40, dtype=dtype), times=int(known), **tolerance)
    same(lambda x: torch.autograd.grad(distances(x).sum(), x), x.requires_grad_(), times=2 * known, **tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("f", [torch.fmod, torch.remainder])
def test_remainders_are_exact(f, dtype):
    """Of quotients that overflow, too, which PyTorch's vector code loses."""
    large, tiny = torch.finfo(dtype).max, torch.finfo(dtype).eps ** 3
    x, y = odd(100, 200, dtype=dtype) * 100, odd(100, 200, dtype=dtype)
    x[:, :3] = torch.tensor([large, -large, large / 3], dtype=dtype)
    y[::2, :3], y[1::2, :3] = tiny, 0.1

    def exact(x, y):
        if math.isnan(x) or math.isnan(y) or math.isinf(x) or y == 0:
            return math.nan
        return math.fmod(x, y) if f is torch.fmod or (math.isinf(y) and x == 0) else x % y

    pairs = zip(x.flatten().tolist(), y.flatten().tolist(), strict=True)
    expected = torch.tensor([exact(*pair) for pair in pairs], dtype=torch.float64).view_as(x)
    assert_same(f(x.to(DEVICE), y.to(DEVICE)), expected.to(dtype), rtol=1e-6, atol=0)
    same(lambda x: f(x, 1.5), randn(200, 100, dtype=dtype).t() * 9)
    same(lambda x, y: f(x, y[:, None]), randn(100, 200, dtype=dtype) * 9, randn(100, dtype=dtype))


# ---------------------------------------------------------------- how they run


NORMS = {3: torch.nn.BatchNorm1d, 4: torch.nn.BatchNorm2d, 5: torch.nn.BatchNorm3d}
IMAGES = [
    ((64, 8, 300), torch.contiguous_format),
    ((8, 32, 32, 32), torch.contiguous_format),
    ((8, 32, 32, 32), torch.channels_last),
    ((4, 33, 40, 40), torch.channels_last),
    ((2, 4, 16, 32, 40), torch.contiguous_format),
    ((2, 100, 16, 16, 4), torch.channels_last_3d),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("shape", "memory_format"), IMAGES, ids=str)
@pytest.mark.parametrize("how", [{}, {"affine": False}, {"training": False}], ids=["affine", "plain", "evaluation"])
def test_batch_norm(shape, memory_format, how, dtype):
    x, weight = (randn(*shape).to(memory_format=memory_format) + offset for offset in (10.0, 0.0))
    affine, training = how.get("affine", True), how.get("training", True)

    def found(device, dtype):
        norm = NORMS[len(shape)](shape[1], affine=affine, dtype=dtype).train(training).to(device)
        y = x.to(device, dtype, copy=True).requires_grad_()
        z = norm(y)
        (z.sin() * weight.to(device, dtype)).sum().backward()
        return [z, y.grad, *(p.grad for p in norm.parameters()), *norm.buffers()]

    # In 64 bits: PyTorch's float32 is less exact than ours.
    for ours, exact in zip(found(DEVICE, dtype), found("cpu", torch.float64), strict=True):
        expected = exact.to(ours.dtype)
        assert_same(ours, expected, rtol=1e-4, atol=2e-3 if dtype == torch.float32 else 1e-9)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_batch_norm_is_summed_by_the_host(memory_format):
    def gradient(x, weight):
        y = F.batch_norm(x, None, None, weight, None, True)
        return torch.autograd.grad(y.square().sum(), x)[0]

    x = randn(8, 32, 32, 32).to(memory_format=memory_format)
    arguments = x.to(DEVICE).requires_grad_(), torch.ones(32, device=DEVICE)
    text = torch.tpu.jit(gradient).lower(*arguments).as_text()
    assert "channel_statistics" in text and "channel_gradient_sums" in text


GROUPS = {
    "groups": lambda x, w, b: F.group_norm(x, x.shape[1] // 2, w, b),
    "one group": lambda x, w, b: F.group_norm(x, 1, w, b),
    "a group for each channel": lambda x, w, b: F.group_norm(x, x.shape[1], w, b),
    "no weight": lambda x, w, b: F.group_norm(x, 2),
    "instances": lambda x, w, b: F.instance_norm(x, weight=w, bias=b),
    "group norm and another function": lambda x, w, b: F.silu(F.group_norm(x, 2, w, b)),
}
SAMPLES = [
    ((64, 8, 300), torch.contiguous_format),
    ((2, 32, 64, 64), torch.contiguous_format),
    ((2, 32, 64, 64), torch.channels_last),
    ((1, 34, 70, 66), torch.contiguous_format),
    ((1, 34, 70, 66), torch.channels_last),
    ((5, 34, 30, 33), torch.channels_last),
    ((40, 4, 10, 16, 8), torch.channels_last_3d),
    ((300, 40, 16), torch.contiguous_format),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("shape", "memory_format"), SAMPLES, ids=str)
@pytest.mark.parametrize("name", GROUPS)
def test_norms_of_each_sample(name, shape, memory_format, dtype):
    values = randn(*shape) + 10.0, randn(shape[1]), randn(shape[1]), randn(*shape)

    def found(device, to):
        # Both begin with the same numbers.
        x, w, b, slope = (v.to(dtype).to(device, to, copy=True) for v in values)
        x = x.to(memory_format=memory_format)
        leaves = [v.requires_grad_() for v in (x, w, b)]
        y = GROUPS[name](*leaves)
        gradients = torch.autograd.grad((y * slope).sum(), leaves, allow_unused=True)
        return [y.detach(), *(g for g in gradients if g is not None)]

    tolerance = {torch.float32: (1e-4, 5e-3), torch.float64: (1e-7, 1e-9)}[dtype]
    for ours, exact in zip(found(DEVICE, dtype), found("cpu", torch.float64), strict=True):
        assert_same(ours, exact.to(dtype), strides=False, rtol=tolerance[0], atol=tolerance[1])


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_what_is_no_number_stays_in_its_group(memory_format):
    x = randn(4, 16, 64, 64).to(memory_format=memory_format)
    x[1, 3, 5, 6], x[2, 9, 0, 0], x[3, 15, 63, 63] = torch.nan, torch.inf, -torch.inf
    for f in (lambda x: F.group_norm(x, 4), F.instance_norm):
        expected = gradients(f, x)
        for ours, theirs in zip(gradients(f, x.to(DEVICE)), expected, strict=True):
            assert_same(ours, theirs, strides=False, rtol=1e-4, atol=1e-4)


def test_a_second_window_calls_again():
    a = randn(300, 300)
    d = a.to(DEVICE)
    for _ in range(3):
        before = calls()
        assert_same(d @ d @ d, a @ a @ a, rtol=1e-4, atol=1e-2)
        assert calls() == before + 2


def test_threads_launch_at_once():
    xs = [randn(256, 256) for _ in range(8)]
    expected = [x @ x.t() @ x for x in xs]

    def work(x, expected):
        d = x.to(DEVICE)
        for _ in range(10):
            assert_same(d @ d.t() @ d, expected, rtol=1e-4, atol=1e-2)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(work, xs, expected))


def test_results_do_not_change_from_run_to_run():
    f, *args = convolution(*CONVOLUTIONS["2d grouped"])
    args = to_device(args)
    first = [g.cpu() for g in gradients(f, *args)]
    for _ in range(3):
        assert all(torch.equal(g.cpu(), e) for g, e in zip(gradients(f, *args), first, strict=True))


def test_it_can_be_turned_off(python):
    code = """
import torch
a = torch.ones(512, 512, device="tpu")
print((a @ a).sum().item(), torch.tpu.metrics()["library_calls"])
"""
    assert python(code, OXITORCH_LIBRARY="0").stdout.split() == ["134217728.0", "0"]
    assert python(code, OXITORCH_LIBRARY="1").stdout.split() == ["134217728.0", "1"]


def test_by_itself_it_serves_what_this_processor_is_slower_at(python):
    """XLA has kernels for AVX-512 on all processors, MKL on Intel's; but few rows by a transposed matrix are MKL's, and more
    rows if its columns are a multiple of 2 KiB apart."""
    code = """
import torch
few, many = (torch.randn(n, 1024) for n in (16, 512))
w, v = torch.randn(1024, 1024), torch.randn(1000, 1024)[:, :1000].contiguous()
cases = ("square", w, w), ("few", few, w.t()), ("many", many, w.t()), ("apart", many[:, :1000], v.t()), ("double", w.double(), w.double())
for name, x, y in cases:
    torch.tpu.synchronize()
    before = torch.tpu.metrics()["library_calls"]
    z = x.to("tpu") @ (y.to("tpu") if y.is_contiguous() else y.t().to("tpu").t())
    torch.testing.assert_close(z.cpu(), x @ y, rtol=1e-4, atol=1e-3)
    print(name, torch.tpu.metrics()["library_calls"] - before)
"""
    info = Path("/proc/cpuinfo").read_text()
    own = "1" if "GenuineIntel" in info or "avx512f" not in info else "0"
    expected = ["square", own, "few", "1", "many", "1", "apart", own, "double", "1"]
    assert python(code).stdout.split() == expected


def test_an_error_of_the_library_names_op_and_line(python):
    code = """
import torch
library = torch.library.Library("aten", "IMPL", "CPU")
def refuse(*args, **kwargs):
    raise ValueError("no products today")
library.impl("bmm.out", refuse, allow_override=True)
a = torch.ones(8, 128, 128, device="tpu", dtype=torch.float64)
y = a @ a
try:
    y.cpu()
except RuntimeError as e:
    print(e)
b = torch.ones(4, device="tpu")
print((b + b).tolist())
"""
    out = python(code).stdout
    assert "aten::bmm.out: " in out and "no products today" in out, out
    assert "<string>:8" in out, out
    assert "[2.0, 2.0, 2.0, 2.0]" in out


def test_a_program_that_ends_in_the_middle(python):
    code = """
import torch
a = torch.rand(1024, 1024, device="tpu", dtype=torch.float64)
for _ in range(30):
    a = a @ a / 1024
print("end")
"""
    done = python(code)
    assert (done.returncode, done.stdout) == (0, "end\n"), done.stderr


def test_programs_come_from_the_disk(python, empty_cache):
    code = """
import torch
a = torch.ones(512, 512, device="tpu", dtype=torch.float64)
total = (a @ a).sum().item()
m = torch.tpu.metrics()
print(total, m["library_calls"], m["compiles"] > 0, m["loads"] > 0)
"""
    run = lambda: python(code, OXITORCH_CACHE_DIR=str(empty_cache)).stdout.split()  # noqa: E731
    assert run() == ["134217728.0", "1", "True", "False"]
    assert run() == ["134217728.0", "1", "False", "True"]
