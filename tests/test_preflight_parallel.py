"""`oxitorch preflight --parallel`: what tensors are for, and a step that is split over the chips of a slice."""

import json

import pytest

MLP = """
import torch
import torch.nn as nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.BatchNorm1d(256), nn.Linear(256, 64)).to("tpu")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scale = torch.ones(3, device="tpu")
for step in range(9):
    x = torch.randn({batch}, 64).to("tpu")
    loss = model(x).square().mean() * scale[0]
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

DEVICE = {"platform": "tpu", "kind": "TPU v5 lite", "memory_bytes": 1 << 34, "steps": 3}


@pytest.fixture
def capture(python, tmp_path):
    """`capture(code)` runs code on a device that is not there; what it leaves."""

    def run(code):
        (tmp_path / "device.json").write_text(json.dumps(DEVICE))
        python(code, OXITORCH_PREFLIGHT=str(tmp_path))
        return json.loads((tmp_path / "capture.json").read_text())

    return run


def roles(program, which):
    return {(r["role"], r.get("name")) for r in program[f"{which}_roles"]}


def test_tensors_are_named_after_their_modules_and_optimizers(capture):
    first, *_, last = capture(MLP.format(batch=16))["programs"]
    parameters = {f"{m}.{p}" for m in (0, 2, 3) for p in ("weight", "bias")}
    state = {("state", f"{p}/{key}") for p in parameters for key in ("exp_avg", "exp_avg_sq")}
    buffers = {("buffer", f"2.{b}") for b in ("running_mean", "running_var", "num_batches_tracked")}
    named = {("parameter", p) for p in parameters} | state | buffers
    assert roles(last, "input") == named | {("data", None), ("number", None), ("other", None)}
    gradients = {("gradient", p) for p in parameters}
    assert named | gradients <= roles(last, "output")
    # The first step makes the state; its weights came from the host, as its batch did.
    assert ("parameter", "0.weight") in roles(first, "input") and state <= roles(first, "output")
    assert [r["role"] for r in first["input_roles"]].count("data") == 1
    assert len(last["input_roles"]) == len(last["inputs"]) and len(last["output_roles"]) == len(last["outputs"])


def test_modules_without_an_optimizer_are_named_when_they_are_called(capture):
    code = """
import torch
import torch.nn as nn

def main():
    model = nn.Sequential(nn.Linear(8, 8, device="tpu"))
    run = torch.compile(model) if {compiled} else model
    with torch.no_grad():
        for _ in range(3):
            run(torch.ones(4, 8).to("tpu")).sum().item()

main()
"""
    for compiled in (False, True):
        *_, last = capture(code.format(compiled=compiled))["programs"]
        assert roles(last, "input") >= {("parameter", "0.weight"), ("parameter", "0.bias"), ("data", None)}


def test_what_lives_beside_a_program_is_named(capture):
    code = MLP.format(batch=16).replace("    optimizer.step()", "    loss.item()\n    optimizer.step()")
    forward = max(capture(code)["programs"], key=lambda p: len(p["named_beside"]))
    beside = {b["name"]: b["bytes"] for b in forward["named_beside"] if b["role"] == "state"}
    assert beside["0.weight/exp_avg"] == 64 * 256 * 4 and sum(beside.values()) <= forward["beside_bytes"]
