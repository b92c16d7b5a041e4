"""Seeing each operation of a function while it runs: what it takes, and what the host would have to know of it."""

import sys
import weakref
from collections.abc import Callable
from contextlib import contextmanager
from functools import lru_cache

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from oxitorch import _ctc, _flex
from oxitorch._lines import is_library
from oxitorch._solved import says_unsolved
from oxitorch.jit._checks import check_here
from oxitorch.jit._counts import HostOps
from oxitorch.jit._effects import Effects, user_line
from oxitorch.jit._function import Given
from oxitorch.jit._packs import PACK, Packs
from oxitorch.jit._parallel import apart, is_of_processes, is_wrapped, plain
from oxitorch.jit._pieces import HINTS, Pieces
from oxitorch.jit._values import Values

_READS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.is_nonzero.default,
}


class Ops(TorchDispatchMode):
    """Sees each operation: which tensors it takes that are not known, and what the host would have to know.

    Tensors are told apart by their storages. That of a tensor that is gone may be another's afterwards, but never one's
    that was there before.
    """

    def __init__(self, given: Given, fail: Callable, effects: Effects):
        super().__init__()
        arguments = given.tensors
        self._given = arguments
        self._effects = effects
        self._numbers = given.numbers
        self.is_noted = True
        self.inputs = list(arguments)
        self.versions = [version(t) for t in arguments]
        self._inputs = set(map(id, arguments))
        self.generators: list[torch.Generator] = []
        # Leaves that had a gradient when they were met.
        self._with_gradient: set[int] = set()
        # Leaves that the function tells to require gradients, or not to, with what they did before. What it makes for
        # itself of others is gone afterwards.
        self._told: dict[int, tuple[weakref.ref[torch.Tensor], bool]] = {}
        # Tensors of the host that are made of traced numbers, and what asks for these.
        self._standing: dict[int, tuple[torch.Tensor, Callable]] = {}
        # Tensors that were there before and are given the memory of other ones, with what has their own.
        self._exchanged: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        # The first line that does so where no call can do it again.
        self.exchanges: str | None = None
        # Leaves that are DTensors.
        self._wrapped: dict[int, torch.Tensor] = {}
        self.fail = fail
        self.packs = Packs(self)
        # Storages that the engine knows: of `inputs`, and of what the function makes on the device.
        self._on_device = {storage(t) for t in arguments if is_on_device(t)}
        self._taken_from_host = {storage(t) for t in arguments if not is_on_device(t)}
        self._made: set[int] = set()
        # Their versions then.
        self._versions_taken: dict[int, int] = {}
        # Arguments that are tensors of the host, and what was made of them there.
        self._arguments = set(self._taken_from_host)
        # Of tensors of the host, whether they are the same in each call: if the function makes them of nothing.
        self._constant = dict.fromkeys(self._taken_from_host, False)
        # Those of the host that were there before, by storage, and what was made of them: which of these it is made of.
        self._outside: dict[int, list[torch.Tensor]] = {}
        # What is made of random numbers of the host.
        self._drawn: set[int] = set()
        # What Python read of the first.
        self.values = Values()
        # What is done there with tensors that the function finds.
        self.host = HostOps()
        self.pieces: list[Pieces] = []
        # Tells which operations of the device there were.
        self.trail = 0
        # What PyTorch was told of arguments of the host, by their places: calls are to have the same there.
        self.told: dict[int, torch.Tensor] = {}
        self._telling: set[int] = set()
        # While an inverse Fourier transform runs: whether its windows fit, once that is known.
        self._fits: list[torch.Tensor] | None = None
        # Of the last decomposition that may find none: the storage of the tensor that says so, and what it gave.
        self._decomposed: tuple[int, list[weakref.ref[torch.Tensor]]] = 0, []

    def forget(self, tensors: list[torch.Tensor]) -> None:
        """These tensors were made while no operation was seen."""
        for t in tensors:
            self._on_device.discard(storage(t))
            self._made.discard(storage(t))

    def made(self, tensors: list[torch.Tensor]) -> None:
        """The function made these tensors of the device."""
        self._on_device.update(map(storage, tensors))
        self._made.update(map(storage, tensors))

    def is_made(self, tensor: torch.Tensor) -> bool:
        """Whether the function made it."""
        return storage(plain(tensor)) in self._made

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether it is in memory that the function has or takes."""
        return storage(plain(tensor)) in self._on_device

    def meets(self, t: torch.Tensor) -> None:
        """The function takes a tensor of the device, past all operations."""
        if self.is_noted and _has_memory(t):
            with _disable_current_modes():
                self._take(t)

    def exchange(self, t: torch.Tensor, other: torch.Tensor) -> None:
        """The function is about to give a tensor the memory of another one. Each call gives it another one."""
        self.meets(t)
        self.meets(other)
        if not self.is_noted or not is_on_device(t) or id(t) in self._exchanged or self.is_made(t):
            return
        if not is_on_device(other):
            self.fail("gives a tensor memory of the host", "`p.data.copy_(x)` copies into its own")
        if not _has_memory(t):
            self.exchanges = self.exchanges or user_line()
            return
        with _disable_current_modes():
            self._add(t)
            self._exchanged[id(t)] = t, t.detach()

    def exchanged(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Tensors that have the memory of other ones, with what has their own."""
        return [(t, own) for t, own in self._exchanged.values() if storage(t) != storage(own)]

    def inputs_before(self) -> list[torch.Tensor]:
        """The inputs, each in its own memory."""
        own = {id(t): own for t, own in self.exchanged()}
        return [own.get(id(t), t) for t in self.inputs]

    def let_go(self) -> None:
        """Of what the run took."""
        self.inputs, self._exchanged = [], {}

    def put_back(self) -> None:
        """Gives tensors their own memory again."""
        for t, own in self._exchanged.values():
            t.data = own

    def may_get_gradients(self, parameters) -> None:
        """The function may set gradients of these; of plain ones that is seen."""
        for p in parameters:
            if is_wrapped(type(p)) and _is_leaf(p) and id(p) not in self._wrapped:
                self._wrapped[id(p)] = p
                self._meet(p)

    def _meet(self, leaf: torch.Tensor) -> None:
        if leaf.grad is not None:
            self._with_gradient.add(id(leaf))

    def stands_for(self, t: torch.Tensor, make: Callable, ask: Callable) -> None:
        """The function has made a tensor of the host of numbers that are traced, and the device makes it so. Where it
        is looked at on the host, Python asks what the numbers are.
        """
        self._standing[storage(t)] = t, ask
        self.packs.stands_for(t, make)

    def _looks_at(self, t: torch.Tensor) -> None:
        """A tensor of the host is taken as it is."""
        if (standing := self._standing.pop(storage(t), None)) is not None:
            standing[1]()
            self.packs.forget(t)

    def tell(self, leaf: torch.Tensor) -> None:
        """The function tells a tensor whether it requires gradients; an argument's is the call's matter."""
        if not leaf.is_leaf or self._is_told(leaf) or self.is_made(leaf) or any(leaf is t for t in self._given):
            return
        self._told[id(leaf)] = weakref.ref(leaf), leaf.requires_grad
        self._meet(leaf)

    def _is_told(self, leaf: torch.Tensor) -> bool:
        told = self._told.get(id(leaf))
        return told is not None and told[0]() is leaf

    def required(self) -> list[tuple[torch.Tensor, bool]]:
        """Leaves that were there before the function, and whether they require gradients is its doing."""
        alive = [(leaf, on) for ref, on in self._told.values() if (leaf := ref()) is not None]
        taken = {id(t) for t in self.inputs}
        return [(leaf, on) for leaf, on in alive if isinstance(leaf, torch.nn.Parameter) or id(leaf) in taken]

    def had_gradient(self, leaf: torch.Tensor) -> bool:
        """Whether a leaf had a gradient when the function took it first."""
        return id(leaf) in self._with_gradient

    def copied(self) -> list[int]:
        """Where the memory begins of tensors of the host that each call takes."""
        return [t.untyped_storage().data_ptr() for t in self.inputs if not is_on_device(t)]

    def leaves(self) -> list[torch.Tensor]:
        """Tensors that the function takes and that may get gradients."""
        return [*(t for t in self.inputs if _is_leaf(t) or self._is_told(t)), *self._wrapped.values()]

    # Loops and branches: their bodies are seen too.
    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """PyTorch's functions for loops have Dynamo capture their bodies, also where operations are seen."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """What skips Dynamo imports it, which takes a second."""
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not self.is_noted:
            return NotImplemented if any(map(is_wrapped, types)) else func(*args, **kwargs)
        if any(map(is_wrapped, types)):
            # What is in them is seen when they compute with it.
            self.may_get_gradients(_tensors((args, tuple(kwargs.values()))))
            return NotImplemented
        if isinstance(func, torch._ops.HigherOrderOperator) and not _flex.is_flex(func):
            args = tuple(self._body(x) if callable(x) and not isinstance(x, torch.Tensor) else x for x in args)
        taken = list(_tensors((args, tuple(kwargs.values()))))
        if any(map(is_sparse, taken)):
            self.fail(f"computes with a sparse tensor ({func})", SPARSE_HINT)
        reads = any(map(is_on_device, taken))
        on_device = reads or torch.device(kwargs.get("device") or "cpu").type == "tpu"
        if self._numbers is not None and not isinstance(func, torch._ops.HigherOrderOperator):
            args, kwargs = self._numbers.plain(func, args, kwargs, on_device)
        if any(isinstance(t, FakeTensor) for t in taken):
            return func(*args, **kwargs)  # PyTorch captures the body of a loop, and computes nothing
        if _flex.is_flex(func):
            with self:
                return _flex.in_operations(func, *args, **kwargs)
        if torch.is_inference_mode_enabled() and _is_composite(func):
            # Elsewhere autograd takes it apart before it comes here.
            with self:
                return _ctc.ctc_loss(*args, **kwargs) if func is _ctc.CTC else func.decompose(*args, **kwargs)
        if isinstance(kwargs.get("generator"), torch.Generator):
            self.generators.append(kwargs["generator"])
        if func is _TO_COPY and taken and (copied := self.packs.copy(taken[0], kwargs)) is not None:
            return copied
        if func in (_TO_COPY, _COPY) and (moved := self._moved(func, args, kwargs)) is not None:
            return moved
        if func is PACK and reads and not self._is_constant(taken[1]):
            return self.packs.pack(*args)
        if func is _OBSERVES and reads:
            _give_size(*args)
        if func in _LIFTS:  # torch.tensor has made it of Python's numbers, unseen
            self.forget(taken)
            for t in taken:
                if not is_on_device(t):
                    self._makes_on_host(func, storage(t), [])
        if reads:
            if self._fits is not None and func is torch.ops.aten.equal.default:
                with self:
                    self._fits.append(taken[0].logical_not())
                return False
            to_host = func is _TO_COPY and torch.device(kwargs.get("device") or "tpu").type == "cpu"
            if func in _READS and taken[0].dtype is torch.bool and _is_validation():
                return True
            if func in _READS and taken[0].dtype is torch.bool and (check := check_here()) is not None:
                with self:
                    torch._assert_async(taken[0] != check.raises_if, check.message)
                return not check.raises_if
            if to_host or func in _READS or (func is _COPY and not is_on_device(taken[0])):
                seeks_nan = torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()
                self.fail("reads a value on the host", _ANOMALY_HINT if seeks_nan else _READ_HINT)
        if on_device:
            self.trail = hash((self.trail, func))
            for t in taken:
                self._take(t)
        else:
            if is_of_processes(func):
                self.fail(
                    f"has a collective of the host ({func})",
                    "later calls do not run it: call it outside, or on tensors of the device",
                )
            for t in taken:
                self._meet_on_host(t)
            noted = self._noted_on_host(func, args, kwargs, taken)
            writes = self._on_host(func, taken)
        if func is _CHECK and reads:
            return self._asserts_solved(*args[:2])
        decomposes = reads and func in _DECOMPOSITIONS
        if decomposes:
            is_checked, args, kwargs = _unchecked(func, args, kwargs)
        if self._fits and func is torch.ops.aten.div.Tensor:
            with self:
                args = (torch.ops.oxitorch._asserted(args[0], self._fits.pop(), _NO_INVERSE), args[1])
        results = func(*args, **kwargs)
        if decomposes:
            self._decomposed = storage(results[-1]), [weakref.ref(t) for t in results[:-1] if _has_fractions(t)]
        if not on_device and noted is not None:
            self.host.note(func, noted, results, writes)
        if reads and func in HINTS:
            self.pieces.append(Pieces(func, len(results), user_line()))
        if reads:
            self.packs.inverts(func, args)
            self.packs.check(func, taken, results)
        if any(map(is_sparse, _tensors((results,)))):
            self.fail(f"makes a sparse tensor ({func})", SPARSE_HINT)
        before = {storage(t) for t in taken}
        for t in _tensors((results,)):
            at = storage(t)
            if at in before:
                continue
            if is_on_device(t):
                self._on_device.add(at)
                self._made.add(at)
            elif reads and func is not PACK:
                self.fail(f"computes {func} on the host", _READ_HINT)
            else:
                self._makes_on_host(func, at, taken)
        if not on_device and isinstance(results, (bool, int, float, complex)):
            self.reads_host(taken)
        if not on_device and not all(map(self._is_constant, taken)):
            self.packs.host(func, args, results)
        if decomposes and is_checked:
            self._asserts_solved(results[-1], _DECOMPOSITIONS[func])
        return results

    def _moved(self, func, args: tuple, kwargs: dict) -> torch.Tensor | None:
        """A copy from the host that converts, done as one that moves and one that converts: PyTorch converts on the
        host first, in memory that each call would have to fill. And one of a part of a tensor, or of its elements in
        another order or several times, which has memory of its own first, as a program takes whole tensors of the
        host. None if it is no such copy.
        """
        to, source = (None, args[0]) if func is _TO_COPY else args[:2]
        if not isinstance(source, torch.Tensor):
            return None
        device = torch.device(kwargs.get("device") or source.device) if to is None else to.device
        dtype = kwargs.get("dtype") if to is None else to.dtype
        if is_on_device(source) or device.type != "tpu":
            return None
        if not source.is_contiguous():
            with self:
                if to is not None:
                    return func(to, source.contiguous(), *args[2:], **kwargs)
                order = sorted(range(source.dim()), key=source.stride, reverse=True)
                rows = source.permute(order)
                if not rows.is_contiguous() or kwargs.get("memory_format") not in (None, torch.preserve_format):
                    return func(source.contiguous(), **kwargs)
                back = sorted(range(source.dim()), key=order.__getitem__)
                return func(rows, **kwargs).permute(back)  # with the strides that it has there
        if dtype in (None, source.dtype):
            return None
        with self:
            if to is None:
                return func(source, **{name: x for name, x in kwargs.items() if name != "dtype"}).to(dtype)
            return func(to, source.to(device), *args[2:], **kwargs)

    def _is_constant(self, t: torch.Tensor) -> bool:
        """Whether a tensor of the host is the same in each call."""
        return self._constant.get(storage(t), False)

    def _body(self, fn: Callable) -> Callable:
        """A body, which runs while no operation is seen."""

        def run(*given):
            with self:
                return fn(*given)

        run.__wrapped__ = fn
        return run

    def _take(self, t: torch.Tensor) -> None:
        """An operation of the device takes a tensor."""
        at = storage(t)
        if is_on_device(t):
            if at in self._on_device:
                if isinstance(t, torch.nn.Parameter) and at not in self._made:
                    self._add(t)
                return
            self._on_device.add(at)
        else:
            self._looks_at(t)
            if at in self._taken_from_host:
                if not self.host.is_written(t) or version(t) == self._versions_taken.get(at):
                    return
                self._inputs.discard(id(t))  # what it holds now is another input
            is_made = not any(t is root for root in self._outside.get(at, ())) or self.host.is_written(t)
            if not self._constant.get(at, True) and is_made and not self.host.take(t, len(self.inputs)):
                self.fail(
                    "computes on the host with tensors that another call may find changed",
                    "compute it on the device: move what it is made of there first",
                )
            self._versions_taken[at] = version(t)
            self._taken_from_host.add(at)
        self._add(t)

    def _add(self, t: torch.Tensor) -> None:
        """The program takes a tensor. Two parameters in one memory are two inputs, as later they may be in two."""
        if id(t) in self._inputs:
            return
        self._inputs.add(id(t))
        self.inputs.append(t)
        self.versions.append(version(t))
        if _is_leaf(t):
            self._meet(t)
        torch.ops.oxitorch._trace_also(t)

    def _makes_on_host(self, func, at: int, taken: list[torch.Tensor]) -> None:
        """An operation of the host has made what is in this storage."""
        of = [storage(t) for t in taken]
        drawn = _is_drawn(func)
        self._constant[at] = not drawn and all(self._constant[x] for x in of)
        outside = {id(t): t for x in of for t in self._outside.get(x, ())}
        for held in (self._arguments, self._drawn):
            if any(x in held for x in of):
                held.add(at)
            else:
                held.discard(at)  # it is where another tensor was
        if drawn:
            self._drawn.add(at)
        self._outside[at] = list(outside.values())

    def _asserts_solved(self, info: torch.Tensor, name: str) -> None:
        """PyTorch asks whether a decomposition was found, and raises if not: the program asserts it of all who use it.

        What was found is in the hands of PyTorch's code already, so it gets its own values once more.
        """
        of, refs = self._decomposed
        found = [t for ref in refs if (t := ref()) is not None]
        if of != storage(info) or not found:
            self.fail(f"asks on the host whether {name} has found anything", _READ_HINT)
        is_linalg, text = says_unsolved(name)
        with self, torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tuple(found)):
            for t in found:
                if is_linalg:
                    t.copy_(torch.ops.oxitorch._solved(t, info, text))
                else:
                    t.copy_(torch.ops.oxitorch._asserted(t, info == 0, text))

    @contextmanager
    def asserts_inverse(self):
        """PyTorch inverts a Fourier transform, and asks whether its windows fit: the program asserts it."""
        before, self._fits = self._fits, []
        try:
            yield
        finally:
            self._fits = before

    @contextmanager
    def tells(self, taken: list[torch.Tensor]):
        """PyTorch reads these tensors of the host; of those that are arguments, calls are to have the same values."""
        places = {i: t for i, t in enumerate(self._given) if any(t is own for own in taken)}
        self.reads_host([t for t in taken if not any(t is own for own in places.values())])
        self.told.update({i: t.detach().clone() for i, t in places.items()})
        before, self._telling = self._telling, self._telling | set(map(storage, places.values()))
        try:
            yield
        finally:
            self._telling = before

    def reads_host(self, taken: list[torch.Tensor]) -> None:
        """Python is told values of tensors of the host, which a program would keep as they are."""
        taken = [t for t in taken if storage(t) not in self._telling]
        if any(storage(t) in self._arguments for t in taken):
            self.fail("reads a value of an argument that is a tensor of the host", _HOST_READ_HINT)
        line = user_line() or "a line of a library"
        for t in taken:
            self._meet_on_host(t)
            if storage(t) in self._drawn:
                self._effects.say(f"draws a random number of the host, which Python reads at {line}")
            roots = self._outside.get(storage(t), ())
            self.host.read(t, roots)
            for root in roots:
                self.values.note(root, line)

    def _meet_on_host(self, t: torch.Tensor) -> None:
        at = storage(t)
        self._looks_at(t)
        if at not in self._constant:
            # What was there before may be changed by whoever has it.
            self._constant[at] = False
            self._outside[at] = [t]
            self.host.find(t)

    def _on_host(self, func, taken: list[torch.Tensor]) -> torch.Tensor | None:
        """An operation of the host takes these; gives what it writes to, if another call may find that changed."""
        if torch.Tag.dynamic_output_shape in getattr(func, "tags", ()):
            # How many elements there are. What is taken by numbers is as large as they are many.
            masks = [t for t in taken[1:] if t.dtype in (torch.bool, torch.uint8)]
            self.reads_host(masks if func is torch.ops.aten.index.Tensor else taken)
        if not taken or not getattr(func, "_schema", None) or not func._schema.is_mutable:
            return None
        if self._constant[storage(taken[0])]:
            if not all(map(self._is_constant, taken[1:])):  # what it holds from now on follows from them
                self._makes_on_host(func, storage(taken[0]), taken)
            return None
        if _is_drawn(func) or not self.host.knows(taken, self._is_constant):
            self.fail(
                f"writes to a tensor of the host ({func})", "later calls do not run it; keep such state on the device"
            )
        return taken[0]

    def _noted_on_host(self, func, args: tuple, kwargs: dict, taken: list[torch.Tensor]) -> tuple[tuple, dict] | None:
        """The arguments of an operation of the host that is done again in each call; None of one that is not."""
        if all(map(self._is_constant, taken)) or _is_drawn(func):
            return None
        return self.host.before(args, kwargs) if self.host.knows(taken, self._is_constant) else None


class OpsBesideDynamo(Ops):
    """The same where Dynamo is imported already."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return super().__torch_dispatch__(func, types, args, kwargs)


