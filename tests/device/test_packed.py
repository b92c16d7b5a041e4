"""Packed sequences whose lengths are other ones in each batch, against PyTorch on the CPU."""

import copy

import pytest
import torch
from support import DEVICE, assert_same
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

STEPS, BATCH, INPUT, HIDDEN = 7, 3, 4, 5
LENGTHS = [[7, 4, 2], [3, 7, 5], [7, 7, 7], [1, 6, 1], [2, 2, 2], [6, 1, 3]]
NETS = {
    "LSTM": lambda: nn.LSTM(INPUT, HIDDEN, 2, bidirectional=True, batch_first=True),
    "GRU": lambda: nn.GRU(INPUT, HIDDEN),
}


class Model(nn.Module):
    """Sequences of tokens to numbers, one for each token."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(1)
        self.embedding, self.rnn = nn.Embedding(20, INPUT), NETS[kind]()
        self.head = nn.Linear(HIDDEN * (1 + self.rnn.bidirectional), 1)

    def forward(self, tokens, lengths):
        first = self.rnn.batch_first
        embedded = self.embedding(tokens if first else tokens.t())
        packed = pack_padded_sequence(embedded, lengths, batch_first=first, enforce_sorted=False)
        output, last = self.rnn(packed)
        steps = tokens.shape[1]
        output, given = pad_packed_sequence(output, batch_first=first, padding_value=0.5, total_length=steps)
        assert torch.equal(given, lengths)
        last = last if isinstance(last, tuple) else (last,)
        return self.head(output).square().sum() + sum(h.sum() for h in last)


def programs():
    return torch.tpu.metrics()["programs"]


@pytest.mark.parametrize("kind", NETS)
def test_other_lengths_compile_nothing(kind, fused, no_fallback):
    reference = Model(kind)
    model = copy.deepcopy(reference).to(DEVICE)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (reference, model)]
    made = []
    for lengths in map(torch.tensor, LENGTHS):
        tokens, before = torch.randint(20, (BATCH, STEPS)), programs()
        losses = []
        for m, optimizer in zip((reference, model), optimizers, strict=True):
            optimizer.zero_grad()
            losses.append(m(tokens.to(next(m.parameters()).device), lengths))
            losses[-1].backward()
            optimizer.step()
        assert_same(losses[1], losses[0], str(lengths), rtol=1e-4, atol=1e-5)
        for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert_same(p.grad, q.grad, f"{name} of {lengths}", rtol=1e-4, atol=1e-5)
        made.append(programs() - before)
    # The third may have one that gives no more than is wanted of it.
    assert sum(made[2:3]) <= 1 and not any(made[3:]), made


# What is done with packed sequences, given them padded and their lengths.


def packed_alone(x, lengths):
    return pack_padded_sequence(x, lengths).data


def padded_again(x, lengths):
    return pad_packed_sequence(pack_padded_sequence(x, lengths), padding_value=2.0)[0]


def longer(x, lengths):
    return pad_packed_sequence(pack_padded_sequence(x, lengths), total_length=len(x) + 2, batch_first=True)[0]


def between(x, lengths):
    packed = pack_padded_sequence(x, lengths)
    data = packed.data.sin() * packed.data
    return pad_packed_sequence(PackedSequence(data, packed.batch_sizes), batch_first=True)[0]


def in_place(x, lengths):
    packed = pack_padded_sequence(x, lengths)
    packed.data.mul_(2).add_(1)
    return pad_packed_sequence(packed)[0]


USES = {f.__name__: f for f in (packed_alone, padded_again, longer, between, in_place)}


@pytest.mark.parametrize("name", USES)
def test_packing_and_padding(name, no_fallback):
    for shape, lengths in (((5, 3, 4), [4, 4, 1]), ((3, 2), [3, 3]), ((4, 2, 2, 3), [2, 1])):
        x, lengths = torch.randn(shape), torch.tensor(lengths)
        of_cpu, of_device = x.clone().requires_grad_(), x.to(DEVICE).requires_grad_()
        expected, found = USES[name](of_cpu, lengths), USES[name](of_device, lengths)
        assert_same(found, expected, name)
        weights = torch.randn(expected.shape)
        (expected * weights).sum().backward()
        (found * weights.to(DEVICE)).sum().backward()
        assert_same(of_device.grad, of_cpu.grad, name, strides=False)


def test_second_derivatives_of_packing():
    def penalty(x):
        packed = pack_padded_sequence(x, torch.tensor([4, 2]))
        (grad,) = torch.autograd.grad(pad_packed_sequence(packed)[0].pow(3).sum(), x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), x)[0]

    x = torch.randn(4, 2, 3)
    assert_same(penalty(x.to(DEVICE).requires_grad_()), penalty(x.clone().requires_grad_()), strides=False)


def test_labels_are_packed_too():
    labels, lengths = torch.randint(9, (3, 5)), torch.tensor([5, 3, 1])
    for x in (labels, labels > 4):
        expected = pack_padded_sequence(x, lengths, batch_first=True)
        found = pack_padded_sequence(x.to(DEVICE), lengths, batch_first=True)
        assert_same(found.data, expected.data)
        assert torch.equal(found.batch_sizes, expected.batch_sizes)


def test_what_lies_behind_the_data_is_nobodys(fused):
    """Data that is the beginning of another tensor, whose rest is no padding."""
    module = nn.GRU(INPUT, HIDDEN)
    on_device = copy.deepcopy(module).to(DEVICE)
    whole, sizes = torch.full((12, INPUT), torch.nan), torch.tensor([3, 2, 1])
    whole[:6] = torch.randn(6, INPUT)
    for m, x in ((module, whole), (on_device, whole.to(DEVICE))):
        m(PackedSequence(x[:6], sizes))[0].data.square().sum().backward()
    for (name, p), q in zip(on_device.named_parameters(), module.parameters(), strict=True):
        assert_same(p.grad, q.grad, name, rtol=1e-5, atol=1e-5)


# Lengths that PyTorch refuses, in its words.
REFUSED = {
    "on the device": (torch.tensor([3, 2], device=DEVICE), "should be a 1D CPU int64 tensor"),
    "one is zero": (torch.tensor([3, 0]), "greater than 0"),
    "not sorted": (torch.tensor([2, 3]), "sorted in decreasing order"),
    "too few": (torch.tensor([3]), "equal to batch_size"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_lengths_that_do_not_fit_are_refused(name):
    lengths, words = REFUSED[name]
    with pytest.raises((RuntimeError, ValueError), match=words):
        pack_padded_sequence(torch.ones(3, 2, 1, device=DEVICE), lengths)


def test_a_length_that_is_too_short_is_refused():
    packed = pack_padded_sequence(torch.ones(3, 2, 1, device=DEVICE), torch.tensor([3, 2]))
    with pytest.raises(RuntimeError, match="total_length"):
        torch._VF._pad_packed_sequence(packed.data, packed.batch_sizes, False, 0.0, 2)
