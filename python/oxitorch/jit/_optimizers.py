"""Optimizers of PyTorch inside of a program.

In eager mode they count their steps on the host and compute with Python's numbers, which a program would keep as they
were when it was traced. While a step is traced they therefore take the way that PyTorch has for compilers and for CUDA
graphs: step counts and learning rates are tensors on the device, `capturable` is set. Afterwards the groups are as
before.
"""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from operator import is_
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from oxitorch import _activate
from oxitorch._core import Entries
from oxitorch.jit._elsewhere import has_traced, is_number, is_traced
from oxitorch.jit._names import Change
from oxitorch.jit._parallel import Wrapped, plain

# Those that take a learning rate that is a tensor, all the way. With others a new rate is traced anew, and finds the
# same programs.
_TENSOR_RATES = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)

_OPTION_HINT = "Python has to know it in each step: set it less often, or leave it as it is"
_HINTS = {
    "lr": "SGD, Adam and AdamW are told a learning rate that changes; or give the function the rate, and set it within"
}

# Numbers of Python, and those that are traced (`_numbers.py`).
_NUMBERS = (int, float, torch.SymInt, torch.SymFloat)

# The learning rate of each group, on the device.
_rates: "weakref.WeakKeyDictionary[torch.optim.Optimizer, list]" = weakref.WeakKeyDictionary()


class Groups:
    """Numbers in the groups of optimizers while a function is traced, of which it may set some itself, as
    `group["lr"] = rate`.

    Attributes:
        sets: what the function leaves: the group, the name there, and the number, which may be one that is traced.
    """

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer] = ()):
        # Those before the function, by the optimizer's id.
        self._before: dict[int, tuple[torch.optim.Optimizer, list[tuple[dict, dict[str, Any]]]]] = {}
        self.sets: list[tuple[dict, str, Any]] = []
        for optimizer in optimizers:
            self.meets(optimizer)

    def meets(self, optimizer: torch.optim.Optimizer) -> None:
        if id(optimizer) in self._before:
            return
        held = []
        for group in optimizer.param_groups:
            # Objects that nobody else has: what is another object was set, also if it is the same number.
            group.update((name, x * 1.0) for name, x in list(group.items()) if type(x) is float)
            held.append((group, {name: x for name, x in group.items() if type(x) in (int, float)}))
        self._before[id(optimizer)] = optimizer, held

    def rates(self, optimizer: torch.optim.Optimizer) -> dict[int, torch.Tensor]:
        """Before a step: learning rates that the function set, by the group's number, as tensors that it makes."""
        self.meets(optimizer)
        rates = {}
        for i, (group, before) in enumerate(self._before[id(optimizer)][1]):
            rate = group.get("lr")
            device = _device_of(optimizer, group)
            is_own = is_traced(rate) or (isinstance(rate, _NUMBERS) and rate is not before.get("lr", rate))
            if device is not None and is_own:
                rates[i] = torch.full((), rate, dtype=torch.float32, device=device)
        return rates

    def changes(self) -> dict[str, Any]:
        """Numbers that the function has left other than they were, and that follow from no argument: what they are
        called, with their names in the group.
        """
        return {
            f"{type(optimizer).__name__}.param_groups[{i}][{name!r}]": name
            for optimizer, held in self._before.values()
            for i, (group, before) in enumerate(held)
            for name, x in before.items()
            if type(now := group.get(name)) in (int, float) and now is not x and now != x
        }

    def restore(self, everything: bool) -> None:
        """Notes what the function has set. Puts back what was there in place of numbers that are traced, or of all."""
        for _, held in self._before.values():
            for group, before in held:
                for name, x in before.items():
                    now = group.get(name)
                    if now is x or not isinstance(now, _NUMBERS):
                        continue
                    self.sets.append((group, name, now))
                    if everything or is_traced(now):
                        group[name] = x
        self._before.clear()