class Reads(TorchFunctionMode):
    """Sees what reads tensors of the host without an operation."""

    def __init__(self, ops: Ops):
        super().__init__()
        self._ops = ops

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _INVERSES:
            with self._ops.asserts_inverse():
                return func(*args, **kwargs)
        if func in _SPLITS:
            taken = [t for t in _tensors((args[1:], tuple(kwargs.values()))) if not is_on_device(t)]
            with self._ops.tells(taken):
                return func(*args, **kwargs)
        if func in _UNSEEN_READS and not (func in _MAY_BE_THE_SAME and args and isinstance(args[0], torch.Tensor)):
            self._ops.reads_host([t for t in _tensors((args, tuple(kwargs.values()))) if not is_on_device(t)])
        if func in _TELLS and is_on_device(args[0]) and not torch._C._functorch.is_functorch_wrapped_tensor(args[0]):
            self._ops.tell(args[0])
        if func == _DATA:
            self._ops.meets(args[0])
        elif func == _EXCHANGE:
            self._ops.exchange(*args)
        if func is torch._foreach_lerp_ and len(args) == 3 and isinstance(args[2], torch.Tensor):
            # PyTorch would read the value of what it takes as a number, as `AveragedModel` has it.
            args = *args[:2], [args[2]] * len(args[0])
        return func(*args, **kwargs)


