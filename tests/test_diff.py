"""`oxitorch.diff`: what differs between two runs is found, and put down to what it comes of."""

import json
import subprocess
import sys
import zipfile
from itertools import pairwise

import oxitorch
import pytest
import torch
from oxitorch.diff import _text
from oxitorch.diff.__main__ import main
from oxitorch.diff._report import Report
from oxitorch.diff._trace import Trace
from torch import nn

# A process of its own, as it gives the device a wrong kernel.
FAULT = """
import sys
import torch, oxitorch
from torch import nn

class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x):
        x = self.first(x)
        x = nn.functional.gelu(x)  # the wrong one
        return nn.functional.dropout(self.last(x), 0.5)

def quick_gelu(x, approximate="none"):
    return torch.sigmoid(1.702 * x) * x

torch.manual_seed(0)
model, x = MLP(), torch.randn(4, 16)
print(oxitorch.diff(model, (x,)).to_json())
print("----")
print(oxitorch.diff(lambda x: x.topk(2), (torch.tensor([1.0, 3.0, 3.0, 3.0, 0.0]),)).to_json())
print("----")
library = torch.library.Library("aten", "IMPL")
library.impl("gelu", quick_gelu, "PrivateUse1")
report = oxitorch.diff(model, (x,), keep=sys.argv[1])
print(report.to_json())
print("----")
print(report.html())
"""


# Wrong kernels of the device: rounding does not explain one of them.
FAULTS = """
import torch, oxitorch
from torch import nn

aten = torch.ops.aten

def layer_norm(x, n, w, b, eps):  # another eps
    return tuple(t.to(x.device) for t in aten.native_layer_norm(x.cpu(), n, w.cpu(), b.cpu(), 1e-6))

def attention_backward(*args, **kwargs):  # nothing
    return (*(torch.zeros_like(t) for t in args[1:4]), None)

def total(x, dim, keepdim=False, *, dtype=None):  # an element is left out
    x = x.cpu().clone()
    x.view(-1)[-1] = 0
    return x.sum(dim, keepdim).to("tpu")

torch.manual_seed(0)
x, q = torch.rand(8, 256), torch.randn(1, 2, 8, 16, requires_grad=True)
for name, kernel, fn, args in [
    ("native_layer_norm", layer_norm, nn.LayerNorm(256), (x * 0.1,)),
    ("sum.dim_IntList", total, lambda x: x.sum(-1), (x,)),
    ("_log_softmax", lambda x, d, h: aten._softmax(x.cpu(), d, h).log().to("tpu"),
        lambda x: (200 * x).log_softmax(-1), (x,)),
    ("_scaled_dot_product_fused_attention_overrideable_backward", attention_backward,
        nn.functional.scaled_dot_product_attention, (q, q, q)),
]:
    library = torch.library.Library("aten", "IMPL")
    library.impl(name, kernel, "PrivateUse1")
    report = oxitorch.diff(fn, args, backward=args[0].requires_grad)
    library._destroy()
    print(name.split(".")[0], *sorted({(f["op"].split(".")[1], f["verdict"]) for f in report.findings}))
"""


@pytest.fixture(scope="module")
def fault(python, tmp_path_factory):
    """Reports without and with the wrong kernel, and of a tie; the page of the second, and where its runs are."""
    folder = tmp_path_factory.mktemp("kept")
    file = folder / "mlp.py"
    file.write_text(FAULT)
    code = f"import sys, runpy; sys.argv = ['mlp.py', {str(folder)!r}]; runpy.run_path({str(file)!r})"
    right, tie, wrong, page = python(code, OXITORCH_PLATFORM="cpu").stdout.split("----\n")
    return json.loads(right), json.loads(wrong), json.loads(tie), page, folder


def explained(report: dict) -> bool:
    return not any(report["counts"][v] for v in ("unknown", "random", "arguments", "defect"))


