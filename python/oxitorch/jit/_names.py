"""What names stand for that a function finds in Python: attributes of the modules that it calls, variables around it.

A program has what they stood for when the function was traced, so a call goes by it only while they stand for the same.
What is in lists and dicts is not looked at.
"""

import dis
import inspect
import types
from collections.abc import Callable, Iterable

import torch

from oxitorch._core import Cells, Dicts, Entries
from oxitorch._lines import is_library
from oxitorch.jit._parallel import is_parallel

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class Attributes:
    """Of modules, and of what is in them: submodules, hooks, options, whether they train.

    Which parameters and buffers there are is compared, but not the tensors: a function takes some of them alone. What
    DDP and FSDP2 keep for themselves is `_parallel.py`'s.
    """

    def __init__(self, roots: Iterable[torch.nn.Module]):
        modules = {id(m): m for root in roots for m in root.modules()}
        dicts, entries = [], []
        for m in modules.values():
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
        for step in dis.get_instructions(code):
            name = step.argval[-1] if isinstance(step.argval, tuple) and step.argval else step.argval
            if step.opname.startswith(("LOAD_GLOBAL", "LOAD_NAME")):
                value = scope.get(name)
                if name in scope:
                    self._found.append((scope, name, value))
                    self._meets(value)
            elif step.opname.startswith(("LOAD_FAST", "LOAD_DEREF")):
                value = known.get(name)
            elif step.opname.startswith(("LOAD_ATTR", "LOAD_METHOD")):
                value = self._attribute(value, name)
            else:
                value = None
        for inner in code.co_consts:
            if isinstance(inner, types.CodeType):
                self._read(inner, scope, {n: v for n, v in known.items() if n in inner.co_freevars})

    def _attribute(self, of: object, name: str) -> object:
        """An attribute of an object; those of modules are compared as a whole."""
        held = getattr(of, "__dict__", None)
        if isinstance(of, (torch.nn.Module, torch.Tensor)) or not isinstance(held, dict):
            return None
        if isinstance(of, types.ModuleType) and is_library(getattr(of, "__file__", None) or ""):
            return None
        if name in held:
            self._found.append((held, name, held[name]))
            self._meets(held[name])
            return held[name]
        self._go_through(inspect.getattr_static(type(of), name, None), (of,))
        return None
