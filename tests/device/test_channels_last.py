"""Images with their channels last in memory: values and strides are the CPU's, and on the cpu platform no program turns
them round between operations that can do without."""

import re

import pytest
import torch
import torch.nn.functional as F
from support import DEVICE, assert_same, tensors, to_device
from torch import nn

CHANNELS_LAST = {
    "batch norm": lambda x: F.batch_norm(x, None, None, None, None, True),
    "group norm": lambda x: F.group_norm(x, 2),
    "max pool": lambda x: F.max_pool2d(x, 2, return_indices=True),
    "average pool": lambda x: F.avg_pool2d(x, 2),
    "adaptive pool": lambda x: F.adaptive_avg_pool2d(x, 3),
    "interpolate": lambda x: [F.interpolate(x, scale_factor=2), F.interpolate(x, scale_factor=2, mode="bilinear")],
    "pad": lambda x: [
        F.pad(x, (1, 1)),
        F.pad(x, (1, 1, 0, 1), mode="reflect"),
        F.pad(x, (1, 1, 0, 1), mode="replicate"),
    ],
    "cat": lambda x: [torch.cat([x, x], 1), torch.cat([x, x.contiguous()], 1)],
    "shuffle": lambda x: [F.pixel_shuffle(x, 2), F.pixel_unshuffle(x, 2), F.channel_shuffle(x, 2)],
    "convolution": lambda x: F.conv_transpose2d(x, torch.ones(4, 3, 2, 2, device=x.device)),
    "softmax": lambda x: F.softmax(x, 1),
    "index": lambda x: [x[:, [0, 1]], x[[0, 1]], x[[0, 1], :, [1, 2]], x[None, [0, 1]]],
}


@pytest.mark.parametrize("name", CHANNELS_LAST)
def test_channels_last(name):
    plain = torch.rand(2, 4, 6, 6, generator=torch.Generator().manual_seed(1))
    for x in (
        plain,
        plain.contiguous(memory_format=torch.channels_last),
        plain.mT.contiguous().mT,
        plain[:, :1].expand(2, 4, 6, 6),
    ):
        pairs = zip(tensors(CHANNELS_LAST[name](to_device(x))), tensors(CHANNELS_LAST[name](x)), strict=True)
        for i, (got, expected) in enumerate(pairs):
            assert_same(got, expected, f"strides {x.stride()}, result {i}", rtol=1e-5, atol=1e-5)


def test_convolution_in_channels_last():
    x = torch.randn(2, 4, 6, 6).contiguous(memory_format=torch.channels_last)
    w = torch.randn(3, 4, 3, 3).contiguous(memory_format=torch.channels_last)
    expected, got = F.conv2d(x, w, padding=1), F.conv2d(to_device(x), to_device(w), padding=1)
    assert_same(got, expected, rtol=1e-5, atol=2e-5)
    assert got.is_contiguous(memory_format=torch.channels_last)


# ---------------------------------------------------------------- one operation after another

WEIGHT = torch.linspace(0.5, 1.5, 4)
CHAINED = {
    "pointwise": lambda x, w: F.silu(x) * 2 + F.leaky_relu(x, 0.1),
    "chosen": lambda x, w: torch.where(x > 0, x, x.clamp(-0.5, 1)),
    "per channel": lambda x, w: x * w[:, None, None] + w.view(1, 4, 1, 1),
    "batch norm": lambda x, w: F.batch_norm(x, None, None, w, w, True),
    "evaluated batch norm": lambda x, w: F.batch_norm(x, w.detach(), w.detach(), w, w, False),
    "layer norm of channels": lambda x, w: F.layer_norm(x.permute(0, 2, 3, 1), (4,), w, w).permute(0, 3, 1, 2),
    "sums": lambda x, w: x - x.mean((2, 3), keepdim=True) + x.sum(1, keepdim=True),
    "reduced": lambda x, w: x.amax((0, 2, 3)) + x.var((0, 2, 3)),
    "average pool": lambda x, w: F.avg_pool2d(x, 3, 2, 1),
    "max pool": lambda x, w: F.max_pool2d(x, 3, 2, 1),
    "pad": lambda x, w: F.pad(x, (1, 2, 0, 1)),
    "cut": lambda x, w: x[:, 1:3, ::2] + x[:, :2, 1::2],
    "turned": lambda x, w: x.flip(2) + x.flip(1),
    "joined": lambda x, w: torch.cat([x, x.sigmoid()], 1),
    "gated": lambda x, w: x * torch.sigmoid(x.mean((2, 3), keepdim=True) * w[:, None, None]),
    "convolution": lambda x, w: F.conv2d(x, w.expand(3, 4).reshape(3, 4, 1, 1)),
    "depthwise": lambda x, w: F.conv2d(x, w.reshape(4, 1, 1, 1).expand(4, 1, 3, 3), groups=4),
    "bfloat16": lambda x, w: torch.where(x > 0, x.bfloat16(), x.bfloat16() * 2).float(),
    "one image": lambda x, w: x[:1].tanh() * w[:, None, None],
    "volume": lambda x, w: (x[:, :, None].contiguous(memory_format=torch.channels_last_3d) * 2).sum((0, 2)),
}


def chained(f, x, w):
    """What `f` gives between two other operations, and the gradients."""
    x, w = (t.detach().requires_grad_() for t in (x, w))
    y = torch.tanh(f(torch.sin(x), w))
    y.sin().sum().backward()
    return [y, x.grad, *([] if w.grad is None else [w.grad])]


def image(*shape):
    made = torch.rand(*shape, generator=torch.Generator().manual_seed(1)) - 0.4
    return made.contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("name", CHAINED)
