"""Hugging Face Accelerate, and the Trainer of transformers, which runs on it.

Accelerate asks for each device that it knows whether it is there, and takes the CPU otherwise. It has one setting for
others, the variable ACCELERATE_TORCH_DEVICE. That is not set for everybody: it is stronger than
`Accelerator(cpu=True)` and `TrainingArguments(use_cpu=True)`, and child processes without the device inherit it.
"""

import functools
import inspect
import os
import sys

import torch

from oxitorch import _activate
from oxitorch.integrations import _tell

_SETTING = "ACCELERATE_TORCH_DEVICE"


# For tensors of the device, and for those on the CPU, which libraries gather too.
_BACKEND = f"cpu:gloo,{_activate.NAME}:{_activate.NAME}"


def follow(state) -> None:
    """`accelerate.state`: the device is ours where it would be the CPU, in one process and in several."""
    theirs = state.PartialState.default_device
    _follow_alone(state.PartialState, theirs)
    _follow_together(state.PartialState, theirs, state.DistributedType)


def _follow_alone(partial_state, theirs: property) -> None:
    def default_device(self) -> torch.device:
        device = theirs.fget(self)
        if device.type != "cpu" or not _activate.is_available():
            return device
        _agree_with_old_transformers()
        _tell_of_cpu_platform()
        return torch.device(_activate.NAME)

    partial_state.default_device = property(default_device, doc=theirs.__doc__)


def _follow_together(partial_state, theirs: property, types) -> None:
    """Several processes (torchrun, `accelerate launch`), each of which Accelerate would let train alone.

    It has a type of distribution for each kind of device that it knows. Ours is that of GPUs: a device a process.
    The group is made before the device is used, as hardware wants.
    """
    backend_of, set_device = partial_state._prepare_backend, partial_state.set_device

    @functools.wraps(backend_of)
    def _prepare_backend(self, cpu=False, sagemaker_dp=False, backend=None):
        found = backend_of(self, cpu, sagemaker_dp, backend)
        if found[1] != types.NO or cpu or int(os.environ.get("LOCAL_RANK", -1)) == -1:
            return found
        device = self.device or theirs.fget(self)
        left_to_us = device.type == "cpu" and _SETTING not in os.environ and _is_current()
        if device.type != _activate.NAME and not left_to_us:
            return found
        return backend or _BACKEND, types.MULTI_GPU

    @functools.wraps(set_device)
    def set_device_of_process(self) -> None:
        if self.backend is None or _activate.NAME not in self.backend:
            return set_device(self)
        if self.device is None or self.device.index is None:
            self.device = torch.device(_activate.NAME, self.local_process_index % torch.tpu.device_count())
        torch.tpu.set_device(self.device)
        _tell_of_cpu_platform()

    partial_state._prepare_backend, partial_state.set_device = _prepare_backend, set_device_of_process


