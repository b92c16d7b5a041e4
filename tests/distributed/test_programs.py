"""Where the processes have one client, and collectives are programs of it: the cases of the cpu platform, and more."""

import os
import subprocess
import sys

import pytest
from oxitorch import _processes

from tests.distributed import plugin, ranks

outcomes = ranks.Outcomes(plugin.environ)


@pytest.mark.parametrize(("size", "name"), ranks.parameters("collectives", (2, 3, 4, 8)))
def test_collectives(size, name):
    outcomes.check("collectives", size, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ranks.names("training", 2))
def test_training(name):
    outcomes.check("training", 2, name)


@pytest.mark.parametrize(("size", "name"), ranks.parameters("programs"))
def test_programs(size, name):
    outcomes.check("programs", size, name)


def together(tmp_path, script: str, environ: dict[str, str], size: int = 2) -> list[str]:
    """What this script prints in processes that are told their places, without a launcher's other variables."""
    command = [sys.executable, "-c", script, str(tmp_path / "store"), str(size)]
    env = {k: v for k, v in os.environ.items() if k not in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")} | environ
    start = [
        subprocess.Popen([*command, str(rank)], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for rank in range(size)
    ]
    return [process.communicate(timeout=200)[0] for process in start]


SCRIPT = """
import sys
import torch
import torch.distributed as dist
from datetime import timedelta

path, size, rank = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
def start():
    store = dist.FileStore(path, size)
    dist.init_process_group("tpu", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=30))
"""


def test_the_device_is_not_used_before(tmp_path):
    script = SCRIPT + "torch.tpu.init()\nstart()\n"
    for printed in together(tmp_path, script, plugin.environ()):
        assert "torch.distributed comes too late for it" in printed
        assert "hint: call torch.distributed.init_process_group() before the first use of the device" in printed


def test_under_torchrun_no_backend_is_named(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("""
import os
import torch
import torch.distributed as dist
dist.init_process_group()
x = torch.ones(2, device="tpu")
dist.all_reduce(x)
# In one piece, as both write to one pipe.
os.write(1, f"it is {x.tolist()} {x.device} {torch.tpu.device_count()}\\n".encode())
dist.destroy_process_group()
""")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    env = {k: v for k, v in os.environ.items() if k not in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")} | plugin.environ()
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert f"it is [2.0, 2.0] tpu:{rank} 2" in done.stdout


def test_a_process_that_does_not_come_is_named(tmp_path):
    script = SCRIPT + "rank = 0\nsize = 2\nfrom oxitorch import _activate, _processes\nimport torch\n"
    script += "store = dist.FileStore(path, 2)\n_processes._join(_activate.core(), 'cuda', store, 0, 2)\n"
    environ = plugin.environ() | {"OXITORCH_TEST_PATIENCE_S": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    command = [sys.executable, "-c", script, str(tmp_path / "store"), "2", "0"]
    ended = subprocess.run(command, env=os.environ | environ, capture_output=True, text=True, timeout=200, check=False)
    assert "DEADLINE_EXCEEDED" in ended.stderr, ended.stderr
    assert "no process has put `client/1` within 2 s" in ended.stderr


def test_processes_find_their_places_without_a_launcher(tmp_path):
    script = SCRIPT + "start()\nx = torch.ones(2, device='tpu')\ndist.all_reduce(x)\n"
    script += "print('it is', x.tolist(), x.device, torch.tpu.device_count())\n"
    printed = together(tmp_path, script, plugin.environ())
    for rank, text in enumerate(printed):
        assert f"it is [2.0, 2.0] tpu:{rank} 2" in text


def test_groups_are_made_anew_with_another_store(tmp_path):
    script = SCRIPT + "start()\ndist.barrier()\ndist.destroy_process_group()\npath += '.again'\nstart()\n"
    script += "x = torch.ones(2, device='tpu')\ndist.all_reduce(x)\nprint('it is', x.tolist())\n"
    for text in together(tmp_path, script, plugin.environ()):
        assert "it is [2.0, 2.0]" in text


def test_a_tpu_is_told_by_its_environment(tmp_path):
    environ = plugin.environ()
    folder = environ["PYTHONPATH"].split(os.pathsep)[0]
    place = tmp_path / "libtpu"
    place.mkdir()
    os.symlink(f"{folder}/jax_plugins/xla_cuda13/xla_cuda_plugin.so", place / "libtpu.so")
    script = SCRIPT + "import os\nstart()\nx = torch.ones(2, device='tpu')\ndist.all_reduce(x)\n"
    script += "told = {k: v for k, v in os.environ.items() if k.startswith('TPU_') or k == 'CLOUD_TPU_TASK_ID'}\n"
    script += "print('it is', x.tolist(), x.device, told['CLOUD_TPU_TASK_ID'], told['TPU_VISIBLE_CHIPS'])\n"
    tpu = {"OXITORCH_PLATFORM": "tpu", "PYTHONPATH": str(tmp_path), "TPU_PROCESS_BOUNDS": "1,2,1"}
    for rank, text in enumerate(together(tmp_path, script, environ | tpu)):
        assert f"it is [2.0, 2.0] tpu:{rank} {rank} {rank}" in text


def test_what_libtpu_is_told():
    four = [f"one:{8476 + i}" for i in range(4)]
    told = _processes.tpu_environment({}, four, 2, (2, 4))
    assert told == {
        "TPU_PROCESS_ADDRESSES": "one:8476,one:8477,one:8478,one:8479",
        "TPU_PROCESS_PORT": "8478",
        "CLOUD_TPU_TASK_ID": "2",
        "TPU_VISIBLE_CHIPS": "2",
        "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
        "TPU_PROCESS_BOUNDS": "2,2,1",
    }
    # What the user or the machine has said stays.
    said = {"TPU_PROCESS_PORT": "1", "TPU_VISIBLE_CHIPS": "3"}
    assert not said.keys() & _processes.tpu_environment(said, four, 2, (2, 4)).keys()
    # A process for each machine takes all of its chips.
    assert _processes.tpu_environment({}, ["a:8476", "b:8476"], 1, (0, 1)) == {}
    two = [f"{host}:{8476 + i}" for host in "ab" for i in range(4)]
    for addresses, here in ((two, (1, 4)), (four[:3], (1, 3))):
        with pytest.raises(RuntimeError, match="hint: TPU_PROCESS_BOUNDS"):
            _processes.tpu_environment({}, addresses, 1, here)
    assert _processes.tpu_environment({"TPU_PROCESS_BOUNDS": "2,4,1"}, two, 5, (1, 4))["CLOUD_TPU_TASK_ID"] == "5"
