"""Jobs start as docs/distributed.md says, in processes that have the variables of Slurm or Kubernetes and no others."""

import os
import re
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import yaml

from tests.conftest import child_environment
from tests.distributed import plugin

PAGE = (Path(__file__).parents[2] / "docs" / "distributed.md").read_text()
SH = re.findall(r"^```sh\n(.*?)^```$", PAGE, re.M | re.S)
OF_SLURM = next(b for b in re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S) if "SLURM" in b)
JOB_SET = yaml.safe_load(next(iter(re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.M | re.S))))
SIZE = 2

BEGIN = """
import os
import sys
import torch
import torch.distributed as dist
"""
BY_ENVIRONMENT = """
dist.init_process_group()
device = torch.device("tpu", int(os.environ.get("LOCAL_RANK", 0)))
torch.tpu.set_device(device)
"""
END = """
x = torch.full((3,), 1.0 + dist.get_rank(), device="tpu")
dist.all_reduce(x)
assert torch.tpu.current_device() == x.device.index == device.index, (torch.tpu.current_device(), x.device, device)
print(f"RANK {dist.get_rank()} of {dist.get_world_size()} on {x.device}: {x.tolist()}\\n", end="", flush=True)
dist.destroy_process_group()
"""
# What Slurm's commands do: as many tasks as there are, on nodes that are all this machine.
SRUN = """
import os, subprocess, sys
nodes, here = int(os.environ["SLURM_NNODES"]), int(os.environ["SLURM_NTASKS_PER_NODE"])
tasks = [
    subprocess.Popen(sys.argv[1:], env=os.environ | {"SLURM_PROCID": str(i), "SLURM_LOCALID": str(i % here),
                                                     "SLURM_NODEID": str(i // here)})
    for i in range(nodes * here)
]
sys.exit(max(task.wait() for task in tasks))
"""
COMMANDS = {
    "python": "",
    "torchrun": "-m torch.distributed.run",
    "srun": "srun.py",
    "scontrol": "-c 'print(\"localhost\")'",
}


@pytest.fixture
def job(tmp_path):
    """`job(script, commands)`: what it prints, each command a list and its environment."""
    (tmp_path / "srun.py").write_text(SRUN)
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, arguments in COMMANDS.items():
        arguments = arguments.replace("srun.py", str(tmp_path / "srun.py"))
        (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} {arguments} "$@"\n')
        (programs / name).chmod(0o755)

    def run(script: str, commands: list[tuple[list[str], dict[str, str]]]) -> list[str]:
        (tmp_path / "train.py").write_text(script)
        path = f"{programs}:{child_environment()['PATH']}"
        none = dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
        own = none | {"PATH": path, "OMP_NUM_THREADS": "1"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        processes = [
            subprocess.Popen(command, env=child_environment(**(own | env)), cwd=tmp_path, **pipes)
            for command, env in commands
        ]
        try:
            printed = "".join(p.communicate(timeout=200)[0] for p in processes)
        finally:
            for p in processes:
                p.kill()
        assert all(p.returncode == 0 for p in processes), printed
        return sorted(re.findall(r"^RANK .*$", printed, re.M))

    return run


def free_port() -> str:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return str(s.getsockname()[1])


def of_slurm(text: str, nodes: int) -> tuple[list[str], dict[str, str]]:
    """A script of the page for two tasks, as sbatch runs it."""
    here = SIZE // nodes
    told = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "localhost", "SLURM_NTASKS": str(SIZE)}
    told |= {"SLURM_NNODES": str(nodes), "SLURM_NTASKS_PER_NODE": str(here)}
    text = text.replace("29500", free_port()).replace("--nproc-per-node 4", "--nproc-per-node 1")
    return ["sh", "-c", text], told


def on(*devices: int) -> list[str]:
    return [f"RANK {i} of {SIZE} on tpu:{d}: [3.0, 3.0, 3.0]" for i, d in enumerate(devices)]


@pytest.mark.slow
def test_slurm_starts_torchrun(job):
    assert job(BEGIN + BY_ENVIRONMENT + END, [of_slurm(SH[0], nodes=2)]) == on(0, 0)


@pytest.mark.slow
def test_slurm_starts_each_process(job):
    assert job(BEGIN + BY_ENVIRONMENT + END, [of_slurm(SH[1], nodes=1)]) == on(0, 1)


def test_the_script_takes_the_variables_of_slurm(job):
    export = next(line for line in SH[1].splitlines() if line.startswith("export"))
    assert "`srun python train.py`" in PAGE
    assert job(BEGIN + OF_SLURM + END, [of_slurm(f"{export}\nsrun python train.py", nodes=1)]) == on(0, 1)


def pods(command: list[str], env: dict[str, str]) -> list[tuple[list[str], dict[str, str]]]:
    """An indexed Job: each pod is told its number, and `$(NAME)` in a command is a variable's value."""
    return [
        ([part.replace("$(JOB_COMPLETION_INDEX)", str(i)) for part in command], env | {"JOB_COMPLETION_INDEX": str(i)})
        for i in range(SIZE)
    ]


