"""PyTorch's tests of torch.distributed, which are installed with torch, as tests of the device and of the CPU.

They know gloo with tensors of the CPU and NCCL with those of CUDA. Here they are told that the backend is gloo, and get
the device's group; CUDA's devices are the device's; and what a test that never speaks of CUDA makes, it makes on the
device. Each test runs in `RANKS` processes, forked from one that has imported PyTorch.
"""

import inspect
import os
import sys
import types

NAME = "distributed_test"
RANKS = 4


def load() -> types.ModuleType:
    """A module with a class of tests for the device and one for the CPU."""
    os.environ |= {"BACKEND": "gloo", "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
    import torch
    from torch.testing._internal.distributed import distributed_test

    class Forked(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        def setUp(self):
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

        @classmethod
        def _run(cls, rank, test_name, file_name, pipe, **kwargs):
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            code = inspect.getsource(inspect.unwrap(getattr(cls, test_name)))
            for without in ("cuda=False", "rank_to_GPU=None"):
                code = code.replace(without, "")
            cls.prepare(rank, any(word in code for word in ("cuda", "_gpu", "rank_to_GPU")))
            super()._run(rank, test_name, file_name, pipe, **kwargs)

    class DistributedTPU(Forked):
        device_type = "tpu"
        prepare = staticmethod(be_cuda)

    class DistributedCPU(Forked):
        device_type = "cpu"

        @staticmethod
        def prepare(rank, names_cuda):
            torch.accelerator.is_available = lambda: False
            torch.accelerator.device_count = lambda: 0
            torch.accelerator.current_accelerator = lambda check_available=False: None

    module = types.ModuleType(NAME)
    for case in (DistributedTPU, DistributedCPU):
        case.__qualname__ = case.__name__
        case.__module__ = NAME
        setattr(module, case.__name__, case)
    sys.modules[NAME] = module
    return module


def be_cuda(rank: int, names_cuda: bool) -> None:
    """Has this process take CUDA's devices, and gloo, for the device's."""
    import torch
    import torch.distributed as dist
    from torch.overrides import TorchFunctionMode
    from torch.testing._internal.distributed import distributed_test
    from torch.utils._device import _device_constructors

    factories = () if names_cuda else _device_constructors()

    def device_of(index) -> torch.device:
        index = torch.device(index).index if isinstance(index, (str, torch.device)) else index
        return torch.device("tpu", torch.tpu.current_device() if index is None else index)

    def mapped(value):
        if isinstance(value, str) and value.partition(":")[0] == "cuda":
            return "tpu" + value[4:]
        if isinstance(value, torch.device) and value.type == "cuda":
            return torch.device(mapped(str(value)))
        if type(value) in (list, tuple):
            return type(value)(map(mapped, value))
        if type(value) is dict:
            return {mapped(k): mapped(v) for k, v in value.items()}
        return value

    class Mapped(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            kwargs = {k: mapped(v) for k, v in (kwargs or {}).items()}
            if func in factories and kwargs.get("device") is None:
                kwargs["device"] = device_of(None)
            return func(*map(mapped, args), **kwargs)

    def with_backend(f):
        def called(*args, **kwargs):
            if kwargs.get("backend") in ("gloo", "nccl", "tpu"):
                kwargs["backend"] = "cpu:gloo,tpu:tpu"
            return f(*map(mapped, args), **{k: mapped(v) for k, v in kwargs.items()})

        return called

    def with_devices(f):
        return lambda *args, **kwargs: f(*map(mapped, args), **{k: mapped(v) for k, v in kwargs.items()})

    for name in ("init_process_group", "new_group", "new_subgroups", "new_subgroups_by_enumeration"):
        setattr(dist, name, with_backend(getattr(dist, name)))
    dist.get_backend = lambda group=None: "tpu"  # a group of two backends has no name of one
    profiled = [name for name in vars(distributed_test) if name.endswith("PROFILING_SUPPORTED_BACKENDS")]
    for name in profiled:
        getattr(distributed_test, name).append("tpu")  # else these tests look at no profile
    torch.load = with_devices(torch.load)
    ddp = torch.nn.parallel.DistributedDataParallel
    ddp.__init__ = with_devices(ddp.__init__)
    for name in ("device_count", "current_device", "synchronize", "manual_seed", "Stream", "stream"):
        setattr(torch.cuda, name, getattr(torch.tpu, name))
    torch.cuda.set_device = lambda device: torch.tpu.set_device(device_of(device))
    torch.Tensor.cuda = lambda self, device=None, non_blocking=False: self.to(device_of(device))
    torch.nn.Module.cuda = lambda self, device=None: self.to(device_of(device))
    torch.tpu.set_device(rank)
    Mapped().__enter__()
