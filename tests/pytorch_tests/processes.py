"""PyTorch's tests of torch.distributed, as tests of the device and of the CPU.

They know gloo with tensors of the CPU and NCCL with those of CUDA. Here both are the group of the device (or gloo), and
CUDA's devices are the device's (or the CPU). Each test runs in `RANKS` processes, forked from one that has imported
PyTorch. `distributed_test`, which is installed with torch, is told that the backend is gloo; what a test of it makes
that never speaks of CUDA, it makes on the device.
"""

import contextlib
import inspect
import os
import re
import sys
import tempfile
import time
import types
from collections.abc import Iterator
from pathlib import Path

from . import source

NAME = "distributed_test"
FOLDER = "distributed/"
RANKS = 4
# Files with tests in as many processes as they ask for, whose others stay with 4; the rest take as many as are devices.
OF_8 = (f"{FOLDER}test_device_mesh", f"{FOLDER}_tensor/")

# Words of the files that are others here. `{}` is the device.
WORDS = (
    (r'^devices = \("\w+", "hpu"\)$', 'devices = ("{}",)'),
    (r'^DEVICE_TYPE = "cpu"$', 'DEVICE_TYPE = "{}"'),
    (r'^        device = "cpu"$', '        device = "{}"'),
    (r"\.is_cuda\b", ".is_{}"),
    (r'\bself\.device_type == "cuda"', 'self.device_type == "tpu"'),
    # A pipeline compares shapes with those of its first step no more.
    (r"^( +)with self.assertRaisesRegex\(PipeliningShapeError, .*\n +_run_step\(.*\)$", r"\1pass"),
    (r"\bPipeliningShapeError\b", "PipeliningMetadataError"),
    # A ResNet-50 at a rate at which roundings grow to whole numbers: two runs of it differ on the CPU, too.
    (r"^        if HAS_TORCHVISION:$", "        if False:"),
    # Its first argument is the device, CUDA if none is named.
    (r"\bGradScaler\((?=init_scale=)", 'GradScaler("{}", '),
    # What older versions could not is tried, too.
    (r"\bunittest\.expectedFailure,$", "lambda test: test,"),
    # Of some operations newer versions of PyTorch have no samples.
    (r"assert len\(matching_opinfos\) >= 1, ", ""),
)

# The variable with the file that a process makes if it has used the device.
USED = "OXITORCH_TESTS_USED"


def load() -> types.ModuleType:
    """`distributed_test` as a module with a class of tests for the device and one for the CPU."""
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

        @staticmethod
        def prepare(rank, names_cuda):
            mode = stand_in("tpu", ("gloo", "nccl", "tpu"), makes_all=not names_cuda)
            torch.distributed.get_backend = lambda group=None: "tpu"  # a group of two backends has no name of one
            for name in [n for n in vars(distributed_test) if n.endswith("PROFILING_SUPPORTED_BACKENDS")]:
                getattr(distributed_test, name).append("tpu")  # else these tests look at no profile
            torch.tpu.set_device(rank)
            mode().__enter__()

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


def load_file(folder: Path, name: str, device: str) -> types.ModuleType:
    """A file of `FOLDER` as a module."""
    return source.load(folder / name, [(re.compile(p, re.MULTILINE), w.format(device)) for p, w in WORDS])


