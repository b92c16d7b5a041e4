"""Samples of several lengths as one batch."""

from collections.abc import Hashable, Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any

from ._buckets import Buckets
from ._numbers import positive

if TYPE_CHECKING:
    import torch


def pad_collate(
    batch: Sequence[Any], buckets: Buckets | int | None = None, *, padding_value: Any = 0, ignore_index: int = -100,
    stack: Sequence[Hashable] = (), mask: str | Mapping[str, str] | None = "attention_mask", lengths: str | None = None,
) -> Any:  # fmt: skip
    """Pads the sequences of a batch to one length: `DataLoader(collate_fn=partial(pad_collate, buckets=buckets), ...)`.

    A sample is a sequence, or a tuple or a dict with sequences. A sequence is a list, an array or a tensor with at
    least one dimension, of which the first is padded at its end. All sequences of a batch get one length: that of the
    longest, rounded up to its bucket. Numbers, texts and what `stack` names become what
    `torch.utils.data.default_collate` makes of them.

    Args:
        batch: the samples, all of one form.
        buckets: the lengths there are, or the one length; None for that of the longest sequence.
        padding_value: what stands behind the sequences: a number; or of a dict some keys' own, the others get 0; or of
            a tuple each item's own. Of a dict, "labels" get `ignore_index` and masks 0, if they are not named.
        ignore_index: of the loss, which leaves out labels of this value.
        stack: keys of a dict, or places in a tuple, of what has one size in all samples and is not padded.
        mask: the key under which a dict gets a mask of its first sequence, bool [batch, length], True where there is
            data; or such keys with the sequence that each is of, `{"source_mask": "source"}`. A key that the samples
            have themselves is left to them. A tuple or a lone sequence is followed by the mask. None for no mask.
        lengths: the same with the lengths of the first sequence, int64 [batch]. None, the default, for none.

    Returns:
        A dict or a tuple, as the samples are, with tensors [batch, length, *]. A lone sequence becomes a tuple where a
        mask or lengths follow.

    Raises:
        ValueError: there are no samples, they have several forms, they have no sequence, one is longer than the largest
            bucket, or a number is to pad several sequences of a tuple, of which one may be labels.
    """
    columns = _columns(batch)
    ragged = [key for key, column in columns.items() if key not in stack and _is_sequence(column[0])]
    if not ragged:
        raise ValueError(
            "pad_collate: the samples have no sequence to pad\nhint: DataLoader's own collate_fn stacks them"
        )
    of_masks = {mask} if isinstance(mask, str) else set(mask or ())
    values = _padding_values(batch[0], ragged, padding_value, ignore_index, of_masks)
    tensors = {key: _tensors(key, columns[key]) for key in ragged}
    size = _size(max(len(t) for column in tensors.values() for t in column), buckets)
    padded = {
        key: _pad(tensors[key], size, values[key]) if key in tensors else _stacked(column)
        for key, column in columns.items()
    }
    masks = mask if isinstance(mask, Mapping) else {mask: ragged[0]} if mask else {}
    if unknown := set(masks.values()) - set(ragged):
        raise ValueError(f"pad_collate: no sequences are under {sorted(map(str, unknown))}, of which a mask is wanted")
    more = {name: _mask(tensors[key], size) for name, key in masks.items()}
    if lengths:
        more[lengths] = _lengths(tensors[ragged[0]])
    if isinstance(batch[0], Mapping):
        return padded | {name: tensor for name, tensor in more.items() if name not in padded}
    result = (*padded.values(), *more.values())
    return result if isinstance(batch[0], tuple) or more else result[0]


def _columns(batch: Sequence[Any]) -> dict[Hashable, list]:
    """What the samples have under each key, or in each place."""
    if not len(batch):
        raise ValueError("pad_collate: expected at least one sample")
    for i, sample in enumerate(batch):
        if _form(sample) != _form(batch[0]):
            raise ValueError(f"pad_collate: sample 0 is {_form(batch[0])}, and sample {i} is {_form(sample)}")
    samples = [s if isinstance(s, Mapping) else dict(enumerate(s if isinstance(s, tuple) else (s,))) for s in batch]
    return {key: [sample[key] for sample in samples] for key in samples[0]}


def _form(sample: Any) -> str:
    if isinstance(sample, Mapping):
        return f"a dict of {sorted(map(str, sample))}"
    return f"a tuple of {len(sample)} items" if isinstance(sample, tuple) else "one sequence"


def _is_sequence(value: Any) -> bool:
    return isinstance(value, list) or getattr(value, "ndim", 0) > 0


def _padding_values(
    sample: Any, ragged: list[Hashable], given: Any, ignore_index: int, of_masks: set[str]
) -> dict[Hashable, float]:
    """What each sequence is padded with."""
    own = {"labels": ignore_index} | dict.fromkeys(of_masks, 0)
    if isinstance(given, Mapping):
        if unknown := given.keys() - set(ragged):
            raise ValueError(
                f"pad_collate: padding_value names {sorted(map(str, unknown))}, and the sequences are {ragged}"
            )
        return {key: given.get(key, own.get(key, 0)) for key in ragged}
    if isinstance(given, Sequence):
        if not isinstance(sample, tuple) or len(given) != len(sample):
            raise ValueError(f"pad_collate: padding_value has {len(given)} numbers, and a sample is {_form(sample)}")
        return {key: given[key] for key in ragged}
    if isinstance(sample, tuple) and len(ragged) > 1:
        raise ValueError(
            f"pad_collate: a sample has sequences in the places {ragged}, and one padding_value, {given!r}\n"
            "hint: give a value for each item of the tuple: padding_value=(0, -100) where the second are labels"
        )
    return {key: own.get(key, given) for key in ragged}


def _tensors(key: Hashable, column: Sequence[Any]) -> "list[torch.Tensor]":
    """The sequences as tensors of one dtype. An empty list has none of its own."""
    import torch

    tensors = [torch.as_tensor(value) for value in column]
    full = [t for t in tensors if t.dim() == 0 or len(t)] or tensors[:1]
    for t in full:
        if t.dim() == 0 or t.shape[1:] != full[0].shape[1:]:
            raise ValueError(
                f"pad_collate: samples have the shapes {list(full[0].shape)} and {list(t.shape)} under {key!r}, and "
                "only the first dimension may vary"
            )
    dtype = reduce(torch.promote_types, (t.dtype for t in full))
    return [t.to(dtype) if len(t) else full[0].new_empty((0, *full[0].shape[1:]), dtype=dtype) for t in tensors]


def _size(longest: int, buckets: Buckets | int | None) -> int:
    """The length to which a batch is padded."""
    if buckets is None:
        return longest
    if isinstance(buckets, Buckets):
        return buckets.assign(longest)
    if longest > (size := positive("pad_collate: buckets", buckets)):
        raise ValueError(f"pad_collate: the longest sequence of the batch has {longest}, and buckets={size}")
    return size


def _pad(tensors: "list[torch.Tensor]", size: int, value: float) -> "torch.Tensor":
    result = tensors[0].new_full((len(tensors), size, *tensors[0].shape[1:]), value)
    for row, t in zip(result, tensors, strict=True):
        row[: len(t)] = t
    return result


def _stacked(column: list[Any]) -> Any:
    from torch.utils.data import default_collate

    return default_collate(column)


def _lengths(tensors: "list[torch.Tensor]") -> "torch.Tensor":
    import torch

    return torch.tensor([len(t) for t in tensors])


def _mask(tensors: "list[torch.Tensor]", size: int) -> "torch.Tensor":
    import torch

    return torch.arange(size) < _lengths(tensors).unsqueeze(1)
