"""What makes a step smaller that does not fit, and whether fast mode or full effort says that it does not."""

import json

import pytest

pytestmark = pytest.mark.usefixtures("libtpu")

BLOCKS = """
import torch
import torch.nn as nn
import oxitorch


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


model = nn.Sequential(Block(64), Block(64)).to("tpu")
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
batch = oxitorch.preflight.batch(1 << 23)
while True:
    x = torch.empty(batch, 64, device="tpu").to("tpu")
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
"""

PRODUCTS = """
import torch
import oxitorch

x = torch.ones(512, 512).to("tpu")
y = torch.softmax(x @ x, -1) @ x
oxitorch.preflight.step()
"""


@pytest.fixture
def preflight(python, tmp_path):
    """Runs the command on a script for one TPU v5e; its report and the finished process."""

    def run(code, *args):
        (tmp_path / "train.py").write_text(code)
        file = tmp_path / "report.json"
        args = ("preflight", "--slice", "v5e-1", "--json", str(file), *args, str(tmp_path / "train.py"))
        done = python("", "-m", "oxitorch", *args, check=False, timeout=900)
        return json.loads(file.read_text())["slices"][0], done

    return run


@pytest.mark.slow
def test_advice_is_followed_to_see_what_it_saves(preflight):
    judged, done = preflight(BLOCKS, "--effort", "fast", "--steps", "1", "--advice-minutes", "60")
    assert done.returncode == 1 and judged["verdict"] == "does_not_fit", done.stderr
    largest = max(judged["programs"], key=lambda p: p["need_bytes"])
    advice = {a["what"]: a for a in largest["advice"]}
    assert {"checkpoint", "batch", "shard"} <= advice.keys(), largest
    assert [a["bytes"] for a in largest["advice"]] == sorted((a["bytes"] for a in largest["advice"]), reverse=True)
    for a in advice.values():
        assert a["compiled"] is None or a["bytes"] == judged["need_bytes"] - a["compiled"]["need_bytes"], a
    # Nearly all is in proportion to the batch, of which four chips have a quarter each.
    need = judged["need_bytes"]
    assert advice["batch"]["compiled"]["need_bytes"] < 0.55 * need
    assert advice["shard"]["compiled"]["need_bytes"] == pytest.approx(need / 4, rel=0.05)
    assert advice["checkpoint"]["compiled"]["need_bytes"] < 0.8 * need
    assert "what makes it smaller" in done.stdout and "--slice v5e-4 --parallel fsdp (compiled: then " in done.stdout


def test_what_is_not_followed_is_an_estimate(preflight):
    code = BLOCKS.replace("oxitorch.preflight.batch(1 << 23)", "1 << 23")
    judged, done = preflight(code, "--effort", "fast", "--steps", "1", "--advice-minutes", "0")
    largest = max(judged["programs"], key=lambda p: p["need_bytes"])
    advice = {a["what"]: a for a in largest["advice"]}
    assert all(a["compiled"] is None for a in advice.values()) and "nothing was compiled for them" in done.stdout
    # What tanh keeps for the backward pass.
    assert advice["checkpoint"]["bytes"] >= 4 * 256 * 2**23


@pytest.mark.slow
def test_near_a_limit_full_effort_decides(preflight):
    fast, _ = preflight(PRODUCTS, "--effort", "fast")
    assert all(p["effort"] == "fast" and p["fast_need_bytes"] is None for p in fast["programs"])
    # With full effort what is between the two products is in the chip's vector memory.
    least = fast["need_bytes"] - max(p["memory_bytes"]["temporaries"] for p in fast["programs"])
    near, done = preflight(PRODUCTS, "--budget", f"hbm={(least + fast['need_bytes']) // 2}")
    (program,) = near["programs"]
    assert program["effort"] == "full" and program["fast_need_bytes"] == fast["need_bytes"], program
    assert program["memory_bytes"]["temporaries"] < fast["programs"][0]["memory_bytes"]["temporaries"]
    assert "near the limit: again with full effort" in done.stderr and "with little effort" in done.stdout
    far, _ = preflight(PRODUCTS, "--budget", "hbm=1G")
    assert [p["effort"] for p in far["programs"]] == ["fast"]
