"""`oxitorch preflight` of scripts that use `torch.distributed`: rank 0 of several processes, of which no other runs."""

import json

import pytest

WIDTH, LAYERS, PROCESSES = 64, 3, 4
PARAMETERS = LAYERS * (WIDTH * WIDTH + WIDTH)

TRAIN = """
import os
import torch
import torch.distributed as dist
import torch.nn as nn

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
torch.tpu.set_device(int(os.environ["LOCAL_RANK"]))
model = nn.Sequential(*(nn.Linear({width}, {width}) for _ in range({layers}))).to("tpu")
{wrap}
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(9):
    loss = model(torch.randn(8, {width}).to("tpu")).square().mean()
    optimizer.zero_grad()
    loss.backward()
    {ranks}
    optimizer.step()
"""
DDP = "model = nn.parallel.DistributedDataParallel(model)"
FSDP = """
from torch.distributed.fsdp import fully_shard
for layer in model:
    fully_shard(layer)
fully_shard(model)
"""
# What scripts do with ranks: only one saves, all say what they have, and nobody goes on before all are there.
RANKS = """
    said = [None] * size
    dist.all_gather_object(said, {"rank": rank, "step": step})
    assert said == [{"rank": 0, "step": step}] * size, said
    count = torch.tensor(3).to("tpu")
    dist.all_reduce(count)
    assert count.item() == 3 * size, count
    if rank == 0:
        torch.save(model.state_dict(), os.devnull)
        print("saved in step", step)
    words = [step]
    dist.broadcast_object_list(words, src=0)
    assert words == [step]
    dist.new_group([0, 1]).size()
    dist.barrier()
"""


@pytest.fixture
def preflight(python, tmp_path):
    """`preflight(code, ...)` runs the command on a script; its report on the slice, and the finished process."""

    def run(code, *args, check=True):
        (tmp_path / "train.py").write_text(code)
        file = tmp_path / "report.json"
        argv = ["--steps", "3", "--json", str(file), *args, str(tmp_path / "train.py")]
        done = python("", "-m", "oxitorch", "preflight", *argv, check=False, timeout=300)
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return json.loads(file.read_text())["slices"][0] if file.exists() else None, done

    return run


def train(wrap, ranks="pass"):
    return TRAIN.format(width=WIDTH, layers=LAYERS, wrap=wrap, ranks=ranks)


def line_of(text, wrap=DDP):
    """The number of the first line with this text in a script that wraps its model so."""
    return next(i for i, line in enumerate(train(wrap).splitlines(), 1) if text in line)


def test_ddp_sends_its_gradients_once(preflight):
    judged, done = preflight(train(DDP), "--slice", "cpu", "--processes", str(PROCESSES))
    assert judged["processes"]["count"] == PROCESSES and judged["verdict"] == "fits"
    (kind,) = judged["step"]["collectives"]
    assert (kind["kind"], kind["bytes"], kind["ici_s"]) == ("all-reduce", 4 * PARAMETERS, None)
    (call,) = judged["processes"]["collectives"]
    assert (call["name"], call["devices"], call["count"], call["backward"]) == ("all_reduce", PROCESSES, 1, True)
    assert "1 x all-reduce" in done.stdout and f"{PROCESSES} processes" in done.stdout
    # Each bucket is reduced when the gradients of the layer's line are there.
    (line,) = judged["processes"]["lines"]
    assert f":{line_of('loss = model')} in " in line["line"] and line["line"] == call["line"]
    assert (line["count"], line["bytes"], line["ici_s"]) == (1, 4 * PARAMETERS, None)


