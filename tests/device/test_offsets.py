"""Integers that say where, and shape nothing: a new one is at most one more program, which then serves all values.

The first program has them as constants; the second takes them as operands. Of those that say where in what is written, such
that have kept their distance are one operand, and twice there may be one more program as a distance is lost.
"""

import pytest
import torch
from torch import nn


def source(device):
    return torch.arange(400.0, device=device).reshape(40, 10).clone()


def with_gradient(device, read):
    x = source(device).requires_grad_()
    (read(x) ** 2).sum().backward()
    return x.grad


def written(x, change):
    change(x)
    return x


def cache(device):
    return torch.zeros(2, 3, 40, 4, device=device)


# name: the i-th result on a device.
CASES = {
    "slice": lambda i, d: source(d)[i : i + 5] * 2,
    "select": lambda i, d: source(d)[i] + 1,
    "select the last dimension": lambda i, d: source(d)[:, i] + 1,
    "select from the end": lambda i, d: source(d)[-1 - i] + 1,
    "both dimensions": lambda i, d: source(d)[i, 9 - i : 10 - i] + 1,
    "nested loops": lambda i, d: source(d)[i // 3, i % 3] + 1,
    "steps": lambda i, d: source(d)[i : i + 12 : 3] + 1,
    "narrow": lambda i, d: source(d).narrow(0, i, 3) + 1,
    "split": lambda i, d: source(d).split(5)[i] + 1,
    "unbind": lambda i, d: source(d).unbind()[i] + 1,
    "a slice across rows": lambda i, d: source(d).view(-1)[i : i + 15] + 1,
    "another dtype": lambda i, d: source(d).view(torch.int32)[i : i + 2] + 1,
    "overlapping windows": lambda i, d: source(d).as_strided((3, 3), (1, 1), i) + 1,
    "a diagonal": lambda i, d: source(d).diagonal()[i : i + 2] + 1,
    "transposed": lambda i, d: source(d).t()[:, i : i + 2] + 1,
    "complex, conjugated": lambda i, d: source(d).to(torch.complex64)[i : i + 2].conj() * 1j,
    "written slice": lambda i, d: written(source(d), lambda x: x[i : i + 5].fill_(-1)),
    "written rows": lambda i, d: written(source(d), lambda x: x.__setitem__(slice(i, i + 5), source(d)[5:10])),
    "written element": lambda i, d: written(source(d), lambda x: x.__setitem__((i, i), 7.0)),
    "written column": lambda i, d: written(source(d), lambda x: x[:, i].mul_(2)),
    "written in steps": lambda i, d: written(source(d), lambda x: x[i::7][:4].zero_()),
    "written, overlapping": lambda i, d: written(source(d), lambda x: x.as_strided((3, 2), (1, 2), i).fill_(-1)),
    "key-value cache": lambda i, d: written(cache(d), lambda x: x[:, :, i].copy_(source(d)[0, :4] + i)),
    "index_copy by a slice": lambda i, d: written(cache(d), lambda x: x.narrow(2, i, 2).fill_(i)),
    "roll": lambda i, d: source(d).roll(i, 0),
    "roll backwards in two dimensions": lambda i, d: source(d).roll((-i, 2 * i), (0, 1)),
    "roll all": lambda i, d: source(d).roll(7 * i),
    "triu": lambda i, d: source(d).triu(i),
    "tril": lambda i, d: source(d).tril(-i),
    "gradient of a slice": lambda i, d: with_gradient(d, lambda x: x[i : i + 3]),
    "gradient of a selection": lambda i, d: with_gradient(d, lambda x: x[i]),
    "gradient of steps": lambda i, d: with_gradient(d, lambda x: x[i : i + 6 : 2]),
    "gradient of a roll": lambda i, d: with_gradient(d, lambda x: x.roll(i, 1)[:2]),
    "select_scatter": lambda i, d: source(d).select_scatter(torch.ones(10, device=d), 0, -1 - i),
    "slice_scatter": lambda i, d: source(d).slice_scatter(torch.ones(5, 10, device=d), 0, i, i + 5),
    "slice_scatter in steps": lambda i, d: source(d).slice_scatter(torch.ones(5, 10, device=d), 0, i, i + 10, 2),
    "kthvalue": lambda i, d: source(d).kthvalue(i + 1, 1).values,
}


@pytest.mark.parametrize("name", CASES)
def test_a_new_offset_is_at_most_one_more_program(name, fused):
    case = CASES[name]
    programs = []
    for i in range(5):
        torch.tpu.reset_metrics()
        result = case(i, "tpu")
        torch.tpu.synchronize()
        programs.append(torch.tpu.metrics()["programs"])
        assert torch.equal(result.cpu(), case(i, "cpu")), f"{name}, {i}"
    assert sum(programs[2:]) == 0, f"{name}: {programs} programs"


def test_offsets_that_stay_are_constants(fused):
    """A fixed loop has the form without operands, also after other offsets came by."""
    x = source("tpu")
    torch.tpu.synchronize()
    torch.tpu.reset_metrics()
    for i in (0, 3, 5, 0, 0):
        y = x[i : i + 2] * 3
        torch.tpu.synchronize()
    assert torch.tpu.metrics()["programs"] == 2
    inputs = [graph.inputs for graph in torch.tpu.graphs()[-2:]]
    assert inputs == [["float32[40, 10]", "int64[]"], ["float32[40, 10]", "int64[]", "int64[1]"]], y


# Rows: where is written, and from where; the programs that it makes, and the numbers that the program takes.
MOVES = [
    ((2, 1, 0), 1, 0),
    ((3, 2, 1), 1, 1),
    ((39, 38, 37), 0, 1),
    ((6, 5, 1), 1, 2),  # the last goes its own way
    ((9, 8, 0), 0, 2),
    ((5, 4, 5), 0, 2),
    ((4, 9, 7), 1, 3),  # so does another
    ((0, 0, 0), 0, 3),
    ((7, 39, 6), 0, 3),
    ((2, 1, 0), 0, 0),
]


def test_offsets_that_keep_their_distance_are_one_number(fused):
    x, want = source("tpu"), source("cpu")
    torch.tpu.synchronize()
    for (to, near, far), new, numbers in MOVES:
        torch.tpu.reset_metrics()
        for y in (x, want):
            y[to] = y[near] * 0.5 + y[far]
        torch.tpu.synchronize()
        assert torch.tpu.metrics()["programs"] == new, (to, near, far)
        assert torch.equal(x.cpu(), want), (to, near, far)
        if new:
            graph = torch.tpu.graphs()[-1]
            assert graph.inputs[2:] == [f"int64[{numbers}]"] * (numbers > 0)
            # Rows that are known to be others are written in place.
            in_place = torch.tpu.platform() == "cpu" and numbers > 1
            assert graph.stablehlo.count("stablehlo.while") == in_place
    assert "offsets that had kept their distance" in torch.tpu.explain(last=1)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.select_scatter(x[0], 0, 40),
        lambda x: x.select_scatter(x[0], 0, -41),
        lambda x: x.slice_scatter(x[:5], 0, 38, 43),
        lambda x: x.slice_scatter(x[:5], 0, 0, 10, 0),
        lambda x: x.kthvalue(11, 1),
        lambda x: x.kthvalue(0, 1),
    ],
)
def test_offsets_out_of_range_are_refused_also_as_operands(call):
    for i in range(3):
        for name in ("select_scatter", "slice_scatter", "kthvalue"):
            CASES[name](i, "tpu").cpu()
    with pytest.raises((RuntimeError, IndexError)) as expected:
        call(source("cpu"))
    with pytest.raises(expected.type) as got:
        call(source("tpu"))
    assert str(expected.value).splitlines()[0] in str(got.value)


