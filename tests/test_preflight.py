"""`oxitorch preflight`: a script on a device that is not there, and what is said about it."""

import json
import re
import subprocess
import sys
from pydoc_data.topics import topics

import pytest

# Two layers of 32 on batches of 16: products of 2 * 16 * 32 * 32 in the forward pass, and as many again in the backward
# for each weight and for the input of the second layer.
STEP_FLOPS = 2 * 16 * 32 * 32 * (2 + 2 + 1)

SCRIPT = """
import sys
import torch
import torch.nn as nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)).to("tpu")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(int(sys.argv[1]) if len(sys.argv) > 1 else 1000):
    x = torch.randn(16, 32).to("tpu")
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    seen = loss.item()
    assert seen == {value}, seen
    print("step", step)
{end}
print("the end")
"""


@pytest.fixture
def script(tmp_path):
    """`script(end="...")` writes a training script with something at its end."""

    def write(end="", value="0.0"):
        path = tmp_path / "train.py"
        path.write_text(SCRIPT.format(end=end, value=value))
        return str(path)

    return write


@pytest.fixture
def preflight(python, tmp_path):
    """Runs the command; its report and the finished process."""

    def run(*args, **env):
        file = tmp_path / "report.json"
        file.unlink(missing_ok=True)
        done = python("", "-m", "oxitorch", "preflight", "--json", str(file), *args, check=False, timeout=600, **env)
        return (json.loads(file.read_text()) if file.exists() else None), done

    return run


def test_a_script_is_captured_compiled_and_judged(preflight, script):
    report, done = preflight(script(), "--slice", "cpu", "--steps", "3")
    assert done.returncode == 0, done.stderr
    (judged,) = report["slices"]
    assert report["version"] == 1 and judged["verdict"] == "fits" and judged["steps_captured"] == 3
    # The loop ends with the third step, before its loss is read.
    assert [line for line in done.stderr.splitlines() if line.startswith("step")] == ["step 0", "step 1"]
    assert "the end" not in done.stderr
    # One program for the first step, in which the optimizer makes its state, and one for all others.
    assert [p["launches"] for p in judged["programs"]] == [1, 2]
    assert (judged["step"]["launches"], judged["step"]["product_flops"]) == (1, STEP_FLOPS)
    assert judged["step"]["flops"] > STEP_FLOPS and judged["step"]["bytes_accessed"] > 0
    (read,) = judged["host_reads"]
    assert (read["count"], read["bytes"]) == (1, 4) and "train.py:15" in read["line"]
    (write,) = judged["host_writes"]
    assert (write["count"], write["bytes"]) == (1, 16 * 32 * 4)
    memory = judged["programs"][1]["memory_bytes"]
    parameters = 2 * (32 * 32 + 32)
    # Parameters and the two moments are overwritten.
    assert memory["aliased"] >= 3 * parameters * 4 and memory["arguments"] >= memory["aliased"]
    assert {t["type"] for t in judged["programs"][1]["tensors"][:4]} == {"float32[32, 32]"}
    assert any("train.py:14" in t["line"] for t in judged["programs"][1]["tensors"])
    assert judged["need_bytes"] >= memory["peak"] > 0 and judged["fallbacks"] == []
    assert "✓ fits" in done.stdout and "1 host read in the last step" in done.stdout and "train.py:15" in done.stdout


def test_what_does_not_fit_has_status_1(preflight, script):
    # A tensor of 64 TiB: nothing is allocated.
    huge = script("x = torch.ones(1 << 44, device='tpu').add_(1).sum().item()", value="2.0")
    report, done = preflight("--host-value", "2", "--advice-minutes", "0", "--slice", "cpu", huge, "2")
    (judged,) = report["slices"]
    assert done.returncode == 1 and judged["verdict"] == "does_not_fit", done.stderr
    assert judged["steps_captured"] == 2 and judged["need_bytes"] > judged["limit_bytes"]
    assert "the end" in done.stderr and "does not fit" in done.stdout


def test_a_script_that_fails_or_uses_no_device_cannot_be_judged(preflight, script, tmp_path):
    report, done = preflight(script("raise RuntimeError('no more')"), "1", "--slice", "cpu")
    (judged,) = report["slices"]
    assert done.returncode == 2 and judged["verdict"] == "unknown" and "no more" in done.stderr
    assert judged["reason"] == "the script ended with status 1 after 1 step"

    other = tmp_path / "other.py"
    other.write_text("print('hello')")
    report, done = preflight(str(other), "--slice", "cpu")
    assert done.returncode == 2 and "did not use the device" in report["slices"][0]["reason"]


