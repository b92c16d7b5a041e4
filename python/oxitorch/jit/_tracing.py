"""Running a function while the engine notes what it records, so that later calls are one program."""

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import _disable_current_modes

from oxitorch import _activate, _running
from oxitorch._core import Tree
from oxitorch._padding import is_part
from oxitorch._recipes import watched
from oxitorch._scan_layers import ScannedLayers
from oxitorch.jit._effects import Effects, user_line
from oxitorch.jit._elsewhere import Elsewhere
from oxitorch.jit._function import Found, Function, Given, Gradients, outside
from oxitorch.jit._moved import begins_of
from oxitorch.jit._names import Change, Variables
from oxitorch.jit._numbers import Unread
from oxitorch.jit._ops import (
    SPARSE_HINT,
    Ops,
    OpsBesideDynamo,
    Reads,
    is_on_device,
    is_sparse,
    storage,
    version,
)
from oxitorch.jit._optimizers import Groups, Stepped, stepping_as_traced
from oxitorch.jit._parallel import (
    Sharded,
    Synced,
    SyncedStatistics,
    Wrapped,
    asks,
    begins,
    is_parallel,
    is_sharded,
    plain,
    settle,
    settle_before,
)
from oxitorch.jit._places import Holders, Kept, Memory, Place, names_by_dict

# One function of the process is traced at a time: hooks of modules and optimizers are of all threads.
alone = threading.RLock()


def running() -> "Tracer | None":
    """The function that this thread traces."""
    return _running.tracer()


def is_inner_call() -> bool:
    """Whether what this thread calls is a part of something larger: of a function that is traced or compiled, of a
    transform of `torch.func`, of a graph that `make_fx` makes.
    """
    return (
        running() is not None
        or torch.compiler.is_compiling()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None
    )


def _begins_step(*of) -> None:
    # Dynamo takes hooks into its graphs.
    if not torch.compiler.is_dynamo_compiling() and (tracer := running()) is not None:
        tracer._begins_step(*of)


def _ends_step(*of) -> None:
    if not torch.compiler.is_dynamo_compiling() and (tracer := running()) is not None:
        tracer._ends_step(*of)


# Once: a step of another thread goes through the hooks while this one traces, and fails if they change.
register_optimizer_step_pre_hook(_begins_step)
register_optimizer_step_post_hook(_ends_step)


def _computed(results: Any) -> Any:
    """Results with lazy conjugates and negations computed: as results of a program they need a storage of their own."""
    tree, leaves = Tree.of(results, [])
    tensors = leaves[: tree.tensors]
    if not any(is_on_device(t) and (t.is_conj() or t.is_neg()) for t in tensors):
        return results
    return tree.make([*(t.resolve_conj().resolve_neg() for t in tensors), *leaves[tree.tensors :]])


class _Compiling:
    """PyTorch's flag for compilers while this thread traces: that of others is as before."""

    def __init__(self, before):
        self._before, self._thread = before, threading.get_ident()

    def __bool__(self) -> bool:
        return bool(self._before) or threading.get_ident() == self._thread

    @contextmanager
    def off(self):
        """As before for this thread too."""
        thread, self._thread = self._thread, None
        try:
            yield
        finally:
            self._thread = thread


class TraceError(RuntimeError):
    """A function cannot be one program; the message says why and names the line."""

    __module__ = "oxitorch"