def test_rounding_is_no_finding(fault):
    right, *_ = fault
    assert explained(right) and right["counts"]["carried"] > 0
    # Dropout too: both runs dropped the same elements.
    assert all(m["relative"] < 1e-5 for m in right["modules"])
    assert {m["name"] for m in right["modules"]} == {"MLP", "MLP.first", "MLP.last"}
    assert {g["name"] for g in right["gradients"]} == {
        f"MLP.{layer}.{p}" for layer in ("first", "last") for p in ("weight", "bias")
    }


def test_a_wrong_operation_is_found_with_its_line(fault):
    _, wrong, *_, folder = fault
    (found,) = wrong["findings"]
    assert (found["verdict"], found["side"], found["op"]) == ("defect", "b", "aten.gelu.default")
    line = 1 + FAULT.splitlines().index("        x = nn.functional.gelu(x)  # the wrong one")
    assert found["lines"] == {"a": f"{folder}/mlp.py:{line}", "b": f"{folder}/mlp.py:{line}"}
    assert (found["module"], found["phase"], found["step"]) == ("MLP", "forward", 0)
    assert found["alone"] == "by itself, with the same inputs, it is wrong too: the operation has the defect"
    worst = found["worst"]
    assert worst["error"] == pytest.approx(abs(worst["got"] - worst["want"])) and worst["ratio"] > 1000
    assert [x["shape"] for x in found["inputs"]] == [[4, 32]]
    finding = {m["name"]: m["finding"] for m in wrong["modules"]}
    assert finding == {"MLP.first": None, "MLP.last": None, "MLP": "defect"}


def test_what_rounding_does_not_explain_is_found(python):
    found = python(FAULTS, OXITORCH_PLATFORM="cpu").stdout.splitlines()
    # The CPU has no kernel for the last: the derivative of its attention judges it.
    attention = "_scaled_dot_product_fused_attention_overrideable_backward"
    wrong = ["native_layer_norm", "sum", "_log_softmax", attention]
    assert found == [f"{op} ('{op}', 'defect')" for op in wrong]


def test_files_say_the_same_without_the_device(fault):
    *_, folder = fault
    report = oxitorch.diff(None, a=folder / "a.trace", b=folder / "b.trace")
    (found,) = report.defects
    assert (found["op"], found["side"], report.status) == ("aten.gelu.default", "b", 1)


def test_the_page_escapes_what_it_is_given(fault):
    _, wrong, _, page, _ = fault
    assert page.startswith("<!doctype html>") and "aten.gelu is wrong on b (tpu)" in page and "--paper" in page
    wrong["findings"][0]["module"] = "<script>"
    page = Report(wrong).html()
    assert "<script>" not in page and "in &lt;script&gt;" in page


def compared(fn, *args, b="cpu", **options) -> dict:
    """Both on the CPU; the second in float64, or as `b` says."""
    return oxitorch.diff(fn, args, a="cpu", b=b, **options).to_dict()


def test_equal_runs_have_equal_bits():
    report = compared(nn.Linear(3, 2), torch.ones(1, 3))
    assert report["first"] is None and sum(report["counts"].values()) == report["counts"]["same"] > 0


def test_other_elements_of_the_same_size_are_a_tie(fault):
    (found,) = fault[2]["findings"]
    assert (found["verdict"], found["op"]) == ("tie", "aten.topk.default")
    assert found["reason"] == "the elements that were chosen are equal"


def test_elements_that_are_nearly_equal_are_a_tie():
    weight = torch.eye(2)
    report = compared(lambda x: (x @ weight).argmax(-1), torch.tensor([[1.0, 1.001]]), b="cpu:bfloat16")
    (found,) = report["findings"]
    assert (found["verdict"], found["op"]) == ("tie", "aten.argmax.default")
    assert found["reason"].startswith("the elements that were chosen are 0.001 apart")


