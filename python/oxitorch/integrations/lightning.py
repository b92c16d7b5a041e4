"""Lightning's Trainer and Fabric.

Both have a connector, which makes accelerator, strategy and precision of the user's arguments. Where it would choose
the CPU for `accelerator="auto"`, and for `accelerator="tpu"` where torch_xla is not installed, it gets an Accelerator
of ours here. What its other steps have lists of devices for (one process's strategy, FSDP, mixed precision) is answered
for ours; the strategies for several processes are Lightning's own.
"""

import contextlib
import functools
import inspect
import sys

import torch

from oxitorch import _activate, _env, _process_group
from oxitorch.integrations import _tell

# DDP's method that says its devices, of the Trainer and of Fabric.
_DEVICE_IDS = ("determine_ddp_device_ids", "_determine_ddp_device_ids")
_CPU = '`accelerator="cpu"`'


def follow(connector) -> None:
    """A module with a connector, of the Trainer or of Fabric: `"auto"` is ours where it would be the CPU."""
    cls = getattr(connector, "_AcceleratorConnector", None) or connector._Connector
    ddp = _check(connector, cls)
    ours = _accelerator(connector.Accelerator)
    _take_devices(cls)
    _take_name(cls, connector, ours)
    _take_choice(cls, ours)
    _take_strategies(cls, connector, ours)
    _follow_ddp(ddp)
    _follow_fsdp(connector.FSDPStrategy)
    _take_precision(cls, connector, ours)


def _check(connector, cls):
    """AttributeError where this version has not what is used here, so that nothing fails later. Gives DDP's module."""
    of_module = ("FSDPPrecision", "FSDPStrategy", "MixedPrecision", "SingleDeviceStrategy")
    steps = ("_check_and_init_precision", "_check_config_and_set_final_flags", "_check_strategy_and_fallback")
    steps += ("_choose_auto_accelerator", "_choose_strategy")
    missing = [name for name in (*of_module, "XLAAccelerator") if not hasattr(connector, name)]
    missing += [f"{cls.__name__}.{name}" for name in steps if not hasattr(cls, name)]
    arguments = {"accelerator", "devices"} - set(inspect.signature(cls.__init__).parameters)
    if not missing and not arguments:
        ddp = sys.modules.get(connector.FSDPStrategy.__module__.rpartition(".")[0] + ".ddp")
        if any(hasattr(getattr(ddp, "DDPStrategy", None), name) for name in _DEVICE_IDS):
            return ddp
        missing = ["DDPStrategy"]
    raise AttributeError(f"it has no {', '.join([*missing, *sorted(arguments)])}")


def _wrap(cls, name: str, wrapped) -> None:
    """`wrapped(theirs, self, *args, **kwargs)` in the place of a method."""
    theirs = getattr(cls, name)

    @functools.wraps(theirs)
    def method(self, *args, **kwargs):
        return wrapped(theirs, self, *args, **kwargs)

    setattr(cls, name, method)


def _take_devices(cls) -> None:
    """On the cpu platform there are as many devices as are asked for. It is said before the device starts."""
    signature = inspect.signature(cls.__init__)

    def __init__(theirs, self, *args, **kwargs):
        bound = signature.bind(self, *args, **kwargs)
        if bound.arguments.get("accelerator", "auto") in ("auto", _activate.NAME):
            with contextlib.suppress(TypeError, ValueError):  # what is no number of devices is Lightning's to refuse
                _process_group.expect(_how_many(bound.arguments.get("devices", 1)))
        theirs(*bound.args, **bound.kwargs)

    _wrap(cls, "__init__", __init__)


def _take_name(cls, connector, ours: type) -> None:
    """`accelerator="tpu"`, which is torch_xla's where that is installed."""
    signature = inspect.signature(cls._check_config_and_set_final_flags)

    def check_config(theirs, self, *args, **kwargs):
        bound = signature.bind(self, *args, **kwargs)
        if bound.arguments["accelerator"] == _activate.NAME and not connector.XLAAccelerator.is_available():
            bound.arguments["accelerator"] = ours()
        theirs(*bound.args, **bound.kwargs)

    _wrap(cls, "_check_config_and_set_final_flags", check_config)


def _take_choice(cls, ours: type) -> None:
    theirs = cls._choose_auto_accelerator

    @functools.wraps(theirs)
    def choose(*self):
        found = theirs(*self)
        if found != "cpu" or not _activate.is_available():
            return found
        _tell.tell_of_cpu_platform("Lightning", _CPU)
        return ours()

    cls._choose_auto_accelerator = staticmethod(choose)


def _take_strategies(cls, connector, ours: type) -> None:
    """Lightning gives one process of another's accelerator the CPU, and FSDP to CUDA alone."""

    def choose_strategy(theirs, self):
        devices = self._parallel_devices
        if isinstance(self._accelerator_flag, ours) and len(devices) <= 1 and self._num_nodes_flag == 1:
            return connector.SingleDeviceStrategy(device=devices[0])
        return theirs(self)

    def check_strategy(theirs, self):
        flag = self._strategy_flag
        is_fsdp = isinstance(flag, connector.FSDPStrategy) or str(flag).startswith("fsdp")
        if not (is_fsdp and isinstance(self._accelerator_flag, ours)):
            theirs(self)

    _wrap(cls, "_choose_strategy", choose_strategy)
    _wrap(cls, "_check_strategy_and_fallback", check_strategy)


