"""Meshes of several dimensions, and how tensors change their places on them."""

import itertools

import torch
import torch.distributed as dist

from tests.distributed.ranks import case
from tests.distributed.training.fsdp2 import sharded
from tests.distributed.training.models import (
    STEPS,
    adamw,
    alone,
    batch,
    close,
    cpu_mesh,
    loss_of,
    made,
    model,
    rank,
    size,
    train,
)


@case(ranks=(4,))
def fsdp2_hybrid():
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("tpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    for reshard in (True, False):
        m = sharded(reshard, mesh=mesh)
        train(m, adamw(m), "tpu")
        close(m.state_dict(), alone()[0])
        part = m.head.weight.to_local()
        assert part.shape[0] == (7, 6)[mesh.get_local_rank("shards")]
    m = sharded(2)  # between forward and backward a rank keeps a half, and not a quarter
    train(m, adamw(m), "tpu")
    close(m.state_dict(), alone()[0])


@case(ranks=(4,))
def fsdp2_with_tensor_parallel():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("tpu", (2, 2), mesh_dim_names=("data", "tensor"))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    m = model().to("tpu")
    for block in m.blocks:
        parallelize_module(block, mesh["tensor"], plan)
        fully_shard(block, mesh=mesh["data"])
    fully_shard(m, mesh=mesh["data"])
    one = model()
    optimizers = [made(torch.optim.AdamW, x) for x in (m, one)]
    half = slice(4 * mesh.get_local_rank("data"), 4 * mesh.get_local_rank("data") + 4)
    for step in range(STEPS):
        ids = batch(step, -1)
        for x, part, optimizer in ((m, ids[half].to("tpu"), optimizers[0]), (one, ids, optimizers[1])):
            loss_of(x(part), part).backward()
            optimizer.step()
            optimizer.zero_grad()
    weight = m.blocks[0].up.weight
    assert weight.to_local().shape == (16, 16), "each rank has a quarter"
    close(m.state_dict(), one.state_dict())


@case
def redistributions():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("tpu", (size(),))
    whole = torch.arange(5.0 * 7).view(5, 7)
    for first in (Shard(0), Shard(1), Replicate()):
        x = distribute_tensor(whole.to("tpu"), mesh, [first])
        for second in (Shard(0), Shard(1), Replicate()):
            y = x.redistribute(mesh, [second])
            torch.testing.assert_close(y.full_tensor().cpu(), whole)
            torch.testing.assert_close((y @ y.t()).full_tensor().cpu(), whole @ whole.t())
            torch.testing.assert_close(y.sum(0).full_tensor().cpu(), whole.sum(0))
    from torch.distributed.tensor import DTensor

    x = DTensor.from_local(whole.to("tpu"), mesh, [Partial()])
    for second in (Shard(0), Shard(1), Replicate()):
        torch.testing.assert_close(x.redistribute(mesh, [second]).full_tensor().cpu(), whole * size())
    torch.testing.assert_close((x.mean() + 1).full_tensor().cpu(), (whole * size()).mean() + 1)


@case(ranks=(4, 8))
def redistributions_of_two_dimensions():
    """Between all pairs of placements, of a tensor whose dimensions the mesh does not divide."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("tpu", (2, size() // 2))
    whole = torch.arange(5.0 * 7 * 3).view(5, 7, 3)
    places = list(itertools.product((Replicate(), Shard(0), Shard(1)), repeat=2))
    for first, second in itertools.product(places, places):
        x = distribute_tensor(whole.to("tpu"), mesh, first).redistribute(mesh, second)
        assert x.placements == tuple(second)
        torch.testing.assert_close(x.to_local().cpu(), distribute_tensor(whole, cpu_mesh(), second).to_local())
        torch.testing.assert_close((x * 2).sum(1).full_tensor().cpu(), (whole * 2).sum(1))
    for kind, exact in (("sum", whole * size()), ("avg", whole), ("max", whole), ("min", whole)):
        x = DTensor.from_local(whole.to("tpu"), mesh, [Partial(kind)] * 2)
        for second in places:
            torch.testing.assert_close(x.redistribute(mesh, second).full_tensor().cpu(), exact)


@case(ranks=(4,))
def mesh_of_three_dimensions():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("tpu", (2, 1, 2), mesh_dim_names=("stages", "replicas", "parts"))
    for name, others in (("stages", rank() % 2 * 2 + 2), ("replicas", rank()), ("parts", rank() // 2 * 4 + 1)):
        x = torch.full((3,), float(rank()), device="tpu")
        dist.all_reduce(x, group=mesh.get_group(name))
        torch.testing.assert_close(x.cpu(), torch.full((3,), float(others)))
    flat = mesh["replicas", "parts"]._flatten("all")
    assert flat.size() == 2
    whole = torch.arange(48.0).view(4, 12)
    x = distribute_tensor(whole.to("tpu"), mesh, [Shard(0), Replicate(), Shard(1)])
    assert x.to_local().shape == (2, 6)
    torch.testing.assert_close((x @ x.t()).full_tensor().cpu(), whole @ whole.t())
