"""What metrics, timelines and `oxitorch ranks` say of collectives."""

import gzip
import json
import signal
import subprocess
import sys
import time

SCRIPT = """
import sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group()
rank = dist.get_rank()
torch.tpu.set_device(rank)
model = DistributedDataParallel(torch.nn.Linear(64, 64).to("tpu"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.tpu.synchronize()
torch.tpu.reset_metrics()
for step in range(5):
    model(torch.ones(8, 64, device="tpu")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
torch.tpu.synchronize()
if rank == 1:
    time.sleep(0.5)
x = torch.ones(1000, device="tpu").mul(3)
dist.all_reduce(x)
told, graph = torch.tpu.explain(last=1), torch.tpu.graphs()[-1]
x.sum().item()
sys.stdout.write("RESULT " + __import__("json").dumps(
    [rank, torch.tpu.metrics()["collectives"], torch.tpu.metrics_text(), torch.tpu.metrics_summary(),
     dist.group.WORLD._get_sequence_number_for_group(), told, graph.ended_by, graph.ended_by_collective]) + "\\n")
sys.stdout.flush()
dist.destroy_process_group()
"""


def test_metrics_count_collectives_and_explain_names_them(torchrun, tmp_path):
    results = torchrun(SCRIPT, OXITORCH_GRAPHS=str(tmp_path / "graphs")).results()
    which = f"all_reduce(float32[1000]), number {results[0][4]} of group 0"
    for *_, told, ended_by, ended_by_collective in results:
        assert f"launched because of a collective: {which}, at {tmp_path}/script.py:22 in <module>" in told
        assert (ended_by, ended_by_collective) == ("collective", which)
    for _, collectives, text, summary, *_ in results:
        of = collectives["all_reduce"]
        # DDP reduces its gradients once a step, in one bucket.
        assert of["count"] == 6
        assert of["bytes"] == 5 * 4 * (64 * 64 + 64) + 4000
        assert of["wait_s"] > 0
        assert 0 < of["time_s"] < 60
        assert 'oxitorch_collectives_total{collective="all_reduce"} 6' in text
        assert 'oxitorch_collective_bytes_total{collective="all_reduce"}' in text
        assert "exchanged  6 all_reduce, 85.2 KiB" in summary
    # Rank 0 waits for the one that sleeps.
    assert results[0][1]["all_reduce"]["wait_s"] > 0.3
    command = [sys.executable, "-m", "oxitorch", "graphs", "--dir", str(tmp_path / "graphs")]
    listed = json.loads(subprocess.run([*command, "ls", "--json"], check=True, capture_output=True).stdout)
    (program,) = [g["id"] for g in listed if g.get("ended_by_collective") == which]
    shown = subprocess.run([*command, "show", program], check=True, capture_output=True, text=True).stdout
    assert f"ended by: collective {which} at {tmp_path}/script.py:22" in shown


