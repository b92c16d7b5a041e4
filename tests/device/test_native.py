"""Operations that other backends of this kind lack: each runs on the device, forward and backward, and is right."""

import pytest
import torch
import torch.nn.functional as F
from support import DEVICE, assert_same, tensors, to_device

aten = torch.ops.aten
special = torch.special
L = torch.linalg
torch.manual_seed(21)  # the arguments are made when this is imported


def x(*shape, low=-2.0, high=2.0):
    return (low + (high - low) * torch.rand(*shape)).requires_grad_()


def unit(*shape):
    return x(*shape, low=0.1, high=0.9)


def positive(n):
    a = torch.randn(2, n, n)
    return (a @ a.mT + n * torch.eye(n)).requires_grad_()


def labels(n, *shape):
    return torch.randint(0, n, shape)


def packed():
    return tuple(t.detach() for t in torch.geqrf(torch.randn(2, 5, 3)))


def unpooled(n):
    y, at = getattr(F, f"max_pool{n}d")(torch.randn(2, 3, *[6] * n), 2, return_indices=True)
    return y.requires_grad_(), at


def fractional(n):
    def f(x, r):
        return getattr(aten, f"fractional_max_pool{n}d")(x, [2] * n, [3] * n, r)[0]

    return f, (x(2, 3, *[7] * n), torch.rand(2, 3, n))


def unscale(grad, scale):
    found = torch.zeros(1, device=grad.device)
    grad = grad.clone()
    torch._amp_foreach_non_finite_check_and_unscale_([grad], found, scale)
    return grad, found


def update(scale, found):
    scale, growth = scale.clone(), torch.zeros(scale.shape, dtype=torch.int32, device=scale.device)
    return torch._amp_update_scale_(scale, growth, found, 2.0, 0.5, 1), growth


def out_form(f, *shape, dtype=torch.float32):
    return lambda *args: f(*args, out=torch.empty(shape, dtype=dtype, device=args[0].device))