_CHECK = torch.ops.aten._linalg_check_errors.default
# Decompositions that may find none, with the names that they have in errors.
_DECOMPOSITIONS = {
    torch.ops.aten.linalg_cholesky_ex.default: "linalg.cholesky_ex",
    torch.ops.aten.linalg_inv_ex.default: "linalg.inv_ex",
    torch.ops.aten._linalg_solve_ex.default: "torch.linalg.solve_ex",
    torch.ops.aten.linalg_lu_factor_ex.default: "torch.linalg.lu_factor_ex",
    torch.ops.aten.linalg_ldl_factor_ex.default: "torch.linalg.ldl_factor_ex",
}

_INVERSES = {torch.istft, torch.Tensor.istft}
_NO_INVERSE = "istft(): the windows that overlap add up to less than 1e-11 somewhere, where there is no inverse"
# These read a tensor of places.
_SPLITS = {torch.Tensor.tensor_split, torch.tensor_split}
# What makes a tensor of data reads those that are in it.
_UNSEEN_READS = {
    torch.tensor,
    torch.as_tensor,
    torch.asarray,
    torch.Tensor.new_tensor,
    torch.Tensor.__dlpack__,
    torch.Tensor.tolist,
    torch.Tensor.numpy,
    torch.Tensor.__array__,
}
# What tells a tensor whether it requires gradients.
_TELLS = {torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__}
# What gives a tensor in the same memory, which no operation sees, and what gives a tensor the memory of another one.
# Equal to, and not the same as, what PyTorch names.
_DATA = torch.Tensor.data.__get__
_EXCHANGE = torch.Tensor.data.__set__
# These give a tensor as it is.
_MAY_BE_THE_SAME = {torch.as_tensor, torch.asarray}
_DISTRIBUTION = torch.distributions.distribution.__file__
_TO_COPY = torch.ops.aten._to_copy.default
_COPY = torch.ops.aten.copy_.default
_OBSERVES = torch.ops.aten._fused_moving_avg_obs_fq_helper.default
_LIFTS = {torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default}
_HOST_READ_HINT = "give the function a number instead, which is an operand, or a condition where Python has to know it"
_ANOMALY_HINT = (
    "PyTorch's anomaly detection reads each gradient to find NaN: call the function itself without torch.tpu.jit, in "
    "debug mode, or with set_detect_anomaly(True, check_nan=False)"
)
_READ_HINT = "return the tensor and read it after the call; torch.where and torch.cond choose by values on the device"


