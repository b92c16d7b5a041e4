"""`oxitorch to-jax`: what is written, and how far it is from PyTorch when it is run."""

import importlib.util
import json
import math
import re
import subprocess
import sys
import textwrap
from collections import OrderedDict
from pathlib import Path

import numpy
import pytest
import to_jax_zoo
import torch
from oxitorch import to_jax
from oxitorch.to_jax import __main__ as command
from oxitorch.to_jax import _check, _optimizers, _schedules
from torch import nn
from torch.optim import lr_scheduler as schedules


def written(model, args, tmp_path, **options):
    """The translation's `model.py`, without running it, and the result."""
    torch.manual_seed(0)
    result = to_jax.convert(model, args, folder=tmp_path / "out", run=False, **options)
    return (tmp_path / "out" / "model.py").read_text(), result


def test_a_forward_reads_like_its_source(tmp_path):
    text, result = written(to_jax_zoo.GPT(), (to_jax_zoo.ids(61, 2, 12),), tmp_path)
    assert result.problems == result.notes == []
    for line in (
        # key, query and value keep their names, and heads need no transposes
        "B, T, _ = x.shape",
        "# calculate query, key, values for all heads in batch and move head forward to be the batch dim",
        "q, k, v = jnp.split(self.c_attn(x), 3, axis=2)",
        "q = q.reshape(B, T, self.n_head, 8)",
        "y = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(B, T, 32)",
        "x = x + self.attn(self.ln_1(x))",
        # a loop over blocks is one, a tied head uses the embedding
        "self.h = nnx.List([GPTBlock(rngs=rngs) for _ in range(3)])",
        "for block in self.h:",
        "return self.ln_f(x) @ self.wte.embedding[...].T",
        '"lm_head.weight": "wte.weight",',
    ):
        assert line in text, text
    assert text.count("class ") == 3


def test_instances_that_differ_in_numbers_share_a_class(tmp_path):
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = to_jax_zoo.FeedForward(8, 16), to_jax_zoo.FeedForward(8, 24)

        def forward(self, x):
            return self.a(x) + self.b(x)

    text, _ = written(Pair(), (torch.randn(2, 8),), tmp_path)
    assert text.count("class FeedForward") == 1
    assert "def __init__(self, *, hidden, rngs):" in text
    assert "self.a = FeedForward(hidden=16, rngs=rngs)" in text


@pytest.mark.parametrize(
    "name, lines",
    [
        # a constructor's parameters keep their names; pools and means say what is not the default
        (
            "resnet",
            [
                "def __init__(self, *, inputs, outputs, rngs):",
                "BasicBlock(inputs=8, rngs=rngs),",
                "lambda x: max_pool(x, (2, 2)),",
                "return self.fc(x.mean((-2, -1)))",
            ],
        ),
        # a dimension is no number of heads, even if they are equal; numbers have no more digits than they need
        (
            "llama",
            [
                "k = self.wk(x).reshape(B, T, self.kv_heads, self.head_dim).swapaxes(1, 2)",
                "self.inv_freq = Constant(jnp.array([1.0, 0.1, 0.01, 0.001], jnp.float32))",
                "return self.weight[...] * (x * jax.lax.rsqrt((x**2).mean(axis=-1, keepdims=True) + self.eps))",
            ],
        ),
    ],
)
def test_no_noise(name, lines, tmp_path):
    make, inputs = to_jax_zoo.ZOO[name]
    text, _ = written(make(), inputs(), tmp_path)
    for line in lines:
        assert line in text, text


