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
        self.checks = True
        self.head = nn.Linear(HIDDEN * (1 + self.rnn.bidirectional), 1)

    def forward(self, tokens, lengths):
        first = self.rnn.batch_first
        embedded = self.embedding(tokens if first else tokens.t())
        packed = pack_padded_sequence(embedded, lengths, batch_first=first, enforce_sorted=False)
        output, last = self.rnn(packed)
        steps = tokens.shape[1]
        output, given = pad_packed_sequence(output, batch_first=first, padding_value=0.5, total_length=steps)
        assert not self.checks or torch.equal(given, lengths)
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


# In functions of `torch.tpu.jit`, where lengths are a tensor of the host.


def step_of(model, is_sorted=False):
    def step(tokens, lengths):
        if is_sorted:
            packed = pack_padded_sequence(model.embedding(tokens), lengths, batch_first=True)
            output = pad_packed_sequence(model.rnn(packed)[0], batch_first=True, total_length=tokens.shape[1])[0]
            loss = model.head(output).square().sum()
        else:
            model.checks = False  # in a function of `torch.tpu.jit` lengths are not read
            loss = model(tokens, lengths)
        model.zero_grad()
        loss.backward()
        return loss.detach()

    return step


@pytest.mark.parametrize("is_sorted", [False, True])
def test_a_jitted_step_is_one_program_for_all_lengths(is_sorted, fused, no_fallback):
    reference = Model("LSTM")
    model = copy.deepcopy(reference).to(DEVICE)
    f, expected = torch.tpu.jit(step_of(model, is_sorted)), step_of(reference, is_sorted)
    made = []
    for lengths in map(torch.tensor, LENGTHS):
        lengths = lengths.sort(descending=True)[0] if is_sorted else lengths
        tokens, before = torch.randint(20, (BATCH, STEPS)), programs()
        assert_same(f(tokens.to(DEVICE), lengths), expected(tokens, lengths), str(lengths), rtol=1e-4, atol=1e-5)
        for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert_same(p.grad, q.grad, f"{name} of {lengths}", rtol=1e-4, atol=1e-5)
        made.append(programs() - before)
    # The first call finds out which gradients there are; after it they are there and are overwritten.
    assert sum(made) <= 2 and not any(made[3:]) and f.traces == 2, (made, f.traces)


def test_what_a_jitted_function_may_not_do_with_packed_sequences():
    x, lengths = torch.randn(5, 2, 3, device=DEVICE), torch.tensor([4, 2])
    with pytest.raises(RuntimeError, match=r"computes with the data of a packed sequence.*\n.*pad it first"):
        torch.tpu.jit(lambda x, lengths: pack_padded_sequence(x, lengths).data.mean())(x, lengths)
    gru = nn.GRU(3, 2).to(DEVICE)
    with pytest.raises(RuntimeError, match="second derivatives of recurrent nets"):
        torch.tpu.jit(lambda x, n: torch.func.grad(lambda x: gru(pack_padded_sequence(x, n))[1].sum())(x))(x, lengths)
    padded = torch.tpu.jit(lambda x, n: pad_packed_sequence(pack_padded_sequence(x, n))[0])
    assert padded(x, torch.tensor([5, 1])).shape == (5, 2, 3)
    with pytest.raises(RuntimeError, match="give total_length"):
        padded(x, lengths).cpu()
    with pytest.raises(RuntimeError, match="expected lengths from 1 to 5"):
        padded(x, torch.tensor([5, 6])).cpu()


def test_rows_of_packed_data_may_be_computed_one_by_one(fused):
    def f(x, lengths):
        packed = pack_padded_sequence(x, lengths)
        data = (packed.data * 2).cos()
        return pad_packed_sequence(PackedSequence(data, packed.batch_sizes), total_length=len(x))[0]

    jitted = torch.tpu.jit(f)
    for lengths in map(torch.tensor, ([4, 2], [5, 5], [1, 1])):
        x = torch.randn(5, 2, 3)
        assert_same(jitted(x.to(DEVICE), lengths), f(x, lengths))
    assert jitted.traces == 1


def test_lengths_and_the_padded_length_vary_in_one_program(fused):
    reference = Model("GRU")
    model = copy.deepcopy(reference).to(DEVICE)
    f = torch.tpu.jit(step_of(model), dynamic={"tokens": {1: torch.tpu.Dim(buckets=[16])}})
    expected, before = step_of(reference), programs()
    for steps in (9, 12, 16, 7):
        tokens, lengths = torch.randint(20, (BATCH, steps)), torch.randint(1, steps + 1, (BATCH,))
        assert_same(f(tokens.to(DEVICE), lengths), expected(tokens, lengths), str(steps), rtol=1e-4, atol=1e-5)
        for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert_same(p.grad, q.grad, f"{name} of {steps}", rtol=1e-4, atol=1e-5)
    # One is that of the first call, which finds out which gradients there are.
    assert programs() - before <= 2


def test_compiled_functions_leave_them_to_eager_mode(fused):
    """Dynamo breaks its graphs around PyTorch's functions of packed sequences, and around recurrent nets."""
    reference = Model("GRU")
    model = copy.deepcopy(reference).to(DEVICE)
    torch._dynamo.reset()
    compiled, made = torch.compile(lambda tokens, lengths: model(tokens, lengths), backend="tpu"), []
    for lengths in map(torch.tensor, LENGTHS[:5]):
        tokens, before = torch.randint(20, (BATCH, STEPS)), programs()
        model.zero_grad(), reference.zero_grad()
        loss, expected = compiled(tokens.to(DEVICE), lengths), reference(tokens, lengths)
        loss.backward(), expected.backward()
        assert_same(loss, expected, str(lengths), rtol=1e-4, atol=1e-5)
        for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert_same(p.grad, q.grad, f"{name} of {lengths}", rtol=1e-4, atol=1e-5)
        made.append(programs() - before)
    assert not any(made[3:]), made
    torch._dynamo.reset()
