"""Buckets of image sizes: the few sizes, of nearly one area, to which images are resized and cropped."""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from ._cheapest_path import cheapest_path
from ._numbers import percent, positive, share, table


class ImageFit(NamedTuple):
    """How an image becomes one of its bucket: resized to `resize`, of which `target_size` is cut from `crop_top_left`.

    All are (vertical, horizontal), in pixels. `original_size`, `crop_top_left` and `target_size` are also what models
    like SDXL are told about an image.
    """

    original_size: tuple[int, int]
    resize: tuple[int, int]
    crop_top_left: tuple[int, int]
    target_size: tuple[int, int]


class ResolutionBuckets:
    """Sizes of images, (height, width) in pixels, each for the images whose aspect ratio is nearest.

    An image is resized until it just covers the size of its bucket, and what stands out is cut off. Of an image of
    aspect ratio a in a bucket of aspect ratio b that is the share 1 - min(a, b) / max(a, b), so that the nearest ratio
    on a scale of logarithms loses least.

    Attributes:
        resolutions: the sizes, from the tallest to the widest.
        counts: how many of the images each bucket has.
        cropped: the share of each bucket's resized images that is cut off, on average.
        enlarged: how many images are smaller than their bucket in one direction or both.

    Args:
        resolutions: the sizes, in any order.
        sizes: (height, width) of the images, from which the other attributes are.

    Raises:
        ValueError: there is no size, or one is less than 1 pixel in a direction.
    """

    def __init__(self, resolutions: Iterable[tuple[int, int]], sizes: Any = ()):
        name = "ResolutionBuckets: a height or width"
        distinct = {(positive(name, height), positive(name, width)) for height, width in resolutions}
        if not distinct:
            raise ValueError("ResolutionBuckets: expected at least one size")
        self.resolutions = tuple(sorted(distinct, key=lambda size: (size[1] / size[0], size)))
        images = _sizes("ResolutionBuckets", sizes)
        index = self.index(images)
        bucket, aspect = np.array(self.resolutions)[index], images[:, 1] / images[:, 0]
        wanted = bucket[:, 1] / bucket[:, 0]
        lost = np.bincount(index, 1 - np.minimum(aspect, wanted) / np.maximum(aspect, wanted), len(self.resolutions))
        counts = np.bincount(index, minlength=len(self.resolutions))
        self.counts = tuple(counts.tolist())
        self.cropped = tuple((lost / np.maximum(counts, 1)).tolist())
        self.enlarged = int((images < bucket).any(axis=1).sum())

    def index(self, sizes: Any) -> np.ndarray:
        """The number of each image's bucket, int64 [n], from (height, width) of each."""
        images = _sizes("ResolutionBuckets.index", sizes)
        aspects = np.array([width / height for height, width in self.resolutions])
        # Of what is as near to two buckets, the taller is taken.
        return np.searchsorted(_middles(aspects), images[:, 1] / images[:, 0]).astype(np.int64)

    def of(self, sizes: Any) -> "ResolutionBuckets":
        """The same sizes, counted for images of these (height, width)."""
        return ResolutionBuckets(self.resolutions, sizes)

    def assign(self, size: tuple[int, int]) -> tuple[int, int]:
        """The (height, width) that an image of this (height, width) gets."""
        return self.resolutions[int(self.index([size])[0])]

    def fit(self, size: tuple[int, int], position: tuple[float, float] = (0.5, 0.5)) -> ImageFit:
        """How an image of this (height, width) becomes one of its bucket.

        Args:
            size: of the image.
            position: where the crop is, from 0 (top, left) to 1 (bottom, right); the middle by default.

        Raises:
            ValueError: the position is outside.
        """
        if not all(0 <= p <= 1 for p in position):
            raise ValueError(f"ResolutionBuckets.fit: expected a position from 0 to 1, got {position}")
        original, target = tuple(map(int, size)), self.assign(size)
        scale = max(t / o for t, o in zip(target, original, strict=True))
        resize = tuple(max(t, round(o * scale)) for t, o in zip(target, original, strict=True))
        crop = tuple(round((r - t) * p) for r, t, p in zip(resize, target, position, strict=True))
        return ImageFit(original, resize, crop, target)

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """What each bucket makes of a sample."""
        return list(self.resolutions)

    @property
    def waste(self) -> float:
        """The share of resized images that is cut off, on average over the images, 0 to 1."""
        return share(sum(c * n for c, n in zip(self.cropped, self.counts, strict=True)), sum(self.counts))

    @property
    def waste_text(self) -> str:
        """The waste in words."""
        return f"{percent(self.waste)} of the images is cut off"

    def report(self) -> str:
        """The buckets with their images and what is cut off of these."""
        rows = [
            (f"{height} x {width}", f"{width / height:.2f}", height * width, count, percent(cropped))
            for (height, width), count, cropped in zip(self.resolutions, self.counts, self.cropped, strict=True)
        ]
        count = sum(self.counts)
        lines = [
            f"{len(self)} resolution{'s' * (len(self) > 1)}: {self.waste_text}; "
            f"{self.enlarged:,} of {count:,} are enlarged",
            table(
                ("height x width", "aspect", "pixels", "images", "cut off"),
                [*rows, ("all", "", "", count, percent(self.waste))],
            ),
        ]
        return "\n".join(lines)

    def __len__(self) -> int:
        return len(self.resolutions)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ResolutionBuckets) and self.resolutions == other.resolutions

    def __hash__(self) -> int:
        return hash(self.resolutions)

    def __str__(self) -> str:
        return self.report()

    def __repr__(self) -> str:
        return f"ResolutionBuckets({list(self.resolutions)}, waste={percent(self.waste)})"


