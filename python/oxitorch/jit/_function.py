"""What is known of a traced function, and a call by it."""

import copy
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from oxitorch import _activate
from oxitorch._core import Entries
from oxitorch.jit._counts import Counts
from oxitorch.jit._elsewhere import is_traced, put
from oxitorch.jit._names import Attributes, Change, Variables
from oxitorch.jit._numbers import Formulas, Run
from oxitorch.jit._optimizers import Stepped
from oxitorch.jit._parallel import Sharded, Synced, Wrapped, plain
from oxitorch.jit._pieces import Pieces
from oxitorch.jit._places import Kept
from oxitorch.jit._values import Values


class Given:
    """The arguments of a call.

    Attributes:
        tensors: the tensors among the arguments; of a DTensor the part that this process has.
        leaves: those that may get gradients.
        donated: the places of those that the program may overwrite.
        numbers: the numbers among the arguments, where the function is traced on such.
    """

    def __init__(self, tensors: list[torch.Tensor], donated: list[int], numbers: Run | None = None):
        self.tensors = [plain(t) for t in tensors]
        self.leaves = [t for t in tensors if t.requires_grad and t.is_leaf]
        self.donated = donated
        self.numbers = numbers


class Found:
    """What a function finds elsewhere than among its arguments, and has to find there in each call.

    Attributes:
        tensors: in the order in which it came to them.
        modules: those that it calls.
        variables: those that it reads.
        values: what it reads of tensors of the host.
        optimizers: those whose steps it makes.
        synced: those of the modules that train in several processes.
        told: leaves that it tells to require gradients, or not to, with what they do before.
        counts: what it does with tensors of the host that it writes to, if there are any.
        apart: names under which other tensors are left in each call, by the ids of their dicts.
    """

    def __init__(
        self,
        tensors: list[torch.Tensor],
        modules: list[torch.nn.Module],
        variables: Variables,
        values: Values,
        optimizers: list[Stepped],
        synced: list[Synced | Sharded],
        apart: dict[int, list],
        counts: Counts | None,
        told: list[tuple[torch.Tensor, bool]],
        replaced: set[int],
    ):
        """`replaced`: ids of tensors in whose places each call has other ones."""
        self.tensors = tensors
        self.synced = synced
        self.counts = counts
        self._attributes = Attributes([*modules, *variables.modules], apart)
        self._variables = variables
        self._values = values
        self.optimizers = optimizers
        # Leaves alone can be told to require gradients, or not to. The state of optimizers has none.
        states = {id(t) for o in optimizers for t in o.tensors}
        before = {id(t): on for t, on in told}
        leaves = [t for t in tensors if t.is_leaf and id(t) not in states | replaced]
        self._leaves = list({id(t): t for t in [*leaves, *(t for t, _ in told)]}.values())
        self._require_gradients = [before.get(id(t), t.requires_grad) for t in self._leaves]
        # Those that it leaves so.
        self.required = [(t, t.requires_grad) for t, _ in told]
        wanted = {id(t): t for t in (*tensors, *values.tensors, *(counts.tensors if counts else ()))}
        entries = [
            (held, name, value)
            for module in modules
            for held in (module._parameters, module._buffers)
            for name, value in held.items()
            if value is not None and id(plain(value)) in wanted
        ]
        self._entries = Entries(entries)
        # DTensors, and the parts that this process has.
        self._parts = [(value, part) for *_, value in entries if (part := plain(value)) is not value]

    def is_current(self) -> bool:
        """Whether a call would find the same, or what came in its place. Tells the program the learning rates."""
        return (
            self._entries.are_same()
            and self._attributes.are_same()
            and self._variables.are_same()
            and self._values.are_same()
            and [t.requires_grad for t in self._leaves] == self._require_gradients
            and all(plain(value) is part for value, part in self._parts)
            and all(m.is_current() for m in self.synced)
            and all(o.is_current(self.tensors) for o in self.optimizers)
        )

    def changed_numbers(self) -> dict[str, Change]:
        changed = self._attributes.numbers.changed() | self._variables.numbers.changed() | self._values.changed()
        for stepped in self.optimizers:
            changed |= stepped.changed()
        return changed


