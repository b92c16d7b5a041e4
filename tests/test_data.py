"""`oxitorch.data` on the CPU: buckets, batches of one, padding, packing; `device/test_buckets.py` has the device."""

import itertools
import json
import pickle
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from oxitorch.data import (
    BucketBatchSampler,
    Buckets,
    Packing,
    ResolutionBuckets,
    bucketize,
    next_token_labels,
    pack_sequences,
    pad_collate,
    resolution_buckets,
    segment_mask,
)
from torch.utils.data import DataLoader

examples = partial(settings, deadline=None, derandomize=True, database=None)
some_lengths = st.lists(st.integers(0, 40), min_size=1, max_size=30)


def test_importing_it_does_not_import_torch(python):
    done = python("import sys, oxitorch.data; print('torch' in sys.modules)", fresh=True)
    assert done.stdout == "False\n"


# Buckets of lengths


def padding(sizes, lengths):
    return sum(min(s for s in sizes if s >= n) - n for n in lengths)


@examples(max_examples=150)
@given(some_lengths, st.integers(1, 5), st.integers(1, 9))
def test_no_choice_of_buckets_has_less_padding(lengths, max_graphs, multiple_of):
    buckets = bucketize(lengths, max_graphs, multiple_of=multiple_of)
    distinct = sorted({max(-(-n // multiple_of), 1) * multiple_of for n in lengths})
    least = min(
        padding((*chosen, distinct[-1]), lengths)
        for k in range(min(max_graphs, len(distinct)))
        for chosen in itertools.combinations(distinct[:-1], k)
    )
    assert len(buckets) <= max_graphs
    assert all(size % multiple_of == 0 for size in buckets.sizes)
    assert buckets.padded - sum(buckets.tokens) == padding(buckets.sizes, lengths) == least
    assert (sum(buckets.counts), sum(buckets.tokens)) == (len(lengths), sum(lengths))
    assert buckets.waste == (least / buckets.padded)
    assert [buckets.assign(n) for n in lengths] == [buckets.sizes[i] for i in buckets.index(lengths)]
    assert all(buckets.assign(n) == min(s for s in buckets.sizes if s >= n) for n in lengths)


def test_many_lengths_take_the_same_choice_as_all_pairs_would():
    """Of sizes that brute force cannot do: dynamic programming over all pairs."""
    lengths = np.random.default_rng(0).lognormal(5, 1, 4000).astype(int)
    distinct, counts = np.unique(np.maximum(lengths, 1), return_counts=True)
    before = np.concatenate(([0], np.cumsum(counts)))
    hop = np.concatenate(([0], distinct))[None, :] * (before[None, :] - before[:, None]).astype(float)
    hop[np.tril_indices(len(hop))] = np.inf
    total = hop[0]
    for max_graphs in range(2, 7):
        total = (total[:, None] + hop).min(axis=0)
        assert bucketize(lengths, max_graphs).padded == total[-1]


def test_lengths_that_are_cut_have_no_larger_bucket():
    buckets = bucketize([3, 50, 100, 2000], 3, multiple_of=64, max_length=100)
    assert buckets.sizes == (64, 100)
    assert buckets.tokens == (53, 200)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: bucketize([], 3), ValueError, "at least one length"),
        (lambda: bucketize([1, 2], 0), ValueError, "max_graphs: expected at least 1, got 0"),
        (lambda: bucketize([1, 2], 2.5), TypeError, "max_graphs: expected a whole number, got 2.5"),
        (lambda: bucketize([1.5], 2), TypeError, "expected whole numbers as lengths, got float64"),
        (lambda: bucketize([[1]], 2), ValueError, "in one dimension"),
        (lambda: bucketize([-1], 2), ValueError, "at least 0, got -1"),
        (lambda: bucketize([1 << 62, 3], 2), ValueError, "are too many"),
        (lambda: Buckets([]), ValueError, "at least one size"),
        (lambda: Buckets([4], [3, 5, 9]), ValueError, "2 of 3 sequences are longer than the largest bucket, 4"),
        (lambda: Packing([3, 0], 4), ValueError, "sequence 1 is empty"),
        (lambda: Packing([3, 5], 4), ValueError, "1 of 2 sequences are longer than a row of 4; the longest has 5"),
        (lambda: Packing([3, 3], 4, rows=1), ValueError, "2 sequences need 2 rows of 4, and rows=1"),
        (lambda: Packing([3], 4).pack([[1, 2]]), ValueError, r"sequence 0 has the shape \[2\], and 3 is its length"),
        (lambda: resolution_buckets([], 3), ValueError, "at least one image"),
        (lambda: resolution_buckets([(8, 0)], 3), ValueError, "at least 1 pixel, got 0"),
        (lambda: resolution_buckets([8, 9], 3), ValueError, r"\(height, width\) of each image, got int64 \[2\]"),
        (lambda: resolution_buckets([(8, 9)], 3, area=100), ValueError, "no height and width .* multiples of 64"),
        (lambda: ResolutionBuckets([(8, 8)]).fit((9, 9), (2, 0)), ValueError, "a position from 0 to 1"),
        (lambda: segment_mask(torch.ones(1, 2), dtype=torch.int64), TypeError, "a floating point dtype or bool"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_reports_read_well():
    lengths = [3, 5, 6, 11, 12, 30]
    buckets = bucketize(lengths, 2)
    assert str(buckets) == (
        "2 buckets: 25.6 % of the elements are padding (62.8 % if all were padded to 30)\n"
        "  length  sequences  elements  padded   waste\n"
        "      12          5        37      60  38.3 %\n"
        "      30          1        30      30   0.0 %\n"
        "     all          6        67      90  25.6 %"
    )
    assert str(BucketBatchSampler(lengths, buckets, 2)) == (
        "3 shapes in 4 batches; 25.6 % of the elements are padding\n"
        "   shape  batches  samples\n"
        "  1 x 12        1        1\n"
        "  2 x 12        2        4\n"
        "  1 x 30        1        1\n"
        "     all        4        6"
    )
    left_out = BucketBatchSampler(lengths, buckets, 2, drop_last=True)
    assert str(left_out).endswith("2 of 6 samples are left out (33.3 %)")
    again = BucketBatchSampler(lengths, buckets, 2, even_batches=True, num_replicas=2, rank=0)
    assert "in 3 batches of each of 2 processes" in str(again)
    assert str(again).endswith("6 samples come again to fill batches (50.0 %)")
    assert str(Packing(lengths, 30)) == (
        "1 shape: 6 sequences in 3 rows of 30, 25.6 % of the elements are padding; 67 elements need at least 3 rows\n"
        "              rows  elements   waste\n"
        "      packed     3        90  25.6 %\n"
        "  a row each     6       180  62.8 %"
    )
    assert str(resolution_buckets([(100, 100), (50, 90), (300, 100)], 2, area=128 * 128)) == (
        "2 resolutions: 14.8 % of the images is cut off; 2 of 3 are enlarged\n"
        "  height x width  aspect  pixels  images  cut off\n"
        "        192 x 64    0.33  12,288       1    0.0 %\n"
        "       128 x 128    1.00  16,384       2   22.2 %\n"
        "             all                       3   14.8 %"
    )
    for value in (buckets, Packing(lengths, 30), ResolutionBuckets([(8, 9)])):
        assert "waste=" in repr(value) and "\n" not in repr(value)


# Batches of one bucket

SAMPLERS = st.fixed_dictionaries(
    {
        "shuffle": st.booleans(),
        "seed": st.integers(-5, 1 << 40),
        "last": st.sampled_from([{}, {"drop_last": True}, {"even_batches": True}]),
        "size": st.sampled_from([{"batch_size": 1}, {"batch_size": 4}, {"max_tokens": 60}]),
    }
)


@examples(max_examples=120)
@given(some_lengths, st.integers(1, 4), st.integers(1, 3), SAMPLERS)
def test_each_sample_comes_in_a_batch_of_its_bucket(lengths, max_graphs, ranks, how):
    buckets = bucketize(lengths, max_graphs)
    options = {"shuffle": how["shuffle"], "seed": how["seed"], **how["last"], **how["size"]}
    samplers = [BucketBatchSampler(lengths, buckets, num_replicas=ranks, rank=r, **options) for r in range(ranks)]
    for _ in range(2):
        epochs = [list(sampler) for sampler in samplers]
        # All ranks have as many batches, and in each step one shape.
        assert {len(epoch) for epoch in epochs} == {len(samplers[0])}
        seen = set()
        for step in zip(*epochs, strict=True):
            assert len({len(batch) for batch in step}) == 1
            (size,) = {buckets.assign(lengths[i]) for batch in step for i in batch}
            seen.add((len(step[0]), size))
            limit = how["size"].get("batch_size") or how["size"]["max_tokens"] // size
            assert len(step[0]) == limit or (len(step[0]) < limit and not how["last"])
        assert sorted(seen) == samplers[0].shapes
        given = [i for epoch in epochs for batch in epoch for i in batch]
        again = len(given) - len(set(given))
        missing = len(lengths) - len(set(given))
        if "drop_last" in how["last"]:
            assert again == 0 and len(seen) <= len(buckets)
        elif "even_batches" in how["last"]:
            assert missing == 0 and len(seen) <= len(buckets)
        else:
            assert missing == 0 and again <= (ranks - 1) * len(buckets)


def test_epochs_and_seeds_shuffle_and_repeat():
    lengths = list(range(1, 101))
    buckets = bucketize(lengths, 3)
    sampler = partial(BucketBatchSampler, lengths, buckets, 4)
    one, two = sampler(), sampler()
    first, second = list(one), list(one)
    assert (one.epoch, first != second) == (1, True)
    assert [list(two), list(two)] == [first, second]
    two.set_epoch(0)
    assert list(two) == first
    assert list(sampler(seed=1)) != first
    # Whatever numpy's version: an epoch that was begun with one goes on with another.
    assert first[:2] == [[82, 93, 97, 99], [30, 27, 16, 28]]
    plain = sampler(shuffle=False)
    assert list(itertools.chain(*plain)) == list(range(100))
    assert list(plain) == list(plain)


@pytest.mark.parametrize("taken", [0, 1, 5, 13])
def test_an_epoch_goes_on_where_it_was_left(taken):
    lengths = list(range(1, 51))
    make = partial(BucketBatchSampler, lengths, bucketize(lengths, 3), 4, seed=3)
    whole = make()
    epochs = [list(whole), list(whole), list(whole)]
    assert len(whole) == 14
    sampler = make()
    sampler.set_epoch(1)
    batches = iter(sampler)
    assert list(itertools.islice(batches, taken)) == epochs[1][:taken]
    state = json.loads(json.dumps(sampler.state_dict()))
    assert (state["epoch"], state["batches"]) == (1, taken)
    # Goes on by itself, or with the epoch that the state names.
    for says in (False, True):
        other = make()
        other.load_state_dict(state)
        if says:
            other.set_epoch(other.epoch)
        assert list(other) == epochs[1][taken:]
        assert list(other) == epochs[2]
    # After the whole epoch the next one comes.
    list(batches)
    other.load_state_dict(sampler.state_dict())
    assert other.epoch == 2
    assert list(other) == epochs[2]
    # An iteration that was left begins again.
    next(iter(sampler))
    assert list(sampler) == epochs[2]


def test_a_state_of_other_batches_is_refused():
    lengths = list(range(1, 51))
    state = BucketBatchSampler(lengths, bucketize(lengths, 3), 4).state_dict()
    other = BucketBatchSampler(lengths, bucketize(lengths, 3), 5, num_replicas=2, rank=1)
    with pytest.raises(
        ValueError, match=r"num_replicas was 1 and is 2; batch_sizes was \[4, 4, 4\] and is \[5, 5, 5\]"
    ):
        other.load_state_dict(state)
    with pytest.raises(ValueError, match="an epoch has 6 batches, got 7"):
        other.state_dict(batches=7)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "expected one of `batch_size` and `max_tokens`"),
        ({"batch_size": 2, "max_tokens": 9}, "expected one of `batch_size` and `max_tokens`"),
        ({"max_tokens": 9}, "a sample of the largest bucket has 10 elements, and a batch at most max_tokens=9"),
        ({"batch_size": 2, "drop_last": True, "even_batches": True}, "set one of them"),
        ({"batch_size": 2, "num_replicas": 2, "rank": 2}, "expected a rank from 0 to 1, got 2"),
    ],
)
def test_a_sampler_that_cannot_be_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        BucketBatchSampler([3, 10], Buckets([10]), **options)


class Texts(torch.utils.data.Dataset):
    """Of each length from 1 on, the number of the sample again and again."""

    def __len__(self):
        return 40

    def __getitem__(self, i):
        return torch.full((i + 1,), i)


@pytest.mark.parametrize("workers", [0, 2])
def test_loaders_take_it(workers):
    lengths = list(range(1, 41))
    buckets = bucketize(lengths, 4)
    sampler = BucketBatchSampler(lengths, buckets, 4)
    loader = DataLoader(
        Texts(), batch_sampler=sampler, num_workers=workers, collate_fn=partial(pad_collate, buckets=buckets)
    )
    assert len(loader) == len(sampler)
    batches = list(loader)
    assert {tokens.shape[1] for tokens, _ in batches} == set(buckets.sizes)
    assert sorted(int(row.max()) for tokens, _ in batches for row in tokens) == list(range(40))
    for tokens, mask in batches:
        assert mask.sum(dim=1).tolist() == [int(row.max()) + 1 for row in tokens]
    # Workers draw ahead, so the loop says what it has had; the next loader gives the rest.
    sampler.set_epoch(3)
    running = iter(loader)
    had = [next(running)[0] for _ in range(2)]
    state = sampler.state_dict(batches=2)
    rest = [tokens for tokens, _ in running]
    sampler.load_state_dict(state)
    again = [tokens for tokens, _ in loader]
    assert len(had) + len(rest) == len(sampler)
    assert all(map(torch.equal, rest, again))


@pytest.mark.parametrize("workers", [0, 2])
def test_stateful_loaders_resume_with_it(needs, workers):
    needs("torchdata")
    from torchdata.stateful_dataloader import StatefulDataLoader

    lengths = list(range(1, 41))

    def loader():
        sampler = BucketBatchSampler(lengths, bucketize(lengths, 4), 4)
        return StatefulDataLoader(Texts(), batch_sampler=sampler, num_workers=workers, collate_fn=pad_collate)

    whole = loader()
    epochs = [[tokens.tolist() for tokens, _ in whole] for _ in range(2)]
    first = loader()
    batches = iter(first)
    for _ in range(3):
        next(batches)
    state = first.state_dict()
    second = loader()
    second.load_state_dict(state)
    assert [tokens.tolist() for tokens, _ in second] == epochs[0][3:]
    # A state of the end of an epoch is one of the beginning of the next.
    for _ in batches:
        pass
    third = loader()
    third.load_state_dict(first.state_dict())
    assert [tokens.tolist() for tokens, _ in third] == epochs[1]


# Padding


def test_a_batch_is_padded_to_its_bucket():
    buckets = Buckets([4, 8])
    tokens, mask = pad_collate([[1, 2], torch.tensor([3]), np.array([4, 5, 6])], buckets)
    assert tokens.tolist() == [[1, 2, 0, 0], [3, 0, 0, 0], [4, 5, 6, 0]]
    assert mask.tolist() == [[True, True, False, False], [True] + 3 * [False], [True, True, True, False]]
    assert pad_collate([[1], [2, 3]], 3, mask=None, padding_value=9).tolist() == [[1, 9, 9], [2, 3, 9]]
    assert pad_collate([[1], [2, 3]], mask=None).shape == (2, 2)
    tokens, mask, lengths = pad_collate([[], [2, 3]], buckets, lengths="lengths")
    assert (tokens.dtype, lengths.tolist()) == (torch.int64, [0, 2])


def test_the_keys_of_a_dict_are_padded_each_in_its_way():
    batch = [
        {"input_ids": [1, 2, 3], "labels": [1, -100, 3], "weight": 0.5, "image": torch.zeros(3, 2, 2), "name": "a"},
        {"input_ids": [4], "labels": [4], "weight": 1.5, "image": torch.ones(3, 2, 2), "name": "b"},
    ]
    got = pad_collate(batch, Buckets([4]), stack=["image"], padding_value=7, lengths="lengths")
    assert {key: value.tolist() for key, value in got.items() if key not in ("image", "name")} == {
        "input_ids": [[1, 2, 3, 7], [4, 7, 7, 7]],
        "labels": [[1, -100, 3, -100], [4, -100, -100, -100]],
        "attention_mask": [[True, True, True, False], [True, False, False, False]],
        "lengths": [3, 1],
        "weight": [0.5, 1.5],
    }
    assert got["image"].shape == (2, 3, 2, 2) and got["name"] == ["a", "b"]
    # A tokenizer's own mask stays.
    own = [{"input_ids": [5, 6], "attention_mask": [1, 1]}, {"input_ids": [5], "attention_mask": [1]}]
    assert pad_collate(own, padding_value=9)["attention_mask"].tolist() == [[1, 1], [1, 0]]
    named = pad_collate(own, padding_value={"attention_mask": 2, "input_ids": 3})
    assert [named[key].tolist() for key in ("input_ids", "attention_mask")] == [[[5, 6], [5, 3]], [[1, 1], [1, 2]]]


def test_sequences_of_two_lengths_get_one_bucket_and_a_mask_each():
    batch = [{"source": [1.0, 2.0], "target": [1]}, {"source": [3.0], "target": [1, 2, 3]}]
    got = pad_collate(batch, Buckets([2, 3]), mask={"source_mask": "source", "target_mask": "target"})
    assert got["source"].tolist() == [[1.0, 2.0, 0.0], [3.0, 0.0, 0.0]]
    assert got["source_mask"].sum(dim=1).tolist() == [2, 1]
    assert got["target_mask"].sum(dim=1).tolist() == [1, 3]


def test_the_items_of_a_tuple_are_padded_each_in_its_way():
    batch = [(torch.ones(2, 5), [1, 2], 7), (torch.ones(1, 5), [3], 8)]
    features, labels, number, mask = pad_collate(batch, 3, padding_value=(0.5, -100, 0))
    assert features.shape == (2, 3, 5)
    assert features[1, 1:].unique().tolist() == [0.5]
    assert (labels.tolist(), number.tolist()) == ([[1, 2, -100], [3, -100, -100]], [7, 8])
    assert mask.sum().item() == 3


@pytest.mark.parametrize(
    ("batch", "options", "words"),
    [
        ([], {}, "at least one sample"),
        ([1, 2], {}, "no sequence to pad"),
        ([[1], ([2],)], {}, "sample 0 is one sequence, and sample 1 is a tuple of 1 items"),
        ([{"a": [1]}, {"b": [1]}], {}, r"sample 0 is a dict of \['a'\], and sample 1 is a dict of \['b'\]"),
        ([([1], [2])], {}, r"sequences in the places \[0, 1\], and one padding_value, 0\nhint: "),
        ([([1], [2])], {"padding_value": (0,)}, "padding_value has 1 numbers, and a sample is a tuple of 2 items"),
        ([{"a": [1]}], {"padding_value": {"A": 1}}, r"padding_value names \['A'\], and the sequences are \['a'\]"),
        ([{"a": [1]}], {"mask": {"m": "b"}}, r"no sequences are under \['b'\]"),
        ([[1, 2, 3]], {"buckets": 2}, "the longest sequence of the batch has 3, and buckets=2"),
        ([[1, 2, 3]], {"buckets": Buckets([2])}, "longer than the largest bucket, 2"),
        ([torch.ones(2, 3), torch.ones(2, 4)], {}, r"the shapes \[2, 3\] and \[2, 4\] under 0"),
    ],
)
def test_a_batch_that_cannot_be_padded_is_refused(batch, options, words):
    with pytest.raises(ValueError, match=words):
        pad_collate(batch, **options)


# Packing


def best_fit(lengths, length):
    """The rows by the definition: all rows are looked at."""
    rows = []
    for n in sorted(lengths, reverse=True):
        fits = [row for row in rows if sum(row) + n <= length]
        if fits:
            max(fits, key=sum).append(n)
        else:
            rows.append([n])
    return rows


def fewest_rows(lengths, length):
    """By trying all."""
    lengths = sorted(lengths, reverse=True)

    def place(i, rests):
        if len(rests) >= best[0]:
            return
        if i == len(lengths):
            best[0] = len(rests)
            return
        for k in {rest: k for k, rest in enumerate(rests) if rest >= lengths[i]}.values():
            place(i + 1, [*rests[:k], rests[k] - lengths[i], *rests[k + 1 :]])
        place(i + 1, [*rests, length - lengths[i]])

    best = [len(lengths) + 1]
    place(0, [])
    return best[0]


@examples(max_examples=120)
@given(st.lists(st.integers(1, 20), max_size=40), st.integers(20, 30))
def test_rows_are_those_of_best_fit(lengths, length):
    packing = Packing(lengths, length)
    assert sorted(i for row in packing.bins for i in row) == list(range(len(lengths)))
    filled = sorted(sum(lengths[i] for i in row) for row in packing.bins)
    assert filled == sorted(map(sum, best_fit(lengths, length)))
    assert all(n <= length for n in filled)


@examples(max_examples=60)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=9), st.integers(20, 24))
def test_rows_are_within_the_bound(lengths, length):
    assert 9 * len(Packing(lengths, length)) <= 11 * fewest_rows(lengths, length) + 9 * 4


