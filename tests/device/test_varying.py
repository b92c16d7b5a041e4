"""Scripts as users write them, whose sizes vary, in eager mode: the CPU's values, and programs for some bounds of the sizes
and not for each size."""

import random
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from support import DEVICE
from torch import nn

SIZES = random.Random(1).sample(range(2, 64), 20)
# Two sizes of their own, then one for each power of two up to 64, and one that is a bound.
FEW = 8
# Eight sizes of their own, and bounds.
TRAINED = 8 + 6

IDIOMS: dict[str, tuple[Callable, int]] = {}
CASES: list = []
slow = pytest.mark.slow


def idiom(most, *marks):
    """Adds a script, which makes so many programs at most: for a device it gives a function of a size."""

    def add(make):
        IDIOMS[make.__name__] = make, most
        CASES.append(pytest.param(make.__name__, marks=marks))
        return make

    return add


def normal(device, *size):
    """What a loader gives: random numbers, the same for both devices."""
    return torch.randn(size, generator=torch.Generator().manual_seed(sum(size))).to(device)


def tokens(device, *size):
    return torch.randint(50, size, generator=torch.Generator().manual_seed(sum(size))).to(device)


def mlp(device, *widths):
    layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers[:-1]).to(device)


def trained(loss_of, *modules):
    """A step, and what it changes."""
    parameters = [p for module in modules for p in module.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)

    def step(n):
        loss = loss_of(n)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach(), parameters[0].detach(), parameters[-1].grad

    return step


@idiom(TRAINED, slow)
def training_on_lengths(device):
    model = nn.Sequential(nn.Embedding(50, 8), mlp(device, 8, 16, 50)).to(device)

    def loss(n):
        text = tokens(device, 4, n)
        return F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())

    return trained(loss, model)


@idiom(TRAINED + 6, slow)
def training_on_batches_of_as_many_tokens(device):
    model = nn.Sequential(nn.Embedding(50, 8), mlp(device, 8, 16, 50)).to(device)

    def loss(n):
        text = tokens(device, max(2, 200 // n), n)
        return F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())

    return trained(loss, model)


@idiom(TRAINED, slow)
def training_an_encoder(device):
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).to(device)
    return trained(lambda n: model(normal(device, 3, n, 8)).square().mean(), model)


@idiom(TRAINED, slow)
def training_a_recurrent_net(device):
    model, head = nn.LSTM(8, 8, batch_first=True).to(device), mlp(device, 8, 3)
    return trained(lambda n: head(model(normal(device, 3, n, 8))[0][:, -1]).square().mean(), model, head)


@idiom(TRAINED, slow)
def training_on_images(device):
    layers = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    model = nn.Sequential(*layers, nn.Linear(4, 2)).to(device)
    return trained(lambda n: model(normal(device, 2, 3, n + 6, n + 6)).square().mean(), model)


@idiom(TRAINED + 6, slow)
def training_on_pairs_of_lengths(device):
    token, model = nn.Embedding(50, 8).to(device), nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = model.to(device)

    def loss(n):
        source, target = tokens(device, 3, n), tokens(device, 3, n * 7 % 29 + 3)
        y = model(token(target[:, :-1]), token(source)) @ token.weight.T
        return F.cross_entropy(y.flatten(0, 1), target[:, 1:].flatten())

    return trained(loss, token, model)


@idiom(TRAINED)
def episodes(device):
    """What an agent saw, in a batch."""
    model = mlp(device, 4, 16, 2)

    def loss(n):
        states, actions = normal(device, n, 4), (torch.arange(n) % 2).to(device)
        likely = model(states).log_softmax(-1).gather(1, actions[:, None])[:, 0]
        return -(likely * torch.linspace(0, 1, n).to(device)).mean()

    return trained(loss, model)


@idiom(TRAINED)
def gradients_of_inputs(device):
    model = mlp(device, 4, 16, 2)

    def step(n):
        x = normal(device, n, 4).requires_grad_()
        model(x).square().sum().backward()
        return (x.grad,)

    return step


@idiom(FEW)
def predictions(device):
    model = mlp(device, 4, 16, 2)

    def step(n):
        with torch.no_grad():
            likely = model(normal(device, n, 4)).softmax(-1)
        return likely.max(-1).values, likely.argmax(-1)

    return step


@idiom(FEW + 2)
def images(device):
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1)).to(device)

    def step(n):
        with torch.no_grad():
            return (model(normal(device, 1, 3, n + 8, n + 8)),)

    return step


@idiom(FEW)
def adaptive_pools(device):
    return lambda n: (F.adaptive_avg_pool2d(normal(device, 2, 3, n + 8, n + 8), 7),)


