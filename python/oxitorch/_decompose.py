"""Operations that the op table has no row for, but PyTorch (or a library) a decomposition in Python.

The shim asks here before it takes such an operation to the CPU. The decomposition runs on tensors of the device while
the engine watches; from then on the shim records calls with arguments of that kind by the recipe, without Python.
"""

import functools

import torch

from oxitorch import _activate
from oxitorch._overload import overload
from oxitorch._recipes import Recipes, watched

# Their results are not what the operation itself gives: the second one is not the one that the backward wants.
UNFAITHFUL = ("aten::_scaled_dot_product_flash_attention_for_cpu",)
# By the numbers that the engine gives to an operation with arguments of one kind.
_known: dict[int, Recipes] = {}
_library: torch.library.Library | None = None


def install() -> None:
    global _library
    _library = torch.library.Library("oxitorch", "IMPL")
    _library.impl("_decompose", _decompose, "CompositeExplicitAutograd")
    _library.impl("_sparse", _run_sparse, "CompositeExplicitAutograd")


def _run_sparse(name: str, args: list) -> list:
    """An operation on sparse tensors; most programs have none, and are spared the import."""
    from oxitorch import _sparse

    return _sparse.run(name, args)


def _decompose(name: str, graph: int, given: list) -> list | None:
    """Runs an operation by its decomposition: the results, or None if it takes no such arguments or does not exist.

    The recipe, if there is one, is kept under the number `graph`; 0: it is not kept. Where the operation takes a dtype,
    a tensor of that dtype is given.
    """
    core = _activate.core()
    op = overload(name)
    decomposition = torch._decomp.decomposition_table.get(op)
    if decomposition is None or op._schema.name in UNFAITHFUL:
        core.no_decomposition(name)
        return None
    args, kwargs = [], {}
    for parameter, value in zip(op._schema.arguments, given, strict=True):
        if isinstance(value, torch.Tensor) and "Tensor" not in str(parameter.type):
            value = value.dtype
        if parameter.kwarg_only:
            kwargs[parameter.name] = value
        else:
            args.append(value)
    tensors = [t for x in (*args, *kwargs.values()) for t in (x if isinstance(x, list) else [x]) if _is_tensor(t)]
    known = _known.get(graph)
    if known is None and graph:
        known = _known[graph] = Recipes(graph)
    # All that it records is of the line that called the operation.
    outer = core.play_site(core.site_here())
    try:
        results = watched(functools.partial(_run, decomposition, tensors), tensors, [args, kwargs], known)
    finally:
        core.play_site(outer)
    if results == [NotImplemented]:
        return None
    if known is not None and known.results is not None:
        core.keep_defined(graph, [r is not None for r in known.results])
    return results


def _is_tensor(x) -> bool:
    return isinstance(x, torch.Tensor)


def _run(decomposition, tensors: list, args: list, kwargs: dict) -> list:
    results = decomposition(*args, **kwargs)
    results = list(results) if isinstance(results, (tuple, list)) else [results]
    # Operations give tensors of their own; decompositions are not that careful.
    return [r.clone() if _is_tensor(r) and any(torch._C._is_alias_of(r, t) for t in tensors) else r for r in results]
