"""What there is only where the processes have one client together."""

import os

import pytest
import torch
import torch.distributed as dist

from tests.distributed.ranks import case


def names() -> list[str]:
    """The programs so far, by name."""
    return [g.name for g in torch.tpu.graphs()]


@case
def devices_are_those_of_the_machine():
    own = int(os.environ["LOCAL_RANK"])
    assert (torch.tpu.device_count(), torch.tpu.current_device()) == (dist.get_world_size(), own)
    torch.tpu.set_device(own)
    x = torch.ones(3, device=f"tpu:{own}") + 1
    assert x.device == torch.device("tpu", own)
    assert x.tolist() == [2.0, 2.0, 2.0]
    assert torch.tpu.get_device_properties(own).total_memory > 0
    assert torch.tpu.memory_allocated(own) > 0
    other = (own + 1) % dist.get_world_size()
    with pytest.raises(RuntimeError, match=f"tpu:{other} is the device of another process, and this one has tpu:{own}"):
        torch.ones(3, device=f"tpu:{other}").cpu()


@case
def metrics_count_them():
    torch.tpu.synchronize()
    torch.tpu.reset_metrics()
    x = torch.ones(1000, device="tpu")
    for _ in range(3):
        dist.all_reduce(x)
    x.sum().item()
    torch.tpu.synchronize()
    of = torch.tpu.metrics()["collectives"]["all_reduce"]
    assert (of["count"], of["bytes"]) == (3, 12000)
    assert of["time_s"] > 0


@case
def collectives_are_programs():
    size, rank = dist.get_world_size(), dist.get_rank()
    x = torch.ones(2 * size, device="tpu")
    before = names()
    dist.all_reduce(x)
    dist.broadcast(x, 1)
    dist.all_gather_into_tensor(torch.empty(2 * size * size, device="tpu"), x)
    dist.reduce_scatter_tensor(torch.empty(2, device="tpu"), x)
    dist.all_to_all_single(torch.empty(2 * size, device="tpu"), x)
    torch.tpu.synchronize()
    wanted = {"all_reduce", "collective_broadcast", "all_gather", "reduce_scatter", "all_to_all"}
    assert wanted <= set(names()[len(before) :]), names()
    # What is sent from one to another is no program: it would have to have its turn on both.
    before = len(names())
    if rank == 0:
        dist.send(x, 1)
    elif rank == 1:
        dist.recv(x, 0)
    torch.tpu.synchronize()
    assert not [n for n in names()[before:] if "permute" in n]


@case
def groups_are_programs_of_their_devices():
    size, rank = dist.get_world_size(), dist.get_rank()
    groups = [dist.new_group([r for r in range(size) if r % 2 == part]) for part in range(2)]
    group = groups[rank % 2]
    members = [r for r in range(size) if r % 2 == rank % 2]
    x = torch.full((4,), float(rank), device="tpu")
    dist.all_reduce(x, group=group)
    assert x.tolist() == [float(sum(members))] * 4
    both = dist.split_group(split_ranks=[list(range(size))[::-1]]) if hasattr(dist, "split_group") else dist.group.WORLD
    dist.all_reduce(x.fill_(1), group=both)
    assert x.tolist() == [float(size)] * 4


@case
def a_loop_of_steps_makes_no_new_programs():
    w = torch.ones(8, device="tpu", requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=0.1)
    counts = []
    for step in range(6):
        optimizer.zero_grad()
        (w * (step + 1)).sum().backward()
        dist.all_reduce(w.grad, dist.ReduceOp.AVG)
        optimizer.step()
        torch.tpu.synchronize()
        counts.append(torch.tpu.metrics()["programs"] if hasattr(torch.tpu, "metrics") else len(names()))
    assert counts[2:] == [counts[2]] * 4, counts


@case
def a_rank_that_cannot_take_part_is_named():
    """The last case: the group cannot go on."""
    rank = dist.get_rank()
    x = torch.ones(1 << 16, device="tpu") + 1
    out = torch.empty((1 << 16) * dist.get_world_size(), device="tpu")
    torch.tpu.synchronize()
    if rank == 1:
        total = torch.tpu.mem_get_info()[1]
        in_use = torch.tpu.memory_allocated()
        torch.tpu.set_per_process_memory_fraction((in_use + 4096) / total)
    with pytest.raises(RuntimeError, match="out of memory"):
        dist.all_gather_into_tensor(out, x)
        torch.tpu.synchronize()
        out.cpu()
    if rank == 1:
        torch.tpu.set_per_process_memory_fraction(1.0)
