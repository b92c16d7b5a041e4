"""Where the memory of a program is when it needs most: buffers with their operations and lines."""

import json

import pytest

TRAIN = """
import torch
import torch.nn as nn

model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)).to("tpu")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
while True:
    x = torch.randn(512, 64).to("tpu")
    y = model(x)
    loss = y.square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

LARGE = """
import torch
x = torch.randn(1 << 26, device="tpu")
print(x.sum().item())
del x
w = torch.randn(1 << 16, 1 << 10, device="tpu")
y = w @ w.t()
print(y[0].sum().item())
"""


@pytest.fixture
def preflight(python, tmp_path):
    """Runs the command on a script; its report and the finished process."""

    def run(code, *args, status=0, **env):
        (tmp_path / "train.py").write_text(code)
        file = tmp_path / "report.json"
        args = ("-m", "oxitorch", "preflight", "--json", str(file), *args, str(tmp_path / "train.py"))
        done = python("", *args, check=False, timeout=600, **env)
        assert done.returncode == status, done.stdout + done.stderr
        return json.loads(file.read_text())["slices"][0], done

    return run


def test_buffers_at_the_peak_have_operations_and_lines(preflight, tmp_path):
    # The user's dumps stay where they are wanted.
    dumps = tmp_path / "dumps"
    judged, done = preflight(TRAIN, "--slice", "cpu", XLA_FLAGS=f"--xla_dump_to={dumps}")
    assert any(path.name.endswith("buffer-assignment.txt") for path in dumps.iterdir())
    step = judged["programs"][-1]
    buffers, memory = step["buffers_at_peak"], step["memory_bytes"]
    assert [b["bytes"] for b in buffers] == sorted((b["bytes"] for b in buffers), reverse=True)
    assert all(b["unpadded_bytes"] <= b["bytes"] for b in buffers if b["role"] == "temporary")
    there = memory["arguments"] + memory["outputs"] + memory["temporaries"] - memory["aliased"]
    assert sum(b["bytes"] for b in buffers) + step["buffers_rest_bytes"] == pytest.approx(there, rel=0.05)
    weights = {b["name"]: b for b in buffers if b["purpose"] == "parameter"}
    assert weights["0.weight"]["type"] == "float32[256, 64]" and weights["0.weight"]["overwritten"]
    assert weights["0.weight"]["bytes"] == 4 * 256 * 64
    kept = [b for b in buffers if b["activation"]]
    assert any(b["type"] == "float32[512, 256]" and "train.py:9" in b["line"] for b in kept)
    assert "its largest buffers" in done.stdout and "kept for the backward" in done.stdout


@pytest.mark.usefixtures("libtpu")
def test_out_of_memory_names_what_is_too_large(preflight):
    judged, done = preflight(LARGE, "--slice", "v5e-1", "--advice-minutes", "0", status=1)
    random, product = judged["programs"][:2]
    # Random numbers take no memory beside the result, which has the sum beside it.
    memory = random["memory_bytes"]
    assert random["verdict"] == "fits" and memory["peak"] < 1.05 * 4 * 2**26, memory
    assert product["verdict"] == "does_not_fit" and "E1000" in product["error"]
    largest = product["buffers_at_peak"][0]
    assert (largest["type"], largest["op"]) == ("float32[65536, 65536]", "mm")
    assert "train.py:7" in largest["line"] and largest["bytes"] == 2**34 and "T(8,128)" in largest["layout"]
    assert product["memory_bytes"]["peak"] >= 2**34 and product["need_bytes"] > judged["limit_bytes"]
    assert "float32[65536, 65536]" in done.stdout and "train.py:7" in done.stdout


ATTENTION = """
import torch
import torch.nn.functional as F

q, k, v = (torch.zeros(1, 8, 8192, 64, dtype=torch.bfloat16).to("tpu").requires_grad_() for _ in range(3))
y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
torch.autograd.grad(y.sum(), (q, k, v))
print(torch.tpu.metrics()["launches"])
"""


@pytest.mark.parametrize("name", ["v5e-1", "cuda:h200"])
def test_attention_takes_no_memory_for_all_scores(preflight, cuda_plugin, name):
    judged, _ = preflight(ATTENTION, "--slice", name)
    # The scores of all queries are 2 GiB, and a backward has two such tensors.
    assert judged["verdict"] == "fits" and judged["need_bytes"] < 1 << 30
