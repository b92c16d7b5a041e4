"""A function of `torch.tpu.jit` goes on where the state of its optimizer is another one, as PyTorch does on the CPU."""

import copy
import functools
import gc
import io
import weakref

import pytest
import torch
from jit_support import OPTIMIZERS
from steps import training
from support import DEVICE, to_device
from torch import nn

assert_close = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)


def saved(state, model):
    """As it comes from a file."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, map_location=next(model.parameters()).device)


def from_the_host(state, model):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, map_location="cpu")


def each_replaced(optimizer):
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim():
                state[name] = value * 0.5


# What is done to the optimizer of a model, and how often a function is run anew for it.
WAYS = {
    "itself": (lambda o, m: o.load_state_dict(o.state_dict()), 0),
    "copied": (lambda o, m: o.load_state_dict(copy.deepcopy(o.state_dict())), 0),
    "from a file": (lambda o, m: o.load_state_dict(saved(o.state_dict(), m)), 0),
    "from the host": (lambda o, m: o.load_state_dict(from_the_host(o.state_dict(), m)), 0),
    "tensors replaced": (lambda o, m: each_replaced(o), 0),
    "emptied": (lambda o, m: o.state.clear(), 1),
    "each emptied": (lambda o, m: [state.clear() for state in o.state.values()], 1),
    "one is gone": (lambda o, m: o.state.pop(next(iter(o.state))), 1),
}


def trained(make, change, device, sizes=(4,)):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)).to(device)
    optimizer = make(model.parameters())
    step = training(model, optimizer)
    step = torch.tpu.jit(step) if device == DEVICE else step
    generator, losses = torch.Generator().manual_seed(1), []

    def run(rounds):
        for _ in range(rounds):
            for size in sizes:
                losses.append(step(torch.randn(size, 6, generator=generator).to(device)).cpu())

    run(3)
    before = step.traces if device == DEVICE else 0
    for _ in range(2):
        change(optimizer, model)
        run(2)
    new = step.traces - before if device == DEVICE else 0
    return losses, [p.detach().cpu() for p in model.parameters()], new


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["sgd momentum", "adamw", "adamw amsgrad"])
def test_another_state(name, way, fused):
    change, anew = WAYS[way]
    wanted = trained(OPTIMIZERS[name], change, "cpu")
    *got, traces = trained(OPTIMIZERS[name], change, DEVICE)
    for a, b in zip([*got[0], *got[1]], [*wanted[0], *wanted[1]], strict=True):
        assert_close(a, b)
    assert traces <= 2 * anew


@pytest.mark.parametrize("name", [n for n in OPTIMIZERS if n != "sgd"])
def test_a_checkpoint_is_loaded(name):
    change, _ = WAYS["from the host"]
    wanted = trained(OPTIMIZERS[name], change, "cpu")
    *got, traces = trained(OPTIMIZERS[name], change, DEVICE, sizes=(4,))
    for a, b in zip([*got[0], *got[1]], [*wanted[0], *wanted[1]], strict=True):
        assert_close(a, b)
    assert traces == 0


def test_each_length_goes_on(fused):
    """A checkpoint makes no program and no run, of no length."""
    change, _ = WAYS["from a file"]
    wanted = trained(OPTIMIZERS["adamw"], change, "cpu", sizes=(3, 4, 7))
    *got, traces = trained(OPTIMIZERS["adamw"], change, DEVICE, sizes=(3, 4, 7))
    assert_close(torch.stack(got[0]), torch.stack(wanted[0]))
    assert traces == 0


def test_lengths_of_one_program_go_on(fused):
    torch.manual_seed(0)
    model = nn.Linear(6, 6).to(DEVICE)
    other = copy.deepcopy(model).cpu()
    pairs = [(m, torch.optim.AdamW(m.parameters(), lr=0.01)) for m in (model, other)]
    f, g = (training(m, o) for m, o in pairs)
    f = torch.tpu.jit(f, dynamic={"x": {0: torch.tpu.Dim(buckets=[8])}})
    for round_ in range(3):
        for size in (3, 5, 8, 3):
            x = torch.randn(size, 6)
            assert_close(f(to_device(x)).cpu(), g(x))
        if round_ == 0:
            traces = f.traces
        for m, o in pairs:
            o.load_state_dict(from_the_host(o.state_dict(), m))
    assert f.traces == traces


def test_a_rate_that_is_a_tensor_is_loaded():
    def change(optimizer, model):
        state = copy.deepcopy(optimizer.state_dict())
        state["param_groups"][0]["lr"] = state["param_groups"][0]["lr"] * 0.5
        optimizer.load_state_dict(state)

    def make(parameters):
        parameters = list(parameters)
        return torch.optim.SGD(parameters, lr=torch.tensor(0.1, device=parameters[0].device), momentum=0.9)

    wanted, got = (trained(make, change, device) for device in ("cpu", DEVICE))
    assert_close(torch.stack(got[0]), torch.stack(wanted[0]))
    assert got[2] == 0


class Counting(torch.optim.Optimizer):
    """Its steps are counted by Python."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            for p in group["params"]:
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                p.sub_(p.grad, alpha=group["lr"] / (state["step"] + group["k"]))


def test_numbers_that_a_step_changes():
    """They are Python's, which has to run in each call then."""
    wanted, got = (trained(lambda p: Counting(p, 0.1), lambda o, m: None, device) for device in ("cpu", DEVICE))
    assert_close(torch.stack(got[0]), torch.stack(wanted[0]))


def test_copies_are_the_same_arguments():
    """A copy of a storage is bytes; how it came about is no part of what a function is known for."""
    f = torch.tpu.jit(lambda x: x * 2)
    x = torch.randn(3, 4)
    for t in (to_device(x), copy.deepcopy(to_device(x)), to_device(x).view(torch.int32).view(torch.float32)):
        assert_close(f(t).cpu(), x * 2)
        assert_close(f(t).cpu(), x * 2)
        assert_close(t.cpu(), x)
    whole = copy.deepcopy(to_device(x.t().contiguous())).t()
    g = torch.tpu.jit(lambda x: x + 1)
    for t in (whole, to_device(x.t().contiguous()).t()):
        assert_close(g(t).cpu(), x + 1)
    assert f.traces == g.traces == 1


def test_a_model_that_keeps_its_step_is_freed():
    def references():
        model = nn.Linear(4, 4).to(DEVICE)
        optimizer = torch.optim.AdamW(model.parameters())

        def step(x):
            loss = model(x).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        model.step = torch.tpu.jit(step)
        for _ in range(4):
            model.step(torch.ones(2, 4, device=DEVICE))
        assert model.step.traces < 4
        return [weakref.ref(x) for x in (model, model.weight, optimizer)]

    found = references()
    gc.collect()
    assert [x() for x in found] == [None, None, None]
