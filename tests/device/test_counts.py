"""Sizes that follow from values, as the number of elements that a mask selects: one program for each bound of them, and
the CPU's values."""

import pytest
import torch
import torch.nn.functional as F
from support import DEVICE, assert_same
from torch import nn


def mask_of(count: int, n: int) -> torch.Tensor:
    """So many of `n`, in some order."""
    mask = torch.zeros(n, dtype=torch.bool)
    mask[torch.randperm(n)[:count]] = True
    return mask


def compare(f, calls: list, known: int, most: int) -> None:
    """Runs `f` on the CPU and on the device for all calls; after the first `known` there are at most so many programs."""
    for number, args in enumerate(calls):
        if number == known:
            torch.tpu.synchronize()
            before = torch.tpu.metrics()["programs"]
        want = f(*args)
        got = f(*(a.to(DEVICE) if isinstance(a, torch.Tensor) else a for a in args))
        for g, w in zip(got, want, strict=True):
            assert_same(g, w, f"call {number}", strides=w.numel() > 1, rtol=1e-4, atol=1e-5)
    torch.tpu.synchronize()
    made = torch.tpu.metrics()["programs"] - before
    assert made <= most, f"{made} programs\n{torch.tpu.explain(made)}"


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.hidden, self.out = nn.Embedding(50, 16), nn.Linear(16, 16), nn.Linear(16, 50)

    def forward(self, tokens):
        return self.out(F.gelu(self.hidden(self.token(tokens))))


def test_a_loss_over_masked_tokens_is_a_program_for_each_bucket(fused):
    torch.manual_seed(0)
    on_cpu = Tagger()
    model = Tagger().to(DEVICE)
    model.load_state_dict(on_cpu.state_dict())
    both = [(m, torch.optim.AdamW(m.parameters(), lr=1e-2)) for m in (on_cpu, model)]
    tokens = torch.randint(50, (4, 32))
    labels = torch.randint(50, (4, 32))
    made = []
    for count in (20, 25, 18, 30, 27, 60, 50, 40):
        mask = mask_of(count, 128).view(4, 32)
        before = torch.tpu.metrics()["programs"]
        losses = []
        for m, optimizer in both:
            where = mask.to(next(m.parameters()).device)
            logits = m(tokens.to(where.device))
            loss = F.cross_entropy(logits[where], labels.to(where.device)[where])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        assert_same(losses[1], losses[0], rtol=1e-4, atol=1e-5)
        made.append(torch.tpu.metrics()["programs"] - before)
    assert "for all sizes below 32 that follow from values" in torch.tpu.explain()
    assert made[4] == 0 and made[6:] == [0, 0], made
    for a, b in zip(on_cpu.parameters(), model.parameters(), strict=True):
        assert_same(b, a, rtol=1e-3, atol=1e-3)


def boxes(scores, corners):
    kept = corners[scores > 0.5]
    area = (kept[:, 2] - kept[:, 0]) * (kept[:, 3] - kept[:, 1])
    return kept * 2, area, (kept.T @ kept), area.sum()


def edges(x, mask, weight):
    at = torch.nonzero(mask).squeeze(1)
    rows = x[at] @ weight
    out = torch.zeros_like(x).index_add_(0, at, rows)
    return out, rows.relu(), torch.where(mask)[0]


def written(x, mask, _):
    y = x.clone()
    y[mask] = y[mask] * 2 + 1
    z = x.clone()
    z[mask] = 7
    return y, z, torch.masked_select(x, mask[:, None]).exp()


def pairwise(x, mask, weight):
    rows = (x[mask] @ weight).requires_grad_()
    scores = torch.softmax(rows @ rows.T, -1)
    (grad,) = torch.autograd.grad((scores @ rows).square().mean(), rows)
    return scores.detach(), grad, rows.detach().sort(0).values, rows.detach().mean(0)


CASES = {f.__name__: f for f in (boxes, edges, written, pairwise)}


@pytest.mark.parametrize("name", CASES)
def test_what_a_mask_selects_has_a_program_for_each_bucket(name, fused):
    torch.manual_seed(1)
    x, weight = torch.randn(90, 4), torch.randn(4, 4)
    counts = [20, 25, 18, 30, 27, 22, 19, 0, 1, 90]
    masks = [mask_of(count, 90) for count in counts]
    calls = [(mask.float(), x) if name == "boxes" else (x, mask, weight) for mask in masks]
    compare(CASES[name], calls[:7], 3, 0)
    compare(CASES[name], calls[7:], 0, 60)


def test_two_masks_of_other_counts(fused):
    torch.manual_seed(2)
    x = torch.randn(97, 4)

    def f(x, a, b):
        first, second = x[a], x[b]
        return torch.cat([first, second]).softmax(0), first @ second.T, second.exp()

    # With two counts that are one at first, that are one later, and that are in two buckets.
    pairs = [(21, 21), (20, 40), (25, 50), (18, 35), (30, 60), (22, 41), (19, 19), (28, 62), (17, 35)]
    compare(f, [(x, mask_of(a, 97), mask_of(b, 97)) for a, b in pairs], 4, 2)