SPARSE_HINT = (
    "how many elements such a tensor has is known when it is computed, so it is for eager mode; in a program the "
    "gradient of nn.Embedding(sparse=False) is one addition to rows"
)


def _tensors(of):
    """Those that have values."""
    for x in of:
        if isinstance(x, torch.Tensor):
            if x.device.type != "meta":
                yield x
        elif isinstance(x, (list, tuple)):
            yield from _tensors(x)


def _unchecked(func, args: tuple, kwargs: dict) -> tuple[bool, tuple, dict]:
    """Whether a decomposition is to raise if there is none, and its arguments without that."""
    place = next(i for i, a in enumerate(func._schema.arguments) if a.name == "check_errors")
    if place < len(args):
        return args[place], (*args[:place], False, *args[place + 1 :]), kwargs
    return kwargs.get("check_errors", False), args, {**kwargs, "check_errors": False}


def _has_fractions(t: torch.Tensor) -> bool:
    return t.is_floating_point() or t.is_complex()


def _is_validation() -> bool:
    """Whether PyTorch reads a value to check what a distribution is given; `torch.compile` leaves that out, too."""
    frame = sys._getframe(1)
    while frame is not None and is_library(frame.f_code.co_filename):
        if frame.f_code.co_filename == _DISTRIBUTION:
            return True
        frame = frame.f_back
    return False


