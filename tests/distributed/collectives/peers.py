"""Sends and receives."""

import torch
import torch.distributed as dist

from tests.distributed.collectives.data import MOVED, data, rank, same, size
from tests.distributed.ranks import case


@case
def point_to_point():
    for dtype in MOVED:
        right, left = (rank() + 1) % size(), (rank() - 1) % size()
        x, out = data(6, dtype=dtype, device="tpu"), torch.empty(6, dtype=dtype, device="tpu")
        works = [
            dist.irecv(out, left),
            dist.isend(x, right),
        ]  # in the order in which blocking calls would wait for ever
        for work in works:
            work.wait()
        same(out, data(6, dtype=dtype, of=left))
    a, b = torch.empty(2, device="tpu"), torch.empty(2, device="tpu")
    if rank() == 0:
        dist.send(torch.full((2,), 1.0, device="tpu"), 1, tag=5)
        dist.send(torch.full((2,), 2.0, device="tpu"), 1, tag=6)
    if rank() == 1:
        works = [dist.irecv(a, 0, tag=6), dist.irecv(b, 0, tag=5)]
        for work in works:
            work.wait()
        same(a, torch.full((2,), 2.0))
        same(b, torch.full((2,), 1.0))


@case
def receive_from_any():
    if rank() == 0:
        seen = set()
        for _ in range(size() - 1):
            x = torch.empty(2, device="tpu")
            source = dist.recv(x)
            same(x, torch.full((2,), float(source)))
            seen.add(source)
        assert seen == set(range(1, size()))
    else:
        dist.send(torch.full((2,), float(rank()), device="tpu"), 0)


@case
def receives_from_any_and_from_one_rank_keep_their_order():
    wanted = [torch.full((n,), float(n)) for n in (2, 5, 1, 3)]
    if rank() == 0:
        for x in wanted:
            dist.send(x.to("tpu"), 1)
    if rank() == 1:
        got = [torch.empty_like(x, device="tpu") for x in wanted]
        dist.recv(got[0], 0)
        works = [dist.irecv(got[1]), dist.irecv(got[2], 0), dist.irecv(got[3])]  # of None: from any
        for work in works:
            work.wait()
        for x, y in zip(got, wanted, strict=True):
            same(x, y)


@case
def batched_point_to_point():
    right, left = (rank() + 1) % size(), (rank() - 1) % size()
    x, out = data(6, device="tpu"), torch.empty(6, device="tpu")
    ops = [dist.P2POp(dist.isend, x, right), dist.P2POp(dist.irecv, out, left)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    same(out, data(6, of=left))


@case
def many_sends_and_receives_at_once():
    """Between all pairs, of several sizes and dtypes; what was sent changes right after."""
    peers = [r for r in range(size()) if r != rank()]

    def message(source, target, dtype):
        return data((source + 2 * target) % 4, 5, dtype=dtype, seed=target, of=source)

    for _ in range(2):
        sent, received, ops = [], [], []
        for dtype in (torch.float32, torch.int8, torch.bfloat16):
            for peer in peers:
                sent.append(message(rank(), peer, dtype).to("tpu"))
                received.append((torch.empty_like(message(peer, rank(), dtype), device="tpu"), peer, dtype))
                ops.append(dist.P2POp(dist.isend, sent[-1], peer))
                ops.append(dist.P2POp(dist.irecv, received[-1][0], peer))
        works = dist.batch_isend_irecv(ops)
        for x in sent:
            x.zero_()
        for work in works:
            work.wait()
        for x, peer, dtype in received:
            same(x, message(peer, rank(), dtype))
