"""Loops in programs for all sizes up to a bound: recurrent nets and scans over lengths that vary."""

import copy

import pytest
import torch
import torch.nn.functional as F
from support import DEVICE, assert_same
from torch import nn
from torch.tpu import Dim


def programs():
    return torch.tpu.metrics()["programs"]


def check(actual, expected, what=""):
    assert_same(actual, expected, what, strides=False, rtol=1e-4, atol=1e-5)


NETS = {
    "lstm": (nn.LSTM(6, 8), {0}),
    "gru": (nn.GRU(6, 8, bidirectional=True), {0, 1}),
    "rnn": (nn.RNN(6, 8, 2), {0}),
    "batch first": (nn.LSTM(6, 8, batch_first=True, bias=False), {1}),
    "the batch alone": (nn.LSTM(6, 8, proj_size=3), {1}),
}


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("name", NETS)
def test_recurrent_nets_over_lengths_that_vary(name, fused):
    net, dims = NETS[name]
    torch.manual_seed(0)
    reference = copy.deepcopy(net)
    model = copy.deepcopy(reference).to(DEVICE)

    def step_of(model):
        def step(x):
            model.zero_grad()
            output, last = model(x)
            last = last if isinstance(last, tuple) else (last,)
            (output.square().mean() + sum(h.sum() for h in last)).backward()
            return [output.detach(), *(h.detach() for h in last), *(p.grad for p in model.parameters())]

        return step

    f = torch.tpu.jit(step_of(model), dynamic={"x": {d: Dim(buckets=[16]) for d in dims}})
    expected = step_of(reference)
    before = programs()
    for n in (5, 16, 9, 3):
        shape = [4, 3, 6]
        for i, d in enumerate(sorted(dims)):
            shape[d] = n + 2 * i if n < 9 else n - 2 * i
        x = torch.randn(shape)
        for i, (a, e) in enumerate(zip(f(x.to(DEVICE)), expected(x), strict=True)):
            check(a, e, f"{i} of {shape}")
    # That of the first call, which finds out which gradients there are; and if two sizes vary, one more where both are
    # the same numbers.
    assert programs() - before <= 1 + len(dims)


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("name", NETS)
def test_recurrent_nets_in_compiled_graphs(name, fused):
    """Where Dynamo is told to take them in: one graph, and a program for all lengths forward, and one backward."""
    net, dims = NETS[name]
    torch.manual_seed(0)
    reference = copy.deepcopy(net)
    model = copy.deepcopy(reference).to(DEVICE)

    def loss_of(model):
        def loss(x):
            output, last = model(x)
            return output.square().mean() + sum(h.sum() for h in (last if isinstance(last, tuple) else (last,)))

        return loss

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    f, expected = torch.compile(loss_of(model), backend="tpu", dynamic=True, fullgraph=True), loss_of(reference)
    made = []
    with torch._dynamo.config.patch(allow_rnn=True):
        for n in (9, 14, 16, 11, 10):
            shape = [4, 3, 6]
            for i, d in enumerate(sorted(dims)):
                shape[d] = n - i
            x, before = torch.randn(shape), programs()
            a, e = f(x.to(DEVICE)), expected(x)
            check(a, e, str(shape))
            of_model, of_reference = list(model.parameters()), list(reference.parameters())
            grads = torch.autograd.grad(a, of_model), torch.autograd.grad(e, of_reference)
            for p, q in zip(*grads, strict=True):
                check(p, q, str(shape))
            made.append(programs() - before)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    # The first size is no reason to think that others come. If two vary, there is one more where both are the same.
    assert sum(made[1:]) <= 2 * (1 + len(dims)) and not any(made[3:]), made


def scanned(x):
    def step(carry, x):
        carry = carry * 0.5 + x
        return carry, carry * x

    return torch._higher_order_ops.scan(step, torch.zeros_like(x[0]), x)


def mapped(x):
    return (torch._higher_order_ops.map(lambda row: row.softmax(0) * 2, x),)


def counted(x):
    def more(n, y):
        return n < x.shape[0]

    return torch._higher_order_ops.while_loop(
        more, lambda n, y: (n + 1, y * 1.1), (torch.zeros((), device=x.device), x)
    )


def chosen(x):
    return (torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x.cumsum(0), (x,)),)


@pytest.mark.parametrize("function", [scanned, mapped, counted, chosen], ids=lambda f: f.__name__)
def test_loops_and_branches_over_sizes_that_vary(function, fused):
    torch.manual_seed(0)
    f = torch.tpu.jit(lambda x: [t.clone() for t in function(x)], dynamic={"x": {0: Dim(buckets=[16])}})
    before = programs()
    for n in (5, 16, 9, 12):
        x = torch.randn(n, 4)
        for i, (a, e) in enumerate(zip(f(x.to(DEVICE)), function(x), strict=True)):
            check(a, e, f"{i} of {n}")
    assert programs() - before == 1


class LanguageModel(nn.Module):
    """As PyTorch's example `word_language_model` has it."""

    def __init__(self, tokens=40, width=16):
        super().__init__()
        self.encoder, self.rnn, self.decoder = (
            nn.Embedding(tokens, width),
            nn.LSTM(width, width),
            nn.Linear(width, tokens),
        )

    def forward(self, tokens, hidden):
        output, hidden = self.rnn(self.encoder(tokens), hidden)
        return F.log_softmax(self.decoder(output).flatten(0, 1), dim=1), hidden


def test_a_language_model_over_lengths_that_vary(fused):
    torch.manual_seed(0)
    reference = LanguageModel()
    model = copy.deepcopy(reference).to(DEVICE)

    def step_of(model):
        def step(tokens, targets, hidden, rate):
            model.zero_grad()
            output, hidden = model(tokens, tuple(h.detach() for h in hidden))
            loss = F.nll_loss(output, targets)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(p.grad, alpha=-rate)
            return loss.detach(), tuple(h.detach() for h in hidden)

        return step

    size = Dim(buckets=[8, 16])
    f = torch.tpu.jit(step_of(model), dynamic={"tokens": {0: size}, "targets": {0: Dim(buckets=[32, 64])}})
    expected = step_of(reference)
    hidden = (torch.zeros(1, 4, 16), torch.zeros(1, 4, 16))
    states = [hidden, tuple(h.to(DEVICE) for h in hidden)]
    before = []
    for n in (7, 8, 12, 16, 5, 13, 9, 6, 11):
        known = programs()
        tokens, targets = torch.randint(40, (n, 4)), torch.randint(40, (n * 4,))
        wanted, states[0] = expected(tokens, targets, states[0], 1.0)
        loss, states[1] = f(tokens.to(DEVICE), targets.to(DEVICE), states[1], 1.0)
        check(loss, wanted, str(n))
        before.append(programs() - known)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        check(p.detach(), q.detach())
    # The first call, which makes gradients, and one for each bound.
    assert sum(before) <= 3 and not any(before[3:]), before
