"""Lightning's Trainer and Fabric.

Both hand the arguments of the user to a connector, which makes accelerator, strategy and precision of them. A device
from outside takes three arguments there: an Accelerator, a strategy for one device (Lightning gives other people's
accelerators the CPU as their device), and a plugin for mixed precision (for which it takes CUDA). For
`accelerator="auto"` where Lightning would take the CPU, and for `accelerator="tpu"` where torch_xla is not installed,
these three are filled in.
"""

import functools
import inspect
import os

import torch

from oxitorch import _activate, integrations

_CPU = '`accelerator="cpu"`'


def follow(connector) -> None:
    """A module with a connector, of the Trainer or of Fabric: `"auto"` is ours where it would be the CPU."""
    cls = getattr(connector, "_AcceleratorConnector", None) or connector._Connector
    theirs = cls.__init__
    signature = inspect.signature(theirs)
    _check(connector, cls, signature)
    accelerator_class = _accelerator(connector.Accelerator)

    @functools.wraps(theirs)
    def __init__(self, *args, **kwargs):
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        wanted = _is_wanted(cls, connector, given["accelerator"]) and not _is_from_command_line(connector)
        index = _index(given) if wanted else None
        if index is None:
            theirs(*bound.args, **bound.kwargs)
            if wanted:
                _tell_why(given)
            return
        given["accelerator"] = accelerator_class()
        given["strategy"] = connector.SingleDeviceStrategy(device=torch.device(_activate.NAME, index))
        _set_precision(connector, given)
        theirs(*bound.args, **bound.kwargs)
        integrations.tell_of_cpu_platform("Lightning", _CPU)

    cls.__init__ = __init__


def _check(connector, cls, signature) -> None:
    """AttributeError where this version has not what is used here, so that nothing fails later."""
    for name in ("SingleDeviceStrategy", "MixedPrecision", "XLAAccelerator", "_convert_precision_to_unified_args"):
        getattr(connector, name)
    missing = {"accelerator", "strategy", "devices", "num_nodes", "precision", "plugins"} - set(signature.parameters)
    if missing or not hasattr(cls, "_choose_auto_accelerator"):
        raise AttributeError(f"`{cls.__name__}` has no {', '.join(sorted(missing)) or '_choose_auto_accelerator'}")


def _is_wanted(cls, connector, accelerator) -> bool:
    """Whether the user left the choice to Lightning and it would be the CPU, or asked for ours by name."""
    if accelerator == "auto":
        return cls._choose_auto_accelerator() == "cpu" and integrations.usable()
    return accelerator == _activate.NAME and not connector.XLAAccelerator.is_available()


def _is_from_command_line(connector) -> bool:
    """Whether these arguments come from `fabric run`, as variables that are stronger than what is filled in."""
    return hasattr(connector, "_Connector") and any(
        f"LT_{name}" in os.environ for name in ("ACCELERATOR", "STRATEGY", "PRECISION", "DEVICES", "NUM_NODES")
    )


def _index(given) -> int | None:
    """The device that the arguments ask for; None where they ask for several, or for a strategy of several."""
    if given["strategy"] not in ("auto", "single_device") or given["num_nodes"] != 1:
        return None
    devices = given["devices"]
    if devices in ("auto", 1, "1", -1, "-1"):
        return torch.tpu.current_device()
    if isinstance(devices, list | tuple) and len(devices) == 1:
        return int(devices[0])
    return None


def _tell_why(given) -> None:
    integrations.tell(
        "lightning on the CPU",
        f"Lightning uses the CPU: strategy={given['strategy']!r}, devices={given['devices']!r} and "
        f"num_nodes={given['num_nodes']} are not one device '{_activate.NAME}'",
        f'`strategy="auto", devices=1` for the device, or {_CPU} if this is meant',
    )


def _set_precision(connector, given) -> None:
    """Mixed precision comes as a plugin, as Lightning takes "cuda" for its device otherwise."""
    precision = connector._convert_precision_to_unified_args(given["precision"])
    if precision in ("16-mixed", "bf16-mixed"):
        plugins = given["plugins"] or []
        plugins = list(plugins) if isinstance(plugins, list | tuple) else [plugins]
        given["plugins"] = [*plugins, connector.MixedPrecision(precision, device=_activate.NAME)]
        given["precision"] = None


def _accelerator(base: type) -> type:
    class TPUAccelerator(base):
        """One device of ours."""

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
            return list(devices) if isinstance(devices, list | tuple) else [torch.tpu.current_device()]

        @staticmethod
        def get_parallel_devices(devices: list[int]) -> list[torch.device]:
            return [torch.device(_activate.NAME, i) for i in devices]

        @staticmethod
        def auto_device_count() -> int:
            return 1

        @staticmethod
        def is_available() -> bool:
            return torch.tpu.is_available()

        @staticmethod
        def name() -> str:
            return _activate.NAME

    return TPUAccelerator
