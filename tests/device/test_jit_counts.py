"""What a function of `torch.tpu.jit` does with tensors of the host that it finds and writes to is done in each call, as
on the CPU: `AveragedModel` counts its updates so.
"""

import functools

import pytest
import torch
from support import DEVICE
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

assert_close = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)

AVERAGES = {
    "equal": {},
    "ema": {"multi_avg_fn": get_ema_multi_avg_fn(0.9)},
    "ema one by one": {"avg_fn": get_ema_avg_fn(0.9)},
    "with buffers": {"multi_avg_fn": get_ema_multi_avg_fn(0.9), "use_buffers": True},
}


def averaged(device, wrap, options, between=lambda i, average: None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 6)).to(device)
    opt = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    average = AveragedModel(model, **options)

    @wrap
    def step(x):
        opt.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        opt.step()
        average.update_parameters(model)
        return loss.detach()

    seen = []
    for i in range(6):
        loss = step(torch.randn(4, 6).to(device))
        values = [loss, average.n_averaged, *average.parameters(), *average.buffers()]
        seen.append([x.detach().clone().cpu() for x in values])
        between(i, average)
    return seen, step


@pytest.mark.parametrize("name", AVERAGES)
def test_averaged_models(name):
    """It copies at the first update and averages from the second on, so the function is run anew for that alone."""
    expected, _ = averaged("cpu", lambda f: f, AVERAGES[name])
    actual, step = averaged(DEVICE, torch.tpu.jit, AVERAGES[name])
    assert_close(actual, expected)
    assert step.traces <= 2


def begins_anew(i, average):
    if i == 2:
        average.n_averaged.zero_()


def is_loaded(i, average):
    if i == 2:
        state = {k: v.cpu() for k, v in average.state_dict().items()}
        average.load_state_dict(state | {"n_averaged": torch.tensor(7)})


@pytest.mark.parametrize("between", [begins_anew, is_loaded])
def test_a_count_that_is_set_between_calls(between):
    expected, _ = averaged("cpu", lambda f: f, {}, between=between)
    actual, step = averaged(DEVICE, torch.tpu.jit, {}, between=between)
    assert_close(actual, expected)
    assert step.traces <= 4


def both(f):
    """What a function of a tensor and of a count gives on either device in five calls, and what the count is then."""

    def run(device, wrap):
        count = torch.zeros(3)
        jitted = wrap(lambda x: f(x, count))
        results = []
        for i in range(5):
            results.append((jitted(torch.full((3,), float(i), device=device)).cpu(), count.clone()))
        return results

    assert_close(run(DEVICE, torch.tpu.jit), run("cpu", lambda g: g))


def every_other(x, count):
    count += 1
    return x * 2 if count[0] % 2 == 0 else x


def at_first(x, count):
    y = x + 1 if count.sum() == 0 else x
    count.view(-1)[0] += 1
    return y


def through_another(x, count):
    seen = torch.zeros(3)
    seen.add_(count)
    count.add_(1)
    return x * seen[1].item()


def moved_before(x, count):
    y = x + count.to(x.device)
    count += 1
    return y


def computed(x, count):
    count += 1
    return x + (count[:2] * 2).sum().to(x.device)


def moved_after(x, count):
    count += 1
    y = x + count.to(x.device) * count.to(x.device)
    return y if count[1] < 3 else -y


def in_one_that_it_makes(x, count):
    total = count.clone()
    total.add_(1)
    count.copy_(total)
    return x if total[0] < 3 else -x


@pytest.mark.parametrize(
    "f", [every_other, at_first, through_another, moved_before, moved_after, computed, in_one_that_it_makes]
)
def test_counts(f):
    both(f)


def follows_a_tensor_outside(x, count):
    """Nothing is written to what is outside: what Python reads of it is compared."""
    seen = torch.zeros(3)
    seen.add_(count)
    return x * seen[1].item()


def test_what_python_reads_of_a_tensor_that_the_function_makes_of_others():
    count = torch.ones(3)
    f = torch.tpu.jit(lambda x: follows_a_tensor_outside(x, count))
    x = torch.ones(3, device=DEVICE)
    for value in (1.0, 1.0, 2.0, 2.0):
        count.fill_(value)
        assert_close(f(x).cpu(), torch.full((3,), value))


def test_a_call_that_raises_counts_nothing():
    count = torch.zeros(3)

    def f(x, fails):
        count.add_(1)
        if fails:
            raise ValueError("of the function")
        return x + 1

    g, x = torch.tpu.jit(f), torch.ones(3, device=DEVICE)
    with pytest.raises(ValueError, match="of the function"):
        g(x, True)
    assert_close(count, torch.zeros(3))
    g(x, False)
    g.lower(x, False)
    g(x, False)
    assert_close(count, torch.full((3,), 2.0))


COUNTER = torch.zeros(())


def count_twice(x):
    y = x + COUNTER.to(x.device)
    COUNTER.add_(1)
    y = y * COUNTER.to(x.device)
    COUNTER.mul_(2)
    return y + COUNTER.to(x.device)


def test_a_count_that_is_moved_before_and_after_it_is_written():
    f, x, n = torch.tpu.jit(count_twice), torch.ones(3, device=DEVICE), 0.0
    COUNTER.zero_()
    for _ in range(5):
        wanted = (1 + n) * (n + 1) + (n + 1) * 2
        assert f(x).tolist() == [wanted] * 3
        n = (n + 1) * 2
        assert COUNTER.item() == n
    assert f.traces == 1


@pytest.mark.parametrize("models", [1, 2, 3])
def test_several_updates_in_one_function(models):
    def steps(device, wrap):
        torch.manual_seed(0)
        model = nn.Linear(4, 3).to(device)
        averages = [AveragedModel(model, **options) for options in list(AVERAGES.values())[:models]]

        @wrap
        def step(x):
            for rate in (0.9, 1.1):
                with torch.no_grad():
                    for p in model.parameters():
                        p.mul_(rate).add_(x.mean())
                for average in averages:
                    average.update_parameters(model)
            return x.sum()

        for _ in range(5):
            step(torch.randn(2, 4).to(device))
        return [t.detach().cpu() for a in averages for t in (*a.parameters(), a.n_averaged)], step

    (actual, step), (expected, _) = steps(DEVICE, torch.tpu.jit), steps("cpu", lambda f: f)
    assert_close(actual, expected)
    assert step.traces <= 2