# Name: (function, arguments). Arguments that require gradients get them.
CASES = {
    # linear algebra
    "cholesky": (L.cholesky, (positive(4),)),
    "cholesky_ex": (lambda a: L.cholesky_ex(a)[0], (positive(4),)),
    "cholesky_solve": (torch.cholesky_solve, (x(2, 4, 3), positive(4))),
    "cholesky_inverse": (torch.cholesky_inverse, (positive(4),)),
    "det": (L.det, (x(2, 4, 4),)),
    "slogdet": (L.slogdet, (positive(4),)),
    "logdet": (torch.logdet, (positive(4),)),
    "inv": (L.inv, (positive(4),)),
    "inv_ex": (lambda a: L.inv_ex(a)[0], (positive(4),)),
    "pinv": (L.pinv, (x(2, 5, 3),)),
    "solve": (L.solve, (positive(4), x(2, 4, 3))),
    "solve_triangular": (lambda a, b: L.solve_triangular(a, b, upper=True), (positive(4), x(2, 4, 3))),
    "lu": (L.lu, (positive(4),)),
    "lu_factor": (L.lu_factor, (positive(4),)),
    "lu_solve": (L.lu_solve, (*(t.detach() for t in L.lu_factor(positive(4))), x(2, 4, 3))),
    "lstsq": (lambda a, b: L.lstsq(a, b).solution, (x(2, 4, 4), x(2, 4, 3))),
    "ldl_factor": (L.ldl_factor, (positive(4).detach(),)),
    "qr": (L.qr, (x(2, 5, 3),)),
    "geqrf": (torch.geqrf, (x(2, 5, 3).detach(),)),
    "householder_product": (L.householder_product, packed()),
    "ormqr": (torch.ormqr, (*packed(), x(2, 5, 2))),
    "eig": (lambda a: L.eig(a)[0].abs().sum(-1), (x(2, 4, 4),)),
    "eigvals": (lambda a: L.eigvals(a).abs().sum(-1), (x(2, 4, 4),)),
    "eigh": (lambda a: L.eigh(a)[0], (positive(4),)),
    "eigvalsh": (L.eigvalsh, (positive(4),)),
    "svd": (lambda a: L.svd(a, full_matrices=False)[1], (x(2, 5, 3),)),
    "svdvals": (L.svdvals, (x(2, 5, 3),)),
    "matrix_rank": (L.matrix_rank, (x(2, 5, 3).detach(),)),
    "cond": (L.cond, (positive(4),)),
    "matrix_norm": (lambda a: L.matrix_norm(a, 2), (x(2, 5, 3),)),
    "matrix_exp": (torch.matrix_exp, (x(2, 4, 4),)),
    "matrix_power": (lambda a: L.matrix_power(a, 3), (x(2, 4, 4),)),
    "cross": (L.cross, (x(4, 3), x(4, 3))),
    "vander": (L.vander, (x(4),)),
    "multi_dot": (lambda *a: L.multi_dot(a), (x(3, 4), x(4, 5), x(5, 2))),
    # order statistics
    "median": (torch.median, (x(5, 7),)),
    "median of a dimension": (lambda a: a.median(1), (x(5, 7),)),
    "nanmedian": (torch.nanmedian, (x(5, 7),)),
    "nanmedian of a dimension": (lambda a: a.nanmedian(1), (x(5, 7),)),
    "mode": (lambda a: a.mode(1), (labels(3, 5, 7).float(),)),
    "kthvalue": (lambda a: a.kthvalue(3, 1), (x(5, 7),)),
    "quantile": (lambda a: a.quantile(0.3, 1), (x(5, 7),)),
    # special functions
    **{
        name: (getattr(special, name), (unit(4, 5),))
        for name in (
            "digamma", "erfcx", "erfinv", "expit", "entr", "gammaln", "i0", "i0e", "i1", "i1e", "log_ndtr", "logit",
            "ndtr", "ndtri", "psi", "sinc",
        )
    },
    **{
        name: (getattr(special, name), (unit(4, 5).detach(),))
        for name in (
            "airy_ai", "bessel_j0", "bessel_j1", "bessel_y0", "bessel_y1", "modified_bessel_i0", "modified_bessel_i1",
            "modified_bessel_k0", "modified_bessel_k1", "scaled_modified_bessel_k0", "scaled_modified_bessel_k1",
            "spherical_bessel_j0",
        )
    },
    "polygamma": (lambda a: special.polygamma(2, a), (x(4, 5, low=1, high=3),)),
    "multigammaln": (lambda a: special.multigammaln(a, 2), (x(4, 5, low=1, high=3),)),
    "zeta": (special.zeta, (x(4, 5, low=2, high=4).detach(), x(4, 5, low=1, high=3))),
    "xlogy": (special.xlogy, (unit(4, 5), unit(4, 5))),
    "xlog1py": (special.xlog1py, (unit(4, 5), unit(4, 5))),
    "gammainc": (special.gammainc, (unit(4, 5).detach(), unit(4, 5))),
    "gammaincc": (special.gammaincc, (unit(4, 5).detach(), unit(4, 5))),
    "chebyshev_polynomial_t": (special.chebyshev_polynomial_t, (unit(4).detach(), labels(5, 4))),
    "hermite_polynomial_h": (special.hermite_polynomial_h, (unit(4).detach(), labels(5, 4))),
    # reductions and arithmetic
    "std_mean": (lambda a: torch.std_mean(a, 1), (x(4, 5),)),
    "var_mean": (lambda a: torch.var_mean(a, 1), (x(4, 5),)),
    "nansum": (lambda a: a.nansum(1), (x(4, 5),)),
    "trace": (torch.trace, (x(4, 5),)),
    "hypot": (torch.hypot, (x(4, 5), x(4, 5))),
    "copysign": (torch.copysign, (x(4, 5), x(4, 5))),
    "logaddexp": (torch.logaddexp, (x(4, 5), x(4, 5))),
    "logaddexp2": (torch.logaddexp2, (x(4, 5), x(4, 5))),
    "heaviside": (torch.heaviside, (x(4, 5).detach(), x(4, 5).detach())),
    "renorm": (lambda a: a.renorm(2, 0, 1.0), (x(4, 5),)),
    # losses and activations
    "smooth_l1_loss": (F.smooth_l1_loss, (x(4, 5), x(4, 5))),
    "huber_loss": (F.huber_loss, (x(4, 5), x(4, 5))),
    "multi_margin_loss": (F.multi_margin_loss, (x(4, 5), labels(5, 4))),
    "multilabel_margin_loss": (F.multilabel_margin_loss, (x(4, 5), labels(5, 4, 5))),
    "ctc_loss": (
        lambda a, t: F.ctc_loss(a.log_softmax(-1), t, (10, 8), (4, 3)),
        (x(10, 2, 5), labels(4, 2, 4) + 1),
    ),
    "mish": (F.mish, (x(4, 5),)),
    "hardshrink": (F.hardshrink, (x(4, 5),)),
    "softshrink": (F.softshrink, (x(4, 5),)),
    "celu": (F.celu, (x(4, 5),)),
    "rrelu": (lambda a: F.rrelu(a, training=False), (x(4, 5),)),
    # pooling and resampling
    "max_unpool1d": (lambda a, i: F.max_unpool1d(a, i, 2), unpooled(1)),
    "max_unpool2d": (lambda a, i: F.max_unpool2d(a, i, 2), unpooled(2)),
    "max_unpool3d": (lambda a, i: F.max_unpool3d(a, i, 2), unpooled(3)),
    "fractional_max_pool2d": fractional(2),
    "fractional_max_pool3d": fractional(3),
    "trilinear": (lambda a: F.interpolate(a, scale_factor=2, mode="trilinear"), (x(1, 2, 3, 4, 5),)),
    "bilinear antialiased": (lambda a: F.interpolate(a, (3, 4), mode="bilinear", antialias=True), (x(1, 2, 9, 8),)),
    "bicubic antialiased": (lambda a: F.interpolate(a, (3, 4), mode="bicubic", antialias=True), (x(1, 2, 9, 8),)),
    # GradScaler
    "unscale": (unscale, (torch.randn(4, 5), torch.tensor([0.5]))),
    "unscale infinity": (unscale, (torch.tensor([1.0, float("inf")]), torch.tensor([0.5]))),
    "update_scale": (update, (torch.tensor([8.0]), torch.tensor([0.0]))),
    "update_scale of other shapes": (update, (torch.tensor(8.0), torch.tensor([1.0]))),
    "update_scale after infinity": (update, (torch.tensor([8.0]), torch.tensor([1.0]))),
    # products with weights of few bits
    "_int_mm": (torch._int_mm, (labels(9, 32, 32).to(torch.int8), labels(9, 32, 32).to(torch.int8))),
    "_weight_int8pack_mm": (
        aten._weight_int8pack_mm,
        (torch.randn(4, 32), (labels(255, 16, 32) - 128).to(torch.int8), torch.rand(16)),
    ),
    # `out=`
    "index_select.out": (out_form(lambda a, i, out: torch.index_select(a, 0, i, out=out), 2, 5), (torch.randn(4, 5), labels(4, 2))),
    "gather.out": (out_form(lambda a, i, out: torch.gather(a, 1, i, out=out), 4, 2), (torch.randn(4, 5), labels(5, 4, 2))),
    "scatter.out": (
        out_form(lambda a, i, out: torch.scatter(a, 1, i, 1.0, out=out), 4, 5),
        (torch.randn(4, 5), labels(5, 4, 2)),
    ),
    "take_along_dim.out": (
        out_form(lambda a, i, out: torch.take_along_dim(a, i, 1, out=out), 4, 2),
        (torch.randn(4, 5), labels(5, 4, 2)),
    ),
    "mean.out": (out_form(lambda a, out: torch.mean(a, 1, out=out), 4), (torch.randn(4, 5),)),
    "std.out": (out_form(lambda a, out: torch.std(a, 1, out=out), 4), (torch.randn(4, 5),)),
    "var.out": (out_form(lambda a, out: torch.var(a, 1, out=out), 4), (torch.randn(4, 5),)),
    "argmax.out": (out_form(lambda a, out: torch.argmax(a, 1, out=out), 4, dtype=torch.int64), (torch.randn(4, 5),)),
    "cumsum.out": (out_form(lambda a, out: torch.cumsum(a, 1, out=out), 4, 5), (torch.randn(4, 5),)),
    "nansum.out": (out_form(lambda a, out: torch.nansum(a, 1, out=out), 4), (torch.randn(4, 5),)),
    "eye.out": (lambda a: torch.eye(3, out=torch.empty(3, 3, device=a.device)), (torch.ones(1),)),
    "svdvals.out": (out_form(L.svdvals, 2, 3), (torch.randn(2, 5, 3),)),
    "eigvals.out": (
        lambda a: L.eigvals(a, out=torch.empty(2, dtype=torch.complex64, device=a.device)).real.sort()[0],
        (torch.tensor([[1.0, 2], [2, 3]]),),
    ),
}  # fmt: skip

