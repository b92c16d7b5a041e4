"""Fused mode: loops without any added call settle into the same few programs, the same numbers come out as on the CPU,
and nothing is kept twice."""

import copy
import gc
import time

import pytest
import torch
import torch.nn.functional as F
from support import DEVICE
from test_models import GPT, MLP, Recurrent, ResNet, batch
from torch import nn
from torch.utils.checkpoint import checkpoint

STEPS = 9
SETTLED = 2  # steps that may make programs: the first has no optimizer state, the second has

pytestmark = pytest.mark.usefixtures("fused")


def settles(step, settled=SETTLED, steps=STEPS):
    """Runs `step(i)` in a loop that does nothing else; the programs that each round made."""
    made = []
    for i in range(steps):
        before = torch.tpu.metrics()["programs"]
        step(i)
        made.append(torch.tpu.metrics()["programs"] - before)
    assert not any(made[settled:]), f"programs made in each step: {made}; {torch.tpu.metrics()['flushes']}"
    torch.tpu.synchronize()
    assert torch.tpu.metrics()["fallbacks"] == {}


class Trainer:
    """A model on the device and a copy of it on the CPU, trained on the same batches."""

    def __init__(self, model, optimizer=torch.optim.AdamW, **options):
        torch.manual_seed(0)
        model = model()
        self.models = {d: copy.deepcopy(model).to(d).train() for d in ("cpu", DEVICE)}
        self.optimizers = {d: optimizer(m.parameters(), lr=2e-3, **options) for d, m in self.models.items()}
        self.g = torch.Generator().manual_seed(1)
        self.losses = {"cpu": [], DEVICE: []}

    def loss(self, device, x, y):
        loss = F.cross_entropy(self.models[device](x.to(device)), y.to(device))
        self.losses[device].append(loss.detach())
        return loss

    def step(self, i):
        x, y = batch(self.models["cpu"], self.g)
        for d, optimizer in self.optimizers.items():
            optimizer.zero_grad()
            self.loss(d, x, y).backward()
            self.update(d, i)

    def update(self, device, i):
        self.optimizers[device].step()

    def check(self, rtol=2e-4):
        torch.testing.assert_close(
            torch.stack(self.losses[DEVICE]).cpu(), torch.stack(self.losses["cpu"]), rtol=rtol, atol=1e-5
        )


MODELS = {
    "MLP": MLP,
    "GPT": GPT,
    "ResNet": ResNet,
    "LSTM": lambda: Recurrent("LSTM"),
    "GRU": lambda: Recurrent("GRU"),
}


@pytest.mark.parametrize(
    ("model", "optimizer"), [*((m, "AdamW") for m in MODELS), ("MLP", "SGD"), ("MLP", "RMSprop"), ("MLP", "Adagrad")]
)
def test_a_training_loop_is_one_program_per_step(model, optimizer):
    t = Trainer(MODELS[model], getattr(torch.optim, optimizer))
    torch.tpu.synchronize()
    torch.tpu.reset_metrics()
    settles(t.step)
    m = torch.tpu.metrics()
    assert m["launches"] == STEPS and m["flushes"] == {"step": STEPS}, m
    t.check()


@pytest.mark.parametrize("reentrant", [True, False])
def test_programs_end_where_a_block_is_computed_again(reentrant):
    class Checkpointed(MLP):
        def forward(self, x):
            for layer in self.layers:
                # A reentrant checkpoint is one for inputs with gradients.
                again = reentrant and not x.requires_grad
                x = layer(x) if again else checkpoint(layer, x, use_reentrant=reentrant)
            return x

    Checkpointed.__name__ = "MLP"  # which says what its batches are
    t = Trainer(Checkpointed)
    # Without reentrance only what the backward reads is computed again: the results of LayerNorm and ReLU.
    blocks = len(t.models[DEVICE].layers) - 1 if reentrant else 2
    torch.tpu.synchronize()
    torch.tpu.reset_metrics()
    settles(t.step)
    assert torch.tpu.metrics()["flushes"] == {"step": STEPS, "recompute": STEPS * blocks}
    t.check()


