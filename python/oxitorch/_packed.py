"""Packed sequences (`torch.nn.utils.rnn`), whose lengths are other ones in each batch.

PyTorch packs with slices of each length, so that each batch would be programs of its own. Here a step is packed as a
block, in a loop that takes the numbers of samples as a tensor (`packed.rs`), and the data of a packed sequence has in
its storage as many rows as the padded batch: what takes it takes all of them (`Rows`), which are zero behind those of
the samples. So nothing depends on how many these are, unless somebody else computes with the data.

In a function of `torch.tpu.jit` lengths that are a tensor of the host are other ones in later calls, and nobody knows
them (`Varying`). There the data has all rows in PyTorch's eyes, too, and `jit/_packs.py` sees who computes with it.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

_device = torch._C._get_privateuse1_backend_name()
_batched = torch._C._parse_dispatch_key("Batched")
_ops = torch.ops.oxitorch
_libraries: list[torch.library.Library] = []


def install() -> None:
    """Defines the operations, and takes PyTorch's functions of packed sequences for tensors of the device."""
    own, aten = torch.library.Library("oxitorch", "FRAGMENT"), torch.library.Library("aten", "IMPL")
    _libraries.extend([own, aten])
    own.define("_pack_rows(Tensor padded, Tensor batch_sizes, int rows) -> Tensor")
    own.define("_pad_rows(Tensor rows, Tensor batch_sizes, int steps, int batch, Scalar value) -> Tensor")
    own.define("_packed_rows(Tensor rows, Tensor batch_sizes) -> Tensor")
    own.define("_batch_sizes(Tensor lengths, int steps) -> Tensor")
    own.define("_full_length(Tensor batch_sizes) -> Tensor")
    own.impl("_batch_sizes", lambda lengths, steps: lengths.new_empty(steps, dtype=torch.int64), "Meta")
    own.impl("_full_length", lambda sizes: torch.empty_like(sizes), "Meta")
    own.impl("_pack_rows", lambda x, sizes, rows: x.new_empty((rows, *x.shape[2:])), "Meta")
    own.impl("_pad_rows", lambda x, sizes, steps, batch, value: x.new_empty((steps, batch, *x.shape[1:])), "Meta")
    own.impl("_packed_rows", lambda x, sizes: torch.empty_like(x), "Meta")
    _ops._bind("oxitorch")
    # Packing has a derivative of PyTorch's, which is another function of these.
    aten.impl("_pack_padded_sequence", _pack, "PrivateUse1")
    for name, kernel in (("_pack_padded_sequence_backward", _pack_backward), ("_pad_packed_sequence", _pad)):
        for key in ("AutogradPrivateUse1", "PrivateUse1"):
            aten.impl(name, kernel, key)


