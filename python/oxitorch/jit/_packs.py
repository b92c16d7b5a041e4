"""Packed sequences in a function of `torch.tpu.jit`, whose lengths are a tensor of the host, other ones in each call.

PyTorch sorts lengths on the host, packs by them, and reads the order back from the device. Here what it computes of
them is done on the device too, and taken from there.
"""

import torch

from oxitorch._packed import pack_varying

_aten = torch.ops.aten
PACK = _aten._pack_padded_sequence.default
_SORTS = {_aten.sort.default, _aten.sort.stable}
# Operations that take the data of a packed sequence and know what it is.
_KEEP_ROWS = {"aten::detach", "aten::alias", "oxitorch::_packed_rows"}
_HINT = (
    "how many rows it has follows from the lengths, which are others in other calls: pad it first "
    "(pad_packed_sequence with total_length) and mask the loss"
)


class Packs:
    """What a run knows of lengths and of what was packed by them. `ops` sees the operations of the run."""

    def __init__(self, ops):
        self._ops = ops
        # By the storages of tensors of the host: themselves, and how the device makes them.
        self._made: dict[int, tuple] = {}
        # By the storages of tensors that are orders of samples: themselves, and what they are on the host.
        self._orders: dict[int, tuple] = {}
        # The data of packed sequences, by storage.
        self._data: dict[int, torch.Tensor] = {}

    def host(self, func, args: tuple, results) -> None:
        """An operation of the host has made this of tensors that another call may find changed."""
        x = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if x is None or x.dtype.is_floating_point or x.dtype.is_complex:
            return
        if func in _SORTS and x.dim() == 1:
            values, indices = results
            self._make(values, x, lambda x: torch.sort(x, descending=_is_descending(func, args), stable=True)[0])
            self._make(indices, x, lambda x: torch.sort(x, descending=_is_descending(func, args), stable=True)[1])
            self._orders[_storage(indices)] = indices, indices
        elif func is _aten._to_copy.default and not results.dtype.is_floating_point:
            self._make(results, x, lambda x: x.to(results.dtype))

    def _make(self, result, x, f) -> None:
        self._made[_storage(result)] = result, lambda device: f(self.on_device(x, device))

    def stands_for(self, t: torch.Tensor, make) -> None:
        """A tensor of the host that the device makes so."""
        self._made[_storage(t)] = t, make

    def forget(self, t: torch.Tensor) -> None:
        self._made.pop(_storage(t), None)

    def on_device(self, t: torch.Tensor, device) -> torch.Tensor:
        """A tensor of the host on the device."""
        _, make = self._made.get(_storage(t), (None, None))
        if make is None:
            return t.to(device)
        found = make(device)
        self._made[_storage(t)] = t, lambda _: found
        return found

    def copy(self, t: torch.Tensor, kwargs: dict) -> torch.Tensor | None:
        """What a copy between host and device is; None if it is a copy like any other."""
        device = torch.device(kwargs.get("device") or t.device)
        at = _storage(t)
        if t.device.type == "cpu" and device.type == "tpu" and at in self._made and self._made[at][0].shape == t.shape:
            with self._ops:
                found = self.on_device(t, device)
                found = found if kwargs.get("dtype") is None else found.to(kwargs["dtype"])
            if at in self._orders:
                self._orders[_storage(found)] = found, t
            return found
        if t.device.type == "tpu" and device.type == "cpu" and at in self._orders:
            return self._orders[at][1]
        return None

    def inverts(self, func, args: tuple) -> None:
        """`invert_permutation` of an order, which writes it to a tensor of the device."""
        if func is _aten.scatter_.src and (of := self._orders.get(_storage(args[2]))) is not None:
            self._orders[_storage(args[0])] = args[0], of[1].argsort()

    def pack(self, x, lengths, batch_first) -> tuple[torch.Tensor, torch.Tensor]:
        with self._ops:
            return pack_varying(x, lengths, self.on_device(lengths, x.device), batch_first, self._packed)

    def clear(self) -> None:
        """The run is over, and holds nothing that it made."""
        self._made.clear()
        self._orders.clear()
        self._data.clear()

    def _packed(self, data: torch.Tensor) -> None:
        self._data[_storage(data)] = data

    def check(self, func, taken: list[torch.Tensor], results) -> None:
        """Raises if an operation mixes rows of the data of a packed sequence."""
        if not self._data or func.name() in _KEEP_ROWS:
            return
        rows = next((len(self._data[at]) for t in taken if (at := _storage(t)) in self._data), None)
        if rows is None:
            return
        is_by_row = torch.Tag.pointwise in func.tags and isinstance(results, torch.Tensor) and len(results) == rows
        if not is_by_row:
            self._ops.fail(f"computes with the data of a packed sequence ({func})", _HINT)
        self._packed(results)


def _is_descending(func, args: tuple) -> bool:
    at = 2 if func is _aten.sort.default else 3
    return len(args) > at and bool(args[at])


def _storage(t: torch.Tensor) -> int:
    return t.untyped_storage()._cdata
