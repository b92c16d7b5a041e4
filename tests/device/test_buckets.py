"""Sequences of many lengths on the device: few programs, and the losses that each sequence has alone on the CPU."""

from functools import partial

import torch
import torch.nn.functional as F
from oxitorch.data import BucketBatchSampler, bucketize, next_token_labels, pack_sequences, pad_collate, segment_mask
from support import assert_same
from torch import nn
from torch.utils.data import DataLoader


class Model(nn.Module):
    """Attention over letters, causal."""

    def __init__(self):
        super().__init__()
        self.token, self.position, self.qkv = nn.Embedding(50, 8), nn.Embedding(64, 8), nn.Linear(8, 24)

    def forward(self, tokens, positions, mask=None):
        q, k, v = self.qkv(self.token(tokens) + self.position(positions)).unsqueeze(1).chunk(3, dim=-1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return y.squeeze(1) @ self.token.weight.T


def loss_and_gradients(model, tokens, positions, labels, mask=None):
    model.zero_grad()
    loss = F.cross_entropy(model(tokens, positions, mask).flatten(0, 1), labels.flatten(), reduction="sum")
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


def alone(model, sequences):
    """What the sequences give one by one, each in its own shape, added up."""
    each = [
        loss_and_gradients(model, s[None], torch.arange(len(s)), next_token_labels(s, torch.ones_like(s)))
        for s in sequences
    ]
    return [sum(values) for values in zip(*each, strict=True)]


def models():
    """The same one on the CPU and on the device."""
    here = Model()
    there = Model().to("tpu")
    there.load_state_dict(here.state_dict())
    return here, there


def test_twenty_lengths_in_four_buckets_are_four_programs(fused):
    sequences = [torch.randint(0, 50, (n,)) for n in range(3, 63, 3) for _ in range(4)]
    lengths = [len(s) for s in sequences]
    buckets = bucketize(lengths, 4)
    assert (len(set(lengths)), len(buckets)) == (20, 4)
    sampler = BucketBatchSampler(lengths, buckets, 4)
    samples = [{"tokens": s, "number": i} for i, s in enumerate(sequences)]
    loader = DataLoader(samples, batch_sampler=sampler, collate_fn=partial(pad_collate, buckets=buckets, mask="mask"))
    here, there = models()
    torch.tpu.synchronize()
    before = torch.tpu.metrics()["programs"]
    for batch in loader:
        tokens, labels = batch["tokens"], next_token_labels(batch["tokens"], batch["mask"])
        got = loss_and_gradients(there, tokens.to("tpu"), torch.arange(tokens.shape[1]).to("tpu"), labels.to("tpu"))
        torch.tpu.synchronize()
        for actual, expected in zip(got, alone(here, [sequences[i] for i in batch["number"]]), strict=True):
            assert_same(actual, expected, rtol=1e-5, atol=1e-5)
    assert len(loader) == 20
    assert torch.tpu.metrics()["programs"] - before == len(sampler.shapes) == 4


def test_packed_rows_are_one_program(fused):
    sequences = [torch.randint(0, 50, (n,)) for n in range(1, 41)]
    collate = partial(pack_sequences, length=64, rows=5)
    here, there = models()
    torch.tpu.synchronize()
    before = torch.tpu.metrics()["programs"]
    for start in range(5):
        packed = collate(sequences[start::5])
        tokens, segments, positions = (t.to("tpu") for t in packed[:3])
        # Mask and labels are made on the device.
        labels, mask = next_token_labels(tokens, segments), segment_mask(segments, causal=True)
        got = loss_and_gradients(there, tokens, positions, labels, mask)
        torch.tpu.synchronize()
        for actual, expected in zip(got, alone(here, sequences[start::5]), strict=True):
            assert_same(actual, expected, rtol=1e-5, atol=1e-5)
    assert torch.tpu.metrics()["programs"] - before == 1