@examples(max_examples=60)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=30), st.integers(12, 20), st.integers(0, 3))
def test_what_is_packed_comes_back(lengths, length, more):
    sequences = [torch.randint(1, 99, (n,)) for n in lengths]
    rows = len(Packing(lengths, length)) + more
    packed = pack_sequences(sequences, length, rows=rows, padding_value=-1)
    assert packed.tokens.shape == packed.segment_ids.shape == packed.positions.shape == (rows, length)
    assert all(map(torch.equal, packed.packing.unpack(packed.tokens), sequences))
    assert (packed.tokens[packed.segment_ids == 0] == -1).all()
    assert packed.packing.waste == pytest.approx((packed.segment_ids == 0).float().mean().item())
    for row, ids, positions in zip(*packed[:3], strict=True):
        lengths_here = ids[ids > 0].unique_consecutive(return_counts=True)
        assert lengths_here[0].tolist() == list(range(1, len(lengths_here[0]) + 1))
        assert positions[ids > 0].tolist() == [i for n in lengths_here[1].tolist() for i in range(n)]
        assert not positions[ids == 0].any() and not ids[len(row) - int((ids == 0).sum()) :].any()
    # What goes with the sequences is laid out as they are.
    features = [torch.randn(n, 2) for n in lengths]
    assert all(map(torch.equal, packed.packing.unpack(packed.packing.pack(features)), features))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_attention_and_losses_stay_within_a_sequence(causal, dtype):
    """Attention of packed rows gives each sequence what it gets alone, and so do the losses."""
    sequences = [torch.randint(1, 50, (n,)) for n in (5, 3, 7, 2, 1)]
    packed = pack_sequences(sequences, 9)
    q, k, v = (torch.randn(50, 8).index_select(0, packed.tokens.flatten()).view(-1, 1, 9, 8) for _ in range(3))
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=segment_mask(packed.segment_ids, causal=causal, dtype=dtype)
    )
    assert out.isfinite().all()
    unpack = packed.packing.unpack
    alone = zip(*(unpack(t.squeeze(1)) for t in (q, k, v, out)), strict=True)
    for query, key, value, got in alone:
        torch.testing.assert_close(got, F.scaled_dot_product_attention(query, key, value, is_causal=causal))
    logits = torch.randn(*packed.tokens.shape, 50)
    loss = F.cross_entropy(
        logits.flatten(0, 1), next_token_labels(packed.tokens, packed.segment_ids).flatten(), reduction="sum"
    )
    want = [
        F.cross_entropy(row[:-1], sequence[1:], reduction="sum")
        for row, sequence in zip(unpack(logits), sequences, strict=True)
    ]
    torch.testing.assert_close(loss, sum(want))


