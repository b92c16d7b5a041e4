"""Small models train on the device as on the CPU: the same losses step by step, no op on the CPU, no compile after the
second step, buffers given back, memory as much as weights and optimizer state need."""

import copy
import gc
import math

import pytest
import torch
import torch.nn.functional as F
from support import DEVICE
from torch import nn

STEPS = 10


class MLP(nn.Module):
    """Three layers with dropout off."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)
        )

    def forward(self, x):
        return self.layers(x)


class Block(nn.Module):
    """A transformer block, attention by SDPA."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (
            p.view(b, t, self.heads, c // self.heads).transpose(1, 2) for p in self.qkv(self.norm1(x)).split(c, 2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Two blocks, tied embedding."""

    def __init__(self, vocabulary=11, width=16, length=8):
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(Block(width, 2), Block(width, 2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.token.weight

    def forward(self, i):
        x = self.token(i) + self.position(torch.arange(i.shape[1], device=i.device))
        return self.head(self.norm(self.blocks(x))).flatten(0, 1)


class Residual(nn.Module):
    """Two convolutions with batch norm, and the input added."""

    def __init__(self, channels):
        super().__init__()
        self.a, self.b = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.na, self.nb = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x):
        return F.relu(x + self.nb(self.b(F.relu(self.na(self.a(x))))))


class ResNet(nn.Module):
    """Stem, two residual blocks, pooling in between."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU())
        self.blocks = nn.Sequential(Residual(6), nn.MaxPool2d(2), Residual(6), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)))


class Recurrent(nn.Module):
    """An LSTM or a GRU over a sequence, the last state classified."""

    def __init__(self, kind):
        super().__init__()
        self.cells, self.head = getattr(nn, kind)(5, 8, batch_first=True), nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.cells(x)[0][:, -1])


def batch(model, g):
    if isinstance(model, GPT):
        i = torch.randint(0, 11, (3, 9), generator=g)
        return i[:, :-1].contiguous(), i[:, 1:].flatten().contiguous()
    shape = {"MLP": (6, 8), "ResNet": (6, 1, 8, 8), "Recurrent": (6, 4, 5)}[type(model).__name__]
    return torch.randn(shape, generator=g), torch.randint(0, 4, (6,), generator=g)


MODELS = {
    "MLP": MLP,
    "GPT": GPT,
    "ResNet": ResNet,
    "LSTM": lambda: Recurrent("LSTM"),
    "GRU": lambda: Recurrent("GRU"),
}
OPTIMIZERS = {
    "SGD": lambda p, **o: torch.optim.SGD(p, lr=0.05, momentum=0.9, **o),
    "Adam": lambda p, **o: torch.optim.Adam(p, lr=2e-3, **o),
    "AdamW": lambda p, **o: torch.optim.AdamW(p, lr=2e-3, weight_decay=0.1, **o),
}
FORMS = {"foreach": {"foreach": True}, "fused": {"fused": True}, "single": {"foreach": False}}


def train(model, device, optimizer, form, after_step=lambda step: None):
    """Ten steps with clipping and a schedule; the losses."""
    model = copy.deepcopy(model).to(device).train()
    optimizer = OPTIMIZERS[optimizer](model.parameters(), **FORMS[form])
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=STEPS + 1)
    g = torch.Generator().manual_seed(1)
    losses = []
    for step in range(STEPS):
        x, y = (t.to(device) for t in batch(model, g))
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        after_step(step)
    return losses, model, optimizer


def compiles():
    torch.tpu.synchronize()
    m = torch.tpu.metrics()
    return m["compiles"] + m["loads"], m["programs"]


# Every model with AdamW in its three forms, every optimizer on the MLP.
PAIRS = [(name, "AdamW") for name in MODELS] + [("MLP", "SGD"), ("MLP", "Adam")]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("name", "optimizer"), PAIRS)
def test_training(name, optimizer, form):
    torch.manual_seed(0)
    model = MODELS[name]()
    expected, twin, _ = train(model, "cpu", optimizer, form)
    torch.tpu.reset_metrics()
    counts = []
    got, trained, _ = train(model, DEVICE, optimizer, form, lambda step: counts.append(compiles()))
    assert all(math.isfinite(x) for x in got)
    assert got == pytest.approx(expected, rel=2e-4, abs=2e-5), f"device {got}\nCPU    {expected}"
    for (key, a), b in zip(trained.state_dict().items(), twin.state_dict().values(), strict=True):
        # The key part of the attention's bias has a gradient of zero: what Adam makes of its rounding is noise.
        if not key.endswith("qkv.bias"):
            torch.testing.assert_close(a.cpu(), b, rtol=1e-3, atol=1e-3, msg=lambda m, key=key: f"{key}: {m}")
    metrics = torch.tpu.metrics()
    assert metrics["fallbacks"] == {}
    # The schedule changes the learning rate in every step, Adam its step count: no program is new from the third step on.
    assert counts[1] == counts[-1], f"compiles and programs after each step: {counts}"
    assert metrics["donations"] > 0


def test_fewer_ops_than_the_single_form():
    """The fused optimizer is one op for all parameters."""
    torch.manual_seed(0)
    ops = {}
    for form in FORMS:
        torch.tpu.reset_metrics()
        train(MLP(), DEVICE, "AdamW", form)
        ops[form] = torch.tpu.metrics()["ops"]
    assert ops["fused"] < ops["foreach"] < ops["single"], ops


# ---------------------------------------------------------------- E7: numbers are operands

NUMBERS = {
    "add": lambda x, n: x + n,
    "sub": lambda x, n: n - x,
    "mul": lambda x, n: x * n,
    "div": lambda x, n: x / n,
    "pow": lambda x, n: x ** (n + 0.123),
    "add alpha": lambda x, n: torch.add(x, x, alpha=n),
    "add_": lambda x, n: x.clone().add_(n),
    "fill_": lambda x, n: x.clone().fill_(n),
    "full": lambda x, n: torch.full((4,), n, device=x.device),
    "full_like": lambda x, n: torch.full_like(x, n),
    "tensor": lambda x, n: torch.tensor(n, device=x.device) * x,
    "cpu tensor": lambda x, n: torch.tensor(n) * x,
    "clamp": lambda x, n: x.clamp(-n, n),
    "compare": lambda x, n: x > n,
    "where": lambda x, n: torch.where(x > 0, x, n),
    "masked_fill": lambda x, n: x.masked_fill(x > 0, n),
    "addcmul": lambda x, n: torch.addcmul(x, x, x, value=n),
    "addcdiv": lambda x, n: torch.addcdiv(x, x, x, value=n),
    "lerp": lambda x, n: torch.lerp(x, x, n),
    "leaky_relu": lambda x, n: F.leaky_relu(x, n),
    "elu": lambda x, n: F.elu(x, n),
    "softplus": lambda x, n: F.softplus(x, n),
    "threshold": lambda x, n: F.threshold(x, n, n),
    "layer_norm eps": lambda x, n: F.layer_norm(x, (4,), eps=n),
    "batch_norm momentum": lambda x, n: F.batch_norm(x.view(2, 2), torch.zeros(2, device=x.device), torch.ones(2, device=x.device), training=True, momentum=n / 100, eps=n),
    "dropout": lambda x, n: F.dropout(x, n / 100),
    "addmm": lambda x, n: torch.addmm(x.view(2, 2), x.view(2, 2), x.view(2, 2), beta=n, alpha=n),
    "pad": lambda x, n: F.pad(x, (1, 1), value=n),
    "index_fill": lambda x, n: x.index_fill(0, torch.tensor([0], device=x.device), n),
    "scatter": lambda x, n: x.scatter(0, torch.tensor([0], device=x.device), n),
    "setitem": lambda x, n: x.clone().__setitem__(slice(1, 2), n),
    "setitem mask": lambda x, n: x.clone().__setitem__(x > 0, n),
    "arange": lambda x, n: torch.arange(n, n + 3.5, device=x.device),
    "linspace": lambda x, n: torch.linspace(0, n, 4, device=x.device),
    "normal_": lambda x, n: x.clone().normal_(n, n),
    "foreach": lambda x, n: torch._foreach_add([x, x], n),
    "foreach list": lambda x, n: torch._foreach_mul([x, x], [n, n + 1]),
    "smooth_l1": lambda x, n: F.smooth_l1_loss(x, x + 1, beta=n),
    "huber": lambda x, n: F.huber_loss(x, x + 1, delta=n),
    "cosine": lambda x, n: F.cosine_similarity(x, x, 0, eps=n),
    "normalize": lambda x, n: F.normalize(x, dim=0, eps=n),
    "sdpa scale": lambda x, n: F.scaled_dot_product_attention(x.view(1, 2, 2), x.view(1, 2, 2), x.view(1, 2, 2), scale=n),
    "label_smoothing": lambda x, n: F.cross_entropy(x.view(2, 2), torch.tensor([0, 1], device=x.device), label_smoothing=n / 100),
    "sdpa dropout": lambda x, n: F.scaled_dot_product_attention(x.view(1, 2, 2), x.view(1, 2, 2), x.view(1, 2, 2), dropout_p=n / 100),
    "histogram range": lambda x, n: torch.histogram(x, 3, range=(0, n)),
    "jagged padding": lambda x, n: torch.ops.aten._jagged_to_padded_dense_forward(x.view(4, 1), [torch.tensor([0, 1, 4], device=x.device)], [3], n),
    "lstsq rcond": lambda x, n: torch.linalg.lstsq(x.view(2, 2), x.view(2, 2), rcond=n / 100),
    "clip_grad_norm": lambda x, n: nn.utils.get_total_norm([x]) * n,
}  # fmt: skip


@pytest.mark.parametrize("name", NUMBERS)
def test_a_new_number_compiles_nothing(name):
    f = NUMBERS[name]
    x = torch.tensor([1.0, 2.0, 0.5, 3.0], device=DEVICE)
    f(x, 1.5), f(x, 2.5)
    before = compiles()
    for i in range(3, 7):
        f(x, i + 0.25)
    assert compiles() == before


def test_a_new_learning_rate_compiles_nothing():
    for make in OPTIMIZERS.values():
        for options in FORMS.values():
            p = nn.Parameter(torch.ones(4, device=DEVICE))
            optimizer = make([p], **options)
            for step in range(8):
                if step == 3:
                    before = compiles()
                p.grad = torch.ones_like(p)
                optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
                optimizer.step()
            assert compiles() == before, f"{optimizer}, {options}"


def test_backward_of_a_number_compiles_nothing():
    x = torch.ones(4, device=DEVICE, requires_grad=True)
    for i in range(6):
        if i == 2:
            before = compiles()
        ((x * (i + 0.5)).pow(2).sum() / (i + 1)).backward()
        x.grad = None
    assert compiles() == before


# ---------------------------------------------------------------- E6 and memory


def tensor_bytes(model, optimizer):
    held = [*model.parameters(), *model.buffers()]
    held += [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor) and v.is_tpu]
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in held}
    return sum(storages.values())


@pytest.mark.parametrize("form", FORMS)
def test_memory_after_training_is_weights_and_state(form):
    torch.manual_seed(0)
    gc.collect()
    torch.tpu.synchronize()
    before = torch.tpu.memory_allocated()
    _, model, optimizer = train(MLP(), DEVICE, "AdamW", form)
    optimizer.zero_grad()
    gc.collect()
    torch.tpu.synchronize()
    held = torch.tpu.memory_allocated() - before
    need = tensor_bytes(model, optimizer)
    # Numbers that became operands may stay: a few bytes each.
    assert need <= held <= need + 2048, f"{held} bytes are held, weights and state are {need}"
    del model, optimizer
    gc.collect()
    torch.tpu.synchronize()
    assert torch.tpu.memory_allocated() - before <= 2048


def test_memory_does_not_grow():
    model = MLP().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x = torch.randn(6, 8, device=DEVICE)
    seen = []
    for _ in range(30):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        torch.tpu.synchronize()
        seen.append(torch.tpu.memory_allocated())
    assert len(set(seen[5:])) == 1, seen


@pytest.mark.parametrize("form", ["fused", "foreach"])
def test_an_optimizer_step_gives_its_buffers_back(form):
    """Weights and both moments are overwritten: their buffers are donated, so the peak has no second copy of them."""
    n = 1 << 20
    p = nn.Parameter(torch.ones(n, device=DEVICE))
    optimizer = torch.optim.AdamW([p], **FORMS[form])
    p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.step()
    torch.tpu.synchronize()
    held = torch.tpu.memory_allocated()
    torch.tpu.reset_metrics()
    torch.tpu.reset_peak_memory_stats()
    optimizer.step()
    torch.tpu.synchronize()
    assert torch.tpu.metrics()["donations"] >= 3
    # The foreach form makes temporaries of its own (as on CUDA): the denominator and one more.
    extra = torch.tpu.max_memory_allocated() - held
    assert extra <= (0.01 if form == "fused" else 2.01) * 4 * n, f"{extra / 4 / n:.2f} weights of extra memory"


def test_in_place_chains_reuse_one_buffer():
    torch.tpu.set_eager_mode("strict")
    x = torch.ones(1 << 18, device=DEVICE)
    torch.tpu.synchronize()
    torch.tpu.reset_peak_memory_stats()
    torch.tpu.reset_metrics()
    before = torch.tpu.memory_allocated()
    for _ in range(20):
        x.mul_(1.01).add_(1)
    torch.tpu.synchronize()
    assert torch.tpu.metrics()["donations"] == 40 and torch.tpu.max_memory_allocated() <= before + 1024


def test_what_somebody_still_sees_is_not_given_away():
    x = torch.ones(1 << 10, device=DEVICE)
    keep = x.detach()
    y = x * 2
    old = x.clone()
    x.mul_(3)
    x.add_(y)
    assert y[0].item() == 2 and old[0].item() == 1 and keep[0].item() == 5
    z = x + 0
    del x
    z.add_(1)
    assert keep[0].item() == 5 and z[0].item() == 6


def test_temporaries_are_freed_while_the_host_runs_ahead():
    x = torch.ones(1 << 20, device=DEVICE)
    torch.tpu.synchronize()
    torch.tpu.reset_peak_memory_stats()
    before = torch.tpu.memory_allocated()
    for _ in range(40):
        y = x * 2 + 1
    torch.tpu.synchronize()
    assert y[0].item() == 3
    assert torch.tpu.max_memory_allocated() - before < 40 * (4 << 20)


# ---------------------------------------------------------------- other ways to train


def test_gradient_accumulation_and_inference():
    torch.manual_seed(0)
    model = ResNet()
    results = []
    for device in ("cpu", DEVICE):
        m = copy.deepcopy(model).to(device)
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        g = torch.Generator().manual_seed(2)
        for _ in range(2):
            optimizer.zero_grad(set_to_none=False)
            for _ in range(2):
                x, y = (t.to(device) for t in batch(m, g))
                (F.cross_entropy(m(x), y) / 2).backward()
            optimizer.step()
        m.eval()
        with torch.inference_mode():
            results.append(m(batch(m, g)[0].to(device)).cpu())
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-4)


def test_training_in_debug_mode_gives_the_same_losses():
    torch.manual_seed(0)
    model = MLP()
    with torch.tpu.set_eager_mode("strict"):
        strict, _, _ = train(model, DEVICE, "AdamW", "fused")
    with torch.tpu.set_eager_mode("debug"):
        debug, _, _ = train(model, DEVICE, "AdamW", "fused")
    assert debug == strict


def test_training_in_bfloat16_autocast():
    torch.manual_seed(0)
    losses = {}
    for device in ("cpu", DEVICE):
        torch.manual_seed(0)
        model = MLP().to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        x, y = (t.to(device) for t in batch(model, torch.Generator().manual_seed(1)))
        losses[device] = []
        for _ in range(STEPS):
            with torch.autocast(device, dtype=torch.bfloat16):
                loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[device].append(loss.item())
    assert losses[DEVICE] == pytest.approx(losses["cpu"], rel=0.05, abs=0.02)
    assert losses[DEVICE][-1] < 0.7 * losses[DEVICE][0]


def test_lbfgs():
    results = []
    for device in ("cpu", DEVICE):
        p = nn.Parameter(torch.tensor([-1.0, 1.5], device=device))
        optimizer = torch.optim.LBFGS([p], max_iter=10)

        def closure(p=p, optimizer=optimizer):
            optimizer.zero_grad()
            loss = (1 - p[0]) ** 2 + 10 * (p[1] - p[0] ** 2) ** 2
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)
        results.append(p.detach().cpu())
    torch.testing.assert_close(*results, rtol=1e-2, atol=1e-2)


def test_averaged_weights():
    model = MLP().to(DEVICE)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    average.update_parameters(model)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(2)
    average.update_parameters(model)
    for p, q in zip(model.parameters(), average.module.parameters(), strict=True):
        torch.testing.assert_close(q.detach().cpu(), p.detach().cpu() - 1)
