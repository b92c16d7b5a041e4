"""`oxitorch.preflight(fn, args)`: functions, modules and compiled functions, on a device that is not there."""

import json

import pytest

BEGIN = """
import oxitorch, torch, torch.nn as nn
model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
optimizer = torch.optim.AdamW(model.parameters())

def train(x):
    model.to("tpu")
    loss = model(x.to("tpu")).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    optimizer.step()  # a call is a step, whatever optimizers do

def told(report):
    (judged,) = report.slices
    step = judged.step
    print(report.fits, judged.steps_captured, step.launches, step.product_flops, len(judged.host_reads))
"""
# See tests/test_preflight.py.
STEP_FLOPS = 2 * 16 * 32 * 32 * (2 + 2 + 1)


def run(python, code: str, check: bool = True, **env):
    return python(BEGIN + code, check=check, timeout=600, **env)


@pytest.mark.slow
def test_functions_modules_and_compiled_functions_in_one_process(python, tmp_path):
    # A socket's address has 107 bytes at most.
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    done = run(
        python,
        """
report = oxitorch.preflight(train, (torch.randn(16, 32),), slice="cpu")
told(report)
assert report.ok and "fits" in report.text() and report.script == ["train"]
import json
assert json.loads(report.to_json()) == report.to_dict() and report.to_dict()["slices"][0]["verdict"] == "fits"
# A module is moved with its arguments, and one on meta as well.
told(oxitorch.preflight(torch.compile(model), (torch.randn(16, 32),), slice="cpu", progress=False))
with torch.device("meta"):
    other, x = nn.Linear(32, 32), torch.empty(16, 32)
told(oxitorch.preflight(lambda m, x: m(x).sum().item(), [other, x], slice="cpu", budget="syncs=0", progress=False))
# Nothing has happened here.
assert {p.device.type for p in model.parameters()} == {"cpu"} and not optimizer.state
assert not oxitorch._core.is_started()
""",
        TMPDIR=str(folder),
    )
    forward = 2 * 16 * 32 * 32
    assert done.stdout.splitlines() == [
        f"True 3 2 {float(STEP_FLOPS)} 0",
        f"True 3 1 {float(2 * forward)} 0",
        f"True 3 1 {float(forward)} 1",
    ]
    # Only the first says what goes on.
    assert done.stderr.count("running the function without a device, 3 steps") == 1


def test_a_process_that_uses_the_device_spawns_a_child(python, tmp_path):
    (tmp_path / "steps.py").write_text(
        "import torch\ndef double(x):\n    assert 'absent' in torch.tpu.get_device_name()\n    return x @ x\n"
    )
    done = run(
        python,
        f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import steps
x = torch.ones(8, 8, device="tpu") + 1
told(oxitorch.preflight(steps.double, (x,), slice="cpu", steps=2))
try:
    oxitorch.preflight(lambda: x, slice="cpu")
except RuntimeError as e:
    print(str(e).splitlines()[1])
""",
    )
    first, second = done.stdout.splitlines()
    assert first == f"True 2 1 {float(2 * 8**3)} 0" and "cannot be pickled" in second


def test_errors_are_those_of_the_function(python):
    done = run(
        python,
        """
def fails():
    raise KeyError("no such weight")

for call in (lambda: oxitorch.preflight(fails, slice="cpu"), lambda: oxitorch.preflight(train, slice="v5e-3")):
    try:
        call()
    except (RuntimeError, ValueError) as e:
        print(type(e).__name__, str(e).replace("\\n", " "))
""",
    )
    failed, unknown = done.stdout.splitlines()
    assert failed.startswith("RuntimeError") and "KeyError: 'no such weight'" in failed
    assert unknown.startswith("ValueError slice `v5e-3` is unknown")


@pytest.mark.slow
def test_a_loop_without_an_optimizer_marks_its_steps(python, tmp_path):
    script, report = tmp_path / "predict.py", tmp_path / "report.json"
    script.write_text(
        "import oxitorch, torch\nmodel = torch.compile(torch.nn.Linear(32, 32).to('tpu'))\n"
        "with torch.no_grad():\n    while True:\n        model(torch.ones(16, 32).to('tpu')).cpu()\n"
        "        oxitorch.preflight.step()\n"
    )
    python("", "-m", "oxitorch", "preflight", "--json", str(report), "--slice", "cpu", str(script), timeout=300)
    (judged,) = json.loads(report.read_text())["slices"]
    assert (judged["steps_captured"], judged["step"]["product_flops"]) == (3, 2 * 16 * 32 * 32)
    assert [r["count"] for r in judged["host_reads"]] == [1]


@pytest.mark.parametrize("line", ["oxitorch.preflight.step()", "print(oxitorch.preflight.batch(32))"])
def test_marks_mean_nothing_in_other_runs(python, line):
    done = python(f"import sys, oxitorch\n{line}\nassert 'torch' not in sys.modules", fresh=True)
    assert done.stdout in ("", "32\n")


DYNAMIC = """
import torch.nn.functional as F

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.norm, self.qkv = nn.Embedding(100, 32), nn.LayerNorm(32), nn.Linear(32, 96)
        self.conv = nn.Conv1d(32, 32, 3, padding=1)

    def forward(self, tokens):
        x = self.norm(self.token(tokens))
        x = x + self.conv(x.transpose(1, 2)).transpose(1, 2)
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, dim=-1)
        return F.scaled_dot_product_attention(q, k, v).squeeze(1) @ self.token.weight.T

net = Model()
optimizer = torch.optim.AdamW(net.parameters())

def step(tokens, labels):
    net.to("tpu")
    loss = F.cross_entropy(net(tokens.to("tpu")).flatten(0, 1), labels.to("tpu").flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()

size = torch.tpu.Dim(max=64)
dynamic = {"tokens": {1: size}, "labels": {1: size}}

def show(fn, length, **options):
    report = oxitorch.preflight(fn, [torch.zeros(4, length, dtype=torch.int64)] * 2, progress=False, **options)
    for s in report.slices:
        print(s.slice, s.verdict, s.steps_captured, s.step.launches, s.step.product_flops, len(s.host_reads))
"""


def test_a_step_of_many_sizes_is_a_program_of_the_bound(python):
    """Also where its first call makes the state of the optimizer."""
    done = run(
        python,
        """
step = torch.tpu.jit(train, dynamic={"x": {0: torch.tpu.Dim(max=64)}})
told(oxitorch.preflight(step, (torch.randn(37, 32),), slice="cpu", progress=False))
""",
    )
    assert done.stdout.split() == ["True", "3", "1", str(float(4 * STEP_FLOPS)), "0"]


@pytest.mark.slow
def test_one_program_for_many_sizes_compiles_for_tpus_and_gpus(python, libtpu, cuda_plugin):
    done = run(
        python,
        DYNAMIC
        + """
slices = ["v5e-1", "cuda:h200"]
show(step, 37, slice=slices, dynamic=dynamic)
show(step, 64, slice=slices)
show(torch.tpu.jit(step, dynamic=dynamic), 50, slice="cpu")
try:
    oxitorch.preflight(torch.tpu.jit(step), slice="cpu", dynamic=dynamic)
except TypeError as e:
    print(e)
""",
    )
    *shown, refused = done.stdout.splitlines()
    varying, exact = shown[:2], shown[2:4]
    # The products of the bound, on devices that are not there.
    assert varying == exact and all(" fits 3 1 " in line and line.endswith(" 0") for line in shown), shown
    assert shown[4].split()[4] == exact[0].split()[4]
    assert refused == "preflight: dynamic is for a function; give it to torch.tpu.jit, which this one is of already"
