"""Operations that PyTorch has no name for."""

import functools

import torch

from oxitorch import _activate


def optimization_barrier(*tensors: torch.Tensor):
    """The same tensors, behind a barrier that XLA does not move work across (StableHLO `optimization_barrier`).

    Differentiable; the gradients pass a barrier too. On other devices it copies.

    Returns:
        One tensor for one argument, else a tuple.
    """
    if not tensors:
        raise TypeError("optimization_barrier() needs at least one tensor")
    out = _barrier()(list(tensors))
    return out[0] if len(out) == 1 else tuple(out)


def _clone_and_cut(tensors):
    out = [t.clone() for t in tensors]
    _activate.core().cut("barrier")
    return out


@functools.cache
def _barrier():
    """Defines the operation with PyTorch at the first use."""
    library = torch.library.Library("oxitorch", "FRAGMENT")
    library.define("optimization_barrier(Tensor[] tensors) -> Tensor[]")
    # XLA moves work about inside one program only, so the end of a program is a barrier.
    library.impl("optimization_barrier", _clone_and_cut, "CompositeExplicitAutograd")
    op = torch.ops.oxitorch.optimization_barrier.default

    def backward(ctx, grads):
        # An output that was not used has no gradient.
        present = iter(op([g for g in grads if g is not None]))
        return [None if g is None else next(present) for g in grads]

    torch.library.register_autograd("oxitorch::optimization_barrier", backward, lib=library)
    # The definitions live as long as the library object.
    op._oxitorch_library = library
    return op
