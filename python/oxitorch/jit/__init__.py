"""`torch.tpu.jit`: a function of tensors becomes one program.

A call that is new runs the function, operation by operation as ever, while the engine notes what it records; see
`_tracing.py`. From then on a call of the kind is one launch: no Python of the function runs. What the function finds
elsewhere than among its arguments (parameters, the state of an optimizer) is found by the notes too, and a call goes by
them only while it is the same.
"""

import functools
import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from oxitorch import _activate, _running
from oxitorch._core import Tree
from oxitorch._dims import Dim, Dynamic, checked
from oxitorch._lines import warn
from oxitorch._padding import blank
from oxitorch.jit._dry import Dry
from oxitorch.jit._elsewhere import Elsewhere
from oxitorch.jit._function import Function, Given
from oxitorch.jit._moved import Moved
from oxitorch.jit._names import Change
from oxitorch.jit._numbered import Numbered
from oxitorch.jit._parallel import Wrapped, plain
from oxitorch.jit._sizes import Marks, Sizes
from oxitorch.jit._stages import Compiled, Lowered
from oxitorch.jit._tracing import Tracer, alone, is_inner_call

__all__ = ["Compiled", "Dim", "Jitted", "Lowered", "jit"]

# Functions that are known of one kind of call, and kinds; with one more the one that was used longest ago is forgotten.
_MAX_FUNCTIONS = 16
_MAX_KINDS = 64
# Calls one after another that may run the function anew since a number is another one; then a warning says so.
_MOST_SILENT = 3


def jit(
    fn: Callable | None = None,
    *,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    dynamic: Dynamic | None = None,
) -> Any:
    """Makes one program of each kind of calls of a function.

    The function takes and gives pytrees (tuples, lists, dicts, named tuples, ...) of tensors. Modules and optimizers
    may be among its arguments, or be found where it was defined; what it writes to them is written in each call.
    Autograd is inside: `loss.backward()`, `torch.func.grad_and_value`. Random numbers come from the device's generator,
    or from one that the function is given.

    The first call of a kind runs the function, and later ones run its program. What the function does besides is done
    once: reading a value on the host, writing to an argument that is there and keeping tensors in a list are errors
    that name the line; what it prints, and global names that it binds, are warned about. Tensors that it leaves in
    attributes and dicts, each call leaves there.

    Args:
        fn: the function. Without it, a decorator is returned.
        donate_argnums: positional arguments whose tensors the program may overwrite. They cannot be used afterwards.
        static_argnums, static_argnames: arguments that are values of Python, compared by `==`; a tensor cannot be one.
            Of the others what is no tensor is static anyway, but for floats and ints that differ between calls: they
            are operands of the program where operations take them as numbers, and what the function asks of them (`if
            step > 100`, a size) is traced for each answer.
        dynamic: dimensions whose sizes vary, of tensors in arguments: `{"tokens": {1: Dim(max=2048)}}`. One program is
            for all sizes up to a bound of the `Dim`; where an operation cannot be bounded, it is for one size, and
            `torch.tpu.explain()` says why.

    Returns:
        A `Jitted`, to be called as the function. Its results take part in no autograd graph.
    """
    if fn is None:
        return functools.partial(
            jit,
            donate_argnums=donate_argnums,
            static_argnums=static_argnums,
            static_argnames=static_argnames,
            dynamic=dynamic,
        )
    if not callable(fn):
        raise TypeError(f"torch.tpu.jit takes a function, got {type(fn).__name__}")
    varying = checked(dynamic or {})
    return Jitted(fn, _tuple(donate_argnums), _tuple(static_argnums), _tuple(static_argnames), varying)


