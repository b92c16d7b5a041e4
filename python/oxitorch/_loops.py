"""PyTorch's control flow (`torch.cond`, `while_loop`, `scan`, `map`) on the device: one operation of a program each.

The body of a loop, or a branch, is run once while the engine records what it does; the loop is then recorded as one
operation that has the body in it. Where a body cannot be recorded so, as it reads a value or is run on the CPU,
PyTorch's own way is taken, which runs it for each round; `torch.tpu.explain()` says why.
`associative_scan` needs nothing: PyTorch's way is a tree of few operations.
"""

import contextlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from oxitorch import _activate, _running

_OPS = torch.ops.oxitorch
_DENSE = torch._C.DispatchKey.CompositeExplicitAutograd


class Played(Exception):
    """A body cannot be recorded; the message is what it needs."""


def dispatch_keys() -> tuple:
    """The thread's keys, with which a graph is traced elsewhere as it would be here."""
    return torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()


def install() -> None:
    kernels = {"cond": _cond, "while_loop": while_loop, "scan": _scan, "map_impl": _map}
    kernels["while_loop_stack_output"] = _of_all_rounds
    for name, kernel in kernels.items():
        op = getattr(torch.ops.higher_order, name)
        op.py_impl(torch._C.DispatchKey.PrivateUse1)(_or_played(op, kernel))


def is_control_flow(target) -> bool:
    """Whether it is one of the operations that a compiled graph may have and still be recorded as a whole."""
    names = ("cond", "while_loop", "scan", "map_impl", "associative_scan")
    return isinstance(target, torch._ops.HigherOrderOperator) and target.name() in names


def _or_played(op, kernel: Callable) -> Callable:
    dense = op.py_kernels[_DENSE]

    def run(*args, **kwargs):
        try:
            if kwargs.get("mutated_arg_indices"):
                raise Played("to write to a tensor that it is not given")
            return kernel(*args)
        except Played as why:
            _activate.core().note_played(op.name(), str(why))
        return dense(*args, **kwargs)

    return run


def function_of(body: Callable) -> Callable:
    """Without what graphs of PyTorch print when they raise: not every body can be recorded."""
    return body.forward if isinstance(body, torch.fx.GraphModule) else body


def _cond(pred, true_fn, false_fn, operands):
    if not isinstance(pred, torch.Tensor):
        return (true_fn if pred else false_fn)(*operands)
    # Tensors of the host are what they are outside of the branches.
    is_given = [isinstance(x, torch.Tensor) and x.device.type != "cpu" for x in operands]
    given = [x for x, is_so in zip(operands, is_given, strict=True) if is_so]
    device = next((t.device for t in (*given, pred) if t.device.type != "cpu"), pred.device)

    def of(branch):
        def run(*tensors):
            rest = iter(tensors)
            return function_of(branch)(
                *(next(rest) if is_so else x for x, is_so in zip(operands, is_given, strict=True))
            )

        return run

    pred = pred.reshape(()).to(device=device, dtype=torch.bool)
    first = record_body(of(true_fn), given)
    with _forgotten_on_error():
        second = record_body(of(false_fn), given)
    if first != second:
        drop_bodies(2)
        raise Played("branches that give the same kind of results")
    return first.together(flow("cond", (0, 0, 0, 0), [pred, *given]))


def while_loop(cond_fn, body_fn, carried, additional) -> tuple:
    """Records a loop.

    Raises:
        Played: it cannot be one operation.
    """
    numbers = [i for i, x in enumerate(carried) if not isinstance(x, torch.Tensor)]
    ends = _numbers_at_the_end(cond_fn, body_fn, carried, numbers) if numbers else []
    device = next((x.device for x in (*carried, *additional) if isinstance(x, torch.Tensor)), None)
    # Those of each round are made on the device again, where they are tensors.
    start = [torch.full((), x, dtype=torch.int64, device=device) if i in numbers else x for i, x in enumerate(carried)]
    record_body(lambda *now: function_of(cond_fn)(*now, *additional), start)
    with _forgotten_on_error():
        shape = record_body(lambda *now: function_of(body_fn)(*now, *additional), start)
    results = list(shape.together(flow("while_loop", (0, 0, 0, 0), start)))
    for i, x in zip(numbers, ends, strict=True):
        results[i] = x
    return tuple(results)


def _of_all_rounds(*_):
    """A `while_loop` of which the gradients need what each round gives: of a size that no program knows before."""
    raise Played("to say how often it goes round, as gradients need what each round gives; a scan says it")


def _numbers_at_the_end(cond_fn, body_fn, carried, numbers: Sequence[int]) -> list[int]:
    """What the numbers are that a loop carries, when it ends.

    Raises:
        Played: it does not follow from the numbers alone.
    """
    graphs = [inspect.unwrap(fn) for fn in (cond_fn, body_fn)]
    if not all(isinstance(g, torch.fx.GraphModule) for g in graphs):
        raise Played("graphs for the numbers that are carried from round to round")
    now = [carried[i] for i in numbers]
    if not all(type(x) is int for x in now):
        raise Played("integers for the numbers that are carried from round to round")
    nodes = [list(g.graph.nodes) for g in graphs]
    (goes_on,) = pytree.tree_leaves(nodes[0][-1].args)
    gives = pytree.tree_leaves(nodes[1][-1].args, is_leaf=lambda x: x is None)
    while _follows(goes_on, {nodes[0][i]: x for i, x in zip(numbers, now, strict=True)}):
        known = {nodes[1][i]: x for i, x in zip(numbers, now, strict=True)}
        now = [_follows(gives[i], known) for i in numbers]
    return now