class Paths(nn.Module):
    """Gets sizes from its caller, and leaves out the whole branch of some samples."""

    class Branch(nn.Module):
        def forward(self, x, height, width):
            return x.reshape(x.shape[0], height, width, 2).flip(1).reshape(x.shape[0], height * width, 2)

    class DropPath(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop_prob = 0.1

        def forward(self, x):
            return x * x.new_empty(x.shape[0], 1, 1).bernoulli_(1 - self.drop_prob) if self.training else x

    def __init__(self):
        super().__init__()
        self.branch, self.drop_path = self.Branch(), self.DropPath()

    def forward(self, x):
        n, height, width, _ = x.shape
        y = x.reshape(n, height * width, 2)
        return y + self.drop_path(self.branch(y, height, width))


def test_sizes_are_arguments_and_paths_a_layer(tmp_path):
    text, result = written(Paths(), (torch.randn(2, 3, 4, 2),), tmp_path)
    assert result.problems == result.notes == []
    assert "def __call__(self, x, height, width):" in text
    assert "return y + self.drop_path(self.branch(y, height=height, width=width))" in text
    assert "self.drop_path = DropPath(0.1, rngs=rngs)" in text


class Writes(nn.Module):
    """Writes into parts of a tensor."""

    def forward(self, x):
        y = x * 2
        y[:, 0] = 1
        y[1:, 1:].add_(x[1:, 1:])
        return y + 1


class Bad(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x):
        x = self.fc(x)
        return torch.linalg.matrix_exp(x) + x  # has no row


def test_what_has_no_translation_is_named_and_raises(tmp_path):
    text, result = written(Bad(), (torch.randn(3, 3),), tmp_path)
    line = next(n for n, t in enumerate(Path(__file__).read_text().splitlines(), 1) if t.endswith("# has no row"))
    assert len(result.problems) == 1
    assert result.problems[0].endswith(f"test_to_jax.py:{line}: `aten::linalg_matrix_exp`")
    assert 'unsupported("`aten::linalg_matrix_exp`", ' in text.replace("'", '"')
    assert not result.converted


def test_a_write_is_an_update(tmp_path):
    text, result = written(Writes(), (torch.randn(3, 4),), tmp_path)
    assert result.problems == []
    assert ".at[:, 0].set(" in text and ".at[1:].set(" in text


@pytest.mark.parametrize(
    "optimizer, text",
    [
        (
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
            "optax.sgd(0.1, momentum=0.9, nesterov=True)",
        ),
        (
            lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.2),
            "optax.chain(optax.add_decayed_weights(0.2), optax.adam(",
        ),
        (lambda p: torch.optim.AdamW(p, lr=0.1), "optax.adamw(0.1, b1=0.9, b2=0.999, eps=1e-08, weight_decay=0.01)"),
        (
            lambda p: torch.optim.AdamW(
                [
                    {"params": [t for t in p if t.ndim > 1], "weight_decay": 0.1},
                    {"params": [t for t in p if t.ndim < 2]},
                ],
                weight_decay=0.0,
            ),
            "weight_decay=0.1, mask=lambda params: jax.tree.map(lambda p: p.ndim >= 2, params)",
        ),
        (
            lambda p: torch.optim.Adam(p, amsgrad=True),
            "raise NotImplementedError('train.py:7: `torch.optim.Adam` with `amsgrad=True` has no translation",
        ),
    ],
)
def test_optimizers(optimizer, text, tmp_path):
    model = to_jax_zoo.MLP()
    made, places = optimizer(list(model.parameters())), {"optimizer": "train.py:7"}
    written(model, (torch.randn(2, 12),), tmp_path, optimizer=made, places=places, clip_norm=1.0)
    train = " ".join((tmp_path / "out" / "train.py").read_text().replace('"', "'").split())
    assert text in train.replace("( ", "(").replace(", )", ")")
    assert "raise" in text or "clip_grad_norm(1.0)" in train


OPTIMIZERS = {
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.7, rho=0.8, weight_decay=0.1),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.1, weight_decay=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1, momentum_decay=0.01),
    "nadam with decay": lambda p: torch.optim.NAdam(p, lr=0.1, weight_decay=0.2),
    "nadam with decoupled decay": lambda p: torch.optim.NAdam(p, lr=0.1, weight_decay=0.2, decoupled_weight_decay=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, weight_decay=0.2),
    "rmsprop with momentum": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9, eps=0.1),
    "rmsprop, centered": lambda p: torch.optim.RMSprop(p, lr=0.1, alpha=0.7, eps=1e-3, centered=True),
    "rmsprop, centered, with momentum": lambda p: torch.optim.RMSprop(p, 0.1, 0.7, 0.1, 0, 0.9, centered=True),
}