class Jitted:
    """A function that is one program for each kind of calls. `torch.tpu.jit` makes it.

    Attributes:
        calls: how often it was called.
        traces: how often its Python was run for that.
    """

    def __init__(
        self,
        fn: Callable,
        donated: tuple[int, ...],
        static: tuple[int, ...],
        static_names: tuple[str, ...],
        dynamic: dict[str | int, dict[int, Dim]],
    ):
        functools.update_wrapper(self, fn, updated=())
        self._fn = fn
        self._donated = donated
        self._static = static
        self._static_names = static_names
        self._dynamic = dynamic
        # By the names of the arguments and what is in force.
        self._kinds: dict[Any, tuple[_Kind, ...]] = {}
        # Leaves whose gradients the function makes or takes: whether they have one says which function is right.
        self._leaves: dict[int, torch.Tensor] = {}
        # Of what is said here; `alone` is held while something is found out.
        self._lock = threading.Lock()
        # Why the function was run in calls that are as in eager mode.
        self._asks: list[tuple[str, str]] = []
        # How often the function was run in calls one after another since a number changed that is no argument, and the
        # last such call, by what the number is called.
        self._changing: dict[str, tuple[int, int]] = {}
        # Where those are of them that each call looks for, and whether that was of use.
        self._elsewhere: Elsewhere | None = None
        self.calls = 0
        self.traces = 0

    def __get__(self, instance, owner=None):
        return self if instance is None else functools.partial(self, instance)

    def __call__(self, *args, **kwargs):
        if is_inner_call():
            return self._fn(*args, **kwargs)
        with self._lock:
            self.calls += 1
        values = (*args, *kwargs.values()) if kwargs else args
        autocast = torch.is_autocast_enabled("tpu") and torch.get_autocast_dtype("tpu")
        key = (len(args), *kwargs, torch.is_grad_enabled(), autocast)
        done, results = self._call_known(key, values)
        if done:
            return results
        with alone:
            # Another thread may have traced it meanwhile; and while one traces, the others do not get their programs.
            done, results = self._call_known(key, values)
            return results if done else self._call_new(key, values, args, kwargs)

    def _call_known(self, key, values: tuple) -> tuple[bool, Any]:
        """Whether a program is known for such a call, and the results."""
        for at, kind in enumerate(self._kinds.get(key, ())):
            taken = kind.take(values)
            if taken is None:
                continue
            tensors, numbers = kind.plain(*taken)
            if kind.moved:
                tensors = kind.moved.together(tensors)
            if kind.sizes is not None and not kind.sizes.is_exact(tensors):
                done, results = kind.sizes.call(tensors, numbers)
            else:
                done, results = kind.call_numbered(tensors, numbers)
                if not done and not kind.tree.numbers:
                    done, results = kind.call(tensors)
            if done:
                kind.kept = False
                if at:
                    self._use(key, kind)
            if done or not kind.tree.numbers:
                return done, results
        return False, None

    def _call_new(self, key, values: tuple, args, kwargs) -> Any:
        """A call for which no program is known."""
        tried: list[Numbered] = []
        for kind in self._kinds.get(key, ()):
            taken = kind.take(values)
            if taken is None:
                continue
            leaves, _ = taken
            if kind.numbered is None:
                return self._call_kind(kind, leaves, args, kwargs)
            done, results = self._call_numbered(kind, leaves, kwargs)
            if done:
                return results
            if not kind.tree.numbers:
                return self._call_kind(kind, leaves, args, kwargs)
            tried.append(kind.numbered)
        kind, tensors = self._new_kind(args, kwargs)
        candidates = [] if tried else [known.with_numbers(values) for known in self._kinds.get(key, ())]
        other = next(filter(None, candidates), None)
        self._use(key, kind)
        if other is not None:
            self._use(key, other)
            done, results = self._call_numbered(other, other.take(values)[0], kwargs)
            if done:
                return results
            tried.append(other.numbered)
        try:
            return self._call_kind(kind, tensors, args, kwargs)
        except Exception:
            for numbered in tried:
                numbered.raised()
            raise

    def _use(self, key, kind: "_Kind") -> None:
        """This kind of calls is the latest."""
        with self._lock:
            others = [known for known in self._kinds.get(key, ()) if known is not kind]
            self._kinds[key] = (kind, *others[: _MAX_KINDS - 1])

    def _call_numbered(self, kind: "_Kind", leaves: list, kwargs) -> tuple[bool, Any]:
        """Whether one program can be made for these and other numbers, and the results."""
        numbered, sizes, names = kind.numbered, kind.sizes, list(kwargs)
        given, numbers = leaves[: kind.tree.tensors], kind.all_numbers(leaves[kind.tree.tensors :])
        if numbers is None:
            return False, None
        tensors = kind.plain(leaves)[0]
        if sizes is not None and not sizes.is_exact(tensors):
            trace = functools.partial(numbered.trace, self, kind, numbers=numbers, names=names)
            if sizes.learn(trace, tensors):
                return sizes.call(tensors, numbers)
            if not sizes.is_exact(tensors):
                return False, None
            done, results = numbered.call(tensors, numbers)
            if done:
                return True, results
        if sizes is None and not kind.is_wrapped:
            kind.moved.find(numbered.functions, tensors)
        if kind.moved:
            given = tensors = kind.moved.together(given)
        learned = numbered.learn(self, kind, given, numbers, names)
        return numbered.call(tensors, numbers) if learned else (False, None)

    def _call_kind(self, kind: "_Kind", tensors: list[torch.Tensor], args, kwargs) -> Any:
        """A call with sizes that vary, by a program that is made for these and others; or else as any call."""
        sizes = kind.sizes
        of_sizes = sizes is not None and not sizes.is_exact(tensors)
        if self._notice(sizes.known(tensors) if of_sizes else kind.functions) and kind.elsewhere is not None:
            done, results = self._call_numbered(kind, tensors, kwargs)
            if done:
                return results
        if of_sizes:
            if sizes.learn(lambda resized: Dry(self, kind, resized, list(kwargs)).function(), tensors):
                done, results = sizes.call(tensors)
                if done:
                    return results
            if sizes.is_exact(tensors):
                done, results = kind.call(tensors)
                if done:
                    return results
        if sizes is None and not kind.is_wrapped:
            kind.moved.find(kind.functions, tensors)
        if not kind.moved:
            return self._trace(kind, Given(tensors, kind.donated), args, kwargs)
        copies = kind.moved.together(tensors)
        values = kind.tree.make(copies)
        kwargs = dict(zip(kwargs, values[len(args) :], strict=True))
        results = self._trace(kind, Given(copies, kind.donated), values[: len(args)], kwargs)
        return kind.moved.undo(tensors, copies, results)

    def _notice(self, known: list[Function]) -> bool:
        """Before the function is run anew: of a number that changes before each call. Whether each looks for it from
        now on.
        """
        return self._note_changes(known[0].changed_numbers() if known else {})

    def _note_changes(self, changed: dict[str, Change]) -> bool:
        """A number that changes in each call is one that each call looks for; where that is of no use, a warning says
        that the function is run in each, once.
        """
        places = []
        for called, (where, hint, place) in changed.items():
            times, last = self._changing.get(called, (0, 0))
            times = times + 1 if self.calls - last <= 2 else 1
            self._changing[called] = times, self.calls
            may = place is not None and not self._dynamic and (self._elsewhere is None or place not in self._elsewhere)
            if times >= _MOST_SILENT and may:
                places.append(place)
                self._changing[called] = 0, self.calls
            elif times == _MOST_SILENT:
                name = getattr(self._fn, "__qualname__", repr(self._fn))
                why = f"{called} is another number each time" + (f", {where}" if where else "")
                said = f"torch.tpu.jit: {name} is run anew in each call, as {why}\nhint: {hint}"
                _running.say_run_anew(said)
                warn(said)
        if places:
            self._look_for(places)
        return bool(places)

    def _look_for(self, places: list[tuple]) -> None:
        """Numbers that are there are as arguments of all calls from now on."""
        known = [] if self._elsewhere is None else self._elsewhere.places
        own = {(id(where), name): (where, name) for where, name in (*known, *places)}
        self._elsewhere = Elsewhere(list(own.values()))
        for kinds in self._kinds.values():
            for kind in kinds:
                kind.look_for(self._elsewhere)

    def _marks(self, args, kwargs, fixed: list[int]) -> Marks | None:
        """The dimensions that vary, in the tensors of the arguments."""
        if not self._dynamic:
            return None
        try:
            parameters = inspect.signature(self._fn).parameters
        except ValueError:
            parameters = ()  # a builtin's have no names
        names = [name for name, _ in zip(parameters, args, strict=False)]
        names += [""] * (len(args) - len(names)) + list(kwargs)
        unknown = [a for a in self._dynamic if (a not in names if isinstance(a, str) else not a < len(args))]
        if unknown:
            raise TypeError(f"torch.tpu.jit: dynamic names {unknown[0]!r}, which is no argument of this call")
        places, first = [], 0
        for i, (name, value) in enumerate(zip(names, (*args, *kwargs.values()), strict=True)):
            tensors = [] if i in fixed else Tree.of(value, [])[1]
            for d, dim in {**self._dynamic.get(name, {}), **self._dynamic.get(i, {})}.items():
                for at, t in enumerate(tensors):
                    if -t.dim() <= d < t.dim():
                        places.append((first + at, d % t.dim(), dim))
            first += len(tensors)
        return Marks(places) if places else None

    def lower(self, *args, **kwargs) -> Lowered:
        """The program for these arguments, without a call: what the function writes is as before afterwards. With
        collectives of several processes, the programs; nothing is sent.

        Raises:
            RuntimeError: as a call would; or the device is in debug mode.
        """
        kind, tensors = self._new_kind(args, kwargs)
        with alone:
            steps = Tracer(self._fn, Given(tensors, kind.donated), {}, False).lower(args, kwargs)
        return Lowered(self, steps)

    def warm_up(self, *args, **kwargs) -> list[Compiled]:
        """Compiles the programs of all bounds of `dynamic=`, beside each other, and waits for them.

        Of a function that pads to a multiple, say, there are two for a bound.

        Nothing is computed; the arguments say what a call looks like, and their sizes do not matter.

        A function that makes what it keeps in its first call, as the state of an optimizer, is called once before.

        Returns:
            Those of each bound, ascending.

        Raises:
            ValueError: no size of these arguments varies, or there is no largest one.
            RuntimeError: there is no program for all sizes up to a bound; `torch.tpu.explain()` says why.
        """
        values = (*args, *kwargs.values())
        autocast = torch.is_autocast_enabled("tpu") and torch.get_autocast_dtype("tpu")
        key = (len(args), *kwargs, torch.is_grad_enabled(), autocast)
        with alone:
            kind = next((k for k in self._kinds.get(key, ()) if k.take(values) is not None), None)
            if kind is None:
                kind, _ = self._new_kind(args, kwargs)
                self._use(key, kind)
            if kind.sizes is None:
                raise ValueError("torch.tpu.jit: warm_up() compiles for sizes that vary, and dynamic= names none here")
            tensors, numbers = kind.plain(*kind.take(values))
            steps = []
            for bounds in kind.sizes.marks.all_bounds():
                steps.append(self._prepare(kind, tensors, numbers, bounds, list(kwargs)))
                for sizes in kind.sizes.marks.below(bounds):
                    steps.append(self._prepare(kind, tensors, numbers, sizes, list(kwargs), may_raise=True))
        return [Lowered(self, list(of)).compile() for of in dict.fromkeys(map(tuple, steps)) if of]

    def _prepare(
        self,
        kind: "_Kind",
        tensors,
        numbers: list,
        sizes: tuple[int, ...],
        names: list[str],
        may_raise: bool = False,
    ) -> list:
        """The program for arguments of these sizes, on which the compiler begins to work.

        Nothing, if the function raises there and may.
        """
        at = kind.sizes.marks.resized(tensors, sizes, blank)
        if kind.numbered is None:
            trace = lambda resized: Dry(self, kind, resized, names).function()  # noqa: E731
        else:
            trace = functools.partial(kind.numbered.trace, self, kind, numbers=numbers, names=names)
        number = kind.sizes.number(at)
        if number is None and kind.sizes.learn(trace, at):
            number = kind.sizes.number(at)
        device = next((t.device.index for t in tensors if t.device.type == "tpu"), None)
        device = torch.tpu.current_device() if device is None else device
        steps = [] if number is None else _activate.core().prepare(number, device)
        if not steps and may_raise:
            try:
                trace(at)
            except Exception:
                return []  # it takes no such sizes; a call of them raises this
        if not steps:
            name = getattr(self._fn, "__qualname__", self._fn)
            raise RuntimeError(
                f"torch.tpu.jit: {name} has no program for all sizes up to {', '.join(map(str, sizes))}\n"
                "hint: torch.tpu.explain() says which operation cannot be bounded; a function that makes the state of "
                "an optimizer is called once before warm_up()"
            )
        return steps

    def _new_kind(self, args, kwargs) -> "tuple[_Kind, list[torch.Tensor]]":
        fixed = self._fixed(args, kwargs)
        tree, tensors = Tree.of((*args, *kwargs.values()), fixed)
        wrapped = Wrapped.among(tensors)
        marks = None if wrapped else self._marks(args, kwargs, fixed)
        return _Kind(tree, _donated(args, self._donated, fixed), marks, wrapped, self._elsewhere), tensors

    def _fixed(self, args, kwargs) -> list[int]:
        """The numbers of the static arguments."""
        named = [len(args) + i for i, name in enumerate(kwargs) if name in self._static_names]
        fixed = [i % len(args) for i in self._static if -len(args) <= i < len(args)] + named
        values = (*args, *kwargs.values())
        if any(Tree.of(values[i], [])[0].tensors for i in fixed):
            raise TypeError("torch.tpu.jit: a static argument is a tensor; static arguments are values of Python")
        return fixed

    def __repr__(self) -> str:
        name = getattr(self._fn, "__qualname__", self._fn)
        return f"<torch.tpu.jit of {name}: {self.calls} calls, {self.traces} traces>"

    def _trace(self, kind: "_Kind", given: Given, args, kwargs) -> Any:
        self.traces += 1
        tracer = Tracer(self._fn, given, self._leaves, kind.kept, kind.leaves_tensors)
        results, function = tracer.run(args, kwargs, kind.sizes is not None)
        kind.kept = tracer.kept
        kind.leaves_tensors |= tracer.leaves_tensors
        self._note_changes(tracer.changes)
        if function is not None and kind.moved.may_call(function):
            kind.functions.insert(0, function)
            del kind.functions[_MAX_FUNCTIONS:]
        if tracer.asks is not None and tracer.asks not in self._asks:
            self._asks.append(tracer.asks)
            why, hint = tracer.asks
            warn(f"torch.tpu.jit: {tracer.name} {why}: it is run in each call, as in eager mode\nhint: {hint}")
        return results


