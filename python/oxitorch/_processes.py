"""Several processes as one client of the plugin: each says where it is, and they meet in torch.distributed's store."""

import os
import socket
from collections.abc import Mapping

import torch

from oxitorch import _activate

_own: list[int] | None = None


def devices(store, rank: int, size: int) -> list[int]:
    """The id of each rank's device among those of the client; nothing where each process has a client of its own.

    The first call is that of the default process group, and starts the device.
    """
    global _own
    core = _activate.core()
    platform = core.may_span()
    if platform is None:
        return []
    if _is_default_group():
        _own = _join(core, platform, store, rank, size)
    if not _own:
        return []
    store.set(f"oxitorch/device/{rank}", str(_own[0]))
    return [int(store.get(f"oxitorch/device/{r}")) for r in range(size)]


def _is_default_group() -> bool:
    return torch.distributed.distributed_c10d.GroupMember.WORLD is None


def _join(core, platform: str, store, rank: int, size: int) -> list[int]:
    first, count = here(store, rank, size)
    if platform == "tpu" and size > 1:
        os.environ.update(tpu_environment(os.environ, addresses(store, rank, size, first), rank, (first, count)))
    # Where the launcher shows each process one GPU, that is its first.
    shown = [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
    own = core.join((rank, size), (first, count), 0 if len(shown) == 1 else first, store)
    if size > 1 and torch.tpu.device_count() > 1:
        torch.tpu.set_device(first)  # the others are those of other processes
    return own


def here(store, rank: int, size: int, environ: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """The number of this process among those of its machine, and how many these are."""
    said = environ.get("LOCAL_RANK", ""), environ.get("LOCAL_WORLD_SIZE", "")
    if all(text.isascii() and text.isdecimal() for text in said):
        return int(said[0]), int(said[1])
    hosts = _tell(store, "host", rank, size, socket.gethostname())
    return hosts[:rank].count(hosts[rank]), hosts.count(hosts[rank])


def addresses(store, rank: int, size: int, first: int) -> list[str]:
    """Where libtpu of each process listens."""
    return _tell(store, "address", rank, size, f"{socket.gethostname()}:{_TPU_PORT + first}")


def _tell(store, what: str, rank: int, size: int, text: str) -> list[str]:
    """What all ranks say."""
    store.set(f"oxitorch/{what}/{rank}", text)
    return [store.get(f"oxitorch/{what}/{r}").decode() for r in range(size)]


# The first port of libtpu's processes, as its documentation has it.
_TPU_PORT = 8476
# How the chips of one machine lie when each process has one.
_TPU_BOUNDS = {1: "1,1,1", 4: "2,2,1", 8: "2,4,1"}


def tpu_environment(
    environ: Mapping[str, str], addresses: list[str], rank: int, here: tuple[int, int]
) -> dict[str, str]:
    """What libtpu has to be told of the processes, each of which takes one chip, beside what it is told already.

    A process for each machine needs nothing: it takes all of its chips, and the machine says which slice it is of.
    """
    first, count = here
    if count == 1:
        return {}
    wanted = {
        "TPU_PROCESS_ADDRESSES": ",".join(addresses),
        "TPU_PROCESS_PORT": addresses[rank].rpartition(":")[2],
        "CLOUD_TPU_TASK_ID": str(rank),
        "TPU_VISIBLE_CHIPS": str(first),
        "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
    }
    if "TPU_PROCESS_BOUNDS" not in environ:
        if len(addresses) != count or count not in _TPU_BOUNDS:
            raise RuntimeError(
                f"{len(addresses)} processes, {count} of them on this machine: how the chips of a TPU lie is known for "
                f"one machine with {', '.join(map(str, _TPU_BOUNDS))} of them\n"
                "hint: TPU_PROCESS_BOUNDS says it, for instance 2,4,1"
            )
        wanted["TPU_PROCESS_BOUNDS"] = _TPU_BOUNDS[count]
    return {name: value for name, value in wanted.items() if name not in environ}
