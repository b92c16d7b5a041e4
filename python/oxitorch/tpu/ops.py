"""Operations that PyTorch has no name for."""

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
    out = torch.ops.oxitorch.optimization_barrier(list(tensors))
    return out[0] if len(out) == 1 else tuple(out)


def _clone_and_cut(tensors):
    out = [t.clone() for t in tensors]
    _activate.core().cut("barrier")
    return out


def _backward(_ctx, grads):
    # An output that was not used has no gradient.
    present = iter(torch.ops.oxitorch.optimization_barrier([g for g in grads if g is not None]))
    return [None if g is None else next(present) for g in grads]


# The definitions live as long as this.
_library = torch.library.Library("oxitorch", "FRAGMENT")
_library.define("optimization_barrier(Tensor[] tensors) -> Tensor[]")
_library.define("_fence(Tensor x, Tensor after, bool firmly) -> Tensor")
# XLA moves work about inside one program only, so the end of a program is a barrier.
_library.impl("optimization_barrier", _clone_and_cut, "CompositeExplicitAutograd")
torch.library.register_fake(
    "oxitorch::optimization_barrier", lambda tensors: [t.clone() for t in tensors], lib=_library
)
torch.library.register_autograd("oxitorch::optimization_barrier", _backward, lib=_library)