def test_labels_for_models_that_shift_them_themselves():
    ids = torch.tensor([[1, 1, 1, 2, 2, 0]])
    tokens = torch.tensor([[5, 6, 7, 8, 9, 0]])
    assert next_token_labels(tokens, ids).tolist() == [[6, 7, -100, 9, -100, -100]]
    unshifted = next_token_labels(tokens, ids, shift=False)
    assert unshifted.tolist() == [[-100, 6, 7, -100, 9, -100]]
    assert next_token_labels(tokens, ids > 0, ignore_index=-1).tolist() == [[6, 7, 8, 9, -1, -1]]


# Images


@examples(max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 400), st.integers(1, 400)), min_size=1, max_size=12), st.integers(1, 3))
def test_no_choice_of_resolutions_cuts_off_less(sizes, max_graphs):
    area, multiple_of = 96 * 96, 16
    buckets = resolution_buckets(sizes, max_graphs, area=area, multiple_of=multiple_of)
    sides = range(multiple_of, area // multiple_of + 1, multiple_of)
    all_sizes = [(h, w) for h in sides for w in sides if h * w <= area and max(h, w) <= 4 * min(h, w)]
    full = [(h, w) for h, w in all_sizes if (h + multiple_of) * w > area or h * (w + multiple_of) > area]

    def cut_off(chosen):
        ratios = [[(w / h) / (W / H) for H, W in chosen] for h, w in sizes]
        return sum(1 - max(min(r, 1 / r) for r in row) for row in ratios) / len(sizes)

    assert len(buckets) <= max_graphs
    assert set(buckets.resolutions) <= set(full)
    assert all(count for count in buckets.counts)
    aspects = {w / h: (h, w) for h, w in full}.values()
    least = min(cut_off(chosen) for k in range(1, max_graphs + 1) for chosen in itertools.combinations(aspects, k))
    assert buckets.waste == pytest.approx(cut_off(buckets.resolutions)) == pytest.approx(least, abs=1e-12)


@examples(max_examples=100)
@given(st.tuples(st.integers(1, 3000), st.integers(1, 3000)), st.tuples(st.floats(0, 1), st.floats(0, 1)))
def test_an_image_covers_its_bucket(size, position):
    buckets = ResolutionBuckets([(512, 512), (640, 384), (384, 640)])
    fit = buckets.fit(size, position)
    assert fit.original_size == size and fit.target_size == buckets.assign(size)
    # As small as covers it, with the crop inside; the aspect ratio is kept to half a pixel.
    assert all(r >= t for r, t in zip(fit.resize, fit.target_size, strict=True))
    assert any(r == t for r, t in zip(fit.resize, fit.target_size, strict=True))
    assert all(0 <= c <= r - t for c, r, t in zip(fit.crop_top_left, fit.resize, fit.target_size, strict=True))
    scale = max(t / o for t, o in zip(fit.target_size, size, strict=True))
    assert all(abs(r - o * scale) <= 0.5 or r == t for r, o, t in zip(fit.resize, size, fit.target_size, strict=True))


def test_batches_of_images_are_of_one_resolution():
    sizes = [(480, 640), (640, 480), (500, 500), (480, 600)] * 5
    buckets = resolution_buckets(sizes, 3, area=512 * 512)
    sampler = BucketBatchSampler(sizes, buckets, 4)
    assert all(len({buckets.assign(sizes[i]) for i in batch}) == 1 for batch in sampler)
    assert sampler.shapes == sorted({(n, *size) for n, *size in sampler.shapes})
    # Pixels are what a batch of images has at most.
    assert BucketBatchSampler(sizes, buckets, max_tokens=3 * 512 * 512).batch_sizes[0] >= 3


def test_images_beyond_all_ratios_get_the_nearest():
    buckets = resolution_buckets([(1, 10**9), (10**9, 1)], 2, area=512 * 512)
    assert buckets.resolutions == ((1024, 256), (256, 1024))
    assert buckets.assign((1, 50)) == (256, 1024)
    assert len(resolution_buckets([(1, 10**18)], 2)) == 1


@pytest.mark.parametrize("value", [Buckets([2, 3], [1, 3]), ResolutionBuckets([(8, 9)], [(3, 3)]), Packing([1, 2], 3)])
def test_worker_processes_can_have_them(value):
    copy = pickle.loads(pickle.dumps(value))
    assert str(copy) == str(value)
    assert copy == value or isinstance(value, Packing)