def test_sizes_that_were_read_have_a_program_for_each_bucket(fused):
    torch.manual_seed(3)
    x, weight = torch.randn(5, 90, 4), torch.randn(4, 4)

    def trimmed(x, mask, weight):
        n = int(mask.sum())
        own = (x[:, :n] @ weight).requires_grad_()
        loss = own.relu().mean() + own[:, -1].sum()
        loss.backward()
        return loss.detach(), own.grad, own.detach().softmax(1), x[0, :n].exp()

    counts = [20, 25, 18, 30, 22, 70, 80, 75, 89, 90, 1, 0]
    calls = [(x, mask_of(count, 90), weight) for count in counts]
    compare(trimmed, calls[:5], 2, 1)
    compare(trimmed, calls[5:8], 1, 1)
    compare(trimmed, calls[8:11], 0, 20)


def test_a_size_that_is_by_chance_one_that_was_read_has_its_own_program(fused):
    """Sizes follow from values by the operations between, and not because two numbers are the same."""
    torch.manual_seed(4)
    x, weight = torch.randn(90, 4), torch.randn(4, 4)

    def gradient(batch, weight):
        rows = (batch @ weight).requires_grad_()
        (rows.softmax(0) @ weight).square().mean().backward()
        return rows.grad

    sizes = (25, 20, 18)
    batches = [(x[:n].to(DEVICE), weight.to(DEVICE)) for n in sizes]
    for n in sizes:
        assert len(torch.nonzero(mask_of(n, 90).to(DEVICE))) == n
    before = torch.tpu.metrics()["programs"]
    for n, batch in zip(sizes, batches, strict=True):
        assert_same(gradient(*batch), gradient(x[:n], weight), rtol=1e-4, atol=1e-5)
    made = torch.tpu.metrics()["programs"] - before
    assert made >= len(sizes), "one of its own for each size"
    assert "follow from values" not in torch.tpu.explain(made)


def test_experts_that_take_what_a_router_gives_them(fused):
    """Each round has other sizes, and so a window that is new; one that a program for many sizes serves is none."""

    def losses(device):
        torch.manual_seed(0)
        gate, experts = nn.Linear(6, 4), nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        model = nn.ModuleList([gate, experts]).to(device)
        opt = torch.optim.SGD(model.parameters(), 0.01)
        generator = torch.Generator().manual_seed(1)
        for _ in range(14):
            x = torch.randn(64, 6, generator=generator).to(device)
            weights, chosen = F.softmax(gate(x), -1).topk(2, -1)
            out, masks = torch.zeros_like(x), F.one_hot(chosen, 4).permute(2, 1, 0)
            for mask, expert in zip(masks, experts, strict=True):
                place, token = torch.where(mask)
                out.index_add_(0, token, torch.tanh(expert(x[token])) * weights[token, place, None])
            loss = out.square().mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            yield loss.item(), torch.tpu.metrics()["programs"]

    (want, _), (got, programs) = (zip(*losses(device), strict=True) for device in ("cpu", DEVICE))
    torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=1e-4, atol=1e-5)
    made = programs[-1] - programs[8]
    assert made <= 5, f"{made} programs from the tenth round on\n{torch.tpu.explain(made)}"


def test_many_sizes_in_one_window_are_cut_by_size(fused):
    """The backward of two layers of experts works with 12 sizes: a program for each bound of each, and none for all together."""

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(10, 6)
            self.experts = nn.ModuleList(
                nn.Sequential(nn.Linear(10, 14), nn.GELU(), nn.Linear(14, 10)) for _ in range(6)
            )

        def forward(self, x):
            weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
            out = torch.zeros_like(x)
            for e, expert in enumerate(self.experts):
                token, place = torch.where(chosen == e)
                out.index_add_(0, token, expert(x[token]) * weights[token, place, None])
            return x + out

    def losses(device):
        torch.manual_seed(0)
        model = nn.Sequential(Experts(), Experts()).to(device)
        opt = torch.optim.AdamW(model.parameters(), 0.01)
        generator = torch.Generator().manual_seed(1)
        for _ in range(14):
            loss = model(torch.randn(96, 10, generator=generator).to(device)).square().mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            yield loss.item(), torch.tpu.metrics()["programs"]

    (want, _), (got, programs) = (zip(*losses(device), strict=True) for device in ("cpu", DEVICE))
    torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=1e-4, atol=1e-5)
    made = programs[-1] - programs[7]
    assert made <= 12, f"{made} programs from the ninth round on\n{torch.tpu.explain(made)}"


