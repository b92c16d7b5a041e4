"""The cases of `jitted.py` in 2 and 4 processes, and what ranks say of functions that fail."""

import re

import pytest

from tests.distributed import plugin, ranks

outcomes = ranks.Outcomes()


@pytest.mark.parametrize("size, name", ranks.parameters("jitted", (2, 4)))
def test_jitted(size, name):
    outcomes.check("jitted", size, name)


by_programs = ranks.Outcomes(plugin.environ)


@pytest.mark.slow
@pytest.mark.parametrize("name", ranks.names("jitted", 2))
def test_collectives_that_are_programs(name):
    by_programs.check("jitted", 2, name)


BEGINS = """
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

dist.init_process_group("tpu", store=dist.HashStore(), rank=0, world_size=1)
model = fully_shard(torch.nn.Linear(3, 2).to("tpu"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

@torch.tpu.jit
def step(x):
    optimizer.zero_grad()
    loss = model(x).square().sum()
    loss.backward()
    optimizer.step()
    return loss.detach()

x = torch.ones(4, 3, device="tpu")
losses = [step(x).item() for _ in range(5)]
assert losses == sorted(losses, reverse=True) and losses[0] > losses[-1], losses
assert step.traces == 2, step
dist.destroy_process_group()
"""


def test_fsdp2_begins_in_a_traced_function(python):
    python(BEGINS)


FAULTS = """
import json, os, sys, time
from datetime import timedelta
import torch
import torch.distributed as dist

rank = int(os.environ["RANK"])
dist.init_process_group("tpu", timeout=timedelta(seconds=4))
torch.tpu.set_device(rank)
other = dist.new_group([0, 1], timeout=timedelta(seconds=4))

@torch.tpu.jit
def f(x):
    y = x * 2
    dist.all_reduce(y, group=other)
    return y + 1

x, said = torch.ones(5, device="tpu"), []
for call in range(3):
    f(x)
torch.tpu.synchronize()
begin = time.monotonic()
if rank == 0:
    try:
        f(x).cpu()
    except RuntimeError as e:
        said.append(str(e))
    try:
        f(x).cpu()
    except RuntimeError as e:
        said.append(str(e))
else:
    KIND
    time.sleep(1)
sys.stdout.write("RESULT " + json.dumps([rank, said, time.monotonic() - begin]) + "\\n")
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.parametrize(
    "kind, message",
    [
        ("time.sleep(8)", "rank 0: number 4, all_reduce.* at .*script.py:15 in f\n.*rank 1: says nothing.*timeout="),
        pytest.param(
            "dist.all_reduce(torch.ones(7, device='tpu'), group=other)",
            "the ranks do not do the same:\n.*rank 0: .*script.py:15 in f\n.*rank 1: .*script.py:33 in <module>",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["timeout", "mismatch"],
)
def test_a_failure_names_the_line_of_the_function(torchrun, kind, message):
    (_, said, seconds), _ = torchrun(FAULTS.replace("KIND", kind), check=False).results()
    assert re.search(message, said[0]), said[0]
    # As in eager mode, a group that has failed does no more.
    assert "cannot go on, as a collective failed before" in said[1]
    assert seconds < 15
