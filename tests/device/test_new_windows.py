"""A line whose windows are other ones each time, made of the same operations, shares their programs."""

import copy
import itertools
import random

import torch
from torch import nn
from torch.func import vmap


def made(run):
    """How many programs it makes."""
    before = torch.tpu.metrics()["programs"]
    run()
    return torch.tpu.metrics()["programs"] - before


def head(x, weight, bias, scale, shift, end):
    return (torch.tanh(x @ weight + bias) * scale + shift).softmax(-1) - end


def test_each_way_to_map_arguments(fused):
    torch.manual_seed(0)
    whole = [*torch.randn(2, 3, 4, 4), *torch.randn(4, 3, 4)]

    def run(device, mapped):
        own = [x.to(device) if m else x[0].to(device) for x, m in zip(whole, mapped, strict=True)]
        return vmap(head, in_dims=tuple(0 if m else None for m in mapped))(*own).cpu()

    ways = list(itertools.product((True, False), repeat=6))[:-1]
    expected = [run("cpu", way) for way in ways]
    got, programs = [], []
    for way in ways:
        programs.append(made(lambda way=way: got.append(run("tpu", way))))
    torch.testing.assert_close(got, expected)
    assert sum(programs[32:]) <= 12, programs


class Tree(nn.Module):
    """A net with the structure of its input: a number is a leaf, a pair are two branches."""

    def __init__(self):
        super().__init__()
        self.leaves = nn.Parameter(torch.randn(9, 6))
        self.join = nn.Linear(12, 6)
        self.out = nn.Linear(6, 1)

    def state(self, tree):
        if isinstance(tree, int):
            return self.leaves[tree]
        return torch.tanh(self.join(torch.cat([self.state(branch) for branch in tree])))

    def forward(self, tree):
        return self.out(self.state(tree)).square().sum()


def trees(count):
    choose = random.Random(0)
    for _ in range(count):
        nodes = list(range(9))
        while len(nodes) > 1:
            at = choose.randrange(len(nodes) - 1)
            nodes[at : at + 2] = [(nodes[at], nodes[at + 1])]
        yield nodes[0]


def train(model):
    """Its losses, and how many programs each step made."""
    optimizer, losses, programs = torch.optim.SGD(model.parameters(), lr=0.01), [], []
    for tree in trees(20):

        def step(tree=tree):
            optimizer.zero_grad()
            loss = model(tree)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())

        programs.append(made(step))
    return losses, programs


def test_a_net_with_the_structure_of_its_input(fused):
    torch.manual_seed(0)
    model = Tree()
    own = copy.deepcopy(model).to("tpu")
    expected, _ = train(model)
    losses, programs = train(own)
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)
    for mine, other in zip(own.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine.detach().cpu(), other.detach(), rtol=1e-3, atol=1e-5)
    assert sum(programs[14:]) <= 2, programs
