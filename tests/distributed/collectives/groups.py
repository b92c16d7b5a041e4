"""Groups of some of the ranks."""

import torch
import torch.distributed as dist

from tests.distributed.collectives.data import data, rank, same, size
from tests.distributed.ranks import IS_TORCH_2_11, case


def split(parts):
    """This rank's part of the group."""
    if IS_TORCH_2_11:  # which splits groups of CUDA alone
        return dist.new_subgroups_by_enumeration(parts, backend="tpu")[0]
    return dist.split_group(split_ranks=parts)


@case
def groups():
    evens, odds = (list(range(first, size(), 2)) for first in (0, 1))
    pair = [dist.new_group(ranks) for ranks in (evens, odds) if ranks]
    mine, members = pair[rank() % 2], (evens, odds)[rank() % 2]
    x = data(3, device="tpu")
    dist.all_reduce(x, group=mine)
    same(x, sum(data(3, of=r) for r in members))
    own, _ = dist.new_subgroups(1)
    dist.all_reduce(x, group=own)
    same(x, sum(data(3, of=r) for r in members))
    own = split([ranks for ranks in (evens, odds) if ranks])
    x = data(3, device="tpu")
    dist.all_reduce(x, group=own)
    same(x, sum(data(3, of=r) for r in members))
    named, _ = dist.new_subgroups_by_enumeration([ranks for ranks in (evens, odds) if ranks], backend="tpu")
    assert dist.get_process_group_ranks(named) == members
    last = len(members) - 1
    x = data(3, device="tpu")
    dist.broadcast(x, group=named, group_src=last)
    same(x, data(3, of=members[last]))
    dist.reduce(x, group=named, group_dst=0)
    same(x, data(3, of=members[last]) * (len(members) if rank() == members[0] else 1))
    if last > 0 and rank() in (members[0], members[last]):
        if rank() == members[0]:
            dist.send(data(2, device="tpu"), group=named, group_dst=last)
        else:
            dist.recv(x[:2], group=named, group_src=0)
            same(x[:2], data(2, of=members[0]))
    dist.destroy_process_group(named)


@case
def groups_of_uneven_sizes():
    """One of a single rank and one of the others, and such as overlap: each does all that a group does."""
    ranks = list(range(size()))
    parts = [ranks[:1], ranks[1:]]
    made = [dist.new_group(members) for members in (*parts, ranks[:-1], ranks[::-1])]
    local = dist.new_group(parts[min(rank(), 1)], use_local_synchronization=True)
    for group in (split(parts), local, *made):
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            continue
        members = dist.get_process_group_ranks(group)
        n, place = len(members), members.index(rank())
        each = [data(n, 2, of=r) for r in members]
        x = data(n, 2, device="tpu")
        dist.all_reduce(x, group=group)
        same(x, sum(each))
        out = torch.empty(n * n, 2, device="tpu")
        dist.all_gather_into_tensor(out, data(n, 2, device="tpu"), group=group)
        same(out, torch.cat(each))
        out = torch.empty(1, 2, device="tpu")
        dist.reduce_scatter_tensor(out, data(n, 2, device="tpu"), dist.ReduceOp.AVG, group=group)
        same(out, (sum(each) / n)[place : place + 1])
        out = torch.empty(n, 2, device="tpu")
        dist.all_to_all_single(out, data(n, 2, device="tpu"), group=group)
        same(out, torch.stack([e[place] for e in each]))
        x = data(n, 2, device="tpu")
        dist.broadcast(x, members[-1], group=group)
        same(x, each[-1])
        things = [None] * n
        dist.all_gather_object(things, rank(), group=group)
        assert things == members
        dist.barrier(group)
