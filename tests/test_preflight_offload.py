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
        found[what] = [sum(p[key] for p in steps) for key in ("host", "temporaries", "outputs")], judged["need_bytes"]
    ((host, temporaries, outputs), need), ((more, less, fewer), smaller) = found["none"], found["offload"]
    assert host == 0 and more >= 6 * 2 * WIDE, found
    assert smaller < 0.75 * need, found
    assert (less < 0.75 * temporaries) if run == "jit" else (fewer < 0.25 * outputs), found


FITTED = """
import torch, torch.nn as nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(512, 512), nn.Tanh())

    def forward(self, x):
        return x + self.inner(x)

model = nn.Sequential(nn.Linear(512, 512), *(Block() for _ in range(18))).to("tpu")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    model(torch.ones(1 << 19, 512, device="tpu")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
def test_remat_goes_on_to_offload(python, tmp_path):
    script, report = tmp_path / "train.py", tmp_path / "report.json"
    script.write_text(FITTED)
    args = ["--json", str(report), "--slice", "v5e-1", "--steps", "2", "--fit", "remat", str(script)]
    done = python("", "-m", "oxitorch", "preflight", *args, check=False, timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr
    (judged,) = json.loads(report.read_text())["slices"]
    found = judged["remat"]
    verdicts = {t["policy"]: t["verdict"] for t in found["tries"]}
    kept = ("none", "products", "half", "all")
    assert {p: v for p, v in verdicts.items() if p in kept} == dict.fromkeys(kept, "does_not_fit")
    assert (found["policy"], verdicts["offload"]) == ("offload", "fits"), found
    assert "with torch.tpu.offload():" in done.stdout
