"""What names stand for that a function finds in Python: attributes of the modules that it calls, variables around it.

A program has what they stood for when the function was traced, so a call goes by it only while they stand for the same.
Which objects the function looks at is not known, but which names its code has: of whatever can be reached from the
variables that it reads, attributes of these names are compared, and what is in lists and dicts.
"""

import dis
import functools
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from operator import is_not
from typing import Any, NamedTuple

import torch

from oxitorch._core import Dicts, Entries, Fields, Lists
from oxitorch._lines import instructions, is_library
from oxitorch.jit._elsewhere import get, is_traced, put
from oxitorch.jit._parallel import is_parallel

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
# Containers of more items are data, which no call looks through.
_MAX_ITEMS = 1000
_MAX_ARRAY_BYTES = 1 << 20


class Change(NamedTuple):
    """Why a function is run anew: where the number stands that is another one now, and what to do about it."""

    where: str
    hint: str
    # What holds the number, and its name there, where each call can look for it.
    place: tuple[Any, Any] | None = None


# Of a number that is set in a group of an optimizer, and of the epochs that a scheduler counts.
_IN_GROUP = "set it outside of the function, or compute it from numbers that are arguments"
_OF_SCHEDULER = "call the scheduler's step() outside of the function, which is told the learning rate"
_ELSEWHERE = "make it an argument, or a tensor that is written in place"


def change(line: str, verb: str = "read", hint: str = _ELSEWHERE, place: tuple[Any, Any] | None = None) -> Change:
    return Change(f"{verb} at {line}" if line else "", hint, place)


class Numbers:
    """Numbers of Python that a function finds so, where it reads them."""

    def __init__(self):
        # Where each is (a dict, a list or an object, and its name there), what it was, what it is called, and what
        # finds the line that reads it, which takes longer than a trace where there are many; what to do about it.
        self._all: list[tuple[object, str, float, str, Callable[[], str], str]] = []

    def found(
        self, where: object, name: Any, value: object, called: str, line: Callable[[], str], hint: str = _ELSEWHERE
    ) -> None:
        if type(value) in (int, float):
            self._all.append((where, name, value, called, line, hint))

    def of_module(self, module: torch.nn.Module) -> None:
        """Its attributes."""
        cls = type(module)
        for name, value in module.__dict__.items():
            if type(value) in (int, float):
                line = functools.partial(_read_by, cls, name)
                self.found(module.__dict__, name, value, f"{cls.__name__}.{name}", line)

    def changed(self) -> dict[str, Change]:
        """Those that are others now, by what they are called."""
        changed = (of for of in self._all if _is_another(*of[:3]))
        return {
            called: change(line(), hint=hint, place=(where, name) if _may_be_looked_for(where, hint) else None)
            for where, name, _, called, line, hint in changed
        }

    def restore(self) -> None:
        """Puts back what was there."""
        for where, name, value, *_ in self._all:
            if _is_another(where, name, value):
                if isinstance(where, list):
                    where[name] = value
                else:
                    put(where, name, value)


def _may_be_looked_for(where: object, hint: str) -> bool:
    """Whether calls may look for a number there. A scheduler that makes a step has more that changes."""
    return not isinstance(where, list) and hint is not _OF_SCHEDULER


def _is_another(where: object, name: Any, value: float) -> bool:
    now = _get(where, name)
    return is_traced(now) or (type(now) in (int, float) and now != value)


def _get(where: Any, name: Any) -> Any:
    try:
        return where[name] if isinstance(where, list) else get(where, name)
    except (IndexError, ValueError):  # it was deleted
        return None


class Attributes:
    """Of modules, and of what is in them: submodules, hooks, options, whether they train.

    Which parameters and buffers there are is compared, but not the tensors: a function takes some of them alone. What
    DDP and FSDP2 keep for themselves is `_parallel.py`'s.
    """

    def __init__(self, roots: Iterable[torch.nn.Module], apart: dict[int, list] | None = None):
        """`apart`: names that are others in each call, by the ids of their dicts."""
        modules = {id(m): m for root in roots for m in root.modules()}
        apart = apart or {}
        dicts, entries = [], []
        self.numbers = Numbers()
        for m in modules.values():
            self.numbers.of_module(m)
            if is_parallel(m):
                entries.append((m.__dict__, "training", m.training))
            else:
                dicts.append((m.__dict__, True, apart.get(id(m.__dict__), [])))
                dicts += [(d, True, []) for name in _HOOKS if isinstance(d := m.__dict__.get(name), dict)]
            for name, by_value in (("_modules", True), ("_parameters", False), ("_buffers", False)):
                if isinstance(d := m.__dict__.get(name), dict):
                    dicts.append((d, by_value, apart.get(id(d), [])))
        self._dicts, self._entries = Dicts(dicts), Entries(entries)

    def are_same(self) -> bool:
        return self._dicts.are_same() and self._entries.are_same()