@idiom(FEW)
def resampling(device):
    x = normal(device, 1, 3, 12, 12)
    return lambda n: (F.interpolate(x, size=(n + 8, n + 8), mode="bilinear"),)


@idiom(FEW)
def keys_and_values_that_grow(device):
    model, kept = mlp(device, 8, 8), [torch.zeros(1, 2, 1, 8, device=device)]

    def step(n):
        with torch.no_grad():
            x = normal(device, 1, 2, 1, 8) * (n / 64)
            kept.append(torch.cat([kept.pop(), model(x)], 2))
            return (F.scaled_dot_product_attention(x, kept[0], kept[0]),)

    return step


@idiom(16)
def padded_sequences(device):
    model = mlp(device, 4, 4)

    def step(n):
        rows = [normal(device, k, 4) for k in (n + 3, n // 2 + 2, n)]
        return (model(nn.utils.rnn.pad_sequence(rows, batch_first=True)).relu().sum(1).detach(),)

    return step


@idiom(FEW)
def text_that_is_computed_anew(device):
    token, layer = nn.Embedding(50, 8).to(device), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).to(device)
    layer.eval()

    def step(n):
        with torch.no_grad():
            return ((layer(token(tokens(device, 1, n)))[:, -1] @ token.weight.T).argmax(-1),)

    return step


@idiom(FEW + 2)
def both_parts_of_a_tensor(device):
    x = normal(device, 80, 4)

    def step(n):
        a, b = x.split([n, 80 - n])
        return (a.mean(0) - b.mean(0),)

    return step


@idiom(FEW)
def halves(device):
    def step(n):
        a, b = normal(device, 2 * n, 4).chunk(2)
        return (a * b,)

    return step


@idiom(FEW)
def differences_of_a_lag(device):
    x = normal(device, 90, 4)
    return lambda n: (x[n:] - x[:-n], (x[n:] - x[:-n]).square().mean())


@idiom(FEW)
def largest_ones(device):
    x = normal(device, 90)
    return lambda n: (*x.topk(n), x.topk(n).values.sum())


@idiom(FEW)
def masks(device):
    def step(n):
        lengths = torch.tensor([n // 2, n]).to(device)
        return torch.arange(n, device=device) < lengths[:, None], torch.full((n, n), -1.0, device=device).triu(1)

    return step


@idiom(FEW + 2)
def distances(device):
    centers = normal(device, 5, 4)
    return lambda n: (torch.cdist(normal(device, n, 4), centers).argmin(1),)


@pytest.mark.parametrize("name", CASES)
def test_an_idiom_makes_few_programs(name, fused):
    make, most = IDIOMS[name]
    steps, made = [], []
    for device in ("cpu", DEVICE):
        torch.manual_seed(0)
        steps.append(make(device))
    for n in SIZES:
        want = steps[0](n)
        before = torch.tpu.metrics()["programs"]
        got = [y.cpu() for y in steps[1](n)]
        made.append(torch.tpu.metrics()["programs"] - before)
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g, w, rtol=1e-3, atol=1e-4, msg=lambda text, n=n: f"size {n}: {text}")
    assert sum(made) <= most, f"{made}\n{torch.tpu.explain(5)}"


@slow
def test_gradients_of_another_number_of_batches_of_any_size_add_up(fused):
    """In one window, as nothing is read between them: each backward is a part with its forward, and these are of few forms."""
    draw = random.Random(2)
    steps = [[draw.choice(SIZES) for _ in range(draw.randint(1, 4))] for _ in range(20)]
    runs = []
    for device in ("cpu", DEVICE):
        torch.manual_seed(0)
        model = mlp(device, 6, 13, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        losses, made = [], []
        for sizes in steps:
            before = torch.tpu.metrics()["programs"]
            total = torch.zeros((), device=device)
            for n in sizes:
                loss = model(normal(device, n, 6)).square().sum() / sum(sizes)
                loss.backward()
                total += loss.detach()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(total.item())
            made.append(torch.tpu.metrics()["programs"] - before)
        runs.append(losses)
    torch.testing.assert_close(torch.tensor(runs[1]), torch.tensor(runs[0]), rtol=1e-4, atol=1e-5)
    assert sum(made) <= 45, f"{made}\n{torch.tpu.explain(6)}"


def test_a_few_sizes_of_training_have_programs_of_their_own(fused):
    """The fastest form, with nothing padded."""
    torch.manual_seed(0)
    model = mlp(DEVICE, 5, 11, 3)  # of which no other test makes programs
    step = trained(lambda n: model(normal(DEVICE, n, 5)).square().mean(), model)
    for n in (3, 9, 17, 31) * 3:
        before = torch.tpu.metrics()["pads"]
        step(n)[0].item()
        assert torch.tpu.metrics()["pads"] == before
