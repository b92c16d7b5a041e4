"""A run of a function of which nothing comes but what is known of it."""

from collections.abc import Sequence
from contextlib import nullcontext

import torch

from oxitorch.jit._function import Function, Given
from oxitorch.jit._numbers import Run
from oxitorch.jit._tracing import TraceError, Tracer


class Dry:
    """A run of a function on the tensors of a kind of call, and on its numbers; nothing is computed.

    The numbers are traced, or plain ones that the function is shown.
    """

    def __init__(
        self,
        jitted,
        kind,
        tensors: list[torch.Tensor],
        names: list[str],
        numbers: Run | None = None,
        shown: Sequence = (),
    ):
        self._jitted = jitted
        self._is_sized = kind.sizes is not None
        self._leaves_tensors = kind.leaves_tensors and not self._is_sized
        self._given = Given(tensors, kind.donated, numbers)
        given = shown if numbers is None else numbers.arguments
        # What it is given, and finds elsewhere.
        self._elsewhere = kind.elsewhere
        self._found = given[kind.tree.numbers :]
        values = kind.tree.make([*tensors, *given[: kind.tree.numbers]])
        count = len(values) - len(names)
        self._args, self._kwargs = values[:count], dict(zip(names, values[count:], strict=True))

    def function(self) -> Function | None:
        """None if the function makes what it does not return, as in its first call."""
        for _ in range(2):
            self._jitted.traces += 1
            elsewhere = self._elsewhere
            tracer = Tracer(self._jitted._fn, self._given, self._jitted._leaves, False, self._leaves_tensors, elsewhere)
            with nullcontext() if elsewhere is None else elsewhere.shown(self._found):
                function, again = tracer.dry(self._args, self._kwargs, self._is_sized)
            if not again:
                return function
        raise TraceError(f"torch.tpu.jit: {tracer.name} finds other gradients in each run")