def _follows(node: Any, known: dict[torch.fx.Node, Any]) -> Any:
    """The value of a node of a graph, of those that are known."""
    if not isinstance(node, torch.fx.Node):
        return node
    if node not in known:
        if node.op != "call_function":
            raise Played("to know numbers that follow from tensors")
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: _follows(n, known))
        known[node] = node.target(*args, **kwargs)
    return known[node]


def _scan(combine_fn, init, xs, additional):
    length = xs[0].shape[0] if xs else 0
    if length == 0:
        raise Played("at least one round")
    shape = record_body(lambda *now: function_of(combine_fn)(*now, *additional), [*init, *(x[0] for x in xs)])
    return shape.together(flow("scan", (length, 0, len(init), 0), [*init, *xs]))


def _map(f, xs, additional):
    shape = record_body(lambda *now: function_of(f)(*now, *additional), [x[0] for x in xs])
    return shape.together(flow("map", (xs[0].shape[0], 0, 0, 0), xs))


class NothingDrawn(TorchDispatchMode):
    """Refuses random numbers: rounds that are computed again would draw others."""

    # Loops and branches in the body are looked into.
    supports_higher_order_operators = True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.HigherOrderOperator):
            return func(*(self._body(x) if callable(x) else x for x in args), **kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags and not _drops_nothing(func, args, kwargs):
            raise Played(f"random numbers ({func.name()}), which a backward would draw anew")
        return func(*args, **kwargs)

    def _body(self, fn: Callable) -> Callable:
        def run(*args):
            with self:
                return fn(*args)

        return run


def _drops_nothing(func, args, kwargs) -> bool:
    """Whether it is attention without dropout."""
    names = [a.name for a in func._schema.arguments]
    return "dropout_p" in names and (dict(zip(names, args, strict=False)) | kwargs).get("dropout_p", 0.0) == 0


class Shape:
    """What a body gave: a tree of tensors and of None."""

    def __init__(self, results: Any):
        leaves, self._tree = pytree.tree_flatten(results)
        self._is_tensor = [isinstance(x, torch.Tensor) for x in leaves]
        self.tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        self.count = len(self.tensors)
        if not all(tensor or x is None for tensor, x in zip(self._is_tensor, leaves, strict=True)):
            raise Played("results that are tensors")
        if any(t.device.type == "cpu" for t in self.tensors):
            raise Played("a tensor of the host as a result")

    def together(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The same tree of these tensors."""
        rest = iter(tensors)
        return pytree.tree_unflatten([next(rest) if tensor else None for tensor in self._is_tensor], self._tree)

    def __eq__(self, other) -> bool:
        return self._tree == other._tree and self._is_tensor == other._is_tensor

    __hash__ = None


def record_body(body: Callable, like: Sequence[torch.Tensor]) -> Shape:
    """Runs a body on tensors like these, of which nobody knows the values, and records what it does.

    Raises:
        Played: that cannot be recorded.
    """
    began, given, why = _OPS._body_begin(list(like))
    if not began:
        raise Played(why or "a mode in which operations are recorded")
    caches = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)  # what a body casts is its own
    _show(given)
    try:
        shape = Shape(body(*given))
    except BaseException as e:
        why = _OPS._body_drop(True)
        if why and isinstance(e, Exception):
            raise Played(why) from None
        raise
    finally:
        torch.set_autocast_cache_enabled(caches)
    gone, shape.tensors = shape.tensors, []
    why = _OPS._body_end(gone)
    if why:
        raise Played(why)
    return shape


def flow(name: str, numbers: tuple[int, int, int, int], operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Records control flow with the bodies that were recorded last.

    Args:
        name: "cond", "while_loop", "scan" or "map".
        numbers: of the latter two the length, whether it goes from the last slice to the first, how many of the
            operands are carried from round to round, and how many at the end are states of generators: those that
            another loop gave behind its results, whose random numbers this one then takes again. 0: it moves the
            generators on.

    Raises:
        Played: the bodies do not make it.
    """
    done, results, why = _OPS._control(name, list(numbers), list(operands))
    if not done:
        raise Played(why)
    _show(results)
    return results


def _show(tensors: Sequence[torch.Tensor]) -> None:
    """Tells a function of `torch.tpu.jit` that is being traced of tensors that no operation made."""
    tracer = _running.tracer()
    if tracer is not None:
        tracer.made(tensors)


def drop_bodies(count: int) -> None:
    for _ in range(count):
        _OPS._body_drop(False)


@contextlib.contextmanager
def _forgotten_on_error():
    """What was recorded before is dropped if the next body cannot be recorded."""
    try:
        yield
    except BaseException:
        drop_bodies(1)
        raise
