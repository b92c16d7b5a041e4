"""Works, coalescing, barriers and objects."""

import pytest
import torch
import torch.distributed as dist

from tests.distributed.collectives.data import data, rank, same, size
from tests.distributed.ranks import IS_TORCH_2_11, case


@case
def coalesced():
    xs = [data(3 + i, device="tpu") for i in range(3)]
    with dist._coalescing_manager(device=torch.device("tpu"), async_ops=True) as manager:
        for x in xs:
            dist.all_reduce(x)
    manager.wait()
    for i, x in enumerate(xs):
        same(x, sum(data(3 + i, of=r) for r in range(size())))
    outs = [torch.empty((3 + i) * size(), device="tpu") for i in range(3)]
    ins = [data(3 + i, device="tpu") for i in range(3)]
    with dist._coalescing_manager(device=torch.device("tpu")):
        for out, x in zip(outs, ins, strict=True):
            dist.all_gather_into_tensor(out, x)
    for i, out in enumerate(outs):
        same(out, torch.cat([data(3 + i, of=r) for r in range(size())]))
    parts = [torch.empty(3 + i, device="tpu") for i in range(3)]
    with dist._coalescing_manager(device=torch.device("tpu")):
        for part, out in zip(parts, outs, strict=True):
            dist.reduce_scatter_tensor(part, out)
    for i, part in enumerate(parts):
        same(part, data(3 + i) * size())
    xs = [data(3 + i, device="tpu") for i in range(3)]
    dist.all_reduce_coalesced(xs, dist.ReduceOp.MAX)
    for i, x in enumerate(xs):
        same(x, torch.stack([data(3 + i, of=r) for r in range(size())]).amax(0))


@case
def a_refusal_in_a_coalescing_block_ends_it():
    out, x = torch.empty(3 * size() + 1, device="tpu"), data(3, device="tpu")
    refusals = [
        lambda: dist.all_gather_into_tensor(out, x),
        lambda: dist.reduce_scatter_tensor(x, out),
        lambda: dist.all_reduce(x.to_sparse()),
    ]
    # PyTorch 2.11 takes all of a block for what the first is.
    for refused in refusals[2:] if IS_TORCH_2_11 else refusals:
        with pytest.raises((RuntimeError, NotImplementedError)), dist._coalescing_manager(device=torch.device("tpu")):
            dist.all_reduce(data(2, device="tpu"))
            refused()
        y = data(3, device="tpu")
        dist.all_reduce(y)
        same(y, sum(data(3, of=r) for r in range(size())))


@case
def forms_that_do_not_wait():
    """Each is the waiting form, and a work that can be asked."""
    parts = [3 * size()]
    total = sum(data(*parts, of=r) for r in range(size()))
    each = [data(*parts, of=r) for r in range(size())]

    def lists():
        return [torch.empty(parts, device="tpu") for _ in range(size())]

    def all_reduce(x):
        return dist.all_reduce(x, async_op=True), x, total

    def broadcast(x):
        return dist.broadcast(x, 0, async_op=True), x, each[0]

    def reduce(x):
        return dist.reduce(x, 0, async_op=True), x, total if rank() == 0 else each[rank()]

    def all_gather(x):
        outs = lists()
        return dist.all_gather(outs, x, async_op=True), outs, each

    def all_gather_into_tensor(x):
        out = torch.empty(parts[0] * size(), device="tpu")
        return dist.all_gather_into_tensor(out, x, async_op=True), out, torch.cat(each)

    def gather(x):
        outs = lists() if rank() == 0 else []
        return dist.gather(x, outs or None, 0, async_op=True), outs, each if rank() == 0 else []

    def scatter(x):
        out = torch.empty(3, device="tpu")
        given = list(x.chunk(size())) if rank() == 0 else None
        return dist.scatter(out, given, 0, async_op=True), out, each[0].chunk(size())[rank()]

    def reduce_scatter(x):
        out = torch.empty(3, device="tpu")
        return dist.reduce_scatter(out, list(x.chunk(size())), async_op=True), out, total.chunk(size())[rank()]

    def reduce_scatter_tensor(x):
        out = torch.empty(3, device="tpu")
        return dist.reduce_scatter_tensor(out, x, async_op=True), out, total.chunk(size())[rank()]

    def all_to_all(x):
        outs = [torch.empty(3, device="tpu") for _ in range(size())]
        work = dist.all_to_all(outs, list(x.chunk(size())), async_op=True)
        return work, outs, [e.chunk(size())[rank()] for e in each]

    def all_to_all_single(x):
        out = torch.empty_like(x)
        return dist.all_to_all_single(out, x, async_op=True), out, torch.cat([e.chunk(size())[rank()] for e in each])

    forms = (all_reduce, broadcast, reduce, all_gather, all_gather_into_tensor, gather, scatter, reduce_scatter,
             reduce_scatter_tensor, all_to_all, all_to_all_single)  # fmt: skip
    # All are under way before the first is waited for.
    begun = [form(data(*parts, device="tpu")) for form in forms]
    for work, got, wanted in begun:
        assert work.wait()
        pairs = zip(got, wanted, strict=True) if isinstance(got, list) else [(got, wanted)]
        for g, w in pairs:
            same(g, w)
        torch.tpu.synchronize()
        assert work.is_completed() and work.is_success()


@case
def works():
    x = data(4, device="tpu")
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    torch.tpu.synchronize()
    assert work.is_completed() and work.is_success()
    same(work.get_future().value()[0], x)
    assert [t.data_ptr() for t in work.result()] == [x.data_ptr()]
    then = dist.all_reduce(x, async_op=True).get_future().then(lambda f: f.value()[0] / size())
    same(then.wait(), x.cpu() / size())


@case
def objects():
    got = [None] * size()
    dist.all_gather_object(got, {"rank": rank(), "x": torch.ones(2)})
    assert [g["rank"] for g in got] == list(range(size()))
    things = [{"from": rank()}]
    dist.broadcast_object_list(things, 1 % size())
    assert things == [{"from": 1 % size()}]
    into = [None] * size() if rank() == 0 else None
    dist.gather_object(rank() * 2, into)
    assert rank() != 0 or into == [2 * r for r in range(size())]
    mine = [None]
    dist.scatter_object_list(mine, [{"for": r} for r in range(size())] if rank() == 0 else None, 0)
    assert mine == [{"for": rank()}]
    if rank() == 0:
        dist.send_object_list(["a", {"b": torch.arange(3)}], 1)
    elif rank() == 1:
        things = [None, None]
        assert dist.recv_object_list(things, 0) == 0
        assert things[0] == "a"
        same(things[1]["b"], torch.arange(3))


@case
def barriers():
    dist.barrier()
    dist.barrier(device_ids=[torch.tpu.current_device()])
    dist.barrier(async_op=True).wait()
    if not IS_TORCH_2_11:  # which has it for groups of gloo alone
        dist.monitored_barrier()