def resolution_buckets(
    sizes: Any, max_graphs: int, *, area: int = 1024 * 1024, multiple_of: int = 64, max_aspect: float = 4.0
) -> ResolutionBuckets:
    """The at most `max_graphs` sizes with which least of the images is cut off.

    They are chosen among all sizes that are as large as `area` allows: for each height the largest width, and for each
    width the largest height. No other choice of these has less cut off. Sizes that no image would have are left out.

    Args:
        sizes: (height, width) of all images in pixels.
        max_graphs: the most buckets. A step is a program, or a few, for each.
        area: pixels that no bucket exceeds.
        multiple_of: each height and width is a multiple of it, as networks need that halve images several times.
        max_aspect: how much longer than the other a side may be at most.

    Raises:
        ValueError: there are no images, a number is less than 1, or no size of `multiple_of` has so small an area.
    """
    images = _sizes("resolution_buckets", sizes)
    max_graphs = positive("resolution_buckets: max_graphs", max_graphs)
    area = positive("resolution_buckets: area", area)
    multiple_of = positive("resolution_buckets: multiple_of", multiple_of)
    if not len(images):
        raise ValueError("resolution_buckets: expected at least one image")
    if not max_aspect >= 1:
        raise ValueError(f"resolution_buckets: expected max_aspect of at least 1, got {max_aspect}")
    candidates = _candidates(area, multiple_of, max_aspect)
    if not candidates:
        raise ValueError(
            f"resolution_buckets: no height and width that are multiples of {multiple_of} have at most {area:,} pixels "
            f"and max_aspect={max_aspect}\nhint: raise area, or lower multiple_of"
        )
    chosen = _least_cropped(
        np.array([width / height for height, width in candidates]), np.sort(images[:, 1] / images[:, 0]), max_graphs
    )
    found = ResolutionBuckets([candidates[i] for i in chosen], images)
    used = [size for size, count in zip(found.resolutions, found.counts, strict=True) if count]
    return ResolutionBuckets(used, images)


def _sizes(name: str, sizes: Any) -> np.ndarray:
    """(height, width) as int64 [n, 2], which may be empty."""
    array = np.asarray(sizes)
    if not array.size:
        return np.empty((0, 2), dtype=np.int64)
    if array.ndim != 2 or array.shape[1] != 2 or array.dtype.kind not in "iu":
        raise ValueError(f"{name}: expected (height, width) of each image, got {array.dtype} {list(array.shape)}")
    if (least := int(array.min())) < 1:
        raise ValueError(f"{name}: expected images of at least 1 pixel, got {least}")
    return array.astype(np.int64)


def _candidates(area: int, multiple_of: int, max_aspect: float) -> list[tuple[int, int]]:
    """All sizes as large as the area allows, from the tallest to the widest; of one aspect ratio, the largest."""
    largest: dict[float, tuple[int, int]] = {}
    longest = int(min(area / multiple_of, math.sqrt(area * max_aspect)))
    for one in range(multiple_of, longest + 1, multiple_of):
        other = area // one // multiple_of * multiple_of
        for height, width in ((one, other), (other, one)):
            if max(height, width) > max_aspect * min(height, width):
                continue
            if height * width > math.prod(largest.get(width / height, (0, 0))):
                largest[width / height] = (height, width)
    return [largest[aspect] for aspect in sorted(largest)]


def _middles(aspects: np.ndarray) -> np.ndarray:
    """Where an image is as near to one aspect ratio as to the next, on a scale of logarithms."""
    return np.sqrt(aspects[:-1] * aspects[1:])


def _least_cropped(candidates: np.ndarray, images: np.ndarray, max_graphs: int) -> np.ndarray:
    """The indices, ascending, of at most `max_graphs` aspect ratios with which least of the images is cut off.

    Both are float64 and ascending. The nodes of the path are the candidates, between one that is so tall and one that
    is so wide that an image would lose everything there; a hop costs what is cut off of the images between its ends,
    each in the nearer one. That is Monge: what an image loses is the lesser of two numbers, and min is supermodular.
    """
    ends = np.concatenate(([1e-300], candidates, [1e300]))
    # Of the images [0, m) the sum of their ratios, of [m, n) that of the reciprocals: each begins with what is small.
    ratios = np.concatenate(([0.0], np.cumsum(images)))
    inverse = np.concatenate((np.cumsum(1 / images[::-1])[::-1], [0.0]))
    at = np.searchsorted(images, ends)

    def cut_off(i: np.ndarray, j: np.ndarray) -> np.ndarray:
        middle = np.searchsorted(images, np.sqrt(ends[i] * ends[j]), side="right")
        middle = np.clip(middle, at[i], at[j])
        kept = ends[i] * (inverse[at[i]] - inverse[middle]) + (ratios[at[j]] - ratios[middle]) / ends[j]
        # No path is without a candidate.
        return np.where(j - i > len(candidates), np.inf, at[j] - at[i] - kept)

    path = cheapest_path(len(candidates) + 1, max_graphs + 1, cut_off)
    return path[:-1] - 1