@pytest.mark.parametrize(
    "function, kind, op",
    [
        (lambda x: (x - 2).log(), "nan", "aten.log.default"),
        (lambda x: 1 / (x - x), "inf", "aten.reciprocal.default"),
        (lambda x: x.masked_fill(x > 0, -torch.inf).softmax(0), "nan", "aten._softmax.default"),
        (lambda x: torch.cat([x.masked_fill(x > 2, -torch.inf), x]).softmax(0), None, None),
    ],
)
def test_the_first_operation_that_makes_no_numbers(function, kind, op):
    found = compared(function, torch.ones(3))["not_finite"]["b"]
    assert {k: f["op"] for k, f in found.items() if f} == ({kind: op} if kind else {})


TRAIN = """
import sys
import torch
from torch import nn

model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to("cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[1]))
for step in range(9):
    x = torch.randn(8, 4, device="cuda")
    loss = model(x).square().mean()
    if step == 2:
        loss = loss + (loss.detach() - 1e9).log()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("not reached")
"""


def command(*argv: str, environment, cwd) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "oxitorch", "diff", *argv],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment(OXITORCH_PLATFORM="cpu"),
        cwd=cwd,
    )


def test_a_script_is_recorded_step_by_step(tmp_path, environment):
    """One process on the CPU: the first step op by op, of the others the losses; compared with itself."""
    (tmp_path / "train.py").write_text(TRAIN)
    done = command("train.py", "{0.1|none}", "--a=cpu", "--record=a.trace", environment=environment, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert "not reached" not in done.stderr
    report = oxitorch.diff(None, a=tmp_path / "a.trace", b=tmp_path / "a.trace").to_dict()
    assert [s["step"] for s in report["steps"]] == [0, 1, 2]
    assert [s["finite"]["a"] for s in report["steps"]] == [True, True, False]
    assert all(s["loss_a"] == s["loss_b"] for s in report["steps"][:2])
    ops = Trace(tmp_path / "a.trace").ops
    phases = {(op["phase"], op["step"]) for op in ops if "draws" not in op}
    assert phases == {(phase, 0) for phase in ("forward", "backward", "optimizer")}


@pytest.mark.slow
def test_a_script_on_two_platforms(tmp_path, environment):
    (tmp_path / "train.py").write_text(TRAIN)
    options = ("--a", "cpu", "--b", "tpu", "--json", "x.json", "--html", "x.html", "--steps", "4")
    done = command("train.py", "0.1", *options, environment=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "x.json").read_text())
    assert explained(report) and report["counts"]["carried"] > 0
    # The step that makes NaN is recorded a second time, op by op.
    found = report["not_finite"]["b"]["nan"]
    assert (found["op"], found["step"], found["phase"]) == ("aten.log.default", 2, "forward")
    assert found["line"].endswith("train.py:12")
    assert "NaN or Inf from step 2 on" in done.stdout
    assert "</html>" in (tmp_path / "x.html").read_text()


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--a", "npu", "x.py"], "unknown platform 'npu'"),
        (["--a", "cpu:strict", "x.py"], "eager modes are of the device tpu alone"),
        (["--b", "tpu:fast", "x.py"], "unknown option 'fast'"),
        (["--a", "none.trace", "x.py"], "there is no file none.trace"),
        ([], "there is no script to run for --a cpu and --b tpu"),
        (["--steps", "0", "x.py"], "at least one step"),
        (["--a", "bad.trace", "--b", "bad.trace"], "is no recorded run"),
    ],
)
def test_what_is_wrong_with_the_arguments_is_said(argv, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.trace").write_text("text")
    assert main(argv) == 2
    assert message in capsys.readouterr().err


def test_a_file_that_does_not_fit_together_is_an_error(tmp_path):
    compared(torch.sin, torch.ones(3), keep=tmp_path)
    with zipfile.ZipFile(tmp_path / "a.trace") as z:
        text = json.loads(z.read("trace.json"))
        rest = {n: z.read(n) for n in z.namelist() if n != "trace.json"}

    def broken(change):
        other = json.loads(json.dumps(text))
        change(other)
        with zipfile.ZipFile(tmp_path / "broken.trace", "w") as z:
            z.writestr("trace.json", json.dumps(other))
            for name, data in rest.items():
                z.writestr(name, data)
        with pytest.raises(ValueError, match=r"broken\.trace is") as e:
            Trace(tmp_path / "broken.trace")
        return str(e.value)

    assert "another version" in broken(lambda t: t.update(version=0))
    assert "'ops'" in broken(lambda t: t.pop("ops"))
    assert "not there" in broken(lambda t: t["ops"][0].update(results=[99]))
    assert "not there" in broken(lambda t: t["values"][0].update(digest="0"))
    assert "op without line" in broken(lambda t: t["ops"][0].pop("line"))


def test_dtypes_are_compared_by_the_coarser():
    report = compared(nn.Sequential(nn.Linear(8, 8), nn.GELU()), torch.randn(4, 8), b="cpu:float64")
    assert explained(report) and report["counts"]["defect"] == 0
    report = compared(nn.Linear(8, 8), torch.randn(4, 8), b="cpu:bfloat16")
    assert explained(report)


def test_attention_with_dropout_is_compared():
    """A kernel of attention draws for itself, which is no defect; both runs are given operations that can share."""

    def attention(q, k, v):
        return nn.functional.dropout(nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.5), 0.5)

    q = torch.randn(2, 2, 8, 4, requires_grad=True)
    report = compared(attention, q, q, q, b="tpu", backward=True)
    assert explained(report)


