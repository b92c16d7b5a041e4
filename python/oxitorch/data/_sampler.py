"""Batches of which each is of one bucket, in several processes too, and again from the middle of an epoch."""

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from ._buckets import Buckets
from ._numbers import percent, positive, share, table
from ._resolutions import ResolutionBuckets


class BucketBatchSampler:
    """Batches of indices, each of samples of one bucket: `DataLoader(dataset, batch_sampler=...)`.

    In several processes each has its own part of the same epoch, as with
    `torch.utils.data.distributed.DistributedSampler`: as many batches as the others, and in each step a batch of the
    same bucket and size, so that all have the same programs.

    What does not fill a batch at the end of a bucket is a smaller batch, which is a shape of its own; `drop_last`
    leaves it out, and `even_batches` fills it with samples of the bucket that come again. In several processes without
    either, it is cut into equal parts, for which up to `num_replicas - 1` samples come again.

    An epoch that has been gone through is followed by the next one, with or without `set_epoch`. An iteration that is
    left before its end is begun again by the next one, unless a state was loaded.

    Args:
        lengths: of the dataset's samples, in its order; for `ResolutionBuckets` their (height, width).
        buckets: what `bucketize` or `resolution_buckets` gave.
        batch_size: samples in a batch of one process, of every bucket.
        max_tokens: instead of `batch_size`: elements in a batch with its padding, at most (pixels of images). Batches
            of short samples have more of them.
        shuffle: the samples of a bucket, and the order of all batches, by `seed` and epoch; otherwise they come from
            the smallest bucket to the largest, each in the dataset's order.
        seed: the same in all processes.
        drop_last: as above.
        even_batches: as above.
        num_replicas, rank: how many processes there are and which this is; by default those of `torch.distributed`
            where it is initialized, else one.

    Raises:
        ValueError: a sample has no bucket, a sample of the largest bucket is more than `max_tokens`, both or neither of
            `batch_size` and `max_tokens` are there, `drop_last` and `even_batches` both, or there is no such rank.
    """

    def __init__(
        self, lengths: Any, buckets: Buckets | ResolutionBuckets, batch_size: int | None = None, *,
        max_tokens: int | None = None, shuffle: bool = True, seed: int = 0, drop_last: bool = False,
        even_batches: bool = False, num_replicas: int | None = None, rank: int | None = None,
    ):  # fmt: skip
        if drop_last and even_batches:
            raise ValueError("BucketBatchSampler: `drop_last` leaves out what `even_batches` fills: set one of them")
        self.buckets = buckets.of(lengths)
        self.batch_sizes = _batch_sizes(buckets, batch_size, max_tokens)
        self.shuffle, self.seed, self.drop_last, self.even_batches = shuffle, int(seed), drop_last, even_batches
        self.num_replicas, self.rank = _place(num_replicas, rank)
        index = buckets.index(lengths)
        ends = np.cumsum(np.bincount(index, minlength=len(buckets)))
        self._members = np.split(np.argsort(index, kind="stable"), ends[:-1])
        self._steps = self._plan()
        self.epoch = 0
        self._batches = 0  # that have been drawn of this epoch
        self._start = 0  # the batch with which the next iteration begins
        self._ended = False  # this epoch

    def _plan(self) -> np.ndarray:
        """The steps of an epoch by bucket, int64 [n, 3]: the bucket, its first sample, and how many each rank gets."""
        steps = [np.empty((0, 3), dtype=np.int64)]
        for bucket, (members, rows) in enumerate(zip(self._members, self.batch_sizes, strict=True)):
            together = rows * self.num_replicas
            starts = np.arange(0, len(members), together)
            each = np.full(len(starts), rows)
            if rest := len(members) % together:
                if self.drop_last:
                    starts, each = starts[:-1], each[:-1]
                elif not self.even_batches:
                    each[-1] = -(-rest // self.num_replicas)
            steps.append(np.stack((np.full(len(starts), bucket), starts, each), axis=1))
        return np.concatenate(steps)

    def __len__(self) -> int:
        """The batches of this process in an epoch."""
        return len(self._steps)

    def __iter__(self) -> Iterator[list[int]]:
        if self._ended:
            self.set_epoch(self.epoch + 1)
        start, self._start = self._start, 0
        self._batches = start
        members, steps = self._members, self._steps
        if self.shuffle:
            # Unlike numpy's newer generators, this one gives the same numbers in every version: an epoch goes on as it
            # began where numpy is another.
            words = [self.seed & 0xFFFFFFFF, self.seed >> 32 & 0xFFFFFFFF, self.epoch]
            random = np.random.RandomState(np.array(words, dtype=np.uint32))
            members = [random.permutation(m) for m in members]
            steps = random.permutation(steps)
        for bucket, first, each in steps[start:].tolist():
            together = members[bucket][first : first + each * self.num_replicas]
            if len(together) < each * self.num_replicas:
                more = each * self.num_replicas - len(together)
                together = np.concatenate((together, np.resize(members[bucket], more)))
            self._batches += 1
            yield together[self.rank :: self.num_replicas].tolist()
        self._ended = True

    def set_epoch(self, epoch: int) -> None:
        """Says which epoch comes, by which it is shuffled, as `DistributedSampler.set_epoch`.

        Of an epoch that `load_state_dict` has put in its middle, the rest comes; any other comes from its beginning.

        Raises:
            ValueError: it is negative, or more than 32 bits hold.
        """
        if not 0 <= epoch < 1 << 32:
            raise ValueError(f"BucketBatchSampler.set_epoch: expected 0 to 2**32 - 1, got {epoch}")
        if epoch != self.epoch or self._ended:
            self.epoch, self._batches, self._start, self._ended = int(epoch), 0, 0, False

    def state_dict(self, batches: int | None = None) -> dict[str, Any]:
        """Where the epoch is, in numbers and lists, for a checkpoint. It is the same on all ranks.

        Args:
            batches: how many batches of this epoch the loop has had. By default as many as were drawn, which are more
                where a DataLoader has worker processes, as these draw ahead.

        Raises:
            ValueError: the epoch has no such number of batches.
        """
        done = self._batches if batches is None else int(batches)
        if not 0 <= done <= len(self):
            raise ValueError(f"BucketBatchSampler.state_dict: an epoch has {len(self)} batches, got {done}")
        if self._ended and batches is None:
            return {"epoch": self.epoch + 1, "batches": 0, **self._settings()}
        return {"epoch": self.epoch, "batches": done, **self._settings()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Makes the next iteration go on where a state was made.

        Raises:
            ValueError: the sampler that the state is of would give other batches.
        """
        own = self._settings()
        if other := [
            f"{name} was {state.get(name)!r} and is {own[name]!r}" for name in own if state.get(name) != own[name]
        ]:
            raise ValueError(
                f"BucketBatchSampler.load_state_dict: the batches would be others: {'; '.join(other)}\n"
                "hint: begin the epoch anew with set_epoch, or make the sampler as it was"
            )
        self.epoch, self._ended = int(state["epoch"]), False
        self._batches = self._start = int(state["batches"])

    def _settings(self) -> dict[str, Any]:
        """All that decides which batches an epoch has."""
        return {
            "seed": self.seed,
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
            "even_batches": self.even_batches,
            "num_replicas": self.num_replicas,
            "batch_sizes": list(self.batch_sizes),
            "shapes": [list(shape) for shape in self.buckets.shapes],
            "samples": [len(members) for members in self._members],
        }

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of an epoch's batches, sorted: samples, then what a sample is padded or cropped to."""
        return sorted({shape for shape, _ in self._kinds()})

    def _kinds(self) -> list[tuple[tuple[int, ...], int]]:
        """The shapes of an epoch's batches by bucket, with how many batches have each."""
        kinds, counts = np.unique(self._steps[:, ::2], axis=0, return_counts=True)
        shapes = [(each, *self.buckets.shapes[bucket]) for bucket, each in kinds.tolist()]
        return list(zip(shapes, counts.tolist(), strict=True))

    @property
    def waste(self) -> float:
        """The waste of the buckets with these samples, 0 to 1."""
        return self.buckets.waste

    def report(self) -> str:
        """The shapes of an epoch with their batches, what comes again and what is left out, and the waste."""
        rows = [
            (" x ".join(map(str, shape)), count, shape[0] * count * self.num_replicas) for shape, count in self._kinds()
        ]
        samples, given = sum(map(len, self._members)), sum(row[2] for row in rows)
        lines = [
            f"{len(self.shapes)} shape{'s' * (len(self.shapes) != 1)} in {len(self):,} batches"
            + (f" of each of {self.num_replicas} processes" if self.num_replicas > 1 else "")
            + f"; {self.buckets.waste_text}",
            table(("shape", "batches", "samples"), [*rows, ("all", len(self), given)]),
        ]
        # A bucket has what is left out, or what comes again, at its end; one sampler has one of them.
        if given < samples:
            out = samples - given
            lines.append(f"  {out:,} of {samples:,} samples are left out ({percent(share(out, samples))})")
        elif given > samples:
            again = given - samples
            lines.append(f"  {again:,} samples come again to fill batches ({percent(share(again, given))})")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.report()


def _batch_sizes(
    buckets: Buckets | ResolutionBuckets, batch_size: int | None, max_tokens: int | None
) -> tuple[int, ...]:
    """The samples in a batch of each bucket."""
    if (batch_size is None) == (max_tokens is None):
        raise ValueError("BucketBatchSampler: expected one of `batch_size` and `max_tokens`")
    if batch_size is not None:
        return (positive("BucketBatchSampler: batch_size", batch_size),) * len(buckets)
    elements = [int(np.prod(shape)) for shape in buckets.shapes]
    if (budget := positive("BucketBatchSampler: max_tokens", max_tokens)) < max(elements):
        raise ValueError(
            f"BucketBatchSampler: a sample of the largest bucket has {max(elements):,} elements, and a batch at most "
            f"max_tokens={budget:,}\nhint: raise max_tokens, or take smaller buckets"
        )
    return tuple(budget // n for n in elements)


def _place(num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    """How many processes there are, and which this is."""
    # Where nobody has imported it, there is no group.
    dist = sys.modules.get("torch.distributed")
    here = dist is not None and dist.is_available() and dist.is_initialized()
    if num_replicas is None:
        num_replicas = dist.get_world_size() if here else 1
    if rank is None:
        rank = dist.get_rank() if here else 0
    num_replicas = positive("BucketBatchSampler: num_replicas", num_replicas)
    if not 0 <= rank < num_replicas:
        raise ValueError(f"BucketBatchSampler: expected a rank from 0 to {num_replicas - 1}, got {rank}")
    return num_replicas, int(rank)
