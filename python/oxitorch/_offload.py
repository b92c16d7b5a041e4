"""Saved tensors in the memory of the host: `torch.tpu.offload`, and `torch.autograd.graph.save_on_cpu` on the device.

Both are hooks of saved tensors that record two operations, to the host and back. What these do the engine decides:
where both are in one program, its compiler moves the value; else the value is copied beside what runs, when it is
computed, and back when a program takes it.
"""

import functools
import threading
import weakref
from collections.abc import Callable, Iterable

import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import CheckpointPolicy

_here = threading.local()


class offload(saved_tensors_hooks):
    """A context manager: what operations in it save for the backward is kept on the host until the backward needs it.

    Parameters stay where they are, and so do views of them: they are on the device anyway. So do tensors of other
    devices, sparse ones and subclasses of `torch.Tensor`.

    Args:
        policy: what is offloaded of all else. None: everything. A name, or several: what `checkpoint_name` has given
            one of these names. A function: the tensors for which it returns True; it may look at anything but their
            values.

    Raises:
        TypeError: `policy` is none of these.
    """

    def __init__(self, policy: str | Iterable[str] | Callable[[torch.Tensor], bool] | None = None):
        self._names: frozenset[str] | None = None
        self._wants = policy if callable(policy) else None
        if isinstance(policy, str):
            policy = [policy]
        if policy is not None and self._wants is None:
            names = list(policy) if isinstance(policy, Iterable) else [policy]
            if not all(isinstance(n, str) for n in names):
                raise TypeError(
                    f"torch.tpu.offload: `policy` is names or a function of a tensor, got {policy!r}\n"
                    "hint: torch.tpu.checkpoint_name names a tensor"
                )
            self._names = frozenset(names)
        # Storages that have one of the names, and what is offloaded, by storage; weak references keep both apart from
        # what comes into the same place later.
        self._named: dict[int, object] = {}
        self._known: dict[tuple, tuple[object, weakref.ref]] = {}
        super().__init__(self._pack, _unpack)

    def __enter__(self):
        contexts = _here.__dict__.setdefault("contexts", [])
        contexts.append(self)
        return super().__enter__()

    def __exit__(self, *args):
        _here.contexts.remove(self)
        self._named.clear()
        self._known.clear()
        return super().__exit__(*args)

    def _pack(self, tensor: torch.Tensor):
        if not _is_movable(tensor) or _is_parameter(tensor) or not self._is_chosen(tensor):
            return _Kept(tensor)
        return self._dense(tensor, _OnHost)

    def _is_chosen(self, tensor: torch.Tensor) -> bool:
        if self._wants is not None:
            return bool(self._wants(tensor))
        return self._names is None or tensor.untyped_storage()._cdata in self._named

    def _dense(self, tensor: torch.Tensor, hold: type["_OnHost | _Same"]) -> "_View":
        """A saved tensor, as a view of the memory that it takes."""
        sizes, strides = tensor.shape, tensor.stride()
        # Without what is expanded, and with the innermost dimension last: as it lies in memory, if it is dense.
        inner_last = sorted(range(tensor.dim()), key=lambda d: strides[d], reverse=True)
        once = [n if step else 1 for n, step in zip(sizes, strides, strict=True)]
        in_memory = tensor.detach().as_strided(once, strides).permute(inner_last)
        if not in_memory.is_contiguous():
            return _View(hold(tensor.detach().contiguous()), sizes, None)
        # Several operations save the same tensor, or views of it.
        storage = tensor.untyped_storage()
        place = (storage._cdata, tensor._version, tensor.dtype, tensor.storage_offset(), in_memory.numel())
        _, known = self._known.get(place, (None, None))
        held = known() if known is not None else None
        if held is None:
            held = hold(in_memory)
            gone = functools.partial(_forget, self._known, place)
            self._known[place] = (StorageWeakRef(storage), weakref.ref(held, gone))
        return _View(held, sizes, strides)


class _OnHost:
    """A tensor on the host; several operations may have saved it."""

    __slots__ = ("__weakref__", "_tensor")

    def __init__(self, tensor: torch.Tensor):
        self._tensor = torch.ops.oxitorch._offload(tensor)

    def back(self) -> torch.Tensor:
        return torch.ops.oxitorch._reload(self._tensor)


class _Same:
    """A tensor on the device that may be overwritten: the value that it had."""

    __slots__ = ("__weakref__", "_tensor")

    def __init__(self, tensor: torch.Tensor):
        self._tensor = torch.ops.oxitorch._same(tensor)

    def back(self) -> torch.Tensor:
        return self._tensor