def test_attention_backward_has_a_referee():
    q = torch.randn(2, 2, 8, 4, requires_grad=True)
    report = compared(nn.functional.scaled_dot_product_attention, q, q, q, b="tpu", backward=True)
    assert explained(report)
    assert report["unpaired"]["b"] == 2  # forward and backward


def test_what_makes_a_tensor_of_numbers_has_a_referee():
    def ranges(x):
        return x + torch.zeros(3, device=x.device) + (torch.arange(3, device=x.device) if x.is_cpu else 0)

    assert explained(compared(ranges, torch.ones(3), b="tpu"))


def test_two_versions_part_where_they_were_called_otherwise(tmp_path):
    """Each call is right for its own arguments, which is no rounding."""

    def causal(diagonal):
        return lambda x: x.tril(diagonal).sum() * (1 + 1e-6 * diagonal)

    for i in range(2):
        compared(causal(i), torch.ones(4, 4), keep=tmp_path / str(i))
    report = oxitorch.diff(None, a=tmp_path / "0/a.trace", b=tmp_path / "1/a.trace")
    found = report.to_dict()["findings"]
    assert [(f["verdict"], f["op"]) for f in found] == [("arguments", "aten.tril.default")]
    assert found[0]["reason"] == "`diagonal` is 0 in a and 1 in b" and report.status == 1
    assert "aten.tril was called with other arguments" in report.text()


@pytest.mark.parametrize(
    ("steps", "bad", "told"),
    [
        (12, None, [*range(12)]),
        (60, None, [*range(11), 59]),
        (60, 37, [0, 1, 2, *range(34, 42), 59]),
        (60, 1, [*range(6), 59]),
        (60, 59, [0, 1, 2, *range(56, 60)]),
    ],
)
def test_of_many_steps_those_are_told_that_say_something(steps, bad, told):
    rows = [
        {"step": i, "loss_a": 1.0, "loss_b": 1.0, "parted": False, "finite": {"a": i != bad, "b": True}}
        for i in range(steps)
    ]
    assert [r["step"] for r in _text.told(rows)] == told
    lines = _text._steps({"steps": rows, "parted": None})
    gaps = sum(b - a > 1 for a, b in pairwise(told))
    assert lines.count("  ...") == gaps and sum("a has NaN or Inf" in line for line in lines) == (bad is not None)
