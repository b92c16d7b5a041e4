"""Broadcast, gather, scatter and all-to-all."""

import torch
import torch.distributed as dist

from tests.distributed.collectives.data import MOVED, data, rank, same, size
from tests.distributed.ranks import case


@case
def broadcast():
    for dtype in MOVED:
        for root in range(size()):
            x = data(4, 2, dtype=dtype, device="tpu")
            dist.broadcast(x, root)
            same(x, data(4, 2, dtype=dtype, of=root))


@case
def all_gather():
    for dtype in MOVED:
        outs = [torch.empty(3, 2, dtype=dtype, device="tpu") for _ in range(size())]
        dist.all_gather(outs, data(3, 2, dtype=dtype, device="tpu"))
        for r, out in enumerate(outs):
            same(out, data(3, 2, dtype=dtype, of=r))


@case
def all_gather_of_uneven_sizes():
    outs = [torch.empty(r + 1, 2, device="tpu") for r in range(size())]
    dist.all_gather(outs, data(rank() + 1, 2, device="tpu"))
    for r, out in enumerate(outs):
        same(out, data(r + 1, 2, of=r))


@case
def all_gather_into_tensor():
    wanted = [data(3, 2, of=r) for r in range(size())]
    x = data(3, 2, device="tpu")
    for shape, joined in (((3 * size(), 2), torch.cat(wanted)), ((size(), 3, 2), torch.stack(wanted))):
        out = torch.empty(shape, device="tpu")
        dist.all_gather_into_tensor(out, x)
        same(out, joined)
    out = torch.zeros(3 * size(), 2, device="tpu")
    own = out[3 * rank() : 3 * rank() + 3]
    own.copy_(x)
    dist.all_gather_into_tensor(out, own)  # the input is a part of the output, as FSDP has it
    same(out, torch.cat(wanted))


@case
def gather_and_scatter():
    for root in range(size()):
        outs = [torch.empty(3, device="tpu") for _ in range(size())] if rank() == root else None
        dist.gather(data(3, device="tpu"), outs, root)
        for r, out in enumerate(outs or []):
            same(out, data(3, of=r))
        out = torch.empty(3, device="tpu")
        ins = [data(3, seed=r, device="tpu") for r in range(size())] if rank() == root else None
        dist.scatter(out, ins, root)
        same(out, data(3, seed=rank(), of=root))


@case
def all_to_all():
    ins = [data(r + 1, seed=r, device="tpu") for r in range(size())]
    outs = [torch.empty(rank() + 1, device="tpu") for _ in range(size())]
    dist.all_to_all(outs, ins)
    for r, out in enumerate(outs):
        same(out, data(rank() + 1, seed=rank(), of=r))


@case
def all_to_all_single():
    for dtype in MOVED:
        x = data(2 * size(), 3, dtype=dtype, device="tpu")
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x)
        same(out, torch.cat([data(2 * size(), 3, dtype=dtype, of=r).chunk(size())[rank()] for r in range(size())]))
        splits = [[r + s for s in range(size())] for r in range(size())]  # of each rank, for each
        x = data(sum(splits[rank()]), 2, dtype=dtype, device="tpu")
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x, splits[rank()], splits[rank()])
        parts = [data(sum(s), 2, dtype=dtype, of=r).split(s)[rank()] for r, s in enumerate(splits)]
        same(out, torch.cat(parts))