class _View:
    """What was saved: a view of what is held, or all of that if there are no strides."""

    __slots__ = ("_held", "_sizes", "_strides")

    def __init__(self, held: _OnHost | _Same, sizes, strides):
        self._held, self._sizes, self._strides = held, sizes, strides

    def back(self) -> torch.Tensor:
        tensor = self._held.back()
        return tensor if self._strides is None else tensor.as_strided(self._sizes, self._strides)


class _Kept:
    """What stays where it is. As without hooks, it must not be overwritten."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor):
        self.tensor, self.version = tensor.detach(), tensor._version

    def back(self) -> torch.Tensor:
        now = self.tensor._version
        if now != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{self.tensor.dtype}, {list(self.tensor.shape)}] is at version {now}; expected version "
                f"{self.version} instead\nhint: write to a copy, or run the backward first"
            )
        return self.tensor


def _forget(known: dict, place: tuple, _) -> None:
    known.pop(place, None)


def _unpack(packed):
    return packed.back()


def _is_movable(tensor: torch.Tensor) -> bool:
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    return plain and tensor.device.type == "tpu" and tensor.numel() > 0


def _is_parameter(tensor: torch.Tensor) -> bool:
    base = tensor._base if tensor._is_view() else tensor
    return isinstance(base, torch.nn.Parameter) or (base.is_leaf and base.requires_grad)


def checkpoint_name(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """The same tensor under a name, for `torch.tpu.offload` and for policies of `torch.utils.checkpoint`, as
    `jax.ad_checkpoint.checkpoint_name` has it. What is to be offloaded or kept is the result, not what it is made of.

    In a program it costs nothing; on other devices it copies. Differentiable.
    """
    return torch.ops.oxitorch.checkpoint_name(tensor, name)


def save_only_these_names(*names: str) -> Callable:
    """A policy for `torch.utils.checkpoint.create_selective_checkpoint_contexts`: what `checkpoint_name` has given one
    of these names is kept, all else is computed again; as `jax.checkpoint_policies.save_only_these_names`.
    """

    def policy(_ctx, op, *args, **_kwargs):
        is_named = op is torch.ops.oxitorch.checkpoint_name.default and args[1] in names
        return CheckpointPolicy.MUST_SAVE if is_named else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def _note(tensor: torch.Tensor, name: str) -> None:
    """A tensor has a name."""
    for context in getattr(_here, "contexts", ()):
        if context._names is not None and name in context._names:
            storage = tensor.untyped_storage()
            context._named[storage._cdata] = StorageWeakRef(storage)


def install() -> None:
    """`save_on_cpu` offloads tensors of the device, and waits for nothing; of others it does what it did."""
    begin = save_on_cpu.__init__

    @functools.wraps(begin)
    def __init__(self, *args, **kwargs):
        begin(self, *args, **kwargs)
        pack, unpack, own = self.pack_hook, self.unpack_hook, offload()

        def pack_here(tensor: torch.Tensor):
            if not _is_movable(tensor):
                return pack(tensor)
            # It is a copy elsewhere, which no write to the tensor changes.
            return own._dense(tensor, _Same if _is_parameter(tensor) else _OnHost)

        def unpack_here(packed):
            return packed.back() if isinstance(packed, _View) else unpack(packed)

        self.pack_hook, self.unpack_hook = pack_here, unpack_here

    save_on_cpu.__init__ = __init__


def _named(tensor: torch.Tensor, name: str) -> torch.Tensor:
    out = torch.ops.oxitorch._same(tensor)
    _note(out, name)
    return out


# The definitions live as long as this.
_library = torch.library.Library("oxitorch", "FRAGMENT")
for _schema in (
    "_offload(Tensor x) -> Tensor",
    "_reload(Tensor x) -> Tensor",
    "_same(Tensor x) -> Tensor",
    "checkpoint_name(Tensor x, str name) -> Tensor",
):
    _library.define(_schema)
_library.impl("checkpoint_name", _named, "PrivateUse1")
_library.impl("checkpoint_name", lambda x, name: x.clone(), "CompositeExplicitAutograd")
for _name in ("_offload", "_reload"):
    torch.library.register_fake(
        f"oxitorch::{_name}", lambda x: torch.empty_like(x, memory_format=torch.contiguous_format), lib=_library
    )
torch.library.register_fake("oxitorch::_same", torch.empty_like, lib=_library)
torch.library.register_fake("oxitorch::checkpoint_name", lambda x, name: torch.empty_like(x), lib=_library)
torch.library.register_autograd("oxitorch::checkpoint_name", lambda _ctx, grad: (grad, None), lib=_library)
