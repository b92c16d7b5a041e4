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
    return {(t["role"], t["name"]) for t in program[which]}


def test_tensors_are_named_after_their_modules_and_optimizers(capture):
    # Reading the loss before the optimizer's step makes two programs of a step.
    code = MLP.format(batch=16).replace("    optimizer.step()", "    loss.item()\n    optimizer.step()")
    programs = capture(code)["programs"]
    last = [p for p in programs if p["launches"][-1][0] == 2]
    assert len(last) == 2
    parameters = {f"{m}.{p}" for m in (0, 2, 3) for p in ("weight", "bias")}
    state = {("state", f"{p}/{key}") for p in parameters for key in ("exp_avg", "exp_avg_sq")}
    gradients = {("gradient", p) for p in parameters}
    of_parameters = {("parameter", p) for p in parameters}
    ran, stepped = last
    buffers = {("buffer", f"2.{b}") for b in ("running_mean", "running_var", "num_batches_tracked")}
    seen = of_parameters | buffers | {("data", None), ("other", None), ("number", None)}
    # Not every program takes every bias.
    assert seen - roles(ran, "inputs") <= {("parameter", "3.bias")} and roles(ran, "inputs") <= seen
    assert buffers | gradients <= roles(ran, "outputs")
    assert roles(stepped, "inputs") == of_parameters | state | gradients | {("number", None)}
    assert roles(stepped, "outputs") == of_parameters | state
    # The first step makes the state; its weights came from the host, as its batch did.
    assert ("parameter", "0.weight") in roles(programs[0], "inputs")
    assert [t["role"] for p in programs for t in p["inputs"]].count("data") == len(
        {p["id"] for p in programs if ("data", None) in roles(p, "inputs")}
    )
    beside = {b["name"]: b["bytes"] for b in ran["tensors_beside"] if b["role"] == "state"}
    assert beside["0.weight/exp_avg"] == 64 * 256 * 4 and sum(beside.values()) <= ran["beside_bytes"]


def test_modules_without_an_optimizer_are_named_when_they_are_called(capture):
    code = """
import torch
import torch.nn as nn

def main(wrap, inner):
    model = nn.Sequential(nn.Linear(8, inner, device="tpu"))
    run = wrap(model)
    with torch.no_grad():
        for _ in range(3):
            run(torch.ones(4, 8).to("tpu")).sum().item()

main(lambda model: model, 5)
main(torch.compile, 7)
"""
    programs = capture(code)["programs"]
    for inner in (5, 7):
        wanted = {"float32[4, 8]", f"float32[{inner}, 8]"}
        (program,) = [p for p in programs if wanted <= {t["type"] for t in p["inputs"]}]
        assert roles(program, "inputs") >= {("parameter", "0.weight"), ("parameter", "0.bias"), ("data", None)}


BIG = """
import torch
import torch.nn as nn

with torch.device("tpu"):
    model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(9):
    x = torch.randn({batch}, 512).to("tpu")
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
PARAMETERS = 2 * 512 * 1024 + 1024 + 512


@pytest.fixture
def preflight(python, tmp_path):
    """`preflight(batch, ...)` runs the command on the script; its report and the finished process."""

    def run(batch, *args):
        (tmp_path / "big.py").write_text(BIG.format(batch=batch))
        file = tmp_path / "report.json"
        argv = ["--slice", "v5e-4", "--steps", "2", "--json", str(file), *args, str(tmp_path / "big.py")]
        done = python("", "-m", "oxitorch", "preflight", *argv, check=False, timeout=600)
        return json.loads(file.read_text())["slices"][0], done

    return run


def last_program(judged):
    (program,) = [p for p in judged["programs"] if p["launches_in_last_step"]]
    return program


@pytest.mark.slow
@pytest.mark.usefixtures("libtpu")
def test_a_step_is_split_over_the_chips_of_a_slice(preflight):
    judged, done = preflight(1024, "--parallel", "dp")
    assert done.returncode == 0, done.stderr
    told, step, program = judged["parallel"], judged["step"], last_program(judged)
    assert (told["strategy"], told["mesh"], told["batch"], told["notes"]) == ("dp", {"data": 4}, 1024, [])
    assert (judged["verdict"], judged["chips"], judged["chips_used"]) == ("fits", 4, 4)
    # The gradients are summed, and the loss.
    (sums,) = step["collectives"]
    assert sums["kind"] == "all-reduce" and 0 <= sums["bytes"] - 4 * PARAMETERS <= 64
    # Each of two links carries three quarters of that twice, at 50 GB/s.
    assert sums["ici_s"] == pytest.approx(2 * 0.75 * sums["bytes"] / 100e9)
    assert step["ici_s"] == sums["ici_s"] and step["roofline_s"] >= step["ici_s"]
    # A quarter of five products.
    assert step["product_flops"] == 5 * 2 * 1024 * 512 * 1024 / 4 and step["flops"] < 2 * step["product_flops"]
    whole = program["memory_bytes"]["arguments"]
    batch = 4 * 1024 * 512 / 4
    assert whole == pytest.approx(3 * 4 * PARAMETERS + batch, rel=0.01)
    assert "data parallel" in done.stdout and "all-reduce" in done.stdout

    judged, done = preflight(1024, "--parallel", "fsdp")
    assert done.returncode == 0, done.stderr
    program = last_program(judged)
    assert program["memory_bytes"]["arguments"] == pytest.approx((whole - batch) / 4 + batch, rel=0.01)
    split = {t["split"] for t in program["tensors"] if t["type"] == "float32[256, 512]"}
    assert split == {"data, -"} and all(t["bytes"] == 4 * 1024 * 512 / 4 for t in program["tensors"][:4])
    assert {c["kind"] for c in judged["step"]["collectives"]} & {"all-gather", "reduce-scatter"}
    assert judged["need_bytes"] < judged["limit_bytes"]


@pytest.mark.usefixtures("libtpu")
def test_a_batch_that_does_not_divide_is_named(preflight):
    judged, done = preflight(6, "--parallel", "auto")
    assert done.returncode == 2 and judged["verdict"] == "unknown", done.stderr
    assert "float32[6, 512]" in judged["reason"] and "big.py:9" in judged["reason"], judged["reason"]
    assert "4 devices do not divide" in done.stdout and "compiling" not in done.stderr
