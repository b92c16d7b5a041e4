"""Sizes that vary in steps of training, against PyTorch's CPU: functions of `torch.tpu.jit`."""

import copy

import pytest
import torch
import torch.nn.functional as F
from sizes_support import GPT, batches, check, loss_of, programs
from steps import training
from support import DEVICE, assert_same
from torch import nn
from torch.tpu import Dim


@pytest.mark.parametrize("on_host", [False, True])
def test_a_step_over_twenty_lengths_is_a_program_for_each_bucket(on_host, fused):
    torch.manual_seed(0)
    reference = GPT()
    model = copy.deepcopy(reference).to(DEVICE)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (model, reference)]

    def step_of(model, optimizer):
        device = model.head.weight.device

        def step(tokens, labels):
            tokens, labels = tokens.to(device), labels.to(device)
            optimizer.zero_grad()
            logits = model(tokens)
            loss = loss_of(logits, labels)
            loss.backward()
            optimizer.step()
            return loss.detach(), logits.detach()

        return step

    size = Dim(max=64)
    step = torch.tpu.jit(step_of(model, optimizers[0]), dynamic={"tokens": {1: size}, "labels": {1: size}})
    expected = step_of(reference, optimizers[1])
    before = programs()
    for tokens, labels in batches():
        moved = (tokens, labels) if on_host else (tokens.to(DEVICE), labels.to(DEVICE))
        for actual, wanted in zip(step(*moved), expected(tokens, labels), strict=True):
            assert_same(actual, wanted, f"{tokens.shape}", strides=False, rtol=1e-4, atol=2e-4)
    # 16, 32, 64, and the first step, which makes the optimizer's state and may be known already.
    assert programs() - before <= 4


class Mixed(nn.Module):
    """A convolution and attention that are large enough for kernels that are not XLA's."""

    def __init__(self, causal, bias=True):
        super().__init__()
        self.causal = causal
        self.conv, self.qkv = nn.Conv1d(64, 64, 3, padding=1, bias=bias), nn.Linear(64, 192)

    def forward(self, x):
        x = self.conv(x.transpose(1, 2)).transpose(1, 2)
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 32).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, scale=None if self.causal else 0.2)
        return y.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("causal", [False, True])
def test_kernels_that_are_kept_take_sizes_that_vary(causal, fused):
    torch.manual_seed(0)
    reference = Mixed(causal)
    model = copy.deepcopy(reference).to(DEVICE)

    def step_of(model):
        def step(x):
            model.zero_grad()
            y = model(x)
            y.square().mean().backward()
            return [y.detach(), *(p.grad for p in model.parameters())]

        return step

    f, g = torch.tpu.jit(step_of(model), dynamic={"x": {1: Dim(buckets=[256])}}), step_of(reference)
    calls, before = torch.tpu.metrics()["library_calls"], programs()
    for size in (255, 200, 256):
        x = torch.randn(4, size, 64)
        for i, (a, e) in enumerate(zip(f(x.to(DEVICE)), g(x), strict=True)):
            assert_same(a, e, f"{i} of {size}", strides=False, rtol=1e-4, atol=1e-5)
    # One for all sizes, and the first call, which finds out which gradients there are.
    assert programs() - before <= 2
    # Each way of the convolution and of attention, and padding that is NaN changes nothing.
    if torch.tpu.platform() == "cpu":
        assert torch.tpu.metrics()["library_calls"] - calls >= 4 * 3
    whole = torch.full((4, 256, 64), float("nan"))
    whole[:, :200] = torch.randn(4, 200, 64)
    whole = whole.to(DEVICE)
    for a, e in zip(f(whole[:, :200]), g(whole.cpu()[:, :200]), strict=True):
        assert_same(a, e, "beside NaN", strides=False, rtol=1e-4, atol=1e-5)


def test_an_optimizer_and_a_mode_that_change_are_noticed(fused):
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(6, 4), nn.Dropout(1.0), nn.Linear(4, 1))
    model = copy.deepcopy(reference).to(DEVICE)

    def step_of(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return optimizer, training(model, optimizer)

    (ours, step), (theirs, expected) = step_of(model), step_of(reference)
    step = torch.tpu.jit(step, dynamic={"x": {1: Dim(max=8)}})
    for i, size in enumerate((5, 8, 3, 5, 6, 8, 3, 5)):
        for m in (model, reference):
            m.train(i < 4)
        for optimizer in (ours, theirs):
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + i)
        x = torch.randn(2, size, 6)
        check(step(x.to(DEVICE)), expected(x), str(i))
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        check(p.detach(), q.detach())
        check(p.grad, q.grad)
