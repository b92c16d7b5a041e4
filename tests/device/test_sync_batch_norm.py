"""The parts of a batch norm, with a batch in two pieces, give what the whole gives on the CPU."""

import pytest
import torch
import torch.nn.functional as F

DEVICE = "tpu"
EPS, MOMENTUM = 1e-5, 0.1
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_parts_give_the_whole(dtype, memory_format):
    g = torch.Generator().manual_seed(0)
    wide = torch.promote_types(dtype, torch.float32)  # of statistics and parameters

    def near(got, wanted):
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(got.cpu().to(wide), wanted.detach(), rtol=tolerance, atol=tolerance)

    x = (torch.randn(6, 4, 3, 3, generator=g) * 2 + 1).to(dtype).to(memory_format=memory_format)
    grad = torch.randn(x.shape, generator=g).to(dtype).to(memory_format=memory_format)
    leaves = [x.to(wide), (torch.rand(4, generator=g) + 0.5).to(wide), torch.randn(4, generator=g).to(wide)]
    whole, weight, bias = [t.requires_grad_() for t in leaves]
    running = [torch.zeros(4, dtype=wide), torch.ones(4, dtype=wide)]
    moved = [t.to(DEVICE) for t in running]
    y = F.batch_norm(whole, *running, weight, bias, True, MOMENTUM, EPS)
    y.backward(grad.to(wide))

    parts = [(x[i].to(DEVICE), grad[i].to(DEVICE)) for i in (slice(2), slice(2, 6))]
    w, b = (t.detach().to(DEVICE) for t in (weight, bias))
    each = [torch.batch_norm_stats(p, EPS) for p, _ in parts]
    assert {s.dtype for found in each for s in found} == {wide}
    means, invstds = (torch.stack(s) for s in zip(*each, strict=True))
    counts = torch.tensor([18, 36], dtype=wide, device=DEVICE)
    stats = torch.batch_norm_gather_stats_with_counts(x.to(DEVICE), means, invstds, *moved, MOMENTUM, EPS, counts)
    for got, wanted in zip(moved, running, strict=True):
        near(got, wanted)
    out = [torch.batch_norm_elemt(p, w, b, *stats, EPS) for p, _ in parts]
    near(torch.cat(out), y)
    assert all(t.dtype == dtype and t.is_contiguous(memory_format=memory_format) for t in out)
    given = torch.empty_like(out[0])
    torch.batch_norm_elemt(parts[0][0], w, b, *stats, EPS, out=given)
    assert torch.equal(given, out[0])

    reduced = [torch.batch_norm_backward_reduce(g, p, *stats, w, True, True, True) for p, g in parts]
    sum_dy, sum_dy_xmu, grad_weight, grad_bias = (a + b for a, b in zip(*reduced, strict=True))
    torch.testing.assert_close(grad_weight.cpu(), weight.grad, rtol=TOLERANCE[dtype], atol=1e-4)
    torch.testing.assert_close(grad_bias.cpu(), bias.grad, rtol=TOLERANCE[dtype], atol=1e-4)
    sums = (sum_dy, sum_dy_xmu, counts.to(torch.int32))
    near(torch.cat([torch.batch_norm_backward_elemt(g, p, *stats, w, *sums) for p, g in parts]), whole.grad)


def test_running_statistics_move():
    x = torch.randn(5, 3, 2, generator=torch.Generator().manual_seed(0))
    running = [torch.zeros(3), torch.ones(3)]
    moved = [t.to(DEVICE) for t in running]
    gathered = [t.to(DEVICE) for t in running]
    wanted = torch.batch_norm_update_stats(x, *running, MOMENTUM)
    got = torch.batch_norm_update_stats(x.to(DEVICE), *moved, MOMENTUM)
    one = [t[None] for t in torch.batch_norm_stats(x.to(DEVICE), EPS)]
    torch.batch_norm_gather_stats(x.to(DEVICE), *one, *gathered, MOMENTUM, EPS, 10)
    for a, b in zip([*got, *moved, *gathered], [*wanted, *running, *running], strict=True):
        torch.testing.assert_close(a.cpu(), b)


def test_a_constant_without_eps_has_nothing_to_scale():
    mean, invstd = torch.batch_norm_stats(torch.full((2, 3), 5.0, device=DEVICE), 0.0)
    assert mean.tolist() == [5, 5, 5]
    assert invstd.tolist() == [0, 0, 0]


def test_nobody_has_a_value():
    running = [torch.ones(3, device=DEVICE), torch.ones(3, device=DEVICE)]
    nothing = [torch.zeros(2, 3, device=DEVICE), torch.ones(2, 3, device=DEVICE)]
    x, counts = torch.empty(0, 3, device=DEVICE), torch.zeros(2, device=DEVICE)
    torch.batch_norm_gather_stats_with_counts(x, *nothing, *running, MOMENTUM, EPS, counts)
    assert all(t.isfinite().all() for t in running)