class _Kind:
    """Calls that differ in the layouts of tensors alone, and in what the function finds besides its arguments."""

    def __init__(
        self,
        tree: Tree,
        donated: list[int],
        marks: Marks | None,
        wrapped: dict[int, Wrapped],
        elsewhere: Elsewhere | None,
    ):
        self.tree = tree
        # How tensors are around others, by their numbers.
        self._wrapped = wrapped
        # The numbers of the tensors that the program may overwrite.
        self.donated = donated
        self.functions: list[Function] = []
        # Which tensors begin elsewhere in each call.
        self.moved = Moved()
        # What is known by the sizes that vary.
        self.sizes = None if marks is None else Sizes(marks)
        # What is known by the numbers that vary.
        self.numbered = Numbered() if tree.numbers else None
        # Where there are more of them.
        self.elsewhere: Elsewhere | None = None
        if elsewhere is not None:
            self.look_for(elsewhere)
        # Whether the last call ran the function and left tensors behind that it made.
        self.kept = False
        # Whether a call has left tensors under names, other ones than were there.
        self.leaves_tensors = False

    @property
    def is_wrapped(self) -> bool:
        """Whether a tensor is around another."""
        return bool(self._wrapped)

    def take(self, values: tuple) -> tuple[list, bool] | None:
        """The leaves of such a call, numbers last, and whether no tensor is around another; None for another kind."""
        taken = self.tree.take(values)
        if taken is None or (taken[1] and not self._wrapped):
            return taken
        return taken if Wrapped.among(taken[0][: self.tree.tensors]) == self._wrapped else None

    def plain(self, leaves: list, are_plain: bool = False) -> tuple[list[torch.Tensor], list]:
        """The tensors that a program takes, and the numbers."""
        count = self.tree.tensors
        tensors = leaves if count == len(leaves) else leaves[:count]
        if not are_plain:
            tensors = [plain(t) for t in tensors]
        return tensors, leaves[count:]

    def look_for(self, elsewhere: Elsewhere) -> None:
        """Calls look for numbers that are elsewhere than among the arguments."""
        self.numbered, self.elsewhere = Numbered(), elsewhere

    def all_numbers(self, numbers: list) -> list | None:
        """These, which are among the arguments, and those that are elsewhere; None if there are no numbers there."""
        if self.elsewhere is None:
            return numbers
        others = self.elsewhere.read()
        return None if others is None else [*numbers, *others]

    def call_numbered(self, tensors: list[torch.Tensor], numbers: list) -> tuple[bool, Any]:
        """Whether a program is known for these with any numbers, and the results."""
        all_numbers = None if self.numbered is None else self.all_numbers(numbers)
        return (False, None) if all_numbers is None else self.numbered.call(tensors, all_numbers)

    def call(self, tensors: list[torch.Tensor]) -> tuple[bool, Any]:
        """Whether a program is known for these, and the results."""
        for function in self.functions:
            if function.is_current():
                done, results = function.call(tensors)
                if done:
                    return True, results
        return False, None

    def with_numbers(self, values: tuple) -> "_Kind | None":
        """Such calls with any numbers where these values have others; None if they differ in more than that."""
        tree = self.tree.numbered(values)
        marks = self.sizes and self.sizes.marks
        kind = None if tree is None else _Kind(tree, self.donated, marks, self._wrapped, self.elsewhere)
        if kind is not None:
            kind.leaves_tensors = self.leaves_tensors
        return kind if kind is not None and kind.take(values) is not None else None


def _donated(args: tuple, positions: tuple[int, ...], fixed: list[int]) -> list[int]:
    for position in positions:
        if not -len(args) <= position < len(args):
            raise ValueError(
                f"torch.tpu.jit: donate_argnums has {position}, and there are {len(args)} positional arguments"
            )
    wanted = {p % len(args) for p in positions}
    donated: list[int] = []
    first = 0
    for i, value in enumerate(args):
        count = 0 if i in fixed else Tree.of(value, [])[0].tensors
        if i in wanted:
            donated.extend(range(first, first + count))
        first += count
    return donated


def _tuple(x) -> tuple:
    return (x,) if isinstance(x, (int, str)) else tuple(x)