def test_ctrl_c_ends_the_script_and_not_the_report(environment, script):
    # To all processes of the group, as a terminal does.
    path = script("import os, signal; os.killpg(0, signal.SIGINT); import time; time.sleep(60)")
    argv = [sys.executable, "-m", "oxitorch", "preflight", path, "1", "--slice", "cpu"]
    env = environment()
    done = subprocess.run(argv, capture_output=True, text=True, env=env, start_new_session=True, timeout=300)
    assert done.returncode == 2 and "the script was interrupted after 1 step" in done.stdout, done.stderr


@pytest.mark.slow
def test_products_are_those_of_a_count_by_hand(python, repo, tmp_path):
    """charlm: per layer 24 T d^2 and 4 T t d for attention, 2 T d V for the letters; the backward pass twice that."""
    batch, block, dim, layers = 8, 64, 128, 2
    letters = len(set("".join(topics.values())) | {"\n"})
    tokens = batch * block
    forward = layers * (24 * tokens * dim**2 + 4 * tokens * block * dim) + 2 * tokens * dim * letters
    device = {"platform": "tpu", "kind": "TPU v5 lite", "memory_bytes": 1 << 34, "steps": 2}
    (tmp_path / "device.json").write_text(json.dumps(device))
    args = ["--batch-size", str(batch), "--layers", str(layers), "--checkpoint", str(tmp_path / "c.pt")]
    python("", str(repo / "examples" / "charlm.py"), *args, OXITORCH_PREFLIGHT=str(tmp_path))
    capture = json.loads((tmp_path / "capture.json").read_text())
    (program,) = [p for p in capture["programs"] if [1, 1] in p["launches"]]
    assert {(p["dtype"], p["precision"]) for p in program["products"]} == {("float32", "HIGHEST")}
    assert sum(p["flops"] for p in program["products"]) == pytest.approx(3 * forward, rel=0.05)


def test_slices_that_nobody_knows_have_neighbours(preflight):
    report, done = preflight("train.py", "--slice", "v5litepod-7")
    assert report is None and done.returncode == 2
    assert "`v5litepod-7` is unknown" in done.stderr and "v5litepod-1" in done.stderr
    assert "--slice" in preflight("train.py")[1].stderr


def test_a_missing_compiler_is_named(python):
    # As where no plugin package is installed.
    code = """
import json, os, sys
from oxitorch import _cli, _core
os.environ["OXITORCH_CLI_FACTS"] = json.dumps({**_cli.facts(), "site_dirs": []})
sys.exit(_core.run_cli(["oxitorch", "preflight", "train.py", "--slice", "v5e-1"]))
"""
    done = python(code, check=False)
    assert done.returncode == 2 and "pip install libtpu" in done.stderr and "running" not in done.stderr


@pytest.mark.slow
def test_the_programs_are_those_of_a_run(python, script, tmp_path):
    def programs(folder):
        # What is captured says where each operation comes from besides.
        return {re.sub(r" loc\(#op\d+\)|(?m:^#op.*\n)", "", path.read_text()) for path in folder.glob("*.mlir")}

    absent, present = tmp_path / "absent", tmp_path / "present"
    absent.mkdir()
    device = {"platform": "cpu", "kind": "XLA:CPU", "memory_bytes": 1 << 34, "steps": 3}
    (absent / "device.json").write_text(json.dumps(device))
    python("", script(), OXITORCH_PREFLIGHT=str(absent))
    code = script("sys.exit()").replace(".py", "-run.py")
    with open(code, "w") as f:
        f.write((tmp_path / "train.py").read_text().replace("assert seen", "seen"))
    # The library is not called where programs are compiled ahead of time.
    python("", code, "3", OXITORCH_GRAPHS=str(present), OXITORCH_LIBRARY="0", OXITORCH_WINDOW_KEPT_BYTES=str(48 << 20))
    captured = programs(absent)
    (step,) = [path.read_text() for path in absent.glob("*.mlir") if "aten::addcdiv" in path.read_text()][:1]
    assert re.search(r'^#op\d+ = loc\("aten::addmm#\d+"\(".*train.py":11:0\)\)$', step, re.M)
    assert not any("loc(" in path.read_text() for path in present.glob("*.mlir"))
    assert len(captured) == 2 and captured <= programs(present)


