"""Windows, resampling, edges and single elements along sizes that vary, forward and backward."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from support import DEVICE, assert_same
from torch.tpu import Dim


def pools(x):
    channels = x.transpose(1, 2)
    return [
        F.max_pool1d(channels, 2),
        F.avg_pool1d(channels, 3, 2, 1, count_include_pad=False),
        F.adaptive_max_pool1d(channels, 1),
        F.adaptive_avg_pool1d(channels, 1),
    ]


def resampled(x):
    channels = x.transpose(1, 2)
    return [
        F.interpolate(channels, scale_factor=2, mode="linear"),
        F.interpolate(channels, scale_factor=2),
        F.interpolate(x[:, None], scale_factor=2, mode="bicubic"),
        F.interpolate(channels.detach(), size=10, mode="linear"),
    ]


def edges(x):
    channels = x.transpose(1, 2)
    return [
        F.pad(channels, (1, 2), mode="reflect"),
        F.pad(channels, (2, 1), mode="replicate"),
        F.pad(x[:, None], (1, 1, 2, 1), mode="reflect"),
    ]


def single_elements(x):
    n = x.shape[1]
    return [x[:, -1] * 2, x[:, n - 2 :] * 3, x[:, n // 2] + x[:, 0], torch.trapezoid(x, dim=1), x.sum(1)]


def pools_of_a_size(x):
    channels = x.transpose(1, 2)
    return [
        F.adaptive_avg_pool1d(channels, 4),
        F.adaptive_max_pool1d(channels, 3),
        F.adaptive_avg_pool2d(channels, (2, 5)),
        F.interpolate(channels, size=7, mode="linear"),
        F.interpolate(channels, size=7),
        F.interpolate(x[:, None], size=(8, 5), mode="bilinear", align_corners=True),
    ]


def parts(x):
    padded = x.new_zeros(x.shape[0], x.shape[1] + 4, x.shape[2])
    padded[:, 3:-1] = x
    return [F.pad(x.transpose(1, 2), (2, 3), mode="circular"), padded * 2, torch.block_diag(*x)]


def running(x):
    return [x.logcumsumexp(1), x.cummax(1)[0], x.cummin(1)[0], x.flip(1).cummax(1)[0]]


def antialiased(x):
    images = x[:, None]
    resize = partial(F.interpolate, images, antialias=True)
    return [
        resize(size=(4, 6), mode="bilinear"),
        resize(size=(7, 3), mode="bicubic"),
        # Of one of the sizes.
        resize(size=(9, 5), mode="bilinear"),
        resize(scale_factor=2, mode="bicubic"),
    ]


def grouped(x):
    """Convolutions in groups: of lengths that vary, and of batches."""
    channels = x.transpose(1, 2)
    w = torch.linspace(-1, 1, 4 * 3 * 3, device=x.device).view(4, 3, 3)
    return [
        F.conv1d(channels, w, padding=1, groups=2),
        F.conv1d(channels, w[:1].expand(6, 3, 3)[:, :1], stride=2, groups=6),
        F.conv_transpose1d(channels, w.transpose(0, 1)[[0, 1, 2] * 2, :2], stride=2, groups=3),
        F.conv1d(x.transpose(0, 1), w[[0, 1, 2], :1], padding=1, groups=3),
    ]


def spectra(x):
    """Transforms of the length itself, of even and odd ones."""
    y = torch.complex(x, x.flip(1))
    n = x.shape[1]
    real = [
        torch.fft.rfft(x, dim=1, norm="ortho"),
        torch.fft.fft(y, dim=1),
        torch.fft.ifft(y, dim=1),
        torch.fft.fft2(x, dim=(1, 2)),
    ]
    kept = torch.fft.rfft(x, dim=1) * 0.5
    return [*(torch.view_as_real(r).flatten(2) for r in real), torch.fft.irfft(kept, n=n, dim=1)]


FUNCTIONS = [pools, resampled, edges, single_elements, pools_of_a_size, parts, running, antialiased, grouped, spectra]
# Windows leave out the last element at odd sizes alone, half of an odd spectrum has no middle, and a filter may reach as far
# as at the bound: that is another program.
TWO_PROGRAMS = {pools, spectra, antialiased}


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_few_programs_give_what_each_size_gives(function, fused):
    def both(x):
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            results = function(x)
            loss = sum((r * torch.linspace(0, 1, r.shape[-1], device=x.device)).square().sum() for r in results)
            (grad,) = torch.autograd.grad(loss, x)
        return [*(r.detach() for r in results), grad]

    f = torch.tpu.jit(both, dynamic={"x": {1: Dim(buckets=[16])}})
    before = torch.tpu.metrics()["programs"]
    for size in (5, 16, 9, 12):
        torch.manual_seed(size)
        x = torch.randn(3, size, 6)
        for i, (a, e) in enumerate(zip(f(x.to(DEVICE)), both(x), strict=True)):
            assert_same(a, e, f"{i} of {size}", strides=False, rtol=1e-4, atol=1e-5)
    most = 2 if function in TWO_PROGRAMS else 1
    assert torch.tpu.metrics()["programs"] - before <= most, torch.tpu.explain(3)


def test_gradients_that_are_the_same_everywhere(fused):
    def f(x):
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            return torch.autograd.grad((x * 2).sum(), x)[0], torch.autograd.grad(x.sum(), x)[0]

    g = torch.tpu.jit(f, dynamic={"x": {0: Dim(buckets=[16])}})
    before = torch.tpu.metrics()["programs"]
    for size in (5, 16, 9):
        x = torch.randn(size, 3)
        for a, e in zip(g(x.to(DEVICE)), f(x), strict=True):
            assert_same(a, e, str(size), strides=False)
    assert torch.tpu.metrics()["programs"] - before == 1


def test_positions_are_those_of_the_size(fused):
    def f(x):
        ordered = x.sort(1)[0].contiguous()
        return [
            x.cummax(1)[1],
            x.cummin(1)[1],
            torch.searchsorted(ordered, x),
            torch.searchsorted(ordered, x + 0.1, right=True),
            torch.bucketize(x, ordered[0]),
            *F.adaptive_max_pool2d(x[:, None].expand(-1, 5, -1), (3, 4), return_indices=True),
        ]

    g = torch.tpu.jit(f, dynamic={"x": {1: Dim(buckets=[16])}})
    before = torch.tpu.metrics()["programs"]
    for size in (5, 16, 9, 12):
        x = torch.randint(9, (3, size)).float()
        for i, (a, e) in enumerate(zip(g(x.to(DEVICE)), f(x), strict=True)):
            assert_same(a, e, f"{i} of {size}", strides=False)
    assert torch.tpu.metrics()["programs"] - before == 1, torch.tpu.explain(3)


def test_every_other_element_is_that_of_the_size(fused):
    def f(x):
        y = x * 1
        y[:, 1::3] = 5
        y[:, ::2] += 1
        return [x[:, ::2] * 2, x[:, 1::2] + 1, x.transpose(0, 1)[::3] + 1, y]

    g = torch.tpu.jit(f, dynamic={"x": {1: Dim(buckets=[16])}})
    for size in (9, 16, 15, 12, 8, 11):
        x = torch.randn(3, size, 2)
        for i, (a, e) in enumerate(zip(g(x.to(DEVICE)), f(x), strict=True)):
            assert_same(a, e, f"{i} of {size}", strides=False)


def test_what_has_no_elements_may_have_any_layout(fused):
    def f(x):
        nothing = x[:, :0]
        return nothing.flip(1), nothing.reshape(0, 3).sum(0), torch.cat([nothing, x], 1).flatten()

    g = torch.tpu.jit(f, dynamic={"x": {0: Dim(buckets=[8])}})
    for size in (5, 8, 3):
        x = torch.randn(size, 4)
        for a, e in zip(g(x.to(DEVICE)), f(x), strict=True):
            assert_same(a, e, str(size), strides=False)


PLACES = {
    "an argument": lambda x: x.as_strided((3, 2), (4, 1), 1),
    "a computed tensor": lambda x: (x * 2).as_strided((3, 2), (4, 1), 1),
    "within the first row": lambda x: x.as_strided((2, 2), (2, 1), 0),
    "used in the function": lambda x: x.as_strided((3, 2), (4, 1), 1) + 1,
}


@pytest.mark.parametrize("name", PLACES)
def test_places_that_do_not_follow_the_size(name):
    """Views by strides of their own show what is there in the tensor of the call, not in one of the bound's size."""
    f = torch.tpu.jit(PLACES[name], dynamic={"x": {1: Dim(max=16)}})
    for n in (5, 7, 6):
        x = torch.arange(4.0 * n).view(4, n)
        torch.testing.assert_close(f(x.to(DEVICE)).cpu(), PLACES[name](x), msg=lambda text, n=n: f"{n}: {text}")
