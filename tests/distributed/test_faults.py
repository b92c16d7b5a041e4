"""How processes end, and what the others then say: an exception, a signal, a mismatch, a rank that is late or gone.

No process waits for ever, and none is left behind (`torchrun` sees to the latter).
"""

import signal
import socket
import time

import pytest

START = """
import os, signal, sys, time
from datetime import timedelta
import torch
import torch.distributed as dist

KIND = sys.argv[1]
TIMEOUT = 5
dist.init_process_group(timeout=timedelta(seconds=TIMEOUT))
rank = dist.get_rank()
torch.tpu.set_device(rank)
x = torch.ones(1000, device="tpu")
dist.all_reduce(x)
x.sum().item()

def say(*words):  # in one write, as processes share the output
    sys.stdout.write(" ".join(map(str, words)) + "\\n")
    sys.stdout.flush()
"""

# What rank 1 does where rank 0 goes on to a collective, and what rank 0 then says.
GONE = {
    "raises": ("raise ValueError('mine')", None),
    "raises before the group is destroyed": (
        "try:\n        dist.all_reduce(x); dist.all_reduce(x); raise ValueError('mine')\n"
        "    finally:\n        dist.destroy_process_group()",
        None,
    ),
    "leaves": ("sys.exit(0)", "rank 1: says nothing: it has ended, or has not come so far"),
    "leaves with an error": ("sys.exit(3)", None),
    "is interrupted": ("os.kill(os.getpid(), signal.SIGINT); time.sleep(60)", None),
    "is terminated": ("os.kill(os.getpid(), signal.SIGTERM)", None),
    "is killed": ("os.kill(os.getpid(), signal.SIGKILL)", None),
    "is out of memory": ("torch.tpu.set_per_process_memory_fraction(0.001); torch.zeros(1 << 30, device='tpu')", None),
    "is stopped": ("os.kill(os.getpid(), signal.SIGSTOP)", "rank 1: says nothing"),
    "is late": ("time.sleep(9); dist.all_reduce(x); x.sum().item()", "rank 1: says nothing"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", GONE)
def test_a_rank_that_does_not_come(torchrun, kind):
    does, says = GONE[kind]
    code = f"""{START}
if rank == 1:
    {does}
else:
    begin = time.monotonic()
    dist.all_reduce(x)
    try:
        x.sum().item()
    finally:
        say("WAITED", time.monotonic() - begin)
"""
    ran = torchrun(code, kind, check=False, timeout=60)
    assert ran.status != 0
    if says is not None:
        assert says in ran.output
        assert "all_reduce(Float[1000], op=SUM)" in ran.output
        assert "script.py:" in ran.output
        [waited] = [float(line.split()[1]) for line in ran.output.splitlines() if line.startswith("WAITED")]
        assert waited < 5 + 5
    assert ran.seconds < 90  # torchrun gives a stopped process 30 s


ENDS = {"is killed": "SIGKILL", "is stopped": "SIGSTOP"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ENDS)
def test_a_rank_that_does_not_come_to_the_group(torchrun, kind):
    """What rank 0 says is PyTorch's own."""
    code = f"""
import os, signal, time
from datetime import timedelta
import torch
import torch.distributed as dist
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.{ENDS[kind]})
begin = time.monotonic()
try:
    dist.init_process_group(timeout=timedelta(seconds=5))
finally:
    print("WAITED", time.monotonic() - begin, flush=True)
"""
    ran = torchrun(code, check=False, timeout=90)
    assert ran.status != 0
    waited = [float(line.split()[1]) for line in ran.output.splitlines() if line.startswith("WAITED")]
    assert all(w < 10 for w in waited), ran.output
    assert waited or kind == "is killed", ran.output  # by which torchrun ends the others


@pytest.mark.slow
@pytest.mark.parametrize("kind", ENDS)
def test_a_rank_that_ends_while_it_saves(torchrun, tmp_path, kind):
    """The others raise in time, and after a restart the checkpoint before is there."""
    code = f"""
import os, signal, time
from datetime import timedelta
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard

class Writer(dcp.FileSystemWriter):
    def write_data(self, *args):
        if rank == 1 and step == 2 and begin == 0:
            os.kill(os.getpid(), signal.{ENDS[kind]})
        return super().write_data(*args)

dist.init_process_group("cpu:gloo,tpu:tpu", timeout=timedelta(seconds=5))
rank = dist.get_rank()
torch.tpu.set_device(rank)
model = fully_shard(torch.nn.Linear(4, 4, bias=False).to("tpu"))
begin = max((int(f) for f in os.listdir("saved") if os.path.exists(f"saved/{{f}}/.metadata")), default=0)
if begin:
    dcp.load(model.state_dict(), checkpoint_id=f"saved/{{begin}}")
else:
    torch.nn.init.ones_(model.weight)
for step in range(begin + 1, 4):
    with torch.no_grad():
        model.weight.mul_(2)
    start = time.monotonic()
    try:
        dcp.save(model.state_dict(), storage_writer=Writer(f"saved/{{step}}"))
    except BaseException:
        print("WAITED", time.monotonic() - start, flush=True)
        raise
total = model.weight.full_tensor().sum().item()
if rank == 0:
    print("BEGAN", begin, "SUM", total, flush=True)
dist.destroy_process_group()
"""
    (tmp_path / "saved").mkdir()
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    ran = torchrun(code, launcher=launcher, timeout=150)
    assert "BEGAN 1 SUM 128.0" in ran.output, ran.output
    waited = [float(line.split()[1]) for line in ran.output.splitlines() if line.startswith("WAITED")]
    assert all(w < 10 for w in waited), ran.output
    assert waited or kind == "is killed", ran.output


MISMATCHES = {
    "another size": ("dist.all_reduce(x)", "dist.all_reduce(torch.ones(5, device='tpu'))"),
    "another dtype": ("dist.all_reduce(x)", "dist.all_reduce(x.int())"),
    "another reduction": ("dist.all_reduce(x)", "dist.all_reduce(x, op=dist.ReduceOp.MAX)"),
    "another collective": ("dist.all_reduce(x)", "dist.broadcast(x, 0)"),
    "another root": ("dist.broadcast(x, 0)", "dist.broadcast(x, 1)"),
    "another order": (
        "dist.all_reduce(x); dist.broadcast(x, 0)",
        "dist.broadcast(x, 0); dist.all_reduce(x)",
    ),
}


def test_ranks_that_do_not_do_the_same(start_ranks):
    """Each in a group of its own, as a group that failed goes on no more."""
    code = f"""{START}
CASES = {list(MISMATCHES.items())!r}
for name, does in CASES:
    group = dist.new_group()
    names = {{"x": torch.ones(1000, device="tpu"), "torch": torch}}
    class own:
        ReduceOp = dist.ReduceOp
        def __getattr__(self, f):
            return lambda *a, **k: getattr(dist, f)(*a, group=group, **k)
    names["dist"] = own()
    begin = time.monotonic()
    try:
        exec(compile(does[rank], "script.py", "exec"), names)
        torch.tpu.synchronize()
        say("NOTHING", name)
    except RuntimeError as e:
        text = str(e)
        assert "the ranks do not do the same" in text, text
        assert "rank 0: " in text and "rank 1: " in text, text
        assert time.monotonic() - begin < 5, text
        say("TOLD", name)
    try:  # the group goes on no more
        group_x = torch.ones(3, device="tpu")
        dist.all_reduce(group_x, group=group)
        group_x.sum().item()
        say("NOTHING", name)
    except RuntimeError:
        pass
say("DONE")
os._exit(0)
"""
    ran = start_ranks(code, "", timeout=90)
    assert "NOTHING" not in ran.output, ran.output
    for name in MISMATCHES:
        assert ran.output.count(f"TOLD {name}") == 2, ran.output
    assert ran.output.count("DONE") == 2


def test_what_was_recorded_is_done_before_a_process_ends(start_ranks):
    """Rank 1 records its part and ends; rank 0 comes later."""
    code = f"""{START}
for _ in range(3):
    dist.all_reduce(x, op=dist.ReduceOp.AVG)
if rank == 0:
    time.sleep(1)
    dist.all_reduce(x)
    say("SUM", x.sum().item())
else:
    dist.all_reduce(x)
    if KIND == "destroyed":
        dist.destroy_process_group()
"""
    assert "SUM 4000.0" in start_ranks(code, "").output
    assert "SUM 4000.0" in start_ranks(code, "destroyed").output


@pytest.mark.slow
def test_torchrun_restarts_and_the_script_resumes(torchrun, tmp_path):
    code = """
import os, signal, sys
import torch
import torch.distributed as dist
dist.init_process_group()
rank = dist.get_rank()
torch.tpu.set_device(rank)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1).to("tpu"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
begin = 0
if os.path.exists("saved.pt"):
    saved = torch.load("saved.pt", map_location="tpu")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    begin = saved["step"]
for step in range(begin, 6):
    model(torch.ones(2, 4, device="tpu") * (rank + 1)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 2 and rank == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}, "saved.pt.new")
        os.rename("saved.pt.new", "saved.pt")
    dist.barrier()
    if step == 4 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
if rank == 0:
    print("BEGAN", begin, "RESTARTS", os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
dist.destroy_process_group()
"""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    assert "BEGAN 3 RESTARTS 1" in torchrun(code, launcher=launcher).output


@pytest.mark.slow
def test_the_cache_folder_is_shared_by_all_ranks(torchrun, tmp_path, empty_cache):
    """Of four ranks that want a program, one compiles it."""
    code = """
import sys
import torch
import torch.distributed as dist
dist.init_process_group()
torch.tpu.set_device(dist.get_rank())
x = torch.ones(64, 64, device="tpu")
for _ in range(3):
    x = torch.softmax(x @ x, 1)
    dist.all_reduce(x)
x.sum().item()
sys.stdout.write(f"COMPILED {torch.tpu.metrics()['compiles']} {torch.tpu.metrics()['programs']}\\n")
sys.stdout.flush()
dist.destroy_process_group()
"""

    def counts():
        ran = torchrun(code, ranks=4, OXITORCH_CACHE_DIR=str(empty_cache))
        lines = [line.split() for line in ran.output.splitlines()]
        return [(int(line[1]), int(line[2])) for line in lines if line[:1] == ["COMPILED"]]

    first, again = counts(), counts()
    assert len(first) == len(again) == 4
    assert sum(compiles for compiles, _ in first) == max(programs for _, programs in first)
    assert not any(compiles for compiles, _ in again)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ENDS)
def test_a_rank_that_ends_while_it_compiles(torchrun, empty_cache, kind):
    """The others may wait for its program, and raise in time; a new rank finds what it left in the cache folder."""
    code = f"""
import os, signal, sys, threading, time
from datetime import timedelta
import torch
import torch.distributed as dist
dist.init_process_group(timeout=timedelta(seconds=30))
rank = dist.get_rank()
torch.tpu.set_device(rank)
x = torch.ones(64, 64, device="tpu")
for i in range(100):
    x = torch.softmax(x @ x + i, 1)
if rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    def end():
        while not any("lease" in f for _, _, fs in os.walk(sys.argv[1]) for f in fs):
            time.sleep(0.001)
        os.kill(os.getpid(), signal.{ENDS[kind]})
    threading.Thread(target=end, daemon=True).start()
dist.all_reduce(x)
total = x.sum().item()
if rank == 0:
    sys.stdout.write(f"SUM {{total:.3f}} RESTARTS {{os.environ['TORCHELASTIC_RESTART_COUNT']}}\\n")
    sys.stdout.flush()
dist.destroy_process_group()
"""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    ran = torchrun(code, str(empty_cache), launcher=launcher, timeout=400, OXITORCH_CACHE_DIR=str(empty_cache))
    assert "SUM 128.000 RESTARTS 1" in ran.output, ran.output
    if kind == "is stopped":
        assert "rank 1: says nothing" in ran.output, ran.output
        assert "all_reduce(Float[4096], op=SUM)" in ran.output, ran.output
    assert [str(f) for f in empty_cache.rglob("*lease*")] == []


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [[], ["-m", "torch.distributed.run", "--nproc-per-node", "2"]])
def test_a_port_that_is_in_use(torchrun, launcher):
    """Whoever wants to listen there, rank 0 or its launcher, says so."""
    code = """
from datetime import timedelta
import torch.distributed as dist
dist.init_process_group(timeout=timedelta(seconds=5))
"""
    with socket.create_server(("localhost", 0)) as taken:
        port = str(taken.getsockname()[1])
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
        options = ["--master-addr", "localhost", "--master-port", port] if launcher else []
        ran = torchrun(code, launcher=launcher + options, check=False, timeout=60, **({} if launcher else alone))
    assert ran.status != 0
    assert "EADDRINUSE" in ran.output, ran.output


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_launcher_that_is_interrupted(torchrun, empty_cache, tmp_path, number):
    """In the middle of a step: the ranks end before their launcher kills them, and leave no lease."""
    code = f"""{START}
open(f"begun.{{rank}}", "w").close()
while True:
    dist.all_reduce(x)
    x = torch.softmax(x, 0)
    x.sum().item()
"""

    def interrupt(process):
        until = time.monotonic() + 120
        while time.monotonic() < until and len(list(tmp_path.glob("begun.*"))) < 2:
            time.sleep(0.1)
        time.sleep(1)
        process.send_signal(number)

    ran = torchrun(code, "", check=False, timeout=180, meanwhile=interrupt, OXITORCH_CACHE_DIR=str(empty_cache))
    assert ran.status != 0
    assert "forcefully exiting" not in ran.output, ran.output
    assert [str(f) for f in empty_cache.rglob("*lease*")] == []