@contextlib.contextmanager
def imports(name: str, device: str) -> Iterator[None]:
    """Has a file of `FOLDER`, which is imported in it, take the device for what it names CUDA, in forked processes."""
    devices = 8 if name.startswith(OF_8) else RANKS
    os.environ["LOCAL_WORLD_SIZE"] = str(devices)
    os.environ.setdefault("DISTRIBUTED_TESTS_DEFAULT_TIMEOUT", "100")
    import torch
    import torch.distributed as dist

    if device == "cpu":
        torch.accelerator.is_available = lambda: True
        torch.accelerator.current_accelerator = lambda check_available=False: torch.device("cpu")
        torch.accelerator.set_device_index = torch.accelerator.synchronize = lambda *_: None
        torch.accelerator.current_device_index = lambda: 0
        torch.accelerator.device_count = torch.cpu.device_count = lambda: devices
        from torch.testing._internal.distributed import multi_threaded_pg

        multi_threaded_pg._accelerator_devices = lambda _: set()
    from torch._dynamo.device_interface import CudaInterface
    from torch.testing._internal import common_cuda, common_device_type, common_distributed, common_fsdp, common_utils
    from torch.testing._internal.distributed._shard.sharded_tensor import ShardedTensorTestBase
    from torch.testing._internal.distributed._tensor import common_dtensor

    mode, is_available = stand_in(device, ("gloo", "nccl")), torch.cuda.is_available
    torch.cuda.is_available = lambda: True
    torch.cuda.get_device_capability = lambda *_: (0, 0)
    # What keeps CUDA busy for so many cycles, of which a millisecond has one, keeps the process.
    torch.cuda._sleep = lambda cycles: time.sleep(cycles / 1000)
    common_fsdp.get_cycles_per_ms = common_utils.get_cycles_per_ms = lambda *_: 1
    CudaInterface.is_triton_capable = lambda *_: False
    for module in (common_cuda, common_device_type, common_dtensor, common_fsdp, common_utils):
        module.TEST_CUDA = module.TEST_MULTIGPU = True
    for module in (dist, dist.distributed_c10d):
        module.is_nccl_available = module.is_backend_available = lambda *_: True
    dist.get_default_backend_for_device = lambda _: "nccl"

    class Forked(torch.multiprocessing.get_context("fork").Process):
        """A process whose first argument is its rank."""

        def run(self):
            rank = self._args[0]
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            if device == "tpu":
                torch.tpu.set_device(rank)
            try:
                with mode():
                    super().run()
            finally:
                mark_used()

    # It has a list of backends.
    init_pg, known = common_dtensor.DTensorTestBase.init_pg, "nccl" if device == "tpu" else "gloo"
    common_dtensor.DTensorTestBase.init_pg = lambda self, eager, _=None: init_pg(self, eager, known)
    # Sharded tensors are gathered on the device of a group of one backend.
    init_sharded, alone = ShardedTensorTestBase.init_pg, "tpu" if device == "tpu" else "gloo"
    ShardedTensorTestBase.init_pg = lambda self, backend="nccl": init_sharded(
        self, alone if backend == "nccl" else backend
    )
    several, threads = common_distributed.MultiProcessTestCase, common_distributed.MultiThreadedTestCase
    several._spawn_processes = lambda self: self._start_processes(Forked)
    # What files of PyTorch 2.6 call them, and that they start some classes with 2 processes.
    common_distributed.MultiProcContinousTest = common_distributed.MultiProcContinuousTest
    common_distributed.MultiProcContinuousTest._get_world_size = classmethod(lambda *_: 2)
    common_fsdp.test_compiled_fsdp = common_fsdp.compiled_fsdp_test
    torch.multiprocessing.Process = Forked
    torch.multiprocessing.set_start_method("fork", force=True)
    if name.startswith(f"{FOLDER}pipelining/"):
        pipelines_as_before()
    call = common_utils.TestCase._callTestMethod

    def called(self, method):
        in_mode = not isinstance(self, (several, threads, common_distributed.MultiProcContinuousTest))
        with mode() if in_mode else contextlib.nullcontext():
            call(self, method)

    common_utils.TestCase._callTestMethod = called
    in_thread = threads._run.__func__

    def run(cls, *args, **kwargs):
        with mode():
            in_thread(cls, *args, **kwargs)

    threads._run = classmethod(run)
    yield
    # Files choose when they are imported; PyTorch's own code would take CUDA.
    torch.cuda.is_available = is_available


