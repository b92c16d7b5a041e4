"""torchvision's ops and a detector made of them."""

import warnings

import pytest
import torch

torchvision = pytest.importorskip("torchvision")
from torchvision.ops import DeformConv2d, batched_nms, deform_conv2d, nms, roi_align  # noqa: E402


def on_device(f):
    """What `f` gives with tensors of the device, none of whose ops ran on the CPU."""
    torch.tpu.reset_metrics()
    result = f("tpu")
    torch.tpu.synchronize()
    assert torch.tpu.metrics()["fallbacks"] == {}
    return result


def assert_alike(f, rtol=1e-4, atol=1e-4):
    for got, want in zip(on_device(f), f("cpu"), strict=True):
        torch.testing.assert_close(got.cpu(), want, rtol=rtol, atol=atol)


def boxes(n, g, size=50):
    b = torch.rand(n, 4, generator=g) * size
    b[:, 2:] += b[:, :2]
    return b


@pytest.mark.parametrize("n", [0, 1, 7, 400])
@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.9, 1.0])
def test_nms_keeps_what_the_cpu_keeps(n, threshold):
    g = torch.Generator().manual_seed(n)
    b, scores = boxes(n, g), torch.rand(n, generator=g).round(decimals=1)  # with many that are equal
    assert_alike(lambda d: [nms(b.to(d), scores.to(d), threshold)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [3, 5, 6, 7])
def test_nms_of_an_overlap_that_is_the_threshold(dtype, width):
    # As a float32 it may lie on either side of the double.
    b = torch.tensor([[0, 0, 10, 10], [0, 0, 10, width]], dtype=dtype)
    scores = torch.tensor([1.0, 0.5], dtype=dtype)
    assert_alike(lambda d: [nms(b.to(d), scores.to(d), width / 10)])


@pytest.mark.parametrize("f", [lambda b, s, x, n: nms(b, s, n / 10), lambda b, s, x, n: roi_align(x, [b], 2, n / 4)])
def test_a_new_number_compiles_nothing(f):
    g = torch.Generator().manual_seed(0)
    b, scores, x = boxes(6, g).to("tpu"), torch.rand(6, generator=g).to("tpu"), torch.rand(1, 2, 8, 8).to("tpu")
    f(b, scores, x, 1.5).cpu(), f(b, scores, x, 2.5).cpu()
    before = torch.tpu.metrics()["programs"]
    f(b, scores, x, 1.25).cpu(), f(b, scores, x, 1.75).cpu()
    assert torch.tpu.metrics()["programs"] == before


def test_nms_of_a_chain_in_which_each_beats_the_next():
    n = 64
    b = torch.stack([torch.arange(n) * 1.0, torch.zeros(n), torch.arange(n) + 10.0, torch.full((n,), 10.0)], 1)
    assert_alike(lambda d: [nms(b.to(d), torch.linspace(1, 0, n).to(d), 0.5)])


def test_nms_of_classes():
    g = torch.Generator().manual_seed(0)
    b, scores, labels = boxes(100, g), torch.rand(100, generator=g), torch.randint(0, 4, (100,), generator=g)
    assert_alike(lambda d: [batched_nms(b.to(d), scores.to(d), labels.to(d), 0.4)])


@pytest.mark.parametrize("shape", [(3, 3), (3, 5), (4,)])
def test_nms_refuses_boxes_of_another_shape(shape):
    with pytest.raises(RuntimeError, match="boxes should"):
        nms(torch.rand(shape, device="tpu"), torch.rand(3, device="tpu"), 0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("ratio", [2, -1])
@pytest.mark.parametrize("aligned", [True, False])
def test_roi_align_and_its_gradient(dtype, ratio, aligned):
    g = torch.Generator().manual_seed(0)
    image = torch.randn(2, 5, 12, 17, generator=g)
    rois = torch.cat([torch.randint(0, 2, (9, 1), generator=g), boxes(9, g, 20) - 3], 1)
    weight = torch.randn(9, 5, 3, 4, generator=g)

    def run(device):
        # The CPU has no kernel for bfloat16.
        of = torch.float32 if device == "cpu" and dtype == torch.bfloat16 else dtype
        x = image.to(device, dtype).to(of).requires_grad_()
        y = roi_align(x, rois.to(device, dtype).to(of), (3, 4), 0.7, ratio, aligned)
        (y * weight.to(device, of)).sum().backward()
        return y.to(dtype), x.grad.to(dtype)

    loose = 3e-2 if dtype == torch.bfloat16 else 1e-5
    assert_alike(run, loose, loose)


def test_roi_align_takes_a_list_of_boxes_for_each_image():
    g = torch.Generator().manual_seed(0)
    image, lists = torch.randn(2, 3, 9, 9, generator=g), [boxes(2, g, 5), boxes(4, g, 5)]
    assert_alike(lambda d: [roi_align(image.to(d), [b.to(d) for b in lists], 2)])


def test_boxes_that_lie_nowhere_crash_nothing():
    image = torch.randn(1, 2, 5, 5, device="tpu")
    far = [[0, float("nan"), 1, 2, 3], [0, 1, 1, float("inf"), 3], [0, -1e30, 0, 1e30, 4], [0, 1e9, 1e9, 2e9, 2e9]]
    assert roi_align(image, torch.tensor(far, device="tpu"), 2, sampling_ratio=2).shape == (4, 2, 2, 2)
    with pytest.raises(RuntimeError, match="an image that the batch has not"):
        roi_align(image, torch.tensor([[7.0, 0, 0, 1, 1]], device="tpu"), 2).cpu()


@pytest.mark.parametrize("mask", [True, False])
@pytest.mark.parametrize("groups", [1, 2])
def test_deformable_convolution_and_its_gradients(mask, groups):
    def run(device):
        g = torch.Generator().manual_seed(0)

        def leaf(*shape):
            return torch.randn(*shape, generator=g).to(device).requires_grad_()

        x, weight, bias = leaf(2, 4, 9, 11), leaf(6, 4 // groups, 3, 2), leaf(6)
        offset, weights = leaf(2, 2 * 2 * 6, 5, 13), leaf(2, 2 * 6, 5, 13)
        wanted = [x, weight, bias, offset] + [weights] * mask
        y = deform_conv2d(x, offset, weight, bias, (2, 1), (1, 2), (1, 2), weights if mask else None)
        y.square().sum().backward()
        return [y, *(t.grad for t in wanted)]

    assert_alike(run, 1e-3, 1e-3)


def test_a_deformable_convolution_under_autocast():
    layer = DeformConv2d(3, 4, 3, padding=1).to("tpu")
    with torch.autocast("tpu", torch.bfloat16):
        y = layer(torch.randn(1, 3, 6, 6, device="tpu"), torch.zeros(1, 18, 6, 6, device="tpu"))
    assert y.isfinite().all()


def test_a_deformable_convolution_refuses_an_offset_that_does_not_fit():
    with pytest.raises(RuntimeError, match="offset"):
        deform_conv2d(*(torch.rand(s, device="tpu") for s in [(1, 2, 5, 5), (1, 18, 4, 4), (3, 2, 3, 3)]))


@pytest.mark.slow
def test_a_detector_trains_and_detects():
    make = torchvision.models.detection.fasterrcnn_mobilenet_v3_large_320_fpn
    model = make(weights=None, weights_backbone=None, num_classes=3, min_size=64, max_size=96).to("tpu")
    images = [torch.rand(3, 64, 80, device="tpu") for _ in range(2)]
    box, label = torch.tensor([[4.0, 5, 40, 50]], device="tpu"), torch.ones(1, dtype=torch.long, device="tpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # an op on the CPU warns
        losses = model(images, [{"boxes": box, "labels": label}] * 2)
        sum(losses.values()).backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
        found = model.eval()(images)
    assert len(found) == 2 and found[0]["boxes"].shape[1] == 4
