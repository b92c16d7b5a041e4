"""`oxitorch preflight --fit remat`: checkpoints of the script's blocks, without a change to the script."""

import json

import pytest

SCRIPT = """
import torch, torch.nn as nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.drop = nn.Linear(32, 32), nn.Dropout(0.5)

    def forward(self, x):
        return x + self.drop(self.inner(x).sin())

model = nn.Sequential(nn.Linear(32, 32), *(Block() for _ in range(4))).to("tpu")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    model(torch.ones(1 << 14, 32).to("tpu")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
def test_blocks_are_checkpointed(python, tmp_path):
    script, report = tmp_path / "train.py", tmp_path / "report.json"
    script.write_text(SCRIPT)
    args = ["--json", str(report), "--slice", "cpu", "--steps", "2", "--fit", "remat", str(script)]
    done = python("", "-m", "oxitorch", "preflight", *args, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    (judged,) = json.loads(report.read_text())["slices"]
    found = judged["remat"]
    assert (found["blocks"], found["classes"], found["policy"], found["code"]) == (4, ["Block"], "none", None)
    # A product of each block is computed again; the results of products may be kept.
    one = 2 * (1 << 14) * 32 * 32
    flops = {t["policy"]: t["product_flops"] for t in found["tries"]}
    base = flops["none"]
    assert [t["reason"] for t in found["tries"]] == [None] * 4, done.stderr
    assert flops == {"none": base, "products": base, "half": base + 2 * one, "all": base + 4 * one}
    # Programs end where a block is computed again, or XLA would keep what both passes compute.
    need = {t["policy"]: t["need_bytes"] for t in found["tries"]}
    assert need["all"] < 0.75 * need["none"], need
    assert [t["verdict"] for t in found["tries"]] == ["fits"] * 4
    assert judged["step"]["product_flops"] == base and "it fits without checkpoints" in done.stdout


JITTED = """
import sys
import torch, torch.nn as nn
from torch.utils.checkpoint import checkpoint

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(128), nn.Linear(128, 512), nn.Linear(512, 128)

    def forward(self, x):
        return x + self.narrow(nn.functional.gelu(self.wide(self.norm(x))))

blocks = nn.ModuleList(Block() for _ in range(3)).to("tpu")
optimizer = torch.optim.SGD(blocks.parameters(), lr=0.1)

@torch.tpu.jit
def step(x):
    optimizer.zero_grad()
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=False) if sys.argv[1] == "checkpoint" else block(x)
    x.square().mean().backward()
    optimizer.step()

while True:
    step(torch.ones(1 << 14, 128, device="tpu"))
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["v5e-1", "cuda:h200"])
def test_a_jitted_step_is_one_program_and_smaller(name, python, tmp_path):
    script, found = tmp_path / "train.py", {}
    script.write_text(JITTED)
    for what in ("none", "checkpoint"):
        report = tmp_path / f"{what}.json"
        args = ["--json", str(report), "--slice", name, "--steps", "2", "--advice-minutes", "0", str(script), what]
        done = python("", "-m", "oxitorch", "preflight", *args, check=False, timeout=600)
        assert done.returncode == 0, done.stderr
        (judged,) = json.loads(report.read_text())["slices"]
        steps = [p for p in judged["programs"] if p["ops"] > 1]
        assert [p["ended_by"] for p in steps] == ["step"]
        found[what] = steps[0]["memory_bytes"]["temporaries"], judged["step"]["product_flops"]
    (temporaries, flops), (less, more) = found["none"], found["checkpoint"]
    # The product of each block whose result is dropped; the compiler may leave out the last block's.
    one = 2 * (1 << 14) * 128 * 512
    assert more - flops in (2 * one, 3 * one)
    assert less < 0.75 * temporaries, found
