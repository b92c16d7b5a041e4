"""The process group of device tensors, for `torch.distributed`.

`dist.init_process_group()` takes it for tensors of the device. It is C++ (`csrc/process_group.h`): its collectives are
recorded like operations. On the cpu platform gloo carries the bytes between processes, from and into the device's
memory; elsewhere the processes have one client together, and collectives are programs of it.
"""

from oxitorch import _after_import


def install() -> None:
    """Makes it known to `torch.distributed` once that is imported."""
    _after_import.call({"torch.distributed.distributed_c10d": _register})


def _register(c10d) -> None:
    c10d.Backend.register_backend("tpu", _create, extended_api=True, devices=["tpu"])


def _create(options, _backend_options):
    import torch
    import torch.distributed as dist

    from oxitorch import _processes

    store, rank, size = options.store, options.group_rank, options.group_size
    host = dist.ProcessGroupGloo(store, rank, size, timeout=options.timeout)
    # A group that holds both for the call: C++ takes the one and adds the other.
    group = dist.ProcessGroup(store, rank, size)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, host)
    milliseconds = round(options.timeout.total_seconds() * 1e3)
    ranks = [int(r) for r in options.global_ranks_in_group]
    devices = _processes.devices(store, rank, size)
    torch.ops.oxitorch._process_group(group.boxed(), milliseconds, options.group_id, ranks, devices)
    return group._get_backend(torch.device("tpu"))