def test_optimizers_take_pytorch_s_steps(environment):
    """Six steps in float64 with gradients that are given, and a rate that changes."""
    gradients = [[math.sin(3.0 * step + i) for i in range(4)] for step in range(6)]
    texts, expected = {}, {}
    for name, make in OPTIMIZERS.items():
        parameter = nn.Parameter(torch.arange(1.0, 5.0, dtype=torch.float64))
        optimizer = make([parameter])
        base = optimizer.param_groups[0]["lr"]
        texts[name] = _optimizers.transformation(optimizer, optimizer.param_groups[0], "rate"), base
        for step, g in enumerate(gradients):
            optimizer.param_groups[0]["lr"] = base * 0.9**step
            parameter.grad = torch.tensor(g, dtype=torch.float64)
            optimizer.step()
        expected[name] = parameter.tolist()
    program = """
        import json, sys, jax, jax.numpy as jnp, optax
        from oxitorch.to_jax._layers import scale_by_nadam
        jax.config.update("jax_enable_x64", True)
        texts, gradients = json.load(sys.stdin)
        found = {}
        for name, (text, base) in texts.items():
            tx = eval(text, globals() | {"rate": lambda step: base * 0.9**step})
            x = jnp.arange(1.0, 5.0)
            state = tx.init(x)
            for g in gradients:
                change, state = tx.update(jnp.array(g), state, x)
                x = optax.apply_updates(x, change)
            found[name] = x.tolist()
        print(json.dumps(found))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], input=json.dumps([texts, gradients]),
        env=environment(JAX_PLATFORMS="cpu"), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        assert found[name] == pytest.approx(x, rel=1e-8), name  # NAdam has a number in float32


WARMUP, LOWEST = 3, 1e-3


class Settings:
    peak = 0.5


def rate(step):
    if WARMUP > 100 or not LOWEST:
        return 1.0
    if step < WARMUP:
        return Settings.peak * (step + 1) / (WARMUP + 1)
    if step > 40:
        return LOWEST
    share = (step - WARMUP) / (40 - WARMUP)
    assert 0 <= share <= 1
    return LOWEST + 0.5 * (1 + math.cos(math.pi * share)) * (Settings.peak - LOWEST)


SCHEDULERS = {
    "function": lambda o: rate,
    "lambda": lambda o: schedules.LambdaLR(o, lambda n: 0.9**n if 2 < n <= 9 or n == 20 else max(0.1, n / 4, 0.2)),
    "step": lambda o: schedules.StepLR(o, 7, 0.5),
    "milestones": lambda o: schedules.MultiStepLR(o, [2, 30, 30], 0.3),
    "exponential": lambda o: schedules.ExponentialLR(o, 0.9),
    "cosine": lambda o: schedules.CosineAnnealingLR(o, 20, eta_min=1e-3),
    "restarts": lambda o: schedules.CosineAnnealingWarmRestarts(o, 7),
    "linear": lambda o: schedules.LinearLR(o, 0.1, total_iters=5),
    "polynomial": lambda o: schedules.PolynomialLR(o, 10, 2.0),
    "constant": lambda o: schedules.ConstantLR(o, 0.25, 7),
    "one cycle": lambda o: schedules.OneCycleLR(o, 0.2, 60, cycle_momentum=False),
    "one cycle, linear": lambda o: schedules.OneCycleLR(
        o, 0.2, 55, cycle_momentum=False, anneal_strategy="linear", three_phase=True, pct_start=0.2
    ),
    "sequence": lambda o: schedules.SequentialLR(
        o, [schedules.LinearLR(o, 0.1, total_iters=5), schedules.CosineAnnealingLR(o, 30)], [5]
    ),
}


def test_schedules_have_pytorch_s_rates(environment):
    texts, expected = {}, {}
    for name, make in SCHEDULERS.items():
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.2)
        scheduler = make(optimizer)
        texts[name] = _schedules.schedule(optimizer, scheduler, "").text
        expected[name] = [r for (r,) in _schedules.rates(optimizer, scheduler, 50)]
        # The given one stays as it is, and can be asked itself.
        for r in expected[name] if name != "function" else ():
            assert optimizer.param_groups[0]["lr"] == r
            optimizer.step()
            scheduler.step()
    program = """
        import json, sys, jax, jax.numpy as jnp, optax
        found = {}
        for name, text in json.load(sys.stdin).items():
            exec(text)
            found[name] = jax.jit(jax.vmap(schedule))(jnp.arange(50)).tolist()
        print(json.dumps(found))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], input=json.dumps(texts), env=environment(JAX_PLATFORMS="cpu"),
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.keys() == expected.keys()
    for name, rates in expected.items():
        assert found[name] == pytest.approx(rates, rel=1e-5, abs=1e-8), name


