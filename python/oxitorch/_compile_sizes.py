"""Graphs of `torch.compile` with sizes that vary: one program for all sizes up to a bound.

The symbols in such a graph are Dynamo's. A call with a new size plays the graph at that size, and at the bound if that
is new, without computing anything, and the engine makes the program of what the two record (`bounded.rs`). A symbol
that had the same value in all calls so far is that value.
"""

import torch
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from oxitorch import _activate
from oxitorch._dims import Dim, below, sample_below
from oxitorch._padding import blank, order, packed, padded
from oxitorch._recipes import Recipes, _version

_FUNCTION = 17
# Sizes that are known of a graph; with one more the one that came first is forgotten.
_MAX_SIZES = 4096


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
        graph = SizedGraph(values, run)
        return graph if graph._sources else None

    def __init__(self, values: list, run):
        self._run = run
        # Of each input: its value, or its sizes.
        self._exprs = []
        # Where each symbol is found: number of the input, dimension; the factor and the term that give the size there.
        self._sources: dict = {}
        wanted, envs, lines = set(), {}, []
        for i, v in enumerate(values):
            if isinstance(v, torch.Tensor):
                sizes = [_expr(n) for n in v.shape]
                self._exprs.append(sizes)
                found = [(expr, (i, d)) for d, expr in enumerate(sizes)]
                wanted.update(*map(_symbols, sizes))
            elif isinstance(v, torch.SymInt):
                self._exprs.append(_expr(v))
                found = [(_expr(v), (i, None))]
                wanted.update(_symbols(found[0][0]))
            else:
                self._exprs.append(None)
                continue
            env = next((n.node.shape_env for n in _symbolic(v)), None)
            for expr, place in found:
                envs.update(dict.fromkeys(_symbols(expr), env))
                if getattr(expr, "is_symbol", False):
                    self._sources.setdefault(expr, (*place, 1, 0))
                else:
                    lines.extend((symbol, (*place, *line)) for symbol, *line in _line(expr))
        # Some are told by others: what is saved of `x[:, 1:]` has one element less.
        for symbol, source in lines:
            self._sources.setdefault(symbol, source)
        self._dims = {symbol: _dim(envs[symbol], symbol) for symbol in self._sources}
        if wanted - set(self._sources):
            self._sources = {}
        # The values that each symbol had.
        self._seen: dict = {symbol: set() for symbol in self._sources}
        # By the values of the symbols and of inputs that are no tensors: how a call is made; None if it is for these
        # alone.
        self._calls: dict[tuple, _Call | None] = {}
        # What was recorded at bounds.
        self._bounds: dict[tuple, Recipes | None] = {}

    def call(self, inputs: list) -> list | None:
        """The results, by a program for all sizes up to a bound; None if there is none."""
        found = self._sources.values()
        values = tuple([_told(inputs[i] if d is None else inputs[i].shape[d], *line) for i, d, *line in found])
        key = (values, *[(type(x), x) for x in inputs if not isinstance(x, torch.Tensor)])
        known = self._calls.get(key, self)
        if known is None:
            return None
        if known is not self:
            results = known(inputs)
            if results is not None:
                return results
        made = self._learn(inputs, values)
        if made is self:
            return None
        results = None if made is None else made(inputs)
        if len(self._calls) >= _MAX_SIZES:
            self._calls.pop(next(iter(self._calls)))
        self._calls[key] = None if results is None else made
        return results

    def _learn(self, inputs: list, values: tuple):
        for seen, n in zip(self._seen.values(), values, strict=True):
            if len(seen) < 2:
                seen.add(n)
        varying = [len(seen) > 1 for seen in self._seen.values()]
        if not any(varying):
            return self  # nothing varies yet
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
        if made is None and why:
            _activate.core().remark(f"for this size alone: {why}")
        return made

    def _bounded(self, inputs: list, values: tuple, sample: tuple, bounds: tuple) -> "tuple[_Call | None, str]":
        """How a call is made with sizes that are padded to these bounds; or why not, if that is known."""
        core = _activate.core()
        shapes = self._shapes(bounds)
        orders = {i: order(inputs[i], shape) for i, shape in shapes}
        at_size = self._dry(inputs, sample, orders)
        if at_size is None:
            return None, ""
        plain = [(type(x), x) for x, e in zip(inputs, self._exprs, strict=True) if e is None]
        key = (bounds, *orders.values(), *plain)
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
        return _Call(known, results, shapes), ""

    def _value(self, expr, values: tuple) -> int:
        if isinstance(expr, int):
            return expr
        return int(expr.subs(dict(zip(self._sources, values, strict=True))))

    def _shapes(self, values: tuple) -> list[tuple[int, list[int]]]:
        """The inputs that are tensors with sizes that vary, and their sizes."""
        varying = [(i, of) for i, of in enumerate(self._exprs) if isinstance(of, list) and any(map(_symbols, of))]
        return [(i, [self._value(e, values) for e in of]) for i, of in varying]

    def _dry(self, inputs: list, values: tuple, orders: dict) -> Recipes | None:
        """What is recorded at these sizes, of which nothing is computed."""
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
    """A call of some sizes."""

    def __init__(self, known: Recipes, results: list, shapes: list):
        self._known = known
        self._results = results
        self._shapes = shapes
        self._replay = _activate.core().replay

    def __call__(self, inputs: list) -> list | None:
        own = list(inputs)
        for i, shape in self._shapes:
            own[i] = padded(own[i], shape)
        tensors = [x for x in own if isinstance(x, torch.Tensor)]
        done, made = self._replay(self._known.number, tensors)
        if not done:
            return None
        if self._known.written:
            torch.autograd.graph.increment_version([tensors[i] for i in self._known.written])
        made = iter(made)
        return [next(made) if r is torch.Tensor else r for r in self._results]


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


def _expr(n):
    return n.node.expr if isinstance(n, torch.SymInt) else n


def _symbols(expr) -> set:
    return set() if isinstance(expr, int) else set(expr.free_symbols)


def _line(expr) -> list[tuple]:
    """The symbol, the factor and the term of a number that is a symbol times one plus the other; else nothing."""
    symbols = _symbols(expr)
    if len(symbols) != 1:
        return []
    (symbol,) = symbols
    term = expr.subs(symbol, 0)
    factor = expr.subs(symbol, 1) - term
    is_line = factor.is_Integer and factor != 0 and term.is_Integer and (factor * symbol + term - expr).expand() == 0
    return [(symbol, int(factor), int(term))] if is_line else []


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
