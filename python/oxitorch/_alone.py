"""`torch.distributed` where one process stands for all, as `oxitorch preflight` runs rank 0 of a script and no other.

All ranks are taken to do what this one does, with the same values: a barrier is passed, a sum is that of equal
numbers, each object of `all_gather_object` is this rank's. What another rank would have to say first is refused, as is
a wait for a key of the store that nobody will set.
"""

import datetime
import functools
import multiprocessing
import os
import threading

import torch


def install(c10d, folder: str) -> None:
    """Changes `torch.distributed.distributed_c10d`; the folder is told how many processes there would be."""

    class ProcessGroupGloo(c10d.ProcessGroupGloo):
        """Gloo's place, for the host's memory."""

        def __new__(cls, store, rank, size, timeout=c10d.default_pg_timeout, **_):
            group = c10d.ProcessGroup(store, rank, size)
            _add(group, timeout)
            return group._get_backend(torch.device("cpu"))

    def rendezvous(_url, rank=-1, world_size=-1, **_):
        rank, size = _place(rank, "RANK", 0), _place(world_size, "WORLD_SIZE", 1)
        if multiprocessing.parent_process() is None:
            with open(os.path.join(folder, "processes"), "w", encoding="ascii") as f:
                f.write(str(size))
        yield _store(c10d, size), rank, size

    theirs = c10d._new_process_group_helper

    @functools.wraps(theirs)
    def _new_process_group_helper(*args, **kwargs):
        made = theirs(*args, **kwargs)
        group = made[0]
        if isinstance(group, c10d.ProcessGroup) and torch.device("cpu") not in group._device_types:
            # Its backends know its name, and it says what one of them knows.
            name, description = group.group_name, group.group_desc
            _add(group, c10d.default_pg_timeout)
            group._set_group_name(name)
            group._set_group_desc(description)
        return made

    # PyTorch looks for these when it makes a group.
    c10d.ProcessGroupGloo = ProcessGroupGloo
    c10d.rendezvous = rendezvous
    c10d._new_process_group_helper = _new_process_group_helper
    # Objects go by the host's memory, where their bytes are known.
    c10d._get_object_coll_device = lambda group=None: "cpu"


def _add(group, timeout: datetime.timedelta) -> None:
    """Gives a group what stands for gloo."""
    torch.ops.oxitorch._alone(group.boxed(), round(timeout.total_seconds() * 1e3))


def _place(asked: int, variable: str, default: int) -> int:
    return asked if asked >= 0 else int(os.environ.get(variable, default))


@functools.cache
def _store_class(base: type) -> type:
    class Store(base):
        """What all ranks have written who do what this one does. Nothing in it waits."""

        def __init__(self, size: int):
            super().__init__()
            self.size, self.values, self.lock = size, {}, threading.Lock()
            self.set_timeout(datetime.timedelta(minutes=5))

        def clone(self):
            return self

        def set(self, key, value):
            with self.lock:
                self.values[key] = _bytes(value)

        def get(self, key):
            self.wait([key])
            return self.values[key]

        def add(self, key, amount):
            """As the last rank to come."""
            with self.lock:
                n = int(self.values.get(key, b"0")) + amount * self.size
                self.values[key] = str(n).encode()
            return n

        def compare_set(self, key, expected, desired):
            with self.lock:
                value = self.values.get(key)
                if (value is None and not expected) or value == _bytes(expected):
                    self.values[key] = _bytes(desired)
                return self.values.get(key, _bytes(expected))

        def check(self, keys):
            return all(key in self.values for key in keys)

        def wait(self, keys, timeout=None):
            if missing := [key for key in keys if key not in self.values]:
                raise RuntimeError(
                    f"nobody sets {', '.join(missing)} in the store of the process group: "
                    "preflight runs rank 0 alone, and the other processes are not there"
                )

        def delete_key(self, key):
            with self.lock:
                return self.values.pop(key, None) is not None

        def num_keys(self):
            return len(self.values)

    return Store


def _store(c10d, size: int):
    store = _store_class(c10d.Store)(size)
    _stores.append(store)
    return store


# Groups hold what is C++ of them, and without the rest nothing answers.
_stores: list = []


def _bytes(value) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
