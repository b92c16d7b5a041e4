"""`oxitorch preflight --budget`: limits that a step keeps, or not."""

import json

SCRIPT = """
import torch
model = torch.nn.Linear(32, 32).to("tpu")
optimizer = torch.optim.AdamW(model.parameters())
while True:
    model(torch.ones(16, 32).to("tpu")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.ones(1, device="tpu").item()
"""


def test_a_limit_that_is_not_kept_has_status_1(python, tmp_path):
    script, report = tmp_path / "train.py", tmp_path / "report.json"
    script.write_text(SCRIPT)
    args = ["--json", str(report), "--slice", "cpu", "--budget", "hbm=50%,graphs=4,fallbacks=0", "--budget", "syncs=0"]
    done = python("", "-m", "oxitorch", "preflight", *args, str(script), check=False, timeout=300)
    assert done.returncode == 1, done.stderr
    (judged,) = json.loads(report.read_text())["slices"]
    held = {h["name"]: (h["limit"], h["value"], h["ok"]) for h in judged["budget"]}
    assert judged["verdict"] == "fits" and list(held) == ["hbm", "graphs", "fallbacks", "syncs"]
    assert held["hbm"] == (judged["limit_bytes"] // 2, judged["need_bytes"], True)
    assert held["graphs"] == (4, len({p["id"] for p in judged["programs"]}), True)
    assert held["fallbacks"] == (0, 0, True) and held["syncs"] == (0, 1, False)
    assert "✗ syncs" in done.stdout and "✓ graphs" in done.stdout


def test_limits_that_nobody_knows_are_named(python):
    args = ["-m", "oxitorch", "preflight", "train.py", "--slice", "cpu", "--budget", "sync=0"]
    done = python("", *args, check=False)
    assert done.returncode == 2 and "`sync`" in done.stderr and "syncs" in done.stderr and "running" not in done.stderr
