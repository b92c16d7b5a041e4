"""What names stand for that a function finds in Python: attributes of the modules that it calls, variables around it.

A program has what they stood for when the function was traced, so a call goes by it only while they stand for the same.
What is in lists and dicts is not looked at.
"""

import dis
import functools
import inspect
import types
from collections.abc import Callable, Iterable

import torch

from oxitorch._core import Cells, Dicts, Entries
from oxitorch._lines import instructions, is_library
from oxitorch.jit._parallel import is_parallel

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class Numbers:
    """Numbers of Python that a function finds so, where it reads them."""

    def __init__(self):
        # Where each is (a dict and its name there, or a cell), what it was, what it is called, and what finds the line
        # that reads it, which takes longer than a trace where there are many.
        self._all: list[tuple[dict | types.CellType, str, float, str, Callable[[], str]]] = []

    def found(
        self, where: dict | types.CellType, name: str, value: object, called: str, line: Callable[[], str]
    ) -> None:
        if type(value) in (int, float):
            self._all.append((where, name, value, called, line))

    def changed(self) -> dict[str, str]:
        """Those that are others now, by what they are called, with their lines."""
        return {called: line() for *place, value, called, line in self._all if _is_another(*place, value)}


def _is_another(where: dict | types.CellType, name: str, value: float) -> bool:
    try:
        now = where.get(name) if isinstance(where, dict) else where.cell_contents
    except ValueError:  # the variable was deleted
        return False
    return type(now) in (int, float) and now != value


class Attributes:
    """Of modules, and of what is in them: submodules, hooks, options, whether they train.

    Which parameters and buffers there are is compared, but not the tensors: a function takes some of them alone. What
    DDP and FSDP2 keep for themselves is `_parallel.py`'s.
    """

    def __init__(self, roots: Iterable[torch.nn.Module]):
        modules = {id(m): m for root in roots for m in root.modules()}
        dicts, entries = [], []
        self.numbers = Numbers()
        for m in modules.values():
            for name, value in m.__dict__.items():
                if type(value) in (int, float):
                    line = functools.partial(_read_by, type(m), name)
                    self.numbers.found(m.__dict__, name, value, f"{type(m).__name__}.{name}", line)
            if is_parallel(m):
                entries.append((m.__dict__, "training", m.training))
            else:
                dicts.append((m.__dict__, True))
                dicts += [(d, True) for name in _HOOKS if isinstance(d := m.__dict__.get(name), dict)]
            for name, by_value in (("_modules", True), ("_parameters", False), ("_buffers", False)):
                if isinstance(d := m.__dict__.get(name), dict):
                    dicts.append((d, by_value))
        self._dicts, self._entries = Dicts(dicts), Entries(entries)

    def are_same(self) -> bool:
        return self._dicts.are_same() and self._entries.are_same()


class Variables:
    """Those that a function reads, with the attributes that it reads of them: globals, and those of functions around.
    Functions and methods of the user's that are found so are gone through, too.

    Attributes:
        modules: those that are found so.
    """

    def __init__(self, fn: Callable, args: tuple, kwargs: dict):
        self.modules: list[torch.nn.Module] = []
        self.numbers = Numbers()
        self._found: list[tuple[dict, str, object]] = []
        self._found_cells: list[tuple[types.CellType, object]] = []
        self._seen: set[tuple[int, int]] = set()
        self._go_through(fn, args, kwargs)
        self._entries, self._cells = Entries(self._found), Cells(self._found_cells)
        del self._found, self._found_cells, self._seen

    def are_same(self) -> bool:
        return self._entries.are_same() and self._cells.are_same()

    def _go_through(self, fn: object, args: tuple = (), kwargs: dict | None = None) -> None:
        """A function of the user's, of whose arguments these are known."""
        if isinstance(fn, types.MethodType):
            fn, args = fn.__func__, (fn.__self__, *args)
        if not isinstance(fn, types.FunctionType) or is_library(fn.__code__.co_filename):
            return
        at = id(fn), id(args[0]) if args else 0
        if at in self._seen:
            return
        self._seen.add(at)
        known = {**dict(zip(fn.__code__.co_varnames, args, strict=False)), **(kwargs or {})}
        for value in known.values():
            self._meets(value)
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            try:
                known[name] = cell.cell_contents
            except ValueError:  # its variable was deleted, or never bound
                continue
            self._found_cells.append((cell, known[name]))
            self.numbers.found(cell, name, known[name], name, functools.partial(_line_of, fn.__code__, name))
            self._meets(known[name])
        self._read(fn.__code__, fn.__globals__, known)

    def _meets(self, value: object) -> None:
        if isinstance(value, torch.nn.Module):
            self.modules.append(value)
        else:
            self._go_through(value)

    def _read(self, code: types.CodeType, scope: dict, known: dict[str, object]) -> None:
        """What code reads, and the functions that are written in it."""
        value = None  # what was loaded last, if it is known
        for step, line in instructions(code):
            name = step.argval[-1] if isinstance(step.argval, tuple) and step.argval else step.argval
            if step.opname.startswith(("LOAD_GLOBAL", "LOAD_NAME")):
                value = scope.get(name)
                if name in scope:
                    self._found.append((scope, name, value))
                    self.numbers.found(scope, name, value, name, lambda line=line: line)
                    self._meets(value)
            elif step.opname.startswith(("LOAD_FAST", "LOAD_DEREF")):
                value = known.get(name)
            elif step.opname.startswith(("LOAD_ATTR", "LOAD_METHOD")):
                value = self._attribute(value, name, line)
            else:
                value = None
        for inner in code.co_consts:
            if isinstance(inner, types.CodeType):
                self._read(inner, scope, {n: v for n, v in known.items() if n in inner.co_freevars})

    def _attribute(self, of: object, name: str, line: str) -> object:
        """An attribute of an object; those of modules are compared as a whole."""
        held = getattr(of, "__dict__", None)
        if isinstance(of, (torch.nn.Module, torch.Tensor)) or not isinstance(held, dict):
            return None
        if isinstance(of, types.ModuleType) and is_library(getattr(of, "__file__", None) or ""):
            return None
        if name in held:
            self._found.append((held, name, held[name]))
            self.numbers.found(held, name, held[name], f"{type(of).__name__}.{name}", lambda: line)
            self._meets(held[name])
            return held[name]
        self._go_through(inspect.getattr_static(type(of), name, None), (of,))
        return None


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
