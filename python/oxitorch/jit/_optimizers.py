"""Optimizers of PyTorch inside of a program.

In eager mode they count their steps on the host and compute with Python's numbers, which a program would keep as they
were when it was traced. While a step is traced they therefore take the way that PyTorch has for compilers and for CUDA
graphs: step counts and learning rates are tensors on the device, `capturable` is set. Afterwards the groups are as
before.
"""

import weakref
from collections.abc import Iterator
from operator import is_
from typing import Any

import torch

from oxitorch import _activate
from oxitorch._core import Entries
from oxitorch.jit._parallel import Wrapped, plain

# Those that take a learning rate that is a tensor, all the way. With others a new rate is traced anew, and finds the
# same programs.
_TENSOR_RATES = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)

# The learning rate of each group, on the device.
_rates: "weakref.WeakKeyDictionary[torch.optim.Optimizer, list]" = weakref.WeakKeyDictionary()


class Stepped:
    """An optimizer whose step a function makes.

    What its groups and its state are is compared before each call; a learning rate that changed is told the program.
    Where the state is another one of the same structure, as after `load_state_dict`, calls go on with its tensors.

    Attributes:
        tensors: of the groups and of the state.
    """

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer = optimizer
        self._saved: list[dict[str, Any]] = []
        self._rates: list = []
        self._options: list[dict[str, Any]] = []
        # Numbers of Python before a step, and whether one changed them, as each call would.
        self._numbers: dict[tuple, Any] = {}
        self._counts = False
        self.tensors: list[torch.Tensor] = []

    def begin(self) -> list[torch.Tensor]:
        """Before the step that is traced. Gives the tensors that this has made."""
        optimizer = self.optimizer
        self._numbers = _numbers(optimizer)
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
        now = _numbers(self.optimizer)
        self._counts |= any(now.get(at, value) != value for at, value in self._numbers.items())
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

    def settle(self, found: list[torch.Tensor]) -> None:
        """The function was traced and found these tensors: from now on `is_current` compares with what is there now."""
        groups = self.optimizer.param_groups
        self._params = [list(group["params"]) for group in groups]
        self._options = [self._static(group, rate) for group, rate in zip(groups, self._rates, strict=True)]
        self._hold(list(_entries(self.optimizer)))
        place = {id(t): i for i, t in enumerate(found)}
        # Places among what the function finds; none of what it does not take.
        self._places = [place.get(id(plain(t))) for t in self.tensors]
        if self._counts:
            name = type(self.optimizer).__name__
            _activate.core().remark(f"for this call alone: a step of {name} changes numbers of Python")

    def _hold(self, entries: list[tuple]) -> None:
        """Notes what the groups and the state are."""
        self._groups, self._state = self.optimizer.param_groups, self.optimizer.state
        self._held = list(self._state.values())
        self._entries = entries
        tensors = [(holder, name, value) for _, holder, name, value in entries if isinstance(value, torch.Tensor)]
        self._same = Entries(tensors)
        self.tensors = [value for *_, value in tensors]

    def _static(self, group: dict[str, Any], rate) -> dict[str, Any]:
        left_out = ("params", "lr") if rate is not None else ("params",)
        return {k: v for k, v in group.items() if k not in left_out and not isinstance(v, torch.Tensor)}

    def is_current(self, found: list[torch.Tensor]) -> bool:
        """Whether a step would be the same; tells the program the learning rates.

        Tensors that have come in the places of others are put into `found`.
        """
        if self._counts or not (self._is_held() or self._holds_now(found)):
            return False
        for group, rate, params, options in zip(self._groups, self._rates, self._params, self._options, strict=True):
            for name, value in options.items():
                if name not in group or group[name] != value:
                    return False
            now = group["params"]
            if len(now) != len(params) or not all(map(is_, now, params)):
                return False
            if rate is not None:
                rate.set(group["lr"])
        return True

    def _is_held(self) -> bool:
        """Whether the groups and the state are those that were noted, with the same tensors."""
        state, held = self._state, self._held
        groups = self.optimizer.param_groups
        if groups is not self._groups or len(groups) != len(self._params) or self.optimizer.state is not state:
            return False
        return len(state) == len(held) and all(map(is_, state.values(), held)) and self._same.are_same()

    def _holds_now(self, found: list[torch.Tensor]) -> bool:
        """Notes the groups and the state that are there now, if they are of the same structure."""
        if len(self.optimizer.param_groups) != len(self._params):
            return False
        self._moved_counts()
        now = {entry[0]: entry for entry in _entries(self.optimizer)}
        if now.keys() != {entry[0] for entry in self._entries}:
            return False
        entries = [now[at] for at, *_ in self._entries]
        if not all(_is_like(old[-1], new[-1]) for old, new in zip(self._entries, entries, strict=True)):
            return False
        tensors = [value for *_, value in entries if isinstance(value, torch.Tensor)]
        given: dict[int, torch.Tensor] = {}
        for place, t in zip(self._places, map(plain, tensors), strict=True):
            if place is not None and given.setdefault(place, t) is not t:
                return False  # what was one tensor is two
        for place, t in given.items():
            found[place] = t
        self._hold(entries)
        return True


def _entries(optimizer: torch.optim.Optimizer) -> Iterator[tuple[tuple, dict, str, Any]]:
    """The state, and the tensors in groups: where each is, what holds it under which name, and what it is."""
    for i, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            if isinstance(value, torch.Tensor):
                yield (i, name), group, name, value
    for of, values in optimizer.state.items():
        if isinstance(values, dict):
            for name, value in values.items():
                yield (of, name), values, name, value


def _numbers(optimizer: torch.optim.Optimizer) -> dict[tuple, Any]:
    """Numbers of Python in the groups and in the state, by where they are."""
    groups = (((i, k), v) for i, group in enumerate(optimizer.param_groups) for k, v in group.items())
    states = ((at, value) for at, *_, value in _entries(optimizer))
    return {at: value for at, value in (*groups, *states) if isinstance(value, (int, float))}


def _is_like(old: Any, new: Any) -> bool:
    """Whether a value may come in the place of another: a tensor in that of one of the same kind."""
    if isinstance(old, torch.Tensor):
        return (
            type(old) is type(new)
            and (old.shape, old.dtype, old.device) == (new.shape, new.dtype, new.device)
            and old.requires_grad == new.requires_grad
            and Wrapped.of(old) == Wrapped.of(new)
        )
    return old is new or (type(old) is type(new) and bool(old == new))


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
