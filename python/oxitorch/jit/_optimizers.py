"""Optimizers of PyTorch inside of a program.

In eager mode they count their steps on the host and compute with Python's numbers, which a program would keep as they
were when it was traced. While a step is traced they therefore take the way that PyTorch has for compilers and for CUDA
graphs: step counts and learning rates are tensors on the device, `capturable` is set. Afterwards the groups are as
before.
"""

import weakref
from typing import Any

import torch

# Those that take a learning rate that is a tensor, all the way. With others a new rate is traced anew, and finds the
# same programs.
_TENSOR_RATES = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)

# The learning rate of each group, on the device.
_rates: "weakref.WeakKeyDictionary[torch.optim.Optimizer, list]" = weakref.WeakKeyDictionary()


class Stepped:
    """An optimizer whose step a function makes.

    What its groups and its state are is compared before each call; a learning rate that changed is told the program.
    """

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer = optimizer
        self._saved: list[dict[str, Any]] = []
        self._rates: list = []
        self._options: list[dict[str, Any]] = []

    def begin(self) -> list[torch.Tensor]:
        """Before the step that is traced. Gives the tensors that this has made."""
        optimizer = self.optimizer
        self._rates = _rates_of(optimizer)
        self._saved = [{k: group[k] for k in ("lr", "capturable") if k in group} for group in optimizer.param_groups]
        for group, rate in zip(optimizer.param_groups, self._rates, strict=True):
            if rate is not None:
                group["lr"] = rate.tensor
            if "capturable" in group:
                group["capturable"] = True
        return self._moved_counts() + [rate.tensor for rate in self._rates if rate is not None]

    def end(self) -> list[torch.Tensor]:
        """After it. Gives the tensors that this has made."""
        for group, saved in zip(self.optimizer.param_groups, self._saved, strict=False):
            group.update(saved)
        return self._moved_counts()

    def _moved_counts(self) -> list[torch.Tensor]:
        moved = []
        for p, state in self.optimizer.state.items():
            if not isinstance(p, torch.Tensor) or p.device.type != "tpu":
                continue
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.dim() == 0 and value.device.type == "cpu":
                    state[name] = value.to(p.device)
                    moved.append(state[name])
        return moved

    def settle(self) -> None:
        """The function was traced: from now on `is_current` compares with what is there now."""
        self._groups, self._state = self.optimizer.param_groups, self.optimizer.state
        self._params = [list(group["params"]) for group in self._groups]
        self._options = [self._static(group, rate) for group, rate in zip(self._groups, self._rates, strict=True)]

    def _static(self, group: dict[str, Any], rate) -> dict[str, Any]:
        left_out = ("params", "lr") if rate is not None else ("params",)
        return {k: v for k, v in group.items() if k not in left_out and not isinstance(v, torch.Tensor)}

    def is_current(self) -> bool:
        """Whether a step would be the same; tells the program the learning rates."""
        optimizer = self.optimizer
        if optimizer.param_groups is not self._groups or optimizer.state is not self._state:
            return False
        for group, rate, params, options in zip(self._groups, self._rates, self._params, self._options, strict=True):
            for name, value in options.items():
                if group[name] != value:
                    return False
            now = group["params"]
            if len(now) != len(params) or any(a is not b for a, b in zip(now, params, strict=True)):
                return False
            if rate is not None:
                rate.set(group["lr"])
        return True


class _Rate:
    """A learning rate on the device (0-d float32)."""

    def __init__(self, value: float, device: torch.device):
        self._value = value
        self.tensor = torch.tensor(value, dtype=torch.float32).to(device)

    def set(self, value: float) -> None:
        if value != self._value:
            self.tensor.copy_(torch.tensor(value, dtype=torch.float32))
            self._value = value


def _rates_of(optimizer: torch.optim.Optimizer) -> list[_Rate | None]:
    rates = _rates.setdefault(optimizer, [])
    for i, group in enumerate(optimizer.param_groups):
        if i == len(rates):
            rates.append(None)
        device = next((p.device for p in group["params"] if p.device.type == "tpu"), None)
        if device is None or not isinstance(optimizer, _TENSOR_RATES) or isinstance(group["lr"], torch.Tensor):
            rates[i] = None
        elif rates[i] is None:
            rates[i] = _Rate(group["lr"], device)
        else:
            rates[i].set(group["lr"])
    del rates[len(optimizer.param_groups) :]
    return list(rates)