def pipelines_as_before() -> None:
    """Has schedules of pipelines take what those of PyTorch 2.6 took, and not divide gradients of sums."""
    from torch.distributed.pipelining import schedules, stage

    for case in vars(schedules).values():
        init = vars(case).get("__init__") if isinstance(case, type) else None
        if "scale_grads" in getattr(init, "__annotations__", ()):
            names = inspect.getfullargspec(init).args[-len(init.__defaults__) :]
            init.__defaults__ = tuple(n != "scale_grads" and d for n, d in zip(names, init.__defaults__, strict=True))
    several = schedules.PipelineScheduleMulti
    init = several.__init__

    def placed(self, *args, stage_index_to_group_rank=None, **kwargs):
        init(self, *args, **kwargs)
        if stage_index_to_group_rank is not None:
            for each in (self, *self._stages):
                each.stage_index_to_group_rank = stage_index_to_group_rank

    several.__init__ = placed
    schedules._PipelineScheduleRuntime._load_actions = schedules._PipelineScheduleRuntime._prepare_schedule_with_comms
    stage._PipelineStageBase.submod = None  # stages of tests have none


def mark_used() -> None:
    """Says that this process has used the device, if it has."""
    import torch

    if torch.tpu.is_initialized():
        Path(os.environ[USED]).touch()


def in_a_process(run, device: str) -> dict:
    """What `run()` gives in a process of its own, whose ranks end with it; unused if none used the device."""
    import torch

    context = torch.multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        os.environ[USED] = f"{folder}/used"

        def main():
            record = run()
            mark_used()
            send.send(record)
            for child in torch.multiprocessing.active_children():
                child.kill()

        process = context.Process(target=main)
        process.start()
        send.close()
        try:
            record = receive.recv()
        except EOFError:
            process.join()
            return {"status": "crash", "why": f"the process ended with {process.exitcode}"}
        process.join()
        if record["status"] == "pass" and device == "tpu" and not Path(os.environ[USED]).exists():
            record |= {"status": "unused"}
        return record


def stand_in(device: str, backends: tuple[str, ...], makes_all: bool = False):
    """Has this process take `device` for CUDA's, and its group for these backends; gives the mode that maps devices.

    With `makes_all` a tensor of no device is made on it.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.overrides import TorchFunctionMode
    from torch.utils._device import _device_constructors

    factories = _device_constructors() if makes_all else ()
    module = getattr(torch, device)
    group = "cpu:gloo,tpu:tpu" if device == "tpu" else "gloo"

    def device_of(index) -> torch.device:
        index = torch.device(index).index if isinstance(index, (str, torch.device)) else index
        return torch.device(device, module.current_device() if index is None else index) if device == "tpu" else "cpu"

    def mapped(value):
        if isinstance(value, str) and value.partition(":")[0] == "cuda":
            return device + (value[4:] if device == "tpu" else "")
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

    def with_devices(f):
        return lambda *args, **kwargs: f(*map(mapped, args), **{k: mapped(v) for k, v in kwargs.items()})

    def with_backend(f):
        def called(*args, **kwargs):
            args = [group if isinstance(a, str) and a in backends else a for a in args]
            if kwargs.get("backend") in backends:
                kwargs["backend"] = group
            return with_devices(f)(*args, **kwargs)

        return called

    for name in ("init_process_group", "new_group", "new_subgroups", "new_subgroups_by_enumeration"):
        setattr(dist, name, with_backend(getattr(dist, name)))
    torch.load = with_devices(torch.load)
    for taking in (torch.nn.parallel.DistributedDataParallel, FullyShardedDataParallel, DeviceMesh):
        taking.__init__ = with_devices(taking.__init__)
    torch.nn.Module.to = with_devices(torch.nn.Module.to)
    for name in OF_CUDA & vars(module).keys():
        setattr(torch.cuda, name, getattr(module, name))
    torch.cuda.set_device = lambda d: module.set_device(device_of(d))
    torch.Tensor.cuda = lambda self, device=None, non_blocking=False: self.to(device_of(device))
    torch.nn.Module.cuda = lambda self, device=None: self.to(device_of(device))
    return Mapped


# Functions of torch.cuda that tests call, and classes.
OF_CUDA = {
    "Event", "Stream", "current_device", "current_stream", "default_stream", "device_count", "empty_cache",
    "get_rng_state", "manual_seed", "max_memory_allocated", "mem_get_info", "memory_allocated", "memory_stats",
    "reset_peak_memory_stats", "set_rng_state", "set_stream", "stream", "synchronize",
}  # fmt: skip
