"""`oxitorch preflight --slice cuda:...`: compiled for NVIDIA GPUs that are not there."""

import json
import os
import subprocess

import pytest

# Two layers of 64 on batches of 16: a product for each in the forward pass, and in the backward one for each weight and
# one for the input of the second layer.
STEP_FLOPS = 2 * 16 * 64 * 64 * (2 + 2 + 1)
PARAMETERS = 2 * (64 * 64 + 64)

SCRIPT = """
import torch
import torch.nn as nn

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).to("tpu")
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(9):
    loss = model(torch.randn(16, 64).to("tpu")).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.fixture(scope="module")
def preflight(python, tmp_path_factory):
    """Runs the command on a script; its report, its page and the finished process."""

    def run(script, *args):
        folder = tmp_path_factory.mktemp("preflight")
        train, file, page = (folder / name for name in ("train.py", "report.json", "report.html"))
        train.write_text(script)
        argv = ["-m", "oxitorch", "preflight", "--json", str(file), "--html", str(page), *args, str(train)]
        done = python("", *argv, check=False, timeout=600)
        return (json.loads(file.read_text()), page.read_text(), done) if file.exists() else (None, None, done)

    return run


@pytest.fixture(scope="module")
def judged(preflight, cuda_plugin):
    """The slices of a report, its text, and its page."""
    slices = [f"--slice=cuda:{name}" for name in ("h200", "l4", "h100-8")]
    report, page, done = preflight(SCRIPT, *slices, "--parallel=dp", "--steps=1")
    assert done.returncode == 0, done.stderr
    return {s["slice"]: s for s in report["slices"]}, done.stdout, page


def test_a_step_is_compiled_for_gpus(judged):
    slices, text, page = judged
    for name, kind, memory in (("cuda:h200", "NVIDIA H200", 150e9), ("cuda:l4", "NVIDIA L4", 23.7e9)):
        found = slices[name]
        assert (found["verdict"], found["platform"], found["device"]) == ("fits", "cuda", kind)
        assert "cuda" in found["compiler"] and found["limit_bytes"] == pytest.approx(0.75 * memory, rel=1e-2)
        step = found["step"]
        assert step["product_flops"] == STEP_FLOPS < step["flops"] < 1.5 * STEP_FLOPS
        # Each parameter is read and written, and its gradient written.
        assert 3 * 4 * PARAMETERS < step["bytes_accessed"] < 30 * 4 * PARAMETERS
        assert step["bound"] == "hbm" and 0 < step["mfu_ceiling"] < 1 and found["padding"] is None
        (program,) = found["programs"]
        sizes = program["memory_bytes"]
        assert sizes["arguments"] >= 4 * PARAMETERS == sizes["aliased"]
        assert any(b["name"] == "0.weight" for b in program["buffers_at_peak"])
        assert kind in page
    # At the rate of float32, without TF32.
    assert slices["cuda:h200"]["step"]["mxu_s"] == pytest.approx(STEP_FLOPS / 67e12)
    assert "three quarters of the GPU's 139.8 GiB" in text and "three quarters of the GPU" in page
    assert "matrix unit" not in text + page


def test_a_step_is_split_over_the_gpus_of_a_box(judged):
    found = judged[0]["cuda:h100-8"]
    assert (found["chips"], found["chips_used"]) == (8, 8)
    sent = {c["kind"]: c["bytes"] for c in found["step"]["collectives"]}
    # The gradients, and whatever goes with them.
    assert sent.keys() == {"all-reduce"} and 4 * PARAMETERS <= sent["all-reduce"] < 4.5 * PARAMETERS
    assert found["step"]["ici_s"] == pytest.approx(2 * 7 / 8 * sent["all-reduce"] / 450e9)
    assert found["step"]["product_flops"] == STEP_FLOPS / 8


@pytest.mark.usefixtures("cuda_plugin")
def test_what_is_too_large_for_a_gpu_is_known_without_an_error(preflight):
    script = """
import torch
x = torch.randn(1 << 17, 1 << 10, device="tpu", dtype=torch.bfloat16)
print((x @ x.sin().T).sum().item())
"""
    report, _, done = preflight(script, "--slice", "cuda:rtx4090")
    (found,) = report["slices"]
    assert done.returncode == 1 and found["verdict"] == "does_not_fit" and found["reason"] is None, done.stderr
    # The product alone has 32 GiB, and a program has 17.6.
    assert found["need_bytes"] > found["limit_bytes"] > 18e9
    # It is in memory as what it is rounded to.
    types = {b["type"] for p in found["programs"] for b in p["buffers_at_peak"]}
    assert "bfloat16[131072, 131072]" in types and "float32[131072, 131072]" not in types


def test_a_missing_compiler_is_named(python):
    # As where no plugin package is installed.
    code = """
import json, os, sys
from oxitorch import _cli, _core
os.environ["OXITORCH_CLI_FACTS"] = json.dumps({**_cli.facts(), "site_dirs": []})
sys.exit(_core.run_cli(["oxitorch", "preflight", "train.py", "--slice", "cuda:h200"]))
"""
    done = python(code, check=False)
    assert done.returncode == 2 and "pip install jax-cuda13-pjrt" in done.stderr and "running" not in done.stderr


def test_a_plugin_that_aborts_ends_only_its_process(python, tmp_path):
    # A library that knows the flags and ends the process while it is loaded, and files to take for ptxas and libdevice.
    source = tmp_path / "bad.c"
    flags = "xla_dump_to", "xla_dump_hlo_as_text", "xla_gpu_cuda_data_dir"
    source.write_text(
        "#include <stdlib.h>\n__attribute__((constructor)) static void f(void) { abort(); }\n"
        f"const char *const flags[] = {{{', '.join(map(json.dumps, flags))}}};\n"
    )
    cuda = tmp_path / "nvidia" / "cu13"
    for file in ("bin/ptxas", "nvvm/libdevice/libdevice.10.bc"):
        (cuda / file).parent.mkdir(parents=True)
        (cuda / file).touch()
    plugin = tmp_path / "jax_plugins" / "xla_cuda13"
    plugin.mkdir(parents=True)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", plugin / "xla_cuda_plugin.so", source], check=True)
    script = tmp_path / "train.py"
    script.write_text("import torch\nprint((torch.ones(2, device='tpu') + 1).sum().item())\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    argv = ["-m", "oxitorch", "preflight", str(script), "--slice", "cuda:h200"]
    done = python("", *argv, check=False, PYTHONPATH=path, XLA_FLAGS=None)
    assert done.returncode == 2, done.stderr
    assert "? could not tell" in done.stdout and "the compiler's process ended (signal: 6" in done.stdout


def test_gpus_that_nobody_knows_have_neighbours(python):
    done = python("", "-m", "oxitorch", "preflight", "train.py", "--slice", "h200", check=False)
    assert done.returncode == 2 and "the nearest names are cuda:h200," in done.stderr
