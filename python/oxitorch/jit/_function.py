"""What is known of a traced function, and a call by it."""

import sys
import weakref
from collections.abc import Callable
from operator import getitem, is_
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from oxitorch import _activate
from oxitorch.jit._optimizers import Stepped


class Given(NamedTuple):
    """The arguments of a call.

    Attributes:
        kind: what has to be the same in two calls that one program serves, besides the layouts of tensors.
        tensors: the tensors among the arguments.
        donated: the numbers of those that the program may overwrite.
    """

    kind: Any
    tensors: list[torch.Tensor]
    donated: list[int]


class _Is:
    """Something that cannot be hashed, compared by identity."""

    __slots__ = ("what",)

    def __init__(self, what):
        self.what = what

    def __eq__(self, other):
        return isinstance(other, _Is) and self.what is other.what

    def __hash__(self):
        return id(self.what)


def signature(args, kwargs, static, static_names, donate) -> Given:
    """The tensors among the arguments, and all the rest as something to be compared.

    Raises:
        TypeError: a static argument is a tensor.
        ValueError: an argument that is to be donated is not there.
    """
    tensors: list[torch.Tensor] = []
    rest: list = [torch.is_grad_enabled(), torch.is_autocast_enabled("tpu") and torch.get_autocast_dtype("tpu")]
    donated: list[int] = []
    for position in donate:
        if not -len(args) <= position < len(args):
            raise ValueError(
                f"torch.tpu.jit: donate_argnums has {position}, and there are {len(args)} positional arguments"
            )
    donate = {p % len(args) for p in donate} if donate else ()
    for position, value in enumerate(args):
        first = len(tensors)
        _take(value, position in static, tensors, rest)
        if position in donate:
            donated.extend(range(first, len(tensors)))
    for name, value in kwargs.items():
        rest.append(name)
        _take(value, name in static_names, tensors, rest)
    rest.extend([t.requires_grad for t in tensors])
    return Given(tuple(rest), tensors, donated)


def _take(value, static: bool, tensors: list, rest: list) -> None:
    if type(value) is torch.Tensor:
        if static:
            raise TypeError("torch.tpu.jit: a static argument is a tensor; static arguments are values of Python")
        tensors.append(value)
        rest.append(torch.Tensor)
        return
    leaves, spec = pytree.tree_flatten(value)
    rest.append(spec)
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            if static:
                raise TypeError("torch.tpu.jit: a static argument has a tensor; static arguments are values of Python")
            tensors.append(leaf)
            rest.append(torch.Tensor)
        else:
            rest.append((type(leaf), leaf if _is_hashable(leaf) else _Is(leaf)))


def _is_hashable(x) -> bool:
    try:
        hash(x)
    except TypeError:
        return False
    return True


class Found:
    """What a function finds elsewhere than among its arguments, and has to find there in each call.

    Attributes:
        tensors: in the order in which it came to them.
        modules: those that it calls, with whether they train.
        optimizers: those whose steps it makes.
    """

    def __init__(self, tensors: list[torch.Tensor], modules: list[torch.nn.Module], optimizers: list[Stepped]):
        self.tensors = tensors
        self._modules = modules
        self._training = [m.training for m in modules]
        self.optimizers = optimizers
        wanted = {id(t): t for t in tensors}
        self._dicts: list[dict] = []
        self._names: list[str] = []
        self._values: list[torch.Tensor] = []
        for module in modules:
            for held in (module._parameters, module._buffers):
                for name, value in held.items():
                    if id(value) in wanted:
                        self._dicts.append(held)
                        self._names.append(name)
                        self._values.append(value)

    def is_current(self) -> bool:
        """Whether a call would find the same. Tells the program the learning rates."""
        return (
            [m.training for m in self._modules] == self._training
            and all(map(is_, map(getitem, self._dicts, self._names), self._values))
            and all(o.is_current() for o in self.optimizers)
        )


class Gradients:
    """What a function does to `.grad` of leaves.

    Attributes:
        leaves: those of which some call made or took the gradient.
        begins: which of them have one when the function begins.
        ends: which of these it leaves without.
        taken: places among the tensors that the function finds, with the leaves whose gradients are taken there.
        made: leaves, and the gradients that it makes anew in each call, which are written by the program.
    """

    def __init__(self, leaves: list[torch.Tensor], begins: list[bool], found: list[torch.Tensor], made: dict):
        self.leaves = leaves
        self.begins = begins
        self.ends = [p for p, begun in zip(leaves, begins, strict=True) if begun and p.grad is None]
        place = {id(t): i for i, t in enumerate(found)}
        self.taken = [(place[id(p.grad)], p) for p in leaves if id(p.grad) in place]
        self.made = [(p, g) for p, g in made]

    def is_current(self) -> bool:
        return [p.grad is not None for p in self.leaves] == self.begins

    def renewed(self) -> list[torch.Tensor]:
        """The tensors that get the gradients: new ones in place of those that somebody else has, too."""
        tensors = []
        for i in range(len(self.made)):
            p, g = self.made[i]
            # Seen by the pair, by `g` and by the call itself.
            if sys.getrefcount(g) > 3:
                g = torch.empty_like(g)
                self.made[i] = p, g
            tensors.append(g)
        return tensors

    def give(self) -> None:
        """Makes these the gradients, as the function does."""
        for p, g in self.made:
            if p.grad is not g:
                p.grad = g
        for p in self.ends:
            p.grad = None


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


def outside(results, anchor: torch.Tensor, name: str):
    """The results, of which gradients are an error. They look as if they came of `anchor`."""
    leaves, spec = pytree.tree_flatten(results)
    wanted = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor) and x.is_floating_point() and x.is_leaf]
    for i, x in zip(wanted, _Outside.apply(name, anchor, *[leaves[i] for i in wanted]), strict=True):
        leaves[i] = x
    return pytree.tree_unflatten(leaves, spec)


class Function:
    """A function that was traced: one program."""

    def __init__(
        self,
        number: int,
        found: Found,
        gradients: Gradients,
        written: list[int],
        results: Callable[[list, list], Any],
        name: str,
        anchor: torch.Tensor | None,
        kept: list,
    ):
        self.number = number
        self._name = name
        # A leaf, where the results have gradients that end here.
        self._anchor = anchor
        # What the program needs to live: generators.
        self._kept = kept
        self._found = found
        self._gradients = gradients
        # Numbers of the arguments whose versions go up.
        self._written = written
        self._results = results
        self._replay = torch.ops.oxitorch._replay.default
        weakref.finalize(self, _activate.core().forget_graph, number).atexit = False

    def is_current(self) -> bool:
        """Whether what the function finds besides its arguments is the same."""
        return self._found.is_current() and self._gradients.is_current()

    def call(self, given: Given) -> tuple[bool, Any]:
        """Whether the program takes these arguments, and the results."""
        gradients = self._gradients
        found = self._found.tensors
        if gradients.taken:
            found = found.copy()
            for i, p in gradients.taken:
                found[i] = p.grad
        inputs = [*given.tensors, *found, *gradients.renewed()]
        done, made = self._replay(self.number, inputs)
        if not done:
            return False, None
        if self._written:
            torch.autograd.graph.increment_version([inputs[i] for i in self._written])
        gradients.give()
        results = self._results(made, inputs)
        return True, results if self._anchor is None else outside(results, self._anchor, self._name)
