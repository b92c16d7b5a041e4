"""The process group of device tensors, for `torch.distributed`.

`dist.init_process_group()` takes it for tensors of the device. It is C++ (`csrc/process_group.h`): its collectives are
recorded like operations. On the cpu platform gloo carries the bytes between processes, from and into the device's
memory; elsewhere the processes have one client together, and collectives are programs of it.
"""

import atexit
import functools
import inspect
import sys

import torch
import torch.distributed as dist

from oxitorch import _after_import, _alone, _core, _env, _processes, _ranks


def install() -> None:
    """Makes it known to `torch.distributed` once that is imported."""
    _after_import.call({"torch.distributed.distributed_c10d": _register})


def _register(c10d) -> None:
    c10d.Backend.register_backend("tpu", _create, extended_api=True, devices=["tpu"])
    if _env.records_flight():
        # From torch 2.15 on PyTorch records for whom does not, in Python's thread, as long as the rest of a call takes.
        getattr(c10d, "_FR_SELF_RECORDING_BACKENDS", set()).add("tpu")
    theirs = c10d._new_process_group_helper
    signature = inspect.signature(theirs)

    @functools.wraps(theirs)
    def _new_process_group_helper(*args, **kwargs):
        given = signature.bind(*args, **kwargs)
        if not _env.is_of_torchrun():
            # Here, as it then asks whether the device is there, before it makes the group.
            expect(given.arguments["group_size"])
        # torchrun's store outlives a restart, and gloo would find the addresses of processes that are gone.
        restart, store = _env.restart(), given.arguments["store"]
        if restart and store is not None:
            given.arguments["store"] = c10d.PrefixStore(f"restart {restart}", store)
        return theirs(*given.args, **given.kwargs)

    c10d._new_process_group_helper = _new_process_group_helper
    destroy = c10d.destroy_process_group

    @functools.wraps(destroy)
    def destroy_process_group(*args, **kwargs):
        try:
            if sys.exc_info()[0] is None:
                _finish()
        finally:
            destroy(*args, **kwargs)

    for module in (c10d, sys.modules.get("torch.distributed")):  # which has taken it already
        if getattr(module, "destroy_process_group", None) is destroy:
            module.destroy_process_group = destroy_process_group
    if _env.PREFLIGHT.read() is not None:
        _alone.install(c10d, _env.PREFLIGHT.read())


def expect(processes: int) -> None:
    """Before the device starts: a device for each of so many processes, if nobody else says how many.

    `torchrun` says it in LOCAL_WORLD_SIZE; others start processes of their own, such as `mp.spawn`.
    """
    _core.expect_processes(processes)


def _finish() -> None:
    """Runs what is recorded, as other processes wait for this one's part of a collective.

    Not where an error ends the process: the others may never come, and this one would wait for them.
    """
    if _core.is_started() and not _core.is_in_bad_fork():
        # Of a client that spans processes, the other devices are those of others.
        own = [_core.current_device()] if _processes._own else range(_core.device_count())
        for device in own:
            _core.synchronize(device)


@functools.cache
def _finish_at_exit() -> None:
    # Before the device is shut down: exit functions run in reverse.
    def end() -> None:
        if getattr(sys, "last_type", None) is None:
            _finish()
            _ranks.forget()

    atexit.register(end)


def _create(options, _backend_options):
    _finish_at_exit()
    _ranks.record(options.group_rank, options.group_size)
    store, rank, size = options.store, options.group_rank, options.group_size
    milliseconds = round(options.timeout.total_seconds() * 1e3)
    ranks = [int(r) for r in options.global_ranks_in_group] or list(range(size))
    # In preflight this class makes groups in which this process is alone.
    host = dist.distributed_c10d.ProcessGroupGloo(store, rank, size, timeout=options.timeout)
    # A group that holds both for the call: C++ takes the one and adds the other.
    group = dist.ProcessGroup(store, rank, size)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, host)
    devices = _processes.devices(store, rank, size)
    torch.ops.oxitorch._process_group(group.boxed(), milliseconds, options.group_id, ranks, devices)
    return group._get_backend(torch.device("tpu"))
