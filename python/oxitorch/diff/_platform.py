"""What a run is made on: `cpu`, `tpu`, `tpu:strict`, `tpu:bfloat16`, `cuda:high` and the like."""

import contextlib
import re
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

import oxitorch
from oxitorch import _activate

_DEVICES = ("cpu", "tpu", "cuda")
_MODES = ("fused", "strict", "debug")
_PRECISIONS = ("highest", "high", "default")
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}

# Of float32 products and convolutions: the relative error that rounding an operand makes, where operands are rounded to
# less than float32. A bfloat16 has 8 bits, three passes of it keep 16 and more, TF32 has 11.
_OPERANDS = {
    ("tpu", "default"): 2.0**-8,
    ("tpu", "high"): 2.0**-16,
    ("cuda", "default"): 2.0**-11,
    ("cuda", "high"): 2.0**-11,
}


class Platform:
    """A device with options behind colons: a mode of the eager engine, a precision of products, a dtype.

    `bfloat16` and `float16` are autocast over all of the run; `float64` is the default dtype of a script, and what a
    module and its arguments are cast to.

    Raises:
        ValueError: an unknown device or option, or one that the device does not have.
    """

    def __init__(self, text: str):
        self.text = text
        self.device, *options = text.split(":")
        if self.device not in _DEVICES:
            raise ValueError(f"unknown platform {text!r}: expected one of {', '.join(_DEVICES)}, or a recorded file")
        self.mode = self.precision = self.dtype = None
        for option in options:
            if option in _MODES:
                self.mode = option
            elif option in _PRECISIONS:
                self.precision = option
            elif option in _DTYPES:
                self.dtype = _DTYPES[option]
            else:
                known = ", ".join((*_MODES, *_PRECISIONS, *_DTYPES))
                raise ValueError(f"unknown option {option!r} of platform {text!r}: expected one of {known}")
        if self.device != "tpu" and self.mode is not None:
            raise ValueError(f"platform {text!r}: eager modes are of the device tpu alone")
        if self.device == "cpu" and self.precision is not None:
            raise ValueError("platform cpu computes products in float32 at every precision")

    @property
    def cast(self) -> torch.dtype | None:
        """What a module and its arguments are cast to."""
        return self.dtype if self.dtype is torch.float64 else None

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """While it holds, programs that say any accelerator run here."""
        with contextlib.ExitStack() as stack:
            if self.device == "tpu":
                if self.mode:
                    stack.enter_context(torch.tpu.set_eager_mode(self.mode))
                if self.precision:
                    stack.enter_context(torch.tpu.set_precision(self.precision))
            elif self.device == "cuda" and self.precision:
                stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
                torch.set_float32_matmul_precision("highest" if self.precision == "highest" else "high")
            if self.dtype is torch.float64:
                stack.callback(torch.set_default_dtype, torch.get_default_dtype())
                torch.set_default_dtype(torch.float64)
            elif self.dtype is not None:
                stack.enter_context(torch.autocast(self.device, self.dtype))
            stack.enter_context(_Devices(self.device))
            yield

    def header(self) -> dict:
        """What a file says of it."""
        about = {
            "platform": self.text,
            "device": self.device,
            "torch": torch.__version__,
            "oxitorch": oxitorch.__version__,
        }
        runs_on, precision = self.device, "highest"
        if self.device == "tpu":
            runs_on, precision = torch.tpu.platform(), _activate.core().get_precision()
            about |= {"runs_on": torch.tpu.get_device_name(), "mode": _activate.core().get_eager_mode()}
        elif self.device == "cuda":
            about["runs_on"] = torch.cuda.get_device_name()
            products = torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32
            precision = "high" if products else "highest"
        about["operand_error"] = _OPERANDS.get((runs_on, precision), 0.0)
        return about


# What may name a device.
_NAMES = (str, torch.device)
_ACCELERATOR = re.compile(r"(tpu|cuda|xla|mps|xpu|hpu)(:\d+)?")


class _Devices(TorchFunctionMode):
    """Takes what names an accelerator to one device.

    Attention with dropout goes to PyTorch's operations: what a kernel drops cannot be given to another run.
    """

    def __init__(self, device: str):
        super().__init__()
        self._device = device

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.cuda:
            return args[0].to(self._device)
        if func is F.scaled_dot_product_attention and (args[4] if len(args) > 4 else (kwargs or {}).get("dropout_p")):
            with sdpa_kernel(SDPBackend.MATH):
                return func(*args, **(kwargs or {}))
        # Most calls name no device, and there are thousands in a step.
        for x in args:
            if isinstance(x, _NAMES):
                args = tuple(map(self._map, args))
                break
        if kwargs:
            return func(*args, **{k: self._map(v) for k, v in kwargs.items()})
        return func(*args)

    def _map(self, x):
        if isinstance(x, torch.device) and _ACCELERATOR.fullmatch(str(x)) and x.type != self._device:
            return torch.device(self._device)
        if isinstance(x, str) and _ACCELERATOR.fullmatch(x) and not x.startswith(self._device):
            return self._device
        return x