def _give_size(
    x: torch.Tensor,
    _observes,
    _quantizes,
    low,
    high,
    scale,
    zero,
    _rate,
    _least,
    _most,
    axis: int,
    by_channel=False,
    *_,
) -> None:
    """The first call of what observes channels gives its state their number. It has it before the function is noted, as
    a function whose state has another size in its first call would be noted twice.
    """
    if not by_channel or low.numel():
        return
    n = x.shape[axis]
    with apart(), torch.no_grad():
        for state, first in (low, torch.inf), (high, -torch.inf), (scale, 1), (zero, 0):
            state.resize_(n).fill_(first)


@lru_cache(4096)
def _is_composite(func) -> bool:
    """Whether PyTorch makes an operation of others, and the device has no kernel for it."""
    if not isinstance(func, torch._ops.OpOverload):
        return False
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return has(func.name(), "CompositeImplicitAutograd") and not has(func.name(), "PrivateUse1")


def _is_drawn(func) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())


def is_on_device(t: torch.Tensor) -> bool:
    return t.device.type == "tpu"


def is_sparse(t: torch.Tensor) -> bool:
    return t.layout is not torch.strided


def _has_memory(t: torch.Tensor) -> bool:
    """Whether it is a plain tensor of the device, which is not empty for a while as those of FSDP2 are."""
    return (
        is_on_device(t)
        and not is_sparse(t)
        and not is_wrapped(type(t))
        and not isinstance(t, FakeTensor)
        and not torch._C._functorch.is_functorch_wrapped_tensor(t)
        and (t.untyped_storage().nbytes() > 0 or t.numel() == 0)
    )


def _is_leaf(t: torch.Tensor) -> bool:
    return t.requires_grad and t.is_leaf


def storage(t: torch.Tensor) -> int:
    return t.untyped_storage()._cdata


def version(t: torch.Tensor) -> int:
    return 0 if t.is_inference() else t._version