class Varying(NamedTuple):
    """Numbers of samples that nobody knows, behind a tensor of the host that stands for them: it has one step, so that
    `pad_packed_sequence` says whether it was given a length.

    Attributes:
        batch_sizes: on the device, with zeros at the end.
        lengths: those of this call, on the host.
        steps: how many the padded batch has.
        packed: is told of data that has rows behind those of the samples.
    """

    batch_sizes: torch.Tensor
    lengths: torch.Tensor
    steps: int
    packed: Callable[[torch.Tensor], None]

    def stand_in(self) -> torch.Tensor:
        found = torch.tensor([len(self.lengths)])
        found.varying = self
        return found

    @classmethod
    def behind(cls, batch_sizes: torch.Tensor | None) -> "Varying | None":
        while isinstance(batch_sizes, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(batch_sizes):
            batch_sizes = torch._C._functorch.get_unwrapped(batch_sizes)
        return getattr(batch_sizes, "varying", None)


class Rows(NamedTuple):
    """All rows of a packed sequence: those of its samples, and zeros.

    Attributes:
        whole: the rows.
        batch_sizes: on the device, the number of samples of each step, with zeros at the end.
        count: how many rows there are in PyTorch's eyes.
        varying: what their numbers are, if nobody knows them.
    """

    whole: torch.Tensor
    batch_sizes: torch.Tensor
    count: int
    varying: Varying | None = None

    @classmethod
    def of(cls, data: torch.Tensor, batch_sizes: torch.Tensor, rows: int | None = None) -> "Rows":
        """Of the data of a packed sequence and PyTorch's numbers of samples; `rows` says how many there are to be, else
        there are as many as in the storage.
        """
        count, varying = data.shape[0], Varying.behind(batch_sizes)
        if varying is not None:
            return cls(_Whole.apply(data, varying.batch_sizes, count), varying.batch_sizes, count, varying)
        batch = int(batch_sizes[0])
        if rows is None:
            rows = _room(data)
            rows = count if rows % batch or rows // batch < len(batch_sizes) else rows
        steps = len(batch_sizes) if rows % batch else max(rows // batch, len(batch_sizes))
        sizes = F.pad(batch_sizes, (0, steps - len(batch_sizes))).to(data.device)
        return cls(_Whole.apply(data, sizes, rows), sizes, count)

    def cut(self, rows: torch.Tensor) -> torch.Tensor:
        """As many of these rows, which are made of those, as PyTorch's function would give."""
        if self.varying is not None:
            self.varying.packed(rows)
        return rows if rows.shape[0] == self.count else _Cut.apply(rows, self.batch_sizes, self.count)


def in_parts(*tensors: torch.Tensor) -> bool:
    """Whether somebody asks for what PyTorch's operations alone have: forward derivatives, transforms, complex numbers,
    tensors that are several.
    """
    return torch.autograd.forward_ad._current_level >= 0 or any(
        t.is_complex() or is_transformed(t) or hasattr(t, "__tensor_flatten__") for t in tensors
    )


def is_transformed(t: torch.Tensor) -> bool:
    """Whether operations on it are a transform's of `torch.func`, or of a backward of several gradients at once."""
    return torch._C._are_functorch_transforms_active() or torch._C._dispatch_keys(t).has(_batched)


def are_numbers_of(batch_sizes: torch.Tensor, rows: int) -> bool:
    """Whether these are numbers of samples that do not grow, of so many rows in all."""
    varying = Varying.behind(batch_sizes)
    if varying is not None:
        return rows == varying.steps * len(varying.lengths)
    sizes = batch_sizes.tolist()
    return bool(sizes) and sizes[-1] >= 1 and sizes == sorted(sizes, reverse=True) and sum(sizes) == rows


def _room(data: torch.Tensor) -> int:
    """How many rows there are in the storage that this is the beginning of."""
    row = data.itemsize * data[0].numel()
    begins = data.is_contiguous() and data.storage_offset() == 0 and row > 0
    stored = data.untyped_storage().nbytes() if begins else 0
    return stored // row if begins and stored % row == 0 else data.shape[0]


def _begin(t: torch.Tensor, count: int) -> torch.Tensor:
    """The first rows of the storage: no view in the eyes of autograd, which is told of gradients by who asks."""
    with torch._C._AutoDispatchBelowADInplaceOrView():
        return t.as_strided((count, *t.shape[1:]), t.stride())


class _Whole(torch.autograd.Function):
    """All rows of a packed sequence, of which the first are given."""

    @staticmethod
    def forward(ctx, data, sizes, rows):
        ctx.count = data.shape[0]
        ctx.save_for_backward(sizes)
        if rows == ctx.count:
            whole = data
        elif rows <= _room(data):
            whole = _begin(data, rows)
        else:
            whole = F.pad(data, (0, 0) * (data.dim() - 1) + (0, rows - data.shape[0]))
        return _ops._packed_rows(whole, sizes)

    @staticmethod
    def backward(ctx, grad):
        return grad if len(grad) == ctx.count else _Cut.apply(grad, *ctx.saved_tensors, ctx.count), None, None


class _Cut(torch.autograd.Function):
    """The first rows."""

    @staticmethod
    def forward(ctx, rows, sizes, count):
        ctx.rows = rows.shape[0]
        ctx.save_for_backward(sizes)
        return _begin(rows.contiguous(), count)

    @staticmethod
    def backward(ctx, grad):
        return _Whole.apply(grad, *ctx.saved_tensors, ctx.rows), None, None


class _Padding(torch.autograd.Function):
    """Rows as steps and samples."""

    @staticmethod
    def forward(ctx, rows, sizes, steps, batch, value):
        ctx.rows = rows.shape[0]
        ctx.save_for_backward(sizes)
        return _ops._pad_rows(rows, sizes, steps, batch, value)

    @staticmethod
    def backward(ctx, grad):
        return _Packing.apply(grad, *ctx.saved_tensors, ctx.rows), None, None, None, None


class _Packing(torch.autograd.Function):
    """Steps and samples as rows."""

    @staticmethod
    def forward(ctx, padded, sizes, rows):
        ctx.shape = padded.shape
        ctx.save_for_backward(sizes)
        return _ops._pack_rows(padded, sizes, rows)

    @staticmethod
    def backward(ctx, grad):
        return _Padding.apply(grad, *ctx.saved_tensors, *ctx.shape[:2], 0), None, None


def _pack(x, lengths, batch_first):
    steps_first = x.transpose(0, 1) if batch_first and x.dim() > 1 else x
    if not _fit(steps_first, lengths):
        op = torch.ops.aten._pack_padded_sequence.default
        return op._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, x, lengths, batch_first)
    steps, batch = steps_first.shape[:2]
    batch_sizes = (lengths.unsqueeze(1) > torch.arange(int(lengths[0]))).sum(0)
    sizes = F.pad(batch_sizes, (0, steps - len(batch_sizes))).to(x.device)
    rows = _ops._pack_rows(steps_first, sizes, steps * batch)
    return _begin(rows, int(lengths.sum())), batch_sizes


def pack_varying(x, lengths, on_device, batch_first, packed) -> tuple[torch.Tensor, torch.Tensor]:
    """As PyTorch's function, with lengths that nobody knows, which are on the device, too."""
    steps_first = x.transpose(0, 1) if batch_first else x
    steps, batch = steps_first.shape[:2]
    sizes = _ops._batch_sizes(on_device, steps)
    data = _ops._pack_rows(steps_first, sizes, steps * batch)
    packed(data)
    return data, Varying(sizes, lengths, steps, packed).stand_in()


def _fit(x: torch.Tensor, lengths: torch.Tensor) -> bool:
    """Whether these are lengths of the samples of a batch, the longest first."""
    if lengths.device.type != "cpu" or lengths.dtype != torch.int64 or lengths.dim() != 1 or x.dim() < 2:
        return False
    numbers = lengths.tolist()
    steps, batch = x.shape[:2]
    return (
        0 < len(numbers) == batch
        and 1 <= numbers[-1] <= numbers[0] <= steps
        and numbers == sorted(numbers, reverse=True)
        and x.numel() > 0
    )


def _pack_backward(grad, input_size, batch_sizes, batch_first):
    if in_parts(grad):
        if Varying.behind(batch_sizes) is not None:
            raise RuntimeError(not_varying("transforms and forward derivatives of packed sequences"))
        op = torch.ops.aten._pack_padded_sequence_backward.default
        return _composed(op, grad, input_size, batch_sizes, batch_first)
    steps, batch = reversed(input_size[:2]) if batch_first else input_size[:2]
    rows = Rows.of(grad, batch_sizes, steps * batch)
    padded = _Padding.apply(rows.whole, rows.batch_sizes, steps, batch, 0)
    return padded.transpose(0, 1) if batch_first else padded


def _pad(data, batch_sizes, batch_first, padding_value, total_length):
    varying = Varying.behind(batch_sizes)
    if varying is not None:
        return _pad_varying(varying, data, batch_sizes, batch_first, padding_value, total_length)
    steps = max(total_length, batch_sizes.shape[0]) if batch_sizes.dim() else 0
    fit = (
        batch_sizes.device.type == "cpu"
        and batch_sizes.dtype == torch.int64
        and batch_sizes.dim() == 1
        and data.dim() > 0
        and data.numel() > 0
        and (total_length <= 0 or total_length == steps)
        and not in_parts(data)
        and are_numbers_of(batch_sizes, data.shape[0])
    )
    if not fit:
        op = torch.ops.aten._pad_packed_sequence.default
        return _composed(op, data, batch_sizes, batch_first, padding_value, total_length)
    batch = int(batch_sizes[0])
    rows = Rows.of(data, batch_sizes)
    padded = _Padding.apply(rows.whole, rows.batch_sizes, steps, batch, padding_value)
    lengths = (batch_sizes.unsqueeze(1) > torch.arange(batch)).sum(0)
    return padded.transpose(0, 1) if batch_first else padded, lengths


def _pad_varying(varying, data, batch_sizes, batch_first, padding_value, total_length):
    if in_parts(data):
        raise RuntimeError(not_varying("transforms and forward derivatives of packed sequences"))
    batch, rows = len(varying.lengths), Rows.of(data, batch_sizes)
    is_given = total_length > 1 or varying.steps == 1  # else it is the length of what stands for the numbers
    if is_given and total_length < varying.steps:
        raise RuntimeError(
            f"pad_packed_sequence: lengths that vary may be up to {varying.steps}, got total_length={total_length}\n"
            "hint: give the length of the padded batch"
        )
    sizes = rows.batch_sizes if is_given else _ops._full_length(rows.batch_sizes)
    padded = _Padding.apply(rows.whole, sizes, max(total_length, varying.steps), batch, padding_value)
    return padded.transpose(0, 1) if batch_first else padded, varying.lengths.clone()


def not_varying(what: str) -> str:
    """What an error says of something that needs to know the lengths."""
    return (
        f"torch.tpu.jit: {what} depend on the lengths, which are others in other calls\n"
        "hint: call it outside of the function, or give the recurrent net padded batches and mask the loss"
    )


def _composed(op, *args):
    """PyTorch's own way, and with it PyTorch's words for what is wrong."""
    return op._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args)