class Squares(torch.autograd.Function):
    """A checkpoint of its own making."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.exp().square()

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = x.exp().square()
        return torch.autograd.grad(y, x, grad)[0]


@pytest.mark.parametrize("name", ["checkpoint", "own", "kept graph", "gradients of gradients", "plain"])
def test_only_a_forward_in_a_backward_is_computed_again(name):
    def run(x):
        h = x.sin()
        if name == "own":
            h = Squares.apply(h)
        elif name == "plain" or name == "gradients of gradients":
            h = h.exp().square()
        else:
            h = checkpoint(lambda h: h.exp().square(), h, use_reentrant=False)
        if name == "gradients of gradients":
            (g,) = torch.autograd.grad(h.sum(), x, create_graph=True)
            h = g.square()
        h.square().sum().backward(retain_graph=name == "kept graph")
        return x.grad

    values = torch.linspace(-1, 1, 8)
    wanted = run(values.clone().requires_grad_())
    x = values.to(DEVICE).requires_grad_()
    torch.tpu.synchronize()
    torch.tpu.reset_metrics()
    got = run(x)
    again = torch.tpu.metrics()["flushes"].get("recompute", 0)
    assert again == (name in ("checkpoint", "own", "kept graph"))
    torch.testing.assert_close(got.cpu(), wanted)


def test_gradient_accumulation():
    t = Trainer(MLP)

    def step(i):
        for d, optimizer in t.optimizers.items():
            optimizer.zero_grad()
            g = torch.Generator().manual_seed(i)
            for _ in range(4):
                (t.loss(d, *batch(t.models["cpu"], g)) / 4).backward()
            optimizer.step()

    settles(step)
    t.check()


def test_clipping_schedule_and_dropout():
    t = Trainer(MLP)
    for m in t.models.values():
        m.layers.insert(2, nn.Dropout(0.0))
    schedules = [torch.optim.lr_scheduler.OneCycleLR(o, 5e-3, total_steps=STEPS + 1) for o in t.optimizers.values()]

    def update(d, i):
        nn.utils.clip_grad_norm_(t.models[d].parameters(), 0.5)
        t.optimizers[d].step()
        schedules[d == DEVICE].step()

    t.update = update
    settles(t.step)
    t.check()


def test_dropout_draws_anew_in_every_step():
    x, drop, seen = torch.ones(200, 50, device=DEVICE), nn.Dropout(0.5), []
    settles(lambda i: seen.append(drop(x).mean().item()))
    assert len(set(seen)) == STEPS and all(0.9 < m < 1.1 for m in seen)


def test_averaged_weights():
    t = Trainer(MLP)
    averages = {d: [p.detach().clone() for p in m.parameters()] for d, m in t.models.items()}

    def update(d, i):
        t.optimizers[d].step()
        with torch.no_grad():
            for a, p in zip(averages[d], t.models[d].parameters(), strict=True):
                a.mul_(0.9).add_(p, alpha=0.1)

    t.update = update
    settles(t.step, settled=3)  # what comes after the optimizer's step joins the next one
    t.check()
    for a, b in zip(averages[DEVICE], averages["cpu"], strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-3, atol=1e-4)


def test_two_optimizers():
    torch.manual_seed(0)
    models = {d: [nn.Linear(4, 8).to(d), nn.Linear(8, 1).to(d)] for d in ("cpu", DEVICE)}
    for a, b in zip(models["cpu"], models[DEVICE], strict=True):
        b.load_state_dict(a.state_dict())
    optimizers = {d: [torch.optim.Adam(m.parameters(), 0.01) for m in ms] for d, ms in models.items()}
    scores = {"cpu": [], DEVICE: []}

    def step(i):
        g = torch.Generator().manual_seed(i)
        noise, real = torch.randn(16, 4, generator=g), torch.randn(16, 8, generator=g)
        for d, (generator, critic) in models.items():
            make, judge = optimizers[d]
            judge.zero_grad()
            score = F.softplus(-critic(real.to(d))).mean() + F.softplus(critic(generator(noise.to(d)).detach())).mean()
            score.backward()
            judge.step()
            make.zero_grad()
            F.softplus(-critic(generator(noise.to(d)))).mean().backward()
            make.step()
            scores[d].append(score.detach())

    settles(step)
    torch.testing.assert_close(torch.stack(scores[DEVICE]).cpu(), torch.stack(scores["cpu"]), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("every", [1, 3])
def test_logging_costs_no_program(every):
    t = Trainer(MLP)

    def update(d, i):
        t.optimizers[d].step()
        if i % every == 0:
            t.losses[d][-1].item()

    t.update = update
    settles(t.step)
    t.check()


@pytest.mark.parametrize("read", [True, False])
def test_inference(read):
    torch.manual_seed(0)
    model = GPT().to(DEVICE).eval()
    inputs = [torch.randint(0, 11, (3, 8)) for _ in range(STEPS + 4)]
    out = []

    @torch.no_grad()
    def step(i):
        y = model(inputs[i].to(DEVICE)).softmax(-1)
        out.append(y.argmax(-1).cpu() if read else y)

    # Without reads the results of all rounds stay alive, and a window ends when the copy from the host comes again.
    settles(step, settled=1 if read else 4, steps=STEPS + 4)


def test_short_rounds_share_a_program():
    x = torch.zeros(4, device=DEVICE)
    one = torch.ones(4, device=DEVICE)
    torch.tpu.synchronize()
    torch.tpu.reset_metrics()
    for _ in range(1000):
        x = x + one
    assert x.tolist() == [1000] * 4
    m = torch.tpu.metrics()
    assert m["launches"] == 16 and m["programs"] <= 3 and m["flushes"] == {"loop": 15, "read": 1}


def test_dead_results_are_not_computed():
    x = torch.ones(1 << 10, device=DEVICE)
    y = x * 2
    torch.tpu.synchronize()
    torch.tpu.reset_metrics()
    for i in range(3):
        (y @ y, y.sin().sum(), torch.randn(3, device=DEVICE))  # nobody looks
        z = y + i
    assert z.sum().item() == 4 << 10
    m = torch.tpu.metrics()
    assert m["launches"] == 1
    # The same program as without the dead ops.
    torch.tpu.reset_metrics()
    z = y + 2
    assert z.sum().item() == 4 << 10
    assert torch.tpu.metrics()["programs"] == 0


def test_random_numbers_do_not_depend_on_what_is_dropped():
    torch.manual_seed(3)
    torch.randn(5, device=DEVICE)
    a = torch.randn(5, device=DEVICE)
    torch.manual_seed(3)
    with torch.tpu.set_eager_mode("strict"):
        torch.randn(5, device=DEVICE)
        torch.testing.assert_close(torch.randn(5, device=DEVICE), a)


def others():
    """Memory that earlier tests have not given back."""
    gc.collect()
    return torch.tpu.memory_allocated()


def test_weights_and_state_are_not_held_twice():
    before, n = others(), 1 << 18
    weights = [nn.Parameter(torch.randn(n, device=DEVICE)) for _ in range(4)]
    optimizer = torch.optim.AdamW(weights, fused=True)

    def step(i):
        loss = sum((w * w).mean() for w in weights)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    for i in range(3):
        step(i)
    torch.tpu.synchronize()
    held = torch.tpu.memory_allocated() - before
    one = 4 * n
    assert held < one * 4 * 4.1  # weights, two moments, gradients
    torch.tpu.reset_peak_memory_stats()
    for i in range(4):
        step(i)
    torch.tpu.synchronize()
    # A step's gradients may meet those of the step before, never weights or state.
    assert torch.tpu.max_memory_allocated() - before <= held + 4.1 * one


LAYER, LAYERS = 8 << 20, 16


def into_a_module(x):
    layer = nn.Linear(2, 1 << 20, bias=False, device=DEVICE, dtype=torch.bfloat16)
    layer.load_state_dict({"weight": x.view(-1, 2)})
    return layer


# What becomes of one layer's weights, of the host or of the device: something smaller, or the same elsewhere.
BECOMES = {
    "itself": lambda x: x.to(DEVICE),
    "a shard": lambda x: x.to(DEVICE).chunk(4)[0].clone(),
    "another dtype": lambda x: x.to(DEVICE).bfloat16(),
    "quantized": lambda x: (x.to(DEVICE) / x.to(DEVICE).abs().max() * 127).to(torch.int8),
    "a sum": lambda x: x.to(DEVICE).sum(),
    "two parts merged": lambda x: torch.cat([x.to(DEVICE).bfloat16(), x[:16].to(DEVICE).bfloat16()]),
    "loaded into a module": into_a_module,
}


@pytest.mark.parametrize("of", ["cpu", DEVICE])
@pytest.mark.parametrize("becomes", BECOMES)
def test_what_a_window_alone_holds_is_bounded(becomes, of):
    """A model is moved, sharded, converted or loaded layer by layer: no more is there than the result and a few layers."""
    weights = torch.arange(LAYER // 4, dtype=torch.float32) + 1
    before = others()
    layers = [weights.to(of) if of == DEVICE else weights for _ in range(LAYERS)]
    torch.tpu.synchronize()
    torch.tpu.reset_peak_memory_stats()
    for i in range(LAYERS):
        layers[i] = BECOMES[becomes](layers[i])
    torch.tpu.synchronize()
    least = max(LAYERS * LAYER if of == DEVICE else 0, torch.tpu.memory_allocated() - before)
    # A window of 16 MiB that is recorded and two that are launched, each with the layer that filled it.
    assert torch.tpu.max_memory_allocated() - before - least <= (3 if of == DEVICE else 9) * LAYER
    wanted = BECOMES[becomes](weights)
    for got in (layers[0], layers[-1]):
        got, want = (y.weight if isinstance(y, nn.Module) else y for y in (got, wanted))
        assert torch.equal(got, want)


def test_what_is_still_visible_survives_the_step():
    w = nn.Parameter(torch.ones(64, device=DEVICE))
    optimizer = torch.optim.SGD([w], lr=1.0)
    before = w.detach().clone()
    alias = w.detach()
    w.square().sum().backward()
    optimizer.step()
    assert before.tolist() == [1] * 64 and alias.tolist() == [-1] * 64


def test_a_failed_op_does_not_take_its_neighbours_with_it():
    x = torch.ones(4, device=DEVICE)
    y = x + 1
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        torch.ones(2, 3, device=DEVICE) @ torch.ones(2, 3, device=DEVICE)
    assert (y + 1).tolist() == [3] * 4


def test_python_cannot_run_away():
    before = others()
    x = torch.ones(400, 400, device=DEVICE)
    y = x
    for _ in range(3000):
        y = (y @ x) * 1e-3
    ahead = torch.tpu.memory_allocated() - before
    torch.tpu.synchronize()
    assert ahead <= 8 * x.nbytes


def test_streams_that_are_asked_end_the_window():
    x = torch.ones(4, device=DEVICE) + 1
    stream = torch.tpu.current_stream()
    deadline = time.monotonic() + 60
    while not stream.query():
        assert time.monotonic() < deadline, "the stream never became idle"
    assert x.tolist() == [2] * 4


def test_a_copy_has_the_options_of_its_thread():
    """Another dtype, and a copy into a part of a tensor: neither ends the window, nor begins one with other options."""
    x = torch.ones(4, device=DEVICE)
    torch.tpu.synchronize()
    before = torch.tpu.metrics()["programs"]
    with torch.tpu.compiler.custom_compiler_options({"xla_cpu_enable_fast_math": False}):
        y = x.half() + 2
        y[:2] = x[2:]
        y = y * 3
        assert y.tolist() == [3, 3, 9, 9]
    assert torch.tpu.metrics()["programs"] - before == 1


@pytest.mark.parametrize("change", ["options", "mode"])
def test_a_switch_between_ops(change):
    x = torch.ones(4, device=DEVICE) + 1
    with (
        torch.tpu.compiler.custom_compiler_options({"xla_cpu_enable_fast_math": False})
        if change == "options"
        else torch.tpu.set_eager_mode("strict")
    ):
        x = x * 3
    x = x - 1
    assert x.tolist() == [5] * 4
