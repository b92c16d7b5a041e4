"""Graphs of `torch.compile` with sizes that vary: one program for all sizes up to a bound.

The symbols in such a graph are Dynamo's. A call with a new size plays the graph at that size, and at the bound if that
is new, without computing anything, and the engine makes the program of what the two record (`bounded.rs`). A symbol
that had the same value in all calls so far is that value. One that is no size (`_compile_numbers.py`) is a number that
each call gives, for which the graph is played once more with another one.

A graph is right for the sizes that its guards allow: where it is none at the bound, as a size follows from how many
pieces there are, its bound is the largest size that they allow.
"""

import sympy
import torch
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from oxitorch import _activate
from oxitorch._compile_numbers import Given, Line, Numbers, expr_of, symbols_of
from oxitorch._dims import Dim, below, sample_below
from oxitorch._padding import blank, order, packed, padded
from oxitorch._recipes import Recipes, _version

_FUNCTION = 17
# Sizes that are known of a graph; with one more the one that came first is forgotten.
_MAX_SIZES = 4096
# Sizes below a bound that are looked at for one that the guards allow.
_MAX_TRIES = 512
# Ways to make a call of one size, by the signs and the sizes of its numbers.
_MAX_WAYS = 4


class _NoNumbers(Exception):
    """What is computed depends on a number that is no size."""