def test_values_strides_and_gradients(name):
    x = image(2, 4, 6, 6)
    expected = chained(CHAINED[name], x, WEIGHT)
    for i, (got, want) in enumerate(zip(chained(CHAINED[name], *to_device([x, WEIGHT])), expected, strict=True)):
        assert_same(got, want, f"{name}, result {i}", rtol=1e-4, atol=1e-5)


# What turns an image round in between, or reads it in another order.
TURNS = {"convolution", "depthwise", "one image", "volume"}


@pytest.mark.skipif(torch.tpu.platform() != "cpu", reason="other compilers choose layouts themselves")
@pytest.mark.parametrize("name", [name for name in CHAINED if name not in TURNS])
def test_no_image_is_turned_round(name):
    def forward(x, w):
        return torch.tanh(CHAINED[name](torch.sin(x), w))

    text = torch.tpu.jit(forward).lower(*to_device([image(2, 4, 6, 6), WEIGHT])).as_text()
    turned = [
        line for line in text.splitlines() if "stablehlo.transpose" in line and re.search(r"<2(x(?!1x)\d+){3}x", line)
    ]
    assert not turned, "\n".join(turned)


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)

    def forward(self, x):
        return x + F.relu(self.norm(self.conv(x)))


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("way", ["eager", "compile", "jit"])
def test_a_network_is_trained_as_on_the_cpu(way, memory_format):
    """Large enough for PyTorch's kernels of convolutions and statistics, where programs call them."""

    def trained(device):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1), Block(32), nn.MaxPool2d(2), Block(32),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 5),
        )  # fmt: skip
        model = model.to(device, memory_format=memory_format)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        x, y = image(8, 3, 32, 32).to(device, memory_format=memory_format), (torch.arange(8) % 5).to(device)

        def step(x, y):
            loss = F.cross_entropy(forward(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        forward = torch.compile(model, backend="tpu") if way == "compile" and device == DEVICE else model
        step = torch.tpu.jit(step) if way == "jit" and device == DEVICE else step
        losses = [step(x, y).item() for _ in range(4)]
        return losses, dict(model.named_parameters()) | dict(model.named_buffers())

    (losses, state), (expected, expected_state) = trained(DEVICE), trained("cpu")
    assert losses == pytest.approx(expected, rel=1e-4)
    for name, value in expected_state.items():
        assert_same(state[name], value, name, rtol=1e-3, atol=1e-4)


@pytest.mark.skipif(torch.tpu.platform() != "cpu", reason="other compilers choose layouts themselves")
@pytest.mark.parametrize("seen", [False, True])
def test_convolutions_in_a_program_are_channels_last(seen):
    """An image that stays within a program has its channels last for PyTorch's kernels; one that is seen is not turned."""
    layers = nn.Sequential(*(nn.Conv2d(32, 32, 3, padding=1) for _ in range(5))).to(DEVICE)

    @torch.no_grad()
    def forward(x):
        images = [x]
        for layer in layers:
            images.append(torch.tanh(layer(images[-1])))
        return images if seen else images[-1].sum()

    text = torch.tpu.jit(forward).lower(torch.ones(8, 32, 32, 32, device=DEVICE)).as_text()
    if "oxitorch.host_call" not in text:
        pytest.skip("convolutions are the compiler's here")
    turned = [line for line in text.splitlines() if "stablehlo.transpose" in line and "8x32x32x32x" in line]
    assert len(turned) == (0 if seen else 1), "\n".join(turned)


@pytest.mark.skipif(torch.tpu.platform() != "cpu", reason="only programs in host memory call PyTorch's kernels")
@pytest.mark.parametrize("last", [False, True], ids=["rows", "channels last"])
def test_weights_that_are_more_than_their_image_are_not_turned_round(last):
    """PyTorch's kernel would turn the weight at each call, so it is given such an image row-major."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(4, 16, 64, 64, generator=generator)
    small = torch.randn(64, 16, 3, 3, generator=generator) / 12
    large = [torch.randn(64, 64, 3, 3, generator=generator) / 24 for _ in range(2)]
    if last:
        x, small = (v.to(memory_format=torch.channels_last) for v in (x, small))

    def f(x, small, *large):
        y = F.conv2d(x, small, stride=8, padding=1).sin()
        for w in large:
            y = F.conv2d(y, w, padding=1).sin()
        return y.sum()

    def found(device, call):
        leaves = [v.detach().to(device).requires_grad_() for v in (x, small, *large)]
        return torch.autograd.grad(call(*leaves), leaves)

    step = torch.tpu.jit(lambda *a: torch.autograd.grad(f(*a), a))
    leaves = [v.detach().to(DEVICE).requires_grad_() for v in (x, small, *large)]
    for ours, theirs in zip(step(*leaves), found("cpu", f), strict=True):
        assert_same(ours, theirs, strides=False, rtol=1e-3, atol=1e-3)
    for ours, theirs in zip(found(DEVICE, f), found("cpu", f), strict=True):
        assert_same(ours, theirs, strides=False, rtol=1e-3, atol=1e-3)
    words = re.findall(r"call = array<i64: ([^>]*)>, fn = \"aten\", op = \"convolution", step.lower(*leaves).as_text())
    # Sizes and strides of a weight and of the image, in the words of a call.
    calls = [call for call in words if "64, 64, 3, 3, 576, 9, 3, 1, 0" in call]
    assert len(calls) >= 2, words
    assert all("4, 64, 8, 8, 4096, 64, 8, 1, 0" in call for call in calls), calls