# Need LAPACK, which only programs that run in host memory can call.
HOST_ONLY = {"ldl_factor", "eig", "eigvals", "eigvals.out"}


def run(f, args):
    """The results, and the gradients of the sum of their sines."""
    results = tensors(f(*args))
    loss = [(y.abs() if y.is_complex() else y).sin().sum() for y in results if y.requires_grad]
    if loss:
        sum(loss).backward()
    return results, [a.grad for a in args if a.requires_grad]


@pytest.mark.parametrize("name", CASES)
def test_nothing_runs_on_the_cpu(no_fallback, name):
    if name in HOST_ONLY and torch.tpu.platform() != "cpu":
        pytest.skip("this platform's programs cannot call LAPACK")
    f, args = CASES[name]
    args = [a.detach().clone().requires_grad_(a.requires_grad) for a in args]
    (results, gradients), (expected, right) = run(f, to_device(args)), run(f, args)
    assert len(results) == len(expected) > 0 and len(gradients) == len(right)
    for i, (a, e) in enumerate(zip(results, expected, strict=True)):
        assert_same(a, e, f"result {i}", strides=False, rtol=1e-4, atol=1e-4)
    for i, (a, e) in enumerate(zip(gradients, right, strict=True)):
        assert_same(a, e, f"gradient {i}", strides=False, rtol=1e-3, atol=1e-3)