class SizedGraph:
    """What is known of a graph with symbols.

    Args:
        nodes: its inputs.
        run: plays it.
    """

    @staticmethod
    def of(gm: GraphModule, run) -> "SizedGraph | None":
        """None for a graph whose sizes do not vary, or follow from values."""
        values = [n.meta.get("val") for n in gm.graph.nodes if n.op == "placeholder"]
        symbolic = [v for v in values if isinstance(v, (torch.Tensor, torch.SymInt))]
        everything = [n.meta.get("val") for n in gm.graph.nodes]
        everything = [v for v in everything if isinstance(v, (torch.Tensor, torch.SymInt))]
        if any(isinstance(v, torch.Tensor) and v.layout != torch.strided for v in symbolic):
            return None
        if any(free_unbacked_symbols(v) for v in everything):
            return None
        graph = SizedGraph(gm, values, run)
        return graph if graph._sources else None

    def __init__(self, gm: GraphModule, values: list, run):
        self._run = run
        # Of each input: its value, or its sizes.
        self._exprs = []
        # Where each symbol is found: number of the input, dimension; the factor and the term that give the size there.
        self._sources: dict = {}
        wanted, envs, lines = set(), {}, []
        for i, v in enumerate(values):
            if isinstance(v, torch.Tensor):
                sizes = [expr_of(n) for n in v.shape]
                self._exprs.append(sizes)
                found = [(expr, (i, d)) for d, expr in enumerate(sizes)]
                wanted.update(*map(symbols_of, sizes))
            elif isinstance(v, torch.SymInt):
                self._exprs.append(expr_of(v))
                found = [(expr_of(v), (i, None))]
                wanted.update(symbols_of(found[0][0]))
            else:
                self._exprs.append(None)
                continue
            env = next((n.node.shape_env for n in _symbolic(v)), None)
            for expr, place in found:
                envs.update(dict.fromkeys(symbols_of(expr), env))
                if getattr(expr, "is_symbol", False):
                    self._sources.setdefault(expr, (*place, 1, 0))
                elif (line := Line.of(expr)) is not None:
                    lines.append((line.symbol, (*place, line.factor, line.term)))
        # Some are told by others: what is saved of `x[:, 1:]` has one element less.
        for symbol, source in lines:
            self._sources.setdefault(symbol, source)
        self._dims = {symbol: _dim(envs[symbol], symbol) for symbol in self._sources}
        if wanted - set(self._sources):
            self._sources = {}
        self._env = next((env for env in envs.values() if env is not None), None)
        of_sizes = set().union(*[set().union(*map(symbols_of, e)) for e in self._exprs if isinstance(e, list)])
        # The values that each symbol had.
        self._seen: dict = {symbol: set() for symbol in self._sources}
        self._numbers = Numbers(gm, set(self._sources) - of_sizes)
        # Numbers that are what they are in each call.
        self._constants: set = set()
        self._begin()

    def call(self, inputs: list) -> list | None:
        """The results, by a program for all sizes up to a bound; None if there is none."""
        found = self._sources.values()
        values = tuple([_told(inputs[i] if d is None else inputs[i].shape[d], *line) for i, d, *line in found])
        key = self._key(inputs, values)
        known = self._calls.get(key, ())
        for way in known:
            if way is None:
                return None
            if way.given is None or way.given.fits(values):
                results = way(inputs, values)
                if results is not None:
                    return results
        if len(known) >= _MAX_WAYS:
            return None
        try:
            made = self._learn(inputs, values)
        except _NoNumbers:
            self._constants = self._numbers.symbols
            self._numbers.clear()
            self._begin()
            key = self._key(inputs, values)
            made = self._learn(inputs, values)
        if made is self:
            return None
        fits = made is not None and (made.given is None or made.given.fits(values))
        results = made(inputs, values) if fits else None
        if len(self._calls) >= _MAX_SIZES:
            self._calls.pop(next(iter(self._calls)))
        self._calls.setdefault(key, []).append(made if results is not None or not fits else None)
        return results

    def _key(self, inputs: list, values: tuple) -> tuple:
        """What a call goes by besides its tensors and numbers."""
        sizes = values if self._sizes is None else tuple([values[k] for k in self._sizes])
        return (sizes, *[(type(x := inputs[i]), x) for i in self._plain])

    def _begin(self) -> None:
        """Nothing is known."""
        numbers = self._numbers.symbols
        # Which symbols are no numbers, if not all; and which inputs are neither tensors nor numbers.
        own = [k for k, symbol in enumerate(self._sources) if symbol not in numbers]
        self._sizes = None if len(own) == len(self._sources) else own
        is_number = [not isinstance(e, list) and bool(of := symbols_of(e)) and of <= numbers for e in self._exprs]
        self._plain = [i for i, e in enumerate(self._exprs) if not isinstance(e, list) and not is_number[i]]
        # By the sizes and by inputs that are no tensors: how a call is made, in ways for different numbers, the last of
        # which is None if there is no other one.
        self._calls: dict[tuple, list[_Call | None]] = {}
        # What was recorded at bounds.
        self._bounds: dict[tuple, Recipes | None] = {}

    def _learn(self, inputs: list, values: tuple):
        for seen, n in zip(self._seen.values(), values, strict=True):
            if len(seen) < 2:
                seen.add(n)
        numbers = self._numbers.symbols
        varies = {symbol for symbol, seen in self._seen.items() if len(seen) > 1} - self._constants
        if not varies:
            return self  # nothing varies yet
        if not self._given(values, values).fits(values):
            return self  # zero, say, of which something else may be made
        varying = [symbol in varies and symbol not in numbers for symbol in self._seen]
        if not any(varying):
            orders = {i: order(inputs[i], shape) for i, shape in self._shapes(values)}
            made = self._dry(inputs, values, orders)
            return None if made is None else self._call(made, made.results, [], values)
        dims = list(self._dims.values())
        bounds = tuple([dim.bound(n) if v else n for dim, n, v in zip(dims, values, varying, strict=True)])
        sample = values
        if values == bounds:
            sample = tuple([dim.sample(n) if v else n for dim, n, v in zip(dims, values, varying, strict=True)])
        if sample == bounds:
            return None
        made, why = self._bounded(inputs, values, sample, bounds)
        if made is not None:
            return made
        # Where nothing is left over at a bound, as it is a multiple, one less is a bound, too.
        marked = [dim if v else None for dim, v in zip(dims, varying, strict=True)]
        less = below(values, bounds, marked)
        if less is not None:
            sample = values
            if values == less:
                sample = tuple([s if v else n for s, n, v in zip(sample_below(less), less, varying, strict=True)])
            made, _ = self._bounded(inputs, values, sample, less)
        most = None if made is not None else self._allowed(values, bounds, varying)
        if most is not None and most not in (bounds, less):
            sample = values
            if values == most:
                sample = tuple([s if v else n for s, n, v in zip(sample_below(most), most, varying, strict=True)])
            if sample != most and self._is_allowed(sample):
                made, _ = self._bounded(inputs, values, sample, most)
        if made is None and why:
            _activate.core().remark(f"for this size alone: {why}")
        return made

    def _is_allowed(self, values: tuple) -> bool:
        """Whether the guards of the graph hold at these values, as far as they are of its symbols."""
        given = dict(zip(self._sources, values, strict=True))
        exprs = [guard.expr for guard in self._env.guards] if self._env is not None else []
        return not any(symbols_of(e) <= set(given) and e.subs(given) == sympy.false for e in exprs)

    def _allowed(self, values: tuple, bounds: tuple, varying: list[bool]) -> tuple | None:
        """The largest sizes up to these bounds that the guards allow; None if that says nothing."""
        most = list(values)
        for k, is_own in enumerate(varying):
            tries = range(bounds[k], max(values[k], bounds[k] - _MAX_TRIES) - 1, -1) if is_own else ()
            for n in tries:
                if self._is_allowed((*values[:k], n, *values[k + 1 :])):
                    most[k] = n
                    break
        return tuple(most) if tuple(most) != bounds and self._is_allowed(tuple(most)) else None

    def _bounded(self, inputs: list, values: tuple, sample: tuple, bounds: tuple) -> "tuple[_Call | None, str]":
        """How a call is made with sizes that are padded to these bounds; or why not, if that is known."""
        core = _activate.core()
        shapes = self._shapes(bounds)
        orders = {i: order(inputs[i], shape) for i, shape in shapes}
        at_size = self._dry(inputs, sample, orders)
        if at_size is None:
            return None, ""
        plain = [(type(x), x) for x, e in zip(inputs, self._exprs, strict=True) if e is None]
        sizes = tuple(
            [n for n, symbol in zip(bounds, self._sources, strict=True) if symbol not in self._numbers.symbols]
        )
        ranges = self._given(self._stands(values, 0), values).ranges
        key = (sizes, *ranges, *orders.values(), *plain)
        if key not in self._bounds:
            self._bounds[key] = self._dry(inputs, bounds, orders)
        at_bounds = self._bounds[key]
        if at_bounds is None:
            return None, ""
        number = core.new_graph()
        device = next((x.device.index for x in inputs if isinstance(x, torch.Tensor) and x.device.type == "tpu"), 0)
        why = core.bounded(at_bounds.number, at_size.number, sample != values, number, device or 0)
        if why is not None:
            core.forget_graph(number)
            return None, why
        known = Recipes(number)
        known.written = at_size.written
        results = at_size.results if sample == values else at_bounds.results
        return self._call(known, results, shapes, values), ""

    def _call(self, known: Recipes, results: list, shapes: list, values: tuple) -> "_Call":
        """How calls of these sizes are made, with any numbers."""
        given = self._given(self._stands(values, 0), values) if self._numbers.symbols else None
        return _Call(known, results, shapes, given)

    def _given(self, run: tuple, values: tuple) -> Given:
        return Given(self._numbers, list(self._sources), run, lambda n: self._value(n, values))

    def _stands(self, values: tuple, seed: int, only=None) -> tuple:
        """What stands for the numbers in a run, another one for `only`."""
        return tuple(
            [
                self._numbers.stand(symbol, n, seed if symbol == only else 0) if symbol in self._numbers.symbols else n
                for symbol, n in zip(self._sources, values, strict=True)
            ]
        )

    def _value(self, expr, values: tuple) -> int:
        if isinstance(expr, int) or not symbols_of(expr):
            return int(expr)
        return int(expr.subs(dict(zip(self._sources, values, strict=True))))

    def _shapes(self, values: tuple) -> list[tuple[int, list[int]]]:
        """The inputs that are tensors with sizes that vary, and their sizes."""
        varying = [(i, of) for i, of in enumerate(self._exprs) if isinstance(of, list) and any(map(symbols_of, of))]
        return [(i, [self._value(e, values) for e in of]) for i, of in varying]

    def _dry(self, inputs: list, values: tuple, orders: dict) -> Recipes | None:
        """What is recorded at these sizes, of which nothing is computed; the recipe takes the numbers.

        Raises:
            _NoNumbers: there is none that does.
        """
        runs = [self._stands(values, 0)]
        first = self._played(inputs, runs[0], orders)
        if first is None or not self._numbers.symbols:
            return first
        given = self._given(runs[0], values)
        known = [first]
        for symbol in self._numbers.symbols:
            others = [self._stands(values, seed, symbol) for seed in (1, 2)]
            other = next(filter(given.fits, others), None)
            moved = None if other is None else self._played(inputs, other, orders)
            if moved is None or moved.written != first.written:
                raise _NoNumbers
            runs.append(other)
            known.append(moved)
        core = _activate.core()
        number = core.new_graph()
        if core.numbered([r.number for r in known], [], *given.stands(runs), number) is not None:
            core.forget_graph(number)
            raise _NoNumbers
        made = Recipes(number)
        made.results, made.written = first.results, first.written
        return made

    def _played(self, inputs: list, values: tuple, orders: dict) -> Recipes | None:
        """What is recorded at these sizes and numbers, of which nothing is computed."""
        own = list(inputs)
        for i, expr in enumerate(self._exprs):
            if expr is not None and not isinstance(expr, list):
                own[i] = self._value(expr, values)
        for i, shape in self._shapes(values):
            stored = blank(inputs[i], [shape[d] for d in orders[i]])
            own[i] = stored.as_strided(shape, packed(shape, orders[i]))
        tensors = [x for x in own if isinstance(x, torch.Tensor)]
        device = next((t.device for t in tensors if t.device.type == "tpu"), torch.device("tpu"))
        random = torch.tpu.get_rng_state(device)
        versions = [_version(t) for t in tensors]
        if not torch.ops.oxitorch._trace(tensors, dry=True):
            return None
        recipes = Recipes()
        traced = False
        try:
            results = _own(self._run(*own), tensors)
            made = [r for r in results if isinstance(r, torch.Tensor)]
            found, _ = torch.ops.oxitorch._traced(recipes.number, tensors, made, False, True, [])
            traced = True
        except Exception:
            return None  # the graph cannot be played at these sizes
        finally:
            if not traced:
                torch.ops.oxitorch._untrace(tensors)
            torch.tpu.set_rng_state(random, device)
        if found != _FUNCTION:
            return None
        recipes.results = [torch.Tensor if isinstance(r, torch.Tensor) else r for r in results]
        recipes.written = [i for i, (t, v) in enumerate(zip(tensors, versions, strict=True)) if _version(t) != v]
        return recipes


