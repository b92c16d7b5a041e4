"""Checkpoints of several ranks."""

import itertools

import torch
import torch.distributed as dist

from tests.distributed.ranks import case
from tests.distributed.training.fsdp2 import sharded
from tests.distributed.training.models import adamw, alone, close, model, rank, size, train


@case
def checkpoints():
    import torch.distributed.checkpoint as dcp

    m = sharded()
    optimizer = adamw(m)
    train(m, optimizer, "tpu")
    folder = shared_folder()
    dcp.save({"model": m.state_dict()}, checkpoint_id=folder)
    other = zeroed(sharded())
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    other.load_state_dict(state["model"])
    close(other.state_dict(), alone()[0])
    one = model().state_dict()  # a process of its own, without the device
    dcp.load({"model": one}, checkpoint_id=folder, no_dist=True)
    close(one, alone()[0])


def shared_folder():
    """A folder of rank 0, known to all."""
    import tempfile

    folder = [tempfile.mkdtemp() if rank() == 0 else None]
    dist.broadcast_object_list(folder)
    return folder[0]


def zeroed(m):
    with torch.no_grad():
        for p in m.parameters():
            p.zero_()
    return m


@case
def checkpoints_in_the_background():
    """What is saved is what was there at the call, whatever the next steps do."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    m = sharded()
    optimizer = adamw(m)
    train(m, optimizer, "tpu")
    folder = shared_folder()
    model_state, optimizer_state = get_state_dict(m, optimizer)
    saved = dcp.async_save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    train(m, optimizer, "tpu")
    saved.result()
    later = {name: p.full_tensor().cpu() for name, p in m.state_dict().items()}
    other = zeroed(sharded())
    again = adamw(other)
    model_state, optimizer_state = get_state_dict(other, again)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(other, again, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    close(other.state_dict(), alone()[0])
    train(other, again, "tpu")
    close(other.state_dict(), later)


@case(ranks=(4, 8))
def checkpoints_of_other_numbers_of_ranks():
    """What some ranks saved some others load, and one process without the device."""
    import torch.distributed.checkpoint as dcp

    for saving, loading, one in meshes_of_other_sizes():
        folder = shared_folder()
        if saving.get_coordinate() is not None:
            group = saving.get_group()
            dcp.save({"model": sharded(mesh=saving).state_dict()}, checkpoint_id=folder, process_group=group)
        dist.barrier()
        if loading.get_coordinate() is not None:
            state = {"model": zeroed(sharded(mesh=loading)).state_dict()}
            dcp.load(state, checkpoint_id=folder, process_group=loading.get_group())
            close(state["model"], one)
        single = zeroed(model()).state_dict()
        dcp.load({"model": single}, checkpoint_id=folder, no_dist=True)
        close(single, one)


def meshes_of_other_sizes():
    """Two meshes of unlike sizes, for all orders of 2, 4 and 8 that there are, and a model's parameters."""
    from torch.distributed.device_mesh import DeviceMesh

    meshes = [DeviceMesh("tpu", list(range(n))) for n in (2, 4, 8) if n <= size()]
    wanted = {name: t.clone() for name, t in model().state_dict().items()}
    return [(saving, loading, wanted) for saving, loading in itertools.permutations(meshes, 2)]