@pytest.mark.slow
def test_a_full_disk_on_one_rank(torchrun, empty_cache):
    """A limit of a file's size: a write ends short and the next one fails, as on a full disk."""
    code = """
import os, resource, sys
if os.environ["RANK"] == "1":
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
import torch
import torch.distributed as dist
dist.init_process_group()
torch.tpu.set_device(dist.get_rank())
x = torch.ones(64, 64, device="tpu")
for i in range(5):
    x = torch.softmax(x @ x + dist.get_rank(), 1)
    dist.all_reduce(x)
sys.stdout.write(f"SUM {x.sum().item():.3f}\\n")
sys.stdout.flush()
dist.destroy_process_group()
"""
    ran = torchrun(code, OXITORCH_CACHE_DIR=str(empty_cache))
    assert ran.output.count("SUM 128.000") == 2


@pytest.mark.slow
def test_a_monitored_barrier_names_who_is_missing(torchrun):
    code = f"""{START}
group = dist.new_group(backend="cpu:gloo,tpu:tpu")
if rank == 1:
    time.sleep(8)
    os._exit(0)
begin = time.monotonic()
try:
    dist.monitored_barrier(group, timeout=timedelta(seconds=3))
except RuntimeError as e:
    say("TOLD", time.monotonic() - begin, e)
os._exit(0)
"""
    ran = torchrun(code, "", timeout=60)
    [told] = [line for line in ran.output.splitlines() if line.startswith("TOLD")]
    assert "Ranks 1 failed to pass monitoredBarrier" in told or "Rank 1 failed to pass monitoredBarrier" in told
    assert float(told.split()[1]) < 3 + 5
