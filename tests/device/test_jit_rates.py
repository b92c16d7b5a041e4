"""Numbers that a function of `torch.tpu.jit` sets in the groups of an optimizer: each call has and leaves those that the
function gives, as PyTorch does on the CPU, and a number that is an argument is no reason to run it anew.
"""

import functools
import itertools
import re
import warnings

import pytest
import torch
from jit_support import OPTIMIZERS, batches, mlp, training
from support import DEVICE

assert_close = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)


def set_rate(optimizer, rate):
    for group in optimizer.param_groups:
        group["lr"] = rate


def before(optimizer, step, x, y, rate):
    set_rate(optimizer, rate)
    return step(x, y)


def computed(optimizer, step, x, y, rate):
    for i, group in enumerate(optimizer.param_groups):
        group["lr"] = rate * (0.5 + i)
    return step(x, y)


def after(optimizer, step, x, y, rate):
    loss = step(x, y)
    set_rate(optimizer, rate)
    return loss


def between(optimizer, step, x, y, rate):
    set_rate(optimizer, rate)
    step(x, y)
    set_rate(optimizer, rate * 0.1)
    return step(x, y)


def fixed_between(optimizer, step, x, y, rate):
    step(x, y)
    set_rate(optimizer, 0.003)
    loss = step(x, y)
    set_rate(optimizer, 0.01)
    return loss


def for_a_while(optimizer, step, x, y, rate):
    old = [group["lr"] for group in optimizer.param_groups]
    set_rate(optimizer, rate)
    loss = step(x, y)
    for group, lr in zip(optimizer.param_groups, old, strict=True):
        group["lr"] = lr
    return loss


def scaled(optimizer, step, x, y, rate):
    loss = step(x, y)
    for group in optimizer.param_groups:
        group["lr"] *= 0.9
    return loss


def decay(optimizer, step, x, y, rate):
    for group in optimizer.param_groups:
        group["weight_decay"] = rate
    return step(x, y)


# What a function does, and by how many traces at most; none where it is run in each call.
WAYS = {
    before: 3, computed: 3, after: None, between: 3, fixed_between: 3, for_a_while: 3, scaled: None, decay: 5,
}  # fmt: skip


def trained(way, make, device, rates=(0.01, 0.008, 0.006, 0.005, 0.002, 0.001), change=lambda i, optimizer: None):
    torch.manual_seed(0)
    model = torch.nn.Linear(12, 5).to(device)
    optimizer = make(model.parameters())
    step = training(model, optimizer)

    def call(x, y, rate):
        return way(optimizer, step, x, y, rate)

    function = torch.tpu.jit(call) if device == DEVICE else call
    seen = []
    for i, (rate, (x, y)) in enumerate(zip(rates, itertools.cycle(batches()), strict=False)):
        change(i, optimizer)
        loss = function(x.to(device), y.to(device), rate).cpu()
        seen.append((loss, *[float(group["lr"]) for group in optimizer.param_groups]))
    return seen, [p.detach().cpu() for p in model.parameters()], getattr(function, "traces", None)


@pytest.mark.filterwarnings("ignore:.*is run anew in each call")
@pytest.mark.parametrize("name", ["sgd momentum", "adamw", "rmsprop"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_number_of_a_group_that_the_function_sets(way, name):
    *wanted, _ = trained(way, OPTIMIZERS[name], "cpu")
    *got, traces = trained(way, OPTIMIZERS[name], DEVICE)
    assert_close(got, wanted)
    assert WAYS[way] is None or traces <= WAYS[way]


@pytest.mark.filterwarnings("ignore:.*is run anew in each call")
@pytest.mark.parametrize("name", ["adamw", "rmsprop"])
@pytest.mark.parametrize("way", [before, after, fixed_between], ids=lambda way: way.__name__)
def test_a_rate_that_is_set_outside_as_well(way, name):
    def change(i, optimizer):
        if i in (2, 4):
            set_rate(optimizer, 0.02 * i)

    *wanted, _ = trained(way, OPTIMIZERS[name], "cpu", change=change)
    *got, _ = trained(way, OPTIMIZERS[name], DEVICE, change=change)
    assert_close(got, wanted)


def test_what_a_step_is_told_of_a_rate_is_a_number_again():
    model = mlp().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters())
    step = training(model, optimizer)
    function = torch.tpu.jit(lambda x, y, rate: before(optimizer, step, x, y, rate))
    for (x, y), rate in zip(batches(), (0.5, 0.25, 0.125, 0.75, 0.5), strict=True):
        function(x.to(DEVICE), y.to(DEVICE), rate)
        assert [(type(group["lr"]), group["lr"]) for group in optimizer.param_groups] == [(float, rate)]


@pytest.mark.parametrize(
    ("of", "traces"), [(lambda x, n: x + 1, 3), (lambda x, n: x + 1 if n < 4 else x - 1, 5)], ids=["no", "a branch"]
)
def test_a_number_that_no_operation_takes_is_no_reason_to_run_it_anew(of, traces):
    f, x = torch.tpu.jit(of), torch.ones(2)
    for n in range(1, 12):
        assert_close(f(x.to(DEVICE), n).cpu(), of(x, n))
    assert f.traces <= traces


def test_what_is_run_in_each_call_is_told_what_to_do():
    model = mlp().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    step = training(model, optimizer)

    def call(x, y):
        loss = step(x, y)
        schedule.step()
        return loss

    f = torch.tpu.jit(call)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for x, y in batches():
            f(x.to(DEVICE), y.to(DEVICE))
    (warning,) = [w for w in caught if "run anew" in str(w.message)]
    assert warning.filename == __file__
    assert re.search(r"call the scheduler.s step\(\) outside", str(warning.message))


def noisy(x):
    print("traced")
    return x + 1


def test_a_warning_points_at_a_line_of_the_users():
    """However many calls of ours are between."""
    f = torch.tpu.jit(noisy)
    sized = torch.tpu.jit(noisy, dynamic={0: {0: torch.tpu.Dim(max=8)}})
    numbered = torch.tpu.jit(lambda x, n: noisy(x) * n)
    x = torch.ones(2, device=DEVICE)
    calls = [
        lambda: f(x), lambda: sized(x), lambda: sized(torch.ones(3, device=DEVICE)), lambda: numbered(x, 0.5),
        lambda: numbered(x, 0.25), lambda: torch.tpu.jit(noisy).lower(x),
    ]  # fmt: skip
    for call in calls:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
        assert {w.filename for w in caught if "when it is traced" in str(w.message)} <= {__file__}
        assert any("when it is traced" in str(w.message) for w in caught)
