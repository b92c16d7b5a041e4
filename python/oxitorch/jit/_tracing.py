"""Running a function while the engine notes what it records, so that later calls are one program."""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from oxitorch import _activate
from oxitorch.jit._effects import Effects, user_line
from oxitorch.jit._function import Found, Function, Given, Gradients, outside
from oxitorch.jit._optimizers import Stepped

_here = threading.local()

_READS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.is_nonzero.default,
}


def running() -> "Tracer | None":
    """The function that this thread traces."""
    return getattr(_here, "tracer", None)


class TraceError(RuntimeError):
    """A function cannot be one program; the message says why and names the line."""

    __module__ = "oxitorch"


class Tracer:
    """One run of a function that is to be one program."""

    def __init__(self, fn: Callable, given: Given, leaves: dict[int, torch.Tensor], kept_before: bool):
        self._fn = fn
        self._kept_before = kept_before
        # Whether tensors that the function made are still there, and are no results.
        self.kept = False
        self._name = getattr(fn, "__qualname__", repr(fn))
        self._given = given
        self._leaves = leaves
        self._ops = _Ops(given.tensors, self._fail)
        self._modules: dict[int, torch.nn.Module] = {}
        self._optimizers: dict[int, Stepped] = {}

    def run(self, args, kwargs) -> tuple[Any, Function | None]:
        """The function's results, and what later calls of the kind go by: nothing if the next is to be traced again."""
        leaves = [t for t in self._given.tensors if t.requires_grad and t.is_leaf]
        self._leaves.update((id(t), t) for t in leaves)
        known = list(self._leaves.values())
        begins = [t.grad is not None for t in known]
        if not torch.ops.oxitorch._trace(self._given.tensors):
            return self._fn(*args, **kwargs), None  # debug mode
        traced = False
        try:
            results = self._call(args, kwargs)
            leaves, spec = pytree.tree_flatten(results)
            del results
            anchor = None
            if any(isinstance(x, torch.Tensor) and x.grad_fn is not None for x in leaves):
                anchor = next((t for t in self._ops.inputs if t.requires_grad and t.is_leaf), None)
                leaves = [x.detach() if isinstance(x, torch.Tensor) and not x.is_leaf else x for x in leaves]
            function = self._finish(known, begins, leaves, spec, anchor)
            traced = True
            results = pytree.tree_unflatten(leaves, spec)
            return results if anchor is None else outside(results, anchor, self._name), function
        finally:
            if not traced:
                torch.ops.oxitorch._untrace(self._ops.inputs)

    def _call(self, args, kwargs):
        hooks = (
            register_module_forward_pre_hook(self._calls_module),
            register_optimizer_step_pre_hook(self._begins_step),
            register_optimizer_step_post_hook(self._ends_step),
        )
        _here.tracer = self
        compiling = torch.compiler._is_compiling_flag
        torch.compiler._is_compiling_flag = True
        try:
            # In this thread, which is the one that the engine watches.
            with torch.autograd.set_multithreading_enabled(False), Effects(self._name), self._ops:
                return self._fn(*args, **kwargs)
        finally:
            torch.compiler._is_compiling_flag = compiling
            _here.tracer = None
            for hook in hooks:
                hook.remove()

    def _calls_module(self, module, _args) -> None:
        self._modules[id(module)] = module

    def _begins_step(self, optimizer, _args, _kwargs) -> None:
        with _disable_current_modes():
            stepped = self._optimizers.setdefault(id(optimizer), Stepped(optimizer))
            # Made while no operation is seen, perhaps where another tensor was before.
            self._ops.forget(stepped.begin())

    def _ends_step(self, optimizer, _args, _kwargs) -> None:
        with _disable_current_modes():
            self._ops.forget(self._optimizers[id(optimizer)].end())

    def _finish(self, known: list[torch.Tensor], begins: list[bool], leaves: list, spec, anchor) -> Function | None:
        inputs = self._ops.inputs
        made: list[tuple[torch.Tensor, torch.Tensor]] = []
        surprises = False
        for t in inputs:
            if not (t.requires_grad and t.is_leaf):
                continue
            g = t.grad
            if id(t) not in self._leaves:
                self._leaves[id(t)] = t
                surprises |= g is not None  # whether it had one before is not known
            if g is not None and self._ops.is_made(g):
                made.append((t, g))
        number = _activate.core().new_graph()
        results = [x for x in leaves if isinstance(x, torch.Tensor)]
        for x in results:
            if x.device.type != "tpu":
                self._fail("gives a tensor of the host", "move it to the device", x)
        everything = [*inputs, *(g for _, g in made)]
        versions = self._ops.versions
        written = [i for i, t in enumerate(inputs) if _version(t) != versions[i]]
        written += range(len(inputs), len(everything))
        donated = self._given.donated
        outcome, text = torch.ops.oxitorch._traced(number, everything, results, bool(self._optimizers), donated)
        self.kept = outcome == _KEPT
        if self.kept and not self._kept_before:
            return None  # the state of an optimizer, which its first step makes; a cache that is filled once
        if self.kept:
            raise TraceError(
                f"torch.tpu.jit: {self._name} keeps tensors that it makes in each call, made{text}\n"
                "hint: return them; a later call would not make them"
            )
        if outcome != _FUNCTION:
            raise TraceError(f"torch.tpu.jit: {self._name} cannot be one program: it depends on {text}")
        for stepped in self._optimizers.values():
            stepped.settle()
        if surprises:
            return None
        elsewhere = inputs[len(self._given.tensors) :]
        return Function(
            number,
            Found(elsewhere, list(self._modules.values()), list(self._optimizers.values())),
            Gradients(known, begins, elsewhere, made),
            written,
            _Results(leaves, spec, everything),
            self._name,
            anchor,
            self._ops.generators,
        )

    def _fail(self, what: str, hint: str, tensor: torch.Tensor | None = None) -> None:
        line = user_line()
        where = f" at {line}" if line else ""
        raise TraceError(f"torch.tpu.jit: {self._name} {what}{where}\nhint: {hint}")