def draws(step):
    return torch.rand(()).item()  # no number


def branches(step):
    if step > 3:  # no return
        late = 1.0
    return late


def twice(step):
    share = step / 10
    share = share * 2  # a second value
    return share


@pytest.mark.parametrize(
    "scheduler, where, what",
    [
        (lambda o: draws, "# no number", "`torch.rand(()).item()`"),
        (lambda o: branches, "# no return", "`if step > 3:`, a branch that does not return,"),
        (lambda o: twice, "share = step / 10", "`share`, a name that is given several values,"),
        (
            lambda o: schedules.OneCycleLR(o, 0.2, 60),
            None,
            "`OneCycleLR` with `cycle_momentum`, which changes betas or the momentum,",
        ),
        (lambda o: schedules.ReduceLROnPlateau(o), None, "`torch.optim.lr_scheduler.ReduceLROnPlateau`"),
    ],
)
def test_a_schedule_without_translation_raises_and_names_the_line(scheduler, where, what, tmp_path):
    model = to_jax_zoo.MLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"optimizer": optimizer, "scheduler": scheduler(optimizer), "places": {"scheduler": "train.py:9"}}
    _, result = written(model, (torch.randn(2, 12),), tmp_path, **options)
    lines = Path(__file__).read_text().splitlines()
    at = "train.py:9" if where is None else f"test_to_jax.py:{[x.endswith(where) for x in lines].index(True) + 1}"
    assert result.problems == [f"{at}: {what}"]
    assert f"{at}: {what} has no translation to optax" in (tmp_path / "out" / "train.py").read_text()


def test_a_scheduler_that_has_taken_steps_is_refused(tmp_path):
    model = to_jax_zoo.MLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = schedules.ExponentialLR(optimizer, 0.9)
    optimizer.step()
    scheduler.step()
    with pytest.raises(ValueError, match="has taken steps already"):
        to_jax.convert(
            model, (torch.randn(2, 12),), folder=tmp_path / "out", optimizer=optimizer, scheduler=scheduler, run=False
        )


class Everything(nn.Module):
    """Values of all kinds: tied, of batch norm, a buffer, and in sequences with and without names."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 6)
        self.features = nn.Sequential(OrderedDict(first=nn.Linear(6, 6), norm=nn.BatchNorm1d(6), act=nn.ReLU()))
        self.more = nn.Sequential(nn.Conv1d(6, 6, 1), nn.ReLU(), nn.Conv1d(6, 6, 1))
        self.register_buffer("shift", torch.randn(6))
        self.head = nn.Linear(6, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.features(self.embed(ids))
        return self.head(self.more(x[..., None])[..., 0] + self.shift)


@pytest.mark.skipif(importlib.util.find_spec("safetensors") is None, reason="`pip install safetensors`")
def test_weights_go_there_and_back(tmp_path, environment):
    import safetensors.torch as safetensors

    torch.manual_seed(0)
    model, ids = Everything(), torch.arange(5)
    to_jax.convert(model, (ids,), folder=tmp_path / "out", run=False)
    model(ids)  # statistics of batch norm
    expected = {name: t.clone() for name, t in model.state_dict().items()}
    assert expected["features.norm.running_mean"].abs().max() > 0
    output = model.eval()(ids)
    safetensors.save_model(model, tmp_path / "one.safetensors")  # has one of two tied names
    safetensors.save_file({n: t.clone() for n, t in expected.items()}, tmp_path / "all.safetensors")
    torch.save(expected, tmp_path / "state.pt")
    program = """
        import sys, numpy as np, jax.numpy as jnp
        from out.model import create
        from out.weights import from_torch, load, save, to_torch
        one, both = load(create(1), "one.safetensors"), load(create(2), "all.safetensors")
        assert all(np.array_equal(a, b) for a, b in zip(to_torch(one).values(), to_torch(both).values(), strict=True))
        save(one, "back.safetensors")
        one.eval()
        np.save("output.npy", one(jnp.arange(5)))
        for change in ({}, {"other": 1}):
            state = to_torch(one) | change
            state.pop("shift")
            try:
                from_torch(one, state)
            except KeyError as e:
                print(e)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], cwd=tmp_path, env=environment(JAX_PLATFORMS="cpu"),
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "'the state has no shift; the model has no -'",
        "'the state has no shift; the model has no other'",
    ]
    back = safetensors.load_file(tmp_path / "back.safetensors")
    assert back.keys() == expected.keys()
    for name, t in expected.items():
        assert torch.equal(back[name].to(t.dtype), t), name
    again = Everything()
    again.load_state_dict(back)
    assert torch.equal(again.eval()(ids), output)
    torch.testing.assert_close(torch.from_numpy(numpy.load(tmp_path / "output.npy")), output)