class Gradients:
    """What a function does to `.grad` of leaves.

    Attributes:
        leaves: those of which some call made or took the gradient.
        begins: which of them have one when the function begins.
        ends: which of these it leaves without.
        taken: places among the tensors that the function finds, with the leaves whose gradients are taken there.
        made: leaves, and the gradients that it makes anew in each call, which are written by the program.
        shown: leaves, and tensors that are there in each call, which it makes their gradients: parts of DDP's buckets.
    """

    def __init__(
        self,
        leaves: list[torch.Tensor],
        before: list[torch.Tensor | None],
        found: list[torch.Tensor],
        made: list[tuple[torch.Tensor, torch.Tensor]],
    ):
        self.leaves = leaves
        self.begins = [g is not None for g in before]
        self.ends = [p for p, g in zip(leaves, before, strict=True) if g is not None and p.grad is None]
        place = {id(t): i for i, t in enumerate(found)}
        had = [(p, plain(g)) for p, g in zip(leaves, before, strict=True) if g is not None]
        self.taken = [(place[id(g)], p) for p, g in had if id(g) in place]
        self.made = made
        own = {id(p) for p, _ in made}
        others = [(p, g) for p, g in zip(leaves, before, strict=True) if p.grad is not None and id(p) not in own]
        self.shown = [(p, p.grad) for p, g in others if p.grad is not g]
        # Places among these, by storage: gradients of layers in a loop are parts of one tensor.
        together: dict[int, list[int]] = {}
        for i, (_, g) in enumerate(self.made):
            together.setdefault(plain(g).untyped_storage()._cdata, []).append(i)
        self._together = list(together.values())

    def is_current(self) -> bool:
        return [p.grad is not None for p in self.leaves] == self.begins

    def renewed(self) -> list[torch.Tensor]:
        """The tensors that get the gradients: new ones in place of those that somebody else has, too."""
        made = self.made
        for places in self._together:
            # Seen by the pair and by the call itself.
            if any(sys.getrefcount(made[i][1]) > 2 for i in places):
                for i, g in zip(places, _like([made[i][1] for i in places]), strict=True):
                    made[i] = made[i][0], g
        return [plain(g) for _, g in made]

    def give(self) -> None:
        """Makes these the gradients, as the function does."""
        for p, g in self.made:
            if p.grad is not g:
                p.grad = g
        for p, g in self.shown:
            p.grad = g
        for p in self.ends:
            p.grad = None


def _is_same(t: torch.Tensor, told: torch.Tensor) -> bool:
    return t.dtype == told.dtype and torch.equal(t, told)


