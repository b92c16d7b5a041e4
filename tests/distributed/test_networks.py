"""What ranks say when they cannot reach each other any more, or the store by which they met.

Nothing answers then, and nothing says that it does not: there is only time. Where a cable is cut, each rank has a
network namespace of its own.
"""

import contextlib
import os
import subprocess
import sys
import time

import pytest

from tests.conftest import child_environment

TIMEOUT = 5
PATIENCE = 5  # seconds after the timeout in which all ranks have said what happened
SCRIPT = f"""
import sys, time
from datetime import timedelta
import torch
import torch.distributed as dist

dist.init_process_group("tpu", timeout=timedelta(seconds={TIMEOUT}))
torch.tpu.set_device(dist.get_rank())
x = torch.ones(1000, device="tpu")
dist.all_reduce(x)
print("SUM", x.sum().item(), flush=True)
sys.stdin.readline()
begin = time.monotonic()
try:
    {{does}}
    print("SUM", x.sum().item(), flush=True)
except RuntimeError as e:
    print("TOLD", time.monotonic() - begin, "\\n", e, flush=True)
dist.destroy_process_group()
print("LEFT", flush=True)
"""


class Hosts:
    """Two namespaces with a cable between them."""

    def __init__(self, stack: contextlib.ExitStack):
        command = ["unshare", "--net", "sleep", "infinity"]
        self.ends = [stack.enter_context(subprocess.Popen(command)) for _ in range(2)]
        for end in self.ends:
            stack.callback(end.kill)
        own = os.readlink("/proc/self/ns/net")
        while any(os.readlink(f"/proc/{end.pid}/ns/net") == own for end in self.ends):
            time.sleep(0.01)
        self.set(0, "add", "end0", "type", "veth", "peer", "name", "end1", "netns", str(self.ends[1].pid))
        for i in range(2):
            subprocess.run(
                [*self.inside(i), "ip", "address", "add", f"10.7.0.{i + 1}/24", "dev", f"end{i}"], check=True
            )
            self.set(i, "set", f"end{i}", "up")
            self.set(i, "set", "lo", "up")

    def inside(self, i: int) -> list[str]:
        return ["nsenter", "--net", "--target", str(self.ends[i].pid)]

    def set(self, i: int, *words: str) -> None:
        subprocess.run([*self.inside(i), "ip", "link", *words], check=True)


@pytest.fixture
def hosts():
    with contextlib.ExitStack() as stack:
        try:
            hosts = Hosts(stack)
        except (FileNotFoundError, PermissionError, ProcessLookupError, subprocess.CalledProcessError) as e:
            pytest.skip(f"no network namespaces for this user: {e}")
        yield hosts


class Rank:
    def __init__(self, script: str, command: list[str], **env: str):
        env = child_environment(WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", OMP_NUM_THREADS="1", **env)
        self.process = subprocess.Popen(
            [*command, sys.executable, "-c", script],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def has_begun(self) -> None:
        for line in self.process.stdout:
            if line.startswith("SUM 2000.0"):
                return
        pytest.fail("it ended before")

    def goes_on(self) -> str:
        """What it prints until it ends."""
        try:
            return self.process.communicate("\n", timeout=TIMEOUT + PATIENCE + 30)[0]
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.communicate()[0] + "IT HANGS"


def is_told_in_time(printed: str) -> bool:
    [told] = [line for line in printed.splitlines() if line.startswith("TOLD")]
    return float(told.split()[1]) < TIMEOUT + PATIENCE


@pytest.mark.slow
def test_a_cable_is_cut(hosts):
    script = SCRIPT.format(does="dist.all_reduce(x); dist.all_reduce(x)")
    ranks = [
        Rank(script, hosts.inside(i), RANK=str(i), LOCAL_RANK=str(i), MASTER_ADDR="10.7.0.1", MASTER_PORT="29511",
             GLOO_SOCKET_IFNAME=f"end{i}")
        for i in range(2)
    ]  # fmt: skip
    for rank in ranks:
        rank.has_begun()
    hosts.set(0, "set", "end0", "down")
    for rank in ranks:
        rank.process.stdin.write("\n")
        rank.process.stdin.flush()
    with_store, other = (rank.goes_on() for rank in ranks)
    for i, printed in enumerate((with_store, other)):
        assert f"all_reduce(Float[1000], op=SUM), number 2 of process group 0, rank {i} of 2" in printed, printed
        assert is_told_in_time(printed), printed
        assert "LEFT" in printed, printed
    assert "rank 1: says nothing" in with_store
    assert "the store by which the ranks met does not answer" in other


STORE = """
import sys, torch.distributed as dist
store = dist.TCPStore("localhost", int(sys.argv[1]), is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.readline()
"""
ENDS = {
    "a collective": ("dist.all_reduce(x)", "SUM 4000.0"),
    "a mismatch": ("dist.all_reduce(x[: 1 + dist.get_rank()])", "TOLD"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ENDS)
def test_the_store_is_gone(kind):
    """Collectives go on without it, and failures of them are told."""
    does, says = ENDS[kind]
    env = child_environment()
    command = [sys.executable, "-c", STORE, "0"]
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as store:
        port = store.stdout.readline().strip()
        # What torchrun says of a store that it has already.
        told = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "True"}
        ranks = [Rank(SCRIPT.format(does=does), [], RANK=str(i), LOCAL_RANK=str(i), **told) for i in range(2)]
        for rank in ranks:
            rank.has_begun()
        store.kill()
    for rank in ranks:
        rank.process.stdin.write("\n")
        rank.process.stdin.flush()
    for printed in [rank.goes_on() for rank in ranks]:
        assert says in printed, printed
        assert "LEFT" in printed, printed
        assert says != "TOLD" or (is_told_in_time(printed) and "the ranks do not do the same" in printed), printed
