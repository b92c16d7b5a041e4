"""Training with compiled models and compiled steps of optimizers."""

import pytest
import torch
from compile_support import assert_close, compiled, fresh_dynamo, mlp, pair  # noqa: F401 (a fixture)
from support import DEVICE, assert_same
from torch import nn

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw capturable": lambda p: torch.optim.AdamW(p, lr=0.01, capturable=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
}


@pytest.mark.parametrize("compiled_step", [False, True], ids=["eager step", "compiled step"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training(name, compiled_step):
    cpu, device = pair(mlp)
    make = OPTIMIZERS[name]
    reference = make(cpu.parameters()) if name != "adamw capturable" else OPTIMIZERS["adamw"](cpu.parameters())
    optimizer = make(device.parameters())
    f = compiled(device)
    step = compiled(optimizer.step) if compiled_step else optimizer.step
    for i in range(5):
        x, y = torch.randn(8, 12), torch.randint(5, (8,))
        reference.zero_grad()
        expected = nn.functional.cross_entropy(cpu(x), y)
        expected.backward()
        reference.step()
        optimizer.zero_grad()
        actual = nn.functional.cross_entropy(f(x.to(DEVICE)), y.to(DEVICE))
        actual.backward()
        step()
        assert_close(actual, expected, f"loss {i}")
    for (what, p), q in zip(cpu.named_parameters(), device.parameters(), strict=True):
        assert_same(q, p, what, rtol=1e-3, atol=1e-4)


def training_loop(model, step_of, loss_of=nn.functional.cross_entropy):
    """Steps of a training loop, one at a time; gives the loss."""
    while True:
        x, y = torch.randn(8, 12).to(DEVICE), torch.randint(5, (8,)).to(DEVICE)
        loss = loss_of(model(x), y)
        loss.backward()
        step_of()
        yield loss


@pytest.mark.parametrize("capturable", [False, True])
def test_a_loop_runs_the_programs_of_eager(capturable):
    """One program in each step, no copies but the batch, every weight and state given back; with the same losses."""
    if torch.tpu.eager_mode is not torch.tpu.EagerMode.FUSED:
        pytest.skip("strict mode has a flush for each operation")
    counted = {}
    for how in ("eager", "model", "model and step"):
        torch._dynamo.reset()
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 5)).to(DEVICE)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, capturable=capturable)
        step = compiled(optimizer.step) if "step" in how else optimizer.step
        loop = training_loop(compiled(model) if "model" in how else model, lambda: (step(), optimizer.zero_grad()))  # noqa: B023
        losses = [next(loop) for _ in range(4)]
        torch.tpu.synchronize()
        torch.tpu.reset_metrics()
        losses += [next(loop) for _ in range(4)]
        torch.tpu.synchronize()
        m = torch.tpu.metrics()
        assert m["compiles"] == m["programs"] == 0, how
        assert m["flushes"] == {"step": 4}, how
        assert m["replays"] == {"eager": 0, "model": 8, "model and step": 12}[how]
        names = ("launches", "transfers_h2d", "bytes_h2d", "transfers_d2h", "donations")
        counted[how] = [m[name] for name in names], [x.item() for x in losses]
    for how in ("model", "model and step"):
        assert counted[how][0] == counted["eager"][0], how
        assert counted[how][1] == pytest.approx(counted["eager"][1], rel=1e-4), how


STOCK = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")


@pytest.mark.parametrize("name", ["SGD", "AdamW", "NAdam", "RMSprop", "Rprop"])
def test_a_schedule_of_rates_that_are_tensors_is_one_graph(name, fused):
    def losses(device):
        torch.manual_seed(0)
        model = nn.Linear(4, 4).to(device)
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=torch.tensor(0.01))
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        step = compiled(lambda: optimizer.step()) if device == DEVICE else optimizer.step
        found = []
        for i in range(11):  # more than the graphs that Dynamo makes of a function
            if i == 3:
                torch.tpu.synchronize()
                found.append(torch.tpu.metrics()["programs"])
            loss = model(torch.ones(3, 4, device=device)).square().mean()
            loss.backward()
            step()
            schedule.step()
            optimizer.zero_grad()
            found.append(loss.detach().cpu())
        return found

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    got = losses(DEVICE)
    programs = got.pop(3)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert torch.tpu.metrics()["programs"] == programs
    expected = losses("cpu")
    expected.pop(3)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", STOCK)
def test_stock_optimizers_are_replayed(name):
    """Also those that count steps on the CPU."""
    results = {}
    for device in ("cpu", DEVICE):
        torch.manual_seed(2)
        model = mlp().to(device)
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01)
        step = compiled(optimizer.step) if device == DEVICE else optimizer.step
        for i in range(5):
            if i == 3:
                torch.tpu.reset_metrics()
            x, y = torch.randn(8, 12), torch.randint(5, (8,))
            nn.functional.cross_entropy(model(x.to(device)), y.to(device)).backward()
            step()
            optimizer.zero_grad()
        results[device] = [p.detach() for p in model.parameters()]
    m = torch.tpu.metrics()
    assert (m["replays"], m["plays"], m["fallbacks"]) == (2, 0, {})
    for i, (actual, expected) in enumerate(zip(results[DEVICE], results["cpu"], strict=True)):
        assert_same(actual, expected, f"parameter {i}", rtol=1e-3, atol=1e-4)


def test_a_learning_rate_that_changes():
    w = torch.ones(4, device=DEVICE, requires_grad=True)
    v = torch.ones(4, requires_grad=True)
    ours, reference = torch.optim.AdamW([w], lr=torch.tensor(0.1)), torch.optim.AdamW([v], lr=torch.tensor(0.1))
    step = compiled(ours.step)
    for i in range(5):
        for optimizer, p in ((ours, w), (reference, v)):
            optimizer.param_groups[0]["lr"].fill_(0.1 / (1 + i))
            p.grad = torch.full_like(p, 0.5 + i)
        step()
        reference.step()
        assert_close(w, v, f"step {i}")
