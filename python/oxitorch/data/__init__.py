"""Data of varying shapes: few shapes, and little padding.

A program is compiled for the shapes that it works on, so each new length of a batch is a new program. Here are the ways
to few shapes:

- `bucketize` chooses the lengths to which sequences are padded, `BucketBatchSampler` makes batches of one such length,
  and `pad_collate` pads them.
- `pack_sequences` lays several sequences into one row of a fixed length; `segment_mask` keeps attention, and
  `next_token_labels` losses, within each sequence.
- `resolution_buckets` chooses the sizes to which images are resized and cropped; `BucketBatchSampler` takes these too.

They work with `torch.utils.data.DataLoader`, on any device. This package does not import torch before tensors are made.
"""

from ._buckets import Buckets, bucketize
from ._collate import pad_collate
from ._packing import Packed, Packing, pack_sequences
from ._resolutions import ImageFit, ResolutionBuckets, resolution_buckets
from ._sampler import BucketBatchSampler
from ._segments import next_token_labels, segment_mask

__all__ = [
    "BucketBatchSampler", "Buckets", "ImageFit", "Packed", "Packing", "ResolutionBuckets",
    "bucketize", "next_token_labels", "pack_sequences", "pad_collate", "resolution_buckets", "segment_mask",
]  # fmt: skip