class Tracer:
    """One run of a function that is to be one program."""

    def __init__(
        self,
        fn: Callable,
        given: Given,
        leaves: dict[int, torch.Tensor],
        kept_before: bool,
        leaves_tensors: bool = False,
        elsewhere: Elsewhere | None = None,
    ):
        self._fn = fn
        # Where numbers are that it finds and each call has its own of.
        self._elsewhere = elsewhere
        self._kept_before = kept_before
        # Whether what it leaves under names is to be results, as a run before it has left something there. A first run
        # may fill a cache. And whether it has left something.
        self._keeps_places = kept_before or leaves_tensors
        self.leaves_tensors = False
        self._holders: Holders | None = None
        # Whether tensors that the function made are still there, and are no results.
        self.kept = False
        self.name = getattr(fn, "__qualname__", repr(fn))
        self._given = given
        self._leaves = leaves
        if any(map(is_sparse, given.tensors)):
            self._fail("takes a sparse tensor", SPARSE_HINT)
        self._effects = Effects(self.name)
        # Dynamo may be asked to compile what the function calls, but not what sees operations.
        ops = OpsBesideDynamo if "torch._dynamo" in sys.modules else Ops
        self._ops = ops(given, self._fail, self._effects)
        # By their ids, as they are called. One that the function makes is gone with what it holds.
        self._modules: dict[int, weakref.ref] = {}
        self._optimizers: dict[int, Stepped] = {}
        # Those that train in several processes, and which of them do so here.
        self._trained: list[torch.nn.Module] = []
        self._parallel: dict[int, tuple[torch.nn.Module, Synced | Sharded]] = {}
        # What is in force while modules compute, the innermost last.
        self._within: list[tuple[torch.nn.Module, Any]] = []
        # Whether it is noted what the function does; else the run is one of eager mode. Why every run is, and a hint.
        self.is_noted = True
        self.asks: tuple[str, str] | None = None
        # Numbers of Python that the function finds, before it; those that it changes, and in groups of optimizers.
        self._numbers: Variables | None = None
        self.changes: dict[str, Change] = {}
        self._groups = Groups()
        # Steps that have begun, and the states of their optimizers before a run that something is to come of.
        self._stepping: list[Stepped] = []
        self._stepped: dict[int, tuple] = {}
        # Where nothing is to come of a run: states of optimizers and gradients of leaves before it.
        self._states: dict[int, tuple] | None = None
        self._grads: dict[int, tuple] | None = None

    def run(self, args, kwargs, is_sized: bool) -> tuple[Any, Function | None]:
        """The function's results, and what later calls of the kind go by: nothing if the next is to be traced again.

        `is_sized`: sizes of arguments vary.
        """
        self._leaves.update((id(t), t) for t in self._given.leaves)
        known = list(self._leaves.values())
        begins = [t.grad for t in known]
        if not torch.ops.oxitorch._trace(self._given.tensors):
            # Also where the device is not there a function whose sizes vary is traced, in the next call.
            with stepping_as_traced() if is_sized and _activate.core().is_absent() else nullcontext():
                return self._together(args, kwargs), None
        traced = False
        try:
            tensors, made = self._results(args, kwargs)
            function = self._finish(known, begins, tensors, made) if self.is_noted else None
            traced = True
            return made.together(tensors), function
        finally:
            if not traced and self.is_noted:
                self._ops.put_back()
                torch.ops.oxitorch._untrace(self._ops.inputs)
                self._restore()
                self._undo(self._stepped, zip(known, begins, strict=True))
            # What the function has put others in place of is seen by nobody then, as in later calls: what it recorded
            # is the program that these launch.
            del begins
            self._let_go()
            _activate.core().launch_noted()

    def _undo(self, states: dict[int, tuple], grads: Iterable[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
        """Puts back what Python holds of optimizers and of gradients, where what the function computed is undone."""
        self._groups.restore(everything=True)
        for optimizer, before in states.values():
            _put_back(optimizer, before)
        grads = list(grads)
        known = {id(p) for p, _ in grads}
        for t in self._ops.leaves():
            if id(t) not in known and t.grad is not None and self._ops.is_made(t.grad):
                t.grad = None
        for p, g in grads:
            p.grad = g

    def _together(self, args, kwargs) -> Any:
        """The function's results where nothing is made of it: in debug mode, and on a device that is not there, which
        keeps what it records as one program.
        """
        core = _activate.core()
        core.cut("jit")
        _running.here.steps = []
        try:
            # In this thread, the one of which nothing ends before the function does.
            with torch.autograd.set_multithreading_enabled(False):
                (results,) = watched(lambda: [self._fn(*args, **kwargs)], self._given.tensors, [], None)
            made = _running.here.steps
        finally:
            _running.here.steps = None
        for optimizer in made:
            core.step(optimizer, False, False)
        core.cut("jit")
        return results

    def lower(self, args, kwargs) -> list[int | str]:
        """The numbers of its programs, among those of the process, and the collectives between them in words. What the
        function did is undone.

        A first run may leave the state of an optimizer behind, which changes what a second one records: it is run until
        nothing is left behind, and the state is taken away in the end.
        """
        core = _activate.core()
        device = next(
            (t.device for t in self._given.tensors if is_on_device(t)), torch.device("tpu", torch.tpu.current_device())
        )
        random = torch.tpu.get_rng_state(device)
        states: dict[int, tuple] = {}
        grads: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        try:
            for kept_before in (False, *[True] * (_MAX_DRY_RUNS - 1)):
                tracer = Tracer(self._fn, self._given, {}, kept_before, True)
                tracer._states, tracer._grads = states, grads
                found, number, text = tracer._run_dry(args, kwargs)
                # What stays is of no use to anybody; what it is computed of is left out when the window ends.
                for p, g in grads.values():
                    p.grad = g
                if found == _FUNCTION:
                    break
                if found != _KEPT:
                    raise self._refused(text)
                for optimizer, _ in states.values():
                    _make_anew(optimizer)
            else:
                raise TraceError(f"torch.tpu.jit: {self.name} keeps tensors that it makes in each call, made{text}")
            steps = core.prepare(number, device.index or 0)
        finally:
            for p, g in grads.values():
                p.grad = g
            for optimizer, before in states.values():
                _put_back(optimizer, before)
            torch.tpu.set_rng_state(random, device)
            core.cut("jit")
        if not any(isinstance(step, int) for step in steps):
            raise TraceError(f"torch.tpu.jit: {self.name} computes nothing")
        core.forget_graph(number)
        return steps

    def dry(self, args, kwargs, is_sized: bool) -> tuple[Function | None, bool]:
        """What calls of the kind would go by; the run itself is undone. Nothing if the function makes what it does not
        return. And whether another run is needed, since gradients came up that were not known of.

        Where sizes vary, results that are parts of tensors are copies: at another size they are other parts.
        """
        random = torch.tpu.get_rng_state(torch.tpu.current_device())
        self._states, self._grads = {}, {}
        self._leaves.update((id(t), t) for t in self._given.leaves)
        known = list(self._leaves.values())
        self._grads.update((id(t), (t, t.grad)) for t in known)
        begins = [t.grad for t in known]
        traced = torch.ops.oxitorch._trace(self._given.tensors, dry=True)
        if not traced:
            return None, False  # debug mode
        try:
            tensors, made = self._results(args, kwargs)
            if is_sized:
                with torch.no_grad():
                    tensors[:] = [t.clone() if is_on_device(t) and is_part(t) else t for t in tensors]
            before = len(self._leaves)
            function = self._finish(known, begins, tensors, made, is_dry=True)
            traced = False
            return function, function is None and not self.kept and len(self._leaves) > before
        finally:
            self._ops.put_back()
            if traced:
                torch.ops.oxitorch._untrace(self._ops.inputs)
            self._restore()
            self._undo(self._states, self._grads.values())
            torch.tpu.set_rng_state(random, torch.tpu.current_device())
            self._let_go()

    def _let_go(self) -> None:
        """Of the tensors of a run that has ended: a circle of references may hold it for a while."""
        self._holders = self._numbers = None
        self._stepped = {}
        self._ops.let_go()

    def _run_dry(self, args, kwargs) -> tuple[int, int, str]:
        number = _activate.core().new_graph()
        absent = _activate.core().is_absent()
        if absent or not torch.ops.oxitorch._trace(self._given.tensors, dry=True):
            raise TraceError("torch.tpu.jit: there is no program in debug mode, nor for a device that is not there")
        done = False
        try:
            results = self._call(args, kwargs)
            _, tensors = Tree.of(results, [])
            tensors = [plain(t) for t in tensors]
            tensors += [plain(t.detach()) for _, t in self._left()]
            leaves, inputs = self._ops.leaves(), self._ops.inputs_before()
            made = [plain(t.grad) for t in leaves if t.grad is not None and self._ops.is_made(t.grad)]
            if self._kept_before:
                gc.collect()  # as in a call
            found, text = torch.ops.oxitorch._traced(
                number, [*inputs, *made], tensors, bool(self._optimizers), True, self._given.donated
            )
            done = True
            return found, number, text
        finally:
            self._ops.put_back()
            self._restore()
            self._groups.restore(everything=True)
            if not done:
                torch.ops.oxitorch._untrace(self._ops.inputs)

    def _results(self, args, kwargs):
        """The tensors that the function gives, and how its results are made of them."""
        results = self._call(args, kwargs)
        tree, leaves = Tree.of(results, [])
        tensors, numbers = leaves[: tree.tensors], leaves[tree.tensors :]
        made = _Results(tree, self.name, [n.node.place for n in numbers])
        made.find_graph(tensors, self._ops.inputs)
        return tensors, made

    def _call(self, args, kwargs):
        def here(seen: Callable) -> Callable:
            return lambda *of: seen(*of) if running() is self else None  # and not for what other threads do

        hooks = (
            register_module_forward_pre_hook(here(self._calls_module)),
            register_module_forward_hook(here(self._called_module), always_call=True),
        )
        _running.here.tracer = self
        self._called_with = args, kwargs
        variables = Variables(self._fn, args, kwargs)
        self._groups = Groups(variables.optimizers)
        self._holders = Holders(variables.holders())
        self._numbers = variables
        compiling = torch.compiler._is_compiling_flag
        torch.compiler._is_compiling_flag = self._compiling = _Compiling(compiling)
        try:
            # In this thread, which is the one that the engine watches.
            unread = nullcontext() if self._given.numbers is None else Unread(self._ops.stands_for)
            alone_here = torch.autograd.set_multithreading_enabled(False)
            with alone_here, self._effects, self._ops, Reads(self._ops), unread:
                return _computed(self._fn(*args, **kwargs))
        finally:
            torch.compiler._is_compiling_flag = compiling
            _running.here.tracer = None
            self._ops.packs.clear()
            for stepped in dict.fromkeys(self._stepping):  # a step has raised
                stepped.end()
            while self._within:
                self._within.pop()[1].__exit__(None, None, None)
            for hook in hooks:
                hook.remove()

    def _left(self) -> list[tuple[Place, torch.Tensor]]:
        """What the function has left under names where other tensors were before, if it is to be results."""
        if self._holders is None:
            return []
        before = {id(t) for t in self._given.tensors} | self._holders.ids()
        taken = before & {id(t) for t in self._ops.inputs}

        def is_of_run(t: torch.Tensor) -> bool:
            if not is_on_device(t) or id(t) in taken:
                return id(t) in taken
            if self._ops.is_made(t):
                return not is_sparse(t) and not (t.is_leaf and t.requires_grad)
            # A part of what was there before, or what was under another name and no operation takes.
            return not is_sparse(t) and (self._ops.knows(t) or id(t) in before)

        left = self._holders.left(is_of_run)
        for _, t in left:
            self._ops.meets(t)
        left += [(Place(Memory(t), Memory.NAME, t), t.detach()) for t, _ in self._ops.exchanged()]
        self.leaves_tensors = bool(left)
        return left if self._keeps_places else []

    def _keep(self) -> "tuple[list[Place], list[torch.Tensor], _Results]":
        """Where the function has left tensors under names, these out of the graphs of autograd, and how they are made
        of what the program gives.
        """
        left = self._left()
        places, tensors = [place for place, _ in left], [t for _, t in left]
        kept_of = _Results(Tree.of(tensors, [])[0], self.name, [])
        kept_of.find_graph(tensors, self._ops.inputs)
        for place, t in zip(places, tensors, strict=True):
            place.holder[place.key] = t  # a graph that is let go keeps nothing
        return places, tensors, kept_of

    def _sharing(self, places: list[Place], inputs: list[torch.Tensor]) -> list[tuple[Place, int]] | None:
        """Places where there was another look at the memory of an input of the program, by its number; None if what was
        under a name was under another one, too, by which the function takes it.
        """
        numbers = {id(t): i for i, t in enumerate(inputs)}
        memory = {storage(t): i for i, t in enumerate(self._ops.inputs_before())}
        sharing = []
        for place in places:
            t = place.before
            if not isinstance(t, torch.Tensor) or isinstance(place.holder, Memory) or storage(plain(t)) not in memory:
                continue
            if self._holders.stay(t, places):
                _activate.core().remark(f"for this call alone: what it finds as {place.key!r} it also finds elsewhere")
                return None
            if id(t) not in numbers:
                sharing.append((place, memory[storage(plain(t))]))
        return sharing

    def _numbered(self, places: list[Place]) -> list[Place]:
        """The places, where the memory of an argument is that of each call's own."""
        numbers = {id(t): i for i, t in enumerate(self._given.tensors)}

        def of(place: Place) -> Place:
            number = numbers.get(id(place.before)) if isinstance(place.holder, Memory) else None
            return place if number is None else Place(None, number, None)

        return [of(place) for place in places]

    def _restore(self) -> None:
        """Puts back what the function has left on the host, and under names."""
        self._ops.host.undo()
        for leaf, on in self._ops.required():
            leaf.requires_grad_(on)
        is_dry = self._states is not None
        if self._holders is not None:
            self._holders.restore(everything=is_dry)
        if is_dry and self._numbers is not None:
            self._numbers.restore()

    def made(self, tensors: list[torch.Tensor]) -> None:
        """The function has these tensors, which no operation made."""
        self._ops.made(tensors)

    def _calls_module(self, module, _args) -> None:
        # One of the layers stands for all.
        for called in module.modules() if isinstance(module, ScannedLayers) else (module,):
            self._modules[id(called)] = weakref.ref(called)
            self._ops.may_get_gradients(called.parameters(recurse=False))
            if is_parallel(called) and id(called) not in self._parallel:
                self._meets_parallel(called)
            if self._grads is not None:
                for p in called.parameters(recurse=False):
                    self._grads.setdefault(id(p), (p, p.grad))
        within = _in_force(module)
        if within is not None:
            within.__enter__()
            self._within.append((module, within))

    def _called_module(self, module, _args, _result) -> None:
        if self._within and self._within[-1][0] is module:
            self._within.pop()[1].__exit__(None, None, None)

    def _meets_parallel(self, module) -> None:
        if is_sharded(module):
            # As its first forward does, which PyTorch 2.11 refuses where something is compiled.
            with self._compiling.off():
                module._get_fsdp_state()._lazy_init()
        # A forward alone is as ever, and may be of one process alone.
        if torch.is_grad_enabled():
            self.asks = asks(module)
            if self.asks is not None or begins(module):
                self._note_no_more(
                    self.asks or ("makes the first step of DDP with static_graph=True", "make it before")
                )
                return
            self._trained.append(module)
            if self._states is None:  # else nothing comes of the run, and it sends nothing
                settle_before(module)
        self._parallel[id(module)] = module, (Sharded if is_sharded(module) else Synced)(module)

    def _note_no_more(self, why: tuple[str, str]) -> None:
        """The run goes on as one of eager mode, as there is no program."""
        if self._states is not None:
            self._fail(*why)  # what it does is to be undone
        self.is_noted = self._ops.is_noted = False
        _activate.core().unwatch()

    def _begins_step(self, optimizer, _args, _kwargs) -> None:
        rates = self._groups.rates(optimizer)
        with _disable_current_modes():
            before = self._stepped if self._states is None else self._states
            if id(optimizer) not in before:
                before[id(optimizer)] = optimizer, {p: (state, dict(state)) for p, state in optimizer.state.items()}
            stepped = self._optimizers.setdefault(id(optimizer), Stepped(optimizer))
            # Made while no operation is seen, perhaps where another tensor was before.
            self._stepping.append(stepped)
            if self._stepping.count(stepped) == 1:  # not for the step of a base class within it
                self._ops.forget(stepped.begin(rates))

    def _ends_step(self, optimizer, _args, _kwargs) -> None:
        with _disable_current_modes():
            stepped = self._optimizers[id(optimizer)]
            self._stepping.remove(stepped)
            if stepped not in self._stepping:
                self._ops.forget(stepped.end())

    def _finish(
        self,
        known: list[torch.Tensor],
        begins: list[torch.Tensor | None],
        results: list,
        made_of: "_Results",
        is_dry: bool = False,
    ):
        inputs = self._ops.inputs
        made: list[tuple[torch.Tensor, torch.Tensor]] = []
        surprises = False
        left = self._groups.changes()
        self._groups.restore(everything=is_dry)
        for t in self._ops.leaves():
            g = t.grad
            if id(t) not in self._leaves:
                self._leaves[id(t)] = t
                surprises |= g is not None or self._ops.had_gradient(t)  # what was there before is not known
                if g is None and self._optimizers:
                    known, begins = [*known, t], [*begins, None]
            if g is not None and self._ops.is_made(g):
                made.append((t, g))
        own = results
        places, left_there, kept_of = self._keep()
        results = [*own, *left_there]
        number = _activate.core().new_graph()
        for x in results:
            if x.device.type != "tpu":
                self._fail("gives a tensor of the host", "move it to the device", x)
        everything = [*inputs, *(plain(g) for _, g in made)]
        versions, before = self._ops.versions, self._ops.inputs_before()
        written = [i for i, t in enumerate(inputs) if version(t) != versions[i]]
        written += range(len(inputs), len(everything))
        if self._kept_before:
            gc.collect()  # what only a circle of references holds is not kept
        donated = self._given.donated
        outcome, text = torch.ops.oxitorch._traced(
            number, [*before, *everything[len(before) :]], results, bool(self._optimizers), is_dry, donated
        )
        for place, t in zip(places, kept_of.together(left_there), strict=True):
            place.holder[place.key] = t
        self.kept = outcome == _KEPT
        if self.kept and (is_dry or not self._kept_before):
            return None  # the state of an optimizer, which its first step makes; a cache that is filled once
        if self.kept:
            raise TraceError(
                f"torch.tpu.jit: {self.name} keeps tensors that it makes in each call, made{text}\n"
                "hint: return them, or keep them under a name (an attribute, an item of a dict) that was there before "
                "the call; a later call would not make them"
            )
        if outcome != _FUNCTION:
            raise self._refused(text)
        elsewhere = inputs[len(self._given.tensors) :]
        apart = names_by_dict(places)
        sets = []
        if self._elsewhere is not None:
            sets = self._elsewhere.left()
            for at, own in self._elsewhere.names().items():
                apart[at] = [*apart.get(at, ()), *own]
        for stepped in self._optimizers.values():
            stepped.settle(elsewhere, apart)
        counts = self._ops.host.finish(len(self._given.tensors))
        if counts is not None:
            self._ops.values.forget(counts.tensors)
            if not self._ops.host.is_whole():
                self._fail(
                    "reads a tensor of the host that it also writes to, through another one in its memory",
                    "keep such state on the device",
                )
        if any(state.differs() for _, state in self._parallel.values()):
            self._fail(
                "leaves a module of FSDP2 in another state than it finds it in",
                "let it call backward, or fully_shard(..., reshard_after_forward=True) also for the outermost module",
            )
        if not is_dry:
            # What is settled here was not yet so in this run, and will be in all that come.
            settled = [settle(module) for module in self._trained]
            surprises |= any(settled)
        if self._numbers is not None:
            changes, looked_for = self._numbers.numbers.changed(), self._elsewhere
            self.changes = {
                of: c for of, c in changes.items() if looked_for is None or c.place is None or c.place not in looked_for
            }
            # What a scheduler sets is told of the scheduler.
            if not self.changes:
                self.changes = {of: self._numbers.set_in_group(name) for of, name in left.items()}
        looked_for, variables = self._elsewhere or (), self._numbers
        if self._holders.alters(lambda d, key: variables.is_of_library(d) or (d, key) in looked_for):
            return None  # what it finds there is another one now
        if self.leaves_tensors and not self._keeps_places:
            return None
        sharing = self._sharing(places, inputs)
        if surprises or left or self.changes or sharing is None:
            return None
        if is_dry:
            # The gradients of this run hold what is never computed.
            made = [(p, torch.empty_like(g)) for p, g in made]
            everything[len(inputs) :] = [plain(g) for _, g in made]
        memory = {storage(x) for x in results}
        seen = {i for i, t in enumerate(before[len(self._given.tensors) :]) if storage(t) in memory}
        modules = [module for ref in self._modules.values() if (module := ref()) is not None]
        function = Function(
            number,
            Found(
                elsewhere,
                modules,
                Variables(self._fn, *self._called_with, self._effects.ran(), self._ops.copied(), apart),
                self._ops.values,
                list(self._optimizers.values()),
                [synced.finish() for _, synced in self._parallel.values()],
                apart,
                counts,
                self._ops.required(),
                {id(place.before) for place in places if not isinstance(place.holder, Memory)},
            ),
            Gradients(known, begins, elsewhere, made),
            written,
            made_of.of(own, everything),
            self._ops.generators,
            self._ops.pieces,
            [*self._groups.sets, *sets],
            self._ops.told,
            Kept(self._numbered(places), elsewhere, kept_of.of(left_there, everything), sharing, seen)
            if places
            else None,
        )
        changed = {storage(everything[i]) for i in written} | {storage(x) for x in results}
        given = self._given.tensors
        function.begins, function.trail = begins_of(given), self._ops.trail
        moved = {id(t) for t, _ in self._ops.exchanged()}
        is_read = lambda t: storage(t) not in changed and id(t) not in moved  # noqa: E731
        function.reads = frozenset(i for i, t in enumerate(given) if is_read(t)) - {*donated}
        return function

    def _refused(self, why: str) -> TraceError:
        hint = next((f"\nhint: {hint}" for what, hint in _REFUSED_HINTS.items() if why.startswith(what)), "")
        if not hint and self._ops.exchanges is not None:
            hint = (
                f"\nhint: `p.data = x` at {self._ops.exchanges} gives a tensor the memory of another one; "
                "`p.data.copy_(x)` writes to its own, which a program can"
            )
        return TraceError(f"torch.tpu.jit: {self.name} cannot be one program: it depends on {why}{hint}")

    def _fail(self, what: str, hint: str, tensor: torch.Tensor | None = None) -> None:
        line = user_line()
        where = f" at {line}" if line else ""
        raise TraceError(f"torch.tpu.jit: {self.name} {what}{where}\nhint: {hint}")


def _in_force(module: torch.nn.Module):
    """A context in which a module computes while it is traced; None if it is as ever."""
    if isinstance(module, torch.nn.SyncBatchNorm):
        return SyncedStatistics()
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if isinstance(module, getattr(dynamo, "OptimizedModule", ())):
        return torch.compiler.set_stance("force_eager")  # a part of the program, as what is around it
    return None


_FUNCTION, _KEPT = 17, 18
_REFUSED_HINTS = {
    "a collective for": "call it before or after the function: later calls do not wait",
    "a collective": "the body of a loop has none, nor has a mesh of devices of this process: jit what is between them",
}
_MAX_DRY_RUNS = 4


def _put_back(optimizer: torch.optim.Optimizer, before: dict[torch.Tensor, tuple[dict, dict]]) -> None:
    """Gives an optimizer the state that it had: the dicts that it was in, with what was in them."""
    optimizer.state.clear()
    for p, (state, items) in before.items():
        state.clear()
        state.update(items)
        optimizer.state[p] = state


def _make_anew(optimizer: torch.optim.Optimizer) -> None:
    """Puts tensors of any values in place of the state of an optimizer that was run for nothing."""
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and is_on_device(value):
                state[name] = torch.empty_like(value)


class _Results:
    """Makes the results of a call of what the program gave."""

    def __init__(self, tree: Tree, name: str, numbers: list[int]):
        self._tree = tree
        self._name = name
        # Places of those that the function gives, among the numbers that it computes.
        self._numbers = numbers
        # A leaf, and numbers of results, where these have gradients: those of the program have none.
        self._anchor: torch.Tensor | None = None
        self._in_graph: list[int] = []
        # Results that are arguments themselves, by their numbers; those of the arguments.
        self._same: list[tuple[int, int]] = []
        # Results that are DTensors, by their numbers.
        self._wrapped: list[tuple[int, Wrapped]] = []

    def find_graph(self, results: list[torch.Tensor], inputs: list[torch.Tensor]) -> None:
        """Takes the results out of the graph of autograd that they are in."""
        self._in_graph = [i for i, x in enumerate(results) if x.grad_fn is not None]
        if self._in_graph:
            self._anchor = next((t for t in inputs if t.requires_grad and t.is_leaf), None)
            results[:] = [x.detach() if x.grad_fn is not None else x for x in results]
        self._wrapped = [(i, how) for i, x in enumerate(results) if (how := Wrapped.of(x)) is not None]
        results[:] = [plain(x) for x in results]

    def of(self, results: list[torch.Tensor], inputs: list[torch.Tensor]) -> "_Results":
        """These, where the program has these inputs."""
        place = {id(t): i for i, t in reversed(list(enumerate(inputs)))}
        self._same = [(i, place[id(x)]) for i, x in enumerate(results) if id(x) in place]
        return self

    def together(self, results: list[torch.Tensor], numbers: Sequence = ()) -> Any:
        """What the function gives, with these tensors, and the numbers that it computed."""
        if self._anchor is not None:
            outside(results, self._in_graph, self._anchor, self._name)
        if self._wrapped:
            results = results.copy()
            for i, how in self._wrapped:
                results[i] = how.around(results[i])
        return self._tree.make([*results, *[numbers[i] for i in self._numbers]] if self._numbers else results)

    def __call__(self, made: list[torch.Tensor], inputs: list[torch.Tensor], numbers: Sequence = ()) -> Any:
        for i, place in self._same:
            made[i] = inputs[place]
        return self.together(made, numbers)