def _is_ours(strategy) -> bool:
    return strategy.root_device.type == _activate.NAME


def _follow_ddp(module) -> None:
    """DDP without `device_ids`, for which Lightning opens a stream of CUDA; hooks of communication as on CUDA."""
    cls = module.DDPStrategy
    [name] = [n for n in _DEVICE_IDS if hasattr(cls, n)]

    def device_ids(theirs, self):
        return None if _is_ours(self) else theirs(self)

    _wrap(cls, name, device_ids)
    if not hasattr(cls, "_register_ddp_hooks"):
        return  # Fabric has none

    def register_hooks(theirs, self):
        if not _is_ours(self):
            return theirs(self)
        module._register_ddp_comm_hook(self.model, self._ddp_comm_state, self._ddp_comm_hook, self._ddp_comm_wrapper)

    _wrap(cls, "_register_ddp_hooks", register_hooks)


def _follow_fsdp(cls) -> None:
    """`device_mesh=(2, 4)` becomes a mesh of CUDA devices there."""

    def setup_environment(theirs, self):
        options = self.kwargs if hasattr(self, "kwargs") else self._fsdp_kwargs
        shape = options.get("device_mesh")
        if not isinstance(shape, tuple) or not _is_ours(self):
            return theirs(self)
        del options["device_mesh"]
        theirs(self)
        options["device_mesh"] = torch.distributed.init_device_mesh(_activate.NAME, shape)

    _wrap(cls, "setup_environment", setup_environment)


def _take_precision(cls, connector, ours: type) -> None:
    """Mixed precision is CUDA's where the accelerator is neither the CPU nor Apple's."""
    of_fsdp = _fsdp_precision(connector.FSDPPrecision)

    def precision(theirs, self):
        found = theirs(self)
        given = getattr(self, "_precision_plugin_flag", None) or getattr(self, "_precision_instance", None)
        if found is given or not isinstance(self._accelerator_flag, ours):
            return found
        if isinstance(found, connector.MixedPrecision):
            return connector.MixedPrecision(found.precision, device=_activate.NAME)
        if isinstance(found, connector.FSDPPrecision):
            return of_fsdp(found.precision)
        return found

    _wrap(cls, "_check_and_init_precision", precision)


def _fsdp_precision(base: type) -> type:
    class FSDPPrecision(base):
        """FSDP's mixed precision, with autocast and scaler of the device."""

        def __init__(self, precision):
            super().__init__(precision)
            if self.scaler is not None:
                self.scaler = type(self.scaler)(device=_activate.NAME)

        def forward_context(self):
            if "mixed" not in self.precision:
                return super().forward_context()
            dtype = torch.bfloat16 if self.precision == "bf16-mixed" else torch.float16
            return torch.autocast(_activate.NAME, dtype=dtype)

    return FSDPPrecision


def _how_many(devices) -> int:
    """How many devices this machine's processes use; "auto" and -1 are as many as there are processes."""
    if devices in ("auto", -1, "-1"):
        return _env.local_world_size()
    if isinstance(devices, str):
        devices = [i for i in devices.split(",") if i.strip()] if "," in devices else int(devices)
    return len(devices) if isinstance(devices, list | tuple) else devices


def _numbers(devices) -> list[int]:
    """The numbers of the devices; one alone is the current device."""
    if isinstance(devices, str) and "," in devices:
        devices = [int(i) for i in devices.split(",") if i.strip()]
    if isinstance(devices, list | tuple):
        return list(devices)
    count = _how_many(devices)
    return list(range(count)) if count > 1 else [torch.tpu.current_device()]


def _accelerator(base: type) -> type:
    class TPUAccelerator(base):
        """Devices of ours, one a process."""

        def setup_device(self, device: torch.device) -> None:
            if device.type != _activate.NAME:
                raise ValueError(f"expected a device '{_activate.NAME}', got '{device}'")
            torch.tpu.set_device(device)

        def teardown(self) -> None:
            torch.tpu.empty_cache()

        def get_device_stats(self, device) -> dict:
            return torch.tpu.memory_stats(device)

        @staticmethod
        def parse_devices(devices) -> list[int]:
            return _numbers(devices)

        @staticmethod
        def get_parallel_devices(devices: list[int]) -> list[torch.device]:
            return [torch.device(_activate.NAME, i) for i in devices]

        @staticmethod
        def auto_device_count() -> int:
            return _env.local_world_size()

        @staticmethod
        def is_available() -> bool:
            return torch.tpu.is_available()

        @staticmethod
        def name() -> str:
            return _activate.NAME

    return TPUAccelerator
