"""What PyTorch's own code asks of values only to raise: programs of `torch.tpu.jit` assert it. And operations that PyTorch makes
of others, which functions meet whole in inference mode."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from support import DEVICE, assert_same
from torch import nn

MODES = {"inference": torch.inference_mode, "no_grad": torch.no_grad, "grad": contextlib.nullcontext}


def modes(f):
    return pytest.mark.parametrize("mode", MODES)(f)


@modes
def test_a_variance_that_is_negative_is_an_error_of_the_program(mode, fused):
    f = torch.tpu.jit(F.gaussian_nll_loss)
    with MODES[mode]():
        for seed in range(3):
            args = [torch.rand(5, 3, generator=torch.Generator().manual_seed(3 * seed + i)) for i in range(3)]
            assert_same(f(*(a.to(DEVICE) for a in args)), F.gaussian_nll_loss(*args), rtol=1e-5, atol=1e-6)
        with pytest.raises(RuntimeError, match="var has negative entry/entries"):
            f(*(a.to(DEVICE) for a in args[:2]), -args[2].to(DEVICE)).item()


def test_a_norm_that_is_not_finite_is_an_error_of_the_program(fused):
    model = nn.Linear(4, 4).to(DEVICE)

    @torch.tpu.jit
    def clipped(x):
        model.zero_grad()
        model(x).square().mean().backward()
        return nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)

    on_cpu = nn.Linear(4, 4)
    on_cpu.load_state_dict(model.state_dict())
    for _ in range(3):
        x = torch.randn(3, 4)
        on_cpu.zero_grad()
        on_cpu(x).square().mean().backward()
        want = nn.utils.clip_grad_norm_(on_cpu.parameters(), 1.0)
        assert_same(clipped(x.to(DEVICE)), want, rtol=1e-4, atol=1e-6)
        assert_same(model.weight.grad, on_cpu.weight.grad, rtol=1e-4, atol=1e-6)
    with pytest.raises(RuntimeError, match="is non-finite, so it cannot be clipped"):
        clipped(torch.full((3, 4), torch.inf, device=DEVICE)).item()


@modes
@pytest.mark.parametrize("lengths", [torch.tensor, tuple], ids=["tensors", "tuples"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_ctc_loss(reduction, lengths, mode, fused):
    @torch.tpu.jit
    def f(scores, targets, own, of_targets):
        return F.ctc_loss(scores, targets, own, of_targets, reduction=reduction)

    with MODES[mode]():
        for seed in range(2):
            g = torch.Generator().manual_seed(seed)
            scores = torch.randn(12, 2, 5, generator=g).log_softmax(-1)
            targets = torch.randint(1, 5, (2, 4), generator=g)
            own, of_targets = lengths([12, 10]), lengths([4, 3])
            want = F.ctc_loss(scores, targets, own, of_targets, reduction=reduction)
            got = f(scores.to(DEVICE), targets.to(DEVICE), own, of_targets)
            assert_same(got, want, rtol=1e-4, atol=1e-5)


def test_a_value_that_a_user_asks_for_is_an_error_still(fused):
    @torch.tpu.jit
    def f(x):
        if torch.any(x < 0):
            raise ValueError("negative")
        return x

    with pytest.raises(RuntimeError, match="reads a value on the host"):
        f(torch.ones(3, device=DEVICE))


@pytest.mark.filterwarnings("ignore")
def test_a_scheduler_in_a_function_is_explained(fused):
    model = nn.Linear(4, 4).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)

    @torch.tpu.jit
    def step(x):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        scheduler.step()

    for _ in range(5):
        step(torch.randn(3, 4, device=DEVICE))
    said = torch.tpu.explain()
    assert "step is run anew in each call, as CosineAnnealingLR.last_epoch is another number each time" in said
    assert "test_jit_checks.py:" in said and "call the scheduler's step() outside" in said
