"""Training in functions of `torch.tpu.jit`: gradients, optimizers, the state of modules."""

import copy

import pytest
import torch
from jit_support import OPTIMIZERS, batches, compare, mlp, training
from support import DEVICE, assert_close, to_device
from torch import nn

WHERE = [(name, "first") for name in OPTIMIZERS] + [(n, z) for n in ("sgd", "adamw") for z in ("last", "outside")]


@pytest.mark.parametrize(("name", "zero"), WHERE)
def test_training(name, zero):
    results = {}
    for device in ("cpu", DEVICE):
        model = mlp().to(device)
        optimizer = OPTIMIZERS[name](model.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

        def step(x, y, model=model, optimizer=optimizer):
            if zero == "first":
                optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            if zero == "last":
                optimizer.zero_grad()
            return loss.detach()

        f = torch.tpu.jit(step) if device == DEVICE else step
        losses, grads = [], []
        for x, y in batches(7):
            losses.append(f(x.to(device), y.to(device)))
            grads.append([None if p.grad is None else p.grad.cpu().clone() for p in model.parameters()])
            if zero == "outside":
                optimizer.zero_grad()
            schedule.step()
        results[device] = [x.cpu() for x in losses], grads, [p.detach().cpu() for p in model.parameters()]
        if device == DEVICE and name in ("sgd", "sgd momentum", "adam", "adamw", "adamw for each"):
            assert f.traces <= 4, f
    for actual, expected in zip(results[DEVICE], results["cpu"], strict=True):
        compare(actual, expected)


def test_gradients_accumulate():
    cpu = mlp()
    device = copy.deepcopy(cpu).to(DEVICE)

    def step(model):
        return lambda x, y: nn.functional.cross_entropy(model(x), y).backward()

    f, g = torch.tpu.jit(step(device)), step(cpu)
    for i, (x, y) in enumerate(batches(8)):
        f(to_device(x), to_device(y))
        g(x, y)
        for p, q in zip(device.parameters(), cpu.parameters(), strict=True):
            assert_close(p.grad, q.grad)
        if i % 4 == 3:
            device.zero_grad()
            cpu.zero_grad()
    assert f.traces <= 4


def test_a_gradient_that_is_kept_stays():
    model = mlp().to(DEVICE)

    @torch.tpu.jit
    def f(x):
        model.zero_grad()
        model(x).sum().backward()

    kept = []
    for i in range(5):
        f(torch.full((2, 12), float(i), device=DEVICE))
        kept.append(model[0].weight.grad)
    values = [k.sum().item() for k in kept]
    assert len(set(values)) == 5, values


def adam(weights, grads, state, lr):
    m, v, t = state
    t = t + 1
    m = {k: 0.9 * m[k] + 0.1 * g for k, g in grads.items()}
    v = {k: 0.999 * v[k] + 0.001 * g * g for k, g in grads.items()}
    new = {k: w - lr * (m[k] / (1 - 0.9**t)) / ((v[k] / (1 - 0.999**t)).sqrt() + 1e-8) for k, w in weights.items()}
    return new, (m, v, t)


@pytest.mark.parametrize("donate", [(), (1, 2)], ids=["kept", "donated"])
def test_a_functional_step(donate):
    model = mlp()

    def loss_of(weights, x, y):
        return nn.functional.cross_entropy(torch.func.functional_call(model, weights, (x,)), y)

    def train_step(data, weights, state):
        grads, loss = torch.func.grad_and_value(loss_of)(weights, *data)
        weights, state = adam(weights, grads, state, 0.01)
        return weights, state, {"loss": loss}

    def start(device):
        weights = {k: v.detach().clone().to(device) for k, v in model.named_parameters()}
        zeros = lambda: {k: torch.zeros_like(v) for k, v in weights.items()}  # noqa: E731
        return weights, (zeros(), zeros(), torch.zeros((), device=device))

    f = torch.tpu.jit(train_step, donate_argnums=donate)
    weights, state = start(DEVICE)
    expected, expected_state = start("cpu")
    for x, y in batches():
        old = weights
        weights, state, metrics = f((to_device(x), to_device(y)), weights, state)
        expected, expected_state, wanted = train_step((x, y), expected, expected_state)
        assert_close(metrics["loss"], wanted["loss"])
        if donate:
            with pytest.raises(RuntimeError, match="donate_argnums"):
                old["0.weight"].cpu()
        else:
            old["0.weight"].cpu()
    for k, v in expected.items():
        assert_close(weights[k], v, k)
    assert f.traces == 1


def test_forward_backward_and_optimizer_apart():
    model, other = mlp().to(DEVICE), mlp()
    weights = {k: v.detach() for k, v in model.named_parameters()}

    @torch.tpu.jit
    def grads(weights, x, y):
        def loss_of(w):
            return nn.functional.cross_entropy(torch.func.functional_call(model, w, (x,)), y)

        return torch.func.grad_and_value(loss_of)(weights)

    update = torch.tpu.jit(lambda w, g: {k: w[k] - 0.1 * g[k] for k in w}, donate_argnums=0)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    for x, y in batches():
        g, loss = grads(weights, to_device(x), to_device(y))
        weights = update(weights, g)
        optimizer.zero_grad()
        expected = nn.functional.cross_entropy(other(x), y)
        expected.backward()
        optimizer.step()
        assert_close(loss, expected.detach())
    for k, p in other.named_parameters():
        assert_close(weights[k], p.detach(), k)


@pytest.mark.parametrize("zero", ["none", "before", "after", "to_zeros"])
def test_an_optimizer_takes_gradients_that_are_made_outside(zero):
    def run(wrap, device):
        torch.manual_seed(0)
        model = mlp().to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def update():
            optimizer.step()
            if zero == "after":
                optimizer.zero_grad()

        update = wrap(update)
        for x, y in batches():
            if zero in ("before", "to_zeros"):
                optimizer.zero_grad(set_to_none=zero == "before")
            nn.functional.cross_entropy(model(x.to(device)), y.to(device)).backward()
            update()
        return [p.detach().cpu() for p in model.parameters()]

    torch.testing.assert_close(run(torch.tpu.jit, DEVICE), run(lambda f: f, "cpu"), rtol=1e-4, atol=1e-5)


def test_modules_in_another_mode():
    cpu = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    device = copy.deepcopy(cpu).to(DEVICE)
    cpu.eval()

    @torch.tpu.jit
    def f(x):
        return device(x)

    x = torch.randn(8, 4)
    with torch.no_grad():
        f(to_device(x))
        device.eval()
        cpu[1].load_state_dict({k: v.cpu() for k, v in device[1].state_dict().items()})
        assert_close(f(to_device(x)), cpu(x))
        device.train()
        assert (f(to_device(x)) == 0).any().item()
        device.eval()
        cpu[1].load_state_dict({k: v.cpu() for k, v in device[1].state_dict().items()})
        assert_close(f(to_device(x)), cpu(x))
    assert f.traces == 2


def test_weights_that_change():
    model = nn.Linear(3, 2).to(DEVICE)
    f = torch.tpu.jit(lambda x: model(x))
    x = torch.randn(4, 3)
    with torch.no_grad():
        for how in ("same", "written", "loaded", "replaced", "assigned"):
            other = nn.Linear(3, 2)
            if how == "written":
                model.weight.copy_(other.weight)
            elif how == "loaded":
                model.load_state_dict(other.state_dict())
            elif how == "replaced":
                model.weight = nn.Parameter(other.weight.to(DEVICE))
            elif how == "assigned":
                model.load_state_dict({k: v.to(DEVICE) for k, v in other.state_dict().items()}, assign=True)
            assert_close(f(to_device(x)), nn.functional.linear(x, model.weight.cpu(), model.bias.cpu()), how)
    assert f.traces <= 3


def test_the_state_of_an_optimizer_is_loaded():
    model, other = mlp().to(DEVICE), mlp()
    pairs = [(m, torch.optim.AdamW(m.parameters(), lr=0.01)) for m in (model, other)]
    f, g = torch.tpu.jit(training(*pairs[0])), training(*pairs[1])
    data = batches(8)
    for x, y in data[:4]:
        f(to_device(x), to_device(y))
        g(x, y)
    saved = [copy.deepcopy((m.state_dict(), o.state_dict())) for m, o in pairs]
    for x, y in data[4:6]:
        f(to_device(x), to_device(y))
        g(x, y)
    for (m, o), (weights, state) in zip(pairs, saved, strict=True):
        m.load_state_dict(weights)
        o.load_state_dict(state)
    for x, y in data[6:]:
        assert_close(f(to_device(x), to_device(y)), g(x, y))
    # The step of eager mode goes on where the program was.
    x, y = data[0]
    assert_close(training(*pairs[0])(to_device(x), to_device(y)), g(x, y))
    assert_close(training(*pairs[0])(to_device(x), to_device(y)), g(x, y))


def test_a_scaler_of_gradients():
    results = []
    for device in ("cpu", DEVICE):
        model = mlp().to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        scaler = torch.amp.GradScaler(device, init_scale=4.0, growth_interval=2)

        def step(x, y, model=model, optimizer=optimizer, scaler=scaler):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            return loss.detach()

        f = torch.tpu.jit(step) if device == DEVICE else step
        losses = []
        for i, (x, y) in enumerate(batches(8)):
            x = x * float("inf") if i == 4 else x  # a step that is left out
            losses.append(f(x.to(device), y.to(device)).cpu())
        results.append((torch.stack(losses), scaler.get_scale(), [p.detach().cpu() for p in model.parameters()]))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5, equal_nan=True)
    assert f.traces <= 2