class Variables:
    """Those that a function reads, with what it reads of them: globals, and those of functions around. Functions and
    methods of the user's that are found so are gone through, too, and those that were seen running.

    Attributes:
        modules: those that are found so.
        optimizers: those that are found so.
    """

    def __init__(
        self,
        fn: Callable,
        args: tuple,
        kwargs: dict,
        ran: Iterable[tuple[types.CodeType, dict]] = (),
        copied: Iterable[int] = (),
        apart: dict[int, list] | None = None,
    ):
        apart = apart or {}
        self._names: dict[str, str] = {}
        # Attributes of objects of libraries, by the ids of their dicts.
        self._of_libraries: set[int] = set()
        # Keys that code writes.
        self._written: dict[str, str] = {}
        # What code calls `step` of.
        self._steps: dict[str, str] = {}
        self._ran = list(ran)
        # Where memory begins that each call copies to the device.
        self._copied = frozenset(copied)
        count = -1
        while len(self._names) != count:  # what is found later has other names
            count = len(self._names)
            self._clear()
            for code, scope in self._ran:
                self._read(code, scope)
            self._go_through(fn, args, kwargs)
        self._same = (
            Entries([of for of in self._entries if of[1] not in apart.get(id(of[0]), ())]),
            Fields([of for of in self._fields if not _is_apart(*of[:2], apart)]),
            Dicts([(d, True, apart.get(id(d), [])) for d in self._dicts]), Lists(self._lists),
            Arrays(self._arrays), Items(self._others),
        )  # fmt: skip
        self._ran.clear()
        modules, optimizers, holders = list(self.modules.values()), self.optimizers, [*self._dicts, *self._objects]
        self._before = [(items, items.copy()) for items in self._lists]
        self._clear(self.numbers)
        self.modules, self.optimizers, self._holders = modules, optimizers, holders

    def _clear(self, numbers: Numbers | None = None) -> None:
        self.modules: Any = {}
        self.optimizers: list[torch.optim.Optimizer] = []
        self.numbers = numbers or Numbers()
        self._entries: list[tuple[dict, Any, object]] = []
        self._fields: list[tuple[object, str, object]] = []
        self._dicts: list[dict] = []
        # Attributes of objects.
        self._objects: list[dict] = []
        self._lists: list[list] = []
        self._arrays: list = []
        self._others: list[set | deque] = []
        # What was gone through, held so that nothing else has its id.
        self._seen: dict[int, object] = {}

    def are_same(self) -> bool:
        return all(same.are_same() for same in self._same)

    def is_of_library(self, held: dict) -> bool:
        """Whether these are attributes of an object of a library, which may note there what it found out once."""
        return id(held) in self._of_libraries

    def restore(self) -> None:
        """Puts back numbers, and what was in lists."""
        self.numbers.restore()
        for items, before in self._before:
            if len(items) != len(before) or any(map(is_not, items, before)):
                items[:] = before

    def holders(self) -> Iterator[dict]:
        """Dicts in which the function may leave tensors."""
        yield from self._holders
        for m in {id(m): m for root in self.modules for m in root.modules() if not is_parallel(m)}.values():
            yield m.__dict__
            yield m._buffers
        for optimizer in self.optimizers:
            yield from (state for state in optimizer.state.values() if isinstance(state, dict))

    def set_in_group(self, name: str) -> Change:
        """Of a number in a group of an optimizer that the function has changed, by its name there."""
        line = self._written.get(name, "") or self._names.get(name, "")
        return change(line, "set", _IN_GROUP)

    def _line_of_step(self, name: str) -> str:
        """The first line that has a scheduler of this name make its step, or else reads something of it."""
        return self._steps.get(name, "") or self._names.get("get_last_lr", "")

    def _go_through(self, fn: object, args: tuple = (), kwargs: dict | None = None) -> None:
        """The function, with its arguments: what is in lists and dicts among them is compared by the call."""
        for value in _leaves((args, kwargs or {})):
            self._meets(value, "an argument")
        self._meets(fn, getattr(fn, "__qualname__", "the function"))

    def _meets(self, value: Any, called: str, line: str = "") -> None:
        """What is called so, and is read in this line."""
        if value is None or isinstance(value, _PLAIN) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, types.FunctionType):
            self._meets_function(value)
        elif isinstance(value, types.MethodType):
            self._meets(value.__func__, called, line)
            self._meets(value.__self__, called, line)
        elif isinstance(value, (staticmethod, classmethod)):
            self._meets(value.__func__, called, line)
        elif isinstance(value, property):
            self._meets(value.fget, called, line)
        elif isinstance(value, functools.partial):
            for x in (value.func, value.args, value.keywords):
                self._meets(x, called, line)
        elif isinstance(value, torch.nn.Module):
            self._meets_module(value)
        elif isinstance(value, dict):
            self._meets_dict(value, called, line)
        elif isinstance(value, (list, tuple, deque, set, frozenset)):
            self._meets_items(value, called, line)
        elif _is_array(value):
            address = value.__array_interface__["data"][0]
            if value.nbytes <= _MAX_ARRAY_BYTES and not value.dtype.hasobject and address not in self._copied:
                self._arrays.append(value)
        elif isinstance(value, type):
            if not _is_of_library(value):
                self._meets_class(value, value.__name__)
        elif not isinstance(value, types.ModuleType) or not is_library(getattr(value, "__file__", None) or ""):
            self._meets_object(value, called.rpartition(".")[2])

    def _meets_function(self, fn: types.FunctionType) -> None:
        code = fn.__code__
        if is_library(code.co_filename):
            # One that goes around another, as functools.wraps tells.
            self._meets(getattr(fn, "__wrapped__", None), fn.__qualname__)
            return
        for name, cell in zip(code.co_freevars, fn.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # its variable was deleted, or never bound
                continue
            line = functools.partial(_line_of, code, name)
            self._fields.append((cell, "cell_contents", value))
            self.numbers.found(cell, "cell_contents", value, name, line)
            self._meets(value, name)
        for x in (fn.__defaults__, fn.__kwdefaults__):
            self._meets(x, fn.__qualname__)
        self._read(code, fn.__globals__)

    def _read(self, code: types.CodeType, scope: dict) -> None:
        """What code reads, and the functions that are written in it."""
        uses = _uses(code)
        for name, line in uses.others.items():
            self._names.setdefault(name, line)
            if name in _GIVEN_BY:
                self._names.setdefault(_GIVEN_BY[name], line)
        for name, line in uses.globals.items():
            if name in scope:
                self._entries.append((scope, name, scope[name]))
                self.numbers.found(scope, name, scope[name], name, lambda line=line: line)
                self._meets(scope[name], name, line)
        for names, found in ((self._written, uses.written), (self._steps, uses.steps)):
            for name, line in found.items():
                names.setdefault(name, line)
        for inner in code.co_consts:
            if isinstance(inner, types.CodeType):
                self._read(inner, scope)

    def _meets_module(self, module: torch.nn.Module) -> None:
        """Its attributes are compared as a whole; what is in them is found here."""
        self.modules[id(module)] = module
        for m in module.modules():
            self._seen[id(m)] = m
            if is_parallel(m):
                continue
            if not _is_of_library(type(m)):
                self._meets_class(type(m), type(m).__name__, m)
            self.numbers.of_module(m)
            for name, value in m.__dict__.items():
                if name in self._names and name not in _TENSORS:
                    self._meets(value, f"{type(m).__name__}.{name}", self._names[name])
                elif name in _HOOKS:
                    for hook in list(value.values()):
                        self._meets(hook, f"a hook of {type(m).__name__}")

    def _meets_dict(self, value: dict, called: str, line: str) -> None:
        if len(value) <= _MAX_ITEMS:
            self._dicts.append(value)
        for key, x in list(value.items()):
            if len(value) <= _MAX_ITEMS or (isinstance(key, str) and key in self._names):
                where, at = f"{called}[{key!r}]", self._names.get(key, line) if isinstance(key, str) else line
                if len(value) > _MAX_ITEMS:
                    self._entries.append((value, key, x))
                self.numbers.found(value, key, x, where, lambda at=at: at)
                self._meets(x, where, at)

    def _meets_items(self, value: Any, called: str, line: str) -> None:
        if len(value) > _MAX_ITEMS:
            return
        if isinstance(value, list):
            self._lists.append(value)
        elif isinstance(value, (set, deque)):
            self._others.append(value)
        for i, x in enumerate(list(value)):
            where = f"{called}[{i}]"
            if isinstance(value, list):
                self.numbers.found(value, i, x, where, lambda: line)
            self._meets(x, where, line)

    def _meets_class(self, cls: type, called: str, instance: object | None = None) -> None:
        """Attributes that a class has, of itself or of an object; functions are gone through."""
        for owner in cls.__mro__:
            if _is_of_library(owner):
                continue
            for name, value in list(vars(owner).items()):
                is_code = isinstance(value, (types.FunctionType, staticmethod, classmethod, property))
                if name not in self._names and not (name in _CALLED and is_code):
                    continue
                if is_code:
                    self._meets(value, called)
                elif isinstance(value, types.MemberDescriptorType):
                    if instance is not None and hasattr(instance, name):
                        self._field(instance, name, getattr(instance, name), called)
                elif not hasattr(type(value), "__get__"):
                    of = cls if instance is None else instance
                    self._field(of, name, getattr(of, name, value), called, owner)

    def _meets_object(self, of: Any, name: str) -> None:
        """Attributes of an object that are named somewhere."""
        cls = type(of)
        if not _is_of_library(cls):
            self._meets_class(cls, cls.__name__, of)
        held = getattr(of, "__dict__", None)
        if not isinstance(held, dict):
            return
        self._meets(held.get("__wrapped__"), cls.__name__)
        if isinstance(of, torch.optim.lr_scheduler.LRScheduler):
            line = functools.partial(self._line_of_step, name)
            epoch = held.get("last_epoch")
            self.numbers.found(held, "last_epoch", epoch, f"{cls.__name__}.last_epoch", line, _OF_SCHEDULER)
        is_optimizer = isinstance(of, torch.optim.Optimizer)
        if is_optimizer:
            self.optimizers.append(of)
        else:
            self._objects.append(held)
            if _is_of_library(cls):
                self._of_libraries.add(id(held))
        for name, value in list(held.items()):
            if name not in self._names or (is_optimizer and name == "state"):
                continue
            called = f"{cls.__name__}.{name}"
            if is_optimizer and name == "param_groups":
                self._meets_groups(value, called)
                continue
            self._entries.append((held, name, value))
            self.numbers.found(held, name, value, called, functools.partial(self._names.get, name, ""))
            self._meets(value, called, self._names[name])

    def _meets_groups(self, groups: list[dict], called: str) -> None:
        """Of the groups of an optimizer only what is named: a learning rate is told the program otherwise."""
        for i, group in enumerate(groups):
            for key, x in list(group.items()):
                if key in self._names and key != "params":
                    self._entries.append((group, key, x))
                    where = f"{called}[{i}][{key!r}]"
                    self.numbers.found(group, key, x, where, functools.partial(self._names.get, key, ""), _IN_GROUP)

    def _field(self, of: object, name: str, value: object, called: str, owner: type | None = None) -> None:
        """An attribute that is in no dict of the object's own; `owner` has it for all of its objects."""
        called = f"{called}.{name}"
        self._fields.append((of, name, value))
        where = of if owner is None else owner
        if get(where, name) is value:
            self.numbers.found(where, name, value, called, functools.partial(self._names.get, name, ""))
        self._meets(value, called, self._names.get(name, ""))


# What code calls without its name.
_CALLED = {"__call__", "forward", "__getitem__", "__iter__", "__next__", "__len__", "__enter__", "__exit__", "__bool__"}
_TENSORS = {"_parameters", "_buffers", "_modules"}
_PLAIN = (str, bytes, int, float, complex, torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)
# What makes a key of a constant before it, to write: `group["lr"] = rate`, `{"loss": x, "lr": rate}`.
_WRITES = {"STORE_SUBSCR", "DELETE_SUBSCR", "BUILD_CONST_KEY_MAP"}
# What methods of libraries give of an object.
_GIVEN_BY = {"get_last_lr": "_last_lr"}


def _leaves(of: object) -> Iterator[object]:
    if isinstance(of, dict):
        of = tuple(of.values())
    if isinstance(of, (list, tuple)):
        for x in of:
            yield from _leaves(x)
    else:
        yield of


class _Uses(NamedTuple):
    """Names that code has, each with the first line: of globals, of attributes and keys, of keys that it writes, and of
    what it calls `step` of.
    """

    globals: dict[str, str]
    others: dict[str, str]
    written: dict[str, str]
    steps: dict[str, str]


_known_uses: "weakref.WeakKeyDictionary[types.CodeType, _Uses]" = weakref.WeakKeyDictionary()


def _uses(code: types.CodeType) -> _Uses:
    if (known := _known_uses.get(code)) is not None:
        return known
    uses = _known_uses[code] = _Uses({}, {}, {}, {})
    steps = list(instructions(code))
    for (step, line), (following, _) in zip(steps, [*steps[1:], steps[-1]], strict=True):
        name = _last(step.argval)
        if step.opname.startswith("LOAD_") and _last(following.argval) == "step" and isinstance(name, str):
            uses.steps.setdefault(name, line)
        if step.opname.startswith(("LOAD_GLOBAL", "LOAD_NAME")):
            uses.globals.setdefault(name, line)
        elif step.opname.startswith(("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")):
            uses.others.setdefault(name, line)
        elif step.opname.startswith("LOAD_CONST") and following.opname in _WRITES:
            if isinstance(step.argval, str):
                uses.written.setdefault(step.argval, line)
        elif step.opname.startswith("LOAD_CONST"):
            for x in step.argval if isinstance(step.argval, (tuple, frozenset)) else (step.argval,):
                if isinstance(x, str):
                    uses.others.setdefault(x, line)
    return uses


def _last(argval: object) -> object:
    return argval[-1] if isinstance(argval, tuple) and argval else argval


def _is_of_library(cls: type) -> bool:
    module = sys.modules.get(cls.__module__)
    file = getattr(module, "__file__", None)
    return cls.__module__ == "builtins" or (file is None and cls.__module__ != "__main__") or is_library(file or "")


def _is_apart(of: object, name: str, apart: dict[int, list]) -> bool:
    """Whether an attribute is another one in each call, of an object or of its classes."""
    return any(name in apart.get(id(holder), ()) for holder in (of, *type(of).__mro__))


class Arrays:
    """Arrays of numpy, and what was in them."""

    def __init__(self, arrays: list):
        self._all = [(a, _bits(a).copy()) for a in arrays]

    def are_same(self) -> bool:
        return all(len(now := _bits(a)) == len(bits) and bool((now == bits).all()) for a, bits in self._all)


class Items:
    """Sets and deques, and what was in them."""

    def __init__(self, of: list[set | deque]):
        self._all = [(items, items.copy()) for items in of]

    def are_same(self) -> bool:
        return all(_has_same(items, before) for items, before in self._all)


def _has_same(items: set | deque, before: set | deque) -> bool:
    if isinstance(items, set):
        return items == before  # what is in a set is hashed, and compares at no cost
    plain = (str, bool, int, float)
    return len(items) == len(before) and all(
        a is b or (type(a) is type(b) and isinstance(a, plain) and a == b) for a, b in zip(items, before, strict=True)
    )


def _is_array(value: object) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _bits(array: Any) -> Any:
    return sys.modules["numpy"].ascontiguousarray(array).reshape(-1).view("u1")


def _read_by(cls: type, name: str) -> str:
    """The line of a user's class that reads an attribute of its objects first; else that of the class's `forward`."""
    for owner in cls.__mro__:
        functions = [f for f in vars(owner).values() if isinstance(f, types.FunctionType) and f.__name__ != "__init__"]
        for fn in functions:
            if not is_library(fn.__code__.co_filename) and (line := _line_of(fn.__code__, name)):
                return line
    code = cls.forward.__code__
    return f"{code.co_filename}:{code.co_firstlineno}"


def _line_of(code: types.CodeType, name: str) -> str:
    """The first line that loads this name; empty if none does."""
    found = (line for step, line in instructions(code) if step.opname.startswith("LOAD_") and _names(step, name))
    inner = (_line_of(c, name) for c in code.co_consts if isinstance(c, types.CodeType))
    return next(found, "") or next(filter(None, inner), "")


def _names(step: dis.Instruction, name: str) -> bool:
    return step.argval == name or (isinstance(step.argval, tuple) and name in step.argval)
