"""Device tensors that are sent to another process, through `torch.multiprocessing`'s queues and pipes or as arguments.

Memory of the device cannot be shared, so the storage is copied: through shared memory of the host, as a CPU tensor
goes, and to the same device in the process that receives it. Tensors of one message that share a storage share one
there, too.
"""

from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import ForkingPickler

import torch
from torch.multiprocessing.reductions import reduce_storage


def install() -> None:
    """Tells Python's pickler between processes, as PyTorch does for its own devices."""
    ForkingPickler.register(torch.UntypedStorage, _reduce)


def _reduce(storage: torch.UntypedStorage):
    if storage.device.type != "tpu":
        return reduce_storage(storage)
    device, on_host = str(storage.device), storage.cpu()
    if get_spawning_popen() is None:
        return _rebuild, (device, on_host)
    # The child inherits descriptors when it starts, and the copy's would be closed by then.
    return _rebuild_from_bytes, (device, torch.tensor([], dtype=torch.uint8).set_(on_host).numpy().tobytes())


def _rebuild(device: str, on_host: torch.UntypedStorage) -> torch.UntypedStorage:
    return on_host.to(device=device)


def _rebuild_from_bytes(device: str, on_host: bytes) -> torch.UntypedStorage:
    if not on_host:
        return torch.UntypedStorage(0, device=device)
    return _rebuild(device, torch.frombuffer(bytearray(on_host), dtype=torch.uint8).untyped_storage())