_FUNCTION, _KEPT = 17, 18


class _Results:
    """Makes the results of a call of what the program gave."""

    def __init__(self, leaves: list, spec, inputs: list[torch.Tensor]):
        self._spec = spec
        place = {id(t): i for i, t in reversed(list(enumerate(inputs)))}
        # What is no tensor; the number of an argument that is itself a result; or a result of the program.
        self._parts: list[tuple[str, Any]] = []
        for x in leaves:
            if not isinstance(x, torch.Tensor):
                self._parts.append(("value", x))
            elif id(x) in place:
                self._parts.append(("input", place[id(x)]))
            else:
                self._parts.append(("result", None))
        self._plain = all(kind == "result" for kind, _ in self._parts)
        self._single = self._plain and spec.is_leaf()

    def __call__(self, made: list, inputs: list) -> Any:
        if self._single:
            return made[0]
        if not self._plain:
            results = iter(made)
            made = []
            for kind, x in self._parts:
                # The program gives a view of an argument that is a result, too.
                result = None if kind == "value" else next(results)
                made.append({"value": x, "result": result}[kind] if kind != "input" else inputs[x])
        return pytree.tree_unflatten(made, self._spec)


class _Ops(TorchDispatchMode):
    """Sees each operation: which tensors it takes that are not known, and what the host would have to know."""

    def __init__(self, arguments: list[torch.Tensor], fail: Callable):
        super().__init__()
        self.inputs = list(arguments)
        self.versions = [_version(t) for t in arguments]
        self._fail = fail
        # Storages of arguments, of tensors that the function finds elsewhere, and of those that it makes.
        self._known = {_storage(t) for t in arguments}
        self.generators: list[torch.Generator] = []
        self._made: set[int] = set()
        # Tensors of the host that it makes: whether they are the same in each call.
        self._host: dict[int, bool] = {_storage(t): False for t in arguments if t.device.type == "cpu"}

    def forget(self, tensors: list[torch.Tensor]) -> None:
        """What is known of storages whose place these tensors have."""
        for t in tensors:
            for known in (self._known, self._made):
                known.discard(_storage(t))
            self._host.pop(_storage(t), None)

    def is_made(self, tensor: torch.Tensor) -> bool:
        """Whether the function made it."""
        return _storage(tensor) in self._made

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        taken = list(_tensors((args, kwargs.values())))
        if kwargs.get("generator") is not None:
            self.generators.append(kwargs["generator"])
        on_device = [t for t in taken if t.device.type == "tpu"]
        if on_device:
            if func in _READS or (func is torch.ops.aten._to_copy.default and _is_host(kwargs.get("device"))):
                self._fail("reads a value on the host", _READ_HINT)
            if func is torch.ops.aten.copy_.default and taken[0].device.type == "cpu":
                self._fail("copies a tensor to the host", _READ_HINT)
        makes = "tpu" if on_device else None
        if makes is None and _wants_device(kwargs.get("device")):
            makes = "tpu"
        if makes:
            for t in taken:
                self._take(t)
        else:
            self._on_host(func, taken)
        results = func(*args, **kwargs)
        for t in _tensors((results,)):
            at = _storage(t)
            if t.device.type == "cpu":
                if on_device:
                    self._fail(f"computes {func} on the host", _READ_HINT)
                constant = all(self._host.get(_storage(x), False) for x in taken)
                self._host.setdefault(at, constant and torch.Tag.nondeterministic_seeded not in func.tags)
            elif at not in self._known:
                self._known.add(at)
                self._made.add(at)
        return results

    def _take(self, t: torch.Tensor) -> None:
        """An operation of the device takes a tensor."""
        at = _storage(t)
        if at in self._known:
            return
        if t.device.type == "cpu" and not self._host.get(at, True):
            self._fail(
                "computes on the host with tensors that another call may find changed",
                "compute it on the device: move what it is made of there first",
            )
        self._known.add(at)
        self.inputs.append(t)
        self.versions.append(_version(t))
        torch.ops.oxitorch._trace_also(t)

    def _on_host(self, func, taken: list[torch.Tensor]) -> None:
        for t in taken:
            # What was there before may be changed by whoever has it.
            self._host.setdefault(_storage(t), False)
        if func._schema.is_mutable and taken and not self._host[_storage(taken[0])]:
            self._fail(
                f"writes to a tensor of the host ({func})", "later calls do not run it; keep such state on the device"
            )


_READ_HINT = "return the tensor and read it after the call; torch.where and torch.cond choose by values on the device"


def _tensors(of):
    for x in of:
        if isinstance(x, torch.Tensor):
            yield x
        elif isinstance(x, (list, tuple)) or type(x).__name__ == "dict_values":
            yield from _tensors(x)


def _is_host(device) -> bool:
    return device is not None and torch.device(device).type == "cpu"


def _wants_device(device) -> bool:
    return device is not None and torch.device(device).type == "tpu"


def _storage(t: torch.Tensor) -> int:
    return t.untyped_storage()._cdata


def _version(t: torch.Tensor) -> int:
    return 0 if t.is_inference() else t._version