def _like(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """New tensors in place of these, which share a storage."""
    if len(tensors) == 1:
        return [torch.empty_like(tensors[0])]
    parts = [plain(t) for t in tensors]
    storage = parts[0].new_empty(parts[0].untyped_storage().nbytes() // parts[0].itemsize)
    new = [storage.as_strided(t.size(), t.stride(), t.storage_offset()) for t in parts]
    return [x if (how := Wrapped.of(t)) is None else how.around(x) for t, x in zip(tensors, new, strict=True)]


class _Outside(torch.autograd.Function):
    """Ends a graph of autograd: what is behind it was computed by a program."""

    @staticmethod
    def forward(ctx, name, _anchor, *results):
        ctx.name = name
        return tuple(x.detach() for x in results)

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(
            f"torch.tpu.jit: the results of {ctx.name} take part in no autograd graph\n"
            "hint: call backward, or torch.func.grad, inside of the function; call it under torch.no_grad() if no "
            "gradients are wanted; torch.compile keeps forward and backward apart"
        )


def outside(results: list[torch.Tensor], which: list[int], anchor: torch.Tensor, name: str) -> None:
    """Makes gradients of some of these tensors an error, in the list. They look as if they came of `anchor`."""
    wanted = [
        i for i in which if results[i].is_floating_point() and results[i].is_leaf and not results[i].requires_grad
    ]
    for i, x in zip(wanted, _Outside.apply(name, anchor, *[results[i] for i in wanted]), strict=True):
        results[i] = x


class Function:
    """A function that was traced: one program."""

    def __init__(
        self,
        number: int,
        found: Found,
        gradients: Gradients,
        written: list[int],
        results: Callable[[list, list, Sequence], Any],
        kept: list,
        pieces: list[Pieces],
        sets: list[tuple[Any, str, Any]],
        told: dict[int, torch.Tensor],
        places: Kept | None,
    ):
        self.number = number
        # Arguments of the host of which it was told the values, and these.
        self.told = told
        # What it cuts into pieces.
        self.pieces = pieces
        # Where it sets numbers, as in groups of optimizers: the names, the places among the numbers that it computes,
        # and else the numbers.
        self._sets = [(*of, x.node.place, None) if is_traced(x) else (*of, None, x) for *of, x in sets]
        # What it leaves under names in each call.
        self._places = places
        if places is not None:
            places.let_go(found.tensors)
        # What the program needs to live: generators.
        self._kept = kept
        self._found = found
        self._gradients = gradients
        # Numbers of the arguments whose versions go up.
        self._written = written
        self._results = results
        # Where the arguments began in their storages when it was traced, and which of them it only reads.
        self.begins: list[int] = []
        self.reads: frozenset[int] = frozenset()
        # What a call needs of Python's numbers among its arguments.
        self.formulas: Formulas | None = None
        # Tells which operations it does, one after another.
        self.trail = 0
        self._replay = _activate.core().replay
        self._end_with_number()

    def _end_with_number(self) -> None:
        weakref.finalize(self, _activate.core().forget_graph, self.number).atexit = False

    @property
    def optimizers(self) -> list[Stepped]:
        """Those whose steps it makes."""
        return self._found.optimizers

    def is_current(self) -> bool:
        """Whether what the function finds besides its arguments is the same."""
        places = self._places
        return self._found.is_current() and self._gradients.is_current() and (places is None or places.is_current())

    def changed_numbers(self) -> dict[str, Change]:
        """Numbers of Python among what it found that are others now, by what they are called."""
        return self._found.changed_numbers()

    def takes_as(self, other: "Function") -> bool:
        """Whether it takes numbers as another does, which may be of another size, and asks the same of them."""
        mine, others = self.formulas, other.formulas
        return mine is others or (mine is not None and others is not None and mine.like(others))

    def renumbered(self, number: int, formulas: Formulas | None = None) -> "Function":
        """The same with another program, which may take numbers."""
        other = copy.copy(self)
        other.number = number
        other.formulas = formulas
        other._end_with_number()
        return other

    def call(
        self, tensors: list[torch.Tensor], shown: list[torch.Tensor] | None = None, numbers: Sequence = ()
    ) -> tuple[bool, Any]:
        """Whether the program takes these arguments, and the results; `shown` are the arguments that the caller has."""
        values = () if self.formulas is None else self.formulas.values(numbers)
        if values is None:
            return False, None
        if self.told and not all(_is_same((tensors if shown is None else shown)[i], t) for i, t in self.told.items()):
            return False, None
        gradients = self._gradients
        found = self._found.tensors
        counts, places = self._found.counts, self._places
        if counts is not None or places is not None or gradients.taken:
            found = found.copy()  # what a call finds elsewhere is not to be kept for the next one
        counted = None if counts is None else counts.values(found)
        if counts is not None and counted is None:
            return False, None
        if places is not None:
            places.take(found)
        for i, p in gradients.taken:
            found[i] = plain(p.grad)
        inputs = [*tensors, *found, *gradients.renewed()] if found or gradients.made else tensors
        if places is not None and not places.is_shared(inputs):
            return False, None
        if values:
            inputs = [*inputs, *self.formulas.tensors(values)]
        given = [] if places is None or shown is not None else places.given(found, len(tensors))
        done, made = self._replay(self.number, inputs, given)
        if not done:
            return False, None
        if self._written:
            torch.autograd.graph.increment_version([inputs[i] for i in self._written])
        gradients.give()
        for leaf, on in self._found.required:
            leaf.requires_grad_(on)
        if counts is not None:
            counts.write(counted)
        for where, name, place, number in self._sets:
            put(where, name, number if place is None else values[place])
        for module in self._found.synced:
            module.give()
        if places is not None:
            made = places.give(made, inputs)
        return True, self._results(made, inputs if shown is None else [*shown, *inputs[len(shown) :]], values)
