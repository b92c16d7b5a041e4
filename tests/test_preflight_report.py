"""`oxitorch preflight`: why programs are new, what padding and held values cost, prices, and the page."""

import json

import pytest

SCRIPT = """
import torch

model = torch.nn.Linear(64, 50).to("tpu")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
state = torch.zeros(64, 64, device="tpu")
for step in range(4):
    x = torch.ones(8 if step == 1 else 16, 64).to("tpu")
    wide = torch.ones(100, 100, device="tpu")
    torch.tpu.synchronize()
    old = state
    state = old + 1
    total = wide.sum()
    del wide
    loss = model(x).square().mean() + total
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_capture_knows_why_what_is_multiplied_and_what_was_not_overwritten(python, tmp_path):
    device = {"platform": "tpu", "kind": "TPU v5 lite", "memory_bytes": 1 << 34, "steps": 4}
    (tmp_path / "device.json").write_text(json.dumps(device))
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    python("", str(script), OXITORCH_PREFLIGHT=str(tmp_path))
    programs = json.loads((tmp_path / "capture.json").read_text())["programs"]
    assert [p["why"]["number"] for p in programs] == list(range(1, len(programs) + 1))
    assert programs[0]["why"]["cause"] == "first" and programs[0]["why"]["nearest"] is None

    # The program of the first, third and fourth step, and that of the second, in which a size is another.
    (usual,) = [p for p in programs if [3, 1] in p["launches"] and p["products"]]
    (other,) = [p for p in programs if p["launches"] == [[1, 1]] and p["products"]]
    assert other["why"]["cause"] == "size" and "drop_last" in other["why"]["hint"]
    assert "float32[8, 64], was float32[16, 64]" in other["why"]["differences"][0]
    assert "train.py:15" in other["why"]["differences"][0]

    products = {(p["m"], p["n"], p["k"]): p for p in usual["products"]}
    forward, backward = products[16, 50, 64], products[50, 64, 16]
    assert forward["flops"] == backward["flops"] == 2 * 16 * 50 * 64 and forward["count"] == 1
    assert "train.py:15" in forward["line"] and forward["op"] == "addmm"

    found = {u["type"]: u for u in usual["undonated"]}
    # A variable holds the old state though a result has its size; nothing has the size of the wide one.
    assert found["float32[64, 64]"]["reason"] == "held" and "train.py:12" in found["float32[64, 64]"]["line"]
    assert found["float32[100, 100]"]["reason"] == "size" and "train.py:9" in found["float32[100, 100]"]["line"]
    assert found["float32[100, 100]"]["bytes"] == 40000


def test_prices_that_cannot_be_read_are_named(python, tmp_path):
    prices = tmp_path / "prices.toml"
    prices.write_text("[v9]\nusd_per_chip_hour = 1\n")
    args = ["-m", "oxitorch", "preflight", "train.py", "--slice", "cpu", "--prices", str(prices)]
    done = python("", *args, check=False)
    assert done.returncode == 2 and "`v9`" in done.stderr and "v5e" in done.stderr and "running" not in done.stderr


@pytest.mark.usefixtures("libtpu")
def test_slices_are_compared_by_what_a_step_costs(python, tmp_path):
    script, report, prices = tmp_path / "<script>.py", tmp_path / "report.json", tmp_path / "prices.toml"
    script.write_text(SCRIPT)
    prices.write_text("[v5e]\nusd_per_chip_hour = 1000\n")
    page = tmp_path / "page.html"
    args = ["--json", str(report), "--html", str(page), "--prices", str(prices), "--run-steps", "1000"]
    args += ["--slice", "v5e-1", "--slice", "v6e-4", str(script)]
    done = python("", "-m", "oxitorch", "preflight", *args, timeout=600)
    v5e, v6e = json.loads(report.read_text())["slices"]
    assert (v5e["rank"], v6e["rank"]) == (2, 1) and done.stdout.rindex("v6e-4") < done.stdout.rindex("v5e-1")
    assert (v5e["price"]["usd_per_hour"], v5e["price"]["source"]) == (1000, "file")
    assert v6e["price"]["usd_per_hour"] == 4 * v6e["price"]["usd_per_chip_hour"] and v6e["price"]["source"] == "list"
    for judged in (v5e, v6e):
        price, seconds = judged["price"], judged["step"]["roofline_s"]
        assert price["usd_per_step"] == pytest.approx(price["usd_per_hour"] * seconds / 3600)
        assert price["usd_per_run"] == pytest.approx(1000 * price["usd_per_step"])
        padding = judged["padding"]
        assert 0 < padding["share"] < 1 and padding["mxu_s"] > judged["step"]["mxu_s"]
        assert padding["tensor_padded_bytes"] > padding["tensor_bytes"]
        assert all(0 < p["useful"] < 1 and p["advice"] for p in padding["products"])
    assert (v5e["padding"]["unit"], v6e["padding"]["unit"]) == (128, 256)
    assert "for 1000 steps" in done.stdout and "padding" in done.stdout
    told = page.read_text()
    assert told.index("Slices side by side") < told.index(">v6e-4<") < told.index(">v5e-1<")
    parts = ("It fits, with", "Memory of a chip", "roofline", "Programs", "Padding in the matrix unit")
    for words in (*parts, "a chip, --prices"):
        assert words in told
    assert "<script" not in told and "script&#62;.py:15" in told.replace("&gt;", "&#62;")
    # The rule for tiles gives what the compiler says.
    memories = [p["memory_bytes"] for p in v5e["programs"] if p["launches_in_last_step"]]
    taken = sum(m["arguments"] + m["outputs"] - m["aliased"] for m in memories)
    assert v5e["padding"]["tensor_padded_bytes"] == pytest.approx(taken, rel=0.02)
