"""What layers and losses are made of."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from rows import BF16_SUM, EXACT, FLOATS, Row, aten, ints, run
from support import DEVICE, assert_same, outcome, tensors, to_device


def test_gradients_of_dropout_in_integers():
    def f(x):
        return aten.native_dropout_backward(x, x > 2, 2.0)

    assert_same(f(torch.arange(5).to(DEVICE)), f(torch.arange(5)))


REFUSED_NUMBERS = {
    "softshrink": lambda x: F.softshrink(x, -0.5),
    "softshrink, not a number": lambda x: F.softshrink(x, float("nan")),
    "huber": lambda x: F.huber_loss(x, x, delta=0),
    "smooth l1": lambda x: F.smooth_l1_loss(x, x, beta=-1),
    "unpool": lambda x: aten.max_unpool3d(
        x[None, None, None],
        torch.zeros(1, 1, 1, 3, 4, dtype=torch.long, device=x.device),
        [2, 3, 4],
        [0, 1, 1],
        [0, 0, 0],
    ),
    "dimensions": lambda x: torch.amax(x[(..., *[None] * 63)], dim=0),
}


@pytest.mark.parametrize("name", REFUSED_NUMBERS)
def test_refused_numbers(name):
    x = torch.rand(3, 4)
    expected, got = outcome(REFUSED_NUMBERS[name], x), outcome(REFUSED_NUMBERS[name], x.to(DEVICE))
    assert isinstance(expected, RuntimeError)
    assert type(got) is type(expected) or isinstance(got, type(expected))
    assert str(got).startswith(str(expected).splitlines()[0][:40])


# ---------------------------------------------------------------- convolutions


def conv(rank, channels=(4, 6), size=6, kernel=3, groups=1, batch=2, bias=True, transposed=False, **options):
    f = getattr(F, f"conv_transpose{rank}d" if transposed else f"conv{rank}d")
    weight = (channels[0], channels[1] // groups) if transposed else (channels[1], channels[0] // groups)
    args = [(batch, channels[0], *[size] * rank), (*weight, *[kernel] * rank), *([(channels[1],)] if bias else [])]
    call = partial(lambda f, g, o, *a: f(*a, groups=g, **o), f, groups, options)
    tolerance = {torch.float32: (1e-5, 2e-5), **BF16_SUM}
    return Row(call, args, [torch.float32, torch.float64], low=-1, high=1, tolerance=tolerance, layouts=False)


CONVOLUTIONS = {
    "1d": conv(1, padding=1),
    "1d stride": conv(1, stride=2, bias=False),
    "1d same": conv(1, padding="same", dilation=2),
    "1d causal": conv(1, padding=2, dilation=2),
    "1d transposed": conv(1, transposed=True, stride=2, padding=1, output_padding=1),
    "2d": conv(2, padding=1),
    "2d no padding": conv(2),
    "2d stride": conv(2, stride=2, padding=1),
    "2d odd": conv(2, size=7, stride=(2, 3), padding=(1, 0), dilation=(1, 2)),
    "2d dilated": conv(2, dilation=2, padding=2),
    "2d grouped": conv(2, groups=2, padding=1),
    "2d depthwise": conv(2, channels=(4, 4), groups=4, padding=1),
    "2d depthwise multiplied": conv(2, channels=(3, 6), groups=3),
    "2d pointwise": conv(2, kernel=1),
    "2d unbatched": Row(lambda x, w: F.conv2d(x, w), [(3, 5, 5), (2, 3, 3, 3)], EXACT, layouts=False),
    "2d transposed": conv(2, transposed=True, stride=2, padding=1, output_padding=1),
    "2d transposed grouped": conv(2, transposed=True, groups=2, dilation=2),
    "3d": conv(3, size=4, padding=1, channels=(2, 3)),
    "3d transposed": conv(3, size=3, transposed=True, stride=2, channels=(2, 3)),
    "empty batch": conv(2, batch=0, padding=1),
}
CONVOLUTIONS["2d"].dtypes = FLOATS


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(name):
    run(CONVOLUTIONS[name])


# ---------------------------------------------------------------- normalisation, pooling

SUMS = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (2e-2, 3e-2)}


def batch_norm(x, w, b, training=True):
    mean, var = torch.zeros(4, device=x.device, dtype=w.dtype), torch.ones(4, device=x.device, dtype=w.dtype)
    y = F.batch_norm(x, mean, var, w, b, training, 0.2)
    return [y, mean, var]


def batch_norm_out(x):
    mean, var = torch.zeros(4, device=x.device), torch.ones(4, device=x.device)
    out, save_mean, save_invstd = (torch.empty(0, device=x.device) for _ in range(3))
    f = aten.native_batch_norm.out
    f(x, None, None, mean, var, True, 0.2, 1e-5, out=out, save_mean=save_mean, save_invstd=save_invstd)
    return [out, save_mean, save_invstd, mean, var]


NORMS = {
    "batch_norm": Row(batch_norm, [(3, 4, 5), (4,), (4,)], FLOATS, [[(3, 4), (4,), (4,)], [(2, 4, 3, 3), (4,), (4,)]]),
    "batch_norm eval": Row(partial(batch_norm, training=False), [(3, 4, 5), (4,), (4,)], FLOATS),
    "batch_norm without statistics": Row(lambda x: F.batch_norm(x, None, None, training=True), [(3, 4, 5)], EXACT),
    # The CPU's own form reads a transposed input in the wrong order.
    "batch_norm out": Row(batch_norm_out, [(3, 4, 5)], [torch.float32], grad=False, layouts=False),
    "instance_norm": Row(lambda x, w: F.instance_norm(x, weight=w, bias=w), [(2, 4, 5), (4,)], EXACT),
    "layer_norm": Row(lambda x, w, b: F.layer_norm(x, (4, 5), w, b), [(3, 4, 5), (4, 5), (4, 5)], FLOATS, [[(0, 4, 5), (4, 5), (4, 5)]]),
    "layer_norm plain": Row(lambda x: F.layer_norm(x, (5,), eps=1e-3), [(3, 4, 5)], FLOATS),
    "group_norm": Row(lambda x, w, b: F.group_norm(x, 2, w, b), [(3, 4, 5), (4,), (4,)], FLOATS),
    "rms_norm": Row(lambda x, w: F.rms_norm(x, (5,), w), [(3, 4, 5), (5,)], FLOATS),
    "normalize": Row(lambda x: F.normalize(x, dim=1), [(3, 4, 5)]),
    "local_response_norm": Row(lambda x: F.local_response_norm(x, 3), [(2, 4, 5)], EXACT),
}  # fmt: skip
POOLS = {
    "max 1d": Row(lambda x: F.max_pool1d(x, 3, 2, 1), [(2, 3, 8)], EXACT),
    "max 2d": Row(lambda x: F.max_pool2d(x, 2), [(2, 3, 6, 6)], FLOATS, [[(3, 6, 6)]]),
    "max 2d indices": Row(lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True), [(2, 3, 7, 7)], EXACT),
    "max 2d dilated": Row(lambda x: F.max_pool2d(x, 2, 1, dilation=2, ceil_mode=True), [(2, 3, 7, 7)], EXACT),
    "max 3d": Row(lambda x: F.max_pool3d(x, 2), [(2, 3, 4, 4, 4)], EXACT),
    "avg 1d": Row(lambda x: F.avg_pool1d(x, 3, 2, 1), [(2, 3, 8)], EXACT),
    "avg 2d": Row(lambda x: F.avg_pool2d(x, 2), [(2, 3, 6, 6)], FLOATS),
    "avg 2d odd": Row(lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False), [(2, 3, 7, 7)], EXACT),
    "avg 2d divisor": Row(lambda x: F.avg_pool2d(x, 2, divisor_override=3), [(2, 3, 6, 6)], EXACT),
    "avg 3d": Row(lambda x: F.avg_pool3d(x, 2), [(2, 3, 4, 4, 4)], EXACT),
    "adaptive avg 1d": Row(lambda x: F.adaptive_avg_pool1d(x, 3), [(2, 3, 8)], EXACT),
    "adaptive avg 2d": Row(lambda x: F.adaptive_avg_pool2d(x, (3, 2)), [(2, 3, 7, 5)], EXACT),
    "global avg": Row(lambda x: F.adaptive_avg_pool2d(x, 1), [(2, 3, 7, 5)], FLOATS, strides="the CPU keeps channels last for one pixel"),
    "adaptive max 2d": Row(lambda x: F.adaptive_max_pool2d(x, (3, 2)), [(2, 3, 7, 5)], EXACT),
    "interpolate nearest": Row(lambda x: F.interpolate(x, scale_factor=2), [(2, 3, 4, 4)], EXACT),
    "interpolate bilinear": Row(lambda x: F.interpolate(x, size=7, mode="bilinear"), [(2, 3, 4, 4)], EXACT),
    "interpolate corners": Row(lambda x: F.interpolate(x, size=7, mode="bilinear", align_corners=True), [(2, 3, 4, 4)], EXACT),
    "pixel_shuffle": Row(lambda x: [F.pixel_shuffle(x, 2), F.pixel_unshuffle(x, 2)], [(2, 4, 4, 4)], EXACT),
    "pad constant": Row(lambda x: [F.pad(x, (1, 2, -1, 1)), F.pad(x, (1, 1), value=2.5)], [(2, 3, 4)], [*FLOATS, torch.int64]),
    "pad reflect": Row(lambda x: [F.pad(x, (1, 2), mode=m) for m in ("reflect", "replicate", "circular")], [(2, 3, 4)], EXACT),
    "unfold fold": Row(lambda x: [F.unfold(x, 2), F.fold(F.unfold(x, 2), (4, 4), 2)], [(2, 3, 4, 4)], EXACT),
}  # fmt: skip
for row in (*NORMS.values(), *POOLS.values()):
    row.tolerance = SUMS


@pytest.mark.parametrize("name", NORMS)
def test_normalisation(name):
    run(NORMS[name])


@pytest.mark.parametrize("name", POOLS)
def test_pooling_and_padding(name):
    run(POOLS[name])


# ---------------------------------------------------------------- softmax, losses, attention, recurrent cells

CLASSES = ints(1, 0, 4)
LOSSES = {
    "softmax": Row(lambda x: [x.softmax(1), x.softmax(0), x.log_softmax(-1), F.softmin(x, 1)], [(3, 5)], FLOATS, [[()], [(0, 5)], [(3, 0)]]),
    "softmax dtype": Row(lambda x: [x.softmax(1, dtype=torch.float64), x.log_softmax(1, dtype=torch.float32)], [(3, 5)], [torch.float32, torch.bfloat16]),
    "cross_entropy": Row(lambda x, t: [F.cross_entropy(x, t, reduction=r) for r in ("mean", "sum", "none")], [(3, 5), CLASSES], FLOATS),
    "cross_entropy weights": Row(lambda x, t, w: [F.cross_entropy(x, t, w.abs().detach(), label_smoothing=0.1), F.cross_entropy(x, t, w.abs().detach(), ignore_index=0)], [(3, 5), CLASSES, (5,)], EXACT),
    "cross_entropy probabilities": Row(lambda x, p: F.cross_entropy(x, p.softmax(1)), [(3, 5), (3, 5)], EXACT),
    "cross_entropy images": Row(lambda x, t: F.cross_entropy(x, t), [(2, 5, 3), ints([1, 0, 4], [2, 2, 3])], EXACT),
    "cross_entropy all ignored": Row(lambda x, t: F.cross_entropy(x, t, ignore_index=1), [(1, 5), ints(1)], [torch.float32]),
    "nll_loss": Row(lambda x, t: F.nll_loss(x.log_softmax(1), t), [(3, 5), CLASSES], FLOATS),
    "mse": Row(lambda x, y: [F.mse_loss(x, y, reduction=r) for r in ("mean", "sum", "none")], [(3, 5), (3, 5)], FLOATS, [[(0,), (0,)]]),
    "l1": Row(lambda x, y: [F.l1_loss(x, y), F.smooth_l1_loss(x, y, beta=0.5), F.huber_loss(x, y, delta=0.7)], [(3, 5), (3, 5)], EXACT),
    "bce": Row(lambda x, y: [F.binary_cross_entropy(x, y.detach()), F.binary_cross_entropy(x, y.detach(), y.detach())], [(3, 5), (3, 5)], EXACT, low=0.1, high=0.9),
    "bce logits": Row(lambda x, y: [F.binary_cross_entropy_with_logits(x, y.sigmoid().detach(), pos_weight=y.abs()[0].detach()), F.binary_cross_entropy_with_logits(x, y.sigmoid().detach())], [(3, 5), (3, 5)], EXACT),
    "kl_div": Row(lambda x, y: [F.kl_div(x.log_softmax(1), y.softmax(1), reduction="batchmean"), F.kl_div(x, y, log_target=True)], [(3, 5), (3, 5)], EXACT),
    "margin": Row(lambda x, y: [F.margin_ranking_loss(x, y, y.sign().detach()), F.cosine_embedding_loss(x, y, y[:, 0].sign().detach()), F.triplet_margin_loss(x, y, x + y), F.hinge_embedding_loss(x, y.sign().detach())], [(3, 5), (3, 5)], EXACT),
    "multi": Row(lambda x, t: [F.multi_margin_loss(x, t), F.soft_margin_loss(x, x.sign().detach()), F.multilabel_soft_margin_loss(x, (x > 0).to(x.dtype))], [(3, 5), CLASSES], EXACT),
    "gaussian": Row(lambda x, y: [F.gaussian_nll_loss(x, y, y.abs() + 1), F.poisson_nll_loss(x, y.abs())], [(3, 5), (3, 5)], EXACT),
    "cosine": Row(lambda x, y: [F.cosine_similarity(x, y), F.pairwise_distance(x, y)], [(3, 5), (3, 5)], EXACT),
    "ctc": Row(lambda x: F.ctc_loss(x.log_softmax(2), ints([1, 2], [2, 1]).to(x.device), ints(6, 6), ints(2, 2)), [(6, 2, 4)], EXACT),
    "glu": Row(lambda x: [F.glu(x, 1), F.glu(x, 0)], [(4, 6)], FLOATS),
    "prelu": Row(lambda x, w: F.prelu(x, w), [(3, 5), (5,)], EXACT),
    "rrelu eval": Row(lambda x: [F.rrelu(x), F.threshold(x, 0.5, -1), F.hardtanh(x, -2, 0.5)], [(3, 5)], EXACT),
}  # fmt: skip
for row in LOSSES.values():
    row.tolerance = SUMS


@pytest.mark.parametrize("name", LOSSES)
def test_softmax_and_losses(name):
    run(LOSSES[name])


ATTENTION = (2, 3, 4, 8)
sdpa = F.scaled_dot_product_attention
ATTENTIONS = {
    "plain": Row(lambda q, k, v: sdpa(q, k, v), [ATTENTION] * 3, FLOATS),
    "causal": Row(lambda q, k, v: sdpa(q, k, v, is_causal=True), [ATTENTION] * 3, FLOATS),
    "scaled": Row(lambda q, k, v: sdpa(q, k, v, scale=0.3), [ATTENTION] * 3, EXACT),
    "longer keys": Row(lambda q, k, v: sdpa(q, k, v), [ATTENTION, (2, 3, 6, 8), (2, 3, 6, 5)], EXACT),
    "mask": Row(lambda q, k, v, m: sdpa(q, k, v, m > 0.2), [*[ATTENTION] * 3, torch.linspace(0, 1, 16).view(4, 4)], EXACT),
    "float mask": Row(lambda q, k, v, m: sdpa(q, k, v, m), [*[ATTENTION] * 3, (2, 1, 4, 4)], EXACT),
    "grouped": Row(lambda q, k, v: sdpa(q, k, v, enable_gqa=True), [(2, 4, 3, 8), (2, 2, 3, 8), (2, 2, 3, 8)], EXACT),
    "three dimensions": Row(lambda q, k, v: sdpa(q, k, v), [(2, 4, 8)] * 3, EXACT),
    "of the transposed": Row(lambda q, k, v: sdpa(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True).transpose(1, 2).reshape(2, 4, -1), [(2, 4, 3, 8)] * 3, EXACT),
}  # fmt: skip
for row in ATTENTIONS.values():
    row.tolerance = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (3e-2, 3e-2)}
    row.strides = "the CPU's composite, which it takes where elements lie apart, has others than its fused kernel"


@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention(name):
    run(ATTENTIONS[name])


# Queries, keys and values of batch, heads, length, width as projections give them.
HEADS = {
    "row-major": lambda b, h, n, w: torch.rand(b, h, n, w),
    "transposed": lambda b, h, n, w: torch.rand(b, n, h, w).transpose(1, 2),
    "of a joint projection": lambda b, h, n, w: torch.rand(b, n, 3, h, w).permute(2, 0, 3, 1, 4)[1],
    "length first": lambda b, h, n, w: torch.rand(n, b, h, w).permute(1, 2, 0, 3),
    "expanded": lambda b, h, n, w: torch.rand(1, h, n, w).expand(b, h, n, w),
}


@pytest.mark.parametrize("name", HEADS)
def test_attention_keeps_the_order_of_the_heads(name):
    """Strides are those of PyTorch's fused kernel and of the op's meta function, by which `torch.compile` makes views."""
    op = torch.ops.aten._scaled_dot_product_fused_attention_overrideable

    def strides(device, widths, bias):
        q, k, v = (HEADS[name](2, 4, 6, w).to(device) for w in widths)
        mask = torch.zeros(2, 4, 6, 6, device=device) if bias else None
        out, logsumexp, *_, seed, offset, _ = op(q, k, v, mask)
        need = [True, True, True, bias]
        grads = torch.ops.aten._scaled_dot_product_fused_attention_overrideable_backward(
            out, q, k, v, mask, need, out, logsumexp, None, None, 6, 6, 0.0, False, seed, offset
        )
        return [t.stride() for t in (out, logsumexp, *grads) if t is not None]

    for widths in ((8, 8, 8), (8, 8, 5)):
        for bias in (False, True):
            assert strides(DEVICE, widths, bias) == strides("meta", widths, bias), (widths, bias)
    q = HEADS[name](2, 4, 6, 8)
    assert sdpa(*[to_device(q)] * 3).stride() == sdpa(q, q, q).stride()


@pytest.mark.parametrize(
    "kernel", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "OVERRIDEABLE", "MATH"]
)
def test_attention_by_the_name_of_a_kernel(kernel):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q = torch.ones(1, 2, 4, 8, device=DEVICE)
    with sdpa_kernel(getattr(SDPBackend, kernel)):
        taken = torch._fused_sdp_choice(q, q, q)
    assert taken == (SDPBackend.MATH if kernel == "MATH" else SDPBackend.OVERRIDEABLE).value


def module_results(make, *inputs):
    """Outputs and all gradients of a module on the CPU and on the device, from the same weights."""
    torch.manual_seed(1)
    module = make()
    twin = make().to(DEVICE)
    twin.load_state_dict(module.state_dict())
    results = []
    for m, device in ((module, "cpu"), (twin, DEVICE)):
        args = [i.detach().clone().to(device).requires_grad_() for i in inputs]
        out = tensors(m(*args))
        sum(
            (o * torch.linspace(0, 1, o.numel(), device=device, dtype=o.dtype).view(o.shape)).sum() for o in out
        ).backward()
        results.append(
            out + [a.grad for a in args if a.requires_grad] + [p.grad for p in m.parameters()] + list(m.buffers())
        )
    return results


MODULES = {
    "LSTM": (lambda: torch.nn.LSTM(3, 4, num_layers=2, batch_first=True), [(2, 5, 3)]),
    "LSTM bidirectional": (lambda: torch.nn.LSTM(3, 4, bidirectional=True), [(5, 2, 3)]),
    "GRU": (lambda: torch.nn.GRU(3, 4, num_layers=2), [(5, 2, 3)]),
    "RNN": (lambda: torch.nn.RNN(3, 4, nonlinearity="relu"), [(5, 2, 3)]),
    "LSTMCell": (lambda: torch.nn.LSTMCell(3, 4), [(2, 3)]),
    "GRUCell": (lambda: torch.nn.GRUCell(3, 4), [(2, 3)]),
    "MultiheadAttention": (lambda: Attend(torch.nn.MultiheadAttention(8, 2, batch_first=True)), [(2, 5, 8)]),
    "TransformerEncoderLayer": (lambda: torch.nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), [(2, 5, 8)]),
    "BatchNorm2d": (lambda: torch.nn.BatchNorm2d(3), [(2, 3, 4, 4)]),
    "Bilinear": (lambda: torch.nn.Bilinear(3, 4, 5), [(2, 3), (2, 4)]),
}


class Attend(torch.nn.Module):
    """Attention of a sequence to itself."""

    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, x):
        return self.attention(x, x, x)


@pytest.mark.parametrize("name", MODULES)
def test_modules(name):
    make, shapes = MODULES[name]
    torch.manual_seed(2)
    expected, got = module_results(make, *[torch.randn(s) for s in shapes])
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert_same(a, b, f"{name}, {i}", strides=False, rtol=1e-4, atol=1e-5)


def test_nothing_above_ran_on_the_cpu():
    """Ops of the models that the device is built for; the rest of this file may fall back and is counted."""
    torch.tpu.reset_metrics()
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
        torch.nn.Flatten(), torch.nn.LayerNorm(16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 5),
    ).to(DEVICE)  # fmt: skip
    loss = F.cross_entropy(model(torch.randn(2, 3, 4, 4, device=DEVICE)), torch.tensor([1, 4], device=DEVICE))
    loss.backward()
    assert torch.tpu.metrics()["fallbacks"] == {}