def test_record_stream(no_fallback):
    y = torch.ones(3, device=DEVICE) + 1
    y.record_stream(torch.tpu.current_stream())
    assert y.tolist() == [2, 2, 2]


def test_grad_scaler(no_fallback):
    scaler = torch.amp.GradScaler(DEVICE, init_scale=4.0)
    w = torch.ones(3, device=DEVICE, requires_grad=True)
    optimizer = torch.optim.SGD([w], 0.5)
    scaler.scale((w * 2).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert w.tolist() == [0, 0, 0] and scaler.get_scale() == 4


def test_weights_of_four_bits():
    """Packed by the processor's rules; the product is the CPU's."""
    if torch.tpu.platform() != "cpu":
        pytest.skip("this platform's programs cannot call PyTorch's kernels")
    torch.tpu.reset_metrics()
    q, a = labels(16, 64, 64).int(), torch.randn(4, 64, dtype=torch.bfloat16)
    scales = torch.rand(2, 64, 2, dtype=torch.bfloat16)
    results = []
    for d in ("cpu", DEVICE):
        w = aten._convert_weight_to_int4pack_for_cpu(q.to(d), 1)
        results.append((w, aten._weight_int4pack_mm_for_cpu(a.to(d), w, 32, scales.to(d))))
    for got, want in zip(results[1], results[0], strict=True):
        assert_same(got, want)
    assert torch.tpu.metrics()["fallbacks"] == {}


def test_lengths_of_ctc_are_operands(no_background_compile):
    """Other lengths are no other program."""
    torch.tpu.reset_metrics()
    for n in range(1, 5):
        log = torch.randn(10, 2, 5, device=DEVICE).log_softmax(-1)
        F.ctc_loss(log, labels(4, 2, 4).add(1).to(DEVICE), (10 - n, 9), (n, 3)).item()
        if n == 1:
            once = torch.tpu.metrics()["compiles"]
    assert torch.tpu.metrics()["compiles"] == once


CTC = {
    "padded": ((10, 3, 5), (4, 3, 0), (10, 8, 5), 0, False),
    "one after the other": ((10, 3, 5), (4, 3, 0), (10, 8, 5), 0, True),
    "blank in the middle": ((10, 3, 5), (4, 4, 1), (10, 9, 10), 2, False),
    "too short": ((10, 2, 5), (4, 4), (10, 2), 0, False),
    "more labels than steps": ((3, 2, 5), (4, 2), (3, 3), 0, False),
    "no steps": ((6, 2, 4), (2, 0), (6, 0), 0, False),
    "one step": ((1, 2, 4), (1, 0), (1, 1), 3, True),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("zero_infinity", [False, True])
@pytest.mark.parametrize("name", CTC)
def test_ctc_loss(no_fallback, name, zero_infinity, dtype):
    shape, target_lengths, input_lengths, blank, flat = CTC[name]
    log = torch.randn(shape, dtype=dtype, requires_grad=True)
    targets = labels(shape[2] - 1, sum(target_lengths)) if flat else labels(shape[2] - 1, shape[1], max(target_lengths))
    targets = targets + (targets >= blank)

    def f(log, targets):
        return F.ctc_loss(
            log.log_softmax(-1), targets, input_lengths, target_lengths, blank, "none", zero_infinity=zero_infinity
        )

    args = [log, targets]
    (results, gradients), (expected, right) = run(f, to_device(args)), run(f, args)
    close = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {}
    for a, e in zip([*results, *gradients], [*expected, *right], strict=True):
        assert_same(a, e, **close)
