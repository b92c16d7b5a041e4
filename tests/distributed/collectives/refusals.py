"""Ranks that do not do the same, and arguments that are refused."""

import pytest
import torch
import torch.distributed as dist

from tests.distributed.collectives.data import data, rank, same, size
from tests.distributed.ranks import case


@case
def ranks_may_diverge():
    x = data(4, device="tpu")
    if rank() == 0:  # logs, evaluates, saves
        assert (x * 3).sum().item() >= 0
        torch.ones(10, device="tpu").cumsum(0).cpu()
    dist.all_reduce(x)
    if rank() == size() - 1:
        (x + 1).tolist()
    dist.all_reduce(x)
    same(x, sum(data(4, of=r) for r in range(size())) * size())


@case
def ranks_that_do_not_do_the_same():
    def failing(words, f):
        group = dist.new_group(use_local_synchronization=False)
        with pytest.raises(RuntimeError, match=words):
            f(group)
            dist.barrier(group)  # who only sent has nothing to read
        with pytest.raises(RuntimeError, match="cannot go on, as a collective failed before"):
            dist.all_reduce(torch.ones(1, device="tpu"), group=group)

    def sizes(group):
        x = torch.ones(1000 + rank(), device="tpu")
        dist.all_reduce(x, group=group)
        x.tolist()

    def dtypes(group):
        x = torch.ones(1000, dtype=torch.float32 if rank() else torch.int32, device="tpu")
        dist.all_reduce(x, group=group)
        x.tolist()

    def operations(group):
        x = torch.ones(1000, device="tpu")
        if rank() == 0:
            dist.broadcast(x, 0, group=group)
        else:
            dist.all_reduce(x, group=group)
        torch.tpu.synchronize()

    def splits(group):
        x, out = torch.ones(2 * size(), device="tpu"), torch.empty(2 * size() + rank(), device="tpu")
        into = [2] * size()
        into[0] += rank()
        dist.all_to_all_single(out, x, into, [2] * size(), group=group)
        torch.tpu.synchronize()

    def far_apart(group):
        x = torch.ones(1 if rank() == 0 else 1 << 20, device="tpu")
        dist.all_reduce(x, group=group)
        x.tolist()

    failing(r"do not do the same:\s+rank 0: all_reduce.Float.1000., op=SUM. at .*refusals.py:\d+", sizes)
    failing(r"rank 0: all_reduce.Float.1., op=SUM. at .*\s+rank 1: all_reduce.Float.1048576., op=SUM.", far_apart)
    failing(r"rank 1: all_reduce.Float.1000., op=SUM. at .*refusals.py:\d+", dtypes)
    failing(r"rank 0: broadcast.Float.1000., root=0. at .*refusals.py:\d+", operations)
    failing("bytes to this one|another rank is sent", splits)

    group = dist.new_group()
    if rank() == 0:
        dist.send(torch.ones(3, device="tpu"), 1, group=group)
    if rank() == 1:
        x = torch.empty(4, device="tpu")
        dist.recv(x, 0, group=group)
        with pytest.raises(RuntimeError, match="rank 0 sent 12 bytes, and 16 were expected"):
            x.tolist()


@case
def bad_arguments():
    with pytest.raises(RuntimeError, match=r"Cannot use ReduceOp\.BAND with"):
        dist.all_reduce(torch.ones(2, device="tpu"), dist.ReduceOp.BAND)
    with pytest.raises(RuntimeError, match="output tensor size must be equal to world_size times"):
        dist.all_gather_into_tensor(torch.empty(size() * 2 + 1, device="tpu"), torch.ones(2, device="tpu"))
    with pytest.raises(RuntimeError, match="all_gather: the own output has 3 elements, the input 2"):
        dist.all_gather([torch.empty(3, device="tpu") for _ in range(size())], torch.ones(2, device="tpu"))
    with pytest.raises(RuntimeError, match="unsupported operation: more than one element"):
        dist.all_reduce(torch.ones(1, device="tpu").expand(3))
    for tag in (-1, 2**31 - 1):
        with pytest.raises(RuntimeError, match="tags are from 0 to 2147418111"):
            dist.send(torch.ones(1, device="tpu"), (rank() + 1) % size(), tag=tag)
    x = data(2, device="tpu")
    dist.all_reduce(x)
    same(x, sum(data(2, of=r) for r in range(size())))


@case
def sparse_tensors_are_refused():
    x = torch.eye(3, device="tpu").to_sparse()
    for collective in (dist.all_reduce, lambda t: dist.broadcast(t, 0), lambda t: dist.all_gather([t, t], t)):
        with pytest.raises((NotImplementedError, RuntimeError), match=r"sparse|strided|dense"):
            collective(x)
    same(x.to_dense(), torch.eye(3))
    y = torch.ones(2, device="tpu")
    dist.all_reduce(y)
    same(y, torch.full((2,), float(size())))