@contextmanager
def stepping_as_traced() -> Iterator[None]:
    """Steps of optimizers are as those of a function that is traced, and leave as much behind."""
    stepping: dict[int, Stepped] = {}

    def begin(optimizer, *_) -> None:
        stepping[id(optimizer)] = stepped = Stepped(optimizer)
        stepped.begin({})

    def end(optimizer, *_) -> None:
        stepping.pop(id(optimizer)).end()

    hooks = register_optimizer_step_pre_hook(begin), register_optimizer_step_post_hook(end)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for stepped in stepping.values():
            stepped.end()  # it raised


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
        # Names of numbers in groups, by the group's number, which each step has from the function's arguments.
        self._traced: set[tuple[int, str]] | None = None
        # Names in the state that have other tensors in each call, by the ids of their dicts.
        self._apart: dict[int, list] = {}
        self.tensors: list[torch.Tensor] = []

    def begin(self, own: dict[int, torch.Tensor]) -> list[torch.Tensor]:
        """Before the step that is traced; the function has made learning rates of its own. Gives the tensors that this
        has made.
        """
        optimizer = self.optimizer
        self._numbers = _numbers(optimizer)
        traced = {(i, k) for i, group in enumerate(optimizer.param_groups) for k, v in group.items() if has_traced(v)}
        self._traced = traced if self._traced is None else self._traced & traced
        rates = _rates_of(optimizer, own)
        self._saved = [{k: group[k] for k in ("lr", "capturable") if k in group} for group in optimizer.param_groups]
        for i, (group, rate) in enumerate(zip(optimizer.param_groups, rates, strict=True)):
            if i in own:
                group["lr"] = own[i]
            elif rate is not None:
                group["lr"] = rate.tensor
            if "capturable" in group:
                group["capturable"] = True
        # Of several steps one may take the rate that was there before.
        earlier = [*self._rates, *[None] * len(rates)]
        self._rates = [rate or before for rate, before in zip(rates, earlier, strict=False)]
        return self._moved_counts() + [rate.tensor for rate in rates if rate is not None]

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

    def settle(self, found: list[torch.Tensor], apart: dict[int, list]) -> None:
        """The function was traced and found these tensors: from now on `is_current` compares with what is there now,
        but for what is left there anew in each call.
        """
        self._apart = apart
        groups = self.optimizer.param_groups
        self._params = [list(group["params"]) for group in groups]
        pairs = zip(groups, self._rates, strict=True)
        self._options = [self._static(i, group, rate) for i, (group, rate) in enumerate(pairs)]
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
        entries = self._entries = [of for of in entries if of[2] not in self._apart.get(id(of[1]), ())]
        tensors = [(holder, name, value) for _, holder, name, value in entries if isinstance(value, torch.Tensor)]
        self._same = Entries(tensors)
        self.tensors = [value for *_, value in tensors]

    def _static(self, i: int, group: dict[str, Any], rate) -> dict[str, Any]:
        left_out = {"params", *(["lr"] if rate is not None else []), *(name for at, name in self._traced if at == i)}
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

    def changed(self) -> dict[str, Change]:
        """Numbers in the groups that are others now and are no operands, by what they are called."""
        return {
            f"{type(self.optimizer).__name__}.param_groups[{i}][{name!r}]": Change(
                "", _HINTS.get(name, _OPTION_HINT), (group, name) if is_number(value) else None
            )
            for i, (group, options) in enumerate(zip(self.optimizer.param_groups, self._options, strict=False))
            for name, value in options.items()
            if isinstance(value, (int, float, tuple)) and group.get(name, value) != value
        }

    def _is_held(self) -> bool:
        """Whether the groups and the state are those that were noted, with the same tensors."""
        state, held = self._state, self._held
        groups = self.optimizer.param_groups
        if groups is not self._groups or len(groups) != len(self._params) or self.optimizer.state is not state:
            return False
        return len(state) == len(held) and all(map(is_, state.values(), held)) and self._same.are_same()

    def _holds_now(self, found: list[torch.Tensor]) -> bool:
        """Notes the groups and the state that are there now, if they are of the same structure."""
        if any(id(held) in self._apart for held in self._held):
            return False  # each call leaves tensors in what was there
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


def _rates_of(optimizer: torch.optim.Optimizer, own: dict[int, torch.Tensor]) -> list[_Rate | None]:
    """Those of all groups, but for the ones whose rate the function has made."""
    rates = _rates.setdefault(optimizer, [])
    for i, group in enumerate(optimizer.param_groups):
        if i == len(rates):
            rates.append(None)
        if i in own:
            continue
        device = _device_of(optimizer, group)
        if device is None or isinstance(group["lr"], torch.Tensor):
            rates[i] = None
        elif rates[i] is None:
            rates[i] = _Rate(group["lr"], device)
        else:
            rates[i].set(group["lr"])
    del rates[len(optimizer.param_groups) :]
    return [None if i in own else rate for i, rate in enumerate(rates)]


def _device_of(optimizer: torch.optim.Optimizer, group: dict) -> torch.device | None:
    """Where a group's learning rate may be a tensor; None if it may not."""
    if not isinstance(optimizer, _TENSOR_RATES):
        return None
    return next((p.device for p in group["params"] if p.device.type == "tpu"), None)
