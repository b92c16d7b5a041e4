"""`torch.tpu.jit`: a function of tensors becomes one program.

A call that is new runs the function, operation by operation as ever, while the engine notes what it records; see
`_tracing.py`. From then on a call of the kind is one launch: no Python of the function runs. What the function finds
elsewhere than among its arguments (parameters, the state of an optimizer) is found by the notes too, and a call goes by
them only while it is the same.
"""

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from oxitorch.jit._function import Function, Given, signature
from oxitorch.jit._tracing import Tracer, running

__all__ = ["Jitted", "jit"]

# Functions by which one kind of call is known; with the next one the first is forgotten.
_MAX_FUNCTIONS = 16
# Kinds of calls, by what is no tensor.
_MAX_KINDS = 256


def jit(
    fn: Callable | None = None,
    *,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
) -> Any:
    """Makes one program of each kind of calls of a function.

    The function takes and gives pytrees (tuples, lists, dicts, named tuples, ...) of tensors. Modules and optimizers may
    be among its arguments, or be found where it was defined; what it writes to them is written in each call. Autograd
    is inside: `loss.backward()`, `torch.func.grad_and_value`. Random numbers come from the device's generator, or from
    one that the function is given.

    The first call of a kind runs the function, and later ones run its program. What the function does besides is done
    once: reading a value on the host, writing to a tensor of the host and keeping a tensor elsewhere are errors that
    name the line; what it prints, and global names that it binds, are warned about.

    Args:
        fn: the function. Without it, a decorator is returned.
        donate_argnums: positional arguments whose tensors the program may overwrite. They cannot be used afterwards.
        static_argnums, static_argnames: arguments that are values of Python, compared by `==`. All that is no tensor is
            static anyway; a tensor cannot be.

    Returns:
        A `Jitted`, to be called as the function. Its results take part in no autograd graph.
    """
    if fn is None:
        return functools.partial(
            jit, donate_argnums=donate_argnums, static_argnums=static_argnums, static_argnames=static_argnames
        )
    if not callable(fn):
        raise TypeError(f"torch.tpu.jit takes a function, got {type(fn).__name__}")
    return Jitted(fn, _tuple(donate_argnums), _tuple(static_argnums), _tuple(static_argnames))


class Jitted:
    """A function that is one program for each kind of calls. `torch.tpu.jit` makes it.

    Attributes:
        calls: how often it was called.
        traces: how often its Python was run for that.
    """

    def __init__(self, fn: Callable, donated: tuple[int, ...], static: tuple[int, ...], static_names: tuple[str, ...]):
        functools.update_wrapper(self, fn, updated=())
        self._fn = fn
        self._donated = donated
        self._static = static
        self._static_names = static_names
        self._kinds: dict[Any, list[Function]] = {}
        # Leaves whose gradients the function makes or takes: whether they have one says which function is right.
        self._leaves: dict[int, torch.Tensor] = {}
        # Kinds of calls of which one left tensors behind that it made.
        self._kept: set = set()
        self._lock = threading.RLock()
        self.calls = 0
        self.traces = 0

    def __get__(self, instance, owner=None):
        return self if instance is None else functools.partial(self, instance)

    def __call__(self, *args, **kwargs):
        if running() is not None or torch.compiler.is_compiling():
            return self._fn(*args, **kwargs)  # a part of what is traced
        self.calls += 1
        given = self._given(args, kwargs)
        for function in self._kinds.get(given.kind, ()):
            if function.is_current():
                done, results = function.call(given)
                if done:
                    return results
        return self._trace(given, args, kwargs)

    def __repr__(self) -> str:
        name = getattr(self._fn, "__qualname__", self._fn)
        return f"<torch.tpu.jit of {name}: {self.calls} calls, {self.traces} traces>"

    def _given(self, args, kwargs) -> Given:
        return signature(args, kwargs, self._static, self._static_names, self._donated)

    def _trace(self, given: Given, args, kwargs):
        with self._lock:
            self.traces += 1
            tracer = Tracer(self._fn, given, self._leaves, given.kind in self._kept)
            results, function = tracer.run(args, kwargs)
            if tracer.kept:
                self._kept.add(given.kind)
            if function is not None:
                if given.kind not in self._kinds and len(self._kinds) >= _MAX_KINDS:
                    self._kinds.pop(next(iter(self._kinds)))
                known = self._kinds.setdefault(given.kind, [])
                del known[_MAX_FUNCTIONS - 1 :]
                known.insert(0, function)
            return results


def _tuple(x) -> tuple:
    return (x,) if isinstance(x, (int, str)) else tuple(x)
