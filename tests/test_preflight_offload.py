"""`torch.tpu.offload` for devices that are not there: XLA's compilers keep saved tensors in the memory of the host."""

import json

import pytest

SCRIPT = """
import contextlib, sys
import torch, torch.nn as nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(128), nn.Linear(128, 512), nn.Linear(512, 128)

    def forward(self, x):
        return x + self.narrow(nn.functional.gelu(self.wide(self.norm(x))))

what, run = sys.argv[1:]
blocks = nn.ModuleList(Block() for _ in range(6)).to("tpu")
optimizer = torch.optim.SGD(blocks.parameters(), lr=0.1)

def step(x):
    optimizer.zero_grad()
    with torch.tpu.offload() if what == "offload" else contextlib.nullcontext():
        for block in blocks:
            x = block(x)
        loss = x.square().mean()
    if run == "eager":
        loss.item()
    loss.backward()
    optimizer.step()

step = torch.tpu.jit(step) if run == "jit" else step
while True:
    step(torch.ones(1 << 14, 128, device="tpu"))
"""
WIDE = (1 << 14) * 512 * 4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["v5e-1", "cuda:h200"])
@pytest.mark.parametrize("run", ["jit", "eager"])
def test_what_is_saved_is_on_the_host(name, run, python, tmp_path):
    script, found = tmp_path / "train.py", {}
    script.write_text(SCRIPT)
    for what in ("none", "offload"):
        report = tmp_path / f"{what}.json"
        args = ["--json", str(report), "--slice", name, "--steps", "2", "--advice-minutes", "0", str(script), what, run]
        done = python("", "-m", "oxitorch", "preflight", *args, check=False, timeout=900)
        assert done.returncode == 0, done.stdout + done.stderr
        (judged,) = json.loads(report.read_text())["slices"]
        steps = [p["memory_bytes"] for p in judged["programs"] if p["ops"] > 1]
        found[what] = [sum(p[key] for p in steps) for key in ("host", "outputs")]
    (host, outputs), (more, fewer) = found["none"], found["offload"]
    if run == "jit":
        # What comes back in the same program stays where it is.
        assert host == more == 0 and fewer == outputs, found
    else:
        assert host == 0 and more >= WIDE and fewer < 0.5 * outputs, found
