"""Loops of training as people write them, over lengths that vary: speech, fine-tuning, generation."""

import copy

import pytest
import torch
import torch.nn.functional as F
from support import DEVICE, assert_same
from torch import nn
from torch.tpu import Dim


def programs():
    return torch.tpu.metrics()["programs"]


class Speech(nn.Module):
    """Convolutions over frames, a recurrent net, and classes of letters for each second frame."""

    def __init__(self, features=5, width=8, classes=6):
        super().__init__()
        self.first, self.second = nn.Conv1d(features, width, 3, padding=1), nn.Conv1d(width, width, 3, 2, padding=1)
        self.norm, self.rnn = nn.BatchNorm1d(width), nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, classes)

    def forward(self, x):
        x = F.relu(self.norm(self.second(F.gelu(self.first(x.transpose(1, 2)))))).transpose(1, 2)
        return self.head(self.rnn(x)[0]).log_softmax(-1)


def test_speech_with_a_loss_over_paths(fused):
    torch.manual_seed(0)
    reference = Speech()
    model = copy.deepcopy(reference).to(DEVICE)

    def step_of(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

        def step(frames, lengths, letters, counts):
            optimizer.zero_grad()
            loss = F.ctc_loss(model(frames).transpose(0, 1), letters, (lengths + 1) // 2, counts, zero_infinity=True)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    f, expected = torch.tpu.jit(step_of(model), dynamic={"frames": {1: Dim(buckets=[24])}}), step_of(reference)
    made = []
    for n in (19, 24, 14, 21, 16):
        before = programs()
        lengths = torch.tensor([n, n - 3, n - 1])
        batch = torch.randn(3, n, 5), lengths, torch.randint(1, 6, (3, 4)), torch.tensor([4, 2, 3])
        loss = f(*(t.to(DEVICE) for t in batch))
        assert_same(loss, expected(*batch), str(n), rtol=1e-4, atol=1e-5)
        made.append(programs() - before)
    for (name, p), q in zip(model.state_dict().items(), reference.state_dict().values(), strict=True):
        assert_same(p, q, name, rtol=1e-3, atol=1e-5)
    # The first call, one for even sizes and one for odd ones, of which half is something else.
    assert sum(made) <= 3 and not any(made[3:]), made


def test_generation_with_a_sequence_that_grows(fused):
    torch.manual_seed(0)
    embedding, layer = nn.Embedding(30, 16), nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    head = nn.Linear(16, 30)
    reference = nn.ModuleList([embedding, layer, head]).eval()
    model = copy.deepcopy(reference).to(DEVICE)

    def next_of(parts):
        embedding, layer, head = parts

        def step(tokens):
            mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
            with torch.no_grad():
                logits = head(layer(embedding(tokens), src_mask=mask, is_causal=True))[:, -1]
            return torch.cat([tokens, logits.argmax(-1, keepdim=True)], 1)

        return step

    f, expected = torch.tpu.jit(next_of(model), dynamic={0: {1: Dim(buckets=[16, 32])}}), next_of(reference)
    wanted = torch.randint(30, (2, 5))
    tokens = wanted.to(DEVICE)
    before, reads = programs(), torch.tpu.metrics()["transfers_d2h"]
    for _ in range(20):
        tokens, wanted = f(tokens), expected(wanted)
    assert torch.tpu.metrics()["transfers_d2h"] == reads
    assert_same(tokens, wanted, strides=False)
    assert programs() - before <= 2


@pytest.mark.slow
@pytest.mark.parametrize("way", ["dynamic", "mark_dynamic"])
def test_fine_tuning_padded_to_the_longest(way, fused):
    transformers = pytest.importorskip("transformers")
    torch._dynamo.reset()
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=60,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    reference = transformers.BertForSequenceClassification(config)
    model = copy.deepcopy(reference).to(DEVICE)
    compiled = torch.compile(model, backend="tpu", dynamic=True if way == "dynamic" else None)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (model, reference)]
    made = []
    for n in (20, 27, 18, 32, 25, 30):
        before = programs()
        lengths = [n, n - 7, n - 3, 5]
        tokens = torch.randint(1, 60, (4, n))
        mask = (torch.arange(n) < torch.tensor(lengths)[:, None]).long()
        batch = {"input_ids": tokens * mask, "attention_mask": mask, "labels": torch.randint(2, (4,))}
        there = {k: t.to(DEVICE) for k, t in batch.items()}
        if way == "mark_dynamic":
            for name in ("input_ids", "attention_mask"):
                torch._dynamo.mark_dynamic(there[name], 1, min=2, max=64)
        losses = []
        for net, optimizer, given in zip((compiled, reference), optimizers, (there, batch), strict=True):
            optimizer.zero_grad()
            loss = net(**given).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        assert_same(*losses, str(n), rtol=1e-4, atol=1e-5)
        made.append(programs() - before)
    assert not any(made[3:]), made