def graph_losses(device, batches):
    """Messages along the edges of a batch of graphs; `bincount` reads how many graphs there are, the same number each time."""
    torch.manual_seed(0)
    node, edge, out = (nn.Linear(*size).to(device) for size in ((5, 12), (27, 12), (12, 3)))
    opt = torch.optim.AdamW([p for layer in (node, edge, out) for p in layer.parameters()], 0.01)
    for x, (source, target), of_edge, graph, label in batches:
        x, source, target, of_edge, graph = (t.to(device) for t in (x, source, target, of_edge, graph))
        h = node(x).tanh()
        message = edge(torch.cat([h[source], h[target], of_edge], 1))
        h = h + torch.zeros_like(h).index_add(0, target, message)
        number = torch.bincount(graph, minlength=4).clamp(min=1)[:, None]
        mean = torch.zeros(4, 12, device=device).index_add(0, graph, h) / number
        loss = F.cross_entropy(out(mean), label.to(device))
        opt.zero_grad()
        loss.backward()
        opt.step()
        yield loss.item(), torch.tpu.metrics()["programs"]


def test_a_size_that_is_read_and_stays_the_same_cuts_nothing(fused):
    g = torch.Generator().manual_seed(2)
    batches = []
    for _ in range(26):
        nodes, edges = (int(torch.randint(least, most, (), generator=g)) for least, most in ((20, 60), (50, 120)))
        of = torch.arange(nodes) * 4 // nodes
        ends = torch.randint(nodes, (2, edges), generator=g)
        values = torch.randn(nodes, 5, generator=g), ends, torch.randn(edges, 3, generator=g)
        batches.append((*values, of, torch.randint(3, (4,), generator=g)))
    (want, _), (got, programs) = (zip(*graph_losses(d, batches), strict=True) for d in ("cpu", DEVICE))
    torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=1e-4, atol=1e-5)
    made = programs[-1] - programs[7]
    assert made <= 10, f"{made} programs from the ninth round on\n{torch.tpu.explain(made)}"


def sampled_losses(device, images):
    """What detectors do with the boxes of an image: each place is given one of them, some places are drawn, and what is
    predicted there is compared with what should be."""
    torch.manual_seed(0)
    head = nn.Linear(7, 6).to(device)
    opt = torch.optim.SGD(head.parameters(), 0.1)
    places = torch.rand(90, 4, generator=torch.Generator().manual_seed(5)).to(device)
    for number, boxes in enumerate(images):
        torch.manual_seed(number)
        features = torch.randn(90, 7).to(device)
        boxes = boxes.to(device)
        distance = (boxes[:, None, :2] - places[None, :, :2]).square().sum(2)
        least, which = distance.min(0)
        label = (least < 0.02).long()
        found, other = torch.where(label == 1)[0], torch.where(label == 0)[0]
        other = other[: 40 - len(found)] if len(found) < 30 else other[:10]
        out = head(features)
        moved = F.smooth_l1_loss(out[found, 2:], boxes[which[found]], reduction="sum") / 40
        drawn = torch.cat([found, other])
        loss = moved + F.cross_entropy(out[drawn, :2], label[drawn])
        opt.zero_grad()
        loss.backward()
        opt.step()
        yield loss.item(), torch.tpu.metrics()["programs"]


def test_boxes_of_images(fused):
    """The number of boxes is a size of what is copied from the host, another one for each image."""
    generator = torch.Generator().manual_seed(3)
    numbers = torch.randint(2, 30, (30,), generator=generator).tolist()
    images = [torch.rand(n, 4, generator=generator) for n in numbers]
    (want, _), (got, programs) = (zip(*sampled_losses(d, images), strict=True) for d in ("cpu", DEVICE))
    torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=1e-4, atol=1e-4)
    made = programs[-1] - programs[21]
    assert made <= 24, f"{made} programs for the last eight images\n{torch.tpu.explain(made)}"


def test_lengths_of_training_have_programs_of_their_own_until_they_are_many(fused):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 12), nn.GELU(), nn.Linear(12, 50)).to(DEVICE)
    on_cpu = nn.Sequential(nn.Embedding(50, 12), nn.GELU(), nn.Linear(12, 50))
    on_cpu.load_state_dict(model.state_dict())
    made = []
    for length in [*range(17, 33, 2), 18, 20, 22, 24, 26, 28, 19]:
        tokens = torch.randint(50, (3, length))
        before, losses = torch.tpu.metrics()["programs"], []
        for m, device in ((on_cpu, "cpu"), (model, DEVICE)):
            m.zero_grad()
            loss = F.cross_entropy(m(tokens.to(device)).flatten(0, 1), tokens.flip(1).to(device).flatten())
            loss.backward()
            losses.append(loss.detach())
        assert_same(losses[1], losses[0], rtol=1e-4, atol=1e-5)
        assert_same(model[2].weight.grad, on_cpu[2].weight.grad, rtol=1e-3, atol=1e-5)
        made.append(torch.tpu.metrics()["programs"] - before)
    assert all(made[:8]) and sum(made[10:]) <= 2, made