def programs_of(rounds):
    """Programs that each round makes."""
    made = []
    for one in rounds:
        before = torch.tpu.metrics()["programs"]
        one()
        made.append(torch.tpu.metrics()["programs"] - before)
    return made


class WordModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.rnn, self.out = nn.Embedding(50, 16), nn.RNN(16, 16), nn.Linear(16, 50)

    def forward(self, tokens, hidden):
        x, hidden = self.rnn(self.embedding(tokens), hidden)
        return self.out(x).view(-1, 50), hidden


def test_a_language_model_that_cuts_its_batches(fused):
    """As in the word_language_model of PyTorch's examples."""
    torch.manual_seed(0)
    model, bptt = WordModel().to("tpu"), 5
    text = torch.randint(0, 50, (101, 4), device="tpu")
    hidden, losses = torch.zeros(1, 4, 16, device="tpu"), []

    def step(i):
        nonlocal hidden
        data, target = text[i : i + bptt], text[i + 1 : i + 1 + bptt].view(-1)
        model.zero_grad()
        hidden = hidden.detach()
        output, hidden = model(data, hidden)
        loss = nn.functional.cross_entropy(output, target)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-1.0)
        losses.append(loss.item())

    made = programs_of([lambda i=i: step(i) for i in range(0, 100, bptt)])
    assert sum(made[4:]) == 0, made
    assert losses[-1] < losses[0]


def test_time_steps_micro_batches_and_a_cache(fused):
    x = torch.randn(20, 3, 8, device="tpu")
    cell = nn.LSTMCell(8, 8).to("tpu")

    def walk():
        h = c = torch.zeros(3, 8, device="tpu")
        made = []
        for t in range(20):
            before = torch.tpu.metrics()["programs"]
            h, c = cell(x[t], (h, c))
            torch.tpu.synchronize()
            made.append(torch.tpu.metrics()["programs"] - before)
        return made

    assert sum(walk()[3:]) == 0

    model = nn.Linear(8, 2).to("tpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randn(64, 8, device="tpu")

    def accumulate():
        optimizer.zero_grad()
        for k in range(4):
            model(data[k * 16 : (k + 1) * 16]).square().mean().backward()
        optimizer.step()

    assert sum(programs_of([accumulate] * 5)[2:]) == 0

    kv, made = torch.zeros(2, 4, 32, 8, device="tpu"), []
    for t in range(10):
        before = torch.tpu.metrics()["programs"]
        kv[:, :, t] = torch.randn(2, 4, 8, device="tpu")
        seen = torch.arange(32, device="tpu") <= t
        score = (kv * kv[:, :, t : t + 1]).sum(-1).masked_fill(~seen, float("-inf")).softmax(-1)
        torch.tpu.synchronize()
        made.append(torch.tpu.metrics()["programs"] - before)
    assert sum(made[3:]) == 0, (made, score)