def test_fsdp_has_a_part_of_parameters_gradients_and_state(preflight, tmp_path):
    page = tmp_path / "page.html"
    judged, done = preflight(
        train(FSDP, "dist.all_reduce(loss.detach())"),
        *("--slice", "cpu", "--processes", str(PROCESSES), "--html", str(page)),
    )
    step = {c["kind"]: c for c in judged["step"]["collectives"]}
    # What the forward gathered is freed, but for the last layer's; each layer's gradients are reduced once.
    assert step["reduce-scatter"]["bytes"] == 4 * PARAMETERS
    assert step["all-gather"]["bytes"] in {4 * PARAMETERS * n // LAYERS for n in (2 * LAYERS - 1, 2 * LAYERS)}
    # What hooks of the backward gather and reduce has the line of the forward.
    first, last = judged["processes"]["lines"]
    assert f":{line_of('loss = model', FSDP)} in " in first["line"] and (last["count"], last["bytes"]) == (1, 4)
    reduced = [c for c in judged["processes"]["collectives"] if c["backward"]]
    assert {"reduce_scatter_tensor", "all_gather_into_tensor"} == {c["name"] for c in reduced}
    for line in (first, last):
        short = line["line"].split(" in ")[0].rsplit("/")[-1]
        assert f"{line['count']} x  {short}, " in done.stdout and short in page.read_text()
    assert "Collectives by Python line" in page.read_text()
    assert f"all_reduce of float32[], 4 B, {PROCESSES} processes" in done.stdout
    last = judged["programs"][-1]
    owned = [t for t in last["tensors"] if t["role"] == "argument"]
    assert owned and all(t["bytes"] <= 4 * (WIDTH * WIDTH + WIDTH) // PROCESSES for t in owned)


def test_fsdp_keeps_a_part_of_all_that_it_trains(python, tmp_path):
    device = {"platform": "tpu", "kind": "TPU v5 lite", "memory_bytes": 1 << 34, "steps": 2}
    (tmp_path / "device.json").write_text(json.dumps(device))
    torchrun = {"RANK": "0", "WORLD_SIZE": str(PROCESSES), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(PROCESSES)}
    python(train(FSDP), OXITORCH_PREFLIGHT=str(tmp_path), **torchrun)
    capture = json.loads((tmp_path / "capture.json").read_text())
    (update,) = [
        p
        for p in capture["programs"]
        if {"gradient", "state"} <= {i["role"] for i in p["inputs"]} and p["launches"][-1][0] == 1
    ]
    held = {
        role: sum(i["bytes"] for i in update["inputs"] if i["role"] == role)
        for role in ("parameter", "gradient", "state")
    }
    part = 4 * PARAMETERS // PROCESSES
    # AdamW keeps two numbers for each, and the steps it has made.
    assert (held["parameter"], held["gradient"]) == (part, part) and 0 <= held["state"] - 2 * part <= 64 * LAYERS
    calls = capture["group_calls"]
    assert {c["step"] for c in calls} == {0, 1} and all(c["ranks"] == list(range(PROCESSES)) for c in calls)


def test_what_depends_on_the_rank_runs_to_its_end(preflight):
    judged, done = preflight(train(DDP, RANKS), "--slice", "cpu", "--processes", str(PROCESSES))
    assert judged["steps_captured"] == 3 and judged["verdict"] == "fits", judged["reason"]
    assert "saved in step 1" in done.stderr
    assert {c["name"] for c in judged["processes"]["collectives"]} == {"all_reduce"}


@pytest.mark.parametrize(
    ("wait", "said"),
    [
        ("dist.distributed_c10d._get_default_store().get('ready')", "nobody sets"),
        ("dist.broadcast_object_list([None], src=1)", "the other processes are not there"),
    ],
)
def test_what_another_rank_would_say_is_refused(preflight, wait, said):
    judged, done = preflight(train(DDP, wait), "--slice", "cpu", "--processes", "2", check=False)
    assert judged["verdict"] == "unknown" and said in done.stderr, done.stderr


def test_scripts_without_a_group_are_as_before(preflight):
    code = (
        train("")
        .replace("dist.init_process_group()", "")
        .replace("rank, size = dist.get_rank(), dist.get_world_size()", "")
    )
    judged, done = preflight(code, "--slice", "cpu", "--processes", "2")
    assert judged["processes"] is None and judged["step"]["collectives"] == []
    assert judged["step"]["without_overlap_s"] is None and "processes" not in done.stdout


def test_processes_and_parallel_contradict_each_other(preflight):
    judged, done = preflight("", "--slice", "v5e-4", "--processes", "4", "--parallel", "dp", check=False)
    assert judged is None and done.returncode == 2 and "does not go with --processes" in done.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("libtpu")
def test_links_have_a_time(preflight):
    judged, done = preflight(train(DDP), "--slice", "v5e-4")
    (sums,), step = judged["step"]["collectives"], judged["step"]
    assert (judged["chips_used"], sums["bytes"]) == (4, 4 * PARAMETERS)
    # Each of two links carries three quarters of that twice, at 50 GB/s.
    assert sums["ici_s"] == pytest.approx(2 * 0.75 * sums["bytes"] / 100e9)
    assert step["ici_s"] == sums["ici_s"]
    assert max(step["ici_s"], step["roofline_s"]) == step["roofline_s"] < step["without_overlap_s"]
    assert step["without_overlap_s"] <= step["roofline_s"] + step["ici_s"] + 1e-12
    assert "4 of 4 chips, 4 processes" in done.stdout