def test_what_came_from_the_host_is_known(python, tmp_path):
    device = {"platform": "tpu", "kind": "TPU v5 lite", "memory_bytes": 1 << 34, "steps": 3, "reads_as": 2.0}
    (tmp_path / "device.json").write_text(json.dumps(device))
    code = """
import torch
x = torch.tensor([3, 4], device="tpu")
print(x.tolist(), (x + 1).tolist(), torch.ones(1, device="tpu", dtype=torch.bfloat16).item())
print(torch.tpu.get_device_name(), torch.tpu.mem_get_info()[1] == 1 << 34, torch.nonzero(x).shape[0])
torch.tpu.synchronize()
"""
    done = python(code, OXITORCH_PREFLIGHT=str(tmp_path))
    assert done.stdout == "[3, 4] [2, 2] 2.0\nTPU v5 lite (absent) True 2\n"
    capture = json.loads((tmp_path / "capture.json").read_text())
    assert capture["steps"] == 0 and sum(r["count"] for r in capture["reads"]) == 4
    assert {p["options"]["xla_allow_excess_precision"] for p in capture["programs"]} == {False}


@pytest.mark.usefixtures("libtpu")
def test_a_step_is_compiled_for_tpus(preflight, script):
    report, done = preflight(script(), "--slice", "v5e-1", "--slice", "trillium")
    assert done.returncode == 0, done.stderr
    # What was asked of the smaller memory is asked of the larger one as well.
    assert done.stderr.count("without a device") == 1
    for judged, kind in zip(report["slices"], ("TPU v5 lite", "TPU v6 lite"), strict=True):
        assert judged["verdict"] == "fits" and judged["device"] == kind
        step = judged["step"]
        assert step["product_flops"] == STEP_FLOPS and step["roofline_s"] > 0 and step["bound"] == "hbm"
        assert 0 < step["mfu_ceiling"] < 1 and all(p["memory_bytes"]["code"] > 0 for p in judged["programs"])
    limits = [judged["limit_bytes"] for judged in report["slices"]]
    assert limits[0] == pytest.approx(16.9e9, rel=1e-2) and limits[1] == pytest.approx(33.5e9, rel=1e-2)


@pytest.mark.slow
@pytest.mark.usefixtures("libtpu")
def test_a_script_that_asks_for_the_device_runs_for_each(preflight, tmp_path):
    path = tmp_path / "asks.py"
    path.write_text(
        "import torch\nx = torch.ones(8, device='tpu')\nprint(torch.tpu.get_device_name())\n(x + 1).sum().item()\n"
    )
    _, done = preflight(str(path), "--slice", "trillium", "--slice", "v5e-1")
    assert done.returncode == 0 and done.stderr.count("without a device") == 2, done.stderr
    assert "TPU v5 lite (absent)" in done.stderr and "TPU v6 lite (absent)" in done.stderr


@pytest.mark.usefixtures("libtpu")
def test_out_of_memory_on_a_tpu_is_a_verdict(preflight, tmp_path):
    big = tmp_path / "big.py"
    big.write_text("import torch\nx = torch.randn(1 << 16, 1 << 16, device='tpu')\nprint((x @ x.sin()).sum().item())\n")
    report, done = preflight(str(big), "--slice", "v5e-1", "--advice-minutes", "0")
    (judged,) = report["slices"]
    assert done.returncode == 1 and judged["verdict"] == "does_not_fit", done.stderr
    assert judged["need_bytes"] > 1.2 * judged["limit_bytes"] and "E1000" in judged["reason"]


LOOPS = """
import torch

lstm = torch.nn.LSTM(128, 128).to("tpu")
for length in (16, 64):
    with torch.no_grad():
        lstm(torch.randn(length, 8, 128).to("tpu"))[0].sum().item()
"""


def test_a_loop_counts_as_often_as_it_goes_round(preflight, tmp_path):
    """The compiler for TPUs counts one round."""
    script = tmp_path / "loops.py"
    script.write_text(LOOPS)
    report, done = preflight(str(script), "--slice", "v5e-1", "--effort", "fast")
    assert done.returncode == 0, done.stderr
    looped = [p["work"] for p in report["slices"][0]["programs"] if p["work"]["product_flops"] > 0]
    short, long = sorted(w["bytes_accessed"] for w in looped)
    weights = 4 * 128 * 128 * 4  # of a round, in bytes
    assert short > 16 * weights and 3 < long / short < 4, (short, long)
    assert all(w["flops"] >= w["product_flops"] for w in looped)
