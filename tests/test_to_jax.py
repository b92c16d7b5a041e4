"""`oxitorch to-jax`: what is written, and how far it is from PyTorch when it is run."""

import importlib
import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import to_jax_zoo
import torch
from oxitorch import to_jax
from oxitorch.to_jax import __main__ as command
from oxitorch.to_jax import _check
from torch import nn


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
    assert "def __init__(self, *, w1_out_features, rngs):" in text
    assert "self.a = FeedForward(w1_out_features=16, rngs=rngs)" in text


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
        (lambda p: torch.optim.Adam(p, amsgrad=True), "raise NotImplementedError("),
    ],
)
def test_optimizers(optimizer, text, tmp_path):
    model = to_jax_zoo.MLP()
    written(model, (torch.randn(2, 12),), tmp_path, optimizer=optimizer(model.parameters()))
    assert text in (tmp_path / "out" / "train.py").read_text()


def test_a_file_is_converted_and_agrees(tmp_path, environment):
    (tmp_path / "mine.py").write_text(
        textwrap.dedent("""
            import torch
            from torch import nn

            class Net(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.fc = nn.Linear(4, 3)  # the only layer
                    self.scale = nn.Parameter(torch.ones(3))

                def forward(self, x):
                    return torch.tanh(self.fc(x)) * self.scale

            def example_inputs():
                return torch.randn(5, 4)

            def loss(output, labels):
                return nn.functional.cross_entropy(output, labels)
        """)
    )
    done = subprocess.run(
        [sys.executable, "-m", "oxitorch.to_jax", "mine.py", "--target", "labels=i64[5]<3"],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("converted\n")
    report = json.loads((tmp_path / "net_jax" / "report.json").read_text())
    assert set(report["differences"]) == {"forward", "forward_eval", "loss", "gradients", "steps", "round_trip"}
    model = (tmp_path / "net_jax" / "model.py").read_text()
    assert "# the only layer\n" in model
    # The test finds a wrong translation.
    (tmp_path / "net_jax" / "model.py").write_text(model.replace("jnp.tanh", "jnp.sin"))
    sys.path.insert(0, str(tmp_path))
    found = _check.run(tmp_path / "net_jax")
    assert found["forward"] > 1e-3 and found["gradients"] > 1e-3


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
