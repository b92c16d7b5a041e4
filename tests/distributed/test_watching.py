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
times, programs = [], []
for step in range(13):
    model(torch.ones(8, 64, device="tpu")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    times.append({k: v for k, v in model._get_ddp_logging_data().items() if k.endswith("_time") or k == "iteration"})
    programs.append(torch.tpu.metrics()["programs"])
y = torch.ones(1000, device="tpu")
torch.tpu.synchronize()
y.sum().item()  # the program that waits below
store = dist.distributed_c10d._get_default_store()
if rank == 0:
    store.set("here", "")
else:
    store.wait(["here"])
    time.sleep(1)
x = torch.ones(1000, device="tpu").mul(3)
dist.all_reduce(x)
told, graph = torch.tpu.explain(last=1), torch.tpu.graphs()[-1]
x.sum().item()
sys.stdout.write("RESULT " + __import__("json").dumps(
    [rank, torch.tpu.metrics()["collectives"], torch.tpu.metrics_text(), torch.tpu.metrics_summary(),
     dist.group.WORLD._get_sequence_number_for_group(), told, graph.ended_by, graph.ended_by_collective,
     times, programs]) + "\\n")
sys.stdout.flush()
dist.destroy_process_group()
"""


def test_metrics_count_collectives_explain_names_them_and_timelines_become_one(start_ranks, tmp_path):
    """One run, since most of each is starting."""
    graphs, traces = str(tmp_path / "graphs"), str(tmp_path / "trace-%r.json.gz")
    results = start_ranks(SCRIPT, OXITORCH_GRAPHS=graphs, OXITORCH_TRACE=traces).results()
    check_what_is_told(results, tmp_path)
    check_the_timelines(tmp_path)


def check_what_is_told(results, tmp_path):
    which = f"all_reduce(float32[1000]), number {results[0][4]} of group 0"
    for told, ended_by, ended_by_collective in (r[5:8] for r in results):
        assert f"launched because of a collective: {which}, at {tmp_path}/script.py:31 in <module>" in told
        assert (ended_by, ended_by_collective) == ("collective", which)
    for _, collectives, text, summary, *_ in results:
        of = collectives["all_reduce"]
        # DDP reduces its gradients once a step, in one bucket.
        assert of["count"] == 14
        assert of["bytes"] == 13 * 4 * (64 * 64 + 64) + 4000
        assert of["wait_s"] > 0
        assert 0 < of["time_s"] < 60
        assert 'oxitorch_collectives_total{collective="all_reduce"} 14' in text
        assert 'oxitorch_collective_bytes_total{collective="all_reduce"}' in text
        assert "exchanged  14 all_reduce, 215.2 KiB" in summary
    for times, programs in (r[8:] for r in results):
        # DDP takes times in its first ten steps, and then in every hundredth: for those there are no other programs.
        assert [t["iteration"] for t in times] == [*range(11), 10, 10]
        assert len(set(programs[3:])) == 1, programs
        # Two threads tell when a collective began and ended; where one was late, DDP gets no time.
        assert sum(t["backward_comm_time"] == 0 for t in times[1:]) <= 2
        for t in times[1:]:
            overlap = t["backward_compute_comm_overlap_time"]
            assert t["forward_compute_time"] > 0 and t["backward_compute_time"] >= overlap >= 0
            assert t["backward_comm_time"] == 0 or t["backward_comm_time"] >= overlap
            assert t["avg_forward_compute_time"] > 0
        assert times[-1]["avg_backward_comm_time"] > 0
    # Rank 0 waits for the one that sleeps.
    assert results[0][1]["all_reduce"]["wait_s"] > 0.3
    command = [sys.executable, "-m", "oxitorch", "graphs", "--dir", str(tmp_path / "graphs")]
    listed = json.loads(subprocess.run([*command, "ls", "--json"], check=True, capture_output=True).stdout)
    (program,) = [g["id"] for g in listed if g.get("ended_by_collective") == which]
    shown = subprocess.run([*command, "show", program], check=True, capture_output=True, text=True).stdout
    assert f"ended by: collective {which} at {tmp_path}/script.py:31" in shown


def check_the_timelines(tmp_path):
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


PROFILED = """
import json, sys
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

dist.init_process_group()
rank = dist.get_rank()
torch.tpu.set_device(rank)
x, two, pair = torch.ones(3, device="tpu"), torch.ones(6, device="tpu"), torch.ones(2, device="tpu")
lists = [torch.ones(3, device="tpu") for _ in range(2)]


def collectives():
    dist.all_reduce(x)
    dist.all_reduce_coalesced([x, pair])
    dist.broadcast(x, src=1)
    dist.reduce(x, dst=1)
    dist.all_gather(lists, x)
    dist.all_gather_into_tensor(two, x)
    dist.gather(x, lists if rank == 1 else None, dst=1)
    dist.scatter(x, lists if rank == 1 else None, src=1)
    dist.reduce_scatter(x, lists)
    dist.reduce_scatter_tensor(x, two)
    dist.all_to_all(list(torch.ones(2, 3, device="tpu")), lists)
    dist.all_to_all_single(torch.empty(2, device="tpu"), pair)
    dist.all_to_all_single(torch.empty(2, device="tpu"), pair, [1, 1], [1, 1])
    dist.send(x, 1) if rank == 0 else dist.recv(x, 0)
    dist.send(x, 1, tag=1) if rank == 0 else dist.recv(x, tag=1)
    dist.barrier()
    assert (x + 1).sum().item()


with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.PrivateUse1], record_shapes=True) as prof:
    collectives()