def test_the_timelines_of_ranks_become_one(torchrun, tmp_path):
    torchrun(SCRIPT, OXITORCH_TRACE=str(tmp_path / "trace-%r.json.gz"))
    files = [str(tmp_path / f"trace-{rank}.json.gz") for rank in range(2)]
    command = [sys.executable, "-m", "oxitorch", "trace", "merge", *files, "-o", "all.json.gz"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    with gzip.open(tmp_path / "all.json.gz") as file:
        whole = json.load(file)
    assert whole["otherData"]["ranks"] == [0, 1]
    events = whole["traceEvents"]
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert {"rank 0: collectives", "rank 1: collectives", "rank 0: recorded", "rank 1: recorded"} <= names
    slices = [e for e in events if e.get("cat") == "collective"]
    by_rank = [
        {(e["args"]["group"], e["args"]["number"]): e for e in slices if e["pid"] // 1000 == rank} for rank in range(2)
    ]
    assert by_rank[0].keys() == by_rank[1].keys()
    assert len(by_rank[0]) >= 6
    apart = sorted(abs(e["ts"] + e["dur"] - by_rank[1][k]["ts"] - by_rank[1][k]["dur"]) for k, e in by_rank[0].items())
    assert apart[len(apart) // 2] < 5e3  # microseconds
    assert {"all_reduce(float32[1000])", "all_reduce(float32[4160])"} <= {e["args"]["call"] for e in slices}
    windows = [e["args"] for e in events if e.get("cat") == "window" and e["args"]["ended by"] == "collective"]
    assert all(" of group 0" in w["collective"] for w in windows)
    assert any(w["collective"].startswith("all_reduce(float32[1000]), number ") for w in windows)
    lines = {e["args"]["line"] for e in slices}
    assert all("script.py:" in line or "/distributed/" in line for line in lines), lines
    arrows = [e for e in events if e.get("cat") == "ranks"]
    assert sorted(e["ph"] for e in arrows) == ["f"] * len(by_rank[0]) + ["s"] * len(by_rank[0])


def ranks(folder) -> str:
    command = [sys.executable, "-m", "oxitorch", "ranks", "--dir", str(folder)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


STANDS = """
import os, signal, sys, time
import torch
import torch.distributed as dist
dist.init_process_group()
rank = dist.get_rank()
torch.tpu.set_device(rank)
x = torch.ones(1000, device="tpu")
dist.all_reduce(x)
x.sum().item()
if rank == 1:
    time.sleep(600)
dist.all_reduce(x[:7])
x.sum().item()
"""


def test_oxitorch_ranks_shows_whom_the_others_wait_for(torchrun, tmp_path):
    folder = tmp_path / "ranks"
    seen = []

    def look(process):
        until = time.monotonic() + 60
        while time.monotonic() < until and not (seen and "waits" in seen[-1]):
            time.sleep(0.3)
            seen.append(ranks(folder))
        process.send_signal(signal.SIGTERM)

    ran = torchrun(STANDS, check=False, meanwhile=look, OXITORCH_RANKS=str(folder))
    assert ran.status != 0
    [head, first, second, verdict] = seen[-1].splitlines()
    assert head.split() == ["rank", "process", "state", "number", "collective", "since", "line"]
    assert first.split()[0] == "0" and first.split()[2:5] == ["waits", "2", "all_reduce(float32[7])"]
    assert "script.py:13 in <module>" in first
    assert second.split()[0] == "1" and second.split()[2:5] == ["done", "1", "all_reduce(float32[1000])"]
    assert verdict == "rank 1 has not come to number 2 of group 0, where rank 0 waits"
    # They were killed, and their files say what they were about.
    assert ranks(folder).count("ended") >= 2


# Whether PyTorch's own flight recorder, which comes with torch 2.15, notes what the device's group does.
THEIRS = """
hooks = getattr(dist.distributed_c10d._world, "pg_flight_recorder_hooks", None)
sys.stdout.write("RESULT " + ("null" if hooks is None else str(len(hooks))) + "\\n")
"""


def test_ranks_that_end_well_leave_nothing_and_off_keeps_nothing(torchrun, tmp_path):
    code = STANDS.replace("time.sleep(600)", "pass") + THEIRS
    ran = torchrun(code, OXITORCH_RANKS=str(tmp_path / "ranks"))
    assert list((tmp_path / "ranks").iterdir()) == []
    assert ranks(tmp_path / "ranks").startswith("no ranks in")
    assert ran.results() in ([0, 0], [None, None]), "as the device's own notes it"
    ran = torchrun(code, OXITORCH_RANKS="off")
    assert ran.results() in ([1, 1], [None, None]), "as no other does"
    (tmp_path / "open").mkdir(mode=0o777)
    (tmp_path / "open").chmod(0o777)
    folder = str(tmp_path / "open")
    ran = torchrun(code, OXITORCH_RANKS=folder, TORCH_FR_BUFFER_SIZE="10", PYTHONWARNINGS="default")
    assert "`oxitorch ranks` will not show this process" in ran.output
    assert ran.results() in ([1, 1], [None, None]), "as it was asked for"