@pytest.mark.slow
def test_a_job_set_starts_torchrun(job):
    (replicated,) = JOB_SET["spec"]["replicatedJobs"]
    of_job = replicated["template"]["spec"]
    (container,) = of_job["template"]["spec"]["containers"]
    env = {e["name"]: e["value"] for e in container["env"]}
    first = f"{JOB_SET['metadata']['name']}-{replicated['name']}-0-0.{JOB_SET['metadata']['name']}"
    assert env["PET_MASTER_ADDR"] == first
    assert of_job["completionMode"] == "Indexed"
    assert of_job["completions"] == of_job["parallelism"] == int(env["PET_NNODES"]) == SIZE
    env |= {"PET_MASTER_ADDR": "localhost", "PET_MASTER_PORT": free_port(), "PET_NPROC_PER_NODE": "1"}
    assert job(BEGIN + BY_ENVIRONMENT + END, pods(container["command"], env)) == on(0, 0)


@pytest.mark.slow
def test_a_job_starts_each_process(job):
    env = {"WORLD_SIZE": str(SIZE), "MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}
    assert job(BEGIN + BY_ENVIRONMENT + END, pods(["sh", "-c", SH[2]], env)) == on(0, 0)


FIRST = """
device = torch.device("tpu", int(os.environ["SLURM_LOCALID"]))
{}
assert not torch.tpu.is_initialized()
dist.init_process_group(rank=int(os.environ["SLURM_PROCID"]), world_size=int(os.environ["SLURM_NTASKS"]))
"""
CHOOSE = ("torch.tpu.set_device(device)", "torch.accelerator.set_device_index(device)")


@pytest.mark.parametrize("platform", ["cpu", pytest.param("of several processes", marks=pytest.mark.slow)])
@pytest.mark.parametrize("choose", CHOOSE)
def test_the_device_is_chosen_first(job, platform, choose):
    """As in scripts for CUDA: a process says which device is its own before it meets the others."""
    command, env = of_slurm("export MASTER_ADDR=localhost MASTER_PORT=29500\nsrun python train.py", nodes=1)
    env |= {} if platform == "cpu" else plugin.environ()
    if platform == "cpu" or "accelerator" in choose:  # PyTorch asks how many devices there are
        env["LOCAL_WORLD_SIZE"] = str(SIZE)
    assert job(BEGIN + FIRST.format(choose) + END, [(command, env)]) == on(0, 1)


SPAWNED = """
def main(rank, size):
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=sys.argv[1])
    device = torch.device("tpu", rank)
    torch.tpu.manual_seed(0)
    torch.tpu.set_device(rank)
    assert not torch.tpu.is_initialized()
    dist.init_process_group("tpu", rank=rank, world_size=size)
{}
if __name__ == "__main__":
    torch.multiprocessing.spawn(main, args=({},), nprocs={})
"""


def test_the_device_is_chosen_first_in_processes_of_the_script(job):
    """Nobody says how many they are before they meet."""
    script = BEGIN + SPAWNED.format(textwrap.indent(END, "    "), SIZE, SIZE)
    assert job(script, [(["python", "train.py", free_port()], {})]) == on(0, 1)


COUNTED = """
def agrees(rank, count):
    for take in (torch.tpu.set_device, torch.accelerator.set_device_index):
        try:
            take(count)
        except RuntimeError as e:
            assert f"tpu device index {count} does not exist: there are {count} device(s)" in str(e), e
        else:
            raise AssertionError(f"device {count} of {torch.tpu.device_count()} was taken")
        take(rank)
        assert torch.tpu.current_device() == rank
    assert torch.tpu.device_count() == torch.accelerator.device_count() == count

def main(rank, size, group):
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=sys.argv[1])
    agrees(rank, rank + 1)
    if group:
        dist.init_process_group(rank=rank, world_size=size)
    count = size if group else rank + 1
    agrees(rank, count)
    x = torch.ones(2, device="tpu")
    agrees(rank, count)
    print(f"RANK {rank} on {x.device}\\n", end="", flush=True)

if __name__ == "__main__":
    group = sys.argv[3] == "in a group"
    torch.multiprocessing.start_processes(main, args=(2, group), nprocs=2, start_method=sys.argv[2])
    assert torch.tpu.device_count() == 1
"""


@pytest.mark.parametrize("method, group", [("spawn", "alone"), ("fork", "in a group")])
def test_what_there_is_can_be_chosen_and_nothing_else(job, method, group):
    """In processes of the script, before and after they meet, and before and after the device starts."""
    command = ["python", "train.py", free_port(), method, group]
    found = job(BEGIN + COUNTED, [(command, {"OXITORCH_PLATFORM": "cpu"})])
    assert found == ["RANK 0 on tpu:0", "RANK 1 on tpu:1"]


THREADS = """
import os, torch
places = [torch.ones(3, device=f"tpu:{i}") for i in (5, 1)]
assert [x.add(1).cpu().tolist() for x in places] == [[2.0] * 3] * 2
assert torch.tpu.device_count() == 8 and "NPROC" not in os.environ
names = [open(f"/proc/self/task/{task}/comm").read().strip() for task in os.listdir("/proc/self/task")]
print(names.count("tf_XLAEigen"))
"""


def test_processes_share_the_cores_of_the_machine(python):
    """A client of so many devices would compute with a thread for each, in each process."""
    ran = python(THREADS, OXITORCH_PLATFORM="cpu", LOCAL_WORLD_SIZE="8")
    assert int(ran.stdout) == max(1, len(os.sched_getaffinity(0)) // 8)


def test_a_device_that_no_process_is_known_to_have(python):
    ran = python("import torch; torch.tpu.set_device(1)", check=False, OXITORCH_PLATFORM="cpu", LOCAL_WORLD_SIZE=None)
    assert "tpu device index 1 does not exist: there are 1 device(s)" in ran.stderr
    assert "hint: the cpu platform shows a device for each process that LOCAL_WORLD_SIZE counts" in ran.stderr
