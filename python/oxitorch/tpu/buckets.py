"""Eager mode with sizes that vary: tensors in the sizes of buckets."""

from collections.abc import Callable, Sequence

import torch

from oxitorch import _activate
from oxitorch._dims import Dim
from oxitorch._padding import filled


class bucketing:
    """Makes the programs in a block be for a few sizes: `pad` gives tensors the size of a bucket, `cut` takes it back.

        with torch.tpu.bucketing(torch.tpu.Dim(max=512)) as bucket:
            tokens = bucket.pad(tokens, 1)              # [8, 37] becomes [8, 64]
            labels = bucket.pad(labels, 1, value=-100)
            logits = model(tokens)
            F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
            optimizer.step()
        logits = bucket.cut(logits, 1)                  # [8, 37, ...]

    Padding is computed like anything else: that no result which you use depends on it is up to the model, by causal
    attention, by `mask`, or by a loss that leaves labels out. `check` says whether one does. `torch.tpu.jit(dynamic=)`
    and `torch.compile(dynamic=True)` leave padding out by themselves.

    A window of fused mode ends where the block begins and where it ends, so that its programs are those of a bucket,
    which `torch.tpu.explain()` names. A block has one size that varies; blocks can be nested.

    Args:
        dim: the buckets, as for `jit(dynamic=)`.

    Attributes:
        size: the size of what was padded first in the block; None before.
        bound: the size of the bucket that it belongs to.
    """

    def __init__(self, dim: Dim):
        if not isinstance(dim, Dim):
            raise TypeError(f"torch.tpu.bucketing takes a torch.tpu.Dim, got {dim!r}")
        self._dim = dim
        self._named = False
        self.size: int | None = None
        self.bound: int | None = None

    def __enter__(self) -> "bucketing":
        _activate.core().cut("barrier")
        self.size = self.bound = None
        return self

    def __exit__(self, *_) -> None:
        core = _activate.core()
        try:
            core.cut("barrier")
        finally:
            if self._named:
                core.within(None)
                self._named = False

    def pad(self, t: torch.Tensor, dim: int, value: float = 0) -> torch.Tensor:
        """The tensor with `value` behind its elements along a dimension, in the size of the bucket.

        A tensor of the host is padded there, and one on the device on the device; neither compiles anything, nor waits.
        One that gradients go through is padded by a program for its size.

        Raises:
            ValueError: it has another size there than what was padded before in this block, or one larger than all
                buckets.
        """
        size = t.shape[dim]
        if self.size is None:
            self.bound = self._dim.bound(size)
            self.size = size
            _activate.core().within(f"in the bucket {self.bound} of {self._dim}")
            self._named = True
        if size != self.size:
            raise ValueError(
                f"torch.tpu.bucketing: this tensor has size {size} along dimension {dim}, and the one that was padded "
                f"first has {self.size}\nhint: each size that varies has a block of its own"
            )
        if t.device.type == "tpu" and not t.requires_grad and size != self.bound:
            shape = list(t.shape)
            shape[dim] = self.bound
            made = filled(t, shape, value)
            return self._padded(t.cpu(), dim, value).to(t.device) if made is None else made
        return self._padded(t, dim, value)

    def mask(self, device: torch.device | str = "tpu") -> torch.Tensor:
        """Which places of the bucket are used: bool, `[bound]`. One program makes it for all sizes of a bucket.

        Raises:
            RuntimeError: nothing was padded in this block yet.
        """
        self._begun("mask")
        return torch.arange(self.bound, device=device) < self.size

    def cut(self, t: torch.Tensor, dim: int) -> torch.Tensor:
        """The used part of a tensor that has the size of the bucket along a dimension: a view.

        What is computed with it is computed for its size; do it behind the block, or where it is read.

        Raises:
            RuntimeError: nothing was padded in this block.
            ValueError: the tensor has not the size of the bucket there.
        """
        self._begun("cut")
        if t.shape[dim] != self.bound:
            raise ValueError(
                f"torch.tpu.bucketing: cut: the bucket is {self.bound}, and the tensor has {t.shape[dim]} along "
                f"dimension {dim}"
            )
        return t.narrow(dim, 0, self.size)

    def check(self, fn: Callable, *args: torch.Tensor, dims: Sequence[int]) -> None:
        """Whether what a function gives depends on padding: it is called twice with other elements there.

        Gradients are not computed, random numbers are drawn twice the same, and buffers of a module are as before
        afterwards.

        Args:
            fn: a function or module that gives a tensor, or a tuple of them. A result that has the size of the bucket
                along the first of `dims` is compared where it is used; others, as a whole.
            args: tensors that were padded in this block.
            dims: the dimension of each of them that was.

        Raises:
            RuntimeError: it does; says which result and by how much. Or there is no padding, and it cannot be told.
        """
        self._begun("check")
        if self.size == self.bound:
            raise RuntimeError(f"torch.tpu.bucketing: check: size {self.size} fills its bucket: there is no padding")
        others = [self._repadded(t, d) for t, d in zip(args, dims, strict=True)]
        buffers = list(fn.buffers()) if isinstance(fn, torch.nn.Module) else []
        with torch.no_grad():
            before = [b.clone() for b in buffers]
            state = torch.tpu.get_rng_state()
            found = _tensors(fn(*args))
            for b, old in zip(buffers, before, strict=True):
                b.copy_(old)
            torch.tpu.set_rng_state(state)
            again = _tensors(fn(*others))
            for b, old in zip(buffers, before, strict=True):
                b.copy_(old)
        for i, pair in enumerate(zip(found, again, strict=True)):
            a, b = (self._used(t, dims[0]) for t in pair)
            if not torch.equal(a, b) and not torch.allclose(a, b, equal_nan=True):
                worst = (a.double() - b.double()).abs().max().item()
                raise RuntimeError(
                    f"torch.tpu.bucketing: result {i} depends on padding: it differs by up to {worst:.3g} if there is "
                    "something else\nhint: give the function bucket.mask(), or use torch.tpu.jit(dynamic=), which "
                    "leaves padding out"
                )

    def _padded(self, t: torch.Tensor, dim: int, value: float) -> torch.Tensor:
        behind = self.bound - t.shape[dim]
        pads = [0, 0] * (t.dim() - 1 - dim % t.dim()) + [0, behind]
        return torch.nn.functional.pad(t, pads, value=value) if behind else t

    def _repadded(self, t: torch.Tensor, dim: int) -> torch.Tensor:
        """The same with used elements in its padding, backwards: they are as good as any."""
        place = torch.arange(self.bound)
        place[self.size :] = (self.size - 1 - (place[self.size :] - self.size)) % self.size
        return t.detach().index_select(dim, place.to(t.device))

    def _used(self, t: torch.Tensor, dim: int) -> torch.Tensor:
        fits = -t.dim() <= dim < t.dim() and t.shape[dim] == self.bound
        return t.narrow(dim, 0, self.size) if fits else t

    def _begun(self, what: str) -> None:
        if self.bound is None:
            raise RuntimeError(f"torch.tpu.bucketing: {what}: nothing was padded in this block yet")


def _tensors(result) -> list[torch.Tensor]:
    leaves = torch.utils._pytree.tree_leaves(result)
    return [x for x in leaves if isinstance(x, torch.Tensor)]
