"""Eager mode with sizes that vary: tensors, and rows that masks select, in the sizes of buckets."""

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


class Capacity:
    """Rows that masks select, as a mixture of experts does, in few sizes: there are as many places for each mask as the
    fullest one needs, in the size of a bucket.

        capacity = torch.tpu.Capacity(torch.tpu.Dim(max=4096))      # made once, for all layers and steps

        def forward(self, x):                                        # [tokens, width]
            weights, chosen = self.gate(x).softmax(-1).topk(2)
            out = torch.zeros_like(x)
            routed = chosen[:, :, None] == torch.arange(len(self.experts), device=x.device)
            places = capacity.places(routed.any(1).T)                # [experts, bound]
            for e, expert in enumerate(self.experts):
                weight = (weights * routed[..., e]).sum(1)
                rows = expert(capacity.take(x, places[e])) * capacity.take(weight, places[e])[:, None]
                out = capacity.add(out, places[e], rows)
            return out

    Places without a row are computed like others and left out of the sum, and no gradient comes from them; so what is
    computed of the rows has to do so row by row. The bucket never becomes smaller: layers that share a `Capacity` have
    the largest that one of them needed, and a step settles into one set of programs.

    Args:
        dim: the buckets, as for `jit(dynamic=)`.

    Attributes:
        bound: the places for each mask; None before.
    """

    def __init__(self, dim: Dim):
        if not isinstance(dim, Dim):
            raise TypeError(f"torch.tpu.Capacity takes a torch.tpu.Dim, got {dim!r}")
        self._dim = dim
        self.bound: int | None = None

    def places(self, masks: torch.Tensor) -> torch.Tensor:
        """Where masks are true, in order, and -1 behind the last place: int64, `[..., bound]`.

        Args:
            masks: bool, `[..., rows]`: all masks at once, so that the host reads one number; none if the bucket has a
                place for each row.

        Raises:
            ValueError: the masks are no bool tensor, or one selects more rows than the largest bucket has.
        """
        if masks.dtype != torch.bool or masks.dim() == 0:
            raise ValueError(
                f"torch.tpu.Capacity: places: expected bool masks of at least one dimension, got {masks.dtype} "
                f"{list(masks.shape)}"
            )
        self._grow(masks)
        # How many are true before each element; those behind the bound are none of them.
        order = masks.cumsum(-1) - 1
        to = torch.where(masks, order, self.bound)
        found = torch.full((*masks.shape[:-1], self.bound + 1), -1, dtype=torch.int64, device=masks.device)
        numbers = torch.arange(masks.shape[-1], device=masks.device).expand(masks.shape)
        return found.scatter(-1, to, numbers)[..., : self.bound]

    def take(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """The rows of these places: `[*places.shape, *x.shape[1:]]`. Where there is none, it is the first row again;
        zeros, if `x` has no rows.
        """
        rows = _with_a_row(x).index_select(0, places.clamp(min=0).flatten())
        return rows.unflatten(0, places.shape)

    def add(self, out: torch.Tensor, places: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """`out.index_add(0, places, rows)` without the places that have no row.

        Raises:
            ValueError: `rows` does not begin with the sizes of `places`.
        """
        if rows.shape[: places.dim()] != places.shape:
            raise ValueError(
                f"torch.tpu.Capacity: add: expected rows for {list(places.shape)} places, got {list(rows.shape)}"
            )
        there = (places >= 0).view(*places.shape, *[1] * (rows.dim() - places.dim()))
        kept = torch.where(there, rows, torch.zeros((), dtype=rows.dtype, device=rows.device))
        sums = _with_a_row(out).index_add(0, places.clamp(min=0).flatten(), kept.flatten(0, places.dim() - 1))
        return sums if out.shape[0] else sums[:0]

    def _grow(self, masks: torch.Tensor) -> None:
        """Makes the bucket large enough for these masks."""
        if self.bound is None:
            self.bound = self._dim.bound(1)
        # No mask selects more rows than there are.
        if masks.shape[-1] <= self.bound or masks.numel() == 0:
            return
        self.bound = max(self.bound, self._dim.bound(max(1, int(masks.sum(-1).max()))))


def _with_a_row(x: torch.Tensor) -> torch.Tensor:
    """`x`, or a row of zeros if it has none: places without a row stand for the first one."""
    return x if x.shape[0] else torch.cat([x, x.new_zeros(1, *x.shape[1:])])


def _tensors(result) -> list[torch.Tensor]:
    leaves = torch.utils._pytree.tree_leaves(result)
    return [x for x in leaves if isinstance(x, torch.Tensor)]