titles = [[e.name, e.is_async, e.input_shapes] for e in prof.events() if e.name.startswith("tpu:")]
prof.export_chrome_trace(f"trace{rank}.json")
events = json.load(open(f"trace{rank}.json"))["traceEvents"]
comms = [e["args"] for e in events if e.get("name") == "record_param_comms"]
names = ("Collective name", "In msg nelems", "Out msg nelems", "dtype", "Group size", "Process Group Name", "Rank")
sys.stdout.write("RESULT " + json.dumps([rank, titles, [[c[n] for n in names] for c in comms]]) + "\\n")
sys.stdout.flush()
dist.destroy_process_group()
"""


def test_pytorch_s_profiler_shows_collectives_among_the_host_s_operations(start_ranks):
    x, pair = [3], [2]
    expected = [  # the title, the shapes, NCCL's name, elements in and out, the root's rank
        ("all_reduce", [x], "allreduce", 3, 3, None),
        ("all_reduce", [x, pair], "allreduce_coalesced", 5, 5, None),
        ("broadcast", [x], "broadcast", 3, 3, 1),
        ("reduce", [x], "reduce", 3, 3, 1),
        ("all_gather", [x], "all_gather", 3, 6, None),
        ("_all_gather_base", [x], "_allgather_base", 3, 6, None),
        ("gather", [x], "gather", 3, {0: 0, 1: 6}, 1),
        ("scatter", {0: [x], 1: [x, x]}, "scatter", {0: 0, 1: 6}, 3, 1),
        ("reduce_scatter", [x, x], "reduce_scatter", 6, 3, None),
        ("_reduce_scatter_base", [[6]], "_reduce_scatter_base", 6, 3, None),
        ("all_to_all", [x, x], "all_to_all", 6, 6, None),
        ("all_to_all", [pair], "all_to_all", 2, 2, None),
        ("all_to_all", [pair], "all_to_allv", 2, 2, None),
        ({0: "send", 1: "recv"}, [x], {0: "send", 1: "recv"}, 3, 3, {0: 1, 1: 0}),
        ({0: "send", 1: "recvAnySource"}, [x], {0: "send", 1: "recvAnySource"}, 3, 3, {0: 1, 1: -1}),
        ("barrier", [], "barrier", 0, 0, None),
    ]
    for rank, titles, comms in start_ranks(PROFILED).results():
        of_rank = [[v[rank] if isinstance(v, dict) else v for v in row] for row in expected]
        assert titles == [[f"tpu:{title}", True, shapes] for title, shapes, *_ in of_rank]
        assert comms == [
            [name, n_in, n_out, "Byte" if name == "barrier" else "Float", 2, "0", rank if root is None else root]
            for *_, name, n_in, n_out, root in of_rank
        ]


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
        # Both wait in number 1 for a moment, and rank 1 ends it a little after rank 0 is told.
        while time.monotonic() < until and not (seen and "come to number 2" in seen[-1] and "done" in seen[-1]):
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


def test_ranks_that_end_well_leave_nothing_and_off_keeps_nothing(start_ranks, torchrun, tmp_path):
    code = STANDS.replace("time.sleep(600)", "pass") + THEIRS
    ran = start_ranks(code, OXITORCH_RANKS=str(tmp_path / "ranks"))
    assert list((tmp_path / "ranks").iterdir()) == []
    assert ranks(tmp_path / "ranks").startswith("no ranks in")
    assert ran.results() in ([0, 0], [None, None]), "as the device's own notes it"
    ran = start_ranks(code, OXITORCH_RANKS="off")
    assert ran.results() in ([1, 1], [None, None]), "as no other does"
    (tmp_path / "open").mkdir(mode=0o777)
    (tmp_path / "open").chmod(0o777)
    folder = str(tmp_path / "open")
    ran = torchrun(code, OXITORCH_RANKS=folder, TORCH_FR_BUFFER_SIZE="10", PYTHONWARNINGS="default")
    assert "`oxitorch ranks` will not show this process" in ran.output
    assert ran.results() in ([1, 1], [None, None]), "as it was asked for"
