"""A window that is new in part compiles what is new, and reading compiles nothing."""

import copy
import io

import pytest
import torch
from support import NewGraphs
from torch import nn


def train(steps, device, between):
    """Trains with something else in between; the losses, the weights, and the programs that each step made."""
    torch.manual_seed(0)
    layers = [m for _ in range(4) for m in (nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(16, 3)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x, y = torch.randn(8, 16).to(device), torch.randint(0, 3, (8,)).to(device)
    losses, made, kept = [], [], []
    for step in range(steps):
        before = torch.tpu.metrics()["programs"]
        kept.append(between(step, model, optimizer, x))
        between_programs = torch.tpu.metrics()["programs"] - before
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        made.append(torch.tpu.metrics()["programs"] - before - between_programs)
    return [loss.item() for loss in losses], [p.detach().cpu() for p in model.parameters()], made, kept


def save(step, model, optimizer, x):
    if step == 4:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, io.BytesIO())


def snapshot(step, model, optimizer, x):
    """The copy shares the weights' values, which the step must not overwrite."""
    return copy.deepcopy(model) if step == 4 else None


def evaluate(step, model, optimizer, x):
    if step == 4:
        model.eval()
        with torch.no_grad():
            model(x).argmax(1).float().mean().item()
        model.train()


@pytest.mark.parametrize("between", [save, snapshot, evaluate], ids=lambda f: f.__name__)
def test_something_in_the_middle_of_training_makes_no_second_step(between, fused):
    expected = train(8, "cpu", between)
    got = train(8, "tpu", between)
    assert sum(got[2][2:]) == 0, got[2]
    torch.testing.assert_close(got[0], expected[0], rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(got[1], expected[1], rtol=1e-3, atol=1e-4)
    for mine, theirs in zip(got[3], expected[3], strict=True):
        if mine is not None:
            copies = [[p.detach().cpu() for p in m.parameters()] for m in (mine, theirs)]
            torch.testing.assert_close(*copies, rtol=1e-3, atol=1e-4)


def generate(device, tokens):
    """A model of one size between bookkeeping that grows, ended by a read, as `generate()` has it."""
    torch.manual_seed(0)
    embedding = nn.Embedding(20, 8).to(device)
    block = nn.Sequential(*[m for _ in range(12) for m in (nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh())]).to(device)
    ids, large = torch.tensor([[3]]).to(device), []
    new = NewGraphs()
    with torch.no_grad():
        for _ in range(tokens):
            hidden = embedding(ids[:, -1])
            for _ in range(2):
                hidden = block(hidden) + hidden
            ids = torch.cat([ids, (hidden @ embedding.weight.t()).argmax(-1, keepdim=True)], dim=1)
            if (ids == 99).any().item():
                break
            large.append(sum(len(graph.ops) >= 32 for graph in new.take()))
    return ids.cpu(), large


def test_what_grows_around_a_model_does_not_compile_the_model(fused):
    expected, _ = generate("cpu", 8)
    ids, large = generate("tpu", 8)
    assert torch.equal(ids, expected)
    assert sum(large[4:]) == 0, large  # the third size makes a program for those that follow
    assert torch.tpu.metrics()["splits"] > 0
    programs = torch.tpu.metrics()["programs"]
    assert torch.equal(generate("tpu", 8)[0], expected)
    assert torch.tpu.metrics()["programs"] == programs, "the same lengths again"


def backward_through_time(cell, x):
    h = c = torch.zeros(x.shape[1], cell.hidden_size, device=x.device)
    outputs = []
    for step in x:
        h, c = cell(step, (h, c))
        outputs.append(h)
    torch.stack(outputs).square().sum().backward()


def test_a_long_window_is_cut_where_it_repeats(fused):
    torch.manual_seed(0)
    cell, x = nn.LSTMCell(4, 8), torch.randn(120, 2, 4)
    backward_through_time(cell, x)
    expected = [p.grad.clone() for p in cell.parameters()]
    cell.zero_grad()
    cell, x = cell.to("tpu"), x.to("tpu")
    new = NewGraphs()
    torch.tpu.reset_metrics()
    backward_through_time(cell, x)
    graphs = new.take()
    # Of both passes one part serves all repetitions.
    assert sum(len(g.ops) for g in graphs) < 0.85 * torch.tpu.metrics()["ops"]
    assert max(len(g.ops) for g in graphs) <= 640
    got = [p.grad.cpu() for p in cell.parameters()]
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_reading_compiles_nothing(fused):
    x = torch.randn(6, 8, device="tpu", dtype=torch.complex64)
    flags = torch.arange(48, device="tpu").reshape(6, 8) % 3 == 0
    torch.tpu.synchronize()
    views = [x, x[2:4], x[:, 3], x.t(), x[1, 2], x.real, x.view(-1).view(torch.int32)[5:9], flags[1:, ::3]]
    with torch.tpu.max_graphs(0):
        got = [v.cpu() for v in views]
        torch.save({"x": x, "view": x[2:4]}, io.BytesIO())
        text = str(flags), flags[3].tolist(), x[5, 7].item()
    x, flags = x.cpu(), flags.cpu()
    views = [x, x[2:4], x[:, 3], x.t(), x[1, 2], x.real, x.view(-1).view(torch.int32)[5:9], flags[1:, ::3]]
    for mine, theirs in zip(got, views, strict=True):
        assert torch.equal(mine, theirs)
    assert text[1:] == (flags[3].tolist(), x[5, 7].item()) and "True" in text[0]