def test_a_file_is_converted_and_agrees(tmp_path, environment):
    (tmp_path / "mine.py").write_text(
        textwrap.dedent("""
            import torch
            from torch import nn

            class Net(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
                    self.fc = nn.Linear(4, 3)  # the last layer
                    self.scale = nn.Parameter(torch.ones(3))
                    self.fixed = nn.Parameter(torch.rand(4), requires_grad=False)

                def forward(self, x):
                    for layer in self.layers:
                        x = layer(x) + self.fixed
                    return torch.tanh(self.fc(x)) * self.scale

            def example_inputs():
                return torch.randn(5, 4)

            def loss(output, labels):
                return nn.functional.cross_entropy(output, labels)

            def optimizer(model):
                groups = [{"params": model.layers.parameters(), "lr": 0.1}, {"params": model.fc.parameters()}]
                return torch.optim.AdamW([*groups, {"params": [model.scale], "weight_decay": 0.0}], lr=1e-3)

            def scheduler(optimizer):
                return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

            grad_clip = 1e-2
        """)
    )
    done = subprocess.run(
        [sys.executable, "-m", "oxitorch.to_jax", "mine.py", "--target", "labels=i64[5]<3"],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("converted\n")
    report = json.loads((tmp_path / "net_jax" / "report.json").read_text())
    assert set(report["differences"]) == {
        "forward",
        "forward_eval",
        "loss",
        "gradients",
        "learning_rates",
        "steps",
        "round_trip",
    }
    model = (tmp_path / "net_jax" / "model.py").read_text()
    assert "# the last layer\n" in model
    # The test finds a wrong translation.
    (tmp_path / "net_jax" / "model.py").write_text(model.replace("jnp.tanh", "jnp.sin"))
    sys.path.insert(0, str(tmp_path))
    found = _check.run(tmp_path / "net_jax")
    assert found["forward"] > 1e-3 and found["gradients"] > 1e-3 and found["steps"] > 1e-3


@pytest.mark.parametrize(
    "arguments, error",
    [
        (["nowhere.py"], "there is no file `nowhere.py`"),
        (["two.py", "--input", "f32[2]"], "which module is meant? the file has `A`, `B`"),
        (["two.py:C"], "the file has no `C`; it has `A`, `B`"),
        (["two.py:A"], "there are no example inputs"),
        (["two.py:A", "--input", "x32[2]"], "`x32[2]` is no input"),
        (["two.py:A", "--input", "f32[2]", "--out", "a-b"], "the folder `a-b` cannot be imported"),
    ],
)
def test_what_is_asked_for_wrongly(arguments, error, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "two.py").write_text(
        "from torch import nn\nclass A(nn.Linear):\n    def __init__(self): super().__init__(2, 2)\nclass B(A): pass\n"
    )
    assert command.main(arguments) == 2
    assert error in capsys.readouterr().err
    sys.modules.pop("two", None)
    importlib.invalidate_caches()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["own", "timm", "transformers"])
def test_architectures(kind, tmp_path):
    for name in to_jax_zoo.ZOO if kind == "own" else to_jax_zoo.wide(kind):
        result = to_jax.convert(**to_jax_zoo.prepared(kind, name), folder=tmp_path / re.sub(r"\W", "_", name))
        assert result.status == "converted", (name, result)


def test_what_is_in_packages_named_like_torch_has_its_line(tmp_path):
    boxes = pytest.importorskip("torchvision").ops

    class Areas(nn.Module):
        def forward(self, x):
            return boxes.nms(x, x[:, 0], 0.5)

    _, result = written(Areas(), (torch.rand(4, 4),), tmp_path)
    assert any("torchvision/ops/" in str(problem) for problem in result.problems), result.problems