class _Call:
    """A call of some sizes, with the numbers that are given."""

    def __init__(self, known: Recipes, results: list, shapes: list, given: Given | None):
        self._known = known
        self._results = results
        self._shapes = shapes
        self.given = given
        self._replay = _activate.core().replay

    def __call__(self, inputs: list, values: tuple) -> list | None:
        own = list(inputs)
        for i, shape in self._shapes:
            own[i] = padded(own[i], shape)
        tensors = [x for x in own if isinstance(x, torch.Tensor)]
        if self._known.written:
            given = [x for x in inputs if isinstance(x, torch.Tensor)]
            if any(_storage(tensors[i]) != _storage(given[i]) for i in self._known.written):
                return None  # it is a part of a larger tensor, and was copied
        numbers = [] if self.given is None else self.given.tensors(values)
        done, made = self._replay(self._known.number, [*tensors, *numbers])
        if not done:
            return None
        if self._known.written:
            torch.autograd.graph.increment_version([tensors[i] for i in self._known.written])
        made = iter(made)
        results = [next(made) if r is torch.Tensor else r for r in self._results]
        return results if self.given is None else self.given.result(results, values)


def _own(results, taken: list[torch.Tensor]) -> list:
    """Results in memory of their own: what a view shows of another tensor is another part of it at another size."""
    shown = {_storage(t): t.shape for t in taken if t.device.type == "tpu"}
    own = []
    for r in results:
        if isinstance(r, torch.Tensor) and r.device.type == "tpu":
            is_whole = r.is_contiguous() and r.untyped_storage().nbytes() == r.nbytes
            if not is_whole or shown.setdefault(_storage(r), r.shape) != r.shape:
                r = r.clone(memory_format=torch.contiguous_format)
        own.append(r)
    return own


def _storage(t: torch.Tensor) -> int:
    return t.untyped_storage()._cdata


def _told(size: int, factor: int, term: int) -> int:
    return (size - term) // factor


def _symbolic(v):
    numbers = [*v.shape, *v.stride()] if isinstance(v, torch.Tensor) else [v]
    return [n for n in numbers if isinstance(n, torch.SymInt)]


def _dim(env, symbol) -> Dim:
    """The bounds of a symbol, up to what the user said of it."""
    most = env.var_to_range[symbol].upper if env is not None and symbol in env.var_to_range else None
    has_most = getattr(most, "is_Integer", False) and most < 2**31
    return Dim(max=int(most) if has_most else None, least=1)