def _is_current() -> bool:
    """Whether the device is PyTorch's accelerator here. Does not start it, and so does not say that it works."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == _activate.NAME


def _tell_of_cpu_platform() -> None:
    _tell.tell_of_cpu_platform("Accelerate", "`Accelerator(cpu=True)` or `TrainingArguments(use_cpu=True)`")


def launch_processes(launch) -> None:
    """`accelerate.commands.launch`: `--num_processes 2` starts two, as it does where there are GPUs."""
    theirs = launch._validate_launch_command

    @functools.wraps(theirs)
    def _validate_launch_command(args):
        others = ("cpu", "multi_gpu", "tpu", "use_deepspeed", "use_fsdp", "use_megatron_lm")
        checked = theirs(args)
        args = checked[0]
        if (args.num_processes or 1) > 1 and not any(getattr(args, o, False) for o in others) and _is_current():
            args.multi_gpu = True
        return checked

    launch._validate_launch_command = _validate_launch_command


def _agree_with_old_transformers() -> None:
    """Where TrainingArguments does not know the device (transformers 4), it reads this after Accelerate chose."""
    arguments = sys.modules.get("transformers.training_args")
    if arguments is not None and not hasattr(arguments, "is_torch_tpu_available"):
        os.environ.setdefault(_SETTING, _activate.NAME)


def follow_options(dataclasses) -> None:
    """`accelerate.utils.dataclasses`: options that name a device or a compiler."""
    _compile_by_default(dataclasses)
    _materialize(dataclasses.FullyShardedDataParallelPlugin)


def _compile_by_default(dataclasses) -> None:
    """Compiles with PyTorch's default backend where Accelerate names inductor, as `torch_compile=True` of transformers.

    The default is inductor too, for graphs that are not the device's.
    """
    theirs = dataclasses.TorchDynamoPlugin.to_kwargs

    @functools.wraps(theirs)
    def to_kwargs(self):
        options = theirs(self)
        if options.get("backend") == "inductor" and _is_current():
            del options["backend"]
        return options

    dataclasses.TorchDynamoPlugin.to_kwargs = to_kwargs


def _materialize(plugin) -> None:
    """FSDP1's `sync_module_states` makes parameters that rank 0 alone loaded, on a device that Accelerate knows."""
    theirs = plugin.__post_init__

    @functools.wraps(theirs)
    def __post_init__(self):
        try:
            return theirs(self)
        except RuntimeError:
            if not self.sync_module_states or not _is_current():
                raise
        self.param_init_fn = lambda module: module.to_empty(device=_activate.NAME, recurse=False)

    plugin.__post_init__ = __post_init__


def allow_fp16(accelerator) -> None:
    """`accelerate.accelerator`: mixed precision in float16, which Accelerate allows on a list of devices only.

    Where it refuses ours, the Accelerator is made without mixed precision, and then given what it has elsewhere.
    """
    theirs = accelerator.Accelerator.__init__
    signature = inspect.signature(theirs)
    states = accelerator.AcceleratorState

    @functools.wraps(theirs)
    def __init__(self, *args, **kwargs):
        try:
            return theirs(self, *args, **kwargs)
        except ValueError:
            state = states() if states._shared_state else None
            if state is None or state.device.type != _activate.NAME or state._mixed_precision != "fp16":
                raise
        bound = signature.bind(self, *args, **kwargs)
        bound.arguments["mixed_precision"] = None  # what the state says
        state._mixed_precision = "no"
        try:
            theirs(*bound.args, **bound.kwargs)
        finally:
            state._mixed_precision = "fp16"
        options = self.scaler_handler.to_kwargs() if self.scaler_handler is not None else {}
        self.scaler = _scaler(self)(device=_activate.NAME, **options)
        self.native_amp = True

    accelerator.Accelerator.__init__ = __init__


def _scaler(accelerator) -> type:
    """FSDP1's ranks have shards of the gradients, without DTensor; its scaler looks for infinities in those of all."""
    if accelerator.distributed_type == "FSDP" and not accelerator.is_fsdp2:
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

        return ShardedGradScaler
    return torch.amp.GradScaler


def look_back() -> None:
    """Says that Accelerate chose the CPU in this process, where nobody told it to, now that the device is used."""
    state = sys.modules.get("accelerate.state")
    shared = getattr(getattr(state, "PartialState", None), "_shared_state", None) or {}
    device = shared.get("device")
    if device is None or device.type != "cpu" or shared.get("_cpu"):
        return
    if _SETTING not in os.environ:
        reason = "chose the CPU before oxitorch was there"
        hint = f"`import oxitorch` before the Accelerator or the TrainingArguments are made, or set {_SETTING}=tpu"
    elif "transformers.training_args" in sys.modules:
        reason = f"uses the CPU, as {_SETTING} says, which transformers does not read"
        hint = f"unset {_SETTING}, or say `TrainingArguments(use_cpu=True)`"
    else:
        return
    _tell.tell(
        "accelerate on the CPU",
        f"Accelerate {reason}, and now device '{_activate.NAME}' is used: tensors of the two do not go together",
        hint,
    )
